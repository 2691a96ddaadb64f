"""Importing Flax, and what to say where that fails."""

import importlib
from typing import Any

import jax

from gkv_jax.errors import UserError

PAIRS = (
    ("0.7.2 to 0.11.0", "0.11.2 to 0.12.8"),
    ("0.11.1", "0.12.9 or 0.12.10"),
    ("0.11.2", "0.12.10"),
)
"""Versions of jax, and those of flax whose nnx imports beside them. See docs/compatibility.md."""


def import_flax(name: str) -> Any:
    """``flax.nnx`` or ``flax.linen``.

    Raises:
      UserError: it is not installed, or its version does not belong to that of jax.
    """
    try:
        flax = importlib.import_module("flax")
    except ModuleNotFoundError as error:
        if error.name != "flax":
            raise
        raise UserError(
            f"gkv_jax.flax needs flax, which is not installed: pip install 'gkv_jax[flax]' "
            f"(with jax {jax.__version__} take the version in this table: {_table()})"
        ) from error
    except (ImportError, AttributeError) as error:
        raise _mismatch("flax", None, error) from error
    try:
        return importlib.import_module(f"flax.{name}")
    except (ImportError, AttributeError) as error:
        raise _mismatch(f"flax.{name}", flax, error) from error


def _mismatch(name: str, flax: Any, error: Exception) -> UserError:
    version = getattr(flax, "__version__", "")
    return UserError(
        f"{name} {version} does not import with jax {jax.__version__} ({type(error).__name__}: {error}); "
        f"install a pair that belongs together ({_table()}). flax.linen and the rest of gkv_jax do not "
        "depend on it"
    )


def _table() -> str:
    return "; ".join(f"jax {jax_}: flax {flax}" for jax_, flax in PAIRS)
