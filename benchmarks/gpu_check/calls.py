"""The kernels as functions, by implementation: on a GPU through their API, interpreted without one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.gpu_check.rows import CheckFailed
from pallas_kernels import dispatch
from pallas_kernels.bitmask import apply_token_bitmask
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.dispatch import Implementation
from pallas_kernels.masked_head import sample_active
from pallas_kernels.masked_sample import masked_sample

_KERNELS: dict[str, tuple[Callable[..., Any], str]] = {
    "bitmask": (apply_token_bitmask, "apply_token_bitmask"),
    "masked_sample": (masked_sample, "masked_sample"),
    "masked_head": (sample_active, "sample_active"),
    "decode_attention": (decode_attention, "decode_attention"),
}


def kernel(package: str, implementation: Implementation, interpret: bool) -> Callable[..., Any]:
    """A kernel's API with its implementation chosen; a Triton kernel may be interpreted."""
    api, name = _KERNELS[package]
    if not (interpret and implementation == "triton"):
        return functools.partial(api, implementation=implementation)
    function = functools.partial(
        getattr(dispatch.load(package, implementation), name), interpret=True
    )
    if package != "decode_attention":
        return function

    def attend(queries: Any, k: Any, v: Any, *rest: Any, **given: Any) -> Any:
        defaults = {
            "sinks": None, "soft_cap": None, "scale": queries[0].shape[-1] ** -0.5,
            "return_lse": False, "return_slot_sums": False,
        }  # fmt: skip
        return function(queries, k, v, *rest, **(defaults | given))

    return attend


def places(interpret: bool) -> dict[str, tuple[Implementation, jax.Device]]:
    """What is checked, by name: an implementation, and the device that it runs on."""
    card, cpu = jax.devices()[0], jax.local_devices(backend="cpu")[0]
    everywhere: dict[str, tuple[Implementation, jax.Device]] = {
        "triton": ("triton", card),
        "xla": ("xla", card),
        "xla on the CPU": ("xla", cpu),
    }
    if interpret:  # the card is the CPU
        del everywhere["xla on the CPU"]
    return everywhere


def run_on(device: jax.Device, function: Callable[..., Any], *operands: Any) -> Any:
    """Results of ``function`` on ``device``, as NumPy arrays."""
    results = function(*jax.device_put(operands, device))
    return jax.tree.map(np.asarray, results)


def require_same_bits(actual: np.ndarray, wanted: np.ndarray, what: str) -> None:
    """Raises:
    CheckFailed: a dtype, shape or bit differs.
    """
    if (actual.dtype, actual.shape) != (wanted.dtype, wanted.shape):
        raise CheckFailed(
            f"{what}: {actual.dtype} {actual.shape} instead of {wanted.dtype} {wanted.shape}"
        )
    differ = np.ascontiguousarray(actual).view(np.uint8) != np.ascontiguousarray(wanted).view(
        np.uint8
    )
    differ = differ.reshape(*actual.shape, -1).any(axis=-1)
    if differ.any():
        at = tuple(int(i) for i in np.argwhere(differ)[0])
        raise CheckFailed(
            f"{what}: {int(differ.sum())} of {actual.size} differ, the first at {at}: "
            f"{actual[at]} instead of {wanted[at]}"
        )
