"""llama.cpp's own reader on the corpus: it gets wrong what is listed here, and nothing else.

A list that grows too long or too short fails the test, so this is also where a change of llama.cpp
shows. `downloading` is left out: the router tells it in another form.
"""

from __future__ import annotations

import re
import signal
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs
import pytest
from router import play_all, play_alone

from llamatrio.testing.corpus import Case, judge, load

WITHOUT_A_STATE = [
    "null", "true", "false", "0", "7", "-1.5", '""', '"ready"', '"state"', "[]", "{}", "[*]",
    '{"payload":*', '{"State":"ready"}', '{"STATE":"ready"}', '{"state ":"ready"}',
    '{"":"ready"}', '{"status":"ready"}', '{"state":*',
]  # fmt: skip

WRONG = {
    # `read_stream` takes what is left when the pipe closes for a line.
    "An unfinished line is taken for a whole one.": [
        "end.unfinished/a record",
        "end.unfinished/a record and a blank",
        "end.unfinished/a record and a carriage return",
        "end.unfinished/nothing but a record",
        "end.unfinished/a record, after text",
        "cut.anywhere/an unfinished record, 1 before its end",
        "cut.anywhere/an unfinished record, 2 before its end",
        "cut.anywhere/an unfinished record, 58 before its end",
    ],
    # `read_stream` empties its buffer in the middle of the line, and goes on reading.
    "The tail of an oversize line is taken for a line.": [
        "limit.tail/a record at 257 pages",
        "limit.tail/after a carriage return",
        "limit.tail/after NUL",
        "limit.tail/behind a record that is too long",
        "limit.tail/a tail, then a record",
        "limit.tail/a tail with a carriage return",
    ],
    # It looks at the size only after it has taken the lines out of what it read.
    "A line may be a read of 4096 bytes longer than the limit.": [
        "limit.over/a record, 1 more",
        "limit.over/a record, 2 more",
        "limit.over/a carriage return too many, after a record",
        "limit.over/a record with a text in it",
    ],
    # To the lexer of its JSON library a NUL is the end of the text, and a byte order mark nothing.
    "NUL ends the document, and what follows it is ignored.": [
        "line.newline/record, NUL, record",
        "prefix.rest/NUL after the object",
        "prefix.rest/NUL and text after the object",
        "end.unfinished/a record and NUL",
    ],
    "A byte order mark before the object is skipped.": [
        "prefix.rest/a byte order mark before the object",
    ],
    "There is no limit to the depth.": [
        "json.depth/arrays, 30",
        "json.depth/arrays, 31",
        "json.depth/arrays, 32",
        "json.depth/arrays, 64",
        "json.depth/arrays, 500",
        "json.depth/arrays, 1000",
        "json.depth/arrays, 5000",
        "json.depth/objects, 30",
        "json.depth/objects, 31",
        "json.depth/objects, 32",
        "json.depth/objects, 64",
        "json.depth/objects, 500",
        "json.depth/objects, 1000",
        "json.depth/objects, 5000",
        "json.depth/31 arrays with nothing in them",
        "json.depth/where nobody needs it",
        "json.depth/beside the payload",
    ],
    # `handle_child_state` hands the payload on as it is.
    "A payload is not looked into.": [
        "payload.types/stage*",
        "payload.types/current, *",
        "payload.types/value, *",
        "payload.types/* in stages",
        "payload.types/one wrong field among right ones",
        "payload.null/ready, true",
        "payload.null/ready, false",
        "payload.null/ready, zero",
        "payload.null/ready, a number",
        "payload.null/ready, an empty string",
        "payload.null/ready, a string",
        "payload.null/ready, an array",
    ],
}

FATAL = {
    # server-context.h, `server_state_from_str`
    "A state that it does not know aborts it.": (
        -signal.SIGABRT,
        [
            "state.unknown/*",
            "json.duplicates/the last state is unknown",
            "json.escapes/NUL after the state",
            "json.escapes/a newline after the state",
            "json.depth/in an unknown state",
            "limit.tail/a tail of an unknown state",
            "stream.life/with a state of a later version",
            "stream.noise/unknown states*",
            "stream.noise/everything",
        ],
    ),
    # The same function: what is no object with a text for a state has the state "".
    "A document without a state aborts it.": (
        -signal.SIGABRT,
        [
            *(f"json.object/{name}" for name in WITHOUT_A_STATE),
            "json.duplicates/the last state is none",
            "json.duplicates/the last state is null",
            "json.depth/nothing but brackets",
        ],
    ),
    # It writes the payload out by recursion.
    "A payload of a hundred thousand levels overflows its stack.": (
        -signal.SIGSEGV,
        ["json.depth/arrays, 100000", "json.depth/objects, 100000"],
    ),
}


def names(patterns: Iterable[str], cases: Sequence[Case]) -> set[str]:
    """Find the cases; a star stands for anything."""
    expressions = [re.escape(pattern).replace(r"\*", ".*") for pattern in patterns]
    found = [{case.id for case in cases if re.fullmatch(one, case.id)} for one in expressions]
    assert all(found), patterns
    return set().union(*found)


def without_downloads(case: Case) -> Case:
    kept = [event for event in case.events if event.get("state") != "downloading"]
    return attrs.evolve(case, events=tuple(kept))


@pytest.mark.stock
@pytest.mark.slow
def test_the_router_of_llama_cpp_gets_these_cases_wrong_and_no_others(llama_server: str) -> None:
    cases = load().cases
    deaths = {name: code for code, some in FATAL.values() for name in names(some, cases)}
    wrong = names([pattern for some in WRONG.values() for pattern in some], cases)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        survivable = [case for case in cases if case.id not in deaths]
        outcomes = play_all(llama_server, directory, survivable)
        for case in cases:
            if case.id in deaths:
                outcomes[case.id] = play_alone(llama_server, directory, case)
    seen_deaths, seen_wrong = {}, set()
    for case in cases:
        outcome = outcomes[case.id]
        if isinstance(outcome, int):
            seen_deaths[case.id] = outcome
        elif judge(without_downloads(case), outcome, "records") is not None:
            seen_wrong.add(case.id)
    assert seen_deaths == deaths
    assert seen_wrong == wrong
    right = len(cases) - len(wrong) - len(deaths)
    print(f"{right} cases right, {len(wrong)} wrong, {len(deaths)} fatal")  # noqa: T201
