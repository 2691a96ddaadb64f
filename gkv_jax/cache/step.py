"""One decode step through the cache: write N tokens a row, then attend."""

import dataclasses

import jax
import jax.numpy as jnp

from gkv_jax.cache.rotation import QueryRotation
from gkv_jax.cache.segments import Cache, LayerCache, ranks_of, slots_of, write
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.rope import Rope
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.dispatch import Implementation


class StepAttend:
    """``Attend`` for a step of N tokens in every row. Use once, then take ``cache``."""

    def __init__(
        self,
        spec: CacheSpec,
        rope: Rope,
        cache: Cache,
        positions: jax.Array,
        real: jax.Array,
        kernel: Implementation | None = None,
    ) -> None:
        """``positions`` int32 ``[B,N]``; ``real`` bool ``[B,N]`` says which tokens exist.

        The others (idle rows, unused draft places) are computed and neither written nor seen.
        ``kernel`` is the implementation of ``decode_attention``.
        """
        self._spec, self._cache, self._kernel = spec, cache, kernel
        self._positions = positions
        # Tokens that do not exist get a slot outside the cache, where writes are dropped.
        self._slots = jnp.where(real, slots_of(spec, positions), spec.capacity)
        self._rows = jnp.arange(positions.shape[0])[:, None]
        self._slot_pos = cache.slot_pos.at[self._rows, self._slots].set(positions, mode="drop")
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
        attended = decode_attention(
            self._rotation.queries(q),
            after.k,
            after.v,
            self._slot_pos,
            self._positions,
            prefix=self._spec.prefix,
            window=self._spec.window,
            implementation=self._kernel,
        )
        return attended.out

    @property
    def cache(self) -> Cache:
        """The cache after the step."""
        return dataclasses.replace(self._cache, layers=tuple(self._layers), slot_pos=self._slot_pos)
