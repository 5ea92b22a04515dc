"""The child's log: bounded, never in anybody's way, and without the key."""

from __future__ import annotations

import gc
import logging
import math
import subprocess
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from terminal import Terminal, shown, words

from llamatrio import (
    NO_RESTARTS,
    ChildDied,
    LoadFailed,
    LocalProvider,
    ModelConfig,
    Own,
    Phase,
    RequestFailed,
    SpecificationError,
    Stock,
    chat_request,
    completion_request,
    open_provider,
)
from llamatrio.child.launch import Kind
from llamatrio.child.logs import Followers, LogChannel, LogLine, Tail, level
from llamatrio.child.pumps import Tally, pump_logs
from llamatrio.testing import ScriptedBackend, fakechild
from llamatrio.testing.parrot import Parrot
from llamatrio.wire.ansi import strip
from llamatrio.wire.loglines import Part

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


async def test_what_was_left_behind_by_a_cancel_is_counted() -> None:
    channel = LogChannel(10)
    for line in ("one", "two", "three"):
        channel.put(line)
    slow = Slow(60)
    with handled_by(slow) as logger:
        try:
            with trio.move_on_after(0.1):
                await channel.forward(logger)
        finally:
            slow.free.set()
            await handlers_ended()  # noqa: ASYNC102 - inside fail_after
    assert len(slow.records) + channel.given_up == 3
    assert channel.dropped == 0


async def test_lines_that_wait_are_bounded_by_their_size_too() -> None:
    channel = LogChannel(1000, size=100)
    for number in range(10):
        channel.put(f"{number}" * 30)
    assert channel.dropped == 7
    channel.put("x" * 1000)  # one line may be longer, alone
    assert channel.dropped == 10
    with handled_by(keeper := Keeper()) as logger:
        await forward(channel, logger)
    assert keeper.lines == ["x" * 1000]


def test_a_line_that_came_in_parts_is_one_line_of_the_tail() -> None:
    tail = Tail(20)
    tail.add("one")
    tail.add_part(Part("fetch", "fetch", ended=False))
    assert str(tail) == "one\nfetch"
    tail.add("two")
    tail.add_part(Part("ing", "ing", continues=True, ended=False))
    assert str(tail) == "one\ntwo\nfetching"
    tail.add_part(Part("checking", "checking", replaces=True, ended=False))
    assert str(tail) == "one\ntwo\nchecking"
    tail.add_part(Part(" it all", " it all", continues=True, ended=False))
    assert str(tail) == "two\nchecking it all"
    tail.add_part(Part("", "", continues=True))
    tail.add("x" * 4)
    assert str(tail) == "checking it all\nxxxx"


# -- those who follow --------------------------------------------------------------------------


async def test_each_follower_has_a_pace_and_losses_of_its_own() -> None:
    followers = Followers()
    quick, slow = followers.add(100), followers.add(3)
    channel = LogChannel(1, followers=followers)
    for number in range(10):
        channel.put(f"0.1 I {number}")
    assert (quick.dropped, slow.dropped, channel.dropped) == (0, 7, 9)
    followers.close()
    with trio.fail_after(10):
        lines = [line async for line in quick]
        assert [line.text async for line in slow] == ["0.1 I 7", "0.1 I 8", "0.1 I 9"]
    assert lines[4] == LogLine("0.1 I 4", logging.INFO)


async def test_a_follower_that_waits_is_woken_and_a_cancel_loses_nothing() -> None:
    followers = Followers()
    watch = followers.add(10)
    channel = LogChannel(10, followers=followers)
    got = []

    async def follow() -> None:
        got.extend([line.text async for line in watch])

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await trio.testing.wait_all_tasks_blocked()
            channel.put("one")
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await trio.testing.wait_all_tasks_blocked()
            channel.put("two")
            followers.close()
    assert got == ["two"] or got == ["one", "two"]


def test_a_follower_that_is_dropped_is_forgotten() -> None:
    followers = Followers()
    watch = followers.add(10)
    assert len(followers) == 1
    del watch
    gc.collect()
    assert len(followers) == 0


# -- lines that take their time ----------------------------------------------------------------


class Pumped:
    """A log that is pumped out of a memory stream."""

    def __init__(self, *, colors: bool = False, secrets: tuple[str, ...] = ()) -> None:
        self.followers = Followers()
        self.channel = LogChannel(1000, followers=self.followers, colors=colors)
        self._watch = self.followers.add(1000)
        self.send, self._receive = trio.testing.memory_stream_one_way_pair()
        self.tally = Tally()
        self._secrets = secrets

    async def run(self) -> None:
        await pump_logs(self._receive, 2**16, self.tally, self.channel, self._secrets)
        self.followers.close()

    async def after(self, seconds: float) -> list[LogLine]:
        """What has been told by then."""
        await trio.sleep(seconds)
        await trio.testing.wait_all_tasks_blocked()
        return await self._watch._queue.take(1000) if len(self._watch._queue) else []


