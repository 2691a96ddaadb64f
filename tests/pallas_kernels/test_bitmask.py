"""One set of tests for every implementation of `apply_token_bitmask`, against NumPy bit by bit."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.bitmask import (
    IMPLEMENTATIONS,
    api,
    apply_token_bitmask,
    masked_logit,
    mosaic_tpu,
    num_words,
    triton,
    xla,
)

RUNNABLE = {
    "xla": xla.apply_token_bitmask,
    "mosaic_tpu": functools.partial(mosaic_tpu.apply_token_bitmask, interpret=True),
    "triton": functools.partial(triton.apply_token_bitmask, interpret=True),
}
MODULES = {"xla": xla, "mosaic_tpu": mosaic_tpu, "triton": triton}
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
LARGE_VOCAB_SIZES = (49152, 128256, 151936, 262208)


def reference(logits: np.ndarray, bitmask: np.ndarray, enabled: np.ndarray) -> np.ndarray:
    """NumPy's own unpacking; little-endian bytes put bit t of a row at index t."""
    bits = np.unpackbits(bitmask.astype("<i4").view(np.uint8), axis=-1, bitorder="little")
    allowed = bits[..., : logits.shape[-1]].astype(bool) | (enabled[..., None] == 0)
    return np.where(allowed, logits, np.asarray(masked_logit(logits.dtype), logits.dtype))


def random_operands(rows, vocab_size, dtype, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(*rows, vocab_size)).astype(dtype)
    words = (*rows, num_words(vocab_size))
    bitmask = rng.integers(-(2**31), 2**31, size=words, dtype=np.int64).astype(np.int32)
    return logits, bitmask, rng.integers(0, 2, size=rows, dtype=np.int32)


def assert_same_bits(actual, desired: np.ndarray) -> None:
    actual = np.asarray(actual)
    assert actual.dtype == desired.dtype
    assert actual.shape == desired.shape
    np.testing.assert_array_equal(actual.view(np.uint8), desired.view(np.uint8))


every_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)
every_dtype = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{dtype.__name__}")
        for name, module in MODULES.items()
        for dtype in DTYPES
        if module.supports_dtype(dtype)
    ],
)


