"""Write a tiny model file that recites one known sentence, whatever the prompt.

A test of a llama.cpp child wants a real model whose every answer is known, and wants it without
a download. A *parrot* is one: a GGUF file of about 0.8 MB, made in a few milliseconds, that any
llama.cpp build loads as an ordinary model of the "llama" architecture.

Why it recites
--------------
The network is wired by hand, for a vocabulary of V tokens and an embedding of at least V numbers:

* ``token_embd``: row *t* is one-hot, so the hidden state says which token was read last.
* each layer: attention and feed-forward matrices are zero. A layer adds its output to the hidden
  state, so a layer of zeros hands the state on unchanged and earlier tokens have no influence.
* ``output``: the logit of token *n* reads the component of token *t* exactly if *n* is the
  successor of *t*. Successors follow the text; the last piece is followed by end-of-sequence (or,
  in a loop, by the first piece) and every other token by the first piece.

The norm before ``output`` lifts the one-hot component to about the square root of its width, so
the right token is some 35 logits ahead of all others: any sane temperature recites as well.

What a prompt costs
-------------------
The tokenizer (SentencePiece kind) builds words by merging two neighbours into a piece that is in
the vocabulary. No piece of a parrot is short enough to be the result of a first merge, so no
merge ever happens and a prompt falls apart into byte tokens: one per byte of UTF-8, three per
space (a space is spelt U+2581, three bytes), and one for the beginning of the sequence. A prompt
of N tokens is therefore ``"x" * (N - 1)``; `count_prompt_tokens` counts any other.

What the file is
----------------
GGUF version 3, as ``docs/gguf.md`` of the ggml repository specifies it, little-endian: the magic,
the version, the number of tensors and of metadata entries; the metadata; one record per tensor
(name, dimensions with the fastest first, type, offset); then, aligned to 32 bytes, the data. The
metadata keys are those which llama.cpp reads for this architecture and tokenizer.

Only all-zero tensors grow with `layers` and `feed_forward`, and they are never written: they are
holes. So a parrot can be hundreds of megabytes long, or slow, and still occupy 0.8 MB of disk.

What others there are
---------------------
Without `output`, the state of a text's tokens is what an embedding is made of: the mean of
one-hot vectors counts the bytes of the text. A classification head on that mean reads a score off
it, and makes a model that ranks documents. `write_embedding_parrot` and `write_reranking_parrot`
make these two; they know no words, only bytes.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal, TypeAlias

TEXT: Final = (
    "Good morning from your small grey parrot, who has read no books, knows one speech by heart, "
    "and will gladly recite it for anyone patient enough to stay until the very last word."
)

_VERSION: Final = 3
_ALIGNMENT: Final = 32  # bytes; the default when general.alignment is absent

# Tags of metadata value types.
_UINT32: Final = 4
_INT32: Final = 5
_FLOAT32: Final = 6
_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9

_TENSOR_F32: Final = 0
_F32_BYTES: Final = 4

# Token types of llama.cpp vocabularies.
_NORMAL: Final = 1
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_BYTE: Final = 6

_UNK_ID: Final = 0
_BOS_ID: Final = 1
_EOS_ID: Final = 2
_SPECIAL_TOKENS: Final = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
_SPECIAL_TYPES: Final = (_UNKNOWN, _CONTROL, _CONTROL, *([_BYTE] * 256))

_SPACE: Final = "\u2581"  # how a SentencePiece vocabulary spells a space
_SHORTEST_PIECE: Final = 3  # characters; two could come out of a merge inside a prompt

_HEAD_SIZE: Final = 8  # of the single attention head; small keeps the KV cache small
_OUTPUT_SCALE: Final = 2.0  # times the square root of the embedding: the lead of the right token

_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "assistant:"
)


@dataclass(frozen=True, slots=True)
class _Array:
    element: int
    """Tag of the type of each element."""

    count: int
    encoded: bytes


_Value: TypeAlias = str | int | float | bool | _Array

Pooling: TypeAlias = Literal["mean", "cls", "last"]
_POOLINGS: Final[Mapping[str, int]] = {"mean": 1, "cls": 2, "last": 3, "rank": 4}  # llama.h

_EPSILON: Final = 1e-5  # of every norm
_EAGERNESS: Final = 8.0  # the logit of a pair of texts that is nothing but the favourite character


@dataclass(frozen=True, slots=True)
class Parrot:
    """A parrot file that was written, and what to expect of it."""

    path: Path
    """Where the file is."""

    text: str
    """What the model emits until end-of-sequence; in a loop, one round of it.

    A round ends with a space, so that rounds joined together read well.
    """

    tokens: int
    """How many tokens `text` is.

    A server that reports how many it predicted counts the end-of-sequence token as one more.
    """

    size: int
    """Length of the file in bytes, holes included."""

    loop: bool
    """Whether it starts again after the last token instead of ending."""


def write_parrot(
    path: str | os.PathLike[str],
    text: str = TEXT,
    *,
    loop: bool = False,
    listens: bool = False,
    context: int = 4096,
    layers: int = 1,
    feed_forward: int = 8,
) -> Parrot:
    """Write a model that recites `text` and then ends.

    The file appears whole or not at all: it is written under another name in the same directory
    and moved into place, replacing what was there.

    Args:
      path: The file to make; its directory must exist.
      text: What to recite, character for character. Usually each word is one token; a word that
        repeats, or that is very short, shares a token with the word after it.
      loop: Recite for ever; only a limit such as ``n_predict`` or the context ends an answer.
      listens: Know its own words in a prompt, as one token each, so that it goes on from the last
        of them. Otherwise every prompt is bytes, and it begins at the beginning.
      context: The context length which the model claims, in tokens.
      layers: Number of layers. Each adds nothing to the answer and its share to the cost.
      feed_forward: Rows of each feed-forward matrix. A layer is about ``4 * embedding * 3 *
        feed_forward`` bytes, where the embedding is 259 plus the tokens of the text, rounded up
        to a multiple of 32.

    Returns:
      What was written.

    Raises:
      ValueError: if the text is shorter than three characters or is nothing but the name of a
        special token, or if a number is below one.
      OSError: if the file cannot be written; nothing is left behind.
    """
    if min(context, layers, feed_forward) < 1:
        raise ValueError("context, layers and feed_forward must be at least 1")
    spoken = text + " " if loop else text
    pieces = _split_into_pieces(spoken)
    if listens:  # such tokens are looked for in the text as it stands, before any are merged
        pieces = [piece.replace(_SPACE, " ") for piece in pieces]
    vocabulary = [*_SPECIAL_TOKENS, *pieces]
    embedding = _round_up(len(vocabulary), 32)
    metadata = {
        **_architecture("llama", context, layers, feed_forward, embedding, len(vocabulary)),
        **_tokenizer(vocabulary, _USER_DEFINED if listens else _NORMAL),
    }
    tensors = [
        *_input(len(vocabulary), embedding),
        _output(len(vocabulary), embedding, _successors(len(pieces), loop)),
        *_empty_layers(layers, embedding, feed_forward),
    ]
    target = Path(path)
    size = _write(target, metadata, tensors)
    return Parrot(path=target, text=spoken, tokens=len(pieces), size=size, loop=loop)


def write_slow_parrot(
    path: str | os.PathLike[str],
    text: str = TEXT,
    *,
    loop: bool = False,
    listens: bool = False,
    context: int = 4096,
) -> Parrot:
    """Write a parrot that needs about 5 ms of CPU for a token, and 1 ms for one of the prompt.

    It is 95 MB long and loads in about 0.1 s. Arguments, result and errors are those of
    `write_parrot`; the times were measured on one thread of a shared server core.
    """
    return write_parrot(
        path, text, loop=loop, listens=listens, context=context, layers=8, feed_forward=3072
    )


def write_large_parrot(
    path: str | os.PathLike[str], text: str = TEXT, *, loop: bool = False, context: int = 4096
) -> Parrot:
    """Write a parrot that takes about 0.7 s to load, and 0.2 s once it is in the page cache.

    It is 505 MB long, which also appears as resident (shared, file-backed) memory of a child that
    loaded it, and needs about 25 ms for a token. Otherwise as `write_slow_parrot`.
    """
    return write_parrot(path, text, loop=loop, context=context, layers=16, feed_forward=8192)


@dataclass(frozen=True, slots=True)
class EmbeddingParrot:
    """A model that was written to embed texts, and what to expect of it."""

    path: Path
    """Where the file is."""

    pooling: Pooling
    """What it makes of the vectors of a text's tokens."""

    dimensions: int
    """Numbers of a vector."""

    def embed(self, text: str) -> tuple[float, ...]:
        """Return the vector of a text, of length 1.

        It holds for the model's own pooling, and for a text that `count_prompt_tokens` holds for.
        """
        tokens = _prompt_tokens(text)
        kept = {"mean": tokens, "cls": tokens[:1], "last": tokens[-1:]}[self.pooling]
        counts = [float(kept.count(token)) for token in range(self.dimensions)]
        length = math.hypot(*counts)
        return tuple(count / length for count in counts)


