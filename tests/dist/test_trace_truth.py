"""The trace tells the truth: its phases fill the wall time, its bytes are those on disk, its fsync times are the
kernel's, and recording adds no fsync and no collective to what is recorded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron import checkpoint_layout as names
from megatron.topology import Layout
from tests.dist.harness import LLAMA_STYLE, ROOT, Run, Zygote, records, wait_for
from tests.dist.tiny_runs import MODEL, NO_DROPOUT, TRAINING, Launcher, parallel
from tests.dist.zygote import free_port

MIN_COVERAGE = 0.98
PAIR = Layout(tp=2, pp=1, dp=1)
RANKS = range(PAIR.world_size)
# 400 MB of checkpoint per rank in 13 files: one save takes about a second.
BIG = [
    "--num-layers", "8", "--hidden-size", "768", "--num-attention-heads", "8", "--seq-length", "32", "--bf16",
    "--micro-batch-size", "1", "--global-batch-size", "1", "--lr", "1e-3", "--log-interval", "1",
    *LLAMA_STYLE, *NO_DROPOUT,
]  # fmt: skip
SMALL = [*MODEL, *LLAMA_STYLE, *TRAINING, *NO_DROPOUT, "--bf16", "--train-iters", "4"]
ONE_ITERATION = ["--exit-interval", "1"]
SYSTEM_CALLS = (
    "write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,"
    "fsync,fdatasync,sync,syncfs,sync_file_range,msync"
)
SYNCS = {"fsync", "fdatasync", "sync", "syncfs", "sync_file_range", "msync"}


# ---------------------------------------------------------------- coverage and bytes, from the records alone


@dataclass(frozen=True)
class Coverage:
    """How much of one operation of one rank its phases account for."""

    operation: str
    rank: int
    wall_ns: int
    covered_ns: int

    @property
    def ratio(self) -> float:
        return self.covered_ns / self.wall_ns


def own_spans(trace: list[dict[str, Any]], end: dict[str, Any]) -> list[dict[str, Any]]:
    """Spans of the training thread that belong to the operation that `end` closes; a load within is one."""
    spans = [
        r
        for r in trace
        if r["type"] == "span" and (r["rank"], r["op_id"]) == (end["rank"], end["op_id"]) and r["blocking"]
    ]
    if end["operation"] != "startup":
        return spans
    loads = [
        r | {"duration_ns": r["end_ns"] - r["start_ns"]}
        for r in trace
        if r["type"] == "operation_end" and r["operation"] == "load" and r["rank"] == end["rank"]
    ]
    # What follows the first step is no part of the way to it.
    return [s for s in spans if s["phase"] != "caught_up"] + loads


def covered_ns(spans: list[dict[str, Any]], start_ns: int, end_ns: int) -> int:
    """Sum of durations; fails if more time is claimed anywhere than went by there.

    Spans whose windows overlap alternate within them: together they may claim the length of their union.
    """
    total = claimed = 0
    window_start = window_end = start_ns
    for span in sorted(spans, key=lambda s: s["start_ns"]):
        assert start_ns <= span["start_ns"] <= span["end_ns"] <= end_ns, f"outside its operation: {span}"
        if span["start_ns"] >= window_end:
            window_start, claimed = span["start_ns"], 0
        window_end = max(window_end, span["end_ns"])
        claimed += span["duration_ns"]
        total += span["duration_ns"]
        assert claimed <= window_end - window_start, f"more time claimed than passed: {span}"
    return total


def coverages(trace: list[dict[str, Any]]) -> list[Coverage]:
    """Coverage of every operation that `trace` (records of one cycle) has."""
    found = []
    for end in trace:
        if end["type"] == "operation_end":
            covered = covered_ns(own_spans(trace, end), end["start_ns"], end["end_ns"])
            found.append(Coverage(end["operation"], end["rank"], end["end_ns"] - end["start_ns"], covered))
    return found


def gaps(found: list[Coverage]) -> list[Coverage]:
    """Operations with too little accounted for."""
    return [c for c in found if c.ratio < MIN_COVERAGE]


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

    def covered(self, trace: list[dict[str, Any]], *, load: bool) -> list[dict[str, Any]]:
        """`trace`, or that of a later launch if another process took the processor between two spans.

        What the code leaves out is left out every time; what the scheduler takes is not.
        """
        for _ in range(3):
            if not gaps(coverages(trace)):
                return trace
            trace = self.launch(load=load)
        assert not gaps(coverages(trace)), gaps(coverages(trace))
        return trace


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


def of_kind(found: list[Coverage], operation: str) -> list[int]:
    return sorted(c.rank for c in found if c.operation == operation)


def test_phases_of_a_save_fill_its_wall_time_on_every_rank(big: Big) -> None:
    run, trace = big
    found = coverages(run.covered(trace, load=False))
    assert of_kind(found, "save") == of_kind(found, "startup") == list(RANKS)


def test_phases_of_a_load_and_of_the_start_up_around_it_fill_theirs(big: Big) -> None:
    run, _ = big
    found = coverages(run.covered(run.launch(load=True), load=True))
    assert of_kind(found, "load") == of_kind(found, "startup") == list(RANKS)


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


def bytes_by_file(trace: list[dict[str, Any]], phase: str, detail: str) -> dict[str, int]:
    """File -> bytes that spans of this phase moved. A file that two spans name is an error."""
    found: dict[str, int] = {}
    for r in trace:
        if r["type"] == "span" and (r["phase"], r.get("detail")) == (phase, detail):
            assert r["file"] not in found, r["file"]
            found[r["file"]] = r["bytes"]
    return found


def checkpoint_sizes(directory: Path) -> dict[str, int]:
    """Size on disk of every file that ranks write; the manifest is the commit's and in no rank's bytes."""
    return {p.name: p.stat().st_size for p in directory.iterdir() if p.name != names.MANIFEST}


def test_logged_bytes_are_those_on_disk(big: Big) -> None:
    run, trace = big
    on_disk = checkpoint_sizes(run.save / names.tag_of(1))
    written = [r for r in trace if r["type"] == "operation_end" and r["operation"] == "save"]
    assert bytes_by_file(trace, "flush", "write") == on_disk
    assert sum(r["bytes"] for r in written) == sum(on_disk.values())
    assert sum(r["num_files"] for r in written) == len(on_disk)
    assert min(r["bytes"] for r in written) > 300e6


def test_logged_bytes_of_a_load_are_those_read(big: Big) -> None:
    run, _ = big
    trace = run.launch(load=True)
    on_disk = checkpoint_sizes(run.save / names.tag_of(1))
    assert bytes_by_file(trace, "load", "read") == on_disk
    assert sum(ends(trace, "load", "bytes")) == sum(on_disk.values())


# ---------------------------------------------------------------- the start of a process


def test_process_start_is_the_kernels(zygote: Zygote, dataset: list[str], tmp_path: Path) -> None:
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
    for process in processes:
        assert process["process_start_source"] == "os"
        assert asked_ns - tick_ns <= process["process_start_ns"] <= forked_ns[0]


def test_a_real_launch_is_accounted_for_from_process_start_to_first_step(dataset: list[str], tmp_path: Path) -> None:
    """Through torchrun, with the imports that the other tests' forked ranks have behind them."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
    launched_ns = time.monotonic_ns()
    finished = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(PAIR.world_size),
            "--master-port", str(free_port()), str(ROOT / "pretrain_gpt.py"), *dataset, *parallel(PAIR), *SMALL,
            *ONE_ITERATION, "--restart-trace-dir", str(tmp_path / "trace"),
        ],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    trace = records(tmp_path / "trace")
    found = coverages(trace)
    assert [c.operation for c in found] == ["startup"] * PAIR.world_size
    assert not gaps(found), gaps(found)
    for end in (r for r in trace if r["type"] == "operation_end"):
        phases = {r["phase"] for r in own_spans(trace, end)}
        assert phases == {
            "process_start", "imports", "rendezvous", "communicators", "model_build", "engine_init", "data_build",
            "first_step",
        }  # fmt: skip
        imports = next(r for r in own_spans(trace, end) if r["phase"] == "imports")
        assert imports["duration_ns"] > 300e6
        assert launched_ns < end["start_ns"]


