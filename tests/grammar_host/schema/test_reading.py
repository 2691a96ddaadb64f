"""What callers write as a schema, read or refused with the place."""

import http.server
import threading

import pytest

from grammar_host import (
    EmptyLanguageError,
    GrammarTooComplexError,
    InvalidGuideError,
    UnsupportedGuideError,
)
from grammar_host.schema import read_schema

DRAFT_4 = "http://json-schema.org/draft-04/schema#"


@pytest.mark.parametrize(
    ("schema", "draft"),
    [
        ({}, 20),
        (True, 20),
        ({"$schema": "http://json-schema.org/draft-04/schema"}, 4),
        ({"$schema": "https://json-schema.org/draft-07/schema#"}, 7),
        ({"$schema": "http://json-schema.org/draft-06/schema#"}, 6),
        ({"$schema": "https://json-schema.org/draft/2019-09/schema"}, 19),
        ({"items": [{"type": "string"}]}, 7),
        ({"minimum": 1, "exclusiveMinimum": True}, 4),
        ({"items": [{"minimum": 1, "exclusiveMinimum": True}]}, 4),
    ],
)
def test_the_draft_is_declared_or_the_newest_that_fits(schema, draft):
    read = read_schema(schema)
    assert read.draft == draft
    guessed = isinstance(schema, dict) and "$schema" not in schema and draft != 20
    assert bool(read.notes) is guessed


@pytest.mark.parametrize(
    ("schema", "error", "pointer"),
    [
        ({"type": "nonsense"}, InvalidGuideError, "/type"),
        ({"if": 5}, InvalidGuideError, "/if"),
        ({"properties": {"a/b": {"minimum": "1"}}}, InvalidGuideError, "/properties/a~1b/minimum"),
        ({"$defs": {"x": {"allOf": [{"patternProperties": 1.5}]}}}, InvalidGuideError, None),
        ({"$ref": "#/$defs/none"}, InvalidGuideError, "/$ref"),
        ({"$ref": "https://example.org/schema"}, UnsupportedGuideError, "/$ref"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, UnsupportedGuideError, "/$schema"),
        ({"$schema": 5}, InvalidGuideError, "/$schema"),
        ({"$ref": "#"}, EmptyLanguageError, ""),
        (
            {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#"}}},
            EmptyLanguageError,
            None,
        ),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, EmptyLanguageError, None),
        ({"enum": []}, EmptyLanguageError, None),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            EmptyLanguageError,
            None,
        ),
        ({"pattern": "("}, InvalidGuideError, None),
    ],
)
def test_what_is_wrong_is_said_with_its_place(schema, error, pointer):
    with pytest.raises(error) as info:
        read_schema(schema)
    assert info.value.param == "schema"
    if pointer is not None:
        assert info.value.pointer == pointer


def test_no_address_is_ever_fetched():
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/schema"
        for schema in (
            {"$schema": address},
            {"$ref": address},
            {"$id": address, "$ref": "other"},
            {"properties": {"a": {"$schema": address, "$ref": address + "#/a"}}},
        ):
            with pytest.raises(UnsupportedGuideError):
                read_schema(schema)
        server.shutdown()
    assert asked == []


def test_combinations_that_double_are_refused_and_recursion_is_not():
    definitions = {"d0": {"uniqueItems": True}}
    for level in range(1, 30):
        below = {"$ref": f"#/$defs/d{level - 1}"}
        definitions[f"d{level}"] = {"allOf": [below, below]}
    with pytest.raises(GrammarTooComplexError, match="measured against"):
        read_schema({"$ref": "#/$defs/d29", "$defs": definitions})
    tree = {
        "type": "object",
        "properties": {
            "left": {"$ref": "#"},
            "right": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
    }
    assert read_schema(tree).draft == 20


@pytest.mark.parametrize(
    "reference", ["#/$defs/gr%C3%B6%C3%9Fe", "#/$defs/größe", "#/%24defs/größe", "#name"]
)
def test_references_are_read_however_they_are_written(reference):
    schema = {"$ref": reference, "$defs": {"größe": {"$anchor": "name", "type": "null"}}}
    assert read_schema(schema).document["$ref"] == "#/$defs/gr%C3%B6%C3%9Fe"


def test_property_names_that_look_like_keywords_are_kept():
    names = ["$ref", "properties", "enum", "not", "format", "x-guidance", "items", "required"]
    schema = {"properties": {name: {"type": "null"} for name in names}}
    assert list(read_schema(schema).document["properties"]) == names


def test_data_that_looks_like_a_schema_is_not_touched():
    data = {"$ref": "#/nowhere", "x-guidance": {}, "format": "nonsense", "$schema": "x"}
    schema = {"const": data, "default": data, "examples": [data]}
    document = read_schema(schema).document
    assert {key: document[key] for key in schema} == schema


def test_options_of_an_engine_and_unknown_formats_are_dropped():
    schema = {"x-guidance": {"lenient": True}, "format": "nonsense", "items": {"format": "date"}}
    document = read_schema(schema).document
    assert "x-guidance" not in document
    assert "format" not in document
    assert document["items"] == {"format": "date"}


def test_the_callers_schema_is_not_changed():
    schema = {"items": [{"x-guidance": {}}], "properties": {"a": {"properties": {"b": {}}}}}
    before = repr(schema)
    read_schema(schema, strict=True)
    assert repr(schema) == before


CLOSED = [
    ({"properties": {"a": {}}}, {"a": 1}, {"b": 1}),
    ({"properties": {"a": {}}, "additionalProperties": True}, {"b": 1}, None),
    ({"type": "object"}, {"b": 1}, None),
    ({"properties": {"a": {"properties": {"b": {}}}}}, {"a": {"b": 1}}, {"a": {"c": 1}}),
    ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, {"a": 1, "b": 1}, {"c": 1}),
    (
        {"$ref": "#/$defs/x", "description": "d", "$defs": {"x": {"properties": {"a": {}}}}},
        {"a": 1},
        {"b": 1},
    ),
    (
        {
            "properties": {"p": {"$ref": "#/$defs/x"}},
            "allOf": [
                {"properties": {"q": {"allOf": [{"$ref": "#/$defs/x"}], "properties": {"b": {}}}}}
            ],
            "$defs": {"x": {"properties": {"a": {}}}},
        },
        {"p": {"a": 1}, "q": {"a": 1, "b": 1}},
        {"p": {"b": 1}},
    ),
    ({"prefixItems": [{}]}, [1], [1, 2]),
    ({"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, {"a": 1}, {"c": 1}),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), CLOSED)
def test_strict_schemas_are_closed_to_what_they_do_not_mention(schema, valid, invalid):
    import jsonschema

    document = read_schema(schema, strict=True).document
    validator = jsonschema.Draft202012Validator(document)
    assert validator.is_valid(valid)
    if invalid is not None:
        assert not validator.is_valid(invalid)
        assert jsonschema.Draft202012Validator(schema).is_valid(invalid)
