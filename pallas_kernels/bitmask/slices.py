"""The words of a part of the vocabulary, cut or gathered from the mask of the whole, in plain XLA.

What the kernels get is then an ordinary mask of the logits that they have: the bit of `logits[i]`
is bit `i & 31` of word `i >> 5`. Whatever lies outside the mask comes out as 0, not allowed.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bitmask.packed import BITS_PER_WORD, num_words


def words_of_shard(
    bitmask: jax.Array, shard_size: int, first_token: int | jax.Array, vocab_size: int
) -> jax.Array:
    """Words `[..., ceil(shard_size / 32)]` of the tokens from `first_token` on.

    `bitmask` is int32 `[..., ceil(vocab_size / 32)]`, with anything in its bits beyond. A traced
    `first_token` that is negative or no multiple of 32 gives zeros.
    """
    whole_words, more_bits = divmod(vocab_size, BITS_PER_WORD)
    bitmask = jnp.asarray(bitmask)
    if more_bits:
        word = lax.broadcasted_iota(jnp.int32, bitmask.shape, bitmask.ndim - 1)
        bitmask = jnp.where(word < whole_words, bitmask, bitmask & ((1 << more_bits) - 1))
    width, wanted = bitmask.shape[-1], num_words(shard_size)
    # Followed by zeros: a slice that would reach beyond the operand is silently moved back into it.
    bitmask = jnp.pad(bitmask, [(0, 0)] * (bitmask.ndim - 1) + [(0, wanted)])
    first = jnp.asarray(first_token, jnp.int32)
    aligned = (first >= 0) & ((first & (BITS_PER_WORD - 1)) == 0)
    start = jnp.where(aligned, jnp.minimum(first >> 5, width), width)
    return lax.dynamic_slice_in_dim(bitmask, start, wanted, axis=-1)


def words_of_drafts(
    bitmask: jax.Array, d2t: jax.Array, first_token: int | jax.Array, vocab_size: int
) -> jax.Array:
    """Words `[..., ceil(V / 32)]` of the V draft tokens from `first_token` on.

    `bitmask` is int32 `[..., ceil(vocab_size / 32)]`, over target tokens. `d2t` is int32 `[V]`,
    what to add to a draft token, counted through all shards, for its target token. A sum that does
    not fit into 31 bits wraps to a negative one, which is outside of every mask.
    """
    draft = jnp.asarray(first_token, jnp.int32) + jnp.arange(d2t.shape[0], dtype=jnp.int32)
    target = draft + d2t
    inside = (draft >= 0) & (target >= 0) & (target < vocab_size)
    # A token outside is given a bit of a word beyond the last, which `fill` reads as 0.
    target = jnp.where(inside, target, bitmask.shape[-1] * BITS_PER_WORD)
    words = jnp.take(bitmask, target >> 5, axis=-1, mode="fill", fill_value=0)
    by_row = (1,) * (bitmask.ndim - 1)
    bits = (words >> (target & 31).reshape(*by_row, -1)) & 1
    *rows, num_drafts = bits.shape
    wanted = num_words(num_drafts)
    bits = jnp.pad(bits, [(0, 0)] * len(rows) + [(0, wanted * BITS_PER_WORD - num_drafts)])
    bits = bits.reshape(*rows, wanted, BITS_PER_WORD)
    place = lax.broadcasted_iota(jnp.int32, bits.shape, bits.ndim - 1)
    # No two of them share a bit, so the sum is their union.
    return jnp.sum(bits << place, axis=-1, dtype=jnp.int32)
