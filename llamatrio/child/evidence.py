"""PURE. What is kept of a child's pipes: the bytes that were wrong, and the state channel as read.

Both are bounded, and hold no secret: each byte of one is replaced by `#`, so that every offset and
every length stays what it was.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

import attrs

from llamatrio.wire.lines import Line, LineSplitter, Oversize
from llamatrio.wire.records import PREFIX, Loading, Malformed, Record, parse
from llamatrio.wire.redaction import Secrets

MAX_DATA: Final = 4096
"""Characters of one piece of evidence."""

MAX_PIECES: Final = 64
"""Pieces of evidence that are kept; older ones are dropped, and counted."""

MAX_STATE: Final = 2**15
"""Bytes of the state channel that are kept, the last ones."""

_MAX_SEEN: Final = 1024  # lines of the state channel of which it is kept what they were

Reason: TypeAlias = Literal[
    "unexpected line",
    "malformed record",
    "oversize line",
    "unfinished line",
    "unknown state",
    "record on stderr",
]
"""What was wrong: on stdout a line that is no record, one that has the prefix of a record and not
its form, one that is too long, one that had not ended when the pipe did, or a record of a state
that this version does not know; on stderr what would have been a record on stdout."""


# -- bytes as text -----------------------------------------------------------------------------


def escape(data: bytes) -> str:
    """Write bytes as printable ASCII, from which `unescape` gets them back."""
    return data.decode("latin-1").translate(_ESCAPES)


def unescape(text: str) -> bytes:
    r"""Take back what `escape` did.

    Raises:
      ValueError: for a text that it cannot have made.
    """
    if not _ESCAPED.fullmatch(text):
        raise ValueError("not an escaped text")
    return _ESCAPE.sub(_unescape_one, text).encode("latin-1")


def _unescape_one(found: re.Match[str]) -> str:
    code = found[0][1:]
    return "\\" if code == "\\" else chr(int(code[1:], 16))


_ESCAPES: Final = {
    code: "\\\\" if code == ord("\\") else f"\\x{code:02x}"
    for code in range(256)
    if code == ord("\\") or not 0x20 <= code < 0x7F
}
_ESCAPE: Final = re.compile(r"\\(?:\\|x[0-9a-f]{2})")
_ESCAPED: Final = re.compile(r"(?:[ -\[\]-~]|\\(?:\\|x[0-9a-f]{2}))*")


class Mask:
    """Takes secrets out of bytes without moving any other byte, line by line.

    Args:
      secrets: What to take out.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = Secrets.in_bytes(secrets)

    def whole(self, data: bytes) -> bytes:
        """Return bytes without the secrets in them."""
        if not self._secrets.spans(data.decode("latin-1")):
            return data
        return b"\n".join(self._hide(line, cut=False) for line in data.split(b"\n"))

    def broken_off(self, data: bytes) -> bytes:
        """Return a line that is not whole without the secrets in it, nor the beginning of one at
        its end."""
        return self._hide(data, cut=True)

    @property
    def longest(self) -> int:
        """Bytes of the longest secret."""
        return self._secrets.longest

    def _hide(self, data: bytes, *, cut: bool) -> bytes:
        spans = self._secrets.cut_spans(data.decode("latin-1"), end=cut)
        for start, end in spans:
            data = data[:start] + b"#" * (end - start) + data[end:]
        return data


# -- evidence ----------------------------------------------------------------------------------


@attrs.frozen
class Evidence:
    """Bytes that should not have been where they were.

    Attributes:
      stream: The pipe that they came from.
      offset: Where they began, in bytes from the beginning of that pipe.
      data: The first of them, as `escape` writes them, at most 4096 characters.
      size: How many bytes there were in all, of this line.
      sha256: Of the bytes that were kept.
      reason: What is wrong with them.
      pid: The process that wrote them; None if that is not known.
    """

    stream: Literal["stdout", "stderr"]
    offset: int
    data: str
    size: int
    sha256: str
    reason: Reason
    pid: int | None = None


