r"""PURE. Colours of a log, closed within each line, and everything else that drives a terminal.

A line of a log may set colours (SGR, ``ESC [ ... m``) and leave them set for the lines that follow.
Here every line stands for itself: it sets at its start what the lines before it left open, and it
ends with a reset. All other control characters and sequences, and the characters that turn the
direction of writing round, are shown as ``\x1b`` and the like, so that no line can move a cursor,
set a title, ask a terminal for an answer, or look like something else. Concealed text is shown.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Final, TypeAlias

import attrs

RESET: Final = "\x1b[0m"

_SGR: Final = re.compile(r"\x1b\[([0-9;:]{0,200})m")
_UNFINISHED: Final = re.compile(r"\x1b(?:\[[0-9;:]{0,200})?\Z")
# C0 but for the tab, DEL, C1, line separators, and what changes the direction of writing.
_CONTROLS: Final = re.compile(
    "[\0-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
_NAMES: Final = {"\n": r"\n", "\r": r"\r"}


def escape(text: str) -> str:
    """Return a text with every character that may drive a terminal made visible."""
    if text.isprintable():
        return text
    return _CONTROLS.sub(_visible, text)


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    return _NAMES.get(match[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def strip(text: str) -> str:
    """Return a text without its colours, and with all other controls made visible."""
    if text.isprintable():
        return text
    return escape(_SGR.sub("", text))


def complete_length(text: str) -> int:
    """Say how much of the beginning of a line is certain, whatever follows.

    What may be the beginning of a colour is not.
    """
    match = _UNFINISHED.search(text, max(0, len(text) - 210))
    return match.start() if match else len(text)


# -- colours -----------------------------------------------------------------------------------

# What each plain parameter does: to which property, and whether it sets or clears it.
_SETS: Final[Mapping[int, str]] = {
    1: "bold", 2: "faint", 3: "italic", 4: "underline", 5: "blink", 6: "blink", 7: "inverse",
    9: "strike", 21: "underline", 53: "overline",
    **dict.fromkeys((*range(30, 38), *range(90, 98)), "foreground"),
    **dict.fromkeys((*range(40, 48), *range(100, 108)), "background"),
}  # fmt: skip
_CLEARS: Final[Mapping[int, tuple[str, ...]]] = {
    22: ("bold", "faint"), 23: ("italic",), 24: ("underline",), 25: ("blink",), 27: ("inverse",),
    29: ("strike",), 39: ("foreground",), 49: ("background",), 55: ("overline",),
    59: ("underline colour",),
}  # fmt: skip
_PALETTES: Final[Mapping[int, str]] = {
    38: "foreground", 48: "background", 58: "underline colour"
}  # fmt: skip
_COLOUR_WORDS: Final = {"2": 3, "5": 1}  # numbers after `38;2` and `38;5`
_MAX_BYTE: Final = 255


@attrs.frozen
class Style:
    """How characters look: the parameters of SGR that are in force, by the name of the property.

    There is at most one for each property, so it stays small whatever a log says.
    """

    parts: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __str__(self) -> str:
        """The sequence that sets this style and nothing else."""
        return "".join(["\x1b[0", *(f";{text}" for _, text in self.parts), "m"])

    def apply(self, parameters: str) -> Style:
        """Return the style after one SGR sequence; what is unknown in it changes nothing."""
        parts = dict(self.parts)
        words = iter(parameters.split(";"))
        for word in words:
            if ":" in word:
                _apply_colons(parts, word)
            elif not (number := int(word or 0)):
                parts.clear()
            elif number in _SETS:
                parts[_SETS[number]] = str(number)
            elif number in _PALETTES:
                _apply_palette(parts, number, words)
            else:
                for name in _CLEARS.get(number, ()):
                    parts.pop(name, None)
        return Style(tuple(sorted(parts.items())))


def _apply_palette(parts: dict[str, str], number: int, words: Iterator[str]) -> None:
    """Take `38;5;n` or `38;2;r;g;b`. Of one that breaks off, or is unknown, nothing is left."""
    kind = next(words, "")
    if (count := _COLOUR_WORDS.get(kind)) is None:
        return
    values = list(islice(words, count))
    _set_colour(parts, number, kind, values)


def _apply_colons(parts: dict[str, str], word: str) -> None:
    """Take a parameter with parts of its own: `4:3`, `38:5:n`, `38:2:r:g:b`, `38:2::r:g:b`."""
    first, *rest = word.split(":")
    number = int(first or 0)
    if number == 4 and len(rest) == 1 and rest[0] in {"0", "1", "2", "3", "4", "5"}:
        parts.pop("underline", None)
        if rest[0] != "0":
            parts["underline"] = word
    elif number in _PALETTES and rest and rest[0] in _COLOUR_WORDS:
        kind, *values = rest
        if kind == "2" and len(values) > 3:
            values = values[1:4]  # the first names a colour space
        _set_colour(parts, number, kind, values)


def _set_colour(parts: dict[str, str], number: int, kind: str, values: Sequence[str]) -> None:
    numbers = [_MAX_BYTE + 1 if ":" in value else int(value or 0) for value in values]
    if len(numbers) == _COLOUR_WORDS[kind] and all(value <= _MAX_BYTE for value in numbers):
        parts[_PALETTES[number]] = ";".join(map(str, (number, kind, *numbers)))


Run: TypeAlias = tuple[int, Style]
"""Where in a text a style begins."""


@attrs.frozen
class Colored:
    """A line, taken apart.

    Attributes:
      text: What it says; no character of it drives a terminal.
      runs: Its styles and where each begins, the first at 0.
    """

    text: str
    runs: tuple[Run, ...]

    @property
    def style(self) -> Style:
        """The style that the line leaves open."""
        return self.runs[-1][1]

    def paint(self, start: int = 0, end: int | None = None, text: str | None = None) -> str:
        """Return a part of the line with its colours, which end with it.

        Args:
          start: Where the part begins.
          end: Where it ends; None for the end of the line.
          text: What to show in its place, in the style of its first character.
        """
        end = len(self.text) if end is None else end
        at = bisect_right(self.runs, start, key=itemgetter(0))
        style = self.runs[at - 1][1]
        if text is not None:
            return _close(style, text)
        painted = []
        for place, following in self.runs[at : bisect_left(self.runs, end, key=itemgetter(0))]:
            painted.append(_close(style, self.text[start:place]))
            start, style = place, following
        painted.append(_close(style, self.text[start:end]))
        return "".join(painted)


def _close(style: Style, text: str) -> str:
    return f"{style}{text}{RESET}" if style and text else text


def take_apart(line: str, style: Style = Style()) -> Colored:
    """Tell a line's text from its colours.

    Args:
      line: The line.
      style: What the line before it left open.
    """
    pieces = _SGR.split(line)
    runs: list[Run] = [(0, style)]
    texts = [escape(pieces[0])]
    length = len(texts[0])
    for parameters, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        style = style.apply(parameters)
        runs.append((length, style))
        texts.append(escape(piece))
        length += len(texts[-1])
    return Colored("".join(texts), tuple(runs))


class Painter:
    """Closes the colours of each line of a log, and carries them over to the next."""

    def __init__(self) -> None:
        self._style = Style()

    @property
    def style(self) -> Style:
        """What the last line left open."""
        return self._style

    def paint(self, line: str) -> str:
        """Return a line, without its newline, as it may be shown."""
        colored = take_apart(line, self._style)
        self._style = colored.style
        return colored.paint()


# -- may there be any? -------------------------------------------------------------------------


def may_use_colors(*, tty: bool, environ: Mapping[str, str], renders: bool = True) -> bool:
    """Say whether colours may be written to a stream.

    The first of these that says something decides: ``NO_COLOR`` (no), ``FORCE_COLOR`` ("0" or
    "false": no; else yes), ``CLICOLOR_FORCE`` (but for "0": yes), no terminal (no), a terminal that
    renders none (no), ``TERM=dumb`` (no), ``CLICOLOR=0`` (no). A variable that is empty says
    nothing.

    Args:
      tty: Whether the stream is a terminal.
      environ: The environment.
      renders: Whether that terminal renders colours: a console of Windows does not unless it was
        told to.
    """
    if environ.get("NO_COLOR"):
        return False
    if force := environ.get("FORCE_COLOR"):
        return force.lower() not in {"0", "false"}
    if environ.get("CLICOLOR_FORCE", "0") not in {"", "0"}:
        return True
    dumb = environ.get("TERM") == "dumb" or environ.get("CLICOLOR") == "0"
    return tty and renders and not dumb
