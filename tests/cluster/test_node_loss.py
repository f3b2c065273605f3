"""megatron.launch over nodes that are lost, cut off and slow: the drill verifies that nothing but time is lost."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, Node
from tests.cluster.jobs import Job, Preset
from tests.cluster.probe import has_time_namespaces, why_no_cluster
from tests.dist.harness import ROOT, Starvation, wait_for
from tests.dist.hold import held_environment
from tools.restart_drill.launch import recorded_ranks

pytestmark = pytest.mark.slow
HEARTBEAT_TIMEOUT = "20"  # seconds: no node counts as lost whose machine stands still for ten
SAVE_INTERVAL = 2
DEADLINE_S, NAMED_WITHIN_S = 8, 2.0  # of a rank that does not answer; after it all others have named that one
FAULTS = ["node-loss", "link-cut", "link-slow"]
POINTS = ["mid-step", "mid-save-write", "mid-load", "mid-startup"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes that train, and two spares, the first of which has a monotonic clock that is ahead, if it can."""
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("cluster"), 2) as started:
        started.add_node(clock_offset_s=5000 if has_time_namespaces() else 0)
        started.add_node()
        yield started


@pytest.fixture(scope="module")
def job(cluster: Cluster, preset: Preset) -> Job:
    """One training for all drills, each of which has its own --out."""
    job = preset.job("drills", cluster.compute_nodes[:2], LAUNCHER="fork", MAX_RESTARTS="1", ITERS="24")
    settings = {"HEARTBEAT_TIMEOUT": HEARTBEAT_TIMEOUT, "SAVE_INTERVAL": str(SAVE_INTERVAL)}
    job.settings |= settings | {"EXTRA_ARGS": "--keep-last 3 --split 100,0,0"}
    return job


