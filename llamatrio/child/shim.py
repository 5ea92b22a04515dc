"""Run a program that dies with its parent, and without a network if asked; on Linux.

For where util-linux is not installed. Run by its path, and therefore stands apart: it imports
nothing of this library::

    python -I -S shim.py PARENT net|user|keep PROGRAM [ARGUMENT ...]

The program takes the place of this one: it has its number, its pipes and, to the byte, the
environment that this one was given. `net` takes the network away as root can, `user` as everybody
can where the kernel lets them. What fails is said on stderr, with exit code 126.
"""

import ctypes
import os
import resource
import signal
import sys
from typing import NoReturn

assert sys.platform == "linux"

# linux/prctl.h and linux/sched.h
PR_SET_PDEATHSIG = 1
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

CANNOT = 126  # exit code


def main(arguments: list[str]) -> NoReturn:
    """Do what the arguments say, and become the program."""
    parent, way, *command = arguments
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if way != "keep":
            leave_network(libc, new_user=way == "user")
        die_with(libc, int(parent))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would be as large as the model
        # Which the interpreter ignores, and what it becomes would inherit that.
        for name in ("SIGPIPE", "SIGXFSZ"):
            signal.signal(signal.Signals[name], signal.SIG_DFL)
        os.execve(command[0], command, given_environment())
    except OSError as exc:
        sys.stderr.write(f"error: {exc.strerror}: {exc.filename or way}\n")
    sys.exit(CANNOT)


def leave_network(libc: ctypes.CDLL, *, new_user: bool) -> None:
    """Have a network of one's own, in which there is nobody and nothing is up.

    Raises:
      OSError: if the kernel does not allow it.
    """
    uid, gid = os.geteuid(), os.getegid()
    check(libc.unshare(CLONE_NEWNET | (CLONE_NEWUSER if new_user else 0)))
    if new_user:  # and be who we were, user_namespaces(7)
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{uid} {uid} 1")
        write("/proc/self/gid_map", f"{gid} {gid} 1")


def die_with(libc: ctypes.CDLL, parent: int) -> None:
    """Be killed when the parent ends; leave at once if it has ended already."""
    check(libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def check(result: int) -> None:
    """Take what a function of the C library returned: 0, or there is an error."""
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def write(path: str, text: str) -> None:
    """Write into a file of /proc."""
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def given_environment() -> dict[bytes, bytes]:
    """Return the environment as it was given: the interpreter may have changed LC_CTYPE."""
    with open("/proc/self/environ", "rb") as file:
        pairs = [item.partition(b"=") for item in file.read().split(b"\0") if item]
    return {name: value for name, _, value in pairs}


if __name__ == "__main__":
    main(sys.argv[1:])