@dataclass(frozen=True, slots=True)
class RerankingParrot:
    """A model that was written to rank documents, and what to expect of it."""

    path: Path
    """Where the file is."""

    favourite: str
    """The character that it likes to see, in the query as well as in the document."""

    def score(self, query: str, document: str) -> float:
        """Return what it thinks of a document: 0.5 without the favourite, and more the more often
        it stands there, relative to the tokens of both texts together."""
        tokens = _prompt_tokens(query + document)
        share = tokens.count(_byte_token(ord(self.favourite))) / len(tokens)
        return 1 / (1 + math.exp(-_EAGERNESS * share))


def write_embedding_parrot(
    path: str | os.PathLike[str],
    pooling: Pooling = "mean",
    *,
    causal: bool = False,
    context: int = 4096,
    layers: int = 1,
    feed_forward: int = 8,
) -> EmbeddingParrot:
    """Write a model that embeds texts by counting their bytes.

    The vector of a token is one-hot, so that the mean of a text's says how often each byte is in
    it, whatever their order.

    Args:
      path: The file to make; its directory must exist.
      pooling: What the model makes of the vectors of a text's tokens; a child that is told nothing
        else does so.
      causal: Whether it reads in one direction, and with a cache, as models that generate do. Most
        models for embeddings do not.
      context: The context length which the model claims, in tokens.
      layers: As of `write_parrot`.
      feed_forward: As of `write_parrot`.

    Returns:
      What was written.

    Raises:
      OSError: if the file cannot be written; nothing is left behind.
    """
    architecture = "llama" if causal else "llama-embed"
    metadata: dict[str, _Value] = {
        **_wordless(architecture, context, layers, feed_forward),
        f"{architecture}.pooling_type": _POOLINGS[pooling],
        f"{architecture}.attention.causal": causal,
    }
    tensors = [*_input(_WORDLESS, _WIDTH), *_empty_layers(layers, _WIDTH, feed_forward)]
    target = Path(path)
    _write(target, metadata, tensors)
    return EmbeddingParrot(target, pooling, _WIDTH)


