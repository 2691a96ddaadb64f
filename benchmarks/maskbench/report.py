"""From outcomes to figures: counts, reasons, times."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.common import print_table
from benchmarks.maskbench.judge import CRASH, Outcome

TIMEOUT_CODE = "grammar_compile_timeout"
CRASH_CODES = (CRASH, "grammar_compile_crash")

_PERCENTILES: dict[str, dict[str, float]] = {
    "mask µs": {"p50": 50, "p99": 99, "p99.9": 99.9, "max": 100},
    "accept µs": {"p50": 50, "p99": 99, "p99.9": 99.9, "max": 100},
    "compile ms": {"p50": 50, "p95": 95, "max": 100},
    "first mask ms": {"p50": 50, "p95": 95, "max": 100},
}
_TOP_REASONS = 12


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything that is reported about one engine, as JSON.

    ``refused`` counts error codes, timeouts and crashes left out; ``times`` has means and
    percentiles by name, without those of which there is no sample.
    """
    codes = Counter(each.code for each in outcomes if each.code is not None)
    valid_rejected = [_count(each, valid=True, verdict="rejected") for each in outcomes]
    invalid_accepted = [_count(each, valid=False, verdict="accepted") for each in outcomes]
    failed = [
        _count(each, valid=True, verdict="failed") + _count(each, valid=False, verdict="failed")
        for each in outcomes
    ]
    refused = {
        code: count
        for code, count in codes.most_common()
        if code != TIMEOUT_CODE and code not in CRASH_CODES
    }
    inexact = [each for each in outcomes if each.code is None and not each.exact]
    return {
        "problems": len(outcomes),
        "fully_right": sum(each.fully_right for each in outcomes),
        "valid_rejected_problems": sum(map(bool, valid_rejected)),
        "valid_rejected_instances": sum(valid_rejected),
        "invalid_accepted_instances": sum(invalid_accepted),
        "failed_instances": sum(failed),
        "refused_problems": sum(refused.values()),
        "timeouts": codes[TIMEOUT_CODE],
        "crashes": sum(codes[code] for code in CRASH_CODES),
        "inexact": len(inexact),
        "inexact_fully_right": sum(each.fully_right for each in inexact),
        "served_by": dict(Counter(e.served_by for e in outcomes if e.served_by).most_common()),
        "refused": refused,
        "reasons": dict(_reasons(outcomes).most_common()),
        "times": _times(outcomes),
        "not_right": {each.name: list(explain(each)) for each in outcomes if not each.fully_right},
    }


def explain(outcome: Outcome) -> Iterator[str]:
    """What is not right about a problem, one line per reason."""
    if outcome.code is not None:
        yield f"refused ({outcome.code}): {outcome.reason}"
    for ruling in outcome.rulings:
        if not ruling.right:
            kind = "valid" if ruling.valid else "invalid"
            where = f" at token {ruling.token} of {ruling.tokens}" if ruling.valid else ""
            what = f"{kind} {ruling.verdict}{where}: {ruling.description}"
            yield f"{what} ({ruling.context})" if ruling.context else what


def print_report(summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Tables with one column per engine."""
    counts = [
        [key.replace("_", " "), *(str(each[key]) for each in summaries.values())]
        for key, value in next(iter(summaries.values())).items()
        if isinstance(value, int)
    ]
    print_table("verdicts", ["", *summaries], counts)
    times = [
        [f"{name} {figure}", *(_figure(each["times"], name, figure) for each in summaries.values())]
        for name, percentiles in _PERCENTILES.items()
        for figure in ("mean", *percentiles)
    ]
    print_table("times", ["", *summaries], times)
    for backend, summary in summaries.items():
        served = ", ".join(f"{name} {count}" for name, count in summary["served_by"].items())
        print(f"{backend}: served by {served or 'nothing'}")
        for code, count in summary["refused"].items():
            print(f"  {count:5d}  {code}")
        for reason, count in list(summary["reasons"].items())[:_TOP_REASONS]:
            print(f"  {count:5d}  {reason}")


def print_failures(summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Every problem that is not fully right, with its reasons."""
    for backend, summary in summaries.items():
        for name, lines in summary["not_right"].items():
            for line in lines:
                print(f"{backend}  {name}  {line}")


def _count(outcome: Outcome, *, valid: bool, verdict: str) -> int:
    return sum(r.valid == valid and r.verdict == verdict for r in outcome.rulings)


def _reasons(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Refusals by message, with what differs from schema to schema taken out."""
    return Counter(
        re.sub(r"\bat (?:the root:|/\S*)|'[^']*'|\"[^\"]*\"|\d+", "…", each.reason)[:100]
        for each in outcomes
        if each.code is not None
    )


def _times(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    samples = {
        "mask µs": [time for each in outcomes for time in each.mask_us],
        "accept µs": [time for each in outcomes for time in each.accept_us],
        "compile ms": [each.compile_ms for each in outcomes if each.code is None],
        "first mask ms": [each.first_mask_ms for each in outcomes if each.first_mask_ms],
    }
    return {name: _figures(times, _PERCENTILES[name]) for name, times in samples.items() if times}


def _figures(times: Sequence[float], percentiles: Mapping[str, float]) -> dict[str, float]:
    values = np.percentile(np.array(times), list(percentiles.values()))
    return {"mean": float(np.mean(times))} | dict(zip(percentiles, map(float, values), strict=True))


def _figure(times: Mapping[str, Mapping[str, float]], name: str, figure: str) -> str:
    return f"{times[name][figure]:.1f}" if name in times else ""
