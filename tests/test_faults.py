"""A model that is at fault and takes its time to end, and other corners; all scripted."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from llamatrio import (
    Backend,
    ChildDied,
    ChildSilent,
    Life,
    LifecycleActor,
    Limits,
    LoadFailed,
    LoadStalled,
    LocalProvider,
    ModelConfig,
    Phase,
    Policy,
    ProviderBroken,
    Reply,
    Request,
    RequestRefused,
    SpecificationError,
    StartInterrupted,
    StateFlood,
    StreamBroken,
    Transition,
    Unkillable,
    Waiting,
    completion_request,
    open_provider,
)
from llamatrio.lifecycle.actor import MAX_UNREAD
from llamatrio.outcomes import Cancelled, Failed, Finished
from llamatrio.requests import Admitted, Delta
from llamatrio.session.base import (
    Emit,
    Ended,
    LoadProgress,
    ModelSession,
    Opened,
    Publish,
    Unexpected,
)
from llamatrio.testing import ScriptedBackend, open_scripted_provider

HELLO = completion_request("Hello")
GUARD = 1_000_000.0  # seconds of a clock that jumps
LINGER = 5.0
SILENT = Policy(silence=4)


class SlowEnd(ScriptedBackend):
    """Takes a while to end, whatever it ends of."""

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        try:
            await super().run(config, publish)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(LINGER)


class Survivor(ScriptedBackend):
    """Is not to be killed, which is seen after a while."""

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        try:
            await super().run(config, publish)
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep(LINGER)
            publish(Ended(Unkillable("process 7 survived SIGKILL")))
            raise


class Diary(LifecycleActor):
    """Notes every phase, with the number of the life that it belongs to."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.seen: list[tuple[Phase, int]] = []

    def on_transition(self, transition: Transition) -> None:
        self.seen.append((transition.new, transition.generation))


@asynccontextmanager
async def opened(
    backend: ScriptedBackend,
    policy: Policy | None = None,
    actor: type[LifecycleActor] = LifecycleActor,
    slots: int = 1,
) -> AsyncGenerator[LocalProvider, None]:
    config = ModelConfig("scripted.gguf", slots=slots)
    with trio.fail_after(GUARD):
        async with open_scripted_provider(
            backend, config=config, policy=policy, actor=actor
        ) as provider:
            yield provider


async def fall_silent(provider: LocalProvider, backend: ScriptedBackend) -> None:
    """Let a request hang until the model is given up for it; its end is still to come."""
    backend.hang_next_answer()
    await provider.start()
    outcome = await provider.submit(HELLO).wait()
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, ChildSilent)
    assert provider.phase is Phase.STARTED


@contextmanager
def no_garbage_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# -- a model that is at fault, and not gone yet ----------------------------------------------------


async def test_a_start_in_resident_waits_for_the_end_of_a_model_at_fault_and_loads_anew(
    autojump_clock: MockClock,
) -> None:
    backend = SlowEnd("a b c")
    async with opened(backend, SILENT) as provider:
        await fall_silent(provider, backend)
        await provider.stop()
        assert provider.phase is Phase.RESIDENT
        began = trio.current_time()
        await provider.start()
        assert trio.current_time() - began >= LINGER
        assert backend.loads == 2
        assert isinstance(await provider.submit(HELLO).wait(), Finished)
        assert provider.failure is None


@pytest.mark.parametrize("end", ["stop", "unload_model"])
async def test_a_later_end_gives_a_start_up_that_waits_for_a_model_at_fault(
    end: str, autojump_clock: MockClock
) -> None:
    backend = SlowEnd("a b c")
    caught: list[StartInterrupted] = []
    async with opened(backend, SILENT) as provider, trio.open_nursery() as nursery:

        async def start() -> None:
            try:
                await provider.start()
            except StartInterrupted as exc:
                caught.append(exc)

        await fall_silent(provider, backend)
        await provider.stop()
        nursery.start_soon(start)
        await wait_all_tasks_blocked()
        await getattr(provider, end)()
        await wait_all_tasks_blocked()
        assert len(caught) == 1
        await trio.sleep(10 * LINGER)
        assert provider.phase is Phase.UNLOADED
        assert backend.loads == 1


async def test_a_model_at_fault_that_survives_is_not_replaced(autojump_clock: MockClock) -> None:
    backend = Survivor("a b c")
    async with opened(backend, SILENT) as provider:
        await fall_silent(provider, backend)
        waiting = provider.submit(HELLO)
        outcome = await waiting.wait()
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, Unkillable)
        await trio.sleep(1000)
        assert provider.phase is Phase.UNLOADED
        assert isinstance(provider.failure, Unkillable)
        assert provider.diagnostics().generation == 1


