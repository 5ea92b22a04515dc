"""Every accepted request, from `submit` to its one outcome, save while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final

import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.errors import QueueFull
from llamatrio.lifecycle.queue import RequestQueue
from llamatrio.lifecycle.reply import Reply
from llamatrio.outcomes import By, Cancelled, Failed, Limit, Outcome, Phase
from llamatrio.requests import NO_LIMITS, Request

SLICE: Final = 1000
"""How many requests are given their outcome in one go; other tasks run in between."""


class Waiting(Collection[Reply]):
    """The requests that wait for a slot, in order, for `LifecycleActor.choose_next` to look at."""

    def __init__(self, queue: RequestQueue[Reply]) -> None:
        self._queue = queue

    @property
    def first(self) -> Reply:
        """The oldest of the highest priority. It costs the same however many wait."""
        return self._queue.first

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Reply]:
        return iter(self._queue)

    def __contains__(self, item: object) -> bool:
        return isinstance(item, Reply) and self._queue.get(item.id) is item


class Desk:
    """Takes requests in, keeps them in order, and gives each its outcome.

    Args:
      waiting_phase: Says where a request that waits stands.
      cancel_running: Gives up one that runs.
      on_settled: Is told each outcome, after its caller.
      on_all_settled: Is told that none is outstanding any more.

    Attributes:
      queue: Those that wait.
      waiting: The same, to look at.
      accepted: How many were taken in; the number of the last.
    """

    def __init__(
        self,
        waiting_phase: Callable[[], Phase],
        cancel_running: Callable[[Reply, By], None],
        on_settled: Callable[[Reply, Outcome], None],
        on_all_settled: Callable[[], None],
    ) -> None:
        self.queue: RequestQueue[Reply] = RequestQueue()
        self.waiting = Waiting(self.queue)
        self.accepted = 0
        self._waiting_phase = waiting_phase
        self._cancel_running = cancel_running
        self._on_settled = on_settled
        self._on_all_settled = on_all_settled
        self._on_cancel = self._cancel  # one object for all
        self._live: dict[int, Reply] = {}
        self._newest: dict[Hashable, Reply] = {}
        self._deadlines: list[tuple[float, int, Limit]] = []
        self._timer = trio.CancelScope()
        self._detached = 0  # requests that are being settled in slices

    def __len__(self) -> int:
        return len(self._live)

    @property
    def settling(self) -> bool:
        """Whether requests are still to get an outcome that is decided."""
        return self._detached > 0

    @property
    def live(self) -> tuple[Reply, ...]:
        """Those that have no outcome yet."""
        return tuple(self._live.values())

    def find(self, id: int) -> Reply | None:
        """Return an accepted request that has no outcome yet."""
        return self._live.get(id)

    def accept(self, request: Request, max_pending: int | None, free: int = 0) -> Reply:
        """Take a request in, and give up the one that it supersedes.

        Args:
          request: What is asked.
          max_pending: How many may wait; None for any number.
          free: Slots that nobody has taken yet: so many of the first do not really wait.

        Raises:
          NotStarted: if the queue is closed.
          QueueFull: if as many wait as may.
        """
        older = None if request.supersede is None else self._newest.get(request.supersede)
        leaving = older is not None and older.id in self.queue
        waiting = len(self.queue) - leaving - free
        if max_pending is not None and waiting >= max_pending:
            raise QueueFull(waiting, max_pending)
        now = trio.current_time()
        reply = Reply(self.accepted + 1, request, self._waiting_phase, self._on_cancel, now)
        self.queue.push(reply.id, reply, request.priority)
        self.accepted = reply.id
        self._live[reply.id] = reply
        self._watch(reply)
        if request.supersede is not None:
            self._newest[request.supersede] = reply
        if older is not None:
            self.give_up(older, "superseded")
        return reply

    def take(self, reply: Reply) -> None:
        """Take one that waits, to be run."""
        self.queue.remove(reply.id)

    def put_back(self, reply: Reply) -> None:
        """Let one that ran wait again, before its equals."""
        reply.leave_slot()
        self.queue.put_back(reply.id, reply, reply.request.priority)
        self._watch(reply, again=True)

    def give_up(self, reply: Reply, by: By, limit: Limit | None = None) -> None:
        """Cancel one, wherever it stands; nothing happens if it has its outcome."""
        if self.queue.remove(reply.id):
            outcome = Cancelled(by, self._waiting_phase(), reply.tokens, limit=limit)
            self.settle(reply, outcome)
        else:
            self._cancel_running(reply, by)

    def settle(self, reply: Reply, outcome: Outcome) -> None:
        """Give a request its outcome: its caller learns of it first."""
        final = reply.settle(outcome)
        del self._live[reply.id]
        key = reply.request.supersede
        if key is not None and self._newest.get(key) is reply:
            del self._newest[key]
        self._on_settled(reply, final)

    def drop(self, ended_by: By | Exception, phase: Phase, nursery: trio.Nursery) -> None:
        """End all that wait. A large number of them is detached now, and settled in slices.

        Args:
          ended_by: Who cancelled them, or what they failed of.
          phase: Where they stood.
          nursery: Where the slices are settled.
        """
        replies = self.queue.clear()
        self._deadlines.clear()
        if len(replies) <= SLICE:
            self._settle_all(replies, ended_by, phase)
        else:
            self._detached += len(replies)
            nursery.start_soon(self._settle_in_slices, replies, ended_by, phase)

    @enable_ki_protection
    async def _settle_in_slices(
        self, replies: list[Reply], ended_by: By | Exception, phase: Phase
    ) -> None:
        with trio.CancelScope(shield=True):
            for start in range(0, len(replies), SLICE):
                self._settle_all(replies[start : start + SLICE], ended_by, phase)
                await trio.lowlevel.checkpoint()
        self._detached -= len(replies)
        if not self._detached:
            self._on_all_settled()

    def _settle_all(self, replies: list[Reply], ended_by: By | Exception, phase: Phase) -> None:
        shared: dict[int, Cancelled | Failed] = {}  # by tokens: one outcome for all that are alike
        for reply in replies:
            tokens = reply.tokens
            if tokens not in shared:
                shared[tokens] = (
                    Failed(ended_by, phase, tokens)
                    if isinstance(ended_by, Exception)
                    else Cancelled(ended_by, phase, tokens)
                )
            self.settle(reply, shared[tokens])

    def _cancel(self, reply: Reply) -> None:
        self.give_up(reply, "caller")

    # -- limits of those that wait -------------------------------------------------------------

    def _watch(self, reply: Reply, *, again: bool = False) -> None:
        limits = reply.request.limits
        if limits is NO_LIMITS:
            return
        ends: list[tuple[float, int, Limit]] = []
        if limits.queue is not None and not again:
            ends.append((reply.submitted_at + limits.queue, reply.id, "queue"))
        if limits.total is not None:
            ends.append((reply.submitted_at + limits.total, reply.id, "total"))
        if not ends:
            return
        if len(self._deadlines) > 2 * len(self.queue) + SLICE:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self.queue]
            heapify(self._deadlines)
        heappush(self._deadlines, min(ends))
        self._timer.deadline = self._deadlines[0][0]

    @enable_ki_protection
    async def watch_deadlines(self) -> None:
        """Give up those that have waited too long. Cancellation: ends this."""
        while True:
            self._timer = trio.CancelScope(
                deadline=self._deadlines[0][0] if self._deadlines else math.inf
            )
            with self._timer:
                await trio.sleep_forever()
            self._expire(trio.current_time())

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number, limit = heappop(self._deadlines)
            if number not in self.queue:
                continue
            reply = self._live[number]
            if limit == "total" or not reply.has_run:
                self.give_up(reply, "deadline", limit)
