"""What the JSON of `ckpt-replay` says beside its saves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Replayed:
    """A replay: `ranks` of the `world_size` ranks of a layout, each with `share` of its bytes, on `hosts` hosts.

    `hosts`: None if it is not recorded.

    `values`: engine -> metric -> one value per repeat, of what a trace has no metric for: loads by the state of the
    page cache, and memory. `storage`: where the replay wrote, with the file system. `conditions`: options and the
    machine, by the names that the JSON has. `not_measured`: engine -> metric -> why it has no values.
    """

    storage: str
    ranks: int
    world_size: int
    hosts: int | None
    share: float
    values: dict[str, dict[str, list[float]]]
    conditions: dict[str, str]
    not_measured: dict[str, dict[str, str]]

    @property
    def label(self) -> str | None:
        """What a reader of any figure must know; None if every rank was replayed with all of its bytes."""
        parts = [f"{self.ranks} of {self.world_size} ranks"] if self.ranks < self.world_size else []
        parts += [f"{100 * self.share:.3g} % of the bytes of a rank"] if self.share < 1 else []
        return f"a replay of {', '.join(parts)}" if parts else None
