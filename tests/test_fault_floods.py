"""A child that writes more than anybody reads, on one pipe and on both."""

from __future__ import annotations

import logging
import resource
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
import trio

from llamatrio import LocalProvider, ModelConfig, Own, Phase, completion_request, open_provider
from llamatrio.lifecycle.diagnostics import Status
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot

if sys.platform != "linux":
    pytest.skip("looks at /proc", allow_module_level=True)

PREFIX = "cmd_child_to_router:state:"
FORGED = f'O {PREFIX}{{"state":"sleeping"}}\\n'
SERVES = ("H ok", "S ready", "R", "X 0")


class Asleep(logging.Handler):
    """Takes one line, and sleeps over it."""

    def __init__(self) -> None:
        super().__init__()
        self.wake = threading.Event()
        self.taken = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.taken += 1
        self.wake.wait()


@contextmanager
def sleeping_reader(name: str) -> Generator[Asleep, None, None]:
    """Let a logger have one handler, which sleeps."""
    logger, handler = logging.getLogger(f"llamatrio.child.{name}"), Asleep()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield handler
    finally:
        handler.wake.set()
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def resident() -> int:
    """Bytes of memory that we have."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@attrs.define
class Ticker:
    """A task that wants to run every 10 ms.

    Attributes:
      late: How late it was, each time.
    """

    late: list[float] = attrs.field(factory=list)

    async def run(self) -> None:
        while True:
            due = trio.current_time() + 0.01
            await trio.sleep_until(due)
            self.late.append(trio.current_time() - due)

    @property
    def hundredth(self) -> float:
        """What 99 of 100 were not later than."""
        return sorted(self.late)[len(self.late) * 99 // 100]


def beside(flood: str, command: tuple[str, ...]) -> Own:
    """A child with a process of its group that floods a pipe at the same time."""
    return Own(("/bin/sh", "-c", f'{flood} & exec "$@"', "sh", *command))


async def serve(provider: LocalProvider) -> None:
    reply = provider.submit(completion_request("x"))
    assert (await reply.result()).text == "Every answer here is a fake."


@pytest.mark.slow
async def test_floods_on_both_pipes_with_every_reader_asleep_delay_nothing(parrot: Parrot) -> None:
    # 30 MB without a newline beside 10 MB without one, at whose end a record is forged.
    flood = "head -c 30000000 /dev/zero | tr '\\0' x >&2"
    child = beside(flood, fakechild.command("S loading", "On 10000000", FORGED, *SERVES))
    ticker, seen = Ticker(), list[Status]()
    with sleeping_reader("both") as handler, trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=child, name="both") as provider:
            asleep = provider.watch()
            seen.append(await anext(asleep))
            before = resident()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ticker.run)
                began = trio.current_time()
                await provider.start()
                assert trio.current_time() - began < 5
                while provider.diagnostics().pipes.stderr_bytes < 30_000_000:
                    await serve(provider)
                grown = resident() - before
                nursery.cancel_scope.cancel()
            pipes = provider.diagnostics().pipes
            assert provider.residency == "resident"
            assert (pipes.records, pipes.oversize, pipes.unexpected) == (2, 1, 0)
            assert pipes.stderr_bytes >= 30_000_000
            assert grown < 16 * 2**20, grown
            assert ticker.hundredth < 0.2  # on a quiet machine 0.02
            seen.append(await anext(asleep))
            assert seen[-1].phase is not Phase.UNLOADED  # progress it has missed, no phase
            handler.wake.set()


async def check_progress(parrot: Parrot, lines: int, seconds: float) -> None:
    """Let a load tell of so much progress; a watcher that sleeps sees the last, and every phase."""
    child = Own(fakechild.command(f"Sp {lines}", *SERVES))
    ticker = Ticker()
    with trio.fail_after(seconds):
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            asleep = provider.watch()
            await anext(asleep)
            before = resident()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ticker.run)
                await provider.start()
                nursery.cancel_scope.cancel()
            assert resident() - before < 16 * 2**20
            assert ticker.hundredth < 0.2  # on a quiet machine 0.02
            assert provider.diagnostics().pipes.records == lines + 1
            await serve(provider)
            seen = [await anext(asleep)]
            while seen[-1].phase is not Phase.STARTED:
                seen.append(await anext(asleep))
            assert len(seen) <= 3
            assert seen[-2].progress is not None
            assert seen[-2].progress.value == 1.0


@pytest.mark.slow
async def test_ten_thousand_records_of_progress_delay_nobody(parrot: Parrot) -> None:
    await check_progress(parrot, 10_000, 60)


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_a_million_records_of_progress_delay_nobody(parrot: Parrot) -> None:
    await check_progress(parrot, 1_000_000, 1000)
