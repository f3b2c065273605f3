"""A resume with other flags than those of the run that saved: applied, refused or logged, never ignored.

tests/dist/test_resuming_table.py has every flag and what is said of it; here is what comes of some of them.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.parallel.topology import Layout
from tests.dist.harness import LLAMA_STYLE, Zygote
from tests.dist.tiny_runs import MODEL, NO_DROPOUT, SINGLE, TRAINING, Launcher, load_file, losses_of_ranks, saving

RUN = [*MODEL, *LLAMA_STYLE, *TRAINING, *NO_DROPOUT, "--bf16", "--train-iters", "4"]
REPLICAS = Layout(tp=1, pp=1, dp=2)
# A learning rate that changes no loss: what a step reads is all that tells the steps apart.
STILL = [
    *MODEL, *LLAMA_STYLE, *NO_DROPOUT, "--micro-batch-size", "1", "--lr", "1e-12", "--lr-decay-style", "constant",
    "--train-iters", "6",
]  # fmt: skip


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


@pytest.fixture(scope="module")
def saved(zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after 2 of 4 iterations."""
    save = tmp_path_factory.mktemp("saved") / "run"
    Launcher(zygote, dataset, save.parent).train(SINGLE, *RUN, *saving(save, 2)[:-1], "--exit-interval", "2")
    return save


def told(log: str) -> list[str]:
    """What a resume says of changed flags."""
    return re.findall(r"WARNING: changed on resume: (.*)", log)


def shard_of(checkpoint: Path, precision: str = "bf16_") -> dict[str, Any]:
    path = checkpoint / f"{precision}zero_pp_rank_0_mp_rank_00_optim_states.pt"
    return load_file(path)["optimizer_state_dict"]


@pytest.mark.parametrize("layout", [SINGLE, REPLICAS], ids=["plain", "direct"])
def test_hyper_parameters_of_the_optimizer_are_applied(launcher: Launcher, saved: Path, layout: Layout) -> None:
    out = launcher.directory / "out"
    run = launcher.train(
        layout, *RUN, *saving(out, 4)[:-1], "--load", saved,
        "--adam-beta1", "0.8", "--adam-beta2", "0.9", "--adam-eps", "1e-7", "--clip-grad", "0.5",
    )  # fmt: skip
    shard = shard_of(out / "global_step4")
    for group in shard["base_optimizer_state"]["param_groups"]:
        assert (tuple(group["betas"]), group["eps"]) == ((0.8, 0.9), 1e-7)
    assert shard["clip_grad"] == 0.5
    lines = told(run.log(0))
    assert [line.split(":")[0] for line in lines] == [
        "--clip-grad 1.0 -> 0.5", "--adam-beta1 0.9 -> 0.8", "--adam-beta2 0.999 -> 0.9", "--adam-eps 1e-08 -> 1e-07",
    ]  # fmt: skip
    assert "changed on resume" not in "".join(run.log(rank) for rank in range(1, layout.world_size))


def test_nothing_is_told_of_a_resume_with_the_same_flags(launcher: Launcher, saved: Path) -> None:
    run = launcher.train(SINGLE, *RUN, "--load", saved)
    assert "resumed from iteration 2" in run.output and "changed on resume" not in run.output


def test_another_optimizer_without_the_state_of_the_first(launcher: Launcher, saved: Path) -> None:
    """Weights alone fit any optimizer; what it saves is refused by Adam in turn."""
    out = launcher.directory / "out"
    sgd = [*RUN, "--optimizer", "sgd", "--sgd-momentum", "0.5"]
    first = launcher.train(SINGLE, *sgd, *saving(out, 4)[:-1], "--load", saved, "--no-load-optim")
    assert "resumed from iteration 2" in first.output
    refused = launcher.run(SINGLE, *RUN, "--load", out)
    assert "error: --optimizer adam: " in refused.output and "was saved with --optimizer sgd" in refused.output
    again = launcher.train(
        SINGLE, *RUN, "--optimizer", "sgd", "--sgd-momentum", "0.6", *saving(out, 1)[:-1], "--load", out,
        "--train-iters", "5", "--override-opt_param-scheduler",
    )  # fmt: skip
    assert [line.split(":")[0] for line in told(again.output)] == ["--sgd-momentum 0.5 -> 0.6"]
    groups = shard_of(out / "global_step5")["base_optimizer_state"]["param_groups"]
    assert {group["momentum"] for group in groups} == {0.6}


def test_evaluation_that_the_first_launch_had_none_of(launcher: Launcher, dataset: list[str]) -> None:
    """The checkpoint keeps how many samples the index was built for: none, of a split that was not read then."""
    save = launcher.directory / "save"
    run = [*RUN, "--split", "80,20,0"]
    launcher.train(SINGLE, *run, *saving(save, 2)[:-1], "--exit-interval", "2")
    resumed = launcher.train(SINGLE, *run, "--load", save, "--eval-iters", "1", "--eval-interval", "1")
    assert re.findall(r"validation loss at iteration (\d+)", resumed.output) == ["3", "4", "4"]


