"""What happens to every request before its route: identity, access, size and type of its body.

Each part is plain ASGI, so that streams pass through untouched, and answers in OpenAI's error shape.
A route, or an error's handler, may leave ``error_code``, ``prompt_tokens`` and ``completion_tokens`` in
the request's state: they are for its log line.
"""

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from email.message import Message as Headers
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import anyio
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gkv_jax.serve.errors import ApiError, internal_error, note_error
from gkv_jax.serve.settings import LOOPBACK, Settings

logger = logging.getLogger("gkv_jax.serve.access")

REQUEST_ID = "x-request-id"

CLIENT_LEFT = 499
"""Status, in log and metrics only, of a request whose client left before the answer."""

_OPEN_PATHS = frozenset({"/", "/favicon.ico", "/health", "/ready"})
_OPEN_PREFIX = "/page/"
_PROBES = frozenset({"/health", "/ready", "/metrics"})
_STATE_PATHS = frozenset({"/health", "/ready"})
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_LOGGED = ("error_code", "prompt_tokens", "completion_tokens")
_PATH_CHARACTERS = 200
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})
_WRITING = frozenset({"POST", "PUT", "PATCH"})
_CLOSE = {"connection": "close"}
"""The rest of the body is not read, so that the connection is of no more use."""


class Observer(Protocol):
    """Counts requests as they end; ``gkv_jax.serve.metrics.Metrics`` is one."""

    def observe_http(self, route: str, method: str, status: int, code: str | None) -> None:
        """``route`` is a template and ``code`` that of OpenAI's error, if any."""


def install(
    app: Starlette,
    settings: Settings,
    *,
    keys: Sequence[str] = (),
    observer: Observer | None = None,
) -> None:
    """Put all of it around an application's routes.

    Args:
      app: FastAPI or Starlette, not started yet.
      settings: ``host``, ``hosts``, ``cors``, ``auth.metrics_open`` and ``limits`` count here.
      keys: the API keys; open to everybody if there are none.
      observer: counts requests as they end.
    """
    # The last one added is the first one that a request meets.
    app.add_middleware(
        BodyLimit, max_bytes=settings.limits.body_bytes, seconds=settings.limits.body_seconds
    )
    app.add_middleware(JsonBody)
    if keys:
        app.add_middleware(ApiKeys, keys=keys, metrics_open=settings.auth.metrics_open)
    # A page elsewhere can have its own name lead to this machine, and is then no other page to the browser.
    # Keys keep it out; so does a name that is not ours.
    hosts = settings.hosts or (LOOPBACK if settings.host in LOOPBACK and not keys else ())
    if hosts and "*" not in hosts:
        app.add_middleware(Hosts, names=hosts)
    app.add_middleware(Observe, observer=observer)
    if settings.cors.origins:
        # Before the keys: a browser asks whether it may, without one.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID, "retry-after", "warning"),
        )


class Observe:
    """Names each request, and says in log and metrics what became of it."""

    def __init__(self, app: ASGIApp, observer: Observer | None = None) -> None:
        self._app, self._observer = app, observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), CLIENT_LEFT
        state = scope.setdefault("state", {})
        name = state["request_id"] = _request_id(scope)

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception:
            error = internal_error()
            note_error(scope, error)
            if status == CLIENT_LEFT:  # nothing is sent yet
                await error.response()(scope, receive, named)
            raise  # the ASGI server logs the traceback
        finally:
            self._report(scope, status, time.perf_counter() - began)

    def _report(self, scope: Scope, status: int, seconds: float) -> None:
        state, method = scope["state"], scope["method"]
        if self._observer is not None:
            route = getattr(scope.get("route"), "path", "")
            self._observer.observe_http(route, method, status, state.get("error_code"))
        level = logging.DEBUG if scope["path"] in _PROBES and status < 400 else logging.INFO
        if not logger.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "method": method,
            # Quoted again: a decoded line break would be one in the log.
            "path": quote(scope["path"][:_PATH_CHARACTERS]),
            "status": status,
            "seconds": round(seconds, 4),
            "request_id": state["request_id"],
        }
        fields |= {key: state[key] for key in _LOGGED if state.get(key) is not None}
        line = " ".join(f"{key}={value}" for key, value in fields.items())
        logger.log(level, "%s", line, extra=fields)


