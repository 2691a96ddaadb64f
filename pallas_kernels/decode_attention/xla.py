"""The portable implementation in plain `jax.numpy`, for every platform and dtype.

One product over all slots, one mask, one softmax. On CPUs this is as good as it gets; on the others
the scores `[B,Hq,N,C]` travel through memory, and empty slots cost as much as full ones.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention.api import LOWEST, Attended


def unsupported(
    q: jax.Array | jax.ShapeDtypeStruct,
    k: jax.Array | jax.ShapeDtypeStruct,
    *,
    rotations: int,
    slot_sums: bool,
) -> str | None:
    """None: everything that `decode_attention` lets through works."""
    return None


def decode_attention(
    queries: tuple[jax.Array, ...],
    k: jax.Array,
    v: jax.Array,
    slot_pos: jax.Array,
    positions: jax.Array,
    *,
    prefix: int,
    window: int,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    sinks: jax.Array | None,
    soft_cap: float | None,
    scale: float,
    return_lse: bool,
    return_slot_sums: bool,
) -> Attended:
    """See `pallas_kernels.decode_attention.decode_attention`, which has checked the operands."""
    return attend(
        queries,
        k,
        v,
        visible(slot_pos, positions, prefix=prefix, window=window),
        jnp.arange(k.shape[2]) < prefix,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        soft_cap=soft_cap,
        scale=scale,
        return_lse=return_lse,
        return_slot_sums=return_slot_sums,
    )


def attend(
    queries: tuple[jax.Array, ...],
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    in_prefix: jax.Array,
    *,
    scale: float,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    return_slot_sums: bool = False,
) -> Attended:
    """Attention under any mask, for keys that do not lie in a cache (alone).

    Args:
      queries, k, v: as in `decode_attention`, with any number C of keys.
      seen: which keys each query sees, bool `[B,1 or Hk,N,C]`.
      in_prefix: bool `[C]`, the keys that the second rotation of the queries is for.
      scale, k_scale, v_scale, sinks, soft_cap, return_lse, return_slot_sums: as in
        `decode_attention`.
    """
    batch, n, heads, dim = queries[0].shape
    dtype = queries[0].dtype
    logits = scores(
        queries, k, k_scale=k_scale, in_prefix=in_prefix, soft_cap=soft_cap, scale=scale
    )
    mask = seen[:, :, :, None, :]
    logits = jnp.where(mask, logits, LOWEST)
    highest = logits.max(axis=-1)
    if sinks is not None:
        sink = sinks.reshape(1, k.shape[1], 1, -1)
        highest = jnp.maximum(highest, sink)
    weights = jnp.where(mask, jnp.exp(logits - highest[..., None]), 0.0)
    total = weights.sum(axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sink - highest)
    divisor = jnp.maximum(total, 1e-30)  # 0 where nothing is visible; else at least 1, the highest
    scaled = weights if v_scale is None else weights * v_scale[:, :, None, None, :]
    out = jnp.einsum(
        "bhngc,bhcd->bhngd",
        scaled.astype(dtype),
        v.astype(dtype),
        preferred_element_type=jnp.float32,
    )
    out = out / divisor[..., None]
    lse = slot_sums = None
    if return_lse:
        lse = jnp.where(total > 0, highest + jnp.log(divisor), LOWEST)
        lse = lse.transpose(0, 2, 1, 3).reshape(batch, n, heads)
    if return_slot_sums:
        slot_sums = (weights / divisor[..., None]).sum(axis=3).transpose(0, 2, 1, 3)
    out = out.transpose(0, 2, 1, 3, 4).reshape(batch, n, heads, dim).astype(dtype)
    return Attended(out, lse, slot_sums)


def scores(
    queries: tuple[jax.Array, ...],
    k: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    in_prefix: jax.Array,
    soft_cap: float | None,
    scale: float,
) -> jax.Array:
    """Scores of all slots, visible or not: float32 `[B,Hk,N,G,C]`."""
    batch, n, _, dim = queries[0].shape
    kv_heads = k.shape[1]
    # Both rotations meet all keys in one product (K is read once), then each slot picks its own:
    # slicing K into segments would copy it.
    stacked = jnp.concatenate([q.reshape(batch, n, kv_heads, -1, dim) for q in queries], axis=3)
    k = k.astype(stacked.dtype)
    if n * stacked.shape[3] < dim:
        # XLA:CPU transposes a right-hand side that is contracted over its last dimension. So the keys
        # stand on the left, and the scores are transposed, where these are the smaller of the two.
        logits = jnp.einsum(
            "bhcd,bnhgd->bhcng", k, stacked, preferred_element_type=jnp.float32
        ).transpose(0, 1, 3, 4, 2)
    else:
        logits = jnp.einsum("bnhgd,bhcd->bhngc", stacked, k, preferred_element_type=jnp.float32)
    if len(queries) == 2:
        groups = stacked.shape[3] // 2
        at_text, at_rank = logits[..., :groups, :], logits[..., groups:, :]
        logits = jnp.where(in_prefix[None, None, None, None, :], at_rank, at_text)
    logits = logits * scale
    if k_scale is not None:
        logits = logits * k_scale[:, :, None, None, :]
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def visible(slot_pos: jax.Array, positions: jax.Array, *, prefix: int, window: int) -> jax.Array:
    """Which slots each query sees: bool `[B,1,N,C]`, or `[B,Hk,N,C]` for a `slot_pos` per head."""
    held = slot_pos[:, None, None, :] if slot_pos.ndim == 2 else slot_pos[:, :, None, :]
    at = positions[:, None, :, None]
    in_prefix = (jnp.arange(slot_pos.shape[-1]) < prefix)[None, None, None, :]
    return (held >= 0) & (held <= at) & (in_prefix | (held > at - window))
