"""Checkpoints of a training run: the last few steps, whole, whatever interrupts it."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gkv_jax import UserError
from gkv_jax.weights.training import TrainingCheckpoints
from pallas_kernels.int8_matmul import quantize

OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


def new() -> tuple[Any, Any]:
    params = {"embed": jnp.ones((500, 400)), "layers": [{"q": jnp.zeros(3)}]}
    return params, OPTIMIZER.init(params)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train(params: Any, state: Any) -> tuple[Any, Any]:
    updates, state = OPTIMIZER.update(jax.tree.map(jnp.ones_like, params), state, params)
    return optax.apply_updates(params, updates), state


def test_resumes_at_the_latest(tmp_path: Path) -> None:
    params, state = new()
    copies = {}
    with TrainingCheckpoints(tmp_path / "run", keep=2) as checkpoints:
        assert checkpoints.restore(params, state) is None
        for step in range(1, 6):
            params, state = train(params, state)  # donates what is being written
            copies[step] = jax.tree.map(np.array, (params, state))
            checkpoints.save(step, params, state)
        with pytest.raises(UserError, match=r"step 5 is in .* already"):
            checkpoints.save(5, params, state)
    with TrainingCheckpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.steps == [4, 5]
        resumed = checkpoints.restore(*new())
        assert resumed is not None
        assert resumed.step == 5
        for found in (resumed, checkpoints.restore(*jax.eval_shape(new), step=4)):
            assert found is not None
            jax.tree.map(np.testing.assert_array_equal, (found.params, found.opt_state),
                         copies[found.step])  # fmt: skip
            assert jax.tree.structure(found.opt_state) == jax.tree.structure(state)
        with pytest.raises(UserError, match=r"no step 3 in .*; there are: \[4, 5\]"):
            checkpoints.restore(*new(), step=3)


def test_other_trees_are_refused(tmp_path: Path) -> None:
    params = {"a": jnp.zeros((2, 3)), "q": quantize(jnp.ones((2, 4)))}
    with TrainingCheckpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, params)
        back = checkpoints.restore(params)
        assert back is not None
        jax.tree.map(np.testing.assert_array_equal, back.params, params)
        assert back.opt_state is None
        other = {"a": jnp.zeros((2, 5)), "b": jnp.zeros(1)}
        with pytest.raises(UserError) as caught:
            checkpoints.restore(other)
    assert "missing: params.b; unexpected: params.q.scale, params.q.values; " in str(caught.value)
    assert "params.a [2, 3] instead of [2, 5]" in str(caught.value)
    with pytest.raises(UserError, match="keep must be at least 1"):
        TrainingCheckpoints(tmp_path, keep=0)


KILLED = """
import os, sys
import jax.numpy as jnp
from gkv_jax.weights.training import TrainingCheckpoints

checkpoints = TrainingCheckpoints(sys.argv[1])
checkpoints.save(1, {"a": jnp.ones(5)})
checkpoints.wait()
checkpoints.save(2, {"a": jnp.full(5_000_000, 2.0)})
os._exit(9)  # in the middle of it
"""


def test_an_interrupted_step_is_as_if_never_begun(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert run.returncode == 9
    left = {path.name for path in folder.iterdir()}
    assert left != {"1"}  # something of the second is there
    with TrainingCheckpoints(folder) as checkpoints:
        assert checkpoints.steps == [1]
        resumed = checkpoints.restore({"a": jnp.zeros(5)})
        assert resumed is not None
        np.testing.assert_array_equal(resumed.params["a"], np.ones(5))
        checkpoints.save(2, {"a": jnp.zeros(5)})
    assert {path.name for path in folder.iterdir()} - {".lock"} == {"1", "2"}


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    tree = {"a": jnp.ones(5)}
    with TrainingCheckpoints(tmp_path) as first, TrainingCheckpoints(tmp_path) as before:
        first.save(1, tree)
        first.wait()
        being_written = tmp_path / "2.orbax-checkpoint-tmp"
        being_written.mkdir()
        with TrainingCheckpoints(tmp_path) as second:
            assert second.restore(tree) is not None
            for other in (second, before):
                with pytest.raises(UserError, match="another run saves into"):
                    other.save(3, tree)
        assert being_written.is_dir()
    with TrainingCheckpoints(tmp_path) as third:
        assert third.steps == [1]
        third.save(3, tree)
        third.wait()
        assert third.steps == [1, 3]
        assert not being_written.exists()
