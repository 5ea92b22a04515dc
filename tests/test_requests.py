from __future__ import annotations

import json
import math
from typing import Any

import attrs
import pytest

from llamatrio.errors import SpecificationError
from llamatrio.requests import (
    MAX_TOKENS,
    NO_LIMITS,
    STREAMED,
    Delta,
    Limits,
    Request,
    chat_request,
    completion_request,
    take_up,
)

BOUNDS = ["n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens"]
ALWAYS = {"stream": True, "return_progress": True, "stream_options": {"include_usage": True}}


def sent(request: Request) -> dict[str, Any]:
    """What reaches the server, but for what every streamed request has."""
    body: dict[str, Any] = json.loads(request.encoded)
    assert ALWAYS.items() <= body.items()
    return {name: value for name, value in body.items() if name not in ALWAYS}


# -- what is always sent -----------------------------------------------------------------------


@pytest.mark.parametrize("path", STREAMED)
def test_a_streamed_request_without_a_bound_is_sent_with_one(path: str) -> None:
    request = Request(path, {"prompt": "x"})
    assert request.streamed
    assert sent(request) == {"prompt": "x", STREAMED[path][0]: MAX_TOKENS}


@pytest.mark.parametrize("path", STREAMED)
def test_a_bound_under_a_name_that_the_endpoint_knows_is_sent_as_it_is(path: str) -> None:
    for bound in STREAMED[path]:
        assert sent(Request(path, {bound: 7})) == {bound: 7}


@pytest.mark.parametrize("path", STREAMED)
def test_a_bound_that_the_endpoint_would_not_heed_is_refused_by_name(path: str) -> None:
    for bound in set(BOUNDS) - set(STREAMED[path]):
        with pytest.raises(SpecificationError, match=f"{path} does not know {bound}: use "):
            Request(path, {bound: 7})


@pytest.mark.parametrize("prompt", [["one", "two"], ["one"], [[1, 2], [3]], []])
def test_a_list_of_prompts_is_refused(prompt: object) -> None:
    for path in ("/completion", "/v1/completions"):
        with pytest.raises(SpecificationError, match="a prompt is one text or one list of tokens"):
            Request(path, {"prompt": prompt})


def test_a_prompt_of_tokens_and_texts_is_one_prompt() -> None:
    for prompt in ([1, 2, 3], [1, "and", 2]):
        Request("/completion", {"prompt": prompt})


def test_two_bounds_are_refused_even_if_they_agree() -> None:
    with pytest.raises(SpecificationError, match=r"bound .*: n_predict, max_tokens"):
        Request("/completion", {"n_predict": 5, "max_tokens": 5})


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "7", None, math.inf, [7]])
def test_a_bound_that_bounds_nothing_is_refused_by_name(value: object) -> None:
    for bound in BOUNDS:
        with pytest.raises(SpecificationError, match=f"^{bound} must be a number of at least 1"):
            Request("/completion", {bound: value})


@pytest.mark.parametrize(
    "field", ["n", "n_cmpl", "stream", "return_progress", "stream_options", "response_fields"]
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(field: str) -> None:
    for path in STREAMED:
        values: tuple[object, ...] = (True, False, 1, None, {})
        for value in values:
            with pytest.raises(SpecificationError, match=f"^{field} cannot be set: "):
                Request(path, {field: value})


# -- what is sent as it stands -----------------------------------------------------------------


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings", "/rerank", "/", "/completion/"])
def test_a_request_that_is_not_streamed_is_sent_as_it_stands(path: str) -> None:
    body = {"content": "x", "n": 2, "stream": False, "max_tokens": -1}
    request = Request(path, body)
    assert not request.streamed
    assert json.loads(request.encoded) == body


def test_an_array_is_a_body_where_an_endpoint_is_not_streamed() -> None:
    request = Request("/lora-adapters", [{"id": 0, "scale": 0.5}])
    assert json.loads(request.encoded) == [{"id": 0, "scale": 0.5}]
    for path in STREAMED:
        with pytest.raises(SpecificationError, match="is a JSON object"):
            Request(path, [{"prompt": "x"}])


@pytest.mark.parametrize("body", ["text", b"bytes", 7, None, True])
def test_what_is_neither_object_nor_array_is_no_body(body: Any) -> None:  # noqa: ANN401 - wrong
    with pytest.raises(SpecificationError, match="a body is a JSON object or an array"):
        Request("/tokenize", body)


def test_get_sends_no_body_and_is_not_streamed() -> None:
    request = Request("/v1/completions", {"prompt": "x"}, method="GET")
    assert request.encoded == b""
    assert not request.streamed


def test_any_other_field_of_an_endpoint_is_sent_as_it_is() -> None:
    body = {"prompt": "x", "cache_prompt": False, "logit_bias": [[15, 0.5]], "é": "ü\0\n"}
    assert sent(Request("/completion", body)) == {**body, "n_predict": MAX_TOKENS}


def test_a_request_does_not_change_with_the_body_it_was_made_from() -> None:
    body = {"prompt": "x"}
    request = Request("/completion", body)
    body["prompt"] = "y"
    assert request.body == {"prompt": "x"}
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        request.path = "/x"  # type: ignore[misc]


def test_a_prompt_is_in_no_repr() -> None:
    request = completion_request("my secret diary")
    assert "diary" not in repr(request)
    assert repr(request) == "Request(path='/completion', method='POST')"


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "",
        "completion",
        "http://elsewhere/completion",
        "/a b",
        "/completion HTTP/1.1\r\nX-Evil: 1",
        "/completion\n",
        "/\0",
        "/é",
        "/\x7f",
        " /completion",
    ],
)
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(SpecificationError, match="not an endpoint's path"):
        Request(path)


