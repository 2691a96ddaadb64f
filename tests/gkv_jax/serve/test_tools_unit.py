"""Tool calls without a server: reading answers, writing prompts, and what is enforced."""

import gc
import itertools
import json
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.formats import Constraint
from gkv_jax.serve.tools import (
    AnswerEvent,
    CallArguments,
    CallBegins,
    CallEnds,
    Conversation,
    ReadAnswer,
    Shown,
    TemplateStyle,
    TextDelta,
    Tool,
    ToolCallField,
    ToolCallParser,
    ToolChoice,
    check_conversation,
    render,
    tools_constraint,
)
from grammar_host import Guide, GuideError
from grammar_host.object_scanner import ObjectScanner
from grammar_host.tools import parse_tool_calls
from tests.gkv_jax.tiny import byte_tokenizer
from tests.grammar_host.common import accepts, compiler


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


NASTY = '{"a": "}\\n</tool_call> \\" <tool_call> {\\\\", "b": [1.5e-3, {"é": null}]}'


def stream(pieces: Sequence[str]) -> list[AnswerEvent]:
    parser = ToolCallParser()
    return [*(event for piece in pieces for event in parser.push(piece)), *parser.finish()]


def said(answer: ReadAnswer) -> tuple[str, list[tuple[str, str, bool]]]:
    """An answer without its random ids."""
    return answer.content, [(one.name, one.arguments, one.complete) for one in answer.calls]


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


JSON_TEXT = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", "}\n", '"', "\\", "<tool_call>", "😀"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
ARGUMENTS = st.builds(
    json.dumps,
    st.dictionaries(st.text(max_size=4), JSON_TEXT, max_size=3),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
CALLS = st.builds(call, st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True), ARGUMENTS)
OUTSIDE = st.text(" \n\tab<{", max_size=6) | st.sampled_from(
    ["<tool_call>", "<tool", "\x1c", "\xa0"]
)
COMPLETE = st.lists(OUTSIDE | CALLS, max_size=5).map("".join)
CUT_OFF = st.tuples(COMPLETE, CALLS, st.integers(0)).map(
    lambda parts: parts[0] + parts[1][: parts[2] % (len(parts[1]) + 1)]
)
FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', "{", "}", "[", "]", '"'),
        *("\\", "\\u12", "\n", " ", ",", ":", '"a": ', "1", "-0", ".5", "e+", "tru", "e", "null"),
        *(
            "NaN",
            "Infinity",
            "é",
            "\t",
            "\x01",
            '<tool_call>{"name":"g","arguments":{}}</tool_call>',
        ),
    ]
)
MALFORMED = st.lists(FRAGMENTS | CALLS, max_size=12).map("".join)
PLACES = st.lists(st.integers(0), max_size=6)


@given(text=COMPLETE | CUT_OFF | MALFORMED, places=PLACES)
@example(
    text='<tool_call>{"name": "f", "arguments": {"a<tool_call>{"name":"g","arguments":{}}',
    places=[],
)
@example(text='<tool_call>{"name": "f", "arguments": {"a<tool_call>{"no', places=[])
def test_where_a_text_is_cut_makes_no_difference(text: str, places: list[int]) -> None:
    whole = said(ReadAnswer.read(text))
    assert said(ReadAnswer.of(stream(cut(text, places)))) == whole
    assert said(ReadAnswer.of(stream(list(text)))) == whole


@given(text=COMPLETE | CUT_OFF | MALFORMED)
@example(text=f" a {call('f', NASTY)}\nb")
@example(text=f"\n{call('f', NASTY)}\nb \n{call('g', '{}')} ")
@example(
    text='<tool_call>{"name":"f","arguments":{"a":"<tool_call>{"name":"g","arguments":{}}</tool_call>'
)
@example(text='<tool_call>{"name":"f","arguments":{"a": NaN}}</tool_call>')
def test_an_answer_is_what_parse_tool_calls_says(text: str) -> None:
    answer = ReadAnswer.read(text)
    content, calls = parse_tool_calls(text)
    assert [(one.name, one.arguments) for one in answer.calls if one.complete] == calls
    if all(one.complete for one in answer.calls):
        assert answer.content == content
    else:  # the others are text to parse_tool_calls; no letter is there twice
        left = iter(content)
        assert all(letter in left for letter in answer.content.strip())


