"""Which files a model was loaded from, and what a pinned one has to hold."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from llamatrio import (
    LocalProvider,
    ModelChanged,
    ModelConfig,
    ModelFileError,
    Phase,
    SpecificationError,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.session.identity import (
    Digests,
    Guard,
    Identity,
    files_of,
    find_change,
    take_identity,
)
from llamatrio.testing.parrot import Parrot, write_parrot
from llamatrio.wire.records import Loading, Ready, Sleeping

HELLO = completion_request("Hello", temperature=0)
ABSENT = "0" * 64
MIB = 2**20


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of three chunks."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(2 * MIB))
    return path


def identity(path: Path) -> Identity:
    return take_identity(ModelConfig(path))[0]


def rewrite(path: Path) -> None:
    """Change one byte of a file in place, and let it look as before."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(9)
        file.write(b"!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# -- the configuration -------------------------------------------------------------------------


def test_a_pinned_digest_is_kept_in_small_letters() -> None:
    assert ModelConfig("m.gguf", sha256="AB" * 32).sha256 == "ab" * 32
    assert ModelConfig("m.gguf", sha256="AB" * 32) == ModelConfig("m.gguf", sha256="ab" * 32)
    assert ModelConfig("m.gguf").sha256 is None


@pytest.mark.parametrize("value", ["", "ab", "g" * 64, "0" * 65, "0" * 64 + "\n", b"0" * 64, 0])
def test_what_is_no_digest_is_refused(value: str) -> None:
    with pytest.raises(SpecificationError, match="sha256 is 64 hexadecimal digits"):
        ModelConfig("m.gguf", sha256=value)


@pytest.mark.parametrize("model", [None, "m-00001-of-00002.gguf"])
def test_a_digest_without_the_one_file_that_it_pins_is_refused(model: str | None) -> None:
    with pytest.raises(SpecificationError, match="one file"):
        ModelConfig(model, args=["-hf", "a/b"], sha256=ABSENT)


# -- files -------------------------------------------------------------------------------------


def test_every_file_of_a_configuration_is_looked_at_the_model_first(tmp_path: Path) -> None:
    names = ["m.gguf", "d.gguf", "p.gguf", "a.gguf", "b.gguf"]
    for size, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes(size))
    model, draft, mmproj, *loras = (tmp_path / name for name in names)
    config = ModelConfig(model, draft_model=draft, mmproj=mmproj, lora=loras)
    files = take_identity(config)
    assert [file.size for file in files] == [0, 1, 2, 3, 4]
    assert [file.path for file in files] == list(files_of(config))
    assert take_identity(config) == files
    assert len(set(files)) == 5


