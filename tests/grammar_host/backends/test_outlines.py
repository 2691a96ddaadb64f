"""Outlines: what it must accept, what it must refuse, and that it refuses all it gets wrong."""

import functools
import json
import re

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import (
    EmptyLanguageError,
    GrammarMatcher,
    GrammarTooComplexError,
    Guide,
    GuideError,
    InvalidGuideError,
    TokenizerInfo,
    UnsupportedGuideError,
)
from grammar_host.backends import outlines
from grammar_host.backends.outlines import OutlinesBackend
from tests.grammar_host.common import (
    STOP,
    TOOL,
    accepts,
    legal,
    mask,
    tokenize,
    tokenizer_info,
    walk,
)

few = settings(deadline=None, max_examples=60)


@functools.cache
def backend():
    return OutlinesBackend(tokenizer_info())


@functools.lru_cache(maxsize=64)
def compiled(guide):
    return backend().compile(guide)


def matcher(guide, stops=(), info=None):
    info = info or tokenizer_info()
    grammar = compiled(guide) if info is tokenizer_info() else OutlinesBackend(info).compile(guide)
    stops = frozenset({*info.stop_token_ids, *stops})
    return GrammarMatcher(grammar.new_matcher(stops), info.vocab_size, stops)


def closed(properties, required=()):
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


PERSON = closed(
    {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": ["integer", "null"], "title": "years"},
        "tags": {"type": "array", "items": {"enum": ["a/b", 'q"q', "back\\slash", "é", "😀", 1.5]}},
        "code": {"$ref": "#/$defs/a~1b"},
    },
    ["name", "age"],
) | {"$defs": {"a/b": {"type": "string", "pattern": r"^[a-c]{2}(\.|&&)\d$"}}}
OPTIONAL = closed({name: {"type": "boolean"} for name in "abc"})
ODD_NAMES = closed({'q"\\\n.é😀': {"const": None}}, ['q"\\\n.é😀'])
COMPACT = Guide.json_schema(PERSON, max_whitespace=0)
DEPTHS = Guide.json_schema({"type": "array", "items": {"type": "null"}}, max_whitespace=2)
BREAKS = Guide.json_schema(OPTIONAL, whitespace_pattern="\n\n|\t?")

