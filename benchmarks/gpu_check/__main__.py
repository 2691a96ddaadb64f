"""``python -m benchmarks.gpu_check [--dry-run] [--out DIR] [--minutes N]``: see ``benchmarks.gpu_check``.

Checks come first, all kernels at once, as nothing is timed then. The timings follow one by one. Each
section has a time by which it must be done; what it does not use is left to those after it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check import report
from benchmarks.gpu_check.rows import BAD, Row, read_rows
from benchmarks.gpu_check.scale import FULL, TINY, Scale

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("bitmask", "masked_sample", "masked_head", "decode_attention")
GRACE_S = 10.0
"""How long a section may outlast its time: a case that has begun is finished."""
FACTS_S = 90.0
EXIT_FAILED, EXIT_NO_GPU = 1, 2
_LOG_LINES = 6


def phases(scale: Scale) -> list[tuple[float, tuple[str, ...]]]:
    """Sections that run side by side, and the share of the time at which they must be done."""
    first, *others = (f"decode:{batch}" for batch in scale.decode_batches)
    return [
        (0.38, tuple(f"check:{kernel}" for kernel in KERNELS)),
        (0.46, ("time:bitmask",)),
        (0.53, ("time:peers",)),
        (0.61, ("time:masked_sample",)),
        (0.74, (first,)),
        (0.81, ("time:masked_head",)),
        (0.90, ("time:decode_attention",)),
        *((0.97, (section,)) for section in others),
    ]


def run_sections(
    sections: Sequence[str], until: float, dry_run: bool, folder: Path, at_once: int
) -> list[Row]:
    """The rows of all ``sections``, of which ``at_once`` run side by side until ``until``.

    A section that crashes, or is stopped as it outlasts its time, gets a row that says so.
    """
    rows: dict[str, list[Row]] = {}
    waiting = list(sections)
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        _run_all(waiting, running, rows, until, dry_run, folder, at_once)
    finally:
        for process in running.values():  # an interrupt must leave none behind
            process.kill()
    return [row for name in sections for row in rows[name]]


def _run_all(
    waiting: list[str],
    running: dict[str, subprocess.Popen[bytes]],
    rows: dict[str, list[Row]],
    until: float,
    dry_run: bool,
    folder: Path,
    at_once: int,
) -> None:
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            running[name] = _start(name, until, dry_run, folder)
        time.sleep(0.05)
        for name, process in list(running.items()):
            late = process.poll() is None and time.time() > until + GRACE_S
            if late:
                process.kill()
                process.wait()
            if process.returncode is not None:
                del running[name]
                rows[name] = read_rows(_file(folder, name, "jsonl"))
                if process.returncode != 0:
                    rows[name].append(_end(name, process.returncode, late, folder))


def _start(name: str, until: float, dry_run: bool, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.gpu_check.section", name]
    command += [str(_file(folder, name, "jsonl")), str(until)]
    with _file(folder, name, "log").open("wb") as log:
        return subprocess.Popen(
            command + ["--dry-run"] * dry_run,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _end(name: str, code: int, late: bool, folder: Path) -> Row:
    if late:
        return Row(name, "the whole section", "skipped", {}, "stopped: it outlasted its time")
    log = _file(folder, name, "log").read_text(encoding="utf-8", errors="replace")
    last = " | ".join(line for line in log.splitlines()[-_LOG_LINES:] if line.strip())
    return Row(name, "the whole section", "error", {}, f"exit status {code}: {last}")


def _file(folder: Path, name: str, ending: str) -> Path:
    return folder / f"{name.replace(':', '-')}.{ending}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, print it, write it. The exit status."""
    given = _parse(arguments)
    scale = TINY if given.dry_run else FULL
    began = time.time()
    path = given.out / ("gpu_check_dry_run.json" if given.dry_run else "gpu_check.json")
    about = report.environment(given.commit)
    for name, value in about.items():
        print(f"{name}: {value}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows += run_sections(["facts"], time.time() + FACTS_S, given.dry_run, folder, 1)
        print(report.section_table("facts", rows), flush=True)
        if not given.dry_run and not any(row.detail.startswith(("gpu", "cuda")) for row in rows):
            print("error: JAX sees no GPU here; --dry-run tries everything else out on the CPU")
            return EXIT_NO_GPU
        for share, sections in phases(scale):
            wanted = [name for name in sections if _matches(name, given.only)]
            if not wanted:
                continue
            until = began + 60 * given.minutes * share
            at_once = max(1, min(len(wanted), (os.cpu_count() or 1) // 2))
            if time.time() > until:
                new = [
                    Row(name, "the whole section", "skipped", {}, "no time left") for name in wanted
                ]
            else:
                new = run_sections(wanted, until, given.dry_run, folder, at_once)
            for name in wanted:
                mine = [row for row in new if row.section == name]
                print("\n" + report.section_table(name, mine), flush=True)
            rows += new
            # Now and not at the end, which may never come.
            report.write(path, about, rows, report.verdicts(rows, scale))
    return _conclude(rows, scale, path, time.time() - began)


def _conclude(rows: Sequence[Row], scale: Scale, path: Path, seconds: float) -> int:
    print()
    if scale.interpret:
        print("A dry run: nothing that it says about time means anything.")
    for verdict in report.verdicts(rows, scale):
        print(verdict)
    checks = [row for row in rows if row.section.startswith("check:")]
    bad = [row for row in checks if row.status in BAD]
    skipped = [row for row in rows if row.status == "skipped"]
    print(f"\n{len(checks)} checks, {len(bad)} of them not passed; {len(skipped)} cases skipped")
    for row in [row for row in rows if row.status in BAD]:
        print(f"  {row.section}, {row.case}: {row.detail}")
    print(f"{seconds:.0f} s; written: {path}")
    return EXIT_FAILED if bad else 0


def _matches(section: str, only: str) -> bool:
    return not only or any(part in section for part in only.split(","))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at tiny sizes")
    default = os.environ.get("OUT") or ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=Path(default), help="where JSON goes")
    parser.add_argument("--minutes", type=float, default=6.0, help="how long it may take")
    parser.add_argument("--only", default="", help="parts of sections' names, comma-separated")
    parser.add_argument(
        "--commit", default="", help="for the JSON, where the tree came without git"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
