"""One task for each pipe: bytes from the stream, lines into a channel.

The two never share a reader, a buffer or a channel. A record can only come from stdout, and a log
line only from stderr.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.child.launch import redact
from llamatrio.child.logs import LogChannel
from llamatrio.wire.lines import Line, LineSplitter, Oversize
from llamatrio.wire.records import Malformed, Record, parse

# Small, because all lines of one chunk are taken before any other task runs.
_STATE_CHUNK: Final = 2**13
_LOG_CHUNK: Final = 2**13


class ByteStream(Protocol):
    """The reading end of a pipe."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Wait for some bytes; none at the end."""
        ...


@attrs.define
class Tally:
    """What came out of one child's pipes.

    Attributes:
      stdout_bytes: Bytes on stdout.
      records: Lines there that were lifecycle records.
      unexpected: Lines there that were none.
      malformed: Lines there with the prefix of a record, but not its form.
      oversize: Lines there that were too long, and dropped whole.
      stderr_bytes: Bytes on stderr.
      log_lines: Lines there.
    """

    stdout_bytes: int = 0
    records: int = 0
    unexpected: int = 0
    malformed: int = 0
    oversize: int = 0
    stderr_bytes: int = 0
    log_lines: int = 0


@enable_ki_protection
async def pump_state(
    stream: ByteStream,
    limit: int,
    tally: Tally,
    on_record: Callable[[Record], None],
    on_unexpected: Callable[[bytes], None],
    secrets: tuple[str, ...] = (),
) -> None:
    """Read a child's stdout to its end.

    Args:
      stream: The pipe; whoever opened it closes it.
      limit: The longest line in bytes; a longer one is dropped whole.
      tally: Where to count.
      on_record: Takes every record.
      on_unexpected: Takes every line that is none, cut to a bound if it is too long.
      secrets: Texts to take out of these.
    """
    lines = LineSplitter(limit, keep=200)

    def reject(line: Line | Oversize) -> None:
        on_unexpected(_clean(line, "latin-1", secrets).encode("latin-1"))

    while data := await stream.receive_some(_STATE_CHUNK):
        tally.stdout_bytes += len(data)
        for line in lines.feed(data):
            _take_line(line, tally, on_record, reject)
        await trio.lowlevel.checkpoint()
    if (rest := lines.close()) is not None:
        # Never a record, whatever it looks like: the writer may have died within it.
        tally.unexpected += 1
        reject(rest)


def _take_line(
    line: Line | Oversize,
    tally: Tally,
    on_record: Callable[[Record], None],
    reject: Callable[[Line | Oversize], None],
) -> None:
    if isinstance(line, Oversize):
        tally.oversize += 1
        reject(line)
        return
    match parse(line.data):
        case None:
            tally.unexpected += 1
            reject(line)
        case Malformed():
            tally.malformed += 1
            reject(line)
        case record:
            tally.records += 1
            on_record(record)


@enable_ki_protection
async def pump_logs(
    stream: ByteStream,
    limit: int,
    tally: Tally,
    channel: LogChannel,
    secrets: tuple[str, ...],
) -> None:
    """Read a child's stderr to its end, as fast as the child writes, whoever listens.

    Args:
      stream: The pipe; whoever opened it closes it.
      limit: How many bytes of a line to keep; the rest of it is read and dropped.
      tally: Where to count.
      channel: Where every line goes; it never makes us wait.
      secrets: Texts to take out.
    """
    lines = LineSplitter(limit, keep=limit)

    def put(line: Line | Oversize) -> None:
        text = _clean(line, "utf-8", secrets)
        tally.log_lines += 1
        channel.put(text)

    while data := await stream.receive_some(_LOG_CHUNK):
        tally.stderr_bytes += len(data)
        for line in lines.feed(data):
            put(line)
        await trio.lowlevel.checkpoint()
    if (rest := lines.close()) is not None:
        put(rest)


def _clean(line: Line | Oversize, encoding: str, secrets: tuple[str, ...]) -> str:
    """Decode what was kept of a line, without the secrets in it."""
    cut = isinstance(line, Oversize)
    data = line.head if isinstance(line, Oversize) else line.data
    return redact(data.decode(encoding, "backslashreplace"), secrets, cut=cut)
