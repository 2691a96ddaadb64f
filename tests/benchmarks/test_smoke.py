"""Every benchmark runs, on a tiny random model, and writes what it says. No timing is asserted."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import decode, fill, head, overlap, quantize, sampling
from benchmarks.common import interleaved, medians
from benchmarks.drafts import __main__ as drafts
from benchmarks.drafts import nothing, ours, trees
from benchmarks.drafts.documents import closed, guide_of
from benchmarks.drafts.peers import LLAMA_CPP, Peer
from benchmarks.drafts.self_draft import self_draft
from benchmarks.maskbench.problems import Problem
from benchmarks.vocabularies import grown_tokenizer
from gkv_jax import CacheSpec, UserError
from gkv_jax.models.llama import Llama
from gkv_jax.weights import LoadedModel
from tests.gkv_jax.tiny import STOP, byte_tokenizer, random_params, text_config


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    """A model whose vocabulary is the 256 bytes and a few more."""
    config = text_config()
    return LoadedModel(Llama(config), random_params(config), byte_tokenizer())


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


def test_quantize(tiny: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "The quick brown fox. " * 20
    quantize.run(tiny, text, 300, tokens=4, repetitions=1, folder=tmp_path, batches=[1])
    assert "float32 / int8" in capsys.readouterr().out
    found = json.loads((tmp_path / "quantize.json").read_text())
    assert found["quality"]["same"] > 0.8
    assert len(found["ms_per_step"]) == 4


def test_nothing_to_draft(tiny: LoadedModel, tmp_path: Path) -> None:
    nothing.run(tiny, tokens=4, repetitions=1, folder=tmp_path)
    ratios = json.loads((tmp_path / "drafts_nothing.json").read_text())["ratios"]
    assert set(ratios) == {"float32", "int8"}


PEER = """
import json, sys
print(json.dumps({"versions": {"peer": "1"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    assert request["prompt"] and request["max_tokens"] == 40
    if request["schema"]["title"] == "fatal":
        break
    answer = {"text": '{"kind":"a"}', "tokens": [1, 2], "finished": True, "forwards": 3}
    print(json.dumps(answer | {"first_seconds": 1.0, "seconds": 2.0}), flush=True)
"""
"""Speaks as ``serving`` says, and dies of a schema."""


def test_drafts(
    tiny: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    problems = [
        Problem(name, schema, ())
        for name, schema in {
            "list": {"type": "array"},
            "fatal": _kind("fatal"),
            "impossible": {"type": "object", "minProperties": 1, "maxProperties": 0},
            "long": _kind("x" * 400),
            "plain": _kind("plain"),
            "enough": _kind("enough"),
        }.items()
    ]
    names = ["off", "verify", "force", "lookup"]
    served = ours.Served.of(tiny)

    def run(resume: bool) -> dict[str, Any]:
        with Peer([sys.executable, "-c", PEER]) as peer:
            peers = {LLAMA_CPP: peer}
            drafts.run(served, problems, 2, 40, [1], names, tmp_path, peers=peers, resume=resume)
        results: dict[str, Any] = json.loads((tmp_path / "drafts.json").read_text())
        return results

    results = run(resume=False)
    out = capsys.readouterr().out
    assert "forwards saved, verify, B=1" in out
    assert "time to llama.cpp, force, B=1" in out
    assert results["documents"] == ["fatal", "plain"]
    assert results["peers"] == {"llama.cpp": {"peer": "1"}}
    errors = {where: [*documents] for where, documents in results["errors"].items() if documents}
    assert errors == {"B=1 llama.cpp": ["fatal"]}
    figures = results["figures"]["1"]
    assert list(figures) == [*names, "llama.cpp"]
    for name in names:
        assert figures[name]["finished"] == figures[name]["valid"] == 2
        if name != "force":
            assert figures[name]["same_tokens"] == 2
    assert figures["off"]["forwards"] == figures["off"]["tokens"] + 2  # the stop tokens
    assert figures["off"]["drafts"] == {}
    assert (figures["llama.cpp"]["valid"], figures["llama.cpp"]["spent"]) == (1, 2.0)
    assert results["ratios"]["1"]["verify"]["to llama.cpp"]["documents"] == 1
    # Nothing is measured again, not even by the peer.
    assert run(resume=True) | {"peers": {}, "environment": {}} == (
        results | {"peers": {}, "environment": {}}
    )
    outputs = trees.read_outputs(tmp_path / "drafts.jsonl", STOP)
    assert sum(len(output.tokens) for output in outputs) == figures["off"]["forwards"]
    _check_replay(served, outputs)


def _check_replay(served: ours.Served, outputs: list[trees.Output]) -> None:
    """With bytes for tokens, ``{"kind":"`` and ``"}`` are forced, and the stop token is never drafted."""
    vocab_size = served.model.vocab_size
    replayed = []
    with served.engine(1, 128) as engine:
        for output in outputs:
            matcher = engine.compiler.compile(guide_of(output.schema)).matcher([STOP])
            replayed.append((output, [*trees.replay(matcher, output, vocab_size)]))
    for _, places in replayed:
        assert [place.forced is None for place in places] == [False] * 9 + [
            True,
            False,
            False,
            True,
        ]
        assert all(place.mask.sum() == 1 for place in places if place.forced is not None)
    # 9 + the letter, ``"}`` + the stop token; the prompt does not tell the letter.
    assert trees.of_text(replayed, 15)["chain"] == f"{13 / 2:.3f}"


def test_closed_objects_have_what_is_mentioned() -> None:
    schema = {
        "properties": {"properties": {"items": {"properties": {}}}, "open": {"type": "object"}},
        "anyOf": [{"properties": {"a": True}, "additionalProperties": {}}],
        "$defs": {"a": {"properties": {"b": {"enum": [{"properties": {}}]}}}},
    }
    assert closed(schema) == {
        "properties": {
            "properties": {"items": {"properties": {}, "additionalProperties": False}},
            "open": {"type": "object"},
        },
        "anyOf": [{"properties": {"a": True}, "additionalProperties": {}}],
        "$defs": {
            "a": {
                "properties": {"b": {"enum": [{"properties": {}}]}},
                "additionalProperties": False,
            }
        },
        "additionalProperties": False,
    }


def test_a_draft_model_of_some_layers(tiny: LoadedModel) -> None:
    served = ours.Served.of(tiny)
    draft = self_draft(served.model, served.params, served.tokenizer, [1])
    assert draft.model.num_layers == 1
    assert draft.params["layers"][0] is served.params["layers"][1]
    with served.engine(1, 64, draft) as engine:  # which checks that it suits
        assert engine.slots == 1
    with pytest.raises(UserError, match="skip:1: layers were chosen for smollm2"):
        drafts.drafting("skip:1", served)


def test_trees() -> None:
    assert trees.tree([[1, 2, 3], [1, 4, 5]], [2, 2]) == {(1,), (1, 2), (1, 4), (1, 4, 5)}
    assert trees.tree([[1, 2, 3]], [2, 2]) == {(1,), (1, 2), (1, 2, 3)}
    assert trees.depth({(1,), (1, 2), (1, 4)}, [1, 4, 5]) == 2
    assert trees.likeliest_tree([0.6, 0.3], 4) == {(1,), (1, 1), (2,), (1, 1, 1)}
    assert trees.shares_of(5, 2) == [(4, 1), (3, 2)]
    assert trees.forwards([2, 9, 9, 0, 0]) == 3
    rates = trees.of_model([[1, 1, 2, 1, 1, 2, 0, 1]], 3)
    assert rates["chain"] == f"{8 / 4:.3f}"  # 112 112 0 1
    assert rates["oracle"] == f"{8 / 3:.3f}"  # 1121 120 1


def _kind(title: str) -> dict[str, Any]:
    """An object of which the grammar forces most, once it is closed."""
    return {
        "title": title,
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}},
        "required": ["kind"],
    }
