"""What all request bodies have in common."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gkv_jax.serve.protocol.unserved import Unserved


class Strict(BaseModel):
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


def _check_text(text: str) -> str:
    if "\0" in text:
        raise ValueError("it contains a NUL character; remove it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            "it contains a lone surrogate, which UTF-8 cannot write; remove it"
        ) from None
    return text


Text = Annotated[str, AfterValidator(_check_text)]


TemplateValues = dict[Annotated[Text, Field(max_length=64)], Any]
"""Variables for the chat template."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model shall think, in OpenAI's words."""


class TextPart(Strict):
    """A part of a text: ``text`` of Chat Completions; ``input_text`` of Responses' client, or its
    ``output_text`` of an answer that is sent back.

    ``annotations`` and ``logprobs`` of an answer are not read.
    """

    type: Literal["text", "input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


_PARTS = TypeAdapter(list[TextPart])


def _joined(content: Any) -> Any:
    """Text parts as one text, a line break between them; chat templates take plain text."""
    if not isinstance(content, list):
        return content
    return "\n".join(part.text for part in _PARTS.validate_python(content))


Content = Annotated[Text, BeforeValidator(_joined, json_schema_input_type=str | list[TextPart])]
"""A text, or a list of text parts."""


def only(*kinds: type, expected: str) -> BeforeValidator:
    """Goes before a union of ``kinds``, whose own errors name its members as if they were fields."""

    def check(value: Any) -> Any:
        if not isinstance(value, kinds):
            context = {"expected": expected}
            raise PydanticCustomError("union_type", "Input should be {expected}", context)
        return value

    return BeforeValidator(check)
