"""The command: `python -m llamatrio.testing corpus [OPTION...] [-- COMMAND...]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from llamatrio.testing.corpus.cases import Case, Corpus, load
from llamatrio.testing.corpus.judge import Level
from llamatrio.testing.corpus.runner import CannotRun, Report, check_command, check_reader


def main(arguments: Sequence[str]) -> int:
    """Check a reader.

    Returns:
      0 if it got every case right, 1 if not, 2 if it could not be run.
    """
    chosen = _parser().parse_args(arguments)
    corpus = load()
    cases = [case for case in corpus.cases if not chosen.rule or case.rule in chosen.rule]
    if not cases:
        sys.stderr.write(f"no case has the rule {', '.join(chosen.rule)}\n")
        return 2
    if chosen.list:
        _list(corpus, cases)
        return 0
    command = chosen.command[1:] if chosen.command[:1] == ["--"] else chosen.command
    level: Level = "records" if chosen.records else "events"
    try:
        report = (
            check_command(cases, command, batch=chosen.batch, level=level, timeout=chosen.timeout)
            if command
            else check_reader(cases, level=level)
        )
    except CannotRun as exc:
        sys.stderr.write(f"cannot run it: {exc}\n")
        return 2
    sys.stdout.write(_as_json(report) if chosen.json else _as_text(report))
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m llamatrio.testing corpus",
        description="Check a reader of a llama.cpp child's stdout against the corpus. COMMAND reads"
        " one stream from stdin and writes its events to stdout, as JSON, one on a line; without"
        " one the library's own reader is checked. `llamatrio.testing.corpus` describes both.",
    )
    parser.add_argument("--list", action="store_true", help="show rules and cases, run nothing")
    parser.add_argument("--rule", action="append", default=[], help="only the cases of this rule")
    parser.add_argument("--records", action="store_true", help="compare nothing but the records")
    parser.add_argument("--batch", action="store_true", help="run COMMAND once for all cases")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one run")
    parser.add_argument("--json", action="store_true", help="report as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    return parser


def _list(corpus: Corpus, cases: Sequence[Case]) -> None:
    for rule in corpus.rules:
        of_rule = [case for case in cases if case.rule == rule.id]
        if of_rule:
            sys.stdout.write(f"{rule.id} ({len(of_rule)}): {rule.text}\n")
            sys.stdout.writelines(f"  {case.id}\n" for case in of_rule)


def _as_text(report: Report) -> str:
    lines = [f"{failure.case.id}: {failure.reason}" for failure in report.failures]
    lines += [f"{rule}: {count} wrong" for rule, count in report.by_rule().items()]
    right = report.cases - len(report.failures)
    return "\n".join([*lines, f"{right} of {report.cases} cases are right", ""])


def _as_json(report: Report) -> str:
    failures = [
        {"id": failure.case.id, "rule": failure.case.rule, "reason": failure.reason}
        for failure in report.failures
    ]
    return json.dumps({"cases": report.cases, "failures": failures}) + "\n"
