"""Completions, several answers at once, likelihoods, and traces."""

import http.client
import json
from typing import Any

import openai
import pytest
from tokenizers import normalizers

from gkv_jax.serve.replies.logprobs import TokenTexts
from grammar_host import TokenizerError
from tests.gkv_jax.serve.conftest import LIMITS, MODEL, Served, serving, tiny_engine
from tests.gkv_jax.serve.test_chat import ENDLESS, SCHEMA, schema_format, text_of


def complete(served: Served, **fields: Any) -> Any:
    defaults = {"model": MODEL, "prompt": "hi", "max_tokens": 12, "seed": 1}
    return served.client.completions.create(**(defaults | fields))


def events(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    """The server-sent events of a request, without the client's types."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps({"model": MODEL, **body}), headers)
    text = connection.getresponse().read().decode()
    connection.close()
    *lines, done = [line.removeprefix("data: ") for line in text.split("\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_completion_continues_a_text_without_a_template(served: Served) -> None:
    completion = complete(served)
    assert completion.object == "text_completion"
    assert completion.usage.prompt_tokens == len("hi")
    assert completion.usage.completion_tokens <= 12
    tokens = served.engine.tokenizer.encode("hi")
    assert complete(served, prompt=tokens).choices[0].text == completion.choices[0].text


def test_each_prompt_has_its_answers_in_order(served: Served) -> None:
    prompts = ["hi", "what", "x" * 40]
    alone = [complete(served, prompt=prompt).choices[0].text for prompt in prompts]
    both = complete(served, prompt=prompts, n=2)
    assert [choice.index for choice in both.choices] == list(range(6))
    assert [choice.text for choice in both.choices[::2]] == alone
    assert both.usage.prompt_tokens == sum(map(len, prompts))
    assert len(both.gkv["choices"]) == 6


def test_a_streamed_completion_is_the_same(served: Served) -> None:
    fields: dict[str, Any] = {
        "prompt": ["hi", "what"],
        "extra_body": {"guided_choice": ["ab", "cd"]},
    }
    whole = complete(served, **fields)
    chunks = list(complete(served, **fields, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert mine[-1].finish_reason == choice.finish_reason
    assert chunks[-1].usage == whole.usage


def test_answers_of_one_request_differ_by_their_seeds(served: Served) -> None:
    fields: dict[str, Any] = {"max_tokens": 30, "response_format": schema_format(ENDLESS)}
    several = served.chat(n=3, seed=4, **fields)
    texts = [choice.message.content for choice in several.choices]
    assert len(set(texts)) == 3
    assert texts == [text_of(served.chat(seed=4 + index, **fields)) for index in range(3)]
    streamed: list[list[str]] = [[], [], []]
    for chunk in served.chat(n=3, seed=4, stream=True, **fields):
        for choice in chunk.choices:
            streamed[choice.index].append(choice.delta.content or "")
    assert ["".join(parts) for parts in streamed] == texts


def test_likelihoods_are_told_for_each_token(served: Served) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "max_tokens": 10}
    completion = served.chat(temperature=0, **fields)
    told = completion.choices[0].logprobs.content
    assert len(told) == completion.usage.completion_tokens
    for entry in told:  # greedy: the sampled token is the likeliest
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert len(entry.top_logprobs) == 3
    streamed = [
        entry
        for chunk in served.chat(temperature=0, stream=True, **fields)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == told


def test_older_likelihoods_have_offsets(served: Served) -> None:
    fields: dict[str, Any] = {"logprobs": 2, "seed": 3, "max_tokens": 60}
    choice = complete(served, **fields).choices[0]
    told = choice.logprobs
    whole = [
        (token, offset)
        for token, offset in zip(told.tokens, told.text_offset, strict=True)
        if len(token) == 1 and token != "\ufffd"
    ]
    # A random model writes parts of characters and special tokens, too.
    assert 0 < len(whole) < len(told.tokens)
    for token, offset in whole:
        assert choice.text[offset : offset + len(token)] == token
    assert all(1 <= len(top) <= 2 for top in told.top_logprobs)
    parts = [c.choices[0].logprobs for c in complete(served, stream=True, **fields) if c.choices]
    assert [each for part in parts if part for each in part.text_offset] == told.text_offset


def test_parts_of_a_character_have_its_offset(served: Served) -> None:
    offsets, tokens = TokenTexts(served.engine).offsets(), served.engine.tokenizer.encode("aé🌊b")
    assert [offsets.push(token) for token in tokens] == [0, 1, 1, 2, 2, 2, 2, 3]


def test_likelihoods_need_no_guides() -> None:
    """A tokenizer that loses letter case serves free text."""
    with tiny_engine() as engine:
        engine.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
        with pytest.raises(TokenizerError):
            _ = engine.compiler
        with serving(engine, LIMITS) as served:
            fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "max_tokens": 60}
            told = served.chat(**fields).choices[0].logprobs.content
            streamed = [
                entry
                for chunk in served.chat(stream=True, **fields)
                if chunk.choices[0].logprobs
                for entry in chunk.choices[0].logprobs.content
            ]
    assert streamed == told
    entries = {entry.token: entry.bytes for each in told for entry in [each, *each.top_logprobs]}
    assert entries.pop("\ufffd") is None
    special = {name: written for name, written in entries.items() if len(name) > 1}
    assert special.keys() <= {"<stop>", "<user>", "<model>", ""}
    assert set(special.values()) <= {None}
    whole = {text: written for text, written in entries.items() if len(text) == 1}
    assert whole
    assert all(written == list(text.encode()) for text, written in whole.items())


def test_a_bias_decides_free_text(served: Served) -> None:
    (token,) = served.engine.tokenizer.encode("q")
    completion = served.chat(logit_bias={str(token): 100}, max_tokens=5)
    assert text_of(completion) == "qqqqq"
    punished = served.chat(
        logit_bias={str(token): 10}, frequency_penalty=2, presence_penalty=2, max_tokens=30
    )
    assert text_of(punished).count("q") < 30


def test_a_grammar_wins_over_a_bias(served: Served) -> None:
    bias = {str(token): -100 for token in range(served.engine.model.vocab_size)}
    fields: dict[str, Any] = {"response_format": schema_format(SCHEMA), "max_tokens": 400}
    assert json.loads(text_of(served.chat(logit_bias=bias, **fields)))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_trace_tells_where_each_token_is_from(served: Served, path: str) -> None:
    prompt = (
        {"prompt": "hi"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "hi"}]}
    )
    body = {"stream": True, "trace": True, "max_tokens": 400, "seed": 2}
    chunks = events(served, path, prompt | body | {"structured_outputs": {"json": SCHEMA}})
    traced = [chunk["gkv"] for chunk in chunks if "trace" in chunk.get("gkv", {})]
    tokens = [token for gkv in traced for token in gkv["trace"]]
    final = chunks[-1]["gkv"]
    assert len(tokens) == final["tokens"]
    assert traced[-1]["position"] == final["prompt_tokens"] + final["tokens"]
    assert {token["source"] for token in tokens} <= {"forced", "sampled"}
    forced = sum(token["source"] == "forced" for token in tokens)
    assert 0 < forced <= final["drafts"]["forced"]["accepted"]  # which counts the stop token, too
    assert all(token["legal"] >= 1 for token in tokens)
    json.loads("".join(token["text"] for token in tokens))


def test_free_text_has_no_count_of_legal_tokens(served: Served) -> None:
    chunks = events(
        served, "/v1/completions", {"prompt": "hi", "stream": True, "trace": True, "max_tokens": 4}
    )
    tokens = [t for chunk in chunks for t in chunk.get("gkv", {}).get("trace", [])]
    assert tokens
    assert {token["legal"] for token in tokens} == {None}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [99_999]}, "prompt"),
        ({"prompt": "x" * 2_001}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_what_a_completion_refuses(served: Served, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        complete(served, **fields)
    assert str(raised.value.param).startswith(param)


def test_a_translated_field_is_served_with_a_warning(served: Served) -> None:
    raw = served.client.completions.with_raw_response.create(
        model=MODEL, prompt="hi", extra_body={"guided_regex": "[ab]"}
    )
    assert raw.parse().choices[0].text in ("a", "b")
    assert "guided_regex" in raw.headers["Warning"]
    plain = served.client.completions.with_raw_response.create(model=MODEL, prompt="hi")
    assert "Warning" not in plain.headers
