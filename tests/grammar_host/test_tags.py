"""Structural tags: every format, what is refused with which pointer, and the JSON inside of them."""

import copy
import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import (
    EmptyLanguageError,
    GrammarError,
    GrammarMatcher,
    GrammarTooComplexError,
    Guide,
    InvalidGuideError,
    TokenizerInfo,
    UnsupportedGuideError,
)
from grammar_host.backends.xgrammar import XGrammarBackend, named_special_tokens
from grammar_host.tag_checks import FORMATS
from grammar_host.tags import embedded_schemas, may_be_empty, replace_part
from tests.grammar_host.common import (
    PERSON,
    SPECIAL_TOKENS,
    STOP,
    TOOL,
    VOCAB_SIZE,
    accepts,
    bits,
    byte_vocabulary,
    legal,
    mask,
    tokenize,
    tokenizer_info,
    walk,
)


def document(node):
    return {"type": "structural_tag", "format": node}


def guide(node):
    return Guide.structural_tag(document(node))


@functools.lru_cache(maxsize=256)
def compiled(one):
    return XGrammarBackend(tokenizer_info()).compile(one)


def matcher_of(one):
    """Of the engine itself: what the planner makes of a guide is not the matter here."""
    return GrammarMatcher(compiled(one).new_matcher(frozenset({STOP})), VOCAB_SIZE, [STOP])


def matcher(node):
    return matcher_of(guide(node))


def const(value):
    return {"type": "const_string", "value": value}


def regex(pattern):
    return {"type": "regex", "pattern": pattern}


def schema(value, **options):
    return {"type": "json_schema", "json_schema": value, **options}


def token(value):
    return {"type": "token", "token": value}


def tag(begin, content=None, end="</f>"):
    return {"type": "tag", "begin": begin, "content": content or regex("[0-9]{2}"), "end": end}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


AB = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
    "required": ["a"],
}

