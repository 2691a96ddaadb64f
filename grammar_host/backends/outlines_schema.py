"""The part of JSON Schema that Outlines is known to enforce exactly.

`outlines_core.json_schema.build_regex_from_schema` (0.2.14) ignores most keywords silently
(`minimum`, `uniqueItems`, `maxProperties`, `pattern` beside a length, everything beside `anyOf`),
takes others for something else (`allOf` as a sequence, `oneOf` as `anyOf`, objects as closed, any
value as three levels deep, patterns as if no character had to be escaped in JSON), and forgets what
is behind the third reference. So a schema is translated into the words that it gets right, keyword
by keyword from a list, and refused at the first one that is not on the list (but for keywords that
no draft knows, which are annotations). What remains is exact:
every accepted text is a valid document, and every valid document has an accepted text, in which
properties have the schema's order and only what must be is escaped outside of free strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from outlines_core.json_schema import build_regex_from_schema

from grammar_host.errors import GrammarTooComplexError, UnsupportedGuideError, clean_reason
from grammar_host.schema.census import KEYWORDS
from grammar_host.schema.walk import escape, local_pointer, resolve

MAX_PATTERN_CHARACTERS = 1_000_000
"""Longest regular expression of a schema. Optional properties take the square of their number."""

_PARAM = "schema"

_CONSTRAINTS = KEYWORDS | {
    "$dynamicRef",
    "$recursiveRef",
    "additionalItems",
    "dependencies",
    "dependentRequired",
}
"""What constrains documents in any draft."""

_HEX = "[0-9A-Fa-f]"
_CHARACTER = (
    r'(?:[^"\\\x00-\x1F]|\\["\\/bfnrt]|'
    rf"\\u(?:[0-9A-CEFa-cef]{_HEX}{{3}}|[Dd][0-7]{_HEX}{{2}}|"
    rf"[Dd][89ABab]{_HEX}{{2}}\\u[Dd][C-Fc-f]{_HEX}{{2}}))"
)
"""One character of a JSON string (RFC 8259): raw, escaped, or a pair of surrogates."""

_KEYWORDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "array": frozenset({"items", "minItems", "maxItems"}),
        "boolean": frozenset(),
        "integer": frozenset(),
        "null": frozenset(),
        "number": frozenset(),
        "object": frozenset({"properties", "required", "additionalProperties"}),
        "string": frozenset({"minLength", "maxLength", "pattern"}),
    }
)
"""What may stand beside each type."""

_PLAIN = r"0-9A-Za-z _:;,@#%&=~<>!'`/"
_ESCAPED = r"\\[dw.*+?()\[\]{}|^$/-]"
_CLASS = (
    r"\[(?:[0-9]-[0-9]|[a-z]-[a-z]|[A-Z]-[A-Z]"
    rf"|[{_PLAIN}.*+?(){{}}|$]|{_ESCAPED})+-?\]"
)
_SAFE_PATTERN = re.compile(
    rf"\^(?:\((?:\?:|(?!\?))|\||(?:[{_PLAIN}-]|{_ESCAPED}|{_CLASS}|\))"
    r"(?:(?:[*+?]|\{\d+(?:,\d*)?\})\??)?)*\$"
)
"""Anchored patterns of printable ASCII characters that JSON strings need not escape."""
_ASCII_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_"}


def schema_regex(document: Any, whitespace: str) -> str:
    """A regular expression (Rust) of the documents of a schema.

    Args:
        document: the schema, as `grammar_host.schema.versions` offers it: references are pointers
            from the root.
        whitespace: a regular expression of what may stand between two tokens.

    Raises:
        UnsupportedGuideError: something that Outlines does not enforce exactly; with its pointer.
        GrammarTooComplexError: over a limit.
    """
    translated = _Translation(document).schema(document, "")
    if _size(translated, len(whitespace)) > MAX_PATTERN_CHARACTERS:
        raise GrammarTooComplexError(
            _PARAM,
            "too large as a regular expression; make properties required, or use llguidance",
        )
    try:
        return build_regex_from_schema(json.dumps(translated, ensure_ascii=False), whitespace)
    except TypeError:  # its JSON parser has a limit on nesting
        raise GrammarTooComplexError(_PARAM, "nested too deeply for outlines") from None
    except ValueError as error:
        raise UnsupportedGuideError(_PARAM, clean_reason(str(error))) from None


def _refuse(pointer: str, reason: str) -> NoReturn:
    raise UnsupportedGuideError(_PARAM, reason, pointer=pointer)


class _Translation:
    """Schemas in the words of `build_regex_from_schema`."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._references: list[str] = []

    def schema(self, node: Any, pointer: str) -> dict[str, Any]:
        if not isinstance(node, dict):
            _refuse(pointer, "outlines does not serve schemas that accept any value, or none")
        keywords = node.keys() & _CONSTRAINTS
        for keyword, translate in (
            ("$ref", self._reference),
            ("anyOf", self._any_of),
            ("allOf", self._all_of),
            ("enum", self._enum),
            ("const", self._enum),
        ):
            if keyword in keywords:
                beside = {"type"} if keyword in ("enum", "const") else set()
                self._only(keywords, {keyword, *beside}, pointer, f"beside {keyword}")
                return translate(node, pointer)
        if "type" not in keywords:
            self._only(keywords, set(), pointer, "without a type")
            _refuse(pointer, "outlines does not serve any value, which nests without end")
        return self._typed(node, keywords, pointer)

    def _only(self, keywords: set[str], known: set[str], pointer: str, where: str) -> None:
        for keyword in sorted(keywords - known):
            _refuse(
                f"{pointer}/{escape(keyword)}",
                f"outlines does not enforce this {where}; llguidance may",
            )

    def _reference(self, node: dict[str, Any], pointer: str) -> dict[str, Any]:
        target = local_pointer(node["$ref"])
        pointer += "/$ref"
        if target is None:
            _refuse(pointer, "outlines serves references into the schema itself only")
        if target in self._references:
            _refuse(pointer, "refers to itself, which no regular expression can; use llguidance")
        try:
            referred = resolve(self._root, target)
        except KeyError:
            _refuse(pointer, "leads to nothing")
        self._references.append(target)
        translated = self.schema(referred, target)
        self._references.pop()
        return translated

    def _any_of(self, node: dict[str, Any], pointer: str) -> dict[str, Any]:
        branches = node["anyOf"]
        if not isinstance(branches, list) or not branches:
            _refuse(f"{pointer}/anyOf", "at least one schema is needed")
        return {
            "anyOf": [self.schema(item, f"{pointer}/anyOf/{i}") for i, item in enumerate(branches)]
        }

    def _all_of(self, node: dict[str, Any], pointer: str) -> dict[str, Any]:
        branches = node["allOf"]
        if not isinstance(branches, list) or len(branches) != 1:
            _refuse(f"{pointer}/allOf", "outlines does not serve intersections; llguidance may")
        return self.schema(branches[0], f"{pointer}/allOf/0")

    def _enum(self, node: dict[str, Any], pointer: str) -> dict[str, Any]:
        keyword = "enum" if "enum" in node else "const"
        pointer = f"{pointer}/{keyword}"
        values = node["enum"] if keyword == "enum" else [node["const"]]
        types = node.get("type", list(_KEYWORDS))
        types = types if isinstance(types, list) else [types]
        if not isinstance(values, list):
            _refuse(pointer, "a list is needed")
        allowed = [value for value in values if any(_has_type(value, name) for name in types)]
        if not allowed:
            _refuse(pointer, "no value has the type, so that nothing satisfies it")
        for value in allowed:
            if isinstance(value, dict | list):
                _refuse(pointer, "outlines serves strings, numbers, booleans and null here only")
            if isinstance(value, int | float) and not _is_written_exactly(value):
                _refuse(pointer, f"outlines cannot write the number {value} exactly")
        return {"enum": allowed}

    def _typed(self, node: dict[str, Any], keywords: set[str], pointer: str) -> dict[str, Any]:
        types = node["type"] if isinstance(node["type"], list) else [node["type"]]
        if not types or any(name not in _KEYWORDS for name in types):
            _refuse(f"{pointer}/type", "not a type of JSON Schema")
        known = {"type"}.union(*(_KEYWORDS[name] for name in types))
        self._only(keywords, known, pointer, f"beside the type {' or '.join(types)}")
        translate = {"array": self._array, "object": self._object, "string": self._string}
        branches = [
            translate[name](node, pointer) if name in translate else {"type": name}
            for name in types
        ]
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _string(self, node: dict[str, Any], pointer: str) -> dict[str, Any]:
        pattern = node.get("pattern")
        if pattern is None:
            least, most = self._bounds(node, "minLength", "maxLength", pointer)
            counts = "*" if (least, most) == (0, None) else f"{{{least},{_text(most)}}}"
            return {"type": "string", "pattern": _CHARACTER + counts}
        for keyword in ("minLength", "maxLength"):
            if keyword in node:
                _refuse(f"{pointer}/{keyword}", "outlines does not count beside a pattern")
        if not isinstance(pattern, str) or not _SAFE_PATTERN.fullmatch(pattern):
            _refuse(
                f"{pointer}/pattern",
                "outlines serves patterns between ^ and $ of printable ASCII characters, without "
                "quotes, backslashes, dots and negated classes; llguidance may serve this",
            )
        return {"type": "string", "pattern": self._embedded(pattern, f"{pointer}/pattern")}

    def _embedded(self, pattern: str, pointer: str) -> str:
        """A safe pattern without its anchors, in Rust's syntax."""
        body = pattern[1:-1]
        depth = 0
        outside = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", body)
        for character in outside:
            depth += (character == "(") - (character == ")")
            if depth < 0 or (depth == 0 and character == "|"):
                _refuse(pointer, "alternatives outside of a group escape the anchors")
        if depth:
            _refuse(pointer, "a group is not closed")
        return re.sub(r"\[(?:\\.|[^\]\\])*\]|\\.", _in_rust, body)

    def _array(self, node: dict[str, Any], pointer: str) -> dict[str, Any]:
        least, most = self._bounds(node, "minItems", "maxItems", pointer)
        empty = {"type": "array", "maxItems": 0}
        if most == 0:
            return empty
        if "items" not in node:
            _refuse(pointer, "outlines serves arrays with items only; any value nests without end")
        filled = {
            "type": "array",
            "items": self.schema(node["items"], f"{pointer}/items"),
            "minItems": max(least, 1),
        }
        if most is not None:
            filled["maxItems"] = most
        # An array that may be empty would get twice the blanks.
        return filled if least else {"anyOf": [empty, filled]}

    def _object(self, node: dict[str, Any], pointer: str) -> dict[str, Any]:
        if node.get("additionalProperties") is not False:
            where = "additionalProperties" if "additionalProperties" in node else ""
            _refuse(
                f"{pointer}/{where}" if where else pointer,
                "outlines serves closed objects only: say additionalProperties: false, or strict",
            )
        properties, required = node.get("properties", {}), node.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            _refuse(pointer, "properties are an object, and required is a list")
        for name in required:
            if name not in properties:
                _refuse(f"{pointer}/required", f"{json.dumps(name)} is not among the properties")
        return {
            "type": "object",
            "properties": {
                _key(name): self.schema(item, f"{pointer}/properties/{escape(name)}")
                for name, item in properties.items()
            },
            "required": [_key(name) for name in required],
        }

    def _bounds(
        self, node: dict[str, Any], minimum: str, maximum: str, pointer: str
    ) -> tuple[int, int | None]:
        for keyword in (minimum, maximum):
            value = node.get(keyword, 0)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                _refuse(f"{pointer}/{keyword}", "a number from 0 on is needed")
            if value != int(value):
                _refuse(f"{pointer}/{keyword}", "a whole number is needed")
        least = int(node.get(minimum, 0))
        most = int(node[maximum]) if maximum in node else None
        if most is not None and most < least:
            _refuse(f"{pointer}/{maximum}", f"below {minimum}, so that nothing satisfies it")
        return least, most