@given(text=CUT_OFF, places=PLACES)
def test_events_come_in_order(text: str, places: list[int]) -> None:
    open_call, begun = None, 0
    ids = set()
    for event in stream(cut(text, places)):
        match event:
            case TextDelta(piece):
                assert piece
                assert open_call is None
            case CallBegins(index, id_, _):
                assert open_call is None
                assert index == begun
                assert len(id_) == 29
                assert id_.startswith("call_")
                assert id_ not in ids
                ids.add(id_)
                open_call, begun = index, begun + 1
            case CallArguments(index, piece):
                assert piece
                assert index == open_call
            case CallEnds(index):
                assert index == open_call
                open_call = None


def test_arguments_are_sent_as_they_come_and_the_end_of_the_call_is_not() -> None:
    parser = ToolCallParser()
    assert parser.push("So") == [TextDelta("So")]
    assert parser.push(". \n<tool") == [TextDelta(".")]
    assert parser.push('_call>\n{"name": "f", "argu') == []
    assert parser.push('ments": ') == []
    begins, arguments = parser.push("{")
    assert isinstance(begins, CallBegins)
    assert (begins.index, begins.name, arguments) == (0, "f", CallArguments(0, "{"))
    for piece in (
        '"a": tr',
        "ue, ",
        '"b',
        "\\u00",
        'e9}\\n</tool_call> \\"": -1',
        ".",
        "5e2",
        " }",
    ):
        assert parser.push(piece) == [CallArguments(0, piece)]
    assert parser.push(" \n") == []
    # No call ends like this: from here on it is text, which goes on behind "So.".
    assert parser.push('"') == [TextDelta(' \n \n"')]
    assert parser.finish() == []


def test_a_whole_call_piece_by_piece() -> None:
    parser = ToolCallParser()
    parser.push('<tool_call>{"name":"f","arguments":{"a": [')
    assert parser.push("]}") == [CallArguments(0, "]}")]
    assert parser.push("}\n</to") == []
    assert parser.push("ol_call>") == [CallEnds(0)]
    assert parser.push("\n<") == []
    assert parser.push("b") == [TextDelta("<b")]
    assert parser.push(" \n") == []
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        (" no call \n", " no call \n", []),
        ("a <tool_call>\n{", "a <tool_call>\n{", []),
        ('a <tool_call>\n{"name": "f", "arguments": ', None, []),
        (
            f" a \n{call('f', '{}')}\n\n{call('g', NASTY)}",
            " a",
            [("f", "{}", True), ("g", NASTY, True)],
        ),
        (f"{call('f', NASTY)[:-14]}", "", [("f", NASTY, False)]),
        (f"{call('f', NASTY)[:-13]}", "", [("f", NASTY, False)]),
        (f"{call('f', NASTY)[:-1]}", "", [("f", NASTY, False)]),
        (f"b\n{call('f', '{}')[:-15]}", "b", [("f", "{", False)]),
        (call("f", '{"a" 1}') + " z", "1}}\n</tool_call> z", [("f", '{"a" ', False)]),
        (call("f", '{"a": 1.x}'), "x}}\n</tool_call>", [("f", '{"a": 1.', False)]),
        (call("f", '{"a": [}'), "}}\n</tool_call>", [("f", '{"a": [', False)]),
        (call("f", "{}")[:-1] + "!", "}\n</tool_call!", [("f", "{}", False)]),
        (
            '<tool_call>{"name":"f","arguments":{"<tool_call>{"name":"g","arguments":{}}</tool_call>',
            "",
            [("f", '{"<tool_call>{"', False), ("g", "{}", True)],
        ),
    ],
    ids=str,
)
def test_reading_answers(
    text: str, content: str | None, calls: list[tuple[str, str, bool]]
) -> None:
    assert said(ReadAnswer.read(text)) == (text if content is None else content, calls)


