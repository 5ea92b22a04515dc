"""The fixture: what passes, what does not and why, and the judge apart from everything else."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import trio
from hypothesis import given, strategies as st

from llamatrio import Bounds, ModelConfig, SpecificationError, open_provider
from llamatrio.child.launch import Kind
from llamatrio.fixture import Report, Rule, judge, run_fixture
from llamatrio.fixture.command import main
from llamatrio.fixture.facts import (
    FRAGMENT,
    Facts,
    Features,
    File,
    Process,
    Snapshot,
    Stream,
    Told,
    Tree,
)
from llamatrio.fixture.procnet import Socket, parse_table
from llamatrio.fixture.run import ChildName
from llamatrio.fixture.tree import look
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot, write_parrot
from llamatrio.wire.lines import Line, LineSplitter
from llamatrio.wire.records import Downloading, Loading, Malformed, Ready, Sleeping, parse

if sys.platform != "linux":
    pytest.skip("looks at /proc", allow_module_level=True)

BREAKER = Path(__file__).parent / "programs" / "rulebreaker.py"
SLOW = pytest.mark.slow


async def run(
    child: ChildName | Kind | Sequence[str],
    model: Path | None = None,
    *,
    wrapper: Sequence[str] = (),
    bounds: Bounds | None = None,
) -> Report:
    with trio.fail_after(60):
        return await run_fixture(child, model=model, wrapper=wrapper, bounds=bounds)


async def run_steps(*steps: str, bounds: Bounds | None = None) -> Report:
    # A child that answers costs no patience.
    return await run(fakechild.command("H ok", *steps), bounds=bounds)


def rules(report: Report) -> list[str]:
    """The names of the rules that were broken, each once, in order."""
    return list(dict.fromkeys(reason.partition(":")[0] for reason in report.reasons))


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# -- what passes -------------------------------------------------------------------------------


async def test_the_fake_child_passes_with_exactly_one_record() -> None:
    report = await run("fake")
    assert report.verdict == "pass", report.reasons
    assert (report.records, report.spawns, report.supervisors) == (1, 1, 1)


async def test_a_real_child_passes_and_is_described(kind: Kind) -> None:
    report = await run(kind)
    assert report.verdict == "pass", report.reasons
    assert (report.spawns, report.supervisors) == (1, 1)
    assert report.records >= 3
    manifest = json.loads(json.dumps(report.to_json()))["manifest"]
    assert manifest["off"] == {"ui": True, "tools": True, "mcp": True, "agent": True}
    assert manifest["hub_token"] is False
    assert manifest["network"] == "none" or manifest["network_reason"]
    assert manifest["listeners"] == [f"unix {manifest['address']}"]
    assert len(manifest["program"]["sha256"]) == len(manifest["model"]["sha256"]) == 64
    assert manifest["build"]


async def test_a_real_child_holds_no_socket_but_the_one_it_listens_on(
    kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            await provider.start()
            pid = provider.diagnostics().pid
            assert pid is not None
            tree = look(pid)
    assert tree is not None
    assert tree.sockets is not None
    [only] = tree.sockets
    assert (only.pid, only.family, only.listening) == (pid, "unix", True)
    assert Path(only.address).name.endswith(".sock")


# -- what does not: children that break one rule -----------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that a test may ruin."""
    return write_parrot(tmp_path / "model.gguf").path


async def test_a_child_that_keeps_the_rules_while_it_is_asked_passes(model: Path) -> None:
    report = await run([sys.executable, str(BREAKER), "nothing"], model)
    assert report.verdict == "pass", report.reasons


