"""pretrain_gpt.py that makes weights of masters as this program does, then as DeepSpeed does, and compares them."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.reshard import direct, gathering

ROOT = Path(__file__).resolve().parents[3]


def compare(optimizer: Any, op: Any) -> None:
    gathering.update_weights(optimizer, op)
    groups = optimizer.bf16_groups if hasattr(optimizer, "bf16_groups") else optimizer.bit16_groups
    weights = [param.data for group in groups for param in group]
    ours = [weight.clone() for weight in weights]
    for weight in weights:
        weight.fill_(float("nan"))
    optimizer.update_lp_params()
    for mine, theirs in zip(ours, weights, strict=True):
        assert torch.equal(mine.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8))
    assert any(weight.any() for weight in weights)
    print(f"rank {os.environ['RANK']}: both ways give the same weights", flush=True)


if __name__ == "__main__":
    direct.update_weights = compare
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
