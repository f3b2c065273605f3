"""Learning rate and weight decay against upstream's own numbers, and what a resume makes of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import ConfigError, OptimizerConfig, TrainingConfig
from megatron.optimizer.param_scheduler import OptimizerParamScheduler

# What upstream's class answered for the same settings, at some of the iterations.
GOLDEN = json.loads((Path(__file__).resolve().parents[3] / "golden" / "upstream_param_schedules.json").read_text())
LR, MIN_LR, TRAIN_ITERS, BATCH = (GOLDEN[name] for name in ("lr", "min_lr", "train_iters", "global_batch_size"))


def optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "wd_mult": 0.0, "lr_mult": 1.0}]
    return torch.optim.SGD(groups, lr=0.1)


def scheduler(**settings: Any) -> OptimizerParamScheduler:
    config = OptimizerConfig(**({"lr": LR, "min_lr": MIN_LR, "lr_decay_iters": TRAIN_ITERS} | settings))
    training = TrainingConfig(micro_batch_size=1, train_iters=TRAIN_ITERS, global_batch_size=BATCH)
    return OptimizerParamScheduler(optimizer(), config, training, 16)


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in case.items() if name not in ("values", "state")}
    if settings["weight_decay_incr_style"] == "constant":
        settings["weight_decay"] = settings.pop("end_weight_decay")
        del settings["start_weight_decay"]
    return settings


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: "-".join(map(str, settings_of(case).values())))
def test_every_value_is_upstreams(case: dict[str, Any]) -> None:
    schedule = scheduler(**settings_of(case))
    groups = schedule.optimizer.param_groups
    expected = {iteration: rest for iteration, *rest in case["values"]}
    for iteration in range(TRAIN_ITERS + 1):
        if iteration in expected:
            found = [groups[0]["lr"], groups[0]["weight_decay"], groups[1]["weight_decay"]]
            assert found == pytest.approx(expected[iteration], rel=1e-12), iteration
            assert schedule.get_last_lr() == [groups[0]["lr"], groups[1]["lr"]]
        schedule.step()
    assert schedule.state_dict() == pytest.approx(case["state"])


def test_schedule_from_its_definition() -> None:
    """Linear from 0 to --lr over the warm-up, half a cosine down to --min-lr, and --min-lr from then on."""
    schedule = scheduler(lr_decay_style="cosine", lr_warmup_iters=4, lr_decay_iters=20)
    found = []
    for _ in range(30):
        found.append(schedule.get_lr())
        schedule.step()
    assert found[:5] == pytest.approx([0.0, LR / 4, LR / 2, 3 * LR / 4, LR])
    middle = (LR + MIN_LR) / 2
    assert found[12] == pytest.approx(middle)
    assert found[8] == pytest.approx(middle + (LR - MIN_LR) / 2 * math.cos(math.pi / 4))
    assert found[20:] == pytest.approx([MIN_LR] * 10)
    assert found[4:21] == sorted(found[4:21], reverse=True)


def test_lr_mult_and_wd_mult() -> None:
    schedule = scheduler(weight_decay=0.1, lr_decay_style="constant")
    schedule.optimizer.param_groups[1] |= {"lr_mult": 0.5, "wd_mult": 2.0}
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([LR, LR / 2])
    assert [group["weight_decay"] for group in schedule.optimizer.param_groups] == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
def test_state_goes_on_where_it_was_saved(style: str) -> None:
    whole, resumed = (scheduler(lr_decay_style=style, lr_warmup_iters=3) for _ in range(2))
    for _ in range(7):
        whole.step()
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert resumed.state_dict() == whole.state_dict()
    for _ in range(TRAIN_ITERS):
        assert resumed.get_last_lr() == whole.get_last_lr()
        whole.step()
        resumed.step()


DIFFERENT = {
    "max_lr": {"lr": 1e-3}, "min_lr": {"min_lr": 0.0}, "lr_decay_style": {"lr_decay_style": "cosine"},
    "lr_warmup_steps": {"lr_warmup_iters": 2}, "lr_decay_steps": {"lr_decay_iters": 50},
    "end_wd": {"weight_decay": 0.3},
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_disagreement_is_named_and_flags_settle_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
    saved = scheduler()
    for _ in range(5):
        saved.step()
    state = saved.state_dict()
    with pytest.raises(ConfigError) as caught:
        scheduler(**DIFFERENT[name]).load_state_dict(state)
    message = str(caught.value)
    if name == "end_wd":  # start and end are set by one flag here: either may be named
        assert "_wd is 0.01 in the checkpoint and 0.3 here (--start-weight-decay or --weight-decay)" in message
    else:
        mine = getattr(scheduler(**DIFFERENT[name]), name)
        assert f"{name} is {state[name]} in the checkpoint and {mine} here (" in message
    assert "--use-checkpoint-opt_param-scheduler or --override-opt_param-scheduler" in message

    caplog.set_level("INFO")
    theirs = scheduler(**DIFFERENT[name], use_checkpoint_opt_param_scheduler=True)
    mine = getattr(theirs, name)
    theirs.load_state_dict(state)
    assert f"--use-checkpoint-opt_param-scheduler: {name} stays {state[name]}, not {mine} (" in caplog.text
    assert theirs.state_dict() == state and theirs.get_last_lr() == saved.get_last_lr()

    override = scheduler(**DIFFERENT[name], override_opt_param_scheduler=True)
    mine = getattr(override, name)
    override.load_state_dict(state)
    assert getattr(override, name) == mine and override.num_steps == saved.num_steps
    assert f"--override-opt_param-scheduler: {name} {state[name]} -> {mine} (" in caplog.text
    caplog.clear()
    scheduler(override_opt_param_scheduler=True).load_state_dict(state)
    assert not caplog.text  # nothing is changed


def test_state_of_an_older_kind_without_every_name() -> None:
    """Upstream's checkpoints of before token counting lack some names: those are left as they are."""
    state = scheduler().state_dict()
    for name in ("lr_decay_tokens", "lr_warmup_tokens", "num_tokens"):
        del state[name]
    state["num_steps"] = 3 * BATCH
    resumed = scheduler()
    resumed.load_state_dict(state)
    assert resumed.num_steps == 3 * BATCH


