"""Rotations of a step's queries and keys."""

from collections.abc import Sequence

import jax

from gkv_jax.rope import Rope, rotate


class QueryRotation:
    """Rotates queries and keys of a step; the angles are computed once, not once a layer."""

    def __init__(self, rope: Rope, positions: jax.Array, ranks: jax.Array | None) -> None:
        """``positions`` and ``ranks`` are int32 ``[B,N]``; see ``segments.ranks_of``."""
        angles = [_per_head(rope, each) for each in (positions, ranks) if each is not None]
        self._of_keys = angles[0]
        self._of_queries = [rope.for_queries(each) for each in angles]

    def queries(self, q: jax.Array) -> tuple[jax.Array, ...]:
        """``q [B,N,Hq,D]`` at its true positions and, where wanted, at its ranks."""
        return tuple(rotate(q, angles) for angles in self._of_queries)

    def keys(self, k: jax.Array) -> jax.Array:
        """``k [B,N,Hk,D]`` at its true positions."""
        return rotate(k, self._of_keys)


class NoRotation:
    """What stands for it where the model's own code has rotated, or nothing is to be rotated."""

    def queries(self, q: jax.Array) -> tuple[jax.Array, ...]:
        """``q`` as it is."""
        return (q,)

    def keys(self, k: jax.Array) -> jax.Array:
        """``k`` as it is."""
        return k


class Rotations:
    """The rotations of a step for layers of different specs and bases, each made once."""

    def __init__(self, positions: jax.Array, ranks: Sequence[jax.Array | None]) -> None:
        """``positions`` int32 ``[B,N]``, and ranks likewise for each distinct spec."""
        self._positions, self._ranks = positions, ranks
        self._made: dict[tuple[int, Rope], QueryRotation] = {}

    def of(self, group: int, rope: Rope | None) -> QueryRotation | NoRotation:
        """That of the layers with spec number ``group`` and this base."""
        if rope is None:
            return NoRotation()
        if (group, rope) not in self._made:
            self._made[group, rope] = QueryRotation(rope, self._positions, self._ranks[group])
        return self._made[group, rope]


def _per_head(rope: Rope, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    cos, sin = rope.angles(positions)
    return cos[:, :, None, :], sin[:, :, None, :]
