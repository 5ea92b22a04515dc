"""The CPU time of a process on macOS: libproc tells. Type-checked, not run."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Final

assert sys.platform == "darwin"

_RUSAGE_INFO_V0: Final = 0


class _RusageInfo(ctypes.Structure):
    """`struct rusage_info_v0` of sys/resource.h; times are in ticks of the Mach clock."""

    _fields_ = [  # type: ignore[mutable-override]  # as ctypes wants it
        ("ri_uuid", ctypes.c_uint8 * 16),
        ("ri_user_time", ctypes.c_uint64),
        ("ri_system_time", ctypes.c_uint64),
        ("ri_others", ctypes.c_uint64 * 8),
    ]


class _Timebase(ctypes.Structure):
    """`struct mach_timebase_info`: by what to multiply and divide ticks for nanoseconds."""

    _fields_ = [("numer", ctypes.c_uint32), ("denom", ctypes.c_uint32)]  # type: ignore[mutable-override]


def cpu_time(pid: int) -> float | None:
    """Return the CPU seconds of one process, or None if it has ended."""
    info = _RusageInfo()
    if _library().proc_pid_rusage(pid, _RUSAGE_INFO_V0, ctypes.byref(info)) != 0:
        return None
    return float(info.ri_user_time + info.ri_system_time) * _seconds_per_tick()


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("/usr/lib/libSystem.B.dylib")  # libproc is a part of it
    library.proc_pid_rusage.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    return library


@functools.cache
def _seconds_per_tick() -> float:
    timebase = _Timebase()
    _library().mach_timebase_info(ctypes.byref(timebase))
    return float(timebase.numer / timebase.denom / 1e9)
