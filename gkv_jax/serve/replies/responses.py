"""OpenAI's answers of the Responses API, whole or as events."""

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from gkv_jax.request import Piece, Result, TokenLogprobs
from gkv_jax.serve.chats import Reading
from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.replies.events import SseEvent
from gkv_jax.serve.replies.logprobs import TokenTexts, for_chat
from gkv_jax.serve.replies.parts import AnswerParts, Part
from gkv_jax.serve.replies.usage import Usage, figures
from gkv_jax.serve.tools import (
    HERMES_FORMAT,
    AnswerEvent,
    CallArguments,
    CallBegins,
    CallEnds,
    CallFormat,
    TextDelta,
    ToolCallParser,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[dict[str, Any]] = []


class OutputMessage(BaseModel):
    """What the model said; ``incomplete`` if a limit cut it off."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText]


class ReasoningText(BaseModel):
    """What the model thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class OutputReasoning(BaseModel):
    """What the model thought before it answered; ``incomplete`` if a limit cut it off."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: None = None


class OutputCall(BaseModel):
    """A call that the model asks for; ``arguments`` is JSON text, the beginning of one if ``incomplete``."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputTokensDetails(BaseModel):
    """Tokens of the input that were not read, because a shared prefix holds them."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """Tokens of the reasoning, its tags included."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Tokens read and written; the stop token is not counted."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, result: Result, reasoning_tokens: int) -> "ResponseUsage":
        """The usage of a finished request, of whose tokens so many are reasoning."""
        usage = Usage.of([result])
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


class IncompleteDetails(BaseModel):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(BaseModel):
    """Why an answer failed. OpenAI lists its codes; the server's own word is in ``type``."""

    code: Literal["server_error"] = "server_error"
    message: str
    type: str | None


