"""The tasks of a generation: one runs the backend and has the last word on its end, one sees to it
that the model is alive."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, TypeAlias

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.config import ModelConfig
from llamatrio.errors import ChildError, LlamatrioError, Unkillable
from llamatrio.lifecycle.policy import Life
from llamatrio.session.base import (
    Asleep,
    Awake,
    Backend,
    Ended,
    LoadProgress,
    ModelSession,
    Opened,
    SessionEvent,
    Unexpected,
)

_LINGER: Final = 1.0  # seconds that requests have for their end when a generation is given up
_SAMPLES: Final = 4  # looks for a sign of life within the time that one may be missing


@attrs.frozen
class GivenUp:
    """The generation is at fault, and is to be ended; its `Ended` follows.

    Attributes:
      error: The fault.
    """

    error: ChildError


Report: TypeAlias = Callable[["Generation", SessionEvent | GivenUp], None]


class Generation:
    """One life of a loaded model.

    Attributes:
      number: 1 for the first of its provider.
      config: What is loaded.
      backend: Who loads it.
      scope: Cancelling it ends the generation.
      session: The way to speak to the model while it is loaded; taken away in the very step that
        learns of the end, so that nothing is sent to a dead child.
      asleep: Whether the model gave its memory back until the next request.
      loading: Whether a load is going on, the first or one after sleep.
      began: When its load began, on Trio's clock; None before.
      full: When the load's progress reached 1.0; a silent warm-up may follow. None before.
      opened: When the model was loaded, or None if it was not.
      finished: Requests that it finished.
      signs: Counts what the model's side has told.
      fault: Why we end it, if it is at fault.
      end: The last word, or None as long as it lives.
    """

    def __init__(self, number: int, config: ModelConfig, backend: Backend) -> None:
        self.number = number
        self.config = config
        self.backend = backend
        self.scope: Final = trio.CancelScope()
        self.session: ModelSession | None = None
        self.asleep = False
        self.loading = False
        self.began: float | None = None
        self.full: float | None = None
        self.opened: float | None = None
        self.finished = 0
        self.signs = 0
        self.fault: ChildError | None = None
        self.end: Ended | None = None
        self._ended = trio.Event()
        self._pause = trio.CancelScope()

    def begin(self) -> None:
        """Note that the load begins."""
        self.loading = True
        self.began = trio.current_time()
        self.look_again()

    async def wait_ended(self) -> Ended:
        """Wait for the last word.

        Cancellation: abandons the wait.
        """
        await self._ended.wait()
        assert self.end is not None
        return self.end

    def died_of(self, error: Exception) -> bool:
        """Say whether an error is what this generation came to its end of."""
        return error is self.fault or (self.end is not None and error is self.end.error)

    def accept(self, event: SessionEvent) -> SessionEvent | None:
        """Return what an event amounts to; None if it comes too late to mean anything.

        Of a generation that is at fault only its end is of interest, and that names the fault.
        """
        if self.end is not None:
            return None
        if self.fault is None:
            return event
        if not isinstance(event, Ended):
            return None
        survived = isinstance(event.error, Unkillable)  # which is worse
        return event if survived else attrs.evolve(event, error=self.fault)

    def describe(self, end: Ended, error: LlamatrioError, *, first: bool) -> Life:
        """Sum up this generation, which has come to its end, for the policy."""
        now = trio.current_time()
        return Life(
            error=error,
            exit=end.exit or (error.exit if isinstance(error, ChildError) else None),
            opened=self.opened is not None,
            finished=self.finished,
            seconds=now - self.opened if self.opened is not None else 0.0,
            ended_at=now,
            first=first,
        )

    def note(self, event: SessionEvent) -> None:
        """Keep what an event says."""
        self.signs += 1
        match event:
            case LoadProgress():
                self.loading = True
                if self.full is None and (event.value or 0) >= 1:
                    self.full = trio.current_time()
            case Opened():
                self.session = event.session
                self.opened = trio.current_time()
                self.loading = False
            case Asleep():
                self.asleep = True
                self.full = None
            case Awake():
                self.asleep = self.loading = False
            case Ended():
                self.session = None
                self.loading = False
                self.end = event
                self._ended.set()
            case Unexpected():
                return
        self.look_again()

    def look_again(self) -> None:
        """Let the watch consider anew what it waits for."""
        self._pause.cancel()

    async def pause(self, seconds: float) -> bool:
        """Wait, and say whether the time has passed in full. Cancellation: ends the wait."""
        with trio.CancelScope(deadline=trio.current_time() + seconds) as self._pause:
            await trio.sleep_forever()
        return trio.current_time() >= self._pause.deadline


@enable_ki_protection
async def keep(
    generation: Generation, delay: float, report: Report, on_stale: Callable[[], None]
) -> None:
    """Run a generation to its end.

    Args:
      generation: What to run; cancelling its scope ends it.
      delay: Seconds to wait first.
      report: Is told every event, the last of them `Ended`, exactly once. What a backend tells
        after that is lost, and so is all but `Ended` once the generation is at fault.
      on_stale: Is told of each such loss.
    """

    def publish(event: SessionEvent) -> None:
        accepted = generation.accept(event)
        if accepted is None:
            on_stale()
            return
        generation.note(accepted)
        try:
            report(generation, accepted)
        except ChildError as exc:  # before its connections are cut: they are to know why
            generation.fault = exc
            raise

    error: LlamatrioError | None = None
    try:  # around the scope, which first takes a cancel out of a group
        with generation.scope:
            if delay > 0:
                await trio.sleep(delay)
            generation.begin()
            await generation.backend.run(generation.config, publish)
    except LlamatrioError as exc:
        error = exc
    except Exception as exc:  # noqa: BLE001 - whatever a backend of yours raises ends it alone
        error = ChildError(f"the backend broke: {exc!r}")
        error.__cause__ = exc
    if generation.end is None:
        publish(Ended(error))


@attrs.frozen
class Patience:
    """How long a generation may show no sign of life.

    Attributes:
      seconds: How long; `math.inf` while nothing is expected of it.
      fault: Makes the error that it is ended for.
    """

    seconds: float
    fault: Callable[[str], ChildError] = ChildError


@enable_ki_protection
async def watch(
    generation: Generation, patience: Callable[[Generation], Patience], report: Report
) -> None:
    """End a generation that shows no sign of life; return when it has ended.

    Args:
      generation: What to watch.
      patience: Says how long it may be silent in what it does now.
      report: Is told `GivenUp`, if it comes to that.

    Cancellation: ends the watch.
    """
    last: object = None
    since = math.inf
    while generation.end is None and generation.fault is None:
        allowed = patience(generation)
        if not await generation.pause(allowed.seconds / _SAMPLES):
            since = math.inf
            continue
        sign = (generation.signs, generation.backend.signs_of_life())
        if sign != last or since == math.inf:
            last, since = sign, trio.current_time()
        elif trio.current_time() - since >= allowed.seconds:
            message = f"no sign of life for {allowed.seconds:g} s: no news, no log, no CPU time"
            give_up(generation, allowed.fault(message), report)


def give_up(generation: Generation, fault: ChildError, report: Report) -> None:
    """Let a generation end for a fault. Nothing more is sent to it.

    Whoever takes the report ends what runs, and then the generation: a child does not obey while
    a connection is open.
    """
    if generation.end is not None or generation.fault is not None:
        return
    if not fault.stderr_tail:
        fault.stderr_tail = generation.backend.log_tail
    generation.fault = fault
    generation.session = None
    generation.scope.deadline = trio.current_time() + _LINGER  # whatever becomes of the report
    report(generation, GivenUp(fault))
