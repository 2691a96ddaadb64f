"""The processes that a compile service owns, seen from the process that owns them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from grammar_host.errors import CompileServiceError
from grammar_host.service.protocol import (
    FORK,
    REAP,
    Ending,
    Setup,
    is_open,
    receive,
    send,
)

WORKER_LOG_VARIABLE = "GRAMMAR_HOST_WORKER_LOG"
"""Environment variable: a file to which workers append what they and their engines print, with the
tracebacks of exceptions and crashes. Unset: nowhere."""

START_SECONDS = 60.0
"""How long making the task, or preloading an engine, may take: a cold disk is slow."""

_STOP_SECONDS = 2.0

_WAY_OUT = 'GrammarCompiler(isolation="none") compiles in this process, without protection'

# More threads than one would not survive the fork, and every arena of malloc reserves address
# space, which is what the memory limit counts.
_WORKER_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "2",
}


class LauncherDied(Exception):
    """The process that makes workers is gone; a fresh one may do."""


class Worker(ABC):
    """One process that answers jobs, one at a time.

    Attributes:
        connection: where the jobs go.
        preloads: what had been preloaded when it started.
    """

    def __init__(self, connection: socket.socket, preloads: tuple[str, ...]) -> None:
        self.connection = connection
        self.preloads = preloads

    def is_alive(self) -> bool:
        """Whether an idle worker can take a job."""
        return is_open(self.connection)

    @abstractmethod
    def kill(self) -> None:
        """Ends the process at once, whatever it is doing."""

    @abstractmethod
    def reap(self) -> Ending:
        """Waits for the process, which has been killed or has hung up, and tells how it ended.

        Raises:
            LauncherDied: nobody knows.
        """

    def discard(self) -> None:
        """Ends the process, waits for it, and closes the connection."""
        if self.is_alive():  # else its id may no longer be its own, if the zygote is gone, too
            self.kill()
        with contextlib.suppress(LauncherDied):
            self.reap()
        self.connection.close()


class Launcher(ABC):
    """Makes workers. Thread-safe."""

    @abstractmethod
    def new_worker(self, preloads: tuple[str, ...]) -> Worker:
        """Starts a worker; blocks until it can take a job.

        Args:
            preloads: what the task should have preloaded, once each.

        Raises:
            LauncherDied: killed from outside.
            CompileServiceError: it cannot be done.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends all processes and waits for them; calls of other threads fail. Idempotent."""


def new_launcher(setup: Setup) -> Launcher:
    """The launcher for this operating system; returns before its processes are ready.

    Raises:
        CompileServiceError: processes cannot be started here.
    """
    return Zygote(setup) if setup.forks else Spawner(setup)


class Zygote(Launcher):
    """A process that forks workers: see `grammar_host.service.worker`."""

    def __init__(self, setup: Setup) -> None:
        self._setup: Setup | None = setup  # until it has been sent
        self._request_lock = threading.Lock()
        self._kill_lock = threading.Lock()  # never held for long
        self._closing = False
        self._control, self._process = _start_interpreter()

    def new_worker(self, preloads: tuple[str, ...]) -> Worker:
        ours, theirs = _socket_pair()
        try:
            with theirs:
                forked = self._request(FORK, preloads, [theirs.fileno()])
            if forked.pid is None:
                raise cannot_start(f"fork: {forked.failure}")
        except BaseException:
            ours.close()
            raise
        return _ForkedWorker(ours, preloads, self, forked.pid)

    def reap(self, pid: int) -> Ending:
        """How a worker ended."""
        ending: Ending = self._request(REAP, pid)
        return ending

    def kill(self, pid: int) -> None:
        """Kills a worker that has not been reaped.

        Not by a request: the zygote may be busy. Until it is told to reap the worker, or to end,
        the id is the worker's, even if that is long dead.
        """
        with self._kill_lock:
            if not self._closing:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _request(self, kind: bytes, argument: Any, descriptors: list[int] | None = None) -> Any:
        deadline = time.monotonic() + START_SECONDS
        with self._request_lock:
            try:
                if self._setup is not None:
                    _set_up(self._control, self._setup, deadline)
                    self._setup = None
                self._control.settimeout(START_SECONDS)
                socket.send_fds(self._control, [kind], descriptors or [])
                send(self._control, argument, deadline)
                return receive(self._control, deadline)
            except (EOFError, OSError) as error:
                raise _launcher_died(error) from None

    def close(self) -> None:
        with self._kill_lock, contextlib.suppress(OSError):
            self._closing = True
            # Wakes a thread that waits for an answer, and tells the zygote to end its workers.
            self._control.shutdown(socket.SHUT_RDWR)
        # Not while another thread uses the socket: its number might soon belong to another file.
        with self._request_lock:
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:  # it is busy importing something
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            with self._kill_lock:
                self._control.close()


class _ForkedWorker(Worker):
    def __init__(
        self, connection: socket.socket, preloads: tuple[str, ...], zygote: Zygote, pid: int
    ) -> None:
        super().__init__(connection, preloads)
        self._zygote = zygote
        self._pid: int | None = pid

    def kill(self) -> None:
        if self._pid is not None:
            self._zygote.kill(self._pid)

    def reap(self) -> Ending:
        if self._pid is None:
            raise LauncherDied("reaped before")
        pid, self._pid = self._pid, None
        return self._zygote.reap(pid)


class Spawner(Launcher):
    """Starts every worker as an interpreter of its own, where forking is not possible.

    Slower to start than a zygote, without a memory limit on Windows, and a worker whose parent is
    killed lives on until its job ends.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] | None = set()

    def new_worker(self, preloads: tuple[str, ...]) -> Worker:
        with self._lock:
            if self._processes is None:
                raise LauncherDied("closed")
            connection, process = _start_interpreter()
            self._processes.add(process)
        worker = _SpawnedWorker(connection, preloads, process, self)
        setup = replace(self._setup, preloads=preloads)
        try:
            _set_up(connection, setup, time.monotonic() + START_SECONDS)
        except BaseException as error:
            worker.discard()
            if isinstance(error, EOFError | OSError):
                raise _launcher_died(error) from None
            raise
        return worker

    def forget(self, process: subprocess.Popen[bytes]) -> bool:
        """A process has been waited for; False if it was `close` that ended it."""
        with self._lock:
            if self._processes is None:
                return False
            self._processes.discard(process)
            return True

    def close(self) -> None:
        with self._lock:
            processes, self._processes = self._processes or set(), None
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


