"""Routes that generate nothing: tokens, checks of guides, readiness, the description of the rest."""

import http.client
import json
from typing import Any

import pytest

from gkv_jax import scheduler
from tests.gkv_jax.serve.conftest import LIMITS, MODEL, Served, serving, tiny_engine, wait_for

HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def ask(served: Served, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    status, answer = response.status, json.loads(response.read())
    connection.close()
    return status, answer


def test_text_becomes_tokens_and_text_again(served: Served) -> None:
    for text in ("hi", "wörld 🌊", "a\nb"):
        status, told = ask(served, "POST", "/tokenize", {"prompt": text})
        assert (status, told["count"]) == (200, len(told["tokens"]))
        assert told["tokens"] == served.engine.tokenizer.encode(text)
        status, back = ask(served, "POST", "/detokenize", {"tokens": told["tokens"]})
        assert (status, back) == (200, {"prompt": text})


def test_messages_become_the_prompt_that_is_read(served: Served) -> None:
    body = {"messages": HI, "return_token_strs": True}
    status, told = ask(served, "POST", "/tokenize", body)
    assert status == 200
    assert told["count"] == served.chat(messages=HI).usage.prompt_tokens
    assert len(told["token_strs"]) == told["count"]
    assert "".join(told["token_strs"]) == "<user>hi<model>"
    shorter = ask(served, "POST", "/tokenize", body | {"add_generation_prompt": False})[1]
    assert shorter["count"] == told["count"] - 1


@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_a_conversation_with_calls_is_read_as_for_an_answer(
    served: Served, tools: list[Any] | None
) -> None:
    brief = {"role": "developer", "content": "Be brief."}
    result = {"role": "tool", "tool_call_id": "a", "content": "rain"}
    fields: dict[str, Any] = {"messages": [brief, *HI, CALLING, result]}
    if tools is not None:
        fields["tools"] = tools
    body = fields | {"return_token_strs": True}
    status, told = ask(served, "POST", "/tokenize", body)
    assert status == 200
    assert told["count"] == served.chat(max_tokens=1, **fields).usage.prompt_tokens
    text = "".join(told["token_strs"])
    assert text.startswith("<system>")
    assert "weather" in text
    assert "rain" in text
    assert ("# Tools" in text) == (tools is not None)


def test_no_text_has_no_tokens(served: Served) -> None:
    status, told = ask(served, "POST", "/tokenize", {"prompt": ""})
    assert (status, told["tokens"]) == (200, [])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "messages"),
        ("/tokenize", {"prompt": "a", "tools": [WEATHER]}, "tools"),
        ("/tokenize", {"tools": [WEATHER]}, "prompt"),
        ("/tokenize", {"messages": [CALLING]}, "messages.0.tool_calls.0"),
        ("/tokenize", {"prompt": "x" * (LIMITS.prompt_tokens + 1)}, "prompt"),
        ("/tokenize", {"messages": [HI[0] | {"content": "x" * LIMITS.prompt_tokens}]}, "messages"),
        ("/tokenize", {"prompt": "a\0"}, "prompt"),
        ("/detokenize", {"tokens": [99_999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/v1/guide/check", {}, None),
        ("/v1/guide/check", {"regex": "("}, "regex"),
        ("/v1/guide/check", {"regex": "a", "lark": "b"}, "lark"),
    ],
)
def test_bad_bodies_name_the_field(
    served: Served, path: str, body: dict[str, Any], param: str | None
) -> None:
    status, answer = ask(served, "POST", path, body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_another_model_is_not_found(served: Served) -> None:
    for path, body in [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})]:
        status, answer = ask(served, "POST", path, body | {"model": "other"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_a_guide_can_be_checked_without_an_answer(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    status, told = ask(served, "POST", "/v1/guide/check", {"guided_json": schema})
    assert status == 200
    assert (told["valid"], told["kind"], told["exact"]) == (True, "json_schema", True)
    body = {"structured_outputs": {"json": schema, "backend": "xgrammar"}}
    assert ask(served, "POST", "/v1/guide/check", body)[1]["backend"] == "xgrammar"
    schema["properties"] = {"a": {"type": "nonsense"}}
    status, told = ask(served, "POST", "/v1/guide/check", {"json_schema": schema})
    assert (status, told["error"]["pointer"]) == (400, "/properties/a/type")


def test_the_model_says_how_it_is_served(served: Served) -> None:
    (model,) = served.client.models.list().data
    facts = model.model_extra["gkv"]
    assert facts["slots"] == served.engine.slots
    assert facts["cache"]["window"] == served.engine.spec.window
    assert facts["limits"]["prompt_tokens"] == LIMITS.prompt_tokens
    assert "llguidance" in facts["backends"]
    assert model.id == MODEL


def test_ready_follows_the_server(served: Served) -> None:
    assert ask(served, "GET", "/ready") == (200, {"status": "ready"})


def test_a_closed_engine_is_draining() -> None:
    with tiny_engine() as engine, serving(engine, LIMITS) as served:
        engine.close()
        assert ask(served, "GET", "/ready") == (503, {"status": "draining"})
        status, told = ask(served, "GET", "/health")
        assert (status, told["error"]["code"]) == (503, "shutting_down")


def test_an_engine_that_failed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the device is gone")

    with tiny_engine() as engine, serving(engine, LIMITS) as served:
        monkeypatch.setattr(scheduler, "device_loop", fails)
        monkeypatch.setattr(scheduler, "init_cache", fails)
        body = {"model": MODEL, "prompt": "hi"}
        assert ask(served, "POST", "/v1/completions", body)[0] >= 500
        wait_for(lambda: engine.closed)
        assert ask(served, "GET", "/ready") == (503, {"status": "failed"})
        status, told = ask(served, "GET", "/health")
        assert (status, told["error"]["code"]) == (503, "engine_failed")


def test_every_route_is_described_with_its_errors(served: Served) -> None:
    _, described = ask(served, "GET", "/openapi.json")
    paths = described["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"):
        responses = paths[path]["post"]["responses"]
        assert {"200", "400", "429", "503"} <= responses.keys()
        assert "422" not in responses
    assert "/" not in paths  # the page is for people
