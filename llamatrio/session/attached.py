"""A server that somebody else owns: where it is, what it speaks, and how a request reaches it.

Nothing here starts, loads, unloads or ends anything of it. One life of such a "model", a
generation, lasts from the first answer of the server until we leave; whatever becomes of the server
in between is found out by each request for itself.
"""

from __future__ import annotations

import json
import posixpath
import re
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Final, Literal, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

import attrs
import h11
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.child.launch import Address
from llamatrio.config import ModelConfig
from llamatrio.errors import (
    AnswerTooLarge,
    KeyRefused,
    NotOwned,
    NotReachable,
    RequestRefused,
    ServerGone,
    SpecificationError,
    StreamBroken,
)
from llamatrio.outcomes import Finished
from llamatrio.requests import Request
from llamatrio.session.base import Backend, Emit, LoadProgress, ModelSession, Opened, Publish
from llamatrio.session.http import (
    Connection,
    header_of,
    read_answer,
    read_body,
    redact_refusal,
)
from llamatrio.wire.redaction import redact

Dialect: TypeAlias = Literal["llama", "openai"]
"""What a server speaks: all that llama-server does, or what OpenAI has under `/v1` and no more."""

CONNECT: Final = 10.0
"""Seconds within which a connection is made, TLS included."""

ANSWER: Final = 30.0
"""Seconds within which the server answers when we first ask what it is."""

POLL: Final = 0.25
"""Seconds from one such question to the next while the server loads its model."""

_SOME: Final = 10  # models that an error names
_BREAKS: Final = (OSError, trio.BrokenResourceError, h11.RemoteProtocolError)


# -- where it is -------------------------------------------------------------------------------


@attrs.frozen
class Location:
    """What a URL says.

    Attributes:
      url: The URL as it was given; it holds no secret.
      address: The path of a unix socket, or a host and a port.
      host: What the server is told that it is called.
      base: What stands before each path; empty or with a leading slash.
      tls: Whether TLS is spoken.
    """

    url: str
    address: Address
    host: str
    base: str = ""
    tls: bool = False


def parse_url(url: str) -> Location:
    """Read the URL of a server: `http://host:port/base`, `https://...` or `unix:/path/x.sock`.

    A `/v1` at its end changes nothing.

    Raises:
      SpecificationError: for any other; it does not repeat the URL, which may hold a secret.
    """
    if not isinstance(url, str):
        raise SpecificationError(f"a URL is a text, not {type(url).__name__}")
    if url.startswith("unix:"):
        return _unix_location(url)
    if not re.fullmatch(r"[!-~]+", url):
        raise SpecificationError("a URL has neither blanks nor letters beyond ASCII")
    try:
        split = urlsplit(url)
        port = split.port
    except ValueError:  # its message may hold what was taken for a port
        raise SpecificationError("the URL's host or port is none") from None
    _check_split(split)
    assert split.hostname is not None
    tls = split.scheme == "https"
    address = (split.hostname, port if port is not None else 443 if tls else 80)
    base = split.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Location(url, address, split.netloc, base, tls)


