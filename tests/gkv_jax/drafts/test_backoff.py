"""The throttle of a source that guesses wrong."""

from hypothesis import given
from hypothesis import strategies as st

from gkv_jax.drafts import Backoff
from gkv_jax.drafts.backoff import MAX_PAUSE, PATIENCE


def pauses(backoff: Backoff, rejected: int) -> list[int]:
    """Steps sat out after each of some proposals of which nothing was accepted."""
    out = []
    for _ in range(rejected):
        backoff.observe(4, 0)
        out.append(0)
        while not backoff.ready():
            out[-1] += 1
    return out


def test_pauses_double_up_to_a_limit() -> None:
    backoff = Backoff()
    assert backoff.ready()
    few = [0] * (PATIENCE - 1)
    assert pauses(backoff, PATIENCE + 7) == [*few, 1, 2, 4, 8, 16, 32, 32, 32]


def test_an_accepted_token_ends_it() -> None:
    backoff = Backoff()
    pauses(backoff, PATIENCE + 3)
    backoff.observe(4, 0)
    backoff.observe(4, 1)
    assert backoff.ready()
    assert pauses(backoff, PATIENCE + 1)[-2:] == [1, 2]


def test_no_proposal_is_no_mistake() -> None:
    backoff = Backoff()
    pauses(backoff, PATIENCE + 1)
    backoff.observe(0, 0)
    assert backoff.ready()
    assert pauses(backoff, 1) == [4]


@given(st.lists(st.booleans(), max_size=200))
def test_a_source_that_is_always_wrong_costs_few_steps(has_guess: list[bool]) -> None:
    backoff = Backoff()
    wrong = 0
    for guess in has_guess:
        if backoff.ready() and guess:
            backoff.observe(4, 0)
            wrong += 1
    # 1 + 2 + ... + 32 steps are sat out by six mistakes, 32 by each one after them.
    assert wrong <= PATIENCE + 5 + len(has_guess) / (MAX_PAUSE + 1)