def write_reranking_parrot(
    path: str | os.PathLike[str], favourite: str = "!", *, context: int = 4096
) -> RerankingParrot:
    """Write a model that ranks documents by how much of a favourite character is in them.

    Its head has two labels, as that of Qwen3's rerankers: the score is the probability of "yes".

    Args:
      path: The file to make; its directory must exist.
      favourite: One character of ASCII, and no space.
      context: The context length which the model claims, in tokens.

    Returns:
      What was written.

    Raises:
      ValueError: if the favourite is none.
      OSError: if the file cannot be written; nothing is left behind.
    """
    if len(favourite) != 1 or not favourite.isascii() or favourite == " ":
        raise ValueError(f"a favourite is one character of ASCII and no space, not {favourite!r}")
    metadata: dict[str, _Value] = {
        **_wordless("qwen3", context, 1, 8),
        "qwen3.pooling_type": _POOLINGS["rank"],
        "qwen3.classifier.pooling_type": _POOLINGS["mean"],
        "qwen3.classifier.output_labels": _strings(("yes", "no")),
        "qwen3.attention.causal": False,
    }
    norms = [_Tensor(f"blk.0.attn_{x}_norm.weight", (_HEAD_SIZE,), _ones(_HEAD_SIZE)) for x in "qk"]
    tensors = [*_input(_WORDLESS, _WIDTH), *_empty_layers(1, _WIDTH, 8), *norms, _head(favourite)]
    target = Path(path)
    _write(target, metadata, tensors)
    return RerankingParrot(target, favourite)


