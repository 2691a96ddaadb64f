"""What is left out for an engine, and what stays."""

import jsonschema
import pytest

from grammar_host.schema import read_schema
from grammar_host.schema.for_llguidance import (
    leave_out_beside_circles,
    leave_out_imprecise,
    leave_out_refused,
    leave_out_unknown,
)
from grammar_host.schema.for_xgrammar import leave_out_ignored_by_xgrammar
from grammar_host.schema.order import restore_property_order
from grammar_host.schema.removal import Removal
from grammar_host.schema.rewrite import lower_for_llguidance, modernize
from grammar_host.schema.walk import referred, subschemas
from grammar_host.schema.weaken import any_for_one, in_any_order, merge_patterns, weaken

TREE = {"$defs": {"t": {"items": {"$ref": "#/$defs/t"}}}}


def refuse_everything(schema):
    return False


@pytest.mark.parametrize(
    ("step", "schema", "rest", "missing"),
    [
        (leave_out_unknown, {"not": {}, "minItems": 1}, {"minItems": 1}, ["/not"]),
        (leave_out_unknown, {"format": "iri"}, {}, ["/format"]),
        (leave_out_unknown, {"format": "date"}, {"format": "date"}, []),
        (
            leave_out_unknown,
            {"properties": {"a": {}}, "required": ["a"], "minProperties": 2},
            {"properties": {"a": {}}, "required": ["a"], "minProperties": 2},
            [],
        ),
        (
            leave_out_unknown,
            {"properties": {"a": {}}, "maxProperties": 2},
            {"properties": {"a": {}}},
            ["/maxProperties"],
        ),
        (
            leave_out_unknown,
            {"properties": {"a": {}}, "patternProperties": {"^a": {}, "^b": {}, "(?<x": {}}},
            {"properties": {"a": {}}, "patternProperties": {"^a": True, "^b": {}, "(?<x": True}},
            ["/patternProperties/^a", "/patternProperties/(?<x"],
        ),
        (leave_out_imprecise, {"maximum": 2**53 + 1}, {}, ["/maximum"]),
        (
            leave_out_imprecise,
            {"type": "integer", "maximum": 2**63 - 1},
            {"type": "integer", "maximum": 2**63 - 1},
            [],
        ),
        (leave_out_imprecise, {"enum": [{"a": [2**60 + 1]}]}, {}, ["/enum"]),
        (leave_out_imprecise, {"const": 1e-7}, {}, ["/const"]),
        (leave_out_imprecise, {"multipleOf": 0.25}, {"multipleOf": 0.01}, ["/multipleOf"]),
        (leave_out_imprecise, {"multipleOf": 0.05}, {"multipleOf": 0.05}, []),
        (leave_out_imprecise, {"multipleOf": 250}, {"multipleOf": 250}, []),
        (leave_out_imprecise, {"pattern": "a++"}, {}, ["/pattern"]),
        (leave_out_refused(refuse_everything), {"pattern": "a"}, {}, ["/pattern"]),
        (leave_out_refused(refuse_everything), {"multipleOf": 3}, {}, ["/multipleOf"]),
        (
            leave_out_refused(lambda schema: schema.get("pattern") != "a"),
            {"patternProperties": {"a": {"type": "null"}, "b": {}}, "additionalProperties": False},
            {
                "patternProperties": {"b": {}},
                "additionalProperties": {"anyOf": [False, {"type": "null"}]},
            },
            ["/patternProperties/a"],
        ),
        (any_for_one, {"oneOf": [{}]}, {"anyOf": [{}]}, ["/oneOf"]),
        (
            any_for_one,
            {"oneOf": [{}], "anyOf": [True]},
            {"anyOf": [True], "allOf": [{"anyOf": [{}]}]},
            ["/oneOf"],
        ),
        (
            in_any_order,
            {"properties": {"a.b": {}, "é": {}}, "required": ["a.b"]},
            {"patternProperties": {"^a\\.b$": {}, "^é$": {}}},
            ["/required"],
        ),
        (
            in_any_order,
            {"properties": {"a": {}}, "patternProperties": {"b": {}}, "required": ["a"]},
            {"properties": {"a": {}}, "patternProperties": {"b": {}}, "required": ["a"]},
            [],
        ),
        (
            merge_patterns,
            {"patternProperties": {"a": {"minimum": 1}, "b": {"maximum": 3}}},
            {"patternProperties": {"(?:a)|(?:b)": {"anyOf": [{"minimum": 1}, {"maximum": 3}]}}},
            ["/patternProperties"],
        ),
        (
            leave_out_beside_circles,
            {**TREE, "$ref": "#/$defs/t", "maxItems": 2},
            {**TREE, "$ref": "#/$defs/t"},
            ["/maxItems"],
        ),
        (
            leave_out_beside_circles,
            {**TREE, "allOf": [{"$ref": "#/$defs/t"}], "maxItems": 2},
            {**TREE, "$ref": "#/$defs/t"},
            ["/allOf", "/maxItems"],
        ),
        (
            leave_out_beside_circles,
            {**TREE, "anyOf": [{"$ref": "#/$defs/t"}, {}], "maxItems": 2},
            {**TREE, "maxItems": 2},
            ["/anyOf"],
        ),
        (
            leave_out_beside_circles,
            {**TREE, "anyOf": [{"$ref": "#/$defs/t"}, {}]},
            {**TREE, "anyOf": [{"$ref": "#/$defs/t"}, {}]},
            [],
        ),
        (leave_out_ignored_by_xgrammar, {"minimum": 2**53}, {}, ["/minimum"]),
        (leave_out_ignored_by_xgrammar, {"uniqueItems": True}, {}, ["/uniqueItems"]),
    ],
)
def test_one_step(step, schema, rest, missing):
    assert weaken(schema, (step,)) == (rest, missing)


