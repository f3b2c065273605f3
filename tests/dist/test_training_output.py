"""What training prints in upstream's form, writes to TensorBoard, and when it stops early. Real ranks."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
from pathlib import Path

import pytest

from megatron.parallel.topology import Layout
from tests.dist.harness import LLAMA_STYLE, Zygote, losses, records, wait_for
from tests.dist.tiny_runs import MODEL, NO_DROPOUT, TRAINING, Launcher

TWO_STAGES = Layout(tp=1, pp=2, dp=1)
FLAGS = [*MODEL, *TRAINING, *NO_DROPOUT, *LLAMA_STYLE, "--bf16", "--max-position-embeddings", "32"]
ITERATION = re.compile(
    r"^ iteration +(\d+)/ +4 \| consumed samples: +(\d+) \| consumed tokens: +(\d+) \| "
    r"elapsed time per iteration \(ms\): [\d.]+ \| learning rate: (\S+) \| global batch size: +4 \| "
    r"lm loss: (\S+) \| grad norm: [\d.]+ \| actual seqlen: +32 \| number of skipped iterations: +0 \| "
    r"number of nan iterations: +0 \| samples per second: [\d.]+ \| "
    r"tokens per gpu per second \(tgs\): [\d.]+ \| TFLOPs: [\d.]+ \|$",
    re.MULTILINE,
)


@pytest.fixture()
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


def test_iteration_lines_evaluation_and_tensorboard(launcher: Launcher, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board, trace = tmp_path / "board", tmp_path / "trace"
    run = launcher.train(
        TWO_STAGES, *FLAGS, "--train-iters", "4", "--split", "80,10,10", "--eval-iters", "2", "--eval-interval", "2",
        "--tensorboard-dir", board, "--log-validation-ppl-to-tensorboard", "--restart-trace-dir", trace,
    )  # fmt: skip
    printed = run.log(rank=1)  # the last stage prints
    lines = ITERATION.findall(printed)
    assert [(int(i), int(samples), int(tokens)) for i, samples, tokens, _, _ in lines] == [
        (n, 4 * n, 4 * n * 32) for n in (1, 2, 3, 4)
    ]
    recorded = losses(trace, rank=1)
    assert [float(line[4]) for line in lines] == pytest.approx([recorded[n] for n in (1, 2, 3, 4)], rel=1e-6)
    assert float(lines[0][3]) == 5e-4  # as upstream, what the next iteration will use: half-way through 2 of warm-up
    assert not ITERATION.search(run.log(rank=0))

    found = re.findall(
        r"^ (validation|test) loss at (.+?) \| lm loss value: (\S+) \| lm loss PPL: (\S+) \| $", printed, re.M
    )
    assert [(split, at) for split, at, _, _ in found] == [
        ("validation", "iteration 2"), ("validation", "iteration 4"), ("validation", "iteration 4"),
        ("test", "iteration 4"),
    ]  # fmt: skip
    assert all(2.0 < float(loss) < 8.0 for _, _, loss, _ in found)

    events = EventAccumulator(str(board)).Reload()
    points = {point.step: point.value for point in events.Scalars("lm-loss-training/lm loss")}
    assert points == pytest.approx(recorded)
    assert {"learning-rate/learning-rate", "lm-loss-validation/lm loss validation ppl"} <= set(events.Tags()["scalars"])


def test_log_interval_averages(launcher: Launcher, tmp_path: Path) -> None:
    run = launcher.train(
        Layout(1, 1, 1), *FLAGS, "--train-iters", "4", "--log-interval", "2", "--restart-trace-dir", tmp_path / "trace"
    )
    lines = ITERATION.findall(run.log())
    assert [int(line[0]) for line in lines] == [2, 4]
    recorded = losses(tmp_path / "trace")
    assert float(lines[0][4]) == pytest.approx((recorded[1] + recorded[2]) / 2, rel=1e-6)


def test_profile_of_the_chosen_steps_and_ranks(launcher: Launcher, tmp_path: Path) -> None:
    """Steps are those of the launch: a file has the name of its iterations. A run that ends before has a file, too."""
    trace = tmp_path / "trace"
    flags = [*FLAGS, "--restart-trace-dir", trace, "--profile", "pt", "--profile_steps", "2,3", "--profile-ranks", "1"]
    flags += ["--lr-decay-iters", "6"]
    saving = ["--save", tmp_path / "save", "--load", tmp_path / "save", "--save-interval", "100"]
    launcher.train(TWO_STAGES, *flags, *saving, "--train-iters", "4")
    launcher.train(TWO_STAGES, *flags, *saving, "--train-iters", "6")
    first, second = sorted(trace.glob("profile_*"))
    assert [first.name, second.name] == [
        "profile_rank_00001_iterations_2-3.json.gz", "profile_rank_00001_iterations_6-6.json.gz"
    ]  # fmt: skip
    products = [profiled_products(path) for path in (first, second)]
    assert products[0] == 2 * products[1] > 0
    assert not list(trace.glob(".profile*"))


def profiled_products(path: Path) -> int:
    """How many matrix products are in a profile."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return sum(event.get("name") == "aten::mm" for event in events)


