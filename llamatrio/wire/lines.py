"""PURE. Bytes to lines: bounded, incremental, resynchronising only at a newline.

A line over the limit is discarded up to its own newline. llama.cpp's router drops such a line too
but takes its tail for a new line (b11434, tools/server/server-models.cpp, `read_stream`): there,
text that a model or a file name put into a long line can become a state record. Here the tail of
a line can never be anything but the tail of a line.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs


@attrs.frozen
class Line:
    """A whole line, without its newline and without one carriage return before that.

    Attributes:
      data: Its bytes.
      offset: Where it begins in the stream. Lines of the same bytes are equal, wherever they are.
    """

    data: bytes
    offset: int = attrs.field(default=0, eq=False)


@attrs.frozen
class Oversize:
    """A line over the limit.

    Attributes:
      head: Its first bytes, as many as the splitter was told to keep.
      size: Its length in bytes, without the newline.
      offset: Where it begins in the stream.
    """

    head: bytes
    size: int
    offset: int = attrs.field(default=0, eq=False)


class LineSplitter:
    """Cuts one stream of bytes into lines.

    However the stream is chunked, the same lines come out.

    Args:
      limit: The longest line, in bytes without its newline, that still counts as one.
      keep: How many bytes of a longer one to keep; at most `limit`.
    """

    def __init__(self, limit: int, keep: int = 0) -> None:
        self._limit = limit
        self._keep = keep
        self._held = bytearray()
        self._size = 0  # of the line so far, whether held or not
        self._offset = 0  # of its first byte in the stream

    def feed(self, data: bytes | bytearray) -> Iterator[Line | Oversize]:
        """Take the next bytes and give the lines that they complete; exhaust it before the next."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._add(data[start:end])
            yield self._take()
            start = end + 1
        self._add(data[start:])

    def close(self) -> Line | Oversize | None:
        """Give the unfinished line at the end of the stream, or None if there is none.

        It is never a record: its writer may have died within it.
        """
        return self._take() if self._size else None

    @property
    def held(self) -> int:
        """Bytes in memory for the line that is not complete yet; at most the limit."""
        return len(self._held)

    def _add(self, data: bytes | bytearray) -> None:
        self._size += len(data)
        if self._size <= self._limit:
            self._held += data
        elif len(self._held) < self._keep:
            self._held += data[: self._keep - len(self._held)]
        else:
            del self._held[self._keep :]

    def _take(self) -> Line | Oversize:
        held, size, offset = bytes(self._held), self._size, self._offset
        self._held.clear()
        self._size = 0
        self._offset += size + 1  # with the newline
        if size > self._limit:
            return Oversize(held, size, offset)
        return Line(held.removesuffix(b"\r"), offset)
