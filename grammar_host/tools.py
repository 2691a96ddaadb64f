"""Tool calls: from the tools of a request to a guide, and from the text of an answer to calls.

The field names and shapes are those of OpenAI's Chat Completions and Responses APIs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from grammar_host.call_forms import HERMES, CallForm, CallFormName
from grammar_host.call_patterns import call_patterns
from grammar_host.errors import GuideError, InvalidGuideError, UnsupportedGuideError
from grammar_host.guide import Guide
from grammar_host.object_scanner import ObjectScanner
from grammar_host.tags import embedded_schemas, may_be_empty

FAMILIES = (
    "cohere",
    "deepseek_r1",
    "deepseek_v3_1",
    "deepseek_v3_2",
    "deepseek_v4",
    "deepseek_v4_1",
    "exaone",
    "gemma_4",
    "glm_4_7",
    "harmony",
    "kimi",
    "kimi_k3",
    "llama",
    "mimo",
    "minimax",
    "minimax_m3",
    "qwen_3",
    "qwen_3_5",
    "qwen_3_coder",
)
"""Families of models whose way of writing calls XGrammar 0.2.9 knows."""

_Mode = Literal["none", "auto", "required", "named"]

_MODES: tuple[_Mode, ...] = ("none", "auto", "required")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class _Tool(NamedTuple):
    """A function that may be called, the JSON Schema of its arguments, and where that came from."""

    name: str
    parameters: Mapping[str, Any]
    pointer: str


class ToolCall(NamedTuple):
    """A call of a function, with the JSON text of its arguments as it was written."""

    name: str
    arguments: str


def tools_guide(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any],
    *,
    parallel: bool,
    family: str | None,
    form: CallForm | None,
) -> Guide | None:
    """Does what `Guide.tools` says.

    With `"auto"` the text around the calls is free, except that the trigger of the form (Hermes':
    `<tool_call>`) always begins a call; otherwise there are calls only, with the form's separator
    between them. A named function is called once. Without `parallel` the text ends behind the first
    call.
    """
    if type(parallel) is not bool:
        _refuse("parallel_tool_calls", "true or false is needed")
    if family is not None and family not in FAMILIES:
        _refuse("family", f"{family!r} is not known; known are: {', '.join(FAMILIES)}")
    if family is not None and form is not None:
        _refuse("family", "a form is given as well; leave one of them out")
    known = _read_tools(tools)
    mode, name = _read_choice(tool_choice, known)
    if mode == "none":
        return None
    chosen = [tool for tool in known if name in (None, tool.name)]
    if family is None:
        functions = [(tool.name, tool.parameters) for tool in chosen]
        calls = (form or HERMES).format(functions, mode, parallel=parallel)
        tag = {"type": "structural_tag", "format": calls}
    else:
        tag = _family_tag(family, chosen, mode, parallel)
    try:
        return Guide.structural_tag(tag)
    except GuideError as error:  # one by one the tools are fine: together they are too large
        raise type(error)("tools", error.reason) from None


def tools_error(error: GuideError, guide: Guide, tools: Sequence[Mapping[str, Any]]) -> GuideError:
    """An error about a guide of tools, said of the tools.

    Args:
        error: raised when the guide was compiled, with a pointer into its structural tag.
        guide: what `Guide.tools` returned.
        tools: what it was made from.

    Returns:
        The same error, of the field `tools`, with the pointer of the parameters to blame.
    """
    for inside, schema in embedded_schemas(guide.document):
        if not f"{error.pointer}/".startswith(f"{inside}/"):
            continue
        for tool in _read_tools(tools):
            if tool.parameters == schema:
                pointer = tool.pointer + str(error.pointer).removeprefix(inside)
                return type(error)("tools", error.reason, pointer=pointer)
    return type(error)("tools", error.reason)


def parse_tool_calls(
    text: str, form: CallFormName = "hermes", names: Sequence[str] | None = None
) -> tuple[str, list[ToolCall]]:
    """Takes the calls out of a text.

    Args:
        text: the answer, special tokens included. A call that is cut off (by a token limit) is no
            call; if it is cut off before its arguments, directly behind another, it is no text.
        form: how they are written.
        names: for `"llama"`, the functions that there are: JSON with another name is text.

    Returns:
        The text outside of the calls, and the calls in their order. If there are calls, the text
        has no blanks at its end, and none at its start if nothing else precedes the first call: so
        a stream, which learns of the calls when they come, has the same text.
    """
    patterns = call_patterns(form, None if names is None else tuple(names))
    calls: list[ToolCall] = []
    content: list[str] = []
    written, follows = 0, False
    head = patterns.head.whole.search(text)
    while head is not None:
        scanner = ObjectScanner(head.end())
        outcome, end = scanner.scan(text), scanner.position
        tail = patterns.tail.whole.match(text, end) if outcome == "closed" else None
        if tail is None:
            # A stream has told this much as arguments by then.
            told = len(text) if outcome == "open" else end
            heads = patterns.head.whole.finditer(text, head.end())
            head = next((head for head in heads if head.end() > told), None)
            continue
        name = next(filter(None, head.groups()))
        calls.append(ToolCall(name, text[head.end() : end]))
        content.append(text[written : head.start()])
        written = tail.end()
        head = patterns.next.whole.match(text, written)
        if head is None:
            close = patterns.close and patterns.close.whole.match(text, written)
            written, follows = (close.end(), False) if close else (written, True)
            head = patterns.head.whole.search(text, written)
    if not follows or not patterns.may_follow(text, written):
        content.append(text[written:])
    outside = "".join(content)
    if not calls:
        return outside, calls
    return (outside if content[0].strip() else outside.lstrip()).rstrip(), calls


def _refuse(param: str, reason: str, pointer: str | None = None) -> NoReturn:
    raise InvalidGuideError(param, reason, pointer=pointer)


def _read_tools(tools: Any) -> list[_Tool]:
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        _refuse("tools", f"a list of tools is needed, not {type(tools).__name__}")
    known: list[_Tool] = []
    for index, value in enumerate(tools):
        if not isinstance(value, Mapping):
            _refuse("tools", f"a tool is an object, not {type(value).__name__}", f"/{index}")
        if value.get("type") != "function":
            raise UnsupportedGuideError(
                "tools",
                f"tools of type {value.get('type')!r} are not served; use 'function'",
                pointer=f"/{index}/type",
            )
        nested = "function" in value
        pointer = f"/{index}/function" if nested else f"/{index}"
        tool = _read_function(value["function"] if nested else value, pointer)
        if any(tool.name == other.name for other in known):
            _refuse("tools", f"two tools have the name {tool.name!r}", f"{pointer}/name")
        known.append(tool)
    return known


def _read_function(function: Any, pointer: str) -> _Tool:
    if not isinstance(function, Mapping):
        _refuse("tools", f"an object is needed, not {type(function).__name__}", pointer)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse("tools", "a name of 1 to 64 letters, digits, _ and - is needed", f"{pointer}/name")
    strict = function.get("strict")
    if strict is not None and type(strict) is not bool:
        _refuse("tools", "true or false is needed", f"{pointer}/strict")
    parameters = function.get("parameters")
    if parameters is None:  # to OpenAI: "a function with an empty parameter list"
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    pointer += "/parameters"
    return _Tool(name, _read_parameters(parameters, bool(strict), pointer), pointer)


def _read_parameters(parameters: Any, strict: bool, pointer: str) -> Mapping[str, Any]:
    # Not needed by every user of this module.
    from grammar_host.schema.shapes import check_shapes
    from grammar_host.schema.strict import close_objects

    if not isinstance(parameters, Mapping):
        _refuse("tools", f"a schema is an object, not {type(parameters).__name__}", pointer)
    try:
        schema: dict[str, Any] = Guide.json_schema(dict(parameters)).document
        check_shapes(schema, "tools")
    except GuideError as error:
        raise type(error)("tools", error.reason, pointer=pointer) from None
    if not any(key in schema for key in ("type", "$ref", "allOf", "anyOf", "oneOf")):
        schema = {"type": "object", **schema}
    if not _describes_objects(schema, schema, ()):
        _refuse("tools", "arguments are an object: 'type' must be 'object'", pointer)
    if strict:
        close_objects(schema)
    return schema


def _describes_objects(root: Any, schema: Any, above: tuple[int, ...]) -> bool:
    """Whether the schema says, directly or by references and branches, that values are objects."""
    from grammar_host.schema.walk import referred

    if not isinstance(schema, Mapping) or id(schema) in above:
        return False
    if "type" in schema:
        return bool(schema["type"] in ("object", ["object"]))

    def branches(keyword: str) -> list[bool]:
        value = schema.get(keyword)
        items = value if isinstance(value, list) else []
        return [_describes_objects(root, item, (*above, id(schema))) for item in items]

    target = referred(root, dict(schema))
    return (
        _describes_objects(root, target, (*above, id(schema)))
        or any(branches("allOf"))
        or any(found and all(found) for found in map(branches, ("anyOf", "oneOf")))
    )


def _read_choice(tool_choice: Any, known: list[_Tool]) -> tuple[_Mode, str | None]:
    """What the model may do, and the only function if there is just one."""
    names = ", ".join(tool.name for tool in known)
    for mode in _MODES:
        if tool_choice != mode:
            continue
        if not known and mode != "none":
            param = "tools" if mode == "auto" else "tool_choice"
            _refuse(param, f"{mode!r} needs at least one tool; use 'none' without tools")
        return mode, None
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type") != "function":
        _refuse(
            "tool_choice",
            "one of 'none', 'auto', 'required' or "
            '{"type": "function", "function": {"name": ...}} is needed',
        )
    pointer = "/function/name" if "function" in tool_choice else "/name"
    function = tool_choice.get("function", tool_choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        _refuse("tool_choice", "the name of a function is needed", pointer)
    if all(tool.name != name for tool in known):
        _refuse("tool_choice", f"no tool is named {name!r}; there are: {names or 'none'}", pointer)
    return "named", name


def _family_tag(family: str, tools: list[_Tool], mode: _Mode, parallel: bool) -> dict[str, Any]:
    from grammar_host.backends.xgrammar import model_tools_tag  # imports torch

    choice: Any = mode
    if mode == "named":
        choice = {"type": "function", "function": {"name": tools[0].name}}
    functions = [(tool.name, dict(tool.parameters)) for tool in tools]
    tag = model_tools_tag(family, functions, choice, parallel=parallel)
    if mode != "auto" and may_be_empty(tag["format"]):
        # Harmony's messages are a list that may be empty, whatever the choice.
        tag["format"] = _not_empty(tag["format"])
        if may_be_empty(tag["format"]):
            raise UnsupportedGuideError("tool_choice", f"{family} cannot be held to a call")
    return tag


def _not_empty(node: dict[str, Any]) -> dict[str, Any]:
    if node["type"] == "optional":
        return dict(node["content"])
    return {**node, "at_least_one": True} if "at_least_one" in node else node
