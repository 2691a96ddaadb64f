"""Logit bias and penalties: against an oracle in NumPy, with drafts, and beside rows without any."""

import collections
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkv_jax import DraftModel, Engine, Guide, Result, Sampling, ScriptedDrafts
from gkv_jax.bias import LogitBias
from gkv_jax.bridge import Session
from gkv_jax.step import bias_of_queries
from tests.gkv_jax.engines import CONFIG, MODEL, PARAMS, SPEC, TOKENIZER, make_engine
from tests.gkv_jax.oracle import ListCache

V = CONFIG.vocab_size
PROMPT = "Once upon"

PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.2},
    {"presence_penalty": 0.7, "frequency_penalty": -2.0},  # rewards repetition
    {"logit_bias": {7: 6.0, 80: -100.0, 81: 5.5, 289: 4}, "frequency_penalty": 0.8},
]


def run(engine: Engine, samplings: Sequence[Sampling], **options: Any) -> list[Result]:
    results = engine.generate([PROMPT] * len(samplings), sampling=samplings, **options)
    assert [r.error for r in results] == [None] * len(samplings)
    return results


def tokens_of(results: list[Result]) -> list[tuple[int, ...]]:
    return [result.tokens for result in results]


# The sums -----------------------------------------------------------------------------------------

SAMPLINGS = st.builds(
    Sampling,
    logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-100, 100)),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
)
OUTPUTS = st.lists(st.integers(0, 9), max_size=20)


def expected_sums(sampling: Sampling, output: Sequence[int]) -> np.ndarray:
    """Float64 ``[10]``, as OpenAI's documentation defines them."""
    sums, counts = np.zeros(10), collections.Counter(output)
    for token, value in dict(sampling.logit_bias).items():
        sums[token] += value
    for token, count in counts.items():
        sums[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    return sums


@settings(deadline=None, max_examples=50)
@given(sampling=SAMPLINGS, output=OUTPUTS, drafts=st.lists(st.integers(0, 9), max_size=3))
def test_each_query_sees_the_output_and_the_drafts_before_it(
    sampling: Sampling, output: list[int], drafts: list[int]
) -> None:
    """To the last bit what a step without drafts would see there."""
    bias = LogitBias(sampling, 10)
    bias.count(output[:5])
    bias.count(output[5:])
    line = np.zeros(13, np.float32)
    bias.fill(line, drafts)
    tokens = np.zeros((2, 4), np.int32)
    tokens[1, 1 : 1 + len(drafts)] = drafts
    lines = jnp.asarray(np.stack([np.zeros_like(line), line]))
    sums = np.asarray(bias_of_queries(lines, jnp.asarray(tokens)))
    assert not sums[0].any()
    for query in range(len(drafts) + 1):
        seen = [*output, *drafts[:query]]
        np.testing.assert_allclose(
            sums[1, query], expected_sums(sampling, seen), rtol=1e-6, atol=1e-30
        )
        plain = LogitBias(sampling, 10)
        for token in seen:
            plain.count([token])
        alone = np.zeros(10, np.float32)
        plain.fill(alone, [])
        np.testing.assert_array_equal(sums[1, query], alone)


@pytest.mark.parametrize(
    "neutral", [{}, {"logit_bias": {}}, {"logit_bias": {5: 0}}, {"presence_penalty": 0}]
)
def test_what_changes_nothing_costs_nothing(neutral: dict[str, Any]) -> None:
    assert LogitBias.of(Sampling(**neutral), V) is None


# Through the engine -------------------------------------------------------------------------------


def greedy_oracle(sampling: Sampling) -> tuple[int, ...]:
    """Tokens of the float64 model with float64 sums."""
    model = ListCache(CONFIG, PARAMS, SPEC)
    text, output = list(TOKENIZER.encode(PROMPT)), list[int]()
    for at, token in enumerate(text):
        logits = model.step(token, at)
    while len(output) < sampling.max_tokens:
        sums = np.zeros(V)
        for token, value in dict(sampling.logit_bias).items():
            sums[token] += value
        for token, count in collections.Counter(output).items():
            sums[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
        output.append(int((logits + sums).argmax()))
        logits = model.step(output[-1], len(text) + len(output) - 1)
    return tuple(output)


def test_greedy_tokens_are_the_oracles(engine: Engine) -> None:
    """Also where the drafts are the oracle's, so that all queries of a step count."""
    # No stop token, so that every text is as long.
    cases = [
        {**case, "logit_bias": {**case.get("logit_bias", {}), 256: -100.0}} for case in PENALTIES
    ]
    samplings = [Sampling(max_tokens=24, **case) for case in cases]
    expected = [greedy_oracle(sampling) for sampling in samplings]
    unbiased = greedy_oracle(Sampling(max_tokens=24, logit_bias={256: -100.0}))
    assert len({unbiased, *expected}) == 1 + len(expected)
    assert tokens_of(run(engine, samplings)) == expected
    drafted = run(engine, samplings, drafts=[ScriptedDrafts(tokens) for tokens in expected])
    assert tokens_of(drafted) == expected
    for result in drafted:
        assert result.stats["drafts_accepted"] == result.stats["drafts_proposed"] >= 15


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 2**32 - 1))
def test_drafts_never_change_the_output(engine: Engine, seed: int) -> None:
    """Right and wrong ones, and tokens that occur several times among them."""
    samplings = [
        Sampling(max_tokens=20, temperature=1.0, seed=seed + i, **case)
        for i, case in enumerate(PENALTIES)
    ]
    plain = tokens_of(run(engine, samplings))
    rng, drafts = np.random.default_rng(seed), []
    for tokens in plain:
        guess = np.array([*tokens, 5, 5, 6])
        wrong = rng.random(len(guess)) < rng.choice([0.0, 0.2, 1.0])
        guess[wrong] = rng.choice(guess, wrong.sum())
        drafts.append(ScriptedDrafts(tuple(guess.tolist())))
    assert tokens_of(run(engine, samplings, drafts=drafts)) == plain


