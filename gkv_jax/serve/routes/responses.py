"""The Responses API."""

from typing import Any

import anyio.to_thread
import fastapi
from fastapi import FastAPI

from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.formats import Constraint
from gkv_jax.serve.protocol.responses import ResponsesRequest
from gkv_jax.serve.replies.events import EventStream
from gkv_jax.serve.replies.logprobs import TokenTexts
from gkv_jax.serve.replies.responses import ResponseBody, ResponsesReply
from gkv_jax.serve.replies.whole import whole
from gkv_jax.serve.routes.openapi import ERRORS, STREAMS
from gkv_jax.serve.service import Job, Service
from gkv_jax.serve.tools import Conversation


def add(app: FastAPI, service: Service, fingerprint: str) -> None:
    """Add the route."""
    texts = TokenTexts(service.engine)

    @app.post("/v1/responses", response_model=ResponseBody, responses=STREAMS | ERRORS)
    async def responses(asked: ResponsesRequest, http: fastapi.Request) -> Any:
        service.check_model(asked.model)
        asked.check()
        samplings = [asked.sampling(service.limits)]
        with service.places(samplings) as places:
            talk, constraint = await anyio.to_thread.run_sync(_read, asked, service)
            job = Job(
                prompts=[talk.messages],
                prompt_field="input",
                samplings=samplings,
                seconds=asked.seconds(service.limits),
                constraint=constraint,
                tools=talk.tools_for_template,
                cache=asked.cache,
            )
            answer = await service.start(job, places)
        reply = ResponsesReply(
            service.model, fingerprint, texts, may_call=talk.may_call, echo=asked.echo()
        )
        if asked.stream:
            return EventStream(answer, reply)
        (result,) = await answer.results(http)
        return await whole(lambda: reply.whole(result))


def _read(asked: ResponsesRequest, service: Service) -> tuple[Conversation, Constraint | None]:
    """What is said, and what the answer must obey; large schemas take a while."""
    turns = asked.turns()
    try:
        talk = Conversation.of(
            turns.messages,
            asked.offered,
            asked.tool_choice,
            asked.parallel_tool_calls,
            tokenizer=service.engine.tokenizer,
        )
    except ApiError as error:
        raise turns.error(error) from error
    return talk, talk.constraint(asked.constraint())