def test_another_global_batch_neither_repeats_nor_skips_samples(launcher: Launcher) -> None:
    whole, resumed = launcher.directory / "whole", launcher.directory / "resumed"
    launcher.train(SINGLE, *STILL, *saving(whole, 2), "--global-batch-size", "4", "--train-iters", "4")
    launcher.train(
        SINGLE, *STILL, *saving(resumed, 6), "--global-batch-size", "2", "--load", whole, "--load-tag", "global_step2"
    )
    by_four, by_two = losses_of_ranks(whole, SINGLE)[0], losses_of_ranks(resumed, SINGLE)[0]
    assert list(by_two) == [3, 4, 5, 6]
    assert abs(by_two[3] - by_two[4]) > 1e-3  # samples differ, so that the means below say something
    assert (by_two[3] + by_two[4]) / 2 == pytest.approx(by_four[3], abs=1e-5)
    assert (by_two[5] + by_two[6]) / 2 == pytest.approx(by_four[4], abs=1e-5)
    state = load_file(resumed / "global_step6" / "mp_rank_00_model_states.pt")
    assert (state["args"].consumed_train_samples, state["iteration"]) == (16, 6)


def test_schedule_that_begins_anew(launcher: Launcher, saved: Path) -> None:
    """With --no-load-lr-state the very first step is at the beginning of the warm-up, where nothing moves."""
    out = launcher.directory / "out"
    launcher.train(SINGLE, *RUN, *saving(out, 1)[:-1], "--load", saved, "--no-load-lr-state", "--exit-interval", "3")
    masters = [
        shard_of(where)["single_partition_of_fp32_groups"] for where in (saved / "global_step2", out / "global_step3")
    ]
    assert all(torch.equal(before, after) for before, after in zip(*masters, strict=True))


def test_loss_scale(launcher: Launcher) -> None:
    """The scale goes on where it was; how it moves is the command line's."""
    save, out, static = (launcher.directory / name for name in ("save", "out", "static"))
    run = [*MODEL, *LLAMA_STYLE, *TRAINING, *NO_DROPOUT, "--fp16", "--train-iters", "4"]
    launcher.train(SINGLE, *run, *saving(save, 2)[:-1], "--exit-interval", "2", "--initial-loss-scale", "1024")
    changed = launcher.train(
        SINGLE, *run, *saving(out, 4)[:-1], "--load", save, "--initial-loss-scale", "64",
        "--loss-scale-window", "7", "--hysteresis", "3", "--min-loss-scale", "2",
    )  # fmt: skip
    scaler = shard_of(out / "global_step4", "")["loss_scaler"]
    assert (scaler.cur_scale, scaler.scale_window, scaler.delayed_shift, scaler.min_scale) == (1024, 7, 3, 2)
    lines = {line.split()[0]: line for line in told(changed.output)}
    assert list(lines) == ["--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis"]
    assert "no effect" in lines["--initial-loss-scale"]
    launcher.train(
        SINGLE, *run, *saving(static, 4)[:-1], "--load", save, "--loss-scale", "8", "--initial-loss-scale", "1024"
    )
    shard = shard_of(static / "global_step4", "")
    assert (shard["loss_scaler"].cur_scale, shard["loss_scaler"].dynamic, shard["dynamic_loss_scale"]) == (
        8, False, False,
    )  # fmt: skip


def copied(dataset: list[str], directory: Path) -> list[str]:
    """The fixture's flags with copies of the dataset and the tokenizer in `directory`."""
    flags = list(dataset)
    for flag, endings in (("--data-path", (".bin", ".idx")), ("--tokenizer-model", ("",))):
        at = flags.index(flag) + 1
        for ending in endings:
            shutil.copy(flags[at] + ending, directory / (Path(flags[at]).name + ending))
        flags[at] = str(directory / Path(flags[at]).name)
    return flags


def test_content_of_files_and_not_their_paths_is_compared(zygote: Zygote, dataset: list[str], tmp_path: Path) -> None:
    """A dataset and a tokenizer that were moved are the same; one that is made again in its place is another."""
    save, old, new = (tmp_path / name for name in ("save", "old", "new"))
    for directory in (old, new):
        directory.mkdir()
    at_old, at_new = copied(dataset, old), copied(dataset, new)
    first = Launcher(zygote, at_old, tmp_path)
    first.train(SINGLE, *RUN, *saving(save, 2)[:-1], "--exit-interval", "2")
    moved = Launcher(zygote, at_new, tmp_path).train(SINGLE, *RUN, "--load", save, "--exit-interval", "3")
    assert told(moved.output) == []
    prefix = old / Path(at_old[1]).name
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[:64] = content[64:128]  # other tokens of the same lengths
    Path(f"{prefix}.bin").write_bytes(content)
    (line,) = told(first.train(SINGLE, *RUN, "--load", save, "--exit-interval", "3").output)
    assert line.startswith(f"--data-path {prefix} has another content than before: training continues at sample 8 of")
