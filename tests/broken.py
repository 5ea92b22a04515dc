"""Providers and backends that break one rule each, for the check that is to find them.

`Kept` and `KeptBackend` keep every rule; each of the others breaks the one that it names.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import ClassVar

import attrs
import trio

from llamatrio import (
    ChildError,
    LocalProvider,
    ModelConfig,
    ModelFileError,
    NotStarted,
    Phase,
    Provider,
    ProviderClosed,
    Reply,
    Request,
    RequestRefused,
    SpecificationError,
    StartInterrupted,
    StreamBroken,
    WrongPhase,
    WrongThread,
    completion_request,
)
from llamatrio.lifecycle.reply import TextReader
from llamatrio.outcomes import Cancelled, Failed, Finished, Outcome
from llamatrio.requests import Admitted, Delta
from llamatrio.session.base import (
    Awake,
    Emit,
    Ended,
    LoadProgress,
    ModelSession,
    Opened,
    Publish,
    SessionEvent,
)
from llamatrio.testing import ScriptedBackend, open_scripted_provider

ANSWER = "one two three"
QUICK = completion_request("quick")
SLOW = completion_request("slow", max_tokens=100_000)
REFUSED = completion_request("refused")
MODEL = ModelConfig(__file__, slots=2)
BAD = ModelConfig("/nowhere/there-is-no-such-model.gguf", args=("--no-such-option",))
AGES = 1000.0  # seconds: longer than anybody waits


def script(request: Request) -> str | list[str] | Exception:
    assert isinstance(request.body, Mapping)
    match request.body["prompt"]:
        case "slow":
            return ["word "] * 100_000
        case "refused":
            return RequestRefused(400, "invalid_request_error", "the script said so")
        case _:
            return ANSWER


# -- providers ---------------------------------------------------------------------------------


class Kept(Provider):
    """A provider that has the contract and nothing else, and keeps it."""

    breaks: ClassVar[str] = ""

    def __init__(self, inner: LocalProvider) -> None:
        self.inner = inner
        self.replies: list[Reply] = []

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncGenerator[Provider, None]:
        backend = ScriptedBackend(script, token_time=1.0)
        async with open_scripted_provider(backend, config=MODEL) as inner:
            yield cls(inner)

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    async def start(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self.inner.start(task_status=task_status)

    async def stop(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        await self.inner.stop(drain=drain, drain_timeout=drain_timeout)

    def submit(self, request: Request) -> Reply:
        reply = self.inner.submit(request)
        self.replies.append(reply)
        return reply

    async def cancel(self, id: int) -> Outcome | None:
        return await self.inner.cancel(id)

    def find(self, id: int) -> Reply | None:
        return next((reply for reply in self.replies if reply.id == id), None)


def lost(request: Request) -> Reply:
    """A reply that nobody will ever settle."""
    return Reply(10**6, request, lambda: "queued", lambda _: None)


class AcceptsBeforeStart(Kept):
    breaks = "a request before start is refused"

    def submit(self, request: Request) -> Reply:
        fresh = self.phase is Phase.UNLOADED and not self.replies
        return lost(request) if fresh else super().submit(request)


class NeverStarts(Kept):
    breaks = "a request is served once start has returned"

    async def start(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await trio.lowlevel.checkpoint()
        task_status.started()


class CutsAnswers(Kept):
    breaks = "a finished answer is whole"

    def submit(self, request: Request) -> Reply:
        return super().submit(shortened(request) if request == QUICK else request)


def shortened(request: Request) -> Request:
    assert isinstance(request.body, Mapping)
    return attrs.evolve(request, body={**request.body, "max_tokens": 2})


class AlwaysSaysStarted(Kept):
    breaks = "the phase follows start and stop"

    @property
    def phase(self) -> Phase:
        return Phase.STARTED


class Forgetful(Reply):
    __slots__ = ()

    def __aiter__(self) -> TextReader:
        reader = super().__aiter__()
        reader._read = 1
        return reader


class DropsTheFirstPiece(Kept):
    breaks = "text read in pieces equals the text of the result"

    def submit(self, request: Request) -> Reply:
        reply = super().submit(request)
        reply.__class__ = Forgetful
        return reply


class LosesOutcomes(Kept):
    breaks = "every accepted request has exactly one outcome"

    def submit(self, request: Request) -> Reply:
        reply = super().submit(request)
        return lost(request) if len(self.replies) % 3 == 0 else reply


class Wavering(Reply):
    __slots__ = ()

    async def wait(self) -> Outcome:
        outcome = await super().wait()
        if isinstance(outcome, Cancelled):
            self.outcome = Failed(StreamBroken("on second thoughts"), outcome.phase)
        return outcome


class GivesTwoOutcomes(Kept):
    breaks = "every accepted request has exactly one outcome"

    def submit(self, request: Request) -> Reply:
        reply = super().submit(request)
        reply.__class__ = Wavering
        return reply


class Forgives(Kept):
    breaks = "a request that is refused fails alone, and says why"

    def submit(self, request: Request) -> Reply:
        return super().submit(QUICK if request == REFUSED else request)


class TakesFromAnyThread(Kept):
    breaks = "submit from another thread raises WrongThread"

    def submit(self, request: Request) -> Reply:
        try:
            return super().submit(request)
        except WrongThread:
            return lost(request)


class Unraising(Reply):
    __slots__ = ()

    def _finished(self) -> Finished:
        return Finished("stop") if isinstance(self.outcome, Cancelled) else super()._finished()


class ReadsACutAnswerAsAWholeOne(Kept):
    breaks = "reading a reply that was cancelled raises"

    def submit(self, request: Request) -> Reply:
        reply = super().submit(request)
        reply.__class__ = Unraising
        return reply


class IgnoresCancel(Kept):
    breaks = "cancel by id ends a running request promptly and says where"

    async def cancel(self, id: int) -> Outcome | None:
        reply = self.find(id)
        return await reply.wait() if reply else None


class CancelsWithoutAWord(Kept):
    breaks = "cancel by id ends a running request promptly and says where"

    async def cancel(self, id: int) -> Outcome | None:
        await super().cancel(id)
        return None


class CancelsOnlyWhatRuns(Kept):
    breaks = "cancel by id ends a waiting request and says where"

    async def cancel(self, id: int) -> Outcome | None:
        reply = self.find(id)
        return None if reply and reply.phase == "queued" else await super().cancel(id)


class ReturnsAnotherOutcome(Kept):
    breaks = "cancel returns the outcome that the reply has"

    async def cancel(self, id: int) -> Outcome | None:
        outcome = await super().cancel(id)
        if isinstance(outcome, Cancelled) and outcome.phase == "generating":
            return attrs.evolve(outcome, tokens=outcome.tokens + 1)
        return outcome


class KnowsNoUnknownId(Kept):
    breaks = "cancel of an unknown id is None"

    async def cancel(self, id: int) -> Outcome | None:
        if (outcome := await super().cancel(id)) is None:
            raise KeyError(id)
        return outcome


class CancelsWhatIsFinished(Kept):
    breaks = "a finished request stays finished when it is cancelled"

    async def cancel(self, id: int) -> Outcome | None:
        reply = self.find(id)
        if reply and isinstance(reply.outcome, Finished):
            reply.outcome = Cancelled("caller", "generating", reply.tokens)
        return await super().cancel(id)


class CancelsTheOtherSlot(Kept):
    breaks = "cancel does not touch others"

    async def cancel(self, id: int) -> Outcome | None:
        for reply in self.replies:
            if reply.tokens:
                reply.cancel()
        return await super().cancel(id)


class CancelsOnlyForThosePatient(Kept):
    breaks = "a cancel that is not waited for cancels all the same"

    async def cancel(self, id: int) -> Outcome | None:
        await trio.lowlevel.checkpoint()
        return await super().cancel(id)


class LeavesWhatWaits(Kept):
    breaks = "stop ends what runs and what waits as cancelled by stop"

    async def stop(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        await super().stop(drain=drain, drain_timeout=drain_timeout)
        for reply in self.replies:
            if isinstance(reply.outcome, Cancelled) and reply.outcome.phase == "queued":
                reply.outcome = None


class AcceptsAfterStop(Kept):
    breaks = "a request after stop is refused"

    def submit(self, request: Request) -> Reply:
        return lost(request) if self.phase is Phase.RESIDENT else super().submit(request)


class StartsOnlyOnce(Kept):
    breaks = "start after stop serves again"

    async def start(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        if self.phase is not Phase.RESIDENT:
            await super().start(task_status=task_status)


class CountsFromOneAgain(Kept):
    breaks = "no two requests have the same id"

    async def stop(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        await super().stop(drain=drain, drain_timeout=drain_timeout)
        self.inner._actor._desk.accepted = 0


class RewritesHistory(Kept):
    breaks = "an outcome never changes"

    async def stop(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        await super().stop(drain=drain, drain_timeout=drain_timeout)
        for reply in self.replies:
            if isinstance(reply.outcome, Finished) and not drain:
                reply.outcome = Cancelled("stop", "generating", reply.tokens)


class RefusesToStopTwice(Kept):
    breaks = "stop when stopped is nothing"

    async def stop(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        if self.phase in (Phase.UNLOADED, Phase.RESIDENT):
            raise WrongPhase("it is stopped already")
        await super().stop(drain=drain, drain_timeout=drain_timeout)


class AnswersOneStop(Kept):
    breaks = "two stops at once both return"
    stopping = False

    async def stop(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        if self.stopping:
            await trio.sleep_forever()
        self.stopping = True
        await super().stop(drain=drain, drain_timeout=drain_timeout)
        self.stopping = False


class StopsOnlyForThosePatient(Kept):
    breaks = "a stop that is not waited for stops all the same"

    async def stop(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        await trio.lowlevel.checkpoint()
        await super().stop(drain=drain, drain_timeout=drain_timeout)


class IsNotStartable(Kept):
    breaks = "start is startable"

    async def start(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await super().start()


class StartsAnew(Kept):
    breaks = "start twice is one start"

    async def start(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        if self.phase is Phase.STARTED:
            await super().stop()
        await super().start(task_status=task_status)


class CannotBeAbandoned(Kept):
    breaks = "a cancelled start abandons the wait"

    async def start(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            await super().start(task_status=task_status)
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep(AGES)
            raise


class StartsAgainByItself(Kept):
    breaks = "a stop while starting ends the start"

    async def start(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            await super().start(task_status=task_status)
        except StartInterrupted:
            await super().start()


class StopsWithoutDraining(Kept):
    breaks = "stop(drain=True) serves what was accepted"

    async def stop(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        await super().stop()


class AcceptsWhileDraining(Kept):
    breaks = "stop(drain=True) refuses further requests and goes on with the others"
    draining = False

    async def stop(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        self.draining = drain
        await super().stop(drain=drain, drain_timeout=drain_timeout)
        self.draining = False

    def submit(self, request: Request) -> Reply:
        return lost(request) if self.draining else super().submit(request)


class DrainsForEver(Kept):
    breaks = "stop(drain=True) ends at its time"

    async def stop(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        await super().stop(drain=drain)


class DrainsInPeace(Kept):
    breaks = "another stop ends a stop(drain=True)"

    def __init__(self, inner: LocalProvider) -> None:
        super().__init__(inner)
        self.drained = trio.Event()
        self.drained.set()

    async def stop(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        if not self.drained.is_set():
            await self.drained.wait()
        if drain:
            self.drained = trio.Event()
        await super().stop(drain=drain, drain_timeout=drain_timeout)
        self.drained.set()


class LeavesRequestsBehind(Kept):
    breaks = "leaving the block ends every request"

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncGenerator[Provider, None]:
        async with super().open() as provider:
            yield provider
        assert isinstance(provider, Kept)
        for reply in provider.replies:
            if isinstance(reply.outcome, Cancelled) and reply.outcome.by == "shutdown":
                reply.outcome = None


class AcceptsAfterTheEnd(Kept):
    breaks = "submit after the block raises ProviderClosed"

    def submit(self, request: Request) -> Reply:
        try:
            return super().submit(request)
        except ProviderClosed:
            return lost(request)


class SaysNotStartedAfterTheEnd(Kept):
    breaks = "submit after the block raises ProviderClosed"

    def submit(self, request: Request) -> Reply:
        try:
            return super().submit(request)
        except ProviderClosed:
            raise NotStarted("it has been left") from None


class StartsAfterTheEnd(Kept):
    breaks = "start and stop after the block raise ProviderClosed"

    async def start(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with suppress(ProviderClosed):
            await super().start(task_status=task_status)


class CannotCancelAfterTheEnd(Kept):
    breaks = "cancel after the block is None"

    async def cancel(self, id: int) -> Outcome | None:
        if self.phase is Phase.UNLOADED and self.replies:
            raise ProviderClosed("it has been left")
        return await super().cancel(id)


class WrapsExceptions(Kept):
    breaks = "an exception of the body comes out bare"

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncGenerator[Provider, None]:
        async with super().open() as provider, trio.open_nursery():
            yield provider


class SwallowsCancels(Kept):
    breaks = "a cancel of the body comes out as a cancel"

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncGenerator[Provider, None]:
        async with super().open() as provider:
            with suppress(trio.Cancelled):
                yield provider


# -- backends ----------------------------------------------------------------------------------


class KeptBackend(ScriptedBackend):
    """A backend that keeps every rule, those of files and refusals included."""

    breaks: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__(script, token_time=1.0)

    def check(self, config: ModelConfig) -> None:
        if config.args:
            raise SpecificationError(f"there are no options: {config.args}")

    async def inspect(self, config: ModelConfig) -> None:
        look_at(config)
        await trio.lowlevel.checkpoint()

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        look_at(config)
        await super().run(config, publish)


def look_at(config: ModelConfig) -> None:
    if config.model is None or not Path(config.model).exists():
        raise ModelFileError(str(config.model), "no such file")


class ChecksFiles(KeptBackend):
    breaks = "check passes what works, and looks at no file"

    def check(self, config: ModelConfig) -> None:
        look_at(config)


class ChecksNothing(KeptBackend):
    breaks = "check raises SpecificationError for what cannot work"

    def check(self, config: ModelConfig) -> None:
        pass


class LoadsAtALook(KeptBackend):
    breaks = "inspect passes what works, and loads nothing"
    loaded = False

    @property
    def pid(self) -> int | None:
        return 1 if self.loaded else None

    async def inspect(self, config: ModelConfig) -> None:
        await super().inspect(config)
        self.loaded = True


class InspectsNothing(KeptBackend):
    breaks = "inspect raises SpecificationError for a missing model"

    async def inspect(self, config: ModelConfig) -> None:
        await trio.lowlevel.checkpoint()


class TakesAgesToEnd(KeptBackend):
    breaks = "cancelling run ends it in time, and gives its process back"

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        try:
            await super().run(config, publish)
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep(AGES)
            raise


class SwallowsTheCancelOfItsRun(KeptBackend):
    breaks = "cancelling run ends it in time, and gives its process back"

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        try:
            await super().run(config, publish)
        except trio.Cancelled:  # noqa: ASYNC103 - that is what is wrong with it
            with trio.CancelScope(shield=True):
                await trio.sleep(AGES)


class KeepsItsProcess(KeptBackend):
    breaks = "cancelling run ends it in time, and gives its process back"

    @property
    def pid(self) -> int | None:
        return 1 if self.loads else None


class NoSession(ModelSession):
    async def perform(self, request: Request, emit: Emit) -> Finished:
        raise AssertionError("nobody asks it")


class OpensAfterItsCancel(KeptBackend):
    breaks = "cancelling run while it loads ends it, and nothing is opened any more"

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        try:
            await super().run(config, publish)
        finally:
            if not self.loads:
                publish(Opened(NoSession()))


class CutsItsAnswers(KeptBackend):
    breaks = "a finished answer is whole"

    async def play(self, request: Request, emit: Emit) -> Finished:
        return await super().play(shortened(request) if request == QUICK else request, emit)


class Telling(KeptBackend):
    """Tells what `tell` makes of each event."""

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        await super().run(config, lambda event: self.tell(event, publish))

    def tell(self, event: SessionEvent, publish: Publish) -> None:
        publish(event)


class OpensTwice(Telling):
    breaks = "Opened comes once, and nothing but the load before it"

    def tell(self, event: SessionEvent, publish: Publish) -> None:
        publish(event)
        if isinstance(event, Opened):
            publish(event)


class WakesBeforeItOpens(Telling):
    breaks = "Opened comes once, and nothing but the load before it"

    def tell(self, event: SessionEvent, publish: Publish) -> None:
        if isinstance(event, Opened):
            publish(Awake())
        publish(event)


class LoadsOnlyOnce(KeptBackend):
    breaks = "a second run opens the model anew"

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        if self.loads:
            raise ChildError("once is enough")
        await super().run(config, publish)


class OpensWhatIsMissing(KeptBackend):
    breaks = "a missing model is never opened"

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        await super().run(attrs.evolve(config, model=__file__), publish)


class LivesOnAfterAFault(Telling):
    breaks = "an error that publish raises ends the life"

    def tell(self, event: SessionEvent, publish: Publish) -> None:
        with suppress(ChildError):
            publish(event)


class SpeaksAfterItsEnd(Telling):
    breaks = "a death is told by Ended, which names an error and is the last word"

    def tell(self, event: SessionEvent, publish: Publish) -> None:
        publish(event)
        if isinstance(event, Ended):
            publish(LoadProgress(1.0))


class EndsTwice(Telling):
    breaks = "a death is told by Ended, which names an error and is the last word"

    def tell(self, event: SessionEvent, publish: Publish) -> None:
        publish(event)
        if isinstance(event, Ended):
            publish(event)


class DiesOfNothing(Telling):
    breaks = "a death is told by Ended, which names an error and is the last word"

    def tell(self, event: SessionEvent, publish: Publish) -> None:
        publish(Ended() if isinstance(event, Ended) else event)


class DiesWithoutAWord(Telling):
    breaks = "a death is told by Ended, which names an error and is the last word"

    def tell(self, event: SessionEvent, publish: Publish) -> None:
        if not isinstance(event, Ended):
            publish(event)


class CannotBeLookedAt(KeptBackend):
    breaks = "it can be looked at at any time"

    def signs_of_life(self) -> object:
        if not self.loads:
            raise RuntimeError("there is no process")
        return super().signs_of_life()


class RunsOneAfterAnother(KeptBackend):
    breaks = "as many requests as there are slots run at once"

    def __init__(self) -> None:
        super().__init__()
        self.lock = trio.Lock()

    async def play(self, request: Request, emit: Emit) -> Finished:
        async with self.lock:
            return await super().play(request, emit)


class FinishesWhatIsCancelled(KeptBackend):
    breaks = "a request that is cancelled ends promptly, and leaves the session usable"

    async def play(self, request: Request, emit: Emit) -> Finished:
        try:
            return await super().play(request, emit)
        except trio.Cancelled:  # noqa: ASYNC103 - that is what is wrong with it
            return Finished("stop")  # noqa: ASYNC104


class IgnoresCancels(KeptBackend):
    breaks = "a request that is cancelled ends promptly, and leaves the session usable"

    async def play(self, request: Request, emit: Emit) -> Finished:
        with trio.move_on_after(AGES, shield=True):
            return await super().play(request, emit)
        await trio.lowlevel.checkpoint_if_cancelled()
        raise StreamBroken("that took too long")


class IsSpoiltByACancel(KeptBackend):
    breaks = "a request that is cancelled ends promptly, and leaves the session usable"
    spoilt = False

    async def play(self, request: Request, emit: Emit) -> Finished:
        if self.spoilt:
            raise StreamBroken("there is something left of the one before")
        try:
            return await super().play(request, emit)
        except trio.Cancelled:
            self.spoilt = True
            raise


class EmitsTooLate(KeptBackend):
    breaks = "an answer is emitted in order, and nothing after it"
    last: Emit | None = None

    async def play(self, request: Request, emit: Emit) -> Finished:
        if self.last:
            self.last(Delta("and another thing"))
        self.last = emit
        return await super().play(request, emit)


class AdmitsTwice(KeptBackend):
    breaks = "an answer is emitted in order, and nothing after it"

    async def play(self, request: Request, emit: Emit) -> Finished:
        finished = await super().play(request, emit)
        emit(Admitted())
        return finished


class KeepsSlots(KeptBackend):
    breaks = "a request that is cancelled gives its slot back"

    def __init__(self) -> None:
        super().__init__()
        self.slots = trio.Semaphore(MODEL.slots)

    async def play(self, request: Request, emit: Emit) -> Finished:
        await self.slots.acquire()
        finished = await super().play(request, emit)
        self.slots.release()
        return finished


class EndsTheOtherSlot(KeptBackend):
    breaks = "a request that is cancelled leaves the others running"

    async def play(self, request: Request, emit: Emit) -> Finished:
        try:
            return await super().play(request, emit)
        except trio.Cancelled:
            if self._session is not None:
                self._session.end()
            raise


class IsSpoiltByARefusal(KeptBackend):
    breaks = "a refused request leaves the session as good as before"
    spoilt = False

    async def play(self, request: Request, emit: Emit) -> Finished:
        if self.spoilt:
            raise StreamBroken("there is something left of the one before")
        self.spoilt = request == REFUSED
        return await super().play(request, emit)


class FinishesWhatDied(KeptBackend):
    breaks = "an answer that a death cuts off raises ChildError"

    async def play(self, request: Request, emit: Emit) -> Finished:
        try:
            return await super().play(request, emit)
        except trio.Cancelled:  # noqa: ASYNC103 - that is what is wrong with it
            if self._death is None or self._death.is_set():
                return Finished("stop")  # noqa: ASYNC104
            raise


PROVIDERS = Kept.__subclasses__()
BACKENDS = [
    kind for kind in (*KeptBackend.__subclasses__(), *Telling.__subclasses__()) if kind.breaks
]
