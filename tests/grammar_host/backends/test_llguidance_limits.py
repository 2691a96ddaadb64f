"""LLGuidance at its limits: whatever ends one request leaves the others, and its own past, alone."""

from __future__ import annotations

import threading

import pytest
from llguidance import LLParserLimits

from grammar_host import (
    GrammarError,
    GrammarMatcher,
    GrammarTooComplexError,
    Guide,
    TokenizerInfo,
)
from grammar_host.backends.llguidance import LLGuidanceBackend, _Engines
from tests.grammar_host.common import (
    GUIDES,
    STOP,
    VOCAB_SIZE,
    engine_matcher,
    legal,
    mask,
    tokenize,
    tokenizer_info,
)


def limited(guide: Guide, **limits: int) -> GrammarMatcher:
    backend = LLGuidanceBackend(tokenizer_info(), limits=LLParserLimits(**limits))
    return GrammarMatcher(backend.compile(guide).new_matcher(frozenset({STOP})), VOCAB_SIZE, {STOP})


RIGHT = Guide.lark('start: x\nx: "a" x | "a"')
WIDE = Guide.regex("a{3}([a-m]{1,30}x|[a-p]{1,40}y|[a-z]{1,50}z){9}")


@pytest.mark.parametrize(
    ("guide", "limits", "text"),
    [
        (RIGHT, {"max_items_in_row": 20}, "a" * 40),
        (WIDE, {"step_lexer_fuel": 300}, "aaabcd"),
        (WIDE, {"max_lexer_states": 60}, "aaabcdefghijkabcx" * 9),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_a_limit_ends_the_request_at_the_step_that_reaches_it(guide, limits, text):
    matcher = limited(guide, **limits)

    def generate():
        for byte in text.encode():
            mask(matcher)
            assert matcher.accept_token(byte)

    with pytest.raises(GrammarTooComplexError, match="gave up after") as info:
        generate()
    assert info.value.param == guide.param
    assert "\n" not in str(info.value)
    # The state is the one before the step, and everything before it still works.
    assert 0 < matcher.num_accepted < len(text)
    matcher.rollback(matcher.num_accepted - 1)
    assert matcher.accept_token(ord("a"))
    matcher.rollback(2)
    assert ord("a") in legal(matcher)


@pytest.mark.parametrize("limits", [{"initial_lexer_fuel": 1}, {"max_grammar_size": 3}], ids=str)
def test_a_limit_while_compiling(limits):
    with pytest.raises(GrammarTooComplexError, match="too big"):
        limited(Guide.lark('start: "a" /b{9}/ start "c" | "d"'), **limits)


def test_a_generation_over_a_limit_leaves_the_others_alone():
    backend = LLGuidanceBackend(tokenizer_info(), limits=LLParserLimits(step_lexer_fuel=300))
    grammar = backend.compile(Guide.lark('start: "a"? | WIDE\nWIDE: /' + WIDE.text + "/"))

    def start(length: int) -> GrammarMatcher:
        matcher = GrammarMatcher(grammar.new_matcher(frozenset({STOP})), VOCAB_SIZE, {STOP})
        assert all(matcher.accept_token(token) for token in b"aaa"[:length])
        return matcher

    others = [start(1) for _ in range(5)]
    with pytest.raises(GrammarTooComplexError):
        mask(start(3))
    start(2)
    assert others[0].accept_token(ord("a"))
    assert others[1].is_completed()
    assert legal(others[2]) == [ord("a"), STOP]
    assert others[3].accept_token(STOP)
    others[4].rollback(1)
    assert others[4].accept_token(ord("a"))
    assert start(2).forced_bytes() == b"a"


def test_a_replay_that_finds_the_lexer_failed_starts_over():
    class Engine:
        def __init__(self, error: str) -> None:
            self._error = error

        def deep_copy(self):
            return self

        def consume_tokens(self, tokens):
            return not self._error

        def get_error(self):
            return self._error

    guide, full, healthy = Guide.regex("a"), Engine("lexer error: too many states"), Engine("")
    engines = _Engines(guide, full, lambda: healthy)
    assert engines.after([1]) == (healthy, healthy)
    with pytest.raises(GrammarTooComplexError, match="after 2 tokens: lexer error: too many"):
        _Engines(guide, full, lambda: full).after([1, 2])
    with pytest.raises(GrammarError, match=r"regex: llguidance gave up after 1 tokens: panic: x$"):
        _Engines(guide, Engine("panic: x\n<backtrace> 1"), lambda: healthy).after([1])


def test_a_lexer_that_many_generations_have_filled_is_replaced():
    guide = Guide.regex("[ab]*a[ab]{9}c")
    backend = LLGuidanceBackend(tokenizer_info(), limits=LLParserLimits(max_lexer_states=120))
    compiled = backend.compile(guide)
    for number in range(60):
        matcher = GrammarMatcher(compiled.new_matcher(frozenset({STOP})), VOCAB_SIZE, {STOP})
        for bit in f"1{number:09b}":
            mask(matcher)
            assert matcher.accept_token(ord("ba"[int(bit)]))
        assert matcher.accept_token(ord("c")) == (number >= 256 or f"{number:010b}"[0] == "0")


SMALL = TokenizerInfo.from_vocabulary([b"a", b"b", b"c", b""], [3])


@pytest.mark.parametrize(("lark", "row"), [('start: "ab" "z"', []), ('start: "ab" "z"?', [3])])
def test_where_no_token_continues_the_row_is_empty_but_for_a_legal_stop(lark, row):
    compiled = LLGuidanceBackend(SMALL).compile(Guide.lark(lark))
    matcher = GrammarMatcher(compiled.new_matcher(frozenset({3})), 4, {3})
    assert matcher.accept_token(0)
    assert matcher.accept_token(1)
    for _ in range(2):
        assert legal(matcher) == row
        assert matcher.is_completed() == bool(row)
        assert not matcher.accept_token(2)
        assert matcher.accept_token(3) == bool(row)
        matcher.rollback(matcher.num_accepted - 2)
    fork = matcher.fork()
    assert legal(matcher) == row
    matcher.rollback(1)
    assert legal(matcher) == [1]
    assert legal(fork) == row


def test_generations_of_one_grammar_run_on_several_threads():
    """They share a lexer behind a lock; nothing that holds it may wait for the interpreter."""
    results = []

    def generate():
        for _ in range(40):
            matcher = engine_matcher("llguidance", GUIDES["schema"])
            for token in tokenize('{"name": "abc 日本", "age": 34, "tags": ["a/b"]}'):
                mask(matcher)
                assert matcher.accept_token(token)
            matcher.fork().forced_bytes()
            results.append(matcher.is_completed())

    threads = [threading.Thread(target=generate, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 160
