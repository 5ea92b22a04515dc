"""Merged streams are refused, streams that are apart are not, and who reserves stdout is seen."""

from __future__ import annotations

import itertools
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import psutil
import pytest
import trio
from moments import reach
from test_process import SHORT, Recorder, launch, living, run, run_steps

from llamatrio import (
    Bounds,
    Hosted,
    MergedStreams,
    ModelConfig,
    Own,
    Phase,
    ServerBackend,
    StdoutClosed,
    Stock,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind, Launch, plan
from llamatrio.child.shelltext import find_redirections
from llamatrio.child.verdict import Member, StrayRecords, judge, suggest
from llamatrio.child.wrappers import find_merging
from llamatrio.session.programs import find_program
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot
from llamatrio.wire.records import PREFIX, Loading, Ready, Sleeping

HOST = str(Path(find_merging.__code__.co_filename).parent / "host.py")
RECORD = PREFIX.decode() + '{"state":"ready"}\\n'  # as the fake child's steps write a newline

# -- command lines -----------------------------------------------------------------------------


def sh(text: str, name: str = "sh") -> tuple[str, ...]:
    return (name, "-c", text, "llama-server")


MERGING = [
    (sh('exec "$0" "$@" 2>&1'), sh('exec "$0" "$@"')),
    (sh('"$0" "$@" 2>&1; true'), sh('"$0" "$@"; true')),
    (sh('"$0" "$@" 2>&1 | cat'), sh('"$0" "$@" | cat')),
    (sh('"$0" "$@" |& tee log', "bash"), sh('"$0" "$@" | tee log', "bash")),
    (sh('"$0" "$@" &>log', "/bin/bash"), sh('"$0" "$@"', "/bin/bash")),
    (sh('"$0" "$@" &>> log', "zsh"), sh('"$0" "$@"', "zsh")),
    (sh('"$0" "$@" >& log', "bash"), sh('"$0" "$@"', "bash")),
    (sh('exec "$0" "$@" > >(tee log) 2>&1', "bash"), sh('exec "$0" "$@" > >(tee log)', "bash")),
    (sh('exec "$0" "$@" 1>&2'), sh('exec "$0" "$@"')),
    (sh('exec "$0" "$@" >&2'), sh('exec "$0" "$@"')),
    (sh('exec "$0" "$@" 2>/dev/stdout'), sh('exec "$0" "$@"')),
    (sh('exec 2>&1; exec "$0" "$@"'), sh('exec; exec "$0" "$@"')),
    (sh('(cd /x && "$0" "$@") 2>&1'), sh('(cd /x && "$0" "$@")')),
    (sh('{ "$0" "$@"; } 2>&1 | tee log'), sh('{ "$0" "$@"; } | tee log')),
    (sh('if true; then "$0" "$@"; fi 2>&1'), sh('if true; then "$0" "$@"; fi')),
    (sh('cd /x\n\\\n  "$0" ${@:1} 2>&1'), sh('cd /x\n\\\n  "$0" ${@:1}')),
    (sh("exec llama-server -m x 2>&1"), sh("exec llama-server -m x")),
    (("bash", "-euo", "pipefail", "-c", "x $* 2>&1"), ("bash", "-euo", "pipefail", "-c", "x $*")),
    (
        ("env", "-u", "A", "B=1", "nice", "-n", "5", "timeout", "-k", "1", "9", *sh('x "$@" 2>&1')),
        ("env", "-u", "A", "B=1", "nice", "-n", "5", "timeout", "-k", "1", "9", *sh('x "$@"')),
    ),
    (("busybox", *sh('x "$@" 2>&1')), ("busybox", *sh('x "$@"'))),
    (("cmd.exe", "/c", "server 2>&1"), ("cmd.exe", "/c", "server")),
    (("cmd", "/c", "nvidia-smi & server 2>&1"), ("cmd", "/c", "nvidia-smi & server")),
    (("script", "-qec", "llama-server", "/dev/null"), ("sh", "-c", 'exec llama-server "$@"', "sh")),
    (("/usr/bin/script", "-q", "--", "llama-server", "-v"), ("llama-server", "-v")),
    (("unbuffer", "-p", "llama-server", "-v"), ("llama-server", "-v")),
    (("winpty.exe", "llama-server"), ("llama-server",)),
    (sh('exec unbuffer "$0" "$@"'), sh('exec "$0" "$@"')),
    (("ssh", "-tt", "box", "llama-server"), ("ssh", "box", "llama-server")),
    (("ssh", "-qtp22", "box", "llama-server"), ("ssh", "-qp22", "box", "llama-server")),
    (("ssh", "-p", "22", "-t", "box", "x"), ("ssh", "-p", "22", "box", "x")),
    (("ssh", "-o", "RequestTTY=force", "box", "x"), ("ssh", "box", "x")),
    (("ssh", "-i", "key", "box", "exec x 2>&1"), ("ssh", "-i", "key", "box", "exec x")),
    (("docker", "run", "--rm", "-it", "image"), ("docker", "run", "--rm", "-i", "image")),
    (("docker", "run", "-i", "--tty", "image"), ("docker", "run", "-i", "image")),
    (("podman", "exec", "-t", "-e", "A", "box"), ("podman", "exec", "-e", "A", "box")),
    (("docker", "run", "-v/t:/t", "-t", "x"), ("docker", "run", "-v/t:/t", "x")),
    (("socat", "-", "EXEC:./run,stderr"), ("socat", "-", "EXEC:./run")),
    (("socat", "-", "EXEC:./run,pty,stderr,rawer"), ("socat", "-", "EXEC:./run,pty,rawer")),
]  # fmt: skip

APART = [
    (),
    ("llama-server",),
    ("llama-server", "--alias", "2>&1", "-m", "/m/|& &> script.gguf"),  # no shell reads this
    ("python3", "serve.py", "script", "-t", "unbuffer", "2>&1"),
    ("./script", "llama-server"),  # somebody's own
    ("/home/me/unbuffer", "llama-server"),
    ("bash", "start.sh", "-c", 'x "$@" 2>&1'),  # arguments of a file
    ("bash", "--rcfile", "c", "start.sh", "2>&1"),
    sh('exec "$0" "$@"'),
    sh('"$0" "$@"; true'),
    sh('"$0" "$@" | cat'),
    sh('"$0" "$@" 2>log'),
    sh('exec "$0" "$@" > >(tee log) 2> >(tee err >&2)', "bash"),
    sh('nvidia-smi >/dev/null 2>&1; exec "$0" "$@"'),
    sh('command -v x &>/dev/null && exec "$0" "$@"', "bash"),
    sh('echo starting >&2; exec "$0" "$@"'),
    sh('{ echo starting >&2; "$0" "$@"; }'),
    sh('(setup 2>&1) | logger; exec "$0" "$@"'),
    sh('exec "$0" --alias "2>&1" "$@"'),
    sh('exec "$0" --alias \'|& 2>&1\' "$@"'),
    sh('exec "$0" --alias 2\\>\\&1 "$@"'),
    sh('exec "$0" --alias "$(uname 2>&1)" "$@"'),
    sh('exec "$0" --alias $(echo "a)b" 2>&1) "$@"'),
    sh('exec "$0" "$@" # 2>&1'),
    sh('# 2>&1\nexec "$0" "$@"'),
    sh('set -- "$@" --verbose; exec "$0" "$@"'),
    sh('exec "$0" "$@" 3>&1'),
    sh('exec "$0" "$@" <&0 2>&-'),
    # What is not understood is left to what the child shows.
    sh('case $X in a) b;; esac; exec "$0" "$@" 2>&1'),
    sh("f() { x 2>&1; }; f"),
    sh('cat <<END\n2>&1\nEND\nexec "$0" "$@"'),
    sh('exec "$0" "$@" 2>&1 "'),
    sh(""),
    sh(")"),
    ("sh", "-c"),
    ("sh",),
    ("timeout", "5", "python3", "script"),
    ("env", "script=1", "llama-server"),
    ("nice",),
    ("ssh", "box", "llama-server", "-t", "4"),  # its own option: threads
    ("ssh", "-o", "RequestTTY=no", "box", "nvidia-smi 2>&1 >/dev/null; exec x"),
    ("ssh",),
    ("docker", "run", "-i", "--gpus", "all", "image", "-t", "4"),
    ("docker", "run", "--rm", "-e", "t", "-v", "/t:/t", "image", "-it"),
    ("docker", "ps", "-t"),
    ("socat", "-", "EXEC:./run"),
    ("socat", "-", "EXEC:./run,pty,rawer"),  # its stderr is still that of socat
    ("socat", "-", "EXEC:./run -m /a,stderr/m"),
    ("cmd", "/c", "nvidia-smi >nul 2>&1 & server"),
    ("cmd", "/c", 'server --alias "2>&1"'),
    ("cmd", "server"),
]


@pytest.mark.parametrize(("command", "instead"), MERGING, ids=lambda words: shlex.join(words))
def test_a_command_that_merges_the_streams_is_refused_with_one_that_does_not(
    command: tuple[str, ...], instead: tuple[str, ...]
) -> None:
    found = find_merging(command)
    assert found is not None
    assert found.instead == instead
    assert found.why
    assert find_merging(instead) is None


@pytest.mark.parametrize("command", APART, ids=lambda words: shlex.join(words))
def test_a_command_that_does_not_certainly_merge_the_streams_is_let_through(
    command: tuple[str, ...],
) -> None:
    assert find_merging(command) is None


def test_no_text_makes_the_reader_of_shell_texts_fail() -> None:
    pieces = ['"', "'", "`", "$(", ")", "(", "2>&1", " ", "\n", ";", "|&", "if", "fi", "exec", "\\",
              "{", "}", "#", '"$@"', "<<", "&"]  # fmt: skip
    for count in (1, 2, 3):
        for words in itertools.product(pieces, repeat=count):
            text = "".join(words)
            found = find_redirections(text)
            assert all(text[start:end].strip() for start, end, _ in found.merging)
            assert len(found.repaired(text)) <= len(text)


@pytest.mark.parametrize(
    "kind",
    [Own(sh('"$0" "$@" 2>&1 | tee log')), Own(("script", "-qc", "x")), Stock("/usr/bin/unbuffer")],
    ids=str,
)
async def test_such_a_command_is_refused_before_anything_is_started(
    kind: Kind, parrot: Parrot
) -> None:
    with pytest.raises(MergedStreams) as caught:
        async with open_provider(ModelConfig(parrot.path), backend=kind):
            raise AssertionError("it was opened")
    assert caught.value.evidence
    assert find_merging(shlex.split(caught.value.suggestion)) is None
    for sentence in (*caught.value.evidence, caught.value.suggestion):
        assert sentence in str(caught.value)


# -- what is seen, and what follows ------------------------------------------------------------

OUT, ERR, OTHER = (1, 1), (1, 2), (1, 3)


def member(pid: int, *files: tuple[int, int], listens: bool = False) -> Member:
    return Member(pid, f"program-{pid}", dict(enumerate(files)), listens=listens)


STDIN = (1, 0)
PLAIN = member(7, STDIN, ERR, ERR, OUT, listens=True)  # a healthy child: fd 1 is fd 2
SHELL = member(6, STDIN, OUT, ERR)


@pytest.mark.parametrize(
    ("members", "merged", "reserved"),
    [
        pytest.param([PLAIN], None, True, id="plain"),
        pytest.param([SHELL, PLAIN], None, True, id="behind a shell"),
        pytest.param([member(7, STDIN, OUT, ERR, listens=True)], None, False, id="not reserved"),
        pytest.param([member(7, STDIN, OUT, ERR)], None, None, id="nobody serves"),
        pytest.param([], None, None, id="nobody is seen"),
        pytest.param([SHELL, Member(7, "", {})], None, None, id="nobody may look"),
        pytest.param([member(7, STDIN, OUT, OUT, OUT, listens=True)], 7, False, id="2>&1"),
        pytest.param([SHELL, member(7, STDIN, OUT, OUT)], 7, None, id="2>&1 behind a shell"),
        pytest.param(
            [member(7, STDIN, *[OTHER] * 3, listens=True), member(8, OTHER, OUT, ERR), SHELL],
            7, None, id="2>&1 | cat",
        ),
        pytest.param(
            [member(7, STDIN, OTHER, OTHER, OUT, listens=True), member(8, OTHER, OUT, ERR)],
            7, True, id="2> >(cat)",
        ),
        pytest.param(
            [SHELL, member(7, STDIN, ERR, ERR, OTHER, listens=True), member(8, OTHER, OUT, ERR)],
            None, None, id="| cat",
        ),
        pytest.param(
            [member(7, STDIN, OTHER, OTHER, OUT, listens=True), member(8, OTHER, ERR, ERR)],
            None, True, id="2> >(cat >&2)",
        ),
        pytest.param(
            [attrs.evolve(member(7, *[OTHER] * 4, listens=True), terminals=frozenset(range(4)))],
            7, None, id="a terminal",
        ),
    ],
)  # fmt: skip
def test_open_files_tell_merged_streams_and_a_reserved_stdout(
    members: list[Member], merged: int | None, reserved: bool | None
) -> None:
    look = judge(members, OUT, ERR)
    assert (look.evidence is not None) == (merged is not None)
    assert look.culprit == merged
    if merged:
        assert f"process {merged} (program-{merged})" in str(look.evidence)
    assert look.reservation.reserved is reserved
    assert look.reservation.reason


@pytest.mark.parametrize(
    ("members", "closed"),
    [
        ([PLAIN], False),
        ([SHELL, member(7, STDIN, OUT, OTHER)], False),
        ([member(7, STDIN, OUT, OTHER)], True),
        ([member(6, STDIN, OUT), member(7, STDIN, OUT, OTHER)], True),
        ([member(7, STDIN, OUT, OTHER), Member(8, "", {})], False),  # it may have it, or it ends
        ([], False),
    ],
)
def test_a_stderr_that_nobody_has_open_is_seen(members: list[Member], closed: bool) -> None:
    assert judge(members, OUT, ERR).stderr_is_closed is closed


def test_the_program_behind_a_wrapper_is_suggested_without_the_options_of_both() -> None:
    wrapper = ("/opt/start.sh", "--model", "m.gguf")
    assert suggest(wrapper, ("/opt/llama server", "-v", "--model", "m.gguf")) == (
        "'/opt/llama server' -v"
    )
    told = (*wrapper[:1], "serve", "-v", *wrapper[1:])
    assert suggest(told, told[1:]) == "serve -v"
    # The kernel puts the interpreter of a script before it.
    assert suggest(wrapper, ("/bin/sh", *wrapper)) == 'exec llama-server "$@"'
    assert suggest(wrapper, ("something", "else")) == 'exec llama-server "$@"'
    assert suggest(wrapper) == 'exec llama-server "$@"'


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"log\n" + PREFIX + b"{}\r\nlog", PREFIX + b"{}"),
        (PREFIX + b"x" * 500 + b"\n", PREFIX),
        (b"log " + PREFIX + b"{}\n", None),
        (b"\x1b[32m" + PREFIX + b"{}\n", None),
        (PREFIX[:-1] + b"\n" + PREFIX[-1:] + b"\n", None),
        (b"x" * 300 + b"\n" + PREFIX, PREFIX),
        (b"\n\n\0\n", None),
    ],
)
def test_a_record_at_the_start_of_a_line_is_found_however_it_comes(
    data: bytes, found: bytes | None
) -> None:
    for cut in range(len(data) + 1):
        stray = StrayRecords()
        seen = [line for part in (data[:cut], data[cut:]) if (line := stray.feed(part))]
        assert bool(seen) == (found is not None)
        assert not seen or seen[0].startswith(PREFIX)
    if found is not None:
        whole = StrayRecords().feed(data)
        assert whole is not None
        assert whole.startswith(found)
        assert len(whole) <= 200


