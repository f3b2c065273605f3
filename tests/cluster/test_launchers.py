"""Every launcher over several hosts: it trains, its ranks on one node are killed, and it resumes bit-exactly.

By default some start what others resume, most on two nodes. Each of them all of the way on four:

    LAUNCHERS_ALL=1 python -m pytest tests/cluster/test_launchers.py -k all_of_the_way
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.jobs import (
    HELD_AT,
    ITERATIONS,
    RANKS_PER_NODE,
    SAVED_AT,
    SCRIPT,
    Job,
    Preset,
    in_an_allocation,
    named_nodes,
)
from tests.cluster.slurm import Slurm
from tests.dist.harness import HANGS_S, losses

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


def test_megatron_launch_over_ssh(cluster: Cluster, preset: Preset) -> None:
    """On all four nodes: eight ranks cost four times the imports, not eight times."""
    job = preset.job("fork", cluster.compute_nodes)
    job.settings |= {"LAUNCHER": "fork", "HOSTFILE": str(preset.hostfile(job))}
    job.train_and_kill()
    job.resume()
    assert_resumed_exactly(job)


def test_deepspeed_over_pdsh_and_torchrun_over_ssh(cluster: Cluster, preset: Preset) -> None:
    """The one starts it, the other resumes it. pdsh leaves the ranks of other nodes alone, and held ones notice no lost
    connection: the script ends them. How torchrun over ssh ends is in test_waits.py."""
    job = preset.job("two_launchers", cluster.compute_nodes[:2])
    job.settings |= {"HOSTFILE": str(preset.hostfile(job)), "HOST_GRACE": "2"}
    job.settings["LAUNCHER"] = "deepspeed"
    job.train_and_kill()
    job.settings["LAUNCHER"] = "torchrun"
    job.resume()
    assert_resumed_exactly(job)


@pytest.mark.parametrize("launcher", ["fork", "deepspeed"])
def test_a_host_file_of_one_other_host(launcher: str, cluster: Cluster, preset: Preset) -> None:
    """All ranks run there, and none where the launch is typed."""
    node = cluster.compute_nodes[0]
    job = preset.job(f"one_other_{launcher}", [node], DP="1", ITERS="2", LAUNCHER=launcher)
    started = job.start(HOSTFILE=str(preset.hostfile(job, {node.name: "slots=4"})))
    assert started.wait(HANGS_S) == 0, job.log[-6000:]
    assert {job.first_record(0, rank)["host"] for rank in range(4)} == {node.name}


def test_srun_over_salloc_and_a_preset_that_submit_hands_to_sbatch(
    cluster: Cluster, preset: Preset, slurm: Slurm
) -> None:
    """From the login node, where salloc leaves its user and no rank runs: killed there, and resumed by a batch job.

    What Slurm refuses is told, and nothing runs.
    """
    job = preset.job("slurm", cluster.compute_nodes[:2], **slurm.environment)
    job.command = in_an_allocation(job)
    job.train_and_kill()

    job.command = submitted(job, "--partition=none")
    assert job.start().wait(HANGS_S) == 2
    assert "submit.sh: error: sbatch refused " in job.log and "Invalid partition" in job.log, job.log
    assert not list(job.trace.glob("*_cycle_001*"))
    job.command = submitted(job, "--wait")
    job.resume()
    assert_resumed_exactly(job)
    assert len(list(job.directory.glob("slurm-*.out"))) == 1


@pytest.mark.skipif("LAUNCHERS_ALL" not in os.environ, reason="takes 5 minutes; set LAUNCHERS_ALL to run it")
@pytest.mark.parametrize("launcher", ["torchrun", "fork", "deepspeed", "salloc", "sbatch"])
def test_all_of_the_way(launcher: str, cluster: Cluster, preset: Preset, slurm: Slurm) -> None:
    job = preset.job(f"all_of_the_way_{launcher}", cluster.compute_nodes)
    if launcher == "salloc":
        job.settings |= slurm.environment
        job.command = in_an_allocation(job)
    elif launcher == "sbatch":
        job.settings |= slurm.environment
        job.command = submitted(job, "--wait")
    else:
        job.settings |= {"LAUNCHER": launcher, "HOSTFILE": str(preset.hostfile(job)), "HOST_GRACE": "2"}
    job.train_and_kill()
    job.resume()
    assert_resumed_exactly(job)


def submitted(job: Job, option: str) -> tuple[str | Path, ...]:
    """The command that hands the preset to sbatch, for the job's nodes. `option`: of sbatch."""
    preset = SCRIPT.stem.removeprefix("run_")
    submit = ("bash", SCRIPT.parent / "submit.sh", preset, "--nodes", str(len(job.nodes)))
    return (*submit, "--", named_nodes(job), option)
