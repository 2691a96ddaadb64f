"""The routes."""

import contextlib
import dataclasses
import hashlib
import math
import os
import platform
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import anyio.to_thread
import fastapi
import jax
import jaxlib
from fastapi import FastAPI
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import gkv_jax
from gkv_jax.engine import Engine
from gkv_jax.errors import EngineClosedError, PromptTooLongError, UserError
from gkv_jax.request import Piece, Request
from gkv_jax.serve import generation
from gkv_jax.serve.errors import (
    ApiError,
    failed_generation,
    install_handlers,
    invalid_guide,
    logger,
    refused,
)
from gkv_jax.serve.metrics import Metrics
from gkv_jax.serve.protocol import ChatCompletionRequest
from gkv_jax.serve.replies import ChatCompletion, Health, Model, ModelList, Reply
from gkv_jax.serve.settings import Limits
from grammar_host import CompileCrashError, GrammarError, GuideError


@dataclasses.dataclass(frozen=True)
class _Service:
    """What the routes share.

    Attributes:
      engine: does the work.
      model: what clients call the model.
      limits: how much one request may ask for.
      metrics: what ended requests are counted in.
      fingerprint: OpenAI's ``system_fingerprint``, see ``_fingerprint``.
      created: Unix time of the start.
    """

    engine: Engine
    model: str
    limits: Limits
    metrics: Metrics
    fingerprint: str
    created: int

    def check_model(self, model: str) -> None:
        """Raises ApiError unless this model is served."""
        if model != self.model:
            message = f"The model '{model}' does not exist; this server has '{self.model}'"
            raise ApiError(404, message, param="model", code="model_not_found")

    def prepare(self, asked: ChatCompletionRequest) -> Request:
        """Everything that can be refused, and all that takes long; runs in a thread.

        Raises:
          ApiError: the request cannot be served.
        """
        sampling = asked.sampling(self.limits)
        self._check_prediction(sampling.prediction)
        try:
            request = self.engine.prepare(asked.chat(), asked.guide(), sampling)
        except GuideError as error:
            if isinstance(error, CompileCrashError):
                logger.error("a guide brought its compilation down", exc_info=error)
            name = asked.response_format.name if asked.response_format else None
            raise invalid_guide(error, name) from error
        except GrammarError as error:  # not the guide's fault
            logger.error("guides cannot be compiled", exc_info=error)
            raise failed_generation(error) from error
        except PromptTooLongError as error:
            code = "context_length_exceeded"
            raise ApiError(400, str(error), param="messages", code=code) from error
        except UserError as error:
            raise refused(error) from error
        if len(request.prompt) > self.limits.prompt_tokens:
            message = (
                f"the messages are {len(request.prompt)} tokens long and this server reads at most "
                f"{self.limits.prompt_tokens}; shorten them"
            )
            raise ApiError(400, message, param="messages", code="context_length_exceeded")
        return request

    def _check_prediction(self, prediction: str | None) -> None:
        """Raises ApiError if an answer as long as the prediction would not be allowed."""
        if prediction is None:
            return
        tokens = self.engine.tokenizer.encode(prediction, add_special_tokens=False, verbose=False)
        if len(tokens) > self.limits.completion_tokens:
            message = (
                f"prediction has {len(tokens)} tokens and this server writes at most "
                f"{self.limits.completion_tokens}; shorten it or leave it out"
            )
            raise ApiError(400, message, param="prediction", code="invalid_value")

    def stream(self, request: Request, reply: Reply) -> "EventStream":
        """Submit a prepared request; its answer as server-sent events.

        Raises:
          EngineClosedError: the engine is closed.
        """
        pieces = generation.submit(self.engine, request, self.metrics.count)
        return EventStream(request, _events(pieces, request, reply))


def _log_failure(reply: Reply, error: Exception | None) -> None:
    if isinstance(error, EngineClosedError):
        logger.info("%s was cut off by the end of the server", reply.id)
    else:
        logger.error("%s failed", reply.id, exc_info=error)


class EventStream(EventSourceResponse):
    """Gives up its request if the client leaves, even before the first event was asked for."""

    def __init__(self, request: Request, events: AsyncIterator[dict[str, str]]) -> None:
        # Streams end because the engine does, with an error that says so; not before.
        super().__init__(events, sep="\n", shutdown_grace_period=math.inf)
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            generation.leave(self._request)


async def _events(
    pieces: AsyncGenerator[Piece, None], request: Request, reply: Reply
) -> AsyncGenerator[dict[str, str], None]:
    """The server-sent events of one answer."""
    async with contextlib.aclosing(pieces):
        yield {"data": reply.opening()}
        async for piece in pieces:
            if piece.text:
                yield {"data": reply.text(piece.text)}
    result = request.result()
    if result.finish_reason == "error":
        _log_failure(reply, result.error)
        yield {"data": failed_generation(result.error).json()}
        return
    for chunk in reply.closing(result):
        yield {"data": chunk}
    yield {"data": "[DONE]"}


class _BodyLimit:
    """ASGI middleware that reads no more of a body than is allowed."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(
                    413, f"the body is larger than {self._max_bytes} bytes; send less"
                )
            return message

        await self._app(scope, counted, send)


def create_app(engine: Engine, *, model: str, limits: Limits | None = None) -> FastAPI:
    """The ASGI application.

    Args:
      engine: does the work; whoever made it closes it.
      model: what clients call the model.
      limits: how much one request may ask for; ``Limits()`` if None.
    """
    service = _Service(
        engine,
        model,
        limits or Limits(),
        Metrics(),
        _fingerprint(engine, model),
        int(time.time()),
    )
    # The pages for /docs and /redoc would come from elsewhere; /openapi.json is here.
    app = FastAPI(title="gkv_jax", version=gkv_jax.__version__, docs_url=None, redoc_url=None)
    app.add_middleware(_BodyLimit, max_bytes=service.limits.body_bytes)
    install_handlers(app)

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(asked: ChatCompletionRequest, http: fastapi.Request) -> Any:
        service.check_model(asked.model)
        asked.check_stream()
        request = await anyio.to_thread.run_sync(service.prepare, asked)
        reply = Reply(model, service.fingerprint, include_usage=asked.include_usage)
        if asked.stream:
            return service.stream(request, reply)
        result = await generation.result(engine, request, http, service.metrics.count)
        if request.cancelled:
            raise ApiError(499, "the client closed the connection")
        if result.finish_reason == "error":
            _log_failure(reply, result.error)
            raise failed_generation(result.error)
        return reply.completion(result)

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[Model(id=model, created=service.created)])

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Model:
        service.check_model(name)
        return Model(id=model, created=service.created)

    @app.get("/health")
    async def health() -> Health:
        return Health(model=model, slots=engine.slots)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=Metrics.MEDIA_TYPE)

    return app


def _fingerprint(engine: Engine, model: str) -> str:
    """Changes with whatever changes the compiled programs, whose rounding may decide a close call.

    The weights are known by the model's name only.
    """
    device = jax.devices()[0]
    software = (gkv_jax.__version__, jax.__version__, jaxlib.__version__)
    options = (os.environ.get("XLA_FLAGS"), jax.config.values["jax_default_matmul_precision"])
    machine = (device.platform, device.device_kind, platform.machine(), os.cpu_count())
    setup = (model, str(engine.dtype), engine.spec, engine.slots, engine.loop)
    parts = (software, options, machine, setup)
    return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]
