"""What the cases are made of: lines as they are written, each with the event that it is.

Nothing here reads a stream, so nothing here can read one wrongly: a family of cases says what it
writes and, beside it, what a reader has to make of that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import attrs

LIMIT: Final = 2**20
HEAD: Final = 32
PREFIX: Final = b"cmd_child_to_router:state:"

Text: TypeAlias = bytes | str
Run: TypeAlias = tuple[bytes, int]
Event: TypeAlias = Mapping[str, object]


@attrs.frozen
class Written:
    """One line, or the end of a stream that is none.

    Attributes:
      runs: What stands in it, in runs of equal texts.
      event: What it is, without `offset`.
      end: What ends it.
    """

    runs: tuple[Run, ...]
    event: Event
    end: bytes = b"\n"

    @property
    def size(self) -> int:
        return sum(len(text) * count for text, count in self.runs)


@attrs.frozen
class Case:
    """One case.

    Attributes:
      rule: What it is about.
      name: What is special in it.
      lines: What is written.
      cuts: Where it is cut.
    """

    rule: str
    name: str
    lines: tuple[Written, ...]
    cuts: tuple[int, ...] = ()

    def as_json(self) -> dict[str, object]:
        events, offset = [], 0
        for line in self.lines:
            events.append({**line.event, "offset": offset})
            offset += line.size + len(line.end)
        runs = [run for line in self.lines for run in (*line.runs, (line.end, 1))]
        document: dict[str, object] = {
            "id": f"{self.rule}/{self.name}",
            "rule": self.rule,
            "stream": pieces(runs),
            "events": events,
        }
        return {**document, "cuts": self.cuts} if self.cuts else document


def pieces(runs: Sequence[Run]) -> list[object]:
    """Join what is written once, and fold what is written often."""
    folded: list[object] = []
    for data, count in runs:
        text = data.decode("latin-1")
        if not text or not count:
            continue
        if count > 1:
            folded.append([text, count])
        elif folded and isinstance(folded[-1], str):
            folded[-1] += text
        else:
            folded.append(text)
    return folded


def encode(text: Text) -> bytes:
    return text.encode() if isinstance(text, str) else text


def runs_of(parts: Sequence[Text | Run]) -> tuple[Run, ...]:
    return tuple(part if isinstance(part, tuple) else (encode(part), 1) for part in parts)


def head_of(runs: Sequence[Run]) -> str:
    start = b"".join(text * min(count, HEAD) for text, count in runs)
    return start[:HEAD].decode("latin-1")


# -- lines, by what they are -------------------------------------------------------------------


def loading(
    text: Text,
    *,
    stage: str | None = None,
    stages: Sequence[str] = (),
    value: float | None = None,
) -> Written:
    event = {"state": "loading", "stage": stage, "stages": list(stages), "value": value}
    return record(text, event)


def ready(text: Text, info: Mapping[str, object] | None) -> Written:
    return record(text, {"state": "ready", "info": info})


def sleeping(text: Text = '{"state":"sleeping","payload":null}') -> Written:
    return record(text, {"state": "sleeping"})


def downloading(
    text: Text,
    *,
    url: str | None = None,
    downloaded: int = 0,
    total: int = 0,
    result: str | None = None,
) -> Written:
    fields = {"url": url, "downloaded": downloaded, "total": total, "result": result}
    return record(text, {"state": "downloading", **fields})


def record(text: Text, fields: Event) -> Written:
    return Written(runs_of([PREFIX, text]), {"event": "record", **fields})


def unknown(text: Text, state: str, payload: object = None) -> Written:
    event = {"event": "unknown", "state": state, "payload": payload}
    return Written(runs_of([PREFIX, text]), event)


def malformed(*parts: Text | Run) -> Written:
    runs = runs_of([PREFIX, *parts])
    return Written(runs, {"event": "malformed", "head": head_of(runs)})


def unexpected(*parts: Text | Run) -> Written:
    runs = runs_of(parts)
    return Written(runs, {"event": "unexpected", "head": head_of(runs)})


def oversize(*parts: Text | Run, end: bytes = b"\n") -> Written:
    """A line over the limit; a carriage return before the newline belongs to it."""
    runs = runs_of(parts)
    line = Written(runs, {}, end)
    size = line.size + len(end) - 1
    assert size > LIMIT
    return attrs.evolve(line, event={"event": "oversize", "size": size})


def unfinished(*parts: Text | Run, end: bytes = b"") -> Written:
    runs = runs_of(parts)
    return Written(runs, {"event": "unfinished", "head": head_of(runs)}, end)


def with_crlf(line: Written) -> Written:
    return attrs.evolve(line, end=b"\r\n")


# -- cases -------------------------------------------------------------------------------------

BEFORE: Final = loading('{"state":"loading","payload":{"stage":"text_model"}}', stage="text_model")
AFTER: Final = sleeping()
RECORD: Final = PREFIX + b'{"state":"ready","payload":null}'
"""What nobody may take for a record where it does not stand as a line of its own."""


def between(rule: str, name: str, *lines: Written) -> Case:
    """Put the lines between two good records, so that it shows whether a reader finds its way."""
    return Case(rule, name, (BEFORE, *lines, AFTER))


def as_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
