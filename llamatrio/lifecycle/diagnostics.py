"""What the lifecycle counted: a snapshot for people, beside the provider contract and not in it."""

from __future__ import annotations

import weakref
from typing import Literal, TypeAlias

import attrs

from llamatrio.child.exits import Exit
from llamatrio.child.isolation import Isolation
from llamatrio.child.pumps import Tally
from llamatrio.errors import WakeFailed
from llamatrio.lifecycle.inbox import Inbox
from llamatrio.lifecycle.phases import Phase
from llamatrio.outcomes import Cancelled, Failed, Finished, Outcome
from llamatrio.session.base import Ended, LoadProgress

Residency: TypeAlias = Literal["unloaded", "loading", "resident", "asleep"]
"""Where the model is: `loading` is the first load of a generation; a model that is `asleep` has
given its memory back and comes again with the next request."""


@attrs.frozen
class Status:
    """One moment of the lifecycle, for those who watch it.

    Attributes:
      phase: Where it stands.
      residency: Where the model is.
      progress: How far the load is while there is one, the first or one after sleep; else None.
      generation: The number of the present or last life of the model; 0 before the first.
    """

    phase: Phase
    residency: Residency
    progress: LoadProgress | None
    generation: int


@attrs.define
class Counters:
    """What is counted over the life of a provider.

    Attributes:
      accepted: Requests that were accepted.
      finished: Those whose outcome is Finished.
      cancelled: Those whose outcome is Cancelled.
      failed: Those whose outcome is Failed.
      generations: Loads that were begun.
      loads: Loads that came to an end with a model.
      failed_loads: Loads that did not.
      restarts: Generations that were begun by policy, in place of one that had died.
      wakes: Loads after sleep that came to an end with a model.
      failed_wakes: Loads after sleep that did not.
      unloads: Models that were given up because we wanted it.
      crashes: Models that were lost otherwise.
      requeued: Requests that went back into the queue because their model died.
      resumed: Requests with an outcome that had been taken up again by another model.
      superseded: Requests that were cancelled by a newer one with the same key.
      expired: Requests that were cancelled by one of their limits.
      stale: What a backend told of a generation after its end or its fault; it was dropped.
      hook_errors: Exceptions of hooks, which were logged and changed nothing.
    """

    accepted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    generations: int = 0
    loads: int = 0
    failed_loads: int = 0
    restarts: int = 0
    wakes: int = 0
    failed_wakes: int = 0
    unloads: int = 0
    crashes: int = 0
    requeued: int = 0
    resumed: int = 0
    superseded: int = 0
    expired: int = 0
    stale: int = 0
    hook_errors: int = 0

    def count_outcome(self, outcome: Outcome) -> None:
        """Count one request's end."""
        self.resumed += outcome.resumed > 0
        match outcome:
            case Finished():
                self.finished += 1
            case Cancelled():
                self.cancelled += 1
                self.superseded += outcome.by == "superseded"
                self.expired += outcome.by == "deadline"
            case Failed():
                self.failed += 1

    def count_end(self, end: Ended, opened: bool) -> None:
        """Count one generation's end."""
        if end.error is None:
            self.unloads += opened
        elif opened:
            self.crashes += 1
            self.failed_wakes += isinstance(end.error, WakeFailed)
        else:
            self.failed_loads += 1


@attrs.frozen
class Diagnostics:
    """One moment of a provider. Taking it costs little, wakes nothing, and counts as no use.

    Attributes:
      phase: Where the lifecycle stands.
      started: Whether requests are accepted.
      residency: Whether the model is "unloaded", "loading", "resident" or "asleep".
      generation: The number of the present or last life of the model; 0 before the first.
      pid: The process that holds the model, if there is one.
      pending: Requests that wait for a slot or for the model.
      running: Requests that have a slot.
      counters: What was counted so far.
      pipes: What came out of the child's pipes so far.
      dropped_log_lines: Log lines lost to slow logging handlers.
      load_seconds: How long the last first load of a generation took; None before that.
      token_seconds: Time from one piece of an answer to the next, as seen of late; 0 before that.
      last_exit: How the last process ended; None before that.
      isolation: What the present or last process is kept from; None before the first.
      stdout_reserved: Whether the present or last process keeps its stdout for records, as far as
        that can be seen; None before its READY, and where it cannot.
    """

    phase: Phase
    started: bool
    residency: Residency
    generation: int
    pid: int | None
    pending: int
    running: int
    counters: Counters
    pipes: Tally
    dropped_log_lines: int
    load_seconds: float | None
    token_seconds: float
    last_exit: Exit | None
    isolation: Isolation | None = None
    stdout_reserved: bool | None = None


class Watchers:
    """Those who follow the lifecycle, each with an inbox; one that is dropped is forgotten."""

    def __init__(self) -> None:
        self._inboxes: weakref.WeakSet[Inbox[Status]] = weakref.WeakSet()
        self._told: Status | None = None
        self._closed = False

    def add(self, status: Status) -> Inbox[Status]:
        """Return an inbox that holds the present status, and gets every one that follows."""
        inbox: Inbox[Status] = Inbox()
        inbox.put(status)
        if self._closed:
            inbox.close()
        self._inboxes.add(inbox)
        return inbox

    def tell(self, status: Status, *, progress: bool = False) -> None:
        """Tell a status that differs from the last; progress may replace earlier progress."""
        if status != self._told:
            self._told = status
            for inbox in self._inboxes:
                inbox.put(status, progress=progress)

    def close(self) -> None:
        """Let everybody come to an end."""
        self._closed = True
        for inbox in self._inboxes:
            inbox.close()
