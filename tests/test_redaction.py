"""Secrets taken out of texts, whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given, settings, strategies as st

from llamatrio.wire.ansi import escape
from llamatrio.wire.redaction import (
    REDACTED,
    Redactor,
    Secrets,
    join_spans,
    redact,
    redact_bytes,
    redact_value,
    replace_spans,
)

KEY = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

# Few letters, so that secrets overlap, contain one another and begin where another ends.
TEXTS = st.text("ab", max_size=40)
SECRETS = st.lists(st.text("ab", max_size=6), max_size=4).map(tuple)


def taken_out(text: str, secrets: tuple[str, ...]) -> str:
    """Do it in the most simple-minded way: mark every character of every occurrence."""
    marked = [False] * len(text)
    joined = [False] * len(text)  # with the character before it
    for secret in filter(None, secrets):
        for at in range(len(text) - len(secret) + 1):
            if text[at : at + len(secret)] == secret:
                marked[at : at + len(secret)] = [True] * len(secret)
                joined[at + 1 : at + len(secret)] = [True] * (len(secret) - 1)
    shown = ""
    for at, character in enumerate(text):
        if not marked[at]:
            shown += character
        elif not joined[at]:
            shown += REDACTED
    return shown


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


# -- whole texts -------------------------------------------------------------------------------


@given(TEXTS, SECRETS)
@example("abab", ("aba", "bab"))
@example("aaaa", ("aa",))
def test_every_character_of_every_occurrence_is_taken_out(
    text: str, secrets: tuple[str, ...]
) -> None:
    assert redact(text, secrets) == taken_out(text, secrets)


@settings(max_examples=20)
@given(TEXTS, SECRETS)
def test_what_was_made_ready_gives_the_same(text: str, secrets: tuple[str, ...]) -> None:
    assert redact(text, Secrets(secrets)) == redact(text, secrets)
    assert redact_bytes(text.encode(), secrets) == redact(text, secrets).encode()


def test_a_secret_that_is_a_part_of_the_replacement_does_not_touch_it() -> None:
    assert redact("key one", ("one", "red", "e")) == f"k{REDACTED}y {REDACTED}"


@pytest.mark.parametrize(
    "write", [json.dumps, repr, quote, quote_plus, lambda text: quote(text, "")]
)
@pytest.mark.parametrize("secret", ['p/ß w"ord\\', "naïve key+1", "tab\there", "bidi\u202ekey"])
def test_a_secret_is_found_as_others_write_it(write: object, secret: str) -> None:
    assert callable(write)
    assert redact(f"<{write(secret)}>", (secret,)).strip("<>\"'") == REDACTED


def test_a_secret_is_found_in_json_that_escapes_slashes_and_leaves_letters() -> None:
    written = json.dumps("ß/key", ensure_ascii=False).replace("/", "\\/")
    assert redact(written, ("ß/key",)) == f'"{REDACTED}"'


def test_a_secret_is_found_in_bytes() -> None:
    assert redact_bytes(b"a \xff pass\xc3\xb6 b", ("passö",)) == b"a \xff [redacted] b"
    assert redact_bytes(b"a k\xff b", ("k\udcff",)) == b"a [redacted] b"


def test_a_secret_that_is_no_utf_8_is_found_in_a_decoded_line() -> None:
    line = b"key k\xff1 there".decode("utf-8", "backslashreplace")
    assert redact(line, ("k\udcff1",)) == f"key {REDACTED} there"
    assert redact("a \ud800x", ("\ud800x",)) == f"a {REDACTED}"


def test_each_line_of_a_secret_of_several_lines_is_a_secret_but_for_short_ones() -> None:
    secret = "-----BEGIN KEY-----\nMIIEvQIBADANBg\n==\n"
    assert redact("see MIIEvQIBADANBg", (secret,)) == f"see {REDACTED}"
    assert redact("a == b", (secret,)) == "a == b"


@pytest.mark.parametrize("line", ["12345678", "123456789"])
@pytest.mark.parametrize("secret", ["{}\n", "{}\r\n", "{}\nabc", "abc\n{}\n"])
def test_a_line_of_eight_characters_is_a_secret_by_itself(line: str, secret: str) -> None:
    assert redact(f"a {line} b", (secret.format(line),)) == f"a {REDACTED} b"
    assert redact(f"a {line[:7]} b", (secret.format(line[:7]),)) == f"a {line[:7]} b"


def test_a_secret_is_found_as_it_is_and_as_a_log_shows_it() -> None:
    for secret in ("\udcff\x01key", "it's \"\x1bkey"):
        assert redact(f"a {secret}", (secret,)) == f"a {REDACTED}"
        assert redact(f"a {escape(secret)}", (secret,)) == f"a {REDACTED}"


def test_a_secret_is_found_in_an_address_in_small_letters() -> None:
    assert redact("<p%2f%c3%9f>", ("p/ß",)) == f"<{REDACTED}>"


def test_of_a_text_can_be_asked_whether_a_secret_is_in_it() -> None:
    assert Secrets((KEY,)).present(f"a {KEY}") is True
    assert Secrets((KEY,)).present(KEY[:-1]) is False
    assert Secrets(("",)).present("") is False
    assert Secrets(("",)).longest == 0


def test_the_secrets_are_not_in_what_holds_them() -> None:
    assert KEY not in repr(Secrets((KEY,)))
    assert Secrets((KEY,)).longest == len(KEY)


def test_values_from_json_lose_secrets_in_names_too() -> None:
    value = {"a": [KEY, 1, None, {KEY: f"x{KEY}"}], "b": True}
    assert redact_value(value, (KEY,)) == {
        "a": [REDACTED, 1, None, {REDACTED: f"x{REDACTED}"}],
        "b": True,
    }


# -- texts that were cut -----------------------------------------------------------------------


def test_values_lose_secrets_that_were_made_ready() -> None:
    assert redact_value([KEY], Secrets((KEY,))) == [REDACTED]


def test_of_the_pieces_of_several_secrets_at_a_cut_the_longest_is_taken_out() -> None:
    secrets = ("abcdefPQRS", "defghiTUVWXYZ", "UVWXabcdef", "KLMNOPQRabcde")
    assert redact("see abcdef", secrets, cut=True) == f"see {REDACTED}"
    assert redact("abcdef there", secrets, cut_start=True) == f"{REDACTED} there"


@pytest.mark.parametrize("length", range(1, len(KEY)))
def test_a_piece_of_a_secret_at_a_cut_is_taken_out_but_for_four_characters(length: int) -> None:
    start, end = KEY[:length], KEY[-length:]
    few = length <= 4
    assert redact(f"key={start}", (KEY,), cut=True) == "key=" + (start if few else REDACTED)
    assert redact(f"{end} key", (KEY,), cut_start=True) == (end if few else REDACTED) + " key"
    assert redact(f"key={start}", (KEY,)) == f"key={start}"
    assert redact_bytes(start.encode(), (KEY,), cut=True) == (
        start.encode() if few else REDACTED.encode()
    )


@pytest.mark.parametrize(("length", "left"), [(3, 1), (4, 1), (8, 2), (12, 3), (16, 4), (40, 4)])
def test_of_a_short_secret_no_more_than_a_quarter_is_left_at_a_cut(length: int, left: int) -> None:
    secret = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP"[:length]
    assert redact(f"={secret[:left]}", (secret,), cut=True) == f"={secret[:left]}"
    assert redact(f"={secret[: left + 1]}", (secret,), cut=True) == f"={REDACTED}"


@given(TEXTS, SECRETS, st.booleans(), st.booleans())
def test_at_a_cut_nothing_longer_than_that_is_left(
    text: str, secrets: tuple[str, ...], start: bool, end: bool
) -> None:
    shown = redact(text, secrets, cut=end, cut_start=start)
    for secret in filter(None, secrets):
        assert secret not in shown.replace(REDACTED, "|")
        least = min(4, max(1, len(secret) // 4)) + 1
        for length in range(least, len(secret)):
            assert not (end and shown.endswith(secret[:length]))
            assert not (start and shown.startswith(secret[-length:]))


# -- texts that come in pieces -----------------------------------------------------------------


@given(TEXTS, SECRETS, st.lists(st.integers(0, 40), max_size=8), st.booleans())
@example("abab", ("ab", "abab"), [3], False)
@example("aaaaab", ("aaa",), [1, 2, 3, 4, 5], True)
def test_a_text_in_pieces_is_shown_as_the_whole_one(
    text: str, secrets: tuple[str, ...], cuts: list[int], cut: bool
) -> None:
    redactor = Redactor(secrets)
    shown = ""
    most = max(map(len, secrets), default=0)
    for piece in in_pieces(text, cuts):
        shown += redactor.feed(piece)
        assert redactor.held < max(most, 1)
        # What was shown so far stands at the beginning of the end, whatever follows.
        assert redact(text, secrets).startswith(shown)
    shown += redactor.close(cut=cut)
    assert shown == redact(text, secrets, cut=cut)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 200), max_size=8), st.integers(0, 64))
def test_no_piece_of_a_key_is_shown_while_it_arrives(cuts: list[int], length: int) -> None:
    text = f"the key is {KEY}, and again {KEY}{KEY} and half: {KEY[:length]}"
    redactor = Redactor((KEY,))
    shown = "".join(redactor.feed(piece) for piece in in_pieces(text, cuts)) + redactor.close()
    assert shown.count(REDACTED) == (4 if length > 4 else 3)
    assert not any(KEY[at : at + 5] in shown for at in range(60))


def test_only_what_may_be_the_beginning_of_a_secret_is_held_back() -> None:
    redactor = Redactor((KEY,))
    assert redactor.feed("fetching 41") == "fetching 41"
    assert redactor.held == 0
    assert redactor.feed("%, key 9f8") == "%, key "
    assert redactor.held == 3
    assert redactor.feed("4") == "9f84"
    assert redactor.feed(" 9f86d08") == " "
    assert redactor.close() == REDACTED
    assert redactor.close() == ""
    assert redactor.feed("9f86") == ""
    assert redactor.close() == "9f86"


def test_a_redactor_is_bounded_by_the_longest_secret_whatever_comes() -> None:
    redactor = Redactor(("a" * 20,))
    shown = ""
    for _ in range(1000):
        shown += redactor.feed("a" * 10)
        assert redactor.held < 20
    shown += redactor.close()
    assert shown == redact("a" * 10_000, ("a" * 20,), cut=True) == REDACTED


def test_a_span_that_was_announced_before_a_part_is_left_out_of_it() -> None:
    assert replace_spans("abcdef", [(1, 4)], 2) == "ef"
    assert replace_spans("abcdef", [(1, 4)], 0, 3) == f"a{REDACTED}"
    assert replace_spans("abcdef", [(1, 2), (4, 6)], 2, 4) == "cd"


def test_a_secret_after_one_that_was_announced_is_taken_out_too() -> None:
    redactor = Redactor(("xyz", "zqqq"))  # what ends the first may begin the second
    shown = [redactor.feed("xyz"), redactor.feed(" and xyz."), redactor.close()]
    assert shown == [REDACTED, f" and {REDACTED}.", ""]


def pieces(form: str, text: str) -> range:
    """The lengths of pieces of a secret that give it away, from the longest on."""
    return range(min(len(form) - 1, len(text)), min(4, max(1, len(form) // 4)), -1)


def longest_piece(forms: Iterable[str], text: str, *, at_end: bool) -> list[tuple[int, int]]:
    spans = [
        (len(text) - size, len(text)) if at_end else (0, size)
        for form in forms
        for size in pieces(form, text)
        if (text.endswith(form[:size]) if at_end else text.startswith(form[-size:]))
    ]
    return sorted(spans, key=lambda span: span[0] - span[1])[:1]


@given(
    st.lists(st.text("ab", min_size=1, max_size=24), min_size=1, max_size=3),
    st.text("ab", max_size=30),
    st.booleans(),
)
@example(["aaaaabbbbbbb"], "aaaaaa", True)
@example(["bbbbbbbaaaaa"], "aaaaaa", False)
def test_a_piece_at_a_cut_is_found_as_by_trying_every_one(
    secrets: list[str], text: str, at_end: bool
) -> None:
    known = Secrets(secrets)
    found = longest_piece(known._forms, text, at_end=at_end)
    expected = join_spans([*known.spans(text), *found])
    assert known.cut_spans(text, start=not at_end, end=at_end) == expected
