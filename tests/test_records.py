from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Iterable
from itertools import pairwise
from typing import TypeAlias

import pytest
import trio
from hypothesis import given, settings, strategies as st
from trio.testing import MemorySendStream, memory_stream_one_way_pair, wait_all_tasks_blocked

from llamatrio.child.logs import LogChannel
from llamatrio.child.pumps import ByteStream, Tally, pump_logs, pump_state
from llamatrio.wire.records import (
    EXIT_LINE,
    MAX_DEPTH,
    PREFIX,
    Downloading,
    Loading,
    Malformed,
    Ready,
    Record,
    Sleeping,
    Unknown,
    parse,
)

repeatable = settings(derandomize=True, database=None, deadline=None)


def line(state: str, payload: object) -> bytes:
    document = {"state": state, "payload": payload}
    return PREFIX + json.dumps(document, separators=(",", ":")).encode()


# -- one line ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "record"),
    [
        (
            b'{"state":"loading","payload":'
            b'{"stages":["text_model","mmproj"],"current":"text_model","value":0.25}}',
            Loading("text_model", ("text_model", "mmproj"), 0.25),
        ),
        (b'{"state":"loading","payload":{"stage":"mmproj"}}', Loading("mmproj")),
        (b'{"state":"loading","payload":{"value":1}}', Loading(value=1.0)),
        (b'{"state":"loading","payload":{}}', Loading()),
        (b'{"state":"loading"}', Loading()),
        (b'{"state":"ready","payload":{"id":"m","meta":{"n_ctx":8}}}',
         Ready({"id": "m", "meta": {"n_ctx": 8}})),
        (b'{"state":"ready","payload":null}', Ready(None)),
        (b'{"state":"ready","payload":{}}', Ready(None)),
        (b'{"state":"ready","payload":[1,2]}', Ready(None)),
        (b'{"state":"ready","payload":"yes"}', Ready(None)),
        (b'{"state":"ready"}', Ready(None)),
        (b'{"state":"sleeping","payload":null}', Sleeping()),
        (b'{"state":"sleeping","payload":{"any":1}}', Sleeping()),
        (
            b'{"state":"downloading","payload":{"url":"https://x/m.gguf",'
            b'"downloaded":5,"total":10}}',
            Downloading("https://x/m.gguf", 5, 10),
        ),
        (
            b'{"state":"downloading","payload":{"result":"download_finished"}}',
            Downloading(result="download_finished"),
        ),
        (
            b'{"state":"downloading","payload":{"url":"u","result":"download_failed"}}',
            Downloading("u", result="download_failed"),
        ),
        (b'{"state":"dreaming","payload":{"of":"sheep"}}', Unknown("dreaming", {"of": "sheep"})),
        (b'{"state":""}', Unknown("")),
        (b'{"state":"READY","payload":null}', Unknown("READY")),
        (b' { "payload" : null , "state" : "sleeping" } ', Sleeping()),
        (b'{"state":"loading","state":"sleeping"}', Sleeping()),
        (b'{"state":"ready","payload":{"id":"\\u00e9\xc3\xa9"},"more":1}', Ready({"id": "éé"})),
    ],
)  # fmt: skip
def test_a_record_of_this_form_is_read(text: bytes, record: Record) -> None:
    assert parse(PREFIX + text) == record


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"state":"ready"}}',
        b'{"state":"ready"} trailing',
        b"ready",
        b"null",
        b"[]",
        b'["state"]',
        b'"state"',
        b"7",
        b"{}",
        b'{"payload":{}}',
        b'{"state":null}',
        b'{"state":7}',
        b'{"state":["ready"]}',
        b'{"State":"ready"}',
        b'{"state":"ready","payload":{"id":"\xff"}}',
        b'{"state":"ready\xc3"}',
        b'{"state":"loading","payload":{"value":NaN}}',
        b'{"state":"ready","payload":{"id":Infinity}}',
        b'{"state":"ready","payload":-Infinity}',
        b'{"state":"loading","payload":{"value":1e999}}',
        b'{"state":"loading","payload":{"value":"0.5"}}',
        b'{"state":"loading","payload":{"value":true}}',
        b'{"state":"loading","payload":{"stage":7}}',
        b'{"state":"loading","payload":{"current":["text_model"]}}',
        b'{"state":"loading","payload":{"stages":"text_model"}}',
        b'{"state":"loading","payload":{"stages":[1]}}',
        b'{"state":"downloading","payload":{"downloaded":"5"}}',
        b'{"state":"downloading","payload":{"downloaded":0.5}}',
        b'{"state":"downloading","payload":{"total":true}}',
        b'{"state":"downloading","payload":{"url":7}}',
        b'{"state":"ready","payload":' + b"9" * 5000 + b"}",
        b'{"state":"ready","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"state":"ready","payload":' + b"[" * 100_000,
        b'{"state":"ready"\x00}',
        b'{"state":"ready","payload":"a\nb"}',
        '{"state":"ready"}'.encode("utf-16"),
        b'\xef\xbb\xbf{"state":"ready"}',
    ],
    ids=lambda text: text[:60].decode(errors="replace"),
)
def test_a_line_with_the_prefix_but_not_the_form_is_malformed(text: bytes) -> None:
    record = parse(PREFIX + text)
    assert isinstance(record, Malformed)
    assert record.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[]", "not a JSON object"),
        (b"{}", "no state"),
        (b'{"state":"ready","payload":' + b"[" * 40 + b"]" * 40 + b"}", "nested too deeply"),
        (b'{"state":"ready","payload":' + b"[" * 100_000, "nested too deeply"),
        (b'{"state":"ready","more":"\\ud800"}', "a surrogate without its partner"),
        (b'{"state":"ready","more":NaN}', "NaN is not JSON"),
        (b'{"state":"ready","more":1e999}', "a number that is too large"),
    ],
    ids=lambda text: repr(text[:40]),
)
def test_a_malformed_line_says_what_is_wrong_with_it(text: bytes, reason: str) -> None:
    assert parse(PREFIX + text) == Malformed(reason)


