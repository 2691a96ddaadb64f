"""Calls in the form that a model's chat template teaches: detected, enforced, and read back."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gkv_jax import CacheSpec, Engine
from gkv_jax.errors import UserError
from gkv_jax.models.llama import Llama
from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.formats import Constraint
from gkv_jax.serve.settings import Chat, load_settings
from gkv_jax.serve.tools import (
    AnswerEvent,
    CallArguments,
    CallBegins,
    CallEnds,
    CallFormat,
    Conversation,
    ReadAnswer,
    ServedFormat,
    TemplateStyle,
    TextDelta,
    ToolCallParser,
    tools_constraint,
)
from grammar_host import GrammarCompiler, Guide, TokenizerInfo
from grammar_host.call_forms import CallFormName
from grammar_host.tools import parse_tool_calls
from tests.gkv_jax.serve.conftest import LIMITS, MODEL, Served, serving
from tests.gkv_jax.serve.test_tools_unit import (
    ARGUMENTS,
    NAMED,
    NASTY,
    PLACES,
    TOOLS,
    calling,
    cut,
    returned,
    said,
    user,
)
from tests.gkv_jax.tiny import STOP, byte_tokenizer, random_params, text_config
from tests.grammar_host.common import byte_vocabulary

SPECIAL = {256: "<stop>", 257: "[TOOL_CALLS]", 258: "[ARGS]", 259: "<|python_tag|>"}
NAMES: tuple[CallFormName, ...] = get_args(CallFormName)
FORMATS = {
    name: CallFormat.of(name, ["weather", "time", "f", "g"], {**SPECIAL, 260: "<tool_call>"})
    for name in NAMES
}
by_format = pytest.mark.parametrize("name", NAMES)


def read(text: str, name: CallFormName) -> tuple[str, list[tuple[str, str, bool]]]:
    return said(ReadAnswer.read(text, FORMATS[name]))


def stream(pieces: Sequence[str], name: CallFormName) -> list[AnswerEvent]:
    parser = ToolCallParser(FORMATS[name])
    return [*(event for piece in pieces for event in parser.push(piece)), *parser.finish()]


# Reading ----------------------------------------------------------------------------------------

FRAGMENTS = st.sampled_from(
    [
        *("[TOOL_CALLS]", "[TOOL_CALLS][", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "f", "g", ", "),
        *('{"name": "f", "parameters": ', '{"name": "f", "arguments": ', '{"name": "x", "paramet'),
        *("{", "}", "]", "; ", ";", " ", "\n", '"id": "abc123DEF"', '"', "{}", "[", "<|py"),
    ]
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[CallFormName, str]:
    """Calls and text around them, perhaps cut off, or fragments of both."""
    name = draw(st.sampled_from(NAMES))
    calls = st.lists(st.tuples(st.sampled_from(["f", "g"]), ARGUMENTS), min_size=1, max_size=3)
    written = calls.map(FORMATS[name].write)
    text = draw(st.lists(written | FRAGMENTS, max_size=6).map("".join))
    return name, text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


@given(answer=answers(), places=PLACES)
@example(
    answer=("llama", '{"name": "x", "parameters": {}} {"name": "f", "parameters": {}}'), places=[]
)
@example(answer=("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "a"} ]'), places=[])
@example(answer=("mistral_args", "[TOOL_CALLS]f[CALL_ID]a[ARGS]{}[TOOL_CALLS]"), places=[])
def test_where_a_text_is_cut_makes_no_difference(
    answer: tuple[CallFormName, str], places: list[int]
) -> None:
    name, text = answer
    whole = read(text, name)
    assert said(ReadAnswer.of(stream(cut(text, places), name))) == whole
    assert said(ReadAnswer.of(stream(list(text), name))) == whole


@settings(max_examples=40)
@given(answer=answers())
@example(answer=("llama", '{"name": "f", "parameters": {"name": "f", "parameters": {}}; x'))
@example(answer=("llama", '{"name": "f", "parameters": [{"name": "f", "parameters": {}}]; x'))
@example(
    answer=("hermes", '<tool_call>\n{"name": "f", "arguments": {"name": "f", "arguments": {}};')
)
def test_events_come_in_order_and_nothing_is_told_twice(answer: tuple[CallFormName, str]) -> None:
    name, text = answer
    open_call, told = None, ""
    for event in stream(list(text), name):
        match event:
            case TextDelta(piece) | CallArguments(_, piece):
                assert piece
                told += piece
            case CallBegins(index, _, _):
                open_call = index
            case CallEnds(index):
                assert index == open_call
                open_call = None
    left = iter(text)
    assert all(letter in left for letter in "".join(told.split()))


@given(
    name=st.sampled_from(NAMES),
    calls=st.lists(st.tuples(st.sampled_from(["f", "g"]), ARGUMENTS), min_size=1, max_size=3),
    content=st.sampled_from(["", "So: <", "[ {", "{"]),
)
def test_written_calls_are_those_that_are_read(
    name: CallFormName, calls: list[tuple[str, str]], content: str
) -> None:
    written = content + "\n" + FORMATS[name].write(calls)
    assert read(written, name) == (content, [(one, text, True) for one, text in calls])


F, G = ("f", NASTY, True), ("g", "{}", True)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("llama", "{}", "{}", []),
        ("llama", f'{{"name": "f", "parameters": {NASTY}}}', "", [F]),
        ("llama", f' <|python_tag|>{{"name": "f", "parameters": {NASTY}}}', "", [F]),
        (
            "llama",
            f'a {{"name": "f", "parameters": {NASTY}}} ;{{"name": "g", "parameters": {{}}}}; b',
            "a ; b",
            [F, G],
        ),
        ("llama", '{"name": "g", "parameters": {}}\n{"name": "g", "parameters": {}}', "", [G, G]),
        ("llama", '{"name": "Ann", "parameters": {}}', None, []),
        ("llama", '{"name": "g", "age": 3}', None, []),
        ("llama", '<|python_tag|>print("x")', None, []),
        ("llama", '{"name": "g", "parameters": [1]}', None, []),
        ("llama", '{"name": "g", "parameters": {} x', "x", [("g", "{}", False)]),
        ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {NASTY}}}]', "", [F]),
        (
            "mistral",
            f'a [TOOL_CALLS] [ {{"name": "f", "arguments": {NASTY} , "id": "abcDEF123"}} , '
            '{"name":"g","arguments":{}} ] ',
            "a",
            [F, G],
        ),
        ("mistral", '[TOOL_CALLS][{"name": "g", "arguments": {}}', "", [G]),
        ("mistral", '[TOOL_CALLS][{"name": "g", "arguments": {}}, b', ", b", [G]),
        ("mistral", '[{"name": "g", "arguments": {}}]', None, []),
        ("mistral", "[TOOL_CALLS] none", None, []),
        ("mistral_args", f"So.[TOOL_CALLS]f[ARGS]{NASTY}[TOOL_CALLS]g[ARGS]{{}}", "So.", [F, G]),
        ("mistral_args", "[TOOL_CALLS]g[CALL_ID]abcDEF123[ARGS]{}", "", [G]),
        ("mistral_args", "[TOOL_CALLS]g[ARGS] none", None, []),
        ("mistral_args", "[TOOL_CALLS]g[ARGS]{", "", [("g", "{", False)]),
    ],
    ids=str,
)
def test_reading_answers(
    name: CallFormName, text: str, content: str | None, calls: list[tuple[str, str, bool]]
) -> None:
    assert read(text, name) == (text if content is None else content, calls)


def test_calls_are_told_as_they_come() -> None:
    parser = ToolCallParser(FORMATS["mistral"])
    assert parser.push("So [TOOL") == [TextDelta("So")]
    assert parser.push('_CALLS][{"name": "f", "arguments": ') == []
    begins, arguments = parser.push('{"a": ')
    assert isinstance(begins, CallBegins)
    assert (begins.name, arguments) == ("f", CallArguments(0, '{"a": '))
    assert len(begins.id) == 9
    assert begins.id.isalnum()
    assert parser.push("1}") == [CallArguments(0, "1}")]
    assert parser.push("}") == [CallEnds(0)]
    assert parser.push(', {"name"') == []
    assert [type(event) for event in parser.push(': "g", "arguments": {}}]')] == [
        *(CallBegins, CallArguments, CallEnds)
    ]
    assert parser.finish() == []


@given(answer=answers())
@example(answer=("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "argum'))
@example(answer=("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}], {"name": "g", "argum'))
@example(answer=("hermes", FORMATS["hermes"].write([("f", "{}")]) + "\n<tool_call>"))
@example(answer=("llama", '{"name": "f", "parameters": {"name": "f", "parameters": {}}; x'))
@example(answer=("llama", '{"name": "f", "parameters": {"a": {"name": "f", "parameters": {}} x'))
@example(answer=("llama", '{"name": "f", "parameters": {"a": {"name": "f", "parameters": {}}'))
def test_the_library_reads_the_same(answer: tuple[CallFormName, str]) -> None:
    name, text = answer
    content, calls = read(text, name)
    outside, found = parse_tool_calls(text, name, FORMATS[name].names)
    assert [(one, arguments) for one, arguments, whole in calls if whole] == found
    if all(whole for _, _, whole in calls):
        assert content == outside


CALL_ID = "[TOOL_CALLS]f[CALL_ID]000000000[ARGS]{}"
BEHIND_ONE: list[tuple[CallFormName, str, str]] = [
    ("hermes", FORMATS["hermes"].write([("f", "{}")]), "\n" + FORMATS["hermes"].write([("g", "")])),
    ("llama", '{"name": "f", "parameters": {}}', '; {"name": "g", "parameters": '),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}', ', {"name": "g", "arguments": '),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}', "  "),
    ("mistral_args", "[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]g[ARGS]"),
    ("mistral_args", CALL_ID, "[TOOL_CALLS]g[CALL_ID]000000000[ARGS]"),
]


@pytest.mark.parametrize(("name", "call", "head"), BEHIND_ONE, ids=str)
def test_the_head_of_a_call_that_is_cut_off_behind_another_is_no_text(
    name: CallFormName, call: str, head: str
) -> None:
    head = head.removesuffix("}\n</tool_call>")
    for end in range(len(head) + 1):
        for before in ("", "So: "):
            text = before + call + head[:end]
            expected = (before.strip(), [("f", "{}", True)])
            assert read(text, name) == said(ReadAnswer.of(stream(list(text), name))) == expected


@by_format
def test_where_there_are_only_calls_no_head_is_text(name: CallFormName) -> None:
    only = dataclasses.replace(FORMATS[name], only=True)
    text = FORMATS[name].write([("f", "{}")])
    for end in range(text.index("{}") + 1):
        parser = ToolCallParser(only)
        events = [event for letter in text[:end] for event in parser.push(letter)]
        assert [*events, *parser.finish()] == []
        assert said(ReadAnswer.read(text[:end], only)) == ("", [])
        assert read(text[:end], name) == (text[:end], [])
    assert said(ReadAnswer.read("hi", only)) == ("hi", [])
    assert said(ReadAnswer.read(text, only)) == ("", [("f", "{}", True)])


# What templates show ----------------------------------------------------------------------------

TURNS = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
LISTED = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
HERMES = (
    LISTED + TURNS + "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}"
)
LLAMA = (
    LISTED
    + TURNS
    + "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one') }}{% endif %}"
    '{% set c = m.tool_calls[0].function %}{"name": "{{ c.name }}", '
    '"parameters": {{ c.arguments | tojson }}}{% endif %}{% endfor %}'
)
MISTRAL = (
    LISTED + TURNS + "{% if m.tool_calls %}[TOOL_CALLS]GAP[{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ \', \' if not loop.last }}'
    "{% endfor %}]{% endif %}{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
)
ARGS = (
    LISTED + TURNS + "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}"
    "[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
ARGS_IDS = ARGS.replace("[ARGS]", "[CALL_ID]{{ c.id }}[ARGS]")
XML = (
    LISTED + TURNS + "{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
    "{{ c.function.arguments | tojson }}</function>{% endfor %}{% endfor %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('alternate') }}{% endif %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
)
HARMONY = (
    LISTED + TURNS + "{% for c in m.tool_calls or [] %}<|channel|>commentary "
    "to=functions.{{ c.function.name }} <|constrain|>json<|message|>{{ c.function.arguments | tojson }}"
    "<|call|>{% endfor %}{% endfor %}"
)
TEMPLATES: dict[CallFormName, str] = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL.replace("GAP", ""),
    "mistral_args": ARGS,
}


def tokenizer(template: Any, *special: str) -> Any:
    made = byte_tokenizer()
    made.chat_template = template
    if special:
        made.add_special_tokens({"additional_special_tokens": list(special)})
    return made


def talk(template: Any, messages: Any, tools: Any = TOOLS, **options: Any) -> Conversation:
    made = tokenizer(template, *SPECIAL.values())
    choice, parallel = options.pop("choice", None), options.pop("parallel", None)
    return Conversation.of(messages, tools, choice, parallel, tokenizer=made, **options)


@by_format
def test_the_format_is_that_of_the_template(name: CallFormName) -> None:
    found = talk(TEMPLATES[name], [user()]).call_format
    assert found.name == name
    assert found.names == (("weather", "time") if name == "llama" else None)
    texts = {"mistral": {"[TOOL_CALLS]"}, "llama": {"<|python_tag|>"}, "hermes": set()}
    assert {*found.marks.values()} == texts.get(name, {"[TOOL_CALLS]", "[ARGS]"})
    assert talk(TEMPLATES[name], [user()], tool_format="mistral").call_format.name == "mistral"


def test_text_arguments_show_the_format_as_well() -> None:
    text = LLAMA.replace(" | tojson }}}", " }}}")
    style = TemplateStyle.of(tokenizer(text))
    assert (style.text_arguments, style.shown.name) == (True, "llama")


def test_blanks_behind_the_token_are_those_of_the_template() -> None:
    spaced = talk(MISTRAL.replace("GAP", " "), [user()]).call_format
    assert spaced.write([("f", "{}")]) == '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'


@pytest.mark.parametrize("template", [None, "{{ messages }}", "{{ tools }}", LISTED + TURNS])
def test_templates_that_show_no_calls_get_those_of_hermes(template: str | None) -> None:
    broken = template and template.replace(TURNS, TURNS + "{% endfor %}")
    assert talk(broken, [user()]).call_format.name == "hermes"


def test_special_tokens_that_the_vocabulary_lacks_are_written_as_text() -> None:
    made = tokenizer(TEMPLATES["mistral"])
    found = Conversation.of([user()], TOOLS, None, None, tokenizer=made).call_format
    assert not found.marks
    assert not found.form.token


def test_instructions_teach_the_format_that_was_set() -> None:
    for name in NAMES:
        turns = [user(), calling(("a", "time", "{}")), returned("a", "1")]
        found = talk("{{ messages }}", turns, tool_format=name)
        system, _, called, _ = found.messages
        assert found.call_format.write([("NAME", "{...}")]) in system["content"]
        assert called["content"] == found.call_format.write([("time", "{}")])


TWO = [
    user(),
    calling(("a", "time", "{}"), ("b", "time", "{}")),
    returned("a", "1"),
    returned("b", "2"),
]


def test_where_a_template_takes_one_call_there_is_one() -> None:
    assert TemplateStyle.of(tokenizer(LLAMA)).one_call
    with pytest.raises(ApiError) as info:
        talk(LLAMA, TWO)
    assert (info.value.status, info.value.param) == (400, "messages.1.tool_calls.1")
    assert "takes one call in a turn" in info.value.message
    assert talk(TEMPLATES["mistral"], TWO).may_call
    call = '{"name": "time", "parameters": {}}'
    for parallel in (None, True, False):
        found = talk(LLAMA, [user()], parallel=parallel, choice="required").constraint(None)
        assert found is not None
        assert allows(found.guide(), call)
        assert not allows(found.guide(), f"{call}; {call}")


def test_templates_that_want_short_ids_get_them() -> None:
    turns = [
        *(user(), calling(("call_a", "time", "{}"), ("000000000", "time", "{}"))),
        *(returned("000000000", "2"), returned("call_a", "1")),
    ]
    found = talk(TEMPLATES["mistral"], turns)
    calls = found.messages[1]["tool_calls"]
    assert [one["id"] for one in calls] == ["000000001", "000000000"]
    assert [one["tool_call_id"] for one in found.messages[2:]] == ["000000001", "000000000"]
    assert tokenizer(TEMPLATES["mistral"]).apply_chat_template(found.messages, tokenize=False)
    kept = talk(HERMES, turns).messages[1]["tool_calls"]
    assert [one["id"] for one in kept] == ["call_a", "000000000"]


@by_format
def test_a_template_that_loses_all_calls_but_the_first_takes_one(name: CallFormName) -> None:
    loses = TEMPLATES[name]
    for calls in ("m.tool_calls or []", "m.tool_calls"):
        loses = loses.replace(f"in {calls} %}}", f"in ({calls})[:1] %}}")
    style = TemplateStyle.of(tokenizer(loses))
    assert (style.shown.name, style.one_call) == (name, True)
    with pytest.raises(ApiError, match="takes one call in a turn"):
        talk(loses, TWO)
    assert TemplateStyle.of(tokenizer(TEMPLATES[name])).one_call == (name == "llama")


def told(found: Conversation, template: Any) -> str:
    """The prompt."""
    made = tokenizer(template)
    text: str = made.apply_chat_template(
        found.messages, tools=found.tools_for_template, tokenize=False
    )
    return text


HISTORY = [user(), calling(("a", "time", "{}")), returned("a", "noon"), user("thanks")]


def test_a_chat_without_tools_is_for_its_own_template() -> None:
    both = {"default": TURNS + "{% endfor %}", "tool_use": LLAMA}
    found = talk(both, HISTORY, None)
    call = '{"name": "time", "parameters": {}}'
    assert told(found, both) == (
        f"<user>hi<assistant>{call}<user><tool_response>\nnoon\n</tool_response><user>thanks"
    )
    assert told(talk(both, HISTORY), both).endswith(
        f"<user>hi<assistant>{call}<tool>noon<user>thanks"
    )
    # With tools as text, the template gets none, and so it is the one for chats without.
    both = {"default": GEMMA, "tool_use": XML}
    assert "<system>" not in told(talk(both, HISTORY), both)


def test_a_tokenizer_without_a_template_for_plain_chats_is_no_error_of_ours() -> None:
    only = {"rag": HERMES}
    assert talk(only, [user()], None).messages == [user()]
    assert talk(only, [user()]).tools_for_template is None


@pytest.mark.parametrize("template", [LISTED + TURNS + "{% endfor %}", XML], ids=["none", "xml"])
def test_a_template_whose_calls_are_of_no_known_form_is_told_in_text(template: str) -> None:
    """What is enforced is what the model was told."""
    found = talk(template, HISTORY)
    text = told(found, template)
    call = FORMATS["hermes"].write([("time", "{}")])
    assert found.call_format.name == "hermes"
    assert text.startswith("<system># Tools")
    assert FORMATS["hermes"].write([("NAME", "{...}")]) in text
    assert f"<assistant>{call}<user><tool_response>" in text
    assert "<function=" not in text
    served = ServedFormat.of(tokenizer(template), "auto")
    assert served.name == "hermes"
    assert "--tool-format" in served.note
    # Without tools nothing is enforced, and the template knows best.
    plain = told(talk(template, HISTORY, None), template)
    assert ("<function=time>{}</function>" in plain) == (template == XML)
    assert (call in plain) == (template != XML)


@pytest.mark.parametrize("set_to", NAMES)
def test_a_format_that_is_set_rules_the_prompt_as_well(set_to: CallFormName) -> None:
    for name, template in TEMPLATES.items():
        found = talk(template, HISTORY, tool_format=set_to)
        text = told(found, template)
        call = found.call_format.write([("time", "{}")])
        assert found.call_format.name == set_to
        assert call in text.replace(', "id": "000000000"', "")
        assert ("# Tools" in text) == (name != set_to)
        assert bool(ServedFormat.of(tokenizer(template), set_to).note) == (name != set_to)
    assert talk(LLAMA, TWO, tool_format="hermes").parallel


def test_templates_with_ids_of_calls_get_them() -> None:
    found = talk(ARGS_IDS, [user()])
    assert found.call_format.name == "mistral_args"
    assert found.call_format.write([("time", "{}")]) == CALL_ID.replace("]f[", "]time[")
    plain = talk(ARGS, [user()]).call_format.form.head
    assert "[CALL_ID]" not in plain
    for choice in ("auto", "required", NAMED):
        guide = talk(ARGS_IDS, [user()], choice=choice).constraint(None)
        assert guide is not None
        call = (257, "time[CALL_ID]000000000", 258, "{}")
        assert allows(guide.guide(), *call)
        assert not allows(guide.guide(), 257, "time", 258, "{}")
    answer = ReadAnswer.read(CALL_ID + CALL_ID, found.call_format)
    assert said(answer) == ("", [("f", "{}", True)] * 2)
    assert len({one.id for one in answer.calls}) == 2


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([user()], "<user>hi"),
        ([SYSTEM, user()], "<user>Be brief.\n\nhi"),
        ([SYSTEM | {"role": "developer"}, user(), user("x")], "<user>Be brief.\n\nhi\n\nx"),
        (
            [user(), {"role": "assistant", "content": "a"}, SYSTEM, user("x")],
            "<user>hi<assistant>a<user>Be brief.\n\nx",
        ),
        ([SYSTEM], "<user>Be brief."),
        (
            HISTORY,
            f"<user>hi<assistant>{FORMATS['hermes'].write([('time', '{}')])}"
            "<user><tool_response>\nnoon\n</tool_response>\n\nthanks",
        ),
    ],
)
def test_a_template_without_a_place_for_the_system_gets_it_from_the_user(
    messages: Any, prompt: str
) -> None:
    assert told(talk(GEMMA, messages, None), GEMMA) == prompt
    with_tools = told(talk(GEMMA, messages), GEMMA)
    assert with_tools.startswith("<user>")
    assert "# Tools" in with_tools.split("<assistant>")[0]


def test_others_get_their_messages_as_they_are() -> None:
    style = TemplateStyle.of(tokenizer(GEMMA))
    assert (style.refuses_system, style.alternates) == (True, True)
    drops = TURNS.replace("{{", "{% if m.role != 'system' %}{{").replace("}}", "}}{% endif %}")
    assert TemplateStyle.of(tokenizer(drops + "{% endfor %}")).refuses_system
    turns = [SYSTEM, user(), user("x")]
    assert talk(TURNS + "{% endfor %}", turns, None).messages == turns


def test_tools_of_harmony_are_refused() -> None:
    for choice in (None, "none", "required"):
        with pytest.raises(ApiError) as info:
            talk(HARMONY, [user()], choice=choice)
        assert (info.value.status, info.value.param) == (400, "tools")
        assert "harmony" in info.value.message
    assert ServedFormat.of(tokenizer(HARMONY), "auto").name is None
    assert talk(HARMONY, [user()], None).tools_for_template is None
    assert talk(HARMONY, [user()], tool_format="hermes").call_format.name == "hermes"


# What is enforced -------------------------------------------------------------------------------

COMPILER = GrammarCompiler(
    TokenizerInfo.from_vocabulary(
        [*byte_vocabulary(256), *[b""] * len(SPECIAL)], [256], special_tokens=SPECIAL
    ),
    cache_limit_bytes=10**8,
    isolation="none",
)


def allows(guide: Guide, *parts: str | int) -> bool:
    """Whether a text is accepted, of which some tokens are given by number."""
    matcher = COMPILER.compile(guide).matcher()
    tokens = [[part] if isinstance(part, int) else part.encode() for part in parts]
    return all(matcher.accept_token(token) for token in [*itertools.chain(*tokens), 256])


def written(name: CallFormName, *calls: tuple[str, str]) -> list[str | int]:
    """Calls with the special tokens in their places."""
    text = FORMATS[name].write(calls)
    for token, special in SPECIAL.items():
        text = text.replace(special, f"\0{token}\0")
    parts = text.split("\0")
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def guide(name: CallFormName, choice: Any, parallel: bool = True, tools: Any = TOOLS) -> Guide:
    found = tools_constraint(tools, choice, parallel, call_format=FORMATS[name])
    assert found is not None
    return found.guide()


RAIN, NOON, WRONG = ("weather", '{"city": "x"}'), ("time", "{}"), ("weather", '{"town": "x"}')


@by_format
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_are_enforced(name: CallFormName, parallel: bool) -> None:
    for choice in ("auto", "required"):
        found = guide(name, choice, parallel)
        assert allows(found, *written(name, RAIN))
        assert allows(found, *written(name, RAIN, NOON)) == parallel
        assert not allows(found, *written(name, WRONG))
        assert allows(found, "hi") == (choice == "auto")
        assert allows(found, "hi ", *written(name, NOON)) == (choice == "auto")
    # What is no call of a function that there is, Llama writes as text.
    unknown = written(name, ("nothing", "{}"))
    assert allows(guide(name, "auto"), *unknown) == (name == "llama")
    assert not allows(guide(name, "required"), *unknown)
    found = guide(name, NAMED, parallel)
    assert allows(found, *written(name, NOON))
    assert not allows(found, *written(name, RAIN))
    assert not allows(found, *written(name, NOON, NOON))


@pytest.mark.parametrize("name", ["mistral", "mistral_args"])
def test_an_answer_of_calls_begins_with_the_special_token(name: CallFormName) -> None:
    spelled = FORMATS[name].write([NOON])
    for choice, is_free in (("auto", True), ("required", False), (NAMED, False)):
        assert allows(guide(name, choice), *written(name, NOON))
        assert allows(guide(name, choice), spelled) == is_free
    # However it is spelled, it begins a call.
    assert not allows(guide(name, "auto"), "[TOOL_CALLS]")
    assert not allows(guide(name, "auto"), 257, "hi")


def test_json_with_a_name_is_no_call_of_llama() -> None:
    found = guide("llama", "auto")
    for text in (
        '{"name": "Ann", "parameters": 3}',
        '{"name": "weather", "x": 1}',
        '{"title": "x"}',
    ):
        assert allows(found, text)
    assert not allows(found, 259, "print(1)")


def test_calls_that_are_not_allowed_are_text() -> None:
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    found = talk(LLAMA, [user()], choice=only).call_format
    text = '{"name": "weather", "parameters": {}}'
    assert not ReadAnswer.read(text, found).calls
    assert ReadAnswer.read(text.replace("weather", "time"), found).calls


def test_calls_as_llama_writes_them() -> None:
    found = guide("llama", "auto")
    for head in ('{"name": ', '{"type": "function", "name": '):
        for mark in ([], [259]):
            assert allows(found, *mark, head + '"time", "parameters": {}}')
            assert not allows(found, *mark, head + '"time", "parameters": {"a": 1}}')
            text = "<|python_tag|>" * len(mark) + head + '"time", "parameters": {}}'
            assert read(text, "llama") == ("", [("time", "{}", True)])


@by_format
def test_what_is_checked_at_the_end_of_a_call_is_checked_behind_special_tokens(
    name: CallFormName,
) -> None:
    """The gate, which reads what the engine enforces only in part, sees where arguments begin."""
    thirds = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 3}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": thirds}}]
    for choice in ("auto", "required"):
        found = guide(name, choice, tools=tools)
        assert not COMPILER.compile(found).exact
        assert allows(found, *written(name, ("f", '{"n": 3}'), ("f", '{"n": 6}')))
        assert not allows(found, *written(name, ("f", '{"n": 4}')))
        assert not allows(found, *written(name, ("f", '{"n": 3}'), ("f", '{"n": 4}')))


@by_format
def test_calls_beside_a_constraint_of_the_clients(name: CallFormName) -> None:
    def beside(own: Guide) -> Guide:
        constraint = Constraint("response_format", lambda: own)
        found = tools_constraint(TOOLS, "auto", None, constraint, call_format=FORMATS[name])
        assert found is not None
        return found.guide()

    found = beside(Guide.choice(["yes", "no"]))
    assert allows(found, "yes")
    assert allows(found, *written(name, NOON))
    assert not allows(found, "yes ", *written(name, NOON))
    if name in ("hermes", "mistral"):
        assert allows(beside(Guide.json()), '{"a": 1}')
        assert allows(beside(Guide.json()), *written(name, NOON))
        return
    with pytest.raises(ApiError) as info:
        beside(Guide.json())
    assert (info.value.status, info.value.param) == (400, "response_format")
    assert "set tool_choice to 'none' or 'required'" in info.value.message


@by_format
def test_strict_closes_objects(name: CallFormName) -> None:
    more = ("weather", '{"city": "x", "more": 1}')
    loose = json.loads(json.dumps(TOOLS))
    del loose[0]["function"]["strict"]
    assert not allows(guide(name, "required"), *written(name, more))
    assert allows(guide(name, "required", tools=loose), *written(name, more))


# Through the server -----------------------------------------------------------------------------

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
CITIES = [
    {"type": "function", "function": {"name": name, "parameters": CITY, "strict": True}}
    for name in ("weather", "time")
]
FormatServed = tuple[CallFormName, Served]
MARKS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")


@pytest.fixture(scope="module")
def marked() -> Iterator[Served]:
    """A server of a tiny model whose tokenizer has the special tokens of all formats."""
    config = text_config()
    made = tokenizer(HERMES, *MARKS)
    with (
        Engine(
            Llama(config),
            random_params(config),
            made,
            cache=CacheSpec(sinks=4, window=60).with_drafts(),
            slots=4,
            stop_token_ids=(STOP,),
            verify="always",
        ) as engine,
        serving(engine, LIMITS) as running,
    ):
        yield running


@pytest.fixture(params=NAMES)
def formatted(
    request: pytest.FixtureRequest, marked: Served, monkeypatch: pytest.MonkeyPatch
) -> FormatServed:
    """The same server, its model with the chat template of each format."""
    name: CallFormName = request.param
    monkeypatch.setattr(marked.engine.tokenizer, "chat_template", TEMPLATES[name])
    return name, marked


def streamed(served: Served, **fields: Any) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls and finish reason of a stream."""
    content, calls, reason = "", [], ""
    for chunk in served.chat(stream=True, **fields):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                calls.append(["", ""])
            calls[call.index][0] += call.function.name or ""
            calls[call.index][1] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return content, [(call[0], call[1]) for call in calls], reason


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "time"}}], ids=["any", "named"]
)
def test_a_server_holds_its_model_to_calls(formatted: FormatServed, choice: Any) -> None:
    name, served = formatted
    for seed in range(3):
        fields = {"tools": CITIES, "tool_choice": choice, "max_tokens": 300, "seed": seed}
        fields |= {"parallel_tool_calls": False}
        (answer,) = served.chat(**fields).choices
        (call,) = answer.message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        assert call.function.name in (["time"] if isinstance(choice, dict) else ["weather", "time"])
        assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
        is_short = name.startswith("mistral")
        assert (len(call.id) == 9) == is_short
        told = [(call.function.name, call.function.arguments)]
        assert streamed(served, **fields) == ("", told, "tool_calls")
        # The call and its result are in the conversation that goes on.
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        turns = [user(), answer.message.model_dump(exclude_none=True), result]
        again = served.chat(messages=turns, tools=CITIES, tool_choice="none", max_tokens=4)
        assert again.choices[0].finish_reason == "length"


