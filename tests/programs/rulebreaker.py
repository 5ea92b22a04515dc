#!/usr/bin/env python3
"""A child that is ready at once, and breaks one rule when it is first asked something.

    python rulebreaker.py RULE -- --model M --host S

It answers once the rule is broken, and never again.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path


def listen(_: list[str]) -> None:
    listener = socket.socket()
    listener.bind(("0.0.0.0", 0))
    listener.listen()
    listener.detach()


def listen_abstract(_: list[str]) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0rulebreaker-{os.getpid()}")
    listener.listen()
    listener.detach()


def hear_datagrams(_: list[str]) -> None:
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind(("0.0.0.0", 0))
    listener.detach()


def replace_program(words: list[str]) -> None:
    other = Path(words[0] + ".new")
    other.write_bytes(Path(words[0]).read_bytes() + b"# another one\n")
    other.chmod(0o755)
    other.rename(words[0])


def rewrite_model(words: list[str]) -> None:
    with open(words[words.index("--model") + 1], "r+b") as model:
        model.seek(-1, os.SEEK_END)
        model.write(b"!")


def execute_again(words: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, words[0], "nothing", "--other", *words[2:]])


def execute_with_variable(words: list[str]) -> None:
    command = [sys.executable, words[0], "nothing", *words[2:]]
    os.execve(sys.executable, command, {**os.environ, "LLAMA_ARG_TOOLS": "all"})


def start_another(_: list[str]) -> None:
    if os.fork() == 0:
        os.closerange(3, 1000)  # the connection
        os.read(0, 1)
        os._exit(0)


def leave_a_listener_behind(words: list[str]) -> None:
    """A process that nobody's tree shows: its parent is gone, and its session is its own."""
    ready, done = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(4, 1000)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(words[words.index("--host") + 1] + ".other")
            listener.listen()
            os.close(3)
            os.read(0, 1)
        os._exit(0)
    os.wait()
    os.close(done)
    os.read(ready, 1)
    os.close(ready)


def close_stdout(_: list[str]) -> None:
    os.close(1)


def close_stderr(_: list[str]) -> None:
    os.close(2)


def die(_: list[str]) -> None:
    os._exit(3)


def nothing(_: list[str]) -> None:
    pass


RULES = {
    rule.__name__: rule
    for rule in (
        listen,
        listen_abstract,
        hear_datagrams,
        replace_program,
        rewrite_model,
        execute_again,
        execute_with_variable,
        start_another,
        leave_a_listener_behind,
        close_stdout,
        close_stderr,
        die,
        nothing,
    )
}


def main(words: list[str]) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        if "--other" not in words and "LLAMA_ARG_TOOLS" not in os.environ:
            listener.bind(words[words.index("--host") + 1])
            listener.listen()
            os.write(1, b'cmd_child_to_router:state:{"state":"ready","payload":{"model":"m"}}\n')
            connection, _ = listener.accept()
            listener.close()
            connection.recv(65536)
            RULES[words[1]](words)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            connection.close()
        while os.read(0, 4096):
            pass


if __name__ == "__main__":
    main(sys.argv)