def test_exactly_one_of_weaker_alternatives_becomes_any_of_them():
    schema = {
        "oneOf": [{"$ref": "#/$defs/x"}, {"type": "null"}],
        "items": {"oneOf": [{"type": "string"}]},
        "$defs": {"x": {"items": {"not": {"minItems": 1}}}},
    }
    document, missing = weaken(schema, (leave_out_unknown,))
    assert "oneOf" not in document
    assert document["items"] == schema["items"]
    assert missing == ["/$defs/x/items/not", "/oneOf"]


def test_references_into_what_is_left_out_still_lead_somewhere():
    schema = {
        "not": {"items": {"type": "null"}},
        "contains": {"$ref": "#/not/items"},
        "allOf": [{"$ref": "#/contains"}],
    }
    document, _ = weaken(schema, (leave_out_unknown,))
    assert referred(document, document["allOf"][0]) == {"$ref": "#/x-aside/not/items"}
    assert referred(document, referred(document, document["allOf"][0])) == {"type": "null"}


def test_references_into_properties_survive_another_order():
    schema = {"properties": {"a": {"type": "null"}, "b": {"$ref": "#/properties/a"}}}
    document, _ = weaken(schema, (in_any_order,))
    validator = jsonschema.Draft202012Validator(document)
    assert validator.is_valid({"b": None, "a": None})
    assert not validator.is_valid({"b": 1})


def test_removals_keep_only_what_is_referred_to():
    schema = {"a": 1, "items": {"not": {}}, "if": {"then": {}}, "$ref": "#/if/then"}
    removal = Removal(schema)
    for pointer, node in list(subschemas(schema)):
        for keyword in {"items", "if", "then", "not"} & node.keys():
            removal.remove(pointer, node, keyword)
    removal.finish()
    assert schema["x-aside"] == {"if": {"x-aside": {"then": {}}}}
    assert referred(schema, schema) == {}
    assert "items" not in schema


@pytest.mark.parametrize(
    ("schema", "order"),
    [
        ({"properties": {"b": {}, "a": {"not": {}}}}, ["b", "a"]),
        ({"allOf": [{"properties": {"c": {}}}], "properties": {"b": {}}}, ["c", "b"]),
        (
            {
                "$ref": "#/$defs/x",
                "properties": {"b": {}},
                "$defs": {"x": {"properties": {"z": {}}}},
            },
            ["b", "z"],
        ),
    ],
)
def test_the_canonical_form_gets_the_callers_order_back(schema, order):
    schema = {"type": "object", **schema, "required": sorted(order)}
    schema["properties"]["a"] = {"type": "integer"} if "a" in order else {}
    order = order if "a" in order else [*order]
    schema_read = read_schema(schema)
    restored, in_order = restore_property_order(schema_read.canonical, schema_read.document)
    names = [name for name in restored["properties"] if name in order]
    assert in_order
    assert names == order
    assert [name for name in restored["required"] if name in order] == order


def test_names_without_an_order_are_noticed():
    schema = read_schema({"type": "object", "dependentRequired": {"a": ["b", "c"]}})
    assert not restore_property_order(schema.canonical, schema.document)[1]


@pytest.mark.parametrize(
    ("schema", "lowered"),
    [
        (
            {"type": "integer", "exclusiveMinimum": 1, "minimum": 1.5},
            {"type": "integer", "minimum": 2},
        ),
        ({"type": "integer", "exclusiveMaximum": 2.5}, {"type": "integer", "maximum": 2}),
        ({"type": "number", "exclusiveMaximum": 2.5}, {"type": "number", "exclusiveMaximum": 2.5}),
        (
            {"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "null"}},
            {"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"enum": ["a.", "b"]}},
            {"patternProperties": {"^(?:a\\.|b)$": True}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"enum": ["a"]}, "properties": {"a": {}, "b": {}}},
            {"properties": {"a": {}, "b": False}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"pattern": "a"}, "unevaluatedProperties": False},
            {"propertyNames": {"pattern": "a"}, "unevaluatedProperties": False},
        ),
        (
            {"patternProperties": {r"\d": {"minimum": 1}, "[0-9]": {"maximum": 2}}},
            {"patternProperties": {"[0-9]": {"allOf": [{"minimum": 1}, {"maximum": 2}]}}},
        ),
        (
            {"dependentRequired": {"a": ["b"]}, "properties": {"a": {}, "b": {}}},
            {
                "properties": {"a": {}, "b": {}},
                "allOf": [{"anyOf": [{"properties": {"a": False}}, {"required": ["b"]}]}],
            },
        ),
        (
            {"dependentRequired": {"a": ["b"]}},
            {"allOf": [{"dependentSchemas": {"a": {"required": ["b"]}}}]},
        ),
    ],
)
def test_lowering(schema, lowered):
    document = lower_for_llguidance(modernize(schema))
    del document["$schema"]
    assert document == lowered
