"""What is left when a caller gives up: at each stage of a request, in each verb, in each block.

A scripted model takes a hundred seconds for everything, so that each stage lasts long enough to be
given up within it. The last part does the same with real children.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeAlias

import attrs
import pytest
import trio
from moments import first_text, reach
from trio.testing import MockClock, wait_all_tasks_blocked

from llamatrio import (
    Backend,
    LifecycleActor,
    Limits,
    LlamatrioError,
    LoadFailed,
    LocalProvider,
    ModelConfig,
    NotStarted,
    Phase,
    Policy,
    ProviderClosed,
    Reply,
    Request,
    completion_request,
    connect_provider,
    open_provider,
)
from llamatrio.child.exits import Exit
from llamatrio.child.launch import Kind
from llamatrio.lifecycle.diagnostics import Counters, Status
from llamatrio.outcomes import (
    By,
    Cancelled,
    Failed,
    Finished,
    Limit,
    Outcome,
    Phase as RequestPhase,
)
from llamatrio.provider import Watch
from llamatrio.requests import OnCrash
from llamatrio.session.base import Emit, Publish
from llamatrio.testing import ScriptedBackend
from llamatrio.testing.parrot import Parrot

TEXT: Final = "one two three four"
CONFIG: Final = ModelConfig("scripted.gguf")
OTHER: Final = ModelConfig("other.gguf")
PATIENT: Final = Policy(backoff=100, longest_backoff=100)
AGES: Final = 10_000.0
"""Seconds after which everything has come to its end, and a hang is a failure."""


class Sluggish(ScriptedBackend):
    """Takes its time over everything.

    Args:
      silencing: Seconds that an answer takes to end when it is cancelled.
      ending: Seconds that the memory takes to be given back.
      looking: Seconds that a look at the files takes.

    Attributes:
      lives: How many there are now.
    """

    def __init__(self, *, silencing: float = 0, ending: float = 0, looking: float = 0) -> None:
        super().__init__(TEXT, load_time=100, prompt_time=100, token_time=100)
        self._silencing = silencing
        self._ending = ending
        self._looking = looking
        self.lives = 0

    async def inspect(self, config: ModelConfig) -> None:
        await trio.sleep(self._looking)

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        self.lives += 1
        try:
            await super().run(config, publish)
        except trio.Cancelled:
            with trio.move_on_after(self._ending, shield=True):
                await trio.sleep_forever()
            raise
        finally:
            self.lives -= 1

    async def play(self, request: Request, emit: Emit) -> Finished:
        try:
            return await super().play(request, emit)
        except trio.Cancelled:
            with trio.move_on_after(self._silencing, shield=True):
                await trio.sleep_forever()
            raise


def hello(on_crash: OnCrash = "fail", **limits: float) -> Request:
    return completion_request("Hello", on_crash=on_crash, limits=Limits(**limits))


class Scene:
    """A provider, and what happens around it.

    Attributes:
      backend: What plays the model.
      provider: The provider, once it is opened.
      nursery: For what others do.
      others: Requests beside the one that is looked at.
      reply: That one.
    """

    def __init__(self, backend: Sluggish | None = None) -> None:
        self.backend = backend or Sluggish()
        self.others: list[Reply] = []
        self.provider: LocalProvider
        self.nursery: trio.Nursery
        self.reply: Reply

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None, None]:
        """Own the provider by a block."""
        opening = open_provider(CONFIG, backend=self.backend, policy=PATIENT)
        with trio.fail_after(5 * AGES):
            async with trio.open_nursery() as self.nursery:
                async with opening as self.provider:
                    yield

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[trio.CancelScope, None]:
        """Own the provider by a nursery; what others do goes on outside it, to its end."""
        backend = self.backend
        with trio.fail_after(5 * AGES):
            async with trio.open_nursery() as self.nursery:
                async with trio.open_nursery() as nursery:
                    self.provider = connect_provider(
                        nursery, CONFIG, backend=backend, policy=PATIENT
                    )
                    await trio.lowlevel.checkpoint()
                    yield nursery.cancel_scope

    def submit(self, request: Request) -> Reply:
        """Submit the request that is looked at."""
        self.reply = self.provider.submit(request)
        return self.reply

    @asynccontextmanager
    async def ask(self, request: Request) -> AsyncGenerator[Reply, None]:
        """Have the request that is looked at in a block."""
        async with self.provider.request(request) as self.reply:
            yield self.reply

    def begin(self, verb: Callable[[], Awaitable[None]]) -> None:
        """Have something done in a task of its own, whatever comes of it."""
        self.nursery.start_soon(in_silence, verb)

    def drain(self) -> None:
        self.begin(partial(self.provider.stop, drain=True))

    @property
    def counters(self) -> Counters:
        return self.provider.diagnostics().counters


async def in_silence(verb: Callable[[], Awaitable[None]]) -> None:
    with suppress(LlamatrioError):
        await verb()


@asynccontextmanager
async def opened(backend: Sluggish | None = None) -> AsyncGenerator[Scene, None]:
    scene = Scene(backend)
    async with scene.opened():
        yield scene


async def give_up_at_once(verb: Callable[[], Awaitable[object]]) -> None:
    """Call something that is cancelled as soon as it waits."""
    with trio.CancelScope() as scope:
        scope.cancel()
        await verb()
    assert scope.cancelled_caught


async def assert_usable(scene: Scene) -> None:
    """See to it that the provider stops, starts and serves as ever, and that its books balance."""
    provider = scene.provider
    if provider.started:
        assert (await provider.submit(hello()).result()).text == TEXT
    await provider.stop()
    await provider.start()
    assert (await provider.submit(hello()).result()).text == TEXT
    assert all(reply.outcome is not None for reply in scene.others)
    assert_balanced(provider)
    assert scene.backend.lives == 1


def assert_balanced(provider: LocalProvider) -> None:
    snapshot = provider.diagnostics()
    counters = snapshot.counters
    assert (snapshot.pending, snapshot.running) == (0, 0)
    assert counters.accepted == counters.finished + counters.cancelled + counters.failed


async def assert_over(scene: Scene) -> None:
    """See to it that nothing is left of a provider, and that it says so."""
    provider = scene.provider
    assert scene.backend.lives == 0
    assert (provider.phase, provider.residency) == (Phase.UNLOADED, "unloaded")
    assert all(reply.outcome is not None for reply in scene.others)
    assert_balanced(provider)
    with pytest.raises(ProviderClosed):
        provider.submit(hello())
    with pytest.raises(ProviderClosed):
        await provider.start()


# -- the stages of a request -------------------------------------------------------------------


async def nothing(scene: Scene) -> None:
    await trio.lowlevel.checkpoint()


async def ready(scene: Scene) -> None:
    await scene.provider.start()


async def busy(scene: Scene) -> None:
    await ready(scene)
    scene.others.append(scene.provider.submit(hello()))
    await wait_all_tasks_blocked()


async def loading(scene: Scene) -> None:
    scene.begin(scene.provider.start)
    await wait_all_tasks_blocked()


async def backing_off(scene: Scene) -> None:
    await ready(scene)
    await crash(scene)


async def asleep(scene: Scene) -> None:
    await ready(scene)
    scene.backend.sleep()


async def crash(scene: Scene) -> None:
    scene.backend.crash()
    await wait_all_tasks_blocked()


async def drain(scene: Scene) -> None:
    scene.drain()
    await wait_all_tasks_blocked()


Act: TypeAlias = Callable[[Scene], Awaitable[None]]


@attrs.frozen
class Stage:
    """Where a request may stand, and how it gets there.

    Attributes:
      name: For the test's report.
      before: What happens before it is submitted.
      phase: Where it stands in the end.
      limits: Those that can be reached there.
      lifecycle: Where the provider stands then.
      after: Seconds that pass once it is submitted.
      then: What happens after that.
      tokens: Pieces of its answer by then.
      left: Where the provider stands when the request has been given up; None for the same.
      reached: Whether the model has seen the request.
      on_crash: What the request says of that.
    """

    name: str
    before: Act
    phase: RequestPhase
    limits: tuple[Limit, ...]
    lifecycle: Phase = Phase.STARTED
    after: float = attrs.field(default=1, kw_only=True)
    then: Act = attrs.field(default=nothing, kw_only=True)
    tokens: int = attrs.field(default=0, kw_only=True)
    left: Phase | None = attrs.field(default=None, kw_only=True)
    reached: bool = attrs.field(default=False, kw_only=True)
    on_crash: OnCrash = attrs.field(default="fail", kw_only=True)

    def request(self, **limits: float) -> Request:
        return hello(self.on_crash, **limits)

    async def arrive(self, scene: Scene) -> None:
        """Wait until the request that was just submitted stands here."""
        reply = scene.reply
        await trio.sleep(self.after)
        await self.then(scene)
        assert (reply.phase, reply.tokens) == (self.phase, self.tokens)
        assert (reply.outcome, scene.provider.phase) == (None, self.lifecycle)

    async def bring(self, scene: Scene) -> Reply:
        """Let a request come here."""
        await self.before(scene)
        reply = scene.submit(self.request())
        await self.arrive(scene)
        return reply

    def assert_given_up(self, scene: Scene, by: By) -> None:
        reply = scene.reply
        assert reply.outcome == Cancelled(by, self.phase, self.tokens)
        assert any(seen is reply.request for seen in scene.backend.requests) is self.reached

    async def assert_left(self, scene: Scene, **counted: int) -> None:
        """See to it that one request was given up, and nothing else touched."""
        await wait_all_tasks_blocked()
        assert scene.provider.phase is (self.left or self.lifecycle)
        assert all(reply.outcome is None for reply in scene.others)
        counters = scene.counters
        assert (counters.accepted, counters.cancelled) == (1 + len(scene.others), 1)
        assert {name: getattr(counters, name) for name in counted} == counted
        await assert_usable(scene)


WAITS_FOR_A_SLOT: Final[tuple[Limit, ...]] = ("queue", "total")
ANSWERS: Final[tuple[Limit, ...]] = ("silence", "total")

STAGES: Final = [
    Stage("queued", busy, "queued", WAITS_FOR_A_SLOT),
    Stage("loading", loading, "loading", WAITS_FOR_A_SLOT, Phase.LOADING),
    Stage("backing off", backing_off, "loading", WAITS_FOR_A_SLOT, Phase.LOADING),
    Stage("waking", asleep, "prompt", ("first_token", "total")),
    Stage("in the prompt", ready, "prompt", ("first_token", "total"), reached=True),
    Stage("generating", ready, "generating", ANSWERS, after=101, tokens=1, reached=True),
    Stage(
        "to be taken up again",
        ready,
        "loading",
        ("total",),
        Phase.LOADING,
        after=101,
        then=crash,
        tokens=1,
        reached=True,
        on_crash="resume",
    ),
    Stage("queued and drained", busy, "queued", WAITS_FOR_A_SLOT, then=drain),
    Stage(
        "loading and drained",
        loading,
        "loading",
        WAITS_FOR_A_SLOT,
        Phase.LOADING,
        then=drain,
        left=Phase.UNLOADED,
    ),
    Stage(
        "generating and drained",
        ready,
        "generating",
        ANSWERS,
        after=101,
        then=drain,
        tokens=1,
        left=Phase.RESIDENT,
        reached=True,
    ),
]

at_each_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: str(stage.name))


# -- its block is left -------------------------------------------------------------------------


async def cancel_its_scope(scene: Scene, stage: Stage) -> None:
    with trio.CancelScope() as scope:
        async with scene.ask(stage.request()) as reply:
            await stage.arrive(scene)
            scope.cancel()
            await reply.wait()
    assert scope.cancelled_caught


async def move_on(scene: Scene, stage: Stage) -> None:
    with trio.move_on_after(stage.after + 5) as scope:
        async with scene.ask(stage.request()) as reply:
            await stage.arrive(scene)
            async for _ in reply:
                pass
    assert scope.cancelled_caught


async def be_too_slow(scene: Scene, stage: Stage) -> None:
    with pytest.raises(trio.TooSlowError):
        with trio.fail_after(stage.after + 5):
            async with scene.ask(stage.request()) as reply:
                await stage.arrive(scene)
                await reply.result()


async def cancel_while_it_is_left(scene: Scene, stage: Stage) -> None:
    """Leave the block by itself, under a cancel that finds no checkpoint but those of the exit."""
    with trio.CancelScope() as scope:
        async with scene.ask(stage.request()):
            await stage.arrive(scene)
            scope.cancel()
    assert scene.reply.outcome is not None


async def cancel_by_number(scene: Scene, stage: Stage) -> None:
    reply = scene.submit(stage.request())
    await stage.arrive(scene)
    assert await scene.provider.cancel(reply.id) is reply.outcome


async def cancel_the_cancel_by_number(scene: Scene, stage: Stage) -> None:
    reply = scene.submit(stage.request())
    await stage.arrive(scene)
    await give_up_at_once(partial(scene.provider.cancel, reply.id))
    await reply.wait()


WAYS: Final = [
    cancel_its_scope,
    move_on,
    be_too_slow,
    cancel_while_it_is_left,
    cancel_by_number,
    cancel_the_cancel_by_number,
]


@at_each_stage
@pytest.mark.parametrize("give_up", WAYS, ids=lambda way: str(way.__name__))
async def test_a_request_that_its_caller_gives_up_is_gone_alone(
    autojump_clock: MockClock,
    stage: Stage,
    give_up: Callable[[Scene, Stage], Awaitable[None]],
) -> None:
    async with opened() as scene:
        await stage.before(scene)
        await give_up(scene, stage)
        stage.assert_given_up(scene, "caller")
        await stage.assert_left(scene, expired=0, superseded=0)


@at_each_stage
async def test_a_request_whose_readers_give_up_goes_on(
    autojump_clock: MockClock, stage: Stage
) -> None:
    async with opened() as scene:
        reply = await stage.bring(scene)
        for read in (reply.wait, reply.result, partial(reply.read, stage.tokens)):
            await give_up_at_once(read)
            with trio.move_on_after(5) as scope:
                await read()
            assert scope.cancelled_caught
        assert (reply.outcome, reply.phase) == (None, stage.phase)
        result = await reply.result()
        assert result.text.endswith(TEXT)
        assert scene.counters.cancelled == 0
        await assert_usable(scene)


@at_each_stage
async def test_a_request_ends_with_a_stop_whose_caller_gives_up(
    autojump_clock: MockClock, stage: Stage
) -> None:
    async with opened() as scene:
        await stage.bring(scene)
        await give_up_at_once(scene.provider.stop)
        await wait_all_tasks_blocked()
        stage.assert_given_up(scene, "stop")
        loaded = stage.lifecycle is Phase.STARTED
        assert scene.provider.phase is (Phase.RESIDENT if loaded else Phase.UNLOADED)
        assert not scene.provider.started
        for other in scene.others:
            assert other.outcome == Cancelled("stop", "prompt")
        await assert_usable(scene)


# -- its provider is left ----------------------------------------------------------------------


async def cancel_the_block(scene: Scene, stage: Stage) -> None:
    with trio.CancelScope() as scope:
        async with scene.opened():
            await stage.bring(scene)
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def let_the_block_time_out(scene: Scene, stage: Stage) -> None:
    with trio.CancelScope() as scope:
        async with scene.opened():
            reply = await stage.bring(scene)
            scope.deadline = trio.current_time() + 5
            await reply.wait()
    assert scope.cancelled_caught


async def let_the_block_be_too_slow(scene: Scene, stage: Stage) -> None:
    with pytest.raises(trio.TooSlowError), trio.fail_after(AGES) as scope:
        async with scene.opened():
            reply = await stage.bring(scene)
            scope.deadline = trio.current_time() + 5
            await reply.result()


async def cancel_the_aclose(scene: Scene, stage: Stage) -> None:
    async with scene.opened():
        await stage.bring(scene)
        await give_up_at_once(scene.provider.aclose)
        with pytest.raises(ProviderClosed):
            scene.provider.submit(hello())
        await scene.provider.aclose()


async def cancel_the_nursery(scene: Scene, stage: Stage) -> None:
    async with scene.connected() as scope:
        await stage.bring(scene)
        scope.cancel()
    assert scope.cancelled_caught


EXITS: Final = [
    cancel_the_block,
    let_the_block_time_out,
    let_the_block_be_too_slow,
    cancel_the_aclose,
    cancel_the_nursery,
]


@at_each_stage
@pytest.mark.parametrize("leave", EXITS, ids=lambda leave: str(leave.__name__))
async def test_a_request_ends_with_its_provider_and_nothing_is_left(
    autojump_clock: MockClock,
    stage: Stage,
    leave: Callable[[Scene, Stage], Awaitable[None]],
) -> None:
    scene = Scene()
    await leave(scene, stage)
    stage.assert_given_up(scene, "shutdown")
    for other in scene.others:
        assert other.outcome == Cancelled("shutdown", "prompt")
    await assert_over(scene)


# -- it has limits of its own ------------------------------------------------------------------


LIMITS: Final[tuple[Limit, ...]] = ("queue", "first_token", "silence", "total")


def seconds_of(limit: Limit, stage: Stage) -> float:
    """Return what has it reached five seconds after the request has come to a stage."""
    return 6 if limit == "silence" else stage.after + 5


REACHED: Final = [(stage, limit) for stage in STAGES for limit in stage.limits]
UNREACHED: Final = [(s, limit) for s in STAGES for limit in LIMITS if limit not in s.limits]


def name_of(value: object) -> str | None:
    return value.name if isinstance(value, Stage) else None


async def ask(scene: Scene, stage: Stage, limit: Limit, patience: float) -> bool:
    """Ask with a limit that is reached after five seconds, and wait for so long; return whether
    that was too long."""
    request = stage.request(**{limit: seconds_of(limit, stage)})
    with trio.move_on_after(stage.after + patience) as scope:
        async with scene.ask(request) as reply:
            await stage.arrive(scene)
            await reply.wait()
    return scope.cancelled_caught


@pytest.mark.parametrize(("stage", "limit"), REACHED, ids=name_of)
@pytest.mark.parametrize("patience", [7, AGES])
async def test_a_limit_that_comes_before_the_callers_deadline_is_named(
    autojump_clock: MockClock, stage: Stage, limit: Limit, patience: float
) -> None:
    async with opened() as scene:
        await stage.before(scene)
        began = trio.current_time()
        too_long = await ask(scene, stage, limit, patience)
        assert not too_long
        assert trio.current_time() - began == pytest.approx(stage.after + 5)
        expected = Cancelled("deadline", stage.phase, stage.tokens, limit=limit)
        assert scene.reply.outcome == expected
        await stage.assert_left(scene, expired=1)


@pytest.mark.parametrize(("stage", "limit"), REACHED, ids=name_of)
async def test_a_callers_deadline_that_comes_before_a_limit_is_the_callers(
    autojump_clock: MockClock, stage: Stage, limit: Limit
) -> None:
    async with opened() as scene:
        await stage.before(scene)
        began = trio.current_time()
        too_long = await ask(scene, stage, limit, 3)
        assert too_long
        assert trio.current_time() - began == pytest.approx(stage.after + 3)
        stage.assert_given_up(scene, "caller")
        await trio.sleep(10)
        stage.assert_given_up(scene, "caller")
        await stage.assert_left(scene, expired=0)


@pytest.mark.parametrize(("stage", "limit"), REACHED, ids=name_of)
async def test_a_callers_deadline_and_a_limit_in_one_moment_give_one_outcome(
    autojump_clock: MockClock, stage: Stage, limit: Limit
) -> None:
    async with opened() as scene:
        await stage.before(scene)
        await ask(scene, stage, limit, 5)
        by_limit = Cancelled("deadline", stage.phase, stage.tokens, limit=limit)
        by_caller = Cancelled("caller", stage.phase, stage.tokens)
        assert scene.reply.outcome in (by_limit, by_caller)
        await stage.assert_left(scene, expired=int(scene.reply.outcome == by_limit))


@pytest.mark.parametrize(("stage", "limit"), UNREACHED, ids=name_of)
async def test_a_limit_of_another_stage_does_nothing(
    autojump_clock: MockClock, stage: Stage, limit: Limit
) -> None:
    async with opened() as scene:
        await stage.before(scene)
        too_long = await ask(scene, stage, limit, 20)
        assert too_long
        stage.assert_given_up(scene, "caller")
        await stage.assert_left(scene, expired=0)


# -- the verbs ---------------------------------------------------------------------------------


async def generating(scene: Scene) -> None:
    await busy(scene)
    await trio.sleep(101)


async def resident(scene: Scene) -> None:
    await ready(scene)
    await scene.provider.stop()


async def unloading(scene: Scene) -> None:
    await resident(scene)
    scene.begin(scene.provider.unload_model)
    await wait_all_tasks_blocked()


async def stopping(scene: Scene) -> None:
    await generating(scene)
    scene.begin(scene.provider.stop)
    await wait_all_tasks_blocked()


async def draining(scene: Scene) -> None:
    await generating(scene)
    await drain(scene)


async def dead(scene: Scene) -> None:
    """Let a model die whose request is still to end."""
    await generating(scene)
    await crash(scene)


async def loading_for_one(scene: Scene) -> None:
    await loading(scene)
    scene.others.append(scene.provider.submit(hello()))


async def failing(scene: Scene) -> None:
    killed = Exit(pid=0, returncode=-9, signal="SIGKILL")
    scene.backend.fail_next_load(LoadFailed("killed", killed))
    await trio.lowlevel.checkpoint()


async def start(scene: Scene) -> None:
    await scene.provider.start()


async def stop(scene: Scene) -> None:
    await scene.provider.stop()


async def stop_when_all_is_served(scene: Scene) -> None:
    await scene.provider.stop(drain=True)


async def stop_when_time_is_up(scene: Scene) -> None:
    await scene.provider.stop(drain=True, drain_timeout=50)


async def unload(scene: Scene) -> None:
    await scene.provider.unload_model()


async def configure(scene: Scene) -> None:
    await scene.provider.configure(OTHER, policy=Policy(max_pending=1))


@attrs.frozen
class Wait:
    """A verb that waits, and what is left when it is given up.

    Attributes:
      before: What happens first.
      verb: The verb.
      phase: Where the provider stands when it is given up.
      end: Where it stands when nothing happens any more.
      counts: What it has counted by then, besides one load.
      loads: Models that have been loaded once the verb is followed by a start.
      accepts: Whether requests are accepted when it is given up.
      patience: Seconds after which it is given up.
    """

    before: Act
    verb: Act
    phase: Phase
    end: Phase
    counts: dict[str, int] = attrs.field(factory=dict, kw_only=True)
    loads: int = attrs.field(default=1, kw_only=True)
    accepts: bool = attrs.field(default=False, kw_only=True)
    patience: float = attrs.field(default=1, kw_only=True)

    def __str__(self) -> str:
        return f"{self.verb.__name__} while {self.before.__name__}"

    @property
    def wants_an_end(self) -> bool:
        return self.verb not in (start, configure)

    async def wait(self, scene: Scene) -> None:
        """Let the verb be given up."""
        await self.before(scene)
        with trio.move_on_after(self.patience) as scope:
            await self.verb(scene)
        assert scope.cancelled_caught
        self.assert_waiting(scene)

    async def be_in_it(self, scene: Scene, nursery: trio.Nursery) -> None:
        """Let the verb wait."""
        await self.before(scene)
        nursery.start_soon(self.verb, scene)
        await trio.sleep(self.patience)
        self.assert_waiting(scene)

    def assert_waiting(self, scene: Scene) -> None:
        provider = scene.provider
        assert (provider.phase, provider.started) == (self.phase, self.accepts)
        assert all(reply.outcome is None for reply in scene.others)
        assert (provider.config, provider.policy) == (CONFIG, PATIENT)


ONE_CANCELLED: Final = {"accepted": 1, "cancelled": 1}
ONE_FINISHED: Final = {"accepted": 1, "finished": 1}
ONE_UNLOADED: Final = {"unloads": 1}

WAITS: Final = [
    Wait(nothing, start, Phase.LOADING, Phase.STARTED, accepts=True),
    Wait(
        failing,
        start,
        Phase.LOADING,
        Phase.STARTED,
        patience=110,
        accepts=True,
        counts={"generations": 2, "failed_loads": 1, "restarts": 1},
    ),
    Wait(unloading, start, Phase.UNLOADING, Phase.UNLOADED, counts=ONE_UNLOADED, loads=2),
    Wait(stopping, start, Phase.STOPPING, Phase.RESIDENT, counts=ONE_CANCELLED),
    Wait(draining, start, Phase.STARTED, Phase.RESIDENT, counts=ONE_FINISHED),
    Wait(
        dead,
        start,
        Phase.STARTED,
        Phase.STARTED,
        accepts=True,
        counts={
            "accepted": 1,
            "failed": 1,
            "generations": 2,
            "loads": 2,
            "crashes": 1,
            "restarts": 1,
        },
        loads=2,
    ),
    Wait(generating, stop, Phase.STOPPING, Phase.RESIDENT, counts=ONE_CANCELLED),
    Wait(stopping, stop, Phase.STOPPING, Phase.RESIDENT, counts=ONE_CANCELLED),
    Wait(generating, stop_when_all_is_served, Phase.STARTED, Phase.RESIDENT, counts=ONE_FINISHED),
    Wait(draining, stop_when_all_is_served, Phase.STARTED, Phase.RESIDENT, counts=ONE_FINISHED),
    Wait(
        loading_for_one, stop_when_all_is_served, Phase.LOADING, Phase.RESIDENT, counts=ONE_FINISHED
    ),
    Wait(generating, stop_when_time_is_up, Phase.STARTED, Phase.RESIDENT, counts=ONE_CANCELLED),
    Wait(
        loading_for_one,
        stop_when_time_is_up,
        Phase.LOADING,
        Phase.UNLOADED,
        counts={**ONE_CANCELLED, "loads": 0},
    ),
    Wait(resident, unload, Phase.UNLOADING, Phase.UNLOADED, counts=ONE_UNLOADED, loads=2),
    Wait(unloading, unload, Phase.UNLOADING, Phase.UNLOADED, counts=ONE_UNLOADED, loads=2),
    Wait(
        stopping,
        unload,
        Phase.STOPPING,
        Phase.UNLOADED,
        counts=ONE_CANCELLED | ONE_UNLOADED,
        loads=2,
    ),
    Wait(loading, unload, Phase.UNLOADING, Phase.UNLOADED, counts={"loads": 0}),
    Wait(
        resident,
        configure,
        Phase.UNLOADING,
        Phase.UNLOADED,
        patience=21,
        counts=ONE_UNLOADED,
        loads=2,
    ),
    Wait(resident, configure, Phase.RESIDENT, Phase.RESIDENT),
    Wait(stopping, configure, Phase.STOPPING, Phase.RESIDENT, patience=21, counts=ONE_CANCELLED),
    Wait(
        unloading,
        configure,
        Phase.UNLOADING,
        Phase.UNLOADED,
        patience=21,
        counts=ONE_UNLOADED,
        loads=2,
    ),
]

in_each_verb = pytest.mark.parametrize("wait", WAITS, ids=str)


def sluggish() -> Sluggish:
    return Sluggish(silencing=30, ending=30, looking=20)


@in_each_verb
async def test_a_verb_that_is_given_up_leaves_what_it_says(
    autojump_clock: MockClock, wait: Wait
) -> None:
    async with opened(sluggish()) as scene:
        await wait.wait(scene)
        await trio.sleep(AGES)
        provider = scene.provider
        assert (provider.phase, provider.started) == (wait.end, wait.end is Phase.STARTED)
        assert (provider.config, provider.policy) == (CONFIG, PATIENT)
        assert scene.counters == Counters(**({"generations": 1, "loads": 1} | wait.counts))
        assert scene.backend.lives == (wait.end is not Phase.UNLOADED)
        await assert_usable(scene)


@in_each_verb
async def test_a_start_after_a_verb_that_was_given_up_starts(
    autojump_clock: MockClock, wait: Wait
) -> None:
    async with opened(sluggish()) as scene:
        await wait.wait(scene)
        await scene.provider.start()
        assert (scene.provider.phase, scene.provider.started) == (Phase.STARTED, True)
        assert (scene.provider.config, scene.backend.loads) == (CONFIG, wait.loads)
        await assert_usable(scene)


@in_each_verb
async def test_a_stop_after_a_verb_that_was_given_up_stops_and_the_model_can_be_unloaded(
    autojump_clock: MockClock, wait: Wait
) -> None:
    async with opened(sluggish()) as scene:
        await wait.wait(scene)
        await scene.provider.stop()
        assert not scene.provider.started
        for reply in scene.others:
            assert isinstance(reply.outcome, Cancelled | Failed)
        await scene.provider.unload_model()
        assert (scene.provider.phase, scene.backend.lives) == (Phase.UNLOADED, 0)
        await trio.sleep(AGES)
        assert (scene.provider.phase, scene.backend.lives) == (Phase.UNLOADED, 0)
        await assert_usable(scene)


@in_each_verb
async def test_a_request_after_a_verb_that_was_given_up_is_served_or_refused(
    autojump_clock: MockClock, wait: Wait
) -> None:
    async with opened(sluggish()) as scene:
        await wait.wait(scene)
        if wait.accepts:
            assert (await scene.provider.submit(hello()).result()).text == TEXT
        else:
            with pytest.raises(NotStarted):
                scene.provider.submit(hello())
        await assert_usable(scene)


@in_each_verb
async def test_a_block_that_is_cancelled_within_a_verb_leaves_nothing(
    autojump_clock: MockClock, wait: Wait
) -> None:
    scene = Scene(sluggish())
    with trio.CancelScope() as scope:
        async with scene.opened(), trio.open_nursery() as nursery:
            await wait.be_in_it(scene, nursery)
            scope.cancel()
    assert scope.cancelled_caught
    await assert_over(scene)


@in_each_verb
async def test_a_nursery_that_is_cancelled_answers_a_verb_of_somebody_else(
    autojump_clock: MockClock, wait: Wait
) -> None:
    """Who wanted an end has got it."""
    answers: list[LlamatrioError | None] = []

    async def take_answer(scene: Scene) -> None:
        try:
            await wait.verb(scene)
        except LlamatrioError as exc:
            answers.append(exc)
        else:
            answers.append(None)

    scene = Scene(sluggish())
    async with scene.connected() as scope:
        await attrs.evolve(wait, verb=take_answer).be_in_it(scene, scene.nursery)
        scope.cancel()
    assert scope.cancelled_caught
    await assert_over(scene)
    (answer,) = answers
    assert type(answer) is (type(None) if wait.wants_an_end else ProviderClosed)


async def test_a_start_that_is_given_up_leaves_another_to_its_answer(
    autojump_clock: MockClock,
) -> None:
    async with opened() as scene, trio.open_nursery() as nursery:
        nursery.start_soon(scene.provider.start)
        with trio.move_on_after(1) as scope:
            await scene.provider.start()
        assert scope.cancelled_caught
    assert scene.counters.loads == 1


async def test_a_configuration_that_is_given_up_leaves_another_to_its_effect(
    autojump_clock: MockClock,
) -> None:
    async with opened(sluggish()) as scene:
        await resident(scene)
        third = ModelConfig("third.gguf")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.provider.configure, third)
            await wait_all_tasks_blocked()
            with trio.move_on_after(25) as scope:
                await configure(scene)
            assert scope.cancelled_caught
            assert scene.provider.config == CONFIG
        assert (scene.provider.config, scene.provider.policy) == (third, PATIENT)
        await assert_usable(scene)


async def test_a_start_that_is_given_up_with_a_stop_behind_it_starts_nothing(
    autojump_clock: MockClock,
) -> None:
    """Both in one step of the actor, in either order."""
    async with opened() as scene:
        for verbs in ((start, stop), (stop, start)):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    for verb in verbs:
                        nursery.start_soon(verb, scene)
                    scope.cancel()
            assert scope.cancelled_caught
            await wait_all_tasks_blocked()
            assert (scene.provider.phase, scene.provider.started) == (Phase.UNLOADED, False)
        assert scene.counters.generations == 0
        await assert_usable(scene)


# -- cancels that are cancelled ----------------------------------------------------------------


async def test_a_cancel_that_is_given_up_while_an_answer_falls_silent_comes_all_the_same(
    autojump_clock: MockClock,
) -> None:
    async with opened(sluggish()) as scene:
        await generating(scene)
        (reply,) = scene.others
        waiting = scene.provider.submit(hello())
        with trio.move_on_after(1) as scope:
            await scene.provider.cancel(reply.id)
        assert scope.cancelled_caught
        assert (reply.outcome, reply.phase) == (None, "generating")
        assert await reply.wait() == Cancelled("caller", "generating", 1)
        assert isinstance(await waiting.wait(), Finished)
        assert scene.counters.cancelled == 1
        await assert_usable(scene)


@pytest.mark.parametrize("patience", [0, 1])
async def test_a_cancel_of_all_that_runs_is_given_up_and_comes_all_the_same(
    autojump_clock: MockClock, patience: float
) -> None:
    async with opened(sluggish()) as scene:
        await scene.provider.configure(attrs.evolve(CONFIG, slots=2))
        await scene.provider.start()
        replies = [scene.provider.submit(hello()) for _ in range(4)]
        await trio.sleep(1)
        with trio.move_on_after(patience) as scope:
            await scene.provider.cancel_current()
        assert scope.cancelled_caught
        assert [reply.outcome for reply in replies] == [None] * 4
        for reply in replies[:2]:
            assert await reply.wait() == Cancelled("caller", "prompt", 0)
        for reply in replies[2:]:
            assert isinstance(await reply.wait(), Finished)
        await assert_usable(scene)


async def test_a_stop_behind_a_cancel_that_was_given_up_leaves_it_the_outcome(
    autojump_clock: MockClock,
) -> None:
    async with opened(sluggish()) as scene:
        await generating(scene)
        (reply,) = scene.others
        await give_up_at_once(partial(scene.provider.cancel, reply.id))
        await scene.provider.stop()
        assert reply.outcome == Cancelled("caller", "generating", 1)
        assert scene.provider.phase is Phase.RESIDENT
        await assert_usable(scene)


async def test_a_block_whose_request_is_slow_to_end_is_left_when_it_has(
    autojump_clock: MockClock,
) -> None:
    async with opened(sluggish()) as scene:
        await ready(scene)
        began = trio.current_time()
        with trio.move_on_after(101) as scope:
            async with scene.ask(hello()) as reply:
                await reply.wait()
        assert scope.cancelled_caught
        assert scene.reply.outcome == Cancelled("caller", "generating", 1)
        assert trio.current_time() - began == pytest.approx(101 + 30)
        await assert_usable(scene)


# -- a block that is started -------------------------------------------------------------------


async def test_a_started_block_that_is_cancelled_in_its_start_is_stopped(
    autojump_clock: MockClock,
) -> None:
    """Nobody is there any more who would stop what it began."""
    async with opened() as scene:
        with trio.move_on_after(1) as scope:
            async with scene.provider.running():
                raise AssertionError("it was started")
        assert scope.cancelled_caught
        await trio.sleep(AGES)
        assert (scene.provider.phase, scene.provider.started) == (Phase.UNLOADED, False)
        await assert_usable(scene)


async def test_a_started_block_that_is_cancelled_while_its_start_is_postponed_loads_nothing(
    autojump_clock: MockClock,
) -> None:
    async with opened(sluggish()) as scene:
        await unloading(scene)
        with trio.move_on_after(1) as scope:
            async with scene.provider.running():
                raise AssertionError("it was started")
        assert scope.cancelled_caught
        await trio.sleep(AGES)
        assert (scene.provider.phase, scene.counters.generations) == (Phase.UNLOADED, 1)
        await assert_usable(scene)


async def cancel_its_body(scene: Scene, scope: trio.CancelScope) -> None:
    scope.deadline = trio.current_time() + 101
    await trio.sleep_forever()


async def cancel_its_end(scene: Scene, scope: trio.CancelScope) -> None:
    await trio.sleep(101)
    scope.deadline = trio.current_time() + 1


async def cancel_as_it_ends(scene: Scene, scope: trio.CancelScope) -> None:
    await trio.sleep(101)
    scope.cancel()


@pytest.mark.parametrize("drain_timeout", [None, 50])
@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("body", [cancel_its_body, cancel_its_end, cancel_as_it_ends])
async def test_a_started_block_that_is_cancelled_is_left_when_it_has_stopped(
    autojump_clock: MockClock,
    body: Callable[[Scene, trio.CancelScope], Awaitable[None]],
    drain: bool,
    drain_timeout: float | None,
) -> None:
    async with opened(sluggish()) as scene:
        await resident(scene)
        began = trio.current_time()
        replies: list[Reply] = []
        with trio.CancelScope() as scope:
            async with scene.provider.running(drain=drain, drain_timeout=drain_timeout):
                replies += [scene.provider.submit(hello()) for _ in range(2)]
                await body(scene, scope)
        in_drain = drain and body is not cancel_its_body
        assert scope.cancelled_caught is (in_drain or body is cancel_its_body)
        waited = 1 if in_drain and body is cancel_its_end else 0
        assert trio.current_time() - began == pytest.approx(101 + waited + 30)
        assert replies[0].outcome == Cancelled("stop", "generating", 1)
        assert replies[1].outcome == Cancelled("stop", "queued", 0)
        assert (scene.provider.phase, scene.provider.started) == (Phase.RESIDENT, False)
        await assert_usable(scene)


# -- those who watch ---------------------------------------------------------------------------


async def go_round(scene: Scene) -> None:
    """Pass through all phases."""
    await generating(scene)
    await scene.provider.stop()
    await scene.provider.start()
    await crash(scene)
    await scene.provider.start()
    await scene.provider.stop()
    await scene.provider.unload_model()


def changes(statuses: list[Status]) -> list[tuple[Phase, int]]:
    """Leave out progress, of which a watcher may miss some."""
    seen = [(status.phase, status.generation) for status in statuses]
    return [one for one, before in zip(seen, [None, *seen], strict=False) if one != before]


@pytest.mark.parametrize("glimpse", [0, 1, 10, 33, 100])
async def test_a_watcher_that_is_cancelled_again_and_again_misses_no_change(
    autojump_clock: MockClock, glimpse: float
) -> None:
    """Also at the very moments at which there is news: all of it comes at multiples of ten."""
    pieced: list[Status] = []

    over = trio.Event()

    async def watch_in_glimpses(watch: Watch) -> None:
        while not over.is_set():
            with trio.move_on_after(glimpse):
                async for status in watch:
                    pieced.append(status)
            await trio.sleep(10)

    async with opened(sluggish()) as scene, trio.open_nursery() as watchers:
        watch, steady = scene.provider.watch(), scene.provider.watch()
        watchers.start_soon(watch_in_glimpses, watch)
        await go_round(scene)
        await scene.provider.aclose()
        over.set()
    pieced += [status async for status in watch]
    assert changes(pieced) == changes([status async for status in steady])
    assert {status.phase for status in pieced} == set(Phase)


# -- real children -----------------------------------------------------------------------------


GUARD: Final = 60.0
SHORT: Final = completion_request("Hello", max_tokens=2, temperature=0)
ON_AND_ON: Final = completion_request("Hello", max_tokens=100_000, temperature=0)
LONG_PROMPT: Final = completion_request("x" * 3500, max_tokens=2)

GiveUp: TypeAlias = Callable[[], None]


async def within_a_load(provider: LocalProvider, give_up: GiveUp) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(provider.start)
        await reach(provider, Phase.LOADING)
        async with provider.request(SHORT) as reply:
            give_up()
            await reply.wait()


async def within_a_prompt(provider: LocalProvider, give_up: GiveUp) -> None:
    await provider.start()
    async with provider.request(LONG_PROMPT) as reply:
        while not (reply.progress and reply.progress.processed):  # noqa: ASYNC110
            await trio.sleep(0.001)
        give_up()
        await reply.wait()


async def within_an_answer(provider: LocalProvider, give_up: GiveUp) -> None:
    await provider.start()
    async with provider.request(ON_AND_ON) as reply, provider.request(ON_AND_ON) as waiting:
        await first_text(reply)
        give_up()
        await waiting.wait()


async def within_a_drain(provider: LocalProvider, give_up: GiveUp) -> None:
    await provider.start()
    async with trio.open_nursery() as nursery, provider.request(ON_AND_ON) as reply:
        await first_text(reply)
        nursery.start_soon(partial(provider.stop, drain=True))
        while provider.started:  # noqa: ASYNC110
            await trio.lowlevel.checkpoint()
        give_up()
        await reply.wait()


async def within_an_unload(provider: LocalProvider, give_up: GiveUp) -> None:
    await provider.start()
    await provider.stop()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(provider.unload_model)
        await reach(provider, Phase.UNLOADING)
        give_up()
        await trio.sleep_forever()


class Ledger(LifecycleActor):
    """Writes down how requests ended."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        self.ended: list[tuple[str, str, str]] = []

    def on_request_finished(self, reply: Reply, outcome: Outcome) -> None:
        by = outcome.by if isinstance(outcome, Cancelled) else ""
        self.ended.append((type(outcome).__name__, by, reply.phase))


