"""Requests that nobody has thought of: none brings a route down, and each error says what it is.

Two generators: schemathesis reads ``/openapi.json``, and our own breaks requests that are good.
"""

import copy
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.gkv_jax.serve.conftest import MODEL, tiny_engine
from tests.gkv_jax.serve.stack import Answer, Stack, in_process, small
from tests.grammar_host.hostile import CORPUS
from tests.grammar_host.hostile_generator import generate

SCHEMATHESIS = Path(sys.prefix) / "schemathesis" / "bin" / "st"

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "weather",
    "description": "of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
SAMPLED = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "logit_bias": {"65": 5}, "seed": 3, "stop": ["x", "yz"], "n": 2,
    "timeout": 2.5, "lookup": True, "jump": "force", "user": "u",
    "prediction": {"type": "content", "content": "abc"},
}  # fmt: skip
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}

GOOD: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
            "max_completion_tokens": 6,
            "logprobs": True,
            "top_logprobs": 2,
            **SAMPLED,
        },
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 12,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "strict": True, "schema": PERSON},
            },
        },
        {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
            ],
            "max_tokens": 8,
            "tools": [{"type": "function", "function": WEATHER}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
        },
    ],
    "/v1/completions": [
        {"model": MODEL, "prompt": ["hi", "ho"], "max_tokens": 5, "logprobs": 1, **SAMPLED},
        {
            "model": MODEL,
            "prompt": [72, 105],
            "max_tokens": 9,
            "structured_outputs": {"json": PERSON, "disable_any_whitespace": True},
        },
    ],
    "/v1/responses": [
        {
            "model": MODEL,
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "instructions": "Be brief.",
            "max_output_tokens": 12,
            "text": {"format": {"type": "json_schema", "name": "person", "schema": PERSON}},
            "temperature": 0.5,
        },
        {
            "model": MODEL,
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "rain"},
            ],
            "max_output_tokens": 8,
            "tools": [{"type": "function", **WEATHER}],
            "tool_choice": "required",
        },
    ],
    "/tokenize": [
        {"model": MODEL, "prompt": "hi", "add_special_tokens": False, "return_token_strs": True},
        {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False},
    ],
    "/detokenize": [{"model": MODEL, "tokens": [72, 105]}],
    "/v1/guide/check": [{"guided_regex": "a+"}, {"response_format": {"type": "json_object"}}],
}
"""Requests that are served, by route."""

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

LONE = "\ud800"
ODD_VALUES = (
    None, True, False, 0, 1, -1, 2, 16, 17, 10**6, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.0, -0.0, 0.5,
    1.5, 5e-324, 1e308, math.inf, -math.inf, math.nan, "", "a", "\0", LONE, "é😀\u2028", "a" * 5000, "1",
    "auto", "none", "null", "<stop>", "</s>", "{}", "[", [], [[]], [None], ["a"] * 40, [0] * 3000, {},
    {"": 1}, {"\0": {LONE: []}}, {"type": "function"}, {"$ref": "#"}, {"a": 1} | {"type": "object"},
)  # fmt: skip
ODD_KEYS = ("", "a", "\0", LONE, "model", "messages", "stream", "n", "__class__", "extra_body", "é")
NESTS = ("[", '{"a":', '{"not":', '{"items":', '{"properties":{"a":')
ENDS = {"[": "]", '{"a":': "}", '{"not":': "}", '{"items":': "}", '{"properties":{"a":': "}}"}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each place in a JSON value: its container and the key or index there."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return []
    return [(value, key) for key, _ in items] + [place for _, v in items for place in places(v)]


