"""`arithmetic` against NumPy's float64, and bit by bit against the same steps in NumPy's float32.

The latter is what "the same on every platform" means: NumPy rounds after every operation and knows
no FMA, so a compiler whose bits differ from these has contracted, reordered or approximated something.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.masked_sample import arithmetic

F32, I32, U32 = np.float32, np.int32, np.uint32
SMALLEST_NORMAL = 2.0**-126


# The same steps, one float32 rounding each.


def np_product(a, b):
    return ((a * F32(b)).view(I32) & I32(-2)).view(F32)


def np_horner(coefficients, x):
    y = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        y = np_product(y, x) + F32(c)
    return y


def np_log(x):
    bits = x.view(I32)
    exponent = (bits - I32(0x3F3504F3)) >> I32(23)
    f = (bits - (exponent << I32(23))).view(F32) - F32(1)
    square = np_product(f, f)
    coefficients = (
        7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    )  # fmt: skip
    tail = np_product(np_product(square, f), np_horner(coefficients, f))
    e = exponent.astype(F32)
    tail = tail + np_product(e, -2.12194440e-4) - np_product(square, 0.5)
    return np_product(e, 0.693359375) + (f + tail)


def np_weight(x):
    x = np.maximum(x, F32(-32))
    halvings = (np_product(x, -1.44269504088896341) + F32(0.5)).astype(I32)
    n = halvings.astype(F32)
    r = (x + np_product(n, 0.693359375)) + np_product(n, -2.12194440e-4)
    coefficients = (
        1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
        5.0000001201e-1,
    )  # fmt: skip
    y = (np_product(np_product(r, r), np_horner(coefficients, r)) + r) + F32(1)
    mantissa = (y * F32(2**24)).astype(I32)
    half = (I32(1) << halvings) >> I32(1)
    return np.minimum((mantissa + half) >> halvings, I32(2**24))


def np_reciprocal(x):
    estimate = (I32(0x7EF311C7) - x.view(I32)).view(F32)
    for _ in range(4):
        estimate = np_product(estimate, F32(2) - np_product(x, estimate))
    return estimate


def np_mix(x):
    """On uint32, whose products wrap around and whose shifts are logical."""
    x = (x ^ (x >> U32(16))) * U32(0x7FEB352D)
    x = (x ^ (x >> U32(15))) * U32(0x846CA68B)
    return x ^ (x >> U32(16))


def np_hash_row(seed, position):
    return np_mix(np_mix(seed) ^ (position.view(U32) * U32(0x9E3779B9))).view(I32)


def np_gumbel(row, token):
    bits = np_mix(row.view(U32) ^ (token.view(U32) * U32(0x85EBCA6B)))
    uniform = ((bits >> U32(9)).astype(F32) + F32(0.5)) * F32(2.0**-23)
    return -np_log(-np_log(uniform))


# Operands.

RNG = np.random.default_rng(0)


def positive_floats(lowest=SMALLEST_NORMAL, highest=3.4e38):
    spread = np.exp(RNG.uniform(np.log(lowest), np.log(highest), 200_000))
    near_one = 1 + RNG.normal(size=50_000) * 1e-3
    powers = 2.0 ** np.arange(np.ceil(np.log2(lowest)), np.floor(np.log2(highest)))
    edges = np.concatenate(
        [np.nextafter(F32(p), F32(d)) for p in powers for d in (0, np.inf)], None
    )
    found = np.concatenate([spread, near_one, powers, edges]).astype(F32)
    return found[(found >= lowest) & (found <= highest)]


def any_bits(count=200_000):
    return RNG.integers(-(2**31), 2**31, size=count, dtype=np.int64).astype(I32)


NON_POSITIVE = -np.concatenate(
    [RNG.uniform(0, 18, 200_000), RNG.exponential(1e-3, 50_000), [0.0, 17.3, 17.4, 32, 33, 3.4e38]]
).astype(F32)
POSITIVE = positive_floats()
INVERTIBLE = positive_floats(highest=2.0**124)
SAME_BITS = {
    "log": (arithmetic.log, np_log, (POSITIVE,)),
    "weight": (arithmetic.weight, np_weight, (NON_POSITIVE,)),
    "reciprocal": (arithmetic.reciprocal, np_reciprocal, (INVERTIBLE,)),
    "gumbel": (arithmetic.gumbel, np_gumbel, (any_bits(), any_bits())),
    "hash_row": (arithmetic.hash_row, np_hash_row, (any_bits().view(U32), any_bits())),
}
every_function = pytest.mark.parametrize("name", SAME_BITS)


def assert_same_bits(actual, desired):
    actual = np.asarray(actual)
    assert actual.dtype == desired.dtype
    np.testing.assert_array_equal(actual.view(I32), desired.view(I32))


class TestSameBits:
    @every_function
    def test_compiled(self, name):
        function, replica, operands = SAME_BITS[name]
        assert_same_bits(jax.jit(function)(*operands), replica(*operands))

    @every_function
    def test_compiled_into_what_uses_it(self, name):
        """Neighbours to fuse with change nothing."""
        function, replica, operands = SAME_BITS[name]
        fused = jax.jit(lambda *xs: function(*xs) + jnp.ones((), xs[0].dtype).astype(out.dtype))
        out = replica(*operands)
        assert_same_bits(fused(*operands), out + out.dtype.type(1))

    @every_function
    def test_one_operation_at_a_time(self, name):
        function, replica, operands = SAME_BITS[name]
        with jax.disable_jit():
            actual = function(*map(jnp.asarray, operands))
        assert_same_bits(actual, replica(*operands))

    def test_a_sum_of_products_whose_fusion_would_show(self):
        a, b = RNG.normal(size=(2, 10_000)).astype(F32)
        c = (-a * b).astype(F32) * (1 + RNG.normal(size=10_000) * 1e-6).astype(F32)
        exact = a.astype(np.float64) * b.astype(np.float64)
        fused = (exact + c).astype(F32)  # what an FMA gives: one rounding, of the sum
        assert np.mean(fused != a * b + c) > 0.9
        truncated = np_product(a, b) + c
        actual = jax.jit(lambda a, b, c: arithmetic.product(a, b) + c)(a, b, c)
        assert_same_bits(actual, truncated)


class TestAccuracy:
    def test_product(self):
        a, b = RNG.normal(size=(2, 10_000)).astype(F32)
        np.testing.assert_allclose(
            jax.jit(arithmetic.product)(a, b), a.astype(np.float64) * b, rtol=2.0**-22
        )

    def test_log(self):
        desired = np.log(POSITIVE.astype(np.float64))
        np.testing.assert_allclose(jax.jit(arithmetic.log)(POSITIVE), desired, rtol=6e-7, atol=0)

    def test_log_of_one_is_zero(self):
        assert jax.jit(arithmetic.log)(jnp.float32(1)) == 0

    def test_reciprocal(self):
        desired = 1 / INVERTIBLE.astype(np.float64)
        actual = jax.jit(arithmetic.reciprocal)(INVERTIBLE)
        np.testing.assert_allclose(actual, desired, rtol=6e-7, atol=0)

    def test_weight(self):
        desired = np.exp(NON_POSITIVE.astype(np.float64)) * 2.0**24
        actual = np.asarray(jax.jit(arithmetic.weight)(NON_POSITIVE)).astype(np.float64)
        np.testing.assert_array_less(np.abs(actual - desired), 1.5 + 6e-7 * desired)

    def test_weight_never_falls(self):
        x = np.sort(NON_POSITIVE)
        assert np.all(np.diff(np.asarray(jax.jit(arithmetic.weight)(x))) >= 0)

    @pytest.mark.parametrize(("x", "weight"), [(0.0, 2**24), (-17.4, 0), (-3.4e38, 0)])
    def test_weight_at_the_ends(self, x, weight):
        assert jax.jit(arithmetic.weight)(jnp.float32(x)) == weight


class TestKey:
    FLOATS = any_bits().view(F32)
    FLOATS = np.unique(FLOATS[np.isfinite(FLOATS)])  # ascending

    def test_orders_as_the_floats(self):
        keys = np.asarray(jax.jit(arithmetic.key)(self.FLOATS)).astype(np.int64)
        assert np.all(np.diff(keys) > 0)
        assert keys.min() > arithmetic.LEAST_KEY

    def test_zeros_are_equal(self):
        keys = jax.jit(arithmetic.key)(np.asarray([-0.0, 0.0, -1e-38], F32))
        assert keys[2] < keys[0] == keys[1]

    def test_comes_back(self):
        there_and_back = jax.jit(lambda x: arithmetic.unkey(arithmetic.key(x)))
        assert_same_bits(there_and_back(self.FLOATS), self.FLOATS)

    def test_least_key_is_no_number(self):
        assert np.isnan(jax.jit(arithmetic.unkey)(jnp.int32(arithmetic.LEAST_KEY)))


def test_finite():
    x = np.asarray([np.nan, -np.nan, np.inf, -np.inf, 1.5, -0.0], F32)
    highest = np.finfo(F32).max
    desired = np.asarray([-highest, -highest, highest, -highest, 1.5, -0.0], F32)
    assert_same_bits(jax.jit(arithmetic.finite)(x), desired)


def np_unmix(x):
    """The inverse of `np_mix`: every step of it is one to one."""
    x = x ^ (x >> U32(16))
    x = x * U32(pow(0x846CA68B, -1, 2**32))
    x = x ^ (x >> U32(15)) ^ (x >> U32(30))
    x = x * U32(pow(0x7FEB352D, -1, 2**32))
    return x ^ (x >> U32(16))


@pytest.fixture(scope="module")
def every_value():
    """All 2^23 values that the noise can have, in the order of their uniform numbers."""
    bits = np.arange(2**23, dtype=U32) << U32(9)
    token = np_unmix(bits) * U32(pow(0x85EBCA6B, -1, 2**32))
    assert np.array_equal(np_mix(token[::4099] * U32(0x85EBCA6B)), bits[::4099])
    return np.asarray(jax.jit(arithmetic.gumbel)(jnp.int32(0), token.view(I32)))


class TestGumbel:
    def test_every_value_is_finite(self, every_value):
        assert np.all(np.isfinite(every_value))
        assert every_value.max() < 17
        assert every_value.min() > -3

    def test_every_value_is_the_quantile_of_its_uniform_number(self, every_value):
        uniform = (np.arange(2**23) + 0.5) * 2.0**-23
        # Float32 holds the uniform number exactly, so no more than the logarithms' errors is left.
        desired = -np.log(-np.log(uniform))
        np.testing.assert_allclose(every_value, desired, rtol=1e-6, atol=2e-6)

    def test_bits_are_even(self):
        """Every bit of the hash is set half of the time, whatever of its input varies."""
        for seed, position, token in (
            (np.arange(4096), 0, 0), (0, np.arange(4096), 0), (0, 0, np.arange(4096)),
        ):  # fmt: skip
            seed, position, token = np.broadcast_arrays(seed, position, token)
            row = np_hash_row(seed.astype(U32), position.astype(I32))
            bits = np_mix(row.view(U32) ^ (token.astype(U32) * U32(0x85EBCA6B)))
            share = np.mean((bits[:, None] >> np.arange(32, dtype=U32)) & U32(1), axis=0)
            np.testing.assert_allclose(share, 0.5, atol=0.05)
