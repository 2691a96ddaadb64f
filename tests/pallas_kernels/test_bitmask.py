"""One set of tests for every implementation of `apply_token_bitmask`, against NumPy bit by bit."""

import functools
import inspect
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.bitmask import (
    IMPLEMENTATIONS,
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
        if not module.unsupported(dtype)
    ],
)


class TestEveryImplementation:
    @pytest.fixture
    def apply(self, name):
        # Compiling an interpreted kernel takes far longer than running it.
        options = {} if name == "xla" else {"xla_backend_optimization_level": 0}
        return jax.jit(RUNNABLE[name], compiler_options=options)

    @pytest.mark.thinned(3)
    @pytest.mark.parametrize("vocab_size", [1, 32, 33, 1000, 4097, 17000])
    @every_dtype
    def test_any_vocabulary_size(self, apply, dtype, vocab_size):
        operands = random_operands((9,), vocab_size, dtype)
        assert_same_bits(apply(*operands), reference(*operands))

    @pytest.mark.thinned(3)
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
    """The kernels that look for the blocks to move, which small logits do without."""

    SKIPPED, WRITTEN, MASKED = "all legal", "all illegal", "mixed"
    NAN = 0x7FC12345  # not the NaN that anything computes

    @pytest.fixture(autouse=True)
    def _reset_interpreter(self):
        yield
        pltpu.reset_tpu_interpret_mode_state()

    @staticmethod
    def compiled(interpret, **options):
        mask = functools.partial(mosaic_tpu.apply_token_bitmask, interpret=interpret, **options)
        return jax.jit(mask, compiler_options={"xla_backend_optimization_level": 0})

    @staticmethod
    def strict(**options):
        return pltpu.InterpretParams(
            detect_races=True,
            out_of_bounds_reads="raise",
            uninitialized_memory="nan",
            **options,
        )

    def operands(self, contents, vocab_size, seed=0):
        """float32 operands `[B, N, V]` whose blocks `[B, N / 8, V / 4096 k]` are as `contents`.

        Logits of blocks that must not be read are NaN, of a kind that nobody computes.
        """
        batch, along_n, along_v = np.shape(contents)
        logits, bitmask, enabled = random_operands(
            (batch, 8 * along_n), vocab_size, np.float32, seed
        )
        enabled[...] = 1
        block_v = mosaic_tpu._Blocks.of(logits.shape).block_v
        assert along_v == -(-vocab_size // block_v)
        for (b, n, v), content in np.ndenumerate(contents):
            rows = slice(8 * n, 8 * n + 8)
            words = bitmask[b, rows, v * block_v // 32 : (v + 1) * block_v // 32]
            tokens = logits[b, rows, v * block_v : (v + 1) * block_v]
            if content != self.MASKED:
                words[...] = -1 if content == self.SKIPPED else 0
                tokens.view(np.uint32)[...] = self.NAN
        return logits, bitmask, enabled

    def test_every_way_under_tpu_memory_semantics_without_races(self, capsys):
        mask = self.compiled(self.strict(), skip_blocks=True)
        skipped, written, masked = self.SKIPPED, self.WRITTEN, self.MASKED
        for contents in (
            [skipped, written, masked, skipped, masked],
            [masked, skipped, written, skipped, skipped],
            [skipped] * 5,
            [written] * 5,
            [masked] * 5,
        ):
            operands = self.operands(np.reshape(contents, (5, 1, 1)), mosaic_tpu.GROUP)
            assert_same_bits(mask(*operands), reference(*operands))
        assert "RACE" not in capsys.readouterr().out

    def test_blocks_along_rows_and_vocabulary(self, capsys):
        vocab_size = 2 * mosaic_tpu.GROUP * mosaic_tpu.MAX_GROUPS_PER_BLOCK
        contents = [[[self.WRITTEN, self.SKIPPED], [self.SKIPPED, self.MASKED]]]
        operands = self.operands(contents, vocab_size)
        mask = self.compiled(self.strict(), skip_blocks=True)
        assert_same_bits(mask(*operands), reference(*operands))
        assert "RACE" not in capsys.readouterr().out

    @pytest.mark.full
    def test_two_cores_touch_no_block_twice(self, capsys):
        known = inspect.signature(pltpu.InterpretParams).parameters
        name = "num_cores_or_threads" if "num_cores_or_threads" in known else "num_cores_per_device"
        mask = self.compiled(self.strict(**{name: 2}), skip_blocks=True)  # the latter in jax 0.7
        for contents in (
            [self.SKIPPED, self.WRITTEN, self.MASKED],
            [self.SKIPPED] * 3,
        ):
            operands = self.operands(np.reshape(contents, (3, 1, 1)), mosaic_tpu.GROUP)
            assert_same_bits(mask(*operands), reference(*operands))
        assert "RACE" not in capsys.readouterr().out

    def test_without_lists(self, capsys):
        operands = random_operands((2, mosaic_tpu.SUBLANES), mosaic_tpu.GROUP, np.float32)
        mask = self.compiled(self.strict(), skip_blocks=False)
        assert_same_bits(mask(*operands), reference(*operands))
        assert "RACE" not in capsys.readouterr().out

    @pytest.mark.thinned(2)
    @pytest.mark.parametrize(("rows", "vocab_size"), [((9,), 17000), ((2, 5), 4097), ((2, 9), 100)])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
    def test_blocks_that_stick_out(self, rows, vocab_size, dtype):
        mask = self.compiled(True, skip_blocks=True)
        logits, bitmask, enabled = random_operands(rows, vocab_size, dtype)
        for words, enable in ((bitmask, enabled), (np.zeros_like(bitmask), np.ones_like(enabled))):
            operands = logits, words, enable
            assert_same_bits(mask(*operands), reference(*operands))

    @staticmethod
    def lists(*trials):
        """For each trial both lists, as (block, whether it is the step's own) [2 halves, steps]."""
        blocks = mosaic_tpu._Blocks.of(trials[0][0].shape)
        make = jax.jit(
            lambda *operands: mosaic_tpu._list_blocks(blocks, *operands, interpret=True),
            compiler_options={"xla_backend_optimization_level": 0},
        )

        def named(entries):
            entries = np.asarray(entries).reshape(mosaic_tpu.HALVES, -1)
            index = np.stack(blocks.unpack(entries >> 1))
            return np.ravel_multi_index(tuple(index), blocks.grid), entries & 1 != 0

        for _, bitmask, enabled in trials:
            reads, writes = make(bitmask, enabled[..., None])
            yield named(reads), named(writes)

    @staticmethod
    def moved(half) -> list[int]:
        """What Pallas moves for a half's steps: a block unless it is that of the step before."""
        return [block for block, _ in itertools.groupby(half.tolist())]

    @pytest.mark.parametrize(
        ("shape", "vocab_size"),
        [((5, 1, 1), 100), ((1, 3, 2), 20000), ((2, 1, 3), 40000)],
        ids=str,
    )
    def test_lists_move_what_has_to_move_and_no_more(self, monkeypatch, shape, vocab_size):
        monkeypatch.setattr(mosaic_tpu, "MAX_BLOCKS_PER_LOOK", 2)
        everything = [self.SKIPPED, self.WRITTEN, self.MASKED]
        trials = [np.full(shape, content) for content in everything]
        trials += [np.random.default_rng(i).choice(everything, size=shape) for i in range(5)]
        lists = self.lists(*(self.operands(contents, vocab_size) for contents in trials))
        for contents, ((reads, own_read), (writes, own_write)) in zip(trials, lists, strict=True):
            contents = contents.reshape(-1)
            steps = np.arange(reads.size).reshape(reads.shape)
            for half, mine in enumerate(steps):
                mine = mine[mine < contents.size]
                to_read = mine[contents[mine] == self.MASKED].tolist() or [mine[0]]
                to_write = mine[contents[mine] != self.SKIPPED].tolist() or [mine[0]]
                assert self.moved(reads[half]) == to_read
                assert self.moved(writes[half]) == to_write
                assert steps[half][own_read[half]].tolist() == to_read
                assert steps[half][own_write[half]].tolist() == to_write

    def test_rows_without_a_grammar_count_as_all_legal(self):
        logits, bitmask, enabled = random_operands((6, 8), 100, np.float32)
        enabled[...] = 1
        enabled[[1, 4]] = 0
        ((_, (writes, _)),) = self.lists((logits, bitmask, enabled))
        assert [self.moved(half) for half in writes] == [[0, 2], [3, 5]]

    @pytest.mark.parametrize("beyond", [0, -1])
    def test_garbage_beyond_rows_and_vocabulary_has_no_say(self, beyond):
        """Rows 5 to 7, words 4 and on, and bits 4 and on of the last word."""
        logits, bitmask, enabled = random_operands((4, 5), 100, np.float32)
        enabled[...] = 1
        bitmask[0], bitmask[1], bitmask[3] = -1, 0, -1
        bitmask[:, :, 3] = (bitmask[:, :, 3] & 0xF) | (beyond & ~0xF)
        (((reads, _), (writes, _)),) = self.lists((logits, bitmask, enabled))
        assert [self.moved(half) for half in reads] == [[0], [2]]
        assert [self.moved(half) for half in writes] == [[1], [2]]

    @pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="its jaxprs do not name kernels so")
    def test_lists_are_made_for_large_logits_only(self):
        def kernels(rows, vocab_size, dtype=np.float32):
            shapes = jax.eval_shape(lambda: random_operands(rows, vocab_size, dtype))
            jaxpr = str(jax.make_jaxpr(mosaic_tpu.apply_token_bitmask)(*shapes))
            return jaxpr.count("name=list_blocks"), jaxpr.count("name=apply_token_bitmask")

        assert kernels((8,), 49152) == (0, 1)
        assert kernels((8, 5), 49152) == (1, 1)
        assert kernels((8,), 128256) == (1, 1)
        assert kernels((8,), 128256, jnp.bfloat16) == (0, 1)
        assert kernels((40000, 2), 32) == (0, 1)


class TestTriton:
    def test_only_words_with_an_illegal_token_of_a_row_with_a_grammar_are_looked_at(self):
        """The three ways of a program, in programs of their own."""
        tokens = 32 * triton.BLOCK_W
        logits, bitmask, _ = random_operands((2,), 3 * tokens, np.float32)
        bitmask[:, : triton.BLOCK_W] = -1
        bitmask[:, triton.BLOCK_W : 2 * triton.BLOCK_W] = 0
        logits[:, : 2 * tokens].view(np.uint32)[...] = TestMosaicTpu.NAN
        operands = logits, bitmask, np.asarray([1, 0], np.int32)
        assert_same_bits(jax.jit(RUNNABLE["triton"])(*operands), reference(*operands))


def part_reference(logits, bitmask, enabled, vocab_size, d2t=None):
    """For logits of all shards side by side: token by token, from the bytes of the mask."""
    tokens = np.arange(logits.shape[-1], dtype=np.int64)
    if d2t is not None:
        tokens = tokens + d2t.astype(np.int64)
    bits = np.unpackbits(bitmask.astype("<i4").view(np.uint8), axis=-1, bitorder="little")
    inside = (tokens >= 0) & (tokens < vocab_size)
    allowed = np.zeros((*logits.shape[:-1], tokens.size), bool)
    allowed[..., inside] = bits[..., tokens[inside]] | (enabled[..., None] == 0)
    return np.where(allowed, logits, np.asarray(masked_logit(logits.dtype), logits.dtype))


class TestPartsOfTheVocabulary:
    """Shards, the pruned vocabulary of a draft model, and shards of that."""

    # (vocabulary of the mask, logits of a shard): full, padded, with shards of padding only
    SIZES = ((1000, 256), (1024, 256), (993, 512), (1000, 1056), (70, 96))

    @staticmethod
    def random_d2t(rng, num_drafts, vocab_size):
        """Ascending targets as in a checkpoint, then some that are nobody's token."""
        targets = np.sort(rng.integers(0, vocab_size, size=num_drafts))
        d2t = targets - np.arange(num_drafts)
        wild = rng.random(num_drafts) < 0.1
        d2t[wild] = rng.choice([-(2**31), 2**31 - 1, -num_drafts - 1, vocab_size], size=wild.sum())
        return d2t.astype(np.int32)

    def operands(self, rows, num_logits, vocab_size, drafts, seed=0):
        rng = np.random.default_rng(seed)
        _, bitmask, enabled = random_operands(rows, vocab_size, np.float32, seed)
        logits = rng.normal(size=(*rows, num_logits)).astype(np.float32)
        d2t = self.random_d2t(rng, num_logits, vocab_size) if drafts else None
        return logits, bitmask, enabled, d2t

    @pytest.mark.thinned(4)
    @pytest.mark.parametrize("drafts", [False, True], ids=["tokens", "drafts"])
    @pytest.mark.parametrize("num_shards", [1, 2, 4])
    @pytest.mark.parametrize(("vocab_size", "shard"), SIZES)
    @pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
    def test_shards_side_by_side(self, vocab_size, shard, num_shards, drafts, traced):
        logits, bitmask, enabled, d2t = self.operands(
            (3, 2), num_shards * shard, vocab_size, drafts
        )
        mask = functools.partial(apply_token_bitmask, vocab_size=vocab_size)
        if traced:
            mask = jax.jit(mask)
        parts = []
        for first in range(0, num_shards * shard, shard):
            mine = slice(first, first + shard)
            place = jnp.int32(first) if traced else first
            parts.append(
                mask(
                    logits[..., mine],
                    bitmask,
                    enabled,
                    first_token=place,
                    d2t=d2t[mine] if drafts else None,
                )
            )
        expected = part_reference(logits, bitmask, enabled, vocab_size, d2t)
        assert_same_bits(np.concatenate(parts, axis=-1), expected)

    @pytest.mark.parametrize("drafts", [False, True], ids=["tokens", "drafts"])
    @pytest.mark.parametrize("num_shards", [1, 2, 4])
    @pytest.mark.parametrize("mapped", ["shard_map", "vmap"])
    def test_in_a_mapped_program(self, num_shards, drafts, mapped):
        """As a sharded LM head calls it; the same program over a mapped axis of one device."""
        if mapped == "shard_map" and jax.device_count() < num_shards:
            pytest.skip(f"{num_shards} CPU devices (jax_num_cpu_devices)")
        vocab_size, shard = 1000, 256
        logits, bitmask, enabled, d2t = self.operands(
            (3, 2), num_shards * shard, vocab_size, drafts
        )
        d2t_or_zeros = d2t if drafts else np.zeros(logits.shape[-1], np.int32)

        def mask(logits, bitmask, enabled, d2t):
            return apply_token_bitmask(
                logits,
                bitmask,
                enabled,
                first_token=jax.lax.axis_index("vocab") * logits.shape[-1],
                vocab_size=vocab_size,
                d2t=d2t if drafts else None,
            )

        if mapped == "shard_map":
            mesh = jax.make_mesh((num_shards,), ("vocab",), (jax.sharding.AxisType.Auto,))
            sharded, everywhere = P(None, None, "vocab"), P()
            masked = jax.shard_map(
                mask,
                mesh=mesh,
                in_specs=(sharded, everywhere, everywhere, P("vocab")),
                out_specs=sharded,
            )
            result = jax.jit(masked)(logits, bitmask, enabled, d2t_or_zeros)
        else:
            masked = jax.vmap(mask, (2, None, None, 0), 2, axis_name="vocab")
            split = logits.reshape(3, 2, num_shards, shard)
            result = jax.jit(masked)(split, bitmask, enabled, d2t_or_zeros.reshape(-1, shard))
            result = result.reshape(logits.shape)
        assert_same_bits(result, part_reference(logits, bitmask, enabled, vocab_size, d2t))

    def test_in_shard_map_on_four_devices(self):
        """The tests above that need more devices than one process here has."""
        test = f"{__file__}::TestPartsOfTheVocabulary::test_in_a_mapped_program"
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                test,
                "-k",
                "shard_map",
            ],
            env=os.environ | {"JAX_NUM_CPU_DEVICES": "4"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert run.returncode == 0, run.stdout
        assert "6 passed" in run.stdout

    def test_drafts_of_the_second_shard_count_from_the_first(self):
        """Draft 33 stands for token 43. Counted in its shard it would be draft 1, token 11."""
        bitmask = np.zeros((1, 2), np.uint32)
        bitmask[0, 1] = 1 << (43 - 32)
        masked = apply_token_bitmask(
            np.zeros((1, 32), np.float32),
            bitmask.view(np.int32),
            np.ones(1, np.int32),
            first_token=32,
            vocab_size=64,
            d2t=np.full(32, 10, np.int32),
        )
        assert np.flatnonzero(np.asarray(masked)[0] == 0).tolist() == [1]

    @pytest.mark.parametrize("first", [-32, -1, 1, 31, 1024, 2**31 - 32, -(2**31)])
    def test_a_traced_place_that_is_no_shard_allows_nothing(self, first):
        masked = jax.jit(functools.partial(apply_token_bitmask, vocab_size=1000))(
            np.zeros((1, 64), np.float32),
            np.full((1, 32), -1, np.int32),
            np.ones(1, np.int32),
            first_token=jnp.int32(first),
        )
        assert np.all(np.asarray(masked) == masked_logit(np.float32))

    def test_tokens_beyond_the_vocabulary_are_not_allowed_whatever_the_mask_says(self):
        masked = apply_token_bitmask(
            np.zeros((1, 96), np.float32),
            np.full((1, 2), -1, np.int32),
            np.ones(1, np.int32),
            vocab_size=40,
        )
        assert np.flatnonzero(np.asarray(masked)[0] == 0).tolist() == list(range(40))

    @settings(deadline=None, max_examples=20)
    @given(
        vocab_size=st.integers(1, 300),
        num_logits=st.integers(1, 150),
        place=st.integers(0, 12),
        drafts=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_any_part(self, vocab_size, num_logits, place, drafts, seed):
        first = 32 * place + (seed % 32 if drafts else 0)
        logits, bitmask, enabled, d2t = self.operands(
            (2,), first + num_logits, vocab_size, drafts, seed
        )
        masked = apply_token_bitmask(
            logits[:, first:],
            bitmask,
            enabled,
            first_token=first,
            vocab_size=vocab_size,
            d2t=d2t[first:] if drafts else None,
        )
        expected = part_reference(logits, bitmask, enabled, vocab_size, d2t)
        assert_same_bits(masked, expected[:, first:])


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
        ("argument", "wrong", "others"),
        [
            ("logits", np.zeros((2, 100), np.int32), {}),
            ("logits", np.zeros((2, 100), np.float64), {}),
            ("logits", np.zeros((), np.float32), {}),
            ("bitmask", np.zeros((2, 4), np.uint32), {}),
            ("bitmask", np.zeros((2, 3), np.int32), {}),
            ("bitmask", np.zeros((2, 5), np.int32), {}),
            ("bitmask", np.zeros((1, 4), np.int32), {}),
            ("bitmask", np.zeros((2, 1, 4), np.int32), {}),
            # The mask is that of the whole vocabulary, neither of the shard nor of the drafts.
            ("bitmask", np.zeros((2, 4), np.int32), {"vocab_size": 200}),
            ("bitmask", np.zeros((2, 4), np.int32), {"vocab_size": 200, "first_token": 96}),
            ("bitmask", np.zeros((2, 8), np.int32), {"vocab_size": 200, "first_token": 96}),
            (
                "bitmask",
                np.zeros((2, 4), np.int32),
                {"vocab_size": 200, "d2t": np.zeros(100, np.int32)},
            ),
            ("enabled", np.zeros(2, bool), {}),
            ("enabled", np.zeros((2, 1), np.int32), {}),
            ("first_token", 33, {"vocab_size": 200}),
            ("first_token", -32, {"vocab_size": 200}),
            ("first_token", 2**31, {"vocab_size": 200}),
            ("first_token", 32.0, {"vocab_size": 200}),
            ("first_token", jnp.zeros(1, jnp.int32), {"vocab_size": 200}),
            ("first_token", jnp.uint32(32), {"vocab_size": 200}),
            ("vocab_size", None, {"first_token": 32}),
            ("vocab_size", None, {"first_token": jnp.int32(0)}),
            ("vocab_size", None, {"d2t": np.zeros(100, np.int32)}),
            ("vocab_size", 0, {}),
            ("vocab_size", 100.0, {}),
            ("d2t", np.zeros(99, np.int32), {"vocab_size": 100}),
            ("d2t", np.zeros((2, 100), np.int32), {"vocab_size": 100}),
            ("d2t", np.zeros(100, np.uint32), {"vocab_size": 100}),
            ("d2t", np.zeros(100, bool), {"vocab_size": 100}),
        ],
    )
    def test_a_wrong_operand_is_named(self, argument, wrong, others):
        logits, bitmask, enabled = random_operands((2,), 100, np.float32)
        operands = {"logits": logits, "bitmask": bitmask, "enabled": enabled, **others}
        with pytest.raises(ValueError, match=f"^{argument}: "):
            apply_token_bitmask(**{**operands, argument: wrong})

    def test_an_unknown_implementation_is_named(self):
        with pytest.raises(ValueError, match=r"^implementation: must be one of xla, mosaic_tpu"):
            apply_token_bitmask(*random_operands((2,), 100, np.float32), implementation="cuda")

    def test_an_implementation_that_lacks_the_dtype_is_named(self):
        message = r"^implementation: 'mosaic_tpu' does not take float16 logits$"
        with pytest.raises(ValueError, match=message):
            apply_token_bitmask(
                *random_operands((2,), 100, np.float16), implementation="mosaic_tpu"
            )
