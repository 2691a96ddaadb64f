"""The attention kernels pass the real compilers, and take the cache where the scatter leaves it."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import pytest

from gkv_jax.cache.storage import Stored, write
from pallas_kernels.decode_attention import Attended, decode_attention, mosaic_tpu
from tests.aot.hlo import Program
from tests.aot.topology import GENERATIONS, Generation, compile_for

pytestmark = pytest.mark.aot

DTYPES = (jnp.bfloat16, jnp.float32)
DIMS = (64, 128, 256)

# Small enough to compile in a second, and one of everything; the rest is for the full size.
CI_SIZE = {("v5e", jnp.bfloat16, 128, 5), ("v4", jnp.float32, 256, 1), ("v6e", jnp.bfloat16, 64, 1)}
MATRIX = [
    pytest.param(
        *case,
        marks=() if case in CI_SIZE else pytest.mark.full,
        id=f"{case[0]}-{case[1].__name__}-{case[2]}-{case[3]}",
    )
    for case in itertools.product(GENERATIONS, DTYPES, DIMS, (1, 5))
]


def operands(batch, n, kv_heads, dim, capacity, dtype, *, groups=4, cache_dtype=None):
    """Queries, K, V, slot positions and positions of a call, as shapes."""
    cache = jax.ShapeDtypeStruct((batch, kv_heads, capacity, dim), cache_dtype or dtype)
    return (
        (jax.ShapeDtypeStruct((batch, n, kv_heads * groups, dim), dtype),) * 2,
        cache,
        cache,
        jax.ShapeDtypeStruct((batch, capacity), jnp.int32),
        jax.ShapeDtypeStruct((batch, n), jnp.int32),
    )


def attend(queries, k, v, slot_pos, positions, **options) -> Attended:
    return decode_attention(
        queries, k, v, slot_pos, positions,
        **{"prefix": 4, "window": k.shape[2] - 8, "implementation": "mosaic_tpu", **options},
    )  # fmt: skip


def decode(queries, k, v, slot_pos, positions):
    """A decode loop's use of the cache: write the new tokens, then attend."""
    rows = jnp.arange(k.shape[0])[:, None]

    def step(carry):
        i, k, v, slot_pos, q, at = carry
        slots = at % k.shape[2]
        new = q[:, :, : k.shape[1]]
        k = write(Stored(k, None), rows, slots, new).data
        v = write(Stored(v, None), rows, slots, new * 2).data
        slot_pos = slot_pos.at[rows, slots].set(at, mode="drop")
        q = attend((q, q * 2), k, v, slot_pos, at).out
        return i + 1, k, v, slot_pos, q, at + 1

    carry = (jnp.int32(0), k, v, slot_pos, queries[0], positions)
    return jax.lax.while_loop(lambda carry: carry[0] < 100, step, carry)


def copies_of_the_cache(instructions, size: int) -> list[str]:
    return [
        i.name
        for i in instructions
        if i.opcode in ("copy", "copy-start", "transpose") and any(a.size >= size for a in i.arrays)
    ]


@pytest.mark.parametrize(("generation", "dtype", "dim", "n"), MATRIX)
def test_kernel_moves_the_cache_once_and_needs_no_other_memory(
    generation: Generation, dtype, dim, n
):
    args = operands(8, n, 8, dim, 4096, dtype)
    compiled = compile_for(generation, attend, *args)
    (queries, *_), k, *_ = args
    # The queries come in two rotations; the output is the third array of their size.
    moved = (2 * k.size + 3 * queries.size) * k.dtype.itemsize
    program = Program.of(compiled)
    targets = [i.attribute("custom_call_target") for i in program.buffers]
    assert targets.count("tpu_custom_call") == 1
    if dim % mosaic_tpu.LANES == 0:  # see the loop below for the others: here they are converted
        assert copies_of_the_cache(program.buffers, k.size) == []
        assert compiled.cost_analysis()["bytes accessed"] <= 1.1 * moved
        assert compiled.memory_analysis().temp_size_in_bytes <= 0.02 * moved


