"""The GPU kernel: flash decoding, which splits the slots of a head among programs.

A decode step has B·Hk heads of work, fewer than a GPU has multiprocessors, so each head's slots are
cut into splits (FlashDecoding, Dao et al. 2023). A program walks through the blocks of its split with
an online softmax and leaves maximum, sum and output of the split; a small XLA reduction merges them.
A block is read only if one of its positions is visible to one of the queries.

Pallas on Triton is deprecated upstream from JAX 0.11 on; this file is all that depends on it here.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_kernels.decode_attention import xla
from pallas_kernels.decode_attention.api import LOWEST, Attended

MIN_DOT = 16  # the least size of a dimension of a product
# Programs that fill the largest GPUs (132 to 148 multiprocessors) about twice.
PROGRAMS = 256
TILE = 64 * 128  # elements of a block of K; see `_block_c`
MAX_OUTPUT = 128 * 128  # elements of the running output, which lives in registers


def unsupported(
    q: jax.Array | jax.ShapeDtypeStruct,
    k: jax.Array | jax.ShapeDtypeStruct,
    *,
    rotations: int,
    slot_sums: bool,
) -> str | None:
    """Why the kernel does not take queries like `q` and keys like `k`; None if it does."""
    # Triton converts float8 from compute capability 8.9 on; asked for another, LLVM ends the process.
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    if k.dtype == jnp.float8_e4m3fn and "8." < capability < "8.9":
        return f"{k.dtype} keys on compute capability {capability}"
    _, n, heads, dim = q.shape
    queries = n * (heads // k.shape[1])
    if _dot_size(queries) * _dot_size(dim) > MAX_OUTPUT:
        return f"{queries} queries a KV head of {dim} dimensions"
    return None


def _dot_size(size: int) -> int:
    """The size of a tile for `size` elements: Triton's are powers of two."""
    return max(MIN_DOT, pl.next_power_of_2(size))


