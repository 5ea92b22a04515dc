"""Use a library on one thread after another."""

from __future__ import annotations

import sys

import trio

from llamatrio import ModelConfig, NativeBackend, completion_request, open_provider
from llamatrio.session.dispatch import Roaming


async def main(library: str, model: str) -> None:
    config = ModelConfig(model, context=512)
    backend = NativeBackend(library, dispatcher=Roaming)
    async with open_provider(config, backend=backend) as provider:
        await provider.start()
        await provider.submit(completion_request("Hello", max_tokens=5)).result()


trio.run(main, sys.argv[1], sys.argv[2])
