"""Servers that somebody else owns: real ones, and one that is as strict as OpenAI's own."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import attrs
import h11
import trio

from llamatrio import Hosted, ModelConfig
from llamatrio.child import host
from llamatrio.child.launch import Address, Kind, plan
from llamatrio.session.programs import find_program

KEY = "sk-open-sesame-1234"


# -- real ones ---------------------------------------------------------------------------------


@attrs.define(eq=False)
class RealServer:
    """A llama-server, or a hosted one, that nobody supervises.

    Attributes:
      url: Where it is.
      process: It.
    """

    url: str
    process: trio.Process

    async def kill(self) -> None:
        """End it without a word."""
        self.process.kill()
        await self.process.wait()


def unix_address() -> str:
    """A new path for a socket."""
    return os.path.join(tempfile.gettempdir(), f"{secrets.token_hex(4)}.sock")


@contextmanager
def deaf_port() -> Iterator[int]:
    """A loopback port that is taken, and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def tcp_address() -> tuple[str, int]:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return "127.0.0.1", port


@asynccontextmanager
async def running(
    kind: Kind, config: ModelConfig, address: Address | None = None
) -> AsyncGenerator[RealServer, None]:
    """Run a server that listens; it may still be loading."""
    address = unix_address() if address is None else address
    environ, command = _launch(kind, config, address)
    async with _running(command, environ, address, signal.SIGKILL) as server:
        yield server


@asynccontextmanager
async def routing(program: str, directory: Path) -> AsyncGenerator[RealServer, None]:
    """Run a llama-server as the router of all models in a directory."""
    address = tcp_address()
    options = ["--models-dir", str(directory), "--host", address[0], "--port", str(address[1])]
    environ = {"LLAMA_API_KEY": KEY, "PATH": os.defpath, "XDG_CONFIG_HOME": "/dev/null"}
    # Its children would outlive a SIGKILL for a moment.
    async with _running((program, *options), environ, address, signal.SIGTERM) as server:
        yield server


@asynccontextmanager
async def _running(
    command: Sequence[str], environ: Mapping[str, str], address: Address, end: signal.Signals
) -> AsyncGenerator[RealServer, None]:
    devnull = subprocess.DEVNULL
    process = await trio.lowlevel.open_process(
        command, env=environ, stdin=subprocess.PIPE, stdout=devnull, stderr=devnull
    )
    assert process.stdin is not None
    try:
        await _listening(address, process)
        yield RealServer(_url(address), process)
    finally:
        process.send_signal(end)
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdin.aclose()
        if isinstance(address, str):
            with suppress(FileNotFoundError):
                os.unlink(address)


def _launch(
    kind: Kind, config: ModelConfig, address: Address
) -> tuple[Mapping[str, str], tuple[str, ...]]:
    launch = plan(
        kind,
        config,
        program=find_program(kind),
        host_program=host.__file__,
        address=address,
        key=KEY,
        environ=os.environ,
    )
    environ = dict(launch.environ)
    if not isinstance(kind, Hosted):
        del environ["LLAMA_SERVER_ROUTER_PORT"]  # it is nobody's child
    return environ, launch.command


async def _listening(address: Address, process: trio.Process) -> None:
    while True:
        try:
            if isinstance(address, str):
                stream = await trio.open_unix_socket(address)
            else:
                stream = await trio.open_tcp_stream(*address)
        except OSError:
            assert process.poll() is None, "the server has ended"
            await trio.sleep(0.01)
        else:
            stream.socket.close()
            return


def _url(address: Address) -> str:
    return f"unix:{address}" if isinstance(address, str) else f"http://127.0.0.1:{address[1]}"


# -- a scripted one ----------------------------------------------------------------------------

TEXT = "I am not a parrot."
PIECES = ("I am", " not", " a parrot.")

KNOWN = {
    "/chat/completions": {"messages", "tools", "response_format", "max_completion_tokens"},
    "/completions": {"prompt"},
    "/embeddings": {"input", "encoding_format"},
    "/responses": {"input", "max_output_tokens"},
}
COMMON = {"model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop"}