class Hosts:
    """Lets requests in that address the server by one of its names. Probes may use its address."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app, self._names = app, frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _STATE_PATHS or self._is_ours(scope):
            await self._app(scope, receive, send)
            return
        message = (
            "the header 'Host' has no name of this server; use one that it has, or let those who run it "
            "add yours to the setting 'hosts'"
        )
        error = ApiError(400, message, code="unknown_host", headers=_CLOSE)
        await _refuse(error, scope, receive, send)

    def _is_ours(self, scope: Scope) -> bool:
        given = (_header(scope, b"host") or b"").decode("latin-1")
        try:
            return urlsplit(f"//{given}").hostname in self._names
        except ValueError:  # no host at all
            return False


class ApiKeys:
    """Lets those in who have a key, and anybody to the page and the probes."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], metrics_open: bool = False) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = _OPEN_PATHS | ({"/metrics"} if metrics_open else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"authorization")
        scheme, _, key = (given or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            message = "no API key was given; send it in the header 'Authorization: Bearer KEY'"
        elif not self._is_known(key.strip()):
            message = "the API key is not one of this server's; ask those who run it for one"
        else:
            await self._app(scope, receive, send)
            return
        headers = _CLOSE | {"www-authenticate": "Bearer"}
        error = ApiError(401, message, code="invalid_api_key", headers=headers)
        await _refuse(error, scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open or path.startswith(_OPEN_PREFIX)

    def _is_known(self, key: bytes) -> bool:
        """In a time that tells neither which key is near nor how near it is."""
        digest, known = _digest(key), False
        for each in self._digests:
            known |= hmac.compare_digest(digest, each)
        return known


class JsonBody:
    """Takes bodies of JSON in UTF-8 only, as they are.

    A page elsewhere can have a browser send forms and plain text without asking, but not JSON: so this
    keeps other pages out of a server that has neither keys nor origins.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _WRITING or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        encoding = _header(scope, b"content-encoding", absent=b"identity")
        if encoding is None or encoding.strip().lower() != b"identity":
            message = "a compressed body is not served; leave the header 'Content-Encoding' out"
            error = ApiError(415, message, code="unsupported_content_encoding", headers=_CLOSE)
        elif not _is_json(_header(scope, b"content-type")):
            message = "send a JSON object, with the header 'Content-Type: application/json'"
            error = ApiError(415, message, code="unsupported_media_type", headers=_CLOSE)
        else:
            await self._app(scope, receive, send)
            return
        await _refuse(error, scope, receive, send)


class BodyLimit:
    """Reads a body before its route does, no more of it than is allowed and no longer."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app, self._max_bytes, self._seconds = app, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _BODILESS:
            await self._app(scope, receive, send)
            return
        announced = _header(scope, b"content-length", absent=b"0")
        if announced is None or not announced.isdigit() or int(announced) > self._max_bytes:
            await _refuse(self._too_large(), scope, receive, send)
            return
        chunks: list[bytes] = []
        length, is_more = 0, True
        with anyio.move_on_after(self._seconds):
            while is_more and length <= self._max_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                chunks.append(message.get("body", b""))
                length += len(chunks[-1])
                is_more = message.get("more_body", False)
        if length > self._max_bytes:
            await _refuse(self._too_large(), scope, receive, send)
        elif is_more:
            text = f"the body took longer than {self._seconds} s to arrive; send it faster, or less"
            error = ApiError(408, text, code="request_timeout", headers=_CLOSE)
            await _refuse(error, scope, receive, send)
        else:
            await self._app(scope, _replay(b"".join(chunks), receive), send)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._max_bytes} bytes; send less"
        return ApiError(413, message, code="request_too_large", headers=_CLOSE)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then whatever comes: a disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    note_error(scope, error)
    await error.response()(scope, receive, send)


def _header(scope: Scope, name: bytes, absent: bytes | None = None) -> bytes | None:
    """A header's value; None where it is there twice, which no reader may choose from."""
    values = [value for key, value in scope["headers"] if key == name]
    if not values:
        return absent
    return values[0] if len(values) == 1 else None


def _has_body(scope: Scope) -> bool:
    names = {key for key, _ in scope["headers"]}
    return b"transfer-encoding" in names or _header(scope, b"content-length", b"0") != b"0"


def _is_json(content_type: bytes | None) -> bool:
    if content_type is None:
        return False
    headers = Headers()
    headers["content-type"] = content_type.decode("latin-1").replace("\r", "").replace("\n", "")
    charset = headers.get_content_charset("utf-8")
    return headers.get_content_type() == "application/json" and charset in ("utf-8", "utf8")


def _digest(key: bytes) -> bytes:
    """Of equal length whatever the key's, so that comparing takes the same time."""
    return hashlib.sha256(key).digest()


def _request_id(scope: Scope) -> str:
    """The client's, if it is a word that log and headers can hold; else a new one."""
    given = (_header(scope, REQUEST_ID.encode()) or b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
