"""What a caller asks for: a frozen description of a language, validated before any C++ sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, get_args

from grammar_host.call_forms import CallForm
from grammar_host.errors import (
    EmptyLanguageError,
    GrammarTooComplexError,
    GuideError,
    InvalidGuideError,
)
from grammar_host.tag_checks import check_document
from grammar_host.tags import TagPart, read_tag, tag_parts

GuideKind = Literal["json", "json_schema", "regex", "grammar", "lark", "choice", "structural_tag"]

MAX_NESTING = 64
"""Deepest nesting of JSON containers, or of parentheses in a regex or grammar. Engines recurse."""

MAX_TEXT_CHARACTERS = 1_000_000
"""Longest guide text. The largest schema of common public collections is below 600 000."""

MAX_OPTION_CHARACTERS = 256
"""Longest text of an option: a whitespace pattern, a tag."""

DEFAULT_MAX_WHITESPACE = 8
"""Most blanks in a row between two JSON tokens. Without a bound a model can write blanks until it
runs out of tokens; eight leave room for a newline and some indentation."""

MaxWhitespace = int | Literal["free"]
"""A number of blanks, or no bound at all."""

_PARAMS: Mapping[str, str] = {"json_schema": "schema"}


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
            tokens; 0 means compact JSON, `"free"` no bound. None for the other kinds.
        whitespace_pattern: for `json` and `json_schema`, a regular expression of what may stand
            between two JSON tokens instead; `max_whitespace` is None then. Engines that cannot
            honour it refuse the guide.
        strict: for `json_schema`, whether objects and arrays are closed to properties and items
            that the schema does not mention. The standard says that they are open.
        reasoning_end: free text comes first, up to and including this tag; the language begins
            behind it. None: the text begins with the language. See `after_reasoning`.
        reasoning_start: the free text is there only if the text begins with this tag; otherwise it
            is a text of the language. None: the text begins inside of the free text.

    Raises:
        InvalidGuideError: malformed.
        GrammarTooComplexError: over a limit.
        EmptyLanguageError: nothing can satisfy it.
    """

    kind: GuideKind
    text: str
    max_whitespace: MaxWhitespace | None = None
    whitespace_pattern: str | None = None
    strict: bool = False
    reasoning_end: str | None = None
    reasoning_start: str | None = None

    @classmethod
    def json(
        cls,
        *,
        max_whitespace: MaxWhitespace = DEFAULT_MAX_WHITESPACE,
        whitespace_pattern: str | None = None,
    ) -> Guide:
        """Any JSON object (OpenAI's "JSON mode", vLLM's `json_object`).

        Args:
            max_whitespace: as for `json_schema`.
            whitespace_pattern: as for `json_schema`.
        """
        bound = max_whitespace if whitespace_pattern is None else None
        return cls("json", "", bound, whitespace_pattern)

    @classmethod
    def json_schema(
        cls,
        schema: Any,
        *,
        strict: bool = False,
        max_whitespace: MaxWhitespace = DEFAULT_MAX_WHITESPACE,
        whitespace_pattern: str | None = None,
    ) -> Guide:
        """A JSON document that follows a JSON Schema.

        Args:
            schema: a dict, a bool, a JSON text, or a class with `model_json_schema()` (pydantic).
            strict: closes objects and arrays to properties and items that the schema does not
                mention, as OpenAI's strict mode does: a model asked for a name and an age should
                not invent further properties. The default follows the standard.
            max_whitespace: the most blanks in a row between two JSON tokens; 0 is compact JSON,
                `"free"` no bound, so that a model may spin in blanks.
            whitespace_pattern: a regular expression of the blanks instead of a bound.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            schema = _parse_json("json_schema", schema)
        if not isinstance(schema, dict | bool):
            _refuse("json_schema", f"a schema is an object or a bool, not {_type_name(schema)}")
        text = _dump_json("json_schema", schema)
        bound = max_whitespace if whitespace_pattern is None else None
        return cls("json_schema", text, bound, whitespace_pattern, strict)

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

        JSON inside of a tag is ruled as `json_schema` rules it: open objects unless the schema
        closes them, and a bound on blanks (`max_whitespace_cnt`, default 8, null for none). The
        XML styles are up to the engine, which closes objects.

        A tag may end in a stop token, written as `{"type": "token", "token": "<|im_end|>"}` or as
        text; the generation then stops there.

        Args:
            tag: as a mapping or a JSON text, `{"type": "structural_tag", "format": {...}}`, or the
                older form of vLLM and SGLang, `{"type": "structural_tag", "structures": [{"begin":
                ..., "schema": ..., "end": ...}], "triggers": [...]}`; every trigger counts.
        """
        if isinstance(tag, Mapping):
            tag = _dump_json("structural_tag", dict(tag))
        value = _parse_json("structural_tag", tag) if isinstance(tag, str) else tag
        if not isinstance(value, dict):
            _refuse("structural_tag", f"a tag is a JSON object, not {_type_name(value)}")
        return cls("structural_tag", _dump_json("structural_tag", read_tag(value)))

    @classmethod
    def tools(
        cls,
        tools: Sequence[Mapping[str, Any]],
        tool_choice: str | Mapping[str, Any] = "auto",
        *,
        parallel: bool = True,
        family: str | None = None,
        form: CallForm | None = None,
    ) -> Guide | None:
        """Calls of functions, as OpenAI's API describes them; a guide of kind `structural_tag`.

        Args:
            tools: `{"type": "function", "function": {"name", "description", "parameters",
                "strict"}}`, or the same without the inner object as in the Responses API.
                Arguments always follow `parameters`; `strict` closes their objects as for
                `json_schema`. Without `parameters` a function takes no arguments.
            tool_choice: `"auto"`: free text, calls where the model wants them; `"required"`: one
                call at least; `{"type": "function", "function": {"name": ...}}` (or with the name
                on the outside): a call of that function; `"none"`: no guide.
            parallel: whether one answer may hold several calls.
            family: how the model writes calls: one of `grammar_host.tools.FAMILIES`, which are
                XGrammar's; None: in a form. No family's tags include reasoning: see
                `after_reasoning`.
            form: how the model writes calls: one of `grammar_host.CALL_FORMS`, or one of your own;
                None: as `{"name": ..., "arguments": {...}}` in `<tool_call>` tags, Hermes' form,
                which `grammar_host.tools.parse_tool_calls` reads back. Where a form and a family
                have the same name, they differ: with `"auto"`, the form `"llama"` takes text for a
                call only if it names a function, and knows `<|python_tag|>` and `"type":
                "function"`; the family takes any `{"name": ` for one.

        Returns:
            None if nothing is to be enforced (`tool_choice="none"`).

        Raises:
            GuideError: of the field `tools`, `tool_choice`, `parallel_tool_calls` or `family`.
        """
        from grammar_host.tools import tools_guide  # which builds on this class

        return tools_guide(tools, tool_choice, parallel=parallel, family=family, form=form)

    def after_reasoning(self, end: str = "</think>", *, start: str | None = None) -> Guide:
        """The same language behind free text: a model that thinks first, then answers.

        Args:
            end: the tag that ends the free text, as text or as the name of a special token.
            start: the tag that begins it, for a model that may think and need not: what does not
                begin with this tag is the answer. None: the prompt has opened the free text.
        """
        return replace(self, reasoning_end=end, reasoning_start=start)

    def without_reasoning(self) -> Guide:
        """The language alone, which the text begins with."""
        return replace(self, reasoning_end=None, reasoning_start=None)

    def __post_init__(self) -> None:
        if self.kind not in get_args(GuideKind):
            raise InvalidGuideError("kind", f"{self.kind!r} is none of {get_args(GuideKind)}")
        self._check_options()
        _require_text(self.kind, self.text)
        if len(self.text) > MAX_TEXT_CHARACTERS:
            _refuse_size(self.kind, f"{len(self.text)} characters")
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
    def param(self) -> str:
        """The kind as callers spell it in requests: `GuideError.param` of this guide's errors."""
        return _PARAMS.get(self.kind, self.kind)

    @property
    def document(self) -> Any:
        """The parsed JSON of a `json_schema`, `choice` or `structural_tag` guide."""
        return json.loads(self.text)

    def _check_options(self) -> None:
        if type(self.strict) is not bool:
            raise InvalidGuideError("strict", f"true or false, not {self.strict!r}")
        if self.strict and self.kind != "json_schema":
            raise InvalidGuideError(
                "strict", f"closes the objects of a schema; this is {self.kind}"
            )
        if self.reasoning_end is not None:
            _check_option("reasoning_end", self.reasoning_end)
        if self.reasoning_start is not None:
            _check_option("reasoning_start", self.reasoning_start)
            if self.reasoning_end is None:
                raise InvalidGuideError("reasoning_start", "goes with reasoning_end")
            if self.reasoning_start[0].isspace():
                raise InvalidGuideError("reasoning_start", "begins with a blank")
        if self.whitespace_pattern is not None:
            _check_option("whitespace_pattern", self.whitespace_pattern)
        if self.kind not in ("json", "json_schema"):
            for name in ("max_whitespace", "whitespace_pattern"):
                if getattr(self, name) is not None:
                    raise InvalidGuideError(name, f"rules the blanks of JSON; this is {self.kind}")
        elif self.whitespace_pattern is not None:
            if self.max_whitespace is not None:
                raise InvalidGuideError("whitespace_pattern", "excludes max_whitespace")
        elif self.max_whitespace != "free" and not (
            type(self.max_whitespace) is int and 0 <= self.max_whitespace <= 1000
        ):
            raise InvalidGuideError(
                "max_whitespace", f"0 to 1000 or 'free', not {self.max_whitespace!r}"
            )

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
                raise EmptyLanguageError(self.param, "the schema accepts no document at all")
        else:
            _check_tag(self.kind, value)


