"""What the other tests of this directory rely on: nodes are apart, can be harmed, and end with their cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, ClusterError, Node
from tests.cluster.probe import has_time_namespaces, why_no_cluster
from tests.dist.harness import HANGS_S, ROOT, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Cluster]:
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    with Cluster(tmp_path / "cluster", 2, disk_mib=8) as started:
        yield started


def reaches(one: Node, other: Node) -> bool:
    return one.run("ssh", other.name, "true", check=False).returncode == 0


def test_nodes_have_what_is_theirs_and_share_the_rest(pair: Cluster) -> None:
    one, other = pair.compute_nodes
    told = pair.login.run("pdsh", "-N", "-R", "ssh", "-w", "node[0-1]", "hostname").stdout
    assert sorted(told.split()) == ["node0", "node1"]
    for directory in ("/dev/shm", "/run", pair.local_disk):
        one.run("touch", f"{directory}/mine")
        assert one.run("ls", directory).stdout.split().count("mine") == 1
        assert "mine" not in other.run("ls", directory).stdout.split()
    assert not (pair.local_disk / "mine").exists()
    one.run("touch", pair.home / "ours")
    assert "ours" in other.run("ls", pair.home).stdout
    full = one.run("dd", "if=/dev/zero", f"of={pair.local_disk}/large", "bs=1M", "count=9", check=False)
    assert "No space left on device" in full.stderr
    assert other.run("ps", "-o", "pid=", "-p", "1").stdout.split() == ["1"]


def test_nodes_can_be_harmed_and_added(pair: Cluster) -> None:
    one, other = pair.compute_nodes
    other.cut_link()
    assert not reaches(one, other)
    other.repair_link()
    wait_for(lambda: reaches(one, other), "the link is repaired")
    other.slow_link(256)
    shown = pair.login.run("ssh", other.name, "tc qdisc show dev eth0").stdout
    assert "tbf" in shown and "256Kbit" in shown
    other.repair_link()

    one.run("ssh", other.name, "sleep 1000 >/dev/null 2>&1 &")
    wait_for(lambda: list(other.processes().values()) == ["sleep 1000"], "sleep, and nothing else, on node1")
    assert other.send(signal.SIGSTOP, "sleep") == 1
    state = ("ps", "-o", "state=", "-C", "sleep")
    wait_for(lambda: other.run(*state).stdout.split() == ["T"], "sleep to be stopped")  # it runs once before
    pid = other.pid
    other.lose()
    assert not Path(f"/proc/{pid}").exists() and not reaches(one, other)
    spare = pair.add_node()
    assert reaches(one, spare) and reaches(spare, one)
    with pytest.raises(ClusterError, match="no-such-command"):
        spare.run("no-such-command")


def test_a_node_may_have_another_clock(pair: Cluster) -> None:
    if not has_time_namespaces():
        pytest.skip("no cluster here: this kernel has no time namespaces")
    ahead = pair.add_node(clock_offset_s=5000)
    now = "import time; print(time.monotonic())"
    clocks = [float(node.run(sys.executable, "-c", now).stdout) for node in (pair.login, ahead)]
    assert clocks[1] - clocks[0] > 4999


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_process_that_holds_it(tmp_path: Path, signum: signal.Signals) -> None:
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.cluster", "up", "--nodes", "1"]
    holder = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdin is not None
    pids = [int(holder.stdout.readline().split("--target ")[1].split()[0]) for _ in ("login", "node0")]
    holder.stdin.write("spare\n")
    holder.stdin.flush()
    wait_for(lambda: "node1" in holder.stdout.readline(), "a spare node")  # type: ignore[union-attr]
    namespaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
    holder.send_signal(signum)
    holder.wait(HANGS_S)
    wait_for(lambda: not any(in_namespaces(namespaces)), "the end of all processes of the nodes")
    if signum == signal.SIGTERM:
        assert list(tmp_path.iterdir()) == []


def in_namespaces(namespaces: set[str]) -> Iterator[int]:
    """Pids of the processes that are in these network namespaces."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if os.readlink(f"/proc/{pid}/ns/net") in namespaces:
                yield pid
        except OSError:
            continue
