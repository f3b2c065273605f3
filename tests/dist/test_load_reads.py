"""What the ranks of a load ask storage for, against the bytes of the checkpoint, in a real training's trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.parallel.topology import Layout
from tests.dist.harness import LLAMA_STYLE, Zygote
from tests.dist.tiny_runs import MODEL, NO_DROPOUT, TRAINING, Launcher, buffered_saving
from tests.object_storage import BUCKET, serving
from tests.unit.megatron.checkpointing.preflight.test_prefetch import forget
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.metrics.load_reads import LoadReads
from tools.ckpt_analysis.report import analyse

SAVED = Layout(tp=1, pp=1, dp=4)
FLAGS = [*MODEL, *LLAMA_STYLE, *TRAINING, *NO_DROPOUT, "--bf16", "--train-iters", "2", "--lr-warmup-iters", "1"]
FLAG = "--ckpt-fully-parallel-load"
WEIGHTS = 2 / 14  # of the bytes of a checkpoint: bf16 beside an fp32 master and two moments
HEADERS = 0.2  # and what else is small, in a tiny model; a byte of the weights that is read thrice more is 0.43


def reads_of(save: Path) -> LoadReads:
    """Of the last load in the trace of the run that saves to `save`."""
    found = analyse(load_trace(save / "restart_trace")).report.loads[-1].reads
    assert found is not None
    return found


# A file of each rank is read by the code that reads one of several, and less of it by each.
@pytest.fixture(
    scope="module",
    params=["torch", pytest.param("lazy", marks=pytest.mark.nightly(minutes=1)), "lazy --checkpoint-files-per-node 1"],
)
def saved(
    request: pytest.FixtureRequest, zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Launcher, list[str]]:
    """A launcher, and flags: of the engine that saved a checkpoint on four replicas to its directory `saved`."""
    engine = request.param.split()
    launcher = Launcher(zygote, dataset, tmp_path_factory.mktemp("_".join(engine)))
    flags = [*FLAGS, "--checkpoint-engine", *engine]
    launcher.train(SAVED, *flags, *buffered_saving(launcher.directory / "saved", 2))
    return launcher, flags


def amplification(saved: tuple[Launcher, list[str]], layout: Layout, name: str, *more: str) -> float:
    """Of a load of the checkpoint on `layout`."""
    launcher, flags = saved
    save = launcher.directory / name
    resuming = ["--load", str(launcher.directory / "saved"), "--exit-on-missing-checkpoint"]
    launcher.train(layout, *flags, *buffered_saving(save, 2), *resuming, *more)
    return reads_of(save).amplification


def test_each_replica_reads_all_weights(saved: tuple[Launcher, list[str]]) -> None:
    """Beside its own part of masters and moments."""
    assert amplification(saved, SAVED, "same") == pytest.approx(1 + 3 * WEIGHTS, abs=HEADERS)


@pytest.mark.parametrize("ahead", [[], ["--prefetch-on-start"]], ids=["", "ahead"])
def test_replicas_that_exchange_weights_read_each_once(saved: tuple[Launcher, list[str]], ahead: list[str]) -> None:
    """What is read ahead counts as well."""
    for path in (saved[0].directory / "saved/global_step2").iterdir():
        forget(path)
    found = amplification(saved, SAVED, "".join(["exchanged", *ahead]), FLAG, *ahead)
    assert found == pytest.approx(1, abs=HEADERS)


def test_replicas_that_exchange_weights_ask_a_store_for_each_once(
    zygote: Zygote, dataset: list[str], tmp_path: Path
) -> None:
    launcher, loads = Launcher(zygote, dataset, tmp_path), {}
    uri = f"s3://{BUCKET}/run"
    flags = [*FLAGS, "--checkpoint-engine", "lazy", *buffered_saving(tmp_path, 2), "--save", uri]
    with serving() as server:
        env = server.environment()
        launcher.train(SAVED, *flags, "--restart-trace", "off", env=env)
        for name, more in (("plain", []), ("exchanged", [FLAG])):
            trace = ["--restart-trace-dir", str(tmp_path / name / "restart_trace")]
            launcher.train(SAVED, *flags, "--load", uri, "--exit-on-missing-checkpoint", *trace, *more, env=env)
            loads[name] = reads_of(tmp_path / name)
    spared = loads["plain"].amplification - loads["exchanged"].amplification  # headers take more than tiny tensors
    assert spared == pytest.approx(3 * WEIGHTS, abs=HEADERS)


@pytest.mark.parametrize(
    "layout", [Layout(1, 1, 2), pytest.param(Layout(1, 2, 2), marks=pytest.mark.nightly(minutes=1))], ids=str
)
def test_another_layout_reads_no_weights(saved: tuple[Launcher, list[str]], layout: Layout) -> None:
    """It makes them of the masters, each of which one rank reads. (Another TP splits the rows of matrices, and a rank
    reads along what lies between its parts of short rows.)"""
    found = amplification(saved, layout, f"tp{layout.tp}_pp{layout.pp}_dp{layout.dp}")
    assert found == pytest.approx(1 - WEIGHTS, abs=HEADERS)


def test_another_layout_reads_each_weight_once(saved: tuple[Launcher, list[str]]) -> None:
    assert amplification(saved, Layout(1, 1, 2), "weights", "--no-load-optim") == pytest.approx(WEIGHTS, abs=HEADERS)
