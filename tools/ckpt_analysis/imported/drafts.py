"""A save that the reader of a log collects, line by line."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from ..model.imported_run import ImportedSave, Printed, Range
from .fastpersist import FileStatistics


@dataclass
class SaveDraft:
    """What the log has said about one save so far."""

    step: int
    begun: bool = False  # the log has the line of its begin; else only its files were printed
    tag: str | None = None
    completed: bool = False
    scheduled: bool = False
    call: Range | None = None
    waits_s: list[float] = field(default_factory=list)
    drains_s: list[float] = field(default_factory=list)  # after the training
    calls_s: dict[str, float] = field(default_factory=dict)  # file -> time of the engine's call for it
    written: dict[str, FileStatistics] = field(default_factory=dict)
    printed: Printed | None = None
    first: datetime | None = None
    last: datetime | None = None

    def seen_at(self, time: datetime | None) -> None:
        """A dated line of this save."""
        if time is not None:
            self.first = self.first or time
            self.last = time

    def finish(self, world_size: int, ends_are_known: bool) -> ImportedSave:
        """The save. Bytes are given only if the shards of all `world_size` ranks were counted.

        `ends_are_known`: a completed save would have a line that says so. Else one is judged only by a timer, which
        is printed when the call has returned on all ranks.
        """
        shards = {entry.shard for entry in self.written.values()} - {None}
        counted = self.written and len(shards) == world_size
        completed: bool | None = self.completed or (not self.begun and bool(counted))
        if not completed and self.begun and not ends_are_known:
            completed = True if self.call is not None and not self.scheduled else None
        times = self.calls_s or {path: entry.write_s for path, entry in self.written.items()}
        slowest = max(times, key=lambda name: times[name], default=None)
        return ImportedSave(
            step=self.step,
            tag=self.tag,
            completed=completed,
            scheduled=self.scheduled,
            call=self.call,
            wait=_range(self.waits_s),
            drain=_range(self.drains_s),
            num_files=len(self.calls_s) or (len(self.written) if counted else None) or None,
            bytes=sum(entry.bytes for entry in self.written.values()) if counted else None,
            slowest_file=slowest.rsplit("/", 1)[-1] if slowest else None,
            slowest_file_s=times[slowest] if slowest else None,
            printed=self.printed,
        )


def _range(seconds: list[float]) -> Range | None:
    return Range(max(seconds), min(seconds)) if seconds else None
