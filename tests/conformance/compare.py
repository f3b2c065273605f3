"""Strict comparison of two states: type, order and every bit."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in row-major order, as they lie in memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def differences(found: Any, expected: Any, where: str = "state") -> list[str]:
    """Where `found` is not what `expected` is: empty if it is, in types, order, dtypes, shapes and bits.

    A Parameter counts as the tensor that it is. Strides and shared storage are not compared.
    """
    if isinstance(expected, torch.Tensor):
        return _tensor_differences(found, expected, where)
    if type(found) is not type(expected):
        return [f"{where}: {type(found).__name__} instead of {type(expected).__name__}"]
    if isinstance(expected, np.ndarray):
        described = [(array.dtype, array.shape, array.tobytes()) for array in (found, expected)]
        return [] if described[0] == described[1] else [f"{where}: array {found!r} instead of {expected!r}"]
    if isinstance(expected, Mapping):
        if [(type(key), key) for key in found] != [(type(key), key) for key in expected]:
            return [f"{where}: keys {list(found)} instead of {list(expected)}"]
        return [line for key in expected for line in differences(found[key], expected[key], f"{where}/{key}")]
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return [f"{where}: {len(found)} items instead of {len(expected)}"]
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{where}/{index}")]
    if isinstance(expected, argparse.Namespace) or type(expected).__eq__ is object.__eq__:
        return differences(vars(found), vars(expected), where) if hasattr(expected, "__dict__") else []
    same = _same_float(found, expected) if isinstance(expected, float) else found == expected
    return [] if same else [f"{where}: {found!r} instead of {expected!r}"]


def _tensor_differences(found: Any, expected: torch.Tensor, where: str) -> list[str]:
    if type(found) is not torch.Tensor:
        return [f"{where}: {type(found).__name__} instead of a tensor"]
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return [f"{where}: {found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"]
    return [] if bits(found) == bits(expected) else [f"{where}: elements differ"]


def _same_float(found: float, expected: float) -> bool:
    if math.isnan(expected):
        return math.isnan(found)
    return found == expected and math.copysign(1.0, found) == math.copysign(1.0, expected)
