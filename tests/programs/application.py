"""An application that reaches a moment in the life of its model, says so, and stays there.

`application.py MOMENT KIND MODEL RUNTIME_DIR` writes one line of JSON when the moment is reached,
and waits to be killed: the `pid` of the child, that of a `worker`, which is a forked copy of the
application that holds all pipes of the child, and the `isolation`. KIND is a command in JSON,
`["hosted"]`, or `["stock", PROGRAM]`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Awaitable, Callable

import attrs
import trio

from llamatrio import (
    Hosted,
    Ladder,
    LocalProvider,
    ModelConfig,
    Own,
    Phase,
    ServerBackend,
    Stock,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind

LONG_PROMPT = "x" * 3500


def kind_of(words: list[str]) -> Kind:
    """Return the kind of child that is meant."""
    match words:
        case ["hosted"]:
            return Hosted()
        case ["stock", program]:
            return Stock(program)
        case _:
            return Own(tuple(words))


async def spawned(provider: LocalProvider) -> int:
    """Wait until there is a child."""
    while (pid := provider.diagnostics().pid) is None:  # noqa: ASYNC110 - it is not told
        await trio.lowlevel.checkpoint()
    return pid


async def spawning(provider: LocalProvider) -> None:
    """The program of the child is being started."""


async def loading(provider: LocalProvider) -> None:
    """The model is being loaded."""
    async for status in provider.watch():
        if status.progress is not None:
            return


async def idle(provider: LocalProvider) -> None:
    """The model is loaded, and nothing is asked."""
    await provider.start()


async def prompt(provider: LocalProvider) -> None:
    """A prompt is being read."""
    await provider.start()
    reply = provider.submit(completion_request(LONG_PROMPT, max_tokens=2))
    while not (reply.progress and 0 < reply.progress.processed < reply.progress.total):  # noqa: ASYNC110
        assert reply.outcome is None
        await trio.sleep(0.001)


async def generating(provider: LocalProvider) -> None:
    """An answer is being written."""
    await provider.start()
    async for _ in provider.submit(completion_request("Hello", max_tokens=3000, temperature=0)):
        return


async def sleeping(provider: LocalProvider) -> None:
    """The model has given its memory back."""
    await provider.start()
    async for status in provider.watch():
        if status.residency == "asleep":
            return


async def stopping(provider: LocalProvider) -> None:
    """The child is being ended, which takes long."""
    await provider.start()
    await provider.stop()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(provider.unload_model)
        async for status in provider.watch():
            if status.phase is Phase.UNLOADING:
                report(provider, await spawned(provider))


MOMENTS: dict[str, Callable[[LocalProvider], Awaitable[None]]] = {
    moment.__name__: moment
    for moment in (spawning, loading, idle, prompt, generating, sleeping, stopping)
}


def fork_worker() -> int:
    """Leave a copy of this process that does nothing."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    return pid


def report(provider: LocalProvider, pid: int) -> None:
    """Say what there is."""
    isolation = provider.diagnostics().isolation
    told = {"pid": pid, "worker": fork_worker(), "isolation": isolation and attrs.asdict(isolation)}
    os.write(1, json.dumps(told).encode() + b"\n")  # at once: the reader leaves after it


async def main(moment: str, kind: str, model: str, runtime_dir: str) -> None:
    """Reach the moment."""
    config = ModelConfig(
        model,
        batch=64,
        context=4096,
        threads=1,
        sleep_after=1 if moment == "sleeping" else None,
    )
    slow = Ladder(settle=600, exit=600, terminate=600, terminate_loading=600)
    backend = ServerBackend(kind_of(json.loads(kind)), runtime_dir=runtime_dir, ladder=slow)
    async with open_provider(config, backend=backend) as provider, trio.open_nursery() as nursery:
        if moment in ("spawning", "loading"):
            nursery.start_soon(provider.start)
        await MOMENTS[moment](provider)
        report(provider, await spawned(provider))
        await trio.sleep_forever()


if __name__ == "__main__":
    moment, kind, model, runtime_dir = sys.argv[1:]
    trio.run(main, moment, kind, model, runtime_dir)
