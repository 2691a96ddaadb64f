"""The GPU kernel: it stores the masked value where a token is not allowed, and reads no logits.

The output is the input's own buffer, so tokens that stay cost no traffic at all, as in the kernels
of TensorRT-LLM and XGrammar. A program expands `BLOCK_W` words of one row along a second dimension
of 32 bits: consecutive threads hold consecutive tokens, and their stores coalesce. A program of a
row without a grammar ends before it reads its words, and one that finds them all ones ends there;
where no token is allowed, the stores are all that a program moves.

Pallas on Triton is deprecated upstream from JAX 0.11 on; this file is all that depends on it here.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_kernels.bitmask.packed import BITS_PER_WORD, masked_logit

BLOCK_W = 128  # words a program: 4096 tokens, 32 for each of its threads
NUM_WARPS = 4


def unsupported(dtype: DTypeLike) -> str | None:
    """Why logits of `dtype` are not taken, or None."""
    dtype = jnp.dtype(dtype)
    taken = dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    return None if taken else f"{dtype} logits"


def apply_token_bitmask(
    logits: jax.Array, bitmask: jax.Array, enabled: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """See `pallas_kernels.bitmask.apply_token_bitmask`, which has checked the operands.

    `interpret` runs the kernel through XLA, without a GPU.
    """
    num_words, vocab_size = bitmask.shape[-1], logits.shape[-1]
    rows = logits.reshape(-1, vocab_size)
    in_device_memory = pl.BlockSpec(memory_space=pl.ANY)
    masked = pl.pallas_call(
        functools.partial(_kernel, vocab_size=vocab_size, num_words=num_words),
        grid=(rows.shape[0], pl.cdiv(num_words, BLOCK_W)),
        in_specs=[in_device_memory] * 3,
        out_specs=in_device_memory,
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        input_output_aliases={2: 0},
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS),
        # The most that it moves: every word read, every logit written.
        cost_estimate=pl.CostEstimate(
            flops=3 * rows.size,
            transcendentals=0,
            bytes_accessed=rows.size * rows.dtype.itemsize + 4 * (bitmask.size + enabled.size),
        ),
        interpret=interpret,
        name="apply_token_bitmask",
    )(enabled.reshape(-1), bitmask.reshape(-1, num_words), rows)
    return masked.reshape(logits.shape)


def _kernel(
    enabled_ref: jax.Ref,
    words_ref: jax.Ref,
    logits_ref: jax.Ref,
    masked_ref: jax.Ref,
    *,
    vocab_size: int,
    num_words: int,
) -> None:
    """One block of words of one row; `masked_ref` is the buffer of `logits_ref`."""
    del logits_ref
    row = pl.program_id(0)
    word = pl.program_id(1) * BLOCK_W + jnp.arange(BLOCK_W, dtype=jnp.int32)

    @pl.when(enabled_ref[row] != 0)
    def constrain() -> None:
        words = plgpu.load(words_ref.at[row, word], mask=word < num_words, other=-1)

        @pl.when(jnp.max((words != -1).astype(jnp.int32)) != 0)
        def store() -> None:
            bit = lax.broadcasted_iota(jnp.int32, (BLOCK_W, BITS_PER_WORD), 1)
            token = word[:, None] * BITS_PER_WORD + bit
            illegal = ((words[:, None] >> bit) & 1) == 0
            lowest = jnp.full(token.shape, masked_logit(masked_ref.dtype), masked_ref.dtype)
            plgpu.store(masked_ref.at[row, token], lowest, mask=illegal & (token < vocab_size))
