"""From a skeleton and its tensors to the state (state_skeleton)."""

from __future__ import annotations

import argparse
import base64
import collections
import enum
import importlib
import math
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron.checkpointing.engines.codec.values import (
    ARRAY_KINDS,
    CLASSES,
    DTYPES,
    SkeletonError,
    float_of_bits,
)

# What a wrong type, a wrong value, a missing key or a value that cannot be a key of a dict raises.
_DAMAGE = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RuntimeError, struct.error)


def decode(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """See state_skeleton.join."""
    try:
        return _Decoder(tensors).decode(skeleton)
    except SkeletonError:
        raise
    except RecursionError:
        raise SkeletonError("the skeleton is nested too deeply: it is damaged") from None
    except _DAMAGE as exc:
        raise SkeletonError(f"the skeleton is damaged ({type(exc).__name__}: {exc})") from exc


class _Decoder:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def decode(self, value: Any) -> Any:
        if type(value) is list:
            return [self.decode(item) for item in value]
        if type(value) is not dict:
            return value
        tag = next(iter(value), None)
        handler = _HANDLERS.get(tag)
        if handler is None:
            raise SkeletonError(
                f"the skeleton has an entry of the unknown kind {tag!r}: it is damaged, or of a newer version"
            )
        return handler(self, value)

    def _dict(self, value: dict[str, Any]) -> dict[str, Any]:
        return {key: self.decode(item) for key, item in value["dict"].items()}

    def _ordered_dict(self, value: dict[str, Any]) -> collections.OrderedDict[Any, Any]:
        result = collections.OrderedDict(self._pairs(value["OrderedDict"]))
        if "attributes" in value:
            vars(result).update(self.decode(value["attributes"]))
        return result

    def _pairs(self, pairs: list[Any]) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(item)) for key, item in pairs]

    def _namespace(self, value: dict[str, Any]) -> argparse.Namespace:
        result = argparse.Namespace()
        vars(result).update(self._pairs(value["Namespace"]))
        return result

    def _complex(self, value: dict[str, Any]) -> complex:
        real, imaginary = value["complex"]
        return complex(self.decode(real), self.decode(imaginary))

    def _tensor(self, value: dict[str, Any]) -> torch.Tensor:
        return self._named(value["tensor"])

    def _named(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise SkeletonError(f"tensor {name!r} is missing: the checkpoint is damaged")
        return self._tensors[name]

    def _array(self, value: dict[str, Any]) -> np.ndarray[Any, Any]:
        data = bytearray(self._named(value["data"]).numpy())  # a copy: an array has its own memory
        return _array_of(data, value["ndarray"], value["shape"], value["order"])

    def _scalar(self, value: dict[str, Any]) -> Any:
        return _array_of(bytearray(_bytes(value["data"])), value["scalar"], [], "C")[()]

    def _object(self, value: dict[str, Any]) -> Any:
        if value["class"] not in CLASSES:
            raise SkeletonError(
                f"the checkpoint holds an object of class {value['class']!r}, which may not be loaded; "
                f"these may: {', '.join(CLASSES)}"
            )
        module, name = CLASSES[value["class"]]
        kind = getattr(importlib.import_module(module), name)
        state = self.decode(value["state"])
        if issubclass(kind, enum.Enum):
            return kind(state)
        result = object.__new__(kind)
        vars(result).update(state)
        return result

    def _namedtuple(self, value: dict[str, Any]) -> Any:
        module_name, _, name = value["namedtuple"].rpartition(".")
        module = sys.modules.get(module_name)
        kind: Any = None if module is None else vars(module).get(name)
        known = isinstance(kind, type) and issubclass(kind, tuple) and "_fields" in vars(kind)
        fields: tuple[str, ...] = vars(kind)["_fields"] if known else ()
        if not known or list(fields) != value["fields"]:
            raise SkeletonError(
                f"the checkpoint holds a namedtuple {value['namedtuple']!r} with the fields {value['fields']}, and no "
                f"such class is imported; import the version of module {module_name!r} that saved it before loading"
            )
        values = [self.decode(item) for item in value["values"]]
        if len(values) != len(fields):
            raise SkeletonError(
                f"the namedtuple {value['namedtuple']!r} has {len(values)} values: it is damaged"
            )
        return tuple.__new__(kind, values)  # not kind(...): a class may have a __new__ of its own


_HANDLERS: dict[Any, Callable[[_Decoder, dict[str, Any]], Any]] = {
    "dict": _Decoder._dict,
    "items": lambda self, value: dict(self._pairs(value["items"])),
    "OrderedDict": _Decoder._ordered_dict,
    "Namespace": _Decoder._namespace,
    "tuple": lambda self, value: tuple([self.decode(item) for item in value["tuple"]]),
    "Size": lambda self, value: torch.Size(value["Size"]),
    "tensor": _Decoder._tensor,
    "int": lambda self, value: int(value["int"], 16),
    "float": lambda self, value: float_of_bits(value["float"]),
    "complex": _Decoder._complex,
    "bytes": lambda self, value: _bytes(value["bytes"]),
    "bytearray": lambda self, value: bytearray(_bytes(value["bytearray"])),
    "str": lambda self, value: _bytes(value["str"]).decode("utf-32-le", "surrogatepass"),
    "dtype": lambda self, value: DTYPES[value["dtype"]],
    "device": lambda self, value: torch.device(value["device"]),
    "ndarray": _Decoder._array,
    "scalar": _Decoder._scalar,
    "class": _Decoder._object,
    "namedtuple": _Decoder._namedtuple,
}


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _array_of(data: bytearray, type_name: str, shape: list[int], order: str) -> np.ndarray[Any, Any]:
    dtype = np.dtype(type_name)
    if dtype.kind not in ARRAY_KINDS:
        raise SkeletonError(f"the checkpoint holds an array of {type_name!r}, which may not be loaded")
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise SkeletonError(
            f"an array of {type_name!r} and shape {shape} has {len(data)} bytes: it is damaged"
        )
    return np.ndarray(tuple(shape), dtype, data, order="F" if order == "F" else "C")
