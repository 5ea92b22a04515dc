"""Every field of `ModelConfig` means the same to a hosted and to a stock child.

What a field did is read back from the child, never from what it was told: from its endpoints, from
its log (at its verbosity 4, where llama.cpp says what it made of its parameters), from its answers,
and from the kernel.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import struct
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import get_args
from zlib import compress, crc32

import attrs
import pytest
import trio

from llamatrio import (
    ContextExceeded,
    Hosted,
    LoadFailed,
    LocalProvider,
    Lora,
    ModelConfig,
    ModelSession,
    PromptProgress,
    Request,
    RequestFailed,
    Result,
    ServerBackend,
    SpecificationError,
    Stock,
    chat_request,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind, hosted_settings
from llamatrio.config import CacheType, ReasoningFormat
from llamatrio.requests import Admitted, Delta
from llamatrio.session.base import Asleep, Awake, Opened, Publish, SessionEvent
from llamatrio.testing import parrot as gguf
from llamatrio.testing.parrot import Parrot, count_prompt_tokens, write_parrot

HOST_PROGRAM = Path(__file__).parent.parent / "llamatrio" / "child" / "host.py"

CONVERSATION = {"messages": [{"role": "user", "content": "Hello"}]}

PLAIN = "{% for m in messages %}[{{ m.content }}]{% endfor %} think={{ enable_thinking }}"
"""A template that says whether it was asked to let the model think, and has no thoughts."""

THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}</a>{% else %}<u>{{ m.content }}</u>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
"""The template of a model that thinks unless it is told not to."""


# -- the bench ---------------------------------------------------------------------------------


class Log(logging.Handler):
    """Collects the lines of a child's log; handlers are called in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._token = trio.lowlevel.current_trio_token()
        self._news = trio.lowlevel.ParkingLot()

    def emit(self, record: logging.LogRecord) -> None:
        self._token.run_sync_soon(self._take, record.getMessage())

    def _take(self, line: str) -> None:
        self.lines.append(line)
        self._news.unpark_all()

    async def find(self, pattern: str) -> str:
        """Wait for a line, and return what the group of the pattern matched."""
        while True:
            for line in self.lines:
                if found := re.search(pattern, line):
                    return found[1]
            await self._news.park()


class Tapped(ServerBackend):
    """Lets a test hear what a generation tells, and speak to the session itself, which tells all
    progress of a prompt."""

    session: ModelSession

    async def run(self, config: ModelConfig, publish: Publish) -> None:
        self.asleep, self.awake = trio.Event(), trio.Event()

        def tap(event: SessionEvent) -> None:
            publish(event)
            match event:
                case Opened():
                    self.session = event.session
                case Asleep():
                    self.asleep.set()
                case Awake():
                    self.awake.set()
                case _:
                    pass

        await super().run(config, tap)


@attrs.frozen
class Child:
    provider: LocalProvider
    backend: Tapped
    log: Log

    @property
    def pid(self) -> int:
        pid = self.provider.diagnostics().pid
        assert pid is not None
        return pid

    async def ask(self, path: str, body: Mapping[str, object] | None = None) -> object:
        request = Request(path, method="GET") if body is None else Request(path, body)
        return (await self.provider.submit(request).result()).outcome.body

    async def say(self, request: Request) -> Result:
        return await self.provider.submit(request).result()


def dig(value: object, *path: str | int) -> object:
    for step in path:
        assert isinstance(value, dict | list)
        value = value[step]  # type: ignore[index]
    return value


@attrs.frozen
class Files:
    """What the rows of the table name.

    Attributes:
      interpreter: Makes a hosted child as talkative as `-lv 4` makes a stock one.
    """

    parrot: Parrot
    other: Parrot
    thinker: Parrot
    says_a: Path
    says_b: Path
    eye: Path
    interpreter: str


@pytest.fixture(scope="session")
def files(models: Path, parrot: Parrot) -> Files:
    interpreter = models / "talkative-python"
    interpreter.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "*words, settings = sys.argv[1:]\n"
        "settings = json.dumps({**json.loads(settings), 'verbosity': 4})\n"
        "os.execv(sys.executable, [sys.executable, *words, settings])\n"
    )
    interpreter.chmod(0o755)
    thoughts = "<think>I am only thinking about it</think>The answer is forty two."
    return Files(
        parrot,
        write_parrot(models / "other.gguf", "Another parrot says another thing."),
        write_parrot(models / "thinker.gguf", thoughts),
        write_lora(models / 'says "a", loudly.gguf', parrot, "A"),
        write_lora(models / "says b.gguf", parrot, "B"),
        write_eye(models / "eye.gguf", parrot),
        str(interpreter),
    )


