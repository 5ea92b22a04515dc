"""Extend the lifecycle: an actor that tells what it does.

python examples/subclass_actor.py MODEL.gguf
"""

from __future__ import annotations

import sys

import trio

import llamatrio
from llamatrio.outcomes import Outcome


class TalkativeActor(llamatrio.LifecycleActor):
    """Prints every change of phase and every outcome."""

    def on_transition(self, transition: llamatrio.Transition) -> None:
        """Called after the phase has changed."""
        print(transition)

    def on_request_finished(self, reply: llamatrio.Reply, outcome: Outcome) -> None:
        """Called after the caller has been told."""
        print(f"request {reply.id}: {type(outcome).__name__}, {outcome.tokens} tokens")


async def main(model: str) -> None:
    """Run one request under the actor's eyes."""
    config = llamatrio.ModelConfig(model)
    async with llamatrio.open_provider(config, actor=TalkativeActor) as provider:
        await provider.start()
        async with provider.completion("Hello", max_tokens=8) as reply:
            await reply.result()
        await provider.stop()
        await provider.unload_model()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    trio.run(main, sys.argv[1])
