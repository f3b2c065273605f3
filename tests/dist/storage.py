"""Storage that really refuses: a disk that is full, a directory that even root may not write to."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2
_PR_CAPBSET_DROP = 24  # linux/prctl.h


@contextmanager
def small_disk(at: Path, num_bytes: int) -> Iterator[bool]:
    """Mount a tmpfs of `num_bytes` at the new directory `at`; False where this process may not mount."""
    with _mounted(at, "tmpfs", "-o", f"size={num_bytes}") as mounted:
        yield mounted


@contextmanager
def disk_without_direct_io(at: Path) -> Iterator[bool]:
    """Mount a file system that refuses O_DIRECT (ramfs) at the new directory `at`; False where we may not mount."""
    with _mounted(at, "ramfs") as mounted:
        yield mounted


@contextmanager
def _mounted(at: Path, kind: str, *options: str) -> Iterator[bool]:
    at.mkdir()
    command = ["mount", "-t", kind, *options, "none", str(at)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(at)], check=True)


def fill(ballast: Path, room: int = 0) -> None:
    """Write into `ballast` until its disk is full but for `room` bytes."""
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
        file.truncate(file.tell() - room)


def drop_root_rights() -> None:
    """Let this process and those it starts be refused like anyone else, root or not.

    Clears CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, which let root pass over permissions (capset(2)).
    """
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    _check(libc.capget(header, data))
    words = list(struct.unpack("=6I", data.raw))
    for i in (0, 1, 2):  # effective, permitted, inheritable
        words[i] &= ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    _check(libc.capset(header, struct.pack("=6I", *words)))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
