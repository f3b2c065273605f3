"""Tied embeddings on two pipeline stages: each has masters of its own, which no layer file holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.parallel.topology import Layout
from tests.dist.harness import Zygote
from tests.dist.tiny_runs import (
    MODEL,
    NO_DROPOUT,
    TRAINING,
    Launcher,
    assert_same_checkpoint,
    buffered_saving,
    from_iteration,
    load_file,
    losses_of_ranks,
)

CLASSIC = [*MODEL, *TRAINING, *NO_DROPOUT]


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


def test_a_resume_is_exact_where_the_stages_round_differently(launcher: Launcher) -> None:
    """Four replicas sum the gradients of the two copies in different orders, so the copies differ in last bits."""
    layout = Layout(tp=1, pp=2, dp=4)
    whole, resumed = launcher.directory / "whole", launcher.directory / "resumed"
    flags = [*CLASSIC, "--train-iters", "6"]
    launcher.train(layout, *flags, *buffered_saving(whole, 3))
    launcher.train(layout, *flags, *buffered_saving(resumed, 3), "--load", whole, "--load-tag", "global_step3")
    assert losses_of_ranks(resumed, layout) == from_iteration(losses_of_ranks(whole, layout), 4)
    assert_same_checkpoint(whole / "global_step6", resumed / "global_step6")


@pytest.mark.parametrize("without", ["--no-load-optim", "--finetune"])
def test_without_the_optimizer_the_last_stage_has_the_weights_too(launcher: Launcher, without: str) -> None:
    """Its masters are made of the weights, so these must be there first: else the first step would zero them."""
    layout = Layout(tp=1, pp=2, dp=2)
    whole, resumed = launcher.directory / "whole", launcher.directory / "resumed"
    slow = ["--lr", "1e-12", "--min-lr", "0", "--lr-warmup-iters", "0", "--override-opt_param-scheduler"]
    launcher.train(layout, *CLASSIC, "--train-iters", "4", *buffered_saving(whole, 2))
    iterations = "6" if without == "--no-load-optim" else "2"
    launcher.train(
        layout, *CLASSIC, *slow, "--train-iters", iterations, *buffered_saving(resumed, 2)[:-1], "--load", whole,
        without,
    )  # fmt: skip
    for dp in range(layout.dp):
        name = f"zero_pp_rank_{dp}_mp_rank_01_optim_states.pt"
        state = load_file(resumed / f"global_step{iterations}" / name)["optimizer_state_dict"]
        masters = state["single_partition_of_fp32_groups"][0]
        assert (masters.abs() < 1e-9).float().mean() < 0.01