# -- a child that shows it ---------------------------------------------------------------------

if sys.platform != "linux":
    pytest.skip("looks at /proc", allow_module_level=True)

from llamatrio.child.fdtables import find_members  # noqa: E402 - Linux alone has it

SOON = Bounds(closing=0.2)


async def refused(*steps: str) -> MergedStreams:
    """Run a fake child that is refused, and has nothing told of its records."""
    recorder = await run(launch(fakechild.command(*steps), SHORT, SOON))
    assert isinstance(recorder.fault, MergedStreams)
    assert recorder.announced is recorder.fault
    assert recorder.records == []
    assert recorder.reservation is None
    assert recorder.exit.asked
    assert recorder.fault.suggestion
    return recorder.fault


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_pipe_that_is_closed_before_READY_by_a_child_that_lives_is_a_merge(
    stream: str,
) -> None:
    fault = await refused("O banner\\n", f"C {stream}", "W 999")
    assert f"nothing has {stream} open" in str(fault)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_child_that_closes_a_pipe_and_ends_has_just_died(stream: str) -> None:
    recorder = await run_steps(f"C {stream}", "W 0.1", "X 3")
    assert recorder.fault is None
    assert recorder.exit.returncode == 3


async def test_a_record_on_stderr_alone_is_a_merge() -> None:
    fault = await refused("E banner\\n", f"E {RECORD}", "W 999")
    assert "stderr carries a record" in str(fault)
    assert PREFIX.decode() in str(fault)


