"""A witness of a provider's life, and a Trio run that a state machine goes on with step by step.

The witness takes notes of what is asked of a provider and of what it tells, and says what does not
fit together. It knows nothing of the phases and of what leads from one to another: only what
somebody outside was promised. So it fits a scripted model and a real child alike.
"""

from __future__ import annotations

import itertools
import math
import queue
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias, TypeVar

import attrs
import outcome
import trio
from trio.testing import MockClock

from llamatrio import (
    LifecycleActor,
    LlamatrioError,
    LocalProvider,
    ModelConfig,
    NotStarted,
    Phase,
    Policy,
    ProviderClosed,
    QueueFull,
    Reply,
    Request,
    StartInterrupted,
    Transition,
    WrongPhase,
)
from llamatrio.outcomes import By, Cancelled, Failed, Finished, Outcome
from llamatrio.session.base import Backend, Ended, Opened, Publish, SessionEvent

T = TypeVar("T")
VerbName: TypeAlias = Literal["start", "stop", "drain", "unload", "configure"]

NEVER: Final = 1_000_000
"""Turns of Trio's loop after which a step is taken for one that does not end."""


class Guest:
    """A Trio run on a mock clock, which goes on only while somebody waits for a call into it."""

    def __init__(self) -> None:
        self._turns: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._end: outcome.Outcome[None] | None = None
        self._result: outcome.Outcome[object] | None = None
        self.nursery: trio.Nursery | None = None
        self._send, self._receive = trio.open_memory_channel[Callable[[], Awaitable[object]]](1)
        trio.lowlevel.start_guest_run(
            self._main,
            run_sync_soon_threadsafe=self._turns.put,
            done_callback=self._finish,
            clock=MockClock(autojump_threshold=0),
            host_uses_signal_set_wakeup_fd=False,
        )
        self._go_on(lambda: self.nursery is not None)

    def _finish(self, end: outcome.Outcome[None]) -> None:
        self._end = end

    async def _main(self) -> None:
        async with trio.open_nursery() as self.nursery:
            with self._receive:
                async for call in self._receive:
                    self._result = await outcome.acapture(call)
            self.nursery.cancel_scope.cancel()

    def _go_on(self, is_over: Callable[[], bool]) -> None:
        for _ in range(NEVER):
            if is_over():
                return
            if self._end is not None:
                self._end.unwrap()
            self._turns.get(timeout=60)()
        raise AssertionError("a step does not end, and does not wait for any time either")

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run one function in there, and stand still again."""
        result: list[T] = []

        async def call() -> None:
            result.append(await function())

        self._result = None
        self._send.send_nowait(call)
        self._go_on(lambda: self._result is not None)
        assert self._result is not None
        self._result.unwrap()
        return result[0]

    def close(self) -> None:
        """Cancel what is left, and come to the end."""
        self._send.close()
        self._go_on(lambda: self._end is not None)
        assert self._end is not None
        self._end.unwrap()


# -- notes -------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Call:
    """A verb that somebody called.

    Attributes:
      name: Which one.
      scope: Cancelling it lets the caller give up waiting.
      began: When it was called, in the order of all that was asked; `math.inf` until then.
      at: When that was, on Trio's clock.
      ended: When it returned or raised, in that order; `math.inf` until then, and for ever if its
        caller gave up waiting, for it may go on then.
      timeout: Seconds that a drain may take; `math.inf` for any other.
      state: What became of it.
      error: What it raised.
      breaks: How many models had been lost when it returned; not a number if one was being lost.
    """

    name: VerbName
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    began: float = math.inf
    at: float = math.inf
    ended: float = math.inf
    timeout: float = math.inf
    state: Literal["waiting", "done", "abandoned", "failed"] = "waiting"
    error: Exception | None = None
    breaks: float = math.nan


@attrs.define(eq=False)
class Asked:
    """A request that was accepted.

    Attributes:
      reply: What came of it.
      began: When it was accepted, in the order of all that was asked.
      at: When that was, on Trio's clock.
      text: The answer that it gets if it gets a whole one; None if that is not known.
      refusal: The error that its answer is instead.
      given_up: Who gave it up.
      starts: How often it got a slot.
      slot_at: When it last got one, on Trio's clock.
      outcome: The first outcome that was seen.
      told: How often its outcome was told.
    """

    reply: Reply
    began: int
    at: float
    text: str | None = None
    refusal: Exception | None = None
    given_up: set[By] = attrs.field(factory=set)
    starts: int = 0
    slot_at: float = math.inf
    outcome: Outcome | None = None
    told: int = 0

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Who comes first: the lowest; one that is taken up again comes before its equals."""
        return (-self.reply.request.priority, not self.starts, self.reply.id)


