from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from llamatrio.child.exits import Exit
from llamatrio.child.launch import (
    Address,
    Hosted,
    Kind,
    Launch,
    Own,
    Stock,
    check,
    harmless,
    hosted_settings,
    plan,
    server_options,
)
from llamatrio.config import Lora, ModelConfig
from llamatrio.errors import ChildError, SpecificationError

SOCKET = "/private/a.sock"
KEY = "0123456789abcdef" * 4
KINDS: list[Kind] = [Hosted(), Stock(), Own(("python", "child.py"))]


def configure(**fields: Any) -> ModelConfig:  # noqa: ANN401 - fields of every type, wrong ones too
    return ModelConfig("m.gguf", **fields)


def make(
    kind: Kind,
    config: ModelConfig,
    address: Address = SOCKET,
    environ: dict[str, str] | None = None,
) -> Launch:
    return plan(
        kind,
        config,
        program="/bin/program",
        host_program="/lib/host.py",
        address=address,
        key=KEY,
        environ=environ or {},
    )


# -- options that are not the user's -----------------------------------------------------------

# https://github.com/luongnv89/ccl/issues/204
RESERVED = """
    --host --port --reuse-port --path --api-prefix --api-key --api-key-file
    --ssl-key-file --ssl-cert-file --cors-origins --cors-methods --cors-headers --cors-credentials
    --ui --webui --no-ui --no-webui --ui-config --webui-config-file --ui-mcp-proxy
    --no-webui-mcp-proxy --tools --tools-runtime -ag --agent -no-ag --no-agent
    --mcp-servers-config --mcp-servers-json --models-dir --models-preset --models-max
    --models-autoload --no-models-autoload -hft --hf-token --server-base
    --log-disable --log-jsonl --no-log-jsonl --log-prefix --no-log-prefix --log-timestamps
    --no-log-timestamps --log-colors
    -h --help --usage --version --list-devices -cl --cache-list --completion-bash
""".split()

FIELDS = {
    "model": "-m --model",
    "context": "-c --ctx-size -kvu --kv-unified -no-kvu --no-kv-unified",
    "slots": "-np --parallel",
    "batch": "-b --batch-size -ub --ubatch-size",
    "gpu_layers": "-ngl --gpu-layers --n-gpu-layers",
    "devices": "-dev --device",
    "threads": "-t --threads",
    "cache_type_k": "-ctk --cache-type-k",
    "cache_type_v": "-ctv --cache-type-v",
    "flash_attention": "-fa --flash-attn",
    "chat_template": "--chat-template --chat-template-file",
    "mmproj": "-mm --mmproj --no-mmproj",
    "lora": "--lora --lora-scaled",
    "draft_model": "-md --model-draft --spec-draft-model",
    "task": "--embedding --embeddings --rerank --reranking",
    "pooling": "--pooling",
    "reasoning": "-rea --reasoning",
    "reasoning_format": "--reasoning-format",
    "seed": "-s --seed",
    "sleep_after": "--sleep-idle-seconds",
}


