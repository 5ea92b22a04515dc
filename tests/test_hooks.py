"""What a subclass of the actor is told and asked, on real children."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import CoroutineType

import attrs
import psutil
import pytest
import trio
from killing import kill_and_return
from moments import first_text, reach

from llamatrio import (
    ChildDied,
    Hosted,
    Life,
    LifecycleActor,
    Limits,
    LocalProvider,
    ModelConfig,
    NotStarted,
    Own,
    Phase,
    Policy,
    Reply,
    Transition,
    VerbInHook,
    Waiting,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind, Stock
from llamatrio.outcomes import Cancelled, Failed, Finished, Outcome
from llamatrio.session.programs import find_program
from llamatrio.session.server import ServerBackend
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot

if sys.platform == "win32":
    pytest.skip("wrappers are shell scripts", allow_module_level=True)

SHORT = completion_request("Hello", max_tokens=2, temperature=0)
ON_AND_ON = completion_request("Hello", max_tokens=100_000, temperature=0)

GUARD = 60.0

OBSERVERS = ("on_transition", "on_unexpected_output", "on_request_started", "on_request_finished")
DECIDERS = ("choose_next", "should_restart", "prepare")


@pytest.fixture
def babbling(kind: Kind, tmp_path: Path) -> Kind:
    """A real child that writes to stdout, first of all, what is no record."""
    wrapper = tmp_path / "babbling"
    wrapper.write_text(f'#!/bin/sh\necho 41%\nexec "{find_program(kind)}" "$@"\n')
    wrapper.chmod(0o700)
    return Hosted(str(wrapper)) if isinstance(kind, Hosted) else Stock(str(wrapper))


@asynccontextmanager
async def opened(
    parrot: Parrot, kind: Kind, actor: type[LifecycleActor], slots: int = 1
) -> AsyncGenerator[LocalProvider, None]:
    config = ModelConfig(parrot.path, slots=slots, batch=64, context=4096, threads=1)
    with trio.fail_after(GUARD):
        async with open_provider(config, backend=kind, actor=actor) as provider:
            yield provider


def actor_of(provider: LocalProvider) -> LifecycleActor:
    return provider._actor


async def go_through_everything(provider: LocalProvider) -> None:
    """A life in which every hook is called."""
    await provider.start()
    assert isinstance(await provider.submit(SHORT).wait(), Finished)
    await kill_and_return(provider)
    assert isinstance(await provider.submit(SHORT).wait(), Finished)
    await provider.stop()
    await provider.unload_model()


# -- verbs ---------------------------------------------------------------------------------------


Call = Callable[[], object]


def refusal_of(call: Call) -> type[Exception] | None:
    try:
        made = call()
    except Exception as exc:  # noqa: BLE001 - its type is what we want
        return type(exc)
    if isinstance(made, CoroutineType):
        made.close()
    return None


class Calling(LifecycleActor):
    """Calls every verb in every hook, and notes what it got."""

    provider: LocalProvider

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.refusals: dict[str, set[type[Exception] | None]] = {}

    def call_everything(self, hook: str) -> None:
        provider = self.provider
        other = attrs.evolve(self.config, context=512)
        calls: list[Call] = [
            provider.start,
            provider.stop,
            lambda: provider.stop(drain=True),
            provider.unload_model,
            lambda: provider.configure(other),
            lambda: provider.configure(policy=Policy()),
            provider.aclose,
        ]
        self.refusals.setdefault(hook, set()).update(map(refusal_of, calls))

    def on_transition(self, transition: Transition) -> None:
        self.call_everything("on_transition")

    def on_unexpected_output(self, data: bytes, count: int) -> None:
        self.call_everything("on_unexpected_output")

    def on_request_started(self, reply: Reply) -> None:
        self.call_everything("on_request_started")

    def on_request_finished(self, reply: Reply, outcome: Outcome) -> None:
        self.call_everything("on_request_finished")

    def choose_next(self, waiting: Waiting) -> Reply:
        self.call_everything("choose_next")
        return super().choose_next(waiting)

    def should_restart(self, lives: Sequence[Life]) -> float | None:
        self.call_everything("should_restart")
        return super().should_restart(lives)

    def prepare(self, config: ModelConfig) -> ModelConfig:
        self.call_everything("prepare")
        return super().prepare(config)


async def test_every_verb_is_refused_at_once_in_every_hook(babbling: Kind, parrot: Parrot) -> None:
    async with opened(parrot, babbling, Calling) as provider:
        actor = actor_of(provider)
        assert isinstance(actor, Calling)
        actor.provider = provider
        await go_through_everything(provider)
        assert actor.refusals == {hook: {VerbInHook} for hook in (*OBSERVERS, *DECIDERS)}
        assert provider.phase is Phase.UNLOADED


async def test_a_hook_has_a_task_call_the_verb(kind: Kind, parrot: Parrot) -> None:
    class Stopping(LifecycleActor):
        """Stops after its third answer."""

        provider: LocalProvider
        nursery: trio.Nursery

        def on_request_finished(self, reply: Reply, outcome: Outcome) -> None:
            if self.counters.finished == 3:
                self.nursery.start_soon(self.stop_it)

        async def stop_it(self) -> None:
            await self.provider.stop()
            await self.provider.unload_model()

    with trio.fail_after(GUARD):
        async with (
            opened(parrot, kind, Stopping) as provider,
            trio.open_nursery() as nursery,
        ):
            actor = actor_of(provider)
            assert isinstance(actor, Stopping)
            actor.provider, actor.nursery = provider, nursery
            await provider.start()
            replies = [provider.submit(SHORT) for _ in range(3)]
            replies.append(provider.submit(ON_AND_ON))
            await reach(provider, Phase.UNLOADED)
            kinds = [type(reply.outcome) for reply in replies]
            assert kinds == [Finished, Finished, Finished, Cancelled]


async def test_verbs_can_be_called_again_after_a_hook_that_was_refused_one(
    kind: Kind, parrot: Parrot, caplog: pytest.LogCaptureFixture
) -> None:
    class Rash(LifecycleActor):
        provider: LocalProvider

        def on_request_finished(self, reply: Reply, outcome: Outcome) -> None:
            self.provider.stop()  # type: ignore[unused-coroutine]

    async with opened(parrot, kind, Rash) as provider:
        actor = actor_of(provider)
        assert isinstance(actor, Rash)
        actor.provider = provider
        await provider.start()
        await provider.submit(SHORT).wait()
        assert provider.started
        assert provider.diagnostics().counters.hook_errors == 1
        assert "VerbInHook" in caplog.text
        await provider.stop()


# -- observers: what they are told -------------------------------------------------------------


class Diary(LifecycleActor):
    """Writes down what its observers are told, and sees to it that it is true."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.transitions: list[str] = []
        self.unexpected: list[tuple[bytes, int]] = []
        self.started_ids: list[int] = []
        self.finished_ids: list[int] = []
        self.outcomes: dict[int, Outcome] = {}

    def on_transition(self, transition: Transition) -> None:
        assert self.phase is transition.new
        assert transition.old is not transition.new
        self.transitions.append(f"{transition} ({transition.generation})")

    def on_unexpected_output(self, data: bytes, count: int) -> None:
        self.unexpected.append((data, count))

    def on_request_started(self, reply: Reply) -> None:
        assert reply in self.running
        assert (reply.outcome, reply.phase) == (None, "prompt")
        self.started_ids.append(reply.id)

    def on_request_finished(self, reply: Reply, outcome: Outcome) -> None:
        assert reply.outcome is outcome
        assert reply not in self.running
        assert reply.id not in self.outcomes
        self.finished_ids.append(reply.id)
        self.outcomes[reply.id] = outcome


