"""The compile matrix: its cases, the workers that may die, and what the page says of results."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.compile_matrix import report
from benchmarks.compile_matrix.__main__ import tpu_missing
from benchmarks.compile_matrix.cases import KERNELS, TARGETS, Case, Kernel, all_cases, nbytes
from benchmarks.compile_matrix.jobs import Function, Result, run
from benchmarks.compile_matrix.journal import Journal
from tests.aot import cuda

WORKER = """
import os, time
from benchmarks.compile_matrix import jobs

def compile_case(case):
    print("noise of a compiler")
    if case.kernel == "sleep":
        time.sleep(60)
    if case.kernel == "abort":
        os.write(2, b"Check failed: the reason\\n")
        os.abort()
    if case.kernel == "refuse":
        raise ValueError("implementation: no")
    if case.kernel == "raise":
        raise RuntimeError("no\\nat all")
    return jobs.Result("compiled", flops=float(case.size["n"]), functions=(
        jobs.Function("f", 32, 0, 4, 512),))

with jobs.private_output() as pipe:
    jobs.serve(compile_case, pipe, seconds=3)
"""


def case(kernel: str = "bitmask", target: str = "v5e", **size: int) -> Case:
    return Case(kernel, "xla", "float32", size, target)


def test_a_worker_that_dies_takes_one_case_with_it(tmp_path: Path) -> None:
    (tmp_path / "some_worker.py").write_text(WORKER)
    kernels = ("fine", "abort", "raise", "refuse", "sleep", "fine")
    cases = [case(kernel, n=n) for n, kernel in enumerate(kernels)]
    outcomes = list(run("some_worker", cases, path=[tmp_path]))
    assert [each for each, _ in outcomes] == cases
    results = [result for _, result in outcomes]
    assert [r.status for r in results] == [
        "compiled", "crashed", "error", "refused", "crashed", "compiled",
    ]  # fmt: skip
    assert [results[0].flops, results[5].flops] == [0, 5]
    assert results[0].functions == (Function("f", 32, 0, 4, 512),)
    assert "exit status -6" in results[1].error
    assert "Check failed: the reason" in results[1].error
    assert results[2].error == "RuntimeError: no\nat all"
    assert "Timeout" in results[4].error
    assert results[4].seconds > 2.9


def test_a_worker_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken_worker.py").write_text("raise SystemExit('no compiler here')")
    with pytest.raises(RuntimeError, match=r"(?s)does not start.*no compiler here"):
        list(run("broken_worker", [case(n=1)], path=[tmp_path]))


def test_cases_fit_their_chips_and_are_distinct() -> None:
    cases = list(all_cases(targets=TARGETS, kernels=KERNELS))
    names = [each.name for each in cases]
    assert len(set(names)) == len(names)
    for each in cases:
        platform = TARGETS[each.target].platform
        assert (
            each.implementation
            in {"tpu": ("xla", "mosaic_tpu"), "cuda": ("xla", "triton")}[platform]
        )
    assert {t for t, target in TARGETS.items() if target.platform == "cuda"} == set(cuda.GPUS)


def test_quick_cases_are_one_of_each_implementation() -> None:
    quick = list(all_cases(targets=["v6e", "H100"], kernels=KERNELS, quick=True))
    kinds = [(each.kernel, each.implementation, each.target) for each in quick]
    assert len(set(kinds)) == len(kinds)
    everything = all_cases(targets=["v6e", "H100"], kernels=KERNELS)
    assert set(kinds) == {(each.kernel, each.implementation, each.target) for each in everything}


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "each",
    list(all_cases(targets=["H100", "v5e"], kernels=KERNELS, quick=True)),
    ids=lambda each: each.name,
)
def test_every_program_can_be_traced(each: Case) -> None:
    """Operands fit the function, and what must be moved is no more than there is."""
    program = each.program()
    results = jax.eval_shape(program.function, *program.operands)
    assert 0 < program.minimal_bytes <= nbytes(program.operands) + nbytes(results)


def test_the_bytes_a_mask_needs() -> None:
    size = {"vocab": 100, "batch": 3, "queries": 2}
    program = Case("bitmask", "xla", "bfloat16", size, "v5e").program()
    logits, words, flags = 6 * 100 * 2, 6 * 4 * 4, 6 * 4
    assert program.minimal_bytes == 2 * logits + words + flags
    assert program.operands[0].dtype == jnp.bfloat16


def test_missing_kernels_are_left_out() -> None:
    def existing(needs: str) -> dict[str, Sequence[str]]:
        dtypes = {"xla": ("float32",), "other": ("float32",)}
        return Kernel(KERNELS["bitmask"].build, dtypes, (), needs).existing

    assert existing("pallas_kernels.bitmask") == {"xla": ("float32",)}
    assert existing("pallas_kernels.nothing") == existing("nothing.at.all") == {}
    assert len(existing("gkv_jax.cache")) == 2


def test_a_journal_remembers_what_compiled(tmp_path: Path) -> None:
    path = tmp_path / "somewhere" / "journal.jsonl"
    good, bad, missing = (case(n=n) for n in range(3))
    result = Result("compiled", functions=(Function("f", 32, 0, 4, 512),))
    journal = Journal(path, "today", resume=True)
    journal.add(good, result)
    journal.add(bad, Result("error", error="no"))
    with path.open("a") as file:
        file.write('["half a li')
    for _ in range(2):
        journal = Journal(path, "today", resume=True)
        assert journal.find(good) == result
        assert journal.find(bad) is journal.find(missing) is None
    assert Journal(path, "tomorrow", resume=True).find(good) is None
    journal.add(good, result)
    assert Journal(path, "today", resume=False).find(good) is None


OUTCOMES = [
    (
        case(n=1),
        Result(
            "compiled", seconds=1.0, minimal_bytes=819_000, bytes_accessed=1_638_000.0,
            optimal_seconds=1.5e-6, temp_bytes=0, vmem_bytes=2_000_000, alias_bytes=0,
        ),
    ),
    (
        case(n=2),
        Result(
            "compiled", seconds=3.0, minimal_bytes=819_000, bytes_accessed=8_190_000.0,
            optimal_seconds=None, temp_bytes=1500, vmem_bytes=2_000_000, alias_bytes=0,
        ),
    ),
    (case(n=3), Result("crashed", error="exit status -6\n`Check` failed")),
    (
        case(target="H100", n=1),
        Result(
            "compiled", seconds=0.26, minimal_bytes=100, temp_bytes=0,
            functions=(Function("a", 40, 0, 0, 0), Function("b", 32, 8, 4, 49152)),
        ),
    ),
]  # fmt: skip


def test_rows_show_the_range_of_their_cases() -> None:
    (row,) = report.rows("tpu", OUTCOMES)
    assert row == (
        "bitmask", "xla", "v5e", "2 of 3", "0 to 1.5 KB", "2.00 to 10", "1.50", "2 MB", "1.0 to 3.0",
    )  # fmt: skip
    (row,) = report.rows("cuda", OUTCOMES)
    assert row == (
        "bitmask", "xla", "H100", "1 of 1", "0", "-", "40", "12 B", "49.2 KB", "0.3",
    )  # fmt: skip
    assert len(row) == len(report.headers("cuda"))


def test_the_page_names_versions_and_failures() -> None:
    page = report.page(OUTCOMES, 4, "the command", "jax 1.2.3")
    assert "3 of 4 cases compile. Written by `the command`" in page
    assert "in 0 minutes, with jax 1.2.3." in page
    assert "broken off" not in page
    assert "| bitmask | xla | v5e | 2 of 3 |" in page
    assert "bitmask xla v5e float32 n=3: crashed. `exit status -6 'Check' failed`" in page
    assert "{" not in page


def test_the_page_says_what_it_lacks() -> None:
    page = report.page(OUTCOMES[:2], 7, "", "")
    assert "broken off: 5 more cases were not tried" in page
    assert "does not compile" not in page
    assert "NVIDIA GPUs\n" not in page


@pytest.mark.aot
def test_the_tpu_worker_answers() -> None:
    if reason := tpu_missing():
        pytest.skip(reason)
    write = Case(
        "ring_write", "xla", "bfloat16", {"batch": 8, "queries": 1, "capacity": 512}, "v5p"
    )
    broken = case("bitmask", vocab=1)
    (_, result), (_, failure) = run("benchmarks.compile_matrix.tpu", [write, broken])
    assert (result.status, result.error) == ("compiled", "")
    assert result.alias_bytes == 8 * 8 * 512 * 128 * 2
    assert result.temp_bytes is not None
    assert result.temp_bytes < result.alias_bytes
    assert report.excess_time(write, result) is not None
    assert failure.status == "error"
    assert "TypeError" in failure.error
