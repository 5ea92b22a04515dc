from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
from trio.testing import MockClock, Sequencer, assert_checkpoints, wait_all_tasks_blocked

from llamatrio.errors import LlamatrioError, RequestCancelled, RequestFailed, StreamBroken
from llamatrio.lifecycle.reply import Reply, Result
from llamatrio.outcomes import Cancelled, Failed, Finished, Outcome, Phase, Usage
from llamatrio.requests import (
    Admitted,
    Delta,
    OnCrash,
    PromptProgress,
    Request,
    completion_request,
)

FINISHED = Finished("stop", Usage(3, 0, 2))
CANCELLED = Cancelled("stop", "generating", 2)
FAILED = Failed(StreamBroken("cut"), "generating", 2)
ENDS = [FINISHED, CANCELLED, FAILED]


class Line:
    """Stands where the actor stands: it says where a request waits, and hears of cancels."""

    def __init__(self) -> None:
        self.phase: Phase = "queued"
        self.cancelled: list[int] = []

    def reply(self, *pieces: str, outcome: Outcome | None = None) -> Reply:
        reply = Reply(
            7,
            completion_request("x"),
            lambda: self.phase,
            lambda reply: self.cancelled.append(reply.id),
        )
        if pieces:
            reply.begin()
        for piece in pieces:
            reply.emit(Delta(piece))
        if outcome is not None:
            reply.settle(outcome)
        return reply


@asynccontextmanager
async def open_bounded_nursery() -> AsyncGenerator[trio.Nursery, None]:
    with trio.fail_after(60):  # noqa: ASYNC100 - the body has checkpoints
        async with trio.open_nursery() as nursery:
            yield nursery


@pytest.fixture
def line() -> Line:
    return Line()


async def read_all(reply: Reply, into: list[str]) -> None:
    async for text in reply:
        into.append(text)  # noqa: PERF401 - an error keeps what came before it


# -- where it stands ---------------------------------------------------------------------------


def test_a_request_stands_where_it_waits_until_it_runs(line: Line) -> None:
    reply = line.reply()
    phases = [reply.phase]
    line.phase = "loading"
    phases.append(reply.phase)
    reply.begin()
    phases.append(reply.phase)
    reply.emit(PromptProgress(3, 0, 3, 0.1))
    phases.append(reply.phase)
    reply.emit(Delta("a"))
    phases.append(reply.phase)
    assert phases == ["queued", "loading", "prompt", "prompt", "generating"]


def test_a_request_that_ended_badly_stands_where_it_stood_then(line: Line) -> None:
    reply = line.reply(outcome=Cancelled("stop", "loading"))
    line.phase = "queued"
    assert reply.phase == "loading"


def test_what_has_come_so_far_can_be_read_at_any_time(line: Line) -> None:
    reply = line.reply()
    assert (reply.text, reply.reasoning, reply.tokens, reply.progress) == ("", "", 0, None)
    progress = PromptProgress(3, 0, 3, 0.1)
    reply.emit(progress)
    reply.emit(Delta(reasoning="Hm. "))
    reply.emit(Delta("a"))
    reply.emit(Delta("b", reasoning="Yes."))
    assert (reply.text, reply.reasoning, reply.tokens) == ("ab", "Hm. Yes.", 3)
    assert reply.progress is progress


def test_a_reply_has_one_outcome_and_no_second(line: Line) -> None:
    reply = line.reply(outcome=FINISHED)
    with pytest.raises(AssertionError):
        reply.settle(CANCELLED)
    assert reply.outcome is FINISHED


def test_a_repr_says_which_request_and_where_it_stands_but_no_text(line: Line) -> None:
    reply = line.reply("a secret")
    assert repr(reply) == "<Reply 7 /completion generating>"
    reply.settle(CANCELLED)
    assert repr(reply) == "<Reply 7 /completion Cancelled>"


# -- cancel ------------------------------------------------------------------------------------


def test_a_cancel_is_handed_on_until_there_is_an_outcome(line: Line) -> None:
    reply = line.reply("a")
    reply.cancel()
    assert line.cancelled == [7]
    assert reply.outcome is None
    reply.settle(CANCELLED)
    reply.cancel()
    assert line.cancelled == [7]


def test_a_cancel_of_a_finished_request_leaves_it_finished(line: Line) -> None:
    reply = line.reply("a", outcome=FINISHED)
    reply.cancel()
    assert line.cancelled == []
    assert reply.outcome is FINISHED


# -- reading -----------------------------------------------------------------------------------


