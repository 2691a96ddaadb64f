"""The default engine on real text: what it must accept, what it must refuse, and what it says."""

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import (
    EmptyLanguageError,
    Guide,
    InvalidGuideError,
    UnsupportedGuideError,
)
from grammar_host.backends.xgrammar import named_special_tokens
from tests.grammar_host import common
from tests.grammar_host.common import (
    PERSON,
    STOP,
    TOOL,
    accepts,
    legal,
    mask,
    tokenize,
    tokenizer_info,
)


def compiler():
    return common.compiler(backend="xgrammar")


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
CALL = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {
                "type": "tag",
                "begin": "<f=x>",
                "content": {"type": "json_schema", "json_schema": PERSON},
                "end": "</f>",
            }
        ],
        "at_least_one": True,
    },
}
FULL_WIDTH = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<｜tool▁call｜>",  # noqa: RUF001 -- DeepSeek's tags are full-width
        "content": {"type": "regex", "pattern": "[0-9]+"},
        "end": "<｜end｜>",  # noqa: RUF001
    },
}

ACCEPTED = [
    (Guide.json(), ["{}", '{"a": [1, {"b": "\\u00e9\\n"}], "😀": -0.5e-3}', '{ "a" :\n  null }']),
    (Guide.json_schema(PERSON), ['{"name": "déjà", "age": 0}', '{"name":"","age":150,"tags":[]}']),
    (Guide.json_schema(TREE), ['{"value": 1, "children": [{"value": 2}, {"value": -3.5}]}']),
    (Guide.json_schema(UNION), ["true", "null", '"http://é/\\\\"']),
    (Guide.json_schema(True), ["12", "[]", '"a"']),
    (Guide.json_schema(PERSON, max_whitespace=0), ['{"name":"a","age":1,"tags":["é"]}']),
    (Guide.regex(r"\d{4}-\d{2}(-[a-z]+)?"), ["2024-01", "1234-56-abc"]),
    (Guide.regex("(😀|é)*$"), ["", "😀é😀"]),
    (Guide.grammar('root ::= "(" root ")" root | ""'), ["", "()(())", "((()))()"]),
    (Guide.lark('start: WORD (", " WORD)*\nWORD: /[a-z]+/'), ["ab", "ab, abc, name"]),
    (
        Guide.choice(["yes", "no", "", 'a"b\\c', "x\ny\t\x01\x7f", "😀"]),
        ["", 'a"b\\c', "x\ny\t\x01\x7f", "😀"],
    ),
    (Guide.structural_tag(CALL), ['<f=x>{"name": "a", "age": 1}</f>']),
    (Guide.structural_tag(json.dumps(FULL_WIDTH)), ["<｜tool▁call｜>12<｜end｜>"]),  # noqa: RUF001
]
REFUSED = [
    (Guide.json(), ["[]", "12", '{"a": 01}', "{'a': 1}", '{"a": "\n"}', "{}}", ""]),
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
    (
        Guide.json_schema(PERSON, max_whitespace=0),
        ['{"name": "a","age":1}', '{"name":"a", "age":1}', '{ "name":"a","age":1}'],
    ),
    (Guide.regex(r"\d{4}-\d{2}(-[a-z]+)?"), ["2024", "2024-1", "2024-01-", "2024-01-A"]),
    (Guide.grammar('root ::= "(" root ")" root | ""'), ["(", "())", ")("]),
    (Guide.lark("start: WORD (\", \" WORD)*\nWORD: /[a-z]+/"), ["ab,abc", "", "ab, "]),
    (Guide.choice(["yes", "no"]), ["ye", "yesno", "", "Yes", " no"]),
    (Guide.structural_tag(CALL), ["no call at all", '<f=x>{"name": "a"}</f>', "<f=y>"]),
]  # fmt: skip


def pairs(table):
    return [pytest.param(g, text, id=f"{g.kind}-{text}") for g, texts in table for text in texts]


@pytest.mark.parametrize(("guide", "text"), pairs(ACCEPTED))
def test_texts_of_the_language_are_accepted(guide, text):
    assert accepts(compiler().compile(guide).matcher(), text)


@pytest.mark.parametrize(("guide", "text"), pairs(REFUSED))
def test_other_texts_are_refused(guide, text):
    assert not accepts(compiler().compile(guide).matcher(), text)


