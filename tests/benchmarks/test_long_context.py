"""The long-context benchmark runs, and its caches are as a text would leave them. No timing is asserted."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer

from benchmarks import long_context
from benchmarks.long_context import bounded_specs, filled_cache, growing_specs
from gkv_jax import CacheSpec
from gkv_jax.cache import init_cache
from gkv_jax.cache.segments import ranks_of
from gkv_jax.models.llama import Llama
from gkv_jax.prefill import read_prompt
from gkv_jax.weights import LoadedModel
from pallas_kernels.decode_attention.xla import visible
from tests.gkv_jax.tiny import byte_tokenizer, random_params, text_config

SIZE, POSITION = 64, 96
# One layer: compiling takes longer than all else.
CONFIG = text_config(num_layers=1)
MODEL, PARAMS = Llama(CONFIG), random_params(CONFIG)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return LoadedModel(MODEL, PARAMS, byte_tokenizer())


def test_bounded_caches_are_of_equal_size() -> None:
    for name, spec in bounded_specs(1024).items():
        assert spec.total == 1024, name
        assert 1024 <= spec.capacity < 1024 + long_context.INTERVAL + 8, name
        assert (spec.evictor is not None) == ("every" in name), name
        assert f"every {spec.interval}" in name or spec.evictor is None, name


@pytest.mark.parametrize(
    "name",
    [
        "snapkv",
        "h2o every 32",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("full", "window")),
    ],
)
def test_a_filled_cache_holds_what_a_text_would_leave(name: str) -> None:
    spec = (bounded_specs(SIZE) | growing_specs(SIZE, POSITION + 32))[name]
    filled = filled_cache(
        np.int32(POSITION), spec=spec, model=MODEL, batch=1, dtype=jnp.dtype(jnp.float32)
    )
    read = init_cache(spec, MODEL, 1, jnp.dtype(jnp.float32))
    tokens = np.random.default_rng(0).integers(0, 256, POSITION).tolist()
    read = read_prompt(PARAMS, read, tokens, 0, model=MODEL, spec=spec)
    assert jax.tree.map(jnp.shape, filled) == jax.tree.map(jnp.shape, read)
    next_pos = jnp.array([[POSITION]], jnp.int32)
    seen = [
        np.asarray(visible(c.slots[0].slot_pos, next_pos, prefix=spec.prefix, window=spec.reach))
        for c in (filled, read)
    ]
    np.testing.assert_array_equal(*seen)
    held = [np.where(seen[0][0, 0, 0], c.slots[0].slot_pos[0], -1) for c in (filled, read)]
    np.testing.assert_array_equal(*held)
    ranks = [ranks_of(spec, c.slots[0], next_pos) for c in (filled, read)]
    np.testing.assert_array_equal(*ranks)
    if spec.kept:
        kept = np.asarray(filled.layers[0].kept_pos)
        assert (np.diff(kept) > 0).all()
        assert spec.sinks <= kept.min()
        assert kept.max() <= POSITION - spec.window


def check_run(loaded: LoadedModel, growing: set[str], folder: Path) -> None:
    long_context.run(loaded, SIZE, [64, 256], 32, 2, 1, folder)
    results = json.loads((folder / "long_context.json").read_text())
    names = set(results["caches"])
    assert set(results["ms_per_step"]) == names | growing
    for name, sizes in results["cache_bytes"].items():
        assert (sizes["64"] == sizes["256"]) == (name in names)
    assert all(at["256"] > 0 for at in results["temporary_bytes"].values())
    assert results["ratios"]["to_window"]["window"] == 1
    assert (folder / "long_context.png").stat().st_size > 0


def test_run(
    tiny: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    some = {name: bounded_specs(SIZE)[name] for name in ("window", "tova every 1")}
    monkeypatch.setattr(long_context, "bounded_specs", lambda size: some)
    monkeypatch.setattr(
        long_context, "growing_specs", lambda size, tokens: {"full": CacheSpec.full(tokens)}
    )
    check_run(tiny, {"full"}, tmp_path)
    out = capsys.readouterr().out
    assert "tova every 1: time at 256 over 64" in out
    assert "window: most bytes over least: 1.00 (meets" in out


@pytest.mark.full
def test_run_with_every_cache(tiny: LoadedModel, tmp_path: Path) -> None:
    check_run(tiny, {"full", "quest"}, tmp_path)


@pytest.mark.parametrize(
    ("positions", "steps", "message"),
    [
        ("1024", 8, "multiple of 32"),
        ("1000,1024", 32, "from 1024"),
        ("1040", 32, "multiples of 32"),
    ],
)
def test_options_that_would_mislead_are_refused(positions: str, steps: int, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        long_context.main(positions=positions, steps=steps)
