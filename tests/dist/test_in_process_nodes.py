"""In-process restarts over nodes: a real training goes on exactly, on two nodes of one rank each, and with a spare.

Agents are processes of this host. A rank is killed, and then its node is lost, which has served the rendezvous.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron.net.secret import VARIABLE as SECRET_VARIABLE
from tests.dist.harness import HANGS_S, ROOT, end_all, kill_all, losses, records, wait_for
from tests.dist.hold import held_environment
from tests.dist.test_launch import DROPOUT, all_held, environment, marked
from tests.dist.test_restart_drill import TRAINING
from tests.unit.trace_helpers import SECRET

HELD_AT = 8  # with a save every 5 iterations: 6, 7 and 8 are trained again, and then 11, 12 and 13
LAST = 16
LAUNCHER = [sys.executable, str(ROOT / "megatron" / "launch")]
NODES = 3


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["memory", pytest.param("lazy", marks=pytest.mark.nightly(minutes=1))])
def test_the_ranks_of_other_nodes_go_on_exactly_in_their_processes(
    tmp_path: Path, dataset: list[str], engine: str
) -> None:
    save, trace = tmp_path / "save", tmp_path / "save" / "restart_trace"
    script = [
        str(ROOT / "pretrain_gpt.py"), *dataset, *TRAINING, *DROPOUT, "--pipeline-model-parallel-size", "2",
        "--save", str(save), "--load", str(save), "--checkpoint-engine", engine, "--verify-restored-state",
        "--train-iters", str(LAST),
    ]  # fmt: skip
    env = environment(tmp_path) | held_environment(cycles=2, after=HELD_AT)
    env |= {SECRET_VARIABLE: SECRET, "HELD_RANKS": "0"}
    env["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("ab") as log:
            started.append(subprocess.Popen(command, cwd=tmp_path, stdout=stdout or log, stderr=log, env=env))
        return started[-1]

    def until(cycle: int, iteration: int) -> None:
        ready = lambda: all_held(trace, iteration, cycle)  # noqa: E731
        wait_for(lambda: ready() or coordinator.poll() is not None, f"iteration {iteration}")
        assert coordinator.poll() is None, (tmp_path / "log").read_text()[-6000:]

    try:
        coordinator = start(
            *LAUNCHER, "coordinate", "--nnodes", "2", "--spares", "1", "--max-restarts", "2",
            "--heartbeat-timeout", str(HANGS_S), "--port-file", str(tmp_path / "port"), *script,
        )  # fmt: skip
        wait_for((tmp_path / "port").exists, "the coordinator")
        forker = start(
            sys.executable, "-m", "tests.dist.forked_agents", str(NODES), "--coordinator",
            f"127.0.0.1:{(tmp_path / 'port').read_text().strip()}", "--node-rank", "NODE", "--address", "127.0.0.1",
            "--in-process-restart", "--return-timeout", str(HANGS_S), *script, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert forker.stdout is not None
        with forker.stdout as told:
            agents: list[int] = json.loads(told.readline())
        until(0, HELD_AT)
        os.kill(pid_of(trace, 0, 0), signal.SIGKILL)
        until(1, HELD_AT + 5)
        lost = psutil.Process(agents[0])
        kill_all([lost.pid, *(child.pid for child in lost.children(recursive=True))])
        assert coordinator.wait(HANGS_S) == 0, (tmp_path / "log").read_text()[-6000:]
        wait_for(lambda: marked(tmp_path) == [], "the end of all processes")
    finally:
        end_all(lambda: marked(tmp_path))
        for process in started:
            process.wait(HANGS_S)
    found = [losses(trace, cycle, 1) for cycle in range(3)]
    assert [(min(steps), max(steps)) for steps in found] == [(1, HELD_AT), (6, HELD_AT + 5), (11, LAST)]
    for before, after in zip(found, found[1:], strict=False):
        repeated = before.keys() & after.keys()
        assert len(repeated) == 3 and all(before[step] == after[step] for step in repeated)
    assert len({pid_of(trace, cycle, 1) for cycle in range(3)}) == 1
    assert len({pid_of(trace, cycle, 0) for cycle in range(3)}) == 3


def pid_of(trace: Path, cycle: int, rank: int) -> int:
    return int(records(trace, cycle, rank)[0]["pid"])