class TestEveryImplementation:
    @pytest.fixture
    def apply(self, name):
        # Compiling an interpreted kernel takes far longer than running it.
        options = {} if name == "xla" else {"xla_backend_optimization_level": 0}
        return jax.jit(RUNNABLE[name], compiler_options=options)

    @pytest.mark.parametrize("vocab_size", [1, 32, 33, 1000, 4097, 17000])
    @every_dtype
    def test_any_vocabulary_size(self, apply, dtype, vocab_size):
        operands = random_operands((9,), vocab_size, dtype)
        assert_same_bits(apply(*operands), reference(*operands))

    @pytest.mark.parametrize("rows", [(), (1,), (17,), (3, 1), (2, 5), (2, 1, 9)], ids=str)
    @every_implementation
    def test_any_leading_dimensions(self, apply, rows):
        operands = random_operands(rows, 100, np.float32)
        assert_same_bits(apply(*operands), reference(*operands))

    @every_implementation
    def test_a_real_vocabulary(self, apply):
        operands = random_operands((2, 1), 49152, np.float32)
        assert_same_bits(apply(*operands), reference(*operands))

    @every_dtype
    def test_disabled_rows_are_untouched_even_by_a_zero_mask(self, apply, dtype):
        logits, bitmask, _ = random_operands((4, 1), 100, dtype)
        masked = apply(logits, np.zeros_like(bitmask), np.asarray([[0], [1], [0], [-7]], np.int32))
        assert_same_bits(masked[jnp.asarray([0, 2])], logits[[0, 2]])
        assert np.all(np.asarray(masked)[[1, 3]] == np.asarray(masked_logit(dtype), dtype))

    @every_dtype
    def test_a_row_without_a_legal_token_stays_finite(self, apply, dtype):
        logits, bitmask, _ = random_operands((2,), 100, dtype)
        masked = apply(logits, np.zeros_like(bitmask), np.ones(2, np.int32))
        probabilities = jax.nn.softmax(masked.astype(jnp.float32), axis=-1)
        np.testing.assert_allclose(probabilities, 0.01, rtol=1e-6)

    @every_dtype
    def test_all_ones_change_nothing(self, apply, dtype):
        logits, bitmask, _ = random_operands((2, 3), 100, dtype)
        masked = apply(logits, np.full_like(bitmask, -1), np.ones((2, 3), np.int32))
        assert_same_bits(masked, logits)

    @pytest.mark.parametrize("tail", [0, -1])
    @every_implementation
    def test_bits_beyond_the_vocabulary_mean_nothing(self, apply, tail):
        logits, bitmask, _ = random_operands((2,), 33, np.float32)
        bitmask[:, 1] = np.where(tail, bitmask[:, 1] | ~1, bitmask[:, 1] & 1)
        operands = logits, bitmask, np.ones(2, np.int32)
        assert_same_bits(apply(*operands), reference(*operands))

    @every_implementation
    def test_special_logits(self, apply):
        special = np.asarray([np.nan, np.inf, -np.inf, -0.0], np.float32)
        logits = np.stack([special, special])
        masked = np.asarray(apply(logits, np.asarray([[-1], [0]], np.int32), np.ones(2, np.int32)))
        assert_same_bits(masked[0], special)
        assert np.all(masked[1] == masked_logit(np.float32))

    @pytest.mark.parametrize("token", [0, 30, 31, 32, 63, 64, 99])
    @every_implementation
    def test_one_legal_token(self, apply, token):
        bitmask = np.zeros((1, 4), np.uint32)
        bitmask[0, token >> 5] = 1 << (token & 31)
        masked = apply(np.zeros((1, 100), np.float32), bitmask.view(np.int32), np.ones(1, np.int32))
        assert np.flatnonzero(np.asarray(masked)[0] == 0).tolist() == [token]


