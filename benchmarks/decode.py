"""``python -m benchmarks.decode``: time per decode step, against transformers on the same weights.

Also what the bounded cache costs: its bytes early and late in a text, and the compiled loop's
temporary memory. Prefill is not part of any figure.

A fixed cache is read whole at every step; the peer's grows with the text, and holds little more than
a hundred tokens at the end of these. Two sizes of ours stand beside it: one that the text just does
not outgrow, which the targets are for, and the default, four times as long.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import (
    RESULTS,
    interleaved,
    medians,
    print_table,
    print_verdict,
    warn_if_busy,
    write_json,
)
from benchmarks.memory import cache_bytes_at, loop_memory
from benchmarks.peer import llama_for_causal_lm
from benchmarks.timing import Task, Timing, TransformersPeer, time_engine
from gkv_jax import CacheSpec, Engine, UserError
from gkv_jax.engine import Loop
from gkv_jax.weights import LoadedModel, load_model

PEER = "transformers"
SPEC = CacheSpec(sinks=4, window=252)
"""The main case, which ``make demo`` uses, too."""
POSITIONS = (500, 50_000)
FREE_TOKENS = 64
"""Free text costs the same at every step, so that it need not be as long as the document."""
LEAST_SPEEDUP = {1: 2.0, 8: 1.3}
"""Target by batch size: how many times faster than the peer, guided."""
MOST_GUIDED = 1.05
"""Target at the largest batch: guided to unguided time."""

SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 8, "maxLength": 24},
                    "city": {"type": "string", "minLength": 4, "maxLength": 24},
                    "age": {"type": "integer", "minimum": 10, "maximum": 99},
                },
                "required": ["name", "city", "age"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}


def tasks(tokens: int) -> dict[str, Task]:
    """Free text that goes on for long, and a document of two records."""
    story = [{"role": "user", "content": "Write a long story about a ship and its crew."}]
    people = [{"role": "user", "content": "Invent two people and describe them as JSON."}]
    return {
        "unguided": Task(story, min(tokens, FREE_TOKENS)),
        "guided": Task(people, tokens, SCHEMA),
    }


def size(spec: CacheSpec) -> str:
    """A cache's name in tables."""
    return f"{spec.sinks}+{spec.window}"


def cases(specs: Sequence[CacheSpec]) -> dict[str, tuple[Loop, CacheSpec]]:
    """Engines by name: both loops with the first cache, the device loop with the others."""
    ways: list[tuple[Loop, CacheSpec]] = [("device", specs[0]), ("host", specs[0])]
    ways += [("device", spec) for spec in specs[1:]]
    return {f"{loop} {size(spec)}": (loop, spec) for loop, spec in ways}


@contextlib.contextmanager
def engines(
    loaded: LoadedModel, specs: Sequence[CacheSpec], batch: int
) -> Iterator[dict[str, Engine]]:
    """An engine of ``batch`` slots for each case, on the same parameters."""
    model, params = loaded.model, loaded.params
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(
                Engine(
                    model, params, loaded.tokenizer, cache=spec, slots=batch, loop=loop,
                    stop_token_ids=loaded.config.eos_token_ids,
                )
            )
            for name, (loop, spec) in cases(specs).items()
        }  # fmt: skip


def measure_batch(
    loaded: LoadedModel, specs: Sequence[CacheSpec], batch: int, tokens: int, repetitions: int
) -> dict[str, Any]:
    """Samples, medians and step counts of every engine and task at one batch size.

    Names are ``<loop> <cache> <task>``, and ``transformers <task>``.
    """
    peer = TransformersPeer(llama_for_causal_lm(loaded.model, loaded.params), loaded.tokenizer)
    last: dict[str, Timing] = {}
    measures: dict[str, Callable[[], float]] = {}

    def add(name: str, run: Callable[[], Timing]) -> None:
        def measure() -> float:
            last[name] = run()
            return last[name].ms_per_step

        measures[name] = measure

    with engines(loaded, specs, batch) as ours:
        for kind, task in tasks(tokens).items():
            for name, engine in ours.items():
                add(f"{name} {kind}", functools.partial(time_engine, engine, task, batch))
            add(f"{PEER} {kind}", functools.partial(peer.time, task, batch))
        samples = interleaved(measures, repetitions)
    return {
        "ms_per_step": medians(samples),
        "samples": samples,
        "steps": {name: timing.steps for name, timing in last.items()},
        "same_tokens": {
            kind: all(
                last[f"{name} {kind}"].tokens == last[f"{PEER} {kind}"].tokens
                for name in cases(specs)
            )
            for kind in tasks(tokens)
        },
    }


