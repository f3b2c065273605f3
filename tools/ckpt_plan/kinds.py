"""What the bytes of a rank's state are: weights, master weights, moments, and the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.checkpointing.engines.base import FileState

WEIGHTS, MASTER_WEIGHTS, MOMENTS, METADATA = "weights", "master_weights", "moments", "metadata"
TENSOR_KINDS: tuple[str, ...] = (WEIGHTS, MASTER_WEIGHTS, MOMENTS)
KINDS: tuple[str, ...] = (*TENSOR_KINDS, METADATA)


def tensor_bytes_by_kind(files: Iterable[FileState]) -> dict[str, int]:
    """Bytes of the tensors of each of TENSOR_KINDS. Random states and step counters are not counted."""
    from ..common.tensor_trees import tensors_of

    found: dict[str, int] = dict.fromkeys(TENSOR_KINDS, 0)
    for file in files:
        for path, tensor in tensors_of(file.state):
            kind = _kind(path)
            if kind is not None and tensor.dim() > 0:
                found[kind] += tensor.nbytes
    return found


def file_tensor_bytes(file: FileState) -> int:
    """Bytes of all tensors of one file."""
    from ..common.tensor_trees import tensors_of

    return sum(tensor.nbytes for _, tensor in tensors_of(file.state))


def _kind(path: tuple[Any, ...]) -> str | None:
    if path[:2] == ("optimizer_state_dict", "single_partition_of_fp32_groups"):
        return MASTER_WEIGHTS
    if path[:2] == ("optimizer_state_dict", "base_optimizer_state"):
        return MOMENTS
    return WEIGHTS if len(path) == 1 else None
