"""Checks the operands of `decode_attention` and picks the implementation that runs it.

A slot's position, not its place, decides who sees it: a ring that has wrapped, a segment of kept
tokens and rows of different lengths need no special case, and no data ever moves.
"""

import math
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation

LOWEST = float(jnp.finfo(jnp.float32).min)
"""The score of an invisible slot, and the LSE of a query that sees nothing: two of them subtract to
0, where infinities would make NaN."""

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_CACHE_DTYPES = (*_DTYPES, jnp.float8_e4m3fn, jnp.int8)


class Attended(NamedTuple):
    """What `decode_attention` returns.

    Attributes:
      out: `[B,N,Hq,D]` in the dtype of the queries.
      lse: float32 `[B,N,Hq]`, the log of the sum of the exponentials of all scores, sink included;
        `LOWEST` for a query that sees nothing. Outputs over parts of a cache merge with the weights
        `exp(lse_part − lse_all)`. None unless asked for.
      slot_sums: float32 `[B,N,Hk,C]`, the probability of each slot summed over the G query heads of
        its KV head. Summed over C it gives G, less what learned sinks take. None unless asked for.
    """

    out: jax.Array
    lse: jax.Array | None
    slot_sums: jax.Array | None


def decode_attention(
    queries: tuple[jax.Array, ...],
    k: jax.Array,
    v: jax.Array,
    slot_pos: jax.Array,
    positions: jax.Array,
    *,
    prefix: int,
    window: int,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_slot_sums: bool = False,
    implementation: Implementation | None = None,
) -> Attended:
    """Grouped-query attention over cache slots, visible by their positions.

    A query at T sees a slot iff `0 ≤ slot_pos ≤ T` and the slot is one of the first `prefix` or
    `slot_pos > T − window`. Products accumulate and the softmax runs in float32; a query that sees
    nothing gets output 0, LSE `LOWEST` and slot sums 0. Keys and values are rounded to the dtype of
    the queries where the cache holds another; those in int8 and float8_e4m3fn are exact in all of
    them, and their scales go into scores and weights, so that nothing is dequantised. All must be
    finite in every slot, visible or not, as 0 · NaN is NaN; the kernels for TPU and GPU do not read
    blocks in which no query sees a slot.

    Args:
      queries: one or two rotations of the same queries, each `[B,N,Hq,D]` in float32, bfloat16 or
        float16: at their true positions and, if there is a second, at their ranks in the cache for
        the prefix slots (StreamingLLM, arXiv 2309.17453).
      k: rotated keys `[B,Hk,C,D]` in one of these dtypes, float8_e4m3fn or int8; query head h reads
        key head `h // G`, `G = Hq / Hk`.
      v: values, of the shape and dtype of `k`.
      slot_pos: the position that each slot holds, negative if none: int32 `[B,C]`, or `[B,Hk,C]`
        where KV heads evict independently.
      positions: true positions of the queries, int32 `[B,N]`.
      prefix: slots before the ring: sinks, then kept tokens.
      window: positions that a query sees in the ring, its own included.
      k_scale: for keys in int8 and no others: the factor on the key of each slot, float32
        `[B,Hk,C]`. Factors by channel, as keys want them (KIVI, arXiv 2402.02750), belong into the
        queries.
      v_scale: the same for the values.
      sinks: learned sink logits, float32 `[Hq]` (gpt-oss): one more key without a value.
      soft_cap: scores become `soft_cap · tanh(score / soft_cap)` after scaling (Gemma 2).
      scale: factor on the products; None for `D ** −0.5`.
      return_lse: whether `Attended.lse` is wanted.
      return_slot_sums: whether `Attended.slot_sums` is wanted, one sum per query: unverified draft
        tokens must have no vote on what is evicted.
      implementation: `"xla"` (every platform), `"mosaic_tpu"` (TPU; no float16) or `"triton"`
        (NVIDIA GPU of compute capability 8.0 and up, with float8 8.9 and up). None picks by
        `jax.devices()[0]` and the operands, and falls back to `"xla"`; name one to compile for any
        other device.

    Raises:
      ValueError: an operand has a wrong dtype, shape or value, `implementation` is no known name, or
        it does not take these operands. The message begins with the argument's name.
    """
    _check(queries, k, v, slot_pos, positions, sinks)
    _check_scales(k, k_scale, v_scale)
    if not 0 <= prefix <= k.shape[2]:
        raise ValueError(f"prefix: must be in 0..{k.shape[2]}, the slots of k, got {prefix}")
    if window < 1:
        raise ValueError(f"window: must be at least 1, the query itself, got {window}")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap: must be positive and finite, or None, got {soft_cap}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale: must be finite, or None, got {scale}")

    def reason_against(module: ModuleType) -> str | None:
        reason: str | None = module.unsupported(
            queries[0], k, rotations=len(queries), slot_sums=return_slot_sums
        )
        return reason

    module = dispatch.choose("decode_attention", implementation, reason_against)
    attended: Attended = module.decode_attention(
        queries,
        k,
        v,
        slot_pos,
        positions,
        prefix=prefix,
        window=window,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        soft_cap=soft_cap,
        scale=queries[0].shape[-1] ** -0.5 if scale is None else scale,
        return_lse=return_lse,
        return_slot_sums=return_slot_sums,
    )
    return attended


