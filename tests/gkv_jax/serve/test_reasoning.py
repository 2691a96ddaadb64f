"""Models that think: their templates, where the reasoning ends, and that what follows obeys."""

import dataclasses
import http.client
import itertools
import json
import types
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from gkv_jax.errors import UserError
from gkv_jax.prompts import PromptReader
from gkv_jax.request import Piece, Result, TokenLogprobs
from gkv_jax.serve.app import create_app
from gkv_jax.serve.chats import ChatReader, Reading
from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.chat import Message
from gkv_jax.serve.protocol.formats import Constraint
from gkv_jax.serve.protocol.responses import ResponsesRequest
from gkv_jax.serve.reasoning import Phase, ReasoningReader, Tags
from gkv_jax.serve.replies.chat import ChatReply
from gkv_jax.serve.replies.logprobs import TokenTexts
from gkv_jax.serve.replies.parts import AnswerParts
from gkv_jax.serve.replies.responses import Output, ResponsesReply
from gkv_jax.serve.settings import Chat, load_settings
from gkv_jax.text import TextStream
from grammar_host import Guide, TokenizerInfo
from tests.gkv_jax.serve.conftest import LIMITS, MODEL, Served, serving
from tests.gkv_jax.serve.test_chat import SCHEMA, schema_format
from tests.gkv_jax.tiny import STOP, byte_tokenizer

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
REPLY = "{% if add_generation_prompt %}<model>"
# Each says in its own way whether the model is to think.
OPTIONAL = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% endfor %}" + REPLY + "{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ALWAYS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    + REPLY
    + "<think>\n{% endif %}"
)
SWITCHED = TURNS + REPLY + "{{ '<think>' if thinking else '</think>' }}{% endif %}"
EFFORT = TURNS + "({{ reasoning_effort or 'medium' }})" + REPLY + "{% endif %}"
TAGS = Tags("<think>", "</think>")


def tokenizer(template: str | None) -> Any:
    made = byte_tokenizer()
    made.chat_template = template
    return made


# Templates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "values", "phase"),
    [
        (OPTIONAL, {}, "possible"),
        (OPTIONAL, {"enable_thinking": True}, "possible"),
        (OPTIONAL, {"enable_thinking": False}, "none"),
        (ALWAYS, {}, "begun"),
        (SWITCHED, {}, "none"),
        (SWITCHED, {"thinking": True}, "begun"),
    ],
)
def test_the_prompt_says_where_the_answer_begins(
    served: Served, template: str, values: dict[str, Any], phase: Phase
) -> None:
    made = tokenizer(template)
    chats = ChatReader(made, Chat())
    assert chats.tags == TAGS
    reader = PromptReader(made, served.engine.model, served.engine.spec)
    messages = [{"role": "user", "content": "<think>?"}]
    variables = chats.variables(values)
    prompt = reader.encode(messages, tools=None, template=variables, answer=True)
    assert chats.reading(prompt).phase == phase


@pytest.mark.parametrize(
    ("template", "setting", "tags"),
    [
        (TURNS, "auto", None),
        (None, "auto", None),
        (ALWAYS, "off", None),
        (TURNS + REPLY + "<think>{% endif %}", "auto", TAGS),
        (TURNS, "<think> </think>", TAGS),
        (TURNS, "[A] [B]", Tags("[A]", "[B]")),
    ],
)
def test_tags(template: str | None, setting: str, tags: Tags | None) -> None:
    made = tokenizer(template)
    assert Tags.of(setting, made) == tags
    assert ChatReader(made, Chat(setting)).reading([65]).tags == tags


@pytest.mark.parametrize("setting", ["<think>", "a b c", "a a", "on", " "])
def test_settings_that_are_no_tags(setting: str) -> None:
    with pytest.raises(UserError, match=r"chat.reasoning is .* write 'auto', 'off', or the two"):
        Chat(setting)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("a\0 b", "NUL"),
        ("a b\0", "NUL"),
        (f"a {'b' * 257}", "1 to 256 characters"),
        (f"{'a' * 257} b", "1 to 256 characters"),
        ("\ud800 b", "surrogate"),
    ],
)
def test_tags_that_no_guide_can_be_behind(setting: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"^chat.reasoning is .*{reason}.*; name other tags"):
        Chat(setting)


def test_tags_that_the_model_cannot_write(served: Served) -> None:
    info = TokenizerInfo.from_vocabulary([b"a", b"b", b"x"], [2])
    Tags("a", "ab").check(info)
    for tags in (Tags("a", "x"), Tags("bx", "b"), Tags("a", "é")):
        with pytest.raises(UserError, match=r"^chat.reasoning: .* cannot be written .*or write 'o"):
            tags.check(info)
    stop = served.engine.tokenizer.convert_ids_to_tokens(STOP)
    for setting in (f"<think> {stop}", f"{stop} </think>"):
        with pytest.raises(UserError, match=r"^chat.reasoning: .* cannot be written"):
            create_app(served.engine, model=MODEL, limits=LIMITS, chat=Chat(setting))


