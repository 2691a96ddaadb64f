"""What `strict` closes, and what it must leave open."""

import jsonschema
import pytest

from grammar_host import Guide
from grammar_host.plan import Planner
from grammar_host.schema import read_schema
from tests.grammar_host.common import tokenizer_info

A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}
X = {"$ref": "#/$defs/x"}

# A schema, documents that stay valid, documents that do not.
CLOSED = {
    "conditions": (
        {"if": {"required": ["a"], **A}, "then": B, "else": {"properties": {"c": {}}}},
        [{"a": 1, "b": 1, "c": 1}],
        [{"d": 1}],
    ),
    "dependencies": ({"dependentSchemas": {"a": B}, **A}, [{"a": 1, "b": 2}], [{"c": 1}]),
    "patterns": ({"patternProperties": {"^x": {}}, **A}, [{"a": 1, "xy": 1}], [{"b": 1}]),
    "patterns alone": ({"patternProperties": {"^x": {}}}, [{"y": 1}], []),
    "patterns of a part": (
        {"allOf": [A, {"patternProperties": {"^x": {}}}]},
        [{"a": 1, "xy": 1}],
        [{"b": 1}],
    ),
    "unions": (
        {"anyOf": [{"required": ["a"], **A}, {"required": ["b"], **B}]},
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}],
    ),
    "unions beside properties": (
        {"properties": {"k": {}}, "anyOf": [A, B]},
        [{"k": 1, "a": 1, "b": 1}],
        [{"c": 1}],
    ),
    "optional models": (
        {
            "$defs": {"x": {"properties": {"next": {"anyOf": [X, {"type": "null"}]}}}},
            **X,
        },
        [{"next": {"next": None}}],
        [{"next": {"other": 1}}],
    ),
    "a definition used alone and built upon": (
        {
            "properties": {
                "p": X,
                "q": {"allOf": [X, B]},
                "r": {"allOf": [X], "description": "as pydantic writes it"},
                "s": {"anyOf": [X, {"type": "null"}]},
            },
            "$defs": {"x": A},
        },
        [{"p": {"a": 1}, "q": {"a": 1, "b": 1}, "r": {"a": 1}, "s": {"a": 1}}],
        [{"p": {"b": 1}}, {"q": {"c": 1}}, {"r": {"b": 1}}, {"s": {"b": 1}}],
    ),
    "tuples": ({"items": {"prefixItems": [{}]}}, [[[1]]], [[[1, 2]]]),
    "tuples with a rest": ({"prefixItems": [{}], "items": {"type": "null"}}, [[1, None]], []),
    "tuples in parts": (
        {"allOf": [{"prefixItems": [{}]}, {"prefixItems": [{}, {}]}]},
        [[1, 2]],
        [],
    ),
    "older tuples": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{}]},
        [[1]],
        [[1, 2]],
    ),
    "what the draft does not know": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{}]},
        [[1, 2]],
        [],
    ),
    "what says itself what else there is": (
        {
            "items": {"additionalProperties": {"type": "null"}, **A},
            "unevaluatedProperties": {},
            **B,
        },
        [{"c": 1}, [{"c": None}]],
        [],
    ),
    "a part that says it": ({"allOf": [A, {"additionalProperties": True}]}, [{"c": 1}], []),
    "what is contained": (
        {"contains": {"required": ["a"], **A}},
        [[{"a": 1}]],
        [[{"a": 1, "b": 1}]],
    ),
    "names that look like keywords": (
        {"properties": {"properties": A, "$ref": {"properties": {"not": {}}}}},
        [{"properties": {"a": 1}, "$ref": {"not": 1}}],
        [{"properties": {"b": 1}}, {"$ref": {"b": 1}}, {"a": 1}],
    ),
    "data": (
        {"properties": {"a": {"const": {"properties": {"b": 1}}}}},
        [{"a": {"properties": {"b": 1}}}],
        [],
    ),
}

# Here a closed part would allow what the schema forbids.
OPEN = {
    "negations": {"not": {"required": ["a"], **A}},
    "negations of definitions": {
        "properties": {"p": {"not": {"properties": {"q": X}, "required": ["q"]}}, "r": X},
        "$defs": {"x": {"properties": {"a": {"properties": {"b": {}}}}, "required": ["a"]}},
    },
    "exactly one": {
        "oneOf": [{"properties": {"p": A}}, {"properties": {"p": B}, "required": ["p"]}]
    },
    "conditions": {"if": {"properties": {"p": A}}, "then": {"required": ["z"]}},
    "at most": {"contains": {"required": ["a"], **A}, "maxContains": 1, "minContains": 0},
}


@pytest.mark.parametrize("name", CLOSED)
def test_what_is_not_mentioned_is_not_allowed(name):
    schema, valid, invalid = CLOSED[name]
    document = read_schema(schema, strict=True).document
    before = jsonschema.validators.validator_for(schema)(schema)
    after = jsonschema.validators.validator_for(document)(document)
    for value in valid:
        assert before.is_valid(value), value
        assert after.is_valid(value), value
    for value in invalid:
        assert before.is_valid(value), value
        assert not after.is_valid(value), value


@pytest.mark.parametrize("name", OPEN)
def test_nothing_that_was_forbidden_becomes_allowed(name):
    schema = OPEN[name]
    before = jsonschema.Draft202012Validator(schema)
    after = jsonschema.Draft202012Validator(read_schema(schema, strict=True).document)
    leaves = [{}, {"a": 1}, {"b": 1}, {"c": 1}, {"a": {"b": 1, "c": 1}}, {"a": {"b": 1}}]
    values = [*leaves, [{"a": 1}, {"a": 1, "b": 1}], [{"a": 1, "b": 1}] * 2]
    values += [{"p": leaf} for leaf in leaves] + [{"p": {"q": leaf}} for leaf in leaves]
    assert any(map(after.is_valid, values))
    for value in values:
        assert before.is_valid(value) or not after.is_valid(value), value


def test_a_recursive_model_stays_exact():
    schema = {
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
            }
        },
        "$ref": "#/$defs/Node",
    }
    plan, _ = Planner(tokenizer_info()).plan(Guide.json_schema(schema, strict=True), "llguidance")
    assert plan.exact
