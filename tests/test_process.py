"""One child process: what of its words counts, how it is ended, and what is told of its end."""

from __future__ import annotations

import itertools
import math
import os
import secrets
import signal
import sys
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import trio
from moments import reach

from llamatrio import (
    NO_RESTARTS,
    Bounds,
    ChildDied,
    Exit,
    Hosted,
    Ladder,
    LoadFailed,
    LocalProvider,
    ModelConfig,
    NoHandshake,
    Own,
    Phase,
    RequestFailed,
    ServerBackend,
    SpawnError,
    StartInterrupted,
    StateFlood,
    Tally,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind, Launch, Stock
from llamatrio.child.logs import LogChannel
from llamatrio.child.process import run_child
from llamatrio.child.verdict import Reservation
from llamatrio.errors import ChildError
from llamatrio.session.base import Ended, Opened, SessionEvent
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot
from llamatrio.wire.records import Loading, Ready, Record, Sleeping

if sys.platform != "linux":
    pytest.skip("looks at /proc", allow_module_level=True)

PREFIX = "cmd_child_to_router:state:"
READY_LINE = PREFIX + '{"state":"ready"}\\n'  # as the fake child's steps write a newline


class Recorder:
    """A listener that keeps what it is told, in order, and lets a test wait for it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.pid = 0
        self.records: list[Record] = []
        self.unexpected: list[bytes] = []
        self.ends: list[tuple[Exit, ChildError | None]] = []
        self.reservation: Reservation | None = None
        self.announced: ChildError | None = None
        self.tally = Tally()
        self.logs = LogChannel(10)  # nobody reads it
        self._news = trio.lowlevel.ParkingLot()

    def on_spawn(self, pid: int) -> None:
        self.pid = pid
        self._note("spawn")

    def on_record(self, record: Record) -> None:
        self.records.append(record)
        self._note("record")

    def on_reserved(self, reservation: Reservation) -> None:
        self.reservation = reservation

    def on_fault(self, fault: ChildError) -> None:
        self.announced = fault

    def on_unexpected(self, data: bytes) -> None:
        self.unexpected.append(data)
        self._note("unexpected")

    def last_cut(self) -> float:
        return -math.inf

    def on_exit(self, exit: Exit, fault: ChildError | None) -> None:
        self.ends.append((exit, fault))
        self._note("exit")

    def _note(self, what: str) -> None:
        self.told.append(what)
        self._news.unpark_all()

    async def wait_for(self, kind: type[Record]) -> None:
        while not any(isinstance(record, kind) for record in self.records):
            await self._news.park()

    async def wait_spawned(self) -> None:
        while not self.pid:
            await self._news.park()

    async def wait_ended(self) -> None:
        while not self.ends:
            await self._news.park()

    @property
    def exit(self) -> Exit:
        [(end, _)] = self.ends
        return end

    @property
    def fault(self) -> ChildError | None:
        [(_, fault)] = self.ends
        return fault


def launch(
    command: tuple[str, ...], ladder: Ladder | None = None, bounds: Bounds | None = None
) -> Launch:
    environ = {"PATH": os.environ["PATH"]}
    return Launch(command, environ, (), ladder or Ladder(), bounds or Bounds())


async def run(start: Launch, listener: Recorder | None = None) -> Recorder:
    """Let a child run to the end that it comes to by itself, or by a fault."""
    listener = listener or Recorder()
    with trio.fail_after(30):
        await run_child(start, listener, listener.logs, listener.tally)
    return listener


async def run_steps(*steps: str) -> Recorder:
    return await run(launch(fakechild.command(*steps)))


@asynccontextmanager
async def living(start: Launch) -> AsyncGenerator[Recorder, None]:
    """Have a child for the length of a block; leaving the block ends it."""
    listener = Recorder()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_child, start, listener, listener.logs, listener.tally)
            await listener.wait_spawned()
            yield listener
            nursery.cancel_scope.cancel()


def processes_with(word: str) -> list[int]:
    """Find the processes that have a word on their command line; a zombie has none."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it has gone
    return found


@pytest.fixture
def mark() -> str:
    """A word for a child's command line, by which its descendants can be found."""
    return secrets.token_hex(8)


# -- what of its words counts ------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps",
    [
        # https://github.com/ROCm/FastFlowLM/pull/402 and node-llama-cpp/pull/609
        pytest.param(["O Using config /x\\n"], id="banner"),
        # https://github.com/mostlygeek/llama-swap/issues/838
        pytest.param([f"O \\e[32m{READY_LINE}"], id="colours"),
        # https://github.com/thomwebb/gac/issues/53
        pytest.param(["O \\xa6\\xff\\x80\\n"], id="invalid UTF-8"),
        pytest.param([f"O {PREFIX}\\xff\\n"], id="invalid UTF-8 after the prefix"),
        pytest.param([f"O {PREFIX}{{bad\\n"], id="malformed JSON"),
        pytest.param([f"O  {READY_LINE}"], id="leading blank"),
        pytest.param(["O \\0\\n"], id="NUL"),
        pytest.param(["O \\n"], id="empty"),
    ],
)
async def test_a_line_that_is_no_record_is_reported_and_changes_nothing(steps: list[str]) -> None:
    recorder = await run_steps(*steps, "S loading", "X 3")
    assert recorder.records == [Loading()]
    assert len(recorder.unexpected) == 1
    assert recorder.tally.unexpected + recorder.tally.malformed == 1
    assert not recorder.exit.ready