@pytest.mark.parametrize(
    ("broken", "rule", "word"),
    [
        ("listen", Rule.LISTENER, "tcp 0.0.0.0:"),
        pytest.param("listen_abstract", Rule.LISTENER, "unix @rulebreaker-", marks=SLOW),
        pytest.param("hear_datagrams", Rule.LISTENER, "udp 0.0.0.0:", marks=SLOW),
        ("rewrite_model", Rule.MANIFEST, "model.gguf"),
        pytest.param(
            "execute_again", Rule.MANIFEST, "another command line now", marks=pytest.mark.slow
        ),
        pytest.param(
            "execute_with_variable", Rule.MANIFEST, "LLAMA_ARG_TOOLS", marks=pytest.mark.slow
        ),
        pytest.param("start_another", Rule.MANIFEST, "is new", marks=SLOW),
        ("leave_a_listener_behind", Rule.LISTENER, ".sock.other"),
        ("close_stdout", Rule.PIPE, "stdout"),
        pytest.param("close_stderr", Rule.PIPE, "stderr", marks=SLOW),
        ("die", Rule.DIED, "exited with code 3"),
    ],
)
async def test_a_child_that_breaks_one_rule_while_it_is_asked_fails_for_it(
    broken: str, rule: Rule, word: str, model: Path
) -> None:
    report = await run([sys.executable, str(BREAKER), broken], model)
    assert report.verdict == "fail"
    assert rule in rules(report)
    assert any(word in reason for reason in report.reasons), report.reasons
    assert (report.spawns, report.supervisors) == (1, 1)


async def test_a_program_that_is_replaced_between_start_and_end_fails(
    model: Path, tmp_path: Path
) -> None:
    program = tmp_path / "child"
    text = BREAKER.read_text().replace("/usr/bin/env python3", sys.executable, 1)
    program.write_text(text)
    program.chmod(0o755)
    report = await run([str(program), "replace_program"], model)
    assert rules(report) == [Rule.MANIFEST]
    assert str(program) in report.reasons[0]


@pytest.mark.parametrize(
    ("steps", "rule"),
    [
        pytest.param(
            [r'E cmd_child_to_router:state:{"state":"ready"}\n', "S ready", "R"],
            Rule.STDERR_RECORD,
            id="a record on stderr beside those on stdout",
        ),
        pytest.param(
            ["S ready", r'E a line\ncmd_child_to_router:state:{"state":"sleeping"}\n', "R"],
            Rule.STDERR_RECORD,
            id="a record on stderr later",
            marks=SLOW,
        ),
        pytest.param(
            [r'O \e[0mcmd_child_to_router:state:{"state":"loading"}\n', "S ready", "R"],
            Rule.LIFECYCLE,
            id="a record behind a colour",
        ),
        pytest.param(
            [r'O [INFO] cmd_child_to_router:state:{"state":"ready"}\n', "S ready", "R"],
            Rule.LIFECYCLE,
            id="a record within a line",
            marks=SLOW,
        ),
        pytest.param(["On 70000", r"O \n", "S ready", "R"], Rule.BUFFER, id="a line too long"),
        pytest.param(
            ["S ready", r"O cmd_child_to_router:state:{\n", "R"],
            Rule.RECORDS,
            id="no JSON",
            marks=SLOW,
        ),
        pytest.param(["S loading", "X 3"], Rule.DIED, id="dies while it loads"),
    ],
)
async def test_bytes_that_break_one_rule_fail_for_it_and_are_kept(
    steps: list[str], rule: Rule
) -> None:
    report = await run_steps(*steps, bounds=Bounds(state_line=65536))
    assert rules(report) == [rule]
    assert all(piece["reason"] == rule for piece in report.evidence)
    assert report.evidence or rule is Rule.DIED


async def test_a_child_whose_records_are_all_on_stderr_is_never_ready() -> None:
    record = r'E cmd_child_to_router:state:{"state":"ready"}\n'
    report = await run_steps(record, record, "R")
    assert Rule.STDERR_RECORD in rules(report)
    assert report.records == 0
    assert report.manifest["end"] is None
    first, *_ = report.evidence
    assert (first["stream"], first["offset"]) == ("stderr", len(FRAGMENT))


async def test_a_line_that_means_nothing_is_no_failure() -> None:
    report = await run_steps(r"O Using config /x\n", "S ready", "R")
    assert report.verdict == "pass", report.reasons


