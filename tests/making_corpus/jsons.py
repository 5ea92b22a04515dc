"""The document after the prefix: JSON, and no more than JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from making_corpus.parts import (
    Case,
    Run,
    Text,
    Written,
    between,
    downloading,
    loading,
    malformed,
    ready,
    sleeping,
    unknown,
)

RULES: Final = {
    "json.grammar": "What follows the prefix is one JSON document (RFC 8259), and nothing is"
    " forgiven.",
    "json.utf8": "It is UTF-8: no other bytes, no overlong forms, no surrogates.",
    "json.escapes": "Escapes mean what they mean, also in names. A surrogate without its partner is"
    " no text: the line is malformed.",
    "json.object": "The document is an object with a member `state` that is a string. Members that"
    " nobody knows are ignored.",
    "json.depth": "The document is at depth 1 and whatever is in an array or object one deeper than"
    " that. Something deeper than 32 makes the line malformed.",
    "json.duplicates": "Of members of the same name the last one counts.",
    "json.constants": "NaN and Infinity are not JSON.",
    "json.range": "A number that is no finite IEEE double makes the line malformed, wherever it"
    " stands; so does, in a field of whole numbers, one that does not fit into 64 bits.",
}


def cases() -> Iterator[Case]:
    yield from grammar()
    yield from utf8()
    yield from escapes()
    yield from objects()
    yield from depth()
    yield from duplicates()
    yield from constants()
    yield from ranges()


def info(text: Text) -> bytes:
    """A record whose payload holds that JSON."""
    inner = text.encode() if isinstance(text, str) else text
    return b'{"state":"ready","payload":{"id":' + inner + b"}}"


BROKEN: Final[dict[str, Text]] = {
    "an open brace": "{",
    "a closed brace": "}",
    "an object that is not closed": '{"state":"ready"',
    "a payload that is not closed": '{"state":"ready","payload":{"id":"m"}',
    "a brace too many": '{"state":"ready"}}',
    "a bracket for a brace": '{"state":"ready"]',
    "a string that is not closed": '{"state":"ready}',
    "a name that is not closed": '{"state:"ready"}',
    "no quotes": "{state:ready}",
    "no quotes around the name": '{state:"ready"}',
    "no quotes around the word": '{"state":ready}',
    "single quotes": "{'state':'ready'}",
    "curly quotes": "{\u201cstate\u201d:\u201cready\u201d}",
    "no colon": '{"state" "ready"}',
    "an equals sign": '{"state"="ready"}',
    "two colons": '{"state"::"ready"}',
    "no comma": '{"state":"ready" "payload":null}',
    "two commas": '{"state":"ready",,"payload":null}',
    "a comma at the end": '{"state":"ready",}',
    "a comma at the beginning": '{,"state":"ready"}',
    "no value": '{"state":}',
    "no name": '{:"ready"}',
    "a number for a name": '{"state":"ready",1:2}',
    "a comment": '{"state":"ready"/* here */}',
    "a comment to the end": '{"state":"ready"} // here',
    "a hash": '{"state":"ready"} # here',
    "NUL in the object": '{"state":"ready"\0}',
    "NUL in a string": '{"state":"ready\0"}',
    "a tab in a string": '{"state":"ready","payload":"a\tb"}',
    "an escape character in a string": '{"state":"ready","payload":"\x1b[31m"}',
    "a carriage return in a string": '{"state":"ready","payload":"a\rb"}',
    "a unit separator in a string": '{"state":"ready","payload":"a\x1fb"}',
    "the word of Python": '{"state":"ready","payload":None}',
    "True": info("True"),
    "TRUE": info("TRUE"),
    "half a word": info("tru"),
    "a longer word": info("nulls"),
    "undefined": info("undefined"),
    "a plus": info("+1"),
    "a minus alone": info("-"),
    "two minuses": info("--1"),
    "a zero before a number": info("01"),
    "a zero before a negative number": info("-01"),
    "no digit before the point": info(".5"),
    "no digit after the point": info("1."),
    "no digit between point and exponent": info("1.e5"),
    "no digit in the exponent": info("1e"),
    "a sign alone in the exponent": info("1e+"),
    "a hexadecimal number": info("0x10"),
    "an octal number": info("0o10"),
    "a separator in a number": info("1_000"),
    "a comma in a number": info("1,5"),
    "a digit that is not ASCII": info("\u0661"),
    "a float of C": info("1.5f"),
    "a long of C": info("1L"),
    "an array that is not closed": info("[1"),
    "a comma at the end of an array": info("[1,]"),
    "two commas in an array": info("[1,,2]"),
    "an escape that is none": info(r'"\x41"'),
    "an escaped quote of C": info(r'"\'"'),
    "a backslash at the end": info('"\\"'),
    "three digits of an escape": info(r'"\u041"'),
    "no digits of an escape": info(r'"\u"'),
    "another letter in an escape": info(r'"\u00g1"'),
    "a sign in an escape": info(r'"\u+041"'),
    "a blank in an escape": info(r'"\u 041"'),
    "a capital U": info(r'"\U00000041"'),
    "an octal escape": info(r'"\101"'),
    "a line of HTTP": "HTTP/1.1 200 OK",
    "XML": "<state>ready</state>",
    "a form": "state=ready&payload=",
}


def grammar() -> Iterator[Case]:
    rule = "json.grammar"
    for name, text in BROKEN.items():
        yield between(rule, name, malformed(text))
    yield between(rule, "blanks everywhere", sleeping(
        ' { "state" \t: "sleeping" ,\r "payload" : null } '
    ))  # fmt: skip
    yield between(rule, "the payload first", sleeping('{"payload":null,"state":"sleeping"}'))
    values: list[tuple[str, str, object]] = [
        ("zero", "0", 0),
        ("minus zero", "-0", 0),
        ("minus zero as a float", "-0.0", -0.0),
        ("a number with everything", "-12.50e+02", -1250.0),
        ("a capital exponent", "1E2", 100.0),
        ("a negative exponent", "25e-2", 0.25),
        ("zeros in the exponent", "1e002", 100.0),
        ("true", "true", True),
        ("false", "false", False),
        ("null", "null", None),
        ("an empty string", '""', ""),
        ("an empty array", "[]", []),
        ("an empty object", "{}", {}),
        ("blanks in an array", "[ 1 , 2 ]", [1, 2]),
        ("an array of everything", '[0,"",true,null,[],{}]', [0, "", True, None, [], {}]),
        ("delete in a string", '"\x7f"', "\x7f"),
        ("a slash in a string", '"/"', "/"),
        ("a prefix in a string", '"cmd_child_to_router:state:"', "cmd_child_to_router:state:"),
        ("a record in a string", r'"x\ncmd_child_to_router:state:{}"',
         "x\ncmd_child_to_router:state:{}"),
    ]  # fmt: skip
    for name, text, value in values:
        yield between(rule, name, ready(info(text), {"id": value}))


NOT_UTF8: Final = {
    "a byte that begins nothing": b"\xff",
    "another byte that begins nothing": b"\xfe",
    "a byte that is in the middle of something": b"\x80",
    "the last byte of that kind": b"\xbf",
    "half a character": b"\xc3",
    "two thirds of a character": b"\xe2\x82",
    "three quarters of a character": b"\xf0\x9f\xa6",
    "an overlong slash": b"\xc0\xaf",
    "an overlong NUL": b"\xc0\x80",
    "the last overlong form of two bytes": b"\xc1\xbf",
    "an overlong slash of three bytes": b"\xe0\x80\xaf",
    "the last overlong form of three bytes": b"\xe0\x9f\xbf",
    "an overlong slash of four bytes": b"\xf0\x80\x80\xaf",
    "the last overlong form of four bytes": b"\xf0\x8f\xbf\xbf",
    "the first surrogate": b"\xed\xa0\x80",
    "the last surrogate": b"\xed\xbf\xbf",
    "a pair of surrogates": b"\xed\xa0\xbd\xed\xb8\x80",
    "one beyond the last character": b"\xf4\x90\x80\x80",
    "five bytes": b"\xf8\x88\x80\x80\x80",
    "six bytes": b"\xfc\x84\x80\x80\x80\x80",
    "latin-1": "caf\u00e9".encode("latin-1"),
    "code page 437": b"caf\x82",
    "a character and a byte too many": b"\xc3\xa9\xa9",
}


def utf8() -> Iterator[Case]:
    rule = "json.utf8"
    for name, data in NOT_UTF8.items():
        yield between(rule, name, malformed(info(b'"' + data + b'"')))
    for name, line in {
        "in the state": b'{"state":"ready\xc3"}',
        "in a name": b'{"state":"ready","\xff":1}',
        "outside of any string": b'{"state":"ready"\xff}',
        "after the object": b'{"state":"ready"}\xff',
        "in a field that is ignored": b'{"state":"sleeping","payload":null,"more":"\xff"}',
    }.items():
        yield between(rule, name, malformed(line))
    for encoding in ("utf-16-le", "utf-16-be", "utf-16", "utf-32"):
        yield between(rule, encoding, malformed('{"state":"ready"}'.encode(encoding)))
    for code in (
        0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFEFF, 0xFFFD, 0xFFFF, 0x10000, 0x10FFFF,
    ):  # fmt: skip
        name = f"U+{code:04X}"
        yield between(rule, name, ready(info(f'"{chr(code)}"'), {"id": chr(code)}))
    yield between(rule, "a character in a name", ready(
        '{"state":"ready","payload":{"n\u00e4me":"\U0001f999"}}', {"n\u00e4me": "\U0001f999"}
    ))  # fmt: skip
    yield between(rule, "a letter and its accent", ready(info('"e\u0301"'), {"id": "e\u0301"}))
    yield between(rule, "right to left", ready(info('"\u202eydaer"'), {"id": "\u202eydaer"}))


def escapes() -> Iterator[Case]:
    rule = "json.escapes"
    for escape, meaning in {
        r"\"": '"', r"\\": "\\", r"\/": "/", r"\b": "\b", r"\f": "\f",
        r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\u0041": "A", r"\u00e9": "\u00e9",
        r"\u0000": "\0", r"\u001b[31m": "\x1b[31m", r"\u2028": "\u2028", r"\uFFFF": "\uffff",
        r"\uD83D\uDE00": "\U0001f600", r"\ud83d\ude00": "\U0001f600", r"\udbff\udfff": "\U0010ffff",
        r"\\u0041": "\\u0041", r"\\ud800": "\\ud800", r"\\n": "\\n",
    }.items():  # fmt: skip
        yield between(rule, escape, ready(info(f'"{escape}"'), {"id": meaning}))
    for name, text in {
        "a high surrogate alone": r'"\ud83d"',
        "a low surrogate alone": r'"\ude00"',
        "two high surrogates": r'"\ud83d\ud83d"',
        "a pair the wrong way round": r'"\ude00\ud83d"',
        "a high surrogate and a letter": r'"\ud83dx"',
        "a high surrogate and another escape": r'"\ud83d\u0041"',
        "a pair and a low surrogate": r'"\ud83d\ude00\ude00"',
        "a surrogate in a name": r'{"\udc00":1}',
        "a surrogate deep down": r'[[{"a":["\ud800"]}]]',
    }.items():
        yield between(rule, name, malformed(info(text)))
    yield between(rule, "a surrogate in the state", malformed(r'{"state":"\ud800"}'))
    yield between(rule, "a surrogate beside the payload", malformed(
        r'{"state":"sleeping","payload":null,"more":"\udfff"}'
    ))  # fmt: skip
    yield between(rule, "an escape in the state", ready(r'{"state":"\u0072eady"}', None))
    yield between(rule, "only escapes in the state", ready(
        r'{"state":"\u0072\u0065\u0061\u0064\u0079"}', None
    ))  # fmt: skip
    yield between(rule, "an escape in the name of the state", ready(
        r'{"st\u0061te":"ready"}', None
    ))  # fmt: skip
    yield between(rule, "an escape in the name of the payload", ready(
        r'{"state":"ready","p\u0061yload":{"id":1}}', {"id": 1}
    ))  # fmt: skip
    yield between(rule, "NUL after the state", unknown(r'{"state":"ready\u0000"}', "ready\0"))
    yield between(rule, "a newline after the state", unknown(r'{"state":"ready\n"}', "ready\n"))


def objects() -> Iterator[Case]:
    rule = "json.object"
    for text in (
        "null", "true", "false", "0", "7", "-1.5", '""', '"ready"', '"state"', "[]", '["ready"]',
        '["state","ready"]', '[{"state":"ready"}]', "{}", '{"payload":null}', '{"payload":{}}',
        '{"State":"ready"}', '{"STATE":"ready"}', '{"state ":"ready"}', '{"":"ready"}',
        '{"status":"ready"}', '{"payload":{"state":"ready"}}', '{"state":null}', '{"state":true}',
        '{"state":0}', '{"state":7}', '{"state":["ready"]}', '{"state":{"ready":1}}',
        '{"state":{"state":"ready"}}', '{"state":null,"payload":{"id":"m"}}',
    ):  # fmt: skip
        yield between(rule, text.replace("/", "|"), malformed(text))
    for name, text in {
        "another member": '{"state":"sleeping","payload":null,"more":1}',
        "another member before": '{"more":{"state":"ready"},"state":"sleeping"}',
        "a member without a name": '{"":1,"state":"sleeping"}',
        "a member in capitals": '{"STATE":"ready","state":"sleeping"}',
        "no payload": '{"state":"sleeping"}',
        "many members": '{"state":"sleeping",' + ",".join(f'"m{n}":{n}' for n in range(40)) + "}",
    }.items():
        yield between(rule, name, sleeping(text))


def depth() -> Iterator[Case]:
    rule = "json.depth"
    # The document is one level, its payload another, and what is in the middle a third.
    for name, opening, closing in (("arrays", "[", "]"), ("objects", '{"a":', "}")):
        for count in (1, 2, 15, 28, 29):
            value: object = 1
            for _ in range(count):
                value = [value] if opening == "[" else {"a": value}
            line = ready(info(opening * count + "1" + closing * count), {"id": value})
            yield between(rule, f"{name}, {count}", line)
        for count in (30, 31, 32, 64, 500, 1000, 5000, 100_000):
            runs = ((opening.encode(), count), b"1", (closing.encode(), count))
            line = malformed('{"state":"ready","payload":{"id":', *runs, "}}")
            yield between(rule, f"{name}, {count}", line)
    empty: list[object] = []
    for _ in range(29):
        empty = [empty]
    text = "[" * 30 + "]" * 30
    yield between(rule, "30 arrays with nothing in them", ready(info(text), {"id": empty}))
    yield between(rule, "31 arrays with nothing in them", malformed(info(f"[{text}]")))
    yield between(rule, "arrays that never end", malformed(
        '{"state":"ready","payload":', (b"[", 100_000)
    ))  # fmt: skip
    yield between(rule, "where nobody needs it", malformed(
        '{"state":"sleeping","payload":', (b"[", 32), (b"]", 32), "}"
    ))  # fmt: skip
    yield between(rule, "beside the payload", malformed(
        '{"state":"sleeping","payload":null,"more":', (b"[", 32), (b"]", 32), "}"
    ))  # fmt: skip
    yield between(rule, "in an unknown state", malformed(
        '{"state":"dreaming","payload":', (b"[", 32), (b"]", 32), "}"
    ))  # fmt: skip
    yield between(rule, "nothing but brackets", malformed((b"[", 40), (b"]", 40)))
    yield between(rule, "brackets in a string", ready(info('"' + "[" * 90 + '"'), {"id": "[" * 90}))
    wide = "[" + "[]," * 300 + "[]]"
    yield between(rule, "wide, not deep", ready(info(wide), {"id": [[]] * 301}))


def duplicates() -> Iterator[Case]:
    rule = "json.duplicates"
    yield between(rule, "two states", sleeping('{"state":"ready","state":"sleeping"}'))
    yield between(rule, "three states", sleeping(
        '{"state":"ready","state":"loading","state":"sleeping"}'
    ))  # fmt: skip
    yield between(rule, "the last state is none", malformed('{"state":"ready","state":7}'))
    yield between(rule, "the last state is null", malformed('{"state":"ready","state":null}'))
    yield between(rule, "the first state is none", sleeping('{"state":7,"state":"sleeping"}'))
    yield between(rule, "the last state is unknown", unknown(
        '{"state":"ready","state":"dreaming"}', "dreaming"
    ))  # fmt: skip
    yield between(rule, "one of the names is escaped", sleeping(
        r'{"state":"ready","st\u0061te":"sleeping"}'
    ))  # fmt: skip
    yield between(rule, "two payloads", ready(
        '{"state":"ready","payload":{"id":"a"},"payload":{"id":"b"}}', {"id": "b"}
    ))  # fmt: skip
    yield between(rule, "two payloads are not joined", ready(
        '{"state":"ready","payload":{"a":1},"payload":{"b":2}}', {"b": 2}
    ))  # fmt: skip
    yield between(rule, "the last payload is null", ready(
        '{"state":"ready","payload":{"id":"a"},"payload":null}', None
    ))  # fmt: skip
    yield between(rule, "two values in a payload", ready(
        '{"state":"ready","payload":{"id":"a","id":"b"}}', {"id": "b"}
    ))  # fmt: skip
    yield between(rule, "two values in loading", loading(
        '{"state":"loading","payload":{"value":0.5,"value":0.75}}', value=0.75
    ))  # fmt: skip
    yield between(rule, "the first value has the wrong type", loading(
        '{"state":"loading","payload":{"value":"half","value":0.5}}', value=0.5
    ))  # fmt: skip


def constants() -> Iterator[Case]:
    rule = "json.constants"
    for word in ("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf", "-NaN", "1.#INF", "INF"):
        yield between(rule, f"{word} in loading", malformed(
            f'{{"state":"loading","payload":{{"value":{word}}}}}'
        ))  # fmt: skip
        yield between(rule, f"{word} in ready", malformed(info(word)))
    yield between(rule, "NaN for a payload", malformed('{"state":"ready","payload":NaN}'))
    yield between(rule, "NaN in an array", malformed(info("[1,NaN]")))
    yield between(rule, "NaN beside the payload", malformed('{"state":"sleeping","more":NaN}'))
    yield between(rule, "NaN in a string", ready(info('"NaN"'), {"id": "NaN"}))
    yield between(rule, "NaN for a name", ready(
        '{"state":"ready","payload":{"NaN":1}}', {"NaN": 1}
    ))  # fmt: skip


def value(text: str) -> bytes:
    return b'{"state":"loading","payload":{"value":' + text.encode() + b"}}"


def whole(text: str) -> bytes:
    return b'{"state":"downloading","payload":{"downloaded":' + text.encode() + b"}}"


def ranges() -> Iterator[Case]:
    rule = "json.range"
    digits = (b"9", 5000)
    numbers: dict[str, tuple[Text | Run, ...]] = {
        "1e309": ("1e309",),
        "-1e309": ("-1e309",),
        "1e999": ("1e999",),
        "1.8e308": ("1.8e308",),
        "a long exponent": ("1e99999999999999999999",),
        "310 digits": ("1", (b"0", 309)),
        "5000 digits": (digits,),
        "5000 digits, negative": ("-", digits),
        "5000 digits before the point": (digits, ".5"),
        "400 digits and a large exponent": ((b"9", 400), "e1"),
    }
    for name, parts in numbers.items():
        value_of = '{"state":"loading","payload":{"value":'
        yield between(rule, f"{name}, in loading", malformed(value_of, *parts, "}}"))
        id_of = '{"state":"ready","payload":{"id":'
        yield between(rule, f"{name}, in ready", malformed(id_of, *parts, "}}"))
        yield between(rule, f"{name}, in an array", malformed(id_of, "[0,[", *parts, "]]}}"))
    yield from in_range()


def in_range() -> Iterator[Case]:
    rule = "json.range"
    yield between(rule, "beside the payload", malformed('{"state":"sleeping","more":1e999}'))
    yield between(rule, "for the state", malformed('{"state":1e999}'))
    many: Written = malformed(b'{"state":"ready","payload":', (b"9", 500_000), b"}")
    yield between(rule, "half a million digits", many)
    for text, number in {
        "1e308": 1e308,
        "1.7976931348623157e308": 1.7976931348623157e308,
        "1e-400": 0.0,
        "5e-324": 5e-324,
        "0.1": 0.1,
        "7.5": 7.5,
        "-1": -1.0,
        "9007199254740993": 9007199254740993.0,
    }.items():
        yield between(rule, f"{text} in loading", loading(value(text), value=number))
    for text, number in {
        "18446744073709551616": 1.8446744073709552e19,
        "1e300": 1e300,
        "0." + "3" * 400: 1 / 3,
        "1" + "0" * 308: 1e308,
    }.items():
        yield between(rule, f"{text[:22]} in ready", ready(info(text), {"id": number}))
    for count in (0, 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, -1, -(2**63)):
        line = downloading(whole(str(count)), downloaded=count)
        yield between(rule, f"{count}, whole", line)
    for name, text in {
        "2**63": str(2**63),
        "-2**63-1": str(-(2**63) - 1),
        "2**64": str(2**64),
        "a fraction": "0.5",
        "a float": "5.0",
        "an exponent": "1e3",
    }.items():
        yield between(rule, f"{name}, whole", malformed(whole(text)))
