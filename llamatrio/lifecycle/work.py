"""The requests that run: one task each, at most as many as there are slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.errors import ChildError, StreamBroken
from llamatrio.lifecycle.keeper import Generation
from llamatrio.lifecycle.reply import Reply
from llamatrio.outcomes import By, Cancelled, Failed, Outcome

_VERDICT: Final = 1.0
"""Seconds for which a request whose connection broke waits to learn whether the child died: the
two are noticed through different doors, in any order."""


@attrs.define(eq=False)
class _Running:
    reply: Reply
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    instead: Outcome | By = "caller"  # the outcome if the scope is cancelled, or who did it


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
            if not running.scope.cancel_called:
                running.instead = by
            running.scope.cancel()

    def fail_all(self, error: Exception) -> None:
        """End all that run, as failed."""
        for running in self._running.values():
            reply = running.reply
            running.instead = Failed(error, reply.phase, reply.tokens)
            running.scope.cancel()

    @enable_ki_protection
    async def _serve(self, running: _Running, generation: Generation) -> None:
        reply = running.reply
        outcome: Outcome | None = None
        try:
            with running.scope:
                outcome = await self._perform(reply, generation)
        finally:
            if outcome is None:
                outcome = self._given_up(running)
            del self._running[reply.id]
            self._on_finished(reply, outcome)

    async def _perform(self, reply: Reply, generation: Generation) -> Outcome:
        error: Exception
        try:
            if generation.session is None:
                raise StreamBroken("the model was gone before the request reached it")
            return await generation.session.perform(reply.request, reply.emit)
        except StreamBroken as exc:
            error = await self._verdict(generation, exc)
        except Exception as exc:  # noqa: BLE001 - whatever a session raises fails its request alone
            error = exc
        if isinstance(error, ChildError) and not error.stderr_tail:
            error.stderr_tail = generation.backend.log_tail
        return Failed(error, reply.phase, reply.tokens)

    async def _verdict(self, generation: Generation, error: StreamBroken) -> Exception:
        """Find out why a request broke: the end of the child explains more than its socket."""
        with trio.move_on_after(_VERDICT):
            end = await generation.wait_ended()
            if end.error is not None:
                return end.error
        return error

    def _given_up(self, running: _Running) -> Outcome:
        if not isinstance(running.instead, str):
            return running.instead
        return Cancelled(running.instead, running.reply.phase, running.reply.tokens)