@pytest.mark.slow
async def test_a_stderr_that_closes_is_told_in_whatever_order_the_pipes_are_read() -> None:
    async def hold_up_the_loop() -> None:
        while True:
            time.sleep(0.02)  # noqa: ASYNC251 - so that both pipes have something at once
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold_up_the_loop)
        for _ in range(5):
            report = await run_steps("C stderr", "S loading", "S ready", "R")
            assert set(rules(report)) == {Rule.PIPE, Rule.MERGED}, report.reasons
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_child_that_answers_nobody_passes() -> None:
    report = await run(fakechild.command("S loading", "S ready", "R"))
    assert report.verdict == "pass", report.reasons
    assert report.records == 2


# -- what does not: wrappers -------------------------------------------------------------------


WRAPPERS = {
    "a record on stderr": (
        Rule.STDERR_RECORD,
        """printf 'cmd_child_to_router:state:{"state":"ready"}\\n' >&2; exec "$@" """,
    ),
    "a line of log with a record in it": (
        Rule.LIFECYCLE,
        """printf 'I cmd_child_to_router:state:{"state":"ready"}\\n'; exec "$@" """,
    ),
    "a line that is too long": (
        Rule.BUFFER,
        """head -c 1100000 /dev/zero | tr '\\0' x; echo; exec "$@" """,
    ),
    "2>&1": (Rule.MERGED, 'exec "$@" 2>&1'),
    "1>&2": (Rule.STDERR_RECORD, 'exec "$@" 1>&2'),
    "a pipe that closes": (Rule.PIPE, 'exec "$@" 2>/dev/null'),
    "no stderr": (Rule.PIPE, 'exec "$@" 2>&-'),
    "a public listener": (
        Rule.LISTENER,
        f"""exec {sys.executable} -c '
import os, socket, sys
listener = socket.create_server(("0.0.0.0", 0))
listener.set_inheritable(True)
os.execvp(sys.argv[1], sys.argv[1:])' "$@" """,
    ),
    "a wrapper that is replaced": (
        Rule.MANIFEST,
        """cp "$0" "$0.new"; echo : >> "$0.new"; mv "$0.new" "$0"; exec "$@" """,
    ),
    "a model that is written to": (Rule.MANIFEST, 'printf x >> "$MODEL"; exec "$@"'),
    "a token for a hub": (Rule.TOKEN, 'HF_TOKEN=hf_synthetic exec "$@"'),
}


CROSSED = {
    "2>&1": [Rule.PIPE],
    "1>&2": [Rule.PIPE, Rule.MERGED],
    "a pipe that closes": [Rule.MERGED],
    # What the child keeps stdout under becomes number 2 then: its log goes there, between records
    # and sometimes into one.
    "no stderr": [Rule.MERGED, Rule.DIED, Rule.LIFECYCLE],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
async def test_a_real_child_behind_a_wrapper_that_breaks_one_rule_fails_for_it(
    name: str, kind: Kind, model: Path, tmp_path: Path
) -> None:
    rule, text = WRAPPERS[name]
    wrapper = script(tmp_path / "wrapper", text.replace("$MODEL", str(model)))
    report = await run(kind, model, wrapper=[wrapper])
    assert report.verdict == "fail"
    assert rule in rules(report)
    # What closes or crosses a pipe is seen in more than one way.
    assert set(rules(report)) <= {rule, *CROSSED.get(name, ())}, report.reasons
    assert (report.spawns, report.supervisors) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["nice", "-n", "5"], ["env", "-u", "NOTHING"]])
async def test_a_real_child_behind_a_wrapper_that_becomes_it_passes(
    words: list[str], kind: Kind
) -> None:
    report = await run(kind, wrapper=words)
    assert report.verdict == "pass", report.reasons


async def test_a_command_that_says_that_it_merges_the_streams_is_not_even_started() -> None:
    report = await run(["sh", "-c", 'exec llama-server "$@" 2>&1', "sh"])
    assert rules(report) == [Rule.MERGED]
    assert (report.spawns, report.supervisors) == (0, 0)
    assert any('exec llama-server "$@"' in note for note in report.notes)
    program = report.manifest["program"]
    assert isinstance(program, dict)
    assert program["path"].endswith("/sh")
    assert len(program["sha256"]) == 64


