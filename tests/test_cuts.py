"""All short streams over a small alphabet, cut in every way that is tractable.

Of each stream: whole, byte by byte, cut once at every position, and cut at every set of the borders
between its symbols. What is right is said by `reference`, which sees the whole stream and shares
nothing with the reader.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise, product
from typing import TypeAlias

import pytest
import reference

from llamatrio.testing.corpus import reader
from llamatrio.wire.lines import Line, LineSplitter, Oversize

RECORD = reference.PREFIX + b'{"state":"sleeping"}'
LIMIT = len(RECORD) + 2  # so that a record fits with something beside it, and no two of them do

ALPHABET = {
    "record": RECORD,
    "prefix": reference.PREFIX,
    "half a prefix": reference.PREFIX[:13],
    "newline": b"\n",
    "CRLF": b"\r\n",
    "NUL": b"\0",
    "0xff": b"\xff",
    "ESC": b"\x1b",
    "oversize run": b"x" * (LIMIT + 1),
}


Happening: TypeAlias = tuple[str, int]
"""An event, as JSON, and where its line begins: texts are compared faster than dictionaries."""


def text_of(event: reference.Event) -> str:
    return sys.intern(json.dumps(event, sort_keys=True))


@cache
def read_line(data: bytes) -> str:
    """What our parser makes of a line; one and the same line comes again and again."""
    return text_of(dict(reader._event(Line(data))))


@cache
def read_oversize(head: bytes, size: int) -> str:
    return text_of(dict(reader._event(Oversize(head, size))))


@cache
def expect_line(data: bytes) -> str:
    return text_of(reference.expect_line(data, LIMIT))


@cache
def unfinished(data: bytes) -> str:
    return text_of({"event": "unfinished", "head": reference.show(data)})


def expect(stream: bytes) -> list[Happening]:
    """The same as `reference.expect`, without reading one and the same line again and again."""
    *lines, rest = stream.split(b"\n")
    events, offset = [], 0
    for line in lines:
        events.append((expect_line(line), offset))
        offset += len(line) + 1
    return [*events, (unfinished(rest.removesuffix(b"\r")), offset)] if rest else events


def read(chunks: list[bytes]) -> list[Happening]:
    splitter = LineSplitter(LIMIT, keep=reader.HEAD)
    events = []
    for chunk in chunks:
        for line in splitter.feed(chunk):
            if isinstance(line, Line):
                events.append((read_line(line.data), line.offset))
            else:
                events.append((read_oversize(line.head, line.size), line.offset))
        assert splitter.held <= LIMIT
    if (rest := splitter.close()) is not None:
        data = rest.data if isinstance(rest, Line) else rest.head
        events.append((unfinished(data), rest.offset))
    return events


def ways(symbols: tuple[bytes, ...]) -> Iterator[list[bytes]]:
    """Every way in which we cut the stream that is made of these."""
    stream = b"".join(symbols)
    for at in range(len(stream) + 1):  # among them the whole stream, beside an empty piece
        yield [stream[:at], stream[at:]]
    yield [stream[at : at + 1] for at in range(len(stream))]
    for count in range(2, len(symbols)):
        for borders in combinations(range(1, len(symbols)), count):
            edges = pairwise([0, *borders, len(symbols)])
            yield [b"".join(symbols[start:end]) for start, end in edges]


def check_all(length: int) -> tuple[int, int]:
    """Check all streams of so many symbols; give how many there are, and cuts of them."""
    streams = cuts = 0
    for symbols in product(ALPHABET.values(), repeat=length):
        expected = expect(b"".join(symbols))
        for chunks in ways(symbols):
            assert read(chunks) == expected, chunks
            cuts += 1
        streams += 1
    return streams, cuts


def test_the_alphabet_has_what_it_says() -> None:
    def kinds(*names: str) -> list[object]:
        stream = b"".join(ALPHABET[name] for name in names)
        return [event["event"] for event in reference.expect(stream, LIMIT)]

    assert kinds("record", "newline", "record", "CRLF") == ["record", "record"]
    assert kinds("half a prefix", "newline", "prefix", "CRLF") == ["unexpected", "malformed"]
    assert kinds("oversize run", "record", "CRLF", "record") == ["oversize", "unfinished"]
    assert kinds("record", "NUL", "CRLF") == ["malformed"]
    assert kinds("record", "NUL", "NUL", "CRLF") == ["oversize"]


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_all_streams_of_up_to_three_symbols_in_all_cuts(length: int) -> None:
    streams, cuts = check_all(length)
    print(f"{length} symbols: {streams:,} streams, {cuts:,} cuts")  # noqa: T201
    assert streams == len(ALPHABET) ** length


@pytest.mark.slow
@pytest.mark.parametrize("length", [4, 5])
def test_all_streams_of_four_and_five_symbols_in_all_cuts(length: int) -> None:
    streams, cuts = check_all(length)
    print(f"{length} symbols: {streams:,} streams, {cuts:,} cuts")  # noqa: T201
    assert streams == len(ALPHABET) ** length


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_all_streams_of_six_symbols_in_all_cuts() -> None:
    streams, cuts = check_all(6)
    print(f"6 symbols: {streams:,} streams, {cuts:,} cuts")  # noqa: T201
    assert streams == len(ALPHABET) ** 6
