"""Load a model in this process, with no child, and stream from it.

    python examples/in_process.py MODEL.gguf "Why is the sky blue?" [--main-thread]

With --main-thread all native calls run on the main thread of the program, and Trio on another: for
accelerators that want it so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import trio

import llamatrio
from llamatrio.session.dispatch import Dispatcher, HostThread, OwnerThread


async def main(model: str, question: str, dispatcher: Callable[[], Dispatcher]) -> None:
    """Ask one question."""
    backend = llamatrio.NativeBackend(dispatcher=dispatcher)
    config = llamatrio.ModelConfig(model, context=2048, chat_template="chatml")
    async with llamatrio.open_provider(config, backend=backend) as provider:
        await provider.start()
        async with provider.chat(question, max_tokens=100) as reply:
            async for text in reply:
                print(text, end="", flush=True)
        print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model in this process.")
    parser.add_argument("model")
    parser.add_argument("question")
    parser.add_argument("--main-thread", action="store_true")
    chosen = parser.parse_args()
    if chosen.main_thread:
        host = HostThread()
        host.run(main, chosen.model, chosen.question, lambda: host)
    else:
        trio.run(main, chosen.model, chosen.question, OwnerThread)
