"""Write records from eight threads and beside forks: `crowd.py HOST RECORDS FORKS`.

Each fork tries to write a record by the port, prints a line, and writes records of the greatest
length to a copy of the descriptor, as one could that native code had made.
"""

import os
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamatrio.child.host import StatePort

THREADS = 8
COPIES = 50


def write(port: "StatePort", number: int, records: int) -> None:
    for index in range(records):
        filler = "x" * (index * 97 % 4000)
        port.send("loading", {"thread": number, "index": index, "filler": filler})


def be_a_fork(port: "StatePort", copy: int, number: int) -> None:
    try:
        port.sleeping()
    except RuntimeError as exc:
        print(f"fork: {exc}")
    start = b'cmd_child_to_router:state:{"state":"fork%d","payload":"' % number
    line = start + b"z" * (4096 - len(start) - 3) + b'"}\n'
    for _ in range(COPIES):
        os.write(copy, line)
    sys.stdout.flush()
    os._exit(0)


def main(path: str, records: int, forks: int) -> None:
    port = import_module("noisy").load_host(path).reserve_stdout()
    copy = os.dup(port.fileno())
    threads = [
        threading.Thread(target=write, args=(port, number, records)) for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    pids = []
    for number in range(forks):
        if (pid := os.fork()) == 0:
            be_a_fork(port, copy, number)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
