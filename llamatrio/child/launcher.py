"""Which launcher a child is run with: what there is on this system, and whether it works.

That a program is there does not mean that it does what is asked (that of busybox does not), nor
that the kernel allows it (containers and hardened systems do not). So a launcher is tried with a
program that does nothing, once in the life of our process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from llamatrio.child.isolation import (
    HEAD_BYTES,
    NETWORKS,
    Isolation,
    Launcher,
    Network,
    ParentDeath,
    Tools,
    launchers,
    read_head,
)
from llamatrio.child.launch import Hosted, Kind, Own
from llamatrio.config import ModelConfig
from llamatrio.errors import SpecificationError

SHIM: Final = str(Path(__file__).with_name("shim.py"))

_TRIAL_SECONDS: Final = 10.0
_known: Final[dict[tuple[str, ...], str | None]] = {}  # what became of a trial; None if it worked


def check_network(network: Network) -> None:
    """Refuse, at once, a child without a network where there can be none.

    Raises:
      SpecificationError: if it cannot be had, or is none of the choices.
    """
    if network not in NETWORKS:
        raise SpecificationError(f"network is one of {', '.join(NETWORKS)}, not {network!r}")
    if network == "none" and sys.platform != "linux":
        raise SpecificationError(f"{_ALONE}: {_UNHEARD_OF}")


def choose_launcher(
    network: Network, kind: Kind, config: ModelConfig, *, program: str, names: Iterable[str]
) -> tuple[Launcher, Isolation]:
    """Choose what a child is run with, and say what holds then.

    This reads files and may run programs: it belongs into a thread.

    Args:
      network: Which network it is to have.
      kind: What kind of child.
      config: The model.
      program: The child's program, as it was found.
      names: Those of its variables.

    Raises:
      SpecificationError: if it is to be without a network, and cannot.
    """
    check_network(network)
    hosted = isinstance(kind, Hosted)
    if sys.platform != "linux":
        here: ParentDeath = "job" if sys.platform == "win32" else "stdin"
        return Launcher(), Isolation("host", _UNHEARD_OF, here)
    wanted = needs_network(kind, config) if network == "auto" else None
    cut = network != "host" and wanted is None
    if runs_natively(program):
        chosen, obstacle = _first_that_works(cut, hosted, tuple(names))
    else:
        chosen, obstacle = Launcher(), f"the format of {program} is not known to be this system's"
    if network == "none" and not chosen.network:
        raise SpecificationError(f"{_ALONE}: {obstacle}")
    death: ParentDeath = "signal" if chosen.armed or hosted else "stdin"
    if chosen.network:
        return chosen, Isolation("none", None, death)
    return chosen, Isolation("host", wanted or (obstacle if cut else "it was asked for"), death)


_ALONE: Final = "the child cannot be without a network"
_UNHEARD_OF: Final = f"{sys.platform} cannot take it away from a process"


def needs_network(kind: Kind, config: ModelConfig) -> str | None:
    """Say why a child wants the network; None if it has no use for one."""
    if config.model is None:
        return "it fetches its model"
    if config.mmproj is not None:
        return "it may be asked to fetch images"
    if isinstance(kind, Own):
        return "a program of yours may want it"
    if any(argument.partition("=")[0] == "--rpc" for argument in config.args):
        return "it computes on other machines (--rpc)"
    return None


def _first_that_works(cut: bool, hosted: bool, names: tuple[str, ...]) -> tuple[Launcher, str]:
    """Return the first launcher that works, and why the first that did not, did not."""
    obstacle = ""
    candidates = launchers(
        _find_tools(),
        parent=os.getpid(),
        cut=cut,
        root=_is_root(),
        hosted=hosted,
        names=names,
    )
    for launcher in candidates:
        failure = _try(launcher.wrapper) if launcher.wrapper else None
        if failure is None:
            return launcher, obstacle
        obstacle = obstacle or failure
    raise AssertionError("the last launcher does nothing, which works")


def _is_root() -> bool:
    return sys.platform != "win32" and os.geteuid() == 0


def _find_tools() -> Tools:
    return Tools(
        setpriv=_find("setpriv"),
        unshare=_find("unshare"),
        shell=_find("sh"),
        python=sys.executable,
        shim=SHIM,
    )


def _find(name: str) -> str | None:
    found = shutil.which(name)
    return None if found is None else os.path.abspath(found)


def _try(wrapper: tuple[str, ...]) -> str | None:
    """Say what is wrong with a launcher, or None if it works."""
    if wrapper in _known:
        return _known[wrapper]
    nothing = shutil.which("true")
    command = [*wrapper, *([nothing] if nothing else [sys.executable, "-I", "-S", "-c", ""])]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={"LC_ALL": "C", "PATH": os.defpath},
            start_new_session=True,
            timeout=_TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:  # the system is busy; it may work another time
        return str(exc)
    except OSError:  # no process or no descriptor is left: the child's own start will say so
        return None
    said = done.stderr.decode(errors="replace").strip().splitlines()
    failure = None if done.returncode == 0 else (said or ["it failed without a word"])[-1]
    if done.returncode >= 0:
        _known[wrapper] = failure
    return failure


def runs_natively(program: str, depth: int = 4) -> bool:
    """Say whether a program is known to be in a format that this system runs.

    Args:
      program: Its path.
      depth: How many interpreters may run one another.
    """
    try:
        with open(program, "rb") as file:
            head = read_head(file.read(HEAD_BYTES))
    except OSError:
        return False
    if head is None or depth == 0:
        return False
    if head.machine and head.machine != _machine():
        return False
    if head.interpreter is None:
        return True
    if not os.access(head.interpreter, os.X_OK):
        return False
    return bool(head.machine) or runs_natively(head.interpreter, depth - 1)


def _machine() -> bytes | None:
    for path in ("/proc/self/exe", sys.executable):  # not every container has the former
        with suppress(OSError), open(path, "rb") as file:
            head = read_head(file.read(HEAD_BYTES))
            if head is not None and head.machine:
                return head.machine
    return None
