"""One decode step through the cache: write N tokens a row, then attend."""

import dataclasses

import jax
import jax.numpy as jnp

from gkv_jax.cache.attention import QueryRotation, attention
from gkv_jax.cache.segments import Cache, LayerCache, ranks_of, slots_of, visible, write
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.rope import Rope


class StepAttend:
    """``Attend`` for a step of N tokens in every row. Use once, then take ``cache``."""

    def __init__(
        self, spec: CacheSpec, rope: Rope, cache: Cache, positions: jax.Array, real: jax.Array
    ) -> None:
        """``positions`` int32 ``[B,N]``; ``real`` bool ``[B,N]`` says which tokens exist.

        The others (idle rows, unused draft places) are computed and neither written nor seen.
        """
        self._cache = cache
        # Tokens that do not exist get a slot outside the cache, where writes are dropped.
        self._slots = jnp.where(real, slots_of(spec, positions), spec.capacity)
        self._rows = jnp.arange(positions.shape[0])[:, None]
        slot_pos = cache.slot_pos.at[self._rows, self._slots].set(positions, mode="drop")
        self._slot_pos = slot_pos
        self._visible = visible(spec, slot_pos, positions)
        self._in_prefix = jnp.arange(spec.capacity) < spec.prefix
        self._rotation = QueryRotation(rope, positions, ranks_of(spec, cache, positions))
        self._layers: list[LayerCache] = []

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        before = self._cache.layers[layer]
        after = dataclasses.replace(
            before,
            k=write(before.k, self._rows, self._slots, self._rotation.keys(k)),
            v=write(before.v, self._rows, self._slots, v),
        )
        self._layers.append(after)
        return attention(
            self._rotation.queries(q), after.k, after.v, self._visible, self._in_prefix
        )

    @property
    def cache(self) -> Cache:
        """The cache after the step."""
        return dataclasses.replace(self._cache, layers=tuple(self._layers), slot_pos=self._slot_pos)
