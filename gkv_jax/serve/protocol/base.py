"""What all request bodies have in common."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator
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
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("it contains a lone surrogate, which UTF-8 cannot write; remove it")
    return text


Text = Annotated[str, AfterValidator(_check_text)]


class TextPart(Strict):
    """A part of a content that is a list. Responses call theirs ``input_text`` and ``output_text``."""

    type: str
    text: Text


def _join_parts(content: Any) -> Any:
    """Text parts as one text, a line break between them; chat templates take plain text."""
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            raise ValueError(f"part {index} is no text; only parts of type 'text' are served")
        known = {"type", "text"} | ({"annotations", "logprobs"} & _empty_fields(part))
        if part.keys() != known or not isinstance(part["text"], str):
            raise ValueError(f"part {index} must hold a string 'text' and nothing besides 'type'")
    return "\n".join(part["text"] for part in content)


_TEXT_PARTS = ("text", "input_text", "output_text")


def _empty_fields(part: Mapping[str, Any]) -> set[str]:
    """Fields that an answer has and that say nothing, for clients that send one back."""
    return {name for name, value in part.items() if value in (None, [])}


Content = Annotated[Text, BeforeValidator(_join_parts, json_schema_input_type=str | list[TextPart])]
"""A text, or a list of text parts."""
