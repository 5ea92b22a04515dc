"""What a child was started with: its program, its files, its command, and the process that it is.

A manifest says what was run, so that it can be told afterwards, and told apart. It holds no secret:
of the environment it has the names alone. A hash proves that a file is the same, not that it is
safe; and what a program reports as its build is noted as it stands, and never concluded from.
"""

from __future__ import annotations

import os
import platform
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

import attrs

from llamatrio.child.isolation import Isolation
from llamatrio.child.launch import Launch
from llamatrio.wire.records import PREFIX
from llamatrio.wire.redaction import Secrets, redact

if sys.platform == "linux":
    from llamatrio.child.procfs import mapped_files, read_process

Role: TypeAlias = Literal[
    "program", "script", "engine", "launcher", "library",
    "model", "model part", "draft model", "projector", "adapter",
]  # fmt: skip
"""What a file is to a child: its program, the script that an interpreter runs, what computes, what
runs the program in its own place, what else was found in its memory, and what it has to load."""

Digest: TypeAlias = Callable[[str], str]
"""Computes the SHA-256 of a file, or raises `OSError`."""


@attrs.frozen
class FileRecord:
    """One file, as it was when it was looked at.

    Attributes:
      role: What it is to the child.
      path: Where it is, absolute.
      target: Where it really is, if there is a symbolic link on the way; else None.
      size: In bytes; None if it could not be looked at, as everything that follows.
      mtime_ns: When it was last written to.
      inode: Which file it is in its file system.
      device: Which file system that is.
      sha256: Its hash, where somebody asked for it.
    """

    role: Role
    path: str
    target: str | None = None
    size: int | None = None
    mtime_ns: int | None = None
    inode: int | None = None
    device: int | None = None
    sha256: str | None = None


@attrs.frozen
class ProcessRecord:
    """A process, as the operating system showed it.

    Attributes:
      pid: Its number, which may belong to another one later.
      started: When it was started, in the system's own unit: with the number, this is one process.
        None where that cannot be found out.
      executable: The program that it runs; None where that cannot be found out, as what follows.
      command: The command line that it has.
      environment: The names of the variables that it was given.
    """

    pid: int
    started: int | None = None
    executable: str | None = None
    command: tuple[str, ...] | None = None
    environment: tuple[str, ...] | None = None


@attrs.frozen
class Manifest:
    """What one child was started with.

    Attributes:
      kind: "hosted", "stock" or "own".
      program: The program, as it was found.
      model: The model file; None if the child fetches it.
      files: What else the child is made of.
      command: Its command line.
      launcher: The command that runs this in its own place; empty if there is none.
      parent: The command line of this program.
      environment: The names of the variables that it was given.
      system: The operating system, the machine and the interpreter.
      prefix: What a line of stdout has to begin with to be a record.
      address: Where the child listens.
      isolation: Which network it can see, and what ends it with this program.
      process: The process that it is, as last seen; None if it was not started.
      executables: The programs that this process was seen to run, in order: a launcher comes before
        what it turned into.
      reserved: Whether the child keeps stdout for its records; None if that was not found out.
      reserved_reason: How that was found out, or why it was not.
      build: What the program says that it is; None if it was not asked. Many do not know.
      warnings: What makes one doubt that the files are what they were meant to be.
    """

    kind: Literal["hosted", "stock", "own"]
    program: FileRecord
    model: FileRecord | None = None
    files: tuple[FileRecord, ...] = ()
    command: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    parent: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    system: str = ""
    prefix: str = PREFIX.decode()
    address: str = ""
    isolation: Isolation = attrs.field(factory=Isolation)
    process: ProcessRecord | None = None
    executables: tuple[str, ...] = ()
    reserved: bool | None = None
    reserved_reason: str = ""
    build: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def all_files(self) -> tuple[FileRecord, ...]:
        """Every file, the program first."""
        return (self.program, *([self.model] if self.model else []), *self.files)

    def to_json(self) -> dict[str, object]:
        """Return it as plain objects, ready for `json.dumps`."""
        return attrs.asdict(self, value_serializer=_plain)


