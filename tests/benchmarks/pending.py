"""What a request costs among few that wait, and among many; and how long it takes to end them all.

    python tests/benchmarks/pending.py

One run compares 1,000 waiting requests with 100,000: the cost of `submit` and of `cancel(id)`, side
by side, in turns. Then it stops with 100,000 waiting, while a ticker looks how long the loop stands
still. The model is scripted, and answers nothing: only our side is measured.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import trio
import trio.testing

from llamatrio import LocalProvider, Policy, Reply, completion_request, outcomes
from llamatrio.testing import ScriptedBackend, open_scripted_provider

FEW, MANY = 1_000, 100_000
ROUNDS, BATCH, STOPS = 60, 500, 5
REQUEST = completion_request("Hello")


def measure(action: Callable[[], object]) -> float:
    """Return how long one call takes, in microseconds."""
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e6


class Crowd:
    """A provider with a number of requests that wait."""

    def __init__(self, provider: LocalProvider, size: int) -> None:
        self.provider = provider
        self.waiting = [provider.submit(REQUEST) for _ in range(size)]

    def round(self) -> tuple[float, float]:
        """Submit a batch, cancel as many at random, and return the median cost of each."""
        submits = [measure(self.submit) for _ in range(BATCH)]
        cancels = [measure(self.take_any().cancel) for _ in range(BATCH)]
        return statistics.median(submits), statistics.median(cancels)

    def submit(self) -> None:
        self.waiting.append(self.provider.submit(REQUEST))

    def take_any(self) -> Reply:
        index = random.randrange(len(self.waiting))
        self.waiting[index], self.waiting[-1] = self.waiting[-1], self.waiting[index]
        return self.waiting.pop()


async def compare_costs() -> None:
    """Print what a request costs among few and among many."""
    async with open_busy_provider() as small, open_busy_provider() as large:
        few, many = Crowd(small, FEW), Crowd(large, MANY)
        rounds = [(few.round(), many.round()) for _ in range(ROUNDS)]
        for number, name in enumerate(("submit", "cancel")):
            cheap = statistics.median(one[0][number] for one in rounds)
            dear = statistics.median(one[1][number] for one in rounds)
            print(f"{name}: {cheap:.2f} us among {FEW}, {dear:.2f} us among {MANY}", end="")
            print(f": ratio {dear / cheap:.2f}")


async def stop_a_crowd() -> tuple[float, float]:
    """Return the seconds that a stop takes with many that wait, and the longest standstill."""
    async with open_busy_provider() as provider, trio.open_nursery() as nursery:
        replies = Crowd(provider, MANY).waiting
        late: list[float] = []
        nursery.start_soon(tick, late)
        await trio.sleep(0.05)
        late.clear()
        began = time.perf_counter()
        await provider.stop()
        seconds = time.perf_counter() - began
        assert all(isinstance(reply.outcome, outcomes.Cancelled) for reply in replies)
        await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    gc.collect()
    return seconds, max(late)


async def tick(late: list[float]) -> None:
    """Note how late a task of every millisecond comes."""
    while True:
        due = time.perf_counter() + 0.001
        await trio.sleep(0.001)
        late.append(time.perf_counter() - due)


@asynccontextmanager
async def open_busy_provider() -> AsyncGenerator[LocalProvider, None]:
    """Open a provider whose only slot is taken for ever."""
    backend = ScriptedBackend(load_time=0.001, prompt_time=math.inf)
    policy = Policy(max_pending=None)
    async with open_scripted_provider(backend, policy=policy) as provider:
        await provider.start()
        provider.submit(REQUEST)
        await trio.testing.wait_all_tasks_blocked()
        yield provider


async def main() -> None:
    """Run both parts."""
    await compare_costs()
    gc.collect()
    stops = [await stop_a_crowd() for _ in range(STOPS)]
    seconds, still = (statistics.median(numbers) for numbers in zip(*stops, strict=True))
    print(f"stop with {MANY} waiting, all of them cancelled: {seconds:.3f} s", end="; ")
    print(f"the loop stood still for {still * 1e3:.1f} ms at most (medians of {STOPS})")


if __name__ == "__main__":
    trio.run(main)
