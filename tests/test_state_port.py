"""The child's side of the contract: stdout for records alone, and who may write them."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

from llamatrio import ModelConfig
from llamatrio.child import host
from llamatrio.child.host import LONGEST_RECORD, StatePort
from llamatrio.child.launch import hosted_settings
from llamatrio.testing.parrot import Parrot
from llamatrio.wire.records import (
    PREFIX,
    Downloading,
    Loading,
    Malformed,
    Ready,
    Sleeping,
    Unknown,
    parse,
)

PROGRAMS = Path(__file__).parent / "programs"
EXIT = b"cmd_router_to_child:exit\n"
LONG = 2**20  # bytes, more than a pipe holds


@pytest.fixture
def pipe() -> Iterator[tuple[int, StatePort]]:
    """The reader's end of a pipe, and a port that writes into it."""
    source, sink = os.pipe()
    port = StatePort(sink)
    yield source, port
    with suppress(OSError):
        os.close(source)
    port.close()


@pytest.fixture
def wide() -> Iterator[tuple[int, StatePort]]:
    """The same with a port for records that no pipe takes at once."""
    source, sink = os.pipe()
    port = StatePort(sink, longest=LONG)
    yield source, port
    os.close(source)
    port.close()


def read_lines(source: int, count: int) -> list[bytes]:
    data = b""
    while data.count(b"\n") < count:
        data += os.read(source, 65536)
    assert data.endswith(b"\n")
    return data.splitlines()


def is_empty(source: int) -> bool:
    return not select.select([source], [], [], 0)[0]


