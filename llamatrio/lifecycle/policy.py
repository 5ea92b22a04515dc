"""PURE. Limits, and what becomes of a model that dies.

`Policy` holds the numbers. `Policy.decide` looks at the lives that ended without having been asked
to, and says when the next one begins, or that none does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import attrs

from llamatrio.child.exits import Exit
from llamatrio.errors import (
    ClosedError,
    LlamatrioError,
    ModelChanged,
    SpecificationError,
    Unkillable,
    WakeFailed,
)

REMEMBERED: Final = 100
"""How many past lives are kept for `LifecycleActor.should_restart`."""


@attrs.frozen
class Life:
    """One life of a model that ended although nobody had asked it to.

    Attributes:
      error: Why it ended.
      exit: How its process ended, if it had one.
      opened: Whether the model had been loaded.
      finished: Requests that it finished.
      seconds: How long it lived after it was loaded; 0 if it never was.
      ended_at: When it ended, on Trio's clock.
      first: Whether no model of this configuration had been loaded before.
    """

    error: LlamatrioError
    exit: Exit | None = None
    opened: bool = False
    finished: int = 0
    seconds: float = 0.0
    ended_at: float = 0.0
    first: bool = False

    @property
    def permanent(self) -> bool:
        """Whether the next life would end in the same way.

        So it does if it could not even be started, if another file stands where the model was, if
        the process is still there, and if the program left by itself, with a code, before it ever
        had this model loaded: it has said no. One that died in its first load of a signal has not.
        """
        if isinstance(self.error, SpecificationError | ModelChanged | Unkillable | ClosedError):
            return True
        end = self.exit
        refused = end is not None and end.signal is None and (end.returncode or 0) > 0
        return self.first and not self.opened and refused


@attrs.frozen(kw_only=True)
class Policy:
    """What does not belong to the model: it may be changed at any time, and nothing is loaded anew.

    Attributes:
      max_pending: How many requests may wait; one more raises `QueueFull`. None for any number.
      fruitless: How many lives in a row may end without having finished a request, the first
        included, before the model is given up. 0 gives it up at the first death; `math.inf` never.
      healthy: Seconds after which a loaded model counts as fruitful even if nothing was asked.
      deaths: How many lives may end within `window`, whatever they had finished.
      window: Seconds.
      backoff: Seconds before the life that follows the first death. Before the next it is one
        second, and then twice as long each time, but not less than this. Then each is shortened by
        up to half, at random, so that several models that died of one cause do not come back at
        one moment.
      longest_backoff: Seconds that it never exceeds.
      on_give_up: Whether a model that is given up just fails its requests ("fail"), or is also
        raised in the provider's block ("raise").
      load_stall: Seconds that a load may pass without a sign of life: no progress, no log, no CPU
        time.
      warm_up_stall: The same once the progress has reached 1.0: a silent warm-up follows then.
      silence: Seconds for which a model that answers may show no sign of life: no piece of an
        answer, no log, no CPU time. It is ended then.
      silent_tokens: A slow model may be silent longer: as long as this many of its tokens took.
    """

    max_pending: int | None = 1000
    fruitless: float = 3
    healthy: float = 600.0
    deaths: float = 5
    window: float = 60.0
    backoff: float = 0.1
    longest_backoff: float = 60.0
    on_give_up: Literal["fail", "raise"] = "fail"
    load_stall: float = 120.0
    warm_up_stall: float = 600.0
    silence: float = 60.0
    silent_tokens: float = 100

    def __attrs_post_init__(self) -> None:
        if self.on_give_up not in ("fail", "raise"):
            raise SpecificationError(f'on_give_up is "fail" or "raise", not {self.on_give_up!r}')
        if self.max_pending is not None:
            _check("max_pending", self.max_pending, zero=False, whole=True)
        for name, zero in _NUMBERS.items():
            _check(name, getattr(self, name), zero=zero)
        for name in ("fruitless", "deaths"):
            if REMEMBERED < getattr(self, name) < math.inf:
                raise SpecificationError(f"{name} is at most {REMEMBERED}, or math.inf")

    def decide(self, lives: Sequence[Life], chance: float = 0.0) -> float | None:
        """Say how long to wait before the next life, in seconds; None to give the model up.

        Args:
          lives: The past ones, the latest last; there is one at least.
          chance: From 0.0 to 1.0: how much of the half to take off the delay.
        """
        if lives[-1].permanent or self._spent(lives):
            return None
        step = self._fruitless_in_row(lives) - 2
        delay = self.backoff if step < 0 else max(self.backoff, 2.0**step)
        return min(delay, self.longest_backoff) * (1 - chance / 2)

    def _spent(self, lives: Sequence[Life]) -> bool:
        recent = sum(life.ended_at > lives[-1].ended_at - self.window for life in lives)
        return (
            self._fruitless_in_row(lives) >= self.fruitless
            or recent > self.deaths
            or _woke_twice_in_vain(lives)
        )

    def _fruitless_in_row(self, lives: Sequence[Life]) -> int:
        count = 0
        for life in reversed(lives):
            if life.finished or life.seconds >= self.healthy:
                break
            count += 1
        return count


def _woke_twice_in_vain(lives: Sequence[Life]) -> bool:
    """Whether the one retry that a failed wake gets has failed too, at its load or at its wake."""
    if len(lives) < 2 or not isinstance(lives[-2].error, WakeFailed):
        return False
    last = lives[-1]
    return not last.opened or (isinstance(last.error, WakeFailed) and not last.finished)


def check_policy(policy: object) -> Policy:
    """Return a policy that is one.

    Raises:
      SpecificationError: if it is none.
    """
    if not isinstance(policy, Policy):
        raise SpecificationError(f"not a Policy: {policy!r}")
    return policy


def _check(name: str, value: object, *, zero: bool, whole: bool = False) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if (number > 0 or (zero and number == 0)) and (isinstance(number, int) or not whole):
        return
    least = "a whole number above 0" if whole else "0 or more" if zero else "more than 0"
    raise SpecificationError(f"{name} must be {least}, not {value!r}")


_NUMBERS: Final = {  # and whether it may be 0
    "fruitless": True,
    "healthy": False,
    "deaths": True,
    "window": False,
    "backoff": True,
    "longest_backoff": False,
    "load_stall": False,
    "warm_up_stall": False,
    "silence": False,
    "silent_tokens": False,
}

NO_RESTARTS: Final = Policy(fruitless=0)
"""A model that dies is given up at once; the next `start` loads it anew."""

PERSISTENT: Final = Policy(
    fruitless=math.inf, deaths=math.inf, backoff=0.0, longest_backoff=1.0, max_pending=None
)
"""A model that dies is loaded again, however often; but not one that cannot work at all."""
