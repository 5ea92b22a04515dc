"""Everything at any moment: cancels, Ctrl-C, kill -9 and verbs from all sides.

Whatever happens, the block is left at once, nothing is left behind, and the accounts are balanced.
"""

from __future__ import annotations

import json
import math
import os
import pty
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from leftovers import take_census
from moments import reach
from programs.cycle import Accounts, balanced, cycle

from llamatrio import (
    NO_RESTARTS,
    PERSISTENT,
    ChildDied,
    LocalProvider,
    ModelConfig,
    NotStarted,
    Phase,
    Policy,
    Reply,
    RequestCancelled,
    StartInterrupted,
    WrongPhase,
    completion_request,
    open_provider,
    outcomes,
)
from llamatrio.child.launch import Kind
from llamatrio.testing.parrot import Parrot

PROGRAMS = Path(__file__).parent / "programs"

PROMISED = 0.2
"""Seconds within which a block is left."""

NOISE = 20
"""Other users of the machine may make a single one take this many times as long."""

LONG = completion_request("Hello", max_tokens=2000, temperature=0)
FAIR = completion_request("Hello", max_tokens=50, temperature=0)
SHORT = completion_request("Hello", max_tokens=3, temperature=0)


def slow_or_soak(few: int, many: int) -> list[Any]:
    """Have a test in the slow tier with one number, and in the soak tier with the other."""
    return [pytest.param(few, marks=pytest.mark.slow), pytest.param(many, marks=pytest.mark.soak)]


