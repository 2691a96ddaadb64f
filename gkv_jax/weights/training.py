"""Checkpoints of a training run: written beside the next steps, the last few kept.

    with TrainingCheckpoints("runs/one", keep=2) as checkpoints:
        step, params, opt_state = checkpoints.restore(params, opt_state) or (0, params, opt_state)
        while step < steps:
            params, opt_state = train_step(params, opt_state, batch(step))
            step += 1
            if step % 100 == 0:
                checkpoints.save(step, params, opt_state)

A step is there completely or not at all: what was interrupted is thrown away when the next run saves
its first. To serve what was trained, write it with ``gkv_jax.weights.orbax.save``.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from gkv_jax.errors import UserError
from gkv_jax.weights.orbax import compare_shapes, import_orbax, named_shapes


class Resumed(NamedTuple):
    """A step and what was saved at it."""

    step: int
    params: Any
    opt_state: Any


class TrainingCheckpoints:
    """The steps kept in one folder: Orbax's CheckpointManager, saving in the background.

    Pytrees of any kind: int8 matrices, states of optax. One may write into a folder, from its first
    ``save`` to ``close``; others may restore meanwhile what was there when they began.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        """``keep`` steps stay, the latest. Raises UserError if it is below 1, or without Orbax."""
        if keep < 1:
            raise UserError(f"keep must be at least 1, not {keep}")
        self._ocp = import_orbax()
        self.folder = Path(folder).expanduser().resolve()
        self._keep = keep
        self._lock: Any = None
        self._manager = self._open(writes=False)

    @property
    def steps(self) -> list[int]:
        """The steps that can be restored, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, params: Any, opt_state: Any = None) -> None:
        """Save a step. Returns when the arrays may be donated, before they are on disk.

        Raises UserError for a step that is there, or if another run writes into the folder. A failure
        to write raises at the next call.
        """
        if self._lock is None:
            self._begin_to_write()
        if step in self._manager.all_steps():
            raise UserError(f"step {step} is in {self.folder} already")
        state = {"params": params, "opt_state": opt_state}
        self._manager.save(step, args=self._ocp.args.StandardSave(state), force=True)

    def restore(
        self, params: Any, opt_state: Any = None, *, step: int | None = None
    ) -> Resumed | None:
        """The latest step, or ``step``; None if there is none yet.

        Args:
          params, opt_state: trees like those that were saved, of arrays or of ``ShapeDtypeStruct``
            with shardings: where the restored leaves go, and in which dtype.

        Raises:
          UserError: no such step, or it was saved for other trees.
        """
        self.wait()
        steps = self.steps
        if step is None:
            if not steps:
                return None
            step = steps[-1]
        elif step not in steps:
            raise UserError(f"no step {step} in {self.folder}; there are: {steps}")
        like = jax.tree.map(_abstract, {"params": params, "opt_state": opt_state})
        stored = self._manager.item_metadata(step)
        compare_shapes(
            named_shapes(like),
            named_shapes(getattr(stored, "tree", stored)),
            f"{self.folder}: step {step} was saved for other trees",
        )
        state = self._manager.restore(step, args=self._ocp.args.StandardRestore(like))
        return Resumed(step, state["params"], state["opt_state"])

    def wait(self) -> None:
        """Return when everything saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, end the background thread, and let others write."""
        self._manager.close()
        if self._lock is not None:
            self._lock.release()

    def _open(self, *, writes: bool) -> Any:
        options = self._ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            create=True,
            cleanup_tmp_directories=writes,  # they may be those of a run that is going on
            enable_async_checkpointing=True,
        )
        try:
            return self._ocp.CheckpointManager(
                self.folder, options=options, item_handlers=self._ocp.StandardCheckpointHandler()
            )
        except OSError as error:
            raise UserError(f"cannot write to {self.folder} ({error.strerror})") from error

    def _begin_to_write(self) -> None:
        from filelock import FileLock, Timeout

        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"another run saves into {self.folder}; choose another folder"
            ) from error
        except OSError as error:
            raise UserError(f"cannot write to {self.folder} ({error.strerror})") from error
        self._lock = lock
        self._manager.close()
        self._manager = self._open(writes=True)

    def __enter__(self) -> "TrainingCheckpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf
