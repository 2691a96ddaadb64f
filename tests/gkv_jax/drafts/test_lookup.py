"""Prompt lookup: what followed the same tokens before."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkv_jax.drafts import LookupDrafts, lookup
from gkv_jax.drafts.source import MIN_MATCH
from tests.gkv_jax.drafts.naive import ends, longest_suffix

TOKENS = st.lists(st.integers(0, 2), max_size=20)


@settings(deadline=None, max_examples=300)
@given(TOKENS, st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=5), TOKENS, st.data())
def test_proposes_what_followed_the_longest_match(
    prompt: list[int], steps: list[list[int]], ahead: list[int], data: st.DataObject
) -> None:
    source = LookupDrafts(prompt)
    output: list[int] = []
    for step in [[], *steps]:
        output += step
        tried = ahead[: data.draw(st.integers(0, 3))]
        limit = data.draw(st.integers(0, 6))
        proposed = list(source.propose(output, tried, limit))

        corpus = prompt + output
        text = corpus + tried
        # Without tokens ahead, the end of the text is not an earlier occurrence of itself.
        searched = corpus if tried else corpus[:-1]
        length = longest_suffix(text, searched)
        if length < MIN_MATCH:
            assert proposed == []
            continue
        candidates = []
        for end in ends(searched, text[len(text) - length :]):
            endless = itertools.cycle(text[end:])
            candidates.append(list(itertools.islice(endless, limit)))
        assert proposed in candidates


def test_a_match_spans_prompt_and_output() -> None:
    assert list(LookupDrafts([1, 2, 3, 4, 5, 1]).propose([2], [], 3)) == [3, 4, 5]


def test_one_token_is_no_match() -> None:
    assert list(LookupDrafts([1, 2, 3, 1]).propose([], [], 3)) == []


def test_tokens_ahead_are_followed_and_then_forgotten() -> None:
    source = LookupDrafts([1, 2, 3, 1, 2, 4, 5, 6])
    assert list(source.propose([1], [2, 4], 2)) == [5, 6]
    assert list(source.propose([1, 2], [], 1)) in ([3], [4])


def test_a_loop_goes_on_past_the_end_of_the_text() -> None:
    assert list(LookupDrafts([9, 1, 2, 3, 1, 2]).propose([3], [], 7)) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("prompt_size", [0, 3, 500])
def test_memory_is_bounded_and_the_last_half_is_searched(
    prompt_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "MAX_CORPUS_TOKENS", 64)
    source = LookupDrafts(list(range(prompt_size)))
    output: list[int] = []
    for token in range(1_000, 1_300):
        output.append(token)
        source.propose(output, [], 4)
        assert len(source._corpus.tokens) <= 64
        if len(output) >= 32:
            assert list(source.propose(output, output[-32:-30], 2)) == output[-30:-28]
    assert list(source.propose(output, output[-66:-64], 2)) == []


def test_a_long_prompt_is_searched_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MAX_CORPUS_TOKENS", 64)
    source = LookupDrafts(list(range(1_000)))
    assert list(source.propose([], [936, 937], 2)) == [938, 939]
    assert list(source.propose([], [934, 935], 2)) == []
