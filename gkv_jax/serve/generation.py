"""Requests of the engine, awaited: the engine has its own thread, the server an event loop."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Sequence

import fastapi

from gkv_jax.engine import Engine
from gkv_jax.errors import UserError
from gkv_jax.request import Piece, Request, Result
from gkv_jax.sampling import Sampling
from gkv_jax.serve.errors import (
    ApiError,
    RequestTimeout,
    failed_generation,
    log_failure,
    logger,
)
from gkv_jax.serve.settings import Limits
from grammar_host import GrammarError, Guide, TokenizerError

OnEnd = Callable[[Request], None]
"""Told of each submitted request when it has ended, by the thread that feeds the device: it must be quick."""


class Answer:
    """Requests of the engine that answer one request of a client, side by side."""

    def __init__(
        self, engine: Engine, requests: Sequence[Request], on_end: OnEnd, seconds: float
    ) -> None:
        """Submit prepared requests, now.

        ``seconds`` is how long they may take. Waiting takes no thread. Whoever does not read ``pieces`` to
        its end calls ``leave``.

        Raises:
          EngineClosedError: the engine is closed.
        """
        self.requests = requests
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[tuple[int, Piece | None] | ApiError] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        for index, request in enumerate(requests):
            request.sink = self._sink(index, on_end)
        try:
            for request in requests:
                engine.submit(request)
        except BaseException:
            self.leave()
            for request in requests:
                if not request.submitted:
                    on_end(request)
            raise
        self._timer = self._loop.call_later(seconds, self._expire)

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece | None], None]:
        """What comes, with the index of its request, and None at the end of each.

        Leaving the generator early, by ``aclose`` or by cancellation, cancels what has not ended.

        Raises:
          ApiError: a request failed, and the others are cancelled; or the time is over, which is told at
            once, whatever the engine is about.
        """
        left = len(self.requests)
        try:
            while left:
                arrived = await self._arrived.get()
                if isinstance(arrived, ApiError):
                    raise arrived
                index, piece = arrived
                if piece is None:
                    left -= 1
                    self._check(self.requests[index])
                yield index, piece
        finally:
            self.leave()

    async def results(self, http: fastapi.Request) -> list[Result]:
        """All of it at the end, which comes early if the client leaves.

        Raises:
          ApiError: a request failed, or the client left.
        """

        async def watch() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            self.leave()

        watcher = asyncio.create_task(watch())
        try:
            async with contextlib.aclosing(self.pieces()) as pieces:
                async for _ in pieces:
                    pass
        except ApiError as error:
            log_failure(error)
            raise
        finally:
            watcher.cancel()
            http.scope.setdefault("state", {}).update(self.token_counts)
        return [request.result() for request in self.requests]

    @property
    def token_counts(self) -> dict[str, int]:
        """Tokens read and written so far, for the log."""
        return {
            "prompt_tokens": sum(len(request.prompt) for request in self.requests),
            "completion_tokens": sum(len(request.tokens) for request in self.requests),
        }

    def leave(self) -> None:
        """Nobody waits for the rest: cancel what has not ended."""
        if self._timer is not None:
            self._timer.cancel()
        for request in self.requests:
            if request.finish_reason is None:
                request.cancel()

    def _sink(self, index: int, on_end: OnEnd) -> Callable[[Piece | None], None]:
        def sink(piece: Piece | None) -> None:
            try:
                if piece is None:
                    on_end(self.requests[index])
            finally:  # the client learns in any case
                with contextlib.suppress(
                    RuntimeError
                ):  # the event loop is closed: nobody reads any more
                    self._loop.call_soon_threadsafe(self._arrived.put_nowait, (index, piece))

        return sink

    def _expire(self) -> None:
        message = f"the answer was not complete after {self._seconds:g} s; ask for fewer tokens or more time"
        error = RequestTimeout(message)
        unfinished = [request for request in self.requests if request.finish_reason is None]
        for request in unfinished:
            request.cancel(error)
        if unfinished:
            # The engine sees it between two steps, or when it has read a prompt: the client need not wait.
            self._arrived.put_nowait(failed_generation(error))

    @staticmethod
    def _check(request: Request) -> None:
        if request.finish_reason == "error":
            raise failed_generation(request.error) from request.error


def warm_up(engine: Engine, limits: Limits) -> None:
    """Compile the decode loop and prefill, and load the grammar engine, before clients come.

    A score policy reads a long prompt in one piece: each size up to the longest prompt that the limits
    allow is a program of its own. Where the tokenizer cannot be used for guided decoding, free text is
    served nevertheless.

    Raises:
      Exception: whatever keeps this engine from serving.
    """
    longest = min(limits.prompt_tokens, engine.model.max_positions)
    # Its worker process starts on another core meanwhile; an error comes again below.
    threading.Thread(target=_start_compiler, args=(engine,), name="gkv-compiler-start").start()
    engine.warm_up(longest if engine.spec.selects(longest - 1) else None)
    (guided,) = engine.generate("Hello", guide=Guide.json(), sampling=Sampling(max_tokens=2))
    if isinstance(guided.error, TokenizerError):
        logger.warning("guided requests will be refused: %s", guided.error)
    elif guided.error is not None:
        raise guided.error


def _start_compiler(engine: Engine) -> None:
    with contextlib.suppress(UserError, GrammarError):
        engine.compiler.compile(Guide.json())
