"""PURE. The lifecycle as a table: in this phase, upon this event, go there and do that.

How to read `TABLE`: a row is a phase, a column an event. A cell says which phase comes next, which
commands the actor performs, in order, and what becomes of the verb, if the event is one. A pair
that is not in the table cannot be delivered; `step` raises for it, and nothing is changed.

The rules behind it:

* Commands are synchronous. What takes time is a task that reports back as an event; an actor that
  waited for the end of the child in its own loop would wait for an event that it does not read.
* The last word of a generation, `AGAIN` or `GONE`, is held back while a request is running, and a
  new one is spawned only upon that word. There are never two children.
* `STOPPING` lasts only while a request is running.
* `LOADING` and a stop lead through `UNLOADING`, not straight to `UNLOADED`: a start that follows
  must wait for the reaping, or two models would be in memory.
* Guards are resolved before the table is asked, so that it stays data: a configuration that
  changes nothing is no `RECONFIGURE`, and whether a child is to be replaced decides between
  `AGAIN` and `GONE`.

A verb that waits is answered when the phase is in its goal (`GOALS`). A postponed one is looked at
again after the next change of phase, in the order of arrival.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs


class Phase(enum.Enum):
    """Where the lifecycle stands."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    STARTED = "started"
    STOPPING = "stopping"
    RESIDENT = "resident"
    UNLOADING = "unloading"


class Event(enum.Enum):
    """What can happen: four verbs of the caller, three words of a generation, one of the work."""

    START = "start"
    STOP = "stop"
    UNLOAD = "unload"
    RECONFIGURE = "reconfigure"
    READY = "ready"
    AGAIN = "again"
    GONE = "gone"
    IDLE = "idle"


class Command(enum.Enum):
    """What the actor does. None of these waits."""

    OPEN = "open the queue"
    SPAWN = "begin a generation"
    DISPATCH = "let requests run"
    CANCEL = "cancel what runs"
    CLOSE = "close the queue"
    DROP = "end what is queued as cancelled"
    FAIL = "end what is queued, and every start, as failed"
    INTERRUPT = "end every earlier start as interrupted"
    END = "end the generation"
    ADOPT = "adopt the new configuration"


class Answer(enum.Enum):
    """What becomes of a verb."""

    WAIT = "wait until the phase is in its goal"
    REFUSE = "raise in the caller"
    POSTPONE = "look at it again after the next change of phase"


@attrs.frozen
class Step:
    """One cell of the table.

    Attributes:
      phase: The phase that comes next.
      commands: What to do then, in this order.
      answer: What becomes of the verb; meaningless for other events.
    """

    phase: Phase
    commands: tuple[Command, ...] = ()
    answer: Answer = Answer.WAIT


@attrs.frozen
class Transition:
    """A change of phase.

    Attributes:
      old: The phase before.
      event: What happened.
      new: The phase now.
      generation: The number of the present or last life of the model; 0 before the first.
    """

    old: Phase
    event: Event
    new: Phase
    generation: int

    def __str__(self) -> str:
        return f"{self.old.name} --{self.event.name}--> {self.new.name}"


class Undeliverable(Exception):
    """An event that cannot happen in this phase. A defect of this library."""


def step(phase: Phase, event: Event) -> Step:
    """Look up what an event does in a phase.

    Raises:
      Undeliverable: if it cannot happen there.
    """
    try:
        return TABLE[phase, event]
    except KeyError:
        raise Undeliverable(f"{event.name} in {phase.name}") from None


def _table() -> Mapping[tuple[Phase, Event], Step]:
    """Write the table row by row."""
    unloaded, loading, started, stopping, resident, unloading = Phase
    open_, spawn, dispatch, cancel, close, drop, fail, interrupt, end, adopt = Command
    wait, refuse, postpone = Answer
    give_up_load = (interrupt, close, drop, end)
    rows: dict[Phase, dict[Event, Step]] = {
        unloaded: {
            Event.START: Step(loading, (open_, spawn), wait),
            Event.STOP: Step(unloaded, (), wait),
            Event.UNLOAD: Step(unloaded, (), wait),
            Event.RECONFIGURE: Step(unloaded, (adopt,), wait),
        },
        loading: {
            Event.START: Step(loading, (), wait),
            Event.STOP: Step(unloading, give_up_load, wait),
            Event.UNLOAD: Step(unloading, give_up_load, wait),
            Event.RECONFIGURE: Step(loading, (), refuse),
            Event.READY: Step(started, (dispatch,)),
            Event.AGAIN: Step(loading, (spawn,)),
            Event.GONE: Step(unloaded, (close, fail)),
        },
        started: {
            Event.START: Step(started, (), wait),
            Event.STOP: Step(stopping, (interrupt, cancel, close, drop), wait),
            Event.UNLOAD: Step(started, (), refuse),
            Event.RECONFIGURE: Step(started, (), refuse),
            Event.READY: Step(started),
            Event.AGAIN: Step(loading, (spawn,)),
            Event.GONE: Step(unloaded, (close, fail)),
        },
        stopping: {
            Event.START: Step(stopping, (), postpone),
            Event.STOP: Step(stopping, (interrupt,), wait),
            Event.UNLOAD: Step(stopping, (), postpone),
            Event.RECONFIGURE: Step(stopping, (), postpone),
            Event.READY: Step(stopping),
            Event.IDLE: Step(resident),
        },
        resident: {
            Event.START: Step(started, (open_, dispatch), wait),
            Event.STOP: Step(resident, (interrupt,), wait),
            Event.UNLOAD: Step(unloading, (interrupt, end), wait),
            Event.RECONFIGURE: Step(unloading, (end,), postpone),
            Event.READY: Step(resident),
            Event.GONE: Step(unloaded),
        },
        unloading: {
            Event.START: Step(unloading, (), postpone),
            Event.STOP: Step(unloading, (interrupt,), wait),
            Event.UNLOAD: Step(unloading, (interrupt,), wait),
            Event.RECONFIGURE: Step(unloading, (), postpone),
            Event.READY: Step(unloading),
            Event.GONE: Step(unloaded),
        },
    }
    return MappingProxyType(
        {(phase, event): cell for phase, row in rows.items() for event, cell in row.items()}
    )


TABLE: Final = _table()


def diagram() -> str:
    """Draw the changes of phase as a Mermaid state diagram."""
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    for (phase, event), cell in TABLE.items():
        if cell.phase is not phase:
            arrows.setdefault((phase, cell.phase), []).append(event.value)
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.UNLOADED.name}"]
    for (old, new), events in arrows.items():
        lines.append(f"    {old.name} --> {new.name}: {', '.join(events)}")
    return "\n".join(lines)


GOALS: Final[Mapping[Event, frozenset[Phase]]] = MappingProxyType(
    {
        Event.START: frozenset({Phase.STARTED}),
        Event.STOP: frozenset({Phase.RESIDENT, Phase.UNLOADED, Phase.UNLOADING}),
        Event.UNLOAD: frozenset({Phase.UNLOADED}),
        Event.RECONFIGURE: frozenset({Phase.UNLOADED}),
    }
)
"""The phases in which a waiting verb is answered."""