def test_the_settings_are_read(tmp_path: Any) -> None:
    path = tmp_path / "server.toml"
    text = 'model = "a"\n[chat]\nreasoning = "off"\n[chat.template_kwargs]\nenable_thinking = false'
    path.write_text(text, encoding="utf-8")
    assert load_settings(path, {}).chat == Chat("off", {"enable_thinking": False})
    flags = {"chat": {"reasoning": "<a> </a>"}}
    assert load_settings(path, flags).chat == Chat("<a> </a>", {"enable_thinking": False})
    with pytest.raises(UserError, match=r"chat.template_kwargs is 3"):
        load_settings(None, {"model": "a", "chat": {"template_kwargs": 3}})


def test_what_the_server_sets_must_be_read() -> None:
    with pytest.raises(UserError, match=r"chat\.template_kwargs\.thinking is not read .* reads: e"):
        ChatReader(tokenizer(OPTIONAL), Chat(template_kwargs={"thinking": True}))
    with pytest.raises(UserError, match="it reads: none"):
        ChatReader(tokenizer(None), Chat(template_kwargs={"thinking": True}))
    with pytest.raises(UserError, match=r"tools is set by the server"):
        ChatReader(tokenizer(OPTIONAL), Chat(template_kwargs={"tools": []}))


def test_a_request_overrides_the_server() -> None:
    chats = ChatReader(tokenizer(OPTIONAL), Chat(template_kwargs={"enable_thinking": False}))
    assert chats.variables(None) == {"enable_thinking": False}
    assert chats.variables({"enable_thinking": 1}) == {"enable_thinking": 1}
    assert chats.variables({}, "low") == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("template", "effort", "values"),
    [
        (OPTIONAL, "none", {"enable_thinking": False}),
        (OPTIONAL, "high", {"enable_thinking": True}),
        (SWITCHED, "minimal", {"thinking": True}),
        (EFFORT, "high", {"reasoning_effort": "high"}),
        (TURNS, "none", {}),  # which such a model does anyway
        (TURNS, "low", None),
        (ALWAYS, "none", None),
    ],
)
def test_effort(template: str, effort: str, values: dict[str, Any] | None) -> None:
    chats = ChatReader(tokenizer(template), Chat())
    if values is not None:
        assert chats.variables(None, effort) == values
        return
    with pytest.raises(ApiError, match="reads neither reasoning_effort nor enable_thinking") as bad:
        chats.variables(None, effort, effort_field="reasoning.effort")
    assert (bad.value.param, bad.value.code) == ("reasoning.effort", "unsupported_parameter")


