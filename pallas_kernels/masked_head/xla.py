"""The portable implementation: a loop over the tiles of the head in which some row has a legal token.

Small tiles follow the masks closely. Where most of them are active, the head is multiplied as a whole,
which then costs nothing beside `Engine(head="full")` (`python -m benchmarks.head`).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.bitmask.packed import BITS_PER_WORD
from pallas_kernels.masked_head.project import Head, project, project_rows
from pallas_kernels.masked_head.tiles import active_tiles
from pallas_kernels.masked_sample import xla as sampler
from pallas_kernels.masked_sample.rows import Rows

TILE = 64
MOST_ACTIVE = 0.5
"""Share of active tiles up to which they are visited one by one."""
MIN_VOCABULARY = 2048
"""Below it there is nothing to save."""


def unsupported(dtype: DTypeLike, hidden_shape: tuple[int, ...], vocab_size: int) -> str | None:
    """None: every floating dtype and shape works."""
    return None


def sample_active(
    hidden: jax.Array,
    head: Head,
    bitmask: jax.Array,
    enabled: jax.Array,
    positions: jax.Array,
    rows: Rows,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.masked_head.sample_active`, which has checked the operands."""
    vocab_size = head.shape[0]
    everything = jnp.int32(vocab_size)

    def at_once() -> tuple[jax.Array, jax.Array]:
        logits = project(hidden, head)
        unfiltered = rows.without_filters
        return sampler.masked_sample(logits, bitmask, enabled, positions, unfiltered), everything

    # A slice of rows must fit a slice of words: other vocabularies (GPT-2's 50 257) go without.
    if vocab_size % BITS_PER_WORD or vocab_size < MIN_VOCABULARY:
        return at_once()
    words = sampler.effective_words(bitmask, enabled, vocab_size)
    indices, count = active_tiles(words, TILE)

    def active_only() -> tuple[jax.Array, jax.Array]:
        tokens = _visit(hidden, head, words, positions, rows, indices, count)
        return tokens, jnp.minimum(count * TILE, everything)

    few = count <= int(MOST_ACTIVE * indices.shape[0])
    return lax.cond(few, active_only, at_once)


def _visit(
    hidden: jax.Array,
    head: Head,
    words: jax.Array,
    positions: jax.Array,
    rows: Rows,
    indices: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """The tokens sampled from the first `count` tiles that `indices` names, int32 `[B,N]`."""

    def visit(score: sampler.Score, least: jax.Array) -> jax.Array:
        def one(index: jax.Array, best: sampler.Best) -> sampler.Best:
            # A tile that would stick out begins earlier: what is seen twice changes nothing.
            start = jnp.minimum(indices[index] * TILE, head.shape[0] - TILE)
            logits = project_rows(hidden, head, start, TILE)
            tokens = start + jnp.arange(TILE, dtype=jnp.int32)
            is_legal = sampler.legal(words, start, TILE)
            return sampler.better(best, score(logits, tokens, least), is_legal, tokens)

        return lax.fori_loop(0, count, one, sampler.Best.none(positions.shape)).token

    return sampler.choose(visit, None, positions, rows)
