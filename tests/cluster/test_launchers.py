"""Every launcher over nodes with two ranks each: it trains, its ranks on one node are killed, and another launcher
resumes bit-exactly.

On two nodes, as each rank of most launchers imports everything, which is most of the time of such a test.
megatron.launch, whose ranks do not, has four nodes in `test_megatron_launch_in_an_allocation`. In the suite some
launchers are killed here, and others resume and end well; in the nightly run each does both.
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
from tests.dist.harness import HANGS_S, losses, records, wait_for
from tools.restart_bench.launcher_entries import FROM_ONE_NODE, IN_PLACE, ON_EACH_NODE

pytestmark = pytest.mark.slow


def assert_resumed_exactly(job: Job) -> None:
    """Each launch continued from the last save, repeated what the one before had done after it, on every host."""
    launches, names = len(job.launches), [node.name for node in job.nodes for _ in range(RANKS_PER_NODE)]
    assert launches > 1
    for cycle in range(launches):
        first, last = cycle * SAVED_AT + 1, cycle * SAVED_AT + HELD_AT
        steps = list(range(first, (ITERATIONS if cycle == launches - 1 else last) + 1))
        for rank in range(job.world_size):
            found = losses(job.trace, cycle, rank)
            assert sorted(found) == steps, job.log[-6000:]
            before = losses(job.trace, cycle - 1, rank) if cycle else {}
            assert all(found[step] == before[step] for step in before.keys() & found.keys())
            assert len(before.keys() & found.keys()) == (HELD_AT - SAVED_AT if cycle else 0)
        assert job.hosts(cycle) == names


@pytest.mark.parametrize(
    ("killed", "resumes", "nodes"),
    [
        (("torchrun", "deepspeed"), "fork", 2),
        *(
            pytest.param((name,), name, 4 if name in IN_PLACE else 2, marks=pytest.mark.nightly(minutes=2))
            for name in (*ON_EACH_NODE, *FROM_ONE_NODE)
        ),
    ],
)
def test_over_a_hostfile(killed: tuple[str, ...], resumes: str, nodes: int, cluster: Cluster, preset: Preset) -> None:
    """Through ssh, or DeepSpeed's pdsh. That leaves the ranks of other nodes alone when those of one end, and
    held ones notice no lost connection: the script ends them."""
    job = preset.job(f"hostfile_{killed[0]}_{resumes}", cluster.compute_nodes[:nodes])
    job.settings["HOSTFILE"] = str(preset.hostfile(job))
    for launcher in killed:
        job.train_and_kill(LAUNCHER=launcher, **({"HOST_GRACE": "2"} if launcher == "deepspeed" else {}))
    job.resume(LAUNCHER=resumes)
    assert_resumed_exactly(job)


@pytest.mark.nightly(minutes=1)  # the suite has this exchange on one host, in tests/dist/test_parallel_load.py
def test_replicas_on_different_nodes_read_a_part_each(cluster: Cluster, preset: Preset) -> None:
    """--ckpt-fully-parallel-load: the ranks of a node have one stage, and its replica is on the next node."""
    job = preset.job("parallel_load", cluster.compute_nodes, LAUNCHER="fork", ENGINE="torch")
    job.settings["HOSTFILE"] = str(preset.hostfile(job))
    job.train_and_kill()
    job.settings["EXTRA_ARGS"] += " --ckpt-fully-parallel-load"  # beside --verify-restored-state
    job.resume()
    assert_resumed_exactly(job)
    loads = [
        [r for r in records(job.trace, 1, rank) if r["type"] == "span" and r["operation"] == "load"]
        for rank in range(job.world_size)
    ]
    layers = [{Path(r["file"]).name for r in spans if "layer_" in r.get("file", "")} for spans in loads]
    assert all(layers) and len(set().union(*layers)) == sum(map(len, layers)), "each layer is read by one rank"
    assert all(sum(r.get("detail") == "broadcast" for r in spans) == 1 for spans in loads)


@pytest.mark.parametrize(
    ("killed", "resumes"),
    [("salloc", "sbatch"), pytest.param("sbatch", "salloc", marks=pytest.mark.nightly(minutes=2))],
)
def test_srun(killed: str, resumes: str, cluster: Cluster, preset: Preset, slurm: Slurm) -> None:
    """Started on the login node, where salloc leaves its user and no rank runs; and in a job of submit.sh."""
    job = preset.job(f"srun_{killed}", cluster.compute_nodes[:2], **slurm.environment)
    commands = {"salloc": in_an_allocation(job), "sbatch": submitted(job, "--wait")}
    job.command = commands[killed]
    job.train_and_kill()
    assert len(list(job.directory.glob("slurm-*.out"))) == (killed == "sbatch")
    job.command = commands[resumes]
    job.resume()
    assert_resumed_exactly(job)
    assert len(list(job.directory.glob("slurm-*.out"))) == 1


def test_megatron_launch_in_an_allocation(cluster: Cluster, preset: Preset, slurm: Slurm) -> None:
    """As docs/cluster.md has it: through ssh, on the hosts that Slurm has allocated."""
    nodes = cluster.compute_nodes
    job = preset.job("fork_in_allocation", nodes, ITERS="2", ENGINE="memory", SAVE_INTERVAL="1", **slurm.environment)
    hosts = job.directory / "hosts"
    script = f'scontrol show hostnames "$SLURM_JOB_NODELIST" > {hosts}; exec bash {SCRIPT}'
    settings = (f"HOSTFILE={hosts}", "LAUNCHER=fork", "MAX_RESTARTS=3", f"GPUS_PER_NODE={RANKS_PER_NODE}")
    allocation = (f"--nodes={len(nodes)}", f"--ntasks-per-node={RANKS_PER_NODE}", named_nodes(job))
    job.command = ("salloc", *allocation, "env", *settings, "HEARTBEAT_TIMEOUT=100", "bash", "-c", script)
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


# The flag by which DeepSpeed's does so is in the command of tests/unit/test_scripts.py::test_deepspeed_launcher.
@pytest.mark.nightly(minutes=1)
@pytest.mark.parametrize("launcher", ["deepspeed", "fork"])
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
