"""``python -m benchmarks.overlap``: masks are filled while the model runs.

A scripted grammar engine sleeps before each mask. If filling and forward pass overlap, a step takes
the longer of the two (and the sampling after them), not their sum.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import RESULTS, interleaved, medians, print_table, warn_if_busy, write_json
from benchmarks.timing import Task, time_engine
from gkv_jax import CacheSpec, Engine, UserError
from gkv_jax.engine import Loop
from gkv_jax.weights import LoadedModel, load_model
from grammar_host.backends.scripted import Script, ScriptedBackend

LOOPS: tuple[Loop, ...] = ("device", "host")
NO_MASK = "none"
_MESSAGES = [{"role": "user", "content": "Count."}]
_LEGAL = frozenset({7})
"""One token, so that the script itself costs nothing beside its delay."""


def measure(
    loaded: LoadedModel, delays_ms: Sequence[float], tokens: int, repetitions: int
) -> dict[str, dict[str, float]]:
    """Per loop, median milliseconds per step of one row: without masks, and for each fill time."""
    model, params = loaded.model, loaded.params
    measures: dict[tuple[str, str], Callable[[], float]] = {}
    with contextlib.ExitStack() as stack:
        for loop, delay in itertools.product(LOOPS, (None, *delays_ms)):
            script = Script((_LEGAL,) * tokens, fill_delay_s=(delay or 0.0) / 1e3)
            engine = Engine(
                model,
                params,
                loaded.tokenizer,
                cache=CacheSpec(sinks=4, window=252),
                slots=1,
                loop=loop,
                stop_token_ids=loaded.config.eos_token_ids,
                backend=ScriptedBackend(script),
            )
            stack.enter_context(engine)
            # The script is the language, whatever the schema says.
            task = Task(_MESSAGES, tokens, None if delay is None else {})
            key = (loop, NO_MASK if delay is None else f"{delay:g}")
            measures[key] = functools.partial(_step_ms, engine, task)
        middle = medians(interleaved(measures, repetitions))
    return {
        loop: {fill: value for (each, fill), value in middle.items() if each == loop}
        for loop in LOOPS
    }


def _step_ms(engine: Engine, task: Task) -> float:
    return time_engine(engine, task, 1).ms_per_step


def report(results: dict[str, dict[str, float]]) -> None:
    """Print measured steps beside what overlap and no overlap would give."""
    rows = []
    for loop, by_fill in results.items():
        alone = by_fill[NO_MASK]
        for fill, value in by_fill.items():
            if fill != NO_MASK:
                longer, total = max(alone, float(fill)), alone + float(fill)
                rows.append([loop, fill, *(f"{x:.1f}" for x in (alone, value, longer, total))])
    columns = ["loop", "fill", "step without mask", "step with", "longer of both", "sum"]
    print_table("mask filling beside the forward pass, ms", columns, rows)


def main(
    delays: Annotated[str, typer.Option(help="fill times in ms, comma-separated")] = "0,5,10,20,40",
    tokens: Annotated[int, typer.Option(help="tokens per run", min=2)] = 48,
    repetitions: Annotated[int, typer.Option(help="timed rounds", min=1)] = 3,
    model: Annotated[str, typer.Option(help="name, folder, GGUF file or hub id")] = (
        "smollm2-135m-instruct"
    ),
    folder: Annotated[Path, typer.Option(help="where JSON goes")] = RESULTS,
) -> None:
    """Time steps whose masks take a known time."""
    warn_if_busy()
    try:
        loaded = load_model(model, dtype="float32")
    except UserError as error:
        raise typer.BadParameter(str(error)) from error
    results = measure(loaded, [float(d) for d in delays.split(",")], tokens, repetitions)
    report(results)
    write_json("overlap", {"ms_per_step": results}, folder)


if __name__ == "__main__":
    typer.run(main)
