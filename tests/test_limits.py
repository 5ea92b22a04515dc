"""How many requests may wait, and how long each may take; on real children."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from moments import first_text, serve_another
from trio.testing import MockClock

from llamatrio import (
    Limits,
    LocalProvider,
    ModelConfig,
    Phase,
    Policy,
    QueueFull,
    Reply,
    Request,
    RequestCancelled,
    SpecificationError,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.outcomes import Cancelled, Finished, Limit, Outcome
from llamatrio.testing import ScriptedBackend, open_scripted_provider
from llamatrio.testing.parrot import Parrot, write_large_parrot

SHORT = completion_request("Hello", max_tokens=2, temperature=0)
ON_AND_ON = completion_request("Hello", max_tokens=100_000, temperature=0)

GUARD = 60.0
SOON = 0.3
"""Seconds: too few for what they are given to, on any machine."""


@pytest.fixture(scope="module")
def ponderous(models: Path) -> Parrot:
    """A model that needs some 25 ms for a token, and as long as one likes for an answer."""
    return write_large_parrot(models / "ponderous.gguf", loop=True)


def on_and_on(**limits: float) -> Request:
    return completion_request("Hello", max_tokens=100_000, limits=Limits(**limits))


def long_prompt(**limits: float) -> Request:
    """Takes seconds before it has its first token."""
    return completion_request("x" * 4000, max_tokens=2, limits=Limits(**limits))


@asynccontextmanager
async def opened(
    parrot: Parrot, kind: Kind, *, policy: Policy | None = None, batch: int = 64
) -> AsyncGenerator[LocalProvider, None]:
    config = ModelConfig(parrot.path, batch=batch, context=4096, threads=1)
    with trio.fail_after(GUARD):
        async with open_provider(config, backend=kind, policy=policy) as provider:
            yield provider


async def expire(reply: Reply) -> Cancelled:
    """Read a reply whose limit ends it."""
    with pytest.raises(RequestCancelled, match=r"cancelled by its \w+ limit") as caught:
        async for _ in reply:
            pass
    assert caught.value.outcome is reply.outcome
    assert caught.value.outcome.tokens == reply.tokens
    return caught.value.outcome


# -- how many wait -----------------------------------------------------------------------------


TWO = Policy(max_pending=2)


async def fill(provider: LocalProvider) -> list[Reply]:
    """Let one run and two wait."""
    replies = [provider.submit(ON_AND_ON)]
    await first_text(replies[0])
    return [*replies, provider.submit(SHORT), provider.submit(SHORT)]


async def test_a_full_queue_says_how_long_it_is_and_accepts_nothing(
    kind: Kind, endless: Parrot
) -> None:
    async with opened(endless, kind, policy=TWO) as provider:
        await provider.start()
        replies = await fill(provider)
        before = provider.diagnostics().counters
        with pytest.raises(QueueFull, match="2 requests are waiting, and no more than 2") as caught:
            provider.submit(SHORT)
        assert (caught.value.length, caught.value.limit) == (2, 2)
        with pytest.raises(QueueFull):
            async with provider.chat("Hello"):
                raise AssertionError("it was accepted")
        assert provider.diagnostics().counters == before
        assert provider.diagnostics().pending == 2
        replies[0].cancel()
        for reply in replies[1:]:
            assert isinstance(await reply.wait(), Finished)
        await serve_another(provider)
        counters = provider.diagnostics().counters
        assert (counters.accepted, counters.finished, counters.cancelled) == (4, 3, 1)


async def test_a_queue_is_full_while_the_model_loads_too(kind: Kind, large: Parrot) -> None:
    async with opened(large, kind, policy=TWO) as provider, trio.open_nursery() as nursery:
        await nursery.start(provider.start)
        replies = [provider.submit(SHORT) for _ in range(2)]
        with pytest.raises(QueueFull):
            provider.submit(SHORT)
        for reply in replies:
            assert isinstance(await reply.wait(), Finished)


async def test_what_takes_the_place_of_one_that_waits_is_accepted_by_a_full_queue(
    kind: Kind, endless: Parrot
) -> None:
    def keyed(key: str) -> Request:
        return completion_request("Hello", max_tokens=2, supersede=key)

    async with opened(endless, kind, policy=TWO) as provider:
        await provider.start()
        running = provider.submit(on_and_on())
        await first_text(running)
        old, _ = provider.submit(keyed("mine")), provider.submit(SHORT)
        new = provider.submit(keyed("mine"))
        assert old.outcome == Cancelled("superseded", "queued", 0)
        with pytest.raises(QueueFull):
            provider.submit(keyed("theirs"))
        assert new.outcome is None
        running.cancel()
        assert isinstance(await new.wait(), Finished)


async def test_what_supersedes_one_that_runs_still_has_to_wait_for_room(
    kind: Kind, endless: Parrot
) -> None:
    request = completion_request("Hello", max_tokens=100_000, supersede="mine")
    async with opened(endless, kind, policy=TWO) as provider:
        await provider.start()
        running = provider.submit(request)
        await first_text(running)
        for _ in range(2):
            provider.submit(SHORT)
        with pytest.raises(QueueFull):
            provider.submit(request)
        assert running.outcome is None
        assert running.phase == "generating"


async def test_a_policy_that_is_changed_holds_for_the_next_request(
    kind: Kind, endless: Parrot
) -> None:
    async with opened(endless, kind, policy=TWO) as provider:
        await provider.start()
        replies = await fill(provider)
        await provider.configure(policy=Policy(max_pending=3))
        replies.append(provider.submit(SHORT))
        await provider.configure(policy=Policy(max_pending=1))
        with pytest.raises(QueueFull) as caught:
            provider.submit(SHORT)
        assert (caught.value.length, caught.value.limit) == (3, 1)
        assert [reply.outcome for reply in replies] == [None] * 4


# -- how long one may take ---------------------------------------------------------------------


async def test_a_request_that_waits_too_long_for_a_slot_is_given_up(
    kind: Kind, endless: Parrot
) -> None:
    async with opened(endless, kind) as provider:
        await provider.start()
        running = provider.submit(on_and_on())
        await first_text(running)
        patient = provider.submit(SHORT)
        hasty = provider.submit(on_and_on(queue=SOON))
        assert await expire(hasty) == Cancelled("deadline", "queued", 0, limit="queue")
        assert (running.outcome, patient.outcome) == (None, None)
        running.cancel()
        assert isinstance(await patient.wait(), Finished)


@pytest.mark.parametrize("limit", ["queue", "total"])
async def test_a_request_that_waits_too_long_for_the_model_is_given_up(
    kind: Kind, large: Parrot, limit: Limit
) -> None:
    async with opened(large, kind) as provider, trio.open_nursery() as nursery:
        await nursery.start(provider.start)
        hasty, patient = provider.submit(on_and_on(**{limit: 0.01})), provider.submit(SHORT)
        assert await expire(hasty) == Cancelled("deadline", "loading", 0, limit=limit)
        assert provider.phase is Phase.LOADING
        assert isinstance(await patient.wait(), Finished)


async def test_a_request_whose_first_token_is_late_is_given_up(kind: Kind, endless: Parrot) -> None:
    async with opened(endless, kind) as provider:
        await provider.start()
        reply = provider.submit(long_prompt(first_token=SOON))
        assert await expire(reply) == Cancelled("deadline", "prompt", 0, limit="first_token")
        await serve_another(provider)


async def test_the_time_to_the_first_token_begins_with_the_slot(
    kind: Kind, endless: Parrot
) -> None:
    async with opened(endless, kind) as provider:
        await provider.start()
        running = provider.submit(on_and_on())
        await first_text(running)
        reply = provider.submit(long_prompt(first_token=SOON))
        began = trio.current_time()
        with trio.move_on_after(2 * SOON):
            await reply.wait()
        assert reply.outcome is None
        running.cancel()
        assert await expire(reply) == Cancelled("deadline", "prompt", 0, limit="first_token")
        assert trio.current_time() - began >= 3 * SOON


async def test_a_request_whose_next_token_is_late_is_given_up(
    kind: Kind, ponderous: Parrot
) -> None:
    async with opened(ponderous, kind) as provider:
        await provider.start()
        reply = provider.submit(on_and_on(silence=0.005))
        outcome = await expire(reply)
        assert outcome == Cancelled("deadline", "generating", reply.tokens, limit="silence")
        assert reply.text
        await serve_another(provider)


@pytest.mark.slow
async def test_silence_is_counted_anew_at_each_token(kind: Kind, ponderous: Parrot) -> None:
    async with opened(ponderous, kind) as provider:
        await provider.start()
        limits = Limits(silence=20.0, first_token=20.0)
        request = completion_request("Hello", max_tokens=12, limits=limits)
        assert isinstance(await provider.submit(request).wait(), Finished)


async def test_the_whole_time_of_a_request_includes_its_wait_for_a_slot(
    kind: Kind, endless: Parrot
) -> None:
    async with opened(endless, kind) as provider:
        await provider.start()
        running = provider.submit(on_and_on())
        await first_text(running)
        reply = provider.submit(on_and_on(total=SOON, queue=60.0))
        assert await expire(reply) == Cancelled("deadline", "queued", 0, limit="total")
        assert running.outcome is None


@pytest.mark.slow
async def test_a_prompt_that_takes_the_whole_time_is_given_up(kind: Kind, endless: Parrot) -> None:
    async with opened(endless, kind) as provider:
        await provider.start()
        reply = provider.submit(long_prompt(total=SOON, first_token=60.0))
        assert await expire(reply) == Cancelled("deadline", "prompt", 0, limit="total")
        await serve_another(provider)


@pytest.mark.slow
async def test_an_answer_that_takes_the_whole_time_is_given_up(
    kind: Kind, ponderous: Parrot
) -> None:
    async with opened(ponderous, kind) as provider:
        await provider.start()
        reply = provider.submit(on_and_on(total=2.0, silence=60.0))
        await first_text(reply)
        outcome = await expire(reply)
        assert outcome == Cancelled("deadline", "generating", reply.tokens, limit="total")
        assert provider.diagnostics().counters.expired == 1
        await serve_another(provider)


async def test_limits_that_are_not_reached_change_nothing(kind: Kind, parrot: Parrot) -> None:
    limits = Limits(queue=GUARD, first_token=GUARD, silence=GUARD, total=GUARD)
    async with opened(parrot, kind) as provider:
        await provider.start()
        replies = [
            provider.submit(completion_request("Hello", temperature=0, limits=limits))
            for _ in range(3)
        ]
        for reply in replies:
            assert (await reply.result()).text == parrot.text
        assert provider.diagnostics().counters.expired == 0


async def test_limits_of_what_has_an_outcome_are_over(autojump_clock: MockClock) -> None:
    limits = Limits(queue=5, first_token=5, silence=5, total=5)
    backend = ScriptedBackend("one two three", token_time=1)
    async with open_scripted_provider(backend) as provider:
        await provider.start()
        finished = provider.submit(completion_request("Hello", limits=limits))
        waiting = provider.submit(completion_request("Hello", limits=limits))
        waiting.cancel()
        outcome = await finished.wait()
        assert isinstance(outcome, Finished)
        running = provider.submit(completion_request("Hello", limits=limits))
        await first_text(running)
        running.cancel()
        await trio.sleep(60)
        assert finished.outcome is outcome
        assert waiting.outcome == Cancelled("caller", "queued", 0)
        assert running.outcome == Cancelled("caller", "generating", 1)
        assert provider.diagnostics().counters.expired == 0
        assert isinstance(await provider.submit(SHORT).wait(), Finished)


async def test_each_limit_ends_a_request_at_its_very_moment(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend("one two three", load_time=10, prompt_time=10, token_time=10)
    async with open_scripted_provider(backend) as provider, trio.open_nursery() as nursery:

        async def time(**limits: float) -> tuple[float, Outcome]:
            began = trio.current_time()
            outcome = await provider.submit(on_and_on(**limits)).wait()
            return round(trio.current_time() - began, 6), outcome

        await nursery.start(provider.start)
        assert await time(queue=9) == (9, Cancelled("deadline", "loading", 0, limit="queue"))
        assert await time(first_token=9) == (
            1 + 9,
            Cancelled("deadline", "prompt", 0, limit="first_token"),
        )
        assert await time(silence=9) == (
            10 + 9,
            Cancelled("deadline", "generating", 1, limit="silence"),
        )
        assert await time(total=25, silence=15, first_token=15) == (
            25,
            Cancelled("deadline", "generating", 2, limit="total"),
        )
        finished = await time(total=31, silence=11, first_token=11, queue=1)
        assert finished[0] == 30
        assert isinstance(finished[1], Finished)


@pytest.mark.parametrize("value", [0, -1, float("nan"), True, "3"])
def test_a_limit_that_is_no_time_is_refused_by_name(value: object) -> None:
    for name in ("queue", "first_token", "silence", "total"):
        with pytest.raises(SpecificationError, match=name):
            Limits(**{name: value})  # type: ignore[arg-type]


# -- a limit of the caller's own ---------------------------------------------------------------


@pytest.mark.slow
async def test_leaving_a_request_that_waits_for_a_slot_gives_it_up(
    kind: Kind, endless: Parrot
) -> None:
    async with opened(endless, kind) as provider:
        await provider.start()
        running = provider.submit(on_and_on())
        await first_text(running)
        reply = await leave(provider, on_and_on())
        assert reply.outcome == Cancelled("caller", "queued", 0)
        assert running.outcome is None


@pytest.mark.slow
async def test_leaving_a_request_that_waits_for_the_model_gives_it_up(
    kind: Kind, large: Parrot
) -> None:
    async with opened(large, kind) as provider, trio.open_nursery() as nursery:
        await nursery.start(provider.start)
        reply = await leave(provider, on_and_on(), after=0.01)
        assert reply.outcome == Cancelled("caller", "loading", 0)
        await serve_another(provider)
        assert provider.diagnostics().counters.loads == 1


@pytest.mark.slow
async def test_leaving_a_request_within_its_prompt_gives_it_up(kind: Kind, endless: Parrot) -> None:
    async with opened(endless, kind) as provider:
        await provider.start()
        reply = await leave(provider, long_prompt())
        assert reply.outcome == Cancelled("caller", "prompt", 0)
        await serve_another(provider)


@pytest.mark.slow
async def test_leaving_a_request_within_its_answer_gives_it_up(
    kind: Kind, ponderous: Parrot
) -> None:
    async with opened(ponderous, kind) as provider:
        await provider.start()
        reply = await leave(provider, on_and_on(), after=2.0)
        assert reply.outcome == Cancelled("caller", "generating", reply.tokens)
        assert reply.tokens
        await serve_another(provider)


async def leave(provider: LocalProvider, request: Request, after: float = SOON) -> Reply:
    """Read an answer for so long."""
    replies: list[Reply] = []
    with trio.move_on_after(after) as scope:
        async with provider.request(request) as reply:
            replies.append(reply)
            await read(reply)
    assert scope.cancelled_caught
    return replies[0]


async def wait(reply: Reply) -> None:
    await reply.wait()


async def read(reply: Reply) -> None:
    async for _ in reply:
        pass


async def fetch(reply: Reply) -> None:
    await reply.result()


@pytest.mark.parametrize("how", [wait, read, fetch])
async def test_a_timeout_around_a_wait_for_a_reply_leaves_the_request_alone(
    kind: Kind, endless: Parrot, how: Callable[[Reply], Awaitable[None]]
) -> None:
    async with opened(endless, kind) as provider:
        await provider.start()
        running, waiting = provider.submit(on_and_on()), provider.submit(SHORT)
        for reply in (running, waiting):
            with trio.move_on_after(0.1) as scope:
                await how(reply)
            assert scope.cancelled_caught
        assert (running.outcome, waiting.outcome) == (None, None)
        running.cancel()
        assert isinstance(await waiting.wait(), Finished)


async def test_a_deadline_around_a_chat_says_too_slow_and_frees_the_slot(
    kind: Kind, endless: Parrot
) -> None:
    async with opened(endless, kind) as provider:
        await provider.start()
        replies: list[Reply] = []
        with pytest.raises(trio.TooSlowError):
            with trio.fail_after(SOON):
                async with provider.request(on_and_on()) as reply:
                    replies.append(reply)
                    await reply.result()
        assert isinstance(replies[0].outcome, Cancelled)
        assert replies[0].outcome.by == "caller"
        await serve_another(provider)
