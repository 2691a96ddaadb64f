"""Writes a grammar about characters for a parser that has a lexer.

LLGuidance cuts the text into lexemes, each as long as possible, before it parses them. Rule by
rule, `root ::= word "b" | "(" root ")"`, `word ::= [a-z]*` would become another language: the
lexeme `[a-z]*` swallows the "b". So

- a regular grammar becomes a single lexeme;
- any other one has its strings, classes and regular rules for lexemes. They are cut in the right
  places if none of them begins with another one and a character that may follow that; those that
  do are split into their parts, in the end into characters. That is exact, but it costs speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from grammar_host.backends.gbnf.nodes import (
    EMPTY_TEXT,
    Chars,
    Choice,
    Lexeme,
    Node,
    Repeat,
    Rule,
    Sequence,
    Special,
    children,
    least_set,
    union,
)

MAX_LEXEMES = 1000
"""With more of them, the check of where they are cut would take too long."""

MAX_SPLIT_LEXEMES = 100
"""With more of them, splitting those that are cut in the wrong places would take too long."""

MAX_ROUNDS = 8
"""How often lexemes are split before each character becomes one."""


def write_lark(rules: Mapping[str, Node], root: str) -> str:
    """Writes rules, of which `root` becomes `start`."""
    regular = least_set(rules, _is_regular)
    terminal_names = {name: f"R{index}" for index, name in enumerate(rules)}
    terminals = [
        f"{terminal_names[name]}: {_expression(body, terminal_names)}"
        for name, body in rules.items()
        if name in regular
    ]
    if root in regular:
        return "\n".join([f"start: {terminal_names[root]}", *terminals])
    split: set[Node] = set()
    for _ in range(MAX_ROUNDS):
        cut = _CutRules(rules, regular, split)
        if len(cut.lexemes) > MAX_LEXEMES:
            break
        definitions = [*cut.definitions(terminal_names), *terminals]
        if cut.is_right(definitions):
            return _write_rules(cut.rules, root, definitions)
        if len(cut.lexemes) > MAX_SPLIT_LEXEMES:
            break
        split |= cut.wrong(definitions)
    return _write_rules(rules, root, [])


def _write_rules(rules: Mapping[str, Node], root: str, terminals: Iterable[str]) -> str:
    names = {name: f"r{index}" for index, name in enumerate(rules)} | {root: "start"}
    bodies = [f"{names[name]}: {_expression(body, names)}" for name, body in rules.items()]
    return "\n".join([*bodies, *terminals])


class _CutRules:
    """The rules that are not regular, cut into lexemes.

    Attributes:
        rules: those rules. Their leaves are lexemes, tokens, and rules of their own kind.
        lexemes: regular node → the lexeme of its texts, but for the empty one.
    """

    def __init__(
        self, rules: Mapping[str, Node], regular: AbstractSet[str], split: AbstractSet[Node]
    ) -> None:
        """Cuts the rules.

        Args:
            rules: all rules.
            regular: the names of the regular ones.
            split: regular nodes that must not be lexemes.
        """
        self._all_rules = rules
        self._regular = regular
        self._split = split
        self._nullable = least_set(rules, _is_nullable)
        self._first_of_rules: dict[str, Chars] = {}
        self.lexemes: dict[Node, Lexeme] = {}
        self.rules = {name: self._cut(body) for name, body in rules.items() if name not in regular}

    def definitions(self, names: Mapping[str, str]) -> Iterator[str]:
        """Defines the lexemes, none of which is empty."""
        for node, lexeme in self.lexemes.items():
            text = _expression(node, names)
            # Only where necessary, because it costs speed.
            text = f"({text}) & /(?s:.+)/" if self._is_nullable(node) else text
            yield f"T{lexeme.index}: {text}"

    def is_right(self, definitions: Iterable[str]) -> bool:
        """Whether no lexeme begins with another one and a character that may follow that.

        Args:
            definitions: of the lexemes, and of what they refer to.
        """
        every = " | ".join(f"T{lexeme.index}" for lexeme in self.lexemes.values())
        return not self._overruns or self._derives_nothing(f"OVERRUN & ({every})", definitions)

    def wrong(self, definitions: Iterable[str]) -> set[Node]:
        """The lexemes that do."""
        return {
            node
            for node, lexeme in self.lexemes.items()
            if not self._derives_nothing(f"OVERRUN & T{lexeme.index}", definitions)
        }

    def _derives_nothing(self, terminal: str, definitions: Iterable[str]) -> bool:
        overrun = " | ".join(self._overruns)
        lark = ["start: X", f"X: {terminal}", f"OVERRUN: {overrun}", *definitions]
        engine = LLMatcher(_bytes_tokenizer(), "\n".join(lark), log_level=0)
        engine.compute_bitmask()
        return bool(engine.get_error().startswith("NoExtensionBias"))

    @cached_property
    def _overruns(self) -> list[str]:
        """Each lexeme, a character that may follow it, and anything, as Lark writes it."""
        nodes = list(self.lexemes)
        overruns = []
        for index, followers in enumerate(self._followers()):
            first = union(chain.from_iterable(self._first(nodes[i]).ranges for i in followers))
            if first.ranges:
                overruns.append(f"T{index} {_expression(first, {})} /(?s:.*)/")
        return overruns

    def _cut(self, node: Node) -> Node:
        is_text = isinstance(node, Sequence) and all(isinstance(p, Chars) for p in node.parts)
        regular = _is_regular(node, self._regular)
        if regular and node not in self._split and (is_text or not isinstance(node, Sequence)):
            return self._lexeme(node)
        if regular and isinstance(node, Rule):
            return self._cut(self._all_rules[node.name])
        if isinstance(node, Sequence):
            return Sequence(tuple(map(self._cut, node.parts)))
        if isinstance(node, Choice):
            return Choice(tuple(map(self._cut, node.options)))
        if isinstance(node, Repeat):
            return Repeat(self._cut(node.part), node.low, node.high)
        return node

    def _lexeme(self, node: Node) -> Node:
        if not self._first(node).ranges:
            return EMPTY_TEXT
        lexeme = self.lexemes.setdefault(node, Lexeme(len(self.lexemes)))
        return Choice((EMPTY_TEXT, lexeme)) if self._is_nullable(node) else lexeme

    def _is_nullable(self, node: Node) -> bool:
        return _is_nullable(node, self._nullable)

    def _first(self, node: Node) -> Chars:
        """The characters that the texts of a regular node begin with."""
        if isinstance(node, Chars):
            return node
        if isinstance(node, Rule):
            if node.name not in self._first_of_rules:
                self._first_of_rules[node.name] = self._first(self._all_rules[node.name])
            return self._first_of_rules[node.name]
        ranges: list[tuple[int, int]] = []
        for child in children(node):
            ranges += self._first(child).ranges
            if isinstance(node, Sequence) and not self._is_nullable(child):
                break
        return union(ranges)

    def _followers(self) -> list[set[int]]:
        """For each lexeme those that may come next: the textbooks' FIRST and FOLLOW."""
        first: dict[str, set[int]] = {name: set() for name in self.rules}
        behind: dict[str, set[int]] = {name: set() for name in self.rules}
        followers: list[set[int]] = [set() for _ in self.lexemes]

        def begin(node: Node) -> set[int]:
            if isinstance(node, Lexeme):
                return {node.index}
            if isinstance(node, Rule):
                return first[node.name]
            found: set[int] = set()
            for child in children(node):
                found |= begin(child)
                if isinstance(node, Sequence) and not self._is_nullable(child):
                    break
            return found

        def spread(node: Node, after: set[int]) -> None:
            if isinstance(node, Lexeme):
                followers[node.index] |= after
            elif isinstance(node, Rule):
                behind[node.name] |= after
            elif isinstance(node, Repeat):
                spread(node.part, after if node.high == 1 else after | begin(node.part))
            elif isinstance(node, Choice):
                for option in node.options:
                    spread(option, after)
            elif isinstance(node, Sequence):
                for part in reversed(node.parts):
                    spread(part, after)
                    after = begin(part) | (after if self._is_nullable(part) else set())

        found = -1
        while found < (known := sum(map(len, chain(first.values(), behind.values(), followers)))):
            found = known
            for name, body in self.rules.items():
                first[name] |= begin(body)
                spread(body, behind[name])
        return followers


