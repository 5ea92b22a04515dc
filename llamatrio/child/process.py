"""The life of one child process, from its spawn to its reaping: `run_child`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal, Protocol, TypeAlias

import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.child.evidence import Recording
from llamatrio.child.exits import Exit
from llamatrio.child.guard import Guard
from llamatrio.child.launch import Ladder, Launch
from llamatrio.child.logs import LogChannel
from llamatrio.child.pumps import ByteStream, Tally, pump_logs, pump_state
from llamatrio.child.verdict import Reservation
from llamatrio.errors import ChildError, NoHandshake, SpawnError, Unkillable
from llamatrio.wire.records import EXIT_LINE, Ready, Record

if sys.platform == "win32":
    from llamatrio.child.windows import ChildProcess, Descendants, spawn
else:
    from llamatrio.child.posix import ChildProcess, Descendants, spawn

_LOOK: Final = 1.0  # seconds that may be spent on looking for processes that were left
_SHELLS_SIGNALS: Final = range(129, 193)  # what a shell makes of a signal that ended its command

StreamName: TypeAlias = Literal["stdout", "stderr"]
Tap: TypeAlias = Callable[[StreamName, bytes], None]
"""Sees every chunk of a child's two pipes, before anything else does, and an empty one at the end
of each. It must not wait."""


class Listener(Protocol):
    """What `run_child` tells. None of these may wait."""

    def on_spawn(self, pid: int) -> None:
        """Take the number of the process."""

    def on_record(self, record: Record) -> None:
        """Take a record of the child's stdout.

        A `ChildError` that this raises is a fault of the child: it is ended for it.
        """

    def on_reserved(self, reservation: Reservation) -> None:
        """Take whether the child keeps its stdout for records; once, just before its READY."""

    def on_fault(self, fault: ChildError) -> None:
        """Take why the child is about to be ended, so that its connections can be closed."""

    def on_unexpected(self, data: bytes) -> None:
        """Take a line of the child's stdout that is no record. It means nothing."""

    def last_cut(self) -> float:
        """Say when a request's connection was last closed within its answer; -inf for never."""
        ...

    def on_exit(self, exit: Exit, fault: ChildError | None) -> None:
        """Take the end, once, after everything else: after the last record, after the reaping.

        Args:
          exit: How the process ended.
          fault: Why we ended it, if it was at fault: what `on_record` raised, no first record in
            time (`NoHandshake`), streams that are not apart (`MergedStreams`), no more records
            (`StdoutClosed`), or a process that did not die (`Unkillable`).
        """


@enable_ki_protection
async def run_child(
    launch: Launch,
    listener: Listener,
    logs: LogChannel,
    tally: Tally,
    tap: Tap | None = None,
    recording: Recording | None = None,
) -> None:
    """Run one child process to its end.

    Args:
      launch: What to start.
      listener: Is told what happens, in tasks of this call.
      logs: Takes the child's stderr, line by line. It stays open.
      tally: Where to count what comes out of the pipes.
      tap: Sees the bytes of both pipes as they come, before anything is made of them. What it
        raises is a fault of the child.
      recording: What is kept of both pipes, for those who ask later.

    Cancellation: ends the child, by the stop ladder. Requests that are open on its socket must be
    closed before, or it does not obey its exit line. The call returns when the process has been
    reaped, at the latest when every rung of the ladder has had its time.

    Raises:
      SpawnError: if the program cannot be executed. Nothing was started, and no callback called.
    """
    try:
        process = await spawn(launch)
    except (OSError, ValueError) as exc:  # the latter for a NUL in the command
        raise SpawnError(launch.command[0], getattr(exc, "strerror", None) or str(exc)) from exc
    child = _Child(process, launch, listener, logs, tally, tap, recording)
    try:
        await child.run()
    finally:
        end = child.describe_exit()
        del child.guard  # it leads back to the child, which would hold the process and the key
        listener.on_exit(end, child.fault)