@pytest.mark.parametrize(
    ("values", "param", "reason"),
    [
        ({"tokenize": False}, "chat_template_kwargs.tokenize", "set by the server"),
        ({"messages": []}, "chat_template_kwargs.messages", "set by the server"),
        (
            {"add_generation_prompt": 1},
            "chat_template_kwargs.add_generation_prompt",
            "by the server",
        ),
        ({"eos_token": "a"}, "chat_template_kwargs.eos_token", "set by the server"),
        ({"Enable": 1}, "chat_template_kwargs.Enable", "it reads: enable_thinking"),
        ({"enable_thinking": ["a\0"]}, "chat_template_kwargs.enable_thinking", "NUL"),
        (
            {"enable_thinking": [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]},
            "chat_template_kwargs.enable_thinking",
            "levels",
        ),
        ({"enable_thinking": {"\ud800": 1}}, "chat_template_kwargs.enable_thinking", "surrogate"),
    ],
)
def test_variables_that_are_refused(values: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as refused:
        ChatReader(tokenizer(OPTIONAL), Chat()).variables(values)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_scalars_are_all_alike_at_the_last_level() -> None:
    chats = ChatReader(tokenizer(OPTIONAL), Chat())
    for scalar in ("a", 1, 0.5, True, None):
        value: Any = scalar
        for _ in range(16):
            value = [value]
        assert chats.variables({"enable_thinking": value}) == {"enable_thinking": value}
        for deeper in ([value], {"a": value}):
            with pytest.raises(ApiError, match="levels"):
                chats.variables({"enable_thinking": deeper})


@pytest.mark.parametrize(
    "expression",
    [
        "{{ range(n) | list }}",  # OverflowError of the sandbox
        "{{ 1 // (n - n) }}",
        "{{ '{0} {1}'.format(n) }}",  # IndexError
        "{{ 'a' * (n * n * n) }}",  # MemoryError, OverflowError
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(n) }}",  # RecursionError
        "{{ n + 'a' }}",
        "{{ n.a.b }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_runs_into_a_value(served: Served, expression: str) -> None:
    made = tokenizer(TURNS + expression)
    reader = PromptReader(made, served.engine.model, served.engine.spec)
    with pytest.raises(
        UserError, match=r"^prompt: the chat template refuses the messages or n \(.+\)"
    ):
        reader.encode(
            [{"role": "user", "content": "a"}], tools=None, template={"n": 10**7}, answer=True
        )


def test_variables_are_for_chats(served: Served) -> None:
    with pytest.raises(UserError, match="template is given, but prompt is no chat"):
        served.engine.encode("a", template={"enable_thinking": True})


def test_effort_and_variables_may_not_contradict_each_other() -> None:
    chats = ChatReader(tokenizer(OPTIONAL), Chat())
    assert chats.variables({"enable_thinking": False}, "none") == {"enable_thinking": False}
    with pytest.raises(ApiError, match="contradict"):
        chats.variables({"enable_thinking": False}, "low")


@pytest.mark.parametrize(
    ("template", "setting", "left_out"),
    [
        (OPTIONAL, "off", False),
        (OPTIONAL, "auto", False),
        (ALWAYS, "auto", True),
        (TURNS, "auto", None),
    ],
)
def test_reasoning_of_earlier_turns(template: str, setting: str, left_out: bool | None) -> None:
    chats = ChatReader(tokenizer(template), Chat(setting))
    turn = {"role": "assistant", "content": "b", "reasoning_content": "c"}
    messages = [{"role": "user", "content": "a"}, turn]
    if left_out is None:
        with pytest.raises(ApiError, match="leave it out, or write it into the content") as bad:
            chats.conversation(messages, None, None, None)
        assert bad.value.param == "messages.1.reasoning_content"
        return
    talk, told = chats.conversation(messages, None, None, None)
    assert told == left_out
    assert talk.messages[1].get("reasoning_content") == (None if left_out else "c")
    assert turn["reasoning_content"] == "c"


# Answers ------------------------------------------------------------------------------------------

FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<thi",
            "</th",
            "think>",
            "<",
            " ",
            "\n\n",
            "\t",
            "\r",
            "\u00a0",  # blanks of Unicode, and none of the grammar's
            "\u3000",
            "\x0c",
            "a",
            "é",
            "\ud800",
            "{}",
        ]
    ),
    max_size=8,
).map("".join)
PLACES = st.lists(st.integers(0, 60), max_size=6)
PHASES: Any = st.sampled_from(["none", "possible", "begun"])


def expected(
    text: str,
    phase: Phase,
    tags: tuple[str, str] = ("<think>", "</think>"),
    *,
    keeps_blanks: bool = False,
) -> tuple[str, str | None]:
    """Reasoning and answer, None for the latter where the reasoning does not end."""
    start, end = tags
    blanks = " \t\n\r"
    begins = text.lstrip(blanks).startswith(start)
    if phase == "none" or (phase == "possible" and not begins):
        return "", text
    if begins:
        text = text.lstrip(blanks)[len(start) :]
    reasoning, found, answer = text.partition(end)
    if not found:
        return reasoning.strip(blanks), None
    return reasoning.strip(blanks), answer if keeps_blanks else answer.lstrip(blanks)


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(ends)]


@settings(deadline=None, max_examples=400)
@given(text=FRAGMENTS, places=PLACES, phase=PHASES)
def test_where_a_text_is_cut_makes_no_difference(
    text: str, places: list[int], phase: Phase
) -> None:
    text = text.replace("\ud800", "")
    reader = ReasoningReader(TAGS, phase)
    told = [*map(reader.push, cut(text, places)), reader.finish()]
    reasoning, answer = ("".join(parts) for parts in zip(*told, strict=True))
    assert (reasoning, answer if reader.ended else None) == expected(text, phase)


@settings(deadline=None, max_examples=100)
@given(text=FRAGMENTS, places=PLACES, phase=PHASES)
def test_special_tokens_as_tags(text: str, places: list[int], phase: Phase) -> None:
    """Only the tokens count, not their names; nobody sees what stands for them."""
    tags = Tags("[A]", "\ud800[B]", {300: "\ud800", 301: "\ud801"})
    text = text.replace("<think>", "\ud800").replace("</think>", "\ud801")
    reader = ReasoningReader(tags, phase)
    told = [*map(reader.push, cut(text, places)), reader.finish()]
    reasoning, answer = ("".join(parts) for parts in zip(*told, strict=True))
    wanted, behind = expected(text, phase, ("\ud800", "\ud801"))
    marks = str.maketrans("", "", "\ud800\ud801")
    assert reasoning == wanted.translate(marks)
    if reader.ended:
        assert behind is not None
        assert answer == behind.translate(marks)