@pytest.mark.parametrize("seed", range(5))
async def test_a_record_that_comes_in_pieces_is_one_record(seed: int) -> None:
    recorder = await run_steps(f"W? {seed}", 'S ready {"id":1}', "X 0")
    assert recorder.records == [Ready({"id": 1})]
    assert recorder.unexpected == []


async def test_a_sentence_of_the_log_is_no_record_and_the_handshake_runs_out() -> None:
    # https://github.com/janhq/jan/pull/6030 and llama.cpp/issues/27351
    start = launch(
        fakechild.command("E model is ready\\n", "E server is listening\\n", "W 999"),
        bounds=Bounds(handshake=1.0),
    )
    began = trio.current_time()
    recorder = await run(start)
    assert 1.0 <= trio.current_time() - began < 5
    assert recorder.records == []
    assert isinstance(recorder.fault, NoHandshake)
    assert "1 s" in str(recorder.fault)
    assert "server is listening" in recorder.fault.stderr_tail
    assert recorder.exit.signal == "SIGTERM"
    assert recorder.exit.asked


async def test_an_unfinished_record_of_a_child_that_dies_is_not_ready() -> None:
    recorder = await run_steps("S loading", f'O {PREFIX}{{"state":"ready"}}', "K KILL")
    assert recorder.records == [Loading()]
    assert recorder.unexpected == [f'{PREFIX}{{"state":"ready"}}'.encode()]
    assert not recorder.exit.ready


async def test_a_record_of_900_KiB_is_accepted() -> None:
    # https://github.com/jupyter-ai-contrib/jupyter-ai-acp-client/issues/32
    size = 900 * 1024
    recorder = await run_steps(f"Sn ready {size}", "S sleeping", "X 0")
    ready, sleeping = recorder.records
    assert isinstance(ready, Ready)
    assert ready.info is not None
    assert len(str(ready.info["filler"])) == size - len('{"filler":""}')
    assert sleeping == Sleeping()


async def test_a_line_of_2_MB_is_dropped_whole_with_the_record_forged_at_its_tail() -> None:
    forged = PREFIX + '{"state":"sleeping"}\\n'
    recorder = await run_steps("On 2000000", f"O {forged}", "S ready", "X 0")
    assert recorder.records == [Ready()]
    assert recorder.tally.oversize == 1
    assert recorder.unexpected == [b"x" * 200]


@pytest.mark.slow
@pytest.mark.parametrize("end", [[], ["E \\n"]], ids=["without newline", "with newline"])
@pytest.mark.parametrize("size", [70_000, 200_000, 2**20, 10**8])
async def test_a_long_line_on_stderr_that_nobody_reads_delays_no_record(
    size: int, end: list[str]
) -> None:
    # https://github.com/omnigent-ai/omnigent/issues/7930, ollama/pull/14919 and
    # claude-agent-sdk-python/pull/103
    recorder = await run_steps(f"En {size}", *end, "S ready", "X 0")
    assert recorder.records == [Ready()]
    assert recorder.tally.stderr_bytes == size + len(end)
    assert recorder.tally.log_lines == 1
    assert recorder.exit.tail == "x" * Bounds().tail


async def test_garbage_on_stderr_stops_no_reader() -> None:
    # https://github.com/thomwebb/gac/issues/53
    recorder = await run_steps("E \\xa6\\xff\\x80\\n", "E and on\\n", "S ready", "X 0")
    assert recorder.records == [Ready()]
    assert recorder.exit.tail == "\\xa6\\xff\\x80\nand on"