def diary_of(provider: LocalProvider) -> Diary:
    actor = actor_of(provider)
    assert isinstance(actor, Diary)
    return actor


async def test_every_change_of_phase_is_told_with_its_event_and_generation(
    kind: Kind, parrot: Parrot
) -> None:
    async with opened(parrot, kind, Diary) as provider:
        diary = diary_of(provider)
        await provider.start()
        await provider.start()  # changes nothing
        await provider.stop()
        await provider.start()
        await kill_and_return(provider)
        await provider.stop()
        await provider.unload_model()
        await provider.start()
        assert provider.diagnostics().counters.hook_errors == 0
    assert diary.transitions == [
        "UNLOADED --START--> LOADING (0)",
        "LOADING --READY--> STARTED (1)",
        "STARTED --STOP--> STOPPING (1)",
        "STOPPING --IDLE--> RESIDENT (1)",
        "RESIDENT --START--> STARTED (1)",
        "STARTED --AGAIN--> LOADING (1)",
        "LOADING --READY--> STARTED (2)",
        "STARTED --STOP--> STOPPING (2)",
        "STOPPING --IDLE--> RESIDENT (2)",
        "RESIDENT --UNLOAD--> UNLOADING (2)",
        "UNLOADING --GONE--> UNLOADED (2)",
        "UNLOADED --START--> LOADING (2)",
        "LOADING --READY--> STARTED (3)",
    ]  # the end of the block is told to nobody


