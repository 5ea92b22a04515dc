"""A stand-in for an xllamacpp wheel from before b11401, to be copied to where it is imported from.

Like one of those it begins each record with a newline, and writes to stdout itself for as long as
it lives. The records here are what a wheel would write, and what nobody should.
"""

import os
import threading
import time

PREFIX = b"cmd_child_to_router:state:"
LOADING = PREFIX + b'{"state":"loading","payload":{"stage":"text_model"}}'
READY = PREFIX + b'{"state":"ready","payload":{"id":"old"}}'
SLEEPING = PREFIX + b'{"state":"sleeping","payload":null}'
LATER = [
    b"a line of log\n",
    b"half a line of log",
    b"\n" + SLEEPING + b"\n",
    SLEEPING[:7],
    SLEEPING[7:40],
    SLEEPING[40:] + b"\n" + LOADING + b"\nthe next",
    b" begins\n\0\xff\n",
    b"not at the beginning: " + READY + b"\n",
    PREFIX + b"x" * 100_000 + READY + b"\n",
    PREFIX + b"x" * 5000 + b"\n",
    b"y" * 4096,
    READY + b"\n",
    *[b"z" * 2**16] * 128,
    b"\n",
    PREFIX + b"{}\n",
]

if __name__ == "xllamacpp":
    os.write(1, b"printed by the import\n")
    print("printed by its Python code")


class Parameters:
    """Takes all settings but one."""

    def __getattr__(self, name: str) -> "Parameters":
        if name == "hostnames":
            raise AttributeError(name)
        holder = Parameters()
        setattr(self, name, holder)
        return holder


class Server:
    """Loads at once, and goes on to write when somebody has come between."""

    def __init__(self, params: Parameters) -> None:
        os.write(1, b"\n" + LOADING + b"\n")
        os.write(1, b"\n" + READY + b"\n")
        os.write(2, f"listening on {params.hostname}\n".encode())
        threading.Thread(target=write_later, args=(os.fstat(1),), daemon=True).start()


def write_later(stdout: os.stat_result) -> None:
    while os.path.samestat(os.fstat(1), stdout):
        time.sleep(0.001)
    for piece in LATER:
        os.write(1, piece)
        if len(piece) < 2**16:
            time.sleep(0.01)  # so that pieces are read apart, most of the time


CommonParams = Parameters