def test_all_files_of_a_model_in_several_are_looked_at(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        part.touch()
    files = take_identity(ModelConfig(parts[0]))
    assert [file.path for file in files] == list(map(str, parts))
    parts[2].write_bytes(b"x")
    assert find_change(files) == f"{str(parts[2])!r} has been written to"


@pytest.mark.parametrize("name", ["m-00001-of-00003.gguf", "m-00002-of-00002.gguf"])
def test_a_name_that_only_looks_like_one_of_several_files_is_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert len(take_identity(ModelConfig(tmp_path / name))) == 1


def test_a_model_without_a_file_has_no_identity() -> None:
    assert take_identity(ModelConfig(None, args=["-hf", "a/b"])) == ()


@pytest.mark.parametrize("name", ["missing.gguf", "mi\0ing.gguf"])
def test_a_file_that_is_not_there_is_named_as_it_was_given(name: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        take_identity(ModelConfig(name))
    assert caught.value.path == name


def test_a_relative_path_means_the_same_file_from_everywhere(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    files = take_identity(ModelConfig(path.name))
    monkeypatch.chdir("/")
    assert find_change(files) is None


# -- change ------------------------------------------------------------------------------------


def replace(path: Path) -> None:
    other = path.with_name("other.gguf")
    other.write_bytes(path.read_bytes())
    stat = path.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


def write(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


def write_unsized(path: Path) -> None:
    before = path.stat().st_mtime_ns
    with open(path, "r+b") as file:
        file.write(b"GGUF")
    os.utime(path, ns=(before, before + 1))


def turn_link(path: Path) -> None:
    other = path.with_name("other.gguf")
    other.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(other)


def delete(path: Path) -> None:
    path.unlink()


def leave(path: Path) -> None:
    path.read_bytes()


def chmod(path: Path) -> None:
    path.chmod(0o600)


def rename_and_back(path: Path) -> None:
    path.rename(path.with_name("x")).rename(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (replace, "has been replaced"),
        (write, "has been written to"),
        (write_unsized, "has been written to"),
        (turn_link, "has been replaced"),
        (delete, "cannot be found: No such file"),
        (leave, None),
        (chmod, None),
        (rename_and_back, None),
    ],
)
def test_a_change_of_a_file_is_found(
    path: Path, change: Callable[[Path], None], says: str | None
) -> None:
    files = take_identity(ModelConfig(path))
    change(path)
    found = find_change(files)
    if says is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(f"{str(path)!r} {says}")


# -- digests -----------------------------------------------------------------------------------


async def test_a_pinned_file_is_the_one_or_the_complaint_names_both_digests(path: Path) -> None:
    digests, digest = Digests(), sha256(path)
    assert await digests.mismatch(identity(path), digest) is None
    complaint = await digests.mismatch(identity(path), ABSENT)
    assert complaint is not None
    assert f"{digest[:12]}..." in complaint
    assert f"{ABSENT[:12]}..." in complaint


async def test_a_file_that_looks_the_same_is_read_once_unless_asked_for(path: Path) -> None:
    digests, digest, size = Digests(), sha256(path), identity(path).size
    for _ in range(3):
        assert await digests.mismatch(identity(path), digest) is None
    assert digests.bytes_read == size
    assert await digests.mismatch(identity(path), digest, anew=True) is None
    assert digests.bytes_read == 2 * size


@pytest.mark.parametrize("change", [replace, write, write_unsized, rewrite])
async def test_a_file_that_was_touched_is_read_again(
    path: Path, change: Callable[[Path], None]
) -> None:
    digests = Digests()
    assert await digests.mismatch(identity(path), sha256(path)) is None
    change(path)
    before = digests.bytes_read
    assert await digests.mismatch(identity(path), sha256(path)) is None
    assert digests.bytes_read == before + identity(path).size


async def test_a_file_that_was_replaced_since_it_was_looked_at_has_no_digest(path: Path) -> None:
    file = identity(path)
    replace(path)
    with pytest.raises(ModelFileError, match="was changed while it was read"):
        await Digests().mismatch(file, sha256(path))


async def test_a_file_that_is_changed_while_it_is_read_has_no_digest(path: Path) -> None:
    os.truncate(path, 2**40)  # all holes: nobody will read it to its end
    digests, file = Digests(), identity(path)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                with pytest.raises(ModelFileError, match="was changed while it was read"):
                    await digests.mismatch(file, ABSENT)

            nursery.start_soon(read)
            await begun(digests)
            os.truncate(path, 0)


async def test_reading_a_large_file_can_be_cancelled(path: Path) -> None:
    os.truncate(path, 2**40)
    digests = Digests()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(digests.mismatch, identity(path), ABSENT)
            await begun(digests)
            nursery.cancel_scope.cancel()
    assert 0 < digests.bytes_read < 2**40


async def begun(digests: Digests) -> None:
    while not digests.bytes_read:  # noqa: ASYNC110 - it is read in a thread
        await trio.lowlevel.checkpoint()


async def test_a_file_that_cannot_be_opened_has_no_digest(path: Path) -> None:
    file = identity(path)
    delete(path)
    with pytest.raises(ModelFileError, match="No such file"):
        await Digests().mismatch(file, ABSENT)


# -- the guard ---------------------------------------------------------------------------------


class Watched:
    """A guard of one file, and how much of it was hashed so far, in files."""

    def __init__(self, path: Path, *, pinned: bool = True) -> None:
        self._size = path.stat().st_size
        self._digests = Digests()
        files, pin = take_identity(ModelConfig(path)), sha256(path) if pinned else None
        self.guard = Guard(files, pin, self._digests)

    @property
    def hashed(self) -> float:
        return self._digests.bytes_read / self._size

    def tell(self, *records: Loading | Ready | Sleeping) -> None:
        for record in records:
            self.guard.on_record(record)


async def test_a_model_that_never_slept_is_not_looked_at_for_a_request(path: Path) -> None:
    watched = Watched(path)
    watched.tell(Loading(), Ready())
    rewrite(path)
    await watched.guard.check()
    assert watched.hashed == 0


async def test_a_model_that_sleeps_is_looked_at_for_each_request(path: Path) -> None:
    watched = Watched(path)
    watched.tell(Loading(), Ready(), Sleeping())
    await watched.guard.check()  # of a request that wakes nobody, such as one for `/props`
    assert watched.hashed == 1
    await watched.guard.check()
    assert watched.hashed == 2
    rewrite(path)
    with pytest.raises(ModelChanged):
        await watched.guard.check()


async def test_a_model_that_was_looked_at_before_it_woke_is_not_looked_at_again(path: Path) -> None:
    watched = Watched(path)
    watched.tell(Loading(), Ready(), Sleeping())
    await watched.guard.check()
    watched.tell(Loading())
    await watched.guard.check()
    watched.tell(Ready())
    await watched.guard.check()
    assert watched.hashed == 1


async def test_a_model_that_nobody_looked_at_before_it_woke_is_looked_at_afterwards(
    path: Path,
) -> None:
    watched = Watched(path)
    watched.tell(Loading(), Ready())
    await watched.guard.check()
    watched.tell(Sleeping(), Loading(), Ready())
    await watched.guard.check()
    assert watched.hashed == 1
    await watched.guard.check()
    assert watched.hashed == 1


async def test_requests_that_come_together_have_a_model_looked_at_once(path: Path) -> None:
    watched = Watched(path)
    watched.tell(Loading(), Ready(), Sleeping())
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(watched.guard.check)
    assert watched.hashed == 1


async def test_each_of_several_requests_for_another_model_gets_an_error_of_its_own(
    path: Path,
) -> None:
    watched = Watched(path)
    watched.tell(Loading(), Ready(), Sleeping())
    rewrite(path)
    errors: list[ModelChanged] = []

    async def check() -> None:
        with pytest.raises(ModelChanged) as caught:
            await watched.guard.check()
        errors.append(caught.value)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(check)
    assert len(set(map(id, errors))) == 3
    assert len(set(map(str, errors))) == 1


@pytest.mark.parametrize("slept", [False, True])
async def test_a_file_that_changed_within_a_load_is_not_served(path: Path, slept: bool) -> None:
    watched = Watched(path, pinned=False)
    if slept:
        watched.tell(Loading(), Ready(), Sleeping())
        await watched.guard.check()
    watched.tell(Loading())
    write(path)
    with pytest.raises(ModelChanged, match="has been written to"):
        watched.tell(Ready())
    with pytest.raises(ModelChanged, match="has been written to"):
        await watched.guard.check()


# -- loads -------------------------------------------------------------------------------------


async def test_a_model_that_is_pinned_is_loaded(kind: Kind, parrot: Parrot) -> None:
    config = ModelConfig(parrot.path, sha256=sha256(parrot.path))
    with trio.fail_after(60):
        async with open_provider(config, backend=kind) as provider:
            await provider.start()
            assert (await provider.submit(HELLO).result()).text == parrot.text


async def test_another_model_than_the_pinned_one_is_refused_and_nothing_is_started(
    kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(60):
        config = ModelConfig(parrot.path, sha256=ABSENT)
        async with open_provider(config, backend=kind) as provider:
            with pytest.raises(ModelFileError) as caught:
                await provider.start()
            assert caught.value.path == str(parrot.path)
            for digest in (sha256(parrot.path), ABSENT):
                assert f"{digest[:12]}..." in caught.value.reason
            assert "get the right file" in caught.value.reason
            assert provider.diagnostics().pipes.stderr_bytes == 0


async def test_a_new_configuration_whose_pin_is_wrong_leaves_the_old_model_resident(
    kind: Kind, parrot: Parrot, tmp_path: Path
) -> None:
    other = write_parrot(tmp_path / "other.gguf", "Another bird that says another thing.")
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            await provider.start()
            await provider.stop()
            with pytest.raises(ModelFileError):
                await provider.configure(ModelConfig(other.path, sha256=ABSENT))
            assert (provider.phase, provider.config.model) == (Phase.RESIDENT, str(parrot.path))
            await provider.configure(ModelConfig(other.path, sha256=sha256(other.path)))
            await provider.start()
            assert (await said(provider)) == other.text


async def said(provider: LocalProvider) -> str:
    return (await provider.submit(HELLO).result()).text
