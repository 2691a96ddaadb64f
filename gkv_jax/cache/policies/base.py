"""What a policy is: a score for each token, and what it must see to give one."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

import jax
import jax.numpy as jnp

from gkv_jax.errors import UserError
from gkv_jax.rope import Rope

if TYPE_CHECKING:
    from gkv_jax.cache.spec import CacheSpec

Needs = Literal["keys", "window_attention", "attention_mass", "query_statistics"]


@dataclasses.dataclass(frozen=True)
class QueryStatistics:
    """Mean ``[B,Hq,D]`` and covariance ``[B,Hq,D,D]`` of a text's queries before rotation, float32.

    The queries are scaled so that a score is ``q.k / sqrt(D)``, whatever the model's own scale is.
    """

    mean: jax.Array
    covariance: jax.Array


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What one layer of a text shows to a policy. C tokens a KV head, some of them empty.

    Attributes:
      k: rotated keys ``[B,Hk,C,D]``.
      v: values ``[B,Hk,C,D]``.
      positions: true positions, int32 ``[B,Hk,C]``, -1 where there is no token.
      next_pos: tokens read so far, int32 ``[B]``.
      in_order: whether the tokens stand in order of position (as in a whole prompt).
      rope: the layer's rotation; None where the model's own code rotates, or nothing does.
      attention: float32 ``[B,Hk,C]`` where the policy needs it, a mean over the query heads that
        share the KV head; see ``Policy.needs``.
      queries: where the policy needs them.
    """

    k: jax.Array
    v: jax.Array
    positions: jax.Array
    next_pos: jax.Array
    in_order: bool
    rope: Rope | None
    attention: jax.Array | None = None
    queries: QueryStatistics | None = None


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which tokens are worth a place among the ``kept`` ones.

    Attributes:
      name: as in ``CacheSpec.policy``.
      score: from evidence to float32 ``[B,Hk,C]``; the highest are kept. What it gives for empty
        places, sinks and the window does not matter: those are not its to choose.
      needs: ``keys`` (and values) alone; ``window_attention``, the mean probability that the last
        ``observe`` queries give a token; ``attention_mass``, the sum of the probabilities that every
        query so far has given it; ``query_statistics``, mean and covariance of the prompt's queries.
      observe: queries that vote, whatever ``CacheSpec.observe`` says; None for what that says.
      in_decode: whether the policy also chooses, unless told otherwise, among the tokens that leave
        the window in decode; else they are gone.
    """

    name: str
    score: "Callable[[Evidence, CacheSpec], jax.Array]"
    needs: Needs
    observe: int | None = None
    in_decode: bool = False

    def __post_init__(self) -> None:
        if self.needs not in get_args(Needs):
            raise UserError(f"policy.needs is {self.needs!r}; choose from {get_args(Needs)}")
        if self.observe is not None and self.observe < 1:
            raise UserError(f"policy.observe is {self.observe}; it must be at least 1, or None")


def max_pool(scores: jax.Array, evidence: Evidence, width: int) -> jax.Array:
    """Each token's score, or that of a neighbour in the text within ``width // 2``, if higher.

    Neighbours are those that are left: where tokens between two have been evicted, the two touch.
    Empty places have no say. ``scores`` is float32 ``[B,Hk,C]``.
    """
    return _pool(scores, evidence, width, jax.lax.max, -jnp.inf)


def mean_pool(scores: jax.Array, evidence: Evidence, width: int) -> jax.Array:
    """The mean over each token and its neighbours, as ``max_pool`` finds them.

    Beyond the first and the last token the text counts as zeros, which lowers the scores near both
    (as in SnapKV's code and NVIDIA's kvpress).
    """
    return _pool(scores, evidence, width, jax.lax.add, 0.0) / width


def _pool(
    scores: jax.Array,
    evidence: Evidence,
    width: int,
    combine: Callable[[jax.Array, jax.Array], jax.Array],
    nothing: float,
) -> jax.Array:
    def pool(in_order: jax.Array) -> jax.Array:
        pooled: jax.Array = jax.lax.reduce_window(
            in_order, nothing, combine, (1, 1, width), (1, 1, 1), "SAME"
        )
        return pooled

    scores = jnp.where(evidence.positions >= 0, scores, nothing)
    if evidence.in_order:
        return pool(scores)
    order = jnp.argsort(evidence.positions, axis=-1)  # empty places first, between no two tokens
    pooled = pool(jnp.take_along_axis(scores, order, axis=-1))
    return jnp.take_along_axis(pooled, jnp.argsort(order, axis=-1), axis=-1)
