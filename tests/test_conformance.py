"""The conformance check: ours keep every rule, and whatever breaks one is refused by that rule."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import pytest
import trio
from broken import (
    ANSWER,
    BACKENDS,
    BAD,
    MODEL,
    PROVIDERS,
    QUICK,
    REFUSED,
    SLOW,
    AcceptsBeforeStart,
    Kept,
    KeptBackend,
)
from servers import KEY, running
from trio.testing import MockClock

from llamatrio import (
    AttachedBackend,
    LocalProvider,
    ModelConfig,
    Provider,
    ServerBackend,
    SpecificationError,
    attach_provider,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.testing import (
    BACKEND_RULES,
    PROVIDER_RULES,
    NotConforming,
    Report,
    ScriptedBackend,
    check_backend,
    check_provider,
    open_scripted_provider,
)
from llamatrio.testing.parrot import Parrot

FIVE = completion_request("Hello", max_tokens=5, temperature=0)
ON_AND_ON = completion_request("Hello", max_tokens=100_000, temperature=0)
NO_GRAMMAR = completion_request("Hello", grammar="this is no grammar")


def first_words(parrot: Parrot, count: int = 5) -> str:
    return " ".join(parrot.text.split(" ")[:count])


async def check_kept(kind: type[Kept]) -> Report:
    return await check_provider(
        kind.open, slow_request=SLOW, quick_request=QUICK, refused_request=REFUSED, answer=ANSWER
    )


async def check_kept_backend(kind: type[KeptBackend]) -> Report:
    return await check_backend(
        kind,
        MODEL,
        slow_request=SLOW,
        quick_request=QUICK,
        refused_request=REFUSED,
        answer=ANSWER,
        refused_config=BAD,
        crash=ScriptedBackend.crash,
    )


# -- ours --------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_provider_of_a_real_child_keeps_every_rule(kind: Kind, endless: Parrot) -> None:
    config = ModelConfig(endless.path, slots=2, threads=1)
    report = await check_provider(
        lambda: open_provider(config, backend=kind),
        slow_request=ON_AND_ON,
        quick_request=FIVE,
        refused_request=NO_GRAMMAR,
        answer=first_words(endless),
    )
    assert report == Report(PROVIDER_RULES, {})


async def test_a_provider_with_one_slot_keeps_every_rule(autojump_clock: MockClock) -> None:
    report = await check_provider(
        lambda: open_scripted_provider(KeptBackend(), config=ModelConfig(__file__)),
        slow_request=SLOW,
        quick_request=QUICK,
        refused_request=REFUSED,
        answer=ANSWER,
    )
    assert report == Report(PROVIDER_RULES, {})


async def test_a_provider_that_has_nothing_but_the_contract_can_be_checked(
    autojump_clock: MockClock,
) -> None:
    assert await check_kept(Kept) == Report(PROVIDER_RULES, {})


@pytest.mark.slow
async def test_a_backend_of_a_real_child_keeps_every_rule(kind: Kind, endless: Parrot) -> None:
    report = await check_backend(
        lambda: ServerBackend(kind),
        ModelConfig(endless.path, slots=2, threads=1),
        slow_request=ON_AND_ON,
        quick_request=FIVE,
        refused_request=NO_GRAMMAR,
        answer=first_words(endless),
        refused_config=ModelConfig(endless.path, args=("--host", "0.0.0.0")),
    )
    assert report == Report(BACKEND_RULES, {})


@pytest.mark.slow
async def test_a_provider_of_an_attached_server_keeps_every_rule(
    kind: Kind, endless: Parrot
) -> None:
    async with running(kind, ModelConfig(endless.path, slots=2, threads=1)) as server:
        report = await check_provider(
            lambda: attach_provider(server.url, key=KEY, slots=2),
            slow_request=ON_AND_ON,
            quick_request=FIVE,
            refused_request=NO_GRAMMAR,
            answer=first_words(endless),
        )
    assert report == Report(PROVIDER_RULES, {})


async def test_a_backend_of_an_attached_server_keeps_every_rule_but_those_of_a_process(
    kind: Kind, endless: Parrot
) -> None:
    async with running(kind, ModelConfig(endless.path, slots=2, threads=1)) as server:
        report = await check_backend(
            lambda: AttachedBackend(server.url, key=KEY),
            ModelConfig(None, slots=2),
            slow_request=ON_AND_ON,
            quick_request=FIVE,
            refused_request=NO_GRAMMAR,
            answer=first_words(endless),
            reads_files=False,
        )
    assert set(report.skipped.values()) == {
        "give `refused_config`",
        "it reads no file",
        "give `crash`: there is no process to kill",
    }
    assert len(report.kept) == len(BACKEND_RULES) - len(report.skipped) == 15


async def test_the_scripted_backend_keeps_every_rule(autojump_clock: MockClock) -> None:
    assert await check_kept_backend(KeptBackend) == Report(BACKEND_RULES, {})


# -- broken ones -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PROVIDERS, ids=lambda kind: kind.__name__)
async def test_a_provider_that_breaks_a_rule_is_refused_by_it(
    kind: type[Kept], autojump_clock: MockClock
) -> None:
    with pytest.raises(NotConforming) as info:
        await check_kept(kind)
    assert info.value.rule == kind.breaks, info.value


def test_for_every_rule_of_a_provider_there_is_one_that_breaks_it() -> None:
    assert {kind.breaks for kind in PROVIDERS} == set(PROVIDER_RULES)


@pytest.mark.parametrize("kind", BACKENDS, ids=lambda kind: kind.__name__)
async def test_a_backend_that_breaks_a_rule_is_refused_by_it(
    kind: type[KeptBackend], autojump_clock: MockClock
) -> None:
    with pytest.raises(NotConforming) as info:
        await check_kept_backend(kind)
    assert info.value.rule == kind.breaks, info.value


def test_for_every_rule_of_a_backend_there_is_one_that_breaks_it() -> None:
    assert {kind.breaks for kind in BACKENDS} == set(BACKEND_RULES)


class SwallowsEverything(AcceptsBeforeStart):
    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncGenerator[Provider, None]:
        with suppress(Exception):
            async with super().open() as provider:
                yield provider


async def test_a_provider_that_swallows_what_the_check_raises_is_refused(
    autojump_clock: MockClock,
) -> None:
    with pytest.raises(NotConforming) as info:
        await check_kept(SwallowsEverything)
    assert info.value.rule == SwallowsEverything.breaks


# -- what a check says -------------------------------------------------------------------------


async def test_a_load_that_hangs_is_told_by_name_and_time(autojump_clock: MockClock) -> None:
    def open_hanging() -> AbstractAsyncContextManager[LocalProvider]:
        backend = ScriptedBackend()
        backend.hang_next_load()
        return open_scripted_provider(backend)

    with pytest.raises(NotConforming, match=r"once start has returned: start took more than 7 s"):
        await check_provider(open_hanging, slow_request=SLOW, quick_request=QUICK, bound=7)


async def test_an_error_of_what_is_checked_is_the_cause(autojump_clock: MockClock) -> None:
    error = SpecificationError("no such model")

    def fail() -> AbstractAsyncContextManager[LocalProvider]:
        raise error

    with pytest.raises(NotConforming, match="no such model") as info:
        await check_provider(fail, slow_request=SLOW, quick_request=QUICK)
    assert info.value.rule == PROVIDER_RULES[0]
    assert info.value.__cause__ is error


async def test_an_answer_that_is_not_the_expected_one_is_told(autojump_clock: MockClock) -> None:
    with pytest.raises(NotConforming, match=r"a finished answer is whole: .* 'one two three'"):
        await check_provider(Kept.open, slow_request=SLOW, quick_request=QUICK, answer="one")


async def test_what_cannot_be_checked_is_left_out_and_said(autojump_clock: MockClock) -> None:
    report = await check_backend(
        lambda: ScriptedBackend(ANSWER, token_time=100.0),
        ModelConfig("scripted.gguf"),
        slow_request=SLOW,
        quick_request=QUICK,
        reads_files=False,
        bound=300,
    )
    assert report.skipped == {
        "check raises SpecificationError for what cannot work": "give `refused_config`",
        "inspect raises SpecificationError for a missing model": "it reads no file",
        "a finished answer is whole": "give `answer`",
        "a missing model is never opened": "it reads no file",
        "a death is told by Ended, which names an error and is the last word": (
            "give `crash`: there is no process to kill"
        ),
        "a request that is cancelled leaves the others running": "give a `config` with two slots",
        "a refused request leaves the session as good as before": "give `refused_request`",
        "an answer that a death cuts off raises ChildError": (
            "give `crash`: there is no process to kill"
        ),
    }
    assert {*report.kept, *report.skipped} == set(BACKEND_RULES)


def test_a_report_can_be_read() -> None:
    report = Report(("stop is stop", "start is start"), {"a cut is a cut": "give `answer`"})
    assert str(report) == (
        "2 rules are kept, 1 could not be checked\n"
        "  kept: stop is stop\n"
        "  kept: start is start\n"
        "  not checked: a cut is a cut (give `answer`)"
    )


async def test_a_check_can_be_cancelled_at_any_time(autojump_clock: MockClock) -> None:
    for tenths in range(0, 150, 7):
        with trio.move_on_after(tenths / 10) as scope:
            await check_kept(Kept)
        assert scope.cancelled_caught
        with trio.move_on_after(tenths / 10) as scope:
            await check_kept_backend(KeptBackend)
        assert scope.cancelled_caught
