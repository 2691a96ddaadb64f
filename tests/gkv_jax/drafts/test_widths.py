"""Which loop runs: by what is proposed, and by what steps have been seen to cost."""

import pytest

from gkv_jax.drafts.widths import SWITCH_SECONDS, Program, Widths

NOTHING: list[list[str]] = [[], []]
FORCED = [["forced"] * 3, []]
"""Two rows, one of which has three drafts."""


def measured(**seconds: float) -> Widths:
    """As after a few steps of these costs."""
    widths = Widths()
    for _ in range(5):
        for program, cost in seconds.items():
            widths.observe_step(program, cost)  # type: ignore[arg-type]
    return widths


def settled(widths: Widths, present: Program, proposals: list[list[str]]) -> Program:
    """Where many steps with the same proposals end."""
    for _ in range(1000):
        present = widths.choose(present, proposals)
    return present


def test_what_has_not_been_measured_is_tried() -> None:
    widths = Widths()
    assert widths.choose(None, NOTHING) == "narrow"
    assert widths.choose("narrow", FORCED) == "wide"
    assert widths.choose("wide", NOTHING) == "narrow"
    assert widths.choose("wide", NOTHING, [0, 2]) == "drafting"


@pytest.mark.parametrize(("ratio", "expected"), [(1.0, "wide"), (2.0, "wide"), (3.0, "narrow")])
def test_a_wide_step_must_bring_what_it_costs(ratio: float, expected: Program) -> None:
    """Two rows and three drafts that are nearly always right: 2.4 times the tokens of a narrow step."""
    widths = measured(narrow=0.01, wide=0.01 * ratio)
    for present in ("narrow", "wide"):
        assert settled(widths, present, FORCED) == expected
        assert settled(widths, present, NOTHING) == ("narrow" if ratio > 1 else present)


def test_guesses_that_fail_lose_their_credit() -> None:
    widths = measured(narrow=0.01, wide=0.015)
    proposals = [["lookup"] * 3]
    assert settled(widths, "narrow", proposals) == "wide"
    for _ in range(100):
        widths.observe_drafts("lookup", 3, 0)
    assert widths.rate("lookup") < 0.01 < widths.rate("forced")
    assert settled(widths, "wide", proposals) == "narrow"


def test_a_loop_is_left_when_staying_has_cost_as_much_as_leaving() -> None:
    lost = SWITCH_SECONDS / 4
    widths = measured(narrow=0.01, wide=0.01 + lost)
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
    widths = measured(narrow=0.01, wide=0.011)
    widths.observe_step("wide", 10.0)
    assert settled(widths, "wide", FORCED) == "wide"
