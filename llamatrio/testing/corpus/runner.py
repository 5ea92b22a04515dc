"""Runs a reader on the cases."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import attrs

from llamatrio.testing.corpus.cases import Case, Event
from llamatrio.testing.corpus.judge import Failure, Level, judge
from llamatrio.testing.corpus.reader import read

_SMALL: Final = 2**13  # bytes; a stream that is worth being fed byte by byte


@attrs.frozen
class Report:
    """How a reader did.

    Attributes:
      cases: How many cases it was given.
      failures: Those that it got wrong.
    """

    cases: int
    failures: tuple[Failure, ...]

    @property
    def ok(self) -> bool:
        """Whether there was none."""
        return not self.failures

    def by_rule(self) -> dict[str, int]:
        """Count the failures of each rule."""
        return dict(Counter(failure.case.rule for failure in self.failures))


class CannotRun(Exception):
    """The command could not be run at all."""


def check_reader(
    cases: Sequence[Case],
    reader: Callable[[Iterable[bytes]], Iterable[Event]] = read,
    level: Level = "events",
) -> Report:
    """Check a reader that is a function, the library's own if none is given.

    Each stream is fed whole, in pieces of 4096 bytes, cut where the case says and, if it is not too
    long, byte by byte.

    Args:
      cases: The cases.
      reader: Takes the pieces of a stream and gives its events.
      level: What is compared; see `judge`.
    """
    failures = (
        next(filter(None, (judge(case, [*reader(way)], level) for way in _ways(case))), None)
        for case in cases
    )
    return Report(len(cases), tuple(filter(None, failures)))


def _ways(case: Case) -> Iterator[list[bytes]]:
    data = case.data
    yield [data]
    yield case.chunks()
    yield [data[at : at + 4096] for at in range(0, len(data), 4096)]
    if len(data) <= _SMALL:
        yield [bytes([byte]) for byte in data]


def check_command(
    cases: Sequence[Case],
    command: Sequence[str],
    *,
    batch: bool = False,
    level: Level = "events",
    timeout: float = 60.0,
) -> Report:
    """Check a reader that is a command.

    Args:
      cases: The cases.
      command: The program and its arguments.
      batch: Whether it reads all streams in one run; see the package's description.
      level: What is compared; see `judge`.
      timeout: Seconds for one run. A run that takes longer is killed and has failed.

    Raises:
      CannotRun: if there is no such program.
    """
    if batch:
        data = b"".join(b"%d\n%s" % (len(case.data), case.data) for case in cases)
        output, ending = _run(command, data, timeout)
        answers = list(_split(output))
        answers += [([], ending or "no answer")] * (len(cases) - len(answers))
    else:
        runs = (_run(command, case.data, timeout) for case in cases)
        answers = [([*_parse(output)], ending) for output, ending in runs]
    failures = (
        _judge_answer(case, events, ending, level)
        for case, (events, ending) in zip(cases, answers, strict=True)
    )
    return Report(len(cases), tuple(filter(None, failures)))


def _judge_answer(case: Case, events: list[Event], ending: str, level: Level) -> Failure | None:
    if ending:
        return Failure(case, tuple(events), ending)
    return judge(case, events, level)


def _run(command: Sequence[str], data: bytes, timeout: float) -> tuple[bytes, str]:
    """Give what the command wrote, and how it went wrong if it did."""
    try:
        done = subprocess.run(command, input=data, stdout=subprocess.PIPE, timeout=timeout)
    except subprocess.TimeoutExpired as exc:
        return exc.stdout or b"", f"no end after {timeout:g} s"
    except OSError as exc:
        raise CannotRun(str(exc)) from exc
    return done.stdout, f"exit code {done.returncode}" if done.returncode else ""


def _split(output: bytes) -> Iterator[tuple[list[Event], str]]:
    """Give the answer to each stream of a batch that was answered to its end."""
    events: list[Event] = []
    for event in _parse(output):
        if event.get("event") == "end":
            yield events, ""
            events = []
        else:
            events.append(event)


def _parse(output: bytes) -> Iterator[Event]:
    for line in output.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        yield event if isinstance(event, dict) else {"event": "not an event", "line": repr(line)}
