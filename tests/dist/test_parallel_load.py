"""--ckpt-fully-parallel-load: replicas read a part of the weights each and exchange them, to the same bits.

The hashes of --verify-restored-state say so in each load here, and the losses of what is trained from there on.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megatron.parallel.topology import Layout
from tests.dist.harness import LLAMA_STYLE, Run, Zygote, records
from tests.dist.test_damaged_checkpoints import flip_bit
from tests.dist.tiny_runs import (
    MODEL,
    NO_DROPOUT,
    PRECISIONS,
    TRAINING,
    Launcher,
    buffered_saving,
    from_iteration,
    losses_of_ranks,
)
from tests.engines import EXPECTED

SCRIPTS = Path(__file__).parent / "scripts"
FLAG = "--ckpt-fully-parallel-load"
LAYOUT = Layout(tp=1, pp=2, dp=2)
SAVED, LAST = 2, 3
ENGINES = tuple(name for name in EXPECTED if name != "memory")  # which loads from memory
# Read as another that is here; lazy's also after a kill (below).
NIGHTLY = ("dcp-async", "dcp-process", "fastpersist", "fastpersist-decoupled", "lazy")


class Job:
    """Trainings of one engine, with checkpoints after the iterations 2 and 3."""

    def __init__(self, launcher: Launcher, engine: str, *flags: str) -> None:
        self.launcher = launcher
        self.flags = [*MODEL, *TRAINING, *NO_DROPOUT, "--checkpoint-engine", engine, *flags]
        self.save = launcher.directory / "run"
        iters = ["--train-iters", str(LAST), "--lr-decay-iters", "9"]
        self.launcher.train(LAYOUT, *self.flags, *iters, *buffered_saving(self.save, 1))

    def resume(self, name: str, *flags: str, script: str | None = None, env: dict[str, str] | None = None) -> Run:
        """Load the newest checkpoint, or as `flags` say, and train one iteration, with a trace in the directory."""
        iters = ["--train-iters", str(LAST), "--lr-decay-iters", "9"]
        resuming = ["--load", str(self.save), "--exit-on-missing-checkpoint", "--verify-restored-state"]
        trace = ["--restart-trace-dir", str(self.launcher.directory / name / "restart_trace")]
        return self.launcher.run(
            LAYOUT, *self.flags, *iters, *resuming, *trace, FLAG, *flags,
            script=None if script is None else str(SCRIPTS / script), env=env,
        )  # fmt: skip

    def trained_as_before(self, name: str) -> bool:
        found = losses_of_ranks(self.launcher.directory / name, LAYOUT)
        return found == from_iteration(losses_of_ranks(self.save, LAYOUT), LAST)


def job(zygote: Zygote, dataset: list[str], directory: Path, engine: str, *flags: str) -> Job:
    return Job(Launcher(zygote, dataset, directory), engine, *(flags or (*LLAMA_STYLE, "--bf16")))


@pytest.fixture(scope="module")
def lazy(zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job(zygote, dataset, tmp_path_factory.mktemp("lazy"), "lazy")


def spans(job: Job, name: str, rank: int, detail: str) -> int:
    found = records(job.launcher.directory / name / "restart_trace", rank=rank)
    return sum(r.get("operation") == "load" and r["type"] == "span" and r.get("detail") == detail for r in found)


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.nightly(minutes=1) if name in NIGHTLY else ()) for name in ENGINES]
)
def test_the_bits_are_those_that_were_saved(zygote: Zygote, dataset: list[str], tmp_path: Path, engine: str) -> None:
    each = job(zygote, dataset, tmp_path, engine)
    run = each.resume("resumed", "--load-tag", f"global_step{SAVED}")
    assert run.ok, run.output[-6000:]
    assert each.trained_as_before("resumed")
    assert all(spans(each, "resumed", rank, "broadcast") == 1 for rank in range(LAYOUT.world_size))
    assert run.output.count(f"{FLAG}: each replica read a part of the weights and sent it to the others") == 1


# Of fp16 the optimizer is that of fp32.
@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.nightly(minutes=1))])
def test_a_tied_embedding(zygote: Zygote, dataset: list[str], tmp_path: Path, precision: str) -> None:
    """Whose copy on the last stage is in no layer's file."""
    each = job(zygote, dataset, tmp_path, "torch", *PRECISIONS[precision])
    run = each.resume("resumed", "--load-tag", f"global_step{SAVED}")
    assert run.ok, run.output[-6000:]
    assert each.trained_as_before("resumed")


def test_without_the_optimizer(lazy: Job) -> None:
    """The masters are made of the weights, which must be there by then."""
    flags = ["--load-tag", f"global_step{SAVED}", "--no-load-optim"]
    assert lazy.resume("weights", *flags).ok
    plain = ["--load", str(lazy.save), "--restart-trace-dir", str(lazy.launcher.directory / "plain/restart_trace")]
    lazy.launcher.train(LAYOUT, *lazy.flags, "--train-iters", str(LAST), "--lr-decay-iters", "9", *plain, *flags)
    found = [losses_of_ranks(lazy.launcher.directory / name, LAYOUT) for name in ("weights", "plain")]
    assert found[0] == found[1]


