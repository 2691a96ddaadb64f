"""An engine's matcher that finishes nothing invalid."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from grammar_host.backends.base import EngineMatcher, NewMatcher
from grammar_host.bitmask import token_row
from grammar_host.gate.closers import Closers, begins_key, closes_container
from grammar_host.gate.cursor import (
    START,
    Cursor,
    follow,
    keys_left,
    nodes_of_value,
    writes_key,
)
from grammar_host.gate.rules import RecordingRules, Rules
from grammar_host.tokenizer import TokenizerInfo


class GatedMatcher(EngineMatcher):
    """An engine's matcher whose finished objects, arrays and documents are all valid."""

    def __init__(
        self,
        engine: EngineMatcher,
        rules: Rules,
        vocabulary: tuple[bytes, ...],
        closers: Closers,
        stop_token_ids: frozenset[int],
    ) -> None:
        """Wraps an engine's matcher in its initial state.

        Args:
            engine: the matcher of a grammar that accepts at least the valid documents.
            rules: of the schema as the caller wrote it.
            vocabulary: V entries, the bytes of each token.
            closers: of the same vocabulary.
            stop_token_ids: those that `engine` was made with.
        """
        self._engine = engine
        self._rules = rules
        self._vocabulary = vocabulary
        self._closers = closers
        self._stop_token_ids = stop_token_ids
        self._text_row = ~token_row(stop_token_ids, len(vocabulary))
        self._text = b""
        self._history: list[tuple[int, Cursor]] = [(0, START)]
        self._refused: bytes | None = None

    def accept_token(self, token_id: int) -> bool:
        data = b""
        cursor: Cursor | None = self._cursor
        if token_id in self._stop_token_ids:
            if not self.is_completed():
                return False
        else:
            data = self._vocabulary[token_id]
            cursor = self._follow(data)
        if cursor is None or not self._engine.accept_token(token_id):
            return False
        self._text += data
        self._history.append((len(self._text), cursor))
        return True

    def rollback(self, num_tokens: int) -> None:
        self._engine.rollback(num_tokens)
        del self._history[-num_tokens:]
        self._text = self._text[: self._history[-1][0]]

    def fill_next_token_bitmask(self, bitmask: NDArray[np.int32], index: int) -> None:
        self._engine.fill_next_token_bitmask(bitmask, index)
        row = bitmask[index]
        cursor = self._cursor
        if cursor.frame is None and self._engine.is_completed() and not self._is_valid():
            row &= self._text_row
        if cursor.closed:
            return
        left = None if cursor.frame is None else keys_left(cursor.frame, b"", self._rules)
        repeats: set[bytes] | None = None
        if left is not None and writes_key(cursor):
            row &= self._key_row(cursor)
            candidates = row
        else:
            if writes_key(cursor):
                repeats = self._key_endings(cursor)
            candidates = row & self._closers.row(
                cursor,
                string_matters=self._string_matters(cursor),
                keys_left=None if left is None else len(left),
            )
        for word in np.flatnonzero(candidates):
            bits = int(candidates[word]) & 0xFFFF_FFFF
            kept = int(row[word]) & 0xFFFF_FFFF
            while bits:
                lowest = bits & -bits
                bits ^= lowest
                data = self._vocabulary[32 * int(word) + lowest.bit_length() - 1]
                if (
                    repeats is not None
                    and data.partition(b'"')[0] not in repeats
                    and not closes_container(data, in_string=True)
                    and not begins_key(data)
                ):
                    continue  # a new key, and nothing behind it to be validated
                if self._follow(data) is None:
                    kept ^= lowest
            row[word] = kept - (1 << 32) if kept >> 31 else kept

    def is_terminated(self) -> bool:
        return self._engine.is_terminated()

    def is_completed(self) -> bool:
        return self._engine.is_completed() and self._is_valid()

    def forced_bytes(self) -> bytes:
        forced = self._engine.forced_bytes()
        return b"" if self._follow(forced) is None else forced

    def explain_dead_end(self) -> tuple[str, str | None] | None:
        if self._refused is None:
            return None
        rules = RecordingRules(self._rules)
        follow(START, self._refused, 0, rules)
        if rules.refused is None:
            return "every way to go on would repeat a key, or write one that is not allowed", None
        found = self._rules.violation(*rules.refused)
        if found is None:
            return None
        keyword, pointer = found
        return f"every way to go on would violate {keyword!r}", pointer

    def fork(self) -> GatedMatcher:
        copy = GatedMatcher(
            self._engine.fork(), self._rules, self._vocabulary, self._closers, self._stop_token_ids
        )
        copy._text = self._text
        copy._history = list(self._history)
        return copy

    @property
    def _cursor(self) -> Cursor:
        return self._history[-1][1]

    def _follow(self, data: bytes) -> Cursor | None:
        text = self._text + data
        cursor = follow(self._cursor, text, len(self._text), self._rules)
        if cursor is None:
            self._refused = text
        return cursor

    def _string_matters(self, cursor: Cursor) -> bool:
        if cursor.string_start < 0:
            return False
        if writes_key(cursor):
            return bool(self._key_endings(cursor))
        return self._rules.rules_strings(nodes_of_value(cursor.frame, self._rules))

    def _key_row(self, cursor: Cursor) -> NDArray[np.int32]:
        """int32 [W]: the tokens whose first byte may continue a key that is still to come."""
        assert cursor.frame is not None
        begun = self._text[cursor.string_start + 1 :]
        firsts = {b"\\"}  # escapes are not followed
        if b"\\" in begun:
            return np.full_like(self._text_row, -1)
        for name in keys_left(cursor.frame, begun, self._rules) or ():
            firsts.add(name[len(begun) : len(begun) + 1] or b'"')
        return np.bitwise_or.reduce([self._closers.beginning_with(first) for first in firsts])

    def _key_endings(self, cursor: Cursor) -> set[bytes]:
        """What would make the key being written one that the object already has."""
        assert cursor.frame is not None
        begun = self._text[cursor.string_start + 1 :]
        return {key[len(begun) :] for key in cursor.frame.keys if key.startswith(begun)}

    def _is_valid(self) -> bool:
        # Containers and strings were validated when they were closed; a bare number was not.
        return self._rules.permit(self._rules.root, self._text)


def with_gate(
    new_matcher: NewMatcher,
    document: Any,
    tokenizer_info: TokenizerInfo,
    closers: Closers,
) -> NewMatcher:
    """Puts a gate in front of every matcher that `new_matcher` makes.

    Args:
        new_matcher: of a compiled guide.
        document: a `Schema.document`.
        tokenizer_info: the vocabulary.
        closers: of the same vocabulary.
    """
    rules = Rules(document)

    def new_gated_matcher(stop_token_ids: frozenset[int]) -> EngineMatcher:
        engine = new_matcher(stop_token_ids)
        return GatedMatcher(engine, rules, tokenizer_info.vocabulary, closers, stop_token_ids)

    return new_gated_matcher