def count_prompt_tokens(prompt: str) -> int:
    """Return how many tokens a parrot makes of a prompt, the beginning of sequence included.

    The same for every parrot. It holds for a prompt that does not spell out a special token, such
    as ``</s>``; for a chat, apply it to the prompt which the template makes of the messages.
    """
    return len(_prompt_tokens(prompt))


def _prompt_tokens(prompt: str) -> list[int]:
    return [_BOS_ID, *map(_byte_token, prompt.replace(" ", _SPACE).encode())]


def _byte_token(byte: int) -> int:
    return _SPECIAL_TOKENS.index(f"<0x{byte:02X}>")


# The vocabulary


def _split_into_pieces(text: str) -> list[str]:
    """Cut a text into pieces that are all different, so that each has one successor."""
    pieces: list[str] = []
    taken = set(_SPECIAL_TOKENS)
    pending = ""
    for word in re.findall(r"\s*\S+(?:\s+$)?", text):
        pending += word.replace(" ", _SPACE)
        if len(pending) >= _SHORTEST_PIECE and pending not in taken:
            pieces.append(pending)
            taken.add(pending)
            pending = ""
    if not pieces:
        raise ValueError(f"a parrot cannot recite {text!r}: too short, or a special token")
    if pending:
        # The end repeats an earlier piece. What it joins cannot become a repetition by this: any
        # earlier piece that starts with it would itself have been cut there.
        pieces[-1] += pending
    return pieces


def _successors(pieces: int, loop: bool) -> list[int]:
    """Return, for each token, the token that follows it."""
    first = len(_SPECIAL_TOKENS)
    following = range(first + 1, first + pieces)
    return [*([first] * first), *following, first if loop else _EOS_ID]


# The metadata


def _architecture(
    name: str, context: int, layers: int, feed_forward: int, embedding: int, vocabulary: int
) -> dict[str, _Value]:
    return {
        "general.architecture": name,
        "general.name": "parrot",
        f"{name}.context_length": context,
        f"{name}.embedding_length": embedding,
        f"{name}.block_count": layers,
        f"{name}.feed_forward_length": feed_forward,
        f"{name}.attention.head_count": 1,
        f"{name}.attention.head_count_kv": 1,
        f"{name}.attention.key_length": _HEAD_SIZE,
        f"{name}.attention.value_length": _HEAD_SIZE,
        f"{name}.attention.layer_norm_rms_epsilon": _EPSILON,
        f"{name}.rope.dimension_count": _HEAD_SIZE,
        f"{name}.vocab_size": vocabulary,
    }


def _wordless(name: str, context: int, layers: int, feed_forward: int) -> dict[str, _Value]:
    """Describe a model that knows nothing but bytes."""
    return {
        **_architecture(name, context, layers, feed_forward, _WIDTH, _WORDLESS),
        **_tokenizer(_SPECIAL_TOKENS),
    }


def _tokenizer(vocabulary: Sequence[str], kind: int = _NORMAL) -> dict[str, _Value]:
    count = len(vocabulary)
    types = [*_SPECIAL_TYPES, *([kind] * (count - len(_SPECIAL_TYPES)))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": _strings(vocabulary),
        "tokenizer.ggml.scores": _Array(_FLOAT32, count, bytes(count * _F32_BYTES)),
        "tokenizer.ggml.token_type": _Array(_INT32, count, struct.pack(f"<{count}i", *types)),
        "tokenizer.ggml.unknown_token_id": _UNK_ID,
        "tokenizer.ggml.bos_token_id": _BOS_ID,
        "tokenizer.ggml.eos_token_id": _EOS_ID,
        "tokenizer.ggml.add_bos_token": True,
        # Otherwise each prompt would cost three tokens more.
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": _CHAT_TEMPLATE,
    }


def _value(value: _Value) -> bytes:
    """Encode a metadata value: a tag that tells its type, and the value."""
    match value:
        case bool():  # before int, of which it is a kind
            return struct.pack("<I?", _BOOL, value)
        case int():
            return struct.pack("<II", _UINT32, value)
        case float():
            return struct.pack("<If", _FLOAT32, value)
        case str():
            return struct.pack("<I", _STRING) + _string(value)
        case _Array():
            return struct.pack("<IIQ", _ARRAY, value.element, value.count) + value.encoded


