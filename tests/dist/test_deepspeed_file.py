"""The keys of a --deepspeed_config file that are handed to DeepSpeed, each seen to act in trainings of real ranks."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron.parallel.topology import Layout
from tests.dist.harness import LLAMA_STYLE, Run, Zygote, losses, records
from tests.dist.tiny_runs import (
    DROPOUT,
    MODEL,
    NO_DROPOUT,
    RECOMPUTE,
    TRAINING,
    Launcher,
    buffered_saving,
    hashes,
    losses_of_ranks,
    saving,
)

FLAGS = [*MODEL, *TRAINING, *NO_DROPOUT, *LLAMA_STYLE, "--max-position-embeddings", "32", "--train-iters", "3"]
DP2, PP2 = Layout(1, 1, 2), Layout(1, 2, 1)
BF16 = {"bf16": {"enabled": True}}
LOGGED = {"log_level": "info", "comms_logger": {"enabled": True, "verbose": True}}


@pytest.fixture()
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


def train(launcher: Launcher, layout: Layout, content: dict[str, Any], *flags: str) -> Run:
    file = launcher.directory / "ds_config.json"
    file.write_text(json.dumps(content))
    return launcher.train(layout, *FLAGS, *flags, "--deepspeed_config", file)


def reductions(launcher: Launcher, content: dict[str, Any]) -> Counter[tuple[str, str]]:
    """(collective, size of its message) of all that DP2 logs -> how often."""
    printed = train(launcher, DP2, LOGGED | content).output
    found = re.findall(r"comm op: (\w+) \|.*?msg size: ([\d.]+ \w+)", printed)
    assert found, printed[-3000:]
    return Counter(found)


def test_what_deepspeed_prints(launcher: Launcher) -> None:
    """The file of the restart studies, with stages: timers, memory, the profile of the iteration that is named."""
    content = BF16 | {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"}, "steps_per_print": 1, "wall_clock_breakdown": True,
        "memory_breakdown": True, "flops_profiler": {"enabled": True},
    }  # fmt: skip
    printed = train(launcher, PP2, content).output
    assert len(re.findall(r"^steps: \d loss: ", printed, re.M)) == 3
    assert "| bwd_microstep: " in printed and "| pipe_send_output: " in printed
    assert "Engine before forward" in printed
    assert printed.count("DeepSpeed Flops Profiler") == 1
    assert "Profile Summary at step 1:" in printed


def test_state_collector_and_monitor(launcher: Launcher, tmp_path: Path) -> None:
    content = BF16 | {
        "log_level": "info", "dump_state": True, "disable_python_gc": True,
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"},
        "tensorboard": {"enabled": True, "output_path": str(tmp_path / "board"), "job_name": "job"},
    }  # fmt: skip
    printed = train(launcher, DP2, content).output
    assert "DeepSpeedEngine:" in printed and "Disabled automatic Python cyclic GC" in printed
    assert len((tmp_path / "csv" / "job" / "Train_Samples_train_loss.csv").read_text().splitlines()) == 4
    assert list((tmp_path / "board" / "job").iterdir())


def test_how_gradients_travel(launcher: Launcher) -> None:
    zero = reductions(launcher, {})
    small = reductions(launcher, {"zero_optimization": {"reduce_bucket_size": 1000}})
    assert sum(small.values()) > sum(zero.values())
    single = reductions(launcher, {"zero_optimization": {"use_multi_rank_bucket_allreduce": False}})
    assert "reduce" in {name for name, _ in single} - {name for name, _ in zero}
    halved = reductions(launcher, {"communication_data_type": "bf16"})
    assert halved != zero and sum(halved.values()) == sum(zero.values())


@pytest.mark.parametrize(
    ("layout", "flags"),
    [(Layout(2, 2, 2), ["--sequence-parallel", *DROPOUT, *RECOMPUTE]), (Layout(1, 1, 1), ["--swiglu"])],
    ids=["tp2_pp2_dp2", "one"],
)
def test_gradients_added_at_once_have_the_same_bits(
    launcher: Launcher, tmp_path: Path, layout: Layout, flags: list[str]
) -> None:
    """Of several micro-batches, with one tied embedding on two stages, or twice in one backward pass."""
    found = []
    for name, content in (("at_once", BF16), ("kept", {"bf16": {"enabled": True, "immediate_grad_update": False}})):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(content))
        words = [*MODEL, *TRAINING, *flags, "--train-iters", "4", "--deepspeed_config", file]
        launcher.train(layout, *words, *buffered_saving(tmp_path / name, 4))
        found.append((losses_of_ranks(tmp_path / name, layout), hashes(tmp_path / name / "global_step4", layout)))
    assert found[0] == found[1]
    assert len(set(found[0][0][0].values())) == 4


@pytest.mark.parametrize("key", ["round_robin_gradients", "parameter_alignment"])
def test_how_parameters_lie_in_the_shards(launcher: Launcher, tmp_path: Path, key: str) -> None:
    """Their order, or the gaps between them, is another; the norms' 6 elements fill no 16 bytes."""
    odd = ["--hidden-size", "6", "--num-attention-heads", "1"]
    shards = []
    for name, zero in (("plain", {}), ("changed", {key: True})):
        train(launcher, DP2, {"zero_optimization": zero}, *odd, *saving(tmp_path / name, 3))
        shards.append(hashes(tmp_path / name / "global_step3", DP2))
    assert shards[0] != shards[1]


def test_the_stanza_of_a_study_names_the_engine_that_runs(launcher: Launcher, tmp_path: Path) -> None:
    for name, stanza, engine in (
        ("none", {"none_ckpt": True}, "NoneEngine"),
        ("snapshot", {"torchsnapshot_ckpt": {"enabled": True}}, "TorchSnapshotEngine"),
        ("writer", {"checkpoint": {"writer": {"type": "PYTHON", "decoupled": True}}}, "FastPersistDecoupledEngine"),
    ):
        train(launcher, Layout(1, 1, 1), BF16 | stanza, *saving(tmp_path / name, 3))
        assert engine in json.dumps(records(tmp_path / name / "restart_trace"))
        assert (tmp_path / name / "latest").exists() == (name != "none")


def test_losses_do_not_depend_on_the_stages_timers(launcher: Launcher, tmp_path: Path) -> None:
    plain = train(launcher, PP2, BF16, "--restart-trace-dir", str(tmp_path / "plain"))
    timed = {"steps_per_print": 1, "wall_clock_breakdown": True, "prescale_gradients": True}
    train(launcher, PP2, BF16 | timed, "--restart-trace-dir", str(tmp_path / "timed"))
    assert plain.ok and losses(tmp_path / "plain") == losses(tmp_path / "timed")
