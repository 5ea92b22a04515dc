"""Text from the bytes of tokens: stop strings and characters over several tokens."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from llamatrio.session.native.text import TextAssembler


def assemble(pieces: list[bytes], stops: list[str]) -> tuple[str, str | None]:
    assembler = TextAssembler(stops)
    text = "".join(assembler.feed(piece) for piece in pieces)
    return text + assembler.close(), assembler.stopped


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first of the stop strings that is complete ends the text."""
    for end in range(1, len(text) + 1):
        for begin in range(end):
            if text[begin:end] in stops:
                found = [stop for stop in stops if text[:end].endswith(stop)]
                stop = max(found, key=len)
                return text[: end - len(stop)], stop
    return text, None


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(
    st.text("abé€😀", max_size=12),
    st.lists(st.text("abé€", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 60), max_size=12),
)
def test_however_the_bytes_are_cut_into_tokens_the_text_is_the_same(
    text: str, stops: list[str], places: list[int]
) -> None:
    one_by_one = assemble([text[place : place + 1].encode() for place in range(len(text))], stops)
    assert assemble(cut(text.encode(), places), stops)[0] == one_by_one[0]
    assert one_by_one == expected(text, stops)


def test_what_may_become_a_stop_string_is_held_back_until_it_cannot() -> None:
    assembler = TextAssembler(["END"])
    assert assembler.feed(b"the E") == "the "
    assert assembler.feed(b"N") == ""
    assert assembler.feed(b"T") == "ENT"
    assert assembler.feed(b"EN") == ""
    assert assembler.feed(b"D of it") == ""
    assert assembler.stopped == "END"
    assert assembler.feed(b"more") == assembler.close() == ""


def test_a_character_of_several_tokens_comes_when_it_is_whole() -> None:
    assembler = TextAssembler()
    assert [assembler.feed(byte) for byte in (b"\xe2", b"\x82", b"\xac")] == ["", "", "€"]


def test_half_a_character_at_the_end_is_not_kept_back() -> None:
    assembler = TextAssembler(["x"])
    assert assembler.feed(b"a\xe2\x82") == "a"
    assert assembler.close() == "\ufffd"
