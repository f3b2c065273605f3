"""The launch scripts within a PBS job, by recorded environments: no PBS can be had here.

The variables and node files are those that OpenPBS (`select=2:ncpus=8:mpiprocs=4`, and without mpiprocs) and Torque
(`nodes=2:ppn=4`) document.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.script_helpers import TINY, dry_run, run_script

NODEFILES = {
    "mpiprocs": "nid001.local\n" * 4 + "nid002.local\n" * 4,
    "scattered": "nid001.local\nnid002.local\n" * 4,
    "chunks": "nid001.local\nnid002.local\n",
}


def job(tmp_path: Path, nodes: str) -> dict[str, str]:
    """The environment of a job on two nodes, and settings of the tiny preset."""
    nodefile = tmp_path / "aux" / "4711.pbs"
    nodefile.parent.mkdir()
    nodefile.write_text(nodes)
    return {
        "PBS_JOBID": "4711.pbs",
        "PBS_NODEFILE": str(nodefile),
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_O_WORKDIR": str(tmp_path),
        "TMPDIR": str(nodefile.parent),
        "GPUS_PER_NODE": "4",
        "DEVICE": "cpu",
        "VENV_DIR": str(tmp_path / "none"),  # so that a dry run asks nobody for the flags and sizes
        "KILL_AT": "none",
    }


@pytest.mark.parametrize("nodes", NODEFILES.values(), ids=NODEFILES)
def test_hosts_are_those_of_the_job(nodes: str, tmp_path: Path) -> None:
    commands = dry_run(TINY, tmp_path, **job(tmp_path, nodes))
    assert len(commands) == 2
    for node, command in enumerate(commands):
        assert (command.option("--nnodes"), command.option("--nproc_per_node")) == ("2", "4")
        assert command.option("--node_rank") == str(node)
        assert command.option("--master_addr") == "nid001.local"


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    given = job(tmp_path, NODEFILES["mpiprocs"]) | {"PYTHON": "py", "WORK_DIR": str(tmp_path)}
    too_few = run_script(TINY, tmp_path, **given, DP="4")
    said = f"PBS_NODEFILE={given['PBS_NODEFILE']}: names 2 hosts, and 16 ranks"
    assert too_few.returncode == 2 and said in too_few.stderr
    gone = run_script(TINY, tmp_path, **given | {"PBS_NODEFILE": "/nowhere"})
    assert gone.returncode == 2 and "PBS_NODEFILE=/nowhere: cannot be read" in gone.stderr


def test_a_job_of_one_node_meets_on_it(tmp_path: Path) -> None:
    """By a name with a domain that the node itself may not be able to resolve."""
    name = os.uname().nodename
    given = job(tmp_path, (name if "." in name else f"{name}.cluster.invalid") + "\n")
    (command,) = dry_run(TINY, tmp_path, **given | {"GPUS_PER_NODE": "8"})
    assert command.option("--master_addr") == "127.0.0.1"


def test_a_hostfile_comes_first(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("nodeA slots=8\n")
    given = job(tmp_path, NODEFILES["mpiprocs"]) | {"HOSTFILE": str(hostfile), "GPUS_PER_NODE": "8"}
    (command,) = dry_run(TINY, tmp_path, **given)
    assert command.option("--nnodes") == "1"
