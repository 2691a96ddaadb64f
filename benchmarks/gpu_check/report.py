"""Tables in plain text, verdicts, and the JSON file."""

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import names
from benchmarks.gpu_check.rows import Row
from benchmarks.gpu_check.scale import Scale

LEAST_OF_COPY = 0.85
"""Target of the bitmask kernel: share of the copy's bandwidth, at the largest batch."""
MOST_GUIDED = 1.05
"""Target of the decode loop: guided to unguided time."""

_PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "torch", "triton", "xgrammar",
)  # fmt: skip
_ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A figure beside its target; ``met`` is None where the figure is not there."""

    what: str
    value: float | None
    target: str
    met: bool | None

    def __str__(self) -> str:
        word = {None: "NOT MEASURED", True: "meets", False: "MISSES"}[self.met]
        value = "" if self.value is None else f"{self.value:.3g} "
        return f"{self.what}: {value}({word} the target {self.target})"


def table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in plain text; all columns but the first are right-aligned."""
    cells = [list(columns), *(list(line) for line in lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    text = [title]
    for line in cells:
        aligned = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  " + "  ".join(aligned).rstrip())
    text.insert(2, "  " + "  ".join("-" * width for width in widths))
    return "\n".join(text)


def section_table(section: str, rows: Sequence[Row]) -> str:
    """All rows of a section: a column for each figure, and details below."""
    columns = list(dict.fromkeys(name for row in rows for name in row.figures))
    lines = [
        [row.case, row.status, *(_number(row.figures.get(name)) for name in columns)]
        for row in rows
    ]
    text = table(section, ["case", "status", *columns], lines)
    details = [f"  {row.case}: {row.detail}" for row in rows if row.detail]
    return "\n".join([text, *details])


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def verdicts(rows: Sequence[Row], scale: Scale) -> list[Verdict]:
    """Every target, from the rows of a run."""
    figures = {(row.section, row.case): row.figures for row in rows}

    def figure(section: str, case: str, name: str) -> float | None:
        value = figures.get((section, case), {}).get(name)
        return None if value is None or math.isnan(value) else value

    result = []
    largest = scale.batches[0]
    for kind in ("half", "1 %"):
        case = names.mask("triton", largest, "float32", kind)
        for counted in ("stored", "sectors"):
            share = figure("time:bitmask", case, f"{counted} of copy")
            what = f"bitmask, B={largest}, {kind} legal, bytes {counted}, share of the copy's speed"
            result.append(_verdict(what, share, least=LEAST_OF_COPY))
    for batch in scale.batches:
        ours = figure("time:masked_sample", names.sample("triton", batch, "greedy"), "us")
        peer = figure("time:peers", names.sample("xgrammar and torch", batch, "greedy"), "us")
        ratio = None if ours is None or peer is None else ours / peer
        what = f"masked_sample, greedy, B={batch}, time to that of xgrammar's mask and argmax"
        result.append(_verdict(what, ratio, most=1.0))
    kernel = "xla" if scale.interpret else "triton"
    for batch in scale.decode_batches:
        for loop in ("device loop", "host loop"):
            for kind in ("guided, few legal", "guided, all legal"):
                guided, unguided = (
                    figure(f"decode:{batch}", names.decode(kernel, loop, batch, each), "ms")
                    for each in (kind, "unguided")
                )
                ratio = None if guided is None or unguided is None else guided / unguided
                what = f"{loop}, B={batch}, {kind}, time to unguided"
                result.append(_verdict(what, ratio, most=MOST_GUIDED))
    return result


def _verdict(
    what: str, value: float | None, *, least: float = -math.inf, most: float = math.inf
) -> Verdict:
    target = f">= {least:g}" if math.isinf(most) else f"<= {most:g}"
    return Verdict(what, value, target, None if value is None else least <= value <= most)


def environment(commit: str = "") -> dict[str, Any]:
    """Date, commit (that of this folder, if none is given), machine and versions."""
    status = _output("git", "status", "--porcelain")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or _output("git", "rev-parse", "HEAD"),
        "modified": None if status is None else bool(status),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpu": _output(
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem",
            "--format=csv,noheader",
        ),
        "versions": {"python": platform.python_version()}
        | {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints, or None if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        run = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def write(
    path: Path, about: dict[str, Any], rows: Sequence[Row], judged: Sequence[Verdict]
) -> None:
    """The whole run so far, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "environment": about,
        "rows": [dataclasses.asdict(row) for row in rows],
        "verdicts": [dataclasses.asdict(verdict) for verdict in judged],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
