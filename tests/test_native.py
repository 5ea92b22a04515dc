"""A model in this process: the contract of a child, on any thread that is chosen for it."""

from __future__ import annotations

import inspect
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import attrs
import pytest
import trio
from moments import first_text, reach, serve_another, within_prompt

from llamatrio import (
    BadAnswer,
    ContextExceeded,
    Hosted,
    LifecycleActor,
    LocalProvider,
    ModelConfig,
    ModelFileError,
    NativeBackend,
    Phase,
    Reply,
    Request,
    RequestFailed,
    RequestRefused,
    SpecificationError,
    StreamBroken,
    chat_request,
    completion_request,
    open_provider,
    outcomes,
    ownership,
    provider,
    requests,
)
from llamatrio.lifecycle import hooks, reply
from llamatrio.outcomes import Cancelled, Finished, Outcome
from llamatrio.session import base
from llamatrio.session.dispatch import Dispatcher, HostThread, OwnerThread, Roaming
from llamatrio.session.native.backend import NativeSession
from llamatrio.session.native.engine import Engine
from llamatrio.session.native.libllama import Library, find_library
from llamatrio.testing import (
    BACKEND_RULES,
    PROVIDER_RULES,
    Report,
    check_backend,
    check_provider,
)
from llamatrio.testing.parrot import (
    Parrot,
    write_embedding_parrot,
    write_large_parrot,
    write_parrot,
)

FIVE = completion_request("Hello", max_tokens=5, temperature=0)
ON_AND_ON = completion_request("Hello", max_tokens=100_000, temperature=0)
NO_GRAMMAR = completion_request("Hello", grammar="this is no grammar")
OF_DEATHS = {  # it has no process that could be killed
    "a death is told by Ended, which names an error and is the last word",
    "an answer that a death cuts off raises ChildError",
}


def config_of(parrot: Parrot, **fields: object) -> ModelConfig:
    return attrs.evolve(
        ModelConfig(parrot.path, threads=1, context=512, chat_template="chatml"),
        **fields,  # type: ignore[arg-type]
    )


def opened(
    config: ModelConfig, dispatcher: Callable[[], Dispatcher] = OwnerThread
) -> AbstractAsyncContextManager[LocalProvider]:
    return open_provider(config, backend=NativeBackend(dispatcher=dispatcher))


async def ask(provider: LocalProvider, request: Request) -> str:
    return (await provider.submit(request).result()).text


