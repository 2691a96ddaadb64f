"""A text that begins with a start tag, or with the answer: the contract of a matcher, and the decision."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import GrammarMatcher, Guide, InvalidGuideError
from grammar_host.optional_reasoning import with_optional_reasoning
from tests.grammar_host.common import STOP, TOOL, bits, legal, mask
from tests.grammar_host.test_reasoning import VOCAB_SIZE, compiler, info

START, END = "<think>", "</think>"
ANSWERS = {
    "json": Guide.json(max_whitespace=2),
    "choice": Guide.choice(["<", "<th>", "<think", "ab", "\n<b"]),
    "text": Guide.regex(r"[\s\S]*"),
    "tags": Guide.regex(r"<[a-z]+>x"),
}
TEXTS = [
    *(
        "{}",
        "\n{",
        "<",
        "<th>",
        "<think",
        "<think>",
        "\n<think>",
        "\n<b",
        "ab",
        "<tool>x",
        "<think>x",
    ),
    *(
        "<think>so</think>{}",
        "<think></think>\n\n<th>",
        "\n<think>a</thinx</think>ab",
        " <think></think>",
    ),
]
every_answer = pytest.mark.parametrize("answer", ANSWERS)
few = settings(deadline=None, max_examples=25)
CUTS = st.lists(st.integers(0, 10**6), max_size=30)


@functools.cache
def factory(answer: str, start: str, end: str):
    compiled = compiler().compile(ANSWERS[answer]).compiled
    return with_optional_reasoning(compiled.new_matcher, info(), start, end)


def begin(answer: str, start: str = START, end: str = END) -> GrammarMatcher:
    stops = frozenset({STOP})
    return GrammarMatcher(factory(answer, start, end)(stops), VOCAB_SIZE, stops)


def write(matcher: GrammarMatcher, text: str, cuts: list[int]) -> list[int]:
    """As much of a text as is legal, in tokens that ``cuts`` choose; they are returned."""
    rest, tokens = text.encode(), []
    vocabulary = info().vocabulary
    for cut in [*cuts, *[0] * len(rest)]:
        fitting = [t for t in legal(matcher) if rest.startswith(vocabulary[t] or b"\xff")]
        if not fitting:
            break
        tokens.append(fitting[cut % len(fitting)])
        assert matcher.accept_token(tokens[-1])
        rest = rest[len(vocabulary[tokens[-1]]) :]
    return tokens


def accepts(matcher: GrammarMatcher, text: str) -> bool:
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.is_completed()


@every_answer
@pytest.mark.parametrize("text", TEXTS)
def test_the_language_is_that_of_the_answer_or_of_reasoning_and_the_answer(answer, text):
    alone = accepts(compiler().compile(ANSWERS[answer]).matcher(), text)
    before, _, behind = text.partition(START)
    if before.strip() or START not in text:
        assert accepts(begin(answer), text) == alone
        return
    beyond = compiler().compile(ANSWERS[answer].after_reasoning(END)).matcher()
    blanks = compiler().compile(ANSWERS[answer]).matcher()
    may_begin = all(blanks.accept_token(byte) for byte in before.encode())
    assert accepts(begin(answer), text) == (may_begin and accepts(beyond, behind))


@every_answer
@few
@given(text=st.sampled_from(TEXTS), cuts=CUTS)
def test_a_token_is_accepted_exactly_if_its_bit_is_set(answer, text, cuts):
    matcher = begin(answer)
    write(matcher, text[: len(text) - len(cuts) % 3], cuts)
    accepted = [t for t in range(-2, VOCAB_SIZE + 40) if matcher.validate_tokens([t]) == 1]
    assert accepted == list(bits(mask(matcher)))


@every_answer
@few
@given(text=st.sampled_from(TEXTS), cuts=CUTS, data=st.data())
def test_rollback_and_fork(answer, text, cuts, data):
    tokens = write(begin(answer), text, cuts)
    matcher = begin(answer)
    rows = [mask(matcher)]
    for token in tokens:
        matcher.accept_token(token)
        rows.append(mask(matcher))
    back = data.draw(st.integers(0, len(tokens)))
    fork = matcher.fork()
    matcher.rollback(back)
    np.testing.assert_array_equal(mask(matcher), rows[len(tokens) - back])
    np.testing.assert_array_equal(mask(fork), rows[-1])
    assert all(map(matcher.accept_token, tokens[len(tokens) - back :]))
    np.testing.assert_array_equal(mask(matcher), rows[-1])
    fork.rollback(len(tokens))
    np.testing.assert_array_equal(mask(fork), rows[0])


@every_answer
@few
@given(text=st.sampled_from(TEXTS), cuts=CUTS)
def test_how_the_text_is_split_does_not_matter(answer, text, cuts):
    matcher, other = begin(answer), begin(answer)
    tokens = write(matcher, text, cuts)
    written = b"".join(info().vocabulary[token] for token in tokens)
    assert all(map(other.accept_token, written))
    np.testing.assert_array_equal(mask(matcher), mask(other))
    assert matcher.is_completed() == other.is_completed()


def test_special_tokens_as_tags():
    matcher = begin("json", "<|tool|>", "<|say|>")
    assert TOOL in legal(matcher)
    assert matcher.accept_token(TOOL)
    assert all(map(matcher.accept_token, b"<|tool|> so {"))
    assert not matcher.is_completed()
    assert matcher.accept_token(331)
    assert all(map(matcher.accept_token, b"{}"))
    assert matcher.is_completed()
    assert not begin("json", "<|tool|>", "<|say|>").accept_token(ord("<"))


def test_the_compiler_puts_it_in_front():
    grammar = compiler().compile(Guide.choice(["ab"]).after_reasoning(END, start=START))
    assert accepts(grammar.matcher(), "ab")
    assert accepts(grammar.matcher(), "<think>so</think>ab")
    assert not accepts(grammar.matcher(), "so</think>ab")


@pytest.mark.parametrize("start", ["", " <think>", "a\0"])
def test_unfit_tags_are_refused(start):
    with pytest.raises(InvalidGuideError, match="reasoning_start"):
        Guide.json().after_reasoning(END, start=start)
    with pytest.raises(InvalidGuideError, match="reasoning_start"):
        Guide("json", "", 8, reasoning_start=START)
