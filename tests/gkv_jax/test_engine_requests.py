"""What a request may be made of, and what it tells about itself on the way."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkv_jax import CacheSpec, Engine, Guide, Sampling, ScriptedDrafts, UserError
from gkv_jax.request import Request, TokenTrace
from tests.gkv_jax.engines import MODEL, PARAMS, SPEC, TOKENIZER, make_engine
from tests.gkv_jax.tiny import STOP, byte_tokenizer

# Prompts ------------------------------------------------------------------------------------------


def test_token_ids_are_a_prompt(engine: Engine) -> None:
    ids = TOKENIZER.encode("Once")
    text, alone, *several = [
        engine.generate(prompts, sampling=Sampling(max_tokens=5))
        for prompts in ("Once", ids, [ids, tuple(ids), "Once"])
    ]
    assert alone[0].tokens == text[0].tokens
    assert [result.tokens for result in several[0]] == [text[0].tokens] * 3
    assert engine.encode(ids) == tuple(ids) == engine.encode("Once")


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([5, -1], "prompt holds -1, which is no token id; they are integers from 0 to 289"),
        ([290], "prompt holds 290"),
        ([1, "x"], "prompt holds 'x'"),
        ([1, True], "prompt holds True"),
        ([], "prompt is empty"),
        (7, "prompt is 7; give a string, a list of messages or token ids"),
    ],
)
def test_what_is_no_prompt_is_refused(engine: Engine, prompt: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        engine.encode(prompt)


def test_tools_go_into_the_chat_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t['name'] }};{% endfor %}{{ messages[0]['content'] }}"
    )
    with Engine(MODEL, PARAMS, tokenizer, cache=SPEC) as engine:
        messages, tools = [{"role": "user", "content": "hi"}], [{"name": "look"}, {"name": "see"}]
        assert tokenizer.decode(engine.encode(messages, tools=tools)) == "look;see;hi"
        assert tokenizer.decode(engine.encode(messages)) == "hi"
        with pytest.raises(UserError, match="tools are given, but prompt is no chat"):
            engine.encode("hi", tools=tools)


def test_requests_may_share_a_compiled_grammar(engine: Engine) -> None:
    grammar = engine.compiler.compile(Guide.choice(["yes", "no"]))
    requests = [
        engine.prepare("x", grammar, Sampling(temperature=1.0, seed=seed)) for seed in range(4)
    ]
    for request in requests:
        engine.submit(request)
    results = [request.result() for request in requests]
    assert {result.text for result in results} <= {"yes", "no"}
    assert all(result.stats["backend"] == grammar.backend for result in results)
    with pytest.raises(UserError, match="backend is 'xgrammar', but the guide is compiled"):
        engine.prepare("x", grammar, backend="xgrammar")
    with pytest.raises(UserError, match="guide is 'abc'; give a Guide, or a compiled Grammar"):
        engine.prepare("x", "abc")


# Gauges -------------------------------------------------------------------------------------------


def test_gauges_of_the_engine() -> None:
    with make_engine() as engine:
        assert (engine.queued, engine.active, engine.closed) == (0, 0, False)
        (result,) = engine.generate("x", sampling=Sampling(max_tokens=1))
        assert engine.cache_bytes == result.stats["cache_bytes"]
        guide, sampling = Guide.regex("[a-z]*X"), Sampling(max_tokens=100_000)
        requests = [engine.prepare("go", guide, sampling) for _ in range(engine.slots + 2)]
        for request in requests:
            engine.submit(request)
        next(requests[engine.slots - 1].pieces())
        assert (engine.queued, engine.active) == (2, engine.slots)
    assert engine.closed


def test_times_of_a_request(engine: Engine) -> None:
    request = engine.prepare("x", sampling=Sampling(max_tokens=3))
    assert request.first_token == 0.0
    engine.submit(request)
    stats = request.result().stats
    assert request.submitted < request.admitted < request.first_token <= request.ended
    assert stats["ttft_seconds"] == request.first_token - request.submitted
    (result,) = engine.generate("", sampling=Sampling(max_tokens=3))
    assert result.stats["ttft_seconds"] == 0.0


EVICTING = {
    "window": SPEC,
    "snapkv, then h2o": CacheSpec(
        policy="snapkv", decode="h2o", sinks=2, kept=8, window=16, interval=4
    ),
}


@pytest.mark.parametrize("name", EVICTING)
def test_evicted_tokens_are_those_that_a_report_misses(name: str) -> None:
    with make_engine(cache=EVICTING[name]) as engine:
        lengths = [(1, 3), (20, 1), (26, 30), (27, 9), (28, 2), (60, 33)]
        results = engine.generate(
            ["x" * prompt for prompt, _ in lengths],
            guide=Guide.regex("[a-z]*X"),
            sampling=[Sampling(max_tokens=most) for _, most in lengths],
            report=True,
        )
    for result in results:
        assert result.report is not None
        assert {result.stats["evicted_tokens"]} == {
            count for layer in result.report.layers for count in layer.evicted
        }
    assert results[0].stats["evicted_tokens"] == 0 < results[-1].stats["evicted_tokens"]


# Traces -------------------------------------------------------------------------------------------


def traced(engine: Engine, prompt: str, *args: Any) -> tuple[Request, list[TokenTrace]]:
    request = engine.prepare(prompt, *args, trace=True)
    engine.submit(request)
    pieces = list(request.pieces())
    assert all(len(piece.trace) == len(piece.tokens) for piece in pieces)
    trace = list(itertools.chain.from_iterable(piece.trace for piece in pieces))
    assert [entry.token for entry in trace] == request.tokens
    return request, trace


def test_a_trace_counts_what_the_grammar_allowed(engine: Engine) -> None:
    _, trace = traced(engine, "x", Guide.regex("[a-c]{2}[0-9]zz"), Sampling(jump="off"))
    assert [entry.legal for entry in trace] == [3, 3, 10, 1, 1]
    assert {entry.source for entry in trace} == {"sampled"}
    assert "".join(entry.text for entry in trace)[-2:] == "zz"
    _, free = traced(engine, "Once", None, Sampling(max_tokens=4))
    assert [entry.legal for entry in free] == [None] * len(free)
    request = engine.prepare("Once", sampling=Sampling(max_tokens=4))
    engine.submit(request)
    assert all(piece.trace == () for piece in request.pieces())


def test_a_trace_names_who_guessed_a_token(engine: Engine) -> None:
    guide = Guide.regex("(ab|cd)(xy){3}")
    for jump, source in (("verify", "forced"), ("off", "custom")):
        request, trace = traced(
            engine,
            "x",
            guide,
            Sampling(jump=jump),
            ScriptedDrafts(tuple(TOKENIZER.encode("zbxyxyxy"))),
        )
        tallies = request.result().stats["drafts"]
        by_source = [entry.source for entry in trace]
        assert by_source.count(source) == tallies[source]["accepted"] > 0
        assert by_source.count("sampled") == len(trace) - sum(
            t["accepted"] for t in tallies.values()
        )
        assert [entry.legal for entry in trace] == [2] + [1] * 7


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), lookup=st.booleans())
def test_a_trace_does_not_depend_on_drafts_but_for_its_sources(
    engine: Engine, seed: int, lookup: bool
) -> None:
    guide = Guide.regex("([ab]c?d|efg){4,9}")
    options = {"temperature": 1.5, "seed": seed, "max_tokens": 30}
    _, plain = traced(engine, "acdbcdefg", guide, Sampling(jump="off", **options))
    _, drafted = traced(engine, "acdbcdefg", guide, Sampling(lookup=lookup, **options))
    assert [(e.token, e.text, e.legal) for e in drafted] == [
        (e.token, e.text, e.legal) for e in plain
    ]


def test_parts_of_characters_and_special_tokens_have_a_text() -> None:
    with make_engine() as engine:
        _, trace = traced(engine, "x", Guide.choice(["é!"]), Sampling())
        assert [entry.text for entry in trace] == ["\ufffd", "\ufffd", "!"]
        assert engine.prepare("x").text_stream.alone(STOP) == "<stop>"
