"""The bounded cache: three segments ``sink | kept | ring`` and who is visible from where.

Three numbers must never stand for one another. The *true position* T of a token in the text is what
rotations and windows are made of; the *rank* is how many cached tokens come before it; the *slot* is
where it lies. Slots follow from positions: a token at T lies in slot ``T`` while ``T < sinks``, and in
``prefix + (T - sinks) mod R`` after that. ``slot_pos`` says which position a slot holds, so that one
comparison decides visibility::

    slot_pos >= 0  and  slot_pos <= T  and  (slot < prefix  or  slot_pos > T - reach)

Undoing n drafts is ``next_pos -= n`` and nothing else: what they wrote lies at positions beyond T,
invisible until the same positions are written again, and the ring has the slack that makes the
tokens they overwrote ones that no query can see any more (see ``CacheSpec.ring``).

Keys are stored rotated. Ring keys and ring queries use true positions: their differences are right
as they are. Sinks and kept tokens stand at their rank, once and for all; the query is rotated a
second time, at *its* rank, to meet them. That equals StreamingLLM's positions-inside-the-cache, with
no key ever rotated again.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from gkv_jax.cache import offload
from gkv_jax.cache.layout import Layout
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.cache.storage import Stored, empty, scale_queries, storage_dtype, write
from gkv_jax.models.protocol import Decoder, Params

EMPTY = -1
"""``slot_pos`` of a slot that holds nothing."""


def _pytree(cls: Any) -> Any:
    """Register a frozen dataclass, all of whose fields are data."""
    return jax.tree_util.register_dataclass(
        cls, data_fields=[field.name for field in dataclasses.fields(cls)], meta_fields=[]
    )


@_pytree
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """What one layer keeps of each token, and what its policy remembers.

    Attributes:
      k: rotated keys, ``[B,Hk,C,D]``; divided by ``channel`` where that is not None.
      v: values, ``[B,Hk,C,D]``.
      channel: what the keys' channels are measured in, float32 ``[B,Hk,D]`` (int8 storage).
      kept_pos: true positions of the kept tokens, int32 ``[B,Hk,kept]``, ``EMPTY`` where unused;
        None when the spec keeps none. Heads differ.
      mass: sum of the attention that each token has received, float32 ``[B,Hk,C]``, under a ``decode``
        policy that needs it.
      observed: the last rotated queries, ``[B,observe,Hq,D]``, that of position T at ``T mod observe``,
        under a ``decode`` policy that needs them.
      bounds: Quest's lower and upper bounds of each page, ``[B,Hk,C/page,2·D]``.
    """

    k: Stored
    v: Stored
    channel: jax.Array | None = None
    kept_pos: jax.Array | None = None
    mass: jax.Array | None = None
    observed: jax.Array | None = None
    bounds: jax.Array | None = None


@_pytree
@dataclasses.dataclass(frozen=True)
class Slots:
    """What the layers of one spec hold in their sinks and rings.

    Attributes:
      slot_pos: position held by each slot, int32 ``[B,C]``. A live kept slot holds its rank, which no
        query comes before; true positions differ by head and lie in ``LayerCache.kept_pos``.
      prefix_len: rank of the first ring token, int32 ``[B]``: sinks plus live kept tokens.
      ring_start: position of the first token that the ring received, int32 ``[B]``.
    """

    slot_pos: jax.Array
    prefix_len: jax.Array
    ring_start: jax.Array

    def row(self, row: jax.Array) -> "Slots":
        """One row as a batch of one."""
        return jax.tree.map(lambda leaf: leaf[row][None], self)

    def with_row(self, row: jax.Array, new: "Slots") -> "Slots":
        """With one row taken from a batch of one."""
        return jax.tree.map(lambda leaf, part: leaf.at[row].set(part[0]), self, new)


@_pytree
@dataclasses.dataclass(frozen=True)
class Cache:
    """The cache of a batch.

    Attributes:
      layers: one ``LayerCache`` per layer.
      slots: one ``Slots`` per distinct spec of a layer (see ``Layout``).
    """

    layers: tuple[LayerCache, ...]
    slots: tuple[Slots, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers. It depends on the spec and the batch, never on the text."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def cache_dtype(params: Params, model: Decoder) -> jnp.dtype:
    """The dtype of a cache that fits a model and its parameters.

    What the model says as ``cache_dtype``, or else the dtype of the first floating-point parameter.
    """
    if (stated := getattr(model, "cache_dtype", None)) is not None:
        return jnp.dtype(stated)
    leaves = jax.tree.leaves(params)
    return next(leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))


def init_cache(spec: CacheSpec, model: Decoder, batch: int, dtype: jnp.dtype) -> Cache:
    """An empty cache for ``batch`` rows of ``model``; ``dtype`` is that of its computations."""
    layout = Layout.of(spec, model)
    return Cache(
        layers=tuple(
            _empty_layer(layout.spec(layer), model, batch, dtype)
            for layer in range(model.num_layers)
        ),
        slots=tuple(
            Slots(
                slot_pos=jnp.full((batch, each.capacity), EMPTY, jnp.int32),
                prefix_len=jnp.full((batch,), each.sinks, jnp.int32),
                ring_start=jnp.full((batch,), each.sinks, jnp.int32),
            )
            for each in layout.specs
        ),
    )


def _empty_layer(spec: CacheSpec, model: Decoder, batch: int, dtype: jnp.dtype) -> LayerCache:
    heads, dim = model.num_kv_heads, model.head_dim
    stored_as = storage_dtype(spec.dtype, dtype)
    needs = spec.evictor.needs if spec.evictor else None
    observe = spec.observers(spec.evictor) if spec.evictor else 0
    quantised = stored_as == jnp.int8

    def tokens() -> Stored:
        make = offload.empty if spec.memory == "host" else empty
        return make((batch, heads, spec.capacity, dim), stored_as)

    return LayerCache(
        k=tokens(),
        v=tokens(),
        channel=jnp.ones((batch, heads, dim), jnp.float32) if quantised else None,
        kept_pos=jnp.full((batch, heads, spec.kept), EMPTY, jnp.int32) if spec.kept else None,
        mass=(
            jnp.zeros((batch, heads, spec.capacity), jnp.float32)
            if needs == "attention_mass"
            else None
        ),
        observed=(
            jnp.zeros((batch, observe, model.num_heads, dim), dtype)
            if needs == "window_attention"
            else None
        ),
        bounds=(
            jnp.zeros((batch, heads, spec.capacity // spec.page, 2 * dim), dtype)
            if spec.policy == "quest"
            else None
        ),
    )


@functools.partial(jax.jit, static_argnames=("spec", "model"), donate_argnames=("cache",))
def reset_row(cache: Cache, row: jax.Array, *, spec: CacheSpec, model: Decoder) -> Cache:
    """Empty one row for a new request: only the bookkeeping changes, the tokens become invisible.

    A prompt that is read sets the row's channels; one of a single token, which is not, has 1.
    """
    layout = Layout.of(spec, model)
    slots = tuple(
        Slots(
            slot_pos=old.slot_pos.at[row].set(EMPTY),
            prefix_len=old.prefix_len.at[row].set(each.sinks),
            ring_start=old.ring_start.at[row].set(each.sinks),
        )
        for each, old in zip(layout.specs, cache.slots, strict=True)
    )
    layers = tuple(
        layer
        if layer.channel is None
        else dataclasses.replace(layer, channel=layer.channel.at[row].set(1.0))
        for layer in cache.layers
    )
    return Cache(layers=layers, slots=slots)


def slots_of(spec: CacheSpec, positions: jax.Array) -> jax.Array:
    """Slot of each true position; any int32 shape."""
    # jnp.mod, not lax.rem: the argument is negative for sinks, whose result is not used.
    ring = spec.prefix + jnp.mod(positions - spec.sinks, spec.ring)
    return jnp.where(positions < spec.sinks, positions, ring)


def append(
    layer: LayerCache, rows: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array
) -> LayerCache:
    """Write rotated ``k`` (as ``to_channels`` gives them) and ``v``, ``[b,N,Hk,D]``.

    They go to ``slots [b,N]`` of ``rows [b,N or 1]``, in place where the layer is donated; slots
    outside the cache are dropped.
    """
    put = offload.write if offload.is_on_host(layer.k) else write
    return dataclasses.replace(
        layer, k=put(layer.k, rows, slots, k), v=put(layer.v, rows, slots, v)
    )


def to_channels(layer: LayerCache, k: jax.Array, rows: jax.Array | None = None) -> jax.Array:
    """Rotated keys ``[b,N,Hk,D]`` of ``rows`` (all if None), measured in the layer's channels."""
    if layer.channel is None:
        return k
    return k.astype(jnp.float32) / rows_of(layer.channel, rows)[:, None]


def in_channels(layer: LayerCache, q: jax.Array, rows: jax.Array | None = None) -> jax.Array:
    """Rotated queries ``[b,N,Hq,D]`` as they must be to meet the keys of ``to_channels``."""
    if layer.channel is None:
        return q
    return scale_queries(q, rows_of(layer.channel, rows)).astype(q.dtype)


def rows_of(array: jax.Array, rows: jax.Array | None) -> jax.Array:
    """``array[rows]``, or without a gather all of it, if ``rows`` is None."""
    return array if rows is None else array[rows]


def ranks_of(spec: CacheSpec, slots: Slots, positions: jax.Array) -> jax.Array | None:
    """Rank of a query at ``positions [B,N]`` among the cached tokens, int32 ``[B,N]``.

    None where every rank equals the true position or is not wanted, so that one rotation of the
    query is enough.
    """
    if not spec.by_rank:
        return None
    behind = jnp.minimum(positions - slots.ring_start[:, None], spec.window - 1)
    return slots.prefix_len[:, None] + behind