class _SpawnedWorker(Worker):
    def __init__(
        self,
        connection: socket.socket,
        preloads: tuple[str, ...],
        process: subprocess.Popen[bytes],
        spawner: Spawner,
    ) -> None:
        super().__init__(connection, preloads)
        self._process = process
        self._spawner = spawner

    def kill(self) -> None:
        self._process.kill()

    def reap(self) -> Ending:
        exit_code = self._process.wait()
        if not self._spawner.forget(self._process):
            raise LauncherDied("closed")
        return Ending(exit_code, 0)


def cannot_start(reason: str) -> CompileServiceError:
    """The error that says why there are no workers, and what to do."""
    return CompileServiceError(f"the compile workers cannot start ({reason}); {_WAY_OUT}")


def _launcher_died(error: Exception) -> LauncherDied:
    if isinstance(error, TimeoutError):
        return LauncherDied(f"their process does not answer within {START_SECONDS:g} s")
    return LauncherDied("their process ended")


def _set_up(connection: socket.socket, setup: Setup, deadline: float) -> None:
    send(connection, setup, deadline)
    failure = receive(connection, deadline).failure
    if failure is not None:
        raise cannot_start(" ".join(failure.split()))


def _start_interpreter() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Starts `grammar_host.service.worker`, connected to the socket that it returns."""
    if getattr(sys, "frozen", False) or not sys.executable:
        raise cannot_start("this program brings no Python interpreter that could be run")
    ours, theirs = _socket_pair()
    try:
        with theirs, _worker_log() as log:
            return ours, _popen(theirs, log)
    except OSError as error:
        ours.close()
        raise cannot_start(str(error)) from None
    except BaseException:
        ours.close()
        raise


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:  # no more file descriptors
        raise cannot_start(str(error)) from None


def _popen(connection: socket.socket, log: BinaryIO) -> subprocess.Popen[bytes]:
    # -P: a file in the working directory must not replace a module. -W: the parent's environment
    # may turn warnings into errors. -u: what is printed before a crash must reach the log.
    command = [sys.executable, "-P", "-u", "-W", "ignore", "-m", "grammar_host.service.worker"]
    stdin: Any = subprocess.PIPE if sys.platform == "win32" else connection
    process = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=log,
        stderr=log,
        env=_environment(),
        # Out of reach of the terminal's Ctrl-C, and one group to kill.
        start_new_session=True,
    )
    if sys.platform == "win32":
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(connection.share(process.pid))
    return process


def _worker_log() -> BinaryIO:
    return open(os.environ.get(WORKER_LOG_VARIABLE) or os.devnull, "ab")


def _environment() -> dict[str, str]:
    """The parent's environment, with the same modules importable in the same order."""
    path = [os.path.abspath(entry) for entry in sys.path]
    checkout = str(Path(__file__).resolve().parents[2])
    if checkout not in path:  # it was found through a relative entry, from another directory
        path.append(checkout)
    return {**os.environ, **_WORKER_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}
