"""An accepted request as its caller sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.errors import RequestCancelled, RequestFailed
from llamatrio.outcomes import Cancelled, Failed, Finished, Outcome, Phase
from llamatrio.requests import Delta, PromptProgress, Request


@attrs.frozen
class Result:
    """A finished answer, whole.

    Attributes:
      text: Its text.
      outcome: How it ended, and what it cost.
      reasoning: Thoughts of a reasoning model, where they are kept apart.
    """

    text: str
    outcome: Finished
    reasoning: str = ""


class Reply:
    """The answer to one accepted request, while it comes and afterwards.

    The model is read to the end whether anybody reads this or not: a slow reader gets several
    pieces joined into one, and never keeps a slot from others. Any number of tasks may read; each
    gets the whole answer.

    Attributes:
      id: The number of the request, unique within its provider.
      request: What was asked.
      outcome: How it ended; None until then. It is set exactly once.
      progress: How much of the prompt has been read, or None if that is not known yet.
    """

    def __init__(
        self,
        id: int,
        request: Request,
        waiting_phase: Callable[[], Phase],
        on_cancel: Callable[[Reply], None],
    ) -> None:
        self.id = id
        self.request = request
        self.outcome: Outcome | None = None
        self.progress: PromptProgress | None = None
        self._waiting_phase = waiting_phase
        self._on_cancel = on_cancel
        self._running = False
        self._deltas: list[Delta] = []
        self._news = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        state = self.phase if self.outcome is None else type(self.outcome).__name__
        return f"<Reply {self.id} {self.request.path} {state}>"

    # -- for the caller ------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Where the request stands: queued, loading, prompt or generating; at the end, where it
        stood then."""
        if isinstance(self.outcome, Cancelled | Failed):
            return self.outcome.phase
        if self._deltas:
            return "generating"
        return "prompt" if self._running else self._waiting_phase()

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(delta.text for delta in self._deltas)

    @property
    def reasoning(self) -> str:
        """The thoughts so far."""
        return "".join(delta.reasoning for delta in self._deltas)

    @property
    def tokens(self) -> int:
        """Pieces of the answer so far."""
        return len(self._deltas)

    @enable_ki_protection
    def cancel(self) -> None:
        """Give the request up. Its outcome follows shortly, if it had none yet.

        A request that has finished in the meantime stays finished.
        """
        if self.outcome is None:
            self._on_cancel(self)

    async def wait(self) -> Outcome:
        """Wait for the outcome, whatever it is.

        Cancellation: abandons the wait; the request goes on.
        """
        await trio.lowlevel.checkpoint()
        while self.outcome is None:
            await self._news.park()
        return self.outcome

    async def result(self) -> Result:
        """Wait for the whole answer.

        Cancellation: abandons the wait; the request goes on.

        Raises:
          RequestCancelled: if it was cancelled, by whomever.
          RequestFailed: if it failed.
        """
        await self.wait()
        return Result(self.text, self._finished(), self.reasoning)

    def __aiter__(self) -> TextReader:
        """Read the text as it comes: `async for text in reply`.

        The loop ends only if the answer is finished. Cancellation abandons the reading; the
        request goes on.

        Raises:
          RequestCancelled: if it was cancelled, by whomever.
          RequestFailed: if it failed.
        """
        return TextReader(self)

    def deltas(self) -> DeltaReader:
        """Read the answer piece by piece, with all that came with the text.

        As `async for text in reply` otherwise, and with the same errors.
        """
        return DeltaReader(self)

    async def read(self, start: int) -> list[Delta]:
        """Wait for pieces of the answer from number `start` on; none at its end.

        Cancellation: nothing is lost.

        Raises:
          RequestCancelled: if there are no more, and it was cancelled.
          RequestFailed: if there are no more, and it failed.
        """
        await trio.lowlevel.checkpoint()
        while self.outcome is None and len(self._deltas) <= start:
            await self._news.park()
        if len(self._deltas) <= start:
            self._finished()
        return self._deltas[start:]

    def _finished(self) -> Finished:
        match self.outcome:
            case Finished():
                return self.outcome
            case Cancelled():
                raise RequestCancelled(self.outcome, self.text)
            case Failed():
                raise RequestFailed(self.outcome, self.text) from self.outcome.error
            case None:
                raise AssertionError("no outcome yet")

    # -- for the work --------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that the request has a slot."""
        self._running = True

    def emit(self, piece: Delta | PromptProgress) -> None:
        """Take a piece of the answer."""
        if isinstance(piece, PromptProgress):
            self.progress = piece
        else:
            self._deltas.append(piece)
        self._news.unpark_all()

    def settle(self, outcome: Outcome) -> None:
        """Take the outcome, the only one."""
        assert self.outcome is None, f"{self!r} has an outcome already"
        self.outcome = outcome
        self._news.unpark_all()


class TextReader:
    """Reads the text of a reply; see `Reply.__aiter__`."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._read = 0

    def __aiter__(self) -> TextReader:
        return self

    async def __anext__(self) -> str:
        while deltas := await self._reply.read(self._read):
            self._read += len(deltas)
            if text := "".join(delta.text for delta in deltas):
                return text
        raise StopAsyncIteration


class DeltaReader:
    """Reads the pieces of a reply; see `Reply.deltas`."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._read = 0
        self._ahead: deque[Delta] = deque()

    def __aiter__(self) -> DeltaReader:
        return self

    async def __anext__(self) -> Delta:
        if self._ahead:
            await trio.lowlevel.checkpoint()
        else:
            self._ahead.extend(await self._reply.read(self._read))
        if not self._ahead:
            raise StopAsyncIteration
        self._read += 1
        return self._ahead.popleft()