@pytest.mark.parametrize("method", ["get", "PUT", "DELETE", "", "POST "])
def test_another_method_is_refused(method: Any) -> None:  # noqa: ANN401 - wrong on purpose
    with pytest.raises(SpecificationError, match="method must be GET or POST"):
        Request("/x", {}, method)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, b"bytes", {1, 2}, object, {("a", 1): 2}, [[math.nan]]],
    ids=repr,
)
def test_a_body_that_is_not_json_is_refused(value: object) -> None:
    for path in ("/completion", "/tokenize"):
        with pytest.raises(SpecificationError, match=f"the body of {path} is not JSON"):
            Request(path, {"field": value})


def test_a_body_that_contains_itself_is_refused() -> None:
    body: dict[str, object] = {}
    body["self"] = body
    with pytest.raises(SpecificationError, match="not JSON"):
        Request("/tokenize", {"field": body})


def test_a_body_that_is_nested_without_end_is_refused() -> None:
    body: list[object] = []
    for _ in range(100_000):
        body = [body]
    with pytest.raises(SpecificationError, match="not JSON"):
        Request("/tokenize", {"field": body})


# -- the two builders --------------------------------------------------------------------------


def test_a_completion_of_a_bare_prompt() -> None:
    request = completion_request("Hello")
    assert request.path == "/completion"
    assert sent(request) == {"prompt": "Hello", "max_tokens": MAX_TOKENS}


def test_a_prompt_may_be_tokens() -> None:
    assert sent(completion_request((1, 2, 3)))["prompt"] == [1, 2, 3]


SAMPLING: dict[str, Any] = {
    "max_tokens": 5,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 1,
    "min_p": 0.0,
    "seed": 0,
}


@pytest.mark.parametrize("build", [completion_request, chat_request])
def test_every_way_of_sampling_is_sent_zero_included(build: Any) -> None:  # noqa: ANN401 - both
    body = sent(build("x", **SAMPLING, stop=("a", "b"), cache_prompt=False))
    assert body.items() >= (SAMPLING | {"cache_prompt": False}).items()
    assert body["stop"] == ["a", "b"]
    assert sent(build("x", stop="end"))["stop"] == ["end"]
    assert sent(build("x", stop=iter("ab")))["stop"] == ["a", "b"]
    assert sent(build("x", grammar="root ::= 'a'"))["grammar"] == "root ::= 'a'"
    assert sent(build("x", json_schema={"type": "object"}))["json_schema"] == {"type": "object"}


@pytest.mark.parametrize("build", [completion_request, chat_request])
def test_a_builder_refuses_what_a_request_refuses(build: Any) -> None:  # noqa: ANN401 - both
    with pytest.raises(SpecificationError, match="a grammar or a json_schema, not both"):
        build("x", grammar="g", json_schema={})
    with pytest.raises(SpecificationError, match="n cannot be set"):
        build("x", n=2)
    with pytest.raises(SpecificationError, match="more than one bound"):
        build("x", n_predict=5)
    with pytest.raises(SpecificationError, match="max_tokens must be"):
        build("x", max_tokens=0)
    with pytest.raises(SpecificationError, match="not JSON"):
        build("x", temperature=math.nan)


