"""Every error that llamatrio raises, sorted by whose fault it is.

`LlamatrioError` is the one base class. Below it stand five branches:

* `SpecificationError`: what you asked for cannot be done. Nothing was started or changed.
* `ChildError`: the child process, or the backend in its place, broke.
* `RequestRefused`: the model's server understood a request and said no.
* `LimitError`: something took too long or grew too large.
* `ClosedError`: you, or somebody else in your program, had closed it.

`RequestCancelled` and `RequestFailed` are what reading a reply raises when its outcome is not
`llamatrio.outcomes.Finished`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamatrio.child.exits import Exit
    from llamatrio.outcomes import Cancelled, Failed


class LlamatrioError(Exception):
    """The base class of every error of this library."""


# -- what you asked for ------------------------------------------------------------------------


class SpecificationError(LlamatrioError):
    """A configuration, a request or a call that cannot work as it stands; nothing was started."""


class ModelFileError(SpecificationError):
    """The model file is missing, unreadable or not a GGUF file.

    Args:
      path: The file as it was given.
      reason: What is wrong with it.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot use {self.path!r} as a model: {self.reason}"


class SpawnError(SpecificationError):
    """The child's program could not be executed; no process was left. `__cause__` is the OSError.

    Args:
      program: The program that was to run.
      reason: What the operating system said.
    """

    def __init__(self, program: str, reason: str) -> None:
        super().__init__(program, reason)
        self.program = program
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot run {self.program!r}: {self.reason}"


class WrongPhase(SpecificationError):
    """A verb that the present phase refuses, such as unloading a model while requests may run."""


class WrongThread(SpecificationError):
    """A call from outside the Trio thread; use `trio.from_thread.run_sync` to get there."""


class WrongProcess(SpecificationError):
    """A call from a forked copy of the program. The model belongs to the process that opened it."""


class VerbInHook(SpecificationError):
    """A verb called inside a hook of the actor, which would wait for itself.

    Wake a task of yours instead, and let that call the verb.
    """


class NotOwned(SpecificationError):
    """A verb for the owner of a model, called on a provider that is attached to somebody else's."""


class NotReachable(SpecificationError):
    """Nothing that can be attached to answers at the URL that was given."""


class KeyRefused(SpecificationError):
    """The server that was to be attached to wants a key, or another one than it was told."""


# -- the child ---------------------------------------------------------------------------------


class ChildError(LlamatrioError):
    """The child broke.

    Args:
      message: What happened, in one sentence.
      exit: How the process ended, or None if it had not ended, or if there was none.
      stderr_tail: The last lines of the child's log, secrets left out; empty if there were none.
    """

    def __init__(
        self, message: str, exit: Exit | None = None, stderr_tail: str | None = None
    ) -> None:
        super().__init__(message, exit, stderr_tail)
        self.message = message
        self.exit = exit
        self.stderr_tail = stderr_tail if stderr_tail is not None else exit.tail if exit else ""

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal, or None if there is none."""
        return self.exit.returncode if self.exit else None

    def __str__(self) -> str:
        return self.message


class LoadFailed(ChildError):
    """The child ended before the model was ready."""


class ChildDied(ChildError):
    """The child ended by itself after the model had been ready."""


class WakeFailed(ChildError):
    """The child ended while it loaded the model again, after sleep."""


class ModelChanged(ChildError):
    """The model's file is no longer the one that was loaded; what is there now is not served.

    `start` takes the new file, if it is meant to be used.
    """


class MergedStreams(SpecificationError, ChildError):
    """Something merges the child's stdout and stderr, so that a record could be a line of a log.

    Where that shows in the command, nothing was started; else the child was ended. It would be no
    better the next time, so it is not tried again.

    Args:
      message: What is wrong, in one sentence.
      exit: Always None, as for every fault for which a child is ended.
      stderr_tail: The last lines of the child's log, secrets left out; empty if there were none.
      evidence: What was seen, in sentences.
      suggestion: A command line that would work.
    """

    def __init__(
        self,
        message: str,
        exit: Exit | None = None,
        stderr_tail: str | None = None,
        evidence: tuple[str, ...] = (),
        suggestion: str = "",
    ) -> None:
        super().__init__(message, exit, stderr_tail)
        self.args = (message, exit, stderr_tail, evidence, suggestion)
        self.evidence = evidence
        self.suggestion = suggestion

    def __str__(self) -> str:
        seen = "".join(f"; {sentence}" for sentence in self.evidence)
        instead = f"; this keeps them apart: {self.suggestion}" if self.suggestion else ""
        return f"{self.message}{seen}{instead}"


class StdoutClosed(ChildError):
    """The child closed its stdout while it went on, so that no record of it can come; it was ended.

    A model that falls asleep, or wakes up with another file, could not say so any more.
    """


class NoHandshake(ChildError):
    """The child wrote no lifecycle record in time; it was ended."""


class ForeignServer(ChildError):
    """Another program answers at the child's port. It was asked nothing; the child was ended."""


