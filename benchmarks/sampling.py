"""``python -m benchmarks.sampling``: ``masked_sample`` beside what one would write without it.

The plain version unpacks the mask, then takes ``argmax``, or ``jax.random.categorical`` of the logits
over the temperature, after ``lax.top_k`` where the rows keep the k most likely tokens.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benchmarks.common import RESULTS, interleaved, medians, print_table, warn_if_busy, write_json
from pallas_kernels.masked_sample import Rows, masked_sample

TOP_K = 50
KINDS = {"greedy": (0.0, 0), "temperature": (0.8, 0), f"top-k {TOP_K}": (0.8, TOP_K)}


def plain(logits: jax.Array, words: jax.Array, key: jax.Array, kind: str) -> jax.Array:
    """One token for each of ``logits [B,N,V]`` under ``words [B,N,W]``."""
    temperature, top_k = KINDS[kind]
    bits = (words[..., None] >> jnp.arange(32)[None, None, None, :]) & 1
    legal = bits.reshape(*words.shape[:-1], -1)[..., : logits.shape[-1]] != 0
    logits = jnp.where(legal, logits, -jnp.inf)
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)
    if top_k:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return jax.random.categorical(key, logits / temperature)


def measures(batch: int, vocab_size: int) -> dict[str, Callable[[], float]]:
    """Milliseconds of one call, by kind and version; half of the tokens are legal."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 3, (batch, 1, vocab_size)), jnp.float32)
    words = jnp.asarray(rng.integers(-(2**31), 2**31, (batch, 1, -(-vocab_size // 32)), np.int32))
    enabled, positions = jnp.ones((2, batch, 1), jnp.int32)
    found: dict[str, Callable[[], float]] = {}

    def add(name: str, function: Any, *operands: Any) -> None:
        run = jax.jit(function)

        def measure() -> float:
            began = time.perf_counter()
            run(*operands).block_until_ready()
            return 1e3 * (time.perf_counter() - began)

        found[name] = measure

    for kind, (temperature, top_k) in KINDS.items():
        rows = Rows(
            temperature=jnp.full(batch, temperature, jnp.float32),
            top_k=jnp.full(batch, top_k, jnp.int32),
            top_p=jnp.ones(batch, jnp.float32),
            min_p=jnp.zeros(batch, jnp.float32),
            seed=jnp.arange(batch, dtype=jnp.uint32),
        )
        add(f"{kind} ours", masked_sample, logits, words, enabled, positions, rows)
        key = jax.random.key(0)
        add(f"{kind} plain", lambda *a, kind=kind: plain(*a, kind), logits, words, key)
    return found


def main(
    batch: Annotated[int, typer.Option(help="rows", min=1)] = 8,
    vocabulary: Annotated[int, typer.Option(help="tokens", min=TOP_K)] = 49_152,
    repetitions: Annotated[int, typer.Option(help="timed rounds", min=1)] = 50,
    folder: Annotated[Path, typer.Option(help="where JSON goes")] = RESULTS,
) -> None:
    """Time sampling of a batch, in turns."""
    warn_if_busy()
    ms = medians(interleaved(measures(batch, vocabulary), repetitions))
    rows = [
        [kind, f"{ms[f'{kind} plain']:.2f}", f"{ms[f'{kind} ours']:.2f}",
         f"{ms[f'{kind} plain'] / ms[f'{kind} ours']:.2f}"]
        for kind in KINDS
    ]  # fmt: skip
    columns = ["rows", "plain, ms", "masked_sample, ms", "plain / ours"]
    print_table(f"sampling, B={batch}, V={vocabulary}", columns, rows)
    write_json("sampling", {"batch": batch, "vocabulary": vocabulary, "ms": ms}, folder)


if __name__ == "__main__":
    typer.run(main)
