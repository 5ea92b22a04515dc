"""The library's own reader, with its events in the form of the corpus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import attrs

from llamatrio.testing.corpus.cases import Event
from llamatrio.wire.lines import Line, LineSplitter, Oversize
from llamatrio.wire.records import (
    Downloading,
    Loading,
    Malformed,
    Ready,
    Sleeping,
    Unknown,
    parse,
)

LIMIT: Final = 2**20
HEAD: Final = 32


def read(chunks: Iterable[bytes], limit: int = LIMIT) -> Iterator[Event]:
    """Read one stream.

    Args:
      chunks: The stream, in pieces.
      limit: The longest line.
    """
    lines = LineSplitter(limit, keep=HEAD)
    for chunk in chunks:
        for line in lines.feed(chunk):
            yield {**_event(line), "offset": line.offset}
    if (rest := lines.close()) is not None:
        yield {"event": "unfinished", "head": _head(rest), "offset": rest.offset}


def _event(line: Line | Oversize) -> Event:
    if isinstance(line, Oversize):
        return {"event": "oversize", "size": line.size}
    match parse(line.data):
        case None:
            return {"event": "unexpected", "head": _head(line)}
        case Malformed():
            return {"event": "malformed", "head": _head(line)}
        case Unknown(state, payload):
            return {"event": "unknown", "state": state, "payload": payload}
        case Ready(info):
            return {"event": "record", "state": "ready", "info": info}
        case Loading(stage, stages, value):
            fields = {"stage": stage, "stages": list(stages), "value": value}
            return {"event": "record", "state": "loading", **fields}
        case Sleeping():
            return {"event": "record", "state": "sleeping"}
        case Downloading() as progress:
            return {"event": "record", "state": "downloading", **attrs.asdict(progress)}


def _head(line: Line | Oversize) -> str:
    data = line.head if isinstance(line, Oversize) else line.data
    return data[:HEAD].decode("latin-1")