def test_a_model_that_begins_a_call_goes_on_with_it(formatted: FormatServed) -> None:
    """With ``auto``: which token begins it, the random model does not know by itself."""
    name, served = formatted
    fields: dict[str, Any] = {"tools": CITIES, "max_tokens": 300, "parallel_tool_calls": False}
    if name != "hermes":  # whose tag is many tokens here
        first = "<|python_tag|>" if name == "llama" else "[TOOL_CALLS]"
        (token,) = served.engine.tokenizer.encode(first)
        fields |= {"logit_bias": {str(token): 100}, "temperature": 0}
        (answer,) = served.chat(**fields).choices
        (call,) = answer.message.tool_calls
        assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
        told = [(call.function.name, call.function.arguments)]
        assert streamed(served, **fields) == ("", told, "tool_calls")
    # Whatever it does when it is free, a stream tells the same.
    free = {"tools": CITIES, "max_tokens": 30, "temperature": 0}
    (answer,) = served.chat(**free).choices
    calls = [(one.function.name, one.function.arguments) for one in answer.message.tool_calls or ()]
    whole = (answer.message.content or "", calls, answer.finish_reason)
    assert streamed(served, **free) == whole


def test_a_call_is_written_with_its_special_token(formatted: FormatServed) -> None:
    name, served = formatted
    chunks = served.chat(
        tools=CITIES,
        tool_choice="required",
        max_tokens=300,
        stream=True,
        extra_body={"trace": True},
    )
    traces = [token for chunk in chunks for token in getattr(chunk, "gkv", {}).get("trace", ())]
    first = traces[0]["text"]
    assert first == {"hermes": "<", "llama": "{"}.get(name, "[TOOL_CALLS]")


