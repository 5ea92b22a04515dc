"""PURE. What is asked of a model, and the pieces in which the answer comes.

A `Request` is one general call: this path, this body. `completion_request` and `chat_request`
build the two that nearly everybody wants; any other JSON endpoint of llama-server is
`Request(path, body)`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import attrs

from llamatrio.errors import SpecificationError

MAX_TOKENS: Final = 1024
"""The bound of an answer, in tokens, where a request names none.

A bound is always sent: a request whose caller is gone before its first token can otherwise hold
its slot for ever (llama.cpp b11434, server-queue.cpp: a closed connection is noticed only while
nothing else produces results).
"""

_NATIVE: Final = ("n_predict", "max_tokens", "max_completion_tokens")

STREAMED: Final[Mapping[str, tuple[str, ...]]] = {
    "/completion": _NATIVE,
    "/completions": _NATIVE,
    "/infill": _NATIVE,
    "/v1/completions": _NATIVE,
    "/chat/completions": _NATIVE,
    "/v1/chat/completions": _NATIVE,
    "/responses": ("max_output_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
"""The endpoints that answer in pieces, each with the fields that bound its answer there
(llama.cpp b11434, tools/server/server.cpp, server-schema.cpp and server-chat.cpp)."""

# Each event then says how many tokens there are: a character may be made of several.
_COUNTED: Final[Mapping[str, object]] = {"timings_per_token": True}

_BOUNDS: Final = (*_NATIVE, "max_output_tokens")

_ALWAYS: Final[Mapping[str, object]] = {
    "stream": True,
    "return_progress": True,
    "stream_options": {"include_usage": True},
}

Message: TypeAlias = Mapping[str, object]
"""A chat message as OpenAI writes it: `role` and `content`, the latter with images if need be."""

_REFUSED: Final = {
    "n": "submit several requests instead",
    "n_cmpl": "submit several requests instead",
    "stream": "every answer that can be streamed is streamed",
    "return_progress": "progress is always asked for",
    "stream_options": "the usage is always asked for",
    "response_fields": "the mark at the end of an answer would be lost",
    "timeout": "use limits=Limits(total=...), or a cancel scope of Trio's",
    "deadline": "use limits=Limits(total=...), or a cancel scope of Trio's",
}


def _copied(
    body: Mapping[str, object] | Sequence[object],
) -> Mapping[str, object] | Sequence[object]:
    if isinstance(body, Mapping):
        return dict(body)
    if isinstance(body, Sequence) and not isinstance(body, str | bytes):
        return list(body)
    raise SpecificationError(f"a body is a JSON object or an array, not {body!r}")


@attrs.frozen(kw_only=True)
class Limits:
    """How long a request may take, in seconds. None for as long as it takes.

    A request that reaches one is cancelled: `Cancelled(by="deadline", limit=...)` names it.

    Attributes:
      queue: Waiting for a slot, the load of the model included.
      first_token: From its slot to the first piece of its answer.
      silence: From one piece to the next. A model that shows no sign of life at all is ended and
        loaded anew in any case; see `Policy.silence`.
      total: From `submit` to its end.
    """

    queue: float | None = None
    first_token: float | None = None
    silence: float | None = None
    total: float | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("queue", "first_token", "silence", "total"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and value > 0):
                raise SpecificationError(f"{name} is a number of seconds above 0, not {value!r}")


NO_LIMITS: Final = Limits()

OnCrash: TypeAlias = Literal["fail", "resume"]
"""What becomes of a running request when its model dies."""


@attrs.frozen
class Request:
    """One call of the model's server.

    An endpoint that can answer in pieces is always asked to, with progress and with a bound:
    only so can a running request be cancelled at once. Any other endpoint answers in one piece,
    which `outcome.body` then holds.

    Attributes:
      path: The endpoint, such as "/completion" or "/tokenize".
      body: The JSON object to send; a few endpoints, such as "/lora-adapters", want an array. GET
        sends none.
      method: "POST", or "GET" for the endpoints that only tell.
      limits: How long it may take.
      priority: Requests of a higher one get a slot first; among equals the older one.
      supersede: Any hashable key. A request cancels the one before it that has the same key and
        has not come to its end: the newest wins.
      on_crash: With "resume" a request that runs when its model dies is taken up again by the next
        one, where its answer broke off; but not if two die in a row without adding to it, for it
        may be what kills them. What follows need not be what the dead model would have said. Plain
        completions and chats alone can be taken up: not what follows a grammar, a schema or tools.
        `usage` counts the whole answer, `timings` what the last model did.

    Raises:
      SpecificationError: for a path that is none, a body that is not JSON, or a field that cannot
        be honoured.
    """

    path: str
    body: Mapping[str, object] | Sequence[object] = attrs.field(
        factory=dict, repr=False, converter=_copied
    )
    method: Literal["GET", "POST"] = "POST"
    limits: Limits = attrs.field(default=NO_LIMITS, kw_only=True, repr=False)
    priority: int = attrs.field(default=0, kw_only=True, repr=False)
    supersede: Hashable = attrs.field(default=None, kw_only=True, repr=False)
    on_crash: OnCrash = attrs.field(default="fail", kw_only=True, repr=False)
    encoded: bytes = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        if not re.fullmatch(r"/[!-~]*", self.path):
            raise SpecificationError(f"not an endpoint's path: {self.path!r}")
        if self.method not in ("GET", "POST"):
            raise SpecificationError(f"method must be GET or POST, not {self.method!r}")
        _check_options(self)
        object.__setattr__(self, "encoded", self._encode())

    @property
    def streamed(self) -> bool:
        """Whether the answer comes in pieces."""
        return self.method == "POST" and self.path in STREAMED

    def _encode(self) -> bytes:
        if self.method == "GET":
            return b""
        body = self.body
        if self.streamed:
            if not isinstance(body, Mapping):
                raise SpecificationError(f"the body of {self.path} is a JSON object")
            _refuse(body)
            body = {**body, **_bound(self.path, body), **_ALWAYS}
            if self.on_crash == "resume":
                body |= _COUNTED
        return _dumped(self.path, body)

    def encode_for(self, model: str | None, *, openai: bool) -> bytes:
        """Encode it for a server that somebody else owns.

        Args:
          model: What to name as the model where the body names none; None for nothing.
          openai: Whether to send nothing of ours that only llama-server knows.
        """
        body = self.body
        if self.method == "GET" or not isinstance(body, Mapping) or not (model or openai):
            return self.encoded
        if model is not None and "model" not in body:
            body = {"model": model, **body}
        if self.streamed:
            ours = {**_bound(self.path, body), **_ALWAYS}
            body = {**body, **(_plain(self.path, body) if openai else ours)}
        return _dumped(self.path, body)


def _dumped(path: str, body: Mapping[str, object] | Sequence[object]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as exc:
        raise SpecificationError(f"the body of {path} is not JSON: {exc}") from exc


def _plain(path: str, body: Mapping[str, object]) -> Mapping[str, object]:
    """Ask for a bounded stream in words that OpenAI knows; it refuses those that it does not."""
    names = STREAMED[path]
    older = names is _NATIVE  # the others tell the usage unasked
    fields: dict[str, object] = {"stream": True}
    if older:
        fields["stream_options"] = {"include_usage": True}
    if not any(name in body for name in names):
        fields["max_tokens" if older else names[0]] = MAX_TOKENS
    return fields


def _check_options(request: Request) -> None:
    if not isinstance(request.limits, Limits):
        raise SpecificationError(f"limits is a Limits, not {request.limits!r}")
    if not isinstance(request.priority, int) or isinstance(request.priority, bool):
        raise SpecificationError(f"priority is a whole number, not {request.priority!r}")
    try:
        hash(request.supersede)
    except TypeError as exc:
        raise SpecificationError(f"supersede is a hashable key: {exc}") from exc
    if request.on_crash not in ("fail", "resume"):
        raise SpecificationError(f'on_crash is "fail" or "resume", not {request.on_crash!r}')
    if request.on_crash == "resume":
        _check_resumable(request)


def _refuse(body: Mapping[str, object]) -> None:
    for name, reason in _REFUSED.items():
        if name in body:
            raise SpecificationError(f"{name} cannot be set: {reason}")
    prompt = body.get("prompt")
    if isinstance(prompt, list | tuple) and not any(isinstance(part, int) for part in prompt):
        # A list of texts is several prompts, whose answers would come mixed.
        raise SpecificationError("a prompt is one text or one list of tokens; submit several")


def _bound(path: str, body: Mapping[str, object]) -> Mapping[str, object]:
    given = {name: body[name] for name in _BOUNDS if name in body}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecificationError(f"{name} must be a number of at least 1, not {value!r}")
        if name not in STREAMED[path]:
            raise SpecificationError(f"{path} does not know {name}: use {STREAMED[path][0]}")
    if len(given) > 1:
        raise SpecificationError(f"more than one bound for the answer: {', '.join(given)}")
    return given or {STREAMED[path][0]: MAX_TOKENS}


def completion_request(
    prompt: str | Sequence[int],
    *,
    max_tokens: int = MAX_TOKENS,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    stop: str | Iterable[str] | None = None,
    grammar: str | None = None,
    json_schema: Mapping[str, object] | None = None,
    limits: Limits = NO_LIMITS,
    priority: int = 0,
    supersede: Hashable = None,
    on_crash: OnCrash = "fail",
    **fields: object,
) -> Request:
    """Ask the model to go on from a prompt, exactly as it stands.

    Args:
      prompt: The text, or its tokens.
      max_tokens: The bound of the answer, in tokens.
      temperature: How freely the next token is drawn; 0 takes the likeliest.
      top_p: Draw from the likeliest tokens that together reach this probability.
      top_k: Draw from this many of the likeliest tokens.
      min_p: Draw from tokens at least this likely, relative to the likeliest.
      seed: Makes the drawing repeatable.
      stop: Texts that end the answer; they are not part of it.
      grammar: A GBNF grammar that the answer must follow.
      json_schema: A schema that the answer must follow. Not together with `grammar`.
      limits: How long it may take; see `Limits`.
      priority: Who gets a slot first; see `Request`.
      supersede: A key: the newest request with it wins; see `Request`.
      on_crash: "resume" takes it up again after a crash; see `Request`.
      fields: Any other field of llama-server's `/completion`.

    Raises:
      SpecificationError: for a field that cannot be honoured.
    """
    body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), **fields}
    body |= _sampling(max_tokens, temperature, top_p, top_k, min_p, seed, stop)
    body |= _shape(grammar, json_schema)
    return Request(
        "/completion",
        body,
        limits=limits,
        priority=priority,
        supersede=supersede,
        on_crash=on_crash,
    )


def chat_request(
    messages: str | Iterable[Message],
    *,
    system: str | None = None,
    tools: Iterable[Mapping[str, object]] | None = None,
    max_tokens: int = MAX_TOKENS,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    stop: str | Iterable[str] | None = None,
    grammar: str | None = None,
    json_schema: Mapping[str, object] | None = None,
    limits: Limits = NO_LIMITS,
    priority: int = 0,
    supersede: Hashable = None,
    on_crash: OnCrash = "fail",
    **fields: object,
) -> Request:
    """Ask the model to answer in a conversation, through its chat template.

    Args:
      messages: The conversation so far, or one sentence of the user.
      system: A system message to put before it.
      tools: Tools that the model may call, as OpenAI describes them.
      max_tokens: The bound of the answer, in tokens.
      temperature: How freely the next token is drawn; 0 takes the likeliest.
      top_p: Draw from the likeliest tokens that together reach this probability.
      top_k: Draw from this many of the likeliest tokens.
      min_p: Draw from tokens at least this likely, relative to the likeliest.
      seed: Makes the drawing repeatable.
      stop: Texts that end the answer; they are not part of it.
      grammar: A GBNF grammar that the answer must follow.
      json_schema: A schema that the answer must follow. Not together with `grammar`.
      limits: How long it may take; see `Limits`.
      priority: Who gets a slot first; see `Request`.
      supersede: A key: the newest request with it wins; see `Request`.
      on_crash: "resume" takes it up again after a crash; see `Request`.
      fields: Any other field of llama-server's `/v1/chat/completions`.

    Raises:
      SpecificationError: for a field that cannot be honoured.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, Iterable) or isinstance(messages, Mapping):
        raise SpecificationError("messages is a list of objects, or one sentence of the user")
    conversation = [_message(message) for message in messages]
    if system is not None:
        conversation.insert(0, {"role": "system", "content": system})
    body: dict[str, object] = {"messages": conversation, **fields}
    body |= _sampling(max_tokens, temperature, top_p, top_k, min_p, seed, stop)
    body |= _shape(grammar, json_schema)
    if tools is not None:
        body["tools"] = [dict(tool) for tool in tools]
    return Request(
        "/v1/chat/completions",
        body,
        limits=limits,
        priority=priority,
        supersede=supersede,
        on_crash=on_crash,
    )


