"""Run the cycle again and again, each time with a Ctrl-C at another line of the library.

`interrupted.py MODEL FIRST STEP` writes one line of JSON per run: `line` where the Ctrl-C struck,
`raised` what came out of `trio.run`, `left` what was left behind, `balanced` whether every request
had an outcome. The last run is not struck. Only lines that are not protected from it are counted:
elsewhere it waits for a checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import trio
from leftovers import take_census

import llamatrio
from programs.cycle import Accounts, cycle

LIBRARY = str(Path(llamatrio.__file__).parent)
# What the library stands on: its blocks would otherwise have a hole right at their ends.
FILES = (LIBRARY, contextlib.__file__)
PATIENCE = 20  # seconds


class Striker:
    """Raises SIGINT at one line among those that the main thread executes."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.struck: str | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:  # noqa: ANN401
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        if event == "line" and not trio.lowlevel.currently_ki_protected():
            self.left -= 1
            if self.left < 0 and self.struck is None:
                code = frame.f_code
                self.struck = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname}"
                signal.raise_signal(signal.SIGINT)
        return self


def strike(model: str, number: int) -> str | None:
    """Run the cycle once; say where it was struck."""
    striker = Striker(number)
    before = take_census()
    accounts = Accounts()
    raised = "nothing"
    signal.alarm(PATIENCE)
    sys.settrace(striker)
    try:
        trio.run(cycle, model, None, accounts)
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as exc:  # noqa: BLE001 - seen to
        raised = repr(exc)
    finally:
        sys.settrace(None)
        signal.alarm(0)
    gc.collect()
    left = {name: sorted(what) for name, what in take_census().since(before).items()}
    result = {"line": striker.struck, "raised": raised, "left": left}
    sys.stdout.write(json.dumps({**result, "balanced": accounts.balanced}) + "\n")
    sys.stdout.flush()
    return striker.struck


def main() -> None:
    """Strike at every STEP-th line, from FIRST on."""
    model, number, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    while strike(model, number) is not None:
        number += step


if __name__ == "__main__":
    main()
