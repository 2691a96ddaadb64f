"""The GPU kernel: a program for each tile of the head, which ends at once if nothing in it is legal.

A program first looks at its tile's mask words. If no row of its own allows a token of the tile, the
words are all that it reads. Otherwise it multiplies the tile of the head with its rows, piece by piece
along the features, keeps the logits in registers and reduces them to the best score and token of each
row. A small reduction finds the best of all tiles.

Up to 64 rows share a program, so a decode step reads the head once. Larger batches have several
programs for a tile, which follow each other in launch order and find its head in the L2 cache.
Pallas on Triton is deprecated upstream from JAX 0.11 on; this file is all that depends on it here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_kernels.bitmask.packed import BITS_PER_WORD
from pallas_kernels.masked_head.tiles import active_tiles
from pallas_kernels.masked_sample import arithmetic
from pallas_kernels.masked_sample import xla as definition
from pallas_kernels.masked_sample.rows import Rows

TILE = 64  # tokens
MIN_ROWS, MAX_ROWS = 16, 64  # the tensor cores take no fewer; more would spill registers
STEP_BYTES = 256  # of each token's features that a program has in flight at once, in every stage
NUM_WARPS, NUM_STAGES = 4, 4

Best = tuple[jax.Array, jax.Array]


def unsupported(dtype: DTypeLike, hidden_shape: tuple[int, ...], vocab_size: int) -> str | None:
    """Why such a head is not taken, or None."""
    dtype = jnp.dtype(dtype)
    taken = dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    return None if taken else f"a head of {dtype}"


def sample_active(
    hidden: jax.Array,
    head: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    positions: jax.Array,
    rows: Rows,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.masked_head.sample_active`, which has checked the operands.

    `interpret` runs the kernels through XLA, without a GPU.
    """
    (vocab_size, features), num_rows = head.shape, positions.size
    words = definition.effective_words(bitmask, enabled, vocab_size)
    _, count = active_tiles(words, TILE)

    def by_row(x: jax.Array) -> jax.Array:
        """`[B]` or `[B,N]` as `[rows]`."""
        x = x[:, None] if x.ndim == 1 else x
        return jnp.broadcast_to(x, positions.shape).reshape(-1)

    operands = (
        by_row(rows.is_random).astype(jnp.int32),
        by_row(rows.inverse_temperature),
        by_row(arithmetic.hash_row(rows.seed[:, None], positions)),
        words.reshape(num_rows, -1),
        hidden.reshape(num_rows, features),
        head,
    )
    block = MIN_ROWS
    while block < min(num_rows, MAX_ROWS):
        block *= 2
    row_blocks, tiles = pl.cdiv(num_rows, block), pl.cdiv(vocab_size, TILE)
    in_device_memory = pl.BlockSpec(memory_space=pl.ANY)
    scores, tokens = pl.pallas_call(
        functools.partial(_kernel, block=block),
        grid=(row_blocks, tiles),
        in_specs=[in_device_memory] * len(operands),
        out_specs=[in_device_memory] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((tiles, num_rows), jnp.float32),
            jax.ShapeDtypeStruct((tiles, num_rows), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=NUM_STAGES),
        # The whole head, as rows without a grammar need it: what the programs really read is known
        # only when they run, and may be a hundredth of this.
        cost_estimate=pl.CostEstimate(
            flops=row_blocks * block * (2 * head.size + 10 * vocab_size),
            transcendentals=0,
            bytes_accessed=(head.size + hidden.size) * head.dtype.itemsize
            + 4 * (words.size + 3 * num_rows + 2 * tiles * num_rows),
        ),
        interpret=interpret,
        name="masked_head",
    )(*operands)
    highest = jnp.max(scores, axis=0, keepdims=True)
    holders = jnp.where(scores == highest, tokens, jnp.int32(2**31 - 1))
    sampled = jnp.min(holders, axis=0).reshape(positions.shape)
    return sampled, jnp.minimum(count * TILE, jnp.int32(vocab_size))


