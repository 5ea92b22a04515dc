"""A server that lets everybody in: it answers 200 to whatever it is asked, and keeps that.

`open_to_all.py FILE ... --port PORT` appends to FILE what it reads.
"""

import socket
import sys
import threading

listener = socket.socket()
listener.bind(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
listener.listen()


def serve() -> None:
    while True:
        connection, _ = listener.accept()
        with connection, open(sys.argv[1], "ab") as file:
            file.write(connection.recv(65536))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


threading.Thread(target=serve, daemon=True).start()
print('cmd_child_to_router:state:{"state":"ready"}', flush=True)
sys.stdin.readline()
