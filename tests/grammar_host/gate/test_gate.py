"""What is finished is valid: the gate over an engine that allows any JSON."""

import functools
import json

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grammar_host import DeadEndError, GrammarMatcher, Guide
from grammar_host.gate import Closers, with_gate
from grammar_host.gate.cursor import START, follow
from grammar_host.gate.rules import Rules
from grammar_host.schema import read_schema
from tests.grammar_host.common import (
    STOP,
    VOCAB_SIZE,
    accepts,
    bits,
    compiler,
    mask,
    tokenize,
    tokenizer_info,
    walk,
)

ANY_JSON = Guide.json_schema({})


@functools.cache
def closers():
    return Closers(tokenizer_info())


def gated(schema, stops=(STOP,)):
    """A matcher that only the gate keeps from writing any JSON."""
    engine = compiler().compile(ANY_JSON).compiled.new_matcher
    document = read_schema(schema).document
    new_matcher = with_gate(engine, document, tokenizer_info(), closers())
    return GrammarMatcher(new_matcher(frozenset(stops)), VOCAB_SIZE, stops)


SCALARS = st.sampled_from([None, True, False, 0, 1, -1, 2.5, "", "a", "ab", 'q"', "\\", "é", "😀"])
KEYS = st.sampled_from(["a", "b", "c", 'q"', "é", "\\", ""])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
LEAVES = st.sampled_from(
    [
        True,
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"not": {"type": "null"}},
        {"enum": ["a", 1, None]},
        {"pattern": "^a"},
        {"uniqueItems": True},
        {"contains": {"type": "string"}},
        {"minProperties": 1},
        {"type": "array", "maxItems": 1},
        {"not": {"required": ["b"]}},
        {"propertyNames": {"maxLength": 1}},
        {"multipleOf": 2},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(lambda item: {"items": item}, inner)
        | st.builds(
            lambda items: {"prefixItems": items, "items": True},
            st.lists(inner, min_size=1, max_size=2),
        )
        | st.builds(
            lambda properties, rest, required: {
                "properties": properties,
                "additionalProperties": rest,
                "required": required,
            },
            st.dictionaries(KEYS, inner, max_size=2),
            inner | st.just(False),
            st.lists(KEYS, max_size=1),
        )
        | st.builds(lambda parts: {"allOf": parts}, st.lists(inner, min_size=1, max_size=2))
        | st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=2))
        | st.builds(lambda parts: {"oneOf": parts}, st.lists(inner, min_size=2, max_size=2))
        | st.builds(lambda test, then: {"if": test, "then": then}, inner, inner)
        | st.builds(lambda part: {"$defs": {"x/y": part}, "$ref": "#/$defs/x~1y"}, inner)
    ),
    max_leaves=5,
)


def is_valid(schema, value):
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def readable(schema):
    try:
        read_schema(schema)
    except ValueError:  # nothing satisfies it
        return False
    return True


@settings(deadline=None, max_examples=150)
@given(schema=SCHEMAS, value=VALUES, data=st.data())
def test_a_document_is_accepted_exactly_if_it_is_valid_however_it_is_split(schema, value, data):
    assume(readable(schema))
    separators = data.draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]))
    ascii_only = data.draw(st.booleans())
    text = json.dumps(value, ensure_ascii=ascii_only, separators=separators).encode()
    matcher = gated(schema)
    ids = {token: i for i, token in enumerate(tokenizer_info().vocabulary) if token}
    while text:
        fits = [token for token in ids if text.startswith(token)]
        token = data.draw(st.sampled_from(fits))
        legal = ids[token] in bits(mask(matcher))
        assert matcher.accept_token(ids[token]) is legal
        if not legal:
            break
        text = text[len(token) :]
    stopped = not text and matcher.accept_token(STOP)
    assert stopped is is_valid(schema, value)


@settings(deadline=None, max_examples=25)
@given(
    schema=SCHEMAS, choices=st.lists(st.integers(0, 10**6), max_size=12), back=st.integers(0, 12)
)
def test_the_contract_of_a_matcher(schema, choices, back):
    assume(readable(schema))
    matcher = gated(schema)
    states = [mask(matcher)]
    tokens = []
    for choice in choices:
        tokens += walk(matcher, [choice])
        if len(tokens) == len(states):
            states.append(mask(matcher))
    if not matcher.is_terminated():
        accepted = [t for t in range(VOCAB_SIZE) if matcher.validate_tokens([t])]
        assert accepted == list(bits(states[-1]))
    fork = matcher.fork()
    back = min(back, len(tokens))
    matcher.rollback(back)
    for position in range(len(tokens) - back, len(tokens) + 1):
        np.testing.assert_array_equal(mask(matcher), states[position])
        if position < len(tokens):
            assert matcher.accept_token(tokens[position])
    np.testing.assert_array_equal(mask(fork), states[-1])


