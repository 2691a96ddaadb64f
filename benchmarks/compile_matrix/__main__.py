"""``python -m benchmarks.compile_matrix``: does everything compile for TPUs and GPUs, and at what cost?

Needs what ``make test`` installs (libtpu, and the CUDA compiler of ``make aot-cuda``); chips whose
compiler is missing are left out, with the reason. See ``docs/accelerators.md``.
"""

import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import jax
import typer
from tqdm import tqdm

from benchmarks.common import RESULTS, environment, print_table, write_json
from benchmarks.compile_matrix import jobs, report
from benchmarks.compile_matrix.cases import KERNELS, TARGETS, Case, all_cases
from benchmarks.compile_matrix.journal import Journal
from tests.aot import cuda

PAGE = RESULTS.parents[1] / "docs" / "accelerators.md"


def compile_all(cases: Sequence[Case]) -> Iterator[report.Outcome]:
    """Every case with its result: first those for GPUs, then those for TPUs."""
    on_tpu, on_gpu = (
        [c for c in cases if TARGETS[c.target].platform == p] for p in ("tpu", "cuda")
    )
    if on_gpu and (reason := cuda.missing()):
        print(f"left out, {len(on_gpu)} cases for GPUs: {reason}")
    else:
        yield from cuda.compile_cases(on_gpu)
    if on_tpu and (reason := tpu_missing()):
        print(f"left out, {len(on_tpu)} cases for TPUs: {reason}")
    else:
        yield from jobs.run("benchmarks.compile_matrix.tpu", on_tpu)


def tpu_missing() -> str | None:
    """Why this environment cannot compile for TPUs, or None."""
    # Where the worker finds it, too: see tests/aot/topology.py.
    if find_spec("libtpu") is not None or (Path(sys.prefix) / "libtpu" / "libtpu").is_dir():
        return None
    return "libtpu is not installed: `make test` does it, on Linux x86_64"


def circumstances() -> str:
    """The versions of the compilers, and the machine that they ran on."""
    found = [f"jax {jax.__version__}"]
    for folder, package in (("libtpu", "libtpu"), ("cuda", "nvidia-cuda-nvcc")):
        path = [str(Path(sys.prefix) / folder), *sys.path]
        for each in importlib.metadata.distributions(name=package, path=path):
            found.append(f"{package} {each.version}")
            break
    machine = environment()["machine"]
    return f"{', '.join(found)} (on {machine['cpus']} cores, {machine['processor']})"


def main(
    quick: Annotated[bool, typer.Option(help="one shape and dtype of each implementation")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="words that a case's name must contain, all of them; see --list"),
    ] = None,
    names: Annotated[bool, typer.Option("--list", help="print the names of the cases")] = False,
    resume: Annotated[
        bool, typer.Option(help="take what compiled from the journal of the last run")
    ] = False,
    folder: Annotated[Path, typer.Option(help="where the JSON goes")] = RESULTS,
    page: Annotated[
        Path | None, typer.Option(help="where the page goes; by default only a full run has one")
    ] = None,
) -> None:
    """Compile every kernel for every accelerator."""
    words = only or []
    cases = [
        case
        for case in all_cases(targets=TARGETS, kernels=KERNELS, quick=quick)
        if set(words) <= set(case.name.split())
    ]
    if names:
        print("\n".join(case.name for case in cases))
        return
    journal = Journal(
        folder / "compile_matrix.jsonl",
        f"{environment()['commit']} {circumstances()}",
        resume=resume,
    )
    known = {case: result for case in cases if (result := journal.find(case))}
    fresh = compile_all([case for case in cases if case not in known])
    try:
        for case, result in tqdm(fresh, total=len(cases) - len(known), unit="case", disable=None):
            journal.add(case, result)
            known[case] = result
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from here")
    outcomes = [(case, known[case]) for case in cases if case in known]
    seconds = sum(result.seconds for _, result in outcomes)

    write_json("compile_matrix", {"seconds": seconds, "cases": report.to_json(outcomes)}, folder)
    for platform, title in (("tpu", "TPUs"), ("cuda", "NVIDIA GPUs")):
        if table := report.rows(platform, outcomes):
            print_table(title, report.headers(platform), table)
    for case, result in report.failures(outcomes):
        print(f"{result.status}: {case.name}\n  {result.error}")
    failed = len(report.failures(outcomes))
    print(f"{len(outcomes) - failed} of {len(outcomes)} cases compile; {seconds:.0f} s")
    if page is None and not quick and not words and len(outcomes) == len(cases):
        page = PAGE
    if page is not None:
        command = ["python -m benchmarks.compile_matrix", *["--quick"] * quick]
        command += [f"--only {word}" for word in words]
        text = report.page(outcomes, len(cases), " ".join(command), circumstances())
        page.write_text(text, encoding="utf-8")
        print(f"written: {page}")


if __name__ == "__main__":
    typer.run(main)
