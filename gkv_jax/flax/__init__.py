"""Flax models: generation from a user's own decoder, and our families as trainable modules.

    from gkv_jax.flax import from_linen, from_nnx, trainable

    decoder, params = from_nnx(model, max_positions=1024)
    engine = Engine(decoder, params, tokenizer, cache=CacheSpec(sinks=4, window=252))
    ...                                  # train on
    engine.update_params(model)          # no recompile

Flax is imported when one of the names is used, and only the API that the name belongs to: ``flax.nnx``
imports in matching pairs with jax only, and nothing else of gkv_jax depends on it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gkv_jax.flax.attention import CausalAttend
    from gkv_jax.flax.linen import from_linen
    from gkv_jax.flax.nnx import from_nnx, trainable

_MODULES = {
    "CausalAttend": "gkv_jax.flax.attention",
    "from_linen": "gkv_jax.flax.linen",
    "from_nnx": "gkv_jax.flax.nnx",
    "trainable": "gkv_jax.flax.nnx",
}

__all__ = ["CausalAttend", "from_linen", "from_nnx", "trainable"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
