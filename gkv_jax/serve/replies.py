"""OpenAI's chat completion answers as types, and how they are made from the engine's results."""

import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel

from gkv_jax.request import Result

FinishReason = Literal["stop", "length"]


class CompletionTokensDetails(BaseModel):
    """Tokens of the request's prediction that were verified, and right or not.

    ``completion_tokens`` counts no rejected ones, nor accepted ones behind the start of a stop text.
    """

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens read and written; the stop token is not counted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, result: Result) -> "Usage":
        """The usage of a finished request."""
        read, written = result.stats["prompt_tokens"], len(result.tokens)
        predicted = result.stats["drafts"].get("prediction", {"proposed": 0, "accepted": 0})
        return cls(
            prompt_tokens=read,
            completion_tokens=written,
            total_tokens=read + written,
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=predicted["accepted"],
                rejected_prediction_tokens=predicted["proposed"] - predicted["accepted"],
            ),
        )


class ResponseMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(BaseModel):
    """The one choice of a completion."""

    index: Literal[0] = 0
    message: ResponseMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """The answer to a request that does not stream; ``gkv`` holds ``Result.stats``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    gkv: dict[str, Any]


class Delta(BaseModel):
    """What a chunk adds to the message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChunkChoice(BaseModel):
    """The one choice of a chunk."""

    index: Literal[0]
    delta: Delta
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


class Model(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["gkv_jax"] = "gkv_jax"


class ModelList(BaseModel):
    """The served models: one."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """The server answers, so it has loaded and warmed up."""

    status: Literal["ok"] = "ok"
    model: str
    slots: int


class Reply:
    """Builds the parts of one answer, which share an id and a time."""

    def __init__(self, model: str, fingerprint: str, *, include_usage: bool) -> None:
        """``include_usage``: each chunk has the field, and a last one is for it."""
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._common = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._include_usage = include_usage

    def completion(self, result: Result) -> ChatCompletion:
        """The whole answer at once."""
        return ChatCompletion.model_validate(
            self._common
            | {
                "choices": [
                    {
                        "message": {"content": result.text},
                        "finish_reason": result.finish_reason,
                    }
                ],
                "usage": Usage.of(result),
                "gkv": result.stats,
            }
        )

    def opening(self) -> str:
        """The chunk that names the role."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def text(self, text: str) -> str:
        """A chunk of text."""
        return self._chunk({"content": text}, None)

    def closing(self, result: Result) -> list[str]:
        """The chunk with the finish reason and, if asked for, the one with the usage."""
        chunks = [self._chunk({}, result.finish_reason, gkv=result.stats)]
        if self._include_usage:
            chunks.append(self._dump(choices=[], usage=Usage.of(result)))
        return chunks

    def _chunk(self, delta: dict[str, str], finish_reason: str | None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        usage = {"usage": None} if self._include_usage else {}
        return self._dump(choices=[choice], **usage, **more)

    def _dump(self, **fields: Any) -> str:
        values = self._common | {"object": "chat.completion.chunk"} | fields
        return ChatCompletionChunk.model_validate(values).model_dump_json(exclude_unset=True)
