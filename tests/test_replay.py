"""Black boxes, and what comes out of them when they are put through the same code again.

The first part is pure; the rest kills real children in every phase, and lets scripted ones do what
a real child will not.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import attrs
import pytest
import trio
from hypothesis import HealthCheck, given, settings, strategies as st
from killing import kill, reach_child
from moments import first_text, reach

from llamatrio import (
    NO_RESTARTS,
    ChildDied,
    ChildError,
    LoadFailed,
    LocalProvider,
    MergedStreams,
    ModelConfig,
    Own,
    Phase,
    Policy,
    ServerBackend,
    completion_request,
    open_provider,
)
from llamatrio.__main__ import main
from llamatrio.child.evidence import Evidence, EvidenceRing, Recording, judge
from llamatrio.child.launch import Kind
from llamatrio.lifecycle.blackbox import MAX_SIZE, Box, build, find_differences, load
from llamatrio.lifecycle.journal import MAX_STEPS, Entry, Journal, walk
from llamatrio.lifecycle.phases import TABLE, Event
from llamatrio.lifecycle.recorder import MAX_FILES
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot
from llamatrio.wire.lines import LineSplitter
from llamatrio.wire.records import PREFIX

repeatable = settings(derandomize=True, database=None, deadline=None)
ONE_LIFE = Policy(fruitless=1)


# -- the journal -------------------------------------------------------------------------------


def walked(*events: Event) -> tuple[Entry, ...]:
    """What the journal of a provider holds that these events happened to."""
    phase, entries = Phase.UNLOADED, []
    for number, event in enumerate(events):
        new = TABLE[phase, event].phase
        entries.append(Entry(number / 10, phase, event, new, 1))
        phase = new
    return tuple(entries)


LIFE = walked(
    Event.START, Event.READY, Event.AGAIN, Event.READY, Event.STOP, Event.START, Event.IDLE,
    Event.START, Event.GONE,
)  # fmt: skip


def test_a_walk_that_the_table_allows_is_the_same_again_and_any_part_of_it() -> None:
    assert walk((), whole=True) is None
    assert walk(LIFE, whole=True) is None
    for first in range(len(LIFE)):
        assert walk(LIFE[first:], whole=False) is None


def test_a_walk_that_does_not_begin_unloaded_is_not_whole() -> None:
    assert walk(LIFE[1:], whole=True) == (
        "step 1: LOADING --READY--> STARTED begins in LOADING, and it was UNLOADED"
    )


def test_any_step_that_is_left_out_or_bent_is_found() -> None:
    changing = [number for number, one in enumerate(LIFE) if one.old is not one.new]
    for number in changing:
        if number < len(LIFE) - 1:
            assert walk(LIFE[:number] + LIFE[number + 1 :], whole=True), number
    for number, entry in enumerate(LIFE):
        for phase in set(Phase) - {entry.new}:
            bent = attrs.evolve(entry, new=phase)
            assert walk((*LIFE[:number], bent, *LIFE[number + 1 :]), whole=True), (number, phase)
        for event in Event:
            target = TABLE.get((entry.old, event))
            if target is None or target.phase is not entry.new:
                bent = attrs.evolve(entry, event=event)
                assert walk((*LIFE[:number], bent, *LIFE[number + 1 :]), whole=True)


def test_a_journal_drops_the_oldest_steps_and_counts_them() -> None:
    journal = Journal()
    for number in range(MAX_STEPS + 5):
        journal.add(attrs.evolve(LIFE[0], seconds=float(number)))
    assert journal.dropped == 5
    assert [entry.seconds for entry in journal.entries] == list(range(5, MAX_STEPS + 5))


# -- the box -----------------------------------------------------------------------------------


def recorded(stream: bytes, secrets: tuple[str, ...] = ()) -> tuple[Recording, EvidenceRing]:
    ring = EvidenceRing()
    recording = Recording(ring, secrets)
    recording.on_state_bytes(stream)
    lines = LineSplitter(2**20, keep=4096)
    for line in lines.feed(stream):
        recording.on_state_line(line, judge(line))
    recording.on_state_end(lines.close())
    return recording, ring


def make_box(stream: bytes, steps: tuple[Entry, ...] = LIFE, **fields: object) -> Box:
    recording, ring = recorded(stream)
    evidence = tuple(attrs.asdict(piece) for piece in ring.pieces)
    box = Box("2026-01-01", 1, ("ChildDied", "it died"), evidence=evidence, steps=steps)
    return attrs.evolve(box, state=recording.state(), **fields)  # type: ignore[arg-type]


STREAM = (
    PREFIX + b'{"state":"loading","payload":{"value":0.5}}\nnonsense\xff\n'
    + PREFIX + b'{"state":"ready"}\n' + PREFIX + b'{"st'
)  # fmt: skip

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=50) | st.just("\x00" * 20_000),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=20,
)
objects = st.dictionaries(st.text(max_size=20), anything, max_size=9)
many_steps = st.integers(0, MAX_STEPS).map(lambda number: (LIFE * MAX_STEPS)[:number])


@settings(
    repeatable,
    max_examples=8,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    st.lists(
        st.sampled_from([STREAM, b"\n" * 3000, b"\xff" * 9000, b"\xff\n" * 400]) | st.binary(),
        max_size=12,
    ).map(b"".join),
    many_steps,
    objects,
    st.lists(objects, max_size=64).map(tuple),
    st.text() | st.just("\x07\n" * 20_000) | st.just("🦜" * 20_000),
)
def test_a_box_is_never_larger_than_its_bound_and_can_be_read(
    stream: bytes,
    steps: tuple[Entry, ...],
    manifest: dict[str, object],
    evidence: tuple[dict[str, object], ...],
    text: str,
) -> None:
    box = make_box(stream, steps, log=text, error=(text, text), manifest=manifest)
    data = build(attrs.evolve(box, evidence=box.evidence + evidence))
    assert len(data) <= MAX_SIZE
    again = load(data)
    assert [one for one in find_differences(again) if not one.startswith("step ")] == []


def test_a_box_of_usual_size_comes_back_as_it_was() -> None:
    box = make_box(STREAM, log="one\ntwo", manifest={"kind": "stock"}, exit={"pid": 7})
    again = load(build(box))
    assert again == box
    assert find_differences(again) == ()
    assert len(again.evidence) == 2


def test_any_byte_of_the_state_channel_and_any_step_that_was_changed_is_found() -> None:
    document = json.loads(build(make_box(STREAM)))
    whole = load(json.dumps(document).encode())
    assert whole.state is not None
    for at in range(len(whole.state.data)):
        data = bytearray(whole.state.data)
        data[at] ^= 1
        bent = attrs.evolve(whole, state=attrs.evolve(whole.state, data=bytes(data)))
        assert find_differences(bent), at
    for at in range(len(whole.steps) - 1):
        if whole.steps[at].old is not whole.steps[at].new:
            bent = attrs.evolve(whole, steps=whole.steps[:at] + whole.steps[at + 1 :])
            assert find_differences(bent), at
    for number in range(len(whole.state.seen)):
        seen = whole.state.seen[:number] + whole.state.seen[number + 1 :]
        assert find_differences(attrs.evolve(whole, state=attrs.evolve(whole.state, seen=seen)))


# -- the command -------------------------------------------------------------------------------


def test_replaying_an_untouched_box_prints_it_and_returns_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "box.json"
    file.write_bytes(build(make_box(STREAM)))
    assert main(["replay", str(file)]) == 0
    out = capsys.readouterr().out
    assert "ChildDied: it died" in out
    assert "loading 0.5" in out
    assert "unexpected" in out
    assert "unfinished" in out
    assert "STARTED --AGAIN--> LOADING" in out
    assert "the same: 4 lines of the state channel, 9 steps" in out


def test_replaying_a_box_that_was_tampered_with_says_where_and_returns_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "box.json"
    data = build(make_box(STREAM)).decode()
    for old, new, told in [
        ("0.5}}", "0.6}}", "byte 0: "),
        (" ready", " sleeping", "there was Seen"),
        ("LOADING READY STARTED", "LOADING READY STOPPING", "step 2: "),
        ("STARTED AGAIN LOADING", "STARTED IDLE LOADING", "is not in the table"),
        ('"dropped": 0,\n  "kept": [\n   "0.000000 UNLOADED START LOADING 1",',
         '"dropped": 0,\n  "kept": [', "it was UNLOADED"),
    ]:  # fmt: skip
        assert old in data
        file.write_text(data.replace(old, new, 1))
        assert main(["replay", str(file)]) == 1, old
        assert "different: " in (out := capsys.readouterr().out)
        assert told in out


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"{}",
        b"[]",
        b"null",
        b'"x"',
        b"[" * 100_000,
        b'{"format": "llamatrio black box", "version": 2}',
        b'{"format": "llamatrio black box", "version": 1}',
        b" " * (5 * MAX_SIZE),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_box_cannot_be_replayed(
    tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "box.json"
    file.write_bytes(data)
    assert main(["replay", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("generation", "x"),
        ("generation", True),
        ("error", ["ChildDied", "it died"]),
        ("exit", 7),
        ("log", "one line"),
        ("log", [1]),
        ("steps", {"dropped": 0, "kept": ["0.1 UNLOADED START"]}),
        ("steps", {"dropped": 0, "kept": ["0.1 UNLOADED START NOWHERE 1"]}),
        ("steps", {"dropped": 0, "kept": ["x UNLOADED START LOADING 1"]}),
        ("steps", None),
        ("state", {"lines": ["x"]}),
        ("state", {"offset": 0, "size": 0, "limit": 9, "ended": True, "lines": ["\n"], "seen": []}),
        ("state", {"offset": 0, "size": 0, "limit": 9, "ended": True, "lines": [], "seen": ["x"]}),
        ("evidence", [7]),
        ("manifest", []),
    ],
)
def test_a_box_with_a_part_of_the_wrong_kind_cannot_be_replayed(part: str, wrong: object) -> None:
    document = json.loads(build(make_box(STREAM)))
    assert load(json.dumps(document).encode()).generation == 1
    with pytest.raises(ValueError, match=r"."):
        load(json.dumps({**document, part: wrong}).encode())


def test_a_file_that_is_not_there_cannot_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_what_a_box_says_cannot_drive_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "box.json"
    file.write_bytes(build(make_box(b"", error=("ChildDied", "\x1b[2J\x1b]0;title\x07"))))
    main(["replay", str(file)])
    assert "\x1b" not in capsys.readouterr().out


def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "replay" in capsys.readouterr().err
    assert main(["nonsense"]) == 2
    assert main(["--help"]) == 0
    assert "replay" in capsys.readouterr().out


# -- children ----------------------------------------------------------------------------------


@attrs.define
class Case:
    """A provider that writes black boxes, and what is found of them."""

    provider: LocalProvider
    directory: Path

    def boxes(self) -> list[Path]:
        return sorted(self.directory.iterdir()) if self.directory.exists() else []

    def only_box(self) -> Box:
        [path] = self.boxes()
        return read_box(path)


def read_box(path: Path) -> Box:
    """Read a box that is as it has to be, and is replayed as the same."""
    assert main(["replay", str(path)]) == 0
    assert path.stat().st_size <= MAX_SIZE
    assert path.stat().st_mode & 0o777 == 0o600
    # What looks like a key of ours is in no file.
    assert not re.search(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", without_hashes(path))
    return load(path.read_bytes())


def without_hashes(path: Path) -> str:
    return re.sub(r'"sha256": "[0-9a-f]{64}"', "", path.read_text())


@asynccontextmanager
async def boxed(
    kind: Kind, config: ModelConfig, directory: Path, policy: Policy = ONE_LIFE
) -> AsyncGenerator[Case, None]:
    with trio.fail_after(60):
        async with open_provider(
            config, backend=kind, policy=policy, black_box=directory / "boxes"
        ) as provider:
            yield Case(provider, directory / "boxes")


def steps_of(box: Box) -> list[str]:
    return [str(entry) for entry in box.steps]


@pytest.mark.slow
async def test_no_box_is_written_of_a_child_that_is_unloaded(
    kind: Kind, parrot: Parrot, tmp_path: Path
) -> None:
    async with boxed(kind, ModelConfig(parrot.path), tmp_path) as case:
        await case.provider.start()
        await case.provider.stop()
        await case.provider.unload_model()
    assert case.boxes() == []
    assert case.provider.black_box is None


async def test_a_box_of_a_child_killed_when_ready_is_there_before_anybody_is_told(
    kind: Kind, parrot: Parrot, tmp_path: Path
) -> None:
    async with boxed(kind, ModelConfig(parrot.path), tmp_path) as case:
        await case.provider.start()
        pid = kill(case.provider)
        await reach(case.provider, Phase.UNLOADED)
        assert len(case.boxes()) == 1
    box = case.only_box()
    assert case.provider.black_box == case.boxes()[0]
    command = [sys.executable, "-m", "llamatrio", "replay", str(case.provider.black_box)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: ASYNC221
    assert done.returncode == 0
    assert "the same: " in done.stdout
    assert done.stderr == ""
    assert box.error[0] == "ChildDied"
    assert "SIGKILL" in box.error[1]
    assert box.exit is not None
    assert (box.exit["pid"], box.exit["signal"]) == (pid, "SIGKILL")
    assert steps_of(box) == [
        "UNLOADED --START--> LOADING", "LOADING --READY--> STARTED", "STARTED --GONE--> UNLOADED",
    ]  # fmt: skip
    assert box.state is not None
    assert [one.what for one in box.state.seen][::2] == ["loading 0", "ready"]
    assert box.log
    assert box.counters["crashes"] == 1
    assert box.manifest is not None
    process = box.manifest["process"]
    assert isinstance(process, dict)
    assert process["pid"] == pid


@pytest.mark.slow
async def test_a_box_of_a_child_killed_while_it_loads(
    kind: Kind, large: Parrot, tmp_path: Path
) -> None:
    async with boxed(kind, ModelConfig(large.path), tmp_path) as case:
        provider = case.provider
        while not case.boxes():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill_when_loading, provider)
                with suppress(LoadFailed):
                    await provider.start()
                    await reach(provider, Phase.UNLOADED)
            if load(case.boxes()[-1].read_bytes()).error[0] != "LoadFailed":
                case.boxes()[-1].unlink()  # the load was faster than we were
    box = case.only_box()
    assert box.error[0] == "LoadFailed"
    assert steps_of(box)[-1] == "LOADING --GONE--> UNLOADED"
    assert box.state is not None
    assert box.state.seen[0].what == "loading 0"


async def kill_when_loading(provider: LocalProvider) -> None:
    await reach_child(provider)
    kill(provider)


@pytest.mark.slow
async def test_a_box_of_a_child_killed_in_mid_stream_holds_no_prompt_and_no_answer(
    kind: Kind, endless: Parrot, tmp_path: Path
) -> None:
    async with boxed(kind, ModelConfig(endless.path), tmp_path) as case:
        await case.provider.start()
        reply = case.provider.submit(completion_request("Zanzibar, twice", max_tokens=3000))
        await first_text(reply)
        kill(case.provider)
        await reply.wait()
        await reach(case.provider, Phase.UNLOADED)
    box = case.only_box()
    text = case.boxes()[0].read_text()
    assert "Zanzibar" not in text
    assert endless.text.split()[1] + " " + endless.text.split()[2] not in text
    assert box.counters["accepted"] == 1
    assert steps_of(box)[-1] == "STARTED --GONE--> UNLOADED"


async def test_a_box_of_a_child_killed_when_resident_and_stopped(
    kind: Kind, parrot: Parrot, tmp_path: Path
) -> None:
    async with boxed(kind, ModelConfig(parrot.path), tmp_path) as case:
        await case.provider.start()
        await case.provider.stop()
        kill(case.provider, signal.SIGSEGV)
        await reach(case.provider, Phase.UNLOADED)
    box = case.only_box()
    assert "SIGSEGV" in box.error[1]
    assert steps_of(box)[-2:] == ["STOPPING --IDLE--> RESIDENT", "RESIDENT --GONE--> UNLOADED"]


@pytest.mark.slow
async def test_a_box_of_a_child_killed_in_its_sleep(
    kind: Kind, parrot: Parrot, tmp_path: Path
) -> None:
    async with boxed(kind, ModelConfig(parrot.path, sleep_after=1), tmp_path) as case:
        await case.provider.start()
        async for status in case.provider.watch():
            if status.residency == "asleep":
                break
        kill(case.provider)
        await reach(case.provider, Phase.UNLOADED)
    box = case.only_box()
    assert box.state is not None
    assert box.state.seen[-1].what == "sleeping"


@pytest.mark.slow
async def test_each_life_of_a_model_has_a_box_with_what_was_decided_upon_its_end(
    kind: Kind, parrot: Parrot, tmp_path: Path
) -> None:
    async with boxed(kind, ModelConfig(parrot.path), tmp_path, Policy(fruitless=2)) as case:
        await case.provider.start()
        kill(case.provider)
        await reach(case.provider, Phase.STARTED, 2)
        kill(case.provider)
        await reach(case.provider, Phase.UNLOADED)
    first, second = sorted(map(read_box, case.boxes()), key=lambda box: box.generation)
    assert (first.generation, second.generation) == (1, 2)
    assert steps_of(first)[-1] == "STARTED --AGAIN--> LOADING"
    assert steps_of(second)[-1] == "STARTED --GONE--> UNLOADED"
    assert steps_of(second)[: len(steps_of(first))] == steps_of(first)
    assert first.exit is not None
    assert second.exit is not None
    assert first.exit["pid"] != second.exit["pid"]


async def test_a_box_of_a_model_file_that_is_broken(
    kind: Kind, parrot: Parrot, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(parrot.path.read_bytes()[:10_000])
    async with boxed(kind, ModelConfig(broken), tmp_path) as case:
        with pytest.raises(LoadFailed):
            await case.provider.start()
        assert len(case.boxes()) == 1
    box = case.only_box()
    assert box.error[0] == "LoadFailed"
    assert "gguf" in box.log
    assert steps_of(box) == ["UNLOADED --START--> LOADING", "LOADING --GONE--> UNLOADED"]


# -- scripted children -------------------------------------------------------------------------


def scripted(*steps: str) -> Own:
    return Own(fakechild.command(*steps))


async def fail(case: Case) -> ChildError:
    with pytest.raises(ChildError) as caught:
        await case.provider.start()
    return caught.value


async def test_a_flood_of_records_makes_a_box_within_its_bound(
    parrot: Parrot, tmp_path: Path
) -> None:
    child = scripted("Sp 5000", "S ready", "Sp 300", "K SEGV")
    async with boxed(child, ModelConfig(parrot.path), tmp_path) as case:
        with suppress(ChildError):
            await case.provider.start()
        await reach(case.provider, Phase.UNLOADED)
    box = case.only_box()
    assert "SIGSEGV" in box.error[1]
    assert box.state is not None
    assert box.state.offset > 0
    words = [one.what.split()[0] for one in box.state.seen]
    assert set(words) == {"loading", "ready"}
    assert len(words) > 300


async def test_a_flood_of_nonsense_makes_a_box_within_its_bound_and_with_evidence(
    parrot: Parrot, tmp_path: Path
) -> None:
    lines = "O \\xff\\e[2J\\0nonsense\\n"
    child = scripted("S loading", *[lines] * 40, "On 3000000", *[lines] * 40, "X 3")
    async with boxed(child, ModelConfig(parrot.path), tmp_path) as case:
        await fail(case)
        box = case.only_box()
    assert len(box.evidence) == 64
    assert {piece["reason"] for piece in box.evidence} == {"unexpected line", "oversize line"}
    assert "\x1b" not in case.boxes()[0].read_text()


async def test_a_child_that_writes_its_key_everywhere_leaves_none_in_the_box(
    parrot: Parrot, tmp_path: Path
) -> None:
    code = (
        "import os, sys\n"
        "key = os.environ['LLAMA_API_KEY'].encode()\n"
        f"prefix = {PREFIX!r}\n"
        'os.write(1, prefix + b\'{"state":"loading","payload":{"stage":"\' + key + b\'"}}\\n\')\n'
        "os.write(1, key + b'\\n' + prefix + b'{' + key + b'\\n' + key[:40])\n"
        "os.write(2, b'E the key is ' + key + b'\\n' + key)\n"
        "sys.exit(3)\n"
    )
    child = Own((sys.executable, "-c", code))
    async with boxed(child, ModelConfig(parrot.path), tmp_path) as case:
        await fail(case)
        box = case.only_box()
        assert box.state is not None
        assert b"#" * 64 in box.state.data
        assert box.state.data.endswith(b"\n" + b"#" * 40)
        assert [one.what for one in box.state.seen] == [
            "loading", "unexpected", "malformed", "unfinished",
        ]  # fmt: skip
        assert "[redacted]" in box.log


async def test_a_child_that_is_ended_for_saying_nothing_leaves_a_box(
    parrot: Parrot, tmp_path: Path
) -> None:
    policy = attrs.evolve(ONE_LIFE, load_stall=0.3)
    async with boxed(scripted("S loading", "W 60"), ModelConfig(parrot.path), tmp_path) as case:
        case.provider._actor.set_policy(policy)
        error = await fail(case)
        box = case.only_box()
    assert box.error[0] == type(error).__name__ == "LoadStalled"
    assert box.exit is not None
    assert box.exit["asked"] is True


async def test_a_child_whose_streams_a_wrapper_merges_leaves_a_box(
    parrot: Parrot, tmp_path: Path
) -> None:
    program = tmp_path / "wrapper"
    program.write_text('#!/bin/sh\n"$@" 2>&1\nexit 0\n')
    program.chmod(0o755)  # noqa: ASYNC240
    child = Own((str(program), *fakechild.command("S loading", "H ok", "S ready", "R")))
    async with boxed(child, ModelConfig(parrot.path), tmp_path) as case:
        error = await fail(case)
        assert len(case.boxes()) == 1
    assert isinstance(error, MergedStreams)
    box = case.only_box()
    assert box.error[0] == "MergedStreams"
    assert error.evidence[0] in box.error[1]


async def test_a_program_that_cannot_be_run_leaves_no_box(parrot: Parrot, tmp_path: Path) -> None:
    child = Own(("/no/such/program",))
    async with boxed(child, ModelConfig(parrot.path), tmp_path) as case:
        with pytest.raises(Exception, match="no such program"):
            await case.provider.start()
    assert case.boxes() == []


# -- when it cannot be written -----------------------------------------------------------------


async def test_a_box_that_cannot_be_written_is_a_warning_and_changes_nothing(
    parrot: Parrot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "boxes").write_text("in the way")
    child = scripted("S loading", "H ok", "S ready", "R", "X 3")
    async with boxed(child, ModelConfig(parrot.path), tmp_path) as case:
        with caplog.at_level(logging.WARNING, "llamatrio.lifecycle"):
            await case.provider.start()
            kill(case.provider)
            await reach(case.provider, Phase.UNLOADED)
        assert isinstance(case.provider.failure, ChildDied)
        assert "no black box in" in caplog.text
        assert "File exists" in caplog.text
        assert case.provider.black_box is None
        await case.provider.start()  # it goes on


class Secretive(ServerBackend):
    """Cannot say what was wrong."""

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        raise LookupError("no evidence")


async def test_a_backend_that_cannot_be_described_ends_all_the_same(
    parrot: Parrot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Secretive(scripted("S loading", "H ok", "S ready", "R", "X 3"))
    config = ModelConfig(parrot.path)
    with trio.fail_after(30), caplog.at_level(logging.ERROR, "llamatrio.lifecycle"):
        async with open_provider(
            config, backend=backend, black_box=tmp_path, policy=NO_RESTARTS
        ) as provider:
            await provider.start()
            kill(provider)
            await reach(provider, Phase.UNLOADED)
    assert "no black box in" in caplog.text
    assert provider.black_box is None


async def test_a_box_that_can_be_written_in_part_only_leaves_no_part(
    parrot: Parrot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    child = scripted("S loading", *["On 5000", "O \\n"] * 40, "X 3")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        async with boxed(child, ModelConfig(parrot.path), tmp_path) as case:
            await fail(case)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in caplog.text
    assert case.boxes() == []


async def test_only_so_many_boxes_are_kept(parrot: Parrot, tmp_path: Path) -> None:
    (tmp_path / "boxes").mkdir()
    mine = tmp_path / "boxes" / "mine.json"
    mine.write_text("not a box")
    for number in range(MAX_FILES + 3):
        (mine.parent / f"20200101T0000{number:02}Z-1-1-0.llamatrio-box.json").write_text("old")
    async with boxed(scripted("S loading", "X 3"), ModelConfig(parrot.path), tmp_path) as case:
        await fail(case)
    assert mine.exists()
    assert len(case.boxes()) == MAX_FILES + 1
    assert case.provider.black_box in case.boxes()


async def test_leaving_the_block_while_a_box_is_written_leaves_it_whole(
    parrot: Parrot, tmp_path: Path
) -> None:
    child = scripted("S loading", "H ok", "S ready", "R", "X 3")
    async with boxed(child, ModelConfig(parrot.path), tmp_path) as case:
        await case.provider.start()
        os.kill(case.provider.diagnostics().pid or 0, signal.SIGKILL)
        while case.provider.diagnostics().counters.crashes == 0:  # noqa: ASYNC110
            await trio.lowlevel.checkpoint()
    box = case.only_box()
    assert box.error[0] == "ChildDied"
    assert len(case.boxes()) == 1
