"""The log channel of one child, and its way to stdlib logging.

A child whose stderr is not read stops within 64 KiB (llama.cpp b11434 answers no request then and
does not obey `exit`), so nobody who reads logs may ever hold up the pump: a full channel loses its
oldest lines, counted, and the handlers run in a thread.
"""

from __future__ import annotations

import logging
import traceback
import weakref
from collections import deque
from typing import Final

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.wire.loglines import Part

LEVELS: Final = {
    "D": logging.DEBUG,
    "I": logging.INFO,
    "W": logging.WARNING,
    "E": logging.ERROR,
}
_BATCH: Final = 100
_LINGER: Final = 0.5  # seconds for which handlers may go on after a model's end


# Without this, a program that has not set up logging would have every warning of llama.cpp on its
# stderr, among them one for each request that is cancelled. Errors carry the log's end anyway.
logging.getLogger("llamatrio.child").addHandler(logging.NullHandler())


@attrs.frozen
class LogLine:
    """A line of a child's log, or a part of one that was not finished in time.

    Attributes:
      text: What it says, ready to be shown.
      level: Its level, as in the module `logging`.
      continues: Whether it goes on where the one before ended.
      ended: Whether the line ends with it.
    """

    text: str
    level: int
    continues: bool = False
    ended: bool = True


class Tail:
    """The last lines of a log, up to a number of characters."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: deque[str] = deque()
        self._size = 0
        self._open = ""  # the line that is not finished

    def add(self, line: str) -> None:
        """Add a line, at the cost of the oldest ones."""
        line = line[-self._limit :]
        self._lines.append(line)
        self._size += len(line) + 1
        while self._size > self._limit + 1:
            self._size -= len(self._lines.popleft()) + 1

    def add_part(self, part: Part) -> None:
        """Add a part of a line, which becomes one line with those that it goes on from."""
        line = (self._open + part.text if part.continues else part.text)[-self._limit :]
        self._open = "" if part.ended else line
        if part.ended:
            self.add(line)

    def __str__(self) -> str:
        lines = deque(self._lines)
        if self._open:
            lines.append(self._open)
            size = self._size + len(self._open)
            while size > self._limit:
                size -= len(lines.popleft()) + 1
        return "\n".join(lines)


class LogQueue:
    """The lines that one reader has still to read: bounded, and never in the way of the writer.

    Args:
      lines: How many lines may wait; beyond that the oldest is dropped.
      size: How many characters they may have together.

    Attributes:
      dropped: Lines that were dropped.
    """

    def __init__(self, lines: int, size: int = 2**20) -> None:
        self._most = lines
        self._most_size = size
        self._lines: deque[LogLine] = deque()
        self._size = 0
        self._closed = False
        self._left = False
        self._readers = trio.lowlevel.ParkingLot()
        self.dropped = 0

    def put(self, line: LogLine) -> None:
        """Add a line, at the cost of the oldest ones."""
        if self._left or self._closed:
            self.dropped += 1
            return
        self._lines.append(line)
        self._size += len(line.text)
        while len(self._lines) > self._most or (
            self._size > self._most_size and len(self._lines) > 1
        ):
            self._size -= len(self._lines.popleft().text)
            self.dropped += 1
        if self._readers:
            self._readers.unpark()

    def close(self) -> None:
        """Say that no line will follow. The reader still gets what is there."""
        self._closed = True
        self._readers.unpark_all()

    def leave(self) -> None:
        """Say that nobody reads any more: what is there is forgotten, what follows is dropped."""
        self._left = True
        self._lines.clear()
        self._size = 0

    def __len__(self) -> int:
        return len(self._lines)

    async def take(self, most: int = 1) -> list[LogLine]:
        """Wait for lines and take some; there are none only after `close`.

        Cancellation: nothing is lost.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._lines and not self._closed:
            await self._readers.park()
        taken = [self._lines.popleft() for _ in range(min(most, len(self._lines)))]
        self._size -= sum(len(line.text) for line in taken)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return taken


