"""What an engine asks of its library is collective nowhere: for engines whose library is made for process groups."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import pytest

from megatron.checkpointing.engines.registry import builtin_engines
from tests.dist.harness import Zygote

ENGINES = [
    name
    for name, entry in builtin_engines().items()
    if entry.package in ("dcp", "torchsnapshot") and all(map(importlib.util.find_spec, entry.requires))
]


@pytest.mark.slow
def test_ranks_save_and_load_alone(tmp_path: Path, zygote: Zygote) -> None:
    """Within a process group, each rank a different number of times."""
    code = """
        import os, pathlib, sys, torch
        import torch.distributed as dist
        from datetime import timedelta
        from megatron.checkpointing.engines.base import EngineOptions, FileState, SavedCheckpoint
        from megatron.checkpointing.engines.registry import create_engine
        from restart_trace.recorder import untraced_operation

        if __name__ == "__main__":  # not in the process that an engine spawns
            directory, rank, engines = pathlib.Path(sys.argv[1]), int(os.environ["RANK"]), sys.argv[2:]
            store = dist.FileStore(str(directory / "store"), 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=5))
            for name in engines:
                engine = create_engine(name, EngineOptions())
                for i in range(1 + 2 * rank):
                    names = [f"{name}{rank}_{i}_{j}.pt" for j in range(rank + 1)]
                    states = [FileState(name, {"a": torch.full((5,), rank)}) for name in names]
                    saved = {file.name: file for file in engine.save(states, directory, untraced_operation())}
                    found = engine.load(names, SavedCheckpoint(directory, saved), untraced_operation())
                    assert all(state["a"].tolist() == [rank] * 5 for state in found.values())
                engine.close()
            print("done")
            dist.barrier()
            dist.destroy_process_group()
        """
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(code))
    run = zygote.run([str(tmp_path), *ENGINES], 2, tmp_path / "logs", script=str(script))
    assert run.ok and run.output.count("done") == 2, run.output[-3000:]