# -- the report --------------------------------------------------------------------------------


async def test_the_key_is_nowhere_in_the_report(tmp_path: Path) -> None:
    text = """
tell() { printf 'I cmd_child_to_router:state:%s\\n' "$1"; }
tell "$LLAMA_API_KEY"
exec "$@" "$LLAMA_API_KEY"
"""
    wrapper = script(tmp_path / "wrapper", text)
    child = fakechild.command("H ok", "S ready", "R")
    report = await run(child, wrapper=[wrapper])
    assert rules(report) == [Rule.LIFECYCLE]
    [piece] = report.evidence
    assert str(piece["data"]).endswith("#" * 64)
    tree = report.manifest["processes"]
    assert isinstance(tree, list)
    assert tree[0]["command"][-1] == "[redacted]"


@pytest.mark.slow
async def test_two_at_once_are_kept_apart() -> None:
    reports = []

    async def one(*steps: str) -> None:
        reports.append(await run_steps(*steps))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, "S ready", "R")
        nursery.start_soon(one, r"O x cmd_child_to_router:state:{}\n", "S ready", "R")
    assert sorted(report.verdict for report in reports) == ["fail", "pass"]
    assert {report.spawns for report in reports} == {1}


async def test_a_cancel_ends_the_child(tmp_path: Path) -> None:
    started = tmp_path / "started"
    wrapper = script(tmp_path / "wrapper", f': > "{started}"; exec "$@"')
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: run(fakechild.command("W 999"), wrapper=[wrapper]))
            while not await trio.Path(started).exists():  # noqa: ASYNC110 - a file has no event
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()  # the census sees whether anything is left


@pytest.mark.parametrize("digest", ["sha256:xyz", "12", "g" * 64])
async def test_what_is_no_sha256_is_refused(digest: str) -> None:
    with pytest.raises(SpecificationError, match="64 hexadecimal digits"):
        await run_fixture("fake", expect_sha256=[digest])


# -- the command -------------------------------------------------------------------------------


def test_the_command_passes_with_0_and_says_so_in_JSON() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llamatrio", "fixture", "--child", "fake", "--json"],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    report = json.loads(done.stdout)
    assert (report["verdict"], report["reasons"], report["evidence"]) == ("pass", [], [])
    assert (report["spawns"], report["supervisors"]) == (1, 1)


def test_the_command_fails_with_1_and_names_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    line = r"O x cmd_child_to_router:state:{\"state\":\"ready\"}\n"
    assert main(["--", *fakechild.command("H ok", line, "S ready", "R")]) == 1
    said = capsys.readouterr().out
    assert said.startswith("FAIL: ")
    assert f"- {Rule.LIFECYCLE}: " in said
    assert "stdout, byte 0: x cmd_child_to_router:state:" in said
    assert "spawns: 1, supervisors: 1" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "/no/such/program"], "no such program"),
        (["--child", "fake", "--model", "/no/such/model.gguf"], "/no/such/model.gguf"),
        (["--child", "fake", "--wrapper", "/no/such/wrapper"], "/no/such/wrapper"),
        (["--child", "fake", "--expect-sha256", "12"], "64 hexadecimal digits"),
        (["--child", "stock", "--program", "/no/such/server"], "/no/such/server"),
    ],
)
def test_the_command_that_cannot_run_anything_ends_with_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    streams = capsys.readouterr()
    assert said in streams.err
    assert streams.out == ""


@pytest.mark.parametrize(
    "words",
    [["--child", "none"], ["--"], ["--child", "fake", "--", "x"], ["--program", "x", "--", "y"]],
)
def test_the_command_that_is_not_understood_ends_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as exiting:
        main(words)
    assert exiting.value.code == 2


