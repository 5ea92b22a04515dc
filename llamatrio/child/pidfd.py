"""Waiting for a process to end on Linux: a pidfd becomes readable."""

from __future__ import annotations

import os
import sys

import trio

assert sys.platform == "linux"


class ExitWatch:
    """Sees a child of ours end, and leaves it to be reaped.

    It has its descriptor from the beginning: a program that ran out of them must still be able to
    end its children.

    Raises:
      OSError: if there is no descriptor left.
    """

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    async def wait(self) -> None:
        """Wait until the process has ended.

        Cancellation: harmless; the next call waits for the same end.
        """
        await trio.lowlevel.wait_readable(self._fd)

    def close(self) -> None:
        """Stop watching."""
        os.close(self._fd)
