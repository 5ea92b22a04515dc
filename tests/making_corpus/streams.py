"""The limit, the cuts and whole streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from making_corpus.parts import (
    AFTER,
    BEFORE,
    LIMIT,
    PREFIX,
    RECORD,
    Case,
    Run,
    Text,
    Written,
    as_text,
    between,
    downloading,
    loading,
    malformed,
    oversize,
    ready,
    sleeping,
    unexpected,
    unfinished,
    unknown,
    with_crlf,
)

RULES: Final = {
    "limit.border": "A line of up to 1048576 bytes before its newline, carriage return included,"
    " is read like any other.",
    "limit.over": "A longer one is oversize, whatever is in it.",
    "limit.tail": "An oversize line goes on up to its own newline. Its tail is not a line.",
    "cut.anywhere": "However a stream is cut, the events are the same.",
    "stream.life": "A whole life of a child.",
    "stream.noise": "Lines that are no records change nothing about those that are.",
}

MIB: Final = LIMIT
BODY: Final = b'{"state":"ready","payload":null}'


def cases() -> Iterator[Case]:
    yield from border()
    yield from over()
    yield from tails()
    yield from cut_records()
    yield from cut_others()
    yield from lives()
    yield from noises()


def filled(size: int) -> tuple[Text | Run, ...]:
    """A record of so many bytes, by blanks after its object."""
    return BODY, (b" ", size - len(PREFIX) - len(BODY))


def border() -> Iterator[Case]:
    rule = "limit.border"
    event = {"event": "record", "state": "ready", "info": None}
    for less in (0, 1, 2, 4096):
        size = MIB - less
        runs: tuple[Run, ...] = (
            (PREFIX + BODY, 1), (b" ", size - len(PREFIX + BODY)),
        )  # fmt: skip
        yield between(rule, f"a record, {less} less", Written(runs, event))
        yield between(rule, f"text, {less} less", unexpected((b"x", size)))
        yield between(rule, f"NULs, {less} less", unexpected((b"\0", size)))
    runs = ((PREFIX + BODY, 1), (b" ", MIB - 1 - len(PREFIX + BODY)))
    yield between(rule, "a record and a carriage return", with_crlf(Written(runs, event)))
    yield between(rule, "text and a carriage return", with_crlf(unexpected((b"x", MIB - 1))))
    yield between(rule, "a malformed one", malformed((b"x", MIB - len(PREFIX))))
    # In a member that nobody knows, so that it need not stand in the file.
    opening, closing = PREFIX + b'{"state":"ready","more":"', b'"}'
    runs = ((opening, 1), (b"x", MIB - len(opening) - len(closing)), (closing, 1))
    yield between(rule, "a long text in it", Written(runs, event))
    yield Case(rule, "two in a row", (
        *[Written(((PREFIX + BODY, 1), (b" ", MIB - len(PREFIX + BODY))), event)] * 2, AFTER,
    ))  # fmt: skip


def over() -> Iterator[Case]:
    rule = "limit.over"
    for more in (1, 2, 4095, 4096, 4097, MIB):
        yield between(rule, f"text, {more} more", oversize((b"x", MIB + more)))
        line = oversize(PREFIX, *filled(MIB + more))
        yield between(rule, f"a record, {more} more", line)
    yield between(rule, "a carriage return too many, after text", oversize(
        (b"x", MIB), end=b"\r\n"
    ))  # fmt: skip
    yield between(rule, "a carriage return too many, after a record", oversize(
        PREFIX, *filled(MIB), end=b"\r\n"
    ))  # fmt: skip
    yield between(rule, "NULs", oversize((b"\0", MIB + 1)))
    yield between(rule, "carriage returns", oversize((b"\r", MIB + 1)))
    yield between(rule, "bytes that are not UTF-8", oversize((b"\xff", MIB + 1)))
    yield between(rule, "prefixes", oversize((PREFIX, MIB // len(PREFIX) + 1)))
    yield between(rule, "records", oversize((RECORD, MIB // len(RECORD) + 1)))
    yield between(rule, "brackets", oversize(
        PREFIX, b'{"state":"nest","payload":', (b"[", MIB)
    ))  # fmt: skip
    yield between(rule, "a record with a text in it", oversize(
        PREFIX, b'{"state":"ready","payload":{"id":"', (b"x", MIB), b'"}}'
    ))  # fmt: skip
    yield Case(rule, "two in a row", (BEFORE, *[oversize((b"x", MIB + 1))] * 2, AFTER))
    yield Case(rule, "at the start of the stream", (oversize((b"x", MIB + 1)), AFTER))
    yield Case(rule, "at the end of the stream", (BEFORE, oversize((b"x", MIB + 1))))


def tails() -> Iterator[Case]:
    rule = "limit.tail"
    whole = with_crlf
    # A reader that takes 4096 bytes at a time finds the line too long at some multiple of that,
    # and a record that begins there looks to it like a line. What is before it counts as well.
    start = len(PREFIX) + len(BEFORE.runs[1][0]) + 1
    for pages in (257, 258, 260, 300, 512):
        filler = pages * 4096 - start
        yield between(rule, f"a record at {pages} pages", oversize((b"x", filler), RECORD))
        yield between(rule, f"two at {pages} pages", oversize((b"x", filler), RECORD, RECORD))
    for filler in (MIB - 1, MIB, MIB + 1, MIB + 4096, 2 * MIB, 2 * MIB + 1):
        yield between(rule, f"a record after {filler} bytes", oversize((b"x", filler), RECORD))
    for size in (2**13, 2**14, 2**15, 2**16, 2**17):
        filler = MIB + size - start
        yield between(rule, f"a record after pieces of {size}", oversize((b"x", filler), RECORD))
    filler = 257 * 4096 - start
    # Whoever keeps on taking the rest of the line in pieces finds a record at the end of it.
    yield between(rule, "nothing but records", oversize((RECORD + b" " * 6, 20_000)))
    yield between(rule, "after a carriage return", oversize((b"x", filler - 1), b"\r", RECORD))
    yield between(rule, "after NUL", oversize((b"x", filler - 1), b"\0", RECORD))
    yield between(rule, "a tail of text", oversize((b"x", filler), b"text"))
    yield between(rule, "a tail of the prefix", oversize((b"x", filler), PREFIX))
    yield between(rule, "a tail of an unknown state", oversize(
        (b"x", filler), PREFIX, b'{"state":"dreaming"}'
    ))  # fmt: skip
    yield between(rule, "behind a record that is too long", oversize(
        RECORD, (b" ", filler - len(RECORD)), RECORD
    ))  # fmt: skip
    yield between(rule, "a tail, then a record", oversize((b"x", filler), RECORD), sleeping())
    yield between(rule, "a tail with a carriage return", oversize(
        (b"x", filler), RECORD, end=b"\r\n"
    ), whole(sleeping()))  # fmt: skip
    line = oversize((b"x", MIB + 1), RECORD)
    cut = (start + MIB + 1,)
    yield Case(rule, "cut before the tail", (BEFORE, line, AFTER), cut)
    yield Case(rule, "cut within the tail", (BEFORE, line, AFTER), (cut[0] + 30,))
    yield Case(rule, "cut before and after the tail", (BEFORE, line, AFTER),
               (cut[0], cut[0] + len(RECORD)))  # fmt: skip


def cut_records() -> Iterator[Case]:
    """One record, cut before each of its bytes."""
    line = ready('{"state":"ready","payload":{"id":"\u00e9"}}', {"id": "\u00e9"})
    for at in range(line.size + 2):
        yield Case("cut.anywhere", f"a record before byte {at}", (line, AFTER), (at,) if at else ())


def cut_others() -> Iterator[Case]:
    rule = "cut.anywhere"
    lines = (BEFORE, with_crlf(ready('{"state":"ready"}', None)), unexpected("text"), AFTER)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + line.size + len(line.end))
    yield Case(rule, "every line of its own", lines, tuple(starts[1:-1]))
    yield Case(rule, "every newline of its own", lines, tuple(
        at for start in starts[1:-1] for at in (start - 1, start)
    ))  # fmt: skip
    yield Case(rule, "between carriage return and newline", lines, (starts[2] - 1,))
    yield Case(rule, "before the carriage return", lines, (starts[2] - 2,))
    yield Case(rule, "every byte", lines, tuple(range(1, starts[-1])))
    for size in (2, 3, 5, 7, 16, 64):
        yield Case(rule, f"pieces of {size}", lines, tuple(range(size, starts[-1], size)))
    long = (BEFORE, oversize((b"x", MIB + 1), RECORD), unexpected("text"), AFTER)
    end = sum(line.size + len(line.end) for line in long)
    for size in (4095, 4096, 4097, 8192, 65_536, 65_537):
        name = f"an oversize line in pieces of {size}"
        yield Case(rule, name, long, tuple(range(size, end, size)))
    for less in (0, 1):
        at = len(PREFIX) + len(BEFORE.runs[1][0]) + 1 + MIB - less
        yield Case(rule, f"an oversize line, {less} before the limit", long, (at,))
    rest = (BEFORE, unfinished(RECORD))
    size = sum(line.size + len(line.end) for line in rest)
    for less in (1, 2, len(RECORD)):
        yield Case(rule, f"an unfinished record, {less} before its end", rest, (size - less,))
    half = (malformed(b'{"state":"ready\xc3"}'), AFTER)
    yield Case(rule, "after half a character", half, (half[0].size - 2,))


def life(text: str = "text_model") -> tuple[Written, ...]:
    def step(value: float) -> Written:
        payload = {"stages": [text], "current": text, "value": value}
        document = as_text({"state": "loading", "payload": payload})
        return loading(document, stage=text, stages=[text], value=value)

    return step(0.0), step(1.0)


INFO: Final = {"id": "m.gguf", "meta": {"n_ctx": 8}}
TOLD: Final = ready(as_text({"state": "ready", "payload": INFO}), INFO)
WOKEN: Final = ready('{"state":"ready","payload":null}', None)


def lives() -> Iterator[Case]:
    rule = "stream.life"
    yield Case(rule, "a load", (*life(), TOLD))
    yield Case(rule, "a load with two stages", (
        *life(), loading('{"state":"loading","payload":{"stage":"mmproj"}}', stage="mmproj"),
        *life("mmproj"), TOLD,
    ))  # fmt: skip
    yield Case(rule, "a load and a sleep", (*life(), TOLD, sleeping()))
    yield Case(rule, "a sleep and a wake", (*life(), TOLD, sleeping(), *life(), WOKEN))
    yield Case(rule, "five sleeps", (
        *life(), TOLD, *[line for _ in range(5) for line in (sleeping(), *life(), WOKEN)]
    ))  # fmt: skip
    yield Case(rule, "a load that fails", life()[:1])
    yield Case(rule, "a load whose writer dies", (*life(), unfinished(RECORD[:-9])))
    yield Case(rule, "a wake whose writer dies", (
        *life(), TOLD, sleeping(), life()[0], unfinished(PREFIX)
    ))  # fmt: skip
    url = "https://example.org/m.gguf"
    progress = [
        downloading(as_text({"state": "downloading",
                             "payload": {"url": url, "downloaded": n, "total": 4}}),
                    url=url, downloaded=n, total=4)
        for n in range(5)
    ]  # fmt: skip
    for result in ("download_finished", "download_failed"):
        text = as_text({"state": "downloading", "payload": {"result": result}})
        yield Case(rule, result, (*progress, downloading(text, result=result)))
    yield Case(rule, "a download and a load", (*progress, *life(), TOLD))
    yield Case(rule, "a child that cannot start", ())
    yield Case(rule, "in text mode of Windows", tuple(map(with_crlf, (*life(), TOLD, sleeping()))))
    yield Case(rule, "with a state of a later version", (
        *life(), unknown('{"state":"warming_up","payload":{"value":0.5}}', "warming_up",
                         {"value": 0.5}), TOLD,
    ))  # fmt: skip


NOISE: Final = {
    "banners": unexpected("Using config /etc/child.toml"),
    "blank lines": unexpected(""),
    "colours": unexpected("\x1b[32m", RECORD, "\x1b[0m"),
    "logs": unexpected("0.00.004.484 I srv: ", RECORD),
    "bytes that are not text": unexpected(b"\xa6\xff\x80\0"),
    "broken records": malformed('{"state":'),
    "records that are no text": malformed(b'{"state":"ready\xff"}'),
    "unknown states": unknown('{"state":"dreaming"}', "dreaming"),
    "oversize lines": oversize((b"x", MIB + 1), RECORD),
    "long lines": unexpected((b"x", 10_000)),
}


def noises() -> Iterator[Case]:
    rule = "stream.noise"
    lines = (*life(), TOLD, sleeping(), life()[0], WOKEN)
    for name, noise in NOISE.items():
        few = lines if noise.size < MIB else lines[1:3]
        mixed = [part for line in few for part in (noise, line)]
        yield Case(rule, name, (*mixed, noise))
        yield Case(rule, f"{name}, at the end too", (*mixed, unfinished("text")))
    every = [part for line in lines[1:3] for part in (*NOISE.values(), line)]
    yield Case(rule, "everything", tuple(every))
