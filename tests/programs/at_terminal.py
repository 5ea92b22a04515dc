"""Run a program with the terminal on stdin as its controlling terminal, where Ctrl-C is a signal.

`at_terminal.py COMMAND...` must be the leader of a session.
"""

import os
import sys

# Whoever leads a session without a terminal gets the first one that it opens.
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execv(sys.argv[1], sys.argv[1:])
