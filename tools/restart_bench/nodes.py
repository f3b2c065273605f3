"""Devices and nodes: how many there are, which of them a launch takes, and whether it fits them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.parallel.topology import Layout

from . import slurm
from .environment import for_shell_line
from .errors import SettingsError
from .launcher_entries import BY_SLURM, FROM_ONE_NODE, IN_PLACE
from .presets import largest_scripted, start_of
from .schedulers import Scheduler, listing_hosts
from .settings import Settings, whole_number


@dataclass(frozen=True)
class Hosts:
    """The hosts that a file lists, and the slots of each; none if there is no file.

    `named_by`: the setting that the file comes from, as NAME=VALUE; `file`: where DeepSpeed's launcher reads them.
    """

    names: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    named_by: str = ""
    file: str = ""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a launch. `spares`: how many of `hosts`, beyond `number`, wait to replace a lost one.

    `gpus_seen`: on all of them, as far as this machine knows; `seen_where` says where.
    """

    hosts: Hosts
    number: int
    gpus_per_node: int
    spares: int
    master_addr: str
    coordinator_addr: str
    gpus_seen: int
    seen_where: str

    @property
    def used(self) -> int:
        return self.number + self.spares

    def over_hosts(self, given: Settings) -> bool:
        """Whether ranks are started on other hosts through ssh."""
        names = self.hosts.names
        return bool(names) and not given.node_rank and (self.used > 1 or not is_this_host(names[0]))


def ranks_of(layout: Layout) -> str:
    """For messages."""
    return f"{layout.world_size} ranks ({layout})"


