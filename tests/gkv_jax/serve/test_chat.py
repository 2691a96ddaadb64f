"""What is served: chat completions with and without streaming, guided and free, many at once."""

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import logging
import threading
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import openai
import pytest
from starlette.types import Message

from gkv_jax import CacheSpec, DraftModel, Engine, Sampling
from gkv_jax.errors import EngineClosedError
from gkv_jax.models.llama import Llama
from gkv_jax.request import Request, RequestCancelled
from gkv_jax.serve import generation
from gkv_jax.serve.app import _fingerprint
from gkv_jax.serve.errors import ApiError, RequestTimeout
from gkv_jax.serve.replies.chat import ChatReply
from gkv_jax.serve.replies.completions import CompletionReply
from gkv_jax.serve.replies.events import EventStream
from gkv_jax.serve.replies.responses import ResponsesReply
from gkv_jax.serve.settings import Limits
from grammar_host import DeadEndError, Guide
from tests.gkv_jax.serve.conftest import LIMITS, MODEL, Served, serving, tiny_engine, wait_for
from tests.gkv_jax.tiny import byte_tokenizer, random_params, text_config

# Keys in an order that sorting would change; a finite language, so that any model ends it.
SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["km", "mile"]},
        "length": {"type": "integer", "minimum": 0, "maximum": 99},
        "exact": {"type": "boolean"},
    },
    "required": ["unit", "length", "exact"],
    "additionalProperties": False,
}
ENDLESS = {"type": "string", "minLength": 15_000}


def schema_format(schema: Any, name: str = "answer") -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": name, "strict": True, "schema": schema},
    }


def text_of(completion: Any) -> str:
    (choice,) = completion.choices
    return choice.message.content


def test_completion_has_openai_shape_and_stats(served: Served) -> None:
    completion = served.chat(seed=5)
    assert completion.object == "chat.completion"
    assert completion.id.startswith("chatcmpl-")
    assert completion.model == MODEL
    assert completion.system_fingerprint.startswith("fp_")
    assert completion.choices[0].finish_reason in ("stop", "length")
    usage = completion.usage
    assert usage.prompt_tokens == len("hi") + 2  # <user> and <model>
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert completion.gkv["backend"] is None
    assert completion.gkv["cache_bytes"] > 0


@pytest.mark.parametrize("response_format", [{"type": "text"}, schema_format(SCHEMA)])
def test_stream_gives_the_text_of_the_completion(served: Served, response_format: Any) -> None:
    fields: dict[str, Any] = {"seed": 7, "max_tokens": 300, "response_format": response_format}
    whole = served.chat(**fields)
    chunks = list(served.chat(stream=True, stream_options={"include_usage": True}, **fields))

    *parts, usage = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == text_of(whole)
    reasons = [chunk.choices[0].finish_reason for chunk in parts]
    assert reasons == [None] * (len(parts) - 1) + [whole.choices[0].finish_reason]
    assert all(chunk.usage is None for chunk in parts)
    assert usage.choices == []
    assert usage.usage == whole.usage
    assert parts[-1].gkv["backend"] == whole.gkv["backend"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_without_usage_does_not_mention_it(served: Served) -> None:
    chunks = list(served.chat(stream=True))
    assert all(chunk.choices for chunk in chunks)
    assert not any("usage" in chunk.model_fields_set for chunk in chunks)


def test_schema_is_obeyed_in_its_order(served: Served) -> None:
    completion = served.chat(max_tokens=400, response_format=schema_format(SCHEMA))
    answer = json.loads(text_of(completion))
    jsonschema.validate(answer, SCHEMA)
    assert list(answer) == list(SCHEMA["properties"])
    assert completion.choices[0].finish_reason == "stop"
    assert completion.gkv["backend"] == "llguidance"


def test_json_object_takes_a_schema(served: Served) -> None:
    completion = served.chat(
        max_tokens=400, response_format={"type": "json_object", "schema": SCHEMA}
    )
    jsonschema.validate(json.loads(text_of(completion)), SCHEMA)


def test_json_object_begins_an_object(served: Served) -> None:
    completion = served.chat(max_tokens=10, response_format={"type": "json_object"})
    assert text_of(completion).lstrip().startswith("{")


def test_length_is_reported(served: Served) -> None:
    completion = served.chat(max_tokens=5, response_format=schema_format(ENDLESS))
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens == 5


def test_stop_text_ends_the_answer(served: Served) -> None:
    fields: dict[str, Any] = {"max_tokens": 400, "response_format": schema_format(SCHEMA)}
    whole = text_of(served.chat(**fields))
    for stop in ('"length"', ['"nowhere"', '"length"']):
        completion = served.chat(stop=stop, **fields)
        assert text_of(completion) == whole[: whole.index('"length"')]
        assert completion.choices[0].finish_reason == "stop"


def test_seed_decides(served: Served) -> None:
    def texts(**fields: Any) -> set[str]:
        fields = {"response_format": schema_format(ENDLESS), "max_tokens": 30} | fields
        return {text_of(served.chat(**fields)) for _ in range(3)}

    assert len(texts(seed=3)) == 1
    assert len(texts(seed=None)) == 3  # none given: a new one each time, as with OpenAI
    assert len(texts(seed=None, temperature=0)) == 1


def test_text_parts_and_developer_are_their_plain_equals(served: Served) -> None:
    plain = [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "c"}]
    parts = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "c"},
    ]
    assert text_of(served.chat(messages=parts)) == text_of(served.chat(messages=plain))