def _is_regular(node: Node, rules: AbstractSet[str]) -> bool:
    """Whether the node is a regular expression over characters, given the rules that are."""
    if isinstance(node, Special):
        return False
    if isinstance(node, Rule):
        return node.name in rules
    return all(_is_regular(child, rules) for child in children(node))


def _is_nullable(node: Node, rules: AbstractSet[str]) -> bool:
    """Whether the node derives the empty text, given the rules that do."""
    if isinstance(node, Rule):
        return node.name in rules
    if isinstance(node, Sequence):
        return all(_is_nullable(part, rules) for part in node.parts)
    if isinstance(node, Choice):
        return any(_is_nullable(option, rules) for option in node.options)
    return isinstance(node, Repeat) and (node.low == 0 or _is_nullable(node.part, rules))


def _expression(node: Node, names: Mapping[str, str]) -> str:
    if isinstance(node, Rule):
        return names[node.name]
    if isinstance(node, Special):
        return node.text
    if isinstance(node, Lexeme):
        return f"T{node.index}"
    if isinstance(node, Chars):
        ranges = (f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in node.ranges)
        return f"/[{''.join(ranges)}]/"
    if isinstance(node, Repeat):
        high = "" if node.high is None else node.high
        return f"({_expression(node.part, names)}){{{node.low},{high}}}"
    if isinstance(node, Choice):
        return "(" + " | ".join(_expression(option, names) for option in node.options) + ")"
    return " ".join(_expression(part, names) for part in node.parts) or '""'


@lru_cache(maxsize=1)
def _bytes_tokenizer() -> Any:
    return LLTokenizer("byte")
