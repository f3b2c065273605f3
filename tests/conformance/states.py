"""States to save: those that training has, one by one and by name, and those that nobody thought of."""

from __future__ import annotations

import argparse
import collections
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

# What training keeps in a checkpoint: weights, master weights, moments, counters, masks, random state, fp8 weights.
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
# Engines may refuse these, by name, when saving; they may not change them.
RARE_DTYPES = (
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)


def tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bits of every kind (NaNs too), the same for the same arguments; 0 and 1 for bool."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, count, dtype=np.uint8)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw.tobytes()), dtype=dtype).reshape(shape)


def of_every_dtype(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {str(dtype): tensor(dtype, *shape, seed=i) for i, dtype in enumerate(DTYPES)}


def _shared_views() -> dict[str, Any]:
    base = tensor(torch.float32, 64)
    return {
        "base": base,
        "same": base,
        "head": base[:10],
        "overlapping": base[5:25],
        "matrix": base.view(8, 8),
        "transposed": base.view(8, 8).t(),
        "as_int": base.view(torch.int32)[3:7],
    }


def _layouts() -> dict[str, Any]:
    matrix = tensor(torch.bfloat16, 6, 7)
    return {
        "transposed": matrix.t(),
        "strided": matrix[::2, 1::3],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "offset": tensor(torch.float32, 33)[1:],
        "permuted": tensor(torch.float16, 2, 3, 5).permute(2, 0, 1),
        "channels_last": tensor(torch.float32, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.arange(5.0)),
        "grad": torch.arange(3.0, requires_grad=True),
    }


def _containers() -> dict[str, Any]:
    return {
        "list": [1, [2, [3, []]], {}],
        "tuple": (1, (2, ()), [(3,)]),
        "ordered": collections.OrderedDict([("z", 1), ("a", torch.ones(2)), (3, None)]),
        "int keys": {0: "zero", 2: {-1: torch.zeros(1)}, 10: "ten", 1: "one"},
        "int and str keys": {1: "int", "1": "str", "a": 2},
        "awkward keys": {"": 0, "a/b": 1, "a": {"b": 2}, "a|b": 3, "a.b": 4, "%2F": 5, "..": 6, "é\n\0": torch.ones(1)},
        "reserved keys": {"__metadata__": 1, "dtype": "F32", "shape": [1], "data_offsets": (0, 1), "type": "dict"},
        "empty": [{}, [], (), collections.OrderedDict()],
        "deep": _nested(40),
    }


def _nested(depth: int) -> Any:
    state: Any = torch.arange(3)
    for level in range(depth):
        state = [{"level": level, "below": state}, (state,)][level % 2]
    return state


def _values() -> dict[str, Any]:
    return {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 1, 2**31, 2**53 + 1, -(2**63), 2**64, 2**200, -(10**40)],
        "floats": [0.0, -0.0, 0.1, 1e-310, 1.7976931348623157e308, float("nan"), float("inf"), float("-inf")],
        "strings": ["", "plain", "ünïcödé \U0001f600", "line\nend\r\0", "x" * 100_000, '"\\', "nan", "1"],
        "bytes": [b"", b"\x00\xff\x80\x02}", bytes(range(256)) * 300],
        "sizes": [torch.Size([2, 3]), torch.Size([])],
    }


def _arrays() -> dict[str, Any]:
    return {
        "uint32": np.arange(624, dtype=np.uint32),
        "int64": np.array([[1, -2], [3, 4]]),
        "float64": np.array([0.1, np.nan, -np.inf]),
        "float32": np.linspace(0, 1, 5, dtype=np.float32),
        "uint8": np.frombuffer(b"abc", dtype=np.uint8),
        "bool": np.array([True, False]),
        "0-dim": np.array(3.5),
        "empty": np.zeros((0, 4), dtype=np.float64),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "strided": np.arange(10)[::3],
    }


def _random_states() -> dict[str, Any]:
    return {
        "python": random.Random(3).getstate(),
        "numpy": np.random.RandomState(4).get_state(),
        "torch": torch.Generator().manual_seed(5).get_state(),
        "tracker": {"model-parallel-rng": torch.Generator().manual_seed(6).get_state()},
    }


