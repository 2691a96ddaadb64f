"""Free text first, then the grammar: models that think before they answer.

The text up to and including an end tag (`</think>`) is free; the grammar begins behind it. The tag
is found in the bytes of the text, however they are spread over tokens, with the automaton of
Knuth, Morris and Pratt (1977). A token that finishes the tag and goes on is illegal, so the
boundary always falls between two tokens.

Behind the tag there may be up to `MAX_GAP` blanks before the grammar begins, because models write
`</think>\\n\\n{`; unless the grammar itself allows a blank at its beginning: then all blanks are the
grammar's. So what a blank means depends on the text, not on how it is spread over tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from grammar_host.backends.base import EngineMatcher, NewMatcher
from grammar_host.bitmask import token_row
from grammar_host.errors import InvalidGuideError
from grammar_host.tokenizer import TokenizerInfo

MAX_GAP = 4
"""Most blanks between the end tag and the grammar."""

BLANKS = b" \t\n\r"
_MAX_ROWS = 128


def with_reasoning(new_matcher: NewMatcher, tokenizer_info: TokenizerInfo, end: str) -> NewMatcher:
    """Puts free text in front of every matcher that `new_matcher` makes.

    Args:
        new_matcher: of a compiled guide.
        tokenizer_info: the vocabulary that the guide was compiled for.
        end: the tag that ends the free text: the name of a special token, so that only this token
            ends it, or any other text.

    Raises:
        InvalidGuideError: of `reasoning_end`: the vocabulary cannot write the tag. Raised by the
            matchers' factory, too, if a request's own stop tokens make it impossible.
    """
    require_end_tag(tokenizer_info, end)
    reasoning_end = _reasoning_end(tokenizer_info, end)

    def new_reasoning_matcher(stop_token_ids: frozenset[int]) -> EngineMatcher:
        reasoning_end.require_writable(stop_token_ids)
        return ReasoningMatcher(new_matcher(stop_token_ids), reasoning_end, stop_token_ids)

    return new_reasoning_matcher


def require_end_tag(tokenizer_info: TokenizerInfo, end: str) -> None:
    """Raises InvalidGuideError, of `reasoning_end`, if the vocabulary cannot write the tag."""
    stops = frozenset(tokenizer_info.stop_token_ids)
    _reasoning_end(tokenizer_info, end).require_writable(stops)


def may_begin_with_blank(new_matcher: NewMatcher, tokenizer_info: TokenizerInfo, end: str) -> bool:
    """Whether a text of a language may begin with a blank: then all blanks behind the tag are its own."""
    stops = frozenset(tokenizer_info.stop_token_ids)
    blanks = _reasoning_end(tokenizer_info, end).blank_start_row
    row = np.zeros((1, blanks.size), dtype=np.int32)
    new_matcher(stops).fill_next_token_bitmask(row, 0)
    return bool(np.any(row[0] & blanks & ~token_row(sorted(stops), tokenizer_info.vocab_size)))


@functools.lru_cache(maxsize=8)
def _reasoning_end(tokenizer_info: TokenizerInfo, end: str) -> ReasoningEnd:
    # Looking through the vocabulary takes longer than an engine needs for a small schema.
    return ReasoningEnd(tokenizer_info, end)


class ReasoningEnd:
    """An end tag, and what is legal before and right behind it.

    Positions are numbers: s < length where the text ends with the first s bytes of the tag (and no
    more of them), length + g where g blanks follow the tag. Thread-safe.

    Attributes:
        length: L, bytes of the tag.
        vocab_size: V.
        blank_start_row: int32 [W], the tokens that begin with a blank.
    """

    def __init__(self, tokenizer_info: TokenizerInfo, end: str) -> None:
        """Looks through the vocabulary."""
        vocabulary = tokenizer_info.vocabulary
        self.vocab_size = len(vocabulary)
        self._end = end
        self._texts, self._tag = texts_and_tag(tokenizer_info, end)
        self.length = len(self._tag)
        self._failure = _failure_function(self._tag)
        free = [token for token, text in enumerate(vocabulary) if text or self._texts[token]]
        self._free_row = token_row(free, self.vocab_size)
        self._pieces = [t for t in free if self._texts[t] and self._texts[t] in self._tag]
        # Tokens that could go on behind the tag: those with its last byte before their own last.
        last = self._tag[-1:]
        self._heads = [
            (token, text[:-1])
            for token, text in enumerate(self._texts)
            if -1 < text.find(last) < len(text) - 1
        ]
        blanks = [token for token, text in enumerate(vocabulary) if text and text[0] in BLANKS]
        self.blank_start_row = token_row(blanks, self.vocab_size)
        self._blanks = {t: len(vocabulary[t]) for t in blanks if not vocabulary[t].strip(BLANKS)}
        self._rows: dict[int, NDArray[np.int32]] = {}

    def row(self, position: int) -> NDArray[np.int32]:
        """int32 [W], read-only: the tokens of free text, or of the gap, that are legal here.

        Stop tokens count as what they write.
        """
        row = self._rows.get(position)
        if row is None:
            if len(self._rows) >= _MAX_ROWS:  # only a very long tag has as many
                self._rows.clear()
            row = self._rows[position] = self._new_row(position)
        return row

    def allows(self, position: int, token_id: int) -> bool:
        """Whether the token's bit is set in the row of that position."""
        return bool(int(self.row(position)[token_id // 32]) >> token_id % 32 & 1)

    def advance(self, position: int, token_id: int) -> int:
        """The position after a token that the row of `position` allows."""
        if position >= self.length:
            return position + self._blanks[token_id]
        for byte in self._texts[token_id]:
            while position and self._tag[position] != byte:
                position = self._failure[position - 1]
            position += self._tag[position] == byte
        return position

    def require_writable(self, stop_token_ids: frozenset[int]) -> None:
        """Refuses a tag that cannot be written without stop tokens.

        Raises:
            InvalidGuideError: pieces of the vocabulary do not add up to the tag.
        """
        pieces = {self._texts[t] for t in self._pieces if t not in stop_token_ids}
        sizes = {len(piece) for piece in pieces}
        reached = {0}
        for start in range(self.length):
            if start in reached:
                ends = (start + size for size in sizes)
                reached.update(end for end in ends if self._tag[start:end] in pieces)
        if self.length not in reached:
            raise InvalidGuideError(
                "reasoning_end",
                f"{self._end!r} cannot be written with tokens that do not stop the generation",
            )

    def _new_row(self, position: int) -> NDArray[np.int32]:
        if position >= self.length:
            room = self.length + MAX_GAP - position
            fitting = [token for token, size in self._blanks.items() if size <= room]
            return token_row(fitting, self.vocab_size)
        rest = tuple(self._tag[border:] for border in self._borders(position))
        beyond = [
            token for token, head in self._heads if self._tag in head or head.startswith(rest)
        ]
        row = self._free_row & ~token_row(beyond, self.vocab_size)
        row.flags.writeable = False
        return row

    def _borders(self, position: int) -> Iterator[int]:
        """The lengths > 0 of all prefixes of the tag that the text ends with, longest first."""
        while position:
            yield position
            position = self._failure[position - 1]


class ReasoningMatcher(EngineMatcher):
    """Free text up to the end tag, perhaps a few blanks, then another matcher's language.

    Before the tag nothing is completed or forced, and no stop token is legal.
    """

    def __init__(
        self, inner: EngineMatcher, end: ReasoningEnd, stop_token_ids: frozenset[int]
    ) -> None:
        """Starts before the free text.

        Args:
            inner: in its initial state.
            end: the tag.
            stop_token_ids: those that `inner` was made with.
        """
        self._inner = inner
        self._end = end
        self._stop_token_ids = stop_token_ids
        self._text_row = ~token_row(stop_token_ids, end.vocab_size)
        self._position = 0
        self._earlier: list[int] = []  # the position before each token that was not the inner's
        self._inner_accepted = 0
        self._has_gap: bool | None = None  # not asked yet

    def accept_token(self, token_id: int) -> bool:
        if self._is_free() or self._is_in_gap():
            is_text = token_id not in self._stop_token_ids
            if is_text and self._end.allows(self._position, token_id):
                self._earlier.append(self._position)
                self._position = self._end.advance(self._position, token_id)
                return True
            if self._is_free():
                return False
        if not self._inner.accept_token(token_id):
            return False
        self._inner_accepted += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        inner = min(num_tokens, self._inner_accepted)
        if inner:
            self._inner.rollback(inner)
            self._inner_accepted -= inner
        outer = num_tokens - inner
        if outer:
            self._position = self._earlier[-outer]
            del self._earlier[-outer:]

    def fill_next_token_bitmask(self, bitmask: NDArray[np.int32], index: int) -> None:
        if self._is_free():
            bitmask[index] = self._end.row(self._position) & self._text_row
            return
        self._inner.fill_next_token_bitmask(bitmask, index)
        if self._is_in_gap():
            bitmask[index] |= self._end.row(self._position) & self._text_row

    def is_terminated(self) -> bool:
        return self._inner_accepted > 0 and self._inner.is_terminated()

    def is_completed(self) -> bool:
        return not self._is_free() and self._inner.is_completed()

    def forced_bytes(self) -> bytes:
        if self._is_free() or (self._is_in_gap() and self._end.row(self._position).any()):
            return b""
        return self._inner.forced_bytes()

    def explain_dead_end(self) -> tuple[str, str | None] | None:
        return None if self._is_free() else self._inner.explain_dead_end()

    def fork(self) -> ReasoningMatcher:
        copy = ReasoningMatcher(self._inner.fork(), self._end, self._stop_token_ids)
        copy._position = self._position
        copy._earlier = self._earlier.copy()
        copy._inner_accepted = self._inner_accepted
        copy._has_gap = self._has_gap
        return copy

    def _is_free(self) -> bool:
        return self._position < self._end.length

    def _is_in_gap(self) -> bool:
        """Behind the tag, before the first token of a grammar that does not begin with blanks."""
        if self._is_free() or self._inner_accepted:
            return False
        if self._has_gap is None:
            row = np.empty((1, self._text_row.size), dtype=np.int32)
            self._inner.fill_next_token_bitmask(row, 0)
            self._has_gap = not np.any(row[0] & self._end.blank_start_row & self._text_row)
        return self._has_gap


def texts_and_tag(tokenizer_info: TokenizerInfo, end: str) -> tuple[list[bytes], bytes]:
    """What each token writes, and the tag, both as the automaton is to see them."""
    specials = tokenizer_info.special_tokens.items()
    if end in tokenizer_info.special_tokens.values():
        # Only the token counts, not a text that spells its name: it becomes the only letter.
        texts = [b""] * tokenizer_info.vocab_size
        named = {token: b"\0" for token, name in specials if name == end}
        tag = b"\0"
    else:
        texts = list(tokenizer_info.vocabulary)
        named = {token: name.encode() for token, name in specials if name and name in end}
        tag = end.encode()
    for token, text in named.items():
        texts[token] = text
    return texts, tag


def _failure_function(tag: bytes) -> list[int]:
    """At s - 1: the length of the longest proper prefix of tag[:s] that is also its suffix."""
    failure = [0]
    for byte in tag[1:]:
        length = failure[-1]
        while length and tag[length] != byte:
            length = failure[length - 1]
        failure.append(length + (tag[length] == byte))
    return failure
