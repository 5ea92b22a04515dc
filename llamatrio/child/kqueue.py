"""Waiting for a process to end on macOS and the BSDs: a kqueue tells."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from typing import NoReturn

import trio

assert sys.platform != "linux"
assert sys.platform != "win32"


class ExitWatch:
    """Sees a child of ours end, and leaves it to be reaped."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    async def wait(self) -> None:
        """Wait until the process has ended.

        Cancellation: harmless; the next call waits for the same end.
        """
        await _wait_exiting(self._pid)

    def close(self) -> None:
        """Stop watching."""


async def _wait_exiting(pid: int) -> None:
    queue = trio.lowlevel.current_kqueue()

    def change(flags: int) -> None:
        event = select.kevent(
            pid, filter=select.KQ_FILTER_PROC, flags=flags, fflags=select.KQ_NOTE_EXIT
        )
        queue.control([event], 0)

    def abort(_: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        change(select.KQ_EV_DELETE)
        return trio.lowlevel.Abort.SUCCEEDED

    try:
        change(select.KQ_EV_ADD | select.KQ_EV_ONESHOT)
    except ProcessLookupError:  # it ended before we asked
        await trio.lowlevel.checkpoint()
        return
    await trio.lowlevel.wait_kevent(pid, select.KQ_FILTER_PROC, abort)
