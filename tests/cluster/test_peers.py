"""Engine `memory` over nodes that are lost: verified copies in peers' memory, and storage when all are gone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.net.secret import VARIABLE as SECRET_VARIABLE
from restart_trace.ancestors import read_text
from tests.cluster.cluster import Cluster, Node
from tests.cluster.jobs import Job, Preset
from tests.cluster.probe import why_no_cluster
from tests.dist.harness import HANGS_S, ROOT, losses, records, wait_for
from tests.dist.hold import held_environment
from tests.unit.trace_helpers import SECRET

pytestmark = pytest.mark.slow
HELD_AFTER = 5  # iterations of each launch; each is saved to memory, each fourth to storage, too
ITERATIONS = 17
FLIPS = 200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes that train, and three spares."""
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("cluster"), 5) as started:
        yield started


def started(preset: Preset, nodes: list[Node], name: str, cycles: int, *flags: str) -> Job:
    """A training on the first two nodes whose ranks wait after HELD_AFTER iterations of each of so many launches."""
    # No node counts as lost whose machine stands still for ten seconds.
    job = preset.job(name, nodes[:2], LAUNCHER="fork", MAX_RESTARTS="3", ENGINE="memory", HEARTBEAT_TIMEOUT="20")
    job.settings |= {"HOSTFILE": str(preset.hostfile(job, {node.name: "slots=2" for node in nodes}))}
    job.settings |= {"ITERS": str(ITERATIONS), "SAVE_INTERVAL": "1", SECRET_VARIABLE: SECRET}
    job.settings["EXTRA_ARGS"] += " ".join(["", "--persist-interval", "4", *flags])
    job.start(**held_environment(cycles=cycles, after=HELD_AFTER), EXPORT="MY_SETTING HELD_CYCLES HELD_AFTER")
    return job


def until_held(job: Job, cycle: int, step: int) -> None:
    """Return when all ranks wait after iteration `step`, and its save is over."""

    def saved(rank: int) -> bool:
        found = (
            [r for r in records(job.trace, cycle, rank) if r["type"] == "operation_end"] if job.trace.exists() else []
        )
        return any(r["operation"] == "save" and r["step"] == step and r["outcome"] == "ok" for r in found)

    ended = job.launches[-1]
    wait_for(lambda: ended.poll() is not None or all(map(saved, range(job.world_size))), f"iteration {step}")
    assert ended.poll() is None, job.log[-6000:]


def loaded(job: Job, cycle: int) -> tuple[set[int], list[set[str]]]:
    """(steps, tiers by rank) of the load of a launch."""
    found = [records(job.trace, cycle, rank) for rank in range(job.world_size)]
    steps = {r["step"] for one in found for r in one if r["type"] == "operation_end" and r["operation"] == "load"}
    return steps, [{r["tier"] for r in one if r["type"] == "span" and r.get("detail") == "read"} for one in found]


def holder(node: Node) -> int:
    """The process of a node that holds copies."""
    (pid,) = [pid for pid in node.processes() if read_text(pid, "comm").strip() == "memory-copies"]
    return pid


