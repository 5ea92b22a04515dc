"""Take the port that a child was told to listen at, and start the child: it cannot have it.

`thief.py DIRECTORY TIMES COMMAND...` does so that many times; then it only starts the child.
"""

import os
import re
import signal
import socket
import sys
from pathlib import Path

directory, times, *command = sys.argv[1:]
before = len(list(Path(directory).glob("stolen-*")))
if before < int(times):
    port = re.search(r'--port (\d+)|"port": (\d+)', " ".join(command))
    assert port is not None
    taken = socket.socket()
    taken.bind(("127.0.0.1", int(port[1] or port[2])))
    taken.listen()
    if os.fork() == 0:
        signal.pause()  # it ends with its group
    Path(directory, f"stolen-{before}").touch()
os.execv(command[0], command)