LANGUAGES = {
    "const_string": (const("aé"), ["aé"], ["a", "aéa", ""]),
    "json_schema": (schema(AB), ['{"a": "x", "c": 1}', '{"a":"","b":2}'], ['{"b": 1}', "{}", "1"]),
    "json_schema in XML": (
        schema(AB, style="qwen_xml"),
        ["<parameter=a>x</parameter><parameter=b>1</parameter>"],
        ["<parameter=b>1</parameter>", '{"a": "x"}'],
    ),
    "qwen_xml_parameter": (
        {"type": "qwen_xml_parameter", "json_schema": AB},
        ["<parameter=a>x</parameter>"],
        ["<parameter=b>1</parameter>"],
    ),
    "any_text": ({"type": "any_text", "excludes": ["ab"]}, ["", "a b😀"], ["xaby"]),
    "any_text max_chars": (
        sequence({"type": "any_text", "max_chars": 2}, const("!")),
        ["!", "é!", "日本!"],
        ["abc!", "ab"],
    ),
    "any_text max_tokens": (
        sequence({"type": "any_text", "max_tokens": 2}, const("!")),
        ["!", "xy!", "abcé!"],
        ["xyz!"],
    ),
    "token": (sequence(token(TOOL), token("<|tool|>"), token(97)), [], ["a", "<|tool|>"]),
    "exclude_token": ({"type": "exclude_token", "exclude_tokens": [97]}, ["b"], ["a", "bb", ""]),
    "any_tokens": (
        {"type": "any_tokens", "exclude_tokens": ["<|tool|>", 98], "max_tokens": 2},
        ["", "aa"],
        ["aaa", "b"],
    ),
    "grammar ebnf": (
        {"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'},
        ["x", "((x))"],
        ["(x", ""],
    ),
    "grammar lark": (
        {"type": "grammar", "grammar": 'start: "a" /b+/', "syntax": "lark"},
        ["abb"],
        ["a"],
    ),
    "regex": (regex("é{2}|x"), ["éé", "x"], ["é"]),
    "sequence": (sequence(const("a"), regex("b*"), const("c")), ["ac", "abbc"], ["ab", "bc"]),
    "or": ({"type": "or", "elements": [const("a"), const("bc")]}, ["a", "bc"], ["b", "", "abc"]),
    "optional": ({"type": "optional", "content": const("ab")}, ["", "ab"], ["abab"]),
    "plus": ({"type": "plus", "content": const("ab")}, ["ab", "abab"], ["", "a"]),
    "star": ({"type": "star", "content": const("ab")}, ["", "abab"], ["aba"]),
    "repeat": (
        {"type": "repeat", "min": 2, "max": 3, "content": const("a")},
        ["aa", "aaa"],
        ["a", "aaaa"],
    ),
    "repeat without end": (
        {"type": "repeat", "min": 1, "max": -1, "content": const("a")},
        ["a", "a" * 9],
        [""],
    ),
    "tag": (tag("<f>"), ["<f>12</f>"], ["<f>1</f>", "<f>12"]),
    "tag with ends": (tag("<f>", end=["</f>", "</g>"]), ["<f>12</f>", "<f>12</g>"], ["<f>12</"]),
    "triggered_tags": (
        {
            "type": "triggered_tags",
            "triggers": ["<f", "<g"],
            "tags": [tag("<f>"), tag("<g>"), {k: v for k, v in tag("<g2>").items() if k != "type"}],
            "excludes": ["xx"],
        },
        ["", "so", "<f>12</f> and <g>34</f><g2>12</f>.", "a<b"],
        ["<f", "<h <f>1", "<g>", "xx", "<f>xx</f>"],
    ),
    "triggered_tags at_least_one": (
        {
            "type": "triggered_tags",
            "triggers": ["<f"],
            "tags": [tag("<f>")],
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<f>12</f>"],
        ["", "a", "<f>12</f>a", "<f>12</f><f>12</f>"],
    ),
    "token_triggered_tags": (
        {
            "type": "token_triggered_tags",
            "trigger_tokens": ["<|tool|>"],
            "tags": [tag({"token": "<|tool|>"})],
            "exclude_tokens": [97],
        },
        ["", "xyz <|tool|>"],
        ["a"],
    ),
    "tags_with_separator": (
        {
            "type": "tags_with_separator",
            "tags": [tag("<f>"), tag("<g>")],
            "separator": ",",
            "at_least_one": True,
        },
        ["<f>12</f>", "<f>12</f>,<g>34</f>"],
        ["", "<f>12</f>,", "<f>12</f><f>12</f>"],
    ),
    "dispatch": (
        {"type": "dispatch", "rules": [["<f", const(">x")]], "loop": False, "excludes": ["q"]},
        ["", "abc", "abc<f>x"],
        ["<f>y", "q", "<f>xa"],
    ),
    "token_dispatch": (
        {"type": "token_dispatch", "rules": [["<|tool|>", const("x")]], "exclude_tokens": [98]},
        ["", "acd"],
        ["b"],
    ),
}


def test_every_format_is_tried():
    assert {node["type"] for node, _, _ in LANGUAGES.values()} == set(FORMATS) - {"token"}


@pytest.mark.parametrize("name", LANGUAGES)
def test_every_format_is_enforced(name):
    node, members, others = LANGUAGES[name]
    for text in members:
        assert accepts(matcher(node), text), text
    for text in others:
        assert not accepts(matcher(node), text), text
    assert matcher(node).is_completed() == accepts(matcher(node), "")
    assert may_be_empty(node) or not accepts(matcher(node), "")


@pytest.mark.parametrize("name", LANGUAGES)
@settings(deadline=None, max_examples=8)
@given(choices=st.lists(st.integers(0, 10**6), max_size=8), back=st.integers(0, 8))
def test_every_format_keeps_the_contract_of_a_matcher(name, choices, back):
    machine = matcher(LANGUAGES[name][0])
    rows, tokens = [mask(machine)], []
    for choice in choices:
        accepted = [t for t in range(VOCAB_SIZE) if machine.validate_tokens([t]) == 1]
        if not machine.is_terminated():
            assert accepted == list(bits(rows[-1]))
        np.testing.assert_array_equal(mask(machine), rows[-1])
        tokens += walk(machine, [choice])
        rows[len(tokens) :] = [mask(machine)]
    back = min(back, len(tokens))
    machine.rollback(back)
    for at in range(len(tokens) - back, len(tokens)):
        np.testing.assert_array_equal(mask(machine), rows[at])
        assert machine.accept_token(tokens[at])
    np.testing.assert_array_equal(mask(machine), rows[-1])


def test_special_tokens_in_tags():
    machine = matcher(LANGUAGES["token"][0])
    assert [machine.accept_token(t) for t in (TOOL, TOOL, 97, STOP)] == [True] * 4
    machine = matcher(LANGUAGES["token_triggered_tags"][0])
    for one in [*tokenize("x"), TOOL, *tokenize("12</f>y")]:
        assert machine.accept_token(one)
    machine = matcher(LANGUAGES["token_dispatch"][0])
    assert machine.accept_token(TOOL)
    assert legal(machine) == [ord("x")]


def test_an_exhausted_token_budget_is_quiet(capfd):
    machine = matcher(LANGUAGES["any_text max_tokens"][0])
    fork = machine.fork()
    for one in (machine, fork):
        assert [one.accept_token(ord("x")) for _ in range(3)] == [True, True, False]
        assert one.validate_tokens(tokenize("x!")) == 0
        one.rollback(1)
        assert one.accept_token(ord("y"))
        assert legal(one) == [ord("!")]
    assert capfd.readouterr() == ("", "")


def refuse(node, pointer, reason, error=InvalidGuideError):
    return pytest.param(document(node), pointer, reason, error, id=f"{pointer} {reason}")


F = tag("<f>")


def triggered(**changes):
    return {"type": "triggered_tags", "triggers": ["<f"], "tags": [F], **changes}


REFUSED = [
    pytest.param({}, "", "'type' is missing", InvalidGuideError),
    pytest.param({"type": "structural_tag"}, "", "'format' is missing", InvalidGuideError),
    pytest.param(
        {"type": "tag", "format": F}, "/type", "known are: structural_tag", InvalidGuideError
    ),
    pytest.param({**document(F), "x": 1}, "", "'x' is no field", InvalidGuideError),
    refuse([], "/format", "not list"),
    refuse({}, "/format", "a format needs a 'type'"),
    refuse({"type": "any"}, "/format/type", "'any' is not known; known are: const_string"),
    refuse({"type": ["tag"]}, "/format/type", "is not known"),
    refuse({"type": "const_string"}, "/format", "'value' is missing"),
    refuse(const(1), "/format/value", "not int"),
    refuse({"type": "any_text", "exclude": ["a"]}, "/format", "'exclude' is no field"),
    refuse({"type": "any_text", "excludes": [""]}, "/format/excludes/0", "empty"),
    refuse({"type": "any_text", "excludes": "a"}, "/format/excludes", "not str"),
    refuse({"type": "any_text", "max_tokens": 2**31}, "/format/max_tokens", "integer"),
    refuse({"type": "any_text", "max_chars": True}, "/format/max_chars", "integer"),
    refuse(token(True), "/format/token", "not bool"),
    refuse(token(""), "/format/token", "empty"),
    refuse(token(-1), "/format/token", "integer"),
    refuse(token("<|none|>"), None, "not found in vocabulary"),
    refuse(token(VOCAB_SIZE), None, "out of the vocabulary"),
    refuse(sequence(), "/format/elements", "empty"),
    refuse(sequence(const("a"), {"type": "x"}), "/format/elements/1/type", "'x' is not known"),
    refuse({"type": "star", "content": 1}, "/format/content", "not int"),
    refuse(
        {"type": "repeat", "min": 2, "max": 1, "content": const("a")}, "/format/max", "below min"
    ),
    refuse(
        {"type": "repeat", "min": -1, "max": 1, "content": const("a")}, "/format/min", "integer"
    ),
    refuse(tag(1), "/format/begin", "not int"),
    refuse(tag({"token": []}), "/format/begin/token", "not list"),
    refuse(tag("a", end=[]), "/format/end", "empty"),
    refuse(tag("a", end=["b", 1]), "/format/end/1", "not int"),
    refuse(tag("a", {"type": "any_text"}, end=""), None, "non-empty"),
    refuse(triggered(triggers=[]), "/format/triggers", "empty"),
    refuse(triggered(tags=[]), "/format/tags", "empty"),
    refuse(triggered(triggers=["<f", ""]), "/format/triggers/1", "empty"),
    refuse(triggered(triggers=["<f", "<g"]), "/format/triggers/1", "no tag begins with"),
    refuse(triggered(triggers=["<f", "<f"]), "/format/triggers/1", "twice"),
    refuse(triggered(triggers=["<f", "<f>"]), "/format/tags/0/begin", "'<f' and '<f>'"),
    refuse(triggered(tags=[F, tag("<g>")]), "/format/tags/1/begin", "none does"),
    refuse(triggered(tags=[F, tag(token(97))]), "/format/tags/1/begin", "token_triggered_tags"),
    refuse(triggered(tags=[F, const("<f>")]), "/format/tags/1", "'value' is no field"),
    refuse(triggered(at_least_one=1), "/format/at_least_one", "true or false"),
    refuse(
        {"type": "token_triggered_tags", "trigger_tokens": [97], "tags": [F]},
        "/format/tags/0/begin",
        "use triggered_tags",
    ),
    refuse({"type": "dispatch", "rules": []}, "/format/rules", "empty"),
    refuse({"type": "dispatch", "rules": [["a"]]}, "/format/rules/0", "pattern and a format"),
    refuse({"type": "dispatch", "rules": [["a", F], ["", F]]}, "/format/rules/1/0", "empty"),
    refuse({"type": "dispatch", "rules": [["a", {}]]}, "/format/rules/0/1", "'type'"),
    refuse(schema({}, style="yaml"), "/format/style", "known are: json"),
    refuse(schema([]), "/format/json_schema", "not list"),
    refuse(schema({}, max_whitespace_cnt=5000), "/format/json_schema", "0 to 1000"),
    refuse(schema({"type": "foo"}), "/format/json_schema", "foo"),
    refuse(schema({"$ref": "#/$defs/no"}), "/format/json_schema", "Cannot find"),
    refuse(regex(""), "/format/pattern", "empty"),
    refuse(regex("(a"), "/format/pattern", "not closed"),
    refuse({"type": "grammar", "grammar": "root ::= x"}, "/format/grammar", "not defined"),
    refuse(
        {"type": "grammar", "grammar": "a", "syntax": "bnf"}, "/format/syntax", "known are: ebnf"
    ),
    refuse(
        sequence(F, tag("<g>", schema(AB, any_order=True))),
        "/format/elements/1/content/any_order",
        "required properties may be missing",
        UnsupportedGuideError,
    ),
    refuse(
        schema({"anyOf": [{"type": "string", "minLength": 2}]}, excludes=["a"]),
        "/format/excludes",
        "lengths",
        UnsupportedGuideError,
    ),
    refuse(regex(r"(a)\1"), "/format/pattern", "Backreference", UnsupportedGuideError),
    refuse(regex("(" * 65 + ")" * 65), "/format/pattern", "nested", GrammarTooComplexError),
    refuse(triggered(tags=[tag("<f>", schema(False))]),
        "/format/tags/0/content/json_schema", "no document", EmptyLanguageError),
    refuse(
        triggered(tags=[tag("<f>", schema({"type": "object", "properties": {"a": {"$ref": "#"}},
        "required": ["a"]}))]),
        "/format/tags/0/content/json_schema", "no finite text", EmptyLanguageError),
    refuse(sequence(const("a"), {"type": "grammar", "grammar": 'root ::= "a" root'}),
        "/format/elements/1/grammar", "no finite text", EmptyLanguageError),
]  # fmt: skip


@pytest.mark.parametrize(("value", "pointer", "reason", "error"), REFUSED)
def test_mistakes_are_refused_where_they_are(value, pointer, reason, error):
    with pytest.raises(error) as info:
        compiled(Guide.structural_tag(value))
    assert type(info.value) is error
    assert reason in info.value.reason
    assert (info.value.param, info.value.pointer) == ("structural_tag", pointer)
    assert "\n" not in str(info.value)
    assert ".cc" not in str(info.value)


def test_the_constructor_checks_the_same():
    with pytest.raises(InvalidGuideError, match="known are: const_string"):
        Guide("structural_tag", json.dumps(document({"type": "x"})))
    with pytest.raises(InvalidGuideError, match="'structures' is no field"):
        Guide("structural_tag", json.dumps(LEGACY))


LEGACY = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": AB, "end": "</f>"},
        {"begin": "<g>", "schema": {"type": "integer"}, "end": "</g>"},
    ],
    "triggers": ["<f=", "<g"],
}


