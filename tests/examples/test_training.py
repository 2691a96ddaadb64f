"""The training examples run, resume where they were killed, and compile nothing once they have evaluated."""

import functools
import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from gkv_jax.evaluate import GuidedEvaluation

EXAMPLES = Path(__file__).parents[2] / "examples"
MODES = ("guided", "free")


@pytest.fixture(scope="module", params=["train_eval_nnx", "train_eval_linen"])
def example(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module of an example, found as when it is run as a program."""
    # Flax, optax and Orbax are not written for strict promotion.
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module(request.param)


def history(folder: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((folder / "history.json").read_text("utf-8"))
    return entries


def shares(entry: dict[str, Any], mode: str) -> tuple[float, float, float]:
    (score,) = [score for score in entry["scores"] if score["mode"] == mode]
    return score["valid"], score["exact"], score["field_accuracy"]


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    task, asked, events = example.task, [], []
    draw, guided = task.batch, example.guided
    weights: list[Any] = []

    def batch(tokenizer: Any, step: int, size: int) -> Any:
        asked.append(step)
        if step == kill_at:
            raise KeyboardInterrupt
        return draw(tokenizer, step, size)

    def counted(engine: Any, *args: Any, **named: Any) -> GuidedEvaluation:
        weights.append(jax.tree.map(np.asarray, engine._scheduler.params))
        events.clear()
        found = guided(engine, *args, **named)
        compiled.append(len(events))
        return found

    def listen(name: str, _: float, **kwargs: Any) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(kwargs)

    monkeypatch.setattr(task, "batch", batch)
    monkeypatch.setattr(example, "guided", counted)
    options = {"steps": 4, "every": 2, "documents": 2, "size": "tiny"}
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        compiled, kill_at = [], 3
        with pytest.raises(KeyboardInterrupt):
            example.main(tmp_path / "killed", **options)
        assert asked == [0, 1, 2, 3]
        assert [entry["step"] for entry in history(tmp_path / "killed")] == [0, 2]
        assert compiled[0] > 0
        assert compiled[1:] == [0]

        kill_at = None
        asked.clear()
        if hasattr(example, "from_linen"):  # its model has been checked
            monkeypatch.setattr(
                example, "from_linen", functools.partial(example.from_linen, check=False)
            )
        (tmp_path / "whole").mkdir()
        shutil.copytree(tmp_path / "killed" / "tokenizer", tmp_path / "whole" / "tokenizer")
        example.main(tmp_path / "killed", **options)
        assert "goes on from step 2" in capsys.readouterr().out
        assert asked == [2, 3]
        assert compiled[1:] == [0, 0]
        resumed = weights[-1]
        example.main(tmp_path / "whole", **options)
        assert compiled[1:] == [0] * 5
    finally:
        # Without it (jax 0.7) the listener stays, and nobody reads what it hears.
        getattr(jax.monitoring, "unregister_event_duration_listener", lambda _: None)(listen)
    for one, other in zip(jax.tree.leaves(resumed), jax.tree.leaves(weights[-1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    entries, whole = history(tmp_path / "killed"), history(tmp_path / "whole")
    assert [entry["step"] for entry in entries] == [entry["step"] for entry in whole] == [0, 2, 4]
    for mode in MODES:
        assert [shares(each, mode) for each in entries] == [shares(each, mode) for each in whole]
    assert all(shares(entry, "guided")[0] == 1.0 for entry in entries)
    assert (tmp_path / "killed" / "curves.png").stat().st_size > 1000


@pytest.mark.full
def test_the_full_run_learns(example: ModuleType, tmp_path: Path) -> None:
    example.main(tmp_path)
    entries = history(tmp_path)
    assert [entry["step"] for entry in entries] == list(range(0, 501, 50))
    assert all(shares(entry, "guided")[0] == 1.0 for entry in entries)
    free = [shares(entry, "free")[0] for entry in entries]
    assert free[0] == 0.0
    assert free[-1] > 0.9
    assert shares(entries[0], "guided")[2] < 0.1
    assert shares(entries[-1], "guided")[2] > 0.8
