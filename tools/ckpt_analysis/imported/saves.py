"""What the lines of a log have said of one save, or of one load, so far."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime

from ..model.imported_run import ImportedLoad, ImportedSave, Printed, Range

_SHARD = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_STEP_OF_TAG = re.compile(r"global_step(\d+)$")


def step_of(tag: str) -> int | None:
    """The step in a tag of DeepSpeed's form."""
    found = _STEP_OF_TAG.search(tag)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class FileStatistics:
    """One file as its writer counted it; `write_s` is the time in write calls."""

    path: str
    bytes: int
    write_s: float

    @property
    def shard(self) -> tuple[int, int] | None:
        """(data-parallel rank, model-parallel rank) of an optimizer shard; None for other files."""
        match = _SHARD.search(self.path)
        return (int(match[1]), int(match[2])) if match else None


@dataclass
class SaveDraft:
    """What the log has said about one save so far."""

    step: int | None
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
    is_asked: bool = False  # DeepSpeed's engine has said that it is about to save
    asked: datetime | None = None  # when
    is_ready: bool = False  # it has said that the save is ready
    ready: datetime | None = None  # when it last did, on any rank

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
        completed: bool | None = self.completed or self.is_ready or (not self.begun and bool(counted))
        if not completed and self.begun and not ends_are_known:
            completed = True if self.call is not None and not self.scheduled else None
        times = self.calls_s or {path: entry.write_s for path, entry in self.written.items()}
        by_dates = _between(self.asked, self.ready) if self.call is None else None
        slowest = max(times, key=lambda name: times[name], default=None)
        return ImportedSave(
            step=self.step,
            tag=self.tag,
            completed=completed,
            scheduled=self.scheduled,
            call=self.call or by_dates,
            dated=by_dates is not None,
            wait=_range(self.waits_s),
            drain=_range(self.drains_s),
            num_files=len(self.calls_s) or (len(self.written) if counted else None) or None,
            bytes=sum(entry.bytes for entry in self.written.values()) if counted else None,
            slowest_file=slowest.rsplit("/", 1)[-1] if slowest else None,
            slowest_file_s=times[slowest] if slowest else None,
            printed=self.printed,
        )


@dataclass
class LoadDraft:
    """The files of a load that DeepSpeed's engine names, when it begins and ends to read each."""

    step: int | None = None
    named: bool = False
    first: datetime | None = None
    last: datetime | None = None

    def seen(self, path: str, time: datetime | None) -> None:
        parts = path.split("/")
        self.named, self.step = True, step_of(parts[-2]) if len(parts) > 1 else None
        self.first, self.last = self.first or time, time or self.last

    def finish(self) -> list[ImportedLoad]:
        """The load, if a file was named."""
        if not self.named:
            return []
        call = _between(self.first, self.last)
        return [ImportedLoad(self.step, True, call, dated=call is not None)]


def _between(first: datetime | None, last: datetime | None) -> Range | None:
    """The time between two dated lines, if the log has them in this order."""
    if first is None or last is None or last < first:
        return None
    return Range((last - first).total_seconds(), None)


def _range(seconds: list[float]) -> Range | None:
    return Range(max(seconds), min(seconds)) if seconds else None