def all_outputs(queries, k, v, slot_pos, positions, sinks):
    return attend(
        queries, k, v, slot_pos, positions,
        sinks=sinks, soft_cap=30.0, return_lse=True, return_slot_sums=True,
    )  # fmt: skip


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("capacity", "per_head"),
    [
        (296, False),
        (1032, True),
        pytest.param(4104, False, marks=pytest.mark.full),
        pytest.param(4104, True, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_all_options_together_compile(generation: Generation, capacity, per_head):
    *args, slot_pos, positions = operands(8, 5, 8, 128, capacity, jnp.bfloat16)
    if per_head:
        slot_pos = jax.ShapeDtypeStruct((8, 8, capacity), jnp.int32)
    sinks = jax.ShapeDtypeStruct((32,), jnp.float32)
    compiled = compile_for(generation, all_outputs, *args, slot_pos, positions, sinks)
    copies = copies_of_the_cache(Program.of(compiled).buffers, args[1].size)
    # XLA brings a small cache into VMEM ahead of the kernel: that is a read, not a copy.
    assert [name for name in copies if not name.startswith("copy-start")] == []


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)]
)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_cache_of_another_dtype_compiles(generation: Generation, dtype, cache_dtype):
    args = operands(8, 1, 8, 128, 1024, dtype, cache_dtype=cache_dtype)
    compiled = compile_for(generation, attend, *args)
    assert copies_of_the_cache(Program.of(compiled).buffers, args[1].size) == []


@pytest.mark.parametrize(
    ("groups", "n", "dim"), [(1, 1, 128), (3, 16, 128), (8, 16, 256), (71, 1, 64), (3, 5, 80)]
)
def test_any_group_compiles(groups, n, dim):
    compile_for("v5e", attend, *operands(8, n, 2, dim, 1100, jnp.bfloat16, groups=groups))


# Batch, KV heads, D, C, dtype. D = 64 in all its layouts: a small cache, a batch of one, a large cache.
CACHES = [
    (8, 8, 128, 1032, jnp.bfloat16),
    (1, 8, 128, 4096, jnp.float32),
    (8, 3, 64, 1024, jnp.bfloat16),
    (1, 3, 64, 1024, jnp.float32),
    (8, 8, 64, 16384, jnp.bfloat16),
    (8, 4, 256, 2048, jnp.bfloat16),
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("n", [1, pytest.param(5, marks=pytest.mark.full)])
@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: "-".join(map(str, cache[:4])))
@pytest.mark.parametrize("generation", GENERATIONS)
def test_loop_writes_and_reads_the_cache_in_place(generation: Generation, cache, n):
    args = operands(cache[0], n, *cache[1:], groups=3)
    compiled = compile_for(generation, decode, *args, donate_argnums=(1, 2, 3))
    program = Program.of(compiled)
    (body,) = program.while_bodies()
    targets = [i.attribute("custom_call_target") for i in body]
    assert targets.count("tpu_custom_call") == 1
    assert copies_of_the_cache(body, args[1].size) == []
    assert (
        compiled.memory_analysis().alias_size_in_bytes >= 2 * args[1].size * args[1].dtype.itemsize
    )


def test_the_check_for_copies_sees_one():
    """A C of no whole tiles has another layout, which the kernel does not take."""
    args = operands(8, 1, 8, 128, 1028, jnp.bfloat16)
    compiled = compile_for("v5e", decode, *args, donate_argnums=(1, 2, 3))
    (body,) = Program.of(compiled).while_bodies()
    assert len(copies_of_the_cache(body, args[1].size)) >= 2


def test_kernel_compiles_where_64_bit_types_are_enabled():
    with jax.enable_x64(True):
        compile_for("v5e", attend, *operands(8, 5, 8, 128, 1024, jnp.bfloat16))


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="from JAX 0.11 on, Triton lowers on a GPU only"
)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__
)
def test_triton_kernel_lowers_for_cuda(dtype, dim):
    function = functools.partial(
        attend, implementation="triton", soft_cap=30.0, return_lse=True, return_slot_sums=True
    )
    traced = jax.jit(function).trace(*operands(8, 5, 8, dim, 1100, dtype))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?i).*triton.*", DeprecationWarning)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text
