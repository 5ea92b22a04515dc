"""What comes out of a provider's block: the very exception that went in, or one of ours, bare."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import warnings
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress

import attrs
import pytest
import trio
import trio.testing
from moments import first_text, reach

from llamatrio import (
    NO_RESTARTS,
    Backend,
    ChildDied,
    LifecycleActor,
    LocalProvider,
    ModelConfig,
    ModelFileError,
    Phase,
    Policy,
    ProviderBroken,
    ProviderClosed,
    Reply,
    RequestCancelled,
    RequestFailed,
    Transition,
    completion_request,
    open_provider,
    outcomes,
)
from llamatrio.child.launch import Kind
from llamatrio.lifecycle.desk import Desk
from llamatrio.session.base import Publish
from llamatrio.testing.parrot import Parrot

LONG = completion_request("Hello", max_tokens=4000, temperature=0)


class Books:
    """Opens providers, and keeps their actors to look at their accounts afterwards."""

    def __init__(self, kind: Kind, parrot: Parrot) -> None:
        self._kind = kind
        self._config = ModelConfig(parrot.path, threads=1)
        self._make: type[LifecycleActor] = LifecycleActor
        self.actor: LifecycleActor

    def open(
        self, actor: type[LifecycleActor] = LifecycleActor, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[LocalProvider, bool | None]:
        self._make = actor
        return open_provider(self._config, backend=self._kind, policy=policy, actor=self._keep)

    def _keep(self, config: ModelConfig, backend: Backend) -> LifecycleActor:
        self.actor = self._make(config, backend)
        return self.actor

    def assert_balanced(self, accepted: int) -> None:
        counters = self.actor.counters
        assert counters.accepted == accepted
        assert counters.finished + counters.cancelled + counters.failed == accepted
        assert self.actor.running == ()
        assert self.actor.diagnostics().pending == 0
        assert self.actor.phase is Phase.UNLOADED


@pytest.fixture
def books(kind: Kind, endless: Parrot) -> Books:
    return Books(kind, endless)


# -- exceptions of the body --------------------------------------------------------------------


class Empty(Exception):
    def __len__(self) -> int:
        return 0


class Whim(BaseException):
    pass


def an_error() -> BaseException:
    return ValueError("mine")


def an_error_that_is_false() -> BaseException:
    return Empty()


def an_error_with_notes() -> BaseException:
    error = ValueError("mine")
    error.add_note("a note")
    return error


def an_error_with_a_cause() -> BaseException:
    error = ValueError("mine")
    error.__cause__ = KeyError("the cause")
    error.__context__ = KeyError("the context")
    return error


def an_error_with_a_context() -> BaseException:
    error = ValueError("mine")
    error.__context__ = KeyError("the context")
    return error


def an_error_whose_context_is_suppressed() -> BaseException:
    error = an_error_with_a_context()
    error.__suppress_context__ = True
    return error


def a_group() -> BaseException:
    return ExceptionGroup("mine", [ValueError(1), KeyError(2)])


def a_group_of_one() -> BaseException:
    return BaseExceptionGroup("mine", [an_error_with_a_context()])


def a_group_of_a_group_of_one() -> BaseException:
    return BaseExceptionGroup("mine", [BaseExceptionGroup("too", [KeyboardInterrupt()])])


def a_base_exception() -> BaseException:
    return Whim()


def a_keyboard_interrupt() -> BaseException:
    return KeyboardInterrupt()


def a_system_exit() -> BaseException:
    return SystemExit(3)


def a_generator_exit() -> BaseException:
    return GeneratorExit()


def a_stop_iteration() -> BaseException:
    return StopIteration(1)


def a_stop_async_iteration() -> BaseException:
    return StopAsyncIteration()


def a_runtime_error_from_a_stop_iteration() -> BaseException:
    error = RuntimeError("generator raised StopIteration")
    error.__cause__ = StopIteration()
    return error


def a_cancellation_of_asyncio() -> BaseException:
    return asyncio.CancelledError()


def an_error_of_the_library() -> BaseException:
    return ProviderBroken("mine")


MAKERS = [
    an_error,
    an_error_that_is_false,
    an_error_with_notes,
    an_error_with_a_cause,
    an_error_with_a_context,
    an_error_whose_context_is_suppressed,
    a_group,
    a_group_of_one,
    a_group_of_a_group_of_one,
    a_base_exception,
    a_keyboard_interrupt,
    a_system_exit,
    a_generator_exit,
    a_stop_iteration,
    a_stop_async_iteration,
    a_runtime_error_from_a_stop_iteration,
    a_cancellation_of_asyncio,
    an_error_of_the_library,
]


@attrs.frozen
class Portrait:
    """All that one can see of an exception but its traceback."""

    itself: BaseException = attrs.field(eq=id)
    cause: BaseException | None = attrs.field(eq=id)
    context: BaseException | None = attrs.field(eq=id)
    suppressed: bool
    notes: list[str]
    parts: tuple[Portrait, ...]

    @classmethod
    def of(cls, error: BaseException) -> Portrait:
        parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        return cls(
            error,
            error.__cause__,
            error.__context__,
            error.__suppress_context__,
            list(getattr(error, "__notes__", ())),
            tuple(cls.of(part) for part in parts),
        )


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: str(make.__name__))
async def test_an_exception_of_the_body_comes_out_as_it_went_in(
    books: Books, make: Callable[[], BaseException]
) -> None:
    error = make()
    before = Portrait.of(error)
    replies: list[Reply] = []
    with trio.fail_after(60), pytest.raises(type(error)) as caught:
        async with books.open() as provider:
            await provider.start()
            replies += [provider.submit(LONG) for _ in range(3)]
            await first_text(replies[0])
            raise error
    assert Portrait.of(caught.value) == before
    assert [reply.outcome for reply in replies] == [
        outcomes.Cancelled("shutdown", "generating", replies[0].tokens),
        outcomes.Cancelled("shutdown", "queued"),
        outcomes.Cancelled("shutdown", "queued"),
    ]
    books.assert_balanced(3)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: str(make.__name__))
def test_an_exception_of_the_body_keeps_the_context_it_was_raised_in(
    books: Books, make: Callable[[], BaseException]
) -> None:
    async def main() -> None:
        with pytest.raises(type(error)) as caught:
            async with books.open():
                raise error
        assert caught.value is error

    error = make()
    outer = LookupError("outer")
    try:
        raise outer
    except LookupError:
        trio.run(main)
    assert error.__context__ is outer


async def test_the_group_of_a_nursery_in_the_body_comes_out_as_it_is(books: Books) -> None:
    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise error

    error = ValueError("mine")
    with trio.fail_after(60), pytest.RaisesGroup(ValueError) as caught:
        async with books.open() as provider:
            await provider.start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(provider.submit(LONG).wait)
                nursery.start_soon(fail)
    assert caught.value.exceptions == (error,)
    assert caught.value.exceptions[0] is error
    books.assert_balanced(1)


async def test_a_failed_load_raises_its_error_bare(kind: Kind) -> None:
    with trio.fail_after(60), pytest.raises(ModelFileError) as caught:
        async with open_provider(ModelConfig("/nowhere.gguf"), backend=kind) as provider:
            await provider.start()
    assert caught.type is ModelFileError


# -- the child dies ----------------------------------------------------------------------------


def assert_killed(error: RequestFailed, reply: Reply) -> None:
    """Check that reading a reply raised this, because its child was killed."""
    assert error.outcome is reply.outcome
    assert isinstance(error.outcome, outcomes.Failed)
    assert error.__cause__ is error.outcome.error
    assert isinstance(error.__cause__, ChildDied)
    assert error.__cause__.exit is not None
    assert error.__cause__.exit.signal == "SIGKILL"


async def test_reading_the_reply_of_a_killed_child_raises_out_of_the_block_bare(
    books: Books,
) -> None:
    replies: list[Reply] = []
    with trio.fail_after(60), pytest.raises(RequestFailed) as caught:
        async with books.open() as provider:
            await provider.start()
            pid = provider.diagnostics().pid
            assert pid is not None
            replies += [provider.submit(LONG) for _ in range(2)]
            await first_text(replies[0])
            os.kill(pid, signal.SIGKILL)
            await replies[0].result()
    assert_killed(caught.value, replies[0])
    assert isinstance(replies[1].outcome, outcomes.Cancelled)
    assert replies[1].outcome.by == "shutdown"
    books.assert_balanced(2)


async def test_what_waits_for_a_child_that_is_killed_for_good_raises_out_of_the_block_bare(
    books: Books,
) -> None:
    replies: list[Reply] = []
    with trio.fail_after(60), pytest.raises(RequestFailed) as caught:
        async with books.open(policy=NO_RESTARTS) as provider:
            await provider.start()
            pid = provider.diagnostics().pid
            assert pid is not None
            replies += [provider.submit(LONG) for _ in range(2)]
            await first_text(replies[0])
            os.kill(pid, signal.SIGKILL)
            await replies[1].result()
    assert_killed(caught.value, replies[1])
    assert isinstance(replies[0].outcome, outcomes.Failed)
    books.assert_balanced(2)


async def test_an_exception_of_the_body_comes_out_bare_while_the_child_is_dead(
    books: Books,
) -> None:
    error = ValueError("mine")
    with trio.fail_after(60), pytest.raises(ValueError, match="mine") as caught:
        async with books.open() as provider:
            await provider.start()
            pid = provider.diagnostics().pid
            assert pid is not None
            reply = provider.submit(LONG)
            await first_text(reply)
            os.kill(pid, signal.SIGKILL)
            raise error
    assert caught.value is error
    assert error.__context__ is None
    books.assert_balanced(1)


async def test_a_dead_child_that_is_loaded_again_raises_nothing(books: Books) -> None:
    with trio.fail_after(60):
        async with books.open() as provider:
            await provider.start()
            pid = provider.diagnostics().pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await reach(provider, Phase.LOADING)
            assert isinstance(provider.failure, ChildDied)
            await reach(provider, Phase.STARTED)
            assert provider.failure is None
    books.assert_balanced(0)


async def test_a_dead_child_alone_raises_nothing(books: Books) -> None:
    with trio.fail_after(60):
        async with books.open(policy=NO_RESTARTS) as provider:
            await provider.start()
            pid = provider.diagnostics().pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await reach(provider, Phase.UNLOADED)
            assert isinstance(provider.failure, ChildDied)
    books.assert_balanced(0)


# -- cancellation ------------------------------------------------------------------------------


async def test_a_cancelled_block_raises_cancelled_and_nothing_else(books: Books) -> None:
    seen: list[BaseException] = []
    with trio.fail_after(60), trio.CancelScope() as outer:
        try:
            async with books.open() as provider:
                await provider.start()
                replies = [provider.submit(LONG) for _ in range(2)]
                await first_text(replies[0])
                outer.cancel()
                await trio.sleep_forever()
        except BaseException as exc:
            seen.append(exc)
            raise
    assert outer.cancelled_caught
    assert [type(exc) for exc in seen] == [trio.Cancelled]
    books.assert_balanced(2)


async def test_a_cancel_after_the_last_checkpoint_of_the_body_is_left_to_the_next_one(
    books: Books,
) -> None:
    with trio.fail_after(60), trio.CancelScope() as outer:
        async with books.open() as provider:
            await provider.start()
            outer.cancel()
        books.assert_balanced(0)
        await trio.lowlevel.checkpoint()
    assert outer.cancelled_caught


async def test_a_block_within_a_cancelled_scope_leaves_at_once(books: Books) -> None:
    with trio.fail_after(60), trio.CancelScope() as outer:
        outer.cancel()
        async with books.open() as provider:
            await provider.start()
    assert outer.cancelled_caught
    assert books.actor.counters.generations == 0


async def test_a_deadline_around_the_block_is_caught_where_it_was_set(books: Books) -> None:
    with trio.fail_after(60):
        with trio.move_on_after(60) as outer:
            async with books.open() as provider:
                await provider.start()
                reply = provider.submit(LONG)
                await first_text(reply)
                outer.deadline = trio.current_time()
                await reply.wait()
        assert outer.cancelled_caught
    books.assert_balanced(1)


async def test_a_deadline_within_the_block_raises_too_slow_bare(books: Books) -> None:
    with trio.fail_after(60), pytest.raises(trio.TooSlowError) as caught:
        async with books.open() as provider:
            await provider.start()
            with trio.fail_after(0):
                await provider.submit(LONG).wait()
    assert isinstance(caught.value.__context__, trio.Cancelled)
    assert books.actor.counters.accepted == 1
    books.assert_balanced(1)


async def test_an_error_beside_a_cancel_keeps_its_group(books: Books) -> None:
    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise error

    error = ValueError("mine")
    with trio.fail_after(60), pytest.RaisesGroup(ValueError) as caught:
        with trio.CancelScope() as outer:
            async with books.open() as provider:
                await provider.start()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(provider.submit(LONG).wait)
                    nursery.start_soon(fail_when_cancelled)
                    await trio.testing.wait_all_tasks_blocked()
                    outer.cancel()
    assert caught.value.exceptions == (error,)
    books.assert_balanced(1)


# -- the actor breaks --------------------------------------------------------------------------


class Breaking(LifecycleActor):
    """Breaks at the first bell after `armed`."""

    armed = False
    reason = ZeroDivisionError("broken")

    def _dispatch(self) -> None:
        if self.armed:
            if self._desk.queue:
                self._desk.take(self._desk.queue.first)
            raise self.reason
        super()._dispatch()


def arm(provider: LocalProvider) -> None:
    assert isinstance(provider._actor, Breaking)
    provider._actor.armed = True


def assert_broken(reply: Reply) -> None:
    assert isinstance(reply.outcome, outcomes.Failed)
    assert isinstance(reply.outcome.error, ProviderBroken)
    assert isinstance(reply.outcome.error.__cause__, ZeroDivisionError)


async def test_a_broken_actor_cancels_the_body_and_raises_bare(books: Books) -> None:
    seen: list[BaseException] = []
    replies: list[Reply] = []
    with trio.fail_after(60), pytest.raises(ProviderBroken) as caught:
        async with books.open(Breaking) as provider:
            await provider.start()
            replies += [provider.submit(LONG) for _ in range(3)]
            await first_text(replies[0])
            arm(provider)
            replies.append(provider.submit(LONG))
            try:
                await trio.sleep_forever()
            except BaseException as exc:
                seen.append(exc)
                raise
    assert caught.value.__cause__ is Breaking.reason
    assert caught.value.__context__ is None
    assert [type(exc) for exc in seen] == [trio.Cancelled]
    for reply in replies:
        assert_broken(reply)
    books.assert_balanced(4)


async def test_a_broken_actor_raises_bare_to_a_body_that_waits_for_a_verb(books: Books) -> None:
    with trio.fail_after(60), pytest.raises(ProviderBroken):
        async with books.open(Breaking) as provider:
            arm(provider)
            await provider.start()
    books.assert_balanced(0)


async def test_a_broken_actor_answers_those_who_wait_outside_the_block(books: Books) -> None:
    async def start(provider: LocalProvider) -> None:
        with pytest.raises(ProviderClosed):
            await provider.start()

    async def read(reply: Reply) -> None:
        with pytest.raises(RequestFailed):
            await reply.result()

    async def use_outside(provider: LocalProvider) -> None:
        outside.start_soon(start, provider)
        await reach(provider, Phase.LOADING)
        outside.start_soon(read, provider.submit(LONG))

    with trio.fail_after(60):
        async with trio.open_nursery() as outside:
            with pytest.raises(ProviderBroken):
                async with books.open(Breaking) as provider:
                    arm(provider)
                    await use_outside(provider)
                    await trio.sleep_forever()
    books.assert_balanced(1)


async def test_a_broken_actor_and_a_failing_body_come_as_a_group(books: Books) -> None:
    error = ValueError("mine")
    with trio.fail_after(60), pytest.RaisesGroup(ValueError, ProviderBroken) as caught:
        async with books.open(Breaking) as provider:
            await provider.start()
            arm(provider)
            provider.submit(LONG)
            try:
                await trio.sleep_forever()
            finally:
                raise error
    mine, ours = caught.value.exceptions
    assert mine is error
    assert type(ours) is ProviderBroken
    assert ours.__cause__ is Breaking.reason
    books.assert_balanced(1)


async def test_a_broken_actor_in_a_cancelled_block_raises_cancelled(books: Books) -> None:
    with trio.fail_after(60), trio.CancelScope() as outer:
        async with books.open(Breaking) as provider:
            await provider.start()
            arm(provider)
            provider.submit(LONG)
            outer.cancel()
            await trio.sleep_forever()
    assert outer.cancelled_caught
    books.assert_balanced(1)


class BreakingAtItems(LifecycleActor):
    def _take_item(self, item: object) -> None:
        raise ZeroDivisionError


class BreakingDesk(Desk):
    def settle(self, reply: Reply, outcome: outcomes.Outcome) -> None:
        raise ZeroDivisionError


class BreakingAtOutcomes(LifecycleActor):
    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        self._desk = BreakingDesk(
            self._waiting_phase, self._cancel_running, self._on_settled, self._ring
        )


class BreakingAfterOutcomes(LifecycleActor):
    def _on_settled(self, reply: Reply, outcome: outcomes.Outcome) -> None:
        super()._on_settled(reply, outcome)
        raise ZeroDivisionError


class BreakingAtTheEnd(LifecycleActor):
    def _end_requests(self, error: Exception | None) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "actor", [BreakingAtItems, BreakingAtOutcomes, BreakingAfterOutcomes, BreakingAtTheEnd]
)
async def test_a_defect_anywhere_in_the_actor_raises_bare(
    books: Books, actor: type[LifecycleActor]
) -> None:
    replies = []
    with trio.fail_after(60), pytest.raises(ProviderBroken) as caught:
        async with books.open(actor) as provider:
            await provider.start()
            replies.append(provider.submit(LONG))
            await first_text(replies[0])
            replies.append(provider.submit(LONG))
            replies[0].cancel()
            with trio.move_on_after(0.1):
                await replies[0].wait()
    assert "ZeroDivisionError" in str(caught.value)
    assert None not in [reply.outcome for reply in replies]
    books.assert_balanced(len(replies))


class Leaving(LifecycleActor):
    """Its hooks raise what is no `Exception`."""

    def on_request_finished(self, reply: Reply, outcome: outcomes.Outcome) -> None:
        sys.exit(3)


async def test_a_hook_that_exits_comes_out_bare(books: Books) -> None:
    with trio.fail_after(60), pytest.raises(SystemExit) as caught:
        async with books.open(Leaving) as provider:
            await provider.start()
            replies = [provider.submit(LONG) for _ in range(3)]
            await first_text(replies[0])
            replies[2].cancel()
            await trio.sleep_forever()
    assert caught.value.code == 3
    books.assert_balanced(3)


class LeavingEarly(LifecycleActor):
    def on_transition(self, transition: Transition) -> None:
        sys.exit(3)


async def test_a_hook_that_exits_while_the_body_waits_for_its_verb_comes_out_bare(
    books: Books,
) -> None:
    with trio.fail_after(60), pytest.raises(SystemExit):
        async with books.open(LeavingEarly) as provider:
            await provider.start()
    books.assert_balanced(0)


class Failing(LifecycleActor):
    def on_transition(self, transition: Transition) -> None:
        raise ValueError(transition)

    def on_request_started(self, reply: Reply) -> None:
        raise ValueError(reply)

    def on_request_finished(self, reply: Reply, outcome: outcomes.Outcome) -> None:
        raise ValueError(reply)


async def test_hooks_that_raise_change_nothing(
    books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(60):
        async with books.open(Failing) as provider:
            await provider.start()
            async with provider.completion("Hello", max_tokens=3, temperature=0) as reply:
                await reply.result()
            await provider.stop()
            await provider.unload_model()
    # unloaded, loading, started, stopping, resident, unloading, unloaded; started and finished
    assert books.actor.counters.hook_errors == 6 + 2
    assert "Failing.on_transition raised" in caplog.text
    books.assert_balanced(1)


class Quitting(Backend):
    """Raises what is no `Exception`."""

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        await trio.lowlevel.checkpoint()
        raise Whim


async def test_a_backend_that_raises_a_base_exception_ends_the_block() -> None:
    with trio.fail_after(60), pytest.raises(Whim):
        async with open_provider(ModelConfig("any"), backend=Quitting()) as provider:
            await provider.start()


# -- leaving while others read -----------------------------------------------------------------


async def test_a_task_outside_the_block_learns_that_it_was_left(books: Books) -> None:
    async def read(reply: Reply, *, task_status: trio.TaskStatus[None]) -> None:
        async for _ in reply:
            task_status.started()
            break
        with pytest.raises(RequestCancelled) as caught:
            await reply.result()
        assert caught.value.outcome.by == "shutdown"

    with trio.fail_after(60):
        async with trio.open_nursery() as outside:
            async with books.open() as provider:
                await provider.start()
                reply = provider.submit(LONG)
                await outside.start(read, reply)
    assert isinstance(reply.outcome, outcomes.Cancelled)
    books.assert_balanced(1)


async def leave_by_the_end(reply: Reply, scope: trio.CancelScope) -> None:
    await first_text(reply)


async def leave_by_an_exception(reply: Reply, scope: trio.CancelScope) -> None:
    await first_text(reply)
    raise LookupError


async def leave_by_a_cancel(reply: Reply, scope: trio.CancelScope) -> None:
    async for _ in reply:
        scope.cancel()


@pytest.mark.parametrize("leave", [leave_by_the_end, leave_by_an_exception, leave_by_a_cancel])
async def test_leaving_a_chat_early_cancels_it(
    books: Books, leave: Callable[[Reply, trio.CancelScope], Awaitable[None]]
) -> None:
    replies: list[Reply] = []
    with trio.fail_after(60):
        async with books.open() as provider:
            await provider.start()
            with trio.CancelScope() as scope, suppress(LookupError):
                async with provider.chat("Hello", max_tokens=4000) as reply:
                    replies.append(reply)
                    await leave(reply, scope)
            assert scope.cancelled_caught == (leave is leave_by_a_cancel)
            tokens = replies[0].tokens
            assert replies[0].outcome == outcomes.Cancelled("caller", "generating", tokens)
            async with provider.chat("Hello", max_tokens=3) as read:
                await read.result()
            assert isinstance(read.outcome, outcomes.Finished)
    books.assert_balanced(2)


async def test_a_chat_is_cancelled_by_breaking_out_of_its_block(books: Books) -> None:
    with trio.fail_after(60):
        async with books.open() as provider:
            await provider.start()
            while True:
                async with provider.chat("Hello", max_tokens=4000) as reply:
                    async for _ in reply:
                        break
                    break
            assert reply.outcome == outcomes.Cancelled("caller", "generating", reply.tokens)
    books.assert_balanced(1)


async def test_readers_and_chats_that_are_dropped_leave_no_trace(books: Books) -> None:
    with trio.fail_after(60), warnings.catch_warnings():
        warnings.simplefilter("error")
        async with books.open() as provider:
            await provider.start()
            reply = provider.submit(completion_request("Hello", max_tokens=20, temperature=0))
            await anext(aiter(reply))
            await anext(reply.deltas())
            provider.chat("never entered")
            gc.collect()
            assert isinstance(await reply.wait(), outcomes.Finished)
    books.assert_balanced(1)


async def test_a_cancelled_nursery_start_does_not_hang(books: Books) -> None:
    with trio.fail_after(60):
        async with books.open() as provider, trio.open_nursery() as nursery:
            for _ in range(20):
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await nursery.start(provider.start)
                assert scope.cancelled_caught
            assert books.actor.counters.generations == 0
            await nursery.start(provider.start)
            assert provider.started
    books.assert_balanced(0)


# -- Ctrl-C, in a run of its own: it goes to the main task of the run --------------------------


class InterruptedAtTheEnd(LifecycleActor):
    """Gets a Ctrl-C for every request that the end of the block cancels."""

    def on_request_finished(self, reply: Reply, outcome: outcomes.Outcome) -> None:
        if isinstance(outcome, outcomes.Cancelled) and outcome.by == "shutdown":
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("waiting", [1, 2, 5])
@pytest.mark.parametrize("make", [an_error, a_group_of_one, a_system_exit])
def test_ctrl_c_while_an_exception_of_the_body_leaves_is_not_lost(
    books: Books, waiting: int, make: Callable[[], BaseException]
) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with books.open(InterruptedAtTheEnd) as provider:
                await provider.start()
                for _ in range(waiting):
                    provider.submit(LONG)
                raise error

    error = make()
    with pytest.raises(KeyboardInterrupt) as caught:
        trio.run(main)
    assert caught.value.__context__ is error
    books.assert_balanced(waiting)


def test_ctrl_c_while_a_block_is_left_comes_out_bare(books: Books) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with books.open(InterruptedAtTheEnd) as provider:
                await provider.start()
                provider.submit(LONG)

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    books.assert_balanced(1)


def test_ctrl_c_while_a_cancelled_block_is_left_comes_out_bare(books: Books) -> None:
    async def main() -> None:
        with trio.fail_after(60), trio.CancelScope() as scope:
            async with books.open(InterruptedAtTheEnd) as provider:
                await provider.start()
                provider.submit(LONG)
                scope.cancel()
                await trio.sleep_forever()
        pytest.fail("the Ctrl-C was lost")

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    books.assert_balanced(1)


async def test_the_body_of_a_block_is_not_protected_from_ctrl_c(books: Books) -> None:
    with trio.fail_after(60):
        async with books.open() as provider:
            assert not trio.lowlevel.currently_ki_protected()
            await provider.start()
            async with provider.chat("Hello", max_tokens=3) as reply:
                assert not trio.lowlevel.currently_ki_protected()
                async for _ in reply:
                    assert not trio.lowlevel.currently_ki_protected()
    books.assert_balanced(1)


def test_a_start_that_ctrl_c_gave_up_before_it_had_an_effect_has_none(books: Books) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with books.open() as provider:
                await provider.start()
                await provider.stop()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(provider.unload_model)
                    await reach(provider, Phase.UNLOADING)
                    trio.lowlevel.spawn_system_task(interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        await provider.start()
                assert provider.phase is Phase.UNLOADED
                assert books.actor.counters.generations == 1

    async def interrupt() -> None:
        await trio.lowlevel.checkpoint()
        signal.raise_signal(signal.SIGINT)

    trio.run(main)
    books.assert_balanced(0)
