"""Sampling against NumPy: filters, statistics, and independence of the company a row keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gkv_jax.errors import UserError
from gkv_jax.sampling import Sampling, SamplingRows, _gumbel, _least_kept, _ordered, sample

V = 97
jitted = jax.jit(sample)


def rows_of(samplings: list[Sampling]) -> SamplingRows:
    rows = SamplingRows.greedy(len(samplings))
    for row, sampling in enumerate(samplings):
        rows.set_row(row, sampling)
    return rows


def kept_by_numpy(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Which tokens survive temperature, top-k, top-p and min-p, in float64: bool ``[V]``."""
    x = logits.astype(np.float64) / sampling.temperature
    keep = np.ones(len(x), bool)
    if sampling.top_k:
        keep = x >= np.sort(x)[::-1][min(sampling.top_k, len(x)) - 1]
    p = np.where(keep, np.exp(x - x.max()), 0)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    nucleus = p >= p[order[before < sampling.top_p]].min()
    keep &= nucleus if sampling.top_p < 1 else True
    return keep & (p >= sampling.min_p * p.max())


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    top_k=st.integers(0, V + 5),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
    temperature=st.floats(0.2, 3.0),
)
def test_filters_keep_what_numpy_keeps(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    logits = np.random.default_rng(seed).normal(0, 3, V).astype(np.float32)
    expected = kept_by_numpy(logits, sampling)
    scaled = jnp.asarray(logits / np.float32(temperature))[None, None]
    rows = jax.tree.map(jnp.asarray, rows_of([sampling]))
    actual = np.asarray(_ordered(scaled) >= _least_kept(scaled, rows))[0, 0]
    # Float32 may decide differently on a token that lies on the edge of the nucleus or of min-p.
    differing = np.flatnonzero(expected != actual)
    assert len(differing) <= 1
    if len(differing) == 1:
        p = np.exp(logits.astype(np.float64) / temperature)
        edge = p[differing[0]]
        nudged = [
            kept_by_numpy(
                logits,
                Sampling(
                    top_k=top_k,
                    top_p=min(1.0, top_p * (1 + s)),
                    min_p=min(1.0, min_p * (1 + s)),
                    temperature=temperature,
                ),
            )[differing[0]]
            for s in (-1e-5, 1e-5)
        ]
        assert nudged[0] != nudged[1], edge


def test_greedy_takes_the_first_of_equals() -> None:
    logits = jnp.zeros((1, 1, V)).at[0, 0, jnp.array([5, 17, 80])].set(2.0)
    assert int(jitted(logits, rows_of([Sampling()]), jnp.zeros((1, 1), jnp.int32))[0, 0]) == 5


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    """Chi-square over 200 000 draws at 8 probabilities."""
    logits = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0], np.float32)
    rows, per_row = 200, 1000
    draws = jitted(
        jnp.broadcast_to(jnp.asarray(logits), (rows, per_row, 8)),
        rows_of([Sampling(temperature=temperature, seed=s) for s in range(rows)]),
        jnp.broadcast_to(jnp.arange(per_row, dtype=jnp.int32), (rows, per_row)),
    )
    p = np.exp(logits.astype(np.float64) / temperature)
    counts = np.bincount(np.asarray(draws).ravel(), minlength=8)
    assert stats.chisquare(counts, p / p.sum() * counts.sum()).pvalue > 1e-4


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    """No serial correlation: pairs of successive draws are uniform over the 4 × 4 pairs."""
    shape = (64, 2048)
    for seeds in (range(64), [7] * 64):
        rows = rows_of([Sampling(temperature=1.0, seed=s) for s in seeds])
        start = np.arange(64)[:, None] * (0 if len(set(seeds)) > 1 else 2048)
        positions = jnp.asarray(start + np.arange(2048)[None, :], jnp.int32)
        draws = np.asarray(jitted(jnp.zeros((*shape, 4)), rows, positions))
        along = np.bincount((draws[:, :-1] * 4 + draws[:, 1:]).ravel(), minlength=16)
        across = np.bincount((draws[:-1] * 4 + draws[1:]).ravel(), minlength=16)
        assert stats.chisquare(along).pvalue > 1e-4
        assert stats.chisquare(across).pvalue > 1e-4