def test_a_chat_of_one_sentence_is_one_message_of_the_user() -> None:
    request = chat_request("Hi", system="Be brief.")
    assert request.path == "/v1/chat/completions"
    assert sent(request)["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_a_chat_of_messages_keeps_them_and_leaves_the_callers_alone() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    request = chat_request(iter(messages), system="Look.")
    assert sent(request)["messages"] == [{"role": "system", "content": "Look."}, *messages]
    assert len(messages) == 2


def test_tools_are_sent_and_an_empty_list_of_them_too() -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    body = sent(chat_request("x", tools=[tool], tool_choice="required"))
    assert (body["tools"], body["tool_choice"]) == ([tool], "required")
    assert sent(chat_request("x", tools=[]))["tools"] == []
    assert "tools" not in sent(chat_request("x"))


def test_a_piece_parses_the_event_that_it_came_from() -> None:
    assert Delta("a", data=b'{"content":"a"}').raw == {"content": "a"}
    assert Delta().raw == {}


@pytest.mark.parametrize("messages", [{"role": "user", "content": "x"}, ["hello"], [1]])
def test_messages_that_are_none_are_refused(messages: object) -> None:
    with pytest.raises(SpecificationError, match="messages is a list of objects"):
        chat_request(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "generated"),
    [
        (b'{"content":"a","timings":{"predicted_n":7,"predicted_ms":1.5}}', 7),
        (b'{"content":"a","timings":{}}', None),
        (b'{"content":"a","timings":{"predicted_n":"7"}}', None),
        (b'{"content":"a"}', None),
        (b"[]", None),
    ],
)
def test_a_piece_says_how_many_tokens_there_were_if_its_event_does(
    data: bytes, generated: int | None
) -> None:
    assert Delta("a", data=data).generated == generated


# -- limits, priority, and the rest of what is not sent ----------------------------------------

LIMITS = [field.name for field in attrs.fields(Limits)]


def limits_with(**values: Any) -> Limits:  # noqa: ANN401 - wrong on purpose
    return Limits(**values)


def request_with(**options: Any) -> Request:  # noqa: ANN401 - wrong on purpose
    return Request("/completion", {"prompt": "x"}, **options)


def test_without_limits_a_request_may_take_as_long_as_it_takes() -> None:
    assert completion_request("x").limits is NO_LIMITS
    assert attrs.asdict(NO_LIMITS) == dict.fromkeys(LIMITS)


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_is_a_number_of_seconds(name: str) -> None:
    for good in (1, 0.001, 1e9, math.inf, None):
        assert getattr(limits_with(**{name: good}), name) == good
    for bad in (0, -1, -0.5, math.nan, True, False, "3", [3]):
        with pytest.raises(
            SpecificationError, match=f"^{name} is a number of seconds above 0, not "
        ):
            limits_with(**{name: bad})


def test_limits_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        Limits(3)  # type: ignore[call-arg]


@pytest.mark.parametrize("limits", [3, None, {"total": 3}, "3", Limits])
def test_what_is_no_limits_is_refused(limits: object) -> None:
    with pytest.raises(SpecificationError, match=r"^limits is a Limits, not "):
        request_with(limits=limits)


@pytest.mark.parametrize("priority", [1.0, "1", None, [1]])
def test_a_priority_that_is_no_whole_number_is_refused(priority: object) -> None:
    for whole in (-(10**9), 0, 7):
        assert request_with(priority=whole).priority == whole
    with pytest.raises(SpecificationError, match=r"^priority is a whole number, not "):
        request_with(priority=priority)


@pytest.mark.parametrize("key", [[], {}, set(), ([],)], ids=repr)
def test_a_key_that_cannot_be_hashed_is_refused(key: object) -> None:
    for good in ("editor", 7, ("a", 1), frozenset("ab"), object(), None):
        assert request_with(supersede=good).supersede == good
    with pytest.raises(SpecificationError, match=r"^supersede is a hashable key: "):
        request_with(supersede=key)


@pytest.mark.parametrize("value", ["Resume", "", None, True, 1])
def test_what_is_to_be_done_after_a_crash_is_one_of_two(value: object) -> None:
    with pytest.raises(SpecificationError, match=r'^on_crash is "fail" or "resume", not '):
        request_with(on_crash=value)


OPTIONS: dict[str, Any] = {
    "limits": Limits(queue=1, total=2),
    "priority": 7,
    "supersede": "editor",
    "on_crash": "resume",
}


@pytest.mark.parametrize("build", [completion_request, chat_request])
def test_options_are_kept_and_are_no_part_of_the_body(build: Any) -> None:  # noqa: ANN401 - both
    request, plain = build("x", **OPTIONS), build("x")
    assert {name: getattr(request, name) for name in OPTIONS} == OPTIONS
    assert request.body == plain.body
    assert sent(request) == {**sent(plain), "timings_per_token": True}
    assert sent(build("x", **OPTIONS | {"on_crash": "fail"})) == sent(plain)