def _text(bound: int | None) -> str:
    return "" if bound is None else str(bound)


def _key(name: str) -> str:
    # The engine does not escape names.
    return json.dumps(name, ensure_ascii=False)[1:-1]


def _in_rust(match: re.Match[str]) -> str:
    """One escape or one class of a safe pattern; ECMA's `\\d` and `\\w` are ASCII."""
    token = match[0]
    if not token.startswith("["):
        return f"[{_ASCII_CLASSES[token[1]]}]" if token[1] in _ASCII_CLASSES else token
    token = re.sub(r"\\([dw])", lambda each: _ASCII_CLASSES[each[1]], token)
    return re.sub(r"[&~]", r"\\\g<0>", token)  # doubled, they would be operations on sets


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and value == int(value))
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds[type(value)] == name


def _is_written_exactly(value: int | float) -> bool:
    """Whether the engine, which reads numbers as 64 bits, writes the value that was meant."""
    written = build_regex_from_schema(json.dumps({"const": value}), "")
    return bool(json.loads(written.replace("\\", "")) == value)


def _size(node: dict[str, Any], whitespace: int) -> int:
    """About how many characters the regular expression of a translated schema has."""
    if "anyOf" in node:
        return sum(_size(item, whitespace) for item in node["anyOf"])
    if "items" in node:
        return 2 * _size(node["items"], whitespace) + 4 * whitespace
    if "properties" not in node:
        return len(json.dumps(node))
    sizes = [
        len(name) + 4 * whitespace + _size(item, whitespace)
        for name, item in node["properties"].items()
    ]
    if node["required"]:
        return sum(sizes)
    # One alternative for each property that could be the last one.
    return sum((len(sizes) - index) * size for index, size in enumerate(sizes))
