"""``python -m benchmarks.perplexity``: what attention sinks are worth on real prose.

One text streams through a full cache, through sinks and a window, and through a window alone, of
the same size (StreamingLLM, arXiv 2309.17453). Only the ratios mean something: a small model's
perplexity on an old text is no measure of the model.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.common import RESULTS, print_table, print_verdict, write_json
from gkv_jax import CacheSpec, UserError
from gkv_jax.evaluate import perplexity, streaming_nll
from gkv_jax.evaluate.texts import DEFAULT_TEXT, load_text
from gkv_jax.models.llama import Llama
from gkv_jax.models.protocol import Decoder, Params
from gkv_jax.weights import load_model

LAST = 1024
SINKS = 4
MOST_LOSS = 1.10
"""Target: sinks and window stay within this factor of the full cache."""
LEAST_COLLAPSE = 2.0
"""What shows that the sinks are the reason: the window alone is worse by at least this factor."""


@dataclasses.dataclass(frozen=True)
class Score:
    """One cache on one text: perplexities over its end, and over all beyond the first window."""

    cache: str
    last: float
    beyond_window: float
    nll: NDArray[np.float64]


def specs(tokens: int, size: int) -> dict[str, CacheSpec]:
    """Full (for a text of ``tokens``), sinks + window, and window, the last two of ``size``."""
    return {
        "full": CacheSpec.full(tokens),
        f"{SINKS}+{size - SINKS}": CacheSpec(sinks=SINKS, window=size - SINKS),
        f"0+{size}": CacheSpec(sinks=0, window=size),
    }


def measure(
    model: Decoder, params: Params, tokens: list[int], size: int = 256, last: int = LAST
) -> list[Score]:
    """Scores of the three caches: full, sinks + window, window."""
    scores = []
    for name, spec in specs(len(tokens), size).items():
        nll = streaming_nll(model, params, tokens, spec)
        scores.append(Score(name, perplexity(nll[-last:]), perplexity(nll[size:]), nll))
    return scores


def plot(scores: list[Score], path: Path, width: int = 128) -> None:
    """Perplexity over the position in the text, a running mean of nats over ``width`` tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for score in scores:
        running = np.convolve(score.nll, np.full(width, 1 / width), mode="valid")
        axes.plot(np.arange(len(running)) + width, np.exp(running), label=score.cache, linewidth=1)
    axes.set(
        xlabel="position in the text (tokens)",
        ylabel=f"perplexity (mean of {width} tokens)",
        yscale="log",
    )
    axes.legend(title="sinks + window")
    axes.grid(alpha=0.3, which="both")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    print(f"written: {path}")


def report(scores: list[Score], text: str, last: int, folder: Path) -> None:
    """Print the table; write JSON and plot."""
    full, streaming, window = scores
    columns = ["cache", f"last {last}", "to full", "beyond the window", "to full"]
    rows = [
        [
            score.cache,
            f"{score.last:.2f}", f"{score.last / full.last:.3f}",
            f"{score.beyond_window:.2f}", f"{score.beyond_window / full.beyond_window:.3f}",
        ]
        for score in scores
    ]  # fmt: skip
    print_table(f"perplexity of {text}, {len(full.nll) + 1} tokens", columns, rows)
    print_verdict("sinks + window to full", streaming.last / full.last, most=MOST_LOSS)
    print_verdict("window alone to full", window.last / full.last, least=LEAST_COLLAPSE)
    results: dict[str, Any] = {
        "text": text,
        "tokens": len(full.nll) + 1,
        "last": last,
        "perplexity": {
            score.cache: {"last": score.last, "beyond_window": score.beyond_window}
            for score in scores
        },
        "ratio_to_full": {score.cache: score.last / full.last for score in scores},
    }
    write_json("perplexity", results, folder)
    plot(scores, folder / "perplexity.png")


def main(
    tokens: Annotated[int, typer.Option(help="length of the text", min=2)] = 4096,
    text: Annotated[str, typer.Option(help="a file, or a name in configs/texts")] = DEFAULT_TEXT,
    model: Annotated[str, typer.Option(help="name, folder, GGUF file or hub id")] = (
        "smollm2-135m-instruct"
    ),
    size: Annotated[int, typer.Option(help="tokens in each bounded cache", min=SINKS + 1)] = 256,
    folder: Annotated[Path, typer.Option(help="where JSON and plot go")] = RESULTS,
) -> None:
    """Stream a text through three caches and compare the perplexities."""
    try:
        loaded = load_model(model, dtype="float32")
        ids = loaded.tokenizer.encode(load_text(text), verbose=False)[:tokens]
    except UserError as error:
        raise typer.BadParameter(str(error)) from error
    if len(ids) < min(tokens, size + 2):
        raise typer.BadParameter(f"--text has {len(ids)} tokens; {size + 2} are needed")
    decoder = Llama(loaded.config)
    last = min(LAST, len(ids) - size - 1)
    scores = measure(decoder, decoder.from_checkpoint(loaded.params), ids, size, last)
    report(scores, text, last, folder)


if __name__ == "__main__":
    typer.run(main)