def test_objects_and_arrays_are_open_as_the_standard_says():
    def grammar(schema):
        return compiler().compile(Guide.json_schema(schema))

    named = {"type": "object", "properties": {"a": {"type": "null"}}}
    assert accepts(grammar(named).matcher(), '{"a": null}')
    assert accepts(grammar(named).matcher(), '{"a": null, "b": 1}')
    some = grammar({"type": "array", "minItems": 1})
    assert accepts(some.matcher(), "[1, {}]")
    assert not accepts(some.matcher(), "[]")


def test_membership_in_a_large_choice():
    names = [f"item-{number:04d}" for number in range(0, 4000, 2)]
    grammar = compiler().compile(Guide.choice(names))
    for number in range(0, 4000, 97):
        assert accepts(grammar.matcher(), f"item-{number:04d}") == (number % 2 == 0)


VALUES = {
    "person": (
        PERSON,
        st.fixed_dictionaries(
            {"name": st.text(max_size=5), "age": st.integers(-20, 200)},
            optional={"tags": st.lists(st.sampled_from(["a/b", "é", "no"]), max_size=2)},
        ),
    ),
    "union": (UNION, st.sampled_from([True, None, "http://é/\\", "http://é/", 0, [], {}])),
    "tree": (
        TREE,
        st.recursive(
            st.fixed_dictionaries({"value": st.integers() | st.booleans()}),
            lambda inner: st.fixed_dictionaries(
                {"value": st.integers(), "children": st.lists(inner, max_size=3)}
            ),
            max_leaves=4,
        ),
    ),
}


def in_order(value):
    if isinstance(value, list):
        return [in_order(item) for item in value]
    if isinstance(value, dict):
        keys = sorted(value, key=["name", "age", "tags", "value", "children"].index)
        return {key: in_order(value[key]) for key in keys}
    return value


@settings(deadline=None, max_examples=40)
@given(name=st.text(max_size=8), escaped=st.booleans())
def test_free_strings_may_be_escaped_or_raw(name, escaped):
    text = json.dumps({"name": name, "age": 1}, ensure_ascii=escaped)
    assert accepts(compiler().compile(Guide.json_schema(PERSON)).matcher(), text)


@pytest.mark.parametrize("name", VALUES)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_document_is_accepted_exactly_if_jsonschema_accepts_it(name, data):
    schema, values = VALUES[name]
    value = data.draw(values)
    valid = jsonschema.Draft202012Validator(schema).is_valid(value)
    # One document has many texts; the engine writes properties in the schema's order, raw.
    text = json.dumps(in_order(value), ensure_ascii=False)
    assert accepts(compiler().compile(Guide.json_schema(schema)).matcher(), text) == valid


@pytest.mark.parametrize("name", VALUES)
@settings(deadline=None, max_examples=25)
@given(picks=st.lists(st.integers(0, 10**6), min_size=80, max_size=80))
def test_every_walk_that_ends_is_a_valid_document(name, picks):
    schema, _ = VALUES[name]
    matcher = compiler().compile(Guide.json_schema(schema, max_whitespace=1)).matcher()
    text = b""
    for pick in picks:
        options = legal(matcher)
        assert options
        if STOP in options:
            break
        # Closing tokens first, on most picks: otherwise few walks come to an end.
        closing = [t for t in options if tokenizer_info().vocabulary[t][-1:] in b'"}],:1']
        options = closing if closing and pick % 4 else options
        token = options[pick // 4 % len(options)]
        text += tokenizer_info().vocabulary[token]
        assert matcher.accept_token(token)
    if matcher.is_completed():
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("guide", "error", "reason"),
    [
        (Guide.regex("a(?=b)"), UnsupportedGuideError, "Lookahead"),
        (Guide.regex(r"(a)\1"), UnsupportedGuideError, "Backreference"),
        (Guide.regex("(a"), InvalidGuideError, "not closed"),
        (Guide.grammar("root ::= x"), InvalidGuideError, '"x" is not defined'),
        (Guide.grammar("root ::= Token(9999)"), InvalidGuideError, "9999"),
        (Guide.lark("start: x"), InvalidGuideError, "unknown name"),
        (Guide.grammar('root ::= "a" root'), EmptyLanguageError, "no finite text"),
        (Guide.lark('start: "a" start'), EmptyLanguageError, "no finite text"),
        (Guide.regex(r"a[^\s\S]"), EmptyLanguageError, "no finite text"),
        (Guide.grammar(f'root ::= Token({STOP}) "a"'), EmptyLanguageError, "can begin"),
    ],
    ids=lambda value: value.text if isinstance(value, Guide) else None,
)  # fmt: skip
def test_what_is_wrong_is_said(guide, error, reason):
    with pytest.raises(error, match=reason) as info:
        compiler().compile(guide)
    assert type(info.value) is error
    assert info.value.param == guide.param
    assert "\n" not in str(info.value)
    assert ".cc" not in str(info.value)


