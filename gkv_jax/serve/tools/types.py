"""The fields of requests that are about tools, as OpenAI's Chat Completions API has them."""

from typing import Any, Literal, get_args

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from gkv_jax.serve.protocol.base import Strict, Text

_NAME = r"^[a-zA-Z0-9_-]{1,64}$"

Mode = Literal["none", "auto", "required"]


class FunctionCall(Strict):
    """A function that the model called; ``arguments`` is JSON text."""

    name: str = Field(pattern=_NAME)
    arguments: Text
    parsed_arguments: Any = Field(
        None, exclude=True, description="a copy that OpenAI's client adds when it sends a call back"
    )


class ToolCallField(Strict):
    """A call in an assistant's turn."""

    id: Text = Field(min_length=1)
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionDefinition(Strict):
    """A function that may be called. Arguments follow ``parameters`` whether ``strict`` or not; ``strict``
    closes their objects to properties that are not mentioned."""

    name: str = Field(pattern=_NAME)
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON Schema of an object; without it there are no arguments"
    )
    strict: bool | None = None


class Tool(Strict):
    """A tool: a function of the client's."""

    type: Literal["function"]
    function: FunctionDefinition

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, values: Any) -> Any:
        refuse_other_tools(values)
        return values


class FunctionName(Strict):
    """Which function."""

    name: str


class ToolName(Strict):
    """Which of the tools."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    """The tools that may be called now, of all that the model is told of."""

    mode: Literal["auto", "required"]
    tools: list[ToolName] = Field(min_length=1)


class ToolChoice(Strict):
    """``"none"``, ``"auto"``, ``"required"``, or an object that names a function or the allowed tools."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_mode(cls, value: Any) -> Any:
        modes = get_args(Mode)
        expected = ", ".join(map(repr, (*modes, "function", "allowed_tools")))
        if isinstance(value, str):
            if value not in modes:
                context = {"expected": f"{', '.join(map(repr, modes))}, or an object"}
                raise PydanticCustomError("literal_error", "Input should be {expected}", context)
            return {"type": value}
        if isinstance(value, dict) and value.get("type") in modes:
            raise ValueError(f"write {value['type']!r} as a string, not in an object")
        if isinstance(value, dict) and value.get("type") == "custom":
            context = {"field": "type", "reason": f"'custom' is not served; served are {expected}"}
            raise PydanticCustomError("unserved_parameter", "{reason}", context)
        return value

    @model_validator(mode="after")
    def _check_fields(self) -> "ToolChoice":
        for name in ("function", "allowed_tools"):
            if (self.type == name) != (getattr(self, name) is not None):
                raise ValueError(f"type {name!r} and a field {name!r} go together")
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Both of the forms that a client may send."""
        value = handler.resolve_ref_schema(handler(schema))
        form = dict(value)
        form["properties"] = form["properties"] | {"type": {"enum": ["function", "allowed_tools"]}}
        return {"anyOf": [{"enum": list(get_args(Mode))}, form]}

    def value(self) -> str | dict[str, Any]:
        """The choice as the client wrote it."""
        if self.type in get_args(Mode):
            return self.type
        return self.model_dump(exclude_none=True)


def refuse_other_tools(values: Any) -> None:
    """Raises PydanticCustomError, with the way out, for a tool that is no function."""
    kind = values.get("type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind == "function":
        return
    way_out = "run it in your program, and offer it as a function"
    if kind == "custom":
        way_out = (
            "make it a function with one string, whose format goes into the parameters as a 'pattern' "
            "or an 'enum'"
        )
    reason = f"tools of type {kind[:40]!r} are not served; {way_out}"
    context = {"field": "type", "reason": reason}
    raise PydanticCustomError("unserved_parameter", "{reason}", context)
