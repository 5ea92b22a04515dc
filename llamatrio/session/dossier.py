"""What is known of a backend's children: with what each was started, and what was wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.child.evidence import EvidenceRing, Recording
from llamatrio.child.launch import Hosted, Kind, Launch, Own, Stock
from llamatrio.child.manifest import (
    Manifest,
    Role,
    describe_file,
    find_dangers,
    look_again,
    observe,
    take_manifest,
)
from llamatrio.config import ModelConfig, parts
from llamatrio.errors import LlamatrioError, ModelFileError, SpawnError
from llamatrio.requests import Request
from llamatrio.session.base import ModelSession
from llamatrio.session.identity import Digests, Identity
from llamatrio.session.programs import wheel_libraries

HOST_PROGRAM: Final = str(Path(__file__).parent.parent / "child" / "host.py")
"""The script that a hosted child runs."""

_MODEL_ROLES: Final[tuple[Role, ...]] = (
    "model", "model part", "draft model", "projector", "adapter",
)  # fmt: skip
_PATIENCE: Final = 5.0  # seconds that a model has for saying what it is


class Dossier:
    """Keeps the manifest and the recording of the present or last child, and all evidence.

    Args:
      digests: Who computes hashes.
      strict: Whether to refuse files that everybody may change, and not only warn of them.

    Attributes:
      manifest: With what the child was started; None before the first.
      recording: What is kept of its pipes.
      evidence: What was wrong with all of them.
    """

    def __init__(self, digests: Digests, *, strict: bool = False) -> None:
        self._digests = digests
        self._strict = strict
        self._warned: tuple[str, ...] = ()
        self.manifest: Manifest | None = None
        self.recording = Recording()
        self.evidence = EvidenceRing()

    def check_files(self, kind: Kind, config: ModelConfig, program: str) -> None:
        """Refuse files that everybody on this machine may change, where that is asked for.

        It is by the option `strict_files`, and of the files of a model by a hash that pins it: who
        gives one does not want to be told afterwards.

        Raises:
          ModelFileError: if it is a file of the model.
          SpawnError: if it is a part of the program.
        """
        if not self._strict and config.sha256 is None:
            return
        for role, path in components(kind, config, program):
            of_model = role in _MODEL_ROLES
            if not of_model and not self._strict:
                continue
            for danger in find_dangers([describe_file(role, path)]):
                if of_model:
                    raise ModelFileError(path, danger)
                raise SpawnError(path, danger)

    @enable_ki_protection
    async def open(
        self,
        kind: Kind,
        config: ModelConfig,
        launch: Launch,
        address: str,
        pinned: Identity | None = None,
    ) -> None:
        """Begin with a child that is about to be started.

        Args:
          kind: What kind of child.
          config: What it is to load.
          launch: How it is started.
          address: Where it is to listen.
          pinned: The file whose hash is known to be that of the configuration.

        Cancellation: nothing is begun.
        """
        hashes = {pinned.path: config.sha256} if pinned and config.sha256 else {}

        def take() -> Manifest:
            program = launch.command[0]
            files = [*_launcher(launch), *components(kind, config, program)]
            return take_manifest(_WORDS[type(kind)], launch, files, address=address, hashes=hashes)

        self.manifest = await trio.to_thread.run_sync(take)  # for the files
        self.recording = Recording(self.evidence, launch.secrets, launch.bounds.state_line)

    def on_spawn(self, pid: int) -> None:
        """Take the number of the process."""
        self.recording.pid = pid
        self._observe(pid)

    def on_ready(self) -> None:
        """Look at the process once more: a launcher has become the program by now."""
        if self.recording.pid is not None:
            self._observe(self.recording.pid)

    def on_reserved(self, reserved: bool | None, reason: str) -> None:
        """Take what was found out about the child's stdout."""
        if self.manifest is not None:
            self.manifest = attrs.evolve(self.manifest, reserved=reserved, reserved_reason=reason)

    @enable_ki_protection
    async def examine(self, session: ModelSession | None) -> Manifest | None:
        """Look at everything again, hash every file, and ask the model for its build.

        Args:
          session: The way to speak to the model; None if it is not to be asked.

        Cancellation: nothing is changed; a file that is being hashed is left at the next chunk.
        """
        build = None if session is None else await _ask_build(session)
        seen = self.manifest
        if seen is None:
            await trio.lowlevel.checkpoint()
            return None
        again = await trio.to_thread.run_sync(look_again, seen, self._digests.of_path)
        if build is not None:
            again = attrs.evolve(again, build=build)
        if self.manifest is seen:  # else another child was started meanwhile
            self.manifest = again
        return again

    def _observe(self, pid: int) -> None:
        if self.manifest is not None:
            self.manifest = observe(self.manifest, pid)

    def new_warnings(self) -> tuple[str, ...]:
        """Return the warnings of the manifest, if they are not those of the child before."""
        warnings = self.manifest.warnings if self.manifest else ()
        told, self._warned = self._warned, warnings
        return () if warnings == told else warnings


_WORDS: Final[dict[type[Kind], Literal["hosted", "stock", "own"]]] = {
    Hosted: "hosted",
    Stock: "stock",
    Own: "own",
}


def components(kind: Kind, config: ModelConfig, program: str) -> Iterator[tuple[Role, str]]:
    """Name the files that a child is made of, the program first, as far as they are known before
    it is started."""
    yield "program", program
    if isinstance(kind, Hosted):
        yield "script", HOST_PROGRAM
        if program == sys.executable:
            for path in wheel_libraries():
                yield "engine", path
    named: list[tuple[Role, str | None]] = [
        ("model", config.model),
        ("draft model", config.draft_model),
        ("projector", config.mmproj),
        *(("adapter", lora.path) for lora in config.lora),
    ]
    for role, given in named:
        if given is not None:
            yield role, given
            for part in parts(given)[1:]:
                yield "model part", part


def _launcher(launch: Launch) -> Iterator[tuple[Role, str]]:
    if launch.wrapper:
        yield "launcher", launch.wrapper[0]


async def _ask_build(session: ModelSession) -> str | None:
    """Ask a llama-server for its build, as it calls it: often it does not know."""
    with trio.move_on_after(_PATIENCE):
        try:
            answer = await session.perform(Request("/props", method="GET"), lambda _: None)
        except LlamatrioError:
            return None
        body = answer.body
        build = body.get("build_info") if isinstance(body, dict) else None
        return build if isinstance(build, str) else None
    return None
