"""The commands: `python -m llamatrio COMMAND ...`.

A command is a module with a function `main(arguments) -> int`. The number is the exit code: 0 if
all is well, 1 if what was looked at is not, 2 if it could not be looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

COMMANDS: Final = {
    "affinity": ("llamatrio.affinity", "find out which thread a model's native calls may run on"),
    "fixture": ("llamatrio.fixture", "run one child once, and check what comes out of it"),
    "replay": ("llamatrio.replay", "run a black box through the protocol and the phases again"),
}
"""The commands: the module of each, which is imported only for it, and what it does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words and words[0] in COMMANDS:
        module, _ = COMMANDS[words[0]]
        code: int = import_module(module).main(words[1:])
        return code
    wants_help = words in (["-h"], ["--help"])
    print(usage(), file=sys.stdout if wants_help else sys.stderr)
    return 0 if wants_help else 2


def usage() -> str:
    """Say what commands there are."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: python -m llamatrio COMMAND ...", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
