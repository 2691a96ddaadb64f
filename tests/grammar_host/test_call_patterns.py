"""What calls look like: found whole or begun, without reading a text twice."""

import dataclasses
import itertools
import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grammar_host.call_forms import CallFormName
from grammar_host.call_patterns import CallPatterns, Pattern, call_patterns

NAMES: tuple[CallFormName, ...] = get_args(CallFormName)


def patterns_of(patterns: CallPatterns) -> list[Pattern]:
    return [
        found
        for field in dataclasses.fields(patterns)
        if (found := getattr(patterns, field.name)) is not None
    ]


ALL = [(name, pattern) for name in NAMES for pattern in patterns_of(call_patterns(name))]


@pytest.mark.parametrize(("name", "pattern"), ALL, ids=[name for name, _ in ALL])
def test_no_two_pieces_may_share_a_run_of_letters(name: CallFormName, pattern: Pattern) -> None:
    """Then a search tries every split of the run: it takes the square of its length."""
    for variant, letter in itertools.product(pattern.variants, " a0"):
        takers = 0
        for piece in map(re.compile, variant):
            if piece.fullmatch(letter * 1000):
                takers += 1
            elif not piece.fullmatch(""):  # it has to be there, and parts what is around it
                takers = 0
            assert takers <= 1, (variant, letter)


def test_such_pieces_are_noticed() -> None:
    bad = Pattern.of((re.escape("["), r"\s*", "[a-z]*", r"\s*", re.escape("]")))
    with pytest.raises(AssertionError):
        test_no_two_pieces_may_share_a_run_of_letters("hermes", bad)


WRITTEN: dict[CallFormName, str] = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {',
    "llama": '<|python_tag|>{"type": "function", "name": "f", "parameters": {',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {',
    "mistral_args": "[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{",
}


@given(name=st.sampled_from(NAMES), place=st.integers(1))
def test_what_begins_like_a_call_is_begun_and_not_whole(name: CallFormName, place: int) -> None:
    text, patterns = WRITTEN[name], call_patterns(name, ("f",))
    assert patterns.head.whole.fullmatch(text[:-1] + "{", 0, len(text)) is None
    assert patterns.head.whole.match(text)
    begun = text[: 1 + place % (len(text) - 1)]
    assert patterns.head.begun.match(begun)
    assert not patterns.head.whole.match(begun)
    assert not patterns.head.begun.match(begun + "\0")
