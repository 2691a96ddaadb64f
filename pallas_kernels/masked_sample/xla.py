"""The portable implementation, and the definition of what a sampled token is.

A loop over tiles of the vocabulary keeps the best token so far. The mask is expanded where the logits
are read, so that neither a mask nor noise of the logits' size ever exists; a tile's values stay in
the cache, and its two reductions vectorise, which the argmax of a whole vocabulary does not on CPUs
(`python -m benchmarks.sampling`).

Top-k, top-p and min-p are thresholds that a bisection over the 32 bits of a float finds by counting:
no sort, no data-dependent shape, and integer sums, which come out the same in any order.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.bitmask.packed import BITS_PER_WORD
from pallas_kernels.masked_sample import arithmetic
from pallas_kernels.masked_sample.rows import Rows

TILE = 4096  # tokens: 16 KiB of float32 a row


def unsupported(dtype: DTypeLike, vocab_size: int) -> str | None:
    """None: every floating dtype and vocabulary works."""
    return None


def masked_sample(
    logits: jax.Array, bitmask: jax.Array, enabled: jax.Array, positions: jax.Array, rows: Rows
) -> jax.Array:
    """See `pallas_kernels.masked_sample.masked_sample`, which has checked the operands."""
    words = effective_words(bitmask, enabled, logits.shape[-1])
    width = words.shape[-1] * BITS_PER_WORD
    if (
        width > logits.shape[-1]
    ):  # so that a slice of the words fits a slice of the logits everywhere
        logits = jnp.pad(logits, ((0, 0), (0, 0), (0, width - logits.shape[-1])))
    tile = min(TILE, width)

    def visit(score: Score, least: jax.Array) -> jax.Array:
        def one(index: jax.Array, best: Best) -> Best:
            # The last tile overlaps the one before it: what is seen twice changes nothing.
            start = jnp.minimum(index * tile, width - tile)
            part = lax.dynamic_slice_in_dim(logits, start, tile, axis=2)
            tokens = start + jnp.arange(tile, dtype=jnp.int32)
            return better(best, score(part, tokens, least), legal(words, start, tile), tokens)

        return lax.fori_loop(0, -(-width // tile), one, Best.none(positions.shape)).token

    def thresholds() -> jax.Array:
        return least_kept(logits, legal(words, 0, width), rows)

    return choose(visit, thresholds, positions, rows)


class Best(NamedTuple):
    """The best token so far: float32 and int32 `[B,N]`."""

    score: jax.Array
    token: jax.Array

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> "Best":
        """Token 0 with a score below that of every legal token."""
        return cls(jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32))


Score = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""`score(logits [B,N,S], tokens [S], least [B,N,1]) -> [B,N,S]`, see `greedy_score`."""


def choose(
    visit: Callable[[Score, jax.Array], jax.Array],
    thresholds: Callable[[], jax.Array] | None,
    positions: jax.Array,
    rows: Rows,
) -> jax.Array:
    """The sampled tokens, int32 `[B,N]`, without work that no row has asked for.

    Args:
      visit: the loop over the vocabulary: the token with the best score, given the score and what
        `least_kept` gave.
      thresholds: calls `least_kept`; None where no row is filtered.
      positions: int32 `[B,N]`.
      rows: parameters of each row.
    """
    all_tokens = jnp.full((*positions.shape, 1), arithmetic.LEAST_KEY, jnp.int32)

    def random() -> jax.Array:
        least = all_tokens
        if thresholds is not None:
            least = lax.cond(jnp.any(rows.is_filtered), thresholds, lambda: all_tokens)
        return visit(functools.partial(random_score, positions=positions, rows=rows), least)

    # Noise for a whole vocabulary is not free; most structured output is greedy.
    return lax.cond(jnp.any(rows.is_random), random, lambda: visit(greedy_score, all_tokens))


def greedy_score(logits: jax.Array, tokens: jax.Array, least: jax.Array) -> jax.Array:
    """The logits, finite, so that a legal token outweighs every illegal one whatever the model says."""
    return arithmetic.finite(logits)


def random_score(
    logits: jax.Array, tokens: jax.Array, least: jax.Array, *, positions: jax.Array, rows: Rows
) -> jax.Array:
    """Logits over temperature plus Gumbel noise; −inf for what is filtered; greedy rows without."""
    scaled = scale(logits, rows)
    row = arithmetic.hash_row(rows.seed[:, None], positions)[..., None]
    noisy = arithmetic.noisy(scaled, row, tokens[None, None, :])
    noisy = jnp.where(arithmetic.key(scaled) >= least, noisy, -jnp.inf)
    return jnp.where(rows.is_random[:, None, None], noisy, arithmetic.finite(logits))


def better(best: Best, scores: jax.Array, is_legal: jax.Array, tokens: jax.Array) -> Best:
    """The better of `best` and a tile's best. Of equals the first wins, here and in the tile.

    `scores` float32 and `is_legal` bool `[B,N,S]`, `tokens` int32 `[S]`, ascending.
    """
    scores = jnp.where(is_legal, scores, -jnp.inf)
    highest = scores.max(axis=-1)
    # Not argmax: two plain reductions vectorise.
    holders = jnp.where(scores == highest[..., None], tokens[None, None, :], jnp.int32(2**31 - 1))
    improves = highest > best.score
    return Best(
        jnp.where(improves, highest, best.score),
        jnp.where(improves, holders.min(axis=-1), best.token),
    )


def effective_words(bitmask: jax.Array, enabled: jax.Array, vocab_size: int) -> jax.Array:
    """The words `[B,N,W]`, all ones where a row is not enabled, and no bit beyond the vocabulary."""
    words = jnp.where(enabled[..., None] == 0, -1, bitmask)
    if tail := vocab_size % BITS_PER_WORD:
        words = words.at[..., -1].set(words[..., -1] & jnp.int32(2**tail - 1))
    return words