def test_options_are_in_no_repr_and_count_when_requests_are_compared() -> None:
    request = request_with(**OPTIONS)
    assert repr(request) == "Request(path='/completion', method='POST')"
    assert request == request_with(**OPTIONS)
    for name in OPTIONS:
        assert request != request_with(**{key: OPTIONS[key] for key in OPTIONS if key != name})


def test_options_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        Request("/completion", {}, "POST", Limits())  # type: ignore[call-arg]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings", "/props", "/lora-adapters"])
def test_every_endpoint_may_have_limits_a_priority_and_a_key(path: str) -> None:
    options = {name: OPTIONS[name] for name in ("limits", "priority", "supersede")}
    request = Request(path, {"content": "x"}, **options)
    assert request.limits.total == 2
    assert json.loads(request.encoded) == {"content": "x"}


# -- taking an answer up again -----------------------------------------------------------------

COMPLETIONS = ["/completion", "/completions", "/v1/completions"]
CHATS = ["/chat/completions", "/v1/chat/completions"]
ASKED: dict[str, dict[str, object]] = {
    **{path: {"prompt": "Once", "temperature": 0, "stop": ["."]} for path in COMPLETIONS},
    **{
        path: {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "stop": ["."]}
        for path in CHATS
    },
}
GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}


def resumable(path: str, **fields: object) -> Request:
    return Request(path, {**ASKED[path], **fields}, on_crash="resume")


def taken_up(request: Request, text: str, tokens: int) -> Request:
    again = take_up(request, text, tokens)
    assert again is not None
    return again


def test_the_paths_that_can_be_taken_up_are_streamed() -> None:
    assert set(ASKED) < set(STREAMED)


@pytest.mark.parametrize("path", COMPLETIONS)
def test_a_completion_goes_on_behind_its_prompt_and_what_was_made_of_it(path: str) -> None:
    body = sent(taken_up(resumable(path), " upon a", 2))
    bound = {STREAMED[path][0]: MAX_TOKENS - 2}
    expected = {**ASKED[path], "prompt": "Once upon a", **bound, "timings_per_token": True}
    assert body == expected


@pytest.mark.parametrize("path", CHATS)
def test_a_chat_goes_on_within_the_message_that_was_begun(path: str) -> None:
    body = sent(taken_up(resumable(path), "Hello the", 2))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello the"}]
    bound = {STREAMED[path][0]: MAX_TOKENS - 2}
    expected = {**ASKED[path], "messages": messages, **bound, "timings_per_token": True}
    assert body == {**expected, **GOES_ON}


@pytest.mark.parametrize("path", ASKED)
def test_an_answer_without_a_text_is_asked_for_as_before(path: str) -> None:
    request = resumable(path)
    body = sent(taken_up(request, "", 0))
    assert body == sent(request)


@pytest.mark.parametrize("path", ASKED)
def test_the_bound_is_what_was_left_of_it_under_the_name_that_it_had(path: str) -> None:
    for name in STREAMED[path]:
        request = resumable(path, **{name: 10})
        bounds = [sent(taken_up(request, "x", tokens))[name] for tokens in (0, 1, 9)]
        assert bounds == [10, 9, 1]
        others = set(BOUNDS) - {name}
        assert not others & sent(taken_up(request, "x", 9)).keys()


@pytest.mark.parametrize("path", ASKED)
def test_an_answer_that_had_reached_its_bound_is_not_asked_for_again(path: str) -> None:
    for tokens in (10, 11):
        assert take_up(resumable(path, max_tokens=10), "x", tokens) is None
    assert take_up(resumable(path), "x", MAX_TOKENS) is None
    assert take_up(resumable(path), "x", MAX_TOKENS - 1) is not None


@pytest.mark.parametrize("path", ASKED)
def test_a_request_that_is_taken_up_is_the_same_otherwise(path: str) -> None:
    request = attrs.evolve(resumable(path), limits=Limits(total=3), priority=7, supersede="key")
    again = taken_up(request, "x", 1)
    assert (again.path, again.method) == (path, "POST")
    assert (again.limits, again.priority, again.supersede) == (Limits(total=3), 7, "key")
    assert request == attrs.evolve(
        resumable(path), limits=Limits(total=3), priority=7, supersede="key"
    )


