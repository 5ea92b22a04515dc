"""The CPU time of a process on Windows: its kernel tells. Type-checked, not run."""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import wintypes
from typing import Final

assert sys.platform == "win32"

_QUERY_LIMITED_INFORMATION: Final = 0x1000
_UNITS: Final = 10_000_000  # of a FILETIME, in a second


def cpu_time(pid: int) -> float | None:
    """Return the CPU seconds of one process, or None if it has ended."""
    kernel32 = _kernel32()
    process = kernel32.OpenProcess(_QUERY_LIMITED_INFORMATION, False, pid)
    if not process:
        return None
    created, ended, kernel, user = (wintypes.FILETIME() for _ in range(4))
    times = map(ctypes.byref, (created, ended, kernel, user))
    try:
        known = kernel32.GetProcessTimes(process, *times)
    finally:
        kernel32.CloseHandle(process)
    return (_units(kernel) + _units(user)) / _UNITS if known else None


@functools.cache
def _kernel32() -> ctypes.WinDLL:
    library = ctypes.WinDLL("kernel32")
    library.OpenProcess.argtypes = (wintypes.DWORD, wintypes.BOOL, wintypes.DWORD)
    library.OpenProcess.restype = wintypes.HANDLE
    times = ctypes.POINTER(wintypes.FILETIME)
    library.GetProcessTimes.argtypes = (wintypes.HANDLE, times, times, times, times)
    library.CloseHandle.argtypes = (wintypes.HANDLE,)
    return library


def _units(time: wintypes.FILETIME) -> int:
    return int(time.dwHighDateTime) << 32 | int(time.dwLowDateTime)
