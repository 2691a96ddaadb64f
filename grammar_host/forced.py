"""What the grammar leaves no choice about, and how the tokenizer would write it.

A grammar often forces the next bytes: the rest of a property's name, a separator, a constant. The
model need not choose there, so a decode loop may take such tokens as drafts (*jump-forward*). But a
model knows texts in the tokenizer's own, *canonical*, segmentation only: forced bytes must be
segmented together with the text before them, and their last tokens be left to the model if they
could become other tokens once more text follows (*token healing*). The recipe is that of LLGuidance
(https://github.com/guidance-ai/llguidance, `docs/fast_forward.md`) and MLC-LLM; which tokens are
stable follows from the algorithms, see `Segmenter`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from grammar_host.bitmask import allocate_token_bitmask

if TYPE_CHECKING:
    from grammar_host.backends.base import EngineMatcher

Encode = Callable[[str], Sequence[int]]
"""A tokenizer: text → token ids, without adding special tokens."""

MAX_FORCED_BYTES = 256
"""Longest forced text that is looked at: more than any loop verifies in one step."""

CONTEXT_TOKENS = 4
"""How many accepted tokens are segmented again together with the forced text. Two are enough for
every tokenizer seen; digits are the exception, see `Segmenter.context`."""

_MAX_CONTEXT_TOKENS = 64
_CACHED = 1024
_ANY_BYTE = bytes(range(256))
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))


class Segmenter:
    """Texts as tokens of one vocabulary. Immutable and thread-safe.

    Which tokens of a text are stable, whatever follows? If the whole text turns out to have a token
    boundary at some byte, then its tokens up to there are those of the text up to there; that holds
    for byte-pair encoding and for unigram models. So the stable tokens are those that the text has
    in common with every part of it from whose end some vocabulary token could reach across the end
    of the text. Pre-tokenizers add that blanks at the end are never stable: the last of several
    belongs to the word that follows (`\\s+(?!\\S)`).
    """

    def __init__(
        self,
        vocabulary: Sequence[bytes],
        special_tokens: Mapping[int, str],
        encode: Encode | None = None,
    ) -> None:
        """Prepares the look-ups: some tens of milliseconds for a large vocabulary.

        Args:
            vocabulary: V entries, the bytes of each token; empty for special tokens.
            special_tokens: id → name of the special tokens.
            encode: the tokenizer; None takes the longest token that fits, from left to right.
        """
        self.vocabulary = vocabulary
        self._spellings = list(vocabulary)
        for token, name in special_tokens.items():
            self._spellings[token] = name.encode()
        self._sorted = sorted({text for text in self._spellings if text})
        self._longest = max(map(len, self._sorted), default=0)
        self._ids = {text: token for token, text in enumerate(vocabulary) if text}
        self._longest_from: dict[int, int] = {}
        for text in self._ids:
            self._longest_from[text[0]] = max(self._longest_from.get(text[0], 0), len(text))
        self._find_first_bytes()
        self._encode = encode
        # Where a tokenizer would put a blank before the text, a line break goes first: it keeps
        # the blank away, and it is what ends the prompts of chat templates.
        self._anchor = "\n" if self._spell(self._tokenize("x")).startswith(b" ") else ""
        # Grammars force the same texts again and again.
        self._cached_match = lru_cache(maxsize=_CACHED)(self._longest_match)
        self._cached_tokens = lru_cache(maxsize=_CACHED)(self._stable_tokens)

    def ends_inside_character(self, tokens: Sequence[int]) -> bool:
        """Whether the text of the tokens ends inside of a UTF-8 character."""
        if not tokens or self._spellings[tokens[-1]][-1:] < b"\x80":
            return False
        tail = self._spell(tokens[-4:])
        return _whole_characters(tail) < len(tail)

    def context(self, accepted: Sequence[int]) -> tuple[int, ...]:
        """The last accepted tokens, enough of them to segment what follows as in the whole text.

        A run of digits counts from its beginning, because tokenizers group digits by threes.
        """
        start = max(0, len(accepted) - CONTEXT_TOKENS)
        while (
            start > max(0, len(accepted) - _MAX_CONTEXT_TOKENS)
            and self._spellings[accepted[start]][:1].isdigit()
        ):
            start -= 1
        return tuple(accepted[start:])

    def first_bytes(self, row: NDArray[np.int32]) -> bytes:
        """The bytes that the legal tokens begin with, ascending.

        Args:
            row: int32 [W], a mask.
        """
        legal = (row[self._words] >> self._shifts) & 1 != 0
        return bytes(sorted(set(self._first_bytes[legal].tobytes())))

    def spell_out(self, data: bytes) -> tuple[int, ...]:
        """Tokens that write the bytes, the longest that fits first; ends where none fits."""
        return self._cached_match(data)

    def stable_tokens(
        self, context: tuple[int, ...], text: bytes, following: bytes
    ) -> tuple[int, ...]:
        """The canonical tokens of a text, as far as they stay the same whatever follows.

        Args:
            context: the last tokens before the text, see `context`.
            text: the bytes behind the context; may end inside of a character.
            following: the bytes that may come next, ascending; empty if nothing can.

        Returns:
            As many as can be told. None if the tokenizer would not begin a token where the text
            begins, or if it writes the text with other bytes.
        """
        return self._cached_tokens(context, text, following)

    def _find_first_bytes(self) -> None:
        # A byte is legal exactly if its own token is; only bytes without one need all their tokens.
        single = {text[0] for text in self._ids if len(text) == 1}
        tokens = [
            token
            for token, text in enumerate(self.vocabulary)
            if text and (len(text) == 1 or text[0] not in single)
        ]
        self._words, self._shifts = np.divmod(np.array(tokens, dtype=np.int32), np.int32(32))
        self._first_bytes = np.array([self.vocabulary[t][0] for t in tokens], dtype=np.uint8)

    def _longest_match(self, data: bytes) -> tuple[int, ...]:
        tokens = []
        position = 0
        while position < len(data):
            longest = self._longest_from.get(data[position], 0)
            for size in range(longest, 0, -1):
                piece = data[position : position + size]
                if piece in self._ids:
                    break
            else:
                break
            tokens.append(self._ids[piece])
            position += len(piece)
        return tuple(tokens)

    def _tokenize(self, text: str) -> Sequence[int]:
        """The tokenizer's tokens; none if the model does not have them all."""
        if self._encode is None:
            return self._longest_match(text.encode())
        tokens = self._encode(text)
        return tokens if max(tokens, default=0) < len(self._spellings) else ()

    def _spell(self, tokens: Sequence[int]) -> bytes:
        return b"".join([self._spellings[token] for token in tokens])

    def _stable_tokens(
        self, context: tuple[int, ...], text: bytes, following: bytes
    ) -> tuple[int, ...]:
        before = self._context_bytes(context)
        end = _whole_characters(before + text) - len(before)
        if end <= 0:
            return ()
        if end < len(text):
            text, following = text[:end], text[end : end + 1]
        tokens = stable = self._continue(before, text)
        boundaries = [0, *accumulate(len(self._spellings[token]) for token in tokens)]
        for start in self._open_starts(text, following):
            if not stable:
                break
            if start in boundaries:
                part = tokens[: boundaries.index(start)]
            else:
                part = self._continue(before, text[:start])
            stable = _common_prefix(stable, part)
        return tuple(stable)

    def _context_bytes(self, context: Sequence[int]) -> bytes:
        """The text of the context, from where it can be segmented without what was before it."""
        texts = [self.vocabulary[token] for token in context]
        # Tokenizers split a text at its special tokens.
        data = b"".join(reversed(list(takewhile(bool, reversed(texts)))))
        # The context may begin inside of a character.
        return data.lstrip(_CONTINUATION_BYTES)

    def _continue(self, before: bytes, text: bytes) -> list[int]:
        """The tokens of the text's whole characters; none if one token spans its beginning."""
        joined = before + text
        end = _whole_characters(joined)
        size = end - len(before)
        try:
            tokens = list(self._tokenize(self._anchor + joined[:end].decode()))
        except UnicodeDecodeError:
            return []
        written = self._spell(tokens)
        if size <= 0 or not written.endswith(joined[:end]):  # the tokenizer changes the text
            return []
        position = len(written)
        for index in reversed(range(len(tokens))):
            position -= len(self._spellings[tokens[index]])
            if position <= len(written) - size:
                return tokens[index:] if position == len(written) - size else []
        return []

    def _open_starts(self, text: bytes, following: bytes) -> Iterator[int]:
        """Positions from which a token could reach across the end of the text, ascending."""
        if not following:
            return
        blanks = len(
            text.decode("utf-8", "surrogateescape").rstrip().encode("utf-8", "surrogateescape")
        )
        for start in range(len(text)):
            near = len(text) - start < self._longest
            if start == blanks or (near and self._can_extend(text[start:], following)):
                yield start

    def _can_extend(self, start: bytes, following: bytes) -> bool:
        """Whether some token is `start`, one of the bytes `following`, and perhaps more."""
        index = bisect_left(self._sorted, start + following[:1])
        while index < len(self._sorted) and self._sorted[index].startswith(start):
            byte = self._sorted[index][len(start)]
            if byte in following:
                return True
            later = [candidate for candidate in following if candidate > byte]
            if not later:
                return False
            index = bisect_left(self._sorted, start + bytes(later[:1]), index)
        return False


