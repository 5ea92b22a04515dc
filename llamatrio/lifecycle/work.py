"""The requests that run: one task each, at most as many as there are slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.errors import ChildError, ProviderBroken, StreamBroken
from llamatrio.lifecycle.keeper import Generation
from llamatrio.lifecycle.reply import Reply
from llamatrio.outcomes import By, Cancelled, Failed, Outcome

VERDICT: Final = 1.0
"""Seconds for which a request whose connection broke waits to learn whether the child died: the
two are noticed through different doors, in any order."""


@attrs.define(eq=False)
class _Running:
    reply: Reply
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    ended_by: By | Exception | None = None  # who or what had the scope cancelled


class Work:
    """Runs requests in a nursery.

    Args:
      on_finished: Is told the outcome of each, in its own task.
    """

    def __init__(self, on_finished: Callable[[Reply, Outcome], None]) -> None:
        self._on_finished = on_finished
        self._running: dict[int, _Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def replies(self) -> tuple[Reply, ...]:
        """The requests that run now, in the order in which they were started."""
        return tuple(running.reply for running in self._running.values())

    def start(self, nursery: trio.Nursery, reply: Reply, generation: Generation) -> None:
        """Let a request run; the generation must have a session."""
        running = _Running(reply)
        self._running[reply.id] = running
        reply.begin()
        nursery.start_soon(self._serve, running, generation)

    def cancel(self, id: int, by: By) -> None:
        """Cancel one request if it runs. One that finishes all the same stays finished."""
        if running := self._running.get(id):
            running.ended_by = running.ended_by or by
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
    async def _serve(self, running: _Running, generation: Generation) -> None:
        reply = running.reply
        outcome: Outcome | None = None
        try:  # around the scope, which first takes a cancel out of a group
            with running.scope:
                outcome = await self._perform(reply, generation)
        except Exception as exc:  # noqa: BLE001 - whatever a session raises fails its request alone
            outcome = self._failed(exc, reply, generation)
        finally:
            outcome = outcome or self._given_up(running)
            del self._running[reply.id]
            self._on_finished(reply, outcome)

    async def _perform(self, reply: Reply, generation: Generation) -> Outcome:
        try:
            if generation.session is None:
                raise StreamBroken("the model was gone before the request reached it")
            return await generation.session.perform(reply.request, reply.emit)
        except StreamBroken as exc:
            return self._failed(await self._verdict(generation, exc), reply, generation)

    def _failed(self, error: Exception, reply: Reply, generation: Generation) -> Failed:
        if isinstance(error, ChildError) and not error.stderr_tail:
            error.stderr_tail = generation.backend.log_tail
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
        if isinstance(ended_by, str):
            return Cancelled(ended_by, reply.phase, reply.tokens)
        error = ended_by or ProviderBroken("the provider broke while the request was running")
        return Failed(error, reply.phase, reply.tokens)