async def test_every_outcome_is_told_once_whatever_it_is(kind: Kind, endless: Parrot) -> None:
    hasty = completion_request("Hello", max_tokens=100_000, limits=Limits(total=0.05))
    keyed = completion_request("Hello", max_tokens=100_000, supersede="mine")
    async with opened(endless, kind, Diary) as provider:
        diary = diary_of(provider)
        await provider.start()
        finished = provider.submit(SHORT)
        await finished.wait()
        expired = provider.submit(hasty)
        await expired.wait()
        superseded = provider.submit(keyed)
        await first_text(superseded)
        cancelled = provider.submit(keyed)
        await first_text(cancelled)
        waiting = provider.submit(SHORT)
        waiting.cancel()
        assert diary.finished_ids[-1] == waiting.id  # told at once
        await provider.cancel(cancelled.id)
        failed = provider.submit(ON_AND_ON)
        await first_text(failed)
        await kill_and_return(provider)
        stopped = provider.submit(ON_AND_ON)
        await first_text(stopped)
        await provider.stop()
        await provider.start()
        left = provider.submit(ON_AND_ON)
        await first_text(left)
        refused = provider.submit(SHORT)
    replies = [
        *(finished, expired, superseded, waiting, cancelled),
        *(failed, stopped, left, refused),
    ]
    assert diary.counters.hook_errors == 0
    assert sorted(diary.finished_ids) == sorted(reply.id for reply in replies)
    assert diary.outcomes == {reply.id: reply.outcome for reply in replies}
    assert isinstance(finished.outcome, Finished)
    assert isinstance(failed.outcome, Failed)
    assert isinstance(failed.outcome.error, ChildDied)
    assert [reply.outcome.by for reply in replies if isinstance(reply.outcome, Cancelled)] == [
        *("deadline", "superseded", "caller", "caller", "stop", "shutdown", "shutdown")
    ]
    assert set(diary.started_ids) == {reply.id for reply in replies} - {waiting.id, refused.id}


async def test_a_request_that_another_model_takes_up_is_told_to_be_started_again(
    kind: Kind, endless: Parrot
) -> None:
    request = completion_request("Hello", max_tokens=30, temperature=0, on_crash="resume")
    async with opened(endless, kind, Diary) as provider:
        diary = diary_of(provider)
        await provider.start()
        reply = provider.submit(request)
        await first_text(reply)
        await kill_and_return(provider)
        outcome = await reply.wait()
        assert isinstance(outcome, Finished)
        assert outcome.resumed == 1
        assert diary.started_ids == [reply.id, reply.id]
        assert diary.finished_ids == [reply.id]
        assert diary.counters.hook_errors == 0