def spellings(option: str) -> list[str]:
    """What llama.cpp takes for this option, and what somebody might hope that it takes."""
    if not option.startswith("--"):
        return [option, f"{option}=x"]
    underscored = "--" + option[2:].replace("-", "_")
    mixed = "--" + option[2:].replace("-", "_", 1)
    return [option, underscored, mixed, option.upper(), f"{option}=x", f"{underscored}=x=y"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_option_that_is_ours_is_refused_by_name_in_every_spelling(kind: Kind) -> None:
    for option in RESERVED:
        for spelling in spellings(option):
            with pytest.raises(SpecificationError, match="is set by llamatrio") as caught:
                check(kind, configure(args=["--verbose", spelling, "x"]))
            assert repr(spelling) in str(caught.value)


@pytest.mark.parametrize(("field", "options"), FIELDS.items())
def test_an_option_that_has_a_field_is_refused_and_the_field_named(
    field: str, options: str
) -> None:
    for option in options.split():
        for spelling in spellings(option):
            with pytest.raises(SpecificationError, match=f"field of its own: {field}$"):
                check(Stock(), configure(args=[spelling, "1"]))


OUR_VARIABLES = """LLAMA_API_KEY LLAMA_ARG_HOST LLAMA_ARG_PORT LLAMA_ARG_MODEL
    LLAMA_ARG_SSL_KEY_FILE LLAMA_ARG_NO_UI llama_arg_host LLAMA_SERVER_ROUTER_PORT
    LLAMA_SERVER_CHILD_MODE LLAMA_SERVER_SLOTS_DEBUG LLAMA_LOG_FILE Llama_Api_Key""".split()


@pytest.mark.parametrize("kind", KINDS)
def test_a_variable_that_is_ours_is_refused_by_name(kind: Kind) -> None:
    for name in OUR_VARIABLES:
        with pytest.raises(SpecificationError, match=f"variable {name} "):
            check(kind, configure(env={name: "x"}))


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--verbose",),
        ("-lv", "4"),
        ("--threads-batch", "2"),
        ("-tb", "2"),
        ("--override-kv", "tokenizer.ggml.add_bos_token=bool:false"),
        ("-ot", "blk=CPU"),
        ("--rope-scaling", "yarn"),
        ("--no-mmap",),
        ("--metrics",),
        ("--embd-normalize", "-1"),
        ("--spec-default",),
        ("--hf-file", "x.gguf"),
        ("--temp", "-1"),
        ("--alias", "host"),
        ("--alias", "port=1"),
    ],
)
def test_a_harmless_option_reaches_the_command_before_ours(args: tuple[str, ...]) -> None:
    launch = make(Stock(), configure(args=args))
    assert launch.command[1 : 1 + len(args)] == args


def test_ours_come_after_the_users_own_so_that_they_win() -> None:
    options = server_options(configure(args=("--verbose",)), SOCKET)
    assert options[0] == "--verbose"
    assert options[-2:] == ["--host", SOCKET]
    assert options.count("--host") == 1


# -- the source of the model -------------------------------------------------------------------

SOURCES = """-hf -hfr --hf-repo --hf_repo -mu --model-url --model_url -dr --docker-repo
    --fim-qwen-1.5b-default --fim-qwen-7b-spec --gpt-oss-20b-default --gpt_oss_120b_default
    --embd-gemma-default --vision-gemma-4b-default""".split()


# https://github.com/ggml-org/llama.cpp/issues/27351
@pytest.mark.parametrize("args", [(), ("--verbose",), ("--hf-file", "m.gguf"), ("hf",)])
def test_no_model_at_all_is_refused(args: tuple[str, ...]) -> None:
    with pytest.raises(SpecificationError, match="no model"):
        check(Stock(), ModelConfig(None, args=args))


def test_two_models_are_refused_and_both_named() -> None:
    for source in SOURCES:
        with pytest.raises(SpecificationError, match=f"two models: 'm.gguf' and '{source}'"):
            check(Stock(), configure(args=[source, "user/repository"]))


def test_a_model_from_elsewhere_is_taken_from_the_args_and_may_be_fetched() -> None:
    for source in SOURCES:
        config = ModelConfig(None, args=[source, "user/repository"])
        check(Stock(), config)
        options = server_options(config, SOCKET)
        assert options[:2] == [source, "user/repository"]
        assert "--model" not in options
        assert "--offline" not in options


def test_a_model_that_is_a_file_is_never_fetched() -> None:
    assert "--offline" in server_options(configure(), SOCKET)
    assert hosted_settings(configure(), SOCKET)["offline"] is True


def test_a_hosted_child_without_a_model_is_refused() -> None:
    with pytest.raises(SpecificationError, match="no model"):
        check(Hosted(), ModelConfig(None))


# -- what a kind of child cannot do ------------------------------------------------------------


def test_a_hosted_child_refuses_args() -> None:
    with pytest.raises(SpecificationError, match="takes no args"):
        check(Hosted(), configure(args=["--verbose"]))


@pytest.mark.parametrize("devices", [("CUDA0",), ("CUDA0", "CUDA1"), ("none", "CUDA0"), ()])
def test_a_hosted_child_refuses_devices_other_than_the_cpu(devices: tuple[str, ...]) -> None:
    with pytest.raises(SpecificationError, match="cannot choose devices"):
        check(Hosted(), configure(devices=devices))
    check(Stock(), configure(devices=devices))