def forced_text(
    engine: EngineMatcher,
    segmenter: Segmenter,
    accepted: Sequence[int],
    stop_token_ids: Collection[int],
) -> tuple[bytes, bytes]:
    """What every continuation begins with, and what may follow that.

    Costs one call of the engine where nothing is forced, else one mask more. An engine may stop
    early inside of characters, where it is helped by looking at its masks.

    Args:
        engine: a matcher that has not terminated; its state is the same afterwards.
        segmenter: of the engine's vocabulary.
        accepted: the tokens accepted so far.
        stop_token_ids: those in force.

    Returns:
        The forced bytes, at most `MAX_FORCED_BYTES`, and the bytes that may come next, ascending.
    """
    text = pending = engine.forced_bytes()
    if not text and not segmenter.ends_inside_character(accepted):
        return b"", _ANY_BYTE
    row = allocate_token_bitmask(1, len(segmenter.vocabulary))
    walked = 0
    is_exhausted = bool(text)  # the engine has said here all that it knows
    try:
        while len(text) <= MAX_FORCED_BYTES:
            position = len(text) - len(pending)
            for token in segmenter.spell_out(pending):
                if token in stop_token_ids:  # the text must be written with other tokens
                    return text, _ANY_BYTE
                if not engine.accept_token(token):
                    return text[:position], _ANY_BYTE
                walked += 1
                position += len(segmenter.vocabulary[token])
            if position < len(text):
                return text, _ANY_BYTE
            pending = b"" if is_exhausted else engine.forced_bytes()
            is_exhausted = True
            if not pending:
                engine.fill_next_token_bitmask(row, 0)
                pending = following = segmenter.first_bytes(row[0])
                if len(following) != 1 or engine.is_completed():
                    return text, following
                is_exhausted = False
            text += pending
    finally:
        if walked:
            engine.rollback(walked)
    return text[:MAX_FORCED_BYTES], text[MAX_FORCED_BYTES : MAX_FORCED_BYTES + 1]


def _whole_characters(data: bytes) -> int:
    """The length of the bytes without an incomplete UTF-8 character at their end."""
    for back in range(1, min(4, len(data) + 1)):
        lead = data[-back]
        if lead < 0x80:
            break
        if lead >= 0xC0:
            size = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return len(data) - back if back < size else len(data)
    return len(data)


def _common_prefix(tokens: Sequence[int], others: Sequence[int]) -> list[int]:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False))
    return [token for token, _ in same]
