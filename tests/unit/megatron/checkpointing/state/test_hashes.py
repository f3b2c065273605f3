"""One hash per tensor: every bit counts, and what differs is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.state.hashes import compare_hashes, read_hashes, tensor_hashes


def engine() -> Any:
    """As much of a DeepSpeed engine as is hashed: a module, and an optimizer with ZeRO-1's state."""
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2).to(torch.bfloat16)
    moments = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.ones(4), "step": torch.tensor(5.0), "lr": 1e-3}
    state = {"single_partition_of_fp32_groups": [torch.ones(4)], "base_optimizer_state": {"state": {0: moments}}}
    return SimpleNamespace(module=module, optimizer=SimpleNamespace(state=state, state_dict=lambda: state))


def test_names() -> None:
    assert set(tensor_hashes(engine())) == {
        "weight/weight", "weight/bias", "master/0", "optimizer/0/exp_avg", "optimizer/0/exp_avg_sq",
        "optimizer/0/step",
    }  # fmt: skip


def test_same_state_compares_equal(tmp_path: Path) -> None:
    (tmp_path / "hashes.json").write_text(json.dumps(tensor_hashes(engine())))
    compare_hashes(engine(), read_hashes(tmp_path / "hashes.json"), "hashes.json")


def moments_of(other: Any) -> dict[str, Any]:
    return other.optimizer.state["base_optimizer_state"]["state"][0]


def flip_lowest_bit(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.uint8)[0] ^= 1


CHANGES = {
    "weight/weight": lambda other: flip_lowest_bit(other.module.weight),
    "master/0": lambda other: flip_lowest_bit(other.optimizer.state["single_partition_of_fp32_groups"][0]),
    "optimizer/0/exp_avg": lambda other: moments_of(other)["exp_avg"].neg_(),  # 0.0 becomes -0.0: equal, other bits
    "optimizer/0/step": lambda other: moments_of(other).pop("step"),
    "optimizer/0/new": lambda other: moments_of(other).update(new=torch.ones(1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_bit_is_seen_and_its_tensor_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hashes.json"
    path.write_text(json.dumps(tensor_hashes(engine())))
    changed = engine()
    CHANGES[name](changed)
    expected = re.escape(f"{path}: restored state differs from what was saved in {name}") + "$"
    with pytest.raises(CheckpointDamagedError, match=expected):
        compare_hashes(changed, read_hashes(path), str(path))


def test_layout_in_memory_does_not_count() -> None:
    one, other = engine(), engine()
    other.module.weight = torch.nn.Parameter(one.module.weight.detach().t().contiguous().t())
    assert not other.module.weight.is_contiguous()
    assert tensor_hashes(one) == tensor_hashes(other)


def test_file_that_is_missing_or_not_whole(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamagedError, match="needs a checkpoint that was saved with it"):
        read_hashes(tmp_path / "absent.json")
    (tmp_path / "cut.json").write_text('{"weight/we')
    with pytest.raises(CheckpointDamagedError, match="not whole"):
        read_hashes(tmp_path / "cut.json")
