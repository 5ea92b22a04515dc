"""What broke elsewhere: conditions from public bug reports, each with its link.

Those that another test covers in full have their link there.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import trio
from killing import kill, opened, pid_of
from moments import reach
from programs.cycle import balanced
from trio.testing import MockClock

from llamatrio import (
    NO_RESTARTS,
    ChildDied,
    ChildSilent,
    Ladder,
    LocalProvider,
    ModelConfig,
    NoHandshake,
    Own,
    Phase,
    Policy,
    ProviderBroken,
    Reply,
    ServerBackend,
    Stock,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Bounds, Kind
from llamatrio.outcomes import Cancelled, Failed, Finished
from llamatrio.session.base import LoadProgress, Publish
from llamatrio.testing import ScriptedBackend, fakechild, open_scripted_provider
from llamatrio.testing.parrot import Parrot

if sys.platform != "linux":
    pytest.skip("looks at /proc", allow_module_level=True)

ASK = completion_request("x")
ON_AND_ON = completion_request("Hello", max_tokens=3000, temperature=0)


# -- loading -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.stock
async def test_a_stock_child_without_a_model_never_says_a_word_and_is_ended(
    llama_server: str, parrot: Parrot
) -> None:
    # https://github.com/ggml-org/llama.cpp/issues/27351: it is a router then, and serves HTTP. The
    # options that we give are dropped by the shell, all but its socket.
    script = 'while [ "$1" != --host ]; do shift; done; exec "$0" --host "$2"'
    child = Own(("/bin/sh", "-c", script, llama_server))
    backend = ServerBackend(child, bounds=Bounds(handshake=1.0))
    with trio.fail_after(60):
        config = ModelConfig(parrot.path)
        async with open_provider(config, backend=backend, policy=NO_RESTARTS) as provider:
            with pytest.raises(NoHandshake, match="no lifecycle record within 1 s") as caught:
                await provider.start()
            assert caught.value.stderr_tail


class Plodding(ScriptedBackend):
    """Gets on with its load every ten seconds; the first of its loads fails."""

    def __init__(self) -> None:
        super().__init__("at last")
        self.lives = 0

    async def run(self, config: Any, publish: Publish) -> None:  # noqa: ANN401 - as it comes
        self.lives += 1
        if self.lives == 1:
            raise ChildDied("not this time")
        for tenth in range(10):
            publish(LoadProgress(tenth / 10))
            await trio.sleep(10)
        await super().run(config, publish)


async def test_a_load_of_100_s_that_gets_on_is_not_given_up_and_a_failed_one_is_not_the_last(
    autojump_clock: MockClock,
) -> None:
    # https://github.com/mostlygeek/llama-swap/issues/92
    async with open_scripted_provider(Plodding(), policy=Policy(load_stall=15)) as provider:
        began = trio.current_time()
        await provider.start()
        assert 100 <= trio.current_time() - began < 130
        assert (await provider.submit(ASK).result()).text == "at last"
        assert provider.diagnostics().counters.failed_loads == 1


# -- requests ----------------------------------------------------------------------------------


@asynccontextmanager
async def noted(
    parrot: Parrot, directory: Path, *steps: str
) -> AsyncGenerator[tuple[LocalProvider, Callable[[], Any]], None]:
    """Have a fake child started, and read what it notes of its requests, one by one."""
    log = directory / "log"
    os.mkfifo(log)
    config = ModelConfig(parrot.path, env={"FAKECHILD_LOG": str(log)})
    with trio.fail_after(30):
        async with (
            trio.lowlevel.FdStream(os.open(log, os.O_RDWR)) as stream,
            open_provider(config, backend=Own(fakechild.command(*steps))) as provider,
        ):
            lines: list[bytes] = []

            async def note() -> Any:  # noqa: ANN401 - JSON
                while not lines:
                    lines.extend(bytes(await stream.receive_some()).splitlines())
                return json.loads(lines.pop(0))

            await provider.start()
            yield provider, note


async def test_a_cancelled_stream_is_closed_at_once(parrot: Parrot, tmp_path: Path) -> None:
    # https://github.com/ggml-org/llama.cpp/issues/24496
    steps = ("H stream 1000000 0.005", "S ready", "R")
    async with noted(parrot, tmp_path, *steps) as (provider, note):
        reply = provider.submit(ASK)
        assert (await note())["path"] == "/completion"
        await reply.read(2)
        began = trio.current_time()
        reply.cancel()
        closed = await note()
        assert trio.current_time() - began < 0.2
        assert closed["closed"]
        assert closed["events"] >= 2
        assert reply.outcome == Cancelled("caller", "generating", reply.tokens)


@pytest.mark.slow
async def test_cancelled_requests_that_wait_never_reach_the_child(
    parrot: Parrot, tmp_path: Path
) -> None:
    # https://github.com/ggml-org/llama.cpp/issues/13262
    steps = ("H late", "S ready", "Q", "W 0.1", "A", "R")
    async with noted(parrot, tmp_path, *steps) as (provider, note):
        replies = [provider.submit(ASK) for _ in range(20)]
        assert (await note())["path"] == "/completion"
        for reply in replies[1:]:
            assert await provider.cancel(reply.id) == Cancelled("caller", "queued", 0)
        assert isinstance(await replies[0].wait(), Finished)
        last = provider.submit(completion_request("the last"))
        assert isinstance(await last.wait(), Finished)
        assert (await note())["body"]["prompt"] == "the last"


async def test_an_unload_beside_an_open_stream_closes_it_before_the_exit_line(
    parrot: Parrot, tmp_path: Path
) -> None:
    # https://github.com/withcatai/node-llama-cpp/issues/631; b11434 does not obey before
    # that. The fake child leaves at its exit line: what it has noted by then came earlier.
    steps = ("H stream 1000 0.005", "S ready", "R", "X 0")
    async with noted(parrot, tmp_path, *steps) as (provider, note):
        reply = provider.submit(ASK)
        assert (await note())["path"] == "/completion"
        await reply.read(2)
        await provider.stop()
        await provider.unload_model()
        assert (await note())["closed"]
        end = provider.diagnostics().last_exit
        assert end is not None
        assert end.returncode == 0


@pytest.mark.slow
async def test_a_cancelled_request_is_off_its_slot_while_another_streams(
    kind: Kind, endless: Parrot
) -> None:
    # https://github.com/ggml-org/llama.cpp/issues/9273: in b11434 the server looks once in a second
    # whether its client has left, and each result of another task puts that off.
    config = ModelConfig(endless.path, slots=2, threads=1)
    async with opened(kind, config) as provider:
        await provider.start()
        other, reply = provider.submit(ON_AND_ON), provider.submit(ON_AND_ON)
        await other.read(2)
        await reply.read(2)
        began = trio.current_time()
        await provider.cancel(reply.id)
        third = provider.submit(ON_AND_ON)
        await third.read(0)
        assert trio.current_time() - began < 1
        assert other.outcome is None


@pytest.mark.slow
async def test_a_model_that_answers_for_long_does_not_fall_asleep(
    kind: Kind, endless: Parrot
) -> None:
    # https://github.com/mudler/LocalAI/issues/5221
    async with opened(kind, ModelConfig(endless.path, threads=1, sleep_after=1)) as provider:
        await provider.start()
        reply = provider.submit(ON_AND_ON)
        await reply.read(2)
        with trio.move_on_after(2.5):
            async for status in provider.watch():
                assert status.residency == "resident"
        assert reply.outcome is None
        reply.cancel()
        async for status in provider.watch():
            if status.residency == "asleep":
                break


@pytest.mark.slow
async def test_a_child_that_is_well_but_never_answers_is_replaced(parrot: Parrot) -> None:
    # https://github.com/ollama/ollama/issues/17428
    child = Own(fakechild.command("H hang", "S ready", "R", "X 0"))
    policy = Policy(silence=0.4, fruitless=2, backoff=0.0)
    async with opened(child, ModelConfig(parrot.path), policy) as provider:
        await provider.start()
        for _ in range(2):
            outcome = await provider.submit(ASK).wait()
            assert isinstance(outcome, Failed)
            assert isinstance(outcome.error, ChildSilent)
        await reach(provider, Phase.UNLOADED)
        assert provider.diagnostics().counters.generations == 2
        began = trio.current_time()
        await provider.stop()
        await provider.unload_model()
        assert trio.current_time() - began < 1


class Breaking:
    """Raises at one of the lines that run in one file, counted from the first request."""

    def __init__(self, file: str, number: int) -> None:
        self._file = file
        self._left = number
        self.struck = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:  # noqa: ANN401
        if frame.f_code.co_filename != self._file:
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0 and not self.struck:
                self.struck = True
                raise ZeroDivisionError
        return self


@pytest.mark.slow
def test_an_error_at_any_line_between_the_queue_and_the_answer_leaves_no_caller_waiting() -> None:
    # https://github.com/jundot/omlx/pull/1315
    import llamatrio.lifecycle.work as work

    async def ask(breaking: Breaking) -> None:
        replies: list[Reply] = []
        try:
            async with open_scripted_provider(ScriptedBackend("a b c")) as provider:
                await provider.start()
                sys.settrace(breaking)
                replies += [provider.submit(ASK) for _ in range(2)]
                with trio.fail_after(1000):
                    await replies[0].wait()
        except (ProviderBroken, ZeroDivisionError):
            assert breaking.struck
        finally:
            sys.settrace(None)
        assert None not in [reply.outcome for reply in replies]

    for number in itertools.count():
        breaking = Breaking(work.__file__, number)
        trio.run(ask, breaking, clock=MockClock(autojump_threshold=0))
        if not breaking.struck:
            assert number > 50
            return


# -- the end -----------------------------------------------------------------------------------


class Signals:
    """Notes whom we send signals to, and lets them through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[int] = []
        for name in ("kill", "killpg"):
            monkeypatch.setattr(os, name, self._noting(getattr(os, name)))

    def _noting(self, send: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def noting(pid: int, number: int) -> None:
            self.sent.append(pid)
            send(pid, number)

        return noting


@pytest.mark.parametrize("late", [False, True], ids=["before", "at the exit line"])
async def test_unloads_beside_a_crash_all_return_and_signals_go_to_the_child_alone(
    late: bool, parrot: Parrot, monkeypatch: pytest.MonkeyPatch
) -> None:
    # https://github.com/ggml-org/llama.cpp/pull/22452
    signals = Signals(monkeypatch)
    child = Own(fakechild.command("S ready", "R", "K SEGV" if late else "X 0"))
    async with opened(child, ModelConfig(parrot.path)) as provider:
        await provider.start()
        await provider.stop()
        pid = pid_of(provider)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(provider.unload_model)
            if not late:
                kill(provider)
        end = provider.diagnostics().last_exit
        assert end is not None
        assert (end.pid, end.signal) == (pid, "SIGSEGV" if late else "SIGKILL")
        assert provider.diagnostics().counters.generations == 1
        assert balanced(provider._actor)
    assert set(signals.sent) == {pid}


@pytest.mark.slow
async def test_a_signal_that_must_not_be_sent_leads_to_the_next_rung(
    parrot: Parrot, monkeypatch: pytest.MonkeyPatch
) -> None:
    # https://github.com/thomas9120/LLama-GUI/pull/253; here the program has changed its user, say
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    child = Own(fakechild.command("S ready", "R!", "W 99"))
    async with opened(child, ModelConfig(parrot.path)) as provider:
        await provider.start()
        await provider.stop()
        monkeypatch.setattr(os, "kill", refuse)
        await provider.unload_model()
        end = provider.diagnostics().last_exit
        assert end is not None
        assert (end.signal, end.asked) == ("SIGKILL", True)


@pytest.mark.slow
async def test_a_model_that_is_slow_to_end_delays_no_other(parrot: Parrot) -> None:
    # https://github.com/mudler/LocalAI/pull/10578
    stuck = Own(fakechild.command("I TERM", "H hang", "S ready", "R!", "W 99"))
    serves = Own(fakechild.command("H ok", "S ready", "R", "X 0"))
    config = ModelConfig(parrot.path)
    backend = ServerBackend(stuck, ladder=Ladder(exit=0.4, terminate=0.4))
    with trio.fail_after(30):
        async with (
            open_provider(config, backend=backend) as first,
            open_provider(config, backend=serves) as second,
            trio.open_nursery() as nursery,
        ):
            await first.start()
            reply = first.submit(ASK)
            await first.stop()
            assert isinstance(reply.outcome, Cancelled)
            nursery.start_soon(first.unload_model)
            await reach(first, Phase.UNLOADING)
            await second.start()
            assert isinstance(await second.submit(ASK).wait(), Finished)
            assert first.phase is Phase.UNLOADING


def cut_stdin(pid: int) -> None:
    """Let a child see the end of its stdin: close the one pipe of it that we can write to."""
    theirs = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{fd}")
            writes = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
            if link.startswith("pipe:") and link in theirs and writes:
                os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)


