"""The whole program, as users start it: a real model, a real process, signals."""

import asyncio
import concurrent.futures
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from gkv_jax.serve.lifecycle import Lifecycle
from gkv_jax.serve.process import _Server, server_config
from gkv_jax.serve.settings import Settings
from tests.gkv_jax.serve.conftest import read_all, wait_for

ROOT = Path(__file__).parents[3]
MODEL = "smollm2-135m-instruct"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable, "-m", "gkv_jax.serve", "--model", MODEL, "--port", "0",
        "--slots", "4", "--window", "252",
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        timer = threading.Timer(300, running.kill)
        timer.start()
        try:
            yield running
        finally:
            timer.cancel()
            running.kill()


def test_waiting_for_the_engine_to_close_does_not_stop_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prefill keeps ``Engine.close`` waiting; answers go on meanwhile."""
    closing, answered = threading.Event(), threading.Event()
    in_time: list[bool] = []

    class Busy:
        def close(self) -> None:
            closing.set()
            in_time.append(answered.wait(5))

    async def answer(*_: Any) -> None:
        while not closing.is_set():
            await asyncio.sleep(0.01)
        answered.set()

    monkeypatch.setattr(uvicorn.Server, "shutdown", answer)
    server = _Server(uvicorn.Config(lambda: None), Busy(), Lifecycle(), 0)
    asyncio.run(server.shutdown())
    assert in_time == [True]


class Closing:
    """Where an engine would be: it says that it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@contextlib.contextmanager
def streaming(drain_seconds: int, ends: bool) -> Iterator[tuple[_Server, Lifecycle, Closing, int]]:
    """A server whose only route streams until the engine is closed, or without end."""
    engine, lifecycle = Closing(), Lifecycle()

    async def events() -> AsyncIterator[str]:
        while not (ends and engine.closed):
            yield "more\n"
            await asyncio.sleep(0.01)
        yield "the error\n"

    async def stream(_: Any) -> StreamingResponse:
        return StreamingResponse(events())

    app = Starlette(routes=[Route("/", stream)])
    settings = Settings("m", drain_seconds=drain_seconds)
    server = _Server(server_config(app, settings), engine, lifecycle, drain_seconds)
    assert lifecycle.state == "starting"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_for(lambda: server.started)
        wait_for(lambda: lifecycle.is_ready)
        try:
            yield server, lifecycle, engine, port
            thread.join(30)
            assert not thread.is_alive()
        finally:
            engine.close()
            server.should_exit = server.force_exit = True
            thread.join()


def reading(port: int) -> socket.socket:
    """A client that has the first bytes of its stream."""
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert client.recv(10) == b"HTTP/1.1 2"
    return client


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
    except ConnectionRefusedError:
        return True
    return False


def test_running_requests_end_with_an_error_that_their_clients_read() -> None:
    with streaming(1, ends=True) as (server, lifecycle, engine, port):
        with reading(port) as client:
            server.handle_exit(signal.SIGTERM, None)
            assert lifecycle.state == "draining"
            wait_for(lambda: is_refused(port))
            assert read_all(client).endswith(b"the error\n\r\n0\r\n\r\n")
        assert engine.closed


def test_a_server_without_requests_ends_before_its_time() -> None:
    with streaming(3600, ends=True) as (server, *_):
        server.handle_exit(signal.SIGTERM, None)


def test_a_second_signal_ends_it_at_once() -> None:
    with streaming(3600, ends=False) as (server, _, _, port), reading(port) as client:
        server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: is_refused(port))
        server.handle_exit(signal.SIGTERM, None)
        assert not read_all(client).endswith(b"0\r\n\r\n")


def test_a_server_whose_engine_ends_ends_too(caplog: pytest.LogCaptureFixture) -> None:
    with streaming(3600, ends=True) as (server, lifecycle, engine, port):
        with reading(port) as client:
            assert not server.has_failed
            engine.close()
            assert read_all(client).endswith(b"the error\n\r\n0\r\n\r\n")
        wait_for(lambda: lifecycle.state == "draining")
    assert server.has_failed
    assert "the engine has ended" in caplog.text


FAILS = """
import sys
import tests.conftest
from gkv_jax import CacheSpec, Engine, scheduler
from gkv_jax.serve import process
from gkv_jax.serve.settings import Settings
from tests.gkv_jax.serve.conftest import tiny_engine

engine = tiny_engine(CacheSpec(window=60))
Engine.from_pretrained = lambda *_, **__: engine
process.warm_up = lambda *_: None

def fails(*_, **__):
    raise RuntimeError("the device is gone")

scheduler.device_loop = scheduler.init_cache = fails
process.run(Settings("tiny", port=0, compilation_cache="", drain_seconds=60))
"""


def test_a_process_whose_engine_fails_says_so_and_exits_with_code_1() -> None:
    """A client that is served learns that it failed, and a supervisor that the process should be started
    again."""
    with subprocess.Popen(
        [sys.executable, "-c", FAILS],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        timer = threading.Timer(120, running.kill)
        timer.start()
        try:
            assert running.stdout is not None
            url = running.stdout.readline().split()[-1]
            with (
                openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client,
                pytest.raises(openai.InternalServerError),
            ):
                client.completions.create(model="tiny", prompt="x", max_tokens=2)
            _, log = running.communicate()
        finally:
            timer.cancel()
            running.kill()
    assert running.returncode == 1, log
    assert "CRITICAL gkv_jax: the engine has failed and takes no more requests" in log
    assert "RuntimeError: the device is gone" in log
    assert "CRITICAL gkv_jax.serve: the engine has ended" in log


def test_a_server_that_was_told_to_end_never_gets_ready() -> None:
    lifecycle = Lifecycle()
    lifecycle.drain()
    lifecycle.serve()
    assert lifecycle.state == "draining"


def test_compiled_programs_are_kept_and_found_by_the_next_process(tmp_path: Path) -> None:
    code = (
        "import jax, sys; from gkv_jax.serve.process import use_compilation_cache; "
        "use_compilation_cache(sys.argv[1]); hits = []; "
        "jax.monitoring.register_event_listener(lambda name, **_: hits.append(name)); "
        "jax.jit(lambda x: x * 2 + 1)(1.0); print('/jax/compilation_cache/cache_hits' in hits)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "new" / "xla")]
    found = [
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert found == ["False\n", "True\n"]


@pytest.mark.model
def test_serves_a_real_model_until_sigterm(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    announced = process.stdout.readline()
    assert announced.startswith(f"serving {MODEL} at http://127.0.0.1:")
    url = announced.split()[-1]

    with openai.OpenAI(base_url=url, api_key="none", timeout=60) as client:

        def describe(seed: int) -> Any:
            return client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Describe a person from Lisbon as JSON."}],
                max_tokens=100,
                seed=seed,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "person", "strict": True, "schema": PERSON},
                },
            )

        with concurrent.futures.ThreadPoolExecutor() as pool:
            answers = list(pool.map(describe, range(6)))
        for answer in answers:
            assert answer.choices[0].finish_reason == "stop"
            jsonschema.validate(json.loads(answer.choices[0].message.content), PERSON)
            assert answer.gkv["backend"] == "llguidance"

        greedy = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=20,
        )
        assert "Paris" in greedy.choices[0].message.content

    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert "Traceback" not in log
