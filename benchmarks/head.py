"""``python -m benchmarks.head``: what reading only the legal part of the LM head saves.

The same requests in engines that read the head ``masked`` and ``full``, in turns: documents under an
object schema, and free text, where nothing can be saved. Two models: SmolLM2-135M with its weights,
and one of the shape of Gemma-3-270M with random weights, whose head of 262 144 tokens is 63 % of it.

Rows sample at temperature 1 with their own seeds, so that in a batch the strings and structures of
different rows fall together as they would.
"""

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
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
from benchmarks.vocabularies import grown_tokenizer
from gkv_jax import CacheSpec, Engine, Guide, Sampling, UserError
from gkv_jax.models.config import ModelConfig
from gkv_jax.models.llama import Llama
from gkv_jax.models.parameters import Parameter
from gkv_jax.models.protocol import Params
from gkv_jax.models.rope_config import RopeConfig
from gkv_jax.models.transformer import Transformer
from gkv_jax.request import Piece, Request
from gkv_jax.weights import LoadedModel, load_model
from gkv_jax.weights.parameters import tree_of

SPEC = CacheSpec(sinks=4, window=252)
LEAST_SPEEDUP = 1.3
"""Target for whole documents, the Gemma-3-270M shape."""
MOST_FREE = 1.02
"""Target for free text, where the masked head cannot help."""
FREE_TOKENS = 48
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "email": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "active": {"type": "boolean"},
        "role": {"enum": ["reader", "writer", "administrator"]},
        "scores": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 16},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "email", "age", "active", "role", "scores", "address"],
    "additionalProperties": False,
}
_PROMPT = [{"role": "user", "content": "Invent a user account and describe it as JSON."}]
_STORY = [{"role": "user", "content": "Write a long story about a ship and its crew."}]