@pytest.mark.slow
async def test_a_child_whose_stdin_ends_in_mid_stream_is_gone_whatever_its_exit_code(
    kind: Kind, endless: Parrot
) -> None:
    # b11434 leaves by exit(1) under its own threads: most of the time that is a SIGSEGV.
    async with opened(kind, ModelConfig(endless.path, threads=1), NO_RESTARTS) as provider:
        await provider.start()
        reply = provider.submit(ON_AND_ON)
        await reply.read(2)
        cut_stdin(pid_of(provider))
        outcome = await reply.wait()
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, ChildDied)
        await reach(provider, Phase.UNLOADED)
        end = provider.diagnostics().last_exit
        assert end is not None
        assert not end.asked


# -- the environment, the log ------------------------------------------------------------------


async def test_a_key_and_certificates_for_another_server_do_not_reach_ours(
    kind: Kind, parrot: Parrot, monkeypatch: pytest.MonkeyPatch
) -> None:
    # https://github.com/ollama/ollama/issues/17822 and llama.cpp/issues/24388
    monkeypatch.setenv("LLAMA_API_KEY", "another")
    monkeypatch.setenv("LLAMA_ARG_SSL_KEY_FILE", "/another/key")
    monkeypatch.setenv("LLAMA_ARG_SSL_CERT_FILE", "/another/certificate")
    async with opened(kind, ModelConfig(parrot.path, threads=1)) as provider:
        await provider.start()
        result = await provider.submit(completion_request("x", temperature=0)).result()
        assert result.text == parrot.text


