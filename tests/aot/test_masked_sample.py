"""The sampling kernels pass the real compilers, and read the logits once without a copy or a mask."""

import warnings

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.bitmask import num_words
from pallas_kernels.masked_sample import Rows, arithmetic, masked_sample, mosaic_tpu
from tests.aot.hlo import Program
from tests.aot.topology import GENERATIONS, Generation, compile_for

pytestmark = pytest.mark.aot

# SmolLM2, Llama 3, Qwen 3, Gemma 3
VOCAB_SIZES = (49152, 128256, 151936, 262208)
DTYPES = (jnp.float32, jnp.bfloat16)

# The smallest and the largest of each: keys and weights of the last do not find room on v4.
ALWAYS = (("v5e", jnp.float32, 49152), ("v4", jnp.bfloat16, 262208))
every_case = pytest.mark.parametrize(
    ("generation", "dtype", "vocab_size"),
    [
        pytest.param(
            *(case := (generation, dtype, vocab_size)),
            marks=[] if case in ALWAYS else [pytest.mark.full],
            id=f"{generation}-{dtype.__name__}-{vocab_size}",
        )
        for generation in GENERATIONS
        for dtype in DTYPES
        for vocab_size in VOCAB_SIZES
    ],
)


def _operands(queries, vocab_size, dtype):
    batch = queries[:1]
    return (
        jax.ShapeDtypeStruct((*queries, vocab_size), dtype),
        jax.ShapeDtypeStruct((*queries, num_words(vocab_size)), jnp.int32),
        jax.ShapeDtypeStruct(queries, jnp.int32),
        jax.ShapeDtypeStruct(queries, jnp.int32),
        Rows(
            temperature=jax.ShapeDtypeStruct(batch, jnp.float32),
            top_k=jax.ShapeDtypeStruct(batch, jnp.int32),
            top_p=jax.ShapeDtypeStruct(batch, jnp.float32),
            min_p=jax.ShapeDtypeStruct(batch, jnp.float32),
            seed=jax.ShapeDtypeStruct(batch, jnp.uint32),
        ),
    )


# A program's operands [B,1,V] would lie in tiles of one row, in which no LM head leaves its logits.
def _of_flat_operands(function):
    def flat(logits, bitmask, enabled, positions, rows):
        queries = (x[:, None] for x in (logits, bitmask, enabled, positions))
        return function(*queries, rows)

    return flat


def _unfiltered(logits, bitmask, enabled, positions, rows):
    """What runs where no row filters. XLA's cost analysis adds up both branches of the condition."""
    everything = jnp.full(positions.shape, arithmetic.LEAST_KEY, jnp.int32)
    return mosaic_tpu.sample(logits, bitmask, enabled, positions, rows, everything)


def _whole(*operands):
    return masked_sample(*operands, implementation="mosaic_tpu")


def _assert_nothing_of_the_logits_size(program: Program, num_logits: int) -> None:
    for instruction in program.buffers:
        for array in instruction.arrays:
            assert array.size < num_logits, f"{instruction.opcode} holds {array}"


@every_case
def test_reads_the_logits_once_and_writes_tokens(generation: Generation, dtype, vocab_size):
    operands = _operands((8,), vocab_size, dtype)
    logits, bitmask, *_ = operands
    compiled = compile_for(generation, _of_flat_operands(_unfiltered), *operands)
    once = logits.size * logits.dtype.itemsize + 4 * bitmask.size
    cost = compiled.cost_analysis()
    assert cost is not None
    assert once <= cost["bytes accessed"] <= 1.1 * once
    assert compiled.memory_analysis().temp_size_in_bytes < bitmask.size
    _assert_nothing_of_the_logits_size(Program.of(compiled), logits.size)


@every_case
def test_filters_read_the_logits_once_more(generation: Generation, dtype, vocab_size):
    operands = _operands((8,), vocab_size, dtype)
    logits, bitmask, *_ = operands
    compiled = compile_for(generation, _of_flat_operands(_whole), *operands)
    once = logits.size * logits.dtype.itemsize + 4 * bitmask.size
    cost = compiled.cost_analysis()
    assert cost is not None
    assert cost["bytes accessed"] <= 2.4 * once
    _assert_nothing_of_the_logits_size(Program.of(compiled), logits.size)


@pytest.mark.parametrize(
    "queries", [(8, 1), (8, 5), *(pytest.param(q, marks=pytest.mark.full) for q in ((2, 1), (3, 9)))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "generation", ["v5e", *(pytest.param(g, marks=pytest.mark.full) for g in ("v4", "v6e"))]
)
def test_takes_the_logits_as_the_head_lays_them_out(generation: Generation, queries):
    vocab_size, features = 49152, 576
    logits, *rest = _operands(queries, vocab_size, jnp.float32)
    hidden = jax.ShapeDtypeStruct((*queries, features), jnp.bfloat16)
    embedding = jax.ShapeDtypeStruct((vocab_size, features), jnp.bfloat16)

    def step(hidden, embedding, *rest):
        logits = jnp.einsum("bnd,vd->bnv", hidden, embedding, preferred_element_type=jnp.float32)
        return _whole(logits, *rest)

    program = Program.of(compile_for(generation, step, hidden, embedding, *rest))
    large = [
        instruction
        for instruction in program.buffers
        if any(a.dtype == "f32" and a.size >= logits.size for a in instruction.arrays)
    ]
    # The head's matmul writes them: no copy, no reshape, nothing else of their size.
    assert [instruction.opcode for instruction in large] == ["fusion"]


@pytest.mark.parametrize("vocab_size", [1000, pytest.param(2**19 - 1, marks=pytest.mark.full)])
def test_other_vocabularies_compile(vocab_size):
    """The largest one's keys find no room, so XLA filters."""
    compile_for("v5e", _whole, *_operands((3, 5), vocab_size, jnp.float32))


def test_compiles_where_64_bit_types_are_enabled():
    with jax.enable_x64(True):
        compile_for("v5e", _whole, *_operands((8, 5), 49152, jnp.float32))


def test_filters_with_all_the_vmem_of_later_generations(monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "MIN_FILTER_BYTES", mosaic_tpu.MAX_FILTER_BYTES)
    compile_for("v5e", _whole, *_operands((8, 5), 262208, jnp.float32))


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="from JAX 0.11 on, Triton lowers on a GPU only"
)
@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__
)
def test_triton_kernel_lowers_for_cuda(dtype):
    def sample(*operands):
        return masked_sample(*operands, implementation="triton")

    traced = jax.jit(sample).trace(*_operands((8, 1), 151936, dtype))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?i).*triton.*", DeprecationWarning)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text
