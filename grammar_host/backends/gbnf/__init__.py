"""GBNF rewritten as LLGuidance's Lark, with the same language."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from grammar_host.backends.gbnf.lark import write_lark
from grammar_host.backends.gbnf.nodes import (
    EMPTY_TEXT,
    Chars,
    Choice,
    Node,
    Repeat,
    Rule,
    Sequence,
    least_set,
)
from grammar_host.backends.gbnf.parser import PARAM, ROOT, parse_gbnf
from grammar_host.errors import EmptyLanguageError


def gbnf_to_lark(text: str) -> str:
    """Rewrites a grammar; the rule `root` becomes `start`.

    Raises:
        GuideError: as `parse_gbnf`.
        EmptyLanguageError: the root derives no finite text.
    """
    rules = parse_gbnf(text)
    productive = least_set(rules, _is_productive)
    if ROOT not in productive:
        reason = "no finite text satisfies it; check for rules that require themselves"
        raise EmptyLanguageError(PARAM, reason)
    # An alternative that never ends would only lead the model astray.
    rules = {name: _prune(rules[name], productive) for name in rules if name in productive}
    return write_lark({name: _without_recursion(name, body) for name, body in rules.items()}, ROOT)


def _is_productive(node: Node, rules: AbstractSet[str]) -> bool:
    """Whether the node derives a finite text, given the rules that do."""
    if isinstance(node, Rule):
        return node.name in rules
    if isinstance(node, Chars):
        return bool(node.ranges)
    if isinstance(node, Sequence):
        return all(_is_productive(part, rules) for part in node.parts)
    if isinstance(node, Choice):
        return any(_is_productive(option, rules) for option in node.options)
    if isinstance(node, Repeat):
        return node.low == 0 or _is_productive(node.part, rules)
    return True


def _prune(node: Node, productive: AbstractSet[str]) -> Node:
    """The node without the options that derive nothing; the node itself must derive something."""
    if isinstance(node, Sequence):
        return Sequence(tuple(_prune(part, productive) for part in node.parts))
    if isinstance(node, Choice):
        options = (option for option in node.options if _is_productive(option, productive))
        return Choice(tuple(_prune(option, productive) for option in options))
    if isinstance(node, Repeat):
        if not _is_productive(node.part, productive):
            return EMPTY_TEXT
        return Repeat(_prune(node.part, productive), node.low, node.high)
    return node


def _without_recursion(name: str, body: Node) -> Node:
    """Arden's lemma: A = x A | y is x* y, and A = A x | y is y x*, whatever x and y are."""
    this = Rule(name)
    options = [_parts(option) for option in _options(body) if option != this]
    for end, rest in ((-1, slice(0, -1)), (0, slice(1, None))):
        again = [parts[rest] for parts in options if parts and parts[end] == this]
        last = [parts for parts in options if not parts or parts[end] != this]
        if not again or not last:
            continue
        loop = Repeat(Choice(tuple(map(Sequence, again))), 0, None)
        exits = Choice(tuple(map(Sequence, last)))
        return Sequence((loop, exits) if end == -1 else (exits, loop))
    return body


def _options(node: Node) -> Iterator[Node]:
    if isinstance(node, Choice):
        for option in node.options:
            yield from _options(option)
    elif isinstance(node, Repeat) and (node.low, node.high) == (0, 1):
        yield from _options(node.part)
        yield EMPTY_TEXT
    else:
        yield node


def _parts(node: Node) -> tuple[Node, ...]:
    return node.parts if isinstance(node, Sequence) else (node,)
