"""A Ctrl-C, no process, no socket: what comes between a provider and its child."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
from killing import opened, pid_of
from moments import reach

from llamatrio import (
    NO_RESTARTS,
    ForeignServer,
    Hosted,
    LoadFailed,
    LocalProvider,
    ModelConfig,
    Own,
    Phase,
    Policy,
    ServerBackend,
    SpecificationError,
    Stock,
    StreamBroken,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.outcomes import Failed, Finished
from llamatrio.session.programs import find_program
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot, write_parrot

if sys.platform != "linux":
    pytest.skip("run on Linux alone", allow_module_level=True)


# -- Ctrl-C ------------------------------------------------------------------------------------


def processes_with(word: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.append(entry.name)
    return found


async def interrupt(rng: random.Random) -> tuple[int, int]:
    """Send SIGINT to a program that does nothing but start children; return what it counted."""
    mark = f"mark-{rng.randrange(2**64):x}"
    program = str(Path(__file__).parent / "programs" / "spawning.py")
    process = await trio.lowlevel.open_process(
        [sys.executable, program, mark],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with process.stdout, process.stderr:
        try:
            assert await process.stdout.receive_some() == b"imported\n"
            await trio.sleep(rng.uniform(0, 0.15))
            process.send_signal(signal.SIGINT)
            said = b"".join([bytes(chunk) async for chunk in process.stderr])
            counts = (await process.stdout.receive_some()).split()
            await process.wait()
        finally:
            process.kill()
            with trio.move_on_after(10, shield=True):
                await process.wait()
    assert b"KeyboardInterrupt" in said, said.decode()
    assert processes_with(mark) == []
    spawned, ended = map(int, counts)
    return spawned, ended


async def interrupt_spawns(runs: int) -> None:
    rng = random.Random(1)
    total = 0
    for _ in range(runs):
        with trio.fail_after(60):
            spawned, ended = await interrupt(rng)
        assert spawned == ended
        total += spawned
    assert total >= runs


@pytest.mark.slow
async def test_ctrl_c_over_a_loop_of_spawns_leaves_no_child_some_times() -> None:
    await interrupt_spawns(3)


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_ctrl_c_over_a_loop_of_spawns_leaves_no_child_200_times() -> None:
    await interrupt_spawns(200)


# -- no process --------------------------------------------------------------------------------

# A program of its own, since it gives up what it cannot get back. It says what each start raised
# while there was no process to be had, then what one raised afterwards, and what it has left.
PROGRAM = """
import ctypes, errno, os, resource, subprocess, sys
import trio
from llamatrio import LlamatrioError, ModelConfig, Own, open_provider

NEW_USERS, NEW_PROCESSES = 0x10000000, 0x20000000
libc = ctypes.CDLL(None, use_errno=True)
READY = 'cmd_child_to_router:state:{"state":"ready"}'
CHILD = Own(("/bin/sh", "-c", 'echo "$0"; read line', READY))

def called(result):
    if result:
        sys.exit(os.strerror(ctypes.get_errno()))

class EAGAIN:
    'No process more is allowed to this user.'
    def prepare(self):
        if os.getuid() == 0:
            os.setresuid(65534, 65534, 0)  # the limit is none for root
    def take(self):
        _, self.most = resource.getrlimit(resource.RLIMIT_NPROC)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, self.most))
    def give(self):
        resource.setrlimit(resource.RLIMIT_NPROC, (self.most, self.most))

class ENOMEM:
    'The first process of the name space for processes has ended: the kernel makes no other.'
    def prepare(self):
        if os.getuid() != 0:
            called(libc.unshare(NEW_USERS))
        self.before = os.open("/proc/self/ns/pid", os.O_RDONLY)
    def take(self):
        called(libc.unshare(NEW_PROCESSES))
        subprocess.run(["/bin/true"], check=True)
    def give(self):
        called(libc.setns(self.before, NEW_PROCESSES))
        os.close(self.before)

