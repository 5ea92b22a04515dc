"""What a log can do to a state record: nothing, whoever reads it, and whatever is in it.

    python tests/benchmarks/apart.py [--records N] [--rounds N]

A fake child writes state records with the time in them. From there to whoever watches the
lifecycle, it is measured how long they take

* while a logging handler sleeps one second for each line, against no handler at all. Aim: a ratio
  of the medians under 2, and a ticker of 10 ms late by less than 50 ms at the 99th percentile;
* while 100 MB without a newline pour from the child's stderr, against a quiet child. Aim: a ratio
  under 2, or a median under 5 ms; less than 8 MiB more of resident memory; what is dropped is
  counted.

Each pair takes turns, in one process.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import attrs
import trio

from llamatrio import ModelConfig, Own, open_provider
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import write_parrot

POURED = 100_000_000
PAUSE = 0.01  # seconds between two records
TICK = 0.01
LOGGER = logging.getLogger("llamatrio.child.model")


class Sleeper(logging.Handler):
    """Takes a second for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.handled = 0
        self._woken = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.handled += 1
        self._woken.wait(1)

    def wake(self) -> None:
        self._woken.set()


@contextmanager
def handled(handler: logging.Handler) -> Generator[None]:
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False
    LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(logging.NOTSET)
        LOGGER.propagate = True


@attrs.define
class Run:
    """What one child's run came to.

    Attributes:
      delays: Seconds from the child to the watcher, of each record.
      late: Seconds by which each tick was late.
      memory: By how many bytes resident memory grew, at most, after the first record.
      dropped_lines: Lines that the logger's handlers were too slow for.
      dropped_bytes: Bytes of a line that was too long.
    """

    delays: list[float] = attrs.field(factory=list)
    late: list[float] = attrs.field(factory=list)
    memory: int = 0
    dropped_lines: int = 0
    dropped_bytes: int = 0


def resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


async def tick(run: Run) -> None:
    """Note how late a ticker is, and what memory it finds."""
    before = resident()
    due = trio.current_time()
    while True:
        due += TICK
        await trio.sleep_until(due)
        run.late.append(trio.current_time() - due)
        run.memory = max(run.memory, resident() - before)


async def measure(model: Path, *steps: str, records: int, poured: int = 0) -> Run:
    """Run one child, and watch its records."""
    child = Own(fakechild.command(*steps, f"St {records} {PAUSE}", "S ready", "R"))
    run = Run()
    async with open_provider(ModelConfig(model), backend=child) as provider:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(provider.start)
            async for status in provider.watch():
                if status.residency == "resident":
                    break
                if status.progress is None or status.progress.stage is None:
                    continue
                written = float(status.progress.stage)
                run.delays.append(time.monotonic() - written)
                if len(run.delays) == 1:
                    nursery.start_soon(tick, run)
            while provider.diagnostics().pipes.stderr_bytes < poured:  # noqa: ASYNC110
                await trio.sleep(TICK)
            nursery.cancel_scope.cancel()
        found = provider.diagnostics()
        run.dropped_lines = found.dropped_log_lines
        run.dropped_bytes = found.pipes.dropped_log_bytes
    return run


def join(runs: list[Run]) -> Run:
    return Run(
        [delay for run in runs for delay in run.delays],
        [late for run in runs for late in run.late],
        max(run.memory for run in runs),
        sum(run.dropped_lines for run in runs),
        sum(run.dropped_bytes for run in runs),
    )


def show(name: str, run: Run, without: Run) -> None:
    for title, one in (("without", without), (name, run)):
        delays = [delay * 1000 for delay in one.delays]
        late = statistics.quantiles(one.late, n=100)[98] * 1000 if len(one.late) > 1 else math.nan
        print(
            f"{title:<22} record to watcher: median {statistics.median(delays):7.2f} ms, "
            f"99% {statistics.quantiles(delays, n=100)[98]:7.2f} ms   "
            f"ticker late, 99%: {late:6.2f} ms   memory +{one.memory / 2**20:.1f} MiB   "
            f"dropped: {one.dropped_lines} lines, {one.dropped_bytes} bytes"
        )
    ratio = statistics.median(run.delays) / statistics.median(without.delays)
    print(f"{'':<22} ratio of the medians {ratio:.2f}\n")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write_parrot(Path(directory) / "parrot.gguf").path
        await measure(model, records=20)  # imports, and the first thread
        lines = "P 300000 0.00.123.456 I a line of the log\\n"
        pairs = []
        for _ in range(chosen.rounds):
            plain = await measure(model, lines, records=chosen.records)
            sleeper = Sleeper()
            with handled(sleeper):
                pairs.append((await measure(model, lines, records=chosen.records), plain))
            sleeper.wake()
        show("a handler that sleeps", *(join(list(runs)) for runs in zip(*pairs, strict=True)))
        pairs = []
        for _ in range(chosen.rounds):
            quiet = await measure(model, records=chosen.records)
            flood = f"P {POURED}"
            run = await measure(model, flood, records=chosen.records, poured=POURED)
            pairs.append((run, quiet))
        show("100 MB, no newline", *(join(list(runs)) for runs in zip(*pairs, strict=True)))


if __name__ == "__main__":
    trio.run(main)
