"""The samples for --replacement-hook ask the autoscaling group, or Slurm, for another node: with stand-ins for both."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.script_helpers import ROOT

HOOKS = ROOT / "docs" / "examples" / "replacement_hooks"
TOLD = ["ip-10-0-0-7", "3", "no heartbeat for 2 s"]  # as the coordinator starts a hook
STAND_IN = """#!/bin/bash
printf '%s\\n' "$(basename "$0") $*" >>"$CALLS"
env | grep ^SLURM_ | sed "s/^/$(basename "$0") has /" >>"$CALLS"
case "$1" in
describe-instances | ec2) echo "$INSTANCE" ;;
show) echo "JobId=41 JobName=train Account=physics NodeList=ip-10-0-0-[5-8] Partition=gpu Reservation=(null)" ;;
esac
[[ $(basename "$0") != salloc ]] || exec "${@:$AFTER_OPTIONS}"
[[ $(basename "$0") != srun ]] || exec "${@:2}"
"""


def run(
    hook: str, tmp_path: Path, told: Sequence[str] = TOLD, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The hook with stand-ins first in PATH, and what they were called with."""
    for name in ("aws", "scontrol", "salloc", "srun", "restart-launch"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    calls.touch()
    around = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls), **environment}
    found = subprocess.run([HOOKS / hook, *told], env=around, capture_output=True, text=True)
    return found, calls.read_text().splitlines()


def test_the_instance_of_a_lost_host_is_replaced_by_its_group(tmp_path: Path) -> None:
    found, (asked, replaced) = run("autoscaling_group.sh", tmp_path, INSTANCE="i-0abc12")
    assert found.returncode == 0, found.stderr
    assert "Name=private-dns-name,Values=ip-10-0-0-7,ip-10-0-0-7.*" in asked
    assert replaced == (
        "aws autoscaling terminate-instance-in-auto-scaling-group --instance-id i-0abc12 "
        "--no-should-decrement-desired-capacity"
    )
    assert "terminates i-0abc12 (ip-10-0-0-7): no heartbeat for 2 s" in found.stderr


@pytest.mark.parametrize("instance", ["", "None", "i-0abc12\ti-0abc13"])
def test_nothing_is_terminated_unless_one_instance_has_the_name(instance: str, tmp_path: Path) -> None:
    found, calls = run("autoscaling_group.sh", tmp_path, INSTANCE=instance)
    assert found.returncode == 1 and len(calls) == 1
    assert f"one instance should have this private DNS name; found: {instance or 'none'}" in found.stderr


def test_the_coordinators_own_host_is_not_terminated(tmp_path: Path) -> None:
    host = socket.gethostname()
    found, calls = run("autoscaling_group.sh", tmp_path, [host, "0", "health check failed"], INSTANCE="i-0abc12")
    assert found.returncode == 1 and calls == []
    assert f"{host} is the host of the coordinator, which would end with it" in found.stderr


def test_slurm_starts_an_agent_on_another_node(tmp_path: Path) -> None:
    """In the partition and account of the job, and with nothing of its variables but where Slurm's configuration is."""
    job = {"SLURM_JOB_ID": "41", "SLURM_NNODES": "4", "SLURM_CONF": "/etc/slurm/slurm.conf", "COORDINATOR_PORT": "4321"}
    agent = "restart-launch --nproc-per-node 8 pretrain_gpt.py --save ckpt"
    found, calls = run("slurm.sh", tmp_path, AGENT=agent, AFTER_OPTIONS="6", **job)
    assert found.returncode == 0, found.stderr
    said = [line for line in calls if " has " not in line]
    assert said[0] == "scontrol show job 41 --oneliner"
    assert said[1].startswith(
        "salloc --nodes=1 --exclude=ip-10-0-0-7 --job-name=in_place_of_ip-10-0-0-7 --partition=gpu --account=physics "
        "srun --ntasks=1"
    )
    where = f"--coordinator {socket.gethostname()}:4321 --node-rank 3"
    assert said[-1] == f"restart-launch {where} --nproc-per-node 8 pretrain_gpt.py --save ckpt"
    has = {line for line in calls if line.startswith("salloc has ")}
    assert has == {"salloc has SLURM_CONF=/etc/slurm/slurm.conf"}


def test_without_the_agents_command_slurm_is_asked_for_nothing(tmp_path: Path) -> None:
    found, calls = run("slurm.sh", tmp_path, SLURM_JOB_ID="41", COORDINATOR_PORT="4321")
    assert found.returncode != 0 and calls == []
    assert "AGENT: set it to the command of an agent" in found.stderr
