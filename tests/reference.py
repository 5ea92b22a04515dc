"""What a reader makes of a stream, said once more and as simply as can be.

It takes a whole stream and shares nothing with the library. What it costs does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TypeAlias

Event: TypeAlias = dict[str, object]

PREFIX = b"cmd_child_to_router:state:"
TEXT, TEXTS, NUMBER, WHOLE = "text", "texts", "number", "whole"
FIELDS = {
    "loading": {"current": TEXT, "stage": TEXT, "stages": TEXTS, "value": NUMBER},
    "downloading": {"url": TEXT, "downloaded": WHOLE, "total": WHOLE, "result": TEXT},
}


def expect(stream: bytes, limit: int = 2**20) -> list[Event]:
    *lines, rest = stream.split(b"\n")
    events, offset = [], 0
    for line in lines:
        events.append({**expect_line(line, limit), "offset": offset})
        offset += len(line) + 1
    if rest:
        head = show(rest.removesuffix(b"\r"))
        events.append({"event": "unfinished", "head": head, "offset": offset})
    return events


def expect_line(line: bytes, limit: int) -> Event:
    if len(line) > limit:
        return {"event": "oversize", "size": len(line)}
    line = line.removesuffix(b"\r")
    if line[: len(PREFIX)] != PREFIX:
        return {"event": "unexpected", "head": show(line)}
    try:
        return expect_record(line[len(PREFIX) :])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, AssertionError):
        return {"event": "malformed", "head": show(line)}


def show(line: bytes) -> str:
    return line[:32].decode("latin-1")


def expect_record(data: bytes) -> Event:
    document = json.loads(data.decode("utf-8"))
    for value, depth in values(document, 1):
        assert depth <= 32
        if isinstance(value, str):
            value.encode("utf-8")
        if isinstance(value, int | float):
            assert float("-inf") < float(value) < float("inf")
    state, payload = document["state"], document.get("payload")
    assert type(state) is str
    given = payload if isinstance(payload, dict) else {}
    fields = {key: value for key, value in given.items() if value is not None}
    if state == "sleeping":
        return {"event": "record", "state": state}
    if state == "ready":
        return {"event": "record", "state": state, "info": given or None}
    if state not in FIELDS:
        return {"event": "unknown", "state": state, "payload": payload}
    for name, kind in FIELDS[state].items():
        assert name not in fields or fits(fields[name], kind)
    if state == "downloading":
        empty: Event = {"url": None, "downloaded": 0, "total": 0, "result": None}
        told = {name: fields.get(name, empty[name]) for name in empty}
    else:
        stage = fields["current"] if "current" in fields else fields.get("stage")
        told = {"stage": stage, "stages": fields.get("stages", []), "value": fields.get("value")}
    return {"event": "record", "state": state, **told}


def fits(value: object, kind: str) -> bool:
    if kind == TEXTS:
        return type(value) is list and all(type(item) is str for item in value)
    if kind == WHOLE:
        return type(value) is int and -(2**63) <= value <= 2**63 - 1
    return type(value) is str if kind == TEXT else type(value) in (int, float)


def values(value: object, depth: int) -> Iterator[tuple[object, int]]:
    yield value, depth
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    if isinstance(inner, list):
        for item in inner:
            yield from values(item, depth + 1)
