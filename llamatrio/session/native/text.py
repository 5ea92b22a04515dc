"""PURE. From tokens to text: characters that several tokens make, and texts that end an answer."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextAssembler:
    """Makes text of the bytes of tokens, up to a stop string.

    However the bytes are cut into tokens, the text is the same: what may yet become a stop string,
    or a character, is held back until that is known.

    Args:
      stops: Texts that end the answer. They are not part of it.

    Attributes:
      stopped: The text that ended it, once one did.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped: str | None = None

    def feed(self, data: bytes) -> str:
        """Take the bytes of a token; return the text that is sure by now."""
        return self._take(self._decoder.decode(data))

    def close(self) -> str:
        """Return what was held back, when no token follows."""
        text = self._take(self._decoder.decode(b"", final=True))
        if self.stopped is not None:
            return text
        held, self._held = self._held, ""
        return text + held

    def _take(self, new: str) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + new
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:  # the one that is whole first, as if the characters came one by one
            place, self.stopped = min(found, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            self._held = ""
            return text[:place]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of a text with which a stop string begins."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