def test_the_finish_reason() -> None:
    whole, part = (
        ReadAnswer.read(call("f", "{}")),
        ReadAnswer.read(call("f", "{}") + call("g", "{}")[:-1]),
    )
    assert whole.finish_reason("stop") == "tool_calls"
    assert whole.finish_reason("length") == part.finish_reason("length") == "length"
    assert part.finish_reason("stop") == "stop"
    assert ReadAnswer.read("hello").finish_reason("stop") == "stop"


def test_reading_takes_linear_time_of_texts_that_look_like_calls() -> None:
    """Going back to the start of each would take minutes."""
    for unit in ('<tool_call>{"name":"f","arguments":{"', "<tool_call>", '{"a":', "<tool_call>{ "):
        text = '<tool_call>{"name":"f","arguments":' * (unit == '{"a":') + unit * 5_000
        assert len(ReadAnswer.read(text).calls) in (0, 1, 5_000)


VALUES = st.recursive(
    st.sampled_from(['"é\\n"', "-0.5E+7", "true", "null", "12", '""']),
    lambda inner: (
        st.lists(inner, max_size=2).map(lambda items: "[ " + ",".join(items) + "]")
        | st.lists(inner, max_size=2).map(
            lambda items: "{" + ", ".join(f'"{n}" :{item}' for n, item in enumerate(items)) + "}"
        )
    ),
    max_leaves=5,
)


@given(inner=VALUES, place=st.integers(0), letter=st.sampled_from('{}[]",:\\1.e-tn x\x00'))
def test_the_scanner_agrees_with_json(inner: str, place: int, letter: str) -> None:
    """Of a valid object and of one with a letter too many."""
    valid = '{"a": ' + inner + "}"
    scanner = ObjectScanner()
    assert all(scanner.scan(valid[:end]) == "open" for end in range(len(valid)))
    assert scanner.scan(valid) == "closed"
    place = 1 + place % (len(valid) - 1)
    changed = valid[:place] + letter + valid[place:]
    scanner = ObjectScanner()
    outcome = scanner.scan(changed)
    try:
        json.loads(changed)
    except json.JSONDecodeError as error:
        closed_early = error.msg == "Extra data"
        assert (outcome == "closed") == closed_early
    else:
        assert outcome == "closed"


# Prompts ----------------------------------------------------------------------------------------

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
TIME = {"type": "function", "function": {"name": "time", "description": "Now."}}
TOOLS = [WEATHER, TIME]


def user(content: str = "hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def calling(*calls: tuple[str, str, str], content: str | None = None) -> dict[str, Any]:
    """An assistant's turn; calls are (id, name, arguments)."""
    listed = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id_, name, arguments in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": listed}


def returned(id_: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": content}


TALK = [
    {"role": "developer", "content": "Be brief."},
    user(),
    calling(("a", "weather", '{"city": "Köln"}'), ("b", "time", "{ }"), content="So:"),
    returned("b", "noon"),
    returned("a", "rain"),
    calling(("c", "time", "{}")),
    returned("c", "one"),
    user("thanks"),
]

HEAD = (
    "{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}"
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
)
TAIL = "{% endfor %}{% if m.role == 'tool' %}({{ m.name }}){% endif %}{% endfor %}"
BEGIN = '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
OBJECTS = HEAD + BEGIN + "{{ call.function.arguments | tojson }}}</tool_call>" + TAIL
TEXTS = HEAD + BEGIN + "{{ call['function']['arguments'] + '}</tool_call>' }}" + TAIL
SILENT = HEAD + "{{ call.function.name ~ call.function.arguments }}" + TAIL
ITEMS = (
    HEAD
    + "{% generation %}{{ call.function.name }}{% for k, v in call.function.arguments.items() %}"
    "<{{ k }}={{ v }}>{% if loop.index > 9 %}{% break %}{% endif %}{% endfor %}{% endgeneration %}"
    + TAIL
)
NO_CALLS = "{{ tools }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
SHOWN = Shown("hermes")


def tokenizer(template: Any) -> Any:
    made = byte_tokenizer()
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (None, TemplateStyle()),
        ("{{ messages }}", TemplateStyle()),
        ("{% set tools = 1 %}{{ tools }}", TemplateStyle()),
        ("{{ tools", TemplateStyle()),
        (OBJECTS, TemplateStyle(True, True, shown=SHOWN)),
        (ITEMS, TemplateStyle(True, True)),
        (TEXTS, TemplateStyle(True, True, True, SHOWN)),
        (SILENT, TemplateStyle(True, True, True)),
        (NO_CALLS, TemplateStyle(True)),
        ("{{ tools }}{{ raise_exception('no') }}", TemplateStyle(True)),
        (
            {"default": "{{ messages }}", "tool_use": OBJECTS},
            TemplateStyle(True, True, shown=SHOWN),
        ),
        ({"rag": OBJECTS}, TemplateStyle()),
    ],
    ids=str,
)
def test_what_a_template_makes_of_tools(template: Any, style: TemplateStyle) -> None:
    assert TemplateStyle.of(tokenizer(template)) == style