@pytest.mark.slow
async def test_a_record_on_stderr_that_another_on_stdout_follows_is_a_line_of_the_log() -> None:
    recorder = await run_steps(f"E {RECORD}", "W 0.1", "S ready", f"E {RECORD}", "W 0.6", "X 0")
    assert recorder.records == [Ready()]
    assert recorder.fault is None


@pytest.mark.slow
async def test_a_record_on_stderr_after_the_first_on_stdout_ends_nobody() -> None:
    steps = ["S loading", "R"]
    async with living(launch(fakechild.command(*steps), SHORT)) as recorder:
        await recorder.wait_for(Loading)
    recorder = await run_steps("S loading", *[f"E {RECORD}"] * 5, "W 0.6", "S ready", "X 0")
    assert recorder.records == [Loading(), Ready()]
    assert recorder.fault is None


@pytest.mark.parametrize(
    "lines", [["O a\\n"] * 3, ["On 2000000", "O \\n", f"O {PREFIX.decode()}\\n", "O \\n"]]
)
async def test_three_lines_before_the_first_record_and_none_on_stderr_are_a_merge(
    lines: list[str],
) -> None:
    fault = await refused(*lines, "S ready", "W 999")
    assert "3 other lines" in str(fault)


@pytest.mark.parametrize(
    "steps", [["O a\\n"] * 2, ["O a\\n"] * 9 + ["E log"]], ids=["two", "a log"]
)
async def test_a_banner_is_no_merge(steps: list[str]) -> None:
    recorder = await run_steps(*steps, "S ready", *["O a\\n"] * 9, "X 0")
    assert recorder.records == [Ready()]
    assert recorder.fault is None


