"""--warmup-communicators: after it, a first step finds every connection that it needs. --warmup-kernels: a training of
the same bits.

Gloo usually connects a group as it is created. With TORCH_GLOO_LAZY_INIT it leaves that to the first use of each pair
of ranks, as NCCL does, so that the same flag can be seen to work with real processes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.parallel.topology import Layout
from tests.dist.harness import EXPERTS, LLAMA_STYLE, Zygote, records
from tests.dist.tiny_runs import (
    DROPOUT,
    MODEL,
    NO_DROPOUT,
    RECOMPUTE,
    TRAINING,
    Launcher,
    assert_same_checkpoint,
    losses_of_ranks,
    saving,
)

SCRIPT = str(Path(__file__).with_name("scripts") / "first_step_connections.py")
LAYOUT = Layout(tp=2, pp=2, dp=2)
RUN = [*MODEL, *LLAMA_STYLE, *TRAINING, *NO_DROPOUT, "--bf16", "--train-iters", "4", "--exit-interval", "1"]


@pytest.fixture(scope="module")
def launcher(zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(zygote, dataset, tmp_path_factory.mktemp("warmup"))


def first_step(launcher: Launcher, directory: Path, *flags: str) -> list[int]:
    """Connections that each rank's first step opened."""
    directory.mkdir()
    run = launcher.run(
        LAYOUT, *RUN, *flags, "--restart-trace-dir", directory / "trace", script=SCRIPT,
        env={"OUT": str(directory), "TORCH_GLOO_LAZY_INIT": "1"},
    )  # fmt: skip
    assert run.ok, run.output
    counted = [json.loads((directory / f"rank_{rank}.json").read_text()) for rank in range(LAYOUT.world_size)]
    return [after - before for before, after in counted]


def warmed_up(directory: Path) -> set[str]:
    """Details of the phase in the trace."""
    spans = (r for r in records(directory / "trace") if r["type"] == "span" and r["phase"] == "warmup")
    return {span["detail"] for span in spans}


def test_a_first_step_opens_no_connection_after_the_warmup(launcher: Launcher, tmp_path: Path) -> None:
    assert all(opened > 0 for opened in first_step(launcher, tmp_path / "cold"))
    assert not warmed_up(tmp_path / "cold")
    assert first_step(launcher, tmp_path / "warm", "--warmup-communicators") == [0] * LAYOUT.world_size
    assert warmed_up(tmp_path / "warm") == {"world", "tensor", "pipeline", "data", "model", "point_to_point"}


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout(tp=2, pp=2, dp=1), [*LLAMA_STYLE, "--sequence-parallel", *RECOMPUTE, "--bf16"]),
        (Layout(tp=1, pp=1, dp=2), ["--fp16", "--eod-mask-loss", "--ds-sequence-parallel-size", "2"]),
        (Layout(tp=1, pp=1, dp=1), [*EXPERTS, "--bf16"]),
    ],
)
def test_kernels_are_warmed_up_without_a_trace_in_the_training(
    launcher: Launcher, tmp_path: Path, layout: Layout, flags: list[str]
) -> None:
    """With dropout, whose random numbers depend on what was drawn before."""
    argv = [*MODEL, *TRAINING, *DROPOUT, *flags, "--train-iters", "3"]
    cold, warm = tmp_path / "cold", tmp_path / "warm"
    launcher.train(layout, *argv, *saving(cold, 3))
    launcher.train(layout, *argv, *saving(warm, 3), "--warmup-kernels")
    assert losses_of_ranks(warm, layout) == losses_of_ranks(cold, layout)
    assert_same_checkpoint(warm / "global_step3", cold / "global_step3")
    spans = [r for r in records(warm / "restart_trace") if r["type"] == "span" and r["phase"] == "warmup"]
    assert sorted(span["rank"] for span in spans) == list(range(layout.world_size))
    assert {span["detail"] for span in spans} == {"kernels"}
