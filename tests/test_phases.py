from __future__ import annotations

import pytest

from llamatrio.lifecycle.phases import (
    GOALS,
    TABLE,
    Answer,
    Command,
    Event,
    Phase,
    Step,
    Transition,
    Undeliverable,
    step,
)

VERBS = (Event.START, Event.STOP, Event.UNLOAD, Event.RECONFIGURE)

# The whole lifecycle, written down a second time: event, next phase, commands in order, and what
# becomes of a verb. An x cannot be delivered.
EXPECTED = {
    Phase.UNLOADED: """
        start        loading    open spawn                  wait
        stop         unloaded                               wait
        unload       unloaded                               wait
        reconfigure  unloaded   adopt                       wait
        ready        x
        again        x
        gone         x
        idle         x
    """,
    Phase.LOADING: """
        start        loading                                wait
        stop         unloading  interrupt close drop end    wait
        unload       unloading  interrupt close drop end    wait
        reconfigure  loading                                refuse
        ready        started    dispatch
        again        loading    spawn
        gone         unloaded   close fail
        idle         x
    """,
    Phase.STARTED: """
        start        started                                wait
        stop         stopping   interrupt cancel close drop wait
        unload       started                                refuse
        reconfigure  started                                refuse
        ready        started
        again        loading    spawn
        gone         unloaded   close fail
        idle         x
    """,
    Phase.STOPPING: """
        start        stopping                               postpone
        stop         stopping   interrupt                   wait
        unload       stopping                               postpone
        reconfigure  stopping                               postpone
        ready        stopping
        again        x
        gone         x
        idle         resident
    """,
    Phase.RESIDENT: """
        start        started    open dispatch               wait
        stop         resident   interrupt                   wait
        unload       unloading  interrupt end               wait
        reconfigure  unloading  end                         postpone
        ready        resident
        again        x
        gone         unloaded
        idle         x
    """,
    Phase.UNLOADING: """
        start        unloading                              postpone
        stop         unloading  interrupt                   wait
        unload       unloading  interrupt                   wait
        reconfigure  unloading                              postpone
        ready        unloading
        again        x
        gone         unloaded
        idle         x
    """,
}


def cells() -> dict[tuple[Phase, Event], list[str]]:
    found = {}
    for phase, rows in EXPECTED.items():
        for row in rows.strip().splitlines():
            event, *words = row.split()
            found[phase, Event(event)] = words
    return found


def test_every_pair_of_a_phase_and_an_event_does_what_was_written_down() -> None:
    assert len(cells()) == 48
    for (phase, event), words in cells().items():
        pair = f"{event.name} in {phase.name}"
        if words == ["x"]:
            with pytest.raises(Undeliverable, match=f"^{pair}$"):
                step(phase, event)
            continue
        cell = step(phase, event)
        after, *rest = words
        if event in VERBS:
            assert cell.answer.name.lower() == rest.pop(), pair
        assert cell.phase.value == after, pair
        assert [command.name.lower() for command in cell.commands] == rest, pair


def test_an_event_that_cannot_happen_changes_nothing() -> None:
    before = dict(TABLE)
    with pytest.raises(Undeliverable):
        step(Phase.UNLOADED, Event.READY)
    assert dict(TABLE) == before


def test_a_transition_reads_as_an_arrow() -> None:
    transition = Transition(Phase.LOADING, Event.READY, Phase.STARTED, 1)
    assert str(transition) == "LOADING --READY--> STARTED"


def test_the_table_cannot_be_written_to() -> None:
    with pytest.raises(TypeError):
        TABLE[Phase.UNLOADED, Event.READY] = Step(Phase.STARTED)  # type: ignore[index]
    with pytest.raises(TypeError):
        GOALS[Event.START] = frozenset()  # type: ignore[index]


# -- what must hold, however the table is written ----------------------------------------------


def reachable(start: Phase) -> set[Phase]:
    found = {start}
    while more := {cell.phase for (phase, _), cell in TABLE.items() if phase in found} - found:
        found |= more
    return found


def entries(command: Command) -> list[tuple[Phase, Event, Step]]:
    return [(*pair, cell) for pair, cell in TABLE.items() if command in cell.commands]


def test_every_phase_can_be_reached_from_the_first() -> None:
    assert reachable(Phase.UNLOADED) == set(Phase)


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_can_get_back_to_unloaded(phase: Phase) -> None:
    assert Phase.UNLOADED in reachable(phase)


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_takes_every_verb(phase: Phase) -> None:
    for verb in VERBS:
        step(phase, verb)