ACCEPTED = [
    (Guide.regex("ab|abc"), ["ab", "abc"]),
    (Guide.regex("a??b?"), ["", "a", "b", "ab"]),
    (Guide.regex("^a*?$"), ["", "aa"]),
    (Guide.regex("^a|b$"), ["a", "b"]),
    (Guide.regex(r"(?i)^\Aéab\z"), ["ÉAb"]),
    (Guide.regex("(?s).{2}"), ["a\n", "😀é"]),
    (Guide.regex("(?s:.).{2}"), ["\nab"]),
    (Guide.regex(r"[\s\S]{0,300}"), ["", "é\n" * 150]),
    (Guide.regex(r'"(\\.|[^"\\]){0,40}"'), ['"a\\"b"', '"' + "é" * 40 + '"']),
    (Guide.regex(r"(?P<n.[0]>[]a]|[^]b])[a[b.)]\]]+"), ["]a.)]", "cb"]),
    (Guide.regex(r"[a-d&&[^b]]\p{Greek}\D\W\S\/\x7B\{"), ["cλa-b/{{"]),
    (Guide.regex(r"\x00?a"), ["a", "\0a"]),
    (Guide.regex(r"\A?[:alpha:][\w-]\d\W"), [":-1é"]),
    (Guide.regex(r"\w{1,99}"), ["a_9" * 33]),
    (Guide.choice(["ab", "abc", "", "déjà 😀", "a.*", "x\ny\t\x01\x7f"]), ["", "abc", "déjà 😀"]),
    (Guide.choice(["a.*", "x\ny\t\x01\x7f", "\x85"]), ["a.*", "x\ny\t\x01\x7f", "\x85"]),
    (
        Guide.json_schema(PERSON),
        [
            '{"name": "", "age": -0}',
            '{ "name" :"\\u00e9é😀\\ud83d\\ude00", "age": null }',
            '{"name": "", "age": 12, "tags": ["a/b",  "back\\\\slash", 1.5], "code": "ab&&1"}',
            '{"name":"","age":1,"tags":[ ],"code":"ca.0"}',
        ],
    ),
    (COMPACT, ['{"name":"\\/\\b\\u001f","age":1,"tags":["q\\"q","😀"]}']),
    (Guide.json_schema(OPTIONAL), ["{}", '{"a": true}', '{"b": true, "c": false}']),
    (Guide.json_schema(ODD_NAMES), ['{"q\\"\\\\\\n.é😀": null}']),
    (Guide.json_schema({"type": "integer", "maxDigits": 1, "x-unit": "m"}), ["-12"]),
    (DEPTHS, ["[]", "[  ]", "[ null,  null  ]"]),
    (Guide.json_schema(PERSON, max_whitespace="free"), ['{"name": "",' + " \n" * 99 + '"age": 1}']),
    (BREAKS, ['{\n\n"a"\t:\n\ntrue}', "{\t}"]),
]
REFUSED = [
    (Guide.regex("ab|abc"), ["", "a", "abcc", "ababc"]),
    (Guide.regex("^a|b$"), ["ab", "^a", "ac"]),
    (Guide.regex(".{2}"), ["a\n", "😀"]),
    (Guide.regex("(?s:.)."), ["a\n"]),
    (Guide.regex(r"\w\d"), ["é1", "a٣"]),
    (Guide.regex("[:alpha:]"), ["b"]),
    (Guide.regex(r"[\s\S]{0,300}"), ["é" * 301, "\0"]),
    (Guide.choice(["ab", "a.*"]), ["a", "", "abab", "axx"]),
    (
        Guide.json_schema(PERSON),
        [
            '{"name": "abcde", "age": 1}',
            '{"name": "\\ud83d", "age": 1}',
            '{"name": "\n", "age": 1}',
            '{"name": "a", "age": 1.5}',
            '{"name": "a", "age": 01}',
            '{"age": 1, "name": "a"}',
            '{"name": "a"}',
            '{"name": "a", "age": 1, "x": 1}',
            '{"name": "a", "age": 1, "code": "ab1"}',
            '{"name": "a", "age": 1, "tags": ["a"]}',
            ' {"name": "a", "age": 1}',
        ],
    ),
    (COMPACT, ['{"name": "a","age":1}', '{"name":"a", "age":1}']),
    (Guide.json_schema(OPTIONAL), ['{"c": true, "a": true}', '{"a": true,}', '{"a": true "b": true}']),
    (DEPTHS, ["[   ]", "[   null]", "[null,   null]"]),
    (BREAKS, ["{\n}", '{\n\n\n\n"a":true}', "{ }"]),
]  # fmt: skip


def pairs(table):
    return [
        pytest.param(g, text, id=f"{g.kind}-{text[:30]}") for g, texts in table for text in texts
    ]


@pytest.mark.parametrize(("guide", "text"), pairs(ACCEPTED))
def test_texts_of_the_language_are_accepted(guide, text):
    assert accepts(matcher(guide), text)


@pytest.mark.parametrize(("guide", "text"), pairs(REFUSED))
def test_other_texts_are_refused(guide, text):
    assert not accepts(matcher(guide), text)


