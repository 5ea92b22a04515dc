"""Load in silence, but not idly: `burns.py SECONDS PAYLOAD ...` burns CPU time before it is ready.

The payload is that of the one record of the load.
"""

import sys
import time

STATE = 'cmd_child_to_router:state:{"state":"%s","payload":%s}\n'

sys.stdout.write(STATE % ("loading", sys.argv[2]))
sys.stdout.flush()
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    pass
sys.stdout.write(STATE % ("ready", "null"))
sys.stdout.flush()
while "exit" not in (line := sys.stdin.readline()) and line:
    pass
