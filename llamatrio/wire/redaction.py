"""PURE. Secrets taken out of texts, whole or in pieces.

Occurrences that overlap are taken out together, so that nothing of one is left where another was
found first. A secret is also found as JSON, a URL or Python's `repr` would write it, and each line
of a secret of several lines by itself. It is not found in base64, nor with anything between two of
its characters; colours there are the business of `llamatrio.wire.ansi`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias
from urllib.parse import quote, quote_plus

from llamatrio.wire.ansi import escape

REDACTED: Final = "[redacted]"
_GIVEAWAY: Final = 4  # characters of a secret that may be left at a cut
_LEAST_LINE: Final = 8  # characters of one line of a secret that is a secret by itself

Span: TypeAlias = tuple[int, int]
"""Where something begins and ends in a text."""


class Secrets:
    """What must not be shown, made ready to be looked for.

    Args:
      texts: The secrets; empty ones are left out.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._take(form for text in texts for form in _forms(text))

    def _take(self, forms: Iterable[str]) -> None:
        self._forms = sorted(set(forms), key=lambda form: (-len(form), form))
        self._longest = len(self._forms[0]) if self._forms else 0

    def __repr__(self) -> str:
        return f"<Secrets {len(self._forms)}>"

    @classmethod
    def in_bytes(cls, texts: Iterable[str]) -> Secrets:
        """Make secrets ready to be looked for in bytes that were decoded as Latin-1."""
        secrets = cls(())
        forms = (form for text in texts for form in _forms(text))
        secrets._take(_encode(form).decode("latin-1") for form in forms)
        return secrets

    @property
    def longest(self) -> int:
        """Characters of the longest secret, in its longest form."""
        return self._longest

    def present(self, text: str) -> bool:
        """Say whether there is a secret in a text."""
        for form in self._forms:  # noqa: SIM110 - a generator would take longer than the search
            if form in text:
                return True
        return False

    def spans(self, text: str) -> list[Span]:
        """Say where secrets are; those that overlap are one."""
        return join_spans(self._occurrences(text))

    def _occurrences(self, text: str) -> Iterator[Span]:
        """Yield every one, also those that overlap.

        No pattern is compiled: `re` would keep it, and the secrets in it, when they are forgotten.
        """
        for form in self._forms:
            start = text.find(form)
            while start >= 0:
                yield start, start + len(form)
                start = text.find(form, start + 1)

    def pending(self, text: str) -> int:
        """Say where a secret may begin that the text ends within; at its end for nowhere."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            rest = text[start:]
            if any(form.startswith(rest) and form != rest for form in self._forms):
                return start
        return len(text)

    def cut_spans(self, text: str, *, start: bool = False, end: bool = True) -> list[Span]:
        """Say where secrets are in a text that was cut out of a longer one.

        A piece of a secret at the cut is taken for one if it is longer than four characters, or
        than a quarter of the secret.

        Args:
          text: The text.
          start: Whether it was cut off at its start.
          end: Whether it was cut off at its end.
        """
        found = self.spans(text)
        if end:
            found += _first(_pieces_at_end(self._forms, text))
        if start:
            found += _first(_pieces_at_start(self._forms, text))
        return join_spans(found)


def _telling(form: str) -> int:
    """Return how many characters of a secret give it away."""
    return min(_GIVEAWAY, max(1, len(form) // 4)) + 1


# Both look for the few characters that a piece ends or begins with, and not for all pieces: a
# secret of some thousand characters, such as a certificate, would take too long.


def _pieces_at_end(forms: Iterable[str], text: str) -> Iterator[Span]:
    """Find the longest beginning of each secret with which a text ends."""
    for form in forms:
        head = form[: _telling(form)]
        place = text.find(head, max(0, len(text) - len(form) + 1))
        while place >= 0 and not form.startswith(text[place:]):
            place = text.find(head, place + 1)
        if place >= 0:
            yield place, len(text)


def _pieces_at_start(forms: Iterable[str], text: str) -> Iterator[Span]:
    """Find the longest end of each secret with which a text begins."""
    for form in forms:
        tail = form[-_telling(form) :]
        place = text.rfind(tail, 0, min(len(text), len(form) - 1))
        while place >= 0 and not form.endswith(text[: place + len(tail)]):
            place = text.rfind(tail, 0, place + len(tail) - 1)
        if place >= 0:
            yield 0, place + len(tail)


def _first(spans: Iterator[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: span[0] - span[1])[:1]


def join_spans(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, with those that overlap joined."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _forms(secret: str) -> Iterator[str]:
    """Give the ways in which a secret may be written."""
    if not secret:
        return
    texts = [secret]
    # Also of one line: what was read from a file may have its newline, and is shown without it.
    texts += [line for line in secret.splitlines() if len(line) >= _LEAST_LINE]
    for text in texts:
        raw = _encode(text)
        yield text
        yield escape(text)
        yield raw.decode("utf-8", "backslashreplace")
        yield repr(text)[1:-1]
        for plain in (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]):
            yield plain
            yield plain.replace("/", "\\/")
        for safe in ("", "/"):
            for quoted in (quote(raw, safe), quote_plus(raw, safe)):
                yield quoted
                yield re.sub("%..", lambda match: match[0].lower(), quoted)


def _encode(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")  # as the environment of a process is
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def redact(
    text: str, secrets: Sequence[str] | Secrets, *, cut: bool = False, cut_start: bool = False
) -> str:
    """Return a text without the secrets in it.

    Args:
      text: The text.
      secrets: What to take out.
      cut: Whether the text was cut off at its end, and may end within a secret.
      cut_start: Whether it was cut off at its start.
    """
    secrets = secrets if isinstance(secrets, Secrets) else Secrets(secrets)
    spans = secrets.cut_spans(text, start=cut_start, end=cut)
    return replace_spans(text, spans) if spans else text


def redact_bytes(
    data: bytes, secrets: Sequence[str] | Secrets, *, cut: bool = False, cut_start: bool = False
) -> bytes:
    """Return bytes without the secrets in them, each of which is looked for in UTF-8.

    Args:
      data: The bytes.
      secrets: What to take out; `Secrets` that are made with `in_bytes`.
      cut: Whether they were cut off at their end.
      cut_start: Whether they were cut off at their start.
    """
    secrets = secrets if isinstance(secrets, Secrets) else Secrets.in_bytes(secrets)
    text = redact(data.decode("latin-1"), secrets, cut=cut, cut_start=cut_start)
    return text.encode("latin-1")


def redact_value(value: object, secrets: Sequence[str] | Secrets) -> object:
    """Return a value as it came out of JSON, without the secrets in it, which names may be too."""
    secrets = secrets if isinstance(secrets, Secrets) else Secrets(secrets)
    match value:
        case str():
            return redact(value, secrets)
        case dict():
            return {
                redact(str(name), secrets): redact_value(item, secrets)
                for name, item in value.items()
            }
        case list():
            return [redact_value(item, secrets) for item in value]
        case _:
            return value


def replace_spans(text: str, spans: Iterable[Span], start: int = 0, end: int | None = None) -> str:
    """Return a part of a text with spans in it replaced.

    A span that begins before the part was announced with what came before: what is in the part of
    it is left out, without a word.

    Args:
      text: The text.
      spans: What to replace, in order.
      start: Where the part begins.
      end: Where it ends; a span that goes beyond is replaced whole.
    """
    end = len(text) if end is None else end
    parts = []
    for first, last in spans:
        if first >= end:
            break
        if first >= start:
            parts += [text[start:first], REDACTED]
        start = max(start, last)
    parts.append(text[start:end])
    return "".join(parts)


class Redactor:
    """Takes secrets out of a text that comes in pieces.

    However the text is cut, what is given back is the same in the end, nothing of it twice. Only
    what may be the beginning of a secret is held back, until it is known.

    Args:
      secrets: What to take out.
    """

    def __init__(self, secrets: Sequence[str] | Secrets) -> None:
        self._secrets = secrets if isinstance(secrets, Secrets) else Secrets(secrets)
        self._held = ""
        self._announced = 0  # characters of that which belong to a secret that was replaced

    @property
    def held(self) -> int:
        """Characters that are held back: fewer than the longest secret has."""
        return len(self._held)

    def feed(self, text: str) -> str:
        """Take the next piece, and give what may be shown."""
        text = self._held + text
        spans = self._spans(self._secrets.spans(text))
        safe = self._secrets.pending(text)
        shown = self._replace(text, spans, safe)
        certain = [last for first, last in spans if first < safe or first < self._announced]
        reached = max(certain, default=0)
        self._held = text[safe:]
        self._announced = max(0, reached - safe)
        return shown

    def close(self, *, cut: bool = True) -> str:
        """Give what was held back, as the text is over.

        Args:
          cut: Whether it was cut off, and may end within a secret.
        """
        text = self._held
        shown = self._replace(text, self._spans(self._secrets.cut_spans(text, end=cut)), len(text))
        self._held = ""
        self._announced = 0
        return shown

    def _spans(self, found: list[Span]) -> list[Span]:
        announced = [(0, self._announced)] if self._announced else []
        return join_spans([*announced, *found])

    def _replace(self, text: str, spans: list[Span], end: int) -> str:
        if not self._announced:
            return replace_spans(text, spans, 0, end)
        return replace_spans(text, spans[1:], spans[0][1], end) if spans[0][1] < end else ""
