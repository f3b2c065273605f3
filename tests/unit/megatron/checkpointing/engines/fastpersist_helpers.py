"""A state with all that engines meet, saved and loaded by the engines around DeepSpeed's writers."""

from __future__ import annotations

import argparse
import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpointing.engines.base import CheckpointEngine, FileState, SavedCheckpoint
from megatron.checkpointing.engines.fastpersist.decoupled_engine import FastPersistDecoupledEngine
from restart_trace.recorder import untraced_operation
from tests.conformance.subjects import Saved, traced

NAME = "mp_rank_00_model_states.pt"


def without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's own set-up wants these of its launcher."""
    for name in ("CROSS_SIZE", "CROSS_RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # for processes started here, which otherwise say that they looked


def state() -> dict[str, Any]:
    base = torch.arange(100.0)
    return {
        "nested": {"a": {"b": torch.ones(3)}, 7: [1, 2.5, None, "text"], "empty": {}},
        "ordered": collections.OrderedDict(z=torch.zeros(2), a=1),
        "tuple": (1, (torch.tensor(2), True), []),
        "odd": torch.linspace(0, 1, 7).to(torch.bfloat16),
        "no elements": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "strided": torch.arange(20)[::3],
        "expanded": torch.ones(1).expand(4),
        "base": base,
        "same": base,
        "part": base[10:20],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "args": argparse.Namespace(lr=1e-3, layers=[1, 2], tensor=torch.ones(2)),
        "none": None,
    }


def save(
    engine: CheckpointEngine, directory: Path, *, content: Any = None, name: str = NAME, release: bool = True
) -> Saved:
    directory.mkdir(exist_ok=True)
    trace = traced("save")
    pending = engine.begin_save([FileState(name, state() if content is None else content)], directory, trace.op)
    if release:
        pending.release_state()
    return Saved(directory, pending.wait(), trace)


def load(engine: CheckpointEngine, saved: Saved) -> Any:
    return engine.load([NAME], SavedCheckpoint(saved.directory, saved.manifest), untraced_operation())[NAME]


def process_of(engine: FastPersistDecoupledEngine) -> int:
    assert engine._process is not None
    return engine._process.pid
