"""One request of the engine, awaited: the engine has its own thread, the server an event loop."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import fastapi

from gkv_jax.engine import Engine
from gkv_jax.request import Piece, Request, Result
from gkv_jax.sampling import Sampling
from gkv_jax.serve.settings import Limits
from grammar_host import Guide

OnEnd = Callable[[Request], None]
"""Told of each submitted request when it has ended, by the thread that feeds the device: it must be quick."""


def submit(engine: Engine, request: Request, on_end: OnEnd) -> AsyncGenerator[Piece, None]:
    """Submit a prepared request, now; its output as it comes, until it ends for whatever reason.

    Leaving the generator early, by ``aclose`` or by cancellation, cancels the request. Waiting takes
    no thread.

    Raises:
      EngineClosedError: the engine is closed (raised by the call itself).
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[Piece | None] = asyncio.Queue()

    def sink(piece: Piece | None) -> None:
        try:
            if piece is None:
                on_end(request)
        finally:  # the client learns in any case
            with contextlib.suppress(
                RuntimeError
            ):  # the event loop is closed: nobody reads any more
                loop.call_soon_threadsafe(arrived.put_nowait, piece)

    request.sink = sink
    engine.submit(request)
    return _pieces(request, arrived)


async def _pieces(
    request: Request, arrived: "asyncio.Queue[Piece | None]"
) -> AsyncGenerator[Piece, None]:
    try:
        while (piece := await arrived.get()) is not None:
            yield piece
    finally:
        leave(request)


def leave(request: Request) -> None:
    """Nobody waits for the rest of this request: cancel it, unless it has ended."""
    if request.finish_reason is None:
        request.cancel()


async def result(engine: Engine, request: Request, http: fastapi.Request, on_end: OnEnd) -> Result:
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
        async with contextlib.aclosing(submit(engine, request, on_end)) as stream:
            async for _ in stream:
                pass
    finally:
        watcher.cancel()
    return request.result()


def warm_up(engine: Engine, limits: Limits) -> None:
    """Compile the decode loop and prefill, and load the grammar engine, before clients come.

    A score policy reads a long prompt in one piece: each size up to the longest prompt that the limits
    allow is a program of its own.

    Raises:
      Exception: whatever keeps this engine from serving.
    """
    longest = min(limits.prompt_tokens, engine.model.max_positions)
    engine.warm_up(longest if engine.spec.selects(longest - 1) else None)
    (guided,) = engine.generate("Hello", guide=Guide.json(), sampling=Sampling(max_tokens=2))
    if guided.error is not None:
        raise guided.error
