"""Look for bytes on which the pure readers do what they must not, led by the code that they reach.

It needs atheris, which is no dependency of ours, so it has an environment of its own::

    python3.11 -m venv /tmp/fuzz && /tmp/fuzz/bin/pip install atheris -e .
    /tmp/fuzz/bin/python tests/fuzz/fuzz_wire.py TARGET [DIRECTORY...] -max_total_time=200

TARGET is one of `records`, `answers`, `logs` and `secrets`; what follows goes to libFuzzer, which
writes a file for the input that fails and keeps what it has learned in the first directory.

What is right is said by code that shares nothing with the library (`reference`), or by what has to
hold whatever comes: the same whatever the cuts, none but the exceptions that are documented, no
secret, no control character, never more memory than the bound.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import atheris  # type: ignore[import-untyped]

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import reference  # noqa: E402

INSTRUMENTED = ["llamatrio.wire", "llamatrio.testing.corpus", "json"]
with atheris.instrument_imports(INSTRUMENTED):  # pyright: ignore[reportAttributeAccessIssue]
    from llamatrio.errors import LlamatrioError
    from llamatrio.outcomes import Finished
    from llamatrio.requests import Delta
    from llamatrio.testing.corpus import Case, judge, load, read
    from llamatrio.wire.lines import LineSplitter
    from llamatrio.wire.loglines import LogLines, Part
    from llamatrio.wire.redaction import Redactor, Secrets, redact
    from llamatrio.wire.sse import AnswerReader

LIMIT: Final = 300


def cut(data: bytes) -> tuple[list[bytes], bytes]:
    """Take some cuts from the beginning of the input; give the stream in pieces, and whole."""
    count = data[0] % 8 if data else 0
    places, stream = data[1 : 1 + count], data[1 + count :]
    edges = [0, *sorted(place * (len(stream) + 1) // 256 for place in places), len(stream)]
    return [stream[a:b] for a, b in pairwise(edges)], stream


def crumbs(stream: bytes) -> list[bytes]:
    """Cut it byte by byte, or somewhat less finely if that would take long."""
    size = 1 if len(stream) <= 100 else 17
    return [stream[at : at + size] for at in range(0, len(stream), size)]


# -- the targets -------------------------------------------------------------------------------


def records(data: bytes) -> None:
    pieces, stream = cut(data)
    case = Case("fuzz/input", "fuzz", (), tuple(reference.expect(stream, LIMIT)))
    for some in (pieces, crumbs(stream)):
        assert (failure := judge(case, [*read(some, LIMIT)])) is None, failure
    splitter = LineSplitter(LIMIT, 20)
    for piece in pieces:
        for _ in splitter.feed(piece):
            pass
        assert splitter.held <= LIMIT


def answer(pieces: list[bytes]) -> list[object]:
    reader, events = AnswerReader(), list[object]()
    try:
        for piece in pieces:
            events += reader.feed(piece)
    except LlamatrioError as exc:
        events.append((type(exc), str(exc)))
    return events


def answers(data: bytes) -> None:
    pieces, stream = cut(data)
    events = answer([stream])
    assert answer(pieces) == events
    assert answer(crumbs(stream)) == events
    ends = [at for at, event in enumerate(events) if isinstance(event, Finished | tuple)]
    assert ends in ([], [len(events) - 1])
    for event in events:
        if isinstance(event, Delta):
            assert isinstance(event.text, str)
            assert isinstance(event.reasoning, str)
            assert event.data in stream.replace(b"\r\n", b"\n") or b"\n" in event.data


SECRETS: Final = ("hunter2-hunter2", "pass word/\u00e9\u00e9", "aaaa", "line one\nline two two")
READY_SECRETS: Final = Secrets(SECRETS)  # which takes long to make
SGR: Final = re.compile(r"\x1b\[[0-9;:]*m")
CONTROL: Final = re.compile("[\0-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def ends_plain(shown: str) -> bool:
    """Whether a terminal that begins plain is plain again."""
    found = SGR.findall(shown)
    return not found or found[-1] in ("\x1b[0m", "\x1b[m")


def no_secret(text: str) -> None:
    for secret in (*SECRETS[:3], "line two two"):
        assert secret not in text


def log_lines(pieces: list[bytes], *, colors: bool, ask: bool) -> Iterator[str]:
    """Give the text of every line, put together from its parts."""
    lines = LogLines(LIMIT, READY_SECRETS, colors=colors)
    text = shown = ""
    for piece in [*pieces, None]:
        parts: list[Part | None] = [lines.close()] if piece is None else [*lines.feed(piece)]
        if ask and piece is not None:
            parts.append(lines.fragment())
        assert lines.held <= LIMIT
        for part in parts:
            if part is None:
                continue
            assert ends_plain(part.shown)
            assert colors or not SGR.search(part.shown)
            assert not CONTROL.search(SGR.sub("", part.shown))
            assert not CONTROL.search(part.text)
            text = text + part.text if part.continues else part.text
            shown = shown + part.shown if part.continues else part.shown
            no_secret(text)
            no_secret(SGR.sub("", shown))
            if part.ended:
                yield text
                text = shown = ""


def logs(data: bytes) -> None:
    pieces, stream = cut(data)
    for colors in (False, True):
        whole = [*log_lines([stream], colors=colors, ask=False)]
        assert [*log_lines(pieces, colors=colors, ask=False)] == whole
        single = crumbs(stream)
        assert [*log_lines(single, colors=colors, ask=False)] == whole
        for some in (pieces, single):
            assert len([*log_lines(some, colors=colors, ask=True)]) == len(whole)


def secrets(data: bytes) -> None:
    pieces, stream = cut(data)
    text = stream.decode("latin-1")
    for over in (False, True):
        right = redact(text, READY_SECRETS, cut=over)
        no_secret(right)
        for some in (pieces, [stream], crumbs(stream)):
            redactor = Redactor(READY_SECRETS)
            given = "".join(redactor.feed(piece.decode("latin-1")) for piece in some)
            assert given + redactor.close(cut=over) == right


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "records": records,
    "answers": answers,
    "logs": logs,
    "secrets": secrets,
}

# -- what libFuzzer starts from ----------------------------------------------------------------

WORDS: Final = {
    "records": [
        "cmd_child_to_router:state:", '{"state":"', '"payload":{', "loading", "ready", "sleeping",
        "downloading", '"stages":[', '"current":', '"stage":', '"value":', '"downloaded":',
        "null", "1e999", "NaN", r"\\ud800", r"\\u0000", "[[[[[[[[", "]]]]]]]]", r"\x0d\x0a",
    ],
    "answers": [
        "data: ", "[DONE]", r"\x0a\x0a", '{"content":"', '"stop":true', '"choices":[{"delta":',
        '"error":{"code":', '"usage":{', '"prompt_progress":{', '"finish_reason":"', "tool_calls",
        '"type":"response.completed"', '"type":"message_stop"', '"timings":{', "null", "1e999",
        '"delta":{"type":"text_delta","text":"', '"item":{"type":"function_call"',
    ],
    "logs": [
        "hunter2-hunter2",
        "aaaa", "line two two", r"\x1b[", r"\x1b[31m", r"\x1b[0m", "38;5;", "38;2;", "4:3",
        r"\x1b]0;", r"\x07", r"\xc3\xa9", r"\x0d", r"\x0d\x0a", r"\xe2\x80\xa8", "cmd_child_to_",
    ],
    "secrets": ["hunter2", "-hunter2", "aaaa", "line one", "line two two", r"\x0a", "pass+word"],
}  # fmt: skip

SEEDS: Final = {
    "answers": [
        b'data: {"content":"a","stop":false}\n\n'
        b'data: {"content":"","stop":true,"stop_type":"limit","tokens_predicted":1}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n',
        b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\r\n\r\ndata: [DONE]\r\n\r\n',
        b"event: response.output_text.delta\n"
        b'data: {"type":"response.output_text.delta","delta":"a"}\n\n'
        b"event: response.completed\n"
        b'data: {"type":"response.completed","response":{"usage":{"input_tokens":1}}}\n\n',
        b'data: {"type":"message_start","message":{"usage":{"input_tokens":1}}}\n\n'
        b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}\n\n'
        b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n'
        b'data: {"type":"message_stop"}\n\n',
        b'data: {"prompt_progress":{"total":9,"cache":1,"processed":2,"time_ms":3}}\n\n'
        b'data: {"error":{"code":400,"message":"m","type":"exceed_context_size_error"}}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}],"reasoning_content":"b"}}]}\n\n',
    ],
    "logs": [
        b"0.00 I srv: plain\n\x1b[31mred\nstill red\x1b[0m\n",
        b"\r 10%\r 20%\r100%\r\nhunter2-hunter2 aaaaaa\n\x1b]0;title\x07\xc3\xa9\xff\n",
        b"\x1b[1;38;5;9;48;2;1;2;3;4:3mline one\nline two two\x1b[39;22m ",
        b"pass word/\xc3\xa9\xc3\xa9",
        b"x" * 301 + b"aaaa\ncmd_child_to_router:state:{}\nhunter2-hun",
    ],
    "secrets": [b"hunter2-hunter2hunter2-hunter2", b"aaaaaaaa", b"pass+word%2F", b"line two tw"],
}


def prepare(target: str, directory: Path) -> list[str]:
    """Write a dictionary and something to begin with: for records, the short cases."""
    directory.mkdir(parents=True, exist_ok=True)
    dictionary = directory.with_suffix(".dict")
    words = (word.replace('"', '\\"') if "\\" not in word else word for word in WORDS[target])
    dictionary.write_text("".join(f'"{word}"\n' for word in words))
    seeds = SEEDS.get(target) or [case.data for case in load().cases if len(case.data) < 2000]
    for number, seed in enumerate(seeds):
        (directory / f"seed{number}").write_bytes(b"\x03\x40\x80\xc0" + seed)
    return [f"-dict={dictionary}", str(directory)]


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        raise SystemExit(__doc__)
    target, *rest = sys.argv[1:]
    places = [word for word in rest if not word.startswith("-")]
    options = [word for word in rest if word.startswith("-")]
    learned = Path(places[0]) if places else Path(f"/tmp/fuzz-{target}")
    atheris.Setup([sys.argv[0], *prepare(target, learned), *options], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
