"""One task for each pipe: bytes from the stream, lines into a channel.

The two never share a reader, a buffer or a channel. A record can only come from stdout, and a log
line only from stderr.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.child.evidence import MAX_DATA, Outcome, Recording, judge
from llamatrio.child.logs import LogChannel
from llamatrio.wire.lines import Line, LineSplitter, Oversize
from llamatrio.wire.loglines import LogLines, Part
from llamatrio.wire.records import Malformed, Record
from llamatrio.wire.redaction import Secrets, redact_bytes

# Small, because all lines of one chunk are taken before any other task runs.
_STATE_CHUNK: Final = 2**13
_LOG_CHUNK: Final = 2**13
_TURN: Final = 256  # lines of a log that are taken before any other task runs
_SHOWN: Final = 200  # bytes of a line that is too long

# Seconds until what has come of an unfinished line of the log is shown: the first part of it, and
# at most. Each further part takes twice as long as the one before.
_PATIENCE: Final = 0.5
_MOST_PATIENCE: Final = 8.0


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
      dropped_log_bytes: Bytes there that were dropped, of lines that were too long.
      largest_held: The most bytes that were ever held for one unfinished line, on either pipe.
    """

    stdout_bytes: int = 0
    records: int = 0
    unexpected: int = 0
    malformed: int = 0
    oversize: int = 0
    stderr_bytes: int = 0
    log_lines: int = 0
    dropped_log_bytes: int = 0
    largest_held: int = 0

    def note_held(self, size: int) -> None:
        """Note how many bytes are held for an unfinished line."""
        self.largest_held = max(self.largest_held, size)


@enable_ki_protection
async def pump_state(
    stream: ByteStream,
    limit: int,
    tally: Tally,
    on_record: Callable[[Record], None],
    on_unexpected: Callable[[bytes], None],
    secrets: tuple[str, ...] = (),
    recording: Recording | None = None,
) -> None:
    """Read a child's stdout to its end.

    Args:
      stream: The pipe; whoever opened it closes it.
      limit: The longest line in bytes; a longer one is dropped whole.
      tally: Where to count.
      on_record: Takes every record.
      on_unexpected: Takes every line that is none, cut to a bound if it is too long.
      secrets: Texts to take out of these.
      recording: What is kept of it, for those who ask later.
    """
    lines = LineSplitter(limit, keep=min(MAX_DATA, limit))
    kept = recording or Recording()
    hidden = Secrets.in_bytes(secrets)

    def reject(line: Line | Oversize) -> None:
        if isinstance(line, Oversize):
            on_unexpected(redact_bytes(line.head[:_SHOWN], hidden, cut=True))
        else:
            on_unexpected(redact_bytes(line.data, hidden))

    while data := await stream.receive_some(_STATE_CHUNK):
        tally.stdout_bytes += len(data)
        kept.on_state_bytes(data)
        for line in lines.feed(data):
            outcome = judge(line)
            kept.on_state_line(line, outcome)
            _take_line(line, outcome, tally, on_record, reject)
        tally.note_held(lines.held)
        await trio.lowlevel.checkpoint()
    rest = lines.close()
    kept.on_state_end(rest)
    if rest is not None:
        # Never a record, whatever it looks like: the writer may have died within it.
        tally.unexpected += 1
        reject(rest)


def _take_line(
    line: Line | Oversize,
    outcome: Outcome,
    tally: Tally,
    on_record: Callable[[Record], None],
    reject: Callable[[Line | Oversize], None],
) -> None:
    match outcome:
        case None:
            tally.unexpected += 1
            reject(line)
        case Oversize():
            tally.oversize += 1
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
    recording: Recording | None = None,
) -> None:
    """Read a child's stderr to its end, as fast as the child writes, whoever listens.

    What has come of a line that is not finished is passed on after a moment, so that people see a
    progress bar while it lasts, and at the end.

    Args:
      stream: The pipe; whoever opened it closes it.
      limit: How many bytes of a line to keep; the rest of it is read and dropped.
      tally: Where to count.
      channel: Where every line goes; it never makes us wait.
      secrets: Texts to take out.
      recording: What is kept of it, for those who ask later.
    """
    kept = recording or Recording()
    lines = LogLines(limit, Secrets(secrets), colors=channel.colors, on_record=kept.on_log_line)

    def put(part: Part | None) -> None:
        if part is not None:
            tally.log_lines += part.ended
            channel.put_part(part)

    patience = _PATIENCE
    show_at = math.inf
    try:
        while (data := await _receive_until(stream, show_at)) != b"":
            if data is None:
                put(lines.fragment())
                patience = min(2 * patience, _MOST_PATIENCE)
                show_at = math.inf
                continue
            tally.stderr_bytes += len(data)
            ended, dropped = 0, lines.dropped
            for ended, part in enumerate(lines.feed(data), 1):
                put(part)
                if ended % _TURN == 0:
                    await trio.lowlevel.cancel_shielded_checkpoint()  # what was read is not lost
            tally.note_held(lines.held)
            tally.dropped_log_bytes += lines.dropped - dropped
            if ended:
                patience, show_at = _PATIENCE, math.inf
            if lines.fresh and show_at == math.inf:
                show_at = trio.current_time() + patience
            await trio.lowlevel.checkpoint()
    finally:
        put(lines.close())


async def _receive_until(stream: ByteStream, deadline: float) -> bytes | bytearray | None:
    """Wait for some bytes; none at the end of the stream, and None if the time is over.

    Cancellation: nothing is lost.
    """
    with trio.CancelScope(deadline=deadline):
        return await stream.receive_some(_LOG_CHUNK)
    return None
