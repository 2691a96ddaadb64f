"""From a conversation with tools to what the chat template gets.

Messages and tools are dicts of OpenAI's form in which nothing is null; ``check_conversation`` has seen them.
"""

import itertools
import json
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from gkv_jax.serve.template import template_variables
from gkv_jax.serve.tools.formats import HERMES_FORMAT, NOTHING_SHOWN, CallFormat, Shown
from grammar_host.call_forms import CallFormName

Dicts = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TemplateStyle:
    """What a chat template makes of tools.

    Attributes:
      knows_tools: whether it has a place for them.
      text_arguments: whether it writes the arguments of calls as they are, so that they have to be JSON
        text. Most write an object as JSON.
      shown: the format in which it writes calls.
      one_call: whether it takes one call in a turn and no more, as Llama 3.1's.
      short_ids: whether it takes no ids of calls but those of nine letters and digits, as Mistral's.
    """

    knows_tools: bool = False
    text_arguments: bool = False
    shown: Shown = NOTHING_SHOWN
    one_call: bool = False
    short_ids: bool = False

    @classmethod
    def of(cls, tokenizer: Any) -> "TemplateStyle":
        """Of a transformers tokenizer; remembered as long as it lives and keeps its template."""
        if not tokenizer.chat_template:
            return cls()
        template = tokenizer.get_chat_template(tools=[])
        known = _styles.get(tokenizer)
        if known is None or known[0] != template:
            known = _styles[tokenizer] = template, _style(tokenizer, template)
        return known[1]


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

    A template that knows tools gets them and the conversation as they are, except that the arguments of
    calls are objects where it wants objects, results have the name of their function, and ids are short
    where it wants short ones. Otherwise the tools are listed in the system message, calls are text in
    ``call_format``, and the results of one turn's calls, in the order of the calls, are one turn of the
    user.

    The tools do not depend on ``tool_choice``: with ``"none"`` the model knows them and calls none.
    """
    if style.knows_tools:
        return Rendered(
            [*_structured(messages, style)], [_listed(tool) for tool in tools] if tools else None
        )
    written = [*_written(messages, call_format)]
    if tools:
        instructions = _instructions(tools, call_format)
        if written[0]["role"] == "system":
            given = written[0]["content"]
            instructions = f"{given}\n\n{instructions}" if given else instructions
            written = written[1:]
        written = [{"role": "system", "content": instructions}, *written]
    return Rendered(written, None)


def call_text(name: str, arguments: str) -> str:
    """A call in Hermes' format; ``arguments`` is JSON text."""
    return HERMES_FORMAT.write([(name, arguments)])


def _instructions(tools: Dicts, call_format: CallFormat) -> str:
    listed = "\n".join(json.dumps(_listed(tool), ensure_ascii=False) for tool in tools)
    example = call_format.write([("NAME", "{...}")])
    place = " between <tool_call> tags" if call_format.name == "hermes" else ""
    return (
        "# Tools\n\n"
        "These functions can be called to help with the request. Each line between the tags describes "
        f"one; its parameters are a JSON Schema.\n<tools>\n{listed}\n</tools>\n\n"
        f"To call one, write a JSON object with its name and its arguments{place}, in "
        f"this form:\n{example}\n"
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
    order: dict[str, int] = {}
    for is_result, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            results = sorted(group, key=lambda message: order[message["tool_call_id"]])
            texts = (f"<tool_response>\n{one['content']}\n</tool_response>" for one in results)
            yield {"role": "user", "content": "\n".join(texts)}
            continue
        for message in group:
            turn, calls = _turn(message), message.get("tool_calls", ())
            order |= {call["id"]: place for place, call in enumerate(calls, len(order))}
            functions = [call["function"] for call in calls]
            parts = [turn["content"]] if turn["content"] else []
            if functions:
                parts.append(
                    call_format.write((one["name"], one["arguments"]) for one in functions)
                )
            yield turn | {"content": "\n".join(parts)}


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    turn = {"role": role, "content": message.get("content", "")}
    if "reasoning_content" in message:
        turn["reasoning_content"] = message["reasoning_content"]
    return turn


_styles: "weakref.WeakKeyDictionary[Any, tuple[str, TemplateStyle]]" = weakref.WeakKeyDictionary()
"""Of each tokenizer, its template and what is made of tools there."""


def _style(tokenizer: Any, template: str) -> TemplateStyle:
    try:
        variables = template_variables(template)
    except jinja2.TemplateError:  # the engine tells the client when it uses it
        return TemplateStyle()
    if "tools" not in variables:
        return TemplateStyle()
    as_object, as_text = (_sample(tokenizer, [arguments]) for arguments in _SAMPLES)
    # Python writes a dict with single quotes: the template did not expect one.
    objects_fail = as_object is None or "{'sample'" in as_object
    text_arguments = objects_fail and as_text is not None
    text, arguments = (as_text, _SAMPLES[1]) if text_arguments else (as_object, _SAMPLES[0])
    shown = Shown.by(template, text or "")
    if text is None:
        return TemplateStyle(knows_tools=True, shown=shown)
    return TemplateStyle(
        knows_tools=True,
        text_arguments=text_arguments,
        shown=shown,
        one_call=_sample(tokenizer, [arguments] * 2) is None,
        short_ids=_sample(tokenizer, [arguments], identity="call_{}") is None,
    )


_SAMPLES: tuple[Any, Any] = ({"sample": "x"}, '{"sample": "x"}')


def _sample(tokenizer: Any, calls: Sequence[Any], identity: str = "call0000{}") -> str | None:
    """A small conversation with calls of ``sample_f``; None if the template fails on it.

    Args:
      calls: the arguments of each.
      identity: its id, but for its number. Mistral's templates want nine characters.
    """
    ids = [identity.format(number) for number in range(len(calls))]
    asked = [
        {"id": one, "type": "function", "function": {"name": "sample_f", "arguments": arguments}}
        for one, arguments in zip(ids, calls, strict=True)
    ]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": asked},
        *({"role": "tool", "tool_call_id": one, "name": "sample_f", "content": "y"} for one in ids),
    ]
    try:
        tools = [_listed({"name": "sample_f", "description": ""})]
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    except (jinja2.TemplateError, KeyError, TypeError, AttributeError, ValueError):
        return None
