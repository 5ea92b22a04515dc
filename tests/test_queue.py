"""Requests that wait: who is next, and what that costs."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st

from llamatrio.errors import NotStarted
from llamatrio.lifecycle.queue import RequestQueue


def opened() -> RequestQueue[str]:
    queue: RequestQueue[str] = RequestQueue()
    queue.is_open = True
    return queue


def filled(*items: str) -> RequestQueue[str]:
    queue = opened()
    for number, item in enumerate(items):
        queue.push(number, item)
    return queue


def levelled(*priorities: int) -> RequestQueue[str]:
    """Items that are named after their number and priority."""
    queue = opened()
    for number, priority in enumerate(priorities):
        queue.push(number, f"{number} of {priority}", priority)
    return queue


# -- the door ----------------------------------------------------------------------------------


def test_a_new_queue_refuses_items_until_it_is_opened() -> None:
    queue: RequestQueue[str] = RequestQueue()
    with pytest.raises(NotStarted):
        queue.push(1, "a")
    assert len(queue) == 0
    queue.is_open = True
    queue.push(1, "a")
    assert len(queue) == 1


def test_a_closed_queue_refuses_new_items_and_keeps_those_it_has() -> None:
    queue = filled("a", "b")
    queue.close()
    with pytest.raises(NotStarted):
        queue.push(7, "late", 100)
    assert 7 not in queue
    assert queue.first == "a"
    assert queue.clear() == ["a", "b"]
    assert queue.clear() == []


def test_an_item_that_waits_can_be_looked_at_and_no_other() -> None:
    queue = levelled(0, 5)
    assert [queue.get(number) for number in range(3)] == ["0 of 0", "1 of 5", None]
    assert len(queue) == 2
    queue.remove(1)
    assert queue.get(1) is None


def test_a_queue_opened_again_still_has_what_waited() -> None:
    queue = filled("a")
    queue.close()
    queue.is_open = True
    queue.push(7, "b")
    assert list(queue) == ["a", "b"]


def test_what_is_put_back_does_not_need_the_door() -> None:
    queue = filled("a", "b")
    assert queue.remove(0) == "a"
    queue.close()
    queue.put_back(0, "a")
    assert list(queue) == ["a", "b"]
    assert not queue.is_open


# -- the order ---------------------------------------------------------------------------------


def test_equals_stand_in_the_order_in_which_they_came() -> None:
    queue = filled("a", "b", "c")
    assert list(queue) == ["a", "b", "c"]
    taken = []
    for number in range(3):
        taken.append(queue.first)
        assert queue.remove(number) == taken[-1]
    assert taken == ["a", "b", "c"]
    assert not queue


def test_the_higher_priority_comes_first_whenever_it_came() -> None:
    queue = levelled(0, 5, -3, 5, 0, 7)
    order = ["5 of 7", "1 of 5", "3 of 5", "0 of 0", "4 of 0", "2 of -3"]
    assert list(queue) == order
    assert queue.first == order[0]
    assert queue.clear() == order


def test_what_is_put_back_stands_where_it_stood_among_its_equals() -> None:
    queue = levelled(0, 5, 0, 5, 0, 1)
    whole = list(queue)
    for taken in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 5, 4], [4, 3], [0, 1, 2, 3, 4, 5]):
        items = [(number, queue.remove(number)) for number in taken]
        for number, item in items:
            assert item is not None
            queue.put_back(number, item, int(item.split()[-1]))
        assert list(queue) == whole


def test_what_is_put_back_comes_before_those_that_came_later() -> None:
    queue = filled("a", "b")
    assert queue.remove(0) == "a"
    queue.push(2, "c")
    queue.put_back(0, "a")
    assert list(queue) == ["a", "b", "c"]


def test_an_item_taken_out_of_its_turn_leaves_the_others_in_order() -> None:
    queue = filled("a", "b", "c")
    assert queue.remove(1) == "b"
    assert queue.remove(1) is None
    assert queue.clear() == ["a", "c"]


def test_a_priority_that_nobody_waits_with_any_more_is_forgotten() -> None:
    queue = levelled(0, 5)
    assert queue.remove(1) == "1 of 5"
    assert queue.first == "0 of 0"
    assert queue._order == [0]
    queue.push(7, "again of 5", 5)
    assert list(queue) == ["again of 5", "0 of 0"]
    for number in range(100, 200):
        queue.push(number, "x", number)
        queue.remove(number)
    assert queue._order == sorted(queue._levels) == [0, 5]
    queue.clear()
    assert queue._order == list(queue._levels) == []


def test_an_item_that_was_taken_cannot_be_taken_again() -> None:
    queue = filled("a", "b")
    assert queue.remove(0) == "a"
    assert queue.remove(0) is None
    assert queue.remove(12345) is None
    assert queue.clear() == ["b"]
    assert queue.remove(1) is None
    queue.put_back(1, "b")
    assert queue.remove(1) == "b"


def test_a_queue_knows_who_waits_there() -> None:
    queue = levelled(0, 5)
    assert (0 in queue, 1 in queue, 2 in queue, len(queue)) == (True, True, False, 2)
    queue.remove(0)
    assert (0 in queue, len(queue)) == (False, 1)
    queue.clear()
    assert (1 in queue, len(queue), list(queue)) == (False, 0, [])


def test_an_empty_queue_has_no_first() -> None:
    queue = opened()
    assert not queue
    with pytest.raises(StopIteration):
        _ = queue.first


steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(-2, 2)),
        st.tuples(st.sampled_from(["remove", "put back"]), st.integers(0, 30)),
        st.tuples(st.sampled_from(["take", "clear"]), st.just(0)),
    ),
    max_size=40,
)


@given(steps)
def test_whatever_is_done_the_order_is_that_of_a_sorted_list(steps: list[tuple[str, int]]) -> None:
    queue = opened()
    line: set[tuple[int, int]] = set()  # what the order goes by: -priority, number
    known: dict[int, int] = {}  # the priority of every number
    for turn, (what, argument) in enumerate(steps):
        match what:
            case "push":
                queue.push(turn, str(turn), argument)
                known[turn] = argument
                line.add((-argument, turn))
            case "put back" if argument in known and argument not in queue:
                queue.put_back(argument, str(argument), known[argument])
                line.add((-known[argument], argument))
            case "remove":
                waits = (-known.get(argument, 0), argument) in line
                assert queue.remove(argument) == (str(argument) if waits else None)
                line.discard((-known.get(argument, 0), argument))
            case "take" if line:
                first = min(line)
                assert queue.first == queue.remove(first[1]) == str(first[1])
                line.remove(first)
            case "clear":
                assert queue.clear() == [str(number) for _, number in sorted(line)]
                line.clear()
            case _:
                pass
        assert list(queue) == [str(number) for _, number in sorted(line)]
        assert len(queue) == len(line)
        assert {number for number in known if number in queue} == {number for _, number in line}


# -- the cost ----------------------------------------------------------------------------------


def cost_of_a_turn(waiting: int, levels: int) -> float:
    """The seconds of a turn, on average, while so many wait: until each has had its turn."""
    queue: RequestQueue[int] = RequestQueue()
    queue.is_open = True
    for number in range(waiting):
        queue.push(number, number, number % levels)
    began = time.perf_counter()
    for number in range(waiting, 2 * waiting):
        queue.remove(queue.first)
        queue.push(number, number, number % levels)
        queue.put_back(-1, -1, levels - 1)
        queue.remove(-1)
        if (other := queue.remove(number - waiting // 2)) is not None:
            queue.push(other, other, number % levels)
    assert len(queue) == waiting
    return (time.perf_counter() - began) / waiting


@pytest.mark.parametrize("levels", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_a_turn_costs_the_same_however_many_wait(levels: int) -> None:
    few = min(cost_of_a_turn(100, levels) for _ in range(20))
    many = min(cost_of_a_turn(100_000, levels) for _ in range(2))
    # About 3, as a larger memory is a slower one. With a plain dict more than 30: its front costs
    # the more, the more was taken from it.
    assert many < 12 * few
