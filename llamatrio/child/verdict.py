"""PURE. Whether a living child's streams are apart, and whether it keeps stdout for its records.

The evidence is what came out of the two pipes, and, where the system tells, which process of the
child's session has which end of them. Comparing a process's own stdout with its stderr shows
nothing: a healthy child has both on the pipe of stderr, and that of stdout on another descriptor
(b11434, tools/server/server-common.cpp, `server_reserve_stdout`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final, TypeAlias

import attrs

from llamatrio.child.wrappers import find_merging
from llamatrio.wire.records import PREFIX

FileId: TypeAlias = tuple[int, int]
"""The device and the number of an open file; both ends of a pipe have the same."""

_SHOWN: Final = 200  # bytes of a line in evidence
_BANNER: Final = 2  # lines on stdout that a healthy child may write before its first record


@attrs.frozen
class Member:
    """A process of a child's session, or one of its descendants.

    Attributes:
      pid: Its number.
      name: What its program is called; empty if it is not told.
      files: What its descriptors are open on; empty if that cannot be seen, and once it is ending.
      terminals: Those that are open on a terminal.
      listens: Whether it has a socket on which it waits for connections.
    """

    pid: int
    name: str
    files: Mapping[int, FileId]
    terminals: frozenset[int] = frozenset()
    listens: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name or 'no name'})"


@attrs.frozen
class Reservation:
    """Whether a child keeps its stdout for records.

    Attributes:
      reserved: True if nothing else can get there, False if whatever is printed does, None if it
        could not be found out.
      reason: Why, in one sentence.
    """

    reserved: bool | None
    reason: str


class StrayRecords:
    """Looks for the beginning of a record where none belongs: at the start of a line of stderr."""

    def __init__(self) -> None:
        self._head = b""  # of the present line, as far as it may still be one
        self._within = False  # a line that is none

    def feed(self, data: bytes) -> bytes | None:
        """Take the next bytes; return the beginning of the first line that looks like a record."""
        for line in _lines(data):
            if not self._within:
                self._head += line[:_SHOWN]
                if self._head.startswith(PREFIX):
                    return self._head.rstrip(b"\r\n")[:_SHOWN]
                self._within = not PREFIX.startswith(self._head)
            if line.endswith(b"\n"):
                self._head, self._within = b"", False
        return None


def _lines(data: bytes) -> list[bytes]:
    *whole, rest = data.split(b"\n")
    return [*(line + b"\n" for line in whole), *([rest] if rest else [])]


# -- what the pipes tell -----------------------------------------------------------------------


def banner_evidence(unexpected: int, stderr_bytes: int) -> str | None:
    """Say what speaks for a merge at the first record; None if nothing does.

    Args:
      unexpected: Lines on stdout that are no records.
      stderr_bytes: Bytes that the child has written to stderr.
    """
    if unexpected <= _BANNER or stderr_bytes:
        return None
    return f"{unexpected} other lines came on stdout before the first record, and none on stderr"


def stray_evidence(line: bytes) -> str:
    """Say what a record on stderr shows."""
    return f"stderr carries a record, and stdout none: {line[:_SHOWN]!r}"


def closed_evidence(stream: str) -> str:
    """Say what a pipe shows that was closed by a process that lives on."""
    return f"nothing has {stream} open any more, although the process is alive and not ready"


# -- what its processes tell -------------------------------------------------------------------


@attrs.frozen
class Look:
    """What one look at the processes of a child shows.

    Attributes:
      reservation: Whether the child keeps its stdout for records.
      evidence: What speaks for merged streams, in one sentence; None if nothing does.
      culprit: The number of the process behind that; None without one.
      server: The number of the process that serves, or is about to; None if it is not known.
      stderr_is_closed: Whether certainly none of the processes has the pipe of stderr open.
    """

    reservation: Reservation
    evidence: str | None = None
    culprit: int | None = None
    server: int | None = None
    stderr_is_closed: bool = False


def judge(members: Sequence[Member], stdout: FileId, stderr: FileId) -> Look:
    """Say what the open files of a child's processes show.

    Args:
      members: The processes.
      stdout: The pipe of stdout.
      stderr: The pipe of stderr.
    """
    serving = [member for member in members if member.listens]
    holding = [
        member for member in members if member.files.get(1) != stdout and _holds(member, stdout)
    ]
    server = next((member.pid for member in [*serving, *holding]), None)
    culprit, evidence = _merging(members, serving, stdout, stderr) or (None, None)
    pid = culprit.pid if culprit is not None else None
    seen = bool(members) and all(member.files for member in members)
    closed = seen and all(stderr not in member.files.values() for member in members)
    return Look(_reservation(serving, stdout), evidence, pid, server, closed)


def _holds(member: Member, stdout: FileId) -> bool:
    """Say whether a process has the pipe of stdout on a descriptor that is no standard stream."""
    return any(fd > 2 and file == stdout for fd, file in member.files.items())


def _merging(
    members: Sequence[Member], serving: Sequence[Member], stdout: FileId, stderr: FileId
) -> tuple[Member, str] | None:
    """Return a process whose log goes into the pipe of the records, and how; None without one."""
    for member in [*serving, *members]:
        if member.files.get(2) == stdout:
            return member, f"{member} has its stderr on the pipe of stdout"
    for member in serving:
        if how := _passes_on(member, members, stdout, stderr):
            return member, f"{member} has its stderr {how}"
    return None


def _passes_on(
    member: Member, members: Sequence[Member], stdout: FileId, stderr: FileId
) -> str | None:
    """Say how the log of the process that serves comes into the pipe of stdout by another one."""
    log = member.files.get(2)
    if log is None or log in (stdout, stderr):
        return None
    if 2 in member.terminals and stdout not in member.files.values():
        return "on a terminal, where both streams are one"
    for other in members:
        if other.files.get(0) == log and other.files.get(1) == stdout:
            return f"on a pipe that {other} copies to stdout"
    return None


def _reservation(serving: Sequence[Member], stdout: FileId) -> Reservation:
    """Say whether the processes that serve keep the pipe of stdout for their records."""
    if not serving:
        return Reservation(None, "no process of the child's session waits for connections")
    for member in serving:
        if member.files.get(1) == stdout:
            return Reservation(False, f"whatever {member} prints goes there: it is its stdout")
    for member in serving:
        if _holds(member, stdout):
            return Reservation(True, f"{member} holds it by a descriptor of its own")
    return Reservation(None, f"another program stands between {serving[0]} and the pipe")


# -- what to do instead ------------------------------------------------------------------------


def suggest(command: Sequence[str], culprit: Sequence[str] = ()) -> str:
    """Return the command line that would keep the streams apart, without the child's options.

    Args:
      command: What was started.
      culprit: The command line of the process behind it, if it is known.
    """
    same = 0
    for ours, theirs in zip(reversed(command), reversed(culprit), strict=False):
        if ours != theirs:
            break
        same += 1
    if 0 < same < min(len(culprit), len(command)):  # what both end with are the options
        return shlex.join(culprit[: len(culprit) - same])
    if 0 < same < len(command):  # the wrapper was told what to run
        return shlex.join(takewhile(lambda word: not word.startswith("--"), culprit))
    if found := find_merging(command):
        return shlex.join(found.instead)
    return 'exec llama-server "$@"'
