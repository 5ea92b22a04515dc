"""Stops that serve first what was accepted."""

from __future__ import annotations

from collections.abc import Callable

import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.lifecycle.verbs import Verb


class Drains:
    """The stops that are under way, each with its deadline.

    Args:
      on_late: Is told that the deadline of one has come.
    """

    def __init__(self, on_late: Callable[[], None]) -> None:
        self._on_late = on_late
        self._verbs: list[Verb] = []

    def __bool__(self) -> bool:
        return bool(self._verbs)

    def add(self, verb: Verb, nursery: trio.Nursery) -> None:
        """Begin one; its deadline is watched in a nursery."""
        self._verbs.append(verb)
        if verb.drain_timeout is not None:
            verb.timer.deadline = trio.current_time() + verb.drain_timeout
            nursery.start_soon(self._watch, verb)

    @enable_ki_protection
    async def _watch(self, verb: Verb) -> None:
        with verb.timer:
            await trio.sleep_forever()
        self._on_late()

    def due(self, live: int) -> Verb | None:
        """Return one that is to stop now, because nothing is left to serve or its time is up.

        Args:
          live: How many requests are left.
        """
        now = trio.current_time()
        due = [verb for verb in self._verbs if not live or verb.timer.deadline <= now]
        return due[0] if due else None

    def take_all(self) -> list[Verb]:
        """End the draining, for whatever reason, and return those who wanted it."""
        verbs, self._verbs = self._verbs, []
        for verb in verbs:
            verb.timer.cancel()
        return verbs
