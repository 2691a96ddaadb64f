"""From a request's ``Sampling`` to the rows of a batch: ranges, seeds, independence of the company.

What is sampled from which logits is tested with the kernel, in ``tests/pallas_kernels``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from gkv_jax.errors import UserError
from gkv_jax.sampling import Sampling, greedy_rows, set_row
from pallas_kernels.masked_sample import Rows, masked_sample

V = 97


@jax.jit
def jitted(logits: jax.Array, rows: Rows, positions: jax.Array) -> jax.Array:
    """Without a grammar."""
    *queries, vocab = logits.shape
    words = jnp.zeros((*queries, -(-vocab // 32)), jnp.int32)
    return masked_sample(logits, words, jnp.zeros(tuple(queries), jnp.int32), positions, rows)


def rows_of(samplings: list[Sampling]) -> Rows:
    rows = greedy_rows(len(samplings))
    for row, sampling in enumerate(samplings):
        set_row(rows, row, sampling)
    return rows


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
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("logit_bias", 7),
        ("logit_bias", [5, 6]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", ((5, 1.0), (5, 2.0))),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ],
)
def test_values_out_of_range_name_their_field(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"sampling.{field} is"):
        Sampling(**{field: value})


@pytest.mark.parametrize("value", [100.5, -101, float("nan"), float("inf"), "1", None, True])
def test_a_bias_out_of_range_names_its_token(value: object) -> None:
    with pytest.raises(UserError, match=r"sampling\.logit_bias\[5\] is"):
        Sampling(logit_bias={3: 1.0, 5: value})


def test_a_bias_is_kept_as_pairs_in_order() -> None:
    sampling = Sampling(logit_bias={9: -100, 4: 2.5})
    assert sampling.logit_bias == ((4, 2.5), (9, -100.0))
    assert sampling == Sampling(logit_bias=((9, -100.0), (4, 2.5)))
    assert hash(sampling) == hash(Sampling(logit_bias=[(4, 2.5), (9, -100)]))
    assert Sampling(logit_bias=dict.fromkeys(range(1024), 1.0)).is_biased


def test_extreme_but_legal_values_sample_something_legal() -> None:
    logits = np.random.default_rng(0).normal(0, 5, (1, 4, V)).astype(np.float32)
    positions = jnp.zeros((1, 4), jnp.int32)
    best = logits.argmax(-1)
    for sampling in (
        Sampling(temperature=1e-30),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_p=1e-9),
        Sampling(temperature=1.0, min_p=1.0),
    ):
        np.testing.assert_array_equal(jitted(logits, rows_of([sampling]), positions), best)
    drawn = np.asarray(jitted(logits, rows_of([Sampling(temperature=1000.0)]), positions))
    assert ((drawn >= 0) & (drawn < V)).all()


def test_seeds_that_differ_anywhere_differ() -> None:
    seeds = [0, -1, 1, 2**32, -3, 2, 2**63 - 1, -(2**63), 2**32 + 1]
    rows = rows_of([Sampling(temperature=1.0, seed=seed) for seed in seeds])
    assert len(set(rows.seed.tolist())) == len(seeds)
