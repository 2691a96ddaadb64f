"""The grammar side of a decode loop: one row of slots, one conversation per step."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
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

    Drafts are offered to `propose` and `extend`, and cut at the first one that cannot be used. The
    rule for those cut off: each counts once, for the reason of the cut, so that

        drafts_proposed = drafts_usable + drafts_past_limit + drafts_past_stop + drafts_refused

    The first K of a step may be usable; the rest counts as past the limit, whatever it is. A dead
    end cuts nothing by itself: the grammar refuses whatever is offered behind it.

    Attributes:
        steps: steps that a mask was filled for.
        filled: mask rows computed by the grammar; those that repeat another do not count.
        accepted: emitted tokens that count (all of them for free text).
        advanced: draft tokens that the grammar consumed ahead of verification.
        rolled_back: of those, the ones that the model did not emit.
        drafts_proposed: draft tokens offered while the slot had not failed.
        drafts_usable: of those, the ones that the model may verify, if the caller does not drop them.
        drafts_past_limit: cut because the step had K drafts already.
        drafts_past_stop: cut at a stop token, legal or not, or offered after termination.
        drafts_refused: cut at a token that the grammar forbids or the vocabulary lacks.
        dead_ends: rows behind drafts on which nothing was legal. The slot fails if the model gets
            there, and goes on if it leaves the drafts before.
        fill_seconds: wall time spent on this slot's masks.
    """

    steps: int = 0
    filled: int = 0
    accepted: int = 0
    advanced: int = 0
    rolled_back: int = 0
    drafts_proposed: int = 0
    drafts_usable: int = 0
    drafts_past_limit: int = 0
    drafts_past_stop: int = 0
    drafts_refused: int = 0
    dead_ends: int = 0
    fill_seconds: float = 0.0


class _Slot:
    """One request. `drafts` are what the model verifies in this step, and the matcher stands after
    the first `advanced` of them: wherever it was needed last, until `settle` ends the step.
    """

    __slots__ = (
        "accepted",
        "advanced",
        "dead_ends",
        "dead_row",
        "drafts",
        "drafts_past_limit",
        "drafts_past_stop",
        "drafts_proposed",
        "drafts_refused",
        "drafts_usable",
        "failure",
        "fill_seconds",
        "filled",
        "force",
        "forced",
        "forced_row",
        "matcher",
        "rolled_back",
        "rows",
        "steps",
        "stops",
        "total_advanced",
    )

    def __init__(self, matcher: GrammarMatcher | None, force: bool, stops: frozenset[int]) -> None:
        self.matcher = matcher
        self.force = force
        self.stops = stops
        self.failure: Exception | None = None
        self.drafts: list[int] = []
        self.rows = 0  # of this step, already in the masks
        self.dead_row: int | None = None
        self.forced: list[int] = []  # after the first `forced_row` drafts
        self.forced_row: int | None = None
        self.advanced = 0
        self.steps = 0
        self.filled = 0
        self.accepted = 0
        self.total_advanced = 0
        self.rolled_back = 0
        self.drafts_proposed = 0
        self.drafts_usable = 0
        self.drafts_past_limit = 0
        self.drafts_past_stop = 0
        self.drafts_refused = 0
        self.dead_ends = 0
        self.fill_seconds = 0.0

    def stand_after(self, matcher: GrammarMatcher, count: int) -> None:
        """Moves the matcher to the state after the first `count` drafts."""
        if count < self.advanced:
            matcher.rollback(self.advanced - count)
            self.advanced = count
        for token in self.drafts[self.advanced : count]:
            if not matcher.accept_token(token):
                raise RefusedTokenError(token, "a draft that was legal before is so no longer")
            self.advanced += 1

    def forced_after(self, matcher: GrammarMatcher, count: int) -> list[int]:
        """The tokens forced after the first `count` drafts; remembers the last answer."""
        if self.forced_row != count:
            self.stand_after(matcher, count)
            self.forced = matcher.forced_tokens()
            self.forced_row = count
        return self.forced

    def settle(self, kept: int) -> None:
        """Ends the step: the matcher keeps the first `kept` drafts, and the others are gone."""
        wrong = self.advanced - kept
        self.total_advanced += self.advanced
        self.rolled_back += wrong
        self.advanced = 0
        self.drafts = []
        self.rows = 0
        self.dead_row = None
        self.forced_row = None
        if wrong and self.matcher is not None and self.failure is None:
            self.matcher.rollback(wrong)


