"""Accepted requests while they wait: who gives way to whom, how long, and how they are ended."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from llamatrio.errors import ChildDied, NotStarted, QueueFull
from llamatrio.lifecycle.desk import SLICE, Desk
from llamatrio.lifecycle.reply import Reply
from llamatrio.outcomes import By, Cancelled, Failed, Finished, Outcome, Phase
from llamatrio.requests import Admitted, Delta, Limits, Request, completion_request

DONE = Finished("stop")


def asking(
    queue: float | None = None,
    total: float | None = None,
    **options: Any,  # noqa: ANN401 - of any kind
) -> Request:
    return completion_request("x", limits=Limits(queue=queue, total=total), **options)


PLAIN = completion_request("x")


class Office:
    """Has a desk, and notes what it says."""

    def __init__(self) -> None:
        self.phase: Phase = "queued"
        self.cancelled: list[tuple[int, By]] = []  # those that ran
        self.told: list[tuple[int, Outcome]] = []
        self.all_settled = 0
        self.settled = trio.Event()
        self.desk = Desk(self._phase, self._cancel_running, self._on_settled, self._on_all_settled)
        self.desk.queue.is_open = True

    def _phase(self) -> Phase:
        return self.phase

    def _cancel_running(self, reply: Reply, by: By) -> None:
        self.cancelled.append((reply.id, by))

    def _on_settled(self, reply: Reply, outcome: Outcome) -> None:
        assert reply.outcome is outcome
        self.told.append((reply.id, outcome))

    def _on_all_settled(self) -> None:
        self.all_settled += 1
        self.settled.set()

    async def accept(self, request: Request = PLAIN, max_pending: int | None = None) -> Reply:
        """Take one in, in a step of its own."""
        await trio.lowlevel.checkpoint()
        return self.desk.accept(request, max_pending)

    def run(self, reply: Reply, *pieces: str) -> None:
        """Let one that waits begin."""
        self.desk.take(reply)
        reply.begin()
        reply.emit(Admitted())
        for piece in pieces:
            reply.emit(Delta(piece))

    @property
    def waiting(self) -> list[int]:
        return [reply.id for reply in self.desk.waiting]


@pytest.fixture
def office() -> Office:
    return Office()


# -- taking in ---------------------------------------------------------------------------------


async def test_requests_are_numbered_and_found_until_they_have_an_outcome(
    office: Office, autojump_clock: MockClock
) -> None:
    first = await office.accept()
    await trio.sleep(5)
    second = await office.accept()
    desk = office.desk
    assert (first.id, second.id, desk.accepted, len(desk)) == (1, 2, 2, 2)
    assert second.submitted_at - first.submitted_at == 5
    assert desk.find(1) is first
    assert list(desk.live) == [first, second]
    office.run(first)
    assert list(desk.live) == [first, second]
    desk.settle(first, DONE)
    assert desk.find(1) is None
    assert desk.find(3) is None
    assert list(desk.live) == [second]
    assert (desk.accepted, len(desk)) == (2, 1)
    assert office.told == [(1, DONE)]


async def test_a_closed_desk_takes_nothing_in(office: Office) -> None:
    office.desk.queue.close()
    with pytest.raises(NotStarted):
        await office.accept(asking(total=3, supersede="key"))
    assert (office.desk.accepted, len(office.desk)) == (0, 0)
    office.desk.queue.is_open = True
    assert (await office.accept(asking(supersede="key"))).id == 1
    assert office.told == []


async def test_the_highest_priority_is_first_and_the_oldest_of_equals(office: Office) -> None:
    for priority in (0, 3, 0, 3, -1):
        await office.accept(asking(priority=priority))
    assert office.waiting == [2, 4, 1, 3, 5]
    assert office.desk.waiting.first.id == 2
    assert len(office.desk.waiting) == 5


async def test_only_what_waits_is_among_those_that_wait(office: Office) -> None:
    reply, other = await office.accept(), await office.accept()
    assert reply in office.desk.waiting
    office.run(reply)
    assert reply not in office.desk.waiting
    assert other in office.desk.waiting


# -- a full queue ------------------------------------------------------------------------------


async def test_a_full_queue_takes_nothing_in_and_says_how_long_it_is(office: Office) -> None:
    for _ in range(3):
        await office.accept(max_pending=3)
    with pytest.raises(QueueFull) as caught:
        await office.accept(max_pending=3)
    assert (caught.value.length, caught.value.limit) == (3, 3)
    assert str(caught.value) == "3 requests are waiting, and no more than 3 may"
    assert (office.desk.accepted, office.waiting, office.told) == (3, [1, 2, 3], [])


async def test_a_queue_that_is_longer_than_a_new_limit_keeps_what_it_has(office: Office) -> None:
    for _ in range(5):
        await office.accept()
    with pytest.raises(QueueFull) as caught:
        await office.accept(max_pending=2)
    assert (caught.value.length, caught.value.limit) == (5, 2)
    assert office.waiting == [1, 2, 3, 4, 5]
    await office.accept(max_pending=6)


async def test_without_a_limit_any_number_may_wait(office: Office) -> None:
    for _ in range(5000):
        await office.accept(max_pending=None)
    assert len(office.desk.waiting) == 5000


async def test_what_runs_does_not_count(office: Office) -> None:
    replies = [await office.accept(max_pending=2) for _ in range(2)]
    office.run(replies[0])
    await office.accept(max_pending=2)
    with pytest.raises(QueueFull):
        await office.accept(max_pending=2)


async def test_those_for_whom_there_are_slots_do_not_count(office: Office) -> None:
    for _ in range(5):
        await trio.lowlevel.checkpoint()
        office.desk.accept(PLAIN, 2, free=3)
    with pytest.raises(QueueFull) as caught:
        office.desk.accept(PLAIN, 2, free=3)
    assert (caught.value.length, caught.value.limit) == (2, 2)


async def test_what_was_put_back_counts(office: Office) -> None:
    office.run(reply := await office.accept(max_pending=1))
    await office.accept(max_pending=1)
    office.desk.put_back(reply)
    with pytest.raises(QueueFull) as caught:
        await office.accept(max_pending=2)
    assert caught.value.length == 2


async def test_a_request_whose_place_is_taken_by_a_newer_one_leaves_room_for_it(
    office: Office,
) -> None:
    await office.accept(max_pending=2)
    await office.accept(asking(supersede="key"), 2)
    for number in (3, 4, 5):
        assert (await office.accept(asking(supersede="key"), 2)).id == number
    assert office.waiting == [1, 5]


async def test_a_full_queue_leaves_the_older_one_that_runs_alone(office: Office) -> None:
    office.run(older := await office.accept(asking(supersede="key"), 1))
    await office.accept(max_pending=1)
    with pytest.raises(QueueFull):
        await office.accept(asking(supersede="key"), 1)
    assert office.cancelled == []
    assert older.outcome is None


# -- the newest wins ---------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queued", "loading"])
async def test_a_newer_request_ends_the_older_one_that_waits(office: Office, phase: Phase) -> None:
    office.phase = phase
    older, other, newer = [
        await office.accept(asking(supersede=key)) for key in ("key", "other", "key")
    ]
    assert older.outcome == Cancelled("superseded", phase, 0)
    assert (other.outcome, newer.outcome) == (None, None)
    assert office.waiting == [other.id, newer.id]


async def test_a_newer_request_waits_behind_its_equals_and_not_in_the_older_ones_place(
    office: Office,
) -> None:
    for key in ("key", None, None, "key"):
        await office.accept(asking(supersede=key))
    assert office.waiting == [2, 3, 4]


async def test_a_newer_request_gives_up_the_older_one_that_runs(office: Office) -> None:
    older = await office.accept(asking(supersede="key"))
    office.run(older, "a")
    newer = await office.accept(asking(supersede="key"))
    assert office.cancelled == [(older.id, "superseded")]
    assert older.outcome is None
    office.desk.settle(older, Cancelled("superseded", "generating", 1))
    last = await office.accept(asking(supersede="key"))
    assert newer.outcome == Cancelled("superseded", "queued", 0)
    assert office.waiting == [last.id]


async def test_a_newer_request_ends_one_that_was_put_back(office: Office) -> None:
    older = await office.accept(asking(supersede="key", on_crash="resume"))
    office.run(older, "a", "b")
    office.desk.put_back(older)
    await office.accept(asking(supersede="key"))
    assert older.outcome == Cancelled("superseded", "queued", 2)
    assert office.cancelled == []


@pytest.mark.parametrize("outcome", [DONE, Failed(ChildDied("killed"), "generating", 1)])
async def test_a_request_that_has_its_outcome_gives_way_to_nobody(
    office: Office, outcome: Outcome
) -> None:
    office.run(older := await office.accept(asking(supersede="key")))
    office.desk.settle(older, outcome)
    await office.accept(asking(supersede="key"))
    assert office.cancelled == []
    assert older.outcome is outcome


async def test_of_many_with_one_key_the_newest_alone_is_left(office: Office) -> None:
    replies = [await office.accept(asking(supersede=("editor", 1))) for _ in range(100)]
    assert office.waiting == [100]
    outcomes = Counter(reply.outcome for reply in replies)
    assert outcomes == {Cancelled("superseded", "queued", 0): 99, None: 1}
    assert [number for number, _ in office.told] == list(range(1, 100))


async def test_requests_without_a_key_leave_one_another_alone(office: Office) -> None:
    for _ in range(3):
        await office.accept()
    assert office.waiting == [1, 2, 3]


async def test_whoever_is_told_may_submit_another_with_the_same_key() -> None:
    class Stubborn(Office):
        def _on_settled(self, reply: Reply, outcome: Outcome) -> None:
            super()._on_settled(reply, outcome)
            if reply.id == 1:
                self.desk.accept(asking(supersede="key"), None)

    office = Stubborn()
    await office.accept(asking(supersede="key"))
    second = await office.accept(asking(supersede="key"))
    assert second.outcome == Cancelled("superseded", "queued", 0)
    assert office.waiting == [3]
    await office.accept(asking(supersede="key"))
    assert office.waiting == [4]
    assert [number for number, _ in office.told] == [1, 2, 3]


async def test_a_key_is_kept_no_longer_than_its_request(office: Office) -> None:
    for number in range(100):
        reply = await office.accept(asking(supersede=number))
        if number % 2:
            office.run(reply)
            office.desk.settle(reply, DONE)
        else:
            reply.cancel()
    assert office.desk._newest == {}


# -- giving up ---------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queued", "loading"])
async def test_a_cancel_ends_what_waits_at_once(office: Office, phase: Phase) -> None:
    first, second, third = [await office.accept() for _ in range(3)]
    office.phase = phase
    second.cancel()
    assert second.outcome == Cancelled("caller", phase, 0)
    second.cancel()
    office.phase = "queued"
    assert second.phase == phase
    assert (first.outcome, third.outcome, office.waiting) == (None, None, [1, 3])
    assert office.told == [(2, second.outcome)]


async def test_a_cancel_of_what_runs_is_handed_on(office: Office) -> None:
    office.run(reply := await office.accept())
    reply.cancel()
    assert office.cancelled == [(reply.id, "caller")]
    assert reply.outcome is None
    assert office.desk.live == (reply,)


async def test_a_cancel_of_what_was_put_back_says_what_had_been_made(office: Office) -> None:
    office.run(reply := await office.accept(asking(on_crash="resume")), "a", "b")
    office.desk.put_back(reply)
    reply.cancel()
    assert reply.outcome == Cancelled("caller", "queued", 2)
    assert reply.text == "ab"


async def test_what_is_put_back_stands_before_its_equals_and_behind_what_is_higher(
    office: Office,
) -> None:
    replies = [await office.accept(asking(priority=priority)) for priority in (0, 0, 5, 0)]
    office.run(replies[0])
    office.run(replies[1])
    office.desk.put_back(replies[1])
    office.desk.put_back(replies[0])
    assert office.waiting == [3, 1, 2, 4]
    assert office.desk.live == tuple(replies)


async def test_what_is_put_back_waits_behind_a_closed_door_too(office: Office) -> None:
    office.run(reply := await office.accept())
    office.desk.queue.close()
    office.desk.put_back(reply)
    assert office.waiting == [1]


# -- all at once -------------------------------------------------------------------------------


async def test_a_few_are_ended_within_the_call_in_the_order_of_the_queue(
    office: Office, nursery: trio.Nursery
) -> None:
    for priority in (0, 2, 1):
        await office.accept(asking(priority=priority))
    office.run(running := await office.accept())
    office.desk.drop("stop", "queued", nursery)
    assert office.told == [(number, Cancelled("stop", "queued", 0)) for number in (2, 3, 1)]
    assert not office.desk.settling
    assert office.desk.live == (running,)
    assert office.all_settled == 0


async def test_those_that_had_begun_say_what_had_been_made(
    office: Office, nursery: trio.Nursery
) -> None:
    error = ChildDied("killed")
    replies = [await office.accept(asking(on_crash="resume")) for _ in range(4)]
    for reply, pieces in zip(replies, ("a", "bc", "", "d"), strict=True):
        office.run(reply, *pieces)
        office.desk.put_back(reply)
    office.desk.drop(error, "loading", nursery)
    tokens = [reply.outcome for reply in replies]
    assert tokens == [Failed(error, "loading", number) for number in (1, 2, 0, 1)]


class Ticks:
    """Counts how often other tasks get their turn."""

    def __init__(self) -> None:
        self.number = 0

    async def run(self) -> None:
        while True:
            await trio.lowlevel.checkpoint()
            self.number += 1


class WithTicks(Office):
    """Notes at which tick each outcome was told."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks = Ticks()
        self.told_at: list[int] = []

    def _on_settled(self, reply: Reply, outcome: Outcome) -> None:
        super()._on_settled(reply, outcome)
        self.told_at.append(self.ticks.number)


