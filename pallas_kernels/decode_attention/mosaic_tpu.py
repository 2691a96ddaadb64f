"""The TPU kernel: K and V stream through VMEM once, in blocks of slots, and empty blocks not at all.

A step of the grid takes one block of slots of one batch row, for several KV heads: a step costs about
0.35 µs whatever it does, so it must move a megabyte to be worth it. The rows of the MXU's tile are the
N·G queries of a KV head, in both rotations if there are two; running maximum, sum and output stay in
VMEM from block to block (online softmax, as in FlashAttention, arXiv 2205.14135).

Which blocks hold a visible slot follows from positions alone. XLA lists them before the kernel starts,
and the list, in scalar memory, steers the pipeline: steps after the last listed block name that block
again, and Mosaic does not fetch a block that it has. A cache that is nearly empty is nearly free.

The cache stays in the layout in which XLA's scatter writes it, or it would be copied in every step. That
is D in the lanes; but a cache of D = 64, which fills only half of them, has its slots there once it is
large. For D = 128 it takes a C in whole tiles, a multiple of 8, to have no other layout.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode_attention import xla
from pallas_kernels.decode_attention.api import LOWEST, Attended

SUBLANES, LANES = 8, 128  # the shape of a 32-bit vector register
BLOCK_C = 512  # slots of a block: of D = 128 in bfloat16, 128 KiB of K and as much of V
STEP_BYTES = 2**20  # of K in a step; with V and double buffering, VMEM holds four times that
SCORES_BYTES = 4 * 2**20  # of scores kept until the sums that normalise them are known
# XLA's scatters write narrow rows (D = 64) by way of VMEM where a whole cache fits there; from this size
# on they write in place, with slots in the lanes, unless there is only one batch row.
SLOTS_IN_LANES_BYTES = 128 * 2**20
VMEM_BYTES = 12 * 2**20  # of the 16 MiB that a kernel gets by default on v4 and v5e
_INT32_MAX = 2**31 - 1


def unsupported(
    q: jax.Array | jax.ShapeDtypeStruct,
    k: jax.Array | jax.ShapeDtypeStruct,
    *,
    rotations: int,
    slot_sums: bool,
) -> str | None:
    """Why the kernel does not take queries like `q` and keys like `k`; None if it does."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"{q.dtype} queries"
    if k.dtype not in (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8):
        return f"{k.dtype} keys"
    if q.shape[-1] % SUBLANES:
        return f"heads of {q.shape[-1]} dimensions, no multiple of {SUBLANES}"
    tiling = _Tiling.of(q, k, rotations, slot_sums)
    if slot_sums and tiling.scores_bytes > SCORES_BYTES:
        return f"slot sums over {k.shape[2]} slots for {tiling.rows} queries a KV head"
    if tiling.vmem_bytes > VMEM_BYTES:
        return f"{tiling.rows} queries a KV head of {q.shape[-1]} dimensions"
    return None


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """What a step of the grid holds in VMEM."""

    rows: int  # N·G, in whole vector registers
    rotations: int
    heads: int  # KV heads of a step, a divisor of Hk
    block_c: int
    num_blocks: int
    slots_in_lanes: bool  # K and V are [D,C], not [C,D]
    scores_bytes: int  # 0 without slot sums
    vmem_bytes: int

    @classmethod
    def of(
        cls,
        q: jax.Array | jax.ShapeDtypeStruct,
        k: jax.Array | jax.ShapeDtypeStruct,
        rotations: int,
        slot_sums: bool,
    ) -> "_Tiling":
        _, n, num_heads, dim = q.shape
        batch, kv_heads, capacity, _ = k.shape
        rows = _round_up(n * (num_heads // kv_heads), SUBLANES)
        width = _round_up(dim, LANES)
        # Narrower blocks where a row of K is wide; a small cache is one block, of any size.
        block_c = max(LANES, BLOCK_C * min(1, 2 * LANES / width) // LANES * LANES)
        block_c = min(int(block_c), capacity)
        num_blocks = pl.cdiv(capacity, block_c)
        is_large = k.size * k.dtype.itemsize >= SLOTS_IN_LANES_BYTES
        slots_in_lanes = dim % LANES != 0 and batch > 1 and is_large
        stored = _round_up(dim, 4 * SUBLANES) if slots_in_lanes else width
        head_bytes = _round_up(block_c, LANES) * stored * k.dtype.itemsize
        # A head's sums: its scores [rows, C], and [N, C] of output in two buffers.
        sums_bytes = slot_sums * num_blocks * _round_up(block_c, LANES) * 4
        head_scores = sums_bytes * rows
        heads = max(
            h
            for h in range(1, kv_heads + 1)
            if kv_heads % h == 0
            and (h == 1 or (h * head_bytes <= STEP_BYTES and h * head_scores <= SCORES_BYTES))
        )
        vmem_bytes = heads * (
            4 * head_bytes
            + 2 * (rotations + 1) * rows * width * q.dtype.itemsize  # queries and output
            + rows * (width + 2 * LANES) * 4  # running output, maximum and sum
            + head_scores
            + 2 * sums_bytes * _round_up(n, SUBLANES)
        )
        if k.dtype == jnp.int8:  # scales of all heads, twice for K and for V
            vmem_bytes += 4 * _round_up(kv_heads, SUBLANES) * _round_up(block_c, LANES) * 4
        # Temporaries of a head: scores, mask and weights; K and V in the queries' dtype.
        vmem_bytes += (rotations + 3) * rows * _round_up(block_c, LANES) * 4
        vmem_bytes += 2 * _round_up(block_c, LANES) * width * q.dtype.itemsize
        return cls(
            rows=rows,
            rotations=rotations,
            heads=heads,
            block_c=block_c,
            num_blocks=num_blocks,
            slots_in_lanes=slots_in_lanes,
            scores_bytes=heads * head_scores,
            vmem_bytes=vmem_bytes,
        )


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _stored_bytes(*arrays: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes in memory, where the last dimension takes whole rows of lanes."""
    return sum(
        math.prod(x.shape[:-1]) * _round_up(x.shape[-1], LANES) * x.dtype.itemsize for x in arrays
    )


@dataclasses.dataclass(frozen=True)
class _Config:
    """All that is static in the kernel."""

    tiling: _Tiling
    n: int
    groups: int
    capacity: int
    prefix: int
    window: int
    soft_cap: float | None
    scale: float
    slot_pos_per_head: bool
    has_scales: bool
    has_sinks: bool
    lse: bool
    slot_sums: bool


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
    interpret: bool | pltpu.InterpretParams = False,
) -> Attended:
    """See `pallas_kernels.decode_attention.decode_attention`, which has checked the operands.

    `interpret` runs the kernel without a TPU: True through XLA, `InterpretParams` with TPU memory
    semantics (there, C must fill whole blocks).
    """
    batch, n, heads, dim = queries[0].shape
    _, kv_heads, capacity, _ = k.shape
    groups, dtype = heads // kv_heads, queries[0].dtype
    tiling = _Tiling.of(queries[0], k, len(queries), return_slot_sums)
    rows, block_c, num_blocks = tiling.rows, tiling.block_c, tiling.num_blocks
    config = _Config(
        tiling, n, groups, capacity, prefix, window, soft_cap, scale,
        slot_pos.ndim == 3, k_scale is not None, sinks is not None, return_lse, return_slot_sums,
    )  # fmt: skip

    def by_kv_head(*xs: jax.Array) -> jax.Array:
        """Several `[B or 1,N,Hq,...]`, one after the other, as `[B or 1,Hk,len·rows,...]`, padded."""
        x = jnp.stack(xs, axis=1)  # before it moves: each move is a kernel of its own
        x = x.reshape(x.shape[0], len(xs), n, kv_heads, groups, -1).transpose(0, 3, 1, 2, 4, 5)
        x = x.reshape(x.shape[0], kv_heads, len(xs), n * groups, -1)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, rows - n * groups), (0, 0)))
        return x.reshape(x.shape[0], kv_heads, len(xs) * rows, -1)

    # The rows of padding stand at −1, where nothing is visible.
    at = jnp.repeat(positions, groups, axis=1)
    at = jnp.pad(at, ((0, 0), (0, rows - n * groups)), constant_values=-1)[..., None]
    held = slot_pos[:, None, None, :] if slot_pos.ndim == 2 else slot_pos[:, :, None, :]
    live, num_live = _live_blocks(slot_pos, positions, config)

    # Zeros are typed: Python's are 64 bits wide where `jax_enable_x64` is set.
    zero = np.int32(0)

    def block_of(b: jax.Array, h: jax.Array, step: jax.Array, live: jax.Ref) -> jax.Array:
        group = b * (live.shape[0] // (batch * num_blocks))
        return live[(group + (h if config.slot_pos_per_head else 0)) * num_blocks + step]

    def per_head(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, tiling.heads, *block), lambda b, h, s, live, num_live: (b, h, zero, zero)
        )

    if tiling.slots_in_lanes:  # moves nothing: this is how XLA stores it
        k, v = k.swapaxes(2, 3), v.swapaxes(2, 3)
        kv_spec = pl.BlockSpec(
            (None, tiling.heads, dim, block_c),
            lambda b, h, s, live, num_live: (b, h, zero, block_of(b, h, s, live)),
        )
    else:
        kv_spec = pl.BlockSpec(
            (None, tiling.heads, block_c, dim),
            lambda b, h, s, live, num_live: (b, h, block_of(b, h, s, live), zero),
        )
    held_spec = pl.BlockSpec(
        (None, tiling.heads if config.slot_pos_per_head else 1, 1, block_c),
        lambda b, h, s, live, num_live: (
            b, h if config.slot_pos_per_head else zero, zero, block_of(b, h, s, live)
        ),
    )  # fmt: skip
    operands = [at, held, by_kv_head(*queries), k, v]
    in_specs = [
        pl.BlockSpec((None, rows, 1), lambda b, h, s, live, num_live: (b, zero, zero)),
        held_spec,
        per_head(len(queries) * rows, dim),
        kv_spec,
        kv_spec,
    ]
    if k_scale is not None and v_scale is not None:
        operands += [k_scale, v_scale]
        scale_spec = pl.BlockSpec(  # of all heads, as a block of fewer would want another layout
            (None, kv_heads, block_c),
            lambda b, h, s, live, num_live: (b, zero, block_of(b, h, s, live)),
        )
        in_specs += [scale_spec, scale_spec]
    if sinks is not None:
        operands.append(by_kv_head(jnp.broadcast_to(sinks, (1, n, heads)))[0])
        in_specs.append(
            pl.BlockSpec((tiling.heads, rows, 1), lambda b, h, s, live, num_live: (h, zero, zero))
        )
    out_shapes = [jax.ShapeDtypeStruct((batch, kv_heads, rows, dim), dtype)]
    out_specs = [per_head(rows, dim)]
    scratch = [
        pltpu.VMEM((tiling.heads, rows, 1), jnp.float32),
        pltpu.VMEM((tiling.heads, rows, 1), jnp.float32),
        pltpu.VMEM((tiling.heads, rows, dim), jnp.float32),
    ]
    if return_lse:
        out_shapes.append(jax.ShapeDtypeStruct((batch, kv_heads, rows, 1), jnp.float32))
        out_specs.append(per_head(rows, 1))
    if return_slot_sums:
        width = num_blocks * block_c
        out_shapes.append(jax.ShapeDtypeStruct((batch, kv_heads, n, width), jnp.float32))
        out_specs.append(per_head(n, width))
        scratch.append(pltpu.VMEM((tiling.heads, rows, width), jnp.float32))
    results = pl.pallas_call(
        functools.partial(_kernel, config),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads // tiling.heads, num_blocks),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(  # of a full cache
            flops=2 * batch * kv_heads * (len(queries) + 1) * rows * capacity * dim,
            transcendentals=batch * kv_heads * rows * capacity * (1 if soft_cap is None else 2),
            bytes_accessed=_stored_bytes(*operands) + _stored_bytes(*out_shapes),
        ),
        interpret=interpret,
        name="decode_attention",
    )(live, num_live, *operands)
    out, *others = results

    def by_query(x: jax.Array) -> jax.Array:
        """`[B,Hk,rows,...]` as `[B,N,Hq,...]`."""
        x = x[:, :, : n * groups].reshape(batch, kv_heads, n, groups, -1).swapaxes(1, 2)
        return x.reshape(batch, n, heads, -1)

    lse = by_query(others[0])[..., 0] if return_lse else None
    slot_sums = others[-1][..., :capacity].swapaxes(1, 2) if return_slot_sums else None
    return Attended(by_query(out), lse, slot_sums)


def _live_blocks(
    slot_pos: jax.Array, positions: jax.Array, config: _Config
) -> tuple[jax.Array, jax.Array]:
    """The blocks that some query of the row sees a slot of, in order, then the last one repeated.

    Returns them as int32 `[L · num_blocks]` and their number as int32 `[L]`. L is B; or, where heads
    evict independently, B times the steps over heads, whose heads share a list.
    """
    tiling = config.tiling
    seen = xla.visible(slot_pos, positions, prefix=config.prefix, window=config.window)
    heads = tiling.heads if config.slot_pos_per_head else 1
    # Integers throughout: no boolean is reshaped, reduced or padded.
    seen = seen.astype(jnp.int32).max(axis=2)
    seen = jnp.pad(
        seen, ((0, 0), (0, 0), (0, tiling.num_blocks * tiling.block_c - config.capacity))
    )
    seen = seen.reshape(-1, heads, tiling.num_blocks, tiling.block_c).max(axis=(1, 3))
    place = jnp.cumsum(seen, axis=1, dtype=jnp.int32) - 1  # of each block in the list, if live
    num_live = place[:, -1] + 1
    block = jnp.arange(tiling.num_blocks, dtype=jnp.int32)
    wanted = jnp.minimum(block[None, :], place[:, -1:])
    found = (place[:, None, :] == wanted[:, :, None]) & (seen[:, None, :] != 0)
    live = jnp.where(found, block[None, None, :], 0).max(axis=2)
    return live.reshape(-1), num_live


def _kernel(config: _Config, live_ref: jax.Ref, num_live_ref: jax.Ref, *refs: jax.Ref) -> None:
    """One block of slots of `heads` KV heads.

    Refs: at `[rows,1]`, held `[heads or 1,1,block_c]`, queries `[heads, rotations·rows, D]`, K and V
    `[heads,block_c,D]` or `[heads,D,block_c]`, their scales `[Hk,block_c]`, sinks `[heads,rows,1]`;
    then the outputs; then running maximum, sum and output, and the scores `[heads,rows,C]`. What the
    config does not ask for is missing.
    """
    rest: Iterator[jax.Ref] = iter(refs)
    at_ref, held_ref, q_ref, k_ref, v_ref = (next(rest) for _ in range(5))
    k_scale_ref, v_scale_ref = (next(rest) if config.has_scales else None for _ in range(2))
    sinks_ref = next(rest) if config.has_sinks else None
    out_ref = next(rest)
    lse_ref = next(rest) if config.lse else None
    sums_ref = next(rest) if config.slot_sums else None
    max_ref, total_ref, acc_ref = (next(rest) for _ in range(3))
    scores_ref = next(rest) if config.slot_sums else None

    tiling = config.tiling
    shape = (tiling.rows, tiling.block_c)
    step, first_head = pl.program_id(2), pl.program_id(1) * tiling.heads
    lists_per_row = pl.num_programs(1) if config.slot_pos_per_head else 1
    group = pl.program_id(0) * lists_per_row
    if config.slot_pos_per_head:
        group = group + pl.program_id(1)
    slots_axis = 1 if tiling.slots_in_lanes else 0  # of a head's K and V
    # float32 queries mean float32 products, which the MXU makes of several passes in bfloat16.
    is_float32 = q_ref.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if is_float32 else lax.Precision.DEFAULT

    @pl.when(step == 0)
    def _start() -> None:
        if sinks_ref is None:
            max_ref[...] = jnp.full_like(max_ref, LOWEST)
            total_ref[...] = jnp.zeros_like(total_ref)
        else:  # the sink is a key that has been seen already
            max_ref[...] = sinks_ref[...]
            total_ref[...] = jnp.ones_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if scores_ref is not None:
            scores_ref[...] = jnp.full_like(scores_ref, LOWEST)

    @pl.when(step < num_live_ref[group])
    def _attend() -> None:
        start = live_ref[group * tiling.num_blocks + step] * tiling.block_c
        slot = start + lax.broadcasted_iota(jnp.int32, (1, tiling.block_c), 1)
        # Two comparisons of one difference: 0 ≤ age < limit. Empty slots, and those beyond C that
        # the last block sticks out over, lie in the future of everyone.
        limit = jnp.where(slot < config.prefix, _INT32_MAX, jnp.int32(config.window))
        for h in range(tiling.heads):
            held = held_ref[h if config.slot_pos_per_head else 0]
            held = jnp.where(slot < config.capacity, held, -1)
            age = at_ref[...] - jnp.where(held >= 0, held, _INT32_MAX)
            seen = (age >= 0) & (age < limit)
            q = q_ref[h]
            s = lax.dot_general(
                q, k_ref[h].astype(q.dtype), (((1,), (1 - slots_axis,)), ((), ())),
                precision=precision, preferred_element_type=jnp.float32,
            )  # fmt: skip
            if tiling.rotations == 2:
                slots = start + lax.broadcasted_iota(jnp.int32, shape, 1)
                s = jnp.where(slots < config.prefix, s[tiling.rows :], s[: tiling.rows])
            s = s * config.scale
            if k_scale_ref is not None:
                s = s * k_scale_ref[pl.ds(first_head + h, 1)]
            if config.soft_cap is not None:
                s = config.soft_cap * jnp.tanh(s / config.soft_cap)
            s = jnp.where(seen, s, LOWEST)
            if scores_ref is not None:
                # Where there are several blocks, they start at multiples of a register.
                aligned = 0 if tiling.num_blocks == 1 else pl.multiple_of(start, LANES)
                scores_ref[h, :, pl.ds(aligned, tiling.block_c)] = s
            before = max_ref[h]
            highest = jnp.maximum(before, s.max(axis=1, keepdims=True))
            shrink = jnp.exp(before - highest)
            p = jnp.where(seen, jnp.exp(s - highest), 0.0)
            weights = p
            if v_scale_ref is not None:  # beyond C there may be NaN in it
                weights = jnp.where(seen, p * v_scale_ref[pl.ds(first_head + h, 1)], 0.0)
            v = v_ref[h].astype(q.dtype)
            if config.capacity % tiling.block_c:  # the weights there are 0, but 0 · NaN is NaN
                slots = start + lax.broadcasted_iota(jnp.int32, v.shape, slots_axis)
                v = jnp.where(slots < config.capacity, v, jnp.zeros_like(v))
            max_ref[h] = highest
            total_ref[h] = total_ref[h] * shrink + p.sum(axis=1, keepdims=True)
            acc_ref[h] = acc_ref[h] * shrink + lax.dot_general(
                weights.astype(q.dtype), v, (((1,), (slots_axis,)), ((), ())),
                precision=precision, preferred_element_type=jnp.float32,
            )  # fmt: skip

    @pl.when(step == tiling.num_blocks - 1)
    def _finish() -> None:
        for h in range(tiling.heads):
            highest, total = max_ref[h], total_ref[h]
            divisor = jnp.maximum(total, 1e-30)  # 0 where nothing is visible, else at least 1
            out_ref[h] = (acc_ref[h] / divisor).astype(out_ref.dtype)
            if lse_ref is not None:
                lse_ref[h] = jnp.where(total > 0, highest + jnp.log(divisor), LOWEST)
            if sums_ref is not None and scores_ref is not None:
                _sum_slots(config, scores_ref.at[h], sums_ref.at[h], highest, divisor)


def _sum_slots(
    config: _Config, scores_ref: jax.Ref, sums_ref: jax.Ref, highest: jax.Array, divisor: jax.Array
) -> None:
    """Normalises the scores `[rows,C]` of a head and sums them over its queries: `[N,C]`."""
    tiling = config.tiling
    # Row n of this matrix adds up the G rows of query n.
    first = lax.broadcasted_iota(jnp.int32, (config.n, tiling.rows), 0) * config.groups
    row = lax.broadcasted_iota(jnp.int32, (config.n, tiling.rows), 1) - first
    members = jnp.where((row >= 0) & (row < config.groups), jnp.float32(1), 0.0)
    for block in range(tiling.num_blocks):
        slots = pl.ds(block * tiling.block_c, tiling.block_c)
        s = scores_ref[:, slots]
        p = jnp.where(s > LOWEST, jnp.exp(s - highest) / divisor, 0.0)
        sums_ref[:, slots] = lax.dot_general(
            members, p, (((1,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
        )  # fmt: skip
