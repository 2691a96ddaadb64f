"""What is around every route: a small application behind a real socket, and bytes as attackers send them."""

import asyncio
import contextlib
import json
import logging
import re
import socket
import string
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import fastapi
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import StreamingResponse

from gkv_jax.serve.connection import fault_in_head
from gkv_jax.serve.metrics import Metrics
from gkv_jax.serve.middleware import CLIENT_LEFT, ApiKeys, install
from gkv_jax.serve.settings import Auth, Cors, Limits, Settings
from tests.gkv_jax.serve.conftest import in_thread, read_all, wait_for
from tests.gkv_jax.serve.test_metrics import samples

KEYS = ("a-key-of-some-length", "another-key-of-some-length")
LIMITS = Limits(body_bytes=1000, header_bytes=2000, body_seconds=1, connections=20)
OPEN = Settings("m", limits=LIMITS)
PAGES = "https://pages.example"

Headers = dict[str, str]
Answer = tuple[int, Headers, bytes]


def small_app() -> fastapi.FastAPI:
    app = fastapi.FastAPI()

    @app.post("/echo/{name}")
    async def echo(name: str, request: fastapi.Request) -> Any:
        request.state.prompt_tokens, request.state.completion_tokens = 3, 4
        return {"name": name, "length": len(await request.body())}

    @app.post("/fail")
    async def fail() -> None:
        raise RuntimeError("inside")

    @app.post("/slow")
    async def slow() -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            while True:
                yield "data: 1\n\n"
                await asyncio.sleep(0.01)

        return StreamingResponse(events())

    @app.get("/{path:path}")
    async def anything(path: str) -> str:
        return path

    return app


