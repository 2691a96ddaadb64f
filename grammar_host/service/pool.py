"""The queue in front of the workers, and the threads that watch them."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from grammar_host.errors import CompileServiceError
from grammar_host.service.outcomes import Outcome, from_deadline, from_ending, from_reply
from grammar_host.service.processes import (
    WORKER_LOG_VARIABLE,
    Launcher,
    LauncherDied,
    Worker,
    cannot_start,
    new_launcher,
)
from grammar_host.service.protocol import Setup, receive, send

_JOIN_SECONDS = 5.0


class CompileJob(Future[Any]):
    """A future that knows how long it took. `cancel` succeeds while the job is queued.

    Attributes:
        label: names the job in `CompileService.running`.
        waiting_seconds: from submission until a worker began, a worker's start included; None
            until then.
        running_seconds: from there to the outcome; None until then. This is what the deadline
            limits.
    """

    def __init__(self, request: bytes, param: str, label: str, owner: object) -> None:
        """Describes a job; `CompileService.submit` does this.

        Args:
            request: pickle of the task's arguments.
            param: `GuideError.param` if the job takes its worker down.
            label: see above.
            owner: kept alive as long as the job.
        """
        super().__init__()
        self.label = label
        self.waiting_seconds: float | None = None
        self.running_seconds: float | None = None
        self._request = request
        self._param = param
        self._owner = owner
        self._submitted = time.monotonic()

    def begin(self) -> float:
        """A worker takes the job; returns `time.monotonic()`."""
        started = time.monotonic()
        self.waiting_seconds = started - self._submitted
        return started

    def exchange(
        self, worker: Worker, deadline: float, timeout_s: float, memory_limit_bytes: int
    ) -> Outcome:
        """Has a worker do the job.

        Raises:
            LauncherDied: so did the worker, with all others, and no guide is to blame.
        """
        try:
            send(worker.connection, self._request, deadline)
            reply = receive(worker.connection, deadline)
        except TimeoutError:
            worker.kill()  # before callbacks run, which may take their time
            return from_deadline(self._param, timeout_s)
        except EOFError:
            return from_ending(worker.reap(), self._param, memory_limit_bytes)
        return from_reply(reply, self._param)

    def settle(self, outcome: Outcome) -> None:
        """Tells whoever waits."""
        if outcome.error is None:
            self.set_result(outcome.result)
        else:
            self.set_exception(outcome.error)


@dataclass(frozen=True)
class ServiceStats:
    """Counters since the service was made, and gauges.

    Attributes:
        jobs: submitted. Those that are neither queued, nor running, nor cancelled, are one of the
            following six.
        succeeded: the task returned.
        refused: the task raised.
        timed_out: the deadline passed.
        out_of_memory: stopped by the memory limit, or by the system for lack of memory.
        crashed: took the worker down.
        failed: no guide is to blame: no worker could be started, or the service was closed.
        cancelled: by their callers, while queued.
        restarts: workers started to replace others.
        queued: jobs that wait now.
        running: jobs that run now.
        waiting_seconds: sum over the jobs that ended.
        running_seconds: sum over the jobs that ended.
    """

    jobs: int
    succeeded: int
    refused: int
    timed_out: int
    out_of_memory: int
    crashed: int
    failed: int
    cancelled: int
    restarts: int
    queued: int
    running: int
    waiting_seconds: float
    running_seconds: float


@dataclass(frozen=True)
class RunningJob:
    """A job that a worker is doing.

    Attributes:
        label: as submitted.
        seconds: since it began.
    """

    label: str
    seconds: float


class Pool:
    """Jobs in, outcomes out, one thread for each worker.

    The threads know this object, never the `CompileService`, so that a service which nobody knows
    any more is collected.
    """

    def __init__(self, setup: Setup, timeout_s: float, workers: int) -> None:
        self._setup = setup
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[CompileJob | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._watchers = [_Watcher(self) for _ in range(workers)]
        self._watching = 0  # how many of them have been started
        self._left = 0
        self._pid: int | None = None  # of the process that started the threads
        self._launcher: Launcher | None = None
        self._closed = False
        self._running: dict[CompileJob, float] = {}
        self._counts: Counter[str] = Counter()
        self._waiting_seconds = 0.0
        self._running_seconds = 0.0
        self._workers_started = 0
        self.preloads: tuple[str, ...] = ()

    def start(self) -> None:
        """Starts threads and processes, if that has not been done; does not wait for them."""
        with self._lock:
            if self._closed:
                raise _closed()
            if self._pid is None:
                self._pid = os.getpid()
                atexit.register(self.close)
            elif self._pid != os.getpid():
                raise CompileServiceError(
                    "this process was forked from the one that started the compile service; "
                    "make the service after the fork"
                )
            for watcher in self._watchers[self._watching :]:
                try:
                    watcher.start()
                except RuntimeError as error:
                    raise cannot_start(str(error)) from None
                self._watching += 1

    def preload(self, name: str) -> None:
        """Has every worker that starts from now on, or that takes a job, preload `name`."""
        with self._lock:
            if name not in self.preloads:
                self.preloads = (*self.preloads, name)

    def submit(self, job: CompileJob) -> None:
        """Queues a job."""
        with self._lock:
            self.start()
            self._counts["jobs"] += 1
            self._queue.put(job)

    def stats(self) -> ServiceStats:
        """See `CompileService.stats`."""
        with self._lock:
            count = self._counts
            begun = len(self._running) + sum(count.values()) - count["jobs"]
            return ServiceStats(
                jobs=count["jobs"],
                succeeded=count["succeeded"],
                refused=count["refused"],
                timed_out=count["timed_out"],
                out_of_memory=count["out_of_memory"],
                crashed=count["crashed"],
                failed=count["failed"],
                cancelled=count["cancelled"],
                restarts=max(self._workers_started - len(self._watchers), 0),
                queued=count["jobs"] - begun,
                running=len(self._running),
                waiting_seconds=self._waiting_seconds,
                running_seconds=self._running_seconds,
            )

    def running(self) -> list[RunningJob]:
        """See `CompileService.running`."""
        with self._lock:
            now = time.monotonic()
            return [RunningJob(job.label, now - begun) for job, begun in self._running.items()]

    def take(self) -> CompileJob | None:
        """The next job, once there is one; None when the pool is closed."""
        while (job := self._queue.get()) is not None:
            if job.set_running_or_notify_cancel():
                return job
            with self._lock:
                self._counts["cancelled"] += 1
        return None

    def run(self, job: CompileJob, worker: Worker) -> bool:
        """Runs a job that has been taken; whether the worker can be used again.

        Raises:
            LauncherDied: see `CompileJob.exchange`; the job may be run again.
        """
        started = job.begin()
        with self._lock:
            self._running[job] = started
        limit = self._setup.memory_limit_bytes
        try:
            outcome = job.exchange(worker, started + self._timeout_s, self._timeout_s, limit)
        except LauncherDied:
            with self._lock:
                del self._running[job]
            raise
        job.running_seconds = time.monotonic() - started
        with self._lock:
            del self._running[job]
            self._waiting_seconds += job.waiting_seconds or 0.0
            self._running_seconds += job.running_seconds
            self._counts[outcome.kind] += 1
        job.settle(outcome)
        return outcome.keeps_worker

    def fail(self, job: CompileJob, error: Exception) -> None:
        """Ends a job that has been taken, but could not be run."""
        with self._lock:
            self._running.pop(job, None)
            self._counts["failed"] += 1
        if isinstance(error, LauncherDied):
            reason = "the compile workers were stopped while the guide was compiled"
            error = CompileServiceError(reason)
        if not isinstance(error, CompileServiceError):
            error = CompileServiceError(f"the compile service failed: {error!r}")
        job.set_exception(error.with_traceback(None))

    def new_worker(self) -> Worker:
        """Starts a worker.

        Raises:
            CompileServiceError: it cannot be done.
        """
        reason = ""
        for _ in range(2):  # the second launcher is for one that was killed while it was idle
            launcher = self._current_launcher()
            try:
                worker = launcher.new_worker(self.preloads)
            except LauncherDied as error:
                reason = str(error)
                with self._lock:
                    if self._launcher is launcher:
                        self._launcher = None
                launcher.close()
            else:
                with self._lock:
                    self._workers_started += 1
                return worker
        raise cannot_start(f"{reason}; {WORKER_LOG_VARIABLE}=file keeps what it prints")

    def close(self) -> None:
        """Ends threads and processes; jobs that have not ended fail. Idempotent."""
        with self._lock:
            if self._pid != os.getpid():  # never started, or a copy without threads and workers
                self._closed = True
                return
            self._closed = True
        self._end_processes()
        # Behind the jobs that are queued: the watchers will have failed those by then.
        self._dismiss_watchers()
        for watcher in self._watchers[: self._watching]:
            if watcher is not threading.current_thread():
                watcher.join(_JOIN_SECONDS)

    def abandon(self) -> None:
        """Closes without waiting: the last thread ends the processes.

        For the garbage collector, which may run in any thread at any point: takes no lock. There
        are no jobs any more, because they know their service.
        """
        self._closed = True
        self._dismiss_watchers()

    def leave(self) -> None:
        """A watcher ends."""
        with self._lock:
            self._left += 1
            last = self._left == self._watching
        if last:
            self._end_processes()

    def _dismiss_watchers(self) -> None:
        for _ in self._watchers:
            self._queue.put(None)

    def _end_processes(self) -> None:
        with self._lock:
            launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.close()
        atexit.unregister(self.close)

    def _current_launcher(self) -> Launcher:
        with self._lock:
            if self._closed:
                raise _closed()
            if self._launcher is None:
                self._launcher = new_launcher(self._setup)
            return self._launcher


class _Watcher(threading.Thread):
    """Gives jobs to one worker, and replaces it when it ends."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(name="grammar-compile", daemon=True)
        self._pool = pool
        self._worker: Worker | None = None

    def run(self) -> None:
        self._warm_up()
        while self._serve_one():
            pass
        if self._worker is not None:
            self._worker.connection.close()  # its launcher ends the process
        self._pool.leave()

    # A frame of its own: the loop must not hold the last job, and with it the service, while it
    # waits for the next one.
    def _serve_one(self) -> bool:
        job = self._pool.take()
        if job is None:
            return False
        try:
            try:
                keeps_worker = self._pool.run(job, self._usable_worker())
            except LauncherDied:  # from outside, perhaps before the job came
                keeps_worker = self._pool.run(job, self._usable_worker())
        except Exception as error:  # whatever it is, whoever waits must not hang
            self._pool.fail(job, error)
            return True
        if not keeps_worker:
            self._discard()
            self._warm_up()
        return True

    def _usable_worker(self) -> Worker:
        worker = self._worker
        if worker is not None:
            if worker.preloads == self._pool.preloads and worker.is_alive():
                return worker
            self._discard()
        self._worker = self._pool.new_worker()
        return self._worker

    def _warm_up(self) -> None:
        with suppress(CompileServiceError):  # the next job meets it again, and reports it
            self._worker = self._pool.new_worker()

    def _discard(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.discard()


def _closed() -> CompileServiceError:
    return CompileServiceError("the compile service is closed")