class _Child:
    def __init__(
        self,
        process: ChildProcess,
        launch: Launch,
        listener: Listener,
        logs: LogChannel,
        tally: Tally,
        tap: Tap | None,
        recording: Recording | None,
    ) -> None:
        self.process = process
        self.launch = launch
        self.listener = listener
        self.logs = logs
        self.tally = tally
        self.tap = tap
        self.recording = recording
        self.fault: ChildError | None = None
        self.asked = False
        self.exited = False
        self.survivors: tuple[int, ...] = ()
        self.first_record = trio.Event()
        self.ready_at: float | None = None
        self.alive = trio.CancelScope()  # around the wait for the exit; a fault cancels it
        self.reading = trio.CancelScope(shield=True)
        self.drained = trio.Event()
        self.guard = Guard(process, launch, tally, logs, self.give_up)

    @enable_ki_protection
    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pump)
            nursery.start_soon(self.watch_handshake)
            nursery.start_soon(self.guard.watch)
            try:
                self.listener.on_spawn(self.process.pid)
                with self.alive:
                    await self.process.wait()
                    self.exited = True
            except trio.Cancelled:
                self.asked = True
                raise
            finally:
                with trio.CancelScope(shield=True):
                    await self.end()
                nursery.cancel_scope.cancel()

    @enable_ki_protection
    async def pump(self) -> None:
        """Read both pipes; shielded, so that the ladder does not stop the draining of stderr."""
        process, bounds = self.process, self.launch.bounds
        try:
            with self.reading:
                async with trio.open_nursery() as pumps:
                    pumps.start_soon(
                        pump_state,
                        self.tapped(process.stdout, "stdout"),
                        bounds.state_line,
                        self.tally,
                        self.take,
                        self.listener.on_unexpected,
                        self.launch.secrets,
                        self.recording,
                    )
                    pumps.start_soon(
                        pump_logs,
                        self.tapped(process.stderr, "stderr"),
                        bounds.log_line,
                        self.tally,
                        self.logs,
                        self.launch.secrets,
                        self.recording,
                    )
        except Exception as exc:  # noqa: BLE001 - the child cannot go on with nobody who reads
            self.give_up(_as_fault(exc))
        finally:
            self.drained.set()

    def tapped(self, stream: ByteStream, name: StreamName) -> ByteStream:
        return _Tapped(stream, name, self.see)

    def see(self, name: StreamName, data: bytes) -> None:
        if self.tap is not None:
            self.tap(name, data)
        self.guard.see(name, data)

    def take(self, record: Record) -> None:
        reservation = self.guard.admit(record)
        if self.guard.refused:  # whoever wrote this, it does not count
            return
        self.first_record.set()
        if isinstance(record, Ready) and self.ready_at is None:
            self.ready_at = trio.current_time()
        try:
            if reservation is not None:
                self.listener.on_reserved(reservation)
            self.listener.on_record(record)
        except Exception as exc:  # noqa: BLE001 - a fault of the child's, or of its listener
            self.give_up(_as_fault(exc))

    def give_up(self, fault: ChildError) -> None:
        if not self.exited:  # what is noticed afterwards is not why it ended
            self.asked = True
            self.fault = self.fault or fault
            self.listener.on_fault(self.fault)
            self.alive.cancel()

    @enable_ki_protection
    async def watch_handshake(self) -> None:
        seconds = self.launch.bounds.handshake
        with trio.move_on_after(seconds):
            await self.first_record.wait()
            return
        message = f"the child wrote no lifecycle record within {seconds:g} s"
        self.give_up(NoHandshake(message, stderr_tail=str(self.logs.tail)))

    async def end(self) -> None:
        """See the process to its end, whatever state it is in, and close everything."""
        descendants = self.process.descendants()
        try:
            if not self.exited:
                await climb_ladder(self.process, self.launch.ladder, self.quiet_since())
            # A child that ended by itself may have left others in its group; they are ours too.
            self.process.kill()
            self.process.reap()
            with trio.move_on_after(self.launch.bounds.drain):
                await self.process.wait_others(descendants)
                await self.drained.wait()
            if descendants or not self.drained.is_set():
                await self.look_for_survivors(descendants)
        finally:
            self.reading.cancel()
            await self.drained.wait()  # noqa: ASYNC102 - the caller shields, and it comes at once
            self.process.close()
        if self.process.returncode is None:
            self.fault = Unkillable(f"process {self.process.pid} survived SIGKILL")

    async def look_for_survivors(self, descendants: Descendants) -> None:
        # Others may hold all threads, and the end has to be told. A limiter of our own.
        with suppress(RuntimeError), trio.move_on_after(_LOOK):  # no thread can be started
            self.survivors = await trio.to_thread.run_sync(
                self.process.survivors,
                descendants,
                abandon_on_cancel=True,
                limiter=trio.CapacityLimiter(1),
            )
        if self.survivors:
            who = ", ".join(map(str, self.survivors))
            self.logs.put(f"W the child has left processes behind, out of reach: {who}")

    def quiet_since(self) -> float | None:
        if self.ready_at is None:
            return None
        return max(self.ready_at, self.listener.last_cut())

    def describe_exit(self) -> Exit:
        code = self.process.returncode
        name = _signal_name(-code) if code is not None and code < 0 else None
        if code is not None and code in _SHELLS_SIGNALS and self.guard.is_shielded:
            name = _signal_name(code - 128)
        ready = self.ready_at is not None
        tail = str(self.logs.tail)
        return Exit(self.process.pid, code, name, self.asked, ready, tail, self.survivors)


class _Tapped:
    """The reading end of a pipe, whose bytes somebody else sees first."""

    def __init__(self, stream: ByteStream, name: StreamName, tap: Tap) -> None:
        self._stream = stream
        self._name: StreamName = name
        self._tap = tap

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self._stream.receive_some(max_bytes)
        self._tap(self._name, bytes(data))
        return data


def _as_fault(error: Exception) -> ChildError:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ChildError):
        return error
    fault = ChildError(f"what the child said could not be taken: {error!r}")
    fault.__cause__ = error
    return fault


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


async def climb_ladder(process: ChildProcess, times: Ladder, quiet_since: float | None) -> None:
    """End a process, asking first.

    A child reads its stdin only once the model is loaded; before that, SIGTERM is safe and acts at
    once, since llama.cpp installs its handlers after the load. Afterwards SIGTERM alone does not
    end it while its stdin is open (b11434, tools/server/server.cpp: main joins the thread that
    reads stdin), and an exit line alone may be lost. Stdin is therefore closed with the first word.

    Args:
      process: What to end.
      times: The deadline of each rung.
      quiet_since: When the child was ready, and no connection of it was cut any more, on Trio's
        clock; None while the model is loading.

    Cancellation: must not happen; the caller shields.
    """
    if quiet_since is None:
        process.terminate()
        process.close_stdin()
        if await _ended(process, times.terminate_loading):
            return
    else:
        if await _ended(process, quiet_since + times.settle - trio.current_time()):
            return
        await process.write_stdin(EXIT_LINE)
        process.close_stdin()
        if await _ended(process, times.exit):
            return
        process.terminate()
        if await _ended(process, times.terminate):
            return
    process.kill()
    await _ended(process, times.kill)


async def _ended(process: ChildProcess, seconds: float) -> bool:
    """Wait for the end of a process, but not for ever; say whether it came."""
    if seconds > 0:
        with trio.move_on_after(seconds):
            await process.wait()
            return True
    return False
