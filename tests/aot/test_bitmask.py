"""The bitmask kernels pass the real compilers, and no unpacked mask is left in their memory."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.bitmask import apply_token_bitmask, mosaic_tpu, num_words
from tests.aot.hlo import Program
from tests.aot.topology import GENERATIONS, Generation, compile_for, tpu_devices

pytestmark = pytest.mark.aot

# SmolLM2, Llama 3, Qwen 3, Gemma 3
VOCAB_SIZES = (49152, 128256, 151936, 262208)
DTYPES = (jnp.float32, jnp.bfloat16)


def _operands(rows, vocab_size, dtype, mask_size=None):
    return (
        jax.ShapeDtypeStruct((*rows, vocab_size), dtype),
        jax.ShapeDtypeStruct((*rows, num_words(mask_size or vocab_size)), jnp.int32),
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


def _writes_of_logits(program: Program, num_logits: int) -> list[str | None]:
    """Where arrays of as many elements come from: a custom call's target, or the opcode."""
    return [
        i.attribute("custom_call_target") or i.opcode
        for i in program.buffers
        if any(a.size >= num_logits for a in i.arrays)
    ]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_kernel_masks_donated_logits_in_place(generation: Generation, dtype, vocab_size):
    logits, bitmask, enabled = _operands((8,), vocab_size, dtype)
    compiled = compile_for(generation, _mask, logits, bitmask, enabled, donate_argnums=0)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 64 << 10  # the lists of blocks, if there are any
    assert memory.alias_size_in_bytes >= logits.size * logits.dtype.itemsize
    program = Program.of(compiled)
    assert _writes_of_logits(program, logits.size) == ["tpu_custom_call"]
    _assert_no_unpacked_mask(program, logits.size)


@pytest.mark.parametrize(
    ("rows", "vocab_size"), [((8,), 49152), ((8,), 151936), ((64,), 128256), ((4, 8), 262208)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_program_moves_the_logits_once_in_and_once_out(
    generation: Generation, dtype, rows, vocab_size
):
    """At most, and by XLA's own account, which takes the kernels' cost estimates."""
    operands = logits, bitmask, enabled = _operands(rows, vocab_size, dtype)
    compiled = compile_for(generation, _mask, *operands, donate_argnums=0)
    needed = 2 * logits.size * logits.dtype.itemsize + 4 * (bitmask.size + enabled.size)
    assert needed <= compiled.cost_analysis()["bytes accessed"] <= 1.1 * needed


@pytest.mark.parametrize("skip_blocks", [False, True], ids=["all", "listed"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_lists_of_blocks_cost_one_kernel_and_nothing_else(generation: Generation, skip_blocks):
    mask = functools.partial(mosaic_tpu.apply_token_bitmask, skip_blocks=skip_blocks)
    operands = _operands((8,), 151936, jnp.float32)
    program = Program.of(compile_for(generation, mask, *operands, donate_argnums=0))
    issued = [i.opcode for i in program.buffers if i.opcode != "constant"]
    # The copy gives the eight flags of the rows the layout of a column.
    assert issued == ["copy"] + ["custom-call"] * (1 + skip_blocks)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_longest_lists_fit_into_scalar_memory(generation: Generation):
    mask = functools.partial(mosaic_tpu.apply_token_bitmask, skip_blocks=True)
    compile_for(generation, mask, *_operands((mosaic_tpu.MAX_LISTED_BLOCKS, 2), 100, jnp.float32))


@pytest.mark.parametrize("rows", [(8,), (64,), (8, 8)], ids=str)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_shard_is_masked_in_place_without_communication(generation: Generation, rows):
    vocab_size = 151936
    devices = np.asarray(tpu_devices(generation))
    mesh = Mesh(devices, ("vocab",))

    def mask_shard(logits, bitmask, enabled):
        first_token = jax.lax.axis_index("vocab") * logits.shape[-1]
        return _mask(logits, bitmask, enabled, first_token=first_token, vocab_size=vocab_size)

    sharded = P(*[None] * len(rows), "vocab")
    specs = sharded, P(), P()
    mask = jax.shard_map(mask_shard, mesh=mesh, in_specs=specs, out_specs=sharded, check_vma=False)
    operands = [
        jax.ShapeDtypeStruct(o.shape, o.dtype, sharding=NamedSharding(mesh, spec))
        for o, spec in zip(_operands(rows, vocab_size, jnp.float32), specs, strict=True)
    ]
    compiled = jax.jit(mask, donate_argnums=0).lower(*operands).compile()
    program = Program.of(compiled)
    num_logits = operands[0].size // devices.size
    assert _writes_of_logits(program, num_logits) == ["tpu_custom_call"]
    _assert_no_unpacked_mask(program, num_logits)
    assert compiled.memory_analysis().alias_size_in_bytes >= 4 * num_logits
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in program.text


@pytest.mark.parametrize("generation", GENERATIONS)
def test_drafts_are_masked_in_place(generation: Generation):
    """An EAGLE-3 head for Llama 3: 32000 drafts. The mask is unpacked for them, the logits stay."""
    num_drafts, vocab_size = 32000, 128256
    mask = functools.partial(_mask, vocab_size=vocab_size)
    operands = _operands((8,), num_drafts, jnp.float32, mask_size=vocab_size)
    d2t = jax.ShapeDtypeStruct((num_drafts,), jnp.int32)
    compiled = compile_for(
        generation,
        lambda logits, bitmask, enabled, d2t: mask(logits, bitmask, enabled, d2t=d2t),
        *operands,
        d2t,
        donate_argnums=0,
    )
    program = Program.of(compiled)
    writes = [
        i.opcode
        for i in program.buffers
        if any(a.dtype == "f32" and a.size >= operands[0].size for a in i.arrays)
    ]
    assert writes.count("custom-call") == 1
    # These logits are so few that XLA takes them to VMEM and back while it gathers the bits. That
    # is asynchronous, and the kernel then reads and writes them there.
    assert set(writes) <= {"custom-call", "copy-start", "copy-done"}
    assert compiled.memory_analysis().alias_size_in_bytes >= 4 * operands[0].size


@pytest.mark.thinned(3)
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
        for skip_blocks in (False, True):
            mask = functools.partial(mosaic_tpu.apply_token_bitmask, skip_blocks=skip_blocks)
            compile_for("v5e", mask, *_operands((8, 5), 49152, jnp.float32))


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
