"""megatron.launch over a real training: ranks that are killed go on in place, exactly.

Relaunches of the whole launch are verified and accounted for in test_restart_drill.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron.parallel.topology import Layout
from megatron.processes.standby import WAITS
from restart_trace.clock import now_ns
from tests.dist.async_runs import save_ends
from tests.dist.drill_reports import LEAST_ACCOUNTED
from tests.dist.harness import HANGS_S, ROOT, Zygote, end_all, kill_all, losses, processes_with, records, wait_for
from tests.dist.hold import held_environment
from tests.dist.test_restart_drill import TRAINING
from tests.dist.tiny_runs import Launcher
from tests.object_storage import BUCKET, serving
from tests.own_shm import in_own_shm, left_in_shm
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.model.run_info import cycles_imported_once
from tools.ckpt_analysis.report import analyse

LAUNCHER = [sys.executable, str(ROOT / "megatron" / "launch"), "--nproc-per-node", "2"]
MARK = "LAUNCH_TEST"


def marked(out: Path) -> list[psutil.Process]:
    """Processes of a test's launch."""
    return processes_with(MARK, str(out))


def environment(out: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", MARK: str(out)}


DROPOUT = "--hidden-dropout", "0.1", "--attention-dropout", "0.1"
HELD_AT = 8  # with a save every 5 iterations: 6, 7 and 8 will be trained again
LAST = 18


def all_held(trace: Path, held_at: int = HELD_AT, cycle: int = 0) -> bool:
    """Whether both ranks of a launch have done the last iteration before they wait."""
    return trace.exists() and all(held_at in losses(trace, cycle, rank) for rank in (0, 1))


def spans(trace: Path, cycle: int, phase: str) -> list[dict[str, Any]]:
    """Start-up spans of a phase on rank 1."""
    found = [r for r in records(trace, cycle, 1) if r["type"] == "span" and r["operation"] == "startup"]
    return [r for r in found if r["phase"] == phase]


def start_of(trace: Path, cycle: int) -> tuple[int, int]:
    """(begin of the start-up, start of the process) of rank 1, ns."""
    found = records(trace, cycle, 1)
    (begin,) = [r["start_ns"] for r in found if r["type"] == "operation_begin" and r["operation"] == "startup"]
    return begin, found[0]["process_start_ns"]


KILLED_NS = "killed_ns"  # file of the time at which the ranks were killed


def trained_and_killed(
    tmp_path: Path,
    dataset: list[str],
    *flags: str,
    standby: int = 0,
    held_at: int = HELD_AT,
    without: str = "",
    killed: tuple[int, ...] = (0, 1),
    training: Sequence[str] = TRAINING,
    stored: str = "",
    variables: dict[str, str] | None = None,
    script: Path = ROOT / "pretrain_gpt.py",
) -> Path:
    """The trace of a training whose ranks are killed at `held_at`, when all standby ranks wait, and go on exactly.

    `without`: the checkpoint of the last save, if it is taken away before. `killed`: these ranks, and not all.
    `stored`: --save, if it is in object storage, which these `variables` lead to.
    """
    save, trace = tmp_path / "save", tmp_path / "save" / "restart_trace"
    saving = ["--save", stored or str(save), "--load", stored or str(save), "--verify-restored-state"]
    saving += ["--train-iters", str(LAST), "--restart-trace-dir", str(trace)]
    command = [*LAUNCHER, "--max-restarts", "1", *flags, str(script), *training, *dataset, *saving]

    def that_wait() -> int:
        return sum(process.name() == WAITS for process in marked(tmp_path))

    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            in_own_shm(command, tmp_path / "shm"),
            cwd=tmp_path,
            env=environment(tmp_path)
            | held_environment(cycles=1, after=held_at)
            | {"HELD_RANKS": ",".join(map(str, killed))}
            | (variables or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    saved = held_at // 5 * 5
    try:
        ready = lambda: all_held(trace, held_at) and that_wait() == standby  # noqa: E731
        wait_for(lambda: ready() or job.poll() is not None, f"iteration {held_at}")
        # Some are saved in the background: without it the restart would take one before.
        assert job.poll() is None, (tmp_path / "log").read_text()[-4000:]
        wait_for(lambda: not saved or saved in [end["step"] for end in save_ends(save)], f"the save of step {saved}")
        if without:
            (save / without).rename(tmp_path / without)
        (tmp_path / KILLED_NS).write_text(str(now_ns()))
        kill_all([records(trace, 0, rank)[0]["pid"] for rank in killed])
        assert job.wait(HANGS_S) == 0, (tmp_path / "log").read_text()[-4000:]
        wait_for(lambda: marked(tmp_path) == [], "the end of all processes")
    finally:
        end_all(lambda: marked(tmp_path))
        job.wait(HANGS_S)
    assert left_in_shm(tmp_path / "shm") == []
    before, after = losses(trace, 0, 1), losses(trace, 1, 1)
    repeated = set(before) & set(after)
    resumed = saved - (5 if without else 0)
    assert sorted(before) == list(range(1, held_at + 1)) and sorted(after) == list(range(resumed + 1, LAST + 1))
    assert all(before[step] == after[step] for step in repeated) and repeated == set(range(resumed + 1, held_at + 1))
    return trace


@pytest.mark.slow
@pytest.mark.nightly(minutes=1)  # the suite has those that load ahead, too (below)
def test_standby_ranks_take_the_place_of_those_that_are_killed(tmp_path: Path, dataset: list[str]) -> None:
    assert_taken_over(trained_and_killed(tmp_path, dataset, "--standby", standby=2), tmp_path)


def assert_taken_over(trace: Path, tmp_path: Path) -> None:
    """The second start is that of ranks that were there before the others were killed, and had done what they could."""
    begin, forked = start_of(trace, 1)
    killed = int((tmp_path / KILLED_NS).read_text())
    assert forked < killed < begin, "the start begins with the release of ranks that were there before the failure"
    for phase in ("model_build", "rendezvous", "communicators"):
        assert spans(trace, 1, phase) == [], "what was done ahead is no part of the restart"
    assert records(trace, 1, 1)[0]["environment"]["MEGATRON_STANDBY"]
    assert "MEGATRON_STANDBY" not in records(trace, 0, 1)[0]["environment"]


# Runs pretrain_gpt.py, and notes which modules that has imported.
NOTES_IMPORTS = f"""
import json, os, runpy, sys
before = set(sys.modules)
try:
    runpy.run_path({str(ROOT / "pretrain_gpt.py")!r}, run_name="__main__")
finally:
    with open("imported_" + os.environ["RANK"] + "_" + os.environ["TORCHELASTIC_RESTART_COUNT"], "w") as file:
        json.dump([name for name in sys.modules if name not in before], file)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "engine"),
    [
        (0, "torch"), (1, "lazy"), (0, "memory"), (0, "fastpersist-decoupled"), (1, "dcp-process"),
        *(
            pytest.param(lost, engine, marks=pytest.mark.nightly(minutes=2))
            for lost, engine in [
                (1, "memory"), (0, "lazy-shared"), (0, "fastpersist"), (1, "torchsnapshot"), (0, "dcp"),
                (1, "dcp-async"),
            ]
        ),
    ],
)  # fmt: skip
def test_a_rank_that_lives_goes_on_exactly_in_its_process(
    tmp_path: Path, dataset: list[str], lost: int, engine: str
) -> None:
    """In place of rank 0 or 1 another process comes, in each of two stages; rank 0 owns --save."""
    (tmp_path / "notes.py").write_text(NOTES_IMPORTS)
    flags = ["--pipeline-model-parallel-size", "2", *engine_flags(engine)]
    trace = trained_and_killed(
        tmp_path, [*dataset, *DROPOUT, *flags], "--in-process-restart", "--return-timeout", str(HANGS_S),
        killed=(lost,), script=tmp_path / "notes.py",
    )  # fmt: skip
    pids = [[records(trace, cycle, rank)[0]["pid"] for cycle in (0, 1)] for rank in (0, 1)]
    assert [before == after for before, after in pids] == [rank != lost for rank in (0, 1)]
    began = records(trace, 1, 1 - lost)
    killed = int((tmp_path / KILLED_NS).read_text())
    assert killed < next(r["start_ns"] for r in began if r["type"] == "operation_begin"), "not with the process"
    assert [(records(trace, cycle, rank)[0]["returns"]) for cycle, rank in ((0, 1 - lost), (1, lost))] == [0, 0]
    assert began[0]["returns"] == 1
    report = analyse(load_trace(trace)).report
    (restart,) = report.restarts
    assert (restart.returned_ranks, restart.new_ranks) == ([1 - lost], [lost])
    assert restart.return_s is not None and restart.return_s > 0
    found = [r for r in began if r["type"] == "span" and r["phase"] in ("abort", "return")]
    assert [r.get("detail") for r in found] == [None, "barrier", "undo", "barrier"]
    assert [r["end_ns"] for r in found[:-1]] == [r["start_ns"] for r in found[1:]]
    gaps = [problem for problem in report.problems if problem.kind == "low_coverage"]
    assert [gap.message for gap in gaps if gap.data["coverage"] < LEAST_ACCOUNTED] == []
    assert cycles_imported_once(load_trace(trace).ranks) == {0, 1}
    assert_engine_kept(trace, 1, 1 - lost)
    assert_nothing_imported_again(tmp_path, lost)


def assert_nothing_imported_again(tmp_path: Path, lost: int) -> None:
    """Neither the rank that comes nor the one that returns imports what their launcher could have imported."""
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("imported_*")}
    assert found.keys() == {f"imported_{lost}_1", f"imported_{1 - lost}_0", f"imported_{1 - lost}_1"}
    again = {name for names in found.values() for name in names} - {"megatron.startup.injected_faults"}  # by its flag
    preloaded = ("torch", "deepspeed", "numpy", "megatron", "restart_trace", "botocore", "urllib3", "encodings")
    assert [name for name in sorted(again) if name.startswith(preloaded)] == []


FORMATS = {"lazy-shared": ["--checkpoint-files-per-node", "1"], "lazy-compressed": ["--checkpoint-compression", "zstd"]}


def engine_flags(name: str) -> list[str]:
    """Those of an engine, or of lazy with another format of files."""
    return ["--checkpoint-engine", "lazy" if name in FORMATS else name, *FORMATS.get(name, [])]


@pytest.mark.slow
def test_a_rank_goes_on_exactly_in_its_process_from_object_storage(tmp_path: Path, dataset: list[str]) -> None:
    """Its connections to the store are not shut, which an answer of this one would need longer than that is left."""
    (tmp_path / "notes.py").write_text(NOTES_IMPORTS)
    with serving() as server:
        trained_and_killed(
            tmp_path, [*dataset, *DROPOUT, "--checkpoint-engine", "lazy"], "--in-process-restart",
            "--return-timeout", str(HANGS_S), killed=(1,), stored=f"s3://{BUCKET}/runs/returns",
            variables=server.environment(), script=tmp_path / "notes.py",
        )  # fmt: skip
    trace = tmp_path / "save" / "restart_trace"
    assert records(trace, 0, 0)[0]["pid"] == records(trace, 1, 0)[0]["pid"]
    assert_nothing_imported_again(tmp_path, 1)


# Of DeepSpeed's engine everything that a step changes: pipeline and recomputation, the loss scale, divided experts and
# sequences, and where nothing is loaded that could hide what is left of a step.
KEPT = {
    "tp2-pp2-dp2": (8, (3, 4), HELD_AT, (
        "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel",
        "--checkpoint-activations", "--deepspeed-activation-checkpointing", "--log-num-zeros-in-grad",
    )),
    "fp16": (4, (1,), HELD_AT, ("--pipeline-model-parallel-size", "2", "--fp16", "--initial-loss-scale", "4096")),
    "experts": (2, (0,), HELD_AT, ("--num-experts", "2", "--moe-expert-parallel-size", "2")),
    "sequences": (2, (1,), HELD_AT, ("--ds-sequence-parallel-size", "2", "--warmup-communicators")),
    "cpu-optimizer": (2, (1,), HELD_AT, ("--cpu-optimizer", "--fp16", "--initial-loss-scale", "4096")),
    "no-checkpoint": (2, (1,), 3, ("--pipeline-model-parallel-size", "2")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.nightly(minutes=3)
@pytest.mark.parametrize("case", KEPT)
def test_nothing_of_the_step_that_was_left_is_in_the_engine_that_is_kept(
    tmp_path: Path, dataset: list[str], case: str
) -> None:
    ranks, killed, held_at, flags = KEPT[case]
    training = [flag for flag in TRAINING if "--fp16" not in flags or flag != "--bf16"]
    batches = ["--global-batch-size", "4", "--checkpoint-engine", "lazy"]
    trace = trained_and_killed(
        tmp_path, [*dataset, *DROPOUT, *batches, *flags], "--in-process-restart", "--return-timeout", str(HANGS_S),
        "--nproc-per-node", str(ranks), killed=killed, held_at=held_at, training=training,
    )  # fmt: skip
    for rank in set(range(ranks)) - set(killed):
        assert records(trace, 0, rank)[0]["pid"] == records(trace, 1, rank)[0]["pid"]
        assert_engine_kept(trace, 1, rank)


def assert_engine_kept(trace: Path, cycle: int, rank: int) -> None:
    phases = [(r["phase"], r.get("detail")) for r in records(trace, cycle, rank) if r["type"] == "span"]
    connected = [detail for phase, detail in phases if phase == "communicators"]
    assert connected and not {"tensor", "pipeline", "data", "model"} & set(connected), "groups were made again"


RETURNS = int(os.environ.get("RETURNS", "12"))


def size_of(process: psutil.Process) -> tuple[int, int, int]:
    """Threads, descriptors and bytes of memory."""
    time.sleep(0.01)
    return process.num_threads(), process.num_fds(), process.memory_info().rss


@pytest.mark.slow
@pytest.mark.nightly(minutes=14)
@pytest.mark.parametrize(
    "engine",
    [
        "torch", "lazy", *FORMATS, "memory", "fastpersist", "fastpersist-decoupled", "torchsnapshot", "dcp",
        "dcp-async", "dcp-process",
    ],
)  # fmt: skip
def test_a_process_that_starts_again_and_again_keeps_its_size(tmp_path: Path, dataset: list[str], engine: str) -> None:
    """Its threads, descriptors, memory and helper, while it waits for the rank that is killed next; after the 2nd and
    last.

    RETURNS=100 tries it as often as a process may return by default.
    """
    save, trace = tmp_path / "save", tmp_path / "save" / "restart_trace"
    flags = ["--save", str(save), "--load", str(save), "--train-iters", "1000", "--pipeline-model-parallel-size", "2"]
    flags += engine_flags(engine)
    command = [*LAUNCHER, "--max-restarts", str(RETURNS), "--in-process-restart", "--return-timeout", str(HANGS_S)]
    sizes, helpers = [], []
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            [*command, str(ROOT / "pretrain_gpt.py"), *dataset, *TRAINING, *flags],
            cwd=tmp_path,
            env=environment(tmp_path) | held_environment(cycles=RETURNS + 1, after=6) | {"HELD_RANKS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        for cycle in range(RETURNS + 1):
            # Resumes from the save at 5, 10 and so on; rank 0 is in the iteration after the one that both have done.
            done = 5 * cycle + 6
            wait_for(
                lambda done=done, cycle=cycle: (
                    job.poll() is not None
                    or (all_held(trace, done, cycle) and done - 1 in [end["step"] for end in save_ends(save)])
                ),
                f"iteration {done}",
            )
            assert job.poll() is None, (tmp_path / "log").read_text()[-4000:]
            lives, victim = (psutil.Process(records(trace, cycle, rank)[0]["pid"]) for rank in (0, 1))
            helpers.append([one.pid for one in lives.children() if "import main" in " ".join(one.cmdline())])
            # The smallest of several: a thread of the last save may still remove an old checkpoint.
            sizes.append((lives.pid, *map(min, *(size_of(lives) for _ in range(20)))))
            if cycle < RETURNS:
                victim.kill()
    finally:
        end_all(lambda: marked(tmp_path))
        job.wait(HANGS_S)
    early, late = sizes[2], sizes[RETURNS]
    assert late[:3] == early[:3], "the process, its threads and descriptors"
    assert late[3] - early[3] < max(16, RETURNS // 5) << 20, sizes
    assert helpers[2] == helpers[RETURNS] and len(helpers[2]) == (engine in ("fastpersist-decoupled", "dcp-process"))


@pytest.mark.slow
def test_the_size_of_a_process_is_compared_from_its_first_return_after_a_step_on(
    zygote: Zygote, dataset: list[str], tmp_path: Path
) -> None:
    flags = [*TRAINING, "--train-iters", "1", "--save", tmp_path / "save"]
    script = Path(__file__).with_name("scripts") / "grows.py"
    run = Launcher(zygote, dataset, tmp_path).run(Layout(1, 1, 1), *flags, script=str(script))
    assert run.exit_codes == [1] and "MiB since its first return after a step\n" in run.output, run.output[-4000:]


@pytest.mark.slow
@pytest.mark.nightly(minutes=1)
def test_what_standby_ranks_do_ahead_leaves_no_trace_in_a_training_from_its_beginning(
    tmp_path: Path, dataset: list[str]
) -> None:
    """With random numbers in the step, and no checkpoint yet that would replace what was changed.

    The suite has --finetune (below), of whose checkpoint the restart takes the weights alone.
    """
    flags = "--standby", "--standby-load"
    trained_and_killed(tmp_path, [*dataset, *DROPOUT], *flags, standby=2, held_at=3)


@pytest.mark.slow
def test_standby_ranks_go_on_from_what_they_have_loaded_ahead(tmp_path: Path, dataset: list[str]) -> None:
    """First from iteration 10, which they loaded after that of 5, with replicas that read a part each."""
    flags, divided = ("--standby", "--standby-load"), "--ckpt-fully-parallel-load"
    trace = trained_and_killed(tmp_path, [*dataset, *DROPOUT, divided], *flags, standby=2, held_at=13)
    assert_taken_over(trace, tmp_path)
    (event,) = [r for r in records(trace, 1, 1) if r["type"] == "event" and r["phase"] == "loaded_ahead"]
    assert event["detail"] == "global_step10"
    (told,) = [line for line in (tmp_path / "log").read_text().splitlines() if f"{divided}: " in line]
    assert "each replica read a part of the weights" in told and told.endswith(
        "; standby ranks did that before this start"
    )
    assert not [r for r in records(trace, 1, 1) if r["type"] == "span" and r.get("detail") == "read"]


@pytest.mark.slow
@pytest.mark.nightly(minutes=1)
def test_standby_ranks_load_another_checkpoint_than_the_one_that_they_have_loaded_ahead(
    tmp_path: Path, dataset: list[str]
) -> None:
    """That of iteration 10 is gone when they are released."""
    trace = trained_and_killed(
        tmp_path, [*dataset, *DROPOUT], "--standby", "--standby-load", standby=2, held_at=13, without="global_step10"
    )
    assert not [r for r in records(trace, 1, 1) if r["type"] == "event" and r["phase"] == "loaded_ahead"]
    assert [r for r in records(trace, 1, 1) if r["type"] == "span" and r.get("detail") == "read"]


@pytest.mark.slow
def test_a_checkpoint_that_the_restart_does_not_use_is_not_loaded_ahead(
    tmp_path: Path, zygote: Zygote, dataset: list[str]
) -> None:
    """--finetune of the newest one in --save, killed before the first save: moments loaded ahead would be kept."""
    save = tmp_path / "save"
    flags = [*TRAINING, *DROPOUT, "--save", save, "--train-iters", str(LAST), "--exit-interval", "2"]
    Launcher(zygote, dataset, tmp_path).train(Layout(tp=1, pp=1, dp=2), *flags, "--restart-trace", "off")
    begins = [*dataset, *DROPOUT, "--finetune"]
    trained_and_killed(tmp_path, begins, "--standby", "--standby-load", standby=2, held_at=3)


@pytest.mark.slow
def test_ranks_that_are_killed_go_on_in_place(tmp_path: Path, dataset: list[str]) -> None:
    trace = trained_and_killed(tmp_path, dataset)
    # The first start has the launcher's imports in it, the second has none and begins with the fork.
    begin, forked = start_of(trace, 0)
    first, *_ = spans(trace, 0, "imports")
    assert begin < first["start_ns"] < first["end_ns"] <= forked + 10_000_000 and first["blocking"]
    assert sum(span["duration_ns"] for span in spans(trace, 0, "process_start")) >= forked - first["end_ns"]
    begin, forked = start_of(trace, 1)
    assert begin == forked
