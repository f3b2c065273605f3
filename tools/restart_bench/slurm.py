"""Slurm's allocation, as its variables describe it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping

from .errors import SettingsError


def no_allocation() -> SettingsError:
    return SettingsError("LAUNCHER=srun: no allocation; start within one, by salloc or sbatch")


def _node_list(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")


def number_of_nodes(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "")


def _host_names(environ: Mapping[str, str]) -> list[str] | None:
    """The hosts of the allocation; None without scontrol, which lists them."""
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if scontrol is None:
        return None
    command = [scontrol, "show", "hostnames", _node_list(environ)]
    return subprocess.run(command, env=dict(environ), stdout=subprocess.PIPE, text=True).stdout.split()


def first_host(environ: Mapping[str, str]) -> str:
    """The host where Slurm starts rank 0. It may differ from this one: salloc runs on a login node."""
    nodes, hosts = _node_list(environ), _host_names(environ)
    if hosts is None:
        raise SettingsError(
            f"scontrol, which lists the hosts of SLURM_JOB_NODELIST={nodes}, is not on PATH; set MASTER_ADDR to the "
            "first of them"
        )
    if not hosts:
        raise SettingsError(f"scontrol names no host of SLURM_JOB_NODELIST={nodes}; set MASTER_ADDR")
    return hosts[0]


def check_allocation(environ: Mapping[str, str], ranks: str, nodes: int, per_node: int, device: str) -> None:
    """Refuse variables that contradict each other, and an allocation without what the layout needs.

    `ranks`: the layout, for messages; `per_node`: ranks on each of `nodes` nodes.
    """
    allocated, step = number_of_nodes(environ), environ.get("SLURM_NNODES", "")
    layout = f"{ranks} with {per_node} per node take {nodes} nodes"
    if allocated and not re.fullmatch("[1-9][0-9]*", allocated):
        raise SettingsError(f"SLURM_JOB_NUM_NODES={allocated}: must be a number of nodes; unset what you have set")
    if step and step != allocated:
        raise SettingsError(
            f"SLURM_JOB_NUM_NODES={allocated} and SLURM_NNODES={step} contradict each other; unset what you have set"
        )
    if allocated and int(allocated) < nodes:
        raise SettingsError(
            f"SLURM_JOB_NUM_NODES={allocated}: {layout}; allocate them (--nodes {nodes}), or set GPUS_PER_NODE"
        )
    _check_processors(environ, layout, nodes, per_node)
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    if device != "cpu" and re.fullmatch("[0-9]+", gpus) and int(gpus) < per_node:
        raise SettingsError(
            f"SLURM_GPUS_ON_NODE={gpus}: {layout} with a GPU for each rank; allocate them (--gpus-per-node "
            f"{per_node}), or set GPUS_PER_NODE"
        )
    hosts = _host_names(environ) if allocated and _node_list(environ) else None
    if hosts is not None and len(hosts) != int(allocated):
        raise SettingsError(
            f"SLURM_JOB_NODELIST={_node_list(environ)} names {len(hosts)} hosts, SLURM_JOB_NUM_NODES={allocated}; "
            "unset what you have set"
        )


def _check_processors(environ: Mapping[str, str], layout: str, nodes: int, per_node: int) -> None:
    """Refuse too few nodes with a processor for each of their ranks: srun's message names neither layout nor nodes."""
    each = environ.get("SLURM_JOB_CPUS_PER_NODE", "")
    if not each or environ.get("SLURM_OVERCOMMIT"):
        return
    fit = 0
    for part in each.split(","):  # as 8(x2),4
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if found is None:
            raise SettingsError(
                f"SLURM_JOB_CPUS_PER_NODE={each}: must be numbers of processors, as 8(x2),4; unset what you have set"
            )
        fit += int(found[2] or 1) if int(found[1]) >= per_node else 0
    if fit < nodes:
        raise SettingsError(
            f"SLURM_JOB_CPUS_PER_NODE={each}: {layout} with a processor for each rank, and the allocation has {fit} "
            f"such nodes; allocate them (--nodes {nodes} --ntasks-per-node {per_node}), or set GPUS_PER_NODE"
        )
