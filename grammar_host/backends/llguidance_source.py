"""Guides as the Lark text that LLGuidance compiles, and its complaints as errors of this package."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from grammar_host.backends.gbnf import gbnf_to_lark
from grammar_host.errors import (
    CompileCrashError,
    EmptyLanguageError,
    GrammarTooComplexError,
    GuideError,
    InvalidGuideError,
    UnsupportedGuideError,
    clean_reason,
)
from grammar_host.guide import DEFAULT_MAX_WHITESPACE, Guide
from grammar_host.tokenizer import TokenizerInfo

# LLGuidance would otherwise narrow masks to one tokenization of whatever the grammar forces. That
# needs the model's tokenizer inside the engine, and makes legality depend on more than the text.
_OPTIONS = '%llguidance {"no_forcing": true}'
_HARMLESS_OPTIONS = frozenset({"no_forcing", "allow_initial_skip"})

_BLANK = r"[\x20\x0A\x0D\x09]"

_OPAQUE = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?!/)(?:\\.|[^/\\])+/|(?:\#|//)[^\n]*')
_DIRECTIVE = re.compile(r"%(json|llguidance)\b\s*")
_ATTRIBUTES = re.compile(r"^[ \t]*[!?]*\w[\w-]*[ \t]*\[([^\]]*)\]\s*:", re.MULTILINE)
_REFUSED_ATTRIBUTE = re.compile(r"\b(stop|max_tokens|temperature)\s*=")
_TOKEN_REFERENCE = re.compile(r"<[^<>\s]+>")
_TOKEN_RANGE = re.compile(r"([0-9]+)(?:\s*-\s*([0-9]+))?")


@dataclass(frozen=True)
class Source:
    """What LLGuidance compiles.

    Attributes:
        lark: the grammar.
        special_tokens: the special tokens that it names; None if it refers to no token at all.
    """

    lark: str
    special_tokens: frozenset[int] | None = None


def source_of(guide: Guide, tokenizer_info: TokenizerInfo) -> Source:
    """Writes a guide as Lark.

    Raises:
        GuideError: the guide is malformed, or LLGuidance has no way to enforce it.
    """
    if guide.kind in ("json", "json_schema"):
        return Source(f"start: %json {_schema(guide)}\n{_OPTIONS}")
    if guide.kind == "regex":
        return Source(f"start: {regex_literal(guide.text, guide.param)}\n{_OPTIONS}")
    if guide.kind == "choice":
        # One lexeme: as alternatives of a rule, thousands of choices are over the parser's limit.
        options = " | ".join(map(_quote, guide.document))
        return Source(f"start: CHOICE\nCHOICE: {options}\n{_OPTIONS}")
    if guide.kind == "grammar":
        lark = gbnf_to_lark(guide.text)
        named = _special_tokens(_skeleton(lark), tokenizer_info, guide.param)
        return Source(f"{lark}\n{_OPTIONS}", named)
    if guide.kind == "lark":
        skeleton = _skeleton(guide.text)
        _check_attributes(skeleton)
        lark = _with_json_options(guide.text, skeleton)
        named = _special_tokens(skeleton, tokenizer_info, guide.param)
        # Ours come last: they override, and the lines of the text keep their numbers.
        return Source(f"{lark}\n{_OPTIONS}", named)
    raise UnsupportedGuideError(
        guide.param, f"llguidance does not serve {guide.kind}; use backend='xgrammar'"
    )


def regex_literal(pattern: str, param: str) -> str:
    r"""A regular expression as Lark writes it, `\d` and `\w` meaning ASCII as in JSON Schema."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise InvalidGuideError(param, "the pattern ends in the middle of an escape")
    return f"/{regex_to_lark(pattern, 'dw')}/" if pattern else '""'


def more_than_blanks(pattern: str) -> str:
    """A grammar of everything that `pattern` matches, but blanks."""
    literal = regex_literal(_blank_pattern(pattern), "whitespace_pattern")
    return f"start: OTHER\nOTHER: {literal} & ~/{_BLANK}*/\n{_OPTIONS}"


def _blank_pattern(pattern: str) -> str:
    r"""The pattern with `\s` as JSON means it, without Unicode's blanks."""
    return re.sub(r"\\(.)", lambda match: _BLANK if match[1] == "s" else match[0], pattern)


def _schema(guide: Guide) -> str:
    schema = guide.document if guide.kind == "json_schema" else {"type": "object"}
    if schema is True:
        schema = {}
    _check_integers(schema)
    # Takes the place of the caller's own, who could switch enforcement off with it. LLGuidance
    # looks for it at the root only.
    options = {"x-guidance": _json_options(guide.max_whitespace, guide.whitespace_pattern)}
    return json.dumps(schema | options, ensure_ascii=False)


def _json_options(max_whitespace: int | str | None, pattern: str | None) -> dict[str, Any]:
    # A model may write any character of a free string as an escape.
    options: dict[str, Any] = {"json_allow_general_unicode_escapes": True}
    if pattern is not None:
        return options | {"whitespace_pattern": _blank_pattern(pattern)}
    if max_whitespace == 0:
        return options | {"whitespace_flexible": False}
    bound = "" if max_whitespace == "free" else max_whitespace
    return options | {"whitespace_pattern": f"{_BLANK}{{1,{bound}}}"}


