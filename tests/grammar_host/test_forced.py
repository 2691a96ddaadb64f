"""Forced text: what the grammar leaves no choice about, in the tokenizer's own segmentation."""

import functools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import GrammarMatcher, Guide, TokenizerInfo
from grammar_host.backends import SERVED_BACKENDS
from grammar_host.backends.base import Backend, CompiledGuide, EngineMatcher
from grammar_host.backends.scripted import Script
from grammar_host.forced import MAX_FORCED_BYTES
from tests.grammar_host import common
from tests.grammar_host.common import MATCHERS, STOP, bits, legal, mask, scripted_matcher, walk
from tests.grammar_host.vocabularies import INFOS, canonical, tokenizer_info, written

ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "status": {"enum": ["pending", "perhaps", "done"]},
        "zip code": {"type": "string", "pattern": "^[0-9]{5}$"},
        "größe 日本": {
            "type": "object",
            "properties": {"unit": {"const": "cm"}, "none": {"const": None}},
            "required": ["unit", "none"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"enum": ["it's", "naïve", "😀", "👩‍👩‍👧"]}},
    },
    "required": ["name", "status", "zip code", "größe 日本", "tags"],
    "additionalProperties": False,
}
DOCUMENT = {
    "name": 'the café "日本" 12345 isn\'t done',
    "status": "perhaps",
    "zip code": "01234",
    "größe 日本": {"unit": "cm", "none": None},
    "tags": ["naïve", "it's", "👩‍👩‍👧", "😀"],
}
DATE = r"date: 20\d\d-(0[1-9]|1[0-2])-\d\d, thank you very much( indeed)?"
LAYOUTS = {"compact": (0, (",", ":")), "spaced": (8, (", ", ": "))}
DOCUMENTS = {
    **{
        f"schema, {layout}": (
            Guide.json_schema(ORDER, max_whitespace=blanks),
            json.dumps(DOCUMENT, ensure_ascii=False, separators=separators),
        )
        for layout, (blanks, separators) in LAYOUTS.items()
    },
    "regex": (Guide.regex(DATE), "date: 2031-12-09, thank you very much indeed"),
    "numbers": (Guide.regex(r"[0-9]{8}123456789[0-9]{4}x"), "111111111234567890000x"),
    "choice": (
        Guide.choice(["déjà vu 😀 日本語", "déjà fait", "日本", "日光"]),
        "déjà vu 😀 日本語",
    ),
    "grammar": (
        Guide.grammar('root ::= "if (" [a-z]+ ") {\\n    return é" ("!" | "?") "\\n}\\n"'),
        "if (quick) {\n    return é!\n}\n",
    ),
}
"""Guides with a text of each that leaves little and much of it to the model."""

CHOICES = st.lists(st.integers(0, 10**6), max_size=12)
few = settings(deadline=None, max_examples=15)
every_engine = pytest.mark.parametrize("engine", SERVED_BACKENDS)
every_document = pytest.mark.parametrize(
    ("engine", "document"),
    [
        (engine, name)
        for engine in SERVED_BACKENDS
        for name, (guide, _) in DOCUMENTS.items()
        if not (engine == "outlines" and guide.kind == "grammar")
    ],
)
every_tokenizer = pytest.mark.parametrize(
    "tokenizer",
    [pytest.param(name, marks=[pytest.mark.model] if name == "SmolLM2" else []) for name in INFOS],
)


@functools.cache
def backend(engine: str, tokenizer: str) -> Backend:
    return SERVED_BACKENDS[engine](tokenizer_info(tokenizer))


@functools.cache
def compiled(engine: str, tokenizer: str, guide: Guide) -> CompiledGuide:
    return backend(engine, tokenizer).compile(guide)


def new_matcher(engine: str, tokenizer: str, guide: Guide, stops=()) -> GrammarMatcher:
    info = tokenizer_info(tokenizer)
    stop_token_ids = frozenset({*info.stop_token_ids, *stops})
    matcher = compiled(engine, tokenizer, guide).new_matcher(stop_token_ids)
    return GrammarMatcher(matcher, info.vocab_size, stop_token_ids, info.segmenter)


def next_bytes(matcher: GrammarMatcher, info: TokenizerInfo) -> set[int]:
    return {info.vocabulary[t][0] for t in legal(matcher) if info.vocabulary[t]}


