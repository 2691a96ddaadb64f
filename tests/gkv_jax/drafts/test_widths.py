"""Which loop runs: by what is proposed, and by what steps have been seen to cost."""

import numpy as np
import pytest

from gkv_jax.drafts.widths import PROBE_EVERY, SWITCH_SECONDS, Program, Widths

NOTHING: list[list[str]] = [[], []]
FORCED = [["forced"] * 3, []]
"""Two rows, one of which has three drafts."""


def measured(seconds: dict[Program, float]) -> Widths:
    """As after a few steps of these costs."""
    widths = Widths()
    for _ in range(5):
        for program, cost in seconds.items():
            widths.observe_step(program, cost)
    return widths


def settled(widths: Widths, present: Program, proposals: list[list[str]]) -> Program:
    """Where steps with the same proposals end, before one is a probe."""
    for _ in range(PROBE_EVERY - 1):
        present = widths.choose(present, proposals)
    return present


def test_what_has_not_been_measured_is_tried() -> None:
    assert Widths().choose(None, NOTHING) == "narrow"
    assert Widths().choose(None, FORCED) == "wide"
    assert Widths().choose(None, NOTHING, [0, 2]) == "drafting"
    assert measured({"narrow": 0.01}).choose("narrow", FORCED) == "wide"
    assert measured({"wide": 0.01}).choose("wide", NOTHING, [0, 2]) == "drafting"


def test_a_loop_is_measured_before_it_is_left() -> None:
    """Else steps with drafts that come one by one would never be timed, and be tried for ever."""
    widths = measured({"narrow": 0.01})
    for _ in range(3):
        assert widths.choose("wide", NOTHING) == "wide"
        widths.observe_step("wide", 0.02)
    assert widths.choose("wide", NOTHING) == "narrow"


@pytest.mark.parametrize(("ratio", "expected"), [(1.0, "wide"), (2.0, "wide"), (3.0, "narrow")])
def test_a_wide_step_must_bring_what_it_costs(ratio: float, expected: Program) -> None:
    """Two rows and three drafts that are nearly always right: 2.4 times the tokens of a narrow step."""
    widths = measured({"narrow": 0.01, "wide": 0.01 * ratio})
    for present in ("narrow", "wide"):
        assert settled(widths, present, FORCED) == expected
        assert settled(widths, present, NOTHING) == ("narrow" if ratio > 1 else present)


def test_guesses_that_fail_lose_their_credit() -> None:
    widths = measured({"narrow": 0.01, "wide": 0.015})
    proposals = [["lookup"] * 3]
    assert settled(widths, "narrow", proposals) == "wide"
    for _ in range(100):
        widths.observe_drafts("lookup", [False])
    assert widths.rate("lookup") < 0.05 < widths.rate("forced")
    assert settled(widths, "wide", proposals) == "narrow"


def test_a_loop_is_left_when_staying_has_cost_as_much_as_leaving() -> None:
    lost = SWITCH_SECONDS / 4
    widths = measured({"narrow": 0.01, "wide": 0.01 + lost})
    stays = 0
    while widths.choose("wide", NOTHING) == "wide":
        stays += 1
    assert stays in (3, 4)  # the sum of four losses is the limit, give or take the rounding


def test_always_asks_no_clock() -> None:
    widths = Widths("always")
    for _ in range(10):
        widths.observe_step("wide", 1.0)
        widths.observe_step("narrow", 0.001)
    assert widths.choose("narrow", FORCED) == "wide"
    assert widths.choose("narrow", FORCED, [0, 1]) == "drafting"
    assert widths.choose("wide", NOTHING) == "narrow"


def test_one_slow_step_is_no_evidence() -> None:
    widths = measured({"narrow": 0.01, "wide": 0.011})
    widths.observe_step("wide", 10.0)
    assert settled(widths, "wide", FORCED) == "wide"


def test_a_chain_is_worth_what_its_drafts_bring() -> None:
    """Each is right with the same chance if those before it are: that chance is what is learned."""
    rng, widths, rates = np.random.default_rng(0), Widths(), []
    for _ in range(2000):
        misses = np.flatnonzero(rng.random(7) > 0.8)
        hits = misses[0] if len(misses) else 7
        widths.observe_drafts("lookup", [True] * hits + [False] * int(hits < 7))
        rates.append(widths.rate("lookup"))
    assert abs(np.mean(rates[200:]) - 0.8) < 0.03


def test_what_did_not_pay_is_tried_again() -> None:
    widths = measured({"narrow": 0.01, "wide": 0.05})
    chosen = [widths.choose("narrow", FORCED) for _ in range(2 * PROBE_EVERY)]
    assert chosen.count("wide") == 2
    assert settled(widths, "narrow", NOTHING) == "narrow"


def test_losses_before_a_good_step_are_forgotten() -> None:
    lost = SWITCH_SECONDS / 2.5
    widths = measured({"narrow": 0.01, "wide": 0.01 + lost})
    for _ in range(20):
        assert widths.choose("wide", NOTHING) == "wide"
        assert widths.choose("wide", NOTHING) == "wide"
        assert widths.choose("wide", FORCED) == "wide"