class StateFlood(ChildError):
    """The child wrote lifecycle records faster than they could be taken; it was ended."""


class Unkillable(ChildError):
    """The process was still there long after SIGKILL; it was left to the operating system."""


class StreamBroken(ChildError):
    """The connection ended before the answer had its terminal mark."""


class ServerGone(ChildError):
    """An attached server cannot be reached any more; the request was not sent."""


class BadAnswer(ChildError):
    """The child's answer is not what its protocol promises, such as JSON that does not parse."""


# -- the model's server said no ----------------------------------------------------------------


class RequestRefused(LlamatrioError):
    """The model's server answered a request with an error.

    Args:
      status: The HTTP status, or 0 for an error that arrived inside a stream.
      kind: The server's own word for it, such as "invalid_request_error".
      message: The server's sentence.
      details: The server's error object, whole.
    """

    def __init__(
        self, status: int, kind: str, message: str, details: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(status, kind, message, details)
        self.status = status
        self.kind = kind
        self.message = message
        self.details = dict(details or {})

    def __str__(self) -> str:
        return f"the model's server refused the request ({self.kind}): {self.message}"


class ContextExceeded(RequestRefused):
    """The prompt has more tokens than a slot's context; shorten it or raise `context`."""

    @property
    def prompt_tokens(self) -> int | None:
        """How many tokens the prompt has, as far as the server said."""
        return _integer(self.details.get("n_prompt_tokens"))

    @property
    def context(self) -> int | None:
        """How many tokens a slot holds, as far as the server said."""
        return _integer(self.details.get("n_ctx"))


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None


# -- too long, too large -----------------------------------------------------------------------


class LimitError(LlamatrioError):
    """Something took longer, or grew larger, than its stated limit."""


class QueueFull(LimitError):
    """As many requests wait as may; this one was not accepted.

    Args:
      length: How many wait.
      limit: How many may; see `Policy.max_pending`.
    """

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(length, limit)
        self.length = length
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.length} requests are waiting, and no more than {self.limit} may"


class LoadStalled(LimitError, ChildError):
    """A load showed no sign of life: no progress, no line of log, no CPU time. It was ended."""


class ChildSilent(LimitError, ChildError):
    """The child answered no more, and showed no other sign of life. It was ended."""


class AnswerTooLarge(LimitError, ChildError):
    """One event or one whole answer of the child is larger than we are willing to hold."""


# -- closed ------------------------------------------------------------------------------------


class ClosedError(LlamatrioError):
    """The thing that you used had been closed, or was closed while you waited."""


class NotStarted(ClosedError):
    """No request is accepted now: the queue is open from `start` to `stop`."""


class StartInterrupted(ClosedError):
    """A `start` was given up because of a later `stop` or `unload_model`."""


class ProviderClosed(ClosedError):
    """The provider's block has been left, or is being left."""


# -- reading a reply ---------------------------------------------------------------------------


class RequestCancelled(LlamatrioError):
    """The request whose reply you read was cancelled.

    Not to be confused with `trio.Cancelled`, which says that *you* were cancelled.

    Args:
      outcome: Who cancelled it, and where it stood.
      text: The text that had been made by then.
    """

    def __init__(self, outcome: Cancelled, text: str) -> None:
        super().__init__(outcome, text)
        self.outcome = outcome
        self.text = text

    def __str__(self) -> str:
        by = {
            "deadline": f"its {self.outcome.limit} limit",
            "superseded": "a newer one with its key",
        }.get(self.outcome.by, self.outcome.by)
        where = f"{self.outcome.phase}, after {self.outcome.tokens} tokens"
        return f"the request was cancelled by {by} ({where})"


class RequestFailed(LlamatrioError):
    """The request whose reply you read failed; `__cause__` is what went wrong.

    Args:
      outcome: The error, and where the request stood.
      text: The text that had been made by then. It is not a finished answer.
    """

    def __init__(self, outcome: Failed, text: str) -> None:
        super().__init__(outcome, text)
        self.outcome = outcome
        self.text = text

    def __str__(self) -> str:
        return f"the request failed ({self.outcome.phase}): {self.outcome.error}"


class ProviderBroken(LlamatrioError):
    """The actor itself broke, by a defect of this library; `__cause__` is the error."""
