"""PURE. The black box: one file of bounded size that says how a model was lost.

It holds what the child was started with, the end of its state channel, how it ended, the last lines
of its log, the bytes that were wrong, what was counted, and the steps of the lifecycle. It holds no
secret, no prompt and no answer, unless the child wrote them into its log. The bytes and the steps
can be put through the same code again (`find_differences`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

import attrs

from llamatrio.child.evidence import MAX_PIECES, MAX_STATE, Seen, State, escape, unescape
from llamatrio.lifecycle.journal import MAX_STEPS, Entry, walk
from llamatrio.lifecycle.phases import Event, Phase

MAX_SIZE: Final = 2**18
"""Bytes of one file."""

_FORMAT: Final = "llamatrio black box"
_VERSION: Final = 1
_MAX_LOG: Final = 2**14  # characters
_MAX_TEXT: Final = 4096  # characters of any other text
_MAX_ITEMS: Final = 512  # of any list
_MAX_SHORTENING: Final = 2**14

_T = TypeVar("_T")


@attrs.frozen
class Box:
    """What there is to say of one end.

    Attributes:
      written: When, by the clock on the wall.
      generation: The number of that life of the model.
      error: The name of the error that it ended with, and what it says.
      exit: How the process ended, if there was one.
      log: The last lines of its log.
      manifest: What it was started with, if that is known.
      evidence: What was wrong on its pipes, and on those of the lives before.
      state: The end of its state channel, if it had one.
      steps: The last steps of the lifecycle.
      dropped_steps: How many earlier ones there were.
      counters: What the lifecycle counted.
      pipes: What came out of the pipes, of all lives together.
    """

    written: str
    generation: int
    error: tuple[str, str]
    exit: Mapping[str, object] | None = None
    log: str = ""
    manifest: Mapping[str, object] | None = None
    evidence: tuple[Mapping[str, object], ...] = ()
    state: State | None = None
    steps: tuple[Entry, ...] = ()
    dropped_steps: int = 0
    counters: Mapping[str, object] = attrs.field(factory=dict)
    pipes: Mapping[str, object] = attrs.field(factory=dict)


# -- to bytes ----------------------------------------------------------------------------------


def build(box: Box) -> bytes:
    """Write a box as JSON, in no more than `MAX_SIZE` bytes.

    What is too long is shortened: of the state channel, the log, the evidence and the steps the
    oldest part is left out, of everything else the end.
    """
    shortening = 1
    while True:
        document = _document(box, shortening)
        data = json.dumps(document, indent=1, ensure_ascii=True).encode()
        if len(data) <= MAX_SIZE or shortening > _MAX_SHORTENING:
            return data
        shortening *= 2


def _document(box: Box, shortening: int) -> dict[str, object]:
    def short(value: object) -> object:
        return _shorten(value, _MAX_TEXT // shortening, _MAX_ITEMS // shortening)

    steps = _last(box.steps, MAX_STEPS // shortening)
    evidence = _last(box.evidence, MAX_PIECES // shortening)
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "written": box.written,
        "shortening": shortening,
        "generation": box.generation,
        "error": {"type": short(box.error[0]), "message": short(box.error[1])},
        "exit": short(box.exit),
        "log": short(_last_lines(box.log, _MAX_LOG // shortening)),
        "steps": {
            "dropped": box.dropped_steps + len(box.steps) - len(steps),
            "kept": [_step(entry) for entry in steps],
        },
        "state": box.state and _state(box.state.within(MAX_STATE // shortening)),
        "evidence": [short(piece) for piece in evidence],
        "counters": short(box.counters),
        "pipes": short(box.pipes),
        "manifest": short(box.manifest),
    }


def _last(items: tuple[_T, ...], number: int) -> tuple[_T, ...]:
    return items[-number:] if number else ()


def _last_lines(text: str, limit: int) -> list[str]:
    return (text[-limit:] if limit else "").split("\n")


def _shorten(value: object, text: int, items: int) -> object:
    match value:
        case str():
            return value[:text]
        case Mapping():
            return {str(name)[:text]: _shorten(item, text, items) for name, item in value.items()}
        case list() | tuple():
            return [_shorten(item, text, items) for item in value[:items]]
        case _:
            return value


def _step(entry: Entry) -> str:
    words = (entry.old.name, entry.event.name, entry.new.name, entry.generation)
    return " ".join([f"{entry.seconds:.6f}", *map(str, words)])


def _state(state: State) -> dict[str, object]:
    return {
        "size": state.size,
        "limit": state.limit,
        "ended": state.ended,
        "offset": state.offset,
        "lines": [escape(line) for line in state.data.split(b"\n")],
        "seen": [f"{one.offset} {one.digest} {one.what}" for one in state.seen],
    }


# -- from bytes --------------------------------------------------------------------------------


def load(data: bytes) -> Box:
    """Read a box.

    Raises:
      ValueError: if that is none, or one of another version.
    """
    try:
        document = json.loads(data.decode())
        if document["format"] != _FORMAT or document["version"] != _VERSION:
            raise ValueError("another format, or another version of it")
        return _load(document)
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as exc:
        raise ValueError(f"not a black box: {exc!r}") from exc


def _load(document: dict[str, object]) -> Box:
    error, steps = _object(document["error"]), _object(document["steps"])
    state, process, manifest = document["state"], document["exit"], document["manifest"]
    return Box(
        written=_text(document["written"]),
        generation=_integer(document["generation"]),
        error=(_text(error["type"]), _text(error["message"])),
        exit=None if process is None else _object(process),
        log="\n".join(map(_text, _list(document["log"]))),
        manifest=None if manifest is None else _object(manifest),
        evidence=tuple(map(_object, _list(document["evidence"]))),
        state=None if state is None else _load_state(_object(state)),
        steps=tuple(_load_step(_text(line)) for line in _list(steps["kept"])),
        dropped_steps=_integer(steps["dropped"]),
        counters=_object(document["counters"]),
        pipes=_object(document["pipes"]),
    )


def _load_step(line: str) -> Entry:
    seconds, old, event, new, generation = line.split(" ")
    return Entry(float(seconds), Phase[old], Event[event], Phase[new], int(generation))


def _load_state(state: Mapping[str, object]) -> State:
    if _integer(state["limit"]) < 1 or _integer(state["offset"]) < 0:
        raise ValueError("no limit, or no offset, of a state channel")
    return State(
        offset=_integer(state["offset"]),
        data=b"\n".join(unescape(_text(line)) for line in _list(state["lines"])),
        size=_integer(state["size"]),
        limit=_integer(state["limit"]),
        ended=state["ended"] is True,
        seen=tuple(_load_seen(_text(line)) for line in _list(state["seen"])),
    )


def _load_seen(line: str) -> Seen:
    offset, digest, what = line.split(" ", 2)
    return Seen(int(offset), what, digest)


def _object(value: object) -> dict[str, object]:
    return _checked(value, dict)


def _list(value: object) -> list[object]:
    return _checked(value, list)


def _text(value: object) -> str:
    return _checked(value, str)


def _integer(value: object) -> int:
    return _checked(value, int)


def _checked(value: object, kind: type[_T]) -> _T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"expected {kind.__name__}, not {value!r:.50}")
    return value


# -- again -------------------------------------------------------------------------------------


def find_differences(box: Box) -> tuple[str, ...]:
    """Put the bytes and the steps through the same code again, and say what comes out otherwise."""
    found = [] if box.state is None else list(_compare_lines(box.state))
    if (other := walk(box.steps, whole=box.dropped_steps == 0)) is not None:
        found.append(other)
    return tuple(found)


def _compare_lines(state: State) -> Iterator[str]:
    now = state.read_again()
    for old, new in zip(state.seen, now, strict=False):
        if old != new:
            yield f"byte {old.offset}: there was {old}, and now there is {new}"
            return
    if len(now) < len(state.seen) or (len(now) > len(state.seen) and state.ended):
        yield f"there were {len(state.seen)} lines, and now there are {len(now)}"
    if state.offset + len(state.data) != state.size:
        yield f"the state channel ends at byte {state.size}, and its data does not"
