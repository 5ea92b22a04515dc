"""The two contracts between the lifecycle and whatever runs a model.

A `Backend` makes a loaded model available and takes it away again: one call of `Backend.run` is
one life of it, a *generation*. In between there is a `ModelSession`, which answers requests. The
actor, the phases and every test of them are the same for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs
import trio

from llamatrio.child.evidence import Evidence, State
from llamatrio.child.exits import Exit
from llamatrio.child.isolation import Isolation
from llamatrio.child.logs import LogQueue, LogWatch
from llamatrio.child.manifest import Manifest
from llamatrio.child.pumps import Tally
from llamatrio.config import ModelConfig
from llamatrio.errors import LlamatrioError
from llamatrio.outcomes import Finished
from llamatrio.requests import Admitted, Delta, PromptProgress, Request

Emit: TypeAlias = Callable[[Admitted | Delta | PromptProgress], None]


class ModelSession(ABC):
    """A loaded model that one can talk to. It lives exactly as long as its generation."""

    @property
    def info(self) -> Mapping[str, object]:
        """What the model says of itself; empty if it says nothing."""
        return {}

    @abstractmethod
    async def perform(self, request: Request, emit: Emit) -> Finished:
        """Perform one request; up to `ModelConfig.slots` of these run at the same time.

        Args:
          request: What is asked.
          emit: Takes each piece of the answer and each progress of the prompt, in order, and before
            them, if that is known, that the model has begun with it. It never waits.

        Cancellation: ends the work on the request, on the model's side too, as soon as that is
        possible, and leaves the model loaded.

        Raises:
          RequestRefused: if the model's server says no; the session is as good as before.
          ChildError: if the answer breaks off or makes no sense.
        """


# -- what a generation tells -------------------------------------------------------------------


@attrs.frozen
class LoadProgress:
    """The model is being loaded.

    Attributes:
      value: How much of this stage is done, from 0.0 to 1.0, or None if it is not known.
      stage: What is being loaded, by the backend's own name.
      stages: All that is to be loaded.
    """

    value: float | None = None
    stage: str | None = None
    stages: tuple[str, ...] = ()


@attrs.frozen
class Opened:
    """The model is loaded.

    Attributes:
      session: The way to speak to it.
    """

    session: ModelSession


@attrs.frozen
class Asleep:
    """The model gave its memory back, and will be loaded again by the next request."""


@attrs.frozen
class Awake:
    """The model is loaded again, after `Asleep`."""


@attrs.frozen
class Unexpected:
    """The model's side wrote what means nothing, where only records belong.

    Attributes:
      data: The last of it, cut to a bound.
      count: How many lines there were since this was last told.
    """

    data: bytes
    count: int = 1


@attrs.frozen
class Ended:
    """The generation is over. The last thing that it tells.

    Attributes:
      error: Why, if it was not asked to.
      exit: How its process ended, if it had one.
    """

    error: LlamatrioError | None = None
    exit: Exit | None = None


SessionEvent: TypeAlias = LoadProgress | Opened | Asleep | Awake | Unexpected | Ended
Publish: TypeAlias = Callable[[SessionEvent], None]


class Backend(ABC):
    """Makes sessions."""

    @property
    def tally(self) -> Tally:
        """What came out of the pipes of all its children so far; zeros where there are none."""
        return Tally()

    @property
    def pid(self) -> int | None:
        """The process of the present generation, if there is one."""
        return None

    @property
    def manifest(self) -> Manifest | None:
        """With what the present or last generation was started; None if that is not known."""
        return None

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """What was wrong on the pipes of all generations so far, the last pieces of it."""
        return ()

    @property
    def state_channel(self) -> State | None:
        """The end of the present or last generation's state channel; None without one."""
        return None

    async def examine(self) -> Manifest | None:
        """Look at everything in the manifest again, with all that takes time.

        Cancellation: abandons it.
        """
        await trio.lowlevel.checkpoint()
        return self.manifest

    @property
    def isolation(self) -> Isolation | None:
        """What the process of the present or last generation is kept from; None without one."""
        return None

    @property
    def stdout_reserved(self) -> bool | None:
        """Whether the model's process keeps its stdout for records; None if that is not known."""
        return None

    @property
    def log_tail(self) -> str:
        """The last lines of the present generation's log, for error reports; empty without one."""
        return ""

    @property
    def dropped_log_lines(self) -> int:
        """Log lines that were lost because whoever takes them was too slow."""
        return 0

    def watch_logs(self, lines: int) -> LogWatch:
        """Return what gives all lines of the log that follow, until `end_logs`.

        By itself it gives none, and ends at once.

        Args:
          lines: How many may wait there; beyond that the oldest is dropped and counted.
        """
        watch = LogWatch(LogQueue(lines))
        watch.close()
        return watch

    def end_logs(self) -> None:
        """Let those who watch the log come to an end: their provider is over."""
        return None

    def signs_of_life(self) -> object:
        """Return a value that is another one if the model's side did anything in between.

        It is compared with earlier ones, and means nothing otherwise. None says that nothing is
        known. Taking it is cheap, and never raises.
        """
        return None

    def check(self, config: ModelConfig) -> None:
        """Refuse a configuration that cannot work, without looking at any file.

        Raises:
          SpecificationError: says what to change.
        """
        return None

    async def inspect(self, config: ModelConfig) -> None:
        """Refuse a configuration whose files cannot work. Loads nothing.

        Cancellation: abandons the check.

        Raises:
          SpecificationError: says what to change.
        """
        await trio.lowlevel.checkpoint()

    @abstractmethod
    async def run(self, config: ModelConfig, publish: Publish) -> None:
        """Load a model, keep it, and return when it is gone.

        `publish` is told `LoadProgress` any number of times, `Opened` at most once, and `Ended`
        last, exactly once, unless this raises. It never waits. An error that it raises is a fault
        of what it was told; the generation is to be ended for it.

        Cancellation: is how a model is unloaded. This returns when its memory has been given back,
        within a bounded time. No request is running then.

        Raises:
          LlamatrioError: if nothing could be started.
        """
