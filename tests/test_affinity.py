"""Which thread native calls may run on: the check, and what is known."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from test_native import affine as affine

from llamatrio.affinity import KNOWN, AffinityReport, Trial, check_affinity
from llamatrio.session.dispatch import HostThread


@pytest.mark.slow
async def test_the_library_of_the_wheel_may_be_called_on_any_thread_on_a_CPU() -> None:
    report = await check_affinity(device="cpu")
    assert [report.answer(trial.threads) for trial in report.trials] == ["yes"] * 3
    assert len({trial.text for trial in report.trials}) == 1
    cell = KNOWN["cpu"]
    assert (cell.main, cell.owner, cell.split) == ("yes", "yes", "yes")


@pytest.mark.slow
async def test_a_library_that_insists_on_its_thread_is_found_out(affine: str) -> None:
    report = await check_affinity(affine)
    main, owner, split = report.trials
    assert [report.answer(one.threads) for one in (main, owner, split)] == ["yes", "yes", "no"]
    assert split.returncode == -6
    assert "does not own the model" in split.error
    assert report.owner_replaces_main == "yes"
    assert "ended with signal 6" in str(report)


def command(*words: str) -> tuple[int, str]:
    line = [sys.executable, "-m", "llamatrio", "affinity", *words]
    done = subprocess.run(line, capture_output=True, check=False, timeout=120)
    return done.returncode, done.stdout.decode()


@pytest.mark.slow
def test_the_command_prints_a_report_as_JSON(affine: str) -> None:
    code, text = command("--json", "--library", affine)
    document = json.loads(text)
    assert code == 0
    assert document["answers"] == {"main": "yes", "owner": "yes", "split": "no"}
    assert document["owner_replaces_main"] == "yes"


@pytest.mark.slow
def test_the_command_prints_a_report_for_people() -> None:
    code, text = command("--device", "cpu")
    assert code == 0
    assert "a dedicated thread can replace the main thread here: yes" in text


def test_what_is_no_library_cannot_be_checked() -> None:
    assert command("--library", "/nowhere/libllama.so")[0] == 2


def test_a_model_that_cannot_be_loaded_says_nothing_of_threads() -> None:
    assert command("--model", "/nowhere.gguf")[0] == 2
    trials = tuple(Trial(threads, 1) for threads in ("main", "owner", "split"))
    assert AffinityReport("lib", "1", "cpu", "here", "m", trials).owner_replaces_main == "not tried"


@pytest.mark.parametrize(
    ("main", "owner", "answer"),
    [("a", "a", "yes"), ("a", "b", "no"), ("a", None, "no"), (None, "a", "yes")],
)
def test_an_owner_replaces_main_if_it_says_the_same(
    main: str | None, owner: str | None, answer: str
) -> None:
    trials = (Trial("main", 0, main), Trial("owner", 0, owner), Trial("split", 0, "a"))
    report = AffinityReport("lib", "1", "cpu", "here", "m", trials)
    assert report.owner_replaces_main == answer


def test_metal_stays_on_the_main_thread_until_shown_otherwise() -> None:
    assert KNOWN["metal"].default is HostThread
    assert KNOWN["metal"].owner == "not tried"
