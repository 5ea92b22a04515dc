"""Signs of life: a model that works shows some, one that hangs or rests does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from llamatrio import ModelConfig, ModelSession, Own, ServerBackend, completion_request
from llamatrio.child.cpu import cpu_hundredths
from llamatrio.child.launch import Kind
from llamatrio.requests import Admitted, Delta, PromptProgress
from llamatrio.session.base import Backend, Emit, LoadProgress, Opened, SessionEvent
from llamatrio.session.identity import take_identity
from llamatrio.testing import ScriptedBackend, fakechild
from llamatrio.testing.parrot import Parrot

if sys.platform != "linux":
    pytest.skip("looks at /proc", allow_module_level=True)

ON_AND_ON = completion_request("Hello", max_tokens=100_000)
BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"


class Life:
    """One life of a model, run without the lifecycle."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.loading, self.opened = trio.Event(), trio.Event()
        self.session: ModelSession

    def publish(self, event: SessionEvent) -> None:
        match event:
            case LoadProgress():
                self.loading.set()
            case Opened():
                self.session = event.session
                self.opened.set()
            case _:
                pass

    @property
    def pid(self) -> int:
        assert self.backend.pid is not None
        return self.backend.pid

    @property
    def cpu(self) -> int:
        cpu = cpu_hundredths(self.pid)
        assert cpu is not None
        return cpu


@asynccontextmanager
async def living(backend: Backend, config: ModelConfig) -> AsyncGenerator[Life, None]:
    life = Life(backend)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(backend.run, config, life.publish)
            yield life
            nursery.cancel_scope.cancel()


class Pieces:
    """Takes the pieces of an answer, and lets a test wait for some."""

    def __init__(self) -> None:
        self.count = 0
        self._news = trio.lowlevel.ParkingLot()

    def take(self, piece: Admitted | Delta | PromptProgress) -> None:
        self.count += isinstance(piece, Delta)
        self._news.unpark_all()

    async def wait_for(self, more: int) -> None:
        enough = self.count + more
        while self.count < enough:
            await self._news.park()


async def perform(life: Life, emit: Emit) -> None:
    await life.session.perform(ON_AND_ON, emit)


# -- real children -----------------------------------------------------------------------------


async def test_a_child_that_loads_shows_signs_of_life(kind: Kind, large: Parrot) -> None:
    backend = ServerBackend(kind)
    async with living(backend, ModelConfig(large.path, threads=1)) as life:
        await life.loading.wait()
        before, cpu = backend.signs_of_life(), life.cpu
        await life.opened.wait()
        assert backend.signs_of_life() != before
        assert life.cpu > cpu  # for itself: a load may be silent


@pytest.mark.slow
async def test_a_child_that_generates_shows_signs_of_life_and_a_stopped_one_does_not(
    kind: Kind, endless: Parrot
) -> None:
    backend, pieces = ServerBackend(kind), Pieces()
    async with living(backend, ModelConfig(endless.path, threads=1)) as life:
        await life.opened.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(perform, life, pieces.take)
            await pieces.wait_for(1)
            before, cpu = backend.signs_of_life(), life.cpu
            await pieces.wait_for(20)
            assert backend.signs_of_life() != before
            assert life.cpu > cpu

            with stopped(life.pid):
                await wait_all_tasks_blocked(0.1)  # what it had written has been read
                before = backend.signs_of_life()
                for _ in range(4):
                    await trio.sleep(0.5)
                    assert backend.signs_of_life() == before

            await pieces.wait_for(20)
            assert backend.signs_of_life() != before
            nursery.cancel_scope.cancel()


@contextmanager
def stopped(pid: int) -> Generator[None, None, None]:
    process = psutil.Process(pid)
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        pass  # a thread of it still runs
    try:
        yield
    finally:
        process.resume()


@pytest.mark.slow
async def test_a_child_that_rests_shows_a_sign_of_life_once_in_a_while_at_most(
    kind: Kind, parrot: Parrot
) -> None:
    # It wakes up now and then: measured is a hundredth of a second in one to three minutes.
    backend = ServerBackend(kind)
    async with living(backend, ModelConfig(parrot.path, threads=1)) as life:
        await life.opened.wait()
        await life.session.perform(completion_request("Hello"), lambda _: None)
        await trio.sleep(1)  # the end of an answer costs some more, and is not rest
        seen = {backend.signs_of_life()}
        for _ in range(8):
            await trio.sleep(0.5)
            seen.add(backend.signs_of_life())
        assert len(seen) <= 2


