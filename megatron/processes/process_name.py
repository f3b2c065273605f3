"""The name of a process, as ps shows it: prctl(2)."""

from __future__ import annotations

import ctypes
import sys

_PR_SET_NAME = 15  # linux/prctl.h


def name_process(name: str) -> None:
    """Have ps show this process by `name`, at most 15 bytes. Call it in the main thread. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
