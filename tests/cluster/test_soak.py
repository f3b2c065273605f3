"""A short soak over nodes that are lost and cut off: nothing is left or grows on those that still run."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.jobs import Preset
from tests.dist.harness import HANGS_S, ROOT

# The suite has these faults in test_node_loss.py and test_peers.py, which look for what is left on each node, too.
pytestmark = [pytest.mark.slow, pytest.mark.nightly(minutes=2)]
SPARES = 2


def test_nothing_is_left_on_any_node(cluster: Cluster, preset: Preset) -> None:
    """Engine memory, whose saves are on all nodes; both faults that need a spare, and one that does not."""
    out = cluster.directory / "soak"
    job = preset.job("soak", cluster.compute_nodes[:2], LAUNCHER="fork", MAX_RESTARTS="1", HEARTBEAT_TIMEOUT="5")
    hostfile = preset.hostfile(job, {node.name: "slots=2" for node in cluster.compute_nodes})
    job.settings |= {"HOSTFILE": str(hostfile), "SPARES": str(SPARES)}
    command = [
        sys.executable, "-m", "tools.restart_drill", "--soak", "--out", str(out), "--engines", "memory",
        "--restarts", "3", "--faults", "node-loss,link-cut,sigkill-one",
        "--nodes-command", shlex.join(cluster.control.program), "--spares", str(SPARES), "--time-limit", str(HANGS_S),
    ]  # fmt: skip
    for name in ("EXTRA_ARGS", "SEQ_LENGTH", "MICRO_BATCH"):  # the soak has a model of its own
        del job.settings[name]
    done = cluster.login.run(*command, env=job.settings, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    result = json.loads((out / "memory" / "result.json").read_text())
    assert result["faults"] == {"node-loss": 1, "link-cut": 1, "sigkill-one": 1} and result["verified"] == 3
    places = {name.split(";")[2].split(",")[0].strip() for name in result["samples"]}
    assert places == set(cluster.nodes), "samples are of the login node and all others, spares included"
    assert not [line for node in cluster.nodes.values() for line in node.processes().values() if str(out) in line]