def _check(
    queries: tuple[jax.Array, ...],
    k: jax.Array,
    v: jax.Array,
    slot_pos: jax.Array,
    positions: jax.Array,
    sinks: jax.Array | None,
) -> None:
    if len(queries) not in (1, 2):
        raise ValueError(f"queries: must be one or two rotations, got {len(queries)}")
    q = queries[0]
    if any((other.shape, other.dtype) != (q.shape, q.dtype) for other in queries):
        raise ValueError("queries: both rotations must have the same shape and dtype")
    if q.dtype not in _DTYPES:
        raise ValueError(f"queries: must be float32, bfloat16 or float16, got {q.dtype}")
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"queries: must be [B,N,Hq,D], none of them 0, got {list(q.shape)}")
    batch, n, heads, dim = q.shape
    if k.dtype not in _CACHE_DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _CACHE_DTYPES)
        raise ValueError(f"k: must be one of {names}, got {k.dtype}")
    if k.ndim != 4 or (k.shape[0], k.shape[3]) != (batch, dim) or 0 in k.shape:
        raise ValueError(
            f"k: must be [B,Hk,C,D] with B = {batch}, D = {dim} and none of them 0, "
            f"got {list(k.shape)}"
        )
    _, kv_heads, capacity, _ = k.shape
    if heads % kv_heads:
        raise ValueError(f"k: its {kv_heads} heads must divide the {heads} heads of the queries")
    if (v.shape, v.dtype) != (k.shape, k.dtype):
        raise ValueError(
            f"v: must have the shape and dtype of k, {k.dtype} {list(k.shape)}, "
            f"got {v.dtype} {list(v.shape)}"
        )
    if slot_pos.dtype != jnp.int32:
        raise ValueError(f"slot_pos: must be int32, got {slot_pos.dtype}")
    if slot_pos.shape not in ((batch, capacity), (batch, kv_heads, capacity)):
        raise ValueError(
            f"slot_pos: must be {[batch, capacity]} or {[batch, kv_heads, capacity]}, "
            f"got {list(slot_pos.shape)}"
        )
    if positions.dtype != jnp.int32:
        raise ValueError(f"positions: must be int32, got {positions.dtype}")
    if positions.shape != (batch, n):
        raise ValueError(f"positions: must be {[batch, n]}, got {list(positions.shape)}")
    if sinks is not None and (sinks.shape, sinks.dtype) != ((heads,), jnp.float32):
        raise ValueError(f"sinks: must be float32 {[heads]}, got {sinks.dtype} {list(sinks.shape)}")


def _check_scales(k: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if k.dtype != jnp.int8:
            if scale is not None:
                raise ValueError(
                    f"{name}: must be None for a cache in {k.dtype}, only int8 has one"
                )
        elif scale is None:
            raise ValueError(f"{name}: must be float32 {list(k.shape[:3])} for an int8 cache")
        elif (scale.shape, scale.dtype) != (k.shape[:3], jnp.float32):
            raise ValueError(
                f"{name}: must be float32 {list(k.shape[:3])}, got {scale.dtype} {list(scale.shape)}"
            )
