"""Killing children, and writing down what follows."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio
from moments import reach

from llamatrio import (
    Backend,
    Ladder,
    LifecycleActor,
    LocalProvider,
    ModelConfig,
    Phase,
    Policy,
    Reply,
    Request,
    ServerBackend,
    Transition,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.outcomes import Outcome
from llamatrio.ownership import ActorFactory

SHORT = completion_request("Hello", max_tokens=3, temperature=0)
LONG = completion_request("Hello", max_tokens=120, temperature=0)
ON_AND_ON = completion_request("Hello", max_tokens=3000, temperature=0)

IMPATIENT = Ladder(exit=0.2, terminate=0.2, terminate_loading=0.2)
"""For children that are stopped and hear nothing anyway."""


@attrs.frozen
class Taken:
    """A request that got a slot.

    Attributes:
      id: Its number.
      text: What there was of its answer by then.
      tokens: In so many pieces.
    """

    id: int
    text: str
    tokens: int


class Diary(LifecycleActor):
    """Writes down what it is told."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        self.calls: list[str] = []
        self.steps: list[str] = []
        self.times: list[float] = []
        self.taken: list[Taken] = []
        self.settled: list[int] = []

    def on_transition(self, transition: Transition) -> None:
        self.calls.append("on_transition")
        self.steps.append(str(transition))
        self.times.append(trio.current_time())

    def on_request_started(self, reply: Reply) -> None:
        self.calls.append("on_request_started")
        self.taken.append(Taken(reply.id, reply.text, reply.tokens))

    def on_request_finished(self, reply: Reply, outcome: Outcome) -> None:
        self.calls.append("on_request_finished")
        self.settled.append(reply.id)

    def seconds_until(self, step: str) -> float:
        """Return when a step was first taken, on Trio's clock."""
        return self.times[self.steps.index(step)]


def diary_of(provider: LocalProvider) -> Diary:
    actor = provider._actor
    assert isinstance(actor, Diary)
    return actor


@asynccontextmanager
async def opened(
    kind: Kind,
    config: ModelConfig,
    policy: Policy | None = None,
    *,
    actor: ActorFactory = Diary,
    seconds: float = 60,
) -> AsyncGenerator[LocalProvider, None]:
    """Open a provider whose children are ended fast, with a guard around the block."""
    backend = ServerBackend(kind, ladder=IMPATIENT)
    with trio.fail_after(seconds):
        async with open_provider(config, backend=backend, policy=policy, actor=actor) as provider:
            yield provider


def pid_of(provider: LocalProvider) -> int:
    pid = provider.diagnostics().pid
    assert pid is not None
    return pid


def kill(provider: LocalProvider, number: signal.Signals = signal.SIGKILL) -> int:
    """Send the child a signal, and return its process number."""
    pid = pid_of(provider)
    os.kill(pid, number)
    return pid


async def hang(provider: LocalProvider) -> int:
    """Stop the child's process, and wait until none of its threads runs any more."""
    pid = kill(provider, signal.SIGSTOP)
    while any(state_of(task) not in "Tt" for task in Path(f"/proc/{pid}/task").iterdir()):  # noqa: ASYNC110, ASYNC240
        await trio.sleep(0.001)
    return pid


def state_of(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


async def reach_child(provider: LocalProvider) -> None:
    """Wait until there is a process that has said that it loads."""
    async for status in provider.watch():
        if status.progress is not None and status.progress.value is not None:
            return
    raise AssertionError("the provider was closed")


async def reach_tokens(reply: Reply, number: int) -> None:
    """Wait until there are so many pieces of an answer."""
    assert len(await reply.read(number - 1)) > 0, "it had ended before"


@attrs.frozen
class Broken:
    """An answer whose model was killed while it was given.

    Attributes:
      reply: The answer.
      heard: What a reader of it heard meanwhile.
    """

    reply: Reply
    heard: str


async def break_off(provider: LocalProvider, request: Request, *places: int) -> Broken:
    """Ask, and kill the child each time that there are so many pieces of the answer.

    Whoever is held up by others on the machine comes too late, and tries again.
    """
    while True:
        reply = provider.submit(request)
        heard: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen, reply, heard)
            for place in places:
                await reply.read(max(place - 1, reply.tokens))  # one that gets nowhere fails
                if reply.outcome is None:
                    await kill_and_return(provider)
        if reply.resumed == len(places):
            return Broken(reply, "".join(heard))


async def listen(reply: Reply, heard: list[str]) -> None:
    heard += [text async for text in reply]


async def kill_and_return(provider: LocalProvider) -> None:
    """Kill the child, and wait until the next is ready."""
    generation = provider.diagnostics().generation
    kill(provider)
    await reach(provider, Phase.STARTED, generation + 1)