def _kernel(
    is_random_ref: jax.Ref,
    inverse_ref: jax.Ref,
    hash_ref: jax.Ref,
    words_ref: jax.Ref,
    hidden_ref: jax.Ref,
    head_ref: jax.Ref,
    score_ref: jax.Ref,
    token_ref: jax.Ref,
    *,
    block: int,
) -> None:
    """One tile for one block of rows. Refs, all in device memory: parameters `[rows]`, words
    `[rows,W]`, hidden states `[rows,Dm]`, head `[V,Dm]`; the best score and token of each tile,
    `[tiles,rows]`.
    """
    row_block, tile = pl.program_id(0), pl.program_id(1)
    num_rows, num_words = words_ref.shape
    row = row_block * block + jnp.arange(block, dtype=jnp.int32)
    is_row = row < num_rows
    words_of_tile = TILE // BITS_PER_WORD
    word = tile * words_of_tile + jnp.arange(words_of_tile, dtype=jnp.int32)
    words = plgpu.load(
        words_ref.at[row[:, None], word[None, :]],
        mask=is_row[:, None] & (word < num_words)[None, :],
        other=0,
    )

    def nothing() -> Best:
        return jnp.full((block,), -jnp.inf, jnp.float32), jnp.zeros((block,), jnp.int32)

    def sample() -> Best:
        token = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
        logits = _multiply(hidden_ref, head_ref, row, token)
        place = row[:, None], token[None, :] >> 5
        is_word = is_row[:, None] & (token < num_words * BITS_PER_WORD)[None, :]
        legal = plgpu.load(words_ref.at[place], mask=is_word, other=0) >> (token & 31)[None, :]
        scores = jnp.where((legal & 1) != 0, score(logits, token), -jnp.inf)
        highest = jnp.max(scores, axis=1)
        # Zeros, like those of a tile without a legal token, for rows that have none in this one.
        holders = jnp.where(scores == highest[:, None], token[None, :], jnp.int32(2**31 - 1))
        return highest, jnp.where(highest > -jnp.inf, jnp.min(holders, axis=1), 0)

    def score(logits: jax.Array, token: jax.Array) -> jax.Array:
        def of_rows(ref: jax.Ref) -> jax.Array:
            return plgpu.load(ref.at[row], mask=is_row, other=0)[:, None]

        def random() -> jax.Array:
            scaled = arithmetic.scaled(logits, of_rows(inverse_ref))
            noisy = arithmetic.noisy(scaled, of_rows(hash_ref), token[None, :])
            return jnp.where(is_random != 0, noisy, greedy)

        greedy, is_random = arithmetic.finite(logits), of_rows(is_random_ref)
        return lax.cond(jnp.max(is_random) != 0, random, lambda: greedy)

    is_live = jnp.max((words != 0).astype(jnp.int32)) != 0
    best_score, best_token = lax.cond(is_live, sample, nothing)
    plgpu.store(score_ref.at[tile, row], best_score, mask=is_row)
    plgpu.store(token_ref.at[tile, row], best_token, mask=is_row)


def _multiply(
    hidden_ref: jax.Ref, head_ref: jax.Ref, row: jax.Array, token: jax.Array
) -> jax.Array:
    """float32 logits `[rows,tokens]` of the hidden states `row` and the rows `token` of the head."""
    vocab_size, features = head_ref.shape
    width = STEP_BYTES // head_ref.dtype.itemsize
    is_row, is_token = row < hidden_ref.shape[0], token < vocab_size
    is_float32 = head_ref.dtype == jnp.float32

    def add(step: jax.Array, logits: jax.Array) -> jax.Array:
        feature = step * width + jnp.arange(width, dtype=jnp.int32)
        is_feature = feature < features

        def load(ref: jax.Ref, index: jax.Array, inside: jax.Array) -> Any:
            """`[index,feature]`, with zeros for what is not inside."""
            mask = inside[:, None] & is_feature[None, :]
            return plgpu.load(ref.at[index[:, None], feature[None, :]], mask=mask, other=0)

        return logits + lax.dot_general(
            load(hidden_ref, row, is_row),
            load(head_ref, token, is_token),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if is_float32 else None,
            preferred_element_type=jnp.float32,
        )

    # Typed bounds: Python's are 64 bits wide where `jax_enable_x64` is set.
    steps = jnp.int32(pl.cdiv(features, width))
    zeros = jnp.zeros((row.shape[0], token.shape[0]), jnp.float32)
    logits: jax.Array = lax.fori_loop(jnp.int32(0), steps, add, zeros)
    return logits
