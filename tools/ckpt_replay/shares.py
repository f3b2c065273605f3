"""The state that a replayed rank saves: planned on the meta device, and limited in size on request."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.checkpointing.engines.base import FileState

from ..common.tensor_trees import map_tensors, tensors_of
from .plan import ReplayError, Share

_LEFT_WHOLE = 64 << 10  # smaller tensors are not shrunk: what matters is their number


@dataclass(frozen=True)
class Planned:
    """The state of a rank with meta tensors, and the bytes of its tensors before it was limited."""

    files: list[FileState]
    full_bytes: int


def planned_share(share: Share, rank: int) -> Planned:
    """The state of global rank `rank`. Raises ReplayError or ValueError if there is no such model, layout or rank."""
    if share.small_tensors is not None:
        files = _small_tensors(share.small_tensors, share.small_tensor_bytes, rank)
        return Planned(files, tensor_bytes(files))
    files = _equal_part(share, rank) if share.fully_sharded else _planned_files(share, rank)
    full = tensor_bytes(files)
    if share.limit_bytes is not None and share.limit_bytes < full:
        files = limited(files, share.limit_bytes)
    return Planned(files, full)


def _equal_part(share: Share, rank: int) -> list[FileState]:
    """The equal part of a model's state that one rank holds, as torch's FSDP shards flat parameters.

    Each tensor is divided by its elements, in order, and padded: all ranks have tensors of the same shapes.
    """
    ranks = share.layout[2]
    parts: dict[int, torch.Tensor] = {}  # a tensor that occurs twice remains one object

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in parts:
            parts[id(tensor)] = torch.empty(-(-tensor.numel() // ranks), dtype=tensor.dtype, device="meta")
        return parts[id(tensor)]

    whole = _planned_files(replace(share, layout=(1, 1, 1)), 0)
    return [
        replace(file, name=f"{_stem(file.name)}_part_{rank:05d}.pt", state=map_tensors(file.state, part), placements={})
        for file in whole
    ]


def _stem(name: str) -> str:
    return name.removesuffix(".pt")


def _planned_files(share: Share, rank: int) -> list[FileState]:
    from ..ckpt_plan.presets import config_for
    from ..ckpt_plan.rank_state import planned_files

    tp, pp, dp = share.layout
    config, layout, vocab_sizes = config_for(share.model or "", tp, pp, dp, share.vocab_size)
    files = planned_files(config, layout, layout.coordinates(rank), vocab_sizes, with_placements=True)
    return _one_object_per_memory(files)


def _one_object_per_memory(files: list[FileState]) -> list[FileState]:
    """The same states with one object for tensors that share memory, since pickling preserves only object identity."""
    first: dict[tuple[Any, ...], torch.Tensor] = {}

    def canonical(tensor: torch.Tensor) -> torch.Tensor:
        where = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.dtype)
        return first.setdefault(where, tensor)

    return [replace(file, state=map_tensors(file.state, canonical)) for file in files]


def _small_tensors(count: int, size: int, rank: int) -> list[FileState]:
    tensors = {f"tensor_{i:05d}": torch.empty(size // 4, dtype=torch.float32, device="meta") for i in range(count)}
    return [FileState(f"small_tensors_rank_{rank:05d}.pt", {"tensors": tensors})]


def tensor_bytes(files: list[FileState]) -> int:
    """Bytes of all tensors; one that occurs twice counts once."""
    found = {id(tensor): tensor.nbytes for file in files for _, tensor in tensors_of(file.state)}
    return sum(found.values())


def limited(files: list[FileState], limit: int) -> list[FileState]:
    """The same files and tensors, with fewer rows in the larger tensors, so that the total is about `limit` bytes."""
    sizes = {id(t): t.nbytes for file in files for _, t in tensors_of(file.state)}
    whole = sum(size for size in sizes.values() if size <= _LEFT_WHOLE)
    large = sum(sizes.values()) - whole
    if limit <= whole:
        raise ReplayError(
            f"--limit-bytes {limit}: the tensors of at most {_LEFT_WHOLE >> 10} KiB alone have {whole} bytes; give more"
        )
    factor = (limit - whole) / large
    shrunk: dict[int, torch.Tensor] = {}

    def shrink(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes <= _LEFT_WHOLE:
            return tensor
        if id(tensor) not in shrunk:
            rows = max(1, math.floor(tensor.shape[0] * factor))
            shape = (rows, *tensor.shape[1:])
            shrunk[id(tensor)] = torch.empty(
                shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
            )
        return shrunk[id(tensor)]

    # Placements are no longer correct for fewer rows, but have the same length.
    return [replace(file, state=map_tensors(file.state, shrink)) for file in files]
