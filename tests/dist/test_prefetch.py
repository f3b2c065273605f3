"""A real resume with --prefetch-on-start: the same training, and each byte counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.parallel.topology import Layout
from tests.dist.harness import LLAMA_STYLE, Zygote, records
from tests.dist.tiny_runs import MODEL, NO_DROPOUT, TRAINING, Launcher, from_iteration, losses_of_ranks, saving
from tests.unit.megatron.checkpointing.preflight.test_prefetch import forget

REPLICAS = Layout(tp=1, pp=1, dp=2)
FLAGS = [*MODEL, *LLAMA_STYLE, *TRAINING, *NO_DROPOUT, "--bf16", "--train-iters", "4"]
PAGES = 64 << 10  # what is read ahead is counted in pages


def reads(save: Path, rank: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """Spans of `read` of the load on a rank: those that blocked, the others; and the bytes of the operation."""
    found = [r for r in records(save / "restart_trace", rank=rank) if r.get("operation") == "load"]
    spans = [r for r in found if r["type"] == "span" and r.get("detail") == "read" and r.get("bytes")]
    (end,) = [r for r in found if r["type"] == "operation_end"]
    return [r for r in spans if r["blocking"]], [r for r in spans if not r["blocking"]], end["bytes"]


@pytest.mark.parametrize("engine", ["torch", "lazy"])
def test_a_resume_that_reads_ahead_trains_on_as_without(
    zygote: Zygote, dataset: list[str], tmp_path: Path, engine: str
) -> None:
    launcher = Launcher(zygote, dataset, tmp_path)
    flags = [*FLAGS, "--checkpoint-engine", engine]
    whole = tmp_path / "whole"
    launcher.train(REPLICAS, *flags, *saving(whole, 2))
    resuming = ["--load", str(whole), "--load-tag", "global_step2"]
    for name, more in (("plain", []), ("ahead", ["--prefetch-on-start"])):
        for path in (whole / "global_step2").iterdir():
            forget(path)
        run = launcher.train(REPLICAS, *flags, *saving(tmp_path / name, 2), *resuming, *more)
        assert losses_of_ranks(tmp_path / name, REPLICAS) == from_iteration(losses_of_ranks(whole, REPLICAS), 3)
        assert ("--prefetch-on-start: " in run.output) == bool(more)
    for rank in range(REPLICAS.world_size):
        expected, none, total = reads(tmp_path / "plain", rank)
        blocking, ahead, same = reads(tmp_path / "ahead", rank)
        assert not none and ahead and total == same
        assert {r["thread"] for r in ahead} == {"prefetch"} and all(r["file"] for r in ahead)
        load_began = min(r["end_ns"] for r in blocking) if blocking else float("inf")
        assert min(r["start_ns"] for r in ahead) < load_began
        counted = sum(r["bytes"] for r in [*blocking, *ahead])
        assert abs(counted - sum(r["bytes"] for r in expected)) < PAGES
