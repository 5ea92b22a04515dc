"""What the library promises, on real children: start, stop, cancel, unload, and what they leave."""

from __future__ import annotations

import logging
import os
import signal
import time

import psutil
import pytest
import trio
import trio.lowlevel
import trio_typing
from moments import first_text

from llamatrio import (
    NO_RESTARTS,
    ChildDied,
    LifecycleActor,
    LocalProvider,
    ModelConfig,
    NotStarted,
    Own,
    Phase,
    Reply,
    RequestCancelled,
    RequestFailed,
    StartInterrupted,
    StreamBroken,
    Transition,
    WrongPhase,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.outcomes import Cancelled, Failed, Finished
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot

HELLO = completion_request("Hello", temperature=0)
ON_AND_ON = completion_request("Hello", max_tokens=100_000)


def pid_of(provider: LocalProvider) -> int:
    pid = provider.diagnostics().pid
    assert pid is not None
    return pid


def last_returncode(provider: LocalProvider) -> int | None:
    last = provider.diagnostics().last_exit
    assert last is not None
    return last.returncode


async def test_start_answer_stop_start_unload(kind: Kind, parrot: Parrot) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            assert (provider.phase, provider.residency) == (Phase.UNLOADED, "unloaded")
            await provider.start()
            pid = pid_of(provider)
            reply = provider.submit(HELLO)
            assert "".join([text async for text in reply]) == parrot.text
            assert isinstance(reply.outcome, Finished)
            assert reply.outcome.reason == "stop"
            assert reply.outcome.tokens == parrot.tokens + 1  # the end of the text is one, too
            await provider.stop()
            assert (provider.started, provider.residency) == (False, "resident")
            await provider.start()
            assert pid_of(provider) == pid
            await provider.stop()
            await provider.unload_model()
            assert provider.residency == "unloaded"
            assert last_returncode(provider) == 0


async def test_a_hundred_stops_and_starts_load_once_and_keep_the_cache(
    kind: Kind, parrot: Parrot
) -> None:
    long_prompt = completion_request("x" * 2000, max_tokens=1, temperature=0)
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            await provider.start()
            pid = pid_of(provider)
            first = await provider.submit(long_prompt).result()
            assert first.outcome.usage.cached <= 1
            for _ in range(100):
                await provider.stop()
                await provider.start()
                assert pid_of(provider) == pid
            again = await provider.submit(long_prompt).result()
            assert again.outcome.timings["cache_n"] >= 0.9 * again.outcome.usage.prompt
            assert provider.diagnostics().counters.loads == 1


async def test_stop_ends_one_running_and_fifty_pending_as_cancelled(
    kind: Kind, endless: Parrot, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="llamatrio.child.fifty")
    with trio.fail_after(60):
        config = ModelConfig(endless.path)
        async with open_provider(config, backend=kind, name="fifty") as provider:
            await provider.start()
            pid = pid_of(provider)
            running, *pending = [provider.submit(ON_AND_ON) for _ in range(51)]
            await first_text(running)

            began = time.perf_counter()
            await provider.stop()
            assert time.perf_counter() - began < 0.05

            assert provider.diagnostics().running == 0
            assert isinstance(running.outcome, Cancelled)
            assert (running.outcome.by, running.outcome.phase) == ("stop", "generating")
            assert {reply.outcome for reply in pending} == {Cancelled("stop", "queued", 0)}
            assert psutil.pid_exists(pid)
            with pytest.raises(NotStarted):
                provider.submit(HELLO)

            await provider.start()
            assert pid_of(provider) == pid
            outcome = await provider.submit(completion_request("Hello", max_tokens=3)).wait()
            assert isinstance(outcome, Finished)
    received = [line for line in caplog.messages if "launch_slot_" in line]
    assert len(received) == 2  # the one that ran, and the one after the stop


async def test_stop_and_unload_with_a_stream_open_end_the_child_with_0(
    kind: Kind, endless: Parrot
) -> None:
    # https://github.com/withcatai/node-llama-cpp/issues/631
    with trio.fail_after(60):
        config = ModelConfig(endless.path, threads=1)
        async with open_provider(config, backend=kind) as provider:
            for _ in range(10):
                await provider.start()
                await first_text(provider.submit(ON_AND_ON))
                began = time.perf_counter()
                await provider.stop()
                await provider.unload_model()
                assert time.perf_counter() - began < 0.5
                assert last_returncode(provider) == 0


# llama.cpp's router takes 10 s and a SIGKILL there.
async def test_stop_and_unload_within_a_long_prompt_take_less_than_two_seconds(
    kind: Kind, endless: Parrot
) -> None:
    prompt = completion_request("x" * 4000)
    with trio.fail_after(60):
        config = ModelConfig(endless.path, batch=256, context=4096, threads=1)
        async with open_provider(config, backend=kind) as provider:
            await provider.start()
            reply = provider.submit(prompt)
            while not (reply.progress and 0 < reply.progress.processed < 3000):  # noqa: ASYNC110
                await trio.sleep(0.001)
            assert reply.phase == "prompt"
            began = time.perf_counter()
            await provider.stop()
            await provider.unload_model()
            assert time.perf_counter() - began < 2
            assert isinstance(reply.outcome, Cancelled)
            assert reply.outcome.phase == "prompt"
            assert last_returncode(provider) == 0


async def test_stop_while_loading_gives_the_load_up_and_a_later_start_works(
    kind: Kind, large: Parrot
) -> None:
    with trio.fail_after(120):
        async with open_provider(ModelConfig(large.path), backend=kind) as provider:
            async with trio.open_nursery() as nursery:

                async def start_in_vain() -> None:
                    with pytest.raises(StartInterrupted):
                        await provider.start()

                nursery.start_soon(start_in_vain)
                async for status in provider.watch():
                    if status.progress is not None and status.progress.value is not None:
                        break
                waiting = provider.submit(HELLO)
                assert waiting.phase == "loading"
                await provider.stop()
            assert waiting.outcome == Cancelled("stop", "loading", 0)
            assert provider.phase in (Phase.UNLOADING, Phase.UNLOADED)
            await provider.start()
            outcome = await provider.submit(completion_request("Hello", max_tokens=1)).wait()
            assert isinstance(outcome, Finished)
            assert provider.diagnostics().counters.generations == 2
            assert provider.diagnostics().counters.loads == 1


async def test_requests_are_accepted_while_the_model_loads(kind: Kind, parrot: Parrot) -> None:
    with trio.fail_after(60):
        async with (
            open_provider(ModelConfig(parrot.path), backend=kind) as provider,
            trio.open_nursery() as nursery,
        ):
            with pytest.raises(NotStarted):
                provider.submit(HELLO)
            await nursery.start(provider.start)
            assert provider.phase is Phase.LOADING
            result = await provider.submit(HELLO).result()
            assert result.text == parrot.text


async def test_start_takes_a_task_status_of_trio(parrot: Parrot) -> None:
    with trio.fail_after(60):
        async with (
            open_provider(ModelConfig(parrot.path)) as provider,
            trio.open_nursery() as nursery,
        ):

            async def start(*, task_status: trio.TaskStatus[None]) -> None:
                assert isinstance(task_status, trio_typing.TaskStatus)
                await provider.start(task_status=task_status)

            await nursery.start(start)
            assert provider.started


@pytest.mark.slow
async def test_a_new_configuration_unloads_the_old_model_first(
    kind: Kind, parrot: Parrot, endless: Parrot
) -> None:
    # https://github.com/docker/model-runner/issues/726: a life keeps what it was started with.
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            await provider.start()
            pid = pid_of(provider)
            with pytest.raises(WrongPhase):
                await provider.configure(ModelConfig(endless.path))
            await provider.stop()
            await provider.configure(ModelConfig(parrot.path))  # no change
            assert pid_of(provider) == pid
            await provider.configure(ModelConfig(endless.path))
            assert provider.residency == "unloaded"
            assert not psutil.pid_exists(pid)
            await provider.start()
            async with provider.completion("Hello", max_tokens=40) as reply:
                text = (await reply.result()).text
            assert (endless.text * 2).startswith(text)


# -- cancel ------------------------------------------------------------------------------------


async def test_cancel_by_id_says_where_it_caught_the_request(kind: Kind, endless: Parrot) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(endless.path), backend=kind) as provider:
            await provider.start()
            running, waiting, last = [provider.submit(ON_AND_ON) for _ in range(3)]
            await first_text(running)
            assert await provider.cancel(waiting.id) == Cancelled("caller", "queued", 0)
            outcome = await provider.cancel(running.id)
            assert outcome == Cancelled("caller", "generating", running.tokens)
            assert running.text
            await first_text(last)
            assert await provider.cancel(running.id) is None
            assert await provider.cancel(12345) is None
            last.cancel()
            assert isinstance(await last.wait(), Cancelled)


