"""Waiting for a process to end on Linux: a pidfd becomes readable."""

from __future__ import annotations

import os
import sys

import trio

assert sys.platform == "linux"


async def wait_exiting(pid: int) -> None:
    """Wait until a child of ours has ended, and leave it to be reaped.

    Cancellation: harmless; the next call waits for the same end.
    """
    fd = os.pidfd_open(pid)
    try:
        await trio.lowlevel.wait_readable(fd)
    finally:
        os.close(fd)
