"""The hosted child: a Python process that runs a model with the xllamacpp wheel.

Run by its path, `python -P host.py SETTINGS`, and therefore stands apart: it imports nothing of
this library, whose own imports would double the time to READY. The settings are a JSON object of
attributes of xllamacpp's CommonParams; the key comes in the environment, where no other user can
read it.

The contract is that of llama.cpp's own child: stdout carries state records alone, and
`cmd_router_to_child:exit` on stdin, or its end, ends the process. Here the process leaves with
`os._exit`, at any time, without a word to the native side: the memory goes with it, and neither a
request that is open nor the moment at which the line arrives can get in the way. Only while the
model is being loaded nothing is read: the wheel holds the GIL then. SIGTERM acts at once there.

The child's side of that contract is here for a program of yours as well (`llamatrio.Own`)::

    from llamatrio.child.host import StatePort, obey_stdin, reserve_stdout

    port = reserve_stdout()  # before anything else can print
    threading.Thread(target=obey_stdin, args=(0,), daemon=True).start()
    port.loading(0.0)
    ...
    port.ready({"id": "my-model"})

That import brings Trio along, as the package always does. A program that wants to do without copies
this file: it needs the standard library alone, and the wheel only in `main`. Or it runs this one,
which starts nothing and gives it the names::

    package = importlib.util.find_spec("llamatrio").submodule_search_locations[0]
    host = runpy.run_path(package + "/child/host.py")
    port = host["reserve_stdout"]()
"""

import contextlib
import io
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = b"cmd_child_to_router:state:"
EXIT_LINE = b"cmd_router_to_child:exit"
LONGEST_LINE = 4096
LONGEST_RECORD = 4096
PARENT = "LLAMATRIO_PARENT"

_CHUNK = 65536
_STDOUT, _STDERR = 1, 2


# -- stdout, for records alone -----------------------------------------------------------------


class StatePort:
    """Writes state records, and belongs to one process.

    Any thread may use it, a signal handler must not. Each record is one line and one write, so that
    not even another writer of the same pipe could get into it: up to 4096 bytes on Linux, and up to
    512 on macOS.

    In a fork that Python makes, the descriptor is closed and every method raises; what is exec'd
    does not have the descriptor. A fork that native code makes, and that execs nothing, has a copy.

    Args:
      fd: Where to write. It is closed by `close`.
      longest: Bytes of the longest record, with its newline.
    """

    def __init__(self, fd: int, *, longest: int = LONGEST_RECORD) -> None:
        self._fd: int | None = fd
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._torn = False  # whether the last write may have been broken off by an exception
        self.longest = longest
        if sys.platform != "win32":
            os.register_at_fork(after_in_child=self._abandon)

    def fileno(self) -> int:
        """Return the descriptor.

        Raises:
          RuntimeError: in a fork, or after `close`.
        """
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"records are written by process {self._owner} alone, and this is {os.getpid()}, a "
                "fork of it: whatever it has to tell must go through its parent"
            )
        if self._fd is None:
            raise RuntimeError("the port is closed")
        return self._fd

    def loading(self, value: float, stage: str = "text_model", stages: Sequence[str] = ()) -> None:
        """Tell how much is loaded; see `send`.

        Args:
          value: From 0.0 to 1.0.
          stage: What is being loaded now.
          stages: All that is to be loaded.
        """
        self.send("loading", {"stages": [*stages] or [stage], "current": stage, "value": value})

    def ready(self, info: Mapping[str, object] | None = None) -> None:
        """Tell that requests are answered from now on; see `send`.

        Args:
          info: What there is to know about the model; None after sleep, where it stays what it was.
        """
        self.send("ready", info)

    def sleeping(self) -> None:
        """Tell that the memory is given back until the next request; see `send`.

        The next request is preceded by `loading` and `ready` again.
        """
        self.send("sleeping")

    def send(self, state: str, payload: Mapping[str, object] | None = None) -> None:
        """Write one record, and return when it is in the pipe.

        Raises:
          RuntimeError: in a fork, or after `close`.
          ValueError, TypeError: if the record is too long, or no JSON. Nothing is written.
          OSError: if it cannot be written. A `BrokenPipeError` means that nobody reads any more.

        What any other exception interrupts, such as `KeyboardInterrupt`, may be lost; the next
        record stands on a line of its own.
        """
        document = {"state": state, "payload": None if payload is None else dict(payload)}
        self.forward(PREFIX + json.dumps(document, allow_nan=False, separators=(",", ":")).encode())

    def forward(self, line: bytes) -> None:
        """Write one record that somebody else has made, without its newline; see `send`."""
        if b"\n" in line or not line.startswith(PREFIX):
            raise ValueError(f"not a record: {line[:100]!r}")
        if len(line) >= self.longest:
            raise ValueError(f"a record of {len(line) + 1} bytes, where {self.longest} are allowed")
        self.fileno()  # before the lock, which a fork may have got in its locked state
        with self._lock:
            data = (b"\n" if self._torn else b"") + line + b"\n"
            self._torn = True
            while data:
                data = data[self._write(data) :]
            self._torn = False

    def close(self) -> None:
        """Close the descriptor; no record can be written any more.

        Raises:
          RuntimeError: in a fork, or if it is closed already.
        """
        self.fileno()
        with self._lock:
            os.close(self.fileno())
            self._fd = None

    def _write(self, data: bytes) -> int:
        fd = self.fileno()
        while True:
            try:
                return os.write(fd, data)
            except BlockingIOError:  # somebody has made the pipe non-blocking
                _wait_until(fd, writable=True)

    def _abandon(self) -> None:
        # Without the lock, whose state a fork cannot know. What is still open would keep the reader
        # from seeing the end of the records.
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


