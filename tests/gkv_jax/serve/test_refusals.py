"""What is refused: in OpenAI's shape, naming the field and the way out, with no after-effects."""

import dataclasses
import http.client
import json
import re
from typing import Any

import openai
import pytest

from gkv_jax import CacheSpec
from gkv_jax.drafts import MAX_PREDICTION_TOKENS
from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.chat import ChatCompletionRequest
from gkv_jax.serve.protocol.unserved import UNSERVED_IN_CHATS, UNSERVED_IN_MESSAGES
from gkv_jax.serve.settings import Limits
from tests.gkv_jax.serve.conftest import LIMITS, MODEL, Served, serving, tiny_engine

HI = [{"role": "user", "content": "hi"}]


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | fields}


def predicted(content: Any) -> dict[str, Any]:
    return {"type": "content", "content": content}


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 9}, "n", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": True}, "n", "invalid_type"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "invalid_value"),
    ({"presence_penalty": "1"}, "presence_penalty", "invalid_type"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
    ({"top_logprobs": 5}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"trace": True}, "trace", "invalid_value"),
    ({"timeout": 0}, "timeout", "invalid_value"),
    ({"timeout": 1e6}, "timeout", "invalid_value"),
    ({"cache": {"window": 7}}, "cache.window", "invalid_value"),
    ({"cache": {"policy": "h2o"}}, "cache.policy", "invalid_value"),
    ({"cache": {"size": 7}}, "cache.size", "unknown_parameter"),
    ({"backend": "xgrammar"}, "backend", "invalid_value"),
    ({"backend": "regexp", "regex": "a"}, "backend", "invalid_backend"),
    ({"regex": "a", "ebnf": "root ::= [a]"}, "ebnf", "invalid_value"),
    ({"regex": "("}, "regex", "invalid_regex"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"tools": []}, "tools", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "unsupported_parameter"),
    ({"foo": 1}, "foo", "unknown_parameter"),
    ({"messages": [{**HI[0], "foo": 1}]}, "messages.0.foo", "unknown_parameter"),
    ({"messages": [{**HI[0], "name": "Ann"}]}, "messages.0.name", "unsupported_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_required_parameter"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role", "invalid_value"),
    ({"messages": user(5)}, "messages.0.content", "invalid_type"),
    ({"messages": user("a\0b")}, "messages.0.content", "invalid_value"),
    ({"messages": user("\ud800")}, "messages.0.content", "invalid_value"),
    ({"messages": user([{"type": "image_url"}])}, "messages.0.content.0.type", "invalid_value"),
    (
        {"messages": user([{"type": "text"}])},
        "messages.0.content.0.text",
        "missing_required_parameter",
    ),
    (
        {"messages": user("x" * (LIMITS.prompt_tokens + 1))},
        "messages",
        "context_length_exceeded",
    ),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 1000.1}, "temperature", "invalid_value"),
    ({"temperature": float("nan")}, "temperature", "invalid_value"),
    ({"temperature": float("inf")}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": LIMITS.completion_tokens + 1}, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens", "invalid_value"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "invalid_value"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": [""]}, "stop.0", "invalid_value"),
    ({"stop": ["x"] * 17}, "stop", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"response_format": {"type": "object"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format", "invalid_value"),
    (
        {"response_format": schema_format({}, name="a b")},
        "response_format.json_schema.name",
        "invalid_value",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "answer"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    ({"prediction": {"content": "a"}}, "prediction.type", "missing_required_parameter"),
    ({"prediction": {"type": "text", "content": "a"}}, "prediction.type", "invalid_value"),
    ({"prediction": predicted(5)}, "prediction.content", "invalid_type"),
    ({"prediction": predicted([{"type": "image"}])}, "prediction.content.0.type", "invalid_value"),
    ({"prediction": predicted("")}, "prediction", "invalid_value"),
    ({"prediction": predicted([])}, "prediction", "invalid_value"),
    (
        {"prediction": predicted("x" * (MAX_PREDICTION_TOKENS + 1))},
        "prediction",
        "invalid_value",
    ),
    ({"jump": "always"}, "jump", "invalid_value"),
    ({"jump": True}, "jump", "invalid_value"),
    ({"lookup": 1}, "lookup", "invalid_type"),
    ({"draft_model": "other"}, "draft_model", "invalid_type"),
    ({"model": 5}, "model", "invalid_type"),
]

BAD_SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "nonsense"}, "invalid_json_schema"),
    ({"type": "string", "pattern": "a\0"}, "invalid_json_schema"),
    ({"$ref": "#/$defs/nowhere"}, "invalid_json_schema"),
    ({"type": "string", "const": float("nan")}, "invalid_json_schema"),
    ({"not": {}}, "empty_language"),
]

