"""From a conversation with tools to what the chat template gets.

Messages and tools are dicts of OpenAI's form in which nothing is null; ``check_conversation`` has seen them.
"""

import itertools
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Dicts = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TemplateStyle:
    """What a chat template makes of tools.

    Attributes:
      knows_tools: whether it has a place for them.
      text_arguments: whether it writes the arguments of calls as they are, so that they have to be JSON
        text. Most write an object as JSON.
    """

    knows_tools: bool = False
    text_arguments: bool = False

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


def render(messages: Dicts, tools: Dicts | None, style: TemplateStyle) -> Rendered:
    """Write a conversation for a chat template.

    A template that knows tools gets them and the conversation as they are, except that the arguments of
    calls are objects where it wants objects, and results have the name of their function. Otherwise the
    tools are listed in the system message, calls are text as ``Guide.tools`` without a family has them, and
    the results of one turn's calls, in the order of the calls, are one turn of the user.

    The tools do not depend on ``tool_choice``: with ``"none"`` the model knows them and calls none.
    """
    if style.knows_tools:
        return Rendered(
            [*_structured(messages, text_arguments=style.text_arguments)],
            [_listed(tool) for tool in tools] if tools else None,
        )
    written = [*_written(messages)]
    if tools:
        instructions = _instructions(tools)
        if written[0]["role"] == "system":
            given = written[0]["content"]
            instructions = f"{given}\n\n{instructions}" if given else instructions
            written = written[1:]
        written = [{"role": "system", "content": instructions}, *written]
    return Rendered(written, None)


def call_text(name: str, arguments: str) -> str:
    """A call as ``Guide.tools`` without a family has it; ``arguments`` is JSON text."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _instructions(tools: Dicts) -> str:
    listed = "\n".join(json.dumps(_listed(tool), ensure_ascii=False) for tool in tools)
    example = call_text("NAME", "{...}")
    return (
        "# Tools\n\n"
        "These functions can be called to help with the request. Each line between the tags describes "
        f"one; its parameters are a JSON Schema.\n<tools>\n{listed}\n</tools>\n\n"
        "To call one, write a JSON object with its name and its arguments between <tool_call> tags, in "
        f"this form:\n{example}\n"
        "Each call has tags of its own. What the functions return comes back between <tool_response> tags."
    )


def _listed(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the model reads it: ``strict`` is none of its business."""
    function = tool.get("function", tool)
    described = {name: function[name] for name in ("name", "description") if name in function}
    empty = {"type": "object", "properties": {}}  # templates look into it
    parameters = function.get("parameters", empty)
    return {"type": "function", "function": described | {"parameters": parameters}}


def _structured(messages: Dicts, *, text_arguments: bool) -> Iterator[dict[str, Any]]:
    names: dict[str, str] = {}
    for message in messages:
        turn = _turn(message)
        if calls := message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls}
            turn["tool_calls"] = [_structured_call(call, text_arguments) for call in calls]
        elif message["role"] == "tool":
            answered = message["tool_call_id"]
            turn |= {"tool_call_id": answered, "name": names[answered]}
        yield turn


def _structured_call(call: Mapping[str, Any], text_arguments: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not text_arguments:
        arguments = json.loads(arguments)
    function = {"name": function["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": function}


def _written(messages: Dicts) -> Iterator[dict[str, Any]]:
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
            parts = [call_text(one["name"], one["arguments"]) for one in functions]
            if turn["content"]:
                parts.insert(0, turn["content"])
            yield turn | {"content": "\n".join(parts)}


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    return {"role": role, "content": message.get("content", "")}


class _Generation(jinja2.ext.Extension):
    """The tag with which templates of transformers mark what is to be learned."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_styles: "weakref.WeakKeyDictionary[Any, tuple[str, TemplateStyle]]" = weakref.WeakKeyDictionary()
"""Of each tokenizer, its template and what is made of tools there."""


def _style(tokenizer: Any, template: str) -> TemplateStyle:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    try:
        variables = jinja2.meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateError:  # the engine tells the client when it uses it
        return TemplateStyle()
    if "tools" not in variables:
        return TemplateStyle()
    as_object, as_text = (_sample(tokenizer, arguments) for arguments in _SAMPLES)
    # Python writes a dict with single quotes: the template did not expect one.
    objects_fail = as_object is None or "{'sample'" in as_object
    return TemplateStyle(knows_tools=True, text_arguments=objects_fail and as_text is not None)


_SAMPLES: tuple[Any, Any] = ({"sample": "x"}, '{"sample": "x"}')


def _sample(tokenizer: Any, arguments: Any) -> str | None:
    """A small conversation with a call; None if the template fails on it."""
    identity = "call00000"  # Mistral's templates want nine characters
    function = {"name": "f", "arguments": arguments}
    call = {"id": identity, "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": identity, "name": "f", "content": "y"},
    ]
    try:
        tools = [_listed({"name": "f", "description": ""})]
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    except (jinja2.TemplateError, KeyError, TypeError, AttributeError, ValueError):
        return None
