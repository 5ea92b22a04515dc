"""The log channel of one child, and its way to stdlib logging.

A child whose stderr is not read stops within 64 KiB (llama.cpp b11434 answers no request then and
does not obey `exit`), so nobody who reads logs may ever hold up the pump: a full channel loses its
oldest lines, counted, and the handlers run in a thread.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from typing import Final

import trio
from trio.lowlevel import enable_ki_protection

LEVELS: Final = {
    "D": logging.DEBUG,
    "I": logging.INFO,
    "W": logging.WARNING,
    "E": logging.ERROR,
}
_BATCH: Final = 100


# Without this, a program that has not set up logging would have every warning of llama.cpp on its
# stderr, among them one for each request that is cancelled. Errors carry the log's end anyway.
logging.getLogger("llamatrio.child").addHandler(logging.NullHandler())


class Tail:
    """The last lines of a log, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: deque[str] = deque()
        self._size = 0

    def add(self, line: str) -> None:
        """Add a line, at the cost of the oldest ones."""
        line = line[-self._limit :]
        self._lines.append(line)
        self._size += len(line) + 1
        while self._size > self._limit + 1:
            self._size -= len(self._lines.popleft()) + 1

    def __str__(self) -> str:
        return "\n".join(self._lines)


class LogChannel:
    """A bounded channel of log lines that never makes its writer wait.

    Args:
      lines: How many lines may wait; beyond that the oldest is dropped.
      tail: How many characters of the last lines to keep, whether they are read or not.

    Attributes:
      dropped: Lines that were dropped.
      tail: The last lines.
    """

    def __init__(self, lines: int, tail: int = 2**14) -> None:
        self.tail = Tail(tail)
        self._send, self._receive = trio.open_memory_channel[str](lines)
        self.dropped = 0
        self._abandoned = False

    def put(self, line: str) -> None:
        """Add a line, at the cost of the oldest one if the channel is full."""
        self.tail.add(line)
        while True:
            try:
                self._send.send_nowait(line)
            except trio.WouldBlock:
                self._receive.receive_nowait()
                self.dropped += 1
            except trio.BrokenResourceError:
                self.dropped += 1  # the reader has left
                return
            else:
                return

    def close(self) -> None:
        """Say that no line will follow. The reader still gets what is there."""
        self._send.close()

    @enable_ki_protection
    async def forward(self, logger: logging.Logger) -> None:
        """Hand lines to a logger until the channel is closed and empty.

        Cancellation: a handler that is running is left to end in its thread, with its one line.
        """
        limiter = trio.CapacityLimiter(1)
        with self._receive:
            async for line in self._receive:
                lines = [line]
                while len(lines) < _BATCH and self._receive.statistics().current_buffer_used:
                    lines.append(self._receive.receive_nowait())
                records = [(level(one), one) for one in lines]
                wanted = [record for record in records if logger.isEnabledFor(record[0])]
                if wanted:
                    await self._hand_over(logger, wanted, limiter)

    async def _hand_over(
        self, logger: logging.Logger, records: list[tuple[int, str]], limiter: trio.CapacityLimiter
    ) -> None:
        try:
            await trio.to_thread.run_sync(
                self._log, logger, records, limiter=limiter, abandon_on_cancel=True
            )
        except RuntimeError:  # no thread can be started: no reason to lose a model
            self.dropped += len(records)
        except trio.Cancelled:
            self._abandoned = True
            raise

    def _log(self, logger: logging.Logger, records: list[tuple[int, str]]) -> None:
        """Run handlers, in a thread."""
        for severity, line in records:
            if self._abandoned:
                return
            try:
                logger.log(severity, "%s", line)
            except Exception:  # noqa: BLE001 - of a handler or a filter; logging passes these on
                if logging.raiseExceptions:
                    traceback.print_exc()


def level(line: str) -> int:
    """Map the letter in llama.cpp's second column to a logging level; a bare line is a warning."""
    columns = line.split(maxsplit=2)
    return LEVELS.get(columns[1], logging.WARNING) if len(columns) > 1 else logging.WARNING
