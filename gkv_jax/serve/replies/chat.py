"""OpenAI's chat completion answers."""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from gkv_jax.request import Piece, Result
from gkv_jax.serve.chats import Reading
from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.replies.events import SseEvent
from gkv_jax.serve.replies.logprobs import ChoiceLogprobs, TokenTexts, for_chat
from gkv_jax.serve.replies.parts import AnswerParts, Part
from gkv_jax.serve.replies.usage import Usage, figures
from gkv_jax.serve.tools import (
    HERMES_FORMAT,
    AnswerEvent,
    CallArguments,
    CallBegins,
    CallFormat,
    ReadAnswer,
    TextDelta,
    ToolCallParser,
)

FinishReason = Literal["stop", "length", "tool_calls"]


class CalledFunction(BaseModel):
    """A function's name and, as JSON text, its arguments."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call that the model asks for."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ResponseMessage(BaseModel):
    """What the model thought, and what it said; None where it only calls tools, or only thinks."""

    role: Literal["assistant"] = "assistant"
    reasoning_content: str | None = None
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class Choice(BaseModel):
    """One of the ``n`` answers."""

    index: int
    message: ResponseMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """The answer to a request that does not stream; ``gkv`` has the figures of ``Result.stats``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    gkv: dict[str, Any]


class FunctionDelta(BaseModel):
    """The name, once, and pieces of the arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(BaseModel):
    """A piece of a call; its first has ``id`` and ``type``."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(BaseModel):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    reasoning_content: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(BaseModel):
    """What a chunk adds to a choice."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None


class ChatCompletionChunk(BaseModel):
    """A piece of a stream: first the role, then text, then the end with ``gkv``, then usage.

    Fields that are not set are not sent.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    gkv: dict[str, Any] = {}


