"""Rotations of a step's queries and keys."""

import jax

from gkv_jax.rope import Rope, rotate


class QueryRotation:
    """Rotates queries and keys of a step; the angles are computed once, not once a layer."""

    def __init__(self, rope: Rope, positions: jax.Array, ranks: jax.Array | None) -> None:
        """``positions`` and ``ranks`` are int32 ``[B,N]``; see ``segments.ranks_of``."""
        self._angles = [_per_head(rope, positions)]
        if ranks is not None:
            self._angles.append(_per_head(rope, ranks))

    def queries(self, q: jax.Array) -> tuple[jax.Array, ...]:
        """``q [B,N,Hq,D]`` at its true positions and, where wanted, at its ranks."""
        return tuple(rotate(q, angles) for angles in self._angles)

    def keys(self, k: jax.Array) -> jax.Array:
        """``k [B,N,Hk,D]`` at its true positions."""
        return rotate(k, self._angles[0])


def _per_head(rope: Rope, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    cos, sin = rope.angles(positions)
    return cos[:, :, None, :], sin[:, :, None, :]