def test_a_row_draws_the_same_in_any_slot_and_company() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 2, (6, 3, V)).astype(np.float32)
    positions = rng.integers(0, 10_000, (6, 3)).astype(np.int32)
    samplings = [
        Sampling(),
        Sampling(temperature=1.0, seed=11),
        Sampling(temperature=0.8, top_k=7, seed=-3),
        Sampling(temperature=1.2, top_p=0.9, seed=2**40),
        Sampling(temperature=1.0, min_p=0.2),
        Sampling(temperature=1.0, top_k=9, top_p=0.7, min_p=0.01, seed=5),
    ]
    together = np.asarray(jitted(logits, rows_of(samplings), positions))
    order = rng.permutation(6)
    shuffled = jitted(logits[order], rows_of([samplings[i] for i in order]), positions[order])
    np.testing.assert_array_equal(shuffled, together[order])
    for i, sampling in enumerate(samplings):
        alone = jitted(logits[i : i + 1], rows_of([sampling]), positions[i : i + 1])
        np.testing.assert_array_equal(alone[0], together[i])


def test_a_masked_token_is_never_drawn() -> None:
    """Even where the legal tokens are the least likely ones and the filters would drop them."""
    lowest = np.finfo(np.float32).min
    logits = np.full((1, 512, V), lowest, np.float32)
    logits[..., [3, 50]] = [-1e4, -1e4 + 1]
    positions = jnp.arange(512, dtype=jnp.int32)[None]
    for sampling in (
        Sampling(temperature=2.0),
        Sampling(temperature=5.0, top_k=50, top_p=0.99, min_p=0.5),
        Sampling(temperature=1e-3, top_p=0.5),
    ):
        drawn = set(np.asarray(jitted(logits, rows_of([sampling]), positions)).ravel().tolist())
        assert drawn <= {3, 50}
        assert 50 in drawn


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e38),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("min_p", -1.0),
        ("top_k", -1),
        ("top_k", 2.5),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("seed", 2**63),
        ("stop", ("",)),
    ],
)
def test_values_out_of_range_name_their_field(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"sampling.{field} is"):
        Sampling(**{field: value})  # type: ignore[arg-type]


def test_extreme_but_legal_values_sample_something_legal() -> None:
    logits = np.random.default_rng(0).normal(0, 5, (1, 4, V)).astype(np.float32)
    positions = jnp.zeros((1, 4), jnp.int32)
    draw = functools.partial(jitted, logits, positions=positions)
    best = logits.argmax(-1)
    for sampling in (
        Sampling(temperature=1e-30),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_p=1e-9),
        Sampling(temperature=1.0, min_p=1.0),
    ):
        np.testing.assert_array_equal(draw(rows=rows_of([sampling])), best)
    drawn = np.asarray(draw(rows=rows_of([Sampling(temperature=1000.0)])))
    assert ((drawn >= 0) & (drawn < V)).all()


def test_noise_is_finite_at_real_vocabularies() -> None:
    """Of 200 million draws about 12 in 2^24 would be infinite if the uniform could round to 1."""
    positions = jnp.arange(512, dtype=jnp.int32)[None]
    noise = jax.jit(_gumbel, static_argnums=2)
    for seed in range(8):
        assert np.isfinite(noise(jnp.array([seed], jnp.uint32), positions, 49152)).all()


def test_the_mask_holds_at_a_real_vocabulary() -> None:
    """One legal token among 49 152 is drawn every time, at every temperature."""
    logits = jnp.full((1, 256, 49152), jnp.finfo(jnp.float32).min).at[..., 777].set(-3.0)
    for temperature in (0.7, 1000.0):
        for start in range(0, 2048, 256):
            positions = jnp.arange(start, start + 256, dtype=jnp.int32)[None]
            rows = rows_of([Sampling(temperature=temperature, seed=1)])
            assert (np.asarray(jitted(logits, rows, positions)) == 777).all()


def test_seeds_that_differ_anywhere_differ() -> None:
    seeds = [0, -1, 1, 2**32, -3, 2, 2**63 - 1, -(2**63), 2**32 + 1]
    rows = rows_of([Sampling(temperature=1.0, seed=seed) for seed in seeds])
    assert len(set(rows.seed.tolist())) == len(seeds)
