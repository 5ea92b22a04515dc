"""Print in every way there is, before and after a model is loaded: `noisy.py HOST [SETTINGS]`.

HOST is the path of the hosted child's program, whose parts are used here. With SETTINGS the wheel
loads a model; without them the records are written from here. What is wrong is said on stderr.
"""

import ctypes
import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
from types import ModuleType

LIBC = ctypes.CDLL(None)
STDOUT = ctypes.c_void_p.in_dll(LIBC, "stdout")


def load_host(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("host", path)
    assert spec is not None
    assert spec.loader is not None
    host = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(host)
    return host


def make_noise(when: str) -> None:
    print(f"{when}: print")
    sys.stdout.write(f"{when}: no newline, ")
    sys.stdout.flush()
    LIBC.printf(f"{when}: flushed stdio\n".encode())
    LIBC.fflush(STDOUT)
    LIBC.printf(f"{when}: stdio\n".encode())
    os.write(1, f"{when}: os.write\n".encode())
    subprocess.run(["echo", f"{when}: subprocess"], check=True)
    os.system(f"echo '{when}: os.system'")
    faulthandler.dump_traceback(1)  # C code that writes to the descriptor


def make_native_noise(wheel: ModuleType) -> None:
    """Have the wheel list its buffer types by `printf`, as it does when asked for another."""
    try:
        wheel.CommonParams().tensor_buft_overrides = "x=y"
    except ValueError:
        print("native noise was made")


def open_files() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue  # the one that listed the directory
    return found


LIST = """
import os
for fd in os.listdir("/proc/self/fd"):
    try:
        print("grandchild has", os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        pass
"""


def look_at_descendants(pipe: str) -> None:
    """Say what a program that is started from here, and a plain fork, have open."""
    subprocess.run([sys.executable, "-c", LIST], close_fds=False, check=True)
    if (pid := os.fork()) == 0:
        print("the fork", "has" if pipe in open_files() else "does not have", "the pipe")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)


def main(path: str, settings: str | None = None) -> None:
    print("still in the buffer")
    pipe = os.readlink("/proc/self/fd/1")
    host = load_host(path)
    port = host.reserve_stdout()
    stdin = host.take_stdin()
    print("the pipe is", pipe)
    make_noise("before")
    look_at_descendants(pipe)
    if settings is None:
        port.loading(0.5)
        make_noise("within")
        port.ready()
    else:
        import xllamacpp

        make_native_noise(xllamacpp)
        params = xllamacpp.CommonParams()
        host.configure(params, json.loads(settings), xllamacpp)
        server = host.make_server(xllamacpp, params, port)
        make_native_noise(xllamacpp)
        assert server
    make_noise("after")
    look_at_descendants(pipe)
    LIBC.fflush(STDOUT)
    print("that was all")
    host.obey_stdin(stdin)


if __name__ == "__main__":
    main(*sys.argv[1:])
