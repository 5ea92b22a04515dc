"""A provider over a server that somebody else owns: real ones, and a scripted one."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import servers
import trio
import trio.testing
from moments import first_text
from servers import (
    KEY,
    TEXT,
    Exchange,
    OpenAI,
    deaf_port,
    running,
    scripted,
    talking,
    tcp_address,
)

from llamatrio import (
    AttachedProvider,
    Hosted,
    KeyRefused,
    LifecycleActor,
    Limits,
    LocalProvider,
    ModelConfig,
    NotOwned,
    NotReachable,
    NotStarted,
    Phase,
    Policy,
    Reply,
    Request,
    RequestFailed,
    RequestRefused,
    ServerGone,
    SpecificationError,
    StartInterrupted,
    StreamBroken,
    Transition,
    attach_provider,
    chat_request,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.outcomes import Cancelled, Failed, Finished
from llamatrio.session.attached import ANSWER, CONNECT, parse_url
from llamatrio.testing.parrot import Parrot

HELLO = completion_request("Hello", temperature=0)
SHORT = completion_request("Hello", max_tokens=2, temperature=0)
ON_AND_ON = completion_request("Hello", max_tokens=100_000)
CHAT = chat_request("Hello")


@asynccontextmanager
async def attached(url: str, **options: Any) -> AsyncGenerator[AttachedProvider, None]:  # noqa: ANN401
    """Give a provider that is started."""
    async with attach_provider(url, **{"key": KEY, **options}) as provider:
        await provider.start()
        yield provider


async def reading_prompt(reply: Reply) -> None:
    """Wait until a prompt is being read."""
    while not (reply.progress and reply.progress.processed):  # noqa: ASYNC110
        await trio.sleep(0.001)


async def failure_of(reply: Reply) -> Exception:
    outcome = await reply.wait()
    assert isinstance(outcome, Failed)
    return outcome.error


# -- a real server -----------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_request_is_answered_as_by_a_model_of_ones_own(kind: Kind, parrot: Parrot) -> None:
    with trio.fail_after(60):
        async with running(kind, ModelConfig(parrot.path)) as server:
            async with attach_provider(server.url, key=KEY) as provider:
                assert (provider.phase, provider.dialect) == (Phase.UNLOADED, None)
                await provider.start()
                assert (provider.phase, provider.dialect) == (Phase.STARTED, "llama")
                async with provider.chat("Hello", temperature=0) as reply:
                    assert "".join([text async for text in reply]) == parrot.text
                result = await provider.submit(HELLO).result()
                assert result.text == parrot.text
                assert result.outcome.reason == "stop"
                assert result.outcome.timings
                tokens = await provider.tokenize("Good")
                assert await provider.detokenize(tokens) == "Good"
            assert server.process.poll() is None


async def test_a_server_is_reached_over_TCP_as_well(kind: Kind, parrot: Parrot) -> None:
    with trio.fail_after(60):
        async with running(kind, ModelConfig(parrot.path), tcp_address()) as server:
            for url in (server.url, f"{server.url}/", f"{server.url}/v1", f"{server.url}/v1/"):
                async with attached(url) as provider:
                    assert (await provider.submit(SHORT).result()).outcome.tokens == 2


async def test_attached_and_owned_are_never_confused(parrot: Parrot) -> None:
    with trio.fail_after(60):
        async with running(Hosted(), ModelConfig(parrot.path)) as server:
            async with (
                attached(server.url) as provider,
                open_provider(ModelConfig(parrot.path)) as own,
            ):
                assert not isinstance(provider, LocalProvider)
                assert not hasattr(provider, "residency")
                assert not hasattr(provider, "config")
                assert not hasattr(provider, "pid")
                assert provider.diagnostics().pid is None
                assert (provider.owned, own.owned) == (False, True)
                assert repr(provider).startswith(f"<AttachedProvider {server.url} (not owned)")
                assert provider.url == server.url
                assert provider.task is None
                assert "parrot" in str(provider.info["id"])


async def test_cancel_by_id_says_where_it_caught_the_request(kind: Kind, endless: Parrot) -> None:
    prompt = completion_request("x" * 3000, max_tokens=5)
    config = ModelConfig(endless.path, batch=64, context=4096, threads=1)
    with trio.fail_after(120):
        async with running(kind, config) as server, attached(server.url) as provider:
            in_prompt, generating, waiting, last = map(
                provider.submit, (prompt, ON_AND_ON, ON_AND_ON, SHORT)
            )
            await reading_prompt(in_prompt)
            assert await provider.cancel(waiting.id) == Cancelled("caller", "queued", 0)
            assert await provider.cancel(in_prompt.id) == Cancelled("caller", "prompt", 0)
            await first_text(generating)
            outcome = await provider.cancel(generating.id)
            assert outcome == Cancelled("caller", "generating", generating.tokens)
            assert (await last.result()).outcome.tokens == 2
            assert await provider.cancel(generating.id) is None


@pytest.mark.slow
async def test_a_request_is_cancelled_by_its_limits(kind: Kind, endless: Parrot) -> None:
    prompt = "x" * 3000
    config = ModelConfig(endless.path, batch=64, context=4096, threads=1)
    requests = [
        completion_request("Hello", max_tokens=100_000, limits=Limits(total=1.0)),
        completion_request("Hello", limits=Limits(queue=0.1)),
        completion_request(prompt, limits=Limits(first_token=0.01)),
    ]
    with trio.fail_after(120):
        async with running(kind, config) as server, attached(server.url) as provider:
            replies = [provider.submit(request) for request in requests]
            limits = []
            for reply in replies:
                outcome = await reply.wait()
                assert isinstance(outcome, Cancelled)
                limits.append((outcome.by, outcome.limit))
            assert limits == [
                ("deadline", "total"),
                ("deadline", "queue"),
                ("deadline", "first_token"),
            ]
            assert (await provider.submit(SHORT).result()).outcome.tokens == 2


@pytest.mark.slow
async def test_stop_ends_what_we_asked_for_and_leaves_the_server(
    kind: Kind, endless: Parrot
) -> None:
    with trio.fail_after(60):
        async with running(kind, ModelConfig(endless.path)) as server:
            async with attached(server.url) as provider:
                current, waiting = provider.submit(ON_AND_ON), provider.submit(ON_AND_ON)
                await first_text(current)
                await provider.stop()
                assert current.outcome == Cancelled("stop", "generating", current.tokens)
                assert waiting.outcome == Cancelled("stop", "queued")
                with pytest.raises(NotStarted):
                    provider.submit(SHORT)
                await provider.start()
                assert (await provider.submit(SHORT).result()).outcome.tokens == 2
                last = provider.submit(ON_AND_ON)
                await first_text(last)
            assert last.outcome == Cancelled("shutdown", "generating", last.tokens)
            assert server.process.poll() is None
            async with attached(server.url) as another:  # the one slot of the server is free
                assert (await another.submit(SHORT).result()).outcome.tokens == 2


@pytest.mark.slow
async def test_a_server_that_is_killed_fails_each_request_and_works_when_it_is_back(
    kind: Kind, endless: Parrot
) -> None:
    config, address = ModelConfig(endless.path), tcp_address()
    with trio.fail_after(120):
        async with running(kind, config, address) as server:
            async with attached(server.url) as provider:
                current, *waiting = [provider.submit(ON_AND_ON) for _ in range(51)]
                await first_text(current)
                await server.kill()
                broken = await failure_of(current)
                assert isinstance(broken, StreamBroken)
                assert server.url in str(broken)
                assert current.text
                for reply in waiting:
                    assert isinstance(await failure_of(reply), ServerGone)
                assert (provider.phase, provider.failure) == (Phase.STARTED, None)
                async with running(kind, config, address) as back:
                    async with attached(server.url):
                        pass  # it has loaded its model
                    assert (await provider.submit(SHORT).result()).outcome.tokens == 2
                    assert provider.diagnostics().generation == 1
                    assert back.process.poll() is None


@pytest.mark.slow
async def test_two_providers_share_a_server(kind: Kind, endless: Parrot) -> None:
    with trio.fail_after(60):
        async with running(kind, ModelConfig(endless.path, slots=2)) as server:
            async with attached(server.url) as one, attached(server.url, slots=2) as two:
                mine, theirs = one.submit(ON_AND_ON), two.submit(ON_AND_ON)
                await first_text(mine)
                await first_text(theirs)
                await one.stop()
                assert mine.outcome == Cancelled("stop", "generating", mine.tokens)
                assert theirs.outcome is None
                assert (await two.submit(SHORT).result()).outcome.tokens == 2
                assert theirs.outcome is None


@pytest.mark.slow
async def test_the_end_of_an_owned_model_means_nothing_to_an_attached_one(
    kind: Kind, endless: Parrot, parrot: Parrot
) -> None:
    with trio.fail_after(60):
        async with (
            running(kind, ModelConfig(endless.path)) as server,
            attached(server.url) as provider,
        ):
            async with open_provider(ModelConfig(parrot.path), backend=kind) as own:
                await own.start()
                reply = provider.submit(ON_AND_ON)
                await first_text(reply)
                assert (await own.submit(HELLO).result()).text == parrot.text
                pid = own.diagnostics().pid
                assert pid not in (None, server.process.pid)
                os.kill(pid or 0, signal.SIGKILL)
                statuses = own.watch()
                async for status in statuses:
                    if status.generation == 2 and status.phase is Phase.STARTED:
                        break
                await own.stop()
                await own.unload_model()
            assert reply.outcome is None
            assert provider.failure is None
            assert server.process.poll() is None


@pytest.mark.slow
async def test_start_waits_while_a_real_server_loads_its_model(kind: Kind, large: Parrot) -> None:
    impatient = Policy(load_stall=0.01, warm_up_stall=0.01)
    with trio.fail_after(120):
        async with running(kind, ModelConfig(large.path)) as server:
            async with attached(server.url, policy=impatient) as provider:
                assert provider.dialect == "llama"
                assert provider.diagnostics().generation == 1
                assert (await provider.submit(SHORT).result()).outcome.tokens == 2


@pytest.mark.stock
async def test_a_router_serves_the_model_that_is_named(
    llama_server: str, parrot: Parrot, tmp_path: Path
) -> None:
    (tmp_path / "polly.gguf").symlink_to(parrot.path)
    (tmp_path / "jacko.gguf").symlink_to(parrot.path)
    with trio.fail_after(60):
        async with servers.routing(llama_server, tmp_path) as server:
            async with attached(server.url, model="polly") as provider:
                assert (provider.dialect, provider.info["id"]) == ("llama", "polly")
                async with provider.chat("Hello", temperature=0) as reply:
                    assert (await reply.result()).text == parrot.text
                assert await provider.tokenize("Good")
                with pytest.raises(NotOwned):
                    provider.submit(Request("/models/unload", {"model": "polly"}))
            async with attached(server.url) as provider:
                assert provider.info == {}
                error = await failure_of(provider.submit(HELLO))
                assert isinstance(error, RequestRefused)
                named = completion_request("Hello", temperature=0, model="polly")
                assert (await provider.submit(named).result()).text == parrot.text


@pytest.mark.parametrize("key", [None, "sk-another-key"])
async def test_a_wrong_key_is_a_typed_error_that_does_not_show_it(
    key: str | None, kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(60):
        async with running(kind, ModelConfig(parrot.path)) as server:
            async with attach_provider(server.url, key=key) as provider:
                with pytest.raises(KeyRefused, match="key") as caught:
                    await provider.start()
                assert "sk-another" not in repr(caught.value)
                assert isinstance(provider.failure, KeyRefused)
                assert provider.diagnostics().counters.restarts == 0
            assert server.process.poll() is None


async def test_a_model_that_a_llama_server_does_not_have_is_refused_at_start(
    kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(60):
        async with running(kind, ModelConfig(parrot.path)) as server:
            async with attach_provider(server.url, key=KEY, model="macaw") as provider:
                with pytest.raises(SpecificationError, match=r"no model 'macaw'; it has .*parrot"):
                    await provider.start()
            async with attached(server.url) as provider:
                name = provider.info["id"]
            async with attached(server.url, model=name) as provider:
                assert provider.info["id"] == name
                assert (await provider.submit(SHORT).result()).outcome.tokens == 2
                assert await provider.tokenize("Good")


@pytest.mark.slow
async def test_a_llama_server_may_be_taken_for_one_that_is_only_compatible(
    kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(60):
        async with running(kind, ModelConfig(parrot.path)) as server:
            async with attached(server.url, dialect="openai") as provider:
                async with provider.chat("Hello", temperature=0) as reply:
                    assert (await reply.result()).text == parrot.text
                assert reply.progress is None
                assert isinstance(reply.outcome, Finished)
                assert reply.outcome.tokens == parrot.tokens + 1
                with pytest.raises(SpecificationError, match="/completion is llama-server's own"):
                    provider.submit(SHORT)


# -- a server that is loading ------------------------------------------------------------------


async def loading(provider: AttachedProvider) -> None:
    """Wait until the server has said that it is loading."""
    async for status in provider.watch():
        if status.progress is not None and status.progress.stage == "model":
            assert provider.phase is Phase.LOADING
            break


async def fail_to_start(
    provider: AttachedProvider, error: type[Exception], *, task_status: trio.TaskStatus[None]
) -> None:
    with pytest.raises(error):
        await provider.start(task_status=task_status)


async def test_start_waits_while_the_server_loads_its_model() -> None:
    impatient = Policy(load_stall=0.001, warm_up_stall=0.001)
    with trio.fail_after(30):
        async with scripted() as server:
            server.loading = True
            async with attach_provider(server.url, key=KEY, policy=impatient) as provider:
                async with trio.open_nursery() as nursery:
                    await nursery.start(provider.start)
                    reply = provider.submit(CHAT)
                    await loading(provider)
                    assert reply.phase == "loading"
                    assert not provider.info
                    server.loading = False
                assert (await reply.result()).text == TEXT
                assert provider.diagnostics().generation == 1


async def test_stop_while_the_server_loads_gives_the_start_up() -> None:
    with trio.fail_after(30):
        async with scripted() as server:
            server.loading = True
            async with attach_provider(server.url, key=KEY) as provider:
                async with trio.open_nursery() as nursery:
                    await nursery.start(fail_to_start, provider, StartInterrupted)
                    reply = provider.submit(CHAT)
                    await loading(provider)
                    await provider.stop()
                    assert reply.outcome == Cancelled("stop", "loading")
                server.loading = False
                await provider.start()
                assert (await provider.submit(CHAT).result()).text == TEXT


async def test_a_server_that_is_gone_while_it_loads_is_not_reachable() -> None:
    with trio.fail_after(30):
        async with scripted() as server:
            server.loading = True
            async with attach_provider(server.url, key=KEY) as provider:
                async with trio.open_nursery() as nursery:
                    await nursery.start(fail_to_start, provider, NotReachable)
                    reply = provider.submit(CHAT)
                    await loading(provider)
                    server.gone = True
                    assert isinstance(await failure_of(reply), NotReachable)
                assert provider.phase is Phase.UNLOADED


async def test_a_request_that_meets_a_server_that_loads_again_is_refused() -> None:
    with trio.fail_after(30):
        async with scripted() as server, attached(server.url) as provider:
            server.loading = True
            error = await failure_of(provider.submit(CHAT))
            assert isinstance(error, RequestRefused)
            assert (error.status, error.kind) == (503, "unavailable_error")
            server.loading = False
            assert (await provider.submit(CHAT).result()).text == TEXT


# -- TLS ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that nobody has signed, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    directory = tmp_path_factory.mktemp("tls")
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    command = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return certificate, key


async def test_a_server_is_reached_over_TLS(certificate: tuple[Path, Path]) -> None:
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(*certificate)
    ours = ssl.create_default_context(cafile=str(certificate[0]))
    with trio.fail_after(30):
        async with scripted(tls=theirs) as server:
            async with attached(server.url, ssl_context=ours) as provider:
                assert (await provider.submit(CHAT).result()).text == TEXT
                server.speak = servers.die
                assert isinstance(await failure_of(provider.submit(CHAT)), StreamBroken)
            await not_reachable(server.url, "CERTIFICATE_VERIFY_FAILED")
            await not_reachable(server.url.replace("https", "http"), "does not speak HTTP")
        async with scripted() as server:
            await not_reachable(server.url.replace("http", "https"), "cannot be reached")


# -- what is not ours --------------------------------------------------------------------------


async def test_load_unload_and_configure_are_refused_by_name() -> None:
    with trio.fail_after(30):
        async with scripted() as server, attached(server.url) as provider:
            asked = len(server.calls)
            for verb in (provider.load_model, provider.unload_model, provider.configure):
                with pytest.raises(NotOwned, match="attached, not owned"):
                    await verb()
            with pytest.raises(NotOwned):
                await provider.configure(ModelConfig("model.gguf"), policy=Policy())
            assert len(server.calls) == asked
            assert provider.started


@pytest.mark.parametrize("dialect", ["llama", "openai"])
@pytest.mark.parametrize(
    "path",
    [
        "/models/load",
        "/models/unload",
        "/models/unload?now",
        "/models//load/",
        "/v1/../models/load",
        "/%6dodels/%6coad",
        "/models%2Fload",
        "/models%252Fload",
        "/Models/Load",
        "/v1/models/unload",
        "/api/models/unload/parrot",
        "/unload",
        "/models",
    ],
)
async def test_endpoints_that_load_and_unload_are_refused_by_name(path: str, dialect: str) -> None:
    with trio.fail_after(30):
        async with scripted() as server, attached(server.url, dialect=dialect) as provider:
            with pytest.raises(NotOwned, match="for the owner"):
                provider.submit(Request(path, {"model": "gpt"}))
            assert provider.diagnostics().counters.accepted == 0


async def test_a_policy_is_ours_to_change() -> None:
    with trio.fail_after(30):
        async with scripted() as server, attached(server.url) as provider:
            await provider.configure(policy=Policy(max_pending=3))
            assert provider.policy.max_pending == 3
            with pytest.raises(SpecificationError, match="not a Policy"):
                await provider.configure(policy="lax")  # type: ignore[arg-type]


async def test_an_answer_that_is_to_be_taken_up_again_is_refused() -> None:
    async with scripted() as server, attached(server.url) as provider:
        with pytest.raises(SpecificationError, match="on_crash"):
            provider.submit(chat_request("Hello", on_crash="resume"))


# -- an OpenAI-compatible server ---------------------------------------------------------------


async def test_a_strict_server_gets_what_it_knows_and_nothing_else() -> None:
    with trio.fail_after(30):
        async with scripted() as server, attached(server.url) as provider:
            assert provider.dialect == "openai"
            assert provider.info == {"id": "gpt", "object": "model", "owned_by": "me"}
            async with provider.chat("Hello", max_tokens=9, temperature=0) as reply:
                assert "".join([text async for text in reply]) == TEXT
            assert isinstance(reply.outcome, Finished)
            assert (reply.outcome.reason, reply.outcome.tokens) == ("stop", 3)
            assert reply.outcome.usage.prompt == 7
            call = server.calls[-1]
            assert call.target == "/v1/chat/completions"
            assert call.headers["host"] == server.url.removeprefix("http://")
            assert call.headers["authorization"] == f"Bearer {KEY}"
            assert call.body == {
                "model": "gpt",
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 9,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }


@pytest.mark.parametrize(
    ("path", "body", "bound"),
    [
        ("/v1/completions", {"prompt": "Hello"}, "max_tokens"),
        ("/v1/chat/completions", {"messages": []}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [], "max_completion_tokens": 1024}, None),
        ("/v1/responses", {"input": "Hello"}, "max_output_tokens"),
    ],
)
async def test_every_stream_is_bounded_in_words_that_OpenAI_knows(
    path: str, body: dict[str, object], bound: str | None
) -> None:
    with trio.fail_after(30):
        async with scripted() as server, attached(server.url) as provider:
            assert (await provider.submit(Request(path, body)).result()).text == TEXT
            ours: dict[str, object] = {"model": "gpt", "stream": True}
            if bound is not None:
                ours[bound] = 1024
            if path != "/v1/responses":
                ours["stream_options"] = {"include_usage": True}
            assert server.calls[-1].body == {**body, **ours}


async def test_a_call_that_does_not_stream_gets_the_model_alone() -> None:
    with trio.fail_after(30):
        async with scripted() as server, attached(server.url) as provider:
            assert await provider.embed(["Hello"]) == [(0.6, 0.8)]
            assert server.calls[-1].body == {
                "model": "gpt",
                "input": ["Hello"],
                "encoding_format": "base64",
            }
            listed = await provider.submit(Request("/v1/models", method="GET")).result()
            assert isinstance(listed.outcome.body, dict)


async def test_a_field_that_a_server_does_not_know_is_refused_by_it() -> None:
    with trio.fail_after(30):
        async with scripted() as server, attached(server.url) as provider:
            error = await failure_of(provider.submit(chat_request("Hello", top_k=3)))
            assert isinstance(error, RequestRefused)
            assert error.status == 400
            assert error.message == "Unrecognized request argument supplied: top_k"


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (HELLO, "/completion is llama-server's own"),
        (Request("/tokenize", {"content": "Hello"}), "/tokenize is llama-server's own"),
        (Request("/v1/../props", method="GET"), "llama-server's own"),
        (Request("/chat/completions", {"messages": []}), "speaks OpenAI's /v1/"),
        (chat_request("Hello", grammar="root ::= x"), "grammar .*: use response_format"),
        (chat_request("Hello", json_schema={}), "json_schema .*: use response_format"),
        (Request("/v1/completions", {"prompt": "", "n_predict": 2}), "n_predict .*: use max_tok"),
    ],
)
async def test_what_only_a_llama_server_knows_is_refused_by_name(
    request_: Request, says: str
) -> None:
    with trio.fail_after(30):
        async with scripted() as server, attached(server.url) as provider:
            with pytest.raises(SpecificationError, match=says):
                provider.submit(request_)
            assert provider.diagnostics().counters.accepted == 0


async def test_a_request_that_came_before_the_server_was_known_fails_by_name() -> None:
    with trio.fail_after(30):
        async with scripted() as server, attach_provider(server.url, key=KEY) as provider:
            async with trio.open_nursery() as nursery:
                await nursery.start(provider.start)
                wrong, right = provider.submit(HELLO), provider.submit(CHAT)
                assert provider.dialect is None
                error = await failure_of(wrong)
                assert isinstance(error, SpecificationError)
                assert "llama-server's own" in str(error)
                assert (await right.result()).text == TEXT


async def test_of_several_models_one_must_be_named() -> None:
    with trio.fail_after(30):
        async with scripted(OpenAI("gpt", "chat-gpt")) as server:
            async with attached(server.url) as provider:
                assert provider.info == {}
                error = await failure_of(provider.submit(CHAT))
                assert isinstance(error, SpecificationError)
                assert "several models" in str(error)
                named = await provider.submit(chat_request("Hello", model="gpt")).result()
                assert named.text == TEXT
            async with attached(server.url, model="chat-gpt") as provider:
                assert provider.info["id"] == "chat-gpt"
                for request, model in ((CHAT, "chat-gpt"), (chat_request("", model="gpt"), "gpt")):
                    assert (await provider.submit(request).result()).text == TEXT
                    assert server.calls[-1].body["model"] == model


@pytest.mark.parametrize(
    ("root", "base"),
    [
        ("/v1", ""),
        ("/v1", "/v1"),
        ("/openai/v1", "/openai"),
        ("/openai/v1", "/openai/v1/"),
        ("/v1beta/openai", "/v1beta/openai/"),
        ("", ""),
    ],
)
async def test_the_base_of_a_server_is_found(root: str, base: str) -> None:
    with trio.fail_after(30):
        async with scripted(OpenAI(root=root)) as server, attached(server.url + base) as provider:
            assert (await provider.submit(CHAT).result()).text == TEXT
            assert server.calls[-1].target == f"{root}/chat/completions"


async def test_a_server_without_a_key_is_told_none() -> None:
    with trio.fail_after(30):
        async with scripted() as server:
            server.key = ""
            async with attached(server.url, key=None) as provider:
                assert (await provider.submit(CHAT).result()).text == TEXT
            assert all("authorization" not in call.headers for call in server.calls)


@pytest.mark.parametrize("behaviour", [servers.die, servers.end_early])
@pytest.mark.slow
async def test_a_cut_answer_fails_its_request_alone(behaviour: servers.Behaviour) -> None:
    with trio.fail_after(30):
        async with scripted() as server, attached(server.url) as provider:
            server.speak = behaviour
            reply = provider.submit(CHAT)
            with pytest.raises(RequestFailed) as caught:
                await reply.result()
            assert isinstance(caught.value.__cause__, StreamBroken)
            assert caught.value.text == servers.PIECES[0]
            assert provider.failure is None
            server.speak = servers.speak
            assert (await provider.submit(CHAT).result()).text == TEXT
            assert provider.diagnostics().generation == 1


async def test_a_cancel_closes_the_connection() -> None:
    gone = trio.Event()

    async def listen(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.piece({"content": "Well"})
        try:
            while True:
                await exchange.piece({"content": ","})
                await trio.sleep(0.001)
        finally:
            gone.set()

    with trio.fail_after(30):
        async with scripted() as server, attached(server.url) as provider:
            server.speak = listen
            reply = provider.submit(CHAT)
            await first_text(reply)
            reply.cancel()
            await gone.wait()
            assert reply.outcome == Cancelled("caller", "generating", reply.tokens)


async def test_a_server_may_be_silent_for_as_long_as_the_limits_of_a_request_allow(
    mock_clock: trio.testing.MockClock,
) -> None:
    asked, speak = trio.Event(), trio.Event()

    async def hesitate(exchange: Exchange) -> None:
        asked.set()
        await speak.wait()
        await servers.speak(exchange)

    mock_clock.rate = 1.0
    async with scripted() as server:
        async with attached(server.url, policy=Policy(silence=1)) as provider:
            server.speak = hesitate
            reply = provider.submit(CHAT)
            await asked.wait()
            for _ in range(20):
                mock_clock.jump(100)
                await trio.testing.wait_all_tasks_blocked()
            assert reply.outcome is None
            speak.set()
            assert (await reply.result()).text == TEXT


# -- the key -----------------------------------------------------------------------------------


async def test_the_key_is_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[object] = []

    class Actor(LifecycleActor):
        def on_transition(self, transition: Transition) -> None:
            shown.append(transition)
            raise ValueError(f"a hook of {self!r} with {self.backend!r}")

    async def refuse_within(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event({"error": {"message": f"no more for {KEY}", "type": "quota"}})

    caplog.set_level(logging.DEBUG)
    with trio.fail_after(30):
        async with scripted() as server, attached(server.url, actor=Actor) as provider:
            server.speak = refuse_within
            within = await failure_of(provider.submit(CHAT))
            server.key = "another"
            before = await failure_of(provider.submit(CHAT))
            assert isinstance(within, RequestRefused)
            assert isinstance(before, RequestRefused)
            assert (before.status, before.details["code"]) == (401, "no_[redacted]")
            session = provider._actor.generation
            assert session is not None
            for item in (within, before, provider, session.session, provider.diagnostics()):
                shown += [repr(item), str(item), repr(vars(item)) if item is before else ""]
            shown += [within.message, within.details, before.message, before.details]
    assert shown
    assert KEY not in repr(shown)
    assert KEY not in caplog.text


# -- what cannot be attached to ----------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8080",
        "localhost",
        "ftp://localhost/",
        "http://",
        "http://:8080",
        "http:///v1",
        "http://localhost:port",
        "http://localhost:99999",
        "http://[::1",
        "http://local host",
        "http://localhost/\n",
        "http://bücher.example",
        "http://localhost/?key=sk-secret",
        "http://localhost/#sk-secret",
        "http://me:sk-secret@localhost",
        "https://sk-secret@localhost",
        "htp://me:sk-secret@localhost",
        "http://me:sk-secret@localhost:port",
        "unix:",
        "unix:x.sock",
        "unix://host/x.sock",
        "unix:/x\0.sock",
        b"http://localhost",
        None,
    ],
)
async def test_a_bad_url_is_refused_at_once_and_not_repeated(url: str) -> None:
    with pytest.raises(SpecificationError) as caught:
        async with attach_provider(url):
            raise AssertionError("there is no such provider")
    assert "sk-secret" not in repr(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"key": ""}, "a key"),
        ({"key": "sk secret"}, "a key"),
        ({"key": "sk-secret\r\nX: y"}, "a key"),
        ({"key": b"sk-secret"}, "a key"),
        ({"model": ""}, "model is a name"),
        ({"model": 7}, "model is a name"),
        ({"slots": 0}, "slots"),
        ({"dialect": "anthropic"}, "dialect"),
        ({"policy": "lax"}, "not a Policy"),
        ({"ssl_context": ssl.create_default_context()}, "for https"),
    ],
)
async def test_a_bad_option_is_refused_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecificationError, match=says) as caught:
        async with attach_provider("http://localhost", **options):
            raise AssertionError("there is no such provider")
    assert "secret" not in str(caught.value)


def test_a_url_says_where_the_server_is() -> None:
    assert parse_url("http://localhost").address == ("localhost", 80)
    assert parse_url("https://example.com/v1").address == ("example.com", 443)
    site = parse_url("HTTPS://[::1]:8443/a/v1/")
    assert (site.address, site.host, site.base) == (("::1", 8443), "[::1]:8443", "/a")
    assert site.tls
    assert parse_url("unix:/run/x.sock").address == "/run/x.sock"
    assert parse_url("unix:///run/x.sock").address == "/run/x.sock"


async def not_reachable(url: str, says: str) -> None:
    """Expect that a start says so, and is not tried again."""
    async with attach_provider(url, key=KEY) as provider:
        with pytest.raises(NotReachable, match=says) as caught:
            await provider.start()
        assert provider.phase is Phase.UNLOADED
        assert str(provider.failure) == str(caught.value)
        counters = provider.diagnostics().counters
        assert (counters.generations, counters.restarts) == (1, 0)
        assert KEY not in repr(caught.value)


async def test_nobody_listens_there(tmp_path: Path) -> None:
    with trio.fail_after(30), deaf_port() as port:
        await not_reachable(f"http://127.0.0.1:{port}", "cannot be reached")
        await not_reachable(f"unix:{tmp_path}/x.sock", "No such file")
        await not_reachable(f"unix:{tmp_path}/{'x' * 200}.sock", "cannot be reached")
        await not_reachable(f"http://{'x' * 70}.example", "cannot be reached")


class _NoNames(trio.abc.HostnameResolver):
    async def getaddrinfo(self, *args: object, **options: object) -> Any:  # noqa: ANN401
        await trio.lowlevel.checkpoint()
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def getnameinfo(self, sockaddr: object, flags: int) -> tuple[str, str]:
        await trio.lowlevel.checkpoint()
        raise NotImplementedError


async def test_a_host_that_has_no_address() -> None:
    trio.socket.set_custom_hostname_resolver(_NoNames())
    with trio.fail_after(30):
        await not_reachable("http://nowhere.example", "Name or service not known")


async def test_what_listens_there_does_not_speak_http() -> None:
    async def greet(stream: trio.abc.Stream) -> None:
        await stream.send_all(b"SSH-2.0-OpenSSH_9.2\r\n")
        await stream.receive_some(65536)
        await stream.aclose()

    with trio.fail_after(30):
        async with talking(greet) as port:
            await not_reachable(f"http://127.0.0.1:{port}", "does not speak HTTP")


@pytest.mark.parametrize(
    ("scheme", "says", "seconds"),
    [
        ("http", "does not answer within 30 s", ANSWER),
        ("https", "takes no connection within 10 s", CONNECT),
    ],
)
async def test_what_listens_there_says_nothing(
    scheme: str, says: str, seconds: float, mock_clock: trio.testing.MockClock
) -> None:
    asked = trio.Event()

    async def listen(stream: trio.abc.Stream) -> None:
        while await stream.receive_some(65536):
            asked.set()
        await stream.aclose()

    mock_clock.rate = 1.0
    async with talking(listen) as port, trio.open_nursery() as nursery:
        nursery.start_soon(not_reachable, f"{scheme}://127.0.0.1:{port}", says)
        await asked.wait()
        mock_clock.jump(seconds)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, b"<html>", "no list of models"),
        (200, b'{"data": "none"}', "no list of models"),
        (200, b'{"data": ["gpt"]}', "no list of models"),
        (200, b"[" * 100_000, "no list of models"),
        (301, b"", "status 301"),
        (404, b"", "status 404"),
        (502, b"bad gateway", "status 502"),
        (503, b"no healthy upstream", "status 503"),
        (503, b'{"error": "no"}', "status 503"),
    ],
)
async def test_what_listens_there_is_no_model_server(status: int, body: bytes, says: str) -> None:
    async def answer(stream: trio.abc.Stream) -> None:
        await stream.receive_some(65536)
        head = f"HTTP/1.1 {status} So\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        await stream.send_all(head + body)
        await stream.aclose()

    with trio.fail_after(30):
        async with talking(answer) as port:
            await not_reachable(f"http://127.0.0.1:{port}", says)


async def test_a_server_that_cannot_be_used_comes_out_of_the_block_if_the_policy_says_so() -> None:
    with trio.fail_after(30), deaf_port() as port, pytest.raises(NotReachable):
        async with attach_provider(
            f"http://127.0.0.1:{port}", policy=Policy(on_give_up="raise")
        ) as provider:
            await provider.start()


async def test_an_exception_of_the_body_comes_out_as_it_went_in() -> None:
    replies: list[Reply] = []
    async with scripted() as server:
        with pytest.raises(KeyError) as caught:
            async with attached(server.url) as provider:
                replies.append(provider.submit(CHAT))
                raise KeyError("mine")
        assert caught.value.args == ("mine",)
        assert replies[0].outcome is not None


# -- the example -------------------------------------------------------------------------------


async def run_example(*args: str) -> subprocess.CompletedProcess[bytes]:
    path = Path(__file__).parent.parent / "examples" / "attached.py"
    environ = {**os.environ, "LLAMATRIO_KEY": KEY}
    command = [sys.executable, str(path), *args]
    return await trio.run_process(
        command, env=environ, capture_stdout=True, capture_stderr=True, check=False
    )


@pytest.mark.slow
async def test_the_example_asks_a_server_and_leaves_it(parrot: Parrot) -> None:
    with trio.fail_after(60):
        async with running(Hosted(), ModelConfig(parrot.path)) as server:
            done = await run_example(server.url, "Hello")
            assert done.returncode == 0, done.stderr
            assert done.stdout.decode() == f"{parrot.text}\n"
            assert b"llama" in done.stderr
            assert KEY.encode() not in done.stderr
            assert server.process.poll() is None


async def test_the_example_says_what_is_wrong() -> None:
    with trio.fail_after(60), deaf_port() as port:
        done = await run_example(f"http://127.0.0.1:{port}")
        assert done.returncode == 1
        assert b"cannot be reached" in done.stderr
        assert b"Traceback" not in done.stderr