@pytest.fixture
async def pumped(nursery: trio.Nursery) -> Pumped:
    made = Pumped(secrets=("swordfish-4711",))
    nursery.start_soon(made.run)
    return made


async def test_an_unfinished_line_is_told_after_a_moment_and_its_rest_when_it_ends(
    pumped: Pumped, autojump_clock: trio.testing.MockClock
) -> None:
    await pumped.send.send_all(b"0.1 I fetching 41%")
    assert await pumped.after(0.45) == []
    [begin] = await pumped.after(0.1)
    assert begin == LogLine("0.1 I fetching 41%", logging.INFO, ended=False)
    assert await pumped.after(100) == []
    await pumped.send.send_all(b" done\nnext\n")
    done, following = await pumped.after(0)
    assert done == LogLine(" done", logging.INFO, continues=True)
    assert following == LogLine("next", logging.WARNING)
    assert str(pumped.channel.tail) == "0.1 I fetching 41% done\nnext"
    assert pumped.tally.log_lines == 2


async def test_while_nothing_new_has_come_nobody_wakes(
    pumped: Pumped, autojump_clock: trio.testing.MockClock
) -> None:
    await pumped.send.send_all(b"whole\n")
    await pumped.after(0)
    assert trio.lowlevel.current_statistics().seconds_to_next_deadline == math.inf
    await pumped.send.send_all(b"fetching")
    await trio.testing.wait_all_tasks_blocked()
    assert 0 < trio.lowlevel.current_statistics().seconds_to_next_deadline <= 0.5
    assert len(await pumped.after(1)) == 1
    assert trio.lowlevel.current_statistics().seconds_to_next_deadline == math.inf


async def test_a_progress_bar_is_told_ever_more_rarely_by_its_latest_state(
    pumped: Pumped, autojump_clock: trio.testing.MockClock
) -> None:
    lines: list[str] = []
    for number in range(1000):
        await pumped.send.send_all(f"\r{number}".encode())
        lines += [line.text for line in await pumped.after(0.1)]
    await pumped.send.send_all(b"\rall there\n")
    lines += [line.text for line in await pumped.after(0)]
    assert 10 < len(lines) < 20
    assert lines[-1] == "all there"
    assert [int(line) for line in lines[:-1]] == sorted(int(line) for line in lines[:-1])
    assert str(pumped.channel.tail) == "all there"
    await pumped.send.send_all(b"next")  # which has the patience of its own
    assert [line.text for line in await pumped.after(0.6)] == ["next"]


async def test_of_a_line_without_end_the_beginning_is_kept_and_the_rest_counted(
    pumped: Pumped, autojump_clock: trio.testing.MockClock
) -> None:
    for _ in range(30):
        await pumped.send.send_all(b"x" * 10_000)
    [begin] = await pumped.after(1)
    assert (len(begin.text), begin.ended) == (2**16, False)
    assert pumped.tally.largest_held == 2**16
    await pumped.send.send_all(b"y" * 10_000 + b"\nnext\n")
    rest, following = await pumped.after(0)
    assert (rest.text, rest.continues, following.text) == ("", True, "next")
    assert pumped.tally.dropped_log_bytes == 310_000 - 2**16
    assert pumped.tally.stderr_bytes == 310_006


async def test_what_may_be_a_secret_is_held_back_until_it_is_known(
    pumped: Pumped, autojump_clock: trio.testing.MockClock
) -> None:
    texts = []
    for piece in (b"key sword", b"fish", b"-4711 and swordf", b"ight, sword", b"fish-4711\n"):
        await pumped.send.send_all(piece)
        texts += [line.text for line in await pumped.after(60)]
    assert texts == ["key ", "[redacted] and ", "swordfight, ", "[redacted]"]
    assert str(pumped.channel.tail) == "key [redacted] and swordfight, [redacted]"


async def test_at_the_end_of_the_stream_the_unfinished_line_is_told_but_for_half_a_secret(
    pumped: Pumped,
) -> None:
    with trio.fail_after(10):
        await pumped.send.send_all(b"key swordfi")
        await pumped.send.aclose()
        assert [line.text async for line in pumped._watch] == ["key [redacted]"]


async def test_what_is_unfinished_is_told_when_the_reading_is_given_up() -> None:
    pumped = Pumped()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pumped.run)
            await pumped.send.send_all(b"half a li")
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert str(pumped.channel.tail) == "half a li"


# -- through the provider ----------------------------------------------------------------------