def test_what_is_remembered_of_a_template_goes_with_its_tokenizer() -> None:
    made = tokenizer(OBJECTS)
    assert TemplateStyle.of(made).knows_tools
    made.chat_template = "{{ messages }}"
    assert not TemplateStyle.of(made).knows_tools
    made.chat_template = OBJECTS
    assert TemplateStyle.of(made).knows_tools
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("template", [OBJECTS, TEXTS], ids=["objects", "texts"])
def test_a_template_that_knows_tools_gets_them(template: str) -> None:
    talk = Conversation.of(TALK, TOOLS, None, None, tokenizer=tokenizer(template))
    text = tokenizer(template).apply_chat_template(
        talk.messages, tools=talk.tools_for_template, tokenize=False
    )
    empty = "{ }" if template == TEXTS else "{}"
    weather = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    time = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    assert text == (
        f'[{{"type": "function", "function": {{"name": "weather", "parameters": {json.dumps(CITY)}}}}}]'
        '[{"type": "function", "function": {"name": "time", "description": "Now.", '
        '"parameters": {"type": "object", "properties": {}}}}]'
        f"<system>Be brief.<user>hi<assistant>So:{weather}{time.replace('{}', empty)}"
        # In the order of the calls: a template without ids would give each the other's.
        f"<tool>rain(weather)<tool>noon(time)<assistant>{time}<tool>one(time)<user>thanks"
    )
    assert talk.may_call


def test_a_template_that_does_not_know_tools_gets_text() -> None:
    rendered = render(TALK, TOOLS, TemplateStyle())
    assert rendered.tools is None
    system, *others = rendered.messages
    assert system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\n# Tools\n\n")
    listed = system["content"].split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line)["function"]["name"] for line in listed] == ["weather", "time"]
    assert "strict" not in system["content"]
    weather, time = call("weather", '{"city": "Köln"}'), call("time", "{ }")
    assert others == [
        user(),
        {"role": "assistant", "content": f"So:\n{weather}\n{time}"},
        # In the order of the calls, since they have no names.
        user("<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"),
        {"role": "assistant", "content": call("time", "{}")},
        user("<tool_response>\none\n</tool_response>"),
        user("thanks"),
    ]
    assert render([user()], TOOLS[:1], TemplateStyle()).messages[0]["role"] == "system"
    assert render([user()], None, TemplateStyle()).messages == [user()]
    assert byte_tokenizer().apply_chat_template(rendered.messages, tokenize=False)


@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=3), content=st.sampled_from(["", "So: <"]))
def test_written_calls_are_those_that_are_read(calls: list[str], content: str) -> None:
    turn = calling(*((str(n), "f", one) for n, one in enumerate(calls)), content=content)
    ((written,), _) = vars(render([turn], None, TemplateStyle())).values()
    assert said(ReadAnswer.read(written["content"])) == (
        content,
        [("f", one, True) for one in calls],
    )


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_with_no_choice_the_tools_are_listed_but_not_looked_for(tools: Any) -> None:
    talk = Conversation.of([user()], tools, "none", None, tokenizer=tokenizer(OBJECTS))
    assert (talk.tools_for_template is None) == (tools is None)
    assert not talk.may_call
    assert talk.constraint(None) is None


