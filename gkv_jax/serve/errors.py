"""Errors as OpenAI's clients know them: ``{"error": {"message", "type", "param", "code"}}``.

A message says what is wrong and the way out, never where in the server it was noticed.
"""

import json
import logging
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gkv_jax.errors import EngineClosedError, EngineFailedError, UserError
from gkv_jax.request import RequestCancelled
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
      pointer: JSON pointer into ``param`` of what is at fault, or None.
      headers: of the response, such as ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        pointer: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.pointer, self.headers = pointer, headers

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape, with one more field where a place in a schema is to blame."""
        kind = _TYPES.get(self.status) or (
            "invalid_request_error" if self.status < 500 else "server_error"
        )
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error if self.pointer is None else error | {"pointer": self.pointer}}

    def json(self) -> str:
        """The error as the last event of a stream."""
        return json.dumps(self.body(), ensure_ascii=False)

    def response(self) -> JSONResponse:
        """The error as the whole answer."""
        return JSONResponse(self.body(), self.status, self.headers)


_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class RequestTimeout(Exception):
    """A request took longer than it may."""


def invalid_guide(error: GuideError, field: str, name: str | None = None) -> ApiError:
    """What constrains an answer, but cannot be enforced; ``name`` is the client's name of a schema.

    Clients look for the words "Invalid schema for response_format" and for the code.
    """
    subject = field if name is None else f"{field} '{name}'"
    kind = "Invalid schema for" if field.startswith("response_format") else "Invalid value for"
    where = "" if error.pointer is None else f"In {error.pointer or 'the root'}: "
    message = f"{kind} {subject}: {where}{error.reason}"
    if error.param == "backend":
        field = "backend"
    return ApiError(400, message, param=field, code=error.code, pointer=error.pointer)


def refused(error: UserError, prompt_field: str = "messages") -> ApiError:
    """What the engine does not take: a field of ``Sampling``, which it names first, or the prompt."""
    message = str(error)
    if not message.startswith("sampling."):
        return ApiError(400, message, param=prompt_field, code="invalid_prompt")
    message = message.removeprefix("sampling.")
    field = re.match(r"\w+", message)
    return ApiError(400, message, param=field and field[0], code="invalid_value")


def failed_generation(error: Exception | None) -> ApiError:
    """A request that failed while it was running; the others in the batch were not disturbed."""
    if isinstance(error, DeadEndError):
        message = f"{error}; try again with another seed, or loosen the schema"
        return ApiError(500, message, code="dead_end")
    if isinstance(error, EngineFailedError):
        return engine_failed()
    if isinstance(error, EngineClosedError):
        return shutting_down()
    if isinstance(error, RequestCancelled):
        return ApiError(499, "the client closed the connection", code="cancelled")
    if isinstance(error, RequestTimeout):
        return ApiError(504, str(error), code="request_timeout")
    if isinstance(error, CompileServiceError):
        return ApiError(503, f"{error}; try again later", code=error.code)
    if isinstance(error, GuideError):  # over a limit that only generating reaches
        return ApiError(400, str(error), code=error.code, pointer=error.pointer)
    if isinstance(error, GrammarError | UserError):
        return ApiError(500, str(error), code="generation_failed")
    return internal_error()


def log_failure(error: ApiError) -> None:
    """Tell the log of an answer that failed on the way."""
    if error.status < 500 or error.code in ("shutting_down", "request_timeout"):
        logger.info("an answer was cut off: %s", error)
    else:
        logger.error("an answer failed: %s", error, exc_info=error.__cause__)


def note_error(scope: MutableMapping[str, Any], error: ApiError) -> None:
    """Leave an error's code in the ASGI scope of its request, for the access log and the metrics."""
    scope.setdefault("state", {})["error_code"] = error.code


def shutting_down() -> ApiError:
    """The server is ending, and another one may take its place."""
    headers = {"Retry-After": "10"}
    message = "the server is shutting down; try again"
    return ApiError(503, message, code="shutting_down", headers=headers)


def engine_failed() -> ApiError:
    """The engine is lost, and the process ends."""
    headers = {"Retry-After": "10"}
    message = "the server's engine has failed; try again once the server has been restarted"
    return ApiError(503, message, code="engine_failed", headers=headers)


def install_handlers(app: FastAPI) -> None:
    """Let the application answer what it refuses in the same shape.

    What nobody foresaw is answered by ``gkv_jax.serve.middleware.Observe``.
    """

    def answer(request: Request, error: ApiError) -> JSONResponse:
        note_error(request.scope, error)
        return error.response()

    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> JSONResponse:
        return answer(request, error)

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(request, _invalid_request(error.errors()))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        return answer(request, _http_error(request, error))


def internal_error() -> ApiError:
    """What nobody foresaw; the log has it."""
    return ApiError(
        500,
        "the server failed on this request; try again, and see its log if it fails again",
        code="internal_error",
    )


def _http_error(request: Request, error: HTTPException) -> ApiError:
    line = f"{request.method} {request.url.path[:_ECHO_CHARACTERS]}"
    message, code = str(error.detail), None
    if error.status_code == 404:
        message = f"Unknown URL: {line}; GET /openapi.json lists what is served"
        code = "unknown_url"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message, code = f"{line} is not allowed; use {allowed}", "method_not_allowed"
    elif error.status_code == 400:
        return _invalid_json("it cannot be parsed")
    return ApiError(error.status_code, message, code=code, headers=error.headers)


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
