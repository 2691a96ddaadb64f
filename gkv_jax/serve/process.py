"""The server as a process: its port, its model, and how it ends."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jax
import uvicorn

from gkv_jax.engine import Engine
from gkv_jax.errors import UserError
from gkv_jax.serve import logs
from gkv_jax.serve.app import create_app
from gkv_jax.serve.connection import connections
from gkv_jax.serve.generation import warm_up
from gkv_jax.serve.lifecycle import Lifecycle
from gkv_jax.serve.middleware import install
from gkv_jax.serve.settings import Settings
from gkv_jax.weights.store import cache_folder

logger = logging.getLogger("gkv_jax.serve")

_TICK_S = 0.1
"""How often the end of a server looks at the clock and for a second signal."""

MARGIN_S = 5
"""How long clients may take to read the error that ended their requests."""


class _Server(uvicorn.Server):
    """At its end it gives running requests some time, then an error that their clients can read.

    A second signal ends it at once. It also ends if its engine does.

    Attributes:
      has_failed: whether it was the engine that ended it.
    """

    def __init__(
        self, config: uvicorn.Config, engine: Engine, lifecycle: Lifecycle, drain_seconds: float
    ) -> None:
        super().__init__(config)
        self._engine, self._lifecycle, self._drain_seconds = engine, lifecycle, drain_seconds
        self.has_failed = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._lifecycle.serve()

    async def on_tick(self, counter: int) -> bool:
        if not self.should_exit and self._engine.closed:
            logger.critical("the engine has ended, and the server with it; start it again")
            self.has_failed = self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._lifecycle.drain()
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._lifecycle.drain()
        end = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    async def _end_requests(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_seconds
        while loop.time() < end and not self.force_exit:
            await asyncio.sleep(_TICK_S)
        # It waits for the device, for seconds if a long prompt is being read.
        closing = asyncio.create_task(asyncio.to_thread(self._engine.close))
        while not self.force_exit:
            await asyncio.sleep(_TICK_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await closing


def run(settings: Settings) -> None:
    """Serve until a signal comes.

    Raises:
      SystemExit: with code 1, the engine failed: whoever supervises the process may start another one.
      UserError or GrammarError: the address is taken, the keys cannot be read, or the model cannot be
        served.
    """
    logs.configure(settings.log)
    keys = settings.auth.read_keys(os.environ)
    with contextlib.closing(_bind(settings.host, settings.port)) as listener:
        # uvicorn ends gracefully at these signals, then raises them again for whoever came before.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _exit)
        use_compilation_cache(settings.compilation_cache)
        with load_engine(settings) as engine:
            warm_up(engine, settings.limits)
            try:
                listener.listen()
            except OSError as error:  # somebody else was loading for the same port, and was faster
                raise _taken(settings.host, settings.port, error) from error
            name = settings.model_name or public_name(settings.model)
            lifecycle = Lifecycle()
            app = create_app(
                engine,
                model=name,
                limits=settings.limits,
                queue_size=settings.queue.size,
                chat=settings.chat,
                is_ready=lambda: lifecycle.is_ready,
            )
            install(app, settings, keys=keys, observer=app.state.metrics)
            server = _Server(
                server_config(app, settings), engine, lifecycle, settings.drain_seconds
            )
            if not keys:
                logger.info("no API keys are set: whoever reaches this address may use the model")
            print(f"serving {name} at {_url(listener)}", flush=True)
            server.run(sockets=[listener])
            if server.has_failed:
                raise SystemExit(1)


def load_engine(settings: Settings) -> Engine:
    """The engine that settings ask for; whoever calls this closes it.

    Raises:
      UserError: the model cannot be served.
    """
    return Engine.from_pretrained(
        settings.model,
        cache=settings.cache,
        slots=settings.slots,
        loop=settings.loop,
        quantize=settings.quantize,
        draft=settings.draft,
        verify=settings.verify,
    )


def server_config(app: Any, settings: Settings) -> uvicorn.Config:
    """How uvicorn serves an ASGI application.

    The parser is h11, whatever else is installed: ``Connection`` looks into its state, and a faster one
    would save nothing beside a model.
    """
    limits = settings.limits
    return uvicorn.Config(
        app,
        http=connections(limits.body_seconds, limits.header_bytes),
        h11_max_incomplete_event_size=limits.header_bytes,
        limit_concurrency=limits.connections,
        ws="none",
        lifespan="off",
        server_header=False,
        log_config=None,  # ``logs`` has it
        access_log=False,
        timeout_graceful_shutdown=settings.drain_seconds + MARGIN_S,
    )


def use_compilation_cache(folder: str | None) -> None:
    """Let JAX keep compiled programs in a folder, for later starts; see ``Settings``.

    Raises:
      UserError: the folder was named, and cannot be written.
    """
    if folder == "":
        return
    path = cache_folder() / "xla" if folder is None else Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(None, "Permission denied")
    except OSError as error:
        message = f"compilation_cache {path} cannot be written ({error.strerror})"
        if folder is not None:
            raise UserError(f"{message}; give another folder, or '' for none") from error
        logger.warning("%s: programs are compiled anew at each start", message)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    # All of them: the large ones take seconds, and the small ones are many.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def public_name(model: str) -> str:
    """What clients call a model: a registry name or hub id as it is, a path by its last part."""
    path = Path(model).expanduser()
    if not path.exists():
        return model
    return path.stem if path.is_file() else path.resolve().name


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def _bind(host: str, port: int) -> socket.socket:
    """A socket that holds the port while the model is loaded, but takes no connections yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"host {host!r} is no address ({error.strerror}); give another") from error
    # So that a server can follow another one on its port at once.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _taken(host, port, error) from error
    return listener


def _taken(host: str, port: int, error: OSError) -> UserError:
    return UserError(
        f"cannot listen on port {port} of {host} ({error.strerror}); "
        "choose another with --port or --host"
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