def first_words(parrot: Parrot, count: int = 5) -> str:
    text = parrot.text * (1 + count // 30) if parrot.loop else parrot.text
    return " ".join(text.split(" ")[:count])


# -- the contract ------------------------------------------------------------------------------


async def check_all(endless: Parrot, dispatcher: Callable[[], Dispatcher]) -> list[Report]:
    config = config_of(endless, slots=2, context=None)
    asked = {
        "slow_request": ON_AND_ON,
        "quick_request": FIVE,
        "refused_request": NO_GRAMMAR,
        "answer": first_words(endless),
    }
    return [
        await check_provider(lambda: opened(config, dispatcher), **asked),  # type: ignore[arg-type]
        await check_backend(
            lambda: NativeBackend(dispatcher=dispatcher),
            config,
            refused_config=attrs.evolve(config, sleep_after=1),
            **asked,  # type: ignore[arg-type]
        ),
    ]


def expect_all_kept(reports: list[Report]) -> None:
    of_provider, of_backend = reports
    assert of_provider == Report(PROVIDER_RULES, {})
    assert set(of_backend.skipped) == OF_DEATHS
    assert {*of_backend.kept, *OF_DEATHS} == set(BACKEND_RULES)


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", [OwnerThread, Roaming])
async def test_every_rule_is_kept_on_threads_of_its_own(
    endless: Parrot, dispatcher: Callable[[], Dispatcher]
) -> None:
    expect_all_kept(await check_all(endless, dispatcher))


@pytest.mark.slow
def test_every_rule_is_kept_on_the_main_thread(endless: Parrot) -> None:
    host = HostThread()
    expect_all_kept(host.run(check_all, endless, lambda: host))


# -- answers -----------------------------------------------------------------------------------


async def test_the_whole_answer_is_what_the_model_says(parrot: Parrot) -> None:
    async with opened(config_of(parrot)) as provider:
        await provider.start()
        result = await provider.submit(completion_request("Hello", temperature=0)).result()
    assert result.text == parrot.text
    assert isinstance(result.outcome, Finished)
    assert result.outcome.reason == "stop"
    assert result.outcome.usage.completion == parrot.tokens + 1  # the end is one, too


async def test_a_hosted_child_of_the_same_build_says_the_same_to_the_same_tokens(
    parrot: Parrot,
) -> None:
    answers = []
    for backend in (NativeBackend(), Hosted()):
        async with open_provider(config_of(parrot), backend=backend) as provider:
            await provider.start()
            tokens = await provider.tokenize("The same")
            request = completion_request(tokens, max_tokens=12, temperature=0)
            result = await provider.submit(request).result()
            answers.append((tokens, result.text, result.outcome.usage))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("prompt", ["Hello", "word " * 100])
async def test_a_prompt_longer_than_a_batch_is_read_in_batches(parrot: Parrot, prompt: str) -> None:
    async with opened(config_of(parrot, batch=8, context=None)) as provider:
        await provider.start()
        reply = provider.submit(completion_request(prompt, max_tokens=5, temperature=0))
        assert (await reply.result()).text == first_words(parrot)
        assert reply.progress is not None
        assert reply.progress.processed == reply.progress.total >= len(prompt.split())


async def test_several_slots_answer_at_the_same_time(parrot: Parrot) -> None:
    async with opened(config_of(parrot, slots=4)) as provider:
        await provider.start()
        replies = [provider.submit(completion_request("Hi", temperature=0)) for _ in range(9)]
        assert [(await reply.result()).text for reply in replies] == [parrot.text] * 9


async def test_what_a_slot_remembers_costs_nothing(parrot: Parrot) -> None:
    async with opened(config_of(parrot)) as provider:
        await provider.start()
        await ask(provider, FIVE)
        await provider.stop()
        await provider.start()
        again = await provider.submit(FIVE).result()
    assert again.outcome.usage.cached == again.outcome.usage.prompt - 1


async def test_a_stop_string_that_lies_across_tokens_ends_the_answer(parrot: Parrot) -> None:
    words = parrot.text.split(" ")
    stop = f"{words[2][-2:]} {words[3][:2]}"
    async with opened(config_of(parrot)) as provider:
        await provider.start()
        request = completion_request("Hello", temperature=0, stop=[stop])
        result = await provider.submit(request).result()
    assert result.text == parrot.text[: parrot.text.index(stop)]
    assert result.outcome.reason == "stop"


async def test_a_grammar_is_followed(parrot: Parrot) -> None:
    words = parrot.text.split(" ")
    async with opened(config_of(parrot)) as provider:
        await provider.start()
        request = completion_request("Hello", temperature=0, grammar=f'root ::= "{words[0]}"')
        assert await ask(provider, request) == words[0]


async def test_a_seed_makes_the_drawing_repeatable(parrot: Parrot) -> None:
    hot = {"temperature": 100.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 8}
    async with opened(config_of(parrot)) as provider:
        await provider.start()
        one, other, third = [
            await ask(provider, completion_request("Hello", seed=seed, **hot))  # type: ignore[arg-type]
            for seed in (1, 1, 2)
        ]
    assert one == other != third


async def test_a_token_can_be_forbidden(parrot: Parrot) -> None:
    async with opened(config_of(parrot)) as provider:
        await provider.start()
        first = await provider.tokenize(parrot.text.split(" ")[0])
        biased = completion_request(
            "Hello", temperature=0, max_tokens=2, logit_bias=[[first[0], -1e9]]
        )
        assert await ask(provider, biased) != await ask(provider, attrs.evolve(FIVE))


END = 2  # the token that ends a parrot's answer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("grammar", "fields"),
    [('root ::= "a"', {"logit_bias": [[END, False]]}), ("root ::= <[999999]>", {})],
)
async def test_a_grammar_that_leaves_no_token_fails_its_request_alone(
    parrot: Parrot, grammar: str, fields: dict[str, object], temperature: float
) -> None:
    async with opened(config_of(parrot)) as provider:
        await provider.start()
        request = completion_request("Hi", grammar=grammar, temperature=temperature, **fields)  # type: ignore[arg-type]
        with pytest.raises(RequestFailed) as caught:
            await ask(provider, request)
        assert isinstance(caught.value.__cause__, BadAnswer)
        await serve_another(provider)


async def test_penalties_count_the_prompt_beside_a_grammar_too(parrot: Parrot) -> None:
    async with opened(config_of(parrot)) as provider:
        await provider.start()
        request = completion_request(
            "Hello", grammar='root ::= "zzz"', repeat_penalty=1.1, repeat_last_n=2**31 - 1
        )
        assert await ask(provider, request) == "zzz"


