"""PURE. How an accepted request ended: exactly one of `Finished`, `Cancelled`, `Failed`.

The names are kept in this namespace, so that `outcomes.Cancelled` is never taken for
`trio.Cancelled`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import attrs

By: TypeAlias = Literal["caller", "stop", "shutdown", "deadline", "superseded"]
"""Who cancelled: the caller of the request, a `stop`, the end of the provider's block, one of its
own limits, or a newer request with the same key."""

Limit: TypeAlias = Literal["queue", "first_token", "silence", "total"]
"""Which of the limits of `llamatrio.requests.Limits` was reached."""

Phase: TypeAlias = Literal["queued", "loading", "prompt", "generating"]
"""Where a request stood: waiting for a slot, waiting for the model, having its prompt read, or
producing its answer."""

Reason: TypeAlias = Literal["stop", "length", "tool_calls", "done"]
"""Why an answer is complete: the model ended it, it reached its bound of tokens, it calls tools,
or it is the whole answer of a call that does not stream."""


@attrs.frozen
class Usage:
    """Tokens, as the model's server counted them.

    Attributes:
      prompt: Tokens of the prompt.
      cached: Those of them that were still in the cache and cost nothing.
      completion: Tokens of the answer.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0


@attrs.frozen
class Finished:
    """The answer is complete.

    Attributes:
      reason: Why it ended.
      usage: What it cost.
      timings: llama.cpp's own measurements, in milliseconds where the name ends in `_ms`.
      body: The whole answer of a call that does not stream; None otherwise.
      resumed: How often its model died and it was taken up again by the next.
    """

    reason: Reason
    usage: Usage = Usage()
    timings: Mapping[str, float] = attrs.field(factory=dict)
    body: object = attrs.field(default=None, repr=False)
    resumed: int = attrs.field(default=0, kw_only=True)

    @property
    def tokens(self) -> int:
        """Tokens of the answer."""
        return self.usage.completion


@attrs.frozen
class Cancelled:
    """The request was given up before its answer was complete.

    Attributes:
      by: Who gave it up.
      phase: Where it stood.
      tokens: Pieces of the answer that had arrived; llama.cpp sends one for each token, save
        that a character of several tokens comes as one.
      limit: Which limit was reached, if it was given up by "deadline"; None otherwise.
      resumed: How often its model died and it was taken up again by the next.
    """

    by: By
    phase: Phase
    tokens: int = 0
    limit: Limit | None = attrs.field(default=None, kw_only=True)
    resumed: int = attrs.field(default=0, kw_only=True)


@attrs.frozen
class Failed:
    """Something broke before the answer was complete.

    Attributes:
      error: What broke.
      phase: Where the request stood.
      tokens: Pieces of the answer that had arrived.
      resumed: How often its model died and it was taken up again by the next.
    """

    error: Exception
    phase: Phase
    tokens: int = 0
    resumed: int = attrs.field(default=0, kw_only=True)


Outcome: TypeAlias = Finished | Cancelled | Failed
