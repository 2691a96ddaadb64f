"""One request of the engine, awaited: the engine has its own thread, the server an event loop."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import fastapi

from gkv_jax.engine import Engine
from gkv_jax.request import Piece, Request, Result
from gkv_jax.sampling import Sampling
from grammar_host import Guide


async def pieces(engine: Engine, request: Request) -> AsyncGenerator[Piece, None]:
    """Submit a prepared request; its output as it comes, until it ends for whatever reason.

    Leaving early, by ``aclose`` or by cancellation, cancels the request. Waiting takes no thread.

    Raises:
      EngineClosedError: the engine is closed.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[Piece | None] = asyncio.Queue()

    def sink(piece: Piece | None) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody reads any more
            loop.call_soon_threadsafe(arrived.put_nowait, piece)

    request.sink = sink
    engine.submit(request)
    try:
        while (piece := await arrived.get()) is not None:
            yield piece
    finally:
        if request.finish_reason is None:
            request.cancel()


async def result(engine: Engine, request: Request, http: fastapi.Request) -> Result:
    """Submit a prepared request and wait for its end, which comes early if the client leaves.

    Raises:
      EngineClosedError: the engine is closed.
    """

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        request.cancel()

    watcher = asyncio.create_task(watch())
    try:
        async with contextlib.aclosing(pieces(engine, request)) as stream:
            async for _ in stream:
                pass
    finally:
        watcher.cancel()
    return request.result()


def warm_up(engine: Engine) -> None:
    """Compile the decode loop and prefill, and load the grammar engine, before clients come.

    Raises:
      Exception: whatever keeps this engine from serving.
    """
    engine.warm_up()
    (guided,) = engine.generate("Hello", guide=Guide.json(), sampling=Sampling(max_tokens=2))
    if guided.error is not None:
        raise guided.error
