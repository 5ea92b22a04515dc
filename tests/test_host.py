"""The hosted child's program, run by its path: what it obeys on stdin, and what it imports."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from programs import old_wheel

import llamatrio.child
from llamatrio import ModelConfig
from llamatrio.child.launch import hosted_settings
from llamatrio.testing.parrot import Parrot

HOST = str(Path(llamatrio.child.__file__).with_name("host.py"))
PROGRAMS = Path(__file__).parent / "programs"
EXIT = b"cmd_router_to_child:exit"
READY = b'cmd_child_to_router:state:{"state":"ready"'
LOADING = b'cmd_child_to_router:state:{"state":"loading"'


@pytest.fixture
def socket(own_temporary_directory: Path) -> Iterator[Path]:
    """Where the child may listen."""
    path = own_temporary_directory / "host.sock"
    yield path
    path.unlink(missing_ok=True)


@contextmanager
def hosted(
    model: Path,
    socket: Path,
    *options: str,
    wrapper: Sequence[str] = (),
    stdin: int = subprocess.PIPE,
    stderr: int = subprocess.DEVNULL,
    **environ: str,
) -> Generator[subprocess.Popen[bytes], None, None]:
    """Have a hosted child, whose stdin and stdout are ours."""
    settings = json.dumps(hosted_settings(ModelConfig(model), str(socket)))
    ours = {"PATH": os.environ["PATH"], "LLAMA_API_KEY": "x", "LLAMA_SERVER_ROUTER_PORT": "0"}
    with subprocess.Popen(
        [*wrapper, sys.executable, "-P", *options, HOST, settings],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=ours | environ,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[bytes], record: bytes) -> None:
    assert process.stdout is not None
    assert any(line.startswith(record) for line in process.stdout)


def tell(process: subprocess.Popen[bytes], *pieces: bytes) -> None:
    assert process.stdin is not None
    for piece in pieces:
        process.stdin.write(piece)
        process.stdin.flush()


def hang_up(process: subprocess.Popen[bytes]) -> int:
    """End the child's stdin, and return its exit code."""
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(30)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([EXIT + b"\n"], id="whole"),
        pytest.param([bytes([byte]) for byte in EXIT + b"\n"], id="byte by byte"),
        pytest.param([EXIT[:9], EXIT[9:], b"\n"], id="in pieces"),
        pytest.param([EXIT + b"\r\n"], id="with a carriage return"),
        pytest.param([b"hello\n\n", EXIT + b"\n"], id="after other lines"),
        pytest.param([b"hello\n" + EXIT + b"\nhello\n"], id="among other lines"),
        pytest.param([b"\0" * 100_000, b"\n", EXIT + b"\n"], id="after NULs"),
        pytest.param([b"x" * 10_000_000, b"\n" + EXIT + b"\n"], id="after 10 MB"),
    ],
)
def test_the_exit_line_is_obeyed(pieces: list[bytes], parrot: Parrot, socket: Path) -> None:
    with hosted(parrot.path, socket) as process:
        wait_for(process, READY)
        tell(process, *pieces)
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(EXIT, id="without its newline"),
        pytest.param(b"please " + EXIT + b"\n", id="after a word"),
        pytest.param(EXIT + b" now\n", id="before a word"),
        pytest.param(b" " + EXIT + b"\n", id="after a blank"),
        pytest.param(EXIT + b"\0\n", id="before a NUL"),
        pytest.param(EXIT.upper() + b"\n", id="in capitals"),
        pytest.param(b"x" * 10_000_000 + EXIT + b"\n", id="at the end of 10 MB"),
        pytest.param(b"x" * 4096 + EXIT + b"\n", id="at the end of a full buffer"),
        pytest.param(b"x" * (4096 - len(EXIT)) + EXIT + b"\n", id="at the end of one buffer"),
        pytest.param(b"\0" * 5000 + EXIT + b"\n", id="after NULs"),
    ],
)
def test_only_the_end_of_stdin_is_obeyed_where_the_exit_line_is_not_to_the_letter(
    said: bytes, parrot: Parrot, socket: Path
) -> None:
    with hosted(parrot.path, socket) as process:
        wait_for(process, READY)
        tell(process, said)
        assert hang_up(process) == 1


def test_a_terminal_on_stdin_that_hangs_up_is_its_end(parrot: Parrot, socket: Path) -> None:
    # No signal tells of it where SIGHUP is ignored, as under nohup, or the terminal is another's.
    terminal, stdin = os.openpty()
    with hosted(parrot.path, socket, stdin=stdin) as process:
        os.close(stdin)
        wait_for(process, READY)
        os.close(terminal)
        assert process.wait(30) == 1


