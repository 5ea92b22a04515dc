"""Where native calls run, and how their results, and what they say meanwhile, come back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import trio

from llamatrio.session.dispatch import Dispatcher, HandOver, HostThread, OwnerThread, Roaming


@pytest.fixture(params=[OwnerThread, Roaming])
def dispatcher(request: pytest.FixtureRequest) -> Iterator[Dispatcher]:
    opened: Dispatcher = request.param()
    opened.open()
    yield opened
    opened.close()


async def test_a_call_gives_its_result(dispatcher: Dispatcher) -> None:
    assert await dispatcher.call(lambda: 6 * 7) == 42


async def test_a_call_raises_what_it_raised(dispatcher: Dispatcher) -> None:
    error = KeyError("here")

    def fail() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        await dispatcher.call(fail)
    assert caught.value is error


async def test_no_call_runs_on_the_thread_of_trio(dispatcher: Dispatcher) -> None:
    assert await dispatcher.call(threading.get_ident) != threading.get_ident()


async def test_the_loop_goes_on_while_a_call_does(dispatcher: Dispatcher) -> None:
    proceed = threading.Event()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dispatcher.call, proceed.wait)
        await trio.lowlevel.checkpoint()
        proceed.set()


async def test_a_cancelled_call_is_interrupted_and_waited_for(dispatcher: Dispatcher) -> None:
    entered, proceed, left = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        assert proceed.wait(30)
        left.set()

    with trio.fail_after(30), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dispatcher.call, work, proceed.set)
            await trio.to_thread.run_sync(entered.wait)
            scope.cancel()
    assert left.is_set()


async def test_a_call_that_is_cancelled_before_it_begins_does_not_run(
    dispatcher: Dispatcher,
) -> None:
    ran: list[int] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await dispatcher.call(lambda: ran.append(1))
    assert ran == []


async def test_an_owner_thread_is_one_thread_with_a_name() -> None:
    owner = OwnerThread("the-owner")
    owner.open()
    try:
        threads = {await owner.call(threading.current_thread) for _ in range(50)}
    finally:
        owner.close()
    [thread] = threads
    assert thread.name == "the-owner"
    assert not thread.is_alive()


async def test_roaming_never_uses_a_thread_twice_in_a_row() -> None:
    roaming = Roaming()
    roaming.open()
    idents = [await roaming.call(threading.get_ident) for _ in range(50)]
    roaming.close()
    assert all(one != other for one, other in pairwise(idents))


# -- the main thread ---------------------------------------------------------------------------


async def ask_twice(host: HostThread) -> tuple[threading.Thread, threading.Thread, object]:
    host.open()
    first, second = [await host.call(threading.current_thread) for _ in range(2)]
    return first, second, threading.current_thread()


def test_native_calls_run_on_the_main_thread_while_trio_runs_on_another() -> None:
    host = HostThread()
    first, second, trio_thread = host.run(ask_twice, host)
    assert first is second is threading.main_thread()
    assert trio_thread is not first


def test_what_the_program_raises_comes_out_bare() -> None:
    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise LookupError("here")

    with pytest.raises(LookupError, match="here"):
        HostThread().run(fail)


def test_ctrl_c_cancels_the_program_and_is_raised_when_it_has_ended() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)  # which goes to the main thread
            await trio.sleep_forever()
        finally:
            ended.append("in order")

    with pytest.raises(KeyboardInterrupt):
        HostThread().run(wait)
    assert ended == ["in order"]


def test_a_host_thread_that_nobody_serves_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"HostThread\.run"):
        HostThread().open()


def test_as_a_guest_the_calls_run_in_the_loop_of_the_host() -> None:
    from queue import SimpleQueue

    jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
    results: list[object] = []
    host = HostThread(jobs.put)

    async def main() -> None:
        results.extend(await ask_twice(host))

    trio.lowlevel.start_guest_run(
        main,
        run_sync_soon_threadsafe=jobs.put,
        done_callback=lambda outcome: jobs.put(lambda: results.append(outcome)),
        host_uses_signal_set_wakeup_fd=True,
    )
    while len(results) < 4:
        jobs.get(timeout=30)()
    assert results[:3] == [threading.main_thread()] * 3


# -- what native code says meanwhile -----------------------------------------------------------


async def test_what_is_handed_over_arrives_in_order_with_the_last_word() -> None:
    got: list[int] = []
    hand_over = HandOver(got.append, bound=10_000)

    def hand_over_all() -> None:
        for number in range(10_000):
            hand_over.put(number)

    await trio.to_thread.run_sync(hand_over_all)
    hand_over.flush()
    assert got == list(range(10_000))


async def test_a_slow_consumer_loses_the_middle_and_neither_blocks_nor_loses_the_end() -> None:
    got: list[int] = []
    hand_over = HandOver(got.append, bound=3)
    for number in range(1000):  # the consumer has no chance
        hand_over.put(number)
    hand_over.flush()
    await trio.lowlevel.checkpoint()
    assert got == [0, 1, 999]
    assert hand_over.merged == 997


async def test_one_wake_up_serves_all_that_waits() -> None:
    got: list[int] = []
    arrived = trio.Event()

    def take(number: int) -> None:
        got.append(number)
        if number == 99:
            arrived.set()

    hand_over = HandOver(take)
    for number in range(100):
        hand_over.put(number)
    with trio.fail_after(30):
        await arrived.wait()
    assert got == list(range(100))
