"""The tensors that a rank of the new layout needs, and which elements of which parameter belong where in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.checkpointing.engines.base import PlacedTensor
from megatron.checkpointing.engines.errors import CheckpointMismatchError
from megatron.checkpointing.reshard.runs import Array, parts_of
from megatron.checkpointing.reshard.sources import SourceIndex


@dataclass(frozen=True)
class Target:
    """A contiguous tensor to be filled. `kind` is as in sources; `placement` that of the new layout."""

    tensor: torch.Tensor
    kind: str
    placement: Mapping[str, Any]


@dataclass(frozen=True)
class Transfer:
    """Bytes of a file that belong into a tensor: arrays of the same length, in the order of the file."""

    source: PlacedTensor
    target: torch.Tensor
    file_offset: Array
    target_offset: Array
    num_bytes: Array


def plan(targets: list[Target], index: SourceIndex) -> list[Transfer]:
    """What to read to fill `targets`, which are set to zero where the checkpoint has nothing: padding.

    Raises CheckpointMismatchError naming a parameter that it lacks, or has of another type.
    """
    return [transfer for target in targets for transfer in _plan_one(target, index)]


def _plan_one(target: Target, index: SourceIndex) -> list[Transfer]:
    transfers: list[Transfer] = []
    planned = 0
    size = target.tensor.element_size()
    for part in parts_of(target.placement):
        name, wanted = part["name"], index.runs_of(part)
        if "unpadded" in part:
            index.check_vocabulary(name, part["unpadded"])
        found = 0
        for source in index.of(target.kind, name):
            copies = index.in_common(source.runs, wanted)
            if not len(copies):
                continue
            if source.tensor.dtype != target.tensor.dtype:
                raise CheckpointMismatchError(
                    f"{source.tensor.path}: {source.tensor.name} is {source.tensor.dtype}, and {target.tensor.dtype} "
                    f"is needed for the {target.kind} of {name}; resume with the precision that it was saved with"
                )
            found += int(copies.length.sum())
            order = np.argsort(copies.source, kind="stable")
            transfers.append(
                Transfer(
                    source.tensor,
                    target.tensor,
                    source.tensor.start + copies.source[order] * size,
                    copies.target[order] * size,
                    copies.length[order] * size,
                )
            )
        missing = wanted.numel - found
        if missing > _padding(part, wanted.numel):
            raise CheckpointMismatchError(
                f"the checkpoint lacks {missing} of the {wanted.numel} elements of the {target.kind} of {name} that "
                "this rank holds; load a checkpoint that was saved with this model and with its optimizer, or give "
                "--no-load-optim"
            )
        planned += found
    if planned < target.tensor.numel():
        target.tensor.zero_()
    return transfers


def _padding(part: Mapping[str, Any], held: int) -> int:
    """How many of a rank's elements may be missing: those of tokens that are none; another TP pads differently."""
    if "unpadded" not in part:
        return 0
    row = int(np.prod(part["shape"][1:]))
    return min(held, (part["shape"][0] - part["unpadded"]) * row)
