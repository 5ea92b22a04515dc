"""The child's log: bounded, never in anybody's way, and without the key."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from llamatrio import (
    NO_RESTARTS,
    ChildDied,
    LoadFailed,
    LocalProvider,
    ModelConfig,
    Own,
    Phase,
    RequestFailed,
    Stock,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.child.logs import LogChannel, level
from llamatrio.testing import fakechild
from llamatrio.testing.parrot import Parrot

if sys.platform != "linux":
    pytest.skip("looks at /proc", allow_module_level=True)


class Keeper(logging.Handler):
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self.records]


class Slow(Keeper):
    """A handler that takes its time for each record, until it is let go."""

    def __init__(self, seconds: float = 1) -> None:
        super().__init__()
        self.seconds = seconds
        self.free = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self.free.wait(self.seconds)


class Broken(Keeper):
    """A handler that raises."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        raise ZeroDivisionError


@contextmanager
def handled_by(handler: logging.Handler, name: str = "model") -> Generator[logging.Logger]:
    """Have the log of a child go to a handler alone."""
    logger = logging.getLogger(f"llamatrio.child.{name}")
    before = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield logger
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


async def forward(channel: LogChannel, logger: logging.Logger) -> None:
    with trio.fail_after(10):
        channel.close()
        await channel.forward(logger)


# -- the channel -------------------------------------------------------------------------------


async def test_a_full_channel_loses_its_oldest_lines_and_counts_them() -> None:
    channel = LogChannel(3)
    for number in range(10):
        channel.put(f"line {number}")
    assert channel.dropped == 7
    with handled_by(keeper := Keeper()) as logger:
        await forward(channel, logger)
    assert keeper.lines == ["line 7", "line 8", "line 9"]


async def test_more_lines_than_one_batch_arrive_in_order() -> None:
    channel = LogChannel(1000)
    lines = [f"line {number}" for number in range(1000)]
    for line in lines:
        channel.put(line)
    with handled_by(keeper := Keeper()) as logger:
        await forward(channel, logger)
    assert keeper.lines == lines
    assert channel.dropped == 0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("0.00.123.456 D detail", logging.DEBUG),
        ("0.00.123.456 I info", logging.INFO),
        ("0.00.123.456 W warning", logging.WARNING),
        ("0.00.123.456 E error", logging.ERROR),
        ("0.00.123.456 I", logging.INFO),
        ("a bare line", logging.WARNING),
        ("error: bare", logging.WARNING),
        ("one", logging.WARNING),
        ("", logging.WARNING),
    ],
)
def test_a_line_has_the_level_of_its_letter(line: str, expected: int) -> None:
    assert level(line) == expected


async def test_lines_reach_the_logger_as_they_are_with_their_level() -> None:
    channel = LogChannel(10)
    for line in ("0.1 I 100% %s %d {}", "0.1 E bad"):
        channel.put(line)
    with handled_by(keeper := Keeper()) as logger:
        await forward(channel, logger)
    assert keeper.lines == ["0.1 I 100% %s %d {}", "0.1 E bad"]
    assert [record.levelno for record in keeper.records] == [logging.INFO, logging.ERROR]
    assert {record.threadName for record in keeper.records} != {"MainThread"}


async def test_lines_below_the_loggers_level_are_dropped() -> None:
    channel = LogChannel(10)
    for line in ("0.1 I one", "0.1 W two"):
        channel.put(line)
    with handled_by(keeper := Keeper()) as logger:
        logger.setLevel(logging.WARNING)
        await forward(channel, logger)
    assert keeper.lines == ["0.1 W two"]