def write_lora(path: Path, parrot: Parrot, letter: str) -> Path:
    """Write an adapter that, at full scale, lets a parrot say one letter and nothing else.

    A parrot's right token is 36 logits ahead, twice the square root of its embedding. This one
    reads any token as that square root, and writes it four times to the letter.
    """
    vocabulary, embedding = sizes(parrot)
    token = gguf._SPECIAL_TOKENS.index(f"<0x{ord(letter):02X}>")
    metadata: dict[str, gguf._Value] = {
        "general.type": "adapter",
        "general.architecture": "llama",
        "adapter.type": "lora",
        "adapter.lora.alpha": 1.0,
    }
    down = gguf._Tensor("output.weight.lora_a", (embedding, 1), gguf._ones(embedding))
    cell = gguf._matrix((1, vocabulary), [(token, 0)], 4.0)
    up = gguf._Tensor("output.weight.lora_b", (1, vocabulary), cell)
    with path.open("wb") as file:
        gguf._write_gguf(file, metadata, [down, up])
    return path


def write_eye(path: Path, parrot: Parrot) -> Path:
    """Write a projector that sees four patches of grey in everything: all its weights are zero."""
    width, patch, image = 32, 8, 16
    _, embedding = sizes(parrot)
    half = gguf._Array(gguf._FLOAT32, 3, struct.pack("<3f", 0.5, 0.5, 0.5))
    metadata: dict[str, gguf._Value] = {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.projector_type": "mlp",
        "clip.use_gelu": True,
        "clip.vision.image_size": image,
        "clip.vision.patch_size": patch,
        "clip.vision.embedding_length": width,
        "clip.vision.feed_forward_length": width,
        "clip.vision.projection_dim": embedding,
        "clip.vision.block_count": 1,
        "clip.vision.attention.head_count": 1,
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.vision.image_mean": half,
        "clip.vision.image_std": half,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (patch, patch, 3, width),
        "v.position_embd.weight": (width, (image // patch) ** 2 + 1),
        "v.class_embd": (width,),
        "mm.0.weight": (width, embedding),
        "mm.0.bias": (embedding,),
        "mm.2.weight": (embedding, embedding),
        "mm.2.bias": (embedding,),
    }
    for matrix in ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down"):
        shapes[f"v.blk.0.{matrix}.weight"] = (width, width)
        shapes[f"v.blk.0.{matrix}.bias"] = (width,)
    for norm in ("ln1", "ln2"):
        shapes |= {f"v.blk.0.{norm}.weight": (width,), f"v.blk.0.{norm}.bias": (width,)}
    with path.open("wb") as file:
        gguf._write_gguf(file, metadata, [gguf._Tensor(*item) for item in shapes.items()])
    return path


def sizes(parrot: Parrot) -> tuple[int, int]:
    vocabulary = len(gguf._SPECIAL_TOKENS) + parrot.tokens
    return vocabulary, gguf._round_up(vocabulary, 32)


@asynccontextmanager
async def load(kind: Kind, files: Files, **fields: object) -> AsyncGenerator[Child, None]:
    """Load a parrot with these fields of its configuration."""
    log = Log()
    logger = logging.getLogger("llamatrio.child.talkative")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(log)
    logger.propagate = False
    kind, config = talkative(kind, files, {"model": files.parrot.path, **fields})
    backend = Tapped(kind, name="talkative")
    try:
        with trio.fail_after(60):
            async with open_provider(config, backend=backend) as provider:
                await provider.start()
                yield Child(provider, backend, log)
    finally:
        logger.removeHandler(log)


def talkative(kind: Kind, files: Files, fields: Mapping[str, object]) -> tuple[Kind, ModelConfig]:
    config = ModelConfig(**fields)  # type: ignore[arg-type]
    if isinstance(kind, Hosted):
        return Hosted(files.interpreter), config
    return kind, attrs.evolve(config, args=(*config.args, "-lv", "4"))


# -- how a field is read back ------------------------------------------------------------------

Read = Callable[[Child], Awaitable[object]]


def told(path: str, *keys: str | int) -> Read:
    """From an endpoint."""

    async def read(child: Child) -> object:
        return dig(await child.ask(path), *keys)

    return read


def logged(pattern: str) -> Read:
    """From the child's log."""

    async def read(child: Child) -> object:
        return await child.log.find(pattern)

    return read


async def contexts(child: Child) -> object:
    """The context of each slot, from /slots."""
    slots = await child.ask("/slots")
    assert isinstance(slots, list)
    return [dig(slot, "n_ctx") for slot in slots]


async def steps(child: Child) -> object:
    """The steps in which a prompt of 600 tokens is read, from its progress."""
    pieces: list[Admitted | Delta | PromptProgress] = []
    request = completion_request("x" * 599, max_tokens=1, cache_prompt=False)
    await child.backend.session.perform(request, pieces.append)
    return [piece.processed for piece in pieces if isinstance(piece, PromptProgress)]


async def prompt(child: Child) -> object:
    """The prompt of a conversation, from /apply-template."""
    return dig(await child.ask("/apply-template", CONVERSATION), "prompt")


async def adapters(child: Child) -> object:
    """The adapters with their scales, from /lora-adapters."""
    found = await child.ask("/lora-adapters")
    assert isinstance(found, list)
    return [(dig(one, "path"), dig(one, "scale")) for one in found]


async def words(child: Child) -> object:
    """What the model says."""
    return (await child.say(completion_request("x", temperature=0, max_tokens=3))).text


async def drafted(child: Child) -> object:
    """The whole answer, and whether tokens of it were drafted and accepted, from its timings."""
    result = await child.say(completion_request("x", temperature=0))
    timings = result.outcome.timings
    accepted = timings.get("draft_n_accepted", 0)
    return result.text, 0 < accepted <= timings.get("draft_n", 0)


async def thoughts(child: Child) -> object:
    """The answer, and the thoughts that were kept apart."""
    result = await child.say(chat_request("Hello"))
    return result.text, result.reasoning


async def variable(child: Child) -> object:
    """A variable of the child's environment, from the kernel."""
    environ = (await trio.Path(f"/proc/{child.pid}/environ").read_bytes()).split(b"\0")
    values = [one.partition(b"=")[2] for one in environ if one.startswith(b"PARROT=")]
    return values[0].decode() if values else None


# -- the table ---------------------------------------------------------------------------------


@attrs.frozen
class Row:
    """A field, set; any of the values may be a function of the files.

    Attributes:
      read: How the effect is read back.
      unset: What is read if the field is left alone.
      others: Further fields, in both cases.
    """

    field: str
    value: object
    read: Read
    unset: object
    expected: object
    others: Mapping[str, object] = attrs.field(factory=dict)


ROWS = (
    Row(
        "model",
        lambda f: f.other.path,
        told("/props", "model_path"),
        lambda f: str(f.parrot.path),
        lambda f: str(f.other.path),
    ),
    Row("model", lambda f: f.other.path, words, "Good morning from", "Another parrot says"),
    Row("context", 1024, contexts, [4096], [1024]),
    Row("context", 1024, contexts, [4096] * 3, [1024] * 3, {"slots": 3}),
    Row("slots", 3, contexts, [4096], [4096] * 3),
    Row("slots", 3, told("/props", "total_slots"), 1, 3),
    Row("batch", 200, steps, [0, 512, 600], [0, 200, 400, 600]),
    Row("threads", 3, logged(r"threadpool init, n_threads = (\d+)"), "1", "3", {"threads": 1}),
    Row("cache_type_k", "f32", logged(r"K \((\w+)\)"), "f16", "f32"),
    Row("cache_type_k", "bf16", logged(r"K \((\w+)\)"), "f16", "bf16"),
    Row("cache_type_v", "f32", logged(r"V \((\w+)\)"), "f16", "f32"),
    Row("cache_type_v", "bf16", logged(r"V \((\w+)\)"), "f16", "bf16"),
    Row("flash_attention", True, logged(r"flash_attn += (\w+)"), "auto", "enabled"),
    Row("flash_attention", False, logged(r"flash_attn += (\w+)"), "auto", "disabled"),
    Row("chat_template", PLAIN, told("/props", "chat_template"), gguf._CHAT_TEMPLATE, PLAIN),
    Row("chat_template", PLAIN, prompt, "user: Hello\nassistant:", "[Hello] think=False"),
    Row(
        "chat_template",
        "chatml",
        prompt,
        "user: Hello\nassistant:",
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    ),
    Row("mmproj", lambda f: f.eye, told("/props", "modalities", "vision"), False, True),
    Row(
        "lora",
        lambda f: (Lora(f.says_a, 0.5), Lora(f.says_b)),
        adapters,
        [],
        lambda f: [(str(f.says_a), 0.5), (str(f.says_b), 1.0)],
    ),
    Row("lora", lambda f: (Lora(f.says_a, 0.5), f.says_b), words, "Good morning from", "BBB"),
    Row("lora", lambda f: (f.says_a, Lora(f.says_b, 0.5)), words, "Good morning from", "AAA"),
    Row(
        "lora", lambda f: (Lora(f.says_a, 0.125),), words, "Good morning from", "Good morning from"
    ),
    Row(
        "draft_model",
        lambda f: f.parrot.path,
        drafted,
        lambda f: (f.parrot.text, False),
        lambda f: (f.parrot.text, True),
    ),
    Row("draft_model", lambda f: f.parrot.path, told("/slots", 0, "speculative"), False, True),
    Row(
        "reasoning",
        True,
        prompt,
        "[Hello] think=False",
        "[Hello] think=True",
        {"chat_template": PLAIN},
    ),
    Row(
        "reasoning",
        False,
        prompt,
        "<u>Hello</u><a>",
        "<u>Hello</u><a><think></think>",
        {"chat_template": THINKING},
    ),
    Row("reasoning", False, logged(r"thinking = (\d)"), "1", "0", {"chat_template": THINKING}),
    Row(
        "reasoning_format",
        "none",
        thoughts,
        ("The answer is forty two.", "I am only thinking about it"),
        ("<think>I am only thinking about it</think>The answer is forty two.", ""),
        {"model": lambda f: f.thinker.path, "chat_template": THINKING},
    ),
    Row("seed", 7, told("/props", "default_generation_settings", "params", "seed"), 2**32 - 1, 7),
    Row("env", {"PARROT": "grey, small"}, variable, None, "grey, small"),
)

ELSEWHERE = {
    "gpu_layers": "the log of a stock child; what the wheel holds for a hosted one",
    "devices": "a name that is wrong; what the wheel holds",
    "sleep_after": "the residency of the provider",
    "sha256": "what is refused to load, in test_identity.py",
    "task": "vectors and scores, in test_calls.py",
    "pooling": "vectors, in test_calls.py",
    "args": "the log of a stock child",
}
"""The fields that have a test of their own, and how they are read back there."""


def test_every_field_is_read_back_from_a_child() -> None:
    named = {row.field for row in ROWS} | ELSEWHERE.keys()
    assert named == {field.name for field in attrs.fields(ModelConfig)}


@pytest.mark.parametrize("row", ROWS, ids=[f"{n}-{row.field}" for n, row in enumerate(ROWS)])
@pytest.mark.slow
async def test_a_field_means_the_same_to_both_kinds(kind: Kind, files: Files, row: Row) -> None:
    fields = given_all(files, {**row.others, row.field: row.value})
    async with load(kind, files, **fields) as child:
        assert await row.read(child) == given(files, row.expected)


@pytest.mark.parametrize(
    "others", [dict(key) for key in {tuple(row.others.items()): None for row in ROWS}], ids=list
)
@pytest.mark.slow
async def test_a_field_that_is_left_alone_means_the_same_to_both_kinds(
    kind: Kind, files: Files, others: Mapping[str, object]
) -> None:
    rows = [row for row in ROWS if row.others == others]
    async with load(kind, files, **given_all(files, others)) as child:
        for row in rows:
            assert (row.field, await row.read(child)) == (row.field, given(files, row.unset))


def given(files: Files, value: object) -> object:
    return value(files) if callable(value) else value


def given_all(files: Files, fields: Mapping[str, object]) -> dict[str, object]:
    return {name: given(files, value) for name, value in fields.items()}


# -- context, slots, batch ---------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(("context", "held"), [(None, 4096), (1000, 1024), (5000, 4096)])
async def test_context_counts_the_tokens_of_one_slot(
    kind: Kind, files: Files, context: int | None, held: int, slots: int
) -> None:
    async with load(kind, files, context=context, slots=slots) as child:
        assert await contexts(child) == [held] * slots
        with pytest.raises(RequestFailed) as caught:
            await child.say(completion_request("x" * held))
        refusal = caught.value.__cause__
        assert isinstance(refusal, ContextExceeded)
        assert (refusal.prompt_tokens, refusal.context) == (held + 1, held)


async def test_each_slot_has_its_whole_context_while_the_others_are_full(
    kind: Kind, files: Files
) -> None:
    async with load(kind, files, context=512, slots=3) as child:
        request = completion_request("x" * 400, temperature=0)
        replies = [child.provider.submit(request) for _ in range(3)]
        assert [(await one.result()).text for one in replies] == [files.parrot.text] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "drafts", "least"), [(1, False, 2), (3, False, 3), (1, True, 4), (3, True, 12)]
)
async def test_the_smallest_batch_that_is_not_refused_serves_every_slot(
    kind: Kind, files: Files, slots: int, drafts: bool, least: int
) -> None:
    fields: dict[str, object] = {"slots": slots}
    if drafts:
        fields["draft_model"] = files.parrot.path
    with pytest.raises(SpecificationError, match=f"batch must be at least {least} "):
        async with load(kind, files, batch=least - 1, **fields):
            pass
    async with load(kind, files, batch=least, **fields) as child:
        request = completion_request("x" * 20, temperature=0)
        replies = [child.provider.submit(request) for _ in range(slots)]
        assert [(await one.result()).text for one in replies] == [files.parrot.text] * slots


