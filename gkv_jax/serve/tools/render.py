"""From a conversation with tools to what the chat template gets.

Messages and tools are dicts of OpenAI's form in which nothing is null; ``check_conversation`` has seen them.
"""

import dataclasses
import itertools
import json
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jinja2

from gkv_jax.serve.template import template_variables
from gkv_jax.serve.tools.formats import HERMES_FORMAT, NOTHING_SHOWN, CallFormat, Shown
from grammar_host.call_forms import CallFormName

Dicts = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TemplateStyle:
    """What a chat template makes of tools and of turns.

    Attributes:
      knows_tools: whether it has a place for them.
      shows_calls: whether it writes calls of earlier turns as well, in whatever format.
      text_arguments: whether it writes the arguments of calls as they are, so that they have to be JSON
        text. Most write an object as JSON.
      shown: the format in which it writes calls.
      one_call: whether it takes one call in a turn and no more, as Llama 3.1's, or loses the others.
      short_ids: whether it takes no ids of calls but those of nine letters and digits, as Mistral's.
      refuses_system: whether it has no place for a system message, as Gemma 2's.
      alternates: whether it refuses two turns of the user in a row.
    """

    knows_tools: bool = False
    shows_calls: bool = False
    text_arguments: bool = False
    shown: Shown = NOTHING_SHOWN
    one_call: bool = False
    short_ids: bool = False
    refuses_system: bool = False
    alternates: bool = False

    @classmethod
    def of(cls, tokenizer: Any, *, tools: bool = True) -> "TemplateStyle":
        """Of a transformers tokenizer; remembered as long as it lives.

        Args:
          tokenizer: may have several templates.
          tools: whether it is the template of chats with tools.
        """
        if not tokenizer.chat_template:
            return cls()
        try:
            template: str = tokenizer.get_chat_template(tools=[] if tools else None)
        except ValueError:  # none for such chats: the engine tells the client when it uses it
            return cls()
        known = _styles.setdefault(tokenizer, {})
        if template not in known:
            known[template] = _style(tokenizer, template)
        return known[template]

    def writes(self, name: CallFormName, *, tools: bool) -> bool:
        """Whether calls, and the tools if there are some, can be left to the template.

        Args:
          name: the format in which the model is to write calls.
          tools: whether there are tools, so that what the template shows is what the model follows.
        """
        return self.shows_calls and (not tools or self.shown.name == name)


@dataclass(frozen=True)
class Rendered:
    """The arguments of ``apply_chat_template``.

    Attributes:
      messages: the conversation.
      tools: the tools; None if there are none, or if the messages already tell of them.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def render(
    messages: Dicts,
    tools: Dicts | None,
    style: TemplateStyle,
    call_format: CallFormat = HERMES_FORMAT,
) -> Rendered:
    """Write a conversation for a chat template.

    A template that writes calls in ``call_format`` gets the tools and the conversation as they are, except
    that the arguments of calls are objects where it wants objects, results have the name of their function
    and are in the order of the calls, and ids are short where it wants short ones. Otherwise the tools are
    listed in the system message, calls are text in ``call_format``, and the results of one turn's calls are
    one turn of the user.

    Where the template has no place for a system message, that is a turn of the user, too, and turns of the
    user that follow one another are one.

    The tools do not depend on ``tool_choice``: with ``"none"`` the model knows them and calls none.
    """
    ordered = [*_ordered(messages)]
    if style.writes(call_format.name, tools=bool(tools)):
        structured = [*_structured(ordered, style)]
        return Rendered(_fitted(structured, style), [*map(_listed, tools)] if tools else None)
    written = [*_written(ordered, call_format)]
    if tools:
        instructions = _instructions(tools, call_format)
        if written[0]["role"] == "system":
            given = written[0]["content"]
            instructions = f"{given}\n\n{instructions}" if given else instructions
            written = written[1:]
        written = [{"role": "system", "content": instructions}, *written]
    return Rendered(_fitted(written, style), None)


def _instructions(tools: Dicts, call_format: CallFormat) -> str:
    listed = "\n".join(json.dumps(_listed(tool), ensure_ascii=False) for tool in tools)
    example = call_format.write([("NAME", "{...}")])
    parts = "a JSON object with its name and its arguments"
    if call_format.name == "hermes":
        parts += " between <tool_call> tags"
    elif call_format.name == "mistral_args":
        parts = "its name and its arguments, a JSON object"
    return (
        "# Tools\n\n"
        "These functions can be called to help with the request. Each line between the tags describes "
        f"one; its parameters are a JSON Schema.\n<tools>\n{listed}\n</tools>\n\n"
        f"To call one, write {parts}, in this form:\n{example}\n"
        f"{_SEVERAL[call_format.name]} "
        "What the functions return comes back between <tool_response> tags."
    )


_SEVERAL: Mapping[CallFormName, str] = {
    "hermes": "Each call has tags of its own.",
    "llama": "Write '; ' between two calls.",
    "mistral": "Several calls are items of one list.",
    "mistral_args": "Several calls follow one another.",
}


def _listed(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the model reads it: ``strict`` is none of its business."""
    function = tool.get("function", tool)
    described = {name: function[name] for name in ("name", "description") if name in function}
    empty = {"type": "object", "properties": {}}  # templates look into it
    parameters = function.get("parameters", empty)
    return {"type": "function", "function": described | {"parameters": parameters}}


