"""``python -m benchmarks.decode``: time per decode step, against transformers on the same weights.

Also what the bounded cache costs: its bytes early and late in a text, and the compiled loop's
temporary memory. Prefill is not part of any figure.
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
from gkv_jax.models.llama import Llama
from gkv_jax.weights import LoadedModel, load_model

PEER = "transformers"
LOOPS = ("device", "host")
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


@contextlib.contextmanager
def engines(loaded: LoadedModel, spec: CacheSpec, batch: int) -> Iterator[dict[str, Engine]]:
    """An engine of ``batch`` slots for each loop, on the same parameters."""
    model = Llama(loaded.config)
    params = model.from_checkpoint(loaded.params)
    with contextlib.ExitStack() as stack:
        yield {
            loop: stack.enter_context(
                Engine(
                    model, params, loaded.tokenizer, cache=spec, slots=batch, loop=loop,
                    stop_token_ids=loaded.config.eos_token_ids,
                )
            )
            for loop in LOOPS
        }  # fmt: skip


def measure_batch(
    loaded: LoadedModel, spec: CacheSpec, batch: int, tokens: int, repetitions: int
) -> dict[str, Any]:
    """Samples, medians and step counts of every engine and task at one batch size."""
    peer = TransformersPeer(llama_for_causal_lm(loaded.config, loaded.params), loaded.tokenizer)
    last: dict[str, Timing] = {}
    measures: dict[str, Callable[[], float]] = {}

    def add(name: str, run: Callable[[], Timing]) -> None:
        def measure() -> float:
            last[name] = run()
            return last[name].ms_per_step

        measures[name] = measure

    with engines(loaded, spec, batch) as ours:
        for kind, task in tasks(tokens).items():
            for loop, engine in ours.items():
                add(f"{loop} {kind}", functools.partial(time_engine, engine, task, batch))
            add(f"{PEER} {kind}", functools.partial(peer.time, task, batch))
        samples = interleaved(measures, repetitions)
    return {
        "ms_per_step": medians(samples),
        "samples": samples,
        "steps": {name: timing.steps for name, timing in last.items()},
        "same_tokens": {
            kind: all(
                last[f"{loop} {kind}"].tokens == last[f"{PEER} {kind}"].tokens for loop in LOOPS
            )
            for kind in tasks(tokens)
        },
    }


def report_speed(by_batch: dict[int, dict[str, Any]]) -> dict[str, float]:
    """Print the table and the targets; return the ratios."""
    rows, ratios = [], {}
    for batch, result in by_batch.items():
        ms = result["ms_per_step"]
        for name, value in ms.items():
            engine, kind = name.split()
            rows.append(
                [
                    f"B={batch} {kind}", engine, f"{value:.1f}", f"{1e3 * batch / value:.0f}",
                    str(result["steps"][name]),
                    f"{ms[f'{PEER} {kind}'] / value:.2f}",
                    f"{value / ms[f'{engine} unguided']:.3f}",
                ]
            )  # fmt: skip
        ratios[f"speedup B={batch}"] = ms[f"{PEER} guided"] / ms["device guided"]
        ratios[f"guided/unguided B={batch}"] = ms["device guided"] / ms["device unguided"]
    columns = ["task", "engine", "ms/step", "tokens/s", "steps", f"{PEER} / it", "to unguided"]
    print_table("decode steps, median", columns, rows)
    for batch in by_batch:
        if batch in LEAST_SPEEDUP:
            print_verdict(
                f"{PEER} / device loop, guided, B={batch}",
                ratios[f"speedup B={batch}"],
                least=LEAST_SPEEDUP[batch],
            )
    largest = max(by_batch)
    print_verdict(
        f"guided / unguided, device loop, B={largest}",
        ratios[f"guided/unguided B={largest}"],
        most=MOST_GUIDED,
    )
    return ratios


def report_memory(loaded: LoadedModel, spec: CacheSpec, batch: int) -> dict[str, Any]:
    """Print and return what the cache and the compiled loop occupy."""
    model = Llama(loaded.config)
    params = model.from_checkpoint(loaded.params)
    at = cache_bytes_at(model, params, spec, batch, POSITIONS)
    memory = loop_memory(model, params, spec, batch)
    rows = [[f"cache at position {position}", f"{size:,}"] for position, size in at.items()]
    rows += [[name, f"{size:,}"] for name, size in memory.items()]
    print_table(f"memory, B={batch}, {spec.sinks}+{spec.window}", ["what", "bytes"], rows)
    return {"batch": batch, "cache_bytes_at": at, **memory}


def run(
    loaded: LoadedModel,
    spec: CacheSpec,
    batches: Sequence[int],
    tokens: int,
    repetitions: int,
    folder: Path,
) -> None:
    """Measure, print, and write ``decode.json`` to ``folder``."""
    by_batch = {batch: measure_batch(loaded, spec, batch, tokens, repetitions) for batch in batches}
    results = {
        "cache": {"sinks": spec.sinks, "window": spec.window},
        "batches": by_batch,
        "ratios": report_speed(by_batch),
        "memory": report_memory(loaded, spec, max(batches)),
    }
    write_json("decode", results, folder)


def main(
    batches: Annotated[str, typer.Option(help="batch sizes, comma-separated")] = "1,8",
    tokens: Annotated[int, typer.Option(help="most tokens per request", min=2)] = 96,
    repetitions: Annotated[int, typer.Option(help="timed rounds", min=1)] = 3,
    sinks: Annotated[int, typer.Option(min=0)] = CacheSpec().sinks,
    window: Annotated[int, typer.Option(min=1)] = CacheSpec().window,
    model: Annotated[str, typer.Option(help="name, folder, GGUF file or hub id")] = (
        "smollm2-135m-instruct"
    ),
    folder: Annotated[Path, typer.Option(help="where JSON goes")] = RESULTS,
) -> None:
    """Time decode steps of this engine and of transformers with XGrammar, in turns."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    spec = CacheSpec(sinks=sinks, window=window)
    warn_if_busy()
    try:
        loaded = load_model(model, dtype="float32")
    except UserError as error:
        raise typer.BadParameter(str(error)) from error
    sizes = [int(size) for size in batches.split(",")]
    run(loaded, spec, sizes, tokens, repetitions, folder)


if __name__ == "__main__":
    typer.run(main)
