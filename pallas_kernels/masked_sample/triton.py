"""The GPU kernel: splits of the vocabulary find their best tokens, a small reduction the best of those.

There are fewer rows than a GPU has multiprocessors, so each row's vocabulary is cut into splits. A
program walks through the blocks of its split with the best score and token of each of its places in
registers, and reduces them once, at its end. Where no token of a block is legal, the words are all
that is read of it; of other blocks, only the logits of legal tokens. Rows that do not draw compute no
noise.

The filters are those of `pallas_kernels.masked_sample.xla` and run only where a row filters.
Pallas on Triton is deprecated upstream from JAX 0.11 on; this file is all that depends on it here.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_kernels.bitmask.packed import BITS_PER_WORD
from pallas_kernels.masked_sample import arithmetic, xla
from pallas_kernels.masked_sample.rows import Rows

BLOCK = 1024  # tokens: 8 for each thread
NUM_WARPS = 4
# Programs that fill the largest GPUs (132 to 148 multiprocessors) about four times.
PROGRAMS = 512


def unsupported(dtype: DTypeLike, vocab_size: int) -> str | None:
    """Why such logits are not taken, or None."""
    dtype = jnp.dtype(dtype)
    taken = dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    return None if taken else f"{dtype} logits"


def masked_sample(
    logits: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    positions: jax.Array,
    rows: Rows,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.masked_sample.masked_sample`, which has checked the operands.

    `interpret` runs the kernel through XLA, without a GPU.
    """
    vocab_size = logits.shape[-1]

    def thresholds() -> jax.Array:
        words = xla.effective_words(bitmask, enabled, vocab_size)
        is_legal = xla.legal(words, 0, words.shape[-1] * BITS_PER_WORD)[..., :vocab_size]
        return xla.least_kept(logits, is_legal, rows)[..., 0]

    everything = jnp.full(positions.shape, arithmetic.LEAST_KEY, jnp.int32)
    least = lax.cond(jnp.any(rows.is_filtered), thresholds, lambda: everything)
    num_rows = positions.size
    num_blocks = pl.cdiv(vocab_size, BLOCK)
    blocks_per_split = pl.cdiv(num_blocks, pl.cdiv(PROGRAMS, num_rows))
    splits = pl.cdiv(num_blocks, blocks_per_split)

    def by_row(x: jax.Array) -> jax.Array:
        """`[B]` or `[B,N]` as `[rows]`."""
        x = x[:, None] if x.ndim == 1 else x
        return jnp.broadcast_to(x, positions.shape).reshape(-1)

    operands = (
        by_row(enabled),
        by_row(rows.is_random).astype(jnp.int32),
        by_row(rows.inverse_temperature),
        by_row(arithmetic.hash_row(rows.seed[:, None], positions)),
        by_row(least),
        bitmask.reshape(num_rows, -1),
        logits.reshape(num_rows, -1),
    )
    in_device_memory = pl.BlockSpec(memory_space=pl.ANY)
    scores, tokens = pl.pallas_call(
        functools.partial(_kernel, blocks_per_split=blocks_per_split),
        grid=(num_rows, splits),
        in_specs=[in_device_memory] * len(operands),
        out_specs=[in_device_memory] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, splits), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, splits), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS),
        cost_estimate=pl.CostEstimate(
            flops=10 * logits.size,
            transcendentals=0,
            bytes_accessed=logits.size * logits.dtype.itemsize
            + 4 * (bitmask.size + 5 * num_rows + 2 * num_rows * splits),
        ),
        interpret=interpret,
        name="masked_sample",
    )(*operands)
    return _best_token(scores, tokens).reshape(positions.shape)


def _best_token(scores: jax.Array, tokens: jax.Array) -> jax.Array:
    """The token of the highest score along the last axis, the lowest of equals."""
    highest = jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(scores == highest, tokens, jnp.int32(2**31 - 1)), axis=-1)


def _kernel(
    enabled_ref: jax.Ref,
    is_random_ref: jax.Ref,
    inverse_ref: jax.Ref,
    hash_ref: jax.Ref,
    least_ref: jax.Ref,
    words_ref: jax.Ref,
    logits_ref: jax.Ref,
    score_ref: jax.Ref,
    token_ref: jax.Ref,
    *,
    blocks_per_split: int,
) -> None:
    """One split of one row. Refs, all in device memory: parameters `[rows]`, words `[rows,W]`, logits
    `[rows,V]`; the best score and token of each split, `[rows,splits]`.
    """
    row, split = pl.program_id(0), pl.program_id(1)
    vocab_size = logits_ref.shape[-1]
    allow_all = jnp.where(enabled_ref[row] == 0, jnp.int32(-1), jnp.int32(0))
    inverse, row_hash, least = inverse_ref[row], hash_ref[row], least_ref[row]
    Best = tuple[jax.Array, jax.Array]

    def visit_split(score: Callable[[jax.Array, jax.Array], jax.Array]) -> Best:
        def visit(index: jax.Array, best: Best) -> Best:
            start = (split * blocks_per_split + index) * BLOCK
            token = start + jnp.arange(BLOCK, dtype=jnp.int32)
            is_token = token < vocab_size
            word = plgpu.load(words_ref.at[row, token >> 5], mask=is_token, other=0) | allow_all
            is_legal = is_token & (((word >> (token & 31)) & 1) != 0)

            def improve(highest: jax.Array, best_token: jax.Array) -> Best:
                logits = plgpu.load(logits_ref.at[row, token], mask=is_legal, other=0)
                scores = jnp.where(is_legal, score(logits, token), -jnp.inf)
                improves = scores > highest
                return (
                    jnp.where(improves, scores, highest),
                    jnp.where(improves, token, best_token),
                )

            is_live = jnp.max(is_legal.astype(jnp.int32)) != 0
            return lax.cond(is_live, improve, lambda *best: best, *best)

        nothing = jnp.full((BLOCK,), -jnp.inf, jnp.float32), jnp.zeros((BLOCK,), jnp.int32)
        # Typed bounds: Python's are 64 bits wide where `jax_enable_x64` is set.
        best: Best = lax.fori_loop(jnp.int32(0), jnp.int32(blocks_per_split), visit, nothing)
        return best

    def greedy_score(logits: jax.Array, token: jax.Array) -> jax.Array:
        return arithmetic.finite(logits)

    def random_score(logits: jax.Array, token: jax.Array) -> jax.Array:
        scaled = arithmetic.scaled(logits, inverse)
        noisy = arithmetic.noisy(scaled, row_hash, token)
        return jnp.where(arithmetic.key(scaled) >= least, noisy, -jnp.inf)

    scores, tokens = lax.cond(
        is_random_ref[row] != 0,
        lambda: visit_split(random_score),
        lambda: visit_split(greedy_score),
    )
    score_ref[row, split] = jnp.max(scores)
    token_ref[row, split] = _best_token(scores, tokens)
