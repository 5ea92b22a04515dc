"""PURE. Requests that wait for a slot, in order.

Every operation costs the same however many wait.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from llamatrio.errors import NotStarted

T = TypeVar("T")


class RequestQueue(Generic[T]):
    """First in, first out, with a door."""

    def __init__(self) -> None:
        self._items: OrderedDict[int, T] = OrderedDict()
        self.is_open = False

    def __len__(self) -> int:
        return len(self._items)

    def push(self, id: int, item: T) -> None:
        """Add an item at the end.

        Raises:
          NotStarted: if the queue is closed.
        """
        if not self.is_open:
            raise NotStarted("the provider is not started: call start() first")
        self._items[id] = item

    def pop(self) -> T:
        """Take the item that has waited longest; there must be one."""
        return self._items.popitem(last=False)[1]

    def remove(self, id: int) -> T | None:
        """Take one item out of its turn, or return None if it does not wait here."""
        return self._items.pop(id, None)

    def close(self) -> None:
        """Refuse new items; those that wait go on waiting."""
        self.is_open = False

    def clear(self) -> list[T]:
        """Take all items, in order."""
        items = list(self._items.values())
        self._items.clear()
        return items
