"""Reasoning that a model may leave out: a text that begins with a start tag, or the answer at once.

What the text begins with decides. As long as it can become the start tag and the answer as well, both are
followed. Blanks may precede the tag where the answer may begin with them. Once the tag is there, it is
reasoning (`grammar_host.reasoning`) and nothing else, even where the answer could begin with the same
characters: so whoever reads the text finds the same boundary. A token that finishes the tag and goes on is
illegal.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from grammar_host.backends.base import EngineMatcher, NewMatcher
from grammar_host.bitmask import token_row
from grammar_host.errors import InvalidGuideError
from grammar_host.reasoning import BLANKS, require_end_tag, texts_and_tag, with_reasoning
from grammar_host.tokenizer import TokenizerInfo


def with_optional_reasoning(
    new_matcher: NewMatcher, tokenizer_info: TokenizerInfo, start: str, end: str
) -> NewMatcher:
    """Lets every matcher that `new_matcher` makes begin with free text between tags, or without.

    Args:
        new_matcher: of a compiled guide.
        tokenizer_info: the vocabulary that the guide was compiled for.
        start: the tag that begins the free text, as `end` is given.
        end: as for `with_reasoning`.

    Raises:
        InvalidGuideError: of `reasoning_end` or `reasoning_start`: the vocabulary cannot write the tag.
            Raised by the matchers' factory, too, if a request's own stop tokens make it impossible.
    """
    require_tags(tokenizer_info, start, end)
    opening = _opening_tag(tokenizer_info, start)
    new_reasoning = with_reasoning(new_matcher, tokenizer_info, end)

    def new_optional(stop_token_ids: frozenset[int]) -> EngineMatcher:
        opening.require_writable(stop_token_ids)
        return OptionalReasoningMatcher(
            new_matcher(stop_token_ids), new_reasoning(stop_token_ids), opening, stop_token_ids
        )

    return new_optional


def require_tags(tokenizer_info: TokenizerInfo, start: str, end: str) -> None:
    """Refuses tags that no guide of that vocabulary can be behind.

    Args:
        tokenizer_info: the vocabulary; its stop tokens are all that a request has.
        start: as for `with_optional_reasoning`.
        end: likewise.

    Raises:
        InvalidGuideError: of `reasoning_end` or `reasoning_start`: the vocabulary cannot write the tag.
    """
    _opening_tag(tokenizer_info, start).require_writable(frozenset(tokenizer_info.stop_token_ids))
    require_end_tag(tokenizer_info, end)


@functools.lru_cache(maxsize=8)
def _opening_tag(tokenizer_info: TokenizerInfo, start: str) -> OpeningTag:
    # Looking through the vocabulary takes longer than an engine needs for a small schema.
    return OpeningTag(tokenizer_info, start)


class OpeningTag:
    """A tag at the beginning of a text, and what tokens make of it.

    Positions are numbers: s < length where the text is the first s bytes of the tag, perhaps behind blanks
    (0: blanks only), and length where it is the tag. Thread-safe.

    Attributes:
        length: bytes of the tag.
        vocab_size: V.
    """

    def __init__(self, tokenizer_info: TokenizerInfo, start: str) -> None:
        """Looks through the vocabulary."""
        self._start = start
        self._texts, self._tag = texts_and_tag(tokenizer_info, start)
        self.length, self.vocab_size = len(self._tag), tokenizer_info.vocab_size
        last = self._tag[-1:]
        self._relevant = [
            (token, text)
            for token, text in enumerate(self._texts)
            if text and (text in self._tag or last in text)
        ]
        self._blanks = {
            token
            for token, text in enumerate(tokenizer_info.vocabulary)
            if text and not text.strip(BLANKS)
        }
        self._rows: dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]] = {}

    def advance(self, position: int, token_id: int) -> int | None:
        """The position after a token; None where the text is not the tag's any more."""
        text = self._texts[token_id]
        if position == 0:
            if token_id in self._blanks:
                return 0
            text = text.lstrip(BLANKS)
        rest = self._tag[position:]
        return position + len(text) if text and rest.startswith(text) else None

    def rows(self, position: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """int32 [W] each: the tokens that the tag goes on with, and those that never are legal here.

        The latter finish the tag and go on, or finish it behind blanks of their own.
        """
        rows = self._rows.get(position)
        if rows is None:
            rest = self._tag[position:]
            on = [token for token, text in self._relevant if rest.startswith(text)]
            lean = self._relevant
            if position == 0:
                lean = [(token, text.lstrip(BLANKS)) for token, text in lean]
            beyond = [token for token, text in lean if text.startswith(rest)]
            beyond = sorted(set(beyond).difference(on))
            rows = token_row(on, self.vocab_size), token_row(beyond, self.vocab_size)
            self._rows[position] = rows
        return rows

    def require_writable(self, stop_token_ids: frozenset[int]) -> None:
        """Refuses a tag that cannot be written without stop tokens.

        Raises:
            InvalidGuideError: pieces of the vocabulary do not add up to the tag.
        """
        pieces = {text for token, text in self._relevant if token not in stop_token_ids}
        reached = {0}
        for begin in range(self.length):
            if begin in reached:
                reached.update(
                    begin + len(piece) for piece in pieces if self._tag.startswith(piece, begin)
                )
        if self.length not in reached:
            raise InvalidGuideError(
                "reasoning_start",
                f"{self._start!r} cannot be written with tokens that do not stop the generation",
            )


class OptionalReasoningMatcher(EngineMatcher):
    """Either of two matchers, as the beginning of the text decides."""

    def __init__(
        self,
        answer: EngineMatcher,
        reasoning: EngineMatcher,
        opening: OpeningTag,
        stop_token_ids: frozenset[int],
    ) -> None:
        """Starts before the text.

        Args:
            answer: of texts without reasoning, in its initial state.
            reasoning: of what follows the start tag, in its initial state.
            opening: the start tag.
            stop_token_ids: those that both were made with.
        """
        self._answer, self._reasoning, self._opening = answer, reasoning, opening
        self._stop_token_ids = stop_token_ids
        self._text_row = ~token_row(sorted(stop_token_ids), opening.vocab_size)
        self._position: int | None = 0  # None: there is no start tag
        self._is_answer = True  # it may be a text without reasoning
        self._earlier: list[tuple[int | None, bool]] = []
        """Both before each token."""

    def accept_token(self, token_id: int) -> bool:
        before = self._position, self._is_answer
        if self._has_reasoning():
            if not self._reasoning.accept_token(token_id):
                return False
        elif self._position is None:
            if not self._answer.accept_token(token_id):
                return False
        elif not self._accept_beginning(self._position, token_id):
            return False
        self._earlier.append(before)
        return True

    def _accept_beginning(self, position: int, token_id: int) -> bool:
        on, beyond = self._opening.rows(position)
        if _holds(beyond, token_id):
            return False
        moved = self._opening.advance(position, token_id)
        goes_on = _holds(on, token_id) and token_id not in self._stop_token_ids
        if moved == self._opening.length and goes_on:
            self._position, self._is_answer = moved, False
            return True
        is_answer = self._is_answer and self._answer.accept_token(token_id)
        if not (is_answer or goes_on):
            return False
        self._position, self._is_answer = moved, is_answer
        return True

    def rollback(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        answer = reasoning = 0
        for index in range(len(self._earlier) - num_tokens, len(self._earlier)):
            position, _ = self._earlier[index]
            after = index + 1 < len(self._earlier)
            _, is_answer = self._earlier[index + 1] if after else (None, self._is_answer)
            if position == self._opening.length:
                reasoning += 1
            else:
                answer += is_answer
        self._answer.rollback(answer)
        self._reasoning.rollback(reasoning)
        self._position, self._is_answer = self._earlier[-num_tokens]
        del self._earlier[-num_tokens:]

    def fill_next_token_bitmask(self, bitmask: NDArray[np.int32], index: int) -> None:
        if self._has_reasoning():
            self._reasoning.fill_next_token_bitmask(bitmask, index)
            return
        if self._is_answer:
            self._answer.fill_next_token_bitmask(bitmask, index)
        else:
            bitmask[index] = 0
        if self._position is not None:
            on, beyond = self._opening.rows(self._position)
            bitmask[index] = (bitmask[index] & ~beyond) | (on & self._text_row)

    def is_terminated(self) -> bool:
        if self._has_reasoning():
            return self._reasoning.is_terminated()
        return self._is_answer and self._answer.is_terminated()

    def is_completed(self) -> bool:
        if self._has_reasoning():
            return self._reasoning.is_completed()
        return self._is_answer and self._answer.is_completed()

    def forced_bytes(self) -> bytes:
        if self._has_reasoning():
            return self._reasoning.forced_bytes()
        return self._answer.forced_bytes() if self._position is None else b""

    def explain_dead_end(self) -> tuple[str, str | None] | None:
        matcher = self._reasoning if self._has_reasoning() else self._answer
        return matcher.explain_dead_end()

    def fork(self) -> OptionalReasoningMatcher:
        copy = OptionalReasoningMatcher(
            self._answer.fork(), self._reasoning.fork(), self._opening, self._stop_token_ids
        )
        copy._position, copy._is_answer = self._position, self._is_answer
        copy._earlier = self._earlier.copy()
        return copy

    def _has_reasoning(self) -> bool:
        return self._position == self._opening.length


def _holds(row: NDArray[np.int32], token_id: int) -> bool:
    return bool(int(row[token_id // 32]) >> token_id % 32 & 1)