# -- computing ---------------------------------------------------------------------------------


async def test_two_more_threads_are_two_more_threads_of_the_process(
    kind: Kind, files: Files
) -> None:
    counts = []
    for threads in (1, 3):
        async with load(kind, files, threads=threads) as child:
            assert await words(child) == "Good morning from"
            counts.append(len(os.listdir(f"/proc/{child.pid}/task")))
    assert counts[1] - counts[0] == 2


@pytest.mark.stock
async def test_gpu_layers_reach_the_loader_of_a_stock_child(
    llama_server: str, files: Files
) -> None:
    kind = Stock(llama_server)
    for layers in (0, 1):
        async with load(kind, files, gpu_layers=layers) as child:
            assert await child.log.find(r"offloaded (\d+)/2 layers") == str(layers)


async def test_the_wheel_holds_every_setting_as_it_was_told(files: Files) -> None:
    # Attributes of the wheel's parameters could be copies, and what is set on a copy is lost.
    config = ModelConfig(
        files.parrot.path,
        context=1000,
        slots=3,
        batch=96,
        gpu_layers=5,
        devices=("none",),
        threads=3,
        cache_type_k="q8_0",
        cache_type_v="iq4_nl",
        flash_attention=True,
        chat_template=PLAIN,
        mmproj=files.other.path,
        draft_model=files.parrot.path,
        reasoning=True,
        reasoning_format="deepseek-legacy",
        seed=7,
        sleep_after=9,
    )
    settings = hosted_settings(config, "/nowhere/x.sock")
    program = (
        "import json, operator, runpy, sys, xllamacpp\n"
        "host, settings = runpy.run_path(sys.argv[1]), json.loads(sys.argv[2])\n"
        "params = xllamacpp.CommonParams()\n"
        "host['configure'](params, settings, xllamacpp)\n"
        "told = {n: host['native'](n, v, xllamacpp) for n, v in settings.items()}\n"
        "held = {n: operator.attrgetter(n)(params) for n in settings}\n"
        "print(json.dumps({n: repr(held[n]) for n in settings if held[n] != told[n]}))\n"
    )
    command = [sys.executable, "-c", program, str(HOST_PROGRAM), json.dumps(settings)]
    with trio.fail_after(60):
        done = await trio.run_process(command, capture_stdout=True)
    assert json.loads(done.stdout) == {}
    assert settings.keys() >= {"n_gpu_layers", "split_mode", "main_gpu", "mmproj_use_gpu"}


