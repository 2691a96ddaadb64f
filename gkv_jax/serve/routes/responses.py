"""The Responses API."""

from typing import Any

import anyio.to_thread
import fastapi
from fastapi import FastAPI
from starlette.responses import Response

from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.responses import ResponsesRequest
from gkv_jax.serve.replies.events import EventStream
from gkv_jax.serve.replies.logprobs import TokenTexts
from gkv_jax.serve.replies.responses import ResponseBody, ResponsesReply
from gkv_jax.serve.replies.whole import whole
from gkv_jax.serve.routes.openapi import ERRORS, STREAMS
from gkv_jax.serve.service import LEFT_OUT, Job, ReadChat, Service


def add(app: FastAPI, service: Service, fingerprint: str) -> None:
    """Add the route."""
    texts = TokenTexts(service.engine)

    @app.post("/v1/responses", response_model=ResponseBody, responses=STREAMS | ERRORS)
    async def responses(asked: ResponsesRequest, http: fastapi.Request) -> Any:
        service.check_model(asked.model)
        asked.check()
        samplings = [asked.sampling(service.limits)]
        with service.places(samplings) as places:
            read = await anyio.to_thread.run_sync(_read, asked, service)
            job = Job(
                prompts=[read.prompt],
                prompt_field="input",
                samplings=samplings,
                seconds=asked.seconds(service.limits),
                constraint=read.constraint,
                marks=read.marks,
                cache=asked.cache,
            )
            answer = await service.start(job, places)
        reply = ResponsesReply(
            service.model,
            fingerprint,
            texts,
            may_call=read.talk.may_call,
            call_format=read.talk.call_format,
            echo=asked.echo(parallel_tool_calls=read.talk.parallel),
            reading=read.reading.under(answer.requests[0].grammar, may_call=read.talk.may_call),
        )
        response: Response
        if asked.stream:
            response = EventStream(answer, reply)
        else:
            (result,) = await answer.results(http)
            response = await whole(lambda: reply.whole(result))
        if read.leaves_out_reasoning:
            response.headers.append("Warning", LEFT_OUT)
        return response


def _read(asked: ResponsesRequest, service: Service) -> ReadChat:
    """What is said, and what the answer must obey; large schemas take a while."""
    turns = asked.turns()
    try:
        talk, leaves_out = service.chats.conversation(
            turns.messages,
            asked.offered,
            asked.tool_choice,
            asked.parallel_tool_calls,
            places=turns.places,
        )
    except ApiError as error:
        raise turns.error(error) from error
    return service.read(
        talk,
        "input",
        service.chats.variables(
            asked.chat_template_kwargs,
            asked.effort,
            tools=bool(talk.tools_for_template),
            effort_field="reasoning.effort",
        ),
        talk.constraint(asked.constraint()),
        leaves_out_reasoning=leaves_out,
    )
