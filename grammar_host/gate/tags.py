"""The gate inside of structural tags: JSON between two tags is validated as it is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grammar_host.backends.base import EngineMatcher, NewMatcher
from grammar_host.bitmask import token_row
from grammar_host.gate.closers import closes_container
from grammar_host.gate.cursor import START, Cursor, follow
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

    def __init__(self, schemas: Mapping[str, Any], tokenizer_info: TokenizerInfo) -> None:
        """Prepares the rules.

        Args:
            schemas: from the text that begins a tag to the `Schema.document` of the JSON behind it.
            tokenizer_info: the vocabulary.
        """
        self.vocabulary = tokenizer_info.vocabulary
        self._rules = {begin.encode(): Rules(document) for begin, document in schemas.items()}
        longest_first = sorted(self._rules, key=len, reverse=True)
        self._begin = re.compile(b"|".join(map(re.escape, longest_first)))
        self._longest = max(map(len, self._rules))
        # Inside of JSON, a token that closes something; before it, one that begins and closes it.
        last_bytes = {begin[-1:] for begin in self._rules}
        closing = [
            token
            for token, text in enumerate(self.vocabulary)
            if closes_container(text, in_string=False) or b'"' in text
        ]
        beginning = [
            token
            for token in closing
            if any(last in self.vocabulary[token][:-1] for last in last_bytes)
        ]
        self._closing = token_row(closing, len(self.vocabulary))
        self._beginning = token_row(beginning, len(self.vocabulary))

    def candidates(self, state: _State) -> NDArray[np.int32]:
        """int32 [W], read-only: the tokens that may finish something here."""
        return self._beginning if state.rules is None else self._closing

    def follow(self, state: _State, text: bytes) -> _State | None:
        """Moves to the end of a text that begins with what led to `state`.

        Returns:
            The new state; None if the addition finishes a part that violates its schema.
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
            if moved is None:
                return None
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
        data = b"" if token_id in self._stop_token_ids else self._tags.vocabulary[token_id]
        state = self._tags.follow(self._history[-1], self._text + data)
        if state is None or not self._engine.accept_token(token_id):
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
        candidates = row & self._tags.candidates(state)
        for word in np.flatnonzero(candidates):
            bits = int(candidates[word]) & 0xFFFF_FFFF
            kept = int(row[word]) & 0xFFFF_FFFF
            while bits:
                lowest = bits & -bits
                bits ^= lowest
                token = 32 * int(word) + lowest.bit_length() - 1
                text = self._text + self._tags.vocabulary[token]
                if token not in self._stop_token_ids and self._tags.follow(state, text) is None:
                    kept ^= lowest
            row[word] = kept - (1 << 32) if kept >> 31 else kept

    def is_terminated(self) -> bool:
        return self._engine.is_terminated()

    def is_completed(self) -> bool:
        return self._engine.is_completed()

    def forced_bytes(self) -> bytes:
        forced = self._engine.forced_bytes()
        allowed = self._tags.follow(self._history[-1], self._text + forced) is not None
        return forced if allowed else b""

    def fork(self) -> GatedTagMatcher:
        copy = GatedTagMatcher(self._engine.fork(), self._tags, self._stop_token_ids)
        copy._text = self._text
        copy._history = list(self._history)
        return copy


def with_tag_gate(
    new_matcher: NewMatcher, schemas: Mapping[str, Any], tokenizer_info: TokenizerInfo
) -> NewMatcher:
    """Puts a gate in front of every matcher of a structural tag.

    Args:
        new_matcher: of the compiled structural tag.
        schemas: from the text that begins a tag to the `Schema.document` of the JSON behind it.
        tokenizer_info: the vocabulary.
    """
    tags = Tags(schemas, tokenizer_info)

    def new_gated_matcher(stop_token_ids: frozenset[int]) -> EngineMatcher:
        return GatedTagMatcher(new_matcher(stop_token_ids), tags, stop_token_ids)

    return new_gated_matcher


def _closing_offset(cursor: Cursor, document: bytes, position: int, rules: Rules) -> int:
    """How many bytes of the text belong to the document that it closes."""
    for end in range(position + 1, len(document)):
        moved = follow(cursor, document[:end], position, rules)
        if moved is not None and moved.closed:
            return end
    return len(document)
