"""Four ways to give a request up, each with its outcome.

python examples/cancel.py MODEL.gguf
"""

from __future__ import annotations

import sys

import trio

import llamatrio
from llamatrio import completion_request


async def main(model: str) -> None:
    """Give up four requests; the model stays resident throughout."""
    async with llamatrio.open_provider(llamatrio.ModelConfig(model)) as provider:
        await provider.start()

        async with provider.completion("Once upon a time") as reply:
            async for _ in reply:
                break
        print("left the block:  ", reply.outcome)

        with trio.move_on_after(0.5):
            async with provider.completion("Once upon a time", max_tokens=100_000) as reply:
                await reply.wait()
        print("ran out of time: ", reply.outcome)

        running = provider.submit(completion_request("Once upon a time"))
        waiting = provider.submit(completion_request("Twice upon a time"))
        print("cancelled by id: ", await provider.cancel(waiting.id))

        await provider.stop()
        print("stopped:         ", running.outcome)
        print("residency:       ", provider.residency)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    trio.run(main, sys.argv[1])
