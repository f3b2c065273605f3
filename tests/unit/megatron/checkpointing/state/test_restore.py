"""FusedAdam's state, which upstream saves on CUDA, goes on in torch's Adam with the same rule and the same step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megatron.checkpointing.engines.errors import CheckpointMismatchError
from megatron.checkpointing.state.restore import convert_adam_state

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


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