def _ordered(messages: Dicts) -> Iterator[Mapping[str, Any]]:
    """The results of each turn's calls in the order of the calls: not all templates write ids."""
    order: dict[str, int] = {}
    for is_result, group in itertools.groupby(messages, _is_result):
        if is_result:
            yield from sorted(group, key=lambda message: order[message["tool_call_id"]])
            continue
        for message in group:
            calls = message.get("tool_calls", ())
            order |= {call["id"]: place for place, call in enumerate(calls, len(order))}
            yield message


def _is_result(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "tool")


def _structured(messages: Dicts, style: TemplateStyle) -> Iterator[dict[str, Any]]:
    names: dict[str, str] = {}
    ids = _short_ids(messages) if style.short_ids else {}
    for message in messages:
        turn = _turn(message)
        if calls := message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls}
            turn["tool_calls"] = [_structured_call(call, style, ids) for call in calls]
        elif message["role"] == "tool":
            answered = message["tool_call_id"]
            turn |= {"tool_call_id": ids.get(answered, answered), "name": names[answered]}
        yield turn


def _structured_call(
    call: Mapping[str, Any], style: TemplateStyle, ids: Mapping[str, str]
) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not style.text_arguments:
        arguments = json.loads(arguments)
    function = {"name": function["name"], "arguments": arguments}
    return {"id": ids.get(call["id"], call["id"]), "type": "function", "function": function}


def _short_ids(messages: Dicts) -> dict[str, str]:
    """For each id of a call that is not nine letters and digits, one that is."""
    given = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    fine = {one for one in given if _SHORT_ID.fullmatch(one)}
    numbered = (f"{number:09d}" for number in itertools.count())
    free = (one for one in numbered if one not in fine)
    return {one: next(free) for one in given if one not in fine}


_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def _written(messages: Dicts, call_format: CallFormat) -> Iterator[dict[str, Any]]:
    for is_result, group in itertools.groupby(messages, _is_result):
        if is_result:
            texts = (f"<tool_response>\n{one['content']}\n</tool_response>" for one in group)
            yield {"role": "user", "content": "\n".join(texts)}
            continue
        for message in group:
            turn, calls = _turn(message), message.get("tool_calls", ())
            functions = [call["function"] for call in calls]
            parts = [turn["content"]] if turn["content"] else []
            if functions:
                parts.append(
                    call_format.write((one["name"], one["arguments"]) for one in functions)
                )
            yield turn | {"content": "\n".join(parts)}


