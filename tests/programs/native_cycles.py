"""Load a model in this process and unload it, again and again; print the memory after 5 and at the
end, in pages."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import trio

from llamatrio import ModelConfig, NativeBackend, completion_request, open_provider


def pages() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1])


async def main(model: str, cycles: int) -> None:
    config = ModelConfig(model, context=512, threads=1)
    async with open_provider(config, backend=NativeBackend()) as provider:
        for cycle in range(1, cycles + 1):
            await provider.start()
            await provider.submit(completion_request("Hello", max_tokens=5)).result()
            await provider.stop()
            await provider.unload_model()
            if cycle in (5, cycles):
                print(pages())


trio.run(main, sys.argv[1], int(sys.argv[2]))
