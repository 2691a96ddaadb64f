"""An engine's matcher that finishes nothing invalid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grammar_host.backends.base import EngineMatcher, NewMatcher
from grammar_host.bitmask import token_row
from grammar_host.gate.closers import Closers, withdraw
from grammar_host.gate.cursor import (
    NO_STRING,
    START,
    Cursor,
    Frame,
    Refusal,
    follow,
    keys_left,
    nodes_of_value,
)
from grammar_host.gate.effects import is_malformed
from grammar_host.gate.rules import Rules
from grammar_host.tokenizer import TokenizerInfo


class GatedMatcher(EngineMatcher):
    """An engine's matcher whose finished objects, arrays and documents are all valid."""

    def __init__(
        self,
        engine: EngineMatcher,
        rules: Rules,
        closers: Closers,
        stop_token_ids: frozenset[int],
    ) -> None:
        """Wraps an engine's matcher in its initial state.

        Args:
            engine: the matcher of a grammar that accepts at least the valid documents.
            rules: of the schema as the caller wrote it.
            closers: of the engine's vocabulary.
            stop_token_ids: those that `engine` was made with.
        """
        self._engine = engine
        self._rules = rules
        self._closers = closers
        self._stop_token_ids = stop_token_ids
        self._text_row = ~token_row(stop_token_ids, len(closers.vocabulary))
        self._text = b""
        self._history: list[tuple[int, Cursor]] = [(0, START)]
        self._judged: tuple[bytes, bool] = (b"", False)
        self._refusal: Refusal | None = None
        self._string: tuple[int, Frame | None] | None = None
        self._tails: dict[bytes, bool] = {}

    def accept_token(self, token_id: int) -> bool:
        data = b""
        cursor: Cursor | Refusal = self._cursor
        if token_id in self._stop_token_ids:
            if not self.is_completed():
                return False
        else:
            data = self._closers.vocabulary[token_id]
            cursor = self._follow(data)
        if isinstance(cursor, Refusal) or not self._engine.accept_token(token_id):
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
        self._refusal = None
        row = bitmask[index]
        cursor = self._cursor
        if cursor.frame is None and self._engine.is_completed() and not self._is_valid():
            row &= self._text_row
            self._refusal = Refusal(self._rules.root, self._text)
        if cursor.closed:
            return
        malforms = bool(np.any(row & self._closers.malforming(cursor)))
        row &= ~self._closers.malforming(cursor)
        suffixes = self._key_suffixes(cursor)
        if suffixes is None:
            refuses = self._refuses(cursor)
        else:
            row &= self._closers.key_row(suffixes)
            refuses = self._refuses_in_key(cursor, suffixes)
        withdraw(row, self._closers.candidates(cursor, self._text, self._rules), refuses)
        if malforms and self._refusal is None:
            self._refusal = Refusal((), b"", NO_STRING)

    def is_terminated(self) -> bool:
        return self._engine.is_terminated()

    def is_completed(self) -> bool:
        return self._engine.is_completed() and self._is_valid()

    def forced_bytes(self) -> bytes:
        forced = self._engine.forced_bytes()
        return b"" if isinstance(self._follow(forced), Refusal) else forced

    def explain_dead_end(self) -> tuple[str, str | None] | None:
        refusal = self._refusal
        if refusal is None:
            return None
        if refusal.reason:
            pointer = self._rules.closed_at(refusal.nodes)
            return f"every way to go on would {refusal.reason}", pointer
        found = self._rules.violation(refusal.nodes, refusal.part)
        if found is None:
            return None
        keyword, pointer = found
        return f"every way to go on would violate {keyword!r}", pointer

    def fork(self) -> GatedMatcher:
        copy = GatedMatcher(self._engine.fork(), self._rules, self._closers, self._stop_token_ids)
        copy._text = self._text
        copy._history = list(self._history)
        return copy

    def _refuses(self, cursor: Cursor) -> Callable[[int], bool]:
        """Whether a token must not come next; asks once for what makes no difference."""
        closers, verdicts, strings = self._closers, dict[bytes, bool](), dict[bytes, bool]()
        tails = self._tails_in(cursor)
        nodes = nodes_of_value(cursor.frame, self._rules)

        def refuses(token_id: int) -> bool:
            if token_id in self._stop_token_ids:
                return False
            parts = None if tails is None else closers.parts(token_id, cursor)
            if tails is None or parts is None:
                data = closers.essence(token_id, cursor)
                if data not in verdicts:
                    verdicts[data] = self._is_refused(self._follow(data))
                return verdicts[data]
            end, tail = parts
            if end not in strings:
                written = self._text[cursor.string_start :] + end + b'"'
                if is_malformed(written, len(written) - len(end) - 1, len(written) - 1):
                    strings[end] = self._is_refused(Refusal((), written, NO_STRING))
                else:
                    valid = not self._rules.matters(nodes) or self._rules.permit(nodes, written)
                    strings[end] = not valid and self._is_refused(Refusal(nodes, written))
            if tail not in tails:
                text = self._text + tail
                behind = Cursor(cursor.frame, closed=cursor.frame is None)
                outcome = follow(behind, text, len(self._text) + 1, self._rules)
                tails[tail] = self._is_refused(outcome)
            return strings[end] or tails[tail]

        return refuses

    def _refuses_in_key(self, cursor: Cursor, suffixes: list[bytes]) -> Callable[[int], bool]:
        """The same where the key being written is known to go on in one of a few ways."""
        otherwise = self._refuses(cursor)
        beginnings = {suffix[:size] for suffix in suffixes for size in range(1, len(suffix))}

        def refuses(token_id: int) -> bool:
            text = self._closers.vocabulary[token_id]
            if b'"' in text or b"\\" in text:
                return otherwise(token_id)
            return text not in beginnings and token_id not in self._stop_token_ids

        return refuses

    def _is_refused(self, outcome: Cursor | Refusal) -> bool:
        if isinstance(outcome, Refusal):
            self._refusal = self._refusal or outcome
            return True
        return False

    def _key_suffixes(self, cursor: Cursor) -> list[bytes] | None:
        """How the key being written may go on, where the object's keys are known."""
        frame = cursor.frame
        if frame is None or cursor.string_start < 0 or cursor.escaped or not cursor.in_key:
            return None
        begun = self._text[cursor.string_start :]
        left = keys_left(frame, begun, self._rules)
        return None if left is None else [key[len(begun) :] for key in left]

    def _tails_in(self, cursor: Cursor) -> dict[bytes, bool] | None:
        """What is refused behind the string being written, whatever it says; None for keys."""
        frame = cursor.frame
        if cursor.string_start < 0 or cursor.escaped or cursor.in_key:
            return None
        if frame is not None and frame.is_set:
            return None
        if self._string is None or (cursor.string_start, frame) != self._string:
            self._string, self._tails = (cursor.string_start, frame), {}
        return self._tails

    @property
    def _cursor(self) -> Cursor:
        return self._history[-1][1]

    def _follow(self, data: bytes) -> Cursor | Refusal:
        return follow(self._cursor, self._text + data, len(self._text), self._rules)

    def _is_valid(self) -> bool:
        """Whether the whole text is valid, by the whole schema."""
        text, verdict = self._judged
        if text != self._text:
            verdict = self._rules.permit(self._rules.root, self._text)
            self._judged = self._text, verdict
        return verdict


def with_gate(
    new_matcher: NewMatcher, document: Any, tokenizer_info: TokenizerInfo, closers: Closers
) -> NewMatcher:
    """Puts a gate in front of every matcher that `new_matcher` makes.

    Args:
        new_matcher: of a compiled guide.
        document: of `Rules`.
        tokenizer_info: the vocabulary.
        closers: of the same vocabulary.
    """
    rules = Rules(document)

    def new_gated_matcher(stop_token_ids: frozenset[int]) -> EngineMatcher:
        return GatedMatcher(new_matcher(stop_token_ids), rules, closers, stop_token_ids)

    return new_gated_matcher
