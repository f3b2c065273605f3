"""--torch-compile in trainings: upstream's losses, a resume to the last bit, and a restart that compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.parallel.topology import Layout
from tests.dist.harness import HANGS_S, LLAMA_STYLE, Run, Zygote, records
from tests.dist.test_upstream_compat import LOSS_TOLERANCE, UPSTREAM, UPSTREAM_ARGUMENTS, UPSTREAM_LOSSES
from tests.dist.tiny_runs import (
    MODEL,
    NO_DROPOUT,
    TRAINING,
    Launcher,
    assert_same_checkpoint,
    from_iteration,
    losses_of_ranks,
    saving,
)

pytestmark = pytest.mark.slow

LAYOUT = Layout(tp=2, pp=1, dp=1)
COMPILED = [*UPSTREAM_ARGUMENTS, "--sequence-parallel", "--deterministic", "on", "--torch-compile"]
COMPILES_S = 4 * HANGS_S  # g++ runs a dozen times
# What /proc/cpuinfo says of vector instructions is taken as true: torch would compile and load a program for each kind.
ENVIRONMENT = {"TORCH_LOGS": "recompiles", "TORCHINDUCTOR_VEC_ISA_OK": "1"}


@pytest.fixture
def ranks() -> Iterator[Zygote]:
    """Forks ranks that have the compiler imported, too, as those of megatron.launch with --torch-compile."""
    started = Zygote.start(imports=("torch._dynamo.utils", "torch._inductor.compile_fx"))
    yield started
    started.close()


@pytest.mark.nightly(minutes=4)
def test_ranks_that_share_sequences_compile_their_exchange(ranks: Zygote, dataset: list[str], tmp_path: Path) -> None:
    """In fp32 losses near 6 are 5e-7 apart; seen: 5e-7 from those of uncompiled layers."""
    launcher, layout = Launcher(ranks, dataset, tmp_path), Layout(tp=1, pp=1, dp=2)
    flags = [*MODEL, *LLAMA_STYLE, *TRAINING, *NO_DROPOUT, "--train-iters", "4", "--ds-sequence-parallel-size", "2"]
    found = []
    for name, more in (("plain", []), ("compiled", ["--torch-compile"])):
        trace = ["--restart-trace-dir", tmp_path / name / "restart_trace"]
        env = ENVIRONMENT | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        run = launcher.train(layout, *flags, *more, *trace, env=env, timeout=COMPILES_S)
        assert "Recompiling function" not in run.output
        found.append(losses_of_ranks(tmp_path / name, layout)[0])
    assert found[1] == pytest.approx(found[0], abs=5e-6)


def records_of(save: Path, cycle: int, record_type: str) -> list[dict[str, Any]]:
    """Records of a type, one list for both ranks."""
    return [r for r in records(save / "restart_trace") if r["type"] == record_type and r["cycle"] == cycle]


def graphs(save: Path, cycle: int) -> list[tuple[int, int]]:
    """Graphs that each rank compiled and that it found in the cache, in this launch."""
    found = records_of(save, cycle, "runtime")
    assert len(found) == LAYOUT.world_size
    return [(r["compiled_graphs"], r["cached_graphs"]) for r in found]


def test_a_restart_goes_on_bit_for_bit_and_takes_its_graphs_from_the_cache(
    ranks: Zygote, dataset: list[str], tmp_path: Path
) -> None:
    launcher, save, again = Launcher(ranks, dataset, tmp_path), tmp_path / "save", tmp_path / "again"

    def train(directory: Path, *flags: str | Path) -> Run:
        run = launcher.train(
            LAYOUT, *COMPILED, *saving(directory, 3), *flags,
            env=ENVIRONMENT | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}, timeout=COMPILES_S,
        )  # fmt: skip
        assert "Recompiling function" not in run.output, "what was compiled before the first step did not serve"
        return run

    train(save, "--load", UPSTREAM, "--warmup-communicators")
    for found in losses_of_ranks(save, LAYOUT):
        assert found == pytest.approx(UPSTREAM_LOSSES, abs=LOSS_TOLERANCE)
    spans = [r for r in records_of(save, 0, "span") if r["phase"] == "compile"]
    assert sorted(span["rank"] for span in spans) == list(range(LAYOUT.world_size))
    begun = {r["rank"]: r["start_ns"] for r in spans}
    warmed = [r for r in records_of(save, 0, "span") if r["phase"] == "warmup"]
    assert {r["rank"] for r in warmed} == begun.keys()
    assert all(r["end_ns"] <= begun[r["rank"]] for r in warmed), "the groups of layers connect before these compute"

    run = train(again, "--load", save, "--load-tag", "global_step6")
    assert "taken from the cache in" in run.log(0)
    assert losses_of_ranks(again, LAYOUT) == from_iteration(losses_of_ranks(save, LAYOUT), 7)
    assert_same_checkpoint(again / "global_step10", save / "global_step10")
    first = graphs(save, 0)
    assert {compiled + cached for compiled, cached in first} == {2}, "one for each direction"
    # Ranks share a cache: each graph is compiled at least once, and one may find what the other has compiled meanwhile.
    assert sum(compiled for compiled, _ in first) >= 2
    assert graphs(again, 0) == [(0, 2)] * LAYOUT.world_size
