"""``POST /v1/responses``: OpenAI's Responses API, for text and calls of functions. Nothing is stored."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gkv_jax.sampling import Sampling
from gkv_jax.serve.errors import ApiError, invalid_guide
from gkv_jax.serve.protocol.base import Content, Effort, Strict, TemplateValues, Text
from gkv_jax.serve.protocol.formats import Constrained, Constraint
from gkv_jax.serve.protocol.sampling import Sampled, checked_logprobs, checked_max_tokens
from gkv_jax.serve.protocol.unserved import LEAVE_OUT, UNSERVED_IN_CHATS, Unserved
from gkv_jax.serve.settings import Limits
from gkv_jax.serve.tools import FunctionCall, FunctionDefinition, refuse_other_tools
from gkv_jax.serve.tools.types import Mode
from grammar_host import Guide, GuideError

_SEND_AGAIN = "nothing is stored; send the items of the conversation again, as 'input'"

UNSERVED_IN_RESPONSES: Mapping[str, Unserved] = {
    **{name: field for name, field in UNSERVED_IN_CHATS.items() if name != "reasoning"},
    "previous_response_id": Unserved(_SEND_AGAIN),
    "conversation": Unserved(_SEND_AGAIN),
    "store": Unserved(f"{_SEND_AGAIN} next time", neutral=(False,)),
    "prompt": Unserved("put its text into 'instructions' and 'input'"),
    "background": Unserved("wait for the answer, or stream it", neutral=(False,)),
    "background_options": Unserved("wait for the answer, or stream it", neutral=({},)),
    "truncation": Unserved(
        "nothing is left out of a prompt; drop the oldest items yourself", neutral=("disabled",)
    ),
    "context_management": Unserved("drop or shorten items of the input yourself", neutral=([],)),
    "reasoning_effort": Unserved("use reasoning, with 'effort'"),
    "max_tool_calls": Unserved("it is for calls that a server runs; this one runs none"),
    "prompt_cache_options": Unserved(LEAVE_OUT, neutral=({},)),
    "access_programs": Unserved(LEAVE_OUT, neutral=({},)),
    "image": Unserved("text is what there is", neutral=({},)),
    "stream_options": Unserved(
        "events are sent as they are, and the last one has the usage",
        neutral=({"include_obfuscation": False}, {}),
    ),
    "messages": Unserved("use input"),
    "response_format": Unserved("use text.format"),
    "max_tokens": Unserved("use max_output_tokens"),
    "max_completion_tokens": Unserved("use max_output_tokens"),
    "logprobs": Unserved("use include, with 'message.output_text.logprobs'", neutral=(False,)),
    "n": Unserved("send the request n times, or use /v1/chat/completions", neutral=(1,)),
    "trace": Unserved("/v1/chat/completions tells it", neutral=(False,)),
    **{
        name: Unserved("use structured_outputs")
        for name in Constrained.model_fields
        if name.startswith("guided_")
    },
}

_OF_OTHERS: Mapping[str, Unserved] = {
    "caller": Unserved(LEAVE_OUT, neutral=({"type": "direct"},)),
    "namespace": Unserved("give the function itself a longer name"),
    "async": Unserved(LEAVE_OUT, neutral=(False,)),
}

_WAY_OUT_OF_ITEMS: Mapping[str, str] = {
    "item_reference": "nothing is stored; send the item itself",
}

Status = Literal["in_progress", "completed", "incomplete"]


# Items of the input -------------------------------------------------------------------------------


class MessageItem(Strict):
    """What somebody said. ``id`` and ``status`` are those of an answer that is sent back."""

    unserved: ClassVar = {"phase": Unserved("write it into the content", neutral=("final_answer",))}

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: Status | None = None


class FunctionCallItem(Strict):
    """A call that the model asked for, sent back."""

    unserved = _OF_OTHERS

    type: Literal["function_call"]
    call_id: Text = Field(min_length=1)
    name: Annotated[str, *FunctionCall.model_fields["name"].metadata]
    arguments: Text
    id: str | None = None
    status: Status | None = None


class FunctionCallOutputItem(Strict):
    """What a call returned."""

    unserved: ClassVar = {**_OF_OTHERS, "name": Unserved("call_id says which call it was")}

    type: Literal["function_call_output"]
    call_id: Text = Field(min_length=1)
    output: Content
    id: str | None = None
    status: Status | None = None


class ReasoningText(Strict):
    """A part of what the model thought."""

    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Strict):
    """What the model thought, sent back."""

    unserved: ClassVar = {
        "summary": Unserved("put the reasoning into 'content'", neutral=([],)),
        "encrypted_content": Unserved("put the reasoning into 'content'"),
    }

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    id: str | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(part.text for part in self.content or ())


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem

_KINDS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
}


def _item(value: Any) -> Item:
    """One kind or another; a union's errors would name its members as if they were fields."""
    if not isinstance(value, dict):
        return MessageItem.model_validate(value)
    # What has neither type nor role, but an id, is how OpenAI's client writes a reference.
    implied = "item_reference" if "id" in value and "role" not in value else "message"
    kind = value.get("type") or implied
    known = _KINDS.get(kind) if isinstance(kind, str) else MessageItem  # which refuses it
    if known is not None:
        return known.model_validate(value)
    way_out = _WAY_OUT_OF_ITEMS.get(kind, f"served are {', '.join(map(repr, _KINDS))}")
    reason = f"items of type {kind[:40]!r} are not served: {way_out}"
    raise PydanticCustomError("unserved_parameter", "{reason}", {"field": "type", "reason": reason})


