"""Jobs without DeepSpeed, as tutorials show them: what hooks say of them against their own clock and disk."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.net.free_port import free_port
from restart_trace.schema import check_record
from tests.dist.harness import Run, Zygote, records
from tests.dist.job_table import Logs, check_row, clock, covered, enough, matched, operations, sizes
from tests.dist.test_hooks import SCRIPTS, environment, files, lines, losses, trace_command
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.render.json_output import to_dict
from tools.ckpt_analysis.report import analyse

RANKS = 2
WIDTH = 512
# client -> script and its first argument, and the steps up to which it trains in each launch
JOBS: dict[str, tuple[list[str], tuple[int, ...]]] = {
    "path": (["ddp_snapshot.py", "path"], (2, 4)),
    "file": (["ddp_snapshot.py", "file"], (2, 4)),
    "thread": (["ddp_snapshot.py", "thread"], (2,)),
    "save": (["fsdp_checkpoint.py", "save"], (2, 2)),
    "async_save": (["fsdp_checkpoint.py", "async_save"], (2,)),
    "transformers": (["hf_alone.py"], (2, 4)),
    "accelerate": (["accelerate_alone.py"], (2, 4)),
    "lightning": (["lightning_ddp.py"], (2, 4)),
    "save_16bit_model": (["model_export.py", "deepspeed"], (2,)),
    "save_model": (["model_export.py", "trainer"], (2,)),
    "save_model_zero3": (["model_export.py", "trainer_zero3"], (2,)),
    "accelerate_save_model": (["model_export.py", "accelerate"], (2,)),
    "save_pretrained": (["model_export.py", "pretrained"], (2,)),
}
SPAWNING = "spawn_checkpoint.py"
EXPORT = "model_export.py"
UNUSUAL = "unusual_saves.py"
# Most of what lightning imports is torchmetrics; its own modules are hooked as they are imported.
LIBRARIES = (
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "transformers.trainer",
    "transformers.models.llama.modeling_llama", "accelerate", "torchmetrics",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """All launches of a client: `runs` are those with hooks, `plain` the first one without."""

    name: str
    plain: Run
    runs: list[Run]
    directory: Path
    report: dict[str, Any]

    def clock(self, what: str, cycle: int, rank: int = 0) -> list[tuple[int, int]]:
        """(begin, end), monotonic ns, that the client prints of each `what`."""
        return clock(self.runs[cycle].log(rank), what)

    @property
    def logs(self) -> Logs:
        return [[run.log(rank) for rank in range(RANKS)] for run in self.runs]

    def operations(self, kind: str, cycle: int, rank: int = 0) -> list[list[dict[str, Any]]]:
        return operations(self.directory / "trace", kind, cycle, rank)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Zygote]:
    started = Zygote.start(imports=LIBRARIES)
    yield started
    started.close()


def launch(zygote: Zygote, name: str, steps: int, directory: Path, trace_dir: Path | None, width: int = WIDTH) -> Run:
    script, *how = JOBS[name][0]
    words = [str(directory), str(trace_dir or "-"), str(SCRIPTS / script), *how, str(steps)]
    env = {"WIDTH": str(width), "LOCAL_SIZE": str(RANKS)}
    run = zygote.run(words, RANKS, directory.parent / "logs", env=env, script=str(SCRIPTS / "hooked.py"))
    assert run.ok, run.output[-3000:]
    return run


# An open file and Accelerate's own calls end in the torch.save that "path" has, too; test_hooks.py has the Trainer; and
# weights alone are saved by calls that "save_16bit_model" and "save_model" have.
NIGHTLY = ("file", "transformers", "accelerate", "save_model_zero3", "accelerate_save_model", "save_pretrained")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.nightly(minutes=1) if name in NIGHTLY else ()) for name in JOBS],
)
def job(request: pytest.FixtureRequest, ranks: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Job:
    name = request.param
    directory = tmp_path_factory.mktemp(name)
    traced = directory / "traced"
    traced.mkdir()
    first, *later = JOBS[name][1]
    plain = launch(ranks, name, first, traced, None)
    traced.rename(directory / "plain")  # the checkpoints of some name their directory
    traced.mkdir()
    runs = [launch(ranks, name, first, traced, directory / "trace")]
    shutil.copytree(traced, directory / "first")
    runs += [launch(ranks, name, steps, traced, directory / "trace") for steps in later]
    report = to_dict(analyse(load_trace(directory / "trace")).report)
    return Job(name, plain, runs, directory, report)


def test_losses_output_and_files_are_the_same(job: Job) -> None:
    assert losses(job.plain) == losses(job.runs[0])
    assert lines(job.plain) == lines(job.runs[0])
    plain, traced = files(job.directory / "plain"), files(job.directory / "first")
    assert plain.keys() == traced.keys()
    # DCP's metadata is a pickle of sets, whose order is another in each process.
    assert [name for name in plain if plain[name] != traced[name] and not name.endswith(".metadata")] == []


def test_no_hook_is_switched_off_and_the_trace_follows_its_format(job: Job) -> None:
    for run in job.runs:
        assert "switched off" not in run.output and "restart_trace:" not in run.output
    paths = sorted((job.directory / "trace").glob("rank_*.jsonl"))
    assert len(paths) == RANKS * len(job.runs)
    assert [fault for path in paths for record in raw(path) for fault in check_record(record)] == []
    assert [problem["message"] for problem in job.report["problems"]] == []


def raw(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_are_those_that_the_client_prints(job: Job) -> None:
    for cycle, run in enumerate(job.runs):
        for rank in range(RANKS):
            printed = [int(step) for step in re.findall(r"^step (\d+) loss", run.log(rank), re.MULTILINE)]
            seen = [r["step"] for r in records(job.directory / "trace", cycle, rank) if r["type"] == "iteration"]
            before = 2 * cycle if job.name == "save" else 0  # this client counts its steps anew
            assert seen == [before + step for step in printed]


def test_every_start_reaches_its_first_step(job: Job) -> None:
    (launch,) = job.report["launches"]
    assert launch["time_to_first_step_s"] > 0 and launch["finished_ranks"] == RANKS
    for restart in job.report["restarts"]:
        assert restart["time_to_first_step_s"] > 0
        assert (restart["resumed_step"], restart["reached_step"], restart["lost_steps"]) == (2, 2, 0)
    assert job.report["budget"]["training_s"] > 0 and 0 < job.report["budget"]["goodput"] < 1


def test_every_launch_ends_well(job: Job) -> None:
    """So what lies between two launches is no time of the run."""
    for cycle in range(len(job.runs)):
        for rank in range(RANKS):
            (end,) = [r for r in records(job.directory / "trace", cycle, rank) if r.get("phase") == "ended"]
            assert "detail" not in end
    assert (job.report["budget"]["idle_s"] > 0) is (len(job.runs) > 1)


def test_saves_and_loads_are_within_the_clients_own_clock(job: Job) -> None:
    """And they are all that it makes."""
    assert matched(job.directory / "trace", job.logs, "save")
    loads = matched(job.directory / "trace", job.logs, "load")
    assert bool(loads) is (len(job.runs) > 1)


@pytest.fixture(scope="module")
def shares(job: Job, ranks: Zygote) -> list[float | None]:
    """Of the time of all saves, and of all loads, what their phases cover over the ranks.

    They take 5 to 50 ms each, so that a rank that waits for a core between two calls costs several percent: then runs
    with four times the bytes are looked at. A call that is not hooked costs a third and more of the first runs, so it
    fails the others, too: a ninth even if it takes no longer with more bytes, and all else four times as long.
    """
    runs, trace_dir = len(job.runs), job.directory / "trace"
    for attempt in range(4):
        found = [covered(trace_dir, kind, runs) for kind in ("save", "load")]
        if enough(found):
            break
        again = job.directory / f"again{attempt}"
        (again / "traced").mkdir(parents=True)
        trace_dir = again / "trace"
        for steps in JOBS[job.name][1]:
            launch(ranks, job.name, steps, again / "traced", trace_dir, 2 * WIDTH)
    return found


def test_saves_and_loads_are_covered(shares: list[float | None]) -> None:
    """By their phases, at least 95 %."""
    assert enough(shares), shares


def test_what_is_seen_is_the_row_of_the_table(job: Job, shares: list[float | None]) -> None:
    on_disk = sum(sizes(newest_of(job)))
    check_row(" ".join(JOBS[job.name][0]), job.directory / "trace", job.logs, job.report, on_disk, shares)


def newest_of(job: Job) -> Path:
    """The directory or file of the newest save."""
    kind = "weights" if JOBS[job.name][0][0] == EXPORT else "saves"
    return next((job.directory / "traced").rglob(job.report[kind][-1]["tag"]))


def test_bytes_are_those_on_the_disk(job: Job) -> None:
    """Of the newest save; and of the loads, each of which reads what the first launch saved."""
    kind = "weights" if JOBS[job.name][0][0] == EXPORT else "saves"
    save = job.report[kind][-1]
    on_disk = sizes(newest_of(job))
    assert (save["bytes"], save["num_files"]) == (sum(on_disk), len(on_disk))
    saved = sum(sizes(job.directory / "first"))
    for load in job.report["loads"]:
        assert load["bytes"] >= saved
        if job.name == "save":  # one checkpoint for all ranks, of which each reads its part
            assert load["bytes"] < 1.1 * saved


def test_a_save_on_another_thread_does_not_block(job: Job) -> None:
    if job.name not in ("thread", "async_save"):
        assert all(save["blocked_s"] > 0 for save in (*job.report["saves"], *job.report["weights"]))
        return
    (save,) = job.report["saves"]
    (operation,) = job.operations("save", 0)
    blocked = [span for span in operation if span.get("blocking") is True]
    waited = [span for span in blocked if span["phase"] == "wait_previous"]
    if job.name == "thread":  # which training waits for until its end
        assert waited == blocked
        assert {phase["blocking"] for name, phase in save["phases"].items() if name != "wait_previous"} == {"none"}
        return
    assert {span["phase"] for span in blocked} <= {"device_to_host", "wait_previous"}
    (returned,) = job.clock("returned", 0)
    assert all((span["end_ns"] <= returned[1]) is (span not in waited) for span in blocked)
    written = [r for r in operation if r.get("phase") == "library_call"]
    assert written and all(span["thread"] != "MainThread" and span["bytes"] for span in written)
    until_written_ns = max(span["end_ns"] for span in written) - operation[0]["start_ns"]
    assert save["committed_s"] >= until_written_ns / 1e9 - 1e-6  # of floats


def test_making_directories_is_a_phase(job: Job) -> None:
    """Where the library makes the checkpoint's: on a busy metadata server it may take long."""
    spans = [span for operation in job.operations("save", 0) for span in operation]
    made = any(span.get("phase") == "make_directory" for span in spans)
    assert made is (job.name not in ("path", "file", "thread"))


