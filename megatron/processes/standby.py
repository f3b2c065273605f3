"""Standby ranks: those of the next start, which the launcher forks ahead of a failure; how both tell each other.

When the first rank of a host has done its first step, it asks the launcher for the standby ranks of the next start,
by a signal. They set themselves up as far as no checkpoint is needed, and each waits for a byte in a pipe of its
own: the launcher writes RELEASE once no rank of the start before is left. With --standby-load that rank asks again
after each save, and the launcher writes LOAD. Standard library only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from megatron.processes.process_name import name_process

VARIABLE = "MEGATRON_STANDBY"  # of a standby rank: the descriptor that it is released by
LAUNCHER_VARIABLE = "MEGATRON_STANDBY_LAUNCHER"  # of a rank that may ask for standby ranks: the launcher's pid
LOADS_VARIABLE = "MEGATRON_STANDBY_LOADS"  # of all ranks with --standby-load
ASK_SIGNAL = signal.SIGRTMIN  # SIGUSR1 and SIGUSR2 may be those of --exit-signal
RELEASE, LOAD = b"r", b"l"
SETS_UP, LOADS, WAITS = "standby-setup", "standby-load", "standby"  # names of its process, as ps shows it


def is_standby() -> bool:
    """Whether this rank was started ahead of a failure."""
    return VARIABLE in os.environ


def wait_for_release(load_ahead: Callable[[], object] | None = None) -> None:
    """In a standby rank that is set up: return when it is to take its place. Raises SystemExit if it never will.

    `load_ahead` is called first, and for each LOAD: as often in every rank.
    """
    command = LOAD
    while command != RELEASE:
        if load_ahead is not None:
            name_process(LOADS)
            load_ahead()
        name_process(WAITS)
        command = os.read(int(os.environ[VARIABLE]), 1)
        if not command:  # the launcher is gone
            raise SystemExit(1)
    name_process(Path(f"/proc/{os.getppid()}/comm").read_text().strip())


def launcher_to_ask() -> int | None:
    """The launcher, if this rank is to ask it for standby ranks; it is told of once, and None from then on."""
    launcher = os.environ.pop(LAUNCHER_VARIABLE, None)
    if launcher is None or os.environ.get("LOCAL_RANK") != "0" or os.getppid() != int(launcher):
        return None
    return int(launcher)