async def test_the_log_goes_to_the_logger_of_the_providers_name(parrot: Parrot) -> None:
    child = Own(fakechild.command("E 0.1 I hello\\n", "O what is this\\n", "S ready", "R"))
    config = ModelConfig(parrot.path)
    with handled_by(keeper := Keeper(), "polly"), trio.fail_after(30):
        async with open_provider(config, backend=child, name="polly") as provider:
            await provider.start()
    assert "0.1 I hello" in keeper.lines
    assert "W unexpected output on stdout: b'what is this'" in keeper.lines


async def test_an_unknown_state_is_logged_and_changes_nothing(parrot: Parrot) -> None:
    child = Own(fakechild.command("S dancing", "S ready", "R"))
    with handled_by(keeper := Keeper()), trio.fail_after(30):
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            await provider.start()
            assert provider.phase is Phase.STARTED
    assert "W unknown state 'dancing': it changes nothing" in keeper.lines


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
    child = Own(fakechild.command("S ready", "P 1000000000 y\\n", "R"))
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
    assert [line for line in broken.lines if not line.startswith("W ")] == ["one", "two"]
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
payload="{\\"stage\\":\\"$LLAMA_API_KEY\\"}"
echo "cmd_child_to_router:state:{\\"state\\":\\"loading\\",\\"payload\\":$payload}"
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
            watch = provider.watch()
            await provider.start()
            key = key_of(provider)
            seen = []
            async for status in watch:
                seen.append(str(status))
                if status.phase is Phase.UNLOADED and status.generation:
                    break
            assert isinstance(provider.failure, ChildDied)
            text = faces(provider, provider.failure) + "".join(seen)
    text += everything_logged.text
    assert "stage='[redacted]'" in text
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


SECRET = "open-sesame-4711"


async def test_a_secret_that_a_real_child_repeats_in_an_error_is_taken_out(
    kind: Kind, parrot: Parrot
) -> None:
    with trio.fail_after(60):
        config = ModelConfig(parrot.path, env={"MY_TOKEN": SECRET})
        async with open_provider(config, backend=kind) as provider:
            await provider.start()
            request = chat_request("x", reasoning_format=SECRET)
            with pytest.raises(RequestFailed) as caught:
                await provider.submit(request).result()
            text = faces(provider, caught.value, caught.value.__cause__)
    assert "[redacted]" in text
    assert SECRET not in text.replace(repr(config), "")


# -- colours -----------------------------------------------------------------------------------


async def test_a_real_child_has_colours_that_end_with_each_line_if_asked_to(
    kind: Kind, parrot: Parrot
) -> None:
    with handled_by(keeper := Keeper()), trio.fail_after(60):
        async with open_provider(
            ModelConfig(parrot.path), backend=kind, log_colors=True
        ) as provider:
            await provider.start()
            tail = provider._actor.backend.log_tail
    painted = [line for line in keeper.lines if "\x1b" in line]
    assert len(painted) > 5
    # Blue, and the letter green: b11434, common/log.cpp, `print`.
    assert all(line.startswith("\x1b[0;34m0.") for line in painted)
    for line in keeper.lines:
        cells = shown(line)
        assert words(cells) == [strip(line)]
        terminal = Terminal()
        terminal.write(line)
        assert not terminal.look
    levels = {record.levelno for record in keeper.records if "\x1b" in record.getMessage()}
    assert logging.INFO in levels
    assert "I srv" in tail
    assert "\x1b" not in tail


async def test_a_real_child_has_no_colours_by_default(kind: Kind, parrot: Parrot) -> None:
    with handled_by(keeper := Keeper()), trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            await provider.start()
    assert len(keeper.lines) > 5
    assert not any("\x1b" in line for line in keeper.lines)


HOSTILE = r"E 0.1 I \e[31mred\e[2J\e]0;title\x07 \xe2\x80\xaeback\nstill\e[0m not\n"


@pytest.mark.parametrize(
    ("colors", "lines"),
    [
        (False, ["0.1 I red{}", "still not"]),
        (True, ["0.1 I \x1b[0;31mred{}\x1b[0m", "\x1b[0;31mstill\x1b[0m not"]),
    ],
)
async def test_what_a_child_writes_drives_no_terminal(
    colors: bool, lines: list[str], parrot: Parrot
) -> None:
    child = Own(fakechild.command(HOSTILE, "S ready", "R"))
    with handled_by(keeper := Keeper()), trio.fail_after(30):
        async with open_provider(
            ModelConfig(parrot.path), backend=child, log_colors=colors
        ) as provider:
            await provider.start()
    escaped = r"\x1b[2J\x1b]0;title\x07 \u202eback"
    assert keeper.lines[:2] == [line.replace("{}", escaped) for line in lines]
    assert keeper.records[0].levelno == logging.INFO


def command_of(provider: LocalProvider) -> list[str]:
    return Path(f"/proc/{provider.diagnostics().pid}/cmdline").read_text().split("\0")


