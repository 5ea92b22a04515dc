"""Stop keeps the model and its cache: after a start, a long prompt costs next to nothing.

python examples/stop_start.py MODEL.gguf
"""

from __future__ import annotations

import sys

import trio

import llamatrio

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


async def ask(provider: llamatrio.LocalProvider) -> None:
    """Print what a prompt cost."""
    async with provider.completion(PROMPT, max_tokens=1, temperature=0) as reply:
        result = await reply.result()
    usage = result.outcome.usage
    pid = provider.diagnostics().pid
    print(f"pid {pid}: {usage.prompt} tokens of prompt, {usage.cached} of them from the cache")


async def main(model: str) -> None:
    """Ask, stop, start, ask again."""
    async with llamatrio.open_provider(llamatrio.ModelConfig(model, context=4096)) as provider:
        await provider.start()
        await ask(provider)
        await provider.stop()
        print(f"stopped: started={provider.started}, residency={provider.residency}")
        await provider.start()
        await ask(provider)
        print(f"loads: {provider.diagnostics().counters.loads}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    trio.run(main, sys.argv[1])
