"""PURE. The calls that answer in one piece with numbers or tokens: what is sent, what comes back.

Each has a builder that makes a `Request` and a parser that reads the body of its outcome. The
methods of `llamatrio.conveniences.Calls` do both; whoever submits the request alone has this:

    reply = provider.submit(tokenize_request("Hello"))
    tokens = parse_tokens((await reply.result()).outcome.body)
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeAlias, TypeGuard

import attrs

from llamatrio.config import Task
from llamatrio.errors import BadAnswer, RequestRefused, SpecificationError
from llamatrio.requests import Request

Vector: TypeAlias = tuple[float, ...]
"""What a text is to an embedding model."""

MAX_TEXTS: Final = 32
"""Texts that the methods send in one request."""

MAX_CHARACTERS: Final = 8192
"""Characters that the methods send in one request, unless a single text is longer.

llama-server goes through all texts of a request, also when its caller is gone: it looks for that
only after a second without a result, and each text is one (b11434, server-queue.cpp,
`recv_with_timeout`). So it is not given more of them than it may finish in vain.
"""


@attrs.frozen
class Ranked:
    """A document and what a reranking model thinks of it.

    Attributes:
      index: Its place in the list of documents that was given.
      score: How well it answers the query; on what scale is up to the model.
      document: The document itself.
    """

    index: int
    score: float
    document: str = attrs.field(repr=False)


class TextTooLong(RequestRefused):
    """A text has more tokens than one step computes: shorten it, or raise `batch`.

    Where `context` is smaller than `batch`, raise that too.
    """

    @property
    def tokens(self) -> int | None:
        """How many tokens the text has, as far as the server said."""
        return self._number(1)

    @property
    def batch(self) -> int | None:
        """How many tokens one step computes, as far as the server said."""
        return self._number(2)

    def _number(self, group: int) -> int | None:
        found = _TOO_LONG.search(self.message)
        return int(found[group]) if found else None

    def __str__(self) -> str:
        return (
            f"a text of {self.tokens} tokens does not fit in one step of {self.batch}: shorten it, "
            "or raise `batch` of ModelConfig (and `context`, if that is smaller)"
        )


# b11434, server-context.cpp: a server error, with no word of its own for the kind.
_TOO_LONG: Final = re.compile(
    r"input \((\d+) tokens\) is too large to process.*batch size: (\d+)\)", re.DOTALL
)


def sharpened(error: Exception) -> Exception:
    """Return an error that says more than this one, or the same if there is none."""
    if type(error) is RequestRefused and _TOO_LONG.search(error.message):
        return TextTooLong(error.status, error.kind, error.message, error.details)
    return error


# -- what is sent ------------------------------------------------------------------------------


def embedding_request(texts: Iterable[str]) -> Request:
    """Ask for the vectors of some texts; `parse_embeddings` reads the answer.

    A long list keeps the model busy to its end, also when the request is cancelled.

    Raises:
      SpecificationError: for no texts, or for what is no text.
    """
    # As JSON each number would take about twenty characters instead of five.
    return Request("/v1/embeddings", {"input": check_texts(texts), "encoding_format": "base64"})


def rerank_request(query: str, documents: Iterable[str], *, top_n: int | None = None) -> Request:
    """Ask how well some documents answer a query; `parse_ranking` reads the answer.

    A long list keeps the model busy to its end, also when the request is cancelled.

    Args:
      query: The query; not blank.
      documents: The documents.
      top_n: How many of the best to tell; None for all.

    Raises:
      SpecificationError: for a blank query, for no documents, for what is no text, or for a `top_n`
        below 1.
    """
    body: dict[str, object] = {"query": check_query(query), "documents": check_texts(documents)}
    check_top(top_n)
    return Request("/v1/rerank", body if top_n is None else {**body, "top_n": top_n})


def tokenize_request(
    text: str, *, add_special: bool = False, parse_special: bool = True
) -> Request:
    """Ask for the tokens of a text; `parse_tokens` reads the answer.

    Args:
      text: The text.
      add_special: Whether to add what the model wants at the beginning and the end of a prompt.
      parse_special: Whether the name of a special token, such as `</s>`, becomes that token.

    Raises:
      SpecificationError: for what is no text.
    """
    body = {
        "content": _text(text),
        "add_special": _flag(add_special),
        "parse_special": _flag(parse_special),
    }
    return Request("/tokenize", body)


def detokenize_request(tokens: Iterable[int]) -> Request:
    """Ask for the text of some tokens; `parse_text` reads the answer.

    Raises:
      SpecificationError: for what is no token. What is none of this model's the server refuses.
    """
    return Request("/detokenize", {"tokens": _tokens(tokens)})


def check_texts(texts: Iterable[str]) -> list[str]:
    """Return the texts as a list.

    Raises:
      SpecificationError: for no texts, or for what is no text.
    """
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise SpecificationError(f"expected a sequence of texts, not {_excerpt(texts)}")
    checked = [_text(text) for text in texts]
    if not checked:
        raise SpecificationError("there are no texts")
    return checked


_EMBEDDINGS: Final = ("/embedding", "/embeddings", "/v1/embeddings")


def check_task(request: Request, task: Task | None) -> None:
    """Refuse a request that a model would answer with whatever stands in its memory.

    A model that was loaded for reranking has a single score where the endpoint reads a vector
    (b11434).

    Raises:
      SpecificationError: if it is one.
    """
    if task == "reranking" and request.path in _EMBEDDINGS:
        raise SpecificationError("this model was loaded for reranking and has no embeddings")


def check_query(query: str) -> str:
    """Return the query.

    Raises:
      SpecificationError: if it is blank, or no text.
    """
    # A pair of texts that has no token at all aborts llama-server: it sends the answer of a
    # completion where that of a ranking is expected (b11434, server-context.cpp).
    if not _text(query).strip():
        raise SpecificationError("the query is blank")
    return query


def check_top(top_n: int | None) -> None:
    """Refuse what cannot be a number of documents.

    Raises:
      SpecificationError: if it is below 1, or no whole number.
    """
    if top_n is not None and (not _is_count(top_n) or top_n < 1):
        raise SpecificationError(f"top_n must be a whole number of at least 1, not {top_n!r}")


def _text(text: object) -> str:
    if not isinstance(text, str):
        raise SpecificationError(f"not a text: {_excerpt(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise SpecificationError(f"a text that Unicode does not know: {exc.reason}") from exc
    return text


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise SpecificationError(f"expected True or False, not {value!r}")
    return value


def _tokens(tokens: Iterable[int]) -> list[int]:
    if not isinstance(tokens, Iterable):
        raise SpecificationError(f"expected a sequence of tokens, not {_excerpt(tokens)}")
    listed = list(tokens)
    for token in listed:
        # llama-server would cut a larger number down to some other token.
        if not _is_count(token) or token >= _MOST_TOKENS:
            raise SpecificationError(f"not a token: {_excerpt(token)}")
    return listed


_MOST_TOKENS: Final = 2**31


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def portions(texts: Sequence[str], extra: int = 0) -> Iterator[list[str]]:
    """Divide texts among requests, none of which holds more than `MAX_TEXTS` of them, or more than
    `MAX_CHARACTERS` unless it is a single one.

    Args:
      texts: The texts.
      extra: Characters that go with each of them.
    """
    portion: list[str] = []
    size = 0
    for text in texts:
        size += len(text) + extra
        if portion and (len(portion) == MAX_TEXTS or size > MAX_CHARACTERS):
            yield portion
            portion, size = [], len(text) + extra
        portion.append(text)
    if portion:
        yield portion


# -- what comes back ---------------------------------------------------------------------------


def parse_embeddings(body: object, count: int) -> list[Vector]:
    """Read the answer to `embedding_request`: a vector for each text, in the order of the texts.

    Args:
      body: The body of the outcome.
      count: How many texts were sent.

    Raises:
      BadAnswer: if the body is not that.
    """
    found = sorted(_vector(item) for item in _list(body, "data"))
    if [index for index, _ in found] != list(range(count)):
        raise BadAnswer(f"{len(found)} embeddings that are not those of {count} texts")
    vectors = [vector for _, vector in found]
    lengths = {len(vector) for vector in vectors}
    if len(lengths) != 1 or 0 in lengths:
        raise BadAnswer("embeddings of different lengths, or empty ones")
    return vectors


def _vector(item: object) -> tuple[int, Vector]:
    match item:
        case {"index": index, "embedding": str(encoded)} if _is_count(index):
            numbers = _decode(encoded)
        case {"index": index, "embedding": list(listed)} if _is_count(index):
            numbers = tuple(_number(value) for value in listed)
        case _:
            raise BadAnswer(f"an embedding of an unknown form: {_excerpt(item)}")
    if not all(map(math.isfinite, numbers)):
        raise BadAnswer("an embedding that holds what is no number")
    return index, numbers


def _decode(encoded: str) -> Vector:
    try:
        data = base64.b64decode(encoded, validate=True)
        return struct.unpack(f"<{len(data) // 4}f", data)
    except (binascii.Error, struct.error, ValueError) as exc:
        raise BadAnswer(f"an embedding that cannot be decoded: {exc}") from exc


def parse_ranking(
    body: object, documents: Sequence[str], *, top_n: int | None = None
) -> list[Ranked]:
    """Read the answer to `rerank_request`: the best documents, the best first.

    Args:
      body: The body of the outcome.
      documents: What was sent.
      top_n: How many were asked for; None for all.

    Raises:
      BadAnswer: if the body is not that.
    """
    found = [_ranked(item, documents) for item in _list(body, "results")]
    expected = len(documents) if top_n is None else min(top_n, len(documents))
    if len(found) != expected or len({one.index for one in found}) != expected:
        raise BadAnswer(f"a ranking of {len(found)} documents, where {expected} were asked for")
    return best_first(found)


def best_first(ranked: Iterable[Ranked]) -> list[Ranked]:
    """Sort by score; documents of the same score stay in the order in which they were given."""
    return sorted(ranked, key=lambda one: (-one.score, one.index))


def _ranked(item: object, documents: Sequence[str]) -> Ranked:
    match item:
        case {"index": index, "relevance_score": score} if _is_count(index):
            if index < len(documents):
                return Ranked(index, _number(score), documents[index])
        case _:
            pass
    raise BadAnswer(f"a ranking of an unknown form: {_excerpt(item)}")


def parse_tokens(body: object) -> tuple[int, ...]:
    """Read the answer to `tokenize_request`.

    Raises:
      BadAnswer: if the body is not that.
    """
    tokens = _list(body, "tokens")
    counts = tuple(token for token in tokens if _is_count(token))
    if len(counts) != len(tokens):
        raise BadAnswer(f"tokens that are none: {_excerpt(tokens)}")
    return counts


def parse_text(body: object) -> str:
    """Read the answer to `detokenize_request`.

    Raises:
      BadAnswer: if the body is not that.
    """
    match body:
        case {"content": str(text)}:
            return text
        case _:
            raise BadAnswer(f"no text but {_excerpt(body)}")


def _list(body: object, name: str) -> list[object]:
    found = body.get(name) if isinstance(body, Mapping) else None
    if not isinstance(found, list):
        raise BadAnswer(f"an answer without a list of {name}: {_excerpt(body)}")
    return found


def _number(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            if math.isfinite(number := float(value)):
                return number
    raise BadAnswer(f"what should be a number is {_excerpt(value)}")


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _EXCERPT else text[:_EXCERPT] + "..."


_EXCERPT: Final = 100