def test_a_malformed_line_names_every_field_that_is_wrong() -> None:
    record = parse(PREFIX + b'{"state":"loading","payload":{"stage":7,"value":"x"}}')
    assert isinstance(record, Malformed)
    assert [text.rpartition(" @ ")[2] for text in record.reason.split("; ")] == [
        "$.stage",
        "$.value",
    ]
    assert all(text.startswith("invalid") for text in record.reason.split("; "))


@pytest.mark.parametrize("opening", [b'{"a":', b"["])
def test_json_is_read_down_to_the_greatest_depth_and_no_deeper(opening: bytes) -> None:
    closing = b"}" if opening.startswith(b"{") else b"]"

    def nested(depth: int) -> Record | Malformed | None:
        payload = opening * depth + b"1" + closing * depth
        return parse(PREFIX + b'{"state":"nest","payload":' + payload + b"}")

    # The document is one level, and the number in the middle another.
    assert isinstance(nested(MAX_DEPTH - 2), Unknown)
    assert isinstance(nested(MAX_DEPTH - 1), Malformed)


@pytest.mark.parametrize(
    "before",
    [
        b" ",
        b"\t",
        b"\0",
        b"\r",
        b"\xef\xbb\xbf",
        b"0.00.004.484 I srv: ",
        b"> ",
        # https://github.com/mostlygeek/llama-swap/issues/838
        b"\x1b[32m",
        b"\x1b[0m",
        b"\x1b]0;title\x07",
    ],
)
def test_a_prefix_after_anything_else_makes_no_record(before: bytes) -> None:
    assert parse(before + line("ready", None)) is None


def test_prefix_and_exit_line_are_those_of_llama_cpp() -> None:
    # b11434, tools/server/server-models.cpp: CMD_CHILD_TO_ROUTER_STATE, CMD_ROUTER_TO_CHILD_EXIT
    assert PREFIX == b"cmd_child_to_router:state:"
    assert EXIT_LINE == b"cmd_router_to_child:exit\n"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"ready",
        PREFIX[:-1],
        PREFIX.upper() + b'{"state":"ready"}',
        PREFIX.replace(b":", b": ") + b'{"state":"ready"}',
        b"cmd_child_to_router:other:{}",
        EXIT_LINE,
    ],
)
def test_a_line_without_the_prefix_is_no_record(text: bytes) -> None:
    assert parse(text) is None


@repeatable
@given(st.binary(max_size=60))
def test_no_bytes_after_the_prefix_raise(text: bytes) -> None:
    assert parse(PREFIX + text) is not None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
states = st.sampled_from(["loading", "ready", "sleeping", "downloading", "other"])
fields = st.sampled_from("stage stages current value url downloaded total result".split())


@settings(repeatable, max_examples=50)
@given(states, st.dictionaries(fields, json_values) | json_values)
def test_no_json_in_a_payload_raises(state: str, payload: object) -> None:
    record = parse(line(state, payload))
    assert record is not None
    if state == "sleeping" and not isinstance(record, Malformed):
        assert record == Sleeping()


# -- whole streams -----------------------------------------------------------------------------

LIMIT = 400  # of a line, so that an oversize one is soon written
RECORD = line("sleeping", None)