def test_communicators_are_apart_from_the_phase_that_creates_them(big: Big) -> None:
    _, trace = big
    for rank in RANKS:
        spans = [r for r in trace if r["type"] == "span" and r["operation"] == "startup" and r["rank"] == rank]
        built = {(s["start_ns"], s["end_ns"]) for s in spans if s["phase"] == "model_build"}
        # DeepSpeed's PipelineModule creates process groups while the model is built.
        within = [s for s in spans if s["phase"] == "communicators" and (s["start_ns"], s["end_ns"]) in built]
        assert len(within) == 1
        assert 0 < within[0]["duration_ns"] < within[0]["end_ns"] - within[0]["start_ns"]


# ---------------------------------------------------------------- against the kernel's own account


@dataclass
class SystemCalls:
    """What strace saw of one run."""

    written: Counter[str] = field(default_factory=Counter)  # path -> bytes
    sync_s: dict[str, float] = field(default_factory=dict)  # path -> seconds of its fsync
    syncs: list[tuple[str, str]] = field(default_factory=list)  # (call, path)


@dataclass
class TracedZygote:
    """A zygote all of whose ranks run under strace."""

    zygote: Zygote
    directory: Path

    def run(self, argv: list[str], log_dir: Path, **options: Any) -> tuple[Run, SystemCalls]:
        before = set(self.directory.iterdir())
        run = self.zygote.run(argv, PAIR.world_size, log_dir, **options)
        assert run.ok, run.output
        mine = [self.directory / f"calls.{pid}" for pid in run.pids]
        wait_for(lambda: all("+++ exited" in p.read_text()[-80:] for p in mine), 20.0, "the end of strace's account")
        return run, read_calls(sorted(set(self.directory.iterdir()) - before))


