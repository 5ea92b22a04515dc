"""Put a black box through the protocol and the phases again: `python -m llamatrio replay FILE`.

The bytes of the child's state channel go through the same code that read them from the pipe, and
the events of the lifecycle through the same table. The exit code is 0 if the same comes out, 1 if
something else does, and 2 if the file cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from llamatrio.lifecycle.blackbox import MAX_SIZE, Box, find_differences, load
from llamatrio.wire.ansi import escape

_LEEWAY: Final = 4  # a file that somebody has formatted anew may be larger than one of ours


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay one file, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m llamatrio replay",
        description="Put a black box through the protocol and the phases again.",
    )
    parser.add_argument("file", type=Path, help="what open_provider(black_box=DIRECTORY) wrote")
    chosen = parser.parse_args(arguments)
    try:
        box = load(_read(chosen.file))
    except (OSError, ValueError) as exc:
        print(_shown(f"{chosen.file}: {exc}"), file=sys.stderr)
        return 2
    differences = find_differences(box)
    for line in [*describe(box), *(f"different: {one}" for one in differences)]:
        print(_shown(line))
    if not differences:
        lines = len(box.state.seen) if box.state else 0
        print(f"the same: {lines} lines of the state channel, {len(box.steps)} steps")
    return 1 if differences else 0


def _shown(line: str) -> str:
    """Make a line harmless, wherever the file comes from and whatever the terminal can show."""
    return escape(line).encode("ascii", "backslashreplace").decode()


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        data = file.read(_LEEWAY * MAX_SIZE + 1)
    if len(data) > _LEEWAY * MAX_SIZE:
        raise ValueError("too large for a black box")
    return data


def describe(box: Box) -> Iterator[str]:
    """Say what is in a box, and what comes out of it now."""
    yield f"{box.error[0]}: {box.error[1]}"
    yield f"life {box.generation} of the model, written down at {box.written}"
    yield from _describe_lines(box)
    yield "steps:"
    if box.dropped_steps:
        yield f"  ... {box.dropped_steps} earlier ones"
    yield from (f"  {entry.seconds:12.6f} s  {entry}" for entry in box.steps)


def _describe_lines(box: Box) -> Iterator[str]:
    if box.state is None:
        yield "no state channel"
        return
    state = box.state
    yield f"state channel, {state.size} bytes:"
    if state.offset:
        yield f"  ... {state.offset} earlier ones"
    for line in state.read_again():
        yield f"  {line.offset:10}  {line.what}"
