"""The gate inside of structural tags: JSON between two tags is validated as it is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grammar_host.backends.base import EngineMatcher, NewMatcher
from grammar_host.bitmask import token_row
from grammar_host.gate.closers import Closers, withdraw
from grammar_host.gate.cursor import START, Cursor, Refusal, follow
from grammar_host.gate.rules import Rules
from grammar_host.tokenizer import TokenizerInfo


@dataclass(frozen=True, slots=True)
class _State:
    """Behind some text: its length, the JSON being written if any, and where free text began."""

    length: int = 0
    rules: Rules | None = None
    start: int = 0
    cursor: Cursor = START


class Tags:
    """The schemas behind the tags of one structural tag document. Shared by its generations."""

    def __init__(
        self,
        schemas: Mapping[str, Any],
        closers: Closers,
        special_tokens: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Prepares the rules.

        Args:
            schemas: from the text that begins a tag to the `Schema.document` of the JSON behind it.
            closers: of the vocabulary.
            special_tokens: id → name of the special tokens that the engine takes for their names,
                wherever those may be written: also inside of the JSON.
        """
        self._closers = closers
        self._names = {token: name.encode() for token, name in special_tokens.items()}
        self._rules = {begin.encode(): Rules(document) for begin, document in schemas.items()}
        longest_first = sorted(self._rules, key=len, reverse=True)
        self._begin = re.compile(b"|".join(map(re.escape, longest_first)))
        self._longest = max(map(len, self._rules))
        # A token may begin a tag and finish something behind it, or close the JSON of one tag and
        # go on with the next one.
        last_bytes = {begin[-1:] for begin in self._rules}
        beginning = [
            token
            for token, text in enumerate(closers.vocabulary)
            if any(last in text[:-1] for last in last_bytes)
        ]
        # The closers know special tokens without a text: those few are examined everywhere.
        self._beginning = token_row({*beginning, *special_tokens}, len(closers.vocabulary))

    def written(self, token_id: int) -> bytes:
        """What a token writes."""
        name = self._names.get(token_id)
        return self._closers.vocabulary[token_id] if name is None else name

    def candidates(self, state: _State, text: bytes) -> NDArray[np.int32]:
        """int32 [W], read-only: the tokens that may finish something behind a text."""
        if state.rules is None:
            return self._beginning
        document = text[state.start :]
        return self._beginning | self._closers.candidates(state.cursor, document, state.rules)

    def malforming(self, state: _State) -> NDArray[np.int32]:
        """int32 [W], read-only: as `Closers.malforming`."""
        return self._closers.malforming(START if state.rules is None else state.cursor)

    def follow(self, state: _State, text: bytes) -> _State | Refusal:
        """Moves to the end of a text that begins with what led to `state`.

        Returns:
            The new state, or why the addition must not come here.
        """
        position, rules, start, cursor = state.length, state.rules, state.start, state.cursor
        while True:
            if rules is None:
                begin = self._next_begin(text, start, position)
                if begin is None:
                    return _State(len(text), None, start, START)
                rules, cursor = self._rules[begin[0]], START
                start = position = begin.end()
            document = text[start:]
            moved = follow(cursor, document, position - start, rules)
            if isinstance(moved, Refusal):
                return moved
            if not moved.closed:
                return _State(len(text), rules, start, moved)
            position = start + _closing_offset(cursor, document, position - start, rules)
            rules, start = None, position

    def _next_begin(self, text: bytes, free_from: int, position: int) -> re.Match[bytes] | None:
        """The first tag that is complete only with what was added behind `position`."""
        search_from = max(free_from, position - self._longest + 1)
        while True:
            match = self._begin.search(text, search_from)
            if match is None or match.end() > position:
                return match
            search_from = match.start() + 1


class GatedTagMatcher(EngineMatcher):
    """An engine's matcher that finishes nothing invalid between tags."""

    def __init__(self, engine: EngineMatcher, tags: Tags, stop_token_ids: frozenset[int]) -> None:
        """Wraps an engine's matcher in its initial state.

        Args:
            engine: the matcher of a structural tag that accepts at least the valid texts.
            tags: what the JSON in it must satisfy.
            stop_token_ids: those that `engine` was made with.
        """
        self._engine = engine
        self._tags = tags
        self._stop_token_ids = stop_token_ids
        self._text = b""
        self._history = [_State()]

    def accept_token(self, token_id: int) -> bool:
        data = b"" if token_id in self._stop_token_ids else self._tags.written(token_id)
        state = self._tags.follow(self._history[-1], self._text + data)
        if isinstance(state, Refusal) or not self._engine.accept_token(token_id):
            return False
        self._text += data
        self._history.append(state)
        return True

    def rollback(self, num_tokens: int) -> None:
        self._engine.rollback(num_tokens)
        del self._history[-num_tokens:]
        self._text = self._text[: self._history[-1].length]

    def fill_next_token_bitmask(self, bitmask: NDArray[np.int32], index: int) -> None:
        self._engine.fill_next_token_bitmask(bitmask, index)
        row, state = bitmask[index], self._history[-1]
        row &= ~self._tags.malforming(state)

        def refuses(token_id: int) -> bool:
            if token_id in self._stop_token_ids:
                return False
            text = self._text + self._tags.written(token_id)
            return isinstance(self._tags.follow(state, text), Refusal)

        withdraw(row, self._tags.candidates(state, self._text), refuses)

    def is_terminated(self) -> bool:
        return self._engine.is_terminated()

    def is_completed(self) -> bool:
        return self._engine.is_completed()

    def forced_bytes(self) -> bytes:
        forced = self._engine.forced_bytes()
        outcome = self._tags.follow(self._history[-1], self._text + forced)
        return b"" if isinstance(outcome, Refusal) else forced

    def fork(self) -> GatedTagMatcher:
        copy = GatedTagMatcher(self._engine.fork(), self._tags, self._stop_token_ids)
        copy._text = self._text
        copy._history = list(self._history)
        return copy


def with_tag_gate(
    new_matcher: NewMatcher,
    schemas: Mapping[str, Any],
    tokenizer_info: TokenizerInfo,
    closers: Closers | None = None,
    *,
    special_tokens: Iterable[int] = (),
) -> NewMatcher:
    """Puts a gate in front of every matcher of a structural tag.

    Args:
        new_matcher: of the compiled structural tag.
        schemas: from the text that begins a tag to the `Schema.document` of the JSON behind it.
        tokenizer_info: the vocabulary.
        closers: of the same vocabulary; None makes them.
        special_tokens: those that the engine takes for their names (`named_special_tokens`).
    """
    names = {token: tokenizer_info.special_tokens[token] for token in special_tokens}
    tags = Tags(schemas, closers or Closers(tokenizer_info), names)

    def new_gated_matcher(stop_token_ids: frozenset[int]) -> EngineMatcher:
        return GatedTagMatcher(new_matcher(stop_token_ids), tags, stop_token_ids)

    return new_gated_matcher


def _closing_offset(cursor: Cursor, document: bytes, position: int, rules: Rules) -> int:
    """How many bytes of the text belong to the document that it closes."""
    for end in range(position + 1, len(document)):
        moved = follow(cursor, document[:end], position, rules)
        if isinstance(moved, Cursor) and moved.closed:
            return end
    return len(document)
