"""Split a state into typed JSON and its tensors, and join them again: how engines keep a state without pickle.

The JSON, called the skeleton, stands for a value as follows; whatever is not listed is refused.

    null, true, 5, 2.5, "text"            None, bool, int within 64 bits, finite float, str
    [...]                                 list
    {"dict": {...}}                       dict whose keys are all str
    {"tensor": "name"}                    a tensor, kept beside the skeleton under that name
    {"tuple": [...]}, {"Size": [...]}     tuple, torch.Size
    {"items": [[key, value], ...]}        dict with other keys; {"OrderedDict": ...} likewise
    {"float": hex}, {"int": hex}          float that is not finite (its IEEE 754 bits); int beyond 64 bits
    {"complex": [real, imaginary]}, {"bytes": base64}, {"bytearray": base64}
    {"str": base64}                       str that is not Unicode (lone surrogates), as UTF-32
    {"dtype": "bfloat16"}, {"device": "cpu"}
    {"ndarray": dtype, "shape", "data", "order"}    a NumPy array; its bytes are the tensor named by `data`
    {"scalar": dtype, "data": base64}     a NumPy scalar
    {"Namespace": [[name, value], ...]}   argparse.Namespace
    {"namedtuple": "module.Name", "fields": [...], "values": [...]}
    {"class": "module.Name", "state": ...}          an object or enum member of a class of the allow-list

Names of tensors are their paths in the nest, joined by "/". What torch.save keeps and this does not: requires_grad,
and that two different tensors share storage (an entry that is the very same tensor object stays the same).
"""

from __future__ import annotations

import argparse
import base64
import collections
import enum
import importlib
import math
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

_DOUBLE = struct.Struct(">d")

# Objects that a checkpoint may hold, by the name under which they are kept: module and class to use. The first four
# are DeepSpeed's; ModelType is upstream's, for which unpickling.py has a stand-in.
CLASSES = {
    f"{module}.{name}": (module, name)
    for module, name in (
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
        ("deepspeed.utils.tensor_fragment", "fragment_address"),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    )
} | {"megatron.core.enums.ModelType": ("megatron.checkpointing.engines.unpickling", "ModelType")}

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
ARRAY_KINDS = "biufcSUmM"  # kinds of NumPy types whose elements are plain bytes, without references
_INT64 = 1 << 63
_ANY_TEXT = ("utf-32-le", "surrogatepass")  # arguments of str.encode: lone surrogates, too
_CLASS_NAMES = {place: name for name, place in CLASSES.items()}
_FIX = "leave it out of the state, or keep it as a tensor, a number, a string, a list or a dict"
# What a wrong type, a wrong value, a missing key or a value that cannot be a key of a dict raises.
_DAMAGE = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RuntimeError, struct.error)


class SkeletonError(ValueError):
    """A state cannot be split, or a skeleton not joined; the message says where in the nest."""


