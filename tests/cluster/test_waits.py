"""What a training waits for in vain: ranks behind a cut link, a disk that hangs. It ends, and says what it was."""

from __future__ import annotations

import re

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.jobs import Preset
from tests.dist.harness import HANGS_S, losses, wait_for

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("launcher", ["fork", pytest.param("torchrun", marks=pytest.mark.nightly(minutes=1))])
def test_ranks_behind_a_cut_link_are_named_and_nothing_is_left(launcher: str, cluster: Cluster, preset: Preset) -> None:
    near, cut = cluster.compute_nodes[:2]
    job = preset.job(f"cut_link_{launcher}", [near, cut], ITERS="100000", SAVE_INTERVAL="100000", LAUNCHER=launcher)
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
        cut.repair_link()
    for rank in (0, 1):  # what the others print does not come through
        (error,) = re.findall(rf"error on rank {rank}, {near.name}: .*", job.log)
        assert deadline in error and "training step" in error, error
        assert f"ranks 2, 3 on {cut.name} do not answer" in error, error


def test_a_disk_that_hangs_is_named(cluster: Cluster, preset: Preset) -> None:
    """The file system of the checkpoints is frozen: who writes there waits in the kernel, and cannot even be killed.

    Steps go on until the next save.
    """
    nodes = cluster.compute_nodes[:2]
    image, mounted = cluster.directory / "disk.img", cluster.directory / "disk"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(256 << 20)
    nodes[0].run("mkfs.ext4", "-q", image)
    nodes[0].run("mount", "-o", "loop", image, mounted)  # the device goes with the last node that has it mounted
    device = nodes[0].run("findmnt", "-n", "-o", "SOURCE", mounted).stdout.strip()
    nodes[1].run("mount", device, mounted)

    job = preset.job("frozen", nodes, ITERS="100000", SAVE_INTERVAL="9", LAUNCHER="fork", SAVE_DIR=str(mounted / "c"))
    job.settings |= {"TRACE_DIR": str(job.trace), "HOSTFILE": str(preset.hostfile(job))}
    flags = "--split 100,0,0 --keep-last 2 --distributed-timeout-minutes 0.15"
    started = job.start(EXTRA_ARGS=flags)
    wait_for(
        lambda: started.poll() is not None or (job.trace.exists() and 2 in losses(job.trace, 0, 0)), "two iterations"
    )
    assert started.poll() is None, job.log[-6000:]
    nodes[0].run("fsfreeze", "--freeze", mounted)
    try:
        wait_for(lambda: "error on rank" in job.log or started.poll() is not None, "a message")
        assert "error on rank" in job.log, job.log[-6000:]
    finally:
        nodes[0].run("fsfreeze", "--unfreeze", mounted)
    assert started.wait(HANGS_S) != 0
    for node in (*nodes, cluster.login):
        wait_for(lambda node=node: not job.left_on(node), f"the end of the launch on {node.name}")
    errors = re.findall(r"error on rank (\d+), (\S+): (.*)", job.log)
    assert errors and len({rank for rank, _, _ in errors}) == len(errors), errors  # one message of each
    for _, _, text in errors:
        assert re.search(r"rank \d+ on node[01] has been in .*(global_step\d+|/\.generations)", text), text