def test_values_that_ask_for_nothing_are_accepted(served: Served) -> None:
    neutral = {
        "n": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logprobs": False,
        "logit_bias": {},
        "store": False,
        "user": "somebody",
        "metadata": {"purpose": "test"},
        "extra_body": {"tools": None, "top_k": 0, "min_p": 0},
    }
    assert text_of(served.chat(**neutral)) == text_of(served.chat())


def test_concurrent_requests_equal_single_ones(served: Served) -> None:
    """More requests than slots, guided and free, streaming or not: each as if it were alone."""
    asked: list[dict[str, Any]] = [
        {
            "seed": seed,
            "max_tokens": 120,
            "messages": [{"role": "user", "content": "x" * (10 * seed)}],
            "response_format": schema_format(SCHEMA) if seed % 2 else {"type": "text"},
        }
        for seed in range(10)
    ]
    alone = [text_of(served.chat(**fields)) for fields in asked]

    def streamed(fields: dict[str, Any]) -> str:
        chunks = served.chat(stream=True, **fields)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(2 * len(asked)) as pool:
        whole = [pool.submit(served.chat, **fields) for fields in asked]
        pieces = [pool.submit(streamed, fields) for fields in asked]
        assert [text_of(future.result()) for future in whole] == alone
        assert [future.result() for future in pieces] == alone


def test_leaving_a_stream_frees_its_slot(served: Served) -> None:
    stream = served.chat(stream=True, max_tokens=20_000, response_format=schema_format(ENDLESS))
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert served.free_slots < served.engine.slots
    stream.close()
    wait_for(lambda: served.free_slots == served.engine.slots)
    assert text_of(served.chat()) is not None