@attrs.frozen
class Real:
    """A place where a real model's caller gives up.

    Attributes:
      within: Goes there, and gives up.
      phases: Where the requests stood that end with it.
      generations: Models that were begun once the provider is started again.
    """

    within: Callable[[LocalProvider, GiveUp], Awaitable[None]]
    phases: tuple[RequestPhase, ...]
    generations: int = 1

    def assert_ended(self, ledger: Ledger) -> None:
        assert ledger.ended == [("Cancelled", "caller", phase) for phase in self.phases]


REAL: Final = [
    Real(within_a_load, ("loading",)),
    Real(within_a_prompt, ("prompt",)),
    Real(within_an_answer, ("queued", "generating")),
    Real(within_a_drain, ("generating",)),
    Real(within_an_unload, (), generations=2),
]

at_each_place = pytest.mark.parametrize("real", REAL, ids=lambda real: str(real.within.__name__))


class House:
    """Opens a provider of a real model, and keeps its ledger."""

    def __init__(self, kind: Kind, model: Parrot) -> None:
        self._kind = kind
        self._config = ModelConfig(model.path, batch=64, context=4096, threads=1)
        self.ledger: Ledger
        self.provider: LocalProvider

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[LocalProvider, None]:
        opening = open_provider(self._config, backend=self._kind, actor=self._keep)
        async with opening as self.provider:
            yield self.provider

    def _keep(self, config: ModelConfig, backend: Backend) -> Ledger:
        self.ledger = Ledger(config, backend)
        return self.ledger


