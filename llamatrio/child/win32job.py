"""A job: processes that end when its owner does, however that ends. Type-checked, not run."""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import wintypes
from typing import Final

assert sys.platform == "win32"

# winnt.h
_EXTENDED_LIMIT_INFORMATION: Final = 9
_KILL_ON_JOB_CLOSE: Final = 0x2000
_DIE_ON_UNHANDLED_EXCEPTION: Final = 0x400  # no dialog, and no report that holds the memory
_TERMINATE: Final = 0x0001
_SET_QUOTA: Final = 0x0100


class _Limits(ctypes.Structure):
    """`JOBOBJECT_EXTENDED_LIMIT_INFORMATION`, with its parts spread out."""

    _fields_ = [  # type: ignore[mutable-override]  # as ctypes wants it
        ("PerProcessUserTimeLimit", wintypes.LARGE_INTEGER),
        ("PerJobUserTimeLimit", wintypes.LARGE_INTEGER),
        ("LimitFlags", wintypes.DWORD),
        ("MinimumWorkingSetSize", ctypes.c_size_t),
        ("MaximumWorkingSetSize", ctypes.c_size_t),
        ("ActiveProcessLimit", wintypes.DWORD),
        ("Affinity", ctypes.c_size_t),
        ("PriorityClass", wintypes.DWORD),
        ("SchedulingClass", wintypes.DWORD),
        ("IoInfo", ctypes.c_uint64 * 6),
        ("ProcessMemoryLimit", ctypes.c_size_t),
        ("JobMemoryLimit", ctypes.c_size_t),
        ("PeakProcessMemoryUsed", ctypes.c_size_t),
        ("PeakJobMemoryUsed", ctypes.c_size_t),
    ]


class Job:
    """A process and all that it starts. They end with `close`, or with the process that made it.

    Args:
      pid: The process. What it has started before this is not part of the job.

    Raises:
      OSError: if there can be no job, or that process cannot be part of it.
    """

    def __init__(self, pid: int) -> None:
        kernel32 = _kernel32()
        self._handle: int | None = _checked(kernel32.CreateJobObjectW(None, None))
        limits = _Limits()
        limits.LimitFlags = _KILL_ON_JOB_CLOSE | _DIE_ON_UNHANDLED_EXCEPTION
        try:
            _checked(
                kernel32.SetInformationJobObject(
                    self._handle,
                    _EXTENDED_LIMIT_INFORMATION,
                    ctypes.byref(limits),
                    ctypes.sizeof(limits),
                )
            )
            self._add(pid)
        except OSError:
            self.close()
            raise

    def _add(self, pid: int) -> None:
        kernel32 = _kernel32()
        process = _checked(kernel32.OpenProcess(_SET_QUOTA | _TERMINATE, False, pid))
        try:
            _checked(kernel32.AssignProcessToJobObject(self._handle, process))
        finally:
            kernel32.CloseHandle(process)

    def close(self) -> None:
        """End all of its processes that are left."""
        if self._handle is not None:
            _kernel32().CloseHandle(self._handle)
            self._handle = None


def _checked(result: int) -> int:
    if not result:
        raise ctypes.WinError(ctypes.get_last_error())
    return result


@functools.cache
def _kernel32() -> ctypes.WinDLL:
    library = ctypes.WinDLL("kernel32", use_last_error=True)
    library.CreateJobObjectW.argtypes = (wintypes.LPVOID, wintypes.LPCWSTR)
    library.CreateJobObjectW.restype = wintypes.HANDLE
    library.SetInformationJobObject.argtypes = (
        wintypes.HANDLE,
        ctypes.c_int,
        wintypes.LPVOID,
        wintypes.DWORD,
    )
    library.OpenProcess.argtypes = (wintypes.DWORD, wintypes.BOOL, wintypes.DWORD)
    library.OpenProcess.restype = wintypes.HANDLE
    library.AssignProcessToJobObject.argtypes = (wintypes.HANDLE, wintypes.HANDLE)
    library.CloseHandle.argtypes = (wintypes.HANDLE,)
    return library
