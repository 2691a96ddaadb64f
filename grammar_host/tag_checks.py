"""The formats of structural tags, field by field.

The format is XGrammar's (0.2.9; its module `xgrammar.structural_tag` defines the same fields). The
engine ignores fields that it does not know, so a misspelled option would silently do nothing, and
it answers some mistakes with a failed internal check; hence everything is checked here, and
reported with its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from grammar_host.errors import InvalidGuideError, UnsupportedGuideError

PARAM = "structural_tag"
"""The field that errors about structural tags name."""

STYLE_MARKERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "json": (),
        "qwen_xml": ("<parameter=", "</parameter>"),
        "minimax_xml": ("<parameter name=", "</parameter>"),
        "minimax_m3_xml": ("]<]minimax[>[",),
        "deepseek_xml": ("｜DSML｜",),  # noqa: RUF001 -- DeepSeek's tags are full-width
        "deepseek_v4_1_xml": ("｜DSML｜",),  # noqa: RUF001
        "glm_xml": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        "cohere_xml": ("<cofl:value", "</cofl:value>"),
        "kimi_k3_xml": ("<|open|>", "<|sep|>", "<|close|>"),
        "gemma": ('<|"|>',),
    }
)
"""How a `json_schema` format may be written, and what each style writes around the values. Where a
vocabulary has special tokens of these names, the model writes those."""

_Check = Callable[[Any, str], None]
"""Takes a value and its JSON pointer; raises a `GuideError`."""

_MAX_COUNT = 2**31 - 1
"""The engine counts in 32 bits."""


def check_document(document: Mapping[str, Any]) -> None:
    """Checks a structural tag in the form with a `format`.

    The languages inside (schemas, regexes, grammars) are not looked into.

    Raises:
        InvalidGuideError: an unknown format or field, a missing or malformed one, triggers and
            tags that do not fit together.
        UnsupportedGuideError: an option that would enforce less than the schema says.
    """
    _check_fields(document, _DOCUMENT, "")


def check_legacy_document(document: Mapping[str, Any]) -> None:
    """Checks a structural tag in the form with `structures` and `triggers`.

    Raises:
        InvalidGuideError: as for `check_document`.
    """
    _check_fields(document, _LEGACY_DOCUMENT, "")
    begins = [structure["begin"] for structure in document["structures"]]
    _check_triggers(document["triggers"], begins, "", "structures")


def _refuse(reason: str, pointer: str) -> NoReturn:
    raise InvalidGuideError(PARAM, reason, pointer=pointer)


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__


# Checks of single values.


def _object(value: Any, pointer: str) -> None:
    if not isinstance(value, Mapping):
        _refuse(f"an object is needed, not {_type_name(value)}", pointer)


def _text(value: Any, pointer: str) -> None:
    if not isinstance(value, str):
        _refuse(f"a string is needed, not {_type_name(value)}", pointer)


def _some_text(value: Any, pointer: str) -> None:
    _text(value, pointer)
    if not value:
        _refuse("the string is empty", pointer)


def _flag(value: Any, pointer: str) -> None:
    if type(value) is not bool:
        _refuse(f"true or false, not {_type_name(value)}", pointer)


def _count(value: Any, pointer: str) -> None:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        _refuse(f"an integer from 0 to {_MAX_COUNT} is needed", pointer)


def _count_or_null(value: Any, pointer: str) -> None:
    if value is not None:
        _count(value, pointer)


def _count_or_unbounded(value: Any, pointer: str) -> None:
    if type(value) is not int or value != -1:
        _count(value, pointer)


def _schema(value: Any, pointer: str) -> None:
    if not isinstance(value, Mapping | bool):
        _refuse(f"a schema is an object or a bool, not {_type_name(value)}", pointer)


def _token(value: Any, pointer: str) -> None:
    if isinstance(value, str):
        _some_text(value, pointer)
    elif type(value) is int:
        _count(value, pointer)
    else:
        _refuse(f"a token's id or text is needed, not {_type_name(value)}", pointer)


def _one_of(*options: str) -> _Check:
    def check(value: Any, pointer: str) -> None:
        if not isinstance(value, str) or value not in options:
            _refuse(f"{value!r} is not known; known are: {', '.join(options)}", pointer)

    return check


def _list_of(check_item: _Check, *, at_least: int = 1) -> _Check:
    def check(value: Any, pointer: str) -> None:
        if not isinstance(value, list | tuple):
            _refuse(f"a list is needed, not {_type_name(value)}", pointer)
        if len(value) < at_least:
            _refuse("the list is empty", pointer)
        for index, item in enumerate(value):
            check_item(item, f"{pointer}/{index}")

    return check


# Checks of objects.


def _check_fields(node: Any, fields: Mapping[str, _Check], pointer: str) -> None:
    """Checks an object against a table of fields; a name that ends in "?" may be missing."""
    _object(node, pointer)
    known = {name.removesuffix("?"): name for name in fields}
    for name in node:
        if name not in known:
            _refuse(f"{name!r} is no field here; known are: {', '.join(known)}", pointer)
    for name, spelled in known.items():
        if name in node:
            fields[spelled](node[name], f"{pointer}/{name}")
        elif name == spelled:
            _refuse(f"the field {name!r} is missing", pointer)


def _fields(fields: Mapping[str, _Check]) -> _Check:
    return lambda value, pointer: _check_fields(value, fields, pointer)


def _format(value: Any, pointer: str) -> None:
    _object(value, pointer)
    if "type" not in value:
        _refuse("a format needs a 'type'", pointer)
    _one_of(*FORMATS)(value["type"], f"{pointer}/type")
    _format_of_type(value, value["type"], pointer)


def _format_of_type(value: Any, kind: str, pointer: str) -> None:
    """Checks a format where only one type is possible, so that it need not be said."""
    _check_fields(value, {"type?": _one_of(kind), **FORMATS[kind]}, pointer)
    if kind in _CONDITIONS:
        _CONDITIONS[kind](value, pointer)


def _tag(value: Any, pointer: str) -> None:
    _format_of_type(value, "tag", pointer)


def _begin(value: Any, pointer: str) -> None:
    if isinstance(value, Mapping):
        _format_of_type(value, "token", pointer)
    else:
        _text(value, pointer)


def _end(value: Any, pointer: str) -> None:
    if isinstance(value, list | tuple):
        _list_of(_text)(value, pointer)
    else:
        _begin(value, pointer)


def _rule(check_pattern: _Check) -> _Check:
    def check(value: Any, pointer: str) -> None:
        if not isinstance(value, list | tuple) or len(value) != 2:
            _refuse("a rule is a list of a pattern and a format", pointer)
        check_pattern(value[0], f"{pointer}/0")
        _format(value[1], f"{pointer}/1")

    return check


# Conditions between the fields of one format.


def _check_triggers(
    triggers: Sequence[str], begins: Sequence[str], pointer: str, field: str
) -> None:
    """Every trigger begins some tag, and every tag is begun by exactly one trigger."""
    for index, trigger in enumerate(triggers):
        where = f"{pointer}/triggers/{index}"
        if trigger in triggers[:index]:
            _refuse(f"the trigger {trigger!r} is there twice", where)
        if not any(begin.startswith(trigger) for begin in begins):
            _refuse(f"no tag begins with the trigger {trigger!r}", where)
    for index, begin in enumerate(begins):
        fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
        if len(fitting) != 1:
            found = " and ".join(map(repr, fitting)) or "none does"
            _refuse(
                f"exactly one trigger must begin {begin!r}: {found}",
                f"{pointer}/{field}/{index}/begin",
            )


def _triggered_tags(node: Mapping[str, Any], pointer: str) -> None:
    begins = [tag["begin"] for tag in node["tags"]]
    for index, begin in enumerate(begins):
        if not isinstance(begin, str):
            where = f"{pointer}/tags/{index}/begin"
            _refuse("text is needed; for a token use token_triggered_tags", where)
    _check_triggers(node["triggers"], begins, pointer, "tags")


def _token_triggered_tags(node: Mapping[str, Any], pointer: str) -> None:
    for index, tag in enumerate(node["tags"]):
        if isinstance(tag["begin"], str):
            where = f"{pointer}/tags/{index}/begin"
            _refuse("a token is needed; for text use triggered_tags", where)


def _bounds(node: Mapping[str, Any], pointer: str) -> None:
    if node["max"] != -1 and node["max"] < node["min"]:
        _refuse(f"max is below min, {node['min']}", f"{pointer}/max")


def _whole_schema(node: Mapping[str, Any], pointer: str) -> None:
    """Refuses options under which the engine drops parts of the schema."""
    if node.get("any_order"):
        raise UnsupportedGuideError(
            PARAM,
            "in any order, required properties may be missing and others repeat; leave it out",
            pointer=f"{pointer}/any_order",
        )
    if node.get("excludes") and _mentions(node["json_schema"], ("minLength", "maxLength")):
        raise UnsupportedGuideError(
            PARAM,
            "texts cannot be excluded where the schema bounds lengths; leave out one of the two",
            pointer=f"{pointer}/excludes",
        )


def _mentions(value: Any, keywords: tuple[str, ...]) -> bool:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            if any(keyword in item for keyword in keywords):
                return True
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
    return False


_CONDITIONS: Mapping[str, Callable[[Mapping[str, Any], str], None]] = {
    "json_schema": _whole_schema,
    "repeat": _bounds,
    "token_triggered_tags": _token_triggered_tags,
    "triggered_tags": _triggered_tags,
}

_TEXTS = _list_of(_some_text, at_least=0)
_TOKENS = _list_of(_token, at_least=0)
_ONE_OR_ALL: Mapping[str, _Check] = {"at_least_one?": _flag, "stop_after_first?": _flag}

FORMATS: Mapping[str, Mapping[str, _Check]] = MappingProxyType(
    {
        "const_string": {"value": _text},
        "json_schema": {
            "json_schema": _schema,
            "style?": _one_of(*STYLE_MARKERS),
            "any_order?": _flag,
            "max_whitespace_cnt?": _count_or_null,
            "excludes?": _TEXTS,
        },
        "any_text": {
            "excludes?": _TEXTS,
            "max_tokens?": _count_or_null,
            "max_chars?": _count_or_null,
        },
        "token": {"token": _token},
        "exclude_token": {"exclude_tokens?": _TOKENS},
        "any_tokens": {"exclude_tokens?": _TOKENS, "max_tokens?": _count_or_null},
        "grammar": {"grammar": _some_text, "syntax?": _one_of("ebnf", "lark")},
        "regex": {"pattern": _some_text},
        "sequence": {"elements": _list_of(_format)},
        "or": {"elements": _list_of(_format)},
        "optional": {"content": _format},
        "plus": {"content": _format},
        "star": {"content": _format},
        "repeat": {"min": _count, "max": _count_or_unbounded, "content": _format},
        "tag": {"begin": _begin, "content": _format, "end": _end},
        "triggered_tags": {
            "triggers": _list_of(_some_text),
            "tags": _list_of(_tag),
            "excludes?": _TEXTS,
            **_ONE_OR_ALL,
        },
        "token_triggered_tags": {
            "trigger_tokens": _list_of(_token),
            "tags": _list_of(_tag),
            "exclude_tokens?": _TOKENS,
            **_ONE_OR_ALL,
        },
        "tags_with_separator": {"tags": _list_of(_tag), "separator": _text, **_ONE_OR_ALL},
        "dispatch": {"rules": _list_of(_rule(_some_text)), "loop?": _flag, "excludes?": _TEXTS},
        "token_dispatch": {
            "rules": _list_of(_rule(_token)),
            "loop?": _flag,
            "exclude_tokens?": _TOKENS,
        },
        # The older name of a json_schema in the style qwen_xml.
        "qwen_xml_parameter": {"json_schema": _schema},
    }
)
"""The fields of every format, each with its check; those that end in "?" may be left out."""

_DOCUMENT: Mapping[str, _Check] = {"type": _one_of("structural_tag"), "format": _format}
_LEGACY_DOCUMENT: Mapping[str, _Check] = {
    "type": _one_of("structural_tag"),
    "structures": _list_of(_fields({"begin": _text, "schema": _schema, "end": _text})),
    "triggers": _list_of(_some_text),
}