def test_an_expected_hash_must_be_that_of_the_program_or_of_the_model(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--child", "fake", "--model", str(model)]
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    assert main([*words, "--expect-sha256", digest.upper()]) == 0
    assert main([*words, "--expect-sha256", digest, "--expect-sha256", "0" * 64]) == 1
    assert f"- {Rule.HASH}: " in capsys.readouterr().out


# -- the judge ---------------------------------------------------------------------------------

PREFIX = b"cmd_child_to_router:state:"
READY = PREFIX + b'{"state":"ready"}\n'
SOCKET = Socket(7, "unix", "/d/x.sock", listening=True)
PROCESS = Process(7, 1, 100, "/bin/llama-server", ("llama-server", "--no-ui"), ("PATH",))
HEALTHY = Snapshot(
    (File("program", "/bin/llama-server", 10, "a" * 64), File("model", "/m.gguf", 20, "b" * 64)),
    Tree((PROCESS,), (SOCKET,), "none"),
)
GOOD = Facts(
    stdout=Stream(READY, len(READY)),
    stderr=Stream(FRAGMENT, len(FRAGMENT)),
    records=1,
    told=("ready",),
    address="/d/x.sock",
    before=HEALTHY.files,
    start=HEALTHY,
    end=HEALTHY,
)


def with_process(**changes: object) -> Snapshot:
    process = attrs.evolve(PROCESS, **changes)  # type: ignore[arg-type]
    tree = Tree((process,), (SOCKET,), "none")
    return attrs.evolve(HEALTHY, tree=tree)


def with_sockets(*sockets: Socket) -> Snapshot:
    return attrs.evolve(HEALTHY, tree=Tree((PROCESS,), sockets, "none"))


def with_file(number: int, **changes: object) -> Snapshot:
    files = list(HEALTHY.files)
    files[number] = attrs.evolve(files[number], **changes)  # type: ignore[arg-type]
    return attrs.evolve(HEALTHY, files=tuple(files))


def broken(facts: Facts) -> list[str]:
    return [finding.rule for finding in judge(facts)]


def test_facts_that_break_no_rule_pass() -> None:
    assert judge(GOOD) == ()


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        pytest.param(Rule.RECORDS, {"records": 0}, id="a record was lost"),
        pytest.param(Rule.RECORDS, {"records": 2}, id="a record was made up"),
        pytest.param(Rule.RECORDS, {"only_records": 2}, id="not as many as there are to be"),
        pytest.param(Rule.LIFECYCLE, {"told": ()}, id="told too little"),
        pytest.param(Rule.LIFECYCLE, {"told": ("ready", "sleeping")}, id="told too much"),
        pytest.param(Rule.BUFFER, {"oversize": 1}, id="a line was dropped"),
        pytest.param(Rule.BUFFER, {"largest_held": 2**20 + 1}, id="too much was held"),
        pytest.param(Rule.BUFFER, {"stdout": Stream(READY, 10**9)}, id="more than is kept"),
        pytest.param(
            Rule.PIPE, {"stdout": Stream(READY, len(READY), closed_early=True)}, id="stdout closed"
        ),
        pytest.param(Rule.MERGED, {"merged": ("why",)}, id="merged"),
        pytest.param(Rule.FRAGMENT, {"stderr": Stream(b"I hello\n", 8)}, id="no fragment"),
        pytest.param(Rule.FRAGMENT, {"fragment_logged": False}, id="fragment not logged"),
        pytest.param(Rule.FEATURE, {"features": Features(ui=True)}, id="user interface"),
        pytest.param(Rule.FEATURE, {"features": Features(mcp_proxy=True)}, id="MCP proxy"),
        pytest.param(Rule.FEATURE, {"features": Features(tools=True)}, id="tools"),
        pytest.param(Rule.HASH, {"expected": ("c" * 64,)}, id="another hash"),
        pytest.param(Rule.DIED, {"died": "it died", "end": None}, id="died"),
        pytest.param(Rule.GIVEN_UP, {"given_up": "no record in time", "end": None}, id="given up"),
        pytest.param(Rule.COUNT, {"spawns": 2}, id="two children"),
        pytest.param(Rule.COUNT, {"supervisors": 2}, id="two supervisors"),
        pytest.param(Rule.MANIFEST, {"end": with_file(0, sha256="c" * 64)}, id="binary"),
        pytest.param(Rule.MANIFEST, {"end": with_file(1, size=None, sha256=None)}, id="model gone"),
        pytest.param(Rule.MANIFEST, {"end": with_process(started=101)}, id="another process"),
        pytest.param(Rule.MANIFEST, {"end": with_process(executable="/bin/x")}, id="executable"),
        pytest.param(Rule.MANIFEST, {"end": with_process(command=("x",))}, id="command line"),
        pytest.param(Rule.MANIFEST, {"end": with_process(variables=("X",))}, id="variables"),
        pytest.param(Rule.MANIFEST, {"model_changed": "it changed", "end": None}, id="model"),
        pytest.param(
            Rule.MANIFEST,
            {"start": with_file(1, sha256="c" * 64), "end": with_file(1, sha256="c" * 64)},
            id="model between the spawn and the start",
        ),
    ],
)
def test_one_fact_that_is_wrong_breaks_one_rule(rule: Rule, changes: dict[str, object]) -> None:
    assert broken(attrs.evolve(GOOD, **changes)) == [rule]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"variables": ("PATH", "HF_TOKEN")},
        {"variables": ("hugging_face_hub_token",)},
        {"command": ("llama-server", "--hf-token", "[redacted]")},
        {"command": ("llama-server", "-hft=[redacted]")},
    ],
)
def test_a_token_for_a_hub_is_found_in_the_environment_and_on_the_command_line(
    changes: dict[str, object],
) -> None:
    given = with_process(**changes)
    assert broken(attrs.evolve(GOOD, start=given, end=given)) == [Rule.TOKEN]


