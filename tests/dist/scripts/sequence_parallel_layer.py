"""Tensor-parallel ranks: what autograd keeps of a layer with --sequence-parallel, and which dropout masks are drawn.

Writes `$OUT/rank_N.json`: {"kept": bytes, "masks": {"--sequence-parallel given": [0 or 1, ...]}, "exchanging": bytes},
the last of a layer that is not tensor-parallel, with --ds-sequence-parallel-size.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from megatron.parallel.random import residual_dropout, seed_everything
from megatron.parallel.topology import Coordinates, SequenceGroup, TensorParallelGroup
from tests.unit.tools.ckpt_plan.test_activations import config_of, kept_by_autograd

if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    seed_everything(1, Coordinates(tp=rank, pp=0, dp=0))
    masks, kept = {}, 0
    for on in (False, True):
        tp = TensorParallelGroup(rank, size, torch.distributed.group.WORLD, sequence_parallel=on)
        masks[str(on)] = residual_dropout(torch.ones(64), 0.5, True, tp).sign().tolist()
        kept = kept_by_autograd(config_of(" ".join(sys.argv[1:]), tp=size), tp)
    whole = config_of(" ".join(sys.argv[1:]))
    sequence = SequenceGroup(rank, size, torch.distributed.group.WORLD)
    found = {
        "kept": kept, "masks": masks,
        "exchanging": kept_by_autograd(whole, TensorParallelGroup(), sequence=sequence),
    }  # fmt: skip
    Path(os.environ["OUT"], f"rank_{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
