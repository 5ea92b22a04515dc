"""A child process on Windows. Type-checked, not run."""

from __future__ import annotations

import subprocess
import sys

import trio

from llamatrio.child.launch import Launch

assert sys.platform == "win32"


class ChildProcess:
    """A spawned process in a group of its own, and our ends of its three pipes."""

    def __init__(self, process: trio.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._stdin: trio.abc.SendStream | None = process.stdin
        self.pid = process.pid
        self.stdout = process.stdout
        self.stderr = process.stderr

    @property
    def returncode(self) -> int | None:
        """The exit code once the process has ended."""
        return self._process.returncode

    async def wait(self) -> None:
        """Wait until the process has ended."""
        await self._process.wait()

    async def write_stdin(self, data: bytes) -> None:
        """Write a few bytes into the pipe."""
        if self._stdin is not None:
            try:
                await self._stdin.send_all(data)
            except trio.BrokenResourceError:
                return  # the process is ending by itself

    def close_stdin(self) -> None:
        """Let the process see the end of its stdin."""
        if self._stdin is not None:
            _close(self._stdin)
            self._stdin = None

    def terminate(self) -> None:
        """End the process. There is no asking on Windows but by the exit line."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process."""
        self._process.kill()

    def reap(self) -> None:
        """Take the exit code of an ended process."""
        self._process.poll()

    def close(self) -> None:
        """Close our ends of the pipes."""
        self.close_stdin()
        _close(self.stdout)
        _close(self.stderr)


def _close(stream: object) -> None:
    stream.close()  # type: ignore[attr-defined]  # trio's pipe streams have it; the ABC has not


async def spawn(launch: Launch) -> ChildProcess:
    """Start a process, without a console window and out of reach of Ctrl-C.

    Raises:
      OSError: if the program cannot be executed; nothing is left then.
    """
    process = await trio.lowlevel.open_process(
        list(launch.command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(launch.environ),
        creationflags=subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP,
    )
    return ChildProcess(process)
