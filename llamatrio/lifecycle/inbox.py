"""A channel into the actor, and out of it to those who watch: never full, never waiting.

A Trio memory channel without a bound, with two rules on top. Progress that nobody has read yet is
replaced by newer progress, so that only transitions can pile up; and whoever piles up too many of
them is told.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

import attrs
import trio

T = TypeVar("T")


@attrs.define(eq=False)
class _Cell(Generic[T]):
    item: T
    progress: bool


class Inbox(Generic[T]):
    """A channel whose sender never waits."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[_Cell[T]](math.inf)
        self._newest: _Cell[T] | None = None  # while it is unread
        self._closed = False

    def put(self, item: T, *, progress: bool = False) -> None:
        """Add an item; after `close` it is lost.

        Args:
          item: What to add.
          progress: It replaces the newest unread item, if that is progress too.
        """
        if self._closed:
            return
        if progress and self._newest is not None and self._newest.progress:
            self._newest.item = item
            return
        self._newest = _Cell(item, progress)
        self._send.send_nowait(self._newest)

    @property
    def unread(self) -> int:
        """Items that nobody has taken yet."""
        return self._receive.statistics().current_buffer_used

    def close(self) -> None:
        """Let the reader come to its end once it has taken what is there."""
        self._closed = True
        self._send.close()

    def drain(self) -> list[T]:
        """Take what is there, without waiting."""
        cells = []
        while self.unread:
            cells.append(self._receive.receive_nowait())
        self._newest = None
        return [cell.item for cell in cells]

    async def take(self) -> list[T]:
        """Wait for items and take all of them; none are left only after `close`.

        Cancellation: nothing is lost.
        """
        try:
            first = await self._receive.receive()
        except trio.EndOfChannel:
            await trio.lowlevel.checkpoint()
            return []
        return [first.item, *self.drain()]