def test_exit_interval_saves_and_stops(launcher: Launcher, tmp_path: Path) -> None:
    save = tmp_path / "save"
    run = launcher.train(
        Layout(1, 1, 1), *FLAGS, "--train-iters", "9", "--exit-interval", "3", "--save", save, "--save-interval", "100",
        "--deterministic", "on",
    )  # fmt: skip
    assert "stopping after iteration 3: --exit-interval 3" in run.log()
    assert (save / "latest").read_text() == "global_step3"


def test_exit_duration_saves_and_stops(launcher: Launcher, tmp_path: Path) -> None:
    save = tmp_path / "save"
    run = launcher.train(
        TWO_STAGES, *FLAGS, "--train-iters", "100000", "--exit-duration-in-mins", "0.01",
        "--save", save, "--save-interval", "100000",
    )  # fmt: skip
    assert "--exit-duration-in-mins 0.01" in run.log()
    assert (save / "latest").exists()


def test_sigterm_to_one_rank_saves_and_stops_all(launcher: Launcher, tmp_path: Path) -> None:
    save = tmp_path / "save"

    def terminate(pids: list[int]) -> None:
        trace = save / "restart_trace"
        started = lambda: any(r["type"] == "iteration" for r in records(trace, rank=1))  # noqa: E731
        wait_for(started, "the first iteration")
        os.kill(pids[1], signal.SIGTERM)

    run = launcher.train(
        TWO_STAGES, *FLAGS, "--train-iters", "100000", "--exit-signal-handler", "--save", save,
        "--save-interval", "100000", during=terminate,
    )  # fmt: skip
    assert "SIGTERM was received" in run.log()
    assert (save / "latest").exists()


def test_trace_off_writes_no_trace_and_changes_no_digit(launcher: Launcher, tmp_path: Path) -> None:
    on, off = tmp_path / "on", tmp_path / "off"
    short = [*FLAGS, "--train-iters", "4", "--save-interval", "4"]
    traced = launcher.train(TWO_STAGES, *short, "--save", on)
    plain = launcher.train(TWO_STAGES, *short, "--save", off, "--restart-trace", "off")
    assert (on / "restart_trace").is_dir()
    assert not (off / "restart_trace").exists()
    assert [m[4] for m in ITERATION.findall(traced.log(1))] == [m[4] for m in ITERATION.findall(plain.log(1))]


def test_activation_checkpointing_variants_agree(launcher: Launcher, tmp_path: Path) -> None:
    layout = Layout(tp=2, pp=1, dp=1)
    recompute = ["--checkpoint-activations", "--deepspeed-activation-checkpointing"]
    variants = {
        "none": [],
        "selective": ["--recompute-granularity", "selective"],
        "recompute": recompute,
        "split": [*recompute, "--partition-activations", "--contigious-checkpointing"],
        "split, in host memory": [*recompute, "--partition-activations", "--checkpoint-in-cpu"],
        "timed": [*recompute, "--synchronize-each-layer", "--profile-backward"],
    }
    found = {}
    for name, flags in variants.items():
        trace = tmp_path / name
        launcher.train(layout, *FLAGS, "--train-iters", "3", *flags, "--restart-trace-dir", trace)
        found[name] = losses(trace)
    assert all(mine == found["none"] for mine in found.values()), found
