"""What is believed of an answer, on a real socket whose other end says what a test wants."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from llamatrio import BadAnswer, Request, RequestRefused, StreamBroken, completion_request
from llamatrio.outcomes import Finished
from llamatrio.session.http import HttpSession

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\n"
TOKENIZE = Request("/tokenize", {"content": "Hello"})


@asynccontextmanager
async def answering(answer: bytes, tmp_path: Path) -> AsyncGenerator[HttpSession, None]:
    """Give a session whose server sends some bytes and closes the connection."""
    path = str(tmp_path / "x.sock")
    with trio.fail_after(30), trio.socket.socket(trio.socket.AF_UNIX) as listener:
        await listener.bind(path)
        listener.listen()

        async def serve() -> None:
            connection, _ = await listener.accept()
            with connection:
                await connection.recv(65536)
                await connection.send(answer)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)  # noqa: ASYNC113 - the socket listens already
            yield HttpSession(path, "key")
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (JSON + b'Content-Length: 14\r\n\r\n{"tokens":[1]}', {"tokens": [1]}),
        (
            JSON + b'Transfer-Encoding: chunked\r\n\r\ne\r\n{"tokens":[1]}\r\n0\r\n\r\n',
            {"tokens": [1]},
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\na 1\n", "a 1\n"),
    ],
)
async def test_a_whole_answer_is_finished(answer: bytes, body: object, tmp_path: Path) -> None:
    async with answering(answer, tmp_path) as session:
        assert await session.perform(TOKENIZE, print) == Finished("done", body=body)


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (b"", StreamBroken, "connection"),
        (JSON + b'\r\n{"tokens":[1', BadAnswer, "does not say how long"),
        (JSON + b'Content-Length: 14\r\n\r\n{"tokens":[1', StreamBroken, "broke"),
        (JSON + b'Content-Length: 12\r\n\r\n{"tokens":[1', BadAnswer, "not JSON"),
        (JSON + b"Content-Length: 100000\r\n\r\n" + b"[" * 100_000, BadAnswer, "not JSON"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", StreamBroken, "broke"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 5\r\n\r\nouch!", RequestRefused, "ouch!"),
    ],
)
async def test_an_answer_that_may_be_cut_is_never_finished(
    answer: bytes, error: type[Exception], says: str, tmp_path: Path
) -> None:
    async with answering(answer, tmp_path) as session:
        with pytest.raises(error, match=says):
            await session.perform(TOKENIZE, print)


async def test_an_answer_in_one_piece_where_a_stream_was_asked_for_is_a_bad_one(
    tmp_path: Path,
) -> None:
    async with answering(JSON + b"Content-Length: 2\r\n\r\n{}", tmp_path) as session:
        with pytest.raises(BadAnswer, match="not with a stream"):
            await session.perform(completion_request("Hello"), print)