@pytest.mark.parametrize(
    ("messages", "param", "reason"),
    [
        (
            [user(), returned("a", "")],
            "messages.1.tool_call_id",
            "no call before it has the id 'a'",
        ),
        (
            [calling(("a", "f", "{}")), returned("b", "")],
            "messages.1.tool_call_id",
            "no call before it has the id 'b'",
        ),
        (
            [calling(("a", "f", "{}")), returned("a", ""), user(), returned("a", "")],
            "messages.3.tool_call_id",
            "the call 'a' has a result already",
        ),
        (
            [calling(("a", "f", "{}"), ("a", "f", "{}"))],
            "messages.0.tool_calls.1.id",
            "'a' is the id of an earlier call",
        ),
        (
            [calling(("a", "f", "{}")), returned("a", ""), calling(("a", "f", "{}"))],
            "messages.2.tool_calls.0.id",
            "'a' is the id of an earlier call",
        ),
        ([calling(("a", "f", "{}"))], "messages.0.tool_calls.0", "the call 'a' has no result"),
        (
            [calling(("a", "f", "{}")), user(), returned("a", "")],
            "messages.0.tool_calls.0",
            "the call 'a' has no result",
        ),
        (
            [calling(("a", "f", "{}"), ("b", "f", "{}")), returned("a", ""), user()],
            "messages.0.tool_calls.1",
            "the call 'b' has no result",
        ),
        *(
            ([user(), calling(("a", "f", text))], "messages.1.tool_calls.0.function.arguments", why)
            for text, why in [
                ("", "not valid JSON"),
                ('{"a": ', "not valid JSON"),
                ('{"a": NaN}', "NaN is not JSON"),
                ('{"a":' * 100_000, "not valid JSON"),
                ("[1]", "the text of a JSON object"),
            ]
        ),
    ],
)
def test_conversations_hold_together(messages: Any, param: str, reason: str) -> None:
    with pytest.raises(ApiError) as info:
        check_conversation([{k: v for k, v in m.items() if v is not None} for m in messages])
    assert (info.value.status, info.value.param) == (400, param)
    assert reason in info.value.message
    assert info.value.message.startswith(f"Invalid value for '{param}': ")


# Fields -----------------------------------------------------------------------------------------

CHOICES: TypeAdapter[ToolChoice] = TypeAdapter(ToolChoice)
NAMED = {"type": "function", "function": {"name": "time"}}
ONLY_TIME = {"tools": [NAMED], "mode": "auto"}


@pytest.mark.parametrize(
    "value",
    ["none", "auto", "required", NAMED, {"type": "allowed_tools", "allowed_tools": ONLY_TIME}],
)
def test_choices_are_read(value: Any) -> None:
    assert CHOICES.validate_python(value).value() == value


@pytest.mark.parametrize(
    ("kind", "value", "where", "what"),
    [
        (ToolChoice, "any", (), "'none', 'auto', 'required', or an object"),
        (ToolChoice, 3, (), "valid dictionary"),
        (ToolChoice, {"type": "auto"}, (), "as a string"),
        (ToolChoice, {"type": "custom", "custom": {"name": "f"}}, (), "'custom' is not served"),
        (ToolChoice, {"type": "function"}, (), "go together"),
        (ToolChoice, {"type": "function", "name": "f"}, ("name",), "not permitted"),
        (ToolChoice, NAMED | {"allowed_tools": ONLY_TIME}, (), "go together"),
        (
            ToolChoice,
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            ("allowed_tools", "tools"),
            "at least 1",
        ),
        (Tool, {"type": "custom", "custom": {"name": "f"}}, (), "a function with one string"),
        (Tool, {"type": "web_search"}, (), "offer it as a function"),
        (Tool, {"function": {"name": "f"}}, ("type",), "required"),
        (Tool, {"type": "function", "function": {"name": "a b"}}, ("function", "name"), "pattern"),
        (Tool, {"type": "function", "function": {"name": "a\n"}}, ("function", "name"), "pattern"),
        (
            ToolCallField,
            {"id": "", "function": {"name": "f", "arguments": ""}},
            ("id",),
            "at least 1",
        ),
        (
            ToolCallField,
            {"id": "a", "function": {"name": "f", "arguments": {}}},
            ("function", "arguments"),
            "string",
        ),
    ],
)
def test_fields_are_refused(kind: type, value: Any, where: tuple[str, ...], what: str) -> None:
    with pytest.raises(ValidationError) as info:
        kind.model_validate(value)
    (error,) = info.value.errors()
    assert error["loc"] == where
    assert what in error["msg"]


