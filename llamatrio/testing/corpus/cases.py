"""The cases as they stand in the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from importlib import resources
from itertools import pairwise
from typing import NotRequired, TypeAlias, TypedDict

import attrs

Event: TypeAlias = Mapping[str, object]
Piece: TypeAlias = str | tuple[str, int]


@attrs.frozen
class Rule:
    """One thing that a reader has to get right.

    Attributes:
      id: A name for it, such as "limit.tail".
      text: The rule.
    """

    id: str
    text: str


@attrs.frozen(slots=False)
class Case:
    """One stream and the events that it has.

    Attributes:
      id: Its name, which begins with the rule's.
      rule: The rule it is about. Others may be at work in it too.
      stream: The pieces of which it is made.
      events: What a reader makes of it.
      cuts: The offsets at which a reader is likely to go wrong when the stream is cut there.
    """

    id: str
    rule: str
    stream: tuple[Piece, ...]
    events: tuple[Event, ...]
    cuts: tuple[int, ...] = ()

    @cached_property
    def data(self) -> bytes:
        """The stream in full."""
        pieces = ((piece, 1) if isinstance(piece, str) else piece for piece in self.stream)
        return b"".join(text.encode("latin-1") * count for text, count in pieces)

    def chunks(self) -> list[bytes]:
        """Give the stream, cut where the case says."""
        edges = [0, *self.cuts, len(self.data)]
        return [self.data[start:end] for start, end in pairwise(edges)]


@attrs.frozen
class Corpus:
    """All cases.

    Attributes:
      limit: The longest line in bytes, without its newline, that is not oversize.
      rules: What they are about.
      cases: The cases, in the order of the rules.
    """

    limit: int
    rules: tuple[Rule, ...]
    cases: tuple[Case, ...]


def load() -> Corpus:
    """Read the corpus that comes with the library."""
    text = resources.files(__package__ or "").joinpath("corpus.json").read_text("ascii")
    document = json.loads(text)
    return Corpus(
        document["limit"],
        tuple(Rule(**rule) for rule in document["rules"]),
        tuple(_case(case) for case in document["cases"]),
    )


class _Document(TypedDict):
    id: str
    rule: str
    stream: list[str | list[object]]
    events: list[Event]
    cuts: NotRequired[list[int]]


def _case(case: _Document) -> Case:
    return Case(
        case["id"],
        case["rule"],
        tuple(map(_piece, case["stream"])),
        tuple(case["events"]),
        tuple(case.get("cuts", ())),
    )


def _piece(piece: str | list[object]) -> Piece:
    match piece:
        case str():
            return piece
        case [str(text), int(count)]:
            return text, count
        case _:
            raise ValueError(f"not a piece: {piece!r}")
