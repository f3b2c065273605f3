"""Small host-side agreements between all ranks: one Python object each, over gloo, never over the device."""

from __future__ import annotations

from typing import Any


class ControlPlane:
    """Gather and broadcast of small objects. `group` is a gloo group over all ranks; None: the default one."""

    def __init__(self, rank: int, world_size: int, group: Any = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group

    def gather(self, item: Any) -> list[Any] | None:
        """Items of all ranks, by rank, on rank 0; None elsewhere."""
        if self.world_size == 1:
            return [item]
        import torch.distributed as dist

        items: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(item, items, dst=0, group=self._group)
        return items

    def broadcast(self, item: Any) -> Any:
        """Rank 0's item, on every rank."""
        if self.world_size == 1:
            return item
        import torch.distributed as dist

        box = [item]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def agree(self, error: str | None) -> list[tuple[int, str]]:
        """Exchange success or failure: every rank gets [(rank, error)] of those that failed."""
        gathered = self.gather(error)
        failed = [(r, e) for r, e in enumerate(gathered) if e is not None] if gathered is not None else None
        return self.broadcast(failed)
