"""A thousand deaths: every request has its one outcome, and every broken answer goes on."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import attrs
import pytest
import trio
import trio.testing
from killing import Diary, diary_of, kill, opened, pid_of
from leftovers import take_census
from moments import reach
from programs.cycle import balanced

from llamatrio import (
    PERSISTENT,
    ChildDied,
    LocalProvider,
    ModelConfig,
    Phase,
    Reply,
    Request,
    Transition,
    chat_request,
    completion_request,
)
from llamatrio.child.launch import Kind
from llamatrio.lifecycle.keeper import Generation
from llamatrio.outcomes import Cancelled, Failed, Finished
from llamatrio.requests import OnCrash
from llamatrio.testing.parrot import Parrot, write_parrot

STATES: Final = ("loading", "prompt", "generating", "idle", "stopping")
ON_CRASH: Final[tuple[OnCrash, ...]] = ("fail", "resume")


@pytest.fixture(scope="session")
def fast(models: Path) -> Parrot:
    """A model that loads fast, says a word in some 2 ms, and goes on from its own words."""
    path = models / "fast.gguf"
    return write_parrot(path, loop=True, listens=True, layers=8, feed_forward=1024)


def requests() -> list[Request]:
    """What is asked for: of all kinds and lengths."""
    return [
        maker("Hello", max_tokens=tokens, temperature=0, on_crash=on_crash)
        for maker in (completion_request, chat_request)
        for tokens in (1, 4, 15, 40)
        for on_crash in ON_CRASH
    ]


# -- killed wherever it stands -----------------------------------------------------------------


class Victim(Diary):
    """Kills its child in the step that stops it, if it is told to."""

    to_be_killed = False

    def on_transition(self, transition: Transition) -> None:
        super().on_transition(transition)
        if transition.new is Phase.STOPPING and self.to_be_killed:
            assert self.backend.pid is not None
            os.kill(self.backend.pid, signal.SIGKILL)


class Killer:
    """Kills the child of a provider in a given state, and keeps the accounts.

    Attributes:
      kills: How often it struck a live child in each state.
      starts: How often it had to start the provider.
    """

    def __init__(self, provider: LocalProvider, rng: random.Random) -> None:
        self.provider = provider
        self.rng = rng
        self.kills = Counter[str]()
        self.missed = 0
        self.starts = 0
        self.replies: list[Reply] = []
        self.requests = requests()
        self.texts: dict[bytes, str] = {}

    @property
    def generation(self) -> Generation:
        generation = self.provider._actor.generation
        assert generation is not None
        return generation

    async def listen(self) -> None:
        """Learn what an undisturbed model answers."""
        await self.start()
        for request in self.requests:
            reply = self.provider.submit(request)
            self.replies.append(reply)
            self.texts[request.encoded] = (await reply.result()).text

    async def start(self) -> None:
        """Wait until the model is there, however it died before."""
        if not self.provider.started:
            self.starts += 1
            await self.provider.start()
        await reach(self.provider, Phase.STARTED)

    def submit(self, request: Request) -> Reply:
        reply = self.provider.submit(request)
        self.replies.append(reply)
        return reply

    def submit_some(self) -> None:
        """See to it that there is something to do, and give some of it up."""
        while self.provider.diagnostics().pending < 4:
            self.submit(self.rng.choice(self.requests))
        if self.rng.random() < 0.2:
            self.rng.choice(self.replies[-4:]).cancel()

    async def strike(self, state: str) -> None:
        """Kill the child in a state, and see that it was this that ended it."""
        hunt: dict[str, Callable[[], Awaitable[int | None]]] = {
            "loading": self.strike_loading,
            "prompt": self.strike_prompt,
            "generating": self.strike_generating,
            "idle": self.strike_idle,
            "stopping": self.strike_stopping,
        }
        pid = await hunt[state]()
        if pid is None:
            self.missed += 1
            return
        generation = self.generation
        end = await generation.wait_ended()
        assert end.exit is not None
        assert (end.exit.pid, end.exit.returncode) == (pid, -signal.SIGKILL)
        assert not end.exit.asked
        # Its last word may have been on its way.
        just_ready = state == "loading" and end.exit.ready
        self.kills["just ready" if just_ready else state] += 1
        while self.generation is generation and self.provider.started:  # noqa: ASYNC110
            await trio.sleep(0.001)

    def kill(self) -> int:
        assert self.generation.end is None
        return kill(self.provider)

    async def strike_loading(self) -> int | None:
        provider = self.provider
        if not provider.started:
            self.starts += 1
            async with trio.open_nursery() as nursery:
                await nursery.start(provider.start)
                nursery.cancel_scope.cancel()
        elif provider.phase is Phase.STARTED:
            before = self.kills.total()
            await self.strike("idle" if self.rng.random() < 0.2 else "generating")
            if self.kills.total() == before:
                return None
        self.submit_some()
        while provider.diagnostics().pid is None:  # noqa: ASYNC110 - nobody tells
            await trio.sleep(0.001)
        await trio.sleep(self.rng.uniform(0, 0.06))
        # What it has told by now is to be heard first.
        await trio.testing.wait_all_tasks_blocked()
        return self.kill() if provider.phase is Phase.LOADING else None

    async def strike_prompt(self) -> int | None:
        await self.start()
        self.submit_some()
        on_crash = self.rng.choice(ON_CRASH)
        request = completion_request("x" * 300, max_tokens=2, on_crash=on_crash)
        reply = self.submit(attrs.evolve(request, priority=1))
        while reply.outcome is None and reply.progress is None:  # noqa: ASYNC110 - nobody tells
            await trio.sleep(0.001)
        await trio.sleep(self.rng.uniform(0, 0.02))
        there = reply.outcome is None and reply.phase == "prompt"
        return self.kill() if there else None

    async def strike_generating(self) -> int | None:
        await self.start()
        self.submit_some()
        long = [request for request in self.requests if b":40," in request.encoded]
        reply = self.submit(attrs.evolve(self.rng.choice(long), priority=1))
        await reply.read(self.rng.randint(0, 12))
        there = reply.outcome is None and reply.phase == "generating"
        return self.kill() if there else None

    async def strike_idle(self) -> int | None:
        await self.start()
        for reply in [reply for reply in self.replies if reply.outcome is None]:
            await reply.wait()
        await trio.sleep(self.rng.uniform(0, 0.01))
        now = self.provider.diagnostics()
        there = now.phase is Phase.STARTED and now.running == now.pending == 0
        return self.kill() if there else None

    async def strike_stopping(self) -> int | None:
        await self.start()
        actor = self.provider._actor
        assert isinstance(actor, Victim)
        self.submit_some()
        reply = self.submit(self.rng.choice(self.requests))
        if self.rng.random() < 0.5:
            await reply.read(0)
        pid = pid_of(self.provider)
        actor.to_be_killed = True
        await self.provider.stop()
        actor.to_be_killed = False
        await reach(self.provider, Phase.UNLOADED)
        return pid

    async def check_accounts(self) -> None:
        """Compare what callers saw with what was counted."""
        for reply in self.replies:
            outcome = await reply.wait()
            text = self.texts.get(reply.request.encoded)
            if isinstance(outcome, Failed):
                assert isinstance(outcome.error, ChildDied)
            if isinstance(outcome, Finished) and text is not None:
                assert reply.text == text
            elif text is not None:
                assert text.startswith(reply.text)
        outcomes = [reply.outcome for reply in self.replies]
        counters = self.provider.diagnostics().counters
        assert balanced(self.provider._actor)
        assert counters.accepted == len(outcomes) == len({reply.id for reply in self.replies})
        assert counters.finished == sum(isinstance(outcome, Finished) for outcome in outcomes)
        assert counters.cancelled == sum(isinstance(outcome, Cancelled) for outcome in outcomes)
        assert counters.failed == sum(isinstance(outcome, Failed) for outcome in outcomes)
        assert counters.resumed == sum(o.resumed > 0 for o in outcomes if o is not None)
        assert counters.requeued == self.put_back()
        assert counters.crashes + counters.failed_loads == self.kills.total()
        assert counters.unloads == 1
        assert counters.generations == self.kills.total() + 1
        assert counters.restarts == counters.generations - self.starts
        assert counters.hook_errors == counters.stale == 0

    def put_back(self) -> int:
        """Count those who gave their slot back, from what the actor was told of slots."""
        slots = Counter(taken.id for taken in diary_of(self.provider).taken)
        kept = [
            reply.id in slots
            for reply in self.replies
            if reply.outcome is not None
            and (isinstance(reply.outcome, Finished) or reply.phase in ("prompt", "generating"))
        ]
        return slots.total() - sum(kept)


async def kill_everywhere(kind: Kind, parrot: Parrot, times: int, seed: int) -> Killer:
    """Kill the child so often in each state."""
    rng = random.Random(seed)
    config = ModelConfig(parrot.path, slots=2, threads=1, batch=64, context=1024)
    async with opened(kind, config, PERSISTENT, actor=Victim, seconds=1100) as provider:
        killer = Killer(provider, rng)
        await killer.listen()
        while left := [state for state in STATES if killer.kills[state] < times]:
            with trio.fail_after(60):
                await killer.strike(rng.choice(left))
        await killer.start()
        for reply in killer.replies:
            await reply.wait()
        await provider.stop()
        await provider.unload_model()
        await killer.check_accounts()
    return killer


async def test_a_kill_in_each_state_loses_no_request(kind: Kind, fast: Parrot) -> None:
    await kill_everywhere(kind, fast, 1, 1)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("times", "seed"),
    [
        pytest.param(10, 2, marks=pytest.mark.slow),
        pytest.param(50, 3, marks=pytest.mark.soak),
        pytest.param(50, 4, marks=pytest.mark.soak),
    ],
)
async def test_kills_in_all_states_lose_no_request(
    kind: Kind, fast: Parrot, times: int, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before, began = take_census(), time.perf_counter()
    killer = await kill_everywhere(kind, fast, times, seed)
    assert take_census().since(before) == {}
    assert killer.kills.total() >= 5 * times
    counters = killer.provider.diagnostics().counters
    with capsys.disabled():
        sys.stdout.write(
            f"\n{type(kind).__name__}, {time.perf_counter() - began:.0f} s: killed "
            f"{killer.kills.total()} times, {dict(killer.kills)}; {counters}\n"
        )


# -- taken up again and again ------------------------------------------------------------------


@attrs.frozen
class Resumes:
    """What came of many kills within answers.

    Attributes:
      answers: How many answers there were.
      kills: How often their child was killed.
      resumes: How often one of them was taken up again.
      most: The most often that one was.
    """

    answers: int
    kills: int
    resumes: int
    most: int


def resumable() -> list[Request]:
    return [
        maker("Hello", max_tokens=tokens, temperature=0, on_crash="resume")
        for maker in (completion_request, chat_request)
        for tokens in (40, 55, 70)
    ]


async def kill_and_resume(kind: Kind, parrot: Parrot, wanted: int, seed: int) -> Resumes:
    """Kill the child within answers, until they have been taken up again so often."""
    rng = random.Random(seed)
    config = ModelConfig(parrot.path, slots=4, threads=1, context=1024)
    async with opened(kind, config, PERSISTENT, seconds=1100) as provider:
        await provider.start()
        texts = {
            request.encoded: (await provider.submit(request).result()).text
            for request in resumable()
        }
        replies: list[Reply] = []
        kills = 0
        while sum(reply.resumed for reply in replies) < wanted:
            with trio.fail_after(60):
                await reach(provider, Phase.STARTED, kills + 1)
                while len(provider._actor.running) + provider.diagnostics().pending < 6:
                    replies.append(provider.submit(rng.choice(resumable())))
                await let_all_go_on(provider, rng.randint(1, 10))
                kill(provider)
                kills += 1
        for reply in replies:
            outcome = await reply.wait()
            assert isinstance(outcome, Finished)
            assert reply.text == texts[reply.request.encoded]
            assert outcome.usage.completion == len(await reply.read(0))
        assert balanced(provider._actor)
        counters = provider.diagnostics().counters
        times = [reply.outcome.resumed for reply in replies if reply.outcome is not None]
        assert counters.crashes == kills
        assert counters.requeued >= sum(times)
        assert counters.resumed == sum(time > 0 for time in times)
    return Resumes(len(replies), kills, sum(times), max(times))


async def let_all_go_on(provider: LocalProvider, words: int) -> None:
    """Wait until every running request has said so many words more, or has ended.

    One that never gets on would be taken for what kills its models.
    """
    for reply in provider._actor.running:
        await reply.read(reply.tokens + words - 1)


@pytest.mark.slow
async def test_some_broken_answers_are_what_they_would_have_been(kind: Kind, fast: Parrot) -> None:
    await kill_and_resume(kind, fast, 8, 1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_1000_broken_answers_are_what_they_would_have_been(
    kind: Kind, fast: Parrot, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.perf_counter()
    resumes = await kill_and_resume(kind, fast, 1000, 2)
    with capsys.disabled():
        seconds = time.perf_counter() - began
        sys.stdout.write(f"\n{type(kind).__name__}, {seconds:.0f} s: {resumes}\n")