async def test_special_tokens_are_no_text(parrot: Parrot) -> None:
    answers = []
    for backend in (NativeBackend(), Hosted()):
        async with open_provider(config_of(parrot), backend=backend) as provider:
            await provider.start()
            request = completion_request("Hi", max_tokens=9, logit_bias=[[0, 1e6]])
            answers.append((await provider.submit(request).result()).text)
    assert answers == ["", ""]


async def test_an_end_that_is_ignored_is_never_drawn(parrot: Parrot) -> None:
    async with opened(config_of(parrot)) as provider:
        await provider.start()
        request = completion_request("Hi", max_tokens=50, temperature=0, ignore_eos=True)
        result = await provider.submit(request).result()
    assert result.outcome.usage.completion == 50
    assert result.text.startswith(parrot.text)
    assert "</s>" not in result.text


@pytest.mark.slow
async def test_an_answer_ends_where_its_slot_is_full(endless: Parrot) -> None:
    async with opened(config_of(endless, context=256)) as provider:
        await provider.start()
        result = await provider.submit(attrs.evolve(ON_AND_ON, path="/completion")).result()
    assert result.outcome.reason == "length"
    assert result.outcome.usage.prompt + result.outcome.usage.completion == 256


async def test_a_chat_goes_through_the_template(parrot: Parrot) -> None:
    async with opened(config_of(parrot, context=None)) as provider:
        await provider.start()
        reply = provider.submit(chat_request("Hi", system="Be short", max_tokens=5, temperature=0))
        result = await reply.result()
    assert result.text == first_words(parrot)
    assert result.outcome.usage.prompt > 5


async def test_an_answer_that_was_begun_is_part_of_the_prompt(parrot: Parrot) -> None:
    user, begun = {"role": "user", "content": "Recite"}, "An answer"
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    async with opened(config_of(parrot, context=None)) as provider:
        await provider.start()
        plain = await provider.submit(chat_request([user], max_tokens=1)).result()
        messages = [user, {"role": "assistant", "content": begun}]
        going_on = await provider.submit(chat_request(messages, max_tokens=1, **fields)).result()  # type: ignore[arg-type]
        more = going_on.outcome.usage.prompt - plain.outcome.usage.prompt
        assert more == len(await provider.tokenize("x" + begun)) - len(await provider.tokenize("x"))


async def test_tokens_become_the_text_that_they_came_from(parrot: Parrot) -> None:
    async with opened(config_of(parrot)) as provider:
        await provider.start()
        tokens = await provider.tokenize("Grüße!")
        assert await provider.detokenize(tokens) == "Grüße!"


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (completion_request("Hi", mirostat=2), "mirostat"),
        (completion_request("Hi", json_schema={}), "json_schema"),
        (completion_request("Hi", logprobs=True), "logprobs"),
        (completion_request("Hi", temperature=-1), "temperature"),
        (completion_request("Hi", top_p=1.5), "top_p"),
        (completion_request("Hi", repeat_penalty=0), "repeat_penalty"),
        (completion_request("Hi", logit_bias="no"), "logit_bias"),
        (completion_request("Hi", grammar="no ::="), "grammar"),
        (completion_request("Hi", grammar="(" * 2000 + ")" * 2000), "nested"),
        (completion_request("Hi", temperature=10**400), "temperature"),
        (completion_request("half \ud800"), "half a character"),
        (chat_request("half \ud800"), "half a character"),
        (Request("/tokenize", {"content": "half \ud800"}), "half a character"),
        (completion_request([1, 10**6]), "1000000"),
        (completion_request([-1]), "-1"),
        (chat_request("Hi", tools=[{}]), "tools"),
        (chat_request([{"role": "user", "content": [{"type": "image_url"}]}]), "text alone"),
        (chat_request([{"role": "user", "name": "x", "content": "Hi"}]), "name"),
        (Request("/embedding", {"content": "Hi"}), "/embedding"),
        (Request("/props", method="GET"), "GET /props"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    parrot: Parrot, request_: Request, named: str
) -> None:
    async with opened(config_of(parrot)) as provider:
        await provider.start()
        with pytest.raises(RequestFailed) as caught:
            await ask(provider, request_)
        assert isinstance(caught.value.__cause__, RequestRefused)
        assert named in str(caught.value.__cause__)
        await serve_another(provider)


