"""One generation under a grammar: the life cycle that every engine's matcher is held to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grammar_host.backends.base import EngineMatcher
from grammar_host.bitmask import bitmask_words, token_row
from grammar_host.errors import DeadEndError
from grammar_host.forced import Segmenter, forced_text


class GrammarMatcher:
    """The state of one generation under one grammar.

    Life cycle: *active*; *completed* wherever the text so far is a whole text of the language (it
    may still continue); *terminated* once a stop token has been accepted. After termination only
    stop tokens stay legal in the mask, and no further token is accepted.

    Masks: int32, C-contiguous, exactly W = ceil(V / 32) words a row, bit `id % 32` of word
    `id // 32` is 1 if the token is legal, bits at and above V are 0. A token is accepted exactly
    if its bit is set (before termination).

    Not thread-safe: one thread at a time. Obtained from `Grammar.matcher()`.
    """

    def __init__(
        self,
        engine: EngineMatcher,
        vocab_size: int,
        stop_token_ids: Iterable[int],
        segmenter: Segmenter | None = None,
    ) -> None:
        """Wraps an engine's matcher that is in its initial state.

        Args:
            engine: the engine's matcher, created with the same stop tokens.
            vocab_size: V, the width of the logits.
            stop_token_ids: the tokens that end the generation where the grammar allows an end.
            segmenter: of the engine's vocabulary; without one no tokens are ever forced.

        Raises:
            ValueError: no stop token, or one outside of 0..V-1.
        """
        stops = frozenset(stop_token_ids)
        if not stops:
            raise ValueError("a generation needs at least one stop token")
        if min(stops) < 0 or max(stops) >= vocab_size:
            raise ValueError(f"stop tokens {sorted(stops)} are not all within 0..{vocab_size - 1}")
        self._engine = engine
        self._vocab_size = vocab_size
        self._stop_token_ids = stops
        self._words = bitmask_words(vocab_size)
        # Engines may set the bits above V: XGrammar 0.2.9 does where most tokens are legal.
        self._last_word = np.int32(-1 if vocab_size % 32 == 0 else (1 << vocab_size % 32) - 1)
        self._stop_row = token_row(stops, vocab_size)
        self._accepted: list[int] = []
        self._segmenter = segmenter

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        return self._vocab_size

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The stop tokens in force: the tokenizer's and the request's."""
        return self._stop_token_ids

    @property
    def stop_row(self) -> NDArray[np.int32]:
        """int32 [W], read-only: the mask that allows the stop tokens and nothing else."""
        return self._stop_row

    @property
    def num_accepted(self) -> int:
        """Tokens accepted and not rolled back, the stop token included."""
        return len(self._accepted)

    def accept_token(self, token_id: int) -> bool:
        """Consumes one token.

        Returns:
            False, with the state unchanged, if the token is illegal here, outside of the
            vocabulary, or comes after termination.
        """
        if not 0 <= token_id < self._vocab_size or self._engine.is_terminated():
            return False
        if not self._engine.accept_token(int(token_id)):
            return False
        self._accepted.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        """Undoes the last accepted tokens exactly, a stop token counting as one.

        Raises:
            ValueError: negative, or more than were accepted; the state is unchanged.
        """
        if not 0 <= num_tokens <= len(self._accepted):
            raise ValueError(f"cannot roll back {num_tokens} of {len(self._accepted)} tokens")
        if num_tokens:
            self._engine.rollback(num_tokens)
            del self._accepted[-num_tokens:]

    def fill_next_token_bitmask(self, bitmask: NDArray[np.int32], index: int = 0) -> None:
        """Writes every word of one mask row; does not change the state.

        Args:
            bitmask: int32 [rows, W], C-contiguous and writeable.
            index: the row to write.

        Raises:
            ValueError: wrong dtype, shape, layout or index. Engines write through raw pointers,
                so a strided view would silently receive the mask in the wrong rows.
        """
        self._check_bitmask(bitmask, index)
        if self._engine.is_terminated():
            bitmask[index] = self._stop_row
            return
        self._engine.fill_next_token_bitmask(bitmask, index)
        bitmask[index, -1] &= self._last_word

    def is_terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._engine.is_terminated()

    def is_completed(self) -> bool:
        """Whether the text so far is a whole text of the language (it may still continue)."""
        return self._engine.is_completed()

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens, from the first one on, would be accepted; no state change."""
        accepted = 0
        for token_id in token_ids:
            if not self.accept_token(token_id):
                break
            accepted += 1
        self.rollback(accepted)
        return accepted

    def forced_bytes(self) -> bytes:
        """The bytes that every continuation begins with; no state change.

        Empty where there is a choice, where the text may end, and after termination. May end
        inside of a UTF-8 character. At most `grammar_host.forced.MAX_FORCED_BYTES`.
        """
        if self._engine.is_terminated():
            return b""
        if self._segmenter is None:
            return self._engine.forced_bytes()
        return self._forced_text(self._segmenter)[0]

    def forced_tokens(self) -> list[int]:
        """The tokens that every continuation begins with if it is segmented canonically.

        Drafts for a decode loop (*jump-forward*): legal one after the other, never a stop token,
        and as the tokenizer would segment the accepted text, the forced bytes and whatever
        follows. Fewer than the forced bytes where a token could still become a longer one, and
        none where the accepted tokens end at a place where the tokenizer would not. No state
        change; without a segmenter always empty.
        """
        segmenter = self._segmenter
        if segmenter is None or self._engine.is_terminated():
            return []
        text, following = self._forced_text(segmenter)
        if not text:
            return []
        context = segmenter.context(self._accepted)
        tokens = segmenter.stable_tokens(context, text, following)
        return list(tokens[: self.validate_tokens(tokens)])

    def explain_dead_end(self) -> DeadEndError:
        """The error for a mask, just filled, that allows nothing."""
        reason, pointer = self._engine.explain_dead_end() or (None, None)
        if reason is None:
            reason = "no token of the vocabulary is legal"
        return DeadEndError(
            f"after {self.num_accepted} tokens {reason}; relax the grammar, or give it a way to "
            "end here",
            pointer=pointer,
        )

    def fork(self) -> GrammarMatcher:
        """An independent copy in the same state (for several samples of one prompt)."""
        copy = GrammarMatcher(
            self._engine.fork(), self._vocab_size, self._stop_token_ids, self._segmenter
        )
        copy._accepted = list(self._accepted)
        return copy

    def _forced_text(self, segmenter: Segmenter) -> tuple[bytes, bytes]:
        return forced_text(self._engine, segmenter, self._accepted, self._stop_token_ids)

    def _check_bitmask(self, bitmask: Any, index: int) -> None:
        if not isinstance(bitmask, np.ndarray) or bitmask.dtype != np.int32:
            kind = getattr(bitmask, "dtype", type(bitmask).__name__)
            raise ValueError(f"a bitmask is a NumPy array of int32, not {kind}")
        if bitmask.ndim != 2 or bitmask.shape[1] != self._words:
            raise ValueError(f"a bitmask is [rows, {self._words}], not {bitmask.shape}")
        flags = bitmask.flags
        if not flags.c_contiguous or not flags.writeable:
            raise ValueError("a bitmask must be C-contiguous and writeable")
        if not 0 <= index < bitmask.shape[0]:
            raise ValueError(f"row {index} is not within 0..{bitmask.shape[0] - 1}")
