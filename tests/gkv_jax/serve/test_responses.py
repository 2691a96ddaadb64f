"""The Responses API as OpenAI's own client sends and reads it."""

import http.client
import itertools
import json
from collections.abc import Iterable
from typing import Any, Literal

import openai
import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseStreamEvent

from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.responses import UNSERVED_IN_RESPONSES, ResponsesRequest
from gkv_jax.serve.replies.responses import Output, ResponsesReply
from grammar_host.tools import parse_tool_calls
from tests.gkv_jax.serve.conftest import LIMITS, MODEL, Served, serving, tiny_engine, wait_for

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["km", "mile"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"],
    "additionalProperties": False,
}
ENDLESS = {"type": "string", "minLength": 15_000}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
    },
}
TIME = WEATHER | {"name": "get_time", "description": "The time in a city."}

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def schema_format(schema: Any, name: str = "answer") -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": name, "schema": schema, "strict": True}}


def respond(served: Served, **fields: Any) -> Any:
    """A response; ``fields`` override a small, repeatable request."""
    defaults: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 40}
    extra = {"seed": 1} | fields.pop("extra_body", {})
    return served.client.responses.create(**(defaults | fields), extra_body=extra)


def received(model: Any) -> Any:
    """What the server sent, as JSON."""
    return model.model_dump(mode="json", by_alias=True, exclude_unset=True)


def checked(response: Any) -> Response:
    """The client reads without checking; here all fields must be as its types say."""
    return Response.model_validate(received(response))