def test_the_older_form_is_the_same_guide():
    tags = [tag("<f=a>", schema(AB), "</f>"), tag("<g>", schema({"type": "integer"}), "</g>")]
    new = guide({"type": "triggered_tags", "triggers": ["<f=", "<g"], "tags": tags})
    assert Guide.structural_tag(LEGACY) == Guide.structural_tag(json.dumps(LEGACY)) == new
    assert hash(Guide.structural_tag(LEGACY)) == hash(new)

    def allows(text):
        return accepts(matcher_of(new), text)

    assert allows('So <f=a>{"a": "x"}</f>, <g>12</g>.')
    # Both triggers count, not only the first.
    assert not allows("<f=b>")
    assert not allows("<g>x</g>")


@pytest.mark.parametrize(
    ("changes", "pointer", "reason"),
    [
        ({"format": F}, "", "exclude each other"),
        ({"structures": []}, "/structures", "empty"),
        ({"structures": [1]}, "/structures/0", "not int"),
        ({"structures": [{"begin": "<f", "end": ""}]}, "/structures/0", "'schema' is missing"),
        ({"structures": [{"begin": "<f", "end": "", "schema": []}]}, "/structures/0/schema", "not"),
        ({"triggers": []}, "/triggers", "empty"),
        ({"triggers": ["<f=", "<g", "<h"]}, "/triggers/2", "no tag begins"),
        ({"triggers": ["<f="]}, "/structures/1/begin", "none does"),
        ({"triggers": None}, "/triggers", "not null"),
        ({"type": "json"}, "/type", "structural_tag"),
        ({"other": 1}, "", "'other' is no field"),
    ],
)
def test_mistakes_in_the_older_form(changes, pointer, reason):
    with pytest.raises(InvalidGuideError, match=reason) as info:
        Guide.structural_tag({**LEGACY, **changes})
    assert info.value.pointer == pointer