def _message(message: object) -> Message:
    if not isinstance(message, Mapping):
        raise SpecificationError(
            f"messages is a list of objects with `role` and `content`; {message!r} is none"
        )
    return dict(message)


def _sampling(
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    seed: int | None,
    stop: str | Iterable[str] | None,
) -> dict[str, object]:
    stops = [stop] if isinstance(stop, str) else None if stop is None else list(stop)
    chosen = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stops,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def _shape(grammar: str | None, json_schema: Mapping[str, object] | None) -> dict[str, object]:
    if grammar is not None and json_schema is not None:
        raise SpecificationError("an answer follows a grammar or a json_schema, not both")
    if grammar is not None:
        return {"grammar": grammar}
    if json_schema is None:
        return {}
    if not isinstance(json_schema, Mapping):
        raise SpecificationError(f"json_schema is an object, not {json_schema!r}")
    return {"json_schema": dict(json_schema)}


# -- taking one up again -----------------------------------------------------------------------

_COMPLETIONS: Final = ("/completion", "/completions", "/v1/completions")
_CHATS: Final = ("/chat/completions", "/v1/chat/completions")
_SHAPED: Final = ("grammar", "json_schema", "response_format", "tools")


def _check_resumable(request: Request) -> None:
    if request.method != "POST" or request.path not in (*_COMPLETIONS, *_CHATS):
        raise SpecificationError(f"an answer of {request.path} cannot be taken up again")
    body = request.body if isinstance(request.body, Mapping) else {}
    for name in _SHAPED:
        if body.get(name):
            raise SpecificationError(f"an answer with {name} cannot be taken up again")
    kinds = (list, tuple) if request.path in _CHATS else (str, list, tuple)
    name = "messages" if request.path in _CHATS else "prompt"
    if not isinstance(body.get(name), kinds):
        wanted = "a list" if request.path in _CHATS else "a text or a list"
        raise SpecificationError(f"there is nothing to go on from: {name} must be {wanted}")
    match body.get("messages"):
        case [*_, {"role": "assistant"}]:
            raise SpecificationError("an answer that was begun for it cannot be taken up again")
        case _:
            pass


