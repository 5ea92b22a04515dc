"""Random lives of a provider: verbs, requests, faults and time, in any order and at any moment.

A witness (`machine.Witness`) takes notes, and knows only what was promised. The first half runs
over a scripted model, on a mock clock; the second over a real child, in real time.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import random
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias, TypeVar

import attrs
import pytest
import trio
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from machine import POLICIES, Call, Guest, VerbName, Witness
from trio.testing import wait_all_tasks_blocked

from llamatrio import (
    ChildDied,
    ChildError,
    ChildSilent,
    LlamatrioError,
    LoadFailed,
    LoadStalled,
    LocalProvider,
    ModelConfig,
    Phase,
    Policy,
    Request,
    WakeFailed,
    completion_request,
    open_provider,
)
from llamatrio.child.exits import Exit
from llamatrio.child.launch import Kind
from llamatrio.lifecycle.policy import NO_RESTARTS, PERSISTENT
from llamatrio.outcomes import Finished
from llamatrio.requests import NO_LIMITS, Limits, OnCrash
from llamatrio.session.base import Emit, ModelSession, Opened, Publish, SessionEvent
from llamatrio.session.server import ServerBackend
from llamatrio.testing import ScriptedBackend, open_scripted_provider
from llamatrio.testing.parrot import Parrot, write_slow_parrot

T = TypeVar("T")
_logger = logging.getLogger(__name__)

# -- what is played ----------------------------------------------------------------------------


def spell(number: int, words: int) -> list[str]:
    """Make up the answer to a request, in pieces."""
    return [f"{' ' if word else ''}{number}.{word}" for word in range(words)]


def answer(request: Request) -> str | Exception:
    """Answer a request, from where its answer broke off."""
    assert isinstance(request.body, Mapping)
    head, _, said = str(request.body["prompt"]).partition(":")
    number, words = head.split()
    if words == "None":
        return Refused(int(number))
    return "".join(spell(int(number), int(words)))[len(said) :]


class Refused(LlamatrioError):
    """An error of one request."""


class Session(ModelSession):
    """One that may not notice the death of its model, and may be slow to obey."""

    def __init__(self, session: ModelSession, stage: Stage) -> None:
        self._session = session
        self._stage = stage

    async def perform(self, request: Request, emit: Emit) -> Finished:
        try:
            return await self._perform(request, emit)
        except trio.Cancelled:
            with trio.move_on_after(self._stage.reaction, shield=True):
                await trio.sleep_forever()
            raise

    async def _perform(self, request: Request, emit: Emit) -> Finished:
        try:
            return await self._session.perform(request, emit)
        except ChildError as exc:
            error = exc
        if self._stage.distracted:
            await trio.sleep_forever()
        raise error


class Stage(ScriptedBackend):
    """A scripted model whose lives a witness counts."""

    def __init__(self, witness: Witness) -> None:
        super().__init__(answer, load_time=3.0, prompt_time=1.0, token_time=1.0)
        self._witness = witness
        self.distracted = False
        self.can_crash = False
        self.can_sleep = False

    @property
    def reaction(self) -> float:
        """Seconds that it takes to obey a cancel."""
        return self._witness.reaction

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        def listen(event: SessionEvent) -> None:
            if isinstance(event, Opened):
                self.can_sleep = True
                event = Opened(Session(event.session, self))
            tell(event)

        with self._witness.life(publish) as tell:
            self.can_crash = True
            try:
                await super().run(config, listen)
            except trio.Cancelled:
                self.can_crash = self.can_sleep = False
                with trio.move_on_after(self.reaction, shield=True):
                    await trio.sleep_forever()
                raise
            finally:
                self.can_crash = self.can_sleep = False


# -- the machine -------------------------------------------------------------------------------


@attrs.frozen
class Verb:
    """Call a verb.

    Attributes:
      name: Which.
      timeout: For a drain.
      config: The number of the configuration to take, for `configure`; None for none.
      policy: The name of the policy to take, for `configure`; None for none.
    """

    name: VerbName
    timeout: float | None
    config: int | None
    policy: str | None


@attrs.frozen
class Submit:
    """Submit a request, or several alike.

    Attributes:
      words: How long the answer is; None for one that is refused.
      bound: How many words of it are wanted.
      key: The key by which it supersedes.
      times: How many are submitted.
    """

    words: int | None
    bound: int = 1024
    on_crash: OnCrash = "fail"
    priority: int = 0
    key: str | None = None
    limits: Limits = NO_LIMITS
    times: int = 1


@attrs.frozen
class GiveUp:
    """Give up a request, all that run, or the wait for a verb.

    Attributes:
      what: What.
      which: Which of its kind.
    """

    what: Literal["reply", "number", "all that run", "verb"]
    which: int = 0


@attrs.frozen
class Break:
    """Let something happen on the model's side, now or at the next occasion."""

    what: str


