"""Mixtures of experts in fixed shapes, and no more weights read than a step needs.

Every token is given to its experts in blocks of rows: a block belongs to one expert, and the loop
over blocks reads that expert's weights and multiplies. How many rows a block has is known from the
shapes alone (``block_rows``): one row where a step has few tokens, so that only chosen experts are
read; all tokens where reading every expert once is what counts; between the two for a long prompt,
where the arithmetic does. Nothing depends on which experts were chosen but the contents of arrays.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_FEW_TOKENS = 64
"""Up to here a product with all tokens takes hardly longer than reading the expert's weights."""
_LEAST_ROWS = 16


def route(logits: jax.Array, chosen: int) -> tuple[jax.Array, jax.Array]:
    """The best experts of each token and their shares, a softmax over these alone.

    Args:
      logits: the router's, ``[T,E]``.
      chosen: experts per token, K.

    Returns:
      Experts int32 ``[T,K]``, and shares float32 ``[T,K]`` that add up to one.
    """
    scores, experts = jax.lax.top_k(logits, chosen)
    return experts, jax.nn.softmax(scores.astype(jnp.float32), axis=-1)


def block_rows(tokens: int, chosen: int, experts: int) -> int:
    """Rows of a block, for ``tokens`` that are given to ``chosen`` of ``experts`` each."""
    pairs = tokens * chosen
    if pairs <= experts:
        return 1
    if tokens <= _FEW_TOKENS:
        return tokens
    # About as many rows as an expert has on average, so that half of them may be idle at most.
    return min(tokens, max(_LEAST_ROWS, 1 << (pairs // experts - 1).bit_length()))


def mixture(
    x: jax.Array,
    experts: jax.Array,
    shares: jax.Array,
    count: int,
    apply: Callable[[jax.Array, jax.Array], jax.Array],
    rows: int | None = None,
) -> jax.Array:
    """What each token's experts make of it, added up by their shares.

    Args:
      x: ``[T,D]``.
      experts: int32 ``[T,K]``, those of a token distinct.
      shares: float32 ``[T,K]``.
      count: experts there are, E.
      apply: of an expert's index, int32 ``[]``, and its rows ``[M,D]``: its output ``[M,D]``.
      rows: M; by default as ``block_rows`` has it.

    Returns:
      ``[T,D]`` in the dtype of ``x``, summed in float32.
    """
    tokens, chosen = experts.shape
    owner, token, slot = _plan(experts, count, rows or block_rows(tokens, chosen, count))

    def block(item: tuple[jax.Array, jax.Array]) -> jax.Array:
        return apply(item[0], x[item[1]])

    out = jax.lax.map(block, (owner, token))
    out = out.reshape(token.size, -1)[slot].reshape(tokens, chosen, -1)
    return jnp.einsum("tkd,tk->td", out.astype(jnp.float32), shares).astype(x.dtype)


def _plan(experts: jax.Array, count: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The blocks for ``experts [T,K]``.

    Returns:
      The expert of each block ``[n]``, the tokens that are its rows ``[n,M]``, and where among all
      rows ``n*M`` each pair of token and expert is, ``[T*K]``; all int32.
    """
    tokens, chosen = experts.shape
    pairs = tokens * chosen
    flat, token = experts.reshape(-1), jnp.arange(pairs, dtype=jnp.int32) // chosen
    if rows == 1:
        return flat, token[:, None], jnp.arange(pairs, dtype=jnp.int32)
    if rows >= tokens:
        every = jnp.arange(tokens, dtype=jnp.int32)[None, :]
        owner = jnp.arange(count, dtype=jnp.int32)
        return owner, jnp.repeat(every, count, axis=0), flat * tokens + token
    # All but one row of an expert's last block may be idle.
    hit = min(count, pairs)
    blocks = hit + (pairs - hit) // rows
    mine = jax.nn.one_hot(flat, count, dtype=jnp.int32)  # [T*K,E]
    rank = (jnp.cumsum(mine, axis=0) * mine).sum(axis=1) - 1  # among the rows of its expert
    needed = -(-mine.sum(axis=0) // rows)
    ends = jnp.cumsum(needed)
    slot = (ends - needed)[flat] * rows + rank
    # Idle rows compute with the first token, idle blocks with the last expert; no one reads them.
    placed = jnp.zeros(blocks * rows, jnp.int32).at[slot].set(token)
    before = ends[None, :] <= jnp.arange(blocks, dtype=jnp.int32)[:, None]
    owner = jnp.minimum(before.sum(axis=1, dtype=jnp.int32), count - 1)
    return owner, placed.reshape(blocks, rows), slot