async def test_a_prompt_that_does_not_fit_says_how_long_it_is(parrot: Parrot) -> None:
    async with opened(config_of(parrot, context=256)) as provider:
        await provider.start()
        with pytest.raises(RequestFailed) as caught:
            await ask(provider, completion_request([1] * 300))
    assert isinstance(caught.value.__cause__, ContextExceeded)
    assert (caught.value.__cause__.prompt_tokens, caught.value.__cause__.context) == (300, 256)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mmproj", "x.gguf"),
        ("lora", ["x.gguf"]),
        ("draft_model", "x.gguf"),
        ("reasoning", True),
        ("sleep_after", 5),
        ("args", ["--verbose"]),
        ("env", {"A": "b"}),
        ("task", "embedding"),
        ("devices", ("CUDA0",)),
        ("model", None),
    ],
)
def test_a_configuration_that_cannot_be_honoured_is_refused(field: str, value: object) -> None:
    fields: dict[str, object] = {"model": "m.gguf", field: value}
    with pytest.raises(SpecificationError, match=field):
        NativeBackend().check(ModelConfig(**fields))  # type: ignore[arg-type]


async def test_a_broken_file_says_what_the_library_says(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    async with opened(ModelConfig(path)) as provider:
        with pytest.raises(ModelFileError, match=r"could not load it: .+"):
            await provider.start()
        assert provider.phase is Phase.UNLOADED


async def test_a_model_that_does_not_generate_is_refused(models: Path) -> None:
    model = write_embedding_parrot(models / "native-embedding.gguf")
    async with opened(ModelConfig(model.path, threads=1)) as provider:
        with pytest.raises(ModelFileError, match="does not generate"):
            await provider.start()


async def test_a_request_that_comes_when_the_model_goes_is_told_so(parrot: Parrot) -> None:
    """Whatever ends the computing task: nobody waits for it any more, and nothing is called."""
    dispatcher = OwnerThread()
    dispatcher.open()
    engine = Engine(Library(find_library()), config_of(parrot))
    session = NativeSession(engine, dispatcher, config_of(parrot), lambda: None)
    computing, begun = trio.CancelScope(), trio.Event()

    async def compute() -> None:
        with computing:
            await session.run()

    async def be_told() -> None:
        with pytest.raises(StreamBroken):
            await session.perform(ON_AND_ON, lambda _: begun.set())

    try:
        assert await dispatcher.call(lambda: engine.load(lambda _: None))
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:  # it ends when both have
                nursery.start_soon(compute)
                nursery.start_soon(be_told)
                await begun.wait()
                computing.cancel()
            with pytest.raises(StreamBroken):
                await session.perform(FIVE, lambda _: None)
        await dispatcher.call(engine.free)
    finally:
        dispatcher.close()


async def test_another_model_than_the_pinned_one_is_refused(parrot: Parrot) -> None:
    async with opened(config_of(parrot, sha256="0" * 64)) as provider:
        with pytest.raises(ModelFileError, match="SHA-256"):
            await provider.start()
        assert provider.diagnostics().counters.loads == 0


async def test_a_handler_that_blocks_holds_up_neither_the_end_of_a_load_nor_the_block(
    tmp_path: Path,
) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    entered, proceed = threading.Event(), threading.Event()

    class Blocking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            entered.set()
            proceed.wait(60)

    handler = Blocking()
    logger = logging.getLogger("llamatrio.child.blocked")
    logger.addHandler(handler)
    try:
        with trio.fail_after(30):
            backend = NativeBackend(name="blocked")
            async with open_provider(ModelConfig(path), backend=backend) as provider:
                with pytest.raises(ModelFileError, match="could not load it"):
                    await provider.start()
        assert entered.is_set()
    finally:
        proceed.set()
        logger.removeHandler(handler)


def test_what_is_no_libllama_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecificationError, match="cannot load"):
        Library(str(tmp_path / "missing.so"))
    import _ctypes

    with pytest.raises(SpecificationError, match="has no llama_backend_init"):
        Library(_ctypes.__file__)


# -- stop, cancel, unload ----------------------------------------------------------------------


async def test_a_stop_keeps_the_model(endless: Parrot) -> None:
    async with opened(config_of(endless, context=None)) as provider:
        await provider.start()
        reply = provider.submit(ON_AND_ON)
        await first_text(reply)
        await provider.stop()
        assert isinstance(reply.outcome, Cancelled)
        await provider.start()
        await serve_another(provider)
        assert provider.diagnostics().counters.loads == 1


async def test_a_request_that_is_cancelled_within_its_prompt_frees_its_slot(
    endless: Parrot,
) -> None:
    async with opened(config_of(endless, context=None, batch=8)) as provider:
        await provider.start()
        reply = provider.submit(completion_request("x" * 2000, max_tokens=5))
        await within_prompt(reply)
        await provider.cancel(reply.id)
        assert isinstance(reply.outcome, Cancelled)
        assert reply.outcome.phase == "prompt"
        await serve_another(provider)