def _fitted(turns: list[dict[str, Any]], style: TemplateStyle) -> list[dict[str, Any]]:
    """Turns of roles that the template takes, in an order that it takes."""
    if not (style.refuses_system or style.alternates):
        return turns
    fitted: list[dict[str, Any]] = []
    for turn in turns:
        if style.refuses_system and turn["role"] == "system":
            turn = turn | {"role": "user"}
        if fitted and turn["role"] == fitted[-1]["role"] == "user":
            texts = (fitted[-1]["content"], turn["content"])
            fitted[-1] = fitted[-1] | {"content": "\n\n".join(filter(None, texts))}
        else:
            fitted.append(turn)
    return fitted


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    turn = {"role": role, "content": message.get("content", "")}
    if "reasoning_content" in message:
        turn["reasoning_content"] = message["reasoning_content"]
    return turn


_styles: "weakref.WeakKeyDictionary[Any, dict[str, TemplateStyle]]" = weakref.WeakKeyDictionary()
"""Of each tokenizer, the templates that were looked at, and their styles."""


def _style(tokenizer: Any, template: str) -> TemplateStyle:
    try:
        variables = template_variables(template)
    except jinja2.TemplateError:  # the engine tells the client when it uses it
        return TemplateStyle()
    style = _style_of_turns(tokenizer, template)
    if "tools" not in variables:
        return style
    style = dataclasses.replace(style, knows_tools=True)

    def sample(calls: Sequence[_Sample], arguments: str, identity: str = "call0000{}") -> str:
        return _sample(tokenizer, template, calls, arguments, identity)

    one = _CALLS[:1]
    as_object, as_text = sample(one, "object"), sample(one, "text")
    # Python writes a dict with single quotes: the template did not expect one.
    text_arguments = bool(as_text) and (not as_object or "{'sample'" in as_object)
    arguments, text = ("text", as_text) if text_arguments else ("object", as_object)
    style = dataclasses.replace(style, shown=Shown.by(template, text))
    if not text:
        return style
    return dataclasses.replace(
        style,
        shows_calls=True,
        text_arguments=text_arguments,
        one_call=not sample(_CALLS, arguments),
        short_ids=not sample(one, arguments, "call_{}"),
    )


def _style_of_turns(tokenizer: Any, template: str) -> TemplateStyle:
    system, user = ({"role": role, "content": f"sample_{role}"} for role in ("system", "user"))

    def takes(*turns: Mapping[str, Any]) -> bool:
        text = _rendered(tokenizer, template, turns)
        return all(turn["content"] in text for turn in turns)

    if not takes(user):
        return TemplateStyle()
    return TemplateStyle(refuses_system=not takes(system, user), alternates=not takes(user, user))


class _Sample(NamedTuple):
    """A call that a template is asked to write."""

    name: str
    key: str
    value: str


_CALLS = (_Sample("sample_f", "sample", "first_x"), _Sample("sample_g", "other", "second_y"))


def _sample(
    tokenizer: Any, template: str, calls: Sequence[_Sample], arguments: str, identity: str
) -> str:
    """A small conversation with calls; empty if the template fails on it or leaves a call out.

    Args:
      arguments: ``"object"`` or ``"text"``.
      identity: an id, but for its number. Mistral's templates want nine characters.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    messages.append({"role": "assistant", "content": "", "tool_calls": []})
    for number, call in enumerate(calls):
        given: Any = {call.key: call.value}
        function = {
            "name": call.name,
            "arguments": json.dumps(given) if arguments == "text" else given,
        }
        one = {"id": identity.format(number), "type": "function", "function": function}
        messages[1]["tool_calls"].append(one)
        messages.append(
            {"role": "tool", "tool_call_id": one["id"], "name": call.name, "content": "y"}
        )
    tools = [_listed({"name": call.name, "description": ""}) for call in calls]
    text = _rendered(tokenizer, template, messages, tools)
    # Names are among the tools as well.
    return text if all(call.name in text and call.value in text for call in calls) else ""


def _rendered(tokenizer: Any, template: str, messages: Dicts, tools: Dicts | None = None) -> str:
    """What a template makes of messages; empty if it fails on them."""
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=template, tokenize=False
            )
        )
    except _FAILURES:
        return ""


_FAILURES = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""What a template may run into that was not made for a sample: it is a program."""