def _check_integers(node: Any) -> None:
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            _check_integers(item)
    elif isinstance(node, int) and not -(2**63) <= node < 2**64:
        # LLGuidance 1.9.1 rounds them, and would enforce another number.
        raise UnsupportedGuideError("schema", f"llguidance reads 64 bits of integers, not {node}")


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _skeleton(lark: str) -> str:
    """The grammar with strings, regular expressions and comments blanked out, same positions."""
    return _OPAQUE.sub(lambda match: " " * len(match[0]), lark)


def _check_attributes(skeleton: str) -> None:
    for attributes in _ATTRIBUTES.finditer(skeleton):
        refused = _REFUSED_ATTRIBUTE.search(attributes[1])
        if refused:
            line = skeleton.count("\n", 0, attributes.end()) + 1
            raise UnsupportedGuideError(
                "lark", f"line {line}: {refused[1]}= cannot be undone; use suffix= or a pattern"
            )


def _with_json_options(lark: str, skeleton: str) -> str:
    """Bounds the blanks of every `%json`, as all JSON here has them, and checks `%llguidance`."""
    pieces, copied = [], 0
    for directive in _DIRECTIVE.finditer(skeleton):
        try:
            value, _ = json.JSONDecoder().raw_decode(lark, directive.end())
        except (ValueError, RecursionError):
            continue  # the engine says what is wrong with it
        if not isinstance(value, dict):
            continue
        if directive[1] == "llguidance":
            _check_options(value)
        elif "x-guidance" not in value:
            options = json.dumps({"x-guidance": _json_options(DEFAULT_MAX_WHITESPACE, None)})
            start = directive.end() + 1
            pieces += [lark[copied:start], options[1:-1], ", " if value else ""]
            copied = start
    return "".join(pieces) + lark[copied:]


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = options.keys() - _HARMLESS_OPTIONS
    if unknown:
        # Unknown ones are ignored by the engine, and invalid UTF-8 would reach the caller.
        raise UnsupportedGuideError("lark", f"the option {min(unknown)} of %llguidance")


def _special_tokens(
    skeleton: str, tokenizer_info: TokenizerInfo, param: str
) -> frozenset[int] | None:
    """The special tokens that a grammar names: `<name>`, `<[5]>`, `<[5-7,9]>`; not `<[*]>`."""
    ids = {name: token for token, name in tokenizer_info.special_tokens.items()}
    references = _TOKEN_REFERENCE.findall(skeleton)
    named: set[int] = set()
    for reference in references:
        if reference in ids:
            named.add(ids[reference])
        elif not reference.startswith("<["):
            raise InvalidGuideError(param, f"the tokenizer has no special token {reference}")
        else:
            for low, high in _TOKEN_RANGE.findall(reference):
                bounds = range(int(low), int(high or low) + 1)
                if bounds.stop > tokenizer_info.vocab_size:
                    raise InvalidGuideError(param, f"{reference} is outside of the vocabulary")
                named.update(token for token in ids.values() if token in bounds)
    return frozenset(named) if references else None


# --- Errors ----------------------------------------------------------------------------------

_EXCERPT = re.compile(r"\n *[0-9]+ \| .*", re.DOTALL)
_NOISE = re.compile(
    r"failed to compile JSON schema: "
    r'|invalid regex "(?:\\.|[^"\\])*" \(in \w+\): '
    r"|(?<=regex parse error: ).*error: "
    r"| in regex /.*/"
    r"|\. Enable 'coerce_one_of' .*"
    r"|<non-verbose/>"
    r"|<(?:state|backtrace)>.*",
    re.DOTALL,
)
_PLACE = re.compile(r"^(?:at )?([0-9]+)\([0-9]+\): ")
_TOO_COMPLEX = re.compile(
    "[Tt]oo (?:big|large|many|deeply|long)|exceed|fuel|max is|[Uu]nable to determine"
)
_UNSUPPORTED = re.compile(
    "not support|only support|[Uu]nsupported|Unimplemented|Unknown format|not disjoint"
    "|not present in a registry|too many digits"
)


def is_dead_end(message: str) -> bool:
    """Whether an engine's error only says that no token of the vocabulary continues the text."""
    return message.startswith("NoExtensionBias")


def is_panic(message: str) -> bool:
    """Whether the engine ran into a bug of its own; it catches Rust's panics."""
    return message.startswith("panic: ")


def is_limit(message: str) -> bool:
    """Whether an engine's error says that a limit on costs was reached."""
    return not is_panic(message) and _TOO_COMPLEX.search(message) is not None


def reason_of(guide: Guide, message: str) -> str:
    """An engine's message in one line, without excerpts of the guide."""
    message = _EXCERPT.sub("", message).replace("regex parse error:\n", "regex parse error: ")
    message = _NOISE.sub("", message)
    place = "line \\1: " if guide.kind == "lark" else ""
    return clean_reason(_PLACE.sub(place, message))


def guide_error(guide: Guide, message: str, param: str | None = None) -> GuideError:
    """The error that an engine's message means.

    Args:
        guide: what was compiled.
        message: the engine's, several lines long.
        param: the field to blame; None is the guide's own.
    """
    reason = reason_of(guide, message)
    kind: type[GuideError] = InvalidGuideError
    if is_panic(message):
        kind = CompileCrashError
    elif "Unsatisfiable schema" in reason:
        kind = EmptyLanguageError
    elif _UNSUPPORTED.search(reason):
        kind = UnsupportedGuideError
    elif is_limit(reason):
        kind = GrammarTooComplexError
    return kind(param or guide.param, reason)
