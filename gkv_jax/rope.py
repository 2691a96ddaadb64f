"""Rotary position embedding with angles that stay exact however long a stream runs.

The textbook form ``position * inv_freq`` in float32 is off by 0.05 rad at one million positions and
0.8 rad at sixteen million. Here a position is written in base 256 and the rotation is composed from
one table per digit, each built once in float64: ``R(T) = R(d0) R(256 d1) R(65536 d2) R(2^24 d3)``.
The error is a few float32 roundings for every position below 2^31.

Source: RoFormer (arXiv 2104.09864); the Llama 3 frequency scaling follows Meta's reference code.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from gkv_jax.models.config import Llama3Scaling, RopeConfig

_DIGITS = 4  # base-256 digits of a non-negative int32


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotations of head vectors in the half-split layout: channel ``i`` pairs with ``i + D/2``.

    Hashable, so that it can be part of a static argument.
    """

    config: RopeConfig
    head_dim: int

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines for int32 positions ``[...]``: two float32 arrays ``[..., D/2]``."""
        cos_table, sin_table = (jnp.asarray(table) for table in _digit_tables(self))
        digit = positions & 255
        cos, sin = cos_table[0][digit], sin_table[0][digit]
        for place in range(1, _DIGITS):
            digit = (positions >> (8 * place)) & 255
            c, s = cos_table[place][digit], sin_table[place][digit]
            cos, sin = cos * c - sin * s, sin * c + cos * s
        return cos, sin


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate ``x [..., D]`` by ``angles`` (each ``[..., D/2]``, broadcast), in float32; same dtype out."""
    cos, sin = angles
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each channel pair, float64 ``[D/2]``, scaling applied."""
    inv_freq = config.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scaling = config.scaling
    if scaling is None:
        return inv_freq
    if not isinstance(scaling, Llama3Scaling):  # linear
        return inv_freq / scaling.factor
    # Long wavelengths are stretched, short ones kept, those between interpolated.
    wavelength = 2 * math.pi / inv_freq
    turns = scaling.original_max_position_embeddings / wavelength
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return inv_freq * (smooth + (1 - smooth) / scaling.factor)


@functools.lru_cache(maxsize=16)
def _digit_tables(rope: Rope) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine tables ``[4, 256, D/2]`` float32, one per base-256 digit."""
    inv_freq = inverse_frequencies(rope.config, rope.head_dim)
    scale = 256.0 ** np.arange(_DIGITS)
    angle = scale[:, None, None] * np.arange(256.0)[None, :, None] * inv_freq
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
