"""The actor over a scripted model, on a mock clock: who is answered what, and when."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from llamatrio import (
    NO_RESTARTS,
    ChildDied,
    ChildError,
    Exit,
    LifecycleActor,
    LoadFailed,
    LocalProvider,
    ModelConfig,
    NotStarted,
    Phase,
    Policy,
    ProviderClosed,
    Reply,
    Request,
    SpecificationError,
    StartInterrupted,
    Status,
    Unkillable,
    WrongPhase,
    WrongThread,
    chat_request,
    completion_request,
    open_provider,
)
from llamatrio.outcomes import Cancelled, Failed, Finished, Outcome
from llamatrio.session.base import (
    Awake,
    Backend,
    Emit,
    Ended,
    ModelSession,
    Opened,
    Publish,
)
from llamatrio.testing import ScriptedBackend, open_scripted_provider

HELLO = completion_request("Hello")
OTHER = ModelConfig("other.gguf")


class Caller:
    """Runs verbs in tasks and writes down what became of them, in order."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.record: list[str] = []

    async def call(self, name: str, verb: Callable[[], Awaitable[object]]) -> None:
        """Begin a verb, and let it come as far as it can."""
        self.nursery.start_soon(self._run, name, verb)
        await wait_all_tasks_blocked()

    async def _run(self, name: str, verb: Callable[[], Awaitable[object]]) -> None:
        try:
            await verb()
        except Exception as exc:  # noqa: BLE001 - written down
            self.record.append(f"{name}: {type(exc).__name__}")
        else:
            self.record.append(f"{name}: done")


