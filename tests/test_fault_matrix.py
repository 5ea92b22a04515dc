"""A child that dies or stands still at each moment of its life, of each kind.

Each row asserts the same: the phases in order, exactly one outcome for each request, no process
left and no zombie, as many descriptors as before (`conftest.nothing_left`), all within a bound.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import attrs
import psutil
import pytest
import trio
from killing import Diary, diary_of, hang, kill, opened
from moments import reach
from programs.cycle import balanced

from llamatrio import (
    NO_RESTARTS,
    ChildDied,
    ChildError,
    LlamatrioError,
    LoadFailed,
    LoadStalled,
    LocalProvider,
    ModelConfig,
    Own,
    Phase,
    Reply,
    StartInterrupted,
    Transition,
    WakeFailed,
    completion_request,
)
from llamatrio.child.launch import Kind
from llamatrio.outcomes import Cancelled, Failed, Outcome
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot, write_parrot

if sys.platform != "linux":
    pytest.skip("looks at /proc", allow_module_level=True)

PREFIX = "cmd_child_to_router:state:"
LONG = completion_request("Hello", max_tokens=3000, temperature=0)

AT_ONCE: Final = 2.0
"""Seconds in which a death has reached everybody: a broken connection waits one for the verdict."""

SIGNALS = ["SIGKILL", "SIGSEGV", "SIGABRT"]

STARTED = ["UNLOADED --START--> LOADING", "LOADING --READY--> STARTED"]
STOPPED = ["STARTED --STOP--> STOPPING", "STOPPING --IDLE--> RESIDENT"]
GIVEN_UP = "STARTED --GONE--> UNLOADED"


# -- the moments -------------------------------------------------------------------------------

Strike = Callable[[LocalProvider], Awaitable[int]]


@attrs.define
class Struck:
    """A child that was struck.

    Attributes:
      pid: It.
      at: When, on Trio's clock.
      reply: A request of that moment.
      raised: What the start raised, if it was struck before it was ready.
    """

    pid: int = 0
    at: float = 0.0
    reply: Reply | None = None
    raised: LlamatrioError | None = None


class Striking(Diary):
    """Strikes in the very step into a phase."""

    into: Phase | None = None
    strike: Callable[[], object]

    def on_transition(self, transition: Transition) -> None:
        super().on_transition(transition)
        if transition.new is self.into:
            self.into = None
            self.strike()


async def strike(provider: LocalProvider, how: Strike, struck: Struck) -> None:
    struck.pid = await how(provider)
    struck.at = trio.current_time()


async def spawned(provider: LocalProvider) -> None:
    while provider.diagnostics().pid is None:  # noqa: ASYNC110 - nobody tells
        await trio.sleep(0.001)


async def in_a_record(provider: LocalProvider) -> None:
    while not provider.diagnostics().pipes.stdout_bytes:  # noqa: ASYNC110 - nobody tells
        await trio.sleep(0.001)
    assert provider.diagnostics().pipes.records == 0


async def loading(provider: LocalProvider) -> None:
    while not provider.diagnostics().pipes.records:  # noqa: ASYNC110 - nobody tells
        await trio.sleep(0.001)
    assert provider.phase is Phase.LOADING


def before_ready(
    moment: Callable[[LocalProvider], Awaitable[None]],
) -> Callable[[LocalProvider, Strike, Struck], Awaitable[None]]:
    async def happen(provider: LocalProvider, how: Strike, struck: Struck) -> None:
        async with trio.open_nursery() as nursery:
            submitted = trio.Event()

            async def start() -> None:
                try:
                    await provider.start(task_status=Starting(struck, provider, submitted))
                except LlamatrioError as exc:
                    struck.raised = exc

            nursery.start_soon(start)
            await submitted.wait()
            await moment(provider)
            await strike(provider, how, struck)
            if how is hang:  # the start would wait for a sign of life
                await provider.stop()

    return happen


@attrs.define
class Starting:
    """Submits a request in the moment in which a start takes effect."""

    struck: Struck
    provider: LocalProvider
    submitted: trio.Event

    def started(self, value: None = None) -> None:
        self.struck.reply = self.provider.submit(LONG)
        self.submitted.set()


async def idle(provider: LocalProvider, how: Strike, struck: Struck) -> None:
    await provider.start()
    await strike(provider, how, struck)


async def streaming(provider: LocalProvider, how: Strike, struck: Struck) -> None:
    await provider.start()
    struck.reply = provider.submit(LONG)
    await struck.reply.read(3)
    await strike(provider, how, struck)


async def asleep(provider: LocalProvider, how: Strike, struck: Struck) -> None:
    await provider.start()
    await fall_asleep(provider)
    await strike(provider, how, struck)


async def waking(provider: LocalProvider, how: Strike, struck: Struck) -> None:
    await provider.start()
    await fall_asleep(provider)
    struck.reply = provider.submit(LONG)
    async for status in provider.watch():
        if status.residency == "asleep" and status.progress is not None:
            break
    await strike(provider, how, struck)


async def fall_asleep(provider: LocalProvider) -> None:
    async for status in provider.watch():
        if status.residency == "asleep":
            return


async def stopping(provider: LocalProvider, how: Strike, struck: Struck) -> None:
    await provider.start()
    struck.reply = provider.submit(LONG)
    await struck.reply.read(3)
    await strike_into(Phase.STOPPING, provider, how, struck, provider.stop)


async def unloading(provider: LocalProvider, how: Strike, struck: Struck) -> None:
    await provider.start()
    await provider.stop()
    await strike_into(Phase.UNLOADING, provider, how, struck, provider.unload_model)


async def strike_into(
    phase: Phase,
    provider: LocalProvider,
    how: Strike,
    struck: Struck,
    verb: Callable[[], Awaitable[None]],
) -> None:
    actor = diary_of(provider)
    assert isinstance(actor, Striking)
    coming = trio.Event()
    actor.into, actor.strike = phase, coming.set
    async with trio.open_nursery() as nursery:

        async def hit() -> None:
            await coming.wait()
            await strike(provider, how, struck)

        nursery.start_soon(hit)
        await verb()


@attrs.frozen
class Moment:
    """A moment in the life of a child, and what its death there amounts to.

    Attributes:
      name: Of it.
      happen: Brings it about and strikes.
      steps: The phases before and after the death.
      error: What is told of it; None if the child was to end anyway.
      fake: The steps of a fake child to which this can happen.
    """

    name: str
    happen: Callable[[LocalProvider, Strike, Struck], Awaitable[None]]
    steps: list[str]
    error: type[ChildError] | None
    fake: tuple[str, ...]


LOAD_FAILED = [STARTED[0], "LOADING --GONE--> UNLOADED"]
SERVES = ("H stream 3000 0.01", "S loading", "S ready", "R", "X 0")
SLEEPS = ("H hang", "S loading", "S ready", "S sleeping")

MOMENTS = {
    moment.name: moment
    for moment in [
        Moment(
            "before the first record", before_ready(spawned), LOAD_FAILED, LoadFailed, ("W 99",)
        ),
        Moment(
            "between two bytes of a record",
            before_ready(in_a_record),
            LOAD_FAILED,
            LoadFailed,
            (f'O {PREFIX}{{"state":"rea', "W 99"),
        ),
        Moment("loading", before_ready(loading), LOAD_FAILED, LoadFailed, ("S loading", "W 99")),
        Moment("idle", idle, [*STARTED, GIVEN_UP], ChildDied, SERVES),
        Moment("streaming", streaming, [*STARTED, GIVEN_UP], ChildDied, SERVES),
        Moment("asleep", asleep, [*STARTED, GIVEN_UP], ChildDied, (*SLEEPS, "R")),
        Moment(
            "waking", waking, [*STARTED, GIVEN_UP], WakeFailed, (*SLEEPS, "Q", "S loading", "W 99")
        ),
        Moment(
            "stopping",
            stopping,
            [*STARTED, *STOPPED, "RESIDENT --GONE--> UNLOADED"],
            ChildDied,
            SERVES,
        ),
        Moment(
            "unloading",
            unloading,
            [*STARTED, *STOPPED, "RESIDENT --UNLOAD--> UNLOADING", "UNLOADING --GONE--> UNLOADED"],
            None,
            ("S loading", "S ready", "R!", "W 99"),
        ),
    ]
}


# -- death -------------------------------------------------------------------------------------


def killed_by(name: str) -> Strike:
    async def how(provider: LocalProvider) -> int:  # noqa: ASYNC124 - as `hang` is
        return kill(provider, signal.Signals[name])

    return how


async def die(kind: Kind, config: ModelConfig, moment: Moment, name: str) -> None:
    """Let a child die, and look at everything that must follow."""
    struck = Struck()
    async with opened(kind, config, NO_RESTARTS, actor=Striking) as provider:
        await moment.happen(provider, killed_by(name), struck)
        await reach(provider, Phase.UNLOADED)
        outcome = None if struck.reply is None else await struck.reply.wait()
        assert trio.current_time() - struck.at < AT_ONCE
        check_life(provider, moment.steps, [outcome] if outcome else [])
        check_death(provider, struck, moment, name)
        if outcome is not None:
            check_outcome(provider, moment, outcome)


def check_life(provider: LocalProvider, steps: list[str], outcomes: list[Outcome]) -> None:
    diary, now = diary_of(provider), provider.diagnostics()
    assert diary.steps == steps
    assert len(diary.settled) == len(set(diary.settled)) == len(outcomes)
    assert balanced(diary)
    assert (now.pid, now.counters.generations) == (None, 1)
    assert now.counters.stale == now.counters.hook_errors == 0


def check_death(provider: LocalProvider, struck: Struck, moment: Moment, name: str) -> None:
    end = provider.diagnostics().last_exit
    assert end is not None
    assert (end.pid, end.signal) == (struck.pid, name)
    assert not psutil.pid_exists(struck.pid)
    assert end.asked == (moment.error is None)
    if moment.error is None:
        assert provider.failure is None
    else:
        assert type(provider.failure) is moment.error
        assert name in str(provider.failure)
    if moment.error is LoadFailed:
        assert type(struck.raised) is LoadFailed


def check_outcome(provider: LocalProvider, moment: Moment, outcome: Outcome) -> None:
    if moment.name == "stopping":
        assert isinstance(outcome, Cancelled)
        assert outcome.by == "stop"
    else:
        assert isinstance(outcome, Failed)
        assert type(outcome.error) is moment.error


def some_are_fast() -> Iterator[Any]:
    for number, moment in enumerate(MOMENTS):
        for other, name in enumerate(SIGNALS):
            fast = number % len(SIGNALS) == other
            yield pytest.param(moment, name, marks=[] if fast else pytest.mark.slow)


@pytest.mark.parametrize(("moment", "name"), list(some_are_fast()))
async def test_a_fake_child_dies(moment: str, name: str, parrot: Parrot) -> None:
    child = Own(fakechild.command(*MOMENTS[moment].fake))
    await die(child, ModelConfig(parrot.path), MOMENTS[moment], name)


@pytest.fixture(scope="session")
def laborious(own_temporary_directory: Any, models: Any) -> Parrot:  # noqa: ANN401
    """A model whose load takes a while, whatever is in the page cache."""
    return write_parrot(models / "laborious-too.gguf", layers=128, loop=True)


# A real child cannot be told to write half a record.
REAL = [name for name in MOMENTS if name != "between two bytes of a record"]


def real_config(moment: str, endless: Parrot, laborious: Parrot) -> ModelConfig:
    model = laborious if moment in ("loading", "waking") else endless
    sleep_after = 1 if moment in ("asleep", "waking") else None
    return ModelConfig(model.path, threads=1, sleep_after=sleep_after)


def some_are_soak() -> Iterator[Any]:
    for moment in REAL:
        for name in SIGNALS:
            often = moment in ("asleep", "waking") and name != "SIGABRT"  # a second each
            yield pytest.param(moment, name, marks=pytest.mark.soak if often else pytest.mark.slow)


@pytest.mark.parametrize(("moment", "name"), list(some_are_soak()))
async def test_a_real_child_dies(
    moment: str, name: str, kind: Kind, endless: Parrot, laborious: Parrot
) -> None:
    await die(kind, real_config(moment, endless, laborious), MOMENTS[moment], name)


# -- standing still ----------------------------------------------------------------------------

LADDER: Final = 0.05 + 0.2 + 0.2
"""Seconds that the rungs of `killing.IMPATIENT` have together."""

KILLED_WHILE_LOADING = [
    STARTED[0],
    "LOADING --STOP--> UNLOADING",
    "UNLOADING --GONE--> UNLOADED",
]


async def stand_still(kind: Kind, config: ModelConfig, moment: Moment) -> None:
    """Stop the process of a child, and unload the model: it is killed within its ladder."""
    struck = Struck()
    async with opened(kind, config, NO_RESTARTS, actor=Striking) as provider:
        await moment.happen(provider, hang, struck)
        await provider.stop()
        await provider.unload_model()
        assert trio.current_time() - struck.at < LADDER + AT_ONCE
        outcome = None if struck.reply is None else await struck.reply.wait()
        if moment.error is LoadFailed:
            steps = KILLED_WHILE_LOADING
            assert isinstance(struck.raised, StartInterrupted)
        else:
            steps = MOMENTS["unloading"].steps
        check_life(provider, steps, [outcome] if outcome else [])
        check_end(provider, struck)
        if outcome is not None:
            assert isinstance(outcome, Cancelled)
            assert outcome.by == "stop"


def check_end(provider: LocalProvider, struck: Struck) -> None:
    end = provider.diagnostics().last_exit
    assert end is not None
    assert (end.pid, end.signal, end.asked) == (struck.pid, "SIGKILL", True)
    assert "out of memory" not in str(end)
    assert provider.failure is None
    assert not psutil.pid_exists(struck.pid)


@pytest.mark.slow
@pytest.mark.parametrize("moment", list(MOMENTS))
async def test_a_fake_child_stands_still(moment: str, parrot: Parrot) -> None:
    child = Own(fakechild.command(*MOMENTS[moment].fake))
    await stand_still(child, ModelConfig(parrot.path), MOMENTS[moment])


@pytest.mark.slow
@pytest.mark.parametrize("moment", REAL)
async def test_a_real_child_stands_still(
    moment: str, kind: Kind, endless: Parrot, laborious: Parrot
) -> None:
    await stand_still(kind, real_config(moment, endless, laborious), MOMENTS[moment])


async def stall(kind: Kind, config: ModelConfig) -> None:
    """Stop the process of a child within its wake: it is given up, and its request told."""
    struck = Struck()
    policy = attrs.evolve(NO_RESTARTS, load_stall=0.5, warm_up_stall=0.5)
    async with opened(kind, config, policy, actor=Striking) as provider:
        await waking(provider, hang, struck)
        assert struck.reply is not None
        outcome = await struck.reply.wait()
        assert isinstance(outcome, Failed)
        assert type(outcome.error) is LoadStalled
        await reach(provider, Phase.UNLOADED)
        assert trio.current_time() - struck.at < 0.75 + LADDER + AT_ONCE
        check_life(provider, [*STARTED, GIVEN_UP], [outcome])
        assert provider.failure is outcome.error
        assert not psutil.pid_exists(struck.pid)


@pytest.mark.slow
async def test_a_fake_child_that_stands_still_in_its_wake_is_given_up(parrot: Parrot) -> None:
    child = Own(fakechild.command(*MOMENTS["waking"].fake))
    await stall(child, ModelConfig(parrot.path))


@pytest.mark.soak
async def test_a_real_child_that_stands_still_in_its_wake_is_given_up(
    kind: Kind, endless: Parrot, laborious: Parrot
) -> None:
    await stall(kind, real_config("waking", endless, laborious))
