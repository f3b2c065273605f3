"""What a fault has left to resume from: the checkpoints on storage, and saves in memory that a launcher here holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron.processes.memory_slots import Slot, slots_held_by
from restart_trace.schema import LOCAL_MEMORY, STORAGE

from .checkpoints import Checkpoints, flip_bit, truncate
from .launch import DrillError


class Left(NamedTuple):
    """The newest state that is whole. `tier`: where; None if all saves are on storage alone."""

    step: int
    tier: str | None


class KeptSaves:
    """The saves that the launcher with this process id keeps for all ranks of the job, which run on this host.

    They are looked at while no rank of it writes any.
    """

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._damaged: set[str] = set()  # names of saves

    def newest_step(self) -> int | None:
        """Iteration of the newest save that every rank has whole and nobody has damaged; None without one."""
        with self._slots() as slots:
            found = self._newest(slots)
        return None if found is None else found[1]

    def damage(self, fault: str) -> str:
        """Damage the last rank's part of the newest save; what a message must call it.

        Raises DrillError without one.
        """
        with self._slots() as slots:
            newest = self._newest(slots)
            if newest is None:
                raise DrillError(f"--fault {fault}: no save in memory is whole on all ranks; inject the fault later")
            self._damaged.add(newest[0])
            flat = [slot for mine in slots for slot in mine]
            number = max(i for i, slot in enumerate(flat) if (slot.record() or {}).get("save") == newest[0])
            (truncate if fault == "truncate" else flip_bit)(Path(f"/proc/self/fd/{flat[number].data}"))
        return f"slot {number} of host memory"

    def _newest(self, slots: list[list[Slot]]) -> tuple[str, int] | None:
        """(name, iteration)"""
        ranks = [{r["save"]: r["step"] for slot in mine if (r := slot.record()) is not None} for mine in slots]
        common = set(ranks[0]).intersection(*ranks) - self._damaged if ranks else set()
        return max(((save, ranks[0][save]) for save in common), key=lambda found: found[1], default=None)

    @contextlib.contextmanager
    def _slots(self) -> Iterator[list[list[Slot]]]:
        try:
            slots = slots_held_by(self._launcher)
        except OSError:  # it has ended, and with it what it held
            slots = []
        try:
            yield slots
        finally:
            for mine in slots:
                for slot in mine:
                    slot.close()


def newest_left(checkpoints: Checkpoints, kept: KeptSaves | None) -> Left:
    """What the ranks must resume from. `kept`: None if the engine keeps no saves. Raises DrillError if nothing is left.

    Memory comes before storage of the same iteration.
    """
    if kept is None:
        return Left(checkpoints.newest_step(), None)
    in_memory = kept.newest_step()
    stored = max((found.step for found in checkpoints.whole()), default=-1)
    if in_memory is not None and in_memory >= stored:
        return Left(in_memory, LOCAL_MEMORY)
    return Left(checkpoints.newest_step(), STORAGE)