_port: StatePort | None = None


def reserve_stdout() -> StatePort:
    """Keep stdout for state records, and send to stderr whatever else is written there.

    It must come before any other output. From then on file descriptor 1 is stderr, so that it does
    not matter who writes: `print`, C code, a process that this one starts. What was printed before
    and is still held in a buffer goes to stderr too.

    Returns:
      What writes records.

    Raises:
      RuntimeError: if this process, or one that it was forked from, has done so already.
    """
    global _port
    if _port is not None:
        raise RuntimeError("stdout is reserved already")
    port = StatePort(_duplicate(_STDOUT))
    os.dup2(_STDERR, _STDOUT)
    _port = port
    if isinstance(sys.stdout, io.TextIOWrapper):
        # So that what is printed stands in the log where it belongs in time.
        sys.stdout.reconfigure(line_buffering=True)
    return port


if sys.platform == "win32":

    def _duplicate(fd: int) -> int:
        return os.dup(fd)  # not inheritable; `os.dup2` onto 1 also sets the standard handle

    def _wait_until(fd: int, *, writable: bool) -> None:
        raise AssertionError(f"descriptor {fd}: a pipe that is made by a parent blocks")

else:

    def _duplicate(fd: int) -> int:
        import fcntl

        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)  # where 0 is closed, not as 0

    def _wait_until(fd: int, *, writable: bool) -> None:
        import select

        event = select.poll()
        event.register(fd, select.POLLOUT if writable else select.POLLIN)
        event.poll()


def make_server(wheel: Any, params: Any, port: StatePort) -> Any:
    """Load the model; the native side writes the records.

    The wheel reserves stdout by itself, as the first thing that its server does: it needs stdout
    back for that moment. A wheel from before b11401 does not; it writes to stdout for as long as it
    lives. Which one this is shows in what has become of stdout. An old one gets a pipe in its
    place, whose records alone are passed on. Only while the model is being loaded it writes to the
    real one: it holds the GIL then, and nothing here could pass on what it says.
    """
    flush_stdio()  # the wheel's own flush would put what is in there among the records
    os.dup2(port.fileno(), _STDOUT)
    try:
        # It returns after the whole of READY was written (xllamacpp b11549, server.cpp, `init`).
        return wheel.Server(params)
    finally:
        if _same_file(port.fileno(), _STDOUT):
            _sift_stdout(port)
        else:
            port.close()


