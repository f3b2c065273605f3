"""Trainings whose length and schedule are counted in samples and tokens, with a growing batch, on real ranks.

One process is the reference for TP2 x PP2 x DP2, which is stopped within the ramp and resumed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron.parallel.topology import Layout
from tests.dist.harness import Zygote, losses
from tests.dist.tiny_runs import MODEL, NO_DROPOUT, SINGLE, Launcher, load_file

ALL_THREE = Layout(tp=2, pp=2, dp=2)
# Batches of 2, 2, 2, 2, then 4, 4, 4: the ramp lasts as long as no more than 7 samples are consumed.
SAMPLES = [
    "--micro-batch-size", "1", "--global-batch-size", "4", "--rampup-batch-size", "2", "2", "7",
    "--train-samples", "21", "--lr-decay-samples", "18", "--lr-warmup-samples", "4", "--lr", "1e-3", "--min-lr", "1e-4",
    "--log-interval", "1",
]  # fmt: skip
# 8 of the 40 positions occur in no sample: the gradient of their rows is exactly zero.
FLAGS = [*MODEL, *NO_DROPOUT, "--max-position-embeddings", "40", "--log-params-norm", "--log-num-zeros-in-grad"]
ZEROS = 8 * 64
STRAY = 10  # an element here or there is zero by chance
LINE = re.compile(
    r"^ iteration +(\d+)/ +7 \| consumed samples: +(\d+) .*learning rate: (\S+) \| global batch size: +(\d+) .*"
    r"num zeros: (\S+) \| params norm: (\S+) \|",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Logged:
    consumed: int
    learning_rate: float
    batch_size: int
    zeros: float
    params_norm: float


def logged(output: str) -> dict[int, Logged]:
    return {
        int(i): Logged(int(consumed), float(lr), int(batch), float(zeros), float(norm))
        for i, consumed, lr, batch, zeros, norm in LINE.findall(output)
    }


def points(board: Path) -> Callable[[str], dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board)).Reload()
    return lambda name: {point.step: point.value for point in events.Scalars(name)}


def board_flags(board: Path) -> list[str | Path]:
    switches = ["batch-size", "optimizer-states", "timers", "world-size", "memory"]
    return ["--tensorboard-dir", board, *(f"--log-{name}-to-tensorboard" for name in switches)]


def test_ramp_schedule_and_norms_are_those_of_one_process(zygote: Zygote, dataset: list[str], tmp_path: Path) -> None:
    launcher = Launcher(zygote, dataset, tmp_path)
    alone, many, board = tmp_path / "alone", tmp_path / "many", tmp_path / "board"
    saved = ["--save-interval", "3", "--save"]
    reference = launcher.train(SINGLE, *FLAGS, *SAMPLES, *saved, alone, *board_flags(board / "alone"))
    expected = logged(reference.log())
    assert [row.batch_size for row in expected.values()] == [2, 2, 2, 2, 4, 4, 4]
    assert [row.consumed for row in expected.values()] == [2, 4, 6, 8, 12, 16, 20]
    middle = 1e-4 + 9e-4 * (1 - (8 - 4) / (18 - 4))  # linear, from 4 samples of warm-up to 18 of decay
    assert [expected[i].learning_rate for i in (1, 2, 4, 7)] == pytest.approx([5e-4, 1e-3, middle, 1e-4], rel=1e-3)
    assert all(ZEROS <= row.zeros < ZEROS + STRAY for row in expected.values())
    weights = [load_file(path) for path in sorted((alone / "global_step7").glob("layer_*"))]
    squares = sum(float(w.double().square().sum()) for layer in weights for w in layer.values())
    assert expected[7].params_norm == pytest.approx(math.sqrt(squares), abs=1e-3)

    run = launcher.train(ALL_THREE, *FLAGS, *SAMPLES, *saved, many, "--exit-interval", "3")
    found = logged(run.log(rank=7))
    resumed = launcher.train(ALL_THREE, *FLAGS, *SAMPLES, *saved, many, "--load", many, *board_flags(board / "many"))
    found |= logged(resumed.log(rank=7))
    assert list(found) == list(expected)
    for i, row in expected.items():
        assert (found[i].batch_size, found[i].consumed) == (row.batch_size, row.consumed)
        assert ZEROS <= found[i].zeros < ZEROS + STRAY
        assert found[i].learning_rate == row.learning_rate
        assert found[i].params_norm == pytest.approx(row.params_norm, abs=2e-3)
    assert losses(many / "restart_trace", None) == pytest.approx(losses(alone / "restart_trace"), rel=1e-4)

    mine, theirs = points(board / "many"), points(board / "alone")
    assert mine("batch-size/batch-size vs samples") == {8: 2, 12: 4, 16: 4, 20: 4}
    assert mine("world-size/world-size")[7] == 8
    assert mine("params-norm/params-norm vs tokens")[640] == pytest.approx(expected[7].params_norm, abs=2e-3)
    for state in ("variance", "variance_sqrt", "momentum", "weight"):
        for figure in ("l2", "l1", "abs_max"):
            name = f"optimizer/{state}_{figure}"
            assert mine(name)[7] == pytest.approx(theirs(name)[7], rel=1e-3), name
    assert theirs("optimizer/weight_l2")[7] == pytest.approx(expected[7].params_norm, abs=1e-3)


def test_tokens_end_a_run_and_its_decay_and_iterations_are_reset(
    zygote: Zygote, dataset: list[str], tmp_path: Path
) -> None:
    launcher = Launcher(zygote, dataset, tmp_path)
    save = tmp_path / "save"
    flags = [
        *MODEL, *NO_DROPOUT, "--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "4",
        "--lr", "1e-3", "--lr-warmup-iters", "1", "--lr-decay-tokens", "384", "--log-interval", "1",
        "--save", save, "--save-interval", "100",
    ]  # fmt: skip
    run = launcher.train(SINGLE, *flags, "--train-iters", "10", "--train-tokens", "260")
    first = losses(save / "restart_trace")
    assert list(first) == [1, 2, 3]  # 128 tokens each: 256 are not enough, 384 are
    rates = [float(text) for text in re.findall(r"learning rate: (\S+)", run.log())]
    assert rates == pytest.approx([1e-3, 1e-3 * (1 - 128 / 384), 1e-3 * (1 - 256 / 384)], rel=1e-3)

    again = launcher.train(
        SINGLE, *flags, "--train-iters", "2", "--load", save, "--reset-iteration", "--no-load-lr-state"
    )
    second = losses(save / "restart_trace", 1)
    assert list(second) == [1, 2] and second[1] < first[1] - 0.01  # the same first batch, with trained weights
    assert "counting iterations and samples from 0" in again.log()
    assert load_file(save / "global_step2" / "mp_rank_00_model_states.pt")["args"].consumed_train_samples == 8
    assert torch.isfinite(torch.tensor(list(second.values()))).all()
