"""PURE. What a request asks of a model in this process: each field is honoured or refused by name.

The fields and their defaults are those of llama-server (b11434, tools/server/server-schema.cpp and
common/common.h), as far as the public functions of llama.h can do what they say. What a model's
file recommends for its sampling is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeAlias

import attrs

from llamatrio.errors import RequestRefused
from llamatrio.requests import MAX_TOKENS

Prompt: TypeAlias = tuple[str | int, ...]
"""Texts and tokens, one after another."""


@attrs.frozen
class Sampling:
    """How the tokens of an answer are drawn, and when it ends.

    Attributes:
      max_tokens: Its bound.
      temperature: How freely a token is drawn; 0 takes the likeliest.
      top_k: Draw from this many of the likeliest; 0 from all.
      top_p: Draw from the likeliest that together reach this probability.
      min_p: Draw from those at least this likely, relative to the likeliest.
      typical_p: Locally typical sampling; 1.0 for none.
      repeat_penalty: Divides what was said of late; 1.0 for none.
      repeat_last_n: How many tokens "of late" are.
      presence_penalty: Taken from what was said at all.
      frequency_penalty: Taken from it for each time.
      seed: Makes the drawing repeatable.
      logit_bias: Added to the logits of tokens.
      ignore_eos: Whether to go on where the model would end.
      grammar: A GBNF grammar; empty for none.
      stop: Texts that end the answer.
      cache_prompt: Whether what the slot remembers may be used.
    """

    max_tokens: int = MAX_TOKENS
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0xFFFFFFFF  # llama.h, LLAMA_DEFAULT_SEED: another one each time
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    stop: tuple[str, ...] = ()
    cache_prompt: bool = True

    @property
    def penalized(self) -> bool:
        """Whether what was said counts."""
        some = self.presence_penalty or self.frequency_penalty or self.repeat_penalty != 1.0
        return bool(some) and self.repeat_last_n > 0


@attrs.frozen
class Completion:
    """A completion that is asked for.

    Attributes:
      prompt: From what to go on.
      sampling: How.
    """

    prompt: Prompt
    sampling: Sampling


@attrs.frozen
class Chat:
    """An answer in a conversation that is asked for.

    Attributes:
      messages: Roles and texts.
      begun: What there is of the answer already, to be gone on from; None for nothing.
      sampling: How.
    """

    messages: tuple[tuple[str, str], ...]
    begun: str | None
    sampling: Sampling


# -- fields ------------------------------------------------------------------------------------


def refuse(message: str) -> RequestRefused:
    """Make the error for a field that cannot be honoured."""
    return RequestRefused(400, "invalid_request_error", message)


_DEEPEST: Final = 1000
_GREATEST: Final = 3.4e38  # of a float of the library


def _whole(name: str, value: object, least: int, most: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise refuse(f"{name} is a whole number of at least {least}, not {value!r}")
    return value


def _number(name: str, value: object, least: float, most: float = _GREATEST) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise refuse(f"{name} is a number of at least {least:g}, not {value!r}")
    return float(value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise refuse(f"{name} is true or false, not {value!r}")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise refuse(f"{name} is a text without NUL, not {value!r}")
    unbroken(name, value)
    return value


def unbroken(name: str, text: str) -> None:
    """Refuse a text with half of a surrogate pair, which no UTF-8 can tell."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise refuse(f"{name} holds half a character: {exc.reason}") from exc


def _grammar(name: str, value: object) -> str:
    text = _text(name, value)
    depths = accumulate((letter == "(") - (letter == ")") for letter in text)
    if max(depths, default=0) > _DEEPEST:  # the library's parser calls itself for each
        raise refuse(f"{name} is nested more than {_DEEPEST} deep")
    return text


