"""What the processes of a child have open on Linux: `/proc` tells.

All of it is read anew each time: two looks at `/proc` in the life of a child cost less than one
that is kept up to date. What has gone meanwhile, or belongs to somebody else, is left out.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from typing import Final

from llamatrio.child.verdict import FileId, Member

if sys.platform == "linux":
    from llamatrio.child.procfs import session_members
    from llamatrio.child.survivors import descendants

assert sys.platform == "linux"

_PF_EXITING: Final = 0x4  # Linux, include/linux/sched.h
_FLAGS: Final = 6  # the kernel's flags of a process, after the name in /proc/PID/stat
_LISTENING: Final = 0x10000  # __SO_ACCEPTCON in /proc/net/unix
_TCP_LISTENING: Final = "0A"  # TCP_LISTEN in /proc/net/tcp
_TERMINALS: Final = range(136, 144)  # the major numbers of pseudo terminals


def find_members(leader: int) -> list[Member]:
    """Return the processes of a session, and the descendants of its leader.

    Args:
      leader: The session's leader.
    """
    pids = {leader, *session_members(leader)}
    pids |= {process.pid for process in descendants(leader)}  # some are in sessions of their own
    found = [_member(pid) for pid in sorted(pids)]
    return [member for member in found if member is not None]


def command_of(pid: int) -> tuple[str, ...]:
    """Return the command line of a process; empty if it cannot be read.

    That takes a lock of the process's memory, which it may hold for as long as it maps a model.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")[:-1]
    except OSError:
        return ()
    return tuple(word.decode("utf-8", "backslashreplace") for word in words)


def file_of(fd: int) -> FileId:
    """Return what one of our own descriptors is open on."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def is_exiting(pid: int) -> bool:
    """Say whether a process is on its way out: it closes its files before it is seen as ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # a name may hold anything
        return fields[0] in b"ZX" or bool(int(fields[_FLAGS]) & _PF_EXITING)
    except (OSError, ValueError, IndexError):
        return True


def _member(pid: int) -> Member | None:
    files: dict[int, FileId] = {}
    terminals = set()
    sockets = set()
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            called = file.read().rstrip(b"\n").decode("utf-8", "backslashreplace")
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                status = os.stat(f"/proc/{pid}/fd/{name}")
            except OSError:  # closed meanwhile
                continue
            files[int(name)] = status.st_dev, status.st_ino
            if stat.S_ISSOCK(status.st_mode):
                sockets.add(str(status.st_ino))
            elif stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) in _TERMINALS:
                terminals.add(int(name))
    except FileNotFoundError:
        return None
    except OSError:  # somebody else's
        return Member(pid, "", {})
    if is_exiting(pid):  # it may have closed its files while we looked
        return Member(pid, "", {})
    listens = bool(sockets) and any(inode in sockets for inode in _listening(pid))
    return Member(pid, called, files, frozenset(terminals), listens)


def _listening(pid: int) -> Iterator[str]:
    """Give the numbers of the listening sockets in a process's network."""
    for row in _rows(f"/proc/{pid}/net/unix"):
        if len(row) > 6 and int(row[3], 16) & _LISTENING:
            yield row[6]
    for name in ("tcp", "tcp6"):
        for row in _rows(f"/proc/{pid}/net/{name}"):
            if len(row) > 9 and row[3] == _TCP_LISTENING:
                yield row[9]


def _rows(path: str) -> Iterator[list[str]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            next(file, None)  # the headline
            for line in file:
                yield line.split()
    except OSError:
        return
