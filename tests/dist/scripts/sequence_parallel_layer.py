"""Tensor-parallel ranks: what autograd keeps of a layer with --sequence-parallel, and which dropout masks are drawn.

Writes `$OUT/rank_N.json`: {"kept": bytes, "masks": {"--sequence-parallel given": [0 or 1, ...]}}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from megatron.parallel.random import residual_dropout, seed_everything
from megatron.parallel.topology import TensorParallelGroup
from tests.unit.tools.ckpt_plan.test_activations import config_of, kept_by_autograd

if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    seed_everything(1, pp_rank=0, tp_rank=rank)
    masks, kept = {}, 0
    for on in (False, True):
        tp = TensorParallelGroup(rank, size, torch.distributed.group.WORLD, sequence_parallel=on)
        masks[str(on)] = residual_dropout(torch.ones(64), 0.5, True, tp).sign().tolist()
        kept = kept_by_autograd(config_of(" ".join(sys.argv[1:]), tp=size), tp)
    Path(os.environ["OUT"], f"rank_{rank}.json").write_text(json.dumps({"kept": kept, "masks": masks}))
    torch.distributed.destroy_process_group()