class GuidedBatch:
    """The matchers of all slots, and the masks of all their rows.

    A slot has N = 1 + max_drafts rows: row 0 masks the token after the accepted text, row i the
    token after the first i drafts. One step is

        propose (each slot) → fill → the model runs and samples → advance (each slot)

    with `admit` and `release` between steps. A slot without drafts need not propose. `propose` and
    `advance` begin a new step. Between them, `forced` says what the grammar forces next, `extend`
    adds drafts, and `fill` may be called after each of these: it computes only what is missing, so
    a draft model can choose its next token under the row after the drafts so far.

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
        """(B, N, W): the shape of the masks that `fill` writes, unless the step needs fewer rows."""
        return len(self._slots), 1 + self._max_drafts, self._words

    def admit(
        self,
        slot: int,
        matcher: GrammarMatcher | None,
        *,
        force: bool = False,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        """Puts a request into a free slot.

        Args:
            slot: 0..B-1.
            matcher: the request's grammar, standing after the tokens accepted so far; None for
                free text.
            force: a row after which the grammar forces tokens allows only the first of them
                (see `GrammarMatcher.forced_tokens`). That depends on the text before the row only,
                not on which tokens were drafts. It narrows the masks and nothing else: `advance`
                accepts whatever is legal in the grammar.
            stop_token_ids: of free text, so that it drafts none; a matcher knows its own.
        """
        if self._slots[self._index(slot)] is not None:
            raise ValueError(f"slot {slot} is occupied; release it first")
        if matcher is not None and matcher.vocab_size != self._vocab_size:
            raise ValueError(f"the matcher has V={matcher.vocab_size}, not {self._vocab_size}")
        stops = matcher.stop_token_ids if matcher is not None else frozenset(stop_token_ids)
        self._slots[slot] = _Slot(matcher, force, stops)

    def release(self, slot: int) -> None:
        """Frees a slot, whatever state it is in."""
        self._occupied(slot)
        self._slots[slot] = None

    def propose(self, slot: int, drafts: Sequence[int]) -> list[int]:
        """Begins the slot's next step, and chooses its first drafts.

        Args:
            slot: an occupied slot. If its last step's tokens never came, the step did not happen.
            drafts: token ids guessed to follow the accepted text.

        Returns:
            The longest usable prefix: at most K tokens, cut before a token outside of the
            vocabulary, before the first stop token, and where the grammar forbids one (quietly:
            a wrong guess is no error). Empty for a slot that has terminated or failed.
        """
        state = self._occupied(slot)
        try:
            state.settle(0)
        except Exception as error:  # an engine's bug ends this request, not the step
            state.failure = error
        return self.extend(slot, drafts)

    def extend(self, slot: int, drafts: Sequence[int]) -> list[int]:
        """Adds drafts to those that the slot's step has already.

        Args:
            slot: an occupied slot.
            drafts: token ids guessed to follow the accepted text and the drafts so far.

        Returns:
            Those of them that are usable, by the rules of `propose`.
        """
        state = self._occupied(slot)
        if state.failure is not None:
            return []
        matcher, before = state.matcher, len(state.drafts)
        offered = [int(token) for token in drafts[: self._max_drafts - before]]
        stops = state.stops
        is_past_stop = False
        try:
            if matcher is not None:
                state.stand_after(matcher, before)
            for token in offered:
                if token in stops or not self._accepts(matcher, token):
                    is_past_stop = token in stops or (
                        matcher is not None and matcher.is_terminated()
                    )
                    break
                state.drafts.append(token)
            if matcher is not None:
                state.advanced = len(state.drafts)
        except Exception as error:  # an engine's bug ends this request, not the step
            state.failure = error
            del state.drafts[before:]
            return []
        usable = state.drafts[before:]
        state.drafts_proposed += len(drafts)
        state.drafts_usable += len(usable)
        state.drafts_past_limit += len(drafts) - len(offered)
        if is_past_stop:
            state.drafts_past_stop += len(offered) - len(usable)
        else:
            state.drafts_refused += len(offered) - len(usable)
        return usable

    def forced(self, slot: int) -> list[int]:
        """The tokens that the grammar forces after the accepted text and the step's drafts so far.

        Args:
            slot: an occupied slot.

        Returns:
            Good drafts (see `GrammarMatcher.forced_tokens`), perhaps more than the step has room
            for. Empty for free text and for a slot that has terminated or failed.
        """
        state = self._occupied(slot)
        if state.matcher is None or state.failure is not None:
            return []
        try:
            return list(state.forced_after(state.matcher, len(state.drafts)))
        except Exception as error:  # an engine's bug ends this request, not the step
            state.failure = error
            return []

    def fill(self, masks: NDArray[np.int32], enabled: NDArray[np.int32]) -> None:
        """Writes the missing masks of the step for every row of every slot. Never raises.

        Rows of this step that an earlier `fill` has computed stay as they are, so the caller passes
        the same arrays until the step ends, unchanged.

        Args:
            masks: int32 [B, n, W], C-contiguous, n = N, or fewer where no slot has more than n - 1
                drafts. Guided slots: row i is what may follow the accepted text and the first i
                drafts; rows past the drafts repeat the last one (nothing is sampled there); only
                stop tokens after termination or failure. Free text and free slots: all ones.
            enabled: int32 [B, n]: 1 for rows under a grammar, 0 for rows to leave alone.
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
        n = masks.shape[1]
        for slot, state in enumerate(self._slots):
            if state is not None:
                state.steps += not state.rows
            if state is None or state.matcher is None:
                masks[slot] = -1
                enabled[slot] = 0
            else:
                started = time.perf_counter()
                enabled[slot] = 1
                try:
                    if state.failure is None:
                        _fill_slot(state, state.matcher, rows, words, slot * n, n)
                except Exception as error:  # of this slot alone
                    state.failure = error
                if state.failure is not None:
                    masks[slot] = state.matcher.stop_row
                state.fill_seconds += time.perf_counter() - started
            if state is not None:
                state.rows = len(state.drafts) + 1

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
        if state.matcher is None or state.failure is not None:
            state.settle(0)
            accepted = len(tokens) if state.matcher is None else 0
        else:
            accepted = _accept(state, state.matcher, tokens)
        state.accepted += accepted
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

        Call it between `advance` and `propose`: later the matcher may stand after drafts.
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
            drafts_usable=state.drafts_usable,
            drafts_past_limit=state.drafts_past_limit,
            drafts_past_stop=state.drafts_past_stop,
            drafts_refused=state.drafts_refused,
            dead_ends=state.dead_ends,
            fill_seconds=state.fill_seconds,
        )

    def _accepts(self, matcher: GrammarMatcher | None, token: int) -> bool:
        if matcher is None:
            return 0 <= token < self._vocab_size
        return matcher.accept_token(token)

    def _check_arrays(self, masks: Any, enabled: Any) -> None:
        slots, n, words = self.mask_shape
        needed = 1 + max(len(state.drafts) if state is not None else 0 for state in self._slots)
        if isinstance(masks, np.ndarray) and masks.ndim == 3 and needed <= masks.shape[1] < n:
            n = masks.shape[1]
        for name, array, shape in (
            ("masks", masks, (slots, n, words)),
            ("enabled", enabled, (slots, n)),
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


def _fill_slot(
    state: _Slot,
    matcher: GrammarMatcher,
    rows: NDArray[np.int32],
    words: NDArray[np.uint32],
    first: int,
    n: int,
) -> None:
    """Writes the slot's missing rows among `rows[first : first + n]`; `words` is the same memory."""
    missing = range(state.rows, len(state.drafts) + 1)
    last = first
    for i in missing:
        last = first + i
        state.filled += 1
        # Every row asks anew: what the row before says about this one differs where the tokenizer
        # would segment the text otherwise from here on, and would depend on where the step began.
        forced = state.forced_after(matcher, i) if state.force else []
        if forced:
            rows[last] = 0
            words[last, forced[0] // 32] = 1 << forced[0] % 32
            continue
        state.stand_after(matcher, i)
        matcher.fill_next_token_bitmask(rows, last)
        # Bits at and above V are 0, so any bit is a legal token. The largest word tells in a
        # tenth of the time of `any`, which is slow for integers.
        row = words[last]
        if not row[row.argmax()]:
            rows[last] = matcher.stop_row
            if i == 0:
                state.failure = matcher.explain_dead_end()
            else:
                state.dead_row = i
                state.dead_ends += 1
            break
    if missing:
        rows[last + 1 : first + n] = rows[last]


def _accept(state: _Slot, matcher: GrammarMatcher, tokens: Sequence[int]) -> int:
    """Brings the matcher from `advanced` drafts to the emitted tokens; returns how many count."""
    dead_row, matched = state.dead_row, 0
    while matched < min(state.advanced, len(tokens)) and tokens[matched] == state.drafts[matched]:
        matched += 1
    accepted = matched
    try:
        state.settle(matched)
        for token in tokens[matched:]:
            if accepted == dead_row:
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
