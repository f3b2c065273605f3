"""What a fault has left to resume from: the checkpoints on storage, and saves in memory that launchers hold."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron.processes.memory_slots import Slot, slots_held_by
from restart_trace.schema import LOCAL_MEMORY, PEER, STORAGE

from .checkpoints import Checkpoints, flip_bit, truncate
from .launch import DrillError, Place

_ANSWERS_S = 60.0  # a process that lives answers at once, but on a machine that is busy


class Left(NamedTuple):
    """The newest state that is whole. `tier`: where; None if all saves are on storage alone.

    PEER: some ranks find it in the memory of their own hosts, and the others as copies on another one.
    """

    step: int
    tier: str | None


class Kept(Protocol):
    """Saves in memory. They are looked at while no rank writes any."""

    def newest(self) -> Left | None:
        """The newest save that every rank finds whole somewhere; None without one."""
        ...

    def damage(self, fault: str) -> str:
        """Damage the newest save; what a message must call it. Raises DrillError where that cannot be."""
        ...


class KeptOnNodes:
    """The saves that are in the memory of those hosts of a launch that are not lost.

    `ranks`: of the cycle that was struck, by rank. `lost`: hosts. What their own ranks have kept, and what they have
    copies of, is what the process says that holds it on each host (megatron.peers): a rank that loads asks it, too.
    """

    def __init__(self, ranks: Mapping[int, Place], lost: Collection[str]) -> None:
        self._ranks = ranks
        self._lost = lost

    def newest(self) -> Left | None:
        held = {place.host: self._held(place) for place in self._ranks.values() if place.host not in self._lost}
        steps = {save["save"]: save["step"] for saves in held.values() for save in saves}
        for name in sorted(steps, key=lambda save: -steps[save]):
            holders = [self._holders(held, name, place) for place in self._ranks.values()]
            if all(holders):
                own = all(place.host in found for place, found in zip(self._ranks.values(), holders, strict=True))
                return Left(steps[name], LOCAL_MEMORY if own else PEER)
        return None

    def damage(self, fault: str) -> str:
        raise DrillError(f"--fault {fault} reaches no other node")

    def _held(self, place: Place) -> list[dict[str, Any]]:
        # Only here: what they need of checksums is not there where the tools alone are installed.
        from megatron.peers.client import Peer, ask
        from megatron.peers.wire import PeerError

        address, _, port = place.copies.rpartition(":")
        if not address:
            raise DrillError(
                f"{place.host}: its ranks have recorded no process that holds saves in memory; the launch must be that "
                "of a preset over HOSTFILE with LAUNCHER=fork and MAX_RESTARTS"
            )
        try:
            answer = ask(Peer(place.host, address, int(port)), _ANSWERS_S, launch=place.launch_id, ask="list")
        except PeerError as error:
            raise DrillError(f"what is in the memory of a node that is not lost is not known: {error}") from None
        return answer["kept"]

    def _holders(self, held: Mapping[str, list[dict[str, Any]]], name: str, place: Place) -> set[str]:
        """Hosts that have a save of the coordinates of a rank."""
        return {
            host
            for host, saves in held.items()
            for save in saves
            if save["save"] == name and tuple(save["place"][axis] for axis in ("tp", "pp", "dp")) == place.at
        }


class KeptSaves:
    """The saves that the launcher with this process id keeps for all ranks of the job, which run on this host.

    They are looked at while no rank of it writes any.
    """

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._damaged: set[str] = set()  # names of saves

    def newest(self) -> Left | None:
        """The newest save that every rank has whole and nobody has damaged; None without one."""
        with self._slots() as slots:
            found = self._newest(slots)
        return None if found is None else Left(found[1], LOCAL_MEMORY)

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


def newest_left(checkpoints: Checkpoints, kept: Kept | None) -> Left:
    """What the ranks must resume from. `kept`: None if the engine keeps no saves. Raises DrillError if nothing is left.

    Memory comes before storage of the same iteration.
    """
    if kept is None:
        return Left(checkpoints.newest_step(), None)
    in_memory = kept.newest()
    stored = max((found.step for found in checkpoints.whole()), default=-1)
    if in_memory is not None and in_memory.step >= stored:
        return in_memory
    return Left(checkpoints.newest_step(), STORAGE)
