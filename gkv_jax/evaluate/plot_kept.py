"""A picture of what a cache holds of a text."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gkv_jax.cache.report import CacheReport, HeadReport
from gkv_jax.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of Okabe and Ito's palette, which the colour-blind can tell apart; later ones are drawn over earlier.
_COLOURS = {"ring": "#009E73", "kept": "#0072B2", "sinks": "#D55E00"}
_LABELS = {"sinks": "sinks", "kept": "kept by score", "ring": "recent window"}
_EVICTED = "#E9E9E9"
_COLUMNS = 640  # of the raster, at most; longer texts share a column among several tokens
_FAINTEST = 0.35  # how much colour a column has that holds a single token of its many


def check_format(path: str | Path | None) -> None:
    """Raise UserError if a picture could not be written there: for callers with work to do before."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError('pictures need matplotlib: pip install "gkv_jax[bench]"') from error
    formats = sorted(Figure().canvas.get_supported_filetypes())
    if path is not None and Path(path).suffix[1:].lower() not in formats:
        raise UserError(f"path {path}: its suffix must be one of {', '.join(formats)}")


def plot_kept(
    report: CacheReport,
    path: str | Path | None = None,
    *,
    layers: Sequence[int] | None = None,
) -> "Figure":
    """Draw which tokens of the text each KV head of each layer can still see.

    The text runs from left to right; layers lie below one another, with one line for each KV head.
    A column stands for several tokens where the text is longer than the picture is wide, and is the
    paler, the fewer of them are left.

    Args:
      report: from ``gkv_jax.cache.report``.
      path: where to write the picture, in the format of the suffix (``.png``, ``.svg``, ``.pdf``);
        None to write nothing. Its folder is made if need be.
      layers: indices of the layers to draw, in this order; None for all.

    Returns:
      The matplotlib figure. It belongs to no window and to no global state.

    Raises:
      UserError: matplotlib is not installed, the path has no suffix that it can write, the text is
        empty, or a layer does not exist.
    """
    check_format(path)
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    chosen = _chosen(report, layers)
    raster, middles = _raster(report, chosen)
    height = float(np.clip(1.5 + 0.06 * len(raster), 2.6, 14.0))
    figure = Figure(figsize=(9.0, height), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(
        raster,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, report.text_length - 0.5, len(raster), 0),
    )
    _label(axes, report, chosen, middles)
    present = [name for name in _LABELS if _holds(report, chosen, name)]
    handles = [Patch(color=_COLOURS[name], label=_LABELS[name]) for name in present]
    if any(max(report.layers[layer].evicted) for layer in chosen):
        handles.append(Patch(color=_EVICTED, label="evicted"))
    figure.legend(
        handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=8
    )
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def _label(axes: "Axes", report: CacheReport, chosen: list[int], middles: list[float]) -> None:
    """Ticks, labels and title; ``middles`` as from ``_raster``."""
    shown = np.unique(np.linspace(0, len(chosen) - 1, min(len(chosen), 32)).round().astype(int))
    axes.set_yticks([middles[i] for i in shown], [str(chosen[i]) for i in shown], fontsize=7)
    axes.locator_params(axis="x", nbins=9, integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(-0.5, report.text_length - 0.5)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    heads = max(len(report.layers[layer].heads) for layer in chosen)
    axes.set_xlabel("position in the text (tokens)")
    axes.set_ylabel("layer" if heads == 1 else f"layer ({heads} KV heads each)")
    axes.set_title(_title(report, chosen), fontsize=10, loc="left")


def _chosen(report: CacheReport, layers: Sequence[int] | None) -> list[int]:
    if report.text_length == 0:
        raise UserError("report is of an empty text; there is nothing to draw")
    chosen = list(range(len(report.layers)) if layers is None else layers)
    for layer in chosen:
        if not 0 <= layer < len(report.layers):
            raise UserError(f"layers has {layer}; the report has 0 to {len(report.layers) - 1}")
    if not chosen:
        raise UserError("layers is empty; name one at least, or leave it out for all")
    return chosen


def _raster(report: CacheReport, chosen: list[int]) -> tuple[NDArray[np.float64], list[float]]:
    """The picture, ``[lines,columns,3]``, and the line in the middle of each layer's band."""
    width = min(report.text_length, _COLUMNS)
    gap = np.ones((1, width, 3))
    lines: list[NDArray[np.float64]] = []
    middles = []
    for layer in chosen:
        heads = report.layers[layer].heads
        middles.append(sum(map(len, lines)) + len(heads) / 2)
        lines += [_line(head, report.text_length, width)[None] for head in heads]
        lines.append(gap)
    return np.concatenate(lines[:-1]), middles


def _line(head: HeadReport, length: int, width: int) -> NDArray[np.float64]:
    """One KV head, ``[columns,3]``."""
    column = np.arange(length) * width // length
    tokens = np.bincount(column, minlength=width)
    line = np.tile(_rgb(_EVICTED), (width, 1))
    left = np.bincount(column[head.held], minlength=width) / tokens
    # More than in proportion: a single token must be seen.
    strength = (_FAINTEST + (1 - _FAINTEST) * left)[:, None]
    for name, colour in _COLOURS.items():
        has = np.unique(column[getattr(head, name)])
        share = (
            1.0 if name == "sinks" else strength[has]
        )  # sinks are few, and where they are is known
        line[has] = (1 - share) * _rgb(_EVICTED) + share * _rgb(colour)
    return line


def _rgb(colour: str) -> NDArray[np.float64]:
    return np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])


def _holds(report: CacheReport, chosen: list[int], name: str) -> bool:
    return any(len(getattr(head, name)) for i in chosen for head in report.layers[i].heads)


def _title(report: CacheReport, chosen: list[int]) -> str:
    live = [count for layer in chosen for count in report.layers[layer].live]
    held = f"{min(live):,}" if min(live) == max(live) else f"{min(live):,} to {max(live):,}"
    return (
        f"{report.policy}: {held} of {report.text_length:,} tokens held per head, "
        f"{_size(report.nbytes)} in all"
    )


def _size(nbytes: int) -> str:
    """Bytes in the unit that suits them."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} bytes"
