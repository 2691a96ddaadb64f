"""The bounded cache: three segments ``sink | kept | ring`` and who is visible from where.

Three numbers must never stand for one another. The *true position* T of a token in the text is what
rotations and windows are made of; the *rank* is how many cached tokens come before it; the *slot* is
where it lies. Slots follow from positions: a token at T lies in slot ``T`` while ``T < sinks``, and in
``prefix + (T - sinks) mod R`` after that. ``slot_pos`` says which position a slot holds, so that one
comparison decides visibility::

    slot_pos >= 0  and  slot_pos <= T  and  (slot < prefix  or  slot_pos > T - window)

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

import jax
import jax.numpy as jnp

from gkv_jax.cache.spec import CacheSpec
from gkv_jax.models.protocol import Decoder, Params

EMPTY = -1
"""``slot_pos`` of a slot that holds nothing."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["k", "v", "kept_pos"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer.

    Attributes:
      k: rotated keys ``[B,Hk,C,D]``.
      v: values ``[B,Hk,C,D]``.
      kept_pos: true positions of the kept tokens, int32 ``[B,Hk,kept]``, ``EMPTY`` where unused;
        None when the spec keeps none. Heads differ, and nothing but reports reads it.
    """

    k: jax.Array
    v: jax.Array
    kept_pos: jax.Array | None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers", "slot_pos", "prefix_len", "ring_start"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """The cache of a batch. All layers hold the same positions in their sinks and rings.

    Attributes:
      layers: one ``LayerCache`` per layer.
      slot_pos: position held by each slot, int32 ``[B,C]``. A live kept slot holds its rank, which no
        query comes before; true positions differ by head and lie in ``LayerCache.kept_pos``.
      prefix_len: rank of the first ring token, int32 ``[B]``: sinks plus live kept tokens.
      ring_start: position of the first token that the ring received, int32 ``[B]``.
    """

    layers: tuple[LayerCache, ...]
    slot_pos: jax.Array
    prefix_len: jax.Array
    ring_start: jax.Array

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers. It depends on the spec and the batch, never on the text."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def cache_dtype(params: Params) -> jnp.dtype:
    """The dtype of a cache that fits these parameters: that of the first floating-point one."""
    leaves = jax.tree.leaves(params)
    return next(leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))


def init_cache(spec: CacheSpec, model: Decoder, batch: int, dtype: jnp.dtype) -> Cache:
    """An empty cache for ``batch`` rows of ``model``, keys and values in ``dtype``."""
    shape = (batch, model.num_kv_heads, spec.capacity, model.head_dim)

    def layer() -> LayerCache:
        kept = (batch, model.num_kv_heads, spec.kept)
        return LayerCache(
            k=jnp.zeros(shape, dtype),
            v=jnp.zeros(shape, dtype),  # zeros, not garbage: 0 · NaN is NaN even where masked
            kept_pos=jnp.full(kept, EMPTY, jnp.int32) if spec.kept else None,
        )

    return Cache(
        layers=tuple(layer() for _ in range(model.num_layers)),
        slot_pos=jnp.full((batch, spec.capacity), EMPTY, jnp.int32),
        prefix_len=jnp.full((batch,), spec.sinks, jnp.int32),
        ring_start=jnp.full((batch,), spec.sinks, jnp.int32),
    )


@functools.partial(jax.jit, static_argnames=("spec",), donate_argnames=("cache",))
def reset_row(cache: Cache, row: jax.Array, *, spec: CacheSpec) -> Cache:
    """Empty one row for a new request: only the bookkeeping changes, the tokens become invisible."""
    return dataclasses.replace(
        cache,
        slot_pos=cache.slot_pos.at[row].set(EMPTY),
        prefix_len=cache.prefix_len.at[row].set(spec.sinks),
        ring_start=cache.ring_start.at[row].set(spec.sinks),
    )


def slots_of(spec: CacheSpec, positions: jax.Array) -> jax.Array:
    """Slot of each true position; any int32 shape."""
    # jnp.mod, not lax.rem: the argument is negative for sinks, whose result is not used.
    ring = spec.prefix + jnp.mod(positions - spec.sinks, spec.ring)
    return jnp.where(positions < spec.sinks, positions, ring)


def write(buffer: jax.Array, rows: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """Write ``values [B,N,Hk,D]`` to ``slots [B,N]`` of ``buffer [B,Hk,C,D]``, in place where donated.

    Slots outside the buffer are dropped; ``dynamic_update_slice`` would clamp them to the edge and
    overwrite another token.
    """
    # One index for every head. With a slice over the heads XLA:TPU prefers another layout for the
    # buffer and converts it (seen in the compiled program of a batch of one).
    heads = jnp.arange(buffer.shape[1])[None, None, :]
    slots = slots[:, :, None]
    if values.size == buffer.shape[3]:
        # A scatter of a single index becomes a dynamic-update-slice that reads what it replaces,
        # and XLA:CPU copies the whole buffer for it. A second, dropped index keeps it a scatter.
        slots = jnp.concatenate([slots, jnp.full_like(slots, buffer.shape[2])], axis=1)
        values = jnp.concatenate([values, values], axis=1)
    return buffer.at[rows[:, :, None], heads, slots].set(values.astype(buffer.dtype), mode="drop")


def ranks_of(spec: CacheSpec, cache: Cache, positions: jax.Array) -> jax.Array | None:
    """Rank of a query at ``positions [B,N]`` among the cached tokens, int32 ``[B,N]``.

    None where every rank equals the true position or is not wanted, so that one rotation of the
    query is enough.
    """
    if spec.positions == "text" or spec.policy == "full" or spec.prefix == 0:
        return None
    behind = jnp.minimum(positions - cache.ring_start[:, None], spec.window - 1)
    return cache.prefix_len[:, None] + behind
