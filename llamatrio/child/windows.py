"""A child process on Windows. Type-checked, not run."""

from __future__ import annotations

import subprocess
import sys
from typing import TypeAlias

import trio

from llamatrio.child.launch import Launch

assert sys.platform == "win32"

if sys.platform == "win32":  # as it is: but nothing else can import this
    from llamatrio.child.win32job import Job

Descendants: TypeAlias = tuple[()]


class ChildProcess:
    """A spawned process in a job and a group of its own, and our ends of its three pipes."""

    def __init__(self, process: trio.Process, job: Job) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._job = job
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

    def has_unread_stderr(self) -> bool:
        """Say that there may be bytes on stderr that nobody has read yet: it cannot be seen."""
        return True

    def terminate(self) -> None:
        """End the process. There is no asking on Windows but by the exit line."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process and all that it has started."""
        self._job.close()

    async def wait_others(self, descendants: Descendants) -> None:
        """Do nothing: whoever closes a job has ended all that is in it."""

    def descendants(self) -> Descendants:
        """Return nothing: its job ends them all."""
        return ()

    def survivors(self, descendants: Descendants) -> tuple[int, ...]:
        """Return nothing: its job ends them all."""
        return ()

    def reap(self) -> None:
        """Take the exit code of an ended process."""
        self._process.poll()

    def close(self) -> None:
        """Close our ends of the pipes."""
        self._job.close()
        self.close_stdin()
        _close(self.stdout)
        _close(self.stderr)


def _close(stream: object) -> None:
    stream.close()  # type: ignore[attr-defined]  # trio's pipe streams have it; the ABC has not


async def spawn(launch: Launch) -> ChildProcess:
    """Start a process, without a console window and out of reach of Ctrl-C.

    It is in its job a moment after it has begun: Trio has no way to start one that waits. What it
    starts within that moment would outlive it.

    Raises:
      OSError: if the program cannot be executed; nothing is left then.
    """
    process = await trio.lowlevel.open_process(
        [*launch.wrapper, *launch.command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(launch.environ),
        creationflags=subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP,
    )
    try:
        return ChildProcess(process, Job(process.pid))
    except OSError:
        process.kill()
        raise
