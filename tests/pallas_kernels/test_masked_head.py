"""One set of tests for every implementation of `masked_head`.

Hidden states and heads are small integers, so that products and sums are exact in every dtype and in
any order: tokens must come out equal, ties included.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.int8_matmul import quantize
from pallas_kernels.masked_head import (
    GivenLogits,
    SoftCapped,
    masked_head,
    mosaic_tpu,
    project,
    sample_active,
    triton,
    xla,
)
from pallas_kernels.masked_head.tiles import active_tiles
from pallas_kernels.masked_sample import Rows, arithmetic
from pallas_kernels.masked_sample import xla as sampler

MODULES = {"xla": xla, "mosaic_tpu": mosaic_tpu, "triton": triton}
# Compiling an interpreted kernel takes far longer than running it.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


@functools.cache
def runnable(name: str):
    """The compiled implementation, one for all tests."""
    options = {} if name == "xla" else {"interpret": True}
    run = functools.partial(MODULES[name].sample_active, **options)
    return jax.jit(run, compiler_options=FAST_COMPILE)


@functools.cache
def noisy_scores(vocab_size: int):
    """float32 scores `[B,N,V]` of exact logits, without any loop, tile or mask."""
    tokens = jnp.arange(vocab_size, dtype=jnp.int32)

    def scores(logits, positions, rows):
        least = jnp.full((*positions.shape, 1), arithmetic.LEAST_KEY, jnp.int32)
        return sampler.random_score(logits, tokens, least, positions=positions, rows=rows)

    return jax.jit(scores)


@dataclasses.dataclass
class Operands:
    hidden: np.ndarray
    head: np.ndarray
    allowed: np.ndarray  # bool [B,N,V], what the bitmask says
    enabled: np.ndarray
    positions: np.ndarray
    rows: Rows

    @classmethod
    def make(cls, allowed, dtype=np.float32, features=16, seed=0) -> "Operands":
        rng = np.random.default_rng(seed)
        batch, queries, vocab_size = allowed.shape
        # Logits spread by dozens: at these temperatures, the noise decides.
        temperature = np.where(np.arange(batch) % 3 == 1, 0, 20.0 + 5 * np.arange(batch))
        return cls(
            rng.integers(-2, 3, size=(batch, queries, features)).astype(dtype),
            rng.integers(-8, 9, size=(vocab_size, features)).astype(dtype),
            allowed,
            np.ones((batch, queries), np.int32),
            rng.integers(0, 5000, size=(batch, queries), dtype=np.int32),
            Rows(
                temperature.astype(np.float32),
                np.zeros(batch, np.int32),
                np.ones(batch, np.float32),
                np.zeros(batch, np.float32),
                rng.integers(0, 2**32, size=batch, dtype=np.uint32),
            ),
        )

    @property
    def args(self):
        bits = np.packbits(self.allowed, axis=-1, bitorder="little")
        bits = np.pad(bits, ((0, 0), (0, 0), (0, -bits.shape[-1] % 4)))
        bitmask = bits.view("<i4").astype(np.int32)
        return self.hidden, self.head, bitmask, self.enabled, self.positions, self.rows

    @property
    def legal(self) -> np.ndarray:
        return self.allowed | (self.enabled[..., None] == 0)

    @property
    def logits(self) -> np.ndarray:
        exact = np.einsum("bnd,vd->bnv", self.hidden.astype(float), self.head.astype(float))
        return exact.astype(np.float32)

    def tokens(self, logits: np.ndarray | None = None) -> np.ndarray:
        """What the masked argmax of exact logits, or of these and the noise, is in NumPy."""
        logits = self.logits if logits is None else logits
        noisy = noisy_scores(logits.shape[-1])(logits, self.positions, self.rows)
        is_random = self.rows.temperature[:, None, None] > 0
        scores = np.where(self.legal, np.where(is_random, noisy, logits), -np.inf)
        return np.where(self.legal.any(axis=-1), scores.argmax(axis=-1), 0)

    def active(self, tile: int) -> np.ndarray:
        """Which tiles have a legal token."""
        any_row = self.legal.any(axis=(0, 1))
        return np.asarray([any_row[i : i + tile].any() for i in range(0, any_row.size, tile)])

    def tile(self, name: str) -> int:
        if name == "mosaic_tpu":
            return mosaic_tpu.Blocks.of(self.hidden, self.head).tile
        return {"xla": xla.TILE, "triton": triton.TILE}[name]

    def rows_read(self, name: str) -> int:
        vocab_size = len(self.head)
        active = self.active(self.tile(name))
        if name == "xla" and (
            vocab_size % 32 or vocab_size < xla.MIN_VOCABULARY or 2 * active.sum() > active.size
        ):
            return vocab_size
        return min(active.sum() * self.tile(name), vocab_size)

    def check(self, name: str) -> None:
        tokens, rows_read = runnable(name)(*self.args)
        assert tokens.dtype == rows_read.dtype == jnp.int32
        np.testing.assert_array_equal(tokens, self.tokens())
        assert rows_read == self.rows_read(name)


# Of every tile size more than one and a cut one.
VOCAB_SIZE = 4096 + 32
SHAPE = (3, 2, VOCAB_SIZE)


def nothing() -> np.ndarray:
    return np.zeros(SHAPE, bool)


def some(*tokens) -> np.ndarray:
    """The first rows with a legal token each, the others with none."""
    allowed = nothing()
    for row, token in enumerate(tokens):
        allowed.reshape(-1, VOCAB_SIZE)[row, token] = True
    return allowed


def most(share: float = 0.5) -> np.ndarray:
    return np.random.default_rng(1).random(SHAPE) < share


every_implementation = pytest.mark.parametrize("name", MODULES)


class TestEveryImplementation:
    @pytest.mark.parametrize(
        "allowed",
        [
            pytest.param(nothing(), id="none"),
            pytest.param(some(5), id="first tile"),
            pytest.param(some(VOCAB_SIZE - 1), id="cut tile"),
            pytest.param(some(100, 101, 102, 103, 104, 120), id="one tile for all"),
            pytest.param(some(100, 600, 1111, 2047, 2048, 4000), id="a tile for each"),
            pytest.param(most(0.0008), id="few"),
            pytest.param(most(), id="all tiles"),
            pytest.param(np.ones(SHAPE, bool), id="all tokens"),
        ],
    )
    @every_implementation
    def test_tokens_and_rows_read(self, name, allowed):
        Operands.make(allowed).check(name)

    @every_implementation
    def test_the_union_of_the_rows_is_read(self, name):
        tokens = (100, 1111, 3000)
        read = [Operands.make(some(token)).rows_read(name) for token in tokens]
        together = Operands.make(some(*tokens))
        together.check(name)
        assert together.rows_read(name) == sum(read)

    @every_implementation
    def test_a_row_without_a_grammar_needs_all_tiles(self, name):
        operands = Operands.make(some(100))
        operands.enabled[1, 1] = 0
        operands.check(name)
        assert operands.rows_read(name) == VOCAB_SIZE

    @every_implementation
    def test_idle_rows_need_none(self, name):
        operands = Operands.make(nothing())
        operands.check(name)
        assert operands.rows_read(name) == 0
        busy = Operands.make(some(100))
        busy.check(name)
        assert 0 < busy.rows_read(name) <= 512

    @pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf], ids=str)
    @every_implementation
    def test_what_lies_in_other_tiles_does_not_matter(self, name, poison):
        operands = Operands.make(some(100, 600, 601, 2048))
        expected = operands.tokens()
        active = np.repeat(operands.active(operands.tile(name)), operands.tile(name))[:VOCAB_SIZE]
        operands.head[~active] = poison
        tokens, _ = runnable(name)(*operands.args)
        np.testing.assert_array_equal(tokens, expected)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
    @every_implementation
    def test_a_legal_token_is_sampled_whatever_the_model_says(self, name, value):
        operands = Operands.make(some(100, 600, 601, 2048, 4100, 4127))
        operands.hidden[...] = value
        tokens, _ = runnable(name)(*operands.args)
        np.testing.assert_array_equal(tokens.reshape(-1), [100, 600, 601, 2048, 4100, 4127])

    @every_implementation
    def test_ties_go_to_the_lowest_token(self, name):
        operands = Operands.make(some())
        # The next token, one in the same lane, one in the same place of another tile, the last.
        operands.allowed[:, :, [100, 101, 228, 612, 4127]] = True
        operands.head[...] = 1
        operands.rows.temperature[...] = 0
        tokens, _ = runnable(name)(*operands.args)
        np.testing.assert_array_equal(tokens, np.full((3, 2), 100))

    @pytest.mark.thinned(3)
    @pytest.mark.parametrize(
        ("name", "vocab_size", "queries", "features", "dtype"),
        [
            (name, *shape, dtype)
            for name, module in MODULES.items()
            for *shape, dtype in (
                (33, 1, 16, np.float32),
                (1000, 5, 128, jnp.bfloat16),
                (2048, 1, 24, np.float32),
                (8192, 5, 16, jnp.bfloat16),
                (2080, 1, 136, np.float16),
            )
            if not module.unsupported(dtype, (2, 1, 16), 100)
        ],
    )
    def test_other_shapes(self, name, vocab_size, queries, features, dtype):
        for density in (0.3, 0.001):
            rng = np.random.default_rng(vocab_size)
            allowed = rng.random((2, queries, vocab_size)) < density
            Operands.make(allowed, dtype, features).check(name)

    @every_implementation
    def test_bits_beyond_the_vocabulary_mean_nothing(self, name):
        allowed = np.zeros((2, 5, 1000), bool)
        allowed[1, 4, 999] = True  # so that the tile is visited
        operands = Operands.make(allowed, jnp.bfloat16, 128)
        hidden, head, bitmask, *rest = operands.args
        bitmask[..., -1] |= ~0xFF
        tokens, rows_read = runnable(name)(hidden, head, bitmask, *rest)
        np.testing.assert_array_equal(tokens, np.where(allowed.any(axis=-1), 999, 0))
        assert rows_read == operands.rows_read(name)

    @every_implementation
    def test_filters_are_left_to_the_api(self, name):
        operands = Operands.make(most(0.002))
        operands.rows.top_k[:] = 1
        operands.rows.min_p[:] = 1.0
        operands.check(name)

    def test_filters(self):
        """One row that filters makes the batch take the dense way; its filters are obeyed."""
        run = jax.jit(masked_head)
        operands = Operands.make(most(0.002))
        tokens, rows_read = run(*operands.args)
        np.testing.assert_array_equal(tokens, operands.tokens())
        assert rows_read == operands.rows_read("xla")
        changes = []
        for filters in ({"top_k": 1}, {"top_p": 0.4}, {"min_p": 0.9}):
            for field, value in filters.items():
                getattr(operands.rows, field)[2] = value
                rest = operands.args[2:]
                expected = jax.jit(sampler.masked_sample)(operands.logits, *rest)
                tokens, rows_read = run(*operands.args)
                np.testing.assert_array_equal(tokens, expected)
                assert rows_read == VOCAB_SIZE
                changes.append(np.any(np.asarray(tokens) != operands.tokens()))
                getattr(operands.rows, field)[2] = field == "top_p"
        assert any(changes)  # that there was something to obey

    def test_filters_of_a_greedy_row_change_nothing(self):
        operands = Operands.make(most(0.002))
        operands.rows.top_k[1] = 5  # of the greedy one
        tokens, rows_read = jax.jit(masked_head)(*operands.args)
        np.testing.assert_array_equal(tokens, operands.tokens())
        assert rows_read == operands.rows_read("xla")

    @pytest.mark.parametrize(("name", "limit"), [("mosaic_tpu", 16), ("triton", 32)])
    def test_more_rows_than_one_block_takes(self, monkeypatch, name, limit):
        monkeypatch.setattr(MODULES[name], "MAX_ROWS", limit)
        allowed = np.random.default_rng(0).random((7, 10, 1100)) < 0.001
        operands = Operands.make(allowed)
        run = functools.partial(MODULES[name].sample_active, interpret=True)
        tokens, rows_read = jax.jit(run, compiler_options=FAST_COMPILE)(*operands.args)
        np.testing.assert_array_equal(tokens, operands.tokens())
        assert rows_read == operands.rows_read(name)

    @pytest.mark.parametrize(
        ("name", "constant", "value"),
        [("mosaic_tpu", "FEATURES", 16), ("triton", "STEP_BYTES", 64)],
    )
    def test_features_in_several_pieces(self, monkeypatch, name, constant, value):
        monkeypatch.setattr(MODULES[name], constant, value)
        allowed = np.random.default_rng(0).random((2, 1, 200)) < 0.1
        operands = Operands.make(allowed, features=40)
        run = functools.partial(MODULES[name].sample_active, interpret=True)
        tokens, _ = jax.jit(run, compiler_options=FAST_COMPILE)(*operands.args)
        np.testing.assert_array_equal(tokens, operands.tokens())

    @pytest.mark.parametrize("name", ["mosaic_tpu", "triton"])
    def test_float32_is_multiplied_as_float32(self, name):
        """Accelerators would otherwise round it to bfloat16 or TensorFloat-32."""
        for dtype, is_highest in ((np.float32, True), (jnp.bfloat16, False)):
            operands = Operands.make(np.ones((1, 1, 64), bool), dtype)
            run = functools.partial(MODULES[name].sample_active, interpret=True)
            assert ("HIGHEST" in str(jax.make_jaxpr(run)(*operands.args))) == is_highest


class TestMosaicTpu:
    @pytest.fixture(autouse=True)
    def _reset_interpreter(self):
        yield
        pltpu.reset_tpu_interpret_mode_state()

    def test_only_listed_tiles_count(self, monkeypatch):
        """A list that lacks a tile hides the tile's tokens: there is no other way to them."""
        operands = Operands.make(some(100, 600))

        def without_the_last(words, tile):
            indices, count = active_tiles(words, tile)
            return jnp.where(indices == 1, 0, indices), count - 1

        monkeypatch.setattr(mosaic_tpu, "active_tiles", without_the_last)
        run = functools.partial(mosaic_tpu.sample_active, interpret=True)
        tokens, rows_read = jax.jit(run, compiler_options=FAST_COMPILE)(*operands.args)
        assert np.asarray(tokens).reshape(-1).tolist() == [100, 0, 0, 0, 0, 0]
        assert rows_read == 512

    @pytest.mark.parametrize(
        ("tokens", "tiles"),
        [
            ((), [0]),
            ((5,), [0]),
            ((700, 30000), [1, 58]),
            ((700, 701, 1023, 30000), [1, 58]),
            (range(0, 32768, 1024), list(range(0, 64, 2))),
            (range(0, 32768, 512), list(range(64))),
        ],
    )
    def test_the_pipeline_fetches_active_tiles_once(self, tokens, tiles):
        """Pallas fetches a step's block if the step before had another one."""
        features = 64
        allowed = np.zeros((1, 1, 64 * 512), bool)
        allowed[..., list(tokens)] = True
        operands = Operands.make(allowed, features=features)
        blocks = mosaic_tpu.Blocks.of(operands.hidden, operands.head)
        assert blocks.tile == 512
        words = sampler.effective_words(*map(jnp.asarray, operands.args[2:4]), allowed.shape[-1])
        indices, count = active_tiles(words, blocks.tile)
        steps = range(max(int(count), 1))
        places = [blocks.tile_of_step(0, step, np.asarray(indices)) for step in steps]
        assert [(int(tile), int(zero)) for tile, zero in places] == [(tile, 0) for tile in tiles]
        fetched = sum(1 for _ in itertools.groupby(places)) * blocks.tile * features * 4
        if count == 2:
            assert fetched <= 0.05 * operands.head.nbytes
        # Steps beyond the list, were there any, would fetch nothing.
        assert set(np.asarray(indices)[max(int(count), 1) :]) <= {tiles[-1]}

    def test_the_grid_is_as_long_as_the_list(self):
        operands = Operands.make(some(5))
        run = functools.partial(mosaic_tpu.sample_active, interpret=True)
        (call,) = pallas_calls(jax.make_jaxpr(run)(*operands.args).jaxpr)
        assert call.params["grid_mapping"].num_dynamic_grid_bounds == 1
        assert call.params["grid_mapping"].grid[0] == 1

    @pytest.mark.parametrize(
        ("dtype", "batch"), [(np.float32, 8), (jnp.bfloat16, 16)], ids=["float32", "bfloat16"]
    )
    def test_under_tpu_memory_semantics_without_races(self, capsys, dtype, batch):
        strict = pltpu.InterpretParams(
            detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
        )
        run = jax.jit(
            functools.partial(mosaic_tpu.sample_active, interpret=strict),
            compiler_options=FAST_COMPILE,
        )
        for tokens in ((), (700,), (3, 4000), (3, 700, 1500)):
            allowed = np.zeros((batch, 1, mosaic_tpu.GROUP), bool)
            allowed[range(len(tokens)), 0, tokens] = True
            operands = Operands.make(allowed, dtype)
            sampled, rows_read = run(*operands.args)
            np.testing.assert_array_equal(sampled, operands.tokens())
            assert rows_read == 512 * len(tokens)
        assert "RACE" not in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("features", "dtype", "tile"),
        [(576, jnp.bfloat16, 512), (2048, jnp.bfloat16, 256), (4096, jnp.bfloat16, 128),
         (2048, np.float32, 128), (8192, np.float32, 128)],
    )  # fmt: skip
    def test_tiles_of_a_megabyte(self, features, dtype, tile):
        head = jax.ShapeDtypeStruct((1000, features), dtype)
        blocks = mosaic_tpu.Blocks.of(jax.ShapeDtypeStruct((8, 1, features), dtype), head)
        assert (blocks.tile, blocks.num_blocks) == (tile, 1)

    def test_refuses_what_it_cannot_take(self):
        assert mosaic_tpu.unsupported(jnp.float16, (1, 1, 64), 100) == "a head of float16"
        assert mosaic_tpu.unsupported(jnp.bfloat16, (1, 1, 8193), 100) == "more than 8192 features"
        assert mosaic_tpu.unsupported(jnp.bfloat16, (1, 1, 8192), 100) is None