def test_marks_in_a_text() -> None:
    made = byte_tokenizer()
    special = made.convert_tokens_to_ids("<user>")
    tags = Tags.of("<user> <model>", made)
    assert tags is not None
    assert set(tags.marks) == {special, made.convert_tokens_to_ids("<model>")}
    stream = TextStream(made, marks=tags.marks)
    tokens = [*made.encode("a"), special, *made.encode("b€")[:-1], special, *made.encode("é")]
    told = "".join(map(stream.push, tokens)) + stream.flush()
    assert told.replace("\ufffd", "?").replace("??", "?") == "a\ud800b?\ud800é"
    assert TextStream(made).push(special) == ""


TEXTS = [
    ("possible", '<think>\nso</think>\n\n{"a": 1}'),
    ("possible", '{"a": 1}'),
    ("begun", "so it is </think>yes"),
    ("begun", "so it is"),
    ("begun", "<thi"),
    ("begun", ""),
    ("begun", "</think>"),
    ("possible", "<think> </think>\n\nyes"),
    ("possible", "<think>so</think>"),
    (
        "possible",
        '<think>a <tool_call></think>x <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    ),
    ("none", "<think>x</think>y"),
]


@dataclasses.dataclass
class Told:
    """An answer of ``ChatReply``, whole or from a stream."""

    reasoning: str
    content: str | None
    calls: list[tuple[str, str]]
    logprobs: list[str]
    finish_reason: str
    reasoning_tokens: int


def result_of(text: str, reason: str = "stop") -> tuple[Result, list[Piece]]:
    """An answer of the byte tokenizer, and the pieces in which an engine would tell it."""
    tokens = byte_tokenizer().encode(text, add_special_tokens=False)
    logprobs = tuple(TokenLogprobs(token, -1.0, ()) for token in tokens)
    stream, pieces = TextStream(byte_tokenizer()), []
    for token, logprob in zip(tokens, logprobs, strict=True):
        pieces.append(Piece(stream.push(token), (token,), (logprob,)))
    stats = {"prompt_tokens": 1, "prefix_tokens": 0, "drafts": {}}
    return Result(text, tuple(tokens), reason, None, logprobs, None, stats), pieces  # type: ignore[arg-type]


def joined(pieces: list[Piece], sizes: list[int]) -> Iterator[Piece]:
    """Several tokens at once, as drafts make them."""
    rest = pieces
    for size in itertools.chain(sizes, itertools.repeat(1)):
        if not rest:
            return
        now, rest = rest[:size], rest[size:]
        yield Piece(
            "".join(piece.text for piece in now),
            tuple(token for piece in now for token in piece.tokens),
            tuple(logprob for piece in now for logprob in piece.logprobs),
        )


SIZES = st.lists(st.integers(1, 12), max_size=30)


@pytest.mark.parametrize(("phase", "text"), TEXTS)
@settings(deadline=None, max_examples=10)
@given(sizes=SIZES, reason=st.sampled_from(["stop", "length"]))
def test_a_stream_says_what_the_whole_says(
    served: Served, phase: Phase, text: str, sizes: list[int], reason: str
) -> None:
    reading = Reading(TAGS, phase, byte_tokenizer())
    result, pieces = result_of(text, reason)

    def reply() -> ChatReply:
        texts = TokenTexts(served.engine)
        return ChatReply(MODEL, "fp", texts, has_tools=True, include_usage=True, reading=reading)

    whole = reply().completion([result])
    streaming = reply()
    events = [
        *(event for piece in joined(pieces, sizes) for event in streaming.piece(0, piece)),
        *streaming.end(0, result),
        *streaming.closing([result]),
    ]
    chunks = [json.loads(event["data"]) for event in events[:-1]]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    (choice,) = whole.choices
    message = choice.message
    wanted, content = expected(text, phase)
    assert (message.reasoning_content or "") == wanted
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == wanted
    assert "".join(delta.get("content", "") for delta in deltas) == (message.content or "")
    if content is None:
        assert message.content is None
    elif not message.tool_calls:
        assert message.content == content
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert len([call for call in calls if "id" in call]) == len(message.tool_calls or ())
    assert chunks[-1]["usage"] == whole.usage.model_dump()
    assert chunks[-2]["choices"][0]["finish_reason"] == choice.finish_reason
    # Those of what follows the reasoning, without the blanks in between.
    told = [entry.token for entry in choice.logprobs.content] if choice.logprobs else []
    assert "".join(told) == (content or "")
    streamed = []
    for chunk in chunks:
        for each in chunk["choices"]:
            if each.get("logprobs"):
                assert "reasoning_content" not in each["delta"]
                streamed += [entry["token"] for entry in each["logprobs"]["content"]]
    assert streamed == told
    counted = whole.usage.completion_tokens_details.reasoning_tokens
    _, tag, behind = text.partition("</think>")
    is_plain = content == text
    assert counted == (0 if is_plain else len(text) - len(behind if tag else ""))
    # Whatever it is, it may be sent back as it is; there is reasoning where there was room for it.
    Message.model_validate(message.model_dump())
    assert (message.reasoning_content is None) == is_plain


@pytest.mark.parametrize(("phase", "text"), TEXTS)
@settings(deadline=None, max_examples=10)
@given(sizes=SIZES, cut_off=st.booleans())
def test_items_of_a_response(phase: Phase, text: str, sizes: list[int], cut_off: bool) -> None:
    reading = Reading(TAGS, phase, byte_tokenizer())
    _, pieces = result_of(text)

    def items(pieces: Iterator[Piece]) -> tuple[list[Any], list[Any]]:
        output = Output(None, may_call=True, reading=reading)  # type: ignore[arg-type]
        told = [event for piece in pieces for event in output.write(piece.text, (), piece.tokens)]
        told += output.finish(cut_off)
        return [item.model_dump(exclude={"id", "call_id"}) for item in output.items], told

    streamed, told = items(joined(pieces, sizes))
    assert streamed == items(joined(pieces, [10_000]))[0]
    reasoning, content = expected(text, phase)
    first = streamed[0]
    if reasoning:
        status = "incomplete" if content is None and cut_off else "completed"
        assert first["content"] == [{"type": "reasoning_text", "text": reasoning}]
        assert (first["type"], first["status"], first["summary"]) == ("reasoning", status, [])
        deltas = [event for event in told if event["type"] == "response.reasoning_text.delta"]
        assert "".join(event["delta"] for event in deltas) == reasoning
        (done,) = (event for event in told if event["type"] == "response.reasoning_text.done")
        assert (done["text"], done["output_index"], done["content_index"]) == (reasoning, 0, 0)
    if content is not None and not cut_off:
        assert streamed[-1]["type"] in ("message", "function_call")
    assert all(item["status"] != "in_progress" for item in streamed)
    if not cut_off and not any(item["type"] == "function_call" for item in streamed):
        assert all(item["status"] == "completed" for item in streamed)


@settings(deadline=None, max_examples=200)
@given(text=FRAGMENTS, sizes=SIZES, phase=PHASES, keeps=st.booleans())
def test_logprobs_are_of_the_tokens_that_write_the_answer(
    text: str, sizes: list[int], phase: Phase, keeps: bool
) -> None:
    made = byte_tokenizer()
    _, pieces = result_of(text.replace("\ud800", ""))
    parts = AnswerParts(Reading(TAGS, phase, made, keeps))
    told = [parts.push(each.text, each.tokens, each.logprobs) for each in joined(pieces, sizes)]
    told.append(parts.finish())
    answer = "".join(part.text for part in told)
    wanted, content = expected(text.replace("\ud800", ""), phase, keeps_blanks=keeps)
    assert answer == (content or "")
    assert made.decode([each.token for part in told for each in part.logprobs]) == answer
    thoughts = [part.reasoning for part in told if part.reasoning is not None]
    assert "".join(thoughts) == wanted
    assert bool(thoughts) == (content != text.replace("\ud800", ""))


@pytest.mark.parametrize("pushed", [True, False])
def test_an_answer_that_only_the_end_tells(served: Served, pushed: bool) -> None:
    """A character that is never whole is no text until then, and no reasoning."""
    made = byte_tokenizer()
    token = made.encode("é")[0]
    logprob = TokenLogprobs(token, -1.0, ())
    reading = Reading(TAGS, "possible", made)
    reply = ChatReply(MODEL, "fp", TokenTexts(served.engine), reading=reading)
    result = dataclasses.replace(
        result_of("")[0], text="\ufffd", tokens=(token,), logprobs=(logprob,)
    )
    if pushed:
        (choice,) = reply.completion([result]).choices
        assert choice.message.content == "\ufffd"
        assert choice.message.reasoning_content is None
        assert choice.logprobs is not None
        assert len(choice.logprobs.content) == 1
        assert reply.completion([result]).usage.completion_tokens_details.reasoning_tokens == 0
        return
    pieces = [Piece("", (token,), (logprob,)), Piece("\ufffd", (), ())]
    events = [event for piece in pieces for event in reply.piece(0, piece)]
    events += reply.end(0, result)
    choices = [json.loads(event["data"])["choices"][0] for event in events]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "\ufffd"
    assert (
        sum(len(choice["logprobs"]["content"]) for choice in choices if "logprobs" in choice) == 1
    )
    assert reply._parts[0].reasoning_tokens == 0


def test_what_rides_on_the_pieces_of_a_stream(served: Served) -> None:
    """A trace on the first chunk of a piece, log-probabilities on the first that is not reasoning."""
    reading = Reading(TAGS, "begun", byte_tokenizer())
    for text, deltas in [
        ("so</think>yes", [{"reasoning_content": "so"}, {"content": "yes"}]),
        ("</think>yes", [{"reasoning_content": ""}, {"content": "yes"}]),
    ]:
        texts = TokenTexts(served.engine)
        reply = ChatReply(MODEL, "fp", texts, reading=reading, positions=[1])
        (piece,) = joined(result_of(text)[1], [100])
        chunks = [json.loads(event["data"]) for event in reply.piece(0, piece)]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["delta"] for choice in choices] == deltas
        assert ["gkv" in chunk for chunk in chunks] == [True, False]
        assert ["logprobs" in choice for choice in choices] == [False, True]
        assert len(choices[1]["logprobs"]["content"]) == 3
    # Where the text comes later, they have a chunk of their own.
    reply = ChatReply(MODEL, "fp", TokenTexts(served.engine), reading=reading, positions=[1])
    (piece,) = joined(result_of("so</think>yes")[1], [100])
    piece = dataclasses.replace(piece, text="so</think>")
    chunks = [json.loads(event["data"]) for event in reply.piece(0, piece)]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"reasoning_content": "so"},
        {"content": ""},
    ]
    assert ["logprobs" in chunk["choices"][0] for chunk in chunks] == [False, True]


