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

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, ParamSpec, TypeAlias, TypeVar

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.child.logs import LogWatch
from llamatrio.config import ModelConfig
from llamatrio.errors import (
    ChildSilent,
    ClosedError,
    LlamatrioError,
    LoadStalled,
    ModelChanged,
    NotStarted,
    ProviderBroken,
    ProviderClosed,
    SpecificationError,
    StartInterrupted,
    StateFlood,
    Unkillable,
    VerbInHook,
    WrongProcess,
    WrongThread,
)
from llamatrio.lifecycle import phases
from llamatrio.lifecycle.desk import Desk
from llamatrio.lifecycle.diagnostics import Counters, Diagnostics, Residency, Status, Watchers
from llamatrio.lifecycle.drains import Drains
from llamatrio.lifecycle.hooks import Hooks
from llamatrio.lifecycle.inbox import Inbox
from llamatrio.lifecycle.keeper import Generation, GivenUp, Patience, give_up, keep, watch
from llamatrio.lifecycle.phases import Answer, Command, Event, Phase, Transition
from llamatrio.lifecycle.policy import REMEMBERED, Life, Policy
from llamatrio.lifecycle.recorder import Draft, Recorder
from llamatrio.lifecycle.reply import Reply
from llamatrio.lifecycle.verbs import Verb, Verbs
from llamatrio.lifecycle.work import VERDICT, Work
from llamatrio.outcomes import By, Failed, Finished, Outcome, Phase as RequestPhase
from llamatrio.requests import Request
from llamatrio.session.base import (
    Asleep,
    Awake,
    Backend,
    Ended,
    LoadProgress,
    Opened,
    SessionEvent,
    Unexpected,
)

MAX_UNREAD: Final = 10_000
"""Transitions that a child may pile up before it is taken for broken."""

_logger: Final = logging.getLogger("llamatrio.lifecycle")
_P = ParamSpec("_P")
_T = TypeVar("_T")


@attrs.frozen
class _Told:
    """The present generation said something, or something was said of it."""

    event: SessionEvent | GivenUp


@attrs.frozen
class _Rang:
    """There is a request to run, or a slot to run one, or nothing runs any more."""


_Item: TypeAlias = Verb | _Told | _Rang


