"""Float arithmetic that gives the same bits on every platform, for noise and probabilities.

Compilers contract `a * b + c` into one rounding where the hardware has an FMA, and platforms bring
their own `log` and `exp`; either changes last bits, and with them now and then a sampled token.
Here every product loses its last bit before anything is added to it, which no compiler can see
through, and `log`, `exp` and the reciprocal are polynomials and Newton steps made of such products
(the coefficients are those of Stephen Moshier's Cephes, `logf` and `expf`). Additions, comparisons,
conversions from integers and bit operations are IEEE's everywhere.

Plain functions of arrays of any shape, without reductions: XLA, Mosaic and Triton compile them alike.
All integers are int32, as Mosaic prefers it; hashes use them as 32 bits that wrap around.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LOWEST = float(np.finfo(np.float32).min)
HIGHEST = float(np.finfo(np.float32).max)
LEAST_KEY = -(2**31)
"""Below the key of every number: what keeps all tokens."""

WEIGHT_BITS = 24
"""`weight` counts in units of 2^-24."""

_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # the high part has ten bits: exact in products
_SQRT_HALF_BITS = 0x3F3504F3
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_EXP = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip


def bits_of(x: jax.Array) -> jax.Array:
    """The bits of float32 `x`, as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits: jax.Array) -> jax.Array:
    """The float32 with these bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def product(a: jax.Array, b: jax.Array | float) -> jax.Array:
    """`a * b` with its last bit cleared, so that no compiler fuses a following addition into it."""
    return float_of(bits_of(a * jnp.float32(b)) & jnp.int32(-2))


def finite(x: jax.Array) -> jax.Array:
    """`x` as a finite float32: infinities become the largest numbers, NaN the lowest."""
    x = x.astype(jnp.float32)
    x = jnp.where(x == x, x, jnp.float32(LOWEST))
    return jnp.minimum(jnp.maximum(x, jnp.float32(LOWEST)), jnp.float32(HIGHEST))


def key(x: jax.Array) -> jax.Array:
    """Finite float32 to int32 such that the integers order as the floats do, −0 and 0 equal."""
    bits = bits_of(x)
    bits = jnp.where(bits == jnp.int32(LEAST_KEY), jnp.int32(0), bits)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def unkey(key: jax.Array) -> jax.Array:
    """The float32 that `key` made an int32 of; LEAST_KEY becomes NaN."""
    return float_of(key ^ ((key >> 31) & jnp.int32(0x7FFFFFFF)))


def reciprocal(x: jax.Array) -> jax.Array:
    """`1 / x` of positive normal float32 below 2^125, within a few units of the last place."""
    estimate = float_of(jnp.int32(0x7EF311C7) - bits_of(x))
    for _ in range(4):
        estimate = product(estimate, 2.0 - product(x, estimate))
    return estimate


def log(x: jax.Array) -> jax.Array:
    """The natural logarithm of positive normal float32."""
    bits = bits_of(x)
    exponent = (bits - jnp.int32(_SQRT_HALF_BITS)) >> 23
    f = float_of(bits - (exponent << 23)) - 1.0  # in [√½ − 1, √2 − 1), exact
    square = product(f, f)
    tail = product(product(square, f), _polynomial(_LOG, f))
    e = exponent.astype(jnp.float32)
    tail = tail + product(e, _LN2_LOW) - product(square, 0.5)
    return product(e, _LN2_HIGH) + (f + tail)


def weight(x: jax.Array) -> jax.Array:
    """`exp(x)` of float32 `x <= 0` in units of 2^-24, rounded: int32 from 0 to 2^24.

    Integers, because their sums do not depend on the order of addition: a nucleus is the same
    however a vocabulary is tiled. What is less likely than the most likely token by 2^-25 weighs 0.
    """
    x = jnp.maximum(x, jnp.float32(-32.0))
    halvings = (product(x, -1.44269504088896341) + 0.5).astype(
        jnp.int32
    )  # of a non-negative number
    n = halvings.astype(jnp.float32)
    r = (x + product(n, _LN2_HIGH)) + product(n, _LN2_LOW)
    y = (product(product(r, r), _polynomial(_EXP, r)) + r) + 1.0  # in [√½, √2]
    mantissa = (y * jnp.float32(2.0**WEIGHT_BITS)).astype(jnp.int32)  # a power of two: exact
    half = (jnp.int32(1) << halvings) >> 1
    return jnp.minimum((mantissa + half) >> halvings, jnp.int32(2**WEIGHT_BITS))


def gumbel(row: jax.Array, token: jax.Array) -> jax.Array:
    """Standard Gumbel noise, float32, of a row's hash (`hash_row`) and token ids, both int32."""
    bits = mix(row ^ (token * jnp.int32(_signed(0x85EBCA6B))))
    # 23 bits and a half: the most that float32 holds without rounding up to 1, where noise is inf.
    uniform = (lax.shift_right_logical(bits, jnp.int32(9)).astype(jnp.float32) + 0.5) * jnp.float32(
        2.0**-23
    )
    return -log(-log(uniform))


def scaled(logits: jax.Array, inverse_temperature: jax.Array) -> jax.Array:
    """Logits of any float dtype over a temperature, finite float32."""
    return finite(product(finite(logits), inverse_temperature))


def noisy(scaled_logits: jax.Array, row: jax.Array, token: jax.Array) -> jax.Array:
    """What the most of wins: scaled logits plus the noise of `gumbel`, finite float32."""
    return finite(scaled_logits + gumbel(row, token))


def hash_row(seed: jax.Array, position: jax.Array) -> jax.Array:
    """One int32 for a request's seed (uint32 or int32) and a text position (int32)."""
    seed = lax.bitcast_convert_type(seed, jnp.int32)
    return mix(mix(seed) ^ (position * jnp.int32(_signed(0x9E3779B9))))


def mix(x: jax.Array) -> jax.Array:
    """A 32-bit finaliser with low bias (Chris Wellons, hash-prospector `lowbias32`)."""
    x = (x ^ _shift(x, 16)) * jnp.int32(_signed(0x7FEB352D))
    x = (x ^ _shift(x, 15)) * jnp.int32(_signed(0x846CA68B))
    return x ^ _shift(x, 16)


def _shift(x: jax.Array, places: int) -> jax.Array:
    return lax.shift_right_logical(x, jnp.int32(places))


def _polynomial(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    """Horner's scheme, the highest power first."""
    first = jnp.full_like(x, coefficients[0])
    return functools.reduce(lambda y, c: product(y, x) + jnp.float32(c), coefficients[1:], first)


def _signed(bits: int) -> int:
    return bits - 2**32 if bits >= 2**31 else bits
