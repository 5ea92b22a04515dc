from __future__ import annotations

import itertools

import pytest
import trio
from hypothesis import given, settings, strategies as st
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from llamatrio.lifecycle.inbox import Inbox


async def test_items_are_taken_all_at_once_and_in_order() -> None:
    inbox: Inbox[str] = Inbox()
    for item in "abc":
        inbox.put(item)
    assert inbox.unread == 3
    assert await inbox.take() == ["a", "b", "c"]
    assert inbox.unread == 0


async def test_a_reader_waits_until_there_is_an_item(autojump_clock: MockClock) -> None:
    inbox: Inbox[str] = Inbox()

    async def write() -> None:
        await trio.sleep(5)
        inbox.put("late")

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            assert await inbox.take() == ["late"]
            assert trio.current_time() == pytest.approx(5)


async def test_unread_progress_is_replaced_by_newer_progress() -> None:
    inbox: Inbox[str] = Inbox()
    inbox.put("10%", progress=True)
    inbox.put("20%", progress=True)
    inbox.put("30%", progress=True)
    assert inbox.unread == 1
    assert await inbox.take() == ["30%"]


async def test_progress_that_was_read_is_not_replaced() -> None:
    inbox: Inbox[str] = Inbox()
    inbox.put("10%", progress=True)
    assert await inbox.take() == ["10%"]
    inbox.put("20%", progress=True)
    assert await inbox.take() == ["20%"]


async def test_progress_never_replaces_a_transition_nor_progress_before_one() -> None:
    inbox: Inbox[str] = Inbox()
    inbox.put("10%", progress=True)
    inbox.put("ready")
    inbox.put("5%", progress=True)
    inbox.put("6%", progress=True)
    assert await inbox.take() == ["10%", "ready", "6%"]


async def test_a_transition_does_not_replace_progress() -> None:
    inbox: Inbox[str] = Inbox()
    inbox.put("10%", progress=True)
    inbox.put("ready")
    assert await inbox.take() == ["10%", "ready"]


@settings(derandomize=True, database=None, deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(["progress", "transition", "take"]), max_size=60))
async def test_no_transition_is_ever_lost_and_the_last_progress_of_a_run_arrives(
    steps: list[str],
) -> None:
    inbox: Inbox[tuple[str, int]] = Inbox()
    put: list[tuple[str, int]] = []
    taken: list[tuple[str, int]] = []
    for number, step in enumerate(steps):
        if step != "take":
            put.append((step, number))
            inbox.put((step, number), progress=step == "progress")
        elif inbox.unread:
            taken += await inbox.take()
    inbox.close()
    taken += await inbox.take()
    assert taken == sorted(taken, key=lambda item: item[1])
    transitions = [item for item in put if item[0] == "transition"]
    assert [item for item in taken if item[0] == "transition"] == transitions
    runs = [list(run) for _, run in itertools.groupby(put, key=lambda item: item[0])]
    assert {run[-1] for run in runs} <= set(taken)


async def test_a_closed_inbox_gives_what_is_there_and_then_its_end() -> None:
    inbox: Inbox[str] = Inbox()
    inbox.put("last")
    inbox.close()
    inbox.put("lost")
    inbox.put("lost too", progress=True)
    assert await inbox.take() == ["last"]
    assert await inbox.take() == []
    assert await inbox.take() == []


async def test_progress_put_after_the_close_does_not_change_what_is_there() -> None:
    inbox: Inbox[str] = Inbox()
    inbox.put("10%", progress=True)
    inbox.close()
    inbox.put("20%", progress=True)
    assert await inbox.take() == ["10%"]


async def test_a_close_ends_the_wait_of_a_reader(autojump_clock: MockClock) -> None:
    inbox: Inbox[str] = Inbox()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                assert await inbox.take() == []

            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            inbox.close()


async def test_an_inbox_can_be_closed_twice() -> None:
    inbox: Inbox[str] = Inbox()
    inbox.close()
    inbox.close()
    assert await inbox.take() == []


async def test_a_cancelled_take_loses_nothing() -> None:
    inbox: Inbox[str] = Inbox()
    inbox.put("a")
    with trio.CancelScope() as scope:
        scope.cancel()
        await inbox.take()
    assert scope.cancelled_caught
    assert await inbox.take() == ["a"]


async def test_a_take_is_a_checkpoint() -> None:
    inbox: Inbox[str] = Inbox()
    inbox.put("a")
    with assert_checkpoints():
        await inbox.take()
    inbox.close()
    with assert_checkpoints():
        await inbox.take()
