"""What the checks of a provider and of a backend have in common: cases, rules, findings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Generic, NoReturn, TypeAlias, TypeVar

import attrs
import trio

from llamatrio.requests import Request

BOUND: Final = 30.0
"""Seconds in which everything that is to happen soon must have happened, unless told otherwise."""
MOMENT: Final = 0.01
"""Seconds, where something short is wanted."""
_WHOLE: Final = 10  # bounds that a rule may take as a whole

_T = TypeVar("_T")
_CaseT = TypeVar("_CaseT", bound="Case")
_Check: TypeAlias = Callable[[_CaseT], Awaitable[None]]


class NotConforming(Exception):
    """A rule is broken. Its arguments are `rule` and `seen`; `__cause__` is an error that was seen.

    Attributes:
      rule: The rule, by its name in `PROVIDER_RULES` or `BACKEND_RULES`.
      seen: What was seen instead.
    """

    @property
    def rule(self) -> str:
        """The rule that is broken."""
        return str(self.args[0])

    @property
    def seen(self) -> str:
        """What was seen instead."""
        return str(self.args[1])

    def __str__(self) -> str:
        return ": ".join(map(str, self.args))


@attrs.frozen
class Report:
    """What a check has shown.

    Attributes:
      kept: The rules that were seen to be kept, in the order of the check.
      skipped: Those that were not checked, each with what that would take.
    """

    kept: tuple[str, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.kept)} rules are kept, {len(self.skipped)} could not be checked"]
        lines += [f"  kept: {name}" for name in self.kept]
        lines += [f"  not checked: {name} ({why})" for name, why in self.skipped.items()]
        return "\n".join(lines)


class _Skipped(Exception):
    """A rule cannot be checked with what was given."""


@attrs.frozen
class Asked:
    """What the rules ask, and what they know of the answers.

    Attributes:
      slow: A request that goes on.
      quick: One that finishes.
      refused: One that the model's server refuses, if there is one.
      answer: The text that answers `quick`, if it is known.
    """

    slow: Request
    quick: Request
    refused: Request | None
    answer: str | None


@attrs.define(slots=False, eq=False)
class Case:
    """One rule that is being checked.

    What is found is written down before it is raised: a provider that breaks its contract may
    swallow or wrap what is raised in its block.

    Attributes:
      rule: The name of the rule.
      bound: Seconds that one step may take.
      asked: What to ask.
      finding: What was found first, if the rule is broken.
      skipped: What a check of the rule would take, if it is not checked.
      step: What is being done.
    """

    rule: str
    bound: float
    asked: Asked
    finding: NotConforming | None = attrs.field(default=None, init=False)
    skipped: str | None = attrs.field(default=None, init=False)
    step: str = attrs.field(default="opening it", init=False)

    def fail(self, seen: str, cause: Exception | None = None) -> NoReturn:
        """Say that the rule is broken; what was found first stays."""
        if self.finding is None:
            self.finding = NotConforming(self.rule, seen)
            self.finding.__cause__ = cause
        raise self.finding

    def expect(self, kept: object, seen: str) -> None:
        """Say that the rule is broken, unless it is kept."""
        if not kept:
            self.fail(seen)

    def skip(self, why: str) -> NoReturn:
        """Give the rule up: it cannot be checked with what was given."""
        self.skipped = why
        raise _Skipped(why)

    @contextmanager
    def within(self, what: str) -> Iterator[None]:
        """Allow a step so much time and no more, even if it does not notice."""
        self.step = what
        with trio.move_on_after(self.bound) as scope:
            yield
        if scope.cancel_called:
            self.fail(f"{what} took more than {self.bound:g} s")

    async def soon(self, what: str, call: Callable[[], Awaitable[_T]]) -> _T:
        """Do a step `within` its time. Cancellation: ends the step."""
        with self.within(what):
            return await call()
        raise AssertionError("not reached")

    @contextmanager
    def raising(self, wanted: type[Exception], what: str) -> Iterator[None]:
        """See that the body raises this, and nothing else."""
        try:
            yield
        except wanted:
            return
        except NotConforming:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is told
            self.fail(f"{what} raised {exc!r} and not {wanted.__name__}", exc)
        self.fail(f"{what} did not raise {wanted.__name__}")


class Rules(Generic[_CaseT]):
    """Rules in the order in which they are checked: what others build upon comes first."""

    def __init__(self) -> None:
        self._checks: dict[str, _Check[_CaseT]] = {}

    def __call__(self, name: str) -> Callable[[_Check[_CaseT]], _Check[_CaseT]]:
        """Register a rule."""

        def register(check: _Check[_CaseT]) -> _Check[_CaseT]:
            assert name not in self._checks, name
            self._checks[name] = check
            return check

        return register

    @property
    def names(self) -> tuple[str, ...]:
        """The rules, in the order of the check."""
        return tuple(self._checks)

    async def apply(self, new_case: Callable[[str], _CaseT]) -> Report:
        """Check every rule, each with a case of its own. Cancellation: ends the check."""
        kept: list[str] = []
        skipped: dict[str, str] = {}
        for name, check in self._checks.items():
            case = new_case(name)
            await _apply(check, case)
            if case.skipped is None:
                kept.append(name)
            else:
                skipped[name] = case.skipped
        return Report(tuple(kept), skipped)


async def _apply(check: _Check[_CaseT], case: _CaseT) -> None:
    error: Exception | None = None
    seconds = _WHOLE * case.bound
    scope = trio.CancelScope(deadline=trio.current_time() + seconds)
    try:  # around the scope, which first takes a cancel out of a group
        with scope:
            await check(case)
    except Exception as exc:  # noqa: BLE001 - sorted out below
        error = exc
    if case.finding is None and case.skipped is None:
        if scope.cancel_called:
            late = f"it was not over after {seconds:g} s; the last step was: {case.step}"
            case.finding = NotConforming(case.rule, late)
        elif error is not None:
            case.finding = NotConforming(case.rule, f"{_bare(error)!r} came out of {case.step}")
            case.finding.__cause__ = error
    if case.finding is not None:
        raise case.finding


def _bare(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
