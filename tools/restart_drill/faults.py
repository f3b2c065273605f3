"""What strikes: faults that are caused from outside, by signals to real processes."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tools.restart_drill.launch import DrillError, Launch


def _kill_one(launch: Launch) -> int:
    victim = launch.ranks()[-1:]
    return launch.send(signal.SIGKILL, victim)


def _stop_one(launch: Launch) -> int:
    return launch.send(signal.SIGSTOP, launch.ranks()[-1:])


def _terminate(launch: Launch) -> int:
    return launch.send(signal.SIGTERM, launch.ranks())


FAULTS: dict[str, Callable[[Launch], int]] = {
    "sigkill-one": _kill_one,
    "sigkill-all": lambda launch: launch.kill(Launch.of_ranks),
    "sigkill-node": lambda launch: launch.kill(Launch.everything),
    "sigterm": _terminate,
    "sigstop": _stop_one,
}
HANGS = ("sigstop",)  # nothing ends by itself: found by the time that passes without an iteration
MAY_END_WELL = ("sigterm",)  # with --exit-signal-handler the ranks save and end with 0


def inject(fault: str, launch: Launch) -> int:
    """Cause `fault`; how many processes it struck. Raises DrillError if there was none to strike."""
    struck = FAULTS[fault](launch)
    if struck == 0:
        raise DrillError(
            f"--fault {fault}: no process of the command has RANK in its environment; none was struck"
        )
    return struck
