"""Score policies: one file each, with its paper, its formula and what it needs to see.

How to write one: ``docs/caches.md``.
"""

from gkv_jax.cache.policies.base import Evidence, Policy, QueryStatistics, max_pool, mean_pool
from gkv_jax.cache.policies.expected_attention import EXPECTED_ATTENTION
from gkv_jax.cache.policies.h2o import H2O
from gkv_jax.cache.policies.keydiff import KEYDIFF
from gkv_jax.cache.policies.snapkv import SNAPKV
from gkv_jax.cache.policies.tova import TOVA

POLICIES = {policy.name: policy for policy in (SNAPKV, H2O, TOVA, KEYDIFF, EXPECTED_ATTENTION)}

__all__ = ["POLICIES", "Evidence", "Policy", "QueryStatistics", "max_pool", "mean_pool"]
