"""Which schemas a part must satisfy, and what is said about it."""

import pytest

from grammar_host.gate import Rules
from grammar_host.schema import read_schema
from grammar_host.schema.reading import UNENFORCED
from tests.grammar_host.schema.generators import ADDRESSES


def rules(schema, draft=20, unenforced=None):
    document = read_schema({"$schema": ADDRESSES[draft], **schema}).document
    return Rules(document if unenforced is None else {**document, UNENFORCED: unenforced})


@pytest.mark.parametrize(
    ("draft", "schema", "step", "pointers"),
    [
        (20, {"properties": {"a/~": {"type": "null"}}}, "a/~", ["/properties/a~1~0"]),
        (20, {"additionalProperties": {"minimum": 0}}, "x", ["/additionalProperties"]),
        (
            20,
            {"additionalProperties": {"minimum": 0}, "properties": {"x": {}}},
            "x",
            ["/properties/x"],
        ),
        # Another pattern may match the name.
        (20, {"additionalProperties": {"minimum": 0}, "patternProperties": {"^b": {}}}, "x", []),
        (20, {"prefixItems": [{"type": "null"}], "items": {"minimum": 0}}, 0, ["/prefixItems/0"]),
        (20, {"prefixItems": [{"type": "null"}], "items": {"minimum": 0}}, 1, ["/items"]),
        (7, {"items": [{"type": "null"}], "additionalItems": {"minimum": 0}}, 0, ["/items/0"]),
        (
            7,
            {"items": [{"type": "null"}], "additionalItems": {"minimum": 0}},
            3,
            ["/additionalItems"],
        ),
        (7, {"items": {"minimum": 0}, "additionalItems": {"minimum": 1}}, 3, ["/items"]),
        # Draft 7 knows no prefixItems, and nothing beside a reference.
        (7, {"prefixItems": [{"type": "null"}], "items": {"minimum": 0}}, 0, ["/items"]),
        (7, {"$ref": "#/definitions/x", "items": {"minimum": 0}, "definitions": {"x": {}}}, 0, []),
        (20, {"$ref": "#/$defs/x", "items": {"minimum": 0}, "$defs": {"x": {}}}, 0, ["/items"]),
        (
            20,
            {"$ref": "#/$defs/x", "$defs": {"x": {"items": {"minimum": 0}}}},
            0,
            ["/$defs/x/items"],
        ),
        (20, {"allOf": [{"items": {"minimum": 0}}, True]}, 0, ["/allOf/0/items"]),
        (20, {"anyOf": [{"items": {"minimum": 0}}]}, 0, []),
        (20, {"then": {"items": {}}, "if": {}, "contains": {"minimum": 0}}, 0, []),
        (20, {"items": False}, 0, []),
    ],
)
def test_parts_must_satisfy_what_always_applies(draft, schema, step, pointers):
    found = rules(schema, draft)
    assert list(found.child(found.root, step)) == pointers


@pytest.mark.parametrize(
    ("schema", "unenforced", "matters"),
    [
        ({"format": "date"}, None, True),
        ({"format": "date"}, ["format"], True),
        ({"format": "date"}, ["oneOf"], False),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"format": "date"}}}, ["format"], True),
        ({"$defs": {"x": {"format": "date"}}}, ["format"], False),
        # What is said about parts by themselves is asked there.
        ({"properties": {"a": {"format": "date"}}}, ["format"], False),
        ({"items": {"format": "date"}}, ["format"], False),
        # What is said about them elsewhere, here.
        ({"contains": {"format": "date"}}, ["format"], True),
        (
            {"anyOf": [{"properties": {"a": {"$ref": "#/$defs/x"}}}], "$defs": {"x": {"not": {}}}},
            ["not"],
            True,
        ),
        ({"patternProperties": {"a": {"format": "date"}}}, ["format"], True),
        (
            {"patternProperties": {"a": {}}, "additionalProperties": {"format": "date"}},
            ["format"],
            True,
        ),
    ],
)
def test_parts_are_looked_at_where_the_engine_may_be_wrong(schema, unenforced, matters):
    found = rules(schema, unenforced=unenforced)
    assert found.matters(found.root) is matters


def test_keys_of_closed_objects_are_known():
    closed = {"properties": {"é": {}, 'q"': {}}, "additionalProperties": False}
    found = rules(closed)
    assert found.keys(found.root) == {'"é"'.encode(), b'"q\\""'}
    assert found.closed_at(found.root) == "/additionalProperties"
    both = rules({"allOf": [closed, {"properties": {"é": {}}, "additionalProperties": False}]})
    assert both.keys(both.root) == {'"é"'.encode()}
    for schema in ({"properties": {"a": {}}}, {**closed, "patternProperties": {"x": {}}}):
        found = rules(schema)
        assert found.keys(found.root) is None
    # Engines that keep the order of keys need no help.
    assert rules(closed, unenforced=["format"]).keys(("",)) is None


@pytest.mark.parametrize(
    ("schema", "text", "violation"),
    [
        ({"type": "null"}, "1", ("type", "/type")),
        (
            {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"minimum": 5}}},
            "1",
            ("minimum", "/$defs/a~1b/minimum"),
        ),
        ({"properties": {"a": False}}, '{"a": 1}', ("a", "/properties/a")),
        ({"items": {"allOf": [{"format": "date"}]}}, '["x"]', ("format", "/items/allOf/0/format")),
        ({}, "1", None),
        ({"type": "null"}, "not JSON", None),
    ],
)
def test_a_violation_has_a_place_in_the_callers_schema(schema, text, violation):
    found = rules(schema)
    assert found.violation(found.root, text.encode()) == violation


def test_a_violation_of_what_was_put_aside_has_its_place():
    schema = {"$ref": "#/properties/a", "properties": {"a": {"type": "null"}}}
    found = rules(schema, draft=7)
    assert found.violation(found.root, b"1") == ("type", "/properties/a/type")
