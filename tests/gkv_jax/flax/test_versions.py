"""Without Flax, or with one that does not belong to this jax."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

from gkv_jax import UserError
from gkv_jax.flax import versions


def failing(monkeypatch: pytest.MonkeyPatch, broken: str, error: Exception) -> None:
    """Let the import of one module fail as if it were not there or did not fit."""
    real: Callable[..., Any] = importlib.import_module

    def import_module(name: str, *rest: Any) -> Any:
        if name == broken:
            raise error
        return real(name, *rest)

    monkeypatch.setattr(versions.importlib, "import_module", import_module)


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("module 'jax._src.hijax' has no attribute 'MutableHiType'"),
        ImportError("cannot import name 'HiPrimitive'"),
    ],
    ids=["attribute", "import"],
)
def test_a_pair_that_does_not_match(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    failing(monkeypatch, "flax.nnx", error)
    with pytest.raises(UserError) as raised:
        versions.import_flax("nnx")
    message = str(raised.value)
    assert str(error) in message
    assert "jax 0.11.2: flax 0.12.10" in message
    assert versions.import_flax("linen").__name__ == "flax.linen"


def test_no_flax(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ModuleNotFoundError("No module named 'flax'", name="flax")
    failing(monkeypatch, "flax", error)
    for name in ("nnx", "linen"):
        with pytest.raises(UserError, match=r"pip install 'gkv_jax\[flax\]'"):
            versions.import_flax(name)


def test_nnx_is_imported_for_nnx_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken ``flax.nnx`` breaks what needs it, each time it is asked for, and nothing else."""
    import gkv_jax.flax

    monkeypatch.delitem(sys.modules, "gkv_jax.flax.nnx", raising=False)
    failing(monkeypatch, "flax.nnx", AttributeError("MutableHiType"))
    for name in ("from_nnx", "trainable"):
        with pytest.raises(UserError, match="MutableHiType"):
            getattr(gkv_jax.flax, name)
    assert callable(gkv_jax.flax.from_linen)
    assert callable(gkv_jax.flax.CausalAttend)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gkv_jax.flax.nothing  # noqa: B018
