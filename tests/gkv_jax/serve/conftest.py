"""A random tiny model behind a real HTTP server, and the real ``openai`` client."""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
import uvicorn

from gkv_jax import CacheSpec, Engine
from gkv_jax.models.llama import Llama
from gkv_jax.serve.app import create_app
from gkv_jax.serve.generation import warm_up
from gkv_jax.serve.middleware import install
from gkv_jax.serve.process import server_config
from gkv_jax.serve.settings import Limits, Settings
from tests.gkv_jax.tiny import STOP, byte_tokenizer, random_params, text_config

MODEL = "tiny"
LIMITS = Limits(body_bytes=100_000, prompt_tokens=2_000, completion_tokens=20_000)


@dataclasses.dataclass(frozen=True)
class Served:
    """A running server."""

    engine: Engine
    port: int
    client: openai.OpenAI

    @property
    def free_slots(self) -> int:
        return self.engine.slots - self.engine.active

    def chat(self, **fields: Any) -> Any:
        """A chat completion; ``fields`` override a small, repeatable request."""
        defaults = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 40,
            "seed": 1,
        }
        return self.client.chat.completions.create(**(defaults | fields))


@contextlib.contextmanager
def serving(engine: Engine, limits: Limits, **options: Any) -> Iterator[Served]:
    """The application on a free port of this machine; ``options`` are of ``create_app``."""
    app = create_app(engine, model=MODEL, limits=limits, **options)
    settings = Settings(MODEL, limits=limits)
    install(app, settings, observer=app.state.metrics)
    with in_thread(app, settings) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            yield Served(engine, port, client)


@contextlib.contextmanager
def in_thread(app: Any, settings: Settings) -> Iterator[int]:
    """An ASGI application, served as the process serves it, by a thread; its port."""
    server = uvicorn.Server(server_config(app, settings))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_for(lambda: server.started)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def read_all(client: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := client.recv(65536):
            received += data
    return received


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def tiny_engine(cache: CacheSpec | None = None, slots: int = 4) -> Engine:
    config = text_config()
    return Engine(
        Llama(config),
        random_params(config),
        byte_tokenizer(),
        cache=cache or CacheSpec(sinks=4, window=60).with_drafts(),
        slots=slots,
        stop_token_ids=(STOP,),
        verify="always",  # by the clock, nobody could say what is drafted
    )


@pytest.fixture(scope="package")
def served() -> Iterator[Served]:
    with tiny_engine() as engine:
        warm_up(engine, LIMITS)
        with serving(engine, LIMITS) as running:
            yield running