async def test_both_kinds_compute_without_devices(kind: Kind, files: Files) -> None:
    async with load(kind, files, devices=("none",), draft_model=files.parrot.path) as child:
        assert await drafted(child) == (files.parrot.text, True)


async def test_a_device_that_is_not_there_is_named_by_the_error(kind: Kind, files: Files) -> None:
    error, message = (
        (SpecificationError, "cannot choose devices")
        if isinstance(kind, Hosted)
        else (LoadFailed, "invalid device: CUDA7")
    )
    with pytest.raises(error, match=message):
        async with load(kind, files, devices=("CUDA7",)):
            pass


QUANTIZED = [name for name in get_args(CacheType) if name not in ("f32", "f16", "bf16")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache_type", "letter"), [*((name, "k") for name in QUANTIZED), ("q5_1", "v")]
)
async def test_a_quantized_cache_is_named_by_a_model_that_is_too_narrow_for_it(
    kind: Kind, files: Files, cache_type: str, letter: str
) -> None:
    complaint = f"{letter.upper()} cache type {cache_type} with block size 32 does not divide"
    with pytest.raises(LoadFailed, match=complaint):
        async with load(kind, files, **{f"cache_type_{letter}": cache_type}):
            pass


# -- templates and thoughts --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama2", "mistral-v7", ""])
async def test_a_template_that_would_be_sent_as_it_stands_is_refused(
    kind: Kind, files: Files, name: str
) -> None:
    with pytest.raises(SpecificationError, match="chat_template"):
        async with load(kind, files, chat_template=name):
            pass


