"""Decides whether a context-free grammar, as XGrammar writes it out, derives any text at all.

A rule is *productive* if some alternative of it consists of productive parts only; the language is
empty exactly if the root is not productive. The least fixpoint is computed with a worklist, the
textbook algorithm for context-free grammars (Hopcroft, Motwani, Ullman, §7.1.1). XGrammar itself
accepts such grammars (`root ::= "a" root`, or a JSON Schema that requires itself), and lets the
model write until it runs out of tokens.
"""

from __future__ import annotations

import json
from collections import deque

KNOWN_VERSION = "v18"
"""The serialisation that this module reads; a grammar in any other is taken to be satisfiable."""

# Kinds of expressions in that serialisation. Kinds not listed are productive whatever they hold
# (plain bytes, starred classes, the empty text, sets of tokens, free text between tags).
_CHARACTER_CLASS = 1
_RULE_REFERENCE = 4
_SEQUENCE = 5
_CHOICES = 6
_REPEAT = 8

_SURROGATES = range(0xD800, 0xE000)
_LAST_CODE_POINT = 0x10FFFF


class _Expressions:
    """The flat expression table: from `starts[i]` on, `data` holds kind, length, operand..."""

    def __init__(self, data: list[int], starts: list[int]) -> None:
        self._table = [
            (data[start], data[start + 2 : start + 2 + data[start + 1]]) for start in starts
        ]

    def references(self, root: int) -> set[int]:
        """The rules that an expression refers to."""
        found = set()
        stack = [root]
        while stack:
            kind, operands = self._table[stack.pop()]
            if kind in (_SEQUENCE, _CHOICES):
                stack.extend(operands)
            elif kind in (_RULE_REFERENCE, _REPEAT):
                found.add(operands[0])
        return found

    def is_productive(self, index: int, rules: set[int]) -> bool:
        """Whether the expression derives a text, given the rules known to derive one."""
        kind, operands = self._table[index]
        if kind == _SEQUENCE:
            return all(self.is_productive(part, rules) for part in operands)
        if kind == _CHOICES:
            return any(self.is_productive(part, rules) for part in operands)
        if kind == _RULE_REFERENCE:
            return operands[0] in rules
        if kind == _REPEAT:
            return operands[1] == 0 or operands[0] in rules
        if kind == _CHARACTER_CLASS:
            return _class_has_characters(operands[0] != 0, operands[1:])
        return True


def _class_has_characters(negated: bool, bounds: list[int]) -> bool:
    ranges = sorted(zip(bounds[::2], bounds[1::2], strict=True))
    if not negated:
        return any(low <= high for low, high in ranges)
    # A gap in the excluded ranges is a character, unless UTF-8 cannot write it.
    ranges = sorted([(-1, -1), *ranges, (_SURROGATES[0], _SURROGATES[-1])])
    ranges.append((_LAST_CODE_POINT + 1, _LAST_CODE_POINT + 1))
    reach = -1
    for low, high in ranges:
        if low > reach + 1:
            return True
        reach = max(reach, high)
    return False


def derives_nothing(serialized_grammar: str) -> bool:
    """Whether no text at all belongs to the grammar.

    Args:
        serialized_grammar: what `xgrammar.Grammar.serialize_json()` returns.
    """
    grammar = json.loads(serialized_grammar)
    if grammar["__VERSION__"] != KNOWN_VERSION:
        return False
    expressions = _Expressions(grammar["grammar_expr_data"], grammar["grammar_expr_indptr"])
    bodies = [rule[1] for rule in grammar["rules"]]
    users: list[list[int]] = [[] for _ in bodies]
    for rule, body in enumerate(bodies):
        for used in expressions.references(body):
            users[used].append(rule)
    productive: set[int] = set()
    queue = deque(range(len(bodies)))
    while queue:
        rule = queue.popleft()
        if rule not in productive and expressions.is_productive(bodies[rule], productive):
            productive.add(rule)
            queue.extend(users[rule])
    return grammar["root_rule_id"] not in productive
