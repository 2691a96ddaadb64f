"""The dtype of weights and cache where nobody asks for one."""

import functools
import logging

import jax

from gkv_jax.models.transformer import Transformer
from pallas_kernels.dispatch import compute_capability

_log = logging.getLogger(__name__)


def default_dtype(family: type[Transformer], device: jax.Device) -> str:
    """What suits models of ``family`` on ``device``: bfloat16, which they are trained in, where the
    device multiplies it.

    CPUs do not: float32. Nor do NVIDIA GPUs before Ampere (compute capability 8.0; a T4 has 7.5): XLA
    would copy every matrix to float32 in every product, which moves ten bytes a weight instead of two.
    They multiply float16, so it is that, or float32 where the activations of the family overflow it.
    """
    if device.platform == "cpu":
        return "float32"
    capability = compute_capability(device)
    if capability is None or capability >= (8, 0):
        return "bfloat16"
    dtype = "float16" if family.FITS_FLOAT16 else "float32"
    _say_once(device.device_kind, family.__name__, dtype)
    return dtype


@functools.cache
def _say_once(device: str, family: str, dtype: str) -> None:
    _log.info("%s has no bfloat16 arithmetic; %s takes %s", device, family, dtype)