def run(program: str, *args: str, stdin: bytes = b"", **environ: str) -> tuple[bytes, bytes]:
    """Run a program with nothing else in its environment, and return what it wrote."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / program), *args],
        input=stdin,
        capture_output=True,
        env={"PATH": os.environ["PATH"], **environ},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout, done.stderr


# -- what a record looks like ------------------------------------------------------------------


def test_what_the_port_writes_is_what_the_library_reads(pipe: tuple[int, StatePort]) -> None:
    source, port = pipe
    port.loading(0.5)
    port.loading(1, "text_model", ["mmproj_model", "text_model"])
    port.ready({"id": "mine", "text": "two\nlines\r\n\0 \u2028 \x1b[0m"})
    port.sleeping()
    port.ready()
    port.send("downloading", {"url": "http://x/y.gguf", "downloaded": 1, "total": 2})
    port.send("thinking", {"about": "life"})
    assert [parse(line) for line in read_lines(source, 7)] == [
        Loading("text_model", ("text_model",), 0.5),
        Loading("text_model", ("mmproj_model", "text_model"), 1.0),
        Ready({"id": "mine", "text": "two\nlines\r\n\0 \u2028 \x1b[0m"}),
        Sleeping(),
        Ready(),
        Downloading("http://x/y.gguf", 1, 2),
        Unknown("thinking", {"about": "life"}),
    ]


def test_a_record_of_the_greatest_length_is_written_and_a_longer_one_is_not(
    pipe: tuple[int, StatePort],
) -> None:
    source, port = pipe
    room = LONGEST_RECORD - len(PREFIX) - len('{"state":"ready","payload":{"x":""}}\n')
    port.ready({"x": "y" * room})
    assert len(os.read(source, 2 * LONGEST_RECORD)) == LONGEST_RECORD
    with pytest.raises(ValueError, match="a record of 4097 bytes, where 4096 are allowed"):
        port.ready({"x": "y" * (room + 1)})
    assert is_empty(source)


def test_what_is_no_JSON_is_refused_and_nothing_is_written(pipe: tuple[int, StatePort]) -> None:
    source, port = pipe
    with pytest.raises(ValueError, match="not JSON compliant"):
        port.loading(float("nan"))
    with pytest.raises(TypeError):
        port.ready({"x": object()})
    assert is_empty(source)


@pytest.mark.parametrize("line", [b"", b"hello", b" " + PREFIX, PREFIX + b"{}\n" + PREFIX])
def test_what_is_no_line_of_a_record_is_not_forwarded(
    line: bytes, pipe: tuple[int, StatePort]
) -> None:
    source, port = pipe
    with pytest.raises(ValueError, match="not a record"):
        port.forward(line)
    assert is_empty(source)


# -- pipes that do not take it -----------------------------------------------------------------


def test_a_reader_that_has_gone_is_an_error_each_time(pipe: tuple[int, StatePort]) -> None:
    source, port = pipe
    os.close(source)
    for _ in range(2):
        with pytest.raises(BrokenPipeError):
            port.sleeping()


def test_a_closed_port_writes_nothing(pipe: tuple[int, StatePort]) -> None:
    _, port = pipe
    other = StatePort(os.dup(port.fileno()))
    other.close()
    with pytest.raises(RuntimeError, match="closed"):
        other.sleeping()


def test_records_are_whole_on_a_pipe_that_does_not_block(wide: tuple[int, StatePort]) -> None:
    source, port = wide
    os.set_blocking(port.fileno(), False)
    texts = ["x" * length for length in (1, 200_000, 3, 4096, 70_000)]
    reader = threading.Thread(target=lambda: found.extend(read_lines(source, len(texts))))
    found: list[bytes] = []
    reader.start()
    for text in texts:
        port.ready({"text": text})
    reader.join()
    assert [parse(line) for line in found] == [Ready({"text": text}) for text in texts]


class Interrupted(Exception):
    """Raised by a signal handler."""


def test_a_write_that_is_broken_off_spoils_no_later_record(wide: tuple[int, StatePort]) -> None:
    source, port = wide

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(Interrupted):
            port.ready({"text": "x" * 200_000})  # the pipe holds less, and nobody reads
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.extend(read_lines(source, 3)))
    reader.start()
    port.sleeping()
    port.ready()
    reader.join()
    assert isinstance(parse(found[0]), Malformed)
    assert [parse(line) for line in found[1:]] == [Sleeping(), Ready()]


# -- many writers ------------------------------------------------------------------------------


def test_eight_threads_and_forks_that_write_at_once_mix_no_line() -> None:
    records, forks = 200, 8
    stdout, stderr = run("crowd.py", host.__file__, str(records), str(forks))
    assert stdout.endswith(b"\n")
    last: Counter[int] = Counter()
    others: Counter[str] = Counter()
    for line in stdout.splitlines():
        match parse(line):
            case Loading():
                payload = json.loads(line.removeprefix(PREFIX))["payload"]
                assert payload["index"] == last[payload["thread"]]
                assert set(payload["filler"]) <= {"x"}
                last[payload["thread"]] += 1
            case Unknown(state, text):
                assert len(line) + 1 == LONGEST_RECORD
                assert isinstance(text, str)
                assert set(text) == {"z"}
                others[state] += 1
            case other:
                raise AssertionError(f"{other} of {line[:200]!r}")
    assert last == Counter(dict.fromkeys(range(8), records))
    assert others == Counter({f"fork{number}": 50 for number in range(forks)})
    refusals = re.findall(r"fork: records are written by process (\d+) alone", stderr.decode())
    assert len(refusals) == forks


# -- everything else goes to stderr ------------------------------------------------------------

WAYS = [
    "print", "no newline", "flushed stdio", "stdio", "os.write", "subprocess", "os.system",
]  # fmt: skip


def check_noise(stderr: str, *moments: str) -> None:
    """See that all of it is there, and that nobody who was started has the pipe."""
    assert "still in the buffer" in stderr
    for moment in moments:
        for way in WAYS:
            assert f"{moment}: {way}" in stderr
    assert stderr.count("in make_noise") == len(moments)  # from C code
    told = re.search(r"the pipe is (pipe:\[\d+\])", stderr)
    assert told is not None
    assert "grandchild has" in stderr
    assert f"grandchild has {told[1]}" not in stderr
    assert "that was all" in stderr


def test_nothing_but_records_reaches_stdout_of_an_own_child() -> None:
    stdout, stderr = run("noisy.py", host.__file__, stdin=EXIT)
    assert [parse(line) for line in stdout.splitlines()] == [
        Loading("text_model", ("text_model",), 0.5),
        Ready(),
    ]
    check_noise(stderr.decode(), "before", "within", "after")
    assert "the fork has the pipe" not in stderr.decode()


def test_nothing_but_records_reaches_stdout_of_a_hosted_child(
    parrot: Parrot, own_temporary_directory: Path
) -> None:
    socket = own_temporary_directory / "noisy.sock"
    settings = json.dumps(hosted_settings(ModelConfig(parrot.path), str(socket)))
    stdout, stderr = run(
        "noisy.py", host.__file__, settings, stdin=EXIT, LLAMA_SERVER_ROUTER_PORT="0"
    )
    socket.unlink()
    kinds = [type(parse(line)) for line in stdout.splitlines()]
    assert kinds == [Loading, Loading, Ready]
    text = stderr.decode()
    check_noise(text, "before", "after")
    assert text.count("Available buffer types") == 2  # printed by the wheel
    # The wheel's own copy of the descriptor is not ours to close.
    assert text.index("the fork does not have the pipe") < text.index("the fork has the pipe")


def test_stdout_is_reserved_once() -> None:
    code = """
import os, sys
sys.path.insert(0, sys.argv[1])
import host
os.close(0)
port = host.reserve_stdout()
port.ready({"fd": port.fileno(), "inherited": os.get_inheritable(port.fileno())})
try:
    host.reserve_stdout()
except RuntimeError as exc:
    print(exc)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(host.__file__).parent)], capture_output=True
    )
    assert parse(done.stdout.rstrip()) == Ready({"fd": 3, "inherited": False})
    assert done.stderr == b"stdout is reserved already\n"


def test_a_program_may_take_the_port_without_importing_trio() -> None:
    code = """
import runpy, sys
from importlib.util import find_spec
package = find_spec("llamatrio")
host = runpy.run_path(package.submodule_search_locations[0] + "/child/host.py")
host["reserve_stdout"]().ready({"trio": "trio" in sys.modules})
print("this is log")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert parse(done.stdout.rstrip()) == Ready({"trio": False})
    assert done.stderr == b"this is log\n"