TRANSCRIPT = b"".join(
    [
        # https://github.com/ROCm/FastFlowLM/pull/402
        b"Using config /etc/child.toml\n",
        line("loading", {"stages": ["text_model"], "current": "text_model", "value": 0.0}) + b"\n",
        # https://github.com/withcatai/node-llama-cpp/pull/609
        b"init: a warning that belongs to the other stream\r\n",
        line("loading", {"stage": "text_model"}) + b"\r\n",
        # https://github.com/thomwebb/gac/issues/53
        b"\xa6\xff\x80\n\n\0\n",
        line("ready", {"id": "é" * 30, "meta": {"n_ctx": 4096}}) + b"\n",
        b"\x1b[32m" + RECORD + b"\n " + RECORD + b"\n",
        PREFIX + b'{"state":\n',
        # https://github.com/jupyter-ai-contrib/jupyter-ai-acp-client/issues/32
        b"x" * LIMIT + RECORD + b"\n",
        line("dreaming", [1, 2]) + b"\n",
        RECORD + b"\n",
        line("ready", None),  # its writer died before the newline
    ]
)

STDERR = [
    b"",
    RECORD + b"\n" + line("ready", {"id": "forged"}) + b"\n",
    b"\xa6\xff\x80\n\xc3",
    b"0.00.004.484 I srv    load_model: loading model\n" * 30,
    # https://github.com/ollama/ollama/pull/14919
    b"x" * 100_000,
    b"x" * 100_000 + RECORD + b"\n" + RECORD,
    b"\0\r\n\r\r\n\n\n",
]

Happening: TypeAlias = tuple[str, object]


def expect(stream: bytes) -> list[Happening]:
    """What the rules say of a whole stdout, with neither our splitter nor our parser."""

    def judge(text: bytes, *, whole: bool) -> Happening:
        body = text.removesuffix(b"\r")
        if len(text) > LIMIT:
            return "unexpected", text[:200]
        if whole and body.startswith(PREFIX):
            try:
                return "record", json.loads(body[len(PREFIX) :].decode())["state"]
            except ValueError:
                pass
        return "unexpected", body

    *lines, rest = stream.split(b"\n")
    happenings = [judge(text, whole=True) for text in lines]
    return [*happenings, judge(rest, whole=False)] if rest else happenings


class Recorder:
    """Runs both pumps, and keeps what they tell, in order."""

    def __init__(self) -> None:
        self.happenings: list[Happening] = []
        self.logs: list[str] = []
        self.tally = Tally()

    async def run(self, stdout: ByteStream, stderr: ByteStream) -> None:
        channel = LogChannel(10_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                pump_state, stdout, LIMIT, self.tally, self.take_record, self.take_unexpected
            )
            nursery.start_soon(pump_logs, stderr, 2**16, self.tally, channel, ())
        channel.close()
        self.logs = [line.text for line in await channel._queue.take(10_000)]

    def take_record(self, record: Record) -> None:
        name = record.state if isinstance(record, Unknown) else type(record).__name__.lower()
        self.happenings.append(("record", name))

    def take_unexpected(self, data: bytes) -> None:
        self.happenings.append(("unexpected", data))


async def pump_memory(stdout: Iterable[bytes], stderr: Iterable[bytes]) -> Recorder:
    """Send each chunk once the one before it has been taken."""
    recorder = Recorder()
    send_out, receive_out = memory_stream_one_way_pair()
    send_err, receive_err = memory_stream_one_way_pair()

    async def send(stream: MemorySendStream, chunks: Iterable[bytes]) -> None:
        for chunk in chunks:
            await stream.send_all(chunk)
            await wait_all_tasks_blocked()
        stream.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(recorder.run, receive_out, receive_err)
        nursery.start_soon(send, send_out, stdout)
        nursery.start_soon(send, send_err, stderr)
    return recorder


async def pump_pipes(stdout: Iterable[bytes], stderr: Iterable[bytes]) -> Recorder:
    """Write chunk after chunk into pipes of the operating system, which may join them."""
    recorder = Recorder()
    streams: list[trio.lowlevel.FdStream] = []

    def pipe() -> tuple[trio.lowlevel.FdStream, trio.lowlevel.FdStream]:
        pair = tuple(map(trio.lowlevel.FdStream, os.pipe()))
        streams.extend(pair)
        return pair[0], pair[1]

    async def write(stream: trio.lowlevel.FdStream, chunks: Iterable[bytes]) -> None:
        for chunk in chunks:
            await stream.send_all(chunk)
            await trio.lowlevel.checkpoint()
        stream.close()

    try:
        receive_out, send_out = pipe()
        receive_err, send_err = pipe()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(recorder.run, receive_out, receive_err)
            nursery.start_soon(write, send_out, stdout)
            nursery.start_soon(write, send_err, stderr)
    finally:
        for stream in streams:
            stream.close()
    return recorder


