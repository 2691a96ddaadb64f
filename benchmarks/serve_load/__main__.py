"""``python -m benchmarks.serve_load``: a server under many clients, beside the engine without a server.

A real server in a process of its own answers N clients at once, half of whose chats are guided by one of
eight schemas, half of them streams. Nothing may fail but for HTTP 429, after which clients come back when
they are told to; all finished documents are valid; afterwards all slots are free, and a request is served.
Then ``Engine.generate`` answers the same requests in a fresh process: what HTTP, streams and the queue cost.

``--isolation`` times one stream of free text beside guided neighbours and beside free ones instead.

Figures need a quiet machine.
"""

import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import print_table, print_verdict, warn_if_busy, write_json
from benchmarks.serve_load.clients import Outcome, load
from benchmarks.serve_load.isolation import measure, ratio
from benchmarks.serve_load.processes import Server, server, tokens_per_second_alone
from benchmarks.serve_load.workload import Task, tasks
from gkv_jax import UserError
from gkv_jax.engine import Quantization
from gkv_jax.weights import load_model

LEAST_TO_ENGINE = 0.9
"""Target: tokens/s of the server to those of ``Engine.generate``."""
MOST_TO_FREE = 1.05
"""Target: a stream's time per token beside guided neighbours to that beside free ones."""
IDLE_SECONDS = 30
"""How long the last slots may take to be free after the last answer."""


def run_load(running: Server, asked: Sequence[Task], clients: int) -> dict[str, Any]:
    """Let the clients ask; the figures, JSON-ready."""
    memory = [running.memory]
    began = time.perf_counter()
    outcomes = asyncio.run(load(running.url, running.model, asked, clients))
    seconds = time.perf_counter() - began
    idle = running.wait_until_idle(IDLE_SECONDS)
    memory.append(running.memory)
    last = asyncio.run(load(running.url, running.model, tasks(2), 2))
    return {
        "seconds": seconds,
        "tokens_per_second": sum(each.tokens for each in outcomes) / seconds,
        "memory_bytes": memory,
        "idle_afterwards": idle,
        "served_afterwards": all(each.error is None for each in last),
        **summary(outcomes),
    }


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts and times of the requests."""
    guided = [each for each in outcomes if each.task.schema and each.error is None]
    finished = [each for each in guided if each.finish_reason == "stop"]
    prompts = [each.prompt_tokens for each in outcomes if each.error is None]
    return {
        "requests": len(outcomes),
        "errors": dict(Counter(each.error for each in outcomes if each.error)),
        "refused_429": sum(each.refusals for each in outcomes),
        "prompt_tokens": [min(prompts, default=0), max(prompts, default=0)],
        "guided": len(guided),
        "guided_cut_by_length": len(guided) - len(finished),
        "guided_finished": len(finished),
        "guided_valid": sum(each.task.is_valid(each.text) for each in finished),
        "first_token_seconds": middle_and_high([each.first_seconds for each in outcomes]),
        "per_token_seconds": middle_and_high([each.token_seconds for each in outcomes]),
        "queue_seconds": middle_and_high(
            [each.queue_seconds for each in outcomes if each.error is None]
        ),
    }


def middle_and_high(values: Sequence[float | None]) -> list[float]:
    """The median and the 95th percentile; empty if there are not two values."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return []
    cuts = statistics.quantiles(known, n=20, method="inclusive")
    return [cuts[9], cuts[18]]