async def test_a_reader_gets_each_piece_as_it_comes(line: Line, autojump_clock: MockClock) -> None:
    reply = line.reply()
    got: list[tuple[float, str]] = []
    began = trio.current_time()

    async def read() -> None:
        got.extend([(round(trio.current_time() - began), text) async for text in reply])

    async with open_bounded_nursery() as nursery:
        nursery.start_soon(read)
        for piece in "abc":
            await trio.sleep(1)
            reply.emit(Delta(piece))
        await trio.sleep(1)
        reply.settle(FINISHED)
    assert got == [(1, "a"), (2, "b"), (3, "c")]


async def test_a_slow_reader_gets_what_it_missed_joined(
    line: Line, autojump_clock: MockClock
) -> None:
    reply = line.reply()
    got = []

    async def read() -> None:
        async for text in reply:
            got.append(text)
            await trio.sleep(2.5)

    async with open_bounded_nursery() as nursery:
        nursery.start_soon(read)
        for piece in "abcdef":
            await trio.sleep(1)
            reply.emit(Delta(piece))
        reply.settle(FINISHED)
    assert got == ["a", "bc", "def"]


async def test_a_reader_that_comes_at_the_end_gets_the_whole_text_at_once(line: Line) -> None:
    reply = line.reply("a", "b", "c", outcome=FINISHED)
    assert [text async for text in reply] == ["abc"]
    assert [text async for text in reply] == ["abc"]


async def test_two_readers_each_get_everything(line: Line, autojump_clock: MockClock) -> None:
    reply = line.reply()
    early: list[str] = []
    late: list[str] = []
    async with open_bounded_nursery() as nursery:
        nursery.start_soon(read_all, reply, early)
        await wait_all_tasks_blocked()
        reply.emit(Delta("a"))
        await wait_all_tasks_blocked()
        reply.emit(Delta("b"))
        nursery.start_soon(read_all, reply, late)
        await wait_all_tasks_blocked()
        reply.emit(Delta("c"))
        await wait_all_tasks_blocked()
        reply.settle(FINISHED)
    assert early == ["a", "b", "c"]
    assert late == ["ab", "c"]


async def test_pieces_without_text_wake_a_reader_of_deltas_and_not_of_text(line: Line) -> None:
    progress = PromptProgress(3, 0, 3, 0.1)
    pieces = [Delta(reasoning="Hm"), Delta("a"), Delta(tool_calls=({"index": 0},)), Delta("b")]
    texts: list[str] = []
    deltas: list[Delta] = []
    reply = line.reply()

    async def read_deltas() -> None:
        deltas.extend([delta async for delta in reply.deltas()])

    async with open_bounded_nursery() as nursery:
        nursery.start_soon(read_all, reply, texts)
        nursery.start_soon(read_deltas)
        reply.emit(progress)
        for piece in pieces:
            reply.emit(piece)
            await wait_all_tasks_blocked()
        reply.settle(FINISHED)
    assert texts == ["a", "b"]
    assert deltas == pieces


async def test_a_slow_reader_of_deltas_gets_each_of_them(line: Line) -> None:
    reply = line.reply("a", "", "c", outcome=FINISHED)
    assert [delta async for delta in reply.deltas()] == [Delta("a"), Delta(""), Delta("c")]


async def test_an_answer_without_a_piece_ends_a_reader_at_once(line: Line) -> None:
    reply = line.reply(outcome=FINISHED)
    assert [text async for text in reply] == []
    assert [delta async for delta in reply.deltas()] == []


@pytest.mark.parametrize("outcome", [CANCELLED, FAILED])
async def test_reading_gives_the_text_first_and_then_raises_unless_it_finished(
    line: Line, outcome: Cancelled | Failed
) -> None:
    kind = RequestCancelled if isinstance(outcome, Cancelled) else RequestFailed
    reply = line.reply("a", "b", outcome=outcome)
    got: list[str] = []
    with pytest.raises(kind) as caught:
        await read_all(reply, got)
    assert got == ["ab"]
    assert caught.value.args == (outcome, "ab")
    deltas = []
    with pytest.raises(kind):
        async for delta in reply.deltas():
            deltas.append(delta)  # noqa: PERF401 - an error keeps what came before it
    assert deltas == [Delta("a"), Delta("b")]
    with pytest.raises(kind) as caught:
        await reply.result()
    assert caught.value.args == (outcome, "ab")


async def test_a_failure_is_the_cause_of_what_reading_raises(line: Line) -> None:
    with pytest.raises(RequestFailed) as caught:
        await line.reply("a", outcome=FAILED).result()
    assert caught.value.__cause__ is FAILED.error
    assert str(caught.value) == "the request failed (generating): cut"


