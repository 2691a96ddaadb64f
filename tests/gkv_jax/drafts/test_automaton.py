"""The suffix automaton against a search that looks everywhere."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkv_jax.drafts.automaton import Cursor, SuffixAutomaton
from tests.gkv_jax.drafts.naive import ends, longest_suffix


def texts(max_size: int) -> st.SearchStrategy[list[int]]:
    """Texts over one to three tokens, so that much repeats; with ids that no array index equals."""
    return st.sampled_from([[7], [0, 151_935], [3, 1_000, 2]]).flatmap(
        lambda alphabet: st.lists(st.sampled_from(alphabet), max_size=max_size)
    )


def string(automaton: SuffixAutomaton, cursor: Cursor) -> list[int]:
    return automaton.tokens[cursor.end - cursor.length : cursor.end]


@settings(deadline=None, max_examples=200)
@given(texts(40))
def test_the_longest_suffix_that_occurs_earlier(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for size, token in enumerate(text, start=1):
        automaton.extend(token)
        cursor = automaton.repeat()
        assert cursor.length == longest_suffix(text[:size], text[: size - 1])
        assert string(automaton, cursor) == text[size - cursor.length : size]
        if cursor.length:
            assert cursor.end in ends(text[: size - 1], text[size - cursor.length : size])


@settings(deadline=None, max_examples=200)
@given(texts(30), texts(8))
def test_tentative_tokens_are_found_and_leave_the_text_alone(
    text: list[int], ahead: list[int]
) -> None:
    automaton, untouched = SuffixAutomaton(text), SuffixAutomaton(text)
    cursor = automaton.repeat()
    for size, token in enumerate(ahead, start=1):
        cursor = automaton.advance(cursor, token)
        longer = text + ahead[:size]
        assert cursor.length == longest_suffix(longer, text)
        assert string(automaton, cursor) == longer[len(longer) - cursor.length :]
    assert vars(automaton) == vars(untouched)


def test_what_followed_lately_comes_before_what_followed_first() -> None:
    # "1 2 3" was followed by 4, then by 5.
    automaton = SuffixAutomaton([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3])
    cursor = automaton.repeat()
    assert (cursor.length, automaton.tokens[cursor.end]) == (3, 5)


def test_the_empty_text_repeats_nothing() -> None:
    automaton = SuffixAutomaton()
    assert automaton.repeat().length == 0
    assert automaton.advance(automaton.repeat(), 1).length == 0


@pytest.mark.parametrize("period", [1, 2, 7, 5_000])
def test_at_most_two_states_a_token(period: int) -> None:
    tokens = [(i * i) % period for i in range(5_000)]
    automaton = SuffixAutomaton(tokens)
    assert len(automaton._length) <= 2 * len(tokens)
    transitions = sum(target >= 0 for target in automaton._target)
    transitions += sum(map(len, automaton._more.values()))
    assert transitions <= 3 * len(tokens)