class Running:
    """The application behind a port."""

    def __init__(self, port: int, metrics: Metrics) -> None:
        self.port, self.metrics = port, metrics

    def send(self, *parts: bytes, pause: float = 0.0) -> bytes:
        """All that comes back until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as client:
            with contextlib.suppress(ConnectionError):  # it may answer before it has read it all
                for part in parts:
                    client.sendall(part)
                    time.sleep(pause)
            return read_all(client)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Headers | None = None
    ) -> Answer:
        given = {"host": "localhost", "connection": "close"} | (headers or {})
        if body is not None:
            given = {"content-type": "application/json", "content-length": str(len(body))} | given
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        return parsed(self.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + (body or b"")))


def parsed(answer: bytes) -> Answer:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body


def error_of(answer: Answer) -> dict[str, Any]:
    error = json.loads(answer[2])["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@contextlib.contextmanager
def running(settings: Settings, keys: tuple[str, ...] = ()) -> Iterator[Running]:
    app, metrics = small_app(), Metrics()
    install(app, settings, keys=keys, observer=metrics)
    with in_thread(app, settings) as port:
        yield Running(port, metrics)


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(OPEN) as server:
        yield server


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with running(Settings("m", limits=LIMITS, cors=Cors((PAGES,))), KEYS) as server:
        yield server


# Keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_key_opens(guarded: Running, key: str, scheme: str) -> None:
    status, _, body = guarded.ask("POST", "/echo/a", b"{}", {"authorization": f"{scheme} {key}"})
    assert (status, json.loads(body)) == (200, {"name": "a", "length": 2})


@pytest.mark.parametrize(
    "given",
    [
        None, "", "Bearer", "Bearer ", KEYS[0], f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x",
        f"Bearer {KEYS[0][:-1]}", f"Bearer {KEYS[0].upper()}", f"Bearer {KEYS[0]},{KEYS[1]}",
        f"Bearer {KEYS[0]} {KEYS[1]}", f"Bearer {KEYS[0]}\r\nauthorization: Bearer {KEYS[0]}",
    ],
)  # fmt: skip
def test_anything_else_is_401(guarded: Running, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given}
    answer = guarded.ask("POST", "/echo/a", b"{}", headers)
    assert answer[0] == 401
    assert answer[1]["www-authenticate"] == "Bearer"
    error = error_of(answer)
    assert error["code"] == "invalid_api_key"
    assert not any(key in error["message"] for key in KEYS)


@pytest.mark.parametrize("path", ["/", "/favicon.ico", "/health", "/ready", "/page/a.css"])
def test_page_and_probes_are_open(guarded: Running, path: str) -> None:
    assert guarded.ask("GET", path)[0] == 200


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/page", "//", "/health/", "/Health"])
def test_nothing_else_is_open(guarded: Running, path: str) -> None:
    assert guarded.ask("GET", path)[0] == 401


def test_metrics_may_be_opened() -> None:
    with running(Settings("m", auth=Auth(metrics_open=True)), KEYS) as server:
        assert server.ask("GET", "/metrics")[0] == 200
        assert server.ask("GET", "/v1/models")[0] == 401


@given(st.lists(st.text(string.printable, min_size=16), min_size=1), st.binary())
def test_known_keys_are_those_and_no_others(keys: list[str], other: bytes) -> None:
    guard = ApiKeys(fastapi.FastAPI(), keys)
    assert all(guard._is_known(key.encode()) for key in keys)
    assert guard._is_known(other) == (other in [key.encode() for key in keys])


# Other pages --------------------------------------------------------------------------------------


def test_named_origins_may_ask_without_a_key_and_read_refusals(guarded: Running) -> None:
    asked = {
        "origin": PAGES,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    status, headers, _ = guarded.ask("OPTIONS", "/echo/a", headers=asked)
    assert status == 200
    assert headers["access-control-allow-origin"] == PAGES
    assert "authorization" in headers["access-control-allow-headers"].lower()
    refused = guarded.ask("POST", "/echo/a", b"{}", {"origin": PAGES})
    assert refused[0] == 401
    assert refused[1]["access-control-allow-origin"] == PAGES


def test_pages_may_read_the_headers_that_tell_something(guarded: Running) -> None:
    headers = guarded.ask("GET", "/health", headers={"origin": PAGES})[1]
    exposed = headers["access-control-expose-headers"].lower().split(", ")
    assert {"x-request-id", "retry-after", "warning"} <= set(exposed)


def test_other_origins_may_not(guarded: Running, served: Running) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert guarded.ask("OPTIONS", "/echo/a", headers=asked)[0] == 400
    for server in (guarded, served):
        _, headers, _ = server.ask("GET", "/health", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in headers


# Names --------------------------------------------------------------------------------------------

LOCAL = ["localhost", "localhost:8000", "LocalHost", "127.0.0.1:1", "[::1]", "[::1]:8000"]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
    "[::2]", "localhost, evil.example", "", "[", "evil.example@", "0.0.0.0"]  # fmt: skip


@pytest.mark.parametrize("host", LOCAL)
def test_a_server_without_keys_answers_to_its_loopback_names(served: Running, host: str) -> None:
    assert served.ask("GET", "/metrics", headers={"host": host})[0] == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_and_to_no_others(served: Running, host: str) -> None:
    """A page may have let its own name lead here."""
    answer = served.ask("POST", "/echo/a", b"{}", {"host": host})
    assert answer[0] == 400
    assert error_of(answer)["code"] == "unknown_host"
    assert "x-request-id" in answer[1]
    assert served.ask("GET", "/")[0] == 200
    assert served.ask("GET", "/", headers={"host": host})[0] == 400
    assert served.ask("GET", "/ready", headers={"host": host})[0] == 200


@pytest.mark.parametrize(
    ("settings", "keys", "host", "status"),
    [
        (OPEN, (), "a.example", 400),
        (OPEN, KEYS, "a.example", 200),
        (Settings("m", host="0.0.0.0"), (), "a.example", 200),
        (Settings("m", host="::1"), (), "a.example", 400),
        (Settings("m", hosts=("*",)), (), "a.example", 200),
        (Settings("m", hosts=("A.example", "::2")), (), "a.Example:81", 200),
        (Settings("m", hosts=("A.example", "::2")), (), "[::2]", 200),
        (Settings("m", hosts=("A.example", "::2")), (), "localhost", 400),
        (Settings("m", host="0.0.0.0", hosts=("a.example",)), KEYS, "b.example", 400),
    ],
)
def test_names_are_those_of_the_settings(
    settings: Settings, keys: tuple[str, ...], host: str, status: int
) -> None:
    with running(settings, keys) as server:
        headers = {"host": host, "authorization": f"Bearer {KEYS[0]}"}
        assert server.ask("GET", "/v1/models", headers=headers)[0] == status


# Bodies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", 'Application/JSON;charset="UTF-8"'],
)
def test_json_is_taken(served: Running, content_type: str) -> None:
    assert served.ask("POST", "/echo/a", b"{}", {"content-type": content_type})[0] == 200


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "",
        "application/json; charset=latin-1", "application/jsonp", "text/plain; application/json",
        "application/json\r\ncontent-type: text/plain",
    ],
)  # fmt: skip
def test_other_types_are_415(served: Running, content_type: str) -> None:
    answer = served.ask("POST", "/echo/a", b"{}", {"content-type": content_type})
    assert answer[0] == 415
    assert error_of(answer)["code"] == "unsupported_media_type"


def test_no_type_is_415(served: Running) -> None:
    answer = served.send(b"POST /echo/a HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
    assert parsed(answer)[0] == 415


@pytest.mark.parametrize(("encoding", "status"), [("identity", 200), ("gzip", 415), ("br", 415)])
def test_compressed_bodies_are_415(served: Running, encoding: str, status: int) -> None:
    answer = served.ask("POST", "/echo/a", b"{}", {"content-encoding": encoding})
    assert answer[0] == status


JSON_HEAD = b"POST /echo/a HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("length", [0, 999, 1000])
@pytest.mark.parametrize("size", [7, 1000])
def test_a_body_may_come_in_chunks(served: Running, length: int, size: int) -> None:
    """And is the same whole."""
    body = bytes(length)
    parts = [body[start : start + size] for start in range(0, length, size)]
    framed = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    close = CHUNKED.replace(b"host:", b"connection: close\r\nhost:")
    status, _, answer = parsed(served.send(close, framed))
    assert (status, json.loads(answer)["length"]) == (200, length)


@pytest.mark.parametrize(
    "request_bytes",
    [
        JSON_HEAD + b"content-length: 1001\r\n\r\n",  # refused before it comes
        CHUNKED + b"3e9\r\n" + bytes(1001),
        CHUNKED + b"1\r\n0\r\n" * 2000,
    ],
)
def test_large_bodies_are_413(served: Running, request_bytes: bytes) -> None:
    answer = parsed(served.send(request_bytes))
    assert answer[0] == 413
    assert error_of(answer)["code"] == "request_too_large"
    assert "1000 bytes" in error_of(answer)["message"]


@pytest.mark.parametrize(
    "request_bytes", [JSON_HEAD + b"content-length: 9\r\n\r\n{", CHUNKED + b"1\r\n0\r\n"]
)
def test_a_body_that_does_not_come_is_408(served: Running, request_bytes: bytes) -> None:
    answer = parsed(served.send(request_bytes))
    assert answer[0] == 408
    assert error_of(answer)["code"] == "request_timeout"


# Bytes --------------------------------------------------------------------------------------------

ECHO = b"POST /echo/a HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

AMBIGUOUS = {
    "both lengths": ECHO + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "both, the other way": ECHO
    + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": ECHO + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "the same length twice": ECHO + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
    "a list of lengths": ECHO + b"content-length: 2, 3\r\n\r\n{}",
    "a signed length": ECHO + b"content-length: +2\r\n\r\n{}",
    "chunked twice": ECHO
    + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "another coding": ECHO + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": ECHO + b"content-length : 2\r\n\r\n{}",
    "a folded header": ECHO + b"x-a: b\r\n c\r\ncontent-length: 2\r\n\r\n{}",
    "a folded length": ECHO + b"content-length:\r\n 2\r\n\r\n{}",
    "bare line feeds": ECHO.replace(b"\r\n", b"\n") + b"content-length: 2\n\n{}",
    "one bare line feed": ECHO + b"x-a: b\ncontent-length: 2\r\n\r\n{}",
    "a null": ECHO + b"x-a: \0\r\ncontent-length: 2\r\n\r\n{}",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a bad chunk": ECHO + b"transfer-encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n",
    "a huge header": b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: "
    + b"a" * 5000
    + b"\r\n\r\n",
    "a huge path": b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"x-a: b\r\n" * 1000,
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_requests_are_refused_and_the_next_is_served(served: Running, name: str) -> None:
    hidden = b"GET /hidden HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answer = served.send(AMBIGUOUS[name] + hidden)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501"))
    assert answer.count(b"HTTP/1.1 ") <= 1  # what was hidden behind it has no answer
    assert served.ask("POST", "/echo/a", b"{}")[0] == 200


def test_the_second_of_two_requests_at_once_is_looked_at_too(served: Running) -> None:
    good = ECHO + b"content-length: 2\r\n\r\n{}"
    answer = served.send(good + AMBIGUOUS["both lengths"])
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"400"]


def test_good_requests_at_once_are_all_served(served: Running) -> None:
    """A body may hold what a head may not."""
    body = b'"\n\n\r\n content-length: 1\r\ncontent-length: 2"'
    good = ECHO + b"content-length: %d\r\n\r\n%s" % (len(body), body)
    last = b"GET /last HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answer = served.send(good + good + last)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200"] * 3


@pytest.mark.parametrize(
    "request_bytes", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a", b"G"]
)
def test_headers_that_do_not_come_close_the_connection(
    served: Running, request_bytes: bytes
) -> None:
    answer = served.send(request_bytes)
    assert answer == b""


def test_slow_headers_close_the_connection_too(served: Running) -> None:
    """However often a byte comes."""
    assert served.send(*[b"GET / HTTP/1.1\r\nx: "[i : i + 1] for i in range(19)], pause=0.1) == b""


def test_a_body_without_end_of_a_route_without_body_ends_the_connection(served: Running) -> None:
    endless = b"GET /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = served.send(endless, *[b"1\r\n0\r\n"] * 19, pause=0.1)
    assert answer.startswith(b"HTTP/1.1 200")


def test_more_connections_than_allowed_are_503(served: Running) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(LIMITS.connections):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
        assert served.ask("GET", "/health")[0] == 503
    wait_for(lambda: served.ask("GET", "/health")[0] == 200)


heads = st.lists(
    st.tuples(st.from_regex(r"[a-z][a-z-]{0,20}", fullmatch=True), st.text("abc :,;\t")), max_size=5
)


@given(heads, st.binary())
def test_plain_heads_have_no_fault_whatever_the_body(
    headers: list[tuple[str, str]], body: bytes
) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    head = f"POST / HTTP/1.1\r\n{lines}content-length: 5\r\n\r\n".encode()
    framing = [name for name, _ in headers if name in ("content-length", "transfer-encoding")]
    assert (fault_in_head(head + body, 10_000) is None) == (not framing)
    # Nor has any beginning of it: it may come in pieces.
    if not framing:
        assert all(fault_in_head(head[:end], 10_000) is None for end in range(len(head)))


# Identity and log ---------------------------------------------------------------------------------


def test_a_request_keeps_its_name_if_it_is_a_word(served: Running) -> None:
    name = "a" * 128
    assert served.ask("GET", "/health", headers={"x-request-id": name})[1]["x-request-id"] == name


@pytest.mark.parametrize("given", [None, "", "a b", "a" * 129, "caf\xe9", "a\r\nx-request-id: b"])
def test_any_other_gets_one(served: Running, given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given}
    names = {served.ask("GET", "/health", headers=headers)[1]["x-request-id"] for _ in range(2)}
    assert len(names) == 2
    assert all(re.fullmatch(r"req_[0-9a-f]{32}", name) for name in names)


def test_refusals_have_a_name_too(guarded: Running) -> None:
    assert "x-request-id" in guarded.ask("POST", "/echo/a", b"{}")[1]


def test_a_failure_is_a_500_in_shape_with_its_name(
    served: Running, caplog: pytest.LogCaptureFixture
) -> None:
    answer = served.ask("POST", "/fail", b"{}", {"x-request-id": "mine"})
    assert (answer[0], answer[1]["x-request-id"]) == (500, "mine")
    assert error_of(answer)["code"] == "internal_error"
    wait_for(lambda: "RuntimeError: inside" in caplog.text)  # for those who run the server
    rejected = ("gkv_rejected_requests_total", "internal_error", "500")
    wait_for(lambda: rejected in samples(served.metrics.text().decode()))


def access_lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "gkv_jax.serve.access"]


def test_a_line_says_who_asked_what_and_no_secret(
    guarded: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gkv_jax.serve")
    key = {"authorization": f"Bearer {KEYS[1]}", "x-request-id": "mine"}
    guarded.ask("POST", "/echo/na%0Ame?secret=1", b'"a prompt"', key)
    guarded.ask("POST", "/echo/a", b'"a prompt"', {"authorization": "Bearer wrong-but-secret"})
    guarded.ask("GET", "/health")
    wait_for(lambda: len(access_lines(caplog)) == 2)
    served, refused = access_lines(caplog)
    assert re.fullmatch(
        r"method=POST path=/echo/na%0Ame status=200 seconds=[\d.]+ request_id=mine "
        r"prompt_tokens=3 completion_tokens=4",
        served.getMessage(),
    )
    assert served.__dict__["completion_tokens"] == 4
    assert re.fullmatch(
        r"method=POST path=/echo/a status=401 seconds=[\d.]+ request_id=req_\w+ "
        r"error_code=invalid_api_key",
        refused.getMessage(),
    )
    for secret in ("a prompt", "secret", *KEYS):
        assert secret not in caplog.text


def test_requests_are_counted_by_template(caplog: pytest.LogCaptureFixture) -> None:
    with running(OPEN) as server:
        server.ask("POST", "/echo/a", b"{}")
        server.ask("POST", "/echo/b", b"{}")
        server.ask("BREW", "/pot")
        server.ask("POST", "/echo/a", b"{}", {"content-type": "text/plain"})
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            client.sendall(ECHO.replace(b"/echo/a", b"/slow") + b"content-length: 2\r\n\r\n{}")
            client.recv(1)
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            client.sendall(ECHO + b"content-length: 2\r\n\r\n{")

        def counted() -> dict[tuple[str, ...], float]:
            values = samples(server.metrics.text().decode())
            return {key: value for key, value in values.items() if key[0].startswith("gkv_http")}

        # Labels in the order of their names: method, route, status.
        name = "gkv_http_requests_total"
        wait_for(lambda: len(counted()) == 5)
        assert counted() == {
            (name, "POST", "/echo/{name}", "200"): 2,
            (name, "other", "/{path:path}", "405"): 1,
            (name, "POST", "other", "415"): 1,
            (name, "POST", "/slow", "200"): 1,
            (name, "POST", "other", str(CLIENT_LEFT)): 1,
        }
        values = samples(server.metrics.text().decode())
        rejected = "gkv_rejected_requests_total"
        assert values[rejected, "unsupported_media_type", "415"] == 1
