"""PURE. As much of the grammar of a POSIX shell as is needed to see where output is sent.

A text is taken apart into simple commands and groups, each with its redirections. Which of them
runs the server is told by `"$@"`, which carries its options; without one, by `exec`, or by the
order. A text that is not understood to its end is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import dropwhile
from typing import Final, Literal, TypeAlias

import attrs


@attrs.frozen
class Redirections:
    """What a shell would do with the streams of the command that runs the server.

    Attributes:
      merging: Where a redirection stands that merges the two, and what to write instead.
      commands: The commands that run the server: where each begins and ends, and its words.
    """

    merging: tuple[tuple[int, int, str], ...] = ()
    commands: tuple[tuple[int, int, tuple[str, ...]], ...] = ()

    def repaired(self, text: str) -> str:
        """Return the text without what merges."""
        for start, end, instead in sorted(self.merging, reverse=True):
            head = text[:start] if instead else text[:start].rstrip(" \t")
            text = head + instead + text[end:]
        return text.strip()


def find_redirections(text: str) -> Redirections:
    """Find what merges stdout and stderr of the command that runs the server.

    Args:
      text: What a shell is to run, as after `sh -c`.
    """
    try:
        parts = _parse(text)
    except _NotUnderstood:
        return Redirections()
    simple = [part for part in parts if not part.is_group]
    serving = _serving(simple)
    redirected = [part for part in parts if part in serving or _holds(part, serving)]
    redirected += [part for part in simple if part.is_exec and not part.command_words]
    merging = {span for part in redirected for span in part.merging}
    commands = tuple(part.command for part in serving if part.command_words)
    return Redirections(tuple(sorted(merging)), commands)


class _NotUnderstood(Exception):
    """The text is no shell text, or uses more of the grammar than is known here."""


# -- words and operators -----------------------------------------------------------------------

_Kind: TypeAlias = Literal["word", "operator", "redirection"]


@attrs.frozen
class _Token:
    kind: _Kind
    start: int
    end: int
    text: str
    target: str = ""


_REDIRECTION: Final = re.compile(r"(\d*)(&>>|&>|>>|>\||>&|>|<<<|<<|<&|<>|<)")
_OPERATOR: Final = re.compile(r"\|&|&&|\|\||;;|[;&|()\n]")
_BLANK: Final = re.compile(r"(?:[ \t\r]|\\\n)+")


def _tokens(text: str) -> Iterator[_Token]:
    place = 0
    while place < len(text):
        if blank := _BLANK.match(text, place):
            place = blank.end()
        elif text[place] == "#":
            place = text.find("\n", place) if "\n" in text[place:] else len(text)
        elif (found := _REDIRECTION.match(text, place)) and not _substitutes(text, found):
            end = _end_of_word(text, _skip_blank(text, found.end()))
            yield _redirection(text, found, end)
            place = end
        elif operator := _OPERATOR.match(text, place):
            yield _Token("operator", place, operator.end(), operator[0])
            place = operator.end()
        else:
            end = _end_of_word(text, place)
            yield _Token("word", place, end, text[place:end])
            place = end


def _substitutes(text: str, found: re.Match[str]) -> bool:
    return found[0] in ("<", ">") and text[found.end() : found.end() + 1] == "("


def _redirection(text: str, found: re.Match[str], end: int) -> _Token:
    target = text[_skip_blank(text, found.end()) : end]
    if not target or found[2] == "<<":  # a here-document: its lines are no commands
        raise _NotUnderstood
    return _Token("redirection", found.start(), end, found[0], target)


def _skip_blank(text: str, place: int) -> int:
    blank = _BLANK.match(text, place)
    return blank.end() if blank else place


def _end_of_word(text: str, place: int) -> int:
    start = place
    while place < len(text):
        char = text[place]
        if char == "\\":
            place += 2
        elif char in "'\"`":
            place = _end_of_quote(text, place)
        elif char == "(" and place > start and text[place - 1] in "$<>":
            place = _end_of_group(text, place)
        elif char in "<>" and place == start and text[place + 1 : place + 2] == "(":
            place += 1
        elif char in " \t\r\n;&|()<>":
            break
        else:
            place += 1
    return min(place, len(text))


def _end_of_quote(text: str, place: int) -> int:
    quote, place = text[place], place + 1
    while place < len(text):
        if text[place] == quote:
            return place + 1
        if text[place] == "\\" and quote != "'":
            place += 2
        elif text.startswith("$(", place) and quote == '"':
            place = _end_of_group(text, place + 1)
        else:
            place += 1
    raise _NotUnderstood


def _end_of_group(text: str, place: int) -> int:
    """Return where the parenthesis is closed that is opened here."""
    depth = 0
    while place < len(text):
        char = text[place]
        if char in "'\"`":
            place = _end_of_quote(text, place)
            continue
        depth += (char == "(") - (char == ")")
        place += 2 if char == "\\" else 1
        if not depth:
            return place
    raise _NotUnderstood


# -- commands and groups -----------------------------------------------------------------------


@attrs.define(eq=False)
class _Part:
    """A simple command, or a group of them.

    Attributes:
      is_group: Whether it is a group.
      pipeline: The number of the pipeline that it belongs to.
      words: Its words as they stand there.
      merging: Its redirections that merge, as in `Redirections`.
      inner: The parts of a group.
    """

    is_group: bool
    pipeline: int
    words: list[_Token] = attrs.Factory(list)
    merging: list[tuple[int, int, str]] = attrs.Factory(list)
    inner: list[_Part] = attrs.Factory(list)

    @property
    def plain_words(self) -> list[_Token]:
        """Its words without the assignments before them."""
        return list(dropwhile(lambda word: re.match(r"\w+\+?=", word.text), self.words))

    @property
    def is_exec(self) -> bool:
        return [word.text for word in self.plain_words[:1]] == ["exec"]

    @property
    def command_words(self) -> list[_Token]:
        """The command that it runs, which `exec` may precede."""
        return self.plain_words[1:] if self.is_exec else self.plain_words

    @property
    def command(self) -> tuple[int, int, tuple[str, ...]]:
        """The same as in `Redirections`."""
        words = self.command_words
        return words[0].start, words[-1].end, tuple(word.text for word in words)


_OPENING: Final = frozenset("{ if while until for (".split())
_CLOSING: Final = frozenset("} fi done )".split())
_BETWEEN: Final = frozenset("then do else elif ! time".split())
_UNKNOWN: Final = frozenset("case select function [[ coproc".split())


def _parse(text: str) -> list[_Part]:
    parser = _Parser()
    for token in _tokens(text):
        parser.take(token)
    return parser.finish()


class _Parser:
    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._open: list[_Part] = []  # groups, the innermost last
        self._current: _Part | None = None  # what words and redirections belong to
        self._pipeline = 0

    def take(self, token: _Token) -> None:
        if token.kind == "redirection":
            part = self._current or self._begin(is_group=False)
            if _merges(token):
                part.merging.append((token.start, token.end, ""))
        elif token.text in ("(", ")"):
            self._bracket(token)
        elif token.kind == "operator":
            self._separate(token)
        else:
            self._word(token)

    def finish(self) -> list[_Part]:
        if self._open:
            raise _NotUnderstood
        return self._parts

    def _begin(self, *, is_group: bool) -> _Part:
        part = _Part(is_group, self._pipeline)
        self._parts.append(part)
        if self._open:
            self._open[-1].inner.append(part)
        self._current = part
        return part

    def _bracket(self, token: _Token) -> None:
        if token.text in _CLOSING:
            if not self._open:
                raise _NotUnderstood
            self._current = self._open.pop()
        elif self._current is not None:  # the definition of a function
            raise _NotUnderstood
        else:
            self._open.append(self._begin(is_group=True))
            self._current = None

    def _separate(self, token: _Token) -> None:
        if token.text == ";;" or (self._current is None and token.text in ("|", "|&", "&&", "||")):
            raise _NotUnderstood
        if token.text == "|&" and self._current is not None:
            self._current.merging.append((token.start, token.end, "|"))
        if token.text not in ("|", "|&") and self._current is not None:
            self._pipeline += 1
        self._current = None

    def _word(self, token: _Token) -> None:
        if self._current is None or self._current.is_group:
            if self._current is not None or token.text in _UNKNOWN:
                raise _NotUnderstood
            if token.text in _OPENING | _CLOSING:
                return self._bracket(token)
            if token.text in _BETWEEN:
                return None
        part = self._current or self._begin(is_group=False)
        part.words.append(token)
        return None


def _merges(token: _Token) -> bool:
    number, operator = re.fullmatch(r"(\d*)(\D+)", token.text).groups()  # type: ignore[union-attr]
    match operator:
        case "&>" | "&>>":
            return True
        case ">&":
            return (number or "1", token.target) in (("1", "2"), ("2", "1")) or (
                not number and not re.fullmatch(r"\d+-?|-|\$.*", token.target)
            )
        case ">" | ">>" | ">|":
            return (number, token.target) in _BY_NAME
        case _:
            return False


_BY_NAME: Final = {
    (number, f"{folder}{name}")
    for number, names in {
        "2": ("stdout", "fd/1"),
        "": ("stderr", "fd/2"),
        "1": ("stderr", "fd/2"),
    }.items()
    for name in names
    for folder in ("/dev/", "/proc/self/")
}


# -- which of them runs the server -------------------------------------------------------------

_OPTIONS: Final = re.compile(r"\$[@*]|\$\{[@*]")


def _serving(simple: list[_Part]) -> list[_Part]:
    """Return the simple commands that run the server."""
    with_options = [
        part for part in simple if any(_OPTIONS.search(word.text) for word in part.words)
    ]
    replacing = [part for part in simple if part.is_exec and part.command_words]
    last = [part for part in simple if part.words and part.pipeline == simple[-1].pipeline]
    return with_options or replacing or last


def _holds(group: _Part, parts: list[_Part]) -> bool:
    return any(part in parts or _holds(part, parts) for part in group.inner)