async def test_after_its_reader_has_left_a_channel_counts_every_line_as_lost() -> None:
    channel = LogChannel(10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.forward, logging.getLogger("llamatrio.child.model"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    channel.put("one")
    channel.put("two")
    assert channel.dropped == 2


async def test_a_handler_that_blocks_is_left_behind_by_a_cancel() -> None:
    channel = LogChannel(10)
    channel.put("one")
    slow = Slow(60)
    with handled_by(slow) as logger:
        try:
            with trio.move_on_after(0.1) as scope:
                await channel.forward(logger)
            assert scope.cancelled_caught
            assert trio.current_time() < scope.deadline + 10
        finally:
            slow.free.set()
            await handlers_ended()  # noqa: ASYNC102 - inside fail_after


# -- through the provider ----------------------------------------------------------------------


async def test_the_log_goes_to_the_logger_of_the_providers_name(parrot: Parrot) -> None:
    child = Own(fakechild.command("E 0.1 I hello\\n", "O what is this\\n", "S ready", "R"))
    config = ModelConfig(parrot.path)
    with handled_by(keeper := Keeper(), "polly"), trio.fail_after(30):
        async with open_provider(config, backend=child, name="polly") as provider:
            await provider.start()
    assert sorted(keeper.lines) == [
        "0.1 I hello",
        "W unexpected output on stdout: b'what is this'",
    ]


async def test_an_unknown_state_is_logged_and_changes_nothing(parrot: Parrot) -> None:
    child = Own(fakechild.command("S dancing", "S ready", "R"))
    with handled_by(keeper := Keeper()), trio.fail_after(30):
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            await provider.start()
            assert provider.phase is Phase.STARTED
    assert keeper.lines == ["W unknown state 'dancing': it changes nothing"]


async def handlers_ended() -> None:
    # Trio tells nobody when a thread that it has abandoned has ended.
    while any("_log" in thread.name for thread in threading.enumerate()):  # noqa: ASYNC110
        await trio.sleep(0.01)


async def test_lines_that_a_slow_handler_loses_are_counted_while_the_child_lives(
    parrot: Parrot,
) -> None:
    lines = "\\n".join("x" * 3000)
    child = Own(fakechild.command(f"E {lines}\\n", f"E {lines}\\n", "H ok", "S ready", "R"))
    slow = Slow()
    with handled_by(slow), trio.fail_after(30):
        try:
            async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
                await provider.start()
                while provider.diagnostics().pipes.log_lines < 6000:
                    await provider.submit(completion_request("x")).wait()
                assert 3000 < provider.diagnostics().dropped_log_lines <= 4000
                slow.free.set()
        finally:
            slow.free.set()
            await handlers_ended()  # noqa: ASYNC102 - inside fail_after


async def test_a_handler_that_takes_a_second_for_a_line_delays_nothing(
    kind: Kind, parrot: Parrot
) -> None:
    slow = Slow()
    with handled_by(slow), trio.fail_after(60):
        try:
            config = ModelConfig(parrot.path, threads=1)
            async with open_provider(config, backend=kind) as provider:
                await provider.start()
                for _ in range(3):
                    reply = provider.submit(completion_request("Hello", temperature=0))
                    assert (await reply.result()).text == parrot.text
                lines = provider.diagnostics().pipes.log_lines
            handled = len(slow.records)
        finally:
            slow.free.set()
            await handlers_ended()  # noqa: ASYNC102 - inside fail_after
    assert len(slow.records) <= handled + 1  # what waited behind the last one is given up
    assert handled < lines / 2  # and each of them took a second


@pytest.mark.slow
async def test_a_child_that_floods_its_stderr_leaves_time_to_others(parrot: Parrot) -> None:
    ready = 'cmd_child_to_router:state:{"state":"ready"}'
    child = Own(("/bin/sh", "-c", 'echo "$0"; exec yes >&2', ready))
    with handled_by(Keeper()) as logger, trio.fail_after(30):
        logger.setLevel(logging.CRITICAL)
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            await provider.start()
            ticks = 0
            with trio.move_on_after(1):
                while True:
                    await trio.sleep(0.01)
                    ticks += 1
            assert ticks > 25
            assert provider.diagnostics().pipes.log_lines > 10_000


async def test_a_handler_that_raises_costs_nobody_the_model(
    parrot: Parrot, capsys: pytest.CaptureFixture[str]
) -> None:
    child = Own(fakechild.command("E one\\n", "E two\\n", "H ok", "S ready", "R"))
    with handled_by(broken := Broken()), trio.fail_after(30):
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            await provider.start()
            for _ in range(3):
                await provider.submit(completion_request("x")).result()
            assert provider.phase is Phase.STARTED
    assert broken.lines == ["one", "two"]
    assert "ZeroDivisionError" in capsys.readouterr().err


# -- the key -----------------------------------------------------------------------------------


def key_of(provider: LocalProvider) -> str:
    pid = provider.diagnostics().pid
    block = Path(f"/proc/{pid}/environ").read_text()
    [key] = [item for item in block.split("\0") if item.startswith("LLAMA_API_KEY=")]
    return key.removeprefix("LLAMA_API_KEY=")


def faces(provider: LocalProvider, *errors: BaseException | None) -> str:
    """Everything of a provider that somebody may print."""
    generation = provider._actor.generation
    assert generation is not None
    things = [
        provider,
        provider.config,
        provider.diagnostics(),
        provider.diagnostics().last_exit,
        provider._actor.backend,
        vars(provider._actor),
        generation.session,
        generation.end,
        *errors,
    ]
    texts = [repr(thing) for thing in things] + [str(thing) for thing in things]
    for error in errors:
        assert error is not None
        texts += traceback.format_exception(error)
        texts.append(str(vars(error)))
    return "\n".join(texts)


@pytest.fixture
def everything_logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG):
        yield caplog


async def test_the_key_of_a_real_child_is_nowhere_to_be_read(
    kind: Kind, parrot: Parrot, everything_logged: pytest.LogCaptureFixture
) -> None:
    # https://github.com/CodeNeow/MyLlama/issues/31
    args = ["-lv", "5"] if isinstance(kind, Stock) else []
    with trio.fail_after(60):
        config = ModelConfig(parrot.path, context=256, args=args)
        async with open_provider(config, backend=kind) as provider:
            await provider.start()
            key = key_of(provider)
            text = faces(provider)
            await provider.submit(completion_request("Hello", temperature=0)).result()
            with pytest.raises(RequestFailed) as caught:
                await provider.submit(completion_request("x" * 1000)).result()
            text += faces(provider, caught.value, caught.value.__cause__)
            await provider.stop()
            await provider.unload_model()
            text += faces(provider)
    text += everything_logged.text
    assert "listening" in everything_logged.text
    assert key not in text


SHOWS_ITS_KEY = """
pad() { head -c "$1" /dev/zero | tr '\\0' x; }
echo "key: $LLAMA_API_KEY" >&2
echo "key: $LLAMA_API_KEY"
echo "cmd_child_to_router:state:{\\"state\\":\\"$LLAMA_API_KEY\\"}"
echo "cmd_child_to_router:state:$LLAMA_API_KEY"
{ pad 170; printf %s "$LLAMA_API_KEY"; pad 1100000; echo; }
{ pad 65500; printf %s "$LLAMA_API_KEY"; pad 1000; echo; } >&2
exec "$0" "$@"
"""


async def test_a_child_that_shows_its_key_has_it_taken_out_of_everything(
    parrot: Parrot, everything_logged: pytest.LogCaptureFixture
) -> None:
    child = Own(
        ("/bin/sh", "-c", SHOWS_ITS_KEY, *fakechild.command("H ok", "S ready", "W 0.5", "X 3"))
    )
    with trio.fail_after(60):
        async with open_provider(
            ModelConfig(parrot.path), backend=child, policy=NO_RESTARTS
        ) as provider:
            await provider.start()
            key = key_of(provider)
            async for status in provider.watch():
                if status.phase is Phase.UNLOADED:
                    break
            assert isinstance(provider.failure, ChildDied)
            text = faces(provider, provider.failure)
    text += everything_logged.text
    assert everything_logged.text.count("[redacted]") == 6
    assert not any(key[at : at + 12] in text for at in range(len(key) - 11))


async def test_a_child_that_fails_to_load_and_names_its_key_has_it_taken_out(
    parrot: Parrot, everything_logged: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(60):
        child = Own(("/bin/sh", "-c", 'echo "error: bad key $LLAMA_API_KEY" >&2; exit 1'))
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            with pytest.raises(LoadFailed) as caught:
                await provider.start()
            assert "bad key [redacted]" in str(caught.value)
            assert caught.value.stderr_tail == "error: bad key [redacted]"
