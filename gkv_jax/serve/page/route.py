"""The playground at ``/``: a few small files, read once, that ask this server and nobody else."""

import dataclasses
import gzip
import hashlib
import importlib.resources

import fastapi
from fastapi import APIRouter
from starlette.responses import Response

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}

# Nothing from elsewhere, nothing inline, no frame around it, and no text that becomes a program.
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "Cache-Control": "no-cache",  # ask each time; the ETag answers
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}


@dataclasses.dataclass(frozen=True)
class _File:
    """A file of the page, and what a browser asks to learn whether it has changed."""

    content: bytes
    compressed: bytes
    media_type: str
    etag: str


def _read_files() -> dict[str, _File]:
    """By name; whatever has another ending is no part of the page."""
    files = {}
    for item in importlib.resources.files(__package__).iterdir():
        ending = item.name[item.name.rfind(".") :]
        if ending in _MEDIA_TYPES:
            content = item.read_bytes()
            # Weak: the same content, compressed or not.
            etag = f'W/"{hashlib.sha256(content).hexdigest()[:20]}"'
            compressed = gzip.compress(content, mtime=0)
            files[item.name] = _File(content, compressed, _MEDIA_TYPES[ending], etag)
    return files


def mount(app: fastapi.FastAPI) -> None:
    """Serve the page at ``/``, its parts below ``/page/``."""
    router = APIRouter(include_in_schema=False)
    files = _read_files()

    def serve(name: str, request: fastapi.Request) -> Response:
        file = files[name]
        headers = {**_HEADERS, "ETag": file.etag}
        known = request.headers.get("if-none-match", "")
        if file.etag in [tag.strip() for tag in known.split(",")]:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return Response(file.compressed, media_type=file.media_type, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: fastapi.Request) -> Response:
        return serve("index.html", request)

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def part(name: str, request: fastapi.Request) -> Response:
        if name not in files or name == "index.html":
            raise fastapi.HTTPException(404)
        return serve(name, request)

    app.include_router(router)
