from __future__ import annotations

import json
import math
from typing import Any

import attrs
import pytest

from llamatrio.errors import SpecificationError
from llamatrio.requests import (
    MAX_TOKENS,
    STREAMED,
    Delta,
    Request,
    chat_request,
    completion_request,
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
    [math.nan, math.inf, -math.inf, b"bytes", {1, 2}, object(), {("a", 1): 2}, [[math.nan]]],
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
