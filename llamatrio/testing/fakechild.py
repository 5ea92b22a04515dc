r"""Act as a llama.cpp child whose every move is scripted on the command line.

A supervisor has to survive children that hang, lie, stutter and die at the worst moment, which a
real child will not do on demand. This program does. It needs nothing but an interpreter and is
run by its path, so it starts fast and shares no code with what it tests::

    python -P fakechild.py "S loading" "W 0.2" "S ready" "H ok" R -- --host /dir/x.sock

The steps are taken in order up to ``--`` or the end; then the program exits with code 0. What
follows ``--`` is what a supervisor appends for its own purposes; only ``--host`` is looked at.

A step is one argument that holds its operands too, separated by blanks, or the operands follow as
arguments of their own. An optional operand is taken unless it is the name of a step.

=========================  ======================================================================
Step                       Effect
=========================  ======================================================================
``S state [payload]``      write a state line; the payload is JSON, copied as it is, default null
``Sn state N``             the same with a payload of N bytes, for what no argument can hold
``Sp N``                   write N state lines of a load that gets on, as fast as they are read
``St N seconds``           write N state lines of a load, that far apart; the stage is the time
``O text``, ``E text``     write to stdout, stderr; ``\n \r \t \0 \e \\ \xff`` stand for bytes
``On N``, ``En N``         write N bytes of filler without a newline
``P N [text]``             pour N bytes of the text, or of filler, to stderr, in the background
``W seconds``              wait
``W? [seed]``              cut the next write at random places, with tiny pauses between
``R``                      wait for the exit line, or the end, of stdin
``R!``                     the same, and never read again: a later ``R`` waits for ever
``X code``                 exit at once with that code
``K name``                 send itself that signal, such as KILL or SEGV, without a core dump
``I name``                 ignore that signal from now on
``C name``                 close stdout or stderr; what is written there later goes nowhere
``F seconds``              leave a grandchild that holds all pipes for that long
``F! seconds``             the same in a session of its own, out of reach of a group signal
``H mode [operand ...]``   serve HTTP from now on; a later ``H`` changes the mode
``Q``                      wait for a request that no ``Q`` has seen yet
``A``                      let the requests of mode ``late`` be answered
=========================  ======================================================================

``H`` listens on the unix socket named by ``--host``, or else by ``LLAMATRIO_SOCKET``, in a thread
of the background. Like a real child it does not remove a stale socket but fails to bind (code 1).
Take ``F`` before ``H``: a grandchild would hold the open connections as well.

=========================  ======================================================================
Mode                       Answer to a completion or chat completion
=========================  ======================================================================
``ok``                     a few pieces and the right end, streamed
``stream [N [seconds]]``   N pieces (20) that many seconds apart (0.01), and the right end
``hang``                   none; the connection stays open
``late``                   as ok, once the step ``A`` was taken
``drop``                   headers and two pieces; then the connection is closed
``garbage``                as ok, but the second event is not JSON
``big``                    as ok, but the second event is one line of 20 MB
``500``, ``401``           that status with an error document
=========================  ======================================================================

``GET /health`` is answered with 200 in all modes but ``hang``, as a real child with a broken back
end or a key does. Each connection serves one request. ``FAKECHILD_LOG`` may name a file, to which
one line of JSON is appended per request, as soon as it was read: ``method``, ``path``,
``headers`` (names in lower case) and ``body`` (parsed if it is JSON). If the client closes the
connection before its answer is complete, a line ``{"closed": true, "method": ..., "path": ...,
"events": N}`` follows, where N events were sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

assert sys.platform != "win32"  # it forks, and serves on a unix socket

PATH: Final = __file__
"""Where this program is."""

STATE_PREFIX: Final = b"cmd_child_to_router:state:"
EXIT_LINE: Final = b"cmd_router_to_child:exit"
_PROGRESS: Final = STATE_PREFIX + b'{"state":"loading","payload":{"value":%.6f}}\n'

_STDIN: Final = 0
_STDOUT: Final = 1
_STDERR: Final = 2

_USAGE_ERROR: Final = 2  # exit code
_READ_BYTES: Final = 65536
_MOST_CUTS: Final = 8
_LONGEST_PAUSE: Final = 0.005  # seconds, between the parts of a cut write
_BIG_EVENT_BYTES: Final = 20_000_000
_PIECES: Final = ("Every", " answer", " here", " is", " a", " fake.")
_ESCAPE: Final = re.compile(rb"\\(x[0-9a-fA-F]{2}|[nrt0e\\])")
_ESCAPED: Final = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"0": b"\0", b"e": b"\x1b", b"\\": b"\\"}


def command(*steps: str) -> tuple[str, ...]:
    """Return the command line, as far as ``--``, of a fake child that takes these steps."""
    return (sys.executable, "-P", PATH, *steps, "--")


class _Child:
    """What the steps act on; one method per step."""

    def __init__(self, options: Sequence[str]) -> None:
        self._options = options
        self._cuts: random.Random | None = None
        self._unread = b""
        self._reads = True
        self._server: _Server | None = None

    def write_state(self, state: str, payload: str = "null") -> None:
        # The payload is not parsed: one that is no JSON must be possible.
        document = b'{"state":%b,"payload":%b}' % (json.dumps(state).encode(), os.fsencode(payload))
        self._write(_STDOUT, STATE_PREFIX + document + b"\n")

    def write_long_state(self, state: str, size: str) -> None:
        frame = '{"filler":"%s"}'
        self.write_state(state, frame % ("x" * (int(size) - len(frame % ""))))

    def write_progress(self, count: str) -> None:
        last, batch = int(count), 1000  # lines in one write
        for first in range(1, last + 1, batch):
            numbers = range(first, min(first + batch, last + 1))
            _write_all(_STDOUT, b"".join(_PROGRESS % (number / last) for number in numbers))

    def write_times(self, count: str, seconds: str) -> None:
        for _ in range(int(count)):
            # The same clock for all processes, if the system is not that of Windows.
            self.write_state("loading", f'{{"stage":"{time.monotonic():.6f}"}}')
            time.sleep(float(seconds))

    def write_stdout(self, text: str) -> None:
        self._write(_STDOUT, _decode_escapes(text))

    def write_stderr(self, text: str) -> None:
        self._write(_STDERR, _decode_escapes(text))

    def close_stream(self, name: str) -> None:
        streams = {"stdout": _STDOUT, "stderr": _STDERR}
        if name not in streams:
            raise ValueError(f"no such stream: {name}")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, streams[name])
        os.close(nowhere)

    def pour(self, size: str, text: str = "x") -> None:
        piece = _decode_escapes(text)
        block = piece * (_READ_BYTES // len(piece) + 1)
        threading.Thread(target=self._pour, args=(block, int(size)), daemon=True).start()

    @staticmethod
    def _pour(block: bytes, size: int) -> None:
        while size > 0:
            _write_all(_STDERR, block[:size])
            size -= len(block)

    def fill_stdout(self, size: str) -> None:
        self._write(_STDOUT, b"x" * int(size))

    def fill_stderr(self, size: str) -> None:
        self._write(_STDERR, b"x" * int(size))

    def wait(self, seconds: str) -> None:
        time.sleep(float(seconds))

    def cut_next_write(self, seed: str | None = None) -> None:
        self._cuts = random.Random(seed)

    def wait_exit_line(self) -> None:
        while not self._reads:
            signal.pause()
        while EXIT_LINE not in (line := self._read_line()):
            if not line:
                return

    def wait_last_exit_line(self) -> None:
        self.wait_exit_line()
        self._reads = False

    def exit(self, code: str) -> NoReturn:
        os._exit(int(code))

    def kill(self, name: str) -> None:
        import resource  # not on Windows, where `command` must still be importable

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = _signal_named(name)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)  # our parent may have been told to ignore it
        os.kill(os.getpid(), number)

    def ignore(self, name: str) -> None:
        signal.signal(_signal_named(name), signal.SIG_IGN)

    def fork(self, seconds: str) -> None:
        if os.fork() == 0:
            time.sleep(float(seconds))
            os._exit(0)

    def fork_apart(self, seconds: str) -> None:
        if os.fork() == 0:
            os.setsid()
            time.sleep(float(seconds))
            os._exit(0)

    def serve(self, mode: str, *operands: str) -> None:
        if mode not in _ANSWERS:
            raise ValueError(f"no such mode: {mode}")
        if self._server is None:
            self._server = _Server(_socket_path(self._options))
        self._server.mode = (mode, *operands)

    def wait_request(self) -> None:
        self._serving().arrived.acquire()

    def let_answer(self) -> None:
        self._serving().may_answer.set()

    def _serving(self) -> _Server:
        if self._server is None:
            raise ValueError("a step needs H before it")
        return self._server

    def _read_line(self) -> bytes:
        """Return the next line of stdin, or nothing at its end, whatever is left unfinished."""
        while b"\n" not in self._unread:
            data = os.read(_STDIN, _READ_BYTES)
            if not data:
                return b""
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line + b"\n"

    def _write(self, fd: int, data: bytes) -> None:
        cuts, self._cuts = self._cuts, None
        if cuts is None:
            _write_all(fd, data)
            return
        for part in _cut(data, cuts):
            _write_all(fd, part)
            time.sleep(cuts.uniform(0, _LONGEST_PAUSE))


@dataclass(frozen=True, slots=True)
class _Step:
    act: Callable[..., None]
    required: int
    optional: int = 0


_STEPS: Final[Mapping[str, _Step]] = {
    "S": _Step(_Child.write_state, 1, 1),
    "Sn": _Step(_Child.write_long_state, 2),
    "Sp": _Step(_Child.write_progress, 1),
    "O": _Step(_Child.write_stdout, 1),
    "E": _Step(_Child.write_stderr, 1),
    "C": _Step(_Child.close_stream, 1),
    "St": _Step(_Child.write_times, 2),
    "P": _Step(_Child.pour, 1, 1),
    "On": _Step(_Child.fill_stdout, 1),
    "En": _Step(_Child.fill_stderr, 1),
    "W": _Step(_Child.wait, 1),
    "W?": _Step(_Child.cut_next_write, 0, 1),
    "R": _Step(_Child.wait_exit_line, 0),
    "R!": _Step(_Child.wait_last_exit_line, 0),
    "X": _Step(_Child.exit, 1),
    "K": _Step(_Child.kill, 1),
    "I": _Step(_Child.ignore, 1),
    "F": _Step(_Child.fork, 1),
    "F!": _Step(_Child.fork_apart, 1),
    "H": _Step(_Child.serve, 1, 2),
    "Q": _Step(_Child.wait_request, 0),
    "A": _Step(_Child.let_answer, 0),
}


def _parse(script: Sequence[str]) -> Iterator[tuple[_Step, list[str]]]:
    words = deque(script)
    while words:
        name, blank, rest = words.popleft().partition(" ")
        if name not in _STEPS:
            raise ValueError(f"no such step: {name}")
        step = _STEPS[name]
        most = step.required + step.optional
        if blank:
            # The last operand keeps its blanks: it may be a text or a payload.
            operands = rest.split(" ", max(most - 1, 0))
        else:
            operands = [words.popleft() for _ in range(min(step.required, len(words)))]
            while words and len(operands) < most and words[0].partition(" ")[0] not in _STEPS:
                operands.append(words.popleft())
        if not step.required <= len(operands) <= most:
            raise ValueError(f"step {name} takes {step.required} to {most} operands: {operands}")
        yield step, operands


def _decode_escapes(text: str) -> bytes:
    def decode(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return _ESCAPED[code] if code in _ESCAPED else bytes.fromhex(code[1:].decode())

    return _ESCAPE.sub(decode, os.fsencode(text))


def _signal_named(name: str) -> signal.Signals:
    name = "SIG" + name.removeprefix("SIG")
    if name not in signal.Signals.__members__:
        raise ValueError(f"no such signal: {name}")
    return signal.Signals[name]


def _cut(data: bytes, choice: random.Random) -> Iterator[bytes]:
    places = range(1, len(data))
    cuts = sorted(choice.sample(places, min(len(places), choice.randint(1, _MOST_CUTS))))
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        yield data[start:end]


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# HTTP


def _socket_path(options: Sequence[str]) -> str:
    if "--host" in options[:-1]:
        return options[options.index("--host") + 1]
    path = os.environ.get("LLAMATRIO_SOCKET")
    if path is None:
        raise ValueError("step H needs --host or LLAMATRIO_SOCKET")
    return path


def _record(**entry: object) -> None:
    path = os.environ.get("FAKECHILD_LOG")
    if path is not None:
        # One write in append mode: lines of different threads do not mix.
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(fd, "wb", buffering=0) as log:
            log.write(_encode(entry) + b"\n")


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    headers: dict[str, str]
    body: object

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("/chat/completions")


def _read_request(connection: socket.socket) -> _Request:
    with connection.makefile("rb") as file:
        method, path, _ = file.readline().decode("latin-1").split(" ", 2)
        headers: dict[str, str] = {}
        while line := file.readline().strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        text = file.read(int(headers.get("content-length", "0"))).decode(errors="replace")
    body: object = text
    with contextlib.suppress(ValueError):
        body = json.loads(text)
    return _Request(method, path, headers, body)


class _Exchange:
    """One request and the answer to it."""

    def __init__(
        self, connection: socket.socket, request: _Request, may_answer: threading.Event
    ) -> None:
        self._connection = connection
        self.request = request
        self.may_answer = may_answer
        self.events = 0

    def answer(self, status: str, document: object) -> None:
        """Send a whole answer that is not a stream."""
        body = _encode(document)
        self._send_head(status, "application/json; charset=utf-8", f"Content-Length: {len(body)}")
        self._connection.sendall(body)

    def begin(self) -> None:
        """Send the head of a stream and the events that come before any text."""
        self._send_head("200 OK", "text/event-stream", "Transfer-Encoding: chunked")
        if self.request.is_chat:
            self.send_event(_chat_event({"role": "assistant", "content": None}))

    def send_text(self, text: str) -> None:
        if self.request.is_chat:
            self.send_event(_chat_event({"content": text}))
        else:
            self.send_event({"index": 0, "content": text, "stop": False})

    def finish(self, pieces: int) -> None:
        """Send the mark by which the end of an answer is told from a cut, and end the stream."""
        timings = {"prompt_n": 3, "prompt_ms": 1.0, "predicted_n": pieces, "predicted_ms": 1.0}
        if self.request.is_chat:
            self.send_event({**_chat_event({}, "stop"), "timings": timings})
            self.send_line(b"[DONE]")
        else:
            end = {"index": 0, "content": "", "stop": True, "stop_type": "eos"}
            counts = {"tokens_predicted": pieces, "tokens_evaluated": 3}
            self.send_event({**end, **counts, "timings": timings})
        with contextlib.suppress(ConnectionError):  # a client that has the mark may leave
            self._connection.sendall(b"0\r\n\r\n")

    def send_event(self, document: Mapping[str, object]) -> None:
        self.send_line(_encode(document))

    def send_line(self, text: bytes) -> None:
        data = b"data: %b\n\n" % text
        self._connection.sendall(b"%x\r\n%b\r\n" % (len(data), data))
        self.events += 1

    def pause(self, seconds: float | None) -> None:
        """Wait that long, or for ever, but notice at once if the client closes."""
        self._connection.settimeout(seconds)
        try:
            while self._connection.recv(_READ_BYTES):
                pass  # more than the one request: ignored
        except TimeoutError:
            return
        finally:
            self._connection.settimeout(None)
        raise ConnectionResetError("the client closed the connection")

    def _send_head(self, status: str, content_type: str, length: str) -> None:
        lines = (f"HTTP/1.1 {status}", f"Content-Type: {content_type}", length, "Connection: close")
        self._connection.sendall("\r\n".join((*lines, "", "")).encode())


def _encode(document: object) -> bytes:
    # As compact as the real child writes it, for a reader that looks for bytes.
    return json.dumps(document, separators=(",", ":")).encode()


def _chat_event(delta: Mapping[str, object], reason: str | None = None) -> dict[str, object]:
    choice = {"finish_reason": reason, "index": 0, "delta": delta}
    return {"choices": [choice], "object": "chat.completion.chunk"}


def _answer_ok(exchange: _Exchange) -> None:
    exchange.begin()
    for piece in _PIECES:
        exchange.send_text(piece)
    exchange.finish(len(_PIECES))


def _answer_slowly(exchange: _Exchange, count: str = "20", seconds: str = "0.01") -> None:
    exchange.begin()
    for number in range(int(count)):
        exchange.pause(float(seconds))
        exchange.send_text(f" {number}")
    exchange.finish(int(count))


def _answer_late(exchange: _Exchange) -> None:
    exchange.may_answer.wait()
    _answer_ok(exchange)


def _answer_never(exchange: _Exchange) -> None:
    exchange.pause(None)


def _answer_half(exchange: _Exchange) -> None:
    exchange.begin()
    for piece in _PIECES[:2]:
        exchange.send_text(piece)


def _answer_garbage(exchange: _Exchange) -> None:
    exchange.begin()
    exchange.send_text(_PIECES[0])
    exchange.send_line(b'{"content":')
    exchange.finish(1)


def _answer_big(exchange: _Exchange) -> None:
    exchange.begin()
    exchange.send_text(_PIECES[0])
    exchange.send_text("x" * _BIG_EVENT_BYTES)
    exchange.finish(2)


def _answer_broken(exchange: _Exchange) -> None:
    exchange.answer("500 Internal Server Error", _error(500, "Compute error.", "server_error"))


def _answer_refused(exchange: _Exchange) -> None:
    exchange.answer("401 Unauthorized", _error(401, "Invalid API Key", "authentication_error"))


def _error(code: int, message: str, kind: str) -> dict[str, object]:
    return {"error": {"code": code, "message": message, "type": kind}}


_ANSWERS: Final[Mapping[str, Callable[..., None]]] = {
    "ok": _answer_ok,
    "stream": _answer_slowly,
    "late": _answer_late,
    "hang": _answer_never,
    "drop": _answer_half,
    "garbage": _answer_garbage,
    "big": _answer_big,
    "500": _answer_broken,
    "401": _answer_refused,
}


class _Server:
    """A thread that accepts, and one for each connection; they end with the process."""

    def __init__(self, path: str) -> None:
        self.mode: tuple[str, ...] = ("ok",)
        self.arrived = threading.Semaphore(0)
        self.may_answer = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(128)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                request = _read_request(connection)
            except (ValueError, ConnectionError):
                return  # a client that connected and left, which is also how one may knock
            _record(
                method=request.method, path=request.path, headers=request.headers, body=request.body
            )
            exchange = _Exchange(connection, request, self.may_answer)
            try:
                self._answer(exchange)
            except ConnectionError:
                _record(
                    closed=True, method=request.method, path=request.path, events=exchange.events
                )

    def _answer(self, exchange: _Exchange) -> None:
        mode, *operands = self.mode
        if exchange.request.path == "/health" and mode != "hang":
            exchange.answer("200 OK", {"status": "ok"})
            return
        self.arrived.release()
        _ANSWERS[mode](exchange, *operands)


def _main(arguments: Sequence[str]) -> NoReturn:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    child = _Child(arguments[end + 1 :])
    try:
        # All of it before the first step: a wrong script must not look like a child that failed.
        script = list(_parse(arguments[:end]))
        for step, operands in script:
            step.act(child, *operands)
    except ValueError as error:
        _write_all(_STDERR, f"fakechild: {error}\n".encode())
        os._exit(_USAGE_ERROR)
    # Not sys.exit: it would wait for nothing useful and could trip over the threads.
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1:])
