"""What is wrong with hosts is said in one message before any rank is started, with exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.jobs import SCRIPT, Job, Preset
from tests.cluster.slurm import Slurm
from tests.dist.harness import HANGS_S

pytestmark = pytest.mark.slow
LAUNCHERS = ("torchrun", "fork", "deepspeed")


def message(job: Job, launcher: str, hostfile: Path) -> str:
    """The one line that a launch ends with; it has started no rank and made no checkpoint directory."""
    started = job.start(LAUNCHER=launcher, HOSTFILE=str(hostfile))
    assert started.wait(HANGS_S) == 2, job.log
    assert not (job.directory / "checkpoints").exists()
    (line,) = job.log.splitlines()
    assert line.startswith("run_tiny_tp2_pp2_dp2.sh: error: HOSTFILE=")
    return line


def test_hosts_that_cannot_be_reached_are_named(cluster: Cluster, preset: Preset) -> None:
    """A wrong key, a host that is down and one that nobody knows: each with what ssh says."""
    one, wrong_key, down, *_ = cluster.compute_nodes
    job = preset.job("unreachable", cluster.compute_nodes)
    wrong_key.run("cp", cluster.etc / "other_key.pub", "/run/authorized_keys")
    down.cut_link()
    slots = dict.fromkeys((one.name, wrong_key.name, down.name, "nobody"), "slots=2")
    hostfile = preset.hostfile(job, slots)
    try:
        said = message(job, "torchrun", hostfile)
    finally:
        wrong_key.run("cp", cluster.etc / "user_key.pub", "/run/authorized_keys")
        down.mend_link()
    assert f"{wrong_key.name} (root@{wrong_key.name}: Permission denied" in said
    assert f"{down.name} (ssh: connect to host {down.name} port 22: " in said
    assert "nobody (ssh: Could not resolve hostname nobody" in said
    assert f"on {one.name}" not in said


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_wrong_key_is_named_by_every_launcher(launcher: str, cluster: Cluster, preset: Preset) -> None:
    one, other, *_ = cluster.compute_nodes
    job = preset.job(f"wrong_key_{launcher}", [one, other])
    other.run("cp", cluster.etc / "other_key.pub", "/run/authorized_keys")
    try:
        said = message(job, launcher, preset.hostfile(job))
    finally:
        other.run("cp", cluster.etc / "user_key.pub", "/run/authorized_keys")
    assert f"on {other.name} (root@{other.name}: Permission denied" in said


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "SLURM_JOB_NUM_NODES=1: 4 ranks (TP 2 x PP 2 x DP 1) with 2 per node take 2 nodes"),
        ({"SLURM_NNODES": "2"}, "SLURM_JOB_NUM_NODES=1 and SLURM_NNODES=2 contradict each other"),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}, "SLURM_JOB_NODELIST=node0 names 1 hosts"),
    ],
)
def test_an_allocation_that_does_not_fit_is_named(
    changed: dict[str, str], message: str, cluster: Cluster, preset: Preset, slurm: Slurm
) -> None:
    """In an allocation of a real Slurm, with variables that its user has changed."""
    nodes = cluster.compute_nodes[:2]
    job = preset.job(f"allocation_{'_'.join(changed)}", nodes, LAUNCHER="srun", GPUS_PER_NODE="2")
    assignments = [f"{name}={value}" for name, value in changed.items()]
    launch = ("salloc", "--nodes=1", "--nodelist=node0", "env", *assignments, "bash", SCRIPT)
    done = cluster.login.run(*launch, env=job.settings | slurm.environment, check=False)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (job.directory / "checkpoints").exists()