async def test_an_error_of_the_listener_that_blames_the_child_ends_it() -> None:
    flood = StateFlood("too many")

    class Strict(Recorder):
        def on_record(self, record: Record) -> None:
            super().on_record(record)
            if len(self.records) == 5:
                raise flood

    start = launch(fakechild.command(*["S ready"] * 10, "R", "W 999"), Ladder(exit=0.2))
    recorder = await run(start, Strict())
    assert recorder.fault is flood
    assert recorder.exit.signal == "SIGTERM"
    assert recorder.told[-1] == "exit"


@pytest.mark.parametrize("method", ["on_spawn", "on_record", "on_unexpected"])
async def test_a_listener_that_breaks_leaves_no_child_behind(method: str, mark: str) -> None:
    class Breaks(Recorder):
        def _note(self, what: str) -> None:
            super()._note(what)
            if method == f"on_{what}":
                raise ZeroDivisionError

    recorder = Breaks()
    start = launch(fakechild.command(f"E {mark}", "O hello\\n", "S ready", "R"))
    if method == "on_spawn":
        with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
            await run(start, recorder)
    else:
        await run(start, recorder)
        assert isinstance(recorder.fault, ChildError)
        assert isinstance(recorder.fault.__cause__, ZeroDivisionError)
    assert recorder.told[-1] == "exit"
    assert recorder.exit.returncode is not None
    assert processes_with(mark) == []


@pytest.mark.slow
async def test_a_child_that_never_stops_writing_records_blocks_nobody(parrot: Parrot) -> None:
    ready, sleeping = (f'{PREFIX}{{"state":"{state}"}}' for state in ("ready", "sleeping"))
    flood = """echo "$0"; exec yes "$(printf '%s\\n%s' "$1" "$0")\""""
    with trio.fail_after(30):
        backend = Own(("/bin/sh", "-c", flood, ready, sleeping))
        async with open_provider(ModelConfig(parrot.path), backend=backend) as provider:
            await provider.start()
            began = trio.current_time()
            await trio.sleep(1)
            assert trio.current_time() - began < 2
            assert provider.diagnostics().pipes.records > 100
            await provider.stop()
            await provider.unload_model()
            assert provider.phase is Phase.UNLOADED


# -- its end is its own, not that of its pipes -------------------------------------------------


async def test_exit_is_seen_although_a_grandchild_holds_the_pipes(mark: str) -> None:
    began = trio.current_time()
    recorder = await run_steps(f"E {mark}", "F 30", "X 3")
    assert trio.current_time() - began < 2
    assert recorder.exit.returncode == 3
    assert processes_with(mark) == []


async def test_an_asked_exit_is_seen_although_a_grandchild_holds_the_pipes(mark: str) -> None:
    # https://github.com/ggml-org/llama.cpp/pull/28755
    start = launch(fakechild.command(f"E {mark}", "F 30", "S ready", "R", "X 0"))
    async with living(start) as recorder:
        await recorder.wait_for(Ready)
        began = trio.current_time()
    assert trio.current_time() - began < 1
    assert recorder.exit.returncode == 0
    assert processes_with(mark) == []


async def test_a_killed_child_whose_pipes_are_held_is_reaped_at_once(mark: str) -> None:
    # https://github.com/ggml-org/llama.cpp/pull/18921
    began = trio.current_time()
    recorder = await run_steps(f"E {mark}", "F 30", "K KILL")
    assert trio.current_time() - began < 2
    assert recorder.exit.signal == "SIGKILL"
    assert not psutil.pid_exists(recorder.pid)
    assert processes_with(mark) == []


async def test_ending_a_child_ends_its_grandchildren(mark: str) -> None:
    # https://github.com/python-trio/trio/issues/3237
    start = launch(fakechild.command(f"E {mark}", "F 60", "F 60", "S loading", "W 999"))
    async with living(start) as recorder:
        await recorder.wait_for(Loading)
        assert len(processes_with(mark)) == 3
    assert processes_with(mark) == []


@pytest.mark.slow
async def test_a_grandchild_in_a_session_of_its_own_escapes_and_delays_the_end_by_the_drain(
    mark: str,
) -> None:
    # A documented limit; https://github.com/mostlygeek/llama-swap/issues/804
    began = trio.current_time()
    recorder = await run_steps("S ready", f"E {mark}", "F! 60", "W 0.5", "X 3")
    assert 0.5 <= trio.current_time() - began < 4
    assert recorder.exit.returncode == 3
    [survivor] = processes_with(mark)
    assert recorder.exit.survivors == (survivor,)
    assert f"left processes behind, out of reach: {survivor}" in str(recorder.logs.tail)
    await end_stranger(survivor)


async def end_stranger(pid: int) -> None:
    fd = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        with trio.fail_after(10):
            await trio.lowlevel.wait_readable(fd)
    finally:
        os.close(fd)


