"""Writes black boxes: one file for each model that was lost."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.errors import ChildError
from llamatrio.lifecycle.blackbox import Box, build
from llamatrio.lifecycle.diagnostics import Counters
from llamatrio.lifecycle.journal import Entry, Journal
from llamatrio.lifecycle.phases import Event, Phase
from llamatrio.session.base import Backend, Ended

MAX_FILES: Final = 32
"""Black boxes that are kept in one directory; older ones are removed when another is written."""

_PATIENCE: Final = 1.0  # seconds that a slow disk may hold up the news
_SUFFIX: Final = ".llamatrio-box.json"
_logger: Final = logging.getLogger("llamatrio.lifecycle")


@attrs.frozen
class Draft:
    """A black box that is to be written.

    Attributes:
      name: The file's name.
      box: What it holds.
    """

    name: str
    box: Box


class Recorder:
    """Keeps the journal of one provider, and writes a black box of each abnormal end.

    Attributes:
      directory: Where to write; None for nowhere. It is made if it is not there.
      journal: The last steps of the lifecycle.
      written: The last file that was written, or None.
    """

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.journal = Journal()
        self.written: Path | None = None
        self._began: float | None = None
        self._draft: Draft | None = None  # of an end about which nothing is decided yet

    def note(self, old: Phase, event: Event, new: Phase, generation: int) -> None:
        """Note a step of the lifecycle."""
        now = trio.current_time()
        self._began = now if self._began is None else self._began
        self.journal.add(Entry(round(now - self._began, 6), old, event, new, generation))

    def take(
        self, end: Ended, generation: int, backend: Backend, counters: Counters
    ) -> Draft | None:
        """Take what there is to say of an end; None if it is not to be written down.

        It is if a process was lost: not if it was unloaded, nor if none could be started.
        """
        self._draft = None
        lost = isinstance(end.error, ChildError) and end.exit is not None
        if self.directory is None or not lost:
            return None
        now = datetime.now(UTC)
        # The token keeps providers of one process, and processes with one number, apart.
        token = secrets.token_hex(4)
        name = f"{now:%Y%m%dT%H%M%SZ}-{os.getpid()}-{generation}-{token}{_SUFFIX}"
        try:
            self._draft = Draft(name, _describe(end, generation, backend, counters, now))
        except Exception:  # of a backend of yours; the end has to be told all the same
            _logger.exception("no black box in %s", self.directory)
            return None
        return self._with_journal(self._draft)

    def decide(self) -> Draft | None:
        """Return the same once more, with what was decided upon that end; None if it is not to be
        written down."""
        draft, self._draft = self._draft, None
        return draft and self._with_journal(draft)

    def _with_journal(self, draft: Draft) -> Draft:
        steps, dropped = self.journal.entries, self.journal.dropped
        box = attrs.evolve(draft.box, steps=steps, dropped_steps=dropped)
        return attrs.evolve(draft, box=box)

    @enable_ki_protection
    async def write(self, draft: Draft) -> None:
        """Write a black box, in the place of an earlier one of this name.

        Whatever goes wrong is logged: nothing else depends on it.

        Cancellation: leaves the writing to its thread.
        """
        assert self.directory is not None
        with trio.move_on_after(_PATIENCE):
            try:
                path = await trio.to_thread.run_sync(
                    _write, self.directory, draft, abandon_on_cancel=True
                )
            except RuntimeError:  # no thread can be started
                return
            self.written = path or self.written


def _describe(
    end: Ended, generation: int, backend: Backend, counters: Counters, now: datetime
) -> Box:
    error, process, manifest = end.error, end.exit, backend.manifest
    assert isinstance(error, ChildError)
    return Box(
        written=now.isoformat(timespec="milliseconds"),
        generation=generation,
        error=(type(error).__name__, str(error)),
        exit=attrs.asdict(process, filter=lambda field, _: field.name != "tail")
        if process
        else None,
        log=error.stderr_tail or (process.tail if process else ""),
        manifest=manifest.to_json() if manifest else None,
        evidence=tuple(attrs.asdict(piece) for piece in backend.evidence),
        state=backend.state_channel,
        counters=attrs.asdict(counters),
        pipes=attrs.asdict(backend.tally),
    )


def _write(directory: Path, draft: Draft) -> Path | None:
    """Write one file whole or not at all, in a thread."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _replace(directory, draft.name, build(draft.box))
        _remove_old(directory)
    except OSError as exc:
        _logger.warning("no black box in %s: %s", directory, exc)
    except Exception:
        _logger.exception("no black box in %s", directory)
    else:
        return directory / draft.name
    return None


def _replace(directory: Path, name: str, data: bytes) -> None:
    new = directory / f".{name}.{secrets.token_hex(4)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(new, flags, 0o600), "wb") as file:
            file.write(data)
        os.replace(new, directory / name)
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise


def _remove_old(directory: Path) -> None:
    # The names begin with the time.
    for old in sorted(directory.glob(f"*{_SUFFIX}"))[:-MAX_FILES]:
        with suppress(OSError):
            old.unlink()
