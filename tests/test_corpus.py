"""The corpus: that it is what its makers say, and that it tells right from wrong."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from pathlib import Path

import making_corpus
import pytest
import reference

from llamatrio.testing import __main__ as testing_main
from llamatrio.testing.corpus import Case, Corpus, check_command, check_reader, judge, load
from llamatrio.testing.corpus.cases import Event
from llamatrio.testing.corpus.command import main

SHORT = 10_000  # bytes of a stream that is soon read
READER = [sys.executable, "-m", "llamatrio.testing.corpus"]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load()


@pytest.fixture(scope="module")
def short(corpus: Corpus) -> list[Case]:
    """The cases that are soon read."""
    return [case for case in corpus.cases if len(case.data) < SHORT]


# -- the file ----------------------------------------------------------------------------------


def test_the_file_is_what_the_families_make() -> None:
    file = resources.files("llamatrio.testing.corpus").joinpath("corpus.json")
    assert file.read_bytes() == making_corpus.text().encode("ascii")


def test_there_are_many_cases_and_each_has_a_name_of_its_own(corpus: Corpus) -> None:
    assert len(corpus.cases) >= 500
    assert len({case.id for case in corpus.cases}) == len(corpus.cases)
    assert all(case.id.startswith(f"{case.rule}/") for case in corpus.cases)


def test_every_rule_has_cases_and_every_case_a_rule(corpus: Corpus) -> None:
    cases = Counter(case.rule for case in corpus.cases)
    assert list(cases) == [rule.id for rule in corpus.rules]
    assert min(cases.values()) >= 9
    assert all(rule.text.endswith(".") for rule in corpus.rules)


def test_every_cut_falls_into_its_stream(corpus: Corpus) -> None:
    for case in corpus.cases:
        assert list(case.cuts) == sorted(set(case.cuts))
        assert not case.cuts or 0 < case.cuts[0] <= case.cuts[-1] < len(case.data)
        assert b"".join(case.chunks()) == case.data


def test_the_description_names_every_kind_of_event_and_no_other(corpus: Corpus) -> None:
    description = sys.modules["llamatrio.testing.corpus"].__doc__ or ""
    described = set(re.findall(r'\{"event": "(\w+)"', description))
    used = {event["event"] for case in corpus.cases for event in case.events}
    assert described - {"end"} == used


def test_a_second_reading_of_the_rules_gives_the_same_events(corpus: Corpus) -> None:
    for case in corpus.cases:
        assert judge(case, reference.expect(case.data)) is None, case.id


# -- readers -----------------------------------------------------------------------------------


def test_our_own_reader_gets_every_short_case_right(short: list[Case]) -> None:
    report = check_reader(short)
    assert report.failures == ()
    assert report.cases == len(short)


def test_our_own_reader_gets_every_long_case_right(corpus: Corpus) -> None:
    long = [case for case in corpus.cases if len(case.data) >= SHORT]
    assert len(long) > 50
    assert check_reader(long).failures == ()


def altered(
    prepare: Callable[[bytes], bytes] = lambda stream: stream, limit: int = 2**20
) -> Callable[[Iterable[bytes]], Iterable[Event]]:
    """A reader that takes something for something else before it reads it rightly."""
    return lambda chunks: reference.expect(prepare(b"".join(chunks)), limit)


def strip_colours(stream: bytes) -> bytes:
    return re.sub(rb"\x1b\[[0-9;]*m", b"", stream)


def drop_oversize_start(stream: bytes) -> bytes:
    """What the router of llama.cpp does: empty the buffer, and go on within the line."""
    rest, kept = stream, b""
    while rest:
        line, newline, rest = rest.partition(b"\n")
        while len(line) > 2**20:
            line = line[-(-(2**20 + 1) // 4096) * 4096 :]
        kept += line + newline
    return kept


def find_prefix(stream: bytes) -> bytes:
    return re.sub(rb"(?m)^[^\n]*?(?=cmd_child_to_router:state:)", b"", stream)


@pytest.mark.parametrize(
    ("reader", "rules"),
    [
        (altered(lambda stream: stream + b"\n"), {"end.unfinished", "line.newline"}),
        (altered(strip_colours), {"prefix.first", "prefix.rest"}),
        (altered(find_prefix), {"prefix.first", "line.newline"}),
        (altered(bytes.lstrip), {"line.newline"}),
        (altered(lambda stream: stream.replace(b"\0", b"")), {"line.other", "prefix.exact"}),
        (altered(lambda stream: stream.removeprefix(b"\xef\xbb\xbf")), {"prefix.first"}),
        (altered(lambda stream: stream.replace(b"\r", b"\n")), {"line.newline", "line.return"}),
        (altered(lambda stream: stream.replace(b"\r", b"")), {"line.return"}),
        (altered(lambda stream: b"\n".join(stream.splitlines())), {"line.return", "line.newline"}),
        (altered(lambda stream: stream.decode(errors="ignore").encode()), {"json.utf8"}),
        (altered(lambda stream: stream.lower()), {"prefix.exact", "state.unknown"}),
        (altered(limit=2**20 - 1), {"limit.border"}),
        (altered(limit=2**20 + 1), {"limit.over"}),
        (altered(limit=2**30), {"limit.over", "limit.tail"}),
        (altered(drop_oversize_start), {"limit.over", "limit.tail"}),
        (lambda chunks: [e for chunk in chunks for e in reference.expect(chunk)], {"cut.anywhere"}),
        (lambda chunks: [], {"stream.life", "line.newline"}),
        (lambda chunks: [{"event": "record", "state": "sleeping"}], {"stream.life"}),
    ],
)  # fmt: skip
def test_a_reader_that_breaks_a_rule_fails_the_cases_of_that_rule(
    corpus: Corpus, reader: Callable[[Iterable[bytes]], Iterable[Event]], rules: set[str]
) -> None:
    cases = [case for case in corpus.cases if case.rule in rules]
    assert check_reader(cases, reader).by_rule().keys() == rules


def test_a_reader_that_only_tells_records_is_judged_by_these(short: list[Case]) -> None:
    def records(chunks: Iterable[bytes]) -> Iterator[Event]:
        for event in reference.expect(b"".join(chunks)):
            if event["event"] == "record":
                yield event

    some = [case for case in short if case.rule.startswith(("prefix.rest", "end", "payload"))]
    assert check_reader(some, records, "records").ok
    assert not check_reader(some, records).ok


# -- judging -----------------------------------------------------------------------------------

RIGHT: list[Event] = [
    {"event": "record", "state": "ready", "info": {"a": [1, True, None]}, "offset": 0},
    {"event": "unexpected", "head": "x", "offset": 60},
]


@pytest.mark.parametrize(
    ("seen", "same"),
    [
        (RIGHT, True),
        ([{"event": "record", "state": "ready", "info": {"a": [1.0, True, None]}},
          {"event": "unexpected"}], True),
        ([*RIGHT, RIGHT[1]], False),
        (RIGHT[:1], False),
        ([], False),
        (RIGHT[::-1], False),
        ([{**RIGHT[0], "offset": 1}, RIGHT[1]], False),
        ([RIGHT[0], {**RIGHT[1], "head": "y"}], False),
        ([RIGHT[0], {**RIGHT[1], "size": 1}], False),
        ([{**RIGHT[0], "info": {"a": [1, 1, None]}}, RIGHT[1]], False),
        ([{**RIGHT[0], "info": {"a": [True, True, None]}}, RIGHT[1]], False),
        ([{**RIGHT[0], "info": {"a": [1, True, False]}}, RIGHT[1]], False),
        ([{**RIGHT[0], "info": {"a": [1, True, 0]}}, RIGHT[1]], False),
        ([{**RIGHT[0], "info": {"a": [2, True, None]}}, RIGHT[1]], False),
        ([{**RIGHT[0], "info": {"a": ["1", True, None]}}, RIGHT[1]], False),
        ([{**RIGHT[0], "info": {"a": [1, True]}}, RIGHT[1]], False),
        ([{**RIGHT[0], "info": {"a": {}}}, RIGHT[1]], False),
        ([{**RIGHT[0], "info": {"b": [1, True, None]}}, RIGHT[1]], False),
        ([{**RIGHT[0], "info": None}, RIGHT[1]], False),
        ([{"event": "record", "state": "ready"}, RIGHT[1]], False),
        ([{**RIGHT[0], "more": 1}, RIGHT[1]], False),
    ],
)  # fmt: skip
def test_events_are_the_same_if_what_they_say_is(seen: list[Event], same: bool) -> None:
    case = Case("a/b", "a", (), tuple(RIGHT))
    assert (judge(case, seen) is None) == same


# -- commands ----------------------------------------------------------------------------------


@pytest.fixture
def few(corpus: Corpus) -> list[Case]:
    return [case for case in corpus.cases if case.rule in ("line.return", "stream.life")][:4]


def test_a_reader_that_is_a_command_is_run_on_every_stream(few: list[Case]) -> None:
    assert check_command(few[:1], READER).failures == ()


def test_a_reader_that_is_a_command_is_run_once_in_a_batch(short: list[Case]) -> None:
    assert check_command(short, [*READER, "--batch"], batch=True).failures == ()


@pytest.mark.slow
def test_a_reader_that_is_a_command_takes_the_whole_corpus_in_a_batch(corpus: Corpus) -> None:
    assert check_command(corpus.cases, [*READER, "--batch"], batch=True).failures == ()


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise SystemExit(7)", "exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
        ("import time; time.sleep(60)", "no end after 0.5 s"),
        ("import os; os.close(0); os._exit(3)", "exit code 3"),
    ],
)
def test_a_command_that_dies_or_hangs_has_failed(
    few: list[Case], text: str, reason: str, batch: bool
) -> None:
    report = check_command(few[:1], program(text), batch=batch, timeout=0.5)
    assert [failure.reason for failure in report.failures] == [reason]


def test_a_command_that_dies_in_a_batch_keeps_what_it_had_answered(few: list[Case]) -> None:
    end = {"event": "end"}
    answers = [json.dumps(event) for case in few[:3] for event in [*case.events, end]]
    text = f"print({chr(10).join(answers)!r}); raise SystemExit(9)"
    report = check_command(few, program(text), batch=True)
    assert [failure.case for failure in report.failures] == few[3:]
    assert {failure.reason for failure in report.failures} == {"exit code 9"}


def test_a_command_that_leaves_early_in_a_batch_has_failed(few: list[Case]) -> None:
    report = check_command(few, program("pass"), batch=True)
    assert [failure.case for failure in report.failures] == few
    assert report.failures[0].reason == "no answer"


@pytest.mark.parametrize("line", ["nonsense", "7", "[]", '{"event": "record"', ""])
def test_output_that_is_no_event_is_a_wrong_event(few: list[Case], line: str) -> None:
    report = check_command(few[:1], program(f"print({line!r})"))
    assert len(report.failures) == 1
    assert "not an event" in report.failures[0].reason


# -- the command line --------------------------------------------------------------------------


def test_the_command_says_0_if_all_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rule", "line.return"]) == 0
    assert capsys.readouterr().out == "16 of 16 cases are right\n"


def test_the_command_says_1_if_something_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rule", "payload.sleeping", "--rule", "stream.life", "--batch"]
    assert main([*arguments, "--", *program("pass")]) == 1
    *_, total = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"0 of \d+ cases are right", total)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--", "/no/such/program"],
        ["--", os.devnull],
        ["--rule", "no.such.rule"],
        ["--list", "--rule", "x"],
    ],
)
def test_the_command_says_2_if_it_could_not_run(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err


def test_the_command_lists_rules_and_cases(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines if line.startswith(" ")] == [
        case.id for case in corpus.cases
    ]
    assert len(lines) == len(corpus.cases) + len(corpus.rules)


def test_the_command_reports_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--json", "--records", "--batch", "--rule", "end.unfinished"]
    assert main([*options, "--", *program("pass")]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["cases"] == len(report["failures"])
    assert report["failures"][0]["rule"] == "end.unfinished"


def test_the_first_word_chooses_between_the_corpus_and_a_parrot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert testing_main.main(["corpus", "--list"]) == 0
    monkeypatch.chdir(tmp_path)
    assert testing_main.main(["./corpus"]) == 0
    assert (tmp_path / "corpus").stat().st_size > 1000
