"""Server-sent events: an answer's pieces as they come, to their end or to an error."""

import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Protocol

from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from gkv_jax.request import Piece, Result
from gkv_jax.serve.errors import ApiError, internal_error, log_failure, note_error
from gkv_jax.serve.generation import Answer

SseEvent = dict[str, str]

SLOW_READER_S = 60
"""How long a client may take no byte of its stream before it is given up."""


class Narrator(Protocol):
    """Tells an answer in the events of some API."""

    def opening(self) -> Iterable[SseEvent]:
        """Before anything has come."""

    def piece(self, index: int, piece: Piece) -> Iterable[SseEvent]:
        """A piece of an answer."""

    def end(self, index: int, result: Result) -> Iterable[SseEvent]:
        """The end of an answer."""

    def closing(self, results: Sequence[Result]) -> Iterable[SseEvent]:
        """After the end of all."""

    def failure(self, error: ApiError) -> Iterable[SseEvent]:
        """Instead of all that has not been told yet."""


class EventStream(EventSourceResponse):
    """Gives up its answer if the client leaves, even before the first event was asked for."""

    def __init__(self, answer: Answer, narrator: Narrator) -> None:
        # Streams end because the engine does, with an error that says so; not before.
        super().__init__(
            self._events(),
            sep="\n",
            shutdown_grace_period=math.inf,
            send_timeout=SLOW_READER_S,
        )
        self._answer, self._narrator = answer, narrator
        self._error: ApiError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.leave()
            scope.setdefault("state", {}).update(self._answer.token_counts)
            if self._error is not None:  # the status was sent long before
                note_error(scope, self._error)

    async def _events(self) -> AsyncIterator[SseEvent]:
        try:
            async with contextlib.aclosing(self._told()) as told:
                async for event in told:
                    yield event
        except ApiError as error:
            log_failure(error)
            self._error = error
        except Exception as error:
            self._error = internal_error()
            self._error.__cause__ = error
            log_failure(self._error)
        if self._error is not None:
            for event in self._narrator.failure(self._error):
                yield event

    async def _told(self) -> AsyncGenerator[SseEvent, None]:
        answer, narrator = self._answer, self._narrator
        for event in narrator.opening():
            yield event
        async with contextlib.aclosing(answer.pieces()) as pieces:
            async for index, piece in pieces:
                for event in (
                    narrator.end(index, answer.requests[index].result())
                    if piece is None
                    else narrator.piece(index, piece)
                ):
                    yield event
        for event in narrator.closing([request.result() for request in answer.requests]):
            yield event