class WitnessedActor(LifecycleActor):
    """Tells a witness all that its hooks are told."""

    def __init__(self, witness: Witness, config: ModelConfig, backend: Backend) -> None:
        self._witness = witness
        super().__init__(config, backend)

    def close(self) -> None:
        self._witness.note_close(self.counters.generations)
        super().close()

    def on_transition(self, transition: Transition) -> None:
        self._witness.phases.append(transition.new)

    def on_request_started(self, reply: Reply) -> None:
        self._witness.note_start(reply)

    def on_request_finished(self, reply: Reply, outcome: Outcome) -> None:
        self._witness.note_end(reply, outcome)


class Witness:
    """Takes notes, and says what is wrong.

    Attributes:
      asked: The requests that were accepted, by their numbers.
      calls: The verbs that were called.
      faults: The errors of the model's side that may be seen from now on.
      fault_types: The same, where only their type is known.
      reaction: Seconds that the model's side takes to obey a cancel.
      phases: The phases that were told, in order.
      watched: Those that a watcher was told.
      closing: Whether the end of the provider has begun.
      wrong: What was seen that must not be.
    """

    def __init__(self) -> None:
        self.asked: dict[int, Asked] = {}
        self.calls: list[Call] = []
        self.faults: list[Exception] = []
        self.fault_types: set[type[Exception]] = set()
        self.reaction = 0.0
        self.phases: list[Phase] = []
        self.watched: list[Phase] = []
        self.closing = False
        self.wrong: list[str] = []
        self.provider: LocalProvider
        self.actor: WitnessedActor
        self._order = itertools.count(1)
        self._superseding: Hashable = None  # the key of what is being submitted
        self._generations_at_close: int | None = None
        self._living = False
        self._loaded = False
        self._lost = 0  # when the last model was lost, in the order of all that was asked
        self.lives = 0

    def make_actor(self, config: ModelConfig, backend: Backend) -> LifecycleActor:
        """Make the actor that tells this witness; an `ActorFactory`."""
        self.actor = WitnessedActor(self, config, backend)
        return self.actor

    @contextmanager
    def life(self, publish: Publish) -> Iterator[Publish]:
        """Take note of one life of a model, which begins with this block, and ends with it or
        with the last word that is published in there."""

        def listen(event: SessionEvent) -> None:
            match event:
                case Opened():
                    self._loaded = True
                case Ended():
                    self._lose()
                case _:
                    pass
            publish(event)

        if self._living:
            self.wrong.append("two models at once")
        self._living = True
        self.lives += 1
        number = self.lives
        try:
            yield listen
        finally:
            if number == self.lives:
                self._lose()

    def _lose(self) -> None:
        self._living = False
        if self._loaded:
            self._loaded = False
            self._lost = next(self._order)

    def note_close(self, generations: int) -> None:
        self.closing = True
        if self._generations_at_close is None:
            self._generations_at_close = generations

    @property
    def _breaks(self) -> float:
        """How many models have been lost; not a number while one is being lost."""
        counters, generation = self.provider.diagnostics().counters, self.actor.generation
        whole = generation is None or (generation.end is None and generation.fault is None)
        return counters.crashes + counters.failed_loads if whole else math.nan

    # -- verbs ---------------------------------------------------------------------------------

    def begin(
        self,
        nursery: trio.Nursery,
        name: VerbName,
        verb: Callable[[], Awaitable[object]],
        *,
        timeout: float = math.inf,
    ) -> Call:
        """Call a verb in a task of its own."""
        call = Call(name, timeout=timeout)
        self.calls.append(call)
        nursery.start_soon(self._perform, call, verb)
        return call

    async def _perform(self, call: Call, verb: Callable[[], Awaitable[object]]) -> None:
        call.began, call.at = next(self._order), trio.current_time()
        try:
            with call.scope:
                await verb()
                call.state, call.breaks = "done", self._breaks
                call.ended = next(self._order)
        except LlamatrioError as exc:
            call.state, call.error = "failed", exc
            call.ended = next(self._order)
            if not self._may_fail(call, exc):
                self.wrong.append(f"{call.name} failed: {exc!r}")
        else:
            if call.state == "waiting":
                call.state = "abandoned"
            elif call.name in ("stop", "drain"):
                self._look_at_stop(call)
            elif call.name == "start" and not self._loaded and call.began > self._lost:
                self.wrong.append(f"start returned, and there is no model: {call}")

    def _look_at_stop(self, stop: Call) -> None:
        """A stop that returns has ended all that was accepted before it."""
        left = [a for a in self.asked.values() if a.began < stop.began and not a.reply.outcome]
        if left:
            self.wrong.append(f"{stop.name} returned, and these have no outcome: {left}")
        if self._stopped_for_good(stop) and not self.closing:
            seen = self.provider.diagnostics()
            if seen.running or seen.pending or seen.started:
                self.wrong.append(f"{stop.name} returned, and there is {seen}")

    def _may_fail(self, call: Call, error: LlamatrioError) -> bool:
        match error:
            case ProviderClosed():
                return self.closing
            case StartInterrupted():
                return call.name == "start" and self._stopped_since(call.began)
            case WrongPhase():
                return call.name in ("unload", "configure") and self._ever_called("start")
            case _:
                return call.name == "start" and self.is_fault(error)

    def is_fault(self, error: BaseException) -> bool:
        """Whether this is an error of the model's side, or the copy of one."""
        known = any(is_like(error, one) for one in self.faults)
        return known or type(error) in self.fault_types

    def _ever_called(self, name: VerbName) -> bool:
        return any(call.name == name for call in self.calls)

    def _stopped_since(self, order: float) -> bool:
        stops = ("stop", "drain", "unload")
        return any(call.began > order for call in self.calls if call.name in stops)

    def _stopped_for_good(self, stop: Call) -> bool:
        """Whether no start was called after this stop, as yet."""
        return not any(c.began > stop.began for c in self.calls if c.name == "start")

    # -- requests ------------------------------------------------------------------------------

    def submit(
        self, request: Request, text: str | None = None, refusal: Exception | None = None
    ) -> Asked | None:
        """Submit a request; return None if it is refused."""
        self._superseding = request.supersede
        try:
            reply = self.provider.submit(request)
        except LlamatrioError as exc:
            if not self._may_refuse(exc):
                self.wrong.append(f"submit refused: {exc!r}, {self.provider!r}")
            return None
        finally:
            self._superseding = None
        if self.must_refuse:
            self.wrong.append(f"accepted while stopped: {reply!r}, {self.provider!r}")
        asked = Asked(reply, next(self._order), trio.current_time(), text, refusal)
        self._supersede(asked)
        self.asked[reply.id] = asked
        return asked

    def _supersede(self, newer: Asked) -> None:
        key = newer.reply.request.supersede
        for older in self.live if key is not None else ():
            if older.reply.request.supersede == key:
                older.given_up.add("superseded")
                if older.reply not in self.actor.running:
                    self.wrong.append(f"superseded, and it still waits: {older}")

    def _may_refuse(self, error: LlamatrioError) -> bool:
        match error:
            case ProviderClosed():
                return self.closing
            case NotStarted():
                return not self.must_accept
            case QueueFull():
                bound = self.provider.policy.max_pending
                return bound is not None and self.provider.diagnostics().pending >= bound
            case _:
                return False

    @property
    def must_refuse(self) -> bool:
        """Whether nobody has called start since the last stop that has returned."""
        stops = [c.began for c in self.calls if c.name in ("stop", "drain") and c.state == "done"]
        last = max(stops, default=0)
        return self.closing or not any(c.began > last for c in self.calls if c.name == "start")

    @property
    def must_accept(self) -> bool:
        """Whether start has returned, and nobody has stopped since, and nothing broke."""
        done = [c for c in self.calls if c.name == "start" and c.state == "done"]
        if not done or self.closing:
            return False
        last = max(done, key=lambda call: call.began)
        unbroken = last.breaks == self._breaks  # which is false if either is not a number
        return unbroken and not self._stopped_since(last.began)

    @property
    def live(self) -> list[Asked]:
        """The requests that have no outcome yet."""
        return [asked for asked in self.asked.values() if asked.reply.outcome is None]

    @property
    def waiting(self) -> list[Asked]:
        """Those of them that have no slot."""
        running = self.actor.running
        return [asked for asked in self.live if asked.reply not in running]

    def give_up(self, asked: Asked) -> None:
        """Cancel a request as its caller."""
        if asked.reply.outcome is None:
            asked.given_up.add("caller")
        asked.reply.cancel()

    async def cancel(self, id: int) -> None:
        """Cancel a request by its number, and wait for its outcome."""
        asked = self.asked.get(id)
        live = asked is not None and asked.reply.outcome is None
        if live:
            assert asked is not None
            asked.given_up.add("caller")
        outcome = await self.provider.cancel(id)
        if outcome is not (asked.reply.outcome if live and asked else None):
            self.wrong.append(f"cancel({id}) returned {outcome}")

    async def cancel_current(self) -> None:
        """Cancel what runs now, and wait for the outcomes."""
        replies = self.actor.running
        for reply in replies:
            self.asked[reply.id].given_up.add("caller")
        outcomes = await self.provider.cancel_current()
        if outcomes != tuple(reply.outcome for reply in replies):
            self.wrong.append(f"cancel_current returned {outcomes}")

    # -- what the hooks tell -------------------------------------------------------------------

    def note_start(self, reply: Reply) -> None:
        asked = self.asked[reply.id]
        ahead = [other for other in self.waiting if other.rank < asked.rank]
        asked.starts += 1
        asked.slot_at = trio.current_time()
        for problem, there in {
            "it has its outcome": reply.outcome is not None,
            "it was given up": bool(asked.given_up),
            "more run than there are slots": len(self.actor.running) > self.provider.config.slots,
            f"these come before it: {ahead}": bool(ahead),
            "no model is loaded": self.provider.phase is not Phase.STARTED,
            "the model that had it died": asked.starts > 1 and not self._may_run_again(reply),
            "the provider is closing": self.closing,
        }.items():
            if there:
                self.wrong.append(f"{asked} got a slot, but {problem}")

    def _may_run_again(self, reply: Reply) -> bool:
        return bool(self.faults or self.fault_types) and (
            reply.request.on_crash == "resume" or not reply.tokens
        )

    def note_end(self, reply: Reply, outcome: Outcome) -> None:
        asked = self.asked.get(reply.id)
        if asked is None:
            self.wrong.append(f"nobody asked for {reply!r}")
            return
        asked.told += 1
        if asked.told > 1 or outcome is not reply.outcome:
            self.wrong.append(f"told anew: {asked} {outcome}")
        if not self._explains(asked, outcome):
            self.wrong.append(f"there is no reason for this: {asked} {outcome}")

    def _explains(self, asked: Asked, outcome: Outcome) -> bool:
        match outcome:
            case Finished():
                whole = asked.text is None or asked.reply.text == asked.text
                return whole and asked.starts > 0 and asked.refusal is None
            case Failed(error=error):
                return is_like(error, asked.refusal) or self.is_fault(error)
            case Cancelled(by="shutdown"):
                return self.closing
            case Cancelled(by="stop"):
                return self._was_stopped(asked)
            case Cancelled(by="deadline"):
                return self._was_late(asked, outcome)
            case Cancelled(by=by):
                return by in asked.given_up or (by == "superseded" and self._is_superseded(asked))

    def _is_superseded(self, asked: Asked) -> bool:
        """One that waits is told so within the `submit` of the newer one."""
        key = asked.reply.request.supersede
        return key is not None and key == self._superseding

    def _was_stopped(self, asked: Asked) -> bool:
        """Whether a stop was on its way when it was accepted, or came later."""
        now = trio.current_time()
        return any(
            call.ended > asked.began and (call.name != "drain" or call.at + call.timeout <= now)
            for call in self.calls
            if call.name in ("stop", "unload", "drain")
        )

    def _was_late(self, asked: Asked, outcome: Cancelled) -> bool:
        limits, now = asked.reply.request.limits, trio.current_time()
        match outcome.limit:
            case "total":
                return limits.total is not None and now >= asked.at + limits.total
            case "queue":
                waited = limits.queue is not None and now >= asked.at + limits.queue
                return waited and not asked.starts and outcome.phase in ("queued", "loading")
            case "first_token":
                late = limits.first_token is not None and now >= asked.slot_at + limits.first_token
                return late and outcome.phase == "prompt"
            case "silence":
                return limits.silence is not None and outcome.phase == "generating"
            case None:
                return False

    async def watch(self) -> None:
        """Write down which phases a watcher is told."""
        async for status in self.provider.watch():
            self.watched.append(status.phase)

    # -- what must always be -------------------------------------------------------------------

    def check(self) -> None:
        """Look at what must be true at any time."""
        assert not self.wrong, self.wrong
        for asked in self.asked.values():
            self._check_outcome(asked)
        self._check_counters()
        seen = self.provider.diagnostics()
        assert seen.running <= self.provider.config.slots
        assert not seen.running or seen.phase in (Phase.STARTED, Phase.STOPPING), seen
        assert seen.pending + seen.running == len(self.live), seen
        assert seen.phase not in (Phase.RESIDENT, Phase.UNLOADED) or not self.live, seen
        assert not (self.must_refuse and seen.started), seen
        assert not self.must_accept or seen.started, (seen, self.calls)
        if self._generations_at_close is not None:
            assert seen.counters.generations == self._generations_at_close, "spawned after close"

    def _check_outcome(self, asked: Asked) -> None:
        reply, outcome = asked.reply, asked.reply.outcome
        if asked.outcome is None:
            asked.outcome = outcome
        assert outcome is asked.outcome, f"another outcome: {asked}"
        assert asked.told == (outcome is not None), asked
        if asked.text is not None:
            assert asked.text.startswith(reply.text), asked
        if isinstance(outcome, Finished):
            assert reply.text == asked.text or asked.text is None, asked
        elif outcome is not None:
            assert outcome.tokens == reply.tokens, asked

    def _check_counters(self) -> None:
        counters = self.provider.diagnostics().counters
        outcomes = [asked.reply.outcome for asked in self.asked.values()]
        cancelled = [one for one in outcomes if isinstance(one, Cancelled)]
        assert counters.accepted == len(outcomes)
        assert counters.finished == sum(isinstance(one, Finished) for one in outcomes)
        assert counters.failed == sum(isinstance(one, Failed) for one in outcomes)
        assert counters.cancelled == len(cancelled)
        assert counters.superseded == sum(one.by == "superseded" for one in cancelled)
        assert counters.expired == sum(one.by == "deadline" for one in cancelled)
        assert counters.resumed == sum(one is not None and one.resumed > 0 for one in outcomes)
        assert counters.hook_errors == 0
        assert counters.stale == 0
        assert counters.restarts <= max(counters.generations - 1, 0)
        assert counters.loads + counters.failed_loads <= counters.generations
        assert counters.unloads + counters.crashes <= counters.loads
        assert self.lives <= counters.generations

    def check_settled(self) -> None:
        """Look at what must be true when nothing can go on by itself before some time passes."""
        self.check()
        seen = self.provider.diagnostics()
        generation = self.actor.generation
        dead = generation is not None and generation.end is not None
        for asked in self.live:
            obeying = self.reaction and asked.reply in self.actor.running
            assert obeying or not asked.given_up, f"given up, and it goes on: {asked}"
            self._check_patience(asked, dead=dead)
        for stop in [c for c in self.calls if c.name == "stop" and c.state == "done"]:
            late = [c for c in self.calls if c.name == "start" and c.began < stop.began]
            assert all(c.state != "waiting" for c in late), f"{late} before {stop}"
        if seen.phase is Phase.STARTED and not dead:
            assert seen.running == min(self.provider.config.slots, len(self.live)), seen
        assert seen.phase is not Phase.STOPPING or seen.running or self.closing, seen
        assert seen.phase is not Phase.UNLOADED or not self._living, seen

    def _check_patience(self, asked: Asked, *, dead: bool) -> None:
        limits, now = asked.reply.request.limits, trio.current_time() - self.reaction
        if limits.total is not None:
            assert now <= asked.at + limits.total, f"later than its limit: {asked}"
        if limits.queue is not None and not asked.starts:
            assert now <= asked.at + limits.queue, f"later than its limit: {asked}"
        if limits.first_token is not None and asked.reply.phase == "prompt" and not dead:
            assert now <= asked.slot_at + limits.first_token, f"later than its limit: {asked}"

    def check_over(self) -> None:
        """Look at what must be true when the provider's block has been left."""
        self.check_settled()
        seen = self.provider.diagnostics()
        assert not self.live
        assert (seen.phase, seen.pending, seen.running) == (Phase.UNLOADED, 0, 0)
        assert all(call.state != "waiting" for call in self.calls), self.calls
        assert not self._living
        told = changes([Phase.UNLOADED, *self.phases, Phase.UNLOADED])
        assert changes(self.watched) == told, (self.watched, told)
        assert seen.counters.loads == (seen.counters.unloads + seen.counters.crashes), seen.counters

    # -- rest ----------------------------------------------------------------------------------

    async def come_to_rest(self, seconds: float) -> None:
        """Stop and unload, which must not take longer; every verb has its answer then."""
        stop, unload = Call("stop"), Call("unload")
        self.calls += [stop, unload]
        with trio.fail_after(seconds):
            await self._perform(stop, self.provider.stop)
            await self._perform(unload, self.provider.unload_model)
        assert self.provider.phase is Phase.UNLOADED, self.provider
        assert not self._living
        assert not self.live


def is_like(error: BaseException, other: BaseException | None) -> bool:
    """Whether two errors say the same."""
    return type(error) is type(other) and error.args == getattr(other, "args", None)


def changes(phases: Iterable[Phase]) -> list[Phase]:
    """Leave out what repeats itself."""
    return [phase for phase, _ in itertools.groupby(phases)]


POLICIES: Final = {
    "default": Policy(),
    "no restarts": Policy(fruitless=0),
    "persistent": Policy(fruitless=math.inf, deaths=math.inf, backoff=0.0),
    "few and slow": Policy(max_pending=2, backoff=5.0),
    "raising": Policy(on_give_up="raise", fruitless=2),
}
"""What becomes of a model that dies, in several ways."""
