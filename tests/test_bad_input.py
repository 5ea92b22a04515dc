"""What cannot work: one typed error that names the cause, everybody answered, nothing left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import trio

from llamatrio import (
    AnswerTooLarge,
    BadAnswer,
    Bounds,
    ChildDied,
    ChildError,
    ContextExceeded,
    Hosted,
    LlamatrioError,
    LoadFailed,
    LocalProvider,
    Lora,
    ModelConfig,
    ModelFileError,
    NoHandshake,
    Own,
    Phase,
    Reply,
    RequestFailed,
    RequestRefused,
    ServerBackend,
    SocketPathTooLong,
    SpawnError,
    SpecificationError,
    Stock,
    StreamBroken,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.outcomes import Cancelled, Failed, Finished
from llamatrio.session.base import Backend
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot

if sys.platform != "linux":
    pytest.skip("looks at /proc", allow_module_level=True)


class Submitter:
    """Submits a request in the very moment in which a start takes effect."""

    def __init__(self, provider: LocalProvider) -> None:
        self._provider = provider
        self.replies: list[Reply] = []

    def started(self, value: None = None) -> None:
        self.replies.append(self._provider.submit(completion_request("Hello", temperature=0)))


async def start_in_vain(provider: LocalProvider) -> LlamatrioError:
    """Start three times at once, with three requests; return the error that each of them got."""
    submitter = Submitter(provider)
    errors: list[LlamatrioError] = []

    async def start() -> None:
        with pytest.raises(LlamatrioError) as caught:
            await provider.start(task_status=submitter)
        errors.append(caught.value)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(start)
    outcomes = [await reply.wait() for reply in submitter.replies]
    assert len(errors) == len(outcomes) == 3
    assert len({id(error) for error in errors}) == 3
    for outcome in outcomes:
        assert isinstance(outcome, Failed)
        assert outcome.phase == "loading"
        assert isinstance(outcome.error, LlamatrioError)
        errors.append(outcome.error)
    assert len({(type(error), str(error)) for error in errors}) == 1
    assert provider.phase is Phase.UNLOADED
    assert not provider.started
    assert provider.diagnostics().pid is None
    if isinstance(errors[0], ChildError):
        end = provider.diagnostics().last_exit
        assert end is not None
        assert not psutil.pid_exists(end.pid)
        assert errors[0].stderr_tail == end.tail
    return errors[0]


async def fail_to_start(config: ModelConfig, backend: Backend | Kind) -> LlamatrioError:
    with trio.fail_after(60):
        async with open_provider(config, backend=backend) as provider:
            return await start_in_vain(provider)


async def answer(provider: LocalProvider, text: str) -> None:
    await provider.start()
    result = await provider.submit(completion_request("Hello", temperature=0)).result()
    assert result.text == text


# -- the files ---------------------------------------------------------------------------------


def damage_missing(path: Path) -> None:
    """Leave the file out."""


def damage_empty(path: Path) -> None:
    path.touch()


def damage_other(path: Path) -> None:
    path.write_bytes(b"PK\3\4 a zip file, say")


def damage_directory(path: Path) -> None:
    path.mkdir()


FILES = pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(damage_missing, "No such file", id="missing"),
        pytest.param(damage_empty, "empty", id="empty"),
        pytest.param(damage_other, "not a GGUF file", id="not a GGUF file"),
        pytest.param(damage_directory, "Is a directory", id="directory"),
    ],
)


@FILES
async def test_a_bad_model_file_fails_the_start_until_it_is_mended(
    kind: Kind, damage: Callable[[Path], None], reason: str, tmp_path: Path, parrot: Parrot
) -> None:
    path = tmp_path / "model.gguf"
    damage(path)
    with trio.fail_after(60):
        async with open_provider(ModelConfig(path), backend=kind) as provider:
            error = await start_in_vain(provider)
            assert isinstance(error, ModelFileError)
            assert error.path == str(path)
            assert str(path) in str(error)
            assert reason in str(error)
            if path.is_dir():
                path.rmdir()
            shutil.copyfile(parrot.path, path)
            await answer(provider, parrot.text)
            assert provider.failure is None


BESIDE: dict[str, Callable[[Path, Path], ModelConfig]] = {
    "mmproj": lambda model, path: ModelConfig(model, mmproj=path),
    "lora": lambda model, path: ModelConfig(model, lora=[Lora(str(path), 0.5)]),
    "draft_model": lambda model, path: ModelConfig(model, draft_model=path),
}


@FILES
@pytest.mark.parametrize("field", BESIDE)
async def test_a_bad_file_beside_the_model_is_named(
    field: str, damage: Callable[[Path], None], reason: str, tmp_path: Path, parrot: Parrot
) -> None:
    path = tmp_path / f"{field}.gguf"
    damage(path)
    error = await fail_to_start(BESIDE[field](parrot.path, path), Hosted())
    assert isinstance(error, ModelFileError)
    assert error.path == str(path)
    assert reason in error.reason


async def test_a_truncated_model_fails_the_start_until_it_is_mended(
    kind: Kind, tmp_path: Path, parrot: Parrot
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(parrot.path.read_bytes()[:20_000])
    with trio.fail_after(60):
        async with open_provider(ModelConfig(path), backend=kind) as provider:
            error = await start_in_vain(provider)
            assert isinstance(error, LoadFailed)
            assert str(path) in str(error)
            assert error.returncode == 1
            assert "gguf" in error.stderr_tail
            assert error.exit is not None
            assert error.exit.headline
            assert error.exit.headline in str(error)
            shutil.copyfile(parrot.path, path)
            await answer(provider, parrot.text)
            assert provider.failure is None


@pytest.mark.parametrize("field", ["mmproj", "lora"])
async def test_a_file_of_another_kind_beside_the_model_fails_the_load(
    kind: Kind, field: str, parrot: Parrot
) -> None:
    error = await fail_to_start(BESIDE[field](parrot.path, parrot.path), kind)
    assert isinstance(error, LoadFailed)
    assert error.stderr_tail


async def test_a_path_that_no_file_can_have_is_a_bad_model_file() -> None:
    error = await fail_to_start(ModelConfig("a\0b"), Hosted())
    assert isinstance(error, ModelFileError)
    assert "null" in str(error)


# -- the configuration -------------------------------------------------------------------------


async def refuse(config: ModelConfig, kind: Kind, *parts: str) -> None:
    """See a configuration refused when a provider is opened, and when it is reconfigured."""
    with pytest.raises(SpecificationError) as caught:
        async with open_provider(config, backend=kind):
            pytest.fail("it was opened")
    for part in parts:
        assert part in str(caught.value)


async def test_no_model_is_refused() -> None:
    # https://github.com/ggml-org/llama.cpp/issues/27351
    for kind in (Hosted(), Stock()):
        await refuse(ModelConfig(None), kind, "no model")


@pytest.mark.parametrize("option", ["-hf", "-hfr", "--hf-repo", "--hf_repo", "-mu", "--model-url"])
async def test_two_models_are_refused(option: str, parrot: Parrot) -> None:
    config = ModelConfig(parrot.path, args=[option, "somewhere"])
    await refuse(config, Stock(), "two models", option, str(parrot.path))


@pytest.mark.parametrize(
    "args",
    # https://github.com/luongnv89/ccl/issues/204 and llama.cpp/issues/28820
    [
        ["--host", "0.0.0.0"],
        ["--host=0.0.0.0"],
        ["--HOST", "0.0.0.0"],
        ["--port", "80"],
        ["--port=80"],
        ["--api-key", "x"],
        ["--api_key", "x"],
        ["--api-key=x"],
        ["--api-key-file", "x"],
        ["--api_key_file=x"],
        ["--api-prefix", "/x"],
        ["--ssl-key-file", "x"],
        ["--ssl_cert_file=x"],
        ["--path", "/"],
        ["--ui"],
        ["--no-ui"],
        ["--webui"],
        ["--no_webui"],
        ["--tools", "all"],
        ["--models-dir", "x"],
        ["--cors-origins", "*"],
        ["--temp", "0", "--log-disable"],
    ],
    ids=" ".join,
)
async def test_an_option_that_is_ours_is_refused_in_any_spelling(
    args: list[str], parrot: Parrot
) -> None:
    await refuse(
        ModelConfig(parrot.path, args=args), Stock(), args[-1] if len(args) > 2 else args[0]
    )


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["-m", "x"], "model"),
        (["--model=x"], "model"),
        (["-c", "1"], "context"),
        (["--ctx_size", "1"], "context"),
        (["-np", "9"], "slots"),
        (["-no-kvu"], "context"),
        (["--mmproj", "x"], "mmproj"),
        (["-md", "x"], "draft_model"),
        (["--sleep-idle-seconds=1"], "sleep_after"),
    ],
)
async def test_an_option_that_has_a_field_is_refused_by_naming_it(
    args: list[str], field: str, parrot: Parrot
) -> None:
    await refuse(ModelConfig(parrot.path, args=args), Stock(), args[0], field)


# -- the program -------------------------------------------------------------------------------


async def test_a_missing_program_fails_the_start(tmp_path: Path, parrot: Parrot) -> None:
    missing = str(tmp_path / "llama-server")
    for kind in (Stock(missing), Own((missing,)), Hosted(python=missing)):
        error = await fail_to_start(ModelConfig(parrot.path), kind)
        assert isinstance(error, SpawnError)
        assert error.program == missing
        assert "no such" in str(error).lower()


async def test_a_program_that_is_not_executable_fails_the_start(
    tmp_path: Path, parrot: Parrot
) -> None:
    text = tmp_path / "llama-server"
    text.write_text("#!/bin/sh\n")
    for program in (text, tmp_path):
        error = await fail_to_start(ModelConfig(parrot.path), Stock(str(program)))
        assert isinstance(error, SpawnError)
        assert str(program) in str(error)
        assert "not executable" in str(error)


async def test_an_executable_that_is_no_program_fails_the_start(
    tmp_path: Path, parrot: Parrot
) -> None:
    text = tmp_path / "llama-server"
    text.write_text("no program")
    text.chmod(0o755)
    error = await fail_to_start(ModelConfig(parrot.path), Stock(str(text)))
    assert isinstance(error, SpawnError)
    assert str(text) in str(error)
    assert isinstance(error.__cause__, OSError)


@pytest.mark.parametrize(
    ("program", "reason"),
    [("/bin/true", "exited with code 0"), ("/bin/cat", "exited with code 1")],
)
async def test_a_program_that_is_no_llama_server_fails_the_start(
    program: str, reason: str, parrot: Parrot
) -> None:
    error = await fail_to_start(ModelConfig(parrot.path), Stock(program))
    assert isinstance(error, LoadFailed)
    assert reason in str(error)
    assert str(parrot.path) in str(error)
    assert ("unrecognized option" in error.stderr_tail) == (program == "/bin/cat")


async def test_a_hosted_child_without_its_wheel_fails_the_start(
    tmp_path: Path, parrot: Parrot
) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    error = await fail_to_start(ModelConfig(parrot.path), Hosted(python=python))
    assert isinstance(error, LoadFailed)
    assert "No module named 'xllamacpp'" in str(error)
    assert "llamatrio[llama]" in str(error)
    assert "xllamacpp" in error.stderr_tail
    assert error.returncode == 1


@pytest.mark.parametrize(
    "steps", [["E warming up\\n", "W 999"], ["E warming up\\n", "H ok", "W 999"]]
)
@pytest.mark.slow
async def test_a_child_that_never_says_a_word_fails_the_start(
    steps: list[str], parrot: Parrot
) -> None:
    # https://github.com/ggml-org/llama.cpp/issues/27351
    backend = ServerBackend(Own(fakechild.command(*steps)), bounds=Bounds(handshake=1.0))
    error = await fail_to_start(ModelConfig(parrot.path), backend)
    assert isinstance(error, NoHandshake)
    assert "1 s" in str(error)
    assert error.stderr_tail == "warming up"


async def test_a_child_that_dies_of_a_signal_while_loading_fails_the_start(parrot: Parrot) -> None:
    # https://github.com/ggml-org/llama.cpp/pull/24038
    child = Own(fakechild.command("S loading", "E 0.00.1 E out of memory\\n", "K ABRT"))
    error = await fail_to_start(ModelConfig(parrot.path), child)
    assert isinstance(error, LoadFailed)
    assert "SIGABRT" in str(error)
    assert "out of memory" in str(error)


# -- the place for the socket ------------------------------------------------------------------


async def test_a_directory_whose_path_is_too_long_for_a_socket_fails_the_start(
    tmp_path: Path, parrot: Parrot
) -> None:
    deep = tmp_path / ("d" * 50) / ("e" * 50)
    deep.mkdir(parents=True)
    backend = ServerBackend(Own(fakechild.command("S ready", "R")), runtime_dir=deep)
    error = await fail_to_start(ModelConfig(parrot.path), backend)
    assert isinstance(error, SocketPathTooLong)
    assert str(deep) in str(error)
    assert "runtime_dir" in str(error)
    assert list(deep.iterdir()) == []


@pytest.mark.parametrize("place", ["missing", "file", "/proc"])
async def test_a_place_where_no_directory_can_be_made_fails_the_start(
    place: str, tmp_path: Path, parrot: Parrot
) -> None:
    (tmp_path / "file").touch()
    runtime_dir = tmp_path / place
    backend = ServerBackend(Own(fakechild.command("S ready", "R")), runtime_dir=runtime_dir)
    error = await fail_to_start(ModelConfig(parrot.path), backend)
    assert isinstance(error, SpecificationError)
    assert str(runtime_dir) in str(error)


# -- the answers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "kind", "reason"),
    [
        ("garbage", BadAnswer, "not JSON"),
        ("drop", StreamBroken, "connection"),
        ("big", AnswerTooLarge, "bytes"),
        ("500", RequestRefused, "Compute error"),
        ("401", RequestRefused, "Invalid API Key"),
    ],
)
async def test_a_bad_answer_fails_its_request_alone(
    mode: str, kind: type[Exception], reason: str, parrot: Parrot
) -> None:
    # https://github.com/ggml-org/llama.cpp/issues/27309, for one: no probe, no guess at what an
    # error means; the caller is told, and an unload and a start give him another model.
    child = Own(fakechild.command(f"H {mode}", "E the backend is upset\\n", "S ready", "R"))
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path, slots=2), backend=child) as provider:
            await provider.start()
            pid = provider.diagnostics().pid
            replies = [provider.submit(completion_request("x")) for _ in range(3)]
            for reply in replies:
                with pytest.raises(RequestFailed) as caught:
                    await reply.result()
                assert type(caught.value.__cause__) is kind
                assert reason in str(caught.value)
                assert not isinstance(reply.outcome, Finished)
                if isinstance(caught.value.__cause__, RequestRefused):
                    assert caught.value.__cause__.status == int(mode)
                else:
                    assert caught.value.text.startswith("Every")
                    assert isinstance(caught.value.__cause__, ChildError)
                    assert caught.value.__cause__.stderr_tail == "the backend is upset"
            assert provider.phase is Phase.STARTED
            assert provider.diagnostics().pid == pid
            assert provider.diagnostics().counters.failed == 3


ENDS_WITHOUT_MARK = """
import socket, sys

listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[sys.argv.index("--host") + 1])
listener.listen()
print('cmd_child_to_router:state:{"state":"ready"}', flush=True)
with listener.accept()[0] as connection:
    connection.recv(65536)
    body = b'data: {"content":"half","stop":false}\\n\\n'
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\n")
    connection.sendall(b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
sys.stdin.read()
"""


async def test_an_answer_that_ends_in_order_but_without_its_mark_is_not_finished(
    parrot: Parrot,
) -> None:
    child = Own((sys.executable, "-c", ENDS_WITHOUT_MARK))
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            await provider.start()
            with pytest.raises(RequestFailed, match="terminal mark") as caught:
                await provider.submit(completion_request("x")).result()
            assert isinstance(caught.value.__cause__, StreamBroken)
            assert caught.value.text == "half"


@pytest.mark.slow
async def test_a_child_that_never_listens_fails_its_requests(parrot: Parrot) -> None:
    child = Own(fakechild.command("S ready", "R"))
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path, slots=3), backend=child) as provider:
            await provider.start()
            replies = [provider.submit(completion_request("x")) for _ in range(3)]
            for reply in replies:
                with pytest.raises(RequestFailed, match="connection") as caught:
                    await reply.result()
                assert isinstance(caught.value.__cause__, StreamBroken)
            assert provider.phase is Phase.STARTED


async def test_a_request_that_is_never_answered_can_be_cancelled_and_its_connection_is_closed(
    tmp_path: Path, parrot: Parrot
) -> None:
    log = tmp_path / "log"
    os.mkfifo(log)
    child = Own(fakechild.command("H hang", "S ready", "R"))
    config = ModelConfig(parrot.path, env={"FAKECHILD_LOG": str(log)})
    with trio.fail_after(60):
        async with (
            trio.lowlevel.FdStream(os.open(log, os.O_RDWR)) as requests,
            open_provider(config, backend=child) as provider,
        ):
            await provider.start()
            reply = provider.submit(completion_request("x"))
            assert json.loads(await requests.receive_some())["path"] == "/completion"
            assert await provider.cancel(reply.id) == Cancelled("caller", "prompt", 0)
            assert json.loads(await requests.receive_some()) == {
                "closed": True,
                "method": "POST",
                "path": "/completion",
                "events": 0,
            }
            assert provider.phase is Phase.STARTED


async def test_a_malformed_record_changes_nothing(parrot: Parrot) -> None:
    bad = "O cmd_child_to_router:state:{bad\\n"
    child = Own(fakechild.command(bad, "S loading", bad, "H ok", "S ready", bad, "R"))
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            await answer(provider, "Every answer here is a fake.")
            assert provider.diagnostics().pipes.malformed == 3


async def test_a_child_that_dies_within_an_answer_fails_the_request_with_its_exit(
    parrot: Parrot,
) -> None:
    child = Own(fakechild.command("H stream 1000 0.05", "S ready", "W 0.5", "E oh no\\n", "X 4"))
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            await provider.start()
            with pytest.raises(RequestFailed, match="exited with code 4") as caught:
                await provider.submit(completion_request("x")).result()
            assert isinstance(caught.value.__cause__, ChildDied)
            assert caught.value.__cause__.stderr_tail == "oh no"


async def test_a_prompt_over_the_context_is_refused_with_its_numbers(
    kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path, context=256), backend=kind) as provider:
            await provider.start()
            with pytest.raises(RequestFailed) as caught:
                await provider.submit(completion_request("x" * 299)).result()
            error = caught.value.__cause__
            assert isinstance(error, ContextExceeded)
            assert error.prompt_tokens == 300
            assert error.context == 256
            assert "300" in str(error)
            await answer(provider, parrot.text)


# -- no descriptors ----------------------------------------------------------------------------

STARTS_WITHOUT_DESCRIPTORS = """
import itertools, os, resource, sys, tempfile
import trio
from llamatrio import LlamatrioError, ModelConfig, Own, open_provider
from llamatrio.testing import fakechild

CHILD = Own(fakechild.command("S ready", "R"))

def exhaust(held):
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return

async def main(model, runtime_dir):
    config = ModelConfig(model)
    async with open_provider(config, backend=CHILD, runtime_dir=runtime_dir) as provider:
        await trio.to_thread.run_sync(int)
        before = set(os.listdir("/proc/self/fd"))
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        for free in itertools.count():
            resource.setrlimit(resource.RLIMIT_NOFILE, (192, most[1]))
            held = []
            exhaust(held)
            for _ in range(free):
                os.close(held.pop())
            try:
                await provider.start()
            except LlamatrioError as error:
                print(free, type(error).__name__, error, flush=True)
                started = False
            else:
                started = True
                exhaust(held)
                await provider.stop()
                await provider.unload_model()
                print(free, "started", provider.diagnostics().last_exit, flush=True)
            for fd in held:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
            if started:
                break
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pass
            else:
                sys.exit("a child is left")
            left = set(os.listdir("/proc/self/fd")) - before
            if left:
                sys.exit(f"descriptors are left: {left}")
            if os.listdir(runtime_dir):
                sys.exit("a directory is left")

trio.run(main, *sys.argv[1:])
"""


async def test_a_program_without_descriptors_is_told_so_and_leaks_nothing(
    own_temporary_directory: Path, parrot: Parrot
) -> None:
    # https://github.com/lemonade-sdk/lemonade/issues/1711
    directory = own_temporary_directory / "scarce"
    directory.mkdir()
    command = [sys.executable, "-c", STARTS_WITHOUT_DESCRIPTORS, str(parrot.path), str(directory)]
    with trio.fail_after(60):
        done = await trio.run_process(
            command, capture_stdout=True, stderr=subprocess.STDOUT, check=False
        )
    assert done.returncode == 0, done.stdout.decode()
    *failed, last = done.stdout.decode().splitlines()
    assert len(failed) >= 5
    for line in failed:
        assert line.split()[1] in ("SpawnError", "ModelFileError", "SpecificationError"), line
        assert "Too many open files" in line
    assert last.endswith("started exited with code 0")
    assert list(directory.iterdir()) == []


ENDS_WITHOUT_DESCRIPTORS = """
import os, resource, sys, threading
import trio
from llamatrio import Ladder, ModelConfig, Own, ServerBackend, open_provider
from llamatrio.testing import fakechild

over = threading.Event()

def take_every_descriptor():
    while not over.is_set():
        try:
            os.open("/dev/null", os.O_RDONLY)
        except OSError:
            continue

async def main(model):
    child = Own(fakechild.command("S ready", "R!", "I TERM", "W 999"))
    backend = ServerBackend(child, ladder=Ladder(exit=0.1, terminate=0.1))
    async with open_provider(ModelConfig(model), backend=backend) as provider:
        await provider.start()
        pid = provider.diagnostics().pid
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
        sys.setswitchinterval(1e-5)
        threading.Thread(target=take_every_descriptor).start()
        try:
            await provider.stop()
            await provider.unload_model()
        finally:
            over.set()
        print(provider.diagnostics().last_exit, os.path.exists(f"/proc/{pid}"))

trio.run(main, *sys.argv[1:])
"""


@pytest.mark.slow
async def test_a_program_that_has_run_out_of_descriptors_still_ends_its_child(
    parrot: Parrot,
) -> None:
    command = [sys.executable, "-c", ENDS_WITHOUT_DESCRIPTORS, str(parrot.path)]
    with trio.fail_after(60):
        done = await trio.run_process(
            command, capture_stdout=True, stderr=subprocess.STDOUT, check=False
        )
    assert done.stdout.decode() == "was ended by SIGKILL False\n"


# -- a program with habits of its own ----------------------------------------------------------

IGNORES_SIGCHLD = """
import os, signal, sys
import trio
from llamatrio import Ladder, ModelConfig, Own, ServerBackend, open_provider
from llamatrio.testing import fakechild

async def main(model):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for steps in (["S ready", "R"], ["S ready", "R!", "W 999"], ["S ready", "X 3"], ["X 3"]):
        backend = ServerBackend(Own(fakechild.command(*steps)), ladder=Ladder(exit=0.1))
        async with open_provider(ModelConfig(model), backend=backend) as provider:
            try:
                await provider.start()
                await provider.stop()
                await provider.unload_model()
            except Exception as error:
                print(type(error).__name__)
            else:
                print(provider.phase.value)

trio.run(main, *sys.argv[1:])
"""


@pytest.mark.slow
async def test_a_program_that_ignores_SIGCHLD_can_still_end_its_children(parrot: Parrot) -> None:
    command = [sys.executable, "-c", IGNORES_SIGCHLD, str(parrot.path)]
    with trio.fail_after(60):
        done = await trio.run_process(
            command, capture_stdout=True, stderr=subprocess.STDOUT, check=False
        )
    assert done.stdout.decode().split() == ["unloaded", "unloaded", "unloaded", "LoadFailed"]


NO_STANDARD_STREAMS = """
import os, sys
import trio
from llamatrio import ModelConfig, Own, completion_request, open_provider
from llamatrio.testing import fakechild

async def main(model, report):
    for fd in range(3):
        os.close(fd)
    child = Own(fakechild.command("H ok", "S ready", "E hello\\\\n", "R"))
    async with open_provider(ModelConfig(model), backend=child) as provider:
        await provider.start()
        result = await provider.submit(completion_request("x")).result()
        await provider.stop()
        await provider.unload_model()
        exit = provider.diagnostics().last_exit
    with open(report, "w") as file:
        file.write(f"{result.text} {exit} {exit.tail}")

trio.run(main, *sys.argv[1:])
"""


async def test_a_program_without_standard_streams_can_have_children(
    parrot: Parrot, tmp_path: Path
) -> None:
    report = tmp_path / "report"
    command = [sys.executable, "-c", NO_STANDARD_STREAMS, str(parrot.path), str(report)]
    with trio.fail_after(60):
        await trio.run_process(command)
    assert report.read_text() == "Every answer here is a fake. exited with code 0 hello"


async def test_a_model_that_is_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    with trio.fail_after(30):
        async with open_provider(ModelConfig(tmp_path / "fifo.gguf")) as provider:
            with pytest.raises(ModelFileError, match="not a regular file"):
                await provider.start()


async def test_what_is_no_request_or_no_configuration_is_refused(parrot: Parrot) -> None:
    with trio.fail_after(30):
        with pytest.raises(SpecificationError, match=r"not a ModelConfig: 'model\.gguf'"):
            async with open_provider("model.gguf"):  # type: ignore[arg-type]
                pass
        async with open_provider(ModelConfig(parrot.path)) as provider:
            with pytest.raises(SpecificationError, match="not a Request: 'hello'"):
                provider.submit("hello")  # type: ignore[arg-type]