async def test_a_grandchild_that_escapes_and_holds_no_pipe_is_named_when_we_end_the_child(
    mark: str,
) -> None:
    script = 'setsid sleep "$0" <&- >&- 2>&- & echo "$1"; read line'
    ready = 'cmd_child_to_router:state:{"state":"ready"}'
    seconds = f"600.{int(mark, 16)}"
    async with living(launch(("/bin/sh", "-c", script, seconds, ready))) as recorder:
        await recorder.wait_for(Ready)
    [survivor] = processes_with(seconds)
    assert recorder.exit.survivors == (survivor,)
    assert str(survivor) in str(recorder.logs.tail)
    await end_stranger(survivor)


async def test_a_grandchild_that_ends_after_the_child_for_its_part_is_waited_for_and_not_named(
    mark: str,
) -> None:
    follow = "while kill -0 $PPID; do sleep 0.02; done"
    script = f'setsid sh -c \'{follow}\' "$0" <&- >&- 2>&- & echo "$1"; read line'
    ready = 'cmd_child_to_router:state:{"state":"ready"}'
    start = launch(("/bin/sh", "-c", script, mark, ready), bounds=Bounds(drain=10))
    async with living(start) as recorder:
        await recorder.wait_for(Ready)
    assert processes_with(mark) == []
    assert recorder.exit.survivors == ()


async def test_the_exit_is_told_once_and_after_every_record_that_was_still_in_the_pipe() -> None:
    recorder = await run_steps("S loading", *["S ready"] * 500, "X 7")
    assert recorder.told == ["spawn", *["record"] * 501, "exit"]
    assert recorder.exit.ready
    assert recorder.exit.returncode == 7


@pytest.mark.slow
async def test_a_handshake_that_runs_out_after_the_exit_is_no_fault() -> None:
    start = launch(
        fakechild.command("F! 3", "W 0.5", "X 3"), bounds=Bounds(handshake=1.0, drain=10.0)
    )
    recorder = await run(start)
    assert recorder.exit.returncode == 3
    assert not recorder.exit.asked
    assert recorder.fault is None


@pytest.mark.parametrize("name", ["KILL", "SEGV", "ABRT", "TERM", "HUP"])
async def test_a_signal_has_its_name(name: str) -> None:
    end = (await run_steps("S loading", f"K {name}")).exit
    assert end.signal == f"SIG{name}"
    assert end.returncode == -signal.Signals[f"SIG{name}"]
    assert not end.asked
    assert f"SIG{name}" in str(end)
    assert ("possibly out of memory" in str(end)) == (name == "KILL")


async def test_a_signal_that_has_no_name_is_told_by_its_number() -> None:
    number = signal.SIGRTMIN + 5
    code = f"import os; os.kill(os.getpid(), {number})"
    end = (await run(launch((sys.executable, "-c", code)))).exit
    assert end.returncode == -number
    assert str(number) in str(end)


async def test_an_exit_code_is_told_with_the_end_of_stderr() -> None:
    end = (await run_steps("E one\\n", "E error: two\\n", "E three", "X 9")).exit
    assert (end.returncode, end.signal) == (9, None)
    assert end.tail == "one\nerror: two\nthree"
    assert end.headline == "error: two"
    assert str(end) == "exited with code 9"


