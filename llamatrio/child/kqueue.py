"""Waiting for a process to end on macOS and the BSDs: a kqueue tells."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from typing import NoReturn

import trio

assert sys.platform != "linux"
assert sys.platform != "win32"


async def wait_exiting(pid: int) -> None:
    """Wait until a child of ours has ended, and leave it to be reaped.

    Cancellation: harmless; the next call waits for the same end.
    """
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
