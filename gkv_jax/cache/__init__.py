"""Bounded KV caches: ``sink | kept | ring``, updated in place, of constant size."""

from gkv_jax.cache.chunk import ChunkAttend
from gkv_jax.cache.segments import Cache, LayerCache, cache_dtype, init_cache, reset_row
from gkv_jax.cache.snapkv import SnapKVAttend
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.cache.step import StepAttend

__all__ = [
    "Cache",
    "CacheSpec",
    "ChunkAttend",
    "LayerCache",
    "SnapKVAttend",
    "StepAttend",
    "cache_dtype",
    "init_cache",
    "reset_row",
]
