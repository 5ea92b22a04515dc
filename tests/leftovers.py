"""A census of what a test may leave behind: processes, zombies, descriptors, threads, files."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import attrs


@attrs.frozen
class Census:
    """What there is at one moment, apart from what Trio and pytest keep for themselves."""

    processes: frozenset[str]
    descriptors: frozenset[str]
    threads: frozenset[str]
    directories: frozenset[str]

    def since(self, before: Census) -> dict[str, frozenset[str]]:
        """Return what has been added since an earlier census."""
        new = {
            name: getattr(self, name) - getattr(before, name) for name in attrs.fields_dict(Census)
        }
        return {name: added for name, added in new.items() if added}


def take_census() -> Census:
    """Look around."""
    return Census(
        frozenset(_processes()),
        frozenset(_descriptors()),
        frozenset(t.name for t in threading.enumerate() if not t.name.startswith("Trio thread")),
        frozenset(map(str, Path(tempfile.gettempdir()).glob("llamatrio-*"))),
    )


def _processes() -> list[str]:
    """Our children, zombies among them, and every process that was told of our directory."""
    ours, directory = os.getpid(), os.fsencode(tempfile.gettempdir())
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == ours:
            continue
        try:
            state, parent = _read(entry, "stat").rpartition(b")")[2].split()[:2]
            if parent == b"2":  # a thread of the kernel
                continue
            command = _read(entry, "cmdline").replace(b"\0", b" ")
        except OSError:
            continue  # it has gone
        if int(parent) == ours or directory in command:
            shown = command.decode(errors="replace")[:200]
            found.append(f"{entry} {state.decode()} {shown}")
    return found


def _read(process: str, name: str) -> bytes:
    with open(f"/proc/{process}/{name}", "rb", buffering=0) as file:  # twice a test
        return file.read()


def _descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            continue  # the one that listed the directory
    return found
