"""Where the calls of native code run.

A library may want every call for a model on the one thread that loaded it; Metal has been such a
case. That is a constraint of a backend, and shows nowhere else: a session calls a `Dispatcher`, and
whatever comes back comes back into Trio.
"""

from __future__ import annotations

import queue
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeAlias, TypeVar

import trio
from trio.lowlevel import enable_ki_protection

_T = TypeVar("_T")
_Job: TypeAlias = Callable[[], None]


class Dispatcher(ABC):
    """Runs native calls, one after another."""

    @abstractmethod
    def open(self) -> None:
        """Make ready for calls. Whoever opens it closes it."""

    @abstractmethod
    def close(self) -> None:
        """Give back what `open` took. No call is going on."""

    @abstractmethod
    def post(self, job: _Job) -> None:
        """Have a job run, elsewhere and soon. It raises nothing."""

    @enable_ki_protection
    async def call(
        self, function: Callable[[], _T], interrupt: Callable[[], None] | None = None
    ) -> _T:
        """Run a native call, and return what it returns, or raise what it raises.

        Args:
          function: The call.
          interrupt: Asks the call to come to an end soon. It runs while the call does.

        Cancellation: interrupts the call, and then waits until it has returned: what it works on
        is never left to it. What it returns or raises is lost then.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        call = _Call(function)
        self.post(call.run)
        try:
            await call.done.wait()
        except trio.Cancelled:
            if interrupt is not None:
                interrupt()
            with trio.CancelScope(shield=True):
                await call.done.wait()
            raise
        return call.result()


class _Call(Generic[_T]):
    """A function whose result comes back to Trio."""

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function = function
        self._token = trio.lowlevel.current_trio_token()
        self._results: list[_T] = []
        self._error: BaseException | None = None
        self.done = trio.Event()

    def run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as exc:  # noqa: ASYNC103, BLE001 - raised where the result is wanted
            self._error = exc
        self._token.run_sync_soon(self.done.set)

    def result(self) -> _T:
        if self._error is not None:
            raise self._error
        [result] = self._results
        return result


class OwnerThread(Dispatcher):
    """One thread of its own for all calls, from `open` to `close`.

    Args:
      name: The name of the thread, for debuggers.
    """

    def __init__(self, name: str = "llamatrio-model") -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Start the thread."""
        assert self._thread is None, "it is open"
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, which is idle, and join it."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def post(self, job: _Job) -> None:
        """Have a job run on the thread."""
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class HostThread(Dispatcher):
    """The main thread of the application.

    Either Trio runs in another one, which `run` sees to; or Trio is the guest of another loop
    (`trio.lowlevel.start_guest_run`), which is then handed the calls. As a guest, Trio waits while
    a call goes on, like everything else of that loop.

    ::

        host = HostThread()
        host.run(main, host)        # in place of trio.run(main, host)

    Args:
      post: For a guest: has a function called soon by the other loop, from whatever thread this is
        called; what `start_guest_run` knows as `run_sync_soon_threadsafe`.
    """

    def __init__(self, post: Callable[[_Job], object] | None = None) -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._deliver = post if post is not None else self._queue.put
        self._serving = post is not None

    def open(self) -> None:
        """Check that somebody serves the calls."""
        if not self._serving:
            raise RuntimeError("nobody serves the calls: run the program by HostThread.run")

    def close(self) -> None:
        """Do nothing: the thread is the application's."""

    def post(self, job: _Job) -> None:
        """Have a job run on the main thread."""
        self._deliver(job)

    def run(self, function: Callable[..., Awaitable[_T]], *args: object) -> _T:
        """Run a Trio program, and its native calls here, until it has ended; return its result.

        Ctrl-C cancels the program, and is raised when it has ended.

        Raises:
          Exception: what the program raised.
        """
        program = _Program(function, args, self._queue.put)
        thread = threading.Thread(target=program.run, name="trio", daemon=True)
        self._serving = True
        try:
            with _interrupting(program.cancel) as interrupted:
                thread.start()
                while (job := self._queue.get()) is not None:
                    job()
                thread.join()
        finally:
            self._serving = False
        if interrupted:
            raise KeyboardInterrupt
        return program.result()


@contextmanager
def _interrupting(cancel: Callable[[], None]) -> Iterator[list[int]]:
    """Let Ctrl-C cancel, and be noted, where it would raise KeyboardInterrupt at any place."""
    interrupts: list[int] = []

    def note(number: int, _: object) -> None:
        interrupts.append(number)
        cancel()

    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Program(Generic[_T]):
    """A Trio program in a thread of its own."""

    def __init__(
        self,
        function: Callable[..., Awaitable[_T]],
        args: tuple[object, ...],
        done: Callable[[None], object],
    ) -> None:
        self._function = function
        self._args = args
        self._done = done
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._results: list[_T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as exc:  # noqa: ASYNC103, BLE001 - raised where the program was started
            self._error = exc
        self._done(None)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            self._results.append(await self._function(*self._args))

    def cancel(self) -> None:
        """Let it come to its end, from a signal handler on the main thread."""
        if self._token is None:
            self._scope.cancel()  # it has not begun
            return
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._scope.cancel)

    def result(self) -> _T:
        if self._error is not None:
            raise self._error
        [result] = self._results
        return result


class Roaming(Dispatcher):
    """Never twice in a row the same thread. Hostile on purpose: it shows who relies on one."""

    def __init__(self) -> None:
        self._threads = deque(OwnerThread(f"llamatrio-roaming-{number}") for number in range(3))

    def open(self) -> None:
        """Start the threads: they all live, so that no two of them have one identifier."""
        for thread in self._threads:
            thread.open()

    def close(self) -> None:
        """End the threads, which are idle, and join them."""
        for thread in self._threads:
            thread.close()

    def post(self, job: _Job) -> None:
        """Have a job run on the thread that was idle the longest."""
        self._threads[0].post(job)
        self._threads.rotate()


class HandOver(Generic[_T]):
    """Takes what native code says in its callbacks into Trio. It never waits, and is bounded.

    Args:
      take: Is given each value, in order, on the Trio side.
      bound: How many may wait. Beyond that the newest takes the place of the one before it, so that
        the last word is never lost.

    Attributes:
      merged: How many values were lost to a newer one.
    """

    def __init__(self, take: Callable[[_T], None], bound: int = 1000) -> None:
        self._take = take
        self._bound = bound
        self._values: deque[_T] = deque()
        self._lock = threading.Lock()
        self._token = trio.lowlevel.current_trio_token()
        self._told = False
        self.merged = 0

    def put(self, value: _T) -> None:
        """Hand a value over, from any thread."""
        with self._lock:
            if len(self._values) >= self._bound:
                self._values.pop()
                self.merged += 1
            self._values.append(value)
            told, self._told = self._told, True
        if not told:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self.flush)

    def flush(self) -> None:
        """Give everything that waits to `take`, at once; on the Trio side."""
        with self._lock:
            values, self._values = self._values, deque()
            self._told = False
        for value in values:
            self._take(value)
