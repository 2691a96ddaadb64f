"""A whole evaluation on a tiny random model, and on a trained one."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gkv_jax import UserError
from gkv_jax.evaluate import CacheQuality, Plan, cache, cache_quality, quality, report, tasks
from gkv_jax.models.llama import Llama
from gkv_jax.weights import LoadedModel
from tests.gkv_jax.tiny import byte_tokenizer, random_params, text_config

PROSE = " ".join(f"This is sentence number {i} of a long and rather dull text." for i in range(50))
CONFIG = text_config(max_position_embeddings=1024, num_layers=1)
MODEL = Llama(CONFIG)
PARAMS = random_params(CONFIG)
PLAN = Plan(
    policies=("window", "snapkv", "int8"),
    budgets=(96,),
    lengths=(470, 480),  # one program serves both
    depths=(0.0, 1.0),
    samples=1,
    prompts=1,
    continuation=4,
    stream=400,
)


def run(plan: Plan = PLAN, **options: Any) -> CacheQuality:
    return cache_quality(MODEL, PARAMS, byte_tokenizer(), plan, PROSE, **options)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[CacheQuality, Path]:
    """All tasks of all caches, and the journal. No random model solves a task: each is let pass."""
    path = tmp_path_factory.mktemp("quality") / "journal.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality, "LEAST_SCORE", 0.0)
        return run(journal=path), path


def test_every_cell_is_measured(everything: tuple[CacheQuality, Path]) -> None:
    result, _ = everything
    caches = [("full", None), ("window", 96), ("snapkv", 96), ("int8", None)]
    for policy, budget in caches:
        for task in tasks.TASKS:
            assert len(result.find("retrieval", policy=policy, budget=budget, task=task)) == 4
            assert result.score(policy, budget, task, 480) == 0.0
    assert [c.policy for c in result.find("fidelity", length=470)] == ["window", "snapkv", "int8"]
    assert [c.policy for c in result.find("perplexity")] == ["full", "window", "int8"]
    full, window, int8 = result.find("perplexity").values()
    assert full["afresh"] is int8["afresh"] is None
    # Of random weights, no part of a text is harder; and what came long before has left no trace.
    assert window["afresh"] == pytest.approx(window["last"], rel=0.01)
    assert window["afresh"] != window["last"]
    (reference,) = result.find("reference").values()
    assert reference["streamed"] == pytest.approx(reference["dense"], rel=1e-4)
    assert reference["most"] < 1e-3
    held = {c.policy: v["attention_held"] for c, v in result.find("fidelity", length=470).items()}
    assert held["int8"] == pytest.approx(1)
    assert held["window"] < 0.9
    assert len(result.values) == 4 * 4 * 4 + 3 * 2 + 3 + 1


def test_a_second_run_measures_nothing(
    everything: tuple[CacheQuality, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, path = everything
    monkeypatch.setattr(quality, "LEAST_SCORE", 0.0)
    monkeypatch.setattr(quality._Bench, "measure", None)
    assert run(journal=path) == result


def test_a_journal_serves_a_larger_plan(
    everything: tuple[CacheQuality, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the new cells are measured, and the bar's total is right."""
    path = Path(shutil.copy(everything[1], tmp_path))
    measured: list[str] = []
    keys: list[str] = []

    def measure(_: Any, cell: Any) -> dict[str, Any]:
        measured.append(cell.key)
        return {"score": 1.0, "answers": []}

    monkeypatch.setattr(quality, "LEAST_SCORE", 0.0)
    monkeypatch.setattr(quality._Bench, "measure", measure)
    larger = dataclasses.replace(PLAN, depths=(0.0, 0.5, 1.0), tasks=("needle",))
    run(larger, journal=path, progress=keys.append)
    assert len(measured) == 4 * 2
    assert all(key.endswith("/0.5") for key in measured)
    assert len(keys) == cache.most_cells(larger, MODEL)


def test_what_the_full_cache_cannot_do_is_left_out() -> None:
    plan = Plan(
        policies=("window",), budgets=(96,), tasks=("needle",), lengths=(480,), depths=(1.0,),
        samples=1, prompts=0, stream=0,
    )  # fmt: skip
    result = run(plan)
    assert result.unsolved == {("needle", 480): 0.0}
    assert [cell.policy for cell in result.values] == ["full"]
    assert report.tables(result) == []
    assert report.notes(result) == ["needle at 480 tokens is left out: the full cache scores 0 %"]


