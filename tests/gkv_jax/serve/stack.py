"""The whole server around a random tiny model: every layer that ``python -m gkv_jax.serve`` has.

``python -m tests.gkv_jax.serve.stack`` is that very program, but for the model.
"""

import contextlib
import dataclasses
import http.client
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from gkv_jax import Engine
from gkv_jax.serve import process
from gkv_jax.serve.app import create_app
from gkv_jax.serve.generation import warm_up
from gkv_jax.serve.middleware import install
from gkv_jax.serve.settings import Limits, Queue, Settings
from tests.gkv_jax.serve.conftest import MODEL, in_thread, tiny_engine, wait_for
from tests.gkv_jax.serve.test_metrics import samples

ROOT = Path(__file__).parents[3]
SLOTS = 4


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error, all of whose fields are there."""
        error = self.json["error"]
        assert error.keys() - {"pointer"} == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        return error

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, without the word at the end."""
        lines = self.body.decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(each) for each in data if each != "[DONE]"]


@dataclasses.dataclass(frozen=True)
class Stack:
    """A server that listens."""

    port: int
    settings: Settings
    pid: int | None = None

    @property
    def places(self) -> int:
        """Answers that may be under way: those that run and those that wait."""
        return self.settings.slots + self.settings.queue.size

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def send(self, method: str, path: str, body: bytes | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            headers = {} if body is None else {"content-type": "application/json"}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())

    def post(self, path: str, value: Any) -> Answer:
        return self.send("POST", path, json.dumps(value).encode())

    def gauge(self, name: str) -> float:
        """A figure of /metrics that has no labels."""
        return samples(self.send("GET", "/metrics").body.decode())[name,]

    def assert_idle(self) -> None:
        """No slot is taken, nobody waits, every place is free, and a request is served."""
        wait_for(lambda: self.gauge("gkv_active_slots") == self.gauge("gkv_queue_length") == 0)
        # As many answers as there are places come in at once: if one were lost, they never would. Those
        # of a client that has just left, or whose grammar is being compiled, are given back soon.
        fields = {"model": MODEL, "max_tokens": 1}
        full = fields | {"prompt": ["a"] * self.places}
        answers = []

        def is_taken() -> bool:
            answers.append(self.post("/v1/completions", full))
            return answers[-1].status != 429

        wait_for(is_taken)
        assert answers[-1].status == 200, answers[-1].body
        assert len(answers[-1].json["choices"]) == self.places
        guided = self.post("/v1/completions", fields | {"prompt": "a", "max_tokens": 9, **TEN})
        assert guided.json["choices"][0]["text"] == "ten"


TEN = {"structured_outputs": {"choice": ["ten"]}}


def request_bytes(path: str, value: Any, *headers: str) -> bytes:
    """A request as it is sent."""
    body = json.dumps(value).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def small(**changes: Any) -> Settings:
    """Settings for a server that faults and fuzz cannot keep busy for long."""
    limits: dict[str, Any] = {
        "prompt_tokens": 1_000,
        "completion_tokens": 16,
        "default_completion_tokens": 8,
        "choices": SLOTS,
    }
    return Settings(
        MODEL,
        port=0,
        slots=SLOTS,
        compilation_cache="",
        limits=Limits(**(limits | changes.pop("limits", {}))),
        queue=Queue(12),
        **changes,
    )


@contextlib.contextmanager
def in_process(engine: Engine, settings: Settings) -> Iterator[Stack]:
    """In a thread of this process."""
    warm_up(engine, settings.limits)
    app = create_app(engine, model=MODEL, limits=settings.limits, queue_size=settings.queue.size)
    install(app, settings)
    with in_thread(app, settings) as port:
        yield Stack(port, settings)


@contextlib.contextmanager
def subprocess_of(settings: Settings) -> Iterator[tuple[Stack, "subprocess.Popen[str]"]]:
    """In a process of its own; it is killed at the end, if it is still there."""
    tables = {name: dataclasses.asdict(getattr(settings, name)) for name in ("limits", "queue")}
    fields = tables | {"drain_seconds": settings.drain_seconds}
    command = [sys.executable, "-m", "tests.gkv_jax.serve.stack", json.dumps(fields)]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
        ) as running,
    ):
        try:
            assert running.stdout is not None
            announced = running.stdout.readline()
            log.seek(0)
            assert announced.startswith(f"serving {MODEL} at "), log.read()
            port = int(announced.rpartition(":")[2].partition("/")[0])
            yield Stack(port, settings, running.pid), running
            log.seek(0)
            text = log.read()
            # The log tells where a compile service that was shot broke, and of nothing else.
            assert text.count("Traceback") == text.count("guides cannot be compiled"), text
        finally:
            running.kill()


def main() -> None:
    """Serve the tiny model with the settings of the command line."""
    fields = json.loads(sys.argv[1])
    limits, queue = Limits(**fields.pop("limits")), Queue(**fields.pop("queue"))
    settings = dataclasses.replace(small(**fields), limits=limits, queue=queue)

    def tiny(_: str, slots: int, **__: Any) -> Engine:
        return tiny_engine(slots=slots)

    with mock.patch.object(Engine, "from_pretrained", tiny):
        process.run(settings)


if __name__ == "__main__":
    main()