def longest_forced(matcher: GrammarMatcher, info: TokenizerInfo) -> bytes:
    """What is forced, found by looking at one mask for every byte."""
    single = {text[0]: token for token, text in enumerate(info.vocabulary) if len(text) == 1}
    probe, forced = matcher.fork(), b""
    while not probe.is_completed() and len(options := next_bytes(probe, info)) == 1:
        byte = options.pop()
        assert probe.accept_token(single[byte])
        forced += bytes([byte])
    return forced


@every_document
@few
@given(choices=CHOICES)
def test_forced_bytes_are_all_that_every_continuation_begins_with(engine, document, choices):
    matcher = new_matcher(engine, "bytes", DOCUMENTS[document][0])
    walk(matcher, choices)
    if not matcher.is_terminated():
        assert matcher.forced_bytes() == longest_forced(matcher, tokenizer_info("bytes"))


@pytest.mark.parametrize("name", MATCHERS)
@few
@given(choices=CHOICES)
def test_forced_tokens_change_nothing_and_are_legal(name, choices):
    matcher = MATCHERS[name]()
    walk(matcher, choices)
    before = mask(matcher), matcher.is_completed(), matcher.num_accepted
    forced, tokens = matcher.forced_bytes(), matcher.forced_tokens()
    assert matcher.forced_tokens() == tokens
    np.testing.assert_array_equal(mask(matcher), before[0])
    assert (matcher.is_completed(), matcher.num_accepted) == before[1:]
    assert forced.startswith(written(common.tokenizer_info(), tokens))
    for token in tokens:
        assert legal(matcher)
        assert token in legal(matcher)
        assert matcher.accept_token(token)
    assert not matcher.is_terminated() or not tokens


@every_tokenizer
@every_document
def test_documents_are_segmented_as_the_tokenizer_does(engine, tokenizer, document):
    """At every position, whatever the document goes on with: no token is not the tokenizer's."""
    guide, text = DOCUMENTS[document]
    matcher, info = new_matcher(engine, tokenizer, guide), tokenizer_info(tokenizer)
    tokens = canonical(info, text)
    jumps = Counter()
    for position, token in enumerate(tokens):
        forced = matcher.forced_tokens()
        assert forced == tokens[position : position + len(forced)]
        assert matcher.forced_bytes().startswith(written(info, forced))
        jumps[len(forced)] += 1
        assert matcher.accept_token(token)
    assert matcher.is_completed()
    assert max(jumps) >= 1


@every_tokenizer
@every_document
def test_jumping_generates_the_same_tokens(engine, tokenizer, document):
    """A model that wants to write the document does so in fewer steps."""
    guide, text = DOCUMENTS[document]
    matcher, info = new_matcher(engine, tokenizer, guide), tokenizer_info(tokenizer)
    wanted = canonical(info, text)
    output: list[int] = []
    steps = 0
    while len(output) < len(wanted):
        output += (forced := matcher.forced_tokens())
        assert all(matcher.accept_token(token) for token in forced)
        if len(output) < len(wanted):
            output.append(wanted[len(output)])
            assert matcher.accept_token(output[-1])
        steps += 1
    assert output == wanted
    assert steps < len(wanted)


@every_engine
def test_text_is_forced_no_further_than_to_where_it_may_end(engine):
    matcher = new_matcher(engine, "bytes", Guide.regex("[xy](z( the)?)"))
    assert matcher.accept_token(ord("x"))
    assert matcher.forced_bytes() == b"z"
    assert matcher.forced_tokens() == [ord("z")]


@every_engine
def test_forced_text_may_end_inside_of_a_character(engine):
    guide = Guide.choice(["x-é", "x-è"])  # C3 A9, C3 A8
    matcher = new_matcher(engine, "bytes", guide)
    assert matcher.forced_bytes() == b"x-\xc3"
    assert matcher.forced_tokens() == [*b"x-"]
    # Accepted text may end there, too.
    for byte in b"x-\xc3":
        assert matcher.accept_token(byte)
    assert matcher.forced_bytes() == b""
    matcher = new_matcher(engine, "bytes", Guide.choice(["中1", "中2"]))
    assert matcher.accept_token(0xE4)
    assert matcher.forced_bytes() == "中".encode()[1:]
    assert matcher.forced_tokens() == [*"中".encode()[1:]]