def pallas_calls(jaxpr):
    """The calls of kernels, in nested programs, too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from pallas_calls(value.jaxpr)


class TestTriton:
    def test_only_programs_with_a_legal_token_touch_the_head(self):
        operands = Operands.make(some(5))
        run = functools.partial(triton.sample_active, interpret=True)
        (call,) = pallas_calls(jax.make_jaxpr(run)(*operands.args).jaxpr)
        kernel = call.params["jaxpr"]
        words, hidden, head = kernel.invars[3:6]
        assert head.aval.shape == operands.head.shape
        (cond,) = uses(kernel, head)
        assert cond.primitive.name == "cond"
        predicate, *others = cond.invars
        assert words in sources(kernel, predicate)
        assert hidden not in sources(kernel, predicate)
        place = others.index(head)
        if_nothing, if_anything = (
            uses(branch.jaxpr, branch.jaxpr.invars[place]) for branch in cond.params["branches"]
        )
        assert if_nothing == []
        assert if_anything

    def test_rows_fill_powers_of_two(self):
        """As tensor cores and Triton want them. 20 rows: one program a tile, of 32 rows."""
        allowed = np.random.default_rng(0).random((4, 5, 200)) < 0.1
        Operands.make(allowed).check("triton")


def uses(jaxpr, variable) -> list:
    """The operations that take the variable."""
    return [e for e in jaxpr.eqns if any(v is variable for v in e.invars)]


def sources(jaxpr, variable) -> set:
    """What the variable is computed from, step by step back to the program's inputs."""
    found = {variable}
    for equation in reversed(jaxpr.eqns):
        if not found.isdisjoint(equation.outvars):
            found.update(v for v in equation.invars if not hasattr(v, "val"))  # no literals
    return found