class Times:
    """How long it took each time."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def assert_prompt(self, what: str, capsys: pytest.CaptureFixture[str]) -> None:
        times = sorted(self._seconds)
        middle, high = statistics.median(times), times[len(times) * 95 // 100]
        with capsys.disabled():
            sys.stdout.write(
                f"\n{what}: {len(times)} times, median {middle * 1000:.1f} ms, "
                f"95 % within {high * 1000:.1f} ms, worst {times[-1] * 1000:.1f} ms\n"
            )
        assert middle < PROMISED
        assert times[-1] < NOISE * PROMISED


class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope right before a step of whatever task, counted from `arm` on."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.scope: trio.CancelScope | None = None
        self.cancelled_at: float | None = None

    def arm(self, scope: trio.CancelScope) -> None:
        self.scope = scope

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.scope is None or self.cancelled_at is not None:
            return
        self._step -= 1
        if self._step < 0:
            self.cancelled_at = time.perf_counter()
            self.scope.cancel()


# -- the block is cancelled --------------------------------------------------------------------


def cancel_cycle(step: int, kind: Kind, parrot: Parrot, rounds: int) -> float | None:
    """Cancel a cycle at a step; say how long it took to get out, or None if it was over before."""
    storm = CancelAtStep(step)
    accounts = Accounts()
    left_at = 0.0

    async def main() -> None:
        nonlocal left_at
        with trio.fail_after(60):
            with trio.CancelScope() as scope:
                storm.arm(scope)
                await cycle(parrot.path, kind, accounts, rounds=rounds)
            left_at = time.perf_counter()
            # A thread that looked at the model's file may have been left behind with it.
            limiter = trio.to_thread.current_default_thread_limiter()
            for _ in iter(lambda: limiter.borrowed_tokens, 0):
                await trio.lowlevel.checkpoint()

    before = take_census()
    trio.run(main, instruments=[storm])
    assert take_census().since(before) == {}, f"cancelled at step {step}"
    assert accounts.balanced, f"cancelled at step {step}"
    return None if storm.cancelled_at is None else left_at - storm.cancelled_at


def test_a_cycle_is_cancelled_at_some_steps(
    kind: Kind, parrot: Parrot, capsys: pytest.CaptureFixture[str]
) -> None:
    times = Times()
    for step in range(0, 100, 8):
        if (seconds := cancel_cycle(step, kind, parrot, rounds=1)) is not None:
            times.add(seconds)
    times.assert_prompt(f"cancelled, {type(kind).__name__}", capsys)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("every", slow_or_soak(10, 1))
def test_a_cycle_is_cancelled_within_its_first_500_steps(
    kind: Kind, endless: Parrot, capsys: pytest.CaptureFixture[str], every: int
) -> None:
    times = Times()
    for step in range(every // 2, 500, every):
        seconds = cancel_cycle(step, kind, endless, rounds=70)
        assert seconds is not None, f"the cycle has not even {step} steps"
        times.add(seconds)
    times.assert_prompt(f"cancelled, {type(kind).__name__}", capsys)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_cycle_is_cancelled_at_its_very_end(kind: Kind, parrot: Parrot) -> None:
    step = beyond = 0
    while beyond < 20:  # no two runs have the same number of steps
        beyond += cancel_cycle(step, kind, parrot, rounds=1) is None
        step += 1
    assert step > 60


# -- Ctrl-C ------------------------------------------------------------------------------------


@attrs.frozen
class Interrupted:
    """How a program ended after a Ctrl-C.

    Attributes:
      output: What it wrote.
      returncode: Its exit code.
      lived: Seconds from the moment from which the delay was counted.
      left: Seconds from the Ctrl-C until its block was left.
      ended: Seconds from the Ctrl-C until it had ended itself.
      report: What it says of its child.
    """

    output: str
    returncode: int
    lived: float
    left: float
    ended: float
    report: str


async def interrupt_cycle(
    parrot: Parrot, delay: float, again: float | None = None, *, early: bool = False
) -> Interrupted:
    """Run a cycle at a terminal, and press Ctrl-C there.

    Args:
      parrot: The model.
      delay: Seconds to wait before that; infinite for never.
      again: Seconds until the second Ctrl-C, if there is to be one.
      early: Count the delay from the spawn, not from the moment when all has been imported.
    """
    report = Path(tempfile.gettempdir()) / "report"
    report.write_text("")
    output = bytearray()
    imported, ended = trio.Event(), trio.Event()

    async def read() -> None:
        with suppress(trio.BrokenResourceError):  # how a terminal ends
            async for data in terminal:
                output.extend(data)
                if b"imported" in output:
                    imported.set()
        imported.set()
        ended.set()

    ours, theirs = pty.openpty()
    process = await trio.lowlevel.open_process(
        [
            *(sys.executable, "-I", "-S", str(PROGRAMS / "at_terminal.py")),
            *(sys.executable, str(PROGRAMS / "cycle.py"), str(parrot.path), str(report)),
        ],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TMPDIR": tempfile.gettempdir(), "NO_COLOR": "1"},
    )
    os.close(theirs)
    async with trio.lowlevel.FdStream(ours) as terminal, trio.open_nursery() as nursery:
        nursery.start_soon(read)
        if not early:
            await imported.wait()
        began = time.monotonic()
        with trio.move_on_after(delay):
            await ended.wait()
        pressed = time.monotonic()
        with suppress(trio.BrokenResourceError):
            if delay < math.inf:
                await terminal.send_all(b"\x03")
            if again is not None:
                await trio.sleep(again)
                await terminal.send_all(b"\x03")
        await process.wait()
        after = time.monotonic()
    assert process.returncode is not None
    told = report.read_text()
    left = float(told.split()[1]) if told else after  # it may not have come to the block
    return Interrupted(
        output.decode(),
        process.returncode,
        lived=after - began,
        left=left - pressed,
        ended=after - pressed,
        report=told,
    )


async def interrupt_cycles(
    parrot: Parrot, runs: int, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    times = Times()
    ends = Counter[str]()
    with trio.fail_after(60):
        undisturbed = await interrupt_cycle(parrot, math.inf)
    assert undisturbed.returncode == 0, undisturbed.output
    assert undisturbed.report.startswith("over")
    assert "returncode=0" in undisturbed.report
    for run in range(runs):
        early, double = run % 10 == 9, run % 3 == 2
        delay = rng.uniform(0, 1.1 * undisturbed.lived)
        again = rng.uniform(0, 0.05) if double else None
        before = take_census()
        with trio.fail_after(60):
            end = await interrupt_cycle(parrot, delay, again, early=early)
        assert take_census().since(before) == {}, f"seed {seed}, run {run}: {end}"
        assert "SIGINT" not in end.report, end.report
        if double or "imported" not in end.output:
            ends["twice, or too early for us"] += 1
        elif end.report.startswith("over"):
            ends["finished"] += 1
        else:
            ends["bare"] += 1
            times.add(end.left)
            assert end.ended < NOISE * PROMISED
            assert end.returncode in (-signal.SIGINT, 128 + signal.SIGINT), end.output
            assert end.output.rstrip().endswith("KeyboardInterrupt"), end.output
            assert "Group" not in end.output, end.output
    times.assert_prompt(f"Ctrl-C, {dict(ends)}", capsys)


async def test_ctrl_c_in_a_terminal_ends_a_cycle_some_times(
    parrot: Parrot, capsys: pytest.CaptureFixture[str]
) -> None:
    await interrupt_cycles(parrot, 3, 1, capsys)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("times", slow_or_soak(40, 200))
async def test_ctrl_c_in_a_terminal_ends_a_cycle_many_times(
    endless: Parrot, capsys: pytest.CaptureFixture[str], times: int
) -> None:
    await interrupt_cycles(endless, times, 2, capsys)


def interrupt_lines(parrot: Parrot, first: int, step: int) -> int:
    """Let the lines of the library be interrupted, each step-th from the first on."""
    program = [sys.executable, str(PROGRAMS / "interrupted.py"), str(parrot.path)]
    environ = {
        **os.environ,
        "TMPDIR": tempfile.gettempdir(),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [*program, str(first), str(step)], env=environ, stdout=subprocess.PIPE, check=False
    )
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"it ended at run {len(runs)}, counted from 0"
    for run in runs[:-1]:
        assert run["raised"] == "KeyboardInterrupt()", run
        assert run["left"] == {}, run
        assert run["balanced"], run
    return len(runs)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("every", slow_or_soak(8, 1))
def test_ctrl_c_strikes_at_lines_without_protection(parrot: Parrot, every: int) -> None:
    assert interrupt_lines(parrot, every // 2, every) > 100 // every


def blocked_signals(pid: int) -> set[int]:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigBlk:"):
            mask = int(line.split()[1], 16)
            return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}
    raise AssertionError("not Linux")


async def test_a_child_is_out_of_reach_of_ctrl_c(kind: Kind, parrot: Parrot) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            await provider.start()
            pid = provider.diagnostics().pid
            assert pid is not None
            assert os.getsid(pid) == pid
            # Before it had its session, one might have come.
            assert signal.SIGINT in blocked_signals(pid)
            os.kill(pid, signal.SIGINT)
            assert (await provider.submit(SHORT).result()).outcome.tokens == 3
            await provider.stop()
            await provider.unload_model()
            end = provider.diagnostics().last_exit
            assert end is not None
            assert end.returncode == 0


# -- kill -9 beside stop -----------------------------------------------------------------------


async def kill_beside_stop(provider: LocalProvider, rng: random.Random) -> list[Reply]:
    """Start, submit, and then kill the child and stop, at about the same time."""

    async def kill(pid: int) -> None:
        await trio.sleep(rng.uniform(0, 0.06))
        os.kill(pid, signal.SIGKILL)

    async def stop() -> None:
        await trio.sleep(rng.uniform(0, 0.06))
        await provider.stop()

    await provider.start()
    before = provider.diagnostics()
    assert before.pid is not None
    replies = [provider.submit(rng.choice([SHORT, LONG])) for _ in range(rng.randint(1, 5))]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill, before.pid)
        nursery.start_soon(stop)
    await see_end_of(provider, before.generation)
    return replies


async def see_end_of(provider: LocalProvider, generation: int) -> None:
    """Wait until a generation is over; another may have begun in its place."""
    async for status in provider.watch():
        if status.generation != generation or status.phase is Phase.UNLOADED:
            return


async def kill_children(
    kind: Kind, parrot: Parrot, policy: Policy, rounds: int, seed: int
) -> Counter[str]:
    rng = random.Random(seed)
    config = ModelConfig(parrot.path, slots=2, threads=1)
    ends = Counter[str]()
    async with open_provider(config, backend=kind, policy=policy) as provider:
        for turn in range(rounds):
            with trio.fail_after(60):
                replies = await kill_beside_stop(provider, rng)
                for reply in replies:
                    outcome = await reply.wait()
                    ends[type(outcome).__name__] += 1
                    if isinstance(outcome, outcomes.Failed):
                        assert isinstance(outcome.error, ChildDied), (seed, turn)
                assert balanced(provider._actor)
                await provider.start()
                result = await provider.submit(SHORT).result()
                ends["Finished"] += 1
                assert parrot.text.startswith(result.text)
                await provider.stop()
        await provider.unload_model()
        counters = provider.diagnostics().counters
    accounts = (counters.finished, counters.cancelled, counters.failed)
    assert accounts == (ends["Finished"], ends["Cancelled"], ends["Failed"])
    assert counters.accepted == sum(accounts)
    assert counters.crashes + counters.unloads == counters.loads
    ends["restarts"] = counters.restarts
    return ends


policies = pytest.mark.parametrize(
    "policy", [NO_RESTARTS, PERSISTENT], ids=["no restarts", "persistent"]
)


@pytest.mark.timeout(1200)
@policies
@pytest.mark.parametrize("times", slow_or_soak(40, 200))
async def test_kills_beside_a_stop_lose_no_request(
    kind: Kind, endless: Parrot, policy: Policy, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = await kill_children(kind, endless, policy, times, 2)
    with capsys.disabled():
        sys.stdout.write(f"\nkilled beside stop, {type(kind).__name__}: {dict(ends)}\n")
    assert min(ends["Finished"], ends["Cancelled"], ends["Failed"]) > 0
    assert (ends["restarts"] > 0) == (policy is PERSISTENT)


# -- verbs from all sides ----------------------------------------------------------------------


class Crowd:
    """Tasks that do whatever comes to their minds with one provider."""

    def __init__(self, provider: LocalProvider, rng: random.Random) -> None:
        self.provider = provider
        self.rng = rng
        self.replies: list[Reply] = []
        self.given_up = 0

    async def be_one(self) -> None:
        provider, rng = self.provider, self.rng
        verbs: list[Callable[[], Awaitable[object]]] = [
            *(provider.start, provider.start, provider.stop, provider.unload_model),
            *(self.configure, self.submit, self.submit, self.submit, self.chat),
            *(self.cancel, provider.cancel_current, self.start_in_a_nursery),
        ]
        for _ in range(6):
            with trio.move_on_after(rng.choice([0, 0.001, 0.01, 0.1, 60])) as scope:
                with suppress(StartInterrupted, WrongPhase, NotStarted, RequestCancelled):
                    await rng.choice(verbs)()
            self.given_up += scope.cancelled_caught
            await trio.sleep(rng.choice([0, 0, 0.001, 0.01]))

    async def configure(self) -> None:
        context = self.rng.choice([512, 1024])
        await self.provider.configure(attrs.evolve(self.provider.config, context=context))

    async def submit(self) -> None:
        self.replies.append(self.provider.submit(self.rng.choice([SHORT, FAIR])))

    async def chat(self) -> None:
        async with self.provider.chat("Hello", max_tokens=50) as reply:
            self.replies.append(reply)
            async for _ in reply:
                if self.rng.random() < 0.2:
                    break

    async def cancel(self) -> None:
        if self.replies:
            await self.provider.cancel(self.rng.choice(self.replies).id)

    async def start_in_a_nursery(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.provider.start)
                nursery.cancel_scope.cancel()
        except* StartInterrupted:
            pass


async def crowd(kind: Kind, parrot: Parrot, rounds: int, seed: int) -> Crowd:
    config = ModelConfig(parrot.path, slots=2, threads=1)
    async with open_provider(config, backend=kind) as provider:
        all_of_them = Crowd(provider, random.Random(seed))
        for _ in range(rounds):
            all_of_them.replies.clear()
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for _ in range(6):
                        nursery.start_soon(all_of_them.be_one)
                await provider.stop()
                for reply in all_of_them.replies:
                    await reply.wait()
                assert balanced(provider._actor)
                assert provider.failure is None
                assert not provider.started
                await provider.start()
                assert (await provider.submit(SHORT).result()).outcome.tokens == 3
                await provider.stop()
        with trio.fail_after(60):
            await provider.unload_model()
        counters = provider.diagnostics().counters
        assert counters.crashes == counters.failed == 0
    return all_of_them


@pytest.mark.parametrize("seed", range(2))
async def test_a_crowd_with_all_verbs_gets_its_answers(
    kind: Kind, endless: Parrot, seed: int
) -> None:
    await crowd(kind, endless, 2, seed)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rounds", slow_or_soak(30, 100))
async def test_a_crowd_with_all_verbs_gets_its_answers_in_many_rounds(
    kind: Kind, endless: Parrot, rounds: int
) -> None:
    everybody = await crowd(kind, endless, rounds, 100)
    assert everybody.given_up > rounds


# -- verbs that are given up -------------------------------------------------------------------


async def start_plainly(provider: LocalProvider) -> None:
    await provider.start()


async def start_in_a_nursery(provider: LocalProvider) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(provider.start)
        await trio.lowlevel.checkpoint()


async def stop_a_load(provider: LocalProvider) -> None:
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(provider.start)
            await provider.stop()
    except* StartInterrupted:
        pass


async def configure_and_chat(provider: LocalProvider) -> None:
    await provider.configure(attrs.evolve(provider.config, context=512))
    await provider.start()
    async with provider.chat("Hello", max_tokens=5) as reply:
        await reply.result()
    await provider.stop()
    await provider.configure(attrs.evolve(provider.config, context=1024))


async def go_round(provider: LocalProvider) -> None:
    await provider.start()
    await provider.cancel(provider.submit(LONG).id)
    await provider.cancel_current()
    await provider.stop()
    await provider.unload_model()


def give_up(
    step: int, act: Callable[[LocalProvider], Awaitable[None]], kind: Kind, parrot: Parrot
) -> bool:
    """Give up at one step, go on with the provider, and say whether it was soon enough."""
    storm = CancelAtStep(step)

    async def main() -> None:
        config = ModelConfig(parrot.path, threads=1)
        with trio.fail_after(60):
            async with open_provider(config, backend=kind) as provider:
                with trio.CancelScope() as scope, suppress(StartInterrupted):
                    storm.arm(scope)
                    await act(provider)
                storm.scope = None
                assert await provider.cancel(1) is not None or provider._actor.find(1) is None
                await provider.stop()
                await provider.start()
                assert (await provider.submit(SHORT).result()).outcome.tokens == 3
                assert balanced(provider._actor)

    before = take_census()
    trio.run(main, instruments=[storm])
    assert take_census().since(before) == {}, f"given up at step {step}"
    return storm.cancelled_at is not None


ACTS = [start_plainly, start_in_a_nursery, stop_a_load, configure_and_chat, go_round]


@pytest.mark.parametrize("act", ACTS[3:], ids=lambda act: str(act.__name__))
def test_a_provider_is_usable_after_its_caller_gave_up_at_some_step(
    kind: Kind, parrot: Parrot, act: Callable[[LocalProvider], Awaitable[None]]
) -> None:
    for step in (0, 4, 9, 15, 25):
        give_up(step, act, kind, parrot)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("act", ACTS, ids=lambda act: str(act.__name__))
def test_a_provider_is_usable_after_its_caller_gave_up_at_any_step(
    kind: Kind, parrot: Parrot, act: Callable[[LocalProvider], Awaitable[None]]
) -> None:
    step = 0
    while give_up(step, act, kind, parrot):
        step += 1
    assert step > 10


async def test_a_start_given_up_while_it_was_postponed_loads_nothing(
    kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            await provider.start()
            await provider.stop()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(provider.unload_model)
                await reach(provider, Phase.UNLOADING)
                with trio.move_on_after(0.005) as scope:
                    await provider.start()
                assert scope.cancelled_caught
            assert provider.phase is Phase.UNLOADED
            await provider.stop()
            assert provider.diagnostics().counters.generations == 1


async def test_a_configuration_given_up_while_it_was_postponed_is_not_taken(
    kind: Kind, parrot: Parrot
) -> None:
    config = ModelConfig(parrot.path)
    with trio.fail_after(60):
        async with open_provider(config, backend=kind) as provider:
            await provider.start()
            await provider.stop()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(provider.configure, attrs.evolve(config, context=512))
                    await reach(provider, Phase.UNLOADING)
                    scope.cancel()
            await reach(provider, Phase.UNLOADED)
            await provider.stop()
            assert provider.config == config
