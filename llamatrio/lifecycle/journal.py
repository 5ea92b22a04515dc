"""PURE. What the lifecycle did: the last steps through its table, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import attrs

from llamatrio.lifecycle.phases import Event, Phase, Undeliverable, step

MAX_STEPS: Final = 512
"""Steps that are kept; older ones are dropped, and counted."""


@attrs.frozen
class Entry:
    """One step through the table of phases, whether it changed the phase or not.

    Attributes:
      seconds: When, on a clock that began with the provider.
      old: The phase before.
      event: What happened.
      new: The phase after.
      generation: The number of the present or last life of the model; 0 before the first.
    """

    seconds: float
    old: Phase
    event: Event
    new: Phase
    generation: int

    def __str__(self) -> str:
        return f"{self.old.name} --{self.event.name}--> {self.new.name}"


class Journal:
    """The last steps of one provider.

    Attributes:
      dropped: How many earlier ones there were.
    """

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=MAX_STEPS)
        self.dropped = 0

    def add(self, entry: Entry) -> None:
        """Add a step, at the cost of the oldest one."""
        self.dropped += len(self._entries) == MAX_STEPS
        self._entries.append(entry)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The last steps, in order."""
        return tuple(self._entries)


def walk(entries: Sequence[Entry], *, whole: bool) -> str | None:
    """Take the events through the table again; say where that leads elsewhere, or None.

    Args:
      entries: What a journal holds.
      whole: Whether they are all there were; a provider begins unloaded.
    """
    if not entries:
        return None
    phase = Phase.UNLOADED if whole else entries[0].old
    for number, entry in enumerate(entries, 1):
        if entry.old is not phase:
            return f"step {number}: {entry} begins in {entry.old.name}, and it was {phase.name}"
        try:
            phase = step(phase, entry.event).phase
        except Undeliverable as exc:
            return f"step {number}: {entry} is not in the table: {exc}"
        if entry.new is not phase:
            return f"step {number}: {entry} leads to {phase.name} by the table"
    return None