@pytest.mark.parametrize("event", [Event.AGAIN, Event.GONE])
def test_the_end_of_a_child_cannot_arrive_while_a_request_runs(event: Event) -> None:
    with pytest.raises(Undeliverable):
        step(Phase.STOPPING, event)


def test_a_child_is_spawned_on_the_way_into_loading_and_nowhere_else() -> None:
    spawns = entries(Command.SPAWN)
    assert spawns
    assert all(cell.phase is Phase.LOADING for _, _, cell in spawns)
    into = {pair for pair, cell in TABLE.items() if cell.phase is Phase.LOADING is not pair[0]} | {
        (Phase.LOADING, Event.AGAIN)
    }
    assert {(phase, event) for phase, event, _ in spawns} == into


def test_a_child_is_spawned_only_where_there_is_none() -> None:
    for phase, event, _ in entries(Command.SPAWN):
        assert phase is Phase.UNLOADED or event is Event.AGAIN


def test_a_queue_that_is_closed_is_emptied_in_the_same_step() -> None:
    for _, _, cell in entries(Command.CLOSE):
        after = cell.commands[cell.commands.index(Command.CLOSE) + 1]
        assert after in (Command.DROP, Command.FAIL)


def test_a_queue_is_emptied_only_when_it_is_closed() -> None:
    for command in (Command.DROP, Command.FAIL):
        for _, _, cell in entries(command):
            before = cell.commands[cell.commands.index(command) - 1]
            assert before is Command.CLOSE


def test_the_queue_is_open_exactly_while_loading_and_started() -> None:
    accepting = {Phase.LOADING, Phase.STARTED}
    for (phase, _), cell in TABLE.items():
        opens, closes = (command in cell.commands for command in (Command.OPEN, Command.CLOSE))
        assert opens == (phase not in accepting and cell.phase in accepting)
        assert closes == (phase in accepting and cell.phase not in accepting)


def test_a_child_is_ended_on_the_way_into_unloading_and_nowhere_else() -> None:
    for (phase, _), cell in TABLE.items():
        enters = cell.phase is Phase.UNLOADING is not phase
        assert (Command.END in cell.commands) == enters


def test_unloading_is_left_only_when_the_child_has_gone() -> None:
    leaving = [
        event
        for (phase, event), cell in TABLE.items()
        if phase is Phase.UNLOADING is not cell.phase
    ]
    assert leaving == [Event.GONE]


def test_a_configuration_is_adopted_only_where_no_model_is_loaded() -> None:
    assert [pair[:2] for pair in entries(Command.ADOPT)] == [(Phase.UNLOADED, Event.RECONFIGURE)]


def test_a_refused_verb_changes_nothing() -> None:
    for (phase, _), cell in TABLE.items():
        if cell.answer is Answer.REFUSE:
            assert (cell.phase, cell.commands) == (phase, ())


def test_what_is_no_verb_is_neither_refused_nor_postponed() -> None:
    for (_, event), cell in TABLE.items():
        if event not in VERBS:
            assert cell.answer is Answer.WAIT


def test_a_waiting_verb_leads_to_its_goal_without_any_other_verb() -> None:
    # What can happen by itself from here on, a crash aside.
    happy = {
        Phase.LOADING: Event.READY,
        Phase.STOPPING: Event.IDLE,
        Phase.UNLOADING: Event.GONE,
    }
    for (phase, verb), cell in TABLE.items():
        if verb in VERBS and cell.answer is Answer.WAIT:
            at = cell.phase
            while at not in GOALS[verb]:
                at = step(at, happy[at]).phase
            assert at in GOALS[verb], (phase, verb)


def test_a_postponed_verb_is_taken_after_the_next_changes_of_phase() -> None:
    happy = {Phase.STOPPING: Event.IDLE, Phase.UNLOADING: Event.GONE}
    for (_, verb), cell in TABLE.items():
        if cell.answer is Answer.POSTPONE:
            at = cell.phase
            answers: list[Answer] = []
            while at in happy and (not answers or answers[-1] is Answer.POSTPONE):
                at = step(at, happy[at]).phase
                again = step(at, verb)
                answers.append(again.answer)
                at = again.phase
            assert answers[-1] is Answer.WAIT


def test_every_verb_has_a_goal_and_nothing_else_has_one() -> None:
    assert set(GOALS) == set(VERBS)


def test_a_stop_is_answered_while_a_load_is_given_up_and_an_unload_is_not() -> None:
    assert GOALS[Event.START] == {Phase.STARTED}
    assert GOALS[Event.STOP] == {Phase.RESIDENT, Phase.UNLOADED, Phase.UNLOADING}
    assert GOALS[Event.UNLOAD] == GOALS[Event.RECONFIGURE] == {Phase.UNLOADED}
