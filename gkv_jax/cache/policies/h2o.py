"""H2O, heavy hitters: keep what all queries so far have attended to most (arXiv 2306.14048).

The sum of a token's attention probabilities is divided by the number of queries that could see it:
the paper's plain sum favours early tokens, which more queries have seen. The window is the grace
period that a new token needs to be seen at all.
"""

import jax
import jax.numpy as jnp

from gkv_jax.cache.policies.base import Evidence, Policy
from gkv_jax.cache.spec import CacheSpec


def score(evidence: Evidence, spec: CacheSpec) -> jax.Array:
    """Mean probability over the queries from the token's own on."""
    assert evidence.attention is not None
    seen_by = evidence.next_pos[:, None, None] - evidence.positions
    return evidence.attention / jnp.maximum(seen_by, 1).astype(jnp.float32)


H2O = Policy("h2o", score, needs="attention_mass", in_decode=True)