def part_guide(part: TagPart) -> Guide:
    """The guide that a part of a structural tag is by itself.

    Raises:
        GuideError: as for any guide, with the field names and pointers of its own kind.
    """
    if part.kind != "json_schema":
        return Guide(part.kind, _require_text(part.kind, part.value))
    blanks = part.format.get("max_whitespace_cnt", DEFAULT_MAX_WHITESPACE)
    return Guide.json_schema(part.value, max_whitespace="free" if blanks is None else blanks)


def _check_tag(kind: str, value: Any) -> None:
    if not isinstance(value, dict):
        _refuse(kind, f"a tag is a JSON object, not {_type_name(value)}")
    check_document(value)
    for part in tag_parts(value):
        try:
            part_guide(part)
        except GuideError as error:
            raise type(error)(kind, error.reason, pointer=part.pointer) from None


def _refuse(kind: str, reason: str) -> NoReturn:
    raise InvalidGuideError(_PARAMS.get(kind, kind), reason)


def _refuse_size(kind: str, size: str) -> NoReturn:
    limits = f"at most {MAX_TEXT_CHARACTERS} characters and {MAX_NESTING} levels are served"
    raise GrammarTooComplexError(_PARAMS.get(kind, kind), f"{size}; {limits}")


def _check_option(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value or len(value) > MAX_OPTION_CHARACTERS:
        raise InvalidGuideError(name, f"a string of 1 to {MAX_OPTION_CHARACTERS} characters")
    if "\0" in value:
        raise InvalidGuideError(name, "contains a NUL character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidGuideError(name, "contains a lone surrogate") from None


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
        _refuse_size(kind, f"{len(text)} characters")
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        _refuse_size(kind, f"nested deeper than {MAX_NESTING} levels")
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
            _refuse_size(kind, f"more than {MAX_TEXT_CHARACTERS} values on one level")
        if not children:
            return
        level = children
    _refuse_size(kind, f"nested deeper than {MAX_NESTING} levels")


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
                _refuse_size(kind, f"groups are nested deeper than {MAX_NESTING} levels")
        elif character == ")":
            depth -= 1
