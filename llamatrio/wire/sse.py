"""PURE. A streamed answer: bytes to pieces, and the mark that says that it is complete.

llama-server streams server-sent events whose data is JSON, in three dialects (b11434,
tools/server/server-task.cpp and server-context.cpp):

* `/completion` and `/infill` end with an event that has `"stop": true`, and no `[DONE]`;
* OpenAI's completions and chat end with `data: [DONE]`;
* `/v1/responses` and `/v1/messages` name their last event, `response.completed` and
  `message_stop`.

A stream without its mark is broken, however cleanly the connection was closed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

from llamatrio.errors import AnswerTooLarge, BadAnswer, ContextExceeded, RequestRefused
from llamatrio.outcomes import Finished, Reason, Usage
from llamatrio.requests import Delta, PromptProgress
from llamatrio.wire.lines import Line, LineSplitter, Oversize

MAX_EVENT: Final = 16 * 2**20
"""Bytes of one event. The largest that llama.cpp sends is the last of `/completion`, which repeats
the prompt."""

Event: TypeAlias = Delta | PromptProgress | Finished

_REASONS: Final[Mapping[object, Reason]] = {
    "limit": "length",
    "length": "length",
    "max_tokens": "length",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
}
_DONE: Final = b"[DONE]"
_LAST_EVENTS: Final = ("response.completed", "message_stop")


class AnswerReader:
    """Reads one streamed answer, however it is chunked."""

    def __init__(self) -> None:
        self._lines = LineSplitter(MAX_EVENT)
        self._data: list[bytes] = []
        self._size = 0  # of the event so far
        self._reason: Reason = "stop"
        self._usage = Usage()
        self._timings: Mapping[str, float] = {}
        self._finished = False

    def feed(self, data: bytes) -> Iterator[Event]:
        """Take the next bytes and give what they complete.

        `Finished` comes once, at the terminal mark; whatever follows it is ignored.

        Raises:
          RequestRefused: if the server reports an error inside the stream.
          BadAnswer: if an event is not JSON, or not of a form that llama-server sends.
          AnswerTooLarge: if an event is larger than `MAX_EVENT`.
        """
        for line in self._lines.feed(data):
            if self._finished:
                return
            if isinstance(line, Oversize):
                raise _too_large(line.size)
            yield from self._line(line)

    def _line(self, line: Line) -> Iterator[Event]:
        if line.data.startswith(b"data:"):
            self._data.append(line.data[5:].removeprefix(b" "))
            self._size += len(line.data)
            if self._size > MAX_EVENT:
                raise _too_large(self._size)
        elif not line.data and self._data:
            data = b"\n".join(self._data)
            self._data.clear()
            self._size = 0
            yield from self._event(data)

    def _event(self, data: bytes) -> Iterator[Event]:
        if data == _DONE:
            yield self._finish()
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise BadAnswer(f"an event of the answer is not JSON: {exc}") from exc
        if not isinstance(event, dict):
            raise BadAnswer(f"an event of the answer is no object but {type(event).__name__}")
        try:
            yield from self._object(event, data)
        except (AttributeError, IndexError, TypeError, ValueError) as exc:
            raise BadAnswer(f"an event of the answer has an unknown form: {exc}") from exc

    def _object(self, event: dict[str, object], data: bytes) -> Iterator[Event]:
        error = event if "code" in event else event.get("error")  # `/v1/messages` sends it bare
        if isinstance(error, dict):
            raise refusal(0, error)
        progress = event.get("prompt_progress")
        if isinstance(progress, dict):
            yield _progress(progress)
        self._account(event)
        delta = _delta(event, data)
        if delta.text or delta.reasoning or delta.tool_calls or delta.logprobs:
            yield delta
        if event.get("stop") is True or event.get("type") in _LAST_EVENTS:
            yield self._finish()

    def _account(self, event: Mapping[str, object]) -> None:
        """Keep what the end of the answer will tell: it comes in several events."""
        if isinstance(timings := event.get("timings"), dict):
            self._timings = timings
        for holder in (event, event.get("response"), event.get("message")):
            if isinstance(holder, dict) and isinstance(usage := holder.get("usage"), dict):
                self._usage = _usage(usage, self._usage)
        if event.get("stop") is True:
            self._usage = _native_usage(event)
            self._reason = _REASONS.get(event.get("stop_type"), "stop")
        if isinstance(delta := event.get("delta"), dict) and delta.get("stop_reason"):
            self._reason = _REASONS.get(delta["stop_reason"], "stop")
        if isinstance(item := event.get("item"), dict) and item.get("type") == "function_call":
            self._reason = "tool_calls"  # `/v1/responses` gives no reason
        if (choice := _choice(event)) and choice.get("finish_reason"):
            self._reason = _REASONS.get(choice["finish_reason"], "stop")

    def _finish(self) -> Finished:
        self._finished = True
        return Finished(self._reason, self._usage, self._timings)


def _too_large(size: int) -> AnswerTooLarge:
    return AnswerTooLarge(f"an event of {size} bytes or more; {MAX_EVENT} is the limit")


def refusal(status: int, error: Mapping[str, object]) -> RequestRefused:
    """Make the exception for llama-server's error object (server-common.cpp)."""
    kind, message = str(error.get("type", "error")), str(error.get("message", "no message"))
    if kind == "exceed_context_size_error":
        return ContextExceeded(status, kind, message, error)
    return RequestRefused(status, kind, message, error)


