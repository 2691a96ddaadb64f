"""The comparison with kvpress, against its definitions restated in NumPy, and (``full``) against itself."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kvpress import __main__ as kvpress
from benchmarks.kvpress.compare import Difference, difference, total
from benchmarks.kvpress.ours import specs
from benchmarks.kvpress.samples import Sample, model_sample, random_sample
from gkv_jax.models.llama import Llama
from gkv_jax.rope import inverse_frequencies
from tests.gkv_jax.tiny import random_params, text_config

TOKENS, BUDGET = 128, 96
PEER_PYTHON = Path(sys.prefix) / "kvpress" / "bin" / "python"


@pytest.fixture(scope="module")
def sample() -> Sample:
    return random_sample(TOKENS, layers=1, query_heads=4, dim=8)


@pytest.fixture(scope="module")
def restated(sample: Sample) -> dict[str, np.ndarray]:
    """What ``peer`` returns, by the definitions."""
    q, k, v = (part[0].swapaxes(0, 1).astype(np.float64) for part in (sample.q, sample.k, sample.v))
    out = {"versions": np.array(["restated"])}
    turn = _turner(sample)
    for name, definition in _DEFINITIONS.items():
        scores = definition(q, k, v, turn)
        out[f"{name}/{BUDGET}/scores"] = scores[None]
        out[f"{name}/{BUDGET}/kept"] = np.argsort(-scores, axis=-1, kind="stable")[None, :, :BUDGET]
    return out


def test_our_caches_keep_what_the_definitions_keep(
    sample: Sample,
    restated: dict[str, np.ndarray],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = kvpress.measure(sample, restated, [BUDGET])
    assert set(found) == set(specs(BUDGET)) == set(_DEFINITIONS)
    for name, by_budget in found.items():
        one = by_budget[BUDGET]
        assert (name, one.heads, one.differing, one.gap) == (name, 2, 0, 0.0)
        assert one.score < 1e-5, name
    kvpress.report({"noise": found}, {"peer": "restated"}, tmp_path)
    assert "kept by us and by kvpress: noise" in capsys.readouterr().out
    written = json.loads((tmp_path / "kvpress.json").read_text())
    assert written["differences"]["noise"]["snapkv"][str(BUDGET)]["heads"] == 2


def test_another_selection_is_seen(
    sample: Sample, restated: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    pooled = dataclasses.replace(specs(BUDGET)["snapkv"], pooling="max")
    monkeypatch.setattr(kvpress, "specs", lambda budget: {"snapkv": pooled})
    one = kvpress.measure(sample, restated, [BUDGET])["snapkv"][BUDGET]
    assert not one.equal
    assert one.differing > 0
    assert one.score > 1e-4


def test_ties_are_set_aside() -> None:
    scores = np.array([3.0, 2.0, 2.0 * (1 + 1e-6), 1.0])
    anywhere = slice(0, 4)
    tie = difference({0, 1}, {0, 2}, scores, scores + 0.5, anywhere)
    assert tie.equal
    assert (tie.differing, tie.tokens, tie.score) == (1, 2, 0.5)
    assert not difference({0, 3}, {0, 2}, scores, None, anywhere).equal
    assert not difference({0}, {0, 2}, scores, None, anywhere).equal
    assert total([tie, Difference(1, 0, 0, 0.0, 0.75)]) == Difference(2, 1, 2, tie.gap, 0.75)


def test_a_models_sample_is_that_of_its_layers() -> None:
    config = text_config()
    sample = model_sample(Llama(config), random_params(config), list(range(40)))
    heads = (config.num_layers, 40, config.num_kv_heads, config.head_dim)
    assert sample.k.shape == sample.v.shape == heads
    assert sample.q.shape[2] == config.num_heads
    # The second layer saw the first one's attention: the same token, elsewhere, is another query.
    twice = model_sample(Llama(config), random_params(config), [7, 7, 8, 7])
    np.testing.assert_allclose(twice.q[0, 0], twice.q[0, 3], atol=1e-6)
    assert np.abs(twice.q[1, 0] - twice.q[1, 3]).max() > 1e-3


@pytest.mark.full
@pytest.mark.skipif(not PEER_PYTHON.is_file(), reason="needs kvpress (`make bench-peers`)")
def test_kvpress_keeps_the_same() -> None:
    sample = random_sample(256, layers=2)
    theirs = kvpress.peer(PEER_PYTHON, sample, [80, 128])
    found = kvpress.measure(sample, theirs, [80, 128])
    assert [name for name, by in found.items() if not all(one.equal for one in by.values())] == []


Turn = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _turner(sample: Sample) -> Turn:
    inv_freq = inverse_frequencies(sample.rope.config, sample.rope.head_dim)

    def turn(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """``x [..., N, D]`` rotated to ``positions [N]``."""
        angle, half = positions[:, None] * inv_freq, len(inv_freq)
        a, b, cos, sin = x[..., :half], x[..., half:], np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    return turn


def _attention(q: np.ndarray, k: np.ndarray, turn: Turn) -> np.ndarray:
    """Causal probabilities ``[Hk,G,N,N]``."""
    at = np.arange(TOKENS)
    logits = (
        _by_group(turn(q, at), k) @ turn(k, at)[:, None].swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    )
    return _softmax(np.where(at <= at[:, None], logits, -np.inf))


def _by_group(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return q.reshape(len(k), -1, *q.shape[1:])


def _softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _pinned(scores: np.ndarray, first: int, last: int) -> np.ndarray:
    return np.pad(scores, ((0, 0), (first, last)), constant_values=scores.max() + 1)


def _streaming(q: np.ndarray, k: np.ndarray, v: np.ndarray, turn: Turn) -> np.ndarray:
    scores = np.ones(k.shape[:2])
    scores[:, 4 : 4 + TOKENS - BUDGET] = 0
    return scores


def _snapkv(q: np.ndarray, k: np.ndarray, v: np.ndarray, turn: Turn) -> np.ndarray:
    votes = _attention(q, k, turn)[:, :, -64:, :-64].mean(axis=(1, 2))
    # A mean over five, with zeros beyond both ends.
    pooled = np.stack([np.convolve(head, np.full(5, 0.2), mode="same") for head in votes])
    return _pinned(pooled, 0, 64)


def _observed(q: np.ndarray, k: np.ndarray, v: np.ndarray, turn: Turn) -> np.ndarray:
    return _attention(q, k, turn).sum(axis=2).mean(axis=1) / np.arange(TOKENS, 0, -1)


def _tova(q: np.ndarray, k: np.ndarray, v: np.ndarray, turn: Turn) -> np.ndarray:
    last = _attention(q, k, turn)[:, :, -1, :-1].mean(axis=(0, 1))
    return _pinned(np.stack([last] * len(k)), 0, 1)


def _keydiff(q: np.ndarray, k: np.ndarray, v: np.ndarray, turn: Turn) -> np.ndarray:
    keys = turn(k, np.arange(TOKENS))
    keys = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    anchor = keys.mean(axis=1, keepdims=True)
    return -(keys * anchor).sum(axis=-1) / np.linalg.norm(anchor, axis=-1)


def _expected_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, turn: Turn) -> np.ndarray:
    dim = q.shape[-1]
    queries = _by_group(q[:, 4:], k)
    mean = queries.mean(axis=2, keepdims=True)
    covariance = (queries - mean).swapaxes(-1, -2) @ (queries - mean) / queries.shape[2]
    future = TOKENS + np.arange(512)
    matrix = turn(np.broadcast_to(np.eye(dim)[:, None], (dim, 512, dim)), future).mean(axis=1).T
    mean, covariance = mean[:, :, 0] @ matrix.T, matrix @ covariance @ matrix.T
    keys = turn(k, np.arange(TOKENS))[:, 4:]
    logits = np.einsum("hnd,hgd->hgn", keys, mean) / np.sqrt(dim)
    logits += np.einsum("hnd,hgde,hne->hgn", keys, covariance, keys) / (2 * dim)
    probability = _softmax(logits).mean(axis=1)
    return _pinned((probability + 0.02) * np.linalg.norm(v[:, 4:], axis=-1), 4, 0)


_DEFINITIONS = {
    "window": _streaming,
    "snapkv": _snapkv,
    "h2o": _observed,
    "tova": _tova,
    "keydiff": _keydiff,
    "expected_attention": _expected_attention,
}
