"""``python -m benchmarks.gpu_check.section NAME FILE UNTIL [--dry-run]``: one section, in this process."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

# JAX takes most of a GPU's memory when it starts; here several processes share it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if (_platforms := os.environ.get("JAX_PLATFORMS", "")) and "cpu" not in _platforms:
    os.environ["JAX_PLATFORMS"] = f"{_platforms},cpu"  # for results to compare with

from benchmarks.gpu_check.rows import Recorder
from benchmarks.gpu_check.scale import FULL, TINY, Scale

KERNELS = ("bitmask", "masked_sample", "masked_head", "decode_attention")


def facts(recorder: Recorder, scale: Scale) -> None:
    """What JAX sees, as rows without figures."""
    import jax

    for device in jax.devices():
        capability = getattr(device, "compute_capability", "")
        detail = f"{device.platform}: {device.device_kind} {capability}".strip()
        recorder.write(f"device {device.id}", "passed", detail=detail)
    client = jax.devices()[0].client
    recorder.write("runtime", "passed", detail=" ".join(client.platform_version.split()))


def section(name: str) -> Callable[[Recorder, Scale], None]:
    """The function of a section. Each imports what it needs, and no more."""
    if name == "facts":
        return facts
    kind, _, which = name.partition(":")
    if name == "time:peers":
        from benchmarks.gpu_check import peers

        return peers.time
    if kind == "decode":
        from benchmarks.gpu_check import decode

        return lambda recorder, scale: decode.run(recorder, scale, int(which))
    import importlib

    module = importlib.import_module(f"benchmarks.gpu_check.{which}")
    if kind == "check":
        check: Callable[[Recorder, Scale], None] = module.check
        return check

    def timed(recorder: Recorder, scale: Scale) -> None:
        from benchmarks.gpu_check.measure import copy_bandwidth

        bandwidth = copy_bandwidth(scale)
        recorder.write("copy", "measured", {"GB/s": bandwidth})
        module.time(recorder, scale, bandwidth)

    return timed


def main() -> None:
    """Run a section to its end, or into its error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("file", type=Path)
    parser.add_argument("until", type=float)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    if given.dry_run:
        # Compiling takes far longer than running anything as small as this.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
        os.environ["JAX_PLATFORMS"] = "cpu"
    recorder = Recorder(given.name, given.file, given.until)
    section(given.name)(recorder, TINY if given.dry_run else FULL)


if __name__ == "__main__":
    main()
    # At once: threads of a compiler or of a callback that never came back must not hold it.
    os._exit(0)
