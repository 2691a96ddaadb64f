"""What a process and its compile workers say to each other.

Every message is a pickle behind its length. Pickle runs code of whoever wrote it; that is safe
here, because both ends are this package, and the only way between them is a pair of connected,
nameless sockets that a parent hands to the processes it starts: nobody else can write to it. What
users wrote (guides) travels inside as plain strings.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, Literal

MAX_REPLY_BYTES = 64 * 2**20
"""Largest result of a task. What a worker may use is limited; its parent must not pay instead."""

MEMORY_EXIT_CODE = 71
"""How a worker ends that met its memory limit: there may be no memory left to say so."""

FORK = b"F"
REAP = b"R"

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Setup:
    """The first message to a new interpreter.

    Attributes:
        task_factory: `"module:attribute"`; called once, its result is called for every job.
        payload: pickle of the factory's argument.
        memory_limit_bytes: how far a job may grow its worker's address space.
        preloads: arguments of the task's `preload`, where the interpreter itself is the worker.
        forks: whether to fork workers on request, or to be the one worker.
    """

    task_factory: str
    payload: bytes
    memory_limit_bytes: int
    preloads: tuple[str, ...]
    forks: bool


@dataclass(frozen=True)
class Ready:
    """The answer to `Setup`.

    Attributes:
        failure: why no task can run here; None if all is well.
    """

    failure: str | None


@dataclass(frozen=True)
class Forked:
    """The answer to `FORK`.

    Attributes:
        pid: the new worker's process id; None if there is none.
        failure: why there is none.
    """

    pid: int | None
    failure: str = ""


@dataclass(frozen=True)
class Ending:
    """How a worker ended: the answer to `REAP`.

    Attributes:
        exit_code: as in `subprocess.Popen.returncode`: negative for a signal.
        growth_bytes: by how much its resident memory had grown at its peak; 0 if unknown.
    """

    exit_code: int
    growth_bytes: int


@dataclass(frozen=True)
class Reply:
    """The answer to a job.

    Attributes:
        kind: `"result"`: the body is the pickled result; `"error"`: the pickled exception that the
            task raised; `"refused"`: a UTF-8 text that says why its outcome cannot be pickled;
            `"oversized"`: nothing, the result was over `MAX_REPLY_BYTES`.
        body: see `kind`.
        traceback: of the exception, for people; empty for results.
        worn: whether the job left the worker so large that it should be replaced.
    """

    kind: Literal["result", "error", "refused", "oversized"]
    body: bytes
    traceback: str = ""
    worn: bool = False


def send(connection: socket.socket, message: Any, deadline: float | None = None) -> None:
    """Sends one message.

    Args:
        connection: a stream socket.
        message: anything that can be pickled.
        deadline: `time.monotonic()` at which to give up; None waits.

    Raises:
        EOFError: the other end is gone.
        TimeoutError: the deadline passed; the connection is unusable.
    """
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    connection.settimeout(_remaining(deadline))
    try:
        connection.sendall(_LENGTH.pack(len(body)) + body)
    except ConnectionError:
        raise EOFError("the other end is gone") from None


def receive(connection: socket.socket, deadline: float | None = None) -> Any:
    """Receives one message.

    Args:
        connection: a stream socket.
        deadline: `time.monotonic()` at which to give up; None waits.

    Raises:
        EOFError: the other end is gone.
        TimeoutError: the deadline passed; the connection is unusable.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, deadline))
    return pickle.loads(_read(connection, length, deadline))


def is_open(connection: socket.socket) -> bool:
    """Whether the other end of an idle connection is still there."""
    connection.settimeout(0.0)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytearray:
    buffer = bytearray(size)
    rest = memoryview(buffer)
    while rest:
        connection.settimeout(_remaining(deadline))
        try:
            count = connection.recv_into(rest)
        except ConnectionError:
            count = 0
        if not count:
            raise EOFError("the other end is gone")
        rest = rest[count:]
    return buffer


def _remaining(deadline: float | None) -> float | None:
    # Zero would mean "do not block" instead of "time is up".
    return None if deadline is None else max(deadline - time.monotonic(), 1e-3)
