"""The fused LM head passes the real compilers: no logits in memory, no second copy of the head."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout

from pallas_kernels.bitmask.packed import num_words
from pallas_kernels.masked_head import masked_head, mosaic_tpu, triton
from pallas_kernels.masked_sample import Rows
from tests.aot.hlo import Program
from tests.aot.topology import GENERATIONS, Generation, abstract, compile_for, tpu_device

pytestmark = pytest.mark.aot

DTYPES = (jnp.bfloat16, jnp.float32)
VOCAB_SIZES = (49152, 128256, 262144)  # SmolLM2, Llama 3, Gemma 3
FEATURES = (576, 640, 2048, 4096)

CI_SIZE = {
    ("v4", jnp.float32, 49152, 576),
    ("v5e", jnp.bfloat16, 49152, 576),
    ("v5e", jnp.bfloat16, 128256, 2048),
    ("v6e", jnp.bfloat16, 262144, 640),
    ("v6e", jnp.float32, 128256, 4096),
}
MATRIX = [
    pytest.param(
        *case,
        marks=() if case in CI_SIZE else pytest.mark.full,
        id=f"{case[0]}-{case[1].__name__}-{case[2]}-{case[3]}",
    )
    for case in itertools.product(GENERATIONS, DTYPES, VOCAB_SIZES, FEATURES)
]


def operands(batch, queries, vocab_size, features, dtype):
    shape = jax.ShapeDtypeStruct
    row_dtypes = Rows(jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.uint32)
    return (
        shape((batch, queries, features), dtype),
        shape((vocab_size, features), dtype),
        shape((batch, queries, num_words(vocab_size)), jnp.int32),
        shape((batch, queries), jnp.int32),
        shape((batch, queries), jnp.int32),
        Rows(*(shape((batch,), dtype) for dtype in row_dtypes)),
    )


def compile_by_row(generation: Generation, function, *args) -> jax.stages.Compiled:
    """For a head whose features lie along lanes, which is not XLA's own choice of 576 of them."""
    device = tpu_device(generation)
    hidden, head, *others = abstract(args, device)
    by_row = Format(Layout((0, 1)), device)
    head = jax.ShapeDtypeStruct(head.shape, head.dtype, sharding=by_row)
    return jax.jit(function).lower(hidden, head, *others).compile()


def arrays_of(program: Program, size: int) -> list[str]:
    """What holds arrays of as many elements."""
    return [i.opcode for i in program.buffers if any(a.size >= size for a in i.arrays)]


@pytest.mark.parametrize(("generation", "dtype", "vocab_size", "features"), MATRIX)
def test_neither_logits_nor_copies_of_the_head_are_in_memory(
    generation: Generation, dtype, vocab_size, features
):
    """The program of batches without filters; those with filters are given logits."""
    batch = 8
    args = _, head, bitmask, *_ = operands(batch, 1, vocab_size, features, dtype)
    compiled = compile_by_row(generation, mosaic_tpu.sample_active, *args)
    # Arrays of logits or of the head would be larger by far.
    assert arrays_of(Program.of(compiled), 4 * bitmask.size) == []
    assert compiled.memory_analysis().temp_size_in_bytes <= 12 * bitmask.size + (1 << 20)
    # By XLA's own account, which takes the kernel's estimate: of rows that need every tile.
    needed = head.size * head.dtype.itemsize
    assert needed <= compiled.cost_analysis()["bytes accessed"] <= 1.1 * needed


@pytest.mark.parametrize(
    ("generation", "dtype", "batch", "queries", "vocab_size", "features"),
    [
        ("v4", jnp.float32, 64, 5, 1000, 8192),
        ("v5e", jnp.bfloat16, 8, 5, 50257, 768),
        ("v6e", jnp.bfloat16, 1, 1, 2048, 64),
        ("v4", jnp.float32, 3, 1, 33, 16),
        pytest.param("v4", jnp.bfloat16, 64, 8, 201088, 2880, marks=pytest.mark.full),
        pytest.param("v5e", jnp.float32, 64, 8, 201088, 8192, marks=pytest.mark.full),
    ],
)
def test_other_shapes_compile(generation, dtype, batch, queries, vocab_size, features):
    args = operands(batch, queries, vocab_size, features, dtype)
    program = Program.of(compile_by_row(generation, mosaic_tpu.sample_active, *args))
    moved = [i for i in program.buffers if i.opcode in ("copy", "copy-start", "transpose")]
    assert not [i for i in moved if any(a.size >= vocab_size * features for a in i.arrays)]


@pytest.mark.parametrize(
    ("vocab_size", "features"),
    # One that XLA would copy into the VMEM of v5e and v6e, and one that is too large for that.
    [(49152, 640), pytest.param(128256, 2048, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_tied_embedding_stays_where_it_is(generation: Generation, vocab_size, features):
    program = Program.of(compile_for(generation, decode, *decoded(vocab_size, features)))
    assert arrays_of(program, vocab_size * features // 8) == []


def test_a_tied_embedding_that_lies_the_wrong_way_is_copied_once_and_not_in_every_step():
    program = Program.of(compile_for("v5e", decode, *decoded(49152, 576)))
    assert arrays_of(program, 49152 * 576 // 8) == ["copy"]
    (body,) = program.while_bodies()
    assert not [
        i for i in body if i.opcode == "copy" and any(a.size > 49152 * 70 for a in i.arrays)
    ]


def decoded(vocab_size, features):
    _, *others = operands(8, 1, vocab_size, features, jnp.bfloat16)
    return jax.ShapeDtypeStruct((8, 1), jnp.int32), *others


def decode(tokens, head, bitmask, enabled, positions, rows):
    """A loop that looks tokens up in the head, too."""

    def step(carry):
        tokens, positions, read = carry
        hidden = jnp.take(head, tokens, axis=0, mode="clip")
        sample = mosaic_tpu.sample_active(hidden, head, bitmask, enabled, positions, rows)
        return sample[0], positions + 1, read + sample[1]

    carry = tokens, positions, jnp.int32(0)
    return jax.lax.while_loop(lambda carry: carry[2] < 1_000_000, step, carry)


@pytest.mark.parametrize(
    "generation", ["v4", *(pytest.param(g, marks=pytest.mark.full) for g in ("v5e", "v6e"))]
)
def test_filters_are_given_logits(generation: Generation):
    """The whole program. And a test of the tests above: here they would find logits."""
    args = operands(8, 1, 49152, 640, jnp.bfloat16)
    head = functools.partial(masked_head, implementation="mosaic_tpu")
    program = Program.of(compile_for(generation, head, *args))
    assert arrays_of(program, 8 * 49152)
    assert arrays_of(program, 49152 * 640) == []


def test_kernel_compiles_where_64_bit_types_are_enabled():
    with jax.enable_x64(True):
        compile_for("v5e", mosaic_tpu.sample_active, *operands(8, 5, 49152, 576, jnp.bfloat16))


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="from JAX 0.11 on, Triton lowers on a GPU only"
)
@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__
)
def test_triton_kernel_lowers_for_cuda(dtype):
    traced = jax.jit(triton.sample_active).trace(*operands(8, 5, 151936, 896, dtype))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?i).*triton.*", DeprecationWarning)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text
