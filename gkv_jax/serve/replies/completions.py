"""OpenAI's completion answers."""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from gkv_jax.request import Piece, Result, TokenLogprobs
from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.replies.events import SseEvent
from gkv_jax.serve.replies.logprobs import (
    CompletionLogprobs,
    Offsets,
    TokenTexts,
    for_completion,
)
from gkv_jax.serve.replies.usage import Usage, figures


class CompletionChoice(BaseModel):
    """One of the answers; in a stream, a piece of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class Completion(BaseModel):
    """The answers, those to the first prompt first; in a stream, a piece of one of them."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    gkv: dict[str, Any] | None = None


class CompletionReply:
    """Builds the parts of one answer, which share an id and a time. A ``Narrator`` of streams."""

    def __init__(
        self,
        model: str,
        fingerprint: str,
        texts: TokenTexts,
        *,
        answers: int = 1,
        include_usage: bool = False,
        positions: Sequence[int] | None = None,
    ) -> None:
        """``answers``: to each prompt. The rest is as in ``ChatReply``."""
        self._common = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._texts, self._answers, self._include_usage = texts, answers, include_usage
        self._positions = None if positions is None else list(positions)
        self._offsets: dict[int, Offsets] = {}

    def completion(self, results: Sequence[Result]) -> Completion:
        """The whole answer at once."""
        choices = [
            {
                "index": index,
                "text": result.text,
                "finish_reason": result.finish_reason,
                "logprobs": self._logprobs(index, result.logprobs) if result.logprobs else None,
            }
            for index, result in enumerate(results)
        ]
        usage, gkv = Usage.of(results, self._answers), figures(results)
        return Completion.model_validate(
            self._common | {"choices": choices, "usage": usage, "gkv": gkv}
        )

    def opening(self) -> Iterable[SseEvent]:
        """Nothing."""
        return ()

    def piece(self, index: int, piece: Piece) -> Iterable[SseEvent]:
        """A chunk of text."""
        choice: dict[str, Any] = {"index": index, "text": piece.text, "finish_reason": None}
        more: dict[str, Any] = {}
        if piece.logprobs:
            choice["logprobs"] = self._logprobs(index, piece.logprobs)
        if self._positions is not None:
            self._positions[index] += len(piece.tokens)
            trace = [vars(token) for token in piece.trace]
            more = {"gkv": {"position": self._positions[index], "trace": trace}}
        if piece.text or piece.logprobs or more:
            yield self._chunk(choice, more)

    def end(self, index: int, result: Result) -> Iterable[SseEvent]:
        """The chunk with the finish reason."""
        choice = {"index": index, "text": "", "finish_reason": result.finish_reason}
        yield self._chunk(choice, {"gkv": result.stats})

    def closing(self, results: Sequence[Result]) -> Iterable[SseEvent]:
        """The usage, if asked for, and the end of the stream."""
        if self._include_usage:
            yield self._dump(choices=[], usage=Usage.of(results, self._answers))
        yield {"data": "[DONE]"}

    def failure(self, error: ApiError) -> Iterable[SseEvent]:
        """The error instead of ``[DONE]``."""
        yield {"data": error.json()}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        offsets = self._offsets.setdefault(index, self._texts.offsets())
        return for_completion(entries, self._texts, offsets)

    def _chunk(self, choice: dict[str, Any], more: dict[str, Any]) -> SseEvent:
        usage = {"usage": None} if self._include_usage else {}
        return self._dump(choices=[choice], **usage, **more)

    def _dump(self, **fields: Any) -> SseEvent:
        values = self._common | {"object": "text_completion"} | fields
        return {"data": Completion.model_validate(values).model_dump_json(exclude_unset=True)}
