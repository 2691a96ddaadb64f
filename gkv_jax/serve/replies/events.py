"""Server-sent events: an answer's pieces as they come, to their end or to an error."""

import contextlib
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from gkv_jax.request import Piece, Result
from gkv_jax.serve.errors import ApiError, log_failure
from gkv_jax.serve.generation import Answer

Event = dict[str, str]

SLOW_READER_S = 60
"""How long a client may take no byte of its stream before it is given up."""


class Narrator(Protocol):
    """Tells an answer in the events of some API."""

    def opening(self) -> Iterable[Event]:
        """Before anything has come."""

    def piece(self, index: int, piece: Piece) -> Iterable[Event]:
        """A piece of an answer."""

    def end(self, index: int, result: Result) -> Iterable[Event]:
        """The end of an answer."""

    def closing(self, results: Sequence[Result]) -> Iterable[Event]:
        """After the end of all."""

    def failure(self, error: ApiError) -> Iterable[Event]:
        """Instead of all that has not been told yet."""


class EventStream(EventSourceResponse):
    """Gives up its answer if the client leaves, even before the first event was asked for."""

    def __init__(self, answer: Answer, narrator: Narrator) -> None:
        # Streams end because the engine does, with an error that says so; not before.
        super().__init__(
            _events(answer, narrator),
            sep="\n",
            shutdown_grace_period=math.inf,
            send_timeout=SLOW_READER_S,
        )
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.leave()
            scope.setdefault("state", {}).update(self._answer.token_counts)


async def _events(answer: Answer, narrator: Narrator) -> AsyncIterator[Event]:
    for event in narrator.opening():
        yield event
    try:
        async with contextlib.aclosing(answer.pieces()) as pieces:
            async for index, piece in pieces:
                for event in (
                    narrator.end(index, answer.requests[index].result())
                    if piece is None
                    else narrator.piece(index, piece)
                ):
                    yield event
    except ApiError as error:
        log_failure(error)
        for event in narrator.failure(error):
            yield event
        return
    for event in narrator.closing([request.result() for request in answer.requests]):
        yield event