async def test_a_stderr_on_the_pipe_of_stdout_is_seen_at_the_first_record() -> None:
    steps = fakechild.command("S loading", "W 999")
    recorder = await run(launch(("sh", "-c", '"$@" 2>&1; true', "sh", *steps)))
    assert isinstance(recorder.fault, MergedStreams)
    assert recorder.records == []
    assert "has its stderr on the pipe of stdout" in str(recorder.fault)


async def test_a_stderr_that_comes_onto_the_pipe_of_stdout_later_is_seen_at_READY() -> None:
    code = (
        "import os, sys, time\n"
        f'print({PREFIX.decode()!r} + \'{{"state":"loading"}}\', flush=True)\n'
        "time.sleep(0.2)\n"
        "os.dup2(1, 2)\n"
        f'print({PREFIX.decode()!r} + \'{{"state":"ready"}}\', flush=True)\n'
        "time.sleep(999)\n"
    )
    recorder = await run(launch((sys.executable, "-c", code), SHORT))
    assert isinstance(recorder.fault, MergedStreams)
    assert recorder.records == [Loading()]


async def test_a_refused_child_is_not_started_again(parrot: Parrot) -> None:
    steps = ["O a\\n"] * 3 + ["S ready", "W 999"]
    with trio.fail_after(30):
        async with open_provider(
            ModelConfig(parrot.path), backend=Own(fakechild.command(*steps))
        ) as provider:
            with pytest.raises(MergedStreams):
                await provider.start()
            assert provider.phase is Phase.UNLOADED
            assert provider.diagnostics().counters.generations == 1


