"""``python -m gkv_jax.evaluate.cache``: the quality of caches on a real model, as tables and plots."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from gkv_jax.errors import UserError
from gkv_jax.evaluate.plan import Plan, most_cells
from gkv_jax.evaluate.quality import cache_quality
from gkv_jax.evaluate.texts import DEFAULT_TEXT, load_text

QUICK = Plan(
    policies=("full", "window", "sliding", "snapkv"),
    budgets=(128,),
    tasks=("needle",),
    lengths=(500,),
    samples=1,
    prompts=1,
    continuation=16,
    stream=1024,
)
"""Enough to see that everything works."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _comma(values: Any) -> str:
    return ",".join(map(str, values))


@app.command()
def main(
    model: Annotated[
        str, typer.Option(help="Registry name, folder, .gguf file or Hugging Face id.")
    ] = "smollm2-135m-instruct",
    policies: Annotated[str, typer.Option(help="Comma-separated.")] = _comma(Plan.policies),
    budgets: Annotated[
        str, typer.Option(help="Tokens held per KV head, comma-separated.")
    ] = _comma(Plan.budgets),
    tasks: Annotated[
        str, typer.Option(help="Retrieval tasks, comma-separated; empty for none.")
    ] = _comma(Plan.tasks),
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, comma-separated.")] = _comma(
        Plan.lengths
    ),
    depths: Annotated[
        str, typer.Option(help="Places of the answer, 0 to 1, comma-separated.")
    ] = _comma(Plan.depths),
    samples: Annotated[
        int, typer.Option(help="Prompts per task, length and depth.")
    ] = Plan.samples,
    prompts: Annotated[
        int, typer.Option(help="Prompts per length to compare with the full cache, or 0.")
    ] = Plan.prompts,
    continuation: Annotated[
        int, typer.Option(help="Tokens compared after each of these.")
    ] = Plan.continuation,
    stream: Annotated[
        int, typer.Option(help="Tokens of text whose perplexity is measured; 0 for none.")
    ] = Plan.stream,
    text: Annotated[
        str, typer.Option(help="Prose: a file, or a name in configs/texts.")
    ] = DEFAULT_TEXT,
    seed: Annotated[int, typer.Option()] = Plan.seed,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small plan instead of the options above.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for results and the journal.")] = Path(
        "cache-quality"
    ),
) -> None:
    """Measure retrieval, agreement with the full cache, and perplexity for several caches.

    What is finished is kept in OUT/journal.jsonl; the same command continues there.

    Example: python -m gkv_jax.evaluate.cache --policies window,snapkv --budgets 128,256
    """
    from tqdm import tqdm

    from gkv_jax.evaluate import report
    from gkv_jax.weights import load_model

    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("the plots need matplotlib: pip install 'gkv_jax[bench]'")
    try:
        plan = QUICK
        if not quick:
            plan = Plan(
                policies=_names(policies),
                budgets=_numbers("budgets", budgets, int),
                tasks=_names(tasks),
                lengths=_numbers("lengths", lengths, int),
                depths=_numbers("depths", depths, float),
                samples=samples,
                prompts=prompts,
                continuation=continuation,
                stream=stream,
            )
        plan = dataclasses.replace(plan, seed=seed)
        if out.exists() and not out.is_dir():
            raise UserError(f"out: {out} is a file; name a folder")
        prose = load_text(text)
        loaded = load_model(model, dtype="float32")
        with tqdm(total=most_cells(plan, loaded.model), unit="cell") as bar:

            def progress(key: str) -> None:
                bar.update(1 if bar.postfix else 0)  # the one before is finished
                bar.set_postfix_str(key)

            quality = cache_quality(
                loaded.model,
                loaded.params,
                loaded.tokenizer,
                plan,
                prose,
                stop_token_ids=loaded.config.eos_token_ids,
                journal=out / "journal.jsonl",
                progress=progress,
            )
    except UserError as error:
        raise typer.BadParameter(str(error)) from error
    for table in report.tables(quality):
        table.print()
    for line in report.notes(quality):
        print(line)
    for path in report.write(quality, out, model):
        print(f"written: {path}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(name: str, text: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in _names(text))
    except ValueError as error:
        raise UserError(f"{name}: {text!r} is not a comma-separated list of numbers") from error


if __name__ == "__main__":
    app()