NAMING = [
    Guide.grammar(f'root ::= Token({TOOL}) "a"'),
    Guide.grammar('root ::= "<|tool|>" "a"'),
    Guide.lark('start: <|tool|> "a"'),
    Guide.lark(f'start: <[{TOOL}]> "a"'),
    *(
        Guide.structural_tag(
            {
                "type": "structural_tag",
                "format": {
                    "type": "sequence",
                    "elements": [first, {"type": "const_string", "value": "a"}],
                },
            }
        )
        for first in (
            {"type": "token", "token": TOOL},
            {"type": "token", "token": "<|tool|>"},
            {"type": "const_string", "value": "<|tool|>"},
        )
    ),
]


@pytest.mark.parametrize("guide", NAMING, ids=lambda guide: guide.text)
def test_special_tokens_are_legal_where_the_guide_names_them(guide):
    assert named_special_tokens(guide, tokenizer_info()) == {TOOL}
    matcher = compiler().compile(guide).matcher()
    assert TOOL in legal(matcher)
    assert matcher.accept_token(TOOL)
    assert legal(matcher) == [ord("a")]


@pytest.mark.parametrize(
    "guide",
    [
        Guide.json_schema({"const": "<|tool|>"}),
        Guide.regex(r"<\|tool\|>"),
        Guide.choice(["<|tool|>"]),
        Guide.grammar(r"root ::= [<] [^\n]+"),
        Guide.structural_tag(CALL | {"format": CALL["format"] | {"at_least_one": False}}),
    ],
    ids=lambda guide: guide.kind,
)
def test_special_tokens_are_never_written_as_text(guide):
    """Their names can be spelled, byte by byte, but the tokens themselves stay illegal."""
    assert not named_special_tokens(guide, tokenizer_info())
    matcher = compiler().compile(guide).matcher()
    text = '"<|tool|>"' if guide.kind == "json_schema" else "<|tool|>"
    for token in tokenize(text):
        assert TOOL not in legal(matcher)
        assert matcher.accept_token(token)
    assert matcher.is_completed()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Token(1, 257) | ExcludeToken(258)", {TOOL, 258}),
        ("<[250-257]>", {STOP, TOOL}),
        ("<[0-999999999]> <[99999999999]>", {STOP, TOOL, 258}),
        ("Token() | Token(x) | <[]> | <[-]>", set()),
        ("<|pad|>", {258}),
    ],
)
def test_token_lists_are_read(text, named):
    assert named_special_tokens(Guide.grammar(text), tokenizer_info()) == named


def test_json_inside_tags_has_bounded_blanks_too():
    matcher = compiler().compile(Guide.structural_tag(CALL)).matcher()
    for token in tokenize("<f=x>{" + " " * 8):
        assert matcher.accept_token(token)
    assert ord(" ") not in legal(matcher)
    own = CALL["format"]["tags"][0]["content"] | {"max_whitespace_cnt": 2}
    tag = {"type": "structural_tag", "format": own}
    matcher = compiler().compile(Guide.structural_tag(tag)).matcher()
    for token in tokenize("{  "):
        assert matcher.accept_token(token)
    assert ord(" ") not in legal(matcher)


def test_blanks_are_bounded_everywhere():
    matcher = compiler().compile(Guide.json_schema(PERSON)).matcher()
    blanks = {ord(" "), ord("\n"), ord("\t"), *tokenize("  "), *tokenize("\n  ")}
    for part in ("{", '"name"', ":", '"a"', ","):
        for token in tokenize(part):
            assert matcher.accept_token(token)
        written = 0
        while blank := [token for token in legal(matcher) if token in blanks]:
            assert matcher.accept_token(blank[0])
            written += 1
            assert written <= 8
        assert written == 8 or part == '"a"'
    assert mask(matcher).any()


def test_a_tag_that_ends_in_a_stop_token_ends_there():
    tag = {"type": "token", "token": "<|end|>"}
    parts = {"type": "sequence", "elements": [{"type": "const_string", "value": "ab"}, tag]}
    guide = Guide.structural_tag({"type": "structural_tag", "format": parts})
    matcher = compiler().compile(guide).matcher()
    for token in tokenize("ab"):
        assert matcher.accept_token(token)
    assert legal(matcher) == [STOP]
    assert matcher.accept_token(STOP)
    assert matcher.is_terminated()
