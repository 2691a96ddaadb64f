"""What a caller asks for: a frozen description of a language, validated before any C++ sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

from grammar_host.errors import EmptyLanguageError, InvalidGuideError

GuideKind = Literal["json", "json_schema", "regex", "grammar", "lark", "choice", "structural_tag"]

MAX_NESTING = 64
"""Deepest nesting of JSON containers, or of parentheses in a regex or grammar. Engines recurse."""

MAX_TEXT_CHARACTERS = 1_000_000
"""Longest guide text. The largest schema of common public collections is below 600 000."""

DEFAULT_MAX_WHITESPACE = 8
"""Most blanks in a row between two JSON tokens. Without a bound a model can write blanks until it
runs out of tokens; eight leave room for a newline and some indentation."""

_FIELDS: Mapping[str, str] = {"json_schema": "schema"}


@dataclass(frozen=True)
class Guide:
    """A language that the output must belong to. Hashable: equal guides compile to equal grammars.

    Build one with the class methods, which accept what callers have at hand; the constructor takes
    the normal form. Both validate sizes, nesting, NUL characters and JSON, so that an engine never
    sees a text that could crash it.

    Attributes:
        kind: which language `text` is written in.
        text: the normal form: JSON for `json_schema`, `choice` (a list of strings) and
            `structural_tag`; empty for `json`; else the regex or grammar as given. Keys keep the
            caller's order, because models care about the order of properties.
        max_whitespace: for `json` and `json_schema`, the most blanks in a row between two JSON
            tokens; 0 means compact JSON. None for the other kinds.

    Raises:
        InvalidGuideError: malformed or over a limit.
        EmptyLanguageError: nothing can satisfy it.
    """

    kind: GuideKind
    text: str
    max_whitespace: int | None = None

    @classmethod
    def json(cls, *, max_whitespace: int = DEFAULT_MAX_WHITESPACE) -> Guide:
        """Any JSON object (OpenAI's "JSON mode", vLLM's `json_object`)."""
        return cls("json", "", max_whitespace)

    @classmethod
    def json_schema(cls, schema: Any, *, max_whitespace: int = DEFAULT_MAX_WHITESPACE) -> Guide:
        """A JSON document that follows a JSON Schema.

        Args:
            schema: a dict, a bool, a JSON text, or a class with `model_json_schema()` (pydantic).
            max_whitespace: the most blanks in a row between two JSON tokens; 0 is compact JSON.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            schema = _parse_json("json_schema", schema)
        if not isinstance(schema, dict | bool):
            _refuse("json_schema", f"a schema is an object or a bool, not {_type_name(schema)}")
        return cls("json_schema", _dump_json("json_schema", schema), max_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Guide:
        """A text that matches a regular expression from its first to its last character."""
        return cls("regex", _require_text("regex", pattern))

    @classmethod
    def grammar(cls, ebnf: str) -> Guide:
        """A text derived from the rule `root` of a grammar in GBNF, llama.cpp's EBNF."""
        return cls("grammar", _require_text("grammar", ebnf))

    @classmethod
    def lark(cls, grammar: str) -> Guide:
        """A text derived from the rule `start` of a grammar in Lark syntax."""
        return cls("lark", _require_text("lark", grammar))

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Guide:
        """Exactly one of the given strings."""
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            _refuse("choice", f"choices are a list of strings, not {_type_name(choices)}")
        return cls("choice", _dump_json("choice", list(choices)))

    @classmethod
    def structural_tag(cls, tag: Mapping[str, Any] | str) -> Guide:
        """Free text with guided parts between tags, in XGrammar's structural tag format.

        Args:
            tag: `{"type": "structural_tag", "format": {...}}` as a mapping or a JSON text.
        """
        value = _parse_json("structural_tag", tag) if isinstance(tag, str) else tag
        if not isinstance(value, Mapping):
            _refuse("structural_tag", f"a tag is a JSON object, not {_type_name(value)}")
        return cls("structural_tag", _dump_json("structural_tag", dict(value)))

    def __post_init__(self) -> None:
        if self.kind not in get_args(GuideKind):
            raise InvalidGuideError("kind", f"{self.kind!r} is none of {get_args(GuideKind)}")
        self._check_whitespace()
        _require_text(self.kind, self.text)
        if len(self.text) > MAX_TEXT_CHARACTERS:
            _refuse(self.kind, f"{len(self.text)} characters, at most {MAX_TEXT_CHARACTERS} served")
        if "\0" in self.text:
            _refuse(self.kind, "the text contains a NUL character")
        try:
            self.text.encode("utf-8")
        except UnicodeEncodeError:
            _refuse(self.kind, "the text contains a lone surrogate, which UTF-8 cannot write")
        if self.kind in ("json_schema", "choice", "structural_tag"):
            self._check_document(_parse_json(self.kind, self.text))
        elif self.kind != "json":
            _check_parentheses(self.kind, self.text)

    @property
    def field(self) -> str:
        """The kind as callers spell it in requests: `GuideError.field` of this guide's errors."""
        return _FIELDS.get(self.kind, self.kind)

    @property
    def document(self) -> Any:
        """The parsed JSON of a `json_schema`, `choice` or `structural_tag` guide."""
        return json.loads(self.text)

    def _check_whitespace(self) -> None:
        if self.kind not in ("json", "json_schema"):
            if self.max_whitespace is not None:
                _refuse(self.kind, "max_whitespace bounds the blanks of JSON guides only")
        elif type(self.max_whitespace) is not int or not 0 <= self.max_whitespace <= 1000:
            _refuse(self.kind, f"max_whitespace is 0 to 1000, not {self.max_whitespace!r}")

    def _check_document(self, value: Any) -> None:
        _check_json(self.kind, value)
        if self.kind == "choice":
            if not isinstance(value, list) or not value:
                _refuse(self.kind, "at least one choice is needed")
            for item in value:
                if not isinstance(item, str):
                    _refuse(self.kind, f"a choice is a string, not {_type_name(item)}")
        elif self.kind == "json_schema":
            if not isinstance(value, dict | bool):
                _refuse(self.kind, f"a schema is an object or a bool, not {_type_name(value)}")
            if value is False or (isinstance(value, dict) and value.get("not") in (True, {})):
                raise EmptyLanguageError(self.field, "the schema accepts no document at all")
        elif not isinstance(value, dict):
            _refuse(self.kind, f"a tag is a JSON object, not {_type_name(value)}")


def _refuse(kind: str, reason: str) -> NoReturn:
    raise InvalidGuideError(_FIELDS.get(kind, kind), reason)


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _require_text(kind: str, text: Any) -> str:
    if not isinstance(text, str):
        _refuse(kind, f"a string is needed, not {_type_name(text)}")
    if kind != "json" and not text.strip():
        _refuse(kind, "the text is empty")
    return text


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _parse_json(kind: str, text: str) -> Any:
    # The size is checked first: parsing may take far more memory than the text.
    if len(text) > MAX_TEXT_CHARACTERS:
        _refuse(kind, f"{len(text)} characters, at most {MAX_TEXT_CHARACTERS} are served")
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        _refuse(kind, f"nested deeper than {MAX_NESTING} levels")
    except ValueError as error:
        _refuse(kind, f"not valid JSON: {error}")


def _dump_json(kind: str, value: Any) -> str:
    _check_json(kind, value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        _refuse(kind, f"cannot be written as JSON: {error}")


def _check_json(kind: str, value: Any) -> None:
    """Bounds the nesting (which also ends cycles) and finds NUL characters; never recurses."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children.extend(item.values())
                children.extend(item.keys())
            elif isinstance(item, list | tuple):
                children.extend(item)
            elif isinstance(item, str) and "\0" in item:
                _refuse(kind, "a string contains a NUL character")
        # A value that contains itself several times would grow exponentially before the depth ends.
        if len(children) > MAX_TEXT_CHARACTERS:
            _refuse(kind, f"more than {MAX_TEXT_CHARACTERS} values on one level")
        if not children:
            return
        level = children
    _refuse(kind, f"nested deeper than {MAX_NESTING} levels")


def _check_parentheses(kind: str, text: str) -> None:
    """Bounds the nesting of groups outside of escapes, character classes and quoted strings."""
    depth = 0
    closing = ""
    quotes = {"[": "]"} if kind == "regex" else {"[": "]", '"': '"'}
    characters = iter(text)
    for character in characters:
        if character == "\\":
            next(characters, None)
        elif closing:
            if character == closing:
                closing = ""
        elif character in quotes:
            closing = quotes[character]
        elif character == "(":
            depth += 1
            if depth > MAX_NESTING:
                _refuse(kind, f"groups are nested deeper than {MAX_NESTING} levels")
        elif character == ")":
            depth -= 1