@attrs.frozen
class CrashAnd:
    """Let the model die, and do something before everybody knows.

    Attributes:
      what: How it dies.
      pause: What happens in between.
      then: What is done.
    """

    what: str
    pause: str
    then: Verb | GiveUp


@attrs.frozen
class Wait:
    """Let time pass.

    Attributes:
      seconds: How much.
      start: Whether somebody calls start before.
    """

    seconds: float
    start: bool = False


@attrs.frozen
class End:
    """Come to rest, or to the end."""

    how: Literal["rest", "aclose", "leave", "cancel"]


Step: TypeAlias = Verb | Submit | GiveUp | Break | CrashAnd | Wait | End


def one(*values: T) -> st.SearchStrategy[T]:
    return st.sampled_from(values)


ON_CRASH: st.SearchStrategy[OnCrash] = one("fail", "resume")
PRIORITIES = one(0, 0, 0, 1, -1)
PAUSES = one("none", "turn", "turn", "settled", "settled", "settled")
VERBS = st.builds(
    Verb,
    one("start", "start", "start", "stop", "drain", "drain", "unload", "configure"),
    timeout=one(None, None, 0.0, 0.5, 4.0, 20.0),
    config=one(None, 0, 1, 2),
    policy=one(None, *POLICIES),
)
STEPS: dict[str, tuple[int, st.SearchStrategy[Step]]] = {
    "verb": (5, VERBS),
    "plain": (3, st.builds(Submit, one(1, 2, 3, 5, 8, None))),
    "several": (
        2,
        st.builds(
            Submit, one(2, 3), on_crash=ON_CRASH, priority=PRIORITIES, times=st.integers(2, 4)
        ),
    ),
    "conditions": (
        3,
        st.builds(
            Submit,
            one(3, 5, 8),
            bound=one(1024, 1024, 2),
            on_crash=ON_CRASH,
            priority=PRIORITIES,
            key=one(None, "a", "b"),
            limits=one(
                NO_LIMITS,
                NO_LIMITS,
                Limits(queue=2.0),
                Limits(first_token=0.5),
                Limits(silence=0.5),
                Limits(total=4.0),
                Limits(queue=3.0, first_token=2.0, silence=2.0, total=8.0),
            ),
        ),
    ),
    "give up": (
        2,
        st.builds(GiveUp, one("reply", "number", "all that run", "verb"), st.integers(0, 3)),
    ),
    "break": (
        2,
        st.builds(
            Break,
            one(
                *["crash"] * 4,
                *["sleep"] * 3,
                *["refused load", "killed load", "killed load", "failed wake"],
                *["silent load", "silent wake", "silent answer"],
            ),
        ),
    ),
    "crash and": (
        2,
        st.builds(
            CrashAnd,
            one("crash", "unseen crash", "unseen crash"),
            one("none", "turn", "settled"),
            st.one_of(VERBS, st.just(GiveUp("all that run"))),
        ),
    ),
    "wait": (6, st.builds(Wait, one(*[0.5] * 4, *[1.0] * 4, 1.5, 2.0, 2.0, 3.0, 5.0, 30.0, 200.0))),
    "start and wait": (2, st.builds(Wait, one(2.0, 3.0, 4.0), start=st.just(True))),
    "end": (1, st.builds(End, one("rest", "rest", "aclose", "leave", "cancel"))),
}
KINDS = one(*[kind for kind, (weight, _) in STEPS.items() for _ in range(weight)])
CHILDHOOD = 25
"""Steps before which no life ends, save by a policy."""
BOUND = 10.0
"""Seconds on the mock clock within which a provider comes to rest, whatever it does."""
KILLED = Exit(pid=0, returncode=-9, signal="SIGKILL", ready=True)


