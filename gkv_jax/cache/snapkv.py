"""SnapKV: at prefill, keep the prompt tokens that its own end attends to (arXiv 2404.14469).

Per layer and KV head: the last ``observe`` queries vote with their softmax over all keys, votes are
averaged over the queries and the query heads of the group, max-pooled over neighbours, and the top
``kept`` tokens survive in order of position. Sinks and the window are pinned by mask, not by score.
The prompt itself attends in full, and a layer's full keys and values die with the layer.

After the prompt, decoding streams: tokens that leave the window are gone (as in SnapStream, arXiv
2511.03092). The vote is per KV head by the mean over its group (as in NVIDIA's kvpress), so memory
does not grow with the number of query heads as in the paper's code.
"""

import dataclasses

import jax
import jax.numpy as jnp

from gkv_jax.cache.rotation import QueryRotation
from gkv_jax.cache.segments import EMPTY, Cache, LayerCache
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.rope import Rope, rotate
from pallas_kernels.decode_attention.xla import attend

_QUERY_BLOCK = 256  # queries per attention block: memory is one block by L, not L by L


class SnapKVAttend:
    """``Attend`` for a whole prompt of one row (a batch of one). Use once, then take ``cache``.

    The prompt must be longer than ``sinks + window - 1``; a shorter one loses nothing and belongs
    to ``ChunkAttend``.
    """

    def __init__(
        self,
        spec: CacheSpec,
        rope: Rope,
        cache: Cache,
        row: jax.Array,
        length: jax.Array,
        padded: int,
    ) -> None:
        """``row`` and ``length`` are int32 scalars; the ``padded - length`` last tokens are padding."""
        self._spec, self._rope, self._cache = spec, rope, cache
        self._row, self._length = row, length
        self._positions = jnp.arange(padded)
        self._rotation = QueryRotation(rope, self._positions[None], None)
        # The next query, at `length`, sees the window - 1 tokens before it in the ring.
        self._ring_start = length - spec.window + 1
        self._layers: list[LayerCache] = []

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        (rotated_q,) = self._rotation.queries(q)
        rotated_k = self._rotation.keys(k)
        chosen = select(self._spec, rotated_q[0], rotated_k[0], self._length)
        self._layers.append(
            self._compact(self._cache.layers[layer], chosen, k[0], rotated_k[0], v[0])
        )
        return _causal_attention(rotated_q, rotated_k, v)

    @property
    def cache(self) -> Cache:
        """The cache after the prompt."""
        spec, row = self._spec, self._row
        kept_count = jnp.minimum(self._ring_start - spec.sinks, spec.kept)
        slots = jnp.arange(spec.prefix)
        held = jnp.where(slots < spec.sinks + kept_count, slots, EMPTY)
        slot_pos = self._cache.slot_pos.at[row, : spec.prefix].set(held)
        slot_pos = slot_pos.at[row, spec.prefix :].set(self._ring_positions())
        return Cache(
            layers=tuple(self._layers),
            slot_pos=slot_pos,
            prefix_len=self._cache.prefix_len.at[row].set(spec.sinks + kept_count),
            ring_start=self._cache.ring_start.at[row].set(self._ring_start),
        )

    def _ring_positions(self) -> jax.Array:
        """Position that each ring slot holds after the prompt, ``EMPTY`` where none: int32 ``[R]``."""
        spec = self._spec
        last = self._length - 1
        # The one position <= last that is congruent to the slot.
        back = jnp.mod(last - spec.sinks - jnp.arange(spec.ring), spec.ring)
        positions = last - back
        return jnp.where(positions >= self._ring_start, positions, EMPTY)

    def _compact(
        self,
        before: LayerCache,
        chosen: jax.Array,
        k: jax.Array,
        rotated_k: jax.Array,
        v: jax.Array,
    ) -> LayerCache:
        """Write sinks, chosen tokens ``[Hk,kept]`` and window of ``k``, ``v`` ``[L,Hk,D]`` to the row."""
        spec = self._spec
        kv_heads = jnp.arange(k.shape[1])[:, None]
        source = jnp.maximum(chosen, 0)
        kept_k = k[source, kv_heads]
        at = source if spec.positions == "text" else spec.sinks + jnp.arange(spec.kept)[None, :]
        kept_k = rotate(kept_k, self._rope.angles(jnp.broadcast_to(at, chosen.shape)))
        ring = jnp.maximum(self._ring_positions(), 0)

        def fill(buffer: jax.Array, prompt: jax.Array, kept: jax.Array) -> jax.Array:
            segments = [prompt[: spec.sinks].swapaxes(0, 1), kept, prompt[ring].swapaxes(0, 1)]
            return buffer.at[self._row].set(jnp.concatenate(segments, axis=1).astype(buffer.dtype))

        return dataclasses.replace(
            before,
            k=fill(before.k, rotated_k, kept_k),
            v=fill(before.v, v, v[source, kv_heads]),
            kept_pos=None if before.kept_pos is None else before.kept_pos.at[self._row].set(chosen),
        )


def select(spec: CacheSpec, q: jax.Array, k: jax.Array, length: jax.Array) -> jax.Array:
    """Positions of the prompt tokens to keep, int32 ``[Hk,kept]``, ascending, unused ones last.

    Args:
      q: rotated queries ``[L,Hq,D]``.
      k: rotated keys ``[L,Hk,D]``.
      length: real tokens of the L, int32 scalar.

    Returns:
      Per KV head the chosen positions in ``[sinks, length - window]``, then ``EMPTY``.
    """
    padded, kv_heads, dim = k.shape
    positions = jnp.arange(padded)
    voters = length - spec.observe + jnp.arange(spec.observe)
    voting_q = q[jnp.maximum(voters, 0)].reshape(spec.observe, kv_heads, -1, dim)
    logits = jnp.einsum("qhgd,lhd->hgql", voting_q, k, preferred_element_type=jnp.float32)
    causal = positions[None, :] <= voters[:, None]  # padding lies after every voter
    logits = jnp.where(causal[None, None], logits * dim**-0.5, -jnp.inf)
    # A voter before the text has nothing to see; its NaN row must not vote.
    votes = jnp.where((voters >= 0)[None, None, :, None], jax.nn.softmax(logits, axis=-1), 0.0)
    scores = votes.mean(axis=(1, 2))
    scores = jax.lax.reduce_window(scores, -jnp.inf, jax.lax.max, (1, spec.pool), (1, 1), "SAME")
    candidate = (positions >= spec.sinks) & (positions <= length - spec.window)
    scores = jnp.where(candidate[None], scores, -jnp.inf)
    best, index = jax.lax.top_k(scores, min(spec.kept, padded))
    index = jnp.sort(jnp.where(best > -jnp.inf, index, padded), axis=-1)
    index = jnp.pad(index, ((0, 0), (0, spec.kept - index.shape[1])), constant_values=padded)
    return jnp.where(index < padded, index, EMPTY)


def _causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of rotated ``[1,L,H,D]``, a block of queries at a time."""
    padded = q.shape[1]
    block = min(_QUERY_BLOCK, padded)
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    positions = jnp.arange(padded)
    nowhere = jnp.zeros(padded, bool)

    def one(start: jax.Array) -> jax.Array:
        at = start + jnp.arange(block)
        mask = positions[None, :] <= at[:, None]
        attended = attend(
            (q[:, at],), keys, values, mask[None, None], nowhere, scale=q.shape[-1] ** -0.5
        )
        return attended.out

    blocks = jax.lax.map(one, jnp.arange(0, padded, block))
    return blocks.reshape(q.shape)