def flush_stdio() -> None:
    """Write out what C code and Python have printed and not flushed yet.

    It must come before native code reads stdin: it would wait for that to end.
    """
    import ctypes

    if sys.stdout is not None:
        sys.stdout.flush()
    library = ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)
    library.fflush(None)


def _same_file(one: int, other: int) -> bool:
    return os.path.samestat(os.fstat(one), os.fstat(other))


def _sift_stdout(port: StatePort) -> None:
    source, sink = os.pipe()
    os.dup2(sink, _STDOUT)
    os.close(sink)
    threading.Thread(target=sift, args=(source, port), daemon=True).start()


def sift(source: int, port: StatePort) -> None:
    """Pass on the lines that are records, and send all the rest to stderr, until the end.

    What stands before a record on its line makes a line of log of both. The wheels in question
    begin each record with a newline for that reason; empty lines are left out.

    Args:
      source: The read end of the pipe that is now stdout.
      port: Where records go.
    """
    held = b""
    is_record = True  # whether the line that is held could still be one
    while data := os.read(source, _CHUNK):
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            passed = is_record and line.startswith(PREFIX) and _forward(port, line)
            if not passed and (line or not is_record):
                _log(line + b"\n")
            is_record = True
        if len(held) >= port.longest:
            _log(held)
            held, is_record = b"", False


def _forward(port: StatePort, line: bytes) -> bool:
    try:
        port.forward(line)
    except (OSError, ValueError):  # nobody reads any more; or it is too long
        return False
    return True


def _log(data: bytes) -> None:
    with contextlib.suppress(OSError):  # there is nobody left to tell
        while data:
            data = data[os.write(_STDERR, data) :]


# -- stdin, for the exit line alone ------------------------------------------------------------


def obey_stdin(fd: int) -> None:
    """Leave at the exit line, with 0, or at the end of stdin, with 1.

    Lines are held up to a bound, and only a line that is the exit line, to the letter, counts. A
    terminal that has hung up, or whatever else cannot be read any more, has come to its end.
    """
    line = b""
    while data := _read(fd):
        *lines, rest = (line + data).split(b"\n")
        if any(one.removesuffix(b"\r") == EXIT_LINE for one in lines):
            os._exit(0)
        # A line over the bound is kept at just over it: it cannot become the exit line any more.
        line = rest[: LONGEST_LINE + 1]
    os._exit(1)


def _read(fd: int) -> bytes:
    while True:
        try:
            return os.read(fd, _CHUNK)
        except BlockingIOError:  # another program may have left a terminal like that
            _wait_until(fd, writable=False)
        except OSError:
            return b""


def take_stdin() -> int:
    """Keep the real stdin for ourselves, and give the native side one that stays silent.

    Its own reader would otherwise take bytes from ours.
    """
    ours = os.dup(0)
    silent, open_end = os.pipe()
    os.dup2(silent, 0)
    os.close(silent)
    os.set_inheritable(open_end, False)
    return ours


# -- the parent --------------------------------------------------------------------------------


def die_with_parent() -> None:
    """Have this process killed when its parent dies, if the parent has left its number.

    That is the variable `LLAMATRIO_PARENT`, which is taken out of the environment. Without the
    variable nothing is done.

    On Linux the kernel sends SIGKILL when the thread that has started this process ends: it works
    at any moment, also while native code holds the GIL. On macOS a thread waits for the parent's
    end, which it sees only when the model has been loaded. On Windows nothing is done. Everywhere
    the end of stdin remains as the second sign.

    Behind a wrapper that stays in between, such as a shell that does not `exec`, it is the death of
    the wrapper that counts.
    """
    word = os.environ.pop(PARENT, None)
    if word is None:
        return
    parent = int(word)
    if sys.platform == "linux":
        import ctypes
        import signal

        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, ctypes.c_ulong(signal.SIGKILL))
        if _is_gone(parent):  # it died before that
            os._exit(1)
    elif sys.platform == "darwin":
        threading.Thread(target=_leave_after, args=(parent,), daemon=True).start()