def test_the_openai_client_knows_the_events() -> None:
    """Its types take all of them, and put the same response together."""
    from openai.types.responses import ResponseReasoningItem, ResponseStreamEvent

    asked = ResponsesRequest.model_validate({"model": MODEL, "input": "hi"})
    reading = Reading(TAGS, "begun", byte_tokenizer())
    result, pieces = result_of("so</think>yes")
    result = dataclasses.replace(result, logprobs=None)
    reply = ResponsesReply(MODEL, "fp", None, may_call=False, echo=asked.echo(), reading=reading)  # type: ignore[arg-type]
    bare = [dataclasses.replace(piece, logprobs=()) for piece in pieces]
    events = [
        *reply.opening(),
        *(event for piece in bare for event in reply.piece(0, piece)),
        *reply.end(0, result),
        *reply.closing([result]),
    ]
    adapter = pydantic.TypeAdapter[Any](ResponseStreamEvent)
    for index, event in enumerate(events):
        typed = adapter.validate_python(json.loads(event["data"]))
        assert (typed.type, typed.sequence_number) == (event["event"], index)
    response = Response.model_validate(json.loads(events[-1]["data"])["response"])
    thought, _ = response.output
    assert isinstance(thought, ResponseReasoningItem)
    assert thought.content is not None
    assert (thought.content[0].text, response.output_text) == ("so", "yes")
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len("so</think>")