def legal(words: jax.Array, start: jax.Array | int, count: int) -> jax.Array:
    """The words of `count` tokens from `start` expanded: bool `[B,N,count]`; both multiples of 32."""
    part = lax.dynamic_slice_in_dim(words, start // BITS_PER_WORD, count // BITS_PER_WORD, axis=2)
    bit = lax.broadcasted_iota(jnp.int32, (*part.shape, BITS_PER_WORD), 3)
    return ((part[..., None] >> bit) & 1).reshape(*part.shape[:-1], -1) != 0


def scale(logits: jax.Array, rows: Rows) -> jax.Array:
    """Logits over temperature, finite float32; those of greedy rows as they are."""
    return arithmetic.scaled(logits, rows.inverse_temperature[:, None, None])


def least_kept(logits: jax.Array, is_legal: jax.Array, rows: Rows) -> jax.Array:
    """The key of the least likely token that top-k, top-p and min-p keep, in this order.

    `logits` any float and `is_legal` bool `[B,N,S]`; result int32 `[B,N,1]`. The most likely token is
    always kept, and a row without filters keeps all.
    """
    keys = jnp.where(is_legal, arithmetic.key(scale(logits, rows)), arithmetic.LEAST_KEY)
    keys = _pad_to_tiles(keys, arithmetic.LEAST_KEY)
    highest = jnp.max(keys, axis=-1, keepdims=True)
    everything = jnp.full(highest.shape, arithmetic.LEAST_KEY, jnp.int32)
    # What a row that is greedy would filter must cost the others nothing.
    top_k = jnp.where(rows.is_filtered, rows.top_k, 0)[:, None, None]
    top_p = jnp.where(rows.is_filtered, rows.top_p, 1.0)[:, None, None]

    def most_likely_k() -> jax.Array:
        def count(least: jax.Array) -> jax.Array:
            (number,) = _sums(lambda keys: ((keys >= least).astype(jnp.int32),), keys)
            return number

        return bisect(lambda least: count(least) >= top_k, highest.shape)

    least = lax.cond(jnp.any(top_k > 0), most_likely_k, lambda: everything)
    least = jnp.where(top_k > 0, least, everything)

    def nucleus() -> jax.Array:
        is_kept = (keys >= least) & (keys > arithmetic.LEAST_KEY)
        from_highest = arithmetic.unkey(keys) - arithmetic.unkey(highest)
        weights = jnp.where(is_kept, arithmetic.weight(from_highest), 0)
        half = arithmetic.WEIGHT_BITS // 2

        def mass(least: jax.Array) -> jax.Array:
            def halves(keys: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
                above = jnp.where(keys >= least, weights, 0)
                return above >> half, above & (2**half - 1)

            # In two halves, neither of which overflows with fewer than 2^19 tokens.
            return mass_of(*_sums(halves, keys, weights))

        enough = arithmetic.product(mass(everything), top_p)
        return bisect(lambda key: mass(key) >= enough, highest.shape)

    inner = lax.cond(jnp.any(top_p < 1), nucleus, lambda: everything)
    least = jnp.where(top_p < 1, jnp.maximum(least, inner), least)
    floor = min_p_key(arithmetic.unkey(highest), rows.min_p[:, None, None])
    return jnp.minimum(jnp.maximum(least, floor), highest)


def _pad_to_tiles(x: jax.Array, value: int) -> jax.Array:
    missing = -x.shape[-1] % min(TILE, x.shape[-1])
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing)), constant_values=value)


def _sums(terms: Callable[..., tuple[jax.Array, ...]], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Sums over the last axis of what `terms` makes of `arrays`, each `[B,N,1]`, tile by tile.

    XLA:CPU stores what it sums up: here a tile of it, not a vocabulary.
    """
    width = arrays[0].shape[-1]
    tile = min(TILE, width)

    def part(index: jax.Array) -> tuple[jax.Array, ...]:
        tiles = (lax.dynamic_slice_in_dim(a, index * tile, tile, axis=-1) for a in arrays)
        return tuple(
            jnp.sum(term, axis=-1, keepdims=True, dtype=jnp.int32) for term in terms(*tiles)
        )

    def add(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(s + p for s, p in zip(sums, part(index), strict=True))

    return lax.fori_loop(1, width // tile, add, part(jnp.int32(0)))


def min_p_key(highest: jax.Array, min_p: jax.Array) -> jax.Array:
    """The key of a token `min_p` times as likely as the most likely one, int32 like `highest`."""
    floor = arithmetic.finite(highest + arithmetic.log(jnp.maximum(min_p, 1e-37)))
    return jnp.where(min_p > 0, arithmetic.key(floor), arithmetic.LEAST_KEY)


def bisect(is_enough: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """The largest key for which `is_enough` holds, or LEAST_KEY; it must hold for all smaller ones."""

    def halve(i: jax.Array, least: jax.Array) -> jax.Array:
        # From the sign bit down: clearing that one and setting any other is a step upwards.
        candidate = least ^ (jnp.int32(1) << (jnp.int32(31) - i))
        return jnp.where(is_enough(candidate), candidate, least)

    start = jnp.full(shape, arithmetic.LEAST_KEY, jnp.int32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(32), halve, start)


def mass_of(high: jax.Array, low: jax.Array) -> jax.Array:
    """`high * 2^12 + low`, the two halves of a sum of weights, as float32."""
    half = arithmetic.WEIGHT_BITS // 2
    high, low = high + (low >> half), low & (2**half - 1)
    return high.astype(jnp.float32) * jnp.float32(2.0**half) + low.astype(jnp.float32)
