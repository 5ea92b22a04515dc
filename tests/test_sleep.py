"""Sleep and wake of real children, and what stands at the model's path by then."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import trio
from trio.testing import MockClock

from llamatrio import (
    ChildDied,
    Exit,
    LoadFailed,
    LocalProvider,
    ModelChanged,
    ModelConfig,
    ModelFileError,
    ModelSession,
    Own,
    Phase,
    Request,
    RequestFailed,
    ServerBackend,
    StreamBroken,
    WakeFailed,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.outcomes import Failed, Finished
from llamatrio.requests import Admitted, Delta, PromptProgress
from llamatrio.session.base import Asleep, Awake, Ended, LoadProgress, Opened, SessionEvent
from llamatrio.testing import ScriptedBackend, fakechild
from llamatrio.testing.parrot import (
    Parrot,
    write_large_parrot,
    write_parrot,
    write_slow_parrot,
)

if sys.platform != "linux":
    pytest.skip("run on Linux alone", allow_module_level=True)

HELLO = completion_request("Hello", temperature=0)
OTHER = "There is another parrot on this perch, and nobody should ever hear a word of it from us."

Event = TypeVar("Event", bound=SessionEvent)


class Life:
    """One life of a model, run without the lifecycle: what it tells, and the way to speak to it."""

    def __init__(self, backend: ServerBackend) -> None:
        self.backend = backend
        self.events: list[SessionEvent] = []
        self._news = trio.lowlevel.ParkingLot()

    def publish(self, event: SessionEvent) -> None:
        self.events.append(event)
        self._news.unpark_all()

    async def wait_for(self, kind: type[Event], *, after: int = 0) -> Event:
        """Wait until an event of this kind is told; the first `after` events do not count."""
        while True:
            for event in self.events[after:]:
                if isinstance(event, kind):
                    return event
            assert not any(isinstance(event, Ended) for event in self.events), self.events
            await self._news.park()

    @property
    def session(self) -> ModelSession:
        return next(event.session for event in self.events if isinstance(event, Opened))

    @property
    def pid(self) -> int:
        assert self.backend.pid is not None
        return self.backend.pid

    async def say(self, request: Request = HELLO) -> str:
        """Perform a request, and return the text of its answer."""
        said: list[str] = []
        await self.session.perform(request, lambda piece: said.append(text_of(piece)))
        return "".join(said)

    async def fall_asleep(self) -> int:
        """Wait until it sleeps, and return how many events there were."""
        await self.wait_for(Asleep)
        return len(self.events)


def text_of(piece: Admitted | Delta | PromptProgress) -> str:
    return piece.text if isinstance(piece, Delta) else ""


@asynccontextmanager
async def living(kind: Kind, config: ModelConfig) -> AsyncGenerator[Life, None]:
    """Load a model for the length of a block."""
    life = Life(ServerBackend(kind))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(life.backend.run, config, life.publish)
            await life.wait_for(Opened)
            yield life
            nursery.cancel_scope.cancel()


def sleeper(path: Path, **fields: object) -> ModelConfig:
    # One thread, because two that wait for each other on a busy machine can take very long.
    return ModelConfig(path, sleep_after=1, threads=1, **fields)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test has a model of its own."""
    return tmp_path / "model.gguf"


@pytest.fixture
def bird(path: Path) -> Parrot:
    """A model that a test may spoil."""
    return write_parrot(path)


