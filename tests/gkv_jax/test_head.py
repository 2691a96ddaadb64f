"""The three ways to read the LM head: where tokens are legal, whole, and whole with log-probabilities."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkv_jax import CacheSpec, Engine, Guide, Result, Sampling, ScriptedDrafts, UserError
from gkv_jax.cache import init_cache
from gkv_jax.models.llama import Llama
from gkv_jax.prefill import chunk_hidden
from gkv_jax.step import _top_k_by_passes
from tests.gkv_jax.tiny import byte_tokenizer, random_params, text_config

# Wide enough for tiles of the vocabulary; the tokenizer's 259 tokens lie in five of the first.
CONFIG = text_config(vocab_size=4096)
MODEL = Llama(CONFIG)
PARAMS = random_params(CONFIG)
TOKENIZER = byte_tokenizer()
SPEC = CacheSpec.full(128, max_drafts=2)

# Whatever the clock says: a test counts the passes that drafts save.
make = functools.partial(Engine, MODEL, PARAMS, TOKENIZER, cache=SPEC, slots=3, verify="always")

NARROW: list[tuple[str, Guide | None, Sampling]] = [
    ("Once", Guide.regex("[a-z]{3,12}"), Sampling(max_tokens=20)),
    ("x", Guide.choice(["yes", "no", "perhaps"]), Sampling(temperature=1.0, seed=3)),
    ("n", Guide.regex(r"-?\d{2,9}\."), Sampling(temperature=1.5, seed=4)),
]
WIDE: list[tuple[str, Guide | None, Sampling]] = [
    ("Free", None, Sampling(max_tokens=15)),
    ("Free", None, Sampling(max_tokens=15, temperature=0.8, seed=9)),
    ("Say", Guide.regex("[A-Z][a-z]{9}"), Sampling(temperature=1.0, top_k=5, top_p=0.9, seed=1)),
]


@pytest.fixture(scope="module")
def masked() -> Iterator[Engine]:
    with make() as engine:
        yield engine


@pytest.fixture(scope="module")
def full() -> Iterator[Engine]:
    with make(head="full") as engine:
        yield engine


def run(engine: Engine, work: list[tuple[str, Guide | None, Sampling]]) -> list[Result]:
    prompts, guides, samplings = zip(*work, strict=True)
    results = engine.generate(list(prompts), guide=list(guides), sampling=list(samplings))
    assert [r.error for r in results] == [None] * len(work)
    return results


def outputs(results: list[Result]) -> list[Any]:
    return [(r.tokens, r.text, r.finish_reason) for r in results]


@pytest.mark.parametrize("work", [NARROW, WIDE, NARROW + WIDE], ids=["narrow", "wide", "mixed"])
def test_the_output_does_not_depend_on_how_the_head_is_read(
    work: list[tuple[str, Guide | None, Sampling]], masked: Engine, full: Engine
) -> None:
    expected = outputs(run(full, work))
    assert outputs(run(masked, work)) == expected
    with make(loop="host") as engine:
        assert outputs(run(engine, work)) == expected


def test_stats_say_how_much_of_the_head_was_read(masked: Engine, full: Engine) -> None:
    """256 byte tokens and the stop token: five tiles of 64 in 4096 tokens at most."""
    for result in run(masked, NARROW):
        assert 64 / 4096 <= result.stats["head_fraction"] <= 5 * 64 / 4096
    for result in [*run(masked, WIDE), *run(full, NARROW)]:
        assert result.stats["head_fraction"] == 1.0


def test_idle_slots_ask_for_nothing(masked: Engine) -> None:
    """Whatever their last requests wanted."""
    for _ in range(3):
        run(masked, [WIDE[2]] * 3)  # filters, in every slot
        (alone,) = run(masked, NARROW[2:])
        assert alone.stats["head_fraction"] <= 2 * 64 / 4096


def test_an_unknown_way_is_named() -> None:
    with pytest.raises(UserError, match="head is 'tiles'; choose 'masked' or 'full'"):
        make(head="tiles")  # type: ignore[arg-type]


# Log-probabilities --------------------------------------------------------------------------------


def expected_logprobs(prompt: str, tokens: tuple[int, ...]) -> np.ndarray:
    """Float64 log-probabilities ``[tokens, V]`` of one pass over the whole text."""
    text = np.array([*TOKENIZER.encode(prompt), *tokens])
    cache = init_cache(SPEC, MODEL, 1, jnp.float32)
    padded = np.zeros(64, np.int32)
    padded[: len(text)] = text
    row, start, length = np.int32(0), np.int32(0), np.int32(len(text))
    hidden, _ = chunk_hidden(PARAMS, cache, padded, row, start, length, model=MODEL, spec=SPEC)
    first = len(text) - len(tokens) - 1
    logits = np.asarray(MODEL.logits(PARAMS, hidden)[first : len(text) - 1], np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def check_logprobs(prompt: str, result: Result, count: int) -> None:
    assert result.logprobs is not None
    assert [entry.token for entry in result.logprobs] == list(result.tokens)
    expected = expected_logprobs(prompt, result.tokens)
    for entry, row in zip(result.logprobs, expected, strict=True):
        np.testing.assert_allclose(entry.logprob, row[entry.token], atol=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-row)[:count].tolist()
        np.testing.assert_allclose([p for _, p in entry.top], np.sort(row)[::-1][:count], atol=1e-4)


@pytest.mark.parametrize("count", [0, 1, 20])
def test_logprobs_are_the_models_own(masked: Engine, count: int) -> None:
    """Before the grammar, which allows three answers that the model finds unlikely."""
    for prompt, guide, sampling in (NARROW[1], WIDE[1]):
        sampling = Sampling(8, temperature=sampling.temperature, seed=5, logprobs=count)
        (result,) = masked.generate(prompt, guide=guide, sampling=sampling)
        check_logprobs(prompt, result, count)
        assert result.stats["head_fraction"] == 1.0


def test_logprobs_belong_to_the_request_that_asked(masked: Engine, full: Engine) -> None:
    plain = run(masked, NARROW)
    asking = [NARROW[0], (*NARROW[1][:2], Sampling(temperature=1.0, seed=3, logprobs=2)), NARROW[2]]
    results = run(masked, asking)
    assert outputs(results) == outputs(plain)
    assert [r.logprobs is None for r in results] == [True, False, True]
    check_logprobs("x", results[1], 2)


def test_logprobs_with_drafts_and_in_a_stream(masked: Engine) -> None:
    sampling = Sampling(max_tokens=12, logprobs=3)
    (plain,) = masked.generate("Free", sampling=sampling)
    drafts = ScriptedDrafts(plain.tokens)
    (drafted,) = masked.generate("Free", sampling=sampling, drafts=drafts)
    assert drafted.stats["forwards"] < plain.stats["forwards"]
    check_logprobs("Free", drafted, 3)
    pieces = list(masked.stream("Free", sampling=sampling))
    assert all(len(piece.logprobs) == len(piece.tokens) for piece in pieces)
    entries = [entry for piece in pieces for entry in piece.logprobs]
    assert [entry.token for entry in entries] == list(plain.tokens)


def test_asking_compiles_nothing(masked: Engine, compiles: list[str]) -> None:
    masked.warm_up()
    compiles.clear()
    for logprobs in (1, None, 20):
        masked.generate("a", sampling=Sampling(max_tokens=3, logprobs=logprobs))
    assert compiles == []


def test_the_head_is_whole_only_while_a_request_asks(masked: Engine) -> None:
    """The neighbour goes on when it has ended, without a pause of the loop."""
    long = Sampling(max_tokens=60)
    guide = Guide.regex("[0-9]{60}")
    short = Sampling(max_tokens=2, logprobs=0)
    result, asked = masked.generate(["n", "x"], guide=[guide, None], sampling=[long, short])
    assert asked.stats["head_fraction"] == 1.0
    assert result.stats["head_fraction"] < 0.2


@pytest.fixture
def _ordinary_promotion() -> Iterator[None]:
    """Of dtypes, as users have it; for all threads, and so not by the context manager."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="no product of bfloat16 on its CPUs")
@pytest.mark.usefixtures("_ordinary_promotion")
def test_parameters_of_several_dtypes() -> None:
    """Norms in float32 beside bfloat16 weights: the hidden states are wider than the head."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim > 1 else leaf, PARAMS)
    with Engine(MODEL, params, TOKENIZER, cache=SPEC, slots=2) as engine:
        (result,) = engine.generate("x", guide=NARROW[1][1], sampling=Sampling(logprobs=1))
    assert result.error is None
    assert result.text in ("yes", "no", "perhaps")


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), k=st.integers(1, 20))
def test_top_k_by_passes_is_top_k(seed: int, k: int) -> None:
    """Ties too, and −∞: what runs on TPUs."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 4, (2, 2, 20)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    expected, actual = jax.lax.top_k(logits, k), _top_k_by_passes(jnp.asarray(logits), k)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(actual[1], expected[1])


@pytest.mark.parametrize("value", [-1, 21, 2.0, True])
def test_logprobs_out_of_range_are_named(value: Any) -> None:
    with pytest.raises(UserError, match=r"sampling\.logprobs is"):
        Sampling(logprobs=value)
