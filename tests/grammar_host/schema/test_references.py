"""References of every draft become pointers from the root, with the same meaning."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import EmptyLanguageError, InvalidGuideError, UnsupportedGuideError
from grammar_host.schema import read_schema, validator_for
from grammar_host.schema.removal import caller_pointer
from grammar_host.schema.walk import local_pointer, resolve, subschemas
from tests.grammar_host.schema.generators import ADDRESSES, VALIDATORS, Generator

NULL = {"type": "null"}
WORD = {"type": "string"}

# Draft, schema, documents that satisfy it, documents that do not.
MEANINGS = [
    (20, {"$ref": "#/$defs/a~1b", "$defs": {"a/b": NULL}}, [None], [1]),
    (20, {"$ref": "#/$defs/a~0b", "$defs": {"a~b": NULL}}, [None], [1]),
    (20, {"$ref": "#/$defs/a~01b", "$defs": {"a~1b": NULL, "a/b": WORD}}, [None], ["text"]),
    (20, {"$ref": "#/$defs/a%25b", "$defs": {"a%b": NULL}}, [None], [1]),
    (20, {"$ref": "#/$defs/caf%C3%A9", "$defs": {"café": NULL}}, [None], [1]),
    (20, {"$ref": "#/$defs/a%20%22b", "$defs": {'a "b': NULL}}, [None], [1]),
    (20, {"$ref": "#/$defs/", "$defs": {"": NULL}}, [None], [1]),
    (20, {"$ref": "#/$defs/x/allOf/0", "$defs": {"x": {"allOf": [NULL]}}}, [None], [1]),
    (7, {"$ref": "#/definitions/x/items/0", "definitions": {"x": {"items": [NULL]}}}, [None], [1]),
    (20, {"$ref": "#/components/x", "components": {"x": NULL}}, [None], [1]),
    (20, {"$ref": "#name", "$defs": {"x": {"$anchor": "name", **NULL}}}, [None], [1]),
    (7, {"$ref": "#name", "definitions": {"x": {"$id": "#name", **NULL}}}, [None], [1]),
    (4, {"$ref": "#name", "definitions": {"x": {"id": "#name", **NULL}}}, [None], [1]),
    (20, {"$ref": "item", "$defs": {"x": {"$id": "item", **NULL}}}, [None], [1]),
    (4, {"$ref": "item", "definitions": {"x": {"id": "item", **NULL}}}, [None], [1]),
    (
        7,
        {
            "$id": "http://example.org/root.json",
            "properties": {"a": {"$ref": "item.json#/definitions/y"}, "b": {"$ref": "#"}},
            "definitions": {"x": {"$id": "item.json", "definitions": {"y": NULL}}},
        },
        [{"a": None}, {"b": {"a": None}}],
        [{"a": 1}, {"b": {"a": 1}}],
    ),
    # ... also where the reference stands beside an identifier that does not count.
    (
        7,
        {
            "$id": "http://example.org/root.json",
            "properties": {"a": {"$id": "http://other.org/", "$ref": "item.json"}},
            "definitions": {"x": {"$id": "item.json", **NULL}},
        },
        [{"a": None}],
        [{"a": 1}],
    ),
    # A pointer counts from the resource that it stands in.
    (
        20,
        {
            "properties": {"a": {"$ref": "inner"}},
            "$defs": {
                "x": WORD,
                "y": {"$id": "inner", "$ref": "#/$defs/x", "$defs": {"x": NULL}},
            },
        },
        [{"a": None}],
        [{"a": "text"}],
    ),
    # An anchor, too.
    (
        20,
        {
            "properties": {"a": {"$ref": "#n"}, "b": {"$ref": "inner#n"}},
            "$defs": {
                "x": {"$anchor": "n", **WORD},
                "y": {"$id": "inner", "$defs": {"z": {"$anchor": "n", **NULL}}},
            },
        },
        [{"a": "text", "b": None}],
        [{"a": None}, {"b": "text"}],
    ),
    # Beside a reference, `$id` and all other keywords mean nothing up to draft 7.
    (
        7,
        {
            "properties": {"a": {"$id": "http://other/", "$ref": "#/definitions/x", "minimum": 5}},
            "definitions": {"x": {"type": "integer"}},
        },
        [{"a": 1}],
        [{"a": "text"}],
    ),
    # ... but what they hold may be referred to.
    (
        6,
        {
            "$ref": "#/properties/a",
            "properties": {"a": {"items": {"$ref": "#/properties/a/not"}, "not": WORD}},
        },
        [1, ["x"]],
        ["text", [1], [["x"]]],
    ),
    (
        6,
        {
            "allOf": [{"$ref": "#/not/properties/x"}],
            "not": {"properties": {"x": WORD}, "type": "object"},
        },
        ["text"],
        [1],
    ),
    (
        7,
        {
            "properties": {"a": {"$ref": "#/if/properties/x"}, "b": {"$ref": "#/prefixItems/0"}},
            "if": {"properties": {"x": WORD}},
            "prefixItems": [NULL],
        },
        [{"a": "text", "b": None}, [1]],
        [{"a": 1}, {"b": 1}],
    ),
    # The one place that a dynamic reference can lead to.
    (
        20,
        {
            "$dynamicAnchor": "node",
            "type": "object",
            "additionalProperties": {"$dynamicRef": "#node"},
        },
        [{"a": {"b": {}}}],
        [{"a": 1}],
    ),
    (
        19,
        {
            "$recursiveAnchor": True,
            "additionalProperties": {"$recursiveRef": "#"},
            "type": "object",
        },
        [{"a": {"b": {}}}],
        [{"a": 1}],
    ),
    # Recursion that gets somewhere.
    (20, {"type": ["array", "null"], "items": {"$ref": "#"}}, [[[None], []]], [[1]]),
    (
        20,
        {
            "$ref": "#/$defs/Node",
            "$defs": {
                "Node": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "integer"},
                        "next": {"anyOf": [{"$ref": "#/$defs/Node"}, NULL], "default": None},
                    },
                    "required": ["value"],
                    "title": "Node",
                }
            },
        },
        [{"value": 1, "next": {"value": 2, "next": None}}],
        [{"value": 1, "next": {"next": None}}, {"next": None}],
    ),
]


@pytest.mark.parametrize(("draft", "schema", "valid", "invalid"), MEANINGS)
def test_references_mean_what_they_meant(draft, schema, valid, invalid):
    schema = {"$schema": ADDRESSES[draft], **schema}
    document = read_schema(schema).document
    for _, node in subschemas(document):
        assert not {"$id", "id", "$anchor", "$dynamicAnchor", "$dynamicRef"} & node.keys()
        if "$ref" in node:
            resolve(document, local_pointer(node["$ref"]))
    for validator in (VALIDATORS[draft](schema), validator_for(document)):
        assert all(map(validator.is_valid, valid))
        assert not any(map(validator.is_valid, invalid))


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), draft=st.sampled_from([4, 6, 7, 20]))
def test_pointers_anchors_and_addresses_are_the_same(seed, draft):
    generator = Generator(seed, draft)
    plain = generator.root()
    keyword = "definitions" if draft <= 7 else "$defs"
    named = _with_names(plain, keyword, draft, anchored=seed % 2 == 0)
    try:
        expected = validator_for(read_schema(plain).document)
    except EmptyLanguageError:
        with pytest.raises(EmptyLanguageError):
            read_schema(named)
        return
    found = validator_for(read_schema(named).document)
    for document in generator.documents(plain, 6):
        assert found.is_valid(document) == expected.is_valid(document), named


def _with_names(schema, keyword, draft, *, anchored):
    """The schema with its definitions referred to by name."""
    identifier = "id" if draft == 4 else "$id"

    def rename(value):
        if isinstance(value, list):
            return [rename(item) for item in value]
        if not isinstance(value, dict):
            return value
        renamed = {key: rename(item) for key, item in value.items()}
        reference = renamed.get("$ref")
        if isinstance(reference, str) and reference.startswith(f"#/{keyword}/"):
            name = reference.rpartition("/")[2]
            renamed["$ref"] = f"#{name}" if anchored else f"{name}.json"
        elif reference == "#":
            renamed["$ref"] = "http://example.org/root.json"
        return renamed

    named = rename(schema)
    named[identifier] = "http://example.org/root.json"
    if draft <= 7 and "$ref" in schema:
        del named[identifier]  # which would not count there
        named["definitions"] = {**named.get("definitions", {})}
        return schema
    for name, definition in named.get(keyword, {}).items():
        if not isinstance(definition, dict) or (draft <= 7 and "$ref" in definition):
            return schema
        if not anchored:
            definition[identifier] = f"{name}.json"
        elif draft == 20:
            definition["$anchor"] = name
        else:
            definition[identifier] = f"#{name}"
    return named


@pytest.mark.parametrize(
    ("schema", "error", "pointer"),
    [
        ({"$ref": "#/enum/0", "enum": [{"type": "null"}]}, InvalidGuideError, "/$ref"),
        ({"items": {"$ref": "#/default"}, "default": {}}, InvalidGuideError, "/items/$ref"),
        ({"$ref": "#/title", "title": "no schema"}, InvalidGuideError, "/$ref"),
        ({"$ref": "#/$defs/x/0", "$defs": {"x": {}}}, InvalidGuideError, "/$ref"),
        ({"$ref": "#nobody"}, InvalidGuideError, "/$ref"),
        ({"items": {"$ref": "#/items/~2"}}, InvalidGuideError, "/items/$ref"),
        ({"$ref": "other.json"}, UnsupportedGuideError, "/$ref"),
        ({"$ref": "http://json-schema.org/draft-07/schema#"}, UnsupportedGuideError, "/$ref"),
        (
            {
                "$dynamicAnchor": "x",
                "items": {"$dynamicRef": "#x"},
                "$defs": {"y": {"$id": "y", "$dynamicAnchor": "x"}},
            },
            UnsupportedGuideError,
            "/items/$dynamicRef",
        ),
        # Nothing is ever decided.
        ({"$ref": "#"}, EmptyLanguageError, ""),
        ({"allOf": [{"allOf": [{"$ref": "#"}]}]}, EmptyLanguageError, ""),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/b"}},
                "$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"allOf": [{"$ref": "#/$defs/b"}]}},
            },
            EmptyLanguageError,
            "/$defs/b",
        ),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, InvalidGuideError, ""),
        ({"not": {"$ref": "#"}}, InvalidGuideError, ""),
        ({"if": {"$ref": "#"}, "then": {}}, InvalidGuideError, ""),
        ({"dependentSchemas": {"a": {"$ref": "#"}}}, InvalidGuideError, ""),
    ],
)
def test_references_without_a_meaning_are_refused_with_their_place(schema, error, pointer):
    with pytest.raises(error) as info:
        read_schema(schema)
    assert info.value.pointer == pointer


def test_definitions_that_nothing_uses_may_lead_in_circles():
    read_schema({"type": "null", "$defs": {"a": {"$ref": "#/$defs/a"}}})


def test_what_is_put_aside_is_found_again_in_the_callers_schema():
    schema = {
        "$schema": ADDRESSES[7],
        "$ref": "#/properties/a",
        "properties": {"a": {"items": {"$ref": "#/properties/a/not"}, "not": {"type": "null"}}},
    }
    document = read_schema(schema).document
    pointer = local_pointer(document["$ref"])
    assert caller_pointer(pointer) == "/properties/a"
    assert resolve(document, pointer)["not"] == resolve(schema, caller_pointer(pointer))["not"]


def test_pointers_that_an_identifier_deep_inside_breaks_count_from_the_root():
    schema = {
        "$schema": ADDRESSES[4],
        "id": "http://example.org/",
        "properties": {"a": {"id": "/properties/a", "items": {"$ref": "#/definitions/x"}}},
        "definitions": {"x": NULL},
    }
    document = read_schema(schema).document
    assert document["properties"]["a"]["items"] == {"$ref": "#/definitions/x"}
