"""What is kept of a child's pipes: the bytes that were wrong, and the state channel as it was read.

The first part is pure; the second looks at real and at scripted children.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Iterable
from itertools import pairwise

import pytest
import trio
from hypothesis import given, settings, strategies as st
from moments import reach

from llamatrio import ModelConfig, Own, Phase, Policy, open_provider
from llamatrio.child.evidence import (
    MAX_DATA,
    MAX_PIECES,
    MAX_STATE,
    Evidence,
    EvidenceRing,
    Mask,
    Recording,
    State,
    escape,
    judge,
    unescape,
)
from llamatrio.child.launch import Kind
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot
from llamatrio.wire.lines import Line, LineSplitter, Oversize
from llamatrio.wire.records import PREFIX

repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=30)

KEY = "5ec7e7" * 8
LIMIT = 200
READY = PREFIX + b'{"state":"ready","payload":null}\n'
SYMBOLS = [
    READY,
    PREFIX,
    PREFIX + b'{"state":"loading","payload":{"value":0.5}}\r\n',
    PREFIX + b'{"state":"dreaming"}\n',
    PREFIX + b'{"state":"ready","payload":{"id":"' + KEY.encode() + b'"}}\n',
    KEY.encode(),
    KEY[:7].encode(),
    b"\n",
    b"\r",
    b"\0\xff\x1b[2J",
    b"x" * (LIMIT + 1),
]
streams = st.lists(st.sampled_from(SYMBOLS), max_size=30).map(b"".join)


# -- bytes as text -----------------------------------------------------------------------------


@repeatable
@given(st.binary())
def test_escaped_bytes_are_printable_and_come_back(data: bytes) -> None:
    text = escape(data)
    assert text.isascii()
    assert text.isprintable()
    assert unescape(text) == data


def test_what_no_bytes_are_escaped_to_is_refused() -> None:
    for text in ("\n", "é", "\\", "\\x4", "\\xAB", "\\q", "\\\\\\"):
        with pytest.raises(ValueError, match="not an escaped text"):
            unescape(text)


@repeatable
@given(streams, st.integers(0, 400))
def test_a_mask_moves_no_byte_and_leaves_no_secret(data: bytes, limit: int) -> None:
    mask = Mask([KEY])
    hidden = mask.whole(data)
    assert len(hidden) == len(data)
    assert KEY.encode() not in hidden
    # What was cut off within the secret does not give it away either.
    begun = mask.broken_off(data[:limit])
    assert not any(begun.endswith(KEY[:length].encode()) for length in range(5, len(KEY) + 1))
    assert Mask().whole(data) == data


# -- evidence ----------------------------------------------------------------------------------


def record(
    chunks: Iterable[bytes], secrets: Iterable[str] = (), *, end: bool = True
) -> tuple[Recording, EvidenceRing]:
    """Do what the task does that reads stdout."""
    ring = EvidenceRing()
    recording = Recording(ring, secrets, LIMIT)
    recording.pid = 7
    lines = LineSplitter(LIMIT, keep=min(MAX_DATA, LIMIT))
    for chunk in chunks:
        recording.on_state_bytes(chunk)
        for line in lines.feed(chunk):
            recording.on_state_line(line, judge(line))
    if end:
        recording.on_state_end(lines.close())
    return recording, ring


def pieces_of(stream: bytes, secrets: Iterable[str] = ()) -> tuple[Evidence, ...]:
    return record([stream], secrets)[1].pieces


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (b"print\n", "unexpected line"),
        (b"\n", "unexpected line"),
        (b" " + READY, "unexpected line"),
        (PREFIX + b"{\n", "malformed record"),
        (PREFIX + b'{"state":"dreaming"}\n', "unknown state"),
        (b"x" * (LIMIT + 1) + b"\n", "oversize line"),
        (READY[:-1], "unfinished line"),
        (b"\xff", "unfinished line"),
    ],
)
def test_each_kind_of_wrong_line_is_kept_with_its_reason_and_its_place(
    wrong: bytes, reason: str
) -> None:
    [piece] = pieces_of(READY + wrong)
    assert (piece.stream, piece.offset, piece.reason, piece.pid) == (
        "stdout", len(READY), reason, 7,
    )  # fmt: skip
    assert piece.size == len(wrong.rstrip(b"\n"))
    kept = wrong.rstrip(b"\n")[:LIMIT]
    assert unescape(piece.data) == kept
    assert piece.sha256 == hashlib.sha256(kept).hexdigest()


def test_what_is_right_is_no_evidence() -> None:
    assert pieces_of(READY + PREFIX + b'{"state":"loading"}\r\n' + READY) == ()


def test_a_record_on_stderr_is_evidence_and_the_same_within_a_line_is_not() -> None:
    ring = EvidenceRing()
    recording = Recording(ring)
    log = b"E " + READY + b"quiet\n" + READY
    for line in LineSplitter(LIMIT).feed(log):
        recording.on_log_line(line)
    [piece] = ring.pieces
    assert (piece.stream, piece.reason) == ("stderr", "record on stderr")
    assert piece.offset == log.rindex(PREFIX)


@repeatable
@given(st.binary(max_size=300), st.sampled_from([b"", b"\xff" * MAX_DATA, b"\\" * 5000]))
def test_a_piece_is_bounded_and_its_hash_is_that_of_what_it_holds(a: bytes, b: bytes) -> None:
    ring = EvidenceRing()
    recording = Recording(ring, limit=2**20)
    for line in LineSplitter(2**20).feed((a + b).replace(b"\n", b"n") + b"\n"):
        recording.on_state_line(line, None)
    [piece] = ring.pieces
    assert len(piece.data) <= MAX_DATA
    assert hashlib.sha256(unescape(piece.data)).hexdigest() == piece.sha256
    assert (a + b).replace(b"\n", b"n").startswith(unescape(piece.data))
    if len(escape(a + b)) <= MAX_DATA:
        assert len(unescape(piece.data)) == len((a + b).removesuffix(b"\r"))


def test_the_ring_drops_the_oldest_and_counts_it() -> None:
    _, ring = record([b"".join(b"line %d\n" % number for number in range(MAX_PIECES + 3))])
    assert len(ring) == MAX_PIECES
    assert ring.dropped == 3
    assert ring.pieces[0].data == "line 3"
    assert ring.pieces[-1].data == f"line {MAX_PIECES + 2}"


@repeatable
@given(streams)
def test_no_piece_holds_a_secret_nor_the_beginning_of_one(stream: bytes) -> None:
    for piece in pieces_of(stream, [KEY]):
        assert KEY not in piece.data
        assert not any(piece.data.endswith(KEY[:n]) for n in range(5, len(KEY)))


# -- the state channel -------------------------------------------------------------------------


@repeatable
@given(streams, st.lists(st.integers(0, 3000), max_size=6))
def test_every_line_knows_where_it_begins_however_the_stream_is_cut(
    stream: bytes, cuts: list[int]
) -> None:
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    splitter = LineSplitter(LIMIT, keep=LIMIT)
    found: list[Line | Oversize] = []
    for start, end in pairwise(edges):
        found += splitter.feed(stream[start:end])
    if (rest := splitter.close()) is not None:
        found.append(rest)
    offset = 0
    for line in found:
        data = line.head if isinstance(line, Oversize) else line.data
        assert line.offset == offset
        assert stream[offset:].startswith(data)
        newline = stream.find(b"\n", offset)
        offset = newline + 1 if newline >= 0 else len(stream)
    assert offset == len(stream)


def lines_of(state: State) -> list[str]:
    return [one.what for one in state.seen]


@settings(repeatable, max_examples=60)
@given(streams, st.lists(st.integers(0, 3000), max_size=6), st.booleans())
def test_what_was_kept_is_read_again_as_the_same_lines(
    stream: bytes, cuts: list[int], end: bool
) -> None:
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[a:b] for a, b in pairwise(edges)]
    recording, _ = record(chunks, [KEY], end=end)
    state = recording.state()
    again = state.read_again()
    assert again[: len(state.seen)] == state.seen
    if end:
        assert len(again) == len(state.seen)
    assert state.ended is end
    assert state.offset == 0
    assert len(state.data) == state.size == len(stream)
    assert KEY.encode() not in state.data


@settings(repeatable, max_examples=6)
@given(
    st.lists(st.sampled_from([*SYMBOLS, b"\n" * 2000, b"y" * 4000]), min_size=1, max_size=6),
    st.integers(1, 40),
)
def test_what_was_kept_of_a_long_channel_begins_with_a_line_and_is_read_again_as_the_same_lines(
    parts: list[bytes], times: int
) -> None:
    stream = b"".join(parts) * times
    recording, _ = record(stream[at : at + 5000] for at in range(0, len(stream), 5000))
    state = recording.state()
    assert len(state.data) <= MAX_STATE
    assert stream.endswith(state.data)
    assert state.offset + len(state.data) == state.size == len(stream)
    assert state.offset == 0 or stream[state.offset - 1 : state.offset] == b"\n"
    assert state.read_again() == state.seen


def test_the_tail_of_a_line_that_was_cut_is_no_line() -> None:
    recording, _ = record([b"x" * (3 * MAX_STATE) + READY + READY])
    assert lines_of(recording.state()) == ["ready"]
    recording, _ = record([b"x" * (3 * MAX_STATE) + READY])
    assert recording.state().data == b""
    assert recording.state().seen == ()


@repeatable
@given(streams, st.integers(0, 5000))
def test_less_of_a_state_channel_is_its_end(stream: bytes, limit: int) -> None:
    whole = record([stream])[0].state()
    part = whole.within(limit)
    assert len(part.data) <= limit or part == whole
    assert whole.data.endswith(part.data)
    assert part.read_again() == part.seen == whole.seen[len(whole.seen) - len(part.seen) :]


def test_each_kind_of_line_has_its_word() -> None:
    stream = b"".join([*SYMBOLS[:1], *SYMBOLS[2:4], b"text\n", PREFIX + b"\n", b"x" * 300, b"\nz"])
    assert lines_of(record([stream])[0].state()) == [
        "ready", "loading 0.5", "unknown", "unexpected", "malformed", "oversize", "unfinished",
    ]  # fmt: skip


# -- children ----------------------------------------------------------------------------------


async def test_a_child_of_a_kind_leaves_no_evidence(kind: Kind, parrot: Parrot) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            await provider.start()
            assert provider.evidence == ()
            state = provider._actor.backend.state_channel
            assert state is not None
            assert lines_of(state)[0] == "loading 0"
            assert lines_of(state)[-1] == "ready"


async def test_what_a_child_writes_in_the_wrong_place_is_evidence_of_its_process(
    parrot: Parrot,
) -> None:
    steps = ["S loading", "O hello\\n", "S dreaming", "H ok", "S ready", "O key ", "O $KEY"]
    head = shlex.join(fakechild.command(*steps, "O \\nunfinished"))
    # A shell, which knows the key: it replaces itself by the child.
    line = "exec " + head.replace("'O $KEY'", 'O "$LLAMA_API_KEY"') + ' "$@"'
    child = Own(("sh", "-c", line, "sh"))
    with trio.fail_after(30):
        async with open_provider(
            ModelConfig(parrot.path), backend=child, policy=Policy(fruitless=1)
        ) as provider:
            await provider.start()
            pid = provider.diagnostics().pid or provider.evidence[0].pid
            await reach(provider, Phase.UNLOADED)
            found = [(piece.reason, piece.data) for piece in provider.evidence]
            masked = "#" * 64
            assert found == [
                ("unexpected line", "hello"),
                ("unknown state", escape(PREFIX) + '{"state":"dreaming","payload":null}'),
                ("unexpected line", f"key {masked}"),
                ("unfinished line", "unfinished"),
            ]
            assert {piece.pid for piece in provider.evidence} == {pid}


async def test_evidence_of_children_that_are_gone_stays(parrot: Parrot) -> None:
    code = "import os, sys; os.write(1, b'nonsense'); sys.exit(3)"
    with trio.fail_after(30):
        child = Own((sys.executable, "-c", code))
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            for _ in range(2):
                with pytest.raises(Exception, match="exited with code 3"):
                    await provider.start()
            assert [piece.data for piece in provider.evidence] == ["nonsense"] * 2
            assert len({piece.pid for piece in provider.evidence}) == 2