async def test_a_cancelled_request_says_by_whom_and_where(line: Line) -> None:
    with pytest.raises(RequestCancelled) as caught:
        await line.reply("a", outcome=CANCELLED).result()
    assert str(caught.value) == "the request was cancelled by stop (generating, after 2 tokens)"


@pytest.mark.parametrize("outcome", [CANCELLED, FAILED])
async def test_each_reader_has_an_exception_of_its_own(line: Line, outcome: Outcome) -> None:
    reply = line.reply()
    raised: list[LlamatrioError] = []

    async def read() -> None:
        try:
            await read_all(reply, [])
        except LlamatrioError as exc:
            raised.append(exc)

    async with open_bounded_nursery() as nursery:
        nursery.start_soon(read)
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        reply.settle(outcome)
    assert len({id(exc) for exc in raised}) == 2


@pytest.mark.parametrize("outcome", ENDS)
async def test_wait_returns_the_outcome_whatever_it_is(line: Line, outcome: Outcome) -> None:
    reply = line.reply()
    async with open_bounded_nursery() as nursery:

        async def wait() -> None:
            assert await reply.wait() is outcome

        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        reply.emit(Delta("a"))
        await wait_all_tasks_blocked()
        reply.settle(outcome)
    assert await reply.wait() is outcome


async def test_the_result_is_the_whole_answer(line: Line) -> None:
    reply = line.reply("a", "b")
    reply.emit(Delta("c", reasoning="Hm"))
    reply.settle(FINISHED)
    assert await reply.result() == Result("abc", FINISHED, "Hm")


async def test_a_reader_that_is_cancelled_leaves_the_request_to_others(line: Line) -> None:
    reply = line.reply()
    got: list[str] = []
    order = Sequencer()
    async with open_bounded_nursery() as nursery:
        nursery.start_soon(read_all, reply, got)

        async def give_up() -> None:
            with trio.CancelScope() as scope:
                async for text in reply:
                    assert text == "a"
                    async with order(0):
                        scope.cancel()
            assert scope.cancelled_caught

        nursery.start_soon(give_up)
        await wait_all_tasks_blocked()
        reply.emit(Delta("a"))
        async with order(1):
            reply.emit(Delta("b"))
        await wait_all_tasks_blocked()
        reply.settle(FINISHED)
    assert got == ["a", "b"]
    assert line.cancelled == []


async def test_a_reader_that_breaks_off_can_go_on_later(line: Line) -> None:
    reply = line.reply("a")
    reader = aiter(reply)
    assert await anext(reader) == "a"
    reply.emit(Delta("b"))
    reply.emit(Delta("c"))
    assert await anext(reader) == "bc"
    reply.settle(FINISHED)
    with pytest.raises(StopAsyncIteration):
        await anext(reader)
    with pytest.raises(StopAsyncIteration):
        await anext(reader)


# -- checkpoints -------------------------------------------------------------------------------


async def test_every_call_is_a_checkpoint_even_if_there_is_nothing_to_wait_for(line: Line) -> None:
    reply = line.reply("a", "b", outcome=FINISHED)
    texts, deltas = aiter(reply), aiter(reply.deltas())
    with assert_checkpoints():
        await reply.wait()
    with assert_checkpoints():
        await reply.result()
    with assert_checkpoints():
        await reply.read(0)
    with assert_checkpoints():
        await reply.read(2)
    with assert_checkpoints():
        assert await anext(texts) == "ab"
    for piece in "ab":
        with assert_checkpoints():
            assert await anext(deltas) == Delta(piece)
    for reader in (texts, deltas):
        with assert_checkpoints(), pytest.raises(StopAsyncIteration):
            await anext(reader)


async def test_every_call_is_a_checkpoint_even_if_it_raises(line: Line) -> None:
    reply = line.reply(outcome=CANCELLED)
    with assert_checkpoints():
        await reply.wait()
    with assert_checkpoints(), pytest.raises(RequestCancelled):
        await reply.result()
    with assert_checkpoints(), pytest.raises(RequestCancelled):
        await anext(aiter(reply))


# -- its model dies ----------------------------------------------------------------------------


def asked(on_crash: OnCrash = "resume") -> Request:
    """A request of at most ten tokens."""
    return completion_request("Once", max_tokens=10, on_crash=on_crash)


def accepted(request: Request) -> Reply:
    return Reply(7, request, lambda: "queued", lambda _: None, 3.0)


def words(*pieces: str) -> list[Admitted | Delta | PromptProgress]:
    return [Admitted(), *map(Delta, pieces)]


