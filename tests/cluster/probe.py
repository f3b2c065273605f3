"""Whether a cluster of namespaces can be had on this machine: it is tried, not guessed."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

INSTALL = "tests/install_system_packages.sh"
PROGRAMS = ("unshare", "nsenter", "setpriv", "mount", "ip", "tc", "ssh", "ssh-keygen", "sshd", "pdsh")
SLURM_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "scontrol")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What a node is made of, in namespaces that end with the command.
_TRIED = """
mount -t proc proc /proc
mount -t tmpfs -o size=1m none /dev/shm
mount -t tmpfs none /run
mount --bind /etc/hosts /etc/hosts
hostname probe
ip link add br0 type bridge
ip link add v0 type veth peer name v1
ip link set v0 master br0
ip link set lo up
ip address add 10.77.0.1/24 dev v1
tc qdisc replace dev v0 root tbf rate 1mbit burst 32kbit latency 400ms
unshare --pid --net --fork true
"""
_NAMESPACES = ("--pid", "--net", "--mount", "--uts", "--ipc", "--fork", "--kill-child")


@functools.cache
def why_no_cluster() -> str | None:
    """Why there can be no cluster here, with what helps; None if there can."""
    if os.geteuid() != 0:
        return "no cluster here: it takes root"
    missing = [program for program in PROGRAMS if shutil.which(program, path=SYSTEM_PATH) is None]
    if missing:
        return f"no cluster here: {' '.join(missing)} missing; as root: CI=true bash {INSTALL}"
    temporary = Path(tempfile.gettempdir()).resolve()
    if temporary.is_relative_to("/dev/shm") or temporary.is_relative_to("/run"):
        return f"no cluster here: every node has its own {temporary}; set TMPDIR to a directory on a disk"
    tried = _in_namespaces(_TRIED)
    if tried.returncode != 0:
        return f"no cluster here: this machine allows no namespaces, bridges or mounts ({tried.stderr.strip()})"
    return None


@functools.cache
def why_no_slurm() -> str | None:
    """Why there can be no Slurm on the nodes of a cluster, with what helps; None if there can."""
    missing = [program for program in SLURM_PROGRAMS if shutil.which(program, path=SYSTEM_PATH) is None]
    if missing:
        return f"no cluster here: {' '.join(missing)} missing; as root: CI=true bash {INSTALL}"
    return why_no_cluster()


@functools.cache
def has_time_namespaces() -> bool:
    """Whether a node can have a monotonic clock of its own."""
    command = ["unshare", "--time", "--monotonic", "1", "--fork", "true"]
    return subprocess.run(command, capture_output=True).returncode == 0


def _in_namespaces(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", *_NAMESPACES, "bash", "-ec", script], env={"PATH": SYSTEM_PATH}, capture_output=True, text=True
    )