SOME = closed({"b": {"type": "null"}})


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "integer", "minimum": 3}, "/minimum"),
        ({"type": "number", "multipleOf": 2}, "/multipleOf"),
        ({"type": "string", "format": "date"}, "/format"),
        ({"type": "string", "pattern": "^ab$", "maxLength": 3}, "/maxLength"),
        ({"type": "string", "pattern": "ab"}, "/pattern"),
        ({"type": "string", "pattern": "^ab|c$"}, "/pattern"),
        ({"type": "string", "pattern": "^.*$"}, "/pattern"),
        ({"type": "string", "pattern": "^[^a]$"}, "/pattern"),
        ({"type": "string", "pattern": "^[ -~]$"}, "/pattern"),
        ({"type": "string", "pattern": '^"$'}, "/pattern"),
        ({"type": "string", "pattern": r"^\\$"}, "/pattern"),
        ({"type": "string", "pattern": r"^\S$"}, "/pattern"),
        ({"type": "string", "pattern": r"^a)|(b$"}, "/pattern"),
        ({"type": "string", "pattern": "^a(?=b)b$"}, "/pattern"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "/maxLength"),
        ({"type": "string", "minLength": -1}, "/minLength"),
        ({"type": "string", "minLength": 1.5}, "/minLength"),
        ({"type": "array"}, ""),
        ({"type": "array", "items": {}}, "/items"),
        ({"type": "array", "items": True}, "/items"),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, "/uniqueItems"),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 1, "minItems": 2}, "/maxItems"),
        ({"type": "array", "prefixItems": [{"type": "null"}]}, "/prefixItems"),
        ({"type": "object"}, ""),
        ({"type": "object", "properties": {"a": {"type": "null"}}}, ""),
        ({"type": "object", "additionalProperties": {"type": "null"}}, "/additionalProperties"),
        (SOME | {"minProperties": 1}, "/minProperties"),
        (SOME | {"patternProperties": {"b": {"type": "null"}}}, "/patternProperties"),
        (SOME | {"required": ["x"]}, "/required"),
        ({"properties": {"a": {"type": "null"}}}, "/properties"),
        ({"oneOf": [{"type": "null"}, {"type": "string"}]}, "/oneOf"),
        ({"allOf": [SOME, SOME]}, "/allOf"),
        ({"anyOf": [{"type": "null"}], "type": "string"}, "/type"),
        ({"anyOf": [{"type": "null"}, {"if": {}}]}, "/anyOf/1/if"),
        ({"anyOf": []}, "/anyOf"),
        ({"enum": [[1]]}, "/enum"),
        ({"const": {"a": 1}}, "/const"),
        ({"enum": []}, "/enum"),
        ({"enum": [1], "type": "string"}, "/enum"),
        ({"const": True, "type": "integer"}, "/const"),
        ({"const": 1, "enum": [1]}, "/const"),
        ({"const": 12345678901234567890123}, "/const"),
        ({"type": "null", "dependencies": {}}, "/dependencies"),
        ({"type": "text"}, "/type"),
        ({"type": []}, "/type"),
        ({"not": {"type": "null"}}, "/not"),
        ({}, ""),
        (True, ""),
        ({"title": "anything"}, ""),
        ({"$ref": "#"}, "/$ref"),
        ({"$ref": "other.json"}, "/$ref"),
        ({"$ref": "#/$defs/none"}, "/$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "/$defs/a/$ref"),
        ({"$ref": "#/$defs/a", "type": "null", "$defs": {"a": {"type": "null"}}}, "/type"),
        (closed({"a/b": {"type": "array", "items": closed({"c": {"type": "null", "not": {}}})}}),
         "/properties/a~1b/items/properties/c/not"),
    ],
    ids=json.dumps,
)  # fmt: skip
def test_what_would_not_be_enforced_exactly_is_refused(schema, pointer):
    with pytest.raises(UnsupportedGuideError) as info:
        compiled(Guide.json_schema(schema))
    assert (info.value.param, info.value.pointer) == ("schema", pointer)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("guide", "error", "reason"),
    [
        (Guide.json(), UnsupportedGuideError, "llguidance"),
        (Guide.grammar('root ::= "a"'), UnsupportedGuideError, "xgrammar"),
        (Guide.lark('start: "a"'), UnsupportedGuideError, "llguidance"),
        (Guide.regex("a(?=b)"), UnsupportedGuideError, "look-around"),
        (Guide.regex("a(?<!b)"), UnsupportedGuideError, "look-around"),
        (Guide.regex(r"(a)\1"), UnsupportedGuideError, "backreferences"),
        (Guide.regex(r"\bab"), UnsupportedGuideError, "word boundaries"),
        (Guide.regex("(?x)a b"), UnsupportedGuideError, "verbose"),
        (Guide.regex("(?-u:a)"), UnsupportedGuideError, "bytes"),
        (Guide.regex("(^a|b)"), UnsupportedGuideError, "anchor"),
        (Guide.regex("a|^b"), UnsupportedGuideError, "anchor"),
        (Guide.regex("(a"), InvalidGuideError, "not closed"),
        (Guide.regex("[a"), InvalidGuideError, "not closed"),
        (Guide.regex("[[a]"), InvalidGuideError, "not closed"),
        (Guide.regex("a)|(b"), InvalidGuideError, "not opened"),
        (Guide.regex("*a"), InvalidGuideError, "Rust"),
        (Guide.regex("a{2,1}"), InvalidGuideError, "Rust"),
        (Guide.regex(r"\q"), InvalidGuideError, "Rust"),
        (Guide.regex("a{"), InvalidGuideError, "Rust"),
        (Guide.regex("a\\"), InvalidGuideError, "Rust"),
        (Guide.regex(r"a[^\s\S]"), EmptyLanguageError, "no text"),
        (Guide.regex(r"a*[^\s\S]"), EmptyLanguageError, "no text"),
        (Guide.regex("a$b"), EmptyLanguageError, "no text"),
        (Guide.regex(r"b|a[^\s\S]"), UnsupportedGuideError, "a part of it"),
        (Guide.regex(r"b|a*[^\s\S]"), UnsupportedGuideError, "a part of it"),
        (Guide.regex("((a{100}){100}){100}"), GrammarTooComplexError, "repetitions"),
        (Guide.json_schema(OPTIONAL, whitespace_pattern=" )|( "), InvalidGuideError, "whitespace"),
        (Guide.json_schema(OPTIONAL, whitespace_pattern="(^ )"), UnsupportedGuideError, "anchor"),
        (Guide.json_schema(OPTIONAL, whitespace_pattern=" {"), InvalidGuideError, "whitespace_pat"),
        (Guide.json_schema(OPTIONAL, whitespace_pattern=r"\s"), InvalidGuideError, "more than JSON"),
        (Guide.json_schema(OPTIONAL, whitespace_pattern=" $ "), EmptyLanguageError, "whitespace_pat"),
    ],
    ids=lambda value: value.text if isinstance(value, Guide) else None,
)  # fmt: skip
def test_what_is_wrong_is_said(guide, error, reason):
    with pytest.raises(GuideError, match=reason) as info:
        compiled(guide)
    assert type(info.value) is error
    assert info.value.param in (guide.param, "whitespace_pattern")
    assert "\n" not in str(info.value)


