"""What is wrong with hosts is said in one message before any rank is started, with exit status 2."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from restart_trace import version
from tests.cluster.cluster import Cluster
from tests.cluster.jobs import SCRIPT, Job, Preset
from tests.cluster.slurm import Slurm
from tests.dist.harness import HANGS_S, losses, wait_for

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


def test_a_port_that_is_taken_is_named_by_every_launcher(cluster: Cluster, preset: Preset) -> None:
    """Where rank 0 would serve the rendezvous, which is not the login node."""
    one, other, *_ = cluster.compute_nodes
    job = preset.job("taken_port", [one, other])
    listening = job.directory / "listening"
    code = f"import socket; s = socket.create_server(('', 29500)); open({str(listening)!r}, 'w'); s.accept()"
    holder = one.start(sys.executable, "-c", code, log=job.directory / "holder.log")
    try:
        wait_for(listening.exists, "a taken port")
        for launcher in LAUNCHERS:
            assert job.start(LAUNCHER=launcher, HOSTFILE=str(preset.hostfile(job))).wait(HANGS_S) == 2, job.log
            (line,) = job.log.splitlines()
            assert f"error: MASTER_PORT=29500: another process listens there on {one.name}, where rank 0 runs" in line
    finally:
        one.send(signal.SIGKILL, str(listening))
        holder.wait(HANGS_S)


@pytest.mark.parametrize(
    ("launcher", "settings", "says"),
    [
        ("torchrun", {}, "error: host {other} runs megatron-restart 0"),
        ("deepspeed", {"HOST_GRACE": "2"}, "error: host {other} runs megatron-restart 0"),
        ("fork", {}, "error: host {other} runs megatron-restart 0"),
        ("fork", {"MAX_RESTARTS": "1"}, "[launch] error: node "),
    ],
)
def test_a_host_with_other_code_is_named(
    launcher: str, settings: dict[str, str], says: str, cluster: Cluster, preset: Preset
) -> None:
    """One message, from before any rank trains; where there is a coordinator, from before any is started."""
    one, other, *_ = cluster.compute_nodes
    job = preset.job(f"other_code_{launcher}_{len(settings)}", [one, other])
    module = Path(version.__file__)
    changed = job.directory / "version.py"
    changed.write_text(module.read_text() + "# changed\n")
    other.run("mount", "--bind", changed, module)
    try:
        started = job.start(LAUNCHER=launcher, HOSTFILE=str(preset.hostfile(job)), **settings)
        assert started.wait(HANGS_S) != 0, job.log[-6000:]
        for node in (one, other, cluster.login):
            wait_for(lambda node=node: not job.left_on(node), f"the end of the launch on {node.name}")
    finally:
        other.run("umount", module)
    # A coordinator and the node that it refuses say the same.
    (said,) = {line for line in job.log.splitlines() if says.format(other=other.name) in line}
    assert "use one environment and one checkout" in said, job.log[-6000:]
    traced = sorted(job.trace.glob("*_cycle_000*"))
    assert not traced if "MAX_RESTARTS" in settings else all(not losses(job.trace, 0, rank) for rank in range(4))


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
