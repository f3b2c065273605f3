"""The faults: signals to real processes, a full disk, damaged files, a failing object store; which are refused when."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.config.uris import URI_FORM, Location, ObjectStore, ObjectUri
from megatron.startup.injected_faults import DEVICE_ERROR_SIGNAL, EXCEPTION_SIGNAL

from .injection_points import MID_RETURN, InjectionPoint
from .launch import DrillError, Launch
from .nodes import NODE_FAULTS, RANK_FAULTS, LaunchOnNodes
from .plan import IN_PROCESS, RELAUNCH
from .storage_proxy import SLOW


def _last_rank(signum: int) -> Callable[[Launch], int]:
    return lambda launch: launch.send(signum, launch.ranks()[-1:])


def _kill_all(launch: Launch) -> int:
    return launch.kill(Launch.of_ranks)


DISK_FULL = "disk-full"
DAMAGE = ("truncate", "bitflip")  # of the newest checkpoint, once all ranks have been killed
STOPPED = "rank-stopped"
ON_NODES = (*NODE_FAULTS, STOPPED)
_STORAGE = "storage-fault:"  # followed by the fault of storage_proxy.FAULTS that each request to the store then gets
STORAGE_FAULTS = tuple(
    _STORAGE + fault for fault in ("drop", "delay", "500", "503", "truncate", "etag", "first-byte", "rate-limit")
)
HOST, NODES = "host", "nodes"


@dataclass(frozen=True)
class Fault:
    """`send`: injects a fault that is a signal. `soaks`: those that inject it, on one HOST or on several NODES.

    `not_in_soaks`: why none does. `place`: class of the place that the checkpoints must be at; None: any.
    `soaks_not_at`: injection points at which no soak injects it. `matrix_at`: those at which the matrix does, of faults
    for which the injection point matters little; empty: all.
    """

    send: Callable[[Launch], int] | None = None
    soaks: tuple[str, ...] = ()
    not_in_soaks: str = ""
    soaks_not_at: tuple[str, ...] = ()
    matrix_at: tuple[str, ...] = ()
    place: type[Path] | type[ObjectUri] | None = None


# A damaged pickle may make the unpickler raise any error, so a load treats an error as damage and continues with the
# checkpoint before.
_TAKEN_FOR_DAMAGE = ("mid-load",)
# Until its handlers are installed, SIGTERM ends a rank and not the launch.
_NO_HANDLERS = ("mid-startup", "mid-load")
_OF_FILES = ("mid-save-write", "mid-load")  # in which files are written or read


FAULTS = {
    "sigkill-one": Fault(_last_rank(signal.SIGKILL), (HOST, NODES)),
    "sigkill-all": Fault(_kill_all, (HOST,)),
    "sigkill-launcher": Fault(
        lambda launch: launch.send(signal.SIGKILL, launch.launcher()),
        (HOST,),
        matrix_at=("mid-step", "mid-save-commit", *_OF_FILES),
    ),
    "sigkill-node": Fault(lambda launch: launch.kill(Launch.everything), (HOST,)),
    "sigterm": Fault(lambda launch: launch.send(signal.SIGTERM, launch.ranks()), (HOST,), soaks_not_at=_NO_HANDLERS),
    "sigstop": Fault(_last_rank(signal.SIGSTOP), (HOST,)),
    "exception": Fault(_last_rank(EXCEPTION_SIGNAL), (HOST,), soaks_not_at=_TAKEN_FOR_DAMAGE),
    # On CPUs it is an exception.
    "device-error": Fault(
        _last_rank(DEVICE_ERROR_SIGNAL), (HOST,), soaks_not_at=_TAKEN_FOR_DAMAGE, matrix_at=("mid-step", *_OF_FILES)
    ),
    DISK_FULL: Fault(soaks=(HOST,), matrix_at=("mid-step", "mid-save-write"), place=Path),
    # Files are damaged after all ranks have ended, and at most points one kind of damage suffices.
    **dict.fromkeys(DAMAGE, Fault(_kill_all, (HOST,))),
    "truncate": Fault(_kill_all, (HOST,), matrix_at=("mid-save-write", "after-commit")),
    **dict.fromkeys(
        STORAGE_FAULTS,
        Fault(
            not_in_soaks="may leave objects in a bucket, which tests/object_storage_kills.py checks",
            matrix_at=_OF_FILES,
            place=ObjectUri,
        ),
    ),
    **dict.fromkeys(ON_NODES, Fault(soaks=(NODES,))),
    "link-slow": Fault(soaks=(NODES,), matrix_at=("mid-step", "mid-startup", *_OF_FILES)),
    "disk-slow": Fault(
        not_in_soaks="not every kernel can slow down the disk of a single node", matrix_at=("mid-step", *_OF_FILES)
    ),
}

ENDS_THE_LAUNCH = ("sigkill-launcher", "sigkill-node", "sigterm")  # which a soak then launches again
HANGS = ("sigstop",)  # no process ends by itself; detected by the time that passes without an iteration
MAY_END_WELL = ("sigterm",)  # with --exit-signal-handler the ranks save and end with 0
# An error during a save makes it fail on all ranks, and training continues with the previous checkpoint.
MAY_FAIL_A_SAVE = (DISK_FULL, "exception", "device-error", *STORAGE_FAULTS)
SLOWS = ("link-slow", "disk-slow", *(_STORAGE + fault for fault in SLOW))  # training continues


def proxy_fault(fault: str) -> str | None:
    """The fault of storage_proxy.FAULTS that `fault` injects into requests to the store; None for other faults."""
    return fault.removeprefix(_STORAGE) if fault in STORAGE_FAULTS else None


def store_endpoint(store: ObjectStore) -> str:
    """The URL of the server that the proxy forwards to. Raises DrillError if the environment names none."""
    if store.endpoint is None:
        raise DrillError(
            f"{store.endpoints[-1]}: is not set, and for {_STORAGE}... the drill puts a proxy between the job and the "
            "server at that URL; set it"
        )
    return store.endpoint


def inject(fault: str, launch: Launch) -> int:
    """Inject a fault by signals. Returns the number of processes that it reached; raises DrillError if that is 0."""
    if isinstance(launch, LaunchOnNodes):
        return launch.inject(fault)
    send = FAULTS[fault].send
    assert send is not None, fault  # the drill fills disks and disturbs stores itself
    if (reached := send(launch)) == 0:
        raise DrillError(f"--fault {fault}: no rank that lives has written a trace; it was injected into none")
    return reached


def refusal(fault: str, point: InjectionPoint, supervisor: str, *, on_nodes: bool = False) -> str | None:
    """Why this combination is refused; None if it is valid. `on_nodes`: --nodes-command is given."""
    if on_nodes and fault not in (*ON_NODES, *RANK_FAULTS):
        reached = ", ".join(dict.fromkeys((*ON_NODES, *RANK_FAULTS)))
        return f"--fault {fault} reaches no other node; with --nodes-command use one of {reached}"
    if not on_nodes and fault in ON_NODES:
        return f"--fault {fault} is a fault of a node; use --supervisor launch and --nodes-command"
    if proxy_fault(fault) is not None and point.text == "mid-save-commit":
        return (
            f"--fault {fault} --at {point.text}: by then the manifest is written, which is the commit; choose another "
            "injection point"
        )
    if fault in ("sigkill-node", "sigkill-launcher") and supervisor != RELAUNCH:
        return f"--fault {fault} ends the launcher that --supervisor {supervisor} needs; use --supervisor relaunch"
    if point.stage == MID_RETURN and (supervisor != IN_PROCESS or FAULTS[fault].send is None or fault in DAMAGE):
        return (
            f"--fault {fault} --at {point.text}: is for signals to ranks that return; use --supervisor in-process and "
            "a fault such as sigkill-one, or choose another injection point"
        )
    if fault == DISK_FULL and point.during_restart:
        return f"--fault disk-full --at {point.text}: nothing is saved then; choose an injection point within training"
    return None


def place_refusal(fault: str, checkpoints: Location | None) -> str | None:
    """Why the fault cannot be injected where the checkpoints are; None if it can."""
    place = FAULTS[fault].place
    if place is None or isinstance(checkpoints, place):
        return None
    if place is ObjectUri:
        return f"--fault {fault}: a fault of object storage; give --checkpoints {URI_FORM}"
    return f"--fault {fault} --checkpoints {checkpoints}: object storage has no disk to fill; give a directory"


def commits_needed(fault: str, first: bool, saves_each: int = 1) -> int:
    """Number of saves that a launch must commit before the fault: one to resume from, and one more if one is damaged.

    `saves_each`: number of saves until one of them survives the fault.
    """
    return saves_each * ((1 if first else 0) + (1 if fault in DAMAGE else 0))