def _plain(_: object, __: object, value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


# -- taking one --------------------------------------------------------------------------------


def take_manifest(
    kind: Literal["hosted", "stock", "own"],
    launch: Launch,
    files: Iterable[tuple[Role, str]],
    *,
    address: str = "",
    hashes: Mapping[str, str] | None = None,
) -> Manifest:
    """Write down what a child is about to be started with. Reads no file, but looks at each.

    Args:
      kind: What kind of child.
      launch: How it is started.
      files: What it is made of. Exactly one is its program.
      address: Where it is to listen.
      hashes: The SHA-256 of those files, by absolute path, that are known.
    """
    records = [describe_file(role, path, hashes) for role, path in files]
    [program] = [one for one in records if one.role == "program"]
    model = next((one for one in records if one.role == "model"), None)
    return Manifest(
        kind=kind,
        program=program,
        model=model,
        files=tuple(one for one in records if one not in (program, model)),
        command=without_secrets(launch.command, launch.secrets),
        launcher=without_secrets(launch.wrapper, launch.secrets),
        parent=without_secrets(sys.orig_argv, launch.secrets),
        environment=tuple(sorted(launch.environ)),
        system=f"{platform.platform()}, {platform.machine()}, Python {platform.python_version()}",
        address=address,
        isolation=launch.isolation,
        warnings=tuple(find_dangers(records)),
    )


def describe_file(role: Role, path: str, hashes: Mapping[str, str] | None = None) -> FileRecord:
    """Look at a file, if it is there."""
    absolute = os.path.abspath(path)
    target = None
    digest = (hashes or {}).get(absolute)
    try:
        real = os.path.realpath(absolute)
        target = real if real != absolute else None
        found = os.stat(absolute)
    except (OSError, ValueError):  # the latter for a NUL in the path
        return FileRecord(role, absolute, target)
    return FileRecord(
        role, absolute, target, found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev, digest
    )


def observe(manifest: Manifest, pid: int) -> Manifest:
    """Add what the system tells about the child's process now. Cheap; never raises."""
    seen = _read_process(pid)
    if seen is None:
        return attrs.evolve(manifest, process=manifest.process or ProcessRecord(pid))
    if seen.command is not None:
        seen = attrs.evolve(seen, command=without_secrets(seen.command))
    chain = manifest.executables
    if seen.executable is not None and seen.executable not in chain[-1:]:
        chain = (*chain, seen.executable)
    return attrs.evolve(manifest, process=seen, executables=chain)


def look_again(manifest: Manifest, digest: Digest | None = None) -> Manifest:
    """Look at everything again: the files, the process, and what it has mapped into its memory.

    Args:
      manifest: What there was.
      digest: Computes the hashes of all files; None to leave them out.
    """
    process = manifest.process
    known: list[tuple[Role, str]] = [(one.role, one.path) for one in manifest.all_files]
    if process is not None and is_same_process(process):
        manifest = observe(manifest, process.pid)
        covered = {os.path.realpath(path) for _, path in known}
        for path in sorted(_mapped_files(process.pid) - covered):
            known.append(("library", path))  # noqa: PERF401 - a literal, to a type checker
    records = [describe_file(role, path) for role, path in known]
    if digest is not None:
        records = [_with_digest(one, digest) for one in records]
    return attrs.evolve(
        manifest,
        program=records[0],
        model=next((one for one in records if one.role == "model"), None),
        files=tuple(one for one in records[1:] if one.role != "model"),
    )


def is_same_process(process: ProcessRecord) -> bool:
    """Say whether a process is still there, and has not been followed by another of its number."""
    now = _read_process(process.pid)
    return now is not None and now.started is not None and now.started == process.started


def _with_digest(file: FileRecord, digest: Digest) -> FileRecord:
    if file.size is None or not Path(file.path).is_file():
        return file
    try:
        return attrs.evolve(file, sha256=digest(file.path))
    except OSError:
        return file


if sys.platform == "linux":

    def _read_process(pid: int) -> ProcessRecord | None:
        found = read_process(pid)
        return None if found is None else ProcessRecord(pid, *found)

    _mapped_files = mapped_files

else:

    def _read_process(pid: int) -> ProcessRecord | None:
        return None

    def _mapped_files(pid: int) -> set[str]:
        return set()


# -- secrets -----------------------------------------------------------------------------------


def without_secrets(command: Iterable[str], secrets: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return a command line without secrets: known ones, and what the name of an option, or of a
    variable that is set there, says is one."""
    words: list[str] = []
    known, hide = Secrets(secrets), False
    for word in command:
        option, equals, _ = word.partition("=")
        settable = option.startswith("-") or (bool(equals) and option.isidentifier())
        named = settable and _SECRET.search(option) is not None
        if hide and not word.startswith("-"):
            words.append("[redacted]")
        elif named and equals:
            words.append(f"{option}=[redacted]")
        else:
            words.append(redact(word, known))
        hide = named and not equals
    return tuple(words)


_SECRET: Final = re.compile(r"(?i)key(?!s?-?file)|token(?!s|i)|secret|passw")


# -- who may change the files ------------------------------------------------------------------


def find_dangers(files: Iterable[FileRecord]) -> Iterator[str]:
    """Say of which of these files everybody on this machine may decide what they are."""
    told = set()
    for file in files:
        for path in filter(None, (file.path, file.target)):
            for danger in _dangers(file.role, path):
                if danger not in told:
                    told.add(danger)
                    yield danger


def _dangers(role: Role, path: str) -> Iterator[str]:
    if sys.platform == "win32":  # these bits mean nothing there
        return
    if _mode(path) & stat.S_IWOTH:
        yield f"everybody may write to {path!r} ({role})"
    for directory in Path(path).parents:
        mode = _mode(str(directory))
        # In a sticky one, such as /tmp, only its owner can put something else in a file's place.
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield f"everybody may replace what is in {str(directory)!r} ({role})"


def _mode(path: str) -> int:
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0


# -- comparing ---------------------------------------------------------------------------------


def differences(a: Manifest, b: Manifest) -> tuple[str, ...]:
    """Say, in sentences, what is not the same in two manifests of what should be one child.

    What only one of them knows is not compared, such as hashes, and the libraries that a process
    had loaded. Neither is what has to change: what was found out later, and warnings.
    """
    found = [*_compare_files(a.all_files, b.all_files)]
    for name in _CONSTANT:
        found += _compare(name, getattr(a, name), getattr(b, name))
    if a.process is not None and b.process is not None:
        for name in _CONSTANT_OF_PROCESS:
            old, new = getattr(a.process, name), getattr(b.process, name)
            found += _compare(f"{name} of the process", old, new)
    return tuple(found)


_CONSTANT: Final = (
    "kind", "command", "launcher", "parent", "environment", "system", "prefix", "address",
    "isolation", "build", "reserved",
)  # fmt: skip
_CONSTANT_OF_PROCESS: Final = ("pid", "started", "executable", "command", "environment")


def _compare(what: str, old: object, new: object) -> Iterator[str]:
    if old is not None and new is not None and old != new:
        yield f"{what}: {_shown(old)} became {_shown(new)}"


def _shown(value: object) -> str:
    return (
        repr(list(value))
        if isinstance(value, Sequence) and not isinstance(value, str)
        else repr(value)
    )


def _compare_files(a: Iterable[FileRecord], b: Iterable[FileRecord]) -> Iterator[str]:
    later = {(one.role, one.path): one for one in b}
    for old in a:
        new = later.get((old.role, old.path))
        if new is None:
            if old.role != "library":
                yield f"the {old.role} {old.path!r} is no longer one of the files"
        elif change := _change(old, new):
            yield f"the {old.role} {old.path!r} {change}"


def _change(old: FileRecord, new: FileRecord) -> str | None:
    if old.size is not None and new.size is None:
        return "is gone"
    if old.sha256 and new.sha256 and old.sha256 != new.sha256:
        return f"has another content: SHA-256 {old.sha256[:12]}... became {new.sha256[:12]}..."
    if (old.device, old.inode) != (new.device, new.inode) or old.target != new.target:
        return "was replaced by another file"
    if (old.size, old.mtime_ns) != (new.size, new.mtime_ns):
        return "was written to"
    return None
