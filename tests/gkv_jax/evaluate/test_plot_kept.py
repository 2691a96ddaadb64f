"""The picture shows what the report says, at every size, and needs no global state."""

import sys
from pathlib import Path

import numpy as np
import pytest

from gkv_jax import UserError
from gkv_jax.cache.report import CacheReport, HeadReport, LayerReport
from gkv_jax.evaluate.plot_kept import plot_kept

EVICTED, RING, KEPT, SINKS = ((233,) * 3, (0, 158, 115), (0, 114, 178), (213, 94, 0))


def sample(
    length: int, layers: int = 2, heads: int = 3, window: int = 8, kept: int = 5
) -> CacheReport:
    rng = np.random.default_rng(length)

    def head() -> HeadReport:
        middle = np.arange(2, length - window + 1)
        chosen = np.sort(rng.choice(middle, min(kept, len(middle)), replace=False))
        ring = np.arange(max(2, length - window + 1), length)
        return HeadReport(*(each.astype(np.int32) for each in (np.arange(2), chosen, ring)))

    layer = [
        LayerReport("snapkv", length, 16, 4096, tuple(head() for _ in range(heads)))
        for _ in range(layers)
    ]
    return CacheReport("snapkv", length, 4096 * layers, tuple(layer))


def pixels(report: CacheReport, **options: list[int]) -> np.ndarray:
    """The raster, ``[lines,columns,3]`` of 0 to 255."""
    figure = plot_kept(report, **options)
    return np.round(255 * np.asarray(figure.axes[0].images[0].get_array())).astype(int)


def test_a_short_text_has_a_column_for_each_token() -> None:
    report = sample(50)
    raster = pixels(report)
    assert raster.shape == (2 * 3 + 1, 50, 3)  # a white line between the layers
    assert (raster[3] == 255).all()
    for line, (layer, head) in {0: (0, 0), 2: (0, 2), 5: (1, 1)}.items():
        own = report.layers[layer].heads[head]
        for position in range(50):
            colour = EVICTED
            for name, each in (("sinks", SINKS), ("kept", KEPT), ("ring", RING)):
                colour = each if position in getattr(own, name) else colour
            assert tuple(raster[line, position]) == colour


def test_a_long_text_shows_single_tokens_too() -> None:
    report = sample(32_000, layers=30)
    raster = pixels(report)
    assert raster.shape[0] == 30 * 3 + 29
    width = raster.shape[1]
    assert width < 2000
    kept = report.layers[7].heads[1].kept
    shown = raster[7 * 4 + 1]
    assert tuple(shown[0]) == SINKS
    assert all(tuple(shown[at * width // 32_000]) != EVICTED for at in kept)
    assert (shown == EVICTED).all(axis=1).sum() > width - 10
    # The fuller a column, the stronger.
    dense = sample(32_000, layers=1, heads=1, kept=8_000)
    assert (
        np.ptp(pixels(dense), axis=2).mean() > np.ptp(pixels(sample(32_000, 1, 1)), axis=2).mean()
    )


def test_layers_may_be_chosen() -> None:
    report = sample(60, layers=5)
    chosen = pixels(report, layers=[4, 1])
    everything = pixels(report)
    np.testing.assert_array_equal(chosen[:3], everything[16:19])
    np.testing.assert_array_equal(chosen[4:], everything[4:7])


def test_it_says_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kept.png"
    figure = plot_kept(sample(1000), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,), (legend,) = figure.axes, figure.legends
    title = axes.get_title(loc="left")
    assert title == "snapkv: 14 of 1,000 tokens held per head, 8.0 KiB in all"
    assert axes.get_xlabel() == "position in the text (tokens)"
    assert axes.get_ylabel() == "layer (3 KV heads each)"
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["sinks", "kept by score", "recent window", "evicted"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"]


def test_no_global_state_of_matplotlib_is_touched() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot_kept(sample(30))
    assert dict(matplotlib.rcParams) == before
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )


def test_without_matplotlib_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r'pip install "gkv_jax\[bench\]"'):
        plot_kept(sample(30))


@pytest.mark.parametrize(
    ("length", "layers", "words"),
    [(0, None, "empty text"), (30, [2], "layers has 2"), (30, [], "layers is empty")],
)
def test_what_cannot_be_drawn_is_refused(length: int, layers: list[int] | None, words: str) -> None:
    report = sample(30) if length else CacheReport("window", 0, 0, ())
    with pytest.raises(UserError, match=words):
        plot_kept(report, layers=layers)