@pytest.mark.stock
async def test_a_name_of_a_template_is_taken_where_jinja_is_off(
    llama_server: str, files: Files
) -> None:
    fields = {"chat_template": "llama2", "args": ("--no-jinja",)}
    async with load(Stock(llama_server), files, **fields) as child:
        assert await prompt(child) == "[INST] Hello [/INST]"


async def test_a_template_that_does_not_parse_fails_the_load(kind: Kind, files: Files) -> None:
    with pytest.raises(LoadFailed, match=r"Parser Error|chat template is not supported"):
        async with load(kind, files, chat_template="{% for"):
            pass


async def test_thoughts_of_earlier_turns_are_preserved_by_both_kinds(
    kind: Kind, files: Files
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %} {{ preserve_reasoning }}"
    async with load(kind, files, chat_template=template) as child:
        assert await prompt(child) == "Hello True"


@pytest.mark.slow
@pytest.mark.parametrize("form", get_args(ReasoningFormat))
async def test_thoughts_go_where_the_reasoning_format_says(
    kind: Kind, files: Files, form: str
) -> None:
    fields = {"model": files.thinker.path, "chat_template": THINKING, "reasoning_format": form}
    apart = ("The answer is forty two.", "I am only thinking about it")
    async with load(kind, files, **fields) as child:
        assert await thoughts(child) == ((files.thinker.text, "") if form == "none" else apart)