def take_up(request: Request, text: str, tokens: int) -> Request | None:
    """Ask a new model to go on where an answer broke off.

    The text goes back, and not its tokens: a character of several tokens, and what may yet become
    a stop string, are held back by the server, so that tokens would leave gaps.

    Args:
      request: What had been asked; it says `on_crash="resume"`.
      text: The answer so far.
      tokens: How many tokens of it there are.

    Returns:
      What to ask now; None if the answer had reached its bound.
    """
    assert isinstance(request.body, Mapping)
    bounds = STREAMED[request.path]
    name = next((name for name in bounds if name in request.body), bounds[0])
    bound = request.body.get(name, MAX_TOKENS)
    assert isinstance(bound, int)
    if tokens >= bound:
        return None
    begun = _with_prompt if request.path in _COMPLETIONS else _with_message
    body = {**begun(request.body, text), name: bound - tokens, **_COUNTED}
    return attrs.evolve(request, body=body, on_crash="fail")


def _with_prompt(body: Mapping[str, object], text: str) -> dict[str, object]:
    prompt = body.get("prompt", "")
    if isinstance(prompt, list | tuple):
        return {**body, "prompt": [*prompt, text] if text else list(prompt)}
    return {**body, "prompt": f"{prompt}{text}"}


def _with_message(body: Mapping[str, object], text: str) -> dict[str, object]:
    if not text:
        return dict(body)
    messages = body.get("messages")
    assert isinstance(messages, list | tuple)
    begun = {"role": "assistant", "content": text}
    # Without this pair b11434 says the beginning once more; later builds do not.
    go_on = {"continue_final_message": True, "add_generation_prompt": False}
    return {**body, "messages": [*messages, begun], **go_on}


