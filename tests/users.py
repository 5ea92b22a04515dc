"""Other users than the one who runs the tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamatrio.testing.parrot import write_parrot

NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--")
PYTHON = (sys.executable, "-I", "-c", "import llamatrio")
"""What another user must be able to run: there may be no way for him into our environment."""


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that any user may use, with a model in it and a directory for sockets."""
    directory = Path(tempfile.mkdtemp(prefix="lt-", dir="/tmp"))
    directory.chmod(0o777)
    model = write_parrot(directory / "parrot.gguf")
    model.path.chmod(0o644)
    (directory / "run").mkdir()
    (directory / "run").chmod(0o777)
    yield directory
    shutil.rmtree(directory)


def need(*command: str) -> None:
    """Skip a test that wants what this user, or this system, does not allow."""
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{command[0]}: {done.stderr.decode().strip()}")
