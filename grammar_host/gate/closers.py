"""Which tokens can finish a part of a JSON document, and so have to be examined."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from grammar_host.bitmask import token_row
from grammar_host.gate.cursor import MAX_NESTING, Cursor, Frame, keys_left, nodes_of_value
from grammar_host.gate.effects import (
    RESTRICTING,
    Effects,
    essence,
    is_malformed,
    string_end,
    writes_malformed,
)
from grammar_host.gate.rules import Rules
from grammar_host.tokenizer import TokenizerInfo

MAX_CLOSINGS = 4
"""Tokens that close more containers than this are examined wherever one of them matters."""

MAX_OPENINGS = 32
"""Containers that one token may open."""

_INTERESTING = re.compile(rb'["{\[}\],: \t\n\r]')

_Row = NDArray[np.int32]


class Closers:
    """Rows of the tokens that have to be examined, by the state of a text. Shared by all gates.

    Attributes:
        vocabulary: V entries, the bytes of each token.
    """

    def __init__(self, tokenizer_info: TokenizerInfo) -> None:
        """Looks through the vocabulary."""
        self.vocabulary = tokenizer_info.vocabulary
        texts = {t: text for t, text in enumerate(self.vocabulary) if _INTERESTING.search(text)}
        ends = {token: string_end(text) for token, text in texts.items() if string_end(text) >= 0}
        self._inside = {token: Effects.of(texts[token][end:]) for token, end in ends.items()}
        outside = {token: Effects.of(text) for token, text in texts.items()}
        self._closing_outside = self._rows_by_closings(outside)
        self._closing_inside = self._rows_by_closings(self._inside)
        self._keys_outside = self._row(t for t, does in outside.items() if does.touches_keys)
        self._keys_inside = self._row(t for t, does in self._inside.items() if does.touches_keys)
        self._ending = self._row(ends)
        self._quotes = self._row(token for token, text in texts.items() if b'"' in text)
        self._openers = self._row(t for t, text in texts.items() if b"{" in text or b"[" in text)
        self._commas = self._row(token for token, text in texts.items() if b"," in text)
        self._delimiters = self._row(texts)
        suspects = {t: text for t, text in enumerate(self.vocabulary) if is_malformed(text)}
        self._malformed = self._row(suspects)
        malforming = {t for t, text in suspects.items() if is_malformed(text, 0, ends.get(t))}
        self._malforming = self._row(malforming)
        self._malformed_inside, self._malformed_outside = (
            self._row(t for t, text in tokens if writes_malformed(text, in_string=inside))
            for inside, tokens in (
                (True, [item for item in suspects.items() if item[0] not in malforming]),
                (False, suspects.items()),
            )
        )
        self._continuing = self._row(
            token for token, text in enumerate(self.vocabulary) if b"\x80" <= text[:1] <= b"\xbf"
        )
        self._all = self._row(token for token, text in enumerate(self.vocabulary) if text)
        self._none = self._row(())
        first = sorted((text[:1], token) for token, text in enumerate(self.vocabulary) if text)
        self._beginning = {
            byte: self._row(token for _, token in tokens)
            for byte, tokens in groupby(first, itemgetter(0))
        }
        self._endings: dict[bytes, list[int]] = {}
        for token, end in ends.items():
            self._endings.setdefault(texts[token][:end], []).append(token)
        self._essences = {
            in_string: {token: essence(text, in_string=in_string) for token, text in texts.items()}
            for in_string in (False, True)
        }
        self._parts = {
            token: (texts[token][: end - 1], essence(texts[token][end - 1 :], in_string=True))
            for token, end in ends.items()
        }

    def essence(self, token_id: int, cursor: Cursor) -> bytes:
        """The text of a token without what behind a finished part makes no difference."""
        if cursor.escaped:  # a quote would end nothing
            return self.vocabulary[token_id]
        essences = self._essences[cursor.string_start >= 0]
        return essences.get(token_id, self.vocabulary[token_id])

    def parts(self, token_id: int, cursor: Cursor) -> tuple[bytes, bytes] | None:
        """What a token adds to the string being written, and what it does from its end on.

        None if it does not end the string, or if what it does depends on what the string is.
        """
        does = self._inside.get(token_id)
        if does is None or (cursor.frame is not None and does.closings >= cursor.frame.closings):
            return None
        return self._parts[token_id]

    def candidates(self, cursor: Cursor, text: bytes, rules: Rules) -> _Row:
        """int32 [W], read-only: the tokens that may have to be refused behind a text.

        Without those that are `malforming` there.
        """
        if cursor.escaped:
            return self._quotes | self._malformed
        frame = cursor.frame
        least = 1 if frame is None else min(frame.closings, MAX_CLOSINGS + 1)
        left = None if frame is None else keys_left(frame, b'"', rules)
        if cursor.string_start >= 0:
            if cursor.in_key and left is not None:
                return self._all
            row = self._closing_inside[least] | self._endings_row(cursor, text, rules)
            row = row | self._malformed_inside
            if text[-1:] in RESTRICTING:
                row = row | self._continuing
            if left == []:
                row = row | self._ending  # and a comma behind it
            keys = self._keys_inside
        else:
            row = self._closing_outside[least] | self._malformed_outside
            keys = self._keys_outside
            if left is not None and cursor.in_key:
                row = row | self._quotes
            elif left == []:
                row = row | self._commas
            if cursor.scalar_start >= 0 and _looks_at_value(frame, rules):
                row = row | self._delimiters
        if rules.limit_keys:
            row = row | keys
        if frame is not None and frame.depth + MAX_OPENINGS >= MAX_NESTING:
            row = row | self._openers
        return row

    def malforming(self, cursor: Cursor) -> _Row:
        """int32 [W], read-only: the tokens that make the string being written no JSON.

        But not those that only do so together with what was written before.
        """
        return self._malforming if cursor.string_start >= 0 and not cursor.escaped else self._none

    def key_row(self, suffixes: Iterable[bytes]) -> _Row:
        """int32 [W]: the tokens whose first byte may continue a key, given its possible rests."""
        # Escapes are not followed.
        firsts = {b"\\", *(suffix[:1] for suffix in suffixes)}
        row: _Row = np.bitwise_or.reduce(
            [self._beginning.get(first, self._none) for first in firsts]
        )
        return row

    def _endings_row(self, cursor: Cursor, text: bytes, rules: Rules) -> _Row:
        """The tokens with an end of the string being written that has to be examined."""
        frame = cursor.frame
        if cursor.in_key:
            assert frame is not None
            nodes = rules.name(frame.nodes)
        else:
            nodes = nodes_of_value(frame, rules)
        if rules.matters(nodes):
            return self._ending
        if frame is None or not frame.seen or not (cursor.in_key or frame.is_set):
            return self._none
        begun = text[cursor.string_start :]
        endings = [seen[len(begun) :] for seen in frame.seen if seen.startswith(begun)]
        repeating = [token for ending in endings for token in self._endings.get(ending, ())]
        return self._row(repeating) if repeating else self._none

    def _rows_by_closings(self, effects: Mapping[int, Effects]) -> list[_Row]:
        """Row k: the tokens that close k containers or more, or complete a value of their own."""
        return [
            self._row(t for t, does in effects.items() if does.completes or does.closings >= least)
            for least in range(MAX_CLOSINGS + 2)
        ]

    def _row(self, tokens: Iterable[int]) -> _Row:
        return token_row(list(tokens), len(self.vocabulary))


def withdraw(row: _Row, candidates: _Row, refuses: Callable[[int], bool]) -> None:
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
