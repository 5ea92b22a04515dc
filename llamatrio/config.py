"""PURE. What belongs to the model: a change of any of it means another load.

`ModelConfig` says the same thing to every kind of child. How each kind is told is the business
of `llamatrio.child.launch`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Literal, get_args

import attrs

from llamatrio.errors import SpecificationError

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
"""How the keys and values of the cache are stored: ggml's names."""

ReasoningFormat = Literal["auto", "none", "deepseek", "deepseek-legacy"]
"""Where a reasoning model's thoughts go: llama.cpp's names (`--reasoning-format`)."""

Task = Literal["generation", "embedding", "reranking"]
"""What a model is loaded for."""

Pooling = Literal["none", "mean", "cls", "last", "rank"]
"""How the vectors of a text's tokens become one: llama.cpp's names (`--pooling`)."""


@attrs.frozen
class Lora:
    """One LoRA adapter.

    Attributes:
      path: The adapter, a GGUF file.
      scale: How strongly it acts; 1.0 as it was trained.
    """

    path: str = attrs.field(converter=str)
    scale: float = 1.0


def _path(value: str | PurePath | None) -> str | None:
    return None if value is None else str(value)


def _strings(value: Iterable[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise SpecificationError(f"expected a sequence of strings, not one string: {value!r}")
    return tuple(value)


def _loras(value: Iterable[Lora | str | PurePath]) -> tuple[Lora, ...]:
    if isinstance(value, str | PurePath):
        raise SpecificationError(f"expected a sequence of LoRA adapters, not {value!r}")
    return tuple(item if isinstance(item, Lora) else Lora(str(item)) for item in value)


def _sha256(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        raise SpecificationError(f"sha256 is 64 hexadecimal digits, not {value!r}")
    return value.lower()


class Variables(Mapping[str, str]):
    """Environment variables that do not change, and whose values no repr shows."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(sorted(self._values))


@attrs.frozen
class ModelConfig:
    """One model, and how it is to be loaded.

    Every field means the same to a hosted and to a stock child. None leaves the choice to
    llama.cpp. What a kind of child cannot honour it refuses by name, when the provider is opened.

    Attributes:
      model: A GGUF file; `~` is not expanded. None only if `args` name another source of the
        model, such as `-hf`.
      context: Tokens that **each slot** can hold, prompt and answer together; llama.cpp rounds it
        up to a multiple of 256, and holds it down to what the model was trained with. None: what
        it was trained with, in each slot, or less where memory does not suffice.
      slots: How many requests run at the same time, each in its own part of the cache.
      batch: Tokens of a prompt that are computed in one step. This is also the grain at which a
        request can be cancelled while its prompt is read: larger is faster, and stops later. A
        text to embed or to rank must fit in one step, save for a model that reads in one direction
        and keeps its last token.
      gpu_layers: How many layers go to the GPU; 0 for none.
      devices: The devices to use, by llama.cpp's names (`llama-server --list-devices`);
        `("none",)` for the CPU alone. A hosted child knows no other than `("none",)`.
      threads: Threads for computing. With several children, their sum should not exceed the
        number of cores.
      cache_type_k: How the cache stores keys.
      cache_type_v: How the cache stores values.
      flash_attention: True, False, or None to let llama.cpp choose.
      chat_template: A Jinja template, or "chatml".
      mmproj: The projector file of a multimodal model.
      lora: LoRA adapters, as `Lora` or as paths.
      draft_model: A smaller model of the same vocabulary, for speculative decoding.
      task: What the model is loaded for: "generation" of text, "embedding" of texts as vectors, or
        "reranking" of documents by how well they answer a query. The last two want models that were
        made for them. With several slots they also want a `context`, a power of two for `slots`,
        and a multiple of it for `batch`.
      pooling: For task "embedding", how the vectors of a text's tokens become one: by their mean,
        or by taking that of the first token ("cls") or of the last. "none" keeps them all, which
        `/embedding` can tell and `embed` cannot. None: as the model says. Task "reranking" means
        "rank".
      reasoning: Whether a reasoning model thinks: True, False, or None as its template says.
      reasoning_format: Where its thoughts go.
      seed: The seed of requests that name none. None: another one each time.
      sleep_after: Seconds without a request after which the child frees the model's memory and
        waits for the next request to load it again. None: never. Whole seconds.
      sha256: The SHA-256 of the file `model`, in hexadecimal digits. It is checked before each load
        and before each wake, and a file of another content is not served. Not for a model in
        several files.
      args: Further options for the child's command line, for the rest of llama.cpp's options.
        Options that have a field here, or that are ours, are refused. A hosted child takes none.
      env: Further variables for the child's environment, which is otherwise built from a short
        list of harmless ones.
    """

    model: str | None = attrs.field(converter=_path)
    context: int | None = attrs.field(default=None, kw_only=True)
    slots: int = attrs.field(default=1, kw_only=True)
    batch: int = attrs.field(default=512, kw_only=True)
    gpu_layers: int | None = attrs.field(default=None, kw_only=True)
    devices: tuple[str, ...] | None = attrs.field(
        default=None, kw_only=True, converter=attrs.converters.optional(_strings)
    )
    threads: int | None = attrs.field(default=None, kw_only=True)
    cache_type_k: CacheType | None = attrs.field(default=None, kw_only=True)
    cache_type_v: CacheType | None = attrs.field(default=None, kw_only=True)
    flash_attention: bool | None = attrs.field(default=None, kw_only=True)
    chat_template: str | None = attrs.field(default=None, kw_only=True)
    mmproj: str | None = attrs.field(default=None, kw_only=True, converter=_path)
    lora: tuple[Lora, ...] = attrs.field(default=(), kw_only=True, converter=_loras)
    draft_model: str | None = attrs.field(default=None, kw_only=True, converter=_path)
    task: Task = attrs.field(default="generation", kw_only=True)
    pooling: Pooling | None = attrs.field(default=None, kw_only=True)
    reasoning: bool | None = attrs.field(default=None, kw_only=True)
    reasoning_format: ReasoningFormat | None = attrs.field(default=None, kw_only=True)
    seed: int | None = attrs.field(default=None, kw_only=True)
    sleep_after: int | None = attrs.field(default=None, kw_only=True)
    sha256: str | None = attrs.field(default=None, kw_only=True, converter=_sha256)
    args: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=_strings)
    env: Mapping[str, str] = attrs.field(factory=dict, kw_only=True, converter=Variables)

    def __attrs_post_init__(self) -> None:
        if self.model == "":
            raise SpecificationError("model is empty: name a GGUF file")
        if self.sha256 is not None and (self.model is None or len(parts(self.model)) > 1):
            raise SpecificationError("sha256 pins one file, which `model` names")
        for name, least in _LEAST.items():
            _check_number(name, getattr(self, name), least)
        for name, choice in _CHOICES.items():
            _check_choice(name, getattr(self, name), choice)
        _check_task(self)
        if not all(isinstance(item, str) for item in (*self.args, *self.env, *self.env.values())):
            raise SpecificationError("args and env hold strings only")
        if any("=" in name or not name for name in self.env):
            raise SpecificationError("a name in env is empty or holds an equals sign")
        if any("\0" in text for text in (*self.args, *self.env, *self.env.values())):
            raise SpecificationError("args and env cannot hold a NUL character")


def parts(path: str) -> tuple[str, ...]:
    """Name all files of a model whose first file's name says that there are several.

    llama.cpp's names are `NAME-00001-of-00003.gguf` and so on. A model in one file has none.
    """
    found = re.fullmatch(r"(?s)(.*-)00001-of-([0-9]{5})\.gguf", path)
    if found is None:
        return ()
    stem, count = found.groups()
    return tuple(f"{stem}{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1))


_LEAST = {
    "context": 1,
    "slots": 1,
    "batch": 1,
    "gpu_layers": 0,
    "threads": 1,
    "seed": 0,
    "sleep_after": 1,
}

_CHOICES: Mapping[str, tuple[object, ...]] = {
    "task": get_args(Task),
    "pooling": (*get_args(Pooling), None),
    "cache_type_k": (*get_args(CacheType), None),
    "cache_type_v": (*get_args(CacheType), None),
    "reasoning_format": (*get_args(ReasoningFormat), None),
    "flash_attention": (True, False, None),
    "reasoning": (True, False, None),
}


def _check_number(name: str, value: object, least: int) -> None:
    if value is None and name not in ("slots", "batch"):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecificationError(
            f"{name} must be a whole number of at least {least}, not {value!r}"
        )


def _check_choice(name: str, value: object, choice: tuple[object, ...]) -> None:
    if value not in choice:
        names = ", ".join(map(repr, choice))
        raise SpecificationError(f"{name} must be one of {names}, not {value!r}")


def _check_task(config: ModelConfig) -> None:
    task, pooling = config.task, config.pooling
    if task == "generation" and pooling is not None:
        raise SpecificationError(f"pooling {pooling!r} is nothing for task 'generation'")
    if task == "embedding" and pooling == "rank":
        raise SpecificationError("pooling 'rank' gives scores, not vectors: use task 'reranking'")
    if task == "reranking" and pooling not in (None, "rank"):
        raise SpecificationError(f"task 'reranking' pools by 'rank' alone, not by {pooling!r}")
    if task != "generation" and config.draft_model is not None:
        raise SpecificationError(f"draft_model is nothing for task {task!r}: it drafts text")