def test_constraints_stand_behind_the_reasoning() -> None:
    constraint = Constraint("response_format", Guide.json)
    assert TAGS.constraint(constraint, "none") is constraint
    assert TAGS.constraint(constraint, "begun").guide() == Guide.json().after_reasoning()
    possible = TAGS.constraint(constraint, "possible").guide()
    assert possible == Guide.json().after_reasoning("</think>", start="<think>")


# The server ---------------------------------------------------------------------------------------

OWN_TAGS = "~ ^"  # which a random model writes soon, if they are made likely
OWN = OPTIONAL.replace("<think>", "~").replace("</think>", "^")
OWN = OWN.replace("{% endif %}{% endif %}", "{% elif enable_thinking %}~{% endif %}{% endif %}")


@pytest.fixture(scope="module")
def thinking(served: Served) -> Iterator[Served]:
    """The engine of ``served`` with a model that thinks, by its template."""
    made = served.engine.tokenizer
    before = made.chat_template
    made.chat_template = OWN
    try:
        with serving(served.engine, LIMITS, chat=Chat(OWN_TAGS)) as running:
            yield running
    finally:
        made.chat_template = before


def likely(served: Served, tokens: dict[str, float]) -> dict[str, float]:
    """A ``logit_bias``."""
    made = served.engine.tokenizer
    return {str(made.encode(text)[0]): bias for text, bias in tokens.items()}


def kwargs(**values: Any) -> dict[str, Any]:
    return {"extra_body": {"chat_template_kwargs": values}}


