"""Small host-side agreements between all ranks: one Python object each, over gloo, never over the device.

One ControlPlane is for one thread: collectives of two threads on one group would mix.
"""

from __future__ import annotations

from typing import Any

from restart_trace.under_way import RANKS, UnderWay

_AGREEMENT = "agreement of all ranks"


class AgreementLostError(RuntimeError):
    """The ranks can no longer agree: one has ended, or took longer than --distributed-timeout-minutes."""


class ControlPlane:
    """Gather and broadcast of small objects. `group` is a gloo group over all ranks; None: the default one."""

    def __init__(self, rank: int, world_size: int, group: Any = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group
        self.given_up = False

    def gather(self, item: Any) -> list[Any] | None:
        """Items of all ranks, by rank, on rank 0; None elsewhere. RuntimeError if a rank is gone, as below."""
        if self.world_size == 1:
            return [item]
        import torch.distributed as dist

        self._check_open()

        items: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        with UnderWay(RANKS, _AGREEMENT):
            dist.gather_object(item, items, dst=0, group=self._group)
        return items

    def broadcast(self, item: Any) -> Any:
        """Rank 0's item, on every rank."""
        if self.world_size == 1:
            return item
        import torch.distributed as dist

        self._check_open()
        box = [item]
        with UnderWay(RANKS, _AGREEMENT):
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def agree(self, error: str | None) -> list[tuple[int, str]]:
        """Exchange success or failure: every rank gets [(rank, error)] of those that failed."""
        gathered = self.gather(error)
        failed = [(r, e) for r, e in enumerate(gathered) if e is not None] if gathered is not None else None
        return self.broadcast(failed)

    def give_up(self) -> None:
        """Close the connections of the group, so that ranks that wait for this one fail at once.

        Called when an agreement has failed: gloo tells of a rank that is gone only to those that talk with it. No
        agreement can be made afterwards. Does nothing to the default group, which is not ours alone.
        """
        import torch.distributed as dist

        group, self._group, self.given_up = self._group, None, True
        if group is not None:
            dist.destroy_process_group(group)

    def _check_open(self) -> None:
        if self.given_up:
            raise AgreementLostError(
                "an earlier agreement between the ranks has failed: a rank has ended, or took longer than "
                "--distributed-timeout-minutes"
            )