# -- after READY -------------------------------------------------------------------------------


async def test_a_ready_child_that_closes_its_stderr_goes_on_without_a_log() -> None:
    start = launch(
        fakechild.command("S ready", "W 0.1", "C stderr", "W 0.4", "S sleeping", "R"), SHORT, SOON
    )
    async with living(start) as recorder:
        await recorder.wait_for(Ready)
        await recorder.wait_for(Sleeping)
    assert recorder.fault is None
    assert "has closed its stderr" in recorder.exit.tail
    assert recorder.exit.returncode == 0


async def test_a_ready_child_that_closes_its_stdout_is_at_fault() -> None:
    start = launch(fakechild.command("S ready", "C stdout", "R"), SHORT, SOON)
    recorder = await run(start)
    assert recorder.records == [Ready()]
    assert isinstance(recorder.fault, StdoutClosed)
    assert recorder.announced is recorder.fault
    assert recorder.exit.returncode == 0  # it was asked


@pytest.mark.slow
async def test_a_request_to_a_child_that_closes_its_stdout_fails_and_the_next_one_is_served(
    parrot: Parrot, tmp_path: Path
) -> None:
    # The first time it waits for a request and closes its stdout; the second time it serves.
    script = tmp_path / "start"
    first = fakechild.command("S loading", "H hang", "S ready", "Q", "C stdout", "R")
    second = fakechild.command("S loading", "H ok", "S ready", "R")
    script.write_text(
        f'#!/bin/sh\nif mkdir {tmp_path}/begun; then exec {shlex.join(first)} "$@"; fi\n'
        f'exec {shlex.join(second)} "$@"\n'
    )
    script.chmod(0o755)
    backend = ServerBackend(Own((str(script),)), bounds=SOON, ladder=SHORT)
    with trio.fail_after(30):
        async with open_provider(ModelConfig(parrot.path), backend=backend) as provider:
            await provider.start()
            request = completion_request("Hello")
            outcome = await provider.submit(request).wait()
            assert isinstance(getattr(outcome, "error", None), StdoutClosed)
            await reach(provider, Phase.STARTED, 2)
            assert (await provider.submit(request).result()).text
            assert provider.diagnostics().counters.crashes == 1


