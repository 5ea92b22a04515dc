"""A private place for one child's socket, gone with the child, swept up if its owner died."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from llamatrio.child.launch import Address
from llamatrio.errors import SpecificationError

_NAME: Final = "llamatrio-"
_LOCK: Final = "owner"
# sizeof(sun_path), less the terminating NUL.
_LONGEST: Final = 107 if sys.platform == "linux" else 103


class SocketPathTooLong(SpecificationError):
    """The path of a unix socket would be longer than the operating system takes."""


@contextlib.contextmanager
def loopback_address() -> Iterator[Address]:
    """Give a loopback port that was free a moment ago; the child's key guards it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    yield ("127.0.0.1", port)


if sys.platform == "win32":

    def private_address(parent: str | None) -> contextlib.AbstractContextManager[Address]:
        """Give a loopback port: the Python of Windows has no unix sockets."""
        return loopback_address()

else:
    import fcntl

    @contextlib.contextmanager
    def private_address(parent: str | None) -> Iterator[Address]:
        """Give the path of a socket in a new directory that nobody else can enter.

        The directory and all that is in it are removed at the end. While the owner lives it holds
        a lock in there; the directories of owners that died are removed now.

        Args:
          parent: Where to make the directory; None for the usual place for temporary files.

        Raises:
          SocketPathTooLong: if the operating system could not take the path.
          SpecificationError: if the directory cannot be made.
        """
        with contextlib.ExitStack() as stack:
            try:
                parent = os.path.abspath(parent or tempfile.gettempdir())
                _sweep(parent)
                directory = Path(tempfile.mkdtemp(prefix=_NAME, dir=parent))  # mode 0700
                path = str(directory / f"{secrets.token_hex(4)}.sock")
                stack.callback(_remove, directory, path, os.getpid())
                stack.callback(os.close, _lock(directory))
            except OSError as exc:
                raise SpecificationError(f"cannot make a directory for a socket: {exc}") from exc
            if len(os.fsencode(path)) > _LONGEST:
                raise SocketPathTooLong(
                    f"{path!r} is longer than the {_LONGEST} bytes that a unix socket's path may "
                    "have; give a shorter runtime_dir"
                )
            yield path

    def _lock(directory: Path) -> int:
        # Locked first and named afterwards: a sweeper sees no lock file, or a locked one.
        unnamed = directory / (_LOCK + ".new")
        fd = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        unnamed.rename(directory / _LOCK)
        return fd

    def _remove(directory: Path, path: str, owner: int) -> None:
        if os.getpid() != owner:  # a forked copy of the program, which owns nothing
            return
        # By name first: rmtree takes descriptors, and there may be none left.
        with contextlib.suppress(OSError):
            for file in (path, directory / _LOCK):
                Path(file).unlink(missing_ok=True)
            directory.rmdir()
        shutil.rmtree(directory, ignore_errors=True)

    def _sweep(parent: str) -> None:
        """Remove what owners left that died. Others may sweep at the same time."""
        for lock in Path(parent).glob(f"{_NAME}*/{_LOCK}"):
            with contextlib.suppress(OSError):
                fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
                finally:
                    os.close(fd)
