"""A link that is cut while ranks on both of its sides train: all of them end, and say which ranks they cannot reach."""

from __future__ import annotations

import re

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.jobs import Preset
from tests.dist.harness import HANGS_S, losses, wait_for

pytestmark = pytest.mark.slow


def test_ranks_behind_a_cut_link_are_named_and_nothing_is_left(cluster: Cluster, preset: Preset) -> None:
    near, cut = cluster.compute_nodes[:2]
    job = preset.job("cut_link", [near, cut], ITERS="100000", SAVE_INTERVAL="100000", LAUNCHER="torchrun")
    deadline = "--distributed-timeout-minutes 0.25"
    job.settings |= {"HOSTFILE": str(preset.hostfile(job)), "EXTRA_ARGS": f"{job.settings['EXTRA_ARGS']} {deadline}"}
    started = job.start()
    ranks = range(job.world_size)
    wait_for(
        lambda: (
            started.poll() is not None
            or (job.trace.exists() and all(2 in losses(job.trace, 0, rank) for rank in ranks))
        ),
        "two iterations",
    )
    assert started.poll() is None, job.log[-6000:]
    cut.cut_link()
    try:
        assert started.wait(HANGS_S) != 0
        for node in (near, cut, cluster.login):
            wait_for(lambda node=node: not job.left_on(node), f"the end of the launch on {node.name}")
    finally:
        cut.mend_link()
    for rank in (0, 1):  # what the others print does not come through
        (error,) = re.findall(rf"error on rank {rank}, {near.name}: .*", job.log)
        assert deadline in error and "training step" in error, error
        assert f"ranks 2, 3 on {cut.name} do not answer" in error, error
