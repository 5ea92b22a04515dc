"""The hosted child's program, run by its path: what it obeys on stdin, and what it imports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import llamatrio.child
from llamatrio import ModelConfig
from llamatrio.child.launch import hosted_settings
from llamatrio.testing.parrot import Parrot

HOST = str(Path(llamatrio.child.__file__).with_name("host.py"))
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
    model: Path, socket: Path, *options: str
) -> Generator[subprocess.Popen[bytes], None, None]:
    """Have a hosted child, whose stdin and stdout are ours."""
    settings = json.dumps(hosted_settings(ModelConfig(model), str(socket)))
    with subprocess.Popen(
        [sys.executable, "-P", *options, HOST, settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if options else subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "LLAMA_API_KEY": "x", "LLAMA_SERVER_ROUTER_PORT": "0"},
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
    with hosted(parrot.path, socket, "-X", "importtime") as process:
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
