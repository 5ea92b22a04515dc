"""Moments in the life of a provider that tests wait for."""

from __future__ import annotations

import trio

from llamatrio import LocalProvider, Phase, Reply, completion_request
from llamatrio.outcomes import Finished


async def first_text(reply: Reply) -> None:
    """Wait until a reply is being generated."""
    async for _ in reply:
        return


async def within_prompt(reply: Reply) -> None:
    """Wait until a part of the prompt has been read, and not all of it."""
    while not (reply.progress and 0 < reply.progress.processed < reply.progress.total):  # noqa: ASYNC110
        assert reply.outcome is None
        await trio.sleep(0.001)
    assert reply.phase == "prompt"


async def reach(provider: LocalProvider, phase: Phase, generation: int = 0) -> None:
    """Wait until a phase is reached, in a life of at least this number."""
    async for status in provider.watch():
        if status.phase is phase and status.generation >= generation:
            return
    raise AssertionError("the provider was closed")


async def serve_another(provider: LocalProvider) -> None:
    """See to it that the slot is free."""
    request = completion_request("Hello", max_tokens=2)
    assert isinstance(await provider.submit(request).wait(), Finished)
