"""Chat completions and completions."""

from typing import Any

import anyio.to_thread
import fastapi
from fastapi import FastAPI
from starlette.responses import Response

from gkv_jax.serve.generation import Answer
from gkv_jax.serve.protocol.chat import ChatCompletionRequest
from gkv_jax.serve.protocol.completions import CompletionRequest
from gkv_jax.serve.replies.chat import ChatCompletion, ChatReply
from gkv_jax.serve.replies.completions import Completion, CompletionReply
from gkv_jax.serve.replies.events import EventStream
from gkv_jax.serve.replies.logprobs import TokenTexts
from gkv_jax.serve.replies.whole import whole
from gkv_jax.serve.routes.openapi import ERRORS, STREAMS
from gkv_jax.serve.service import LEFT_OUT, Job, ReadChat, Service


def add(app: FastAPI, service: Service, fingerprint: str) -> None:
    """Add the routes."""
    texts = TokenTexts(service.engine)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMS | ERRORS)
    async def chat_completions(asked: ChatCompletionRequest, http: fastapi.Request) -> Any:
        service.check_model(asked.model)
        asked.check()
        samplings = asked.answers(service.limits)
        with service.places(samplings) as places:
            read = await anyio.to_thread.run_sync(_read, asked, service)
            job = Job(
                prompts=[read.prompt],
                prompt_field="messages",
                samplings=samplings,
                seconds=asked.seconds(service.limits),
                constraint=read.constraint,
                marks=read.marks,
                trace=asked.trace or False,
                cache=asked.cache,
            )
            answer = await service.start(job, places)
        reply = ChatReply(
            service.model,
            fingerprint,
            texts,
            choices=len(samplings),
            has_tools=read.talk.may_call,
            call_format=read.talk.call_format,
            reading=read.reading.under(answer.requests[0].grammar, may_call=read.talk.may_call),
            include_usage=asked.include_usage,
            positions=[len(r.prompt) for r in answer.requests] if asked.trace else None,
        )
        response = await _tell(answer, reply, asked, http)
        if read.leaves_out_reasoning:
            response.headers.append("Warning", LEFT_OUT)
        return response

    @app.post("/v1/completions", response_model=Completion, responses=STREAMS | ERRORS)
    async def completions(asked: CompletionRequest, http: fastapi.Request) -> Any:
        service.check_model(asked.model)
        asked.check()
        samplings, prompts = asked.answers(service.limits), asked.prompts()
        with service.places(samplings, len(prompts)) as places:
            job = Job(
                prompts=prompts,
                prompt_field="prompt",
                samplings=samplings,
                seconds=asked.seconds(service.limits),
                constraint=asked.constraint(),
                trace=asked.trace or False,
                cache=asked.cache,
            )
            answer = await service.start(job, places)
        reply = CompletionReply(
            service.model,
            fingerprint,
            texts,
            answers=len(samplings),
            include_usage=asked.include_usage,
            positions=[len(r.prompt) for r in answer.requests] if asked.trace else None,
        )
        return await _tell(answer, reply, asked, http)


def _read(asked: ChatCompletionRequest, service: Service) -> ReadChat:
    """What is said, and what the answer must obey; large schemas take a while."""
    talk, leaves_out = service.chats.conversation(
        asked.messages, asked.tools, asked.tool_choice, asked.parallel_tool_calls
    )
    return service.read(
        talk,
        "messages",
        service.chats.variables(
            asked.chat_template_kwargs,
            asked.reasoning_effort,
            tools=bool(talk.tools_for_template),
        ),
        talk.constraint(asked.constraint()),
        leaves_out_reasoning=leaves_out,
    )


async def _tell(
    answer: Answer,
    reply: ChatReply | CompletionReply,
    asked: ChatCompletionRequest | CompletionRequest,
    http: fastapi.Request,
) -> Response:
    """The response, as a stream or whole, with a warning if fields were translated."""
    response: Response
    if asked.stream:
        response = EventStream(answer, reply)
    else:
        results = await answer.results(http)
        response = await whole(lambda: reply.completion(results))
    for name in asked.legacy_fields:
        text = f'299 gkv_jax "{name} is an old name; use structured_outputs"'
        response.headers.append("Warning", text)
    return response