def test_the_transcript_has_every_kind_of_line() -> None:
    assert [what for what in expect(TRANSCRIPT) if what[0] == "record"] == [
        ("record", "loading"),
        ("record", "loading"),
        ("record", "ready"),
        ("record", "dreaming"),
        ("record", "sleeping"),
    ]
    assert len([what for what in expect(TRANSCRIPT) if what[0] == "unexpected"]) == 10


async def test_the_transcript_cut_at_every_position_gives_the_same_events() -> None:
    expected = expect(TRANSCRIPT)
    with trio.fail_after(60):
        for cut in range(len(TRANSCRIPT) + 1):
            stderr = STDERR[cut % 4]
            recorder = await pump_memory([TRANSCRIPT[:cut], TRANSCRIPT[cut:]], [stderr])
            assert recorder.happenings == expected, cut


async def test_the_transcript_byte_by_byte_gives_the_same_events() -> None:
    with trio.fail_after(60):
        recorder = await pump_memory((bytes([byte]) for byte in TRANSCRIPT), STDERR)
    assert recorder.happenings == expect(TRANSCRIPT)


@pytest.mark.parametrize("stderr", STDERR, ids=lambda stderr: repr(stderr[:20]))
@pytest.mark.parametrize("pump", [pump_memory, pump_pipes])
async def test_any_bytes_on_stderr_leave_the_events_as_they_are(
    pump: Callable[[Iterable[bytes], Iterable[bytes]], Awaitable[Recorder]],
    stderr: bytes,
) -> None:
    with trio.fail_after(60):
        for size in (1000, 64):
            chunks = [TRANSCRIPT[at : at + size] for at in range(0, len(TRANSCRIPT), size)]
            recorder = await pump(chunks, [stderr[:50], stderr[50:]])
            assert recorder.happenings == expect(TRANSCRIPT)
            assert recorder.tally.stdout_bytes == len(TRANSCRIPT)
            assert recorder.tally.stderr_bytes == len(stderr)
            assert recorder.tally.log_lines == len(recorder.logs)


@settings(repeatable, max_examples=60)
@given(
    st.lists(st.binary(max_size=40) | st.sampled_from([RECORD + b"\n", b"\n", PREFIX]), max_size=9),
    st.lists(st.integers(0, len(TRANSCRIPT)), max_size=6),
)
async def test_arbitrary_stderr_beside_arbitrary_cuts_gives_the_same_events(
    stderr: list[bytes], cuts: list[int]
) -> None:
    edges = [0, *sorted(cuts), len(TRANSCRIPT)]
    chunks = [TRANSCRIPT[a:b] for a, b in pairwise(edges)]
    with trio.fail_after(60):
        recorder = await pump_pipes(chunks, stderr)
    assert recorder.happenings == expect(TRANSCRIPT)
    assert recorder.tally.stderr_bytes == len(b"".join(stderr))


@settings(repeatable, max_examples=40)
@given(
    st.lists(
        st.binary(max_size=20)
        | st.sampled_from(
            [b"\n", b"\r\n", PREFIX, RECORD, RECORD + b"\n", line("ready", None) + b"\r\n"]
        )
        | st.integers(0, 2 * LIMIT).map(lambda size: b"x" * size),
        max_size=20,
    ),
    st.lists(st.integers(0, 4000), max_size=6),
)
async def test_arbitrary_streams_give_what_the_rules_say(
    parts: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(parts)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[a:b] for a, b in pairwise(edges)]
    with trio.fail_after(60):
        recorder = await pump_memory(chunks, [])
    assert recorder.happenings == expect(stream)


async def test_a_record_on_stderr_is_a_line_of_the_log_and_nothing_else() -> None:
    text = RECORD + b"\n" + line("ready", None) + b"\n"
    with trio.fail_after(60):
        recorder = await pump_pipes([], [text])
    assert recorder.happenings == []
    assert recorder.tally == Tally(stderr_bytes=len(text), log_lines=2)
    assert recorder.logs == text.decode().splitlines()


async def test_every_line_of_stdout_is_counted_as_what_it_is() -> None:
    with trio.fail_after(60):
        recorder = await pump_pipes([TRANSCRIPT], [])
    assert recorder.tally == Tally(
        stdout_bytes=len(TRANSCRIPT),
        records=5,
        unexpected=8,
        malformed=1,
        oversize=1,
        largest_held=len(line("ready", None)),
    )
