"""Lines and the prefix: what begins, ends and is a line at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from making_corpus.parts import (
    BEFORE,
    PREFIX,
    RECORD,
    Case,
    Run,
    Text,
    between,
    malformed,
    ready,
    sleeping,
    unexpected,
    unfinished,
    with_crlf,
)

RULES: Final = {
    "line.newline": "A newline ends a line, and nothing else does.",
    "line.return": "One carriage return before the newline belongs to it, and no other one does.",
    "line.other": "A line without the prefix is unexpected, whatever bytes are in it. A line may be"
    " empty.",
    "prefix.first": "The prefix counts at the first byte of a line only: nothing is searched for"
    " and nothing is stripped, neither blanks nor colours nor a byte order mark.",
    "prefix.exact": "The prefix is exactly `cmd_child_to_router:state:`.",
    "prefix.rest": "A line with the prefix and without a record after it is malformed.",
    "end.unfinished": "What follows the last newline is never a record: its writer may have died"
    " within it.",
}

READY: Final = '{"state":"ready","payload":null}'


def cases() -> Iterator[Case]:
    yield from newlines()
    yield from returns()
    yield from others()
    yield from first()
    yield from exact()
    yield from rest()
    yield from ends()


def newlines() -> Iterator[Case]:
    rule = "line.newline"
    yield Case(rule, "no stream", ())
    yield Case(rule, "one newline", (unexpected(""),))
    yield Case(rule, "nothing but newlines", (unexpected(""),) * 5)
    yield Case(rule, "one record", (sleeping(),))
    yield Case(rule, "the same record again and again", (sleeping(),) * 40)
    yield between(rule, "blank lines around a record", unexpected(""), sleeping(), unexpected(""))
    for name, separator in {
        "carriage return": b"\r",
        "vertical tab": b"\x0b",
        "form feed": b"\x0c",
        "file separator": b"\x1c",
        "group separator": b"\x1d",
        "record separator": b"\x1e",
        "NUL": b"\0",
        "next line": b"\x85",
        "next line in UTF-8": b"\xc2\x85",
        "line separator": b"\xe2\x80\xa8",
        "paragraph separator": b"\xe2\x80\xa9",
        "two carriage returns": b"\r\r",
        "backslash and n": b"\\n",
    }.items():
        yield between(rule, f"text, {name}, record", unexpected(b"text" + separator + RECORD))
        yield between(rule, f"record, {name}, record", malformed(READY, separator, RECORD))


def returns() -> Iterator[Case]:
    rule = "line.return"
    crlf = with_crlf
    yield between(rule, "a record", crlf(ready(READY, None)))
    yield between(rule, "records with and without", crlf(sleeping()), sleeping(), crlf(sleeping()))
    yield between(rule, "an empty line", crlf(unexpected("")))
    yield between(rule, "many empty lines", *[crlf(unexpected(""))] * 6)
    yield between(rule, "text", crlf(unexpected("text")))
    # A blank to JSON, so the one that is left does no harm there.
    yield between(rule, "two after a record", crlf(ready(READY + "\r", None)))
    yield between(rule, "two after text", crlf(unexpected("text\r")))
    yield between(rule, "three in an empty line", crlf(unexpected("\r\r")))
    yield between(rule, "one within text", crlf(unexpected("a\rb")))
    yield between(rule, "one at the beginning of a line", unexpected("\rtext"))
    yield between(rule, "one before the prefix", unexpected("\r", RECORD))
    yield between(rule, "one after the prefix", ready("\r" + READY, None))
    yield between(rule, "one and a blank after a record", ready(READY + "\r ", None))
    yield between(rule, "newline before carriage return", unexpected(""), unexpected("\r", RECORD))
    yield between(rule, "the prefix alone", crlf(malformed()))
    yield Case(rule, "every line of a stream", tuple(
        crlf(line) for line in (BEFORE, unexpected("text"), ready(READY, None), sleeping())
    ))  # fmt: skip


OTHER: Final[dict[str, Text | Run]] = {
    "a blank": " ",
    "NUL": b"\0",
    "NULs": b"\0" * 40,
    "NUL within text": b"te\0xt",
    "every byte but newline": bytes(byte for byte in range(256) if byte != 10),
    "bytes that are not UTF-8": b"\xa6\xff\x80",
    "half a character": b"caf\xc3",
    "a character": "caf\u00e9",
    "an escape sequence": b"\x1b[31mred\x1b[0m",
    "half an escape sequence": b"\x1b[",
    "a title for the terminal": b"\x1b]0;title\x07",
    "backspaces": b"ready\x08\x08\x08\x08\x08" + RECORD,
    "a banner": "Using config /etc/child.toml",
    "a progress bar": b"loading  10%\rloading  20%\rloading 100%",
    "JSON": '{"state":"ready","payload":null}',
    "JSON of another protocol": '{"event":"ready"}',
    "sd_notify": "READY=1",
    "a line of a log": "0.00.004.484 I srv    load_model: loading model",
    "the line that asks a child to leave": "cmd_router_to_child:exit",
    "a record in quotes": b'"' + RECORD + b'"',
    "a record in brackets": b"[" + RECORD + b"]",
    "a record in a log": b"[12345] " + RECORD,
    "a record after a promise": b"ready: " + RECORD,
    "half a prefix, then a record": PREFIX[:13] + RECORD,
    "a long line": (b"x", 5000),
    "a very long line": (b"x", 100_000),
    "a long line of NULs": (b"\0", 5000),
}


def others() -> Iterator[Case]:
    for name, text in OTHER.items():
        yield between("line.other", name, unexpected(text))
    yield Case("line.other", "all of them", tuple(map(unexpected, OTHER.values())))


BEFORE_PREFIX: Final[dict[str, bytes]] = {
    "a blank": b" ",
    "four blanks": b"    ",
    "a tab": b"\t",
    "a vertical tab": b"\x0b",
    "a form feed": b"\x0c",
    "NUL": b"\0",
    "a backspace": b"\x08",
    "a bell": b"\x07",
    "an escape": b"\x1b",
    "delete": b"\x7f",
    "0xff": b"\xff",
    "0x80": b"\x80",
    "half a character": b"\xc3",
    "a byte order mark": b"\xef\xbb\xbf",
    "a byte order mark of UTF-16": b"\xff\xfe",
    "a no-break space": b"\xc2\xa0",
    "a zero-width space": b"\xe2\x80\x8b",
    "a colour": b"\x1b[32m",
    "the end of a colour": b"\x1b[0m",
    "a clear screen": b"\x1b[2J\x1b[H",
    "an erased line": b"\x1b[2K\r",
    "a carriage return": b"\r",
    "a title": b"\x1b]0;title\x07",
    "a control sequence of one byte": b"\x9b32m",
    "a quote": b'"',
    "a prompt": b"> ",
    "a time": b"0.00.004.484 I srv: ",
    "a port as the router writes it": b"[40961] ",
    "a name as docker compose writes it": b"child-1  | ",
    "a priority of syslog": b"<6>",
    "the first letter of the prefix": b"c",
    "the prefix and a blank": PREFIX + b" ",
}


def first() -> Iterator[Case]:
    rule = "prefix.first"
    for name, before in BEFORE_PREFIX.items():
        if not before.startswith(PREFIX):
            yield between(rule, name, unexpected(before, RECORD))
    yield between(rule, "the prefix and a blank", malformed(" ", RECORD))
    yield between(rule, "the prefix twice", malformed(RECORD))
    for start in range(0, 256, 16):
        block = [byte for byte in range(start, start + 16) if byte != 10]
        name = f"each byte from {start:#04x} to {start + 15:#04x}"
        yield between(rule, name, *[unexpected(bytes([byte]), RECORD) for byte in block])
    yield Case(rule, "a byte order mark at the start of the stream", (
        unexpected(b"\xef\xbb\xbf", RECORD), sleeping(),
    ))  # fmt: skip
    yield Case(rule, "a record at the first byte of the stream", (sleeping(),))


def exact() -> Iterator[Case]:
    rule = "prefix.exact"
    body = RECORD[len(PREFIX) :]
    for count in range(len(PREFIX)):
        name = f"{count} bytes of it"
        yield between(rule, name, unexpected(PREFIX[:count], body))
    for at, byte in enumerate(PREFIX):
        other = PREFIX[:at] + bytes([byte ^ 0x20]) + PREFIX[at + 1 :]
        yield between(rule, f"another byte {at}", unexpected(other, body))
    for at in range(1, len(PREFIX)):
        line = unexpected(PREFIX[:at], b"\0", PREFIX[at:], body)
        yield between(rule, f"NUL before byte {at}", line)
    for name, other in {
        "in capitals": PREFIX.upper(),
        "with a blank after a colon": PREFIX.replace(b":", b": "),
        "with a blank before the last colon": PREFIX[:-1] + b" :",
        "with another last word": b"cmd_child_to_router:other:",
        "the other direction": b"cmd_router_to_child:state:",
        "without the last word": b"cmd_child_to_router:",
        "with hyphens": PREFIX.replace(b"_", b"-"),
        "in UTF-16": PREFIX.decode().encode("utf-16-le"),
        "with a letter that looks like o": PREFIX.replace(b"o", "\u043e".encode()),
        "with a wide colon": PREFIX.replace(b":", "\uff1a".encode()),
        "with an invisible character": PREFIX[:3] + "\u200b".encode() + PREFIX[3:],
    }.items():
        yield between(rule, name, unexpected(other, body))


def rest() -> Iterator[Case]:
    rule = "prefix.rest"
    yield between(rule, "nothing", malformed())
    texts: dict[str, Text] = {
        "a blank": " ",
        "NUL": b"\0",
        "a word": "ready",
        "a colour before the object": '\x1b[32m{"state":"ready"}',
        "a colour after the object": '{"state":"ready"}\x1b[0m',
        "NUL before the object": '\0{"state":"ready"}',
        "NUL after the object": '{"state":"ready"}\0',
        "NUL and text after the object": '{"state":"ready"}\0text',
        "a byte order mark before the object": '\ufeff{"state":"ready"}',
        "a byte order mark after the object": '{"state":"ready"}\ufeff',
        "text after the object": '{"state":"ready"} trailing',
        "a second object": '{"state":"ready"}{"state":"ready"}',
        "a second object after a comma": '{"state":"ready"},{"state":"ready"}',
        "a comma after the object": '{"state":"ready"},',
        "a semicolon after the object": '{"state":"ready"};',
        "a no-break space before the object": '\u00a0{"state":"ready"}',
        "a vertical tab before the object": '\x0b{"state":"ready"}',
        "a form feed after the object": '{"state":"ready"}\x0c',
        "a second prefix": RECORD,
    }
    for name, text in texts.items():
        yield between(rule, name, malformed(text))
    for name, blank in {
        "blanks before the object": f"   {READY}",
        "a tab before the object": f"\t{READY}",
        "blanks after the object": f"{READY}   ",
        "a tab after the object": f"{READY}\t",
    }.items():
        yield between(rule, name, ready(blank, None))


def ends() -> Iterator[Case]:
    rule = "end.unfinished"
    for name, parts in {
        "a record": (RECORD,),
        "the prefix": (PREFIX,),
        "half a prefix": (PREFIX[:11],),
        "half a record": (RECORD[:-5],),
        "a record without its last byte": (RECORD[:-1],),
        "a record and a blank": (RECORD, " "),
        "a record and NUL": (RECORD, b"\0"),
        "a blank": (" ",),
        "NUL": (b"\0",),
        "text": ("text",),
        "half a character": (b"caf\xc3",),
        "an escape": (b"\x1b",),
        "a long text": ((b"x", 5000),),
        "an oversize text": ((b"x", 2**20 + 1),),
        "an oversize text with a record at its end": ((b"x", 2**20 + 1), RECORD),
    }.items():
        yield Case(rule, name, (BEFORE, unfinished(*parts)))
    yield Case(rule, "a record and a carriage return", (BEFORE, unfinished(RECORD, end=b"\r")))
    yield Case(rule, "a carriage return", (BEFORE, unfinished(end=b"\r")))
    yield Case(rule, "nothing but a record", (unfinished(RECORD),))
    yield Case(rule, "nothing but a byte", (unfinished("x"),))
    yield Case(rule, "nothing, after a record", (BEFORE,))
    yield Case(rule, "nothing, after text", (BEFORE, unexpected("text")))
    yield Case(rule, "a record, after text", (unexpected("text"), unfinished(RECORD)))