@every_engine
def test_nothing_is_forced_in_the_middle_of_a_token(engine):
    """A model that wrote "nam" has left the canonical path; "e" follows as it likes."""
    info = tokenizer_info("byte-level")
    guide = Guide.regex('"name": [0-9]')
    matcher = new_matcher(engine, "byte-level", guide)
    name = info.encode('"name":')
    assert matcher.forced_tokens() == name
    for token in info.encode('"nam'):
        assert matcher.accept_token(token)
    assert matcher.forced_bytes() == b'e": '
    assert matcher.forced_tokens() == []
    assert matcher.accept_token(info.encode("e")[0])
    assert matcher.forced_tokens() == name[2:]


@every_engine
@pytest.mark.parametrize("tokenizer", ["sentencepiece", "unigram", "with a blank first"])
def test_no_blank_is_put_before_the_text(engine, tokenizer):
    info = tokenizer_info(tokenizer)
    assert written(info, info.encode("name")) == b" name"
    matcher = new_matcher(engine, tokenizer, Guide.choice(["name the name"]))
    tokens = matcher.forced_tokens()
    assert written(info, tokens) == b"name the name"
    assert all(matcher.accept_token(token) for token in tokens)
    # A blank that belongs to the text stays.
    matcher = new_matcher(engine, tokenizer, Guide.choice([" name the"]))
    assert written(info, matcher.forced_tokens()) == b" name the"


@every_engine
def test_special_tokens_are_not_forced_as_text(engine):
    """The tokenizer takes "<|im_end|>" for the special token, wherever the text comes from."""
    info = tokenizer_info("byte-level")
    special = next(token for token, name in info.special_tokens.items() if name == "<|im_end|>")
    matcher = new_matcher(engine, "byte-level", Guide.choice(["the name: <|im_end|> is"]))
    assert matcher.forced_bytes() == b"the name: <|im_end|> is"
    tokens = matcher.forced_tokens()
    assert special not in tokens
    assert b"the name: <|im_end|> is".startswith(written(info, tokens))


def test_special_tokens_that_the_grammar_names_are_forced():
    info = tokenizer_info("byte-level")
    special = next(token for token, name in info.special_tokens.items() if name == "<|im_end|>")
    guide = Guide.grammar('root ::= "the name" "<|im_end|>" "age" [0-9]')
    matcher = new_matcher("xgrammar", "byte-level", guide)
    the_name, age = info.encode("the name"), info.encode("age")
    assert matcher.forced_tokens() == [*the_name, special, *age]
    for token in [*the_name, special]:
        assert matcher.accept_token(token)
    assert matcher.forced_tokens() == age


@every_engine
def test_stop_tokens_are_never_forced(engine):
    """A stop token of the request is no text any more, so the text must do without it."""
    info = tokenizer_info("byte-level")
    name = info.encode("name")[0]
    guide = Guide.choice(["the name is"])
    before = new_matcher(engine, "byte-level", guide).forced_tokens()
    assert name not in before
    assert info.encode(" name")[0] in before
    stops = [info.encode(" name")[0]]
    matcher = new_matcher(engine, "byte-level", guide, stops)
    assert matcher.forced_tokens() == before[: before.index(stops[0])]
    assert matcher.forced_bytes() == b"the name is"


@every_engine
def test_long_forced_text_is_bounded(engine):
    text = "a long constant, " * 40
    matcher = new_matcher(engine, "byte-level", Guide.choice([text]))
    info = tokenizer_info("byte-level")
    forced = matcher.forced_bytes()
    assert forced == text.encode()[:MAX_FORCED_BYTES]
    output = []
    while tokens := matcher.forced_tokens():
        assert len(written(info, tokens)) <= MAX_FORCED_BYTES
        assert all(matcher.accept_token(token) for token in tokens)
        output += tokens
    # The blank at the very end cannot become another token, because nothing follows.
    assert output == list(info.encode(text))
    assert matcher.is_completed()