async def test_cancel_current_gives_up_what_runs_and_nothing_else(
    kind: Kind, endless: Parrot
) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(endless.path, slots=2), backend=kind) as provider:
            await provider.start()
            replies = [provider.submit(ON_AND_ON) for _ in range(4)]
            await first_text(replies[0])
            await first_text(replies[1])
            outcomes = await provider.cancel_current()
            assert [outcome.phase for outcome in outcomes if isinstance(outcome, Cancelled)] == [
                "generating",
                "generating",
            ]
            await first_text(replies[2])
            await first_text(replies[3])
            assert replies[2].outcome is None
            assert replies[3].outcome is None


async def test_several_slots_run_several_requests_at_a_time(kind: Kind, endless: Parrot) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(endless.path, slots=3), backend=kind) as provider:
            await provider.start()
            replies = [provider.submit(ON_AND_ON) for _ in range(4)]
            for reply in replies[:3]:
                await first_text(reply)
            assert provider.diagnostics().running == 3
            assert replies[3].phase == "queued"


async def test_leaving_the_block_of_a_chat_early_frees_the_slot(
    kind: Kind, endless: Parrot
) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(endless.path), backend=kind) as provider:
            await provider.start()
            for _ in range(3):
                async with provider.chat("Hello", max_tokens=100_000) as reply:
                    async for _ in reply:
                        break
                assert reply.outcome == Cancelled("caller", "generating", reply.tokens)
            outcome = await provider.submit(completion_request("Hello", max_tokens=1)).wait()
            assert isinstance(outcome, Finished)


