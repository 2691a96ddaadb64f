"""Attention over cached keys: grouped queries, masks from positions, two rotations of the query."""

import jax
import jax.numpy as jnp

from gkv_jax.rope import Rope, rotate

_MASKED = -1e30  # finite: inf - inf would make NaN of a row that sees nothing


def attention(
    queries: tuple[jax.Array, ...],
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    in_prefix: jax.Array,
) -> jax.Array:
    """Softmax attention in float32; a query that sees nothing gets zeros.

    Args:
      queries: one or two rotations of the same queries, each ``[B,N,Hq,D]``: at their true positions
        and, if there is a second, at their ranks for the keys of the prefix.
      k: rotated keys ``[B,Hk,C,D]``; query head h reads key head ``h // (Hq / Hk)``.
      v: values ``[B,Hk,C,D]``, finite even where masked.
      visible: bool ``[B,N,C]``.
      in_prefix: bool ``[C]``: the keys that the second rotation is for.

    Returns:
      ``[B,N,Hq,D]`` in the dtype of the queries.
    """
    batch, n, heads, dim = queries[0].shape
    dtype = queries[0].dtype
    k, v = k.astype(dtype), v.astype(dtype)  # the cache may store another one
    groups = heads // k.shape[1]
    # Both rotations meet all keys in one product (K is read once), then each slot picks its own:
    # slicing K into segments would copy it.
    stacked = jnp.concatenate([q.reshape(batch, n, -1, groups, dim) for q in queries], axis=3)
    logits = jnp.einsum("bnhgd,bhcd->bhngc", stacked, k, preferred_element_type=jnp.float32)
    if len(queries) == 2:
        at_text, at_rank = logits[..., :groups, :], logits[..., groups:, :]
        logits = jnp.where(in_prefix[None, None, None, None, :], at_rank, at_text)
    mask = visible[:, None, :, None, :]
    logits = jnp.where(mask, logits * dim**-0.5, _MASKED)
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    weights = jnp.where(mask, weights, 0.0)
    total = weights.sum(axis=-1)
    out = jnp.einsum(
        "bhngc,bhcd->bhngd", weights.astype(dtype), v, preferred_element_type=jnp.float32
    )
    out = out / jnp.maximum(total, 1e-30)[..., None]
    return out.transpose(0, 2, 1, 3, 4).reshape(batch, n, heads, dim).astype(dtype)


class QueryRotation:
    """Rotates queries and keys of a step; the angles are computed once, not once a layer."""

    def __init__(self, rope: Rope, positions: jax.Array, ranks: jax.Array | None) -> None:
        """``positions`` and ``ranks`` are int32 ``[B,N]``; see ``segments.ranks_of``."""
        self._angles = [_per_head(rope, positions)]
        if ranks is not None:
            self._angles.append(_per_head(rope, ranks))

    def queries(self, q: jax.Array) -> tuple[jax.Array, ...]:
        """``q [B,N,Hq,D]`` at its true positions and, where wanted, at its ranks."""
        return tuple(rotate(q, angles) for angles in self._angles)

    def keys(self, k: jax.Array) -> jax.Array:
        """``k [B,N,Hk,D]`` at its true positions."""
        return rotate(k, self._angles[0])


def _per_head(rope: Rope, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    cos, sin = rope.angles(positions)
    return cos[:, :, None, :], sin[:, :, None, :]
