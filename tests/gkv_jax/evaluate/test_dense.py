"""The references: attention written out, and streaming by its definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax import CacheSpec, UserError
from gkv_jax.cache.spec import Positions
from gkv_jax.evaluate import streaming_nll
from gkv_jax.evaluate.dense import attention, attention_rows, reference_nll
from gkv_jax.models.llama import Llama
from tests.gkv_jax.oracle import ListCache
from tests.gkv_jax.tiny import random_params, tiny_config

CONFIG = tiny_config()
MODEL = Llama(CONFIG)
PARAMS = random_params(CONFIG)
TEXT = np.random.default_rng(3).integers(0, CONFIG.vocab_size, 48)
STREAMING = CacheSpec(sinks=3, window=7)


@pytest.mark.parametrize("positions", ["cache", "text"])
def test_equals_the_list_cache(positions: Positions) -> None:
    """Both follow the definition; one keeps a list, the other a mask."""
    spec = CacheSpec(sinks=3, window=7, positions=positions)
    oracle, expected = ListCache(CONFIG, PARAMS, spec), []
    for at, (token, target) in enumerate(zip(TEXT[:-1].tolist(), TEXT[1:], strict=True)):
        logits = oracle.step(token, at)
        expected.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[target])
    nll = reference_nll(MODEL, PARAMS, TEXT, spec)
    assert nll.dtype == np.float64
    np.testing.assert_allclose(nll, expected, rtol=0, atol=1e-4)


def test_agrees_with_the_cache() -> None:
    dense = reference_nll(MODEL, PARAMS, TEXT, STREAMING)
    streamed = streaming_nll(MODEL, PARAMS, TEXT, STREAMING, chunk=16)
    np.testing.assert_allclose(streamed, dense, rtol=0, atol=1e-4)
    other = streaming_nll(MODEL, PARAMS, TEXT, CacheSpec(sinks=3, window=8), chunk=16)
    assert np.abs(other - dense).max() > 1e-3  # one token more or less is seen


def test_no_reference_for_scores() -> None:
    with pytest.raises(UserError, match="snapkv"):
        reference_nll(MODEL, PARAMS, TEXT, CacheSpec(policy="snapkv", kept=4, window=8))


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_is_softmax(scale: float | None, soft_cap: float | None, has_sinks: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=s).astype(np.float32) for s in ((3, 4, 8), (5, 2, 8), (5, 2, 8)))
    seen = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 1, 1]], bool)
    sinks = rng.normal(size=4).astype(np.float32) if has_sinks else None
    out = attention(
        jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(seen),
        scale=scale, soft_cap=soft_cap, sinks=None if sinks is None else jnp.asarray(sinks),
    )  # fmt: skip
    for n, head in np.ndindex(3, 4):
        scores = k[:, head // 2] @ q[n, head] * (scale or 8**-0.5)
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores) * seen[n]
        weights /= weights.sum() + (np.exp(sinks[head]) if has_sinks else 0)
        np.testing.assert_allclose(out[n, head], weights @ v[:, head // 2], atol=1e-5)


def test_rows_are_those_of_the_text() -> None:
    padded = jnp.asarray(np.pad(TEXT, (0, 16)).astype(np.int32))
    rows = attention_rows(PARAMS, padded, jnp.int32(45), model=MODEL, count=3)
    assert rows.shape == (2, 2, 3, 64)
    for index, position in enumerate((45, 46, 47)):
        np.testing.assert_allclose(rows[:, :, index].sum(axis=-1), 1, atol=1e-5)
        assert np.all(rows[:, :, index, : position + 1] > 0)
        assert np.all(rows[:, :, index, position + 1 :] == 0)
    # The first layer's, from the oracle's keys and query.
    oracle = ListCache(CONFIG, PARAMS, CacheSpec.full(64))
    oracle.read_prompt(TEXT.tolist())
    queries = oracle.prompt_queries[0]
    for head in range(2):
        keys = np.stack([oracle.rotate(e.k[head], e.position) for e in oracle.entries[0]])
        weights = []
        for q in queries[47][2 * head : 2 * head + 2]:
            scores = np.exp(keys @ oracle.rotate(q, 47) / np.sqrt(8))
            weights.append(scores / scores.sum())
        np.testing.assert_allclose(rows[0, head, 2, :48], np.mean(weights, axis=0), atol=1e-5)
