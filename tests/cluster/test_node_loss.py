"""megatron.launch over nodes that are lost and cut off: spares take their places, and the training goes on exactly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.jobs import HELD_AT, ITERATIONS, SAVED_AT, Preset
from tests.cluster.probe import has_time_namespaces, why_no_cluster
from tests.dist.harness import HANGS_S, losses, wait_for
from tests.dist.hold import held_environment

pytestmark = pytest.mark.slow
HEARTBEAT_TIMEOUT = "10"  # seconds: more than the default, so that no node counts as lost that is merely slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes that train, and one more whose monotonic clock is ahead, where the kernel can do that."""
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("cluster"), 2) as started:
        started.add_node(clock_offset_s=5000 if has_time_namespaces() else 0)
        yield started


def test_a_spare_takes_the_place_of_a_lost_node(cluster: Cluster, preset: Preset) -> None:
    kept, lost, spare = cluster.compute_nodes
    job = preset.job("spare", [kept, lost])
    hosts = preset.hostfile(job, {node.name: "slots=2" for node in (kept, lost, spare)})
    job.settings |= {"LAUNCHER": "fork", "HOSTFILE": str(hosts), "MAX_RESTARTS": "1"}
    job.settings |= {"HEARTBEAT_TIMEOUT": HEARTBEAT_TIMEOUT}
    held = held_environment(cycles=1, after=HELD_AT)
    started = job.start(**held, EXPORT="MY_SETTING HELD_CYCLES HELD_AFTER")
    wait_for(lambda: job.all_held() or started.poll() is not None, f"iteration {HELD_AT}")
    lost.lose()
    assert started.wait(HANGS_S) == 0, job.log[-6000:]

    for rank in range(job.world_size):
        before, after = losses(job.trace, 0, rank), losses(job.trace, 1, rank)
        assert sorted(after) == list(range(SAVED_AT + 1, ITERATIONS + 1))
        assert all(after[step] == before[step] for step in range(SAVED_AT + 1, HELD_AT + 1))
    assert job.hosts(0) == [kept.name, kept.name, lost.name, lost.name]
    assert job.hosts(1) == [kept.name, kept.name, spare.name, spare.name]
    assert f"({lost.name}) is lost: no heartbeat for {HEARTBEAT_TIMEOUT} s" in job.log
    for node in (kept, spare, cluster.login):
        wait_for(lambda node=node: not job.left_on(node), f"the end of the launch on {node.name}")
