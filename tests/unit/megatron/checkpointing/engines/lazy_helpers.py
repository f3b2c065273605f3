"""States, and engines to save and load them with, for the tests of engine lazy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.base import MIB, EngineOptions, FileState, SavedCheckpoint, SavedFile
from megatron.checkpointing.engines.lazy.engine import LazyEngine
from restart_trace.recorder import NullOperation

NAMES = ["layer_01-model_00-model_states.pt", "mp_rank_00_model_states.pt"]
BLOCK = 64 * 1024


def files(num_bytes: int = 3 * MIB) -> list[FileState]:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(num_bytes // 8, generator=generator)
    optimizer = {"m": torch.randn(num_bytes // 8, generator=generator), "step": torch.tensor(3.0)}
    small = {"half": torch.linspace(0, 1, 7).to(torch.bfloat16), "iteration": 5}
    return [FileState(NAMES[0], {"weights": weights}), FileState(NAMES[1], {"optimizer": optimizer, **small})]


def engine(**options: Any) -> LazyEngine:
    return LazyEngine(EngineOptions(**{"io_block_bytes": BLOCK, "fsync": False} | options))


def load(directory: Path, saved: list[SavedFile], names: list[str] = NAMES, **options: Any) -> dict[str, Any]:
    return engine(**options).load(
        names, SavedCheckpoint(directory, {file.name: file for file in saved}), NullOperation()
    )


def check(found: dict[str, Any], expected: list[FileState]) -> None:
    assert list(found) == [file.name for file in expected]
    weights, rest = expected[0].state, expected[1].state
    assert torch.equal(found[NAMES[0]]["weights"], weights["weights"])
    assert torch.equal(found[NAMES[1]]["optimizer"]["m"], rest["optimizer"]["m"])
    assert torch.equal(found[NAMES[1]]["half"], rest["half"]) and found[NAMES[1]]["iteration"] == 5