def test_skipped_batches_are_a_phase(job: Job) -> None:
    skipped = [r for r in records(job.directory / "trace") if r.get("phase") == "data_skip"]
    if job.name not in ("path", "file"):
        assert skipped == []
        return
    assert {(r["cycle"], r["rank"], r["batches"]) for r in skipped} == {(1, rank, 2) for rank in range(RANKS)}


# Program -> what the shell script runs; each rank prints into a file of its own
STARTED = {
    SPAWNING: f"{SCRIPTS / SPAWNING} 3",
    "ddp_snapshot.py": f"-m torch.distributed.run --standalone --nproc-per-node {RANKS} --redirects 3 --log-dir logs "
    f"{SCRIPTS / 'ddp_snapshot.py'} path 2",
}  # fmt: skip


def printed(directory: Path) -> list[str]:
    """What each rank of such a job printed."""
    found = [*directory.glob("logs/**/stdout.log"), *directory.glob("rank_*.log")]
    return [log.read_text() for log in sorted(found)]


@pytest.mark.parametrize(
    "program", [SPAWNING, pytest.param("ddp_snapshot.py", marks=[pytest.mark.nightly(minutes=1), pytest.mark.slow])]
)
def test_a_shell_script_is_traced_and_its_job_the_row_of_the_table(program: str, tmp_path: Path) -> None:
    """It adds its own directory to PYTHONPATH.

    Of a program that spawns its ranks the last save of each ends, though such processes end without atexit; SGD does
    not number its steps.
    """
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nexport PYTHONPATH=$PWD:$PYTHONPATH\nexec {sys.executable} {STARTED[program]}\n")
    script.chmod(0o755)
    plain, traced = tmp_path / "plain", tmp_path / "traced"
    for directory in (plain, traced):
        directory.mkdir()

    def given() -> dict[str, str]:
        width = "2048" if program == SPAWNING else str(WIDTH)  # of one layer, and of four
        return {"WIDTH": width, "PORT": str(free_port())}

    untraced = subprocess.run([script], env=environment() | given(), cwd=plain, capture_output=True, text=True)
    done = trace_command(traced, str(script), **given())
    assert (done.returncode, untraced.returncode) == (0, 0), done.stderr[-3000:] + untraced.stderr[-3000:]
    logs = printed(traced)
    assert [re.findall(r"^step .*", log, re.MULTILINE) for log in logs] == [
        re.findall(r"^step .*", log, re.MULTILINE) for log in printed(plain)
    ]
    (saved,) = (path for path in traced.iterdir() if path.is_file() and path.suffix != ".log")
    assert saved.read_bytes() == (plain / saved.name).read_bytes()
    report = to_dict(analyse(load_trace(traced / "trace")).report)
    assert report["problems"] == []
    (save,), (start,) = report["saves"], report["launches"]
    assert (save["outcome"], save["ranks"], save["bytes"]) == ("ok", 1, saved.stat().st_size)
    assert start["finished_ranks"] == RANKS and report["budget"]["training_s"] > 0
    trace_dir, shares = traced / "trace", list[float | None]()
    for attempt in range(4):  # as in the fixture `shares`
        shares = [covered(trace_dir, kind, 1) for kind in ("save", "load")]
        if enough(shares):
            break
        again = tmp_path / f"again{attempt}"
        again.mkdir()
        assert trace_command(again, str(script), **given()).returncode == 0
        trace_dir = again / "trace"
    assert enough(shares), shares
    check_row(f"job.sh {program}", traced / "trace", [logs], report, saved.stat().st_size, shares)


