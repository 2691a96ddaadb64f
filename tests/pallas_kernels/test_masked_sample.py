"""One set of tests for every implementation of `masked_sample`, against NumPy in float64.

The kernels run interpreted, with small blocks: many tiles of a small vocabulary, and little to compile.
"""

import functools
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch
from pallas_kernels.bitmask import num_words
from pallas_kernels.dispatch import IMPLEMENTATIONS
from pallas_kernels.masked_sample import (
    Rows,
    api,
    arithmetic,
    masked_sample,
    mosaic_tpu,
    triton,
    xla,
)
from tests.pallas_kernels.test_arithmetic import np_gumbel, np_hash_row

MODULES = {"xla": xla, "mosaic_tpu": mosaic_tpu, "triton": triton}
RUNNABLE = {
    "xla": xla.masked_sample,
    "mosaic_tpu": functools.partial(mosaic_tpu.masked_sample, interpret=True, skip_tiles=True),
    "triton": functools.partial(triton.masked_sample, interpret=True),
}
SMALL_BLOCKS = {
    mosaic_tpu: {"UNROLLED": 1, "MAX_GROUPS_PER_BLOCK": 1},
    triton: {"BLOCK": 256, "PROGRAMS": 12},
}
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
LARGE = 49152

every_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)
every_dtype = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{dtype.__name__}")
        for name, module in MODULES.items()
        for dtype in DTYPES
        if module.unsupported(dtype, 100) is None
    ],
)


@contextmanager
def constants(values):
    with pytest.MonkeyPatch.context() as patch:
        for module, constants_of_module in values.items():
            for constant, value in constants_of_module.items():
                patch.setattr(module, constant, value)
        yield


@functools.cache
def _jitted(name):
    # Compiling an interpreted kernel takes far longer than running it; the other one draws millions.
    options = {"xla_backend_optimization_level": 2 if name == "xla" else 0}
    return jax.jit(RUNNABLE[name], compiler_options=options)


def sample(name, *operands):
    """The sampled tokens; one compilation per shape for all tests."""
    with constants(SMALL_BLOCKS):
        return np.asarray(_jitted(name)(*operands))