@pytest.mark.parametrize("path", COMPLETIONS)
@pytest.mark.parametrize("prompt", [[1, 2, 3], (1, 2, 3), [1, "and", 2]])
def test_a_prompt_of_tokens_gets_the_text_as_its_last_part(path: str, prompt: list[object]) -> None:
    request = resumable(path, prompt=prompt)
    assert sent(taken_up(request, " four", 1))["prompt"] == [*prompt, " four"]
    assert sent(taken_up(request, "", 0))["prompt"] == [*prompt]


def test_a_completion_with_a_prompt_of_tokens_can_be_built_so() -> None:
    request = completion_request([1, 2], on_crash="resume", max_tokens=5)
    assert sent(taken_up(request, " three", 1)) == {
        "prompt": [1, 2, " three"],
        "max_tokens": 4,
        "timings_per_token": True,
    }


def test_the_conversation_of_the_caller_is_left_alone() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    request = chat_request(messages, on_crash="resume")
    taken_up(request, "Hello", 1)
    assert messages == [{"role": "user", "content": "Hi"}]
    assert isinstance(request.body, dict)
    assert request.body["messages"] == messages


def test_a_system_message_stays_where_it_was() -> None:
    request = chat_request("Hi", system="Be brief.", on_crash="resume")
    roles = [one["role"] for one in sent(taken_up(request, "Hello", 1))["messages"]]
    assert roles == ["system", "user", "assistant"]


@pytest.mark.parametrize("path", sorted(set(STREAMED) - set(ASKED)))
def test_an_endpoint_whose_answers_cannot_be_taken_up_is_refused(path: str) -> None:
    with pytest.raises(SpecificationError, match=f"an answer of {path} cannot be taken up again"):
        Request(path, {"prompt": "x"}, on_crash="resume")


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings", "/", "/completion/"])
def test_an_answer_in_one_piece_cannot_be_taken_up(path: str) -> None:
    with pytest.raises(SpecificationError, match=f"an answer of {path} cannot be taken up again"):
        Request(path, {"content": "x"}, on_crash="resume")


def test_what_only_tells_cannot_be_taken_up() -> None:
    with pytest.raises(SpecificationError, match="cannot be taken up again"):
        Request("/completion", {"prompt": "x"}, "GET", on_crash="resume")


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grammar", "root ::= 'a'"),
        ("json_schema", {"type": "object"}),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function", "function": {"name": "weather"}}]),
    ],
)
def test_an_answer_of_a_prescribed_form_cannot_be_taken_up(
    path: str, name: str, value: object
) -> None:
    with pytest.raises(SpecificationError, match=f"an answer with {name} cannot be taken up"):
        resumable(path, **{name: value})
    resumable(path, **{name: None})
    Request(path, {**ASKED[path], name: value})


def test_a_chat_without_tools_may_say_so() -> None:
    chat_request("x", tools=[], on_crash="resume")
    with pytest.raises(SpecificationError, match="an answer with tools cannot"):
        chat_request("x", tools=[{"type": "function"}], on_crash="resume")


@pytest.mark.parametrize("path", CHATS)
def test_an_answer_whose_beginning_was_given_cannot_be_taken_up(path: str) -> None:
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    with pytest.raises(SpecificationError, match="was begun for it cannot be taken up"):
        resumable(path, messages=begun)
    resumable(path, messages=[*begun, {"role": "user", "content": "And?"}])


@pytest.mark.parametrize("path", ASKED)
def test_nothing_to_go_on_from_is_refused(path: str) -> None:
    field = "prompt" if path in COMPLETIONS else "messages"
    for body in ({}, {field: None}, {field: 7}, {field: {"role": "user"}}):
        with pytest.raises(SpecificationError, match="nothing to go on from"):
            Request(path, body, on_crash="resume")


@pytest.mark.parametrize("path", ASKED)
def test_an_array_is_no_body_that_could_be_taken_up(path: str) -> None:
    with pytest.raises(SpecificationError, match=r"nothing to go on from|is a JSON object"):
        Request(path, [{"prompt": "x"}], on_crash="resume")


@pytest.mark.parametrize("path", CHATS)
def test_a_chat_that_has_no_list_of_messages_cannot_be_taken_up(path: str) -> None:
    for body in ({"prompt": "x"}, {"messages": "x"}):
        with pytest.raises(
            SpecificationError, match="nothing to go on from: messages must be a list"
        ):
            Request(path, body, on_crash="resume")


@pytest.mark.parametrize("path", COMPLETIONS)
def test_a_completion_that_has_no_prompt_cannot_be_taken_up(path: str) -> None:
    with pytest.raises(
        SpecificationError, match="nothing to go on from: prompt must be a text or a list"
    ):
        Request(path, {"messages": [{"role": "user", "content": "x"}]}, on_crash="resume")