# -- whether stdout is reserved ----------------------------------------------------------------


async def test_a_child_that_does_not_reserve_its_stdout_is_run_and_reported(
    parrot: Parrot, caplog: pytest.LogCaptureFixture
) -> None:
    steps = ["O hello\\n", "S loading", "H ok", "O hello\\n", "S ready", "R"]
    backend = ServerBackend(Own(fakechild.command(*steps)), name="loose")
    with trio.fail_after(30):
        async with open_provider(ModelConfig(parrot.path), backend=backend) as provider:
            assert provider.diagnostics().stdout_reserved is None
            await provider.start()
            assert provider.diagnostics().stdout_reserved is False
            assert backend.reservation is not None
            assert "it is its stdout" in backend.reservation.reason
            assert (await provider.submit(completion_request("Hello")).result()).text
    assert "does not reserve its stdout" in caplog.text


async def test_where_nobody_is_seen_to_serve_nothing_is_known() -> None:
    async with living(launch(fakechild.command("S ready", "R"))) as recorder:
        await recorder.wait_for(Ready)
    assert recorder.reservation is not None
    assert recorder.reservation.reserved is None


async def test_a_real_child_reserves_its_stdout(kind: Kind, parrot: Parrot) -> None:
    with trio.fail_after(30):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            await provider.start()
            assert provider.diagnostics().stdout_reserved is True


