"""TOVA: keep what the last query attends to (arXiv 2401.06104).

A token's score is the probability that the newest query gives it, averaged over all query heads, so
that the heads of a layer keep the same tokens. The window, which the paper does not have, pins the
last token as NVIDIA's kvpress does.
"""

import jax
import jax.numpy as jnp

from gkv_jax.cache.policies.base import Evidence, Policy
from gkv_jax.cache.spec import CacheSpec


def score(evidence: Evidence, spec: CacheSpec) -> jax.Array:
    """The last query's attention, averaged over the heads that hold the same token."""
    assert evidence.attention is not None
    positions, attention = evidence.positions, evidence.attention
    # After another policy has read the prompt, heads hold different tokens in a slot: no mean then.
    same = jnp.all(positions == positions[:, :1], axis=1, keepdims=True)
    return jnp.where(same, jnp.mean(attention, axis=1, keepdims=True), attention)


TOVA = Policy("tova", score, needs="window_attention", observe=1, in_decode=True)
