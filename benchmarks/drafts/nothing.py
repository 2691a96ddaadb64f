"""``python -m benchmarks.drafts.nothing``: what drafts cost where there is nothing to draft.

Free text, sampled at temperature 1, which repeats itself by chance only: an engine without room for
drafts beside one with room, with lookup in the text switched on. Milliseconds per token from the
first token to the last.
"""

import functools
import time
from pathlib import Path
from typing import Annotated

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
from benchmarks.drafts.ours import MAX_DRAFTS, Served
from gkv_jax import CacheSpec, Engine, Sampling
from gkv_jax.weights import LoadedModel, load_model

PROMPTS = (
    "Write a long story about a ship and its crew.",
    "Explain how bread is made.",
    "Describe a walk through an old town.",
)
MOST = 1.03
"""Target: time with drafts to that without."""


def ms_per_token(engine: Engine, tokens: int, *, lookup: bool) -> float:
    """Of all prompts one after another, each with its own seed."""
    milliseconds, count = 0.0, 0
    for seed, prompt in enumerate(PROMPTS):
        sampling = Sampling(max_tokens=tokens, temperature=1.0, seed=seed, lookup=lookup)
        request = engine.prepare([{"role": "user", "content": prompt}], sampling=sampling)
        engine.submit(request)
        pieces = request.pieces()
        first = next(pieces)
        began = time.perf_counter()
        rest = sum(len(piece.tokens) for piece in pieces)
        milliseconds += 1e3 * (time.perf_counter() - began)
        count += rest
        assert first.tokens
        assert request.result().error is None
    return milliseconds / count


def run(loaded: LoadedModel, tokens: int, repetitions: int, folder: Path) -> None:
    """Measure, print, and write ``drafts_nothing.json`` to ``folder``."""
    warn_if_busy()
    served = Served.of(loaded)
    rows = []
    ratios = {}
    for name, each in (("float32", served), ("int8", served.int8)):
        spec = CacheSpec(sinks=4, window=252)
        make = functools.partial(
            Engine, each.model, each.params, each.tokenizer,
            slots=1, stop_token_ids=loaded.config.eos_token_ids,
        )  # fmt: skip
        with make(cache=spec) as without, make(cache=spec.with_drafts(MAX_DRAFTS)) as drafting:
            measures = {
                "without": functools.partial(ms_per_token, without, tokens, lookup=False),
                "lookup": functools.partial(ms_per_token, drafting, tokens, lookup=True),
            }
            ms = medians(interleaved(measures, repetitions))
        ratios[name] = ms["lookup"] / ms["without"]
        rows.append([name, f"{ms['without']:.1f}", f"{ms['lookup']:.1f}", f"{ratios[name]:.3f}"])
    print_table(
        "ms per token of text that does not repeat itself",
        ["weights", "no room for drafts", "lookup", "ratio"],
        rows,
    )
    for name, ratio in ratios.items():
        print_verdict(f"with drafts / without, {name}", ratio, most=MOST)
    write_json("drafts_nothing", {"ratios": ratios}, folder)


def main(
    model: Annotated[str, typer.Option(help="Registry name, folder or file.")] = (
        "smollm2-135m-instruct"
    ),
    tokens: Annotated[int, typer.Option(help="Most tokens of a text.")] = 96,
    repetitions: Annotated[int, typer.Option(help="Measurements of each.")] = 3,
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = RESULTS,
) -> None:
    """What drafts cost where there is nothing to draft."""
    run(load_model(model, dtype="float32"), tokens, repetitions, output)


if __name__ == "__main__":
    typer.run(main)
