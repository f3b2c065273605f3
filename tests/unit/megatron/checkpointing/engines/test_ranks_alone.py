"""What an engine asks of its library is collective nowhere: for engines whose library is made for process groups."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.unit.trace_helpers import start_python

ENGINES = ["dcp", "dcp-async", *(["torchsnapshot"] if importlib.util.find_spec("torchsnapshot") else [])]


@pytest.mark.slow
def test_ranks_save_and_load_alone(tmp_path: Path) -> None:
    """Within a process group, each rank a different number of times."""
    code = """
        import pathlib, sys, torch
        import torch.distributed as dist
        from datetime import timedelta
        from megatron.checkpointing.engines.base import EngineOptions, FileState, SavedCheckpoint
        from megatron.checkpointing.engines.registry import create_engine
        from restart_trace.recorder import untraced_operation

        directory, rank, engines = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
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
    ranks = [start_python(code, tmp_path, rank, *ENGINES) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [output.count("done") for output in outputs] == [1, 1]