# -- files -------------------------------------------------------------------------------------


async def test_a_lora_with_a_colon_in_its_path_is_refused_where_it_cannot_be_told(
    kind: Kind, files: Files, models: Path
) -> None:
    path = write_lora(models / "says:a.gguf", files.parrot, "A")
    if isinstance(kind, Stock):
        with pytest.raises(SpecificationError, match="colon"):
            async with load(kind, files, lora=(path,)):
                pass
    else:
        async with load(kind, files, lora=(path,)) as child:
            assert await words(child) == "AAA"


async def test_scales_of_adapters_can_be_changed_while_the_model_is_loaded(
    kind: Kind, files: Files
) -> None:
    async with load(kind, files, lora=(files.says_a, Lora(files.says_b, 0.5))) as child:
        with_scales = completion_request(
            "x", temperature=0, max_tokens=3, lora=[{"id": 0, "scale": 0.1}, {"id": 1, "scale": 1}]
        )
        assert (await child.say(with_scales)).text == "BBB"
        assert await words(child) == "AAA"
        scales = [{"id": 0, "scale": 0}, {"id": 1, "scale": 1}]
        await child.say(Request("/lora-adapters", scales))
        assert await adapters(child) == [(str(files.says_a), 0), (str(files.says_b), 1)]
        assert await words(child) == "BBB"