if sys.platform == "linux":

    def _is_gone(pid: int) -> bool:
        if os.getppid() in (pid, 0):  # 0: it is beyond a process name space of ours
            return False
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
        except OSError:
            return True
        return state in (b"Z", b"X")  # dead, and not reaped; any other has a wrapper for its child


if sys.platform == "darwin":

    def _leave_after(pid: int) -> None:
        import select

        end = select.kevent(
            pid,
            select.KQ_FILTER_PROC,
            select.KQ_EV_ADD | select.KQ_EV_ONESHOT,
            select.KQ_NOTE_EXIT,
        )
        with contextlib.suppress(ProcessLookupError):  # it is gone already
            select.kqueue().control([end], 1)
        os._exit(1)


def forbid_core_dump() -> None:
    """Leave no core dump: it would be as large as the model."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# -- the model ---------------------------------------------------------------------------------


def configure(params: Any, settings: dict[str, Any], wheel: Any) -> None:
    """Set dotted attributes of the native parameters."""
    for name, value in settings.items():
        if name == "hostnames" and not hasattr(params, name):  # before b11549
            name, value = "hostname", value[0]
        *holders, last = name.split(".")
        target = params
        try:
            for holder in holders:
                target = getattr(target, holder)
            setattr(target, last, native(name, value, wheel))
        except AttributeError:
            sys.exit(f"error: this xllamacpp wheel does not know {name!r}: install a newer one")


def native(name: str, value: Any, wheel: Any) -> Any:
    """Make the wheel's own value of a value from JSON."""
    if name == "lora_adapters":
        return [wheel.CommonAdapterLoraInfo(path, scale) for path, scale in value]
    if isinstance(value, list):
        return [native("", item, wheel) for item in value]
    if isinstance(value, dict) and set(value) == {"enum"}:
        kind, member = value["enum"].split(".")
        return getattr(getattr(wheel, kind), member)
    return value


def flush_log(wheel: Any) -> None:
    """Let the native log be written to its end, where the reason for a failure stands.

    It is written by a thread that the end of the process would not wait for. The wheel has no name
    for this; its library has, in the spelling of the compilers of Linux and macOS.
    """
    import ctypes

    library = ctypes.CDLL(wheel.xllamacpp.__file__)
    try:
        log, flush = library["_Z15common_log_mainv"], library["_Z16common_log_flushP10common_log"]
    except AttributeError:
        return
    log.restype, flush.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    flush(log())


def color_log(wheel: Any) -> None:
    """Have the native log coloured; the wheel has no name for this either."""
    import ctypes

    library = ctypes.CDLL(wheel.xllamacpp.__file__)
    try:
        log = library["_Z15common_log_mainv"]
        choose = library["_Z21common_log_set_colorsP10common_log10log_colors"]
    except AttributeError:
        return  # the log stays as it is
    log.restype, choose.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int]
    choose(log(), 1)  # LOG_COLORS_ENABLED (llama.cpp b11434, common/log.h)


def main() -> None:
    """Load the model and serve it until told to leave."""
    port = reserve_stdout()
    die_with_parent()
    forbid_core_dump()
    threading.Thread(target=obey_stdin, args=(take_stdin(),), daemon=True).start()
    try:
        import xllamacpp
    except ImportError as exc:
        sys.exit(f"error: {exc}: a hosted child needs the xllamacpp wheel (llamatrio[llama])")
    params = xllamacpp.CommonParams()
    settings = json.loads(sys.argv[1])
    if settings.pop("log_colors", False):
        color_log(xllamacpp)
    configure(params, settings, xllamacpp)
    params.api_keys = [os.environ["LLAMA_API_KEY"]]
    try:
        server = make_server(xllamacpp, params, port)
    except RuntimeError as exc:
        flush_log(xllamacpp)
        sys.exit(f"error: {exc}")
    threading.Event().wait()
    del server  # unreachable: it must live as long as the process


if __name__ == "__main__":
    main()
