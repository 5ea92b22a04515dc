"""A child of your own: a program that llamatrio starts in place of llama-server.

It runs no model: it answers with what it was told, a word at a time. To see it,

    kind = llamatrio.Own([sys.executable, "examples/own_child.py"])
    async with llamatrio.open_provider(llamatrio.ModelConfig("model.gguf"), backend=kind) as ...

or by hand, `python examples/own_child.py --host /tmp/own.sock`; it ends with its stdin.
"""

# Takes stdout before anything else can write to it: from here on all that is printed goes to the
# log, whoever prints it. host.py needs the standard library alone, so that it may also be copied
# to wherever llamatrio and Trio are not installed.
from llamatrio.child.host import die_with_parent, obey_stdin, reserve_stdout

if __name__ == "__main__":
    port = reserve_stdout()

import argparse
import hmac
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingMixIn
from typing import Any

if sys.platform == "win32":
    from socketserver import TCPServer as Listener
else:
    from socketserver import UnixStreamServer as Listener

KEY = os.environ.get("LLAMA_API_KEY", "")
SECONDS_PER_WORD = 0.02


class Handler(BaseHTTPRequestHandler):
    """Answers one request for each connection."""

    def do_GET(self) -> None:
        """Tell that it is there."""
        if self.path == "/health":
            self.answer(200, {"status": "ok"})
        else:
            self.refuse(404, "not_found_error", f"there is no {self.path}")

    def do_POST(self) -> None:
        """Stream an answer to a chat."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), KEY.encode()):
            self.refuse(401, "authentication_error", "Invalid API Key")
        elif self.path != "/v1/chat/completions" or not body.get("stream"):
            self.refuse(501, "not_supported_error", f"not made for {self.path}, or not streamed")
        else:
            self.stream(body)

    def stream(self, body: dict[str, Any]) -> None:
        """Send the words of the last message, each as an event, and the mark of the end."""
        words = f"You said: {body['messages'][-1]['content']}".split(" ")
        limit = body.get("max_tokens") or len(words)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number, word in enumerate(words[:limit]):
            time.sleep(SECONDS_PER_WORD)
            # Closing the connection is how llamatrio cancels: it breaks the loop here.
            self.event({"delta": {"content": f" {word}" if number else word}})
        self.event({"delta": {}, "finish_reason": "stop" if limit >= len(words) else "length"})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, choice: dict[str, Any]) -> None:
        """Send one event."""
        document = json.dumps({"choices": [{"index": 0, "finish_reason": None} | choice]})
        self.wfile.write(f"data: {document}\n\n".encode())

    def answer(self, status: int, document: object) -> None:
        """Send one document."""
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, kind: str, message: str) -> None:
        """Send an error as llama-server does."""
        self.answer(status, {"error": {"code": status, "type": kind, "message": message}})

    def log_message(self, format: str, *args: object) -> None:
        """Log a request; a unix socket has no address to tell."""
        print(format % args)


class Server(ThreadingMixIn, Listener):
    """A thread for each connection; they end with the process."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say in the log that a connection broke, or what went wrong."""
        print("a request was given up")


def main() -> None:
    """Listen, load, tell that it is ready, and serve until told to leave."""
    die_with_parent()
    threading.Thread(target=obey_stdin, args=(0,), daemon=True).start()
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True, help="the path of a socket; on Windows an address")
    parser.add_argument("--port", type=int, help="on Windows")
    chosen, others = parser.parse_known_args()  # the rest of llama-server's options
    print(f"{len(others)} words that mean nothing to this program")
    address: Any = (chosen.host, chosen.port) if sys.platform == "win32" else chosen.host
    server = Server(address, Handler)
    for tenths in range(11):
        port.loading(tenths / 10)
        time.sleep(0.005)
    port.ready({"id": "echo"})
    server.serve_forever()


if __name__ == "__main__":
    main()
