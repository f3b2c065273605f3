"""What strikes: signals to real processes, a disk that is full, files that are damaged, a store that fails; and what
makes no sense."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from megatron.startup.injected_faults import DEVICE_ERROR_SIGNAL, EXCEPTION_SIGNAL

from .launch import DrillError, Launch
from .moments import Moment
from .nodes import NODE_FAULTS, RANK_FAULTS, LaunchOnNodes
from .plan import RELAUNCH
from .storage_proxy import SLOW


def _last_rank(signum: int) -> Callable[[Launch], int]:
    return lambda launch: launch.send(signum, launch.ranks()[-1:])


def _kill_all(launch: Launch) -> int:
    return launch.kill(Launch.of_ranks)


SIGNALS: dict[str, Callable[[Launch], int]] = {
    "sigkill-one": _last_rank(signal.SIGKILL),
    "sigkill-all": _kill_all,
    "sigkill-launcher": lambda launch: launch.send(signal.SIGKILL, launch.launcher()),
    "sigkill-node": lambda launch: launch.kill(Launch.everything),
    "sigterm": lambda launch: launch.send(signal.SIGTERM, launch.ranks()),
    "sigstop": _last_rank(signal.SIGSTOP),
    "exception": _last_rank(EXCEPTION_SIGNAL),
    "device-error": _last_rank(DEVICE_ERROR_SIGNAL),
}
DISK_FULL = "disk-full"
DAMAGE = ("truncate", "bitflip")  # of the newest checkpoint, once all ranks have been killed
STOPPED = "rank-stopped"
ON_NODES = (*NODE_FAULTS, STOPPED)
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # the first that is set counts
_STORAGE = "storage-fault:"  # and what befalls each request to the store from then on
STORAGE_FAULTS = tuple(
    _STORAGE + what for what in ("drop", "delay", "500", "503", "truncate", "etag", "first-byte", "rate-limit")
)
FAULTS = (*SIGNALS, DISK_FULL, *DAMAGE, *STORAGE_FAULTS, *ON_NODES)

HANGS = ("sigstop",)  # nothing ends by itself: found by the time that passes without an iteration
MAY_END_WELL = ("sigterm",)  # with --exit-signal-handler the ranks save and end with 0
# A save that an error strikes fails on all ranks, and training goes on with the previous checkpoint.
MAY_FAIL_A_SAVE = (DISK_FULL, "exception", "device-error", *STORAGE_FAULTS)
SLOWS = ("link-slow", "disk-slow", *(_STORAGE + what for what in SLOW))  # training goes on


def of_storage(fault: str) -> str | None:
    """What befalls requests to the store, one of storage_proxy.FAULTS; None for a fault of something else."""
    return fault.removeprefix(_STORAGE) if fault in STORAGE_FAULTS else None


def store_endpoint() -> str:
    """The URL of the server that the proxy stands before. Raises DrillError if the environment names none."""
    for name in ENDPOINT_VARIABLES:
        if os.environ.get(name):
            return os.environ[name]
    raise DrillError(
        f"--fault {_STORAGE}...: {ENDPOINT_VARIABLES[1]} is not set: a proxy of the drill goes between the job and the "
        "server that it names; set it"
    )


def inject(fault: str, launch: Launch) -> int:
    """Cause a fault by signals; how many processes it struck. Raises DrillError if there was none to strike."""
    if isinstance(launch, LaunchOnNodes):
        return launch.harm(fault)
    struck = (_kill_all if fault in DAMAGE else SIGNALS[fault])(launch)
    if struck == 0:
        raise DrillError(f"--fault {fault}: no rank that lives has written a trace; it was injected into none")
    return struck


def refusal(fault: str, moment: Moment, supervisor: str, *, on_nodes: bool = False) -> str | None:
    """Why these make no sense together; None if they do. `on_nodes`: --nodes-command is given."""
    if on_nodes and fault not in (*ON_NODES, *RANK_FAULTS):
        reached = ", ".join(dict.fromkeys((*ON_NODES, *RANK_FAULTS)))
        return f"--fault {fault} reaches no other node; with --nodes-command there are {reached}"
    if not on_nodes and fault in ON_NODES:
        return f"--fault {fault} is of a node; use --supervisor launch and --nodes-command"
    if of_storage(fault) is not None and moment.text == "mid-save-commit":
        return f"--fault {fault} --at {moment.text}: the manifest is written then, and that is the commit; use another"
    if fault in ("sigkill-node", "sigkill-launcher") and supervisor != RELAUNCH:
        return f"--fault {fault} ends what restarts the ranks with --supervisor {supervisor}; use --supervisor relaunch"
    if fault == DISK_FULL and moment.strikes_a_restart:
        return f"--fault disk-full --at {moment.text}: nothing is saved then; use a moment within training"
    return None


def commits_needed(fault: str, first: bool, saves_each: int = 1) -> int:
    """Saves that a launch must have done before the fault: to have a checkpoint to resume from, and one more if one is
    damaged. `saves_each`: how many saves it takes until one is where the fault leaves it."""
    return saves_each * ((1 if first else 0) + (1 if fault in DAMAGE else 0))
