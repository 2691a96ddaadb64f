"""A conversation with tools: whether it holds together, and all that a route needs of it."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import BaseModel

from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.formats import Constraint
from gkv_jax.serve.settings import ToolFormat
from gkv_jax.serve.tools.formats import CallFormat, Shown, special_tokens
from gkv_jax.serve.tools.guides import may_call, must_call, offered_names, tools_constraint
from gkv_jax.serve.tools.render import TemplateStyle, render
from gkv_jax.serve.tools.types import ToolChoice
from grammar_host.call_forms import CallFormName

Fields = BaseModel | Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """What a request says, ready for the engine.

    Attributes:
      messages: for the chat template.
      tools_for_template: for the chat template; None if it takes none, or there are none.
      may_call: whether the answer may hold calls, so that a ``ToolCallParser`` has to read it.
      call_format: how calls are written in the answer.
      parallel: whether the answer may hold several.
    """

    messages: list[dict[str, Any]]
    tools_for_template: list[dict[str, Any]] | None
    may_call: bool
    call_format: CallFormat
    parallel: bool
    _tools: tuple[Mapping[str, Any], ...] | None
    _choice: str | Mapping[str, Any] | None

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
        served = ServedFormat.of(tokenizer, tool_format)
        if known and served.name is None:
            reason = (
                f"{served.note}; leave the tools out, or start the server with --tool-format, so that they "
                "are described in a message"
            )
            raise ApiError(400, f"tools: {reason}", param="tools", code="unsupported_parameter")
        call_format = CallFormat.of(
            served.name or "hermes",
            offered_names(known, choice),
            special_tokens(tokenizer),
            served.shown,
            only=must_call(known, choice),
        )
        style = TemplateStyle.of(tokenizer, tools=bool(known))
        if not style.writes(call_format.name, tools=bool(known)):
            # What is text already is for the template of chats without tools.
            bare = TemplateStyle.of(tokenizer, tools=False)
            style = dataclasses.replace(bare, shows_calls=False, one_call=False)
        if style.one_call:
            _check_single(turns)
        rendered = render(turns, known, style, call_format)
        calls = may_call(known, choice)
        # What such a model asks for in one turn, its template could not tell it later.
        several = parallel is not False and not (style.one_call and calls)
        return cls(rendered.messages, rendered.tools, calls, call_format, several, known, choice)

    def constraint(self, beside: Constraint | None) -> Constraint | None:
        """What the answer must obey; ``beside`` is what the request says of answers without calls.

        Raises:
          ApiError: see ``tools_constraint``.
        """
        return tools_constraint(
            self._tools, self._choice, self.parallel, beside, call_format=self.call_format
        )


@dataclass(frozen=True)
class ServedFormat:
    """How a server's model is to write calls.

    Attributes:
      name: the format; None where it writes them as no parser reads them, so that tools are refused.
      shown: what the chat template shows of it.
      note: what whoever starts the server should know of it, or empty.
    """

    name: CallFormName | None
    shown: Shown
    note: str = ""

    @classmethod
    def of(cls, tokenizer: Any, tool_format: ToolFormat) -> "ServedFormat":
        """Of a transformers tokenizer and what the server was told."""
        style = TemplateStyle.of(tokenizer)
        shown, name = style.shown, None if tool_format == "auto" else tool_format
        if name is None and shown.is_harmony:
            note = "the served model writes calls in messages on channels (harmony), which are not read"
            return cls(None, shown, note)
        name = name or shown.name or "hermes"
        if not style.knows_tools or shown.name == name:
            return cls(name, shown)
        form = f"as {shown.name!r}" if shown.name else "in a form that is not known, or not at all"
        note = (
            f"the chat template writes calls {form}: tools are described in a message instead, which asks "
            f"for calls as {name!r} (--tool-format)"
        )
        return cls(name, shown, note)


def _check_single(messages: Sequence[Mapping[str, Any]]) -> None:
    for index, message in enumerate(messages):
        if len(message.get("tool_calls", ())) > 1:
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