def report_load(figures: dict[str, Any], clients: int, alone: float) -> None:
    """Print a table and verdicts."""

    def both(name: str, scale: float, unit: str) -> str:
        return " / ".join(f"{scale * value:.3g}" for value in figures[name]) + f" {unit}"

    before, after = figures["memory_bytes"]
    rows = [
        ["requests, clients", f"{figures['requests']}, {clients}"],
        ["prompt tokens, shortest / longest", " / ".join(map(str, figures["prompt_tokens"]))],
        ["429, each tried again", str(figures["refused_429"])],
        ["other errors", str(figures["errors"] or 0)],
        ["guided, finished", str(figures["guided_finished"])],
        ["guided, cut by length", str(figures["guided_cut_by_length"])],
        ["seconds", f"{figures['seconds']:.1f}"],
        ["tokens/s, served", f"{figures['tokens_per_second']:.1f}"],
        ["tokens/s, Engine.generate", f"{alone:.1f}"],
        ["first token, p50 / p95", both("first_token_seconds", 1, "s")],
        ["per token, p50 / p95", both("per_token_seconds", 1e3, "ms")],
        ["in the queue, p50 / p95", both("queue_seconds", 1, "s")],
    ]
    if before is not None:
        rows.append(["memory, before / after", f"{before / 2**20:.0f} / {after / 2**20:.0f} MiB"])
    print_table("a server under load", ["", "value"], rows)
    finished = figures["guided_finished"]
    print_verdict("errors other than 429", sum(figures["errors"].values()), most=0)
    print_verdict(
        "finished documents that are valid", figures["guided_valid"] / max(1, finished), least=1
    )
    print_verdict("all slots free afterwards", figures["idle_afterwards"], least=1)
    print_verdict("served afterwards", figures["served_afterwards"], least=1)
    print_verdict(
        "tokens/s to Engine.generate", figures["tokens_per_second"] / alone, least=LEAST_TO_ENGINE
    )


def write_config(
    path: Path, model: str, slots: int, queue: int, quantize: Quantization | None
) -> None:
    """Settings for the server and for the engine alone."""
    lines = [f'model = "{model}"', f"slots = {slots}"]
    if quantize is not None:
        lines.append(f'quantize = "{quantize}"')
    text = "\n".join([*lines, "[queue]", f"size = {queue}", "[limits]", "connections = 4096"])
    path.write_text(text + "\n", encoding="utf-8")


def main(
    clients: Annotated[int, typer.Option(help="at once", min=1)] = 200,
    requests: Annotated[int, typer.Option(help="of each client", min=1)] = 2,
    slots: Annotated[int, typer.Option(help="of the server", min=1)] = 8,
    queue: Annotated[int, typer.Option(help="answers that may wait; others get 429", min=0)] = 128,
    quantize: Annotated[Quantization | None, typer.Option(help="round the weights")] = None,
    model: Annotated[str, typer.Option(help="name, folder, GGUF file or hub id")] = (
        "smollm2-135m-instruct"
    ),
    isolation: Annotated[bool, typer.Option(help="time a stream and its neighbours")] = False,
    tokens: Annotated[int, typer.Option(help="of the stream that is timed", min=2)] = 128,
    rounds: Annotated[int, typer.Option(help="of the timing", min=1)] = 5,
    json: Annotated[Path | None, typer.Option(help="file for the figures")] = None,
) -> None:
    """Put a server under load, or time what neighbours cost."""
    warn_if_busy()
    settings = {"model": model, "slots": slots, "queue": queue, "quantize": quantize}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "server.toml"
        write_config(config, model, slots, queue, quantize)
        try:
            if isolation:
                stops = sorted(load_model(model, dtype="float32").config.eos_token_ids)
                with server(config) as running:
                    seconds = asyncio.run(
                        measure(running.url, running.model, stops, slots, tokens, rounds)
                    )
                figures: dict[str, Any] = {"seconds_per_token": seconds, "ratio": ratio(seconds)}
                rows = [
                    [kind, f"{1e3 * statistics.median(values):.2f}"]
                    for kind, values in seconds.items()
                ]
                print_table("a stream of free text", ["neighbours", "ms per token"], rows)
                print_verdict("guided to free", figures["ratio"], most=MOST_TO_FREE)
            else:
                asked = tasks(clients * requests)
                with server(config) as running:
                    figures = run_load(running, asked, clients)
                alone = tokens_per_second_alone(config, asked)
                report_load(figures, clients, alone)
                figures["tokens_per_second_of_engine"] = alone
        except UserError as error:
            raise typer.BadParameter(str(error)) from error
    if json is not None:
        write_json(json.stem, {"settings": settings, **figures}, json.parent)


if __name__ == "__main__":
    typer.run(main)
