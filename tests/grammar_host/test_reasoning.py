"""Free text up to an end tag, then a grammar: the contract of a matcher, and the boundary."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import (
    GrammarCompiler,
    GrammarMatcher,
    Guide,
    GuidedBatch,
    InvalidGuideError,
    TokenizerInfo,
)
from grammar_host.backends.scripted import Script, ScriptedBackend
from grammar_host.reasoning import MAX_GAP, with_reasoning
from tests.grammar_host.common import (
    PIECES,
    SPECIAL_TOKENS,
    STOP,
    TOOL,
    bits,
    byte_vocabulary,
    legal,
    mask,
    tokenize,
    walk,
)

VOCAB_SIZE = 333
SPECIALS = {**SPECIAL_TOKENS, 331: "<|say|>"}
OWN_PIECES = (
    *(b"</think>", b"</", b"think", b"nk>", b">{", b">\n", b"k>x", b"a</think>", b"</think>b"),
    *(b"<<", b"<<a", b"<<<", b"<<<a", b"<a<", b"aa", b"aab", b"aaab", b"aabaab", b"baab", b"ba"),
    *("。é".encode(), "é。".encode(), "。é".encode()[2:4], "。é。".encode()[1:]),
    *(b"\n\n", b"\n\n\n\n\n", b" \n", b"\n{", b"   ", b"\t\t\t\t", b" a"),
)


@functools.cache
def info():
    vocabulary = byte_vocabulary(VOCAB_SIZE)
    start = vocabulary.index(PIECES[-1]) + 1
    vocabulary[start : start + len(OWN_PIECES)] = OWN_PIECES
    assert len(vocabulary) == VOCAB_SIZE
    return TokenizerInfo.from_vocabulary(vocabulary, [STOP], special_tokens=SPECIALS)


@functools.cache
def compiler():
    return GrammarCompiler(info(), cache_limit_bytes=10**8)


ANSWERS = {
    "json": Guide.json(),
    "choice": Guide.choice(["ab", "abc"]),
    "blanks": Guide.choice([" yes", "\n\nno"]),
    "text": Guide.regex(r"[\s\S]*"),
    "perhaps": Guide.regex("(ab)*"),
}
SCRIPT = Script.of([{97, 98}, {97}, {99, 100}])

TAGS = ["</think>", "<<a", "aab", "aabaa", "。é", ">", "<|tool|>", "<|tool|>ok<|say|>"]


@functools.cache
def factory(answer, end):
    if answer == "scripted":
        compiled = ScriptedBackend(SCRIPT).compile(Guide.json())
    else:
        compiled = compiler().compile(ANSWERS[answer]).compiled
    return with_reasoning(compiled.new_matcher, info(), end)


def start(answer, end="</think>", stops=()):
    stops = frozenset({STOP, *stops})
    return GrammarMatcher(factory(answer, end)(stops), VOCAB_SIZE, stops)


def alone(answer, stops=()):
    return compiler().compile(ANSWERS[answer]).matcher(stops)


def feed(matcher, text):
    tokens = tokenize(text, info())
    for token in tokens:
        assert matcher.accept_token(token), (text, info().vocabulary[token])
    return tokens


def spell(matcher, text):
    """One byte per token, so that nothing depends on the pieces of the vocabulary."""
    for byte in text.encode():
        assert matcher.accept_token(byte)


def close(matcher, end):
    """Writes the end tag, special tokens as such."""
    ids = {name: token for token, name in SPECIALS.items()}
    while end:
        name = next((name for name in ids if end.startswith(name)), end[0])
        if name in ids:
            assert matcher.accept_token(ids[name])
        else:
            spell(matcher, name)
        end = end[len(name) :]


every_tag = pytest.mark.parametrize("end", TAGS)
every_answer = pytest.mark.parametrize("answer", [*ANSWERS, "scripted"])
few = settings(deadline=None, max_examples=12)
CHOICES = st.lists(st.integers(0, 10**6), max_size=10)


def play(matcher, end, before, gap, after):
    """Random free text, the tag, blanks, and a random answer; returns all accepted tokens."""
    tokens = []

    def take(token):
        if matcher.accept_token(token):
            tokens.append(token)

    for choice in before:
        row = legal(matcher)
        take(row[choice % len(row)])
    ids = {name: token for token, name in SPECIALS.items()}
    rest = end
    while rest and not matcher.is_completed():
        name = next((name for name in ids if rest.startswith(name)), rest[0])
        for token in [ids[name]] if name in ids else name.encode():
            take(token)
        rest = rest[len(name) :]
    for byte in gap:
        take(byte)
    for choice in after:
        row = legal(matcher)
        if matcher.is_terminated() or not row:
            break
        take(row[choice % len(row)])
    return tokens


PLAYS = st.tuples(CHOICES, st.sampled_from([b"", b"\n", b"\n\n", b" \t\n\r"]), CHOICES)


@every_answer
@every_tag
@few
@given(moves=PLAYS)
def test_a_token_is_accepted_exactly_if_its_bit_is_set(answer, end, moves):
    matcher = start(answer, end)
    play(matcher, end, *moves)
    if matcher.is_terminated():
        return
    before = mask(matcher)
    accepted = [t for t in range(-2, VOCAB_SIZE + 40) if matcher.validate_tokens([t]) == 1]
    assert accepted == list(bits(before))
    np.testing.assert_array_equal(mask(matcher), before)


@every_answer
@every_tag
@few
@given(moves=PLAYS, back=st.integers(0, 30), data=st.data())
def test_rollback_undoes_accept_across_the_boundary(answer, end, moves, back, data):
    tokens = play(start(answer, end), end, *moves)
    matcher = start(answer, end)
    states = [(mask(matcher), matcher.is_completed(), matcher.is_terminated())]
    for token in tokens:
        assert matcher.accept_token(token)
        states.append((mask(matcher), matcher.is_completed(), matcher.is_terminated()))
    for _ in range(3):
        position = data.draw(st.integers(0, len(tokens)))
        matcher.rollback(len(tokens) - position)
        for at in range(position, len(tokens) + 1):
            row, completed, terminated = states[at]
            np.testing.assert_array_equal(mask(matcher), row)
            assert (matcher.is_completed(), matcher.is_terminated()) == (completed, terminated)
            if at < len(tokens):
                assert matcher.accept_token(tokens[at])


@every_answer
@every_tag
@few
@given(moves=PLAYS, ours=CHOICES, theirs=CHOICES)
def test_a_fork_is_independent(answer, end, moves, ours, theirs):
    matcher = start(answer, end)
    tokens = play(matcher, end, *moves)
    here = mask(matcher)
    fork = matcher.fork()
    np.testing.assert_array_equal(mask(fork), here)
    mine = walk(matcher, ours)
    there = mask(matcher)
    other = walk(fork, theirs)
    np.testing.assert_array_equal(mask(matcher), there)
    fork.rollback(len(other))
    np.testing.assert_array_equal(mask(fork), here)
    fork.rollback(len(tokens))
    matcher.rollback(len(tokens) + len(mine))
    np.testing.assert_array_equal(mask(fork), mask(matcher))


@every_answer
@every_tag
@few
@given(moves=PLAYS, tokens=st.lists(st.integers(-1, VOCAB_SIZE), max_size=6))
def test_validate_and_fill_change_nothing(answer, end, moves, tokens):
    matcher = start(answer, end)
    play(matcher, end, *moves)
    before = mask(matcher)
    count = matcher.validate_tokens(tokens)
    np.testing.assert_array_equal(mask(matcher), before)
    results = [matcher.accept_token(token) for token in tokens[: count + 1]]
    assert results == ([True] * count + [False])[: len(tokens)]


@every_answer
@every_tag
def test_only_stop_tokens_after_a_completed_answer(answer, end):
    matcher = start(answer, end)
    assert not matcher.is_completed()
    assert STOP not in legal(matcher)
    close(matcher, end)
    for text in {"json": ["{}"], "blanks": [" yes"], "scripted": ["aac"]}.get(answer, ["ab"]):
        spell(matcher, text)
    assert matcher.is_completed()
    assert STOP in legal(matcher)
    assert matcher.accept_token(STOP)
    assert matcher.is_terminated()
    assert legal(matcher) == [STOP]
    assert not matcher.accept_token(97)
    matcher.rollback(1)
    assert matcher.is_completed()
    assert not matcher.is_terminated()


@pytest.mark.parametrize("end", TAGS[:6])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_mask_before_the_tag_is_what_bytes_say(end, data):
    """Against the definition: a token is legal unless the tag would end inside of it."""
    tag = end.encode()
    matcher = start("choice", end)
    written = b""
    beginnings = [tag[:size] for size in range(1, len(tag) + 1)]
    # Beginnings of the tag after one another: every way in which it may overlap itself.
    parts = st.sampled_from([*beginnings, *beginnings, b"a", b"<", b"x", "é".encode()])
    rest = b"".join(data.draw(st.lists(parts, max_size=6)))
    while True:
        expected = [
            token
            for token, piece in enumerate(info().vocabulary)
            if piece and tag not in (written + piece)[:-1]
        ]
        assert legal(matcher) == expected
        fitting = [t for t in expected if rest.startswith(info().vocabulary[t])]
        if not fitting:
            break
        token = data.draw(st.sampled_from(fitting))
        assert matcher.accept_token(token)
        written += info().vocabulary[token]
        rest = rest[len(info().vocabulary[token]) :]
        if written.endswith(tag):
            assert STOP not in legal(matcher)
            np.testing.assert_array_equal(mask(matcher), mask(start_behind(end)))
            break


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("aab", "aaab"),
        ("<<a", "<<<a"),
        ("aabaa", "aabaabaa"),
        ("</think>", "<</thi</think>"),
        ("aabaacaabaad", "aabaacaabaacaabaad"),
        ("aaab", "aaaaaab"),
        ("aabaaac", "aabaaabaaac"),
    ],
)
def test_a_tag_that_overlaps_itself_ends_where_it_first_stands(end, text):
    matcher = start("choice", end)
    for byte in text[: text.index(end) + len(end)].encode():
        assert STOP not in legal(matcher)
        assert matcher.accept_token(byte)
    np.testing.assert_array_equal(mask(matcher), mask(start_behind(end)))


@functools.cache
def start_behind(end):
    matcher = start("choice", end)
    close(matcher, end)
    return matcher


@every_answer
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_how_the_text_is_split_does_not_matter(answer, data):
    blanks = "" if answer in ("blanks", "scripted") else data.draw(st.sampled_from(["", "\n \t"]))
    tail = {"json": '{"', "choice": "ab", "blanks": "\n\n", "scripted": ""}.get(answer, "ab")
    text = f"so 日本 </thin </think>{blanks}{tail}".encode()
    greedy, other = start(answer), start(answer)
    for byte in text:
        assert greedy.accept_token(byte)
    while text:
        fitting = [t for t in legal(other) if text.startswith(info().vocabulary[t] or b"\xff")]
        token = data.draw(st.sampled_from(fitting))
        assert other.accept_token(token)
        text = text[len(info().vocabulary[token]) :]
    np.testing.assert_array_equal(mask(other), mask(greedy))
    assert other.is_completed() == greedy.is_completed()


def test_special_tokens_before_and_at_the_boundary():
    matcher = start("choice")
    assert not {STOP, TOOL, 258, 331, 332} & set(legal(matcher))
    named = start("choice", "<|tool|>")
    assert TOOL in legal(named)
    assert not {STOP, 258, 331} & set(legal(named))
    spell(named, "<|tool|>")  # spelled, it is text
    assert ord("!") in legal(named)
    assert not named.is_completed()
    assert named.accept_token(TOOL)
    assert set(legal(named)) >= {ord("a"), ord("\n")}
    assert ord("!") not in legal(named)
    several = start("choice", "<|tool|>ok<|say|>")
    for token in (TOOL, TOOL, 331, ord("o"), TOOL, ord("o"), ord("k"), ord("k")):
        assert several.accept_token(token)
    close(several, "<|tool|>ok<|say|>")
    assert ord("!") not in legal(several)


def test_blanks_behind_the_tag_are_bounded_and_not_the_grammars():
    first = alone("choice")
    spaces = {1: ord(" "), 2: tokenize("\n\n", info())[0], 3: tokenize("   ", info())[0]}
    for gap in ([], [1], [2], [3], [1, 3], [2, 2], [2, 1, 1]):
        matcher = start("choice")
        feed(matcher, "why</think>")
        for size in gap:
            assert matcher.accept_token(spaces[size])
        allowed = set(legal(matcher)) - set(legal(first))
        texts = [info().vocabulary[token] for token in allowed]
        assert all(text and not text.strip() for text in texts)
        assert max(map(len, texts), default=0) == MAX_GAP - sum(gap)
        assert (spaces[1] in allowed) == (sum(gap) < MAX_GAP)
        assert set(legal(first)) <= set(legal(matcher))
        feed(matcher, "ab")
        assert matcher.is_completed()
        assert ord("\n") not in legal(matcher)


@pytest.mark.parametrize("answer", ["blanks", "text"])
def test_a_grammar_that_begins_with_blanks_has_them_all(answer):
    matcher, inner = start(answer), alone(answer)
    feed(matcher, "</think>")
    np.testing.assert_array_equal(mask(matcher), mask(inner))
    for token in tokenize("\n\nno", info()):
        assert matcher.accept_token(token)
        assert inner.accept_token(token)
        np.testing.assert_array_equal(mask(matcher), mask(inner))


def test_an_answer_may_be_empty():
    matcher = start("perhaps")
    spell(matcher, "x</think>")
    assert matcher.is_completed()
    assert STOP in legal(matcher)
    spell(matcher, "\n")
    assert matcher.is_completed()
    assert matcher.accept_token(STOP)
    assert matcher.is_terminated()


def test_stop_tokens_are_never_free_text():
    for stop in (ord("x"), ord("\n"), ord("k")):
        matcher = start("choice", stops=[stop])
        assert stop not in legal(matcher)
        assert not matcher.accept_token(stop)
        feed(matcher, "why") if stop != ord("\n") else feed(matcher, "a")
        assert matcher.accept_token(info().vocabulary.index(b"</think>"))
        assert stop not in legal(matcher)
        feed(matcher, "ab")
        assert {stop, STOP} <= set(legal(matcher))
        assert matcher.accept_token(stop)
        assert matcher.is_terminated()


def test_nothing_is_forced_before_the_answer():
    engine = factory("json", "</think>")(frozenset({STOP}))
    for byte in b"</think":
        assert engine.forced_bytes() == b""
        assert engine.accept_token(byte)
    assert engine.accept_token(ord(">"))
    assert engine.forced_bytes() == b""  # blanks may come
    for byte in b"\n\n\n\n":
        assert engine.accept_token(byte)
    assert engine.forced_bytes() == alone("json")._engine.forced_bytes() != b""
    assert engine.explain_dead_end() is None


@pytest.mark.parametrize("drafts", [1, 3, 6])
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_the_boundary_may_fall_into_a_draft_window(drafts, data):
    """Rows behind the boundary are the grammar's; wrong drafts are undone across it."""
    text = "hm</thi</think>\n\nabc"
    tokens = [*tokenize(text, info()), STOP]
    batch = GuidedBatch(2, drafts, VOCAB_SIZE)
    batch.admit(0, None)
    batch.admit(1, start("choice"))
    masks = np.zeros(batch.mask_shape, np.int32)
    enabled = np.zeros(batch.mask_shape[:2], np.int32)
    at = 0
    while at < len(tokens):
        right = data.draw(st.integers(0, drafts))
        proposed = tokens[at : at + right]
        proposed += [data.draw(st.sampled_from([97, 10, 122, 60])) for _ in range(drafts - right)]
        usable = batch.propose(1, proposed)
        batch.fill(masks, enabled)
        assert batch.failure(1) is None
        probe = start("choice")
        for token in tokens[:at]:
            assert probe.accept_token(token)
        for row in range(len(usable) + 1):
            np.testing.assert_array_equal(masks[1, row], mask(probe))
            if row < len(usable):
                assert probe.accept_token(usable[row])
        matched = 0
        while matched < len(usable) and usable[matched] == tokens[at + matched]:
            matched += 1
        emitted = tokens[at : at + matched + 1]
        assert batch.advance(1, emitted) == len(emitted)
        at += len(emitted)
    assert batch.is_terminated(1)
    assert batch.is_completed(1)
    assert batch.failure(1) is None


