"""Start a child and end it, again and again, until a Ctrl-C.

`spawning.py MARK` says `imported` when it begins, and in the end how many children it has had. MARK
is a word for their command lines.
"""

from __future__ import annotations

import math
import os
import random
import sys

import trio

from llamatrio import Exit
from llamatrio.child.launch import Ladder, Launch
from llamatrio.child.logs import LogChannel
from llamatrio.child.process import run_child
from llamatrio.child.pumps import Tally
from llamatrio.child.verdict import Reservation
from llamatrio.errors import ChildError
from llamatrio.wire.records import Record

# It ignores SIGTERM for a moment, so that ending it takes as long as starting it.
CHILD = 'trap "" TERM; echo \'cmd_child_to_router:state:{"state":"loading"}\'; exec sleep 99'


class Counting:
    """Counts spawns and ends."""

    spawned = ended = 0

    def on_spawn(self, pid: int) -> None:
        self.spawned += 1

    def on_record(self, record: Record) -> None:
        """Nobody asks."""

    def on_reserved(self, reservation: Reservation) -> None:
        """Nobody asks."""

    def on_fault(self, fault: ChildError) -> None:
        """Nobody asks."""

    def on_unexpected(self, data: bytes) -> None:
        """Nobody asks."""

    def last_cut(self) -> float:
        return -math.inf

    def on_exit(self, exit: Exit, fault: ChildError | None) -> None:
        self.ended += 1


async def spawn_for_ever(counting: Counting, mark: str) -> None:
    """Give each child some milliseconds."""
    ladder = Ladder(terminate_loading=0.01)
    launch = Launch(("/bin/sh", "-c", CHILD, mark), dict(os.environ), ladder=ladder)
    while True:
        with trio.move_on_after(random.uniform(0, 0.01)):
            await run_child(launch, counting, LogChannel(10), Tally())


async def spawn_beside(counting: Counting, mark: str) -> None:
    """Leave the main task alone: Trio raises a Ctrl-C there, whatever it is protected from."""
    async with trio.open_nursery() as nursery:  # noqa: ASYNC112 - that is the point
        nursery.start_soon(spawn_for_ever, counting, mark)


def main() -> None:
    """Go on until a Ctrl-C; count."""
    counting = Counting()
    os.write(1, b"imported\n")
    try:
        trio.run(spawn_beside, counting, sys.argv[1])
    finally:
        os.write(1, b"%d %d\n" % (counting.spawned, counting.ended))


if __name__ == "__main__":
    main()