@attrs.frozen
class _Piece:
    """Evidence that nobody has asked for yet: there may be thousands of these a second.

    The secrets are taken out when it is asked for, which costs more than all the rest.
    """

    stream: Literal["stdout", "stderr"]
    offset: int
    data: bytes
    size: int
    reason: Reason
    pid: int | None
    mask: Mask

    def written_out(self) -> Evidence:
        text = _within(escape(self.mask.broken_off(self.data)[:MAX_DATA]), MAX_DATA)
        digest = hashlib.sha256(unescape(text)).hexdigest()
        return Evidence(self.stream, self.offset, text, self.size, digest, self.reason, self.pid)


def _within(text: str, limit: int) -> str:
    """Cut an escaped text to a limit, but not within an escape."""
    whole = _ESCAPED.match(text[:limit])
    assert whole is not None  # it matches nothing, too
    return whole[0]


class EvidenceRing:
    """The last pieces of evidence, for all children of one backend.

    Attributes:
      dropped: How many older ones there were.
    """

    def __init__(self) -> None:
        self._pieces: deque[_Piece] = deque(maxlen=MAX_PIECES)
        self.dropped = 0

    def add(self, piece: _Piece) -> None:
        """Add a piece, at the cost of the oldest one."""
        self.dropped += len(self._pieces) == MAX_PIECES
        self._pieces.append(piece)

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def pieces(self) -> tuple[Evidence, ...]:
        """What there is, the oldest first."""
        return tuple(piece.written_out() for piece in self._pieces)


# -- the state channel -------------------------------------------------------------------------


@attrs.frozen
class Seen:
    """What one line of the state channel was taken for.

    Attributes:
      offset: Where it began.
      what: The state of a record, such as "ready", with the progress of a load; else "unexpected",
        "malformed", "oversize", "unfinished" or "unknown".
      digest: The beginning of the SHA-256 of its bytes, without secrets.
    """

    offset: int
    what: str
    digest: str


Outcome: TypeAlias = Record | Malformed | Oversize | None
"""What a whole line is: a record, or one of the things that are none."""


def judge(line: Line | Oversize) -> Outcome:
    """Say what a whole line of the state channel is."""
    return line if isinstance(line, Oversize) else parse(line.data)


def _word(outcome: Outcome) -> str:
    match outcome:
        case None:
            return "unexpected"
        case Loading(value=None):
            return "loading"
        case Loading(value=value):
            return f"loading {value:g}"
        case _:
            return type(outcome).__name__.lower()


_UNFINISHED: Final = "unfinished"

_REASONS: Final[dict[str, Reason]] = {
    "unexpected": "unexpected line",
    "malformed": "malformed record",
    "oversize": "oversize line",
    _UNFINISHED: "unfinished line",
    "unknown": "unknown state",
}


@attrs.frozen
class State:
    """The end of a state channel, and what its lines were taken for.

    Attributes:
      offset: Where `data` begins in the stream: always at the beginning of a line.
      data: The last bytes of the stream, without secrets.
      size: Bytes of the whole stream.
      limit: The longest line, in bytes.
      ended: Whether it was read to its end; if not, there may be lines in `data` that nobody took.
      seen: What each line in `data` was taken for, while the child lived.
    """

    offset: int
    data: bytes
    size: int
    limit: int
    ended: bool
    seen: tuple[Seen, ...]

    def within(self, limit: int) -> State:
        """Return the end of this that has no more than so many bytes."""
        if len(self.data) <= limit:
            return self
        cut = len(self.data) - limit
        newline = self.data.find(b"\n", cut - 1)
        start = len(self.data) if newline < 0 else newline + 1
        offset = self.offset + start
        seen = tuple(one for one in self.seen if one.offset >= offset)
        return attrs.evolve(self, offset=offset, data=self.data[start:], seen=seen)

    def read_again(self) -> tuple[Seen, ...]:
        """Put the bytes through the same code that read them from the pipe."""
        lines = LineSplitter(self.limit, keep=min(MAX_DATA, self.limit))
        found = [(line.offset, _word(judge(line))) for line in lines.feed(self.data)]
        if (rest := lines.close()) is not None:
            found.append((rest.offset, _UNFINISHED))
        return _see(((self.offset + offset, what) for offset, what in found), self)


