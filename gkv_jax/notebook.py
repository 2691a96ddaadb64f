"""What notebooks have in common: is JAX where the user thinks it is, and is this page being tested?

from gkv_jax.notebook import TINY, check_backend

check_backend()
"""

import importlib.metadata
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from gkv_jax.errors import UserError

TINY = os.environ.get("GKV_TINY") == "1"
"""Whether a page shall run with a random model and small sizes: for tests, and for trying it out."""

# Variables of TPU machines and of Colab's TPU runtimes. Others that begin with TPU_ are options.
_TPU_VARIABLES = (
    "TPU_ACCELERATOR_TYPE",
    "TPU_CHIPS_PER_HOST_BOUNDS",
    "TPU_NAME",
    "TPU_WORKER_ID",
    "COLAB_TPU_ADDR",
)
_GPU_PLUGINS = {"jax-cuda13-plugin": "cuda13", "jax-cuda12-plugin": "cuda12"}


def check_backend() -> None:
    """Print what JAX computes on, and stop where that is the CPU of a machine with an accelerator.

    That happens where JAX was upgraded and its plugin for the accelerator was not; JAX itself says
    little about it, and everything after is slow. A CPU that was asked for (``JAX_PLATFORMS=cpu``) is
    fine, and so is one that has no accelerator beside it.

    Raises:
      UserError: an accelerator is there but unused, with the line that installs JAX for it.
    """
    version, backend, devices = jax.__version__, jax.default_backend(), jax.devices()
    print(f"jax {version} on {backend}: {len(devices)} x {devices[0].device_kind}")
    if backend != "cpu" or _asked_for_cpu():
        return
    unused = unused_accelerator(os.environ, lambda pattern: any(Path("/").glob(pattern)))
    if unused is not None:
        raise UserError(_advice(*unused, version))
    if "COLAB_RELEASE_TAG" in os.environ:
        print("this runtime has no accelerator; Runtime > Change runtime type has some")


def unused_accelerator(
    environ: Mapping[str, str], exists: Callable[[str], bool]
) -> tuple[str, str] | None:
    """The accelerator that a machine seems to have, for one whose JAX runs on the CPU.

    Args:
      environ: the environment's variables.
      exists: whether some path matches a glob pattern, relative to the root of the file system.

    Returns:
      ``gpu`` or ``tpu``, and what gave it away; None where there is no sign of any.
    """
    if exists("dev/nvidia0"):
        return "gpu", "/dev/nvidia0"
    if environ.get("COLAB_GPU", "") not in ("", "0"):
        return "gpu", f"COLAB_GPU={environ['COLAB_GPU']}"
    if exists("dev/accel0"):
        return "tpu", "/dev/accel0"
    # Whatever is handed through to a virtual machine is there; the folder itself is on others, too.
    if exists("dev/vfio/[0-9]*") and _version("libtpu") is not None:
        return "tpu", "/dev/vfio"
    for name in _TPU_VARIABLES:
        if environ.get(name):
            return "tpu", f"{name}={environ[name]}"
    return None


def _asked_for_cpu() -> bool:
    platforms = getattr(jax.config, "jax_platforms", None)  # which type checkers do not know
    return str(platforms or "").split(",")[0] == "cpu"


def _advice(kind: str, sign: str, version: str) -> str:
    extra, plugin = ("tpu", "libtpu") if kind == "tpu" else _gpu_plugin()
    installed = _version(plugin)
    found = f"{plugin} {installed}" if installed is not None else f"no {plugin}"
    return (
        f"this machine seems to have a {kind.upper()} ({sign}), but jax {version} runs on the CPU "
        f'({found} beside it); run %pip install -q "jax[{extra}]=={version}", restart the session '
        "(Colab: Runtime > Restart session) and run the page from the top; or, to compute on the CPU, "
        "choose it under Runtime > Change runtime type, or set JAX_PLATFORMS=cpu before jax is imported"
    )


def _gpu_plugin() -> tuple[str, str]:
    """The extra of jax and the plugin's distribution: those that are installed, or else CUDA 12's."""
    for plugin, extra in _GPU_PLUGINS.items():
        if _version(plugin) is not None:
            return extra, plugin
    return "cuda12", "jax-cuda12-plugin"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