LINE = re.compile(r"^(?P<call>\w+)\((?:\d+<(?P<path>[^>]*)>)?.*\) += (?P<result>-?\d+).*<(?P<seconds>[\d.]+)>$")


def read_calls(files: list[Path]) -> SystemCalls:
    found = SystemCalls()
    for line in (line for file in files for line in file.read_text().splitlines()):
        match = LINE.match(line)
        if match is None:
            assert line.startswith(("+++", "---")), f"strace wrote a line that is not understood: {line}"
            continue
        path = match["path"] or ""
        if match["call"] in SYNCS:
            found.syncs.append((match["call"], path))
            found.sync_s[path] = found.sync_s.get(path, 0.0) + float(match["seconds"])
        else:
            found.written[path] += max(0, int(match["result"]))
    return found


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedZygote]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed (apt-get install strace)")
    if subprocess.run(["strace", "-o", "/dev/null", "true"], check=False, capture_output=True).returncode:
        pytest.skip("strace may not trace processes here (ptrace is forbidden)")
    directory = tmp_path_factory.mktemp("strace")
    # Stops at the calls named only (--seccomp-bpf); one file per thread, so that no call is cut in two lines.
    wrapper = [
        "strace", "-f", "--seccomp-bpf", "-ff", "-y", "-T", "-s", "0", "-e", f"trace={SYSTEM_CALLS}",
        "-e", "signal=none", "-o", str(directory / "calls"),
    ]  # fmt: skip
    zygote = Zygote.start(wrapper)
    yield TracedZygote(zygote, directory)
    zygote.close()


def agreement(trace: list[dict[str, Any]], calls: SystemCalls, step: int) -> tuple[float, float]:
    """(seconds in fsync by the log, by strace), over the checkpoint files of one save."""
    logged = by_kernel = 0.0
    for r in trace:
        if r["type"] == "span" and r.get("detail") == "fsync" and r["step"] == step:
            path = one_path(calls.sync_s, step, r["file"])
            # The span encloses the call, so it cannot be shorter: ptrace and Python only add to it.
            assert r["duration_ns"] / 1e9 > calls.sync_s[path] - 1e-4
            logged += r["duration_ns"] / 1e9
            by_kernel += calls.sync_s[path]
    return logged, by_kernel


def one_path(paths: dict[str, Any], step: int, name: str) -> str:
    """The path at which file `name` was written during the save of `step`."""
    mine = [
        path
        for path in paths
        if Path(path).name == name and Path(path).parent.name.startswith(f"{names.TEMPORARY_PREFIX}global_step{step}_")
    ]
    assert len(mine) == 1, mine
    return mine[0]