@every_engine
def test_nothing_is_forced_at_the_end(engine):
    matcher = new_matcher(engine, "bytes", Guide.choice(["ab"]))
    assert matcher.forced_bytes() == b"ab"
    assert all(matcher.accept_token(token) for token in matcher.forced_tokens())
    assert (matcher.forced_bytes(), matcher.forced_tokens()) == (b"", [])
    assert matcher.accept_token(STOP)
    assert (matcher.forced_bytes(), matcher.forced_tokens()) == (b"", [])


def test_a_fork_and_a_rollback_keep_the_text_before():
    info = tokenizer_info("byte-level")
    matcher = new_matcher("xgrammar", "byte-level", Guide.regex('"name": [0-9]'))
    for token in info.encode('"nam'):
        assert matcher.accept_token(token)
    assert matcher.fork().forced_tokens() == []
    matcher.rollback(matcher.num_accepted)
    assert matcher.forced_tokens() == info.encode('"name":')


def test_a_matcher_without_a_segmenter_forces_bytes_only():
    engine = compiled("xgrammar", "bytes", Guide.choice(["ab"])).new_matcher(frozenset({STOP}))
    matcher = GrammarMatcher(engine, common.VOCAB_SIZE, [STOP])
    assert (matcher.forced_bytes(), matcher.forced_tokens()) == (b"ab", [])
    assert scripted_matcher(Script.of([{97}])).forced_tokens() == []


def test_bytes_that_the_vocabulary_cannot_write_end_the_forced_text():
    """Without single bytes, every token that begins with a byte tells whether it is legal."""
    info = TokenizerInfo.from_vocabulary([b"na", b"me", b"mz", b"nb", b""], [4])
    grammar = SERVED_BACKENDS["xgrammar"](info).compile(Guide.choice(["name", "nameq"]))
    matcher = GrammarMatcher(grammar.new_matcher(frozenset({4})), 5, [4], info.segmenter)
    assert matcher.forced_bytes() == b"name"
    assert matcher.forced_tokens() == [0, 1]
    row = common.mask(matcher)
    assert list(bits(row)) == [0]
    assert info.segmenter.first_bytes(row) == b"n"
    unwritable = SERVED_BACKENDS["xgrammar"](info).compile(Guide.choice(["nax"]))
    matcher = GrammarMatcher(unwritable.new_matcher(frozenset({4})), 5, [4], info.segmenter)
    assert matcher.forced_bytes() == b"nax"
    assert matcher.forced_tokens() == []


class CountingMatcher(EngineMatcher):
    """Forwards to an engine's matcher and counts the calls that cost time."""

    def __init__(self, engine: EngineMatcher) -> None:
        self._engine = engine
        self.calls: Counter[str] = Counter()

    def accept_token(self, token_id):
        self.calls["accept"] += 1
        return self._engine.accept_token(token_id)

    def rollback(self, num_tokens):
        assert num_tokens > 0
        self._engine.rollback(num_tokens)

    def fill_next_token_bitmask(self, bitmask, index):
        self.calls["fill"] += 1
        self._engine.fill_next_token_bitmask(bitmask, index)

    def forced_bytes(self):
        self.calls["forced"] += 1
        return self._engine.forced_bytes()

    def is_terminated(self):
        return self._engine.is_terminated()

    def is_completed(self):
        return self._engine.is_completed()

    def fork(self):
        raise AssertionError("looking ahead must not copy the engine's state")


@every_engine
def test_looking_costs_one_call_where_nothing_is_forced(engine):
    grammar = compiled(engine, "bytes", Guide.regex("[a-zé]+(, thanks|, thank you)!"))
    counting = CountingMatcher(grammar.new_matcher(frozenset({STOP})))
    segmenter = common.tokenizer_info().segmenter
    matcher = GrammarMatcher(counting, common.VOCAB_SIZE, [STOP], segmenter)
    for token in common.tokenize("qé"):  # behind any whole character
        assert matcher.accept_token(token)
        counting.calls.clear()
        assert matcher.forced_tokens() == []
        assert counting.calls == {"forced": 1}
    assert matcher.accept_token(ord(","))
    counting.calls.clear()
    assert matcher.forced_tokens() != []
    assert (counting.calls["forced"], counting.calls["fill"]) == (1, 1)
    assert counting.calls["accept"] <= 2 * len(b" thank")