BOTH = {"~": 30.0, "^": 30.0}


@pytest.mark.parametrize(
    ("more", "bias", "reasons"),
    [
        (kwargs(enable_thinking=True), {"^": 6.0}, True),
        ({"reasoning_effort": "high"}, {"^": 6.0}, True),
        (kwargs(enable_thinking=False), BOTH, False),
        ({"reasoning_effort": "none"}, BOTH, False),
        ({}, BOTH, True),
        ({}, {"~": -100.0}, False),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_content_obeys_whether_the_model_thinks_or_not(
    thinking: Served, more: dict[str, Any], bias: dict[str, float], reasons: bool, seed: int
) -> None:
    fields = {
        "max_tokens": 600,
        "seed": seed,
        "response_format": schema_format(SCHEMA),
        "logit_bias": likely(thinking, bias),
        **more,
    }
    completion = thinking.chat(**fields)
    (choice,) = completion.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    counted = completion.usage.completion_tokens_details.reasoning_tokens
    assert (counted > 0) == reasons
    assert counted < completion.usage.completion_tokens
    if not reasons:
        assert choice.message.reasoning_content is None
    chunks = list(thinking.chat(stream=True, stream_options={"include_usage": True}, **fields))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == (choice.message.reasoning_content or "")
    assert chunks[-1].usage == completion.usage


LITERAL = {"type": "const_string", "value": "{}"}


@pytest.mark.parametrize(
    "guide",
    [
        {"choice": ["{}"]},
        {"regex": "{}"},
        {"structural_tag": {"type": "structural_tag", "format": LITERAL}},
    ],
    ids=lambda guide: next(iter(guide)),
)
@pytest.mark.parametrize("content", ["yes", " yes", "\n\nyes", "\u00a0yes", "\u3000yes", "\x0cyes"])
@pytest.mark.parametrize("bias", [BOTH, {"~": -100.0}], ids=["thinks", "does not"])
def test_blanks_that_are_asked_for_are_kept(
    thinking: Served, guide: dict[str, Any], content: str, bias: dict[str, float]
) -> None:
    written = json.dumps(guide).replace("{}", json.dumps(content)[1:-1])
    completion = thinking.chat(
        max_tokens=300,
        logit_bias=likely(thinking, bias),
        extra_body={"structured_outputs": json.loads(written)},
    )
    assert completion.choices[0].message.content == content


def test_blanks_between_reasoning_and_answer_are_not_those_of_calls() -> None:
    compiled: Any = types.SimpleNamespace(owns_blanks=True)
    reading = Reading(TAGS, "begun", byte_tokenizer())
    assert reading.under(compiled, may_call=False).keeps_blanks
    assert not reading.under(compiled, may_call=True).keeps_blanks
    assert not reading.under(None, may_call=False).keeps_blanks


def test_an_answer_that_ends_while_it_thinks(thinking: Served) -> None:
    completion = thinking.chat(
        max_tokens=5, logit_bias=likely(thinking, {"^": -100}), n=2, reasoning_effort="low"
    )
    for choice in completion.choices:
        assert choice.finish_reason == "length"
        assert choice.message.content is None
        assert choice.message.reasoning_content
    assert completion.usage.completion_tokens_details.reasoning_tokens == 10


def test_special_tokens_around_the_reasoning(served: Served) -> None:
    """They write nothing, and still are found; the prompt ends with the first one."""
    with serving(served.engine, LIMITS, chat=Chat("<model> <user>")) as running:
        fields: dict[str, Any] = {
            "max_tokens": 600,
            "response_format": schema_format(SCHEMA),
            "logit_bias": likely(served, {"<user>": 6.0}),
        }
        completion = running.chat(**fields)
        (choice,) = completion.choices
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        deltas = [chunk.choices[0].delta for chunk in running.chat(stream=True, **fields)]
    counted = completion.usage.completion_tokens_details.reasoning_tokens
    assert 0 < counted < completion.usage.completion_tokens
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    told = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert told == (choice.message.reasoning_content or "")


def test_tools_behind_the_reasoning(thinking: Served) -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    function = {"name": "f", "strict": True, "parameters": parameters}
    completion = thinking.chat(
        max_tokens=900,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
        logit_bias=likely(thinking, {"^": 6.0}),
        reasoning_effort="high",
    )
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "f"
    assert choice.message.content is None
    assert completion.usage.completion_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize(("reasoning", "shown"), [("b", "~b^"), ("", "")])
def test_a_conversation_goes_on(thinking: Served, reasoning: str, shown: str) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "reasoning_content": reasoning},
        {"role": "user", "content": "c"},
    ]
    told = post(thinking, "/tokenize", {"messages": messages, "add_generation_prompt": False})[1]
    text = thinking.engine.tokenizer.decode(told["tokens"])
    assert text == f"<user>a<assistant>{shown}<user>c"


