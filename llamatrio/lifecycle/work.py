"""The requests that run: one task each, at most as many as there are slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.errors import ChildError, LlamatrioError, ProviderBroken, StreamBroken
from llamatrio.lifecycle.keeper import Generation
from llamatrio.lifecycle.reply import Reply
from llamatrio.outcomes import By, Cancelled, Failed, Finished, Limit, Outcome
from llamatrio.requests import NO_LIMITS, Admitted, Delta, PromptProgress, Request

VERDICT: Final = 1.0
"""Seconds for which a request whose connection broke waits to learn whether the child died: the
two are noticed through different doors, in any order."""


@attrs.define(eq=False)
class _Running:
    reply: Reply
    generation: Generation
    request: Request | None  # None: its answer had reached its bound when its model died
    began: float = attrs.field(factory=trio.current_time)
    last_piece: float | None = None
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    limit: Limit | None = None  # whose deadline the scope has
    ended_by: By | Exception | None = None  # who or what had the scope cancelled

    def set_deadline(self) -> None:
        """Let the scope end at the nearest of the request's limits."""
        limits, reply = self.reply.request.limits, self.reply
        if limits is NO_LIMITS or self.ended_by is not None:
            return
        ends: dict[Limit, float] = {}
        if limits.total is not None:
            ends["total"] = reply.submitted_at + limits.total
        if self.last_piece is None and limits.first_token is not None:
            ends["first_token"] = self.began + limits.first_token
        if self.last_piece is not None and limits.silence is not None:
            ends["silence"] = self.last_piece + limits.silence
        if ends:
            self.scope.deadline, self.limit = min((end, name) for name, end in ends.items())
        else:
            self.scope.deadline, self.limit = math.inf, None


class Work:
    """Runs requests in a nursery.

    Args:
      on_finished: Is told, in the task of a request that runs no more, how it ended, and whether
        it failed because its generation died.

    Attributes:
      pace: Seconds from one piece of an answer to the next, as seen of late; 0 before the first.
    """

    def __init__(self, on_finished: Callable[[Reply, Generation, Outcome, bool], None]) -> None:
        self._on_finished = on_finished
        self._running: dict[int, _Running] = {}
        self.pace = 0.0

    def __len__(self) -> int:
        return len(self._running)

    @property
    def replies(self) -> tuple[Reply, ...]:
        """The requests that run now, in the order in which they were started."""
        return tuple(running.reply for running in self._running.values())

    def start(self, nursery: trio.Nursery, reply: Reply, generation: Generation) -> None:
        """Let a request run; the generation must have a session."""
        running = _Running(reply, generation, reply.begin())
        self._running[reply.id] = running
        running.set_deadline()
        nursery.start_soon(self._serve, running)

    def cancel(self, id: int, by: By) -> None:
        """Cancel one request if it runs. One that finishes all the same stays finished."""
        if running := self._running.get(id):
            if not isinstance(running.ended_by, str):  # an error may still wait for its verdict
                running.ended_by = by
            running.scope.cancel()

    def fail_all(self, error: Exception, *, after: float = 0) -> None:
        """End all that run, as failed.

        Args:
          error: What broke.
          after: Seconds in which they may still come to an end by themselves.
        """
        deadline = trio.current_time() + after
        for running in self._running.values():
            running.ended_by = running.ended_by or error
            running.scope.deadline = min(running.scope.deadline, deadline)

    @enable_ki_protection
    async def _serve(self, running: _Running) -> None:
        reply, generation = running.reply, running.generation
        outcome: Outcome | None = None
        try:  # around the scope, which first takes a cancel out of a group
            with running.scope:
                outcome = await self._perform(running)
        except Exception as exc:  # noqa: BLE001 - whatever a session raises fails its request alone
            outcome = self._failed(exc, reply, generation)
        finally:
            outcome = outcome or self._given_up(running)
            died = isinstance(outcome, Failed) and generation.died_of(outcome.error)
            if died and isinstance(running.ended_by, str):  # it was not to run again in any case
                outcome, died = self._given_up(running), False
            del self._running[reply.id]
            self._on_finished(reply, generation, outcome, died)

    async def _perform(self, running: _Running) -> Outcome:
        reply, generation = running.reply, running.generation
        if running.request is None:
            return reply.whole(Finished("length"))
        try:
            if generation.session is None:
                raise StreamBroken("the model was gone before the request reached it")
            finished = await generation.session.perform(
                running.request, lambda piece: self._emit(running, piece)
            )
        except StreamBroken as exc:
            return self._failed(await self._verdict(generation, exc), reply, generation)
        return reply.whole(finished)

    def _emit(self, running: _Running, piece: Admitted | Delta | PromptProgress) -> None:
        running.reply.emit(piece)
        running.generation.signs += 1
        if isinstance(piece, Delta):
            now = trio.current_time()
            if running.last_piece is not None:
                self.pace += 0.1 * (now - running.last_piece - self.pace)
            running.last_piece = now
            running.set_deadline()

    def _failed(self, error: Exception, reply: Reply, generation: Generation) -> Failed:
        if isinstance(error, ChildError) and not error.stderr_tail:
            error.stderr_tail = generation.backend.log_tail
        if isinstance(error, LlamatrioError):
            error.__traceback__ = None  # it leads to the reply, which leads to the error
        return Failed(error, reply.phase, reply.tokens)

    async def _verdict(self, generation: Generation, error: StreamBroken) -> Exception:
        """Find out why a request broke: the end of the child explains more than its socket."""
        with trio.move_on_after(VERDICT):
            end = await generation.wait_ended()
            if end.error is not None:
                return end.error
        return error

    def _given_up(self, running: _Running) -> Outcome:
        reply, ended_by = running.reply, running.ended_by
        if ended_by is None and running.limit is not None and running.scope.cancelled_caught:
            return Cancelled("deadline", reply.phase, reply.tokens, limit=running.limit)
        if isinstance(ended_by, str):
            return Cancelled(ended_by, reply.phase, reply.tokens)
        error = ended_by or ProviderBroken("the provider broke while the request was running")
        return Failed(error, reply.phase, reply.tokens)