def test_the_exit_line_is_obeyed_on_a_stdin_that_does_not_block(
    parrot: Parrot, socket: Path
) -> None:
    stdin, ours = os.pipe()
    os.set_blocking(stdin, False)
    with hosted(parrot.path, socket, stdin=stdin) as process:
        os.close(stdin)
        wait_for(process, READY)
        os.write(ours, EXIT + b"\n")
        assert process.wait(30) == 0
    os.close(ours)


def test_the_exit_line_is_obeyed_before_the_first_record(parrot: Parrot, socket: Path) -> None:
    with hosted(parrot.path, socket) as process:
        tell(process, EXIT + b"\n")
        assert process.wait(30) == 0


# The wheel's constructor holds the GIL for as long as it loads, so that nothing else runs then.


@pytest.mark.slow
def test_an_exit_line_that_comes_while_the_model_is_loaded_is_obeyed_after_it(
    large: Parrot, socket: Path
) -> None:
    with hosted(large.path, socket) as process:
        wait_for(process, LOADING)
        tell(process, EXIT + b"\n")
        assert process.wait(30) == 0


def test_a_stdin_that_ends_while_the_model_is_loaded_is_obeyed_after_it(
    large: Parrot, socket: Path
) -> None:
    with hosted(large.path, socket) as process:
        wait_for(process, LOADING)
        assert hang_up(process) == 1


def test_SIGTERM_is_obeyed_while_the_model_is_loaded(large: Parrot, socket: Path) -> None:
    with hosted(large.path, socket) as process:
        wait_for(process, LOADING)
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM


def test_it_imports_nothing_of_ours_and_nothing_of_trio(parrot: Parrot, socket: Path) -> None:
    with hosted(parrot.path, socket, "-X", "importtime", stderr=subprocess.PIPE) as process:
        wait_for(process, READY)
        tell(process, EXIT + b"\n")
        assert process.wait(30) == 0
        assert process.stderr is not None
        found = re.findall(
            r"^import time: .*\|\s+(\S+)$", process.stderr.read().decode(), re.MULTILINE
        )
    modules = {name.partition(".")[0] for name in found}
    assert "xllamacpp" in modules
    assert modules.isdisjoint({"llamatrio", "trio", "attrs", "cattrs", "h11", "asyncio"})


def test_its_stdout_carries_records_alone(parrot: Parrot, socket: Path) -> None:
    with hosted(parrot.path, socket) as process:
        wait_for(process, LOADING)
        assert process.stdout is not None
        tell(process, EXIT + b"\n")
        rest = process.stdout.read().splitlines()
    assert all(line.startswith(b"cmd_child_to_router:state:{") for line in rest)


