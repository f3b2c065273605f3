"""The trace tells the truth: its phases fill the wall time, its bytes are those on disk, and a start-up begins where
the process began.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.store import naming as names
from megatron.net.free_port import free_port
from tests.dist.harness import ROOT, Zygote, records
from tests.dist.tiny_runs import Launcher, parallel
from tests.dist.trace_runs import BIG, ONE_ITERATION, PAIR, RANKS, SMALL, bytes_by_file, checkpoint_sizes

MIN_COVERAGE = 0.98
SCHEDULER_NS = 50_000_000


# ---------------------------------------------------------------- coverage and bytes, from the records alone


@dataclass(frozen=True)
class Coverage:
    """How much of one operation of one rank its phases account for. `left_out`: place -> ns of what they do not."""

    operation: str
    rank: int
    wall_ns: int
    left_out: dict[str, int]

    @property
    def ratio(self) -> float:
        return 1 - sum(self.left_out.values()) / self.wall_ns

    @property
    def has_gap(self) -> bool:
        """Whether too little is accounted for; by more than the scheduler takes now and then."""
        return self.ratio < MIN_COVERAGE and sum(self.left_out.values()) > SCHEDULER_NS

    def in_both(self, other: Coverage) -> Coverage:
        """With what is left out at each place here and in `other`, the same operation of another launch.

        What the code leaves out is left out every time; what a busy machine takes between two spans, or within the
        window that several share, is not at the same place again and again.
        """
        left_out = {place: min(ns, other.left_out.get(place, 0)) for place, ns in self.left_out.items()}
        return replace(self, left_out=left_out)


def own_spans(trace: list[dict[str, Any]], end: dict[str, Any]) -> list[dict[str, Any]]:
    """Spans of the training thread that belong to the operation that `end` closes; a load within is one."""
    spans = [
        r for r in trace if r["type"] == "span" and (r["rank"], r["op"]) == (end["rank"], end["op"]) and r["blocking"]
    ]
    if end["operation"] != "startup":
        return spans
    loads = [
        r | {"phase": "load", "duration_ns": r["end_ns"] - r["start_ns"]}
        for r in trace
        if r["type"] == "operation_end" and r["operation"] == "load" and r["rank"] == end["rank"]
    ]
    # What follows the first step is no part of the way to it.
    return [s for s in spans if s["phase"] != "caught_up"] + loads


def left_out(spans: list[dict[str, Any]], start_ns: int, end_ns: int) -> dict[str, int]:
    """Place -> nanoseconds from `start_ns` to `end_ns` that no span claims; fails if more is claimed than passed.

    Spans whose windows overlap alternate within them: together they may claim the length of their union.
    """
    found: dict[str, int] = defaultdict(int)
    names, claimed = {"the start"}, 0
    window_start = window_end = start_ns

    def leave_window() -> None:
        if claimed < window_end - window_start:
            found[f"within {', '.join(sorted(names))}"] += window_end - window_start - claimed

    for span in sorted(spans, key=lambda s: s["start_ns"]):
        assert start_ns <= span["start_ns"] <= span["end_ns"] <= end_ns, f"outside its operation: {span}"
        if span["start_ns"] >= window_end:
            leave_window()
            found[f"after {', '.join(sorted(names))}, before {span['phase']}"] += span["start_ns"] - window_end
            window_start, claimed, names = span["start_ns"], 0, set()
        window_end = max(window_end, span["end_ns"])
        claimed += span["duration_ns"]
        names.add(span["phase"])
        assert claimed <= window_end - window_start, f"more time claimed than passed: {span}"
    leave_window()
    found[f"after {', '.join(sorted(names))}, before the end"] += end_ns - window_end
    return dict(found)


def coverages(trace: list[dict[str, Any]]) -> list[Coverage]:
    """Coverage of every operation that `trace` (records of one cycle) has."""
    found = []
    for end in trace:
        if end["type"] == "operation_end":
            missing = left_out(own_spans(trace, end), end["start_ns"], end["end_ns"])
            found.append(Coverage(end["operation"], end["rank"], end["end_ns"] - end["start_ns"], missing))
    return found


def without_gaps(trace: list[dict[str, Any]], launch_again: Callable[[], list[dict[str, Any]]]) -> list[Coverage]:
    """Coverages of `trace`; fails if one of its operations has a gap that it has in later launches, too."""
    found = coverages(trace)
    lasting = [c for c in found if c.has_gap]
    for _ in range(4):
        if not lasting:
            break
        again = {(c.operation, c.rank): c for c in coverages(launch_again())}
        lasting = [both for c in lasting if (both := c.in_both(again[c.operation, c.rank])).has_gap]
    assert not lasting
    return found


@dataclass
class BigRun:
    """Launches of the big model that save one checkpoint and then load it."""

    launcher: Launcher
    save: Path

    def launch(self, *, load: bool) -> list[dict[str, Any]]:
        """Records of the new launch: one iteration, after a load or before a save."""
        before = {record["cycle"] for record in records(self.trace_dir)}
        flags = [*BIG, "--train-iters", "2", "--restart-trace-dir", self.trace_dir]
        if load:
            flags += ["--load", self.save]
        else:
            flags += ["--exit-interval", "1", "--save", self.save, "--save-interval", "1"]
            # That of the launch before is there where this one is a repetition.
            flags += ["--allow-other-checkpoints", "--start-over", f"launch_{len(before)}"]
        self.launcher.train(PAIR, *flags)
        trace = [r for r in records(self.trace_dir) if r["cycle"] not in before]
        assert {r["operation"] for r in trace if r["type"] == "operation_end"} == {
            "startup",
            "load" if load else "save",
        }
        return trace

    @property
    def trace_dir(self) -> Path:
        return self.save.parent / "trace"

    def covered(self, trace: list[dict[str, Any]], *, load: bool) -> list[Coverage]:
        """Coverages of `trace`, which has no gap."""
        return without_gaps(trace, lambda: self.launch(load=load))


@pytest.fixture(scope="module")
def big(
    zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[BigRun, list[dict[str, Any]]]]:
    """The run and the records of its first launch, which saved."""
    directory = tmp_path_factory.mktemp("big")
    run = BigRun(Launcher(zygote, dataset, directory), directory / "save")
    yield run, run.launch(load=False)
    shutil.rmtree(directory)  # pytest keeps the directories of three sessions; 800 MB each are too many


Big = tuple[BigRun, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def loaded(big: Big) -> list[dict[str, Any]]:
    """The records of a later launch, which loaded what the first one saved."""
    run, _ = big
    return run.launch(load=True)


def of_kind(found: list[Coverage], operation: str) -> list[int]:
    return sorted(c.rank for c in found if c.operation == operation)


def test_phases_of_a_save_fill_its_wall_time_on_every_rank(big: Big) -> None:
    run, trace = big
    found = run.covered(trace, load=False)
    assert of_kind(found, "save") == of_kind(found, "startup") == list(RANKS)


def test_phases_of_a_load_and_of_the_start_up_around_it_fill_theirs(big: Big, loaded: list[dict[str, Any]]) -> None:
    run, _ = big
    found = run.covered(loaded, load=True)
    assert of_kind(found, "load") == of_kind(found, "startup") == list(RANKS)


def test_nothing_lies_between_the_phases_of_a_start_and_of_its_load(loaded: list[dict[str, Any]]) -> None:
    """However long a busy machine takes there."""
    found = coverages(loaded)
    between = [
        (c.operation, c.rank, place, ns)
        for c in found
        for place, ns in c.left_out.items()
        if ns and place.startswith("after ") and not place.endswith(", before the end")
    ]
    assert of_kind(found, "load") == of_kind(found, "startup") == list(RANKS) and not between


def test_ckpt_analysis_finds_the_same_coverage(big: Big) -> None:
    pytest.importorskip("polars", reason="tools.ckpt_analysis needs the extra `analysis`")
    run, _ = big
    trace = [r for r in records(run.trace_dir) if r["cycle"] == 0]
    answer = subprocess.run(
        [sys.executable, "-m", "tools.ckpt_analysis", str(run.trace_dir), "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    report = json.loads(answer.stdout)
    save = next(s for s in report["saves"] if s["cycle"] == 0)
    lowest = min(c.ratio for c in coverages(trace) if c.operation == "save")
    assert save["coverage_min"] == pytest.approx(lowest, abs=1e-4)
    assert save["bytes"] == sum(ends(trace, "save", "bytes"))


def ends(trace: list[dict[str, Any]], operation: str, name: str) -> list[int]:
    return [r[name] for r in trace if r["type"] == "operation_end" and r["operation"] == operation]


def test_logged_bytes_are_those_on_disk(big: Big) -> None:
    run, trace = big
    on_disk = checkpoint_sizes(run.save / names.tag_of(1))
    written = [r for r in trace if r["type"] == "operation_end" and r["operation"] == "save"]
    assert bytes_by_file(trace, "flush", "write") == on_disk
    assert sum(r["bytes"] for r in written) == sum(on_disk.values())
    assert sum(r["num_files"] for r in written) == len(on_disk)
    assert min(r["bytes"] for r in written) > 300e6


def test_logged_bytes_of_a_load_are_those_read(big: Big, loaded: list[dict[str, Any]]) -> None:
    run, _ = big
    on_disk = checkpoint_sizes(run.save / names.tag_of(1))
    assert bytes_by_file(loaded, "load", "read") == on_disk
    assert sum(ends(loaded, "load", "bytes")) == sum(on_disk.values())


# ---------------------------------------------------------------- the start of a process


def test_process_start_is_the_kernels_and_the_end_is_recorded(
    zygote: Zygote, dataset: list[str], tmp_path: Path
) -> None:
    asked_ns = time.monotonic_ns()
    forked_ns = []
    run = zygote.run(
        [*dataset, *parallel(PAIR), *SMALL, *ONE_ITERATION, "--restart-trace-dir", str(tmp_path / "trace")],
        PAIR.world_size, tmp_path / "logs", during=lambda pids: forked_ns.append(time.monotonic_ns()),
    )  # fmt: skip
    assert run.ok, run.output
    tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    processes = [r for r in records(tmp_path / "trace") if r["type"] == "process"]
    starts = [r["start_ns"] for r in records(tmp_path / "trace") if r["type"] == "operation_begin"]
    assert sorted(starts) == sorted(r["process_start_ns"] for r in processes)
    ends = [(r["rank"], r.get("detail")) for r in records(tmp_path / "trace") if r.get("phase") == "ended"]
    assert sorted(ends) == [(rank, None) for rank in range(PAIR.world_size)]
    for process in processes:
        assert process["process_start_source"] == "os"
        assert asked_ns - tick_ns <= process["process_start_ns"] <= forked_ns[0]


def test_a_real_launch_is_accounted_for_from_process_start_to_first_step(dataset: list[str], tmp_path: Path) -> None:
    """Through torchrun, with the imports that the other tests' forked ranks have behind them."""
    launched_ns = time.monotonic_ns()
    trace = under_torchrun(dataset, tmp_path / "0")
    later = (under_torchrun(dataset, tmp_path / str(number)) for number in itertools.count(1))
    found = without_gaps(trace, lambda: next(later))
    assert [c.operation for c in found] == ["startup"] * PAIR.world_size
    for end in (r for r in trace if r["type"] == "operation_end"):
        phases = {r["phase"] for r in own_spans(trace, end)}
        assert phases == {
            "process_start", "imports", "name_lookup", "rendezvous", "communicators", "model_build", "engine_init",
            "data_build", "first_step",
        }  # fmt: skip
        imports = next(r for r in own_spans(trace, end) if r["phase"] == "imports")
        assert imports["duration_ns"] > 10e6  # 2 s
        assert launched_ns < end["start_ns"]