class Stuck(logging.Handler):
    """Never comes back from its first line until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.free.wait()


@pytest.mark.slow
@pytest.mark.stock
async def test_a_stock_child_with_all_its_log_and_a_reader_that_is_stuck_answers_and_leaves(
    llama_server: str, parrot: Parrot
) -> None:
    # https://github.com/anthropics/claude-agent-sdk-python/pull/103; b11434 answers no request and
    # obeys no exit line once 64 KiB of its log wait in the pipe.
    logger, stuck = logging.getLogger("llamatrio.child.verbose"), Stuck()
    logger.addHandler(stuck)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    config = ModelConfig(parrot.path, threads=1, args=("-lv", "5"))
    try:
        with trio.fail_after(60):
            async with open_provider(
                config, backend=Stock(llama_server), name="verbose"
            ) as provider:
                await provider.start()
                for _ in range(6):
                    reply = provider.submit(completion_request("x", temperature=0))
                    assert (await reply.result()).text == parrot.text
                await provider.stop()
                await provider.unload_model()
                assert provider.diagnostics().pipes.stderr_bytes > 2**16
                end = provider.diagnostics().last_exit
                assert end is not None
                assert end.returncode == 0
                stuck.free.set()
    finally:
        stuck.free.set()
        logger.removeHandler(stuck)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