async def test_an_hour_of_the_whole_cycle_passes_at_once(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend("one two three", load_time=1800, token_time=600)
    async with open_scripted_provider(backend) as provider:
        began = trio.current_time()
        await provider.start()
        assert trio.current_time() - began == pytest.approx(1800)
        async with provider.chat("Hello") as reply:
            assert [text async for text in reply] == ["one", " two", " three"]
        assert trio.current_time() - began == pytest.approx(3000.1)
        assert isinstance(reply.outcome, Finished)
        await provider.stop()
        assert provider.residency == "resident"
        await provider.start()
        await provider.stop()
        await provider.unload_model()
        assert backend.loads == 1


async def test_a_bound_of_tokens_ends_the_answer(autojump_clock: MockClock) -> None:
    async with open_scripted_provider("one two three") as provider:
        await provider.start()
        result = await provider.submit(completion_request("Hello", max_tokens=2)).result()
        assert result.text == "one two"
        assert result.outcome.reason == "length"


async def test_starts_that_wait_for_one_load_are_all_answered(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async with open_scripted_provider() as provider:
        caller = Caller(nursery)
        for number in range(3):
            await caller.call(f"start {number}", provider.start)
        assert caller.record == []
        await provider.start()
        await wait_all_tasks_blocked()
        assert set(caller.record) == {"start 0: done", "start 1: done", "start 2: done"}


async def test_each_start_that_waits_for_a_failing_load_gets_an_error_of_its_own(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    backend = ScriptedBackend()
    error = LoadFailed("no memory", Exit(1, 1), "E no memory")
    backend.fail_next_load(error)
    caught: list[LoadFailed] = []
    async with open_scripted_provider(backend) as provider:

        async def start() -> None:
            with pytest.raises(LoadFailed, match="no memory") as info:
                await provider.start()
            caught.append(info.value)

        async with trio.open_nursery() as starts:
            for _ in range(3):
                starts.start_soon(start)
            await wait_all_tasks_blocked()
            waiting = provider.submit(HELLO)
        assert len({id(one) for one in caught}) == 3
        assert {one.stderr_tail for one in caught} == {"E no memory"}
        assert waiting.outcome == Failed(error, "loading", 0)
        assert provider.failure is error
        await provider.start()
        assert provider.failure is None


async def test_stop_is_answered_at_once_while_loading_and_interrupts_earlier_starts(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async with open_scripted_provider() as provider:
        caller = Caller(nursery)
        await caller.call("start", provider.start)
        began = trio.current_time()
        await caller.call("stop", provider.stop)
        assert trio.current_time() == began
        assert set(caller.record) == {"start: StartInterrupted", "stop: done"}


class SlowToUnload(ScriptedBackend):
    """A model whose memory takes ten seconds to come back."""

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        try:
            await super().run(config, publish)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(10)


async def test_a_start_while_unloading_waits_for_the_end_of_the_old_model(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    backend = SlowToUnload()
    async with open_scripted_provider(backend) as provider:
        await provider.start()
        await provider.stop()
        caller = Caller(nursery)
        began = trio.current_time()
        await caller.call("unload", provider.unload_model)
        await caller.call("start", provider.start)
        assert provider.phase is Phase.UNLOADING
        with pytest.raises(NotStarted):
            provider.submit(HELLO)
        await provider.start()
        assert trio.current_time() - began == pytest.approx(11)
        await wait_all_tasks_blocked()
        assert set(caller.record) == {"start: done", "unload: done"}
        assert provider.diagnostics().counters.generations == 2


async def test_a_later_stop_overtakes_a_start_that_is_postponed(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async with open_scripted_provider(SlowToUnload()) as provider:
        await provider.start()
        await provider.stop()
        caller = Caller(nursery)
        await caller.call("unload", provider.unload_model)
        await caller.call("start", provider.start)
        await caller.call("stop", provider.stop)
        assert set(caller.record) == {"start: StartInterrupted", "stop: done"}
        await trio.sleep(60)
        assert provider.phase is Phase.UNLOADED
        assert provider.diagnostics().counters.generations == 1


async def test_a_start_whose_caller_gave_up_while_it_was_postponed_loads_nothing(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async with open_scripted_provider(SlowToUnload()) as provider:
        await provider.start()
        await provider.stop()
        await Caller(nursery).call("unload", provider.unload_model)
        with trio.move_on_after(1) as scope:
            await provider.start()
        assert scope.cancelled_caught
        await trio.sleep(60)
        assert provider.diagnostics().counters.generations == 1


async def test_a_start_whose_caller_gave_up_during_the_load_goes_on(
    autojump_clock: MockClock,
) -> None:
    # https://github.com/ollama/ollama/issues/8006: the load is the model's; `stop` gives it up.
    async with open_scripted_provider() as provider:
        with trio.move_on_after(0.5) as scope:
            await provider.start()
        assert scope.cancelled_caught
        assert provider.phase is Phase.LOADING
        result = await provider.submit(HELLO).result()
        assert result.text


async def test_verbs_that_a_started_provider_refuses_change_nothing(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted_provider() as provider:
        await provider.start()
        for verb in (provider.unload_model, lambda: provider.configure(OTHER)):
            with pytest.raises(WrongPhase, match="stop first"):
                await verb()
        assert provider.phase is Phase.STARTED
        assert provider.config != OTHER


async def test_a_configuration_given_up_half_way_leaves_the_old_one(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted_provider(SlowToUnload()) as provider:
        old = provider.config
        await provider.start()
        await provider.stop()
        with trio.move_on_after(1):
            await provider.configure(OTHER)
        await trio.sleep(60)
        assert provider.config is old
        assert provider.residency == "unloaded"


class Stuck(ScriptedBackend):
    """A model whose process cannot be killed."""

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        def report(event: object) -> None:
            publish(event)  # type: ignore[arg-type]

        try:
            await super().run(config, report)
        except trio.Cancelled:
            publish(Ended(Unkillable("process 1 survived SIGKILL")))
            raise


async def test_a_model_that_cannot_be_unloaded_keeps_its_configuration(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted_provider(Stuck()) as provider:
        old = provider.config
        await provider.start()
        await provider.stop()
        with pytest.raises(Unkillable):
            await provider.configure(OTHER)
        assert provider.config is old
        await provider.start()
        await provider.stop()
        with pytest.raises(Unkillable):
            await provider.unload_model()


async def test_a_crash_fails_what_runs_and_another_model_serves_what_waits(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend()
    async with open_scripted_provider(backend) as provider:
        await provider.start()
        running, waiting = provider.submit(HELLO), provider.submit(HELLO)
        async for _ in running:
            break
        error = ChildDied("segmentation fault")
        backend.crash(error)
        assert await running.wait() == Failed(error, "generating", 1)
        assert waiting.outcome is None
        late = provider.submit(HELLO)
        assert (await waiting.result()).text
        assert (await late.result()).text
        assert provider.phase is Phase.STARTED
        assert provider.failure is None
        counters = provider.diagnostics().counters
        assert (counters.crashes, counters.restarts, counters.loads) == (1, 1, 2)
        assert (counters.failed, counters.finished) == (1, 2)


async def test_a_start_that_waits_is_answered_by_the_load_that_follows_a_failed_one(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    backend = ScriptedBackend()
    backend.fail_next_load(LoadFailed("killed", Exit(1, -9, "SIGKILL")))
    async with open_scripted_provider(backend) as provider:
        caller = Caller(nursery)
        await caller.call("start", provider.start)
        waiting = provider.submit(HELLO)
        await provider.start()
        await wait_all_tasks_blocked()
        assert caller.record == ["start: done"]
        assert (await waiting.result()).text
        counters = provider.diagnostics().counters
        assert (counters.failed_loads, counters.restarts, counters.loads) == (1, 1, 1)


async def test_a_crash_that_nothing_follows_fails_what_runs_and_what_waits_with_its_cause(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend()
    async with open_scripted_provider(backend, policy=NO_RESTARTS) as provider:
        await provider.start()
        running, waiting = provider.submit(HELLO), provider.submit(HELLO)
        async for _ in running:
            break
        error = ChildDied("segmentation fault")
        backend.crash(error)
        assert await running.wait() == Failed(error, "generating", 1)
        assert await waiting.wait() == Failed(error, "queued", 0)
        assert provider.phase is Phase.UNLOADED
        assert provider.diagnostics().counters.crashes == 1
        with pytest.raises(NotStarted):
            provider.submit(HELLO)
        await provider.start()
        assert (await provider.submit(HELLO).result()).text


async def test_a_crash_while_resident_is_seen_at_the_next_start(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend()
    async with open_scripted_provider(backend) as provider:
        await provider.start()
        await provider.stop()
        backend.crash()
        await wait_all_tasks_blocked()
        assert provider.phase is Phase.UNLOADED
        assert isinstance(provider.failure, ChildDied)
        await provider.start()
        assert backend.loads == 2


async def test_a_crash_during_a_stop_leaves_every_request_cancelled(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend()
    async with open_scripted_provider(backend) as provider:
        await provider.start()
        replies = [provider.submit(HELLO) for _ in range(3)]
        async for _ in replies[0]:
            break
        async with trio.open_nursery() as nursery:
            nursery.start_soon(provider.stop)
            await trio.lowlevel.checkpoint()
            backend.crash()
        assert all(isinstance(reply.outcome, Cancelled | Failed) for reply in replies)
        assert provider.diagnostics().counters.accepted == 3


async def test_an_error_of_the_script_fails_its_request_alone(autojump_clock: MockClock) -> None:
    answers: list[str | Exception] = [ValueError("no such tool"), "fine"]
    async with open_scripted_provider(lambda _: answers.pop(0)) as provider:
        await provider.start()
        first, second = provider.submit(HELLO), provider.submit(HELLO)
        outcome = await first.wait()
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, ValueError)
        assert (await second.result()).text == "fine"


class Broken(Backend):
    async def run(self, config: ModelConfig, publish: Publish) -> None:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("a defect of somebody's backend")


async def test_a_defect_of_a_backend_fails_the_load_alone(autojump_clock: MockClock) -> None:
    async with open_provider(ModelConfig("x.gguf"), backend=Broken()) as provider:
        with pytest.raises(ChildError, match="a defect of somebody's backend"):
            await provider.start()
        assert provider.phase is Phase.UNLOADED


async def test_requests_are_served_in_the_order_in_which_they_came(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend()
    async with open_scripted_provider(backend) as provider:
        await provider.start()
        requests = [completion_request(f"number {number}") for number in range(20)]
        replies = [provider.submit(request) for request in requests]
        await replies[-1].wait()
        assert backend.requests == requests


async def test_a_cancelled_request_that_waits_never_reaches_the_model(
    autojump_clock: MockClock,
) -> None:
    # https://github.com/ggml-org/llama.cpp/issues/13262
    backend = ScriptedBackend()
    async with open_scripted_provider(backend) as provider:
        await provider.start()
        replies = [provider.submit(HELLO) for _ in range(20)]
        await wait_all_tasks_blocked()
        for reply in replies[1:]:
            reply.cancel()
            assert reply.outcome == Cancelled("caller", "queued", 0)
        await replies[0].result()
        await provider.submit(HELLO).result()
        assert len(backend.requests) == 2


async def test_outcomes_come_before_hooks_and_add_up(autojump_clock: MockClock) -> None:
    told: list[tuple[int, Outcome]] = []

    class Actor(LifecycleActor):
        def on_request_started(self, reply: Reply) -> None:
            assert reply.outcome is None

        def on_request_finished(self, reply: Reply, outcome: Outcome) -> None:
            assert reply.outcome is outcome
            told.append((reply.id, outcome))

    async with open_scripted_provider(actor=Actor) as provider:
        await provider.start()
        replies = [provider.submit(HELLO) for _ in range(5)]
        await replies[0].result()
        replies[4].cancel()
        async for _ in replies[1]:
            break
    assert sorted(number for number, _ in told) == [1, 2, 3, 4, 5]
    assert all(reply.outcome is not None for reply in replies)
    kinds = [type(reply.outcome).__name__ for reply in replies]
    assert kinds == ["Finished", "Cancelled", "Cancelled", "Cancelled", "Cancelled"]
    assert replies[1].outcome == Cancelled("shutdown", "generating", 1)
    assert replies[2].outcome == Cancelled("shutdown", "queued", 0)


async def test_leaving_the_block_answers_everybody_who_waits(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    caller = Caller(nursery)
    async with open_scripted_provider() as provider:
        await caller.call("start", provider.start)
    await wait_all_tasks_blocked()
    assert set(caller.record) == {"start: ProviderClosed"}
    for verb in (provider.start, provider.stop, provider.unload_model):
        with pytest.raises(ProviderClosed):
            await verb()
    with pytest.raises(ProviderClosed):
        provider.submit(HELLO)


async def test_a_watcher_gets_the_present_first_and_every_change_of_phase(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    statuses: list[Status] = []

    async def follow(provider: LocalProvider, pause: float) -> None:
        async for status in provider.watch():
            statuses.append(status)
            await trio.sleep(pause)

    async with open_scripted_provider() as provider:
        await provider.start()
        nursery.start_soon(follow, provider, 100)
        await wait_all_tasks_blocked()
        await provider.stop()
        await provider.unload_model()
        await provider.start()
    await trio.sleep(2000)
    phases = [status.phase for status in statuses]
    assert [
        phase for before, phase in zip([None, *phases], phases, strict=False) if phase != before
    ] == [
        Phase.STARTED,
        Phase.STOPPING,
        Phase.RESIDENT,
        Phase.UNLOADING,
        Phase.UNLOADED,
        Phase.LOADING,
        Phase.STARTED,
        Phase.UNLOADED,
    ]


async def test_the_session_sleeps_and_wakes_without_a_change_of_phase(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend()
    async with open_scripted_provider(backend) as provider:
        await provider.start()
        backend.sleep()
        assert (provider.phase, provider.residency) == (Phase.STARTED, "asleep")
        await provider.submit(HELLO).result()
        assert (provider.phase, provider.residency) == (Phase.STARTED, "resident")
        assert backend.loads == 1


async def test_submit_from_another_thread_is_refused_and_names_the_way(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted_provider() as provider:
        await provider.start()
        with pytest.raises(WrongThread, match=r"trio\.from_thread"):
            await trio.to_thread.run_sync(provider.submit, HELLO)


async def test_reprs_show_state_and_identity(autojump_clock: MockClock) -> None:
    async with open_scripted_provider() as provider:
        assert "UNLOADED pid=None 0 pending, 0 running" in repr(provider)
        await provider.start()
        reply = provider.submit(chat_request("a secret question"))
        assert repr(reply) == "<Reply 1 /v1/chat/completions queued>"
        await reply.wait()
        assert repr(reply) == "<Reply 1 /v1/chat/completions Finished>"


async def test_stop_cancels_without_a_checkpoint_between_its_steps(
    autojump_clock: MockClock,
) -> None:
    """Between the first and the last outcome of a stop no other task has run."""
    ticks = 0
    seen: list[int] = []

    class Actor(LifecycleActor):
        def on_request_finished(self, reply: Reply, outcome: Outcome) -> None:
            seen.append(ticks)

    async def tick() -> None:
        nonlocal ticks
        while True:
            await trio.lowlevel.checkpoint()
            ticks += 1

    async with open_scripted_provider(actor=Actor) as provider:
        await provider.start()
        replies = [provider.submit(HELLO) for _ in range(100)]
        async for _ in replies[0]:
            break
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick)
            await provider.stop()
            nursery.cancel_scope.cancel()
        assert len(set(seen[:99])) == 1
        assert len(seen) == 100


async def test_a_start_interrupted_by_an_unload_says_so(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async with open_scripted_provider(SlowToUnload()) as provider:

        async def start() -> None:
            with pytest.raises(StartInterrupted, match="gave the start up"):
                await provider.start()

        nursery.start_soon(start)
        await wait_all_tasks_blocked()
        await provider.unload_model()
        assert provider.phase is Phase.UNLOADED


# -- other people's backends -------------------------------------------------------------------


class Untidy(ScriptedBackend):
    """Raises in a nursery of its own when it is cancelled."""

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._clean_up_badly)
            await super().run(config, publish)

    async def play(self, request: Request, emit: Emit) -> Finished:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._clean_up_badly)
            return await super().play(request, emit)  # noqa: ASYNC121 - what others do, too

    async def _clean_up_badly(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("not tidied up")


async def test_an_error_beside_a_cancel_ends_a_request_or_a_model_and_nothing_else(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted_provider(Untidy()) as provider:
        await provider.start()
        reply = provider.submit(HELLO)
        async for _ in reply:
            break
        outcome = await provider.cancel(reply.id)
        assert isinstance(outcome, Failed)
        await provider.stop()
        await provider.unload_model()
        assert isinstance(provider.failure, ChildError)
        await provider.start()


class Deaf(ModelSession):
    """Never notices that its model is gone."""

    async def perform(self, request: Request, emit: Emit) -> Finished:
        await trio.sleep_forever()
        raise AssertionError


class Dying(Backend):
    """A model that dies after two seconds."""

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        publish(Opened(Deaf()))
        await trio.sleep(2)
        publish(Ended(ChildDied("the model died")))
        publish(Awake())  # what comes too late means nothing
        publish(Ended())


async def test_the_death_of_a_model_ends_requests_whose_session_does_not_notice(
    autojump_clock: MockClock,
) -> None:
    config = ModelConfig("any.gguf")
    async with open_provider(config, backend=Dying(), policy=NO_RESTARTS) as provider:
        await provider.start()
        reply = provider.submit(HELLO)
        began = trio.current_time()
        outcome = await reply.wait()
        assert trio.current_time() - began == pytest.approx(3)
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, ChildDied)
        await wait_all_tasks_blocked()
        assert provider.phase is Phase.UNLOADED


@pytest.mark.parametrize("policy", [Policy(), NO_RESTARTS], ids=["restarts", "no restarts"])
async def test_a_start_beside_a_dead_model_waits_for_a_new_one(
    autojump_clock: MockClock, policy: Policy
) -> None:
    config = ModelConfig("any.gguf")
    async with open_provider(config, backend=Dying(), policy=policy) as provider:
        await provider.start()
        provider.submit(HELLO)
        await trio.sleep(2.5)  # dead, and not yet noticed by the request
        await provider.start()
        assert provider.diagnostics().counters.loads == 2


class Odd(ChildError):
    """Cannot be copied: its constructor wants more than its `args`."""

    def __init__(self, message: str, *, detail: str) -> None:
        super().__init__(message)
        self.detail = detail


async def test_an_error_that_cannot_be_copied_still_answers_every_start(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    backend = ScriptedBackend()
    backend.fail_next_load(Odd("odd", detail="very"))
    async with open_scripted_provider(backend, policy=NO_RESTARTS) as provider:
        caller = Caller(nursery)
        await caller.call("one", provider.start)
        await caller.call("two", provider.start)
        await trio.sleep(5)
        await wait_all_tasks_blocked()
        assert set(caller.record) == {"one: Odd", "two: Odd"}
        await provider.start()


async def test_a_stop_whose_caller_is_cancelled_goes_on(autojump_clock: MockClock) -> None:
    async with open_scripted_provider() as provider:
        await provider.start()
        reply = provider.submit(HELLO)
        with trio.CancelScope() as scope:
            scope.cancel()
            await provider.stop()
        assert scope.cancelled_caught
        assert isinstance(await reply.wait(), Cancelled)
        await wait_all_tasks_blocked()
        assert provider.phase is Phase.RESIDENT


async def test_the_last_of_two_configurations_is_taken(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async with open_scripted_provider(SlowToUnload()) as provider:
        old = provider.config
        await provider.start()
        await provider.stop()
        caller = Caller(nursery)
        await caller.call("other", lambda: provider.configure(OTHER))
        await provider.configure(old)
        await wait_all_tasks_blocked()
        assert caller.record == ["other: done"]
        assert provider.config == old


async def test_sleep_and_wake_are_seen_by_those_who_watch(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend()
    async with open_scripted_provider(backend) as provider:
        await provider.start()
        statuses = provider.watch()
        assert (await anext(statuses)).residency == "resident"
        backend.sleep()
        assert (await anext(statuses)).residency == "asleep"
        await provider.submit(HELLO).result()
        progress = await anext(statuses)
        assert (progress.residency, progress.progress is not None) == ("asleep", True)
        awake = await anext(statuses)
        assert (awake.residency, awake.progress) == ("resident", None)


async def test_names_for_children_are_refused_beside_a_backend(autojump_clock: MockClock) -> None:
    with pytest.raises(SpecificationError, match="not for a Backend"):
        async with open_provider(ModelConfig("x"), backend=ScriptedBackend(), name="mine"):
            pass


def test_help_shows_the_arguments_that_a_chat_takes() -> None:
    shown = inspect.signature(LocalProvider.chat).parameters
    assert list(shown)[:3] == ["self", "messages", "system"]
