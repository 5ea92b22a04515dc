"""PURE. Requests that wait for a slot, in order.

The higher priority comes first, and among equals the one that has waited longest. Every operation
costs the same however many wait; it grows with the number of different priorities alone.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, takewhile
from typing import Generic, TypeVar

from llamatrio.errors import NotStarted

T = TypeVar("T")


class RequestQueue(Generic[T]):
    """First in, first out, within each priority; with a door."""

    def __init__(self) -> None:
        self._priorities: dict[int, int] = {}  # of each number that waits
        self._levels: dict[int, OrderedDict[int, T]] = {}
        self._order: list[int] = []  # the levels there are, the highest priority last
        self.is_open = False

    def __len__(self) -> int:
        return len(self._priorities)

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._levels[level].values() for level in reversed(self._order))

    def __contains__(self, id: int) -> bool:
        return id in self._priorities

    def get(self, id: int) -> T | None:
        """Return one that waits, or None."""
        priority = self._priorities.get(id)
        return None if priority is None else self._levels[priority][id]

    @property
    def first(self) -> T:
        """Whoever is next; there must be one."""
        return next(iter(self))

    def push(self, id: int, item: T, priority: int = 0) -> None:
        """Add an item behind its equals.

        Raises:
          NotStarted: if the queue is closed.
        """
        if not self.is_open:
            raise NotStarted("the provider is not started: call start() first")
        self._level(priority)[id] = item
        self._priorities[id] = priority

    def put_back(self, id: int, item: T, priority: int = 0) -> None:
        """Add an item before all of its equals that are younger; the door does not matter.

        It looks at those that are older.
        """
        level = self._level(priority)
        older = list(takewhile(lambda other: other < id, level))
        level[id] = item
        for number in (id, *reversed(older)):
            level.move_to_end(number, last=False)
        self._priorities[id] = priority

    def remove(self, id: int) -> T | None:
        """Take one item out, or return None if it does not wait here."""
        priority = self._priorities.pop(id, None)
        if priority is None:
            return None
        level = self._levels[priority]
        item = level.pop(id)
        if not level:
            del self._levels[priority]
            self._order.remove(priority)
        return item

    def close(self) -> None:
        """Refuse new items; those that wait go on waiting."""
        self.is_open = False

    def clear(self) -> list[T]:
        """Take all items, in order."""
        items = list(self)
        self._priorities = {}
        self._levels = {}
        self._order = []
        return items

    def _level(self, priority: int) -> OrderedDict[int, T]:
        if priority not in self._levels:
            self._levels[priority] = OrderedDict()
            insort(self._order, priority)
        return self._levels[priority]
