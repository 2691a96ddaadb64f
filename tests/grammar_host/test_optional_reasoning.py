"""A text that begins with a start tag, or with the answer: the contract of a matcher, and the decision."""

import functools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import GrammarMatcher, Guide, InvalidGuideError
from grammar_host.optional_reasoning import require_tags, with_optional_reasoning
from tests.grammar_host.common import STOP, TOOL, bits, legal, mask
from tests.grammar_host.test_reasoning import SPECIALS, VOCAB_SIZE, compiler, info

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
TAGS = {"text": (START, END), "special": ("<|tool|>", "<|say|>")}
every_answer = pytest.mark.parametrize("answer", ANSWERS)
every_tag = pytest.mark.parametrize("tags", TAGS.values(), ids=TAGS)
few = settings(deadline=None, max_examples=25)
CUTS = st.lists(st.integers(0, 10**6), max_size=30)


@functools.cache
def factory(answer: str, start: str, end: str):
    compiled = compiler().compile(ANSWERS[answer]).compiled
    return with_optional_reasoning(compiled.new_matcher, info(), start, end)


def begin(answer: str, start: str = START, end: str = END) -> GrammarMatcher:
    stops = frozenset({STOP})
    return GrammarMatcher(factory(answer, start, end)(stops), VOCAB_SIZE, stops)


def written(token: int) -> bytes:
    return SPECIALS.get(token, "").encode() or info().vocabulary[token]


def write(matcher: GrammarMatcher, text: str, cuts: list[int]) -> list[int]:
    """As much of a text as is legal, in tokens that ``cuts`` choose; they are returned.

    Names of special tokens are these tokens. At its end, the text stops if it may.
    """
    rest, tokens = text.encode(), []
    for cut in [*cuts, *[0] * len(rest)]:
        fitting = [t for t in legal(matcher) if rest and rest.startswith(written(t) or b"\xff")]
        fitting = [t for t in fitting if t in SPECIALS] or fitting
        if not fitting:
            break
        tokens.append(fitting[cut % len(fitting)])
        assert matcher.accept_token(tokens[-1])
        rest = rest[len(written(tokens[-1])) :]
    if not rest and matcher.accept_token(STOP):
        tokens.append(STOP)
    return tokens


def spelled(text: str) -> list[int]:
    """A text in bytes and special tokens."""
    tokens, rest = [], text.encode()
    while rest:
        special = next((t for t, name in SPECIALS.items() if rest.startswith(name.encode())), None)
        tokens.append(rest[0] if special is None else special)
        rest = rest[len(written(tokens[-1])) :]
    return tokens


def accepts(matcher: GrammarMatcher, text: str) -> bool:
    """Whether the whole text is accepted, and a stop after it: those that are completed, and no others."""
    if not all(map(matcher.accept_token, spelled(text))):
        return False
    is_completed = matcher.is_completed()
    assert (STOP in legal(matcher)) == is_completed
    assert matcher.accept_token(STOP) == is_completed
    assert matcher.is_terminated() == is_completed
    return is_completed


def tagged(text: str, tags: Sequence[str]) -> str:
    return text.replace(START, tags[0]).replace(END, tags[1])


@every_answer
@every_tag
@pytest.mark.parametrize("text", TEXTS)
def test_the_language_is_that_of_the_answer_or_of_reasoning_and_the_answer(answer, tags, text):
    start, end = tags
    text = tagged(text, tags)
    alone = accepts(compiler().compile(ANSWERS[answer]).matcher(), text)
    before, _, behind = text.partition(start)
    if before.strip() or start not in text:
        assert accepts(begin(answer, *tags), text) == alone
        return
    beyond = compiler().compile(ANSWERS[answer].after_reasoning(end)).matcher()
    blanks = compiler().compile(ANSWERS[answer]).matcher()
    may_begin = all(blanks.accept_token(byte) for byte in before.encode())
    assert accepts(begin(answer, *tags), text) == (may_begin and accepts(beyond, behind))


@every_answer
@every_tag
@few
@given(text=st.sampled_from(TEXTS), cuts=CUTS)
def test_a_token_is_accepted_exactly_if_its_bit_is_set(answer, tags, text, cuts):
    matcher = begin(answer, *tags)
    text = tagged(text, tags)
    write(matcher, text[: len(text) - len(cuts) % 3], cuts)
    if matcher.is_terminated():
        assert legal(matcher) == [STOP]
        return
    accepted = [t for t in range(-2, VOCAB_SIZE + 40) if matcher.validate_tokens([t]) == 1]
    assert accepted == list(bits(mask(matcher)))


