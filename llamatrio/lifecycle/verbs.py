"""What callers want, on its way through the actor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count

import attrs
import trio

from llamatrio.config import ModelConfig
from llamatrio.errors import LlamatrioError, ProviderClosed, WrongPhase
from llamatrio.lifecycle.phases import GOALS, Answer, Event, Phase
from llamatrio.lifecycle.policy import Policy


@attrs.define(eq=False)
class Verb:
    """A caller's wish.

    Attributes:
      event: What is wanted.
      config: The new configuration, for RECONFIGURE.
      policy: The policy to take with it, if any.
      on_effect: Is called when the wish begins to come true.
      error: Why it did not, if it did not.
      abandoned: Whether nobody waits for the answer any more.
      drain: Whether a STOP serves first what was accepted.
      drain_timeout: Seconds that this may take; None for any time.
      timer: The scope of whoever waits for the end of that time.
      order: Tells which of two wishes came first.
    """

    event: Event
    config: ModelConfig | None = None
    policy: Policy | None = None
    on_effect: Callable[[], None] = lambda: None
    error: Exception | None = None
    abandoned: bool = False
    drain: bool = False
    drain_timeout: float | None = None
    timer: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    order: int = attrs.field(factory=count().__next__, init=False)
    _done: trio.Event = attrs.field(factory=trio.Event)

    @property
    def withdrawn(self) -> bool:
        """Whether it is to have no effect, because nobody waits for it.

        Somebody who stops in a `finally` wants it stopped, whether he can wait or not.
        """
        return self.abandoned and self.event in (Event.START, Event.RECONFIGURE)

    def answer(self, error: Exception | None = None) -> None:
        """Let the caller go on, or raise there; only the first answer counts."""
        if not self._done.is_set():
            self.error = error
            self._done.set()

    async def wait(self) -> None:
        """Wait for the answer.

        Cancellation: abandons the wait, and withdraws a START or a RECONFIGURE that had no effect
        yet.
        """
        try:
            await self._done.wait()
        except BaseException:  # Cancelled, or a Ctrl-C
            self.abandoned = True
            raise
        if self.error is not None:
            raise self.error


class Verbs:
    """The wishes that have not been answered yet: some wait for a goal, some are postponed."""

    def __init__(self) -> None:
        self._waiting: list[Verb] = []
        self._reached: list[Verb] = []
        self._postponed: list[Verb] = []

    def note(self, verb: Verb, answer: Answer, phase: Phase) -> None:
        """Do with a wish what the table says; `phase` is where it arrived."""
        match answer:
            case Answer.WAIT:
                self._waiting.append(verb)
            case Answer.POSTPONE:
                self.postpone(verb)
            case Answer.REFUSE:
                message = f"cannot {verb.event.value} while {phase.value}; stop first"
                verb.answer(WrongPhase(message))

    def postpone(self, verb: Verb) -> None:
        """Keep a wish, to be looked at again, or to be answered by `finish`."""
        self._postponed = [*(other for other in self._postponed if not other.withdrawn), verb]

    def is_postponed(self, event: Event) -> bool:
        """Say whether a wish of this kind is postponed."""
        return any(verb.event is event and not verb.withdrawn for verb in self._postponed)

    def reach(self, phase: Phase) -> None:
        """Note which have what they waited for; `release` answers them."""
        self._reached += [verb for verb in self._waiting if phase in GOALS[verb.event]]
        self._waiting = [
            verb for verb in self._waiting if phase not in GOALS[verb.event] and not verb.abandoned
        ]

    def release(self) -> None:
        """Answer those that have what they waited for."""
        reached, self._reached = self._reached, []
        for verb in reached:
            verb.answer()

    def take_postponed(self) -> list[Verb]:
        """Take those that are to be looked at again, in the order in which they came."""
        postponed, self._postponed = self._postponed, []
        return [verb for verb in postponed if not verb.withdrawn]

    def fail(
        self,
        event: Event,
        error: LlamatrioError,
        *,
        waiting: bool = True,
        postponed: bool = True,
        before: Verb | None = None,
    ) -> None:
        """Answer every wish of one kind with an error.

        Args:
          event: The kind.
          error: What to raise in those who wait.
          waiting: Whether those that wait for a phase are meant.
          postponed: Whether those that are postponed are meant.
          before: Only those that came before this one.
        """
        meant = [self._waiting] * waiting + [self._postponed] * postponed
        for verbs in meant:
            for verb in [verb for verb in verbs if verb.event is event]:
                if before is None or verb.order < before.order:
                    verb.answer(_renewed(error))
                    verbs.remove(verb)

    def finish(self) -> None:
        """Answer everybody, when the provider has ended: those who wanted an end have got it."""
        self.release()
        for verb in (*self._waiting, *self._postponed):
            wanted_an_end = verb.event in (Event.STOP, Event.UNLOAD)
            verb.answer(None if wanted_an_end else ProviderClosed("the provider was closed"))
        self._waiting.clear()
        self._postponed.clear()


def _renewed(error: LlamatrioError) -> LlamatrioError:
    """Copy an error for one of several waiters: one object would gather all their tracebacks."""
    try:
        new = copy.copy(error)
    except Exception:  # noqa: BLE001 - a class of yours whose constructor does not take its `args`
        return error
    new.__cause__ = error.__cause__
    return new
