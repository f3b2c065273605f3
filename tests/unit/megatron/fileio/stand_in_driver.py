"""The stand-in for the CUDA driver's library (libcuda_stand_in.c), compiled."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("libcuda_stand_in.c")


def build(directory: Path) -> Path:
    """The library, below `directory`."""
    built = directory / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, _SOURCE], check=True)
    return built


def opened(library: Path) -> ctypes.CDLL:
    """The library with `locked_bytes()` and `is_one_piece(address, bytes)`, which tell what is pinned."""
    found = ctypes.CDLL(str(library))
    found.locked_bytes.restype = ctypes.c_size_t
    found.is_one_piece.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return found