class ChatReply:
    """Builds the parts of one answer, which share an id and a time. A ``Narrator`` of streams."""

    def __init__(
        self,
        model: str,
        fingerprint: str,
        texts: TokenTexts,
        *,
        choices: int = 1,
        has_tools: bool = False,
        call_format: CallFormat = HERMES_FORMAT,
        reading: Reading | None = None,
        include_usage: bool = False,
        positions: Sequence[int] | None = None,
    ) -> None:
        """Of a request.

        Args:
          texts: what tokens write, for log-probabilities.
          choices: answers that were asked for.
          has_tools: whether calls are to be found in the text.
          call_format: how they are written.
          reading: how reasoning is told apart; not at all if None.
          include_usage: each chunk has the field, and a last one is for it.
          positions: tokens of the prompt of each choice, if chunks shall tell a trace.
        """
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._common = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._texts, self._choices, self._has_tools = texts, choices, has_tools
        self._call_format, self._include_usage = call_format, include_usage
        self._positions = None if positions is None else list(positions)
        self._parts = [AnswerParts(reading or Reading()) for _ in range(choices)]
        self._parsers: dict[int, ToolCallParser] = {}
        self._told: dict[int, list[AnswerEvent]] = {}

    def completion(self, results: Sequence[Result]) -> ChatCompletion:
        """The whole answer at once."""
        choices = [self._choice(*each) for each in enumerate(results)]
        more = {"choices": choices, "usage": self._usage(results), "gkv": figures(results)}
        return ChatCompletion.model_validate(self._common | more)

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        parts = self._parts[index]
        told = parts.push(result.text, result.tokens, result.logprobs or ())
        rest = parts.finish()
        text, nothing = told.text + rest.text, "" if parts.has_answer else None
        thoughts = [part.reasoning for part in (told, rest) if part.reasoning is not None]
        message: dict[str, Any] = {
            "reasoning_content": "".join(thoughts) if thoughts else None,
            "content": text or nothing,
        }
        reason: str = result.finish_reason
        if self._has_tools:
            answer = ReadAnswer.read(text, self._call_format)
            reason = answer.finish_reason(reason)
            if answer.calls:
                message["tool_calls"] = [
                    {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                    for call in answer.calls
                ]
            message["content"] = answer.content or (None if answer.calls else nothing)
        return {
            "index": index,
            "message": message,
            "logprobs": for_chat(told.logprobs + rest.logprobs, self._texts)
            if result.logprobs
            else None,
            "finish_reason": reason,
        }

    # A stream -----------------------------------------------------------------------------------

    def opening(self) -> Iterable[SseEvent]:
        """The role of each choice."""
        for index in range(self._choices):
            yield self._chunk(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, piece: Piece) -> Iterable[SseEvent]:
        """Chunks of reasoning, text and calls."""
        gkv: dict[str, Any] = {}
        if self._positions is not None:
            self._positions[index] += len(piece.tokens)
            trace = [vars(token) for token in piece.trace]
            gkv = {"gkv": {"position": self._positions[index], "trace": trace}}
        yield from self._tell(
            index, self._parts[index].push(piece.text, piece.tokens, piece.logprobs), gkv
        )

    def _tell(self, index: int, part: Part, gkv: dict[str, Any]) -> Iterable[SseEvent]:
        extra: dict[str, Any] = {}
        if part.logprobs:
            extra["logprobs"] = for_chat(part.logprobs, self._texts)
        deltas = self._deltas(index, part)
        # Log-probabilities are of what follows the reasoning, a trace of both.
        place = sum("reasoning_content" in delta for delta in deltas)
        if (extra and place == len(deltas)) or (gkv and not deltas):
            deltas.append({"content": ""})
        for number, delta in enumerate(deltas):
            yield self._chunk(
                index, delta, None, extra if number == place else {}, gkv if number == 0 else {}
            )

    def end(self, index: int, result: Result) -> Iterable[SseEvent]:
        """The chunk with the finish reason."""
        reason: str = result.finish_reason
        yield from self._tell(index, self._parts[index].finish(), {})
        if self._has_tools:
            for delta in self._of_events(index, self._parser(index).finish()):
                yield self._chunk(index, delta, None)
            reason = ReadAnswer.of(self._told.get(index, ())).finish_reason(reason)
        yield self._chunk(index, {}, reason, {}, {"gkv": result.stats})

    def closing(self, results: Sequence[Result]) -> Iterable[SseEvent]:
        """The usage, if asked for, and the end of the stream."""
        if self._include_usage:
            yield self._dump(choices=[], usage=self._usage(results))
        yield {"data": "[DONE]"}

    def failure(self, error: ApiError) -> Iterable[SseEvent]:
        """The error instead of ``[DONE]``."""
        yield {"data": error.json()}

    def _parser(self, index: int) -> ToolCallParser:
        return self._parsers.setdefault(index, ToolCallParser(self._call_format))

    def _usage(self, results: Sequence[Result]) -> Usage:
        reasoning_tokens = sum(parts.reasoning_tokens for parts in self._parts)
        return Usage.of(results, len(results), reasoning_tokens)

    def _deltas(self, index: int, part: Part) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if part.reasoning is not None:
            deltas.append({"reasoning_content": part.reasoning})
        if self._has_tools:
            return deltas + self._of_events(index, self._parser(index).push(part.text))
        if part.text:
            deltas.append({"content": part.text})
        return deltas

    def _of_events(self, index: int, events: Sequence[AnswerEvent]) -> list[dict[str, Any]]:
        self._told.setdefault(index, []).extend(events)
        deltas: list[dict[str, Any]] = []
        for event in events:
            match event:
                case TextDelta(text):
                    deltas.append({"content": text})
                case CallBegins(number, identity, name):
                    function = {"name": name, "arguments": ""}
                    call = {"index": number, "id": identity, "type": "function"}
                    deltas.append({"tool_calls": [call | {"function": function}]})
                case CallArguments(number, text):
                    call = {"index": number, "function": {"arguments": text}}
                    deltas.append({"tool_calls": [call]})
        return deltas

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None,
        of_choice: dict[str, Any] | None = None,
        more: dict[str, Any] | None = None,
    ) -> SseEvent:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason}
        usage = {"usage": None} if self._include_usage else {}
        return self._dump(choices=[choice | (of_choice or {})], **usage, **(more or {}))

    def _dump(self, **fields: Any) -> SseEvent:
        values = self._common | {"object": "chat.completion.chunk"} | fields
        chunk = ChatCompletionChunk.model_validate(values)
        return {"data": chunk.model_dump_json(exclude_unset=True)}
