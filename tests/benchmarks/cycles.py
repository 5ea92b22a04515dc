"""What is left of a thousand lives of a model: memory, descriptors, threads, processes, files.

    python tests/benchmarks/cycles.py [--server LLAMA_SERVER] [--cycles N] [--every N] [--json]

One cycle is a load, an answer, a stop and an unload; every tenth is made by a provider of its own.
Linux only. Aim: after 1,000 cycles at most 5% more resident memory than after 100, and no more of
anything else.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import trio

from llamatrio import Hosted, LocalProvider, ModelConfig, Stock, completion_request, open_provider
from llamatrio.child.launch import Kind
from llamatrio.testing import write_parrot

LIVES_OF_A_PROVIDER = 10


@attrs.frozen
class Sample:
    """What this process has, and what it has made, at one moment.

    Attributes:
      cycles: After how many cycles.
      seconds: Since the first of them.
      resident: Bytes of memory.
      descriptors: Open ones.
      threads: Of the operating system.
      children: Processes of ours that live.
      zombies: Processes of ours that nobody has reaped.
      files: What is in the directory for the sockets.
    """

    cycles: int
    seconds: float
    resident: int
    descriptors: int
    threads: int
    children: int
    zombies: int
    files: int


def take_sample(cycles: int, began: float, directory: str) -> Sample:
    """Look around."""
    states = list(_children())
    return Sample(
        cycles,
        time.perf_counter() - began,
        int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
        len(os.listdir("/proc/self/fd")) - 1,  # the one that lists them
        len(os.listdir("/proc/self/task")),
        sum(state != "Z" for state in states),
        states.count("Z"),
        len(os.listdir(directory)),
    )


def _children() -> Iterator[str]:
    """Yield the state of each process that is ours."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it has gone
            if int(parent) == os.getpid():
                yield state


async def live_once(provider: LocalProvider, text: str) -> None:
    """Load, ask, stop, unload."""
    await provider.start()
    result = await provider.submit(completion_request("Hello", temperature=0)).result()
    assert result.text == text
    await provider.stop()
    await provider.unload_model()


async def run(kind: Kind, cycles: int, every: int, show: bool) -> list[Sample]:
    """Run the cycles; take a sample now and then."""
    samples: list[Sample] = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="lt-") as models, tempfile.TemporaryDirectory() as run:
        parrot = write_parrot(Path(models, "parrot.gguf"))
        config = ModelConfig(parrot.path, threads=1)
        for start in range(0, cycles, LIVES_OF_A_PROVIDER):
            async with open_provider(config, backend=kind, runtime_dir=run) as provider:
                for _ in range(min(LIVES_OF_A_PROVIDER, cycles - start)):
                    await live_once(provider, parrot.text)
            done = min(start + LIVES_OF_A_PROVIDER, cycles)
            if done % every == 0 or done == cycles:
                samples.append(take_sample(done, began, run))
                if show:
                    print(describe(samples[-1]), flush=True)
    return samples


def describe(sample: Sample) -> str:
    """Say it in one line."""
    return (
        f"{sample.cycles:6} cycles {sample.seconds:7.1f} s   {sample.resident / 2**20:7.2f} MiB   "
        f"descriptors {sample.descriptors}   threads {sample.threads}   children "
        f"{sample.children}   zombies {sample.zombies}   files {sample.files}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    kind: Kind = Stock(chosen.server) if chosen.server else Hosted()
    samples = trio.run(run, kind, chosen.cycles, chosen.every, not chosen.json)
    if chosen.json:
        print(json.dumps([attrs.asdict(sample) for sample in samples]))
    else:
        first, last = samples[0], samples[-1]
        growth = last.resident / first.resident - 1
        print(f"resident memory {growth:+.1%} from cycle {first.cycles} to {last.cycles}")


if __name__ == "__main__":
    main()
