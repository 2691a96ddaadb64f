"""The server as a process: its port, its model, and how it ends."""

import asyncio
import contextlib
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import NoReturn

import uvicorn

from gkv_jax.engine import Engine
from gkv_jax.errors import UserError
from gkv_jax.serve.app import create_app
from gkv_jax.serve.generation import warm_up
from gkv_jax.serve.settings import Settings

GRACE_S = 10
"""How long running requests may go on after the server was told to end."""


class _Server(uvicorn.Server):
    """At its end it gives running requests some time, then an error that their clients can read."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    async def _end_requests(self) -> None:
        await asyncio.sleep(GRACE_S)
        # It waits for the device, for seconds if a long prompt is being read.
        await asyncio.to_thread(self._engine.close)


def run(settings: Settings) -> None:
    """Serve until a signal comes.

    Raises:
      UserError or GrammarError: the address is taken, or the model cannot be served.
    """
    with contextlib.closing(_bind(settings.host, settings.port)) as listener:
        # uvicorn ends gracefully at these signals, then raises them again for whoever came before.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _exit)
        with Engine.from_pretrained(
            settings.model,
            cache=settings.cache,
            slots=settings.slots,
            loop=settings.loop,
            quantize=settings.quantize,
            draft=settings.draft,
            verify=settings.verify,
        ) as engine:
            warm_up(engine, settings.limits)
            try:
                listener.listen()
            except OSError as error:  # somebody else was loading for the same port, and was faster
                raise _taken(settings.host, settings.port, error) from error
            name = public_name(settings.model)
            config = uvicorn.Config(
                create_app(engine, model=name, limits=settings.limits),
                ws="none",
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=GRACE_S + 5,  # by then the engine has ended them all
            )
            print(f"serving {name} at {_url(listener)}", flush=True)
            _Server(config, engine).run(sockets=[listener])


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