def test_a_turn_without_anything_is_refused() -> None:
    turns: list[dict[str, Any]] = [{}, {"reasoning_content": None}, {"tool_calls": []}]
    for fields in turns:
        with pytest.raises(pydantic.ValidationError, match="content"):
            Message.model_validate({"role": "assistant", "content": None, **fields})
    # Clients leave out what is null.
    assert Message.model_validate({"role": "assistant", "reasoning_content": ""}).content is None


def post(served: Served, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    return ask(served, path, body)[:2]


def ask(served: Served, path: str, body: dict[str, Any]) -> tuple[int, Any, str | None]:
    """Status, body and header ``Warning``."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request(
        "POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    told = json.loads(response.read())
    connection.close()
    return response.status, told, response.getheader("Warning")


def test_tokenize_takes_variables(thinking: Served) -> None:
    messages = [{"role": "user", "content": "a"}]
    texts = []
    for values in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        body = {"messages": messages, "chat_template_kwargs": values}
        status, told = post(thinking, "/tokenize", body)
        assert status == 200
        texts.append(thinking.engine.tokenizer.decode(told["tokens"]))
    assert texts == ["<user>a<model>", "<user>a<model>~", "<user>a<model>~\n\n^\n\n"]
    status, told = post(thinking, "/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}})
    assert (status, told["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"other": 1}}, "chat_template_kwargs.other"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        (
            {"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]},
            "messages.0",
        ),
    ],
)
def test_refusals(thinking: Served, body: dict[str, Any], param: str) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]} | body
    status, told = post(thinking, "/v1/chat/completions", asked)
    assert (status, told["error"]["param"]) == (400, param)


def test_a_response_with_reasoning(thinking: Served) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "input": "hi",
        "max_output_tokens": 600,
        "reasoning": {"effort": "high"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        "extra_body": {"seed": 1, "logit_bias": likely(thinking, {"^": 6.0})},
    }
    response = thinking.client.responses.create(**fields)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    jsonschema.validate(json.loads(response.output_text), SCHEMA)
    assert response.reasoning is not None
    assert response.reasoning.effort == "high"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    # What it said goes back as it is.
    sent = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in response.output)]
    sent.append({"role": "user", "content": "go on"})
    again = thinking.client.responses.create(
        model=MODEL, input=sent, max_output_tokens=3, extra_body={"seed": 1}
    )
    thought = response.output[0].content[0].text  # type: ignore[union-attr, index]
    assert again.usage is not None
    prompt = f"<user>hi<assistant>~{thought}^{response.output_text}<user>go on<model>"
    assert again.usage.input_tokens == len(thinking.engine.tokenizer.encode(prompt))


def test_a_model_that_knows_no_reasoning(served: Served) -> None:
    made = served.engine.tokenizer
    before = made.chat_template
    try:
        made.chat_template = TURNS + REPLY + "{% endif %}"
        with serving(served.engine, LIMITS) as plain:
            turn = {"type": "reasoning", "summary": [], "content": []}
            thought = {"type": "reasoning_text", "text": "a"}
            body = {"model": MODEL, "input": [{"role": "user", "content": "a"}, turn]}
            assert post(plain, "/v1/responses", body | {"max_output_tokens": 1})[0] == 200
            turn["content"] = [thought]
            status, told = post(plain, "/v1/responses", body)
            assert (status, told["error"]["param"]) == (400, "input.1")
            with pytest.raises(openai.BadRequestError, match="reads neither"):
                plain.chat(reasoning_effort="low")
            assert plain.chat(reasoning_effort="none", max_tokens=1).choices
    finally:
        made.chat_template = before


def test_a_warning_tells_what_is_left_out(served: Served) -> None:
    made = served.engine.tokenizer
    before = made.chat_template
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "c"},
        {"role": "user", "content": "d"},
    ]
    empty = [turns[0], turns[1] | {"reasoning_content": ""}, turns[2]]
    try:
        made.chat_template = ALWAYS
        with serving(served.engine, LIMITS) as running:
            for messages, warns in ((turns, True), (empty, False)):
                fields: dict[str, Any] = {"model": MODEL, "messages": messages}
                for path in ("/v1/chat/completions", "/tokenize"):
                    more = {} if path == "/tokenize" else {"max_tokens": 2}
                    status, told, warning = ask(running, path, fields | more)
                    assert status == 200
                    told_so = "reasoning_content is left out" in (warning or "")
                    assert told_so == warns
                    if more:
                        assert told["choices"][0]["message"]["content"] is None
    finally:
        made.chat_template = before