@pytest.mark.parametrize(
    "socket",
    [
        Socket(7, "tcp", "127.0.0.1:8080", listening=True),
        Socket(7, "tcp", "0.0.0.0:8080", listening=True),
        Socket(8, "udp", "[::]:53", listening=True),
        Socket(7, "unix", "@abstract", listening=True),
        Socket(7, "unix", "/tmp/other.sock", listening=True),
    ],
)
def test_any_listener_but_the_one_that_was_asked_for_is_public(socket: Socket) -> None:
    seen = with_sockets(SOCKET, socket)
    assert broken(attrs.evolve(GOOD, start=seen)) == [Rule.LISTENER]
    assert broken(attrs.evolve(GOOD, end=seen)) == [Rule.LISTENER]


def test_connections_and_other_sockets_are_no_listeners() -> None:
    quiet = [Socket(7, "unix", "/d/x.sock"), Socket(7, "tcp", "127.0.0.1:5"), Socket(7, "other")]
    assert judge(attrs.evolve(GOOD, end=with_sockets(SOCKET, *quiet))) == ()


def test_what_is_not_known_is_no_failure() -> None:
    unseen = attrs.evolve(HEALTHY, tree=None)
    assert judge(attrs.evolve(GOOD, start=unseen, end=unseen, features=Features())) == ()


def test_a_child_that_was_given_up_need_not_have_been_told_everything() -> None:
    facts = attrs.evolve(GOOD, told=(), given_up="why", start=None, end=None)
    assert broken(facts) == [Rule.GIVEN_UP]


# What may stand on a stream, and what the library may be told of it.
PIECES = st.sampled_from(
    [
        READY,
        PREFIX + b'{"state":"loading","payload":{"value":0.5}}\r\n',
        PREFIX + b'{"state":"sleeping","payload":null}\n',
        PREFIX + b'{"state":"downloading","payload":{}}\n',
        PREFIX + b'{"state":"dancing"}\n',
        PREFIX + b"{\n",
        PREFIX,
        PREFIX[:9],
        b"\n",
        b"\r\n",
        b"noise",
        b"\x1b[0m",
        b"\0\xff",
        b"x" * 90,
    ]
)
WORDS: dict[type, Told] = {
    Loading: "loading",
    Downloading: "loading",
    Ready: "ready",
    Sleeping: "sleeping",
}


