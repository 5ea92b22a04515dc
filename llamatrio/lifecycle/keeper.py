"""One task for each generation: it runs the backend, and has the last word on its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.config import ModelConfig
from llamatrio.errors import ChildError, LlamatrioError
from llamatrio.session.base import (
    Asleep,
    Awake,
    Backend,
    Ended,
    LoadProgress,
    ModelSession,
    Opened,
    SessionEvent,
)


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
      progress: How far the load is, or None once it is loaded.
      began: When it began, on Trio's clock.
      opened: When the model was loaded, or None if it was not.
      end: The last word, or None as long as it lives.
    """

    def __init__(self, number: int, config: ModelConfig, backend: Backend) -> None:
        self.number = number
        self.config = config
        self.backend = backend
        self.scope: Final = trio.CancelScope()
        self.session: ModelSession | None = None
        self.asleep = False
        self.progress: LoadProgress | None = LoadProgress()
        self.began = trio.current_time()
        self.opened: float | None = None
        self.end: Ended | None = None
        self._ended = trio.Event()

    async def wait_ended(self) -> Ended:
        """Wait for the last word.

        Cancellation: abandons the wait.
        """
        await self._ended.wait()
        assert self.end is not None
        return self.end

    def note(self, event: SessionEvent) -> None:
        """Keep what an event says."""
        match event:
            case LoadProgress():
                self.progress = event
            case Opened():
                self.session = event.session
                self.opened = trio.current_time()
                self.progress = None
            case Asleep():
                self.asleep = True
            case Awake():
                self.asleep = False
                self.progress = None
            case Ended():
                self.session = None
                self.progress = None
                self.end = event
                self._ended.set()


@enable_ki_protection
async def keep(
    generation: Generation,
    report: Callable[[Generation, SessionEvent], None],
) -> None:
    """Run a generation to its end.

    Args:
      generation: What to run; cancelling its scope ends it.
      report: Is told every event, the last of them `Ended`, exactly once. What a backend tells
        after that is lost.
    """

    def publish(event: SessionEvent) -> None:
        if generation.end is None:
            generation.note(event)
            report(generation, event)

    error: LlamatrioError | None = None
    try:  # around the scope, which first takes a cancel out of a group
        with generation.scope:
            await generation.backend.run(generation.config, publish)
    except LlamatrioError as exc:
        error = exc
    except Exception as exc:  # noqa: BLE001 - whatever a backend of yours raises ends it alone
        error = ChildError(f"the backend broke: {exc!r}")
        error.__cause__ = exc
    publish(Ended(error))