# Fields of several types, and values that no type of theirs takes, or that one of them takes in part.
BAD_MEMBERS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/completions", {"prompt": 5}, "prompt", "invalid_type"),
    ("/v1/completions", {"prompt": {}}, "prompt", "invalid_type"),
    ("/v1/completions", {"prompt": None}, "prompt", "invalid_type"),
    ("/v1/completions", {"prompt": []}, "prompt", "invalid_value"),
    ("/v1/completions", {"prompt": "a\0"}, "prompt", "invalid_value"),
    ("/v1/completions", {"prompt": [1, -2]}, "prompt.1", "invalid_value"),
    ("/v1/completions", {"prompt": [1, "a"]}, "prompt.1", "invalid_type"),
    ("/v1/completions", {"prompt": [True]}, "prompt.0", "invalid_type"),
    ("/v1/completions", {"prompt": ["a", 1]}, "prompt.1", "invalid_type"),
    ("/v1/completions", {"prompt": ["a", "b\0"]}, "prompt.1", "invalid_value"),
    ("/v1/completions", {"prompt": [[1], []]}, "prompt.1", "invalid_value"),
    ("/v1/completions", {"prompt": [[1], [2, 1.5]]}, "prompt.1.1", "invalid_type"),
    ("/v1/completions", {"prompt": [[1], "a"]}, "prompt.1", "invalid_type"),
    ("/v1/completions", {"guided_json": 5}, "guided_json", "invalid_type"),
    ("/v1/completions", {"stop": [5]}, "stop.0", "invalid_type"),
    ("/v1/chat/completions", {"guided_json": [1]}, "guided_json", "invalid_type"),
    (
        "/v1/chat/completions",
        {"structured_outputs": {"json": 5}},
        "structured_outputs.json",
        "invalid_type",
    ),
    (
        "/v1/chat/completions",
        {"structured_outputs": {"structural_tag": []}},
        "structured_outputs.structural_tag",
        "invalid_type",
    ),
    ("/v1/chat/completions", {"tool_choice": 5}, "tool_choice", "invalid_type"),
    ("/v1/chat/completions", {"tool_choice": {"type": 5}}, "tool_choice.type", "invalid_value"),
    ("/v1/chat/completions", {"messages": user([5])}, "messages.0.content.0", "invalid_type"),
    (
        "/v1/chat/completions",
        {"messages": user([{"type": "text", "text": 5}])},
        "messages.0.content.0.text",
        "invalid_type",
    ),
    (
        "/v1/chat/completions",
        {"messages": user([{"type": "text", "text": "a", "image": 5}])},
        "messages.0.content.0.image",
        "unknown_parameter",
    ),
    ("/v1/responses", {"input": 5}, "input", "invalid_type"),
    ("/v1/responses", {"input": [5]}, "input.0", "invalid_type"),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input.0.content.0.type",
        "invalid_value",
    ),
    ("/v1/responses", {"tool_choice": 5}, "tool_choice", "invalid_type"),
    ("/v1/guide/check", {"guided_json": 5}, "guided_json", "invalid_type"),
]

BAD_BODIES = [b"", b"{", b"[" * 50_000, b"\xff\xfe", b"null", b"[1]", b'{"a": 1', b"9" * 50_000]


def post(
    served: Served, body: bytes, path: str = "/v1/chat/completions", **headers: str
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    headers = {"Content-Type": "application/json"} | headers
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    status, answer = response.status, json.loads(response.read())
    connection.close()
    return status, answer


def post_fields(served: Served, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "messages": HI} | fields
    status, answer = post(served, json.dumps(body).encode())
    assert {"message", "type", "param", "code"} <= answer["error"].keys()
    return status, answer["error"]


@pytest.fixture(autouse=True)
def _still_serves(served: Served) -> Any:
    yield
    assert served.chat(max_tokens=2).choices


@pytest.mark.parametrize(("fields", "param", "code"), BAD_FIELDS)
def test_bad_field(served: Served, fields: dict[str, Any], param: str, code: str) -> None:
    status, error = post_fields(served, fields)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code)
    assert "\n" not in error["message"]


@pytest.mark.parametrize(("path", "fields", "param", "code"), BAD_MEMBERS)
def test_a_field_of_several_types_names_the_place_and_no_type(
    served: Served, path: str, fields: dict[str, Any], param: str, code: str
) -> None:
    fitting = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": HI},
        "/v1/responses": {"input": "hi"},
        "/v1/guide/check": {},
    }
    body = {"model": MODEL} | fitting[path] | fields
    status, answer = post(served, json.dumps(body).encode(), path)
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, param, code)
    assert re.fullmatch(r"[\w.\-]+", param)
    assert not re.search(r"\[|validator|\bdict\b", error["message"].removeprefix("Invalid value"))


def test_minus_one_keeps_all_tokens(served: Served) -> None:
    """What vLLM's clients send."""
    fields: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 5}
    texts = {
        served.chat(**fields, extra_body={"top_k": value}).choices[0].message.content
        for value in (-1, 0)
    }
    assert len(texts) == 1


