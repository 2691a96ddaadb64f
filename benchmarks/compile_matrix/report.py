"""The results as a table for the terminal, as JSON and as the page ``docs/accelerators.md``."""

import dataclasses
import datetime
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compile_matrix.cases import TARGETS, Case, Platform
from benchmarks.compile_matrix.jobs import Result

Outcome = tuple[Case, Result]

_UNKNOWN = "-"

_PAGE = Path(__file__).with_name("page.md")

_COLUMNS: dict[Platform, tuple[str, ...]] = {
    "tpu": ("compiled", "temporaries", "bytes ÷ needed", "estimate ÷ floor", "VMEM", "seconds"),
    "cuda": (
        "compiled", "temporaries", "bytes ÷ needed", "registers", "spills", "shared", "seconds",
    ),
}  # fmt: skip


def excess_bytes(result: Result) -> float | None:
    """Bytes accessed over bytes needed."""
    if result.bytes_accessed is None or not result.minimal_bytes:
        return None
    return result.bytes_accessed / result.minimal_bytes


def excess_time(case: Case, result: Result) -> float | None:
    """The compiler's estimate over the time in which memory can deliver the bytes needed."""
    if result.optimal_seconds is None or not result.minimal_bytes:
        return None
    return result.optimal_seconds * TARGETS[case.target].bandwidth / result.minimal_bytes


def spills(result: Result) -> int:
    """Bytes a thread, over all functions."""
    return sum(each.spill_stores + each.spill_loads for each in result.functions)


def rows(platform: Platform, outcomes: Iterable[Outcome]) -> list[tuple[str, ...]]:
    """One row for each kernel, implementation and target: ``_COLUMNS`` after these three."""

    def key(outcome: Outcome) -> tuple[str, str, str]:
        case = outcome[0]
        return case.kernel, case.implementation, case.target

    order = {target: place for place, target in enumerate(TARGETS)}
    chosen = [each for each in outcomes if TARGETS[each[0].target].platform == platform]
    chosen.sort(key=lambda each: (*key(each)[:2], order[each[0].target]))
    return [
        (*names, *_summary(platform, list(group)))
        for names, group in itertools.groupby(chosen, key=key)
    ]


def _summary(platform: Platform, group: Sequence[Outcome]) -> tuple[str, ...]:
    done = [(case, result) for case, result in group if result.status == "compiled"]
    results = [result for _, result in done]
    cells = {
        "compiled": f"{len(done)} of {len(group)}",
        "temporaries": _range([r.temp_bytes for r in results], _bytes),
        "bytes ÷ needed": _range([excess_bytes(r) for r in results], _ratio),
        "estimate ÷ floor": _range([excess_time(c, r) for c, r in done], _ratio),
        "VMEM": _range([r.vmem_bytes for r in results], _bytes),
        "registers": _range([_most(r, "registers") for r in results], str),
        "spills": _range([spills(r) for r in results], _bytes),
        "shared": _range([_most(r, "shared_bytes") for r in results], _bytes),
        "seconds": _range([r.seconds for r in results], lambda seconds: f"{seconds:.1f}"),
    }
    return tuple(cells[name] for name in _COLUMNS[platform])


def _most(result: Result, attribute: str) -> int:
    return max((getattr(each, attribute) for each in result.functions), default=0)


def _range(values: Iterable[Any], show: Callable[[Any], str]) -> str:
    """``least to most``, one of them where they read the same. Unknown values are left out."""
    known = [value for value in values if value is not None]
    if not known:
        return _UNKNOWN
    least, most = show(min(known)), show(max(known))
    return least if least == most else f"{least} to {most}"


def _bytes(number: float) -> str:
    unit = 0
    while number >= 1000 and unit < 3:
        number, unit = number / 1000, unit + 1
    return f"{number:.3g} {('B', 'KB', 'MB', 'GB')[unit]}" if number else "0"


def _ratio(number: float) -> str:
    return f"{number:.2f}" if number < 10 else f"{number:,.0f}"


def headers(platform: Platform) -> tuple[str, ...]:
    """The columns of ``rows``."""
    return ("kernel", "implementation", "chip", *_COLUMNS[platform])


def failures(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Cases that did not compile."""
    return [(case, result) for case, result in outcomes if result.status != "compiled"]


def page(outcomes: Sequence[Outcome], planned: int, command: str, circumstances: str) -> str:
    """``docs/accelerators.md``: of ``planned`` cases, those that a run of ``command`` came to."""
    failed = failures(outcomes)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    minutes = sum(result.seconds for _, result in outcomes) / 60
    header = (
        f"{len(outcomes) - len(failed)} of {len(outcomes)} cases compile. Written by `{command}`\n"
        f"on {today}, in {minutes:.0f} minutes, with {circumstances}."
    )
    if len(outcomes) < planned:
        header += (
            f"\n**The run was broken off: {planned - len(outcomes)} more cases were not tried.**"
        )
    bandwidths = ", ".join(f"{name} {t.bandwidth / 1e9:.0f}" for name, t in TARGETS.items())
    parts = [_PAGE.read_text(encoding="utf-8").format(header=header, bandwidths=bandwidths)]
    titles: dict[Platform, str] = {"tpu": "TPUs", "cuda": "NVIDIA GPUs"}
    for platform, title in titles.items():
        if table := rows(platform, outcomes):
            parts += [f"\n## {title}\n\n", _markdown(headers(platform), table)]
    if failed:
        parts.append("\n## What does not compile\n\n")
        parts += [
            f"- {case.name}: {result.status}. `{_one_line(result.error)}`\n"
            for case, result in failed
        ]
    return "".join(parts)


def _markdown(columns: Sequence[str], table: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * 3 + ["---:"] * (len(columns) - 3)
    return "".join("| " + " | ".join(row) + " |\n" for row in (columns, rule, *table))


def _one_line(message: str) -> str:
    return " ".join(message.split()).replace("`", "'")[:300]


def to_json(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """A flat record for each case."""
    return [dataclasses.asdict(case) | dataclasses.asdict(result) for case, result in outcomes]