def test_tags_of_several_bytes_per_character():
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
    node = triggered(triggers=["<｜tool"], tags=[tag(begin, schema(AB), end)])  # noqa: RUF001
    text = f'déjà {begin}{{"a": "｜"}}{end} 😀'  # noqa: RUF001
    assert accepts(matcher(node), text)
    assert not accepts(matcher(node), text.replace("calls▁end", "calls▁ende"))
    older = {
        "type": "structural_tag",
        "structures": [{"begin": begin, "schema": AB, "end": end}],
        "triggers": ["<｜"],  # noqa: RUF001
    }
    assert accepts(matcher_of(Guide.structural_tag(older)), text)


ENDS = [token("<|end|>"), token(STOP), "<|end|>", ["</f>", "<|end|>"]]


@pytest.mark.parametrize("end", ENDS, ids=str)
@pytest.mark.parametrize("around", ["alone", "triggered", "optional tail"])
def test_a_tag_that_ends_in_a_stop_token_stops(end, around):
    node = tag("<f>", end=end)
    if around == "triggered":
        node = triggered(tags=[node])
    elif around == "optional tail":
        node = sequence(node, {"type": "any_text"})
    machine = matcher(node)
    for one in tokenize("<f>12"):
        assert STOP not in legal(machine) or around == "triggered"
        assert machine.accept_token(one)
    assert STOP in legal(machine)
    before = mask(machine)
    assert machine.accept_token(STOP)
    assert machine.is_terminated()
    assert machine.is_completed()
    assert legal(machine) == [STOP]
    machine.rollback(1)
    np.testing.assert_array_equal(mask(machine), before)


