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
"""

import json
import os
import sys
import threading
from typing import Any

EXIT_LINE = b"cmd_router_to_child:exit"
LONGEST_LINE = 4096


def obey_stdin(fd: int) -> None:
    """Leave at the exit line, with 0, or at the end of stdin, with 1.

    Lines are held up to a bound, and only a line that is the exit line, to the letter, counts.
    """
    line = b""
    while data := os.read(fd, LONGEST_LINE):
        *lines, rest = (line + data).split(b"\n")
        if any(one.rstrip(b"\r") == EXIT_LINE for one in lines):
            os._exit(0)
        # A line over the bound is kept at just over it: it cannot become the exit line any more.
        line = rest[: LONGEST_LINE + 1]
    os._exit(1)


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


def configure(params: Any, settings: dict[str, Any], wheel: Any) -> None:
    """Set dotted attributes of the native parameters."""
    for name, value in settings.items():
        *holders, last = name.split(".")
        target = params
        for holder in holders:
            target = getattr(target, holder)
        setattr(target, last, native(name, value, wheel))


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


def main() -> None:
    """Load the model and serve it until told to leave."""
    threading.Thread(target=obey_stdin, args=(take_stdin(),), daemon=True).start()
    try:
        import xllamacpp
    except ImportError as exc:
        sys.exit(f"error: {exc}: a hosted child needs the xllamacpp wheel (llamatrio[llama])")
    params = xllamacpp.CommonParams()
    configure(params, json.loads(sys.argv[1]), xllamacpp)
    params.api_keys = [os.environ["LLAMA_API_KEY"]]
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as exc:
        flush_log(xllamacpp)
        sys.exit(f"error: {exc}")
    threading.Event().wait()
    del server  # unreachable: it must live as long as the process


if __name__ == "__main__":
    main()
