"""The portable implementation: loops over tiles of the head, their number decided by the masks.

Measured on CPUs: a tile of 64 rows costs no more per row than one product with the whole head, so
small tiles follow the masks closely. Where most tiles are active, a batch multiplies tiles of 2048
(faster than one product with the whole head, which writes the logits out and reads them again), and
a single row the whole head at once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.bitmask.packed import BITS_PER_WORD
from pallas_kernels.masked_head.project import project
from pallas_kernels.masked_head.tiles import active_tiles
from pallas_kernels.masked_sample import xla as sampler
from pallas_kernels.masked_sample.rows import Rows

SMALL_TILE = 64
LARGE_TILE = 2048
MOST_ACTIVE = 0.5
"""Share of active tiles up to which small ones are visited one by one."""


def unsupported(dtype: DTypeLike, hidden_shape: tuple[int, ...], vocab_size: int) -> str | None:
    """None: every floating dtype and shape works."""
    return None


def masked_head(
    hidden: jax.Array,
    head: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    positions: jax.Array,
    rows: Rows,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.masked_head.masked_head`, which has checked the operands."""
    vocab_size = head.shape[0]
    everything = jnp.int32(vocab_size)

    def at_once() -> tuple[jax.Array, jax.Array]:
        logits = project(hidden, head)
        return sampler.masked_sample(logits, bitmask, enabled, positions, rows), everything

    # A slice of rows must fit a slice of words: other vocabularies (GPT-2's 50 257) go without.
    if vocab_size % BITS_PER_WORD or vocab_size < LARGE_TILE:
        return at_once()
    words = sampler.effective_words(bitmask, enabled, vocab_size)
    indices, count = active_tiles(words, SMALL_TILE)
    visit = functools.partial(_visit, hidden, head, words, positions, rows)

    def active_only() -> tuple[jax.Array, jax.Array]:
        return visit(SMALL_TILE, indices, count), jnp.minimum(count * SMALL_TILE, everything)

    def in_large_tiles() -> tuple[jax.Array, jax.Array]:
        number = -(-vocab_size // LARGE_TILE)
        return visit(LARGE_TILE, jnp.arange(number, dtype=jnp.int32), number), everything

    few = count <= int(MOST_ACTIVE * indices.shape[0])
    many = at_once if positions.size == 1 else in_large_tiles
    way = jnp.where(jnp.any(rows.is_filtered), 2, jnp.where(few, 0, 1))
    return lax.switch(way, (active_only, many, at_once))


def _visit(
    hidden: jax.Array,
    head: jax.Array,
    words: jax.Array,
    positions: jax.Array,
    rows: Rows,
    tile: int,
    indices: jax.Array,
    count: jax.Array | int,
) -> jax.Array:
    """The tokens sampled from the first `count` tiles that `indices` names, int32 `[B,N]`."""

    def visit(score: sampler.Score, least: jax.Array) -> jax.Array:
        def one(index: jax.Array, best: sampler.Best) -> sampler.Best:
            # A tile that would stick out begins earlier: what is seen twice changes nothing.
            start = jnp.minimum(indices[index] * tile, head.shape[0] - tile)
            logits = project(hidden, lax.dynamic_slice_in_dim(head, start, tile))
            tokens = start + jnp.arange(tile, dtype=jnp.int32)
            is_legal = sampler.legal(words, start, tile)
            return sampler.better(best, score(logits, tokens, least), is_legal, tokens)

        return lax.fori_loop(0, count, one, sampler.Best.none(positions.shape)).token

    return sampler.choose(visit, None, positions, rows)
