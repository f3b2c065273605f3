"""Every launcher over nodes with two ranks each: it trains, its ranks on one node are killed, and it resumes
bit-exactly.

megatron.launch has four nodes. The others have two: that each of their ranks imports everything is most of the time of
such a test.
"""

from __future__ import annotations

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
from tests.dist.harness import HANGS_S, losses, wait_for

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


@pytest.mark.parametrize(("launcher", "nodes"), [("torchrun", 2), ("deepspeed", 2), ("fork", 4)])
def test_over_a_hostfile(launcher: str, nodes: int, cluster: Cluster, preset: Preset) -> None:
    """Through ssh, or DeepSpeed's pdsh. That leaves the ranks of other nodes alone when those of one end, and
    held ones notice no lost connection: the script ends them."""
    job = preset.job(launcher, cluster.compute_nodes[:nodes], LAUNCHER=launcher)
    job.settings["HOSTFILE"] = str(preset.hostfile(job))
    job.train_and_kill(**({"HOST_GRACE": "2"} if launcher == "deepspeed" else {}))
    job.resume()
    assert_resumed_exactly(job)


@pytest.mark.parametrize("start", ["salloc", "sbatch"])
def test_srun(start: str, cluster: Cluster, preset: Preset, slurm: Slurm) -> None:
    """Started on the login node, where salloc leaves its user and no rank runs; and in a job of submit.sh."""
    job = preset.job(start, cluster.compute_nodes[:2], **slurm.environment)
    job.command = in_an_allocation(job) if start == "salloc" else submitted(job, "--wait")
    job.train_and_kill()
    job.resume()
    assert_resumed_exactly(job)
    assert len(list(job.directory.glob("slurm-*.out"))) == (2 if start == "sbatch" else 0)


def test_megatron_launch_in_an_allocation(cluster: Cluster, preset: Preset, slurm: Slurm) -> None:
    """As docs/cluster.md has it: through ssh, on the hosts that Slurm has allocated."""
    nodes = cluster.compute_nodes[:2]
    job = preset.job("fork_in_allocation", nodes, ITERS="2", ENGINE="memory", SAVE_INTERVAL="1", **slurm.environment)
    hosts = job.directory / "hosts"
    script = f'scontrol show hostnames "$SLURM_JOB_NODELIST" > {hosts}; exec bash {SCRIPT}'
    settings = (f"HOSTFILE={hosts}", "LAUNCHER=fork", "MAX_RESTARTS=3", f"GPUS_PER_NODE={RANKS_PER_NODE}")
    allocation = (f"--nodes={len(nodes)}", f"--ntasks-per-node={RANKS_PER_NODE}", named_nodes(job))
    job.command = ("salloc", *allocation, "env", *settings, "bash", "-c", script)
    assert job.start().wait(HANGS_S) == 0, job.log[-6000:]
    assert job.hosts(0) == [node.name for node in nodes for _ in range(RANKS_PER_NODE)]


def test_a_job_saves_before_its_time_limit(cluster: Cluster, preset: Preset, slurm: Slurm) -> None:
    """Here the signal is sent by hand, to all processes of the step, as Slurm does: its data workers get it, too."""
    nodes = cluster.compute_nodes[:2]
    job = preset.job("signalled", nodes, ITERS="100000", SAVE_INTERVAL="100000", **slurm.environment)
    job.settings["EXTRA_ARGS"] += " --num-workers 2"
    job.command = submitted(job, "--wait")
    started = job.start()

    def trained() -> bool:
        return job.trace.exists() and all(losses(job.trace, 0, rank) for rank in range(job.world_size))

    wait_for(lambda: trained() or started.poll() is not None, "the first iteration")
    number = (job.directory / "job.slurm.id").read_text().strip()
    cluster.login.run("scancel", "--signal=TERM", number, env=job.settings)
    assert started.wait(HANGS_S) == 0, job.log[-6000:]
    saved = (job.directory / "checkpoints" / "latest").read_text().strip()
    assert (job.directory / "checkpoints" / saved / "manifest.json").is_file()


def test_what_sbatch_refuses_is_told(cluster: Cluster, preset: Preset, slurm: Slurm) -> None:
    job = preset.job("refused_by_sbatch", cluster.compute_nodes, **slurm.environment)
    job.command = submitted(job, "--partition=none")
    assert job.start().wait(HANGS_S) == 2
    assert "submit.sh: error: sbatch refused " in job.log and "Invalid partition" in job.log, job.log
    assert not job.trace.exists()


@pytest.mark.parametrize("launcher", ["deepspeed", pytest.param("fork", marks=pytest.mark.nightly(minutes=1))])
def test_a_host_file_of_one_other_host(launcher: str, cluster: Cluster, preset: Preset) -> None:
    """All ranks run there, and none where the launch is typed, as DeepSpeed's launcher would have it by itself."""
    node = cluster.compute_nodes[0]
    job = preset.job(f"one_other_{launcher}", [node], DP="1", ITERS="2", LAUNCHER=launcher)
    started = job.start(HOSTFILE=str(preset.hostfile(job, {node.name: "slots=4"})))
    assert started.wait(HANGS_S) == 0, job.log[-6000:]
    assert {job.first_record(0, rank)["host"] for rank in range(4)} == {node.name}


def submitted(job: Job, option: str) -> tuple[str | Path, ...]:
    """The command that hands the preset to sbatch, for the job's nodes. `option`: of sbatch."""
    preset = SCRIPT.stem.removeprefix("run_")
    submit = ("bash", SCRIPT.parent / "submit.sh", preset, "--nodes", str(len(job.nodes)))
    return (*submit, "--", named_nodes(job), option)
