"""The private place of a child's socket."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from llamatrio import ModelConfig, SocketPathTooLong, SpecificationError, open_provider
from llamatrio.child.launch import Kind
from llamatrio.session.sockets import private_address
from llamatrio.testing.parrot import Parrot

if sys.platform != "linux":
    pytest.skip("tests unix sockets", allow_module_level=True)

HOLDER = """
import sys
from llamatrio.session.sockets import private_address

with private_address(sys.argv[1]) as address:
    print(address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(own_temporary_directory: Path) -> Iterator[Path]:
    """A directory with a short path; it must be empty in the end."""
    directory = own_temporary_directory / "place"
    directory.mkdir()
    yield directory
    directory.rmdir()


@contextmanager
def holder(place: Path) -> Generator[tuple[subprocess.Popen[str], Path], None, None]:
    """Have another process that holds a private address; it leaves at the end of its stdin."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip()).parent


def path_of(address: object) -> Path:
    assert isinstance(address, str)
    return Path(address)


def test_the_directory_is_private_and_goes_with_all_that_is_in_it(place: Path) -> None:
    with private_address(str(place)) as address:
        path = path_of(address)
        assert path.suffix == ".sock"
        assert not path.exists()
        assert path.parent.parent == place
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        path.touch()
        (path.parent / "more").mkdir()
    assert list(place.iterdir()) == []


def test_the_directory_goes_when_the_block_raises(place: Path) -> None:
    with pytest.raises(ZeroDivisionError), private_address(str(place)):
        raise ZeroDivisionError
    assert list(place.iterdir()) == []


def test_every_address_is_another(place: Path) -> None:
    with private_address(str(place)) as one, private_address(str(place)) as other:
        assert path_of(one).parent != path_of(other).parent
        assert path_of(one).name != path_of(other).name


def test_a_directory_that_is_gone_already_is_no_error(place: Path) -> None:
    with private_address(str(place)) as address:
        (path_of(address).parent / "owner").unlink()
        path_of(address).parent.rmdir()


def test_a_relative_place_is_made_absolute(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.parent)
    with private_address(place.name) as address:
        assert path_of(address).is_absolute()
        monkeypatch.chdir("/")
    assert list(place.iterdir()) == []


def test_the_usual_place_is_that_of_temporary_files(own_temporary_directory: Path) -> None:
    with private_address(None) as address:
        assert path_of(address).parent.parent == own_temporary_directory


def test_a_dead_owners_directory_is_swept_by_the_next(place: Path) -> None:
    with holder(place) as (process, directory):
        (directory / "x.sock").touch()
        process.kill()
        process.wait()
        assert directory.exists()
        with private_address(str(place)):
            assert not directory.exists()


def test_a_living_owners_directory_is_left_alone(place: Path) -> None:
    with holder(place) as (_, directory):
        with private_address(str(place)):
            assert directory.exists()
        assert (directory / "owner").exists()


def test_our_own_directories_are_left_alone(place: Path) -> None:
    with private_address(str(place)) as one:
        with private_address(str(place)):
            assert path_of(one).parent.exists()
        assert path_of(one).parent.exists()


def test_what_has_no_lock_or_another_name_is_left_alone(place: Path) -> None:
    without = place / "llamatrio-notes"
    without.mkdir()
    (without / "file").touch()
    fresh = place / "llamatrio-fresh"  # of an owner who has not named the lock yet
    fresh.mkdir()
    (fresh / "owner.new").touch()
    other = place / "other"
    other.mkdir()
    (other / "owner").touch()
    with private_address(str(place)):
        assert (without / "file").exists()
        assert (fresh / "owner.new").exists()
        assert (other / "owner").exists()
    for path in ("llamatrio-notes/file", "llamatrio-fresh/owner.new", "other/owner"):
        (place / path).unlink()
        (place / path).parent.rmdir()


def test_a_symbolic_link_is_never_followed_by_the_sweep(place: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "owner").touch()
    (victim / "treasure").touch()
    (place / "llamatrio-link").symlink_to(victim)
    trap = place / "llamatrio-trap"
    trap.mkdir()
    (trap / "owner").symlink_to(victim / "treasure")
    (trap / "inner").symlink_to(victim)
    with private_address(str(place)):
        assert sorted(path.name for path in victim.iterdir()) == ["owner", "treasure"]
    (place / "llamatrio-link").unlink()
    for name in ("owner", "inner"):
        (trap / name).unlink(missing_ok=True)
    trap.rmdir()


def test_the_longest_path_is_taken_and_a_longer_one_refused(place: Path) -> None:
    rest = 107 - len(os.fsencode(place)) - len("//llamatrio-12345678/12345678.sock")
    for length in (rest, rest + 1):
        parent = place / ("d" * length)
        parent.mkdir()
        if length == rest:
            with private_address(str(parent)) as address:
                assert len(os.fsencode(path_of(address))) == 107
        else:
            with (
                pytest.raises(SocketPathTooLong, match="107 bytes"),
                private_address(str(parent)),
            ):
                pytest.fail("it was taken")
        parent.rmdir()


def test_a_place_that_is_missing_is_refused(place: Path) -> None:
    with (
        pytest.raises(SpecificationError, match="missing"),
        private_address(str(place / "missing")),
    ):
        pytest.fail("it was made")


@pytest.mark.slow
def test_many_processes_can_come_and_go_at_once(place: Path) -> None:
    code = """
import sys
from llamatrio.session.sockets import private_address

for _ in range(100):
    with private_address(sys.argv[1]) as address:
        open(address, "x").close()
"""
    command = [sys.executable, "-c", code, str(place)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[1] for process in processes] == [""] * 3
    assert [process.returncode for process in processes] == [0] * 3


def sockets_in(place: Path) -> list[Path]:
    return list(place.glob("*/*.sock"))


async def test_the_socket_of_a_real_child_is_there_while_the_model_is_resident(
    kind: Kind, parrot: Parrot, place: Path
) -> None:
    with trio.fail_after(60):
        config = ModelConfig(parrot.path)
        async with open_provider(config, backend=kind, runtime_dir=place) as provider:
            assert sockets_in(place) == []
            await provider.start()
            [socket] = sockets_in(place)
            assert stat.S_ISSOCK(os.stat(socket).st_mode)
            assert stat.S_IMODE(os.stat(socket.parent).st_mode) == 0o700
    assert os.listdir(place) == []