def gpus_of(environ: Mapping[str, str]) -> int:
    """GPUs of this machine that a process with this environment would see."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], env=dict(environ), capture_output=True, text=True).stdout
    except OSError:
        listed = ""
    gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    return gpus if visible is None else min(gpus, len([name for name in visible.split(",") if name]))


def is_this_host(name: str) -> bool:
    """By the full name, or by its first part if one of the two names is not full."""
    mine = os.uname().nodename
    return name in ("localhost", "127.0.0.1", mine, mine.partition(".")[0]) or (
        "." not in mine and name.partition(".")[0] == mine
    )


def device_of(given: Settings, layout: Layout, runs_on_cpu: bool, model: str, local_gpus: int) -> str:
    """cuda or cpu: only presets made for CPUs run on them, if there are too few GPUs."""
    if given.device == "cpu" and not runs_on_cpu:
        raise SettingsError(f"DEVICE=cpu: the {model} preset needs GPUs; run_tiny_tp2_pp2_dp2.sh runs on CPUs")
    if given.device:
        return given.device
    return "cpu" if runs_on_cpu and not given.hostfile and local_gpus < layout.world_size else "cuda"


def hosts_of(given: Settings, environ: Mapping[str, str], launcher: str) -> Hosts:
    """The hosts of HOSTFILE: lines `HOST slots=N`, or only host names; without it those that a scheduler lists."""
    if not given.hostfile:
        scheduler = None if given.node_rank or launcher in BY_SLURM else listing_hosts(environ)
        return _hosts_of_job(given, environ, scheduler) if scheduler else Hosts()
    named_by = f"HOSTFILE={given.hostfile}"
    if launcher in BY_SLURM:
        raise SettingsError(f"{named_by}: srun starts the ranks on the hosts of the allocation; leave it out")
    text = _read(named_by, given.hostfile, "")
    found: dict[str, int] = {}
    for line in text.splitlines():
        host, _, rest = line.strip().replace("\t", " ").partition(" ")
        rest = rest.strip()
        if not host or host.startswith("#"):
            continue
        if host in found:
            raise SettingsError(f"{named_by}: names {host} twice; give each host one line, with all of its slots")
        slots = re.fullmatch(r"slots=(0|[1-9][0-9]*)", rest)
        if slots:
            found[host] = int(slots[1])
        elif rest:
            raise SettingsError(f"{named_by}: '{host} {rest}' is not of the form HOST slots=N")
        elif launcher in FROM_ONE_NODE:
            raise SettingsError(
                f"{named_by}: '{host}' has no slots=N, without which DeepSpeed's launcher reads no line; add it"
            )
        else:
            found[host] = int(given.gpus_per_node or 8)
    if not found:
        raise SettingsError(f"{named_by}: names no host; write lines like: node01 slots=4")
    return Hosts(tuple(found), tuple(found.values()), named_by, given.hostfile)


def _hosts_of_job(given: Settings, environ: Mapping[str, str], scheduler: Scheduler) -> Hosts:
    """The file names a host once for each of its tasks; if each once, the slots are unknown."""
    listed = environ[scheduler.host_file]
    named_by = f"{scheduler.host_file}={listed}"
    tasks: dict[str, int] = {}
    for line in _read(named_by, listed, "; set HOSTFILE to a list of the job's hosts").split("\n"):
        if line.strip():
            host = line.split()[0]
            tasks[host] = tasks.get(host, 0) + 1
    if not tasks:
        raise SettingsError(f"{named_by}: names no host; write lines like: node01 slots=4")
    known = max(tasks.values()) > 1
    slots = tuple(count if known else int(given.gpus_per_node or 8) for count in tasks.values())
    file = Path(environ.get("TMPDIR") or "/tmp") / f"hosts.{environ[scheduler.job_id]}"
    return Hosts(tuple(tasks), slots, named_by, str(file))


def _read(named_by: str, file: str, advice: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        raise SettingsError(f"{named_by}: cannot be read{advice}") from None


def nodes_of(
    given: Settings, environ: Mapping[str, str], launcher: str, device: str, layout: Layout, local_gpus: int
) -> Nodes:
    """The nodes that the layout takes."""
    hosts = hosts_of(given, environ, launcher)
    per_node = min(_per_node(given, hosts, device, layout, local_gpus), layout.world_size)
    number = -(-layout.world_size // per_node)
    spares = spares_of(given, hosts, launcher, number)
    if hosts.names:
        seen = sum(min(slots, per_node) for slots in hosts.slots)
        where = f"{len(hosts.names)} hosts in {hosts.named_by.partition('=')[2]}"
    else:
        nodes = int(given.nnodes or 1)
        seen = nodes * local_gpus
        where = f"NNODES={nodes} x {local_gpus} on {os.uname().nodename}"
    master = given.master_addr or _master(given, environ, launcher, hosts, number + spares)
    return Nodes(hosts, number, per_node, spares, master, given.coordinator_addr or os.uname().nodename, seen, where)


def _per_node(given: Settings, hosts: Hosts, device: str, layout: Layout, local_gpus: int) -> int:
    if given.gpus_per_node:
        return int(given.gpus_per_node)
    if hosts.names:
        if whole_number(str(hosts.slots[0])) is not None:
            raise SettingsError(f"GPUS_PER_NODE={hosts.slots[0]}: give a whole number, at least 1")
        return hosts.slots[0]
    if device == "cpu":
        return layout.world_size
    return local_gpus or (layout.tp if layout.world_size % 8 else 8)


def spares_of(given: Settings, hosts: Hosts, launcher: str, number: int) -> int:
    """How many hosts wait to replace a lost one."""
    further = max(len(hosts.names) - number, 0)
    if given.spares:
        if int(given.spares) > further:
            raise SettingsError(
                f"SPARES={given.spares}: {hosts.named_by or 'HOSTFILE='} names {further} hosts beyond the {number} of "
                "the layout; add hosts"
            )
        return int(given.spares)
    return further if launcher in IN_PLACE and given.max_restarts not in ("", "0") else 0


def _master(given: Settings, environ: Mapping[str, str], launcher: str, hosts: Hosts, used: int) -> str:
    """Where rank 0 runs."""
    first = hosts.names[0] if hosts.names else ""
    if used == 1 and is_this_host(first or "localhost"):
        return "127.0.0.1"
    if launcher in BY_SLURM and environ.get("SLURM_JOB_ID"):
        return slurm.first_host(environ)
    if launcher in BY_SLURM:
        if not given.dry_run:
            raise slurm.no_allocation()
        return "FIRST_HOST_OF_THE_ALLOCATION"
    return first or os.uname().nodename


def check_nodes(given: Settings, nodes: Nodes, layout: Layout) -> None:
    """Refuse numbers of nodes and ranks that do not go together."""
    per_node, number = nodes.gpus_per_node, nodes.number
    if layout.world_size % per_node:
        raise SettingsError(
            f"{ranks_of(layout)} do not fill nodes of {per_node} GPUs; set GPUS_PER_NODE to a divisor of "
            f"{layout.world_size}"
        )
    take = f"{ranks_of(layout)} with {per_node} per node take {number} nodes"
    if given.node_rank and not (re.fullmatch("[0-9]+", given.node_rank) and int(given.node_rank) < number):
        raise SettingsError(f"NODE_RANK={given.node_rank}: {take}; number them from 0 to {number - 1}")
    if given.nnodes and int(given.nnodes) != number:
        raise SettingsError(
            f"NNODES={given.nnodes}: {take}; set NNODES={number} or "
            f"GPUS_PER_NODE={layout.world_size // int(given.nnodes)}"
        )


def check_slots(nodes: Nodes, layout: Layout) -> None:
    """Refuse hosts without slots for their ranks, also on CPUs."""
    hosts, per_node = nodes.hosts, nodes.gpus_per_node
    if len(hosts.names) < nodes.number:
        raise SettingsError(
            f"{hosts.named_by}: names {len(hosts.names)} hosts, and {ranks_of(layout)} with {per_node} per node take "
            f"{nodes.number}; add hosts, or set GPUS_PER_NODE"
        )
    for name, slots in list(zip(hosts.names, hosts.slots, strict=True))[: nodes.used]:
        if slots < per_node:
            raise SettingsError(
                f"{hosts.named_by}: {name} has slots={slots}, and every host gets {per_node} ranks; give it more "
                "slots, leave it out, or set GPUS_PER_NODE"
            )


def check_gpus(environ: Mapping[str, str], nodes: Nodes, layout: Layout, command: str) -> None:
    """Refuse more ranks than there are GPUs. Within an allocation Slurm assigns and refuses them itself."""
    if nodes.gpus_seen >= layout.world_size:
        return
    advice = "Name"
    if environ.get("SLURM_JOB_ID") and not nodes.hosts.names:
        advice = "In this Slurm allocation LAUNCHER=srun starts the ranks on all of its nodes. Otherwise name"
    raise SettingsError(
        f"needs {layout.world_size} GPUs ({layout}), sees {nodes.gpus_seen} ({nodes.seen_where}). {advice} the nodes "
        "in HOSTFILE=<file of 'HOST slots=N' lines>, or start this script on every node with NNODES, NODE_RANK and "
        f"MASTER_ADDR set.{advise_largest(nodes.gpus_seen)} DRY_RUN=1 prints the commands. Without these GPUs: "
        f"'MODE=replay DP={layout.dp} {command}' does the I/O of this layout's checkpoints, "
        f"'MODE=scaled DP={layout.dp} {command}' trains, kills and resumes all {layout.world_size} ranks on CPUs "
        "with a narrow model."
    )


def advise_largest(ranks: int) -> str:
    """A sentence that names the largest preset with at most so many ranks; nothing if there is none."""
    preset = largest_scripted(ranks)
    if preset is None:
        return ""
    return f" The largest preset that fits: DP={ranks // (preset.tp * preset.pp)} {for_shell_line(start_of(preset))}."


def check_node_rank(given: Settings, nodes: Nodes, launcher: str) -> None:
    """Refuse a missing NODE_RANK where the user must start this script on the other nodes."""
    if nodes.number == 1 or nodes.hosts.names or launcher in BY_SLURM or given.command_to:
        return
    if launcher in FROM_ONE_NODE:
        raise SettingsError(f"LAUNCHER={launcher} on {nodes.number} nodes: name them in HOSTFILE")
    is_master = nodes.master_addr == os.uname().nodename
    if not given.node_rank or (is_master and given.node_rank != "0"):
        raise SettingsError(
            f"{nodes.number} nodes without HOSTFILE: start this script on each with NODE_RANK=0..{nodes.number - 1} "
            "and MASTER_ADDR=<host of node 0>"
        )


def unused_hosts(nodes: Nodes) -> str | None:
    """The hosts of the file on which nothing will run; None if there are none."""
    unused = nodes.hosts.names[nodes.used :]
    return f"not used of {nodes.hosts.named_by}: {' '.join(unused)}" if unused else None
