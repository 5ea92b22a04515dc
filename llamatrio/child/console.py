"""Whether our own stderr, where log lines usually end, may have colours."""

from __future__ import annotations

import os
import sys
from typing import Final, Literal, TypeAlias

from llamatrio.errors import SpecificationError
from llamatrio.wire.ansi import may_use_colors

LogColors: TypeAlias = bool | Literal["auto"]
"""Whether a child's log keeps its colours; "auto" for what our stderr and the environment say."""

_STDERR: Final = 2


def check_log_colors(choice: object) -> None:
    """Refuse what is no `LogColors`.

    Raises:
      SpecificationError: says what is one.
    """
    if not isinstance(choice, bool) and choice != "auto":
        raise SpecificationError(f'log_colors must be True, False or "auto", not {choice!r}')


def wants_colors(choice: LogColors) -> bool:
    """Say whether there are to be colours."""
    if choice != "auto":
        return choice
    return may_use_colors(tty=_is_terminal(), environ=os.environ, renders=_renders_colors())


def _is_terminal() -> bool:
    try:
        return os.isatty(_STDERR)
    except OSError:  # Windows, where it is closed
        return False


if sys.platform == "win32":
    import ctypes

    _STD_ERROR_HANDLE: Final = -12
    _ENABLE_VIRTUAL_TERMINAL_PROCESSING: Final = 4

    def _renders_colors() -> bool:
        """Say whether the console was told to render escape sequences; it is not told here."""
        kernel32 = ctypes.WinDLL("kernel32")
        kernel32.GetStdHandle.restype = ctypes.c_void_p
        kernel32.GetConsoleMode.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_ulong)]
        mode = ctypes.c_ulong()
        handle = kernel32.GetStdHandle(_STD_ERROR_HANDLE)
        if not kernel32.GetConsoleMode(handle, ctypes.byref(mode)):
            return False  # no console
        return bool(mode.value & _ENABLE_VIRTUAL_TERMINAL_PROCESSING)

else:

    def _renders_colors() -> bool:
        """Say yes: a terminal that cannot says so in TERM."""
        return True
