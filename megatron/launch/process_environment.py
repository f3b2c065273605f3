"""Makes /proc/PID/environ show the present environment of a process.

The kernel shows the memory in which exec(2) placed the environment. A fork inherits that memory, whatever is set later.
Monitoring, `ps e` and this project's drill find ranks by it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14  # linux/prctl.h; the latter needs no privilege, prctl(2)
_SAME_EXECUTABLE = 0xFFFFFFFF
_FIELD_AFTER_NAME = 3  # number, in proc(5), of the first field after the command name in /proc/PID/stat

_shown: mmap.mmap | None = None  # stays mapped: the kernel reads it


_ADDRESSES = [
    "start_code",
    "end_code",
    "start_data",
    "end_data",
    "start_brk",
    "brk",
    "start_stack",
    "arg_start",
    "arg_end",
    "env_start",
    "env_end",
    "auxv",
]


class _MemoryMap(ctypes.Structure):
    """struct prctl_mm_map of linux/prctl.h: where the parts of a process lie."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in _ADDRESSES),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


# Field numbers, in /proc/PID/stat (proc(5)), of the addresses that do not change.
_FIELDS = {
    "start_code": 26,
    "end_code": 27,
    "start_stack": 28,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
    "arg_start": 48,
    "arg_end": 49,
}


def publish(environment: Mapping[str, str]) -> str:
    """Let /proc/PID/environ of this process show `environment`. Returns why the kernel refused, "" if it did not."""
    global _shown
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    memory = mmap.mmap(-1, len(block), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = block
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    wanted = _MemoryMap(auxv=0, auxv_size=0, exe_fd=_SAME_EXECUTABLE)
    for name, number in _FIELDS.items():
        setattr(wanted, name, int(fields[number - _FIELD_AFTER_NAME]))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    wanted.brk = libc.sbrk(0)
    wanted.env_start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    wanted.env_end = wanted.env_start + len(block)
    arguments = (ctypes.byref(wanted), ctypes.c_ulong(ctypes.sizeof(wanted)), ctypes.c_ulong(0))
    if libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), *arguments):
        return os.strerror(ctypes.get_errno())
    _shown = memory
    return ""
