"""How long the Trio loop stands still while a model in its own process loads and answers.

    python tests/benchmarks/native.py --model GGUF [--rounds N]

A ticker wants to run every 10 ms. How late it is, is compared with how late it is while nothing
else happens; the aim is less than 50 ms at the 99th percentile. How long a cancel takes until the
model is free for another request is measured against the time of a token, and of a batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from llamatrio import LocalProvider, ModelConfig, NativeBackend, completion_request, open_provider

TICK = 0.01
ONE = completion_request("Hello", max_tokens=1, temperature=0)
LONG = completion_request("Hello", max_tokens=2000, temperature=0, ignore_eos=True)
PROMPT = completion_request([1] * 1500, max_tokens=2000, cache_prompt=False)
READ = completion_request([1] * 1500, max_tokens=1, cache_prompt=False)


async def lateness(work: Callable[[], Awaitable[object]]) -> list[float]:
    """Let a ticker run beside some work, and return how late each tick was, in seconds."""
    late: list[float] = []

    async def tick() -> None:
        due = trio.current_time() + TICK
        while True:
            await trio.sleep_until(due)
            late.append(trio.current_time() - due)
            due = max(due + TICK, trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        await work()
        nursery.cancel_scope.cancel()
    return sorted(late)


def tell(what: str, late: list[float]) -> None:
    """Print what the ticker saw."""
    at = late[min(len(late) - 1, int(len(late) * 0.99))]
    middle = late[len(late) // 2]
    numbers = f"median {middle * 1e3:.2f} ms, 99 % {at * 1e3:.2f} ms, most {late[-1] * 1e3:.2f} ms"
    print(f"{what:28} {numbers} ({len(late)} ticks)")


async def nothing() -> None:
    """Let some time pass."""
    await trio.sleep(3)


async def answer(provider: LocalProvider, rounds: int) -> None:
    """Have answers given, one after another."""
    for _ in range(rounds):
        await provider.submit(completion_request("Hello", max_tokens=60, ignore_eos=True)).wait()


async def free_after(provider: LocalProvider, *, within_prompt: bool) -> float:
    """Cancel a request, and return the seconds until another could begin with its answer."""
    reply = provider.submit(PROMPT if within_prompt else LONG)
    if within_prompt:
        while reply.progress is None or not reply.progress.processed:  # noqa: ASYNC110
            await trio.sleep(0.001)
    else:
        await reply.read(5)
    began = time.perf_counter()
    reply.cancel()
    await provider.submit(ONE).wait()
    return time.perf_counter() - began


async def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="The loop beside a model in its own process.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    chosen = parser.parse_args()
    config = ModelConfig(chosen.model, threads=1, context=2048)
    async with open_provider(config, backend=NativeBackend()) as provider:
        tell("nothing", await lateness(nothing))

        async def load() -> None:
            for _ in range(chosen.rounds):
                await provider.start()
                await provider.stop()
                await provider.unload_model()

        tell("loads", await lateness(load))
        await provider.start()
        tell("answers", await lateness(lambda: answer(provider, chosen.rounds)))
        began = time.perf_counter()
        result = await provider.submit(READ).result()
        batches = -(-result.outcome.usage.prompt // config.batch)
        batch = (time.perf_counter() - began) / batches
        token = provider.diagnostics().token_seconds
        print(f"a batch takes {batch * 1e3:.0f} ms, a token {token * 1e3:.0f} ms")
        for within_prompt in (False, True):
            times = sorted(
                [
                    await free_after(provider, within_prompt=within_prompt)
                    for _ in range(chosen.rounds)
                ]
            )
            place = "the prompt" if within_prompt else "the answer"
            print(
                f"a cancel within {place}: free after {times[len(times) // 2] * 1e3:.0f} ms, "
                f"at most {times[-1] * 1e3:.0f} ms"
            )


if __name__ == "__main__":
    trio.run(main)
