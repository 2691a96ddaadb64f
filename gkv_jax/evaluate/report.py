"""Tables and plots of the quality of caches."""

import dataclasses
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gkv_jax.evaluate.quality import BIN, CacheQuality


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, the names of the columns, and rows of texts; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """As Markdown, title included."""
        rule = ["---"] + ["--:"] * (len(self.columns) - 1)
        lines = [f"| {' | '.join(cells)} |" for cells in (self.columns, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines])

    def print(self) -> None:
        """On standard output."""
        from rich.console import Console
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*row)
        # Not the terminal's width: a piped table must not be cut at 80 columns.
        Console(width=120).print(table)


def tables(quality: CacheQuality) -> list[Table]:
    """One table for each measure that has results."""
    made = [_retrieval(quality), _fidelity(quality), _perplexity(quality), _reference(quality)]
    return [table for table in made if table.rows]


def notes(quality: CacheQuality) -> list[str]:
    """What a reader of the tables must know: tasks left out."""
    return [
        f"{task} at {length} tokens is left out: the full cache scores {100 * score:.0f} %"
        for (task, length), score in quality.unsolved.items()
    ]


def write(quality: CacheQuality, folder: Path, model: str) -> list[Path]:
    """Write ``cache-quality.json`` and ``.md``, and the plots; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / "cache-quality.json", folder / "cache-quality.md"
    circumstances = {"model": model, "environment": _environment()}
    data.write_text(json.dumps(circumstances | quality.to_json(), indent=1) + "\n", "utf-8")
    parts = [table.markdown() for table in tables(quality)] + notes(quality)
    text.write_text("\n\n".join(parts) + "\n", "utf-8")
    return [data, text, *plot_grids(quality, folder), *plot_perplexity(quality, folder)]


def plot_grids(quality: CacheQuality, folder: Path) -> list[Path]:
    """For each task that the full cache solves, ``<task>.png``: scores by depth and length."""
    plan = quality.plan
    paths = []
    for task in plan.tasks:
        lengths = [each for each in plan.lengths if (task, each) not in quality.unsolved]
        found = {cell: v["score"] for cell, v in quality.find("retrieval", task=task).items()}
        if lengths:
            paths.append(folder / f"{task}.png")
            caches = [("full", None), *plan.others]
            grids = {
                _label(policy, budget): np.array(
                    [
                        [
                            next(
                                (
                                    score
                                    for cell, score in found.items()
                                    if (cell.policy, cell.budget) == (policy, budget)
                                    and (cell.length, cell.depth) == (length, depth)
                                ),
                                np.nan,
                            )
                            for length in lengths
                        ]
                        for depth in plan.depths
                    ]
                )
                for policy, budget in caches
            }
            _draw_grids(grids, lengths, plan.depths, f"{task}: score", paths[-1])
    return paths


def plot_perplexity(quality: CacheQuality, folder: Path) -> list[Path]:
    """``perplexity.png``: over the position in the text."""
    found = quality.find("perplexity")
    if not found:
        return []
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for cell, values in found.items():
        curve = np.exp(values["curve"])
        label = _label(cell.policy, cell.budget)
        axes.plot((np.arange(len(curve)) + 0.5) * BIN, curve, label=label, linewidth=1)
    axes.set(
        xlabel="position in the text (tokens)",
        ylabel=f"perplexity (mean of {BIN} tokens)",
        yscale="log",
    )
    axes.legend(title="cache and budget", fontsize="small")
    axes.grid(alpha=0.3, which="both")
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter("{x:g}")
    path = folder / "perplexity.png"
    figure.savefig(path, dpi=150)
    return [path]


def _draw_grids(
    grids: dict[str, np.ndarray],
    lengths: Sequence[int],
    depths: Sequence[float],
    title: str,
    path: Path,
) -> None:
    """One heat map ``[depths, lengths]`` for each cache."""
    from matplotlib.figure import Figure

    columns = min(4, len(grids))
    rows = -(-len(grids) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.2 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat[len(grids) :]:
        panel.axis("off")
    for panel, (name, grid) in zip(axes.flat, grids.items(), strict=False):
        panel.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for (row, column), score in np.ndenumerate(grid):
            if not np.isnan(score):
                colour = "white" if score < 0.6 else "black"
                text = f"{100 * score:.0f}"
                panel.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
        panel.set_title(name, fontsize=9)
        panel.set_xticks(range(len(lengths)), list(map(str, lengths)), fontsize=8)
        panel.set_yticks(range(len(depths)), [f"{100 * d:.0f} %" for d in depths], fontsize=8)
    figure.supxlabel("length of the prompt (tokens)", fontsize=9)
    figure.supylabel("depth of the answer", fontsize=9)
    figure.suptitle(f"{title}, %", fontsize=10)
    figure.savefig(path, dpi=150)


def _retrieval(quality: CacheQuality) -> Table:
    plan = quality.plan
    kinds = [
        (task, length)
        for task in plan.tasks
        for length in plan.lengths
        if (task, length) not in quality.unsolved
    ]
    rows = []
    for policy, budget in [("full", None), *plan.others] if kinds else []:
        scores = [quality.score(policy, budget, *kind) for kind in kinds]
        cells = ["-" if score is None else f"{100 * score:.0f}" for score in scores]
        rows.append([_label(policy, budget), *cells])
    count = plan.samples * len(plan.depths)
    columns = ["cache", *(f"{task} {length}" for task, length in kinds)]
    return Table(f"right answers, %, of {count} prompts a column", columns, rows)


def _fidelity(quality: CacheQuality) -> Table:
    plan = quality.plan
    rows = [
        [
            _label(cell.policy, cell.budget), str(cell.length),
            f"{values['common_prefix']:.1f}", f"{100 * values['equal']:.1f}",
            f"{values['kl']:.2g}", f"{100 * values['attention_held']:.1f}",
        ]
        for cell, values in quality.find("fidelity").items()
    ]  # fmt: skip
    columns = ["cache", "length", "common prefix", "equal, %", "KL, nats", "attention held, %"]
    title = f"against the full cache's continuation, {plan.continuation} tokens"
    return Table(f"{title}, mean of {plan.prompts} prompts", columns, rows)


def _perplexity(quality: CacheQuality) -> Table:
    found = quality.find("perplexity")
    full = next((v for cell, v in found.items() if cell.policy == "full"), None)
    rows = [
        [
            _label(cell.policy, cell.budget), str(values["tokens"]), f"{values['all']:.2f}",
            "-" if full is None else f"{_to_full(values, full):.3f}",
            str(values["part"]), f"{values['first']:.2f}", f"{values['last']:.2f}",
            "-" if values["afresh"] is None else f"{values['afresh']:.2f}",
        ]
        for cell, values in found.items()
    ]  # fmt: skip
    columns = [
        "cache", "tokens", "all", "to full", "a part", "first part", "last part", "afresh",
    ]  # fmt: skip
    title = "perplexity of a text that streams; parts lie beyond the budget"
    return Table(f"{title}; ratios to full over the tokens of both", columns, rows)


def _to_full(values: dict[str, Any], full: dict[str, Any]) -> float:
    """Ratio of the perplexities over the whole bins of the curves that both have."""
    shared = max(1, (min(values["tokens"], full["tokens"]) - 1) // BIN)
    own, other = (np.mean(each["curve"][:shared]) for each in (values, full))
    return float(np.exp(own - other))


def _reference(quality: CacheQuality) -> Table:
    rows = [
        [
            _label(cell.policy, cell.budget), str(cell.length),
            f"{values['streamed']:.4f}", f"{values['dense']:.4f}", f"{values['most']:.1e}",
        ]
        for cell, values in quality.find("reference").items()
    ]  # fmt: skip
    columns = ["cache", "tokens", "streamed", "dense", "most, nats a token"]
    return Table("perplexity through the cache and by dense, masked attention", columns, rows)


def _label(policy: str, budget: int | None) -> str:
    return policy if budget is None else f"{policy} {budget}"


def _environment() -> dict[str, object]:
    import jax

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "devices": [f"{device.platform}: {device.device_kind}" for device in jax.devices()],
        "versions": {
            name: importlib.metadata.version(name) for name in ("gkv_jax", "jax", "jaxlib", "numpy")
        },
    }
