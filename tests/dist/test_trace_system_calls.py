"""The trace against the kernel's own account (strace): bytes written, time in fsync, and nothing added."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.store import naming as names
from tests.dist.harness import Run, Zygote, records, wait_for
from tests.dist.tiny_runs import Launcher, parallel
from tests.dist.trace_runs import BIG, ONE_ITERATION, PAIR, RANKS, SMALL, bytes_by_file, checkpoint_sizes

SYSTEM_CALLS = (
    "write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,fsync,fdatasync,sync,syncfs,sync_file_range,msync"
)
SYNCS = {"fsync", "fdatasync", "sync", "syncfs", "sync_file_range", "msync"}


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
        wait_for(lambda: all(map(is_finished, mine)), "the end of strace's account")
        # The account of the zygote itself goes on.
        return run, read_calls([path for path in set(self.directory.iterdir()) - before if is_finished(path)])


def is_finished(account: Path) -> bool:
    """Whether the thread of this account has ended."""
    return account.read_text().endswith("+++\n")


LINE = re.compile(r"^(?P<call>\w+)\((?:\d+<(?P<path>[^>]*)>)?.*\) += (?P<result>-?\d+).*<(?P<seconds>[\d.]+)>$")


def read_calls(files: list[Path]) -> SystemCalls:
    found = SystemCalls()
    for line in (line for file in files for line in file.read_text().splitlines()):
        match = LINE.match(line)
        if match is None:
            # "???(": the thread was killed as it entered a call, before strace could see which.
            assert line.startswith(("+++", "---", "???(")), f"strace wrote a line that is not understood: {line}"
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
    """Beside the ranks' files only the commit's own, which are in no rank's bytes, and what a start writes."""
    others = {
        Path(path).name
        for path, num_bytes in calls.written.items()
        if Path(path).is_relative_to(save)
        and num_bytes
        and not path.endswith(".pt")
        and Path(path).parent.name != names.GENERATIONS
    }
    probes = {name for name in others if name.startswith(("#", ".write_probe_"))}  # "#": a file without a name
    assert others - probes == {f".{name}.tmp" for name in (names.MANIFEST, names.LATEST, names.TRACKER)}


def assert_fsync_times_agree(totals: list[tuple[float, float]]) -> None:
    """No less by the log than by the kernel, and at least once no more than the tracer and other processes take."""
    assert all(logged > 0.9 * by_kernel for logged, by_kernel in totals), totals
    assert min(logged - max(2 * by_kernel, by_kernel + 1.0) for logged, by_kernel in totals) < 0, totals


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


@pytest.fixture(scope="module")
def indexed(zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """The cache of the dataset's index for small runs is there: the first of them would build it."""
    Launcher(zygote, dataset, tmp_path_factory.mktemp("indexed")).train(PAIR, *SMALL, *ONE_ITERATION)


@pytest.mark.usefixtures("indexed")
def test_recording_adds_no_fsync_and_no_collective(traced: TracedZygote, dataset: list[str], tmp_path: Path) -> None:
    on = small_run(traced, dataset, tmp_path / "on", "--restart-trace", "on")
    off = small_run(traced, dataset, tmp_path / "off", "--restart-trace", "off")
    assert list((tmp_path / "on" / "save" / "restart_trace").glob("*.jsonl"))
    assert not (tmp_path / "off" / "save" / "restart_trace").exists()
    assert on.collectives == off.collectives
    assert on.syncs == off.syncs
    assert on.syncs["fsync"] > 2 * 13


@pytest.mark.usefixtures("indexed")
def test_durability_none_synchronises_nothing(traced: TracedZygote, dataset: list[str], tmp_path: Path) -> None:
    none = small_run(traced, dataset, tmp_path / "none", "--checkpoint-durability", "none")
    assert not none.paths
    assert (tmp_path / "none" / "save" / names.LATEST).read_text() == names.tag_of(2)
