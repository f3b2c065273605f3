"""Jobs without DeepSpeed, as tutorials show them: what hooks say of them against their own clock and disk."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from restart_trace.schema import check_record
from tests.dist.harness import ROOT, Run, Zygote, records
from tests.dist.test_hooks import CLIENTS, SCRIPTS, files, losses, trace_command
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
MEGATRON_CORE, TORCHTITAN = "megatron_core.py", "titan_checkpoint.py"  # run by test_other_environments.py
# Kinds of jobs, to which the guide refers, and the program of each, here and in test_hooks.py
KINDS = {
    "DDP, `torch.save` to a path, into an open file, or in a thread": "ddp_snapshot.py",
    "FSDP2, `dcp.save` and `dcp.async_save`": "fsdp_checkpoint.py",
    "`mp.spawn`, started by a shell script": SPAWNING,
    "Hugging Face's Trainer alone": "hf_alone.py",
    "Hugging Face's Trainer with DeepSpeed, ZeRO-1 and ZeRO-3": "hf_trainer.py",
    "Accelerate alone": "accelerate_alone.py",
    "Accelerate with DeepSpeed": "accelerate_loop.py",
    "Lightning with DDP": "lightning_ddp.py",
    "DeepSpeed, as an engine and as a PipelineModule": "plain_deepspeed.py",
    "weights alone: `save_16bit_model` with ZeRO-3, `save_model` of Trainer and Accelerate, `save_pretrained`": EXPORT,
    "megatron-core's `dist_checkpointing`, `save` and its asynchronous save": MEGATRON_CORE,
    "torchtitan's CheckpointManager, synchronous and asynchronous": TORCHTITAN,
}
# Most of what lightning imports is torchmetrics; its own modules are hooked as they are imported.
LIBRARIES = (
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "transformers.trainer",
    "transformers.models.llama.modeling_llama", "accelerate", "torchmetrics",
)  # fmt: skip
# Files that no hook sees: DCP's metadata, and the settings that transformers' Trainer writes itself
UNSEEN = (".metadata", ".json")


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
        found = re.findall(rf"^{what} (\d+) (\d+)$", self.runs[cycle].log(rank), re.MULTILINE)
        return [(int(begin), int(end)) for begin, end in found]

    def operations(self, kind: str, cycle: int, rank: int = 0) -> list[list[dict[str, Any]]]:
        return operations(self.directory / "trace", kind, cycle, rank)


def operations(trace_dir: Path, kind: str, cycle: int, rank: int) -> list[list[dict[str, Any]]]:
    """The completed records of each operation of this kind."""
    by_op: dict[int, list[dict[str, Any]]] = {}
    for record in records(trace_dir, cycle, rank):
        if record.get("operation") == kind and "op" in record:
            by_op.setdefault(record["op"], []).append(record)
    return list(by_op.values())


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


# An open file and Accelerate's own calls end in the torch.save that "path" and "transformers" have, too; and weights
# alone are saved by calls that "save_16bit_model" and "save_model" have.
NIGHTLY = ("file", "accelerate", "save_model_zero3", "accelerate_save_model", "save_pretrained")


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


def test_losses_and_files_are_the_same(job: Job) -> None:
    assert losses(job.plain) == losses(job.runs[0])
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
    for cycle in range(len(job.runs)):
        for rank in range(RANKS):
            for kind in ("save", "load"):
                clock, seen = job.clock(kind, cycle, rank), job.operations(kind, cycle, rank)
                assert len(seen) == len(clock)
                for (begin, end), operation in zip(clock, seen, strict=True):
                    assert operation[-1]["outcome"] == "ok"
                    assert begin <= operation[0]["start_ns"] and operation[-1]["end_ns"] <= end


def test_saves_and_loads_are_covered(job: Job, ranks: Zygote) -> None:
    """By their phases, at least 95 % of the time of all saves and of all loads over the ranks.

    They take 5 to 50 ms each, so that a rank that waits for a core between two calls costs several percent: then runs
    with four times the bytes are looked at. A call that is not hooked costs a third and more of the first runs, so it
    fails the others, too: a ninth even if it takes no longer with more bytes, and all else four times as long.
    """
    runs, trace_dir = len(job.runs), job.directory / "trace"
    for attempt in range(4):
        shares = [covered(trace_dir, kind, runs) for kind in ("save", "load")]
        if min(shares) >= 0.95:
            return
        again = job.directory / f"again{attempt}"
        (again / "traced").mkdir(parents=True)
        trace_dir = again / "trace"
        for steps in JOBS[job.name][1]:
            launch(ranks, job.name, steps, again / "traced", trace_dir, 2 * WIDTH)
    pytest.fail(f"of saves and loads are covered {shares}")


def covered(trace_dir: Path, kind: str, runs: int) -> float:
    """Share of the time of all operations of a kind that at least one span covers; 1 if there are none."""
    every = [op for run in range(runs) for rank in range(RANKS) for op in operations(trace_dir, kind, run, rank)]
    whole_ns = sum(op[-1]["end_ns"] - op[0]["start_ns"] for op in every)
    return sum(covered_ns(op) for op in every) / whole_ns if every else 1.0


def covered_ns(operation: list[dict[str, Any]]) -> int:
    """Time of an operation that at least one span covers."""
    covered, until = 0, 0
    for span in sorted((r for r in operation if r["type"] == "span"), key=lambda span: span["start_ns"]):
        covered += max(span["end_ns"] - max(span["start_ns"], until), 0)
        until = max(until, span["end_ns"])
    return covered


def test_bytes_are_those_on_the_disk(job: Job) -> None:
    """Of the newest save; and of the loads, each of which reads what the first launch saved."""
    kind = "weights" if JOBS[job.name][0][0] == EXPORT else "saves"
    save = job.report[kind][-1]
    newest = list((job.directory / "traced").rglob(save["tag"]))[0]
    on_disk = sizes(newest)
    assert (save["bytes"], save["num_files"]) == (sum(on_disk), len(on_disk))
    saved = sum(sizes(job.directory / "first"))
    for load in job.report["loads"]:
        assert load["bytes"] >= saved
        if job.name == "save":  # one checkpoint for all ranks, of which each reads its part
            assert load["bytes"] < 1.1 * saved


def sizes(path: Path) -> list[int]:
    """Of the files at `path` that hooks see."""
    found = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return [p.stat().st_size for p in found if not p.name.endswith(UNSEEN)]


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


def test_ranks_that_a_program_spawns_are_traced(tmp_path: Path) -> None:
    """And the last save of each ends, though such processes end without atexit. SGD does not number its steps.

    A shell script starts the program, and adds its own directory to PYTHONPATH.
    """
    script = tmp_path / "job.sh"
    script.write_text(
        f"""#!/bin/sh
export PYTHONPATH=$PWD:$PYTHONPATH
exec {sys.executable} {SCRIPTS / SPAWNING}
"""
    )
    script.chmod(0o755)
    done = trace_command(tmp_path, str(script))
    assert done.returncode == 0, done.stderr[-3000:]
    report = to_dict(analyse(load_trace(tmp_path / "trace")).report)
    assert report["problems"] == []
    (save,), (load,), (start,) = report["saves"], report["loads"], report["launches"]
    size = (tmp_path / "model.checkpoint").stat().st_size
    assert (save["outcome"], save["ranks"], save["bytes"]) == ("ok", 1, size)
    assert (load["outcome"], load["ranks"]) == ("ok", RANKS) and load["bytes"] >= RANKS * size
    assert start["finished_ranks"] == RANKS and report["budget"]["training_s"] > 0


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


def test_the_guide_refers_to_the_jobs_of_these_tests() -> None:
    run = {words[0] for words, *_ in (*JOBS.values(), *CLIENTS.values())} | {SPAWNING, MEGATRON_CORE, TORCHTITAN}
    assert set(KINDS.values()) == run
    assert "`tests/dist/test_any_job.py`" in (ROOT / "docs" / "guides" / "trace_your_job.md").read_text()