def run_once(reply: Reply, *pieces: Admitted | Delta | PromptProgress) -> bool:
    """Let it run until its model dies; put it back, if another model may have it."""
    reply.begin()
    for piece in pieces:
        reply.emit(piece)
    again = reply.may_run_again()
    if again:
        reply.leave_slot()
    return again


PROGRESS = PromptProgress(3, 0, 1, 0.1)
LAST_WORDS: dict[str, tuple[list[Admitted | Delta | PromptProgress], bool, bool]] = {
    # what came before the death; whether it may run again if it "fails", and if it "resumes"
    "nothing": ([], True, True),
    "the word that it was begun with": ([Admitted()], False, True),
    "progress of the prompt": ([PROGRESS], False, True),
    "a piece": (words("a"), False, True),
    "a piece without a text": ([Delta()], False, True),
    "a thought": ([Delta(reasoning="Hm")], False, False),
    "a thought and a text": ([Delta(reasoning="Hm"), Delta("a")], False, False),
}


@pytest.mark.parametrize(("pieces", "fails", "resumes"), LAST_WORDS.values(), ids=list(LAST_WORDS))
def test_another_model_may_have_what_its_own_had_not_begun_with_or_what_is_to_be_resumed(
    pieces: list[Admitted | Delta | PromptProgress], fails: bool, resumes: bool
) -> None:
    assert run_once(accepted(asked("fail")), *pieces) == fails
    assert run_once(accepted(asked("resume")), *pieces) == resumes


@pytest.mark.parametrize("on_crash", ["fail", "resume"])
def test_a_request_that_two_models_in_a_row_died_with_gets_no_third(on_crash: OnCrash) -> None:
    reply = accepted(asked(on_crash))
    assert run_once(reply)
    assert not run_once(reply)


@pytest.mark.parametrize("first", [[], [Admitted()], [PROGRESS]])
@pytest.mark.parametrize("second", [[], [Admitted()], [PROGRESS]])
def test_two_deaths_without_a_piece_in_between_are_the_end(
    first: list[Admitted | PromptProgress], second: list[Admitted | PromptProgress]
) -> None:
    reply = accepted(asked())
    assert run_once(reply, *words("a"))
    assert run_once(reply, *first)
    assert not run_once(reply, *second)


def test_an_answer_that_grows_each_time_is_taken_up_each_time() -> None:
    reply = accepted(asked())
    for number in range(9):
        assert run_once(reply, *words(" a"))
        assert reply.resumed == number
        assert run_once(reply)  # not even begun with: a try in vain
        assert reply.resumed == number + 1
    assert reply.text == 9 * " a"


def test_a_request_that_was_not_begun_with_is_sent_as_it_was() -> None:
    request = asked("fail")
    reply = accepted(request)
    assert run_once(reply)
    assert reply.resumed == 0
    assert reply.begin() is request


def test_a_request_that_was_begun_with_is_taken_up_where_it_broke_off() -> None:
    reply = accepted(asked())
    assert run_once(reply, *words(" upon", " a"))
    again = reply.begin()
    assert again is not None
    assert again is not reply.request
    assert isinstance(again.body, dict)
    assert (again.body["prompt"], again.body["max_tokens"]) == ("Once upon a", 8)
    assert run_once(reply, *words(" time"))
    again = reply.begin()
    assert again is not None
    assert isinstance(again.body, dict)
    assert (again.body["prompt"], again.body["max_tokens"]) == ("Once upon a time", 7)


def test_a_request_whose_prompt_was_read_in_vain_is_asked_in_full() -> None:
    reply = accepted(asked())
    assert run_once(reply, PROGRESS)
    again = reply.begin()
    assert reply.resumed == 1
    assert again is not None
    assert isinstance(again.body, dict)
    assert (again.body["prompt"], again.body["max_tokens"]) == ("Once", 10)


def test_nothing_is_asked_for_an_answer_that_had_reached_its_bound() -> None:
    reply = accepted(asked())
    assert run_once(reply, *words(*10 * "a"))
    assert reply.begin() is None


def event(text: str, generated: int) -> Delta:
    """A piece whose event says how many tokens there were."""
    return Delta(text, data=b'{"timings":{"predicted_n":%d}}' % generated)


def test_tokens_are_those_that_the_model_counted_if_it_says_so() -> None:
    reply = accepted(asked())
    assert run_once(reply, event("\N{OWL}", 3), event("", 4))  # what was held back is not there
    again = reply.begin()
    assert again is not None
    assert isinstance(again.body, dict)
    assert again.body["max_tokens"] == 7
    assert run_once(reply, event("\N{OWL}", 3), event("\N{OWL}", 6))
    again = reply.begin()
    assert again is not None
    assert isinstance(again.body, dict)
    assert (again.body["prompt"], again.body["max_tokens"]) == ("Once" + 3 * "\N{OWL}", 1)


