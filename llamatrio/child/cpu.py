"""How much CPU time a child has used: one of its signs of life."""

from __future__ import annotations

import math
import sys

if sys.platform == "linux":
    from llamatrio.child.procfs import cpu_time
elif sys.platform == "darwin":
    from llamatrio.child.rusage import cpu_time
elif sys.platform == "win32":
    from llamatrio.child.win32times import cpu_time
else:

    def cpu_time(pid: int) -> float | None:
        """Return None: nobody tells here."""
        return None


def cpu_hundredths(pid: int) -> int | None:
    """Return the CPU time of a child in whole hundredths of a second, or None if it is not known.

    It is no finer because an idle process wakes up now and then. On Linux it is that of all
    processes in the child's session, elsewhere that of the one process. This never raises.
    """
    seconds = cpu_time(pid)
    return None if seconds is None else math.floor(seconds * 100)
