"""The decode loop's host side: rows, drafts, rollback and the isolation of failures."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import (
    DeadEndError,
    GuidedBatch,
    RefusedTokenError,
    SlotCounters,
    bitmask_words,
)
from grammar_host.backends.scripted import Script
from tests.grammar_host.common import (
    MATCHERS,
    SCRIPT,
    STOP,
    VOCAB_SIZE,
    bits,
    legal,
    mask,
    scripted_matcher,
    tokenize,
    walk,
)

WORDS = bitmask_words(VOCAB_SIZE)
LETTERS = Script.of([{97 + i, 65 + i} for i in range(8)])


def fill(batch: GuidedBatch) -> tuple[np.ndarray, np.ndarray]:
    """Masks and flags, written over garbage so that every unwritten word shows."""
    masks = np.full(batch.mask_shape, 0x5A5A5A5A, np.int32)
    enabled = np.full(batch.mask_shape[:2], 77, np.int32)
    batch.fill(masks, enabled)
    return masks, enabled


def legal_row(row: np.ndarray) -> list[int]:
    return [int(token) for token in bits(row)]


def step(batch: GuidedBatch, slot: int, drafts: list[int], picks: list[int]) -> list[int]:
    """One step of one slot as a device would run it; `picks[i]` decides the token of row i."""
    used = batch.propose(slot, drafts)
    masks, _ = fill(batch)
    emitted = []
    for i in range(min(1 + len(used), len(picks))):
        options = legal_row(masks[slot, i])
        emitted.append(options[picks[i] % len(options)])
        if i == len(used) or emitted[-1] != used[i] or emitted[-1] == STOP:
            break
    return emitted[: batch.advance(slot, emitted)]


@pytest.mark.parametrize("name", MATCHERS)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_drafts_change_nothing_but_the_number_of_steps(name, data):
    """With a sampler that depends on the position only, drafts of any quality give equal text."""
    picks = data.draw(st.lists(st.integers(0, 10**6), min_size=14, max_size=14))
    straight = walk(MATCHERS[name](), picks)
    batch = GuidedBatch(1, 3, VOCAB_SIZE)
    batch.admit(0, MATCHERS[name]())
    written: list[int] = []
    rounds = 0
    while len(written) < len(straight) and not batch.is_terminated(0):
        guess = straight[len(written) :]
        drafts = [
            token if data.draw(st.booleans()) else data.draw(st.integers(-1, VOCAB_SIZE))
            for token in guess[:4]
        ]
        written += step(batch, 0, drafts, picks[len(written) :])
        rounds += 1
        assert batch.failure(0) is None
    assert written == straight
    counters = batch.counters(0)
    assert counters.steps == rounds
    assert counters.accepted == len(written)
    # Every step emits one token past its right drafts; the token limit may cut the last one's.
    verified = counters.advanced - counters.rolled_back
    assert verified - 1 <= len(written) - rounds <= verified
    # The matcher stands exactly after the written text.
    fresh = MATCHERS[name]()
    assert fresh.validate_tokens(written) == len(written)
    for token in written:
        fresh.accept_token(token)
    masks, _ = fill(batch)
    np.testing.assert_array_equal(masks[0, 0], mask(fresh))


def test_rows_follow_the_drafts():
    batch = GuidedBatch(1, 4, VOCAB_SIZE)
    batch.admit(0, scripted_matcher(LETTERS))
    assert batch.propose(0, [97, 66]) == [97, 66]
    masks, enabled = fill(batch)
    assert [legal_row(row) for row in masks[0]] == [
        [65, 97],
        [66, 98],
        [67, 99],
        [67, 99],
        [67, 99],
    ]
    np.testing.assert_array_equal(enabled, np.ones((1, 5), np.int32))
    assert batch.advance(0, [97, 98]) == 2  # the first draft was right, the second was not
    masks, _ = fill(batch)
    assert [legal_row(row) for row in masks[0]] == [[67, 99]] * 5
    assert batch.counters(0) == SlotCounters(
        steps=2,
        filled=4,
        accepted=2,
        advanced=2,
        rolled_back=1,
        drafts_proposed=2,
        drafts_usable=2,
        fill_seconds=batch.counters(0).fill_seconds,
    )
    assert batch.counters(0).fill_seconds > 0


def test_drafts_are_cut_where_they_cannot_be_used():
    batch = GuidedBatch(2, 3, VOCAB_SIZE)
    batch.admit(0, scripted_matcher(LETTERS))
    batch.admit(1, None)
    assert batch.propose(0, [97, 98, 99, 100]) == [97, 98, 99]  # at most three
    assert batch.counters(0).drafts_past_limit == 1
    assert batch.propose(0, [97, STOP, 98, 99]) == [97]  # before a stop token
    assert batch.counters(0).drafts_past_stop == 2
    assert batch.counters(0).drafts_past_limit == 2
    assert batch.propose(0, [97, VOCAB_SIZE, 98]) == [97]  # outside of the vocabulary
    assert batch.propose(0, [-1]) == []
    assert batch.counters(0).drafts_refused == 3
    assert batch.propose(0, [97, 97, 98]) == [97]  # the grammar refuses the second
    assert batch.counters(0).drafts_refused == 5
    assert batch.propose(0, []) == []
    assert batch.propose(1, [5, STOP, 7, 8]) == [5, STOP, 7]  # free text knows no stop tokens
    assert batch.propose(1, [5, VOCAB_SIZE, 7]) == [5]
    assert batch.counters(0).drafts_proposed == 4 + 4 + 3 + 1 + 3
    assert batch.counters(0).drafts_usable == 3 + 1 + 1 + 1
    assert batch.failure(0) is None


def test_drafts_are_forgotten_after_their_step():
    batch = GuidedBatch(1, 2, VOCAB_SIZE)
    batch.admit(0, scripted_matcher(LETTERS))
    batch.propose(0, [97, 98])
    fill(batch)
    assert batch.advance(0, [65]) == 1
    masks, _ = fill(batch)  # no propose: no drafts
    assert [legal_row(row) for row in masks[0]] == [[66, 98]] * 3


def test_a_second_fill_leaves_the_masks_as_they_are():
    batch = GuidedBatch(1, 2, VOCAB_SIZE)
    batch.admit(0, MATCHERS["schema"]())
    batch.propose(0, tokenize('{"name"')[:2])
    masks, enabled = fill(batch)
    first = masks.copy()
    batch.fill(masks, enabled)
    np.testing.assert_array_equal(first, masks)
    assert (batch.counters(0).steps, batch.counters(0).filled) == (1, 3)
    assert batch.advance(0, tokenize('{"name"')) == len(tokenize('{"name"'))


def test_a_step_whose_tokens_never_came_did_not_happen():
    batch = GuidedBatch(1, 2, VOCAB_SIZE)
    batch.admit(0, scripted_matcher(LETTERS))
    batch.propose(0, [97, 98])
    fill(batch)
    assert batch.propose(0, [65]) == [65]
    masks, _ = fill(batch)
    assert [legal_row(row) for row in masks[0]] == [[65, 97], [66, 98], [66, 98]]
    assert batch.advance(0, [65, 66]) == 2
    counters = batch.counters(0)
    assert (counters.steps, counters.filled, counters.accepted) == (2, 5, 2)
    assert (counters.advanced, counters.rolled_back) == (3, 2)


@settings(deadline=None, max_examples=25)
@given(
    names=st.lists(st.sampled_from([*MATCHERS, "free", "empty"]), min_size=1, max_size=6),
    data=st.data(),
)
def test_every_row_of_a_mixed_batch_equals_the_row_of_a_batch_of_one(names, data):
    slots = len(names) + 2
    order = data.draw(st.permutations(range(slots)))[: len(names)]
    batch = GuidedBatch(slots, 1, VOCAB_SIZE)
    alone = {}
    for name, slot in zip(names, order, strict=True):
        if name == "empty":
            continue
        matcher = None if name == "free" else MATCHERS[name]()
        if matcher is not None:
            walk(matcher, data.draw(st.lists(st.integers(0, 10**6), max_size=5)))
            alone[slot] = matcher.fork()
        batch.admit(slot, matcher)
    masks, enabled = fill(batch)
    for slot in range(slots):
        if slot in alone:
            np.testing.assert_array_equal(masks[slot], np.stack([mask(alone[slot])] * 2))
            assert list(enabled[slot]) == [1, 1]
        else:
            assert np.all(masks[slot] == -1)
            assert list(enabled[slot]) == [0, 0]


def test_the_last_bit_of_a_word_counts_as_a_legal_token():
    batch = GuidedBatch(1, 1, VOCAB_SIZE)
    batch.admit(0, scripted_matcher(Script.of([{31}, {63}])))
    batch.propose(0, [31])
    masks, _ = fill(batch)
    assert [legal_row(row) for row in masks[0]] == [[31], [63]]
    assert batch.failure(0) is None
    assert batch.advance(0, [31, 63]) == 2


def test_a_dead_end_fails_its_slot_only():
    batch = GuidedBatch(3, 1, VOCAB_SIZE)
    dead = Script(LETTERS.allowed, dead_end_at=1)
    for slot, script in enumerate([LETTERS, dead, LETTERS]):
        batch.admit(slot, scripted_matcher(script))
    fill(batch)
    for slot in range(3):
        assert batch.advance(slot, [97]) == 1
    masks, enabled = fill(batch)
    assert isinstance(batch.failure(1), DeadEndError)
    assert [legal_row(row) for row in masks[1]] == [[STOP], [STOP]]
    assert np.all(enabled == 1)
    for slot in (0, 2):
        assert batch.failure(slot) is None
        assert legal_row(masks[slot, 0]) == [66, 98]
    # The failed slot stays failed, ignores its tokens and offers only stop tokens.
    assert batch.propose(1, [98]) == []
    assert batch.advance(1, [STOP]) == 0
    masks, _ = fill(batch)
    assert legal_row(masks[1, 0]) == [STOP]
    assert not batch.is_terminated(1)
    assert not batch.is_completed(1)
    assert batch.advance(0, [98]) == 1


@pytest.mark.parametrize(
    ("emitted", "accepted", "fails"),
    [
        ([97, 98, STOP], 2, True),  # sampled from the dead row
        ([97, 98], 2, False),  # cut by the token limit just before the dead row
        ([97, 66], 2, False),  # left the drafts before the dead row
        ([65], 1, False),
        ([], 0, False),
    ],
)
def test_a_dead_end_on_a_draft_row(emitted, accepted, fails):
    batch = GuidedBatch(1, 3, VOCAB_SIZE)
    batch.admit(0, scripted_matcher(Script(LETTERS.allowed, dead_end_at=2)))
    assert batch.propose(0, [97, 98, 99]) == [97, 98]
    masks, _ = fill(batch)
    assert [legal_row(row) for row in masks[0]] == [[65, 97], [66, 98], [STOP], [STOP]]
    assert batch.failure(0) is None
    assert batch.advance(0, emitted) == accepted
    assert isinstance(batch.failure(0), DeadEndError) == fails
    if not fails:
        masks, _ = fill(batch)
        assert isinstance(batch.failure(0), DeadEndError) == (accepted == 2)


def test_a_failing_fill_stays_in_its_slot():
    batch = GuidedBatch(3, 2, VOCAB_SIZE)
    batch.admit(0, scripted_matcher(LETTERS))
    batch.admit(1, scripted_matcher(Script(LETTERS.allowed, fail_at=0)))
    batch.admit(2, scripted_matcher(Script(LETTERS.allowed, fail_at=1)))
    batch.propose(2, [97, 98])
    masks, _ = fill(batch)
    assert batch.failure(0) is None
    assert legal_row(masks[0, 0]) == [65, 97]
    for slot in (1, 2):
        assert str(batch.failure(slot)).startswith("the script fails")
        assert [legal_row(row) for row in masks[slot]] == [[STOP]] * 3
        assert batch.advance(slot, [97]) == 0


def test_an_illegal_token_fails_its_slot_and_keeps_those_before_it():
    batch = GuidedBatch(1, 2, VOCAB_SIZE)
    batch.admit(0, scripted_matcher(LETTERS))
    batch.propose(0, [97])
    fill(batch)
    assert batch.advance(0, [97, 200]) == 1
    failure = batch.failure(0)
    assert isinstance(failure, RefusedTokenError)
    assert failure.token_id == 200
    assert "200" in str(failure)


def test_termination_and_what_comes_after_it():
    batch = GuidedBatch(1, 2, VOCAB_SIZE)
    batch.admit(0, scripted_matcher(Script.of([{97}])))
    batch.propose(0, [97, STOP])
    masks, _ = fill(batch)
    assert [legal_row(row) for row in masks[0]] == [[97], [STOP], [STOP]]
    assert batch.advance(0, [97, STOP, 97]) == 2  # verification ran past the end
    assert batch.failure(0) is None
    assert batch.is_terminated(0)
    assert batch.is_completed(0)
    for _ in range(2):
        assert batch.propose(0, [97]) == []
        masks, _ = fill(batch)
        assert [legal_row(row) for row in masks[0]] == [[STOP]] * 3
        assert batch.advance(0, [STOP]) == 0
        assert batch.failure(0) is None
    assert batch.counters(0).accepted == 2


def test_completed_is_not_terminated():
    batch = GuidedBatch(2, 0, VOCAB_SIZE)
    batch.admit(0, MATCHERS["regex"]())
    batch.admit(1, None)
    fill(batch)
    assert not batch.is_completed(0)
    assert batch.advance(0, tokenize("ab12")) == 2
    assert batch.is_completed(0)
    assert not batch.is_terminated(0)
    assert batch.is_completed(1)
    assert batch.advance(1, [1, 2, 3]) == 3
    assert not batch.is_terminated(1)
    assert batch.counters(1).accepted == 3


def test_release_and_readmit():
    batch = GuidedBatch(2, 1, VOCAB_SIZE)
    batch.admit(0, scripted_matcher(Script(LETTERS.allowed, fail_at=0)))
    fill(batch)
    assert batch.failure(0) is not None
    with pytest.raises(ValueError, match="occupied"):
        batch.admit(0, None)
    batch.release(0)
    masks, enabled = fill(batch)
    assert np.all(masks == -1)
    assert not np.any(enabled)
    batch.admit(0, scripted_matcher(SCRIPT))
    assert batch.failure(0) is None
    assert batch.counters(0) == SlotCounters()
    masks, _ = fill(batch)
    assert legal_row(masks[0, 0]) == [97, 98]


def test_misuse_is_refused():
    batch = GuidedBatch(2, 1, VOCAB_SIZE)
    for call in (
        lambda: batch.release(0),
        lambda: batch.propose(0, []),
        lambda: batch.extend(0, []),
        lambda: batch.forced(0),
        lambda: batch.advance(0, []),
        lambda: batch.failure(0),
        lambda: batch.counters(0),
        lambda: batch.is_terminated(0),
        lambda: batch.is_completed(0),
    ):
        with pytest.raises(ValueError, match="slot 0 is free"):
            call()
    for slot in (-1, 2):
        with pytest.raises(ValueError, match="not within"):
            batch.admit(slot, None)
    with pytest.raises(ValueError, match="V="):
        batch.admit(0, scripted_matcher(SCRIPT, size=320))
    for slots, drafts, vocab in ((0, 0, 8), (1, -1, 8), (1, 0, 0)):
        with pytest.raises(ValueError, match="no batch"):
            GuidedBatch(slots, drafts, vocab)


@pytest.mark.parametrize(
    ("masks", "enabled"),
    [
        (np.zeros((2, 2, WORDS), np.uint32), np.zeros((2, 2), np.int32)),
        (np.zeros((2, 2, WORDS + 1), np.int32), np.zeros((2, 2), np.int32)),
        (np.zeros((2, 2, 2 * WORDS), np.int32)[..., ::2], np.zeros((2, 2), np.int32)),
        (np.zeros((2, 2, WORDS), np.int32), np.zeros((2, 3), np.int32)),
        (np.zeros((2, 3, WORDS), np.int32), np.zeros((2, 3), np.int32)),
        (np.zeros((2, 0, WORDS), np.int32), np.zeros((2, 0), np.int32)),
        (np.zeros((2, 1, WORDS), np.int32), np.zeros((2, 2), np.int32)),
        (np.zeros((2, 2, WORDS), np.int32), None),
    ],
)
def test_fill_never_raises_even_for_wrong_arrays(masks, enabled):
    batch = GuidedBatch(2, 1, VOCAB_SIZE)
    batch.admit(0, scripted_matcher(LETTERS))
    batch.admit(1, None)
    batch.fill(masks, enabled)
    assert "must be" in str(batch.failure(0))
    assert batch.failure(1) is None
    assert not np.any(masks)


class _BrokenEngine:
    """Raises from every method of a matcher, as after a crash inside an engine."""

    def __getattr__(self, name):
        def broken(*_):
            raise OSError(f"{name} broke")

        return broken


@pytest.mark.parametrize("moment", ["propose", "fill", "advance"])
def test_an_engine_that_breaks_fails_its_slot_at_any_moment(moment):
    batch = GuidedBatch(2, 1, VOCAB_SIZE)
    matcher = scripted_matcher(LETTERS)
    batch.admit(0, matcher)
    batch.admit(1, scripted_matcher(LETTERS))
    for now in ("propose", "fill", "advance"):
        if now == moment:
            matcher._engine = _BrokenEngine()
        if now == "propose":
            batch.propose(0, [97])
        elif now == "fill":
            fill(batch)
        else:
            batch.advance(0, [97, 98])
    assert isinstance(batch.failure(0), OSError)
    assert batch.advance(1, [97]) == 1
    masks, _ = fill(batch)
    assert legal_row(masks[0, 0]) == [STOP]
    assert batch.failure(1) is None


def test_fill_may_run_on_a_worker_thread():
    """The decode loop's protocol: the worker fills while the model runs, then the loop waits."""
    text = tokenize('{"name": "abc 日本", "age": 34}')
    batch = GuidedBatch(2, 2, VOCAB_SIZE)
    for slot in range(2):
        batch.admit(slot, MATCHERS["schema"]())
    masks = np.zeros(batch.mask_shape, np.int32)
    enabled = np.zeros(batch.mask_shape[:2], np.int32)
    position = 0
    with ThreadPoolExecutor(1) as worker:
        while position < len(text):
            for slot in range(2):
                batch.propose(slot, text[position : position + 2])
            worker.submit(batch.fill, masks, enabled).result()
            emitted = text[position : position + 3]
            for slot in range(2):
                for i, token in enumerate(emitted):
                    assert token in legal_row(masks[slot, i])
                assert batch.advance(slot, emitted) == len(emitted)
            position += len(emitted)
    assert batch.is_completed(0)
    assert batch.is_completed(1)