# What is enforced -------------------------------------------------------------------------------


def constraint(guide: Guide, **options: Any) -> Constraint:
    return Constraint("response_format", lambda: guide, **options)


def allows(found: Constraint | None, text: str) -> bool:
    assert found is not None
    return accepts(compiler().compile(found.guide()).matcher(), text)


RAIN = call("weather", '{"city": "x"}')
NOON = call("time", "{}")
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
FLAT = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}


@pytest.mark.parametrize(
    ("choice", "parallel", "members", "others"),
    [
        (None, None, ["hi", RAIN, f"{RAIN}\n{NOON}"], [f"{RAIN}<tool_call>"]),
        ("auto", False, ["hi", RAIN], [f"{RAIN}\n{NOON}"]),
        ("required", None, [RAIN, f"{RAIN}\n{NOON}"], ["", "hi"]),
        (NAMED, None, [NOON], ["", "hi", RAIN]),
        ({"type": "function", "name": "time"}, None, [NOON], ["", RAIN]),
        (ALLOWED, True, [NOON, f"{NOON}\n{NOON}"], ["", "hi", RAIN]),
        (ALLOWED, False, [NOON], [f"{NOON}\n{NOON}", RAIN]),
        (FLAT, None, ["hi", f"hi {NOON}"], [RAIN]),
    ],
)
def test_what_each_choice_allows(
    choice: Any, parallel: bool | None, members: list[str], others: list[str]
) -> None:
    found = tools_constraint(TOOLS, choice, parallel)
    for text in members:
        assert allows(found, text), text
    for text in others:
        assert not allows(found, text), text


DOCUMENT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("own", "members", "others"),
    [
        (Guide.json_schema(DOCUMENT), ['{"a": 1}', '{ "a":1, "b": {}}'], ['{"b": 1}', "hi", ""]),
        (Guide.json_schema(DOCUMENT, strict=True), ['{"a": 1}'], ['{"a": 1, "b": 2}']),
        (Guide.json_schema(DOCUMENT, max_whitespace=0), ['{"a":1}'], ['{"a": 1}']),
        (Guide.json_schema(DOCUMENT, max_whitespace="free"), ['{"a":' + " " * 50 + "1}"], ["{}"]),
        (Guide.json_schema({"type": "string"}), ['"<tool_call>"', '""'], ["1"]),
        (Guide.json(), ["{}", '{"b": 1}'], ["[]", '"a"']),
        (Guide.choice(["yes", "no"]), ["yes", "no"], ["yesno", "maybe", ""]),
    ],
    ids=lambda value: value.text[:20] if isinstance(value, Guide) else "",
)
def test_a_document_or_calls_but_no_mixture(
    own: Guide, members: list[str], others: list[str]
) -> None:
    found = tools_constraint(TOOLS, "auto", None, constraint(own))
    for text in [*members, RAIN, f"{RAIN}\n{NOON}"]:
        assert allows(found, text), text
        assert said(ReadAnswer.read(text))[0] == ("" if text.startswith("<tool_call>") else text)
    one = members[0]
    for text in [*others, one + RAIN, f"{RAIN}\n{one}", one + one, f"hi {RAIN}", f"{RAIN}\n"]:
        assert not allows(found, text), text
    single = tools_constraint(TOOLS, None, False, constraint(own))
    assert allows(single, RAIN)
    assert not allows(single, f"{RAIN}\n{NOON}")


def test_reasoning_comes_before_both() -> None:
    own = constraint(Guide.json_schema(DOCUMENT).after_reasoning())
    found = tools_constraint(TOOLS, "auto", None, own)
    for text in ('{"a": 1}', RAIN):
        assert allows(found, f"Hm.</think>{text}")
        assert not allows(found, text)


