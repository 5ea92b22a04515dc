"""PURE. How a child process ended."""

from __future__ import annotations

from typing import Final

import attrs

_HEADLINE: Final = 500  # characters


@attrs.frozen
class Exit:
    """The end of one child process.

    Attributes:
      pid: The process that it was.
      returncode: Its exit code; negative for a signal, as in `subprocess`. None if it could not be
        reaped.
      signal: The name of that signal, such as "SIGKILL". If the process was a shell that waited for
        the child, it is the child's; the code is 128 and more then.
      asked: Whether we had asked it to end.
      ready: Whether it had ever been ready.
      tail: The last lines of its log.
      survivors: Processes that it had started and that were still there after it and its group had
        been ended, as far as they are known: they have put themselves out of reach.
    """

    pid: int
    returncode: int | None
    signal: str | None = None
    asked: bool = False
    ready: bool = False
    tail: str = attrs.field(default="", repr=False)
    survivors: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.returncode is None:
            return "did not end"
        if self.signal is None:
            return f"exited with code {self.returncode}"
        suspicion = (
            " (possibly out of memory)" if self.signal == "SIGKILL" and not self.asked else ""
        )
        return f"was ended by {self.signal}{suspicion}"

    @property
    def headline(self) -> str:
        """The line of the log that most likely says why, or an empty string.

        llama.cpp marks a line of its log with a letter after the time, `E` for an error; a program
        that fails before its log is set up writes bare lines.
        """
        lines = [line for line in self.tail.splitlines() if line.strip()]
        errors = [message for line in lines if (message := _error(line))]
        # What a killed program had said last is no reason.
        last = [line.strip() for line in lines[-1:]] if self.signal is None else []
        return (errors or last or [""])[0][:_HEADLINE]


def _error(line: str) -> str | None:
    """Return the message of an error line without llama.cpp's columns, else None."""
    columns = line.split(maxsplit=2)
    if len(columns) == 3 and columns[1] == "E" and columns[0].replace(".", "").isdigit():
        return columns[2]
    return line.strip() if line.lower().startswith("error") else None