# Upstream's class, stepped over `batches` samples in turn; the iterations in `skipped` had an overflow, so that
# DeepSpeed did not step it, though their tokens count. `lr` is that of each iteration, `state` the last.
TOKENS = json.loads((Path(__file__).resolve().parents[3] / "golden" / "upstream_token_schedules.json").read_text())


def token_schedule(case: dict[str, Any]) -> OptimizerParamScheduler:
    settings = dict(case["settings"])
    train_samples = settings.pop("train_samples", None)
    training = TrainingConfig(
        micro_batch_size=1,
        train_iters=TOKENS["train_iters"],
        global_batch_size=TOKENS["global_batch_size"],
        train_samples=train_samples,
    )
    return OptimizerParamScheduler(optimizer(), OptimizerConfig(**settings), training, TOKENS["seq_length"])


@pytest.mark.parametrize("resume_at", [None, 1, 7, 20])
@pytest.mark.parametrize("case", TOKENS["cases"], ids=lambda case: str(case["settings"].values()))
def test_samples_and_tokens_give_upstreams_values(case: dict[str, Any], resume_at: int | None) -> None:
    """Each learning rate is upstream's to the last bit or so, also when a checkpoint is loaded on the way."""
    schedule, found, consumed = token_schedule(case), [], 0
    for iteration, batch in enumerate(case["batches"]):
        if iteration == resume_at:
            state = schedule.state_dict()
            schedule = token_schedule(case)
            schedule.load_state_dict(state)
        found.append(schedule.get_last_lr()[0])
        schedule.begin_iteration(batch, consumed)
        if iteration not in case["skipped"]:
            schedule.step()
        consumed += batch
    assert found == pytest.approx(case["lr"], rel=1e-12)
    assert schedule.state_dict() == pytest.approx(case["state"])


def test_the_whole_schedule_of_the_checkpoint_counts_if_it_is_to() -> None:
    """The length of a decay has no effect in a constant schedule, and one in the checkpoint's."""
    theirs = scheduler(lr_decay_style="cosine", lr_decay_iters=30)
    mine = scheduler(lr_decay_style="constant", lr_decay_iters=40, use_checkpoint_opt_param_scheduler=True)
    mine.load_state_dict(theirs.state_dict())
    assert mine.state_dict() == theirs.state_dict()