def test_automata_over_the_limit_are_refused(monkeypatch):
    monkeypatch.setattr(outlines, "MAX_WORK", 20 * 256)
    with pytest.raises(GrammarTooComplexError, match="states"):
        backend().compile(Guide.regex("a{30}"))
    # Optional objects multiply: each has one alternative for every property that may be its last.
    levels = {
        f"level{n}": closed({f"p{i}": {"$ref": f"#/$defs/level{n + 1}"} for i in range(9)})
        for n in range(4)
    }
    schema = {"$ref": "#/$defs/level0", "$defs": levels | {"level4": {"type": "null"}}}
    with pytest.raises(GrammarTooComplexError, match="required"):
        backend().compile(Guide.json_schema(schema))


def test_a_vocabulary_that_cannot_write_the_texts_is_refused():
    info = TokenizerInfo.from_vocabulary([b"a", b"b", b""], [2])
    assert legal(matcher(Guide.regex("ab+"), info=info)) == [0]
    with pytest.raises(UnsupportedGuideError, match="vocabulary"):
        matcher(Guide.regex("abc"), info=info)


LETTERS = "abé😀\n "
ATOMS = st.sampled_from(
    ["a", "b", "é", "😀", r"\n", ".", "[ab]", "[^a]", r"[^\S\n]", r"\S", r"\w", r"\W", r"[\w\n]"]
)
REPEATS = st.sampled_from(["", "*", "+", "?", "*?", "??", "{2}", "{0,3}", "{1,}"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join).map("(?:{})".format),
        st.tuples(inner, REPEATS).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=150)
@given(pattern=PATTERNS, anchors=st.booleans(), data=st.data())
def test_a_text_is_accepted_exactly_if_it_matches_from_end_to_end(pattern, anchors, data):
    guide = Guide.regex(f"^{pattern}$" if anchors else pattern)
    matching = st.from_regex(pattern, fullmatch=True, alphabet=st.sampled_from(LETTERS))
    for text in data.draw(st.lists(st.text(LETTERS, max_size=6) | matching, max_size=8)):
        assert accepts(matcher(guide), text) == bool(re.fullmatch(pattern, text, re.ASCII)), text


