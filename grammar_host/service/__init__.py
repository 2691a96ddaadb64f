"""Runs what may hang, exhaust the memory or crash, where that does no harm: in other processes.

Compilers of grammar engines cannot be interrupted, and there are guides that keep them busy for
minutes, take all memory or end the process. A `CompileService` runs such a task in a worker process
under a deadline and a memory limit. What a task returns must be small (a plan, not a compiled
grammar).

Set the environment variable `GRAMMAR_HOST_WORKER_LOG` to a file to see what the workers print.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import weakref
from types import TracebackType
from typing import Any

from grammar_host.service.pool import CompileJob, Pool, RunningJob, ServiceStats
from grammar_host.service.processes import WORKER_LOG_VARIABLE
from grammar_host.service.protocol import Setup

__all__ = [
    "WORKER_LOG_VARIABLE",
    "CompileJob",
    "CompileService",
    "RunningJob",
    "ServiceStats",
]


class CompileService:
    """Runs one task, with different arguments, in processes that can be killed. Thread-safe.

    Nothing is started before the first job or `start`. The workers end with `close`, the end of a
    `with` block, the garbage collection of the service and all its jobs, the end of the
    interpreter, and also if this process is killed. They are no children of `multiprocessing`: the
    caller's `__main__` is not run again, and no process with threads is forked.
    """

    def __init__(
        self,
        task_factory: str,
        payload: Any,
        *,
        timeout_s: float,
        memory_limit_bytes: int,
        workers: int = 2,
    ) -> None:
        """Describes the workers.

        Args:
            task_factory: `"module:attribute"` of a callable that makes the task: it gets the
                payload, and returns a callable, which gets a job's arguments. It is called once,
                in a process that the workers are forked from, so it must start no threads; what it
                loads is shared by all workers. If the task has a method `preload(name)`, that runs
                in the same process, see `preload`.
            payload: the factory's argument; is pickled at once.
            timeout_s: how long a job may run, in seconds; waiting for a worker does not count.
            memory_limit_bytes: how much memory a job may add to what its worker has, in bytes of
                address space. Threads and libraries that a job loads count. Linux only.
            workers: how many jobs may run at once.

        Raises:
            ValueError: a limit that is not positive, or a malformed `task_factory`.
        """
        if not re.fullmatch(r"\w+(\.\w+)*:\w+", task_factory):
            raise ValueError(f"task_factory is 'module:attribute', not {task_factory!r}")
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s is a number of seconds above 0, not {timeout_s}")
        if memory_limit_bytes < 1:
            raise ValueError(f"memory_limit_bytes is at least 1, not {memory_limit_bytes}")
        if workers < 1:
            raise ValueError(f"workers is at least 1, not {workers}")
        setup = Setup(
            task_factory,
            pickle.dumps(payload, pickle.HIGHEST_PROTOCOL),
            memory_limit_bytes,
            preloads=(),
            forks=hasattr(os, "fork"),
        )
        self._pool = Pool(setup, timeout_s, workers)
        weakref.finalize(self, self._pool.abandon).atexit = False

    def start(self) -> None:
        """Starts the workers, without waiting for them, so that the first job need not.

        Raises:
            CompileServiceError: closed, or this process was forked from the one that started them.
        """
        self._pool.start()

    def preload(self, name: str) -> None:
        """Prepares the workers for a kind of job, outside of any job's deadline and memory limit.

        The task's method `preload(name)` will run once where the workers are forked from (to
        import an engine, say). Workers that started before are replaced when they take their next
        job. A preload that raises is ignored: the jobs will meet the reason. Does not wait.

        Args:
            name: any string that the task understands; once is enough.
        """
        self._pool.preload(name)

    def submit(self, *args: Any, param: str, label: str | None = None) -> CompileJob:
        """Queues a job.

        The future raises what the task raised, or

        - `CompileTimeoutError`: the deadline passed;
        - `GrammarTooComplexError`: over the memory limit, or stopped for lack of memory;
        - `CompileCrashError`: the worker ended in any other way;
        - `CompileServiceError`: no guide is to blame: the workers cannot be started, or were
          stopped, or the outcome cannot be pickled.

        Args:
            *args: the task's arguments; pickled at once.
            param: `GuideError.param` of the first three.
            label: names the job in `running`; `param` if it is None.

        Raises:
            CompileServiceError: closed, or this process was forked from the one that started the
                workers.
        """
        request = pickle.dumps(args, pickle.HIGHEST_PROTOCOL)
        job = CompileJob(request, param, param if label is None else label, self)
        self._pool.submit(job)
        return job

    def stats(self) -> ServiceStats:
        """Counters and gauges, for metrics."""
        return self._pool.stats()

    def running(self) -> list[RunningJob]:
        """The jobs that workers are doing now, in the order in which they began."""
        return self._pool.running()

    def close(self) -> None:
        """Kills the workers. Jobs that have not ended fail with `CompileServiceError`."""
        self._pool.close()

    def __enter__(self) -> CompileService:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
