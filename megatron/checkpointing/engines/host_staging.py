"""Copies the state of one file to the CPU for torch.save, without the storage that tensors are views of.

Refuses values that a load could not unpickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron.checkpointing.engines import unpickling
from megatron.checkpointing.engines.errors import CheckpointSaveError

# Loaded without asking, as are arrays of numbers.
_PLAIN = {type(None), bool, int, float, str, bytes, torch.Size}


@dataclass
class Staging:
    """What stage_on_host met: bytes copied, bytes of all tensors, and values of classes that are not plain data."""

    copied_bytes: int = 0
    tensor_bytes: int = 0
    unusual: list[Any] = field(default_factory=list)


def is_part_of_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view of something larger (or, expanded, of something smaller)."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def stage_on_host(state: Any, staging: Staging) -> Any:
    """A copy of the nest `state` whose tensors are on the CPU and own exactly their storage.

    Device tensors are copied to the host. CPU tensors are copied only where they are views of something
    larger, which torch.save would write whole; the others are used as they are.
    """
    return _mapped(state, staging, _to_host)


def survey(state: Any) -> Staging:
    """What staging `state` would meet; nothing is copied."""
    staging = Staging()
    _mapped(state, staging, lambda tensor, _: tensor)
    return staging


def _to_host(tensor: torch.Tensor, staging: Staging) -> torch.Tensor:
    tensor = tensor.detach()
    num_bytes = tensor.numel() * tensor.element_size()
    staging.tensor_bytes += num_bytes
    if tensor.device.type == "cpu" and not is_part_of_storage(tensor):
        return tensor
    staging.copied_bytes += num_bytes
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu")


def _mapped(state: Any, staging: Staging, on_tensor: Callable[[torch.Tensor, Staging], torch.Tensor]) -> Any:
    """A copy of the nest with every tensor replaced; values that are not plain data are noted in `staging`."""
    if isinstance(state, torch.Tensor):
        return on_tensor(state, staging)
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        staging.unusual.append(type(state))
        return type(state)(*(_mapped(item, staging, on_tensor) for item in state))
    if type(state) in (list, tuple):
        return type(state)(_mapped(item, staging, on_tensor) for item in state)
    if isinstance(state, Mapping):
        staging.unusual.extend(key for key in state if not _is_plain(key))
        items = [(key, _mapped(value, staging, on_tensor)) for key, value in state.items()]
        if type(state) is dict:
            return dict(items)
        copy = type(state)(items)  # type: ignore[call-arg]
        staging.unusual.append(type(state)())
        return copy
    if not _is_plain(state):
        staging.unusual.append(state)
    return state


def _is_plain(value: Any) -> bool:
    if type(value) is np.ndarray:
        return value.dtype.kind in "biufc"
    return type(value) in _PLAIN


def check_loadable(staging: Staging, name: str) -> None:
    """Raise CheckpointSaveError naming the file if it would hold what a load refuses to unpickle.

    Only values that are not plain data are tried, so that this takes microseconds where there are none.
    """
    if not staging.unusual:
        return
    trial = io.BytesIO()
    torch.save(staging.unusual, trial)
    trial.seek(0)
    with unpickling.known_classes():
        try:
            torch.load(trial, weights_only=True)
        except pickle.UnpicklingError as exc:
            trial.seek(0)
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(trial)  # pyright: ignore[reportArgumentType]
            raise CheckpointSaveError(
                f"{name}: holds {', '.join(unknown) or 'a value'}, which is not on the allow-list of "
                "engines/unpickling.py, so it could not be loaded again; keep it out of the state, or add it there"
            ) from exc