def _deepspeed_classes() -> dict[str, Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return {
        "scaler": DynamicLossScaler(2.0**16, 1000, 1.0, 2, False),
        "fixed scaler": LossScaler(1),
        "stage": ZeroStageEnum(1),
        "mapping": [collections.OrderedDict(weight=fragment_address(numel=12, start=7))],
        "args": argparse.Namespace(lr=1e-3, layers=[1, 2], data_path=None, nested=argparse.Namespace(x=(1, 2))),
    }


# Name -> builder. Every engine brings each of them back with its types, its order and all its bits.
STATES: dict[str, Callable[[], Any]] = {
    "every dtype": lambda: of_every_dtype((3, 5)),
    "every dtype, odd length": lambda: of_every_dtype((7,)),
    "every dtype, 0-dim": lambda: of_every_dtype(()),
    "every dtype, empty": lambda: of_every_dtype((0, 3)),
    "every dtype, one element": lambda: of_every_dtype((1,)),
    "odd bf16, larger than a block": lambda: {"a": tensor(torch.bfloat16, 3_000_001), "b": torch.ones(3)},
    "views of one storage": _shared_views,
    "strides and offsets": _layouts,
    "containers": _containers,
    "plain values": _values,
    "numpy arrays": _arrays,
    "random states": _random_states,
    "classes of DeepSpeed's state": _deepspeed_classes,
    "many small tensors": lambda: {f"layer.{i}.weight": tensor(torch.bfloat16, i % 9, seed=i) for i in range(400)},
    "a tensor alone": lambda: tensor(torch.float32, 11),
    "no tensor": lambda: {"step": 3},
    "nothing": dict,
}

# Name -> builder. An engine brings these back whole or refuses them when saving.
RARE_STATES: dict[str, Callable[[], Any]] = {
    **{str(dtype): lambda dtype=dtype: {"a": tensor(dtype, 5, seed=9)} for dtype in RARE_DTYPES},
    "torch dtype": lambda: {"a": torch.bfloat16},
    "tuple keys": lambda: {(0, 1): torch.ones(2), (1, "a"): 2},
    "bool, None and float keys": lambda: {True: 1, None: 2, 0.5: 3},
    "set": lambda: {"a": {1, 2, 3}},
    "complex number": lambda: {"a": 1 + 2j},
    "numpy scalar": lambda: {"a": np.float64(0.1), "b": np.int32(3)},
    "numpy strings": lambda: {"a": np.array(["x", "yz"])},
    "bytearray": lambda: {"a": bytearray(b"abc")},
    "range": lambda: {"a": range(3)},
    "class of its own": lambda: {"a": Unknown()},
    "function": lambda: {"a": _nested},
    "sparse tensor": lambda: {"a": torch.eye(3).to_sparse()},
    "meta tensor": lambda: {"a": torch.empty(3, device="meta")},
}


class Unknown:
    """A class that no engine can know."""

    def __init__(self) -> None:
        self.value = 3


def nests() -> st.SearchStrategy[Any]:
    """Nests of containers, tensors and values; a few dozen items at most."""
    keys = st.one_of(st.text(max_size=6), st.integers(-5, 300))
    dtypes = st.sampled_from(DTYPES)
    shapes = st.lists(st.integers(0, 5), max_size=3)
    tensors = st.builds(_generated, dtypes, shapes, st.integers(0, 9), st.booleans())
    integers = st.integers(-(2**70), 2**70)
    scalars = st.one_of(st.none(), st.booleans(), integers, st.floats(), st.text(max_size=8), st.binary(max_size=8))
    arrays = st.builds(lambda n: np.arange(n, dtype=np.uint32), st.integers(0, 4))
    leaves = st.one_of(tensors, scalars, arrays)

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        pairs = st.lists(st.tuples(keys, inner), max_size=4)
        return st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=3).map(tuple),
            pairs.map(dict),
            pairs.map(collections.OrderedDict),
            st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), inner, max_size=3).map(
                lambda attributes: argparse.Namespace(**attributes)
            ),
        )

    return st.dictionaries(keys, st.recursive(leaves, grow, max_leaves=12), max_size=5)


def _generated(dtype: torch.dtype, shape: list[int], seed: int, transposed: bool) -> torch.Tensor:
    made = tensor(dtype, *shape, seed=seed)
    return made.transpose(0, -1) if transposed and made.ndim > 1 else made