def make_rows(batch, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    """Parameters of every row, from one value each or one per row."""
    columns = ((temperature, "f4"), (top_k, "i4"), (top_p, "f4"), (min_p, "f4"), (seed, "u4"))
    return Rows(*(np.broadcast_to(np.asarray(v, d), (batch,)).copy() for v, d in columns))


def random_operands(shape, dtype=np.float32, seed=0, **parameters):
    """logits, bitmask, enabled, positions and rows for `shape` [B,N,V]; greedy unless told."""
    rng = np.random.default_rng(seed)
    *queries, vocab_size = shape
    bitmask = rng.integers(
        -(2**31), 2**31, size=(*queries, num_words(vocab_size)), dtype=np.int64
    ).astype(np.int32)
    return (
        (3 * rng.normal(size=shape)).astype(dtype),
        bitmask,
        rng.integers(0, 2, size=queries, dtype=np.int32),
        rng.integers(0, 4096, size=queries, dtype=np.int32),
        make_rows(shape[0], **{"seed": rng.integers(0, 2**32, size=shape[0]), **parameters}),
    )


def mixed_parameters(batch, rng):
    """Greedy, plain, and filtered rows beside each other."""
    return {
        "temperature": rng.choice([0, 0.5, 1, 4], size=batch),
        "top_k": rng.choice([0, 1, 3, 20], size=batch),
        "top_p": rng.choice([1, 0.3, 0.9, 0], size=batch),
        "min_p": rng.choice([0, 0.02, 0.5, 1], size=batch),
    }


def words_of(is_legal):
    """The mask [..., W] of bool [..., V]."""
    missing = -is_legal.shape[-1] % 32
    padded = np.pad(is_legal, [(0, 0)] * (is_legal.ndim - 1) + [(0, missing)])
    packed = np.packbits(padded, axis=-1, bitorder="little")
    return packed.view("<i4").astype(np.int32)


def legal_of(bitmask, enabled, vocab_size):
    bits = np.unpackbits(bitmask.astype("<i4").view(np.uint8), axis=-1, bitorder="little")
    return bits[..., :vocab_size].astype(bool) | (enabled[..., None] == 0)


def finite_logits(logits):
    """float64, what is not finite as `masked_sample` takes it."""
    highest = np.float64(np.finfo(np.float32).max)
    return np.nan_to_num(logits.astype(np.float64), nan=-highest, posinf=highest, neginf=-highest)


def kept_by_filters(scaled, is_legal, top_k, top_p, min_p):
    """Which tokens of one row [V] the filters keep, by sorting float64; None too near to a tie."""
    if not is_legal.any():
        return is_legal
    kept = is_legal.copy()
    if top_k > 0:
        ranked = np.sort(scaled[kept])[::-1]
        kept &= scaled >= ranked[min(top_k, ranked.size) - 1]
    highest = scaled[is_legal].max()
    weights = np.where(kept, np.exp(scaled - highest), 0)
    if top_p < 1:
        mass = np.cumsum(np.sort(weights)[::-1]) / weights.sum()
        if np.any(np.abs(mass - top_p) < 1e-5):
            return None
        kept &= scaled >= np.sort(scaled[kept])[::-1][np.argmax(mass >= top_p)]
    if min_p > 0:
        if np.any(np.abs(scaled - highest - np.log(min_p)) < 1e-5):
            return None
        kept &= scaled >= min(highest + np.log(min_p), highest)
    return kept


def assert_plausible(tokens, logits, bitmask, enabled, positions, rows):
    """Each token is legal, kept, and has the highest score but for rounding."""
    vocab_size = logits.shape[-1]
    is_legal = legal_of(bitmask, enabled, vocab_size)
    logits = finite_logits(logits)
    every_token = np.arange(vocab_size, dtype=np.int32)
    for b, n in np.ndindex(tokens.shape):
        token, legal = tokens[b, n], is_legal[b, n]
        if not legal.any():
            assert token == 0
            continue
        assert legal[token]
        temperature = np.float64(rows.temperature[b])
        if temperature == 0:
            assert token == np.argmax(np.where(legal, logits[b, n], -np.inf))
            continue
        scaled = logits[b, n] / temperature
        kept = kept_by_filters(scaled, legal, rows.top_k[b], rows.top_p[b], rows.min_p[b])
        if kept is None:
            continue
        assert kept[token]
        row = np_hash_row(rows.seed[b : b + 1], positions[b, n : n + 1])
        scores = np.where(kept, scaled + np_gumbel(row, every_token), -np.inf)
        assert scores[token] >= scores.max() - 1e-5 * (1 + np.abs(scores[kept]).max())


class TestEveryImplementation:
    @pytest.mark.thinned(3)
    @pytest.mark.parametrize(
        "shape", [(1, 1, 1), (3, 5, 33), (9, 1, 1000), (1, 5, 4097), (3, 1, 17000)], ids=str
    )
    @every_implementation
    def test_any_shape(self, name, shape):
        for seed in range(3):
            rng = np.random.default_rng(seed)
            greedy = random_operands(shape, seed=seed)
            assert_plausible(sample(name, *greedy), *greedy)
            mixed = random_operands(shape, seed=seed, **mixed_parameters(shape[0], rng))
            tokens = sample(name, *mixed)
            assert_plausible(tokens, *mixed)
            np.testing.assert_array_equal(tokens, sample("xla", *mixed))

    @pytest.mark.thinned(2)
    @every_dtype
    def test_any_dtype(self, name, dtype):
        shape = (3, 5, 33)
        for seed in range(3):
            rng = np.random.default_rng(seed)
            operands = random_operands(shape, dtype, seed, **mixed_parameters(shape[0], rng))
            tokens = sample(name, *operands)
            assert tokens.dtype == np.int32
            assert_plausible(tokens, *operands)
            np.testing.assert_array_equal(tokens, sample("xla", *operands))

    @every_implementation
    def test_the_lowest_of_equal_logits(self, name):
        """In one register, across lanes, tiles, programs; the holders of the highest logit differ."""
        logits, bitmask, enabled, positions, rows = random_operands((3, 1, 17000))
        logits = np.zeros_like(logits)
        first = [4095, 130, 12289]
        for row, token in enumerate(first):
            logits[row, 0, token] = 1
            logits[row, 0, [token + 1, token + 127, token + 4096, 16999]] = 1
        tokens = sample(name, logits, bitmask, np.zeros_like(enabled), positions, rows)
        assert tokens[:, 0].tolist() == first
        everything = np.zeros_like(logits), bitmask, np.zeros_like(enabled), positions, rows
        assert sample(name, *everything)[:, 0].tolist() == [0, 0, 0]

    @every_implementation
    def test_one_legal_token(self, name):
        shape = (9, 1, 1000)
        token = np.asarray([[0], [30], [31], [32], [63], [64], [127], [128], [999]])
        is_legal = np.arange(1000) == token[..., None]
        for parameters in ({}, {"temperature": 1e-6}, {"temperature": 1000, "top_k": 5}):
            logits, _, _, positions, rows = random_operands(shape, **parameters)
            enabled = np.ones_like(positions)
            tokens = sample(name, logits, words_of(is_legal), enabled, positions, rows)
            np.testing.assert_array_equal(tokens, token)

    @pytest.mark.parametrize("temperature", [0, 1])
    @every_implementation
    def test_no_legal_token(self, name, temperature):
        logits, bitmask, enabled, positions, rows = random_operands(
            (3, 5, 33), temperature=temperature, top_p=[1, 0.5, 1]
        )
        enabled[:] = 1
        enabled[1, 2] = 0
        operands = logits, np.zeros_like(bitmask), enabled, positions, rows
        tokens = sample(name, *operands)
        assert_plausible(tokens, *operands)
        assert np.count_nonzero(tokens) <= 1

    @pytest.mark.parametrize("tail", [0, -1])
    @every_implementation
    def test_bits_beyond_the_vocabulary_mean_nothing(self, name, tail):
        logits, bitmask, enabled, positions, rows = random_operands(
            (3, 5, 33), temperature=[0, 1, 1], top_k=[0, 0, 3]
        )
        bitmask[..., 1] = np.where(tail, bitmask[..., 1] | ~1, bitmask[..., 1] & 1)
        bitmask[:, 0] = [0, -2 if tail else 0]  # no legal token
        enabled[:, 0] = 1
        operands = -np.abs(logits) - 1, bitmask, enabled, positions, rows
        assert_plausible(sample(name, *operands), *operands)

    @pytest.mark.parametrize("temperature", [0, 1e-6, 1, 1000])
    @pytest.mark.parametrize(
        "values", [(np.nan,), (np.inf,), (-np.inf,), (np.nan, np.inf, -np.inf, 0.0)], ids=str
    )
    @every_implementation
    def test_a_legal_token_whatever_the_logits(self, name, values, temperature):
        logits, bitmask, enabled, positions, rows = random_operands(
            (3, 5, 33), temperature=temperature, top_k=[0, 3, 0], top_p=[1, 1, 0.5]
        )
        logits = np.random.default_rng(0).choice(np.asarray(values, np.float32), logits.shape)
        bitmask[..., 0] |= 1 << 7
        is_legal = legal_of(bitmask, enabled, 33)
        tokens = sample(name, logits, bitmask, enabled, positions, rows)
        assert np.take_along_axis(is_legal, tokens[..., None], axis=-1).all()
        infinite = np.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        if values == (np.nan, np.inf, -np.inf, 0.0) and temperature <= 1:
            could = np.any(is_legal & (logits == np.inf), axis=-1)
            np.testing.assert_array_equal(infinite == np.inf, could)

    @every_implementation
    def test_illegal_tokens_are_not_looked_at(self, name):
        """NaN and infinities in tiles without a legal token, and between legal ones."""
        logits, _, enabled, positions, rows = random_operands(
            (3, 1, 17000), temperature=[0, 1, 1], top_k=[0, 0, 7]
        )
        is_legal = np.zeros(logits.shape, bool)
        is_legal[:, :, 4100:8000:3] = True
        is_legal[1, :, 12000] = True
        clean = np.where(is_legal, logits, 0)
        operands = words_of(is_legal), np.ones_like(enabled), positions, rows
        desired = sample(name, clean, *operands)
        assert_plausible(desired, clean, *operands)
        for poison in (np.nan, np.inf, -np.inf):
            poisoned = np.where(is_legal, logits, np.float32(poison))
            np.testing.assert_array_equal(sample(name, poisoned, *operands), desired)

    @pytest.mark.parametrize("temperature", [1e-30, 1e-6])
    @every_implementation
    def test_a_low_temperature_is_greedy(self, name, temperature):
        operands = random_operands((9, 1, 1000), temperature=temperature)
        greedy = random_operands((9, 1, 1000))
        np.testing.assert_array_equal(sample(name, *operands), sample(name, *greedy))

    @every_implementation
    def test_a_high_temperature_ignores_the_logits(self, name):
        logits, *rest = random_operands((9, 1, 1000), temperature=1e9)
        np.testing.assert_array_equal(
            sample(name, logits, *rest), sample(name, np.zeros_like(logits), *rest)
        )

    @every_implementation
    def test_what_stands_beside_a_row_does_not_matter(self, name):
        batch = 9
        rng = np.random.default_rng(1)
        operands = random_operands((batch, 1, 1000), **mixed_parameters(batch, rng))
        together = sample(name, *operands)
        assert len(set(together[:, 0].tolist())) > 5
        order = rng.permutation(batch)
        shuffled = jax.tree.map(lambda x: x[order], operands)
        np.testing.assert_array_equal(sample(name, *shuffled), together[order])
        for b in range(batch):  # beside rows of padding: greedy, with zeros
            alone = jax.tree.map(
                lambda x, b=b: np.where(np.arange(batch).reshape(-1, *[1] * (x.ndim - 1)) == b, x, 0)
                .astype(x.dtype),
                operands,
            )  # fmt: skip
            assert sample(name, *alone)[b, 0] == together[b, 0]

    @every_implementation
    def test_a_query_is_the_same_in_a_batch_of_any_shape(self, name):
        rng = np.random.default_rng(2)
        logits, bitmask, enabled, positions, rows = random_operands(
            (3, 5, 33), **mixed_parameters(3, rng)
        )
        together = sample(name, logits, bitmask, enabled, positions, rows)
        flat = [x.reshape(15, 1, *x.shape[2:]) for x in (logits, bitmask, enabled, positions)]
        by_query = jax.tree.map(lambda x: np.repeat(x, 5), rows)
        np.testing.assert_array_equal(sample(name, *flat, by_query).reshape(3, 5), together)

    @pytest.mark.parametrize("vary", ["seed", "position"])
    @every_implementation
    def test_noise_varies_with(self, name, vary):
        logits, bitmask, enabled, positions, _ = random_operands((9, 1, 1000))
        number = np.arange(9)
        seed = number if vary == "seed" else 5
        positions[:, 0] = number if vary == "position" else 5
        rows = make_rows(9, temperature=1, seed=seed)
        tokens = sample(name, logits * 0, bitmask, enabled * 0, positions, rows)
        assert len(set(tokens[:, 0].tolist())) == 9

    @every_implementation
    def test_a_real_vocabulary_with_the_real_blocks(self, name):
        operands = random_operands((2, 1, LARGE), temperature=[0, 1])
        function = jax.jit(
            RUNNABLE[name],
            compiler_options={"xla_backend_optimization_level": 0} if name != "xla" else {},
        )
        with constants({mosaic_tpu: {"UNROLLED": 2}}):
            tokens = np.asarray(function(*operands))
        assert_plausible(tokens, *operands)


class TestSameTokens:
    """All implementations, bit by bit."""

    @settings(deadline=None, max_examples=60)
    @given(
        shape=st.sampled_from([(9, 1, 70), (2, 9, 40)]),
        seed=st.integers(0, 2**32 - 1),
        spread=st.sampled_from([0, 0.1, 3, 1e30]),
        grid=st.sampled_from([0, 0.5]),
    )
    def test_any_operands(self, shape, seed, spread, grid):
        rng = np.random.default_rng(seed)
        parameters = mixed_parameters(shape[0], rng)
        logits, *rest = random_operands(shape, seed=seed, **parameters)
        logits = (logits * np.float32(spread / 3)).astype(np.float32)
        if grid:
            logits = np.round(logits / np.float32(grid)) * np.float32(grid)
        odd = np.asarray([np.nan, np.inf, -np.inf, -0.0], np.float32)
        logits = np.where(rng.random(shape) < 0.02, rng.choice(odd, shape), logits)
        desired = sample("xla", logits, *rest)
        for name in ("mosaic_tpu", "triton"):
            np.testing.assert_array_equal(sample(name, logits, *rest), desired, err_msg=name)

    def test_many_tiles_of_large_vocabularies(self):
        for seed in range(10):
            rng = np.random.default_rng(seed)
            operands = random_operands((3, 1, 17000), seed=seed, **mixed_parameters(3, rng))
            desired = sample("xla", *operands)
            for name in ("mosaic_tpu", "triton"):
                np.testing.assert_array_equal(sample(name, *operands), desired, err_msg=name)


class TestFilters:
    """`least_kept` of both implementations against sorting in float64."""

    @staticmethod
    @functools.cache
    def _least_kept(name, room):
        def by_xla(logits, bitmask, enabled, rows):
            words = xla.effective_words(bitmask, enabled, logits.shape[-1])
            is_legal = xla.legal(words, 0, words.shape[-1] * 32)[..., : logits.shape[-1]]
            return xla.least_kept(logits, is_legal, rows)[..., 0]

        by_mosaic = functools.partial(mosaic_tpu.least_kept, interpret=True)
        options = {} if name == "xla" else {"xla_backend_optimization_level": 0}
        return jax.jit(by_xla if name == "xla" else by_mosaic, compiler_options=options)

    def least_kept(self, name, logits, bitmask, enabled, rows, room=1 << 20):
        with constants({mosaic_tpu: {**SMALL_BLOCKS[mosaic_tpu], "MIN_FILTER_BYTES": room}}):
            function = self._least_kept(name, room)
            return np.asarray(function(logits, bitmask, enabled, rows))

    def kept(self, name, logits, bitmask, enabled, rows):
        scaled = xla.scale(jnp.asarray(logits), jax.tree.map(jnp.asarray, rows))
        least = self.least_kept(name, logits, bitmask, enabled, rows)
        legal = legal_of(bitmask, enabled, logits.shape[-1])
        return (np.asarray(arithmetic.key(scaled)) >= least[..., None]) & legal

    @pytest.mark.parametrize("name", ["xla", "mosaic_tpu"])
    @settings(deadline=None, max_examples=60)
    @given(
        seed=st.integers(0, 2**32 - 1),
        top_k=st.sampled_from([0, 1, 2, 5, 39, 70, 1000]),
        top_p=st.sampled_from([1, 0, 0.05, 0.5, 0.9, 0.999]),
        min_p=st.sampled_from([0, 0.01, 0.1, 0.7, 1]),
        temperature=st.sampled_from([0.25, 1, 2]),
    )
    def test_against_sorting(self, name, seed, top_k, top_p, min_p, temperature):
        """Logits of a coarse grid have many ties, and stay exact over a power of two."""
        logits, bitmask, enabled, _, _ = random_operands((3, 5, 70), seed=seed)
        logits = np.round(logits * 4) / 4  # with ties, of 0 and −0 too
        rows = make_rows(3, temperature, top_k, top_p, min_p)
        kept = self.kept(name, logits, bitmask, enabled, rows)
        is_legal = legal_of(bitmask, enabled, 70)
        checked = 0
        for b, n in np.ndindex(3, 5):
            desired = kept_by_filters(
                logits[b, n].astype(np.float64) / temperature, is_legal[b, n],
                top_k, float(np.float32(top_p)), float(np.float32(min_p)),
            )  # fmt: skip
            if desired is not None:
                np.testing.assert_array_equal(kept[b, n], desired)
                checked += 1
        assume(checked)

    @pytest.mark.parametrize("name", ["xla", "mosaic_tpu"])
    def test_ties_stay_together(self, name):
        logits = np.zeros((3, 5, 70), np.float32)
        logits[:, :, 10:20] = 1
        _, bitmask, _, _, _ = random_operands((3, 5, 70))
        off = np.zeros((3, 5), np.int32)
        rows = make_rows(3, 1, top_k=[3, 0, 11], top_p=[1, 0.01, 1])
        number = self.kept(name, logits, bitmask, off, rows).sum(axis=-1)
        assert number[:, 0].tolist() == [10, 10, 70]

    @pytest.mark.parametrize("name", ["xla", "mosaic_tpu"])
    def test_top_p_counts_what_top_k_leaves(self, name):
        """With four equally likely tokens beside 66 likely together, order is everything."""
        logits = np.zeros((3, 5, 70), np.float32)
        logits[:, :, :4] = [4, 3, 2, 1]
        _, bitmask, _, _, _ = random_operands((3, 5, 70))
        off = np.zeros((3, 5), np.int32)
        # Of all: 0.3546; of the best two: 0.731. min-p looks at likelihoods relative to the best.
        rows = make_rows(3, 1, top_k=[2, 0, 4], top_p=[0.7, 0.7, 1], min_p=[0, 0, 0.2])
        number = self.kept(name, logits, bitmask, off, rows).sum(axis=-1)
        assert number[0, 0] == 1
        assert number[1, 0] == 70  # the tie of all the zeros
        assert number[2, 0] == 2

    @pytest.mark.parametrize("room", [3 * 4 * 8 * 4096, 2 * 3 * 4 * 8 * 4096, 1000])
    def test_whatever_finds_room_in_vmem(self, room):
        """Keys only, keys and weights, nothing: three tiles of 4096 tokens."""
        rng = np.random.default_rng(3)
        parameters = {**mixed_parameters(3, rng), "temperature": [1, 0.5, 2], "top_k": [0, 50, 0]}
        parameters["top_p"] = [0.9, 0.5, 0.99]
        logits, bitmask, enabled, _, rows = random_operands((3, 1, 9000), **parameters)
        desired = self.least_kept("xla", logits, bitmask, enabled, rows)
        actual = self.least_kept("mosaic_tpu", logits, bitmask, enabled, rows, room)
        np.testing.assert_array_equal(actual, desired)
        assert np.all(desired > arithmetic.LEAST_KEY)

    def test_rows_that_do_not_filter_beside_rows_that_do(self):
        logits, bitmask, enabled, _, rows = random_operands(
            (9, 1, 70), temperature=[1] * 8 + [1], top_k=[3] + [0] * 8
        )
        least = self.least_kept("mosaic_tpu", logits, bitmask, enabled, rows)
        assert least[0, 0] > arithmetic.LEAST_KEY
        assert np.all(least[1:] == arithmetic.LEAST_KEY)


class TestDistribution:
    """A million draws; all implementations give the same tokens, so the fastest one draws."""

    SHAPE = (100, 500, 50)

    def draw(self, logits, is_legal=None, first_seed=0, **parameters):
        """How often each token of logits [V] comes, of 1 000 000."""
        batch, queries, vocab_size = self.SHAPE
        bitmask = words_of(np.ones(vocab_size, bool) if is_legal is None else is_legal)
        operands = (
            np.broadcast_to(logits.astype(np.float32), self.SHAPE),
            np.broadcast_to(bitmask, (batch, queries, bitmask.size)),
            np.ones((batch, queries), np.int32),
            np.broadcast_to(np.arange(queries, dtype=np.int32), (batch, queries)),
        )
        counts = np.zeros(vocab_size, np.int64)
        for chunk in range(20):
            seed = first_seed + batch * chunk + np.arange(batch)
            tokens = sample("xla", *operands, make_rows(batch, seed=seed, **parameters))
            counts += np.bincount(tokens.ravel(), minlength=vocab_size)
        assert counts.sum() == 1_000_000
        return counts

    @staticmethod
    def deviation(counts, probabilities):
        """By how many standard deviations Pearson's statistic exceeds its mean."""
        possible = probabilities > 0
        assert np.all(counts[~possible] == 0)
        expected = probabilities[possible] * counts.sum()
        assert expected.min() > 20
        statistic = np.sum((counts[possible] - expected) ** 2 / expected)
        degrees = possible.sum() - 1
        return (statistic - degrees) / np.sqrt(2 * degrees)

    LOGITS = np.random.default_rng(0).normal(size=50)

    @staticmethod
    def softmax(logits):
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    @pytest.mark.parametrize("temperature", [0.7, 1, 3])
    def test_softmax_with_temperature(self, temperature):
        counts = self.draw(self.LOGITS, temperature=temperature)
        assert self.deviation(counts, self.softmax(self.LOGITS / temperature)) < 4

    def test_the_check_sees_a_temperature_that_is_one_percent_off(self):
        counts = self.draw(self.LOGITS, temperature=1)
        assert self.deviation(counts, self.softmax(self.LOGITS / 1.01)) > 4

    def test_under_a_mask(self):
        is_legal = np.arange(50) % 3 == 1
        counts = self.draw(self.LOGITS, is_legal, temperature=1)
        masked = np.where(is_legal, self.LOGITS, -np.inf)
        assert self.deviation(counts, self.softmax(masked)) < 4

    def test_under_top_k(self):
        counts = self.draw(self.LOGITS, temperature=1, top_k=7)
        kept = np.argsort(np.argsort(-self.LOGITS)) < 7
        assert self.deviation(counts, self.softmax(np.where(kept, self.LOGITS, -np.inf))) < 4

    def test_draws_of_neighbours_are_independent(self):
        """Pairs of a draw and that of the next position, and of the next seed, in a 2 × 2 table."""
        batch, queries, vocab_size = self.SHAPE
        operands = (
            np.zeros(self.SHAPE, np.float32),
            np.full((batch, queries, 2), -1, np.int32),
            np.zeros((batch, queries), np.int32),
            np.broadcast_to(np.arange(queries, dtype=np.int32), (batch, queries)),
        )
        rows = make_rows(batch, temperature=1, seed=np.arange(batch))
        high = sample("xla", *operands, rows) >= vocab_size // 2
        for a, b in ((high[:, 1:], high[:, :-1]), (high[1:], high[:-1])):
            assert abs(np.mean(a == b) - 0.5) < 4 * 0.5 / np.sqrt(a.size)


class TestXla:
    @pytest.mark.parametrize("tile", [32, 64, 1024])
    def test_tiles_of_any_size(self, tile):
        rng = np.random.default_rng(4)
        operands = random_operands((9, 1, 1000), **mixed_parameters(9, rng))
        desired = sample("xla", *operands)
        with constants({xla: {"TILE": tile}}):
            # A new function: the cache of traces does not know of the constant.
            tokens = jax.jit(lambda *operands: xla.masked_sample(*operands))(*operands)
        np.testing.assert_array_equal(tokens, desired)

    def test_never_an_illegal_token_of_a_real_vocabulary(self):
        """Noise of float32 that rounds to 1 is infinite once in 2^24 draws: here are 2^25."""
        batch, queries = 8, 8
        legal = np.random.default_rng(5).random((batch, queries, LARGE)) < 0.01
        operands = (
            np.where(legal, np.float32(-1000), np.float32(1000)),
            words_of(legal),
            np.ones((batch, queries), np.int32),
        )
        for chunk in range(11):
            positions = (chunk * 64 + np.arange(64, dtype=np.int32)).reshape(batch, queries)
            tokens = sample("xla", *operands, positions, make_rows(batch, temperature=1))
            assert np.take_along_axis(legal, tokens[..., None], axis=-1).all()


class TestMosaicTpu:
    @pytest.fixture(autouse=True)
    def _reset_interpreter(self):
        yield
        pltpu.reset_tpu_interpret_mode_state()

    # Blocks must be whole there. Scratch memory is NaN before it is written.
    STRICT = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
    )

    def test_sampling_under_tpu_memory_semantics_without_races(self):
        shape = (8, 1, 2 * mosaic_tpu.GROUP)
        logits, bitmask, enabled, *rest = random_operands(shape, temperature=[0, 1] * 4)
        bitmask[..., : mosaic_tpu.LANES] = 0
        operands = logits, bitmask, np.ones_like(enabled), *rest
        kernel = functools.partial(mosaic_tpu.sample, skip_tiles=True, interpret=self.STRICT)
        least = np.full(shape[:2], arithmetic.LEAST_KEY, np.int32)
        with constants(SMALL_BLOCKS):
            tokens = jax.jit(kernel)(*operands, least)
        np.testing.assert_array_equal(tokens, sample("xla", *operands))

    def test_filtering_under_tpu_memory_semantics_without_races(self):
        logits, bitmask, enabled, _, rows = random_operands(
            (8, 1, 2 * mosaic_tpu.GROUP), temperature=1, top_p=0.9
        )
        kernel = functools.partial(mosaic_tpu.least_kept, interpret=self.STRICT)
        with constants(SMALL_BLOCKS):
            least = jax.jit(kernel)(logits, bitmask, enabled, rows)
        desired = TestFilters().least_kept("xla", logits, bitmask, enabled, rows)
        np.testing.assert_array_equal(least, desired)

    @pytest.mark.parametrize("shape", [(3, 1, 5 * 4096 + 1), (2, 9, 3 * 4096 - 1)], ids=str)
    def test_a_step_without_a_legal_token_keeps_the_next_tile(self, shape):
        """Some tiles with a legal token, in rows of different groups; the last bits do not count."""
        rng = np.random.default_rng(6)
        logits = np.zeros(shape, np.float32)
        with constants(SMALL_BLOCKS):
            tiles = mosaic_tpu._Tiles.of(logits)
            batch, groups, along_v = tiles.grid
            list_tiles = jax.jit(
                lambda parameters, bitmask: mosaic_tpu._list_tiles(
                    tiles, tiles.arrange(parameters), tiles.arrange(bitmask), True
                )
            )
            for _ in range(20):
                is_legal = np.zeros(shape, bool)
                some = rng.integers(0, shape[-1], size=2)
                is_legal[rng.integers(shape[0]), rng.integers(shape[1]), some] = True
                bitmask = words_of(is_legal)
                if tail := shape[-1] % 32:
                    bitmask[..., -1] |= np.int32(-1) << np.int32(tail)
                parameters = np.ones((*shape[:2], 5), np.int32)
                listed = list_tiles(parameters, bitmask)
                desired = []
                by_row = is_legal.reshape(batch, -1, shape[-1])
                for b, n in np.ndindex(batch, groups):
                    rows = by_row[b, n * 8 : n * 8 + 8]
                    live = np.unique(np.flatnonzero(rows.any(axis=0)) // tiles.block_v)
                    for step in range(along_v):
                        later = live[live >= step]
                        desired.append(later[0] if later.size else max(live, default=0))
                assert np.asarray(listed).tolist() == desired

    def test_without_a_list_of_tiles(self):
        operands = random_operands((3, 1, 17000), temperature=[0, 1, 1], top_k=[0, 0, 9])
        kernel = functools.partial(mosaic_tpu.masked_sample, skip_tiles=False, interpret=True)
        with constants(SMALL_BLOCKS):
            tokens = jax.jit(kernel, compiler_options={"xla_backend_optimization_level": 0})(
                *operands
            )
        np.testing.assert_array_equal(tokens, sample("xla", *operands))


class TestApi:
    def test_default_on_a_cpu(self):
        operands = random_operands((3, 5, 33), temperature=[0, 1, 1], top_k=[0, 0, 3])
        operands = jax.tree.map(jnp.asarray, operands)
        tokens = masked_sample(*operands)
        assert tokens.shape == (3, 5)
        assert tokens.dtype == jnp.int32
        np.testing.assert_array_equal(tokens, sample("xla", *operands))

    @pytest.mark.parametrize(
        ("argument", "wrong"),
        [
            ("logits", np.zeros((2, 3, 100), np.int32)),
            ("logits", np.zeros((2, 3, 100), np.float64)),
            ("logits", np.zeros((3, 3, 100), np.float32)),
            ("logits", np.zeros((2, 100), np.float32)),
            ("logits", np.zeros((), np.float32)),
            ("logits", np.zeros((2, 3, 0), np.float32)),
            ("logits", jax.ShapeDtypeStruct((2, 3, api.LARGEST_VOCABULARY + 1), jnp.float32)),
            ("bitmask", np.zeros((2, 3, 4), np.uint32)),
            ("bitmask", np.zeros((2, 3, 3), np.int32)),
            ("bitmask", np.zeros((2, 1, 4), np.int32)),
            ("bitmask", np.zeros((6, 4), np.int32)),
            ("enabled", np.zeros((2, 3), bool)),
            ("enabled", np.zeros((2,), np.int32)),
            ("positions", np.zeros((2, 3), np.uint32)),
            ("positions", np.zeros((2,), np.int32)),
            ("rows.temperature", np.zeros((2,), np.float64)),
            ("rows.temperature", np.zeros((2, 3), np.float32)),
            ("rows.top_k", np.zeros((2,), np.float32)),
            ("rows.top_k", np.zeros((3,), np.int32)),
            ("rows.top_p", np.zeros((2,), np.int32)),
            ("rows.min_p", np.zeros((1,), np.float32)),
            ("rows.seed", np.zeros((2,), np.int32)),
        ],
    )
    def test_a_wrong_operand_is_named(self, argument, wrong):
        logits, bitmask, enabled, positions, rows = random_operands((2, 3, 100))
        operands = {
            "logits": logits, "bitmask": bitmask, "enabled": enabled, "positions": positions,
            "rows": rows,
        }  # fmt: skip
        if argument.startswith("rows."):
            operands["rows"] = rows._replace(**{argument.removeprefix("rows."): wrong})
        else:
            operands[argument] = wrong
        with pytest.raises(ValueError, match=f"^{argument}: "):
            masked_sample(**operands)

    def test_an_unknown_implementation_is_named(self):
        with pytest.raises(ValueError, match=r"^implementation: must be one of xla, mosaic_tpu"):
            masked_sample(*random_operands((2, 3, 100)), implementation="cuda")

    def test_an_implementation_that_lacks_the_dtype_is_named(self):
        with pytest.raises(
            ValueError, match=r"^implementation: 'mosaic_tpu' does not take float16"
        ):
            masked_sample(*random_operands((2, 3, 100), np.float16), implementation="mosaic_tpu")

    @pytest.mark.parametrize(
        ("device", "dtype", "chosen"),
        [
            ({"platform": "cpu", "device_kind": "cpu"}, "float32", xla),
            ({"platform": "tpu", "device_kind": "TPU v5 lite"}, "bfloat16", mosaic_tpu),
            ({"platform": "tpu", "device_kind": "TPU v5 lite"}, "float16", xla),
            ({"platform": "tpu", "device_kind": "TPU v3"}, "float32", xla),
            ({"platform": "gpu", "device_kind": "H", "compute_capability": "9.0"}, "float16", triton),
            ({"platform": "gpu", "device_kind": "T4", "compute_capability": "7.5"}, "float32", xla),
            ({"platform": "gpu", "device_kind": "MI", "compute_capability": "gfx942"}, "float32", xla),
        ],
    )  # fmt: skip
    def test_default_by_device_and_dtype(self, monkeypatch, device, dtype, chosen):
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(**device)])
        module = dispatch.choose(
            "masked_sample", None, lambda module: module.unsupported(jnp.dtype(dtype), 100)
        )
        assert module is chosen

    @pytest.mark.parametrize(
        ("device", "room"),
        [
            ({"platform": "cpu", "device_kind": "cpu"}, mosaic_tpu.MIN_FILTER_BYTES),
            ({"platform": "tpu", "device_kind": "TPU v4"}, mosaic_tpu.MIN_FILTER_BYTES),
            ({"platform": "tpu", "device_kind": "TPU v6 lite"}, mosaic_tpu.MAX_FILTER_BYTES),
        ],
    )
    def test_room_for_filters_by_device(self, monkeypatch, device, room):
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(**device)])
        assert mosaic_tpu._filter_bytes() == room
