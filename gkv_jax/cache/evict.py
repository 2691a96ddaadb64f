"""Decoding under a policy: what leaves the window competes with the kept tokens for their places.

A choice falls on every multiple of ``CacheSpec.interval`` in the text. Until then, tokens that have left
the window wait in their slots, visible, and drafts end there; so a choice depends on the text alone, not
on how many tokens a step verified, and the drafts that were rejected have no vote. It takes the policy's
scores of the kept tokens and of those that wait, and moves the best of these to the places of the worst
of those, as they lie in the cache: keys keep their true positions.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from gkv_jax.cache.layout import Layout
from gkv_jax.cache.policies.base import Evidence, Policy
from gkv_jax.cache.prompt import finite
from gkv_jax.cache.segments import EMPTY, Cache, LayerCache, Slots, rows_of, slots_of
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.cache.storage import load, move
from gkv_jax.models.protocol import Decoder
from gkv_jax.rope import Rope
from pallas_kernels.decode_attention.xla import attend


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["queries", "slot_sums", "sinks"],
    meta_fields=["scale", "soft_cap"],
)
@dataclasses.dataclass(frozen=True)
class Seen:
    """What the N queries of a step or chunk showed of one layer. Not all of them may count.

    Attributes:
      queries: rotated, ``[b,N,Hq,D]``, as they meet the stored keys.
      slot_sums: probability of each slot, summed over the query heads of its KV head, float32
        ``[b,N,Hk,C]``; None where the policy needs none.
      sinks, scale, soft_cap: as the model gave them to ``Attend``.
    """

    queries: jax.Array
    slot_sums: jax.Array | None
    sinks: jax.Array | None
    scale: float | None
    soft_cap: float | None


Pending = tuple[Seen | None, ...]
"""What a step showed of each layer, for ``commit``; None where no policy looks at it."""


def commit(
    cache: Cache,
    pending: Pending,
    first_pos: jax.Array,
    next_pos: jax.Array,
    *,
    model: Decoder,
    spec: CacheSpec,
) -> Cache:
    """The cache after a step whose verification is known.

    Args:
      cache: with the step's tokens.
      pending: from ``StepAttend``.
      first_pos: position of the step's first token, int32 ``[B]``.
      next_pos: position after the last token that counts, int32 ``[B]``.
      model, spec: the engine's.
    """
    layout = Layout.of(spec, model)
    if all(each.evictor is None for each in layout.specs):
        return cache
    absorbed = [
        layer
        if seen is None
        else absorb(layer, seen, first_pos, next_pos, cache.slots[layout.group[index]])
        for index, (layer, seen) in enumerate(zip(cache.layers, pending, strict=True))
    ]
    cache = dataclasses.replace(cache, layers=tuple(absorbed))
    due = is_due(spec, first_pos, next_pos)

    def choose(cache: Cache) -> Cache:
        layers = list(cache.layers)
        for index, seen in enumerate(pending):
            if seen is not None:
                each, slots = layout.spec(index), cache.slots[layout.group[index]]
                rope = model.layers[index].rope
                layers[index] = evict(each, rope, layers[index], seen, slots, next_pos, due)
        return Cache(
            layers=tuple(layers),
            slots=tuple(
                evict_slots(each, old, next_pos, due)
                for each, old in zip(layout.specs, cache.slots, strict=True)
            ),
        )

    chosen: Cache = jax.lax.cond(jnp.any(due), choose, lambda cache: cache, cache)
    return chosen


def is_due(spec: CacheSpec, first_pos: jax.Array, next_pos: jax.Array) -> jax.Array:
    """Whether a choice falls on the end of a step or chunk: bool, of the shape of the positions."""
    return next_pos // spec.interval > first_pos // spec.interval


def absorb(
    layer: LayerCache,
    seen: Seen,
    first_pos: jax.Array,
    next_pos: jax.Array,
    slots: Slots,
    rows: jax.Array | None = None,
) -> LayerCache:
    """Remember what the queries that count have shown.

    ``first_pos`` and ``next_pos`` are int32 ``[b]``; ``slots``, with the new tokens, has b rows, which
    are ``rows [b]`` of the layer (all, if None).
    """
    batch, n = seen.queries.shape[:2]
    at = first_pos[:, None] + jnp.arange(n)[None, :]
    counts = at < next_pos[:, None]
    if layer.mass is not None:
        assert seen.slot_sums is not None
        groups = seen.queries.shape[2] // layer.mass.shape[1]
        given = jnp.where(counts[:, :, None, None], seen.slot_sums, 0.0).sum(axis=1) / groups
        is_new = (slots.slot_pos >= first_pos[:, None]) & (next_pos > first_pos)[:, None]
        mass = jnp.where(is_new[:, None, :], 0.0, rows_of(layer.mass, rows)) + given
        layer = dataclasses.replace(
            layer, mass=mass if rows is None else layer.mass.at[rows].set(mass)
        )
    if layer.observed is not None:
        observe = layer.observed.shape[1]
        # Of more than `observe`, the last: two queries in one place have no order.
        last = counts & (at >= next_pos[:, None] - observe)
        place = jnp.where(last, at % observe, observe)
        batch_rows = (jnp.arange(batch) if rows is None else rows)[:, None]
        observed = layer.observed.at[batch_rows, place].set(seen.queries, mode="drop")
        layer = dataclasses.replace(layer, observed=observed)
    return layer


def evict(
    spec: CacheSpec,
    rope: Rope | None,
    layer: LayerCache,
    seen: Seen,
    slots: Slots,
    next_pos: jax.Array,
    due: jax.Array,
    rows: jax.Array | None = None,
) -> LayerCache:
    """Give the kept places to the best of the kept tokens and of those that have left the window.

    ``slots`` has b rows, those of ``next_pos`` int32 ``[b]`` and ``due`` bool ``[b]``, which are
    ``rows [b]`` of the layer (all, if None). Only rows that are due change.
    """
    policy = spec.evictor
    assert policy is not None
    assert layer.kept_pos is not None
    evidence = _evidence(spec, policy, rope, layer, seen, slots, next_pos, rows)
    scores = finite(policy.score(evidence, spec))
    batch, heads, _ = scores.shape

    leaving = next_pos[:, None] - spec.window - jnp.arange(spec.interval)[::-1][None, :]
    source = slots_of(spec, leaving)
    held = jnp.take_along_axis(slots.slot_pos, source, axis=1)
    waits = (leaving >= spec.sinks) & (held == leaving) & due[:, None]
    shape = (batch, heads, spec.interval)
    source = jnp.broadcast_to(source[:, None], shape)
    leaving = jnp.broadcast_to(leaving[:, None], shape)
    new = jnp.take_along_axis(scores, source, axis=2)
    new = jnp.where(waits[:, None], new, -jnp.inf)
    is_kept = jnp.arange(spec.kept)[None, :] < (slots.prefix_len - spec.sinks)[:, None]
    old = jnp.where(is_kept[:, None], scores[..., spec.sinks : spec.prefix], -jnp.inf)

    # The i-th best of the new against the i-th worst of the old: together the best of both. Among
    # equals, an empty place comes first, then the older token stays.
    most = min(spec.interval, spec.kept)
    best, which = jax.lax.top_k(new, most)
    worst, place = jax.lax.top_k(-old, most)
    target = jnp.where(best > -worst, spec.sinks + place, spec.capacity)
    source = jnp.take_along_axis(source, which, axis=2)
    leaving = jnp.take_along_axis(leaving, which, axis=2)

    batch_rows = jnp.arange(batch) if rows is None else rows
    at_row, at_head = batch_rows[:, None, None], jnp.arange(heads)[None, :, None]
    mass = layer.mass
    if mass is not None:
        mass = mass.at[at_row, at_head, target].set(mass[at_row, at_head, source], mode="drop")
    return dataclasses.replace(
        layer,
        k=move(layer.k, batch_rows, source, target),
        v=move(layer.v, batch_rows, source, target),
        # Slots of kept tokens begin at `sinks`; what is dropped there is dropped here.
        kept_pos=layer.kept_pos.at[at_row, at_head, target - spec.sinks].set(leaving, mode="drop"),
        mass=mass,
    )


def evict_slots(spec: CacheSpec, slots: Slots, next_pos: jax.Array, due: jax.Array) -> Slots:
    """Slots after ``evict``: what waited is gone from the ring, and so many more places are taken."""
    if spec.evictor is None:
        return slots
    at = jnp.arange(spec.capacity)[None, :]
    held = slots.slot_pos
    goes = (at >= spec.prefix) & (held >= 0) & (held <= next_pos[:, None] - spec.window)
    goes &= due[:, None]
    prefix_len = jnp.minimum(slots.prefix_len + goes.sum(axis=1), spec.prefix)
    is_kept = (at >= spec.sinks) & (at < prefix_len[:, None])
    slot_pos = jnp.where(is_kept, at, jnp.where(goes, EMPTY, held))
    return dataclasses.replace(slots, slot_pos=slot_pos, prefix_len=prefix_len)


def _evidence(
    spec: CacheSpec,
    policy: Policy,
    rope: Rope | None,
    layer: LayerCache,
    seen: Seen,
    slots: Slots,
    next_pos: jax.Array,
    rows: jax.Array | None,
) -> Evidence:
    """What the rows show to ``policy``."""
    assert layer.kept_pos is not None
    kept_pos = rows_of(layer.kept_pos, rows)
    batch, heads = kept_pos.shape[:2]
    held = jnp.broadcast_to(slots.slot_pos[:, None], (batch, heads, spec.capacity))
    is_live = (held >= 0) & (held < next_pos[:, None, None])  # rejected drafts lie beyond
    positions = jnp.concatenate(
        [held[..., : spec.sinks], kept_pos, held[..., spec.prefix :]], axis=-1
    )
    positions = jnp.where(is_live, positions, EMPTY)
    dtype = seen.queries.dtype
    k, v = load(layer.k, rows, dtype), load(layer.v, rows, dtype)
    attention = None
    if policy.needs == "attention_mass":
        assert layer.mass is not None
        attention = rows_of(layer.mass, rows)
    if policy.needs == "window_attention":
        assert layer.observed is not None
        observed = rows_of(layer.observed, rows)
        observe = observed.shape[1]
        last = next_pos[:, None] - 1
        at = last - jnp.mod(last - jnp.arange(observe)[None, :], observe)
        sees = (positions[:, :, None] >= 0) & (positions[:, :, None] <= at[:, None, :, None])
        sums = attend(
            (observed,),
            k,
            v,
            sees,
            jnp.zeros(spec.capacity, bool),
            scale=observed.shape[-1] ** -0.5 if seen.scale is None else seen.scale,
            soft_cap=seen.soft_cap,
            sinks=seen.sinks,
            return_slot_sums=True,
        ).slot_sums
        assert sums is not None
        count = jnp.clip(next_pos, 1, observe).astype(jnp.float32)[:, None, None]
        attention = sums.sum(axis=1) / (count * (observed.shape[2] // heads))
    if layer.channel is not None:
        k = (k.astype(jnp.float32) * rows_of(layer.channel, rows)[:, :, None]).astype(dtype)
    return Evidence(
        k=k,
        v=v,
        positions=positions,
        next_pos=next_pos,
        in_order=False,
        rope=rope,
        attention=attention,
    )
