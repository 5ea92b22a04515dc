"""Every interleaving of a small world, on the real actor.

The synchronous part of the actor is all there is here: its inbox is a list, its nurseries write
down what they are to start, and time never passes. Whatever else would happen by itself (a word of
a generation, the end of a request, the end of a delay) is an event that the exploration delivers
when it likes. A state is reached by replaying the events that lead to it, and is known by its
`World.key`, so that each is looked into once.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import Any, Final, TypeAlias, TypeVar, cast

import attrs
import pytest
import trio
from trio.testing import MockClock

from llamatrio import (
    ChildDied,
    ChildError,
    LifecycleActor,
    LoadFailed,
    ModelConfig,
    Phase,
    ProviderBroken,
    Reply,
    Request,
    StreamBroken,
    WrongPhase,
    completion_request,
)
from llamatrio.lifecycle import phases
from llamatrio.lifecycle.inbox import Inbox
from llamatrio.lifecycle.keeper import Generation, give_up
from llamatrio.lifecycle.phases import Event
from llamatrio.lifecycle.policy import Life
from llamatrio.lifecycle.verbs import Verb
from llamatrio.lifecycle.work import _Running
from llamatrio.outcomes import Failed, Finished, Outcome
from llamatrio.requests import Admitted, Delta, Limits
from llamatrio.session.base import (
    Asleep,
    Awake,
    Backend,
    Emit,
    Ended,
    ModelSession,
    Opened,
    Publish,
    SessionEvent,
)

T = TypeVar("T")
_logger = logging.getLogger(__name__)

OLD, NEW = ModelConfig("old.gguf"), ModelConfig("new.gguf")


class Stub(Backend):
    """Is never run: the exploration speaks in its place."""

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        raise AssertionError


class Session(ModelSession):
    """Does with a request what the exploration wants, at once."""

    def __init__(self, end: str = "") -> None:
        self._end = end

    async def perform(self, request: Request, emit: Emit) -> Finished:
        match self._end:
            case "finish":
                return Finished("stop")
            case "break":
                raise StreamBroken("the connection ended")
            case _:
                await trio.sleep_forever()
                raise AssertionError


class Box(Inbox[T]):
    """An inbox that is taken from when the exploration likes."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self.is_closed = False

    def put(self, item: T, *, progress: bool = False) -> None:
        if not self.is_closed:
            self.items.append(item)

    @property
    def unread(self) -> int:
        return len(self.items)

    def close(self) -> None:
        self.is_closed = True

    def drain(self) -> list[T]:
        items, self.items = self.items, []
        return items


class Explored(LifecycleActor):
    """An actor that writes down which cells of the table it was led to."""

    def __init__(self, world: World) -> None:
        super().__init__(OLD, Stub())
        self.world = world
        self.cells: set[tuple[Phase, Event]] = set()
        self.finished: Counter[int] = Counter()

    def on_request_finished(self, reply: Reply, outcome: Outcome) -> None:
        self.finished[reply.id] += 1

    def should_restart(self, lives: tuple[Life, ...]) -> float | None:  # type: ignore[override]
        return 1.0 if len(lives) < 2 else None

    def _step(self, event: Event, verb: Verb | None) -> bool:
        if not (event is Event.START and self._must_wait()):
            self.cells.add((self.phase, event))
        assert verb is None or not verb.withdrawn, "its caller had given it up"
        return super()._step(event, verb)