def flip_bits(job: Job, asking: Node, holding: Node, step: int, *options: str) -> dict[str, Any]:
    """Have `asking` fetch what `holding` has copies of, with a bit flipped each time (flips.py)."""
    launch = job.first_record(0, 0)["environment"]["RESTART_TRACE_LAUNCH_ID"]
    # On the network of `asking`, and with pids as they are seen from outside
    command = ["nsenter", "--target", str(asking.pid), "--net", sys.executable, "-m", "tests.cluster.flips"]
    arguments = [str(holder(holding)), holding.address, str(step), *options]
    env = os.environ | {"RESTART_TRACE_LAUNCH_ID": launch, SECRET_VARIABLE: SECRET}
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_lost_nodes_go_on_from_copies_and_at_last_from_storage(cluster: Cluster, preset: Preset) -> None:
    """One launch: a node is lost; copies are altered and a rank is killed; both nodes of the group are lost."""
    first, second, third, *last = cluster.compute_nodes
    job = started(preset, cluster.compute_nodes, "peers", 3)
    until_held(job, 0, 5)
    second.lose()

    until_held(job, 1, 10)
    assert loaded(job, 1) == ({5}, [{"local_memory"}] * 2 + [{"peer"}] * 2)
    assert job.hosts(1) == [first.name] * 2 + [third.name] * 2
    told = flip_bits(job, first, third, 10, str(FLIPS))
    assert told == {"flipped": FLIPS, "accepted": 0, "coordinates": 2}

    # The newest save of rank 0 is altered on its own host: the copy on the other one is whole.
    flip_bits(job, third, first, 10, "stay", "0")
    os.kill(rank_of(first, job, 1, 0), signal.SIGKILL)
    until_held(job, 2, 15)
    assert loaded(job, 2) == ({10}, [{"local_memory", "peer"}, *[{"local_memory"}] * 3])
    assert re.search(r"rank 0: slot \d of host memory.*; the next copy is used", job.log)

    first.lose()
    third.lose()
    assert job.launches[-1].wait(HANGS_S) == 0, job.log[-6000:]
    assert loaded(job, 3) == ({12}, [{"storage"}] * 4)
    assert job.hosts(3) == [last[0].name] * 2 + [last[1].name] * 2
    same_losses(job)
    for node in cluster.nodes.values():
        wait_for(lambda node=node: not job.left_on(node), f"the end of the launch on {node.name}")


@pytest.mark.nightly(minutes=1)  # of interleaved copies: tests/dist/test_replication_traffic.py; of a lost node: above
def test_interleaved_copies_restore_a_lost_node(cluster: Cluster, preset: Preset) -> None:
    """Ranks wait before four whole steps could be profiled: the newest copies go all the same, and say why."""
    for node in list(cluster.lost.values()):
        node.repair()
    first, second, third = cluster.compute_nodes[:3]
    job = started(preset, [first, second, third], "interleaved", 1, "--replication-traffic", "interleave")
    until_held(job, 0, 5)
    for rank in range(job.world_size):
        found = records(job.trace, 0, rank)
        saves = [r for r in found if r["type"] == "operation_end" and r["operation"] == "save"]
        assert [(r["step"], r["outcome"]) for r in saves] == [(step, "ok") for step in range(1, 6)]
        sizes = [r["bytes"] for r in found if r["type"] == "span" and r["phase"] == "replicate"]
        probed = [r["values"] for r in found if r["type"] == "probe"]
        late = [values["replicate_at_once_bytes"] for values in probed if "replicate_at_once_bytes" in values]
        assert late == sizes and min(sizes) > 0, (
            "there is no profile yet: all of it goes when training waits, or stalls"
        )
        (*others, newest) = [r["detail"] for r in found if r["type"] == "event" and r["phase"] == "replicate"]
        assert f"{late[-1]} of them since no step ended, and none had been profiled" in newest
        assert not any("since no step ended" in text for text in others)
    second.lose()

    assert job.launches[-1].wait(HANGS_S) == 0, job.log[-6000:]
    assert loaded(job, 1) == ({5}, [{"local_memory"}] * 2 + [{"peer"}] * 2)
    assert job.hosts(1) == [first.name] * 2 + [third.name] * 2
    ends = [losses(job.trace, cycle, 3) for cycle in range(2)]
    assert [(min(one), max(one)) for one in ends] == [(1, 5), (6, ITERATIONS)]
    for node in cluster.nodes.values():
        wait_for(lambda node=node: not job.left_on(node), f"the end of the launch on {node.name}")


def rank_of(node: Node, job: Job, cycle: int, rank: int) -> int:
    """Process id of a rank, as seen from outside."""
    inside = str(job.first_record(cycle, rank)["pid"])
    for pid in node.processes():
        if re.search(r"^NSpid:.*\s" + inside + "$", read_text(pid, "status"), re.MULTILINE):
            return pid
    raise AssertionError(f"rank {rank} does not run on {node.name}")


def same_losses(job: Job) -> None:
    """Of each launch those that follow the one before, without a gap; 13 to 15, trained twice, alike."""
    found = [losses(job.trace, cycle, 3) for cycle in range(4)]
    assert [(min(one), max(one)) for one in found] == [(1, 5), (6, 10), (11, 15), (13, ITERATIONS)]
    assert all(found[2][step] == found[3][step] for step in (13, 14, 15))