def facts_of(data: bytes) -> Facts:
    """What the library itself makes of a stream."""
    lines = LineSplitter(80)
    parsed = [parse(line.data) for line in lines.feed(data) if isinstance(line, Line)]
    records = [one for one in parsed if one is not None and not isinstance(one, Malformed)]
    told = tuple(WORDS[type(record)] for record in records if type(record) in WORDS)
    return attrs.evolve(
        GOOD,
        stdout=Stream(data, len(data)),
        records=len(records),
        told=told,
        bounds=Bounds(state_line=80),
    )


@given(st.lists(PIECES).map(b"".join))
def test_the_librarys_reader_agrees_with_the_independent_splitter(data: bytes) -> None:
    whole = data.split(b"\n")[:-1]
    expected = set()
    if any(len(line) > 80 for line in data.split(b"\n")):
        expected.add(Rule.BUFFER)
    if any(PREFIX in line and not line.startswith(PREFIX) for line in whole):
        expected.add(Rule.LIFECYCLE)
    found = set(broken(facts_of(data)))
    assert found - {Rule.RECORDS} == expected
    # A line that has the prefix but makes no sense is the only thing on which they may differ.
    sensible = [line for line in whole if line.startswith(PREFIX) and len(line) <= 80]
    nonsense = any(isinstance(parse(line.removesuffix(b"\r")), Malformed) for line in sensible)
    assert (Rule.RECORDS in found) == nonsense


@given(st.lists(PIECES).map(b"".join), st.integers(0, 3))
def test_a_reader_that_loses_or_makes_up_a_record_is_caught(data: bytes, change: int) -> None:
    facts = facts_of(data)
    if Rule.RECORDS not in broken(facts):
        wrong = attrs.evolve(facts, records=facts.records + (change or -1))
        assert Rule.RECORDS in broken(wrong)


@given(st.lists(PIECES).map(b"".join))
def test_a_record_on_stderr_is_found_wherever_a_line_begins_and_right_behind_the_fragment(
    data: bytes,
) -> None:
    both = FRAGMENT + data
    stray = any(line.startswith(PREFIX) for line in data.split(b"\n"))
    facts = attrs.evolve(GOOD, stderr=Stream(both, len(both)))
    [*found] = judge(facts)
    assert [finding.rule for finding in found] == [Rule.STDERR_RECORD] * stray
    for finding in found:
        for exhibit in finding.exhibits:
            assert both[exhibit.offset :].startswith(exhibit.data)
            assert exhibit.data.startswith(PREFIX)


# -- the tables of the kernel ------------------------------------------------------------------


def test_the_tables_are_read_as_linux_writes_them() -> None:
    head = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  ...\n"
    )
    rest = "00000000:00000000 00:00000000 00000000     0        0 4711 1 0000000000000000"
    tcp = head + f"   0: 0100007F:1F90 00000000:0000 0A {rest}\n   1: nonsense\n"
    [entry] = parse_table("tcp", tcp)
    assert (entry.inode, entry.address, entry.listening) == (4711, "127.0.0.1:8080", True)
    tcp6 = head + f"   0: {'0' * 32}:0050 {'0' * 32}:0000 01 {rest}\n"
    [entry] = parse_table("tcp6", tcp6)
    assert (entry.address, entry.listening) == ("[::]:80", False)
    udp = head + f"  52: 00000000:0035 00000000:0000 07 {rest} 2 0000000000000000 0\n"
    [entry] = parse_table("udp", udp)
    assert (entry.family, entry.address, entry.listening) == ("udp", "0.0.0.0:53", True)
    unix = (
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "0000000000000000: 00000002 00000000 00010000 0001 01 12 /a dir/x.sock\n"
        "0000000000000000: 00000003 00000000 00000000 0001 03 13\n"
        "0000000000000000: 00000002 00000000 00010000 0001 01 14 @name\n"
    )
    entries = parse_table("unix", unix)
    assert [(one.inode, one.address, one.listening) for one in entries] == [
        (12, "/a dir/x.sock", True),
        (13, "", False),
        (14, "@name", True),
    ]


@given(st.sampled_from(["tcp", "tcp6", "udp", "unix"]), st.text(max_size=200))
def test_no_text_breaks_the_reader_of_the_tables(name: str, text: str) -> None:
    parse_table(name, f"head\n{text}")