@pytest.mark.parametrize("ended_by", ["stop", ChildDied("killed")])
async def test_very_many_are_ended_in_slices_between_which_others_have_their_turn(
    nursery: trio.Nursery, ended_by: By | Exception
) -> None:
    office = WithTicks()
    replies = [await office.accept() for _ in range(10 * SLICE + 1)]
    nursery.start_soon(office.ticks.run)
    office.desk.drop(ended_by, "loading", nursery)
    assert office.told == []
    assert office.desk.settling
    assert (len(office.desk.waiting), len(office.desk)) == (0, len(replies))
    await office.settled.wait()
    assert not office.desk.settling
    assert office.told == [(reply.id, reply.outcome) for reply in replies]
    counts = Counter(office.told_at)
    assert max(counts.values()) <= 2 * SLICE  # two turns may follow one another in one round
    assert len(counts) > 5
    kind = Cancelled if ended_by == "stop" else Failed
    assert {type(reply.outcome) for reply in replies} == {kind}
    assert (office.all_settled, len(office.desk)) == (1, 0)
    nursery.cancel_scope.cancel()


async def test_as_many_as_fit_into_one_slice_are_ended_within_the_call(
    office: Office, nursery: trio.Nursery
) -> None:
    for _ in range(SLICE):
        await office.accept()
    office.desk.drop("stop", "queued", nursery)
    assert (len(office.told), office.desk.settling) == (SLICE, False)


