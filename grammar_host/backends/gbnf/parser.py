"""Reads GBNF, the EBNF of llama.cpp and XGrammar."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NoReturn

from grammar_host.backends.gbnf.nodes import (
    ANY_CHARACTER,
    LAST,
    SURROGATES,
    Chars,
    Choice,
    Node,
    Repeat,
    Rule,
    Sequence,
    Special,
    complement,
    references,
    union,
)
from grammar_host.errors import GrammarTooComplexError, InvalidGuideError, UnsupportedGuideError

PARAM = "grammar"
ROOT = "root"


def parse_gbnf(text: str) -> dict[str, Node]:
    """Reads a grammar: the right-hand side of every rule, in the order of the text.

    Args:
        text: as llama.cpp or XGrammar write it. `Token(5, 6)`, `<[5]>` and `<name>` stand for
            tokens.

    Raises:
        InvalidGuideError: malformed, or a rule is missing; the message has the line.
        UnsupportedGuideError: other references to tokens, look-ahead, tag dispatch.
        GrammarTooComplexError: a repetition over the limit.
    """
    rules = _Parser(text).rules()
    for body in rules.values():
        for name in references(body):
            if name not in rules:
                raise InvalidGuideError(PARAM, f'rule "{name}" is not defined')
    if ROOT not in rules:
        raise InvalidGuideError(PARAM, f'the rule "{ROOT}" is missing')
    return rules


_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|\#[^\r\n]*)
    |(?P<define>::=)
    |(?P<tokens>(?:Token|ExcludeToken|TagDispatch|TokenTagDispatch)\s*\([^)]*\)?)
    |(?P<name>[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)
    |(?P<string>"(?:\\.|[^"\\\r\n])*")
    |(?P<chars>\[(?:\\.|[^\]\\\r\n])*\])
    |(?P<count>\{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\})
    |(?P<special>!?<[^<>\s]+>)
    |(?P<lookahead>\(=)
    |(?P<mark>[()|*+?.])
    |(?P<error>.)""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\?.", re.DOTALL)
_ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "e": 27, "0": 0}
_ESCAPES |= {character: ord(character) for character in "\"'\\[]-^"}
_REPEATS: Mapping[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_MAX_COUNT = 100_000


class _Parser:
    """Recursive descent; the guide has bounded the nesting of parentheses."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [match for match in _TOKEN.finditer(text) if match.lastgroup != "blank"]
        self._position = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._position < len(self._tokens):
            name = self._peek()
            if not self._at_definition():
                self._fail("a rule is expected, as in `name ::= ...`")
            if name in rules:
                self._fail(f'rule "{name}" is defined twice')
            self._position += 2
            rules[name] = self._choice()
            if self._position < len(self._tokens) and not self._at_definition():
                self._fail(f"unexpected {self._peek()!r}")
        return rules

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._peek() == "|":
            self._position += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while (part := self._item()) is not None:
            parts.append(self._repeated(part))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _item(self) -> Node | None:
        kind, token = self._kind(), self._peek()
        if kind in ("end", "define") or token in ("|", ")") or self._at_definition():
            return None
        if token == "(":
            return self._group()
        node = self._leaf(kind, token)
        self._position += 1
        return node

    def _leaf(self, kind: str, token: str) -> Node:
        if kind == "name":
            return Rule(token)
        if kind == "string":
            codes = [code for code, _ in self._characters(token[1:-1])]
            return Sequence(tuple(Chars(((code, code),)) for code in codes))
        if kind == "chars":
            return self._class(token[1:-1])
        if token == ".":
            return ANY_CHARACTER
        if kind == "special" and not token.startswith("!"):
            return Special(token)
        if token.startswith("Token") and re.fullmatch(
            r"Token\s*\([0-9,\s]*[0-9][0-9,\s]*\)", token
        ):
            return Special(f"<[{','.join(re.findall('[0-9]+', token))}]>")
        if kind in ("special", "tokens", "lookahead"):
            where = f"line {self._line()}: {token.split('(')[0] or token}"
            raise UnsupportedGuideError(
                PARAM, f"{where} has no counterpart; use backend='xgrammar'"
            )
        unclosed = {'"': "a string", "[": "a character class"}.get(token)
        self._fail(f"{unclosed} is not closed" if unclosed else f"unexpected {token!r}")

    def _group(self) -> Node:
        self._position += 1
        node = self._choice()
        if self._peek() != ")":
            self._fail("a parenthesis is not closed")
        self._position += 1
        return node

    def _repeated(self, part: Node) -> Node:
        kind, token = self._kind(), self._peek()
        if token in _REPEATS:
            low, high = _REPEATS[token]
        elif kind == "count":
            counts = re.findall("[0-9]+", token)
            low = int(counts[0])
            high = None if token.rstrip("} \t\r\n").endswith(",") else int(counts[-1])
            if high is not None and high < low:
                self._fail(f"{token} has its bounds in the wrong order")
            if max(low, high or 0) > _MAX_COUNT:
                reason = f"line {self._line()}: {token} repeats more than {_MAX_COUNT} times"
                raise GrammarTooComplexError(PARAM, reason)
        else:
            return part
        self._position += 1
        return Repeat(part, low, high)

    def _class(self, content: str) -> Chars:
        items = list(self._characters(content))
        negated = bool(items) and items[0] == (ord("^"), False)
        ranges, index = [], int(negated)
        while index < len(items):
            low = high = items[index][0]
            if index + 2 < len(items) and items[index + 1] == (ord("-"), False):
                high = items[index + 2][0]
                index += 2
            if high < low:
                self._fail(f"the range {chr(low)}-{chr(high)} is in the wrong order")
            ranges.append((low, high))
            index += 1
        return complement(ranges) if negated else union(ranges)

    def _characters(self, content: str) -> Iterator[tuple[int, bool]]:
        """The code points of a string or class, and whether each was written with a backslash."""
        for match in _CHARACTER.finditer(content):
            text = match[0]
            if text[0] != "\\":
                code = ord(text)
            elif len(text) > 2:
                code = int(text[2:], 16)
            elif text[1:] in _ESCAPES:
                code = _ESCAPES[text[1:]]
            else:
                self._fail(f"unknown escape {text}")
            if code > LAST or code in SURROGATES:
                self._fail(f"{text} is no character")
            yield code, text[0] == "\\"

    def _kind(self) -> str:
        if self._position >= len(self._tokens):
            return "end"
        return str(self._tokens[self._position].lastgroup)

    def _peek(self) -> str:
        return "" if self._kind() == "end" else self._tokens[self._position][0]

    def _at_definition(self) -> bool:
        following = self._tokens[self._position + 1 : self._position + 2]
        return self._kind() == "name" and bool(following) and following[0].lastgroup == "define"

    def _line(self) -> int:
        at = len(self._text)
        if self._position < len(self._tokens):
            at = self._tokens[self._position].start()
        return self._text.count("\n", 0, at) + 1

    def _fail(self, reason: str) -> NoReturn:
        raise InvalidGuideError(PARAM, f"line {self._line()}: {reason}")