async def test_a_cancelled_request_leaves_its_neighbours_as_they_are(endless: Parrot) -> None:
    async with opened(config_of(endless, slots=3, context=None, batch=8)) as provider:
        await provider.start()
        kept = provider.submit(completion_request("Hello", max_tokens=60, temperature=0))
        await first_text(kept)
        for _ in range(3):
            other = provider.submit(completion_request("x" * 1000, max_tokens=5))
            await within_prompt(other)
            other.cancel()
        assert (await kept.result()).text == first_words(endless, 60)


async def test_a_load_is_given_up_by_a_stop(models: Path) -> None:
    large = write_large_parrot(models / "native-large.gguf")
    async with opened(config_of(large)) as provider:
        async with trio.open_nursery() as nursery:
            await nursery.start(provider.start)
            nursery.cancel_scope.cancel()
        await provider.stop()
        await reach(provider, Phase.UNLOADED)
        assert provider.diagnostics().counters.loads == 0


async def test_leaving_the_block_within_an_answer_frees_everything(endless: Parrot) -> None:
    async with opened(config_of(endless, context=None)) as provider:
        await provider.start()
        reply = provider.submit(ON_AND_ON)
        await first_text(reply)
    assert isinstance(reply.outcome, Cancelled)


@pytest.mark.slow
def test_an_unload_gives_the_memory_back(models: Path) -> None:
    model = write_parrot(models / "native-cycles.gguf")
    program = Path(__file__).parent / "programs" / "native_cycles.py"
    command = [sys.executable, str(program), str(model.path), "50"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=250)
    after_5, after_50 = map(int, done.stdout.split())
    assert after_50 < after_5 * 1.1


# -- threads -----------------------------------------------------------------------------------


class Roamed(LifecycleActor):
    """Notes where its hooks run."""

    threads: set[int] = set()  # noqa: RUF012 - of all of them

    def on_request_started(self, reply: Reply) -> None:
        self.threads.add(threading.get_ident())

    def on_request_finished(self, reply: Reply, outcome: Outcome) -> None:
        self.threads.add(threading.get_ident())


async def test_hooks_run_where_trio_does_wherever_the_model_roams(parrot: Parrot) -> None:
    Roamed.threads.clear()
    backend = NativeBackend(dispatcher=Roaming)
    async with open_provider(config_of(parrot), backend=backend, actor=Roamed) as provider:
        await provider.start()
        assert await ask(provider, FIVE) == first_words(parrot)
    assert Roamed.threads == {threading.get_ident()}


@pytest.fixture(scope="session")
def affine(own_temporary_directory: Path) -> str:
    """A library that aborts when it is called on another thread than the one that loaded."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = Path(__file__).parent / "programs" / "affine.c"
    target = own_temporary_directory / "affine.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(target), str(source), "-lpthread"]
    subprocess.run(command, check=True)
    return str(target)


async def test_an_owner_thread_makes_every_call_for_a_model_that_insists_on_it(
    affine: str, parrot: Parrot
) -> None:
    backend = NativeBackend(affine)
    async with open_provider(config_of(parrot, slots=2), backend=backend) as provider:
        for _ in range(3):
            await provider.start()
            replies = [provider.submit(completion_request("Hi", max_tokens=9)) for _ in range(4)]
            assert {(await reply.result()).text for reply in replies} == {"ababababa"}
            reply = provider.submit(completion_request("Hi", max_tokens=100_000))
            await first_text(reply)
            await provider.stop()
            await provider.unload_model()


def test_roaming_is_caught_by_a_model_that_insists_on_its_thread(
    affine: str, parrot: Parrot
) -> None:
    program = Path(__file__).parent / "programs" / "native_roaming.py"
    command = [sys.executable, str(program), affine, str(parrot.path)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert done.returncode == -6
    assert b"was called on a thread that does not own the model" in done.stderr


def test_the_wheel_is_found_as_a_library() -> None:
    assert os.path.basename(find_library()).startswith("xllamacpp")


def test_the_contract_names_no_thread() -> None:
    """Where native code runs is a backend's business; callers know the one that Trio runs on."""
    for module in (base, hooks, outcomes, ownership, provider, reply, requests):
        for name, item in vars(module).items():
            ours = getattr(item, "__module__", None) == module.__name__
            if not ours or name.startswith("_"):
                continue
            for attribute in [item, *vars(item).values()] if inspect.isclass(item) else [item]:
                text = (inspect.getdoc(attribute) or "").replace("the Trio thread", "")
                assert not re.search(r"(?<!Wrong)thread", text, re.IGNORECASE), (name, attribute)
            assert not [one for one in dir(item) if "thread" in one.lower()], name