def _see(lines: Iterable[tuple[int, str]], state: State) -> tuple[Seen, ...]:
    """Add its digest to each line that is kept."""
    return tuple(
        Seen(offset, what, _digest(state.data, offset - state.offset))
        for offset, what in lines
        if offset >= state.offset
    )


def _digest(data: bytes, start: int) -> str:
    end = data.find(b"\n", start)
    return hashlib.sha256(data[start : end if end >= 0 else len(data)]).hexdigest()[:16]


class Recording:
    """What is kept of one child's pipes, for those who ask why it ended.

    Args:
      evidence: Where to put what is wrong.
      secrets: Texts that must not be kept.
      limit: The longest line of the state channel, in bytes.

    Attributes:
      pid: The process, as soon as it is known.
    """

    def __init__(
        self,
        evidence: EvidenceRing | None = None,
        secrets: Iterable[str] = (),
        limit: int = 2**20,
    ) -> None:
        self.pid: int | None = None
        self._evidence = EvidenceRing() if evidence is None else evidence
        self._mask = Mask(secrets)
        self._limit = limit
        self._tail = bytearray()
        self._size = 0
        self._ended = False
        self._seen: deque[tuple[int, str]] = deque(maxlen=_MAX_SEEN)

    def on_state_bytes(self, data: bytes | bytearray) -> None:
        """Take a chunk of stdout."""
        self._size += len(data)
        self._tail += data
        if len(self._tail) > 2 * MAX_STATE:  # one byte more than what is kept: see `state`
            del self._tail[: -MAX_STATE - 1]

    def on_state_line(self, line: Line | Oversize, outcome: Outcome) -> None:
        """Take a whole line of stdout, and what it was taken for."""
        self._note(line, _word(outcome))

    def on_state_end(self, rest: Line | Oversize | None) -> None:
        """Take the end of stdout, and the line that is unfinished there, if there is one."""
        self._ended = True
        if rest is not None:
            self._note(rest, _UNFINISHED)

    def on_log_line(self, line: Line | Oversize) -> None:
        """Take a whole line of stderr."""
        data = line.head if isinstance(line, Oversize) else line.data
        if data.startswith(PREFIX):
            self._keep("stderr", line, "record on stderr")

    def state(self) -> State:
        """Return the end of the state channel."""
        body, newline, rest = bytes(self._tail).rpartition(b"\n")
        text, tail = (rest[:-1], b"\r") if rest.endswith(b"\r") else (rest, b"")
        data = self._mask.whole(body) + newline + self._mask.broken_off(text) + tail
        offset = self._size - len(data)
        state = State(offset, data, self._size, self._limit, self._ended, ())
        if state.offset > 0 or len(data) > MAX_STATE:
            state = state.within(MAX_STATE)
        if len(self._seen) == _MAX_SEEN:
            state = state.within(self._size - max(state.offset, self._seen[0][0]))
        return attrs.evolve(state, seen=_see(self._seen, state))

    def _note(self, line: Line | Oversize, what: str) -> None:
        self._seen.append((line.offset, what))
        if reason := _REASONS.get(what):
            self._keep("stdout", line, reason)

    def _keep(
        self, stream: Literal["stdout", "stderr"], line: Line | Oversize, reason: Reason
    ) -> None:
        if isinstance(line, Oversize):
            head, size = line.head, line.size
        else:
            head, size = line.data, len(line.data)
        head = head[: MAX_DATA + self._mask.longest]
        piece = _Piece(stream, line.offset, head, size, reason, self.pid, self._mask)
        self._evidence.add(piece)
