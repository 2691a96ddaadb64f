"""Keys and values in bfloat16, float8 and int8: what comes back, from where, and attention over it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from gkv_jax.cache.storage import (
    Stored,
    channel_scale,
    check_dtype,
    empty,
    encode,
    fill_row,
    load,
    move,
    scale_queries,
    storage_dtype,
    write,
)
from gkv_jax.errors import UserError
from gkv_jax.models.rope_config import RopeConfig
from gkv_jax.rope import Rope, rotate
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention.xla import attend
from tests.aot.hlo import Program

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
# Largest error of an element, of its own size and of the largest in its vector.
ERRORS = {
    "float32": (0.0, 0.0),
    "bfloat16": (2**-8, 0.0),
    "float8_e4m3fn": (2**-4, 0.0),
    "int8": (0.0, 0.5 / 127),
}
SUBNORMAL = {"float8_e4m3fn": 2.0**-10, "bfloat16": 1e-38}  # half a step next to 0

B, HK, C, D = 3, 2, 11, 8
encode_ = jax.jit(encode, static_argnames="dtype")
write_ = jax.jit(write)
move_ = jax.jit(move)
fill_row_ = jax.jit(fill_row)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def filled(dtype: str, shape: tuple[int, ...] = (B, HK, C, D)) -> Stored:
    """Random tokens in all slots."""
    return encode_(normal(*shape, seed=9), dtype=dtype)


def values_of(stored: Stored) -> np.ndarray:
    """What is stored, in float64."""
    data = np.asarray(stored.data, np.float64)
    return data if stored.scale is None else data * np.asarray(stored.scale, np.float64)[..., None]


def assert_near(stored: Stored, values: np.ndarray, dtype: str) -> None:
    relative, of_largest = ERRORS[dtype]
    exact = values.astype(np.float64)
    allowed = relative * np.abs(exact) + of_largest * np.abs(exact).max(axis=-1, keepdims=True)
    allowed = 1.00001 * allowed + SUBNORMAL.get(dtype, 1e-30)
    assert np.all(np.abs(values_of(stored) - exact) <= allowed)


def assert_same(stored: Stored, expected: np.ndarray) -> None:
    """Bit by bit, as both come from the same rounding."""
    np.testing.assert_array_equal(values_of(stored), expected)


class TestEncode:
    @settings(deadline=None, max_examples=60)
    @given(
        vectors=npst.arrays(np.float32, (4, D), elements=st.floats(-400, 400, width=32)),
        exponent=st.integers(-60, 60),
        dtype=st.sampled_from(DTYPES),
    )
    def test_error_is_within_half_a_step(self, vectors, exponent, dtype):
        if dtype != "float8_e4m3fn":  # whose range is that of one exponent
            vectors = np.ldexp(vectors, exponent).astype(np.float32)
        assert_near(encode_(vectors, dtype=dtype), vectors, dtype)

    @every_dtype
    def test_zeros_come_back_as_zeros(self, dtype):
        stored = encode_(np.zeros((2, D), np.float32), dtype=dtype)
        assert_same(stored, np.zeros((2, D)))
        assert stored.scale is None or np.all(stored.scale > 0)

    @pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e38])
    def test_any_size_of_an_int8_vector_is_finite(self, size):
        vectors = np.float32(size) * np.sign(normal(2, D))
        stored = encode_(vectors, dtype="int8")
        assert np.all(np.isfinite(stored.scale))
        assert np.all(np.abs(values_of(stored)) <= 1.00001 * np.abs(vectors, dtype=np.float64))

    def test_int8_keeps_the_largest_and_its_sign(self):
        vectors = np.array([[3.0, -1.0], [0.25, -2.0]], np.float32)
        stored = encode_(vectors, dtype="int8")
        assert np.asarray(stored.data).tolist() == [[127, -42], [16, -127]]
        np.testing.assert_allclose(stored.scale, np.array([3.0, 2.0]) / 127, rtol=1e-6)

    def test_float8_saturates(self):
        stored = encode_(np.array([449.0, 1e30, -500.0, np.inf], np.float32), dtype="float8_e4m3fn")
        assert np.asarray(stored.data, np.float32).tolist() == [448.0, 448.0, -448.0, 448.0]

    def test_an_outlier_costs_its_own_token_only(self):
        vectors = normal(3, D)
        vectors[1, 2] = 1e6
        stored = values_of(encode_(vectors, dtype="int8"))
        np.testing.assert_allclose(stored[[0, 2]], vectors[[0, 2]], atol=3 * 0.5 / 127)
        np.testing.assert_allclose(stored[1, 2], 1e6, rtol=1e-6)

    @pytest.mark.parametrize("weights", ["bfloat16", "float32"])
    def test_values_of_any_float_dtype(self, weights):
        vectors = normal(4, D).astype(jnp.dtype(weights))
        assert_near(encode_(vectors, dtype="int8"), vectors.astype(np.float32), "int8")


@every_dtype
class TestWhere:
    """Every operation against NumPy on the decoded buffers."""

    @pytest.mark.parametrize("per_head", [False, True])
    def test_write(self, dtype, per_head):
        before, values = filled(dtype), normal(2, 3, HK, D)
        rows, slots = np.array([[2], [0]]), np.array([[4, 0, C], [C + 5, 10, 3]])
        if per_head:
            slots = np.stack([slots, np.array([[1, 2, 3], [7, C, 9]])], axis=-1)
        after = write_(before, rows, slots, values)
        expected, encoded = values_of(before), values_of(encode_(values, dtype=dtype))
        for i, n, h in np.ndindex(2, 3, HK):
            slot = slots[i, n, h] if per_head else slots[i, n]
            if slot < C:
                expected[rows[i, 0], h, slot] = encoded[i, n, h]
        assert_same(after, expected)

    def test_write_of_a_single_vector(self, dtype):
        before, value = filled(dtype, (1, 1, C, D)), normal(1, 1, 1, D)
        after = write_(before, np.array([[0]]), np.array([[7]]), value)
        expected = values_of(before)
        expected[0, 0, 7] = values_of(encode_(value, dtype=dtype))[0, 0, 0]
        assert_same(after, expected)

    def test_move(self, dtype):
        """A swap, a shift, copies of one token, and some that are dropped."""
        before = filled(dtype)
        rows = np.array([1, 2])
        source = np.array([[[3, 4, 5], [0, 1, 9]], [[2, 2, 2], [C - 1, 0, 6]]])
        target = np.array([[[4, 3, C], [1, 2, 0]], [[0, 1, 2], [C, C + 3, C]]])
        after = move_(before, rows, source, target)
        expected = values_of(before).copy()
        for i, h, m in np.ndindex(2, HK, 3):
            if target[i, h, m] < C:
                expected[rows[i], h, target[i, h, m]] = values_of(before)[
                    rows[i], h, source[i, h, m]
                ]
        assert_same(after, expected)

    def test_move_of_a_single_vector(self, dtype):
        before = filled(dtype, (1, 1, C, D))
        after = move_(before, np.array([0]), np.array([[[5]]]), np.array([[[2]]]))
        expected = values_of(before).copy()
        expected[0, 0, 2] = expected[0, 0, 5]
        assert_same(after, expected)

    def test_fill_row(self, dtype):
        before, values = filled(dtype), normal(HK, C, D)
        after = fill_row_(before, np.int32(1), values)
        expected = values_of(before)
        expected[1] = values_of(encode_(values, dtype=dtype))
        assert_same(after, expected)

    def test_load(self, dtype):
        stored = filled(dtype)
        for rows in (None, np.array([2, 0])):
            loaded = load(stored, rows, jnp.float32)
            assert loaded.dtype == jnp.float32
            expected = values_of(stored)[slice(None) if rows is None else rows]
            np.testing.assert_allclose(loaded, expected, rtol=2e-7)
        assert load(stored, None, jnp.bfloat16).dtype == jnp.bfloat16

    def test_empty_is_zero_and_as_large_as_it_says(self, dtype):
        stored = empty((B, HK, C, D), jnp.dtype(dtype))
        assert not values_of(stored).any()
        assert stored.scale is None or np.all(np.isfinite(stored.scale))


@pytest.mark.parametrize(
    ("dtype", "narrow", "wide"),
    [
        ("float32", 512, 1024),
        ("bfloat16", 256, 512),
        ("float8_e4m3fn", 128, 256),
        ("int8", 136, 264),
    ],
)
def test_bytes_of_a_token(dtype, narrow, wide):
    """Keys and values together, as the table of docs/caches.md has them."""
    for dim, expected in ((64, narrow), (128, wide)):
        assert 2 * empty((B, HK, C, dim), jnp.dtype(dtype)).nbytes == B * HK * C * expected


class TestInPlace:
    """XLA:CPU neither copies the buffers nor makes others of their size, in a loop as decoding has it."""

    # It has no scatter of float8 or bfloat16, and converts the buffer instead.
    DTYPES = ("float32", "int8")

    @staticmethod
    def large_buffers(step, stored, *operands) -> list[str]:
        """Those of the loop's body, beside the results of the scatters."""

        def loop(stored, *operands):
            def body(carry):
                i, stored = carry
                return i + 1, step(stored, i, *operands)

            return jax.lax.while_loop(lambda carry: carry[0] < 5, body, (jnp.int32(0), stored))

        lowered = jax.jit(loop, donate_argnums=0).lower(stored, *operands)
        compiled = lowered.compile({"xla_cpu_use_fusion_emitters": True})  # as it is by default
        (body,) = Program.of(compiled).while_bodies()
        ignored = ("parameter", "tuple", "get-tuple-element", "bitcast")
        large = [
            i.name
            for i in body
            if i.opcode not in ignored and any(a.size >= stored.data.size // D for a in i.arrays)
        ]
        assert compiled.memory_analysis().alias_size_in_bytes >= stored.nbytes
        assert compiled.memory_analysis().temp_size_in_bytes < stored.nbytes // 4
        return [name for name in large if "scatter" not in name]

    @pytest.mark.parametrize(("batch", "heads"), [(2, 2), (1, 1)])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_write(self, dtype, batch, heads):
        stored = empty((batch, heads, 4096, D), jnp.dtype(dtype))
        rows = jnp.arange(batch)[:, None]
        values = jnp.ones((batch, 1, heads, D))
        names = self.large_buffers(lambda s, i: write(s, rows, rows * 0 + i, values), stored)
        assert names == []

    @pytest.mark.parametrize(("batch", "heads"), [(2, 2), (1, 1)])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_move(self, dtype, batch, heads):
        stored = empty((batch, heads, 4096, D), jnp.dtype(dtype))
        source = jnp.full((batch, heads, 1), 7)
        names = self.large_buffers(
            lambda s, i: move(s, jnp.arange(batch), source, source + i), stored
        )
        assert names == []

    def test_the_check_sees_a_copy(self):
        stored = empty((2, 2, 4096, D), jnp.int8)
        with pytest.raises(AssertionError):
            self.large_buffers(lambda s, i: jax.tree.map(lambda x: jnp.roll(x, i, 2), s), stored)


ROPE = Rope(RopeConfig(10_000.0), 16)
channel_scale_ = jax.jit(channel_scale, static_argnames="rotary_dim")


def rotated(x: np.ndarray, positions: np.ndarray) -> jax.Array:
    """``x [...,N,H,D]`` at ``positions [N]``."""
    return rotate(jnp.asarray(x), tuple(a[:, None, :] for a in ROPE.angles(jnp.asarray(positions))))


def keys_with_outliers(n: int = 40, heads: int = 2, dim: int = 16) -> np.ndarray:
    """Keys ``[N,Hk,D]`` in which a pair of channels is 50 times as large as the others, as in Qwen2."""
    k = normal(n, heads, dim)
    k[:, :, [3, 3 + dim // 2]] *= 50
    return k


class TestChannelScale:
    REAL = np.ones(40, bool)

    def test_is_the_root_of_the_largest_magnitude_of_each_pair(self):
        k = normal(40, 2, 16)
        scale = np.asarray(channel_scale_(k, self.REAL))
        pairs = np.hypot(k[..., :8], k[..., 8:]).max(axis=0)
        assert np.all(pairs > np.median(pairs, axis=-1, keepdims=True) / 2)  # no floor in here
        np.testing.assert_allclose(scale**2, np.concatenate([pairs, pairs], axis=-1), rtol=1e-6)

    def test_does_not_depend_on_the_rotation(self):
        k = keys_with_outliers()
        scale = channel_scale_(k, self.REAL)
        turned = channel_scale_(rotated(k, np.arange(1000, 1040)), self.REAL)
        np.testing.assert_allclose(turned, scale, rtol=1e-5)

    def test_passes_through_the_rotation(self):
        k, at = keys_with_outliers(), np.arange(7000, 7040)
        scale = np.asarray(channel_scale_(k, self.REAL))
        np.testing.assert_allclose(
            rotated(k / scale, at), np.asarray(rotated(k, at)) / scale, atol=1e-6
        )

    def test_channels_that_are_not_rotated_have_their_own(self):
        k = normal(40, 2, 16)
        k[:, :, 9:] *= np.arange(2, 9)
        scale = np.asarray(channel_scale_(k, self.REAL, rotary_dim=8))
        np.testing.assert_array_equal(scale[:, :4], scale[:, 4:8])
        np.testing.assert_allclose(scale[:, 9:] ** 2, np.abs(k[:, :, 9:]).max(axis=0), rtol=1e-6)

    def test_padding_does_not_count(self):
        k = normal(40, 2, 16)
        scale = channel_scale_(k, np.arange(40) < 5)
        k[5:] = 1e6
        np.testing.assert_array_equal(channel_scale_(k, np.arange(40) < 5), scale)

    @pytest.mark.parametrize("live", [0, 1, 16])
    def test_no_channel_is_left_without_a_scale(self, live):
        """Of a head whose keys are 0, in all its channels or but for a few."""
        k = np.zeros((40, 2, 16), np.float32)
        k[:, :, :live] = 3e-3
        scale = np.asarray(channel_scale_(k, self.REAL))
        assert np.all(scale >= 1e-6)
        assert np.all(np.isfinite(k / scale))

    def test_a_small_channel_that_grows_does_not_blur_the_others(self):
        """A first token with a channel near 0 must not make that channel's steps the measure of all."""
        first, later = normal(4, 1, 16, seed=1), normal(40, 1, 16, seed=2)
        first[:, 0, [5, 13]] = 1e-4
        scale = np.asarray(channel_scale_(first, np.ones(4, bool)))
        stored = encode_(later / scale, dtype="int8")
        assert np.abs(values_of(stored) * scale - later).max() < 0.02

    @pytest.mark.parametrize("tokens", [0, 1, 3, 4])
    def test_a_few_tokens_have_none(self, tokens):
        scale = channel_scale_(normal(40, 2, 16), np.arange(40) < tokens)
        assert np.all(scale == 1) == (tokens < 4)

    def test_an_outlier_channel_leaves_the_others_their_steps(self):
        k = keys_with_outliers()
        scale = np.asarray(channel_scale_(k, self.REAL))
        small = np.ones(16, bool)
        small[[3, 11]] = False
        with_scale = values_of(encode_(k / scale, dtype="int8")) * scale
        without = values_of(encode_(k, dtype="int8"))
        errors = [np.abs(x - k)[..., small].max() for x in (with_scale, without)]
        assert errors[0] < 0.15
        assert errors[1] > 5 * errors[0]


class TestAttention:
    """Scales folded into queries, scores and weights: as if the cache had been dequantised."""

    N, CAPACITY, HQ, DIM = 2, 40, 6, 16

    def operands(self, dtype: str):
        k = np.asarray(rotated(keys_with_outliers(self.CAPACITY), np.arange(self.CAPACITY)))
        v = normal(self.CAPACITY, 2, self.DIM, seed=4)
        q = normal(1, self.N, self.HQ, self.DIM, seed=5) / 10
        channels = jnp.ones((1, 2, self.DIM))
        if dtype == "int8":
            channels = channel_scale_(k, np.ones(self.CAPACITY, bool))[None]
        rows, slots = np.array([[0]]), np.arange(self.CAPACITY)[None]
        stored = empty((1, 2, self.CAPACITY, self.DIM), jnp.dtype(dtype))
        keys = write_(stored, rows, slots, k[None] / np.asarray(channels)[:, None])
        values = write_(stored, rows, slots, v[None])
        return q, channels, keys, values

    @staticmethod
    def exact(q, keys, values) -> np.ndarray:
        """Softmax attention over all keys in float64."""
        k, v = (np.repeat(x, q.shape[2] // x.shape[1], axis=1)[0] for x in (keys, values))
        scores = np.einsum("nhd,hcd->hnc", q[0].astype(np.float64), k) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hnc,hcd->nhd", weights, v)[None]

    @every_dtype
    def test_equals_attention_over_what_is_stored(self, dtype):
        q, channels, keys, values = self.operands(dtype)
        attended = decode_attention(
            (scale_queries(jnp.asarray(q), channels),), keys.data, values.data,
            jnp.arange(self.CAPACITY, dtype=jnp.int32)[None],
            jnp.full((1, self.N), self.CAPACITY, jnp.int32),
            prefix=0, window=self.CAPACITY + 1, k_scale=keys.scale, v_scale=values.scale,
        )  # fmt: skip
        in_channels = values_of(keys) * np.asarray(channels, np.float64)[:, :, None]
        np.testing.assert_allclose(
            attended.out, self.exact(q, in_channels, values_of(values)), atol=3e-6
        )

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
    def test_equals_attention_over_what_is_loaded(self, dtype):
        q, channels, keys, values = self.operands(dtype)
        queries = (scale_queries(jnp.asarray(q), channels),)
        seen = jnp.ones((1, 1, self.N, self.CAPACITY), bool)
        over = functools.partial(
            attend, queries, seen=seen, in_prefix=seen[0, 0, 0] & False, scale=0.25
        )
        folded = over(keys.data, values.data, k_scale=keys.scale, v_scale=values.scale)
        dense = over(*(load(stored, None, jnp.float32) for stored in (keys, values)))
        np.testing.assert_allclose(folded.out, dense.out, atol=3e-6)

    def test_int8_is_near_the_attention_over_exact_keys(self):
        q, _, keys, values = self.operands("float32")
        _, channels, *quantised = self.operands("int8")
        in_channels = values_of(quantised[0]) * np.asarray(channels, np.float64)[:, :, None]
        near = self.exact(q, in_channels, values_of(quantised[1]))
        np.testing.assert_allclose(
            near, self.exact(q, values_of(keys), values_of(values)), atol=0.03
        )

    def test_queries_are_scaled_by_their_kv_head(self):
        q, channels = normal(2, 3, 6, 4), np.exp(normal(2, 2, 4, seed=3))
        scaled = scale_queries(jnp.asarray(q, jnp.bfloat16), jnp.asarray(channels))
        assert scaled.dtype == jnp.float32
        exact = np.asarray(jnp.asarray(q, jnp.bfloat16), np.float32)
        for head in range(6):
            np.testing.assert_allclose(
                scaled[:, :, head], exact[:, :, head] * channels[:, None, head // 3], rtol=1e-6
            )


class TestDtype:
    @pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu", "METAL"])
    @pytest.mark.parametrize("name", [None, "bfloat16", "int8"])
    def test_served_everywhere(self, name, platform):
        check_dtype(name, platform)

    @pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
    def test_float8_is_served(self, platform):
        check_dtype("float8_e4m3fn", platform)

    def test_float8_is_refused_elsewhere(self):
        with pytest.raises(UserError, match=r"cache\.dtype .* on METAL; choose 'int8'"):
            check_dtype("float8_e4m3fn", "METAL")

    def test_none_is_that_of_the_weights(self):
        assert storage_dtype(None, jnp.bfloat16) == jnp.bfloat16
        assert storage_dtype("int8", jnp.bfloat16) == jnp.int8