@pytest.mark.slow
def test_a_process_that_ends_while_it_is_looked_at_is_not_seen_with_some_of_its_files() -> None:
    # It would seem to have closed its stderr, and to live on.
    choice = random.Random(1)
    for _ in range(200):
        with subprocess.Popen(
            ["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            killer = threading.Timer(choice.uniform(0, 0.0003), process.kill)
            killer.start()
            while files := [one.files for one in find_members(process.pid) if one.files]:
                assert files[0].keys() >= {0, 1, 2}
            killer.join()


# -- wrappers around real children -------------------------------------------------------------


def wrapped(kind: Kind, parrot: Parrot, tmp_path: Path, *wrapper: str) -> Launch:
    """A real child behind a wrapper that takes its command line as arguments."""
    start = plan(
        kind,
        ModelConfig(parrot.path),
        program=find_program(kind),
        host_program=HOST,
        address=str(tmp_path / "x.sock"),
        key="key",
        environ=os.environ,
    )
    # What a wrapper has started may take its time to end, where the machine is busy.
    bounds = attrs.evolve(start.bounds, drain=10)
    return attrs.evolve(start, command=(*wrapper, *start.command), bounds=bounds)


def needed(*wrapper: str) -> None:
    """Skip a test whose wrapper is not installed."""
    for word in wrapper:
        if shutil.which(word.split()[0]) is None:
            pytest.skip(f"no {word} here")


async def apart(kind: Kind, parrot: Parrot, tmp_path: Path, *wrapper: str) -> Recorder:
    async with living(wrapped(kind, parrot, tmp_path, *wrapper)) as recorder:
        await recorder.wait_for(Ready)
    assert recorder.fault is None
    assert len(recorder.records) >= 3
    assert recorder.unexpected == []
    assert recorder.tally.log_lines > 5
    assert recorder.exit.returncode == 0
    assert recorder.exit.ready
    return recorder


FORKS = ("sh", "-c", '"$@"; exit $?', "sh")

STARTERS = [
    ("sh", "-c", 'exec "$@"', "sh"),
    FORKS,
    ("env", "A=1"),
    ("nice", "-n", "5"),
    ("timeout", "600"),
    ("stdbuf", "-oL"),
    ("setpriv", "--no-new-privs"),
    ("nohup",),
    ("setsid", "--wait"),
    ("bash", "-c", 'exec "$@" 2> >(tee /dev/null >&2)', "bash"),
]
FILTERS = [
    ("sh", "-c", '"$@" | cat', "sh"),
    ("sh", "-c", '"$@" | tee /dev/null', "sh"),
    ("bash", "-c", 'exec "$@" > >(tee /dev/null)', "bash"),
]


async def test_a_real_child_behind_a_shell_that_waits_is_seen_and_ended(
    parrot: Parrot, tmp_path: Path
) -> None:
    recorder = await apart(Hosted(), parrot, tmp_path, *FORKS)
    assert recorder.reservation is not None
    assert recorder.reservation.reserved
    assert str(recorder.pid) not in recorder.reservation.reason  # it is not the shell that serves


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", STARTERS, ids=lambda words: shlex.join(words))
async def test_a_wrapper_that_only_starts_a_child_keeps_its_stdout_reserved(
    wrapper: tuple[str, ...], kind: Kind, parrot: Parrot, tmp_path: Path
) -> None:
    needed(wrapper[0])
    recorder = await apart(kind, parrot, tmp_path, *wrapper)
    assert recorder.reservation is not None
    assert recorder.reservation.reserved is True


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", FILTERS, ids=lambda words: shlex.join(words))
async def test_a_filter_of_stdout_alone_keeps_the_streams_apart(
    wrapper: tuple[str, ...], kind: Kind, parrot: Parrot, tmp_path: Path
) -> None:
    needed(wrapper[0])
    recorder = await apart(kind, parrot, tmp_path, *wrapper)
    assert recorder.reservation is not None
    assert recorder.reservation.reserved is None


QUOTED = "$(printf '%q ' \"$@\")"
RUN = f"printf '#!/bin/sh\\nexec %s\\n' \"{QUOTED}\" >$0.run; chmod 755 $0.run; exec"
MERGERS = [
    'exec "$@" 2>&1',
    '"$@" 2>&1; true',
    '"$@" 2>&1 | cat',
    '"$@" |& tee /dev/null',
    'exec "$@" > >(tee /dev/null) 2>&1',
    'exec "$@" 2> >(tee /dev/null)',
    'exec 2>&1; exec "$@"',
    'exec "$@" 1>&2',
    '"$@" 1>&2; true',
    '"$@" 3>&1 1>&2 2>&3; true',
    'exec "$@" 2>/dev/null',
    'exec "$@" &>/dev/null',
    f'script -qec "{QUOTED}" /dev/null',
    'unbuffer "$@"',
    f"{RUN} socat - EXEC:$0.run,stderr",
    f"{RUN} socat - EXEC:$0.run,pty,stderr,rawer",
]


@pytest.mark.slow
@pytest.mark.parametrize("text", MERGERS)
async def test_a_merge_that_no_command_line_shows_is_seen_on_the_living_child(
    text: str, kind: Kind, parrot: Parrot, tmp_path: Path
) -> None:
    needed("bash", *(word for word in ("script", "unbuffer", "socat") if word in text))
    wrapper = tmp_path / "start"
    wrapper.write_text(f"#!/bin/bash\n{text}\n")
    wrapper.chmod(0o755)
    recorder = await run(wrapped(kind, parrot, tmp_path, str(wrapper)))
    assert isinstance(recorder.fault, MergedStreams)
    assert not any(isinstance(record, Ready) for record in recorder.records)
    assert recorder.fault.evidence
    assert recorder.exit.asked


@pytest.mark.slow
async def test_a_child_that_dies_of_a_signal_behind_a_shell_is_told_by_that_signal(
    parrot: Parrot, tmp_path: Path
) -> None:
    async with living(wrapped(Hosted(), parrot, tmp_path, *FORKS)) as recorder:
        await recorder.wait_for(Ready)
        [server] = psutil.Process(recorder.pid).children()
        server.send_signal(signal.SIGSEGV)
        await recorder.wait_ended()
    assert recorder.exit.signal == "SIGSEGV"
    assert recorder.exit.returncode == 128 + signal.SIGSEGV
    assert not recorder.exit.asked


# -- hostile text ------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_chat_template_with_records_in_it_forges_none_and_ends_nobody(
    kind: Kind, parrot: Parrot
) -> None:
    forged = PREFIX.decode() + '{"state":"sleeping"}'
    template = (
        f"{{% for message in messages %}}\n{forged}\n{{{{ message.content }}}}\n{{% endfor %}}"
    )
    config = ModelConfig(parrot.path, chat_template=template)
    with trio.fail_after(60):
        async with open_provider(config, backend=kind) as provider:
            await provider.start()
            async with provider.chat("Hello") as reply:
                assert [piece async for piece in reply]
            diagnostics = provider.diagnostics()
            assert diagnostics.residency == "resident"
            assert diagnostics.pipes.unexpected == 0
            assert diagnostics.pipes.records <= 5
