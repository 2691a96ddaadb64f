"""The scripted engine: what it adds to the contract that all engines share."""

import time

import pytest

from grammar_host import GrammarCompiler, Guide
from grammar_host.backends.scripted import Script, ScriptedBackend
from tests.grammar_host.common import SCRIPT, STOP, legal, mask, scripted_matcher, tokenizer_info


def test_it_plays_the_script_and_then_stops():
    matcher = scripted_matcher(Script.of([{1, 2}, [3]]))
    assert legal(matcher) == [1, 2]
    assert matcher.accept_token(2)
    assert legal(matcher) == [3]
    assert not matcher.accept_token(2)
    assert matcher.accept_token(3)
    assert matcher.is_completed()
    assert legal(matcher) == [STOP]
    assert matcher.accept_token(STOP)
    matcher.rollback(3)
    assert legal(matcher) == [1, 2]


def test_it_dead_ends_and_fails_where_it_is_told_to():
    matcher = scripted_matcher(Script.of([{1}, {2}, {3}], dead_end_at=1, fail_at=2))
    assert matcher.accept_token(1)
    assert legal(matcher) == []
    assert not matcher.accept_token(2)
    matcher = scripted_matcher(Script.of([{1}, {2}], fail_at=1))
    assert legal(matcher) == [1]
    assert matcher.accept_token(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="position 1"):
            mask(matcher)
    matcher.rollback(1)
    assert legal(matcher) == [1]


def test_its_masks_take_as_long_as_they_are_told_to():
    matcher = scripted_matcher(Script.of([{1}], fill_delay_s=0.02))
    started = time.perf_counter()
    mask(matcher)
    assert time.perf_counter() - started >= 0.02


def test_it_serves_any_guide_through_the_compiler():
    compiler = GrammarCompiler(tokenizer_info(), ScriptedBackend(SCRIPT))
    grammar = compiler.compile(Guide.regex("whatever"))
    assert grammar.backend == "scripted"
    assert legal(grammar.matcher()) == [97, 98]
