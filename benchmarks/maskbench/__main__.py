"""``python -m benchmarks.maskbench``: are JSON Schemas enforced exactly, and what does a mask cost?

A problem is *fully right* when its schema compiles, every valid instance is accepted token by token
under the masks, a stop token at its end, and every invalid one is rejected at some token. Data and
idea: MaskBench, https://github.com/guidance-ai/jsonschemabench (arXiv:2501.10868).
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from benchmarks.common import RESULTS, warn_if_busy, write_json
from benchmarks.maskbench.journal import Journal, circumstances
from benchmarks.maskbench.judge import Encode, Outcome, judge
from benchmarks.maskbench.problems import WHERE_TO_GET, Problem, load_problems
from benchmarks.maskbench.report import print_failures, print_report, summarize
from gkv_jax.errors import UserError
from gkv_jax.weights.entries import find_model, model_names
from gkv_jax.weights.huggingface import read_tokenizer
from gkv_jax.weights.store import fetch_model, find_fetched
from grammar_host import SERVED_BACKENDS, GrammarCompiler, GrammarError, Guide, TokenizerInfo


def read_vocabulary(name_or_path: str) -> tuple[TokenizerInfo, Encode]:
    """The vocabulary and the tokenizer of a model of the registry or of a folder.

    No weights are read: the masks are as wide as the tokenizer has tokens.
    """
    if name_or_path in model_names():
        entry = find_model(name_or_path)
        folder = (find_fetched(entry) or fetch_model(entry)).folder
    else:
        folder = Path(name_or_path).expanduser()
        if not folder.is_dir():
            known = ", ".join(model_names())
            raise UserError(f"--model {name_or_path} is no folder; known names: {known}")
    tokenizer = read_tokenizer(folder)

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    return TokenizerInfo.from_transformers(tokenizer, len(tokenizer)), encode


def measure(
    problems: Sequence[Problem],
    backends: Sequence[str],
    compiler: GrammarCompiler,
    encode: Encode,
    journal: Journal,
) -> dict[str, list[Outcome]]:
    """The outcomes of all problems per engine; those in the journal are taken from there."""
    outcomes: dict[str, list[Outcome]] = {backend: [] for backend in backends}
    for backend in backends:
        for problem in tqdm(problems, desc=backend, unit="problem", disable=None):
            outcome = journal.find(problem, backend)
            if outcome is None:
                journal.begin(problem, backend)
                outcome = judge(problem, compiler, backend, encode)
                journal.end(problem, backend, outcome)
            outcomes[backend].append(outcome)
    return outcomes


def load_engines(compiler: GrammarCompiler) -> None:
    """Load every served engine, so that no problem pays for it."""
    for backend in SERVED_BACKENDS:
        with contextlib.suppress(GrammarError):
            compiler.compile(Guide.json_schema({"type": "null"}), backend=backend)


def run(
    problems: Sequence[Problem],
    backends: Sequence[str],
    compiler: GrammarCompiler,
    encode: Encode,
    folder: Path,
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Measure, print, write ``maskbench.json`` (and ``maskbench.jsonl`` while it runs).

    Args:
        compiler: one without a cache, so that equal schemas do not share their compile times.
        encode: the tokenizer that belongs to the compiler's vocabulary.

    Returns:
        The summary of each engine, see `benchmarks.maskbench.report.summarize`.
    """
    state = circumstances(compiler.tokenizer_info.fingerprint)
    with Journal(folder / "maskbench.jsonl", state, resume=resume) as journal:
        outcomes = measure(problems, backends, compiler, encode, journal)
    summaries = {backend: summarize(each) for backend, each in outcomes.items()}
    print_report(summaries)
    write_json("maskbench", {"engines": summaries}, folder)
    return summaries


def main(
    data: Annotated[
        Path | None, typer.Option(envvar="GKV_MASKBENCH", help="a .jsonl(.gz) file or a folder")
    ] = None,
    backend: Annotated[str, typer.Option(help="engines, comma-separated")] = "auto",
    model: Annotated[str, typer.Option(help="whose tokenizer: a name or a folder")] = (
        "smollm2-135m-instruct"
    ),
    only: Annotated[str, typer.Option(help="problems whose name contains this")] = "",
    limit: Annotated[int | None, typer.Option(help="the first so many problems", min=1)] = None,
    failures: Annotated[bool, typer.Option(help="list what is not right")] = False,
    resume: Annotated[bool, typer.Option(help="keep the outcomes of an interrupted run")] = False,
    folder: Annotated[Path, typer.Option(help="where JSON goes")] = RESULTS,
) -> None:
    """Try every instance of every problem under each engine."""
    backends = backend.split(",")
    unknown = sorted(set(backends) - {"auto", *SERVED_BACKENDS})
    if unknown:
        served = ", ".join(["auto", *SERVED_BACKENDS])
        raise typer.BadParameter(f"--backend {unknown[0]} is not served; served are: {served}")
    if data is None:
        raise typer.BadParameter(f"no data; {WHERE_TO_GET}")
    try:
        problems = [each for each in load_problems(data) if only in each.name][:limit]
        if not problems:
            raise UserError(f"--only {only}: no problem's name contains it")
        info, encode = read_vocabulary(model)
    except UserError as error:
        raise typer.BadParameter(str(error)) from error
    warn_if_busy()
    with contextlib.closing(GrammarCompiler(info, cache_limit_bytes=0)) as compiler:
        load_engines(compiler)
        summaries = run(problems, backends, compiler, encode, folder, resume=resume)
    if failures:
        print_failures(summaries)


if __name__ == "__main__":
    typer.run(main)
