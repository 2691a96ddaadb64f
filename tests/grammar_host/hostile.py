"""Requests that nobody sends in good faith, one line each. Random ones: `hostile_generator`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from grammar_host import Guide

CONSTRUCTORS: Mapping[str, Callable[..., Guide]] = MappingProxyType(
    {
        "json": lambda value, **options: Guide.json(**options),
        "json_schema": Guide.json_schema,
        "regex": Guide.regex,
        "grammar": Guide.grammar,
        "lark": Guide.lark,
        "choice": Guide.choice,
        "structural_tag": Guide.structural_tag,
    }
)


@dataclass(frozen=True)
class Request:
    """What a client sends: the kind of guide, its value, options, perhaps a reasoning tag.

    Attributes:
        code: of the error that it must end in with every engine; None leaves it to the engine,
            which may serve it.
    """

    kind: str
    value: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    reasoning_end: str | None = None
    code: str | None = None

    def build(self) -> Guide:
        guide = CONSTRUCTORS[self.kind](self.value, **self.options)
        return guide if self.reasoning_end is None else guide.after_reasoning(self.reasoning_end)


def nested(depth: int, wrap: Callable[[Any], Any], inside: Any) -> Any:
    for _ in range(depth):
        inside = wrap(inside)
    return inside


def defs(root: dict[str, Any], **definitions: Any) -> dict[str, Any]:
    return {**root, "$defs": definitions}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def doubling(keyword: str, levels: int) -> dict[str, Any]:
    """Every definition uses the next one twice: 2^levels copies if it were written out."""

    def twice(name: str) -> dict[str, Any]:
        if keyword == "properties":
            return {"type": "object", "properties": {"a": ref(name), "b": ref(name)}}
        return {keyword: [ref(name), ref(name)]}

    levels_by_name = {f"d{level}": twice(f"d{level + 1}") for level in range(levels)}
    return defs(ref("d0"), **levels_by_name, **{f"d{levels}": {"type": "integer"}})


CYCLE: dict[str, Any] = {"properties": {}}
CYCLE["properties"]["itself"] = CYCLE

INVALID, EMPTY, COMPLEX = "invalid_json_schema", "empty_language", "grammar_too_complex"

_MALFORMED: list[Any] = [
    "", " ", "{", "[]", "null", "5", '"x"', '{"a": 1}{', "{'a': 1}", "NaN", '{"minimum": NaN}',
    '{"minimum": 1e400}', '{"const": ' + "1" * 5000 + "}", None, 5, [], "\ufeff{}", b"{}", object(),
    {"minimum": float("nan")}, {"const": {1, 2}}, {"const": 10**5000}, {"const": b"x"},
    {"const": "\0"}, {"properties": {"\0": {}}}, {"const": "\ud800"}, {"description": "a\udcffb"},
    {"properties": {"\udfff": {}}}, '{"const": "\\ud83d"}', '{"enum": ["\\u0000"]}',
    {"type": "no-such-type"}, {"type": 5}, {"properties": []}, {"required": "a"}, {"required": [1]},
    {"minLength": -1}, {"minItems": 1.5}, {"maxLength": "5"}, {"minimum": "0"}, {"multipleOf": 0},
    {"multipleOf": -2}, {"pattern": 5}, {"anyOf": []}, {"anyOf": {}}, {"allOf": ["x"]},
    {"additionalProperties": "no"}, {"$ref": 5}, {"$ref": "#/$defs/missing"},
    {"$ref": "#missing-anchor"}, {"enum": {}}, {"not": []}, {"format": 5},
    {"uniqueItems": "yes"},
    {"$ref": "#/$defs/a", "$defs": 5}, {"minProperties": True},
]  # fmt: skip

_EMPTY_SCHEMAS: list[Any] = [
    False, "false", {"not": {}}, {"not": True}, {"allOf": [False]}, {"anyOf": [False, False]},
    {"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, defs(ref("a"), a=ref("b"), b=ref("a")),
    {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
    {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
    {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    {"type": "object", "required": ["a"], "additionalProperties": False},
    {"type": "string", "minLength": 2, "maxLength": 1},
    {"type": "integer", "minimum": 2, "maximum": 1},
    {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
    {"allOf": [{"type": "string"}, {"type": "null"}]}, {"type": "string", "enum": [1, 2]},
    {"type": "array", "minItems": 3, "maxItems": 2},
]  # fmt: skip

_REFERENCES: list[Any] = [
    {"$ref": "https://example.com/schema.json"}, {"$ref": "other.json"},
    {"$ref": "file:///etc/passwd"}, {"$ref": ""}, {"$ref": "#/"},
    {"$ref": "#/properties/a/type", "properties": {"a": {"type": "null"}}},
    {"$ref": "#/enum/0", "enum": [{"type": "null"}]},
    {"$ref": "#/$defs/a/0", "$defs": {"a": [True]}}, defs(ref("a~1b"), **{"a/b": {"type": "null"}}),
    defs(ref("a~0b"), **{"a~b": {"type": "null"}}), defs(ref("a%25b"), **{"a%b": {"type": "null"}}),
    defs(ref("a%7E1b"), **{"a/b": {"type": "null"}}), defs(ref("größe"), größe={"type": "null"}),
    defs(ref("gr%C3%B6%C3%9Fe"), größe={"type": "null"}), defs(ref("😀"), **{"😀": {"type": "null"}}),
    defs(ref("a~2b"), **{"a~2b": {"type": "null"}}), defs(ref("%"), **{"%": {"type": "null"}}),
    defs(ref("a b"), **{"a b": {"type": "null"}}), defs(ref(""), **{"": {"type": "null"}}),
    {"$id": "http://[", "$ref": "#"},
    {"$id": "https://a.example/b", "$ref": "https://a.example/b#/$defs/c", "$defs": {"c": True}},
    {"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "null"}}}, {"$dynamicRef": "#meta"},
    {"$recursiveRef": "#"}, {"$dynamicAnchor": "n", "items": {"$dynamicRef": "#n"}},
    {"properties": {"$ref": {"type": "string"}}}, {"const": {"$ref": "#/nowhere"}},
    {"items": {"$ref": "#"}}, {"not": {"$ref": "#"}}, {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    {"oneOf": [{"type": "null"}, {"$ref": "#"}]}, {"if": {"$ref": "#"}},
    {"allOf": [{"properties": {"a": {"$ref": "#"}}}, {"properties": {"a": {"$ref": "#"}}}]},
    defs(ref("d0"), **{f"d{n}": ref(f"d{n + 1}") for n in range(2000)}, d2000={"type": "null"}),
    doubling("properties", 30), doubling("allOf", 22), doubling("anyOf", 16), doubling("oneOf", 16),
]  # fmt: skip

_BOUNDS: list[Any] = [
    {"type": "array", "maxItems": 10**9}, {"type": "array", "minItems": 10**9},
    {"type": "array", "minItems": 10**30}, {"type": "string", "maxLength": 10**9},
    {"type": "string", "minLength": 10**6}, {"type": "string", "minLength": 10**18},
    {"type": "object", "maxProperties": 10**9}, {"type": "object", "minProperties": 10**5},
    {"type": "array", "items": {"type": "array", "maxItems": 10**4}, "maxItems": 10**4},
    {"type": "array", "uniqueItems": True, "minItems": 10**5},
    {"contains": {}, "minContains": 10**6}, {"type": "number", "minimum": 1e308},
    {"type": "number", "maximum": -1.7976931348623157e308},
    {"type": "number", "minimum": 5e-324, "maximum": 1e-323},
    {"type": "number", "multipleOf": 1e-300}, {"type": "number", "multipleOf": 1e308},
    {"type": "integer", "multipleOf": 10**15 + 37}, {"type": "integer", "minimum": 10**400},
    {"type": "integer", "minimum": -(10**400), "maximum": 0},
    {"type": "integer", "minimum": 0.5, "maximum": 0.7}, {"type": "integer", "maximum": 2**63},
    {"minimum": 3, "maximum": 2}, {"type": "array", "maxItems": 0, "items": False},
    {"type": "string", "maxLength": 10**5, "pattern": "^(a|b|ab)*$"}, {"minItems": 2.0},
]  # fmt: skip

_SIZES: list[Any] = [
    {"enum": [f"name{n}" for n in range(10_000)]}, {"enum": list(range(20_000))}, {"enum": []},
    {"enum": [1, 1.0, True, "1", None, [], {}]}, {"enum": ["a", "a"]}, {"const": "é" * 100_000},
    {"enum": ["a" * n for n in range(1, 500)]}, {"const": nested(60, lambda x: [x], 1)},
    {"properties": {f"p{n}": {"type": "integer"} for n in range(3000)}},
    {"properties": {f"p{n}": True for n in range(300)}, "required": [f"p{n}" for n in range(300)]},
    {"type": "object", "required": [f"p{n}" for n in range(2000)]},
    {"properties": {"x" * 100_000: {}}},
    {"properties": {"": {}, '"': {}, "\\": {}, "\n": {}, "\u2028": {}, "é": {}, "e\u0301": {}}},
    {"properties": {"__proto__": {}, "constructor": {}, "type": {"type": "null"}, "not": {}}},
    {"prefixItems": [{"const": n} for n in range(2000)]}, {"title": "t" * 500_000},
    {"anyOf": [{"const": n} for n in range(2000)]}, {"oneOf": [{"minimum": n} for n in range(200)]},
    {"allOf": [{"pattern": f"a{n}"} for n in range(60)]}, {"x-unknown": "\u0001" * 1000},
    {"allOf": [{"anyOf": [{"required": [f"{n}{m}"]} for m in range(3)]} for n in range(15)]},
    {"patternProperties": {f"^{n}.*x$": {"const": n} for n in range(40)}},
    nested(40, lambda x: {"anyOf": [x, {"type": "null"}]}, {"type": "integer"}),
    nested(30, lambda x: {"not": x}, {"type": "integer"}), nested(30, lambda x: {"allOf": [x]}, {}),
    nested(20, lambda x: {"if": x, "then": x, "else": x} if len(str(x)) < 5000 else x, {"minimum": 1}),
    nested(31, lambda x: {"items": x}, {}), nested(30, lambda x: {"properties": {"a": x}}, {}),
]  # fmt: skip

_EXTENSIONS: list[Any] = [
    {"x-guidance": {"whitespace_flexible": False}, "type": "object"}, {"x-guidance": 5},
    {"x-guidance": {"item_separator": "(a+)+", "key_separator": "\n"}, "type": "object"},
    {"x-guidance": {"no-such-option": 1}, "type": "object"},
    {"x-guidance": {"lenient": True}, "not": {"const": 1}},
    {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"minimum": 1}, {"maximum": 5}]},
    {"items": {"x-guidance": {"whitespace_pattern": ".*"}}}, {"x-order": [1], "x-tokens": {"a": 2}},
    {"type": "string", "format": "no-such-format"}, {"format": ""},
    {"format": "date", "minLength": 20}, {"format": "regex"}, {"format": "json-pointer"},
    {"format": "iri"}, {"format": "uri", "maxLength": 9},
    {"$schema": "http://json-schema.org/draft-03/schema#", "type": "any"},
    {"$schema": "urn:nothing"}, {"$schema": "https://json-schema.org/draft/2030-01/schema"},
    {"$vocabulary": {"urn:x": True}},
    {"type": ["null", "integer", "string"], "minimum": 3, "minLength": 2}, {"type": []}, True, {},
    {"items": [{"type": "null"}], "additionalItems": False},
    {"dependencies": {"a": ["b"], "c": False}}, {"exclusiveMinimum": True, "minimum": 1},
    {"id": "#x", "definitions": {"x": {}}}, {"nullable": True},
    {"unevaluatedProperties": False, "properties": {"a": {}}}, {"contentEncoding": "base64"},
    {"if": 5}, {"dependentRequired": {"a": [1]}}, {"propertyNames": 1}, {"$schema": 5},
]  # fmt: skip

PATTERNS: list[str] = [
    "(a+)+$", "(a|a)*b", "(a|aa)+$", "(x{0,100}){0,100}", "a{1000000}", "[\\s\\S]{1000000}",
    "(a?){50}a{50}", "(.*)(.*)(.*)(.*)(.*)x", ".*a.{20}", "(.*a){25}", "\\d{1,99999}",
    "((a{1,50}){1,50}){1,50}", "(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", "(a)\\1", "(?P<n>a)(?P=n)",
    "(?<n>a)\\k<n>", "(?R)", "(?>a)b", "a++", "\\p{L}+", "\\p{NoSuch}", "\\p{Script=Greek}",
    "\\P{L}", "[", "]", "(", ")", "*a", "a**", "a{2,1}", "x{,5}", "x{0}", "{", "|", "()", "(|a)+",
    "(a*)*", "^", "$", "a$b", "^^a$$", "^*", "$^", "\\", "[^\\s\\S]", "[]", "[^]", "[z-a]",
    "[a-\\d]", "(?i)a", "(?s).", "(?x) a # c", "\\b", "\\bword\\b", "\\B", "\\A\\Z", "[[:alpha:]]",
    "\\x00", "\\0", "\\x{110000}", "\\u{1F600}", "\\ud83d\\ude00", "\\udc00", "[\\ud800-\\udfff]",
    "\\cA", "\\q", "\\8", "[\\x80-\\xff]", "\x80", "é{3}", "😀|👍", "[😀-😂]", "[^a]", "\\Qa.b\\E",
    "(?#c)a", "a|" * 5000 + "b", "a" * 100_000, ".*" * 300, "\t\n", "(" * 50 + "a" + ")*" * 50,
    "[" + "".join(map(chr, range(0x4E00, 0x9000, 2))) + "]*", "(?:a{3,5}|b)*?c+?",
]  # fmt: skip

DEEP = "(" * 60_000 + "a" + ")" * 60_000

GRAMMARS: list[str] = [
    'root ::= root "a" | "a"', 'root ::= a\na ::= b "x"\nb ::= a | "y"',
    'root ::= e root "a" | "b"\ne ::= ""', "root ::= root", 'root ::= "a" root',
    'root ::= root root | "a" | ""', "root ::= missing", 'start ::= "a"', "root ::=", 'root ::= "a',
    'root ::= "\\xZZ"', 'root ::= "\\u12"', 'root ::= "\\UFFFFFFFF"', 'root ::= "\\ud800"',
    'root ::= "\\q"', "root ::= [z-a]", "root ::= [", "root ::= []",
    "root ::= [^\\x00-\\U0010FFFF]", 'root ::= "a"{1000000}', 'root ::= "a"{5,2}',
    'root ::= "a"{,}', 'root ::= (("a"{1,100}){1,100}){1,100}',
    'root ::= "a"{99999999999999999999}', "# nothing", "root", 'root ::= "a"\nroot ::= "b"',
    'root ::= "a"\r\n', '\ufeffroot ::= "a"', 'root ::= "é" | [😀-😂]+', "root ::= Token(5)",
    "root ::= Token(999999999)", "root ::= Token(-1)", "root ::= Token()", "root ::= <|tool|>",
    'root ::= ((("a")))+*?', 'root ::= "a" (= "b")', "root ::= TagDispatch()",
    'root ::= TagDispatch(("a", missing))', "root := 1", "::= ::= ::=",
    "root ::= " + '"a" | ' * 5000 + '"b"', "root ::= " + json.dumps("x" * 100_000),
    'root ::= "" "" ""', "root ::= (root)*",
    "root ::= " + " ".join(f"r{n}" for n in range(500)) + "\n"
    + "\n".join(f'r{n} ::= "{n}"?' for n in range(500)),
    "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1}" for n in range(3000)) + '\nr3000 ::= "a"',
    '("root" ::= "a")',
    "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(25)) + '\nr25 ::= "a"',
    'root ::= "a" | | "b"',
]  # fmt: skip

LARKS: list[str] = [
    'start: start "a" | "a"', "start: start", 'start: "a" start', "start: missing", 'root: "a"',
    "start:", 'start: "a', "start: /a", "start: /(a+)+$/", "start: /(?=a)b/", "start: A\nA: A /x/",
    "start: A\nA: B\nB: A", '%import common.INT\nstart: INT', "start: //",
    '%import common.NO_SUCH\nstart: NO_SUCH', '%import os.path\nstart: "a"',
    '%ignore /.*/\nstart: "a"', '%ignore " "\nstart: "a" "b"', '%declare X\nstart: X',
    'start: "z".."a"', 'start: "a".."\U0010ffff"', 'start: "a"~1..1000000', 'start: "a"~5..2',
    'start: ("a"~100)~100', 'start: <[0-999999999]>', 'start: <[5]>', 'start: <|tool|>',
    'start: <|no-such-token|>', 'start: <[7-3]>', 'start: <[^0-299]>', 'start[max_tokens=0]: /a*/',
    'start[temperature=1e999]: "a"', 'start[capture]: "a"', 'start[stop="x"]: /.*/',
    "start[lazy]: /.*b/", 'start: %json {"type": "integer"}', 'start: %json {',
    'start: %json {"$ref": "#"}', 'start: %json {"minItems": 1e9}', "start: %llguidance {}",
    'start: %regex {"substring_chars": "abc"}',
    'start: %regex {"substring_words": ' + json.dumps("w " * 5000) + "}", 'start: %regex {"x": 1}',
    '%llguidance {"allow_initial_skip": true}\nstart: "a"',
    "_sep{x, y}: x (y x)*\nstart: _sep{/a/, /b/}", 'start: "a" -> alias', "?start: /x/",
    'start.5: "a"', 'start: &"a" "b"', 'start: !"a"', 'start: ("a" | )+', 'start: [start] "x"',
    'start: ("a"?)*', "start: " + '"a" | ' * 5000 + '"b"',
    "start: r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(25)) + '\nr25: "a"',
    "start: /[^\\x00-\\u{10FFFF}]/", 'start: "\\ud800"',
    'start: a::0x1\na::_: "x" %if bit_clear(0)', 'start: "a" "\\x00"', 'start: "\\u0000"',
    '// only a comment', 'start: /a/i /b/s /c/x',
]  # fmt: skip

_SCHEMA_PART = {"type": "json_schema", "json_schema": {"type": "object"}}
_TEXT = {"type": "const_string", "value": "a"}


def tag(**form: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def triggered(triggers: list[str], *tags: tuple[str, Any, str]) -> dict[str, Any]:
    parts = [{"type": "tag", "begin": b, "content": c, "end": e} for b, c, e in tags]
    return tag(type="triggered_tags", triggers=triggers, tags=parts)


TAGS: list[Any] = [
    {}, [], None, "", "{", '"x"', {"type": "structural_tag"}, {"type": "other"}, tag(),
    tag(type="nothing"), tag(type=5), triggered([]), triggered(["<"]),
    triggered([""], ("", _SCHEMA_PART, "")), triggered(["x"], ("<a>", _SCHEMA_PART, "</a>")),
    triggered(["<", "<a"], ("<a>", _SCHEMA_PART, "</a>")),
    triggered(["<a>"], ("<a>", {"type": "json_schema", "json_schema": False}, "x")),
    triggered(["<a>"], ("<a>", {"type": "json_schema", "json_schema": {"$ref": "#"}}, "x")),
    tag(type="regex", pattern="(a+)+$"),
    triggered(["<a>"], ("<a>", {"type": "json_schema", "json_schema": {"type": "no-such-type"}}, "x")),
    tag(type="regex", pattern="("),
    triggered(["<\uff5ccall"], ("<\uff5ccall▁begin\uff5c>", _SCHEMA_PART, "<\uff5ccall▁end\uff5c>")),
    tag(type="const_string", value=""), tag(type="const_string", value="\0"),
    tag(type="const_string", value="\ud800"), tag(type="const_string"),
    tag(type="sequence", elements=[]), tag(type="grammar", grammar='root ::= root "a"'),
    tag(type="grammar", grammar="root ::= missing"), tag(type="or", elements=[]),
    tag(type="token", token=10**9), tag(type="token", token=-1), tag(type="token", token="<|no|>"),
    tag(type="token", token=257), tag(type="any_text", excludes=["x"] * 2000),
    tag(type="any_text", excludes=[""]), tag(type="any_text", max_chars=10**9),
    tag(type="repeat", min=5, max=2, content=_TEXT),
    tag(type="any_text"), tag(type="any_text", max_tokens=0),
    tag(type="repeat", min=0, max=10**9, content=_TEXT),
    tag(type="plus"), tag(type="any_tokens"),
    nested(28, lambda x: {"type": "sequence", "elements": [x]}, _TEXT),
    tag(**nested(28, lambda x: {"type": "sequence", "elements": [x]}, _TEXT)),
    tag(**nested(40, lambda x: {"type": "optional", "content": x}, _TEXT)),
    {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
        "triggers": ["<f"]}, tag(type="tags_with_separator", tags=[], separator=","),
    tag(type="token_dispatch", rules=[[10**12, "x"]]), tag(type="dispatch", rules=[]),
    tag(type="json_schema", json_schema={"x-guidance": {"lenient": True}}),
    tag(type="json_schema", json_schema={"minItems": 10**9}),
]  # fmt: skip

CHOICES: list[Any] = [
    [""], ["", "a"], ["a", "a"], ["a" * n for n in range(1, 400)], [f"c{n}" for n in range(10_000)],
    ["é", "😀", "日本"], ["\n", "\t", '"', "\\", "\x7f", "\u2028"], ["a" * 500_000], ("a", "b"),
    ["<|end|>", "<|tool|>"], ["\ufeff"], [" "],
]  # fmt: skip
BAD_CHOICES: list[Any] = [
    [], "", "abc", [1], [None], [["a"]], {"a": 1}, {"a"}, None, 5, ["\0"], ["\ud800"], [b"a"],
    iter(["a"]),
]  # fmt: skip

NO_TEXT: list[Any] = ["", " \n", None, 5, b"a", [], "a\0b", "a\ud800", "\udcff", "\0"]
"""Refused as regex and as either grammar before an engine sees them."""

_WHITESPACE: list[Any] = [
    {"max_whitespace": value} for value in (-1, 1001, True, 1.5, "none", None, [], 10**30, "8")
] + [
    {"whitespace_pattern": value} for value in ("", "\0", "\ud800", "x" * 257, 5, b" ", [" "])
]  # fmt: skip
_ODD_WHITESPACE: list[Any] = [
    {"whitespace_pattern": value}
    for value in ("(", "(a+)+", ".*", "x", '"', r"[ \n]{0,3}", "(?=a)", "a{1000000}", "}", "\\d", "|", "é?")
] + [{"max_whitespace": value} for value in (0, 1, 1000, "free")]  # fmt: skip


def _corpus() -> dict[str, Request]:
    requests: dict[str, Request] = {}

    def add(group: str, kind: str, values: list[Any], code: str | None = None, **more: Any) -> None:
        for index, value in enumerate(values):
            requests[f"{group} {index}"] = Request(kind, value, code=code, **more)

    def add_options(group: str, options: list[Any], code: str | None = None) -> None:
        for index, each in enumerate(options):
            kind, value = ("json", None) if index % 2 else ("json_schema", {"type": "object"})
            requests[f"{group} {index}"] = Request(kind, value, each, code=code)

    add("malformed schema", "json_schema", _MALFORMED, INVALID)
    add("empty schema", "json_schema", _EMPTY_SCHEMAS, EMPTY)
    add("reference", "json_schema", _REFERENCES)
    add("bound", "json_schema", _BOUNDS)
    add("size", "json_schema", _SIZES)
    add("extension", "json_schema", _EXTENSIONS)
    too_deep = [
        nested(60_000, lambda x: {"not": x}, {}), nested(65, lambda x: [x], 1), CYCLE,
        "[" * 100_000, '{"not":' * 60_000, {"title": "t" * 1_000_001},
        {"const": nested(64, lambda x: [x], 1)},
    ]  # fmt: skip
    add(
        "deep schema",
        "json_schema",
        [x if isinstance(x, str | dict) else {"const": x} for x in too_deep],
        COMPLEX,
    )
    add("pattern", "json_schema", [{"type": "string", "pattern": p} for p in PATTERNS])
    add(
        "key pattern",
        "json_schema",
        [{"type": "object", "patternProperties": {p: {}}} for p in PATTERNS[:40]],
    )
    add("regex", "regex", PATTERNS)
    add("grammar", "grammar", GRAMMARS)
    add("lark", "lark", LARKS)
    add("tag", "structural_tag", TAGS)
    add("choice", "choice", CHOICES)
    add("bad choice", "choice", BAD_CHOICES, "invalid_choice")
    for kind, text in (
        ("regex", DEEP),
        ("grammar", f"root ::= {DEEP}"),
        ("lark", f"start: {DEEP}"),
    ):
        add(f"no {kind}", kind, NO_TEXT, f"invalid_{kind}")
        add(f"deep {kind}", kind, [text, "(" * 60_000, "a" * 1_000_001], COMPLEX)
    add_options("bad blanks", _WHITESPACE)
    add_options("odd blanks", _ODD_WHITESPACE)
    for index, end in enumerate(["", "\0", "\ud800", "x" * 257, 5]):
        requests[f"bad reasoning {index}"] = Request(
            "json", reasoning_end=end, code="invalid_reasoning_end"
        )
    for index, end in enumerate(
        ["</think>", "a", "\n", "<|tool|>", "</", "思考", '"}', " ", "aaaaab"]
    ):
        requests[f"reasoning {index}"] = Request("regex", "(ab)*", reasoning_end=end)
        requests[f"schema behind reasoning {index}"] = Request("json_schema", {}, reasoning_end=end)
    requests["strict number"] = Request("json_schema", {}, {"strict": 1}, code="invalid_strict")
    requests["strict open"] = Request(
        "json_schema", {"additionalProperties": True}, {"strict": True}
    )
    requests["strict tree"] = Request("json_schema", _REFERENCES[27], {"strict": True})
    return requests


CORPUS: Mapping[str, Request] = MappingProxyType(_corpus())
