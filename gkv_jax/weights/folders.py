"""Folders that are there completely or not at all, whoever writes them and whatever interrupts it.

``NAME`` is written as ``.NAME.new`` beside its place and renamed, the one it replaces is ``.NAME.old``
meanwhile. Writers wait for each other at ``.NAME.lock``, which stays.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gkv_jax.errors import UserError


@contextmanager
def locked(folder: Path, way_out: str = "choose another folder") -> Iterator[None]:
    """Keep other writers away from ``folder``, whose path is resolved: a symlink has another lock.

    Puts back what a replacement that was killed between its two renames had moved aside. Raises
    UserError, ending in ``way_out``, if nothing can be written there.
    """
    from filelock import FileLock

    lock = FileLock(_beside(folder, "lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise UserError(
            f"cannot write to {folder.parent} ({error.strerror or error}); {way_out}"
        ) from error
    try:
        _settle(folder)
        yield
    finally:
        lock.release()


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of ``folder`` when all went well, and vanishes otherwise.

    To be used within ``locked``. What it holds is on the disk before it is renamed.
    """
    new, old = _beside(folder, "new"), _beside(folder, "old")
    shutil.rmtree(new, ignore_errors=True)  # of a writer that was killed: the lock is ours
    new.mkdir()
    try:
        yield new
        for path in (*new.rglob("*"), new):
            _sync(path)
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        _settle(folder)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


def _settle(folder: Path) -> None:
    """Undo or finish a replacement that stopped between its steps."""
    old = _beside(folder, "old")
    if old.exists() and not folder.exists():
        os.replace(old, folder)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
