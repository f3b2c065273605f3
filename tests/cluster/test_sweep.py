"""A sweep whose cells lose nodes: the drill in them injects the fault, and a spare takes the place of the node."""

from __future__ import annotations

import csv
import json
import shlex
import sys

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.jobs import Preset
from tests.dist.harness import ROOT
from tests.dist.hold import held_environment

pytestmark = pytest.mark.slow
# Iterations that the ranks train until they wait for the fault: two saves, and then some that are trained again. The
# first save is committed by the time that the second one begins.
HELD_AFTER = 8
SWEEP = """
name: nodes
repeats: 1
storage_bytes: none
time_limit: 600
runs:
  - mode: restart
    models: [tiny]
    layouts: [tp2_pp2_dp1]
    engines: [lazy]
    faults: [node-loss@iteration:7, node-loss@mid-step]
    nodes_command: $NODES_COMMAND
    save_interval: 3
    flags: --split 100,0,0
"""


def test_a_node_is_lost_in_each_cell(cluster: Cluster, preset: Preset) -> None:
    kept, lost, spare = cluster.compute_nodes[:3]
    job = preset.job("sweep", (kept, lost))
    asked = job.directory / "nodes.yaml"
    asked.write_text(SWEEP)
    hosts = preset.hostfile(job, {node.name: "slots=2" for node in (kept, lost, spare)})
    data = {name: job.settings[name] for name in ("DATA_PATH", "TOKENIZER_MODEL", "DEVICE")}
    out = job.directory / "out"
    command = [sys.executable, "-m", "tools.restart_sweep", "--out", out, "--dir", job.directory, asked]
    settings = data | {"HOSTFILE": str(hosts), "NODES_COMMAND": shlex.join(cluster.control.program)}
    settings |= held_environment(cycles=1, after=HELD_AFTER) | {"EXPORT": "HELD_CYCLES HELD_AFTER"}
    done = cluster.login.run(*command, env=settings, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    cells = sorted((out / "cells").iterdir())
    assert len(cells) == 2
    for cell in cells:
        (told,) = json.loads((cell / "drill" / "drill.json").read_text())["cycles"]
        assert told["verified"] and told["fault"] == "node-loss", told
    with (out / "report" / "measurements.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "restart_s"]
    assert {row["fault"] for row in rows} == {"node-loss@iteration:7", "node-loss@mid-step"}