async def test_unloading_a_model_at_fault_that_survives_raises(autojump_clock: MockClock) -> None:
    backend = Survivor("a b c")
    async with opened(backend, SILENT) as provider:
        await fall_silent(provider, backend)
        await provider.stop()
        assert provider.phase is Phase.RESIDENT
        with pytest.raises(Unkillable):
            await provider.unload_model()


class Cut(ModelSession):
    """Begins with a request, or does not, until its connections are cut for a fault."""

    def __init__(self, admits: bool) -> None:
        self.admits = admits
        self.asked = trio.Event()
        self.cut = trio.Event()
        self.fault: StateFlood | None = None

    async def perform(self, request: Request, emit: Emit) -> Finished:
        if self.admits:
            emit(Admitted())
            emit(Delta("One"))
        self.asked.set()
        await self.cut.wait()
        assert self.fault is not None
        raise self.fault


class Flooding(ScriptedBackend):
    """Floods in its first life while a request runs, and cuts its connection for that."""

    def __init__(self, admits: bool) -> None:
        super().__init__("two three")
        self.admits = admits
        self.lives = 0

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        self.lives += 1
        if self.lives > 1:
            await super().run(config, publish)
            return
        session = Cut(self.admits)
        publish(Opened(session))
        await session.asked.wait()
        try:
            for number in range(2 * MAX_UNREAD):
                publish(Unexpected(b"", number + 1))
        except StateFlood as exc:
            session.fault = exc
            session.cut.set()
            with trio.CancelScope(shield=True):
                await trio.sleep(0.05)
            raise


@pytest.mark.parametrize("admits", [True, False], ids=["resume", "not-admitted"])
async def test_a_request_of_a_model_that_floods_is_served_by_the_next(
    admits: bool, autojump_clock: MockClock
) -> None:
    backend = Flooding(admits)
    request = completion_request("Hello", on_crash="resume" if admits else "fail")
    async with opened(backend) as provider:
        await provider.start()
        reply = provider.submit(request)
        assert isinstance(await reply.wait(), Finished)
        assert reply.text == ("Onetwo three" if admits else "two three")
        assert provider.diagnostics().counters.requeued == 1
        assert backend.lives == 2