def test_tokens_of_earlier_models_count_to_the_answer_and_not_to_the_prompt() -> None:
    reply = accepted(asked())
    assert run_once(reply, *words(" upon", " a"))
    assert run_once(reply, event(" time", 3))
    reply.begin()
    finished = Finished("stop", Usage(prompt=9, cached=4, completion=2), {"predicted_n": 2.0})
    assert reply.whole(finished) == attrs.evolve(finished, usage=Usage(4, 4, 7))
    assert reply.whole(FINISHED).usage == Usage(0, 0, 7)


def test_the_prompt_is_as_large_as_the_first_model_said() -> None:
    reply = accepted(asked())
    assert run_once(reply, PROGRESS, Delta(" upon"))
    assert run_once(reply, PromptProgress(4, 0, 4, 0.1), Delta(" a"))
    reply.begin()
    finished = Finished("length", Usage(prompt=6, cached=0, completion=2))
    assert reply.whole(finished).usage == Usage(3, 0, 4)
    assert reply.whole(Finished("length")).usage == Usage(3, 0, 2)


def test_an_answer_that_one_model_gave_has_the_usage_that_it_said() -> None:
    reply = accepted(asked())
    reply.begin()
    reply.emit(Delta("a"))
    assert reply.whole(FINISHED) is FINISHED


def test_a_request_stands_where_it_waits_again_and_is_in_its_prompt_when_it_runs_again() -> None:
    phases: list[Phase] = []
    line = Line()
    reply = Reply(7, asked(), lambda: line.phase, lambda _: None)
    reply.begin()
    reply.emit(Delta("a"))
    phases.append(reply.phase)
    assert reply.may_run_again()
    line.phase = "loading"
    reply.leave_slot()
    phases.append(reply.phase)
    line.phase = "queued"
    phases.append(reply.phase)
    reply.begin()
    phases.append(reply.phase)
    reply.emit(PROGRESS)
    phases.append(reply.phase)
    reply.emit(Delta("b"))
    phases.append(reply.phase)
    assert phases == ["generating", "loading", "queued", "prompt", "prompt", "generating"]
    assert (reply.text, reply.tokens) == ("ab", 2)


def test_the_progress_of_a_prompt_is_that_of_the_model_that_reads_it_now() -> None:
    reply = accepted(asked())
    reply.begin()
    reply.emit(PROGRESS)
    assert reply.progress is PROGRESS
    assert reply.may_run_again()
    reply.leave_slot()
    assert reply.progress is None
    assert reply.submitted_at == 3.0


def test_a_request_says_whether_it_has_ever_had_a_slot() -> None:
    reply = accepted(asked())
    assert not reply.has_run
    assert run_once(reply)
    assert reply.has_run


@pytest.mark.parametrize("outcome", ENDS)
def test_an_outcome_says_how_often_the_answer_was_taken_up(outcome: Outcome) -> None:
    reply = accepted(asked())
    assert run_once(reply, *words("a"))
    assert run_once(reply)
    assert run_once(reply, *words("b"))
    reply.begin()
    reply.settle(outcome)
    assert reply.outcome == attrs.evolve(outcome, resumed=2)


def test_an_answer_that_waits_for_the_next_model_has_not_been_taken_up_yet() -> None:
    reply = accepted(asked())
    assert run_once(reply, *words("a"))
    reply.settle(CANCELLED)
    assert reply.outcome is CANCELLED
    assert CANCELLED.resumed == 0


@pytest.mark.parametrize("outcome", ENDS)
def test_the_outcome_of_a_request_that_was_only_put_back_is_not_resumed(outcome: Outcome) -> None:
    reply = accepted(asked())
    assert run_once(reply)
    reply.settle(outcome)
    assert reply.outcome is outcome
    assert outcome.resumed == 0


async def test_a_reader_notices_nothing_of_a_death_but_a_pause(autojump_clock: MockClock) -> None:
    reply = accepted(asked())
    got: list[str] = []
    async with open_bounded_nursery() as nursery:
        nursery.start_soon(read_all, reply, got)
        for piece in (" upon", " a", " time"):
            await wait_all_tasks_blocked()
            assert run_once(reply, *words(piece))
        await wait_all_tasks_blocked()
        reply.begin()
        reply.settle(FINISHED)
    assert got == [" upon", " a", " time"]
    assert (await reply.result()).text == " upon a time"