class Meddling(Diary):
    """Cancels and submits, which observers may."""

    to_cancel: Reply | None = None
    to_submit = 0
    submitted: tuple[Reply, ...] = ()

    def on_transition(self, transition: Transition) -> None:
        super().on_transition(transition)
        if transition.new is Phase.LOADING and transition.old is Phase.UNLOADED:
            with pytest.raises(NotStarted):  # what follows from it has not been done yet
                self.submit(SHORT)
        if transition.new is Phase.STOPPING:
            self.submitted += (self.submit(SHORT),)

    def on_request_started(self, reply: Reply) -> None:
        super().on_request_started(reply)
        if self.to_cancel is not None:
            self.to_cancel.cancel()
            self.to_cancel = None

    def on_request_finished(self, reply: Reply, outcome: Outcome) -> None:
        super().on_request_finished(reply, outcome)
        if self.to_submit:
            self.to_submit -= 1
            self.submitted += (self.submit(SHORT),)


async def test_observers_may_cancel_and_submit(kind: Kind, endless: Parrot) -> None:
    async with opened(endless, kind, Meddling) as provider:
        diary = diary_of(provider)
        assert isinstance(diary, Meddling)
        await provider.start()
        running, waiting = provider.submit(ON_AND_ON), provider.submit(SHORT)
        diary.to_cancel = waiting
        await first_text(running)
        assert waiting.outcome == Cancelled("caller", "queued", 0)
        diary.to_submit = 2
        running.cancel()
        await running.wait()
        assert isinstance(await diary.submitted[0].wait(), Finished)
        assert isinstance(await diary.submitted[1].wait(), Finished)
        await provider.stop()
        assert diary.submitted[2].outcome == Cancelled("stop", "queued", 0)
        assert diary.counters.accepted == len(diary.outcomes) == 5
        assert diary.counters.hook_errors == 0


async def test_an_observer_may_cancel_the_very_request_it_is_told_of(
    kind: Kind, endless: Parrot
) -> None:
    class Denying(Diary):
        def on_request_started(self, reply: Reply) -> None:
            super().on_request_started(reply)
            if reply.request is ON_AND_ON:
                reply.cancel()

    async with opened(endless, kind, Denying) as provider:
        await provider.start()
        denied, served = provider.submit(ON_AND_ON), provider.submit(SHORT)
        assert await denied.wait() == Cancelled("caller", "prompt", 0)
        assert isinstance(await served.wait(), Finished)
        assert diary_of(provider).counters.hook_errors == 0


# -- observers: output that is no record -------------------------------------------------------


async def test_a_real_childs_rubbish_is_told_and_changes_nothing(
    babbling: Kind, parrot: Parrot
) -> None:
    async with opened(parrot, babbling, Diary) as provider:
        await provider.start()
        assert diary_of(provider).unexpected == [(b"41%", 1)]
        assert (await provider.submit(completion_request("Hello")).result()).text == parrot.text
        assert provider.diagnostics().pipes.unexpected == 1
        assert provider.diagnostics().counters.hook_errors == 0


async def unexpected(parrot: Parrot, *steps: str) -> list[tuple[bytes, int]]:
    """Run a child that takes these steps before it is ready."""
    child = Own(fakechild.command("S loading", *steps, "S ready", "R"))
    async with opened(parrot, child, Diary) as provider:
        await provider.start()
        return diary_of(provider).unexpected


@pytest.mark.slow
async def test_rubbish_is_told_once_a_second_with_the_number_of_lines(parrot: Parrot) -> None:
    many = [rf"O line\s{number}\n" for number in range(2, 41)]
    told = await unexpected(parrot, r"O first\n", *many, "W 2", r"O last\n", r"O lost\n")
    assert told == [(b"first", 1), (b"last", 40)]


async def test_long_rubbish_is_cut(parrot: Parrot) -> None:
    told = await unexpected(parrot, "On 5000", r"O \n")
    ((data, count),) = told
    assert (len(data), count) == (200, 1)


