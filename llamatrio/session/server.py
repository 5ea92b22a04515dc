"""A model in a child that serves HTTP: llama-server, hosted or stock, or a program of your own."""

from __future__ import annotations

import logging
import math
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final, Literal, TypeAlias

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.child.console import LogColors, check_log_colors, wants_colors
from llamatrio.child.cpu import cpu_hundredths
from llamatrio.child.evidence import Evidence, State
from llamatrio.child.exits import Exit
from llamatrio.child.isolation import Isolation, Launcher, Network
from llamatrio.child.launch import (
    Address,
    Bounds,
    Hosted,
    Kind,
    Ladder,
    Launch,
    check,
    plan,
)
from llamatrio.child.launcher import check_network, choose_launcher
from llamatrio.child.logs import BackendLog, LogChannel, LogWatch
from llamatrio.child.manifest import Manifest
from llamatrio.child.process import Tap, run_child
from llamatrio.child.pumps import Tally
from llamatrio.child.verdict import Reservation
from llamatrio.config import ModelConfig
from llamatrio.errors import (
    ChildDied,
    ChildError,
    ForeignServer,
    LoadFailed,
    ModelChanged,
    ModelFileError,
    SpawnError,
    SpecificationError,
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
from llamatrio.session.dossier import HOST_PROGRAM, Dossier
from llamatrio.session.http import HttpSession, is_ours
from llamatrio.session.identity import (
    Digests,
    Guard,
    Identity,
    absolute,
    check_gguf,
    files_of,
    take_identity,
)
from llamatrio.session.programs import find_program
from llamatrio.session.sockets import loopback_address, private_address
from llamatrio.wire.records import Downloading, Loading, Ready, Record, Sleeping, Unknown
from llamatrio.wire.redaction import Secrets, redact, redact_value

Transport: TypeAlias = Literal["unix", "tcp"]

_PORTS: Final = 3  # loopback ports that are tried: another may take one between choice and use
_QUIET: Final = 1.0  # seconds for which further unexpected lines are only counted


class ServerBackend(Backend):
    """Runs a model in a child process.

    Args:
      kind: What kind of child.
      name: The logger of the child is `llamatrio.child.` and this.
      runtime_dir: Where the directory with the child's socket is made; None for the usual place
        for temporary files.
      ladder: How the child is ended.
      bounds: What it may cost.
      network: Which network the child has: "none", or that of the "host"; "auto" for none where
        the system allows it and the child has no use for one (see `isolation`).
      strict_files: Whether to refuse a program, or a file of the model, that everybody on this
        machine may change. Otherwise that is a warning; of the model's files it is refused all the
        same if `ModelConfig.sha256` pins it.
      tap: Sees every chunk of the child's two pipes, as it was written and before anything is made
        of it. Called on the Trio thread; it must not wait.
      transport: How it is spoken to: over a "unix" socket, which nobody else can reach, or over
        "tcp", at a loopback port that the key guards; None for the former where there is one.
      log_colors: Whether the child's log has colours, and keeps them on its way to the logger; a
        log without them is never dyed. "auto" for what our stderr and the environment say.
    """

    def __init__(
        self,
        kind: Kind | None = None,
        *,
        name: str = "model",
        runtime_dir: str | os.PathLike[str] | None = None,
        ladder: Ladder | None = None,
        bounds: Bounds | None = None,
        network: Network = "auto",
        strict_files: bool = False,
        tap: Tap | None = None,
        transport: Transport | None = None,
        log_colors: LogColors = False,
    ) -> None:
        check_network(network)
        self._kind = kind if kind is not None else Hosted()
        self._log = BackendLog(logging.getLogger(f"llamatrio.child.{name}"))
        self._runtime_dir = None if runtime_dir is None else os.fspath(runtime_dir)
        self._ladder = ladder or Ladder()
        self._bounds = bounds or Bounds()
        self._network: Network = network
        self._tcp = _choose_tcp(transport, network)
        self._tap = tap
        check_log_colors(log_colors)
        self._log_colors: LogColors = log_colors
        self._isolation: Isolation | None = None
        self._tally = Tally()
        self._digests = Digests()
        self._dossier = Dossier(self._digests, strict=strict_files)
        self._pid: int | None = None
        self._at_fault = False  # whether the child is being ended for something it did
        self._reservation: Reservation | None = None
        self._session: HttpSession | None = None  # while the model is loaded and awake

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
    def manifest(self) -> Manifest | None:
        """With what the present or last child was started; None before the first."""
        return self._dossier.manifest

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """What was wrong on the pipes of all children so far: the last pieces of it."""
        return self._dossier.evidence.pieces

    @property
    def state_channel(self) -> State:
        """The end of what the present or last child wrote on stdout."""
        return self._dossier.recording.state()

    @enable_ki_protection
    async def examine(self) -> Manifest | None:
        """Look at everything in the manifest again, hash all files, and ask the child its build.

        Returns:
          The manifest, which from now on is this; None before the first child.

        Cancellation: abandons it; the old manifest stays.
        """
        return await self._dossier.examine(self._session)

    @property
    def isolation(self) -> Isolation | None:
        """What the present or last child is kept from; None before the first."""
        return self._isolation

    @property
    def stdout_reserved(self) -> bool | None:
        """Whether the present or last child reserves its stdout; None if that is not known."""
        return self._reservation.reserved if self._reservation else None

    @property
    def reservation(self) -> Reservation | None:
        """Whether the present or last child reserves its stdout; None until its first READY."""
        return self._reservation

    @property
    def log_tail(self) -> str:
        """The last lines of the present child's log; empty if there is none."""
        return self._log.tail

    @property
    def dropped_log_lines(self) -> int:
        """Log lines that were lost because handlers of the logger were too slow."""
        return self._log.dropped

    def watch_logs(self, lines: int) -> LogWatch:
        """Return what gives all lines of the log that follow, of one child after another."""
        return self._log.watch(lines)

    def end_logs(self) -> None:
        """Let those who watch the log come to an end."""
        self._log.end()

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

        Cancellation: takes effect when the files were looked at, or between two parts of one that
        is hashed.
        """
        await self._inspect(config)
        await self._isolate(config, find_program(self._kind), config.env)

    async def _isolate(
        self, config: ModelConfig, program: str, names: Iterable[str]
    ) -> tuple[Launcher, Isolation]:
        choose = partial(choose_launcher, program=program, names=tuple(names))
        network: Network = "host" if self._tcp else self._network
        launcher, isolation = await trio.to_thread.run_sync(choose, network, self._kind, config)
        if self._tcp and sys.platform == "linux":
            isolation = attrs.evolve(isolation, reason="it is spoken to over TCP")
        return launcher, isolation

    async def _inspect(self, config: ModelConfig) -> tuple[Identity, ...]:
        files = await trio.to_thread.run_sync(self._look_at_files, config)
        if config.model is not None and config.sha256 is not None:
            await self._check_digest(config.model, files[0], config.sha256)
        return files

    def _look_at_files(self, config: ModelConfig) -> tuple[Identity, ...]:
        """Look at all of them, in a thread: a disk may take its time."""
        program = find_program(self._kind)
        files = take_identity(config)
        self._dossier.check_files(self._kind, config, program)
        for path in files_of(config):
            check_gguf(path)
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
        tries = _PORTS if self._tcp else 1
        while not await self._live(files, config, publish, last=tries == 1):
            tries -= 1

    async def _live(
        self, files: tuple[Identity, ...], config: ModelConfig, publish: Publish, *, last: bool
    ) -> bool:
        """Run one child. Unless it is the last, its end is not told if its port was taken.

        Returns:
          Whether the end has been told.
        """
        ends: list[Ended] = []
        with ExitStack() as place:
            address = place.enter_context(
                loopback_address() if self._tcp else private_address(self._runtime_dir)
            )
            key = secrets.token_hex(32)
            launch = await self._wrap(config, self._plan(absolute(config), address, key))
            pinned = files[0] if files else None
            await self._dossier.open(self._kind, config, launch, str(address), pinned)

            def publish_end(end: Ended) -> None:
                place.close()  # before anybody learns of the end
                if last or not told.port_was_taken(end):
                    ends.append(end)
                    publish(end)

            guard = Guard(files, config.sha256, self._digests)
            told = _Translator(self, guard, config, publish, publish_end, launch.secrets)
            told.session = HttpSession(address, key, told.check, launch.secrets)
            if self._tcp:
                told.prove = partial(is_ours, address, key)
            await self._run_child(launch, told)
        return bool(ends)

    def _plan(self, config: ModelConfig, address: Address, key: str) -> Launch:
        launch = plan(
            self._kind,
            config,
            program=find_program(self._kind),
            host_program=HOST_PROGRAM,
            address=address,
            key=key,
            environ=os.environ,
            log_colors=wants_colors(self._log_colors),
        )
        bounds = self._bounds
        if config.model is None:
            bounds = attrs.evolve(bounds, handshake=math.inf)
        return attrs.evolve(launch, ladder=self._ladder, bounds=bounds)

    async def _wrap(self, config: ModelConfig, launch: Launch) -> Launch:
        launcher, isolation = await self._isolate(config, launch.command[0], launch.environ)
        self._isolation = isolation
        environ = launch.environ
        if isinstance(self._kind, Hosted):
            environ = {**environ, "LLAMATRIO_PARENT": str(os.getpid())}
        return attrs.evolve(launch, environ=environ, wrapper=launcher.wrapper, isolation=isolation)

    async def _run_child(self, launch: Launch, listener: _Translator) -> None:
        bounds, colors = launch.bounds, wants_colors(self._log_colors)
        logs = self._log.open(bounds.log_lines, bounds.tail, colors=colors)
        failure: SpawnError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._log.forward, logs)
            listener.logs = logs
            for warning in self._dossier.new_warnings():
                logs.remark(f"W {warning}")
            try:
                with listener.alive:
                    await run_child(
                        launch, listener, logs, self._tally, self._tap, self._dossier.recording
                    )
            except SpawnError as exc:
                failure = exc  # raised below, bare
            finally:
                self._log.close()
        if failure is not None:
            raise failure


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
        self._secrets = Secrets(secrets)
        self._opened = False
        self._fault: ChildError | None = None
        self._unexpected = 0  # lines on stdout since the last that was told
        self._quiet_until = -math.inf
        self._spoke = False
        self.prove: Callable[[], Awaitable[bool]] | None = None  # asks who is at the child's port
        self.alive = trio.CancelScope()  # around the child; a fault that a request finds cancels it

    async def check(self) -> None:
        """Refuse a model that has changed while it slept, or a stranger; end the child for it."""
        try:
            await self._guard.check()
            await self._check_server()
        except (ModelChanged, ForeignServer) as exc:
            self._fault = exc
            self.session.break_off(exc)
            self.alive.cancel()
            raise

    async def _check_server(self) -> None:
        # Where two programs can listen at one port, the child is ready and another one answers:
        # https://github.com/ggml-org/llama.cpp/issues/26822
        if self.prove is not None and not await self.prove():
            raise ForeignServer("another program answers at the port of the child")
        self.prove = None

    def port_was_taken(self, end: Ended) -> bool:
        """Say whether that may be why the child ended: with a code, and before its first record.

        (b11434 ends with 1 then, within milliseconds.) A unix socket has a name of its own.
        """
        refused = end.exit is not None and (end.exit.returncode or 0) > 0 and not end.exit.asked
        return refused and not self._spoke

    def on_spawn(self, pid: int) -> None:
        self._backend._pid = pid  # noqa: SLF001 - one class in two parts
        self._backend._at_fault = False  # noqa: SLF001
        self._backend._reservation = None  # noqa: SLF001
        self._backend._dossier.on_spawn(pid)  # noqa: SLF001

    @contextmanager
    def _breaking_off(self) -> Iterator[None]:
        """Close the connections of a child that is about to be ended for what it says."""
        try:
            yield
        except ChildError as fault:
            self.session.break_off(fault)
            raise

    def on_record(self, record: Record) -> None:
        self._spoke = True
        with self._breaking_off():
            self._guard.on_record(record)
            self._tell(record)

    def _tell(self, record: Record) -> None:
        match record:
            case Loading():
                stage = record.stage and redact(record.stage, self._secrets)
                stages = tuple(redact(one, self._secrets) for one in record.stages)
                self._publish(LoadProgress(record.value, stage, stages))
            case Downloading():
                share = record.downloaded / record.total if record.total > 0 else None
                self._publish(LoadProgress(share, "download", ("download",)))
            case Ready():
                self._on_ready(record)
            case Sleeping():
                self._backend._session = None  # noqa: SLF001 - one class in two parts
                self._publish(Asleep())
            case Unknown():
                state = redact(record.state, self._secrets)[:200]
                self.logs.put(f"W unknown state {state!r}: it changes nothing")

    def _on_ready(self, record: Ready) -> None:
        if record.info is not None:  # null after sleep: what we know stays true
            info = redact_value(dict(record.info), self._secrets)
            assert isinstance(info, dict)
            self.session.learn(info)
        self._backend._session = self.session  # noqa: SLF001 - one class in two parts
        if self._opened:
            self._publish(Awake())
        else:
            self._opened = True
            self._backend._dossier.on_ready()  # noqa: SLF001
            self._publish(Opened(self.session))

    def on_reserved(self, reservation: Reservation) -> None:
        self._backend._reservation = reservation  # noqa: SLF001 - one class in two parts
        self._backend._dossier.on_reserved(reservation.reserved, reservation.reason)  # noqa: SLF001
        if reservation.reserved is False:
            self.logs.remark(f"W the child does not reserve its stdout: {reservation.reason}")

    def on_fault(self, fault: ChildError) -> None:
        self._backend._at_fault = True  # noqa: SLF001 - one class in two parts
        self.session.break_off(fault)

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
        self._backend._pid = self._backend._session = None  # noqa: SLF001 - one class in two parts
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


def _choose_tcp(transport: Transport | None, network: Network) -> bool:
    if transport not in (None, "unix", "tcp"):
        raise SpecificationError(f'transport is "unix" or "tcp", not {transport!r}')
    if transport == "unix" and sys.platform == "win32":
        raise SpecificationError("the Python of Windows has no unix sockets")
    tcp = transport == "tcp" or sys.platform == "win32"
    if tcp and network == "none":
        raise SpecificationError("a child without a network cannot be reached over TCP")
    return tcp