@attrs.frozen
class Call:
    """One request as it arrived."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: Mapping[str, object]


class Exchange:
    """One request, and the means to answer it."""

    def __init__(self, stream: trio.abc.Stream, call: Call, http: h11.Connection) -> None:
        self.call = call
        self._stream = stream
        self._http = http

    async def send(self, *events: h11.Event) -> None:
        await self._stream.send_all(b"".join(self._http.send(event) or b"" for event in events))

    async def json(self, status: int, document: object) -> None:
        data = json.dumps(document).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
        head = h11.Response(status_code=status, headers=headers)
        await self.send(head, h11.Data(data), h11.EndOfMessage())

    async def error(self, status: int, message: str, code: str | None = None) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        await self.json(status, {"error": error})

    async def begin(self) -> None:
        await self.send(
            h11.Response(status_code=200, headers=[("Content-Type", "text/event-stream")])
        )
        await self.piece({"role": "assistant", "content": ""})

    async def piece(self, delta: Mapping[str, object], reason: str | None = None) -> None:
        await self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    async def event(self, document: object) -> None:
        await self.send(h11.Data(f"data: {json.dumps(document)}\n\n".encode()))

    async def finish(self) -> None:
        await self.piece({}, "stop")
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        await self.event({"choices": [], "usage": usage})
        await self.send(h11.Data(b"data: [DONE]\n\n"), h11.EndOfMessage())


Behaviour: TypeAlias = Callable[[Exchange], Awaitable[None]]


async def speak(exchange: Exchange) -> None:
    """Say it all."""
    await exchange.begin()
    for piece in PIECES:
        await exchange.piece({"content": piece})
    await exchange.finish()


async def die(exchange: Exchange) -> None:
    """Break off within the answer."""
    await exchange.begin()
    await exchange.piece({"content": PIECES[0]})


async def end_early(exchange: Exchange) -> None:
    """End in good order, but without the mark at the end."""
    await die(exchange)
    await exchange.send(h11.EndOfMessage())


class OpenAI:
    """Refuses what OpenAI's own refuses, and has no `/health`.

    Args:
      models: The models that it has.
      root: What its endpoints begin with.

    Attributes:
      loading: Whether it says, as a llama-server does, that it is not ready yet.
      gone: Whether it closes every connection at once.
      key: What it wants to hear.
      speak: How it answers a chat.
      calls: What it was asked, in order.
      url: Where it is, without the root.
    """

    url: str

    def __init__(self, *models: str, root: str = "/v1") -> None:
        self.models = models or ("gpt",)
        self.root = root
        self.loading = False
        self.gone = False
        self.key = KEY
        self.speak: Behaviour = speak
        self.calls: list[Call] = []

    async def serve(self, stream: trio.abc.Stream) -> None:
        """Serve one connection, which is for one request."""
        http = h11.Connection(h11.SERVER)
        try:
            if self.gone:
                return
            call = await _read(stream, http)
            self.calls.append(call)
            await self._answer(Exchange(stream, call, http))
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            pass  # the client has gone
        finally:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)

    async def _answer(self, exchange: Exchange) -> None:
        call = exchange.call
        given = call.headers.get("authorization", "").removeprefix("Bearer ")
        path = call.target.removeprefix(self.root)
        if self.loading:
            error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
            await exchange.json(503, {"error": error})
        elif not call.target.startswith(self.root) or path not in {"/models", *KNOWN}:
            await exchange.error(404, f"Invalid URL ({call.method} {call.target})")
        elif given != self.key:
            message = f"Incorrect API key provided: {given}."
            await exchange.error(401, message, f"no_{given}")
        elif path == "/models":
            entries = [{"id": name, "object": "model", "owned_by": "me"} for name in self.models]
            await exchange.json(200, {"object": "list", "data": entries})
        elif unknown := call.body.keys() - KNOWN[path] - COMMON:
            await exchange.error(400, f"Unrecognized request argument supplied: {min(unknown)}")
        elif call.body.get("model") not in self.models:
            await exchange.error(404, "The model does not exist", "model_not_found")
        elif path == "/embeddings":
            await exchange.json(200, {"data": [{"index": 0, "embedding": [0.6, 0.8]}]})
        else:
            await self.speak(exchange)


async def _read(stream: trio.abc.Stream, http: h11.Connection) -> Call:
    body = b""
    request: h11.Request | None = None
    while not isinstance(event := http.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            http.receive_data(bytes(await stream.receive_some(65536)))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        else:
            raise trio.BrokenResourceError  # it asked nothing
    assert request is not None
    headers = {name.decode(): value.decode() for name, value in request.headers}
    document = json.loads(body) if body else {}
    return Call(request.method.decode(), request.target.decode(), headers, document)


@asynccontextmanager
async def scripted(
    server: OpenAI | None = None, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[OpenAI, None]:
    """Let a scripted server listen on a loopback port."""
    server = server or OpenAI()
    async with talking(server.serve, tls) as port:
        server.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        yield server


@asynccontextmanager
async def talking(
    talk: Callable[[trio.abc.Stream], Awaitable[None]], tls: ssl.SSLContext | None = None
) -> AsyncGenerator[int, None]:
    """Let anything listen on a loopback port; give the port."""

    async def handle(stream: trio.SocketStream) -> None:
        await talk(stream if tls is None else trio.SSLStream(stream, tls, server_side=True))

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, handle, [listener])  # noqa: ASYNC113 - it listens
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()