async def test_rubbish_is_told_without_secrets(parrot: Parrot) -> None:
    steps = fakechild.command("S loading", "S ready", "R")
    child = Own(("sh", "-c", 'echo "key $LLAMA_API_KEY."; exec "$0" "$@"', *steps))
    async with opened(parrot, child, Diary) as provider:
        await provider.start()
        pid = provider.diagnostics().pid
        assert pid is not None
        key = psutil.Process(pid).environ()["LLAMA_API_KEY"]
        ((data, _),) = diary_of(provider).unexpected
        assert data.startswith(b"key ")
        assert len(key) > 20
        assert key.encode() not in data


# -- observers: what they break ----------------------------------------------------------------


class Whim(BaseException):
    pass


def raising(error: BaseException, *names: str) -> type[LifecycleActor]:
    """Make an actor of which some hooks raise."""

    def fail(self: LifecycleActor, *args: object) -> None:
        raise error

    return type("Raising", (LifecycleActor,), dict.fromkeys(names, fail))


async def test_errors_of_observers_are_logged_and_counted_and_change_nothing(
    babbling: Kind, parrot: Parrot, caplog: pytest.LogCaptureFixture
) -> None:
    actor = raising(ValueError("mine"), *OBSERVERS)
    async with opened(parrot, babbling, actor) as provider:
        await go_through_everything(provider)
        counters = provider.diagnostics().counters
        # 8 changes of phase, 2 lines of rubbish, 2 requests, each of which begins and ends
        assert counters.hook_errors == 8 + 2 + 2 + 2
        assert (counters.finished, counters.restarts, counters.unloads) == (2, 1, 1)
    records = [one for one in caplog.records if one.name == "llamatrio.lifecycle"]
    assert {one.getMessage() for one in records} == {f"Raising.{name} raised" for name in OBSERVERS}
    assert len(records) == 14
    assert all(one.exc_info and isinstance(one.exc_info[1], ValueError) for one in records)


@pytest.mark.parametrize("leaves_in", OBSERVERS)
@pytest.mark.parametrize("error", [SystemExit(3), Whim()], ids=lambda error: type(error).__name__)
async def test_an_observer_that_wants_out_comes_out_and_no_hook_is_called_any_more(
    babbling: Kind, parrot: Parrot, leaves_in: str, error: BaseException
) -> None:
    class Leaving(Calling):
        last = ""

        def call_everything(self, hook: str) -> None:
            assert self.last != leaves_in
            self.last = hook
            if hook == leaves_in:
                raise error

    actors: list[LifecycleActor] = []
    with pytest.raises(type(error)) as caught:
        async with opened(parrot, babbling, Leaving) as provider:
            actors.append(actor_of(provider))
            await go_through_everything(provider)
    assert caught.value is error
    assert isinstance(actors[0], Leaving)
    assert actors[0].last == leaves_in
    counters = actors[0].counters
    assert counters.accepted == counters.finished + counters.cancelled + counters.failed
    assert counters.hook_errors == 0


# -- deciders ----------------------------------------------------------------------------------