def _block_c(width: int, dtype: DTypeLike) -> int:
    """Slots of a block. In float32 the operands of a product are unpacked into registers."""
    elements = TILE // 4 if dtype == jnp.float32 else TILE
    return max(MIN_DOT, elements // max(width, 128))


def _num_warps(output: int, dtype: DTypeLike) -> int:
    """Warps of a program with so many elements of running output."""
    return 8 if output > MAX_OUTPUT // 4 or dtype == jnp.float32 else 4


@dataclasses.dataclass(frozen=True)
class _Config:
    """All that is static in the kernel."""

    n: int
    groups: int
    dim: int
    capacity: int
    rotations: int
    has_scales: bool
    prefix: int
    window: int
    soft_cap: float | None
    scale: float
    rows: int  # N·G, rounded up
    block_c: int
    blocks_per_split: int


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
    interpret: bool = False,
) -> Attended:
    """See `pallas_kernels.decode_attention.decode_attention`, which has checked the operands.

    `interpret` runs the kernel through XLA, without a GPU.
    """
    batch, n, heads, dim = queries[0].shape
    _, kv_heads, capacity, _ = k.shape
    groups = heads // kv_heads
    rows, width = _dot_size(n * groups), _dot_size(dim)
    block_c = _block_c(width, queries[0].dtype)
    num_blocks = pl.cdiv(capacity, block_c)
    splits = min(num_blocks, pl.cdiv(PROGRAMS, batch * kv_heads))
    blocks_per_split = pl.cdiv(num_blocks, splits)
    splits = pl.cdiv(num_blocks, blocks_per_split)  # none of them idle
    config = _Config(
        n, groups, dim, capacity, len(queries), k_scale is not None, prefix, window, soft_cap,
        scale, rows, block_c, blocks_per_split,
    )  # fmt: skip
    per_head = slot_pos if slot_pos.ndim == 3 else slot_pos[:, None, :]
    operands = [positions, per_head, *queries, k, v]
    if k_scale is not None and v_scale is not None:
        operands += [k_scale, v_scale]
    parts = (batch, kv_heads, splits, rows)
    out_shapes = [
        jax.ShapeDtypeStruct(parts, jnp.float32),
        jax.ShapeDtypeStruct(parts, jnp.float32),
        jax.ShapeDtypeStruct((*parts, width), jnp.float32),
    ]
    in_device_memory = pl.BlockSpec(memory_space=pl.ANY)
    highest, total, acc = pl.pallas_call(
        functools.partial(_kernel, config),
        grid=(batch, kv_heads, splits),
        in_specs=[in_device_memory] * len(operands),
        out_specs=[in_device_memory] * len(out_shapes),
        out_shape=out_shapes,
        compiler_params=plgpu.CompilerParams(
            num_warps=_num_warps(rows * width, queries[0].dtype), num_stages=2
        ),
        interpret=interpret,
        name="decode_attention",
    )(*operands)

    def by_query(x: jax.Array) -> jax.Array:
        """`[B,Hk,rows,...]` as `[B,N,Hq,...]`."""
        x = x[:, :, : n * groups].reshape(batch, kv_heads, n, groups, -1).swapaxes(1, 2)
        return x.reshape(batch, n, heads, -1)

    # Splits that saw nothing weigh exp(LOWEST − highest) = 0, or have the sum 0.
    overall = highest.max(axis=2, keepdims=True)
    shrink = jnp.exp(highest - overall)
    total = by_query((total * shrink).sum(axis=2))[..., 0]
    overall = by_query(overall[:, :, 0])[..., 0]
    out = by_query((acc * shrink[..., None]).sum(axis=2))[..., :dim]
    if sinks is not None:
        sink = sinks[None, None, :]
        with_sink = jnp.maximum(overall, sink)
        shrink = jnp.exp(overall - with_sink)
        total = total * shrink + jnp.exp(sink - with_sink)
        out, overall = out * shrink[..., None], with_sink
    divisor = jnp.maximum(total, 1e-30)  # 0 where nothing is visible, else about 1 or more
    out = (out / divisor[..., None]).astype(queries[0].dtype)
    lse = jnp.where(total > 0, overall + jnp.log(divisor), LOWEST)
    slot_sums = None
    if return_slot_sums:
        # From the scores once more: kept in the kernel, they would be written and read unnormalised.
        in_prefix = jnp.arange(capacity) < prefix
        s = xla.scores(
            queries, k, k_scale=k_scale, in_prefix=in_prefix, soft_cap=soft_cap, scale=scale
        )
        by_head = lse.reshape(batch, n, kv_heads, groups).swapaxes(1, 2)[..., None]
        seen = xla.visible(slot_pos, positions, prefix=prefix, window=window)[:, :, :, None, :]
        p = jnp.where(seen, jnp.exp(s - by_head), 0.0)
        slot_sums = p.sum(axis=3).swapaxes(1, 2)
    return Attended(out, lse if return_lse else None, slot_sums)