def png(pixels: int) -> bytes:
    """Make a grey square."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc32(kind + data))

    head = struct.pack(">IIBBBBB", pixels, pixels, 8, 2, 0, 0, 0)
    rows = compress((b"\0" + b"\x80\x80\x80" * pixels) * pixels)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [None, ("none",)])
async def test_an_image_is_read_through_the_projector(
    kind: Kind, files: Files, devices: tuple[str, ...] | None
) -> None:
    image = {"url": "data:image/png;base64," + b64encode(png(16)).decode()}
    content = [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": image}]
    async with load(kind, files, mmproj=files.eye, devices=devices) as child:
        result = await child.say(chat_request([{"role": "user", "content": content}]))
        assert result.text == files.parrot.text
        patches = result.outcome.usage.prompt - count_prompt_tokens("user: Look\nassistant:")
        assert patches == 4


async def test_a_projector_that_is_none_is_named_by_both_kinds(kind: Kind, files: Files) -> None:
    complaint = f"Failed to load CLIP model from {re.escape(str(files.other.path))}"
    with pytest.raises(LoadFailed, match=complaint):
        async with load(kind, files, mmproj=files.other.path):
            pass


# -- seed, sleep, args -------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_same_seed_draws_the_same_words_in_another_child(
    kind: Kind, files: Files
) -> None:
    drawn = []
    request = completion_request("x", temperature=100, min_p=0, top_p=1, top_k=0, max_tokens=12)
    for seed in (7, 7, 8, None, None):
        async with load(kind, files, seed=seed) as child:
            drawn.append((await child.say(request)).text)
    assert drawn[0] == drawn[1]
    assert len({*drawn}) == 4


@pytest.mark.parametrize("seed", [2**32 - 1, 2**32])
async def test_a_seed_that_would_be_another_one_is_refused(
    kind: Kind, files: Files, seed: int
) -> None:
    with pytest.raises(SpecificationError, match="seed must be less than 4294967295"):
        async with load(kind, files, seed=seed):
            pass


async def test_a_child_that_may_sleep_wakes_for_a_request(kind: Kind, files: Files) -> None:
    async with load(kind, files, sleep_after=1) as child:
        pid = child.pid
        with trio.fail_after(20):
            await child.backend.asleep.wait()
        assert child.provider.diagnostics().residency == "asleep"
        assert await words(child) == "Good morning from"
        await child.backend.awake.wait()
        assert child.provider.diagnostics().residency == "resident"
        assert child.pid == pid


@pytest.mark.stock
async def test_args_reach_a_stock_child(llama_server: str, files: Files) -> None:
    kind = Stock(llama_server)
    state = r"prompt cache is (\w+)"
    async with load(kind, files) as child:
        assert await child.log.find(state) == "enabled"
    async with load(kind, files, args=("--cache-ram", "0")) as child:
        assert await child.log.find(state) == "disabled"


async def test_args_are_refused_by_a_hosted_child(files: Files) -> None:
    with pytest.raises(SpecificationError, match="a hosted child takes no args"):
        async with load(Hosted(), files, args=("--cache-ram", "0")):
            pass


@pytest.mark.stock
async def test_the_users_own_configuration_of_llama_cpp_changes_nothing(
    llama_server: str, files: Files, tmp_path: Path
) -> None:
    folder = tmp_path / ".config" / "llama.cpp"
    folder.mkdir(parents=True)
    (folder / "config.ini").write_text("[default]\nctx-size = 512\n")
    kind = Stock(llama_server)
    async with load(kind, files, env={"HOME": str(tmp_path)}) as child:
        assert await contexts(child) == [4096]
    async with load(kind, files, env={"XDG_CONFIG_HOME": str(folder.parent)}) as child:
        assert await contexts(child) == [512]


async def test_a_hosted_child_tells_why_it_failed_however_slowly_its_log_is_read(
    files: Files,
) -> None:
    logs: list[bytes] = []
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for n in range(4):
                nursery.start_soon(fail_slowly, files, n, logs)
    assert len(logs) == 4
    for log in logs:
        assert b"K cache type q8_0 with block size 32" in log
        assert b"exiting due to model loading error" in log


async def fail_slowly(files: Files, n: int, logs: list[bytes]) -> None:
    config = ModelConfig(files.parrot.path, cache_type_k="q8_0")
    settings = json.dumps(hosted_settings(config, f"{files.parrot.path}.{n}.sock"))
    command = [files.interpreter, "-P", str(HOST_PROGRAM), settings]
    environ = {"LLAMA_API_KEY": "key", "LLAMA_SERVER_ROUTER_PORT": "0"}
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    log = b""
    async with trio.lowlevel.FdStream(ours) as stream:
        child = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stderr=theirs, env=environ
        )
        os.close(theirs)
        while data := await stream.receive_some(512):
            log += data
            await trio.sleep(0.02)  # the slow reader
    assert await child.wait() == 1
    assert child.stdin is not None
    await child.stdin.aclose()
    logs.append(log)
