"""Streaming scores against decoding one token at a time, and against transformers."""

import numpy as np
import pytest

from gkv_jax.cache import CacheSpec
from gkv_jax.errors import UserError
from gkv_jax.evaluate import perplexity, streaming_nll
from gkv_jax.models.llama import Llama
from tests.gkv_jax.oracle import ListCache
from tests.gkv_jax.tiny import random_params, tiny_config

CONFIG = tiny_config()
MODEL = Llama(CONFIG)
PARAMS = random_params(CONFIG)
TEXT = np.random.default_rng(3).integers(0, CONFIG.vocab_size, 60)
SPECS = {
    "sinks and window": CacheSpec(sinks=3, window=7),
    "window alone": CacheSpec(sinks=0, window=7),
    "full": CacheSpec.full(64),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equals_decoding_token_by_token(spec: CacheSpec) -> None:
    oracle = ListCache(CONFIG, PARAMS, spec)
    expected = []
    for at, (token, target) in enumerate(zip(TEXT[:-1].tolist(), TEXT[1:], strict=True)):
        logits = np.asarray(oracle.step(token, at), np.float64)
        expected.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[target])
    for chunk in (1, 8, 59, 64):
        nll = streaming_nll(MODEL, PARAMS, TEXT, spec, chunk=chunk)
        assert nll.dtype == np.float64
        np.testing.assert_allclose(nll, expected, rtol=0, atol=1e-4)


def test_window_of_the_whole_text_is_full() -> None:
    full = streaming_nll(MODEL, PARAMS, TEXT, CacheSpec.full(64), chunk=16)
    wide = streaming_nll(MODEL, PARAMS, TEXT, CacheSpec(sinks=2, window=60), chunk=16)
    np.testing.assert_allclose(wide, full, rtol=0, atol=1e-4)


def test_full_equals_transformers() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.peer import llama_for_causal_lm

    peer = llama_for_causal_lm(MODEL, PARAMS)
    with torch.no_grad():
        logits = peer(torch.tensor(TEXT[None])).logits[0, :-1].double()
    targets = torch.tensor(TEXT[1:])
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none").numpy()
    nll = streaming_nll(MODEL, PARAMS, TEXT, CacheSpec.full(64), chunk=16)
    np.testing.assert_allclose(nll, expected, rtol=0, atol=1e-4)


def test_perplexity_of_a_known_distribution() -> None:
    assert perplexity(np.full(9, np.log(50.0))) == pytest.approx(50.0)
    assert perplexity(np.log(np.array([2.0, 8.0], np.float32))) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("tokens", "spec", "chunk", "message"),
    [
        ([1], CacheSpec(), 8, "two or more"),
        ([1, 61], CacheSpec(), 8, "outside of 0..60"),
        ([1, -1], CacheSpec(), 8, "outside of 0..60"),
        ([1, 2], CacheSpec(), 0, "chunk is 0"),
        ([1, 2, 3, 4], CacheSpec.full(2), 8, "holds 2"),
        ([1, 2], CacheSpec(policy="snapkv", kept=4), 8, "snapkv"),
    ],
)
def test_refused(tokens: list[int], spec: CacheSpec, chunk: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        streaming_nll(MODEL, PARAMS, tokens, spec, chunk=chunk)


def test_no_tokens_no_perplexity() -> None:
    with pytest.raises(UserError, match="empty"):
        perplexity(np.empty(0))