def _kernel(config: _Config, *refs: jax.Ref) -> None:
    """One split of one KV head of one batch row.

    Refs, all in device memory: positions `[B,N]`, slot positions `[B,Hk or 1,C]`, queries
    `[B,N,Hq,D]` once or twice, K and V `[B,Hk,C,D]`, for int8 their scales `[B,Hk,C]`; then, of the
    splits, maximum and sum `[B,Hk,splits,rows]` and output `[B,Hk,splits,rows,width]`.
    """
    rest: Iterator[jax.Ref] = iter(refs)
    at_ref, held_ref = next(rest), next(rest)
    q_refs = [next(rest) for _ in range(config.rotations)]
    k_ref, v_ref = next(rest), next(rest)
    k_scale_ref, v_scale_ref = (next(rest) if config.has_scales else None for _ in range(2))
    max_ref, total_ref, acc_ref = rest
    b, head, split = (pl.program_id(axis) for axis in range(3))
    held_head = head if held_ref.shape[1] > 1 else jnp.int32(0)

    row = jnp.arange(config.rows, dtype=jnp.int32)
    is_row = row < config.n * config.groups
    query = jnp.where(is_row, row // config.groups, 0)
    group = head * config.groups + row % config.groups
    dims = jnp.arange(acc_ref.shape[-1], dtype=jnp.int32)
    is_dim = dims < config.dim
    # The rows of padding stand at −1, where nothing is visible.
    at = plgpu.load(at_ref.at[b, query], mask=is_row, other=-1)
    in_queries = is_row[:, None] & is_dim[None, :]
    rotated = [
        plgpu.load(
            ref.at[b, query[:, None], group[:, None], dims[None, :]], mask=in_queries, other=0
        )
        for ref in q_refs
    ]
    dtype = rotated[0].dtype
    # float32 queries mean float32 products; the default would be TF32.
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    product = functools.partial(
        lax.dot_general, precision=precision, preferred_element_type=jnp.float32
    )

    Carry = tuple[jax.Array, jax.Array, jax.Array]

    def step(index: jax.Array, carry: Carry) -> Carry:
        start = (split * config.blocks_per_split + index) * config.block_c
        slot = start + jnp.arange(config.block_c, dtype=jnp.int32)
        is_slot = slot < config.capacity
        held = plgpu.load(held_ref.at[b, held_head, slot], mask=is_slot, other=-1)
        in_ring = slot >= config.prefix
        stale = in_ring[None, :] & (held[None, :] <= at[:, None] - config.window)
        seen = (held[None, :] >= 0) & (held[None, :] <= at[:, None]) & ~stale

        def attend(highest: jax.Array, total: jax.Array, acc: jax.Array) -> Carry:
            block = (b, head, slot[:, None], dims[None, :])
            in_block = is_slot[:, None] & is_dim[None, :]
            zero = jnp.zeros((), k_ref.dtype)  # typed: Python's does not become a float8
            keys = plgpu.load(k_ref.at[block], mask=in_block, other=zero).astype(dtype)
            values = plgpu.load(v_ref.at[block], mask=in_block, other=zero).astype(dtype)
            by_rotation = [product(q, keys, (((1,), (1,)), ((), ()))) for q in rotated]
            s = by_rotation[0]
            if config.rotations == 2:
                s = jnp.where(in_ring[None, :], s, by_rotation[1])
            s = s * config.scale
            if k_scale_ref is not None:
                s = s * plgpu.load(k_scale_ref.at[b, head, slot], mask=is_slot, other=0)[None, :]
            if config.soft_cap is not None:
                s = config.soft_cap * jnp.tanh(s / config.soft_cap)
            s = jnp.where(seen, s, LOWEST)
            new_highest = jnp.maximum(highest, s.max(axis=1))
            shrink = jnp.exp(highest - new_highest)
            p = jnp.where(seen, jnp.exp(s - new_highest[:, None]), 0.0)
            weights = p
            if v_scale_ref is not None:
                v_scale = plgpu.load(v_scale_ref.at[b, head, slot], mask=is_slot, other=0)
                weights = p * v_scale[None, :]
            weighed = product(weights.astype(dtype), values, (((1,), (0,)), ((), ())))
            acc = acc * shrink[:, None] + weighed
            return new_highest, total * shrink + p.sum(axis=1), acc

        is_live = seen.astype(jnp.int32).max(axis=1).max(axis=0) > 0
        return lax.cond(is_live, attend, lambda *carry: carry, *carry)

    empty = (
        jnp.full((config.rows,), LOWEST, jnp.float32),
        jnp.zeros((config.rows,), jnp.float32),
        jnp.zeros((config.rows, acc_ref.shape[-1]), jnp.float32),
    )
    # Typed bounds: Python's are 64 bits wide where `jax_enable_x64` is set.
    bounds = jnp.int32(0), jnp.int32(config.blocks_per_split)
    highest, total, acc = lax.fori_loop(*bounds, step, empty)
    plgpu.store(max_ref.at[b, head, split, row], highest)
    plgpu.store(total_ref.at[b, head, split, row], total)
    plgpu.store(acc_ref.at[b, head, split, row[:, None], dims[None, :]], acc)