def test_a_lora_path_with_a_colon_is_refused_where_an_option_cannot_hold_it() -> None:
    config = configure(lora=["C:/l.gguf"])
    check(Hosted(), config)
    for kind in (Stock(), Own(("x",))):
        with pytest.raises(SpecificationError, match="colon"):
            check(kind, config)


def test_an_own_child_needs_a_command() -> None:
    with pytest.raises(SpecificationError, match="command of an own child is empty"):
        check(Own(()), configure())


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_that_llama_cpp_would_take_for_none_is_refused(kind: Kind) -> None:
    check(kind, configure(seed=2**32 - 2))
    with pytest.raises(SpecificationError, match="seed must be less than 4294967295"):
        check(kind, configure(seed=2**32 - 1))


@pytest.mark.parametrize(
    ("least", "fields"),
    [
        (2, {}),
        (2, {"slots": 2}),
        (5, {"slots": 5}),
        (4, {"draft_model": "d.gguf"}),
        (20, {"draft_model": "d.gguf", "slots": 5}),
    ],
)
def test_a_batch_that_cannot_hold_a_step_of_every_slot_is_refused(
    least: int, fields: dict[str, Any]
) -> None:
    for kind in KINDS:
        check(kind, configure(batch=least, **fields))
        with pytest.raises(SpecificationError, match=f"batch must be at least {least} here"):
            check(kind, configure(batch=least - 1, **fields))


@pytest.mark.parametrize("task", ["embedding", "reranking"])
def test_what_pools_texts_of_several_slots_wants_equal_shares_and_a_cache_for_all(
    task: str,
) -> None:
    for kind in KINDS:
        check(kind, configure(task=task, batch=511))
        for slots in (2, 8):
            check(kind, configure(task=task, slots=slots, context=256))
        with pytest.raises(
            SpecificationError, match=r"slots must be a power of two for task .* 3$"
        ):
            check(kind, configure(task=task, slots=3, batch=513, context=256))
        with pytest.raises(SpecificationError, match="batch must be a multiple of slots"):
            check(kind, configure(task=task, slots=4, batch=510, context=256))
        with pytest.raises(SpecificationError, match="several slots want a context"):
            check(kind, configure(task=task, slots=4))
        check(kind, configure(slots=3, batch=511))