async def test_a_timeout_around_a_chat_cancels_the_request(kind: Kind, endless: Parrot) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(endless.path), backend=kind) as provider:
            await provider.start()
            replies: list[Reply] = []
            with trio.move_on_after(0.3) as scope:
                async with provider.chat("Hello", max_tokens=100_000) as reply:
                    replies.append(reply)
                    await reply.result()
            assert scope.cancelled_caught
            assert isinstance(replies[0].outcome, Cancelled)


# -- reading -----------------------------------------------------------------------------------


async def test_reading_raises_when_the_request_is_stopped_or_cancelled(
    kind: Kind, endless: Parrot
) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(endless.path), backend=kind) as provider:
            for how in (provider.stop, provider.cancel_current):
                await provider.start()
                reply = provider.submit(ON_AND_ON)
                with pytest.raises(RequestCancelled) as caught:
                    async for _ in reply:
                        await how()
                assert caught.value.outcome is reply.outcome
                assert caught.value.text == reply.text != ""
                with pytest.raises(RequestCancelled):
                    await reply.result()


async def test_reading_raises_with_the_cause_when_the_child_is_killed(
    kind: Kind, endless: Parrot
) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(endless.path), backend=kind) as provider:
            await provider.start()
            reply, waiting = provider.submit(ON_AND_ON), provider.submit(ON_AND_ON)
            with pytest.raises(RequestFailed) as caught:
                async for _ in reply:
                    os.kill(pid_of(provider), signal.SIGKILL)
            cause = caught.value.__cause__
            assert isinstance(cause, ChildDied)
            assert cause.returncode == -signal.SIGKILL
            assert "SIGKILL" in str(cause)
            assert caught.value.text == reply.text != ""
            assert waiting.outcome is None
            await first_text(waiting)
            assert provider.failure is None
            counters = provider.diagnostics().counters
            assert (counters.crashes, counters.restarts, counters.loads) == (1, 1, 2)


