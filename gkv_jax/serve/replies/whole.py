"""Answers that do not stream."""

from collections.abc import Callable

import anyio.to_thread
from pydantic import BaseModel
from starlette.responses import Response


async def whole(build: Callable[[], BaseModel]) -> Response:
    """Build and write an answer in a thread: the likelihoods of a long one take a while."""

    def write() -> str:
        return build().model_dump_json()

    return Response(await anyio.to_thread.run_sync(write), media_type="application/json")