# -- the answer --------------------------------------------------------------------------------


@attrs.frozen
class Delta:
    """One piece of an answer.

    Attributes:
      text: The text of it; may be empty.
      reasoning: Thoughts of a reasoning model, where they are kept apart.
      tool_calls: Parts of tool calls, as the endpoint streams them.
      logprobs: Log probabilities, where they were asked for.
      data: The event as it arrived, JSON in UTF-8.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, object], ...] = ()
    logprobs: object = None
    data: bytes = attrs.field(default=b"{}", repr=False)

    @property
    def raw(self) -> object:
        """The event as it arrived, parsed anew at each call."""
        return json.loads(self.data)

    @property
    def generated(self) -> int | None:
        """How many tokens the model had made by then, if the event says so."""
        match self.raw:
            case {"timings": {"predicted_n": int(number)}}:
                return number
            case _:
                return None


@attrs.frozen
class PromptProgress:
    """How much of a prompt has been read.

    Attributes:
      total: Tokens of the prompt.
      cached: Those of them that were still in the cache.
      processed: Those that are done, the cached ones included.
      seconds: Time spent on it so far.
    """

    total: int
    cached: int
    processed: int
    seconds: float


@attrs.frozen
class Admitted:
    """The model's server has begun with the request. Not every session says so."""
