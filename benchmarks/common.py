"""For every benchmark: medians, a table, a JSON file that says where its figures come from."""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gkv_jax.evaluate.report import Table

RESULTS = Path(__file__).resolve().parent / "results"

_PACKAGES = (
    "gkv_jax",
    "jax",
    "jaxlib",
    "numpy",
    "torch",
    "transformers",
    "xgrammar",
    "llguidance",
    "outlines_core",
    "jsonschema_rs",
)


_BUSY = 0.7
"""One-minute load average of a machine that does something else, too."""

Key = TypeVar("Key")


def interleaved(
    measures: Mapping[Key, Callable[[], float]], repetitions: int
) -> dict[Key, list[float]]:
    """Call every measure once a round (A B C A B C ...): drift of the machine hits all alike.

    One round more comes first and is thrown away: it compiles and warms up.
    """
    samples: dict[Key, list[float]] = {name: [] for name in measures}
    for repetition in range(-1, repetitions):
        for name, measure in measures.items():
            value = measure()
            if repetition >= 0:
                samples[name].append(value)
    return samples


def medians(samples: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """The median of each list."""
    return {name: statistics.median(values) for name, values in samples.items()}


def warn_if_busy() -> None:
    """Say so when other processes use the processors. Call before the measurements begin.

    Libraries whose threads spin while they wait (torch's OpenMP) then lose many times more than
    others, so that a comparison is not fair.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > _BUSY:
        print(f"warning: the machine is busy (load {load:.1f}); the figures will not be fair")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on standard output; all columns but the first are right-aligned."""
    Table(title, columns, list(rows)).print()


def print_verdict(
    what: str, value: float, *, least: float = -math.inf, most: float = math.inf
) -> None:
    """A figure beside its target."""
    target = f">= {least:g}" if math.isinf(most) else f"<= {most:g}"
    word = "meets" if least <= value <= most else "MISSES"
    print(f"{what}: {value:.2f} ({word} the target {target})")


def write_json(name: str, results: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write ``results`` and the circumstances of the run to ``<folder>/<name>.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    text = json.dumps({"environment": environment(), **results}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"written: {path}")
    return path


def environment() -> dict[str, Any]:
    """Date, commit, machine and versions."""
    import jax

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain")),
        "machine": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cpus": os.cpu_count(),
            "devices": [f"{device.platform}: {device.device_kind}" for device in jax.devices()],
        },
        "versions": {"python": platform.python_version()}
        | {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
