"""States as checkpoints hold them, and the comparison that a round trip must stand up to."""

from __future__ import annotations

import argparse
import collections
import struct
from typing import Any, NamedTuple

import numpy as np
import torch

# Every type that training has used here, and those that it may come to.
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


class Point(NamedTuple):
    x: Any
    y: Any


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bits (0 and 1 for bool) as a tensor of `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape)) * size
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of all kinds of memory: odd, empty, 0-dim, not contiguous, views of one storage, the same one twice."""
    base = random_tensor(torch.float32, 6, 4)
    shared = random_tensor(torch.bfloat16, 9)
    return {
        **{f"{dtype}".removeprefix("torch."): random_tensor(dtype, 3, 5) for dtype in DTYPES},
        "odd": random_tensor(torch.bfloat16, 7),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "empty_float": torch.empty(0),
        "scalar": torch.tensor(2.5),
        "scalar_bf16": torch.tensor(2.5, dtype=torch.bfloat16),
        "transposed": base.t(),
        "every_second": base[:, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conjugate": torch.view_as_complex(random_tensor(torch.float32, 4, 2)).conj(),
        "negative": torch.ones(3, dtype=torch.complex64).conj().imag,
        "view": base[1],
        "same": shared,
        "same_again": shared,
    }


def values() -> dict[Any, Any]:
    """What is no tensor."""
    return {
        "none": None, "true": True, "false": False, "int": -5, "long": 1 << 200, "negative_long": -(1 << 64),
        "limits": [(1 << 63) - 1, -(1 << 63), 1 << 63],
        "float": 0.1, "negative_zero": -0.0, "infinite": [float("inf"), float("-inf")], "nan": float("nan"),
        "odd_nan": struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0], "tiny": 5e-324,
        "complex": complex(float("nan"), -0.0),
        "str": "text", "empty": "", "unicode": "naïve \U0001f600 \x00", "surrogates": "\ud83d\ude00 \udc80",
        "bytes": b"\x00\xff", "bytearray": bytearray(b"ab"), "no_bytes": b"",
        "containers": [[], (), {}, collections.OrderedDict(), (1, [2, (3,)])],
        "order": {"z": 1, "a": 2, "m": 3},
        "ordered": collections.OrderedDict([("z", 1), (5, 2), ("a", {"k": ()})]),
        "keys": {0: "int", "0": "str", (1, "a"): "tuple", None: "none", True: "bool", 2.5: "float", b"k": "bytes"},
        "tags": {"dict": 1, "tensor": "x", "class": [], "tuple": {"items": 2}},
        "dtype": torch.bfloat16, "size": torch.Size([2, 3]), "device": torch.device("cpu"),
        "namespace": argparse.Namespace(lr=1e-3, sizes=(1, 2), inner=argparse.Namespace(empty=None)),
        "point": Point(1, Point("a", [None])),
        "arrays": [
            np.arange(5, dtype=np.uint32), np.zeros((0, 2)), np.array(1.5), np.array(["ab", "c"]),
            np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(8)[::2], np.array([1, 2], dtype=">i4"),
        ],
        "scalars": [
            np.float32(0.1), np.float64("nan"), np.int8(-1), np.bool_(True), np.str_("a"), np.str_(""),
            np.complex64(1j), np.datetime64("2020-01-01", "ns"),
        ],
    }  # fmt: skip


def nest() -> dict[str, Any]:
    """All of it, with tensors at several depths and under keys of several types."""
    module = collections.OrderedDict((f"layer.{i}", random_tensor(torch.bfloat16, 5, 3, seed=i)) for i in range(3))
    steps = {0: {"step": torch.tensor(5.0), "exp_avg": random_tensor(torch.float32, 11)}, "0": torch.ones(2)}
    point = Point(torch.zeros(2), (torch.ones(1), 3))
    return {"tensors": tensors(), "values": values(), "module": module, "state": steps, "points": [point]}


def identical(one: Any, other: Any) -> bool:
    """Equal in type, order, structure and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _bits(one) == _bits(other)
    if isinstance(one, dict):
        return identical(list(one), list(other)) and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return identical([one.real, one.imag], [other.real, other.imag])
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if hasattr(one, "__dict__"):
        return identical(vars(one), vars(other)) if not isinstance(one, type) else one is other
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()