def test_measures_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality._Bench, "measure", lambda *_: {})
    plan = dataclasses.replace(PLAN, tasks=(), prompts=0, stream=200, policies=("window",))
    plan = dataclasses.replace(plan, budgets=(64,))
    assert [cell.measure for cell in run(plan).values] == ["perplexity", "perplexity", "reference"]
    assert cache.most_cells(plan, MODEL) == 3


def test_a_text_that_fits_the_budget_is_not_measured() -> None:
    plan = Plan(policies=("window",), budgets=(480,), lengths=(480, 500), prompts=1)
    cells = [*quality.retrieval_cells("window", 480, plan, plan.questions)]
    assert {cell.length for cell in cells} == {500}
    assert {cell.length for cell in quality.fidelity_cells("window", 480, plan)} == {500}


def test_the_report(
    everything: tuple[CacheQuality, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, _ = everything
    tables = report.tables(result)
    assert [len(table.rows) for table in tables] == [4, 6, 3, 1]
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
        table.print()
    assert "snapkv 96" in capsys.readouterr().out
    paths = report.write(result, tmp_path / "out", "tiny")
    assert {path.name for path in paths} == {
        "cache-quality.json", "cache-quality.md", "perplexity.png",
        *(f"{task}.png" for task in tasks.TASKS),
    }  # fmt: skip
    assert all(path.stat().st_size > 0 for path in paths)
    written = json.loads(paths[0].read_text("utf-8"))
    assert written["plan"]["budgets"] == [96]
    assert len(written["cells"]) == len(result.values)
    assert "| window 96 |" in paths[1].read_text("utf-8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": ("windows",)}, "policies: there is no 'windows'"),
        ({"tasks": ("haystack",)}, "tasks: there is no 'haystack'"),
        ({"budgets": (3,)}, "budgets: 3 tokens are too few"),
        ({"budgets": ()}, "budgets is empty"),
        ({"depths": (1.1,)}, "outside of 0..1"),
        ({"samples": 0}, "samples is 0"),
        ({"lengths": (1001,)}, "use at most 1000"),
        ({"lengths": (50,)}, "50 tokens do not hold a question"),
        ({"stream": 10**6}, "stream: the text has"),
    ],
)
def test_refused_before_anything_is_computed(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality._Bench, "measure", None)
    with pytest.raises(UserError, match=message):
        run(dataclasses.replace(PLAN, **changes))


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gkv_jax import weights

    loaded = LoadedModel(MODEL, PARAMS, byte_tokenizer())
    monkeypatch.setattr(weights, "load_model", lambda name, dtype: loaded)
    text = tmp_path / "prose.txt"
    text.write_text(PROSE)
    options = [
        "--policies", "window", "--budgets", "96", "--tasks", "needle", "--lengths", "480",
        "--depths", "1", "--samples", "1", "--prompts", "0", "--stream", "0",
        "--text", str(text), "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    result = CliRunner().invoke(cache.app, options)
    assert result.exit_code == 0, result.output
    assert "needle at 480 tokens is left out" in result.output
    assert (tmp_path / "out" / "cache-quality.json").is_file()
    for wrong, message in (
        (["--policies", "windows"], "windows"),
        (["--budgets", "many"], "list of numbers"),
        (["--lengths", "2000"], "trained"),
    ):
        result = CliRunner().invoke(cache.app, [*options, *wrong])
        assert result.exit_code == 2
        assert message in result.output


@pytest.mark.model
@pytest.mark.full
def test_a_needle_is_found_while_it_is_held(smollm2: LoadedModel, smollm2_params: Any) -> None:
    """In 250 tokens: the full cache answers from both ends, 64 recent tokens from the near one."""
    plan = Plan(
        policies=("window",), budgets=(96,), tasks=("needle",), lengths=(250,),
        depths=(0.2, 1.0), samples=1, prompts=0, stream=0,
    )  # fmt: skip
    result = cache_quality(
        smollm2.model, smollm2_params, smollm2.tokenizer, plan, PROSE,
        stop_token_ids=smollm2.config.eos_token_ids,
    )  # fmt: skip
    scores = {
        (cell.policy, cell.depth): values["score"]
        for cell, values in result.find("retrieval").items()
    }
    assert scores == {
        ("full", 0.2): 1.0, ("full", 1.0): 1.0, ("window", 0.2): 0.0, ("window", 1.0): 1.0,
    }  # fmt: skip