async def test_what_is_being_ended_cannot_be_cancelled_and_leaves_others_alone(
    office: Office, nursery: trio.Nursery
) -> None:
    replies = [await office.accept(asking(supersede=number)) for number in range(3 * SLICE)]
    office.desk.drop("stop", "queued", nursery)
    replies[-1].cancel()
    newer = await office.accept(asking(supersede=3 * SLICE - 2))
    assert replies[-1].outcome is replies[-2].outcome is None
    assert office.desk.find(replies[-1].id) is replies[-1]
    await office.settled.wait()
    assert {reply.outcome for reply in replies} == {Cancelled("stop", "queued", 0)}
    assert newer.outcome is None
    assert office.waiting == [newer.id]
    await office.accept(asking(supersede=3 * SLICE - 2))
    assert newer.outcome == Cancelled("superseded", "queued", 0)


async def test_of_two_times_very_many_the_last_is_told_once(
    office: Office, nursery: trio.Nursery
) -> None:
    first = [await office.accept() for _ in range(2 * SLICE)]
    office.desk.drop("stop", "queued", nursery)
    second = [office.desk.accept(PLAIN, None) for _ in range(5 * SLICE)]
    office.desk.drop("shutdown", "queued", nursery)
    await office.settled.wait()
    assert (office.all_settled, office.desk.settling) == (1, False)
    assert {reply.outcome for reply in first} == {Cancelled("stop", "queued", 0)}
    assert {reply.outcome for reply in second} == {Cancelled("shutdown", "queued", 0)}
    assert len(office.told) == 7 * SLICE


