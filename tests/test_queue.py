from __future__ import annotations

import time

import pytest

from llamatrio.errors import NotStarted
from llamatrio.lifecycle.queue import RequestQueue


def filled(*items: str) -> RequestQueue[str]:
    queue: RequestQueue[str] = RequestQueue()
    queue.is_open = True
    for number, item in enumerate(items):
        queue.push(number, item)
    return queue


def test_a_new_queue_refuses_items_until_it_is_opened() -> None:
    queue: RequestQueue[str] = RequestQueue()
    with pytest.raises(NotStarted):
        queue.push(1, "a")
    assert len(queue) == 0
    queue.is_open = True
    queue.push(1, "a")
    assert len(queue) == 1


def test_items_leave_in_the_order_in_which_they_came() -> None:
    queue = filled("a", "b", "c")
    assert [queue.pop(), queue.pop(), queue.pop()] == ["a", "b", "c"]
    assert not queue


def test_an_item_taken_out_of_its_turn_leaves_the_others_in_order() -> None:
    queue = filled("a", "b", "c")
    assert queue.remove(1) == "b"
    assert queue.remove(1) is None
    assert queue.clear() == ["a", "c"]


def test_an_item_that_was_popped_cannot_be_removed() -> None:
    queue = filled("a")
    queue.pop()
    assert queue.remove(0) is None


def test_a_closed_queue_refuses_new_items_and_keeps_those_it_has() -> None:
    queue = filled("a", "b")
    queue.close()
    with pytest.raises(NotStarted):
        queue.push(7, "late")
    assert queue.clear() == ["a", "b"]
    assert queue.clear() == []


def test_a_queue_opened_again_still_has_what_waited() -> None:
    queue = filled("a")
    queue.close()
    queue.is_open = True
    queue.push(7, "b")
    assert queue.pop() == "a"
    assert queue.pop() == "b"


def cost_of_a_pop(waiting: int) -> float:
    """The seconds of one pop, on average, while so many wait."""
    queue = filled(*["x"] * waiting)
    began = time.perf_counter()
    for number in range(waiting):
        queue.pop()
        queue.push(number, "y")
        queue.remove(number)
    return (time.perf_counter() - began) / waiting


def test_an_item_costs_the_same_however_many_wait() -> None:
    few = min(cost_of_a_pop(100) for _ in range(20))
    many = min(cost_of_a_pop(50_000) for _ in range(2))
    # About 1; with a plain dict about 30, whose front costs more the more was taken from it.
    assert many < 8 * few
