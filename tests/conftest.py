from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import take_census

from llamatrio import Hosted, Stock
from llamatrio.child.launch import Kind
from llamatrio.errors import SpawnError
from llamatrio.session.programs import find_program
from llamatrio.testing.parrot import (
    Parrot,
    write_large_parrot,
    write_parrot,
    write_slow_parrot,
)

# A shell has what it runs in the background ignore it, and every program of a test would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_temporary_directory() -> Iterator[Path]:
    """Keep this run's sockets apart from those of other runs; short, for the sake of sun_path."""
    before, tempfile.tempdir = tempfile.tempdir, None
    directory = Path(tempfile.mkdtemp(prefix="lt-"))
    tempfile.tempdir = str(directory)
    yield directory
    tempfile.tempdir = before
    shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def nothing_left(own_temporary_directory: Path) -> Iterator[None]:
    """Fail a test that leaves a process, zombie, descriptor, thread or directory behind."""
    before = take_census()
    yield
    assert take_census().since(before) == {}


@pytest.fixture(scope="session")
def models(own_temporary_directory: Path) -> Path:
    """A directory for models."""
    directory = own_temporary_directory / "models"
    directory.mkdir()
    return directory


@pytest.fixture(scope="session")
def parrot(models: Path) -> Parrot:
    """A model that recites a sentence."""
    return write_parrot(models / "parrot.gguf")


@pytest.fixture(scope="session")
def endless(models: Path) -> Parrot:
    """A model that recites its sentence again and again, at some milliseconds for a word."""
    return write_slow_parrot(models / "endless.gguf", loop=True)


@pytest.fixture(scope="session")
def large(models: Path) -> Parrot:
    """A model that takes a while to load."""
    return write_large_parrot(models / "large.gguf")


@pytest.fixture(scope="session")
def llama_server() -> str:
    """The stock llama-server; the test is skipped where there is none."""
    program = os.environ.get("LLAMATRIO_LLAMA_SERVER")
    try:
        return find_program(Stock(program))
    except SpawnError as exc:
        pytest.skip(f"no llama-server: {exc}; set LLAMATRIO_LLAMA_SERVER")


@pytest.fixture(params=["hosted", pytest.param("stock", marks=pytest.mark.stock)])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Every kind of real child, in turn."""
    if request.param == "hosted":
        return Hosted()
    return Stock(request.getfixturevalue("llama_server"))
