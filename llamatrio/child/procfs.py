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
    ticks = [_ticks(member) for member in session_members(pid)]
    return sum(ticks) / _TICKS if ticks else None


def session_members(session: int) -> Iterator[int]:
    """Give the processes of a session. Looks at all there are, at a microsecond or two for each.

    Args:
      session: The session's leader.
    """
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


# -- what a process is -------------------------------------------------------------------------

_STARTED: Final = 19  # starttime, the 22nd field of /proc/PID/stat, after the pid and the name


def start_time(pid: int) -> int | None:
    """Return when a process was started, in ticks since the system was; None if it is not there."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        # A zombie is not the process any more that somebody asks for.
        return None if fields[0] in (b"Z", b"X") else int(fields[_STARTED])
    except (OSError, ValueError, IndexError):
        return None


def read_process(
    pid: int,
) -> tuple[int, str | None, tuple[str, ...] | None, tuple[str, ...] | None] | None:
    """Read what a process is.

    Returns:
      When it was started, its program, its command line and the names of its variables, each None
      if it cannot be read; None if the process is not there.
    """
    started = start_time(pid)
    if started is None:
        return None
    command = _strings(pid, "cmdline")
    variables = _strings(pid, "environ")
    names = variables and tuple(sorted(item.partition("=")[0] for item in variables))
    return started, _link(pid, "exe"), command, names


def mapped_files(pid: int) -> set[str]:
    """Return the files whose code a process has mapped into its memory."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.rstrip("\n").split(None, 5) for line in file]
    except OSError:
        return set()
    named = (words for words in lines if len(words) == 6 and words[5].startswith("/"))
    return {words[5] for words in named if "x" in words[1]}


def _strings(pid: int, name: str) -> tuple[str, ...] | None:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            data = file.read()
    except OSError:
        return None
    return tuple(os.fsdecode(item) for item in data.split(b"\0")[:-1])


def _link(pid: int, name: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return None
