"""The contract of a matcher, the same for every engine and every kind of guide.

Masks are compared within an engine only: engines agree on languages, but not on every bit.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import GrammarMatcher, Guide, allocate_token_bitmask, bitmask_words
from tests.grammar_host.common import (
    ENGINE_MATCHERS,
    ENGINES,
    GUIDES,
    SCRIPT,
    STOP,
    TOOL,
    VOCAB_SIZE,
    bits,
    compiler,
    engine_matcher,
    legal,
    mask,
    scripted_matcher,
    tokenize,
    tokenizer_info,
    walk,
)

CHOICES = st.lists(st.integers(0, 10**6), max_size=12)
every_matcher = pytest.mark.parametrize("name", ENGINE_MATCHERS)
every_engine = pytest.mark.parametrize("engine", ENGINES)
few = settings(deadline=None, max_examples=15)


@every_matcher
@few
@given(choices=CHOICES)
def test_a_token_is_accepted_exactly_if_its_bit_is_set(name, choices):
    matcher = ENGINE_MATCHERS[name]()
    walk(matcher, choices)
    if matcher.is_terminated():
        return
    before = mask(matcher)
    accepted = [t for t in range(-2, VOCAB_SIZE + 40) if matcher.validate_tokens([t]) == 1]
    assert accepted == list(bits(before))
    np.testing.assert_array_equal(mask(matcher), before)


@pytest.mark.parametrize("engine", [name for name in ENGINES if "json" in ENGINES[name]])
@pytest.mark.parametrize(
    ("before", "first", "second"),
    [
        ('{"a":', '["x', '{"x'),  # an item's text, and a key
        ('{"a":', '"x', '{"x'),
        ('{"a":[', '{"x":"y', '["x","y'),
        ('{"a":[', "1", "[1"),
    ],
)
def test_a_mask_after_another_way_is_that_of_a_new_matcher(engine, before, first, second):
    """Two ways may lead to states that look alike; only the ends have computed a mask."""
    matcher, new = (engine_matcher(engine, Guide.json()) for _ in range(2))
    for token in tokenize(before) + tokenize(first):
        assert matcher.accept_token(token)
    mask(matcher)
    matcher.rollback(len(tokenize(first)))
    for token in tokenize(second):
        assert matcher.accept_token(token)
    for token in tokenize(before) + tokenize(second):
        assert new.accept_token(token)
    np.testing.assert_array_equal(mask(matcher), mask(new))


@every_matcher
@few
@given(choices=CHOICES, data=st.data())
def test_rollback_undoes_accept(name, choices, data):
    matcher = ENGINE_MATCHERS[name]()
    states = [(mask(matcher), matcher.is_completed(), matcher.is_terminated())]
    tokens = []
    for choice in choices:
        tokens += walk(matcher, [choice])
        if len(tokens) == len(states):
            states.append((mask(matcher), matcher.is_completed(), matcher.is_terminated()))
    back = data.draw(st.integers(0, len(tokens)))
    matcher.rollback(back)
    for position in range(len(tokens) - back, len(tokens) + 1):
        row, completed, terminated = states[position]
        np.testing.assert_array_equal(mask(matcher), row)
        assert (matcher.is_completed(), matcher.is_terminated()) == (completed, terminated)
        assert matcher.num_accepted == position
        if position < len(tokens):
            assert matcher.accept_token(tokens[position])


@every_matcher
@few
@given(choices=CHOICES)
def test_filling_twice_writes_the_same_row(name, choices):
    matcher = ENGINE_MATCHERS[name]()
    walk(matcher, choices)
    np.testing.assert_array_equal(mask(matcher), mask(matcher))


@every_matcher
@few
@given(choices=CHOICES)
def test_bits_above_the_vocabulary_are_zero(name, choices):
    matcher = ENGINE_MATCHERS[name]()
    for choice in choices:
        assert bits(mask(matcher)).max(initial=0) < VOCAB_SIZE
        walk(matcher, [choice])


@every_engine
@pytest.mark.parametrize("size", [288, 300, 49_152, 49_157])
def test_tail_bits_and_width_at_several_vocabulary_sizes(engine, size):
    # Everything is legal: the case in which XGrammar sets the bits above V.
    matcher = engine_matcher(engine, GUIDES["text"], size=size)
    row = mask(matcher)
    assert row.shape == (bitmask_words(size),) == (-(-size // 32),)
    assert size - 60 < bits(row).max() < size
    assert STOP in bits(row)
    assert TOOL not in bits(row)


@every_matcher
@few
@given(choices=st.lists(st.integers(0, 10**6), min_size=1, max_size=40))
def test_only_stop_tokens_are_legal_after_termination(name, choices):
    matcher = ENGINE_MATCHERS[name]()
    # Stop wherever the grammar lets the text end, so that most walks do.
    for choice in choices:
        if matcher.is_completed():
            break
        walk(matcher, [choice])
    if not matcher.is_completed():
        return
    assert STOP in legal(matcher)
    before = mask(matcher)
    assert matcher.accept_token(STOP)
    assert matcher.is_terminated()
    assert matcher.is_completed()
    assert legal(matcher) == [STOP]
    for token in (STOP, 97, TOOL, -1, VOCAB_SIZE):
        assert not matcher.accept_token(token)
    assert legal(matcher) == [STOP]
    matcher.rollback(1)
    assert not matcher.is_terminated()
    np.testing.assert_array_equal(mask(matcher), before)


TEXTS = {
    "json": '{"name": "déjà 😀 the", "n": [true, false, null, -1234.5e3], "日本": {}}',
    "schema": '{"name": "abc 日本", "age": 34, "tags": ["a/b", "😀", "q\\"q"]}',
    "regex": "ababcabc1234 the",
    "text": "abc true\n  日本 é😀",
    "grammar": "((x)x)(x)",
    "lark": "abbbabé",
    "choice": "déjà 😀",
    "tag": 'so: <f=x>{"name": "é", "age": 12}</f> and the rest',
}


@pytest.mark.parametrize("name", [name for name in ENGINE_MATCHERS if name != "scripted"])
@few
@given(data=st.data())
def test_how_a_text_is_split_into_tokens_does_not_matter(name, data):
    """Masks and completion depend on the bytes accepted, not on the tokens that carried them."""
    greedy, other = ENGINE_MATCHERS[name](), ENGINE_MATCHERS[name]()
    text = TEXTS[name.split("-")[1]].encode()
    for token in tokenize(text):
        assert greedy.accept_token(token)
    ids = {token: i for i, token in enumerate(tokenizer_info().vocabulary) if token}
    while text:
        fits = [token for token in ids if text.startswith(token)]
        token = data.draw(st.sampled_from(fits))
        assert other.accept_token(ids[token])
        text = text[len(token) :]
    np.testing.assert_array_equal(mask(other), mask(greedy))
    assert other.is_completed()
    assert greedy.is_completed()


@every_matcher
@few
@given(choices=CHOICES, tokens=st.lists(st.integers(-1, VOCAB_SIZE), max_size=6), data=st.data())
def test_validate_counts_the_legal_prefix_and_changes_nothing(name, choices, tokens, data):
    matcher, probe = ENGINE_MATCHERS[name](), ENGINE_MATCHERS[name]()
    accepted = walk(matcher, choices)
    start = data.draw(st.integers(0, len(accepted)))
    for token in accepted[:start]:
        assert probe.accept_token(token)
    before = mask(probe)
    count = probe.validate_tokens([*accepted[start:], *tokens])
    assert count >= len(accepted) - start
    np.testing.assert_array_equal(mask(probe), before)
    assert probe.num_accepted == start
    extra = [matcher.accept_token(token) for token in tokens[: count - (len(accepted) - start) + 1]]
    assert extra == [True] * (count - (len(accepted) - start)) + [False] * (
        len(extra) - (count - (len(accepted) - start))
    )


@every_matcher
@few
@given(choices=CHOICES, ours=CHOICES, theirs=CHOICES)
def test_a_fork_is_independent(name, choices, ours, theirs):
    matcher = ENGINE_MATCHERS[name]()
    tokens = walk(matcher, choices)
    start = mask(matcher)
    fork = matcher.fork()
    np.testing.assert_array_equal(mask(fork), start)
    mine = walk(matcher, ours)
    here = mask(matcher)
    other = walk(fork, theirs)
    np.testing.assert_array_equal(mask(matcher), here)
    fork.rollback(len(other))
    np.testing.assert_array_equal(mask(fork), start)
    fork.rollback(len(tokens))  # the history is copied, too
    matcher.rollback(len(mine) + len(tokens))
    np.testing.assert_array_equal(mask(fork), mask(matcher))


@every_matcher
def test_an_impossible_rollback_changes_nothing(name):
    matcher = ENGINE_MATCHERS[name]()
    tokens = walk(matcher, [0, 1])
    before = mask(matcher)
    for count in (-1, len(tokens) + 1, 10**6):
        with pytest.raises(ValueError, match="cannot roll back"):
            matcher.rollback(count)
    np.testing.assert_array_equal(mask(matcher), before)
    matcher.rollback(len(tokens))
    assert matcher.num_accepted == 0


@pytest.mark.parametrize("name", [*(f"{engine}-regex" for engine in ENGINES), "scripted"])
def test_arrays_that_engines_would_corrupt_are_refused(name):
    matcher = ENGINE_MATCHERS[name]()
    words = bitmask_words(VOCAB_SIZE)
    read_only = np.zeros((2, words), np.int32)
    read_only.flags.writeable = False
    refused = {
        "uint32": np.zeros((2, words), np.uint32),
        "int64": np.zeros((2, words), np.int64),
        "too wide": np.zeros((2, words + 1), np.int32),
        "too narrow": np.zeros((2, words - 1), np.int32),
        "a slice of a wider buffer": np.zeros((2, words + 6), np.int32)[:, :words],
        "every other row": np.zeros((4, words), np.int32)[::2],
        "column-major": np.zeros((2, words), np.int32, order="F"),
        "one row without its axis": np.zeros(words, np.int32),
        "read-only": read_only,
        "a list": [[0] * words] * 2,
    }
    for reason, array in refused.items():
        with pytest.raises(ValueError, match="bitmask"):
            matcher.fill_next_token_bitmask(array, 0)
        assert not np.any(np.asarray(array)), reason
    good = allocate_token_bitmask(2, VOCAB_SIZE)
    for index in (-1, 2):
        with pytest.raises(ValueError, match="row"):
            matcher.fill_next_token_bitmask(good, index)
    assert np.all(good == -1)


@pytest.mark.parametrize("engine", [*ENGINES, "scripted"])
def test_stop_tokens_of_the_request_are_gated_by_the_grammar(engine):
    x = ord("x")
    if engine == "scripted":
        matcher = scripted_matcher(SCRIPT, stop_token_ids=[x])
    else:
        matcher = engine_matcher(engine, Guide.regex("a[a-z]+"), [x])
    assert matcher.stop_token_ids == {STOP, x}
    while not matcher.is_completed():
        options = legal(matcher)
        assert x not in options
        assert STOP not in options
        assert not matcher.accept_token(x)
        assert matcher.accept_token(options[0])
    assert {x, STOP} <= set(legal(matcher))
    assert matcher.accept_token(x)
    assert matcher.is_terminated()
    assert legal(matcher) == [x, STOP]


def test_stop_tokens_outside_of_the_vocabulary_are_refused():
    grammar = compiler().compile(Guide.json())
    for stop in (-1, VOCAB_SIZE):
        with pytest.raises(ValueError, match="stop tokens"):
            grammar.matcher(stop_token_ids=[stop])
    with pytest.raises(ValueError, match="at least one stop token"):
        GrammarMatcher(grammar.compiled.new_matcher(frozenset({STOP})), VOCAB_SIZE, [])


@every_engine
def test_forced_bytes_begin_every_continuation(engine):
    matcher = engine_matcher(engine, Guide.regex("(name|age): (true|false)( the)?"))
    seen = set()
    for choices in ([0], [1], [2]):
        branch = matcher.fork()
        walk(branch, choices)
        before = mask(branch)
        forced = branch.forced_bytes()
        seen.add(bool(forced))
        np.testing.assert_array_equal(mask(branch), before)
        for token in legal(branch):
            text = tokenizer_info().vocabulary[token]
            assert forced.startswith(text[: len(forced)]) or text.startswith(forced)
    assert True in seen


@every_engine
def test_refusals_are_quiet(engine, capfd):
    matcher = engine_matcher(engine, GUIDES["choice"])
    for token in (TOOL, 258, 299, -1, VOCAB_SIZE, 2**40, ord("z")):
        assert not matcher.accept_token(token)
    walk(matcher, [1, 0, 0])
    assert not matcher.accept_token(258)
    mask(matcher)
    assert capfd.readouterr() == ("", "")
