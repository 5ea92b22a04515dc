"""An accepted request as its caller sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.errors import RequestCancelled, RequestFailed
from llamatrio.outcomes import Cancelled, Failed, Finished, Outcome, Phase, Usage
from llamatrio.requests import Admitted, Delta, PromptProgress, Request, take_up


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
      submitted_at: When it was accepted, on Trio's clock.
      has_run: Whether it has ever had a slot.
      resumed: How often its model died and it was taken up again by the next.
    """

    # There may be a hundred thousand of these: one object each, for the garbage collector's sake.
    __slots__ = (
        "__weakref__",
        "_admitted",
        "_begun_with",
        "_deltas",
        "_interrupted",
        "_made",
        "_news",
        "_on_cancel",
        "_prompt",
        "_running",
        "_waiting_phase",
        "_was_fruitless",
        "has_run",
        "id",
        "outcome",
        "progress",
        "request",
        "resumed",
        "submitted_at",
    )

    def __init__(
        self,
        id: int,
        request: Request,
        waiting_phase: Callable[[], Phase],
        on_cancel: Callable[[Reply], None],
        submitted_at: float = 0.0,
    ) -> None:
        self.id = id
        self.request = request
        self.outcome: Outcome | None = None
        self.progress: PromptProgress | None = None
        self.submitted_at = submitted_at
        self.resumed = 0
        self._waiting_phase = waiting_phase
        self._on_cancel = on_cancel
        self._running = False
        self._admitted = False
        self._begun_with = 0  # pieces that there were when it got its slot
        self.has_run = False
        self._interrupted = False  # a model died that had begun with it
        self._made = 0  # tokens, by models that died
        self._prompt: int | None = None  # tokens of the prompt, without those
        self._was_fruitless = False  # whether its last try added no piece
        self._deltas: list[Delta] | None = None
        self._news: trio.lowlevel.ParkingLot | None = None

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
        if not self._running:
            return self._waiting_phase()
        return "generating" if self.tokens > self._begun_with else "prompt"

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(delta.text for delta in self._deltas or ())

    @property
    def reasoning(self) -> str:
        """The thoughts so far."""
        return "".join(delta.reasoning for delta in self._deltas or ())

    @property
    def tokens(self) -> int:
        """Pieces of the answer so far."""
        return len(self._deltas or ())

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
            await self._park()
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
        while self.outcome is None and self.tokens <= start:
            await self._park()
        if self.tokens <= start:
            self._finished()
        return (self._deltas or [])[start:]

    async def _park(self) -> None:
        if self._news is None:
            self._news = trio.lowlevel.ParkingLot()
        await self._news.park()

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

    def begin(self) -> Request | None:
        """Note that the request has a slot, and return what to ask.

        None if the answer had reached its bound when its model died: nothing is to be asked.
        """
        self._running = True
        self.has_run = True
        self._admitted = False
        self._begun_with = self.tokens
        self.resumed += self._interrupted
        self._interrupted = False
        if not self.resumed:
            return self.request
        return take_up(self.request, self.text, self._made)

    def emit(self, piece: Admitted | Delta | PromptProgress) -> None:
        """Take a piece of the answer."""
        self._admitted = True
        if isinstance(piece, PromptProgress):
            self.progress = piece
        elif isinstance(piece, Delta):
            self._deltas = self._deltas or []
            self._deltas.append(piece)
        self._wake()

    def may_run_again(self) -> bool:
        """Say whether another model may have it, now that its own died.

        It may, if that model had not begun with it, or if it is to be taken up again; but not twice
        in a row to no avail, for it may be what kills them.
        """
        resumable = self.request.on_crash == "resume" and not self.reasoning
        in_vain = self._was_fruitless and self.tokens == self._begun_with
        return not in_vain and (resumable or not self._admitted)

    def leave_slot(self) -> None:
        """Note that it waits again, to be run by another model."""
        self._running = False
        self._was_fruitless = self.tokens == self._begun_with
        self._interrupted = self._admitted
        if self._prompt is None and self.progress is not None:
            self._prompt = self.progress.total
        self.progress = None
        self._made += self._made_this_time()

    def _made_this_time(self) -> int:
        spoken = [delta for delta in (self._deltas or ())[self._begun_with :] if delta.text]
        return (spoken[-1].generated or len(spoken)) if spoken else 0

    def whole(self, finished: Finished) -> Finished:
        """Count those tokens to the answer that earlier models made, and not to the prompt."""
        if not self._made:
            return finished
        usage, made = finished.usage, self._made
        prompt = self._prompt if self._prompt is not None else max(usage.prompt - made, 0)
        cached = min(usage.cached, prompt)  # the rest was of the answer
        return attrs.evolve(finished, usage=Usage(prompt, cached, usage.completion + made))

    def settle(self, outcome: Outcome) -> Outcome:
        """Take the outcome, the only one, and return it with what it has to say of its tries."""
        assert self.outcome is None, f"{self!r} has an outcome already"
        final = attrs.evolve(outcome, resumed=self.resumed) if self.resumed else outcome
        self.outcome = final
        self._wake()
        return final

    def _wake(self) -> None:
        if self._news is not None:
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