def gemma_shaped(tokenizer: Any) -> tuple[Llama, Params, Any]:
    """A random model with the layers and the head of Gemma-3-270M, and a tokenizer as wide."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_layers=18,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        rms_norm_eps=1e-6,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        rope=RopeConfig(theta=1e6),
        bos_token_id=None,
        eos_token_ids=(tokenizer.eos_token_id,),
    )
    seeds = itertools.count()

    def make(leaf: Parameter) -> jax.Array:
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape)
        key = jax.random.key(next(seeds))
        return leaf.shape[-1] ** -0.5 * jax.random.normal(key, leaf.tree_shape)

    model = Llama(config)
    return model, tree_of(model, make), grown_tokenizer(tokenizer, 262_144)


def models(loaded: LoadedModel) -> dict[str, tuple[Transformer, Params, Any]]:
    """The two models by name."""
    return {
        "SmolLM2-135M": (loaded.model, loaded.params, loaded.tokenizer),
        "Gemma-3-270M shape": gemma_shaped(loaded.tokenizer),
    }


class Clock:
    """Takes the time, and how much of the head was read, at each step of a request."""

    def __init__(self, request: Request) -> None:
        """Must be made before the request is submitted."""
        self._request = request
        self.stamps: list[tuple[float, float]] = []
        request.sink = self._tick

    def _tick(self, piece: Piece | None) -> None:
        if piece is not None and piece.tokens:
            self.stamps.append((time.perf_counter(), self._request.head_read))

    def steps(self) -> list[tuple[float, float]]:
        """Seconds and share of the head read, of each step after the first."""
        pairs = zip(self.stamps, self.stamps[1:], strict=False)
        return [(t1 - t0, read1 - read0) for (t0, read0), (t1, read1) in pairs]


def measure_run(engine: Engine, *, guided: bool, batch: int) -> list[tuple[float, float]]:
    """The steps of a batch, by the clock of the row that began last.

    Raises:
      Exception: whatever ended a request early.
    """
    guide = Guide.json_schema(SCHEMA) if guided else None
    tokens = 256 if guided else FREE_TOKENS
    prompt = _PROMPT if guided else _STORY
    requests = [
        engine.prepare(prompt, guide, Sampling(max_tokens=tokens, temperature=1.0, seed=seed))
        for seed in range(batch)
    ]
    clock = Clock(requests[-1])
    for request in requests:
        engine.submit(request)
    for request in requests:
        result = request.result()
        if result.error is not None:
            raise result.error
    return clock.steps()


@contextlib.contextmanager
def engines(
    model: Transformer, params: Params, tokenizer: Any, batch: int
) -> Iterator[dict[str, Engine]]:
    """One that reads the head masked and one that reads it in full, on the same parameters."""
    with contextlib.ExitStack() as stack:
        yield {
            head: stack.enter_context(
                Engine(
                    model, params, tokenizer, cache=SPEC, slots=batch, head=head,
                    stop_token_ids=model.config.eos_token_ids,
                )
            )
            for head in ("masked", "full")
        }  # fmt: skip


def measure(
    model: Transformer, params: Params, tokenizer: Any, batch: int, repetitions: int
) -> dict[str, Any]:
    """Milliseconds per step by kind of text and head, over all steps and over structural ones.

    A structural step is one for which the masked engine reads less than half of the head; both
    engines generate the same tokens, so that steps can be told apart by their number.
    """
    runs: dict[str, list[tuple[float, float]]] = {}
    measures: dict[str, Callable[[], float]] = {}

    def add(name: str, run: Callable[[], list[tuple[float, float]]]) -> None:
        def mean_ms() -> float:
            runs[name] = run()
            return 1e3 * statistics.fmean(seconds for seconds, _ in runs[name])

        measures[name] = mean_ms

    with engines(model, params, tokenizer, batch) as ours:
        for guided, kind in ((True, "document"), (False, "free text")):
            for head, engine in ours.items():
                run = functools.partial(measure_run, engine, guided=guided, batch=batch)
                add(f"{kind} {head}", run)
        samples = interleaved(measures, repetitions)
    structural = [share < 0.5 for _, share in runs["document masked"]]
    ms = medians(samples)
    for head in ("masked", "full"):
        steps = runs[f"document {head}"]
        if len(steps) != len(structural):
            raise ValueError(f"{len(steps)} steps instead of {len(structural)}: the texts differ")
        of_structure = [s for (s, _), is_it in zip(steps, structural, strict=True) if is_it]
        ms[f"structural steps {head}"] = 1e3 * statistics.median(of_structure or [float("nan")])
    return {
        "ms_per_step": ms,
        "samples": samples,
        "steps": len(structural),
        "structural_steps": sum(structural),
        "head_fraction": statistics.fmean(share for _, share in runs["document masked"]),
    }


def report(results: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Print the table and the targets."""
    rows = []
    for name, by_batch in results.items():
        for batch, result in by_batch.items():
            ms = result["ms_per_step"]
            for kind in ("document", "structural steps", "free text"):
                masked, full = ms[f"{kind} masked"], ms[f"{kind} full"]
                count = {
                    "document": f"{result['steps']}",
                    "structural steps": f"{result['structural_steps']}",
                    "free text": f"{FREE_TOKENS - 1}",
                }[kind]
                cells = [f"{full:.1f}", f"{masked:.1f}", f"{full / masked:.2f}"]
                rows.append([f"{name}, B={batch}", kind, count, *cells])
    columns = ["model", "what", "steps", "full, ms/step", "masked, ms/step", "full / masked"]
    print_table("LM head: full and masked", columns, rows)
    for name, by_batch in results.items():
        for batch, result in by_batch.items():
            ms = result["ms_per_step"]
            where = f"{name}, B={batch}"
            if name != "SmolLM2-135M":
                print_verdict(
                    f"{where}: full / masked, document",
                    ms["document full"] / ms["document masked"],
                    least=LEAST_SPEEDUP,
                )
            print_verdict(
                f"{where}: masked / full, free text",
                ms["free text masked"] / ms["free text full"],
                most=MOST_FREE,
            )
            print(f"{where}: {100 * result['head_fraction']:.0f} % of the head read per step")


def main(
    batches: Annotated[str, typer.Option(help="batch sizes, comma-separated")] = "1,8",
    repetitions: Annotated[int, typer.Option(help="timed rounds", min=1)] = 3,
    only: Annotated[str, typer.Option(help="part of the model's name")] = "",
    model: Annotated[str, typer.Option(help="the real model: name, folder or file")] = (
        "smollm2-135m-instruct"
    ),
    folder: Annotated[Path, typer.Option(help="where JSON goes")] = RESULTS,
) -> None:
    """Time steps of documents and of free text with the LM head masked and in full."""
    warn_if_busy()
    try:
        loaded = load_model(model, dtype="float32")
    except UserError as error:
        raise typer.BadParameter(str(error)) from error
    sizes: Sequence[int] = [int(batch) for batch in batches.split(",")]
    results = {
        name: {batch: measure(*each, batch, repetitions) for batch in sizes}
        for name, each in models(loaded).items()
        if only.lower() in name.lower()
    }
    report(results)
    write_json("head", {"models": results}, folder)


if __name__ == "__main__":
    typer.run(main)
