"""Routes that generate nothing: what is served and how it is, tokens and back, checks of guides."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import anyio.to_thread
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import JSONResponse, PlainTextResponse, Response

from gkv_jax.errors import UserError
from gkv_jax.serve.errors import ApiError, refused
from gkv_jax.serve.metrics import Metrics
from gkv_jax.serve.protocol.tokens import DetokenizeRequest, GuideCheckRequest, TokenizeRequest
from gkv_jax.serve.routes.errors import ERRORS
from gkv_jax.serve.service import Service
from grammar_host.backends import SERVED_BACKENDS


class Model(BaseModel):
    """A served model; ``gkv`` says how it is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["gkv_jax"] = "gkv_jax"
    max_model_len: int
    gkv: dict[str, Any]


class ModelList(BaseModel):
    """The served models: one."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """The server answers, so it has loaded and warmed up."""

    status: Literal["ok"] = "ok"
    model: str
    slots: int


class Ready(BaseModel):
    """Whether new requests are taken."""

    status: Literal["ready", "draining"]


class Tokens(BaseModel):
    """A text's token ids and, if asked for, what each of them writes."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """The text of token ids; ``prompt`` is vLLM's name for it."""

    prompt: str


class GuideCheck(BaseModel):
    """A guide that can be served, and how: what ``Grammar`` knows of it."""

    valid: Literal[True] = True
    kind: str
    backend: str
    exact: bool
    notes: list[str]
    compile_ms: float


def add(app: FastAPI, service: Service, created: int, is_ready: Callable[[], bool]) -> None:
    """Add the routes."""
    engine, limits = service.engine, service.limits
    spec = engine.spec
    model = Model(
        id=service.model,
        created=created,
        max_model_len=limits.prompt_tokens + limits.completion_tokens,
        gkv={
            "slots": engine.slots,
            "dtype": str(engine.dtype),
            "vocab_size": engine.model.vocab_size,
            "backends": ["auto", *SERVED_BACKENDS],
            "cache": {
                "policy": spec.policy_name,
                "decode": spec.evictor.name if spec.evictor else None,
                "sinks": spec.sinks,
                "kept": spec.kept,
                "window": spec.window,
                "max_drafts": spec.max_drafts,
                "total": spec.total,
                "bytes": engine.cache_bytes,
            },
            "limits": dataclasses.asdict(limits),
        },
    )

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[model])

    @app.get("/v1/models/{name:path}", responses={404: ERRORS[404]})
    async def retrieve_model(name: str) -> Model:
        service.check_model(name)
        return model

    @app.get("/health", responses={503: ERRORS[503]})
    async def health() -> Health:
        if engine.closed:
            raise ApiError(503, "the engine has ended; restart the server", code="shutting_down")
        return Health(model=service.model, slots=engine.slots)

    @app.get("/ready", response_model=Ready, responses={503: {"model": Ready}})
    async def ready() -> Any:
        if is_ready() and not engine.closed:
            return Ready(status="ready")
        return JSONResponse({"status": "draining"}, 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=Metrics.MEDIA_TYPE)

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(asked: TokenizeRequest) -> Tokens:
        service.check_model(asked.model)
        tokens = await anyio.to_thread.run_sync(_tokens, service, asked)
        texts = [engine.tokenizer.decode([t]) for t in tokens] if asked.return_token_strs else None
        return Tokens(
            count=len(tokens), max_model_len=model.max_model_len, tokens=tokens, token_strs=texts
        )

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(asked: DetokenizeRequest) -> Detokenized:
        service.check_model(asked.model)
        for token in asked.tokens:
            if token >= engine.model.vocab_size:
                message = f"tokens holds {token}; the largest is {engine.model.vocab_size - 1}"
                raise ApiError(400, message, param="tokens", code="invalid_value")
        text = await anyio.to_thread.run_sync(engine.tokenizer.decode, asked.tokens)
        return Detokenized(prompt=text)

    @app.post("/v1/guide/check", responses=ERRORS)
    async def check_guide(asked: GuideCheckRequest) -> GuideCheck:
        service.check_model(asked.model)
        constraint = asked.constraint()
        if constraint is None:
            message = "nothing to check; give response_format or structured_outputs"
            raise ApiError(400, message, code="missing_required_parameter")
        grammar = await service.compile(constraint)
        return GuideCheck(
            kind=grammar.guide.kind,
            backend=grammar.backend,
            exact=grammar.exact,
            notes=list(grammar.notes),
            compile_ms=1e3 * (grammar.plan_seconds + grammar.compile_seconds),
        )


def _tokens(service: Service, asked: TokenizeRequest) -> list[int]:
    engine = service.engine
    if asked.prompt is not None:
        return engine.tokenizer.encode(
            asked.prompt, add_special_tokens=asked.add_special_tokens, verbose=False
        )
    assert asked.messages is not None
    messages = [{"role": m.role, "content": m.content} for m in asked.messages]
    try:
        return list(engine.encode(messages, answer=asked.add_generation_prompt))
    except UserError as error:
        raise refused(error, "messages") from error
