"""Who gets a slot, who loses it, and how soon: cancel, supersede, priority and draining."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
import trio.lowlevel
from moments import first_text, reach, serve_another, within_prompt
from trio.testing import MockClock, wait_all_tasks_blocked

from llamatrio import (
    LifecycleActor,
    LocalProvider,
    ModelConfig,
    NotStarted,
    Phase,
    ProviderClosed,
    Reply,
    Request,
    RequestCancelled,
    SpecificationError,
    StartInterrupted,
    Waiting,
    WrongPhase,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.outcomes import Cancelled, Failed, Finished
from llamatrio.testing import ScriptedBackend, open_scripted_provider
from llamatrio.testing.parrot import Parrot, write_large_parrot

SHORT = completion_request("Hello", max_tokens=2, temperature=0)
ON_AND_ON = completion_request("Hello", max_tokens=100_000, temperature=0)
LONG_PROMPT = completion_request("x" * 3500, max_tokens=2)

GUARD = 60.0


@pytest.fixture(scope="module")
def ponderous(models: Path) -> Parrot:
    """A model that needs some 25 ms for a token: a busy machine does not make several of it."""
    return write_large_parrot(models / "ponderous.gguf", loop=True)


def config_of(parrot: Parrot, slots: int = 1) -> ModelConfig:
    """One thread, and a small grain in prompts: they take seconds, and can be left at any time."""
    return ModelConfig(parrot.path, slots=slots, batch=64, context=4096, threads=1)


@asynccontextmanager
async def started(
    config: ModelConfig, kind: Kind, actor: type[LifecycleActor] = LifecycleActor
) -> AsyncGenerator[LocalProvider, None]:
    with trio.fail_after(GUARD):
        async with open_provider(config, backend=kind, actor=actor) as provider:
            await provider.start()
            yield provider


# -- cancel by number --------------------------------------------------------------------------


async def test_a_cancel_catches_a_request_that_waits_for_a_slot(
    kind: Kind, endless: Parrot
) -> None:
    async with started(config_of(endless), kind) as provider:
        running, waiting = provider.submit(ON_AND_ON), provider.submit(ON_AND_ON)
        await first_text(running)
        assert await provider.cancel(waiting.id) == Cancelled("caller", "queued", 0)
        assert running.outcome is None


async def test_a_cancel_catches_a_request_that_waits_for_the_model(
    kind: Kind, large: Parrot
) -> None:
    with trio.fail_after(GUARD):
        async with (
            open_provider(config_of(large), backend=kind) as provider,
            trio.open_nursery() as nursery,
        ):
            await nursery.start(provider.start)
            given_up, kept = provider.submit(SHORT), provider.submit(SHORT)
            assert given_up.phase == "loading"
            assert await provider.cancel(given_up.id) == Cancelled("caller", "loading", 0)
            assert provider.phase is Phase.LOADING
            assert isinstance(await kept.wait(), Finished)


async def test_a_cancel_catches_a_request_within_its_prompt(kind: Kind, endless: Parrot) -> None:
    async with started(config_of(endless), kind) as provider:
        reply = provider.submit(LONG_PROMPT)
        await within_prompt(reply)
        assert await provider.cancel(reply.id) == Cancelled("caller", "prompt", 0)
        await serve_another(provider)


async def test_a_cancel_says_how_many_pieces_had_arrived(kind: Kind, endless: Parrot) -> None:
    async with started(config_of(endless), kind) as provider:
        reply = provider.submit(ON_AND_ON)
        pieces: list[str] = []
        with pytest.raises(RequestCancelled) as caught:
            async for delta in reply.deltas():
                pieces.append(delta.text)
                if len(pieces) == 5:
                    reply.cancel()
        assert caught.value.outcome == Cancelled("caller", "generating", len(pieces))
        assert "".join(pieces) == reply.text
        assert (endless.text * 2).startswith(reply.text)
        await serve_another(provider)


async def test_a_cancel_of_what_has_its_outcome_catches_nothing(kind: Kind, parrot: Parrot) -> None:
    async with started(config_of(parrot), kind) as provider:
        reply = provider.submit(SHORT)
        outcome = await reply.wait()
        assert await provider.cancel(reply.id) is None
        reply.cancel()
        assert reply.outcome is outcome


async def test_a_cancel_whose_caller_is_cancelled_gives_the_request_up_all_the_same(
    kind: Kind, endless: Parrot
) -> None:
    async with started(config_of(endless), kind) as provider:
        reply = provider.submit(ON_AND_ON)
        await first_text(reply)
        with trio.CancelScope() as scope:
            scope.cancel()
            await provider.cancel(reply.id)
        assert scope.cancelled_caught
        assert await reply.wait() == Cancelled("caller", "generating", reply.tokens)


# -- cancel what runs --------------------------------------------------------------------------


async def test_cancel_current_gives_up_all_that_run_wherever_they_stand(
    kind: Kind, endless: Parrot
) -> None:
    async with started(config_of(endless, slots=2), kind) as provider:
        generating = provider.submit(ON_AND_ON)
        await first_text(generating)  # a prompt that came first would leave it no room
        reading, *waiting = map(provider.submit, (LONG_PROMPT, ON_AND_ON, ON_AND_ON, ON_AND_ON))
        await within_prompt(reading)
        assert await provider.cancel_current() == (
            Cancelled("caller", "generating", generating.tokens),
            Cancelled("caller", "prompt", 0),
        )
        await first_text(waiting[0])
        await first_text(waiting[1])
        assert [reply.outcome for reply in waiting] == [None] * 3
        assert waiting[2].phase == "queued"


async def test_cancel_current_leaves_those_that_wait_for_the_model(
    kind: Kind, large: Parrot
) -> None:
    with trio.fail_after(GUARD):
        async with (
            open_provider(config_of(large), backend=kind) as provider,
            trio.open_nursery() as nursery,
        ):
            assert await provider.cancel_current() == ()
            await nursery.start(provider.start)
            reply = provider.submit(SHORT)
            assert await provider.cancel_current() == ()
            assert isinstance(await reply.wait(), Finished)
            assert await provider.cancel_current() == ()


# -- the newest wins ---------------------------------------------------------------------------


def keyed(request: Request, key: str) -> Request:
    return attrs.evolve(request, supersede=key)


async def test_a_newer_request_takes_the_place_of_one_that_waits(
    kind: Kind, endless: Parrot
) -> None:
    async with started(config_of(endless), kind) as provider:
        running = provider.submit(ON_AND_ON)
        old, other, plain = (
            provider.submit(request)
            for request in (keyed(SHORT, "mine"), keyed(SHORT, "theirs"), SHORT)
        )
        await first_text(running)
        new = provider.submit(keyed(SHORT, "mine"))
        assert old.outcome == Cancelled("superseded", "queued", 0)
        assert [reply.outcome for reply in (running, other, plain, new)] == [None] * 4
        running.cancel()
        for reply in (other, plain, new):
            assert isinstance(await reply.wait(), Finished)
        assert provider.diagnostics().counters.superseded == 1


async def test_a_newer_request_ends_one_that_runs_and_gets_its_slot(
    kind: Kind, endless: Parrot
) -> None:
    async with started(config_of(endless), kind) as provider:
        old = provider.submit(keyed(ON_AND_ON, "mine"))
        await first_text(old)
        new = provider.submit(keyed(SHORT, "mine"))
        assert isinstance(await new.wait(), Finished)
        assert old.outcome == Cancelled("superseded", "generating", old.tokens)
        with pytest.raises(RequestCancelled, match="by a newer one"):
            await old.result()


async def test_a_newer_request_ends_one_within_its_prompt(kind: Kind, endless: Parrot) -> None:
    async with started(config_of(endless), kind) as provider:
        old = provider.submit(keyed(LONG_PROMPT, "mine"))
        await within_prompt(old)
        new = provider.submit(keyed(SHORT, "mine"))
        assert isinstance(await new.wait(), Finished)
        assert old.outcome == Cancelled("superseded", "prompt", 0)


async def test_of_many_with_one_key_the_last_alone_reaches_the_model(
    kind: Kind, large: Parrot
) -> None:
    with trio.fail_after(GUARD):
        async with (
            open_provider(config_of(large), backend=kind) as provider,
            trio.open_nursery() as nursery,
        ):
            await nursery.start(provider.start)
            *old, new = [provider.submit(keyed(SHORT, "mine")) for _ in range(20)]
            assert {reply.outcome for reply in old} == {Cancelled("superseded", "loading", 0)}
            assert isinstance(await new.wait(), Finished)


async def test_a_key_is_free_again_once_its_request_has_an_outcome(
    kind: Kind, parrot: Parrot
) -> None:
    async with started(config_of(parrot), kind) as provider:
        first = provider.submit(keyed(SHORT, "mine"))
        outcome = await first.wait()
        assert isinstance(outcome, Finished)
        second = provider.submit(keyed(SHORT, "mine"))
        assert isinstance(await second.wait(), Finished)
        assert first.outcome is outcome
        third = provider.submit(keyed(ON_AND_ON, "mine"))
        third.cancel()
        await third.wait()
        assert isinstance(await provider.submit(keyed(SHORT, "mine")).wait(), Finished)
        assert provider.diagnostics().counters.superseded == 0


async def test_two_newer_ones_within_one_step_leave_the_last(
    autojump_clock: MockClock,
) -> None:
    backend = ScriptedBackend()
    async with open_scripted_provider(backend) as provider:
        await provider.start()
        first = provider.submit(keyed(SHORT, "mine"))
        await first_text(first)
        second, third = (provider.submit(keyed(SHORT, "mine")) for _ in range(2))
        assert second.outcome == Cancelled("superseded", "queued", 0)
        assert isinstance(await third.wait(), Finished)
        assert first.outcome == Cancelled("superseded", "generating", 1)
        assert len(backend.requests) == 2


# -- who is next -------------------------------------------------------------------------------


class Ledger(LifecycleActor):
    """Notes who gets a slot, in order."""

    order: list[int]

    def on_request_started(self, reply: Reply) -> None:
        self.order = [*getattr(self, "order", ()), reply.id]


class Backwards(Ledger):
    """Serves the newest first."""

    def choose_next(self, waiting: Waiting) -> Reply:
        assert len(waiting) == len(list(waiting))
        assert waiting.first in waiting
        return list(waiting)[-1]


def order_of(provider: LocalProvider) -> list[int]:
    assert isinstance(provider._actor, Ledger)
    return provider._actor.order


def ranked(priority: int) -> Request:
    return completion_request("Hello", max_tokens=1, priority=priority)


async def test_the_highest_priority_gets_the_slot_and_the_oldest_of_equals(
    kind: Kind, endless: Parrot
) -> None:
    async with started(config_of(endless), kind, Ledger) as provider:
        running = provider.submit(ON_AND_ON)
        await first_text(running)
        ranks = [0, 5, -3, 5, 0, 10**9, -3, 5, 0]
        replies = [provider.submit(ranked(rank)) for rank in ranks]
        assert running.outcome is None  # nobody is turned out of a slot
        running.cancel()
        for reply in replies:
            await reply.wait()
        by_rank = sorted(replies, key=lambda reply: (-reply.request.priority, reply.id))
        assert order_of(provider) == [running.id, *(reply.id for reply in by_rank)]


async def test_a_latecomer_of_a_high_priority_overtakes_those_that_wait(
    kind: Kind, endless: Parrot
) -> None:
    async with started(config_of(endless), kind, Ledger) as provider:
        running = provider.submit(ON_AND_ON)
        waiting = [provider.submit(ranked(0)) for _ in range(3)]
        await first_text(running)
        urgent = provider.submit(ranked(1))
        running.cancel()
        await waiting[-1].wait()
        assert order_of(provider) == [1, urgent.id, *(reply.id for reply in waiting)]


async def test_the_actor_may_choose_who_is_next(kind: Kind, endless: Parrot) -> None:
    async with started(config_of(endless), kind, Backwards) as provider:
        running = provider.submit(ON_AND_ON)
        await first_text(running)
        waiting = [provider.submit(SHORT) for _ in range(4)]
        running.cancel()
        await waiting[0].wait()
        assert order_of(provider) == [1, 5, 4, 3, 2]


# -- at once, whatever else is going on --------------------------------------------------------


async def read_all(reply: Reply) -> None:
    with pytest.raises(RequestCancelled):
        async for _ in reply:
            pass


async def generate(provider: LocalProvider, nursery: trio.Nursery, streams: int) -> list[Reply]:
    """Let some requests be answered and read all the time."""
    replies = [provider.submit(ON_AND_ON) for _ in range(streams)]
    for reply in replies:
        nursery.start_soon(read_all, reply)
    for reply in replies:
        while reply.tokens < 4:
            await reply.read(reply.tokens)
    return replies


def made_since(replies: list[Reply], before: list[int]) -> list[int]:
    """How many pieces the cancelled ones have got since there were so many."""
    made = []
    for reply, tokens in zip(replies, before, strict=True):
        assert isinstance(reply.outcome, Cancelled)
        assert reply.outcome.tokens == reply.tokens
        made.append(reply.outcome.tokens - tokens)
    return made


@pytest.mark.parametrize("streams", [pytest.param(1, marks=pytest.mark.slow), 8])
async def test_a_steady_stream_delays_no_cancel(
    kind: Kind, ponderous: Parrot, streams: int
) -> None:
    config = ModelConfig(ponderous.path, slots=streams, context=256, threads=1)
    async with started(config, kind) as provider, trio.open_nursery() as nursery:
        replies = await generate(provider, nursery, streams)
        for reply in replies:
            before = [reply.tokens]
            await provider.cancel(reply.id)
            assert max(made_since([reply], before)) <= 2
        assert {reply.outcome for reply in replies} == {
            Cancelled("caller", "generating", reply.tokens) for reply in replies
        }


@pytest.mark.parametrize("streams", [pytest.param(1, marks=pytest.mark.slow), 8])
async def test_a_steady_stream_delays_no_stop(kind: Kind, ponderous: Parrot, streams: int) -> None:
    config = ModelConfig(ponderous.path, slots=streams, context=256, threads=1)
    async with started(config, kind) as provider, trio.open_nursery() as nursery:
        replies = await generate(provider, nursery, streams)
        before = [reply.tokens for reply in replies]
        await provider.stop()
        assert max(made_since(replies, before)) <= 2


async def test_a_reader_that_never_waits_delays_no_cancel_and_no_stop(
    autojump_clock: MockClock,
) -> None:
    """Every piece is there at once, and the reader is always ready for the next."""
    backend = ScriptedBackend("word " * 500, token_time=0)
    async with open_scripted_provider(backend) as provider, trio.open_nursery() as nursery:
        for give_up in (provider.cancel_current, provider.stop):
            await provider.start()
            (reply,) = await generate(provider, nursery, 1)
            before = reply.tokens
            await give_up()
            assert made_since([reply], [before])[0] <= 2


# -- draining ----------------------------------------------------------------------------------


TEN = completion_request("Hello", max_tokens=10, temperature=0)


async def until_draining(provider: LocalProvider) -> None:
    while provider.started:  # noqa: ASYNC110
        await trio.lowlevel.checkpoint()


async def test_a_drain_serves_all_that_was_accepted_and_refuses_what_is_new(
    kind: Kind, endless: Parrot
) -> None:
    async with started(config_of(endless, slots=2), kind) as provider:
        pid = provider.diagnostics().pid
        replies = [provider.submit(TEN) for _ in range(5)]
        await first_text(replies[0])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: provider.stop(drain=True))
            await until_draining(provider)
            with pytest.raises(NotStarted, match="being stopped"):
                provider.submit(TEN)
            assert provider.phase is Phase.STARTED
            with pytest.raises(WrongPhase, match="stop first"):
                await provider.unload_model()
        for reply in replies:
            assert isinstance(reply.outcome, Finished)
            assert reply.outcome.tokens == 10
        assert (provider.phase, provider.diagnostics().pid) == (Phase.RESIDENT, pid)
        assert provider.diagnostics().counters.accepted == 5


async def test_a_drain_of_an_idle_provider_is_over_at_once(kind: Kind, parrot: Parrot) -> None:
    async with started(config_of(parrot), kind) as provider:
        await provider.stop(drain=True)
        assert provider.residency == "resident"
        await provider.stop(drain=True, drain_timeout=0)
        assert provider.residency == "resident"
        await provider.unload_model()
        await provider.stop(drain=True)
        assert not provider.started


async def test_a_drain_that_takes_too_long_ends_the_rest_as_a_stop_does(
    kind: Kind, endless: Parrot
) -> None:
    async with started(config_of(endless), kind) as provider:
        running, waiting = provider.submit(ON_AND_ON), provider.submit(ON_AND_ON)
        await first_text(running)
        await provider.stop(drain=True, drain_timeout=0.2)
        assert running.outcome == Cancelled("stop", "generating", running.tokens)
        assert waiting.outcome == Cancelled("stop", "queued", 0)
        assert provider.phase is Phase.RESIDENT


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
async def test_a_drain_of_no_sensible_time_is_refused(
    autojump_clock: MockClock, seconds: float
) -> None:
    async with open_scripted_provider() as provider:
        await provider.start()
        with pytest.raises(SpecificationError, match="drain_timeout"):
            await provider.stop(drain=True, drain_timeout=seconds)
        assert provider.started


async def draining(
    provider: LocalProvider, nursery: trio.Nursery, *, within: float | None = None
) -> trio.Event:
    """Begin a drain in a task; the event tells that it was answered."""
    answered = trio.Event()

    async def drain() -> None:
        await provider.stop(drain=True, drain_timeout=within)
        answered.set()

    nursery.start_soon(drain)
    await until_draining(provider)
    return answered


async def test_a_plain_stop_ends_a_drain(kind: Kind, endless: Parrot) -> None:
    async with started(config_of(endless), kind) as provider, trio.open_nursery() as nursery:
        running, waiting = provider.submit(ON_AND_ON), provider.submit(ON_AND_ON)
        await first_text(running)
        drained = await draining(provider, nursery)
        await provider.stop()
        await drained.wait()
        assert running.outcome == Cancelled("stop", "generating", running.tokens)
        assert waiting.outcome == Cancelled("stop", "queued", 0)


async def test_a_start_within_a_drain_starts_again_afterwards(kind: Kind, endless: Parrot) -> None:
    async with started(config_of(endless), kind) as provider, trio.open_nursery() as nursery:
        pid = provider.diagnostics().pid
        replies = [provider.submit(TEN) for _ in range(3)]
        await first_text(replies[0])
        drained = await draining(provider, nursery)
        await provider.start()
        for reply in replies:
            assert isinstance(reply.outcome, Finished)
        await drained.wait()
        assert provider.started
        assert provider.diagnostics().pid == pid
        await serve_another(provider)


async def test_a_stop_gives_up_the_start_that_waits_for_a_drain(
    kind: Kind, endless: Parrot
) -> None:
    async with started(config_of(endless), kind) as provider, trio.open_nursery() as nursery:
        reply = provider.submit(ON_AND_ON)
        await first_text(reply)
        drained = await draining(provider, nursery)

        async def start_in_vain() -> None:
            with pytest.raises(StartInterrupted):
                await provider.start()

        nursery.start_soon(start_in_vain)
        await wait_all_tasks_blocked()
        await provider.stop()
        await drained.wait()
        assert provider.phase is Phase.RESIDENT


async def test_two_drains_end_together_and_the_shorter_time_counts(
    kind: Kind, endless: Parrot
) -> None:
    async with started(config_of(endless), kind) as provider, trio.open_nursery() as nursery:
        reply = provider.submit(ON_AND_ON)
        await first_text(reply)
        patient = await draining(provider, nursery)
        hasty = await draining(provider, nursery, within=0.2)
        await patient.wait()
        await hasty.wait()
        assert reply.outcome == Cancelled("stop", "generating", reply.tokens)
        assert provider.phase is Phase.RESIDENT


async def test_two_drains_that_have_time_are_both_answered_when_all_is_served(
    kind: Kind, endless: Parrot
) -> None:
    async with started(config_of(endless), kind) as provider, trio.open_nursery() as nursery:
        reply = provider.submit(TEN)
        await first_text(reply)
        both = [await draining(provider, nursery, within=seconds) for seconds in (3600, None)]
        for one in both:
            await one.wait()
        assert isinstance(reply.outcome, Finished)


async def test_a_drain_while_the_model_loads_lets_it_load_and_serve(
    kind: Kind, large: Parrot
) -> None:
    with trio.fail_after(GUARD):
        async with (
            open_provider(config_of(large), backend=kind) as provider,
            trio.open_nursery() as nursery,
        ):
            await nursery.start(provider.start)
            replies = [provider.submit(SHORT) for _ in range(2)]
            await draining(provider, nursery)
            assert provider.phase is Phase.LOADING
            with pytest.raises(NotStarted):
                provider.submit(SHORT)
            for reply in replies:
                assert isinstance(await reply.wait(), Finished)
            await reach(provider, Phase.RESIDENT)
            assert provider.diagnostics().counters.loads == 1


async def test_a_drain_that_takes_too_long_while_loading_gives_the_load_up(
    kind: Kind, large: Parrot
) -> None:
    with trio.fail_after(GUARD):
        async with (
            open_provider(config_of(large), backend=kind) as provider,
            trio.open_nursery() as nursery,
        ):

            async def start_in_vain() -> None:
                with pytest.raises(StartInterrupted):
                    await provider.start()

            nursery.start_soon(start_in_vain)
            await reach(provider, Phase.LOADING)
            reply = provider.submit(SHORT)
            await provider.stop(drain=True, drain_timeout=0)
            assert reply.outcome == Cancelled("stop", "loading", 0)
            await reach(provider, Phase.UNLOADED)
            assert provider.failure is None


async def test_what_waits_is_drained_by_the_next_model_if_the_first_one_dies(
    kind: Kind, endless: Parrot
) -> None:
    async with started(config_of(endless), kind) as provider, trio.open_nursery() as nursery:
        pid = provider.diagnostics().pid
        assert pid is not None
        running, *waiting = provider.submit(ON_AND_ON), provider.submit(TEN), provider.submit(TEN)
        await first_text(running)
        drained = await draining(provider, nursery)
        os.kill(pid, signal.SIGKILL)
        await drained.wait()
        assert isinstance(running.outcome, Failed)
        for reply in waiting:
            assert isinstance(reply.outcome, Finished)
        assert provider.phase is Phase.RESIDENT
        counters = provider.diagnostics().counters
        assert (counters.crashes, counters.restarts, counters.loads) == (1, 1, 2)


async def test_a_drain_whose_caller_is_cancelled_goes_on(kind: Kind, endless: Parrot) -> None:
    async with started(config_of(endless), kind) as provider:
        replies = [provider.submit(TEN) for _ in range(3)]
        await first_text(replies[0])
        with trio.CancelScope() as scope:
            scope.cancel()
            await provider.stop(drain=True)
        assert scope.cancelled_caught
        await reach(provider, Phase.RESIDENT)
        for reply in replies:
            assert isinstance(reply.outcome, Finished)


async def test_a_request_cancelled_within_a_drain_is_waited_for_no_more(
    kind: Kind, endless: Parrot
) -> None:
    async with started(config_of(endless), kind) as provider, trio.open_nursery() as nursery:
        reply = provider.submit(ON_AND_ON)
        await first_text(reply)
        drained = await draining(provider, nursery)
        await provider.cancel(reply.id)
        await drained.wait()
        assert provider.phase is Phase.RESIDENT


async def test_leaving_the_block_ends_a_drain(kind: Kind, endless: Parrot) -> None:
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            async with open_provider(config_of(endless), backend=kind) as provider:
                await provider.start()
                reply = provider.submit(ON_AND_ON)
                await first_text(reply)
                drained = await draining(provider, nursery)
            assert reply.outcome == Cancelled("shutdown", "generating", reply.tokens)
            await drained.wait()
        with pytest.raises(ProviderClosed):
            await provider.stop(drain=True)


async def test_a_drain_of_the_scripted_model_takes_what_its_answers_take(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted_provider("one two three") as provider:
        await provider.start()
        replies = [provider.submit(SHORT) for _ in range(4)]
        await wait_all_tasks_blocked()
        began = trio.current_time()
        await provider.stop(drain=True, drain_timeout=3600)
        assert trio.current_time() - began == pytest.approx(4 * 0.2)
        assert all(isinstance(reply.outcome, Finished) for reply in replies)
    assert trio.current_time() - began < 10  # nothing waits for the hour to pass
