"""One decode step through the cache: write N tokens a row, then attend."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from gkv_jax.cache import quest
from gkv_jax.cache.evict import Pending, Seen
from gkv_jax.cache.layout import Layout
from gkv_jax.cache.rotation import Rotations
from gkv_jax.cache.segments import (
    Cache,
    LayerCache,
    append,
    in_channels,
    ranks_of,
    slots_of,
    to_channels,
)
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.models.protocol import Decoder
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.dispatch import Implementation


class StepAttend:
    """``Attend`` for a step of N tokens in every row. Use once, then take ``cache`` and ``pending``."""

    def __init__(
        self,
        spec: CacheSpec,
        model: Decoder,
        cache: Cache,
        positions: jax.Array,
        real: jax.Array,
        kernel: Implementation | None = None,
    ) -> None:
        """``positions`` int32 ``[B,N]``; ``real`` bool ``[B,N]`` says which tokens exist.

        The others (idle rows, unused draft places) are computed and neither written nor seen.
        ``kernel`` is the implementation of ``decode_attention``.
        """
        self._layout, self._model = Layout.of(spec, model), model
        self._cache, self._kernel, self.positions = cache, kernel, positions
        self._rows = jnp.arange(positions.shape[0])[:, None]
        # Tokens that do not exist get a slot outside the cache, where writes are dropped.
        self._places = [
            jnp.where(real, slots_of(each, positions), each.capacity) for each in self._layout.specs
        ]
        self._slots = tuple(
            dataclasses.replace(
                slots, slot_pos=slots.slot_pos.at[self._rows, places].set(positions, mode="drop")
            )
            for slots, places in zip(cache.slots, self._places, strict=True)
        )
        ranks = [
            ranks_of(each, slots, positions)
            for each, slots in zip(self._layout.specs, cache.slots, strict=True)
        ]
        self._rotations = Rotations(positions, ranks)
        self._layers: list[LayerCache] = []
        self._pending: list[Seen | None] = []

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        group = self._layout.group[layer]
        spec, before = self._layout.specs[group], self._cache.layers[layer]
        rotation = self._rotations.of(group, self._model.layers[layer].rope)
        keys = to_channels(before, rotation.keys(k))
        after = append(before, self._rows, self._places[group], keys, v)
        queries = tuple(in_channels(before, each) for each in rotation.queries(q))
        kernel = functools.partial(
            decode_attention,
            sinks=sinks,
            soft_cap=soft_cap,
            scale=scale,
            implementation=self._kernel,
        )
        if spec.policy == "quest":
            factor = q.shape[-1] ** -0.5 if scale is None else scale
            attended, after = quest.read_pages(
                spec, after, queries[0], self.positions, scale=factor, kernel=kernel
            )
        else:
            attended = kernel(
                queries,
                after.k.data,
                after.v.data,
                self._slots[group].slot_pos,
                self.positions,
                prefix=spec.prefix,
                window=spec.reach,
                k_scale=after.k.scale,
                v_scale=after.v.scale,
                return_slot_sums=after.mass is not None,
            )
        self._layers.append(after)
        self._pending.append(
            None
            if spec.evictor is None
            else Seen(queries[0], attended.slot_sums, sinks, scale, soft_cap)
        )
        return attended.out

    @property
    def cache(self) -> Cache:
        """The cache after the step."""
        return Cache(layers=tuple(self._layers), slots=self._slots)

    @property
    def pending(self) -> Pending:
        """What the step showed of each layer, for ``commit`` once its verification is known."""
        return tuple(self._pending)
