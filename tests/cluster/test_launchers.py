"""Every launcher over several hosts: it trains, its ranks on one node are killed, and it resumes bit-exactly."""

from __future__ import annotations

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.jobs import HELD_AT, ITERATIONS, RANKS_PER_NODE, SAVED_AT, Job, Preset
from tests.dist.harness import losses

pytestmark = pytest.mark.slow


def assert_resumed_exactly(job: Job) -> None:
    """The second launch continued from the save, repeated what the first had done after it, and ran on every host."""
    for rank in range(job.world_size):
        before, after = losses(job.trace, 0, rank), losses(job.trace, 1, rank)
        assert sorted(before) == list(range(1, HELD_AT + 1))
        assert sorted(after) == list(range(SAVED_AT + 1, ITERATIONS + 1)), job.log[-6000:]
        again = range(SAVED_AT + 1, HELD_AT + 1)
        assert [after[step] for step in again] == [before[step] for step in again]
    names = [node.name for node in job.nodes for _ in range(RANKS_PER_NODE)]
    assert job.hosts(0) == job.hosts(1) == names


def test_torchrun_over_ssh(cluster: Cluster, preset: Preset) -> None:
    job = preset.job("torchrun", cluster.compute_nodes[:2])
    job.settings |= {"LAUNCHER": "torchrun", "HOSTFILE": str(preset.hostfile(job))}
    job.train_and_kill()
    job.train()
    assert_resumed_exactly(job)
