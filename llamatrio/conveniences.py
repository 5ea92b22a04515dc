"""The calls of `llamatrio.calls` as methods of a provider."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager

import attrs

from llamatrio.calls import (
    Ranked,
    Vector,
    best_first,
    check_query,
    check_task,
    check_texts,
    check_top,
    detokenize_request,
    embedding_request,
    parse_embeddings,
    parse_ranking,
    parse_text,
    parse_tokens,
    portions,
    rerank_request,
    sharpened,
    tokenize_request,
)
from llamatrio.config import Task
from llamatrio.errors import RequestFailed
from llamatrio.lifecycle.reply import Reply
from llamatrio.requests import Request


class Calls(ABC):
    """Embeddings, rankings and tokens, for a provider that has `request`.

    Each call waits for a slot as any other request does.
    """

    @abstractmethod
    def request(self, request: Request) -> AbstractAsyncContextManager[Reply]:
        """Submit a request for the length of a block, which cancels it when it is left early."""

    @property
    def task(self) -> Task | None:
        """What the model was loaded for; None if that is not known here."""
        return None

    async def embed(self, texts: Iterable[str]) -> list[Vector]:
        """Make vectors of texts, one for each, in the order of the texts.

        llama.cpp scales each to the length 1, unless it is told otherwise. A model for it is loaded
        with `ModelConfig(task="embedding")`. Many texts go in several requests, one after another.

        Cancellation: cancels the request that runs, and sends no more.

        Raises:
          SpecificationError: for no texts, for what is no text, or for a model that was loaded for
            reranking; nothing was sent.
          NotStarted: if the provider is not started.
          RequestFailed: if a request failed. Its `__cause__` says why: `TextTooLong` for a text of
            more tokens than `batch`, `ContextExceeded` for one of more than `context`, any other
            `RequestRefused` such as for a model that was not loaded for embedding, or a
            `ChildError`.
          RequestCancelled: if somebody else cancelled it, such as a `stop`.
          BadAnswer: if the answer is not as promised.
        """
        listed = check_texts(texts)
        vectors: list[Vector] = []
        for portion in portions(listed):
            request = embedding_request(portion)
            check_task(request, self.task)
            body = await self._body(request)
            vectors += parse_embeddings(body, len(portion))
        return vectors

    async def rerank(
        self, query: str, documents: Iterable[str], *, top_n: int | None = None
    ) -> list[Ranked]:
        """Sort documents by how well they answer a query, the best first.

        A model for it is loaded with `ModelConfig(task="reranking")`. Many documents go in several
        requests, one after another.

        Args:
          query: The query; not blank.
          documents: The documents.
          top_n: How many of the best to return; None for all.

        Cancellation: cancels the request that runs, and sends no more.

        Raises:
          SpecificationError: for a blank query, for no documents, for what is no text, or for a
            `top_n` below 1; nothing was sent.
          NotStarted: if the provider is not started.
          RequestFailed: if a request failed; see `embed`. Query and document must fit together.
          RequestCancelled: if somebody else cancelled it, such as a `stop`.
          BadAnswer: if the answer is not as promised.
        """
        listed = check_texts(documents)
        query = check_query(query)
        check_top(top_n)
        ranked: list[Ranked] = []
        for portion in portions(listed, extra=len(query)):
            start = len(ranked)
            body = await self._body(rerank_request(query, portion))
            found = parse_ranking(body, portion)
            ranked += [attrs.evolve(one, index=start + one.index) for one in found]
        return best_first(ranked)[:top_n]

    async def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> tuple[int, ...]:
        """Return the tokens of a text.

        Args:
          text: The text.
          add_special: Whether to add what the model wants at the beginning and the end of a prompt.
          parse_special: Whether the name of a special token, such as `</s>`, becomes that token.

        Cancellation: cancels the request.

        Raises:
          SpecificationError: for what is no text; nothing was sent.
          NotStarted: if the provider is not started.
          RequestFailed: if the request failed; see `embed`.
          RequestCancelled: if somebody else cancelled it, such as a `stop`.
          BadAnswer: if the answer is not as promised.
        """
        request = tokenize_request(text, add_special=add_special, parse_special=parse_special)
        return parse_tokens(await self._body(request))

    async def detokenize(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, special ones included.

        Bytes that are no whole character become U+FFFD.

        Cancellation: cancels the request.

        Raises:
          SpecificationError: for what is no token; nothing was sent.
          NotStarted: if the provider is not started.
          RequestFailed: if the request failed; see `embed`. Its `__cause__` is `RequestRefused` for
            a token that is none of this model's.
          RequestCancelled: if somebody else cancelled it, such as a `stop`.
          BadAnswer: if the answer is not as promised.
        """
        return parse_text(await self._body(detokenize_request(tokens)))

    async def _body(self, request: Request) -> object:
        async with self.request(request) as reply:
            try:
                return (await reply.result()).outcome.body
            except RequestFailed as exc:
                sharp = sharpened(exc.outcome.error)
                if sharp is exc.outcome.error:
                    raise
                raise RequestFailed(attrs.evolve(exc.outcome, error=sharp), exc.text) from sharp