@pytest.fixture(scope="module")
def unusual(ranks: Zygote, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path, dict[str, Any]]:
    """A job that saves in unusual ways: its launch, its directory, the report."""
    directory = tmp_path_factory.mktemp("unusual")
    (directory / "traced").mkdir()
    words = [str(directory / "traced"), str(directory / "trace"), str(SCRIPTS / UNUSUAL)]
    env = {"LOCAL_SIZE": str(RANKS)}
    run = ranks.run(words, RANKS, directory / "logs", env=env, script=str(SCRIPTS / "hooked.py"))
    assert run.ok and "switched off" not in run.output, run.output[-3000:]
    return run, directory, to_dict(analyse(load_trace(directory / "trace")).report)


def test_a_save_of_one_rank_beside_those_of_all_lacks_none(unusual: tuple[Run, Path, dict[str, Any]]) -> None:
    _, directory, report = unusual
    saves = {save["tag"]: save for save in report["saves"]}
    for tag, number in (("all", RANKS), ("best", 1)):
        on_disk = sizes(directory / "traced" / tag)
        assert (saves[tag]["ranks"], saves[tag]["bytes"], saves[tag]["num_files"]) == (
            number,
            sum(on_disk),
            len(on_disk),
        )
    assert "ranks_without_operation" not in {problem["kind"] for problem in report["problems"]}


