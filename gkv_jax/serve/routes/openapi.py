"""What ``/openapi.json`` says of errors."""

from typing import Any

from pydantic import BaseModel


class ErrorFacts(BaseModel):
    """What is wrong and the way out."""

    message: str
    type: str
    param: str | None
    code: str | None
    pointer: str | None = None


class ErrorBody(BaseModel):
    """OpenAI's error shape."""

    error: ErrorFacts


_MEANINGS = {
    400: "the request cannot be served; the message names the field and the way out",
    401: "no key, or a wrong one",
    404: "no such model",
    408: "the body took too long to arrive",
    413: "the body is too large",
    415: "the body is no JSON",
    429: "too many answers are waiting; Retry-After says when to come back",
    500: "this request failed",
    503: "the server is starting or shutting down",
    504: "the answer took longer than allowed",
}

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": meaning} for status, meaning in _MEANINGS.items()
}

STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""What ``/openapi.json`` says of answers that may be streams: OpenAPI 3.1 has no words for their events."""
