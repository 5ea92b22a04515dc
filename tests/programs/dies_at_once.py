"""Start a child and be killed before it can have said to whom it belongs, again and again.

`dies_at_once.py START ...`, where a start is `[TIMES, HOW, COMMAND...]` in JSON, and HOW is
"programs", "shim" or "nothing": what the child is run with.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys

from llamatrio.child.isolation import Tools, launchers
from llamatrio.child.launch import Launch
from llamatrio.child.launcher import SHIM
from llamatrio.child.posix import ChildProcess, spawn


def wrapper(how: str) -> tuple[str, ...]:
    """Return what the child is run with."""
    if how == "nothing":
        return ()
    setpriv, unshare, shell = (
        shutil.which(name) if how == "programs" else None for name in ("setpriv", "unshare", "sh")
    )
    tools = Tools(setpriv, unshare, shell, python=sys.executable, shim=SHIM)
    root = os.geteuid() == 0
    chosen, *_ = launchers(tools, parent=os.getpid(), cut=True, root=root, hosted=False, names=())
    return chosen.wrapper


def start(launch: Launch) -> ChildProcess:
    """Start a child outside of Trio, which the start of one does not need."""
    try:
        spawn(launch).send(None)
    except StopIteration as end:
        process: ChildProcess = end.value
        return process
    raise AssertionError("a spawn that waits")


def main(starts: list[str]) -> None:
    """Do it."""
    for times, how, *command in map(json.loads, starts):
        for _ in range(times):
            if (pid := os.fork()) == 0:
                launch = Launch(tuple(command), {"PATH": os.defpath}, wrapper=wrapper(how))
                process = start(launch)
                os.kill(os.getpid(), signal.SIGKILL)
                raise AssertionError(process)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
