"""What a subclass of the actor may override: some methods are told, others are asked."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from typing import Final

from llamatrio.config import ModelConfig
from llamatrio.lifecycle.desk import Waiting
from llamatrio.lifecycle.phases import Transition
from llamatrio.lifecycle.policy import Life, Policy
from llamatrio.lifecycle.reply import Reply
from llamatrio.outcomes import Outcome

_OBSERVERS: Final = (
    "on_transition",
    "on_unexpected_output",
    "on_request_started",
    "on_request_finished",
)
_DECIDERS: Final = ("choose_next", "should_restart", "prepare")


class Hooks:
    """The methods of `LifecycleActor` that are there to be overridden.

    All are plain functions: they run on the Trio thread, must not wait, and cannot call a verb of
    the provider (`VerbInHook`), nor hand one to `nursery.start_soon`, which would call it at once.
    To start, stop or unload from one, start or wake a task of yours that does.

    *Observers* (`on_...`) are told after the fact. They may read everything, cancel and submit
    requests. An exception of theirs is logged and counted, and changes nothing; but what is no
    `Exception`, such as SystemExit, ends the provider and comes out of its block.

    *Deciders* (`choose_next`, `should_restart`, `prepare`) are asked, and their answer is what
    happens. They must change nothing. An exception of theirs ends the provider: every request gets
    its outcome, the child is ended, no hook is called any more, and the exception comes out of the
    provider's block.

    Attributes:
      policy: The present limits, and what becomes of a model that dies.
    """

    policy: Policy

    def refuse_async(self) -> None:
        """Refuse a subclass with a hook that would never run.

        Raises:
          TypeError: if a hook is `async`.
        """
        for name in (*_OBSERVERS, *_DECIDERS):
            if inspect.iscoroutinefunction(getattr(self, name)):
                raise TypeError(f"{type(self).__name__}.{name} is async and would never run")

    # -- observers -----------------------------------------------------------------------------

    def on_transition(self, transition: Transition) -> None:
        """Learn that the phase has changed. What follows from it has not been done yet.

        The end of the provider's block is told to nobody.
        """

    def on_unexpected_output(self, data: bytes, count: int) -> None:
        """Learn that the child wrote to stdout what is no record. It changes nothing.

        Args:
          data: The last such line, cut to 200 bytes, without secrets.
          count: How many there were since this was last called. It is called for the first line at
            once, and then at most once a second, for a line that comes then.
        """

    def on_request_started(self, reply: Reply) -> None:
        """Learn that a request has got a slot; again, if another model takes it up."""

    def on_request_finished(self, reply: Reply, outcome: Outcome) -> None:
        """Learn how a request ended. `reply.outcome` is set, and its caller is told already."""

    # -- deciders ------------------------------------------------------------------------------

    def choose_next(self, waiting: Waiting) -> Reply:
        """Choose the request that gets the slot that is free.

        Args:
          waiting: Those that wait, at least one. `waiting.first` costs the same however many there
            are; to look through all of them is as slow as it sounds.

        Returns:
          One of them.
        """
        return waiting.first

    def should_restart(self, lives: Sequence[Life]) -> float | None:
        """Decide what follows the death of a model that is in use.

        It is not asked when we ended the model ourselves, nor while the provider is stopped.

        Args:
          lives: Those that ended this way since the last `start` that loaded, the latest last.

        Returns:
          Seconds to wait before it is loaded again; None to give it up, which fails what waits.
        """
        return self.policy.decide(lives, random.random())

    def prepare(self, config: ModelConfig) -> ModelConfig:
        """Change the configuration of the life that is about to begin, such as fewer GPU layers
        after a death. `self.config` stays as it is.

        What the backend cannot honour fails the load, with a SpecificationError.
        """
        return config