def test_system_calls_agree_on_bytes_and_on_fsync_time(
    traced: TracedZygote, dataset: list[str], tmp_path: Path
) -> None:
    save, trace_dir = tmp_path / "save", tmp_path / "trace"
    argv = [
        *dataset, *parallel(PAIR), *BIG, "--train-iters", "2", "--save", str(save), "--save-interval", "1",
        "--restart-trace-dir", str(trace_dir),
    ]  # fmt: skip
    try:
        _, calls = traced.run(argv, tmp_path / "logs")
        trace = records(trace_dir)
        for step in (1, 2):
            mine = [r for r in trace if r.get("step") == step]
            on_disk = checkpoint_sizes(save / names.tag_of(step))
            by_kernel = {name: calls.written[one_path(calls.written, step, name)] for name in on_disk}
            assert bytes_by_file(mine, "flush", "write") == on_disk == by_kernel
        assert_nothing_else_was_written(calls, save)
        assert_fsync_times_agree([agreement(trace, calls, step) for step in (1, 2)])
    finally:
        shutil.rmtree(save, ignore_errors=True)


def assert_nothing_else_was_written(calls: SystemCalls, save: Path) -> None:
    """Beside the ranks' files only the commit's own, which are in no rank's bytes, and the check of the start."""
    others = {
        Path(path).name
        for path, num_bytes in calls.written.items()
        if Path(path).is_relative_to(save) and num_bytes and not path.endswith(".pt")
    }
    probes = {name for name in others if name.startswith(".write_probe_")}
    assert others - probes == {f".{name}.tmp" for name in (names.MANIFEST, names.LATEST, names.TRACKER)}


def assert_fsync_times_agree(totals: list[tuple[float, float]]) -> None:
    """Within 5 % for at least one save: a machine with more to run than processors delays a return at random."""
    if max(by_kernel for _, by_kernel in totals) < 0.02:
        pytest.skip("fsync returns at once on this file system: there is no time to compare")
    assert min(abs(logged / by_kernel - 1) for logged, by_kernel in totals) < 0.05, totals


@dataclass
class Added:
    """What one small run did that could be the trace's doing."""

    syncs: Counter[str]
    collectives: list[dict[str, int]]  # by rank
    paths: list[str]


def small_run(traced: TracedZygote, dataset: list[str], directory: Path, *flags: str) -> Added:
    directory.mkdir()
    argv = [
        *dataset, *parallel(PAIR), *SMALL, "--exit-interval", "2", "--save", str(directory / "save"),
        "--save-interval", "1", *flags,
    ]  # fmt: skip
    script = str(Path(__file__).with_name("counting_collectives.py"))
    _, calls = traced.run(argv, directory / "logs", script=script, env={"COUNTS_DIR": str(directory)})
    counts = [json.loads((directory / f"rank_{rank}.json").read_text()) for rank in RANKS]
    assert all(sum(mine.values()) > 20 for mine in counts)
    syncs = Counter(call for call, _ in calls.syncs)
    return Added(syncs, counts, [path for _, path in calls.syncs])


def test_recording_adds_no_fsync_and_no_collective(traced: TracedZygote, dataset: list[str], tmp_path: Path) -> None:
    small_run(traced, dataset, tmp_path / "first")  # builds the cache of the dataset's index
    on = small_run(traced, dataset, tmp_path / "on", "--restart-trace", "on")
    off = small_run(traced, dataset, tmp_path / "off", "--restart-trace", "off")
    assert list((tmp_path / "on" / "save" / "restart_trace").glob("*.jsonl"))
    assert not (tmp_path / "off" / "save" / "restart_trace").exists()
    assert on.collectives == off.collectives
    assert on.syncs == off.syncs
    assert on.syncs["fsync"] > 2 * 13


def test_durability_none_synchronises_nothing(traced: TracedZygote, dataset: list[str], tmp_path: Path) -> None:
    small_run(traced, dataset, tmp_path / "first")
    none = small_run(traced, dataset, tmp_path / "none", "--checkpoint-durability", "none")
    assert not none.paths
    assert (tmp_path / "none" / "save" / names.LATEST).read_text() == names.tag_of(2)
