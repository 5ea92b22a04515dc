"""What a child is kept from, and that it works all the same."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from programs.answers import QUESTION, look
from users import NOBODY, PYTHON, need, public

from llamatrio import (
    Hosted,
    ModelConfig,
    Own,
    SpawnError,
    SpecificationError,
    Stock,
    open_provider,
)
from llamatrio.child.isolation import Isolation, Launcher, Tools, launchers, read_head
from llamatrio.child.launch import Kind
from llamatrio.child.launcher import needs_network, runs_natively
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot

if sys.platform != "linux":
    pytest.skip("run on Linux alone", allow_module_level=True)

PROGRAMS = Path(__file__).parent / "programs"
__all__ = ["public"]  # a fixture
FAKE = Own(fakechild.command("S loading", "H ok", "S ready", "R"))


# -- what may be tried, pure -------------------------------------------------------------------

EVERYTHING = Tools("/bin/setpriv", "/bin/unshare", "/bin/sh", "/bin/python", "/x/shim.py")
NOTHING = Tools(None, None, None, "/bin/python", "/x/shim.py")
BY_SHIM = ("/bin/python", "-I", "-S", "/x/shim.py", "7")
ARMED = (
    "/bin/setpriv", "--pdeathsig", "KILL", "--",
    "/bin/sh", "-c", '[ "$PPID" = 7 ] && exec "$@"', "sh",
)  # fmt: skip
AS_ROOT = ("/bin/unshare", "--net", "--")
AS_USER = ("/bin/unshare", "--user", "--map-current-user", "--net", "--")
CAN = {"network": True, "armed": True}


def tried(
    tools: Tools = EVERYTHING,
    *,
    cut: bool = True,
    root: bool = True,
    hosted: bool = False,
    names: tuple[str, ...] = ("PATH",),
) -> list[Launcher]:
    return list(launchers(tools, parent=7, cut=cut, root=root, hosted=hosted, names=names))


def test_the_network_is_taken_away_before_the_child_is_told_to_die_with_its_parent() -> None:
    first, *_ = tried()
    assert first == Launcher((*AS_ROOT, *ARMED), network=True, armed=True)
    first, *_ = tried(root=False)
    assert first == Launcher((*AS_USER, *ARMED), network=True, armed=True)


def test_the_shim_stands_in_for_whatever_is_missing() -> None:
    assert tried(NOTHING) == [
        Launcher((*BY_SHIM, "net"), network=True, armed=True),
        Launcher((*BY_SHIM, "keep"), armed=True),
        Launcher(),
    ]
    assert tried(NOTHING, cut=False, root=False)[0] == Launcher((*BY_SHIM, "keep"), armed=True)
    first, *_ = tried(NOTHING, root=False, hosted=True)
    assert first == Launcher((*BY_SHIM, "user"), network=True, armed=True)


def test_a_hosted_child_arranges_for_its_death_itself() -> None:
    assert tried(hosted=True, cut=False)[0].wrapper == ()
    assert tried(hosted=True)[0].wrapper == AS_ROOT


def test_no_shell_is_asked_to_pass_on_a_variable_that_it_might_drop() -> None:
    assert tried(names=("PATH", "A.B"))[0].wrapper == (*BY_SHIM, "net")


def test_what_takes_the_network_away_is_tried_before_what_does_not() -> None:
    assert [launcher.network for launcher in tried()] == [True, True, False, False]
    assert [launcher.network for launcher in tried(cut=False)] == [False, False]


def test_a_child_that_has_a_use_for_the_network_keeps_it() -> None:
    local = ModelConfig("/x.gguf")
    assert needs_network(Stock(), local) is None
    assert needs_network(Hosted(), local) is None
    assert "fetches" in str(needs_network(Stock(), ModelConfig(None, args=["-hf", "a/b"])))
    assert "program of yours" in str(needs_network(FAKE, local))
    for args in (["--rpc", "host:1"], ["--rpc=host:1"]):
        assert "--rpc" in str(needs_network(Stock(), ModelConfig("/x.gguf", args=args)))


# -- programs that may be run through others ---------------------------------------------------


def test_our_own_interpreter_and_scripts_for_it_run_natively(tmp_path: Path) -> None:
    assert runs_natively(sys.executable)
    script = tmp_path / "script"
    script.write_text(f"#!{os.path.realpath(sys.executable)} -I\n")
    assert runs_natively(str(script))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no program",
        b"#!",
        b"#!/nonexistent/interpreter\n",
        b"\x7fELF",
        Path(sys.executable).read_bytes()[:18] + b"\xff\xff" + bytes(5000),
    ],
)
async def test_what_the_kernel_refuses_fails_the_start_with_its_word(
    content: bytes, kind: Kind, tmp_path: Path, parrot: Parrot
) -> None:
    # The programs in between would take it for a shell script.
    program = tmp_path / "program"
    program.write_bytes(content)
    program.chmod(0o755)
    assert not runs_natively(str(program))
    broken: Kind = Stock(str(program)) if isinstance(kind, Stock) else Hosted(str(program))
    with trio.fail_after(30):
        async with open_provider(ModelConfig(parrot.path), backend=broken) as provider:
            with pytest.raises(SpawnError, match=r"Exec format|No such file|denied") as caught:
                await provider.start()
    assert isinstance(caught.value.__cause__, OSError)


def test_a_program_whose_loader_is_missing_does_not_run_natively(tmp_path: Path) -> None:
    content = Path(sys.executable).read_bytes()
    head = read_head(content[:4096])
    assert head is not None
    if head.interpreter is None:
        pytest.skip("this interpreter is linked statically")
    loader = os.fsencode(head.interpreter)
    program = tmp_path / "program"
    program.write_bytes(content[:4096].replace(loader, loader[:-1] + b"?"))
    assert not runs_natively(str(program))


# -- real children -----------------------------------------------------------------------------


async def ask(
    network: str,
    kind: Kind,
    model: Path,
    runtime_dir: Path,
    *,
    before: tuple[str, ...] = (),
    environ: Mapping[str, str] | None = None,
) -> Any:  # noqa: ANN401 - what JSON gives
    """Let an application of its own ask its model; return what it tells."""
    words = ["hosted"]
    if isinstance(kind, Stock):
        words = ["stock", str(kind.program)]
    elif isinstance(kind, Own):
        words = list(kind.command)
    command = [*before, sys.executable, str(PROGRAMS / "answers.py")]
    command += [network, json.dumps(words), str(model), str(runtime_dir)]
    with trio.fail_after(60):
        done = await trio.run_process(
            command,
            capture_stdout=True,
            env={**(environ or os.environ), "PYTHONPATH": str(PROGRAMS.parent)},
        )
    told = json.loads(done.stdout)
    assert told.pop("left") == []
    return told


ALONE = {
    "interfaces": ["lo"],
    "listening": 0,
    "shared": False,
    "core": True,
    "isolation": {"network": "none", "reason": None, "parent_death": "signal"},
}


async def test_a_child_is_alone_with_its_socket_and_answers(kind: Kind, parrot: Parrot) -> None:
    with trio.fail_after(30):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            await provider.start()
            now = provider.diagnostics()
            assert now.pid is not None
            assert now.isolation == Isolation("none", None, "signal")
            assert {**look(now.pid), "isolation": ALONE["isolation"]} == ALONE
            assert (await provider.submit(QUESTION).result()).text


@pytest.mark.slow
async def test_a_child_is_so_where_there_is_nothing_of_util_linux(
    kind: Kind, parrot: Parrot, own_temporary_directory: Path, tmp_path: Path
) -> None:
    environ = {**os.environ, "PATH": str(tmp_path)}
    run = own_temporary_directory / "run"
    run.mkdir(exist_ok=True)
    told = await ask("none", kind, parrot.path, run, environ=environ)
    assert told.pop("text")
    assert told == ALONE


async def test_the_network_can_be_left_to_a_child_and_be_taken_from_a_program_of_yours(
    kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(30):
        async with open_provider(
            ModelConfig(parrot.path), backend=kind, network="host"
        ) as provider:
            await provider.start()
            now = provider.diagnostics()
            assert now.isolation == Isolation("host", "it was asked for", "signal")
            assert shares_network(now.pid)
        async with open_provider(
            ModelConfig(parrot.path), backend=FAKE, network="none"
        ) as provider:
            assert provider.diagnostics().isolation is None
            await provider.start()
            now = provider.diagnostics()
            assert now.isolation == Isolation("none", None, "signal")
            assert not shares_network(now.pid)


def shares_network(pid: int | None) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")


async def test_a_network_that_there_is_not_is_refused(parrot: Parrot) -> None:
    for network in ("off", None):
        with pytest.raises(SpecificationError, match="network is one of"):
            async with open_provider(
                ModelConfig(parrot.path),
                network=network,  # type: ignore[arg-type]
            ):
                raise AssertionError


# -- other users, other kernels ----------------------------------------------------------------

# A new user name space, in which no name space for networks may be made.
FORBIDDEN = (
    "unshare", "--user", "--map-root-user", "--", "sh", "-c",
    'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"', "sh",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tools", ["programs", "shim"])
async def test_a_user_who_is_not_root_can_have_it_too(
    tools: str, kind: Kind, public: Path, tmp_path: Path
) -> None:
    need(*NOBODY, *PYTHON)
    if isinstance(kind, Hosted) or tools == "shim":
        # What it was started with may be more than what it can start itself.
        need(*NOBODY, sys.executable, "-c", "import sys; open(sys.executable, 'rb')")
    if tools == "programs":
        need(*NOBODY, "unshare", "--user", "--map-current-user", "--net", "true")
    user = NOBODY if tools == "programs" else (str(shutil.which("setpriv")), *NOBODY[1:])
    environ = None if tools == "programs" else {**os.environ, "PATH": str(tmp_path)}
    told = await ask(
        "none", kind, public / "parrot.gguf", public / "run", before=user, environ=environ
    )
    assert told.pop("text")
    assert told == ALONE


@pytest.mark.slow
async def test_a_kernel_that_does_not_allow_it_is_reported_with_the_reason(
    kind: Kind, public: Path
) -> None:
    need(*FORBIDDEN, sys.executable, "-c", "")
    told = await ask("auto", kind, public / "parrot.gguf", public / "run", before=FORBIDDEN)
    assert told["text"]
    assert told["shared"]
    assert told["isolation"]["network"] == "host"
    assert "unshare failed: No space left on device" in told["isolation"]["reason"]
    assert told["isolation"]["parent_death"] == "signal"


@pytest.mark.slow
async def test_a_kernel_that_does_not_allow_it_refuses_who_insists_on_it(
    kind: Kind, public: Path
) -> None:
    need(*FORBIDDEN, sys.executable, "-c", "")
    told = await ask("none", kind, public / "parrot.gguf", public / "run", before=FORBIDDEN)
    assert told["error"].startswith("SpecificationError: the child cannot be without a network")
    assert "No space left on device" in told["error"]


async def test_the_shim_says_what_it_cannot_do() -> None:
    shim = [sys.executable, "-I", "-S", str(PROGRAMS.parents[1] / "llamatrio/child/shim.py")]
    command = [*shim, str(os.getpid()), "keep", "/nonexistent/program"]
    done = await trio.run_process(command, capture_stderr=True, check=False)
    assert done.returncode == 126
    assert done.stderr == b"error: No such file or directory: /nonexistent/program\n"


async def test_the_shim_passes_on_its_environment_to_the_byte() -> None:
    shim = [sys.executable, "-I", "-S", str(PROGRAMS.parents[1] / "llamatrio/child/shim.py")]
    env = shutil.which("env")
    assert env is not None
    given = {"LC_CTYPE": "C", "A.B": "c=d", "X": os.fsdecode(b"\xff")}
    done = await trio.run_process(
        [*shim, str(os.getpid()), "keep", env], capture_stdout=True, env=given
    )
    assert done.stdout == b"LC_CTYPE=C\nA.B=c=d\nX=\xff\n"


# -- limits ------------------------------------------------------------------------------------


async def test_a_start_with_few_descriptors_left_is_refused_and_says_what_to_do(
    parrot: Parrot,
) -> None:
    with trio.fail_after(30):
        async with open_provider(ModelConfig(parrot.path), backend=FAKE) as provider:
            with descriptors_left(50):
                with pytest.raises(SpawnError, match=r"Too many open .* raise the limit") as caught:
                    await provider.start()
            assert isinstance(caught.value.__cause__, OSError)
            with descriptors_left(100):
                await provider.start()


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowered = len(os.listdir("/dev/fd")) + number
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowered, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
