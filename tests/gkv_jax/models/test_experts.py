"""Mixtures of experts: every size of block computes what float64 does."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax.models.experts import block_rows, mixture, route

WIDTH, COUNT, CHOSEN = 6, 5, 2
RNG = np.random.default_rng(0)
WEIGHT, ROUTER = RNG.normal(0, 1, (COUNT, WIDTH, WIDTH)), RNG.normal(0, 1, (WIDTH, COUNT))


def apply(expert: jax.Array, x: jax.Array) -> jax.Array:
    weight = jnp.asarray(WEIGHT, jnp.float32)
    return jnp.tanh(x @ jax.lax.dynamic_index_in_dim(weight, expert, keepdims=False))


def reference(x: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Token by token, in float64."""
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        best = np.argsort(-logits[token])[:CHOSEN]
        shares = np.exp(logits[token, best] - logits[token, best].max())
        for expert, share in zip(best, shares / shares.sum(), strict=True):
            out[token] += share * np.tanh(row @ WEIGHT[expert])
    return out


@functools.partial(jax.jit, static_argnames="rows")
def routed(x: jax.Array, logits: jax.Array, *, rows: int | None) -> tuple[jax.Array, jax.Array]:
    experts, shares = route(logits, CHOSEN)
    return mixture(x, experts, shares, COUNT, apply, rows), experts


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 13, None])
@pytest.mark.parametrize("spread", ["even", "one pair of experts"])
def test_blocks_of_every_size_equal_float64(rows: int | None, spread: str) -> None:
    x = np.random.default_rng(1).normal(0, 1, (13, WIDTH))
    logits = x @ ROUTER
    if spread != "even":  # as many blocks of an expert as there can be, the last one not full
        logits[:, [1, 4]] += 50
    got, experts = routed(jnp.asarray(x, jnp.float32), jnp.asarray(logits, jnp.float32), rows=rows)
    assert len(np.unique(experts)) == (COUNT if spread == "even" else 2)
    np.testing.assert_allclose(got, reference(x, logits), rtol=0, atol=2e-6)


def test_blocks_have_derivatives() -> None:
    x = jnp.asarray(RNG.normal(0, 1, (7, WIDTH)), jnp.float32)

    @functools.partial(jax.jit, static_argnames="rows")
    @jax.grad
    def gradient(x: jax.Array, rows: int) -> jax.Array:
        out, _ = routed(x, x @ jnp.asarray(ROUTER, jnp.float32), rows=rows)
        return (out**2).sum()

    gradients = [gradient(x, rows=rows) for rows in (1, 3)]
    assert float(jnp.abs(gradients[0]).max()) > 0.1
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=0, atol=1e-5)


def test_few_tokens_read_the_weights_of_their_experts_only() -> None:
    """A step's products are as many as its pairs; a chunk's rows a small multiple of them."""

    def products(tokens: int) -> tuple[int, int]:
        """Blocks and rows of a block, for 32 experts and 4 to a token."""
        experts = jnp.zeros((tokens, 4), jnp.int32)
        shapes: list[Any] = []

        def seen(expert: jax.Array, x: jax.Array) -> jax.Array:
            shapes.append(x.shape)
            return x

        shares, x = jnp.ones((tokens, 4), jnp.float32), jnp.ones((tokens, 3), jnp.float32)
        program = jax.make_jaxpr(lambda x: mixture(x, experts, shares, 32, seen))(x)
        lengths = [eqn.params["length"] for eqn in program.eqns if eqn.primitive.name == "scan"]
        assert len(lengths) == len(shapes) == 1
        return lengths[0], shapes[0][0]

    assert products(1) == (4, 1)
    assert products(8) == (32, 1)
    assert products(16) == (32, 16)
    assert products(256) == (32 + (1024 - 32) // 32, 32)
    assert block_rows(4096, 4, 32) == 512