def split(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(skeleton that json.dumps takes, tensors by name in the order of the nest).

    The tensors are those of `state`, not copies; of NumPy arrays they are copies of the bytes, of dtype uint8. The
    skeleton shares nothing with `state`, which may change from then on. Works on meta tensors.
    Raises SkeletonError, naming the path in the nest, for a value that has no place in a skeleton.
    """
    encoder = _Encoder()
    try:
        return encoder.encode(state, ""), encoder.tensors
    except RecursionError:
        raise SkeletonError(
            "the state is nested too deeply, or a container holds itself; flatten it before saving"
        ) from None


def join(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The state that was split: equal in type, order and every bit. Tensors are used as they are given.

    Runs no code of the checkpoint's choice: classes come from an allow-list, and the class of a namedtuple is only
    looked up among the modules that are already imported.
    Raises SkeletonError if the skeleton is damaged, lacks a tensor or names a class that may not be used.
    """
    try:
        return _Decoder(tensors).decode(skeleton)
    except SkeletonError:
        raise
    except RecursionError:
        raise SkeletonError("the skeleton is nested too deeply: it is damaged") from None
    except _DAMAGE as exc:
        raise SkeletonError(f"the skeleton is damaged ({type(exc).__name__}: {exc})") from exc


class _Encoder:
    """One method per type of value, found by the exact type: a subclass would lose what it adds."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        # id of a tensor -> its name; `state` keeps the tensor, and so its id, alive.
        self._names: dict[int, str] = {}

    def encode(self, value: Any, path: str) -> Any:
        handler = _ENCODERS.get(type(value))
        return self._other(value, path) if handler is None else handler(self, value, path)

    def encode_all(self, values: Iterable[Any], path: str) -> list[Any]:
        return [self.encode(item, f"{path}/{i}") for i, item in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        if all(type(key) is str and _is_unicode(key) for key in value):
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
            # An empty string is of type <U0 and still has 4 bytes; as an array both are 4.
            array = np.asarray(value)
            return {"scalar": _array_type(array.dtype, path, value), "data": _base64(array.tobytes())}
        if (kind.__module__, kind.__qualname__) in _CLASS_NAMES:
            state = value.value if isinstance(value, enum.Enum) else dict(vars(value))
            name = _CLASS_NAMES[kind.__module__, kind.__qualname__]
            return {"class": name, "state": self.encode(state, path)}
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return self._namedtuple(value, path)
        raise _refused(path, value, "a checkpoint has no place for it", _FIX)

    def _namedtuple(self, value: Any, path: str) -> Any:
        kind = type(value)
        module = sys.modules.get(kind.__module__)
        if module is None or vars(module).get(kind.__qualname__) is not kind:
            why = "its class could not be found again"
            raise _refused(path, value, why, "define it at the top of a module")
        return {
            "namedtuple": f"{kind.__module__}.{kind.__qualname__}",
            "fields": list(kind._fields),
            "values": [self.encode(item, f"{path}/{f}") for f, item in zip(kind._fields, value, strict=True)],
        }


_ENCODERS: dict[type, Callable[[_Encoder, Any, str], Any]] = {
    type(None): lambda _, value, path: value,
    bool: lambda _, value, path: value,
    int: lambda _, value, path: value if -_INT64 <= value < _INT64 else {"int": hex(value)},
    float: lambda _, value, path: _encode_float(value),
    str: lambda _, value, path: value if _is_unicode(value) else {"str": _base64(value.encode(*_ANY_TEXT))},
    complex: lambda _, value, path: {"complex": [_encode_float(value.real), _encode_float(value.imag)]},
    list: lambda self, value, path: self.encode_all(value, path),
    tuple: lambda self, value, path: {"tuple": self.encode_all(value, path)},
    dict: _Encoder._dict,
    collections.OrderedDict: _Encoder._ordered_dict,
    argparse.Namespace: lambda self, value, path: {"Namespace": self._items(vars(value).items(), path)},
    torch.Tensor: _Encoder._tensor,
    torch.nn.Parameter: _Encoder._tensor,
    np.ndarray: _Encoder._array,
    bytes: lambda _, value, path: {"bytes": _base64(value)},
    bytearray: lambda _, value, path: {"bytearray": _base64(value)},
    torch.dtype: lambda _, value, path: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda _, value, path: {"device": str(value)},
    torch.Size: lambda _, value, path: {"Size": list(value)},
}


def _encode_float(value: float) -> Any:
    """A float that is not finite as its IEEE 754 bits, 16 hexadecimal digits, which keep the payload of a NaN."""
    return value if math.isfinite(value) else {"float": _DOUBLE.pack(value).hex()}


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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


class _Decoder:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def decode(self, value: Any) -> Any:
        if type(value) is list:
            return [self.decode(item) for item in value]
        if type(value) is not dict:
            return value
        tag = next(iter(value), None)
        handler = _DECODERS.get(tag)
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

    def _named(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise SkeletonError(f"tensor {name!r} is missing: the checkpoint is damaged")
        return self._tensors[name]

    def _array(self, value: dict[str, Any]) -> np.ndarray[Any, Any]:
        data = bytearray(self._named(value["data"]).numpy())  # a copy: an array has its own memory
        return _array_of(data, value["ndarray"], value["shape"], value["order"])

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
            raise SkeletonError(f"the namedtuple {value['namedtuple']!r} has {len(values)} values: it is damaged")
        return tuple.__new__(kind, values)  # not kind(...): a class may have a __new__ of its own


_DECODERS: dict[Any, Callable[[_Decoder, dict[str, Any]], Any]] = {
    "dict": _Decoder._dict,
    "items": lambda self, value: dict(self._pairs(value["items"])),
    "OrderedDict": _Decoder._ordered_dict,
    "Namespace": _Decoder._namespace,
    "tuple": lambda self, value: tuple([self.decode(item) for item in value["tuple"]]),
    "Size": lambda self, value: torch.Size(value["Size"]),
    "tensor": lambda self, value: self._named(value["tensor"]),
    "int": lambda self, value: int(value["int"], 16),
    "float": lambda self, value: _DOUBLE.unpack(bytes.fromhex(value["float"]))[0],
    "complex": _Decoder._complex,
    "bytes": lambda self, value: _bytes(value["bytes"]),
    "bytearray": lambda self, value: bytearray(_bytes(value["bytearray"])),
    "str": lambda self, value: _bytes(value["str"]).decode(*_ANY_TEXT),
    "dtype": lambda self, value: DTYPES[value["dtype"]],
    "device": lambda self, value: torch.device(value["device"]),
    "ndarray": _Decoder._array,
    "scalar": lambda self, value: _array_of(bytearray(_bytes(value["data"])), value["scalar"], [], "C")[()],
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
        raise SkeletonError(f"an array of {type_name!r} and shape {shape} has {len(data)} bytes: it is damaged")
    return np.ndarray(tuple(shape), dtype, data, order="F" if order == "F" else "C")
