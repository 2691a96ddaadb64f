"""Guides with texts that belong to their language and texts that do not, the same for every engine
that serves the kind."""

from __future__ import annotations

from grammar_host import Guide
from tests.grammar_host.common import PERSON

TREE = {
    "type": "object",
    "properties": {
        "value": {"type": "number"},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["value"],
    "additionalProperties": False,
}
UNION = {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": "http://é/\\"}]}
NAMED = {"type": "object", "properties": {"a": {"type": "null"}}}
SOME = {"type": "array", "minItems": 1, "prefixItems": []}

ACCEPTED = [
    (Guide.json(), ["{}", '{"a": [1, {"b": "\\u00e9\\n"}], "😀": -0.5e-3}', '{ "a" :\n  null }']),
    (Guide.json_schema(PERSON), ['{"name": "déjà", "age": 0}', '{"name":"","age":150,"tags":[]}']),
    (Guide.json_schema(TREE), ['{"value": 1, "children": [{"value": 2}, {"value": -3.5}]}']),
    (Guide.json_schema(UNION), ["true", "null", '"http://é/\\\\"']),
    (Guide.json_schema(True), ["12", "[]", '"a"']),
    (Guide.json_schema(NAMED), ['{"a": null}', '{"a": null, "b": 1}']),
    (Guide.json_schema(SOME), ["[1, {}]"]),
    (Guide.json_schema(PERSON, max_whitespace=0), ['{"name":"a","age":1,"tags":["é"]}']),
    (Guide.json(max_whitespace=2), ['{  "a"\n\t:  1}', "{ }"]),
    (Guide.json(max_whitespace="free"), ["{\n" + " " * 40 + '"a": 1}']),
    (Guide.regex(r"\d{4}-\d{2}(-[a-z]+)?"), ["2024-01", "1234-56-abc"]),
    (Guide.regex("(😀|é)*$"), ["", "😀é😀"]),
    (Guide.regex(r"^[^/\\]+/\w\s\.$"), ['日"本/a\t.']),
    (Guide.grammar('root ::= "(" root ")" root | ""'), ["", "()(())", "((()))()"]),
    (Guide.lark('start: WORD (", " WORD)*\nWORD: /[a-z]+/'), ["ab", "ab, abc, name"]),
    (
        Guide.choice(["yes", "no", "", 'a"b\\c', "x\ny\t\x01\x7f", "a/b", "😀"]),
        ["", 'a"b\\c', "x\ny\t\x01\x7f", "a/b", "😀"],
    ),
]
REFUSED = [
    (Guide.json(), ["[]", "12", '{"a": 01}', "{'a': 1}", '{"a": "\n"}', "{}}", "", " {}", "{} "]),
    (
        Guide.json_schema(PERSON),
        [
            '{"name": "a"}',
            '{"name": "a", "age": 151}',
            '{"name": "a", "age": -1}',
            '{"age": 1, "name": "a"}',
            '{"name": "a", "age": 1, "x": 1}',
            '{"name": "a", "age": 1, "tags": ["a\\/c"]}',
            "[]",
        ],
    ),
    (Guide.json_schema(TREE), ['{"value": 1, "children": [{}]}', '{"children": []}']),
    (Guide.json_schema(UNION), ['"http"', "1", "True"]),
    (Guide.json_schema(SOME), ["[]"]),
    (
        Guide.json_schema(PERSON, max_whitespace=0),
        ['{"name": "a","age":1}', '{"name":"a", "age":1}', '{ "name":"a","age":1}'],
    ),
    (Guide.json(max_whitespace=2), ['{   "a":1}', '{"a":\n\n\n1}', '{"a":1   }']),
    (Guide.json(max_whitespace="free"), ['{\u00a0"a": 1}']),
    (
        Guide.regex(r"\d{4}-\d{2}(-[a-z]+)?"),
        ["2024", "2024-1", "2024-01-", "2024-01-A", "\u0662024-01"],
    ),
    (Guide.grammar('root ::= "(" root ")" root | ""'), ["(", "())", ")("]),
    (Guide.lark('start: WORD (", " WORD)*\nWORD: /[a-z]+/'), ["ab,abc", "", "ab, "]),
    (Guide.choice(["yes", "no"]), ["ye", "yesno", "", "Yes", " no"]),
]