def _unix_location(url: str) -> Location:
    path = url.removeprefix("unix:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path.startswith("/") or path.startswith("//") or "\0" in path:
        raise SpecificationError("a unix socket is named by its absolute path: unix:/path/x.sock")
    if sys.platform == "win32":
        raise SpecificationError("there are no unix sockets here: use http://")
    return Location(url, path, "localhost")


def _check_split(split: SplitResult) -> None:
    if split.scheme not in ("http", "https"):
        raise SpecificationError("a URL begins with http://, https:// or unix:/")
    if "@" in split.netloc:
        raise SpecificationError("a URL with a user or a password in it: hand a `key` over instead")
    if not split.hostname:
        raise SpecificationError("the URL names no host")
    if split.query or split.fragment:
        raise SpecificationError("a URL ends with its path; a key is handed over as `key`")


# -- what it is asked --------------------------------------------------------------------------


@attrs.frozen
class ServerInfo:
    """What a server told of itself.

    Attributes:
      dialect: What it speaks.
      root: What stands in the place of `/v1` in an OpenAI endpoint's path.
      model: The model to name where a request names none; None for none.
      info: What it says of that model.
    """

    dialect: Dialect
    root: str
    model: str | None
    info: Mapping[str, object] = attrs.field(factory=dict, repr=False)


def check_request(request: Request, dialect: Dialect | None) -> None:
    """Refuse what is not ours to ask for, and what this server could not honour.

    Args:
      request: What is asked.
      dialect: What the server speaks, if that is known already.

    Raises:
      NotOwned: if it would load or unload a model.
      SpecificationError: if it is llama-server's own, and this is an OpenAI-compatible server.
    """
    path = _plain_path(request.path)
    words = path.strip("/").split("/")
    if not {"load", "unload"}.isdisjoint(words) or (
        request.method == "POST" and words == ["models"]
    ):
        raise NotOwned(f"{request.path} is for the owner of the server: it is attached, not owned")
    if request.on_crash != "fail":
        raise SpecificationError("on_crash is for a model of one's own: this one is attached")
    if dialect == "openai":
        _check_openai(request, path)


def _plain_path(path: str) -> str:
    """Reduce the spellings of a path to one, so that none slips through a proxy."""
    path = unquote(unquote(path.partition("?")[0].partition("#")[0]))
    return posixpath.normpath("/" + path.replace("\\", "/").lstrip("/")).lower()


def _check_openai(request: Request, path: str) -> None:
    if not path.startswith("/v1/"):
        raise SpecificationError(
            f"{request.path} is llama-server's own: this server speaks OpenAI's /v1/... alone"
        )
    for name, instead in _LLAMA_ONLY.items():
        if isinstance(request.body, Mapping) and name in request.body:
            raise SpecificationError(f"{name} is llama-server's own: use {instead}")


# Fields of our own builders that some servers would ignore without a word.
_LLAMA_ONLY: Final[Mapping[str, str]] = {
    "grammar": "response_format",
    "json_schema": "response_format",
    "n_predict": "max_tokens",
}


class AttachedSession(ModelSession):
    """Speaks to a server that somebody else owns.

    Args:
      endpoint: How to reach it.
      server: What it told of itself.
    """

    def __init__(self, endpoint: Endpoint, server: ServerInfo) -> None:
        self._endpoint = endpoint
        self._server = server

    def __repr__(self) -> str:
        return f"<AttachedSession {self._endpoint.location.url}>"

    @property
    def info(self) -> Mapping[str, object]:
        """What the server says of the model."""
        return self._server.info

    @enable_ki_protection
    async def perform(self, request: Request, emit: Emit) -> Finished:
        """Perform one request; see `ModelSession.perform`.

        Cancellation: closes the connection, which is what makes a server stop working on it.

        Raises:
          ServerGone: if no connection can be made.
          NotOwned: if it would load or unload a model.
          SpecificationError: if this server could not honour it.
        """
        check_request(request, self._server.dialect)
        target, body = self._target(request), self._encode(request)
        endpoint = self._endpoint
        connection = await endpoint.connect()
        try:
            with closing(connection):
                await connection.send(
                    request.method, target, body, endpoint.key, endpoint.location.host
                )
                response = await connection.response()
                return await read_answer(connection, response, request, emit)
        except _BREAKS as exc:
            message = f"the connection to {endpoint.location.url} broke: {_reason(exc)}"
            raise StreamBroken(endpoint.redacted(message)) from exc
        except RequestRefused as exc:
            raise redact_refusal(exc, endpoint.secrets) from None

    def _target(self, request: Request) -> str:
        if self._server.dialect == "openai":
            return self._server.root + request.path.removeprefix("/v1")
        return self._endpoint.location.base + request.path

    def _encode(self, request: Request) -> bytes:
        openai = self._server.dialect == "openai"
        names = isinstance(request.body, Mapping) and "model" in request.body
        if openai and request.method == "POST" and not names and self._server.model is None:
            raise SpecificationError(
                "the server has several models, or none: name one as `model` in the request, or "
                "once for all with attach_provider(model=...)"
            )
        return request.encode_for(self._server.model, openai=openai)


# -- how it is reached -------------------------------------------------------------------------


@attrs.frozen
class Endpoint:
    """The way to a server.

    Attributes:
      location: Where it is.
      key: What it wants to hear; None for nothing.
      tls: How TLS is spoken; None if it is not.
    """

    location: Location
    key: str | None = attrs.field(default=None, repr=False)
    tls: ssl.SSLContext | None = None

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not be shown: the key, if there is one."""
        return () if self.key is None else (self.key,)

    async def connect(self) -> Connection:
        """Make a connection.

        Cancellation: abandons it.

        Raises:
          ServerGone: if that is not possible, or takes too long.
        """
        try:
            with trio.fail_after(CONNECT):
                return await self._connect()
        except trio.TooSlowError:
            message = f"{self.location.url} takes no connection within {CONNECT:g} s"
            raise ServerGone(message) from None
        except (*_BREAKS, ValueError) as exc:  # the latter for a host whose name cannot be one
            raise ServerGone(f"{self.location.url} cannot be reached: {_reason(exc)}") from exc

    async def _connect(self) -> Connection:
        address = self.location.address
        if isinstance(address, str):
            return Connection(await trio.open_unix_socket(address))
        transport = await trio.open_tcp_stream(*address)
        try:
            _keep_alive(transport)
            if self.tls is None:
                return Connection(transport)
            stream = trio.SSLStream(
                transport, self.tls, server_hostname=address[0], https_compatible=True
            )
            await stream.do_handshake()
            return Connection(transport, stream)
        except BaseException:
            transport.socket.close()
            raise

    def redacted(self, text: str) -> str:
        """Return a text without the key in it."""
        return redact(text, self.secrets, cut=True)


def _keep_alive(stream: trio.SocketStream) -> None:
    """Let the system notice a machine that is gone without a word, within two minutes."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        option = getattr(socket, name, None)
        if option is not None:
            stream.setsockopt(socket.IPPROTO_TCP, option, value)


_KEEP_ALIVE: Final[Mapping[str, int]] = {
    "TCP_KEEPIDLE": 60,
    "TCP_KEEPALIVE": 60,  # macOS's name for it
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 6,
}


def _reason(error: BaseException) -> str:
    """Say what went wrong below; Trio wraps what TLS says."""
    return (
        str(error.__cause__ or error) if isinstance(error, trio.BrokenResourceError) else str(error)
    )


# -- what it is --------------------------------------------------------------------------------


@attrs.frozen
class _Answer:
    status: int
    server: bytes
    body: bytes = attrs.field(repr=False)

    @property
    def json(self) -> object:
        try:
            parsed: object = json.loads(self.body)
        except (ValueError, RecursionError):
            return None
        return parsed

    @property
    def says_loading(self) -> bool:
        """Whether this is what llama-server says until its model is loaded."""
        match self.json:
            case {"error": {"type": "unavailable_error"}}:
                return self.status == 503
            case _:
                return False


class AttachedBackend(Backend):
    """Attaches to a server that somebody else owns; loads, unloads and ends nothing.

    Args:
      url: Where it is; see `parse_url`.
      key: What it wants to hear.
      model: The model to name where a request names none.
      dialect: What it speaks; None to find that out.
      ssl_context: How TLS is spoken; None for the system's certificates.

    Raises:
      SpecificationError: if one of these cannot be.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        model: str | None = None,
        dialect: Dialect | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        location = parse_url(url)
        _check(location, key, model, dialect, ssl_context)
        if location.tls and ssl_context is None:
            ssl_context = ssl.create_default_context()
        self._endpoint = Endpoint(location, key, ssl_context)
        self._model = model
        self._named: Dialect | None = dialect
        self._server: ServerInfo | None = None

    def __repr__(self) -> str:
        return f"<AttachedBackend {self.url}>"

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._endpoint.location.url

    @property
    def dialect(self) -> Dialect | None:
        """What the server speaks; None while that is not known."""
        return self._server.dialect if self._server else self._named

    def signs_of_life(self) -> object:
        """Return another value each time: a server's silence is for the limits of requests."""
        return object()

    def check_request(self, request: Request) -> None:
        """Refuse a request as far as that is possible now; see `check_request`."""
        check_request(request, self.dialect)

    @enable_ki_protection
    async def run(self, config: ModelConfig, publish: Publish) -> None:
        """Find the server, wait until it has loaded its model, and stay; see `Backend.run`.

        Cancellation: is the only way to end this. It touches nothing of the server.

        Raises:
          NotReachable: if nothing answers there, or nothing that we can speak to.
          KeyRefused: if it wants another key.
          SpecificationError: if it has not the model that was named.
        """
        while (await self._ask("/health")).says_loading:
            publish(LoadProgress(stage="model", stages=("model",)))
            await trio.sleep(POLL)
        self._server = await self._find_out()
        publish(Opened(AttachedSession(self._endpoint, self._server)))
        await trio.sleep_forever()

    async def _find_out(self) -> ServerInfo:
        for root in ("/v1", ""):
            answer = await self._ask(f"{root}/models")
            if answer.status != 404:
                break
        self._check_status(answer)
        entries = _entries(answer.json)
        if entries is None:
            raise NotReachable(f"what answers at {self.url} has no list of models: see the URL")
        return self._describe(self._endpoint.location.base + root, answer, entries)

    def _check_status(self, answer: _Answer) -> None:
        if answer.status in (401, 403):
            how = "wants a key" if self._endpoint.key is None else "does not take the key"
            raise KeyRefused(f"the server at {self.url} {how} (status {answer.status})")
        if answer.status != 200:
            raise NotReachable(
                f"what answers at {self.url} gives status {answer.status} for its list of models"
            )

    def _describe(
        self, root: str, answer: _Answer, entries: Sequence[Mapping[str, object]]
    ) -> ServerInfo:
        llama = answer.server == b"llama.cpp" or any(
            entry.get("owned_by") == "llamacpp" for entry in entries
        )
        dialect: Dialect = self._named or ("llama" if llama else "openai")
        entry = self._choose(entries)
        if dialect == "llama":
            # A llama-server with one model would answer for any name with that one.
            if self._model is not None and not entry:
                some = ", ".join(repr(entry.get("id")) for entry in entries[:_SOME])
                raise SpecificationError(
                    f"the server at {self.url} has no model {self._model!r}; it has {some}"
                )
            return ServerInfo(dialect, root, self._model, entry)
        alone = entry.get("id")
        model = self._model or (alone if isinstance(alone, str) else None)
        return ServerInfo(dialect, root, model, entry)

    def _choose(self, entries: Sequence[Mapping[str, object]]) -> Mapping[str, object]:
        if self._model is None:
            return entries[0] if len(entries) == 1 else {}
        return next((entry for entry in entries if self._model in _names(entry)), {})

    async def _ask(self, path: str) -> _Answer:
        endpoint = self._endpoint
        try:
            with trio.fail_after(ANSWER), closing(await endpoint.connect()) as connection:
                target = endpoint.location.base + path
                await connection.send("GET", target, b"", endpoint.key, endpoint.location.host)
                response = await connection.response()
                body = await read_body(connection)
                return _Answer(response.status_code, header_of(response, b"server"), body)
        except trio.TooSlowError:
            message = f"what listens at {self.url} does not answer within {ANSWER:g} s"
            raise NotReachable(message) from None
        except ServerGone as exc:
            raise NotReachable(exc.message) from exc.__cause__
        except (*_BREAKS, StreamBroken, AnswerTooLarge) as exc:
            message = f"what answers at {self.url} does not speak HTTP as it should: {_reason(exc)}"
            raise NotReachable(endpoint.redacted(message)) from exc


def _check(
    location: Location,
    key: str | None,
    model: str | None,
    dialect: Dialect | None,
    ssl_context: ssl.SSLContext | None,
) -> None:
    if key is not None and not (isinstance(key, str) and re.fullmatch(r"[!-~]+", key)):
        raise SpecificationError("a key is a text without blanks, in ASCII")
    if model is not None and not (isinstance(model, str) and model):
        raise SpecificationError(f"model is a name, not {model!r}")
    if dialect not in (None, "llama", "openai"):
        raise SpecificationError(f'dialect is "llama", "openai" or None, not {dialect!r}')
    if ssl_context is not None and not isinstance(ssl_context, ssl.SSLContext):
        raise SpecificationError(f"not an SSLContext: {ssl_context!r}")
    if ssl_context is not None and not location.tls:
        raise SpecificationError("an ssl_context is for https://")


def _entries(body: object) -> list[Mapping[str, object]] | None:
    """Read a list of models, as OpenAI writes it."""
    match body:
        case {"data": [*items]} if all(isinstance(item, dict) for item in items):
            return items
        case _:
            return None


def _names(entry: Mapping[str, object]) -> list[object]:
    aliases = entry.get("aliases")
    return [entry.get("id"), *(aliases if isinstance(aliases, list) else ())]
