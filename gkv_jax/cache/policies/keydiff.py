"""KeyDiff: keep the keys that differ most from the others (arXiv 2504.15364).

With the anchor ``a = mean_i k_i / |k_i|`` over the tokens of a KV head, ``score_j = -cos(k_j, a)``. It
needs neither queries nor attention. The keys are rotated ones, as they are cached (and as in NVIDIA's
kvpress).
"""

import jax
import jax.numpy as jnp

from gkv_jax.cache.policies.base import Evidence, Policy
from gkv_jax.cache.spec import CacheSpec


def score(evidence: Evidence, spec: CacheSpec) -> jax.Array:
    """Minus the cosine between a key and the mean direction of all keys; 0 for a key of zeros."""
    live = (evidence.positions >= 0)[..., None]
    directions = jnp.where(live, _direction(evidence.k.astype(jnp.float32)), 0.0)
    anchor = _direction(directions.sum(axis=2, keepdims=True))  # a mean's length does not matter
    return -jnp.sum(directions * anchor, axis=-1)


def _direction(x: jax.Array) -> jax.Array:
    """``x [..., D]`` at length 1; zeros stay zeros."""
    length = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x / jnp.where(length > 0, length, 1.0)


KEYDIFF = Policy("keydiff", score, needs="keys")
