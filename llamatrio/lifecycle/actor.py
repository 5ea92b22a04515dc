"""The lifecycle actor: one task that owns the model's session and the request queue.

It takes events from its inbox, one after another: what callers want, what a generation says, and
that there is work. It never sees a line of the log. What an event means is looked up in the table
of `llamatrio.lifecycle.phases`; the commands found there are performed at once. Whatever takes
time is a task of its own, which reports back through the inbox: a keeper for each generation, and
a task for each running request.

The nurseries are nested so that every way out has the same order: the running requests end first,
which closes their connections; then the child, which would not obey its exit line before that.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from typing import Final, TypeAlias

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.config import ModelConfig
from llamatrio.errors import (
    ClosedError,
    LlamatrioError,
    NotStarted,
    ProviderBroken,
    ProviderClosed,
    StartInterrupted,
    StateFlood,
    Unkillable,
)
from llamatrio.lifecycle import phases
from llamatrio.lifecycle.diagnostics import Counters, Diagnostics, Residency, Status
from llamatrio.lifecycle.inbox import Inbox
from llamatrio.lifecycle.keeper import Generation, keep
from llamatrio.lifecycle.phases import Answer, Command, Event, Phase, Transition
from llamatrio.lifecycle.queue import RequestQueue
from llamatrio.lifecycle.reply import Reply
from llamatrio.lifecycle.verbs import Verb, Verbs
from llamatrio.lifecycle.work import VERDICT, Work
from llamatrio.outcomes import By, Cancelled, Failed, Outcome, Phase as RequestPhase
from llamatrio.requests import Request
from llamatrio.session.base import (
    Asleep,
    Awake,
    Backend,
    Ended,
    LoadProgress,
    Opened,
    SessionEvent,
)

MAX_UNREAD: Final = 10_000
"""Transitions that a child may pile up before it is taken for broken."""

_logger: Final = logging.getLogger("llamatrio.lifecycle")


@attrs.frozen
class _Told:
    """The present generation said something."""

    event: SessionEvent


@attrs.frozen
class _Rang:
    """There is a request to run, or a slot to run one."""


_Item: TypeAlias = Verb | _Told | _Rang
_OBSERVERS: Final = ("on_transition", "on_request_started", "on_request_finished")


class LifecycleActor:
    """Owns one model, its queue and its lifecycle.

    Extend it by a subclass, and hand that to `open_provider(..., actor=MyActor)`. The methods
    whose names begin with `on_` are there to be overridden. They are told after the fact, run on
    the Trio thread in whatever task brought it about, and must neither wait nor be `async`. An
    exception of theirs is logged and counted, and changes nothing; but what is no `Exception`, such
    as SystemExit, ends the provider and comes out of its block.

    Args:
      config: The model.
      backend: What runs it.

    Attributes:
      config: The present configuration.
      backend: What runs the model.
      body: The scope of whoever uses this actor. It is cancelled if the actor breaks.
      phase: Where the lifecycle stands.
      failure: Why the last generation ended, if it was not asked to; None while all is well.
      counters: What was counted so far.

    Raises:
      SpecificationError: if the backend cannot honour the configuration.
      TypeError: if a hook is `async`.
    """

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        for name in _OBSERVERS:
            if inspect.iscoroutinefunction(getattr(self, name)):
                raise TypeError(f"{type(self).__name__}.{name} is async and would never run")
        backend.check(config)
        self.config = config
        self.phase = Phase.UNLOADED
        self.failure: LlamatrioError | None = None
        self.counters = Counters()
        self.backend = backend
        self.body = trio.CancelScope()
        self._inbox: Inbox[_Item] = Inbox()
        self._rung = False
        self._queue: RequestQueue[Reply] = RequestQueue()
        self._next_id = 1
        self._live: dict[int, Reply] = {}
        self._work = Work(self._on_work_finished)
        self._verbs = Verbs()
        self._generation: Generation | None = None
        self._held_end: Ended | None = None
        self._last_end: Ended | None = None
        self._load_seconds: float | None = None
        self._told: Status | None = None
        self._watchers: weakref.WeakSet[Inbox[Status]] = weakref.WeakSet()
        self._broken: BaseException | None = None
        self._closed = False
        self._keepers: trio.Nursery
        self._runners: trio.Nursery

    def __repr__(self) -> str:
        work = f"{len(self._queue)} pending, {len(self._work)} running"
        return f"<{type(self).__name__} {self.phase.name} pid={self.backend.pid} {work}>"

    # -- hooks ---------------------------------------------------------------------------------

    def on_transition(self, transition: Transition) -> None:
        """Learn that the phase has changed. What follows from it has not been done yet.

        The end of the provider's block is told to nobody.
        """

    def on_request_started(self, reply: Reply) -> None:
        """Learn that a request has got a slot."""

    def on_request_finished(self, reply: Reply, outcome: Outcome) -> None:
        """Learn how a request ended. `reply.outcome` is set, and its caller is told already."""

    # -- what callers may do, on the Trio thread ---------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether requests are accepted."""
        return self._queue.is_open

    @property
    def generation(self) -> Generation | None:
        """The present or last life of the model; None before the first."""
        return self._generation

    @property
    def running(self) -> tuple[Reply, ...]:
        """The requests that have a slot."""
        return self._work.replies

    def submit(self, request: Request) -> Reply:
        """Accept a request; see `llamatrio.provider.Provider.submit`."""
        if self._closed:
            raise ProviderClosed("the provider is closed")
        reply = Reply(self._next_id, request, self._waiting_phase, self._on_reply_cancelled)
        if not self.started:
            lost = f"; the model was lost: {self.failure}" if self.failure else ""
            raise NotStarted(f"the provider is not started: call start() first{lost}")
        self._queue.push(reply.id, reply)
        self._next_id += 1
        self.counters.accepted += 1
        self._live[reply.id] = reply
        self._ring()
        return reply

    def find(self, id: int) -> Reply | None:
        """Return an accepted request that has no outcome yet."""
        return self._live.get(id)

    async def perform(self, verb: Verb) -> None:
        """Have a verb performed and wait for its answer.

        Cancellation: abandons the wait. A START or RECONFIGURE that had no effect yet will have
        none; a STOP or UNLOAD goes on.
        """
        if self._closed:
            raise ProviderClosed("the provider is closed")
        if verb.event in (Event.START, Event.RECONFIGURE):
            await trio.lowlevel.checkpoint_if_cancelled()
        self._inbox.put(verb)
        await verb.wait()

    def watch(self) -> Inbox[Status]:
        """Return an inbox that gets the present status, and every one that follows."""
        watcher: Inbox[Status] = Inbox()
        watcher.put(self.status())
        if self._closed:
            watcher.close()
        self._watchers.add(watcher)
        return watcher

    def status(self) -> Status:
        """Return the present status."""
        generation = self._generation
        if generation is None:
            return Status(self.phase, self.residency, None, 0)
        return Status(self.phase, self.residency, generation.progress, generation.number)

    def diagnostics(self) -> Diagnostics:
        """Take a snapshot."""
        generation = self._generation
        return Diagnostics(
            phase=self.phase,
            started=self.started,
            residency=self.residency,
            generation=generation.number if generation else 0,
            pid=self.backend.pid,
            pending=len(self._queue),
            running=len(self._work),
            counters=attrs.evolve(self.counters),
            pipes=self.backend.tally,
            dropped_log_lines=self.backend.dropped_log_lines,
            load_seconds=self._load_seconds,
            last_exit=self._last_end.exit if self._last_end else None,
        )

    @property
    def residency(self) -> Residency:
        """Whether the model is "unloaded", "loading", "resident" or "asleep"."""
        match self.phase:
            case Phase.UNLOADED:
                return "unloaded"
            case Phase.LOADING:
                return "loading"
            case _:
                asleep = self._generation is not None and self._generation.asleep
                return "asleep" if asleep else "resident"

    def close(self) -> None:
        """End everything: running requests, then the child. The task that runs `run` then ends."""
        self._closed = True
        self._queue.close()
        self._inbox.close()

    # -- the task ------------------------------------------------------------------------------

    @enable_ki_protection
    async def run(self) -> None:
        """Be the actor, until `close`.

        Cancellation: has no effect; nothing but `close` ends it, and nothing is left when it
        returns. That takes as long as the child needs, and no longer than every rung of its stop
        ladder has time.

        Raises:
          ProviderBroken: if the actor broke; all that it owned was ended in order all the same.
        """
        with trio.CancelScope(shield=True):
            try:
                async with trio.open_nursery() as self._keepers:
                    async with trio.open_nursery() as self._runners:
                        await self._take_items()
                    if self._generation is not None:
                        self._generation.scope.cancel()
            except BaseException as exc:  # noqa: ASYNC103, BLE001 - raised below; of a task of ours
                self._break(first_of(exc))
            self._finish()
        if isinstance(self._broken, Exception):
            raise self._brokenness() from self._broken
        if self._broken is not None:
            raise self._broken

    async def _take_items(self) -> None:
        try:
            while items := await self._inbox.take():
                for item in items:
                    self._take_safely(item)
        except BaseException:  # a task of ours broke, and cancelled us
            self._end_requests(ProviderBroken("a task of the provider broke"))
            raise
        self._end_requests(self._brokenness() if self._broken else None)

    def _take_safely(self, item: _Item) -> None:
        """Take one item; after `close`, or after a defect, only keep verbs to be answered."""
        try:
            if not self._closed:
                self._take_item(item)
            elif isinstance(item, Verb):
                self._verbs.postpone(item)
        except Exception as exc:  # noqa: BLE001 - raised by `run`, when all is in order
            if isinstance(item, Verb):
                self._verbs.postpone(item)
            self._break(exc)

    def _break(self, error: BaseException) -> None:
        """End everything for an error, which `run` raises when all is in order."""
        self._broken = error if self._broken is None else self._broken
        self.body.cancel()  # before anybody who waits in there is answered
        self.close()

    def _brokenness(self) -> ProviderBroken:
        error = ProviderBroken(f"the actor broke: {self._broken!r}")
        error.__cause__ = self._broken
        return error

    def _take_item(self, item: _Item) -> None:
        match item:
            case Verb():
                self._take_verb(item)
            case _Told():
                self._take_told(item)
            case _Rang():
                self._rung = False
                self._dispatch()
        if not self._work:
            self._on_idle()

    def _take_verb(self, verb: Verb) -> None:
        if verb.withdrawn:
            return
        no_change = verb.event is Event.RECONFIGURE and verb.config == self.config
        if no_change and not self._verbs.is_postponed(Event.RECONFIGURE):
            verb.answer()
        else:
            self._take(verb.event, verb)

    def _take_told(self, told: _Told) -> None:
        match told.event:
            case Opened() | Awake():
                self._take(Event.READY)
                self._notify()
            case Ended():
                self._held_end = told.event
                self._work.fail_all(told.event.error or _gone(), after=VERDICT)
            case LoadProgress():
                self._notify(progress=True)
            case Asleep():
                self._notify()

    def _on_idle(self) -> None:
        """Deliver what must wait until no request is running."""
        if self.phase is Phase.STOPPING:
            self._take(Event.IDLE)
        if self._held_end is not None:
            end, self._held_end = self._held_end, None
            self.failure = end.error
            if isinstance(end.error, Unkillable):
                for event in (Event.START, Event.UNLOAD, Event.RECONFIGURE):
                    self._verbs.fail(event, end.error)
            self._take(Event.GONE)

    def _take(self, event: Event, verb: Verb | None = None) -> None:
        """Take one step, and then those of postponed verbs that it makes possible."""
        changed = self._step(event, verb)
        while changed:
            changed = False
            postponed = self._verbs.take_postponed()
            try:
                while postponed:
                    next_one = postponed.pop(0)
                    changed |= self._step(next_one.event, next_one)
            finally:  # none are left, unless a step broke
                for left in postponed:
                    self._verbs.postpone(left)

    def _step(self, event: Event, verb: Verb | None) -> bool:
        """Look one step up in the table and do it; say whether the phase has changed."""
        if verb is not None and event is Event.START and self._held_end is not None:
            self._verbs.postpone(verb)  # the model is known to be dead; its GONE comes first
            return False
        old, step = self.phase, phases.step(self.phase, event)
        waiting_phase = self._waiting_phase()
        self.phase = step.phase
        if verb is not None:
            self._verbs.note(verb, step.answer, old)
        changed = step.phase is not old
        if changed:
            number = self._generation.number if self._generation else 0
            self._observe("on_transition", Transition(old, event, step.phase, number))
        for command in step.commands:
            self._perform(command, verb, waiting_phase)
        if verb is not None and step.answer is Answer.WAIT:
            verb.on_effect()
        if changed:
            self._notify()
        self._verbs.answer_reached(self.phase)
        return changed

    # -- commands ------------------------------------------------------------------------------

    def _perform(self, command: Command, verb: Verb | None, waiting_phase: RequestPhase) -> None:
        match command:
            case Command.OPEN:
                self._queue.is_open = not self._closed
            case Command.SPAWN:
                self._spawn()
            case Command.DISPATCH:
                self._dispatch()
            case Command.CANCEL:
                self._cancel_running("stop")
            case Command.CLOSE:
                self._queue.close()
            case Command.DROP:
                self._drop(Cancelled("stop", waiting_phase))
            case Command.FAIL:
                self._fail(waiting_phase)
            case Command.INTERRUPT:
                self._verbs.fail(Event.START, StartInterrupted("a later stop gave the start up"))
            case Command.END:
                assert self._generation is not None
                self._generation.scope.cancel()
            case Command.ADOPT:
                assert verb is not None
                assert verb.config is not None
                self.config = verb.config

    def _spawn(self) -> None:
        self.failure = None
        self.counters.generations += 1
        self._generation = Generation(self.counters.generations, self.config, self.backend)
        self._keepers.start_soon(keep, self._generation, self._on_told)

    def _dispatch(self) -> None:
        generation = self._generation
        if self.phase is not Phase.STARTED or generation is None:
            return
        loaded = generation.session is not None
        while loaded and self._queue and len(self._work) < self.config.slots:
            reply = self._queue.pop()
            self._work.start(self._runners, reply, generation)
            self._observe("on_request_started", reply)

    def _cancel_running(self, by: By) -> None:
        for reply in self._work.replies:
            self._work.cancel(reply.id, by)

    def _drop(self, outcome: Outcome) -> None:
        for reply in self._queue.clear():
            self._settle(reply, outcome)

    def _fail(self, waiting_phase: RequestPhase) -> None:
        error = self.failure or _gone()
        self._drop(Failed(error, waiting_phase))
        # One that came after the death, and is postponed for it, wants another model.
        self._verbs.fail(Event.START, error, postponed=False)

    # -- what other tasks report ---------------------------------------------------------------

    def _on_told(self, generation: Generation, event: SessionEvent) -> None:
        """Take a word of a generation, in its keeper's task."""
        match event:
            case Opened():
                self.counters.loads += 1
                self._load_seconds = trio.current_time() - generation.began
            case Ended():
                self.counters.count_end(event, generation.opened is not None)
                self._last_end = event
            case _ if self._inbox.unread > MAX_UNREAD:
                generation.session = None  # nothing more is sent to it while it is ended
                raise StateFlood(f"more than {MAX_UNREAD} records that nobody could take yet")
        self._inbox.put(_Told(event), progress=isinstance(event, LoadProgress))

    def _on_work_finished(self, reply: Reply, outcome: Outcome) -> None:
        try:
            self._settle(reply, outcome)
        except Exception as exc:  # noqa: BLE001 - raised by `run`, when all is in order
            self._break(exc)
        self._ring()

    def _on_reply_cancelled(self, reply: Reply) -> None:
        if self._queue.remove(reply.id):
            self._settle(reply, Cancelled("caller", self._waiting_phase()))
        else:
            self._work.cancel(reply.id, "caller")

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            self._inbox.put(_Rang())

    # -- ends ----------------------------------------------------------------------------------

    def _settle(self, reply: Reply, outcome: Outcome) -> None:
        """Give a request its outcome: the caller first, then the hook."""
        reply.settle(outcome)
        del self._live[reply.id]
        self.counters.count_outcome(outcome)
        self._observe("on_request_finished", reply, outcome)

    def _end_requests(self, error: Exception | None) -> None:
        """Give every request its end, after `close` or for an error."""
        if error is None:
            self._drop(Cancelled("shutdown", self._waiting_phase()))
            self._cancel_running("shutdown")
        else:
            self._queue.close()
            self._drop(Failed(error, self._waiting_phase()))
            self._work.fail_all(error)

    def _finish(self) -> None:
        """Answer everybody who still waits, when nothing is left."""
        for item in self._inbox.drain():  # nothing, unless a task of ours broke
            if isinstance(item, Verb):
                self._verbs.postpone(item)
        self._queue.clear()
        for reply in self._live.values():  # none, unless we broke in the midst of giving an outcome
            if reply.outcome is None:
                outcome = Failed(self._brokenness(), self._waiting_phase())
                reply.settle(outcome)
                self.counters.count_outcome(outcome)
        self._live.clear()
        self.phase = Phase.UNLOADED
        self._verbs.finish()
        self._notify()
        for watcher in self._watchers:
            watcher.close()

    def _waiting_phase(self) -> RequestPhase:
        return "loading" if self.phase is Phase.LOADING else "queued"

    def _notify(self, *, progress: bool = False) -> None:
        status = self.status()
        if status != self._told:
            self._told = status
            for watcher in self._watchers:
                watcher.put(status, progress=progress)

    def _observe(self, hook: str, *args: object) -> None:
        try:
            getattr(self, hook)(*args)
        except Exception:
            self.counters.hook_errors += 1
            _logger.exception("%s.%s raised", type(self).__name__, hook)
        except BaseException as exc:  # noqa: ASYNC103, BLE001 - `run` raises it; SystemExit, say
            self._break(exc)


def _gone() -> LlamatrioError:
    return ClosedError("the model was unloaded")


def first_of(error: BaseException) -> BaseException:
    """Take one exception out of the groups that nurseries of ours made of it.

    What is no cancel comes first. Two Ctrl-C can make two; the first is as good as both.
    """
    while isinstance(error, BaseExceptionGroup):
        others = [one for one in error.exceptions if not isinstance(one, trio.Cancelled)]
        error = (others or error.exceptions)[0]
    return error
