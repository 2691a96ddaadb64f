"""Prefill of one row, chunk by chunk: attend over the cache and the chunk, then write the chunk.

Every token sees exactly what it would have seen had it been decoded alone, so a prompt streams
through the ring in constant memory and the result does not depend on where chunks begin.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gkv_jax.cache import quest
from gkv_jax.cache.evict import Seen, absorb, evict, evict_slots, is_due
from gkv_jax.cache.layout import Layout
from gkv_jax.cache.offload import fetch_row
from gkv_jax.cache.rotation import Rotations
from gkv_jax.cache.segments import (
    Cache,
    LayerCache,
    Slots,
    append,
    in_channels,
    ranks_of,
    slots_of,
    to_channels,
)
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.cache.storage import Stored, channel_scale, encode, load
from gkv_jax.models.protocol import Decoder
from pallas_kernels.decode_attention.xla import attend, visible


class ChunkAttend:
    """``Attend`` for ``L`` consecutive tokens of one row (a batch of one). Use once, take ``cache``."""

    def __init__(
        self,
        spec: CacheSpec,
        model: Decoder,
        cache: Cache,
        row: jax.Array,
        start: jax.Array,
        length: jax.Array,
        padded: int,
    ) -> None:
        """``row``, ``start`` (true position) and ``length`` are int32 scalars; ``padded`` is L.

        Tokens past ``length`` are padding: nobody sees them and they are not written.
        """
        self._layout, self._model = Layout.of(spec, model), model
        self._cache, self._row, self._start, self._length = cache, row, start, length
        self._views = [
            _View.of(each, slots.row(row), start, length, padded)
            for each, slots in zip(self._layout.specs, cache.slots, strict=True)
        ]
        self.positions = (start + jnp.arange(padded))[None]
        ranks = [ranks_of(view.spec, view.before, self.positions) for view in self._views]
        self._rotations = Rotations(self.positions, ranks)
        self._layers: list[LayerCache] = []

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
        view, row, spec = self._views[group], self._row[None], self._layout.specs[group]
        before = self._cache.layers[layer]
        rotation = self._rotations.of(group, self._model.layers[layer].rope)
        k = rotation.keys(k)
        if before.channel is not None:
            # What the channels are measured in, the text's first chunk says.
            rotary_dim = self._model.layers[layer].rotary_dim(k.shape[3])
            own = channel_scale(k[0], view.real, rotary_dim)
            own = jnp.where(self._start == 0, own, before.channel[self._row])
            before = dataclasses.replace(before, channel=before.channel.at[self._row].set(own))
        k = to_channels(before, k, row)
        queries = tuple(in_channels(before, each, row) for each in rotation.queries(q))
        after = append(before, row[None], view.slots, k, v)
        # A ring must be read before it is written. Quest's slots are positions, nothing is lost in them,
        # and buffers in host memory would be copied if they had to be read first.
        source = after if spec.policy == "quest" else before
        held_k, held_v = (fetch_row(stored, self._row) for stored in (source.k, source.v))
        attended = attend(
            queries,
            jnp.concatenate([load(held_k, None, q.dtype), _as_stored(k, before.k, q.dtype)], 2),
            jnp.concatenate([load(held_v, None, q.dtype), _as_stored(v, before.v, q.dtype)], 2),
            view.seen,
            view.in_prefix,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            soft_cap=soft_cap,
            sinks=sinks,
            return_slot_sums=before.mass is not None,
        )
        if spec.policy == "quest":
            # Those that the chunk may complete. Whoever completes its last page refreshes that.
            first = self._start[None] // spec.page
            after = quest.refresh(spec, after, row, first, -(-q.shape[1] // spec.page))
        if spec.evictor is not None:
            sums = attended.slot_sums
            sums = None if sums is None else view.by_slot(sums)
            seen = Seen(queries[0], sums, sinks, scale, soft_cap)
            bounds = self._start[None], (self._start + self._length)[None]
            after = absorb(after, seen, *bounds, view.after, row)
            rope = self._model.layers[layer].rope
            after = evict(spec, rope, after, seen, view.after, bounds[1], view.is_due, row)
        self._layers.append(after)
        return attended.out

    @property
    def cache(self) -> Cache:
        """The cache after the chunk."""
        next_pos = (self._start + self._length)[None]
        slots = tuple(
            old.with_row(self._row, evict_slots(view.spec, view.after, next_pos, view.is_due))
            for old, view in zip(self._cache.slots, self._views, strict=True)
        )
        return Cache(layers=tuple(self._layers), slots=slots)


@dataclasses.dataclass(frozen=True)
class _View:
    """The chunk as the layers of one spec see it.

    Attributes:
      spec: the layers'.
      before, after: the row's slots, a batch of one, without the chunk and with it.
      real: which tokens of the chunk exist, bool ``[L]``.
      slots: where they go, int32 ``[1,L]``.
      seen: bool ``[1,1,L,C+L]``. in_prefix: bool ``[C+L]``.
      is_due: whether a choice falls on the chunk's end, bool ``[1]``.
    """

    spec: CacheSpec
    before: Slots
    after: Slots
    real: jax.Array
    slots: jax.Array
    seen: jax.Array
    in_prefix: jax.Array
    is_due: jax.Array

    @classmethod
    def of(
        cls, spec: CacheSpec, before: Slots, start: jax.Array, length: jax.Array, padded: int
    ) -> "_View":
        offsets = jnp.arange(padded)
        positions, real = start + offsets, offsets < length
        among = offsets[None, :] <= offsets[:, None]
        near = positions[None, :] > positions[:, None] - spec.reach
        is_sink = positions < spec.sinks
        among &= real[None, :] & (is_sink[None, :] | near)
        earlier = visible(before.slot_pos, positions[None], prefix=spec.prefix, window=spec.reach)
        earlier &= before.slot_pos[:, None, None, :] < start  # not the drafts that were rejected
        # A chunk longer than the ring writes only its end: two tokens in one slot have no order.
        survives = is_sink | (positions > start + length - 1 - spec.ring)
        slots = jnp.where(real & survives, slots_of(spec, positions), spec.capacity)
        slot_pos = before.slot_pos.at[0, slots].set(positions, mode="drop")
        return cls(
            spec=spec,
            before=before,
            after=dataclasses.replace(before, slot_pos=slot_pos),
            real=real,
            slots=slots[None],
            seen=jnp.concatenate([earlier, among[None, None]], axis=-1),
            in_prefix=jnp.concatenate([jnp.arange(spec.capacity) < spec.prefix, is_sink]),
            is_due=is_due(spec, start, start + length)[None],
        )

    def by_slot(self, sums: jax.Array) -> jax.Array:
        """Probabilities ``[1,L,Hk,C+L]`` where the tokens are now: ``[1,L,Hk,C]``."""
        capacity = self.spec.capacity
        old, new = sums[..., :capacity], sums[..., capacity:]
        # What the chunk has overwritten takes its mass along.
        old = jnp.where((self.after.slot_pos != self.before.slot_pos)[:, None, None, :], 0.0, old)
        return old.at[..., self.slots[0]].set(new, mode="drop")


def _as_stored(tokens: jax.Array, like: Stored, dtype: DTypeLike) -> jax.Array:
    """``[1,L,Hk,D]`` as ``[1,Hk,L,D]``, rounded as the cache will hold it."""
    return load(encode(tokens.swapaxes(1, 2), like.data.dtype), None, dtype)