@pytest.mark.parametrize(("variable", "option"), [("FORCE_COLOR", "on"), ("NO_COLOR", "off")])
async def test_auto_follows_the_environment(
    variable: str, option: str, parrot: Parrot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    child = Own(fakechild.command("S ready", "R"))
    with trio.fail_after(30):
        async with open_provider(
            ModelConfig(parrot.path), backend=child, log_colors="auto"
        ) as provider:
            await provider.start()
            arguments = command_of(provider)
    assert arguments[arguments.index("--log-colors") + 1] == option


LOOKS = """
import os, pty
from llamatrio.child.console import wants_colors
os.environ["TERM"] = "xterm"
found = [wants_colors("auto")]
os.dup2(pty.openpty()[1], 2)
found.append(wants_colors("auto"))
os.close(2)
print(*found, wants_colors("auto"))
"""


def test_by_themselves_colours_are_for_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["False", "True", "False"]


async def test_a_wrong_choice_of_colours_is_refused(parrot: Parrot) -> None:
    config = ModelConfig(parrot.path)
    with pytest.raises(SpecificationError, match="log_colors must be True"):
        async with open_provider(config, log_colors="always"):  # type: ignore[arg-type]
            pass
    with pytest.raises(SpecificationError, match="log_colors"):
        async with open_provider(config, backend=ScriptedBackend(), log_colors=True):
            pass


# -- fragments ---------------------------------------------------------------------------------


async def test_a_fragment_of_log_is_seen_before_its_line_ends_and_never_again(
    parrot: Parrot,
) -> None:
    child = Own(fakechild.command("E fetching 41%", "S loading", "R", "E  and\\n"))
    with handled_by(keeper := Keeper()), trio.fail_after(30):
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            watch = provider.watch_logs()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(provider.start)
                line = await anext(watch)
                assert (line.text, line.ended) == ("fetching 41%", False)
                assert provider._actor.backend.log_tail == "fetching 41%"
                nursery.cancel_scope.cancel()
        rest = [line.text async for line in watch]
    assert "fetching 41%" not in rest
    assert keeper.lines.count("fetching 41%") == 1


async def test_a_child_that_dies_within_a_line_has_it_in_its_error(parrot: Parrot) -> None:
    child = Own(fakechild.command("E error: no spa", "E ce left on de", "X 1"))
    with trio.fail_after(30):
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            with pytest.raises(LoadFailed) as caught:
                await provider.start()
    assert caught.value.stderr_tail == "error: no space left on de"
    assert "error: no space left on de" in str(caught.value)


@pytest.mark.stock
async def test_a_fragment_that_a_launcher_left_stands_at_the_head_of_a_real_childs_log(
    llama_server: str, parrot: Parrot
) -> None:
    script = 'printf \'fetching 41%%\\r42%%\' >&2; exec "$0" "$@"'
    child = Own(("/bin/sh", "-c", script, llama_server))
    with handled_by(keeper := Keeper()), trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            await provider.start()
    assert "".join(keeper.lines[:2]).startswith("42%0.")


# -- following the log -------------------------------------------------------------------------


async def test_the_log_can_be_followed_over_several_children_until_the_block_ends(
    parrot: Parrot,
) -> None:
    child = Own(fakechild.command("E one\\n", "S ready", "R"))
    with trio.fail_after(30):
        async with open_provider(ModelConfig(parrot.path), backend=child) as provider:
            watch, other = provider.watch_logs(), provider.watch_logs(lines=1)
            for _ in range(2):
                await provider.start()
                await provider.stop()
                await provider.unload_model()
        lines = [line.text async for line in watch]
        assert lines.count("one") == 2
        assert len([line async for line in other]) == 1
        assert other.dropped == len(lines) - 1
        assert [line async for line in provider.watch_logs()] == []


async def test_a_backend_without_a_log_has_none_to_follow(parrot: Parrot) -> None:
    with trio.fail_after(30):
        async with open_provider(ModelConfig(parrot.path), backend=ScriptedBackend()) as provider:
            assert [line async for line in provider.watch_logs()] == []
            with pytest.raises(SpecificationError, match="positive"):
                provider.watch_logs(0)


async def test_a_program_without_logging_is_silent(parrot: Parrot) -> None:
    child = fakechild.command("E 0.1 E bad\\n", "E bare", "S ready", "R")
    code = f"""
import trio
from llamatrio import ModelConfig, Own, open_provider
async def main():
    async with open_provider(ModelConfig({str(parrot.path)!r}), backend=Own({child!r})) as provider:
        await provider.start()
trio.run(main)
"""
    with trio.fail_after(30):
        done = await trio.run_process(
            [sys.executable, "-c", code], capture_stdout=True, capture_stderr=True
        )
    assert (done.stdout, done.stderr) == (b"", b"")