class LifecycleActor(Hooks):
    """Owns one model, its queue and its lifecycle.

    Extend it by a subclass that overrides some of the methods of `Hooks`, and hand that to
    `open_provider(..., actor=MyActor)`.

    Args:
      config: The model.
      backend: What runs it.

    Attributes:
      config: The present configuration.
      backend: What runs the model.
      policy: The present limits, and what becomes of a model that dies.
      body: The scope of whoever uses this actor. It is cancelled if the actor breaks.
      phase: Where the lifecycle stands.
      failure: Why the model was lost, if it was not asked to end; None while all is well.
      counters: What was counted so far.
      recorder: Writes down how a model was lost.

    Raises:
      SpecificationError: if the backend cannot honour the configuration.
      TypeError: if a hook is `async`.
    """

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        self.refuse_async()
        backend.check(config)
        self.config = config
        self.policy = Policy()
        self.phase = Phase.UNLOADED
        self.failure: LlamatrioError | None = None
        self.counters = Counters()
        self.recorder = Recorder()
        self.backend = backend
        self.body = trio.CancelScope()
        self._process = os.getpid()
        self._thread = threading.get_ident()
        self._inbox: Inbox[_Item] = Inbox()
        self._rung = False
        self._desk = Desk(self._waiting_phase, self._cancel_running, self._on_settled, self._ring)
        self._work = Work(self._on_work_finished)
        self._verbs = Verbs()
        self._drains = Drains(self._ring)
        self._generation: Generation | None = None
        self._known: ModelConfig | None = None  # the last configuration that was ever loaded
        self._lives: deque[Life] = deque(maxlen=REMEMBERED + 1)
        self._delay = 0.0
        self._held_end: Ended | None = None
        self._last_end: Ended | None = None
        self._load_seconds: float | None = None
        self._progress: LoadProgress | None = None  # of the load, as far as it was taken
        self._watchers = Watchers()
        self._in_hook = False
        self._broken: BaseException | None = None
        self._broken_by_user = False
        self._closing = trio.Event()
        self._finished = trio.Event()
        self._keepers: trio.Nursery
        self._runners: trio.Nursery

    def __repr__(self) -> str:
        work = f"{len(self._desk.queue)} pending, {len(self._work)} running"
        return f"<{type(self).__name__} {self.phase.name} pid={self.backend.pid} {work}>"

    # -- what callers may do, on the Trio thread ---------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether requests are accepted."""
        return self._desk.queue.is_open

    @property
    def generation(self) -> Generation | None:
        """The present or last life of the model; None before the first."""
        return self._generation

    @property
    def running(self) -> tuple[Reply, ...]:
        """The requests that have a slot."""
        return self._work.replies

    def check_caller(self) -> None:
        """Refuse a verb where it cannot work.

        Raises:
          VerbInHook: inside a hook of this actor.
          WrongProcess: in a forked copy of the program.
          WrongThread: outside the Trio thread.
        """
        self._check_place()
        if self._in_hook:
            raise VerbInHook("a hook cannot start, stop or unload: wake a task that does")

    def submit(self, request: Request) -> Reply:
        """Accept a request; see `llamatrio.provider.Provider.submit`."""
        self._check_place()
        if self._closed:
            raise ProviderClosed("the provider is closed")
        if self._drains:
            raise NotStarted("the provider is being stopped: it serves what it had accepted")
        if not self.started:
            lost = f"; the model was lost: {self.failure}" if self.failure else ""
            raise NotStarted(f"the provider is not started: call start() first{lost}")
        reply = self._desk.accept(request, self.policy.max_pending, self._free_slots())
        self.counters.accepted = self._desk.accepted
        self._ring()
        return reply

    def _check_place(self) -> None:
        if os.getpid() != self._process:
            raise WrongProcess("the model belongs to the process that opened the provider")
        if threading.get_ident() != self._thread:
            raise WrongThread("this belongs to the Trio thread: see trio.from_thread")

    def find(self, id: int) -> Reply | None:
        """Return an accepted request that has no outcome yet."""
        return self._desk.find(id)

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

    async def stop(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        """Stop; see `llamatrio.provider.Provider.stop`.

        Cancellation: abandons the wait; the stop goes on.
        """
        number = isinstance(drain_timeout, int | float) and drain_timeout >= 0
        if drain_timeout is not None and not (drain and number):
            raise SpecificationError("drain_timeout is a number of seconds, together with drain")
        await self.perform(Verb(Event.STOP, drain=drain, drain_timeout=drain_timeout))

    def set_policy(self, policy: Policy) -> None:
        """Take a policy, which holds from now on."""
        self.policy = policy
        if self._generation is not None:
            self._generation.look_again()

    def watch(self) -> Inbox[Status]:
        """Return an inbox that gets the present status, and every one that follows."""
        return self._watchers.add(self.status())

    def watch_logs(self, lines: int) -> LogWatch:
        """Return what gets every line of the model's log that follows."""
        watch = self.backend.watch_logs(lines)
        if self._finished.is_set():
            watch.close()
        return watch

    def status(self) -> Status:
        """Return the present status."""
        generation = self._generation
        if generation is None:
            return Status(self.phase, self.residency, None, 0)
        return Status(self.phase, self.residency, self._progress, generation.number)

    def diagnostics(self) -> Diagnostics:
        """Take a snapshot."""
        generation = self._generation
        return Diagnostics(
            phase=self.phase,
            started=self.started,
            residency=self.residency,
            generation=generation.number if generation else 0,
            pid=self.backend.pid,
            pending=len(self._desk.queue),
            running=len(self._work),
            counters=attrs.evolve(self.counters),
            pipes=self.backend.tally,
            dropped_log_lines=self.backend.dropped_log_lines,
            load_seconds=self._load_seconds,
            token_seconds=self._work.pace,
            last_exit=self._last_end.exit if self._last_end else None,
            isolation=self.backend.isolation,
            stdout_reserved=self.backend.stdout_reserved,
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
        """End everything: running requests, then the child. The task that runs `run` then ends.

        In a forked copy of the program this touches nothing that belongs to the original.
        """
        self._closing.set()
        self._desk.queue.close()
        self._inbox.close()

    async def wait_closed(self) -> None:
        """Wait until `close` is called. Cancellation: abandons the wait."""
        await self._closing.wait()

    async def wait_finished(self) -> None:
        """Wait until nothing is left. Cancellation: abandons the wait."""
        await self._finished.wait()

    @property
    def _closed(self) -> bool:
        return self._closing.is_set()

    # -- the task ------------------------------------------------------------------------------

    @enable_ki_protection
    async def run(self) -> None:
        """Be the actor, until `close`.

        Cancellation: has no effect; nothing but `close` ends it, and nothing is left when it
        returns. That takes as long as the child needs, and no longer than every rung of its stop
        ladder has time.

        Raises:
          ProviderBroken: if the actor broke; all that it owned was ended in order all the same.
          Exception: what a decider raised.
          LlamatrioError: why the model was given up, if the policy wants it raised.
        """
        with trio.CancelScope(shield=True):
            try:
                async with trio.open_nursery() as self._keepers:
                    async with trio.open_nursery() as self._runners:
                        timer = trio.CancelScope()
                        self._runners.start_soon(self._watch_deadlines, timer)
                        await self._take_items()
                        timer.cancel()
                    if self._generation is not None:
                        self._generation.scope.cancel()
            except BaseException as exc:  # noqa: ASYNC103, BLE001 - raised below; of a task of ours
                self._break(first_of(exc))
            self._finish()
        if self._broken is None:
            return
        if isinstance(self._broken, Exception) and not self._broken_by_user:
            raise self._brokenness() from self._broken
        raise self._broken

    @enable_ki_protection
    async def _watch_deadlines(self, scope: trio.CancelScope) -> None:
        with scope:
            await self._desk.watch_deadlines()

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
        except BaseException as exc:  # noqa: ASYNC103, BLE001 - raised by `run`, when all is in order
            if isinstance(item, Verb):
                self._verbs.postpone(item)
            self._break(exc)

    def _break(self, error: BaseException, *, by_user: bool = False) -> None:
        """End everything for an error, which `run` raises when all is in order."""
        if self._broken is None:
            self._broken = error
            self._broken_by_user = by_user
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
        if drain := self._drains.due(len(self._desk)):
            self._take(Event.STOP, drain)
        if not self._work:
            self._on_idle()
        self._release_verbs()

    def _release_verbs(self) -> None:
        """Answer those who have what they wanted, once no outcome is outstanding any more."""
        if not self._desk.settling:
            self._verbs.release()

    def _take_verb(self, verb: Verb) -> None:
        if verb.withdrawn:
            return
        no_change = verb.event is Event.RECONFIGURE and verb.config == self.config
        if no_change and not self._verbs.is_postponed(Event.RECONFIGURE):
            self._adopt(verb)
            verb.answer()
        elif verb.drain and (self.started or self._drains):
            self._drain(verb)
        else:
            self._take(verb.event, verb)

    def _take_told(self, told: _Told) -> None:
        match told.event:
            case Opened() | Awake():
                self._progress = self.failure = None
                self._take(Event.READY)
                self._notify()
            case Ended():
                self._progress = None
                self._held_end = told.event
                self._work.fail_all(told.event.error or _gone(), after=VERDICT)
            case GivenUp():
                self._work.fail_all(told.event.error)
            case LoadProgress():
                self._progress = told.event
                self._notify(progress=True)
            case Asleep():
                self._notify()
            case Unexpected():
                self._observe("on_unexpected_output", told.event.data, told.event.count)

    def _on_idle(self) -> None:
        """Deliver what must wait until no request is running."""
        if self.phase is Phase.STOPPING:
            self._take(Event.IDLE)
        if self._generation is not None and self._generation.fault is not None:
            self._generation.scope.cancel()
        if self._held_end is not None:
            end, self._held_end = self._held_end, None
            self._take_end(end)
            if (draft := self.recorder.decide()) is not None:
                self._keepers.start_soon(self.recorder.write, draft)

    def _take_end(self, end: Ended) -> None:
        """Decide what follows the end of a generation."""
        self.failure = end.error
        if isinstance(end.error, Unkillable):
            for event in (Event.START, Event.UNLOAD, Event.RECONFIGURE):
                self._verbs.fail(event, end.error)
        in_use = self.phase in (Phase.LOADING, Phase.STARTED)
        if in_use and end.error is not None and self._restarts(end, end.error):
            self.counters.restarts += 1
            self._take(Event.AGAIN)
            return
        raised = end.error if in_use and self.policy.on_give_up == "raise" else None
        if raised is not None:
            self.body.cancel()  # before a start in there is answered: it is to come out once
        self._take(Event.GONE)
        if raised is not None:
            self._break(raised, by_user=True)

    def _restarts(self, end: Ended, error: LlamatrioError) -> bool:
        assert self._generation is not None
        first = self._generation.config != self._known
        self._lives.append(self._generation.describe(end, error, first=first))
        delay = self._ask(self._delay_of_next)
        if delay is None:
            self._explain(error)
            return False
        self._delay = delay
        return True

    def _delay_of_next(self) -> float | None:
        delay = self.should_restart(tuple(self._lives))
        number = isinstance(delay, int | float) and not isinstance(delay, bool)
        if delay is not None and not (number and 0 <= delay < math.inf):
            raise SpecificationError(f"should_restart returned {delay!r}: seconds, or None")
        return delay

    def _explain(self, error: LlamatrioError) -> None:
        """Let the error that a model is given up for say what came before it."""
        earlier = self._lives[-2].error if len(self._lives) > 1 else None
        if error.__cause__ is None and earlier is not error:
            error.__cause__ = earlier

    # -- draining ------------------------------------------------------------------------------

    def _drain(self, verb: Verb) -> None:
        """Close the door; the stop comes when all has been served, or time is up."""
        self._desk.queue.close()
        self._drains.add(verb, self._runners)
        self._verbs.fail(Event.START, _interrupted(), waiting=False, before=verb)

    def _join_drains(self, stop: Verb | None) -> None:
        """Let those who drain wait for the stop with the rest: the queue is closed, by whomever."""
        for verb in self._drains.take_all():
            if verb is not stop:
                self._verbs.note(verb, Answer.WAIT, self.phase)

    # -- steps ---------------------------------------------------------------------------------

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
        if event is Event.START and verb is not None and self._must_wait():
            self._verbs.postpone(verb)
            return False
        old, step = self.phase, phases.step(self.phase, event)
        waiting_phase = self._waiting_phase()
        self.phase = step.phase
        if verb is not None:
            self._verbs.note(verb, step.answer, old)
        changed = step.phase is not old
        number = self._generation.number if self._generation else 0
        self.recorder.note(old, event, step.phase, number)
        if changed:
            self._observe("on_transition", Transition(old, event, step.phase, number))
        for command in step.commands:
            self._perform(command, verb, waiting_phase)
        if verb is not None and step.answer is Answer.WAIT:
            verb.on_effect()
        if changed:
            self._notify()
        self._verbs.reach(self.phase)
        self._release_verbs()
        return changed

    def _must_wait(self) -> bool:
        """Say whether a start has to wait for what is on its way: a stop, or the end of a model
        that is known to be dead or at fault."""
        doomed = self._generation is not None and (
            self._generation.fault is not None or self._generation.end is not None
        )
        loaded = self.phase in (Phase.STARTED, Phase.RESIDENT)
        return bool(self._held_end or self._drains or (doomed and loaded))

    # -- commands ------------------------------------------------------------------------------

    def _perform(self, command: Command, verb: Verb | None, waiting_phase: RequestPhase) -> None:
        match command:
            case Command.OPEN:
                self._desk.queue.is_open = not self._closed
            case Command.SPAWN:
                self._spawn(fresh=verb is not None)
            case Command.DISPATCH:
                self._dispatch()
            case Command.CANCEL:
                for reply in self._work.replies:
                    self._cancel_running(reply, "stop")
            case Command.CLOSE:
                self._desk.queue.close()
                self._join_drains(verb)
            case Command.DROP:
                self._desk.drop("stop", waiting_phase, self._runners)
            case Command.FAIL:
                self._fail(waiting_phase)
            case Command.INTERRUPT:
                self._verbs.fail(Event.START, _interrupted(), before=verb)
            case Command.END:
                assert self._generation is not None
                self._generation.scope.cancel()
            case Command.ADOPT:
                assert verb is not None
                self._adopt(verb)

    def _adopt(self, verb: Verb) -> None:
        assert verb.config is not None
        self.config = verb.config
        if verb.policy is not None:
            self.set_policy(verb.policy)

    def _spawn(self, *, fresh: bool) -> None:
        if fresh:
            self.failure = None
            self._lives.clear()
            self._delay = 0.0
        config = self._ask(self._prepared)
        self.counters.generations += 1
        generation = Generation(self.counters.generations, config, self.backend)
        self._generation = generation
        self._progress = LoadProgress()
        self._keepers.start_soon(keep, generation, self._delay, self._on_told, self._on_stale)
        self._keepers.start_soon(watch, generation, self._patience, self._on_told)
        self._notify()

    def _prepared(self) -> ModelConfig:
        config = self.prepare(self.config)
        if not isinstance(config, ModelConfig):
            raise SpecificationError(f"prepare returned {config!r}, which is no ModelConfig")
        return config

    def _dispatch(self) -> None:
        queue, generation = self._desk.queue, self._generation
        while queue and self._free_slots() > 0:
            reply = self._ask(self._choose)
            self._desk.take(reply)
            assert generation is not None  # or there were no slot
            if not self._work:
                generation.look_again()
            self._work.start(self._runners, reply, generation)
            self._observe("on_request_started", reply)

    def _free_slots(self) -> int:
        generation = self._generation
        if generation is None or generation.session is None or self.phase is not Phase.STARTED:
            return 0
        return generation.config.slots - len(self._work)

    def _choose(self) -> Reply:
        reply = self.choose_next(self._desk.waiting)
        if reply not in self._desk.waiting:
            raise SpecificationError(f"choose_next returned {reply!r}, which does not wait")
        return reply

    def _patience(self, generation: Generation) -> Patience:
        policy = self.policy
        if generation.loading:
            stall = policy.load_stall if generation.full is None else policy.warm_up_stall
            return Patience(stall, LoadStalled)
        if self._work and generation.session is not None:
            return Patience(
                max(policy.silence, policy.silent_tokens * self._work.pace), ChildSilent
            )
        return Patience(math.inf)

    def _cancel_running(self, reply: Reply, by: By) -> None:
        self._work.cancel(reply.id, by)

    def _fail(self, waiting_phase: RequestPhase) -> None:
        error = self.failure or _gone()
        self._desk.drop(error, waiting_phase, self._runners)
        # One that came after the death, and is postponed for it, wants another model.
        self._verbs.fail(Event.START, error, postponed=False)

    # -- what other tasks report ---------------------------------------------------------------

    def _on_told(self, generation: Generation, event: SessionEvent | GivenUp) -> None:
        """Take a word of a generation, in its keeper's task."""
        match event:
            case Opened():
                self.counters.loads += 1
                self._known = generation.config
                assert generation.began is not None
                self._load_seconds = trio.current_time() - generation.began
            case Awake():
                self.counters.wakes += 1
            case Ended():
                self.counters.count_end(event, generation.opened is not None)
                self._last_end = event
                number = generation.number
                if draft := self.recorder.take(event, number, self.backend, self.counters):
                    self._keepers.start_soon(self._write_down, draft, event)
                    return
            case GivenUp():
                pass
            case _ if self._inbox.unread > MAX_UNREAD:
                generation.session = None  # nothing more is sent to it while it is ended
                raise StateFlood(f"more than {MAX_UNREAD} records that nobody could take yet")
        self._inbox.put(_Told(event), progress=isinstance(event, LoadProgress))

    @enable_ki_protection
    async def _write_down(self, draft: Draft, end: Ended) -> None:
        """Write down how a model was lost, before anybody is told that it was."""
        try:
            await self.recorder.write(draft)
        finally:
            self._inbox.put(_Told(end))

    def _on_stale(self) -> None:
        self.counters.stale += 1

    def _on_work_finished(
        self, reply: Reply, generation: Generation, outcome: Outcome, died: bool
    ) -> None:
        generation.finished += isinstance(outcome, Finished)
        if not self._work:
            generation.look_again()  # nothing is expected of it now
        if isinstance(outcome, Failed) and isinstance(outcome.error, ModelChanged):
            give_up(generation, outcome.error, self._on_told)
        try:
            if died and self.phase is Phase.STARTED and not self._closed and reply.may_run_again():
                self.counters.requeued += 1
                self._desk.put_back(reply)
            else:
                self._desk.settle(reply, outcome)
        except Exception as exc:  # noqa: BLE001 - raised by `run`, when all is in order
            self._break(exc)
        self._ring()

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            self._inbox.put(_Rang())

    # -- ends ----------------------------------------------------------------------------------

    def _on_settled(self, reply: Reply, outcome: Outcome) -> None:
        self.counters.count_outcome(outcome)
        self._observe("on_request_finished", reply, outcome)
        if self._drains:
            self._ring()

    def _end_requests(self, error: Exception | None) -> None:
        """Give every request its end, after `close` or for an error."""
        self._desk.queue.close()
        self._desk.drop(error or "shutdown", self._waiting_phase(), self._runners)
        if error is not None:
            self._work.fail_all(error)
        else:
            for reply in self._work.replies:
                self._cancel_running(reply, "shutdown")
        for verb in self._drains.take_all():
            self._verbs.postpone(verb)

    def _finish(self) -> None:
        """Answer everybody who still waits, when nothing is left."""
        for item in self._inbox.drain():  # nothing, unless a task of ours broke
            if isinstance(item, Verb):
                self._verbs.postpone(item)
        self._desk.queue.clear()
        for reply in self._desk.live:  # none, unless we broke in the midst of giving an outcome
            if reply.outcome is None:
                outcome = Failed(self._brokenness(), self._waiting_phase(), reply.tokens)
                reply.settle(outcome)
                self.counters.count_outcome(outcome)
        self.phase = Phase.UNLOADED
        self._progress = None
        self._verbs.finish()
        self._notify()
        self._finished.set()
        self._watchers.close()
        self.backend.end_logs()

    def _waiting_phase(self) -> RequestPhase:
        return "loading" if self.phase is Phase.LOADING else "queued"

    def _notify(self, *, progress: bool = False) -> None:
        self._watchers.tell(self.status(), progress=progress)

    # -- hooks ---------------------------------------------------------------------------------

    def _observe(self, hook: str, *args: object) -> None:
        """Tell an observer; after a hook has ended the provider none is told any more."""
        if self._broken is not None:
            return
        outer, self._in_hook = self._in_hook, True
        try:
            getattr(self, hook)(*args)
        except Exception:
            self.counters.hook_errors += 1
            _logger.exception("%s.%s raised", type(self).__name__, hook)
        except BaseException as exc:  # noqa: ASYNC103, BLE001 - `run` raises it; SystemExit, say
            self._break(exc)
        finally:
            self._in_hook = outer

    def _ask(self, hook: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Ask a decider; its exception is the user's, and comes out as it is."""
        outer, self._in_hook = self._in_hook, True
        try:
            return hook(*args, **kwargs)
        except BaseException as exc:
            self._break(exc, by_user=True)
            raise
        finally:
            self._in_hook = outer


def _gone() -> LlamatrioError:
    return ClosedError("the model was unloaded")


def _interrupted() -> LlamatrioError:
    return StartInterrupted("a later stop gave the start up")


def first_of(error: BaseException) -> BaseException:
    """Take one exception out of the groups that nurseries of ours made of it.

    What is no cancel comes first. Two Ctrl-C can make two; the first is as good as both.
    """
    while isinstance(error, BaseExceptionGroup):
        others = [one for one in error.exceptions if not isinstance(one, trio.Cancelled)]
        error = (others or error.exceptions)[0]
    return error