@pytest.mark.parametrize(
    ("node", "pointer"),
    [
        (sequence(tag("<f>", end=token(STOP)), const("x")), "/format/elements/0/end"),
        (sequence(token("<|end|>"), regex("x*"), F), "/format/elements/0"),
        (tag(token(STOP)), "/format/begin"),
        (tag("<f>", token(STOP)), "/format/content"),
        (sequence({"type": "or", "elements": [const("a"), token(STOP)]}, const("b")),
            "/format/elements/0/elements/1"),
        ({"type": "repeat", "min": 2, "max": 3, "content": token(STOP)}, "/format/content"),
        ({"type": "token_dispatch", "rules": [["<|end|>", const("a")]]}, "/format/rules/0/0"),
    ],
)  # fmt: skip
def test_nothing_can_follow_a_stop_token(node, pointer):
    with pytest.raises(InvalidGuideError, match="a stop token ends") as info:
        compiled(guide(node))
    assert info.value.pointer == pointer


NESTED = document(
    sequence(
        {"type": "dispatch", "rules": [["<f", schema({"type": "integer"})], ["<g", regex("a")]]},
        triggered(tags=[tag("<f>", {"type": "or", "elements": [const("a"), schema(AB)]})]),
        {"type": "optional", "content": {"type": "qwen_xml_parameter", "json_schema": True}},
    )
)


