"""Sweeps over nodes: cells that lose nodes, for which a spare takes the place, and cells that share jobs of Slurm."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.jobs import Preset
from tests.cluster.slurm import Slurm
from tests.dist.harness import ROOT, wait_for
from tests.dist.hold import held_environment

pytestmark = pytest.mark.slow
# Iterations that the ranks train until they wait for the fault: two saves, and then some that are trained again. The
# first save is committed by the time that the second one begins, and no third one comes while the node is being lost.
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
    faults: [node-loss@iteration:7, node-loss@iteration:8]
    nodes_command: $NODES_COMMAND
    save_interval: 3
    flags: --split 100,0,0
"""


@pytest.mark.nightly(minutes=2)  # sweeps: test_restart_sweep.py; drills that lose a node: test_node_loss.py
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
    settings |= {"HEARTBEAT_TIMEOUT": "5"}  # more than the default, so that no node counts as lost that is merely slow
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
    assert {row["fault"] for row in rows} == {"node-loss@iteration:7", "node-loss@iteration:8"}


SUBMITTED = """
name: submitted
repeats: 1
storage_bytes: none
time_limit: 600
runs:
  - {mode: train, models: [tiny], layouts: [tp2_pp1_dp1], engines: [lazy, torch], iterations: 2, save_interval: 2}
  - {mode: scaled, models: [tiny], layouts: [tp2_pp2_dp1], engines: [torch], iterations: 2, save_interval: 2}
  - {mode: train, models: [tiny], layouts: [tp2_pp2_dp1], engines: [lazy], iterations: 2, save_interval: 2}
"""


def test_cells_that_need_the_same_nodes_share_a_job(cluster: Cluster, preset: Preset, slurm: Slurm) -> None:
    """Nodes have two ranks: cells on one node are one job, and the cell on two nodes is another, after it.

    A scaled training is on one node, with more ranks than a node has of the others.
    """
    job = preset.job("submitted_sweep", cluster.compute_nodes[:2])
    asked, out = job.directory / "submitted.yaml", job.directory / "out"
    asked.write_text(SUBMITTED)
    settings = {name: job.settings[name] for name in ("DATA_PATH", "TOKENIZER_MODEL", "DEVICE")}
    settings |= slurm.environment | {"GPUS_PER_NODE": "2"}
    command = [sys.executable, "-m", "tools.restart_sweep", "--out", out, "--submit", asked]
    done = cluster.login.run(*command, env=settings, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (line.split()[2].rstrip(":") for line in done.stderr.splitlines())

    again = cluster.login.run(*command, env=settings, cwd=ROOT)
    assert "restart-sweep: job " not in again.stderr, "no cell has two jobs"

    def left() -> str:
        return cluster.login.run("squeue", "-h", "-j", f"{first},{second}", env=settings, check=False).stdout

    wait_for(lambda: not left(), "the end of both jobs")
    said = {number: Path(f"{out}.slurm-{number}.out").read_text() for number in (first, second)}
    results = [json.loads(path.read_text()) for path in sorted(out.glob("cells/*/result.json"))]
    assert [result["status"] for result in results] == ["ok"] * 4, said
    assert [said[number].count("] train tiny") for number in (first, second)] == [2, 1]
    assert [said[number].count("] scaled tiny") for number in (first, second)] == [1, 0]
    ends = [result["began_unix_s"] + result["took_s"] for result in results]
    assert all(end <= after["began_unix_s"] for end, after in zip(ends, results[1:], strict=False))
    with (out / "report" / "measurements.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "blocked_s"]
    layouts = {("tp2_pp1_dp1", "lazy", "1"), ("tp2_pp1_dp1", "torch", "1"), ("tp2_pp2_dp1", "lazy", "2")}
    scaled = {("tp2_pp2_dp1", "torch", "1")}
    assert {(row["layout"], row["engine"], row["hosts"]) for row in rows} == layouts | scaled