class TestXla:
    """At full size: XLA:CPU has silently miscompiled operations this wide (jax#39103)."""

    @pytest.mark.parametrize("vocab_size", LARGE_VOCAB_SIZES)
    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
    def test_large_vocabularies(self, dtype, vocab_size):
        operands = random_operands((8, 1), vocab_size, dtype)
        assert_same_bits(jax.jit(xla.apply_token_bitmask)(*operands), reference(*operands))

    def test_more_rows_than_vocabularies_are_wide(self):
        operands = random_operands((40000,), 65, np.float32)
        assert_same_bits(jax.jit(xla.apply_token_bitmask)(*operands), reference(*operands))

    @settings(deadline=None, max_examples=25)
    @given(
        rows=st.lists(st.integers(1, 3), max_size=3).map(tuple),
        vocab_size=st.integers(1, 300),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_any_operands(self, rows, vocab_size, dtype, seed):
        operands = random_operands(rows, vocab_size, dtype, seed)
        assert_same_bits(jax.jit(xla.apply_token_bitmask)(*operands), reference(*operands))

    @pytest.mark.parametrize("vocab_size", [49152, 50257])
    def test_compiles_to_one_loop_in_place(self, vocab_size):
        operands = random_operands((8, 1), vocab_size, np.float32)
        masked = jax.jit(xla.apply_token_bitmask, donate_argnums=0)
        memory = masked.lower(*operands).compile().memory_analysis()
        assert memory.alias_size_in_bytes == operands[0].nbytes
        assert memory.temp_size_in_bytes <= operands[1].nbytes


class TestMosaicTpu:
    @pytest.fixture(autouse=True)
    def _reset_interpreter(self):
        yield
        pltpu.reset_tpu_interpret_mode_state()

    def test_under_tpu_memory_semantics_without_races(self):
        vocab_size = 2 * mosaic_tpu.GROUP * mosaic_tpu.MAX_GROUPS_PER_BLOCK
        operands = random_operands((mosaic_tpu.SUBLANES,), vocab_size, np.float32)
        strict = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise")
        masked = jax.jit(functools.partial(mosaic_tpu.apply_token_bitmask, interpret=strict))
        assert_same_bits(masked(*operands), reference(*operands))


class TestApi:
    def test_default_on_a_cpu(self):
        operands = random_operands((2, 3), 100, np.float32)
        assert_same_bits(apply_token_bitmask(*operands), reference(*operands))

    @pytest.mark.parametrize("rows", [(0,), (0, 1)])
    def test_no_rows(self, rows):
        logits = jnp.zeros((*rows, 100))
        masked = apply_token_bitmask(
            logits, jnp.zeros((*rows, 4), jnp.int32), jnp.zeros(rows, jnp.int32)
        )
        assert masked.shape == logits.shape

    @pytest.mark.parametrize(
        ("argument", "wrong"),
        [
            ("logits", np.zeros((2, 100), np.int32)),
            ("logits", np.zeros((2, 100), np.float64)),
            ("logits", np.zeros((), np.float32)),
            ("bitmask", np.zeros((2, 4), np.uint32)),
            ("bitmask", np.zeros((2, 3), np.int32)),
            ("bitmask", np.zeros((1, 4), np.int32)),
            ("bitmask", np.zeros((2, 1, 4), np.int32)),
            ("enabled", np.zeros(2, bool)),
            ("enabled", np.zeros((2, 1), np.int32)),
        ],
    )
    def test_a_wrong_operand_is_named(self, argument, wrong):
        logits, bitmask, enabled = random_operands((2,), 100, np.float32)
        operands = {"logits": logits, "bitmask": bitmask, "enabled": enabled, argument: wrong}
        with pytest.raises(ValueError, match=f"^{argument}: "):
            apply_token_bitmask(**operands)

    def test_an_unknown_implementation_is_named(self):
        with pytest.raises(ValueError, match=r"^implementation: must be one of xla, mosaic_tpu"):
            apply_token_bitmask(*random_operands((2,), 100, np.float32), implementation="cuda")

    def test_an_implementation_that_lacks_the_dtype_is_named(self):
        with pytest.raises(
            ValueError, match=r"^implementation: 'mosaic_tpu' does not take float16"
        ):
            apply_token_bitmask(
                *random_operands((2,), 100, np.float16), implementation="mosaic_tpu"
            )

    @pytest.mark.parametrize(
        ("device", "dtype", "chosen"),
        [
            ({"platform": "cpu", "device_kind": "cpu"}, "float32", "xla"),
            ({"platform": "tpu", "device_kind": "TPU v5 lite"}, "bfloat16", "mosaic_tpu"),
            ({"platform": "tpu", "device_kind": "TPU v5 lite"}, "float16", "xla"),
            ({"platform": "tpu", "device_kind": "TPU v2"}, "float32", "xla"),
            ({"platform": "gpu", "compute_capability": "9.0"}, "float16", "triton"),
            ({"platform": "gpu", "compute_capability": "12.0"}, "float32", "triton"),
            ({"platform": "gpu", "compute_capability": "7.5"}, "float32", "xla"),
            ({"platform": "gpu", "compute_capability": "gfx942"}, "float32", "xla"),
            ({"platform": "gpu"}, "float32", "xla"),
            ({"platform": "metal"}, "float32", "xla"),
        ],
    )
    def test_default_by_device_and_dtype(self, monkeypatch, device, dtype, chosen):
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(**device)])
        assert api._select(jnp.dtype(dtype)) == chosen

    def test_default_without_the_pallas_backend(self, monkeypatch):
        def unavailable(name):
            raise ImportError(name)

        device = SimpleNamespace(platform="gpu", compute_capability="9.0")
        monkeypatch.setattr(jax, "devices", lambda: [device])
        monkeypatch.setattr(api, "_module", unavailable)
        assert api._select(jnp.dtype("float32")) == "xla"
