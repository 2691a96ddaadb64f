"""Tool calls: what a request may ask for, what a model may then write, and reading it back."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import (
    EmptyLanguageError,
    GrammarTooComplexError,
    Guide,
    GuideError,
    InvalidGuideError,
    UnsupportedGuideError,
)
from grammar_host.call_forms import CALL_FORMS, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS
from grammar_host.guide import MAX_TEXT_CHARACTERS
from grammar_host.tags import embedded_schemas, may_be_empty
from grammar_host.tools import FAMILIES, parse_tool_calls, tools_error
from tests.grammar_host.common import accepts, compiler

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


def tool(name, parameters=CITY, **options):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **options}}


def flat(name, parameters=CITY, **options):
    return {"type": "function", "name": name, "parameters": parameters, **options}


def named(name):
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("weather", description="?"), flat("add-2", {"type": "object"})]


def allows(guide, text):
    return accepts(compiler().compile(guide).matcher(), text)


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE = call("weather", '{"city": "Köln </tool_call>"}')
OTHER = call("add-2", '{"x": [1, 2]}')


@pytest.mark.parametrize(
    ("choice", "parallel", "members", "others"),
    [
        (
            "auto",
            True,
            ["", "Hello!", ONE, f"I see.\n{ONE} and {OTHER}.", f"{ONE}\n{OTHER}", "a < b"],
            ["<tool_call>", "<tool_call>x", call("none", "{}"), call("weather", "{}"), ONE[:-1]],
        ),
        (
            "auto",
            False,
            ["", "Hello!", f"I see.\n{ONE}"],
            [f"{ONE}\n{OTHER}", f"{ONE}{ONE}", f"{ONE} and so on"],
        ),
        (
            "required",
            True,
            [ONE, f"{ONE}\n{OTHER}\n{ONE}"],
            ["", "Hello", f"Hello {ONE}", f"{ONE} Hello", f"{ONE}\n"],
        ),
        ("required", False, [ONE, OTHER], ["", f"{ONE}\n{OTHER}", f"{ONE}{OTHER}"]),
        (named("weather"), True, [ONE], ["", OTHER, f"{ONE}\n{ONE}"]),
        ({"type": "function", "name": "add-2"}, False, [OTHER], ["", ONE, f"{OTHER}\n{OTHER}"]),
    ],
    ids=str,
)
def test_what_each_choice_allows(choice, parallel, members, others):
    guide = Guide.tools(TOOLS, choice, parallel=parallel)
    for text in members:
        assert allows(guide, text), text
    for text in others:
        assert not allows(guide, text), text


def test_no_calls_are_no_guide():
    assert Guide.tools(TOOLS, "none") is None
    assert Guide.tools([], "none") is None
    with pytest.raises(InvalidGuideError):  # but mistakes are mistakes
        Guide.tools([tool("")], "none")


def test_the_result_is_a_guide_like_others():
    guide = Guide.tools(TOOLS)
    assert guide.kind == "structural_tag"
    assert guide == Guide.tools(json.loads(json.dumps(TOOLS)))
    assert hash(guide) == hash(Guide.tools(TOOLS))
    assert guide != Guide.tools(TOOLS, parallel=False)
    assert Guide.tools([tool("a"), flat("b")]) == Guide.tools([flat("a"), tool("b")])
    assert [schema for _, schema in embedded_schemas(guide.document)] == [CITY, {"type": "object"}]
    assert guide.after_reasoning().reasoning_end == "</think>"


def arguments_allowed(parameters, arguments, **options):
    guide = Guide.tools([tool("f", parameters, **options)], "required")
    return allows(guide, call("f", arguments))


def test_arguments_follow_the_parameters():
    assert arguments_allowed(CITY, '{"city": "a", "other": 1}')
    assert not arguments_allowed(CITY, '{"days": 1}')
    assert arguments_allowed(CITY, '{"city": "a", "other": 1}', strict=False)
    assert arguments_allowed(CITY, '{"city": "a", "days": 1}', strict=True)
    assert not arguments_allowed(CITY, '{"city": "a", "other": 1}', strict=True)
    own = {**CITY, "additionalProperties": {"type": "integer"}}
    assert arguments_allowed(own, '{"city": "a", "other": 1}', strict=True)
    for missing in (None, {"type": "object", "properties": {}, "additionalProperties": False}):
        assert arguments_allowed(missing, "{}")
        assert not arguments_allowed(missing, '{"a": 1}')
    assert arguments_allowed({}, '{"a": 1}')
    assert not arguments_allowed({}, "[]")
    nested = {"type": "object", "properties": {"in": CITY}, "required": ["in"]}
    assert not arguments_allowed(nested, '{"in": {"city": "a", "x": 1}}', strict=True)
    assert CITY.keys() == {"type", "properties", "required"}  # strict changes a copy


REFERRED = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
}


NEEDS_NEXT = {"$ref": "#/$defs/node", "required": ["next"]}


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        (REFERRED, '{"next": {"next": {}}}'),
        ({"anyOf": [CITY, {"allOf": [CITY]}]}, '{"city": "a"}'),
        ({"oneOf": [CITY, NEEDS_NEXT], "$defs": REFERRED["$defs"]}, '{"city": "b"}'),
    ],
    ids=["$ref", "anyOf", "oneOf"],
)
def test_objects_may_be_described_indirectly(parameters, arguments):
    guide = Guide.tools([tool("f", parameters)], "required")
    assert embedded_schemas(guide.document)[0][1] == parameters
    assert allows(guide, call("f", arguments))


LONG = {"type": "object", "properties": {f"p{n}" * 20: {} for n in range(9000)}}

REFUSED = [
    ("tools", None, lambda: Guide.tools("f"), "not str"),
    ("tools", None, lambda: Guide.tools(None), "not NoneType"),
    ("tools", None, lambda: Guide.tools([]), "at least one tool"),
    ("tool_choice", None, lambda: Guide.tools([], "required"), "at least one tool"),
    ("tool_choice", "/function/name", lambda: Guide.tools([], named("f")), "there are: none"),
    ("tools", "/1", lambda: Guide.tools([tool("f"), 3]), "not int"),
    ("tools", "/0/function", lambda: Guide.tools([{"type": "function", "function": 3}]), "not int"),
    ("tools", "/0/function/name", lambda: Guide.tools([{"type": "function", "function": {}}]), "1"),
    ("tools", "/0/name", lambda: Guide.tools([{"type": "function"}]), "1 to 64 letters"),
    ("tools", "/0/function/name", lambda: Guide.tools([tool("")]), "1 to 64 letters"),
    ("tools", "/0/function/name", lambda: Guide.tools([tool("a" * 65)]), "1 to 64 letters"),
    ("tools", "/0/function/name", lambda: Guide.tools([tool("a.b")]), "1 to 64 letters"),
    ("tools", "/0/function/name", lambda: Guide.tools([tool("é")]), "1 to 64 letters"),
    ("tools", "/0/function/name", lambda: Guide.tools([tool("a\n")]), "1 to 64 letters"),
    ("tools", "/0/name", lambda: Guide.tools([flat(3)]), "1 to 64 letters"),
    ("tools", "/1/name", lambda: Guide.tools([tool("f"), flat("f")]), "two tools"),
    ("tools", "/0/function/strict", lambda: Guide.tools([tool("f", strict=1)]), "true or false"),
    ("tools", "/0/function/parameters", lambda: Guide.tools([tool("f", [])]), "not list"),
    ("tools", "/0/parameters", lambda: Guide.tools([flat("f", {"type": "array"})]), "'object'"),
    ("tools", "/0/parameters", lambda: Guide.tools([flat("f", {"$ref": "#"})]), "'object'"),
    ("tools", "/0/parameters", lambda: Guide.tools([flat("f", {"anyOf": []})]), "'object'"),
    (
        "tools",
        "/0/parameters",
        lambda: Guide.tools([flat("f", {"anyOf": [CITY, {"type": "null"}]})]),
        "'object'",
    ),
    ("tools", "/0/parameters", lambda: Guide.tools([flat("f", {"a": "\0"})]), "NUL"),
    ("tools", "/0/parameters", lambda: Guide.tools([flat("f", {"a": {1}})]), "written as JSON"),
    ("tool_choice", None, lambda: Guide.tools(TOOLS, "any"), "'none', 'auto', 'required'"),
    ("tool_choice", None, lambda: Guide.tools(TOOLS, None), "is needed"),
    ("tool_choice", None, lambda: Guide.tools(TOOLS, {"type": "allowed_tools"}), "is needed"),
    ("tool_choice", "/name", lambda: Guide.tools(TOOLS, {"type": "function"}), "the name"),
    (
        "tool_choice",
        "/function/name",
        lambda: Guide.tools(TOOLS, {"type": "function", "function": 3}),
        "the name",
    ),
    (
        "tool_choice",
        "/function/name",
        lambda: Guide.tools(TOOLS, named("f")),
        "no tool is named 'f'; there are: weather, add-2",
    ),
    ("parallel_tool_calls", None, lambda: Guide.tools(TOOLS, parallel=1), "true or false"),
    ("family", None, lambda: Guide.tools(TOOLS, family="gpt"), "known are: cohere, deepseek_r1"),
    (
        "family",
        None,
        lambda: Guide.tools(TOOLS, family="kimi", form=LLAMA),
        "a form is given as well",
    ),
]


@pytest.mark.parametrize(("param", "pointer", "build", "reason"), REFUSED)
def test_mistakes_are_refused(param, pointer, build, reason):
    with pytest.raises(InvalidGuideError) as info:
        build()
    assert reason in info.value.reason
    assert (info.value.param, info.value.pointer) == (param, pointer)
    assert info.value.code == f"invalid_{param}"


def test_other_refusals_name_the_tools_as_well():
    for build, error, pointer in [
        (lambda: Guide.tools([{"type": "custom"}]), UnsupportedGuideError, "/0/type"),
        (lambda: Guide.tools([flat("f", {"not": {}})]), EmptyLanguageError, "/0/parameters"),
        (
            lambda: Guide.tools([flat("f", {"a": "x" * MAX_TEXT_CHARACTERS})]),
            GrammarTooComplexError,
            "/0/parameters",
        ),
        (
            lambda: Guide.tools([flat(f"f{n}", LONG) for n in range(2)]),
            GrammarTooComplexError,
            None,
        ),
    ]:
        with pytest.raises(error) as info:
            build()
        assert (info.value.param, info.value.pointer) == ("tools", pointer)


@pytest.mark.parametrize("family", [None, "harmony"])
def test_errors_of_the_engine_are_said_of_the_tool(family):
    nested = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    tools = [tool("f"), flat("g", nested, strict=True), tool("h", nested)]
    guide = Guide.tools(tools, named("h"), family=family)
    with pytest.raises(GuideError) as info:
        compiler().compile(guide)
    assert info.value.param == "structural_tag"
    error = tools_error(info.value, guide, tools)
    assert type(error) is type(info.value)
    assert error.param == "tools"
    assert error.pointer.startswith("/2/function/parameters")
    assert error.reason == info.value.reason
    everywhere = tools_error(InvalidGuideError("structural_tag", "why"), guide, tools)
    assert (everywhere.pointer, str(everywhere)) == (None, "tools: why")
    inside = embedded_schemas(guide.document)[0][0] + "/properties/a"
    error = tools_error(InvalidGuideError("structural_tag", "x", pointer=inside), guide, tools)
    assert error.pointer == "/2/function/parameters/properties/a"
    assert error.code == "invalid_tools"


def test_calls_may_follow_reasoning():
    guide = Guide.tools(TOOLS, "required").after_reasoning()
    assert allows(guide, f"Let me see: {OTHER}?</think>\n\n{ONE}")
    assert not allows(guide, ONE)
    assert not allows(guide, "So.</think>\n\nHello")


NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True)
ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=20) | st.sampled_from(["</tool_call>", "}\n"]),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
        max_leaves=4,
    ),
    max_size=3,
).map(lambda value: json.dumps(value, ensure_ascii=False))
CONTENT = st.text(max_size=20).filter(lambda text: "<tool_call>" not in text).map(str.strip)


@given(content=CONTENT, calls=st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3))
def test_calls_are_read_back(content, calls):
    text = "\n".join([content, *(call(*one) for one in calls)])
    outside, found = parse_tool_calls(text)
    assert found == calls
    assert outside.strip() == content


@settings(deadline=None, max_examples=40)
@given(content=CONTENT, arguments=st.lists(ARGUMENTS, max_size=2))
def test_what_the_grammar_allows_is_read_back(content, arguments):
    calls = [("add-2", one) for one in arguments]
    text = "\n".join([content, *(call(*one) for one in calls)])
    guide = Guide.tools(TOOLS)
    assert allows(guide, text)
    assert parse_tool_calls(text)[1] == calls


def test_reading_calls():
    assert parse_tool_calls("") == ("", [])
    assert parse_tool_calls(" no call ") == (" no call ", [])
    assert parse_tool_calls(f" a {ONE}\nb{OTHER}\n") == (
        " a \nb",
        [("weather", '{"city": "Köln </tool_call>"}'), ("add-2", '{"x": [1, 2]}')],
    )
    # Blanks in front of the first call are the text's start only if there is other text.
    assert parse_tool_calls(f"\n {ONE}\n so \n{OTHER} \n")[0] == "so"
    # An unguided model sets its blanks as it likes.
    assert parse_tool_calls('<tool_call>{ "name":"f" ,"arguments":{} }</tool_call>')[1] == [
        ("f", "{}")
    ]
    for broken in (
        ONE[:-1],
        call("weather", "[1]"),
        call("weather", '{"a": }'),
        call("weather", '{"a": NaN}'),
        call("a b", "{}"),
        call("weather", '{"a":' * 100_000),
        "<tool_call>" * 3,
    ):
        assert parse_tool_calls(broken) == (broken, [])
        assert parse_tool_calls(broken + OTHER) == (broken, [("add-2", '{"x": [1, 2]}')])
    long = '{"n": ' + "9" * 5000 + "}"
    assert parse_tool_calls(call("f", long))[1] == [("f", long)]


MORE = {
    HERMES: (ONE, OTHER, f"{ONE}\n{OTHER}"),
    LLAMA: (
        '{"name": "weather", "parameters": {"city": "é"}}',
        '<|tool|>{"name": "add-2", "parameters": {}}',
        '{"name": "weather", "parameters": {"city": ""}}; {"name": "add-2", "parameters": {}}',
    ),
    MISTRAL: (
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "é"}}]',
        '[TOOL_CALLS][{"name": "add-2", "arguments": {}}]',
        '[TOOL_CALLS][{"name": "add-2", "arguments": {}}, {"name": "add-2", "arguments": {"": 1}}]',
    ),
    MISTRAL_ARGS: (
        '[TOOL_CALLS]weather[ARGS]{"city": "é"}',
        "[TOOL_CALLS]add-2[ARGS]{}",
        '[TOOL_CALLS]add-2[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city": "é"}',
    ),
}


@pytest.mark.parametrize("form", MORE, ids=CALL_FORMS)
def test_calls_in_other_forms(form):
    one, other, both = MORE[form]
    marked = "<|tool|>" in other
    form = replace(form, token="", mark="<|tool|>" if marked else "")
    for choice in ("auto", "required"):
        for parallel in (True, False):
            guide = Guide.tools(TOOLS, choice, parallel=parallel, form=form)
            assert allows(guide, one)
            assert allows(guide, other) == (choice == "auto" or not marked)
            assert allows(guide, both) == parallel
            assert not allows(guide, one.replace("city", "town"))
            assert allows(guide, "hi") == (choice == "auto")
    guide = Guide.tools(TOOLS, named("weather"), form=form)
    assert allows(guide, one)
    assert not allows(guide, other)
    assert not allows(guide, both)


def test_the_families_are_those_of_the_engine():
    from xgrammar.builtin_structural_tag import _structural_tag_registry

    assert set(FAMILIES) == set(_structural_tag_registry)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parallel", [True, False])
def test_every_family_compiles_and_is_held_to_its_choice(family, parallel):
    for choice in ("auto", "required", named("weather")):
        guide = Guide.tools(TOOLS, choice, parallel=parallel, family=family)
        schemas = [schema for _, schema in embedded_schemas(guide.document)]
        assert all(schema in (CITY, {"type": "object"}) for schema in schemas)
        assert CITY in schemas
        assert ({"type": "object"} in schemas) == (choice in ("auto", "required"))
        matcher = compiler().compile(guide).matcher()
        if choice != "auto":
            assert not may_be_empty(guide.document["format"])
            assert not matcher.is_completed()


FAMILY_CALLS = {
    "llama": '{"name": "weather", "parameters": {"city": "é"}}',
    "qwen_3": '<tool_call>\n{"name": "weather", "arguments": {"city": "é"}}\n</tool_call>',
    "qwen_3_coder": "<tool_call>\n<function=weather>\n<parameter=city>é</parameter>"
    "\n</function>\n</tool_call>",
    "exaone": '<tool_call>{"name": "weather", "arguments": {"city": "é"}}</tool_call>',
    "harmony": "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>"
    '{"city": "é"}<|call|>',
}


@pytest.mark.parametrize("family", FAMILY_CALLS)
def test_calls_as_families_write_them(family):
    text = FAMILY_CALLS[family]
    separator = "<|start|>assistant" if family == "harmony" else ""
    for choice in ("auto", "required"):
        many, single = (
            Guide.tools(TOOLS, choice, parallel=parallel, family=family)
            for parallel in (True, False)
        )
        for guide in (many, single):
            assert allows(guide, text)
            assert not allows(guide, text.replace("city", "town"))
        assert allows(many, text + separator + text)
        assert not allows(single, text + separator + text)


def test_strict_tools_are_strict_in_a_family_and_loose_ones_follow_their_schema():
    def family_allows(arguments, **options):
        guide = Guide.tools([tool("f", CITY, **options)], "required", family="exaone")
        return allows(guide, f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')

    for strict in (True, False, None):
        assert family_allows('{"city": "a"}', strict=strict)
        assert not family_allows('{"city": 1}', strict=strict)
        assert family_allows('{"city": "a", "x": 1}', strict=strict) != (strict is True)


def test_no_engine_is_imported_without_a_family():
    program = (
        "import sys; from grammar_host import Guide; from grammar_host.tools import FAMILIES\n"
        "Guide.tools([{'type': 'function', 'name': 'f', 'strict': True, 'parameters': {}}])\n"
        "assert not {'torch', 'xgrammar', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    "parameters",
    [{"properties": [{}]}, {"required": "a"}, {"items": [], "$defs": 1}],
)
@pytest.mark.parametrize("strict", [False, True])
def test_parameters_of_the_wrong_shape_are_told_with_their_tool(
    parameters: dict[str, object], strict: bool
) -> None:
    function = {"name": "f", "parameters": {"type": "object"} | parameters, "strict": strict}
    with pytest.raises(InvalidGuideError) as raised:
        Guide.tools([{"type": "function", "function": function}])
    assert raised.value.param == "tools"
    assert str(raised.value.pointer).startswith("/0/function/parameters")