def refusing(vocabulary, stops, end, **options):
    own = TokenizerInfo.from_vocabulary(vocabulary, stops, **options)
    return with_reasoning(factory_of_script, own, end)


def factory_of_script(stops):
    return ScriptedBackend(SCRIPT).compile(Guide.json()).new_matcher(stops)


@pytest.mark.parametrize(
    ("pieces", "end", "names"),
    [
        ([b"a", b"b", b"bc"], "abcd", {}),
        ([b"a", b"b", b"xc"], "abc", {}),
        ([b"a"], "\N{LATIN SMALL LETTER E WITH ACUTE}", {}),
        ([b"a"], "<|end|>", {1: "<|end|>"}),
    ],
)
def test_a_tag_must_be_writable(pieces, end, names):
    with pytest.raises(InvalidGuideError, match="cannot be written") as info:
        refusing([*pieces, b""], [len(pieces)], end, special_tokens=names)
    assert info.value.param == "reasoning_end"
    assert "\n" not in str(info.value)


def test_a_requests_stop_tokens_must_leave_the_tag_writable():
    make = refusing([b"a", b"b", b""], [2], "ab")
    assert make(frozenset({2})).accept_token(0)
    with pytest.raises(InvalidGuideError, match="cannot be written"):
        make(frozenset({1, 2}))
    make = refusing([b"a", b"", b""], [2], "<t>", special_tokens={1: "<t>"})
    with pytest.raises(InvalidGuideError, match="cannot be written"):
        make(frozenset({1, 2}))