def test_both_drivers_and_a_draft_model_give_the_same() -> None:
    """The draft model guesses without bias; its guesses are only that."""
    samplings = [Sampling(max_tokens=25, temperature=0.8, seed=3, **case) for case in PENALTIES]
    draft = DraftModel(MODEL, PARAMS, TOKENIZER, SPEC)
    outputs = []
    for options in ({}, {"loop": "host"}, {"draft": draft}):
        with make_engine(**options) as engine:
            results = run(engine, samplings)
        outputs.append(tokens_of(results))
        if "draft" in options:
            assert all(r.stats["drafts"]["model"]["accepted"] > 0 for r in results)
    assert all(output == outputs[0] for output in outputs)


def test_the_strongest_bias_decides(engine: Engine) -> None:
    free = Sampling(max_tokens=12, temperature=1.0, seed=1)
    (wanted,) = run(engine, [Sampling(max_tokens=12, temperature=1.0, logit_bias={65: 100})])
    assert wanted.tokens == (65,) * 12
    (plain,) = run(engine, [free])
    banned = dict.fromkeys(plain.tokens, -100.0)
    (without,) = run(engine, [Sampling(max_tokens=12, temperature=1.0, seed=1, logit_bias=banned)])
    assert not set(without.tokens) & set(plain.tokens)


def test_a_grammar_wins(engine: Engine) -> None:
    everything = dict.fromkeys(range(V), -100.0)
    most = dict.fromkeys(range(97, 123), -100.0) | {48: 100.0}
    for bias in (everything, most):
        for temperature in (0.0, 1.0):
            sampling = Sampling(temperature=temperature, logit_bias=bias, frequency_penalty=2.0)
            guide = Guide.choice(["yes", "no", "perhaps"])
            (result,) = run(engine, [sampling], guide=guide)
            assert result.text in ("yes", "no", "perhaps")


def test_the_same_bias_for_all_is_none(engine: Engine) -> None:
    everything = dict.fromkeys(range(V), -100.0)
    (plain,) = run(engine, [Sampling(max_tokens=12)])
    (biased,) = run(engine, [Sampling(max_tokens=12, logit_bias=everything, logprobs=1)])
    assert biased.tokens == plain.tokens
    assert biased.logprobs is not None
    assert all(np.isfinite(entry.logprob) for entry in biased.logprobs)


def test_neighbours_have_the_same_bits_and_logprobs_are_the_models_own() -> None:
    plain = Sampling(max_tokens=15, temperature=1.0, seed=8, logprobs=20)
    biased = Sampling(max_tokens=15, seed=2, logit_bias={65: 100}, logprobs=20)
    with make_engine(head="full") as engine:
        (alone,) = run(engine, [plain])
        beside, other = run(engine, [plain, biased])
    assert beside.tokens == alone.tokens
    assert beside.logprobs == alone.logprobs
    assert other.logprobs is not None
    assert alone.logprobs is not None
    # Of the same text, the first token's are the same whatever was added.
    assert other.logprobs[0].top == alone.logprobs[0].top
    assert other.logprobs[0].logprob < -1.0


def test_only_steps_with_a_biased_row_fetch_anything(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    collect_bias = Session.collect_bias

    def counted(self: Session) -> np.ndarray:
        calls.append(1)
        return collect_bias(self)

    monkeypatch.setattr(Session, "collect_bias", counted)
    filtered = Sampling(max_tokens=20, temperature=1.0, top_k=5, logprobs=1)
    run(engine, [Sampling(max_tokens=20), filtered])
    assert calls == []
    biased = Sampling(max_tokens=5, presence_penalty=1.0)
    _, result = run(engine, [Sampling(max_tokens=40), biased])
    assert len(calls) == result.stats["forwards"] == 5


@pytest.mark.parametrize("options", [{}, {"loop": "host"}], ids=["device", "host"])
def test_asking_compiles_nothing(options: dict[str, Any], compiles: list[str]) -> None:
    # Of a size of its own, so that no other test has compiled for it.
    with make_engine(**options, slots=2) as engine:
        engine.warm_up()
        compiles.clear()
        for case in ({}, *PENALTIES):
            run(engine, [Sampling(max_tokens=9, **case)])
            run(engine, [Sampling(max_tokens=9, lookup=True, **case), Sampling(max_tokens=9)])
    assert compiles == []


def test_a_token_beyond_the_vocabulary_is_refused(engine: Engine) -> None:
    (result,) = engine.generate(PROMPT, sampling=Sampling(logit_bias={3: 1, V: 1}))
    assert str(result.error) == f"sampling.logit_bias names token {V}, beyond the model's {V}"
