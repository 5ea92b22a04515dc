"""A child process on Linux, macOS and the BSDs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import Final, TypeAlias

import trio

from llamatrio.child.launch import Launch

assert sys.platform != "win32"

if sys.platform == "linux":
    from llamatrio.child import survivors
    from llamatrio.child.pidfd import ExitWatch

    Descendants: TypeAlias = frozenset[survivors.Process]
else:
    from llamatrio.child.kqueue import ExitWatch

    Descendants: TypeAlias = tuple[()]

_HEADROOM: Final = 64  # descriptors: what a child and the requests to it take, and some


class ChildProcess:
    """A spawned process, the leader of a session of its own, and our ends of its three pipes.

    In a forked copy of the program all of this does nothing: the process belongs to the original.
    """

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        watch: ExitWatch,
        stdin: int,
        stdout: int,
        stderr: int,
    ) -> None:
        self._popen = popen
        self._watch = watch
        self._stdin: int | None = stdin
        self._owner = os.getpid()
        self.pid = popen.pid
        for pipe in (stdout, stderr):
            # A stream restores what it found when it is closed, and a forked copy of the program,
            # which shares the pipe, may close its own: it must not make ours block.
            os.set_blocking(pipe, False)
        self.stdout = trio.lowlevel.FdStream(stdout)
        self.stderr = trio.lowlevel.FdStream(stderr)

    @property
    def _is_ours(self) -> bool:
        return os.getpid() == self._owner

    @property
    def returncode(self) -> int | None:
        """The exit code once it is reaped; negative for a signal."""
        return self._popen.returncode

    async def wait(self) -> None:
        """Wait until the process has ended, without reaping it."""
        if self._is_ours:
            await self._watch.wait()

    async def write_stdin(self, data: bytes) -> None:
        """Write a few bytes into the pipe, which is empty: they always fit."""
        if self._stdin is not None and self._is_ours:
            with contextlib.suppress(BrokenPipeError):  # the process is ending by itself
                os.write(self._stdin, data)

    def close_stdin(self) -> None:
        """Let the process see the end of its stdin."""
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    def has_unread_stderr(self) -> bool:
        """Say whether there are bytes on stderr that nobody has read yet."""
        size = fcntl.ioctl(self.stderr.fileno(), termios.FIONREAD, bytes(4))
        return any(size)

    def terminate(self) -> None:
        """Ask the process to end, by SIGTERM."""
        if self._is_ours:
            # Where the program ignores SIGCHLD, or the child has become another user's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the process and all that is left of its group, by SIGKILL.

        Must come before `reap`: afterwards the number may belong to somebody else.
        """
        if self._is_ours:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: only zombies
                os.killpg(self.pid, signal.SIGKILL)

    async def wait_others(self, descendants: Descendants) -> None:
        """Wait until all that it has started has ended as well, where the system tells.

        `kill` has reached its group, and dying takes a moment. Who is in a session of his own may
        end for his part, by the end of a pipe or of a terminal; or he never does.

        Args:
          descendants: Those that there were before.

        Cancellation: harmless.
        """
        if sys.platform == "linux" and self._is_ours:
            for pid in survivors.alive(self.pid, descendants):
                await _wait_for(pid)

    def descendants(self) -> Descendants:
        """Return the processes that it has started, and they, where the system tells."""
        if sys.platform == "linux":
            return survivors.descendants(self.pid)
        return ()

    def survivors(self, descendants: Descendants) -> tuple[int, ...]:
        """Return those of its processes that `kill` has not reached. Belongs into a thread.

        Args:
          descendants: Those that there were before.
        """
        if sys.platform == "linux":
            pipes = (self.stdout.fileno(), self.stderr.fileno())
            return survivors.out_of_reach(self.pid, descendants, pipes)
        return ()

    def reap(self) -> None:
        """Take the exit code of an ended process."""
        if self._is_ours:
            self._popen.poll()

    def close(self) -> None:
        """Close our ends of the pipes."""
        if not self._is_ours:  # Trio's epoll set is shared with the original
            return
        self._watch.close()
        self.close_stdin()
        self.stdout.close()
        self.stderr.close()


async def spawn(launch: Launch) -> ChildProcess:  # noqa: ASYNC124 - async on Windows
    """Start a process.

    There is no checkpoint in here, and the fork is made by the calling thread: nothing can come
    between the spawn and its owner, and a parent-death signal of the child would be tied to a
    thread that lives as long as the run.

    Raises:
      OSError: if the program cannot be executed, or few descriptors are left; nothing is left then.
    """
    _check_headroom()
    theirs: list[int] = []
    ours: list[int] = []
    # The child inherits this. Until it has its session, a Ctrl-C in the terminal would reach it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for read_end_is_theirs in (True, False, False):
            ends = os.pipe()
            theirs.append(ends[0 if read_end_is_theirs else 1])
            ours.append(ends[1 if read_end_is_theirs else 0])
        with _no_core_dump():
            popen = subprocess.Popen(  # noqa: ASYNC220 - see above: it must not be elsewhere
                (*launch.wrapper, *launch.command),
                stdin=theirs[0],
                stdout=theirs[1],
                stderr=theirs[2],
                env=dict(launch.environ),
                start_new_session=True,
            )
        watch = _watch(popen)
    except BaseException:
        for fd in ours:
            os.close(fd)
        raise
    finally:
        for fd in theirs:
            os.close(fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if sys.platform == "linux":
        _forbid_core_dump(popen.pid)
    return ChildProcess(popen, watch, *ours)


async def _wait_for(pid: int) -> None:
    try:
        watch = ExitWatch(pid)
    except OSError:  # it has ended, or no descriptor is left
        return
    try:
        await watch.wait()
    finally:
        watch.close()


def _watch(popen: subprocess.Popen[bytes]) -> ExitWatch:
    try:
        return ExitWatch(popen.pid)
    except OSError:
        popen.kill()
        popen.wait()
        raise


def _check_headroom() -> None:
    """Refuse to start a child that could not be spoken to, or not be ended."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        left = most - len(os.listdir("/dev/fd"))
    except OSError:  # not even that can be opened; or nothing is mounted there
        left = _HEADROOM if _can_open() else 0
    if most != resource.RLIM_INFINITY and left < _HEADROOM:
        raise OSError(
            errno.EMFILE,
            f"{os.strerror(errno.EMFILE)}: {max(left, 0)} of {most} are left, and a child wants "
            f"{_HEADROOM}; close some, or raise the limit (`ulimit -n`, RLIMIT_NOFILE)",
        )


def _can_open() -> bool:
    try:
        os.close(os.dup(0))
    except OSError as exc:
        return exc.errno != errno.EMFILE
    return True


# A dump would be as large as the model.
if sys.platform == "linux":

    @contextlib.contextmanager
    def _no_core_dump() -> Iterator[None]:
        yield

    def _forbid_core_dump(pid: int) -> None:
        # From outside, because code between fork and exec is not safe beside threads.
        with contextlib.suppress(OSError):  # it has ended, or a sandbox forbids it
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))

else:

    @contextlib.contextmanager
    def _no_core_dump() -> Iterator[None]:
        """Lower our own limit for a moment, which the child inherits."""
        soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