async def test_a_killed_child_without_restarts_fails_what_waits_until_the_next_start(
    kind: Kind, endless: Parrot
) -> None:
    with trio.fail_after(60):
        config = ModelConfig(endless.path)
        async with open_provider(config, backend=kind, policy=NO_RESTARTS) as provider:
            await provider.start()
            reply, waiting = provider.submit(ON_AND_ON), provider.submit(ON_AND_ON)
            await first_text(reply)
            os.kill(pid_of(provider), signal.SIGKILL)
            for one in (reply, waiting):
                with pytest.raises(RequestFailed, match="SIGKILL") as caught:
                    await one.result()
                assert isinstance(caught.value.__cause__, ChildDied)
            assert isinstance(provider.failure, ChildDied)
            await provider.start()
            outcome = await provider.submit(completion_request("Hello", max_tokens=1)).wait()
            assert isinstance(outcome, Finished)
            assert provider.failure is None
            counters = provider.diagnostics().counters
            assert (counters.crashes, counters.restarts, counters.loads) == (1, 0, 2)


async def test_reading_raises_when_the_stream_is_cut(parrot: Parrot) -> None:
    # A clean end of the connection within an answer must never pass for an end of the answer.
    child = Own(fakechild.command("S loading", "H drop", "S ready", "R"))
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            await provider.start()
            reply = provider.submit(HELLO)
            with pytest.raises(RequestFailed) as caught:
                async for _ in reply:
                    pass
            assert isinstance(caught.value.__cause__, StreamBroken)
            assert isinstance(reply.outcome, Failed)
            assert reply.outcome.tokens == 2


async def test_replies_that_nobody_reads_keep_no_slot(kind: Kind, parrot: Parrot) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path, slots=1), backend=kind) as provider:
            await provider.start()
            unread = [provider.submit(HELLO) for _ in range(10)]
            result = await provider.submit(HELLO).result()
            assert result.text == parrot.text
            assert [reply.text for reply in unread] == [parrot.text] * 10


# -- extending ---------------------------------------------------------------------------------


class Recorder(LifecycleActor):
    def on_transition(self, transition: Transition) -> None:
        seen.append(str(transition))
        raise ValueError("an observer that breaks")

    def on_request_finished(self, reply: Reply, outcome: object) -> None:
        assert reply.outcome is outcome
        seen.append(type(outcome).__name__)
        raise ValueError("an observer that breaks")


seen: list[str] = []


async def test_hooks_see_everything_and_break_nothing(
    kind: Kind, parrot: Parrot, caplog: pytest.LogCaptureFixture
) -> None:
    seen.clear()
    with trio.fail_after(60):
        config = ModelConfig(parrot.path)
        async with open_provider(config, backend=kind, actor=Recorder) as provider:
            await provider.start()
            await provider.submit(HELLO).result()
            await provider.stop()
            assert provider.diagnostics().counters.hook_errors == 5
    assert seen == [
        "UNLOADED --START--> LOADING",
        "LOADING --READY--> STARTED",
        "Finished",
        "STARTED --STOP--> STOPPING",
        "STOPPING --IDLE--> RESIDENT",
    ]
    assert "Recorder.on_transition raised" in caplog.text


async def test_an_async_hook_is_refused(parrot: Parrot) -> None:
    class Asynchronous(LifecycleActor):
        async def on_transition(self, transition: Transition) -> None:  # type: ignore[override]
            await trio.lowlevel.checkpoint()

    with pytest.raises(TypeError, match="on_transition is async"):
        async with open_provider(ModelConfig(parrot.path), actor=Asynchronous):
            pass
