"""pretrain_gpt.py that also writes down, at every save, the placements of each rank's tensors.

PLACEMENTS_OUT/ITERATION/rank_N.json: file name -> [[path in the nest, placement], ...]; "cpu_seconds": what finding
them took. rank_N.pt: what DeepSpeed itself says this TP rank's slice of each master weight and moment is, gathered over
DP: kind -> parameter name -> tensor.
"""

from __future__ import annotations

import json
import os
import runpy
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpointing import manager as checkpointing
from megatron.checkpointing.engines.base import FileState
from megatron.checkpointing.state.collect import collect_state
from megatron.checkpointing.state.shard_metadata import add_placements

OUT = Path(os.environ["PLACEMENTS_OUT"])


def gathered(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    engine.optimizer._hp_optimizer_states_linked = False  # it may have linked them before there were moments
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    params = list(engine.module.named_parameters())
    keys = {"master": None, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    return {kind: {name: p.get_full_hp_param(key) for name, p in params} for kind, key in keys.items()}


def collect_and_dump(
    engine: Any, place: Any, config: Any, vocab_sizes: Any, progress: Any, *_: bool
) -> list[FileState]:
    plain = collect_state(engine, place, config, vocab_sizes, progress)
    assert not any(file.placements for file in plain)
    files = collect_state(engine, place, config, vocab_sizes, progress, with_placements=True)
    start = time.thread_time()
    add_placements(engine, place, vocab_sizes[0], plain)
    dumped: dict[str, Any] = {"cpu_seconds": time.thread_time() - start}
    dumped |= {file.name: [[list(path), p] for path, p in file.placements.items()] for file in files}
    directory = OUT / str(progress.iteration)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"rank_{dist.get_rank()}.json").write_text(json.dumps(dumped))
    torch.save(gathered(engine), directory / f"rank_{dist.get_rank()}.pt")
    return files


checkpointing.collect_state = collect_and_dump
runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
