"""Jobs without DeepSpeed, as PyTorch's tutorials show them: what hooks say of them against their own clock and disk."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from restart_trace.schema import check_record
from tests.dist.harness import Run, Zygote, records
from tests.dist.test_hooks import SCRIPTS, files, losses, trace_command
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.render.json_output import to_dict
from tools.ckpt_analysis.report import analyse

RANKS = 2
WIDTH = "512"
# client -> script and its first argument, and the steps up to which it trains in each launch
JOBS = {
    "path": ("ddp_snapshot.py", "path", (2, 4)),
    "file": ("ddp_snapshot.py", "file", (2, 4)),
    "thread": ("ddp_snapshot.py", "thread", (2,)),
    "save": ("fsdp_checkpoint.py", "save", (2, 2)),
    "async_save": ("fsdp_checkpoint.py", "async_save", (2,)),
}


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
        """The completed records of each operation of this kind."""
        by_op: dict[int, list[dict[str, Any]]] = {}
        for record in records(self.directory / "trace", cycle, rank):
            if record.get("operation") == kind and "op" in record:
                by_op.setdefault(record["op"], []).append(record)
        return list(by_op.values())


@pytest.fixture(scope="module")
def ranks() -> Iterator[Zygote]:
    started = Zygote.start(imports=("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo"))
    yield started
    started.close()


def launch(zygote: Zygote, name: str, steps: int, directory: Path, trace_dir: Path | None) -> Run:
    script, how, _ = JOBS[name]
    words = [str(directory), str(trace_dir or "-"), str(SCRIPTS / script), how, str(steps)]
    run = zygote.run(words, RANKS, directory.parent / "logs", env={"WIDTH": WIDTH}, script=str(SCRIPTS / "hooked.py"))
    assert run.ok, run.output[-3000:]
    return run


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest, ranks: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Job:
    name = request.param
    directory = tmp_path_factory.mktemp(name)
    for kind in ("plain", "traced"):
        (directory / kind).mkdir()
    first, *later = JOBS[name][2]
    plain = launch(ranks, name, first, directory / "plain", None)
    runs = [launch(ranks, name, first, directory / "traced", directory / "trace")]
    shutil.copytree(directory / "traced", directory / "first")
    runs += [launch(ranks, name, steps, directory / "traced", directory / "trace") for steps in later]
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


def test_bytes_are_those_on_the_disk(job: Job) -> None:
    """Of the newest save; and of the loads, each of which reads what the first launch saved."""
    on_disk = [p.stat().st_size for p in (job.directory / "traced").rglob("*") if p.is_file() and p.name != ".metadata"]
    save = job.report["saves"][-1]
    assert (save["bytes"], save["num_files"]) == (sum(on_disk), len(on_disk))
    saved = sum(p.stat().st_size for p in (job.directory / "first").rglob("*") if p.is_file() and p.name != ".metadata")
    for load in job.report["loads"]:
        assert load["bytes"] >= saved
        if job.name == "save":  # one checkpoint for all ranks, of which each reads its part
            assert load["bytes"] < 1.1 * saved


def test_a_save_on_another_thread_does_not_block(job: Job) -> None:
    if job.name == "path" or job.name == "file" or job.name == "save":
        assert all(save["blocked_s"] > 0 for save in job.report["saves"])
        return
    (save,) = job.report["saves"]
    if job.name == "thread":
        assert save["blocked_s"] == 0
        assert {phase["blocking"] for phase in save["phases"].values()} == {"none"}
        return
    blocked = [span for operation in job.operations("save", 0) for span in operation if span.get("blocking") is True]
    assert {span["phase"] for span in blocked} == {"device_to_host"}
    (returned,) = job.clock("returned", 0)
    assert all(span["end_ns"] <= returned[1] for span in blocked)
    (operation,) = job.operations("save", 0)
    written = [r for r in operation if r.get("phase") == "engine_call"]
    assert written and all(span["thread"] != "MainThread" and span["bytes"] for span in written)
    until_written_ns = max(span["end_ns"] for span in written) - operation[0]["start_ns"]
    assert save["committed_s"] >= until_written_ns / 1e9 - 1e-6  # of floats


def test_skipped_batches_are_a_phase(job: Job) -> None:
    skipped = [r for r in records(job.directory / "trace") if r.get("phase") == "data_skip"]
    if job.name not in ("path", "file"):
        assert skipped == []
        return
    assert {(r["cycle"], r["rank"], r["batches"]) for r in skipped} == {(1, rank, 2) for rank in range(RANKS)}


def test_ranks_that_a_program_spawns_are_traced(tmp_path: Path) -> None:
    """And the last save of each ends, though such processes end without atexit. SGD does not number its steps."""
    done = trace_command(tmp_path, "python", str(SCRIPTS / "spawn_checkpoint.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    report = to_dict(analyse(load_trace(tmp_path / "trace")).report)
    assert report["problems"] == []
    (save,), (load,), (start,) = report["saves"], report["loads"], report["launches"]
    size = (tmp_path / "model.checkpoint").stat().st_size
    assert (save["outcome"], save["ranks"], save["bytes"]) == ("ok", 1, size)
    assert (load["outcome"], load["ranks"]) == ("ok", RANKS) and load["bytes"] >= RANKS * size
    assert start["finished_ranks"] == RANKS and report["budget"]["training_s"] > 0