async def test_a_program_that_cannot_be_run_is_told_before_anything_else(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no program")
    text.chmod(0o755)
    for program, reason in [
        ("/nonexistent/program", "No such file"),
        (str(tmp_path), "denied"),
        (str(text), "Exec format"),
        ("a\0b", "null"),
    ]:
        recorder = Recorder()
        with pytest.raises(SpawnError, match=reason):
            await run(launch((program,)), recorder)
        assert recorder.told == []


# -- the ladder --------------------------------------------------------------------------------

SHORT = Ladder(exit=0.3, terminate=0.3, terminate_loading=0.3)


async def end_when(start: Launch, kind: type[Record]) -> tuple[Exit, float]:
    """End a child at its first record of a kind; return how it ended, and after how long."""
    async with living(start) as recorder:
        await recorder.wait_for(kind)
        began = trio.current_time()
    assert recorder.fault is None
    assert recorder.exit.asked
    return recorder.exit, trio.current_time() - began


async def test_a_loading_child_is_ended_by_SIGTERM_at_once() -> None:
    end, seconds = await end_when(launch(fakechild.command("S loading", "W 999")), Loading)
    assert end.signal == "SIGTERM"
    assert not end.ready
    assert seconds < 1


async def test_a_loading_child_that_ignores_SIGTERM_is_killed() -> None:
    start = launch(fakechild.command("I TERM", "S loading", "W 999"), SHORT)
    end, seconds = await end_when(start, Loading)
    assert end.signal == "SIGKILL"
    assert "out of memory" not in str(end)
    assert 0.3 <= seconds < 2


async def test_a_ready_child_leaves_at_the_exit_line() -> None:
    end, seconds = await end_when(launch(fakechild.command("S ready", "R", "X 0")), Ready)
    assert end.returncode == 0
    assert end.ready
    assert 0.05 <= seconds < 1


async def test_a_child_that_swallows_the_exit_line_is_ended_by_SIGTERM() -> None:
    start = launch(fakechild.command("S ready", "R!", "W 999"), SHORT)
    end, seconds = await end_when(start, Ready)
    assert end.signal == "SIGTERM"
    assert 0.3 <= seconds < 2


async def test_a_child_that_ignores_SIGTERM_too_is_killed() -> None:
    # https://github.com/ggml-org/llama.cpp/issues/18237
    start = launch(fakechild.command("I TERM", "S ready", "R!", "W 999"), SHORT)
    end, seconds = await end_when(start, Ready)
    assert end.signal == "SIGKILL"
    assert "out of memory" not in str(end)
    assert 0.6 <= seconds < 3


def suspend(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize(("state", "kind"), [("loading", Loading), ("ready", Ready)])
async def test_a_stopped_process_is_killed(state: str, kind: type[Record]) -> None:
    async with living(launch(fakechild.command(f"S {state}", "R"), SHORT)) as recorder:
        await recorder.wait_for(kind)
        suspend(recorder.pid)
    assert recorder.exit.signal == "SIGKILL"


async def test_a_child_that_fills_its_stderr_while_it_leaves_is_still_drained() -> None:
    start = launch(fakechild.command("S ready", "R", "En 1048576", "On 200000", "X 0"))
    end, _ = await end_when(start, Ready)
    assert end.returncode == 0


NOTES_ITS_STDIN = """
import sys, time
began = time.monotonic()
print('cmd_child_to_router:state:{"state":"STATE"}', flush=True)
said = sys.stdin.buffer.readline()
waited = time.monotonic() - began
said += sys.stdin.buffer.read()
print(waited, said.decode(), end="", file=sys.stderr)
"""


async def test_the_exit_line_comes_once_and_not_before_50_ms_after_READY() -> None:
    code = NOTES_ITS_STDIN.replace("STATE", "ready")
    end, _ = await end_when(launch((sys.executable, "-c", code)), Ready)
    waited, said = end.tail.split()
    assert float(waited) >= 0.05
    assert said == "cmd_router_to_child:exit"
    assert end.returncode == 0


async def test_the_exit_line_waits_until_a_child_has_noticed_a_cut_connection() -> None:
    cut_at = -math.inf

    class Cutting(Recorder):
        def last_cut(self) -> float:
            return cut_at

    recorder = Cutting()
    start = launch(fakechild.command("S ready", "R"), Ladder(settle=0.1))
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_child, start, recorder, recorder.logs, recorder.tally)
            await recorder.wait_for(Ready)
            cut_at = trio.current_time() + 0.3
            nursery.cancel_scope.cancel()
        assert trio.current_time() >= cut_at + 0.1
    assert recorder.exit.returncode == 0


async def test_nothing_is_written_to_a_child_that_loads_but_its_stdin_ends() -> None:
    code = NOTES_ITS_STDIN.replace("STATE", "loading")
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{code}"
    end, _ = await end_when(launch((sys.executable, "-c", code)), Loading)
    waited, *said = end.tail.split()
    assert float(waited) < 2
    assert said == []
    assert end.returncode == 0


class CancelAfter(trio.abc.Instrument):
    """Cancels a scope after a number of steps that tasks took."""

    def __init__(self, scope: trio.CancelScope, steps: int) -> None:
        self._scope = scope
        self._left = steps

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._left -= 1
        if self._left == 0:
            self._scope.cancel()


@contextmanager
def cancelled_after(steps: int) -> Generator[trio.CancelScope, None, None]:
    with trio.CancelScope() as scope:
        instrument = CancelAfter(scope, steps)
        trio.lowlevel.add_instrument(instrument)
        try:
            yield scope
        finally:
            trio.lowlevel.remove_instrument(instrument)


@pytest.mark.slow
async def test_run_child_can_be_cancelled_at_every_checkpoint(mark: str) -> None:
    command = fakechild.command(f"E {mark}", "F 60", "S loading", "S ready", "W 0.1", "X 5")
    for steps in itertools.count(1):
        recorder = Recorder()
        with cancelled_after(steps) as scope:
            await run(launch(command, SHORT), recorder)
        assert recorder.told[0] == "spawn"
        assert recorder.told[-1] == "exit"
        assert recorder.exit.returncode is not None
        assert processes_with(mark) == []
        if not scope.cancelled_caught:
            assert recorder.exit.returncode == 5
            assert steps > 5
            return


@pytest.mark.slow
async def test_a_backend_can_be_cancelled_at_every_checkpoint(parrot: Parrot, mark: str) -> None:
    # https://github.com/unslothai/unsloth/pull/10592
    command = fakechild.command(f"E {mark}", "S loading", "S ready", "W 0.1", "X 5")
    for steps in itertools.count(1):
        told: list[SessionEvent] = []
        backend = ServerBackend(Own(command), ladder=SHORT)
        with trio.fail_after(30), cancelled_after(steps) as scope:
            await backend.run(ModelConfig(parrot.path), told.append)
        # Before the spawn nothing is told at all.
        assert [event for event in told if isinstance(event, Ended)] == told[-1:]
        assert sum(isinstance(event, Opened) for event in told) <= 1
        assert backend.pid is None
        assert processes_with(mark) == []
        if not scope.cancelled_caught:
            assert steps > 5
            return


# -- through the provider ----------------------------------------------------------------------


async def wait_loading(provider: LocalProvider) -> None:
    """Wait for the first record of a load, or its end."""
    async for status in provider.watch():
        if status.phase is Phase.STARTED or (status.progress and status.progress.stage):
            return


async def test_an_unload_is_no_failure_whatever_the_exit_code(parrot: Parrot) -> None:
    # https://github.com/ggml-org/llama.cpp/issues/23257
    with trio.fail_after(30):
        child = Own(fakechild.command("S ready", "R", "X 1"))
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            assert provider.diagnostics().last_exit is None
            await provider.start()
            await provider.stop()
            await provider.unload_model()
            end = provider.diagnostics().last_exit
            assert end is not None
            assert end.returncode == 1
            assert end.asked
            assert provider.failure is None
            assert provider.diagnostics().counters.unloads == 1


async def test_three_unloads_at_once_write_one_exit_line(parrot: Parrot) -> None:
    # https://github.com/ggml-org/llama.cpp/pull/22452
    code = NOTES_ITS_STDIN.replace("STATE", "ready")
    with trio.fail_after(30):
        child = Own((sys.executable, "-c", code))
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            await provider.start()
            await provider.stop()
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(provider.unload_model)
            end = provider.diagnostics().last_exit
            assert end is not None
            assert end.tail.split()[1:] == ["cmd_router_to_child:exit"]


async def test_death_is_told_to_every_waiter_with_its_signal(parrot: Parrot) -> None:
    # https://github.com/ggml-org/llama.cpp/pull/24038
    with trio.fail_after(30):
        child = Own(fakechild.command("S loading", "H hang", "S ready", "W 0.5", "K SEGV"))
        config = ModelConfig(parrot.path, slots=2)
        async with open_provider(config, backend=child, policy=NO_RESTARTS) as provider:
            await provider.start()
            replies = [provider.submit(completion_request("x")) for _ in range(5)]
            for reply in replies:
                with pytest.raises(RequestFailed, match="SIGSEGV") as caught:
                    await reply.result()
                assert isinstance(caught.value.__cause__, ChildDied)
            assert isinstance(provider.failure, ChildDied)


# -- real children -----------------------------------------------------------------------------


async def end_while_loading(provider: LocalProvider) -> tuple[Exit, float]:
    """Start, and unload at the first record; return the exit and the seconds it took."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(start_in_vain, provider)
        await wait_loading(provider)
        began = trio.current_time()
        await provider.stop()
        await provider.unload_model()
        seconds = trio.current_time() - began
    end = provider.diagnostics().last_exit
    assert end is not None
    return end, seconds


async def start_in_vain(provider: LocalProvider) -> None:
    with suppress(StartInterrupted):
        await provider.start()


async def test_a_real_child_is_ended_by_SIGTERM_while_it_loads(kind: Kind, large: Parrot) -> None:
    # https://github.com/ggml-org/llama.cpp/pull/25528: an exit line would not be read yet.
    with trio.fail_after(60):
        async with open_provider(ModelConfig(large.path), backend=kind) as provider:
            end, seconds = await end_while_loading(provider)
            while end.ready:  # the load was faster than we were
                end, seconds = await end_while_loading(provider)
            assert end.signal == "SIGTERM"
            assert end.asked
            assert seconds < 1
            assert provider.failure is None


async def kill_while_loading(provider: LocalProvider) -> LoadFailed | None:
    """Start, and kill at the first record; return what the start raised."""
    error = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill_when_loading, provider)
        try:
            await provider.start()
        except LoadFailed as exc:
            error = exc
        else:
            await reach(provider, Phase.UNLOADED)
    return error


async def kill_when_loading(provider: LocalProvider) -> None:
    await wait_loading(provider)
    kill_child(provider)


async def test_a_real_child_that_is_killed_while_it_loads_fails_the_start(
    kind: Kind, large: Parrot
) -> None:
    with trio.fail_after(60):
        config = ModelConfig(large.path)
        async with open_provider(config, backend=kind, policy=NO_RESTARTS) as provider:
            error = None
            while error is None:  # the load may be faster than we are
                error = await kill_while_loading(provider)
            assert error.returncode == -signal.SIGKILL
            assert "SIGKILL (possibly out of memory)" in str(error)
            assert large.path.name in str(error)
            assert provider.phase is Phase.UNLOADED


async def test_a_real_child_that_is_killed_while_it_loads_is_followed_by_another(
    kind: Kind, large: Parrot
) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(large.path), backend=kind) as provider:
            while provider.diagnostics().counters.failed_loads == 0:
                await provider.stop()  # the load was faster than we were
                await provider.unload_model()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(kill_when_loading, provider)
                    await provider.start()
            reply = provider.submit(completion_request("x", max_tokens=1))
            assert (await reply.result()).outcome.tokens == 1
            assert provider.failure is None


async def test_a_real_child_that_is_killed_when_ready_is_a_failure(
    kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(60):
        config = ModelConfig(parrot.path)
        async with open_provider(config, backend=kind, policy=NO_RESTARTS) as provider:
            await provider.start()
            kill_child(provider)
            await reach(provider, Phase.UNLOADED)
            assert isinstance(provider.failure, ChildDied)
            assert provider.failure.exit is not None
            assert provider.failure.exit.signal == "SIGKILL"
            assert provider.failure.exit.ready
            assert not provider.failure.exit.asked
            assert "possibly out of memory" in str(provider.failure)


async def test_a_real_child_that_is_killed_when_ready_is_followed_by_another(
    kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            await provider.start()
            first = provider.diagnostics().pid
            kill_child(provider)
            await reach(provider, Phase.LOADING)
            await provider.start()
            assert provider.diagnostics().pid not in (first, None)
            assert provider.diagnostics().counters.restarts == 1
            reply = provider.submit(completion_request("x", temperature=0))
            assert (await reply.result()).text == parrot.text


async def test_a_real_child_that_is_killed_in_mid_stream_fails_the_request(
    kind: Kind, endless: Parrot
) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(endless.path), backend=kind) as provider:
            await provider.start()
            reply = provider.submit(completion_request("x", max_tokens=4000))
            text = aiter(reply)
            assert await anext(text)
            kill_child(provider)
            with pytest.raises(RequestFailed, match="SIGKILL") as caught:
                async for _ in text:
                    pass
            assert isinstance(caught.value.__cause__, ChildDied)
            assert caught.value.outcome.phase == "generating"
            assert caught.value.outcome.tokens > 0


def kill_child(provider: LocalProvider) -> None:
    pid = provider.diagnostics().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def resident(kind: Kind, parrot: Parrot) -> AsyncGenerator[int, None]:
    """Have a loaded real child; its number."""
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            await provider.start()
            pid = provider.diagnostics().pid
            assert pid is not None
            yield pid


async def test_a_real_child_leads_a_session_that_no_Ctrl_C_of_ours_reaches(
    kind: Kind, parrot: Parrot
) -> None:
    # https://github.com/nibor1896/Crow/issues/158
    async with resident(kind, parrot) as pid:
        assert os.getsid(pid) == os.getpgid(pid) == pid


async def test_a_real_child_may_not_dump_core(kind: Kind, parrot: Parrot) -> None:
    async with resident(kind, parrot) as pid:
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()  # noqa: ASYNC240
        [core] = [line for line in limits if line.startswith("Max core file size")]
        assert core.split()[4:6] == ["0", "0"]


STRAY = ("LLAMA_API_KEY", "LLAMA_ARG_PORT", "LLAMA_ARG_SSL_KEY_FILE", "LLAMA_LOG_FILE", "HF_TOKEN")


async def test_the_key_of_a_real_child_is_in_its_environment_alone(
    kind: Kind, parrot: Parrot, monkeypatch: pytest.MonkeyPatch
) -> None:
    # https://github.com/ollama/ollama/issues/17822, llama.cpp/issues/24388 and MyLlama/issues/31
    for name in STRAY:
        monkeypatch.setenv(name, "stray")
    async with resident(kind, parrot) as pid:
        block = Path(f"/proc/{pid}/environ").read_text()  # noqa: ASYNC240
        environ = dict(item.split("=", 1) for item in block.split("\0") if item)
        assert {name for name in environ if "LLAMA" in name} == {
            "LLAMA_API_KEY",
            "LLAMA_SERVER_ROUTER_PORT",
            *(["LLAMATRIO_PARENT"] if isinstance(kind, Hosted) else []),
        }
        assert "HF_TOKEN" not in environ
        assert "stray" not in environ.values()
        assert environ["PATH"] == os.environ["PATH"]
        key = environ["LLAMA_API_KEY"]
        assert len(key) == 64
        assert key not in Path(f"/proc/{pid}/cmdline").read_text()  # noqa: ASYNC240
        assert key not in os.environ.values()


async def test_a_real_child_has_no_TCP_socket_and_one_unix_listener(
    kind: Kind, parrot: Parrot
) -> None:
    async with resident(kind, parrot) as pid:
        tree = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        rows = [row for process in tree for row in sockets_of(process)]
        assert [row for name, row in rows if name != "unix"] == []
        assert len({row[-1] for _, row in rows if row[-1].startswith("/")}) == 1


def sockets_of(pid: int) -> list[tuple[str, list[str]]]:
    """Look up the sockets that a process holds, in its own network, which may not be ours."""
    fds = Path(f"/proc/{pid}/fd")
    held = {os.readlink(fd).removeprefix("socket:[").rstrip("]") for fd in fds.iterdir()}
    return [
        (table.name, line.split())
        for table in map(Path(f"/proc/{pid}/net").joinpath, ("tcp", "tcp6", "udp", "udp6", "unix"))
        for line in table.read_text().splitlines()[1:]
        if held & set(line.split())
    ]


async def unload_times(kind: Kind, parrot: Parrot, times: int) -> list[float]:
    """Start a child and unload it at its READY, again and again."""
    seconds = []
    for _ in range(times):
        with trio.fail_after(60):
            async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
                await provider.start()
                await provider.stop()
                began = trio.current_time()
                await provider.unload_model()
                seconds.append(trio.current_time() - began)
                end = provider.diagnostics().last_exit
                assert end is not None
                assert end.returncode == 0, end
    return seconds


def longest_unload(kind: Kind) -> float:
    # A stock child may lose the exit line, and is then ended by SIGTERM, in some milliseconds.
    return 0.05 + 1.5 + 0.3 if isinstance(kind, Stock) else 0.2


async def test_five_unloads_at_READY(kind: Kind, parrot: Parrot) -> None:
    assert max(await unload_times(kind, parrot, 5)) < longest_unload(kind)


@pytest.mark.slow
async def test_a_hundred_unloads_at_READY(kind: Kind, parrot: Parrot) -> None:
    seconds = sorted(await unload_times(kind, parrot, 100))
    print_figures(kind, seconds)
    assert seconds[-1] < longest_unload(kind)


def print_figures(kind: Kind, seconds: Iterable[float]) -> None:
    *_, last = ordered = sorted(seconds)
    sys.stdout.write(f"{kind}: median {ordered[len(ordered) // 2]:.3f} s, longest {last:.3f} s\n")


class Hasty:
    """Cancels a generation in the moment in which its model is ready."""

    def __init__(self, scope: trio.CancelScope) -> None:
        self._scope = scope
        self.opened = 0.0
        self.end: Ended | None = None

    def publish(self, event: SessionEvent) -> None:
        if isinstance(event, Opened):
            self.opened = trio.current_time()
            self._scope.cancel()
        elif isinstance(event, Ended):
            self.end = event


@pytest.mark.stock
async def test_an_exit_line_that_a_stock_child_loses_is_made_up_for_by_SIGTERM(
    llama_server: str, parrot: Parrot
) -> None:
    seconds = []
    for _ in range(20):
        backend = ServerBackend(Stock(llama_server), ladder=Ladder(settle=0.0))
        scope = trio.CancelScope()
        hasty = Hasty(scope)
        with trio.fail_after(60), scope:
            await backend.run(ModelConfig(parrot.path), hasty.publish)
        seconds.append(trio.current_time() - hasty.opened)
        assert hasty.end is not None
        assert hasty.end.error is None
        assert hasty.end.exit is not None
        assert hasty.end.exit.returncode == 0
    print_figures(Stock(llama_server), seconds)
    assert max(seconds) < 1.5 + 1
