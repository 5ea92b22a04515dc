"""A small terminal that understands colours, for comparison: it shares no code with the library."""

from __future__ import annotations

import re

Look = frozenset[tuple[str, object]]
Cell = tuple[str, Look]
DEFAULT: Look = frozenset()

FLAGS = {1: "bold", 2: "faint", 3: "italic", 7: "inverse", 9: "strike", 53: "overline"}
OFF = {22: ("bold", "faint"), 23: ("italic",), 27: ("inverse",), 29: ("strike",), 55: ("overline",)}
GROUNDS = {3: "fg", 9: "fg", 4: "bg", 10: "bg"}


class Terminal:
    """Understands SGR and nothing else: written from ECMA-48 and xterm's list, for comparison.

    It shows each character with its look, whichever way the look was come by. It raises for every
    other control character but a tab and a newline.
    """

    def __init__(self) -> None:
        self.look: dict[str, object] = {}
        self.lines: list[list[Cell]] = [[]]
        self.at_newline: list[Look] = []

    def write(self, text: str) -> None:
        place = 0
        while place < len(text):
            if found := re.compile(r"\x1b\[([0-9;:]*)m").match(text, place):
                self.set_look(found[1].split(";"))
                place = found.end()
                continue
            character = text[place]
            place += 1
            if character == "\n":
                self.at_newline.append(frozenset(self.look.items()))
                self.lines.append([])
            else:
                assert character == "\t" or character.isprintable() or ord(character) >= 0xA0
                self.lines[-1].append((character, frozenset(self.look.items())))

    def set_look(self, words: list[str]) -> None:
        while words:
            word = words.pop(0)
            parts = [int(part or 0) for part in word.split(":")]
            code = parts[0]
            if code in {38, 48, 58} and len(parts) > 1:
                self.set_colour(code, parts[1], parts[2:])
            elif code in {38, 48, 58}:
                self.set_colour_from(code, words)
            elif code == 4 and len(parts) > 1:
                if len(parts) == 2 and parts[1] <= 5:
                    self.put("line", parts[1] or None)
            elif len(parts) == 1:
                self.set_plain(code)

    def set_colour_from(self, code: int, words: list[str]) -> None:
        kind = words.pop(0) if words else ""
        count = {"5": 1, "2": 3}.get(kind, 0)
        values = [999 if ":" in word else int(word or 0) for word in words[:count]]
        del words[:count]
        if count:
            self.set_colour(code, int(kind), values)

    def set_colour(self, code: int, kind: int, values: list[int]) -> None:
        if kind == 2 and len(values) > 3:
            values = values[1:4]
        if len(values) == {5: 1, 2: 3}.get(kind) and max(values) < 256:
            self.put({38: "fg", 48: "bg", 58: "linecolour"}[code], (kind, *values))

    def set_plain(self, code: int) -> None:
        tens, ones = divmod(code, 10)
        if code == 0:
            self.look.clear()
        elif code in FLAGS:
            self.put(FLAGS[code], True)
        elif code in OFF:
            for name in OFF[code]:
                self.put(name, None)
        elif code in {4, 21, 24}:
            self.put("line", {4: 1, 21: 2, 24: None}[code])
        elif code in {5, 6, 25}:
            self.put("blink", {5: 1, 6: 2, 25: None}[code])
        elif code == 59:
            self.put("linecolour", None)
        elif tens in GROUNDS and ones < 8:
            self.put(GROUNDS[tens], code)
        elif code in {39, 49}:
            self.put(GROUNDS[tens], None)

    def put(self, name: str, value: object) -> None:
        self.look.pop(name, None)
        if value is not None:
            self.look[name] = value


def shown(text: str) -> list[list[Cell]]:
    terminal = Terminal()
    terminal.write(text)
    return terminal.lines


def words(lines: list[list[Cell]]) -> list[str]:
    return ["".join(character for character, _ in line) for line in lines]
