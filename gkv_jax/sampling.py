"""Sampling: what a request may ask for, and how a batch of different requests is sampled at once.

Order of operations: grammar mask, temperature, top-k, top-p, min-p, then the Gumbel argmax. Each
filter looks at what the one before it left. Ties go to the lowest token id.

Noise is a hash of (request seed, text position, token id): the same request gives the same tokens
whatever slot it runs in, whoever runs beside it, and with or without drafts.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gkv_jax.errors import UserError

MAX_TEMPERATURE = 1000.0
"""Beyond it all tokens are equally likely to float32."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one request samples.

    Attributes:
      max_tokens: most tokens to generate.
      temperature: 0 is greedy; at most ``MAX_TEMPERATURE``.
      top_k: keep the k most likely tokens (ties with the k-th too); 0 keeps all.
      top_p: keep the smallest set of most likely tokens with this much probability (arXiv
        1904.09751); 1 keeps all.
      min_p: drop tokens less likely than this fraction of the most likely one (arXiv 2407.01082).
      seed: same seed, same tokens.
      stop: texts that end the output (one as a plain string); they are not part of it.

    Raises:
      UserError: a value out of range, naming the field.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_integer("top_k", self.top_k, 0, 2**31 - 1)
        _check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        _check_number("temperature", self.temperature, MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, 1.0)
        _check_number("min_p", self.min_p, 1.0)
        if self.top_p == 0.0:
            raise UserError("sampling.top_p is 0; it must be > 0 (1 keeps all tokens)")
        if not isinstance(self.stop, Sequence) or not all(
            isinstance(text, str) and text for text in self.stop_texts
        ):
            raise UserError(f"sampling.stop is {self.stop!r}; it must hold non-empty strings")

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """``stop`` as a tuple, however it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _check_number(name: str, value: object, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise UserError(f"sampling.{name} is {value!r}; it must be a number")
    if not 0.0 <= value <= high:
        raise UserError(f"sampling.{name} is {value!r}; it must be from 0 to {high:g}")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"sampling.{name} is {value!r}; it must be an integer from {low} to {high}")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p", "min_p", "seed"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """``Sampling`` of every row, so that no request retraces anything.

    Arrays ``[B]``, of NumPy on the host and of JAX inside a program: ``temperature``, ``top_p``,
    ``min_p`` float32, ``top_k`` int32, ``seed`` uint32.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any

    @classmethod
    def greedy(cls, batch: int) -> "SamplingRows":
        """Host arrays for ``batch`` greedy rows."""
        return cls(
            temperature=np.zeros(batch, np.float32),
            top_k=np.zeros(batch, np.int32),
            top_p=np.ones(batch, np.float32),
            min_p=np.zeros(batch, np.float32),
            seed=np.zeros(batch, np.uint32),
        )

    def set_row(self, row: int, sampling: Sampling) -> None:
        """Write one request's parameters into host arrays, in place."""
        for name in ("temperature", "top_k", "top_p", "min_p"):
            getattr(self, name)[row] = getattr(sampling, name)
        # A hash of all 64 bits, so that seeds that differ anywhere differ here.
        mixed = np.random.SeedSequence(sampling.seed % 2**64).generate_state(1, np.uint32)
        self.seed[row] = mixed[0]


def sample(logits: jax.Array, rows: SamplingRows, positions: jax.Array) -> jax.Array:
    """Sample one token per query.

    Args:
      logits: float32 ``[B,N,V]``, illegal tokens already at the lowest finite value.
      rows: parameters of each row.
      positions: int32 ``[B,N]``, true positions of the queries; they vary the noise.

    Returns:
      Token ids, int32 ``[B,N]``.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def stochastic() -> jax.Array:
        temperature = rows.temperature[:, None, None]
        scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
        filters = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
        least = jax.lax.cond(
            jnp.any(filters & (rows.temperature > 0)),
            lambda: _least_kept(scaled, rows),
            lambda: jnp.zeros((*logits.shape[:-1], 1), jnp.uint32),
        )
        noisy = scaled + _gumbel(rows.seed, positions, logits.shape[-1])
        # Masked tokens are out, whatever the noise and however high the temperature.
        legal = logits > jnp.finfo(logits.dtype).min
        noisy = jnp.where(legal & (_ordered(scaled) >= least), noisy, -jnp.inf)
        drawn = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
        return jnp.where(temperature[..., 0] > 0, drawn, greedy)

    # Noise for a whole vocabulary is not free; most structured output is greedy.
    return jax.lax.cond(jnp.any(rows.temperature > 0), stochastic, lambda: greedy)


def _least_kept(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Top-k, top-p and min-p are all thresholds: the key (see ``_ordered``) of the last token kept.

    ``logits`` are scaled, float32 ``[B,N,V]``; result uint32 ``[B,N,1]``. The most likely token is
    always kept.
    """
    keys = _ordered(logits)
    highest = logits.max(axis=-1, keepdims=True)

    k = jnp.where(rows.top_k > 0, rows.top_k, logits.shape[-1]).astype(jnp.float32)
    least = _threshold(keys, jnp.ones_like(logits), k[:, None, None])

    weights = jnp.where(keys >= least, jnp.exp(logits - highest), 0.0)
    # A row that keeps all asks for nothing: rounding may leave its sum below the whole.
    mass = jnp.where(rows.top_p < 1, rows.top_p, 0.0)[:, None, None]
    nucleus = _threshold(keys, weights, mass * weights.sum(axis=-1, keepdims=True))
    least = jnp.where((rows.top_p < 1)[:, None, None], jnp.maximum(least, nucleus), least)

    floor = highest + jnp.log(rows.min_p)[:, None, None]  # log 0 = -inf drops nothing
    return jnp.minimum(jnp.maximum(least, _ordered(floor)), _ordered(highest))


def _ordered(x: jax.Array) -> jax.Array:
    """Float32 to uint32 such that the integers order as the floats do."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    negative = (bits >> jnp.uint32(31)) == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(0x80000000))


def _threshold(keys: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """Largest key t with ``sum(weights[keys >= t]) >= target``, by bisection over the 32 bits.

    No sort and no data-dependent shape. ``keys`` uint32 and ``weights`` float32 ``[B,N,V]``,
    ``target`` float32 ``[B,N,1]`` or ``[B,1,1]``; result uint32 ``[B,N,1]``, 0 if there is none.
    """

    def body(i: jax.Array, low: jax.Array) -> jax.Array:
        candidate = low | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
        mass = jnp.sum(jnp.where(keys >= candidate, weights, 0.0), axis=-1, keepdims=True)
        return jnp.where(mass >= target, candidate, low)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros((*keys.shape[:-1], 1), jnp.uint32))


def _gumbel(seed: jax.Array, positions: jax.Array, vocab: int) -> jax.Array:
    """Standard Gumbel noise, float32 ``[B,N,V]``, from an integer hash: the same on every platform."""
    row = _mix(_mix(seed[:, None]) ^ (positions.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)))
    token = jnp.arange(vocab, dtype=jnp.uint32) * jnp.uint32(0x85EBCA6B)
    bits = _mix(row[:, :, None] ^ token[None, None, :])
    # 23 bits and a half: the most that float32 holds without rounding up to 1, where noise is inf.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(uniform))


def _mix(x: jax.Array) -> jax.Array:
    """A 32-bit finaliser with low bias (Chris Wellons, hash-prospector ``lowbias32``)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