def _texts(name: str, value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise refuse(f"{name} is a text or a list of texts, not {value!r}")
    return tuple(item for item in items if item)


def _seed(name: str, value: object) -> int:
    return _whole(name, value, -1, 2**32 - 1) & 0xFFFFFFFF


def _biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(pairs, Sequence) and not isinstance(value, Mapping):
        raise refuse(f"{name} is a list of pairs of a token and a number, not {value!r}")
    try:
        return tuple(_bias(name, token, bias) for token, bias in pairs)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as exc:
        raise refuse(f"{name} is a list of pairs of a token and a number, not {value!r}") from exc


def _bias(name: str, token: object, bias: object) -> tuple[int, float]:
    number = int(token) if isinstance(token, str) and token.isdigit() else token
    _whole(f"a token of {name}", number, 0)
    assert isinstance(number, int)
    return number, -math.inf if bias is False else _number(f"a bias of {name}", bias, -_GREATEST)


_FIELDS: Final[Mapping[str, tuple[str, Callable[[str, object], object]]]] = {
    "n_predict": ("max_tokens", lambda name, value: _whole(name, value, 1)),
    "max_tokens": ("max_tokens", lambda name, value: _whole(name, value, 1)),
    "max_completion_tokens": ("max_tokens", lambda name, value: _whole(name, value, 1)),
    "temperature": ("temperature", lambda name, value: _number(name, value, 0)),
    "top_k": ("top_k", lambda name, value: _whole(name, value, 0)),
    "top_p": ("top_p", lambda name, value: _number(name, value, 0, 1)),
    "min_p": ("min_p", lambda name, value: _number(name, value, 0, 1)),
    "typical_p": ("typical_p", lambda name, value: _number(name, value, 0, 1)),
    "repeat_penalty": ("repeat_penalty", lambda name, value: _number(name, value, 1e-6)),
    "repeat_last_n": ("repeat_last_n", lambda name, value: _whole(name, value, 0)),
    "presence_penalty": ("presence_penalty", lambda name, value: _number(name, value, -2, 2)),
    "frequency_penalty": ("frequency_penalty", lambda name, value: _number(name, value, -2, 2)),
    "seed": ("seed", _seed),
    "logit_bias": ("logit_bias", _biases),
    "ignore_eos": ("ignore_eos", _flag),
    "grammar": ("grammar", _grammar),
    "stop": ("stop", _texts),
    "cache_prompt": ("cache_prompt", _flag),
}

_OURS: Final = ("timings_per_token",)  # it is always told
_CHAT: Final = ("messages", "add_generation_prompt", "continue_final_message")


def _sampling(body: Mapping[str, object], seed: int | None, own: Sequence[str]) -> Sampling:
    chosen: dict[str, object] = {} if seed is None else {"seed": seed}
    for name, value in body.items():
        if name in own or name in _OURS:
            continue
        if name not in _FIELDS:
            raise refuse(f"a model in this process does not know the field {name!r}")
        if value is not None:
            field, read = _FIELDS[name]
            chosen[field] = read(name, value)
    return Sampling(**chosen)  # type: ignore[arg-type]


def parse_completion(body: Mapping[str, object], seed: int | None) -> Completion:
    """Read the body of `/completion`.

    Args:
      body: The body.
      seed: The seed where it names none; None for another one each time.

    Raises:
      RequestRefused: names the field.
    """
    prompt = body.get("prompt")
    parts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(parts, Sequence):
        raise refuse(f"prompt is a text or a list of tokens, not {prompt!r}")
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int):
            raise refuse(f"prompt is a text or a list of tokens; {part!r} is neither")
        if isinstance(part, str):
            unbroken("prompt", part)
    return Completion(tuple(parts), _sampling(body, seed, ("prompt",)))


def parse_chat(body: Mapping[str, object], seed: int | None) -> Chat:
    """Read the body of `/v1/chat/completions`.

    Args:
      body: The body.
      seed: The seed where it names none; None for another one each time.

    Raises:
      RequestRefused: names the field.
    """
    messages = body.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise refuse("messages is a list of at least one object")
    conversation = [_message(message) for message in messages]
    goes_on = _flag("continue_final_message", body.get("continue_final_message", False))
    # What begins an answer is there if and only if none is begun.
    if _flag("add_generation_prompt", body.get("add_generation_prompt", not goes_on)) is goes_on:
        raise refuse("add_generation_prompt is the opposite of continue_final_message")
    begun: str | None = None
    if goes_on:
        role, begun = conversation.pop()
        if role != "assistant" or not conversation:
            raise refuse("continue_final_message wants an answer to go on from")
    return Chat(tuple(conversation), begun, _sampling(body, seed, _CHAT))


def _message(message: object) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise refuse(f"a message is an object, not {message!r}")
    if others := set(message) - {"role", "content"}:
        raise refuse(f"a model in this process does not know {min(others)!r} of a message")
    role, content = message.get("role"), message.get("content")
    return _text("the role of a message", role), _content(content)


def _content(content: object) -> str:
    if isinstance(content, str):
        return _text("the content of a message", content)
    if isinstance(content, Sequence):
        return "".join(_part(part) for part in content)
    raise refuse(f"the content of a message is a text, not {content!r}")


def _part(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return _text("the content of a message", text)
        case _:
            raise refuse("a model in this process reads messages of text alone")
