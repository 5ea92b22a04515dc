"""A provider without a model: for tests of programs that use one.

It needs no wheel, no file and no child, and takes its time on Trio's clock alone: with
`trio.testing.MockClock(autojump_threshold=0)`, or pytest-trio's `autojump_clock`, an hour of it is
over at once. All but the model is real: the actor, its phases, the queue, cancellation, and
exactly one outcome for every request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeAlias

import trio

from llamatrio.config import ModelConfig
from llamatrio.errors import ChildDied, ChildError, LoadFailed, StreamBroken
from llamatrio.lifecycle.actor import LifecycleActor
from llamatrio.outcomes import Finished, Usage
from llamatrio.provider import ActorFactory, LocalProvider, open_provider
from llamatrio.requests import STREAMED, Delta, PromptProgress, Request
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
        self._session: _ScriptedSession | None = None
        self._publish: Publish | None = None
        self._death: trio.Event | None = None
        self._death_error: ChildError = ChildDied("never said")
        self.requests: list[Request] = []
        self.loads = 0

    # -- what a test may do to it --------------------------------------------------------------

    def fail_next_load(self, error: ChildError | None = None) -> None:
        """Let the next load fail, after its time."""
        self._load_errors.append(error or LoadFailed("the script said so"))

    def crash(self, error: ChildError | None = None) -> None:
        """Let the model die now; there must be one."""
        assert self._death is not None, "there is no model that could crash"
        self._death_error = error or ChildDied("the script said so")
        if self._session is not None:
            self._session.end()
        self._death.set()

    def sleep(self) -> None:
        """Let the model give its memory back. The next request wakes it, in the time of a load."""
        assert self._session is not None, "there is no model that could sleep"
        assert self._publish is not None
        self._session.asleep = True
        self._publish(Asleep())

    # -- what the actor does with it -----------------------------------------------------------

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        """Play one life of the model; see `Backend.run`. Cancellation ends it at once."""
        self._publish = publish
        self._death = trio.Event()
        try:
            publish(LoadProgress(0.0, "script", ("script",)))
            with trio.move_on_after(self._load_time):
                await self._death.wait()
            if self._death.is_set():
                error = self._death_error
            elif self._load_errors:
                error = self._load_errors.pop(0)
            else:
                error = await self._serve(publish)
            publish(Ended(error))
        finally:
            self._publish = self._death = self._session = None

    async def _serve(self, publish: Publish) -> ChildError:
        assert self._death is not None
        self.loads += 1
        self._session = _ScriptedSession(self)
        publish(LoadProgress(1.0, "script", ("script",)))
        publish(Opened(self._session))
        await self._death.wait()
        return self._death_error

    async def wake(self) -> None:
        """Take the time of a load, for a session that had slept. Cancellation: it sleeps on."""
        assert self._publish is not None
        self._publish(LoadProgress(0.0, "script", ("script",)))
        await trio.sleep(self._load_time)
        self._publish(Awake())

    async def play(self, request: Request, emit: Emit) -> Finished:
        """Say what the script says. Cancellation: falls silent at once."""
        self.requests.append(request)
        emit(PromptProgress(1, 0, 0, 0.0))
        await trio.sleep(self._prompt_time)
        said = self._script(request)
        if isinstance(said, Exception):
            raise said
        pieces = re.findall(r"\s*\S+\s*$|\s*\S+", said) if isinstance(said, str) else list(said)
        emit(PromptProgress(1, 0, 1, self._prompt_time))
        bound = _bound(request)
        for number, piece in enumerate(pieces[:bound]):
            if number:
                await trio.sleep(self._token_time)
            emit(Delta(piece))
        usage = Usage(prompt=1, completion=min(bound, len(pieces)))
        return Finished("length" if len(pieces) > bound else "stop", usage)


class _ScriptedSession(ModelSession):
    def __init__(self, backend: ScriptedBackend) -> None:
        self._backend = backend
        self._running: set[trio.CancelScope] = set()
        self._ended = False
        self.asleep = False

    def end(self) -> None:
        self._ended = True
        for scope in self._running:
            scope.cancel()

    async def perform(self, request: Request, emit: Emit) -> Finished:
        with trio.CancelScope() as scope:
            self._running.add(scope)
            try:
                if self.asleep:
                    await self._backend.wake()
                    self.asleep = False
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
      actor: As in `llamatrio.open_provider`.
    """
    played = backend if isinstance(backend, ScriptedBackend) else ScriptedBackend(backend)
    return open_provider(config or ModelConfig("scripted.gguf"), backend=played, actor=actor)