@contextmanager
def unnoticed(path: Path) -> Generator[None, None, None]:
    """Let a file look as before, whatever is written to it meanwhile."""
    before = path.stat()
    yield
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def rewrite(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes of a file in place, unnoticed."""
    data = path.read_bytes()
    assert len(old) == len(new)
    assert old in data
    with unnoticed(path), open(path, "r+b") as file:
        file.write(data.replace(old, new))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- sleep and wake ----------------------------------------------------------------------------


async def test_a_request_wakes_a_sleeping_model_and_what_is_known_of_it_stays(
    kind: Kind, parrot: Parrot
) -> None:
    # https://github.com/earendil-works/pi/pull/8235
    async with living(kind, sleeper(parrot.path)) as life:
        info = life.session.info
        assert info
        told = await life.fall_asleep()
        assert await life.say() == parrot.text
        woken = life.events[told:]
        assert isinstance(woken[-1], Awake)
        assert {type(event) for event in woken[:-1]} == {LoadProgress}
        assert life.session.info == info


@pytest.mark.slow
async def test_a_request_is_admitted_when_the_model_has_been_loaded_again(
    kind: Kind, parrot: Parrot
) -> None:
    async with living(kind, sleeper(parrot.path)) as life:
        pieces: list[object] = []
        told = await life.fall_asleep()

        def emit(piece: object) -> None:
            if not pieces:
                assert isinstance(life.events[-1], Awake)
            pieces.append(piece)

        await life.session.perform(HELLO, emit)
        assert len(life.events) > told
        assert pieces[0] == Admitted()
        assert pieces.count(Admitted()) == 1
        assert isinstance(pieces[1], PromptProgress)


@pytest.mark.slow
async def test_requests_that_come_together_wake_a_model_once(kind: Kind, bird: Parrot) -> None:
    config = sleeper(bird.path, slots=2, sha256=sha256(bird.path))
    async with living(kind, config) as life:
        texts: list[str] = []

        async def ask() -> None:
            texts.append(await life.say())

        await life.fall_asleep()
        hashed = life.backend._digests.bytes_read
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
        assert texts == [bird.text, bird.text]
        assert life.backend._digests.bytes_read == hashed + bird.size
        assert sum(isinstance(event, Awake) for event in life.events) == 1


@pytest.mark.slow
async def test_sleep_is_seen_by_those_who_watch_and_is_no_change_of_phase(
    kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(60):
        async with open_provider(sleeper(parrot.path), backend=kind) as provider:
            await provider.start()
            await asleep(provider)
            assert (provider.phase, provider.diagnostics().residency) == (Phase.STARTED, "asleep")
            assert (await provider.submit(HELLO).result()).text == parrot.text
            assert (provider.phase, provider.residency) == (Phase.STARTED, "resident")
            counters = provider.diagnostics().counters
            assert (counters.loads, counters.generations) == (1, 1)


@pytest.mark.slow
async def test_nothing_but_a_request_wakes_a_sleeping_model(kind: Kind, parrot: Parrot) -> None:
    with trio.fail_after(60):
        async with open_provider(sleeper(parrot.path), backend=kind) as provider:
            await provider.start()
            await asleep(provider)
            records = provider.diagnostics().pipes.records
            await provider.stop()
            assert provider.residency == "asleep"
            await provider.start()
            with trio.move_on_after(1):
                async for status in provider.watch():
                    assert status.residency == "asleep"
            assert provider.diagnostics().pipes.records == records
            assert (await provider.submit(HELLO).result()).text == parrot.text


@pytest.mark.slow
async def test_a_sleeping_model_is_unloaded_in_order(kind: Kind, parrot: Parrot) -> None:
    with trio.fail_after(60):
        async with open_provider(sleeper(parrot.path), backend=kind) as provider:
            await provider.start()
            await asleep(provider)
            await provider.stop()
            await provider.unload_model()
            assert provider.residency == "unloaded"
            end = provider.diagnostics().last_exit
            assert end is not None
            assert end.returncode == 0
            assert provider.failure is None


async def asleep(provider: LocalProvider) -> None:
    async for status in provider.watch():
        if status.residency == "asleep":
            return


# -- another file ------------------------------------------------------------------------------


def replace(path: Path) -> None:
    write_parrot(path, OTHER)


def delete(path: Path) -> None:
    path.unlink()


def touch(path: Path) -> None:
    os.utime(path)


def link(path: Path) -> None:
    other = write_parrot(path.with_name("other.gguf"), OTHER)
    path.unlink()
    path.symlink_to(other.path)


@pytest.mark.parametrize(
    "change",
    [replace, *(pytest.param(one, marks=pytest.mark.slow) for one in (delete, touch, link))],
)
async def test_a_file_that_changed_while_the_model_slept_is_not_served(
    kind: Kind, bird: Parrot, change: Callable[[Path], None]
) -> None:
    async with living(kind, sleeper(bird.path)) as life:
        told = await life.fall_asleep()
        change(bird.path)
        with pytest.raises(ModelChanged, match=str(bird.path)):
            await life.say()
        end = await life.wait_for(Ended)
        assert isinstance(end.error, ModelChanged)
        assert end.exit is not None
        assert (end.exit.returncode, end.exit.asked) == (0, True)
        assert life.events[told:] == [end]  # it never began to wake
        assert life.backend.pid is None


@pytest.mark.slow
async def test_a_file_that_was_replaced_while_the_model_was_awake_is_not_served_after_sleep(
    kind: Kind, bird: Parrot
) -> None:
    async with living(kind, sleeper(bird.path)) as life:
        replace(bird.path)
        assert await life.say() == bird.text
        await life.fall_asleep()
        with pytest.raises(ModelChanged, match="has been replaced"):
            await life.say()
        await life.wait_for(Ended)


@pytest.mark.slow
async def test_a_file_that_is_replaced_within_the_wake_is_not_served(
    kind: Kind, path: Path
) -> None:
    write_large_parrot(path)  # its load takes a while
    async with living(kind, sleeper(path)) as life:
        told = await life.fall_asleep()
        pieces: list[object] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(ModelChanged):
                    await life.session.perform(HELLO, pieces.append)

            nursery.start_soon(ask)
            await life.wait_for(LoadProgress, after=told)
            replace(path)
        end = await life.wait_for(Ended)
        assert isinstance(end.error, ModelChanged)
        assert end.exit is not None
        assert end.exit.signal != "SIGKILL"  # its connection was closed, and it obeyed
        assert pieces == []
        assert not any(isinstance(event, Awake) for event in life.events)


@pytest.mark.slow
async def test_another_content_that_looks_the_same_is_not_served_if_it_was_pinned(
    kind: Kind, bird: Parrot
) -> None:
    pinned = sha256(bird.path)
    async with living(kind, sleeper(bird.path, sha256=pinned)) as life:
        told = await life.fall_asleep()
        assert await life.say() == bird.text
        await life.wait_for(Asleep, after=told)
        rewrite(bird.path, b"parrot,", b"carrot,")
        with pytest.raises(ModelChanged) as caught:
            await life.say()
        assert pinned[:12] in str(caught.value)
        assert sha256(bird.path)[:12] in str(caught.value)
        end = await life.wait_for(Ended)
        assert isinstance(end.error, ModelChanged)


async def test_a_model_that_slept_within_a_request_is_looked_at_before_its_answer_is_taken(
    bird: Parrot,
) -> None:
    wakes = ["Q", "S sleeping", "S loading", "S ready", "A"]
    child = Own(fakechild.command("S loading", "H late", "S ready", *wakes, "R"))
    async with living(child, ModelConfig(bird.path, sha256=sha256(bird.path))) as life:
        rewrite(bird.path, b"parrot,", b"carrot,")
        pieces: list[object] = []
        with pytest.raises(ModelChanged):
            await life.session.perform(HELLO, pieces.append)
        assert pieces == []
        end = await life.wait_for(Ended)
        assert isinstance(end.error, ModelChanged)


async def test_a_file_that_is_replaced_within_the_first_load_is_not_served(path: Path) -> None:
    write_parrot(path)
    child = Own(fakechild.command("S loading", "W 0.5", "S ready", "R"))
    life = Life(ServerBackend(child))
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(life.backend.run, ModelConfig(path), life.publish)
            await life.wait_for(LoadProgress)
            replace(path)
    assert isinstance(life.events[-1], Ended)
    assert isinstance(life.events[-1].error, ModelChanged)
    assert not any(isinstance(event, Opened) for event in life.events)


@pytest.mark.slow
async def test_a_check_that_is_cancelled_leaves_the_model_asleep(kind: Kind, path: Path) -> None:
    slow = write_slow_parrot(path)
    config = sleeper(path, sha256=await trio.to_thread.run_sync(sha256, path))
    async with living(kind, config) as life:
        told = await life.fall_asleep()
        hashed = life.backend._digests.bytes_read
        async with trio.open_nursery() as nursery:
            nursery.start_soon(life.say)
            while life.backend._digests.bytes_read == hashed:  # noqa: ASYNC110 - in a thread
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert life.backend._digests.bytes_read < hashed + slow.size
        assert len(life.events) == told
        assert slow.text.startswith(await life.say(completion_request("Hello", max_tokens=1)))


async def test_a_file_that_cannot_be_read_fails_the_request_and_leaves_the_model_asleep(
    bird: Parrot,
) -> None:
    child = Own(fakechild.command("S loading", "H ok", "S ready", "S sleeping", "R"))
    async with living(child, ModelConfig(bird.path, sha256=sha256(bird.path))) as life:
        await life.fall_asleep()
        with no_descriptors_left():
            with pytest.raises(ModelFileError, match="Too many open files"):
                await life.say()
        assert await life.say() == "Every answer here is a fake."


@contextmanager
def no_descriptors_left() -> Generator[None, None, None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
async def test_a_start_after_it_takes_the_new_file(kind: Kind, bird: Parrot) -> None:
    with trio.fail_after(60):
        async with open_provider(sleeper(bird.path), backend=kind) as provider:
            await provider.start()
            await asleep(provider)
            replace(bird.path)
            with pytest.raises(RequestFailed) as caught:
                await provider.submit(HELLO).result()
            assert isinstance(caught.value.__cause__, ModelChanged)
            async for status in provider.watch():
                if status.phase is Phase.UNLOADED:
                    break
            assert isinstance(provider.failure, ModelChanged)
            await provider.start()
            result = await provider.submit(HELLO).result()
            assert result.text == OTHER
            assert isinstance(result.outcome, Finished)


# -- death -------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_model_that_dies_asleep_has_just_died(kind: Kind, parrot: Parrot) -> None:
    async with living(kind, sleeper(parrot.path)) as life:
        await life.fall_asleep()
        os.kill(life.pid, signal.SIGKILL)
        end = await life.wait_for(Ended)
        assert type(end.error) is ChildDied


@pytest.mark.slow
async def test_a_model_that_is_killed_within_the_wake_failed_to_wake(
    kind: Kind, large: Parrot
) -> None:
    async with living(kind, sleeper(large.path)) as life:
        told = await life.fall_asleep()
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(StreamBroken):
                    await life.say()

            nursery.start_soon(ask)
            await life.wait_for(LoadProgress, after=told)
            os.kill(life.pid, signal.SIGKILL)
        end = await life.wait_for(Ended)
        assert isinstance(end.error, WakeFailed)
        assert end.exit is not None
        assert end.error.exit is end.exit
        assert (end.exit.signal, end.exit.asked, end.exit.ready) == ("SIGKILL", False, True)
        assert "again after sleep" in str(end.error)


@pytest.mark.slow
async def test_a_file_that_was_spoilt_unnoticed_fails_the_wake(kind: Kind, bird: Parrot) -> None:
    async with living(kind, sleeper(bird.path)) as life:
        await life.fall_asleep()
        rewrite(bird.path, b"GGUF", b"SPAM")
        with pytest.raises(StreamBroken):
            await life.say()
        end = await life.wait_for(Ended)
        assert isinstance(end.error, WakeFailed)
        assert end.error.returncode == -signal.SIGABRT
        assert end.error.stderr_tail


@pytest.mark.slow
async def test_a_failed_wake_is_tried_again_once_and_its_request_is_served(
    kind: Kind, large: Parrot
) -> None:
    # https://github.com/ggml-org/llama.cpp/issues/24372
    with trio.fail_after(120):
        async with open_provider(sleeper(large.path), backend=kind) as provider:
            await provider.start()
            await asleep(provider)
            reply = provider.submit(HELLO)
            async for status in provider.watch():
                if status.residency == "asleep" and status.progress is not None:
                    break
            pid = provider.diagnostics().pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            result = await reply.result()
            assert large.text.startswith(result.text)
            counters = provider.diagnostics().counters
            assert (counters.failed_wakes, counters.restarts, counters.generations) == (1, 1, 2)


async def test_a_wake_that_fails_twice_gives_the_model_up_and_names_the_first(
    kind: Kind, bird: Parrot
) -> None:
    with trio.fail_after(120):
        async with open_provider(sleeper(bird.path), backend=kind) as provider:
            await provider.start()
            await asleep(provider)
            rewrite(bird.path, b"GGUF", b"SPAM")
            outcome = await provider.submit(HELLO).wait()
            assert isinstance(outcome, Failed)
            assert isinstance(outcome.error.__cause__, WakeFailed)
            assert outcome.error is provider.failure
            assert provider.phase is Phase.UNLOADED
            assert provider.diagnostics().counters.failed_wakes == 1


@pytest.mark.slow
async def test_a_model_that_dies_after_it_woke_has_just_died(kind: Kind, parrot: Parrot) -> None:
    async with living(kind, sleeper(parrot.path)) as life:
        await life.fall_asleep()
        assert await life.say() == parrot.text
        os.kill(life.pid, signal.SIGKILL)
        end = await life.wait_for(Ended)
        assert type(end.error) is ChildDied


# -- the scripted backend ----------------------------------------------------------------------


@asynccontextmanager
async def scripted(backend: ScriptedBackend) -> AsyncGenerator[list[SessionEvent], None]:
    """Play one life of a scripted model; what it tells is whole when the block has been left."""
    events: list[SessionEvent] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(backend.run, ModelConfig("x"), events.append)
        await trio.sleep(2)
        yield events


def session_of(events: list[SessionEvent]) -> ModelSession:
    return next(event.session for event in events if isinstance(event, Opened))


async def test_a_scripted_model_dies_in_its_wake_if_it_is_told_to(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend()
    backend.fail_next_wake()
    async with scripted(backend) as events:
        backend.sleep()
        with pytest.raises(StreamBroken):
            await session_of(events).perform(HELLO, print)
    end = events[-1]
    assert isinstance(end, Ended)
    assert isinstance(end.error, WakeFailed)
    assert end.exit is end.error.exit
    assert end.error.returncode == -signal.SIGABRT
    assert not any(isinstance(event, Awake) for event in events)
    assert backend.requests == []


async def test_a_scripted_model_wakes_once_for_all_and_though_its_request_was_cancelled(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend()
    async with scripted(backend) as events:
        backend.sleep()
        with trio.move_on_after(0.5):
            await session_of(events).perform(HELLO, print)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(session_of(events).perform, HELLO, lambda _: None)
        assert sum(isinstance(event, Awake) for event in events) == 1
        assert len(backend.requests) == 3
        backend.crash()


async def test_a_scripted_wake_hangs_if_it_is_told_to(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend()
    backend.hang_next_wake()
    async with scripted(backend) as events:
        backend.sleep()
        with trio.move_on_after(1000) as scope:
            await session_of(events).perform(HELLO, print)
        assert scope.cancelled_caught
        assert isinstance(events[-1], LoadProgress)
        assert backend.signs_of_life() == backend.signs_of_life()
        backend.crash()
    assert isinstance(events[-1], Ended)


async def test_a_scripted_death_looks_like_a_kill_and_a_failed_load_like_a_refusal(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend()
    async with scripted(backend) as events:
        backend.crash()
    assert isinstance(events[-1], Ended)
    assert type(events[-1].error) is ChildDied
    assert events[-1].exit == Exit(0, -9, "SIGKILL", ready=True)

    backend.fail_next_load()
    async with scripted(backend) as events:
        pass
    assert isinstance(events[-1], Ended)
    assert type(events[-1].error) is LoadFailed
    assert events[-1].exit == Exit(0, 1)


async def test_a_scripted_request_is_admitted_before_its_prompt_is_read(
    autojump_clock: MockClock,
) -> None:
    backend, pieces = ScriptedBackend(), list[object]()
    async with scripted(backend) as events:
        await session_of(events).perform(HELLO, pieces.append)
        backend.crash()
    assert pieces[0] == Admitted()
    assert isinstance(pieces[1], PromptProgress)
    assert pieces.count(Admitted()) == 1
