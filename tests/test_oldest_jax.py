"""The oldest JAX that we run with, which is Colab's: a guided generation with both loops.

`make test-colab` runs the tests of the core there. This is what `make test` can afford: the packages of
this environment, but JAX from a folder of its own (`make oldest-jax`).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = Path(sys.prefix) / "oldest-jax"

PROGRAM = """
import json, jax, jax.numpy as jnp
from gkv_jax import CacheSpec, Engine, Guide, Sampling

jax.config.update("jax_numpy_dtype_promotion", "strict")
found = {"jax": jax.__version__}
for loop in ("device", "host"):
    spec = CacheSpec(sinks=2, window=14)
    with Engine.from_pretrained("tiny-random", cache=spec, slots=1, loop=loop) as engine:
        (result,) = engine.generate(
            ["A date, and some words: "],
            guide=Guide.regex("[0-9]{4}-[0-9]{2}-[0-9]{2} [a-z]{12}"),
            sampling=Sampling(max_tokens=40, temperature=1.0, seed=3),
        )
    found[loop] = [result.text, result.finish_reason]
print(json.dumps(found))
"""


def test_a_guided_generation() -> None:
    if not (FOLDER / "installed").exists():
        pytest.skip("the oldest JAX is not installed: run `make oldest-jax`")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)])}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    floor = re.search(r'"jax>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert floor is not None
    assert found.pop("jax") == floor[1]
    text, reason = found["device"]
    assert re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2} [a-z]{12}", text)
    assert reason == "stop"
    assert found["host"] == found["device"]
