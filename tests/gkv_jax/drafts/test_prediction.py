"""Predicted output: followed by position, found again after an edit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkv_jax.drafts import MAX_PREDICTION_TOKENS, PredictedDrafts
from gkv_jax.drafts.prediction import MAX_MATCH
from gkv_jax.drafts.source import MIN_MATCH
from gkv_jax.errors import UserError
from tests.gkv_jax.drafts.naive import ends, longest_suffix

PREDICTION = list(range(100, 140))


@pytest.mark.parametrize("done", [0, 1, 17, 39, 40])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_an_output_as_predicted_is_followed_by_position(done: int, ahead: int) -> None:
    source = PredictedDrafts(PREDICTION)
    at = done + ahead
    proposed = source.propose(PREDICTION[:done], PREDICTION[done:at], 4)
    assert list(proposed) == PREDICTION[at : at + 4]


@pytest.mark.parametrize(
    ("edited", "resumes_at"),
    [
        ([*PREDICTION[:10], 1, 2, 3, *PREDICTION[10:]], 10),  # insertion
        (PREDICTION[:10] + PREDICTION[20:], 20),  # deletion
        ([*PREDICTION[:10], 1, 2, 3, *PREDICTION[11:]], 11),  # replaced word
        (PREDICTION[20:30] + PREDICTION[10:20], 10),  # moved
        ([1, *PREDICTION], 0),  # the output does not even begin as predicted
    ],
)
def test_the_place_is_found_again_after_an_edit(edited: list[int], resumes_at: int) -> None:
    source = PredictedDrafts(PREDICTION)
    found_at = edited.index(PREDICTION[resumes_at]) + MIN_MATCH
    for size in range(len(edited)):
        proposed = list(source.propose(edited[:size], [], 4))
        if size >= found_at:
            at = PREDICTION.index(edited[size])
            assert proposed == PREDICTION[at : at + 4]


def test_tokens_ahead_may_leave_the_prediction_and_are_then_forgotten() -> None:
    source = PredictedDrafts(PREDICTION)
    assert list(source.propose(PREDICTION[:5], [1], 2)) == []
    assert list(source.propose(PREDICTION[:5], [1, *PREDICTION[20:22]], 2)) == PREDICTION[22:24]
    assert list(source.propose(PREDICTION[:5], [], 2)) == PREDICTION[5:7]


def test_of_equal_places_the_next_one_is_taken() -> None:
    # The same line three times; the output replaces the word before the second one.
    prediction = [1, 8, 9, 10, 2, 8, 9, 11, 3, 8, 9, 12]
    source = PredictedDrafts(prediction)
    output = prediction[:4]
    assert list(source.propose(output, [], 1)) == [2]
    output += [5, 8, 9]
    assert list(source.propose(output, [], 1)) == [11]
    # A wrong guess does not count as a place that the output was seen to follow.
    output += [5, 8, 9]
    assert list(source.propose(output, [], 1)) == [11]


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.lists(st.integers(0, 2), max_size=24),
    st.lists(st.integers(0, 2), max_size=4),
)
def test_after_a_departure_the_longest_match_counts(
    prediction: list[int], rest: list[int], ahead: list[int]
) -> None:
    output = [9, *rest]  # a token that the prediction never has
    text = (output + ahead)[-MAX_MATCH:]
    proposed = list(PredictedDrafts(prediction).propose(output, ahead, 3))
    length = longest_suffix(text, prediction)
    places = ends(prediction, text[len(text) - length :])
    if length < MIN_MATCH:
        assert proposed == []
    elif ahead:  # the place may have been found before them: not the first, but a place
        assert proposed in [prediction[end : end + 3] for end in places]
    else:
        assert proposed == prediction[places[0] : places[0] + 3]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=20), st.lists(st.integers(0, 3), max_size=30)
)
def test_proposals_are_a_piece_of_the_prediction(prediction: list[int], output: list[int]) -> None:
    source = PredictedDrafts(prediction)
    for size in range(len(output) + 1):
        proposed = list(source.propose(output[:size], [], 3))
        assert ends(prediction, proposed)
        if output[:size] == prediction[:size]:
            assert proposed == prediction[size : size + 3]


def test_the_longest_prediction_is_allowed() -> None:
    prediction = [1] * MAX_PREDICTION_TOKENS
    source = PredictedDrafts(prediction)
    assert list(source.propose([2, 1, 1], [], 2)) == [1, 1]


@pytest.mark.parametrize("size", [0, MAX_PREDICTION_TOKENS + 1])
def test_no_tokens_or_too_many_are_refused(size: int) -> None:
    with pytest.raises(UserError, match=r"^sampling\.prediction .* leave it out[^\n]*$"):
        PredictedDrafts([1] * size)
