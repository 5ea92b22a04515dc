"""Whether the events that a reader gave are those of the case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

import attrs

from llamatrio.testing.corpus.cases import Case, Event

Level: TypeAlias = Literal["events", "records"]

_OPTIONAL: Final = ("head", "size", "offset")


@attrs.frozen
class Failure:
    """One case that a reader got wrong.

    Attributes:
      case: The case.
      seen: The events that it gave, as far as it came.
      reason: What is wrong with them.
    """

    case: Case
    seen: tuple[Event, ...]
    reason: str


def judge(case: Case, seen: Sequence[Event], level: Level = "events") -> Failure | None:
    """Compare what a reader made of a case with what is right.

    Numbers are compared as IEEE doubles. `offset`, `head` and `size` are compared where the reader
    gives them; every other member of an event has to be there, and no more.

    Args:
      case: The case.
      seen: The reader's events.
      level: "events" compares all; "records" leaves out whatever changes nothing, for readers that
        say nothing of it.

    Returns:
      What is wrong, or None.
    """
    expected, given = list(case.events), list(seen)
    if level == "records":
        expected, given = _records(expected), _records(given)
    for number, (right, event) in enumerate(zip(expected, given, strict=False), 1):
        if not _same_event(right, event):
            return Failure(case, tuple(seen), f"event {number} is {event}, not {right}")
    if len(expected) != len(given):
        return Failure(case, tuple(seen), f"{len(given)} events, not {len(expected)}")
    return None


def _records(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.get("event") == "record"]


def _same_event(right: Event, seen: Event) -> bool:
    wanted = {key: value for key, value in right.items() if key in seen or key not in _OPTIONAL}
    return _same(wanted, seen)


def _same(right: object, seen: object) -> bool:
    if isinstance(right, Mapping):
        return (
            isinstance(seen, Mapping)
            and right.keys() == seen.keys()
            and all(_same(right[key], seen[key]) for key in right)
        )
    if isinstance(right, list):
        return isinstance(seen, list) and len(right) == len(seen) and all(map(_same, right, seen))
    if isinstance(right, bool) or not isinstance(right, int | float):
        return type(right) is type(seen) and right == seen
    return (
        isinstance(seen, int | float) and not isinstance(seen, bool) and float(right) == float(seen)
    )
