"""Speaking HTTP to a child: one connection for each request.

llama-server closes a connection after a streamed answer although it had promised to keep it
(b11434), so that a pool of them fails its next request now and then; and closing the connection is
the one way to cancel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import closing
from typing import Final

import h11
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.child.launch import Address
from llamatrio.errors import AnswerTooLarge, BadAnswer, RequestRefused, StreamBroken
from llamatrio.outcomes import Finished
from llamatrio.requests import Request
from llamatrio.session.base import Emit, ModelSession
from llamatrio.wire.sse import AnswerReader, refusal

MAX_BODY: Final = 64 * 2**20
"""Bytes of an answer in one piece; 64 MiB hold the embeddings of several thousand texts."""

_CHUNK: Final = 2**16


class HttpSession(ModelSession):
    """Speaks to one child.

    Args:
      address: Where it listens.
      key: What it wants to hear.

    Attributes:
      last_cut: When a connection was last closed within its answer, on Trio's clock.
    """

    def __init__(self, address: Address, key: str) -> None:
        self._address = address
        self._key = key
        self._info: Mapping[str, object] = {}
        self.last_cut = -math.inf

    def __repr__(self) -> str:
        return f"<HttpSession {self._address!r}>"

    @property
    def info(self) -> Mapping[str, object]:
        """What the child said of the model when it was ready."""
        return self._info

    def learn(self, info: Mapping[str, object]) -> None:
        """Keep what the child says of the model."""
        self._info = info

    @enable_ki_protection
    async def perform(self, request: Request, emit: Emit) -> Finished:
        """Perform one request; see `ModelSession.perform`.

        Cancellation: closes the connection, which is what makes the child stop working on it.
        """
        whole = False
        try:
            with closing(await _connect(self._address)) as connection:
                await connection.send(request, self._key)
                answer = await _answer(connection, request, emit)
                whole = True
                return answer
        except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError) as exc:
            raise StreamBroken(f"the connection to the child broke: {exc}") from exc
        finally:
            if not whole:
                self.last_cut = trio.current_time()


class _Connection:
    """One request and its answer, over a connection of their own."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT)

    def close(self) -> None:
        """Close it at once; `aclose` of the stream would be a checkpoint."""
        self._stream.socket.close()

    async def send(self, request: Request, key: str) -> None:
        """Send the request."""
        body = request.encoded
        head = h11.Request(
            method=request.method,
            target=request.path,
            headers=[
                ("Host", "localhost"),
                ("Authorization", f"Bearer {key}"),
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ],
        )
        events = (head, h11.Data(body), h11.EndOfMessage())
        await self._stream.send_all(b"".join(self._http.send(event) or b"" for event in events))

    async def response(self) -> h11.Response:
        """Wait for the head of the answer."""
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                return event

    async def data(self) -> bytes:
        """Wait for the next part of the answer; none at its end."""
        event = await self._event()
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def _event(self) -> h11.Event:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._stream.receive_some(_CHUNK))
        if not isinstance(event, h11.Event):
            raise StreamBroken("the connection ended within the answer")
        return event


async def _connect(address: Address) -> _Connection:
    if isinstance(address, str):
        return _Connection(await trio.open_unix_socket(address))
    return _Connection(await trio.open_tcp_stream(*address))


async def _answer(connection: _Connection, request: Request, emit: Emit) -> Finished:
    response = await connection.response()
    if response.status_code != 200:
        raise _refused(response.status_code, await _body(connection))
    kind = _header(response, b"content-type")
    if not request.streamed:
        return await _whole(connection, response, kind)
    if not kind.startswith(b"text/event-stream"):
        raise BadAnswer(f"the child answers {request.path} with {kind!r} and not with a stream")
    reader = AnswerReader()
    while data := await connection.data():
        for piece in reader.feed(data):
            if isinstance(piece, Finished):
                return piece
            emit(piece)
    raise StreamBroken("the answer ended without its terminal mark")


def _header(response: h11.Response, wanted: bytes) -> bytes:
    return next((value for name, value in response.headers if name == wanted), b"")


async def _body(connection: _Connection) -> bytes:
    body = bytearray()
    while data := await connection.data():
        body += data
        if len(body) > MAX_BODY:
            raise AnswerTooLarge(f"an answer of more than {MAX_BODY} bytes")
    return bytes(body)


async def _whole(connection: _Connection, response: h11.Response, kind: bytes) -> Finished:
    """Read an answer in one piece: JSON, or plain text such as that of `/metrics`."""
    if not _header(response, b"content-length") and not _header(response, b"transfer-encoding"):
        raise BadAnswer("the child does not say how long its answer is: it could be cut anywhere")
    body = await _body(connection)
    if not kind.startswith(b"application/json"):
        return Finished("done", body=body.decode(errors="replace"))
    try:
        return Finished("done", body=json.loads(body))
    except (ValueError, RecursionError) as exc:
        raise BadAnswer(f"the child's answer is not JSON: {exc}") from exc


def _refused(status: int, body: bytes) -> RequestRefused:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        error = None
    if not isinstance(error, dict):
        error = {"type": f"status {status}", "message": body[:500].decode(errors="replace")}
    return refusal(status, error)
