"""The tiny preset as a user of a cluster starts it: by the launch script, on the login node."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from restart_trace.ancestors import read_text
from tests.cluster.cluster import Cluster, Node
from tests.dist.harness import HANGS_S, ROOT, losses, records, wait_for
from tests.dist.hold import held_environment

SCRIPT = ROOT / "examples_deepspeed" / "restart_bench" / "run_tiny_tp2_pp2_dp2.sh"
RANKS_PER_NODE = 2
SAVED_AT = 3
HELD_AT = 5  # iterations of a launch: the last two are trained again
ITERATIONS = 9
# Set by the user on the login node; every rank must have them.
CARRIED = {
    "NCCL_DEBUG_FILE": '/logs/it\'s a "file" of $HOME',
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
    "OMP_PLACES": "{0},{1}",
    "LD_LIBRARY_PATH": "/opt/a b/lib",
    "HF_HOME": "/hf; exit 3",
    "MY_SETTING": "[c]*",
}


@dataclass
class Job:
    """One training, which may be launched several times; its files are in `directory`."""

    preset: Preset
    directory: Path
    nodes: Sequence[Node]
    settings: dict[str, str]
    command: Sequence[str | Path] = ("bash", SCRIPT)
    launches: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return RANKS_PER_NODE * len(self.nodes)

    @property
    def trace(self) -> Path:
        return self.directory / "checkpoints" / "restart_trace"

    @property
    def log(self) -> str:
        """What the newest launch printed."""
        return self._log(len(self.launches) - 1).read_text(errors="replace")

    def start(self, **settings: str) -> subprocess.Popen[bytes]:
        """Launch on the login node."""
        log = self._log(len(self.launches))
        started = self.preset.cluster.login.start(*self.command, env=self.settings | settings, log=log)
        self.launches.append(started)
        return started

    def train_and_kill(self, **settings: str) -> None:
        """Launch; kill the ranks of the last node when all have trained HELD_AT iterations: the launch ends, and
        nothing is left."""
        started = self._start_and_hold(HELD_AT, **settings)
        assert self.nodes[-1].send(signal.SIGKILL, "pretrain_gpt.py") >= RANKS_PER_NODE
        assert started.wait(HANGS_S) != 0, self.log[-6000:]
        for node in (*self.nodes, self.preset.cluster.login):
            wait_for(lambda node=node: not self.left_on(node), f"the end of the launch on {node.name}")

    def resume(self, **settings: str) -> None:
        """Launch again, and wait for the good end."""
        cycle = len(self.launches)
        started = self._start_and_hold(1, **settings)
        injected = json.dumps({"phase": "injected", "cycle": cycle}) + "\n"
        (self.trace / "supervisor.jsonl").write_text(injected * ITERATIONS)  # they wait for no more than this
        assert started.wait(HANGS_S) == 0, self.log[-6000:]

    def _start_and_hold(self, after: int, **settings: str) -> subprocess.Popen[bytes]:
        """Launch, and return when all ranks wait after so many iterations; they were started with all of CARRIED."""
        cycle = len(self.launches)
        held = held_environment(cycles=cycle + 1, after=after)
        started = self.start(**settings, **held, EXPORT="MY_SETTING HELD_CYCLES HELD_AFTER")
        ranks, step = range(self.world_size), after + cycle * SAVED_AT

        def all_held() -> bool:
            return self.trace.exists() and all(step in losses(self.trace, cycle, rank) for rank in ranks)

        wait_for(lambda: all_held() or started.poll() is not None, f"iteration {step}")
        assert started.poll() is None, self.log[-6000:]
        for node in self.nodes:
            assert self.ranks_with(node, CARRIED) >= RANKS_PER_NODE, f"{node.name} lacks some of {CARRIED}"
        return started

    def ranks_with(self, node: Node, variables: Mapping[str, str]) -> int:
        """Processes of the training on a node that were started with these variables."""
        entries = {f"{name}={value}" for name, value in variables.items()}
        found = [pid for pid, command in self.left_on(node).items() if "pretrain_gpt.py" in command]
        return sum(entries <= set(read_text(pid, "environ").split("\0")) for pid in found)

    def left_on(self, node: Node) -> dict[int, str]:
        """Processes of this launch on a node."""
        return {pid: command for pid, command in node.processes().items() if str(self.directory) in command}

    def hosts(self, cycle: int) -> list[str]:
        """The host of each rank, as its trace has it."""
        return [self.first_record(cycle, rank)["host"] for rank in range(self.world_size)]

    def first_record(self, cycle: int, rank: int) -> dict[str, Any]:
        return records(self.trace, cycle, rank)[0]

    def _log(self, launch: int) -> Path:
        return self.directory / f"launch_{launch}.log"


@dataclass(frozen=True)
class Preset:
    """Makes jobs on a cluster. `data`: a dataset and its tokenizer on the shared file system."""

    cluster: Cluster
    data: Path

    def job(self, name: str, nodes: Sequence[Node], **settings: str) -> Job:
        directory = self.cluster.directory / "jobs" / name
        directory.mkdir(parents=True)
        common = {
            "WORK_DIR": str(directory),
            "DATA_PATH": str(self.data / "corpus_text_document"),
            "TOKENIZER_MODEL": str(self.data / "tokenizer.model"),
            "KILL_AT": "none",
            "ITERS": str(ITERATIONS),
            "SAVE_INTERVAL": str(SAVED_AT),
            "SEQ_LENGTH": "16",  # iterations of 0.3 s in place of 2.5 s on two busy cores; what is saved stays the same
            "MICRO_BATCH": "1",
            "DP": str(len(nodes) * RANKS_PER_NODE // 4),
            "EXTRA_ARGS": "--verify-restored-state --checkpoint-durability none --split 100,0,0",
            "DEVICE": "cpu",
            "SKIP_SETUP": "1",
            "PYTHON": sys.executable,
            **CARRIED,
            "EXPORT": "MY_SETTING",
        }
        return Job(self, directory, nodes, common | settings)

    def hostfile(self, job: Job, lines: Mapping[str, str] | None = None) -> Path:
        """The job's HOSTFILE: its nodes with two slots each."""
        path = job.directory / "hosts"
        named = lines or {node.name: f"slots={RANKS_PER_NODE}" for node in job.nodes}
        path.write_text("".join(f"{name} {slots}\n" for name, slots in named.items()))
        return path


def in_an_allocation(job: Job) -> tuple[str | Path, ...]:
    """The command that has srun start the ranks on the job's nodes, from the login node."""
    allocation = (f"--nodes={len(job.nodes)}", f"--ntasks-per-node={RANKS_PER_NODE}", named_nodes(job))
    return ("salloc", *allocation, "env", "LAUNCHER=srun", f"GPUS_PER_NODE={RANKS_PER_NODE}", "bash", SCRIPT)


def named_nodes(job: Job) -> str:
    """The job's own nodes: Slurm would take others while these are still completing another job."""
    return f"--nodelist={','.join(node.name for node in job.nodes)}"