class Machine(RuleBasedStateMachine):
    """A provider in the hands of many."""

    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.witness = Witness()
        self.guest = Guest()
        self.stage = Stage(self.witness)
        self.pending: list[Callable[[], object]] = []
        self.leave = trio.Event()
        self.body = trio.CancelScope()
        self.raised: BaseException | None = None
        self.is_whole = False
        self.age = 0

    @initialize(
        schedule=st.random_module(),
        slots=st.integers(1, 3),
        policy=one(*POLICIES),
        started=one(True, True, False),
        reaction=one(0.0, 0.0, 2.0),
    )
    def open(
        self, schedule: object, slots: int, policy: str, started: bool, reaction: float
    ) -> None:
        self.slots = slots
        self.witness.reaction = reaction

        async def open_it() -> None:
            await self.nursery.start(self._own, POLICIES[policy])
            if started:
                self.begin("start", self.provider.start)
                await trio.sleep(5)
            await self._settle()

        self.call(open_it)

    async def _own(self, policy: Policy, *, task_status: trio.TaskStatus[None]) -> None:
        try:
            with self.body:
                async with open_scripted_provider(
                    self.stage,
                    config=self.config(0),
                    policy=policy,
                    actor=self.witness.make_actor,
                ) as provider:
                    self.witness.provider = provider
                    self.nursery.start_soon(self.witness.watch)
                    task_status.started()
                    await self.leave.wait()
        except LlamatrioError as exc:
            self.raised = exc

    def config(self, number: int) -> ModelConfig:
        return ModelConfig(f"{number}.gguf", slots=self.slots)

    @property
    def nursery(self) -> trio.Nursery:
        assert self.guest.nursery is not None
        return self.guest.nursery

    @property
    def provider(self) -> LocalProvider:
        return self.witness.provider

    # -- steps -----------------------------------------------------------------------------

    def do(self, action: Callable[[], object], pause: str = "settled") -> None:
        """Do something, at once or together with what comes next, and let others go on."""
        self.age += 1
        self.pending.append(action)
        if pause != "none":
            self.call(lambda: self._do_all(settle=pause == "settled"))

    def call(self, function: Callable[[], Awaitable[None]]) -> None:
        self.is_whole = False
        self.guest.call(function)
        self.is_whole = True

    async def _do_all(self, *, settle: bool) -> None:
        actions, self.pending = self.pending, []
        for action in actions:
            action()
            self.witness.check()
        await trio.lowlevel.checkpoint()
        if settle:
            await self._settle()
        else:
            self.witness.check()

    async def _settle(self) -> None:
        await wait_all_tasks_blocked()
        self.witness.check_settled()

    # One rule: rules apart would be left out of whole lives, which become one-sided.
    @rule(step=KINDS.flatmap(lambda kind: STEPS[kind][1]), pause=PAUSES)
    def take(self, step: Step, pause: str) -> None:
        match step:
            case Wait():
                self.wait(step)
            case CrashAnd():
                self.do(lambda: self.play(step.what), step.pause)
                self.take(step.then, pause)
            case End("rest"):
                self.call(self._rest)
            case End():
                if self.age > CHILDHOOD:
                    self.do(lambda: self.end(step.how), pause)
            case _:
                self.do(lambda: self.act(step), pause)

    def act(self, step: Verb | Submit | GiveUp | Break) -> None:
        match step:
            case Verb():
                self.call_verb(step)
            case Submit():
                for _ in range(step.times):
                    self.submit(step)
            case GiveUp():
                self.give_up(step)
            case Break():
                self.play(step.what)

    # -- verbs -----------------------------------------------------------------------------

    def call_verb(self, step: Verb) -> None:
        match step.name:
            case "start":
                self.begin("start", self.provider.start)
            case "stop":
                self.begin("stop", self.provider.stop)
            case "unload":
                self.begin("unload", self.provider.unload_model)
            case "drain":
                self.drain(step.timeout)
            case "configure":
                config = None if step.config is None else self.config(step.config)
                self.configure(config, POLICIES.get(step.policy or ""))

    def begin(
        self, name: VerbName, verb: Callable[[], Awaitable[object]], timeout: float = math.inf
    ) -> Call:
        return self.witness.begin(self.nursery, name, verb, timeout=timeout)

    def drain(self, timeout: float | None) -> None:
        async def drain() -> None:
            await self.provider.stop(drain=True, drain_timeout=timeout)

        self.begin("drain", drain, math.inf if timeout is None else timeout)

    def configure(self, config: ModelConfig | None, policy: Policy | None) -> None:
        async def configure() -> None:
            await self.provider.configure(config, policy=policy)
            if self.was_alone(call):
                assert config is None or self.provider.config == config
                assert policy is None or self.provider.policy == policy

        call = self.begin("configure", configure)

    def was_alone(self, mine: Call) -> bool:
        """Whether nobody else wanted the same while this verb was under way."""
        return not any(
            call.name == mine.name and call is not mine and call.ended > mine.began
            for call in self.witness.calls
        )

    # -- requests --------------------------------------------------------------------------

    def submit(self, step: Submit) -> None:
        number, words = len(self.witness.asked) + 1, step.words
        request = completion_request(
            f"{number} {words}:",
            max_tokens=step.bound,
            on_crash=step.on_crash,
            priority=step.priority,
            supersede=step.key,
            limits=step.limits,
        )
        if words is None:
            self.witness.submit(request, refusal=Refused(number))
        else:
            self.witness.submit(request, "".join(spell(number, words)[: step.bound]))

    def give_up(self, step: GiveUp) -> None:
        live = self.witness.live or list(self.witness.asked.values())
        calls = [call for call in self.witness.calls if call.state == "waiting"]
        match step.what:
            case "reply" if live:
                self.witness.give_up(live[step.which % len(live)])
            case "number":
                number = live[step.which % len(live)].reply.id if live else 1
                self.nursery.start_soon(self.witness.cancel, number)
            case "verb" if calls:
                calls[step.which % len(calls)].scope.cancel()
            case _:
                self.nursery.start_soon(self.witness.cancel_current)

    # -- the model's side ------------------------------------------------------------------

    def play(self, what: str) -> None:
        number, faults, stage = len(self.witness.faults), self.witness.faults, self.stage
        match what:
            case "crash" | "unseen crash" if stage.can_crash:
                stage.distracted = what == "unseen crash"
                faults.append(ChildDied(f"crash {number}", KILLED))
                stage.crash(ChildDied(f"crash {number}", KILLED))
            case "sleep" if stage.can_sleep and not self.witness.actor.running:
                stage.sleep()
            case "refused load" | "killed load":
                how = KILLED if what == "killed load" else Exit(pid=0, returncode=1)
                faults.append(LoadFailed(f"load {number}", how))
                stage.fail_next_load(LoadFailed(f"load {number}", how))
            case "failed wake":
                faults.append(WakeFailed(f"wake {number}", KILLED))
                stage.fail_next_wake(WakeFailed(f"wake {number}", KILLED))
            case "silent load" | "silent wake" | "silent answer":
                self.witness.fault_types |= {LoadStalled, ChildSilent}
                self.fall_silent(what)
            case _:  # there is nothing to break
                pass

    def fall_silent(self, what: str) -> None:
        match what:
            case "silent load":
                self.stage.hang_next_load()
            case "silent wake":
                self.stage.hang_next_wake()
            case _:
                self.stage.hang_next_answer(1)

    # -- time ------------------------------------------------------------------------------

    def wait(self, step: Wait) -> None:
        async def wait() -> None:
            await self._do_all(settle=False)
            await trio.sleep(step.seconds)
            await self._settle()

        if step.start:
            self.pending.append(lambda: self.begin("start", self.provider.start))
        self.age += 1
        self.call(wait)

    def end(self, how: str) -> None:
        match how:
            case "aclose":
                self.nursery.start_soon(self.provider.aclose)
            case "leave":
                self.leave.set()
            case _:
                self.body.cancel()

    async def _rest(self) -> None:
        self.age += 1
        await self._do_all(settle=True)
        if not self.witness.closing:
            await self.witness.come_to_rest(BOUND)
        await self._settle()

    def teardown(self) -> None:
        type(self).steps += self.age
        try:
            if self.is_whole:
                self.call(self._end)
        finally:
            self.guest.close()

    async def _end(self) -> None:
        await self._do_all(settle=True)
        if not self.witness.closing:
            await self.witness.come_to_rest(BOUND)
        with trio.fail_after(BOUND):
            await self.provider.aclose()
        self.leave.set()
        await wait_all_tasks_blocked()
        self.witness.check_over()
        assert self.raised is None or self.witness.is_fault(self.raised), self.raised