async def test_a_cancel_of_the_nursery_does_not_keep_an_outcome_from_anybody(
    office: Office,
) -> None:
    replies = [await office.accept() for _ in range(5 * SLICE)]
    async with trio.open_nursery() as nursery:
        office.desk.drop("stop", "queued", nursery)
        nursery.cancel_scope.cancel()
    assert {reply.outcome for reply in replies} == {Cancelled("stop", "queued", 0)}
    assert office.all_settled == 1


# -- limits of those that wait -----------------------------------------------------------------


@attrs.frozen
class Ends:
    """When requests got their outcomes, on Trio's clock."""

    office: Office
    began: float = attrs.field(factory=trio.current_time)
    times: dict[int, float] = attrs.field(factory=dict)

    async def follow(self, reply: Reply) -> None:
        await reply.wait()
        self.times[reply.id] = round(trio.current_time() - self.began, 6)


@pytest.fixture
async def watched(office: Office, nursery: trio.Nursery) -> Office:
    """A desk whose deadlines are watched."""
    nursery.start_soon(office.desk.watch_deadlines)
    return office


LIMITS: dict[str, tuple[dict[str, float], float, str]] = {
    "in the queue": ({"queue": 3}, 3, "queue"),
    "in all": ({"total": 3}, 3, "total"),
    "first in the queue": ({"queue": 3, "total": 5}, 3, "queue"),
    "first in all": ({"queue": 5, "total": 3}, 3, "total"),
    "both at once": ({"queue": 3, "total": 3}, 3, "queue"),
    "a moment": ({"queue": 0.001}, 0.001, "queue"),
    "a month": ({"total": 30 * 86400}, 30 * 86400, "total"),
}


