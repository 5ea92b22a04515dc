from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given, settings, strategies as st

from llamatrio.wire.lines import Line, LineSplitter, Oversize
from llamatrio.wire.records import PREFIX, parse

repeatable = settings(derandomize=True, database=None, deadline=None)

LIMIT = 12
STREAMS = [
    b"",
    b"\n",
    b"\n\n\r\n",
    b"one\ntwo\r\nthree",
    b"a\rb\r\r\n\r",
    b"nul \0 and \xff\xfe bytes\n\0\n",
    b"x" * LIMIT + b"\n" + b"y" * (LIMIT + 1) + b"\n" + b"z" * LIMIT,
    b"x" * (LIMIT - 1) + b"\r\n" + b"y" * LIMIT + b"\r\nshort\n",
    b"long " * 10 + b"\nshort\n" + b"unfinished " * 10,
]


def feed(chunks: Iterable[bytes], keep: int = 0) -> list[Line | Oversize | None]:
    splitter = LineSplitter(LIMIT, keep)
    lines: list[Line | Oversize | None] = []
    for chunk in chunks:
        lines += splitter.feed(chunk)
        assert splitter.held <= LIMIT
    return [*lines, splitter.close()]


def split_at_once(stream: bytes, keep: int = 0) -> list[Line | Oversize | None]:
    """The rules, on a whole stream."""

    def judge(line: bytes) -> Line | Oversize:
        if len(line) > LIMIT:
            return Oversize(line[:keep], len(line))
        return Line(line.removesuffix(b"\r"))

    *lines, rest = map(judge, stream.split(b"\n"))
    return [*lines, None if stream.endswith(b"\n") or not stream else rest]


def test_any_stream_cut_at_any_position_gives_the_same_lines() -> None:
    for stream in STREAMS:
        for keep in (0, 5, LIMIT):
            expected = split_at_once(stream, keep)
            assert feed([stream], keep) == expected
            for cut in range(len(stream) + 1):
                assert feed([stream[:cut], stream[cut:]], keep) == expected


def test_any_stream_fed_byte_by_byte_gives_the_same_lines() -> None:
    for stream in STREAMS:
        assert feed(bytes([byte]) for byte in stream) == split_at_once(stream)


@repeatable
@given(
    st.lists(st.sampled_from([b"\n", b"\r", b"\0", b"a", b"longer", b"\xff"]), max_size=40),
    st.lists(st.integers(0, 240), max_size=8),
    st.integers(0, LIMIT),
)
def test_any_chunking_gives_the_same_lines(parts: list[bytes], cuts: list[int], keep: int) -> None:
    stream = b"".join(parts)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert feed((stream[a:b] for a, b in pairwise(edges)), keep) == split_at_once(stream, keep)


def test_a_line_loses_one_carriage_return_before_its_newline_and_no_other() -> None:
    assert feed([b"a\r\r\n\rb\n"]) == [Line(b"a\r"), Line(b"\rb"), None]


def test_a_nul_is_a_byte_like_any_other() -> None:
    assert feed([b"a\0b\n\0\n"]) == [Line(b"a\0b"), Line(b"\0"), None]


def test_an_unfinished_line_comes_from_close_alone() -> None:
    assert feed([b"one\ntwo"]) == [Line(b"one"), Line(b"two")]


def test_a_closed_stream_that_ended_with_a_newline_has_no_rest() -> None:
    splitter = LineSplitter(LIMIT)
    assert list(splitter.feed(b"one\n")) == [Line(b"one")]
    assert splitter.close() is None


def test_an_unfinished_line_over_the_limit_is_still_oversize() -> None:
    assert feed([b"x" * 50], keep=3) == [Oversize(b"xxx", 50)]


# https://github.com/jupyter-ai-contrib/jupyter-ai-acp-client/issues/32
def test_the_tail_of_an_oversize_line_is_no_line_even_if_it_is_a_perfect_record() -> None:
    record = PREFIX + b'{"state":"sleeping","payload":null}'
    assert parse(record) is not None
    limit, chunk = 2**20, 2**13
    stream = b"x" * 2_000_000 + record + b"\n" + record + b"\n"
    splitter = LineSplitter(limit)
    lines: list[Line | Oversize] = []
    for start in range(0, len(stream), chunk):
        lines += splitter.feed(stream[start : start + chunk])
    assert lines == [Oversize(b"", 2_000_000 + len(record)), Line(record)]


def test_the_tail_of_an_oversize_line_is_no_line_wherever_the_limit_falls() -> None:
    record = b"record"
    for filler in range(LIMIT - len(record) + 1, 3 * LIMIT):
        stream = b"x" * filler + record + b"\n"
        for cut in range(len(stream)):
            assert feed([stream[:cut], stream[cut:]]) == [Oversize(b"", len(stream) - 1), None]


def test_an_endless_line_costs_no_more_memory_than_the_limit() -> None:
    splitter = LineSplitter(1000, keep=10)
    most = 0
    for _ in range(10_000):
        assert list(splitter.feed(b"x" * 999)) == []
        most = max(most, splitter.held)
    assert most == 999
    assert splitter.held == 10
    assert list(splitter.feed(b"\nafter\n")) == [Oversize(b"x" * 10, 9_990_000), Line(b"after")]
    assert splitter.held == 0