def test_the_cost_outside_of_the_engine_is_small():
    """Eight guided slots with two drafts each at a real vocabulary size: well under 1 ms a step.

    The engine here copies a prepared row, so what remains is the batch's own work; the bound is
    loose because the machine that runs the tests may be busy.
    """
    vocab_size = 49_152
    matchers = [scripted_matcher(LETTERS, size=vocab_size) for _ in range(8)]
    row = mask(matchers[0])
    batch = GuidedBatch(8, 2, vocab_size)
    for slot, matcher in enumerate(matchers):
        matcher._engine.fill_next_token_bitmask = lambda masks, index: masks[index].__setitem__(
            slice(None), row
        )
        batch.admit(slot, matcher)
    masks = np.zeros(batch.mask_shape, np.int32)
    enabled = np.zeros(batch.mask_shape[:2], np.int32)
    seconds = []
    for _ in range(100):
        started = time.perf_counter()
        for slot in range(8):
            batch.propose(slot, [97, 98])
        batch.fill(masks, enabled)
        for slot in range(8):
            batch.advance(slot, [])
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 1e-3
    assert legal(matchers[0])  # every slot did its work
    assert batch.counters(7).filled == 300


def test_free_text_drafts_no_stop_token():
    batch = GuidedBatch(1, 4, VOCAB_SIZE)
    batch.admit(0, None, stop_token_ids=[STOP])
    assert batch.propose(0, [1, STOP, 2]) == [1]
    assert batch.extend(0, [3]) == [3]
    counters = batch.counters(0)
    assert (counters.drafts_usable, counters.drafts_past_stop) == (2, 2)
