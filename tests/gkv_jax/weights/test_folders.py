"""Folders that are replaced whole, whatever is killed when."""

import itertools
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from gkv_jax import UserError
from gkv_jax.weights.folders import locked, replacing


class KilledError(BaseException):
    """Ends a writer; nothing that it would do afterwards happens."""


def write(folder: Path, text: str) -> None:
    with locked(folder), replacing(folder) as new:
        (new / "inner").mkdir()
        for name in ("a", "inner/b"):
            (new / name).write_text(text)


def texts(folder: Path) -> set[str]:
    return {(folder / name).read_text() for name in ("a", "inner/b")}


def kill_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """The ``step``-th call that changes the disk ends the process, and so do all after it."""
    calls = itertools.count()

    def before(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if next(calls) >= step:
                raise KilledError
            return real(*args, **options)

        return call

    for module, name in ((os, "replace"), (os, "fsync"), (shutil, "rmtree"), (Path, "mkdir")):
        patch.setattr(module, name, before(getattr(module, name)))


def test_killed_at_any_step(tmp_path: Path) -> None:
    outcomes = []
    for step in itertools.count():
        folder = tmp_path / str(step) / "model"
        write(folder, "old")
        with pytest.MonkeyPatch.context() as patch:
            kill_at(step, patch)
            try:
                write(folder, "new")
                break
            except KilledError:
                pass
        with locked(folder):
            (outcome,) = texts(folder)
        outcomes.append(outcome)
        write(folder, "newer")
        assert texts(folder) == {"newer"}
        assert {path.name for path in folder.parent.iterdir()} - {".model.lock"} == {"model"}
    assert outcomes == sorted(outcomes, reverse=True)
    assert set(outcomes) == {"old", "new"}
    assert texts(folder) == {"new"}


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for before in (False, True):
        if before:
            write(folder, "old")
        with pytest.raises(ZeroDivisionError), locked(folder), replacing(folder):
            raise ZeroDivisionError
        left = {path.name for path in tmp_path.iterdir()} - {".model.lock"}
        assert left == ({"model"} if before else set())
    assert texts(folder) == {"old"}


def test_writers_wait_and_names_do_not_mix(tmp_path: Path) -> None:
    folder, longer = tmp_path / "a", tmp_path / "a.new"
    with locked(folder), replacing(folder) as new:
        write(longer, "longer")
        other = threading.Thread(target=write, args=(folder, "second"))
        other.start()
        other.join(0.1)
        assert other.is_alive()
        assert new.is_dir()
        (new / "a").touch()
    other.join(10)
    assert texts(folder) == {"second"}
    assert texts(longer) == {"longer"}


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*file \(.*\); choose another folder"):
        write(tmp_path / "file" / "model", "")
