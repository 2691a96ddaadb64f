"""Cases are compiled in another process: a compiler that aborts takes one case with it, and no more.

A worker says ``ready``, then reads a case a line and answers with a result a line. Both are JSON, on
pipes that nothing else writes to: what compilers print goes to the log.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from benchmarks.compile_matrix.cases import Case, Program

_ROOT = Path(__file__).resolve().parents[2]
_READY = "ready\n"
_LOG_LINES = 8  # of a worker that died

Status = Literal["compiled", "refused", "error", "crashed"]


@dataclasses.dataclass(frozen=True)
class Function:
    """A function that runs on a GPU, as ``ptxas --verbose`` and XLA's launch plan describe it."""

    name: str
    registers: int  # a thread
    spill_stores: int  # bytes a thread
    spill_loads: int
    shared_bytes: int  # a block, static and dynamic


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a case. Figures are None where the compiler gives none.

    Attributes:
      status: ``compiled``; ``refused`` by the kernel itself (a ValueError about ``implementation``);
        ``error`` in lowering or compiling; ``crashed`` with the whole process, or out of time.
      error: the message, or the end of the log.
      seconds: to lower and compile.
      minimal_bytes: see ``Program``.
      bytes_accessed, flops: the cost analysis of the compiled program.
      optimal_seconds: the compiler's estimate of its run time.
      argument_bytes, alias_bytes, temp_bytes: device memory: operands, results that lie in donated
        operands, and all else.
      vmem_bytes: the most that one operation of a TPU program takes of the vector memory.
      custom_calls: the targets of the calls that cost analysis does not look into.
      functions: those of a GPU program.
    """

    status: Status
    error: str = ""
    seconds: float = 0.0
    minimal_bytes: int | None = None
    bytes_accessed: float | None = None
    flops: float | None = None
    optimal_seconds: float | None = None
    argument_bytes: int | None = None
    alias_bytes: int | None = None
    temp_bytes: int | None = None
    vmem_bytes: int | None = None
    custom_calls: tuple[str, ...] = ()
    functions: tuple[Function, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Result":
        lists = {
            "custom_calls": tuple(values["custom_calls"]),
            "functions": tuple(Function(**each) for each in values["functions"]),
        }
        return cls(**{**values, **lists})


def describe(
    program: Program, compiled: Any, cost: Mapping[str, float] | None, **more: Any
) -> Result:
    """The result of a case that compiled (without ``seconds``), from what every backend tells."""
    memory = compiled.memory_analysis()
    cost = cost or {}
    return Result(
        "compiled",
        minimal_bytes=program.minimal_bytes,
        # Sums over the program, in which an operation that gives no figure counts as -1.
        bytes_accessed=_known(cost.get("bytes accessed")),
        flops=_known(cost.get("flops")),
        optimal_seconds=_known(cost.get("optimal_seconds")),
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        **more,
    )


def _known(figure: float | None) -> float | None:
    return None if figure is None or figure < 0 else figure


@contextlib.contextmanager
def private_output() -> Iterator[TextIO]:
    """The worker's end of the pipe. Whatever prints to standard output meanwhile writes to the log."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)
        yield pipe


def serve(compile_case: Callable[[Case], Result], pipe: TextIO, seconds: float) -> None:
    """The main loop of a worker; ``seconds`` is what one case may take before the worker ends."""
    pipe.write(_READY)
    pipe.flush()
    for line in sys.stdin:
        case = Case(**json.loads(line))
        # A thread of its own in C: it ends the process while a compiler holds the interpreter.
        faulthandler.dump_traceback_later(seconds, exit=True)
        begin = time.perf_counter()
        try:
            result = compile_case(case)
        except Exception as error:
            result = _failure(error)
        faulthandler.cancel_dump_traceback_later()
        result = dataclasses.replace(result, seconds=time.perf_counter() - begin)
        pipe.write(json.dumps(dataclasses.asdict(result)) + "\n")
        pipe.flush()


def _failure(error: Exception) -> Result:
    message = f"{type(error).__name__}: {error}".strip()
    refused = isinstance(error, ValueError) and str(error).startswith("implementation:")
    return Result("refused" if refused else "error", error=message[:2000])


def run(
    module: str, cases: Iterable[Case], *, path: Sequence[Path] = ()
) -> Iterator[tuple[Case, Result]]:
    """Every case with its result, in order, from ``python -m module`` with ``path`` to import from.

    Raises:
      RuntimeError: the worker does not start, with the end of its log.
    """
    with contextlib.ExitStack() as stack:
        worker: _Worker | None = None
        for case in cases:
            if worker is None:
                worker = stack.enter_context(_Worker(module, path))
            result = worker.compile(case)
            if result.status == "crashed":
                worker = None
            yield case, result


class _Worker:
    def __init__(self, module: str, path: Sequence[Path]) -> None:
        self._command = [sys.executable, "-m", module]
        found = [str(_ROOT), *map(str, path), os.environ.get("PYTHONPATH", "")]
        self._environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, found)),
        }

    def __enter__(self) -> "_Worker":
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        if self._answer("") != _READY:
            message = f"{' '.join(self._command)} does not start:\n{self._end()}"
            self.__exit__()
            raise RuntimeError(message)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe_in.close()
        self._pipe_out.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # in the middle of a case that nobody waits for
            self._process.kill()
            self._process.wait()
        self._log.close()

    def compile(self, case: Case) -> Result:
        begin = time.perf_counter()
        answer = self._answer(json.dumps(dataclasses.asdict(case)) + "\n")
        if answer:
            return Result.from_json(json.loads(answer))
        return Result("crashed", error=self._end(), seconds=time.perf_counter() - begin)

    @property
    def _pipe_in(self) -> Any:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _pipe_out(self) -> Any:
        assert self._process.stdout is not None
        return self._process.stdout

    def _answer(self, question: str) -> str:
        """A line, or nothing from a worker that is gone."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe_in.write(question)
            self._pipe_in.flush()
        line: str = self._pipe_out.readline()
        return line

    def _end(self) -> str:
        """How a worker ended: its exit status and the last lines of its log."""
        status = self._process.wait()
        self._log.seek(0)
        lines = [line.rstrip() for line in self._log if line.strip()]
        return "\n".join([f"exit status {status}", *lines[-_LOG_LINES:]])
