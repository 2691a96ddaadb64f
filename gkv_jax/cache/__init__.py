"""Bounded KV caches: ``sink | kept | ring``, updated in place, of constant size."""

from gkv_jax.cache.chunk import ChunkAttend
from gkv_jax.cache.evict import Pending, commit
from gkv_jax.cache.layout import Layout, check_layers, longest_text
from gkv_jax.cache.policies import Evidence, Policy
from gkv_jax.cache.prompt import PromptAttend
from gkv_jax.cache.segments import Cache, LayerCache, cache_dtype, init_cache, reset_row
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.cache.step import StepAttend

__all__ = [
    "Cache",
    "CacheSpec",
    "ChunkAttend",
    "Evidence",
    "LayerCache",
    "Layout",
    "Pending",
    "Policy",
    "PromptAttend",
    "StepAttend",
    "cache_dtype",
    "check_layers",
    "commit",
    "init_cache",
    "longest_text",
    "reset_row",
]
