"""An answer that survives the death of its model, which this program kills.

python examples/recover.py MODEL.gguf
"""

from __future__ import annotations

import os
import signal
import sys

import trio

import llamatrio

if sys.platform == "win32":
    KILL = signal.SIGTERM
else:
    KILL = signal.SIGKILL


class Narrator(llamatrio.LifecycleActor):
    """Says what happens to the model."""

    def on_transition(self, transition: llamatrio.Transition) -> None:
        """Print it."""
        print(f"\n[{transition}]", file=sys.stderr)


async def main(model: str) -> None:
    """Ask, and kill the child once."""
    config = llamatrio.ModelConfig(model, context=2048)
    async with llamatrio.open_provider(config, actor=Narrator) as provider:
        await provider.start()
        async with provider.chat(
            "Tell me a story about a parrot.", max_tokens=120, temperature=0, on_crash="resume"
        ) as reply:
            killed = False
            async for text in reply:
                print(text, end="", flush=True)
                pid = provider.diagnostics().pid
                if not killed and reply.tokens >= 20 and pid is not None:
                    os.kill(pid, KILL)
                    killed = True
        print(f"\n{reply.outcome}", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    trio.run(main, sys.argv[1])