def test_without_calls_the_own_constraint_stays() -> None:
    own = constraint(Guide.json())
    assert tools_constraint(TOOLS, "none", True, own) is own
    assert tools_constraint(None, None, True, own) is own
    assert tools_constraint(None, "auto", None) is None
    assert tools_constraint(TOOLS, "none", None) is None


LOOSE = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
OWN = constraint(Guide.json())


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (([], None, None), "tools", "tools is empty; leave it out"),
        ((None, "required", None), "tool_choice", "tool_choice needs tools"),
        ((None, NAMED, None), "tool_choice", "tool_choice needs tools"),
        ((TOOLS, "required", None, OWN), "tool_choice", "leave one of them out"),
        ((TOOLS, NAMED, None, OWN), "tool_choice", "leave one of them out"),
        ((TOOLS, ALLOWED, None, OWN), "tool_choice", "leave one of them out"),
        (
            ([WEATHER], NAMED, None),
            "tool_choice.function.name",
            "Invalid value: 'time'; no tool has this name; there are: weather",
        ),
        (([WEATHER], {"type": "function", "name": "g"}, None), "tool_choice.name", "'g'"),
        (([WEATHER], ALLOWED, None), "tool_choice.allowed_tools.tools.0", "'time'"),
        (([WEATHER], FLAT, None), "tool_choice.tools.0", "'time'"),
        (([WEATHER, LOOSE], "none", None), "tools", "In /1/function/parameters: arguments are"),
        (([WEATHER, WEATHER], None, None), "tools", "In /1/function/name: two tools"),
        (
            (TOOLS, None, None, constraint(Guide.json(), backend="llguidance")),
            "backend",
            "backend is 'llguidance'",
        ),
    ],
)
def test_contradictions_are_refused(fields: Any, param: str, message: str) -> None:
    with pytest.raises(ApiError) as info:
        tools_constraint(*fields)
    assert (info.value.status, info.value.param) == (400, param)
    assert message in info.value.message


def test_constraints_that_are_no_part_of_a_tag_are_refused() -> None:
    for own in (Guide.regex("a+"), Guide.json(whitespace_pattern=" ?")):
        found = tools_constraint(TOOLS, "auto", None, constraint(own))
        assert found is not None
        with pytest.raises(ApiError) as info:
            found.guide()
        assert info.value.param == "response_format"
        assert "cannot be combined with calls" in info.value.message


def compile_error(found: Constraint | None) -> ApiError:
    assert found is not None
    with pytest.raises(GuideError) as info:
        compiler().compile(found.guide())
    return found.error(info.value)


def test_errors_name_the_field_at_fault() -> None:
    broken = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    tools = [TIME, {"type": "function", "function": {"name": "f", "parameters": broken}}]
    for own in (None, constraint(Guide.json_schema(DOCUMENT))):
        error = compile_error(tools_constraint(tools, "auto", None, own))
        assert (error.status, error.param) == (400, "tools")
        place = "/1/function/parameters"
        assert error.message.startswith(f"Invalid schema for tools: In {place}")
        assert (error.pointer or "").startswith(place)
    own = constraint(Guide.json_schema(broken), name="mine")
    error = compile_error(tools_constraint(TOOLS, "auto", None, own))
    assert error.param == "response_format"
    assert error.message.startswith("Invalid schema for response_format 'mine': In /properties/a")
    thirds = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}}
    own = constraint(Guide.json_schema(thirds))
    error = compile_error(tools_constraint(TOOLS, "auto", None, own))
    assert (error.param, error.pointer) == ("response_format", "/properties/a/multipleOf")
    assert "set tool_choice to 'none' or 'required'" in error.message


def test_an_own_constraint_that_cannot_be_built_is_at_fault_itself() -> None:
    own = Constraint("response_format", lambda: Guide.json_schema({"not": {}}))
    found = tools_constraint(TOOLS, "auto", None, own)
    assert found is not None
    with pytest.raises(ApiError, match="response_format"):
        found.guide()