class Nursery:
    """Writes down what it is to start."""

    def __init__(self, world: World) -> None:
        self._world = world

    def start_soon(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        self._world.note_task(function, args)


# -- the world ---------------------------------------------------------------------------------

Happening: TypeAlias = tuple[str, int]
"""What happens, and to which of its kind."""

VERBS: Final = {
    "start": lambda: Verb(Event.START),
    "stop": lambda: Verb(Event.STOP),
    "drain": lambda: Verb(Event.STOP, drain=True, drain_timeout=AGES),
    "unload": lambda: Verb(Event.UNLOAD),
    "configure": lambda: Verb(Event.RECONFIGURE, NEW),
}
AGES: Final = 1e9
"""Seconds that only pass if the exploration says so."""

PLAIN: Final = completion_request("plain")
PATIENT: Final = completion_request("patient", on_crash="resume", limits=Limits(queue=AGES))
URGENT: Final = completion_request("urgent", priority=1, limits=Limits(total=AGES))

OUTSIDE: Final = {
    *VERBS, "close", "submit", "cancel", "withdraw", "crash", "silence", "sleep",
    "late drain", "late in queue", "late in slot",
}  # fmt: skip
"""What may happen or not; all else comes sooner or later."""


@attrs.frozen
class Bounds:
    """How large the world is.

    Attributes:
      requests: What is asked, in this order.
      calls: How many verbs are called, whichever they are.
      closes: Whether the provider may be closed, at any moment.
      faults: How often the model's side breaks.
      cancels: How many requests are given up by their callers, and verbs by theirs.
      sleeps: How often the model sleeps.
      lag: How much may happen before the actor takes what is in its inbox.
      before: What has happened already.
    """

    requests: tuple[Request, ...]
    calls: int
    closes: bool = False
    faults: int = 1
    cancels: int = 0
    sleeps: int = 0
    lag: int = 1
    before: tuple[Happening, ...] = ()


@attrs.define(eq=False)
class Call:
    """A verb, and how many requests there had been when it was called."""

    name: str
    verb: Verb
    replies: int

    @property
    def is_answered(self) -> bool:
        return self.verb._done.is_set()

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.is_answered or self.verb.withdrawn


class World:
    """An actor, and all that surrounds it."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.actor = actor = Explored(self)
        self.box: Box[object] = Box()
        actor._inbox = cast("Inbox[Any]", self.box)
        actor._keepers = actor._runners = cast("trio.Nursery", Nursery(self))
        self.generation: Generation | None = None
        self.stage = "none"
        self.running: dict[int, _Running] = {}
        self.watchers: dict[int, Verb] = {}
        self.verbs: list[Call] = []
        self.replies: list[Reply] = []
        self.ran: list[Reply] = []
        self.given_up: set[int] = set()
        self.outcomes: dict[int, Outcome | None] = {}
        self.used: Counter[str] = Counter()
        self.lag = 0
        self.end = "open"

    # -- what the actor does ---------------------------------------------------------------

    def note_task(self, function: Callable[..., Awaitable[None]], args: tuple[Any, ...]) -> None:
        match getattr(function, "__name__", ""):
            case "keep":
                self._begin_generation(*args)
            case "watch":
                pass
            case "_serve":
                assert self.generation is not None
                assert self.generation.session is not None, "sent to no model"
                self._note_slot(args[0])
            case "_watch":
                self.watchers[self._number(args[0])] = args[0]
            case name:
                raise AssertionError(name)

    def _note_slot(self, running: _Running) -> None:
        reply = running.reply
        assert reply.id not in self.given_up, "given up, and run again"
        if any(earlier is reply for earlier in self.ran):
            assert reply.request.on_crash == "resume" or not reply._admitted, "run twice"
        for other in self.actor._desk.queue:
            assert self._rank(reply) < self._rank(other), f"{reply} before {other}"
        self.ran.append(reply)
        self.running[reply.id] = running

    def _rank(self, reply: Reply) -> tuple[int, int]:
        return (-reply.request.priority, reply.id)

    def _begin_generation(self, generation: Generation, delay: float, *_: object) -> None:
        assert self.stage in ("none", "ended"), "two generations at once"
        assert not self.actor._closed, "spawned after close"
        assert not self.running, "spawned while a request runs"
        self.generation = generation
        self.stage = "delayed"
        if not delay:
            self._begin_load()

    def _number(self, verb: Verb) -> int:
        return next(n for n, call in enumerate(self.verbs) if call.verb is verb)

    # -- what may happen -------------------------------------------------------------------

    def enabled(self) -> Iterator[Happening]:
        """All that may happen next."""
        if self.end == "over":
            return
        if self.box.items and self.end == "open":
            yield ("take", 0)
            if self.lag >= self.bounds.lag:
                return
        yield from self._of_callers()
        yield from self._of_generation()
        yield from self._of_requests()
        yield from self._of_time()
        yield from self._of_the_end()

    def _of_callers(self) -> Iterator[Happening]:
        actor, used = self.actor, self.used
        if not actor._closed:
            if self.bounds.closes:
                yield ("close", 0)
            if len(self.verbs) < self.bounds.calls:
                yield from ((name, 0) for name in VERBS)
            if used["submit"] < len(self.bounds.requests) and actor.started and not actor._drains:
                yield ("submit", 0)
        if used["cancel"] < self.bounds.cancels:
            for number, reply in enumerate(self.replies):
                if reply.outcome is None:
                    yield ("cancel", number)
            for number, call in enumerate(self.verbs):
                if call.name in ("start", "configure") and not call.is_over:
                    yield ("withdraw", number)

    def _of_generation(self) -> Iterator[Happening]:
        generation = self.generation
        if generation is None or generation.end is not None:
            return
        if generation.scope.cancel_called:
            yield ("obey", 0)
        if self.stage == "delayed":
            yield ("begin", 0)
            return
        if self.stage == "loading":
            yield ("open", 0)
        if self.used["fault"] < self.bounds.faults:
            yield ("crash", 0)
            if generation.fault is None:
                yield ("silence", 0)
        if self.stage == "loaded" and generation.fault is None:
            if generation.asleep:
                yield ("wake", 0)
            elif self.used["sleep"] < self.bounds.sleeps:
                yield ("sleep", 0)

    def _of_requests(self) -> Iterator[Happening]:
        for number, running in self.running.items():
            dead = running.generation.end is not None
            cancelled = running.scope.cancel_called
            if not dead and not cancelled and not self._has_begun(running.reply):
                yield ("begin answer", number)
            yield ("finish", number)
            if dead:
                yield ("break", number)
            if cancelled or running.ended_by is not None:
                yield ("end", number)

    def _has_begun(self, reply: Reply) -> bool:
        """Whether all has come of it that makes a difference, save its end."""
        resumable = reply.request.on_crash == "resume"
        return reply.tokens > reply._begun_with if resumable else reply._admitted

    def _of_time(self) -> Iterator[Happening]:
        for number, verb in self.watchers.items():
            yield ("end watcher" if verb.timer.cancel_called else "late drain", number)
        desk = self.actor._desk
        if any(entry[1] in desk.queue for entry in desk._deadlines):
            yield ("late in queue", 0)
        for number, running in self.running.items():
            if running.limit is not None and running.ended_by is None:
                yield ("late in slot", number)

    def _of_the_end(self) -> Iterator[Happening]:
        if self.actor._closed and self.end == "open" and not self.box.items:
            yield ("end requests", 0)
        if self.end == "requests" and not self.running and not self.watchers:
            yield ("end model", 0)
        if self.end == "model" and self.stage in ("none", "ended"):
            yield ("finish all", 0)

    # -- what happens then -----------------------------------------------------------------

    async def happen(self, happening: Happening) -> None:
        """Let it happen."""
        name, number = happening
        self.lag = self.lag + 1 if self.box.items and name != "take" else 0
        if name in VERBS:
            self._call(name)
        elif name in ("finish", "break", "end", "late in slot"):
            await self._end_request(name, number)
        elif name in ("late drain", "end watcher"):
            await self._end_watcher(number)
        else:
            self._happen(name, number)

    def _call(self, name: str) -> None:
        verb = VERBS[name]()
        self.verbs.append(Call(name, verb, len(self.replies)))
        self.box.put(verb)

    def _happen(self, name: str, number: int) -> None:
        actor = self.actor
        match name:
            case "take":
                self._take()
            case "close":
                actor.close()
            case "submit":
                self.replies.append(actor.submit(self.bounds.requests[self.used["submit"]]))
                self.used["submit"] += 1
            case "cancel":
                self.used["cancel"] += 1
                self.given_up.add(self.replies[number].id)
                self.replies[number].cancel()
            case "withdraw":
                self.used["cancel"] += 1
                self.verbs[number].verb.abandoned = True
            case "begin answer":
                resumable = self.running[number].reply.request.on_crash == "resume"
                piece = Delta("x") if resumable else Admitted()
                actor._work._emit(self.running[number], piece)
            case "late in queue":
                actor._desk._expire(math.inf)
            case "end requests":
                actor._end_requests(None)
                self.end = "requests"
            case "end model":
                if self.generation is not None:
                    self.generation.scope.cancel()
                self.end = "model"
            case "finish all":
                actor._finish()
                self.end = "over"
            case _:
                self._happen_to_generation(name)

    def _take(self) -> None:
        was_dead = self.actor._held_end is not None
        waited = [verb for verb in self.verbs if not verb.is_over]
        for item in self.box.drain():
            self.actor._take_safely(cast("Any", item))
        for verb in waited:
            if verb.is_answered:
                self._check_answer(verb, was_dead=was_dead)

    def _check_answer(self, call: Call, *, was_dead: bool) -> None:
        """Look whether somebody got what he wanted, or was refused it for a reason."""
        error, earlier, later = call.verb.error, *self._around(call)
        match call.name:
            case "start" if error is None:
                assert not was_dead or self.actor._held_end is None, "started with a dead model"
            case "start":
                faults = (ChildError, LoadFailed) if self.used["fault"] else ()
                assert isinstance(error, faults) or STOPS & {one.name for one in later}
            case "stop" | "drain":
                assert error is None
                assert all(reply.outcome for reply in self.replies[: call.replies])
                assert all(one.is_over for one in earlier if one.name == "start")
            case "configure":
                assert isinstance(error, WrongPhase) or self.actor.config == NEW
            case _:
                assert error is None or isinstance(error, WrongPhase)

    def _around(self, call: Call) -> tuple[list[Call], list[Call]]:
        index = self.verbs.index(call)
        return self.verbs[:index], self.verbs[index + 1 :]

    def _happen_to_generation(self, name: str) -> None:
        generation = self.generation
        assert generation is not None
        match name:
            case "begin":
                self._begin_load()
            case "open":
                self.stage = "loaded"
                self._publish(Opened(Session()))
            case "obey":
                self._publish(Ended())
            case "crash":
                self.used["fault"] += 1
                died = self.stage == "loaded"
                self._publish(Ended(ChildDied("crash") if died else LoadFailed("crash")))
            case "silence":
                self.used["fault"] += 1
                give_up(generation, ChildError("silence"), self.actor._on_told)
            case "sleep":
                self.used["sleep"] += 1
                self._publish(Asleep())
            case "wake":
                self._publish(Awake())
            case _:
                raise AssertionError(name)

    def _begin_load(self) -> None:
        assert self.generation is not None
        self.stage = "loading"
        self.generation.began = trio.current_time()

    def _publish(self, event: SessionEvent) -> None:
        """Do what `keep` does with a word of the backend."""
        generation = self.generation
        assert generation is not None
        if isinstance(event, Ended):
            self.stage = "ended"
            if generation.fault is not None:
                event = attrs.evolve(event, error=generation.fault)
        generation.note(event)
        self.actor._on_told(generation, event)

    async def _end_request(self, name: str, number: int) -> None:
        running = self.running.pop(number)
        generation = running.generation
        session, generation.session = generation.session, Session(name)
        if name in ("end", "late in slot"):
            running.scope.deadline = -math.inf
        await self.actor._work._serve(running)
        generation.session = session

    async def _end_watcher(self, number: int) -> None:
        verb = self.watchers.pop(number)
        verb.timer.deadline = -math.inf
        await self.actor._drains._watch(verb)

    # -- what is there ---------------------------------------------------------------------

    def key(self) -> Hashable:
        """All that what follows can depend on."""
        actor, desk = self.actor, self.actor._desk
        return (
            (actor.phase, actor._closed, actor._rung, self.end, self.lag, actor.config is NEW),
            (len(self.verbs), *sorted(self.used.items())),
            tuple(self._name(item) for item in self.box.items),
            tuple(reply.id for reply in desk.queue),
            desk.queue.is_open,
            tuple(sorted((one, limit) for _, one, limit in desk._deadlines if one in desk._live)),
            tuple(self._look_at_running(one) for one in self.running.values()),
            tuple(self._look_at_reply(reply) for reply in self.replies),
            tuple(self._look_at_verb(number) for number in range(len(self.verbs))),
            tuple(self._number(verb) for verb in actor._drains._verbs),
            tuple(sorted(self.watchers)),
            self._look_at_generation(),
        )

    def _name(self, item: object) -> Hashable:
        if isinstance(item, Verb):
            return self._number(item)
        event = getattr(item, "event", None)
        return (type(item), type(event), bool(getattr(event, "error", None)))

    def _look_at_running(self, running: _Running) -> Hashable:
        by = running.ended_by
        return (running.reply.id, by if isinstance(by, str) else type(by), running.limit,
                running.scope.cancel_called)  # fmt: skip

    def _look_at_reply(self, reply: Reply) -> Hashable:
        if reply.outcome is not None:
            return None
        return (reply._admitted, reply._begun_with, reply.tokens, reply._was_fruitless)

    def _look_at_verb(self, number: int) -> Hashable:
        name, verb = self.verbs[number].name, self.verbs[number].verb
        verbs = self.actor._verbs
        if self.verbs[number].is_answered:
            return None
        lists = (verbs._waiting, verbs._reached, verbs._postponed, self.actor._drains._verbs)
        return (name, verb.withdrawn, verb.timer.deadline < 0, *(verb in one for one in lists))

    def _look_at_generation(self) -> Hashable:
        one, held = self.generation, self.actor._held_end
        if one is None:
            return None
        state = (one.scope.cancel_called, one.asleep, one.session is None, type(one.fault))
        end = None if one.end is None else type(one.end.error)
        return (self.stage, *state, end, held and type(held.error), len(self.actor._lives))

    @property
    def is_quiet(self) -> bool:
        """Whether nobody waits for anything."""
        return (
            not self.box.items
            and all(call.is_over for call in self.verbs)
            and all(reply.outcome is not None for reply in self.replies)
            and not self.running
            and self.actor.phase in (Phase.UNLOADED, Phase.RESIDENT, Phase.STARTED)
        )

    def check(self) -> None:
        """Look at what must always be true."""
        actor = self.actor
        assert actor._broken is None, repr(actor._broken)
        for reply in self.replies:
            before = self.outcomes.get(reply.id) or reply.outcome
            self.outcomes[reply.id] = before
            assert reply.outcome is before, "another outcome"
            assert actor.finished[reply.id] == (reply.outcome is not None)
            assert not isinstance(before, Failed) or self.used["fault"]
            assert not (isinstance(before, Failed) and isinstance(before.error, ProviderBroken))
        assert actor.phase is not Phase.STOPPING or self.running or self.box.items or actor._closed
        assert not self.running or self.end != "open" or actor.phase in BUSY
        if actor.phase is Phase.STOPPING:
            assert all(one.scope.cancel_called for one in self.running.values())
        assert len(self.running) <= actor.config.slots
        assert {running.reply.id for running in self.running.values()} == set(actor._work._running)


STOPS: Final = {"stop", "drain", "unload"}
BUSY: Final = (Phase.STARTED, Phase.STOPPING)

BEGUN: Final = (("start", 0), ("take", 0))
READY: Final = (*BEGUN, ("open", 0), ("take", 0))
SERVING: Final = (*READY, ("submit", 0), ("take", 0))


# -- the exploration ---------------------------------------------------------------------------


Trace: TypeAlias = "tuple[Trace, Happening] | None"
"""What led to a state, the last first."""


def unfold(trace: Trace) -> list[Happening]:
    """Put what led to a state in order."""
    happenings = []
    while trace is not None:
        trace, happening = trace
        happenings.append(happening)
    return happenings[::-1]


class Exploration:
    """All states that can be reached within bounds, and what leads from one to another.

    Attributes:
      states: The number of each state.
      transitions: How many there are.
      cells: The cells of the table that were looked up.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.states: dict[Hashable, int] = {}
        self.transitions = 0
        self.cells: set[tuple[Phase, Event]] = set()
        self._bounds = bounds
        self._quiet: list[int] = []
        self._origins: dict[int, list[int]] = defaultdict(list)  # from where one gets there
        self._left: list[tuple[Trace, int, Happening]] = []

    async def run(self) -> None:
        """Explore all."""
        world = await self._go_back(None)
        await self._follow(world, None, self._arrive(world))
        while self._left:
            trace, here, happening = self._left.pop()
            await self._step(await self._go_back(trace), trace, here, happening)

    async def _go_back(self, trace: Trace) -> World:
        world = World(self._bounds)
        for happening in (*self._bounds.before, *unfold(trace)):
            await world.happen(happening)
        return world

    async def _follow(self, world: World, trace: Trace, here: int) -> None:
        """Look around in a new state, and go on from there as long as there is news."""
        known = -1
        while here > known:
            known = here
            happenings = list(world.enabled())
            self._check_end(world, trace, happenings)
            if world.is_quiet:
                self._quiet.append(here)
            if not happenings:
                return
            self._left += [(trace, here, one) for one in happenings[1:]]
            here = await self._go(world, trace, here, happenings[0])
            trace = (trace, happenings[0])

    async def _step(self, world: World, trace: Trace, here: int, happening: Happening) -> None:
        known = len(self.states)
        there = await self._go(world, trace, here, happening)
        if there >= known:
            await self._follow(world, (trace, happening), there)

    async def _go(self, world: World, trace: Trace, here: int, happening: Happening) -> int:
        """Go one step, and return the number of the state that one comes to."""
        try:
            await world.happen(happening)
            world.check()
        except Exception as exc:
            exc.add_note(f"after {[*unfold(trace), happening]}")
            raise
        self.transitions += 1
        self.cells |= world.actor.cells
        there = self._arrive(world)
        if happening[0] not in OUTSIDE:
            self._origins[there].append(here)
        return there

    def _arrive(self, world: World) -> int:
        return self.states.setdefault(world.key(), len(self.states))

    def _check_end(self, world: World, trace: Trace, happenings: list[Happening]) -> None:
        """Where nothing goes on by itself, nobody may wait for anything."""
        if all(name in OUTSIDE for name, _ in happenings) and not world.is_quiet:
            raise AssertionError(f"stuck: {world.actor!r} after {unfold(trace)}")

    def restless(self) -> int:
        """Count the states from which one cannot come to rest without help from outside."""
        reached = set(self._quiet)
        left = deque(reached)
        while left:
            for origin in self._origins[left.popleft()]:
                if origin not in reached:
                    reached.add(origin)
                    left.append(origin)
        return len(self.states) - len(reached)


async def explore(bounds: Bounds) -> Exploration:
    exploration = Exploration(bounds)
    await exploration.run()
    _logger.info("%d states, %d transitions", len(exploration.states), exploration.transitions)
    return exploration


SMALL: Final = [
    Bounds((PLAIN, PATIENT), calls=2, before=READY),
    Bounds((PLAIN,), calls=2, closes=True, before=BEGUN),
    Bounds((PLAIN,), calls=3, before=SERVING),
    Bounds((PATIENT,), calls=2, sleeps=1, before=SERVING),
    Bounds((PATIENT,), calls=2, cancels=1, before=SERVING),
    Bounds((), calls=2, faults=2, before=BEGUN),
]
LARGE: Final = {
    "requests": Bounds((PLAIN, PATIENT, URGENT), calls=3, before=READY),
    "verbs": Bounds((PLAIN,), calls=4, before=BEGUN),
    "end": Bounds((PLAIN,), calls=3, closes=True, before=BEGUN),
    "faults": Bounds((PATIENT,), calls=3, faults=2, before=READY),
    "cancels": Bounds((PLAIN, PATIENT), calls=2, cancels=2, before=BEGUN),
    "lag": Bounds((PLAIN,), calls=3, lag=3, sleeps=1, before=SERVING),
}


@pytest.mark.slow
async def test_small_worlds_come_to_rest_and_lead_to_every_cell_of_the_table(
    autojump_clock: MockClock,
) -> None:
    cells: set[tuple[Phase, Event]] = set()
    for bounds in SMALL:
        exploration = await explore(bounds)
        assert exploration.restless() == 0
        cells |= exploration.cells
    assert cells == set(phases.TABLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
async def test_a_larger_world_comes_to_rest_whatever_happens(
    name: str, autojump_clock: MockClock
) -> None:
    exploration = await explore(LARGE[name])
    assert exploration.restless() == 0
