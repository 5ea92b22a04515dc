"""From the spawn to READY, as a caller sees it, against a bare subprocess that reads the same pipe.

    python tests/benchmarks/ready.py [--server LLAMA_SERVER] [--model GGUF] [--rounds N]

Both start the same command with the same environment, in turn. Aim: at most 1.1 times as long, or
3 ms longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import trio

import llamatrio.child
from llamatrio import Hosted, ModelConfig, Stock, open_provider
from llamatrio.child.launch import Kind, plan
from llamatrio.session.programs import find_program
from llamatrio.testing import write_parrot


def bare(command: tuple[str, ...], environ: Mapping[str, str]) -> float:
    """Start a child and read its stdout; return the seconds to READY."""
    began = time.perf_counter()
    with subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as child:
        assert child.stdout is not None
        seen = b""
        while b'"state":"ready"' not in seen:
            seen += os.read(child.stdout.fileno(), 4096)
        took = time.perf_counter() - began
        child.kill()
    return took


async def ours(kind: Kind, config: ModelConfig) -> float:
    """Start a provider; return the seconds to the end of `start`."""
    async with open_provider(config, backend=kind) as provider:
        began = time.perf_counter()
        await provider.start()
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    chosen = parser.parse_args()
    kind: Kind = Stock(chosen.server) if chosen.server else Hosted()
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig(chosen.model or write_parrot(Path(folder, "parrot.gguf")).path)
        measure(kind, config, folder, chosen.rounds)


def measure(kind: Kind, config: ModelConfig, folder: str, rounds: int) -> None:
    """Run both in turn and print what they took."""
    pairs = []
    for number in range(rounds + 1):
        launch = plan(
            kind,
            config,
            program=find_program(kind),
            host_program=str(Path(llamatrio.child.__path__[0]) / "host.py"),
            address=f"{folder}/{number}.sock",
            key="key",
            environ=os.environ,
        )
        pairs.append((bare(launch.command, launch.environ), trio.run(ours, kind, config)))
    pairs.pop(0)  # warms the caches
    for name, column in zip(("bare", "llamatrio"), zip(*pairs, strict=True), strict=True):
        print(f"{name:<10} median {statistics.median(column) * 1000:7.2f} ms", end="")
        print(f"   least {min(column) * 1000:7.2f} ms")
    ratio = statistics.median(mine / theirs for theirs, mine in pairs)
    more = statistics.median(mine - theirs for theirs, mine in pairs)
    print(f"in pairs   ratio {ratio:.3f}   difference {more * 1000:+.2f} ms")


if __name__ == "__main__":
    main()
