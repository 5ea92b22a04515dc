"""Colours that end with their line, and logs that drive no terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import example, given, settings, strategies as st
from terminal import DEFAULT, Cell, Terminal, shown, words

from llamatrio.wire.ansi import Painter, Style, escape, may_use_colors, strip, take_apart
from llamatrio.wire.loglines import LogLines, Part
from llamatrio.wire.redaction import REDACTED, Secrets, redact


def test_the_terminal_of_these_tests_knows_its_trade() -> None:
    [line] = shown("a\x1b[1;31mb\x1b[22;38;5;9mc\x1b[0md\x1b[4:3me\x1b[mf")
    assert line == [
        ("a", DEFAULT),
        ("b", frozenset({("bold", True), ("fg", 31)})),
        ("c", frozenset({("fg", (5, 9))})),
        ("d", DEFAULT),
        ("e", frozenset({("line", 3)})),
        ("f", DEFAULT),
    ]


# -- colours -----------------------------------------------------------------------------------

NUMBERS = [*range(10), *range(21, 30), *range(30, 50), 53, 55, 58, 59, *range(90, 108), 255, 256]
WORDS = (
    "38;5;9 48;2;1;2;3 58;5;7 38;5 38;2;1 38;9;1 4:3 4:0 4:9 38:5:9 38:2::1:2:3 48:2:1:2:3 38:2:1 "
    "58:2:9:9:9 38: 1:2 38;5;256"
)
PARAMETERS = st.sampled_from([*map(str, NUMBERS), "", *WORDS.split()])
SGR = st.lists(PARAMETERS, max_size=4).map(lambda parts: f"\x1b[{';'.join(parts)}m")
LINES = st.lists(SGR | st.text("ab ä\t世", max_size=5), max_size=8).map("".join)


@settings(max_examples=80)
@given(st.lists(LINES, max_size=5))
@example(["\x1b[31mred", "still", "\x1b[0mno more"])
@example(["\x1b[38;5;9", "a"])
def test_each_line_ends_in_the_reset_state_and_each_character_looks_as_it_did(
    lines: list[str],
) -> None:
    painter = Painter()
    painted = [painter.paint(line) for line in lines]
    assert all("\n" not in line for line in painted)
    # Each by itself, on a new terminal, so that nothing can come from the line before.
    apart = [shown(line)[0] for line in painted]
    raw = Terminal()
    raw.write("\n".join(line if is_whole(line) else escape(line) for line in lines))
    if all(map(is_whole, lines)) and lines:
        assert apart == raw.lines
    together = Terminal()
    together.write("".join(f"{line}\n" for line in painted))
    assert set(together.at_newline) <= {DEFAULT}
    assert together.lines[:-1] == apart


def is_whole(line: str) -> bool:
    return "\x1b" not in re.sub(r"\x1b\[[0-9;:]*m", "", line)


def test_a_colour_that_spans_lines_is_closed_in_each_and_opened_again() -> None:
    painter = Painter()
    assert painter.paint("a \x1b[1mb \x1b[31mc") == "a \x1b[0;1mb \x1b[0m\x1b[0;1;31mc\x1b[0m"
    assert painter.paint("d") == "\x1b[0;1;31md\x1b[0m"
    assert painter.paint("") == ""
    assert painter.paint("\x1b[0me") == "e"
    assert not painter.style


# By ECMA-48 and xterm: those of which one at most is in force, and what puts an end to which.
EXCLUSIVE = [
    {1}, {2}, {3}, {4, 21}, {5, 6}, {7}, {9}, {53},
    {*range(30, 38), *range(90, 98)}, {*range(40, 48), *range(100, 108)},
]  # fmt: skip
ENDS = {
    0: [*range(10)], 22: [0, 1], 23: [2], 24: [3], 25: [4], 27: [5], 29: [6], 55: [7], 39: [8],
    49: [9],
}  # fmt: skip


def test_of_any_two_parameters_that_is_in_force_what_the_standards_say() -> None:
    numbers = [number for number in range(120) if number not in (38, 48, 58)]
    for first in numbers:
        for second in numbers:
            force: dict[int, int] = {}
            for number in (first, second):
                for group in ENDS.get(number, ()):
                    force.pop(group, None)
                for group, members in enumerate(EXCLUSIVE):
                    if number in members:
                        force[group] = number
            style = Style().apply(f"{first};{second}")
            assert sorted(int(text) for _, text in style.parts) == sorted(force.values())


@pytest.mark.parametrize(
    ("sequence", "force"),
    [
        *[(f"4:{number}", f"4:{number}") for number in range(1, 6)],
        ("4:0", ""), ("4:6", ""), ("4:", ""), ("4:1:1", ""), (":3", ""),
        ("4;4:0", ""), ("4;4:3", "4:3"), ("4:3;24", ""), ("4:3;4", "4"), ("4:3;21", "21"),
        ("38:5:9", "38;5;9"), ("48:5:9", "48;5;9"), ("58:5:7", "58;5;7"), ("58:5:7;59", ""),
        ("38:2:1:2:3", "38;2;1;2;3"), ("38:2::1:2:3", "38;2;1;2;3"),
        ("38:2:9:1:2:3", "38;2;1;2;3"), ("38:2:1:2", ""), ("38:5", ""), ("38:", ""), ("38:9:1", ""),
        ("38;5;255", "38;5;255"), ("38;5;256", ""), ("38;5", ""), ("38;2;1;2", ""), ("38", ""),
        ("31;38;5;9", "38;5;9"), ("38;5;9;39", ""), ("48;2;1;2;3;49", ""), ("38;5;", "38;5;0"),
        ("38:2:9:1:2:3:7", "38;2;1;2;3"), ("38;5;1:2", ""),
    ],
)  # fmt: skip
def test_of_a_parameter_with_parts_that_is_in_force_what_it_says(sequence: str, force: str) -> None:
    assert ";".join(text for _, text in Style().apply(sequence).parts) == force


def test_what_a_line_left_open_can_be_asked_for() -> None:
    painter = Painter()
    painter.paint("\x1b[31mred")
    assert painter.style == Style().apply("31")


def test_a_log_that_opens_colours_for_ever_is_remembered_in_a_few_words() -> None:
    painter = Painter()
    for number in range(200):
        painter.paint(f"\x1b[38;2;{number % 256};1;2m\x1b[{number};5;7;4:{number % 6}m" * 5)
    assert len(str(painter.style)) < 200


@pytest.mark.parametrize(
    "sequence",
    ["\x1b[8m", "\x1b[10m", "\x1b[26m", "\x1b[38;5;300m", "\x1b[38;2;1;2m", "\x1b[38;7m"],
)
def test_what_is_unknown_or_conceals_changes_nothing(sequence: str) -> None:
    assert take_apart(f"{sequence}x").paint() == "x"
    assert Style().apply(sequence[2:-1]) == Style()


# -- all the rest ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("\x1b[6n", r"\x1b[6n"),
        ("\x1b[?25l", r"\x1b[?25l"),
        ("\x1b[>4;2m", r"\x1b[>4;2m"),
        ("\x1b[31", r"\x1b[31"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x1b]8;;http://x\x1b\\link", r"\x1b]8;;http://x\x1b\link"),
        ("\x1bP1$r\x1b\\", r"\x1bP1$r\x1b" + "\\"),
        ("\x1bc\x1b7\x1b(0", r"\x1bc\x1b7\x1b(0"),
        ("\x9b31mred\x9d0;t\x9c", r"\x9b31mred\x9d0;t\x9c"),
        ("a\bb\x07\0\x7f\x0b\x0c", r"a\x08b\x07\x00\x7f\x0b\x0c"),
        ("a\rb\nc", r"a\rb\nc"),
        (
            "user\u202egnp.exe\u2066x\u2069\u200f\u061c",
            r"user\u202egnp.exe\u2066x\u2069\u200f\u061c",
        ),
        ("a\u2028b\x85c", r"a\u2028b\x85c"),
        ("\x1b\x1b[0m[31mno", r"\x1b[31mno"),
        ("tab\tand ünïcode 世界 👩‍🚀", "tab\tand ünïcode 世界 👩‍🚀"),
    ],
)
def test_what_drives_a_terminal_is_made_visible(text: str, harmless: str) -> None:
    assert strip(text) == harmless
    assert Painter().paint(text) == harmless
    assert strip(harmless) == harmless


@given(st.text(max_size=30) | st.text("\x1b[]0;m?\x07\x9b38:5\rx", max_size=30))
def test_no_text_drives_a_terminal(text: str) -> None:
    for harmless in (escape(text), strip(text), Painter().paint(text)):
        Terminal().write(harmless)  # which refuses all but colours
    assert "\x1b" not in escape(text) + strip(text)
    [cells] = shown(Painter().paint(text))
    assert "".join(character for character, _ in cells) == strip(text)


# -- lines, and parts of lines -----------------------------------------------------------------

KEY = "swordfish-4711"
ATOMS = (
    st.sampled_from(
        [b"\n", b"\r", b"\r\n", b"\x1b[31m", b"\x1b[0m", b"\x1b[", b"\xc3\xa4", b"\xff"]
    )
    | st.sampled_from([KEY.encode(), KEY[:7].encode(), KEY[7:].encode(), b"\x1b]0;x\x07", b"41%"])
    | st.binary(max_size=3)
)
STREAMS = st.lists(ATOMS, max_size=14).map(b"".join)


def expected_lines(stream: bytes, *, ended: bool = True) -> list[str]:
    """What each line comes to, in the most simple-minded way."""
    *whole, rest = stream.split(b"\n")
    lines = [last_state(line) for line in whole]
    texts = [redact(strip(line.decode("utf-8", "backslashreplace")), (KEY,)) for line in lines]
    if rest:
        text = cut_off(last_state(rest))
        texts.append(redact(text, (KEY,), cut=True))
    return texts


def last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def cut_off(data: bytes) -> str:
    """What is certain of a text that was cut off."""
    for length in range(4):
        tail = data[len(data) - length :] if length else b""
        if tail and is_unfinished(tail):
            data = data[: -len(tail)]
            break
    text = data.decode("utf-8", "backslashreplace")
    return strip(re.sub(r"\x1b(\[[0-9;:]*)?\Z", "", text))


def is_unfinished(tail: bytes) -> bool:
    """Whether these may be the first bytes of a character, all of them."""
    try:
        tail.decode()
    except UnicodeDecodeError as exc:
        return exc.start == 0 and exc.end == len(tail) and exc.reason == "unexpected end of data"
    return False


def run(stream: bytes, cuts: list[int], asks: list[bool], *, colors: bool = False) -> list[Part]:
    lines = LogLines(2**16, Secrets((KEY,)), colors=colors)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parts: list[Part | None] = []
    for (start, end), ask in zip(pairwise(edges), [*asks, *[False] * len(edges)], strict=False):
        parts += lines.feed(stream[start:end])
        if ask:
            parts.append(lines.fragment())
            assert not lines.fresh
    parts.append(lines.close())
    return [part for part in parts if part is not None]


def joined(parts: list[Part]) -> Iterator[tuple[str, str]]:
    text = shown = ""
    for part in parts:
        assert not (part.continues and part.replaces)
        if not part.continues:
            text = shown = ""
        text += part.text
        shown += part.shown
        if part.ended:
            yield text, shown


@settings(max_examples=80)
@given(STREAMS, st.lists(st.integers(0, 60), max_size=6), st.lists(st.booleans(), max_size=7))
@example(b"41%\r42%\r43%", [3, 4, 7], [True, True, True])
@example(b"a\r\n\rb\r\r\n", [2, 3], [True])
@example(KEY.encode() + b"\n", [1, 5, 8], [True, True, True])
@example(b"\x1b[31m" + KEY.encode() + b"\n", [2, 9], [True, True])
def test_lines_come_out_the_same_however_they_arrive_and_in_however_many_parts(
    stream: bytes, cuts: list[int], asks: list[bool]
) -> None:
    plain = run(stream, cuts, asks)
    assert [text for text, _ in joined(plain)] == expected_lines(stream)
    assert all(part.text == part.shown for part in plain)
    colored = run(stream, cuts, asks, colors=True)
    assert [part.text for part in colored] == [part.text for part in plain]
    for part in colored:
        terminal = Terminal()
        terminal.write(part.shown)
        assert words(terminal.lines) == [part.text]
        assert not terminal.look
    whole = [shown for _, shown in joined(run(stream, [], [], colors=True))]
    in_parts = [shown for _, shown in joined(colored)]
    assert [without_joints(one) for one in in_parts] == [without_joints(one) for one in whole]


def without_joints(text: str) -> list[list[Cell]]:
    """How it looks, where a replacement has the look of where its secret began."""
    return shown(text)


NOISE = st.sampled_from([b"\n", b"\r", b"\x1b[31m", b"\x1b[", b"sword", b"\xc3", b" "])


@settings(max_examples=60)
@given(
    st.lists(NOISE | st.just(KEY.encode()), max_size=14).map(b"".join),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_no_part_of_a_line_holds_a_part_of_a_secret(stream: bytes, cuts: list[int]) -> None:
    for part in run(stream, cuts, [True] * 7):
        text = part.text.replace(REDACTED, "|")
        assert not any(KEY[at : at + 6] in text for at in range(len(KEY) - 5))


def test_a_line_that_takes_its_time_is_told_in_parts_none_of_them_twice() -> None:
    lines = LogLines(100, Secrets((KEY,)))
    assert list(lines.feed(b"fetching 41%")) == []
    assert lines.fresh
    assert lines.fragment() == Part("fetching 41%", "fetching 41%", ended=False)
    assert not lines.fresh
    assert lines.fragment() is None
    [*_] = lines.feed(b" with " + KEY[:9].encode())
    assert lines.fragment() == Part(" with ", " with ", continues=True, ended=False)
    [rest] = lines.feed(KEY[9:].encode() + b" done\r\n")
    assert rest == Part(f"{REDACTED} done", f"{REDACTED} done", continues=True)
    assert lines.close() is None


def test_a_progress_bar_is_told_by_its_latest_state() -> None:
    lines = LogLines(100, Secrets(()))
    for number in range(10_000):
        assert list(lines.feed(f"\r{number / 100:.0f}% of a file".encode())) == []
        assert lines.held < 20
    assert lines.fragment() == Part("100% of a file", "100% of a file", ended=False)
    [*_] = lines.feed(b"\rverifying")
    [*_] = lines.feed(b"\rverified\r")
    assert lines.fragment() == Part("verified", "verified", replaces=True, ended=False)
    [last] = lines.feed(b"\n")
    assert last == Part("", "", continues=True)


def test_a_colour_that_a_progress_bar_left_on_stays_on() -> None:
    lines = LogLines(100, Secrets(()), colors=True)
    [part] = lines.feed(b"\x1b[32m41%\r42%\n")
    assert part.shown == "\x1b[0;32m42%\x1b[0m"
    [part] = lines.feed(b"next\n")
    assert part.shown == "\x1b[0;32mnext\x1b[0m"


def test_a_colour_that_changes_within_a_secret_does_not_hide_it() -> None:
    lines = LogLines(100, Secrets((KEY,)), colors=True)
    [part] = lines.feed(f"\x1b[32mkey {KEY[:5]}\x1b[31m{KEY[5:]} there\n".encode())
    assert part.text == f"key {REDACTED} there"
    assert part.shown == (
        f"\x1b[0;32mkey \x1b[0m\x1b[0;32m{REDACTED}\x1b[0m\x1b[0;31m there\x1b[0m"
    )
    [part] = LogLines(100, Secrets((KEY,))).feed(f"{KEY[:5]}\x1b[31m{KEY[5:]}\n".encode())
    assert part.text == REDACTED


@pytest.mark.parametrize("size", [100, 101, 10_000])
def test_of_a_line_that_is_too_long_the_beginning_is_told_and_the_rest_is_dropped(
    size: int,
) -> None:
    lines = LogLines(100, Secrets((KEY,)))
    for at in range(0, size, 7):
        assert list(lines.feed(b"x" * min(7, size - at))) == []
        assert lines.held <= 100
    [first, second] = lines.feed(b"\nnext\n")
    assert first.text == "x" * 100
    assert second.text == "next"


def test_a_secret_at_the_cut_of_a_line_that_is_too_long_is_taken_out() -> None:
    for room in range(len(KEY)):
        [part] = LogLines(50 + room, Secrets((KEY,))).feed(b"x" * 50 + KEY.encode() + b"\n")
        assert part.text == "x" * 50 + (KEY[:room] if room <= 3 else REDACTED)


# -- may there be colours? ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "tty", "renders", "environ"),
    [
        (True, True, True, ""),
        (False, False, True, ""),
        (False, True, False, ""),
        (True, True, True, "TERM=xterm-256color"),
        (False, False, True, "TERM=xterm-256color"),
        (False, True, True, "TERM=dumb"),
        (False, True, True, "CLICOLOR=0"),
        (True, True, True, "CLICOLOR=1"),
        (False, False, True, "CLICOLOR=1"),
        # https://no-color.org: set and not empty, whatever it is
        (False, True, True, "NO_COLOR=1"),
        (False, True, True, "NO_COLOR=0"),
        (True, True, True, "NO_COLOR="),
        (False, True, True, "NO_COLOR=1 FORCE_COLOR=1"),
        (False, True, True, "NO_COLOR=1 CLICOLOR_FORCE=1"),
        (True, False, False, "FORCE_COLOR=1"),
        (True, False, True, "FORCE_COLOR=3 TERM=dumb CLICOLOR=0"),
        (True, False, True, "FORCE_COLOR=true"),
        (False, True, True, "FORCE_COLOR=0"),
        (False, True, True, "FORCE_COLOR=False"),
        (False, True, True, "FORCE_COLOR=0 CLICOLOR_FORCE=1"),
        (False, False, True, "FORCE_COLOR="),
        (True, False, False, "CLICOLOR_FORCE=1 TERM=dumb CLICOLOR=0"),
        (False, False, True, "CLICOLOR_FORCE=0"),
        (True, True, True, "CLICOLOR_FORCE=0"),
        (False, False, True, "CLICOLOR_FORCE="),
    ],
)
def test_whether_colours_may_be_used(allowed: bool, tty: bool, renders: bool, environ: str) -> None:
    variables = dict(item.split("=") for item in environ.split())
    assert may_use_colors(tty=tty, renders=renders, environ=variables) is allowed
