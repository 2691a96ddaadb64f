"""Patterns in the dialect of the engines mean what the validator takes them for."""

import functools
import json
import re

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from grammar_host import GrammarMatcher, Guide, GuideError
from grammar_host.backends.llguidance import LLGuidanceBackend
from grammar_host.schema import read_schema, validator_for
from grammar_host.schema.patterns import stacks_quantifiers, to_rust
from tests.grammar_host.common import STOP, VOCAB_SIZE, tokenizer_info

CHARACTERS = (
    'abAé1٣ \u00a0\u2003\ufeff\u0085\n\r\u2028\u000b\u0001.-[]^$\\/&~"_😀K\u212a\u017f{},|('
)
PIECES = (
    *["a", "b", "A", "é", ".", "^", "$", "-", "]", "(", "(?:", ")", "|", "*", "+", "?", "{2}"],
    *["{1,2}", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"\.", r"\]", r"\[", r"\-", r"\/", r"\\"],
    *["[", "[^", "&&", "--", "~", r"\x61", r"\u0061", r"\u{e9}", r"\cA", r"\n", r"\t", r"\v", " "],
    *["[a-c]", "[^b]", r"[\d.]", r"[^\s]", r"[\s\S]", r"[\W_]", r"[^\D]", r"\p{L}", '"', ",", "1"],
)
PATTERNS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
TEXTS = st.lists(st.text(CHARACTERS, max_size=4), min_size=6, max_size=6)


@functools.cache
def backend():
    return LLGuidanceBackend(tokenizer_info())


def matches(compiled, text):
    matcher = GrammarMatcher(compiled.new_matcher(frozenset({STOP})), VOCAB_SIZE, {STOP})
    written = json.dumps(text, ensure_ascii=False).encode()
    return all(map(matcher.accept_token, written)) and matcher.accept_token(STOP)


@settings(deadline=None, max_examples=400)
@given(pattern=PATTERNS, texts=TEXTS)
@example(pattern=r"^[\S]$", texts=["\ufeff"])
@example(pattern=r"^[^\S]$", texts=["\ufeff"])
@example(pattern=r"^[\s\S]$", texts=["\u0085", "\ufeff"])
@example(pattern=r"^[^\W]$", texts=["é", "a"])
@example(pattern=r"^[[a]]$", texts=["a]", "[]", "a"])
@example(pattern=r"^[a&&b]$", texts=["&", "a"])
@example(pattern=r"^\u{1F600}$", texts=["😀"])
@example(pattern=r"^\cJ$", texts=["\n"])
@example(pattern="^a$", texts=["a\n"])
@example(pattern="^.$", texts=["\r", "\u2029", "\u0085", "😀"])
@example(pattern="(?i)k", texts=["K", "\u212a"])
def test_a_translated_pattern_has_the_same_language(pattern, texts):
    assume(not stacks_quantifiers(pattern))
    schema = {"type": "string", "pattern": pattern}
    try:
        validator = validator_for(read_schema(schema).document)
        translated = {"type": "string", "pattern": to_rust(pattern)}
        compiled = backend().compile(Guide.json_schema(translated))
    except GuideError:  # refused by one of the two
        assume(False)
    for text in texts:
        assert matches(compiled, text) is validator.is_valid(text), (to_rust(pattern), text)


@settings(deadline=None, max_examples=200)
@given(pattern=st.lists(st.sampled_from(PIECES[:29]), max_size=6).map("".join), texts=TEXTS)
def test_simple_patterns_mean_the_same_to_python(pattern, texts):
    # Where `re` with ASCII classes and ECMA-262 agree: no dots, classes of blanks, or final `$`.
    assume(not re.search(r"[.$]|\\[sS]|(?<!\\)[{}]", pattern))
    try:
        python = re.compile(pattern, re.ASCII)
        translated = {"type": "string", "pattern": to_rust(pattern)}
        compiled = backend().compile(Guide.json_schema(translated))
    except (re.error, GuideError):
        assume(False)
    assume(not stacks_quantifiers(pattern))
    for text in texts:
        assert matches(compiled, text) is (python.search(text) is not None), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "stacked"),
    [
        ("a++", True),
        ("a*+", True),
        ("a{2}{3}", True),
        ("a?{2}", True),
        ("(?:a+)+", False),
        ("a+?", False),
        ("a??", False),
        ("a{1,2}?", False),
        ("[+*]+", False),
        (r"\++", False),
        ("[]+]+", False),
        ("a{2}b{3}", False),
        ("x{a}+", False),
    ],
)
def test_a_quantifier_behind_another_one_is_noticed(pattern, stacked):
    assert stacks_quantifiers(pattern) is stacked
