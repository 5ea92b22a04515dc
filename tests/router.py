"""llama.cpp's own reader of a child's stdout: its router, with our program for a child.

A router starts its children by the path that it was started from, which it looks up once (b11434,
tools/server/server-models.cpp, `get_server_exec_path` and `load`). So it is started from a link of
our own, and once it runs the link gives way to a script that writes a stream. What the router makes
of that is told by `GET /models/sse`, event by event, and ends with the child's exit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO, TypeAlias

import attrs

from llamatrio.testing.corpus import Case
from llamatrio.testing.corpus.cases import Event

Outcome: TypeAlias = list[Event] | int
"""What a router made of a stream, or the exit code with which it died of it."""

MODELS = 16  # that are played at a time
SECONDS = 20.0
CHILD = """#!/bin/sh
for last; do :; done
exec cat "$(dirname "$0")/streams/${last##*/}"
"""


class RouterDied(Exception):
    """It did so with this exit code."""


@attrs.define
class Router:
    """One router that runs."""

    process: subprocess.Popen[bytes]
    address: str
    directory: Path
    _events: BinaryIO = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._listen()

    def close(self) -> None:
        """Stop listening to it."""
        self._events.close()

    def play(self, cases: Sequence[Case]) -> list[list[Event]]:
        """Let as many children write a stream each; give what the router made of them."""
        names = [f"m{number}" for number in range(len(cases))]
        for name, case in zip(names, cases, strict=True):
            (self.directory / "streams" / f"{name}.gguf").write_bytes(case.data)
        seen: dict[str, list[Event]] = {name: [] for name in names}
        running, downloaded = set(names), set()
        try:
            for name in names:
                request(self.address, "POST", "/models/load", {"model": name}).close()
            while running:
                name, event, data = self._next()
                if data.get("status") == "unloaded":
                    running.remove(name)
                elif event in ("download_finished", "download_failed"):
                    downloaded.add(name)
                elif told := as_record(event, data):
                    seen[name].append(told)
        except TimeoutError:
            # The result of a download makes the router read its models anew, in a thread of its
            # own. If that is done before the child has ended, nobody is told of its end (b11434).
            assert running <= downloaded & self._unloaded()
            self.close()
            self._listen()
        except (OSError, EOFError) as exc:
            raise RouterDied(self.process.wait(SECONDS)) from exc
        return [seen[name] for name in names]

    def _unloaded(self) -> set[str]:
        with closing(request(self.address, "GET", "/models")) as answer:
            models = json.load(answer)["data"]
        return {one["id"] for one in models if one["status"]["value"] == "unloaded"}

    def _listen(self) -> None:
        self._events = request(self.address, "GET", "/models/sse")

    def _next(self) -> tuple[str, str, dict[str, object]]:
        while line := self._events.readline():
            if line.startswith(b"data: "):
                return read_event(line)
        raise EOFError


BEGINNING = re.compile(rb'data: {"model":"(\w+)","event":"(\w+)","data":{"status":"(\w+)"')


def read_event(line: bytes) -> tuple[str, str, dict[str, object]]:
    try:
        document = json.loads(line.removeprefix(b"data: "))
    except RecursionError:  # the router passes on whatever a child nests
        match = BEGINNING.match(line)
        assert match is not None
        model, event, status = (group.decode() for group in match.groups())
        return model, event, {"status": status, "info": "nested too deeply"}
    return document["model"], document["event"], document.get("data") or {}


def as_record(event: str, data: dict[str, object]) -> Event | None:
    """Give what the router tells of a record in the form that the corpus has for it."""
    if event != "status_change":
        return None
    match data:
        case {"status": "loading"}:
            progress = data.get("progress")
            given = progress if isinstance(progress, dict) else {}
            fields = {key: value for key, value in given.items() if value is not None}
            return {
                "event": "record",
                "state": "loading",
                "stage": fields.get("current", fields.get("stage")),
                "stages": fields.get("stages", []),
                "value": fields.get("value"),
            }
        case {"status": "loaded"}:
            return {"event": "record", "state": "ready", "info": data.get("info")}
        case {"status": "sleeping"}:
            return {"event": "record", "state": "sleeping"}
        case _:
            return {"event": "something else", **data}


def request(address: str, method: str, path: str, body: object = None) -> BinaryIO:
    """Send a request, and give the answer from its body on."""
    data = json.dumps(body).encode() if body is not None else b""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(address)
        connection.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        answer = connection.makefile("rb")
    if b" 200 " not in answer.readline():
        raise EOFError
    while answer.readline().strip():
        pass
    return answer


@contextmanager
def open_router(program: str, directory: Path) -> Iterator[Router]:
    """Run a router in that directory, which may be used again."""
    for name in ("models", "streams"):
        (directory / name).mkdir(exist_ok=True)
    for number in range(MODELS):
        (directory / "models" / f"m{number}.gguf").write_bytes(b"GGUF")
    if not (original := directory / "original").exists():
        shutil.copy(program, original)
    link = directory / "llama-server"
    link.unlink(missing_ok=True)
    os.link(original, link)
    address = directory / "router.sock"
    address.unlink(missing_ok=True)
    command = [str(link), "--models-dir", str(directory / "models"), "--host", str(address)]
    with (
        (directory / "log").open("wb") as log,
        subprocess.Popen(
            # Without a core dump, since it aborts often.
            ["sh", "-c", 'ulimit -c 0; exec "$0" "$@"', *command, "--models-max", "0"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Or it starts a debugger to tell where it aborted.
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        ) as process,
    ):
        try:
            wait_until_it_listens(process, str(address))
            script = directory / "child.sh"
            script.write_text(CHILD)
            script.chmod(0o755)
            script.replace(link)
            with closing(Router(process, str(address), directory)) as router:
                yield router
        finally:
            process.kill()


def wait_until_it_listens(process: subprocess.Popen[bytes], address: str) -> None:
    while process.poll() is None:
        try:
            request(address, "GET", "/health").close()
        except (OSError, EOFError):
            time.sleep(0.005)
        else:
            return
    raise RouterDied(process.returncode)


def play_all(program: str, directory: Path, cases: Sequence[Case]) -> dict[str, Outcome]:
    """Give what a router makes of each case, by its name.

    A router that dies takes along what it does beside: then each of these gets one of its own.
    """
    outcomes: dict[str, Outcome] = {}
    waiting = deque(cases)
    while waiting:
        with open_router(program, directory) as router:
            batch: list[Case] = []
            try:
                while waiting:
                    batch = [waiting.popleft() for _ in range(min(MODELS, len(waiting)))]
                    for case, events in zip(batch, router.play(batch), strict=True):
                        outcomes[case.id] = events
                return outcomes
            except RouterDied:
                pass
        for case in batch:
            outcomes[case.id] = play_alone(program, directory, case)
    return outcomes


def play_alone(program: str, directory: Path, case: Case) -> Outcome:
    with open_router(program, directory) as router:
        try:
            return router.play([case])[0]
        except RouterDied as exc:
            return int(exc.args[0])
