"""The right-hand sides of a grammar's rules, as trees."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

LAST = 0x10FFFF
"""The last code point."""

SURROGATES = range(0xD800, 0xE000)
"""The code points that UTF-8 cannot write."""


@dataclass(frozen=True)
class Chars:
    """One character out of sorted, disjoint, inclusive ranges of code points; none if empty."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Sequence:
    """The parts, one after the other; the empty text if there are none."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """One of the options; nothing at all if there are none."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """The part, `low` to `high` times; None is no bound."""

    part: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class Rule:
    """Whatever the rule of this name derives."""

    name: str


@dataclass(frozen=True)
class Special:
    """One token, in Lark's notation: `<[5,6]>` or `<name>`."""

    text: str


@dataclass(frozen=True)
class Lexeme:
    """A regular part of a grammar that is taken as a whole."""

    index: int


Node = Chars | Sequence | Choice | Repeat | Rule | Special | Lexeme
EMPTY_TEXT = Sequence(())
ANY_CHARACTER = Chars(((0, SURROGATES[0] - 1), (SURROGATES[-1] + 1, LAST)))


def children(node: Node) -> tuple[Node, ...]:
    """The nodes directly below; none below a reference to a rule."""
    if isinstance(node, Sequence):
        return node.parts
    if isinstance(node, Choice):
        return node.options
    return (node.part,) if isinstance(node, Repeat) else ()


def references(node: Node) -> Iterator[str]:
    """The names of the rules that a node refers to."""
    if isinstance(node, Rule):
        yield node.name
    for child in children(node):
        yield from references(child)


def least_set(
    rules: Mapping[str, Node], holds: Callable[[Node, AbstractSet[str]], bool]
) -> set[str]:
    """The least set of rules such that `holds(body, set)` for each, by a worklist."""
    users = defaultdict(list)
    for name, body in rules.items():
        for used in set(references(body)):
            users[used].append(name)
    found: set[str] = set()
    queue = deque(rules)
    while queue:
        name = queue.popleft()
        if name not in found and holds(rules[name], found):
            found.add(name)
            queue.extend(users[name])
    return found


def union(ranges: Iterable[tuple[int, int]]) -> Chars:
    """The characters in any of the ranges."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return Chars(tuple(merged))


def complement(ranges: Iterable[tuple[int, int]]) -> Chars:
    """The characters in none of the ranges."""
    # UTF-8 cannot write surrogates, so their range is excluded like any other.
    gaps, start = [], 0
    for low, high in union([*ranges, (SURROGATES[0], SURROGATES[-1])]).ranges:
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    return Chars(tuple([*gaps, (start, LAST)] if start <= LAST else gaps))
