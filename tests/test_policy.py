"""When a model that died is loaded again, how long that waits, and when it is given up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from llamatrio import (
    NO_RESTARTS,
    PERSISTENT,
    ChildDied,
    ChildError,
    ChildSilent,
    ClosedError,
    Exit,
    Life,
    LlamatrioError,
    LoadFailed,
    LoadStalled,
    ModelChanged,
    ModelFileError,
    NoHandshake,
    Policy,
    SpawnError,
    SpecificationError,
    StateFlood,
    StreamBroken,
    WakeFailed,
)
from llamatrio.lifecycle.policy import REMEMBERED

KILLED = Exit(1, -9, "SIGKILL", ready=True)
REFUSED = Exit(1, 1)
APART = 10_000.0
"""Seconds between two deaths that do not fall into one window."""


def died(**changes: Any) -> Life:  # noqa: ANN401 - of any field
    """A life of a loaded model that was killed before it had finished anything."""
    life = Life(ChildDied("killed", KILLED), KILLED, opened=True, seconds=1.0)
    return attrs.evolve(life, **changes)


def far_apart(*lives: Life) -> list[Life]:
    """These lives, each of which ended long after the one before."""
    return [attrs.evolve(life, ended_at=number * APART) for number, life in enumerate(lives, 1)]


def delays(policy: Policy, life: Life, count: int, chance: float = 0.0) -> list[float | None]:
    """The answers to so many equal deaths in a row, far apart."""
    lives = far_apart(*[life] * count)
    return [policy.decide(lives[:number], chance) for number in range(1, count + 1)]


PATIENT = Policy(fruitless=math.inf)


# -- how long it waits -------------------------------------------------------------------------


@given(chance=st.floats(0, 1))
def test_the_first_retry_waits_at_most_a_tenth_of_a_second(chance: float) -> None:
    for life in (died(), died(finished=7), died(opened=False, seconds=0.0)):
        delay = Policy().decide([life], chance)
        assert delay is not None
        assert 0.05 <= delay <= 0.1


def test_from_the_second_fruitless_life_on_the_delay_is_doubled_from_one_second_to_the_cap() -> (
    None
):
    assert delays(PATIENT, died(), 10) == [0.1, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_the_cap_is_that_of_the_policy() -> None:
    policy = Policy(fruitless=math.inf, backoff=0.3, longest_backoff=5)
    assert delays(policy, died(), 6) == [0.3, 1, 2, 4, 5, 5]
    policy = Policy(fruitless=math.inf, longest_backoff=0.5)
    assert delays(policy, died(), 3) == [0.1, 0.5, 0.5]


def test_chance_takes_up_to_half_of_a_delay_off() -> None:
    full = delays(PATIENT, died(), 10)
    for chance, share in ((0.0, 1.0), (0.5, 0.75), (1.0, 0.5)):
        shortened = delays(PATIENT, died(), 10, chance)
        assert shortened == [pytest.approx(delay * share) for delay in full if delay is not None]


@given(chance=st.floats(0, 1), row=st.integers(1, REMEMBERED))
def test_a_delay_is_never_longer_than_it_says_nor_shorter_than_half(
    chance: float, row: int
) -> None:
    lives = far_apart(*[died()] * row)
    full, shortened = PATIENT.decide(lives), PATIENT.decide(lives, chance)
    assert full is not None
    assert shortened is not None
    assert full / 2 <= shortened <= full <= PATIENT.longest_backoff


def test_without_a_backoff_the_first_retry_is_at_once() -> None:
    assert Policy(backoff=0).decide([died()], 0.5) == 0


# -- fruitless lives ---------------------------------------------------------------------------


@pytest.mark.parametrize("fruitless", [1, 2, 3, 7])
def test_a_model_is_given_up_after_so_many_fruitless_lives(fruitless: int) -> None:
    answers = delays(Policy(fruitless=fruitless), died(), fruitless)
    assert None not in answers[:-1]
    assert answers[-1] is None


def test_three_fruitless_lives_are_the_end_unless_told_otherwise() -> None:
    assert delays(Policy(), died(), 3) == [0.1, 1, None]


FRUITFUL = {
    "a request was finished": died(finished=1),
    "it lived for ten minutes": died(seconds=600.0),
    "both": died(finished=3, seconds=5000.0),
}


@pytest.mark.parametrize("fruitful", FRUITFUL.values(), ids=FRUITFUL)
def test_a_fruitful_life_begins_the_count_anew(fruitful: Life) -> None:
    lives = far_apart(died(), died(), fruitful, died(), died(), died())
    answers = [Policy().decide(lives[:number]) for number in range(1, 7)]
    assert answers == [0.1, 1, 0.1, 0.1, 1, None]


def test_a_life_just_short_of_healthy_is_fruitless() -> None:
    assert delays(Policy(), died(seconds=599.9), 3)[-1] is None
    assert delays(Policy(healthy=599.9), died(seconds=599.9), 3)[-1] == 0.1


def test_fruitful_lives_far_apart_are_followed_by_another_for_ever() -> None:
    assert delays(Policy(), died(finished=1), REMEMBERED) == [0.1] * REMEMBERED


def test_a_life_that_was_never_opened_is_fruitless_however_long_it_took() -> None:
    stalled = Life(LoadStalled("silence"), opened=False)
    assert delays(Policy(), stalled, 3) == [0.1, 1, None]


# -- deaths within the window ------------------------------------------------------------------


def at(*moments: float, life: Life = FRUITFUL["a request was finished"]) -> list[Life]:
    return [attrs.evolve(life, ended_at=moment) for moment in moments]


def test_one_death_more_than_may_fall_into_the_window_is_the_end_whatever_was_finished() -> None:
    assert Policy().decide(at(0, 10, 20, 30, 40)) == 0.1
    assert Policy().decide(at(0, 10, 20, 30, 40, 50)) is None


@pytest.mark.parametrize(
    ("moments", "restarts"),
    [
        ((0, 1, 2, 3, 4, 59.9), False),
        ((0, 1, 2, 3, 4, 60), True),  # the first is out of the window just then
        ((0, 1, 2, 3, 4, 1000), True),
        ((0, 1000, 1001, 1002, 1003, 1004), True),
        ((0, 1000, 1001, 1002, 1003, 1004, 1005), False),
        ((0, 12, 24, 36, 48, 60, 72, 84), True),
        ((0, 11, 22, 33, 44, 55), False),
    ],
)
def test_only_deaths_within_the_window_before_the_last_count(
    moments: tuple[float, ...], restarts: bool
) -> None:
    assert (Policy().decide(at(*moments)) is not None) == restarts


def test_deaths_and_window_are_those_of_the_policy() -> None:
    policy = Policy(deaths=2, window=5)
    assert policy.decide(at(0, 4)) == 0.1
    assert policy.decide(at(0, 2, 4)) is None
    assert policy.decide(at(0, 2, 5)) == 0.1
    assert Policy(deaths=0).decide(at(0)) is None


# -- a wake that fails -------------------------------------------------------------------------

WAKE = WakeFailed("killed while it woke", KILLED)


def in_vain(**changes: Any) -> Life:  # noqa: ANN401 - of any field
    """A life that ended within its wake."""
    return attrs.evolve(died(error=WAKE), **changes)


AFTER_A_FAILED_WAKE: dict[str, tuple[Life, bool]] = {
    "its load fails": (died(opened=False, seconds=0.0), False),
    "its load stalls": (died(error=LoadStalled("silence"), opened=False), False),
    "its wake fails, and it had finished nothing": (in_vain(), False),
    "its wake fails, and it had lived for long": (in_vain(seconds=5000.0), False),
    "its wake fails, and it had finished something": (in_vain(finished=1), True),
    "it dies awake": (died(), True),
    "it dies awake, and had finished something": (died(finished=1), True),
}


def test_a_failed_wake_is_tried_again_once_from_the_start() -> None:
    for life in (in_vain(), in_vain(finished=9)):
        assert Policy().decide([life]) == 0.1


@pytest.mark.parametrize(
    ("last", "restarts"), AFTER_A_FAILED_WAKE.values(), ids=list(AFTER_A_FAILED_WAKE)
)
def test_the_model_that_follows_a_failed_wake_gets_one_chance(last: Life, restarts: bool) -> None:
    for before in (in_vain(finished=9), in_vain(finished=9, seconds=5000.0)):
        lives = far_apart(before, last)
        assert (Policy().decide(lives) is not None) == restarts
        assert (PERSISTENT.decide(lives) is not None) == restarts


def test_a_failed_wake_longer_ago_is_forgotten() -> None:
    lives = far_apart(in_vain(finished=9), died(finished=1), in_vain(finished=1))
    assert Policy().decide(lives) == 0.1


# -- what is permanent -------------------------------------------------------------------------

PERMANENT_ERRORS = [
    SpecificationError("no such template"),
    ModelFileError("/m.gguf", "missing"),
    SpawnError("/bin/nothing", "no such program"),
    ModelChanged("another file"),
    ClosedError("the model was unloaded"),
]
PASSING_ERRORS = [
    LoadFailed("it died", KILLED),
    ChildDied("it died", KILLED),
    WAKE,
    NoHandshake("it said nothing"),
    StateFlood("it said too much"),
    LoadStalled("silence"),
    ChildSilent("silence"),
    ChildError("the backend broke"),
    StreamBroken("cut"),
]


def name_of(error: LlamatrioError) -> str:
    return type(error).__name__


@pytest.mark.parametrize("error", PERMANENT_ERRORS, ids=name_of)
@pytest.mark.parametrize("finished", [0, 5])
def test_what_cannot_work_is_given_up_at_once(error: LlamatrioError, finished: int) -> None:
    for opened in (False, True):
        life = died(error=error, opened=opened, finished=finished, exit=None)
        assert life.permanent
        assert Policy().decide([life]) is None
        assert PERSISTENT.decide([life]) is None


@pytest.mark.parametrize("error", PASSING_ERRORS, ids=name_of)
def test_what_may_work_next_time_is_tried_again(error: LlamatrioError) -> None:
    for first in (False, True):
        life = died(error=error, exit=None, opened=False, first=first)
        assert not life.permanent
        assert Policy().decide([life]) == 0.1


@pytest.mark.parametrize(
    ("exit", "first", "opened", "permanent"),
    [
        (REFUSED, True, False, True),  # it said no to a model that it never had loaded
        (attrs.evolve(REFUSED, returncode=127), True, False, True),
        (REFUSED, True, True, False),
        (REFUSED, False, False, False),  # it could load it before
        (REFUSED, False, True, False),
        (attrs.evolve(REFUSED, returncode=0), True, False, False),
        (attrs.evolve(REFUSED, returncode=None), True, False, False),
        (KILLED, True, False, False),
        (attrs.evolve(KILLED, returncode=-11, signal="SIGSEGV"), True, False, False),
        (KILLED, False, True, False),
        (None, True, False, False),
    ],
)
def test_an_orderly_exit_with_a_code_before_the_model_was_ever_loaded_is_permanent(
    exit: Exit | None, first: bool, opened: bool, permanent: bool
) -> None:
    life = Life(LoadFailed("it ended", exit), exit, opened=opened, first=first)
    assert life.permanent == permanent
    assert (Policy().decide([life]) is None) == permanent


def test_a_refusal_is_the_end_whatever_came_before_it() -> None:
    refusal = Life(LoadFailed("no", REFUSED), REFUSED, first=True)
    assert PERSISTENT.decide(far_apart(died(finished=9), refusal)) is None


def test_what_was_permanent_earlier_does_not_matter() -> None:
    """A subclass of the actor may have gone on after it all the same."""
    refusal = Life(LoadFailed("no", REFUSED), REFUSED, first=True)
    assert Policy().decide(far_apart(refusal, died(finished=1))) == 0.1


# -- the two that have a name ------------------------------------------------------------------


@pytest.mark.parametrize("life", [*FRUITFUL.values(), died(), in_vain()])
def test_without_restarts_the_first_death_is_the_end(life: Life) -> None:
    assert NO_RESTARTS.decide([life]) is None


def test_without_restarts_everything_else_is_as_usual() -> None:
    assert attrs.evolve(NO_RESTARTS, fruitless=Policy().fruitless) == Policy()


def test_a_persistent_one_goes_on_and_never_waits_longer_than_a_second() -> None:
    quick = [attrs.evolve(died(), ended_at=number / 10) for number in range(REMEMBERED)]
    answers = [PERSISTENT.decide(quick[:number]) for number in range(1, REMEMBERED + 1)]
    assert answers == [0.0, *[1.0] * (REMEMBERED - 1)]
    assert PERSISTENT.max_pending is None


# -- whole lives -------------------------------------------------------------------------------


@attrs.frozen
class Plan:
    """How a model lives every time.

    Attributes:
      load: Seconds until it is loaded, or dies.
      opened: Whether it is loaded.
      serves: Seconds from then to its death.
      finished: Requests that it finishes in them.
    """

    load: float
    opened: bool = True
    serves: float = 0.0
    finished: int = 0


def live(policy: Policy, plan: Plan) -> Iterator[tuple[float, float | None]]:
    """Let a model live again and again; tell when each life ended, and what was decided."""
    now, lives = 0.0, []
    while True:
        now += plan.load + plan.serves
        lives.append(died(ended_at=now, **_what_became_of(plan)))
        delay = policy.decide(lives[-REMEMBERED:])
        yield now, delay
        if delay is None:
            return
        now += delay


def _what_became_of(plan: Plan) -> dict[str, Any]:
    return {"opened": plan.opened, "seconds": plan.serves, "finished": plan.finished}


def test_a_model_that_dies_in_its_warm_up_after_40_s_is_given_up_after_its_budget() -> None:
    """No window of 60 s ever holds its deaths: their number alone must end it."""
    deaths = list(live(Policy(), Plan(load=40, opened=False)))
    assert deaths == [(40, 0.1), (pytest.approx(80.1), 1), (pytest.approx(121.1), None)]


@pytest.mark.parametrize("load", [0.0, 0.1, 1.0, 10.0, 100.0, 10_000.0])
def test_a_model_that_never_gets_anything_done_is_given_up_however_long_it_loads(
    load: float,
) -> None:
    for plan in (Plan(load, opened=False), Plan(load), Plan(load, serves=100)):
        deaths = list(live(Policy(), plan))
        assert len(deaths) == 3
        assert deaths[-1][0] == pytest.approx(3 * (plan.load + plan.serves) + 1.1)


def test_a_model_that_finishes_a_request_before_each_quick_death_is_given_up_at_the_sixth() -> None:
    deaths = list(live(Policy(), Plan(load=2, serves=3, finished=1)))
    assert len(deaths) == 6
    assert deaths[-1][0] == pytest.approx(6 * 5 + 5 * 0.1)


def test_a_model_that_dies_every_ten_minutes_is_loaded_for_ever() -> None:
    deaths = live(Policy(), Plan(load=40, serves=600))
    assert [next(deaths)[1] for _ in range(3 * REMEMBERED)] == [0.1] * (3 * REMEMBERED)


def test_a_model_that_serves_and_dies_less_often_than_the_window_allows_is_loaded_for_ever() -> (
    None
):
    deaths = live(Policy(), Plan(load=2, serves=12, finished=1))
    assert [next(deaths)[1] for _ in range(3 * REMEMBERED)] == [0.1] * (3 * REMEMBERED)


# -- validation --------------------------------------------------------------------------------

NUMBERS = [
    field.name for field in attrs.fields(Policy) if field.name not in ("on_give_up", "max_pending")
]
MAY_BE_ZERO = {"fruitless", "deaths", "backoff"}
WRONG = [-1, -0.1, math.nan, -math.inf, True, False, "3", [3], object()]


def policy_with(**values: Any) -> Policy:  # noqa: ANN401 - wrong on purpose
    return Policy(**values)


@pytest.mark.parametrize("name", [*NUMBERS, "max_pending"])
def test_what_is_no_number_for_it_is_refused_by_name(name: str) -> None:
    for value in WRONG:
        with pytest.raises(SpecificationError, match=f"^{name} must be .* not "):
            policy_with(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
def test_none_is_no_number(name: str) -> None:
    with pytest.raises(SpecificationError, match=f"^{name} must be .* not None"):
        policy_with(**{name: None})


@pytest.mark.parametrize("name", [*NUMBERS, "max_pending"])
def test_zero_is_taken_where_it_means_something(name: str) -> None:
    if name in MAY_BE_ZERO:
        assert getattr(policy_with(**{name: 0}), name) == 0
    else:
        with pytest.raises(
            SpecificationError, match=f"^{name} must be .*(more than|above) 0, not 0"
        ):
            policy_with(**{name: 0})


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_may_be_whole_or_broken_and_without_an_end(name: str) -> None:
    for value in (1, 2.5, math.inf):
        assert getattr(policy_with(**{name: value}), name) == value


def test_a_whole_number_of_requests_may_wait_or_any() -> None:
    assert Policy(max_pending=None).max_pending is None
    assert Policy(max_pending=1).max_pending == 1
    for value in (1.0, 2.5, math.inf):
        with pytest.raises(SpecificationError, match=r"^max_pending must be a whole number"):
            policy_with(max_pending=value)


@pytest.mark.parametrize("name", ["fruitless", "deaths"])
def test_more_lives_than_are_remembered_cannot_be_counted(name: str) -> None:
    for value in (REMEMBERED, math.inf):
        assert getattr(policy_with(**{name: value}), name) == value
    with pytest.raises(SpecificationError, match=f"^{name} is at most {REMEMBERED}, or math.inf"):
        policy_with(**{name: REMEMBERED + 1})


def test_the_largest_number_of_lives_is_counted_to_its_end() -> None:
    plan = Plan(load=10, serves=10)
    assert len(list(live(Policy(fruitless=REMEMBERED), plan))) == REMEMBERED
    frequent = Policy(deaths=REMEMBERED - 1, window=1e9)
    assert len(list(live(frequent, attrs.evolve(plan, finished=1)))) == REMEMBERED


def test_what_is_done_when_it_is_given_up_is_one_of_two() -> None:
    for known in ("fail", "raise"):
        assert policy_with(on_give_up=known).on_give_up == known
    for value in ("", "Raise", None, True, 0):
        with pytest.raises(SpecificationError, match=r'^on_give_up is "fail" or "raise", not '):
            policy_with(on_give_up=value)


def test_a_policy_does_not_change() -> None:
    policy = Policy()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        policy.fruitless = 7  # type: ignore[misc]
    assert policy == Policy() != Policy(fruitless=7)
