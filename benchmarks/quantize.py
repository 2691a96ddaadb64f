"""``python -m benchmarks.quantize``: what int8 weights cost in quality, and what they save in time.

Quality: perplexity of a text by the model with float32 and with int8 weights, and how often both find
the same token most likely. Time: milliseconds per decode step of one token, and of eight with drafts
that are always wrong, free text from the engine's loop, prefill excluded.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
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
from gkv_jax import CacheSpec, Engine, Sampling
from gkv_jax.cache import init_cache
from gkv_jax.evaluate.texts import DEFAULT_TEXT, load_text
from gkv_jax.models.protocol import Params
from gkv_jax.models.transformer import Transformer
from gkv_jax.prefill import chunk_hidden
from gkv_jax.weights import LoadedModel, load_model

PROMPT = "Write a long story about a ship and its crew."
MOST_PERPLEXITY = 1.01
"""Target: perplexity with int8 weights to that with float32."""


class WrongDrafts:
    """As many guesses as there is room, none of which is ever right."""

    def __init__(self, token: int) -> None:
        """``token`` is one that the text never holds."""
        self._token = token

    def propose(self, output: Sequence[int], ahead: Sequence[int], limit: int) -> Sequence[int]:
        """See ``gkv_jax.DraftSource``."""
        return (self._token,) * limit


@functools.partial(jax.jit, static_argnames=("model",))
def scores(model: Transformer, params: Params, hidden: jax.Array, targets: jax.Array) -> Any:
    """Negative log-likelihoods ``[T]`` of ``targets``, and the most likely tokens ``[T]``."""
    logits = model.logits(params, hidden)
    own = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - own, logits.argmax(axis=1)


def read(model: Transformer, params: Params, tokens: np.ndarray) -> tuple[float, np.ndarray]:
    """Perplexity of a text, chunk by chunk through a full cache, and its most likely tokens."""
    spec = CacheSpec.full(len(tokens))
    cache = init_cache(spec, model, 1, jnp.dtype(jnp.float32))
    chunk, losses, best = spec.prefill_chunk, [], []
    for start in range(0, len(tokens) - chunk, chunk):
        at = np.int32(start)
        hidden, cache = chunk_hidden(
            params, cache, tokens[start : start + chunk], np.int32(0), at, np.int32(chunk),
            model=model, spec=spec,
        )  # fmt: skip
        loss, top = scores(model, params, hidden, tokens[start + 1 : start + chunk + 1])
        losses.append(np.asarray(loss))
        best.append(np.asarray(top))
    return float(np.exp(np.concatenate(losses).mean())), np.concatenate(best)


def quality(
    loaded: LoadedModel, weights: dict[str, Params], text: str, length: int
) -> dict[str, float]:
    """Perplexity by name, and ``same``: the share of positions with the same most likely token."""
    model = loaded.model
    tokens = np.asarray(loaded.tokenizer.encode(text, verbose=False), np.int32)
    found = {name: read(model, params, tokens[:length]) for name, params in weights.items()}
    same = float((found["float32"][1] == found["int8"][1]).mean())
    return {name: perplexity for name, (perplexity, _) in found.items()} | {"same": same}


def ms_per_step(engine: Engine, tokens: int, wide: bool) -> float:
    """Of free text in every slot, between the first and the last token of the last request."""
    drafts = [WrongDrafts(engine.model.vocab_size - 1)] * engine.slots if wide else None
    sampling = Sampling(max_tokens=tokens)
    results = engine.generate([PROMPT] * engine.slots, sampling=sampling, drafts=drafts)
    first = [engine.generate(PROMPT, sampling=Sampling(max_tokens=1))[0].stats["seconds"]]
    last = results[-1].stats
    return 1e3 * (last["seconds"] - first[0]) / (last["forwards"] - 1)


def run(
    loaded: LoadedModel,
    text: str,
    length: int,
    tokens: int,
    repetitions: int,
    folder: Path,
    *,
    batches: Sequence[int] = (1, 8),
) -> None:
    """Measure, print, and write ``quantize.json`` to ``folder``."""
    warn_if_busy()
    model, exact = loaded.model, loaded.params
    weights = {"float32": exact, "int8": jax.jit(model.quantize)(exact)}
    of_text = quality(loaded, weights, text, length)
    print_table(
        f"perplexity of {length} tokens",
        ["weights", "perplexity", "MB"],
        [
            [name, f"{of_text[name]:.3f}", f"{sum(x.nbytes for x in jax.tree.leaves(p)) / 1e6:.0f}"]
            for name, p in weights.items()
        ],
    )
    print(f"the same most likely token at {of_text['same']:.1%} of the positions")
    print_verdict(
        "perplexity, int8 / float32", of_text["int8"] / of_text["float32"], most=MOST_PERPLEXITY
    )
    spec = CacheSpec(sinks=4, window=252, max_drafts=7)
    measures, engines = {}, []
    for slots in batches:
        for name, params in weights.items():
            engine = Engine(
                model, params, loaded.tokenizer, cache=spec, slots=slots, verify="always"
            )
            engines.append(engine)
            for wide in (False, True):
                key = f"{name} B={slots} N={8 if wide else 1}"
                measures[key] = functools.partial(ms_per_step, engine, tokens, wide)
    ms = medians(interleaved(measures, repetitions))
    for engine in engines:
        engine.close()
    rows = [
        [shape, *(f"{ms[f'{name} {shape}']:.1f}" for name in weights),
         f"{ms[f'float32 {shape}'] / ms[f'int8 {shape}']:.2f}"]
        for shape in (f"B={slots} N={n}" for slots in batches for n in (1, 8))
    ]  # fmt: skip
    print_table("ms per step", ["step", *weights, "float32 / int8"], rows)
    write_json("quantize", {"quality": of_text, "ms_per_step": ms}, folder)


def main(
    model: Annotated[str, typer.Option(help="Registry name, folder or file.")] = (
        "smollm2-135m-instruct"
    ),
    length: Annotated[int, typer.Option(help="Tokens of the text.")] = 4096,
    tokens: Annotated[int, typer.Option(help="Tokens that are decoded.")] = 32,
    repetitions: Annotated[int, typer.Option(help="Measurements of each kind of step.")] = 5,
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = RESULTS,
) -> None:
    """What int8 weights cost in quality and save in time."""
    loaded = load_model(model, dtype="float32")
    run(loaded, load_text(DEFAULT_TEXT), length, tokens, repetitions, output)


if __name__ == "__main__":
    typer.run(main)