@pytest.fixture
def house(kind: Kind, endless: Parrot, large: Parrot, real: Real) -> House:
    return House(kind, large if real.within is within_a_load else endless)


@at_each_place
async def test_a_real_model_whose_caller_gave_up_serves_the_next(house: House, real: Real) -> None:
    with trio.fail_after(GUARD):
        async with house.opened() as provider:
            with trio.CancelScope() as scope:
                await real.within(provider, scope.cancel)
            assert scope.cancelled_caught
            real.assert_ended(house.ledger)
            await provider.start()
            assert isinstance(await provider.submit(SHORT).wait(), Finished)
            await provider.stop()
            snapshot = provider.diagnostics()
            assert (snapshot.pending, snapshot.running) == (0, 0)
            counters = snapshot.counters
            assert (counters.generations, counters.loads) == (real.generations, real.generations)
            assert (counters.crashes, counters.failed_loads) == (0, 0)


@at_each_place
async def test_a_real_model_whose_block_is_cancelled_is_gone(house: House, real: Real) -> None:
    with trio.fail_after(GUARD):
        with trio.CancelScope() as scope:
            async with house.opened() as provider:
                await real.within(provider, scope.cancel)
        assert scope.cancelled_caught
        real.assert_ended(house.ledger)
        snapshot = house.provider.diagnostics()
        assert (snapshot.phase, snapshot.pid) == (Phase.UNLOADED, None)
        assert (snapshot.pending, snapshot.running) == (0, 0)
        assert (snapshot.counters.crashes, snapshot.counters.failed_loads) == (0, 0)