def state(matcher: GrammarMatcher) -> tuple[bytes, bool, bool, bytes]:
    """All that a matcher tells."""
    facts = matcher.is_completed(), matcher.is_terminated(), matcher.forced_bytes()
    return mask(matcher).tobytes(), *facts


@every_answer
@every_tag
@few
@given(text=st.sampled_from(TEXTS), cuts=CUTS, data=st.data())
def test_rollback_and_fork(answer, tags, text, cuts, data):
    """Over the tag, the boundary and the end."""
    tokens = write(begin(answer, *tags), tagged(text, tags), cuts)
    matcher = begin(answer, *tags)
    states = [state(matcher)]
    for token in tokens:
        assert matcher.accept_token(token)
        states.append(state(matcher))
    back = data.draw(st.integers(0, len(tokens)))
    fork = matcher.fork()
    matcher.rollback(back)
    assert state(matcher) == states[len(tokens) - back]
    assert state(fork) == states[-1]
    assert all(map(matcher.accept_token, tokens[len(tokens) - back :]))
    assert state(matcher) == states[-1]
    fork.rollback(len(tokens))
    assert state(fork) == states[0]


@every_answer
@every_tag
@few
@given(text=st.sampled_from(TEXTS), cuts=CUTS)
def test_what_is_forced_is_what_every_token_goes_on_with(answer, tags, text, cuts):
    matcher = begin(answer, *tags)
    for token in write(begin(answer, *tags), tagged(text, tags), cuts):
        forced = matcher.forced_bytes()
        if forced:
            assert not matcher.is_completed()
            texts = [info().vocabulary[each] for each in legal(matcher)]
            assert all(
                each and (forced.startswith(each) or each.startswith(forced)) for each in texts
            )
        assert matcher.accept_token(token)


@every_tag
def test_forced_bytes_before_in_and_behind_the_tag(tags):
    start, end = tags
    answer = "choice"
    for text, forced in [
        ("", b""),  # the answer or the tag
        ("<", b""),
        ("a", b"b"),
        (start, b""),
        (f"{start}a", b""),
        (f"{start}a{end}", b""),
        (f"{start}a{end}a", b"b"),
        (f"{start}a{end}ab", b""),
    ]:
        matcher = begin(answer, *tags)
        assert all(map(matcher.accept_token, spelled(text)))
        assert matcher.forced_bytes() == forced


@every_answer
@every_tag
@few
@given(text=st.sampled_from(TEXTS), cuts=CUTS)
def test_how_the_text_is_split_does_not_matter(answer, tags, text, cuts):
    matcher, other = begin(answer, *tags), begin(answer, *tags)
    tokens = write(matcher, tagged(text, tags), cuts)
    for token in tokens:
        assert all(map(other.accept_token, [token] if token in SPECIALS else written(token)))
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


def test_whose_the_blanks_behind_the_tag_are():
    for guide, owns in [
        (Guide.choice([" a", "b"]), True),
        (Guide.choice(["a", "b "]), False),
        (Guide.regex(r"\s?a"), True),
        (Guide.grammar('root ::= "\\n" "a"'), True),
        (Guide.lark('start: "\\n" "a"'), True),
        (Guide.structural_tag(literal("\n\na")), True),
        (Guide.structural_tag(literal("a")), False),
        (Guide.json(), False),  # they mean nothing there
        (Guide.json_schema({"type": "integer"}), False),
    ]:
        for start in (None, START):
            grammar = compiler().compile(guide.after_reasoning(END, start=start))
            assert grammar.owns_blanks == owns, guide
        assert not compiler().compile(guide).owns_blanks


def literal(text: str) -> dict[str, object]:
    return {"type": "structural_tag", "format": {"type": "const_string", "value": text}}


@pytest.mark.parametrize(
    ("start", "end", "field"),
    [
        (START, "<|end|>", "reasoning_end"),  # a stop token
        ("<|end|>", END, "reasoning_start"),
    ],
)
def test_tags_that_cannot_be_written_are_refused(start, end, field):
    with pytest.raises(InvalidGuideError, match=f"{field}: .* cannot be written"):
        require_tags(info(), start, end)
    with pytest.raises(InvalidGuideError, match=f"{field}: .* cannot be written"):
        factory("choice", start, end)
    require_tags(info(), *TAGS["special"])
    require_tags(info(), START, END)


@pytest.mark.parametrize("start", ["", " <think>", "a\0"])
def test_unfit_tags_are_refused(start):
    with pytest.raises(InvalidGuideError, match="reasoning_start"):
        Guide.json().after_reasoning(END, start=start)
    with pytest.raises(InvalidGuideError, match="reasoning_start"):
        Guide("json", "", 8, reasoning_start=START)
