"""The way of the quickstart through the lifecycle, for those who want to disturb it.

As a program, `cycle.py MODEL REPORT` goes this way once. It says `imported` on its stderr when
everything has been imported, and in the end writes into the file REPORT whether the way is `over`
or was `interrupted`, when by `time.monotonic` that was, and what became of the child.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import trio

from llamatrio import Backend, LifecycleActor, ModelConfig, completion_request, open_provider
from llamatrio.child.launch import Kind
from llamatrio.ownership import ActorFactory


class Accounts:
    """Keeps the actors that it makes, to look at their accounts afterwards."""

    def __init__(self) -> None:
        self.actors: list[LifecycleActor] = []

    def __call__(self, config: ModelConfig, backend: Backend) -> LifecycleActor:
        """Make an actor."""
        self.actors.append(LifecycleActor(config, backend))
        return self.actors[-1]

    @property
    def balanced(self) -> bool:
        """Whether every accepted request has exactly one outcome."""
        return all(balanced(actor) for actor in self.actors)


def balanced(actor: LifecycleActor) -> bool:
    """Say whether every accepted request has exactly one outcome, and none is left."""
    counters, now = actor.counters, actor.diagnostics()
    ended = counters.finished + counters.cancelled + counters.failed
    return counters.accepted == ended and now.running == now.pending == 0


async def cycle(
    model: str | os.PathLike[str],
    kind: Kind | None = None,
    actor: ActorFactory = LifecycleActor,
    tokens: int = 12,
    rounds: int = 1,
) -> None:
    """Open, start, chat, cancel, stop, start, stop, unload, leave."""
    config = ModelConfig(os.fspath(model), threads=1)
    async with open_provider(config, backend=kind, actor=actor) as provider:
        await provider.start()
        async with provider.chat("Hello", temperature=0, max_tokens=tokens) as reply:
            async for _ in reply:
                pass
        for _ in range(rounds):
            request = completion_request("Hello", max_tokens=tokens)
            replies = [provider.submit(request) for _ in range(3)]
            replies[2].cancel()
            await provider.cancel(replies[0].id)
            await provider.stop()
            await provider.start()
        await provider.stop()
        await provider.unload_model()


def main() -> None:
    """Go the way once."""
    model, report = sys.argv[1:]
    os.write(2, b"imported\n")
    accounts = Accounts()
    end = "interrupted"
    try:
        trio.run(cycle, model, None, accounts)
        end = "over"
    finally:
        left = time.monotonic()
        children = [actor.diagnostics() for actor in accounts.actors]
        Path(report).write_text(f"{end} {left} {children}")


if __name__ == "__main__":
    main()
