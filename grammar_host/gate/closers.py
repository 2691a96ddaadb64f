"""Which tokens can finish a part of a JSON document, and so have to be examined."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from grammar_host.bitmask import token_row
from grammar_host.gate.cursor import MAX_NESTING, Cursor, Frame, keys_left, nodes_of_value
from grammar_host.gate.rules import Rules
from grammar_host.tokenizer import TokenizerInfo

MAX_CLOSINGS = 4
"""Tokens that close more containers than this are examined wherever one of them matters."""

MAX_OPENINGS = 32
"""Containers that one token may open."""

MANY = MAX_NESTING
"""More containers than any token closes."""

_INTERESTING = re.compile(rb'["{\[}\],: \t\n\r]')
_STRING_END = re.compile(rb'(?:[^"\\]|\\[\s\S])*"')
_SCALAR = re.compile(rb'[^ \t\n\r,:"{}\[\]]+')
_KEY_DUE = re.compile(rb"[,{][ \t\n\r]*\Z")
_BEHIND_VALUE = re.compile(rb"[ \t\n\r,:]+\Z")


def closings(text: bytes) -> int:
    """How many containers a text outside of strings closes.

    `MANY` if it finishes a value or begins a key that it made room for itself, which must be looked
    at in any case.
    """
    closed = opened = position = 0
    while position < len(text):
        byte = text[position : position + 1]
        position += 1
        if byte == b'"':
            if _STRING_END.match(text, position) or _KEY_DUE.search(text, 0, position - 1):
                return MANY
            break
        if byte in b"{[":
            opened += 1
        elif byte in b"}]":
            if opened:
                return MANY
            closed += 1
        elif byte not in b" \t\n\r,:":
            scalar = _SCALAR.match(text, position - 1)
            assert scalar is not None
            position = scalar.end()
            if position < len(text):
                return MANY
    return closed


class Closers:
    """Rows of the tokens that have to be examined, by the state of a text. Shared by all gates."""

    def __init__(self, tokenizer_info: TokenizerInfo) -> None:
        """Looks through the vocabulary."""
        vocabulary = tokenizer_info.vocabulary
        texts = {t: text for t, text in enumerate(vocabulary) if _INTERESTING.search(text)}
        strings = {token: _STRING_END.match(text) for token, text in texts.items()}
        ends = {token: match.end() for token, match in strings.items() if match}
        outside = {token: closings(text) for token, text in texts.items()}
        inside = {token: closings(texts[token][end:]) for token, end in ends.items()}

        def rows(closed: dict[int, int]) -> list[NDArray[np.int32]]:
            counts = range(MAX_CLOSINGS + 2)
            return [row(t for t, count in closed.items() if count >= least) for least in counts]

        def row(tokens: Iterable[int]) -> NDArray[np.int32]:
            return token_row(list(tokens), len(vocabulary))

        self.vocabulary = vocabulary
        self._row = row
        self._none = row(())
        self._outside = rows(outside)
        self._inside = rows(inside)
        self._string_ends = row(ends)
        self._quotes = row(token for token, text in texts.items() if b'"' in text)
        self._delimiters = row(texts)
        self._all = row(token for token, text in enumerate(vocabulary) if text)
        first = sorted((text[:1], token) for token, text in enumerate(vocabulary) if text)
        self._beginning = {
            byte: row(token for _, token in tokens)
            for byte, tokens in groupby(first, itemgetter(0))
        }
        self._openers = row(t for t, text in texts.items() if b"{" in text or b"[" in text)
        self._endings: dict[bytes, list[int]] = {}
        for token, end in ends.items():
            self._endings.setdefault(texts[token][:end], []).append(token)
        self._essences = {
            in_string: {token: _essence(text, in_string) for token, text in texts.items()}
            for in_string in (False, True)
        }

    def essence(self, token_id: int, cursor: Cursor) -> bytes:
        """The text of a token without what behind a finished part makes no difference."""
        essences = self._essences[cursor.string_start >= 0]
        return essences.get(token_id, self.vocabulary[token_id])

    def candidates(self, cursor: Cursor, text: bytes, rules: Rules) -> NDArray[np.int32]:
        """int32 [W], read-only: the tokens that may have to be refused behind a text."""
        frame = cursor.frame
        if cursor.escaped:
            return self._quotes
        least = 1 if frame is None else min(frame.closings, MAX_CLOSINGS + 1)
        left = None if frame is None else keys_left(frame, b'"', rules)
        if cursor.string_start >= 0:
            if cursor.in_key and left is not None:
                return self._all
            row = self._inside[least] | self._endings_row(cursor, text, rules)
            if left == []:
                row = row | self._string_ends  # and a comma behind it
        else:
            row = self._outside[least]
            key_matters = left is not None and (cursor.in_key or not left)
            if key_matters or (cursor.scalar_start >= 0 and _looks_at_value(frame, rules)):
                row = row | self._delimiters
        if frame is not None and frame.depth + MAX_OPENINGS >= MAX_NESTING:
            row = row | self._openers
        return row

    def key_row(self, cursor: Cursor, text: bytes, rules: Rules) -> NDArray[np.int32] | None:
        """int32 [W]: the tokens whose first byte may continue the key being written; None: any."""
        frame = cursor.frame
        if frame is None or cursor.string_start < 0 or cursor.escaped or not cursor.in_key:
            return None
        begun = text[cursor.string_start :]
        left = keys_left(frame, begun, rules)
        if left is None:
            return None
        firsts = {b"\\", *(key[len(begun) : len(begun) + 1] for key in left)}
        return np.bitwise_or.reduce([self._beginning.get(first, self._none) for first in firsts])

    def _endings_row(self, cursor: Cursor, text: bytes, rules: Rules) -> NDArray[np.int32]:
        """The tokens with an end of the string being written that has to be examined."""
        frame = cursor.frame
        if cursor.in_key:
            assert frame is not None
            nodes = rules.name(frame.nodes)
        else:
            nodes = nodes_of_value(frame, rules)
        if rules.matters(nodes):
            return self._string_ends
        if frame is None or not frame.seen or not (cursor.in_key or frame.is_set):
            return self._none
        begun = text[cursor.string_start :]
        endings = [seen[len(begun) :] for seen in frame.seen if seen.startswith(begun)]
        repeating = [token for ending in endings for token in self._endings.get(ending, ())]
        return self._row(repeating) if repeating else self._none


def _essence(text: bytes, in_string: bool) -> bytes:
    behind = _BEHIND_VALUE.search(text)
    if behind is None or _ends_in_string(text, in_string):
        return text
    stripped = text[: behind.start()]
    if b"," in behind[0]:
        return stripped + b","
    # Behind a number the first blank ends it.
    return stripped if stripped[-1:] in (b'"', b"}", b"]") else stripped + b" "


def _ends_in_string(text: bytes, in_string: bool) -> bool:
    position = 0
    while True:
        if not in_string:
            position = text.find(b'"', position) + 1
            if not position:
                return False
        end = _STRING_END.match(text, position)
        if end is None:
            return True
        position, in_string = end.end(), False


def withdraw(
    row: NDArray[np.int32], candidates: NDArray[np.int32], refuses: Callable[[int], bool]
) -> None:
    """Takes the tokens out of a mask row (int32 [W]) that are candidates and refused."""
    legal = row & candidates
    for word in np.flatnonzero(legal):
        bits = int(legal[word]) & 0xFFFF_FFFF
        kept = int(row[word]) & 0xFFFF_FFFF
        while bits:
            lowest = bits & -bits
            bits ^= lowest
            if refuses(32 * int(word) + lowest.bit_length() - 1):
                kept ^= lowest
        row[word] = kept - (1 << 32) if kept >> 31 else kept


def _looks_at_value(frame: Frame | None, rules: Rules) -> bool:
    is_set = frame is not None and frame.is_set
    return is_set or rules.matters(nodes_of_value(frame, rules))
