"""Routes that generate nothing: what is served and how it is, tokens and back, checks of guides."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import anyio.to_thread
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import JSONResponse, PlainTextResponse, Response

from gkv_jax.serve.errors import ApiError, engine_failed
from gkv_jax.serve.metrics import Metrics
from gkv_jax.serve.protocol.tokens import DetokenizeRequest, GuideCheckRequest, TokenizeRequest
from gkv_jax.serve.replies.logprobs import TokenTexts
from gkv_jax.serve.replies.whole import whole
from gkv_jax.serve.routes.openapi import ERRORS
from gkv_jax.serve.service import LEFT_OUT, Service
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

    status: Literal["ready", "draining", "failed"]


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
    spec, texts, tags = engine.spec, TokenTexts(engine), service.chats.tags
    model = Model(
        id=service.model,
        created=created,
        max_model_len=limits.prompt_tokens + limits.completion_tokens,
        gkv={
            "slots": engine.slots,
            "dtype": str(engine.dtype),
            "vocab_size": engine.model.vocab_size,
            "backends": ["auto", *SERVED_BACKENDS],
            "reasoning": None if tags is None else [tags.start, tags.end],
            "tool_format": service.chats.tool_format,
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
        if engine.failure is not None:
            raise engine_failed()
        if engine.closed:
            raise ApiError(503, "the engine has ended; restart the server", code="shutting_down")
        return Health(model=service.model, slots=engine.slots)

    @app.get("/ready", response_model=Ready, responses={503: {"model": Ready}})
    async def ready() -> Any:
        if is_ready() and not engine.closed:
            return Ready(status="ready")
        status = "draining" if engine.failure is None else "failed"
        return JSONResponse({"status": status}, 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=Metrics.MEDIA_TYPE)

    @app.post("/tokenize", response_model=Tokens, responses=ERRORS)
    async def tokenize(asked: TokenizeRequest) -> Any:
        service.check_model(asked.model)
        asked.check()
        tokens, leaves_out_reasoning = await anyio.to_thread.run_sync(_tokens, service, asked)
        response = await whole(lambda: _tokenized(service, asked, tokens, texts))
        if leaves_out_reasoning:
            response.headers.append("Warning", LEFT_OUT)
        return response

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(asked: DetokenizeRequest) -> Detokenized:
        service.check_model(asked.model)
        return Detokenized(prompt=await anyio.to_thread.run_sync(_text, service, asked.tokens))

    @app.post("/v1/guide/check", responses=ERRORS)
    async def check_guide(asked: GuideCheckRequest) -> GuideCheck:
        service.check_model(asked.model)
        constraint = await anyio.to_thread.run_sync(asked.constraint)
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


def _tokenized(
    service: Service, asked: TokenizeRequest, tokens: list[int], texts: TokenTexts
) -> Tokens:
    limits = service.limits
    return Tokens(
        count=len(tokens),
        max_model_len=limits.prompt_tokens + limits.completion_tokens,
        tokens=tokens,
        token_strs=[texts.text_of(token) for token in tokens] if asked.return_token_strs else None,
    )


def _tokens(service: Service, asked: TokenizeRequest) -> tuple[list[int], bool]:
    """Refused where a prompt would be; and whether reasoning of earlier turns is left out."""
    engine = service.engine
    if asked.prompt is not None:
        tokens = engine.tokenizer.encode(
            asked.prompt, add_special_tokens=asked.add_special_tokens, verbose=False
        )
        return list(service.tokens(tokens, "prompt")) if tokens else [], False
    assert asked.messages is not None
    talk, leaves_out = service.chats.conversation(asked.messages, asked.tools, None, None)
    tools = talk.tools_for_template
    template = service.chats.variables(asked.chat_template_kwargs, tools=bool(tools))
    tokens = service.tokens(
        talk.messages,
        "messages",
        tools=tools,
        template=template,
        answer=asked.add_generation_prompt,
    )
    return list(tokens), leaves_out


def _text(service: Service, tokens: list[int]) -> str:
    largest = service.engine.model.vocab_size - 1
    if (token := max(tokens, default=0)) > largest:
        message = f"tokens holds {token}; the largest is {largest}"
        raise ApiError(400, message, param="tokens", code="invalid_value")
    return str(service.engine.tokenizer.decode(tokens))
