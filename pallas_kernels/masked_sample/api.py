"""Checks the operands of `masked_sample` and picks the implementation that runs it."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.bitmask.packed import BITS_PER_WORD, num_words
from pallas_kernels.dispatch import Implementation
from pallas_kernels.masked_sample.rows import Rows

LARGEST_VOCABULARY = 2**19 - 1
_LOGITS_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def masked_sample(
    logits: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    positions: jax.Array,
    rows: Rows,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sample one token per query, reading the logits once and writing none.

    Order of operations: mask, temperature, top-k, top-p (arXiv 1904.09751), min-p (arXiv 2407.01082),
    then the argmax of logits plus Gumbel noise, which draws from their softmax. Each filter looks at
    what the one before it left, keeps ties with the last token it keeps, and never drops the most
    likely one. Of equal scores the lowest id wins.

    The noise is a hash of (seed, position, token): a request draws the same tokens in whatever row of
    whatever batch, and with logits of the same bits on every platform and by every implementation.

    Args:
      logits: float32, bfloat16 or float16 `[B,N,V]`. Infinities count as the largest finite numbers
        and NaN as the lowest: whatever the model does, a legal token is sampled.
      bitmask: int32 `[B,N,W]` with `W = ceil(V / 32)`, see `pallas_kernels.bitmask`.
      enabled: int32 `[B,N]`, 0 where the row has no grammar and every token is legal.
      positions: int32 `[B,N]`, true positions of the queries; they vary the noise.
      rows: arrays `[B]`. temperature float32, 0 is greedy; top_k int32, 0 keeps all; top_p float32,
        1 keeps all; min_p float32, 0 keeps all; seed uint32.
      implementation: see `pallas_kernels.bitmask.apply_token_bitmask`.

    Returns:
      Token ids, int32 `[B,N]`; 0 where a row has no legal token.

    Raises:
      ValueError: an operand has a wrong dtype or shape or the vocabulary 2^19 tokens or more,
        `implementation` is no known name, or the one named does not take these operands. The
        message begins with the argument's name.
    """
    check_sampling(bitmask, enabled, positions, rows, logits.shape[-1] if logits.ndim else 0)
    if logits.dtype not in _LOGITS_DTYPES:
        raise ValueError(f"logits: must be float32, bfloat16 or float16, got {logits.dtype}")
    if logits.shape[:-1] != positions.shape:
        raise ValueError(
            f"logits: must be [B,N,V] with B, N = {list(positions.shape)} as in positions, "
            f"got {list(logits.shape)}"
        )
    module = dispatch.choose(
        "masked_sample",
        implementation,
        lambda module: module.unsupported(logits.dtype, logits.shape[-1]),
    )
    if positions.size == 0:
        return positions
    sampled: jax.Array = module.masked_sample(logits, bitmask, enabled, positions, rows)
    return sampled


def check_sampling(
    bitmask: jax.Array, enabled: jax.Array, positions: jax.Array, rows: Rows, vocab_size: int
) -> None:
    """Check everything but what the logits come from.

    Raises:
      ValueError: naming the argument.
    """
    if positions.dtype != jnp.int32 or positions.ndim != 2:
        raise ValueError(f"positions: must be int32 [B,N], got {_describe(positions)}")
    if not 0 < vocab_size <= LARGEST_VOCABULARY:
        raise ValueError(f"logits: must have 1 to {LARGEST_VOCABULARY} tokens, got {vocab_size}")
    batch, queries = positions.shape
    for name, array, dtype, shape in (
        ("bitmask", bitmask, jnp.int32, (batch, queries, num_words(vocab_size))),
        ("enabled", enabled, jnp.int32, (batch, queries)),
        ("rows.temperature", rows.temperature, jnp.float32, (batch,)),
        ("rows.top_k", rows.top_k, jnp.int32, (batch,)),
        ("rows.top_p", rows.top_p, jnp.float32, (batch,)),
        ("rows.min_p", rows.min_p, jnp.float32, (batch,)),
        ("rows.seed", rows.seed, jnp.uint32, (batch,)),
    ):
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(
                f"{name}: must be {jnp.dtype(dtype)} {list(shape)} for {vocab_size} tokens "
                f"({BITS_PER_WORD} a word) and positions {list(positions.shape)}, "
                f"got {_describe(array)}"
            )


def _describe(array: jax.Array) -> str:
    return f"{array.dtype} {list(array.shape)}"
