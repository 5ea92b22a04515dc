"""Transcripts of llama-server b11434, as `tests/transcripts/` has them: the bodies of its answers
as they came, but for the model's path, and for pieces left out before an error."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest

from llamatrio.errors import AnswerTooLarge, BadAnswer, ContextExceeded, RequestRefused
from llamatrio.outcomes import Finished, Reason, Usage
from llamatrio.requests import Delta, PromptProgress
from llamatrio.wire.sse import MAX_EVENT, AnswerReader, Event, refusal

TRANSCRIPTS = {
    path.stem: path.read_bytes() for path in (Path(__file__).parent / "transcripts").glob("*.sse")
}
WHOLE = sorted(name for name in TRANSCRIPTS if not name.endswith("-error"))
BROKEN = sorted(name for name in TRANSCRIPTS if name.endswith("-error"))


def read(chunks: Iterable[bytes]) -> list[Event]:
    reader = AnswerReader()
    return [event for chunk in chunks for event in reader.feed(chunk)]


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def text_of(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def thoughts_of(events: Iterable[Event]) -> str:
    return "".join(event.reasoning for event in events if isinstance(event, Delta))


def calls_of(events: Iterable[Event]) -> list[Any]:
    return [call for event in events if isinstance(event, Delta) for call in event.tool_calls]


# -- what each says ----------------------------------------------------------------------------


@attrs.frozen
class Answer:
    """What is in a transcript, read by eye."""

    pieces: int
    text: str
    reason: Reason
    usage: Usage
    progress: tuple[tuple[int, int], ...] = ()
    thoughts: str = ""


ANSWERS = {
    "completion": Answer(4, " Paris.\n\n", "length", Usage(5, 0, 4), ((0, 0), (0, 5))),
    "completion-logprobs": Answer(3, " Paris.\n", "length", Usage(5, 4, 3), ((4, 4), (4, 5))),
    "openai-completion": Answer(4, " Paris.\n\n", "length", Usage(5, 4, 4), ((4, 4), (4, 5))),
    "openai-completion-logprobs": Answer(
        3, " Paris.\n", "length", Usage(5, 4, 3), ((4, 4), (4, 5))
    ),
    "chat": Answer(4, "I'm glad you", "length", Usage(32, 0, 4), ((0, 0), (0, 32))),
    "chat-logprobs": Answer(2, "I'm", "length", Usage(32, 31, 2), ((31, 31), (31, 32))),
    "chat-reasoning": Answer(
        4, "Good day!", "stop", Usage(53, 0, 4), ((0, 0), (0, 53)), "Be brief."
    ),
    "chat-tools": Answer(5, "Well. ", "tool_calls", Usage(891, 0, 9), ((0, 0), (0, 891))),
    "chat-keep-alive": Answer(0, "", "stop", Usage(931, 0, 1), ((0, 0), (0, 931))),
    # This dialect does not tell a bound that was reached from an end.
    "responses": Answer(4, "I'm glad you", "stop", Usage(32, 31, 4), ((31, 31), (31, 32))),
    "responses-reasoning": Answer(
        4, "Good day!", "stop", Usage(53, 52, 4), ((52, 52), (52, 53)), "Be brief."
    ),
    "responses-tools": Answer(
        6, "Well. ", "tool_calls", Usage(875, 874, 9), ((874, 874), (874, 875))
    ),
    "messages": Answer(4, "I'm glad you", "length", Usage(32, 31, 4)),
    "messages-reasoning": Answer(4, "Good day!", "stop", Usage(53, 52, 4), (), "Be brief."),
    "messages-tools": Answer(6, "Well. ", "tool_calls", Usage(875, 403, 9)),
}


def test_every_transcript_has_its_answer() -> None:
    assert sorted(ANSWERS) == WHOLE
    assert len(BROKEN) == 5


@pytest.mark.parametrize("name", WHOLE)
def test_an_answer_of_this_dialect_is_read_as_it_was_meant(name: str) -> None:
    *events, end = read([TRANSCRIPTS[name]])
    answer = ANSWERS[name]
    progress = [event for event in events if isinstance(event, PromptProgress)]
    assert text_of(events) == answer.text
    assert thoughts_of(events) == answer.thoughts
    assert len(events) - len(progress) == answer.pieces
    assert [(step.cached, step.processed) for step in progress] == list(answer.progress)
    assert all(step.total == answer.usage.prompt for step in progress)
    assert isinstance(end, Finished)
    assert (end.reason, end.usage, end.body) == (answer.reason, answer.usage, None)


def test_the_timings_of_the_last_event_are_kept() -> None:
    for name in WHOLE:
        end = read([TRANSCRIPTS[name]])[-1]
        assert isinstance(end, Finished)
        if name.startswith("messages"):
            assert end.timings == {}, "this dialect has none"
        else:
            assert end.timings["predicted_n"] == end.tokens, name
            assert end.timings["prompt_ms"] > 0, name


def test_the_seconds_of_a_progress_are_seconds() -> None:
    progress = read([TRANSCRIPTS["chat-keep-alive"]])[1]
    assert progress == PromptProgress(total=931, cached=0, processed=931, seconds=16.699)


def test_every_piece_keeps_the_event_that_it_came_from() -> None:
    for name in WHOLE:
        for piece in read([TRANSCRIPTS[name]]):
            if isinstance(piece, Delta):
                assert b"data: " + piece.data + b"\n" in TRANSCRIPTS[name]
                assert piece.raw == json.loads(piece.data)


def test_log_probabilities_come_with_the_piece_that_they_belong_to() -> None:
    for name in ("completion-logprobs", "openai-completion-logprobs", "chat-logprobs"):
        for piece in read([TRANSCRIPTS[name]]):
            if isinstance(piece, Delta):
                found: Any = piece.logprobs
                probabilities = found["content"] if isinstance(found, dict) else found
                assert [one["token"] for one in probabilities] == [piece.text]
                assert len(probabilities[0]["top_logprobs"]) == 2


def test_pieces_of_a_tool_call_in_a_chat_make_the_call() -> None:
    calls = calls_of(read([TRANSCRIPTS["chat-tools"]]))
    assert calls[0]["function"]["name"] == "weather"
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"town": "Paris"}


def test_pieces_of_a_tool_call_in_messages_make_the_call() -> None:
    start, *parts = calls_of(read([TRANSCRIPTS["messages-tools"]]))
    assert start["content_block"]["name"] == "weather"
    arguments = "".join(part["delta"]["partial_json"] for part in parts)
    assert json.loads(arguments) == {"town": "Paris"}


def test_pieces_of_a_tool_call_in_responses_make_the_call() -> None:
    start, *parts = calls_of(read([TRANSCRIPTS["responses-tools"]]))
    assert start["item"]["name"] == "weather"
    arguments = "".join(part["delta"] for part in parts)
    assert json.loads(arguments) == {"town": "Paris"}


# -- cut anywhere ------------------------------------------------------------------------------


# One of each dialect: the cost is quadratic. All of them break off at every position below.
@pytest.mark.parametrize(
    "name",
    [
        "completion",
        "openai-completion",
        "chat-tools",
        "chat-keep-alive",
        "responses-tools",
        "messages-tools",
    ],
)
def test_an_answer_in_two_parts_gives_the_same_events_wherever_it_is_cut(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    whole = read([transcript])
    for cut in range(len(transcript) + 1):
        assert read([transcript[:cut], transcript[cut:]]) == whole, cut


@pytest.mark.parametrize("name", WHOLE)
def test_an_answer_that_breaks_off_has_no_end_wherever_that_is(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    whole = read([transcript])
    reader = AnswerReader()
    events: list[Event] = []
    for position in range(len(transcript)):
        assert not any(isinstance(event, Finished) for event in events), position
        events += reader.feed(transcript[position : position + 1])
    assert events == whole


def test_an_answer_whose_lines_end_in_crlf_is_the_same() -> None:
    for name in WHOLE:
        transcript = TRANSCRIPTS[name]
        assert read([transcript.replace(b"\n", b"\r\n")]) == read([transcript]), name


def test_only_the_keep_alive_transcript_has_comments_and_they_say_nothing() -> None:
    assert [name for name in TRANSCRIPTS if b"\n:\n" in TRANSCRIPTS[name]] == ["chat-keep-alive"]
    transcript = TRANSCRIPTS["chat-keep-alive"]
    assert transcript.count(b"\n:\n\n") > 1
    assert read([transcript.replace(b":\n\n", b"")]) == read([transcript])


# -- what is not an end ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"data: [DONE]",
        b"data: [DONE]\n",
        b" data: [DONE]\n\n",
        b": [DONE]\n\n",
        b"event: message_stop\n\n",
        b"event: response.completed\n\n",
        event({"content": "[DONE]"}),
        event({"content": "x", "stop": False}),
        event({"content": "x", "stop": "true"}),
        event({"content": "x", "stop": 1}),
        event({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
        event({"type": "response.output_text.done"}),
        event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}),
    ],
)
def test_a_stream_without_its_terminal_mark_has_no_end(stream: bytes) -> None:
    assert not any(isinstance(event, Finished) for event in read([stream]))


@pytest.mark.parametrize(
    "more",
    [
        b"data: [DONE]\n\n",
        event({"content": "more", "stop": True}),
        event({"error": {"message": "too late"}}),
        b"data: garbage\n\n",
        b"x" * 100,
    ],
)
def test_nothing_counts_after_the_terminal_mark(more: bytes) -> None:
    for name in WHOLE:
        transcript = TRANSCRIPTS[name]
        assert read([transcript, more, more]) == read([transcript])
        assert read([transcript + more]) == read([transcript])


def test_nothing_counts_after_the_terminal_mark_not_even_a_flood() -> None:
    reader = AnswerReader()
    assert len(list(reader.feed(b"data: [DONE]\n\n"))) == 1
    assert list(reader.feed(b"x" * (MAX_EVENT + 1) + b"\n\n")) == []


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_inside_a_stream_is_raised_wherever_it_is_cut(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    for cut in range(len(transcript) + 1):
        reader = AnswerReader()
        events: list[Event] = []
        with pytest.raises(RequestRefused) as caught:
            for chunk in (transcript[:cut], transcript[cut:]):
                events.extend(reader.feed(chunk))
        assert caught.value.status == 0
        assert caught.value.kind == "server_error"
        assert caught.value.message == "Context size has been exceeded."
        assert caught.value.details["code"] == 500
        assert not any(isinstance(event, Finished) for event in events)


def test_the_text_before_an_error_is_given_before_it_is_raised() -> None:
    events = []
    with pytest.raises(RequestRefused):
        for piece in AnswerReader().feed(TRANSCRIPTS["chat-error"]):
            events.append(piece)  # noqa: PERF402 - extend would lose them
    assert text_of(events) == "Good morning from your small"


def test_a_prompt_over_the_context_is_an_error_of_its_own_with_its_numbers() -> None:
    # As b11434 answers with status 400.
    error = {
        "code": 400,
        "message": "request (4001 tokens) exceeds the available context size (1024 tokens), "
        "try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 4001,
        "n_ctx": 1024,
    }
    exceeded = refusal(400, error)
    assert isinstance(exceeded, ContextExceeded)
    assert (exceeded.prompt_tokens, exceeded.context) == (4001, 1024)
    assert exceeded.status == 400
    assert "4001 tokens" in str(exceeded)
    with pytest.raises(ContextExceeded):
        read([event({"error": error})])


def test_an_error_object_without_words_still_makes_an_exception() -> None:
    exceeded = refusal(400, {"type": "exceed_context_size_error", "n_ctx": "many"})
    assert isinstance(exceeded, ContextExceeded)
    assert (exceeded.prompt_tokens, exceeded.context) == (None, None)
    refused = refusal(500, {})
    assert type(refused) is RequestRefused
    assert str(refused) == "the model's server refused the request (error): no message"


@pytest.mark.parametrize(
    "data",
    [
        b"garbage",
        b"",
        b"{",
        b'{"content":"a"} {"content":"b"}',
        b"[DONE",
        b"[done]",
        b'{"content":"\xff"}',
        b'"text"',
        b"7",
        b"null",
        b"[]",
        b'[{"content":"a"}]',
        b'{"choices":[{"delta":{"content":7}}]}',
        b'{"choices":[{"delta":{"reasoning_content":["a"]}}]}',
        b'{"choices":[{"text":{}}]}',
        b"9" * 5000,
        b"[" * 100_000,
    ],
    ids=lambda data: data[:40].decode(errors="replace"),
)
def test_an_event_of_no_known_form_is_a_bad_answer(data: bytes) -> None:
    with pytest.raises(BadAnswer):
        read([b"data: " + data + b"\n\n"])


def test_html_in_place_of_events_gives_nothing() -> None:
    assert read([b"<html>\n<body>502 Bad Gateway</body>\n\n</html>\n\n"]) == []


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"choices": []},
        {"choices": None},
        {"choices": [{}]},
        {"choices": ["a"]},
        {"choices": [{"delta": {"content": None, "tool_calls": None}}]},
        {"prompt_progress": None, "usage": None, "timings": None},
        {"type": "response.new_in_a_later_version", "delta": {"text": "?"}},
        {"error": None, "content": ""},
    ],
    ids=json.dumps,
)
def test_an_event_that_says_nothing_new_gives_nothing(form: object) -> None:
    assert read([event(form)]) == []


@pytest.mark.parametrize("word", ["eos", "word", "none", "a word of a later version", None])
def test_an_end_of_completion_that_is_no_bound_is_a_stop(word: str | None) -> None:
    *_, end = read([event({"content": "", "stop": True, "stop_type": word})])
    assert isinstance(end, Finished)
    assert end.reason == "stop"


@pytest.mark.parametrize("timings", [{}, {"timings": None}, {"timings": [7]}, {"timings": {}}])
def test_an_end_without_timings_had_nothing_cached(timings: dict[str, object]) -> None:
    counts = {"tokens_evaluated": 5, "tokens_predicted": 4, **timings}
    *_, end = read([event({"content": "", "stop": True, **counts})])
    assert isinstance(end, Finished)
    assert end.usage == Usage(5, 0, 4)


@pytest.mark.parametrize("time", [{}, {"time_ms": None}, {"time_ms": "7"}])
def test_a_progress_without_a_time_took_none(time: dict[str, object]) -> None:
    progress = {"total": 9, "cache": 1, "processed": 2, **time}
    assert read([event({"prompt_progress": progress})]) == [PromptProgress(9, 1, 2, 0.0)]


@pytest.mark.parametrize("details", [None, 7, [], "31"])
def test_a_usage_without_details_had_nothing_cached(details: object) -> None:
    usage = {"prompt_tokens": 32, "completion_tokens": 4, "prompt_tokens_details": details}
    *_, end = read([event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"])
    assert isinstance(end, Finished)
    assert end.usage == Usage(32, 0, 4)


def test_an_event_of_several_lines_is_one_event() -> None:
    events = read([b'event: x\nid: 7\ndata: {"content":\ndata: "a"}\nretry: 1\n\n'])
    assert text_of(events) == "a"


def test_data_needs_no_space_and_loses_one_at_most() -> None:
    assert text_of(read([b'data:{"content":"a"}\n\ndata:  {"content":"b"}\n\n'])) == "ab"


def feed_lines(lines: int, size: int) -> None:
    reader = AnswerReader()
    for _ in range(lines):
        assert list(reader.feed(b"data: " + b"x" * size + b"\n")) == []


def test_an_event_in_one_line_over_the_limit_is_too_large() -> None:
    reader = AnswerReader()
    with pytest.raises(AnswerTooLarge):
        list(reader.feed(b"data: " + b"x" * MAX_EVENT + b"\n"))


def test_an_event_in_many_lines_over_the_limit_is_too_large() -> None:
    feed_lines(15, 2**20)
    with pytest.raises(AnswerTooLarge):
        feed_lines(16, 2**20)


def test_many_events_that_are_together_over_the_limit_are_not_too_large() -> None:
    reader = AnswerReader()
    chunk = event({"content": "x" * 2**20})
    assert sum(len(text_of(reader.feed(chunk))) for _ in range(20)) == 20 * 2**20


def test_the_limit_of_an_event_is_exact_and_begins_anew_with_every_event() -> None:
    def lines_of(size: int) -> bytes:
        first, second = b'data: {"content":"a",', b'data: "stop":false}'
        return first + b"\n" + second + b" " * (size - len(first) - len(second)) + b"\n\n"

    reader = AnswerReader()
    for _ in range(3):
        assert text_of(reader.feed(lines_of(MAX_EVENT))) == "a"
    with pytest.raises(AnswerTooLarge):
        list(reader.feed(lines_of(MAX_EVENT + 1)))