def test_embedded_schemas_can_be_found_and_replaced():
    original = copy.deepcopy(NESTED)
    found = embedded_schemas(NESTED)
    assert found == [
        ("/format/elements/0/rules/0/1/json_schema", {"type": "integer"}),
        ("/format/elements/1/tags/0/content/elements/1/json_schema", AB),
        ("/format/elements/2/content/json_schema", True),
    ]
    changed = NESTED
    for number, (pointer, _) in enumerate(found):
        changed = replace_part(changed, pointer, {"const": number})
    assert [value for _, value in embedded_schemas(changed)] == [{"const": n} for n in range(3)]
    for pointer, value in found:
        changed = replace_part(changed, pointer, value)
    assert changed == original == NESTED
    assert embedded_schemas(Guide.structural_tag(LEGACY).document)[1] == (
        "/format/tags/1/content/json_schema",
        {"type": "integer"},
    )


SCHEMAS = {
    "open": AB,
    "person": PERSON,
    "tree": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "n": {"minimum": 2}},
        "required": ["next"],
    },
    "texts": {"enum": ['"', "\\", "é/", "\n", 1.5, None]},
    "array": {"type": "array", "prefixItems": [{"type": "boolean"}], "minItems": 1},
    "pattern": {"type": "string", "pattern": "^[a-zé\\\\]{2,3}$"},
    "any": True,
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("blanks", [0, 3, "free"])
@settings(deadline=None, max_examples=10)
@given(choices=st.lists(st.integers(0, 10**6), max_size=25))
def test_json_inside_a_tag_is_what_json_schema_is(name, blanks, choices):
    alone = Guide.json_schema(SCHEMAS[name], max_whitespace=blanks)
    count = None if blanks == "free" else blanks
    inside = guide(schema(SCHEMAS[name], max_whitespace_cnt=count))
    one, two = matcher_of(alone), matcher_of(inside)
    for choice in choices:
        np.testing.assert_array_equal(mask(two), mask(one))
        for accepted in walk(one, [choice]):
            assert two.accept_token(accepted)
    assert one.is_completed() == two.is_completed()


def test_names_of_special_tokens_count_where_tags_write_them():
    names = {**SPECIAL_TOKENS, 297: '<|"|>', 298: "<|open|>"}
    info = TokenizerInfo.from_vocabulary(byte_vocabulary(VOCAB_SIZE), [STOP], special_tokens=names)
    for node, named in [
        (const('a<|"|>b'), {297}),
        (schema(AB, style="gemma"), {297}),
        (schema(AB, style="kimi_k3_xml"), {298}),
        (schema({"const": '<|"|><|open|>'}), set()),
        (tag("<|tool|>", schema({"const": "<|open|>"})), {TOOL}),
    ]:
        assert named_special_tokens(guide(node), info) == named
    node = schema({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        style="gemma")  # fmt: skip
    engine = XGrammarBackend(info).compile(guide(node)).new_matcher(frozenset({STOP}))
    machine = GrammarMatcher(engine, VOCAB_SIZE, [STOP])
    for one in [*tokenize("{a:"), 297, *tokenize("x"), 297, *tokenize("}")]:
        assert machine.accept_token(one)
    assert machine.is_completed()


def places(value, path=()):
    """The paths of a JSON value and of everything inside it."""
    yield path
    children = {dict: dict.items, list: enumerate}.get(type(value), lambda _: ())
    for key, item in children(value):
        yield from places(item, (*path, key))


def put(value, path, new):
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = put(value[path[0]], path[1:], new)
    return changed


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.sampled_from(["", "<f", "tag", "a"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "content", "tags", "begin"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_damaged_documents_raise_nothing_but_grammar_errors(data):
    nodes = [document(node) for node, _, _ in LANGUAGES.values()]
    value = data.draw(st.sampled_from([*nodes, NESTED, LEGACY]))
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from([*places(value)]))
        value = put(value, path, data.draw(JSON))
    try:
        machine = matcher_of(Guide.structural_tag(value))
    except GrammarError as error:
        refusal = error
    else:
        walk(machine, [1, 2, 3])
        return
    assert "\n" not in str(refusal)
    assert ".cc" not in str(refusal)
    assert refusal.param == "structural_tag"