async def test_a_start_while_a_stalled_load_is_ending_takes_part_in_the_loading(
    autojump_clock: MockClock,
) -> None:
    backend = SlowEnd("a b c")
    for _ in range(3):
        backend.hang_next_load()
    failed: list[float] = []
    async with opened(backend, Policy(load_stall=4, fruitless=3)) as provider:

        async def start(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            with pytest.raises(LoadStalled):
                await provider.start(task_status=task_status)
            failed.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            await nursery.start(start)
            await trio.sleep(7)
            generation = provider._actor.generation
            assert generation is not None
            assert generation.fault is not None
            assert provider.phase is Phase.LOADING
            now = trio.current_time()
            await nursery.start(start)
            nursery.start_soon(start)
            await wait_all_tasks_blocked()
            assert trio.current_time() == now
        assert len(failed) == 3
        assert len(set(failed)) == 1
        assert provider.diagnostics().generation == 3


class LateOpen(ScriptedBackend):
    """Says in its first life that it is loaded when it is ended because it was not."""

    def __init__(self) -> None:
        super().__init__("a b c")
        self.late = Cut(admits=False)
        self.lives = 0

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        self.lives += 1
        if self.lives > 1:
            await super().run(config, publish)
            return
        publish(LoadProgress(0.1))
        try:
            await trio.sleep_forever()
        finally:
            publish(Opened(self.late))
            with trio.CancelScope(shield=True):
                await trio.sleep(LINGER)


async def test_a_model_that_opens_after_its_fault_serves_nothing(
    autojump_clock: MockClock,
) -> None:
    backend = LateOpen()
    async with opened(backend, Policy(load_stall=4), Diary) as provider:
        async with trio.open_nursery() as nursery:
            await nursery.start(provider.start)
            reply = provider.submit(HELLO)
        assert isinstance(await reply.wait(), Finished)
        assert not backend.late.asked.is_set()
        assert len(backend.requests) == 1
        actor = provider._actor
        assert isinstance(actor, Diary)
        assert (Phase.STARTED, 1) not in actor.seen
        assert (Phase.STARTED, 2) in actor.seen


# -- the policy ------------------------------------------------------------------------------------


async def outlive(provider: LocalProvider, generation: int) -> bool:
    """Wait for what follows the end of a model; say whether another one does."""
    async for status in provider.watch():
        if status.phase is Phase.UNLOADED:
            return False
        if status.phase is Phase.STARTED and status.generation > generation:
            return True
    raise AssertionError("the provider was closed")


async def test_a_hundred_deaths_are_allowed_and_one_more_is_not(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend()
    policy = Policy(deaths=100, fruitless=math.inf, window=GUARD, backoff=0.0)
    async with opened(backend, policy) as provider:
        await provider.start()
        deaths = 0
        more = True
        while more and deaths < 200:
            deaths += 1
            backend.crash()
            more = await outlive(provider, deaths)
        assert deaths == 101


async def test_a_load_that_hangs_is_ended_by_a_policy_that_comes_later(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend()
    backend.hang_next_load()
    policy = Policy(load_stall=math.inf, fruitless=0)
    async with opened(backend, policy) as provider, trio.open_nursery() as nursery:

        async def change() -> None:
            await trio.sleep(1000)
            await provider.configure(policy=Policy(load_stall=5, fruitless=0))

        nursery.start_soon(change)
        began = trio.current_time()
        with pytest.raises(LoadStalled):
            await provider.start()
        assert 1005 <= trio.current_time() - began < 1015


async def test_an_idle_model_is_not_ended_for_the_silence_of_a_request_that_was_cancelled(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend()
    backend.hang_next_answer()
    async with opened(backend, Policy(silence=60)) as provider:
        await provider.start()
        reply = provider.submit(HELLO)
        await trio.sleep(70)  # one more look, and it were ended
        reply.cancel()
        assert isinstance(await reply.wait(), Cancelled)
        await trio.sleep(1000)
        assert provider.phase is Phase.STARTED
        assert provider.diagnostics().generation == 1
        assert provider.diagnostics().counters.crashes == 0


def test_a_delay_is_never_below_the_backoff_nor_above_the_longest() -> None:
    lives = [Life(ChildDied("it died"))] * 9
    policy = Policy(backoff=5, longest_backoff=60, fruitless=math.inf, deaths=math.inf)
    delays = [policy.decide(lives[:count]) for count in range(1, 10)]
    assert delays == [5, 5, 5, 5, 8, 16, 32, 60, 60]


# -- the work --------------------------------------------------------------------------------------


async def test_a_request_with_limits_is_not_ended_by_a_deadline_when_the_provider_breaks(
    autojump_clock: MockClock,
) -> None:
    def leave(request: Request) -> str:
        raise SystemExit(3)

    replies: list[Reply] = []
    request = completion_request("Hello", limits=Limits(total=1000))
    with pytest.raises(SystemExit):
        async with opened(ScriptedBackend(leave), slots=3) as provider:
            await provider.start()
            replies += [provider.submit(request) for _ in range(3)]
            await trio.sleep_forever()
    outcomes = [reply.outcome for reply in replies]
    assert all(isinstance(outcome, Failed) for outcome in outcomes), outcomes
    errors = {type(outcome.error) for outcome in outcomes if isinstance(outcome, Failed)}
    assert errors == {ProviderBroken}


@pytest.mark.parametrize("error", [RequestRefused(400, "kind", "no"), StreamBroken("it broke")])
async def test_a_failed_reply_is_freed_without_the_garbage_collector(
    error: Exception, autojump_clock: MockClock
) -> None:
    async with opened(ScriptedBackend(lambda _: error)) as provider:
        await provider.start()
        with no_garbage_collector():
            reply = provider.submit(HELLO)
            assert isinstance(await reply.wait(), Failed)
            freed = weakref.ref(reply)
            del reply
            await wait_all_tasks_blocked()
            assert freed() is None


class ChoosesAnother(LifecycleActor):
    other: Reply | None = None

    def choose_next(self, waiting: Waiting) -> Reply:
        assert self.other is not None
        return self.other


async def test_a_reply_of_another_provider_is_not_run_in_place_of_the_one_of_the_same_number(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend()
    replies: list[Reply] = []
    async with opened(ScriptedBackend()) as another:
        await another.start()
        foreign = another.submit(HELLO)
        with pytest.raises(SpecificationError):
            async with opened(backend, actor=ChoosesAnother) as provider:
                actor = provider._actor
                assert isinstance(actor, ChoosesAnother)
                actor.other = foreign
                await provider.start()
                replies.append(provider.submit(HELLO))
                assert replies[0].id == foreign.id
                await trio.sleep_forever()
        assert isinstance(await foreign.wait(), Finished)
    assert isinstance(replies[0].outcome, Failed)
    assert backend.requests == []


# -- verbs -----------------------------------------------------------------------------------------


async def test_a_path_is_no_configuration(autojump_clock: MockClock) -> None:
    async with opened(ScriptedBackend()) as provider:
        before = provider.config
        with pytest.raises(SpecificationError):
            await provider.configure("x.gguf")  # type: ignore[arg-type]
        assert provider.config is before


async def test_starts_that_were_abandoned_are_not_kept(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend()
    backend.hang_next_load()
    async with opened(backend, Policy(load_stall=math.inf)) as provider:
        for _ in range(500):
            with trio.move_on_after(1):
                await provider.start()
        assert len(provider._actor._verbs._waiting) < 5


async def test_a_time_to_drain_without_a_drain_is_refused(autojump_clock: MockClock) -> None:
    async with opened(ScriptedBackend()) as provider:
        await provider.start()
        with pytest.raises(SpecificationError):
            await provider.stop(drain_timeout=30)
        assert provider.started


async def test_a_block_that_drains_is_left_in_silence_if_its_body_closed_the_provider(
    autojump_clock: MockClock,
) -> None:
    async with opened(ScriptedBackend()) as provider:
        async with provider.running(drain=True):
            await provider.aclose()
        assert provider.phase is Phase.UNLOADED


async def test_a_start_after_a_model_was_given_up_has_as_many_tries_as_the_first(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend()
    async with open_scripted_provider(backend, policy=Policy(fruitless=2)) as provider:
        for tries in (2, 4):
            backend.fail_next_load(LoadFailed("it crashed"))
            backend.fail_next_load(LoadFailed("it crashed"))
            with pytest.raises(LoadFailed):
                await provider.start()
            assert provider.diagnostics().counters.generations == tries
        await provider.start()


async def test_a_stop_returns_when_the_last_of_a_crowd_has_its_outcome(
    autojump_clock: MockClock,
) -> None:
    policy = Policy(max_pending=None)
    async with open_scripted_provider(policy=policy) as provider:
        await provider.start()
        crowd = [provider.submit(completion_request("Hello")) for _ in range(5_000)]
        await provider.stop()
        assert {type(reply.outcome) for reply in crowd} == {Cancelled}
        assert provider.diagnostics().counters.cancelled == 5_000


class Undecided(LifecycleActor):
    """Cannot choose, and writes down what it is told."""

    told: list[str]

    def choose_next(self, waiting: Waiting) -> Reply:
        self.told = []
        raise LookupError("nobody is good enough")

    def on_request_finished(self, reply: Reply, outcome: object) -> None:
        self.told.append("finished")


async def test_no_hook_is_called_after_a_decider_that_broke(autojump_clock: MockClock) -> None:
    actors: list[Undecided] = []

    def make(config: ModelConfig, backend: Backend) -> LifecycleActor:
        actors.append(Undecided(config, backend))
        return actors[0]

    replies: list[Reply] = []
    with pytest.raises(LookupError):
        async with open_scripted_provider(actor=make) as provider:
            await provider.start()
            replies += [provider.submit(completion_request("Hello")) for _ in range(3)]
            await trio.sleep_forever()
    assert [type(reply.outcome) for reply in replies] == [Failed] * 3
    assert actors[0].told == []


async def test_a_model_that_needs_40_s_and_dies_in_its_warm_up_is_given_up_after_its_budget(
    autojump_clock: MockClock,
) -> None:
    # https://github.com/unslothai/unsloth/issues/9688: a window of time alone never gives it up.
    backend = ScriptedBackend(load_time=40)
    for _ in range(10):
        backend.fail_next_load(LoadFailed("the child was ended by SIGSEGV"))
    async with open_scripted_provider(backend) as provider:
        began = trio.current_time()
        with pytest.raises(LoadFailed):
            await provider.start()
        assert provider.diagnostics().counters.generations == 3
        assert 120 < trio.current_time() - began < 123
        assert provider.phase is Phase.UNLOADED


class Broken(ModelSession):
    """Breaks off each answer before it has begun."""

    async def perform(self, request: Request, emit: Emit) -> Finished:
        await trio.lowlevel.checkpoint()
        raise StreamBroken("the connection broke")


class Dying(Backend):
    """Dies when it is told to, and does something else in the same step."""

    def __init__(self, then: list[Reply]) -> None:
        self.then = then
        self.die = trio.Event()
        self.lives = 0

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        self.lives += 1
        publish(Opened(Broken()))
        await self.die.wait()
        self.die = trio.Event()
        publish(Ended(ChildDied("it died")))
        for reply in self.then:
            reply.cancel()


async def test_a_cancel_in_the_very_step_of_the_death_is_not_lost(
    autojump_clock: MockClock,
) -> None:
    replies: list[Reply] = []
    backend = Dying(replies)
    async with open_provider(ModelConfig("m.gguf"), backend=backend) as provider:
        await provider.start()
        replies.append(provider.submit(completion_request("Hello")))
        await wait_all_tasks_blocked()  # its connection broke; it waits to learn why
        backend.die.set()
        outcome = await replies[0].wait()
        assert outcome == Cancelled("caller", "prompt", 0)
        assert provider.diagnostics().counters.requeued == 0