def broken(body: Any, rng: random.Random) -> bytes:
    """A good body after some mutations; not always bad."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = places(body)
        if not found:
            break
        container, key = rng.choice(found)
        match rng.randrange(7):
            case 0:
                del container[key]
            case 1 | 2:
                container[key] = copy.deepcopy(rng.choice(ODD_VALUES))
            case 3:
                container[key] = [container[key]] if rng.random() < 0.5 else {"a": container[key]}
            case 4 if isinstance(container, dict):
                container[rng.choice(ODD_KEYS)] = copy.deepcopy(rng.choice(ODD_VALUES))
            case 4 | 5:
                other, there = rng.choice(found)
                container[key] = json.loads(json.dumps(other[there])) if there in keys(other) else 0
            case 6:
                container[key] = "\x01nest"
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    nest, depth = rng.choice(NESTS), rng.choice((5, 70, 500, 5_000, 40_000))
    text = text.replace('"\\u0001nest"', nest * depth + "1" + ENDS[nest] * depth, 1)
    if rng.random() < 0.05:
        text = rng.choice((text[: rng.randrange(len(text))], text + "x", text.replace(":", ",", 1)))
    if rng.random() < 0.05 and text.startswith("{") and len(text) > 2:
        text = "{" + text[1:-1] + "," + text[1:]  # each key twice
    return text.encode("utf-8", rng.choice(("surrogatepass", "replace")))


def keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def hostile(rng: random.Random) -> bytes:
    """A good body, but for what constrains its answer."""
    corpus = list(CORPUS.values())
    asked = rng.choice(corpus) if rng.random() < 0.3 else generate(rng.randrange(2**32))
    path_of = {
        "json": ("structured_outputs", "json_object"), "json_schema": ("structured_outputs", "json"),
        "regex": ("structured_outputs", "regex"), "grammar": ("structured_outputs", "grammar"),
        "lark": ("structured_outputs", "lark"), "choice": ("structured_outputs", "choice"),
        "structural_tag": ("structured_outputs", "structural_tag"),
    }  # fmt: skip
    outer, inner = path_of[asked.kind]
    value = True if asked.kind == "json" else asked.value
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 12, outer: {inner: value}}
    if "whitespace_pattern" in asked.options:
        body[outer]["whitespace_pattern"] = asked.options["whitespace_pattern"]
    if rng.random() < 0.5:
        body["backend"] = rng.choice(("llguidance", "xgrammar", "outlines", "auto"))
    try:
        text = json.dumps(body, default=str)
    except RecursionError:  # deeper than our own encoder goes
        text = json.dumps(body | {outer: {inner: "\x01nest"}})
        text = text.replace('"\\u0001nest"', '{"not":' * 60_000 + "{}" + "}" * 60_000)
    return text.encode("utf-8", "surrogatepass")


class Judge:
    """Holds answers against what ``/openapi.json`` says of them."""

    def __init__(self, stack: Stack) -> None:
        self.description = stack.send("GET", "/openapi.json").json

    def check(self, path: str, answer: Answer, asked: bytes = b"") -> None:
        """Raises AssertionError unless the answer is one that the description allows."""
        code = None
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.status == 200
            last = answer.events[-1]
            failure = last.get("error") or (last.get("response") or {}).get("error")
            code = failure and failure["code"]
        else:
            if answer.status != 200:
                code = answer.error["code"]
            self._validate(path, str(answer.status), answer.json)
        known = (answer.status < 500 and code not in UNKNOWN) or (
            answer.status,
            code,
        ) in SERVER_ERRORS
        assert known, (answer, asked[:2000])

    def _validate(self, path: str, status: str, body: Any) -> None:
        responses = self.description["paths"][path]["post"]["responses"]
        assert status in responses, f"{path} does not say that it may answer {status}"
        schema = responses[status]["content"]["application/json"]["schema"]
        root = {**schema, "components": self.description["components"]}
        jsonschema.Draft202012Validator(root).validate(body)


UNKNOWN = ("internal_error", "generation_failed")
"""Codes of errors, in the middle of a stream too, that say that the server does not know what happened."""
SERVER_ERRORS = {(500, "dead_end"), (503, "shutting_down"), (504, "request_timeout")}
"""What may fail although the server is in order."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with tiny_engine() as engine, in_process(engine, small(limits={"request_seconds": 5})) as run:
        yield run


@pytest.fixture(scope="module")
def judge(stack: Stack) -> Judge:
    return Judge(stack)


def cases(ci: int, full: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("count", [ci, pytest.param(full, marks=pytest.mark.full)])


@pytest.mark.parametrize("path", GOOD)
def test_the_requests_that_are_broken_below_are_good(stack: Stack, judge: Judge, path: str) -> None:
    for body in GOOD[path]:
        answer = stack.post(path, body)
        assert answer.status == 200, answer.body
        judge.check(path, answer)


@cases(400, 10_000)
def test_broken_requests(stack: Stack, judge: Judge, count: int) -> None:
    for seed in range(count):
        rng = random.Random(seed)
        path = rng.choice(list(GOOD))
        body = rng.choice(GOOD[path])
        if path in GENERATING and rng.random() < 0.5:
            body = body | {"stream": True}
        asked = broken(body, rng)
        judge.check(path, stack.send("POST", path, asked), asked)
    stack.assert_idle()


@cases(60, 2_000)
def test_hostile_guides(stack: Stack, judge: Judge, count: int) -> None:
    for seed in range(count):
        asked = hostile(random.Random(seed))
        judge.check("/v1/completions", stack.send("POST", "/v1/completions", asked), asked)
    stack.assert_idle()


def described(description: dict[str, Any]) -> dict[str, Any]:
    """The description, that of the model's name narrowed to the one that is served."""
    description = copy.deepcopy(description)
    for component in description["components"]["schemas"].values():
        if "model" in component.get("properties", {}):
            component["properties"]["model"] = {"const": MODEL}
    return description


@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="`make test` installs schemathesis")
@pytest.mark.parametrize(
    ("phases", "count"),
    [("fuzzing", 50), pytest.param("coverage,fuzzing", 1_700, marks=pytest.mark.full)],
)
def test_schemathesis(stack: Stack, judge: Judge, tmp_path: Path, phases: str, count: int) -> None:
    """``count`` for each of the six routes, and in the phase "coverage" some 3000 of its own choice."""
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(described(judge.description)))
    (tmp_path / "schemathesis.toml").write_text(EXPECTED)
    command = [
        SCHEMATHESIS, "run", path, "--url", f"http://127.0.0.1:{stack.port}",
        "--include-method", "POST", "--phases", phases, "--max-examples", count,
        "--checks", CHECKS, "--generation-deterministic", "--no-shrink", "--continue-on-failure",
        "--suppress-health-check", "all", "--request-timeout", "60", "--no-color",
    ]  # fmt: skip
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    stack.assert_idle()


CHECKS = ",".join(
    (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    )
)

EXPECTED = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", "503", "504"]
"""