@pytest.mark.parametrize("template", ["llama3", "", "mistral-v7", "no template"])
def test_the_name_of_a_template_that_llama_cpp_would_send_as_it_stands_is_refused(
    template: str,
) -> None:
    for kind in KINDS:
        with pytest.raises(SpecificationError, match=f"chat_template '{template}' is no Jinja"):
            check(kind, configure(chat_template=template))
        check(kind, configure(chat_template="chatml"))
        check(kind, configure(chat_template="{{ messages }}"))
    check(Stock(), configure(chat_template=template, args=["--no-jinja"]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_checks_first(kind: Kind) -> None:
    with pytest.raises(SpecificationError):
        make(kind, configure(args=["--host", "0.0.0.0"]))


# -- the two dialects --------------------------------------------------------------------------

Q8 = {"enum": "ggml_type.GGML_TYPE_Q8_0"}
IQ4 = {"enum": "ggml_type.GGML_TYPE_IQ4_NL"}
ON = {"enum": "llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED"}
OFF = {"enum": "llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED"}
NONE = {"enum": "llama_split_mode.LLAMA_SPLIT_MODE_NONE"}
LEGACY = {"enum": "common_reasoning_format.COMMON_REASONING_FORMAT_DEEPSEEK_LEGACY"}
THINK = {"preserve_reasoning": "true"}  # what llama-server sets by itself
DRAFT = {"enum": "common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE"}
MEAN = {"enum": "llama_pooling_type.LLAMA_POOLING_TYPE_MEAN"}
RANK = {"enum": "llama_pooling_type.LLAMA_POOLING_TYPE_RANK"}
EMBEDS: dict[str, object] = {"embedding": True, "kv_unified": True}

# What a field adds to, or changes in, the options and the settings of a bare model.
DIALECTS: list[tuple[dict[str, Any], dict[str, str | None], dict[str, object]]] = [
    ({"context": 1000}, {"--ctx-size": "1000"}, {"n_ctx": 1000}),
    ({"context": 1000, "slots": 3}, {"--ctx-size": "3000", "--parallel": "3"},
     {"n_ctx": 3000, "n_parallel": 3}),
    ({"slots": 4}, {"--parallel": "4"}, {"n_parallel": 4}),
    ({"batch": 64}, {"--batch-size": "64", "--ubatch-size": "64"}, {"n_batch": 64, "n_ubatch": 64}),
    ({"batch": 2048}, {"--batch-size": "2048"}, {"n_batch": 2048}),
    ({"gpu_layers": 0}, {"--gpu-layers": "0"}, {"n_gpu_layers": 0}),
    ({"gpu_layers": 99}, {"--gpu-layers": "99"}, {"n_gpu_layers": 99}),
    ({"devices": ["none"]}, {"--device": "none"},
     {"split_mode": NONE, "main_gpu": -1, "mmproj_use_gpu": False}),
    ({"threads": 2}, {"--threads": "2"}, {"cpuparams.n_threads": 2}),
    ({"cache_type_k": "q8_0"}, {"--cache-type-k": "q8_0"}, {"cache_type_k": Q8}),
    ({"cache_type_v": "iq4_nl"}, {"--cache-type-v": "iq4_nl"}, {"cache_type_v": IQ4}),
    ({"flash_attention": True}, {"--flash-attn": "on"}, {"flash_attn_type": ON}),
    ({"flash_attention": False}, {"--flash-attn": "off"}, {"flash_attn_type": OFF}),
    ({"chat_template": "chatml"}, {"--chat-template": "chatml"}, {"chat_template": "chatml"}),
    ({"mmproj": "p.gguf"}, {"--mmproj": "p.gguf"}, {"mmproj.path": "p.gguf"}),
    ({"lora": [Lora("l.gguf", 0.5), "k.gguf"]}, {"--lora-scaled": "l.gguf:0.5,k.gguf:1.0"},
     {"lora_adapters": [["l.gguf", 0.5], ["k.gguf", 1.0]]}),
    ({"lora": ["a,b.gguf"]}, {"--lora-scaled": '"a,b.gguf:1.0"'},
     {"lora_adapters": [["a,b.gguf", 1.0]]}),
    ({"draft_model": "d.gguf"}, {"--spec-draft-model": "d.gguf", "--spec-type": "draft-simple"},
     {"speculative.draft.mparams.path": "d.gguf", "speculative.types": [DRAFT]}),
    ({"task": "embedding"}, {"--kv-unified": None, "--embedding": None}, EMBEDS),
    ({"task": "embedding", "pooling": "mean"},
     {"--kv-unified": None, "--embedding": None, "--pooling": "mean"},
     EMBEDS | {"pooling_type": MEAN}),
    ({"task": "embedding", "batch": 2048},
     {"--kv-unified": None, "--embedding": None, "--batch-size": "2048", "--ubatch-size": "2048"},
     EMBEDS | {"n_batch": 2048, "n_ubatch": 2048}),
    ({"task": "embedding", "context": 1000, "slots": 4},
     {"--kv-unified": None, "--embedding": None, "--parallel": "4", "--ctx-size": "4096",
      "--kv-unified-per-slot": "1024"},
     EMBEDS | {"n_parallel": 4, "n_ctx": 4096, "kv_unified_per_slot": 1024}),
    ({"task": "reranking"}, {"--kv-unified": None, "--reranking": None},
     EMBEDS | {"pooling_type": RANK}),
    ({"task": "reranking", "pooling": "rank"},
     {"--kv-unified": None, "--reranking": None, "--pooling": "rank"},
     EMBEDS | {"pooling_type": RANK}),
    ({"reasoning": True}, {"--reasoning": "on"},
     {"enable_reasoning": 1, "default_template_kwargs": THINK | {"enable_thinking": "true"}}),
    ({"reasoning": False}, {"--reasoning": "off"},
     {"enable_reasoning": 0, "default_template_kwargs": THINK | {"enable_thinking": "false"}}),
    ({"reasoning_format": "deepseek-legacy"}, {"--reasoning-format": "deepseek-legacy"},
     {"reasoning_format": LEGACY}),
    ({"seed": 0}, {"--seed": "0"}, {"sampling.seed": 0}),
    ({"sleep_after": 60}, {"--sleep-idle-seconds": "60"}, {"sleep_idle_seconds": 60}),
]  # fmt: skip

BARE_OPTIONS = {
    "--no-kv-unified": None,
    "--no-ui": None,
    "--offline": None,
    "--model": "m.gguf",
    "--parallel": "1",
    "--batch-size": "512",
    "--ubatch-size": "512",
    "--cors-origins": "localhost",
    "--log-colors": "off",
    "--host": SOCKET,
}

BARE_SETTINGS = {
    "model.path": "m.gguf",
    "n_parallel": 1,
    "kv_unified": False,
    "n_batch": 512,
    "n_ubatch": 512,
    "cors_origins": "localhost",
    "cors_origins_explicit": True,
    "default_template_kwargs": THINK,
    "ui": False,
    "offline": True,
    "hostnames": [SOCKET],
}


def options_of(config: ModelConfig) -> dict[str, str | None]:
    """Pair each option with its value, or None for a switch; an option comes once."""
    words = server_options(config, SOCKET)
    pairs: dict[str, str | None] = {}
    while words:
        option = words.pop(0)
        assert option.startswith("--")
        assert option not in pairs
        value = words.pop(0) if words and not words[0].startswith("--") else None
        pairs[option] = value
    return pairs


def test_a_bare_model_in_both_dialects() -> None:
    assert options_of(configure()) == BARE_OPTIONS
    assert hosted_settings(configure(), SOCKET) == BARE_SETTINGS


@pytest.mark.parametrize(("fields", "options", "settings"), DIALECTS, ids=str)
def test_a_field_means_the_same_in_both_dialects(
    fields: dict[str, Any], options: dict[str, str | None], settings: dict[str, object]
) -> None:
    config = configure(**fields)
    for kind in KINDS:
        check(kind, config)
    expected = BARE_OPTIONS | options
    if "--kv-unified" in options:
        del expected["--no-kv-unified"]
    assert options_of(config) == expected
    assert hosted_settings(config, SOCKET) == BARE_SETTINGS | settings


def test_every_field_is_in_the_table_of_dialects() -> None:
    tested = {name for fields, _, _ in DIALECTS for name in fields}
    ours = {"sha256"}  # told to no child
    assert tested == set(attrs.fields_dict(ModelConfig)) - {"model", "args", "env"} - ours


def test_an_address_with_a_port_is_told_in_both_dialects() -> None:
    options = server_options(configure(), ("127.0.0.1", 4711))
    assert options[-4:] == ["--host", "127.0.0.1", "--port", "4711"]
    settings = hosted_settings(configure(), ("127.0.0.1", 4711))
    assert (settings["hostnames"], settings["port"]) == (["127.0.0.1"], 4711)


def test_the_commands_of_the_three_kinds() -> None:
    hosted, stock, own = (make(kind, configure(slots=2)).command for kind in KINDS)
    assert hosted[:3] == ("/bin/program", "-P", "/lib/host.py")
    assert json.loads(hosted[3]) == BARE_SETTINGS | {"n_parallel": 2}
    assert len(hosted) == 4
    assert stock == ("/bin/program", *server_options(configure(slots=2), SOCKET))
    assert own == ("/bin/program", "child.py", *server_options(configure(slots=2), SOCKET))


# -- the environment and the secrets -----------------------------------------------------------

# https://github.com/ollama/ollama/issues/17822
# https://github.com/ggml-org/llama.cpp/issues/24388
HARMFUL = [
    *"""LLAMA_API_KEY LLAMA_ARG_HOST LLAMA_ARG_SSL_KEY_FILE LLAMA_ARG_MODEL
    LLAMA_SERVER_CHILD_MODE LLAMA_SERVER_ROUTER_PORT LLAMA_CACHE LLAMA_LOG_FILE llama_arg_port
    HF_TOKEN HUGGING_FACE_HUB_TOKEN GITHUB_TOKEN OPENAI_API_KEY AWS_SECRET_ACCESS_KEY AWS_PROFILE
    LD_PRELOAD LD_LIBRARY_PATH LD_AUDIT DYLD_INSERT_LIBRARIES GLIBC_TUNABLES
    SSL_CERT_FILE SSL_CERT_DIR SSLKEYLOGFILE OPENSSL_CONF REQUESTS_CA_BUNDLE
    HTTP_PROXY HTTPS_PROXY https_proxy NO_PROXY
    PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONUNBUFFERED VIRTUAL_ENV
    SSH_AUTH_SOCK NOTIFY_SOCKET DATABASE_URL XPATH PATHS HOMEPAGE MY_CUDA_THING
    XDG_CONFIG_HOME""".split()
]

HARMLESS = [
    *"""PATH HOME USER LANG LC_ALL LC_CTYPE TZ TMPDIR XDG_RUNTIME_DIR Path
    CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
    HSA_OVERRIDE_GFX_VERSION GGML_CUDA_P2P VK_ICD_FILENAMES OMP_NUM_THREADS ONEAPI_DEVICE_SELECTOR
    SystemRoot""".split()
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_inherits_the_harmless_part_of_our_environment_alone(kind: Kind) -> None:
    ours = dict.fromkeys(HARMFUL, "stray") | dict.fromkeys(HARMLESS, "kept")
    environ = dict(make(kind, configure(), environ=ours).environ)
    assert environ.pop("LLAMA_API_KEY") == KEY
    assert environ.pop("LLAMA_SERVER_ROUTER_PORT") == "0"
    # Stock llama-server takes options from a file in there.
    assert environ.pop("XDG_CONFIG_HOME", "/dev/null") == "/dev/null"
    assert environ.pop("GGML_NO_BACKTRACE") == "1"
    assert environ == dict.fromkeys(HARMLESS, "kept")


def test_stock_reads_no_options_from_a_file_of_the_user() -> None:
    launch = make(Stock(), configure(), environ={"XDG_CONFIG_HOME": "/home/user/.config"})
    assert launch.environ["XDG_CONFIG_HOME"] == "/dev/null"


def test_a_variable_is_judged_by_its_whole_name() -> None:
    assert [name for name in HARMFUL if harmless(name)] == []
    assert [name for name in HARMLESS if not harmless(name)] == []


def test_variables_of_the_configuration_are_passed_on_and_win_over_ours() -> None:
    config = configure(env={"HF_TOKEN": "t", "CUDA_VISIBLE_DEVICES": "1", "LD_LIBRARY_PATH": "/x"})
    environ = make(Stock(), config, environ={"CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin"}).environ
    assert {name: environ[name] for name in (*config.env, "PATH")} == {**config.env, "PATH": "/bin"}


# https://github.com/CodeNeow/MyLlama/issues/31
@pytest.mark.parametrize("kind", KINDS)
def test_the_key_is_in_the_environment_and_nowhere_else(kind: Kind) -> None:
    launch = make(kind, configure(env={"HF_TOKEN": "hunter2"}))
    assert launch.environ["LLAMA_API_KEY"] == KEY
    assert launch.secrets == (KEY, "hunter2")
    assert not any(KEY in word or "hunter2" in word for word in launch.command)
    for text in (repr(launch), str(launch), repr(kind)):
        assert KEY not in text
        assert "hunter2" not in text


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("OPENAI_API_KEY", "hunter2", True),
        ("AWS_SECRET_ACCESS_KEY", "hunter2", True),
        ("db_password", "hunter2", True),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("MAX_TOKENS", "4096", False),
        ("MONKEY", "banana", False),
        ("A_KEY", "1", False),  # it would be taken out of everything
    ],
)
def test_a_variable_is_a_secret_if_a_word_of_its_name_says_so(
    name: str, value: str, secret: bool
) -> None:
    launch = make(Stock(), configure(env={name: value}))
    assert (value in launch.secrets) is secret


def test_plans_share_nothing() -> None:
    environ = {"PATH": "/bin"}
    one, two = (make(Stock(), configure(), environ=environ) for _ in range(2))
    assert one == two
    assert one.environ is not two.environ
    assert one.environ is not environ


# -- how it ended ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exit", "text"),
    [
        (Exit(1, 0), "exited with code 0"),
        (Exit(1, 1), "exited with code 1"),
        (Exit(1, None), "did not end"),
        (Exit(1, -6, "SIGABRT"), "was ended by SIGABRT"),
        (Exit(1, -15, "SIGTERM", asked=True), "was ended by SIGTERM"),
        # https://github.com/ggml-org/llama.cpp/pull/24038
        (Exit(1, -9, "SIGKILL"), "was ended by SIGKILL (possibly out of memory)"),
        (Exit(1, -9, "SIGKILL", asked=True), "was ended by SIGKILL"),
    ],
)
def test_an_exit_says_how_it_came(exit: Exit, text: str) -> None:
    assert str(exit) == text