class LogChannel:
    """One child's log, on its way to the logger and to all others who follow it.

    Args:
      lines: How many lines may wait for a reader; beyond that the oldest is dropped.
      tail: How many characters of the last lines to keep, whether they are read or not.
      size: How many characters may wait for a reader.
      followers: Who else gets every line.
      colors: Whether lines keep their colours on their way; the tail has none.

    Attributes:
      tail: The last lines.
      colors: As above.
      given_up: Lines that `forward` left behind when it was cancelled.
    """

    def __init__(
        self,
        lines: int,
        tail: int = 2**14,
        *,
        size: int = 2**20,
        followers: Followers | None = None,
        colors: bool = False,
    ) -> None:
        self.tail = Tail(tail)
        self.colors = colors
        self._queue = LogQueue(lines, size)
        self._followers = followers
        self._level = logging.WARNING  # of the unfinished line
        self._abandoned = False
        self._begun = 0  # lines of a batch
        self.given_up = 0

    @property
    def dropped(self) -> int:
        """Lines that were dropped on their way to the logger, whose handlers were too slow."""
        return self._queue.dropped

    def put(self, line: str) -> None:
        """Add a line. It never waits."""
        self.tail.add(line)
        self._tell(LogLine(line, level(line)))

    def remark(self, line: str) -> None:
        """Add a line of ours: what the tail tells is the child's own."""
        self._tell(LogLine(line, level(line)))

    def put_part(self, part: Part) -> None:
        """Add a line, or a part of one. It never waits."""
        self.tail.add_part(part)
        if not part.continues:
            self._level = level(part.text)
        elif not part.shown and not part.ended:
            return
        self._tell(LogLine(part.shown, self._level, part.continues, part.ended))

    def _tell(self, line: LogLine) -> None:
        self._queue.put(line)
        if self._followers is not None:
            self._followers.put(line)

    def close(self) -> None:
        """Say that no line will follow. The reader still gets what is there."""
        self._queue.close()

    @enable_ki_protection
    async def forward(self, logger: logging.Logger) -> None:
        """Hand lines to a logger until the channel is closed and empty.

        Cancellation: a handler that is running is left to end in its thread, with its one line.
        """
        limiter = trio.CapacityLimiter(1)
        try:
            while lines := await self._queue.take(_BATCH):
                wanted = [
                    (line.level, line.text)
                    for line in lines
                    if logger.isEnabledFor(line.level) and (line.text or not line.continues)
                ]
                if wanted:
                    await self._hand_over(logger, wanted, limiter)
        finally:
            self.given_up += len(self._queue)
            self._queue.leave()

    async def _hand_over(
        self, logger: logging.Logger, records: list[tuple[int, str]], limiter: trio.CapacityLimiter
    ) -> None:
        self._begun = 0
        try:
            await trio.to_thread.run_sync(
                self._log, logger, records, limiter=limiter, abandon_on_cancel=True
            )
        except RuntimeError:  # no thread can be started: no reason to lose a model
            self._queue.dropped += len(records)
        except trio.Cancelled:
            self._abandoned = True
            self.given_up += len(records) - self._begun
            raise

    def _log(self, logger: logging.Logger, records: list[tuple[int, str]]) -> None:
        """Run handlers, in a thread."""
        for number, (severity, line) in enumerate(records, 1):
            if self._abandoned:
                return
            self._begun = number
            try:
                logger.log(severity, "%s", line)
            except Exception:  # noqa: BLE001 - of a handler or a filter; logging passes these on
                if logging.raiseExceptions:
                    traceback.print_exc()


class LogWatch:
    """Follows the log of a provider's children; see `LocalProvider.watch_logs`."""

    def __init__(self, queue: LogQueue) -> None:
        self._queue = queue

    @property
    def dropped(self) -> int:
        """Lines that this reader has lost, because it was too slow."""
        return self._queue.dropped

    def close(self) -> None:
        """Let the loop end when it has taken what is there."""
        self._queue.close()

    def __aiter__(self) -> LogWatch:
        return self

    async def __anext__(self) -> LogLine:
        """Wait for the next line.

        Cancellation: nothing is lost.
        """
        if lines := await self._queue.take():
            return lines[0]
        raise StopAsyncIteration


class Followers:
    """Those who follow the log of all children of a backend; one that is dropped is forgotten."""

    def __init__(self) -> None:
        self._queues: weakref.WeakSet[LogQueue] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._queues)

    def put(self, line: LogLine) -> None:
        """Give a line to all of them."""
        if self._queues:  # iterating over none takes longer
            for queue in self._queues:
                queue.put(line)

    def add(self, lines: int) -> LogWatch:
        """Return what gives all lines that follow."""
        queue = LogQueue(lines)
        self._queues.add(queue)
        return LogWatch(queue)

    def close(self) -> None:
        """Let all who follow come to an end."""
        for queue in self._queues:
            queue.close()
        self._queues.clear()


class BackendLog:
    """The log of a backend: of one model after another.

    Args:
      logger: Where the lines go.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._followers = Followers()
        self._channel: LogChannel | None = None
        self._handlers = trio.CancelScope()
        self._dropped = 0  # of models that are gone

    @property
    def tail(self) -> str:
        """The last lines of the present model's log; empty if there is none."""
        return str(self._channel.tail) if self._channel else ""

    @property
    def dropped(self) -> int:
        """Lines that were lost because handlers of the logger were too slow."""
        return self._dropped + (self._channel.dropped if self._channel else 0)

    def watch(self, lines: int) -> LogWatch:
        """Return what gives all lines that follow, of all models."""
        return self._followers.add(lines)

    def end(self) -> None:
        """Let those who watch come to an end."""
        self._followers.close()

    def open(self, lines: int, tail: int = 2**14, *, colors: bool = False) -> LogChannel:
        """Begin the log of a model, which `forward` is to hand on; `close` ends it."""
        self._handlers = trio.CancelScope(shield=True)
        self._channel = LogChannel(lines, tail, followers=self._followers, colors=colors)
        return self._channel

    def close(self) -> None:
        """Say that the model is gone. Handlers may go on for a moment, and no longer."""
        assert self._channel is not None
        self._channel.close()
        self._handlers.deadline = trio.current_time() + _LINGER
        self._dropped += self._channel.dropped
        self._channel = None

    @enable_ki_protection
    async def forward(self, channel: LogChannel) -> None:
        """Hand the lines of a model to the logger.

        Cancellation: has no effect; it ends soon after `close`.
        """
        with self._handlers:
            await channel.forward(self._logger)
        self._dropped += channel.given_up


def level(line: str) -> int:
    """Map the letter in llama.cpp's second column to a logging level; a bare line is a warning."""
    columns = line.split(maxsplit=2)
    return LEVELS.get(columns[1], logging.WARNING) if len(columns) > 1 else logging.WARNING
