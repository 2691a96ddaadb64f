"""The grammar side of a decode loop: one row of slots, one conversation per step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grammar_host.bitmask import bitmask_words
from grammar_host.errors import GrammarError, RefusedTokenError
from grammar_host.matcher import GrammarMatcher


@dataclass(frozen=True)
class SlotCounters:
    """What one request has cost and gained so far.

    Attributes:
        steps: fills while the slot was occupied.
        filled: mask rows computed by the grammar.
        accepted: emitted tokens that count (all of them for free text).
        advanced: draft tokens that the grammar consumed ahead of verification.
        rolled_back: of those, the ones that the model did not emit.
        drafts_proposed: draft tokens offered by the drafting side.
        drafts_refused: of those, the ones cut because the grammar forbids them.
        fill_seconds: wall time spent on this slot's masks.
    """

    steps: int = 0
    filled: int = 0
    accepted: int = 0
    advanced: int = 0
    rolled_back: int = 0
    drafts_proposed: int = 0
    drafts_refused: int = 0
    fill_seconds: float = 0.0


class _Slot:
    """One request. `drafts` are what the model verifies in this step; the matcher stands after
    the first `advanced` of them from `fill` until `advance` rolls the wrong ones back."""

    __slots__ = (
        "accepted",
        "advanced",
        "dead_row",
        "drafts",
        "drafts_proposed",
        "drafts_refused",
        "failure",
        "fill_seconds",
        "filled",
        "matcher",
        "rolled_back",
        "steps",
        "total_advanced",
    )

    def __init__(self, matcher: GrammarMatcher | None) -> None:
        self.matcher = matcher
        self.failure: Exception | None = None
        self.drafts: list[int] = []
        self.advanced = 0
        self.dead_row: int | None = None
        self.steps = 0
        self.filled = 0
        self.accepted = 0
        self.total_advanced = 0
        self.rolled_back = 0
        self.drafts_proposed = 0
        self.drafts_refused = 0
        self.fill_seconds = 0.0


class GuidedBatch:
    """The matchers of all slots, and the masks of all their rows.

    A slot has N = 1 + max_drafts rows: row 0 masks the token after the accepted text, row i the
    token after the first i drafts. One step is

        propose (each slot) → fill → the model runs and samples → advance (each slot)

    with `admit` and `release` between steps. A slot without drafts need not propose.

    Failures belong to one slot: whatever goes wrong (an engine's bug, a dead end, an illegal
    token) is remembered as `failure(slot)`, the slot's rows allow only stop tokens from then on,
    and the other slots never notice.

    Threads: at most one call at a time. `fill` may run on a worker thread while the model runs,
    if the caller waits for it before it calls anything else; the batch has no lock of its own.
    `fill` goes through the slots one after the other. On several threads it would be slower:
    handing over to a thread costs more than a slot's masks, and where masks are dear the engines
    wait for each other, or for the one slot that is dearest (`python -m benchmarks.fill`).
    Misuse (a free slot, a wrong shape) raises `ValueError`, except in `fill`, which never raises.
    """

    def __init__(self, slots: int, max_drafts: int, vocab_size: int) -> None:
        """Makes a batch of free slots.

        Args:
            slots: B, the number of requests that run together.
            max_drafts: K, the most draft tokens per slot and step.
            vocab_size: V, the width of the logits.
        """
        if slots < 1 or max_drafts < 0 or vocab_size < 1:
            raise ValueError(f"no batch has {slots=}, {max_drafts=}, {vocab_size=}")
        self._slots: list[_Slot | None] = [None] * slots
        self._max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._words = bitmask_words(vocab_size)

    @property
    def mask_shape(self) -> tuple[int, int, int]:
        """(B, N, W): the shape of the masks that `fill` writes."""
        return len(self._slots), 1 + self._max_drafts, self._words

    def admit(self, slot: int, matcher: GrammarMatcher | None) -> None:
        """Puts a request into a free slot.

        Args:
            slot: 0..B-1.
            matcher: the request's grammar, standing after the tokens accepted so far; None for
                free text.
        """
        if self._slots[self._index(slot)] is not None:
            raise ValueError(f"slot {slot} is occupied; release it first")
        if matcher is not None and matcher.vocab_size != self._vocab_size:
            raise ValueError(f"the matcher has V={matcher.vocab_size}, not {self._vocab_size}")
        self._slots[slot] = _Slot(matcher)

    def release(self, slot: int) -> None:
        """Frees a slot, whatever state it is in."""
        self._occupied(slot)
        self._slots[slot] = None

    def propose(self, slot: int, drafts: Sequence[int]) -> list[int]:
        """Chooses the drafts of the slot's next step.

        Args:
            slot: an occupied slot.
            drafts: token ids guessed to follow the accepted text.

        Returns:
            The longest usable prefix: at most K tokens, cut before a token outside of the
            vocabulary, before the first stop token, and where the grammar forbids one (quietly:
            a wrong guess is no error). Free text has no grammar and no stop tokens known here.
            Empty for a slot that has terminated or failed.
        """
        state = self._occupied(slot)
        state.drafts_proposed += len(drafts)
        state.drafts = []
        matcher = state.matcher
        if state.failure is not None:
            return []
        stops = frozenset() if matcher is None else matcher.stop_token_ids
        usable: list[int] = []
        for token in drafts[: self._max_drafts]:
            if not 0 <= token < self._vocab_size or token in stops:
                break
            usable.append(int(token))
        if matcher is not None and usable:
            try:
                legal = matcher.validate_tokens(usable)
            except Exception as error:  # an engine's bug ends this request, not the step
                state.failure = error
                return []
            state.drafts_refused += len(usable) - legal
            del usable[legal:]
        state.drafts = usable
        return list(usable)

    def fill(self, masks: NDArray[np.int32], enabled: NDArray[np.int32]) -> None:
        """Writes the masks of the next step for every row of every slot. Never raises.

        Args:
            masks: int32 [B, N, W], C-contiguous. Guided slots: row i is what may follow the
                accepted text and the first i drafts; rows past the drafts repeat the last one
                (nothing is sampled there); only stop tokens after termination or failure. Free
                text and free slots: all ones.
            enabled: int32 [B, N]: 1 for rows under a grammar, 0 for rows to leave alone.
        """
        try:
            self._check_arrays(masks, enabled)
        except ValueError as error:
            # Nothing can be written safely, so every request that needed a mask has failed.
            for state in self._slots:
                if state is not None and state.matcher is not None:
                    state.failure = state.failure or error
            return
        rows = masks.reshape(-1, self._words)
        words = rows.view(np.uint32)
        for slot, state in enumerate(self._slots):
            if state is None or state.matcher is None:
                masks[slot] = -1
                enabled[slot] = 0
                if state is not None:
                    state.steps += 1
                continue
            started = time.perf_counter()
            enabled[slot] = 1
            try:
                if state.failure is None:
                    self._fill_slot(state, state.matcher, rows, words, slot * masks.shape[1])
            except Exception as error:  # of this slot alone
                state.failure = error
            if state.failure is not None:
                masks[slot] = state.matcher.stop_row
            state.steps += 1
            state.fill_seconds += time.perf_counter() - started

    def advance(self, slot: int, tokens: Sequence[int]) -> int:
        """Moves a slot by the tokens that the model emitted in this step.

        Args:
            slot: an occupied slot.
            tokens: the accepted drafts, then the token sampled after them; already cut at a stop
                token or the token limit. May be empty.

        Returns:
            How many of the tokens count: fewer than given if the slot failed at one of them or
            had terminated before it.
        """
        state = self._occupied(slot)
        if state.matcher is None:
            accepted = len(tokens)
        elif state.failure is not None:
            accepted = 0
        else:
            accepted = _accept(state, state.matcher, tokens)
        state.accepted += accepted
        state.drafts = []
        state.advanced = 0
        state.dead_row = None
        return accepted

    def failure(self, slot: int) -> Exception | None:
        """Why the slot failed; None if it has not."""
        return self._occupied(slot).failure

    def is_terminated(self, slot: int) -> bool:
        """Whether the grammar has accepted a stop token; always False for free text."""
        state = self._occupied(slot)
        return state.failure is None and state.matcher is not None and state.matcher.is_terminated()

    def is_completed(self, slot: int) -> bool:
        """Whether the accepted text is a whole text of the grammar; always True for free text.

        Call it between `advance` and `fill`: in between the matcher stands after the drafts.
        """
        state = self._occupied(slot)
        return state.matcher is None or (state.failure is None and state.matcher.is_completed())

    def counters(self, slot: int) -> SlotCounters:
        """A snapshot of the slot's counters since it was admitted."""
        state = self._occupied(slot)
        return SlotCounters(
            steps=state.steps,
            filled=state.filled,
            accepted=state.accepted,
            advanced=state.total_advanced,
            rolled_back=state.rolled_back,
            drafts_proposed=state.drafts_proposed,
            drafts_refused=state.drafts_refused,
            fill_seconds=state.fill_seconds,
        )

    def _fill_slot(
        self,
        state: _Slot,
        matcher: GrammarMatcher,
        rows: NDArray[np.int32],
        words: NDArray[np.uint32],
        first: int,
    ) -> None:
        if state.advanced:  # a step whose tokens never came back: start from the accepted text
            matcher.rollback(state.advanced)
            state.advanced = 0
        state.dead_row = None
        drafts = state.drafts
        for i in range(len(drafts) + 1):
            matcher.fill_next_token_bitmask(rows, first + i)
            state.filled += 1
            # Bits at and above V are 0, so any bit is a legal token. The largest word tells in a
            # tenth of the time of `any`, which is slow for integers.
            row = words[first + i]
            if not row[row.argmax()]:
                rows[first + i] = matcher.stop_row
                if i == 0:
                    state.failure = matcher.explain_dead_end()
                else:
                    state.dead_row = i
                break
            if i == len(drafts) or not matcher.accept_token(drafts[i]):
                break
            state.advanced += 1
            state.total_advanced += 1
        if i < self._max_drafts:
            rows[first + i + 1 : first + 1 + self._max_drafts] = rows[first + i]

    def _check_arrays(self, masks: Any, enabled: Any) -> None:
        for name, array, shape in (
            ("masks", masks, self.mask_shape),
            ("enabled", enabled, self.mask_shape[:2]),
        ):
            if not isinstance(array, np.ndarray) or array.dtype != np.int32:
                raise GrammarError(f"{name} must be a NumPy array of int32")
            if array.shape != shape or not array.flags.c_contiguous or not array.flags.writeable:
                raise GrammarError(f"{name} must be {shape}, C-contiguous and writeable")

    def _index(self, slot: int) -> int:
        if not 0 <= slot < len(self._slots):
            raise ValueError(f"slot {slot} is not within 0..{len(self._slots) - 1}")
        return slot

    def _occupied(self, slot: int) -> _Slot:
        state = self._slots[self._index(slot)]
        if state is None:
            raise ValueError(f"slot {slot} is free; admit a request first")
        return state


def _accept(state: _Slot, matcher: GrammarMatcher, tokens: Sequence[int]) -> int:
    """Brings the matcher from `advanced` drafts to the emitted tokens; returns how many count."""
    matched = 0
    while matched < min(state.advanced, len(tokens)) and tokens[matched] == state.drafts[matched]:
        matched += 1
    accepted = matched
    try:
        if matched < state.advanced:
            matcher.rollback(state.advanced - matched)
            state.rolled_back += state.advanced - matched
        for token in tokens[matched:]:
            if accepted == state.dead_row:
                # The row had no legal token; what was sampled there is only its stop-only stand-in.
                state.failure = matcher.explain_dead_end()
                break
            if not matcher.accept_token(token):
                if not matcher.is_terminated():
                    state.failure = RefusedTokenError(
                        token, f"illegal after {matcher.num_accepted} accepted tokens"
                    )
                break
            accepted += 1
    except Exception as error:  # an engine's bug ends this request, not the step
        state.failure = error
    return accepted