# The ends of real logs of b11434, stock and hosted.
TRUNCATED = """\
0.00.004.484 I srv    load_model: loading model 'm.gguf'
0.00.004.775 E llama_model_load: error loading model: tensor 'token_embd.weight' data is not \
within the file bounds, model is corrupted or incomplete
0.00.004.794 E llama_model_load_from_file_impl: failed to load model
0.00.004.825 E common_fit_params: encountered an error while trying to fit params to free device \
memory: failed to load model
0.00.004.905 E cmn  common_init_: failed to load model 'm.gguf'
0.00.004.907 I srv    operator(): operator(): cleaning up before exit...
0.00.005.369 E srv  llama_server: exiting due to model loading error"""

MISSING_PROJECTOR = """\
0.00.004.617 I srv    load_model: loading model 'm.gguf'
0.00.004.693 E gguf_init_from_file: failed to open GGUF file 'p.gguf' (No such file or directory)
0.00.004.827 E mtmd_get_memory_usage: error: Failed to load CLIP model from p.gguf

0.00.004.837 E srv    load_model: [mtmd] failed to get memory usage of mmproj
0.00.009.403 E srv    load_model: failed to load multimodal model, 'p.gguf'
0.00.014.458 E srv  llama_server: exiting due to model loading error"""

HOSTED_ADAPTER = """\
0.00.004.415 I srv    load_model: loading model 'm.gguf'
0.00.007.132 E llama_adapter_lora_init: failed to open 'l.gguf': No such file or directory
0.00.007.154 E srv    load_model: failed to create_context with model 'm.gguf'
0.00.007.605 E srv          init: exiting due to model loading error
error: Failed to init server, please check the input params."""

