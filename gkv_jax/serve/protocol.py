"""OpenAI's chat completion request as types, and what it means to the engine.

A field is served, or accepted because it changes nothing, or refused with the way out: none is
ignored. Served besides OpenAI's fields: ``top_k``, ``min_p``, ``jump``, ``lookup`` and ``draft_model``.
"""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gkv_jax.drafts.drafter import Jump
from gkv_jax.errors import UserError
from gkv_jax.sampling import MAX_TEMPERATURE, Sampling
from gkv_jax.serve.errors import ApiError, refused
from gkv_jax.serve.settings import Limits
from gkv_jax.serve.unserved import UNSERVED_IN_MESSAGES, UNSERVED_IN_REQUESTS, Unserved
from grammar_host import Guide

# Each stop text is searched for after each token, by the thread that feeds the device.
MAX_STOP_TEXTS = 16
MAX_STOP_CHARACTERS = 256


def _check_text(text: str) -> str:
    if "\0" in text:
        raise ValueError("it contains a NUL character; remove it")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("it contains a lone surrogate, which UTF-8 cannot write; remove it")
    return text


def _join_parts(content: Any) -> Any:
    """Text parts as one text, a line break between them; chat templates take plain text."""
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError(f"part {index} is no text; only parts of type 'text' are served")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f"part {index} must hold a string 'text' and nothing besides 'type'")
    return "\n".join(part["text"] for part in content)


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


Text = Annotated[str, AfterValidator(_check_text)]
StopText = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class _Strict(BaseModel):
    """Exact types, no unknown fields; ``unserved`` ones only with a value that asks for nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    unserved: ClassVar[Mapping[str, Unserved]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in values.keys() & cls.unserved.keys():
            if not cls.unserved[name].is_neutral(values[name]):
                context = {"field": name, "reason": cls.unserved[name].message(name)}
                raise PydanticCustomError("unserved_parameter", "{reason}", context)
        return {name: value for name, value in values.items() if name not in cls.unserved}


class Message(_Strict):
    """One turn of the chat. ``developer`` is OpenAI's newer word for ``system``."""

    unserved = UNSERVED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_join_parts)]

    def for_template(self) -> dict[str, str]:
        """The turn as chat templates expect it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class JsonSchemaFormat(_Strict):
    """A named schema. It is enforced whether ``strict`` or not, its keys in their order."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """What the output must parse as; ``json_object`` may bring a schema, as in llama.cpp."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _check_fields(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type 'json_schema' and a field 'json_schema' go together")
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError(
                "a field 'schema' beside 'type' goes with type 'json_object'; "
                "type 'json_schema' has it inside 'json_schema'"
            )
        return self

    @property
    def name(self) -> str | None:
        """The client's name of the schema."""
        return self.json_schema.name if self.json_schema else None

    def guide(self) -> Guide | None:
        """What the engine enforces.

        Raises:
          GuideError: the schema is malformed, too large, or accepts nothing.
        """
        if self.json_schema is not None:
            return Guide.json_schema(
                self.json_schema.schema_, strict=self.json_schema.strict or False
            )
        if self.schema_ is not None:
            return Guide.json_schema(self.schema_)
        return Guide.json() if self.type == "json_object" else None


class StreamOptions(_Strict):
    """``include_usage`` adds a last chunk with the usage and no choices."""

    unserved = {"include_obfuscation": Unserved("chunks are sent as they are", neutral=(False,))}

    include_usage: bool | None = None


class Prediction(_Strict):
    """OpenAI's predicted outputs: a text that the answer is expected to resemble."""

    type: Literal["content"]
    content: Annotated[Text, BeforeValidator(_join_parts)]


class ChatCompletionRequest(_Strict):
    """The body of ``POST /v1/chat/completions``.

    ``user``, ``safety_identifier``, ``prompt_cache_key`` and ``metadata`` are notes of the client
    to itself: by their definition they change nothing in the answer.
    """

    unserved = UNSERVED_IN_REQUESTS

    model: Text
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(
        None, ge=0, le=MAX_TEMPERATURE, description="0 is greedy; default 1"
    )
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1, description="0 keeps all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="default: a random one")
    stop: Annotated[
        list[StopText] | None, Field(max_length=MAX_STOP_TEXTS), BeforeValidator(_listed)
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    jump: Jump | None = Field(None, description="default verify")
    lookup: bool | None = Field(None, description="default false")
    draft_model: bool | None = Field(None, description="default true")
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk for the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def chat(self) -> list[dict[str, str]]:
        """The messages as chat templates expect them."""
        return [message.for_template() for message in self.messages]

    def guide(self) -> Guide | None:
        """What the output must parse as, or None for free text. Raises GuideError."""
        return self.response_format.guide() if self.response_format else None

    def sampling(self, limits: Limits) -> Sampling:
        """How to sample, with OpenAI's defaults.

        Raises:
          ApiError: more tokens than the server allows, a value that cannot be sampled with, or
            fields that contradict each other.
        """
        max_tokens = self._completion_tokens(limits)
        try:
            return Sampling(
                max_tokens=max_tokens,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=self.top_k or 0,
                top_p=1.0 if self.top_p is None else self.top_p,
                min_p=self.min_p or 0.0,
                seed=secrets.randbits(63) if self.seed is None else self.seed,
                stop=tuple(self.stop or ()),
                jump=self.jump or "verify",
                lookup=self.lookup or False,
                prediction=None if self.prediction is None else self.prediction.content,
                draft_model=self.draft_model is not False,
            )
        except UserError as error:
            raise refused(error) from error

    def check_stream(self) -> None:
        """Raises ApiError for stream options without a stream."""
        if self.stream_options is not None and not self.stream:
            message = "stream_options goes with stream = true; leave it out, or stream"
            raise ApiError(400, message, param="stream_options", code="invalid_value")

    def _completion_tokens(self, limits: Limits) -> int:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            message = "max_tokens and max_completion_tokens differ; give only the latter"
            raise ApiError(400, message, param="max_tokens", code="invalid_value")
        param = "max_completion_tokens" if old is None else "max_tokens"
        value = new if old is None else old
        if value is None:
            return limits.default_completion_tokens
        if value > limits.completion_tokens:
            message = f"{param} is {value}; this server allows {limits.completion_tokens}"
            raise ApiError(400, message, param=param, code="invalid_value")
        return value
