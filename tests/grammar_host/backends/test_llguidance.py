"""LLGuidance behind the contract: languages, options, what it must refuse, and how it fails."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import (
    CompileCrashError,
    EmptyLanguageError,
    GrammarError,
    GrammarMatcher,
    Guide,
    InvalidGuideError,
    UnsupportedGuideError,
)
from grammar_host.backends.llguidance_source import guide_error
from tests.grammar_host.common import (
    GUIDES,
    PERSON,
    STOP,
    TOOL,
    accepts,
    engine,
    engine_matcher,
    legal,
    mask,
    tokenize,
    tokenizer_info,
    walk,
)
from tests.grammar_host.languages import ACCEPTED, REFUSED

NUMBERS = {"type": "array", "items": {"type": "integer"}}


def matcher_of(guide: Guide, stop_token_ids=()) -> GrammarMatcher:
    return engine_matcher("llguidance", guide, stop_token_ids)


def pairs(table):
    return [pytest.param(g, text, id=f"{g.kind}-{text}") for g, texts in table for text in texts]


@pytest.mark.parametrize(("guide", "text"), pairs(ACCEPTED))
def test_texts_of_the_language_are_accepted(guide, text):
    assert accepts(matcher_of(guide), text)


@pytest.mark.parametrize(("guide", "text"), pairs(REFUSED))
def test_other_texts_are_refused(guide, text):
    assert not accepts(matcher_of(guide), text)


def test_every_way_to_split_what_is_forced_is_legal():
    matcher = matcher_of(Guide.choice(["name"]))
    assert legal(matcher) == [ord("n"), tokenize("name")[0]]
    assert matcher.forced_bytes() == b"name"
    assert legal(matcher) == [ord("n"), tokenize("name")[0]]


# --- JSON ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("[ ]?", ["[1,2]", "[ 1 , 2 ]"], ["[  1]", "[\n1]"]),
        (r"(\n )*", ["[\n \n 1]", "[1]"], ["[ 1]"]),
        (r"\s", ["[\t1,\r2]"], ["[1,  2]", "[1,\u20002]"]),
    ],
)
def test_a_whitespace_pattern_is_honoured(pattern, texts, others):
    guide = Guide.json_schema(NUMBERS, whitespace_pattern=pattern)
    assert all(accepts(matcher_of(guide), text) for text in texts)
    assert not any(accepts(matcher_of(guide), text) for text in [*others, " [1]", "[1] "])


@pytest.mark.parametrize(
    ("pattern", "error", "reason"),
    [
        ("(", InvalidGuideError, "unclosed group"),
        (" \\", InvalidGuideError, "in the middle of an escape"),
        (" |x", InvalidGuideError, "more than JSON's blanks"),
        ("[ ]/", InvalidGuideError, "more than JSON's blanks"),
        ("\f?", InvalidGuideError, "more than JSON's blanks"),
        ("(?= ) ", UnsupportedGuideError, "look-around"),
    ],
)
def test_a_bad_whitespace_pattern_is_refused(pattern, error, reason):
    with pytest.raises(error, match=reason) as info:
        engine("llguidance").compile(Guide.json(whitespace_pattern=pattern))
    assert info.value.param == "whitespace_pattern"


@pytest.mark.parametrize("bound", [1, 8, 1000])
def test_blanks_are_bounded_everywhere(bound):
    matcher = matcher_of(Guide.json_schema(NUMBERS, max_whitespace=bound))
    for part in "[1,2]":
        assert matcher.accept_token(ord(part))
        written = 0
        while ord(" ") in legal(matcher):
            assert matcher.accept_token(ord("\n "[written % 2]))
            written += 1
        assert written == (0 if part == "]" else bound)


def test_engine_options_in_a_schema_are_ignored():
    options = {"lenient": True, "whitespace_pattern": "x"}
    schema = {
        "x-guidance": options,
        "type": "object",
        "properties": {
            "x-guidance": {"type": "integer", "x-guidance": options},
            "b": {"enum": [{"x-guidance": 1}]},
        },
        "required": ["x-guidance", "b"],
        "additionalProperties": False,
    }
    text = '{"x-guidance": 1, "b": {"x-guidance": 1}}'
    assert accepts(matcher_of(Guide.json_schema(schema)), text)
    assert not accepts(matcher_of(Guide.json_schema(schema)), text.replace(": 1,", ": true,"))
    assert not accepts(matcher_of(Guide.json_schema(schema)), text.replace(" ", "x"))
    unique = {"x-guidance": options, "uniqueItems": True, "type": "array"}
    for refused in (unique, {"properties": {"a": unique}}, {"anyOf": [unique, {}]}):
        with pytest.raises(UnsupportedGuideError, match="uniqueItems"):
            engine("llguidance").compile(Guide.json_schema(refused))


@settings(deadline=None, max_examples=40)
@given(name=st.text(max_size=8), escaped=st.booleans())
def test_free_strings_may_be_escaped_or_raw(name, escaped):
    # Raw, LLGuidance writes every character but DEL.
    text = json.dumps({"name": name, "age": 1}, ensure_ascii=escaped or "\x7f" in name)
    text = text.replace("\x7f", r"\u007f")
    assert accepts(matcher_of(Guide.json_schema(PERSON)), text)


@settings(deadline=None, max_examples=25)
@given(picks=st.lists(st.integers(0, 10**6), min_size=80, max_size=80))
def test_every_walk_that_ends_is_a_valid_document(picks):
    matcher = matcher_of(Guide.json_schema(PERSON, max_whitespace=1))
    text = b""
    for pick in picks:
        options = legal(matcher)
        assert options
        if STOP in options:
            break
        closing = [t for t in options if tokenizer_info().vocabulary[t][-1:] in b'"}],:1']
        options = closing if closing and pick % 4 else options
        token = options[pick // 4 % len(options)]
        text += tokenizer_info().vocabulary[token]
        assert matcher.accept_token(token)
    if matcher.is_completed():
        jsonschema.validate(json.loads(text), PERSON)


# --- Tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lark", ['start: <|tool|> "a"', f'start: <[{TOOL}]> "a"',
                                  f'start: <[{TOOL}-258,0]> "a" // <|end|>'])  # fmt: skip
def test_special_tokens_are_legal_where_the_guide_names_them(lark):
    matcher = matcher_of(Guide.lark(lark))
    assert TOOL in legal(matcher)
    assert matcher.forced_bytes() == b""
    assert matcher.accept_token(TOOL)
    assert legal(matcher) == [ord("a")]
    matcher.rollback(1)
    assert TOOL in legal(matcher)


@pytest.mark.parametrize(
    "guide",
    [
        Guide.json_schema({"const": "<|tool|>"}),
        Guide.regex(r"<\|tool\|>"),
        Guide.choice(["<|tool|>"]),
        Guide.grammar(r"root ::= [<] [^\n]+"),
        Guide.lark('start: "<|tool|>"'),
        Guide.lark("start: TEXT // <|tool|>\nTEXT: ~/<[2]>/ // matches invalid UTF-8, too"),
    ],
    ids=lambda guide: guide.kind,
)
def test_special_tokens_are_never_written_as_text(guide):
    matcher = matcher_of(guide)
    for token in tokenize('"<|tool|>"' if guide.kind == "json_schema" else "<|tool|>"):
        for silent in (TOOL, 258, 299):
            assert silent not in legal(matcher)
            assert not matcher.accept_token(silent)
        assert matcher.accept_token(token)
    assert matcher.is_completed()


@pytest.mark.parametrize("wildcard", ["<[*]>", "<[^97]>", "<[0-255]> | <[259-299]>"])
def test_a_wildcard_names_no_special_token(wildcard):
    matcher = matcher_of(Guide.lark(f"start: {wildcard}"))
    tokens = legal(matcher)
    assert ord("b") in tokens
    assert not {STOP, TOOL, 258, 299} & set(tokens)
    assert not matcher.accept_token(TOOL)
    assert not matcher.accept_token(299)


def test_a_request_may_stop_at_an_ordinary_token():
    """As text that token is illegal then; it is legal exactly where the text is complete."""
    comma = ord(",")
    matcher = matcher_of(Guide.json_schema(NUMBERS | {"maxItems": 2}), [comma])
    for token in tokenize("[12"):
        assert comma not in legal(matcher)
        assert not matcher.accept_token(comma)
        assert matcher.accept_token(token)
    assert comma not in legal(matcher)
    assert matcher.accept_token(ord("]"))
    assert legal(matcher) == [comma, STOP]
    for stop in (comma, STOP):
        before = mask(matcher)
        assert matcher.accept_token(stop)
        assert matcher.is_terminated()
        assert matcher.fork().is_terminated()
        matcher.rollback(1)
        np.testing.assert_array_equal(mask(matcher), before)
    assert matcher.is_completed()
    matcher.rollback(1)
    assert not matcher.is_completed()


def test_a_stop_token_that_the_grammar_names_stops_at_its_end():
    matcher = matcher_of(Guide.lark('start: "a" <|end|> | "b" <|end|> "c"'))
    assert matcher.accept_token(ord("b"))
    assert legal(matcher) == []  # not a complete text yet, so that no stop token is legal
    assert not matcher.accept_token(STOP)
    matcher.rollback(1)
    assert matcher.accept_token(ord("a"))
    assert not matcher.is_completed()
    assert legal(matcher) == [STOP]
    assert matcher.accept_token(STOP)
    assert matcher.is_terminated()
    assert matcher.is_completed()
    matcher.rollback(1)
    assert legal(matcher) == [STOP]


# --- Large choices, Lark -----------------------------------------------------------------------


def test_membership_in_a_large_choice():
    guide = Guide.choice([f"item-{number:04d}" for number in range(0, 8000, 2)])
    for number in range(0, 8000, 97):
        assert accepts(matcher_of(guide), f"item-{number:04d}") == (number % 2 == 0)


def test_json_inside_lark_has_bounded_blanks_too():
    lark = 'start: "f=" %json {"type": "array"} | %json {} | %json {"x-guidance": {}}'
    matcher = matcher_of(Guide.lark(lark))
    for token in tokenize("f=[" + " " * 8):
        assert matcher.accept_token(token)
    assert ord(" ") not in legal(matcher)
    assert accepts(matcher_of(Guide.lark(lark)), '{"a": 1}')


LARK = [
    ('start: A B // "\nA: "//" /#\\/[^"]/\nB: "x" # [stop="b"]: ', ["//#/ax"], ["//x"]),
    ('%llguidance {}\n%llguidance {"no_forcing": false}\nstart: "name"', ["name"], ["nam"]),
    ('start: a\na[capture, suffix="="]: /[^=]*/', ["=", "ab="], ["", "ab", "a=="]),
    ('%ignore " "\nstart: "a" "b"', ["ab", "a  b"], [" ab", "ab "]),
]


@pytest.mark.parametrize(("lark", "texts", "others"), LARK)
def test_lark(lark, texts, others):
    assert all(accepts(matcher_of(Guide.lark(lark)), text) for text in texts)
    assert not any(accepts(matcher_of(Guide.lark(lark)), text) for text in others)


# --- Refusals ----------------------------------------------------------------------------------

SCHEMA_REFUSALS = [
    ({"type": "foo"}, InvalidGuideError, "Invalid type: foo"),
    ({"$ref": "#/$defs/none"}, InvalidGuideError, "does not exist"),
    ({"type": "string", "pattern": "(a"}, InvalidGuideError, "unclosed group"),
    ({"enum": []}, EmptyLanguageError, "is empty"),
    ({"anyOf": []}, EmptyLanguageError, "is empty"),
    ({"allOf": [False]}, EmptyLanguageError, "is false"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, EmptyLanguageError, "greater than maximum"),
    ({"required": ["a"], "type": "object", "additionalProperties": False}, EmptyLanguageError, "a"),
    ({"type": "string", "pattern": "a(?=b)"}, UnsupportedGuideError, "look-around"),
    ({"type": "string", "format": "foo"}, UnsupportedGuideError, "Unknown format: foo"),
    ({"not": {"type": "string"}}, UnsupportedGuideError, "Unimplemented keys"),
    ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, UnsupportedGuideError, "oneOf"),
    ({"$ref": "http://example.com/x"}, UnsupportedGuideError, "not present in a registry"),
    ({"patternProperties": {"a": {}, "b": {}}}, UnsupportedGuideError, "not disjoint"),
    ({"items": [{"const": 2**64}]}, UnsupportedGuideError, "64 bits"),
    ({"minimum": -(2**63) - 1}, UnsupportedGuideError, "64 bits"),
]
OTHER_REFUSALS = [
    (Guide.regex("(a"), InvalidGuideError, "unclosed group"),
    (Guide.regex("a\\"), InvalidGuideError, "in the middle of an escape"),
    (Guide.regex("a{2,1}"), InvalidGuideError, "repetition count"),
    (Guide.regex("a(?=b)"), UnsupportedGuideError, "look-around"),
    (Guide.regex(r"(a)\1"), UnsupportedGuideError, "backreferences"),
    (Guide.regex("a$b"), UnsupportedGuideError, "lookarounds"),
    (Guide.lark('start: a\na: "b" | x'), InvalidGuideError, 'line 2: unknown name: "x"'),
    (Guide.lark('start: "a'), InvalidGuideError, "line 1: lexer error"),
    (Guide.lark('foo: "a"'), InvalidGuideError, "no start rule"),
    (Guide.lark('{"grammars": [{"lark_grammar": "start: A"}]}'), InvalidGuideError, "line 1"),
    (Guide.lark('start: %json {"a"'), InvalidGuideError, "expected `:`"),
    (Guide.lark("start: <|nope|>"), InvalidGuideError, r"no special token <\|nope\|>"),
    (Guide.lark("start: <[298-300]>"), InvalidGuideError, "outside of the vocabulary"),
    (Guide.lark('start: %json {"not": {}}'), UnsupportedGuideError, "Unimplemented keys"),
    (
        Guide.lark('start: %json {"not": {}, "x-guidance": {"lenient": true}}'),
        UnsupportedGuideError,
        "Unimplemented keys",
    ),
    (Guide.lark('start: a\na[stop="b"]: /c*/'), UnsupportedGuideError, "line 2: stop= cannot"),
    (Guide.lark("start: a\n?a [lazy, max_tokens=3]: /c*/"), UnsupportedGuideError, "max_tokens="),
    (Guide.lark("start: a\na[temperature=0.5]: /c*/"), UnsupportedGuideError, "temperature="),
    (
        Guide.lark('%llguidance {"allow_invalid_utf8": true}\nstart: "a"'),
        UnsupportedGuideError,
        "option allow_invalid_utf8",
    ),
    (GUIDES["tag"], UnsupportedGuideError, "backend='xgrammar'"),
]


@pytest.mark.parametrize(
    ("guide", "error", "reason"),
    [(Guide.json_schema(schema), error, reason) for schema, error, reason in SCHEMA_REFUSALS]
    + OTHER_REFUSALS,
    ids=lambda value: value.text[:60] if isinstance(value, Guide) else None,
)
def test_what_is_wrong_is_said_in_one_line(guide, error, reason, capfd):
    with pytest.raises(error, match=reason) as info:
        engine("llguidance").compile(guide)
    assert type(info.value) is error
    assert info.value.param == guide.param
    message = str(info.value)
    assert "\n" not in message
    assert "%" not in message.replace("%json", "").replace("%llguidance", "")
    assert " | " not in message  # no excerpt of the guide
    assert capfd.readouterr() == ("", "")


def test_a_panic_is_the_engines_fault_and_its_backtrace_nobodys_business():
    error = guide_error(Guide.regex("a"), "panic: index (is 0)\n<backtrace>\n  0: too many")
    assert type(error) is CompileCrashError
    assert str(error) == "regex: panic: index (is 0)"


TEXTS = {
    "json_schema": json.dumps(PERSON),
    "regex": r"(ab|abc)+[0-9]{2,4}( the)?[^a-c\d]",
    "grammar": 'root ::= "(" root ")" [^a-z]{1,2} | x? Token(257)\nx ::= "\\n"',
    "lark": 'start: "a" /b+/ [tail]\ntail: "é"i | start <[257]> %json {"type": "null"}',
}


@pytest.mark.parametrize("kind", TEXTS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_noise_raises_nothing_but_grammar_errors(kind, data):
    text = TEXTS[kind]
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, len(text)))
        text = (
            text[:start]
            + data.draw(st.text('(){}[]|*+?"\\/^-<>%@~&é\n0a', max_size=4))
            + text[stop:]
        )
    try:
        guide = Guide.json_schema(text) if kind == "json_schema" else Guide(kind, text)
        matcher = matcher_of(guide)
    except GrammarError as error:
        message = str(error)
    else:
        message = ""
        for token in data.draw(st.binary(max_size=8)):
            matcher.accept_token(token)
        walk(matcher, [1, 2, 3])
        matcher.rollback(matcher.num_accepted)
    assert "\n" not in message


def test_the_size_grows_with_the_grammar():
    small, large = (
        engine("llguidance").compile(Guide.choice(["x" * n])).memory_bytes for n in (1, 10_000)
    )
    assert 100_000 < small < large - 100_000