@pytest.mark.parametrize(("limits", "seconds", "limit"), LIMITS.values(), ids=list(LIMITS))
@pytest.mark.parametrize("phase", ["queued", "loading"])
async def test_a_request_that_waits_too_long_is_given_up(
    watched: Office,
    autojump_clock: MockClock,
    limits: dict[str, float],
    seconds: float,
    limit: str,
    phase: Phase,
) -> None:
    watched.phase = phase
    ends = Ends(watched)
    reply, other = await watched.accept(asking(**limits)), await watched.accept()
    await ends.follow(reply)
    assert ends.times == {1: pytest.approx(seconds)}
    assert isinstance(reply.outcome, Cancelled)
    assert (reply.outcome.by, reply.outcome.limit) == ("deadline", limit)
    assert (reply.outcome.phase, reply.outcome.tokens) == (phase, 0)
    assert other.outcome is None
    assert watched.told == [(1, reply.outcome)]


async def test_each_is_given_up_at_its_own_time_whatever_the_order_in_which_they_came(
    watched: Office, autojump_clock: MockClock
) -> None:
    ends = Ends(watched)
    seconds = [7, 3, 9, 3, 1, 8, 2, 1000, 5]
    async with trio.open_nursery() as nursery:
        for number in seconds:
            nursery.start_soon(ends.follow, await watched.accept(asking(queue=number)))
    assert ends.times == dict(enumerate(seconds, 1))


async def test_one_that_comes_later_and_has_less_time_is_not_kept_waiting(
    watched: Office, autojump_clock: MockClock
) -> None:
    ends = Ends(watched)
    await watched.accept(asking(queue=1000))
    await trio.sleep(10)
    await ends.follow(await watched.accept(asking(queue=5)))
    assert ends.times == {2: 15}


async def test_many_of_one_deadline_are_given_up_together(
    watched: Office, autojump_clock: MockClock
) -> None:
    replies = [await watched.accept(asking(queue=5)) for _ in range(100)]
    await replies[0].wait()
    outcomes = {reply.outcome for reply in replies}
    assert outcomes == {Cancelled("deadline", "queued", 0, limit="queue")}
    assert [number for number, _ in watched.told] == list(range(1, 101))


async def test_limits_that_say_nothing_of_waiting_are_not_watched(
    watched: Office, autojump_clock: MockClock
) -> None:
    limits = Limits(first_token=1, silence=1)
    reply = await watched.accept(completion_request("x", limits=limits))
    endless = await watched.accept(asking(queue=math.inf, total=math.inf))
    await trio.sleep(80_000)
    assert (reply.outcome, endless.outcome) == (None, None)


async def test_what_has_a_slot_is_given_up_by_others(
    watched: Office, autojump_clock: MockClock
) -> None:
    watched.run(reply := await watched.accept(asking(queue=3, total=5)))
    await trio.sleep(100)
    assert (reply.outcome, watched.cancelled) == (None, [])


async def test_what_was_put_back_has_no_longer_than_its_total_from_the_beginning(
    watched: Office, autojump_clock: MockClock
) -> None:
    ends = Ends(watched)
    reply = await watched.accept(asking(queue=3, total=10, on_crash="resume"))
    await trio.sleep(2)
    watched.run(reply, "a")
    await trio.sleep(2)
    watched.desk.put_back(reply)
    await ends.follow(reply)
    assert ends.times == {1: 10}
    assert reply.outcome == Cancelled("deadline", "queued", 1, limit="total")