def _listed(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Input = Annotated[
    list[Annotated[Item, PlainValidator(_item, json_schema_input_type=Item)]],
    Field(min_length=1),
    BeforeValidator(
        _listed, json_schema_input_type=str | Annotated[list[Item], Field(min_length=1)]
    ),
]
"""What the user says, or items in their order."""


# Other fields -------------------------------------------------------------------------------------


class TextFormat(Strict):
    """What the text must be. A schema is enforced whether ``strict`` or not, its keys in their order."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> "TextFormat":
        for name in ("name", "schema_"):
            if (getattr(self, name) is not None) != (self.type == "json_schema"):
                raise ValueError(f"type 'json_schema' and a field {name.rstrip('_')!r} go together")
        for name in ("description", "strict"):
            if getattr(self, name) is not None and self.type != "json_schema":
                raise ValueError(f"{name!r} goes with type 'json_schema'; leave it out")
        return self


class TextConfig(Strict):
    """How the text shall be."""

    unserved: ClassVar = {
        "verbosity": Unserved(
            "say in the instructions how long the answer shall be", neutral=("medium",)
        )
    }

    format: TextFormat | None = None


@dataclasses.dataclass(frozen=True)
class FormatConstraint(Constraint):
    """What ``text.format`` asks for."""

    def error(self, error: GuideError) -> ApiError:
        """In OpenAI's words, which name the field of chat completions; clients look for them."""
        told = invalid_guide(error, "response_format", self.name)
        param = told.param
        if param == "response_format":
            param = "text.format" if self.name is None else "text.format.schema"
        return ApiError(
            told.status, told.message, param=param, code=told.code, pointer=told.pointer
        )


class ReasoningConfig(Strict):
    """How the model shall think."""

    unserved: ClassVar = {
        "summary": Unserved("the reasoning itself is told"),
        "generate_summary": Unserved("the reasoning itself is told"),
        "context": Unserved("the chat template decides it", neutral=("auto",)),
        "mode": Unserved(LEAVE_OUT, neutral=("standard",)),
    }

    effort: Effort | None = None


class FunctionTool(FunctionDefinition):
    """A function that may be called; ``strict`` unless it says otherwise, as OpenAI has it here."""

    unserved: ClassVar = {
        **_OF_OTHERS,
        "defer_loading": Unserved("the model is told of all tools", neutral=(False,)),
        "allowed_callers": Unserved("the model calls", neutral=(["direct"],)),
        "output_schema": Unserved("say in the description what the function returns"),
    }

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, values: Any) -> Any:
        refuse_other_tools(values)
        return values

    def fields(self) -> dict[str, Any]:
        """The tool in the form of Responses."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict is not False,
        }


class FunctionReference(Strict):
    """Which of the tools."""

    type: Literal["function"]
    name: str


class ChoiceObject(Strict):
    """The function to call, or those that may be called, of all that the model is told of."""

    type: Literal["function", "allowed_tools"]
    name: str | None = Field(None, description="of the function")
    mode: Literal["auto", "required"] | None = Field(None, description="of allowed_tools")
    tools: Annotated[list[FunctionReference], Field(min_length=1)] | None = Field(
        None, description="of allowed_tools"
    )

    @model_validator(mode="after")
    def _check_fields(self) -> "ChoiceObject":
        for name, kind in (
            ("name", "function"),
            ("mode", "allowed_tools"),
            ("tools", "allowed_tools"),
        ):
            if (getattr(self, name) is not None) != (self.type == kind):
                raise ValueError(f"type {kind!r} and a field {name!r} go together")
        return self


def _choice(value: Any) -> str | dict[str, Any]:
    modes = get_args(Mode)
    if not isinstance(value, str):
        return ChoiceObject.model_validate(value).model_dump(exclude_none=True)
    if value not in modes:
        context = {"expected": f"{', '.join(map(repr, modes))}, or an object"}
        raise PydanticCustomError("literal_error", "Input should be {expected}", context)
    return value


ToolChoice = Annotated[
    str | dict[str, Any], PlainValidator(_choice, json_schema_input_type=Mode | ChoiceObject)
]

Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


# The request --------------------------------------------------------------------------------------


def _only_served(schema: dict[str, Any]) -> None:
    """Take what is not served out of the fields that are described."""
    for name in UNSERVED_IN_RESPONSES:
        schema["properties"].pop(name, None)


class ResponsesRequest(Strict, Sampled, Constrained):
    """The body.

    ``user``, ``safety_identifier``, ``prompt_cache_key`` and ``metadata`` are notes of the client
    to itself: by their definition they change nothing in the answer.
    """

    model_config = ConfigDict(json_schema_extra=_only_served)
    unserved = UNSERVED_IN_RESPONSES

    model: Text
    input: Input
    instructions: Text | None = Field(None, description="the first system message")
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextConfig | None = None
    include: list[Included] | None = Field(
        None, description="log-probabilities; reasoning is told as it is, and never encrypted"
    )
    top_logprobs: int | None = Field(
        None, description="0 to 20; goes with include = ['message.output_text.logprobs']"
    )
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: TemplateValues | None = Field(
        None, description="variables for the chat template, such as enable_thinking"
    )
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with log-probabilities."""
        return "message.output_text.logprobs" in (self.include or ())

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The tools in the form of Responses; None if there are none."""
        # OpenAI's client may send an empty list, which asks for nothing.
        return [tool.fields() for tool in self.tools] if self.tools else None

    @property
    def effort(self) -> Effort | None:
        """How much the model shall think."""
        return None if self.reasoning is None else self.reasoning.effort

    def check(self) -> None:
        """Raises ApiError for fields that contradict each other."""
        if self.top_logprobs and not self.wants_logprobs:
            message = (
                "top_logprobs goes with include = ['message.output_text.logprobs']; leave it out, or "
                "ask for both"
            )
            raise ApiError(400, message, param="top_logprobs", code="invalid_value")
        if self.wants_logprobs and self.offered and self.tool_choice != "none":
            message = (
                "include asks for log-probabilities of a text, and the answer may be calls; leave out the "
                "tools, set tool_choice to 'none', or use /v1/chat/completions"
            )
            raise ApiError(400, message, param="include", code="invalid_value")

    def sampling(self, limits: Limits) -> Sampling:
        """How to sample the answer.

        Raises:
          ApiError: more than the server allows, or values that cannot be sampled with.
        """
        max_tokens = checked_max_tokens(self.max_output_tokens, "max_output_tokens", limits)
        logprobs = checked_logprobs(self.top_logprobs or 0, "top_logprobs")
        (sampling,) = self.samplings(max_tokens, limits, logprobs if self.wants_logprobs else None)
        return sampling

    def turns(self) -> "Turns":
        """The conversation, in the form of chat completions."""
        return Turns.of(self.instructions, self.input)

    def echo(self, *, parallel_tool_calls: bool = True) -> dict[str, Any]:
        """What an answer repeats of its request, with the defaults of what was not said.

        ``parallel_tool_calls`` is what the model is held to.
        """
        form = self.text.format if self.text else None
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": parallel_tool_calls,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {
                "format": {"type": "text"}
                if form is None
                else form.model_dump(by_alias=True, exclude_unset=True)
            },
            "tool_choice": self.tool_choice or "auto",
            "tools": self.offered or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "user": self.user,
        }

    def _constraints(self) -> Iterator[Constraint]:
        form = self.text.format if self.text else None
        if form is not None and form.type != "text":
            yield FormatConstraint("text.format", lambda: _guide(form), name=form.name)
        yield from super()._constraints()


def _guide(form: TextFormat) -> Guide:
    if form.schema_ is None:
        return Guide.json()
    return Guide.json_schema(form.schema_, strict=form.strict or False)


# The conversation ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Turns:
    """Items as the turns of a chat: what the model said and called without a break is one turn.

    Attributes:
      messages: of chat completions' form.
      places: where each of them, each of their calls and each reasoning is from: from its path to that of
        the item.
    """

    messages: list[dict[str, Any]]
    places: dict[str, str]

    @classmethod
    def of(cls, instructions: str | None, items: Sequence[Item]) -> "Turns":
        """Put items together."""
        messages: list[dict[str, Any]] = []
        places: dict[str, str] = {}
        if instructions is not None:
            messages.append({"role": "system", "content": instructions})
        open_turn: dict[str, Any] | None = None  # the model's, if the last item was
        for index, item in enumerate(items):
            place = f"input.{index}"
            if isinstance(item, ReasoningItem):
                if not item.text:
                    continue
                if open_turn is None or (open_turn["content"] and "tool_calls" not in open_turn):
                    open_turn = {"role": "assistant", "content": ""}
                    messages.append(open_turn)
                told = filter(None, (open_turn.get("reasoning_content"), item.text))
                open_turn["reasoning_content"] = "\n".join(told)
                places[f"messages.{len(messages) - 1}.reasoning_content"] = place
            elif isinstance(item, FunctionCallItem):
                if open_turn is None:
                    open_turn = {"role": "assistant", "content": ""}
                    messages.append(open_turn)
                calls = open_turn.setdefault("tool_calls", [])
                places[f"messages.{len(messages) - 1}.tool_calls.{len(calls)}"] = place
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
            elif isinstance(item, FunctionCallOutputItem):
                open_turn = None
                places[f"messages.{len(messages)}"] = place
                messages.append(
                    {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
                )
            elif open_turn is not None and item.role == "assistant" and _goes_on(open_turn):
                open_turn["content"] += item.content
            else:
                message = {"role": item.role, "content": item.content}
                open_turn = message if item.role == "assistant" else None
                messages.append(message)
        return cls(messages, places)

    def error(self, error: ApiError) -> ApiError:
        """What is wrong with the messages, said of the items."""
        match = _PATH.fullmatch(error.param or "")
        place = None if match is None else self.places.get(match[1])
        if match is None or place is None:
            return error
        if match[2]:
            param = f"{place}.{_FIELDS[match[2]]}"
            message = error.message.replace(match[0], param)
        else:
            param = place
            message = (
                f"Invalid value for '{param}': the call has no output; let an item of type "
                "'function_call_output' with its call_id follow the calls, before other items"
            )
        return ApiError(error.status, message, param=param, code=error.code)


def _goes_on(turn: Mapping[str, Any]) -> bool:
    """Whether a message of the model's belongs to its last turn: behind reasoning, or behind a call."""
    return "tool_calls" in turn or ("reasoning_content" in turn and not turn["content"])


_PATH = re.compile(
    r"(messages\.\d+(?:\.tool_calls\.\d+)?)(|\.tool_call_id|\.id|\.function\.arguments)"
)
_FIELDS = {".tool_call_id": "call_id", ".id": "call_id", ".function.arguments": "arguments"}
"""From fields of a message or call to those of the item."""