KEYS = ["a", 'k"y', "é"]
SCALARS = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"type": "string", "minLength": 2.0, "description": "two"},
        {"type": "string", "pattern": r"^(?:a|[b-d&&]+x?|\w\d{1,2}\.)$"},
        {"type": ["integer", "boolean"]},
        {"type": "number"},
        {"type": "null"},
        {"enum": [1, 2.5, -1e-300, 2**63, None, True, "é\n\x7f/", ""]},
        {"enum": [1, "a", None, False], "type": ["string", "null"]},
        {"const": 'q"\\', "type": "string"},
        {"$ref": "#/$defs/leaf"},
    ]
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
        inner.map(lambda branch: {"allOf": [branch], "default": 1}),
        st.builds(
            lambda items, least, more: {
                "type": "array",
                "items": items,
                **({} if least is None else {"minItems": least}),
                **({} if more is None else {"maxItems": (least or 0) + more}),
            },
            inner,
            st.none() | st.integers(0, 2),
            st.none() | st.integers(0, 2),
        ),
        st.builds(
            closed,
            st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
        ).flatmap(
            lambda schema: st.sets(st.sampled_from([*schema["properties"]] or [None])).map(
                lambda names: schema | {"required": sorted(names - {None})}
            )
        ),
    ),
    max_leaves=5,
).map(lambda schema: schema | {"$defs": {"leaf": {"type": "string", "maxLength": 1}}})
LEAVES = st.one_of(
    st.text(max_size=4),
    st.sampled_from(["a", "bb", "dx", "z12.", "é\n\x7f/", 'q"\\', ""]),
    st.integers(-5, 5) | st.sampled_from([2**63, 2.5, -1e-300]),
    st.booleans(),
    st.none(),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*KEYS, "z"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def instances(schema, root):
    """Values that are mostly valid; anything at all now and then."""
    if "$ref" in schema:
        return instances(root["$defs"]["leaf"], root)
    if "anyOf" in schema or "allOf" in schema:
        branches = [instances(each, root) for each in schema.get("anyOf", schema.get("allOf"))]
        return st.one_of(*branches)
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")])) | LEAVES
    if schema["type"] == "array":
        return st.lists(instances(schema["items"], root), max_size=4) | VALUES
    if schema["type"] == "object":
        names = {name: instances(each, root) for name, each in schema["properties"].items()}
        return st.fixed_dictionaries({}, optional=names) | VALUES
    return LEAVES


def in_order(value):
    """A value, or a schema, with its keys in one order: documents have that of the schema."""
    if isinstance(value, list):
        return [in_order(item) for item in value]
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    return value


@settings(deadline=None, max_examples=200)
@given(schema=SCHEMAS.map(in_order), data=st.data())
def test_a_document_is_accepted_exactly_if_it_is_valid(schema, data):
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    guide = Guide.json_schema(schema, max_whitespace=1)
    for _ in range(4):
        value = in_order(data.draw(instances(schema, schema)))
        text = json.dumps(value, ensure_ascii=False)
        assert accepts(matcher(guide), text) == validator.is_valid(value), text


@few
@given(text=st.text(max_size=6), escaped=st.booleans())
def test_free_strings_may_be_escaped_or_raw(text, escaped):
    guide = Guide.json_schema({"type": "string", "maxLength": 4})
    assert accepts(matcher(guide), json.dumps(text, ensure_ascii=escaped)) == (len(text) <= 4)


@settings(deadline=None, max_examples=60)
@given(schema=SCHEMAS, picks=st.lists(st.integers(0, 10**6), min_size=60, max_size=60))
def test_every_walk_that_ends_is_a_valid_document(schema, picks):
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    state = matcher(Guide.json_schema(schema, max_whitespace=0))
    vocabulary = tokenizer_info().vocabulary
    text = b""
    for pick in picks:
        options = legal(state)
        assert options
        if STOP in options and pick % 2:
            break
        closing = [t for t in options if vocabulary[t][-1:] in (b'"', b"}", b"]")]
        options = closing if closing and pick % 4 else [t for t in options if t != STOP] or closing
        if not options:
            break
        token = options[pick // 4 % len(options)]
        text += vocabulary[token]
        assert state.accept_token(token)
    # Python reads large exponents as infinite.
    if state.is_completed() and not re.search(rb"e[+-]?\d{3}", text):
        assert validator.is_valid(json.loads(text)), text


GUIDES = [
    Guide.regex(r"(ab|abc)+[0-9]{2,4}( the)?"),
    Guide.regex(r"[\s\S]*"),
    Guide.choice(["ab", "abc", "déjà 😀", "日本"]),
    Guide.json_schema(PERSON),
]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.kind)
@few
@given(choices=st.lists(st.integers(0, 10**6), max_size=10))
def test_forced_bytes_begin_every_continuation(guide, choices):
    state = matcher(guide)
    walk(state, choices)
    forced = b"" if state.is_terminated() else state._engine.forced_bytes()
    vocabulary = tokenizer_info().vocabulary
    if forced:
        assert STOP not in legal(state)
    for token in legal(state) if forced else ():
        text = vocabulary[token]
        assert text.startswith(forced) or forced.startswith(text)


def test_forced_bytes_go_as_far_as_they_can():
    assert matcher(Guide.json_schema(PERSON))._engine.forced_bytes() == b"{"
    assert matcher(COMPACT)._engine.forced_bytes() == b'{"name":"'
    assert matcher(Guide.choice(["déjà 😀", "déjà 😁"]))._engine.forced_bytes() == (
        "déjà ".encode() + "😀".encode()[:3]
    )
    assert matcher(Guide.choice(["", "a"]))._engine.forced_bytes() == b""
    assert matcher(Guide.regex("ab*"))._engine.forced_bytes() == b"a"
    assert matcher(Guide.regex("a{900}"))._engine.forced_bytes() == b"a" * 256


def test_stop_tokens_of_the_request_are_gated_by_the_grammar():
    x = ord("x")
    state = matcher(Guide.regex("a[a-z]+"), stops=[x])
    for token in (ord("a"), ord("b")):
        assert x not in legal(state)
        assert STOP not in legal(state)
        assert not state.accept_token(x)
        assert not state.accept_token(STOP)
        assert state.accept_token(token)
    assert {x, STOP, ord("y")} <= set(legal(state))
    assert state.accept_token(x)
    assert state.is_terminated()
    assert legal(state) == [x, STOP]
    state.rollback(1)
    assert not state.is_terminated()
    assert state.is_completed()
    assert state.accept_token(ord("y"))


def test_tokens_that_share_their_bytes_or_split_characters():
    smile = "😀".encode()
    tokens = [b"a", b"a", smile[:2], smile[2:], smile[2:], smile, b"\0a", smile + b"\0", b"\0", b""]
    info = TokenizerInfo.from_vocabulary(tokens, [9])
    assert legal(matcher(Guide.regex("a😀a?"), info=info)) == [0, 1]
    state = matcher(Guide.regex(r"😀+(\x00a)?"), info=info)
    assert legal(state) == [2, 5, 7]
    assert state.accept_token(2)
    assert legal(state) == [3, 4]
    assert state.accept_token(4)
    assert legal(state) == [2, 5, 6, 7, 8, 9]
    assert state.accept_token(7)
    assert legal(state) == [0, 1]


def test_special_tokens_are_never_written_as_text():
    state = matcher(Guide.choice(["<|tool|>"]))
    for token in tokenize("<|tool|>"):
        assert TOOL not in legal(state)
        assert state.accept_token(token)
    assert legal(state) == [STOP]


def test_rows_are_made_again_when_the_cache_is_full(monkeypatch):
    guide = Guide.json_schema(PERSON)
    tokens = tokenize('{"name": "é", "age": 12, "tags": ["a/b", 1.5]}')
    rows = []
    for limit in (outlines.ROW_CACHE_BYTES, 100, 0):
        monkeypatch.setattr(outlines, "ROW_CACHE_BYTES", limit)
        state = matcher(
            guide, info=TokenizerInfo.from_vocabulary(tokenizer_info().vocabulary, [STOP])
        )
        rows.append([mask(state) for token in tokens if state.accept_token(token)])
        assert len(rows[-1]) == len(tokens)
        assert len(state._engine._automaton._rows) <= max(limit // 40, 1)
    np.testing.assert_array_equal(rows[1], rows[0])
    np.testing.assert_array_equal(rows[2], rows[0])


def test_larger_automata_count_as_more_memory():
    small, large = (
        backend().compile(Guide.regex(pattern)).memory_bytes
        for pattern in ("[0-9]{4}", "[0-9]{400}")
    )
    assert 0 < small < large / 50


def test_nothing_is_printed(capfd):
    state = matcher(Guide.choice(["ab"]))
    for token in (TOOL, 258, 299, -1, 300, 2**40, ord("z"), STOP):
        assert not state.accept_token(token)
    walk(state, [1, 0, 0])
    assert not state.accept_token(STOP)
    mask(state)
    with pytest.raises(GuideError):
        backend().compile(Guide.regex(r"a[^\s\S]"))
    assert capfd.readouterr() == ("", "")
