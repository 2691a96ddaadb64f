"""What the operating system can do to keep a compile worker from doing harm."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

if sys.platform != "win32":
    import resource

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4


def address_space_bytes() -> int | None:
    """Size of this process's address space; None where the system does not tell."""
    return _statm(0)


def resident_bytes() -> int | None:
    """Size of this process's resident memory; None where the system does not tell."""
    return _statm(1)


def limit_growth(growth_bytes: int) -> None:
    """Lets this process's address space grow by so much from now on; beyond, allocation fails.

    Address space, not resident memory, is what the kernel can limit at the moment of allocation.
    No effect where the size is unknown (macOS, Windows).
    """
    size = address_space_bytes()
    if sys.platform != "win32" and size is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = size + growth_bytes
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def forbid_core_dumps() -> None:
    """A crash on a hostile guide is no news, and a dump of gigabytes would delay the restart."""
    if sys.platform != "win32":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The limit above does not hold for dumps that the kernel pipes to a program.
    _prctl(_PR_SET_DUMPABLE, 0)


def volunteer_for_out_of_memory() -> None:
    """If the machine runs out of memory, the kernel shall end this process, not the server."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def end_with_parent(parent_pid: int) -> None:
    """Asks the kernel to end this process with its parent, even while it is busy (Linux)."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it ended before we asked
            os._exit(0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _statm(field: int) -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[field])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
