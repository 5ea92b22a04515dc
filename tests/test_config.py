from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any, get_args

import attrs
import pytest

from llamatrio.config import Lora, ModelConfig, Pooling, Task
from llamatrio.errors import SpecificationError


def configure(**fields: Any) -> ModelConfig:  # noqa: ANN401 - fields of every type, wrong ones too
    return ModelConfig("m.gguf", **fields)


def test_a_bare_model_leaves_the_rest_to_llama_cpp_but_for_slots_and_batch() -> None:
    config = ModelConfig("m.gguf")
    given = {name: value for name, value in attrs.asdict(config, recurse=False).items() if value}
    assert given == {"model": "m.gguf", "slots": 1, "batch": 512, "task": "generation"}


def test_only_the_model_is_positional() -> None:
    with pytest.raises(TypeError):
        ModelConfig("m.gguf", 4096)  # type: ignore[call-arg]


def test_paths_become_strings() -> None:
    config = ModelConfig(
        Path("m.gguf"), mmproj=Path("p.gguf"), draft_model=Path("d.gguf"), lora=[Path("l.gguf")]
    )
    assert (config.model, config.mmproj, config.draft_model) == ("m.gguf", "p.gguf", "d.gguf")
    assert config.lora == (Lora("l.gguf", 1.0),)


def test_lora_adapters_may_be_given_in_every_form() -> None:
    config = configure(lora=["a.gguf", Path("b.gguf"), Lora("c.gguf", 0.5)])
    assert config.lora == (Lora("a.gguf"), Lora("b.gguf"), Lora("c.gguf", 0.5))


@pytest.mark.parametrize("field", ["args", "devices", "lora"])
def test_one_string_is_not_a_sequence_of_them(field: str) -> None:
    with pytest.raises(SpecificationError, match="expected a sequence"):
        configure(**{field: "--verbose"})


def test_one_path_is_not_a_sequence_of_adapters() -> None:
    with pytest.raises(SpecificationError, match="expected a sequence"):
        configure(lora=Path("l.gguf"))


def test_an_empty_model_is_refused() -> None:
    with pytest.raises(SpecificationError, match="model is empty"):
        ModelConfig("")


LEAST = {
    "context": 1,
    "slots": 1,
    "batch": 1,
    "gpu_layers": 0,
    "threads": 1,
    "seed": 0,
    "sleep_after": 1,
}


@pytest.mark.parametrize(("field", "least"), LEAST.items())
def test_a_number_below_its_least_is_refused_by_name(field: str, least: int) -> None:
    assert getattr(configure(**{field: least}), field) == least
    with pytest.raises(SpecificationError, match=f"^{field} .* at least {least}"):
        configure(**{field: least - 1})


@pytest.mark.parametrize("field", LEAST)
def test_what_is_no_whole_number_is_refused_by_name(field: str) -> None:
    for value in (True, 1.0, "1", math.nan, math.inf, [1]):
        with pytest.raises(SpecificationError, match=f"^{field} must be a whole number"):
            configure(**{field: value})


@pytest.mark.parametrize("field", LEAST)
def test_a_number_may_be_left_out_unless_the_library_needs_it(field: str) -> None:
    if field in ("slots", "batch"):
        with pytest.raises(SpecificationError, match=f"^{field} "):
            configure(**{field: None})
    else:
        assert getattr(configure(**{field: None}), field) is None


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("cache_type_k", "q8_0", "q9_0"),
        ("cache_type_v", "iq4_nl", "F16"),
        ("reasoning_format", "deepseek-legacy", "deepseek_legacy"),
        ("task", "embedding", "embeddings"),
        ("task", "reranking", None),
        ("flash_attention", False, "auto"),
        ("reasoning", True, "on"),
    ],
)
def test_a_word_that_is_no_choice_is_refused_by_name(field: str, good: object, bad: object) -> None:
    assert getattr(configure(**{field: good}), field) == good
    with pytest.raises(SpecificationError, match=f"^{field} must be one of .* not {bad!r}"):
        configure(**{field: bad})


def test_a_pooling_that_is_no_choice_is_refused_by_name() -> None:
    with pytest.raises(SpecificationError, match=r"^pooling must be one of .* not 'max'"):
        configure(task="embedding", pooling="max")


@pytest.mark.parametrize(
    ("task", "poolings"),
    [
        ("generation", (None,)),
        ("embedding", (None, "none", "mean", "cls", "last")),
        ("reranking", (None, "rank")),
    ],
)
def test_a_pooling_that_the_task_has_no_use_for_is_refused(
    task: Task, poolings: tuple[Pooling | None, ...]
) -> None:
    for pooling in (None, *get_args(Pooling)):
        if pooling in poolings:
            assert configure(task=task, pooling=pooling).pooling == pooling
        else:
            with pytest.raises(SpecificationError, match=f"pooling '{pooling}'|not by '{pooling}'"):
                configure(task=task, pooling=pooling)


@pytest.mark.parametrize("task", ["embedding", "reranking"])
def test_a_draft_of_text_is_refused_where_no_text_is_made(task: Task) -> None:
    with pytest.raises(SpecificationError, match=f"draft_model is nothing for task '{task}'"):
        configure(task=task, draft_model="d.gguf")


@pytest.mark.parametrize(
    "fields",
    [
        {"args": [7]},
        {"args": [b"--verbose"]},
        {"args": [None]},
        {"env": {"A": 7}},
        {"env": {7: "a"}},
        {"env": {"A": None}},
    ],
)
def test_args_and_env_that_hold_anything_but_strings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecificationError, match="strings only"):
        configure(**fields)


@pytest.mark.parametrize("fields", [{"args": ["a\0b"]}, {"env": {"A\0": ""}}, {"env": {"A": "\0"}}])
def test_a_nul_in_args_or_env_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecificationError, match="NUL"):
        configure(**fields)


def test_values_of_env_are_in_no_repr() -> None:
    config = configure(env={"HF_TOKEN": "hunter2"})
    assert "hunter2" not in repr(config)
    assert "HF_TOKEN" in repr(config)


def test_a_configuration_does_not_change_with_what_it_was_made_from() -> None:
    env = {"A": "1"}
    args = ["--verbose"]
    config = configure(env=env, args=args)
    env["B"] = "2"
    args.append("--more")
    assert config == configure(env={"A": "1"}, args=["--verbose"])
    with pytest.raises(TypeError):
        config.env["C"] = "3"  # type: ignore[index]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.slots = 2  # type: ignore[misc]


def test_equal_configurations_are_equal_however_they_were_written() -> None:
    assert ModelConfig(Path("m.gguf"), lora=["l"]) == ModelConfig("m.gguf", lora=(Lora("l"),))
    assert ModelConfig("m.gguf") != ModelConfig("m.gguf", slots=2)


def test_evolving_checks_again() -> None:
    with pytest.raises(SpecificationError, match="slots"):
        attrs.evolve(configure(), slots=0)


def test_a_configuration_can_be_hashed_pickled_and_copied() -> None:
    config = ModelConfig("m.gguf", env={"NAME": "value"}, args=["--jinja"])
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert hash(config) == hash(ModelConfig("m.gguf", env={"NAME": "value"}, args=["--jinja"]))
