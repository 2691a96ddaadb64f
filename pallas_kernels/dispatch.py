"""Which implementation of a kernel runs: decided from platform, device, dtypes and shapes while tracing.

Every kernel is a package with one module per implementation: `xla` (plain `jax.numpy`, for every
platform, and what the others are tested against), `mosaic_tpu` and `triton`. A module says what it
takes by a function `unsupported(...)` of the kernel's own operands, which returns a reason or None.
The choice costs nothing at run time.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Literal, get_args

import jax

Implementation = Literal["xla", "mosaic_tpu", "triton"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

# What to try on a platform, best first. XLA takes everything and closes every list.
_PREFERENCE: dict[str, tuple[Implementation, ...]] = {
    "tpu": ("mosaic_tpu",),
    "gpu": ("triton",),
    "cpu": (),
}
_log = logging.getLogger(__name__)


def _is_tpu_v4_or_later(device: jax.Device) -> bool:
    """Whether Mosaic has what the kernels ask of it, such as the gather of lanes."""
    return device.platform == "tpu" and not device.device_kind.startswith(("TPU v2", "TPU v3"))


def compute_capability(device: jax.Device) -> tuple[int, int] | None:
    """Of an NVIDIA GPU, major and minor; None for every other device."""
    # AMD devices report an architecture name here ("gfx942").
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def _is_ampere_or_later(device: jax.Device) -> bool:
    """Whether Pallas lowers for it: an NVIDIA GPU of compute capability 8.0 or more, so no T4."""
    return (compute_capability(device) or (0, 0)) >= (8, 0)


_RUNS_ON: dict[Implementation, Callable[[jax.Device], bool]] = {
    "mosaic_tpu": _is_tpu_v4_or_later,
    "triton": _is_ampere_or_later,
}


def choose(
    kernel: str,
    implementation: Implementation | None,
    reason_against: Callable[[ModuleType], str | None],
) -> ModuleType:
    """The module of `pallas_kernels.<kernel>` that runs.

    Args:
      kernel: the kernel's package.
      implementation: the caller's wish; None picks by `jax.devices()[0]` and falls back to XLA,
        saying so once (log level INFO).
      reason_against: why a module cannot take these operands; None if it can.

    Raises:
      ValueError: `implementation` is no known name, or it does not take these operands.
    """
    if implementation is None:
        return _best(kernel, reason_against)
    check_name(implementation)
    module = load(kernel, implementation)
    if reason := reason_against(module):
        raise ValueError(f"implementation: {implementation!r} does not take {reason}")
    return module


def check_name(implementation: Implementation | None) -> None:
    """Raise ValueError unless this is the name of an implementation, or None."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation: must be one of {names} or None, got {implementation!r}")


def _best(kernel: str, reason_against: Callable[[ModuleType], str | None]) -> ModuleType:
    device = jax.devices()[0]
    if device.platform not in _PREFERENCE:
        _say_once(kernel, device.platform, "has no kernel of its own")
    for name in _PREFERENCE.get(device.platform, ()):
        try:
            module = load(kernel, name)
        except ImportError as error:  # a jaxlib without this Pallas backend, or one that dropped it
            _say_once(kernel, name, f"cannot be imported ({error})")
            continue
        if not _RUNS_ON[name](device):
            _say_once(kernel, name, f"does not run on {device.device_kind}")
        elif reason := reason_against(module):
            _say_once(kernel, name, f"does not take {reason}")
        else:
            return module
    return load(kernel, "xla")


@functools.cache
def load(kernel: str, implementation: Implementation) -> ModuleType:
    """The module. Imported on first use: Pallas takes longer to import than all else here."""
    return importlib.import_module(f"pallas_kernels.{kernel}.{implementation}")


@functools.cache
def _say_once(kernel: str, implementation: str, why: str) -> None:
    _log.info("%s: %s %s; plain XLA runs instead", kernel, implementation, why)