def test_training_waits_for_saves_of_a_pool(unusual: tuple[Run, Path, dict[str, Any]]) -> None:
    """By the result of one, and by the end of the pool: what it waits then is blocked by these saves."""
    run, directory, report = unusual
    for rank in range(RANKS):
        (since, until) = re.findall(r"^waited (\d+) (\d+)$", run.log(rank), re.MULTILINE)[0]
        waits = [r for r in records(directory / "trace", rank=rank) if r.get("phase") == "wait_previous"]
        assert [span["tag"] for span in waits] == [f"a_{rank}.pt", f"b_{rank}.pt"]
        assert int(since) <= waits[0]["start_ns"] < waits[0]["end_ns"] <= int(until) <= waits[1]["start_ns"]
        assert all(save["blocked_s"] > 0 for save in report["saves"] if save["tag"] in (f"a_{rank}.pt", f"b_{rank}.pt"))


def test_a_save_that_fails_has_its_time(unusual: tuple[Run, Path, dict[str, Any]]) -> None:
    _, directory, report = unusual
    saves = {save["tag"]: save for save in report["saves"]}
    broken, whole = saves["broken.pt"], saves["snapshot.pt"]
    assert (broken["outcome"], broken["bytes"], broken["error"]) == ("failed", None, "RuntimeError: cannot be pickled")
    assert broken["blocked_s"] > 0 and {"serialize", "flush"} <= broken["phases"].keys()
    assert (whole["outcome"], whole["bytes"]) == ("ok", (directory / "traced" / "snapshot.pt").stat().st_size)


def test_bytes_in_memory_are_said_not_to_be_observed(unusual: tuple[Run, Path, dict[str, Any]]) -> None:
    *_, report = unusual
    notices = [problem["data"] for problem in report["problems"] if problem["kind"] == "notice"]
    assert [(notice["phase"], notice["ranks"]) for notice in notices] == [
        ("saved_to_memory", [0, 1]), ("loaded_from_memory", [0, 1]),
    ]  # fmt: skip