def drilled(
    cluster: Cluster, job: Job, name: str, nodes: Sequence[Node], *options: str, **settings: str
) -> tuple[Path, str]:
    """--out of a drill on `nodes`, the first two of which train, and what it printed. It must end well."""
    out = job.directory / name
    settings["HOSTFILE"] = str(job.preset.hostfile(job, {node.name: "slots=2" for node in nodes}))
    command = [
        sys.executable, "-m", "tools.restart_drill", "--quiet", "--nodes-command", shlex.join(cluster.control.program),
        "--out", str(out), *options, "--", "tiny_tp2_pp2_dp2",
    ]  # fmt: skip
    done = cluster.login.run(*command, env=job.settings | settings, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return out, done.stdout


@pytest.fixture(scope="module")
def faults(cluster: Cluster, job: Job) -> tuple[list[Node], Path, str]:
    """The nodes of a drill of FAULTS in one launch, its --out, and what it printed. The matrix compares all losses with
    a run without faults, which serves another drill, too."""
    nodes = cluster.compute_nodes
    out, printed = drilled(
        cluster, job, "faults", nodes, "--matrix", "--supervisors", "launch", "--spares", "2", "--engines", "lazy",
        "--faults", ",".join(FAULTS), "--injection-points", "mid-step", "--hang-limit", "10",
    )  # fmt: skip
    return nodes, out, printed


def test_faults_of_nodes_cost_nothing_but_time(cluster: Cluster, faults: tuple[list[Node], Path, str]) -> None:
    (kept, lost, ahead, last), out, printed = faults
    assert "3 of 3 cells verified" in printed
    entries = json.loads((out / "matrix.json").read_text())["cells"]
    assert [cell["cell"]["fault"] for cell in entries] == FAULTS
    assert all(cell["accounted"] > 0.95 for cell in entries if cell["accounted"] is not None), entries

    sequence = out / "sequence_000"
    hosts = [hosts_of(sequence / "trace", cycle) for cycle in range(3)]
    assert hosts[0] == [kept.name, kept.name, lost.name, lost.name]
    assert hosts[1] == [kept.name, kept.name, ahead.name, ahead.name]
    assert hosts[2] == [kept.name, kept.name, last.name, last.name]
    log = (sequence / "logs" / "cycle_000.log").read_text(errors="replace")
    assert f"({lost.name}) is lost: no heartbeat for {HEARTBEAT_TIMEOUT} s" in log
    for node in cluster.nodes.values():
        wait_for(lambda node=node: not left_on(node, out), f"the end of the launch on {node.name}")


def test_a_stopped_rank_is_named_on_every_node_in_time(
    cluster: Cluster, job: Job, faults: tuple[list[Node], Path, str]
) -> None:
    """In step, save, load and start-up of one launch; what a busy machine adds is taken off."""
    _, of_reference, _ = faults
    with Starvation.noted() as busy:
        out, _ = drilled(
            cluster, job, "stopped", cluster.compute_nodes[-2:], "--matrix", "--supervisors", "launch",
            "--engines", "lazy", "--faults", "rank-stopped", "--injection-points", ",".join(POINTS),
            "--hang-limit", str(DEADLINE_S), "--reference", str(of_reference),
        )  # fmt: skip
    sequence = out / "sequence_000"
    entries = json.loads((sequence / "drill.json").read_text())["cycles"]
    assert [cycle["injection_point"] for cycle in entries] == POINTS
    for cycle in entries:
        assert cycle["verified"] and not cycle["unnamed"], cycle
        injected = injected_ns(sequence / "trace", cycle["cycle"]) / 1e9
        late_s = cycle["named_s"] - busy(injected, injected + cycle["named_s"]) - DEADLINE_S
        assert late_s < NAMED_WITHIN_S, (cycle, late_s)
    for node in cluster.nodes.values():
        wait_for(lambda node=node: not left_on(node, out), f"the end of the launch on {node.name}")


def test_without_a_spare_the_job_shrinks(cluster: Cluster, job: Job) -> None:
    """From TP2 x PP2 on two nodes to TP2 x PP1 on one, which loads the checkpoint through reshard. The ranks return,
    and are killed when it is known that their layout ends with the lost node.

    The ranks wait for the fault after two saves and one iteration more, which is trained again.
    """
    kept, lost = cluster.compute_nodes[:2]
    last = 2 * SAVE_INTERVAL + 1
    held = held_environment(cycles=1, after=last) | {"EXPORT": "MY_SETTING HELD_CYCLES HELD_AFTER"}
    out, _ = drilled(
        cluster, job, "shrinks", (kept, lost), "--supervisor", "launch", "--fault", "node-loss", "--at",
        f"iteration:{last}", "--no-reference", "--until-caught-up", ALLOW_SHRINK="1", IN_PROCESS_RESTART="1", **held,
    )  # fmt: skip
    (entry,) = json.loads((out / "drill.json").read_text())["cycles"]
    assert entry["verified"] and entry["layout"] == [2, 1, 1] and entry["losses"] == "within 0.02 relative"
    log = (out / "logs" / "cycle_000.log").read_text(errors="replace")
    assert "1 of 2 nodes are left, and no spare: going on with TP2 PP1 DP1 on 1 nodes (--allow-shrink)" in log
    assert f"{kept.name}: ranks that had returned were killed: the job has another layout now" in log
    assert hosts_of(out / "trace", 1) == [kept.name, kept.name]


def injected_ns(trace: Path, cycle: int) -> int:
    """When the drill injected its fault into a cycle, by the clock that this process has, too."""
    lines = [line for path in trace.glob("supervisor_*.jsonl") for line in path.read_text().splitlines()]
    found = [record for record in map(json.loads, lines) if record.get("phase") == "injected"]
    return next(record["time_ns"] for record in found if record["cycle"] == cycle)


def left_on(node: Any, out: Path) -> list[str]:
    return [command for command in node.processes().values() if str(out) in command]


def hosts_of(trace: Path, cycle: int) -> list[str]:
    return [place.host for _, place in sorted(recorded_ranks(trace, cycle)[1].items())]