@pytest.mark.parametrize("ran", [0.5, 2.0])
async def test_the_queue_is_no_limit_of_what_was_put_back(
    watched: Office, autojump_clock: MockClock, ran: float
) -> None:
    reply = await watched.accept(asking(queue=1, on_crash="resume"))
    watched.run(reply, "a")
    await trio.sleep(ran)
    watched.desk.put_back(reply)
    await trio.sleep(1000)
    assert reply.outcome is None


async def test_what_is_put_back_when_its_time_is_up_is_given_up_at_once(
    watched: Office, autojump_clock: MockClock
) -> None:
    ends = Ends(watched)
    reply = await watched.accept(asking(total=5))
    watched.run(reply)
    await trio.sleep(7)
    watched.desk.put_back(reply)
    await ends.follow(reply)
    assert ends.times == {1: 7}
    assert reply.outcome == Cancelled("deadline", "queued", 0, limit="total")


async def test_what_was_ended_otherwise_is_not_given_up_again(
    watched: Office, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    first, second = [await watched.accept(asking(queue=3)) for _ in range(2)]
    first.cancel()
    watched.desk.drop("stop", "queued", nursery)
    assert watched.desk._deadlines == []
    await trio.sleep(100)
    assert first.outcome == Cancelled("caller", "queued", 0)
    assert second.outcome == Cancelled("stop", "queued", 0)
    assert len(watched.told) == 2


async def test_deadlines_hold_after_all_were_ended(
    watched: Office, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    await watched.accept(asking(queue=3))
    watched.desk.drop("stop", "queued", nursery)
    ends = Ends(watched)
    await ends.follow(await watched.accept(asking(queue=5)))
    assert ends.times == {2: 5}


async def test_deadlines_that_were_given_before_anybody_watched_them_hold(
    office: Office, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    ends = Ends(office)
    reply = await office.accept(asking(queue=5))
    await trio.sleep(2)
    nursery.start_soon(office.desk.watch_deadlines)
    await ends.follow(reply)
    assert ends.times == {1: 5}


async def test_a_deadline_takes_the_place_in_which_a_newer_request_would_have_waited(
    watched: Office, autojump_clock: MockClock
) -> None:
    """The key is free again, and the newer one has its own time."""
    ends = Ends(watched)
    first = await watched.accept(asking(queue=3, supersede="key"))
    await trio.sleep(2)
    second = await watched.accept(asking(queue=3, supersede="key"))
    assert first.outcome == Cancelled("superseded", "queued", 0)
    await ends.follow(second)
    assert ends.times == {2: 5}
    assert watched.desk._newest == {}


async def test_deadlines_of_what_waits_no_more_are_forgotten_now_and_then(
    watched: Office, autojump_clock: MockClock
) -> None:
    rng = random.Random(1)
    ends = Ends(watched)
    expected: dict[int, float] = {}
    most = 0
    async with trio.open_nursery() as nursery:
        for number in range(10 * SLICE):
            seconds = rng.randint(1, 10_000)
            reply = await watched.accept(asking(queue=seconds))
            if number % 500 == 0:
                expected[reply.id] = seconds
                nursery.start_soon(ends.follow, reply)
            else:
                reply.cancel()
            most = max(most, len(watched.desk._deadlines))
        assert most <= 2 * (len(expected) + 1) + SLICE + 1
    assert ends.times == expected


async def test_what_is_left_of_the_deadlines_is_in_order(
    watched: Office, autojump_clock: MockClock
) -> None:
    """Those that are kept stand in a heap as 100 and 3, whose order the others saw to."""
    ends = Ends(watched)
    async with trio.open_nursery() as nursery:
        for seconds in (1, 100, 2, 101, 102, 3, *range(1000, 1000 + 2 * SLICE)):
            reply = await watched.accept(asking(queue=seconds))
            if seconds in (3, 100):
                nursery.start_soon(ends.follow, reply)
            else:
                reply.cancel()
    assert ends.times == {2: 100, 6: 3}


async def test_a_desk_whose_deadlines_nobody_watches_any_more_can_be_left(
    office: Office, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(office.desk.watch_deadlines)
        await office.accept(asking(queue=5))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    reply = await office.accept(asking(queue=5))
    await trio.sleep(100)
    assert reply.outcome is None