class Asked(LifecycleActor):
    """Notes what it is asked, and when."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.waiting: list[list[int]] = []
        self.lives: list[Sequence[Life]] = []
        self.prepared: list[ModelConfig] = []
        self.policy = Policy(longest_backoff=0.1)

    def choose_next(self, waiting: Waiting) -> Reply:
        assert len(self.running) < self.config.slots
        assert len(waiting) == len(list(waiting)) > 0
        assert waiting.first is next(iter(waiting))
        assert all(reply in waiting for reply in waiting)
        assert not any(reply in waiting for reply in self.running)
        self.waiting.append([reply.id for reply in waiting])
        return waiting.first

    def should_restart(self, lives: Sequence[Life]) -> float | None:
        self.lives.append(lives)
        return super().should_restart(lives)

    def prepare(self, config: ModelConfig) -> ModelConfig:
        assert config is self.config
        self.prepared.append(config)
        return attrs.evolve(config, slots=1)


def asked_of(provider: LocalProvider) -> Asked:
    actor = actor_of(provider)
    assert isinstance(actor, Asked)
    return actor


async def test_choose_next_is_asked_for_each_slot_with_those_that_wait_in_order(
    kind: Kind, endless: Parrot
) -> None:
    async with opened(endless, kind, Asked) as provider:
        await provider.start()
        running = provider.submit(ON_AND_ON)
        await first_text(running)
        ranks = (0, 7, 0, 7)
        replies = [
            provider.submit(completion_request("Hello", max_tokens=1, priority=rank))
            for rank in ranks
        ]
        assert asked_of(provider).waiting == [[1]]
        running.cancel()
        for reply in replies:
            assert isinstance(await reply.wait(), Finished)
        assert asked_of(provider).waiting == [[1], [3, 5, 2, 4], [5, 2, 4], [2, 4], [4]]


async def test_should_restart_is_asked_for_a_model_in_use_alone(
    kind: Kind, endless: Parrot
) -> None:
    async with opened(endless, kind, Asked) as provider:
        asked = asked_of(provider)
        await provider.start()
        assert isinstance(await provider.submit(SHORT).wait(), Finished)
        await kill_and_return(provider)
        await kill_and_return(provider)
        assert [len(lives) for lives in asked.lives] == [1, 2]
        first, second = asked.lives[-1]
        assert (first.finished, first.opened, first.exit is not None) == (1, True, True)
        assert (second.finished, second.opened, second.exit is not None) == (0, True, True)
        assert isinstance(second.error, ChildDied)
        assert 0 < second.seconds < GUARD
        assert first.ended_at < second.ended_at <= trio.current_time()

        await provider.stop()
        pid = provider.diagnostics().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await reach(provider, Phase.UNLOADED, 3)
        await provider.start()
        await provider.stop()
        await provider.unload_model()
        assert len(asked.lives) == 2
        await provider.start()
        await kill_and_return(provider)
        assert [len(lives) for lives in asked.lives] == [1, 2, 1]  # a start begins anew


async def test_prepare_is_asked_before_each_life_and_for_nothing_else(
    kind: Kind, endless: Parrot
) -> None:
    async with opened(endless, kind, Asked, slots=2) as provider:
        asked = asked_of(provider)
        await provider.start()
        await provider.stop()
        await provider.start()
        assert len(asked.prepared) == 1
        await kill_and_return(provider)
        assert len(asked.prepared) == 2
        replies = [provider.submit(ON_AND_ON) for _ in range(2)]
        await first_text(replies[0])
        assert (provider.config.slots, provider.diagnostics().running) == (2, 1)
        await provider.stop()
        await provider.configure(attrs.evolve(provider.config, context=512))
        assert len(asked.prepared) == 2
        await provider.start()
        assert asked.prepared[-1] is provider.config
        assert asked.prepared[-1].context == 512


@pytest.mark.parametrize("hook", DECIDERS)
async def test_an_error_of_a_decider_comes_out_bare_in_every_way_of_owning(
    kind: Kind, endless: Parrot, hook: str
) -> None:
    error = ValueError("mine")
    actors: list[LifecycleActor] = []
    with pytest.raises(ValueError, match="mine") as caught:
        async with opened(endless, kind, raising(error, hook)) as provider:
            actors.append(actor_of(provider))
            await go_through_everything(provider)
    assert caught.value is error
    assert caught.value.__cause__ is caught.value.__context__ is None
    counters = actors[0].counters
    assert counters.accepted == counters.finished + counters.cancelled + counters.failed
    assert counters.hook_errors == 0


@pytest.mark.parametrize("hook", [*OBSERVERS, *DECIDERS])
def test_a_hook_that_is_async_is_refused_by_name(parrot: Parrot, hook: str) -> None:
    async def wait(self: LifecycleActor, *args: object) -> None:
        await trio.lowlevel.checkpoint()

    actor = type("Asynchronous", (LifecycleActor,), {hook: wait})
    with pytest.raises(TypeError, match=f"{hook} is async"):
        actor(ModelConfig(parrot.path), ServerBackend())
