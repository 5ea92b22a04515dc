"""What a child was started with: the files, the command, the process; who may change the files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import trio
from hypothesis import given, settings, strategies as st
from killing import kill
from moments import reach

from llamatrio import (
    Hosted,
    LocalProvider,
    ModelConfig,
    ModelFileError,
    Own,
    Phase,
    Policy,
    ServerBackend,
    SpawnError,
    SpecificationError,
    open_provider,
)
from llamatrio.child.launch import Kind, Launch
from llamatrio.child.manifest import (
    FileRecord,
    Manifest,
    ProcessRecord,
    describe_file,
    differences,
    find_dangers,
    is_same_process,
    look_again,
    observe,
    take_manifest,
    without_secrets,
)
from llamatrio.child.procfs import start_time
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot

INTERPRETER = os.path.realpath(sys.executable)

repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=20)


# -- command lines -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["app", "--api-key", "abc", "x"], ["app", "--api-key", "[redacted]", "x"]),
        (["app", "--api-key=abc", "x"], ["app", "--api-key=[redacted]", "x"]),
        (["app", "--hf_token", "abc"], ["app", "--hf_token", "[redacted]"]),
        (["app", "--password", "abc"], ["app", "--password", "[redacted]"]),
        (["app", "--client-secret=a=b"], ["app", "--client-secret=[redacted]"]),
        (["app", "--api-key", "--verbose"], ["app", "--api-key", "--verbose"]),
        (["app", "--api-key-file", "/x"], ["app", "--api-key-file", "/x"]),
        (["app", "--max-tokens", "7"], ["app", "--max-tokens", "7"]),
        (["app", "--tokenizer", "x"], ["app", "--tokenizer", "x"]),
        (["app", "sesame"], ["app", "[redacted]"]),
        (["app", "--url=http://me:sesame@x/"], ["app", "--url=http://me:[redacted]@x/"]),
    ],
)
def test_a_command_line_is_shown_without_what_is_or_is_called_a_secret(
    words: list[str], shown: list[str]
) -> None:
    assert without_secrets(words, ("sesame",)) == tuple(shown)


# -- files -------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"contents")
    path.chmod(0o644)
    return path


def test_a_file_is_described_by_its_absolute_path_and_what_it_really_is(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = file.parent / "link"
    link.symlink_to(file)
    monkeypatch.chdir(file.parent)
    found = describe_file("model", "link", {str(link): "ab"})
    assert (found.path, found.target, found.size) == (str(link), str(file), 8)
    assert (found.inode, found.mtime_ns) == (file.stat().st_ino, file.stat().st_mtime_ns)
    assert found.sha256 == "ab"
    assert describe_file("model", "file").target is None


def test_a_file_that_is_not_there_has_no_size() -> None:
    assert describe_file("engine", "/no/such/file").size is None
    assert describe_file("engine", "nul\0").size is None


def dangers_of(path: Path) -> list[str]:
    return list(find_dangers([describe_file("model", str(path))]))


def test_a_file_that_only_its_owner_may_write_to_is_no_danger(file: Path) -> None:
    assert dangers_of(file) == []


def test_a_file_that_everybody_may_write_to_is_a_danger(file: Path) -> None:
    file.chmod(0o666)
    assert dangers_of(file) == [f"everybody may write to '{file}' (model)"]


def test_a_directory_that_everybody_may_write_to_is_a_danger_wherever_it_stands(
    file: Path,
) -> None:
    deep = file.parent / "open" / "closed" / "file"
    deep.parent.mkdir(parents=True)
    shutil.copy(file, deep)
    (file.parent / "open").chmod(0o777)
    assert dangers_of(deep) == [f"everybody may replace what is in '{file.parent}/open' (model)"]
    # In a sticky one they may not.
    (file.parent / "open").chmod(0o1777)
    assert dangers_of(deep) == []


def test_what_a_link_leads_to_is_looked_at_too_and_nothing_is_told_twice(file: Path) -> None:
    (file.parent / "there").mkdir()
    (file.parent / "there").chmod(0o777)
    shutil.copy(file, file.parent / "there" / "file")
    link = file.parent / "link"
    link.symlink_to(file.parent / "there" / "file")
    told = [f"everybody may replace what is in '{file.parent}/there' (model)"]
    assert dangers_of(link) == told
    record = describe_file("model", str(link))
    assert list(find_dangers([record, record])) == told


# -- comparing ---------------------------------------------------------------------------------


LAUNCH = Launch(
    ("/bin/child", "--model", "m.gguf", "sesame"), {"PATH": "/bin", "LLAMA_API_KEY": "sesame"},
    ("sesame",),
)  # fmt: skip


def make(file: Path) -> Manifest:
    return take_manifest("stock", LAUNCH, [("program", sys.executable), ("model", str(file))])


def test_a_manifest_has_names_and_no_values_and_is_plain_JSON(file: Path) -> None:
    manifest = observe(make(file), os.getpid())
    text = json.dumps(manifest.to_json())
    assert "sesame" not in text
    document = json.loads(text)
    assert document["environment"] == ["LLAMA_API_KEY", "PATH"]
    assert document["command"] == ["/bin/child", "--model", "m.gguf", "[redacted]"]
    assert document["model"]["size"] == 8
    assert document["process"]["pid"] == os.getpid()
    assert platform.python_version() in document["system"]
    assert document["prefix"] == "cmd_child_to_router:state:"
    assert os.environ["PATH"] not in text


def test_two_manifests_of_the_same_do_not_differ(file: Path) -> None:
    assert differences(make(file), make(file)) == ()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda path: path.write_bytes(b"another size"), "was written to"),
        (lambda path: os.utime(path, ns=(0, 0)), "was written to"),
        (lambda path: path.unlink(), "is gone"),
        (lambda path: (path.rename(f"{path}2"), shutil.copy2(f"{path}2", path)), "was replaced"),
    ],
    ids=["written", "touched", "removed", "replaced"],
)
def test_a_file_that_has_changed_is_a_difference(
    file: Path, change: Callable[[Path], object], told: str
) -> None:
    before = make(file)
    change(file)
    [difference] = differences(before, make(file))
    assert difference.startswith(f"the model '{file}' {told}")


def test_another_content_behind_the_same_outside_is_found_by_its_hash(file: Path) -> None:
    def digest(path: str) -> str:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()

    before = look_again(make(file), digest)
    times = file.stat().st_mtime_ns
    file.write_bytes(b"CONTENTS")
    os.utime(file, ns=(times, times))
    assert differences(before, look_again(before)) == ()  # hashes are compared where both have one
    [difference] = differences(before, look_again(before, digest))
    assert "has another content: SHA-256" in difference


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("command", ("/bin/child",)),
        ("environment", ("PATH",)),
        ("kind", "own"),
        ("prefix", "other:"),
        ("address", "127.0.0.1:80"),
        ("system", "another"),
        ("launcher", ("nice",)),
        ("parent", ("another",)),
        ("process", ProcessRecord(7, 2, "/bin/child")),
        ("process", ProcessRecord(8, 1, "/bin/child")),
        ("process", ProcessRecord(7, 1, "/bin/other")),
    ],
)
def test_whatever_else_must_stay_the_same_is_a_difference(
    file: Path, field: str, value: object
) -> None:
    before = attrs.evolve(make(file), process=ProcessRecord(7, 1, "/bin/child"))
    after = attrs.evolve(before, **{field: value})  # type: ignore[arg-type]
    assert len(differences(before, after)) == 1
    assert field in differences(before, after)[0]


def test_what_was_found_out_later_is_no_difference(file: Path) -> None:
    before = make(file)
    library = FileRecord("library", "/lib/x.so")
    after = attrs.evolve(
        before,
        build="b1",
        reserved=True,
        warnings=("beware",),
        process=ProcessRecord(7),
        files=(library,),
    )
    assert differences(before, after) == ()
    assert differences(after, before) == ()
    assert differences(after, attrs.evolve(after, build="b2")) == ("build: 'b1' became 'b2'",)


roles = st.sampled_from(["engine", "model part", "adapter"])
records = st.builds(FileRecord, roles, st.sampled_from("abc"), size=st.integers(0, 2))


@repeatable
@given(st.lists(records, max_size=4, unique_by=lambda one: (one.role, one.path)))
def test_a_manifest_never_differs_from_itself(files: list[FileRecord]) -> None:
    manifest = Manifest("own", FileRecord("program", "/bin/x"), files=tuple(files))
    assert differences(manifest, manifest) == ()


# -- processes ---------------------------------------------------------------------------------


def test_a_process_is_known_by_its_start_and_not_by_its_number() -> None:
    mine = observe(Manifest("own", FileRecord("program", "/bin/x")), os.getpid()).process
    assert mine is not None
    assert mine.executable == os.path.realpath(sys.executable)
    assert mine.command is not None
    assert "PATH" in (mine.environment or ())
    assert is_same_process(mine)
    assert mine.started is not None
    assert not is_same_process(attrs.evolve(mine, started=mine.started + 1))
    assert not is_same_process(ProcessRecord(os.getpid()))


def test_a_number_without_a_process_has_no_start() -> None:
    assert start_time(2**22 + 1) is None
    manifest = observe(Manifest("own", FileRecord("program", "/bin/x")), 2**22 + 1)
    assert manifest.process == ProcessRecord(2**22 + 1)


# -- children ----------------------------------------------------------------------------------


async def test_every_life_of_a_child_records_what_it_was_started_with(
    kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            assert provider.manifest is None
            await provider.start()
            check_manifest(provider, kind, parrot.path)
            first = provider.manifest
            kill(provider)
            await reach(provider, Phase.STARTED, 2)
            check_manifest(provider, kind, parrot.path)
            assert first is not None
            assert provider.manifest is not None
            assert first.process != provider.manifest.process
        assert provider.manifest is not None  # of the last


def check_manifest(provider: LocalProvider, kind: Kind, model: Path) -> None:
    manifest = provider.manifest
    assert manifest is not None
    assert manifest.kind == type(kind).__name__.lower()
    assert manifest.model is not None
    assert manifest.model.path == str(model)
    assert manifest.model.size == model.stat().st_size
    assert manifest.model.sha256 is None  # nobody asked
    assert all(Path(file.path).is_absolute() for file in manifest.all_files)
    assert all(file.size for file in manifest.all_files)
    assert str(model) in " ".join(manifest.command)
    assert manifest.build is None
    process = manifest.process
    assert process is not None
    assert process.pid == provider.diagnostics().pid
    assert is_same_process(process)
    assert process.executable == os.path.realpath(manifest.program.path)
    assert manifest.executables[-1] == process.executable
    assert process.command == manifest.command
    assert manifest.reserved is provider.diagnostics().stdout_reserved
    assert manifest.isolation == provider.diagnostics().isolation
    assert "LLAMA_API_KEY" in manifest.environment
    environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    [key] = [item for item in environ if item.startswith(b"LLAMA_API_KEY=")]
    assert key.partition(b"=")[2].decode() not in json.dumps(manifest.to_json())


@pytest.mark.slow
async def test_an_examined_child_is_known_by_the_hashes_of_all_it_has_loaded(
    kind: Kind, parrot: Parrot, tmp_path: Path
) -> None:
    model = Path(shutil.copy(parrot.path, tmp_path / "model.gguf"))
    with trio.fail_after(120):
        async with open_provider(ModelConfig(model), backend=kind) as provider:
            assert await provider.examine() is None
            await provider.start()
            at_start = provider.manifest
            examined = await provider.examine()
            assert at_start is not None
            assert examined is not None
            assert provider.manifest is examined
            assert differences(at_start, examined) == ()
            assert examined.model is not None
            assert examined.model.sha256 == hashlib.sha256(parrot.path.read_bytes()).hexdigest()
            assert all(file.sha256 for file in examined.all_files)
            libraries = {Path(one.path).name for one in examined.files if one.role == "library"}
            assert any(name.startswith("libc.") for name in libraries)
            assert examined.build  # often "b0-unknown": noted as it stands
            with model.open("ab") as file:  # noqa: ASYNC230
                file.write(b"?")
            again = await provider.examine()
            assert again is not None
            assert len(differences(examined, again)) == 1
        # The files can be looked at when the child has gone.
        late = await provider.examine()
        assert late is not None
        assert differences(again, late) == ()


async def test_a_launcher_that_becomes_the_child_is_seen_as_both(parrot: Parrot) -> None:
    python, *rest = fakechild.command("S loading", "H ok", "S ready", "R")
    child = Own(("env", "-u", "NOTHING", "nice", "-n", "1", python, *rest))
    with trio.fail_after(30):
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            await provider.start()
            manifest = provider.manifest
            assert manifest is not None
            assert manifest.process is not None
            assert manifest.executables[-1] == INTERPRETER
            assert manifest.process.command is not None
            assert manifest.process.command[0] == python
            assert manifest.program.path == shutil.which("env")
            assert manifest.command[0] == shutil.which("env")


@pytest.mark.slow
async def test_a_relative_path_of_a_model_is_made_absolute_before_the_child_sees_it(
    kind: Kind, parrot: Parrot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(parrot.path.parent)
    with trio.fail_after(60):
        config = ModelConfig(parrot.path.name)
        async with open_provider(config, backend=kind) as provider:
            await provider.start()
            assert provider.manifest is not None
            assert provider.manifest.model is not None
            assert provider.manifest.model.path == str(parrot.path)
            assert str(parrot.path) in " ".join(provider.manifest.command)
            assert provider.config.model == parrot.path.name


# -- files that everybody may change -----------------------------------------------------------


@pytest.fixture
def exposed(parrot: Parrot, tmp_path: Path) -> Path:
    """A model that everybody may write to."""
    path = Path(shutil.copy(parrot.path, tmp_path / "exposed.gguf"))
    path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IWOTH)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


READY = fakechild.command("S loading", "H ok", "S ready", "R")


async def test_a_model_that_everybody_may_write_to_is_a_warning_once(
    exposed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warning = f"everybody may write to '{exposed}' (model)"
    with trio.fail_after(30), caplog.at_level(logging.WARNING, "llamatrio.child.model"):
        async with open_provider(ModelConfig(exposed), backend=Own(READY)) as provider:
            for _ in range(2):
                await provider.start()
                await provider.stop()
                await provider.unload_model()
            assert provider.manifest is not None
            assert provider.manifest.warnings == (warning,)
    assert [one.getMessage() for one in caplog.records if "everybody" in one.getMessage()] == [
        f"W {warning}"
    ]


def test_a_variable_that_a_launcher_sets_is_no_less_a_secret() -> None:
    words = ("env", "HF_TOKEN=hunter2", "THREADS=4", "llama-server", "--model", "m=key.gguf")
    shown = ("env", "HF_TOKEN=[redacted]", "THREADS=4", "llama-server", "--model", "m=key.gguf")
    assert without_secrets(words) == shown


async def test_a_pinned_model_that_everybody_may_write_to_is_refused(exposed: Path) -> None:
    config = ModelConfig(exposed, sha256=sha256(exposed))
    with trio.fail_after(30):
        async with open_provider(config, backend=Own(READY)) as provider:
            with pytest.raises(ModelFileError, match="everybody may write to"):
                await provider.start()
            assert provider.manifest is None  # nothing was started
            exposed.chmod(0o600)  # noqa: ASYNC240
            await provider.start()
            assert provider.manifest is not None
            assert provider.manifest.model is not None
            assert provider.manifest.model.sha256 == sha256(exposed)


async def test_strict_files_refuse_a_model_that_everybody_may_write_to(
    exposed: Path, parrot: Parrot
) -> None:
    with trio.fail_after(30):
        async with open_provider(
            ModelConfig(exposed), backend=Own(READY), strict_files=True
        ) as provider:
            with pytest.raises(ModelFileError, match="everybody may write to"):
                await provider.start()
        async with open_provider(
            ModelConfig(parrot.path), backend=Own(READY), strict_files=True
        ) as provider:
            with pytest.raises(ModelFileError, match="everybody may write to"):
                await provider.configure(ModelConfig(exposed))


async def test_strict_files_refuse_a_program_that_everybody_may_replace(
    parrot: Parrot, tmp_path: Path
) -> None:
    (tmp_path / "open").mkdir()
    program = tmp_path / "open" / "child"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    (tmp_path / "open").chmod(0o777)
    child = Own((str(program), *READY[1:]))
    with trio.fail_after(30):
        async with open_provider(
            ModelConfig(parrot.path), backend=child, strict_files=True
        ) as provider:
            with pytest.raises(SpawnError, match="everybody may replace what is in"):
                await provider.start()
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            await provider.start()
            assert provider.manifest is not None
            assert provider.manifest.warnings == (
                f"everybody may replace what is in '{tmp_path}/open' (program)",
            )


async def test_strict_files_are_for_children_and_not_for_a_backend(parrot: Parrot) -> None:
    with pytest.raises(SpecificationError, match="strict_files"):
        async with open_provider(
            ModelConfig(parrot.path), backend=ServerBackend(Hosted()), strict_files=True
        ):
            raise AssertionError("it was taken")


async def test_a_program_that_is_replaced_while_its_child_runs_is_a_difference(
    parrot: Parrot, tmp_path: Path
) -> None:
    program = tmp_path / "child"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    child = Own((str(program), *READY[1:]))
    with trio.fail_after(60):
        async with open_provider(
            ModelConfig(parrot.path), backend=child, policy=Policy(fruitless=1)
        ) as provider:
            await provider.start()
            before = await provider.examine()
            program.unlink()
            program.write_text(f'#!/bin/sh\nexec {sys.executable} -I "$@"\n')
            program.chmod(0o755)
            after = await provider.examine()
            assert before is not None
            assert after is not None
            [difference] = differences(before, after)
            assert difference.startswith(f"the program '{program}' has another content")
