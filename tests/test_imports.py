"""Importing the packages is light, and dependencies point one way only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "flax", "transformers", "xgrammar", "fastapi", "uvicorn", "starlette", "pydantic")


def test_importing_gkv_jax_pulls_jax_and_numpy_only() -> None:
    code = f"import gkv_jax, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("grammar_host", {"jax", "jaxlib", "gkv_jax", "pallas_kernels"}),
        ("pallas_kernels", {"gkv_jax", "grammar_host"}),
    ],
)
def test_dependencies_point_one_way(package: str, forbidden: set[str]) -> None:
    found = {
        (path.name, name)
        for path in (ROOT / package).rglob("*.py")
        for name in _imported(path)
        if name in forbidden
    }
    assert found == set()


def test_only_the_bridge_talks_to_the_host() -> None:
    users = {
        path.name
        for package in ("gkv_jax", "pallas_kernels")
        for path in (ROOT / package).rglob("*.py")
        if "import io_callback" in path.read_text(encoding="utf-8")
    }
    assert users == {"bridge.py"}


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names
