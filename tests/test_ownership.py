"""Whose a model is: a nursery's, a block's, one process's; and how it is exchanged for another."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import CoroutineType

import attrs
import psutil
import pytest
import trio
from moments import first_text, reach
from trio.testing import MockClock, wait_all_tasks_blocked

from llamatrio import (
    ChildDied,
    LocalProvider,
    ModelConfig,
    ModelFileError,
    Phase,
    Policy,
    ProviderClosed,
    Reply,
    Request,
    RequestCancelled,
    ServerBackend,
    SpecificationError,
    StartInterrupted,
    Unkillable,
    WrongPhase,
    WrongProcess,
    WrongThread,
    completion_request,
    connect_provider,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.child.posix import ChildProcess
from llamatrio.outcomes import Cancelled, Finished
from llamatrio.session.base import Backend, Emit, Ended, Publish, SessionEvent
from llamatrio.testing import ScriptedBackend, open_scripted_provider
from llamatrio.testing.parrot import Parrot

if sys.platform != "linux":
    pytest.skip("forks", allow_module_level=True)

SHORT = completion_request("Hello", max_tokens=2, temperature=0)
WHOLE = completion_request("Hello", temperature=0)
ON_AND_ON = completion_request("Hello", max_tokens=100_000, temperature=0)

GUARD = 60.0


def config_of(parrot: Parrot, context: int = 4096) -> ModelConfig:
    return ModelConfig(parrot.path, batch=64, context=context, threads=1)


@asynccontextmanager
async def started(parrot: Parrot, kind: Kind | Backend) -> AsyncGenerator[LocalProvider, None]:
    with trio.fail_after(GUARD):
        async with open_provider(config_of(parrot), backend=kind) as provider:
            await provider.start()
            yield provider


def pid_of(provider: LocalProvider) -> int:
    pid = provider.diagnostics().pid
    assert pid is not None
    return pid


async def answer(provider: LocalProvider, parrot: Parrot) -> None:
    """See to it that it is this model that answers."""
    result = await provider.submit(completion_request("Hello", max_tokens=5)).result()
    assert result.text
    assert parrot.text.startswith(result.text)


# -- a nursery's -------------------------------------------------------------------------------


async def leave_it_unloaded(provider: LocalProvider) -> list[Reply]:
    await trio.lowlevel.checkpoint()
    return []


async def let_it_load(provider: LocalProvider) -> list[Reply]:
    async with trio.open_nursery() as nursery:
        await nursery.start(provider.start)
        nursery.cancel_scope.cancel()
    assert provider.phase is Phase.LOADING
    return [provider.submit(SHORT)]


async def let_it_generate(provider: LocalProvider) -> list[Reply]:
    await provider.start()
    replies = [provider.submit(ON_AND_ON) for _ in range(3)]
    await first_text(replies[0])
    return replies


async def let_it_rest(provider: LocalProvider) -> list[Reply]:
    await provider.start()
    await provider.stop()
    return []


async def let_it_back_off(provider: LocalProvider) -> list[Reply]:
    """Kill it, so that it is to be loaded again in an hour."""
    await provider.configure(policy=Policy(backoff=3600, longest_backoff=3600))
    await provider.start()
    os.kill(pid_of(provider), signal.SIGKILL)
    await reach(provider, Phase.LOADING)
    assert provider.diagnostics().pid is None
    return [provider.submit(SHORT)]


async def let_it_drain(provider: LocalProvider) -> list[Reply]:
    replies = await let_it_generate(provider)
    with trio.CancelScope() as scope:
        scope.cancel()
        await provider.stop(drain=True)
    while provider.started:  # noqa: ASYNC110
        await trio.lowlevel.checkpoint()
    return replies


STATES = [
    leave_it_unloaded,
    let_it_load,
    let_it_generate,
    let_it_rest,
    let_it_back_off,
    let_it_drain,
]
Bring = Callable[[LocalProvider], Awaitable[list[Reply]]]

in_every_state = pytest.mark.parametrize("bring", STATES, ids=lambda bring: str(bring.__name__))


async def assert_closed(provider: LocalProvider, replies: list[Reply]) -> None:
    for reply in replies:
        assert isinstance(reply.outcome, Cancelled)
        assert reply.outcome.by == "shutdown"
        with pytest.raises(RequestCancelled):
            await reply.result()
    assert (provider.started, provider.residency) == (False, "unloaded")
    assert provider.diagnostics().pid is None
    for verb in (provider.start, provider.stop, provider.unload_model):
        with pytest.raises(ProviderClosed):
            await verb()
    with pytest.raises(ProviderClosed):
        provider.submit(SHORT)
    assert [status.phase async for status in provider.watch()] == [Phase.UNLOADED]


@in_every_state
async def test_aclose_ends_it_from_many_tasks_at_once_and_again(
    kind: Kind, endless: Parrot, bring: Bring
) -> None:
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            provider = connect_provider(nursery, config_of(endless), backend=kind)
            replies = await bring(provider)
            async with trio.open_nursery() as closers:
                for _ in range(3):
                    closers.start_soon(provider.aclose)
            await assert_closed(provider, replies)
            await provider.aclose()
        await provider.aclose()


@in_every_state
async def test_a_nursery_that_is_cancelled_ends_it(
    kind: Kind, endless: Parrot, bring: Bring
) -> None:
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            provider = connect_provider(nursery, config_of(endless), backend=kind)
            replies = await bring(provider)
            nursery.cancel_scope.cancel()
        assert nursery.cancel_scope.cancelled_caught
        await assert_closed(provider, replies)


async def test_a_nursery_whose_body_raises_ends_it_and_raises_that_alone(
    kind: Kind, endless: Parrot
) -> None:
    error = ValueError("mine")
    providers: list[LocalProvider] = []
    replies: list[Reply] = []
    with trio.fail_after(GUARD):
        with pytest.RaisesGroup(ValueError) as caught:
            async with trio.open_nursery() as nursery:
                provider = connect_provider(nursery, config_of(endless), backend=kind)
                providers.append(provider)
                replies += await let_it_generate(provider)
                raise error
        assert caught.value.exceptions == (error,)
        await assert_closed(providers[0], replies)


async def test_a_nursery_is_not_left_before_its_provider_is_closed(
    kind: Kind, parrot: Parrot
) -> None:
    left = trio.Event()
    connected: list[LocalProvider] = []

    async def own() -> None:
        async with trio.open_nursery() as nursery:
            connected.append(connect_provider(nursery, config_of(parrot), backend=kind))
        left.set()

    with trio.fail_after(GUARD):
        async with trio.open_nursery() as outer:
            outer.start_soon(own)
            await wait_all_tasks_blocked()
            (provider,) = connected
            await provider.start()
            await answer(provider, parrot)
            assert not left.is_set()
            await provider.aclose()
            await left.wait()


async def test_an_aclose_whose_caller_is_cancelled_comes_all_the_same(
    kind: Kind, endless: Parrot
) -> None:
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            provider = connect_provider(nursery, config_of(endless), backend=kind)
            replies = await let_it_generate(provider)
            with trio.CancelScope() as scope:
                scope.cancel()
                await provider.aclose()
            assert scope.cancelled_caught
        await assert_closed(provider, replies)


async def test_a_block_goes_on_after_an_aclose_within(kind: Kind, endless: Parrot) -> None:
    async with started(endless, kind) as provider:
        reply = provider.submit(ON_AND_ON)
        await first_text(reply)
        await provider.aclose()
        await trio.lowlevel.checkpoint()
        await assert_closed(provider, [reply])


async def test_a_nursery_may_own_several(kind: Kind, parrot: Parrot, endless: Parrot) -> None:
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            one = connect_provider(nursery, config_of(parrot), backend=kind, name="one")
            other = connect_provider(nursery, config_of(endless), backend=kind, name="other")
            await one.start()
            replies = await let_it_generate(other)
            await one.aclose()
            assert replies[0].outcome is None
            await other.aclose()
            await assert_closed(other, replies)


async def test_a_model_that_is_given_up_is_raised_in_its_nursery_if_the_policy_says_so(
    kind: Kind, endless: Parrot
) -> None:
    policy = Policy(fruitless=0, on_give_up="raise")
    replies: list[Reply] = []
    with trio.fail_after(GUARD), pytest.RaisesGroup(ChildDied):
        async with trio.open_nursery() as nursery:
            config = config_of(endless)
            provider = connect_provider(nursery, config, backend=kind, policy=policy)
            replies += await let_it_generate(provider)
            os.kill(pid_of(provider), signal.SIGKILL)
            await trio.sleep_forever()
    assert all(reply.outcome is not None for reply in replies)


async def test_a_provider_that_cannot_work_is_refused_before_it_is_connected(
    parrot: Parrot,
) -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(SpecificationError):
            connect_provider(nursery, "model.gguf")  # type: ignore[arg-type]
        with pytest.raises(SpecificationError):
            connect_provider(nursery, attrs.evolve(config_of(parrot), args=("--mlock",)))
        assert not nursery.child_tasks


async def test_a_nursery_that_is_cancelled_already_ends_it_at_once(
    kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.cancel()
            provider = connect_provider(nursery, config_of(parrot), backend=kind)
        await assert_closed(provider, [])


# -- a block that is started -------------------------------------------------------------------


async def test_a_block_is_started_within_and_stopped_afterwards(kind: Kind, parrot: Parrot) -> None:
    with trio.fail_after(GUARD):
        async with open_provider(config_of(parrot), backend=kind) as provider:
            pids = set()
            for _ in range(3):
                async with provider.running():
                    assert provider.phase is Phase.STARTED
                    pids.add(pid_of(provider))
                    await answer(provider, parrot)
                assert (provider.started, provider.residency) == (False, "resident")
            assert len(pids) == 1


async def test_a_block_that_cannot_be_started_says_why_and_has_nothing_to_stop(
    kind: Kind,
) -> None:
    with trio.fail_after(GUARD):
        async with open_provider(ModelConfig("/nowhere.gguf"), backend=kind) as provider:
            with pytest.raises(ModelFileError):
                async with provider.running():
                    raise AssertionError("it was started")
            assert provider.phase is Phase.UNLOADED


async def test_a_start_that_a_stop_gives_up_enters_no_block(kind: Kind, large: Parrot) -> None:
    with trio.fail_after(GUARD):
        async with (
            open_provider(config_of(large), backend=kind) as provider,
            trio.open_nursery() as nursery,
        ):

            async def run_in_vain() -> None:
                with pytest.raises(StartInterrupted):
                    async with provider.running():
                        raise AssertionError("it was started")

            nursery.start_soon(run_in_vain)
            await reach(provider, Phase.LOADING)
            await provider.stop()


@pytest.mark.parametrize("drain", [False, True])
async def test_an_exception_of_the_block_comes_out_bare_and_stops_at_once(
    kind: Kind, endless: Parrot, drain: bool
) -> None:
    error = ValueError("mine")
    with trio.fail_after(GUARD):
        async with open_provider(config_of(endless), backend=kind) as provider:
            replies: list[Reply] = []
            with pytest.raises(ValueError, match="mine") as caught:
                async with provider.running(drain=drain):
                    replies += [provider.submit(ON_AND_ON), provider.submit(ON_AND_ON)]
                    await first_text(replies[0])
                    raise error
            assert caught.value is error
            assert replies[0].outcome == Cancelled("stop", "generating", replies[0].tokens)
            assert replies[1].outcome == Cancelled("stop", "queued", 0)
            assert provider.phase is Phase.RESIDENT


@pytest.mark.parametrize("drain", [False, True])
async def test_a_cancelled_block_is_stopped_at_once(
    kind: Kind, endless: Parrot, drain: bool
) -> None:
    with trio.fail_after(GUARD):
        async with open_provider(config_of(endless), backend=kind) as provider:
            with trio.CancelScope() as scope:
                async with provider.running(drain=drain):
                    reply = provider.submit(ON_AND_ON)
                    await first_text(reply)
                    scope.cancel()
                    await trio.sleep_forever()
            assert scope.cancelled_caught
            assert provider.phase is Phase.RESIDENT
            assert provider.diagnostics().counters.cancelled == 1


async def test_a_cancel_within_the_drain_of_a_block_stops_at_once(
    kind: Kind, endless: Parrot
) -> None:
    with trio.fail_after(GUARD):
        async with open_provider(config_of(endless), backend=kind) as provider:
            with trio.CancelScope() as scope:
                async with provider.running(drain=True):
                    await first_text(provider.submit(ON_AND_ON))
                    scope.deadline = trio.current_time() + 0.3
            assert scope.cancelled_caught
            assert provider.phase is Phase.RESIDENT
            assert provider.diagnostics().counters.cancelled == 1


async def test_a_block_that_ends_by_itself_serves_what_was_accepted_if_told_so(
    kind: Kind, endless: Parrot
) -> None:
    with trio.fail_after(GUARD):
        async with open_provider(config_of(endless), backend=kind) as provider:
            async with provider.running(drain=True):
                replies = [provider.submit(SHORT) for _ in range(3)]
            assert [type(reply.outcome) for reply in replies] == [Finished] * 3
            async with provider.running(drain=True, drain_timeout=0.1):
                reply = provider.submit(ON_AND_ON)
            assert isinstance(reply.outcome, Cancelled)
            assert reply.outcome.by == "stop"
            async with provider.running():
                reply = provider.submit(ON_AND_ON)
            assert isinstance(reply.outcome, Cancelled)
            assert provider.phase is Phase.RESIDENT


async def test_a_block_may_be_stopped_and_started_within(kind: Kind, endless: Parrot) -> None:
    with trio.fail_after(GUARD):
        async with open_provider(config_of(endless), backend=kind) as provider:
            async with provider.running():
                pid = pid_of(provider)
                await provider.stop()
                async with provider.running():
                    await answer(provider, endless)
                assert provider.phase is Phase.RESIDENT
                await provider.start()
                reply = provider.submit(ON_AND_ON)
                await first_text(reply)
            assert isinstance(reply.outcome, Cancelled)
            assert (provider.phase, pid_of(provider)) == (Phase.RESIDENT, pid)


async def test_a_block_whose_provider_is_closed_within_is_left_in_silence(
    kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            provider = connect_provider(nursery, config_of(parrot), backend=kind)
            async with provider.running():
                await provider.aclose()


# -- one thread's ------------------------------------------------------------------------------


Call = Callable[[], object]


async def call_in_thread(call: Call) -> Exception | None:
    """Make a call in another thread, and return what it raises."""

    def run() -> Exception | None:
        try:
            made = call()
        except Exception as exc:  # noqa: BLE001 - handed over
            return exc
        if isinstance(made, CoroutineType):
            made.close()
        return None

    return await trio.to_thread.run_sync(run)


async def test_calls_from_another_thread_are_refused_at_once(kind: Kind, parrot: Parrot) -> None:
    async with started(parrot, kind) as provider:
        calls: list[Call] = [
            lambda: provider.submit(SHORT),
            provider.start,
            provider.stop,
            provider.unload_model,
            lambda: provider.configure(provider.config),
            provider.aclose,
        ]
        errors = [await call_in_thread(call) for call in calls]
        assert [type(error) for error in errors] == [WrongThread] * len(calls)
        assert all("trio.from_thread" in str(error) for error in errors)
        await answer(provider, parrot)


async def test_another_thread_gets_there_by_trio_from_thread(kind: Kind, parrot: Parrot) -> None:
    async with started(parrot, kind) as provider:

        def work() -> str:
            trio.from_thread.run(provider.stop)
            trio.from_thread.run(provider.start)
            reply = trio.from_thread.run_sync(provider.submit, WHOLE)
            return trio.from_thread.run(reply.result).text

        assert await trio.to_thread.run_sync(work) == parrot.text


# -- one process's -----------------------------------------------------------------------------


pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def end_in_time() -> None:
    """Let this copy not outlive the test, whatever happens."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(GUARD))


