"""A conversation with tools: whether it holds together, and all that a route needs of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import BaseModel

from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.formats import Constraint
from gkv_jax.serve.settings import ToolFormat
from gkv_jax.serve.tools.formats import CallFormat, special_tokens
from gkv_jax.serve.tools.guides import may_call, offered_names, tools_constraint
from gkv_jax.serve.tools.render import TemplateStyle, render
from gkv_jax.serve.tools.types import ToolChoice

Fields = BaseModel | Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """What a request says, ready for the engine.

    Attributes:
      messages: for the chat template.
      tools_for_template: for the chat template; None if it takes none, or there are none.
      may_call: whether the answer may hold calls, so that a ``ToolCallParser`` has to read it.
      call_format: how calls are written in the answer.
    """

    messages: list[dict[str, Any]]
    tools_for_template: list[dict[str, Any]] | None
    may_call: bool
    call_format: CallFormat
    _tools: tuple[Mapping[str, Any], ...] | None
    _choice: str | Mapping[str, Any] | None
    _parallel: bool | None

    @classmethod
    def of(
        cls,
        messages: Sequence[Fields],
        tools: Sequence[Fields] | None,
        tool_choice: ToolChoice | str | Mapping[str, Any] | None,
        parallel: bool | None,
        *,
        tokenizer: Any,
        tool_format: ToolFormat = "auto",
    ) -> "Conversation":
        """Read the fields of a request.

        Args:
          messages: of Chat Completions' form.
          tools: in the form of Chat Completions or of Responses.
          tool_choice: of either API.
          parallel: ``parallel_tool_calls``.
          tokenizer: a transformers tokenizer with a chat template.
          tool_format: how the model writes calls; ``"auto"`` looks at the chat template.

        Raises:
          ApiError: the conversation does not hold together, or the chat template takes no such one.
        """
        turns = [_plain(message) for message in messages]
        check_conversation(turns)
        known = None if tools is None else tuple(_plain(tool) for tool in tools)
        choice = tool_choice.value() if isinstance(tool_choice, ToolChoice) else tool_choice
        style = TemplateStyle.of(tokenizer)
        _check_style(turns, bool(known), style, tool_format)
        call_format = CallFormat.of(
            (style.shown.name or "hermes") if tool_format == "auto" else tool_format,
            offered_names(known, choice),
            special_tokens(tokenizer),
            style.shown.gap,
        )
        rendered = render(turns, known, style, call_format)
        calls = may_call(known, choice)
        # What such a model asks for in one turn, its template could not tell it later.
        several = False if style.one_call else parallel
        return cls(rendered.messages, rendered.tools, calls, call_format, known, choice, several)

    def constraint(self, beside: Constraint | None) -> Constraint | None:
        """What the answer must obey; ``beside`` is what the request says of answers without calls.

        Raises:
          ApiError: see ``tools_constraint``.
        """
        return tools_constraint(
            self._tools, self._choice, self._parallel, beside, call_format=self.call_format
        )


def _check_style(
    messages: Sequence[Mapping[str, Any]],
    has_tools: bool,
    style: TemplateStyle,
    tool_format: ToolFormat,
) -> None:
    """Refuse what the chat template takes no part of."""
    if has_tools and tool_format == "auto" and style.shown.is_harmony:
        reason = (
            "the served model writes calls in messages on channels (harmony), which this server does not "
            "read; leave the tools out, or describe them in a message and ask for JSON"
        )
        raise ApiError(400, f"tools: {reason}", param="tools", code="unsupported_parameter")
    for index, message in enumerate(messages):
        if style.one_call and len(message.get("tool_calls", ())) > 1:
            _refuse(
                f"messages.{index}.tool_calls.1",
                "the served model's chat template takes one call in a turn; write each call in a message "
                "of its own, with its result behind it",
            )


def check_conversation(messages: Sequence[Mapping[str, Any]]) -> None:
    """Every call has one result, in the turns that follow it, and every result a call.

    Args:
      messages: of OpenAI's form, without fields that are null.

    Raises:
      ApiError: 400, with the place in ``param``.
    """
    waiting: dict[str, str] = {}  # from ids of calls without a result to the place of the call
    ids: set[str] = set()
    for index, message in enumerate(messages):
        place = f"messages.{index}"
        if message["role"] == "tool":
            _check_result(message["tool_call_id"], f"{place}.tool_call_id", waiting, ids)
            continue
        _check_answered(waiting)
        for number, call in enumerate(message.get("tool_calls", ())):
            where = f"{place}.tool_calls.{number}"
            if call["id"] in ids:
                _refuse(f"{where}.id", f"{call['id']!r} is the id of an earlier call; give another")
            ids.add(call["id"])
            waiting[call["id"]] = where
            _check_arguments(call["function"]["arguments"], f"{where}.function.arguments")
    _check_answered(waiting)


def _check_result(answered: str, param: str, waiting: dict[str, str], ids: set[str]) -> None:
    if answered not in ids:
        _refuse(
            param, f"no call before it has the id {answered!r}; give the id of the call it answers"
        )
    if answered not in waiting:
        _refuse(param, f"the call {answered!r} has a result already; leave this one out")
    del waiting[answered]


def _check_answered(waiting: Mapping[str, str]) -> None:
    for identity, where in waiting.items():
        _refuse(
            where,
            f"the call {identity!r} has no result; let a message of role 'tool' with this tool_call_id "
            "follow the assistant's, before others",
        )


def _check_arguments(text: str, param: str) -> None:
    try:
        arguments = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _refuse(param, f"not valid JSON ({error}); give the arguments as the call had them")
    if not isinstance(arguments, dict):
        _refuse(param, "arguments are the text of a JSON object")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _plain(fields: Fields) -> Mapping[str, Any]:
    if isinstance(fields, BaseModel):
        return fields.model_dump(by_alias=True, exclude_none=True)
    return {name: value for name, value in fields.items() if value is not None}


def _refuse(param: str, reason: str) -> NoReturn:
    raise ApiError(400, f"Invalid value for '{param}': {reason}", param=param, code="invalid_value")
