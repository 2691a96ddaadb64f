"""Outlines (https://github.com/dottxt-ai/outlines-core): regular languages, precomputed.

The method of Willard and Louf (arXiv:2307.09702): a regular expression becomes a finite automaton
over bytes, and for each of its states the legal tokens and the states that they lead to are
computed before the generation starts. A mask is then a copied row, whatever the expression; the
price is that compile time and memory grow with states × vocabulary.

Serves `regex`, `choice`, and of `json_schema` what `outlines_schema` lists.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from outlines_core import Index, Vocabulary

from grammar_host.backends.base import Backend, CompiledGuide, EngineMatcher
from grammar_host.backends.outlines_regex import SENTINEL, checked_regex, literal, whole_text
from grammar_host.backends.outlines_schema import schema_regex
from grammar_host.bitmask import bitmask_words, token_row
from grammar_host.errors import (
    EmptyLanguageError,
    GrammarTooComplexError,
    GuideError,
    InvalidGuideError,
    UnsupportedGuideError,
)
from grammar_host.forced import MAX_FORCED_BYTES
from grammar_host.guide import Guide
from grammar_host.tokenizer import TokenizerInfo

MAX_WORK = 150_000_000
"""States times tokens that are worth precomputing: a few seconds, and some hundred megabytes if most
tokens are legal in most states."""

ROW_CACHE_BYTES = 4_000_000
"""Mask rows that one grammar keeps, the first ones first to go. Making one takes 1 to 2 ms."""

_INSTEAD = {
    "json": "nests to any depth, which no regular expression can; use llguidance or xgrammar",
    "grammar": "outlines has no grammars; use xgrammar or llguidance",
    "lark": "outlines has no grammars; use llguidance or xgrammar",
    "structural_tag": "outlines has no structural tags; use xgrammar",
}
_NOTHING = "no text at all matches it"
_PARTLY_NOTHING = "a part of it can match nothing; leave that part out"
_FAILURES: Mapping[str, tuple[type[GuideError], str]] = {
    "error building NFA": (
        InvalidGuideError,
        "not valid in the syntax of Rust's regex crate; look for unpaired brackets, repetitions "
        "of nothing, unknown escapes, and braces that are not escaped",
    ),
    "unsupported regex feature": (
        UnsupportedGuideError,
        "outlines cannot make an automaton of it; leave assertions out",
    ),
}

_BYTES = Vocabulary(257, {bytes([byte]): [byte] for byte in range(256)})
"""Every byte as a token of its own."""


class OutlinesBackend(Backend):
    """Compiles regular languages with outlines_core.

    Special and stop tokens have no bytes and so are no text in any grammar. The end is not left to
    the library, which knows a single stop token: its automaton only has the tokens that write
    text, and a stop token is legal exactly in its final states.
    """

    name = "outlines"

    def __init__(self, tokenizer_info: TokenizerInfo) -> None:
        self._vocab_size = tokenizer_info.vocab_size
        # Both ids are beyond those that a matcher is ever given.
        self._sentinel = self._vocab_size
        tokens: dict[bytes, list[int]] = {SENTINEL: [self._sentinel]}
        for token, text in enumerate(tokenizer_info.vocabulary):
            if text:
                tokens.setdefault(text, []).append(token)
        self._num_tokens = len(tokens)
        self._vocabulary = Vocabulary(self._vocab_size + 1, tokens)
        self._written = frozenset(t for t, text in enumerate(tokenizer_info.vocabulary) if text)

    def compile(self, guide: Guide) -> CompiledGuide:
        if guide.kind in _INSTEAD:
            raise UnsupportedGuideError(guide.param, _INSTEAD[guide.kind])
        pattern = _pattern(guide)
        graph = _Bytes(pattern, guide.param)
        if graph.num_states * self._num_tokens > MAX_WORK:
            raise GrammarTooComplexError(
                guide.param,
                f"its automaton has {graph.num_states} states, too many to precompute "
                f"{self._num_tokens} tokens in each; shorten repetitions, or use llguidance",
            )
        try:
            index = Index(whole_text(pattern), self._vocabulary)
        except ValueError:
            # Only the vocabulary is new, so there is a state that no token leads out of.
            raise UnsupportedGuideError(
                guide.param, "the vocabulary has no token for a part of it"
            ) from None
        automaton = _Automaton(index, self._sentinel, self._vocab_size, graph)

        def new_matcher(stop_token_ids: frozenset[int]) -> EngineMatcher:
            written = stop_token_ids & self._written
            return OutlinesMatcher(
                automaton,
                stop_token_ids,
                token_row(stop_token_ids, self._vocab_size),
                ~token_row(written, self._vocab_size) if written else None,
            )

        return CompiledGuide(new_matcher, automaton.memory_bytes)


class _Bytes:
    """The automaton over single bytes: small, and made before the one over the vocabulary.

    States have the same numbers in both, because the library makes the same automaton of the same
    expression each time.
    """

    def __init__(self, pattern: str, param: str) -> None:
        """Makes the automaton.

        Raises:
            GuideError: it cannot be made, or something in it leads nowhere.
        """
        try:
            index = Index(whole_text(pattern), _BYTES)
        except ValueError as error:
            raise _failure(str(error), pattern, param) from None
        self._start = index.get_initial_state()
        self._finals = index.get_final_states()
        self._successors: dict[int, dict[int, int]] = {
            state: {byte: target for byte, target in edges.items() if byte < 256}
            for state, edges in index.get_transitions().items()
        }
        alive = self._alive()
        if self._start not in alive:
            raise EmptyLanguageError(param, _NOTHING)
        if len(alive) < len(self._successors):
            raise UnsupportedGuideError(param, _PARTLY_NOTHING)

    @property
    def num_states(self) -> int:
        """How many states a text can lead to."""
        return len(self._successors)

    @property
    def alphabet(self) -> set[int]:
        """The bytes that occur in texts."""
        return {
            b for state, edges in self._successors.items() if state != self._start for b in edges
        }

    def forced(self) -> dict[int, tuple[int, int]]:
        """State → the only byte that may follow and the state behind it, where there is one."""
        return {
            state: next(iter(edges.items()))
            for state, edges in self._successors.items()
            if len(edges) == 1 and state not in self._finals
        }

    def _alive(self) -> set[int]:
        """The states from which the end can be reached."""
        sources: dict[int, set[int]] = {}
        for state, edges in self._successors.items():
            for target in set(edges.values()):
                sources.setdefault(target, set()).add(state)
        alive = set(self._finals)
        queue = list(alive)
        while queue:
            new = sources.get(queue.pop(), set()) - alive
            alive |= new
            queue.extend(new)
        return alive


class _Automaton:
    """The automaton over the vocabulary, shared by all generations of a grammar. Thread-safe."""

    def __init__(self, index: Any, sentinel: int, vocab_size: int, graph: _Bytes) -> None:
        self.next_state = index.get_next_state
        self.is_final = index.is_final_state
        self.start: int = index.get_next_state(index.get_initial_state(), sentinel)
        self._index = index
        self._vocab_size = vocab_size
        self._num_states = graph.num_states
        self._forced = graph.forced()
        self._row_bytes = 4 * bitmask_words(vocab_size)
        self._rows: dict[int, NDArray[np.int32]] = {}
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """Approximate size, with the rows that may be kept.

        The library does not tell. Its pickle holds a token and a state in three bytes each; its
        hash tables hold them in eight, and are half full.
        """
        rows = min(self._num_states * self._row_bytes, ROW_CACHE_BYTES)
        return 3 * len(pickle.dumps(self._index)) + rows

    def row(self, state: int) -> NDArray[np.int32]:
        """int32 [W], not to be changed: the tokens that write text and are legal in a state."""
        row = self._rows.get(state)
        if row is None:
            row = self._make_row(state)
            with self._lock:
                while self._rows and (len(self._rows) + 1) * self._row_bytes > ROW_CACHE_BYTES:
                    del self._rows[next(iter(self._rows))]
                self._rows[state] = row
        return row

    def forced_bytes(self, state: int) -> bytes:
        """The bytes that every continuation from a state begins with."""
        forced = bytearray()
        while state in self._forced and len(forced) < MAX_FORCED_BYTES:
            byte, state = self._forced[state]
            forced.append(byte)
        return bytes(forced)

    def _make_row(self, state: int) -> NDArray[np.int32]:
        tokens = np.array(self._index.get_allowed_tokens(state) or (), dtype=np.int32)
        bits = np.zeros(8 * self._row_bytes, dtype=np.bool_)
        bits[tokens[tokens < self._vocab_size]] = True
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


class OutlinesMatcher(EngineMatcher):
    """One generation: the states of the automaton after each token."""

    def __init__(
        self,
        automaton: _Automaton,
        stop_token_ids: frozenset[int],
        stop_row: NDArray[np.int32],
        text_row: NDArray[np.int32] | None,
        states: list[int] | None = None,
        terminated: bool = False,
    ) -> None:
        """Begins a generation, or goes on with one.

        Args:
            automaton: of the grammar.
            stop_token_ids: those in force.
            stop_row: int32 [W], their bits.
            text_row: int32 [W], every bit 1 but those of stop tokens that have bytes, which
                would else count as text; None if there is no such stop token.
            states: before the first and after each token of text; None: at the beginning.
            terminated: whether a stop token follows them.
        """
        self._automaton = automaton
        self._stop_token_ids = stop_token_ids
        self._stop_row = stop_row
        self._text_row = text_row
        self._states = [automaton.start] if states is None else states
        self._terminated = terminated

    def accept_token(self, token_id: int) -> bool:
        state = self._states[-1]
        if token_id in self._stop_token_ids:
            self._terminated = self._automaton.is_final(state)
            return self._terminated
        state = self._automaton.next_state(state, token_id)
        if state is None:
            return False
        self._states.append(state)
        return True

    def rollback(self, num_tokens: int) -> None:
        if self._terminated and num_tokens:
            self._terminated = False
            num_tokens -= 1
        del self._states[len(self._states) - num_tokens :]

    def fill_next_token_bitmask(self, bitmask: NDArray[np.int32], index: int) -> None:
        state = self._states[-1]
        row = bitmask[index]
        row[:] = self._automaton.row(state)
        if self._text_row is not None:
            row &= self._text_row
        if self._automaton.is_final(state):
            row |= self._stop_row

    def is_terminated(self) -> bool:
        return self._terminated

    def is_completed(self) -> bool:
        return self._terminated or bool(self._automaton.is_final(self._states[-1]))

    def forced_bytes(self) -> bytes:
        return self._automaton.forced_bytes(self._states[-1])

    def fork(self) -> OutlinesMatcher:
        return OutlinesMatcher(
            self._automaton,
            self._stop_token_ids,
            self._stop_row,
            self._text_row,
            list(self._states),
            self._terminated,
        )


def _pattern(guide: Guide) -> str:
    """The guide as a regular expression whose classes do not match the sentinel."""
    if guide.kind == "regex":
        return checked_regex(guide.text, guide.param)
    if guide.kind == "choice":
        return "|".join(literal(choice) for choice in guide.document)
    if guide.whitespace_pattern is not None:
        blanks = checked_regex(guide.whitespace_pattern, "whitespace_pattern")
        if _Bytes(blanks, "whitespace_pattern").alphabet - {*b" \t\n\r"}:
            raise InvalidGuideError("whitespace_pattern", "matches more than JSON's blanks")
        return schema_regex(guide.document, f"(?:{blanks})")
    bound = "*" if guide.max_whitespace == "free" else f"{{0,{guide.max_whitespace}}}"
    blanks = "" if guide.max_whitespace == 0 else rf"[ \t\n\r]{bound}"
    return schema_regex(guide.document, blanks)


def _failure(message: str, pattern: str, param: str) -> GuideError:
    for part, (kind, reason) in _FAILURES.items():
        if part in message:
            return kind(param, reason)
    if "no transitions" not in message:
        return GrammarTooComplexError(param, "outlines failed to make an automaton of it")
    if _matches_nothing(pattern):
        return EmptyLanguageError(param, _NOTHING)
    return UnsupportedGuideError(param, _PARTLY_NOTHING)


def _matches_nothing(pattern: str) -> bool:
    """Whether no text matches; for an automaton that the library refuses because it gets stuck.

    Beside the expression, anything may come in front of a last character that cannot be written:
    then nothing gets stuck, and whatever final state there is, is the expression's own.
    """
    unstuck = rf"(?:{pattern})|[^\x{{10FFFF}}]*\x{{10FFFF}}"
    without = Vocabulary(257, {bytes([byte]): [byte] for byte in range(256) if byte != 0xF4})
    return not Index(whole_text(unstuck), without).get_final_states()
