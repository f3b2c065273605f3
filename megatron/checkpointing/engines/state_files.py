"""For engines that keep each state in a directory of its own: finding its files, and one tensor for the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.base import SavedCheckpoint, SavedFile, check_size
from megatron.checkpointing.engines.errors import CheckpointDamagedError


def find_files(name: str, checkpoint: SavedCheckpoint, needed: str) -> dict[str, SavedFile]:
    """The files of the state `name`, by their path within its directory, with their sizes checked.

    Without a manifest these are the files that are there; `needed` is the one without which there is no state.
    Raises CheckpointDamagedError naming the file that is missing or has another size.
    """
    root = checkpoint.path(name)
    if checkpoint.files:
        found = {file.name.removeprefix(f"{name}/"): file for file in checkpoint.holding(name)}
    else:
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        found = {str(path.relative_to(root)): _unknown(path, checkpoint.directory) for path in paths}
    if needed not in found:
        raise CheckpointDamagedError(f"{root / needed}: file is missing")
    for inside, file in found.items():
        path = checkpoint.path(file.name)
        if path != root / inside:
            raise CheckpointDamagedError(f"{path}: is not within {root}: the manifest is damaged")
        check_size(path, file)
    return found


def _unknown(path: Path, directory: Path) -> SavedFile:
    return SavedFile(str(path.relative_to(directory)), path.stat().st_size, "none")


def pack(content: Any) -> torch.Tensor:
    """JSON as a tensor of bytes: libraries that keep tensors keep it without pickle."""
    return torch.frombuffer(bytearray(json.dumps(content, separators=(",", ":")).encode()), dtype=torch.uint8)


def unpack(tensor: Any, where: Path) -> Any:
    """Inverse of pack. Raises CheckpointDamagedError if it is no such tensor."""
    try:
        return json.loads(bytes(tensor.numpy()))
    except (AttributeError, TypeError, ValueError, RecursionError) as exc:
        raise CheckpointDamagedError(f"{where}: the description of its state is damaged ({exc})") from exc


def total_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
