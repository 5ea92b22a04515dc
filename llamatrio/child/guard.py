"""Refuses a child whose stdout and stderr are merged, and finds out whether it reserves stdout.

What a record says counts because nothing but records comes through its pipe. A wrapper can undo
that without a word: `2>&1`, a terminal, a `tee` in the wrong place. It is noticed before the model
is offered, and a child behind such a wrapper is ended; it would not do better the next time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, Literal

import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.child.launch import Launch
from llamatrio.child.logs import LogChannel
from llamatrio.child.manifest import without_secrets
from llamatrio.child.pumps import Tally
from llamatrio.child.verdict import (
    Look,
    Reservation,
    StrayRecords,
    banner_evidence,
    closed_evidence,
    judge,
    stray_evidence,
    suggest,
)
from llamatrio.errors import ChildError, MergedStreams, StdoutClosed
from llamatrio.wire.records import Ready, Record
from llamatrio.wire.redaction import redact

if sys.platform == "win32":
    from llamatrio.child.windows import ChildProcess
else:
    from llamatrio.child.posix import ChildProcess

if sys.platform == "linux":
    from llamatrio.child.fdtables import command_of, file_of, find_members, is_exiting

_STRAY: Final = 0.5  # seconds for which a record on stdout can still follow one on stderr


class Guard:
    """Watches over the two pipes of one child.

    Args:
      process: The child.
      launch: How it was started.
      tally: What has come out of its pipes; those of earlier children are in there too.
      logs: Where warnings go.
      give_up: Ends the child for a fault.
    """

    def __init__(
        self,
        process: ChildProcess,
        launch: Launch,
        tally: Tally,
        logs: LogChannel,
        give_up: Callable[[ChildError], None],
    ) -> None:
        self._process = process
        self._launch = launch
        self._tally = tally
        self._before = tally.unexpected + tally.malformed + tally.oversize, tally.stderr_bytes
        self._logs = logs
        self._give_up = give_up
        self._stray = StrayRecords()
        self._stray_line = b""
        self._stray_found = trio.Event()
        self._first_record = trio.Event()
        self._ready = False
        self._closed = {"stdout": trio.Event(), "stderr": trio.Event()}
        self._closed_early = False
        self.refused = False
        self._server: int | None = None

    @property
    def is_shielded(self) -> bool:
        """Whether the process is a wrapper that waits for another one, which is the server."""
        return self._server not in (None, self._process.pid)

    # -- what comes out of the pipes ---------------------------------------------------------

    def see(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        """Look at a chunk of a pipe before anything is made of it; an empty one is its end."""
        if not data:
            # On Linux the open files tell, at the first record: the order of two pipes is nobody's.
            early = sys.platform != "linux" and not self._first_record.is_set()
            self._closed_early = self._closed_early or early
            self._closed[stream].set()
        elif stream == "stderr" and not self._first_record.is_set():
            self._see_early_log(data)

    def _see_early_log(self, data: bytes) -> None:
        line = self._stray.feed(data)
        if line is not None and not self._stray_line:
            self._stray_line = line
            self._stray_found.set()

    def admit(self, record: Record) -> Reservation | None:
        """Look at a record before it is told to anybody; `refused` says whether it may be.

        Returns:
          At the first READY, whether the child reserves its stdout.
        """
        first = not self._first_record.is_set()
        ready = isinstance(record, Ready) and not self._ready
        self._first_record.set()
        if self.refused or not (first or ready):
            return None
        self._ready = self._ready or ready
        look = self._look()
        self._server = look.server
        evidence = [look.evidence, self._banner() if first else None]
        if look.stderr_is_closed and not isinstance(record, Ready):
            evidence.append(closed_evidence("stderr"))
        if found := tuple(filter(None, evidence)):
            self._refuse(*found, culprit=self._command_of(look.culprit))
            return None
        return look.reservation if ready else None

    def _banner(self) -> str | None:
        unexpected, stderr = self._before
        tally = self._tally
        lines = tally.unexpected + tally.malformed + tally.oversize - unexpected
        # What the child wrote before its record is in the pipe, whether we have read it or not.
        if self._process.has_unread_stderr():
            return None
        return banner_evidence(lines, tally.stderr_bytes - stderr)

    # -- what the system tells ---------------------------------------------------------------

    if sys.platform == "linux":

        def _look(self) -> Look:
            process = self._process
            stdout, stderr = file_of(process.stdout.fileno()), file_of(process.stderr.fileno())
            return judge(find_members(process.pid), stdout, stderr)

        @staticmethod
        def _command_of(pid: int | None) -> tuple[str, ...]:
            return () if pid is None else command_of(pid)

        async def _outlives_its_pipe(self) -> None:
            while True:
                await trio.sleep(self._launch.bounds.closing)
                # One that ends closes its files first, and a driver may take its time with them.
                if not is_exiting(self._process.pid):
                    return

    else:

        def _look(self) -> Look:
            return Look(Reservation(None, f"what a process has open is not seen on {sys.platform}"))

        @staticmethod
        def _command_of(pid: int | None) -> tuple[str, ...]:
            return ()

        async def _outlives_its_pipe(self) -> None:
            await trio.sleep(self._launch.bounds.closing)

    # -- what only time tells ----------------------------------------------------------------

    @enable_ki_protection
    async def watch(self) -> None:
        """Look into what may mean something, until the child has ended.

        Cancellation: is how this ends.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_closing, "stdout")
            nursery.start_soon(self._watch_closing, "stderr")
            nursery.start_soon(self._watch_stray)

    @enable_ki_protection
    async def _watch_closing(self, stream: str) -> None:
        await self._closed[stream].wait()
        await self._outlives_its_pipe()
        if self._closed_early or not self._ready:
            self._refuse(closed_evidence(stream))
        elif stream == "stdout":
            message = "the child has closed its stdout: no record of it can come any more"
            self._give_up(StdoutClosed(message, stderr_tail=str(self._logs.tail)))
        else:
            self._logs.put("W the child has closed its stderr: nothing more of its log can come")

    @enable_ki_protection
    async def _watch_stray(self) -> None:
        await self._stray_found.wait()
        with trio.move_on_after(_STRAY):  # the pipes are read by two tasks, in any order
            await self._first_record.wait()
            return
        self._refuse(stray_evidence(self._stray_line))

    # -- the verdict -------------------------------------------------------------------------

    def _refuse(self, *evidence: str, culprit: tuple[str, ...] = ()) -> None:
        self.refused = True
        secrets = self._launch.secrets
        self._give_up(
            MergedStreams(
                "the child's stdout and stderr are not two separate streams",
                stderr_tail=str(self._logs.tail),
                evidence=tuple(redact(sentence, secrets, cut=True) for sentence in evidence),
                suggestion=suggest(
                    without_secrets(self._launch.command, secrets),
                    without_secrets(culprit, secrets),
                ),
            )
        )
