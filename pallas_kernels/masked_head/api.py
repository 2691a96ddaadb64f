"""Checks the operands of `masked_head` and picks the implementation that runs it."""

from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.int8_matmul import Int8Matrix
from pallas_kernels.masked_head.project import GivenLogits, Head, SoftCapped, project
from pallas_kernels.masked_sample.api import check_sampling, masked_sample
from pallas_kernels.masked_sample.rows import Rows

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


class HeadSample(NamedTuple):
    """What `masked_head` returns.

    Attributes:
      tokens: int32 `[B,N]`; 0 where a row has no legal token.
      rows_read: int32 scalar, how many of the head's V rows were read.
    """

    tokens: jax.Array
    rows_read: jax.Array


def masked_head(
    hidden: jax.Array,
    head: Head,
    bitmask: jax.Array,
    enabled: jax.Array,
    positions: jax.Array,
    rows: Rows,
    *,
    implementation: Implementation | None = None,
) -> HeadSample:
    """`masked_sample` of the logits `hidden @ head.T`, without computing what no row may sample.

    The vocabulary is cut into tiles. A tile in which no row of the batch has a legal token is neither
    multiplied nor read, and the logits of the others are sampled where they are computed, so that no
    array of logits exists. One unconstrained row needs all tiles; so do rows inside a JSON string,
    where nearly every token is legal. Rows with top-k, top-p or min-p need their thresholds first:
    while there is one, the logits are computed and kept.

    Args:
      hidden: final hidden states `[B,N,Dm]`: float32, bfloat16 or float16.
      head: `[V,Dm]` of the same dtype; the embedding, where it is tied. Or an `Int8Matrix` or
        `SoftCapped` of that shape and dtype. Or `GivenLogits`: `hidden` are the logits `[B,N,V]`, and
        `masked_sample` samples them all.
      bitmask, enabled, positions, rows: as in `pallas_kernels.masked_sample`.
      implementation: as there, and of `masked_sample`, too. The kernels read plain heads only: XLA
        multiplies the other forms, whichever known implementation is named.

    Raises:
      ValueError: an operand has a wrong dtype or shape, `implementation` is no known name, or the
        one named does not take these operands. The message begins with the argument's name.
    """
    _check(hidden, head, bitmask, enabled, positions, rows)
    _choose(hidden, head, implementation)  # what it refuses, it refuses here and not in a branch

    def with_logits() -> HeadSample:
        tokens = masked_sample(
            project(hidden, head), bitmask, enabled, positions, rows, implementation=implementation
        )
        return HeadSample(tokens, jnp.int32(head.shape[0]))

    def in_tiles() -> HeadSample:
        return sample_active(
            hidden, head, bitmask, enabled, positions, rows, implementation=implementation
        )

    return jax.lax.cond(jnp.any(rows.is_filtered), with_logits, in_tiles)


def sample_active(
    hidden: jax.Array,
    head: Head,
    bitmask: jax.Array,
    enabled: jax.Array,
    positions: jax.Array,
    rows: Rows,
    *,
    implementation: Implementation | None = None,
) -> HeadSample:
    """`masked_head` of rows whose filters are ignored: for callers that have logits for the others.

    Arguments and errors are those of `masked_head`.
    """
    _check(hidden, head, bitmask, enabled, positions, rows)
    if isinstance(head, GivenLogits):  # one below a SoftCapped is sampled in tiles
        unfiltered = rows.without_filters
        logits = project(hidden, head)
        tokens = masked_sample(
            logits, bitmask, enabled, positions, unfiltered, implementation=implementation
        )
        return HeadSample(tokens, jnp.int32(head.vocab_size))
    module = _choose(hidden, head, implementation)
    if positions.size == 0:
        return HeadSample(positions, jnp.int32(0))
    return HeadSample(*module.sample_active(hidden, head, bitmask, enabled, positions, rows))


def _choose(hidden: jax.Array, head: Head, implementation: Implementation | None) -> ModuleType:
    dispatch.check_name(implementation)  # before another is put in its place
    if isinstance(head, Int8Matrix | SoftCapped | GivenLogits):  # the kernels read plain heads
        implementation = "xla"
    return dispatch.choose(
        "masked_head",
        implementation,
        lambda module: module.unsupported(head.dtype, hidden.shape, head.shape[0]),
    )


def _check(
    hidden: jax.Array,
    head: Head,
    bitmask: jax.Array,
    enabled: jax.Array,
    positions: jax.Array,
    rows: Rows,
) -> None:
    if hidden.dtype not in _DTYPES or hidden.shape[:-1] != positions.shape:
        raise ValueError(
            f"hidden: must be float [B,N,Dm] with B, N = {list(positions.shape)} as in positions, "
            f"got {hidden.dtype} {list(hidden.shape)}"
        )
    dtype = jnp.dtype(head.dtype)
    if dtype != hidden.dtype or len(head.shape) != 2 or head.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"head: must be {hidden.dtype} [V,{hidden.shape[-1]}], got {dtype} {list(head.shape)}"
        )
    check_sampling(bitmask, enabled, positions, rows, head.shape[0])