def in_fork(act: Callable[[], None]) -> str:
    """Do something in a forked copy of this program, and return what it raised."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:  # nothing that is raised in here may come out
        said = "a base exception"
        try:
            end_in_time()
            act()
            said = ""
        except Exception as exc:  # noqa: BLE001 - told to the original
            said = repr(exc)
        finally:
            os.write(writes, said.encode())
            os._exit(0)
    os.close(writes)
    with open(reads, "rb") as file:
        said = file.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return said


def sockets_in(place: Path) -> list[Path]:
    return list(place.glob("llamatrio-*/*.sock"))


async def assert_untouched(provider: LocalProvider, parrot: Parrot, place: Path) -> None:
    """See to it that the model of the original is as it was, and can be ended as ever."""
    assert psutil.pid_exists(pid_of(provider))
    assert sockets_in(place)
    result = await provider.submit(WHOLE).result()
    assert result.text == parrot.text
    await provider.stop()
    await provider.unload_model()
    last = provider.diagnostics().last_exit
    assert last is not None
    assert last.returncode == 0


async def test_a_forked_copy_refuses_every_call(
    kind: Kind, parrot: Parrot, own_temporary_directory: Path
) -> None:
    async with started(parrot, kind) as provider:

        def call_everything() -> None:
            calls: list[Call] = [
                lambda: provider.submit(SHORT),
                provider.start,
                provider.stop,
                lambda: provider.stop(drain=True),
                provider.unload_model,
                lambda: provider.configure(provider.config),
                provider.aclose,
            ]
            for call in calls:
                with pytest.raises(WrongProcess, match="the process that opened"):
                    call()
            assert provider.phase is Phase.STARTED
            assert provider.diagnostics().counters.accepted == 0

        assert in_fork(call_everything) == ""
        await assert_untouched(provider, parrot, own_temporary_directory)


def leave_all_as_it_is() -> None:
    return None


def is_ours(coroutine: CoroutineType[object, object, object]) -> bool:
    return "/llamatrio/" in coroutine.cr_code.co_filename


def close_everything() -> None:
    """Close what hangs about, as the garbage collector would, in whatever order."""
    for coroutine in [one for one in gc.get_objects() if isinstance(one, CoroutineType)]:
        if is_ours(coroutine):
            with suppress(BaseException):
                coroutine.close()
    gc.collect()


@pytest.mark.parametrize("act", [leave_all_as_it_is, close_everything])
async def test_a_forked_copy_made_within_an_answer_touches_nothing(
    kind: Kind, endless: Parrot, own_temporary_directory: Path, act: Callable[[], None]
) -> None:
    async with started(endless, kind) as provider:
        reply = provider.submit(ON_AND_ON)
        await first_text(reply)
        assert in_fork(act) == ""
        for _ in range(10):
            await reply.read(reply.tokens)
        assert reply.outcome is None
        assert sockets_in(own_temporary_directory)


@contextmanager
def living_fork() -> Generator[None, None, None]:
    """Let a copy of this program be there, which has a copy of every descriptor, too."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        end_in_time()
        os.close(writes)
        os.read(reads, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(reads)
        os.close(writes)
        os.waitpid(pid, 0)


async def test_a_cancel_is_noticed_although_a_forked_copy_holds_the_connection(
    kind: Kind, endless: Parrot
) -> None:
    async with started(endless, kind) as provider:
        reply = provider.submit(completion_request("Hello", max_tokens=4000))
        await first_text(reply)
        with living_fork():
            await provider.cancel(reply.id)
            with trio.fail_after(10):  # or it would go on to its 4000th token
                await answer(provider, endless)


async def test_a_model_ends_although_a_forked_copy_holds_its_pipes(
    kind: Kind, endless: Parrot
) -> None:
    async with started(endless, kind) as provider:
        await first_text(provider.submit(ON_AND_ON))
        with living_fork():
            await provider.stop()
            await provider.unload_model()
            last = provider.diagnostics().last_exit
            assert last is not None
            assert last.returncode == 0
            await provider.start()
            await answer(provider, endless)


@pytest.mark.slow
async def test_a_forked_copy_whose_tasks_are_collected_touches_nothing(
    kind: Kind, parrot: Parrot, own_temporary_directory: Path
) -> None:
    async with started(parrot, kind) as provider:
        assert in_fork(close_everything) == ""
        await assert_untouched(provider, parrot, own_temporary_directory)


@pytest.mark.slow
async def test_a_forked_copy_made_by_another_thread_touches_nothing(
    kind: Kind, parrot: Parrot, own_temporary_directory: Path
) -> None:
    """There the tasks belong to a thread that does not exist."""
    async with started(parrot, kind) as provider:

        def forget_and_collect() -> None:
            gc.collect()

        assert await trio.to_thread.run_sync(in_fork, forget_and_collect) == ""
        assert await trio.to_thread.run_sync(in_fork, close_everything) == ""
        await assert_untouched(provider, parrot, own_temporary_directory)


def processes() -> list[ChildProcess]:
    gc.collect()  # those of earlier children, which may be held by cycles
    return [one for one in gc.get_objects() if isinstance(one, ChildProcess)]


def end_process() -> None:
    """Do all that ends a process."""
    (process,) = processes()
    process.terminate()
    process.kill()
    process.reap()
    process.close_stdin()
    process.close()
    assert process.returncode is None


@pytest.mark.slow
async def test_a_forked_copy_cannot_end_the_process(
    kind: Kind, parrot: Parrot, own_temporary_directory: Path
) -> None:
    async with started(parrot, kind) as provider:
        assert in_fork(end_process) == ""
        await assert_untouched(provider, parrot, own_temporary_directory)


@pytest.mark.slow
async def test_a_model_is_heard_after_a_forked_copy_has_closed_its_pipes(
    kind: Kind, parrot: Parrot
) -> None:
    config = attrs.evolve(config_of(parrot), sleep_after=1)
    with trio.fail_after(GUARD):
        async with open_provider(config, backend=kind) as provider:
            await provider.start()
            assert in_fork(end_process) == ""
            async for status in provider.watch():
                if status.residency == "asleep":
                    break
            await answer(provider, parrot)


# -- exchanging the model ----------------------------------------------------------------------


class Held(ServerBackend):
    """Its child ends, but nobody learns of it before the test lets go."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self.let_go = trio.Event()

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        ends: list[Ended] = []

        def hold(event: SessionEvent) -> None:
            if isinstance(event, Ended):
                ends.append(event)
            else:
                publish(event)

        try:
            await super().run(config, hold)
        finally:
            with trio.CancelScope(shield=True):
                await self.let_go.wait()
            for end in ends:
                publish(end)


class Stuck(ServerBackend):
    """Says of its first child that it could not be killed."""

    stuck = True

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        def deny(event: SessionEvent) -> None:
            if isinstance(event, Ended) and self.stuck:
                self.stuck = False
                event = Ended(Unkillable("process 1 survived SIGKILL"))
            publish(event)

        await super().run(config, deny)


async def test_another_model_is_loaded_by_the_next_start(
    kind: Kind, parrot: Parrot, endless: Parrot
) -> None:
    async with started(parrot, kind) as provider:
        await provider.stop()
        pid = pid_of(provider)
        await provider.configure(config_of(endless))
        assert (provider.config, provider.residency) == (config_of(endless), "unloaded")
        assert not psutil.pid_exists(pid)
        await provider.configure(config_of(parrot))
        await provider.configure(config_of(endless))
        await provider.start()
        await answer(provider, endless)
        assert provider.diagnostics().counters.loads == 2


def missing(config: ModelConfig, folder: Path) -> ModelConfig:
    return attrs.evolve(config, model=folder / "missing.gguf")


def no_model(config: ModelConfig, folder: Path) -> ModelConfig:
    (folder / "text.gguf").write_text("no model at all")
    return attrs.evolve(config, model=folder / "text.gguf")


def other_content(config: ModelConfig, folder: Path) -> ModelConfig:
    return attrs.evolve(config, sha256="0" * 64)


def option_of_ours(config: ModelConfig, folder: Path) -> ModelConfig:
    return attrs.evolve(config, args=("--host", "0.0.0.0"))


def option_that_has_a_field(config: ModelConfig, folder: Path) -> ModelConfig:
    return attrs.evolve(config, args=("--ctx-size", "512"))


@pytest.mark.parametrize(
    "spoil",
    [missing, no_model, other_content, option_of_ours, option_that_has_a_field],
    ids=lambda spoil: str(spoil.__name__),
)
async def test_a_bad_configuration_leaves_the_old_model_resident(
    kind: Kind,
    parrot: Parrot,
    tmp_path: Path,
    spoil: Callable[[ModelConfig, Path], ModelConfig],
) -> None:
    async with started(parrot, kind) as provider:
        await provider.stop()
        pid, policy = pid_of(provider), provider.policy
        with pytest.raises(SpecificationError):
            await provider.configure(spoil(provider.config, tmp_path), policy=Policy(max_pending=1))
        assert (provider.config, provider.policy) == (config_of(parrot), policy)
        assert (provider.residency, pid_of(provider)) == ("resident", pid)
        await provider.start()
        await answer(provider, parrot)
        assert provider.diagnostics().counters.loads == 1


async def test_a_model_that_cannot_be_unloaded_keeps_its_configuration(
    kind: Kind, parrot: Parrot, endless: Parrot
) -> None:
    async with started(parrot, Stuck(kind)) as provider:
        await provider.stop()
        policy = provider.policy
        with pytest.raises(Unkillable):
            await provider.configure(config_of(endless), policy=Policy(max_pending=1))
        assert (provider.config, provider.policy) == (config_of(parrot), policy)
        assert isinstance(provider.failure, Unkillable)
        await provider.start()
        await answer(provider, parrot)
        await provider.stop()
        await provider.configure(config_of(endless))
        await provider.start()
        await answer(provider, endless)


async def test_a_configuration_given_up_half_way_leaves_the_old_one_and_no_model(
    kind: Kind, parrot: Parrot, endless: Parrot
) -> None:
    backend = Held(kind)
    async with started(parrot, backend) as provider, trio.open_nursery() as nursery:
        await provider.stop()
        policy = provider.policy

        async def give_up_when_unloading() -> None:
            await reach(provider, Phase.UNLOADING)
            scope.cancel()

        with trio.CancelScope() as scope:
            nursery.start_soon(give_up_when_unloading)
            await provider.configure(config_of(endless), policy=Policy(max_pending=1))
        assert scope.cancelled_caught
        assert provider.phase is Phase.UNLOADING
        backend.let_go.set()
        await reach(provider, Phase.UNLOADED)
        assert (provider.config, provider.policy) == (config_of(parrot), policy)
        await provider.start()
        await answer(provider, parrot)


async def test_a_configuration_that_changes_nothing_has_no_effect_whatever_the_phase(
    kind: Kind, parrot: Parrot
) -> None:
    async with started(parrot, kind) as provider:
        pid = pid_of(provider)
        for verb in (provider.start, provider.stop, provider.start):
            await verb()
            before = provider.diagnostics()
            await provider.configure(config_of(parrot))
            after = provider.diagnostics()
            assert (after.phase, after.pid, after.counters) == (before.phase, pid, before.counters)
        await answer(provider, parrot)


async def test_another_configuration_is_refused_while_started_with_its_policy(
    kind: Kind, parrot: Parrot, endless: Parrot
) -> None:
    async with started(parrot, kind) as provider:
        policy = provider.policy
        with pytest.raises(WrongPhase):
            await provider.configure(config_of(endless), policy=Policy(max_pending=1))
        assert (provider.config, provider.policy) == (config_of(parrot), policy)


async def test_both_are_taken_together(kind: Kind, parrot: Parrot, endless: Parrot) -> None:
    async with started(parrot, kind) as provider:
        await provider.stop()
        await provider.configure(config_of(endless), policy=Policy(max_pending=1))
        assert provider.config == config_of(endless)
        assert provider.policy == Policy(max_pending=1)
        await provider.start()
        await provider.configure(config_of(endless), policy=Policy(max_pending=2))
        assert provider.policy == Policy(max_pending=2)
        await answer(provider, endless)


async def test_a_policy_is_taken_at_once_in_every_phase_and_nothing_is_loaded_anew(
    kind: Kind, parrot: Parrot, large: Parrot
) -> None:
    backend = Held(kind)
    seen: list[Phase] = []

    async def change() -> None:
        policy = Policy(max_pending=len(seen) + 10)
        await provider.configure(policy=policy)
        assert provider.policy is policy
        seen.append(provider.phase)

    with trio.fail_after(GUARD):
        async with (
            open_provider(config_of(large), backend=backend) as provider,
            trio.open_nursery() as nursery,
        ):
            await change()
            await nursery.start(provider.start)
            await change()
            await provider.start()
            pid = pid_of(provider)
            await change()
            await provider.stop()
            await change()
            assert pid_of(provider) == pid
            nursery.start_soon(provider.unload_model)
            await reach(provider, Phase.UNLOADING)
            await change()
            backend.let_go.set()
            await reach(provider, Phase.UNLOADED)
            assert provider.diagnostics().counters.loads == 1
    assert seen == [
        Phase.UNLOADED,
        Phase.LOADING,
        Phase.STARTED,
        Phase.RESIDENT,
        Phase.UNLOADING,
    ]


async def test_a_policy_is_taken_while_requests_are_being_stopped(
    autojump_clock: MockClock,
) -> None:
    class Slow(ScriptedBackend):
        async def play(self, request: Request, emit: Emit) -> Finished:
            try:
                return await super().play(request, emit)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(10)

    async with open_scripted_provider(Slow()) as provider, trio.open_nursery() as nursery:
        await provider.start()
        await first_text(provider.submit(SHORT))
        nursery.start_soon(provider.stop)
        await wait_all_tasks_blocked()
        assert provider.phase is Phase.STOPPING
        await provider.configure(policy=Policy(max_pending=7))
        assert provider.policy.max_pending == 7
        assert provider.phase is Phase.STOPPING


async def test_what_is_no_policy_is_refused(kind: Kind, parrot: Parrot, endless: Parrot) -> None:
    async with started(parrot, kind) as provider:
        await provider.stop()
        for value in (1, "fail", Policy):
            with pytest.raises(SpecificationError, match="not a Policy"):
                await provider.configure(config_of(endless), policy=value)  # type: ignore[arg-type]
        assert provider.config == config_of(parrot)
        assert provider.residency == "resident"


async def test_a_policy_whose_configuration_waits_is_that_of_the_last_caller(
    kind: Kind, parrot: Parrot, endless: Parrot
) -> None:
    backend = Held(kind)
    async with started(parrot, backend) as provider, trio.open_nursery() as nursery:
        await provider.stop()

        async def configure(config: ModelConfig, number: int) -> None:
            await provider.configure(config, policy=Policy(max_pending=number))

        nursery.start_soon(configure, config_of(endless, 1024), 1)
        await reach(provider, Phase.UNLOADING)
        backend.let_go.set()
        await configure(config_of(endless, 2048), 2)
        await reach(provider, Phase.UNLOADED)
        await wait_all_tasks_blocked()
        assert provider.config == config_of(endless, 2048)
        assert provider.policy == Policy(max_pending=2)
