"""Errors as OpenAI's clients know them: ``{"error": {"message", "type", "param", "code"}}``.

A message says what is wrong and the way out, never where in the server it was noticed.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gkv_jax.errors import EngineClosedError, UserError
from grammar_host import (
    CompileServiceError,
    DeadEndError,
    GrammarError,
    GuideError,
)

logger = logging.getLogger("gkv_jax.serve")

_ECHO_CHARACTERS = 80


class ApiError(Exception):
    """What a client is told.

    Attributes:
      status: the HTTP status.
      message: one line for a person.
      param: the field of the request that is at fault, in dotted form, or None.
      code: a word for a program, or None.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def json(self) -> str:
        """The error as the last event of a stream."""
        return json.dumps(self.body(), ensure_ascii=False)

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The error as the whole answer."""
        return JSONResponse(self.body(), self.status, headers)


def invalid_guide(error: GuideError, name: str | None) -> ApiError:
    """A response format that cannot be enforced; ``name`` is the client's name of the schema.

    Clients look for the words "Invalid schema for response_format" and for the code.
    """
    subject = "response_format" if name is None else f"response_format '{name}'"
    where = "" if error.pointer is None else f"In {error.pointer or 'the root'}: "
    message = f"Invalid schema for {subject}: {where}{error.reason}"
    return ApiError(400, message, param="response_format", code=error.code)


def refused(error: UserError) -> ApiError:
    """What the engine does not take: a field of ``Sampling``, which it names first, or the messages."""
    message = str(error)
    if not message.startswith("sampling."):
        return ApiError(400, message, param="messages", code="invalid_prompt")
    message = message.removeprefix("sampling.")
    return ApiError(400, message, param=message.partition(" ")[0], code="invalid_value")


def failed_generation(error: Exception | None) -> ApiError:
    """A request that failed while it was running; the others in the batch were not disturbed."""
    if isinstance(error, DeadEndError):
        message = f"{error}; try again with another seed, or loosen the schema"
        return ApiError(500, message, code="dead_end")
    if isinstance(error, EngineClosedError):
        return ApiError(503, "the server is shutting down; try again", code="shutting_down")
    if isinstance(error, CompileServiceError):
        return ApiError(503, f"{error}; try again later", code=error.code)
    if isinstance(error, GrammarError | UserError):
        return ApiError(500, str(error), code="generation_failed")
    return _internal()


def install_handlers(app: FastAPI) -> None:
    """Let the application answer every failure in the same shape."""

    @app.exception_handler(ApiError)
    async def _api(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(EngineClosedError)
    async def _closed(_: Request, error: EngineClosedError) -> JSONResponse:
        return failed_generation(error).response()

    @app.exception_handler(RequestValidationError)
    async def _validation(_: Request, error: RequestValidationError) -> JSONResponse:
        return _invalid_request(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        return _http_error(request, error).response(error.headers)

    @app.exception_handler(Exception)
    async def _unexpected(_: Request, __: Exception) -> JSONResponse:
        return _internal().response()  # the ASGI server logs the traceback


def _internal() -> ApiError:
    return ApiError(
        500,
        "the server failed on this request; try again, and see its log if it fails again",
        code="internal_error",
    )


def _http_error(request: Request, error: HTTPException) -> ApiError:
    line = f"{request.method} {request.url.path[:_ECHO_CHARACTERS]}"
    if error.status_code == 404:
        served = "POST /v1/chat/completions, GET /v1/models, GET /health, GET /metrics"
        return ApiError(404, f"Unknown URL: {line}; served are {served}", code="unknown_url")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return ApiError(405, f"{line} is not allowed; use {allowed}", code="method_not_allowed")
    if error.status_code == 413:
        return ApiError(413, str(error.detail), code="request_too_large")
    if error.status_code == 400:
        return _invalid_json("it cannot be parsed")
    return ApiError(error.status_code, str(error.detail))


def _invalid_json(reason: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")


def _invalid_request(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's complaints."""
    first: Mapping[str, Any] = errors[0]
    kind, context = first["type"], first.get("ctx", {})
    location = [str(part) for part in first["loc"][1:]]  # it starts with "body"
    if kind == "json_invalid":
        return _invalid_json(str(context.get("error", "it cannot be parsed")))
    if kind == "unserved_parameter":
        param = ".".join([*location, context["field"]])
        return ApiError(400, first["msg"], param=param, code="unsupported_parameter")
    if not location:
        message = "send a JSON object, with the header 'Content-Type: application/json'"
        return ApiError(400, message, code="invalid_body")
    param = ".".join(location)
    if kind == "extra_forbidden":
        message = f"Unknown parameter: '{param}'; leave it out"
        return ApiError(400, message, param=param, code="unknown_parameter")
    if kind == "missing":
        message = f"Missing required parameter: '{param}'"
        return ApiError(400, message, param=param, code="missing_required_parameter")
    if kind == "literal_error":
        given = repr(first["input"])[:_ECHO_CHARACTERS]
        message = f"Invalid value: {given}. Supported values are: {context['expected']}."
        return ApiError(400, message, param=param, code="invalid_value")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    reason = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"Invalid value for '{param}': {reason}", param=param, code=code)
