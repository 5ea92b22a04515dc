r"""PURE. Bytes of a log to lines for people: bounded, without secrets, unable to drive a terminal.

Unlike a record, a line of a log is worth showing before its newline has come: a progress bar may
have none for an hour. Such a line is given in parts, each of which goes on where the one before it
ended. A bare carriage return begins the line anew, as on a terminal: of a progress bar that writes
``\r41%\r42%`` there is only the latest state.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from llamatrio.wire.ansi import Colored, Style, complete_length, strip, take_apart
from llamatrio.wire.lines import Line, Oversize
from llamatrio.wire.records import PREFIX
from llamatrio.wire.redaction import REDACTED, Secrets, Span, replace_spans

_PLAIN: Final = Style()
_Decoder: Final = codecs.getincrementaldecoder("utf-8")


class Part(NamedTuple):
    """A line of a log, or a part of one that was not finished in time.

    Attributes:
      text: What it says, without colours.
      shown: The same as it may be shown: with its colours, if there are to be any.
      continues: Whether it goes on where the part before ended.
      replaces: Whether it takes the place of the parts before, as the line began anew.
      ended: Whether the line ends with it.
    """

    text: str
    shown: str
    continues: bool = False
    replaces: bool = False
    ended: bool = True


class LogLines:
    """Makes lines, and parts of lines, of one log.

    Args:
      limit: How many bytes of a line to keep; the rest is dropped up to where a line begins anew.
      secrets: What to take out.
      colors: Whether to keep colours; otherwise they are taken out.
      on_record: Is told each line that has ended and began as a record does, as it was written;
        of one that began anew, the beginning.
    """

    def __init__(
        self,
        limit: int,
        secrets: Secrets,
        *,
        colors: bool = False,
        on_record: Callable[[Line | Oversize], None] | None = None,
    ) -> None:
        self._limit = limit
        self._secrets = secrets
        self._colors = colors
        self._on_record = on_record
        self._offset = 0  # of the line in the stream
        self._size = 0  # of what has come of it
        self._first: bytes | None = None  # what it was before it began anew
        self._style = _PLAIN  # at the beginning of the line
        self._held = bytearray()
        self._cut = False  # whether something after that was dropped
        self._returned = False  # whether a carriage return came last: a newline may follow
        self._fresh = False
        self._told = False  # whether a part of this line was given
        self._again = False  # whether it has begun anew since then
        self._dropped = 0
        self._given = 0  # characters of the line, without colours, that no part will hold any more

    @property
    def held(self) -> int:
        """Bytes in memory for the line that is not complete yet; at most the limit."""
        return len(self._held)

    @property
    def dropped(self) -> int:
        """Bytes that were dropped so far, of lines that were too long."""
        return self._dropped

    @property
    def fresh(self) -> bool:
        """Whether something has come of the unfinished line since a part of it was asked for."""
        return self._fresh

    def feed(self, data: bytes | bytearray) -> Iterator[Part]:
        """Take the next bytes and give the lines that they end; exhaust it before the next."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            yield self._simple(data[start:end]) or self._last(data[start:end])
            start = end + 1
        if start < len(data):
            self._add(data[start:])

    def _simple(self, line: bytes | bytearray) -> Part | None:
        """Make a part of a whole line of which all that can be special is ruled out: most are such.

        It saves two thirds of the time, and a child may write very many lines.
        """
        if self._size or self._style or len(line) > self._limit or line.startswith(PREFIX):
            return None
        text = _decode(line)
        if not text.isprintable() or self._secrets.present(text):
            return None
        self._offset += len(line) + 1
        return Part(text, text)

    def _last(self, data: bytes | bytearray) -> Part:
        """Take the end of a line."""
        self._add(data)
        if self._on_record is not None:
            self._tell(self._on_record)
        return self._end(cut=self._cut)

    def fragment(self) -> Part | None:
        """Give what has come of the unfinished line and may be shown; None if there is nothing."""
        self._fresh = False
        return self._part(ended=False, cut=False)

    def close(self) -> Part | None:
        """Give the unfinished line at the end of the stream, or None if there is none."""
        if not (self._held or self._told or self._returned):
            return None
        return self._end(cut=True)

    def _add(self, data: bytes | bytearray) -> None:
        self._size += len(data)
        body = data.rstrip(b"\r")
        last = body.rfind(b"\r")
        if body and (self._returned or last >= 0):
            self._begin_anew(body[: max(last, 0)])
            body = body[last + 1 :]
        if body:
            self._returned = False
            room = self._limit - len(self._held)
            self._held += body[:room]
            self._fresh |= room > 0
            if len(body) > room:
                self._cut = True
                self._dropped += len(body) - room
        self._returned |= data[-1:] == b"\r"

    def _begin_anew(self, before: bytes | bytearray) -> None:
        """Forget the line so far, but for the colour that it leaves on."""
        gone = self._held + before
        if self._first is None:
            self._first = bytes(gone[: self._limit])
        if self._colors and b"\x1b" in gone:
            self._style = take_apart(_decode(gone), self._style).style
        self._held.clear()
        self._cut = False
        self._again = self._told
        self._given = 0

    def _tell(self, on_record: Callable[[Line | Oversize], None]) -> None:
        head = bytes(self._held) if self._first is None else self._first
        if not head.startswith(PREFIX):
            return
        if self._size > self._limit:
            on_record(Oversize(head, self._size, self._offset))
        else:
            on_record(Line(head, self._offset))

    def _end(self, *, cut: bool) -> Part:
        part = self._part(ended=True, cut=cut)
        assert part is not None
        self._held.clear()
        self._cut = self._returned = self._fresh = self._told = self._again = False
        self._offset += self._size + 1  # with the newline
        self._given = self._size = 0
        self._first = None
        return part

    def _part(self, *, ended: bool, cut: bool) -> Part | None:
        line = self._take_apart(whole=ended and not cut)
        end = len(line.text) if ended else self._secrets.pending(line.text)
        spans = self._secrets.cut_spans(line.text, end=ended and cut)
        if not ended and end <= self._given:
            return None
        start, again = self._given, self._again
        text = replace_spans(line.text, spans, start, end)
        shown = _paint(line, spans, start, end) if self._colors else text
        continues = self._told and not again
        self._given = max([end, *(last for first, last in spans if first < end)])
        self._told, self._again = True, False
        if ended:
            self._style = _PLAIN if cut else line.style
        return Part(text, shown, continues, again, ended)

    def _take_apart(self, *, whole: bool) -> Colored:
        """Tell the text of the line so far from its colours; of its end only what is certain."""
        if whole:
            text = _decode(self._held)
        else:
            text = _Decoder("backslashreplace").decode(bytes(self._held))
            text = text[: complete_length(text)]
        if self._colors:
            return take_apart(text, self._style)
        return Colored(strip(text), ((0, _PLAIN),))


def _decode(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "backslashreplace")


def _paint(line: Colored, spans: list[Span], start: int, end: int) -> str:
    """Do what `replace_spans` does, in colours."""
    parts = []
    for first, last in spans:
        if first >= end:
            break
        if first >= start:
            parts += [line.paint(start, first), line.paint(first, text=REDACTED)]
        start = max(start, last)
    if start < end:
        parts.append(line.paint(start, end))
    return "".join(parts)