@pytest.mark.parametrize(
    ("schema", "text", "illegal"),
    [
        ({"uniqueItems": True}, "[1,1", "]"),
        ({"items": {"uniqueItems": True}}, "[[1,1", "]"),
        ({"properties": {"a": {"required": ["b"]}}}, '{"a":{"c":1', "}"),
        ({"contains": {"const": 3}}, "[1", "]"),
        ({"additionalProperties": {"not": {"const": "a"}}}, '{"x":"a', '"'),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a":1', "}"),
        ({}, '{"a":1,"a', '"'),
        ({"properties": {"a": {}}, "additionalProperties": False}, '{"a":1', ","),
        ({"properties": {"ab": {}, "ac": {}}, "additionalProperties": False}, '{"ab":1,"a', "b"),
        ({"properties": {"ab": {}, "ac": {}}, "additionalProperties": False}, '{"', "x"),
    ],
)
def test_the_token_that_would_finish_or_spoil_a_part_is_illegal(schema, text, illegal):
    matcher = gated(schema)
    for byte in text.encode():
        assert matcher.accept_token(byte)
    legal = bits(mask(matcher))
    assert ord(illegal) not in legal
    assert len(legal) > 0  # there is a way to go on
    assert not matcher.accept_token(ord(illegal))


def test_a_number_as_a_document_may_go_on_until_it_is_valid():
    matcher = gated({"type": "integer", "multipleOf": 7})
    assert matcher.accept_token(ord("1"))
    assert not matcher.is_completed()
    assert STOP not in bits(mask(matcher))
    assert matcher.accept_token(ord("4"))
    assert matcher.is_completed()
    assert STOP in bits(mask(matcher))


def test_stop_tokens_with_bytes_are_gated_like_the_others():
    matcher = gated({"uniqueItems": True}, stops=(STOP, ord("x")))
    for token in tokenize("[1, 2"):
        assert matcher.accept_token(token)
    assert not matcher.accept_token(ord("x"))
    assert matcher.accept_token(ord("]"))
    assert {STOP, ord("x")} <= set(bits(mask(matcher)))
    assert matcher.accept_token(ord("x"))
    assert matcher.is_terminated()


def test_numbers_beyond_floats_are_not_valid_documents():
    assert accepts(gated({"uniqueItems": True}).fork(), "[1e5, 2]")
    assert not accepts(gated({"items": {"maximum": 5}}), "[1e999]")


def test_a_dead_end_names_the_keyword_and_its_place():
    schema = {
        "type": "object",
        "properties": {"a~/b": {"type": "array", "items": {}, "uniqueItems": True}},
    }
    matcher = gated(schema)
    for token in tokenize('{"a~/b": [1, 1'):
        assert matcher.accept_token(token)
    mask(matcher)
    error = matcher.explain_dead_end()
    assert isinstance(error, DeadEndError)
    assert "uniqueItems" in str(error)
    assert error.pointer == "/properties/a~0~1b/uniqueItems"


@pytest.mark.parametrize(
    ("schema", "text", "pointer"),
    [
        (
            {"$defs": {"x": {"uniqueItems": True}}, "$ref": "#/$defs/x"},
            "[1,1",
            "/$defs/x/uniqueItems",
        ),
        (
            {"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"maxItems": 1}}},
            "[[1,1",
            "/$defs/x/maxItems",
        ),
        ({"allOf": [{"required": ["b"]}]}, '{"a":1', "/allOf/0/required"),
    ],
)
def test_the_place_of_a_violation_is_one_of_the_callers_schema(schema, text, pointer):
    matcher = gated(schema)
    for token in tokenize(text):
        assert matcher.accept_token(token)
    mask(matcher)
    assert matcher.explain_dead_end().pointer == pointer


def test_only_schemas_that_always_apply_are_used_for_parts():
    rules = Rules(
        read_schema(
            {
                "properties": {"a": {"type": "string"}},
                "patternProperties": {"^b": {"type": "null"}},
                "additionalProperties": {"type": "integer"},
                "anyOf": [{"properties": {"a": {"minLength": 3}}}],
                "allOf": [{"properties": {"a": {"maxLength": 5}}}, {"$ref": "#/$defs/d"}],
                "$defs": {"d": {"properties": {"a": {"format": "date"}}}},
            }
        ).document
    )
    assert set(rules.child(rules.root, "a")) == {
        "/properties/a",
        "/allOf/0/properties/a",
        "/$defs/d/properties/a",
    }
    assert rules.child(rules.root, "bb") == ()


@settings(deadline=None, max_examples=100)
@given(value=VALUES, data=st.data())
def test_a_cursor_finds_the_end_of_a_document_in_any_split(value, data):
    assume(isinstance(value, dict | list | str))
    text = json.dumps(value, ensure_ascii=False).encode()
    rules = Rules(read_schema({}).document)
    cursor, position = START, 0
    while position < len(text):
        assert not cursor.closed
        end = position + data.draw(st.integers(1, 4))
        moved = follow(cursor, text[:end], position, rules)
        assert moved is not None
        cursor, position = moved, end
    assert cursor.closed