def run(examples: int, steps: int) -> int:
    """Run the machine, and return the number of steps."""
    Machine.steps = 0
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            print_blob=True,
            suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
        ),
    )
    _logger.info("%d steps in %d lives", Machine.steps, examples)
    return Machine.steps


def test_random_lives_keep_every_promise() -> None:
    assert run(40, 40) > 500


@pytest.mark.slow
def test_many_long_random_lives_keep_every_promise() -> None:
    assert run(400, 50) > 10_000


# -- real children -----------------------------------------------------------------------------


class Child(ServerBackend):
    """A real child whose lives a witness counts."""

    def __init__(self, kind: Kind, witness: Witness) -> None:
        super().__init__(kind)
        self._witness = witness

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        with self._witness.life(publish) as tell:
            await super().run(config, tell)


class Trace:
    """Random steps over a real child, in real time; the same seed makes the same steps."""

    def __init__(self, seed: int, model: Parrot, answers: Mapping[int, str]) -> None:
        self.random = random.Random(seed)
        self.configs = [ModelConfig(model.path, slots=2, threads=1, context=n) for n in (512, 768)]
        self.answers = answers
        self.witness = Witness()

    @property
    def provider(self) -> LocalProvider:
        return self.witness.provider

    async def run(self, kind: Kind) -> None:
        async with (
            trio.open_nursery() as nursery,
            open_provider(
                self.configs[0], backend=Child(kind, self.witness), actor=self.witness.make_actor
            ) as self.witness.provider,
        ):
            nursery.start_soon(self.witness.watch)
            self.begin(nursery, "start")
            await self.provider_is_ready()
            for _ in range(self.random.randrange(8, 16)):
                self.step(nursery)
                await self.wait()
                self.witness.check()
            await wait_all_tasks_blocked()
            await self.witness.come_to_rest(30)
            await self.provider.aclose()
        self.witness.check_over()
        _logger.info("%s", self.provider.diagnostics().counters)

    async def provider_is_ready(self) -> None:
        async for status in self.provider.watch():
            if status.phase is Phase.STARTED:
                return

    async def wait(self) -> None:
        """Let some time pass, or an answer come to its end."""
        live = self.witness.live
        if live and self.random.random() < 0.3:
            with trio.move_on_after(3):
                await self.random.choice(live).reply.wait()
        else:
            await trio.sleep(self.random.choice([0, 0, 0.001, 0.01, 0.05, 0.2]))

    def step(self, nursery: trio.Nursery) -> None:
        witness, choose = self.witness, self.random.choice
        match choose(["verb"] * 3 + ["submit"] * 6 + ["cancel", "abandon", "kill", "kill"]):
            case "verb":
                names: list[VerbName] = ["start", "stop", "drain", "unload", "configure"]
                self.begin(nursery, self.random.choices(names, [6, 1, 2, 1, 2])[0])
            case "submit":
                self.ask()
            case "cancel" if witness.live and self.random.random() < 0.8:
                witness.give_up(choose(witness.live))
            case "cancel":
                nursery.start_soon(witness.cancel_current)
            case "abandon":
                waiting = [call for call in witness.calls if call.state == "waiting"]
                choose([call.scope for call in waiting] or [trio.CancelScope()]).cancel()
            case _:
                self.kill()

    def begin(self, nursery: trio.Nursery, name: VerbName) -> None:
        timeout, provider = self.random.choice([0.0, 0.1, math.inf]), self.provider
        config = self.random.choice([None, *self.configs])
        policy = self.random.choice([Policy(), NO_RESTARTS, PERSISTENT])
        verbs: dict[VerbName, Callable[[], Awaitable[object]]] = {
            "start": provider.start,
            "stop": provider.stop,
            "drain": lambda: provider.stop(drain=True, drain_timeout=timeout),
            "unload": provider.unload_model,
            "configure": lambda: provider.configure(config, policy=policy),
        }
        drain_timeout = timeout if name == "drain" else math.inf
        self.witness.begin(nursery, name, verbs[name], timeout=drain_timeout)

    def ask(self) -> None:
        bound = self.random.choice(list(self.answers))
        request = completion_request(
            HELLO,
            max_tokens=bound,
            temperature=0,
            priority=self.random.choice([0, 0, 1]),
            supersede=self.random.choice([None, None, "a"]),
            on_crash=self.random.choice(["fail", "resume", "resume"]),
        )
        self.witness.submit(request, self.answers[bound])

    def kill(self) -> None:
        pid = self.provider.diagnostics().pid
        if pid is not None:
            self.witness.fault_types |= {ChildDied, LoadFailed}
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


HELLO = "Hello"


@pytest.fixture(scope="module")
def listener(models: Path) -> Parrot:
    """A slow model that goes on from its own words, without an end."""
    return write_slow_parrot(models / "listener.gguf", loop=True, listens=True)


@functools.cache
def answers_of(model: Parrot) -> dict[int, str]:
    return {}


async def learn(model: Parrot, kind: Kind) -> Mapping[int, str]:
    """Learn what a model answers if nothing comes in between, by the bound of the answer."""
    answers = answers_of(model)
    if not answers:
        async with open_provider(ModelConfig(model.path, threads=1), backend=kind) as provider:
            await provider.start()
            for bound in (2, 8, 20):
                request = completion_request(HELLO, max_tokens=bound, temperature=0)
                answers[bound] = (await provider.submit(request).result()).text
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(15), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(15, 40))]
)
async def test_random_traces_over_a_real_child_keep_every_promise(
    seed: int, kind: Kind, listener: Parrot
) -> None:
    with trio.fail_after(120):
        await Trace(seed, listener, await learn(listener, kind)).run(kind)
