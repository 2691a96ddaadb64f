"""Rotary position embedding with angles that stay exact however long a stream runs.

The textbook form ``position * inv_freq`` in float32 is off by 0.05 rad at one million positions and
0.8 rad at sixteen million. Here a position is written in base 256 and the rotation is composed from
one table per digit, each built once in float64: ``R(T) = R(d0) R(256 d1) R(65536 d2) R(2^24 d3)``.
The error is a few float32 roundings for every position below 2^32.

Source: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071) as in transformers; the Llama 3 frequency
scaling follows Meta's reference code.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from gkv_jax.models.rope_config import Llama3Scaling, RopeConfig, YarnScaling

_DIGITS = 4  # base-256 digits of a uint32


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotations of head vectors in the half-split layout: channel ``i`` pairs with ``i + d/2``.

    ``d`` is the number of channels that turn, the head's first: all of them unless
    ``config.partial_rotary_factor`` says less. Hashable, so that it can be part of a static argument.
    """

    config: RopeConfig
    head_dim: int

    @property
    def attention_factor(self) -> float:
        """YaRN's factor on queries and on keys; 1 without YaRN. See ``for_queries``."""
        scaling = self.config.scaling
        return scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines of a pure rotation: two float32 arrays ``[..., d/2]``.

        ``positions [...]`` are int32, or uint32 for 2^31 and above.
        """
        cos_table, sin_table = (jnp.asarray(table) for table in _digit_tables(self))
        digit = positions & 255
        cos, sin = cos_table[0][digit], sin_table[0][digit]
        for place in range(1, _DIGITS):
            digit = (positions >> (8 * place)) & 255
            c, s = cos_table[place][digit], sin_table[place][digit]
            cos, sin = cos * c - sin * s, sin * c + cos * s
        return cos, sin

    def for_queries(self, angles: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """``angles`` with which to rotate queries; keys are rotated with ``angles`` themselves.

        YaRN multiplies the rotated channels of queries and of keys by its attention factor. Here
        queries carry both factors, so that a key may be rotated any number of times.
        """
        if self.attention_factor == 1.0:
            return angles
        cos, sin = angles
        return cos * self.attention_factor**2, sin * self.attention_factor**2


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the first d channels of ``x [..., D]``, in float32; same dtype out.

    ``angles`` are each ``[..., d/2]``, broadcast. The channels from d on pass through.
    """
    cos, sin = angles
    half = cos.shape[-1]
    first, second = (x[..., at : at + half].astype(jnp.float32) for at in (0, half))
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each channel pair, float64 ``[d/2]``, scaling applied."""
    width = config.rotary_dim(head_dim)
    inv_freq = config.theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    scaling = config.scaling
    if scaling is None:
        return inv_freq
    if isinstance(scaling, Llama3Scaling):
        kept = scaling.share_kept(inv_freq)
    elif isinstance(scaling, YarnScaling):
        kept = _yarn_share_kept(scaling, config.theta, width)
    else:  # linear
        kept = np.zeros_like(inv_freq)
    return inv_freq * (kept + (1 - kept) / scaling.factor)


def _yarn_share_kept(scaling: YarnScaling, theta: float, width: int) -> np.ndarray:
    """1 where a pair of the ``width / 2`` keeps its frequency, 0 where it is divided by the factor.

    The ramp between is linear in the index of the pair.
    """

    def pair_that_turns(times: float) -> float:
        """The (fractional) pair that makes so many turns over the original length."""
        turns = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001  # as in the reference: a step, without a division by zero
    return 1.0 - np.clip((np.arange(width // 2) - first) / (last - first), 0.0, 1.0)


@functools.lru_cache(maxsize=16)
def _digit_tables(rope: Rope) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine tables ``[4, 256, d/2]`` float32, one per base-256 digit."""
    inv_freq = inverse_frequencies(rope.config, rope.head_dim)
    scale = 256.0 ** np.arange(_DIGITS)
    angle = scale[:, None, None] * np.arange(256.0)[None, :, None] * inv_freq
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
