"""A provider without a model: for tests of programs that use one.

It needs no wheel, no file and no child, and takes its time on Trio's clock alone: with
`trio.testing.MockClock(autojump_threshold=0)`, or pytest-trio's `autojump_clock`, an hour of it is
over at once. All but the model is real: the actor, its phases, the queue, cancellation, and
exactly one outcome for every request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Final, Literal, TypeAlias

import trio

from llamatrio.child.exits import Exit
from llamatrio.config import ModelConfig
from llamatrio.errors import ChildDied, ChildError, LoadFailed, StreamBroken, WakeFailed
from llamatrio.lifecycle.actor import LifecycleActor
from llamatrio.lifecycle.policy import Policy
from llamatrio.outcomes import Finished, Usage
from llamatrio.ownership import ActorFactory, open_provider
from llamatrio.provider import LocalProvider
from llamatrio.requests import STREAMED, Admitted, Delta, PromptProgress, Request
from llamatrio.session.base import (
    Asleep,
    Awake,
    Backend,
    Emit,
    Ended,
    LoadProgress,
    ModelSession,
    Opened,
    Publish,
)

Script: TypeAlias = Callable[[Request], str | Iterable[str] | Exception]
"""What the model says to a request: a text, its pieces, or an error to raise."""

ANSWER: Final = "This is what was written in the script."


class ScriptedBackend(Backend):
    """Plays a model.

    Args:
      answer: What it says: always the same text, or a function of the request.
      load_time: Seconds that a load takes.
      prompt_time: Seconds from a request to its first piece.
      token_time: Seconds from one piece to the next.

    Attributes:
      requests: Every request that reached the model, in order.
      loads: How often it was loaded with success.
      alive: Whether it shows signs of life even while it hangs or has nothing to do. It always
        does while it takes its time.
    """

    def __init__(
        self,
        answer: str | Script = ANSWER,
        *,
        load_time: float = 1.0,
        prompt_time: float = 0.1,
        token_time: float = 0.1,
    ) -> None:
        self._script: Script = (lambda _: answer) if isinstance(answer, str) else answer
        self._load_time = load_time
        self._prompt_time = prompt_time
        self._token_time = token_time
        self._load_errors: list[ChildError] = []
        self._wake_errors: list[ChildError] = []
        self._hanging = {"load": 0, "wake": 0}
        self._hanging_answers: list[int] = []
        self._busy = 0  # how many of its doings take their time
        self._signs = 0
        self._session: _ScriptedSession | None = None
        self._publish: Publish | None = None
        self._death: trio.Event | None = None
        self._death_error: ChildError = ChildDied("never said")
        self.requests: list[Request] = []
        self.loads = 0
        self.alive = False

    # -- what a test may do to it --------------------------------------------------------------

    def fail_next_load(self, error: ChildError | None = None) -> None:
        """Let the next load fail, after its time. Without an error, the model refuses in order."""
        refused = Exit(pid=0, returncode=1)
        self._load_errors.append(error or LoadFailed("the script said so", refused))

    def hang_next_load(self) -> None:
        """Let the next load come to no end, in silence."""
        self._hanging["load"] += 1

    def fail_next_wake(self, error: ChildError | None = None) -> None:
        """Let the model die when it is next woken, after the time of a load."""
        aborted = Exit(pid=0, returncode=-6, signal="SIGABRT", ready=True)
        self._wake_errors.append(error or WakeFailed("the script said so", aborted))

    def hang_next_wake(self) -> None:
        """Let the next wake come to no end, in silence."""
        self._hanging["wake"] += 1

    def hang_next_answer(self, after: int = 0) -> None:
        """Let the next answer hang, in silence, after so many pieces."""
        self._hanging_answers.append(after)

    def crash(self, error: ChildError | None = None) -> None:
        """Let the model die now, by default as one that is killed; there must be one."""
        assert self._death is not None, "there is no model that could crash"
        killed = Exit(pid=0, returncode=-9, signal="SIGKILL", ready=True)
        self._death_error = error or ChildDied("the script said so", killed)
        self._death.set()
        if self._session is not None:
            self._session.end()

    def sleep(self) -> None:
        """Let the model give its memory back. The next request wakes it, in the time of a load."""
        assert self._session is not None, "there is no model that could sleep"
        assert self._publish is not None
        self._session.lie_down()
        self._publish(Asleep())

    # -- what the actor does with it -----------------------------------------------------------

    def signs_of_life(self) -> object:
        """Return another value each time while there is something to be seen."""
        self._signs += self.alive or self._busy > 0
        return self._signs

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        """Play one life of the model; see `Backend.run`. Cancellation ends it at once."""
        self._publish = publish
        self._death = trio.Event()
        try:
            publish(LoadProgress(0.0, "script", ("script",)))
            await self._load("load")
            if self._death.is_set():
                error = self._death_error
            elif self._load_errors:
                error = self._load_errors.pop(0)
            else:
                error = await self._serve(publish)
            publish(Ended(error, error.exit))
        finally:
            self._publish = self._death = self._session = None

    async def _load(self, what: Literal["load", "wake"]) -> None:
        """Take the time of a load, or for ever; return at once when the model dies."""
        assert self._death is not None
        if self._hanging[what]:
            self._hanging[what] -= 1
            await self._death.wait()
        else:
            with trio.move_on_after(self._load_time), self._working():
                await self._death.wait()

    async def _serve(self, publish: Publish) -> ChildError:
        assert self._death is not None
        self.loads += 1
        self._session = session = _ScriptedSession(self)
        publish(LoadProgress(1.0, "script", ("script",)))
        publish(Opened(session))
        while True:
            await session.called.wait()
            if not self._death.is_set():
                await self._wake(session, publish)
            if self._death.is_set():
                return self._death_error

    async def _wake(self, session: _ScriptedSession, publish: Publish) -> None:
        assert self._death is not None
        publish(LoadProgress(0.0, "script", ("script",)))
        await self._load("wake")
        if self._death.is_set():
            return
        if self._wake_errors:
            self.crash(self._wake_errors.pop(0))
        else:
            publish(Awake())
            session.get_up()

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    async def _work(self, seconds: float) -> None:
        with self._working():
            await trio.sleep(seconds)

    async def play(self, request: Request, emit: Emit) -> Finished:
        """Say what the script says. Cancellation: falls silent at once."""
        hangs_after = self._hanging_answers.pop(0) if self._hanging_answers else None
        self.requests.append(request)
        emit(Admitted())
        emit(PromptProgress(1, 0, 0, 0.0))
        await self._work(self._prompt_time)
        said = self._script(request)
        if isinstance(said, Exception):
            raise said
        pieces = re.findall(r"\s*\S+\s*$|\s*\S+", said) if isinstance(said, str) else list(said)
        del pieces[: _already_said(request, pieces)]
        emit(PromptProgress(1, 0, 1, self._prompt_time))
        bound = _bound(request)
        for number, piece in enumerate(pieces[:bound]):
            if number == hangs_after:
                break
            if number:
                await self._work(self._token_time)
            emit(Delta(piece))
        if hangs_after is not None:
            await trio.sleep_forever()
        usage = Usage(prompt=1, completion=min(bound, len(pieces)))
        return Finished("length" if len(pieces) > bound else "stop", usage)


def _already_said(request: Request, pieces: list[str]) -> int:
    """Count the pieces with which a request ends that takes a broken answer up again."""
    body = request.body if isinstance(request.body, Mapping) else {}
    match body:
        case {"continue_final_message": True, "messages": [*_, {"content": str(begun)}]}:
            pass
        case {"prompt": str(begun)}:
            pass
        case _:
            return 0
    said, length = 0, 0
    for count, piece in enumerate(pieces, 1):
        length += len(piece)
        if length > len(begun):
            break
        if begun.endswith("".join(pieces[:count])):
            said = count
    return said


class _ScriptedSession(ModelSession):
    def __init__(self, backend: ScriptedBackend) -> None:
        self._backend = backend
        self._running: set[trio.CancelScope] = set()
        self._awake = trio.Event()
        self._awake.set()
        self.called = trio.Event()  # something wakes it, be it death

    def lie_down(self) -> None:
        self._awake = trio.Event()

    def get_up(self) -> None:
        self.called = trio.Event()
        self._awake.set()

    def end(self) -> None:
        self.called.set()
        for scope in self._running:
            scope.cancel()

    async def perform(self, request: Request, emit: Emit) -> Finished:
        with trio.CancelScope() as scope:
            self._running.add(scope)
            try:
                if not self._awake.is_set():
                    self.called.set()
                    await self._awake.wait()
                return await self._backend.play(request, emit)
            finally:
                self._running.discard(scope)
        raise StreamBroken("the model died within the answer")


def _bound(request: Request) -> int:
    body = request.body if isinstance(request.body, Mapping) else {}
    bounds = [body.get(name) for name in STREAMED.get(request.path, ())]
    return next((bound for bound in bounds if isinstance(bound, int)), 1024)


def open_scripted_provider(
    backend: ScriptedBackend | str | Script = ANSWER,
    *,
    config: ModelConfig | None = None,
    policy: Policy | None = None,
    actor: ActorFactory = LifecycleActor,
) -> AbstractAsyncContextManager[LocalProvider]:
    """Own a provider that plays its model; everything else is as in `llamatrio.open_provider`.

    ::

        async def test_greeting(autojump_clock):
            async with open_scripted_provider("Hello, world") as provider:
                await provider.start()
                assert await my_program.greet(provider) == "Hello, world"

    Args:
      backend: What is said, or a backend that the test has a hand on.
      config: How many slots there are, above all; the model's name means nothing.
      policy: As in `llamatrio.open_provider`.
      actor: As in `llamatrio.open_provider`.
    """
    played = backend if isinstance(backend, ScriptedBackend) else ScriptedBackend(backend)
    config = config or ModelConfig("scripted.gguf")
    return open_provider(config, backend=played, policy=policy, actor=actor)
