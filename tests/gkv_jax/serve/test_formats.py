"""Every spelling of a constraint becomes the guide that it means; contradictions are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.tokens import GuideCheckRequest
from grammar_host import Guide

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
}
GBNF, LARK = 'root ::= "a" | "b"', 'start: "a" | "b"'

SPELLINGS: list[tuple[dict[str, Any], Guide, str]] = [
    ({"response_format": {"type": "json_object"}}, Guide.json(), "response_format"),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        Guide.json_schema(SCHEMA),
        "response_format",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        Guide.json_schema(SCHEMA, strict=True),
        "response_format",
    ),
    ({"response_format": {"type": "regex", "regex": "a+"}}, Guide.regex("a+"), "response_format"),
    ({"response_format": {"type": "ebnf", "ebnf": GBNF}}, Guide.grammar(GBNF), "response_format"),
    ({"response_format": {"type": "lark", "lark": LARK}}, Guide.lark(LARK), "response_format"),
    ({"response_format": TAG}, Guide.structural_tag(TAG), "response_format"),
    (
        {"structured_outputs": {"json": SCHEMA}},
        Guide.json_schema(SCHEMA),
        "structured_outputs.json",
    ),
    (
        {"structured_outputs": {"json": '{"type": "integer"}', "disable_any_whitespace": True}},
        Guide.json_schema({"type": "integer"}, max_whitespace=0),
        "structured_outputs.json",
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        Guide.json_schema(SCHEMA, strict=True),
        "structured_outputs.json",
    ),
    (
        {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
        Guide.json(whitespace_pattern=" ?"),
        "structured_outputs.json_object",
    ),
    ({"structured_outputs": {"regex": "a"}}, Guide.regex("a"), "structured_outputs.regex"),
    (
        {"structured_outputs": {"choice": ["b", "a"]}},
        Guide.choice(["b", "a"]),
        "structured_outputs.choice",
    ),
    ({"structured_outputs": {"grammar": GBNF}}, Guide.grammar(GBNF), "structured_outputs.grammar"),
    ({"structured_outputs": {"lark": LARK}}, Guide.lark(LARK), "structured_outputs.lark"),
    (
        {"structured_outputs": {"structural_tag": TAG}},
        Guide.structural_tag(TAG),
        "structured_outputs.structural_tag",
    ),
    ({"guided_json": SCHEMA}, Guide.json_schema(SCHEMA), "guided_json"),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
        Guide.json_schema(SCHEMA, whitespace_pattern=" "),
        "guided_json",
    ),
    ({"guided_regex": "a"}, Guide.regex("a"), "guided_regex"),
    ({"guided_choice": ["a"]}, Guide.choice(["a"]), "guided_choice"),
    ({"guided_grammar": GBNF}, Guide.grammar(GBNF), "guided_grammar"),
    ({"guided_json_object": True}, Guide.json(), "guided_json_object"),
    ({"grammar": GBNF}, Guide.grammar(GBNF), "grammar"),
    ({"json_schema": SCHEMA}, Guide.json_schema(SCHEMA), "json_schema"),
    ({"regex": "a"}, Guide.regex("a"), "regex"),
    ({"ebnf": GBNF}, Guide.grammar(GBNF), "ebnf"),
]


@pytest.mark.parametrize(("fields", "guide", "field"), SPELLINGS)
def test_a_spelling_means_its_guide(fields: dict[str, Any], guide: Guide, field: str) -> None:
    constraint = GuideCheckRequest.model_validate(fields).constraint()
    assert constraint is not None
    assert constraint.guide() == guide
    assert constraint.field == field
    # Keys keep the client's order.
    assert guide.kind != "json_schema" or list(constraint.guide().document) == list(guide.document)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}])
def test_nothing_asked_is_free_text(fields: dict[str, Any]) -> None:
    assert GuideCheckRequest.model_validate(fields).constraint() is None


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        ({"regex": "a"}, None),
        ({"regex": "a", "backend": "xgrammar"}, "xgrammar"),
        ({"structured_outputs": {"regex": "a", "backend": "guidance"}}, "llguidance"),
        ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, "outlines"),
        ({"structured_outputs": {"regex": "a", "backend": "auto"}, "backend": "auto"}, "auto"),
    ],
)
def test_the_engine_is_the_one_asked_for(fields: dict[str, Any], backend: str | None) -> None:
    constraint = GuideCheckRequest.model_validate(fields).constraint()
    assert constraint is not None
    assert constraint.backend == backend


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "regex"}},
        {"response_format": {"type": "regex", "regex": "a", "ebnf": GBNF}},
        {"response_format": {"type": "structural_tag"}},
        {"response_format": {"type": "structural_tag", "triggers": ["<"]}},
        {"response_format": {"type": "json_object", "regex": "a"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "lark": LARK}},
        {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
        {
            "structured_outputs": {
                "json": {},
                "whitespace_pattern": " ",
                "disable_any_whitespace": True,
            }
        },
        {"structured_outputs": {"regexp": "a"}},
        {"guided_json_object": False},
    ],
)
def test_what_is_no_constraint_is_invalid(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GuideCheckRequest.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "ebnf": GBNF}, "ebnf"),
        ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "guided_json"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_decoding_backend": "auto"}, "guided_decoding_backend"),
        ({"regex": "a", "guided_decoding_backend": "auto"}, "guided_decoding_backend"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex"),
        (
            {"structured_outputs": {"regex": "a", "backend": "xgrammar"}, "backend": "outlines"},
            "backend",
        ),
        ({"backend": "xgrammar"}, "backend"),
    ],
)
def test_contradictions_name_a_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        GuideCheckRequest.model_validate(fields).constraint()
    assert (raised.value.status, raised.value.param) == (400, param)


def test_an_invalid_guide_is_told_with_its_field() -> None:
    constraint = GuideCheckRequest.model_validate({"guided_json": "{"}).constraint()
    assert constraint is not None
    with pytest.raises(ApiError) as raised:
        constraint.guide()
    assert (raised.value.param, raised.value.code) == ("guided_json", "invalid_json_schema")
