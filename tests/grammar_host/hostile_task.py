"""A task that misbehaves in every way it is asked to. Imports little: workers import it."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
import threading
import time
import warnings
from typing import Any

from grammar_host.errors import InvalidGuideError, UnsupportedGuideError

MEBIBYTE = 2**20
MEMORY_LIMIT = 200 * MEBIBYTE
LONG = 30.0
"""Seconds after which something that should happen at once has failed to happen."""


class OneWayError(Exception):
    """Pickles, but does not unpickle: its constructor wants more than its message."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


class HostileTask:
    """Does what its first argument says; runs in a worker."""

    def __init__(self, payload: str) -> None:
        self.payload = payload
        self.made_in = os.getpid()
        self.threads = len(os.listdir("/proc/self/task"))
        self.preloaded: list[tuple[str, int]] = []
        self.kept: list[bytearray] = []

    def __call__(self, action: str, *args: Any) -> Any:
        return getattr(self, action)(*args)

    def preload(self, name: str) -> None:
        if name == "broken":
            raise ImportError("no such engine")
        if name.isdigit():
            time.sleep(int(name))
        self.preloaded.append((name, os.getpid()))

    def echo(self, value: Any) -> Any:
        return value

    def describe(self) -> dict[str, Any]:
        return {
            "payload": self.payload,
            "made_in": self.made_in,
            "worker": os.getpid(),
            "preloaded": self.preloaded,
            "cores": resource.getrlimit(resource.RLIMIT_CORE),
            "threads": self.threads,
            "stdin": os.read(0, 1),
            "path": os.environ["PYTHONPATH"],
        }

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def sleep_uninterruptibly(self) -> None:
        for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(LONG)

    def match_catastrophically(self) -> None:
        re.match(r"(a|a)*b", "a" * 64)  # never gives the interpreter lock back

    def devour(self) -> None:
        blocks = []
        while True:
            blocks.append(bytearray(8 * MEBIBYTE))

    def devour_at_once(self) -> None:
        bytearray(100 * MEMORY_LIMIT)

    def devour_and_translate(self) -> None:
        try:
            self.devour()
        except MemoryError:
            # As backends do with what engines raise.
            raise InvalidGuideError("regex", "the engine says no") from None

    def devour_like_cpp(self) -> None:
        raise RuntimeError("std::bad_alloc")

    def devour_like_rust(self) -> None:
        blocks = []
        try:
            while True:
                blocks.append(bytearray(8 * MEBIBYTE))
        except MemoryError:
            os.abort()

    def keep(self, mebibytes: int) -> None:
        self.kept.append(bytearray(mebibytes * MEBIBYTE))

    def signal_itself(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def write_to_address_zero(self) -> None:
        ctypes.memset(0, 1, 1)

    def exit_at_once(self) -> None:
        os._exit(3)

    def leave_politely(self) -> None:
        sys.exit("enough")

    def hang_up(self) -> None:
        os.closerange(3, 100)
        time.sleep(LONG)

    def refuse(self) -> None:
        raise UnsupportedGuideError("schema", "no such keyword", pointer="/not", code="special")

    def raise_unexpectedly(self) -> None:
        raise KeyError("a bug")

    def raise_one_way(self) -> None:
        raise OneWayError("one", "way")

    def raise_unpicklable(self) -> None:
        error = RuntimeError("unpicklable")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    def return_unpicklable(self) -> Any:
        return threading.Lock()

    def return_bytes(self, count: int) -> bytes:
        return b"x" * count

    def print_a_lot(self) -> str:
        for _ in range(2000):
            print("x" * 1000)
            print("y" * 1000, file=sys.stderr)
        return "done"

    def warn(self) -> None:
        warnings.warn("old", DeprecationWarning, stacklevel=1)

    def read_standard_input(self) -> str:
        return sys.stdin.read()


def make_task(payload: str) -> HostileTask:
    return HostileTask(payload)


def fail_to_make(payload: str) -> HostileTask:
    raise ImportError(f"nothing\nfor {payload}")


def end_instead_of_making(payload: str) -> HostileTask:
    os._exit(9)