def test_leaving_before_the_answer_frees_the_slot(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 20_000,
        "response_format": schema_format(ENDLESS),
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    wait_for(lambda: served.free_slots < served.engine.slots)
    connection.close()
    wait_for(lambda: served.free_slots == served.engine.slots)


class _Failing:
    """A text stream that breaks down in the middle of a generation."""

    stopped = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    def push(self, tokens: list[int]) -> str:
        raise self._error

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeadEndError("no legal token"), "dead_end"),
        (RuntimeError("/somewhere/inside.py broke"), "internal_error"),
    ],
)
def test_failure_of_one_request_is_its_own(
    served: Served, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    prepare = served.engine.prepare

    def sabotage(prompt: Any, *rest: Any, **options: Any) -> Any:
        request = prepare(prompt, *rest, **options)
        if "fail" in served.engine.tokenizer.decode(prompt):
            request.text_stream = _Failing(error)
        return request

    expected = text_of(served.chat())
    monkeypatch.setattr(served.engine, "prepare", sabotage)
    messages = [{"role": "user", "content": "fail"}]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        neighbour = pool.submit(served.chat)
        with pytest.raises(openai.InternalServerError) as whole:
            served.chat(messages=messages)
        with pytest.raises(openai.APIError) as streamed:
            list(served.chat(messages=messages, stream=True))
        assert text_of(neighbour.result()) == expected

    for raised in (whole.value, streamed.value):
        assert raised.body["code"] == code
        assert raised.body["type"] == "server_error"
        assert "inside.py" not in str(raised)


def test_closing_the_engine_ends_streams_with_an_error() -> None:
    with tiny_engine() as engine, serving(engine, LIMITS) as served:
        stream = served.chat(stream=True, max_tokens=20_000, response_format=schema_format(ENDLESS))
        next(stream)
        wait_for(lambda: served.free_slots < engine.slots)
        engine.close()
        with pytest.raises(openai.APIError, match="shutting down") as raised:
            list(stream)
    assert raised.value.code == "shutting_down"


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_engine_is_a_503_before_anything_is_sent(stream: bool) -> None:
    with tiny_engine() as engine, serving(engine, LIMITS) as served:
        engine.close()
        with pytest.raises(openai.InternalServerError) as raised:
            served.chat(stream=stream)
    assert (raised.value.status_code, raised.value.code) == (503, "shutting_down")
    assert raised.value.type == "server_error"


class _Hanging(_Failing):
    """A text stream that keeps the engine thread until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def push(self, token: int) -> str:
        assert self.released.wait(30)
        return ""


def test_time_is_over_though_the_engine_is_busy() -> None:
    """The client is answered at once, its place is free once the engine has let go of it."""
    hanging, ended = _Hanging(), list[Request]()
    with tiny_engine() as engine:
        requests = [engine.prepare("hi"), engine.prepare("you")]
        requests[0].text_stream = hanging

        async def wait() -> None:
            answer = generation.Answer(engine, requests, ended.append, 0.2)
            with pytest.raises(ApiError) as raised:
                async for _ in answer.pieces():
                    pass
            assert (raised.value.status, raised.value.code) == (504, "request_timeout")

        asyncio.run(wait())
        assert ended == []
        hanging.released.set()
        wait_for(lambda: len(ended) == len(requests))
    assert all(isinstance(request.error, RequestTimeout) for request in requests)


def test_requests_that_cannot_be_submitted_end_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them is told of once, whether it was submitted before the engine closed or not."""
    ended: list[Request] = []
    with tiny_engine() as engine:
        requests = [engine.prepare("hi", sampling=Sampling(max_tokens=400)) for _ in range(3)]
        submit = engine.submit

        def close_before_the_second(request: Request) -> None:
            if request is requests[1]:
                engine.close()
            submit(request)

        monkeypatch.setattr(engine, "submit", close_before_the_second)

        async def ask() -> None:
            generation.Answer(engine, requests, ended.append, 60)

        with pytest.raises(EngineClosedError):
            asyncio.run(ask())
        wait_for(lambda: len(ended) == len(requests))
    assert {*map(id, ended)} == {*map(id, requests)}
    assert [bool(request.submitted) for request in requests] == [True, False, False]


def _sent(served: Served, method: str, path: str, body: Any = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    with contextlib.closing(connection):
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()


def _said(served: Served, path: str, **fields: Any) -> str:
    """A stream, as it is sent."""
    status, text = _sent(served, "POST", path, {"model": MODEL, "stream": True, **fields})
    assert status == 200
    return text


def _rejected(served: Served, code: str) -> bool:
    """Whether a stream that ended so is counted."""
    _, text = _sent(served, "GET", "/metrics")
    return f'gkv_rejected_requests_total{{code="{code}",status="200"}} 1.0' in text


APIS = [
    (ChatReply, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    (CompletionReply, "/v1/completions", {"prompt": "hi"}),
    (ResponsesReply, "/v1/responses", {"input": "hi"}),
]


@pytest.mark.parametrize(("reply", "path", "fields"), APIS)
def test_whole_answers_are_written_beside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, reply: Any, path: str, fields: dict[str, Any]
) -> None:
    """Likelihoods of thousands of tokens take long enough for other clients to notice."""
    method = "whole" if reply is ResponsesReply else "completion"
    build, outcomes = getattr(reply, method), list[str]()

    def watched(*arguments: Any) -> Any:
        try:
            asyncio.get_running_loop()
            outcomes.append("on the loop")
        except RuntimeError:
            outcomes.append("beside it")
        return build(*arguments)

    monkeypatch.setattr(reply, method, watched)
    status, text = _sent(served, "POST", path, {"model": MODEL, **fields})
    assert status == 200
    assert json.loads(text)["usage"]
    assert outcomes == ["beside it"]


@pytest.mark.parametrize(("narrator", "path", "fields"), APIS)
@pytest.mark.parametrize("method", ["opening", "piece", "end", "closing"])
def test_a_stream_that_cannot_be_told_ends_with_an_error(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    narrator: Any,
    path: str,
    fields: dict[str, Any],
    method: str,
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("/somewhere/inside.py broke")

    monkeypatch.setattr(narrator, method, broken)
    with (
        caplog.at_level(logging.INFO, "gkv_jax.serve"),
        serving(served.engine, LIMITS) as fresh,
    ):
        text = _said(fresh, path, **fields)
        wait_for(lambda: _rejected(fresh, "internal_error"))
    assert "internal_error" in text.strip().splitlines()[-1]
    assert "[DONE]" not in text
    assert "inside.py" not in text
    assert "inside.py broke" in caplog.text  # with its traceback
    assert "error_code=internal_error" in caplog.text
    wait_for(lambda: served.free_slots == served.engine.slots)


def test_log_and_metrics_tell_of_a_stream_that_was_cut_off(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    fields: dict[str, Any] = {"timeout": 0.2, "response_format": schema_format(ENDLESS)}
    with (
        caplog.at_level(logging.INFO, "gkv_jax.serve.access"),
        serving(served.engine, LIMITS) as fresh,
    ):
        text = _said(fresh, "/v1/completions", prompt="hi", max_tokens=20_000, **fields)
        wait_for(lambda: _rejected(fresh, "request_timeout"))
    assert "request_timeout" in text.splitlines()[-2]
    (line,) = [r.message for r in caplog.records if "path=/v1/completions" in r.message]
    assert "status=200" in line
    assert "error_code=request_timeout" in line


class _Silent:
    """Tells nothing, because nobody asks."""

    def opening(self) -> Any:
        raise AssertionError("nobody is there to ask for an event")


def test_a_client_that_left_before_the_first_event_frees_its_slot() -> None:
    with tiny_engine() as engine:
        endless = engine.prepare("hi", Guide.json_schema(ENDLESS), Sampling(max_tokens=20_000))
        ended: list[Request] = []

        async def leave_at_once() -> None:
            async def receive() -> Message:
                return {"type": "http.disconnect"}

            async def send(_: Message) -> None:
                raise OSError("the client is gone")

            answer = generation.Answer(engine, [endless], ended.append, 60)
            response = EventStream(answer, _Silent())
            with contextlib.suppress(OSError):
                await response({"type": "http", "method": "POST"}, receive, send)

        asyncio.run(leave_at_once())
        assert isinstance(endless.result().error, RequestCancelled)
        wait_for(lambda: ended == [endless])


def test_fingerprint_changes_with_what_changes_results() -> None:
    model, params = Llama(text_config()), random_params(text_config())
    cache = CacheSpec(sinks=4, window=60, max_drafts=3)

    def fingerprint(**options: Any) -> str:
        options = {"params": params, "cache": cache, "slots": 1} | options
        with Engine(model, tokenizer=byte_tokenizer(), **options) as engine:
            return _fingerprint(engine, "m")

    same = fingerprint()
    assert fingerprint(params=random_params(text_config(), seed=1)) == same
    others = [
        {"slots": 2},
        {"cache": CacheSpec(sinks=3, window=61, max_drafts=3)},
        {"loop": "host"},
        {"params": model.quantize(params)},
        {"params": jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)},
        {"draft": DraftModel(model, params, byte_tokenizer())},
    ]
    found = {fingerprint(**other) for other in others}
    assert len(found) == len(others)
    assert same not in found


def test_after_warm_up_no_prompt_compiles_anything(compiles: list[str]) -> None:
    """SnapKV has a prefill program for each size of a long prompt."""
    limits = Limits(prompt_tokens=300)
    with tiny_engine(CacheSpec(policy="snapkv", sinks=3, kept=9, window=41)) as engine:
        generation.warm_up(engine, limits)
        assert any("prefill_whole" in name for name in compiles)
        compiles.clear()
        prompts = ["x" * length for length in (1, 30, 60, 100, 200, limits.prompt_tokens)]
        results = engine.generate(prompts, guide=Guide.json(), sampling=Sampling(max_tokens=3))
        assert all(result.error is None for result in results)
        assert compiles == []


def test_models_and_health(served: Served) -> None:
    (model,) = served.client.models.list().data
    assert model.id == MODEL
    assert served.client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("other")
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    connection.request("GET", "/health")
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert answer == {"status": "ok", "model": MODEL, "slots": served.engine.slots}