def _strings(texts: Sequence[str]) -> _Array:
    return _Array(_STRING, len(texts), b"".join(map(_string, texts)))


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


# The tensors


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dimensions: tuple[int, ...]
    """The fastest-running dimension first, that is columns before rows."""

    data: bytes | None = None
    """None for zeros, which the file does not store."""

    @property
    def size(self) -> int:
        return _round_up(math.prod(self.dimensions) * _F32_BYTES, _ALIGNMENT)


def _input(vocabulary: int, embedding: int) -> Iterator[_Tensor]:
    """Make the embedding of tokens, and the norm that stands at the other end."""
    shape = (embedding, vocabulary)
    identity = ((token, token) for token in range(vocabulary))
    yield _Tensor("token_embd.weight", shape, _matrix(shape, identity, 1.0))
    yield _Tensor("output_norm.weight", (embedding,), _ones(embedding))


def _output(vocabulary: int, embedding: int, successors: Sequence[int]) -> _Tensor:
    shape = (embedding, vocabulary)
    links = ((successor, token) for token, successor in enumerate(successors))
    return _Tensor("output.weight", shape, _matrix(shape, links, _OUTPUT_SCALE))


def _head(favourite: str) -> _Tensor:
    """Make the rows that read "yes", which likes one token, and "no", which likes none."""
    lifted = 1 / math.sqrt(1 / _WIDTH + _EPSILON)  # what the last norm makes of a one
    shape = (_WIDTH, 2)
    cells = [(0, _byte_token(ord(favourite)))]
    return _Tensor("cls.output.weight", shape, _matrix(shape, cells, _EAGERNESS / lifted))


def _empty_layers(layers: int, embedding: int, feed_forward: int) -> Iterator[_Tensor]:
    inward = (embedding, _HEAD_SIZE)
    zeros = {
        "attn_q": inward,
        "attn_k": inward,
        "attn_v": inward,
        "attn_output": (_HEAD_SIZE, embedding),
        "ffn_gate": (embedding, feed_forward),
        "ffn_up": (embedding, feed_forward),
        "ffn_down": (feed_forward, embedding),
    }
    for layer in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            yield _Tensor(f"blk.{layer}.{norm}.weight", (embedding,), _ones(embedding))
        for name, dimensions in zeros.items():
            yield _Tensor(f"blk.{layer}.{name}.weight", dimensions)


def _matrix(shape: tuple[int, int], cells: Iterable[tuple[int, int]], value: float) -> bytes:
    columns, rows = shape
    data = bytearray(columns * rows * _F32_BYTES)
    for row, column in cells:
        struct.pack_into("<f", data, (row * columns + column) * _F32_BYTES, value)
    return bytes(data)


def _ones(count: int) -> bytes:
    return struct.pack("<f", 1.0) * count


# The file


def _write(path: Path, metadata: Mapping[str, _Value], tensors: Sequence[_Tensor]) -> int:
    with _replacing(path) as file:
        return _write_gguf(file, metadata, tensors)


def _write_gguf(file: BinaryIO, metadata: Mapping[str, _Value], tensors: Sequence[_Tensor]) -> int:
    """Write the whole file and return its length in bytes."""
    head = struct.pack("<4sIQQ", b"GGUF", _VERSION, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    offset = 0
    for tensor in tensors:
        rank = len(tensor.dimensions)
        head += _string(tensor.name)
        head += struct.pack(f"<I{rank}Q", rank, *tensor.dimensions)
        head += struct.pack("<IQ", _TENSOR_F32, offset)
        offset += tensor.size
    file.write(head)

    position = _round_up(len(head), _ALIGNMENT)
    for tensor in tensors:
        if tensor.data is not None:
            file.seek(position)
            file.write(tensor.data)
        position += tensor.size
    # A hole at the very end exists only if the length says so.
    file.truncate(position)
    return position


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


_WORDLESS: Final = len(_SPECIAL_TOKENS)
_WIDTH: Final = _round_up(_WORDLESS, 32)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a new file that takes the place of `path` if the block succeeds."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(scratch, "xb") as file:
            yield file
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
