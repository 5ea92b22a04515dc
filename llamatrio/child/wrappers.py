"""PURE. Command lines that merge a child's stdout and stderr, seen before anything is started.

Only what certainly does so is refused: a redirection counts where a shell would carry it out, for
the command that gets the child's options. What stands in quotes, in a comment, or in an argument of
a program that is no shell, is text. Whatever is missed here is noticed on the living child.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import attrs

from llamatrio.child.shelltext import find_redirections


@attrs.frozen
class Merging:
    """A part of a command line that merges the two streams.

    Attributes:
      why: What it does, in one sentence.
      instead: The command without it.
    """

    why: str
    instead: tuple[str, ...]


def find_merging(command: Sequence[str]) -> Merging | None:
    """Return what merges stdout and stderr on a command line, or None if nothing is known to.

    Args:
      command: A program and its arguments.
    """
    if not command:
        return None
    name = _name(command[0])
    if check := _CHECKS.get(name):
        return check(command)
    start = _start_of_inner(name, command)
    return _at(command, start, len(command), find_merging(command[start:])) if start else None


def _name(program: str) -> str:
    return re.split(r"[/\\]", program)[-1].lower().removesuffix(".exe")


def _at(command: Sequence[str], start: int, end: int, inner: Merging | None) -> Merging | None:
    """Put what was found in a part of a command back into its place."""
    if inner is None:
        return None
    return Merging(inner.why, (*command[:start], *inner.instead, *command[end:]))


# -- programs that only start another one ------------------------------------------------------

_Options: TypeAlias = frozenset[str]


@attrs.frozen
class _Prefix:
    valued: _Options  # options that take the next word
    operands: int = 0  # words of its own before the program


def _prefix(valued: str = "", operands: int = 0) -> _Prefix:
    return _Prefix(frozenset(valued.split()), operands)


_PREFIXES: Final[Mapping[str, _Prefix]] = {
    "busybox": _prefix(),
    "chrt": _prefix("-T -P -D", 1),
    "doas": _prefix("-u -C"),
    "env": _prefix("-u --unset -C --chdir"),
    "ionice": _prefix("-c --class -n --classdata"),
    "nice": _prefix("-n --adjustment"),
    "nohup": _prefix(),
    "setpriv": _prefix(
        "--pdeathsig --reuid --regid --groups --ambient-caps --inh-caps --bounding-set "
        "--securebits --selinux-label --apparmor-profile --ruid --euid --rgid --egid"
    ),
    "setsid": _prefix(),
    "stdbuf": _prefix("-i --input -o --output -e --error"),
    "sudo": _prefix("-u -g -h -p -C -D -R -T -U"),
    "taskset": _prefix("", 1),
    "time": _prefix("-f -o"),
    "timeout": _prefix("-s --signal -k --kill-after", 1),
}


def _start_of_inner(name: str, command: Sequence[str]) -> int:
    """Return where the program begins that a prefix such as `nice` starts; 0 if it is not one."""
    if (prefix := _PREFIXES.get(name)) is None:
        return 0
    place, operands = 1, prefix.operands
    while place < len(command):
        word = command[place]
        if word == "--":
            place += 1
            break
        if word.startswith("-") and len(word) > 1:
            place += 1 + (word in prefix.valued)
        elif name in ("env", "sudo") and re.match(r"\w+=", word):
            place += 1
        elif operands:
            operands -= 1
            place += 1
        else:
            break
    return place + operands if place < len(command) else 0


# -- shells ------------------------------------------------------------------------------------


def _check_shell(command: Sequence[str]) -> Merging | None:
    place = _place_of_text(command)
    return _at(command, place, place + 1, _check_text(command[place])) if place else None


def _place_of_text(command: Sequence[str]) -> int:
    """Return which argument of a shell is the text that it runs; 0 if it runs a file."""
    asked, place = False, 1
    while place < len(command):
        word = command[place]
        if word in ("--rcfile", "--init-file"):
            place += 2
        elif word[:1] in ("-", "+") and len(word) > 1:
            short = not word.startswith("--")
            asked = asked or (short and word.startswith("-") and "c" in word)
            place += 1 + (short and word.endswith(("o", "O")))  # -o takes a name
        else:
            return place if asked else 0
    return 0


def _check_text(text: str) -> Merging | None:
    found = find_redirections(text)
    if found.merging:
        constructs = ", ".join(f"`{text[start:end]}`" for start, end, _ in found.merging)
        return Merging(f"the shell merges its two streams: {constructs}", (found.repaired(text),))
    for start, end, words in found.commands:
        raw = {_dequote(word): word for word in words}
        if inner := find_merging([_dequote(word) for word in words]):
            line = " ".join(raw.get(word, shlex.quote(word)) for word in inner.instead)
            return Merging(inner.why, (text[:start] + line + text[end:],))
    return None


def _dequote(word: str) -> str:
    if "$" in word or "`" in word:
        return word  # nobody knows what it will be
    try:
        return "".join(shlex.split(word))
    except ValueError:
        return word


def _check_cmd(command: Sequence[str]) -> Merging | None:
    places = [place for place, word in enumerate(command) if word.lower() in ("/c", "/k")]
    if not places:
        return None
    text = " ".join(command[places[0] + 1 :])
    # What stands before the last `&` is another command.
    *before, line = re.split(r"(&&|\|\||(?<!>)&)", text)
    bare = re.sub(r'"[^"]*"', lambda quoted: "_" * len(quoted[0]), line)
    if (found := re.search(r"(1|2)?>&[12]", bare)) is None:
        return None
    line = f"{line[: found.start()].rstrip()}{line[found.end() :]}"
    why = f"the shell merges its two streams: `{found[0]}`"
    return Merging(why, (*command[: places[0] + 1], "".join(before) + line))


# -- terminals: one stream where there were two ------------------------------------------------


def _is_installed(program: str) -> bool:
    """Say whether this is the system's program of that name, and not somebody's own `./script`."""
    *folders, _ = re.split(r"[/\\]", program)
    return not folders or folders[-1] in ("bin", "sbin")


_SCRIPT_VALUED: Final = "-I -O -B -E -m -o -T --log-in --log-out --log-io --echo --logging-format"


def _check_script(command: Sequence[str]) -> Merging | None:
    if not _is_installed(command[0]):
        return None
    why = "`script` runs it in a terminal, where both streams are one"
    words = list(command[1:])
    while words:
        word = words.pop(0)
        if word == "--":
            break
        if word.startswith("--command="):
            return Merging(why, ("sh", "-c", _executed(word.partition("=")[2]), "sh"))
        if word == "--command" or re.fullmatch(r"-[a-zA-Z]*c", word):
            return Merging(why, ("sh", "-c", _executed(words[0] if words else ""), "sh"))
        if word in _SCRIPT_VALUED.split() and words:
            words.pop(0)
    return Merging(why, tuple(words) or ("llama-server",))


def _executed(text: str) -> str:
    text = text if text.startswith("exec ") else f"exec {text}"
    return text if "$@" in text else f'{text} "$@"'


def _check_unbuffer(command: Sequence[str]) -> Merging | None:
    if not _is_installed(command[0]):
        return None
    inner = command[2:] if "-p" in command[1:2] else command[1:]
    why = f"`{_name(command[0])}` runs it in a terminal, where both streams are one"
    return Merging(why, tuple(inner) or ("llama-server",))


_SSH_VALUED: Final = frozenset("BbcDEeFIiJLlmOopQRSWw")


def _check_ssh(command: Sequence[str]) -> Merging | None:
    words, place, why = list(command), 1, ""
    while place < len(words) and words[place].startswith("-") and len(words[place]) > 1:
        letters, rest, last = _cluster(words[place][1:], _SSH_VALUED)
        value = rest or (words[place + 1] if last and place + 1 < len(words) else "")
        step = 2 if last and not rest else 1
        if "t" in letters:
            why = f"`ssh {words[place]}` asks for a terminal, where both streams are one"
            kept = letters.replace("t", "") + last + rest
            words[place : place + 1] = [f"-{kept}"] if kept else []
            step -= not kept
        elif last == "o" and re.match(r"(?i)\s*RequestTTY\s*[ =]\s*(yes|force)", value):
            why = f"`ssh -o {value}` asks for a terminal, where both streams are one"
            del words[place : place + step]
            step = 0
        place += step
    if why:
        return Merging(why, tuple(words))
    # Everything after the host is joined by blanks and given to a shell over there.
    place += 1
    return _at(words, place, len(words), _check_text(" ".join(words[place:])))


def _cluster(letters: str, valued: Iterable[str]) -> tuple[str, str, str]:
    """Take short options apart: the plain ones, a value, and the option that this belongs to."""
    for place, letter in enumerate(letters):
        if letter in valued:
            return letters[:place], letters[place + 1 :], letter
    return letters, "", ""


_PLAIN_LONG: Final = frozenset(
    "--detach --disable-content-trust --init --interactive --no-healthcheck --oom-kill-disable "
    "--privileged --publish-all --quiet --read-only --replace --rm --sig-proxy".split()
)


def _check_container(command: Sequence[str]) -> Merging | None:
    verbs = [place for place, word in enumerate(command) if word in ("run", "exec")]
    if not verbs:
        return None
    place = verbs[0] + 1
    while place < len(command) and command[place].startswith("-"):
        word = command[place]
        why = f"`{_name(command[0])} {word}` asks for a terminal, where both streams are one"
        if word in ("--tty", "--tty=true"):
            return Merging(why, (*command[:place], *command[place + 1 :]))
        if word.startswith("--"):
            place += 1 if "=" in word or word in _PLAIN_LONG else 2
            continue
        letters, rest, last = _cluster(word[1:], "acehlmpuvw")
        if "t" in letters:
            kept = letters.replace("t", "") + last + rest
            option = [f"-{kept}"] if kept else []
            return Merging(why, (*command[:place], *option, *command[place + 1 :]))
        place += 2 if last and not rest else 1
    return None


def _check_socat(command: Sequence[str]) -> Merging | None:
    for place, word in enumerate(command[1:], 1):
        if found := re.search(r"(?i),(stderr)(?=,|$)", word):
            why = f"`socat` with `{found[1]}` makes one stream of two"
            fixed = word[: found.start()] + word[found.end() :]
            return Merging(why, (*command[:place], fixed, *command[place + 1 :]))
    return None


_CHECKS: Final[Mapping[str, Callable[[Sequence[str]], Merging | None]]] = {
    **dict.fromkeys("ash bash dash fish ksh mksh sh yash zsh".split(), _check_shell),
    "cmd": _check_cmd,
    "script": _check_script,
    **dict.fromkeys(("unbuffer", "winpty"), _check_unbuffer),
    "ssh": _check_ssh,
    **dict.fromkeys(("docker", "nerdctl", "podman"), _check_container),
    "socat": _check_socat,
}