class ResponseBody(BaseModel):
    """The answer, with what it repeats of its request; ``gkv`` has the figures of ``Result.stats``."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    system_fingerprint: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    gkv: dict[str, Any] | None = None

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    user: str | None

    background: Literal[False] = False
    previous_response_id: None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"


Told = dict[str, Any]
"""An event without its number."""


class Output:
    """The items of an answer, as they are written: reasoning, a message where there is text, each call.

    Whole answers and streams are written by this, so that they say the same.

    Attributes:
      items: what there is.
    """

    def __init__(
        self,
        texts: TokenTexts,
        may_call: bool,
        call_format: CallFormat = HERMES_FORMAT,
        reading: Reading | None = None,
    ) -> None:
        """Of an answer that is still to come.

        Args:
          texts: what tokens write, for log-probabilities.
          may_call: whether calls are to be found in the text.
          call_format: how they are written.
          reading: how reasoning is told apart; not at all if None.
        """
        self.items: list[OutputItem] = []
        self._parts = AnswerParts(reading or Reading())
        self._texts = texts
        self._parser = ToolCallParser(call_format) if may_call else None
        self._open: OutputItem | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning, its tags included."""
        return self._parts.reasoning_tokens

    def write(
        self, text: str, logprobs: Sequence[TokenLogprobs] = (), tokens: Sequence[int] = ()
    ) -> Iterator[Told]:
        """More of the answer; ``logprobs`` only where there are no calls."""
        yield from self._tell(self._parts.push(text, tokens, logprobs))

    def _tell(self, part: Part) -> Iterator[Told]:
        if part.reasoning:
            yield from self._think(part.reasoning)
        if self._parser is not None:
            yield from self._read(self._parser.push(part.text))
        elif part.text or part.logprobs:
            yield from self._say(part.text, part.logprobs)

    def finish(self, cut_off: bool) -> Iterator[Told]:
        """The end of the answer, by a limit or not. An empty answer is an empty message."""
        yield from self._tell(self._parts.finish())
        if self._parser is not None:
            yield from self._read(self._parser.finish())
        has_answer = self._parts.has_answer
        if isinstance(self._open, OutputReasoning):
            if not has_answer or cut_off:
                yield from self._close(has_answer or not cut_off)
                return
            yield from self._message()
        elif not self.items:
            yield from self._message()
        # A call that ends has been closed.
        yield from self._close(not cut_off and isinstance(self._open, OutputMessage))

    def _think(self, text: str) -> Iterator[Told]:
        if self._open is None:
            item = OutputReasoning(id=f"rs_{secrets.token_hex(24)}", content=[])
            yield from self._add(item)
            item.content.append(ReasoningText())
            yield self._of_part("response.content_part.added", part=item.content[0].model_dump())
        assert isinstance(self._open, OutputReasoning)
        self._open.content[0].text += text
        yield self._of_part("response.reasoning_text.delta", delta=text)

    def _read(self, events: Iterable[AnswerEvent]) -> Iterator[Told]:
        for event in events:
            match event:
                case TextDelta(text):
                    yield from self._say(text)
                case CallBegins(_, call_id, name):
                    yield from self._call(call_id, name)
                case CallArguments(_, text):
                    yield from self._argue(text)
                case CallEnds():
                    yield from self._close(True)

    def _say(self, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> Iterator[Told]:
        yield from self._message()
        assert isinstance(self._open, OutputMessage)
        (part,) = self._open.content
        told = self._logprobs(logprobs)
        part.text += text
        part.logprobs += told
        yield self._of_part("response.output_text.delta", delta=text, logprobs=told)

    def _message(self) -> Iterator[Told]:
        """Open a message unless one is open. A call that is open broke off: text follows."""
        if isinstance(self._open, OutputMessage):
            return
        yield from self._close(isinstance(self._open, OutputReasoning))
        item = OutputMessage(id=f"msg_{secrets.token_hex(24)}", content=[])
        yield from self._add(item)
        item.content.append(OutputText())
        yield self._of_part("response.content_part.added", part=item.content[0].model_dump())

    def _call(self, call_id: str, name: str) -> Iterator[Told]:
        yield from self._close(not isinstance(self._open, OutputCall))
        yield from self._add(
            OutputCall(id=f"fc_{secrets.token_hex(24)}", call_id=call_id, name=name)
        )

    def _argue(self, text: str) -> Iterator[Told]:
        assert isinstance(self._open, OutputCall)
        self._open.arguments += text
        yield self._of_item("response.function_call_arguments.delta", delta=text)

    def _add(self, item: OutputItem) -> Iterator[Told]:
        self.items.append(item)
        self._open = item
        yield self._of_output("response.output_item.added")

    def _close(self, complete: bool) -> Iterator[Told]:
        item = self._open
        if item is None:
            return
        if isinstance(item, OutputMessage):
            (part,) = item.content
            done = {"text": part.text, "logprobs": part.logprobs}
            yield self._of_part("response.output_text.done", **done)
            yield self._of_part("response.content_part.done", part=part.model_dump())
        elif isinstance(item, OutputReasoning):
            (thought,) = item.content
            yield self._of_part("response.reasoning_text.done", text=thought.text)
            yield self._of_part("response.content_part.done", part=thought.model_dump())
        else:
            done = {"name": item.name, "arguments": item.arguments}
            yield self._of_item("response.function_call_arguments.done", **done)
        item.status = "completed" if complete else "incomplete"
        yield self._of_output("response.output_item.done")
        self._open = None

    def _of_output(self, kind: str) -> Told:
        assert self._open is not None
        return {
            "type": kind,
            "output_index": len(self.items) - 1,
            "item": self._open.model_dump(),
        }

    def _of_item(self, kind: str, **fields: Any) -> Told:
        assert self._open is not None
        place = {"item_id": self._open.id, "output_index": len(self.items) - 1}
        return {"type": kind} | place | fields

    def _of_part(self, kind: str, **fields: Any) -> Told:
        return self._of_item(kind, content_index=0, **fields)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        if logprobs:  # a text often comes token by token, and without
            told = for_chat(logprobs, self._texts).model_dump()["content"]
        for entry in told:
            for token in (entry, *entry["top_logprobs"]):
                token["bytes"] = token["bytes"] or []  # here it cannot be null
        return told


class ResponsesReply:
    """Builds an answer, or its events. A ``Narrator`` of streams."""

    def __init__(
        self,
        model: str,
        fingerprint: str,
        texts: TokenTexts,
        *,
        may_call: bool,
        echo: Mapping[str, Any],
        call_format: CallFormat = HERMES_FORMAT,
        reading: Reading | None = None,
    ) -> None:
        """Of a request.

        Args:
          texts: what tokens write, for log-probabilities.
          may_call: whether calls are to be found in the text.
          echo: what the answer repeats of its request.
          call_format: how calls are written.
          reading: how reasoning is told apart; not at all if None.
        """
        self._body = ResponseBody.model_validate(
            {
                "id": f"resp_{secrets.token_hex(24)}",
                "created_at": int(time.time()),
                "model": model,
                "system_fingerprint": fingerprint,
                **echo,
            }
        )
        self._output = Output(texts, may_call, call_format, reading)
        self._number = 0

    def whole(self, result: Result) -> ResponseBody:
        """The whole answer at once."""
        for _ in self._output.write(result.text, result.logprobs or (), result.tokens):
            pass
        for _ in self._output.finish(_is_cut_off(result)):
            pass
        return self._finished(result)

    def _finished(self, result: Result) -> ResponseBody:
        cut_off = _is_cut_off(result)
        return self._body.model_copy(
            update={
                "completed_at": None if cut_off else int(time.time()),
                "status": "incomplete" if cut_off else "completed",
                "incomplete_details": IncompleteDetails() if cut_off else None,
                "output": self._output.items,
                "usage": ResponseUsage.of(result, self._output.reasoning_tokens),
                "gkv": figures([result]),
            }
        )

    # A stream -----------------------------------------------------------------------------------

    def opening(self) -> Iterable[SseEvent]:
        """The answer begins, without anything in it."""
        yield self._of_body("response.created", self._body)
        yield self._of_body("response.in_progress", self._body)

    def piece(self, index: int, piece: Piece) -> Iterable[SseEvent]:
        """Items, and pieces of them."""
        return map(self._numbered, self._output.write(piece.text, piece.logprobs, piece.tokens))

    def end(self, index: int, result: Result) -> Iterable[SseEvent]:
        """The end of the last item."""
        return map(self._numbered, self._output.finish(_is_cut_off(result)))

    def closing(self, results: Sequence[Result]) -> Iterable[SseEvent]:
        """The whole answer."""
        (result,) = results
        body = self._finished(result)
        yield self._of_body(f"response.{body.status}", body)

    def failure(self, error: ApiError) -> Iterable[SseEvent]:
        """The error, and the items as far as they came."""
        items = self._output.items
        for item in items:
            if item.status == "in_progress":
                item.status = "incomplete"
        told = ResponseError(message=error.message, type=error.code)
        update = {"status": "failed", "error": told, "output": items}
        yield self._of_body("response.failed", self._body.model_copy(update=update))

    def _of_body(self, kind: str, body: ResponseBody) -> SseEvent:
        return self._numbered({"type": kind, "response": body.model_dump()})

    def _numbered(self, told: Told) -> SseEvent:
        values = told | {"sequence_number": self._number}
        self._number += 1
        return {"event": told["type"], "data": json.dumps(values, ensure_ascii=False)}


def _is_cut_off(result: Result) -> bool:
    return result.finish_reason == "length"
