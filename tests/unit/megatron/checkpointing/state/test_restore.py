"""What of a checkpoint's progress goes on; and FusedAdam's state, which upstream saves on CUDA, in torch's Adam."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron.checkpointing.engines.errors import CheckpointMismatchError
from megatron.checkpointing.state.collect import Progress
from megatron.checkpointing.state.restore import convert_adam_state, restore_progress
from megatron.config import CheckpointConfig, Config

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("flag", ["", "reset_iteration", "no_load_lr_state", "finetune"])
def test_what_goes_on_of_a_checkpoints_progress(flag: str) -> None:
    """None of it with --finetune; with --reset-iteration the schedule alone, with --no-load-lr-state all else."""
    engine, schedules = SimpleNamespace(global_steps=0, global_samples=0, skipped_steps=0), []
    engine.lr_scheduler = SimpleNamespace(load_state_dict=schedules.append)
    args = SimpleNamespace(consumed_train_samples=40, consumed_valid_samples=3, indexed_samples=(80, 8, 8))
    counts = {"global_steps": 6, "global_samples": 48, "skipped_steps": 1}
    common = {"args": args, "iteration": 5, "lr_scheduler": {"num_steps": 5}} | counts
    given: dict[str, Any] = {flag: True} if flag else {}
    options = CheckpointConfig(load="/a", **given)
    progress = restore_progress(engine, common, cast(Config, SimpleNamespace(checkpoint=options)))
    goes_on = flag in ("", "no_load_lr_state")
    assert progress == (Progress(5, 40, 3, (80, 8, 8)) if goes_on else Progress())
    assert [getattr(engine, name) for name in counts] == ([6, 48, 1] if goes_on else [0, 0, 0])
    assert schedules == ([{"num_steps": 5}] if flag in ("", "reset_iteration") else [])


def fused(step_in_state: bool) -> dict[str, Any]:
    """As apex's FusedAdam saves itself: steps are counted in the group; DeepSpeed's counts in the state, too."""
    moments = {"exp_avg": torch.full((3,), 0.5), "exp_avg_sq": torch.full((3,), 0.25)}
    state = moments | ({"step": 7} if step_in_state else {})
    group = OPTIONS | {"name": "wd_no_scale_lr", "lr": 5e-4, "bias_correction": True, "step": 7, "params": [0]}
    return {"state": {0: state}, "param_groups": [group]}


def adam(**options: Any) -> torch.optim.Adam:
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "name": "wd_no_scale_lr"}]
    chosen: Any = OPTIONS | {"fused": True, "decoupled_weight_decay": True} | options
    return torch.optim.Adam(groups, **chosen)


@pytest.mark.slow
@pytest.mark.parametrize("step_in_state", [False, True])
def test_fused_adam_goes_on_in_torchs(step_in_state: bool) -> None:
    ours, base = adam(), fused(step_in_state)
    ours.load_state_dict(dict(convert_adam_state(base, ours.param_groups)))
    (group,) = ours.param_groups
    assert group["decoupled_weight_decay"] is True and group["fused"] is True and group["lr"] == 5e-4
    assert "bias_correction" not in group and "step" not in group
    (param,) = group["params"]
    assert ours.state[param]["step"] == 7 and torch.equal(ours.state[param]["exp_avg"], torch.full((3,), 0.5))
    assert base["state"][0].get("step") == (7 if step_in_state else None), "the checkpoint's own is as it was"
    param.grad = torch.full((3,), 0.1)
    ours.step()
    corrected = (0.9 * 0.5 + 0.1 * 0.1) / (1 - 0.9**8)
    second = (0.95 * 0.25 + 0.05 * 0.01) / (1 - 0.95**8)
    assert param.tolist() == pytest.approx([(1 - 5e-4 * 0.1) - 5e-4 * corrected / (second**0.5 + 1e-8)] * 3)


@pytest.mark.slow
def test_torchs_goes_on_in_fused_adam() -> None:
    """apex begins to count at 1 where its group does not say how far it is."""
    saved = adam()
    saved.param_groups[0]["params"][0].grad = torch.ones(3)
    for _ in range(3):
        saved.step()
    own = [OPTIONS | {"name": "wd_no_scale_lr", "bias_correction": True, "params": []}]
    found = convert_adam_state(saved.state_dict(), own)
    (group,) = found["param_groups"]
    assert group["step"] == 3 and group["bias_correction"] is True
    assert group["params"] == [0] and "decoupled_weight_decay" not in group


def test_what_is_of_the_same_kind_is_left_alone() -> None:
    """Off CUDA upstream's is torch's, with L2: a resume goes on with it."""
    ours = adam()
    base = adam(decoupled_weight_decay=False, fused=None).state_dict()
    assert convert_adam_state(base, ours.param_groups) == base
    begun = adam().state_dict()
    assert convert_adam_state(begun, ours.param_groups)["state"] == {}


def test_moments_and_steps_go_to_the_other_adam_and_back_bit_for_bit(caplog: pytest.LogCaptureFixture) -> None:
    """The classes of apex cannot be had without CUDA: what counts here is the form of their state."""
    saved = adam()
    saved.param_groups[0]["params"][0].grad = torch.tensor([0.1, 0.3, -0.7])
    for _ in range(3):
        saved.step()
    before = saved.state_dict()
    own = [OPTIONS | {"name": "wd_no_scale_lr", "bias_correction": True, "params": []}]
    with caplog.at_level(logging.INFO):
        there = convert_adam_state(before, own)
        back = adam()
        back.load_state_dict(dict(convert_adam_state(there, back.param_groups)))
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(back.state_dict()["state"][0][name], before["state"][0][name]), name
    told = [message.split(":")[0] for message in caplog.messages]
    assert told == [
        "the checkpoint's optimizer is torch's Adam and this run's FusedAdam (apex's or DeepSpeed's)",
        "the checkpoint's optimizer is FusedAdam (apex's or DeepSpeed's) and this run's torch's Adam",
    ]


def test_l2_weight_decay_is_not_taken_for_decoupled() -> None:
    own = [OPTIONS | {"name": "wd_no_scale_lr", "bias_correction": True, "params": []}]
    with pytest.raises(
        CheckpointMismatchError, match=r"L2 weight decay .*resume without apex, or with --no-load-optim"
    ):
        convert_adam_state(adam(decoupled_weight_decay=False).state_dict(), own)
    assert convert_adam_state(adam(decoupled_weight_decay=False, weight_decay=0.0).state_dict(), own)
