"""Which settings have an effect together: one that has none is refused by name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from .errors import SettingsError
from .launcher_entries import BY_SLURM, FROM_ONE_NODE, IN_PLACE, ON_EACH_NODE, setting_of
from .nodes import Nodes
from .settings import COORDINATOR, LAUNCH, REPLAY, TRAINING, Settings, check_names, names

DRILLED_MODES = ("restart", "scaled")
_ONLY_FROM_ONE_NODE = f"has an effect only with {setting_of(FROM_ONE_NODE)} over HOSTFILE; leave it out"
_MODES = ("train", *DRILLED_MODES, "replay")


def refuse(given: Settings, why: str, refused: Iterable[str]) -> None:
    """Raise SettingsError if one of these settings was given."""
    for name in refused:
        if given.value(name):
            raise SettingsError(f"{name}={given.value(name)}: {why}")


def restarts_in_place(given: Settings) -> bool:
    return given.max_restarts not in ("", "0")


def injects_fault(given: Settings) -> bool:
    """Whether the settings ask for a fault that is injected here: ranks are killed, and resume."""
    if given.mode not in DRILLED_MODES or given.command_to or given.kill_at == "none":
        return False
    return not given.save_dir or not os.path.lexists(Path(given.save_dir) / "latest")


def check_given(environ: Mapping[str, str], given: Settings, *, as_job: bool = False) -> None:
    """Refuse names that are no settings, and settings that the MODE ignores. `as_job`: by submit.sh."""
    check_names(environ)
    _check_mode(given)
    if not as_job:
        refuse(
            given, "submit.sh runs ranks with the Python of an image; use that, or SKIP_SETUP=1 PYTHON=...", ["IMAGE"]
        )


def _check_mode(given: Settings) -> None:
    """Refuse settings that the MODE ignores."""
    mode = given.mode
    if mode not in _MODES:
        raise SettingsError(f"MODE={mode}: use train, restart, replay or scaled")
    if mode == "replay":
        if given.kill_at not in ("", "none"):
            raise SettingsError(f"KILL_AT={given.kill_at}: MODE=replay injects no fault; use MODE=restart or scaled")
        if given.command_to:
            raise SettingsError("COMMAND_TO: MODE=replay trains nothing; leave it out")
        why = "MODE=replay trains nothing, and starts its processes itself, on this node; leave it out"
        refuse(given, why, ["TIME_LIMIT", *names(of=(TRAINING, LAUNCH, COORDINATOR))])
        refuse(given, "MODE=replay writes its trace to its own directory; leave it out", ["TRACE_DIR"])
        if given.dry_run == "plan":
            raise SettingsError("DRY_RUN=plan: shows what a training needs; with MODE=replay use DRY_RUN=1")
    else:
        why = f"has an effect only with MODE=replay, and this is MODE={mode}; leave it out"
        refuse(given, why, names(of=(REPLAY,)))
    if mode == "train":
        _check_fault(given)
    if mode in ("replay", "scaled") and given.device not in ("", "cpu"):
        raise SettingsError(f"DEVICE={given.device}: MODE={mode} runs on CPUs; leave it out")
    if injects_fault(given):
        why = f"MODE={mode} writes its trace to a new directory; leave it out, or train without a fault: KILL_AT=none"
        refuse(given, why, ["TRACE_DIR"])
    elif mode in DRILLED_MODES:
        _check_fault(given)


def _check_fault(given: Settings) -> None:
    """Refuse settings of faults where none is injected here."""
    if given.mode == "train":
        why = "MODE=train injects no fault; use MODE=restart"
    elif given.command_to:
        why = "with COMMAND_TO another program launches the command and injects faults; leave it out"
    elif given.kill_at == "none":
        why = "with KILL_AT=none there is one launch, without a limit; leave it out"
    else:
        why = (
            f"SAVE_DIR={given.save_dir} holds a checkpoint, which is resumed without a fault; set another SAVE_DIR, or "
            "leave this out"
        )
    if given.kill_at != "none":
        refuse(given, why, ["KILL_AT"])
    refuse(given, why, ["TIME_LIMIT"])


def fork_instead(launcher: str) -> str:
    """Where Slurm starts the ranks: how megatron.launch can be used there."""
    if launcher not in BY_SLURM:
        return ""
    return ". In a Slurm allocation LAUNCHER=fork takes a HOSTFILE: docs/cluster.md, 'megatron.launch in an allocation'"


def check_launcher(given: Settings, launcher: str) -> None:
    """Refuse settings that the LAUNCHER ignores on any nodes."""
    if launcher not in IN_PLACE:
        refuse(given, f"only {setting_of(IN_PLACE)} restarts in place{fork_instead(launcher)}", ["MAX_RESTARTS"])
    if launcher not in IN_PLACE or not restarts_in_place(given):
        if given.spares not in ("", "0"):
            why = f"only {setting_of(IN_PLACE)} with MAX_RESTARTS uses spare nodes; leave it out"
            refuse(given, why, ["SPARES"])
        why = f"has an effect only with {setting_of(IN_PLACE)} and MAX_RESTARTS; set both, or leave it out"
        refuse(given, why, names(of=(COORDINATOR,)))
    if launcher not in FROM_ONE_NODE:
        refuse(given, _ONLY_FROM_ONE_NODE, ["HOST_GRACE"])
    if launcher in BY_SLURM:
        refuse(given, "srun starts the ranks of all nodes; leave it out", ["NODE_RANK"])
    if not restarts_in_place(given):
        refuse(given, "needs MAX_RESTARTS; set it, or leave this out", ["IN_PROCESS_RESTART"])
    if not given.standby:
        return
    if not restarts_in_place(given) or given.hostfile:
        refuse(given, "needs MAX_RESTARTS, and one node (no HOSTFILE)", ["STANDBY"])
    refuse(given, "both decide which ranks follow a failure; leave out this or STANDBY", ["IN_PROCESS_RESTART"])
    why = "standby ranks rendezvous while running ranks use this port; leave it out, and each start takes a free port"
    refuse(given, why, ["MASTER_PORT"])


def coordinates(given: Settings, launcher: str, nodes: Nodes) -> bool:
    """Whether the launch has a coordinator, which decides which nodes train and starts all ranks again."""
    return (
        launcher in IN_PLACE
        and bool(nodes.hosts.names)
        and nodes.used > 1
        and restarts_in_place(given)
        and not given.node_rank
    )


def check_launch(given: Settings, launcher: str, engine: str, device: str, nodes: Nodes) -> None:
    """Refuse settings that a launch on these nodes ignores."""
    if engine == "memory" and launcher not in IN_PLACE:
        raise SettingsError(
            f"ENGINE=memory: megatron.launch holds the memory of its saves; use {setting_of(IN_PLACE)}, or another "
            f"engine{fork_instead(launcher)}"
        )
    if device != "cpu":
        why = "standby ranks would take memory of the devices that train; leave it out on CUDA devices"
        refuse(given, why, ["STANDBY"])
        refuse(given, "ranks on CUDA devices are not known to return; leave it out there", ["IN_PROCESS_RESTART"])
    if coordinates(given, launcher, nodes):
        why = (
            "with MAX_RESTARTS over HOSTFILE the ranks of each start meet on the host of its node 0, by its name in "
            "HOSTFILE; leave it out (COORDINATOR_ADDR: where the hosts reach this one)"
        )
        refuse(given, why, ["MASTER_ADDR"])
    else:
        why = "has an effect only with MAX_RESTARTS over several hosts of HOSTFILE; leave it out"
        refuse(given, why, names(of=(COORDINATOR,)))
        if given.spares != "0":
            refuse(given, why, ["SPARES"])
        if nodes.number > 1 and restarts_in_place(given):
            raise SettingsError(
                f"MAX_RESTARTS={given.max_restarts}: launchers that are started on each of {nodes.number} nodes do not "
                "agree on restarts; name the hosts in HOSTFILE, without NODE_RANK, or leave it out"
            )
    if not nodes.over_hosts(given):
        refuse(given, _ONLY_FROM_ONE_NODE, ["HOST_GRACE"])
    if launcher in FROM_ONE_NODE and nodes.over_hosts(given) and given.megatron_launch_secret:
        raise SettingsError(
            "MEGATRON_LAUNCH_SECRET: DeepSpeed's launcher would put it on command lines, which every user of the hosts "
            f"can read; use {setting_of(ON_EACH_NODE)}, or leave it out"
        )
    if not given.node_rank or nodes.number == 1:
        why = "has an effect only if you start the launch on each of several nodes with NODE_RANK; leave it out"
        refuse(given, why, ["MEET_TIMEOUT"])
    elif launcher in FROM_ONE_NODE:
        raise SettingsError(
            f"NODE_RANK={given.node_rank}: LAUNCHER={launcher} starts the ranks of all nodes from one; name them in "
            "HOSTFILE, and leave it out"
        )
