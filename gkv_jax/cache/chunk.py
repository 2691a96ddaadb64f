"""Prefill of one row, chunk by chunk: attend over the cache and the chunk, then write the chunk.

Every token sees exactly what it would have seen had it been decoded alone, so a prompt streams
through the ring in constant memory and the result does not depend on where chunks begin.
"""

import dataclasses

import jax
import jax.numpy as jnp

from gkv_jax.cache.rotation import QueryRotation
from gkv_jax.cache.segments import Cache, LayerCache, ranks_of, slots_of, write
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.rope import Rope
from pallas_kernels.decode_attention.xla import attend, visible


class ChunkAttend:
    """``Attend`` for ``L`` consecutive tokens of one row (a batch of one). Use once, take ``cache``."""

    def __init__(
        self,
        spec: CacheSpec,
        rope: Rope,
        cache: Cache,
        row: jax.Array,
        start: jax.Array,
        length: jax.Array,
        padded: int,
    ) -> None:
        """``row``, ``start`` (true position) and ``length`` are int32 scalars; ``padded`` is L.

        Tokens past ``length`` are padding: nobody sees them and they are not written.
        """
        self._cache, self._row = cache, row
        offsets = jnp.arange(padded)
        positions = start + offsets
        real = offsets < length
        view = dataclasses.replace(
            cache,
            layers=(),
            **{n: getattr(cache, n)[row][None] for n in ("slot_pos", "prefix_len", "ring_start")},
        )
        self._rotation = QueryRotation(rope, positions[None], ranks_of(spec, view, positions[None]))

        among = offsets[None, :] <= offsets[:, None]
        near = positions[None, :] > positions[:, None] - spec.window
        is_sink = positions < spec.sinks
        among &= real[None, :] & (is_sink[None, :] | near)
        earlier = visible(view.slot_pos, positions[None], prefix=spec.prefix, window=spec.window)
        self._seen = jnp.concatenate([earlier, among[None, None]], axis=-1)
        self._in_prefix = jnp.concatenate([jnp.arange(spec.capacity) < spec.prefix, is_sink])

        # A chunk longer than the ring writes only its end: two tokens in one slot have no order.
        survives = is_sink | (positions > start + length - 1 - spec.ring)
        self._slots = jnp.where(real & survives, slots_of(spec, positions), spec.capacity)
        self._slot_pos = cache.slot_pos.at[row, self._slots].set(positions, mode="drop")
        self._layers: list[LayerCache] = []

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        before = self._cache.layers[layer]
        k = self._rotation.keys(k).astype(before.k.dtype)
        v = v.astype(before.v.dtype)
        row, slots = self._row.reshape(1, 1), self._slots[None]
        self._layers.append(
            dataclasses.replace(
                before, k=write(before.k, row, slots, k), v=write(before.v, row, slots, v)
            )
        )
        attended = attend(
            self._rotation.queries(q),
            jnp.concatenate([before.k[self._row][None], k.swapaxes(1, 2)], axis=2),
            jnp.concatenate([before.v[self._row][None], v.swapaxes(1, 2)], axis=2),
            self._seen,
            self._in_prefix,
            scale=q.shape[-1] ** -0.5,
        )
        return attended.out

    @property
    def cache(self) -> Cache:
        """The cache after the chunk."""
        return dataclasses.replace(self._cache, layers=tuple(self._layers), slot_pos=self._slot_pos)
