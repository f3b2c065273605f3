"""Engine `memory` when a node is lost and no spare is left: the next layout reads the saves in memory, not storage.

Four agents on this host, forked from one process, of one rank each, and a coordinator. Two nodes go on; what the lost
and the idle one had is in memory of the idle one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron.checkpointing.engines.lazy import format as lazy_format
from megatron.checkpointing.engines.lazy import header as lazy_header
from megatron.net.secret import VARIABLE as SECRET_VARIABLE
from megatron.peers.memory_slots import slots_held_by
from tests.dist.harness import HANGS_S, ROOT, Zygote, end_all, losses, records, wait_for
from tests.dist.hold import held_environment
from tests.dist.test_launch import environment, marked
from tests.dist.test_restart_drill import TRAINING
from tests.unit.trace_helpers import SECRET

HELD_AT = 4  # every iteration is saved, and this one to storage, too
LAST = 7
LAUNCHER = [sys.executable, str(ROOT / "megatron" / "launch")]
NODES = 4
SCRIPT = str(ROOT / "pretrain_gpt.py")


class Job:
    """Four replicas, held after iteration HELD_AT."""

    def __init__(self, directory: Path, dataset: list[str], *more: str) -> None:
        self.directory, self.trace = directory, directory / "save" / "restart_trace"
        self.started: list[subprocess.Popen[bytes]] = []
        self._training = [*dataset, *TRAINING, "--global-batch-size", "4", "--train-iters", str(LAST)]
        save = str(directory / "save")
        script = [
            SCRIPT, *self._training, "--save", save, "--load", save, "--save-interval", "1", "--checkpoint-engine",
            "memory", "--persist-interval", str(HELD_AT), "--peer-timeout", str(HANGS_S), *more,
        ]  # fmt: skip
        self.coordinator = self._start(
            *LAUNCHER, "coordinate", "--nnodes", str(NODES), "--max-restarts", "1", "--allow-shrink",
            "--heartbeat-timeout", "20", "--port-file", str(directory / "port"), *script,
        )  # fmt: skip
        wait_for((directory / "port").exists, "the coordinator")
        where = "127.0.0.1:" + (directory / "port").read_text().strip()
        forker = self._start(
            sys.executable, "-m", "tests.dist.forked_agents", str(NODES), "--coordinator", where, "--node-rank", "NODE",
            "--address", "127.0.0.1", *script, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert forker.stdout is not None
        with forker.stdout as told:
            self.agents: list[int] = json.loads(told.readline())

    def _start(self, *command: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        """Start a process that writes to the log; its ranks are held."""
        env = environment(self.directory) | held_environment(cycles=1, after=HELD_AT) | {SECRET_VARIABLE: SECRET}
        env["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
        with (self.directory / "log").open("ab") as log:
            started = subprocess.Popen(command, cwd=self.directory, stdout=stdout or log, stderr=log, env=env)
        self.started.append(started)
        return started

    @property
    def output(self) -> str:
        return (self.directory / "log").read_text()

    def until_held(self) -> None:
        wait_for(lambda: self.coordinator.poll() is not None or all(map(self._saved, range(NODES))), "the last save")
        assert self.coordinator.poll() is None, self.output[-6000:]

    def _saved(self, rank: int) -> bool:
        found = records(self.trace, 0, rank) if self.trace.exists() else []
        ends = [r for r in found if r["type"] == "operation_end" and r["operation"] == "save"]
        return any(r["step"] == HELD_AT and r["outcome"] == "ok" for r in ends)

    def lose(self, node: int) -> None:
        """Kill the agent of a node and all that it has started, at once."""
        agent = psutil.Process(self.agents[node])
        for process in (agent, *agent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # ended with its agent
                process.kill()

    def flip_bits(self, node: int, *, header: bool = False) -> None:
        """In the newest save in the slots of a node: in each tensor that ranks read parts of; `header`: everywhere."""
        ((*slots,),) = slots_held_by(self.agents[node])
        newest = max(slots, key=lambda slot: (slot.record() or {"step": 0})["step"])
        path = Path(f"/proc/self/fd/{newest.data}")
        contents = lazy_format.decode(lazy_header.read_header(path), path)
        placed = [entry for entry in contents.entries.values() if entry.placement is not None]
        middles = [contents.data_start + (entry.start + entry.stop) // 2 for entry in placed]
        for position in range(0, newest.num_bytes, 1 << 14) if header else middles:
            (byte,) = os.pread(newest.data, 1, position)
            os.pwrite(newest.data, bytes([byte ^ 4]), position)
        for slot in slots:
            slot.close()

    def from_storage(self, zygote: Zygote, ranks: int = 2) -> dict[int, float]:
        """The losses of so many replicas, the layout that went on, if it loads iteration HELD_AT from storage."""
        trace = self.directory / "other_trace"
        flags = [
            "--load", str(self.directory / "save"), "--load-tag", f"global_step{HELD_AT}", "--restart-trace-dir",
            str(trace), "--save", str(self.directory / "other"),
        ]  # fmt: skip
        other = zygote.run([*self._training, *flags], ranks, self.directory / "other_logs")
        assert other.ok, other.output[-6000:]
        return losses(trace, 0, 1)

    def end(self) -> None:
        end_all(lambda: marked(self.directory))
        for process in self.started:
            process.wait(HANGS_S)


def run(directory: Path, dataset: list[str], harm: Callable[[Job], None] = lambda job: None) -> Job:
    """The job, of which node 3 is lost."""
    job = Job(directory, dataset)
    try:
        job.until_held()
        harm(job)
        job.lose(3)
        assert job.coordinator.wait(HANGS_S) == 0, job.output[-6000:]
        wait_for(lambda: marked(directory) == [], "the end of all processes")
        assert "going on with TP1 PP1 DP2 on 2 nodes (--allow-shrink)" in job.output
        return job
    finally:
        job.end()


@pytest.fixture(scope="module")
def undamaged(
    tmp_path_factory: pytest.TempPathFactory, dataset: list[str], zygote: Zygote
) -> tuple[Job, dict[int, float]]:
    """A job that loses node 3 alone, and the losses if the same is loaded from storage."""
    job = run(tmp_path_factory.mktemp("undamaged"), dataset)
    return job, job.from_storage(zygote)


@pytest.mark.slow
def test_the_next_layout_reads_what_is_left_in_memory(undamaged: tuple[Job, dict[int, float]]) -> None:
    job, stored = undamaged
    for rank in (0, 1):
        found = records(job.trace, 1, rank)
        (load,) = [r for r in found if r["type"] == "operation_end" and r["operation"] == "load"]
        spans = [r for r in found if r["type"] == "span" and r["phase"] == "load"]
        assert (load["outcome"], load["step"]) == ("ok", HELD_AT)
        # The first half lies on the host of rank 0: its own slot, and its copy of its neighbour's.
        assert {r["tier"] for r in spans if r.get("detail") == "download"} == {("local_memory", "peer")[rank]}
        assert {r["tier"] for r in spans} <= {"local_memory", "peer"}
        fetched = sum(r["bytes"] for r in spans if r.get("detail") == "download")
        # Each of the two replicas needs half of masters and moments: of the four files no weights, and no other half.
        assert 0 < fetched < 1.5 * load["bytes"]
    before, after = losses(job.trace, 0, 1), losses(job.trace, 1, 1)
    assert sorted(before) == list(range(1, HELD_AT + 1)) and sorted(after) == list(range(HELD_AT + 1, LAST + 1))
    assert after == stored, "the same state, to the last bit"


@pytest.mark.slow
@pytest.mark.nightly(minutes=1)
def test_a_damaged_slot_is_named_and_storage_read(
    tmp_path: Path, dataset: list[str], undamaged: tuple[Job, dict[int, float]]
) -> None:
    job = run(tmp_path, dataset, lambda job: job.flip_bits(2))
    for rank in (0, 1):
        found = records(job.trace, 1, rank)
        (load,) = [r for r in found if r["type"] == "operation_end" and r["operation"] == "load"]
        told = [r["detail"] for r in found if r["type"] == "event" and r["phase"] == "checkpoint_rejected"]
        named = f"global_step{HELD_AT} in host memory/rank_00002.safetensors: tensor "
        assert told and all(why.startswith(named) for why in told), told
        reads = [r for r in found if r["type"] == "span" and r.get("detail") == "read"]
        assert (load["outcome"], load["step"], reads[-1]["tier"]) == ("ok", HELD_AT, "storage")
    _, stored = undamaged
    assert {step: loss for step, loss in losses(job.trace, 1, 1).items() if step in stored} == stored


@pytest.mark.slow
@pytest.mark.parametrize(
    "header", [False, pytest.param(True, marks=pytest.mark.nightly(minutes=1))], ids=["tensors", "header"]
)
def test_of_a_damaged_slot_the_copy_is_read(
    tmp_path: Path, dataset: list[str], undamaged: tuple[Job, dict[int, float]], header: bool
) -> None:
    """Node 0 goes on and would read its slot as it lies there; node 1 holds a copy of it."""
    _, stored = undamaged
    job = run(tmp_path, dataset, lambda job: job.flip_bits(0, header=header))
    for rank in (0, 1):
        found = records(job.trace, 1, rank)
        (load,) = [r for r in found if r["type"] == "operation_end" and r["operation"] == "load"]
        assert (load["outcome"], load["step"]) == ("ok", HELD_AT)
        assert "storage" not in {r.get("tier") for r in found if r["type"] == "span" and r["phase"] == "load"}
    told = [r["detail"] for r in records(job.trace, 1, 0) if r["type"] == "event" and r["phase"] == "copy_rejected"]
    by_itself, by_all = "rank 0: rank_00000.safetensors of ", "rank_00000.safetensors of "
    assert told and told[0].startswith(by_itself if header else by_all) and told[-1] in job.output
    after = losses(job.trace, 1, 1)
    assert sorted(after) == list(range(HELD_AT + 1, LAST + 1)) and after == stored, "the same state, to the last bit"