class TestActiveTiles:
    @settings(deadline=None, max_examples=50)
    @given(
        shape=st.sampled_from([(1, 1, 1), (2, 3, 7), (1, 2, 40)]),
        tile=st.sampled_from([32, 64, 512]),
        words=st.lists(
            st.tuples(st.integers(0, 2**20), st.sampled_from([1, -1, -(2**31)])), max_size=8
        ),
    )
    def test_as_numpy_has_it(self, shape, tile, words):
        mask = np.zeros(shape, np.int32)
        for place, word in words:
            mask.reshape(-1)[place % mask.size] = word
        any_row = np.bitwise_or.reduce(mask, axis=(0, 1))
        starts = range(0, any_row.size, tile // 32)
        (active,) = np.nonzero([any_row[i : i + tile // 32].any() for i in starts])
        indices, count = jax.jit(active_tiles, static_argnums=1)(mask, tile)
        assert indices.dtype == count.dtype == jnp.int32
        number = -(-shape[-1] * 32 // tile)
        last = active[-1:].tolist() or [0]
        assert count == active.size
        assert indices.tolist() == active.tolist() + last * (number - active.size)


CAP = 30.0


def capped(logits: np.ndarray) -> np.ndarray:
    return (CAP * np.tanh(logits.astype(float) / CAP)).astype(np.float32)


class TestSoftCapped:
    @pytest.mark.parametrize("form", [jnp.asarray, quantize], ids=["array", "int8"])
    def test_logits(self, form):
        operands = Operands.make(np.zeros((2, 3, 100), bool), features=8)
        head = form(jnp.asarray(operands.head))
        np.testing.assert_allclose(
            project(operands.hidden, SoftCapped(head, CAP)),
            capped(np.asarray(project(operands.hidden, head))),
            rtol=1e-6,
        )

    def test_tokens_and_rows_read(self):
        """Noise is put to the capped logits, and tiles are skipped as ever."""
        run = jax.jit(sample_active)
        changes = []
        for allowed in (some(5, 600, VOCAB_SIZE - 1), most(0.002), most()):
            operands = Operands.make(allowed)
            hidden, head, *rest = operands.args
            tokens, rows_read = run(hidden, SoftCapped(head, CAP), *rest)
            np.testing.assert_array_equal(tokens, operands.tokens(capped(operands.logits)))
            assert rows_read == operands.rows_read("xla")
            changes.append(np.any(np.asarray(tokens) != operands.tokens()))
        assert any(changes)  # by the cap

    def test_an_int8_head_in_tiles(self):
        operands = Operands.make(most(0.002))
        hidden, head, *rest = operands.args
        head = SoftCapped(quantize(jnp.asarray(head)), CAP)
        tokens, rows_read = jax.jit(masked_head)(hidden, head, *rest)
        np.testing.assert_array_equal(tokens, operands.tokens(np.asarray(project(hidden, head))))
        assert rows_read == operands.rows_read("xla") < VOCAB_SIZE

    def test_filters(self):
        """They count the probabilities of the capped logits."""
        run, changes = jax.jit(masked_head), []
        operands = Operands.make(most(0.1))
        hidden, head, *rest = operands.args
        for filters in ({"top_p": 0.4}, {"min_p": 0.9}):
            rows = operands.rows._replace(
                **{k: np.full(3, v, np.float32) for k, v in filters.items()}
            )
            operands.rows = rows
            expected, uncapped = (
                jax.jit(sampler.masked_sample)(logits, *rest[:-1], rows)
                for logits in (capped(operands.logits), operands.logits)
            )
            tokens, rows_read = run(hidden, SoftCapped(head, CAP), *rest[:-1], rows)
            np.testing.assert_array_equal(tokens, expected)
            assert rows_read == VOCAB_SIZE
            changes.append(np.any(expected != uncapped))
        assert any(changes)

    @pytest.mark.parametrize("cap", [0.0, -1.0, float("nan")])
    def test_a_cap_that_is_none(self, cap):
        with pytest.raises(ValueError, match=f"^cap: must be above 0, got {cap}"):
            SoftCapped(jnp.zeros((4, 4)), cap)


class TestGivenLogits:
    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
    def test_tokens(self, dtype):
        operands = Operands.make(most(0.002))
        logits = operands.logits.astype(dtype)
        rest = operands.args[2:]
        expected = operands.tokens(logits.astype(np.float32))
        for sample in (masked_head, sample_active):
            tokens, rows_read = jax.jit(sample)(logits, GivenLogits(VOCAB_SIZE, dtype), *rest)
            np.testing.assert_array_equal(tokens, expected)
            assert rows_read == VOCAB_SIZE

    def test_filters(self):
        operands = Operands.make(most(0.1))
        operands.rows.top_p[:] = 0.4
        rest = operands.args[2:]
        head = GivenLogits(VOCAB_SIZE)
        expected = jax.jit(sampler.masked_sample)(operands.logits, *rest)
        assert np.any(expected != operands.tokens())
        tokens, _ = jax.jit(masked_head)(operands.logits, head, *rest)
        np.testing.assert_array_equal(tokens, expected)
        tokens, _ = jax.jit(sample_active)(operands.logits, head, *rest)
        np.testing.assert_array_equal(tokens, operands.tokens())

    def test_capped(self):
        operands = Operands.make(some(5, 600, VOCAB_SIZE - 1))
        head = SoftCapped(GivenLogits(VOCAB_SIZE), CAP)
        tokens, _ = jax.jit(masked_head)(operands.logits, head, *operands.args[2:])
        np.testing.assert_array_equal(tokens, operands.tokens(capped(operands.logits)))
        np.testing.assert_allclose(
            project(operands.logits, head), capped(operands.logits), rtol=1e-6
        )

    @pytest.mark.parametrize("head", [GivenLogits(99), GivenLogits(100, jnp.bfloat16)])
    def test_another_width_or_dtype(self, head):
        operands = Operands.make(np.zeros((2, 3, 100), bool))
        with pytest.raises(ValueError, match=r"^head: must be float32 \[V,100\]"):
            masked_head(operands.logits, head, *operands.args[2:])


class TestImplementationOfOtherHeads:
    """XLA multiplies them, whichever known implementation is named."""

    HEADS = {  # noqa: RUF012
        "int8": lambda head: quantize(jnp.asarray(head)),
        "capped": lambda head: SoftCapped(jnp.asarray(head), CAP),
        "given": lambda head: GivenLogits(len(head)),
        "capped given": lambda head: SoftCapped(GivenLogits(len(head)), CAP),
    }

    @pytest.mark.parametrize("sample", [masked_head, sample_active])
    @pytest.mark.parametrize("form", HEADS)
    def test_by_name(self, form, sample):
        operands = Operands.make(np.ones((1, 1, 16), bool))
        hidden, head, *rest = operands.args
        head = self.HEADS[form](head)
        with pytest.raises(ValueError, match=r"^implementation: must be one of .*'nonsense'"):
            sample(hidden, head, *rest, implementation="nonsense")
        jax.eval_shape(functools.partial(sample, implementation="xla"), hidden, head, *rest)

    def test_another_kernel_is_replaced(self):
        operands = Operands.make(np.ones((1, 1, 16), bool))
        hidden, head, *rest = operands.args
        for form in ("int8", "capped", "capped given"):
            run = functools.partial(sample_active, implementation="triton")
            program = jax.make_jaxpr(run)(hidden, self.HEADS[form](head), *rest)
            assert not [*pallas_calls(program.jaxpr)]


class TestApi:
    def test_default_on_a_cpu(self):
        operands = Operands.make(some(100, 600))
        sample = masked_head(*map(jnp.asarray, operands.args[:-1]), operands.rows)
        np.testing.assert_array_equal(sample.tokens, operands.tokens())
        assert sample.rows_read == operands.rows_read("xla")

    @pytest.mark.parametrize(
        ("argument", "wrong"),
        [
            ("hidden", np.zeros((2, 3, 8), np.int32)),
            ("hidden", np.zeros((2, 8), np.float32)),
            ("hidden", np.zeros((3, 2, 8), np.float32)),
            ("head", np.zeros((100, 8), jnp.bfloat16)),
            ("head", np.zeros((100, 9), np.float32)),
            ("head", np.zeros((100, 1, 8), np.float32)),
            ("bitmask", np.zeros((2, 3, 4), np.uint32)),
            ("bitmask", np.zeros((2, 3, 3), np.int32)),
            ("enabled", np.zeros((2, 3), bool)),
            ("enabled", np.zeros((2, 1), np.int32)),
            ("positions", np.zeros((2, 3), np.uint32)),
            ("implementation", "cuda"),
        ],
    )
    def test_a_wrong_operand_is_named(self, argument, wrong):
        names = ("hidden", "head", "bitmask", "enabled", "positions", "rows")
        operands = Operands.make(np.zeros((2, 3, 100), bool), features=8)
        arguments = {**dict(zip(names, operands.args, strict=True)), argument: wrong}
        with pytest.raises(ValueError, match=f"^{argument}: "):
            masked_head(**arguments)

    @pytest.mark.parametrize("field", Rows._fields)
    def test_a_wrong_parameter_of_the_rows_is_named(self, field):
        operands = Operands.make(np.zeros((2, 3, 100), bool), features=8)
        *args, rows = operands.args
        with pytest.raises(ValueError, match=rf"^rows\.{field}: "):
            masked_head(*args, rows._replace(**{field: np.zeros(3, np.float32)}))

    def test_an_implementation_that_lacks_the_dtype_is_named(self):
        operands = Operands.make(np.zeros((2, 3, 100), bool), np.float16)
        message = r"^implementation: 'mosaic_tpu' does not take a head of float16$"
        with pytest.raises(ValueError, match=message):
            masked_head(*operands.args, implementation="mosaic_tpu")
