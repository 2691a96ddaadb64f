"""The portable implementation in plain `jax.numpy`, for every platform and dtype.

The words are broadcast along a new minor dimension and shifted by its index, with no gather: XLA
makes one elementwise loop of it on CPUs and GPUs, in place if it may, and can fuse it with what
follows. On TPUs, whose tiled layouts make the [..., W, 32] → [..., V] reshape move data, it does
unpack the mask into memory, which is why there is a kernel for them.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.bitmask.packed import BITS_PER_WORD, masked_logit


def unsupported(dtype: DTypeLike) -> str | None:
    """None: every floating dtype works."""
    return None


def apply_token_bitmask(logits: jax.Array, bitmask: jax.Array, enabled: jax.Array) -> jax.Array:
    """See `pallas_kernels.bitmask.apply_token_bitmask`, which has checked the operands."""
    *rows, vocab_size = logits.shape
    # Switching rows off in the words costs 1/32 of doing it in the logits.
    words = jnp.where(enabled[..., None] == 0, -1, bitmask)
    word_and_bit = (*bitmask.shape, BITS_PER_WORD)
    bit = jax.lax.broadcasted_iota(jnp.int32, word_and_bit, bitmask.ndim)
    # The shift is arithmetic and drags the sign bit along; `& 1` drops it again.
    allowed = (words[..., None] >> bit) & 1
    allowed = allowed.reshape(*rows, -1)[..., :vocab_size]
    return jnp.where(allowed != 0, logits, masked_logit(logits.dtype))
