"""What a training waits for in vain: ranks behind a cut link, a disk that hangs. It ends, and says what it was."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

import pytest

from tests.cluster.cluster import Cluster, Node
from tests.cluster.jobs import Job, Preset
from tests.dist.harness import HANGS_S, losses, wait_for

pytestmark = pytest.mark.slow
DEADLINES = ("0.2", "1", "4")  # minutes


def trains(
    preset: Preset, name: str, nodes: Sequence[Node], flags: str = "", **settings: str
) -> tuple[Job, subprocess.Popen[bytes], str]:
    """A job of which all ranks have done two iterations, its launch, and its deadline for what it waits for.

    On a machine that is so busy that ranks wait for one another as long as the first deadline says, it ends before;
    then another one gets longer. The longest is more than any machine needs.
    """
    for minutes in DEADLINES:
        job, deadline = preset.job(f"{name}_{minutes}", nodes), f"--distributed-timeout-minutes {minutes}"
        job.settings |= {"ITERS": "100000", "HOSTFILE": str(preset.hostfile(job)), "TRACE_DIR": str(job.trace)}
        job.settings |= {"EXTRA_ARGS": f"--split 100,0,0 {flags} {deadline}"} | settings
        started = job.start()
        if done_by_all(job, started):
            return job, started, deadline
        started.wait(HANGS_S)
    pytest.fail(job.log[-6000:])


def done_by_all(job: Job, started: subprocess.Popen[bytes]) -> bool:
    """Whether all ranks have done two iterations; False if the launch has ended before."""

    def done() -> bool:
        return job.trace.exists() and all(2 in losses(job.trace, 0, rank) for rank in range(job.world_size))

    wait_for(lambda: started.poll() is not None or done(), "two iterations")
    return started.poll() is None


@pytest.mark.parametrize("launcher", ["fork", pytest.param("torchrun", marks=pytest.mark.nightly(minutes=1))])
def test_ranks_behind_a_cut_link_are_named_and_nothing_is_left(launcher: str, cluster: Cluster, preset: Preset) -> None:
    near, cut = cluster.compute_nodes[:2]
    job, started, deadline = trains(preset, f"cut_{launcher}", [near, cut], SAVE_INTERVAL="100000", LAUNCHER=launcher)
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

    job, started, _ = trains(
        preset, "frozen", nodes, "--keep-last 2", SAVE_INTERVAL="9", LAUNCHER="fork", SAVE_DIR=str(mounted / "c")
    )
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
