"""Which tiles of the vocabulary hold a token that some row may sample."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bitmask.packed import BITS_PER_WORD


def active_tiles(words: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """The tiles to visit, and how many they are.

    Args:
      words: effective mask words (`masked_sample.xla.effective_words`), int32 `[B,N,W]`.
      tile: tokens a tile, a multiple of 32; the last tile may be cut.

    Returns:
      Tile indices, int32 `[tiles]`: the active ones in order, then the last of them again, so that a
      pipeline which skips equal indices fetches no more (0 if there is none). And their number,
      int32 scalar.
    """
    any_row = lax.reduce(words, jnp.int32(0), lax.bitwise_or, (0, 1))
    words_per_tile = tile // BITS_PER_WORD
    padded = jnp.pad(any_row, (0, -any_row.shape[0] % words_per_tile))
    is_active = (padded.reshape(-1, words_per_tile) != 0).any(axis=1)
    number = is_active.shape[0]
    tiles = jnp.arange(number, dtype=jnp.int32)
    count = is_active.sum(dtype=jnp.int32)
    last = jnp.max(jnp.where(is_active, tiles, 0))
    # A sort, as `nonzero` is a scatter, and 64 bits wide where `jax_enable_x64` is set.
    in_order = lax.sort(jnp.where(is_active, tiles, number))
    return jnp.where(tiles < count, in_order, last), count
