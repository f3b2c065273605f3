"""SIGKILL of any rank, any agent, and both, with copies on two nodes: no torn save is used, and nothing is left.

Agents and their coordinator are real processes on this host, and the ranks save with the real engine at every step.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.net.handshake import COORDINATOR, connect
from megatron.net.secret import VARIABLE as SECRET_VARIABLE
from restart_trace.cycles import LAUNCH_ID_VARIABLE
from tests.dist.harness import end_all, kill_all
from tests.own_shm import in_own_shm, left_in_shm
from tests.unit.certificates import make_files
from tests.unit.megatron.launch.test_launch import until
from tests.unit.megatron.launch.test_nodes import NEVER_SILENT, RANKS, Nodes
from tests.unit.trace_helpers import ROOT, SECRET

ROUNDS = int(os.environ.get("MEMORY_KILL_ROUNDS", "1"))  # more for a longer look
# Ranks, and places of nodes, that are killed at once; a rank is one of a node that lives.
KILLS = ROUNDS * (
    ((0,), ()), ((1,), ()), ((2,), ()), ((3,), ()), ((0, 1, 2, 3), ()),
    ((), (0,)), ((), (1,)), ((2,), (0,)), ((0, 1), (1,)),
)  # fmt: skip
KILLS_WITH_TLS = (((2,), ()), ((), (0,)))
WAIT_MS = 30
WAIT_S = 300.0
TRAIN = "from tests.unit.megatron.launch.memory_nodes import train\ntrain()\n"


class Started(NamedTuple):
    """One rank of a start: where it runs, and what it has loaded."""

    pid: int
    step: int
    tier: str
    node: str


class MemoryNodes(Nodes):
    """Nodes whose agents one process forks, which has imported torch and the engine."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        (directory / "script.py").write_text(TRAIN)
        self.listing = directory / "left_in_shm"
        self._forker: subprocess.Popen[str] | None = None
        self.agents: dict[str, int] = {}  # name of the node -> pid

    def fork_agents(self, count: int, *options: str) -> None:
        where = f"127.0.0.1:{(self.directory / 'port').read_text().strip()}"
        command = [
            sys.executable, "-m", "tests.unit.megatron.launch.memory_nodes", "--coordinator", where, "--address",
            "127.0.0.1", "--nproc-per-node", RANKS, *options, "script.py", "--checkpoint-engine", "memory",
        ]  # fmt: skip
        env = os.environ | {"PYTHONPATH": str(ROOT), "MARK": str(self.directory), "DS_ACCELERATOR": "cpu"}
        env[SECRET_VARIABLE] = SECRET
        for name in (LAUNCH_ID_VARIABLE, "MEGATRON_MEMORY_SLOTS", "MEGATRON_MEMORY_COPIES"):
            env.pop(name, None)
        self._forker = subprocess.Popen(
            in_own_shm(command, self.listing), cwd=self.directory, env=env, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._forker.stdin is not None and self._forker.stdout is not None
        for number in range(count):
            self._forker.stdin.write(f"{number}\n")
            self._forker.stdin.flush()
            self.agents[f"node{number}"] = int(self._forker.stdout.readline())

    def forker_ends(self) -> int:
        assert self._forker is not None and self._forker.stdin is not None
        self._forker.stdin.close()
        return self._forker.wait(300)

    def all_started(self, restart: int) -> list[Started]:
        paths = [self.directory / f"start_{restart}_{rank}" for rank in range(4)]
        self.until(lambda: all(path.exists() for path in paths), f"start {restart}")
        return [Started(*json.loads(path.read_text())) for path in paths]

    def steps(self, name: str, restart: int) -> list[int]:
        """Steps since this start that are done on some rank; or `agreed`, on whose saves, as rank 0 has told."""
        path = self.directory / name
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [int(step) for start, step in lines if int(start) == restart]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        until(lambda: condition() or any(self.directory.glob("torn_*")), f"{what}: {self.said()}{self.agents_said()}")

    def agents_said(self) -> str:
        return "".join(path.read_text()[-1500:] for path in self.directory.glob("agent*.log"))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[MemoryNodes]:
    made = MemoryNodes(tmp_path)
    yield made
    end_all(made.left)
    made.forker_ends()
    for started in made.started:
        started.wait(300)


@pytest.mark.slow
def test_what_is_killed_leaves_a_whole_save_and_nothing_else(nodes: MemoryNodes) -> None:
    kill_in_turn(nodes, KILLS)


@pytest.mark.slow
def test_it_does_with_tls_too(nodes: MemoryNodes) -> None:
    """Coordinator, agents, copies and agreements; who has no certificate is not let in."""

    def try_without(port: int) -> None:
        with pytest.raises(ConnectionResetError, match="does it alone use TLS"):
            connect(("127.0.0.1", port), SECRET.encode(), COORDINATOR, WAIT_S)

    kill_in_turn(nodes, KILLS_WITH_TLS, make_files(nodes.directory / "tls").flags, try_without)


def kill_in_turn(
    nodes: MemoryNodes,
    kills: Sequence[tuple[Sequence[int], Sequence[int]]],
    options: Sequence[str] = (),
    meanwhile: Callable[[int], object] = lambda _: None,
) -> None:
    """`options`: of coordinator and agents. `meanwhile` is told the coordinator's port."""
    spares = sum(len(places) for _, places in kills)
    coordinator = nodes.coordinate(
        "--nnodes", "2", "--spares", str(spares), "--max-restarts", str(len(kills)),
        "--heartbeat-timeout", NEVER_SILENT, *options,
    )  # fmt: skip
    meanwhile(int((nodes.directory / "port").read_text()))
    nodes.fork_agents(2 + spares, *options)
    generator = random.Random(17)
    for restart, (ranks, places) in enumerate(kills):
        started = nodes.all_started(restart)
        nodes.until(lambda restart=restart: len(nodes.steps("agreed", restart)) >= 2, f"two saves of start {restart}")
        time.sleep(generator.random() * WAIT_MS / 1000)
        lost = [started[2 * place].node for place in places]
        kill_all([*(nodes.agents[node] for node in lost), *(started[rank].pid for rank in ranks)])
        after = nodes.all_started(restart + 1)
        assert not list(nodes.directory.glob("torn_*")), nodes.agents_said()
        # Rank 0 may have been killed before it told of an agreement.
        newest = nodes.steps("agreed", restart)[-1]
        assert {rank.step for rank in after} <= {newest, newest + 1} and len({rank.step for rank in after}) == 1
        assert max(nodes.steps("done", restart)) - after[0].step <= 1, "more than one finished step is lost"
        for rank in after:
            own = any(rank.node == before.node for before in started)
            assert rank.tier == ("local_memory" if own else "peer"), (restart, after)
        assert sum(rank.tier == "peer" for rank in after) == 2 * len(places)
    nodes.finish()
    assert coordinator.wait(300) == 0, nodes.said() + nodes.agents_said()
    assert nodes.forker_ends() == 0
    nodes.until_gone()
    assert left_in_shm(nodes.listing) == []
