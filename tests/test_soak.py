"""What takes very long: a thousand lives of a model, and thousands of races at READY.

Run by hand: `pytest -m soak -n 0 -s -o faulthandler_timeout=0`, with `LLAMATRIO_LLAMA_SERVER` in
the environment for the stock child.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import pytest
import trio

from llamatrio import Ladder, ModelConfig, ServerBackend, Stock
from llamatrio.child.launch import Kind
from llamatrio.session.base import Ended, Opened, SessionEvent
from llamatrio.testing.parrot import Parrot

if sys.platform != "linux":
    pytest.skip("looks at /proc", allow_module_level=True)

CYCLES = Path(__file__).parent / "benchmarks" / "cycles.py"


def samples_of(kind: Kind, cycles: int) -> Sequence[Mapping[str, float]]:
    """Let a process of its own load and unload a model so often."""
    server = ["--server", kind.program] if isinstance(kind, Stock) and kind.program else []
    environ = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    done = subprocess.run(
        [sys.executable, str(CYCLES), "--json", "--cycles", str(cycles), *server],
        env=environ,
        stdout=subprocess.PIPE,
        check=True,
    )
    samples: list[Mapping[str, float]] = json.loads(done.stdout)
    return samples


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_thousand_lives_leave_nothing_behind(
    kind: Kind, capsys: pytest.CaptureFixture[str]
) -> None:
    # https://github.com/lemonade-sdk/lemonade/issues/1711
    first, *_, last = samples = samples_of(kind, 1000)
    with capsys.disabled():
        sys.stdout.write(f"\n{type(kind).__name__}: {first}\n... {last}\n")
    assert last["resident"] < 1.05 * first["resident"]
    for name in ("descriptors", "threads"):
        assert last[name] <= first[name]
    for name in ("children", "zombies", "files"):
        assert [sample[name] for sample in samples] == [0] * len(samples)


# -- at READY ----------------------------------------------------------------------------------

HASTY = Ladder(settle=0.0, exit=1.0)
"""The exit line at once, and SIGTERM soon after it if it was lost."""


@attrs.define
class Race:
    """One child that was ended at its READY.

    Attributes:
      scope: Ends it.
      opened: When it was ready, on Trio's clock.
      seconds: How long it lived after that.
      end: What was told of its end.
    """

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    opened: float = 0.0
    seconds: float = 0.0
    end: Ended | None = None

    def publish(self, event: SessionEvent) -> None:
        if isinstance(event, Opened):
            self.opened = trio.current_time()
            self.scope.cancel()
        elif isinstance(event, Ended):
            self.end = event
            self.seconds = trio.current_time() - self.opened

    def check(self, ladder: Ladder) -> None:
        """See that it ended in order, whether its exit line was lost or not."""
        assert self.end is not None
        assert self.end.error is None
        assert self.end.exit is not None
        assert self.end.exit.returncode == 0, self.end.exit
        assert self.end.exit.asked
        assert self.seconds < ladder.settle + ladder.exit + 5  # machines may be busy

    def lost(self, ladder: Ladder) -> bool:
        """Say whether the exit line was lost: SIGTERM had to come."""
        return self.seconds >= ladder.settle + ladder.exit


async def race(kind: Kind, parrot: Parrot, ladder: Ladder) -> Race:
    """Start a child and end it in the step in which it is ready."""
    backend, one = ServerBackend(kind, ladder=ladder), Race()
    with trio.fail_after(60), one.scope:
        await backend.run(ModelConfig(parrot.path, threads=1), one.publish)
    one.check(ladder)
    return one


@pytest.mark.soak
@pytest.mark.stock
@pytest.mark.timeout(3600)
async def test_an_exit_line_is_really_lost_at_READY_and_the_child_is_gone_all_the_same(
    llama_server: str, parrot: Parrot, capsys: pytest.CaptureFixture[str]
) -> None:
    races: list[Race] = []
    while len(races) < 300 or not any(one.lost(HASTY) for one in races):
        assert len(races) < 3000, "none was lost"
        races.append(await race(Stock(llama_server), parrot, HASTY))
    report(capsys, "no settle time", races, HASTY)


def report(
    capsys: pytest.CaptureFixture[str], name: str, races: Sequence[Race], ladder: Ladder
) -> None:
    lost = [one.seconds for one in races if one.lost(ladder)]
    kept = sorted(one.seconds for one in races if not one.lost(ladder))
    with capsys.disabled():
        sys.stdout.write(
            f"\n{name}: {len(races)} races, {len(lost)} exit lines lost; median "
            f"{kept[len(kept) // 2] * 1000:.1f} ms, longest "
            f"{max(one.seconds for one in races):.3f} s\n"
        )


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("milliseconds", [0, 1, 2, 5, 10, 50])
async def test_300_children_are_ended_so_long_after_READY(
    milliseconds: int, kind: Kind, parrot: Parrot, capsys: pytest.CaptureFixture[str]
) -> None:
    ladder = attrs.evolve(HASTY, settle=milliseconds / 1000)
    races = [await race(kind, parrot, ladder) for _ in range(300)]
    report(capsys, f"{type(kind).__name__}, {milliseconds} ms after READY", races, ladder)
    if not isinstance(kind, Stock):  # which on a busy machine may lose one at any time
        assert not any(one.lost(ladder) for one in races)
