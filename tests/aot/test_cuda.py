"""Kernels pass the compilers for NVIDIA GPUs, without one: XLA:GPU, Triton and ptxas."""

import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.compile_matrix.cases import KERNELS, Case, Program, all_cases
from benchmarks.compile_matrix.jobs import Result
from tests.aot import cuda

pytestmark = pytest.mark.aot

CHIPS = ("A100", "H100", "H200")
PACKAGES = [name for name, kernel in KERNELS.items() if "triton" in kernel.existing]
DTYPES = ("float32", "bfloat16", "float16")
SIZES = [{"vocab": vocab, "batch": 8, "queries": 1} for vocab in (128256, 262208)]
BITMASK = [
    Case("bitmask", "triton", dtype, size, chip)
    for chip, dtype, size in itertools.product(CHIPS, DTYPES, SIZES)
]


def compiled(cases: Sequence[Case]) -> dict[str, Result]:
    """Results by the name of the case, all from one start of the compiler."""
    if reason := cuda.missing():
        pytest.skip(reason)
    return {case.name: result for case, result in cuda.compile_cases(cases)}


@functools.cache
def bitmask_results() -> dict[str, Result]:
    return compiled(BITMASK)


@pytest.mark.parametrize("case", BITMASK, ids=lambda case: case.name.replace(" ", "-"))
def test_bitmask_compiles_in_place_and_spills_nothing(case: Case) -> None:
    result = bitmask_results()[case.name]
    assert (result.status, result.error) == ("compiled", "")
    logits = case.size["vocab"] * case.size["batch"] * jnp.dtype(case.dtype).itemsize
    assert result.alias_bytes == logits
    assert result.temp_bytes == 0
    (function,) = result.functions  # nothing but the kernel: no copy before it, none after
    assert function.name == "apply_token_bitmask"
    assert (function.spill_stores, function.spill_loads) == (0, 0)
    assert 0 < function.registers <= 64
    assert function.shared_bytes <= 48 << 10


def refuse(implementation: str, dtype: Any) -> Program:
    raise ValueError(f"implementation: {implementation!r} does not take {dtype}")


def break_off(implementation: str, dtype: Any) -> Program:
    raise TypeError("a kernel with a mistake")


def die(implementation: str, dtype: Any) -> Program:
    os.abort()


def multiply(implementation: str, dtype: Any, *, side: int) -> Program:
    matrix = jax.ShapeDtypeStruct((side, side), dtype)
    return Program(jnp.matmul, (matrix, matrix), 3 * side * side * dtype.itemsize)


def too_much_shared_memory(implementation: str, dtype: Any, *, side: int) -> Program:
    """A Triton kernel whose operands do not fit into any multiprocessor."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    def kernel(x: Any, y: Any, out: Any) -> None:
        out[...] = pl.dot(x[...], y[...])

    matrix = jax.ShapeDtypeStruct((side, side), dtype)
    call = pl.pallas_call(
        kernel, out_shape=matrix, compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1)
    )
    return Program(call, (matrix, matrix), 3 * side * side * dtype.itemsize)


def test_a_case_that_fails_or_crashes_is_a_result_and_the_others_go_on() -> None:
    def case(build: Any, **size: int) -> Case:
        return Case(f"{__name__}:{build.__name__}", "triton", "float32", size, "H100")

    cases = [
        case(refuse), case(break_off), case(die), case(too_much_shared_memory, side=512),
        case(multiply, side=128),
    ]  # fmt: skip
    results = list(compiled(cases).values())
    assert [r.status for r in results] == ["refused", "error", "crashed", "error", "compiled"]
    assert results[0].error == "ValueError: implementation: 'triton' does not take float32"
    assert results[1].error == "TypeError: a kernel with a mistake"
    assert results[2].error.startswith("exit status -6")
    assert "shared memory" in results[3].error.lower()
    assert results[4].functions
    assert results[4].flops == pytest.approx(2 * 128**3, rel=0.05)  # and what the split adds up


def test_the_report_of_the_assembler_is_read() -> None:
    report = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_80'
ptxas info    : Function properties for one
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size, 384 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_80'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 1024 bytes smem, 384 bytes cmem[0]
"""
    one, two = cuda.read_report(report, {"two": 512})
    assert (one.name, one.registers, one.spill_stores, one.spill_loads) == ("one", 255, 12, 16)
    assert (one.shared_bytes, two.shared_bytes) == (0, 1536)
    assert (two.registers, two.spill_stores, two.spill_loads) == (32, 0, 0)


def test_spills_are_seen(tmp_path: Any) -> None:
    """The assembler, told to make do with few registers: a test of the checks above."""
    if reason := cuda.missing():
        pytest.skip(reason)
    values = range(64)
    loads = "\n".join(f"ld.volatile.global.f32 %f{i}, [%rd1+{4 * i}];" for i in values)
    stores = "\n".join(f"st.volatile.global.f32 [%rd1+{4 * i}], %f{i};" for i in values)
    path = tmp_path / "spilling.ptx"
    path.write_text(
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry spilling(.param .u64 p)\n"
        ".maxnreg 24\n{\n.reg .f32 %f<64>;\n.reg .b64 %rd<2>;\nld.param.u64 %rd1, [p];\n"
        f"{loads}\n{stores}\nret;\n}}\n"
    )
    (function,) = cuda.ptxas(path, {})
    assert function.name == "spilling"
    assert function.spill_stores > 0
    assert function.spill_loads > 0


def test_a_missing_compiler_is_named_with_its_remedy(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setattr(cuda, "FOLDER", tmp_path)
    assert "make aot-cuda" in (cuda.missing() or "")


# The oldest of them has the least shared memory and the fewest instructions.
OTHERS = [
    case
    for case in all_cases(targets=["A100"], kernels=PACKAGES, quick=True)
    if case.implementation == "triton" and case.kernel not in ("bitmask", "decode_step")
]
# In float32 Triton unpacks the operands of products into registers, and there is no lack of reasons
# to spill them.
OTHERS += [
    case
    for case in all_cases(targets=["A100"], kernels=["decode_attention"])
    if (case.implementation, case.dtype) == ("triton", "float32")
]


@functools.cache
def other_results() -> dict[str, Result]:
    return compiled(OTHERS)


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name.replace(" ", "-"))
def test_the_other_kernels_compile(case: Case) -> None:
    result = other_results()[case.name]
    assert (result.status, result.error) == ("compiled", "")
    assert "__gpu$xla.gpu.triton" in result.custom_calls
    assert [f.name for f in result.functions if f.spill_stores or f.spill_loads] == []


@pytest.mark.full
@pytest.mark.parametrize("kernel", PACKAGES)
def test_all_sizes_compile(kernel: str) -> None:
    cases = list(all_cases(targets=cuda.GPUS, kernels=[kernel]))
    failed = {k: r.error for k, r in compiled(cases).items() if r.status != "compiled"}
    assert failed == {}
