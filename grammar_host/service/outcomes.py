"""From what became of a job to what its caller is told."""

from __future__ import annotations

import pickle
import signal
from dataclasses import dataclass
from typing import Any, Literal

from grammar_host.errors import (
    CompileCrashError,
    CompileServiceError,
    CompileTimeoutError,
    GrammarError,
    GrammarTooComplexError,
)
from grammar_host.service.protocol import MAX_REPLY_BYTES, MEMORY_EXIT_CODE, Ending, Reply

OutcomeKind = Literal["succeeded", "refused", "timed_out", "out_of_memory", "crashed", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        kind: the task returned; it raised; the deadline, the memory limit or a crash ended its
            worker; or no guide is to blame.
        result: what the task returned.
        error: None if the task returned.
        keeps_worker: whether the worker can take the next job.
    """

    kind: OutcomeKind
    result: Any = None
    error: Exception | None = None
    keeps_worker: bool = False


def from_reply(reply: Reply, param: str) -> Outcome:
    """The outcome of a job that its worker answered."""
    keeps_worker = not reply.worn
    if reply.kind == "oversized":
        reason = f"what was compiled is larger than {_mebibytes(MAX_REPLY_BYTES)}"
        error: Exception = GrammarTooComplexError(param, f"{reason}; simplify the guide")
        return Outcome("out_of_memory", error=error, keeps_worker=keeps_worker)
    if reply.kind == "refused":
        error = CompileServiceError(f"the task {reply.body.decode()}")
        error.add_note(reply.traceback)
        return Outcome("failed", error=error, keeps_worker=keeps_worker)
    try:
        value = pickle.loads(reply.body)
    except Exception as failure:
        reason = f"the task's outcome cannot be unpickled ({type(failure).__name__})"
        return Outcome("failed", error=CompileServiceError(reason), keeps_worker=keeps_worker)
    if reply.kind == "result":
        return Outcome("succeeded", result=value, keeps_worker=keeps_worker)
    if not isinstance(value, GrammarError):
        value.add_note(reply.traceback)  # nobody expected it: whoever reads the log needs to know
    return Outcome("refused", error=value, keeps_worker=keeps_worker)


def from_deadline(param: str, timeout_s: float) -> Outcome:
    """The outcome of a job that was stopped at its deadline."""
    reason = f"compiling took longer than {timeout_s:g} s and was stopped"
    error = CompileTimeoutError(param, f"{reason}; simplify the guide or raise timeout_s")
    return Outcome("timed_out", error=error)


def from_ending(ending: Ending, param: str, memory_limit_bytes: int) -> Outcome:
    """The outcome of a job whose worker ended under it."""
    by_signal = ending.exit_code < 0
    # Where an allocation fails, Rust aborts and C may write to address zero. Containers that grow
    # by doubling, and copy, fail with a quarter of the limit in use.
    near_limit = by_signal and ending.growth_bytes >= memory_limit_bytes // 4
    if ending.exit_code == MEMORY_EXIT_CODE or near_limit:
        reason = f"compiling needs more than {_mebibytes(memory_limit_bytes)} of memory"
        error: Exception = GrammarTooComplexError(
            param, f"{reason}; simplify the guide or raise memory_limit_bytes"
        )
        return Outcome("out_of_memory", error=error)
    if by_signal and -ending.exit_code == getattr(signal, "SIGKILL", None):
        reason = "the system stopped the compilation, as it does when memory runs out"
        return Outcome("out_of_memory", error=GrammarTooComplexError(param, reason))
    reason = f"the engine ended its process ({_exit_name(ending.exit_code)}) while compiling"
    error = CompileCrashError(param, f"{reason}; simplify the guide or ask for another backend")
    return Outcome("crashed", error=error)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"


def _exit_name(exit_code: int) -> str:
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"exit code {exit_code}"
