"""Checks the operands of `apply_token_bitmask` and picks the implementation that runs it.

The choice depends on the platform, the device's capability and the dtype only. All of these are
known while tracing, so it costs nothing at run time and never becomes part of the compiled program.
"""

import functools
import importlib
from types import ModuleType
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.bitmask.packed import BITS_PER_WORD, num_words

Implementation = Literal["xla", "mosaic_tpu", "triton"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

_LOGITS_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

# What to try on a platform, best first. XLA takes everything and closes every list.
_PREFERENCE: dict[str, tuple[Implementation, ...]] = {
    "tpu": ("mosaic_tpu", "xla"),
    "gpu": ("triton", "xla"),
}


def apply_token_bitmask(
    logits: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Gives every token that its row's mask does not allow the lowest finite logit.

    Allowed tokens and rows with `enabled = 0` come back unchanged. A row whose mask allows nothing
    becomes a row of equal, finite values; that it is a dead end is for the mask's owner to see.
    Where the caller has no further use for the logits (donated, or a temporary of the same jit),
    the kernels write in place. They expand the words in registers: no integer or boolean array of
    the logits' shape exists in device memory.

    Args:
      logits: float32, bfloat16 or float16 `[..., V]`, any number of leading dimensions and any V.
      bitmask: int32 `[..., W]` with `W = ceil(V / 32)`, in the format of XGrammar and LLGuidance:
        token `t` is bit `t & 31` of word `t >> 5`, 1 is allowed. Bits beyond V are ignored.
      enabled: int32 `[...]`, 0 where the row has no grammar and stays as it is.
      implementation: `"xla"` (every platform), `"mosaic_tpu"` (TPU; float32 and bfloat16) or
        `"triton"` (NVIDIA GPU of compute capability 8.0 and up). None picks by `jax.devices()[0]`
        and the dtype, and falls back to `"xla"`; name one to compile for any other device.

    Returns:
      The masked logits, of the shape and dtype of `logits`.

    Raises:
      ValueError: an operand has a wrong dtype or shape, `implementation` is no known name, or the
        implementation named does not take this dtype. The message begins with the argument's name.
    """
    _check(logits, bitmask, enabled)
    if implementation is None:
        implementation = _select(jnp.dtype(logits.dtype))
    elif implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation: must be one of {names} or None, got {implementation!r}")
    elif not _module(implementation).supports_dtype(logits.dtype):
        raise ValueError(f"implementation: {implementation!r} does not take {logits.dtype} logits")
    if logits.size == 0:
        return logits
    masked: jax.Array = _module(implementation).apply_token_bitmask(logits, bitmask, enabled)
    return masked


def _check(logits: jax.Array, bitmask: jax.Array, enabled: jax.Array) -> None:
    if logits.dtype not in _LOGITS_DTYPES:
        raise ValueError(f"logits: must be float32, bfloat16 or float16, got {logits.dtype}")
    if logits.ndim == 0:
        raise ValueError("logits: must have a vocabulary dimension [..., V], got a scalar")
    if bitmask.dtype != jnp.int32:
        raise ValueError(f"bitmask: must be int32, got {bitmask.dtype}")
    *rows, vocab_size = logits.shape
    if bitmask.shape != (*rows, num_words(vocab_size)):
        raise ValueError(
            f"bitmask: must be {[*rows, num_words(vocab_size)]} for logits of shape "
            f"{list(logits.shape)} ({BITS_PER_WORD} tokens a word), got {list(bitmask.shape)}"
        )
    if enabled.dtype != jnp.int32:
        raise ValueError(f"enabled: must be int32, got {enabled.dtype}")
    if enabled.shape != tuple(rows):
        raise ValueError(f"enabled: must be {rows}, one per row, got {list(enabled.shape)}")


def _select(dtype: jnp.dtype) -> Implementation:
    device = jax.devices()[0]
    for name in _PREFERENCE.get(device.platform, ()):
        try:
            module = _module(name)
        except ImportError:  # a jaxlib built without this Pallas backend, or one that dropped it
            continue
        if module.supports_device(device) and module.supports_dtype(dtype):
            return name
    return "xla"


@functools.cache
def _module(name: Implementation) -> ModuleType:
    # Imported on first use: Pallas takes longer to import than all else here, and XLA needs none.
    return importlib.import_module(f"pallas_kernels.bitmask.{name}")
