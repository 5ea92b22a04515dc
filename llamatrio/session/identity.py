"""Which files a model was loaded from, and whether they are still the same.

llama.cpp loads a model again, after sleep, from whatever stands at its path by then.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from io import FileIO
from typing import Final, TypeAlias

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.config import ModelConfig, parts
from llamatrio.errors import ModelChanged, ModelFileError
from llamatrio.wire.records import Loading, Ready, Record, Sleeping

_CHUNK: Final = 2**20


@attrs.frozen
class Identity:
    """One file at one moment. Another file in its place, or another content, makes another one.

    Attributes:
      path: The file, absolute: the child keeps the working directory that we may leave.
      device: The file system.
      inode: The file in it.
      size: In bytes.
      mtime_ns: When it was last written to.
    """

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int


def files_of(config: ModelConfig) -> Iterator[str]:
    """Name every file that a configuration has loaded, as it was given, the model first.

    Of a model in several files, the others are named that are there.
    """
    for path in (config.model, config.draft_model, config.mmproj, *(x.path for x in config.lora)):
        if path is not None:
            yield path
            yield from filter(os.path.exists, parts(path)[1:])


def absolute(config: ModelConfig) -> ModelConfig:
    """Return a configuration with the same files, by their absolute paths.

    What a relative one means depends on the moment: it is looked at before the child is started.
    """

    def of(path: str | None) -> str | None:
        return None if path is None else os.path.abspath(path)

    return attrs.evolve(
        config,
        model=of(config.model),
        draft_model=of(config.draft_model),
        mmproj=of(config.mmproj),
        lora=[attrs.evolve(lora, path=os.path.abspath(lora.path)) for lora in config.lora],
    )


def take_identity(config: ModelConfig) -> tuple[Identity, ...]:
    """Look at the files of a configuration, in the order of `files_of`.

    Raises:
      ModelFileError: if one of them is not there.
    """
    return tuple(map(_identify, files_of(config)))


def _identify(path: str) -> Identity:
    try:
        return _identity(path, os.stat(path))
    except (OSError, ValueError) as exc:  # the latter for a NUL in the path
        raise ModelFileError(path, getattr(exc, "strerror", None) or str(exc)) from exc


def _identity(path: str, found: os.stat_result) -> Identity:
    absolute = os.path.abspath(path)
    return Identity(absolute, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def find_change(files: Iterable[Identity]) -> str | None:
    """Say which file is no longer the same, and why; None if all are."""
    for file in files:
        try:
            now = _identify(file.path)
        except ModelFileError as exc:
            return f"{file.path!r} cannot be found: {exc.reason}"
        if now != file:
            same = (now.device, now.inode) == (file.device, file.inode)
            happened = "has been written to" if same else "has been replaced"
            return f"{file.path!r} {happened}"
    return None


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


# -- hashes ------------------------------------------------------------------------------------


class Digests:
    """Computes the SHA-256 of files, and remembers it.

    Attributes:
      bytes_read: Bytes that were hashed so far.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self._known: dict[_Stamp, str] = {}

    @enable_ki_protection
    async def mismatch(self, file: Identity, pinned: str, *, anew: bool = False) -> str | None:
        """Compare the SHA-256 of a file with a pinned one; say what is wrong, or None.

        Args:
          file: The file.
          pinned: What its SHA-256 has to be, in small hexadecimal digits.
          anew: Whether to read it even if it looks as it did when it was last read.

        Cancellation: takes effect between two chunks of the file.

        Raises:
          ModelFileError: if it cannot be read, or is changed meanwhile.
        """
        digest = await trio.to_thread.run_sync(self._digest, file, anew)
        if digest == pinned:
            return None
        return f"its SHA-256 is {digest[:12]}... and not {pinned[:12]}..., which `sha256` pins"

    def of_path(self, path: str) -> str:
        """Compute the SHA-256 of a file anew. Called in a thread of Trio's.

        Raises:
          OSError: if it cannot be read, or is changed meanwhile.
        """
        try:
            return self._digest(_identify(path), anew=True)
        except ModelFileError as exc:
            raise OSError(exc.reason) from exc

    def _digest(self, file: Identity, anew: bool) -> str:
        try:
            with FileIO(file.path) as opened:
                stamp = _stamp(file.path, opened)
                known = None if anew else self._known.get(stamp)
                digest = known or self._read(opened)
                if stamp[0] != file or _stamp(file.path, opened) != stamp:
                    raise ModelFileError(file.path, "it was changed while it was read")
        except OSError as exc:
            raise ModelFileError(file.path, exc.strerror or str(exc)) from exc
        self._known[stamp] = digest
        return digest

    def _read(self, opened: FileIO) -> str:
        digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK))
        while size := opened.readinto(chunk):
            digest.update(chunk[:size])
            self.bytes_read += size
            trio.from_thread.check_cancelled()
        return digest.hexdigest()


# The second is the time of the last change of any kind, which no program can set at will.
_Stamp: TypeAlias = tuple[Identity, int]


def _stamp(path: str, opened: FileIO) -> _Stamp:
    found = os.fstat(opened.fileno())
    return _identity(path, found), found.st_ctime_ns


# -- sleep -------------------------------------------------------------------------------------


class Guard:
    """Sees to it that a model does not wake as another one.

    Requests ask it twice: before they are sent, since they may wake the model, and when they are
    answered, since the model may have fallen asleep in between and have been loaded anew.

    Args:
      files: What the model was loaded from, as it was before it was loaded.
      pinned: The SHA-256 of the first of them, if it is given.
      digests: Who computes it.

    Attributes:
      waking: Whether the model is being loaded again, after sleep.
    """

    def __init__(self, files: Sequence[Identity], pinned: str | None, digests: Digests) -> None:
        self._files = files
        self._pinned = pinned
        self._digests = digests
        self._lock = trio.Lock()
        self.waking = False
        self._asleep = False
        self._verified = True  # by whoever loaded it
        self._verifications = 0
        self._change: str | None = None

    def on_record(self, record: Record) -> None:
        """Learn from the child's records when the model sleeps, and when it is loaded.

        Raises:
          ModelChanged: if a file has changed by the time the model is ready, for the first time or
            again: who knows which one was loaded.
        """
        match record:
            case Sleeping():
                self._asleep, self._verified = True, False
            case Loading() if self._asleep:
                self._asleep, self.waking = False, True
            case Ready():
                self.waking = False
                self._compare()
            case _:
                pass

    @enable_ki_protection
    async def check(self) -> None:
        """Refuse a model that has changed while it slept.

        Cancellation: abandons the check; the next one begins anew.

        Raises:
          ModelChanged: if it has changed.
          ModelFileError: if that cannot be found out; the model sleeps on.
        """
        # Lets what the child wrote before its answer be read before the answer is.
        await trio.lowlevel.checkpoint()
        if self._change is not None:
            raise ModelChanged(self._change)
        if self._asleep or not self._verified:
            await self._verify()

    async def _verify(self) -> None:
        seen = self._verifications
        async with self._lock:
            if self._verifications == seen:  # else another request has just done it
                self._compare()
                if self._pinned is not None:
                    complaint = await self._digests.mismatch(
                        self._files[0], self._pinned, anew=True
                    )
                    self._refuse(complaint and f"{self._files[0].path!r}: {complaint}")
                    self._compare()
                self._verifications += 1
                self._verified = True

    def _compare(self) -> None:
        self._refuse(find_change(self._files))

    def _refuse(self, change: str | None) -> None:
        if change is not None:
            self._change = f"the model's file is not the one that was loaded: {change}"
            raise ModelChanged(self._change)