def _choice(event: Mapping[str, object]) -> Mapping[str, object] | None:
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return None
    return choices[0] if isinstance(choices[0], dict) else None


def _delta(event: Mapping[str, object], data: bytes) -> Delta:
    if choice := _choice(event):
        part = choice.get("delta")
        if not isinstance(part, dict):
            part = {"content": choice.get("text")}
        calls = part.get("tool_calls")
        return Delta(
            _text(part.get("content")),
            _text(part.get("reasoning_content")),
            tuple(calls) if isinstance(calls, list) else (),
            choice.get("logprobs"),
            data,
        )
    match event:
        case {"content": str(text)}:
            return Delta(text, logprobs=event.get("completion_probabilities"), data=data)
        case {"type": "response.output_text.delta", "delta": str(text)}:
            return Delta(text, data=data)
        case {"type": "response.reasoning_text.delta", "delta": str(text)}:
            return Delta(reasoning=text, data=data)
        case {"delta": {"type": "text_delta", "text": str(text)}}:
            return Delta(text, data=data)
        case {"delta": {"type": "thinking_delta", "thinking": str(text)}}:
            return Delta(reasoning=text, data=data)
        case (
            {"delta": {"type": "input_json_delta"}}
            | {"content_block": {"type": "tool_use"}}
            | {"type": "response.function_call_arguments.delta"}
            | {"type": "response.output_item.added", "item": {"type": "function_call"}}
        ):
            return Delta(tool_calls=(event,), data=data)
        case _:
            return Delta(data=data)


def _text(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"a text that is {value!r}")
    return value


def _progress(progress: Mapping[str, object]) -> PromptProgress:
    total, cached, processed = (_count(progress, name) for name in ("total", "cache", "processed"))
    milliseconds = progress.get("time_ms")
    seconds = milliseconds / 1000 if isinstance(milliseconds, int | float) else 0.0
    return PromptProgress(total, cached, processed, seconds)


def _usage(usage: Mapping[str, object], before: Usage) -> Usage:
    """Read OpenAI's form, and Anthropic's, which comes in two parts and counts apart."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else 0
    apart = _count(usage, "cache_read_input_tokens")
    prompt = _count(usage, "prompt_tokens", "input_tokens")
    return Usage(
        prompt + apart if prompt else before.prompt,
        cached or apart or before.cached,
        _count(usage, "completion_tokens", "output_tokens") or before.completion,
    )


def _native_usage(event: Mapping[str, object]) -> Usage:
    timings = event.get("timings")
    cached = _count(timings, "cache_n") if isinstance(timings, dict) else 0
    return Usage(_count(event, "tokens_evaluated"), cached, _count(event, "tokens_predicted"))


def _count(counts: Mapping[str, object], *names: str) -> int:
    for name in names:
        if isinstance(value := counts.get(name), int):
            return value
    return 0