async def main(name, model, runtime_dir):
    scarcity, config = globals()[name](), ModelConfig(model)
    scarcity.prepare()
    async with open_provider(config, backend=CHILD, runtime_dir=runtime_dir) as provider:
        await trio.to_thread.run_sync(int)  # a thread is there already
        scarcity.take()
        before = set(os.listdir("/proc/self/fd"))
        for _ in range(2):
            try:
                await provider.start()
            except LlamatrioError as error:
                print(type(error).__name__, error, flush=True)
        print(set(os.listdir("/proc/self/fd")) - before, os.listdir(runtime_dir), flush=True)
        scarcity.give()
        await provider.start()
        print(provider.phase.value, flush=True)

trio.run(main, *sys.argv[1:])
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that any user may use."""
    directory = Path(tempfile.mkdtemp(prefix="lt-", dir="/tmp"))
    directory.chmod(0o777)
    (directory / "run").mkdir()
    (directory / "run").chmod(0o777)
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("EAGAIN", "Resource temporarily unavailable"),
        ("ENOMEM", "Cannot allocate memory"),
    ],
)
@pytest.mark.slow
async def test_a_program_that_gets_no_process_is_told_so_and_can_try_again(
    name: str, reason: str, public: Path
) -> None:
    parrot = write_parrot(public / "parrot.gguf")
    parrot.path.chmod(0o644)
    command = [sys.executable, "-c", PROGRAM, name, str(parrot.path), str(public / "run")]
    with trio.fail_after(60):
        done = await trio.run_process(
            command, capture_stdout=True, stderr=subprocess.STDOUT, check=False
        )
    *errors, left, phase = done.stdout.decode().splitlines()
    assert done.returncode == 0, done.stdout.decode()
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("SpawnError"), error
        assert reason in error
    assert left == "set() []"
    assert phase == "started"


# -- no port -----------------------------------------------------------------------------------

ASK = completion_request("Hello", temperature=0)
THIEF = str(Path(__file__).parent / "programs" / "thief.py")
OPEN_TO_ALL = str(Path(__file__).parent / "programs" / "open_to_all.py")


def robbed(kind: Kind, directory: Path, times: int) -> Kind:
    """A real child whose port is taken before it can have it, so many times."""
    thief = (sys.executable, THIEF, str(directory), str(times))
    if isinstance(kind, Stock):
        return Own((*thief, find_program(kind)))
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join(thief)} {sys.executable} "$@"\n')
    python.chmod(0o755)
    return Hosted(str(python))


def thefts(directory: Path) -> int:
    return len(list(directory.glob("stolen-*")))


@asynccontextmanager
async def over_tcp(
    kind: Kind, parrot: Parrot, policy: Policy | None = None
) -> AsyncGenerator[LocalProvider, None]:
    backend = ServerBackend(kind, transport="tcp")
    config = ModelConfig(parrot.path, threads=1)
    with trio.fail_after(60):
        async with open_provider(config, backend=backend, policy=policy) as provider:
            yield provider


@pytest.mark.slow
async def test_a_child_is_spoken_to_over_tcp_where_that_is_asked_for(
    kind: Kind, parrot: Parrot
) -> None:
    async with over_tcp(kind, parrot) as provider:
        await provider.start()
        pid = provider.diagnostics().pid
        assert pid is not None
        [socket] = [c for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"]
        assert socket.laddr.ip == "127.0.0.1"
        isolation = provider.diagnostics().isolation
        assert isolation is not None
        assert (isolation.network, isolation.reason) == ("host", "it is spoken to over TCP")
        for _ in range(2):
            assert (await provider.submit(ASK).result()).text == parrot.text
        await provider.stop()
        await provider.unload_model()
        end = provider.diagnostics().last_exit
        assert end is not None
        assert end.returncode == 0


@pytest.mark.slow
async def test_a_port_that_is_taken_before_the_child_has_it_is_followed_by_another(
    kind: Kind, parrot: Parrot, tmp_path: Path
) -> None:
    # https://github.com/jupyter/jupyter_client/issues/487
    async with over_tcp(robbed(kind, tmp_path, 2), parrot) as provider:
        await provider.start()
        assert (await provider.submit(ASK).result()).text == parrot.text
        assert thefts(tmp_path) == 2
        assert provider.diagnostics().counters.generations == 1
        assert provider.failure is None


@pytest.mark.slow
async def test_a_child_whose_ports_are_all_taken_fails_to_load(
    kind: Kind, parrot: Parrot, tmp_path: Path
) -> None:
    async with over_tcp(robbed(kind, tmp_path, 99), parrot) as provider:
        with pytest.raises(LoadFailed, match="bind"):
            await provider.start()
        assert thefts(tmp_path) == 3
        assert provider.phase is Phase.UNLOADED


@pytest.mark.slow
async def test_a_stranger_at_the_port_of_a_child_is_asked_nothing(
    parrot: Parrot, tmp_path: Path
) -> None:
    # https://github.com/ggml-org/llama.cpp/issues/26822
    heard = tmp_path / "heard"
    stranger = Own((sys.executable, OPEN_TO_ALL, str(heard)))
    async with over_tcp(stranger, parrot, NO_RESTARTS) as provider:
        await provider.start()
        pid = pid_of(provider)
        block = Path(f"/proc/{pid}/environ").read_bytes()  # noqa: ASYNC240
        [key] = [item[14:] for item in block.split(b"\0") if item.startswith(b"LLAMA_API_KEY=")]
        outcome = await provider.submit(completion_request("my secret")).wait()
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, ForeignServer)
        await reach(provider, Phase.UNLOADED)
        assert not psutil.pid_exists(pid)
    said = heard.read_bytes()
    assert said.startswith(b"GET /v1/models ")
    assert b"secret" not in said
    assert key not in said


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"transport": "pipe"}, "not 'pipe'"), ({"transport": "tcp", "network": "none"}, "TCP")],
)
def test_a_transport_that_cannot_be_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecificationError, match=reason):
        ServerBackend(**fields)


# -- no socket ---------------------------------------------------------------------------------


def occupied(kind: Kind) -> Own:
    """A child in whose socket's place there is something already."""
    script = (
        'for word; do if [ "$last" = --host ]; then : > "$word"; fi; last="$word"; done; exec "$@"'
    )
    command = (find_program(kind),) if isinstance(kind, Stock) else fakechild.command("H ok")
    return Own(("/bin/sh", "-c", script, "sh", *command))


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.stock)])
@pytest.mark.slow
async def test_a_child_whose_socket_has_a_stale_file_in_its_place_fails_to_load(
    real: bool, parrot: Parrot, request: pytest.FixtureRequest
) -> None:
    kind = Stock(request.getfixturevalue("llama_server")) if real else Hosted()
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=occupied(kind)) as provider:
            with pytest.raises(LoadFailed) as caught:
                await provider.start()
            assert caught.value.returncode == 1
            assert caught.value.stderr_tail
            assert provider.diagnostics().counters.generations == 1


@pytest.mark.slow
async def test_a_child_whose_socket_has_gone_fails_its_requests_and_can_be_unloaded(
    kind: Kind, parrot: Parrot
) -> None:
    async with opened(kind, ModelConfig(parrot.path, threads=1)) as provider:
        await provider.start()
        assert isinstance(await provider.submit(ASK).wait(), Finished)
        [path] = Path(tempfile.gettempdir()).glob("llamatrio-*/*.sock")  # noqa: ASYNC240
        path.unlink()
        outcome = await provider.submit(ASK).wait()
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, StreamBroken)
        await provider.stop()
        await provider.unload_model()
        end = provider.diagnostics().last_exit
        assert end is not None
        assert end.returncode == 0
        await provider.start()
        assert isinstance(await provider.submit(ASK).wait(), Finished)
