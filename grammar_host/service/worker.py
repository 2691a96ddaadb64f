"""The other side of the compile service: `python -m grammar_host.service.worker`.

The process is a *zygote*: it makes the task once, then forks one worker whenever it is asked to.
A worker shares all of the zygote's memory until it writes to it, so a new one is there within
milliseconds. The zygote itself never runs a guide, and has a single thread, because nothing but
the thread that forks survives in the child: pools of threads belong into the workers, after the
fork. Where forking is not possible (Windows), the process is the one worker itself.

Whoever loses its connection ends: nothing is left behind when the parent is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from grammar_host.service.limits import (
    address_space_bytes,
    end_with_parent,
    forbid_core_dumps,
    limit_growth,
    resident_bytes,
    volunteer_for_out_of_memory,
)
from grammar_host.service.protocol import (
    FORK,
    MAX_REPLY_BYTES,
    MEMORY_EXIT_CODE,
    Ending,
    Forked,
    Ready,
    Reply,
    Setup,
    receive,
    send,
)

_REAP_PATIENCE_SECONDS = 1.0
_SIZE = struct.Struct("<Q")

Task = Callable[..., Any]


def main() -> None:
    """Serves the parent until it closes the connection."""
    # The parent decides when we end, by closing the connection: a Ctrl-C or a SIGTERM to the whole
    # group is its to handle, and it may want to finish the requests that are running.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    connection = _inherited_connection()
    with contextlib.suppress(EOFError, ConnectionError), connection:
        setup = receive(connection)
        try:
            task = _make_task(setup)
        except Exception as error:
            traceback.print_exc()
            send(connection, Ready(f"{setup.task_factory}: {type(error).__name__}: {error}"))
            return
        send(connection, Ready(None))
        if setup.forks:
            _Zygote(connection, task, setup.memory_limit_bytes).run()
        else:
            for name in setup.preloads:
                _preload(task, name)
            _work(connection, task, setup.memory_limit_bytes, bytearray(_SIZE.size))


def _inherited_connection() -> socket.socket:
    if sys.platform == "win32":
        return socket.fromshare(sys.stdin.buffer.read())
    connection = socket.socket(fileno=os.dup(0))
    # An engine that reads from standard input must not read our messages.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return connection


def _make_task(setup: Setup) -> Task:
    module, _, attribute = setup.task_factory.partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    task: Task = factory(pickle.loads(setup.payload))
    return task


def _preload(task: Any, name: str) -> None:
    try:
        task.preload(name)
    except Exception:  # not ours to report: the job that needs it will meet the reason again
        traceback.print_exc()


class _Zygote:
    """Forks workers, and reaps them when told to.

    It reaps none on its own account: until then the process id belongs to the dead worker, so
    that the parent can kill by id without ever hitting a stranger.
    """

    def __init__(self, control: socket.socket, task: Task, memory_limit_bytes: int) -> None:
        self._control = control
        self._task = task
        self._memory_limit_bytes = memory_limit_bytes
        self._preloaded: set[str] = set()
        self._workers: dict[int, mmap.mmap] = {}  # process id → what it shares with us

    def run(self) -> None:
        try:
            while True:
                self._control.settimeout(None)
                request, descriptors, *_ = socket.recv_fds(self._control, 1, 1)
                if not request:
                    return
                argument = receive(self._control)
                if request == FORK:
                    send(self._control, self._fork(descriptors[0], argument))
                else:
                    send(self._control, self._reap(argument))
        finally:
            for pid in self._workers:
                os.kill(pid, signal.SIGKILL)
            for pid in self._workers:
                os.waitpid(pid, 0)

    def _fork(self, descriptor: int, preloads: tuple[str, ...]) -> Forked:
        for name in preloads:
            if name not in self._preloaded:
                _preload(self._task, name)
                self._preloaded.add(name)
        # What exists now lives for ever; a collector that walks it would copy every page of it.
        gc.collect()
        gc.freeze()
        zygote = os.getpid()
        # Where the worker writes how large it is when a job begins. It cannot tell us afterwards,
        # and its size is not ours: it has not yet touched most of the libraries.
        baseline = mmap.mmap(-1, _SIZE.size)
        try:
            pid = os.fork()
        except OSError as error:
            os.close(descriptor)
            return Forked(None, str(error))
        if pid == 0:
            self._become_worker(descriptor, zygote, baseline)
        os.close(descriptor)
        self._workers[pid] = baseline
        return Forked(pid)

    def _become_worker(self, descriptor: int, zygote: int, baseline: mmap.mmap) -> NoReturn:
        try:
            self._control.close()
            end_with_parent(zygote)
            with socket.socket(fileno=descriptor) as connection:
                _work(connection, self._task, self._memory_limit_bytes, baseline)
        except EOFError:
            os._exit(0)
        except BaseException:  # a worker must never return into the zygote's loop
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self, pid: int) -> Ending:
        """Waits for a worker that has ended, or is about to: it has been killed, or hung up."""
        give_up = time.monotonic() + _REAP_PATIENCE_SECONDS
        while True:
            reaped, status, usage = os.wait4(pid, os.WNOHANG)
            if reaped:
                break
            if time.monotonic() > give_up:
                os.kill(pid, signal.SIGKILL)
            time.sleep(1e-3)
        with self._workers.pop(pid) as baseline:
            (size,) = _SIZE.unpack_from(baseline)
        growth = usage.ru_maxrss * 1024 - size if size else 0
        return Ending(os.waitstatus_to_exitcode(status), max(growth, 0))


def _work(
    connection: socket.socket,
    task: Task,
    memory_limit_bytes: int,
    baseline: mmap.mmap | bytearray,
) -> NoReturn:
    """Answers jobs until the connection is lost, which raises `EOFError`.

    Args:
        connection: where jobs come from.
        task: what to call.
        memory_limit_bytes: how far a job may grow the process.
        baseline: receives the resident bytes when a job begins, 0 if unknown.
    """
    volunteer_for_out_of_memory()  # first: a process that cannot be dumped may not
    forbid_core_dumps()
    initial_size = address_space_bytes() or 0
    while True:
        try:
            request = receive(connection)
            # From here for each job: what earlier ones made the task keep is not its fault.
            limit_growth(memory_limit_bytes)
            _SIZE.pack_into(baseline, 0, resident_bytes() or 0)
            reply = _answer(task, request)
            # A worker whose heap stays large would lend the next jobs its memory, without end.
            worn = (address_space_bytes() or 0) - initial_size > memory_limit_bytes // 2
            send(connection, Reply(reply.kind, reply.body, reply.traceback, worn))
        except MemoryError:
            os._exit(MEMORY_EXIT_CODE)


def _answer(task: Task, request: bytes) -> Reply:
    """Runs one job.

    Raises:
        MemoryError: the job met the memory limit, whatever the engine made of that.
        BaseException: what is no `Exception` ends the worker: Rust panics arrive here as such, and
            leave locks behind that nobody will release.
    """
    try:
        result = task(*pickle.loads(request))
    except Exception as error:
        traceback.print_exc()
        if _is_out_of_memory(error):
            raise MemoryError from None
        return _error_reply(error)
    try:
        body = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        raise
    except Exception:
        traceback.print_exc()
        return _refusal(f"returned {type(result).__name__}, which cannot be pickled")
    if len(body) > MAX_REPLY_BYTES:
        return Reply("oversized", b"")
    return Reply("result", body)


def _error_reply(error: Exception) -> Reply:
    text = "".join(traceback.format_exception(error))
    try:
        body = pickle.dumps(error, pickle.HIGHEST_PROTOCOL)
        pickle.loads(body)  # exceptions with their own constructors often pickle one way only
    except MemoryError:
        raise
    except Exception:
        return _refusal(f"raised {type(error).__name__}, which cannot be pickled", text)
    return Reply("error", body, text)


def _refusal(reason: str, text: str = "") -> Reply:
    return Reply("refused", reason.encode(), text)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error is, or was raised in place of, a failed allocation.

    Engines in C++ turn `std::bad_alloc` into errors of their own, which backends turn into
    `GuideError`s: Python keeps the chain.
    """
    while error is not None:
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main()
    os._exit(0)  # at once: the libraries' clean-up can take as long as their import
