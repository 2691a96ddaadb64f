"""Every benchmark runs, on a tiny random model, and writes what it says. No timing is asserted."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import decode, fill, head, overlap, sampling
from benchmarks.common import interleaved, medians
from benchmarks.vocabularies import grown_tokenizer
from gkv_jax import CacheSpec
from gkv_jax.models.llama import Llama
from gkv_jax.weights import LoadedModel
from tests.gkv_jax.tiny import byte_tokenizer, random_params, text_config


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    """A checkpoint (matrices ``[out, in]``) whose vocabulary is the 256 bytes and a few more."""
    config = text_config()
    params = random_params(config)
    params["layers"] = [jax.tree.map(np.transpose, layer) for layer in params["layers"]]
    return LoadedModel(config, params, byte_tokenizer())


def test_rounds_are_interleaved_and_the_first_is_thrown_away() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    samples = interleaved({"a": lambda: measure("a"), "b": lambda: measure("b")}, 3)
    assert "".join(order) == "abababab"
    assert samples == {"a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0]}
    assert medians(samples) == {"a": 5.0, "b": 6.0}


def test_head(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A vocabulary of 4096, of which the tokenizer has 700: tiles, and steps without a string."""
    monkeypatch.setattr(head, "FREE_TOKENS", 8)
    config = text_config(vocab_size=4096)
    model, tokenizer = Llama(config), grown_tokenizer(byte_tokenizer(), 700)
    result = head.measure(model, random_params(config), tokenizer, 1, 1)
    assert 0 < result["structural_steps"] <= result["steps"]
    assert 0 < result["head_fraction"] < 0.5
    head.report({"a tiny model": {1: result}})
    out = capsys.readouterr().out
    assert "structural steps" in out
    assert "a tiny model, B=1: full / masked, document" in out


def test_sampling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampling.main(batch=2, vocabulary=100, repetitions=1, folder=tmp_path)
    assert "plain / ours" in capsys.readouterr().out
    ms = json.loads((tmp_path / "sampling.json").read_text())["ms"]
    assert set(ms) == {f"{kind} {how}" for kind in sampling.KINDS for how in ("ours", "plain")}


def test_a_grown_tokenizer_is_a_tokenizer() -> None:
    small = byte_tokenizer()
    tokenizer = grown_tokenizer(small, 700)
    assert len(tokenizer) == 700
    text = "The quick brown fox {jumps: over} 1234 lazy dogs; naïve café."
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) < len(small.encode(text))
    assert max(tokens) > len(small)
    with pytest.raises(ValueError, match="size: 100000 tokens asked for"):
        grown_tokenizer(small, 100_000)


def test_decode(tiny: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [CacheSpec(sinks=2, window=126), CacheSpec(sinks=2, window=190)]
    decode.run(tiny, specs, [1, 2], 8, 1, tmp_path)
    results = json.loads((tmp_path / "decode.json").read_text())
    out = capsys.readouterr().out
    assert "ms/step" in out
    assert "device loop with 2+126" in out
    assert set(results["ratios"]) == {"2+126", "2+190"}
    assert results["environment"]["versions"]["jax"] == jax.__version__
    for batch in ("1", "2"):
        measured = results["batches"][batch]
        assert set(measured["ms_per_step"]) == {
            f"{engine} {kind}"
            for engine in ("device 2+126", "host 2+126", "device 2+190", "transformers")
            for kind in ("unguided", "guided")
        }
        assert set(measured["steps"].values()) == {7}
        assert measured["same_tokens"] == {"unguided": True, "guided": True}
    sizes = results["memory"]["cache_bytes_at"]
    assert sizes["500"] == sizes["50000"] == results["memory"]["cache_bytes"]


def test_overlap(tiny: LoadedModel) -> None:
    results = overlap.measure(tiny, [0.0, 2.0], tokens=4, repetitions=1)
    overlap.report(results)
    assert {tuple(by_fill) for by_fill in results.values()} == {(overlap.NO_MASK, "0", "2")}
    assert set(results) == {"device", "host"}


def test_fill(tiny: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill.run(tiny, slots=3, rounds=1, folder=tmp_path)
    assert "advance + fill, ms" in capsys.readouterr().out
    tasks = json.loads((tmp_path / "fill.json").read_text())["tasks"]
    assert {name: [*engines] for name, engines in tasks.items()} == {
        "object": ["llguidance", "xgrammar", "outlines"],
        "long pattern": ["llguidance", "xgrammar", "outlines"],
        "recursive EBNF": ["llguidance", "xgrammar"],
        "all three": ["llguidance", "xgrammar"],
    }
    for engines in tasks.values():
        for by_threads in engines.values():
            assert all(figure > 0 for each in by_threads.values() for figure in each.values())
