"""Ask a server that somebody else owns: a llama-server, or any other that speaks OpenAI's protocol.

python examples/attached.py URL [QUESTION]

If it wants a key, put that into the variable LLAMATRIO_KEY.
"""

from __future__ import annotations

import os
import sys

import trio

import llamatrio


async def main(url: str, question: str) -> None:
    """Ask one question, and leave the server as it was."""
    key = os.environ.get("LLAMATRIO_KEY")
    async with llamatrio.attach_provider(url, key=key) as provider:
        await provider.start()
        print(f"[{provider.dialect}: {provider.info.get('id')}]", file=sys.stderr)
        async with provider.chat(question) as reply:
            async for text in reply:
                print(text, end="", flush=True)
        print()
        print(reply.outcome, file=sys.stderr)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    try:
        trio.run(main, sys.argv[1], " ".join(sys.argv[2:]) or "Why is the sky blue?")
    except llamatrio.LlamatrioError as exc:
        sys.exit(f"error: {exc}")