def under_torchrun(dataset: list[str], directory: Path) -> list[dict[str, Any]]:
    """Records of a launch of one iteration."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
    directory.mkdir()
    finished = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(PAIR.world_size),
            "--master-port", str(free_port()), str(ROOT / "pretrain_gpt.py"), *dataset, *parallel(PAIR), *SMALL,
            *ONE_ITERATION, "--restart-trace-dir", str(directory / "trace"),
        ],
        env=environment, cwd=directory, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return records(directory / "trace")


def test_communicators_are_apart_from_the_phase_that_creates_them(big: Big) -> None:
    _, trace = big
    for rank in RANKS:
        spans = [r for r in trace if r["type"] == "span" and r["operation"] == "startup" and r["rank"] == rank]
        # DeepSpeed's PipelineModule creates process groups while the model is built: the phase is recorded in pieces,
        # before and after each of them.
        ends = {s["end_ns"] for s in spans if s["phase"] == "model_build"}
        begins = {s["start_ns"] for s in spans if s["phase"] == "model_build"}
        inside = [s for s in spans if s["phase"] == "communicators" and s["start_ns"] in ends and s["end_ns"] in begins]
        assert {span["detail"] for span in inside} == {"world", "other"}  # TP2: of all ranks, and of each alone
        for span in inside:
            assert 0 < span["duration_ns"] == span["end_ns"] - span["start_ns"]
