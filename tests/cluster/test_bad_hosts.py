"""What is wrong with hosts is said in one message before any rank is started, with exit status 2."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest

from restart_trace import version
from tests.cluster.cluster import Cluster, Node
from tests.cluster.jobs import ITERATIONS, SCRIPT, Job, Preset, in_an_allocation
from tests.cluster.slurm import Slurm
from tests.dist.harness import HANGS_S, losses, wait_for
from tools.restart_bench.launcher_entries import BY_SLURM, FROM_ONE_NODE, ON_EACH_NODE

pytestmark = pytest.mark.slow
LAUNCHERS = (*ON_EACH_NODE, *FROM_ONE_NODE)
# Launches over two hosts: with a coordinator of megatron.launch, and in an allocation of a real Slurm, too.
COORDINATED = "fork_with_restarts"
LAUNCHES = (*LAUNCHERS, COORDINATED, *BY_SLURM)


def launches(names: Sequence[str], in_the_suite: Sequence[str]) -> pytest.MarkDecorator:
    """The parameter `launcher`. Launches through ssh have one check in common, and those by srun another: the suite has
    each launch with at least one problem, and the nightly run has the others."""
    others = pytest.mark.nightly(minutes=3)
    return pytest.mark.parametrize(
        "launcher", [pytest.param(name, marks=[] if name in in_the_suite else [others]) for name in names]
    )


def message(job: Job, launcher: str, **settings: str) -> str:
    """The one line that a launch ends with; it has started no rank and made no checkpoint directory."""
    if launcher == "srun":
        job.command = in_an_allocation(job)
    else:
        if launcher == COORDINATED:
            launcher = "fork"
            settings |= {"MAX_RESTARTS": "1"}
        settings |= {"LAUNCHER": launcher, "HOSTFILE": str(preset_hostfile(job))}
    started = job.start(**settings)
    assert started.wait(HANGS_S) == 2, job.log
    assert not (job.directory / "checkpoints").exists()
    (line,) = [line for line in job.log.splitlines() if not line.startswith("salloc: ")]
    _, error, text = line.partition("run_tiny_tp2_pp2_dp2.sh: error: ")
    assert error, line
    return text


def preset_hostfile(job: Job) -> Path:
    return job.directory / "hosts" if (job.directory / "hosts").exists() else job.preset.hostfile(job)


def environment_of(launcher: str, request: pytest.FixtureRequest) -> dict[str, str]:
    """What a launch finds in its environment because of who starts it."""
    return request.getfixturevalue("slurm").environment if launcher == "srun" else {}


def test_hosts_that_cannot_be_reached_are_named(cluster: Cluster, preset: Preset) -> None:
    """A wrong key, a host that is down and one that nobody knows: each with what ssh says."""
    one, wrong_key, down, *_ = cluster.compute_nodes
    job = preset.job("unreachable", cluster.compute_nodes)
    wrong_key.run("cp", cluster.etc / "other_key.pub", "/run/authorized_keys")
    down.cut_link()
    slots = dict.fromkeys((one.name, wrong_key.name, down.name, "nobody"), "slots=2")
    preset.hostfile(job, slots)
    try:
        said = message(job, "torchrun")
    finally:
        wrong_key.run("cp", cluster.etc / "user_key.pub", "/run/authorized_keys")
        down.repair_link()
    assert said.startswith("HOSTFILE=")
    assert f"{wrong_key.name} (root@{wrong_key.name}: Permission denied" in said
    assert f"{down.name} (ssh: connect to host {down.name} port 22: " in said
    assert "nobody (ssh: Could not resolve hostname nobody" in said
    assert f"on {one.name}" not in said


@launches([name for name in LAUNCHERS if name != "torchrun"], in_the_suite=("deepspeed",))  # torchrun: above
def test_a_wrong_key_is_named_by_every_launcher(launcher: str, cluster: Cluster, preset: Preset) -> None:
    one, other, *_ = cluster.compute_nodes
    job = preset.job(f"wrong_key_{launcher}", [one, other])
    other.run("cp", cluster.etc / "other_key.pub", "/run/authorized_keys")
    try:
        said = message(job, launcher)
    finally:
        other.run("cp", cluster.etc / "user_key.pub", "/run/authorized_keys")
    assert f"on {other.name} (root@{other.name}: Permission denied" in said


@launches((*LAUNCHERS, *BY_SLURM), in_the_suite=("fork", "srun"))
def test_a_port_that_is_taken_is_named_by_every_launcher(
    launcher: str, cluster: Cluster, preset: Preset, request: pytest.FixtureRequest
) -> None:
    """Where rank 0 would serve the rendezvous, which is not the login node: sshd has port 22 of every node."""
    one, other, *_ = cluster.compute_nodes
    job = preset.job(f"taken_port_{launcher}", [one, other], **environment_of(launcher, request))
    listens = f"MASTER_PORT=22: another process listens there on {one.name}, where rank 0 runs"
    assert message(job, launcher, MASTER_PORT="22") == f"{listens}; set MASTER_PORT to a port that is free there"


@launches(LAUNCHES, in_the_suite=("torchrun", COORDINATED, "srun"))
def test_an_address_that_hosts_do_not_know_is_named_by_every_launcher(
    launcher: str, cluster: Cluster, preset: Preset, request: pytest.FixtureRequest
) -> None:
    nodes = cluster.compute_nodes[:2]
    job = preset.job(f"unknown_{launcher}", nodes, **environment_of(launcher, request))
    name = "COORDINATOR_ADDR" if launcher == COORDINATED else "MASTER_ADDR"  # where the hosts connect
    said = message(job, launcher, **{name: "nowhere"})
    assert said.startswith(f"{name}=nowhere: {nodes[0].name}, {nodes[1].name} cannot resolve it ("), said


@contextlib.contextmanager
def changed_on(node: Node, path: Path, job: Job, change: Callable[[str], str]) -> Iterator[None]:
    """A file as this node alone sees it."""
    changed = job.directory / path.name
    changed.write_text(change(path.read_text()))
    node.run("mount", "--bind", changed, path)
    try:
        yield
    finally:
        node.run("umount", path)


def other_code(node: Node, job: Job) -> contextlib.AbstractContextManager[None]:
    return changed_on(node, Path(version.__file__), job, lambda text: text + "# changed\n")


@launches(LAUNCHES, in_the_suite=("deepspeed", "srun"))
def test_a_host_with_other_code_is_named(
    launcher: str, cluster: Cluster, preset: Preset, request: pytest.FixtureRequest
) -> None:
    one, other, *_ = cluster.compute_nodes
    job = preset.job(f"other_code_{launcher}", [one, other], **environment_of(launcher, request))
    with other_code(other, job):
        said = message(job, launcher)
    assert said.startswith(f"host {other.name} runs megatron-restart 0"), said
    assert "use one environment and one checkout" in said


def test_a_host_with_another_torch_is_named(cluster: Cluster, preset: Preset) -> None:
    one, other, *_ = cluster.compute_nodes
    job = preset.job("other_torch", [one, other])
    (about,) = (path for path in distribution("torch").files or () if path.name == "METADATA")

    def older(text: str) -> str:
        return re.sub(r"(?m)^Version: .*$", "Version: 2.0.0", text, count=1)

    with changed_on(other, Path(str(about.locate())), job, older):
        said = message(job, "torchrun")
    assert said.startswith(f"host {other.name} runs torch 2.0.0 ({one.name}: {torch_version()}): "), said


def torch_version() -> str:
    return distribution("torch").version


@pytest.mark.parametrize("changed", [True, False], ids=["other code", "same code"])
def test_launches_by_hand_on_each_host_meet_before_any_rank_starts(
    changed: bool, cluster: Cluster, preset: Preset
) -> None:
    """Each says what is wrong; if nothing is, they train, with the rendezvous at the port where they have met.

    With megatron.launch, which imports once on each host; torchrun and DeepSpeed's launcher train in test_launchers.py.
    """
    nodes = cluster.compute_nodes[:2]
    settings = {"NNODES": "2", "GPUS_PER_NODE": "2", "MASTER_ADDR": nodes[0].name, "LAUNCHER": "fork"}
    job = preset.job(f"by_hand_{changed}", nodes, **settings)
    with other_code(nodes[1], job) if changed else contextlib.nullcontext():
        started = [
            node.start("bash", SCRIPT, env=job.settings | {"NODE_RANK": str(rank)}, log=job.directory / f"{rank}.log")
            for rank, node in enumerate(nodes)
        ]
        codes = [process.wait(HANGS_S) for process in started]
    logs = [(job.directory / f"{rank}.log").read_text() for rank in range(2)]
    assert codes == ([2, 2] if changed else [0, 0]), logs
    named = [line.rpartition("error: host ")[2] for log in logs for line in log.splitlines() if "error: host " in line]
    if changed:
        assert len(named) == 2 and named[0] == named[1] and named[0].startswith(f"{nodes[1].name} runs "), logs
        assert not list(job.trace.glob("*_cycle_000*"))
    else:
        assert sorted(losses(job.trace, 0, 3)) == list(range(1, ITERATIONS + 1))


@pytest.mark.parametrize("refused", [0, pytest.param(1, marks=pytest.mark.nightly(minutes=1)), 2])
def test_a_launch_by_hand_that_is_refused_ends_those_that_wait_for_it(
    refused: int, cluster: Cluster, preset: Preset
) -> None:
    """For a setting on host 0, a place that cannot be written to on host 1, a flag of the ranks on host 2."""
    nodes = cluster.compute_nodes[:3]
    settings = {"NNODES": "3", "GPUS_PER_NODE": "4", "DP": "3", "MASTER_ADDR": nodes[0].name, "GLOBAL_BATCH": "6"}
    job = preset.job(f"refused_by_hand_{refused}", nodes, **settings)
    wrong = [{"DTYPE": "fp8"}, {"WORK_DIR": "/dev/null/work"}, {"EXTRA_ARGS": "--no-such-flag"}][refused]
    text = ["DTYPE=fp8: use bf16", "WORK_DIR=/dev/null/work: cannot be", "unknown flag --no-such-flag"][refused]
    started = [
        node.start(
            "bash", SCRIPT, env=job.settings | {"NODE_RANK": str(rank)} | (wrong if rank == refused else {}),
            log=job.directory / f"{rank}.log",
        )
        for rank, node in enumerate(nodes)
    ]  # fmt: skip
    assert [process.wait(HANGS_S) for process in started] == [2, 2, 2]
    for rank in range(3):
        (line,) = [line for line in (job.directory / f"{rank}.log").read_text().splitlines() if "error: " in line]
        if rank != refused:
            line = line.partition(f"error: NODE_RANK={refused} is refused on {nodes[refused].name}: ")[2]
        assert text in line, line
    assert not list(job.trace.glob("*_cycle_000*"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--failure-domain", "racks"], "error: --failure-domain racks: does not name node0"),
        pytest.param(
            ["--replicas", "3"], "error: --replicas 3: more copies than hosts (2); give 2 at most",
            marks=pytest.mark.nightly(minutes=1),
        ),
    ],
)  # fmt: skip
def test_what_ranks_refuse_over_hosts_is_not_tried_again(
    flags: list[str], message: str, cluster: Cluster, preset: Preset
) -> None:
    """The first only the ranks can see, by the names that hosts have for themselves; a spare has joined by then."""
    job = preset.job(
        f"refusal{flags[0]}", cluster.compute_nodes[:2], LAUNCHER="fork", MAX_RESTARTS="3", HEARTBEAT_TIMEOUT="100",
        ENGINE="memory",
    )  # fmt: skip
    racks = job.directory / "racks"
    racks.write_text("another 0\n")
    job.settings["EXTRA_ARGS"] += " ".join(["", *flags]).replace("racks", str(racks))
    hosts = preset.hostfile(job, {node.name: "slots=2" for node in cluster.compute_nodes[:3]})
    assert job.start(HOSTFILE=str(hosts)).wait(HANGS_S) == 2, job.log
    assert job.log.count(message.replace("racks", str(racks))) == 1, job.log
    assert "starting all ranks again" not in job.log and "iteration        1/" not in job.log
    for node in cluster.nodes.values():
        wait_for(lambda node=node: not job.left_on(node), f"the end of the launch on {node.name}")


# The same checks of variables: tests/unit/test_scripts.py::test_slurm_variables_that_contradict_are_named.
IN_UNIT_TESTS = pytest.mark.nightly(minutes=1)
TAKE = "4 ranks (TP2 PP2 DP1) with 2 per node take 2 nodes"


@pytest.mark.parametrize(
    ("allocation", "changed", "message"),
    [
        (("--nodes=1",), (), f"SLURM_JOB_NUM_NODES=1: {TAKE}; allocate them (--nodes 2), or set GPUS_PER_NODE"),
        pytest.param(
            ("--nodes=1",), ("SLURM_NNODES=2",), "SLURM_JOB_NUM_NODES=1 and SLURM_NNODES=2 contradict each other",
            marks=IN_UNIT_TESTS,
        ),
        pytest.param(
            ("--nodes=1",), ("SLURM_JOB_NUM_NODES=2", "SLURM_NNODES=2", "SLURM_JOB_CPUS_PER_NODE=8(x2)"),
            "SLURM_JOB_NODELIST=node0 names 1 hosts, SLURM_JOB_NUM_NODES=2; unset what you have set",
            marks=IN_UNIT_TESTS,
        ),
        (
            ("--nodes=2",), (),
            f"SLURM_JOB_CPUS_PER_NODE=1(x2): {TAKE} with a processor for each rank, and the allocation has 0 such "
            "nodes; allocate them (--nodes 2 --ntasks-per-node 2), or set GPUS_PER_NODE",
        ),
        pytest.param(
            ("--nodes=2-2", "--ntasks=3"), (), f"SLURM_JOB_CPUS_PER_NODE=2,1: {TAKE} with a processor for each rank",
            marks=IN_UNIT_TESTS,
        ),
        # What the variables do not say, Slurm does.
        (("--nodes=2",), ("--unset=SLURM_JOB_CPUS_PER_NODE",), "More processors requested than permitted; allocate"),
        (
            ("--nodes=1",), ("--unset=SLURM_JOB_NUM_NODES", "--unset=SLURM_NNODES", "--unset=SLURM_JOB_CPUS_PER_NODE"),
            "srun does not start 4 tasks, 2 on each of 2 nodes, in allocation ",
        ),
    ],
)  # fmt: skip
def test_an_allocation_that_does_not_fit_is_named(
    allocation: tuple[str, ...], changed: tuple[str, ...], message: str, cluster: Cluster, preset: Preset, slurm: Slurm
) -> None:
    """In an allocation of a real Slurm, or with variables that its user has changed: one line, and no rank starts."""
    nodes = cluster.compute_nodes[:2]
    name = re.sub(r"\W+", "_", "".join([*allocation, *changed]))
    job = preset.job(f"allocation_{name}", nodes, LAUNCHER="srun", GPUS_PER_NODE="2", **slurm.environment)
    job.command = ("salloc", *allocation, f"--nodelist={nodes[0].name}", "env", *changed, "bash", SCRIPT)
    assert job.start().wait(HANGS_S) == 2, job.log
    (line,) = [line for line in job.log.splitlines() if not line.startswith("salloc: ")]
    assert line.startswith("run_tiny_tp2_pp2_dp2.sh: error: ") and message in line, line
    assert not (job.directory / "checkpoints").exists()