def test_the_responses_api_reads_the_same_calls(formatted: FormatServed) -> None:
    _, served = formatted
    tools = [{"type": "function", **tool["function"]} for tool in CITIES]
    fields: dict[str, Any] = {
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    fields |= {"model": MODEL, "input": "hi", "max_output_tokens": 300, "extra_body": {"seed": 1}}
    answer = served.client.responses.create(**fields)
    (call,) = answer.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    *_, last = served.client.responses.create(stream=True, **fields)
    assert answer.parallel_tool_calls is last.response.parallel_tool_calls is False
    (again,) = last.response.output
    assert (again.name, again.arguments) == (call.name, call.arguments)
    turns = [
        {"role": "user", "content": "hi"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    fields |= {"input": turns, "tool_choice": "none", "max_output_tokens": 4}
    assert served.client.responses.create(**fields).status == "incomplete"


def test_what_a_template_does_not_take_is_told_with_its_field(
    marked: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marked.engine.tokenizer, "chat_template", LLAMA)
    with pytest.raises(openai.BadRequestError) as info:
        marked.chat(messages=TWO, tools=TOOLS)
    assert info.value.param == "messages.1.tool_calls.1"
    items: list[Any] = [{"role": "user", "content": "hi"}]
    for call_id in "ab":
        items.append(
            {"type": "function_call", "call_id": call_id, "name": "time", "arguments": "{}"}
        )
    items += [{"type": "function_call_output", "call_id": one, "output": "1"} for one in "ab"]
    with pytest.raises(openai.BadRequestError) as info:
        marked.client.responses.create(model=MODEL, input=items)
    assert info.value.param == "input.2"
    monkeypatch.setattr(marked.engine.tokenizer, "chat_template", HARMONY)
    with pytest.raises(openai.BadRequestError) as info:
        marked.chat(tools=TOOLS)
    assert info.value.param == "tools"


def test_where_a_template_takes_one_call_the_answer_says_so(
    marked: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in CITIES]
    fields: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 1}
    for template, several in ((HERMES, True), (LLAMA, False)):
        monkeypatch.setattr(marked.engine.tokenizer, "chat_template", template)
        answer = marked.client.responses.create(tools=tools, **fields)
        assert answer.parallel_tool_calls is several
        assert marked.client.responses.create(**fields).parallel_tool_calls


def test_a_server_can_be_told_the_format(marked: Served, caplog: pytest.LogCaptureFixture) -> None:
    with serving(marked.engine, LIMITS, chat=Chat(tool_format="mistral_args")) as served:
        (model,) = served.client.models.list()
        assert model.model_extra["gkv"]["tool_format"] == "mistral_args"
        assert "tools are described in a message" in caplog.text
        chunks = served.chat(
            tools=CITIES, tool_choice="required", stream=True, extra_body={"trace": True}
        )
        traces = [one for chunk in chunks for one in getattr(chunk, "gkv", {}).get("trace", ())]
    texts = [one["text"] for one in traces]
    assert texts[0] == "[TOOL_CALLS]"
    assert "".join(texts[1:5]) in ("weat", "time")
    chat = load_settings(None, {"model": "m", "chat": {"tool_format": "llama"}}).chat
    assert chat.tool_format == "llama"
    with pytest.raises(UserError, match=r"chat\.tool_format is 'gpt'; choose from"):
        Chat(tool_format="gpt")  # type: ignore[arg-type]