def report_speed(
    by_batch: dict[int, dict[str, Any]], specs: Sequence[CacheSpec]
) -> dict[str, dict[str, float]]:
    """Print the table, and the targets for the first cache; return the device loop's ratios by cache."""
    rows: list[list[str]] = []
    ratios: dict[str, dict[str, float]] = {size(spec): {} for spec in specs}
    for batch, result in by_batch.items():
        ms = result["ms_per_step"]
        for name, value in ms.items():
            engine, kind = name.rsplit(" ", 1)
            rows.append(
                [
                    f"B={batch} {kind}", *_engine_and_cache(engine),
                    f"{value:.1f}", f"{1e3 * batch / value:.0f}",
                    str(result["steps"][name]),
                    f"{ms[f'{PEER} {kind}'] / value:.2f}",
                    f"{value / ms[f'{engine} unguided']:.3f}",
                ]
            )  # fmt: skip
        for cache, of_cache in ratios.items():
            guided, unguided = ms[f"device {cache} guided"], ms[f"device {cache} unguided"]
            of_cache[f"speedup B={batch}"] = ms[f"{PEER} guided"] / guided
            of_cache[f"guided/unguided B={batch}"] = guided / unguided
    columns = [
        "task", "engine", "cache", "ms/step", "tokens/s", "steps", f"{PEER} / it", "to unguided"
    ]  # fmt: skip
    print_table("decode steps, median", columns, rows)
    main_cache = size(specs[0])
    for batch in by_batch:
        if batch in LEAST_SPEEDUP:
            print_verdict(
                f"{PEER} / device loop with {main_cache}, guided, B={batch}",
                ratios[main_cache][f"speedup B={batch}"],
                least=LEAST_SPEEDUP[batch],
            )
    largest = max(by_batch)
    print_verdict(
        f"guided / unguided, device loop with {main_cache}, B={largest}",
        ratios[main_cache][f"guided/unguided B={largest}"],
        most=MOST_GUIDED,
    )
    return ratios


def _engine_and_cache(engine: str) -> list[str]:
    return [engine, "grows"] if engine == PEER else engine.split()


def report_memory(loaded: LoadedModel, spec: CacheSpec, batch: int) -> dict[str, Any]:
    """Print and return what the cache and the compiled loop occupy."""
    model, params = loaded.model, loaded.params
    at = cache_bytes_at(model, params, spec, batch, POSITIONS)
    memory = loop_memory(model, params, spec, batch)
    rows = [[f"cache at position {position}", f"{size:,}"] for position, size in at.items()]
    rows += [[name, f"{size:,}"] for name, size in memory.items()]
    print_table(f"memory, B={batch}, {size(spec)}", ["what", "bytes"], rows)
    return {"batch": batch, "cache": size(spec), "cache_bytes_at": at, **memory}


def run(
    loaded: LoadedModel,
    specs: Sequence[CacheSpec],
    batches: Sequence[int],
    tokens: int,
    repetitions: int,
    folder: Path,
) -> None:
    """Measure, print, and write ``decode.json`` to ``folder``.

    The first of ``specs`` is the main case: both loops run it, targets and memory are for it.
    """
    by_batch = {
        batch: measure_batch(loaded, specs, batch, tokens, repetitions) for batch in batches
    }
    results = {
        "caches": [{"sinks": spec.sinks, "window": spec.window} for spec in specs],
        "batches": by_batch,
        "ratios": report_speed(by_batch, specs),
        "memory": report_memory(loaded, specs[0], max(batches)),
    }
    write_json("decode", results, folder)


def main(
    batches: Annotated[str, typer.Option(help="batch sizes, comma-separated")] = "1,8",
    tokens: Annotated[int, typer.Option(help="most tokens per request", min=2)] = 96,
    repetitions: Annotated[int, typer.Option(help="timed rounds", min=1)] = 3,
    sinks: Annotated[int, typer.Option(help="of the main case", min=0)] = SPEC.sinks,
    window: Annotated[int, typer.Option(help="of the main case", min=1)] = SPEC.window,
    model: Annotated[str, typer.Option(help="name, folder, GGUF file or hub id")] = (
        "smollm2-135m-instruct"
    ),
    folder: Annotated[Path, typer.Option(help="where JSON goes")] = RESULTS,
) -> None:
    """Time decode steps of this engine and of transformers with XGrammar, in turns.

    The default cache is measured beside the main case.
    """
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    specs = list(dict.fromkeys([CacheSpec(sinks=sinks, window=window), CacheSpec()]))
    warn_if_busy()
    try:
        loaded = load_model(model, dtype="float32")
    except UserError as error:
        raise typer.BadParameter(str(error)) from error
    sizes = [int(batch) for batch in batches.split(",")]
    run(loaded, specs, sizes, tokens, repetitions, folder)


if __name__ == "__main__":
    typer.run(main)
