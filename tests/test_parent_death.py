"""The application is killed: its child is gone within a second, whatever either was doing."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest
import trio
from users import NOBODY, PYTHON, need, public

from llamatrio import Hosted, ModelConfig, Own, Stock, open_provider
from llamatrio.child.launch import Kind
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot

if sys.platform != "linux":
    pytest.skip("run on Linux alone", allow_module_level=True)

PROGRAMS = Path(__file__).parent / "programs"
__all__ = ["public"]  # a fixture
MOMENTS = ("spawning", "loading", "idle", "prompt", "generating", "sleeping", "stopping")


@pytest.fixture
def place(own_temporary_directory: Path) -> Iterator[Path]:
    """A directory for what applications leave behind that were killed."""
    directory = own_temporary_directory / secrets.token_hex(4)
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def bare_path(place: Path) -> dict[str, str]:
    """An environment in which there is nothing of util-linux."""
    (place / "bin").mkdir()
    return {**os.environ, "PATH": str(place / "bin")}


@attrs.frozen
class Death:
    """What became of the child of an application that was killed.

    Attributes:
      seconds: How long it lived on.
      isolation: What the application said of it.
      descendants: What it had started itself.
    """

    seconds: float
    isolation: Mapping[str, object]
    descendants: tuple[int, ...]


def words_of(kind: Kind) -> list[str]:
    match kind:
        case Own(command=command):
            return list(command)
        case Stock(program=program):
            return ["stock", str(program)]
        case _:
            return ["hosted"]


async def kill_application(
    moment: str,
    kind: Kind,
    model: Parrot,
    place: Path,
    environ: Mapping[str, str] | None = None,
    *,
    worker: bool = True,
    before: tuple[str, ...] = (),
) -> Death:
    """Kill an application at a moment, and wait for the end of its child.

    Args:
      before: What the application is run with.
      worker: Whether the application's worker, which holds the child's pipes, lives on meanwhile.
    """
    words = [*before, sys.executable, str(PROGRAMS / "application.py")]
    words += [moment, json.dumps(words_of(kind)), str(model.path), str(place)]
    async with _application(words, environ) as (application, told):
        child, helper = psutil.Process(told["pid"]), psutil.Process(told["worker"])
        descendants = tuple(process.pid for process in child.children(recursive=True))
        try:
            if not worker:
                helper.kill()
                await _ended(helper.pid)
            with _watching(child.pid) as ended:
                application.kill()
                began = trio.current_time()
                await application.wait()
                await ended()
                took = trio.current_time() - began
            assert not worker or helper.is_running()
        finally:
            for process in (child, helper):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
    with trio.fail_after(10):
        await _gone(child.pid, helper.pid)
    return Death(took, told["isolation"], descendants)


@asynccontextmanager
async def _application(
    words: list[str], environ: Mapping[str, str] | None
) -> AsyncGenerator[tuple[trio.Process, Any], None]:
    """Run an application up to the moment, and give it with what it told; it is killed later."""
    with trio.fail_after(60):
        application = await trio.lowlevel.open_process(
            words, stdout=subprocess.PIPE, env=environ and dict(environ)
        )
        try:
            assert application.stdout is not None
            async with application.stdout:
                told = json.loads(bytes(await application.stdout.receive_some()))
            yield application, told
        finally:
            application.kill()
            with trio.CancelScope(shield=True):
                await application.wait()


@contextmanager
def _watching(pid: int) -> Iterator[Callable[[], Awaitable[None]]]:
    """Give a way to wait for the end of a process that is not ours."""
    fd = os.pidfd_open(pid)
    try:
        yield partial(trio.lowlevel.wait_readable, fd)
    finally:
        os.close(fd)


async def _ended(pid: int) -> None:
    with _watching(pid) as ended:
        await ended()


async def _gone(*pids: int) -> None:
    while any(map(psutil.pid_exists, pids)):  # noqa: ASYNC110 - whoever reaps them tells nobody
        await trio.sleep(0.01)


@pytest.mark.slow
async def test_a_child_that_ignores_its_stdin_dies_with_an_application_whose_worker_holds_its_pipes(
    place: Path, parrot: Parrot
) -> None:
    # https://github.com/ollama/ollama/issues/5642 and https://github.com/unslothai/unsloth/pull/6426
    child = Own(fakechild.command("S loading", "W 999"))
    death = await kill_application("loading", child, parrot, place)
    assert death.isolation["parent_death"] == "signal"
    assert death.seconds < 1


@pytest.mark.slow
async def test_so_it_does_where_there_is_nothing_of_util_linux(
    place: Path, parrot: Parrot, bare_path: dict[str, str]
) -> None:
    child = Own(fakechild.command("S loading", "W 999"))
    death = await kill_application("loading", child, parrot, place, bare_path)
    assert death.isolation["parent_death"] == "signal"
    assert death.seconds < 1


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_real_child_dies_with_an_application_that_is_killed_at_any_moment(
    moment: str, kind: Kind, place: Path, large: Parrot, endless: Parrot
) -> None:
    # https://github.com/NousResearch/hermes-agent/issues/110561
    model = large if moment in ("spawning", "loading") else endless
    death = await kill_application(moment, kind, model, place)
    assert death.isolation["parent_death"] == "signal"
    assert death.isolation["network"] == "none"
    assert death.seconds < 1


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["loading", "idle"])
async def test_a_real_child_does_so_where_there_is_nothing_of_util_linux(
    moment: str,
    kind: Kind,
    place: Path,
    large: Parrot,
    endless: Parrot,
    bare_path: dict[str, str],
) -> None:
    model = large if moment == "loading" else endless
    death = await kill_application(moment, kind, model, place, bare_path)
    assert death.isolation["parent_death"] == "signal"
    assert death.isolation["network"] == "none"
    assert death.seconds < 1


@pytest.mark.stock
@pytest.mark.slow
async def test_a_real_child_of_a_user_who_is_not_root_does_so_too(
    llama_server: str, public: Path, endless: Parrot
) -> None:
    # Its network takes a new user name space, and new credentials may undo the signal.
    need(*NOBODY, *PYTHON)
    model = replace(endless, path=Path(shutil.copy(endless.path, public)))
    kind = Stock(llama_server)
    death = await kill_application("idle", kind, model, public / "run", before=NOBODY)
    assert death.isolation["parent_death"] == "signal"
    assert death.isolation["network"] == "none"
    assert death.seconds < 1


# -- before the signal is in force -------------------------------------------------------------


@pytest.mark.slow
async def test_a_child_whose_parent_died_before_it_could_say_so_does_not_begin() -> None:
    marks = {how: f"{600 + secrets.randbelow(10**9) / 10**9:.9f}" for how in TIMES}
    sleep = shutil.which("sleep")
    assert sleep is not None
    starts = [json.dumps([TIMES[how], how, sleep, mark]) for how, mark in marks.items()]
    with trio.fail_after(60):
        await trio.run_process([sys.executable, str(PROGRAMS / "dies_at_once.py"), *starts])
    try:
        with trio.move_on_after(1):
            while _processes_with(marks["programs"], marks["shim"]):  # noqa: ASYNC110
                await trio.sleep(0.01)  # whoever reaps them tells nobody
        left = {how: len(_processes_with(mark)) for how, mark in marks.items()}
        # Those that are run with nothing live on; or the rest would show nothing.
        assert left == {"programs": 0, "shim": 0, "nothing": TIMES["nothing"]}
    finally:
        pids = _processes_with(*marks.values())
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with trio.fail_after(10, shield=True):
            await _gone(*pids)


TIMES = {"programs": 20, "shim": 5, "nothing": 2}


def _processes_with(*words: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if set(words) & set(process.cmdline()):
                found.append(process.pid)
    return found


# -- the thread that started it ----------------------------------------------------------------


@pytest.mark.slow
async def test_a_child_outlives_every_thread_that_comes_and_goes_beside_its_parent(
    parrot: Parrot,
) -> None:
    # The signal belongs to the thread that forked, and Trio's own end after 10 s without work.
    # https://github.com/unslothai/unsloth/pull/6426
    told_by_program = Own(fakechild.command("S ready", "R"))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for kind in (told_by_program, Hosted()):
                nursery.start_soon(_live_on, kind, parrot)


async def _live_on(kind: Kind, parrot: Parrot) -> None:
    async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
        await provider.start()
        before = provider.diagnostics()
        assert before.isolation is not None
        assert before.isolation.parent_death == "signal"
        await trio.sleep(15)
        now = provider.diagnostics()
        assert (now.pid, now.counters.crashes) == (before.pid, 0)


# -- wrappers that stay in between -------------------------------------------------------------


def through_a_shell(command: tuple[str, ...]) -> Own:
    """A child behind a shell that waits for it."""
    return Own(("/bin/sh", "-c", '"$@"; true', "sh", *command))


@pytest.mark.slow
async def test_a_program_behind_a_shell_that_stays_is_ended_by_the_end_of_its_stdin(
    place: Path, parrot: Parrot
) -> None:
    # The signal reaches the shell alone.
    child = through_a_shell(fakechild.command("S loading", "S ready", "R"))
    death = await kill_application("idle", child, parrot, place, worker=False)
    assert death.seconds < 1
    assert len(death.descendants) == 1
    with trio.fail_after(10):
        await _gone(*death.descendants)


@pytest.mark.stock
@pytest.mark.slow
async def test_a_llama_server_behind_a_shell_that_stays_is_ended_by_the_end_of_its_stdin(
    llama_server: str, place: Path, endless: Parrot
) -> None:
    child = through_a_shell((llama_server,))
    death = await kill_application("idle", child, endless, place, worker=False)
    assert death.seconds < 1
    assert len(death.descendants) == 1
    with trio.fail_after(10):
        await _gone(*death.descendants)


@pytest.mark.slow
async def test_a_program_behind_a_shell_that_stays_outlives_a_worker_that_holds_its_pipes(
    place: Path, parrot: Parrot
) -> None:
    # A documented limit: let a wrapper `exec` what it wraps.
    child = through_a_shell(fakechild.command("S loading", "S ready", "R"))
    death = await kill_application("idle", child, parrot, place)
    assert death.seconds < 1
    with trio.fail_after(10):
        await _gone(*death.descendants)  # with the worker, which has ended since