async def test_a_log_and_a_record_are_signs_of_life(parrot: Parrot) -> None:
    child = Own(fakechild.command("S loading", "H late", "S ready", "Q", "E hm", "A", "R"))
    backend = ServerBackend(child)
    async with living(backend, ModelConfig(parrot.path)) as life:
        before = backend.signs_of_life()
        await life.loading.wait()
        loading = backend.signs_of_life()
        assert loading != before
        await life.opened.wait()
        _, stdout, stderr, _ = as_tuple(backend.signs_of_life())
        await life.session.perform(completion_request("Hello"), lambda _: None)
        while as_tuple(backend.signs_of_life())[2] == stderr:  # noqa: ASYNC110 - of another task
            await trio.lowlevel.checkpoint()
        assert as_tuple(backend.signs_of_life())[1] == stdout


def as_tuple(signs: object) -> tuple[object, ...]:
    assert isinstance(signs, tuple)
    return signs


async def test_reading_a_pinned_model_is_a_sign_of_life(parrot: Parrot) -> None:
    backend = ServerBackend()
    before = backend.signs_of_life()
    (file,) = take_identity(ModelConfig(parrot.path))
    await backend._digests.mismatch(file, "0" * 64)
    assert backend.signs_of_life() != before


def test_a_backend_without_a_child_shows_none() -> None:
    backend = ServerBackend()
    assert backend.signs_of_life() == backend.signs_of_life()
    assert hash(backend.signs_of_life()) == hash(backend.signs_of_life())


# -- CPU time ----------------------------------------------------------------------------------


@contextmanager
def session(*command: str) -> Generator[subprocess.Popen[bytes], None, None]:
    """Run a program in a session of its own, which says something when it has done its work."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"done\n"
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def burn(seconds: float, after: str) -> tuple[str, ...]:
    return (sys.executable, "-c", BURN.format(seconds=seconds) + after)


SAY = "print('done', flush=True)\n"


def test_the_time_of_a_grandchild_counts() -> None:
    command = burn(0.3, SAY + "time.sleep(60)")
    with session("/bin/sh", "-c", '"$@" & wait', "sh", *command) as process:
        assert 25 <= (cpu_hundredths(process.pid) or 0) < 100


def test_the_time_of_a_grandchild_that_has_ended_still_counts() -> None:
    with session("/bin/sh", "-c", '"$@"; echo done; read x', "sh", *burn(0.3, "")) as process:
        assert 25 <= (cpu_hundredths(process.pid) or 0) < 100


def test_the_time_of_a_process_elsewhere_does_not_count() -> None:
    apart = "import subprocess, sys\nsubprocess.Popen(sys.argv[1:], start_new_session=True).wait()"
    command = (sys.executable, "-c", apart, *burn(0.5, SAY + "input()"))
    with session(*command) as process:
        assert (cpu_hundredths(process.pid) or 0) < 45


def test_a_name_may_hold_anything(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b\nc"
    program.symlink_to("/bin/sh")
    with session(str(program), "-c", "echo done; read x") as process:
        assert Path(f"/proc/{process.pid}/comm").read_text().startswith("a) R 1 (b")
        assert cpu_hundredths(process.pid) in range(20)


def test_the_time_of_a_process_that_is_not_there_is_not_known() -> None:
    with session("/bin/sh", "-c", "echo done; read x") as process:
        pass
    assert cpu_hundredths(process.pid) is None
    assert cpu_hundredths(-1) is None


# -- the scripted backend ----------------------------------------------------------------------


async def test_a_scripted_model_shows_signs_of_life_while_it_works(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend("one two three", load_time=10, prompt_time=10)
    async with living(backend, ModelConfig("x")) as life:
        await trio.sleep(5)
        assert backend.signs_of_life() != backend.signs_of_life()
        await life.opened.wait()
        assert backend.signs_of_life() == backend.signs_of_life()
        backend.alive = True
        assert backend.signs_of_life() != backend.signs_of_life()
        backend.alive = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(perform, life, lambda _: None)
            await trio.sleep(5)
            assert backend.signs_of_life() != backend.signs_of_life()
        assert backend.signs_of_life() == backend.signs_of_life()


async def test_a_scripted_load_that_hangs_is_silent(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend()
    backend.hang_next_load()
    async with living(backend, ModelConfig("x")) as life:
        await trio.sleep(30)
        assert not life.opened.is_set()
        assert backend.signs_of_life() == backend.signs_of_life()
        backend.alive = True
        assert backend.signs_of_life() != backend.signs_of_life()
    async with living(backend, ModelConfig("x")) as life:
        await life.opened.wait()
        assert backend.loads == 1


@pytest.mark.parametrize(("after", "count"), [(0, 0), (2, 2), (9, 3)])
async def test_a_scripted_answer_hangs_after_some_pieces(
    autojump_clock: MockClock, after: int, count: int
) -> None:
    backend, pieces = ScriptedBackend("one two three"), Pieces()
    backend.hang_next_answer(after=after)
    async with living(backend, ModelConfig("x")) as life:
        await life.opened.wait()
        with trio.move_on_after(30) as scope:
            await perform(life, pieces.take)
        assert scope.cancelled_caught
        assert pieces.count == count
        await perform(life, pieces.take)
        assert pieces.count == count + 3
