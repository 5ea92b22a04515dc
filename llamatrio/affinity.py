"""Which thread may a model's native calls run on? A check, and what is known.

`python -m llamatrio affinity` loads a model and generates, with all calls on the main thread, with
all on another one, and with the load on the one and the rest on the other. Each trial runs in a
process of its own, so that a crash is a result. It says whether a dedicated thread can take the
place of the main one here; what it prints fills a cell of `KNOWN`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar, get_args

import attrs
import trio

from llamatrio.config import ModelConfig
from llamatrio.errors import LlamatrioError
from llamatrio.session.dispatch import HostThread, OwnerThread
from llamatrio.session.identity import check_gguf
from llamatrio.session.native.engine import Engine, Generated
from llamatrio.session.native.libllama import Library, find_library
from llamatrio.session.native.sampling import Sampling
from llamatrio.testing.parrot import write_parrot

_T = TypeVar("_T")
_MARK: Final = "llamatrio affinity: "

Answer: TypeAlias = Literal["yes", "no", "not tried"]

Threads: TypeAlias = Literal["main", "owner", "split"]
"""All calls on the main thread; all on one other; the load on the one, the rest on the other."""


@attrs.frozen
class Known:
    """What is known of one accelerator.

    Attributes:
      main: Whether all calls may run on the main thread.
      owner: Whether all may run on one other thread.
      split: Whether the load may run on one thread, and the rest on another.
      default: The dispatcher to use.
    """

    main: Answer
    owner: Answer
    split: Answer
    default: type[OwnerThread | HostThread]


KNOWN: Final[Mapping[str, Known]] = {
    "cpu": Known("yes", "yes", "yes", OwnerThread),
    "cuda": Known("not tried", "not tried", "not tried", OwnerThread),
    "hip": Known("not tried", "not tried", "not tried", OwnerThread),
    "metal": Known("not tried", "not tried", "not tried", HostThread),
    "sycl": Known("not tried", "not tried", "not tried", OwnerThread),
    "vulkan": Known("not tried", "not tried", "not tried", OwnerThread),
}
"""By accelerator. The CPU was tried on Linux, x86-64, with build 11549. On macOS, what uses Metal
runs on the main thread until somebody has shown that it need not."""


@attrs.frozen
class Trial:
    """One way to choose the threads, and what came of it.

    Attributes:
      threads: Which way.
      returncode: The exit code of its process; negative for a signal.
      text: What was generated at temperature 0; None if it came to no end.
      load_seconds: How long the load took.
      token_seconds: How long a token took.
      error: The end of what its process wrote on stderr; empty if it came to its end.
    """

    threads: Threads
    returncode: int
    text: str | None = None
    load_seconds: float | None = None
    token_seconds: float | None = None
    error: str = ""


@attrs.frozen
class AffinityReport:
    """What a check found.

    Attributes:
      library: The libllama that was used.
      version: What that calls itself.
      device: "default" for what the library chooses, or "cpu".
      system: The operating system and the machine.
      model: The model that was loaded.
      trials: All three.
    """

    library: str
    version: str
    device: str
    system: str
    model: str
    trials: tuple[Trial, ...]

    def answer(self, threads: Threads) -> Answer:
        """Say whether this way works: it comes to its end, and says what the main thread said.

        Where none does, nothing is known of threads: it is the library, or the model.
        """
        if all(trial.text is None for trial in self.trials):
            return "not tried"
        trial = self._trial(threads)
        if trial.text is None:
            return "no"
        main = self._trial("main").text
        return "yes" if main is None or trial.text == main else "no"

    @property
    def owner_replaces_main(self) -> Answer:
        """Whether a dedicated thread can take the place of the main thread."""
        return self.answer("owner")

    def _trial(self, threads: Threads) -> Trial:
        return next(trial for trial in self.trials if trial.threads == threads)

    def to_json(self) -> dict[str, object]:
        """Return all of it, with the answers, as what JSON can hold."""
        answers = {threads: self.answer(threads) for threads in get_args(Threads)}
        document: dict[str, object] = attrs.asdict(self)
        return {
            **document,
            "answers": answers,
            "owner_replaces_main": self.owner_replaces_main,
        }

    def __str__(self) -> str:
        lines = [
            f"library  {self.library} ({self.version or 'of no known version'})",
            f"device   {self.device}, {self.system}",
            f"model    {self.model}",
            "",
            *(self._line(trial) for trial in self.trials),
            "",
            f"a dedicated thread can replace the main thread here: {self.owner_replaces_main}",
        ]
        return "\n".join(lines)

    def _line(self, trial: Trial) -> str:
        head = f"{trial.threads:5}  {self.answer(trial.threads):3}"
        if trial.text is None:
            end = f"signal {-trial.returncode}" if trial.returncode < 0 else trial.returncode
            why = f": {trial.error}" if trial.error else ""
            return f"{head}  ended with {end}{why}"
        assert trial.load_seconds is not None
        assert trial.token_seconds is not None
        milliseconds = f"load {trial.load_seconds * 1e3:.0f} ms, {trial.token_seconds * 1e3:.2f} ms"
        return f"{head}  {milliseconds} a token, {trial.text[:40]!r}"


# -- one trial, in its own process -------------------------------------------------------------


def _on_another_thread(function: Callable[[], _T]) -> _T:
    results: list[_T] = []
    thread = threading.Thread(target=lambda: results.append(function()), name="owner")
    thread.start()
    thread.join()
    if not results:
        raise SystemExit(1)  # its exception was printed
    return results[0]


def _here(function: Callable[[], _T]) -> _T:
    return function()


def _try(threads: Threads, library: str, model: str, device: str) -> dict[str, object]:
    devices = ("none",) if device == "cpu" else None
    config = ModelConfig(model, context=256, threads=1, devices=devices)
    engine = Engine(Library(library), config)

    def load() -> float:
        began = time.perf_counter()
        engine.load(lambda _: None)
        return time.perf_counter() - began

    def generate() -> tuple[str, float]:
        began, data, count = time.perf_counter(), b"", 0
        engine.begin(engine.tokenize("Hello"), Sampling(max_tokens=32, temperature=0))
        while engine.busy:
            for event in engine.step():
                if isinstance(event.what, Generated):
                    data += event.what.data
                    count += 1
        return data.decode("utf-8", "replace"), (time.perf_counter() - began) / max(count, 1)

    def everything() -> dict[str, object]:
        seconds = load()
        text, each = run(generate)
        engine.free()
        return {"text": text, "load_seconds": seconds, "token_seconds": each}

    run = _on_another_thread if threads == "split" else _here
    return _on_another_thread(everything) if threads == "owner" else everything()


# -- the check ---------------------------------------------------------------------------------


async def check_affinity(
    library: str | None = None,
    model: str | None = None,
    *,
    device: Literal["default", "cpu"] = "default",
    patience: float = 300.0,
) -> AffinityReport:
    """Try every way of choosing threads, each in a process of its own.

    Args:
      library: The libllama; None for that of the xllamacpp wheel.
      model: The model; None for a tiny one that is made for this.
      device: "cpu" to use no accelerator.
      patience: Seconds for each trial; one that hangs is killed, and has failed.

    Cancellation: kills the trial that is going on.

    Raises:
      SpecificationError: if the library is none, or the model.
    """
    if model is not None:
        check_gguf(model)
    path = library or find_library()
    version = Library(path).version
    with tempfile.TemporaryDirectory(prefix="llamatrio-") as folder:
        file = model or str(write_parrot(Path(folder) / "parrot.gguf").path)
        trials = [await _run(way, path, file, device, patience) for way in get_args(Threads)]
    system = f"{platform.system()} {platform.machine()}"
    return AffinityReport(path, version, device, system, model or "a parrot", tuple(trials))


async def _run(threads: Threads, library: str, model: str, device: str, patience: float) -> Trial:
    words = ["affinity", "--trial", threads, "--library", library, "--model", model]
    command = [sys.executable, "-m", "llamatrio", *words, "--device", device]
    done: subprocess.CompletedProcess[bytes] | None = None
    with trio.move_on_after(patience):
        done = await trio.run_process(
            command, capture_stdout=True, capture_stderr=True, check=False, deliver_cancel=_kill
        )
    if done is None:
        return Trial(threads, -9, error=f"no end within {patience:g} s")
    if done.returncode != 0:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return Trial(threads, done.returncode, error="".join(last)[:500])
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith(_MARK):
            return Trial(threads, 0, **json.loads(line.removeprefix(_MARK)))
    return Trial(threads, 0, error="it told no result")


async def _kill(process: trio.Process) -> None:  # noqa: ASYNC124 - Trio wants one
    process.kill()  # native code that hangs does not listen


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, and print what was found; the exit code is 1 if a dedicated thread will not do."""
    parser = argparse.ArgumentParser(
        prog="python -m llamatrio affinity",
        description="Find out which thread the native calls of a model may run on.",
    )
    parser.add_argument("--library", help="the libllama; that of the xllamacpp wheel if not given")
    parser.add_argument("--model", help="a GGUF file; a tiny one is made if not given")
    parser.add_argument("--device", choices=["default", "cpu"], default="default")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--trial", choices=get_args(Threads), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.trial:
        result = _try(chosen.trial, chosen.library, chosen.model, chosen.device)
        print(f"\n{_MARK}{json.dumps(result)}", flush=True)  # the library may print, too
        return 0
    try:
        report = trio.run(
            partial(check_affinity, chosen.library, chosen.model, device=chosen.device)
        )
    except LlamatrioError as exc:
        print(f"cannot check: {exc}", file=sys.stderr)
        return 2
    print(json.dumps(report.to_json(), indent=2) if chosen.json else report)
    return 0 if report.owner_replaces_main == "yes" else 1
