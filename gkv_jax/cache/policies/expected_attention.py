"""Expected Attention: keep what future queries are expected to attend to (arXiv 2510.00636).

Future queries are taken to be normal, with the mean and covariance of the prompt's own before
rotation, and to stand at the next 512 positions, whose mean rotation is R. For ``q`` distributed like
that, ``log E[exp(q.k / sqrt(D))]`` is ``m.k / sqrt(D) + k.S.k / 2D`` with ``m = R mean`` and
``S = R covariance R^T``. The softmax of this over the tokens, averaged over the query heads of a KV
head, plus a small number, times the length of the value, is the score.
"""

import jax
import jax.numpy as jnp

from gkv_jax.cache.policies.base import Evidence, Policy
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.rope import rotate

FUTURE = 512
"""Positions over which the rotation is averaged."""
EPSILON = 0.02
"""What a value's length counts for where no attention is expected (the paper's)."""


def score(evidence: Evidence, spec: CacheSpec) -> jax.Array:
    """Expected probability plus ``EPSILON``, times the length of the value.

    Sinks have no part in the softmax (as in NVIDIA's kvpress): they are kept anyway, and with their
    share of the probability ``EPSILON`` would outweigh the others.
    """
    assert evidence.queries is not None
    assert evidence.rope is not None  # see `check_layers`
    batch, kv_heads, _, dim = evidence.k.shape
    future = evidence.next_pos[:, None] + jnp.arange(FUTURE)[None]
    turns = evidence.rope.for_queries(evidence.rope.angles(future))
    cos, sin = (each.mean(axis=1)[:, None, None] for each in turns)
    # R^T k meets mean and covariance as they are.
    k = rotate(evidence.k.astype(jnp.float32), (cos, -sin))
    candidate = evidence.positions >= spec.sinks

    def expected(statistics: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Probabilities ``[B,Hk,C]`` by one query head of each group."""
        mean, covariance = statistics
        first = jnp.einsum("bhcd,bhd->bhc", k, mean) * dim**-0.5
        second = jnp.sum(k * (k @ covariance), axis=-1) / (2 * dim)
        return jax.nn.softmax(first + second, axis=-1, where=candidate)

    groups = (
        jnp.moveaxis(evidence.queries.mean.reshape(batch, kv_heads, -1, dim), 2, 0),
        jnp.moveaxis(evidence.queries.covariance.reshape(batch, kv_heads, -1, dim, dim), 2, 0),
    )
    # One query head at a time: the memory of one copy of the keys, not of one per query head.
    probability = jax.lax.map(expected, groups).mean(axis=0)
    return (probability + EPSILON) * jnp.linalg.norm(evidence.v.astype(jnp.float32), axis=-1)


EXPECTED_ATTENTION = Policy("expected_attention", score, needs="query_statistics")
