"""Speaking HTTP to a model's server: one connection for each request.

llama-server closes a connection after a streamed answer although it had promised to keep it
(b11434), so that a pool of them fails its next request now and then; and closing the connection is
the one way to cancel.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from secrets import token_hex
from typing import Final

import h11
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.child.launch import Address
from llamatrio.errors import AnswerTooLarge, BadAnswer, ChildError, RequestRefused, StreamBroken
from llamatrio.outcomes import Finished
from llamatrio.requests import Admitted, Request
from llamatrio.session.base import Emit, ModelSession
from llamatrio.wire.redaction import redact, redact_value
from llamatrio.wire.sse import AnswerReader, refusal

MAX_BODY: Final = 64 * 2**20
"""Bytes of an answer in one piece; 64 MiB hold the embeddings of several thousand texts."""

_CHUNK: Final = 2**16
_BREAKS: Final = (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError)


class HttpSession(ModelSession):
    """Speaks to one child.

    Args:
      address: Where it listens.
      key: What it wants to hear.
      check: Is awaited before a request is sent and again before its answer is taken, and raises if
        the child must not serve it.
      secrets: What must not be in an error that it raises; the answers themselves are left alone.

    Attributes:
      last_cut: When a connection was last closed within its answer, on Trio's clock.
    """

    def __init__(
        self,
        address: Address,
        key: str,
        check: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
        secrets: Sequence[str] = (),
    ) -> None:
        self._address = address
        self._key = key
        self._check = check
        self._secrets = secrets
        self._connections: set[Connection] = set()
        self._fault: ChildError | None = None
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
        await self._check()
        whole = False
        try:
            with closing(await _connect(self._address)) as connection, self._holding(connection):
                await connection.send(request.method, request.path, request.encoded, self._key)
                response = await connection.response()
                await self._check()
                answer = await read_answer(connection, response, request, emit)
                whole = True
                return answer
        except (OSError, *_BREAKS) as exc:
            if self._fault is not None:
                raise self._fault from None
            message = redact(f"the connection to the child broke: {exc}", self._secrets, cut=True)
            raise StreamBroken(message) from exc
        except RequestRefused as exc:
            raise redact_refusal(exc, self._secrets) from None
        finally:
            if not whole:
                self.last_cut = trio.current_time()

    def break_off(self, fault: ChildError) -> None:
        """Close all connections of a child that is ended for a fault, which their requests raise.

        A child obeys no exit line while one of them is open.
        """
        self._fault = fault
        for connection in self._connections:
            connection.close()
            self.last_cut = trio.current_time()

    @contextmanager
    def _holding(self, connection: Connection) -> Iterator[None]:
        if self._fault is not None:
            raise self._fault
        self._connections.add(connection)
        try:
            yield
        finally:
            self._connections.remove(connection)


class Connection:
    """One request and its answer, over a connection of their own.

    Args:
      transport: The connection, which is closed at the end.
      stream: What is spoken over, if that is another one above it, such as TLS.
    """

    def __init__(
        self, transport: trio.SocketStream, stream: trio.SSLStream[trio.SocketStream] | None = None
    ) -> None:
        self._transport = transport
        self._stream = stream or transport
        self._http = h11.Connection(h11.CLIENT)
        self._owner = os.getpid()

    def close(self) -> None:
        """Close it at once; `aclose` of the stream would be a checkpoint.

        A forked copy of the program holds the connection as well. It is shut down for that reason,
        or the child would not notice; and a copy leaves it alone, since it also shares the set in
        which Trio waits for it.
        """
        if os.getpid() == self._owner:
            with suppress(OSError):  # it is closed already
                self._transport.socket.shutdown(trio.socket.SHUT_RDWR)
            self._transport.socket.close()

    async def send(
        self, method: str, target: str, body: bytes, key: str | None, host: str = "localhost"
    ) -> None:
        """Send the request. Cancellation: leaves it half sent."""
        headers = [
            ("Host", host),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        if key is not None:
            headers.append(("Authorization", f"Bearer {key}"))
        head = h11.Request(method=method, target=target, headers=headers)
        events = (head, h11.Data(body), h11.EndOfMessage())
        await self._stream.send_all(b"".join(self._http.send(event) or b"" for event in events))

    async def response(self) -> h11.Response:
        """Wait for the head of the answer. Cancellation: abandons the answer."""
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                return event

    async def data(self) -> bytes:
        """Wait for the next part of the answer; none at its end. Cancellation: abandons it."""
        event = await self._event()
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def _event(self) -> h11.Event:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(bytes(await self._stream.receive_some(_CHUNK)))
        if not isinstance(event, h11.Event):
            raise StreamBroken("the connection ended within the answer")
        return event


async def is_ours(address: Address, key: str) -> bool:
    """Say whether the server at an address is the one that was given a key.

    One that lets everybody in is not; so it is asked with a wrong key first, and does not learn the
    right one if it is a stranger.

    Cancellation: abandons it.

    Raises:
      StreamBroken: if there is none, or it does not speak HTTP.
    """
    for given, answer in ((token_hex(32), 401), (key, 200)):
        try:
            with closing(await _connect(address)) as connection:
                await connection.send("GET", "/v1/models", b"", given)
                status = (await connection.response()).status_code
        except (OSError, *_BREAKS) as exc:
            raise StreamBroken(f"the connection to the child broke: {exc}") from exc
        if status != answer:
            return False
    return True


async def _connect(address: Address) -> Connection:
    if isinstance(address, str):
        return Connection(await trio.open_unix_socket(address))
    return Connection(await trio.open_tcp_stream(*address))


async def read_answer(
    connection: Connection, response: h11.Response, request: Request, emit: Emit
) -> Finished:
    """Read the answer to a request to its end.

    Cancellation: abandons it.

    Raises:
      RequestRefused: if it is an error.
      BadAnswer: if it is not of the form that was asked for.
      StreamBroken: if it ends without its terminal mark.
    """
    if response.status_code != 200:
        raise _refused(response.status_code, await read_body(connection))
    emit(Admitted())
    kind = header_of(response, b"content-type")
    if not request.streamed:
        return await _whole(connection, response, kind)
    if not kind.startswith(b"text/event-stream"):
        raise BadAnswer(f"the server answers {request.path} with {kind!r} and not with a stream")
    reader = AnswerReader()
    while data := await connection.data():
        for piece in reader.feed(data):
            if isinstance(piece, Finished):
                return piece
            emit(piece)
    raise StreamBroken("the answer ended without its terminal mark")


def redact_refusal(error: RequestRefused, secrets: Sequence[str]) -> RequestRefused:
    """Return what a server refused a request with, without the secrets that it may repeat."""
    kind = redact(error.kind, secrets, cut=True)
    message = redact(error.message, secrets, cut=True)
    details = redact_value(error.details, secrets)
    assert isinstance(details, dict)
    return type(error)(error.status, kind, message, details)


def header_of(response: h11.Response, wanted: bytes) -> bytes:
    """Return one header of an answer, by its name in small letters; empty if it is not there."""
    return next((value for name, value in response.headers if name == wanted), b"")


async def read_body(connection: Connection) -> bytes:
    """Read an answer in one piece to its end. Cancellation: abandons it."""
    body = bytearray()
    while data := await connection.data():
        body += data
        if len(body) > MAX_BODY:
            raise AnswerTooLarge(f"an answer of more than {MAX_BODY} bytes")
    return bytes(body)


async def _whole(connection: Connection, response: h11.Response, kind: bytes) -> Finished:
    """Read an answer in one piece: JSON, or plain text such as that of `/metrics`."""
    if not header_of(response, b"content-length") and not header_of(response, b"transfer-encoding"):
        raise BadAnswer("the server does not say how long its answer is: it could be cut anywhere")
    body = await read_body(connection)
    if not kind.startswith(b"application/json"):
        return Finished("done", body=body.decode(errors="replace"))
    try:
        return Finished("done", body=json.loads(body))
    except (ValueError, RecursionError) as exc:
        raise BadAnswer(f"the server's answer is not JSON: {exc}") from exc


def _refused(status: int, body: bytes) -> RequestRefused:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        error = None
    if not isinstance(error, dict):
        error = {"type": f"status {status}", "message": body[:500].decode(errors="replace")}
    return refusal(status, error)