BAD_CHOICE = """\
error while handling argument "-ctk": Unsupported cache type: nonsense

usage:
-ctk,  --cache-type-k TYPE              KV cache data type for K
                                        (env: LLAMA_ARG_CACHE_TYPE_K)


to show complete usage, run with -h
"""

TRACEBACK = """\
Traceback (most recent call last):
  File "host.py", line 59, in configure
    setattr(target, last, native(name, value, wheel))
AttributeError: 'xllamacpp.xllamacpp.CommonParams' object has no attribute 'no_such'"""


@pytest.mark.parametrize(
    ("tail", "headline"),
    [
        (
            TRUNCATED,
            "llama_model_load: error loading model: tensor 'token_embd.weight' data is not within "
            "the file bounds, model is corrupted or incomplete",
        ),
        (
            MISSING_PROJECTOR,
            "gguf_init_from_file: failed to open GGUF file 'p.gguf' (No such file or directory)",
        ),
        (
            HOSTED_ADAPTER,
            "llama_adapter_lora_init: failed to open 'l.gguf': No such file or directory",
        ),
        ("error: invalid argument: --bad-option\n", "error: invalid argument: --bad-option"),
        (BAD_CHOICE, 'error while handling argument "-ctk": Unsupported cache type: nonsense'),
        (
            TRACEBACK,
            "AttributeError: 'xllamacpp.xllamacpp.CommonParams' object has no attribute 'no_such'",
        ),
        ("Killed by the weather\n\n  \n", "Killed by the weather"),
        ("0.00.1 I srv: an E in the text is no error\nlast", "last"),
        ("  \n\n", ""),
        ("", ""),
    ],
)
def test_the_headline_is_the_line_of_the_log_that_says_why(tail: str, headline: str) -> None:
    assert Exit(1, 1, tail=tail).headline == headline


def test_the_log_is_in_no_repr_but_in_the_error() -> None:
    end = Exit(7, 1, tail=TRUNCATED)
    assert "corrupted" not in repr(end)
    error = ChildError("the child ended", end)
    assert error.stderr_tail == TRUNCATED
    assert error.returncode == 1
    assert ChildError("x", end, "else").stderr_tail == "else"
    assert ChildError("x").stderr_tail == ""
    assert ChildError("x").returncode is None
