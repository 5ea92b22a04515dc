"""The CPU time of a session of processes on Linux: `/proc` tells."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Final

assert sys.platform == "linux"

_TICKS: Final = os.sysconf("SC_CLK_TCK")  # in a second
_TIMES: Final = slice(11, 15)  # utime, stime, cutime and cstime, after the name in /proc/PID/stat


def cpu_time(pid: int) -> float | None:
    """Return the CPU seconds of a session's processes, and of those that they have reaped.

    Args:
      pid: The session's leader.
    """
    ticks = [_ticks(member) for member in _members(pid)]
    return sum(ticks) / _TICKS if ticks else None


def _members(session: int) -> Iterator[int]:
    try:
        entries = os.listdir("/proc")
    except OSError:  # no descriptor is left, or there is no /proc
        return
    for entry in entries:
        if entry.isdigit() and _session(int(entry)) == session:
            yield int(entry)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it has gone, or is nobody's business
        return None


def _ticks(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # a name may hold anything
        return sum(map(int, fields[_TIMES]))
    except (OSError, ValueError):
        return 0