def test_what_arrives_otherwise_than_it_was_read_is_read_by_each_rank(lazy: Job) -> None:
    env = {"DISTURBED": "1", "DISTURBANCE": "flip"}
    run = lazy.resume("flipped", "--load-tag", f"global_step{SAVED}", script="disturbed_exchange.py", env=env)
    assert run.ok, run.output[-6000:]
    assert lazy.trained_as_before("flipped")
    assert run.output.count("weights arrived otherwise than they were read (layer_0") == 1
    assert " on rank 1, from rank 0): each rank reads all of its own" in run.log(0)
    assert [line.split(f"{FLAG}: ")[1] for line in run.output.splitlines() if f"{FLAG}: " in line] == [
        "each rank read all of its weights, as some arrived otherwise than they were read"
    ]


@pytest.mark.parametrize(
    "flags",
    [pytest.param([], marks=pytest.mark.nightly(minutes=1)), ["--allow-start-over"]],
    ids=["as it is", "allow start over"],
)
def test_a_rank_that_cannot_apply_its_part_ends_all_with_one_error(lazy: Job, flags: list[str]) -> None:
    """The others have changed their models by then: nothing starts over from those."""
    env = {
        "FAILS_AT": "megatron.checkpointing.load.newest:restore_layers", "FAILS_ON": "1", "FAILS_WITH": "OSError",
    }  # fmt: skip
    run = lazy.resume("failing", *flags, script="failing_rank.py", env=env)
    assert run.exit_codes == [2] * LAYOUT.world_size, run.output[-6000:]
    assert run.output.count("error:") == 1
    assert "rank 1: of rank 1 alone" in run.log(0) and "Parts of one are in the model already" in run.log(0)


@pytest.mark.parametrize(
    ("rank", "function", "what"),
    [
        pytest.param(0, "exchange_layers", "exchange of weights", marks=pytest.mark.nightly(minutes=1)),
        (1, "exchange_layers", "exchange of weights"),
        (1, "restore_tied_weights", "sharing of tied weights"),
    ],
)
def test_an_error_of_one_rank_in_the_exchange_ends_the_others_waits(
    lazy: Job, rank: int, function: str, what: str
) -> None:
    """The limit of these waits is longer than the test may take."""
    env = {
        "FAILS_AT": f"megatron.checkpointing.load.newest:{function}",
        "FAILS_ON": str(rank), "FAILS_WITH": "RuntimeError",
    }  # fmt: skip
    flags = ["--distributed-timeout-minutes", "60"]
    run = lazy.resume(f"failing-{rank}-{function}", *flags, script="failing_rank.py", env=env)
    assert_one_rank_failed(run, LAYOUT.world_size, rank, what)


def assert_one_rank_failed(run: Run, ranks: int, rank: int, what: str) -> None:
    """In the exchange `what`: its error is told once, and the others end by it, not by the limit of their waits."""
    assert run.exit_codes == [1] * ranks, run.output[-6000:]
    cause = f"rank {rank}: the {what} failed: RuntimeError: of rank {rank} alone"
    told = [line for line in run.output.splitlines() if line.startswith(f"error on rank {rank}, ")]
    assert len(told) == 1 and told[0].endswith(cause), run.output[-6000:]
    assert "waited longer than" not in run.output


def test_damaged_weights_make_all_ranks_use_the_checkpoint_before(
    zygote: Zygote, dataset: list[str], tmp_path: Path
) -> None:
    """Damage in the part of one replica, of which the other reads nothing."""
    each = job(zygote, dataset, tmp_path, "torch")
    for path in (each.save / f"global_step{LAST}").glob("layer_01-*"):
        flip_bit(path, path.stat().st_size // 2, bit=4)
    run = each.resume("resumed")
    assert run.ok, run.output[-6000:]
    assert each.trained_as_before("resumed")
    assert run.log(0).count("checkpoint passed over: ") == 1


def test_a_rank_killed_in_the_exchange_ends_all_and_the_next_start_loads(lazy: Job) -> None:
    env = {"DISTURBED": "1", "DISTURBANCE": "kill"}
    tag = ["--load-tag", f"global_step{SAVED}"]
    run = lazy.resume("killed", *tag, script="disturbed_exchange.py", env=env)
    assert run.exit_codes[1] == -signal.SIGKILL and all(run.exit_codes), run.output[-6000:]
    assert lazy.resume("after", *tag).ok
    assert lazy.trained_as_before("after")


def test_one_replica_is_told_that_it_has_no_effect(lazy: Job) -> None:
    alone = Layout(1, 2, 1)
    flags = ["--load", str(lazy.save), "--train-iters", str(LAST + 1), "--lr-decay-iters", "9"]
    run = lazy.launcher.train(alone, *lazy.flags, *flags, FLAG)
    assert "--ckpt-fully-parallel-load: no effect, there is one data-parallel replica" in run.log(0)


def test_a_load_onto_another_layout_is_told_that_it_has_no_effect(lazy: Job) -> None:
    flags = ["--load", str(lazy.save), "--train-iters", str(LAST + 1), "--lr-decay-iters", "9"]
    run = lazy.launcher.train(Layout(1, 1, 2), *lazy.flags, *flags, FLAG)
    assert run.log(0).count("--ckpt-fully-parallel-load: no effect on a load onto another layout") == 1
