"""SnapKV: keep what the end of the text attends to (arXiv 2404.14469).

The last ``observe`` queries vote with their softmax over all keys; votes are averaged over the queries
and over the query heads of a KV head (as in NVIDIA's kvpress, so that memory does not grow with the
number of query heads as in the paper's code), then pooled over neighbours, so that tokens survive in
clusters. The window, which is kept anyway, has no say in its neighbours' scores. As in SnapStream
(arXiv 2511.03092), decoding streams after it unless ``CacheSpec.decode`` says otherwise.
"""

import dataclasses

import jax
import jax.numpy as jnp

from gkv_jax.cache.policies.base import Evidence, Policy, max_pool, mean_pool
from gkv_jax.cache.spec import CacheSpec


def score(evidence: Evidence, spec: CacheSpec) -> jax.Array:
    """Votes of the last queries, pooled over ``spec.pool`` tokens by ``spec.pooling``."""
    assert evidence.attention is not None
    positions = evidence.positions
    in_window = positions > (evidence.next_pos - spec.window)[:, None, None]
    before_window = dataclasses.replace(evidence, positions=jnp.where(in_window, -1, positions))
    pool = mean_pool if spec.pooling == "mean" else max_pool
    return pool(evidence.attention, before_window, spec.pool)


SNAPKV = Policy("snapkv", score, needs="window_attention")
