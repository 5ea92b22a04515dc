"""The library's own reader as a command: `python -m llamatrio.testing.corpus [--batch]`.

Also an example of what the corpus asks of such a command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from llamatrio.testing.corpus.reader import read


def main() -> None:
    """Read stdin, and write the events to stdout."""
    batch = "--batch" in sys.argv[1:]
    for stream in _streams(sys.stdin.buffer, batch=batch):
        for event in read(stream):
            sys.stdout.write(f"{json.dumps(event)}\n")
        if batch:
            sys.stdout.write('{"event": "end"}\n')


def _streams(source: BinaryIO, *, batch: bool) -> Iterator[Iterable[bytes]]:
    if not batch:
        yield iter(lambda: source.read(2**13), b"")
        return
    while header := source.readline():
        yield [source.read(int(header))]


if __name__ == "__main__":
    main()
