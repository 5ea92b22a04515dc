"""Makes the corpus: every family of cases, written down with what a reader has to make of it.

`cd tests && python -m making_corpus` writes it anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from making_corpus import jsons, lines, payloads, streams
from making_corpus.parts import LIMIT, Case

FAMILIES = (lines, jsons, payloads, streams)


def all_cases() -> Iterator[Case]:
    order = {rule: n for n, rule in enumerate(rule for family in FAMILIES for rule in family.RULES)}
    cases = [case for family in FAMILIES for case in family.cases()]
    yield from sorted(cases, key=lambda case: order[case.rule])


def text() -> str:
    """The file: one case on a line, so that a change to one shows as one."""
    rules = [
        {"id": rule, "text": text} for family in FAMILIES for rule, text in family.RULES.items()
    ]
    cases = [case.as_json() for case in all_cases()]

    def block(items: list[dict[str, object]]) -> str:
        return "[\n" + ",\n".join(json.dumps(item, separators=(",", ":")) for item in items) + "\n]"

    return (
        f'{{"format": 1,\n"limit": {LIMIT},\n'
        f'"rules": {block([*rules])},\n"cases": {block(cases)}}}\n'
    )
