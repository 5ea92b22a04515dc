"""Following the lifecycle, and counting what happened in it, on real children."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.lowlevel
from killing import kill_and_return
from moments import first_text
from trio.testing import MockClock

from llamatrio import (
    Backend,
    Counters,
    Diagnostics,
    LifecycleActor,
    Limits,
    LoadFailed,
    LoadProgress,
    LocalProvider,
    ModelConfig,
    ModelSession,
    Phase,
    Reply,
    Request,
    Status,
    Tally,
    Transition,
    completion_request,
    connect_provider,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.outcomes import Cancelled, Failed, Finished
from llamatrio.provider import Watch
from llamatrio.session.base import Emit, Opened, Publish
from llamatrio.testing.parrot import Parrot

SHORT = completion_request("Hello", max_tokens=2, temperature=0)
ON_AND_ON = completion_request("Hello", max_tokens=100_000, temperature=0)

GUARD = 60.0


def config_of(parrot: Parrot, slots: int = 1, sleep_after: int | None = None) -> ModelConfig:
    return ModelConfig(
        parrot.path, batch=64, context=4096, threads=1, slots=slots, sleep_after=sleep_after
    )


@asynccontextmanager
async def opened(
    config: ModelConfig, kind: Kind, actor: type[LifecycleActor] = LifecycleActor
) -> AsyncGenerator[LocalProvider, None]:
    with trio.fail_after(GUARD):
        async with open_provider(config, backend=kind, actor=actor) as provider:
            yield provider


async def serve(provider: LocalProvider) -> None:
    assert isinstance(await provider.submit(SHORT).wait(), Finished)


# -- watching ----------------------------------------------------------------------------------


Step = tuple[Phase, str, int]


def steps_of(statuses: Sequence[Status]) -> list[Step]:
    """Reduce what was seen to changes of phase, residency or generation."""
    steps = [(one.phase, one.residency, one.generation) for one in statuses]
    return [step for before, step in zip([None, *steps], steps, strict=False) if step != before]


async def watch_all(watch: Watch, into: list[Status]) -> None:
    """Read to the end of the provider; what was read is there at any time."""
    async for status in watch:
        into += [status]


UP: list[Step] = [
    (Phase.UNLOADED, "unloaded", 0),
    (Phase.LOADING, "loading", 1),
    (Phase.STARTED, "resident", 1),
]
DIED: list[Step] = [(Phase.LOADING, "loading", 2), (Phase.STARTED, "resident", 2)]
DOWN: list[Step] = [
    (Phase.STOPPING, "resident", 2),
    (Phase.RESIDENT, "resident", 2),
    (Phase.UNLOADING, "resident", 2),
    (Phase.UNLOADED, "unloaded", 2),
]


async def go_up_die_and_go_down(provider: LocalProvider) -> None:
    await provider.start()
    await kill_and_return(provider)
    await provider.stop()
    await provider.unload_model()


async def test_any_number_may_watch_and_each_sees_everything_until_the_end(
    kind: Kind, parrot: Parrot
) -> None:
    seen: list[list[Status]] = [[] for _ in range(100)]
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            provider = connect_provider(nursery, config_of(parrot), backend=kind)
            for statuses in seen:
                nursery.start_soon(watch_all, provider.watch(), statuses)
            await go_up_die_and_go_down(provider)
            await provider.aclose()
    for statuses in seen:
        assert steps_of(statuses) == UP + DIED + DOWN
        assert all((one.progress is None) == (one.phase is not Phase.LOADING) for one in statuses)


async def test_a_latecomer_gets_the_present_first(kind: Kind, parrot: Parrot) -> None:
    async with opened(config_of(parrot), kind) as provider:
        await provider.start()
        early = provider.watch()
        assert await anext(early) == Status(Phase.STARTED, "resident", None, 1)
        await provider.stop()
        late = provider.watch()
        assert await anext(late) == Status(Phase.RESIDENT, "resident", None, 1)
        assert [(await anext(early)).phase for _ in range(2)] == [Phase.STOPPING, Phase.RESIDENT]
        await provider.start()
        assert await anext(early) == await anext(late)


async def test_a_loop_ends_with_the_provider_in_the_midst_of_a_load(
    kind: Kind, large: Parrot
) -> None:
    seen: list[Status] = []
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            provider = connect_provider(nursery, config_of(large), backend=kind)
            nursery.start_soon(watch_all, provider.watch(), seen)
            async with trio.open_nursery() as starters:
                await starters.start(provider.start)
                starters.cancel_scope.cancel()
            await provider.aclose()
    assert [one.phase for one in seen if one.progress is None] == [Phase.UNLOADED] * 2
    assert seen[-1] == Status(Phase.UNLOADED, "unloaded", None, 1)
    assert [status async for status in provider.watch()] == [seen[-1]]


async def test_a_loop_ends_with_the_block(kind: Kind, parrot: Parrot) -> None:
    watches: list[Watch] = []
    async with opened(config_of(parrot), kind) as provider:
        await provider.start()
        watches += [provider.watch(), provider.watch()]
        assert await anext(watches[0]) == await anext(watches[1])
    for watch in watches:
        assert [status.phase async for status in watch] == [Phase.UNLOADED]


async def test_a_slow_watcher_misses_progress_and_no_change(kind: Kind, large: Parrot) -> None:
    """One reads all the time, the other does not read before everything is over."""
    quick: list[Status] = []
    slow: list[Status] = []
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            provider = connect_provider(nursery, config_of(large), backend=kind)
            nursery.start_soon(watch_all, provider.watch(), quick)
            unread = provider.watch()
            await go_up_die_and_go_down(provider)
            await provider.aclose()
        await watch_all(unread, slow)
    assert steps_of(quick) == steps_of(slow) == UP + DIED + DOWN
    assert len(slow) <= len(quick)
    for generation in (1, 2):
        shares = progress_of(quick, generation)
        assert shares == sorted(shares)
        assert progress_of(slow, generation) == shares[-1:]  # the last there was


def progress_of(statuses: Sequence[Status], generation: int) -> list[float]:
    found = [one.progress for one in statuses if one.generation == generation]
    return [one.value for one in found if one is not None and one.value is not None]


class Silent(ModelSession):
    async def perform(self, request: Request, emit: Emit) -> Finished:
        raise AssertionError("nothing is asked of it")


class Sudden(Backend):
    """Says in one breath how far it is and that it is ready."""

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        await trio.lowlevel.checkpoint()
        publish(LoadProgress(0.5))
        publish(LoadProgress(1.0))
        publish(Opened(Silent()))
        await trio.sleep_forever()


async def test_the_last_progress_is_told_although_the_model_is_ready_already(
    autojump_clock: MockClock,
) -> None:
    async with open_provider(ModelConfig("any.gguf"), backend=Sudden()) as provider:
        watch = provider.watch()
        await provider.start()
        assert [await anext(watch) for _ in range(4)] == [
            Status(Phase.UNLOADED, "unloaded", None, 0),
            Status(Phase.LOADING, "loading", LoadProgress(), 1),
            Status(Phase.LOADING, "loading", LoadProgress(1.0), 1),
            Status(Phase.STARTED, "resident", None, 1),
        ]


async def test_a_watcher_that_is_cancelled_goes_on_where_it_was(kind: Kind, parrot: Parrot) -> None:
    async with opened(config_of(parrot), kind) as provider:
        watch, seen = provider.watch(), list[Status]()
        with trio.CancelScope() as scope:
            scope.cancel()
            await watch_all(watch, seen)
        await go_up_die_and_go_down(provider)
        async for status in watch:
            seen.append(status)
            if steps_of(seen) == UP + DIED + DOWN:
                break
            with trio.CancelScope() as scope:
                scope.cancel()
                await watch_all(watch, seen)


async def test_a_watcher_that_is_dropped_is_forgotten(kind: Kind, parrot: Parrot) -> None:
    async with opened(config_of(parrot), kind) as provider:
        for _ in range(10):
            async for _ in provider.watch():
                break
        kept = provider.watch()
        gc.collect()
        assert len(provider._actor._watchers._inboxes) == 1
        await provider.start()
        assert (await anext(kept)).phase is Phase.UNLOADED


async def test_a_status_that_changes_nothing_is_not_told(kind: Kind, parrot: Parrot) -> None:
    async with opened(config_of(parrot), kind) as provider:
        await provider.start()
        watch = provider.watch()
        for _ in range(3):
            await serve(provider)
            await provider.start()
            await provider.configure(config_of(parrot))
        await provider.stop()
        assert [(await anext(watch)).phase for _ in range(2)] == [Phase.STARTED, Phase.STOPPING]


# -- snapshots ---------------------------------------------------------------------------------


async def test_a_snapshot_is_of_one_moment(kind: Kind, endless: Parrot) -> None:
    async with opened(config_of(endless), kind) as provider:
        nothing = provider.diagnostics()
        assert nothing == Diagnostics(
            phase=Phase.UNLOADED,
            started=False,
            residency="unloaded",
            generation=0,
            pid=None,
            pending=0,
            running=0,
            counters=Counters(),
            pipes=Tally(),
            dropped_log_lines=0,
            load_seconds=None,
            token_seconds=0,
            last_exit=None,
        )
        began = trio.current_time()
        await provider.start()
        took = trio.current_time() - began
        replies = [provider.submit(ON_AND_ON) for _ in range(3)]
        await replies[0].read(3)
        now = provider.diagnostics()
        assert (now.phase, now.started, now.residency) == (Phase.STARTED, True, "resident")
        assert (now.generation, now.running, now.pending) == (1, 1, 2)
        assert (now.counters.accepted, now.last_exit) == (3, None)
        assert now.load_seconds is not None
        assert 0 < now.load_seconds <= took
        assert now.token_seconds > 0
        assert now.pipes.records >= 2
        assert now.pipes.stdout_bytes > 0
        assert now.pipes.log_lines > 0
        assert (now.pipes.unexpected, now.pipes.malformed, now.dropped_log_lines) == (0, 0, 0)

        pid = now.pid
        now.counters.accepted = 1_000_000  # one's own copy
        await provider.stop()
        await provider.unload_model()
        later = provider.diagnostics()
        assert nothing.counters == Counters()
        assert (now.phase, now.pid) == (Phase.STARTED, pid)
        assert (later.counters.accepted, later.counters.cancelled) == (3, 3)
        assert (later.pid, later.running, later.pending) == (None, 0, 0)
        assert later.last_exit is not None
        assert (later.last_exit.pid, later.last_exit.returncode) == (pid, 0)
        assert (later.generation, later.load_seconds) == (1, now.load_seconds)
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            later.pid = 1  # type: ignore[misc]


async def test_a_snapshot_costs_little_while_a_model_works(kind: Kind, endless: Parrot) -> None:
    async with opened(config_of(endless), kind) as provider:
        await provider.start()
        reply = provider.submit(ON_AND_ON)
        await first_text(reply)
        began = time.process_time()
        for _ in range(1000):
            provider.diagnostics()
        assert time.process_time() - began < 1
        assert reply.outcome is None


@pytest.mark.slow
async def test_snapshots_neither_keep_a_model_awake_nor_wake_it(kind: Kind, parrot: Parrot) -> None:
    # https://github.com/ggml-org/llama.cpp/pull/20850
    async with opened(config_of(parrot, sleep_after=1), kind) as provider:
        await provider.start()
        await serve(provider)
        while provider.diagnostics().residency != "asleep":  # noqa: ASYNC110
            await trio.sleep(0.01)
        before = provider.diagnostics()
        until = trio.current_time() + 1.5
        while trio.current_time() < until:
            assert provider.diagnostics().residency == "asleep"
            await trio.sleep(0.01)
        after = provider.diagnostics()
        assert after.counters == before.counters
        assert after.pipes.records == before.pipes.records
        assert after.counters.wakes == 0
        await serve(provider)
        awake = provider.diagnostics()
        assert (awake.counters.wakes, awake.counters.loads, awake.pid) == (1, 1, before.pid)


class Clumsy(LifecycleActor):
    """Breaks at each stop."""

    def on_transition(self, transition: Transition) -> None:
        if transition.new is Phase.STOPPING:
            raise ValueError("not now")


def spoilt(parrot: Parrot, folder: Path) -> ModelConfig:
    """A configuration that no program can load."""
    path = folder / "spoilt.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 1000)
    return attrs.evolve(config_of(parrot), model=path)


def non_zero(counters: Counters) -> dict[str, Any]:
    return {name: value for name, value in attrs.asdict(counters).items() if value}


async def test_every_counter_is_right_after_a_known_history(
    kind: Kind, endless: Parrot, tmp_path: Path
) -> None:
    def so_many(**fields: object) -> Any:  # noqa: ANN401 - hands on whatever a request takes
        return completion_request("Hello", **{"max_tokens": 100_000, **fields})  # type: ignore[arg-type]

    def keyed() -> Reply:
        return provider.submit(so_many(supersede="mine"))

    async with opened(config_of(endless, slots=2), kind, Clumsy) as provider:
        await provider.start()
        assert non_zero(provider.diagnostics().counters) == {"generations": 1, "loads": 1}

        for _ in range(2):
            await serve(provider)
        cancelled, superseded = provider.submit(ON_AND_ON), keyed()
        await first_text(cancelled)
        await first_text(superseded)
        newest = keyed()
        await provider.cancel(cancelled.id)
        await provider.cancel(newest.id)
        expired = provider.submit(so_many(limits=Limits(total=0.05)))
        assert isinstance(await expired.wait(), Cancelled)
        expected = {"generations": 1, "loads": 1, "accepted": 6, "finished": 2}
        expected |= {"cancelled": 4, "superseded": 1, "expired": 1}
        assert non_zero(provider.diagnostics().counters) == expected

        failed = provider.submit(ON_AND_ON)
        resumed = provider.submit(so_many(max_tokens=60, on_crash="resume"))
        await first_text(failed)
        await first_text(resumed)
        await kill_and_return(provider)
        assert isinstance(await failed.wait(), Failed)
        assert isinstance(await resumed.wait(), Finished)
        expected |= {"generations": 2, "loads": 2, "crashes": 1, "restarts": 1, "accepted": 8}
        expected |= {"finished": 3, "failed": 1, "requeued": 1, "resumed": 1}
        assert non_zero(provider.diagnostics().counters) == expected

        stopped = provider.submit(ON_AND_ON)
        await provider.stop()
        assert isinstance(stopped.outcome, Cancelled)
        await provider.configure(spoilt(endless, tmp_path))
        expected |= {"accepted": 9, "cancelled": 5, "hook_errors": 1, "unloads": 1}
        assert non_zero(provider.diagnostics().counters) == expected

        with pytest.raises(LoadFailed):
            await provider.start()
        expected |= {"generations": 3, "failed_loads": 1}
        assert non_zero(provider.diagnostics().counters) == expected

        await provider.configure(config_of(endless))
        await provider.start()
        left = provider.submit(ON_AND_ON)
    assert isinstance(left.outcome, Cancelled)
    expected |= {"generations": 4, "loads": 3, "accepted": 10, "cancelled": 6, "unloads": 2}
    assert non_zero(provider.diagnostics().counters) == expected
