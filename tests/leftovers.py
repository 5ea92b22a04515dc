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
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                stat = Path("/proc", entry, "stat").read_text()
                command = Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue  # it has gone
            state, parent = stat.rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() or tempfile.gettempdir().encode() in command:
                found.append(f"{entry} {state} {command.decode(errors='replace')[:200]}")
    return found


def _descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            continue  # the one that listed the directory
    return found