@pytest.mark.slow
def test_100_MB_without_a_newline_cost_no_memory(parrot: Parrot, socket: Path) -> None:
    with hosted(parrot.path, socket) as process:
        wait_for(process, READY)
        before = resident(process.pid)
        for _ in range(100):
            tell(process, b"x" * 2**20)
        tell(process, b"\0" * 2**20, EXIT)  # in the same line
        assert resident(process.pid) < before + 8 * 2**20
        tell(process, b"\n" + EXIT + b"\n")
        assert process.wait(30) == 0


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    with open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def most_resident(pid: int) -> int:
    """Bytes of memory that a process has ever had."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def test_it_leaves_no_core_dump(parrot: Parrot, socket: Path) -> None:
    with hosted(parrot.path, socket) as process:
        wait_for(process, LOADING)
        limits = Path(f"/proc/{process.pid}/limits").read_text("ascii")
    assert re.search(r"^Max core file size +0 +0 ", limits, re.MULTILINE)


# -- a wheel that does not reserve stdout ------------------------------------------------------


def test_of_an_old_wheel_only_records_get_through_once_it_is_loaded(
    parrot: Parrot, socket: Path, tmp_path: Path
) -> None:
    shutil.copy(PROGRAMS / "old_wheel.py", tmp_path / "xllamacpp.py")
    with (
        open(tmp_path / "log", "wb") as stderr,
        hosted(parrot.path, socket, stderr=stderr.fileno(), PYTHONPATH=str(tmp_path)) as process,
    ):
        assert process.stdout is not None
        # It writes these itself, while it loads.
        lines = [process.stdout.readline() for _ in range(4)]
        before = most_resident(process.pid)
        while lines[-1] != old_wheel.PREFIX + b"{}\n":
            lines.append(process.stdout.readline())
        assert most_resident(process.pid) < before + 4 * 2**20  # of 8 MB in one line
        tell(process, EXIT + b"\n")
        assert process.stdout.read() == b""
        assert process.wait(30) == 0
    log = (tmp_path / "log").read_bytes()
    loading, ready, sleeping = old_wheel.LOADING, old_wheel.READY, old_wheel.SLEEPING
    last = old_wheel.PREFIX + b"{}"
    wanted = [b"", loading, b"", ready, sleeping, sleeping, loading, last]
    assert [line.rstrip(b"\n") for line in lines] == wanted
    assert f"listening on {socket}\n".encode() in log
    for part in (
        b"printed by the import\n",
        b"printed by its Python code\n",
        b"a line of log\nhalf a line of log\nthe next begins\n\0\xff\n",
        b"not at the beginning: " + ready + b"\n" + old_wheel.PREFIX + b"x" * 100_000 + ready,
        ready + b"\n" + old_wheel.PREFIX + b"x" * 5000 + b"\n",
        b"y" * 4096 + ready + b"\n" + b"z" * 2**23 + b"\n",
    ):
        assert part in log


def test_a_setting_that_the_wheel_does_not_know_is_named(
    parrot: Parrot, socket: Path, tmp_path: Path
) -> None:
    wheel = "class CommonParams:\n    hostname = port = None\n    __slots__ = ()\n"
    (tmp_path / "xllamacpp.py").write_text(wheel, "utf-8")
    with hosted(parrot.path, socket, stderr=subprocess.PIPE, PYTHONPATH=str(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read() == b""
        err = process.stderr.read()
        assert process.wait(30) == 1
    assert b"error: this xllamacpp wheel does not know 'model.path': install a newer one" in err


# -- the death of the parent -------------------------------------------------------------------

# Holds nothing of the child's but its life; the pipes are those of the test.
PARENT = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:], env=os.environ | {"LLAMATRIO_PARENT": str(os.getpid())})
os.write(2, b"%d\\n" % child.pid)
child.wait()
"""


@contextmanager
def orphan(model: Path, socket: Path) -> Generator[tuple[subprocess.Popen[bytes], int], None, None]:
    """Have a hosted child of a process in between, and a descriptor that tells its end."""
    wrapper = (sys.executable, "-c", PARENT)
    with hosted(model, socket, wrapper=wrapper, stderr=subprocess.PIPE) as parent:
        assert parent.stderr is not None
        pid = int(parent.stderr.readline())
        end = os.pidfd_open(pid)
        try:
            yield parent, end
        finally:
            if not has_ended(end, 0):
                signal.pidfd_send_signal(end, signal.SIGKILL)
            os.close(end)


def has_ended(end: int, seconds: float) -> bool:
    return bool(select.select([end], [], [], seconds)[0])


@pytest.mark.parametrize(
    ("record", "model"),
    [
        pytest.param(LOADING, "large", id="while it loads"),
        pytest.param(READY, "parrot", id="when it is ready"),
    ],
)
def test_it_dies_with_its_parent_at_once(
    record: bytes, model: str, socket: Path, request: pytest.FixtureRequest
) -> None:
    parrot: Parrot = request.getfixturevalue(model)
    with orphan(parrot.path, socket) as (parent, end):
        wait_for(parent, record)
        parent.kill()
        parent.wait()
        # Its stdin is open: we hold it. And while it loads nothing of it could look.
        assert has_ended(end, 1.0)


def test_it_does_not_begin_where_its_parent_is_dead_already(parrot: Parrot, socket: Path) -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    with hosted(parrot.path, socket, LLAMATRIO_PARENT=str(dead.pid)) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b""
        assert process.wait(30) == 1


def test_it_does_not_begin_where_its_parent_is_dead_and_not_reaped(
    parrot: Parrot, socket: Path
) -> None:
    dead = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    with hosted(parrot.path, socket, LLAMATRIO_PARENT=str(dead.pid)) as process:
        assert process.wait(30) == 1
    dead.wait()


def test_a_wrapper_between_it_and_its_parent_is_no_death(parrot: Parrot, socket: Path) -> None:
    shell = ("sh", "-c", '"$@"; exit $?', "sh")
    with hosted(parrot.path, socket, wrapper=shell, LLAMATRIO_PARENT=str(os.getpid())) as process:
        wait_for(process, READY)
        tell(process, EXIT + b"\n")
        assert process.wait(30) == 0
