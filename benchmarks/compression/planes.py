"""Byte planes of floats, and differences between two checkpoints, by planes.c, which gcc compiles at the first use."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class NoCompilerError(RuntimeError):
    """gcc is missing, or failed; the message says so."""


@functools.cache
def _library() -> ctypes.CDLL:
    source = Path(__file__).with_name("planes.c")
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "planes.so"
        command = ["gcc", "-O3", "-march=native", "-shared", "-fPIC", "-o", str(target), str(source)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise NoCompilerError("gcc is not installed; it compiles planes.c") from None
        except subprocess.CalledProcessError as error:
            raise NoCompilerError(f"{' '.join(command)}: {error.stderr}") from None
        return ctypes.CDLL(str(target))


def split(values: Bytes, width: int) -> Bytes:
    """The bytes of floats of `width` 2 or 4 as `width` planes, one after the other, that of the exponents first."""
    return _call(f"split{width}", width, values)


def join(planes: Bytes, width: int) -> Bytes:
    """What `split` was given."""
    return _call(f"join{width}", width, planes)


def subtract(values: Bytes, earlier: Bytes, width: int) -> Bytes:
    """Differences of the floats' bits as integers, small ones with zeros in the first planes of `split`."""
    return _call(f"subtract{width}", width, values, earlier)


def add(difference: Bytes, earlier: Bytes, width: int) -> Bytes:
    """What `subtract` was given first."""
    return _call(f"add{width}", width, difference, earlier)


def _call(name: str, width: int, *inputs: Bytes) -> Bytes:
    count = len(inputs[0]) // width
    assert all(len(one) == count * width and one.flags.c_contiguous for one in inputs)
    out = np.empty(count * width, np.uint8)
    pointers = [ctypes.c_void_p(one.ctypes.data) for one in inputs]
    getattr(_library(), name)(*pointers, ctypes.c_size_t(count), ctypes.c_void_p(out.ctypes.data))
    return out