def test_more_answers_than_a_request_may_have(served: Served) -> None:
    limits = dataclasses.replace(LIMITS, choices=9, answers=6)
    with serving(served.engine, limits) as few:
        for fields, param in [
            ({"prompt": ["a"] * 7}, "prompt"),
            ({"prompt": ["a"] * 2, "n": 4}, "prompt"),
            ({"prompt": "a", "n": 7}, "n"),
        ]:
            body = {"model": MODEL, "max_tokens": 1} | fields
            status, answer = post(few, json.dumps(body).encode(), "/v1/completions")
            error = answer["error"]
            assert (status, error["param"], error["code"]) == (400, param, "invalid_value")
            assert "send fewer" in error["message"]
        body = {"model": MODEL, "max_tokens": 1, "prompt": ["a"] * 3, "n": 2}
        status, answer = post(few, json.dumps(body).encode(), "/v1/completions")
        assert (status, len(answer["choices"])) == (200, 6)


def test_what_sampling_refuses_names_its_field() -> None:
    """Values that the types of the request let through, whatever they may become."""
    asked = ChatCompletionRequest.model_construct(temperature=2000.0)
    with pytest.raises(ApiError, match=r"^temperature is 2000\.0; ") as raised:
        asked.answers(LIMITS)
    assert (raised.value.status, raised.value.param) == (400, "temperature")


def test_what_the_engine_refuses_names_its_field() -> None:
    """Predictions have a limit of their own; and with no room for drafts there is no use for any."""
    limits = Limits(completion_tokens=100_000)
    with tiny_engine(CacheSpec(sinks=4, window=60)) as narrow, serving(narrow, limits) as served:
        for name, value in [("lookup", True), ("prediction", predicted("a"))]:
            status, error = post_fields(served, {name: value})
            assert (status, error["param"], error["code"]) == (400, name, "invalid_value")
            assert error["message"].startswith(f"{name} is given, but cache.max_drafts is 0")
        # What asks for no room is served.
        assert served.chat(max_tokens=2, extra_body={"lookup": False, "jump": "force"}).choices
    with tiny_engine() as wide, serving(wide, limits) as served:
        long = predicted("x" * (MAX_PREDICTION_TOKENS + 1))
        status, error = post_fields(served, {"prediction": long})
        assert (status, error["param"], error["code"]) == (400, "prediction", "invalid_value")
        assert str(MAX_PREDICTION_TOKENS) in error["message"]


@pytest.mark.parametrize(("schema", "code"), BAD_SCHEMAS)
def test_bad_schema(served: Served, schema: Any, code: str) -> None:
    status, error = post_fields(served, {"response_format": schema_format(schema)})
    assert (status, error["param"], error["code"]) == (400, "response_format", code)
    assert "Invalid schema for response_format 'answer'" in error["message"]


def test_deep_schema(served: Served) -> None:
    schema: dict[str, Any] = {}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    status, error = post_fields(served, {"response_format": schema_format(schema)})
    assert (status, error["code"]) == (400, "grammar_too_complex")


@pytest.mark.parametrize("body", BAD_BODIES)
def test_bad_body(served: Served, body: bytes) -> None:
    status, answer = post(served, body)
    assert status == 400
    assert answer["error"]["code"] in ("invalid_json", "invalid_body")


def test_other_content_type_says_which(served: Served) -> None:
    body = json.dumps({"model": MODEL, "messages": HI}).encode()
    status, answer = post(served, body, **{"Content-Type": "text/plain"})
    assert status == 415
    assert "application/json" in answer["error"]["message"]


def test_large_body(served: Served) -> None:
    status, answer = post(served, b" " * (LIMITS.body_bytes + 1))
    assert status == 413
    assert answer["error"]["code"] == "request_too_large"


def test_every_unserved_field_is_refused(served: Served) -> None:
    for name in UNSERVED_IN_CHATS:
        status, error = post_fields(served, {name: "something"})
        assert (status, error["param"]) == (400, name)
        assert name in error["message"]
    for name in UNSERVED_IN_MESSAGES:
        status, error = post_fields(served, {"messages": [{**HI[0], name: "something"}]})
        assert (status, error["param"]) == (400, f"messages.0.{name}")


def test_openai_client_raises_its_own_errors(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="n is 9") as raised:
        served.chat(n=9)
    assert raised.value.param == "n"
    with pytest.raises(openai.NotFoundError) as missing:
        served.chat(model="gpt-4o")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="Invalid schema for response_format") as bad:
        served.chat(response_format=schema_format({"type": "nonsense"}), stream=True)
    assert bad.value.code == "invalid_json_schema"


def test_unknown_path_and_method(served: Served) -> None:
    for method, path, status in [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
    ]:
        connection = http.client.HTTPConnection("127.0.0.1", served.port)
        connection.request(method, path)
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
        connection.close()
        assert response.status == status
        assert error["type"] == "invalid_request_error"
        if status == 405:
            assert response.headers["Allow"] in error["message"]


def test_unforeseen_failure_says_nothing_of_the_inside(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*_: Any) -> Any:
        raise RuntimeError("/somewhere/inside.py broke")

    with monkeypatch.context() as patch:
        patch.setattr(served.engine, "prepare", prepare)
        status, error = post_fields(served, {})
    assert (status, error["type"], error["code"]) == (500, "server_error", "internal_error")
    assert "inside.py" not in error["message"]
