"""PURE. Control lines and typed records.

llama.cpp's child tells its router what it does in lines of this form, one record a line, on
stdout alone (b11434, tools/server/server-models.cpp, `notify_to_router`)::

    cmd_child_to_router:state:{"state":"loading","payload":{...}}

and the router asks it to leave by one line on the child's stdin, `EXIT_LINE`. A line is a record
only if the prefix stands at its first byte. Nothing is searched for, and nothing is stripped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Final, TypeAlias

import attrs
import cattrs

PREFIX: Final = b"cmd_child_to_router:state:"
EXIT_LINE: Final = b"cmd_router_to_child:exit\n"

MAX_DEPTH: Final = 32
"""Deeper JSON is refused: no record is nested more than a few levels."""

_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@attrs.frozen
class Loading:
    """The model is being loaded, for the first time or after sleep.

    The payload has two shapes, so everything in it is optional: `{"stages", "current", "value"}`
    and, between two stages, `{"stage"}` (server-context.cpp, `load_model`).

    Attributes:
      stage: What is being loaded now, such as "text_model".
      stages: All that is to be loaded.
      value: How much of this stage is done, from 0.0 to 1.0. Often nearly binary: 0.0 for most of
        a load, and 1.0 before the silent warm-up.
    """

    stage: str | None = None
    stages: tuple[str, ...] = ()
    value: float | None = None


@attrs.frozen
class Ready:
    """The model answers requests.

    Attributes:
      info: What the child tells about the model, or None after sleep (the payload is null then).
    """

    info: Mapping[str, object] | None = None


@attrs.frozen
class Sleeping:
    """The child gives the model's memory back and waits for a request to load it again.

    It says so before the memory is free.
    """


@attrs.frozen
class Downloading:
    """The child fetches a model from somewhere.

    llama-server writes these only where its router tells it to do nothing else; a child of your own
    may write them before it loads.

    Attributes:
      url: What it fetches.
      downloaded: Bytes so far.
      total: Bytes in all, 0 if unknown.
      result: "download_finished" or "download_failed" in the last record, else None.
    """

    url: str | None = None
    downloaded: int = 0
    total: int = 0
    result: str | None = None


@attrs.frozen
class Unknown:
    """A state that this version does not know. It changes nothing.

    Attributes:
      state: The word for it.
      payload: Whatever came with it.
    """

    state: str
    payload: object = None


@attrs.frozen
class Malformed:
    """A line that has the prefix but is no record. It changes nothing.

    Attributes:
      reason: What is wrong with it.
    """

    reason: str


Record: TypeAlias = Loading | Ready | Sleeping | Downloading | Unknown


def parse(line: bytes) -> Record | Malformed | None:
    """Read one line of a child's stdout.

    Args:
      line: A whole line without its newline. The unfinished end of a stream is none.

    Returns:
      A record, `Malformed`, or None for a line that does not claim to be a record.
    """
    if not line.startswith(PREFIX):
        return None
    try:
        document = _decode(line[len(PREFIX) :])
    except RecursionError:
        return Malformed("nested too deeply")
    except ValueError as exc:  # bad UTF-8 and bad JSON alike
        return Malformed(str(exc))
    if not isinstance(document, dict):
        return Malformed("not a JSON object")
    if (reason := _fault(document)) is not None:
        return Malformed(reason)
    state, payload = document.get("state"), document.get("payload")
    if not isinstance(state, str):
        return Malformed("no state")
    return _structure(state, payload)


def _structure(state: str, payload: object) -> Record | Malformed:
    fields = payload if isinstance(payload, dict) else {}
    try:
        match state:
            case "loading":
                return _loading(_present(fields))
            case "ready":
                return Ready(fields or None)
            case "sleeping":
                return Sleeping()
            case "downloading":
                return _converter.structure(_present(fields), Downloading)
            case _:
                return Unknown(state, payload)
    except cattrs.BaseValidationError as exc:
        return Malformed("; ".join(cattrs.transform_error(exc)))


def _loading(fields: Mapping[str, object]) -> Loading:
    stage = fields.get("current", fields.get("stage"))
    return _converter.structure({**fields, "stage": stage}, Loading)


def _present(fields: Mapping[str, object]) -> dict[str, object]:
    """Leave out what is null: llama.cpp reads such a field as one that is not there."""
    return {name: value for name, value in fields.items() if value is not None}


def _fault(document: object) -> str | None:
    """Say what is wrong with a document that the parser took: it is too deep, or no Unicode."""
    stack: list[tuple[object, int]] = [(document, 1)]
    while stack:
        item, depth = stack.pop()
        if depth > MAX_DEPTH:
            return "nested too deeply"
        if isinstance(item, dict):
            stack.extend((part, depth + 1) for pair in item.items() for part in pair)
        elif isinstance(item, list):
            stack.extend((child, depth + 1) for child in item)
        elif isinstance(item, str) and _SURROGATE.search(item):
            # An escape without its partner. Whoever prints or stores such a text would fail.
            return "a surrogate without its partner"
    return None


def _decode(data: bytes) -> object:
    return json.loads(
        data.decode(), parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer
    )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError("a number that is too large")
    return number


def _integer(text: str) -> int:
    _finite(text)  # first: it bounds the digits, for which `int` takes quadratic time
    return int(text)


def _number(value: object, _: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"not a number: {value!r}")
    return float(value)


def _whole(value: object, _: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError(f"not a whole number of 64 bits: {value!r}")
    return value


def _text(value: object, _: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not a string: {value!r}")
    return value


def _texts(value: object, _: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"not a list: {value!r}")
    return tuple(_text(item, str) for item in value)


# Of our own, because hooks of cattrs' global converter would change every other user of it. The
# hooks refuse what cattrs would convert: a child that sends "0.5" is not one that we understand.
_converter: Final = cattrs.Converter()
_converter.register_structure_hook(float, _number)
_converter.register_structure_hook(int, _whole)
_converter.register_structure_hook(str, _text)
_converter.register_structure_hook_func(lambda kind: kind == tuple[str, ...], _texts)
