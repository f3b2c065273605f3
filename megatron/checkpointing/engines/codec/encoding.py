"""From a state to its skeleton (state_skeleton)."""

from __future__ import annotations

import argparse
import base64
import collections
import enum
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from megatron.checkpointing.engines.codec.values import ARRAY_KINDS, CLASSES, SkeletonError, float_bits

_INT64 = 1 << 63
_CLASS_NAMES = {place: name for name, place in CLASSES.items()}
_FIX = "leave it out of the state, or keep it as a tensor, a number, a string, a list or a dict"


def encode(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """See state_skeleton.split."""
    encoder = _Encoder()
    try:
        return encoder.encode(state, ""), encoder.tensors
    except RecursionError:
        raise SkeletonError(
            "the state is nested too deeply, or a container holds itself; flatten it before saving"
        ) from None


class _Encoder:
    """One method per type of value, found by the exact type: a subclass would lose what it adds."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[
            int, str
        ] = {}  # id of a tensor -> its name; `state` keeps the tensor, and so its id, alive

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is bool or value is None:
            return value
        handler = _HANDLERS.get(kind)
        return self._other(value, path) if handler is None else handler(self, value, path)

    def _int(self, value: int, path: str) -> Any:
        return value if -_INT64 <= value < _INT64 else {"int": hex(value)}

    def _float(self, value: float, path: str) -> Any:
        return value if math.isfinite(value) else {"float": float_bits(value)}

    def _str(self, value: str, path: str) -> Any:
        return value if value.isascii() or _is_unicode(value) else {"str": _base64(_utf32(value))}

    def _complex(self, value: complex, path: str) -> Any:
        return {"complex": [self._float(value.real, path), self._float(value.imag, path)]}

    def _list(self, value: list[Any], path: str) -> Any:
        return [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]

    def _tuple(self, value: tuple[Any, ...], path: str) -> Any:
        return {"tuple": [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]}

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        if all(type(key) is str and (key.isascii() or _is_unicode(key)) for key in value):
            return {"dict": {key: self.encode(item, f"{path}/{key}") for key, item in value.items()}}
        return {"items": self._items(value.items(), path)}

    def _ordered_dict(self, value: collections.OrderedDict[Any, Any], path: str) -> Any:
        encoded = {"OrderedDict": self._items(value.items(), path)}
        # Module.state_dict() hangs the versions of its modules on the dict.
        return encoded | {"attributes": self._dict(vars(value), path)} if vars(value) else encoded

    def _items(self, items: Iterable[tuple[Any, Any]], path: str) -> list[Any]:
        pairs = []
        for key, item in items:
            if isinstance(key, torch.Tensor):
                raise _refused(path, key, "a tensor cannot be found as a key", "use its name as the key")
            below = f"{path}/{key}"
            pairs.append([key if type(key) is int and abs(key) < _INT64 else self.encode(key, below),
                          self.encode(item, below)])  # fmt: skip
        return pairs

    def _namespace(self, value: argparse.Namespace, path: str) -> Any:
        return {"Namespace": self._items(vars(value).items(), path)}

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        name = self._names.get(id(value))
        if name is None:
            if value.layout is not torch.strided or value.is_quantized or value.is_nested:
                raise _refused(path, value, f"its layout is {value.layout}", "make it a dense tensor")
            name = self._names[id(value)] = self._keep(value, path)
        return {"tensor": name}

    def _keep(self, tensor: torch.Tensor, path: str) -> str:
        if tensor.dtype.is_complex:
            tensor = tensor.resolve_conj()  # else its memory holds other numbers than it does
        elif tensor.is_neg():
            tensor = tensor.resolve_neg()
        plain = path[1:] if path.isascii() else path[1:].encode(errors="backslashreplace").decode()
        name, number = plain, 1
        while name in self.tensors:  # keys 0 and "0" have the same path
            number += 1
            name = f"{plain}#{number}"
        self.tensors[name] = tensor
        return name

    def _array(self, value: np.ndarray[Any, Any], path: str) -> Any:
        dtype = _array_type(value.dtype, path, value)
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        memory = bytearray(value.tobytes(order=order))
        data = torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)
        return {"ndarray": dtype, "shape": list(value.shape), "order": order, "data": self._keep(data, path)}

    def _other(self, value: Any, path: str) -> Any:
        """Values that are told by more than their type."""
        kind = type(value)
        if isinstance(value, np.generic):
            array = np.asarray(
                value
            )  # an empty string is of type <U0 and still has 4 bytes; as an array both are 4
            return {"scalar": _array_type(array.dtype, path, value), "data": _base64(array.tobytes())}
        name = _class_name(kind)
        if name is not None:
            state = value.value if isinstance(value, enum.Enum) else dict(vars(value))
            return {"class": name, "state": self.encode(state, path)}
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return self._namedtuple(value, path)
        raise _refused(path, value, "a checkpoint has no place for it", _FIX)

    def _namedtuple(self, value: Any, path: str) -> Any:
        kind = type(value)
        module = sys.modules.get(kind.__module__)
        if module is None or vars(module).get(kind.__qualname__) is not kind:
            raise _refused(
                path, value, "its class could not be found again", "define it at the top of a module"
            )
        return {
            "namedtuple": f"{kind.__module__}.{kind.__qualname__}",
            "fields": list(kind._fields),
            "values": [self.encode(item, f"{path}/{f}") for f, item in zip(kind._fields, value, strict=True)],
        }


_HANDLERS: dict[type, Callable[[_Encoder, Any, str], Any]] = {
    int: _Encoder._int,
    float: _Encoder._float,
    str: _Encoder._str,
    complex: _Encoder._complex,
    list: _Encoder._list,
    tuple: _Encoder._tuple,
    dict: _Encoder._dict,
    collections.OrderedDict: _Encoder._ordered_dict,
    argparse.Namespace: _Encoder._namespace,
    torch.Tensor: _Encoder._tensor,
    torch.nn.Parameter: _Encoder._tensor,
    np.ndarray: _Encoder._array,
    bytes: lambda _, value, path: {"bytes": _base64(value)},
    bytearray: lambda _, value, path: {"bytearray": _base64(value)},
    torch.dtype: lambda _, value, path: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda _, value, path: {"device": str(value)},
    torch.Size: lambda _, value, path: {"Size": list(value)},
}


def _class_name(kind: type) -> str | None:
    return _CLASS_NAMES.get((kind.__module__, kind.__qualname__))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _utf32(text: str) -> bytes:
    return text.encode("utf-32-le", "surrogatepass")


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _array_type(dtype: np.dtype[Any], path: str, value: Any) -> str:
    if dtype.kind not in ARRAY_KINDS:
        raise _refused(path, value, f"its elements are {dtype}", "make it an array of numbers or strings")
    return dtype.str


def _refused(path: str, value: Any, why: str, fix: str) -> SkeletonError:
    kind = type(value)
    where = path[1:] or "the state itself"
    return SkeletonError(f"{where}: cannot save a {kind.__module__}.{kind.__qualname__}: {why}; {fix}")
