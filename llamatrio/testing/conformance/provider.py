"""The rules of a provider."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, TypeAlias, get_args

import attrs
import trio

from llamatrio.errors import (
    NotStarted,
    ProviderClosed,
    RequestCancelled,
    RequestFailed,
    StartInterrupted,
    WrongThread,
)
from llamatrio.lifecycle.phases import GOALS, Event, Phase
from llamatrio.lifecycle.reply import Reply
from llamatrio.outcomes import By, Cancelled, Failed, Finished, Outcome, Phase as RequestPhase
from llamatrio.provider import Provider
from llamatrio.requests import Request
from llamatrio.testing.conformance.rules import BOUND, MOMENT, Asked, Case, Report, Rules

_SOME: Final = 4  # requests, where there must be several
_WAYS: Final = get_args(RequestPhase)  # the way of a request, from phase to phase
_Open: TypeAlias = Callable[[], AbstractAsyncContextManager[Provider]]
_Started: TypeAlias = "Callable[[_ProviderCase, Provider], Awaitable[None]]"


@attrs.define(slots=False, eq=False)
class _ProviderCase(Case):
    open: _Open

    @asynccontextmanager
    async def started(self) -> AsyncGenerator[Provider, None]:
        async with self.open() as provider:
            await self.start(provider)
            yield provider
            self.step = "leaving the block"

    async def start(self, provider: Provider) -> None:
        await self.soon("start", provider.start)

    async def start_or_be_interrupted(
        self, provider: Provider, *, task_status: trio.TaskStatus[None]
    ) -> None:
        try:
            await provider.start(task_status=task_status)
        except StartInterrupted:
            return

    async def stop(self, provider: Provider) -> None:
        await self.soon("stop", provider.stop)

    async def drain(self, provider: Provider, seconds: float | None = None) -> None:
        with self.within(f"stop(drain=True, drain_timeout={seconds})"):
            await provider.stop(drain=True, drain_timeout=seconds)

    async def cancel(self, provider: Provider, id: int) -> Outcome | None:
        return await self.soon(f"cancel({id})", lambda: provider.cancel(id))

    async def outcome(self, reply: Reply) -> Outcome:
        return await self.soon(f"the outcome of {reply!r}", reply.wait)

    async def more(self, reply: Reply) -> None:
        """Wait for a further piece of an answer."""
        with self.within(f"a further piece of {reply!r}"):
            try:
                pieces = await reply.read(reply.tokens)
            except (RequestCancelled, RequestFailed) as exc:
                self.fail(f"{reply!r} was to go on, and ended: {reply.outcome!r}", exc)
            self.expect(bool(pieces), f"{reply!r} has ended; is slow_request slow enough?")

    async def running(self, provider: Provider) -> Reply:
        """Submit the slow request, and wait until its answer has begun."""
        reply = provider.submit(self.asked.slow)
        await self.more(reply)
        return reply

    async def finished(self, reply: Reply) -> None:
        outcome = await self.outcome(reply)
        self.expect(isinstance(outcome, Finished), f"{reply!r} was to finish: {outcome!r}")

    async def served(self, provider: Provider) -> None:
        """See that a request is served, to the end."""
        reply = provider.submit(self.asked.quick)
        await self.finished(reply)
        if self.asked.answer is not None:
            self.expect(reply.text == self.asked.answer, f"the answer is {reply.text!r}")

    def cancelled(self, outcome: Outcome | None, *by: By) -> Cancelled:
        if isinstance(outcome, Cancelled) and outcome.by in by:
            return outcome
        hint = "; is slow_request slow enough?" if isinstance(outcome, Finished) else ""
        self.fail(f"the outcome is {outcome!r} and not Cancelled by {' or '.join(by)}{hint}")

    def closed(self, provider: Provider) -> None:
        with self.raising(NotStarted, "submit"):
            provider.submit(self.asked.quick)

    async def closing(self, provider: Provider) -> None:
        """Wait until requests are refused."""
        with self.within("refusing requests"):
            while True:
                try:
                    reply = provider.submit(self.asked.quick)
                except NotStarted:
                    return
                reply.cancel()
                await trio.sleep(MOMENT)


_rule: Final = Rules[_ProviderCase]()


def _started_rule(name: str) -> Callable[[_Started], _Started]:
    """Register a rule that is checked within the block of a provider that has been started."""

    def register(check: _Started) -> _Started:
        @_rule(name)
        async def _(case: _ProviderCase) -> None:
            async with case.started() as provider:
                await check(case, provider)

        return check

    return register


# -- requests ----------------------------------------------------------------------------------


@_rule("a request before start is refused")
async def _before_start(case: _ProviderCase) -> None:
    async with case.open() as provider:
        case.closed(provider)


@_started_rule("a request is served once start has returned")
async def _serves(case: _ProviderCase, provider: Provider) -> None:
    await case.finished(provider.submit(case.asked.quick))


@_rule("a finished answer is whole")
async def _whole(case: _ProviderCase) -> None:
    if case.asked.answer is None:
        case.skip("give `answer`")
    async with case.started() as provider:
        await case.served(provider)


@_rule("the phase follows start and stop")
async def _phase(case: _ProviderCase) -> None:
    def is_one_of(phases: frozenset[Phase], when: str) -> None:
        case.expect(provider.phase in phases, f"it is {provider.phase} {when}")

    async with case.open() as provider:
        is_one_of(GOALS[Event.STOP], "before start")
        await case.start(provider)
        is_one_of(GOALS[Event.START], "after start")
        await case.stop(provider)
        is_one_of(GOALS[Event.STOP], "after stop")


@_rule("text read in pieces equals the text of the result")
async def _reading(case: _ProviderCase) -> None:
    async def read() -> None:
        texts.append("".join([text async for text in reply]))

    async def read_deltas() -> None:
        texts.append("".join([delta.text async for delta in reply.deltas()]))

    texts: list[str] = []
    async with case.started() as provider:
        reply = provider.submit(case.asked.quick)
        with case.within("reading"):
            async with trio.open_nursery() as nursery:
                for reader in (read, read, read_deltas):
                    nursery.start_soon(reader)
            await read()
            result = await reply.result()
    for text in (reply.text, *texts):
        case.expect(text == result.text, f"{text!r} was read, and the result is {result.text!r}")


@_started_rule("every accepted request has exactly one outcome")
async def _one_outcome(case: _ProviderCase, provider: Provider) -> None:
    quick = [provider.submit(case.asked.quick) for _ in range(_SOME)]
    slow = [provider.submit(case.asked.slow) for _ in range(_SOME)]
    for reply in slow:
        reply.cancel()
    for reply in (*quick, *slow):
        outcome = await case.outcome(reply)
        again = reply.outcome, await case.outcome(reply)
        case.expect(again == (outcome, outcome), f"{outcome!r} was told, and then {again!r}")


@_rule("a request that is refused fails alone, and says why")
async def _refused(case: _ProviderCase) -> None:
    if case.asked.refused is None:
        case.skip("give `refused_request`")
    async with case.started() as provider:
        reply = provider.submit(case.asked.refused)
        outcome = await case.outcome(reply)
        if not isinstance(outcome, Failed):
            case.fail(f"the outcome is {outcome!r}")
        try:
            await reply.result()
        except RequestFailed as exc:
            case.expect(exc.__cause__ is outcome.error, f"the cause is {exc.__cause__!r}")
        else:
            case.fail("its result can be read")
        await case.served(provider)


@_started_rule("submit from another thread raises WrongThread")
async def _thread(case: _ProviderCase, provider: Provider) -> None:
    with case.raising(WrongThread, "submit"):
        _call_in_thread(lambda: provider.submit(case.asked.quick))
    await case.served(provider)


def _call_in_thread(call: Callable[[], object]) -> None:
    """Call something in another thread, and raise what it raises.

    Trio does not wait for it, since a mock clock would jump; and a call that waits for Trio is as
    wrong as one that works.
    """

    def run() -> None:
        try:
            call()
        except Exception as exc:  # noqa: BLE001 - raised below
            errors.append(exc)

    errors: list[Exception] = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5)
    if errors:
        raise errors[0]


# -- cancel ------------------------------------------------------------------------------------


@_started_rule("reading a reply that was cancelled raises")
async def _reading_cancelled(case: _ProviderCase, provider: Provider) -> None:
    reply = await case.running(provider)
    reply.cancel()
    case.cancelled(await case.outcome(reply), "caller")
    with case.raising(RequestCancelled, "result"):
        await reply.result()
    with case.raising(RequestCancelled, "reading the text"):
        async for _ in reply:
            pass
    with case.raising(RequestCancelled, "reading the deltas"):
        async for _ in reply.deltas():
            pass


@_started_rule("cancel by id ends a running request promptly and says where")
async def _cancel_running(case: _ProviderCase, provider: Provider) -> None:
    reply = await case.running(provider)
    outcome = case.cancelled(await case.cancel(provider, reply.id), "caller")
    case.expect(outcome.phase == "generating", f"it was generating: {outcome!r}")
    case.expect(outcome.tokens > 0, f"there were tokens: {outcome!r}")
    case.expect(reply.outcome is not None, "the reply has no outcome yet")


@_started_rule("cancel by id ends a waiting request and says where")
async def _cancel_waiting(case: _ProviderCase, provider: Provider) -> None:
    await case.running(provider)
    replies = [provider.submit(case.asked.slow) for _ in range(_SOME)]
    for reply in reversed(replies):
        stood = reply.phase
        outcome = case.cancelled(await case.cancel(provider, reply.id), "caller")
        later = _WAYS.index(outcome.phase) >= _WAYS.index(stood)
        case.expect(later, f"it was {stood} already: {outcome!r}")
        begun = outcome.phase == "generating"
        case.expect(begun or not outcome.tokens, f"it cannot have tokens: {outcome!r}")


@_started_rule("cancel returns the outcome that the reply has")
async def _same_outcome(case: _ProviderCase, provider: Provider) -> None:
    reply = await case.running(provider)
    outcome = await case.cancel(provider, reply.id)
    waited = await case.outcome(reply)
    same = outcome == waited == reply.outcome
    case.expect(same, f"{outcome!r} was returned, and the reply has {reply.outcome!r}")


@_rule("cancel of an unknown id is None")
async def _cancel_unknown(case: _ProviderCase) -> None:
    async with case.open() as provider:
        for verb in (case.start, case.stop):
            for number in (-1, 0, 10**9):
                outcome = await case.cancel(provider, number)
                case.expect(outcome is None, f"cancel({number}) returned {outcome!r}")
            await verb(provider)


@_started_rule("a finished request stays finished when it is cancelled")
async def _cancel_finished(case: _ProviderCase, provider: Provider) -> None:
    reply = provider.submit(case.asked.quick)
    await case.finished(reply)
    reply.cancel()
    outcome = await case.cancel(provider, reply.id)
    case.expect(outcome is None, f"cancel returned {outcome!r}")
    await case.finished(reply)


@_started_rule("cancel does not touch others")
async def _cancel_others(case: _ProviderCase, provider: Provider) -> None:
    first = await case.running(provider)
    second, third, last = [provider.submit(case.asked.slow) for _ in range(3)]
    await case.cancel(provider, third.id)
    await case.more(first)
    await case.cancel(provider, first.id)
    await case.more(second)
    await case.cancel(provider, second.id)
    await case.more(last)


@_started_rule("a cancel that is not waited for cancels all the same")
async def _cancelled_cancel(case: _ProviderCase, provider: Provider) -> None:
    reply = await case.running(provider)
    with trio.CancelScope() as scope:
        scope.cancel()
        await provider.cancel(reply.id)
    case.cancelled(await case.outcome(reply), "caller")


# -- stop --------------------------------------------------------------------------------------


@_started_rule("stop ends what runs and what waits as cancelled by stop")
async def _stop(case: _ProviderCase, provider: Provider) -> None:
    reply = await case.running(provider)
    waiting = [provider.submit(case.asked.slow) for _ in range(_SOME)]
    await case.stop(provider)
    caught = case.cancelled(reply.outcome, "stop")
    case.expect(caught.phase == "generating", f"it was generating: {caught!r}")
    for reply in waiting:
        case.cancelled(reply.outcome, "stop")


@_started_rule("a request after stop is refused")
async def _after_stop(case: _ProviderCase, provider: Provider) -> None:
    await case.stop(provider)
    case.closed(provider)


@_started_rule("start after stop serves again")
async def _start_again(case: _ProviderCase, provider: Provider) -> None:
    for _ in range(2):
        await case.running(provider)
        await case.stop(provider)
        await case.start(provider)
        await case.served(provider)


@_rule("no two requests have the same id")
async def _ids(case: _ProviderCase) -> None:
    async with case.started() as provider:
        replies = [provider.submit(case.asked.quick) for _ in range(_SOME)]
        await case.stop(provider)
        await case.start(provider)
        replies += [provider.submit(case.asked.quick) for _ in range(_SOME)]
    ids = [reply.id for reply in replies]
    case.expect(len(set(ids)) == len(ids), f"these were given: {ids}")


@_rule("an outcome never changes")
async def _unchanging(case: _ProviderCase) -> None:
    async with case.started() as provider:
        quick = provider.submit(case.asked.quick)
        await case.finished(quick)
        slow = await case.running(provider)
        slow.cancel()
        await case.outcome(slow)
        before = [(reply.outcome, reply.text) for reply in (quick, slow)]
        await case.served(provider)
        await case.stop(provider)
        await case.start(provider)
        await case.served(provider)
    after = [(reply.outcome, reply.text) for reply in (quick, slow)]
    case.expect(after == before, f"{before} became {after}")


@_rule("stop when stopped is nothing")
async def _stop_twice(case: _ProviderCase) -> None:
    async with case.open() as provider:
        await case.stop(provider)
        await case.start(provider)
        for _ in range(2):
            await case.stop(provider)
        await case.start(provider)
        await case.served(provider)


@_started_rule("two stops at once both return")
async def _two_stops(case: _ProviderCase, provider: Provider) -> None:
    reply = await case.running(provider)
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(case.stop, provider)
    case.cancelled(reply.outcome, "stop")


@_started_rule("a stop that is not waited for stops all the same")
async def _cancelled_stop(case: _ProviderCase, provider: Provider) -> None:
    reply = await case.running(provider)
    with trio.CancelScope() as scope:
        scope.cancel()
        await provider.stop()
    case.cancelled(await case.outcome(reply), "stop")
    await case.closing(provider)


# -- start -------------------------------------------------------------------------------------


@_rule("start is startable")
async def _startable(case: _ProviderCase) -> None:
    async with case.open() as provider:
        async with trio.open_nursery() as nursery:
            with case.within("nursery.start(provider.start)"):
                await nursery.start(provider.start)
            await case.served(provider)


@_rule("start twice is one start")
async def _start_twice(case: _ProviderCase) -> None:
    async with case.open() as provider:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(case.start, provider)
        reply = await case.running(provider)
        await case.start(provider)
        await case.more(reply)
        await case.stop(provider)
        case.closed(provider)


@_rule("a cancelled start abandons the wait")
async def _cancelled_start(case: _ProviderCase) -> None:
    async with case.open() as provider:
        with case.within("a start that was cancelled"):
            async with trio.open_nursery() as nursery:
                await nursery.start(provider.start)
                nursery.cancel_scope.cancel()
        await case.start(provider)
        await case.served(provider)


@_rule("a stop while starting ends the start")
async def _stop_while_starting(case: _ProviderCase) -> None:
    async with case.open() as provider:
        with case.within("a start that was stopped"):
            async with trio.open_nursery() as nursery:
                await nursery.start(case.start_or_be_interrupted, provider)
                reply = provider.submit(case.asked.slow)
                await case.stop(provider)
        case.cancelled(reply.outcome, "stop")
        case.closed(provider)
        await case.start(provider)
        await case.served(provider)


# -- draining ----------------------------------------------------------------------------------


@_started_rule("stop(drain=True) serves what was accepted")
async def _drain(case: _ProviderCase, provider: Provider) -> None:
    replies = [provider.submit(case.asked.quick) for _ in range(_SOME)]
    await case.drain(provider)
    for reply in replies:
        finished = isinstance(reply.outcome, Finished)
        case.expect(finished, f"{reply!r} was not served: {reply.outcome!r}")
    case.closed(provider)


@_started_rule("stop(drain=True) refuses further requests and goes on with the others")
async def _draining(case: _ProviderCase, provider: Provider) -> None:
    reply = await case.running(provider)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(case.drain, provider)
        await case.closing(provider)
        await case.more(reply)
        reply.cancel()
    case.cancelled(reply.outcome, "caller")


@_started_rule("stop(drain=True) ends at its time")
async def _drain_timeout(case: _ProviderCase, provider: Provider) -> None:
    reply = await case.running(provider)
    await case.drain(provider, MOMENT)
    case.cancelled(reply.outcome, "stop")
    case.closed(provider)


@_started_rule("another stop ends a stop(drain=True)")
async def _drain_and_stop(case: _ProviderCase, provider: Provider) -> None:
    reply = await case.running(provider)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(case.drain, provider)
        await case.closing(provider)
        await case.stop(provider)
    case.cancelled(reply.outcome, "stop")


# -- its block ---------------------------------------------------------------------------------


@_rule("leaving the block ends every request")
async def _leaving(case: _ProviderCase) -> None:
    async with case.started() as provider:
        running = await case.running(provider)
        waiting = [provider.submit(case.asked.slow) for _ in range(_SOME)]
    for reply in (running, *waiting):
        case.cancelled(reply.outcome, "shutdown", "stop")


@_rule("submit after the block raises ProviderClosed")
async def _submit_after(case: _ProviderCase) -> None:
    async with case.started() as provider:
        pass
    with case.raising(ProviderClosed, "submit"):
        provider.submit(case.asked.quick)


@_rule("start and stop after the block raise ProviderClosed")
async def _verbs_after(case: _ProviderCase) -> None:
    async with case.started() as provider:
        pass
    with case.raising(ProviderClosed, "start"):
        await case.start(provider)
    with case.raising(ProviderClosed, "stop"):
        await case.stop(provider)


@_rule("cancel after the block is None")
async def _cancel_after(case: _ProviderCase) -> None:
    async with case.started() as provider:
        reply = await case.running(provider)
    outcome = await case.cancel(provider, reply.id)
    case.expect(outcome is None, f"it is {outcome!r}")


@_rule("an exception of the body comes out bare")
async def _bare_exception(case: _ProviderCase) -> None:
    plain = ValueError("raised by the body of the check")
    for error in (plain, ExceptionGroup("raised by the body of the check", [plain])):
        cause = RuntimeError("why the body of the check raised")
        seen: Exception | None = None
        try:
            async with case.started() as provider:
                await case.running(provider)
                raise error from cause
        except Exception as exc:  # noqa: BLE001 - looked at below
            seen = exc
        case.expect(seen is error, f"{error!r} went in, and out came {seen!r}")
        case.expect(error.__cause__ is cause, f"its cause became {error.__cause__!r}")


@_rule("a cancel of the body comes out as a cancel")
async def _bare_cancel(case: _ProviderCase) -> None:
    replies: list[Reply] = []
    seen: BaseException | None = None
    with trio.CancelScope() as scope:
        try:
            async with case.started() as provider:
                replies.append(await case.running(provider))
                scope.cancel()
                await trio.sleep_forever()
        except BaseException as exc:
            seen = exc
            raise
    case.expect(type(seen) is trio.Cancelled, f"out came {seen!r}")
    case.expect(scope.cancelled_caught, "the scope did not see it")
    for reply in replies:
        case.cancelled(reply.outcome, "shutdown", "stop")


PROVIDER_RULES: Final = _rule.names
"""Every rule of a provider, in the order of the check."""


async def check_provider(
    open: Callable[[], AbstractAsyncContextManager[Provider]],
    *,
    slow_request: Request,
    quick_request: Request,
    refused_request: Request | None = None,
    answer: str | None = None,
    bound: float = BOUND,
) -> Report:
    """See whether a provider keeps the contract of `llamatrio.Provider`.

    Args:
      open: Makes a fresh provider, for the length of a block. It is called once or twice for each
        rule, and lets at least eight requests wait.
      slow_request: One whose answer comes in pieces, the first of them soon, the last of them so
        late that no rule sees it: after `bound`, if that can be.
      quick_request: One that finishes soon.
      refused_request: One that is accepted, and then fails. None leaves out what needs it.
      answer: The text that answers `quick_request`. None leaves out what needs it; nobody else
        could tell a cut answer from a finished one.
      bound: Seconds in which all that is to happen soon must have happened; a load is part of that.

    Returns:
      Which rules were seen to be kept.

    Cancellation: ends the check, and leaves the block of the provider that is open.

    Raises:
      NotConforming: at the first rule that is broken.
    """
    asked = Asked(slow_request, quick_request, refused_request, answer)
    return await _rule.apply(lambda rule: _ProviderCase(rule, bound, asked, open))
