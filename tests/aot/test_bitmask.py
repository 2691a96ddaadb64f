"""The bitmask kernels pass the real compilers, and no unpacked mask is left in their memory."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.bitmask import apply_token_bitmask, num_words
from tests.aot.hlo import Program
from tests.aot.topology import GENERATIONS, Generation, compile_for

pytestmark = pytest.mark.aot

# SmolLM2, Llama 3, Qwen 3, Gemma 3
VOCAB_SIZES = (49152, 128256, 151936, 262208)
DTYPES = (jnp.float32, jnp.bfloat16)


def _operands(rows, vocab_size, dtype):
    return (
        jax.ShapeDtypeStruct((*rows, vocab_size), dtype),
        jax.ShapeDtypeStruct((*rows, num_words(vocab_size)), jnp.int32),
        jax.ShapeDtypeStruct(rows, jnp.int32),
    )


_mask = functools.partial(apply_token_bitmask, implementation="mosaic_tpu")


def _masked_head(hidden, embedding, bitmask, enabled):
    """The place of the kernel in a decode step: between the LM head and the sampler."""
    logits = jnp.einsum("bnd,vd->bnv", hidden, embedding, preferred_element_type=jnp.float32)
    return jnp.argmax(_mask(logits, bitmask, enabled), axis=-1)


def _assert_no_unpacked_mask(program: Program, num_logits: int) -> None:
    for instruction in program.buffers:
        for array in instruction.arrays:
            unpacked = array.dtype[0] in "psu" and array.size >= num_logits
            assert not unpacked, f"{instruction.opcode} holds {array}"


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_kernel_masks_donated_logits_in_place(generation: Generation, dtype, vocab_size):
    logits, bitmask, enabled = _operands((8,), vocab_size, dtype)
    compiled = compile_for(generation, _mask, logits, bitmask, enabled, donate_argnums=0)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes == 0
    assert memory.alias_size_in_bytes >= logits.size * logits.dtype.itemsize
    program = Program.of(compiled)
    writes = [i for i in program.buffers if any(a.size >= logits.size for a in i.arrays)]
    assert [i.attribute("custom_call_target") for i in writes] == ["tpu_custom_call"]
    _assert_no_unpacked_mask(program, logits.size)


@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (8, 1), (8, 5), (3, 9)], ids=str)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_kernel_takes_the_logits_as_the_head_lays_them_out(generation: Generation, rows):
    vocab_size, features = 49152, 576
    hidden = jax.ShapeDtypeStruct((*rows, features), jnp.bfloat16)
    embedding = jax.ShapeDtypeStruct((vocab_size, features), jnp.bfloat16)
    logits, bitmask, enabled = _operands(rows, vocab_size, jnp.float32)
    compiled = compile_for(generation, _masked_head, hidden, embedding, bitmask, enabled)
    program = Program.of(compiled)
    writes = [
        i
        for i in program.buffers
        if any(a.dtype == "f32" and a.size >= logits.size for a in i.arrays)
    ]
    # The head's matmul writes them, the kernel masks them where they are: no copy, no reshape.
    assert [i.opcode for i in writes] == ["fusion", "custom-call"]
    _assert_no_unpacked_mask(program, logits.size)


def test_kernel_compiles_where_64_bit_types_are_enabled():
    with jax.enable_x64(True):
        compile_for("v5e", _mask, *_operands((8, 5), 49152, jnp.float32))


def test_the_check_for_unpacked_masks_sees_one():
    """Plain XLA unpacks on a TPU: the reason for the kernel, and a test of the test above."""
    operands = _operands((8,), 49152, jnp.float32)
    unpack = functools.partial(apply_token_bitmask, implementation="xla")
    with pytest.raises(AssertionError, match="holds Array"):
        _assert_no_unpacked_mask(Program.of(compile_for("v5e", unpack, *operands)), 8 * 49152)


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="from JAX 0.11 on, Triton lowers on a GPU only"
)
@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__
)
def test_triton_kernel_lowers_for_cuda(dtype):
    mask = functools.partial(apply_token_bitmask, implementation="triton")
    traced = jax.jit(mask, donate_argnums=0).trace(*_operands((8, 1), 151936, dtype))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?i).*triton.*", DeprecationWarning)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text
    assert "output_operand_alias" in text
