"""What is left of the processes that a child has started once it has ended; on Linux.

A process that puts itself into a session of its own escapes, and so may what it starts. Nothing
here ends one: whoever did that on purpose may have had a reason. They are found in two ways, since
each is blind for some: by descent, as long as the child lives, and afterwards by what they still
hold, the pipes of the child.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator

import attrs

assert sys.platform == "linux"


@attrs.frozen
class Process:
    """One process, and no other that gets its number later.

    Attributes:
      pid: Its number.
      started: When it was started, in ticks since the system was.
    """

    pid: int
    started: int


def descendants(pid: int) -> frozenset[Process]:
    """Return the processes that descend from a living one, as far as their parents live.

    Costs some ten microseconds for each thread of those processes.
    """
    found: set[Process] = set()
    waiting = [pid]
    while waiting:
        for child in _children(waiting.pop()):
            process = identify(child)
            if process is not None and process not in found:
                found.add(process)
                waiting.append(child)
    return frozenset(found)


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it has ended; or this kernel does not tell
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                yield from map(int, file.read().split())


def identify(pid: int) -> Process | None:
    """Return a process by its number; None if it has ended, whether it was reaped or not."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read().rpartition(b")")[2].split()  # a name may hold anything
        return None if fields[0] in (b"Z", b"X") else Process(pid, int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def alive(leader: int, before: Iterable[Process]) -> list[int]:
    """Return the processes of a group, and others, that have not ended; by their numbers.

    Args:
      leader: The group's, which has been reaped.
      before: The others.
    """
    found = [process.pid for process in before if identify(process.pid) == process]
    with contextlib.suppress(OSError):  # as a rule nobody is in the group
        os.killpg(leader, 0)
        entries = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
        found += [pid for pid in entries if _group(pid) == leader and identify(pid) is not None]
    return found


def out_of_reach(leader: int, before: Iterable[Process], pipes: Iterable[int]) -> tuple[int, ...]:
    """Return the processes that a signal to a group has not reached, by their numbers.

    Looks at every descriptor of every process that it may look at: it takes some time, and belongs
    into a thread.

    Args:
      leader: The group's.
      before: Those that there were before.
      pipes: Descriptors of ours, for pipes into which the group wrote.
    """
    found = {process.pid for process in before if identify(process.pid) == process}
    with contextlib.suppress(OSError):  # no descriptor is left
        found |= set(_writers({f"pipe:[{os.fstat(pipe).st_ino}]" for pipe in pipes}))
    return tuple(sorted(pid for pid in found if _group(pid) not in (leader, None)))


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def _writers(pipes: set[str]) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and any(_writes_to(f"/proc/{entry}/fd", pipes)):
            yield int(entry)


def _writes_to(directory: str, pipes: set[str]) -> Iterator[bool]:
    with contextlib.suppress(OSError):  # it has ended, or is nobody's business
        for fd in os.listdir(directory):
            with contextlib.suppress(OSError):
                if os.readlink(f"{directory}/{fd}") in pipes:
                    # A forked copy of our own program holds our ends, for reading.
                    yield bool(os.lstat(f"{directory}/{fd}").st_mode & stat.S_IWUSR)
