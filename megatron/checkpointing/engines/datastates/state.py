"""A state as the DataStates library is given it, and back; and how its pickles are read without running them.

The library turns every OrderedDict into a dict, joins keys by "|" without regard to names that then collide, leaves
tensors in tuples to pickle, and loses a file that has an empty tensor. So it is given, instead of the state,

    {"tensors": [tensor, ...], "megatron_state": bytes}

where the bytes are the pickled state with each tensor replaced by its number in the list, or, for an empty one, by its
type and shape (pickle's persistent ids). States that others gave to the library are put together as it does.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines import unpickling
from megatron.checkpointing.engines.datastates.format import TENSOR_PREFIX
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.unpickling import PlainUnpickler

_STATE = "megatron_state"
_TENSORS = "tensors"


@dataclass(frozen=True)
class Apart:
    """A state taken apart. `tensors` are the live ones, none of them empty, each once."""

    pickled: bytes
    tensors: list[torch.Tensor]

    def for_library(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """What the library is given to save, with `tensors` in place of the live ones."""
        return {_TENSORS: list(tensors), _STATE: self.pickled}


def key_of(index: int) -> str:
    """Key of the tensor with that number in the header of the file."""
    return f"{_TENSORS}|{index}"


def take_apart(state: Any) -> Apart:
    """Pickle all of `state` but its tensors. Raises pickle.PicklingError for a tensor that is not dense."""
    buffer = io.BytesIO()
    pickler = _TensorsApart(buffer)
    pickler.dump(state)
    return Apart(buffer.getvalue(), pickler.tensors)


class _TensorsApart(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        if obj.layout is not torch.strided or obj.is_quantized:
            raise pickle.PicklingError(f"a tensor of layout {obj.layout} cannot be saved with engine datastates")
        if obj.numel() == 0:
            return "empty", str(obj.dtype), tuple(obj.shape)
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return "tensor", self._numbers[id(obj)]


def put_together(skeleton: bytes, tensors: Mapping[str, torch.Tensor], path: Path) -> Any:
    """The state of a file from its pickle and its tensors; no class is used that is not on the allow-list.

    Raises CheckpointDamagedError naming `path` and the class, or what else is wrong with the pickle.
    """
    try:
        state = _KnownClasses(skeleton, {}).load()
        if isinstance(state, dict) and state.keys() == {_STATE, _TENSORS}:
            return _KnownClasses(state[_STATE], tensors).load()
        return _replace(state, dict(tensors))
    except _UnknownClassError as exc:
        raise CheckpointDamagedError(f"{path}: {exc}; nothing of it was run") from exc
    except Exception as exc:  # a damaged pickle can raise anything, MemoryError for one
        raise CheckpointDamagedError(
            f"{path}: its pickle is damaged or does not fit its tensors ({type(exc).__name__}: {exc})"
        ) from exc


def pickled_of(skeleton: bytes) -> bytes | None:
    """`Apart.pickled` of a file's pickle; None if that is not whole or not one of ours."""
    try:
        state = _KnownClasses(skeleton, {}).load()
    except Exception:  # a damaged pickle can make the unpickler raise anything
        return None
    return state.get(_STATE) if isinstance(state, dict) else None


def _replace(state: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(state, str) and state.startswith(TENSOR_PREFIX):
        return tensors.get(state.removeprefix(TENSOR_PREFIX), state)
    if type(state) is list:
        return [_replace(item, tensors) for item in state]
    if type(state) is dict:
        return {key: _replace(value, tensors) for key, value in state.items()}
    return state


class _UnknownClassError(pickle.UnpicklingError):
    pass


class _KnownClasses(PlainUnpickler):
    def __init__(self, pickled: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(pickled)
        self._tensors = tensors

    def find_class(self, module: str, name: str, /) -> Any:
        found = _allowed().get(f"{module}.{name}")
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if found is None:
            raise _UnknownClassError(f"holds {module}.{name}, which is not on the allow-list")
        return self.allowed(found)

    def persistent_load(self, pid: Any, /) -> Any:
        if pid[0] == "tensor":
            return self._tensors[key_of(pid[1])]
        dtype = getattr(torch, pid[1].removeprefix("torch."))
        empty = torch.empty(pid[2], dtype=dtype)
        if empty.numel():
            raise pickle.UnpicklingError(f"an empty tensor of shape {pid[2]}")
        return empty


@functools.cache
def _allowed() -> dict[str, Any]:
    """Full name -> class or function. What torch.load may use here, and what pickle needs beyond torch's own rules."""
    import numpy as np
    from torch._utils import _rebuild_tensor_v2

    with unpickling.known_classes():
        entries: list[Any] = list(torch.serialization.get_safe_globals())
    allowed = {}
    for entry in entries:
        known, name = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
        allowed[name] = known
    for plain in (complex, set, frozenset, bytearray, slice, range):
        allowed[f"builtins.{plain.__name__}"] = plain
    from_buffer, scalar = np.zeros(1).__reduce_ex__(5)[0], np.float32(0).__reduce__()[0]
    for package in ("numpy.core", "numpy._core"):  # NumPy 1 and 2
        allowed[f"{package}.numeric._frombuffer"] = from_buffer
        allowed[f"{package}.multiarray.scalar"] = scalar
    allowed["torch.device"] = torch.device
    # Tensors that the library did not see, in tuples or objects, are pickled by torch.
    allowed["torch._utils._rebuild_tensor_v2"] = _rebuild_tensor_v2
    allowed["torch.storage._load_from_bytes"] = _load_storage
    return allowed


def _load_storage(content: bytes) -> Any:
    """torch.storage._load_from_bytes with known classes only."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
