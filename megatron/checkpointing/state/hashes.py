"""Hashes of the live tensors, by which a restored state is compared with the saved one bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.state import zero3
from restart_trace.regular import NotRegularFileError
from restart_trace.strict_json import read_json

_MAX_BYTES = 1 << 30
_WEIGHT = "weight/"


def tensor_hashes(engine: Any) -> dict[str, str]:
    """SHA-256 of every weight, master weight and optimizer moment of this rank, by name."""
    return {name: _hash(tensor) for name, tensor in _live_tensors(engine)}


def read_hashes(path: Path) -> dict[str, Any]:
    """The hashes in the file at `path`. Raises CheckpointDamagedError if it is not there, or not whole."""
    try:
        saved = read_json(path, _MAX_BYTES)
        if not isinstance(saved, dict):
            raise ValueError("it holds no object")
    except FileNotFoundError:
        raise CheckpointDamagedError(
            f"{path}: not there; --verify-restored-state needs a checkpoint that was saved with it"
        ) from None
    except (ValueError, NotRegularFileError) as exc:
        raise CheckpointDamagedError(f"{path}: not whole ({exc}), so the restored state cannot be compared") from None
    return saved


def compare_hashes(engine: Any, saved: Mapping[str, Any], where: str, *, weights_alone: bool = False) -> None:
    """Raises CheckpointDamagedError naming the tensors whose live bits differ from `saved`, which stand `where`.

    `weights_alone`: masters and moments were not restored (--no-load-optim), and are not compared.
    """
    live = tensor_hashes(engine)
    compared = [name for name in saved.keys() | live.keys() if name.startswith(_WEIGHT) or not weights_alone]
    wrong = sorted(name for name in compared if saved.get(name) != live.get(name))
    if wrong:
        raise CheckpointDamagedError(f"{where}: restored state differs from what was saved in " + ", ".join(wrong))


def _live_tensors(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if zero3.divides_weights(engine):
        yield from zero3.live_tensors(engine)
        return
    for name, param in engine.module.named_parameters():
        yield _WEIGHT + name, param
    state = engine.optimizer.state_dict()
    for index, tensor in enumerate(state["single_partition_of_fp32_groups"]):
        yield f"master/{index}", tensor
    for index, moments in state["base_optimizer_state"]["state"].items():
        for name, value in moments.items():
            if isinstance(value, torch.Tensor):
                yield f"optimizer/{index}/{name}", value


def _hash(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
