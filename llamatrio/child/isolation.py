"""PURE. What a child is run with, so that it neither outlives its parent nor reaches the network.

On Linux a process can be told to die with its parent, and be given a network of its own with nobody
else in it. Both are arranged in the child before the program begins, by small programs that run the
next one in their own place: the number of the process stays the same all along, and nothing runs
between our fork and the first program, where no code is safe beside threads. Where those programs
are missing, `llamatrio.child.shim` does the same; an interpreter takes some ten milliseconds more.

The network comes first: new credentials make Linux forget what was said about the parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal, TypeAlias, get_args

import attrs

Network: TypeAlias = Literal["auto", "none", "host"]
"""Which network a child is to have: "none", or that of the "host"; "auto" for none where that can
be had and the child has no use for one."""

ParentDeath: TypeAlias = Literal["signal", "job", "stdin"]
"""What ends a child whose parent dies without a word: "signal" if the operating system kills it at
once, "job" if a Windows job does, "stdin" if it is left to the end of its stdin, which it does not
see while it is loading."""

NETWORKS: Final[tuple[str, ...]] = get_args(Network)


@attrs.frozen
class Isolation:
    """What holds for one child.

    Attributes:
      network: "none" if it is alone in a network of its own, "host" if it shares ours.
      reason: Why it shares ours; None if it does not.
      parent_death: What ends it when the application dies without a word.
    """

    network: Literal["none", "host"] = "host"
    reason: str | None = "nothing was asked of the operating system"
    parent_death: ParentDeath = "stdin"


NOT_ISOLATED: Final = Isolation()
"""Of a child that is started as it is."""


@attrs.frozen
class Tools:
    """The programs that a launcher can be made of; None for one that is not there.

    Attributes:
      setpriv: The one of util-linux, which tells Linux to kill a process with its parent.
      unshare: The one of util-linux, which gives a process a network of its own.
      shell: A POSIX shell.
      python: Our own interpreter.
      shim: The path of `llamatrio.child.shim`.
    """

    setpriv: str | None
    unshare: str | None
    shell: str | None
    python: str
    shim: str


@attrs.frozen
class Launcher:
    """The programs that run the child's own one in their place.

    Attributes:
      wrapper: The command to put before that of the child.
      network: Whether it takes the network away.
      armed: Whether it sees to it that the child dies with its parent.
    """

    wrapper: tuple[str, ...] = ()
    network: bool = False
    armed: bool = False


def launchers(
    tools: Tools, *, parent: int, cut: bool, root: bool, hosted: bool, names: Iterable[str]
) -> Iterator[Launcher]:
    """Give what may be tried on Linux, the best first.

    Args:
      tools: What there is.
      parent: Our own process.
      cut: Whether the network is to be taken away. If so, those that do come first.
      root: Whether we are root, who needs no new user for that.
      hosted: Whether the child is ours, which arranges for its death itself.
      names: Those of the child's variables.
    """
    way = "net" if root else "user"
    by_shim = (tools.python, "-I", "-S", tools.shim, str(parent))
    armed = () if hosted else _arm(tools, parent, names)
    programs_do = hosted or armed != ()
    if cut:
        if tools.unshare and programs_do:
            yield Launcher((tools.unshare, *_UNSHARE[way], "--", *armed), network=True, armed=True)
        yield Launcher((*by_shim, way), network=True, armed=True)
    if programs_do:
        yield Launcher(armed, armed=True)
    else:
        yield Launcher((*by_shim, "keep"), armed=True)
    yield Launcher()


def _arm(tools: Tools, parent: int, names: Iterable[str]) -> tuple[str, ...]:
    if tools.setpriv is None or tools.shell is None or not all(map(_is_plain, names)):
        return ()
    # A parent that died before the signal was in force would be missed: so it is looked for once
    # more, afterwards.
    still_there = f'[ "$PPID" = {parent} ] && exec "$@"'
    return (tools.setpriv, "--pdeathsig", "KILL", "--", tools.shell, "-c", still_there, "sh")


_UNSHARE: Final = {"net": ("--net",), "user": ("--user", "--map-current-user", "--net")}


def _is_plain(name: str) -> bool:
    """Say whether a shell passes a variable of this name on; some do with no other."""
    return name.isascii() and name.isidentifier()


# -- programs that can be run through others ---------------------------------------------------


@attrs.frozen
class Head:
    """What the first bytes of a program say.

    Attributes:
      machine: For which machine it is made; empty if it is no ELF file.
      interpreter: The program that is to run it, absolute, or None if it needs none.
    """

    machine: bytes
    interpreter: str | None


def read_head(data: bytes) -> Head | None:
    """Read the first bytes of a program file; None for a format that is not known here.

    A program in a format that the kernel refuses must not be run through `setpriv` or a shell: they
    would take it for a shell script. What is not understood here is therefore run without them,
    and the refusal of the kernel, if it is one, is an `OSError` in the parent.
    """
    if data.startswith(b"#!"):
        words = data[2:].partition(b"\n")[0][:_LONGEST_LINE].split()
        return Head(b"", _text(words[0])) if words else None
    if not data.startswith(b"\x7fELF") or len(data) < _ELF_HEADER:
        return None
    big, order = data[4] == 2, _ORDERS.get(data[5])
    if order is None or not big:  # a program of 32 bits is rare enough
        return None
    machine = data[4:6] + data[18:20]
    offset = int.from_bytes(data[32:40], order)
    size, count = (int.from_bytes(data[at : at + 2], order) for at in (54, 56))
    for at in range(offset, offset + size * count, size or 1):
        header = data[at : at + _PROGRAM_HEADER]
        if len(header) < _PROGRAM_HEADER:
            return None
        if int.from_bytes(header[:4], order) == _PT_INTERP:
            start, length = (int.from_bytes(header[i : i + 8], order) for i in (8, 32))
            name = data[start : start + length].rstrip(b"\0")
            return Head(machine, _text(name)) if name else None
    return Head(machine, None)


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


HEAD_BYTES: Final = 4096
"""How much of a program's file `read_head` wants."""

_LONGEST_LINE: Final = 250  # the kernel reads no more of a `#!` line than that, and a little
_ORDERS: Final[dict[int, Literal["little", "big"]]] = {1: "little", 2: "big"}
# elf(5), for 64 bits
_ELF_HEADER: Final = 64
_PROGRAM_HEADER: Final = 56
_PT_INTERP: Final = 3
