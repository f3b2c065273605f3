"""What a job can resume from after a fault: checkpoints on storage, and saves that launchers hold in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron.peers.memory_slots import Slot, slots_held_by
from restart_trace.schema import LOCAL_MEMORY, PEER, STORAGE

from .checkpoints import Checkpoints, flip_bit, truncate
from .launch import DrillError, RankLocation

_ANSWER_S = 60.0  # a living process answers at once, except on a busy machine


class ResumeSource(NamedTuple):
    """The newest complete save. `tier` says where it is; None if all saves are on storage only.

    PEER: some ranks find it in the memory of their own host, the others as a copy in the memory of another host.
    """

    step: int
    tier: str | None


class MemorySaves(Protocol):
    """Saves in memory. Both methods must be called while no rank is saving."""

    def newest(self) -> ResumeSource | None:
        """The newest save that is complete for every rank; None if there is none."""
        ...

    def damage(self, fault: str) -> str:
        """Damage the newest save. Returns the name by which a message must report it. Raises DrillError."""
        ...


class NodeMemorySaves:
    """The saves in the memory of the hosts of a launch, except the `lost` ones.

    `ranks`: locations of the ranks of the cycle that failed. On each host the process that holds saves (megatron.peers)
    is asked what it has, of its own ranks and as copies of others; a rank that loads asks the same process.
    """

    def __init__(self, ranks: Mapping[int, RankLocation], lost: Collection[str]) -> None:
        self._ranks = ranks
        self._lost = lost

    def newest(self) -> ResumeSource | None:
        locations = list(self._ranks.values())
        held = {location.host: self._held(location) for location in locations if location.host not in self._lost}
        steps = {save["save"]: save["step"] for saves in held.values() for save in saves}
        for name in sorted(steps, key=lambda save: -steps[save]):
            holders = [self._holders(held, name, location) for location in locations]
            if all(holders):
                own = all(location.host in found for location, found in zip(locations, holders, strict=True))
                return ResumeSource(steps[name], LOCAL_MEMORY if own else PEER)
        return None

    def damage(self, fault: str) -> str:
        raise DrillError(f"--fault {fault} reaches no other node")

    def _held(self, location: RankLocation) -> list[dict[str, Any]]:
        # Imported here, since they need packages for checksums that an installation of the tools alone does not have.
        from megatron.peers.client import Peer, ask
        from megatron.peers.wire import PeerError

        address, _, port = location.copies.rpartition(":")
        if not address:
            raise DrillError(
                f"{location.host}: its ranks have recorded no process that holds saves in memory; use a preset over "
                "HOSTFILE with LAUNCHER=fork and MAX_RESTARTS"
            )
        try:
            answer = ask(Peer(location.host, address, int(port)), _ANSWER_S, launch=location.launch_id, ask="list")
        except PeerError as error:
            raise DrillError(f"cannot read which saves are in the memory of a running node: {error}") from None
        return answer["kept"]

    def _holders(self, held: Mapping[str, list[dict[str, Any]]], name: str, location: RankLocation) -> set[str]:
        """Hosts that have this save for the coordinates of a rank."""
        return {
            host
            for host, saves in held.items()
            for save in saves
            if save["save"] == name
            and tuple(save["place"][axis] for axis in ("tp", "pp", "dp")) == location.coordinates
        }


class LauncherMemorySaves:
    """The saves that the launcher with this process id holds for all ranks of a job on this host."""

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._damaged: set[str] = set()  # names of saves

    def newest(self) -> ResumeSource | None:
        with self._slots() as slots:
            found = self._newest(slots)
        return None if found is None else ResumeSource(found[1], LOCAL_MEMORY)

    def damage(self, fault: str) -> str:
        """Damage the last rank's part of the newest save."""
        with self._slots() as slots:
            newest = self._newest(slots)
            if newest is None:
                raise DrillError(f"--fault {fault}: no save in memory is complete on all ranks; inject the fault later")
            self._damaged.add(newest[0])
            flat = [slot for mine in slots for slot in mine]
            number = max(i for i, slot in enumerate(flat) if (slot.record() or {}).get("save") == newest[0])
            (truncate if fault == "truncate" else flip_bit)(Path(f"/proc/self/fd/{flat[number].data}"))
        return f"slot {number} of host memory"

    def _newest(self, slots: list[list[Slot]]) -> tuple[str, int] | None:
        """(name, iteration) of the newest save that all ranks have and that was not damaged; None if there is none."""
        ranks = [{r["save"]: r["step"] for slot in mine if (r := slot.record()) is not None} for mine in slots]
        common = set(ranks[0]).intersection(*ranks) - self._damaged if ranks else set()
        return max(((save, ranks[0][save]) for save in common), key=lambda found: found[1], default=None)

    @contextlib.contextmanager
    def _slots(self) -> Iterator[list[list[Slot]]]:
        try:
            slots = slots_held_by(self._launcher)
        except OSError:  # the launcher has ended, and its slots with it
            slots = []
        try:
            yield slots
        finally:
            for mine in slots:
                for slot in mine:
                    slot.close()


def newest_resume_source(checkpoints: Checkpoints, in_memory: MemorySaves | None) -> ResumeSource:
    """What the ranks must resume from; memory is preferred to storage of the same iteration.

    `in_memory`: None if the engine keeps no saves in memory. Raises DrillError if nothing is left.
    """
    if in_memory is None:
        return ResumeSource(checkpoints.newest_step(), None)
    newest = in_memory.newest()
    stored = max((found.step for found in checkpoints.complete()), default=-1)
    if newest is not None and newest.step >= stored:
        return newest
    return ResumeSource(checkpoints.newest_step(), STORAGE)