def said(output: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Items without their ids."""
    return [
        (item.type, item.status, item.name, item.arguments)
        if item.type == "function_call"
        else (item.type, item.status, item.content[0].text, item.content[0].logprobs)
        for item in output
    ]


# Whole answers ------------------------------------------------------------------------------------


def test_response_has_all_that_the_client_knows(served: Served) -> None:
    response = respond(
        served,
        instructions="Be brief.",
        metadata={"purpose": "test"},
        user="somebody",
        temperature=0.5,
        top_p=0.9,
        store=False,
        truncation="disabled",
        text={"verbosity": "medium"},
        include=["reasoning.encrypted_content"],
    )
    read = checked(response)
    assert read.id.startswith("resp_")
    assert (read.object, read.model, read.error) == ("response", MODEL, None)
    assert (read.instructions, read.metadata) == ("Be brief.", {"purpose": "test"})
    assert (read.temperature, read.top_p, read.user) == (0.5, 0.9, "somebody")
    assert (read.tools, read.tool_choice, read.parallel_tool_calls) == ([], "auto", True)
    assert read.text is not None
    assert read.text.format is not None
    assert read.text.format.type == "text"
    assert (read.max_output_tokens, read.truncation) == (40, "disabled")
    (message,) = read.output
    assert message.type == "message"
    assert message.role == "assistant"
    assert message.id.startswith("msg_")
    (part,) = message.content
    assert part.type == "output_text"
    assert (part.annotations, part.text) == ([], response.output_text)
    assert read.usage is not None
    assert read.usage.input_tokens == len("Be brief.") + len("hi") + len(
        ["<user>", "<model>"]
    ) + len("<system>")
    assert read.usage.total_tokens == read.usage.input_tokens + read.usage.output_tokens
    assert response.gkv["tokens"] == read.usage.output_tokens
    assert response.gkv["backend"] is None


def test_a_limit_makes_it_incomplete(served: Served) -> None:
    cut = checked(respond(served, text=schema_format(ENDLESS), max_output_tokens=5))
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.completed_at is None
    assert [item.status for item in cut.output] == ["incomplete"]
    assert cut.usage is not None
    assert cut.usage.output_tokens == 5
    whole = checked(respond(served, text=schema_format(SCHEMA), max_output_tokens=400))
    assert (whole.status, whole.incomplete_details) == ("completed", None)
    assert [item.status for item in whole.output] == ["completed"]


def test_it_says_what_a_chat_completion_says(served: Served) -> None:
    chat = served.chat(
        messages=[{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    )
    (choice,) = chat.choices
    assert respond(served, instructions="a", input="b").output_text == choice.message.content
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "user", "content": "b"},
    ]
    response = respond(served, input=items)
    assert response.output_text == choice.message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_formats(served: Served) -> None:
    named = checked(respond(served, text=schema_format(SCHEMA), max_output_tokens=400))
    assert list(json.loads(named.output_text)) == ["unit", "exact"]
    assert named.text is not None
    assert named.text.format is not None
    echoed = named.text.format.model_dump(by_alias=True, exclude_unset=True)
    assert echoed == schema_format(SCHEMA)["format"]
    some = respond(served, text={"format": {"type": "json_object"}}, max_output_tokens=5)
    assert some.output_text.lstrip().startswith("{")
    choice = {"structured_outputs": {"choice": ["yes", "no"]}, "backend": "xgrammar"}
    one = respond(served, extra_body=choice)
    assert one.output_text in ("yes", "no")
    assert one.gkv["backend"] == "xgrammar"
    assert respond(served, extra_body={"stop": ["e", "o"], **choice}).output_text in ("y", "n")


class Length(pydantic.BaseModel):
    unit: Literal["km", "mile"]
    exact: bool


def test_parse(served: Served) -> None:
    response = served.client.responses.parse(
        model=MODEL, input="hi", text_format=Length, max_output_tokens=400
    )
    assert isinstance(response.output_parsed, Length)
    again = served.client.responses.parse(
        model=MODEL,
        input=[*response.output, {"role": "user", "content": "again"}],
        text_format=Length,
        max_output_tokens=400,
    )
    assert isinstance(again.output_parsed, Length)


def test_logprobs(served: Served) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "max_output_tokens": 6}
    response = checked(respond(served, top_logprobs=2, **fields))
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert len(part.logprobs) == 6
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
    assert (
        b"".join(bytes(token.bytes) for token in part.logprobs).decode(errors="replace")
        == response.output_text
    )
    streamed = list(respond(served, top_logprobs=2, stream=True, **fields))
    told = [t for e in streamed if e.type == "response.output_text.delta" for t in e.logprobs]
    assert [token.logprob for token in told] == [token.logprob for token in part.logprobs]
    assert said(streamed[-1].response.output)[0][3] == part.logprobs
    # An answer that is sent back keeps them.
    again = [*response.output, {"role": "user", "content": "?"}]
    assert respond(served, input=again).status in ("completed", "incomplete")


# Streams ------------------------------------------------------------------------------------------


def check_events(events: list[Any]) -> Response:
    """The order of the events, their numbers, and that they say what the last one says."""
    for event in events:
        EVENT.validate_python(received(event))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    first, second, *rest, last = events
    assert (first.type, second.type) == ("response.created", "response.in_progress")
    assert first.response.output == second.response.output == []
    assert first.response.status == "in_progress"
    assert {event.response.id for event in (first, second, last)} == {first.response.id}
    assert last.type == f"response.{last.response.status}"
    for index, item in enumerate(last.response.output):
        of_item, rest = take(rest, index)
        added, *inner, done = of_item
        assert added.type == "response.output_item.added"
        assert added.item.status == "in_progress"
        assert done.type == "response.output_item.done"
        assert done.item == item
        assert all(event.item_id == item.id for event in inner)
        if item.type == "message":
            begins, *deltas, text, ends = inner
            assert begins.type == "response.content_part.added"
            assert (text.type, ends.type) == (
                "response.output_text.done",
                "response.content_part.done",
            )
            assert {event.type for event in deltas} <= {"response.output_text.delta"}
            assert "".join(event.delta for event in deltas) == text.text == ends.part.text
            assert item.content == [ends.part]
        else:
            *deltas, whole = inner
            assert added.item.call_id == item.call_id
            assert {event.type for event in deltas} <= {"response.function_call_arguments.delta"}
            assert whole.type == "response.function_call_arguments.done"
            assert "".join(event.delta for event in deltas) == whole.arguments == item.arguments
    assert rest == []
    return checked(last.response)


def take(events: list[Any], index: int) -> tuple[list[Any], list[Any]]:
    """The events of an item, and those behind them."""
    count = next((n for n, e in enumerate(events) if e.output_index != index), len(events))
    return events[:count], events[count:]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"text": schema_format(SCHEMA), "max_output_tokens": 400},
        {"text": schema_format(ENDLESS)},
        {"tools": [WEATHER, TIME], "max_output_tokens": 60},
        {"tools": [WEATHER, TIME], "tool_choice": "required", "max_output_tokens": 400},
        {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 60},
        {"tools": [WEATHER], "tool_choice": "none"},
    ],
)
def test_a_stream_says_what_the_whole_answer_says(served: Served, fields: dict[str, Any]) -> None:
    whole = checked(respond(served, **fields))
    last = check_events(list(respond(served, stream=True, **fields)))
    assert said(last.output) == said(whole.output)
    assert (last.status, last.usage) == (whole.status, whole.usage)
    assert last.incomplete_details == whole.incomplete_details
    assert (last.tools, last.tool_choice) == (whole.tools, whole.tool_choice)


def test_the_stream_helper_of_the_client(served: Served) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 400}
    with served.client.responses.stream(text_format=Length, **fields) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Length)
    choice: Any = {"type": "function", "name": "get_weather"}
    with served.client.responses.stream(tools=[WEATHER], tool_choice=choice, **fields) as stream:
        events = list(stream)
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert deltas[-1].snapshot == call.arguments


def test_events_have_names_and_there_is_no_done(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 3, "stream": True}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/responses", json.dumps(body), headers)
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in data]
    assert names[-1] in ("response.completed", "response.incomplete")


def test_leaving_a_stream_frees_its_slot(served: Served) -> None:
    stream = respond(served, stream=True, max_output_tokens=20_000, text=schema_format(ENDLESS))
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    assert served.free_slots < served.engine.slots
    stream.close()
    wait_for(lambda: served.free_slots == served.engine.slots)


def test_a_failure_on_the_way_ends_with_response_failed() -> None:
    with tiny_engine() as engine, serving(engine, LIMITS) as served:
        fields: dict[str, Any] = {"max_output_tokens": 20_000, "text": schema_format(ENDLESS)}
        stream = respond(served, stream=True, **fields)
        events = []
        for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta" and not engine.closed:
                engine.close()
        last = check_failed(events)
        assert last.error.type == "shutting_down"
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            respond(served)


def test_time_runs_out(served: Served) -> None:
    fields: dict[str, Any] = {
        "max_output_tokens": 20_000,
        "text": schema_format(ENDLESS),
        "extra_body": {"timeout": 0.2},
    }
    assert (
        check_failed(list(respond(served, stream=True, **fields))).error.type == "request_timeout"
    )
    with pytest.raises(openai.InternalServerError) as raised:
        respond(served, **fields)
    assert (raised.value.status_code, raised.value.code) == (504, "request_timeout")


def check_failed(events: list[Any]) -> Any:
    for event in events:
        EVENT.validate_python(received(event))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.code == "server_error"
    assert last.response.error.message
    assert {item.status for item in last.response.output} <= {"completed", "incomplete"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return last.response


# Tools --------------------------------------------------------------------------------------------


def calls_of(response: Any) -> list[ResponseFunctionToolCall]:
    return [item for item in response.output if item.type == "function_call"]


def test_calls_and_their_outputs_make_the_round(served: Served) -> None:
    tools = [WEATHER, TIME]
    items: list[Any] = [{"role": "user", "content": "Weather and time?"}]
    fields: dict[str, Any] = {"tools": tools, "max_output_tokens": 600}
    first = checked(respond(served, input=items, tool_choice="required", **fields))
    calls = calls_of(first)
    assert calls
    assert len(calls) == len(first.output) or first.status == "incomplete"
    for call in calls:
        assert call.id is not None
        assert call.id.startswith("fc_")
        assert call.call_id.startswith("call_")
        assert call.name in ("get_weather", "get_time")
    whole = [call for call in calls if call.status == "completed"]
    assert whole
    assert all(json.loads(call.arguments)["city"] in ("Oslo", "Rome") for call in whole)
    assert [tool.type for tool in first.tools] == ["function", "function"]
    assert first.tools[0].strict is True
    items += whole
    items += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
        for call in whole
    ]
    second = checked(respond(served, input=items, tool_choice="none", **fields))
    assert not calls_of(second)
    # The model has read the calls: as chat completions would tell it.
    messages = [
        items[0],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in whole
            ],
        },
        *(
            {"role": "tool", "tool_call_id": call.call_id, "content": "12 degrees"}
            for call in whole
        ),
    ]
    nested = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in tools
    ]
    chat = served.chat(messages=messages, tools=nested, tool_choice="none", max_tokens=600)
    assert chat.choices[0].message.content == second.output_text
    assert second.usage is not None
    assert chat.usage.prompt_tokens == second.usage.input_tokens


class Weather(pydantic.BaseModel):
    city: Literal["Oslo", "Rome"]


def test_parsed_calls_can_be_sent_back(served: Served) -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_output_tokens": 600}
    tool: Any = openai.pydantic_responses_function_tool(Weather, name="get_weather")
    choice: Any = {"type": "function", "name": "get_weather"}
    response = served.client.responses.parse(input="?", tools=[tool], tool_choice=choice, **fields)
    (call,) = response.output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, Weather)
    items: list[Any] = [{"role": "user", "content": "?"}, call, output(call.call_id)]
    assert served.client.responses.create(input=items, tools=[tool], **fields).output


def test_tool_choice(served: Served) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER, TIME], "max_output_tokens": 600}
    named: Any = {"type": "function", "name": "get_time"}
    response = checked(respond(served, tool_choice=named, **fields))
    assert [call.name for call in calls_of(response)] == ["get_time"]
    assert response.tool_choice.model_dump() == named
    tools = [{"type": "function", "name": "get_weather"}]
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": tools}
    response = checked(respond(served, tool_choice=allowed, parallel_tool_calls=False, **fields))
    assert [call.name for call in calls_of(response)] == ["get_weather"]
    assert response.parallel_tool_calls is False
    assert response.tool_choice.model_dump() == allowed


def test_a_schema_beside_tools_rules_the_text(served: Served) -> None:
    fields: dict[str, Any] = {
        "tools": [WEATHER],
        "max_output_tokens": 600,
        "parallel_tool_calls": False,
    }
    for seed in range(4):
        extra = {"seed": seed}
        response = respond(served, text=schema_format(SCHEMA), extra_body=extra, **fields)
        assert response.status == "completed"
        if not calls_of(response):
            assert set(json.loads(response.output_text)) == {"unit", "exact"}


# What is written, without a model -----------------------------------------------------------------


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


BEGUN = '<tool_call>{"name": "f", "arguments": {'
PARTS = st.one_of(
    st.sampled_from(["a", " b\n", "<tool_call>", "</tool_call>", '{"x":', " ", BEGUN]),
    st.builds(call, st.sampled_from(["f", "g"]), st.sampled_from(["{}", '{"a": [1, "}"]}'])),
)


@given(
    st.lists(PARTS, max_size=6).map("".join),
    st.lists(st.integers(0, 200), max_size=5),
    st.booleans(),
)
@example(text=BEGUN + call("g", "{}"), places=[], cut=False)
def test_where_a_text_is_cut_makes_no_difference(text: str, places: list[int], cut: bool) -> None:
    ends = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(ends)]

    def written(pieces: list[str]) -> Output:
        output = Output(None, may_call=True)  # no log-probabilities
        for piece in pieces:
            list(output.write(piece))
        list(output.finish(cut))
        return output

    whole, streamed = written([text]), written(pieces)
    assert said(whole.items) == said(streamed.items)
    content, calls = parse_tool_calls(text)
    complete = [i for i in whole.items if i.type == "function_call" and i.status == "completed"]
    assert [(item.name, item.arguments) for item in complete] == calls
    if all(item.type == "message" or item in complete for item in whole.items):
        assert content == "".join(
            item.content[0].text for item in whole.items if item.type == "message"
        )
    last = whole.items[-1]
    if last.type == "message":
        assert last.status == ("incomplete" if cut else "completed")
    # Neither empty messages beside other items, nor two in a row, nor anything open.
    for item, following in zip(whole.items, [*whole.items[1:], None], strict=True):
        assert item.status != "in_progress"
        assert item.status == "completed" or (item.type == "function_call" or following is None)
        if item.type == "message" and len(whole.items) > 1:
            assert item.content[0].text
            assert following is None or following.type == "function_call"
    assert whole.items
    assert len({item.id for item in whole.items}) == len(whole.items)


def test_text_before_between_and_behind_calls() -> None:
    output = Output(None, may_call=True)
    list(output.write(f"One. {call('f', '{}')}\n two {call('g', '{}')[:50]}"))
    list(output.finish(True))
    assert said(output.items) == [
        ("message", "completed", "One.", []),
        ("function_call", "completed", "f", "{}"),
        ("message", "completed", " \n two", []),
        ("function_call", "incomplete", "g", "{}"),
    ]


# Conversations ------------------------------------------------------------------------------------


def called(call_id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str, text: Any = "x") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def test_items_become_turns() -> None:
    items = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "I look.", "id": "msg_1", "status": "completed"},
        called("a") | {"id": "fc_1", "status": "completed"},
        called("b", "g", '{"x": 1}'),
        {"role": "assistant", "content": " Wait."},
        output("a", [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "2"}]),
        output("b"),
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]
    asked = ResponsesRequest.model_validate({"model": MODEL, "instructions": "s", "input": items})

    def function(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    assert asked.turns().messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "I look. Wait.",
            "tool_calls": [function("a", "f", "{}"), function("b", "g", '{"x": 1}')],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1\n2"},
        {"role": "tool", "tool_call_id": "b", "content": "x"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]


# What is refused ----------------------------------------------------------------------------------


def choice(**fields: Any) -> dict[str, Any]:
    return {"tools": [WEATHER], "tool_choice": fields}


def formatted(**fields: Any) -> dict[str, Any]:
    return {"text": {"format": fields}}


USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "input_image", "image_url": "data:,"}
BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"foo": 1}, "foo", "unknown_parameter"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": None}, "input", "invalid_type"),
    ({"input": 5}, "input", "invalid_type"),
    ({"input": ["hi"]}, "input.0", "invalid_type"),
    ({"input": "x" * (LIMITS.prompt_tokens + 1)}, "input", "context_length_exceeded"),
    ({"input": [{**USER, "foo": 1}]}, "input.0.foo", "unknown_parameter"),
    ({"input": [{**USER, "role": "robot"}]}, "input.0.role", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input.0.content", "missing_required_parameter"),
    ({"input": [{**USER, "content": "a\0"}]}, "input.0.content", "invalid_value"),
    ({"input": [USER, {**USER, "content": [IMAGE]}]}, "input.1.content.0.type", "invalid_value"),
    ({"input": [USER, output("a", [IMAGE])]}, "input.1.output.0.type", "invalid_value"),
    ({"input": [USER, {"id": "msg_1"}]}, "input.1.type", "unsupported_parameter"),
    (
        {"input": [{"type": "item_reference", "id": "m"}]},
        "input.0.type",
        "unsupported_parameter",
    ),
    (
        {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "e"}]},
        "input.0.encrypted_content",
        "unsupported_parameter",
    ),
    (
        {"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}]},
        "input.0.summary",
        "unsupported_parameter",
    ),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "unsupported_parameter"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort", "unsupported_parameter"),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a", "invalid_value"),
    ({"input": [{"type": "mcp_call", "id": "r"}]}, "input.0.type", "unsupported_parameter"),
    ({"input": [USER, called("a", "a b")]}, "input.1.name", "invalid_value"),
    ({"input": [USER, called("a"), USER]}, "input.1", "invalid_value"),
    ({"input": [USER, called("a")]}, "input.1", "invalid_value"),
    ({"input": [USER, output("a")]}, "input.1.call_id", "invalid_value"),
    (
        {"instructions": "s", "input": [called("a"), output("a"), output("a")]},
        "input.2.call_id",
        "invalid_value",
    ),
    (
        {"input": [USER, called("a"), called("a"), output("a")]},
        "input.2.call_id",
        "invalid_value",
    ),
    (
        {"input": [USER, called("a", arguments='{"a": '), output("a")]},
        "input.1.arguments",
        "invalid_value",
    ),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    (
        {"max_output_tokens": LIMITS.completion_tokens + 1},
        "max_output_tokens",
        "invalid_value",
    ),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    (
        {"top_logprobs": 21, "include": ["message.output_text.logprobs"]},
        "top_logprobs",
        "invalid_value",
    ),
    (
        {"tools": [WEATHER], "include": ["message.output_text.logprobs"]},
        "include",
        "invalid_value",
    ),
    ({"include": ["file_search_call.results"]}, "include.0", "invalid_value"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_parameter"),
    (formatted(type="xml"), "text.format.type", "invalid_value"),
    (formatted(type="json_schema", schema={}), "text.format", "invalid_value"),
    (formatted(type="json_schema", name="a"), "text.format", "invalid_value"),
    (formatted(type="json_object", schema={}), "text.format", "invalid_value"),
    (formatted(type="text", strict=True), "text.format", "invalid_value"),
    (formatted(type="json_schema", name="a b", schema={}), "text.format.name", "invalid_value"),
    (
        formatted(type="json_schema", name="a", schema={"type": "nonsense"}),
        "text.format.schema",
        "invalid_json_schema",
    ),
    (formatted(type="json_object") | {"regex": "a"}, "regex", "invalid_value"),
    (
        formatted(type="json_object") | {"backend": "nothing"},
        "backend",
        "invalid_backend",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "unsupported_parameter"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools.0.name",
        "missing_required_parameter",
    ),
    (
        {"tools": [WEATHER | {"defer_loading": True}]},
        "tools.0.defer_loading",
        "unsupported_parameter",
    ),
    ({"tools": [WEATHER | {"parameters": {"type": "x"}}]}, "tools", "invalid_tools"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "invalid_value"),
    (choice(type="function"), "tool_choice", "invalid_value"),
    (choice(type="function", name="f"), "tool_choice.name", "invalid_value"),
    (choice(type="web_search_preview"), "tool_choice.type", "invalid_value"),
    (
        choice(type="allowed_tools", mode="auto", tools=[{"type": "function", "name": "f"}]),
        "tool_choice.tools.0",
        "invalid_value",
    ),
    (
        {"tools": [WEATHER], "tool_choice": "required"} | formatted(type="json_object"),
        "tool_choice",
        "invalid_value",
    ),
]


def refused(served: Served, fields: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    body = {"model": MODEL, "input": "hi"} | fields
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/responses", json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    assert response.status == 400, answer
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    return dict(error)


@pytest.mark.parametrize(("fields", "param", "code"), BAD_FIELDS)
def test_bad_field(served: Served, fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(served, fields)
    assert (error["param"], error["code"]) == (param, code), error
    # Words of chat completions would send a reader to the wrong place.
    assert "messages." not in error["message"]
    assert "role 'tool'" not in error["message"]


@pytest.mark.parametrize("name", sorted(UNSERVED_IN_RESPONSES))
def test_every_unserved_field_is_refused(served: Served, name: str) -> None:
    error = refused(served, {name: "something"})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert name in error["message"]


def test_values_that_ask_for_nothing_are_accepted(served: Served) -> None:
    neutral = {
        name: field.neutral[-1] for name, field in UNSERVED_IN_RESPONSES.items() if field.neutral
    }
    nulls = dict.fromkeys(set(UNSERVED_IN_RESPONSES) - set(neutral))
    fields = neutral | nulls | {"tools": [], "include": []}
    extra = respond(served, extra_body=fields)
    assert extra.output_text == respond(served).output_text


def test_what_is_stored_nowhere_says_so(served: Served) -> None:
    for fields in ({"previous_response_id": "resp_1"}, {"store": True}):
        with pytest.raises(openai.BadRequestError, match="send the items"):
            respond(served, **fields)
    with pytest.raises(openai.NotFoundError):
        served.client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError) as missing:
        respond(served, model="gpt-4o")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="Invalid schema for response_format 'answer'"):
        respond(served, text=schema_format({"type": "nonsense"}), stream=True)


def test_a_failure_closes_what_is_open() -> None:
    asked = ResponsesRequest.model_validate({"model": MODEL, "input": "hi"})
    reply = ResponsesReply(MODEL, "fp", None, may_call=False, echo=asked.echo())
    list(reply.opening())
    (event,) = reply.failure(ApiError(500, "it broke", code="internal_error"))
    told = json.loads(event["data"])
    assert told["sequence_number"] == 2
    failed = Response.model_validate(told["response"])
    assert (failed.status, failed.output) == ("failed", [])
    assert failed.error is not None
    assert (failed.error.code, failed.error.message) == ("server_error", "it broke")


def test_openapi_describes_what_is_served(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    connection.request("GET", "/openapi.json")
    document = json.loads(connection.getresponse().read())
    connection.close()
    assert "post" in document["paths"]["/v1/responses"]
    properties = document["components"]["schemas"]["ResponsesRequest"]["properties"]
    assert {"input", "instructions", "text", "tools", "temperature"} <= set(properties)
    assert not set(properties) & set(UNSERVED_IN_RESPONSES)
