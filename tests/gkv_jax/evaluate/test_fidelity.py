"""A cache beside the full one, a token at a time."""

import dataclasses

import numpy as np
import pytest

from gkv_jax import CacheSpec
from gkv_jax.evaluate import streaming_nll
from gkv_jax.evaluate.fidelity import Continuation, continuation, fidelity, kl_divergence
from gkv_jax.evaluate.runner import Runner
from gkv_jax.models.llama import Llama
from gkv_jax.models.protocol import AttentionLayer
from tests.gkv_jax.oracle import ListCache
from tests.gkv_jax.tiny import random_params, tiny_config

CONFIG = tiny_config(tie_word_embeddings=False)
MODEL = Llama(CONFIG)
PARAMS = random_params(CONFIG)
PROMPT = tuple(np.random.default_rng(3).integers(0, CONFIG.vocab_size, 60).tolist())
FULL = Runner(MODEL, PARAMS, CacheSpec.full(128))
WINDOW = Runner(MODEL, PARAMS, CacheSpec(sinks=3, window=7))
H2O = Runner(
    MODEL, PARAMS, CacheSpec(policy="h2o", sinks=2, kept=5, window=6, interval=8, prefill="chunks")
)
SNAPKV = Runner(MODEL, PARAMS, CacheSpec(policy="snapkv", sinks=2, kept=5, window=6, observe=4))


@pytest.fixture(scope="module")
def full() -> Continuation:
    return continuation(FULL, PROMPT, 8)


@pytest.mark.parametrize("runner", [FULL, WINDOW], ids=["full", "window"])
def test_a_runner_decodes_as_the_oracle_does(runner: Runner) -> None:
    oracle, token, expected = ListCache(CONFIG, PARAMS, runner.spec), PROMPT[-1], []
    for at, each in enumerate(PROMPT[:-1]):
        oracle.step(each, at)
    for at in range(59, 67):
        token = int(oracle.step(token, at).argmax())
        expected.append(token)
    assert runner.continue_greedily(PROMPT, 8, frozenset()) == expected
    # Up to the token that ends it, and without it.
    stop = expected[4]
    until = expected.index(stop)
    assert runner.continue_greedily(PROMPT, 8, frozenset({stop})) == expected[:until]


def test_a_runner_chooses_as_a_stream_does() -> None:
    """Every step's choice, one token at a time and a chunk at a time."""
    text = [*PROMPT, 1, 2]
    nll = streaming_nll(MODEL, PARAMS, text, H2O.spec)
    cache = H2O.read(text[:20])
    for at in range(20, len(text) - 1):
        logits, cache = H2O.step(cache, text[at], at)
        own = np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[text[at + 1]]
        assert own == pytest.approx(nll[at], abs=1e-4)


def test_what_is_held() -> None:
    held = WINDOW.held(WINDOW.read(PROMPT[:-1]), 59)
    assert held.shape == (2, 2, 60)
    assert np.all(held == np.isin(np.arange(60), [0, 1, 2, *range(53, 60)]))
    assert FULL.held(FULL.read(PROMPT[:-1]), 59).all()


def test_what_a_policy_holds() -> None:
    cache = SNAPKV.read(PROMPT[:-1])
    held = SNAPKV.held(cache, 59)
    assert np.all(held.sum(axis=-1) == 2 + 5 + 6)
    assert np.all(held[:, :, [0, 1, *range(54, 60)]])
    for index, layer in enumerate(cache.layers):
        assert layer.kept_pos is not None
        for head in range(2):
            assert set(np.flatnonzero(held[index, head])) >= set(layer.kept_pos[0, head].tolist())


def test_what_waits_for_a_choice_is_held() -> None:
    """At 56 = 7 · 8 a choice has fallen; until 63 nothing goes."""
    cache = H2O.read(PROMPT[:56])
    for at in range(56, 60):
        held = H2O.held(cache, at)
        assert np.all(held.sum(axis=-1) == 2 + 5 + 6 + at - 56)
        _, cache = H2O.step(cache, PROMPT[at], at)


@dataclasses.dataclass(frozen=True)
class Mixed(Llama):
    """Its first layer sees 5 positions, its second all of them."""

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        first, second = super().layers
        return dataclasses.replace(first, window=5), second


def test_a_layer_with_a_window_of_its_own_loses_nothing_by_it() -> None:
    runner = Runner(Mixed(CONFIG), PARAMS, CacheSpec.full(128))
    full = continuation(runner, PROMPT, 4)
    assert np.all(full.attention[0, :, 3, 58:63] > 0)
    assert np.all(full.attention[0, :, 3, :58] == 0)
    assert np.all(full.attention[1, :, 3] > 0)
    held = runner.held(runner.read(PROMPT[:-1]), 59)
    assert np.all(held[0] == (np.arange(60) >= 55))
    assert held[1].all()
    assert fidelity(runner, full).attention_held == pytest.approx(1)


def test_the_full_cache_is_close_to_itself(full: Continuation) -> None:
    itself = fidelity(FULL, full)
    assert (itself.common_prefix, itself.equal) == (8, 1.0)
    assert itself.kl == pytest.approx(0, abs=1e-9)
    assert itself.attention_held == pytest.approx(1)


def test_others_are_compared_with_it(full: Continuation) -> None:
    """Each figure, made again from the parts."""
    measured = fidelity(WINDOW, full)
    text = [*PROMPT, *full.tokens]
    cache, rows, shares = WINDOW.read(text[:59]), [], []
    for index, at in enumerate(range(59, 67)):
        logits, cache = WINDOW.step(cache, text[at], at)
        rows.append(logits)
        seen = [0, 1, 2, *range(at - 6, at + 1)]
        shares.append(full.attention[:, :, index, seen].sum(axis=-1).mean())
    assert measured.attention_held == pytest.approx(np.mean(shares), abs=1e-5)
    assert 0.1 < measured.attention_held < 0.9
    assert measured.kl == pytest.approx(kl_divergence(full.logits, np.stack(rows)).mean())
    assert measured.kl > 1e-3
    equal = np.stack(rows).argmax(axis=-1) == np.array(full.tokens)
    assert measured.equal == equal.mean()
    assert measured.common_prefix == (list(equal).index(False) if not equal.all() else 8)


def test_the_common_prefix_ends_at_the_first_difference(full: Continuation) -> None:
    tokens = list(full.tokens)
    tokens[5] = (tokens[5] + 1) % 61
    changed = dataclasses.replace(full, tokens=tuple(tokens))
    assert fidelity(FULL, changed).common_prefix == 5


def test_kl_of_known_distributions() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.2, 0.3, 0.5])
    logits = np.log(np.stack([p, q])).astype(np.float32) + 7
    expected = 0.5 * np.log(2.5) + 0.25 * np.log(0.25 / 0.3) + 0.25 * np.log(0.5)
    divergence = kl_divergence(logits, np.log(np.stack([q, q])))
    np.testing.assert_allclose(divergence, [expected, 0], atol=1e-6)
