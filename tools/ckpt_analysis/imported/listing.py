"""The listing of a checkpoint that a job script printed after the training: `ls -l`, `du`, or both."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime

from ..model.imported_run import Listing

# permissions, links, owner, group, size, month, day, time or year, name
_LS = re.compile(
    r"^(?P<kind>[-d])[-rwxsStT]{9}[.+@]?\s+\d+\s+\S+\s+\S+\s+(?P<size>\d+(?:\.\d)?[KMGTPE]?)\s+"
    r"(?P<time>[A-Z][a-z]{2}\s+\d{1,2}\s+(?:\d{2}:\d{2}|\d{4}))\s+(?P<name>\S+)$"
)
_DU = re.compile(r"^(?P<size>\d+(?:\.\d)?[KMGTPE]?)\t(?P<path>\S+)$")
_CHECKPOINT_FILE = re.compile(r"(?:model|optim)_states|\.pt\b|\.safetensors\b|\.distcp\b|^zero_|^layer_|^mp_rank_")

_SIZE = re.compile(r"^(\d+)(?:\.(\d))?([KMGTPE]?)$")
_UNITS = "KMGTPE"


@dataclass
class ListingDraft:
    """Lines of listings as they come."""

    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    times: set[str] = field(default_factory=set)
    usage: dict[str, tuple[int, int]] = field(default_factory=dict)

    def feed(self, line: str) -> bool:
        """Take a line if it is one of a listing of checkpoint files."""
        if match := _LS.match(line):
            if not _CHECKPOINT_FILE.search(match["name"]):
                return False
            if match["kind"] == "d":
                self.directories.add(match["name"])
            else:
                self.files[match["name"]] = size_range(match["size"])
            self.times.add(match["time"])
            return True
        if match := _DU.match(line):
            self.usage[match["path"].rstrip("/")] = size_range(match["size"])
            return True
        return False

    def finish(self, saves: list[tuple[int, datetime, datetime]]) -> Listing | None:
        """The listing; `saves` are (step, first, last time) of each save that the log dates."""
        if not (self.files or self.directories or self.usage):
            return None
        low = high = None
        if self.files and not self.directories:  # the size of a directory is not that of what is in it
            low, high = map(sum, zip(*self.files.values(), strict=True))
        used_low, used_high = _top(self.usage) or (None, None)
        step = _step_of(self.times, saves)
        return Listing(len(self.files), len(self.directories), low, high, used_low, used_high, step)


def _top(usage: dict[str, tuple[int, int]]) -> tuple[int, int] | None:
    """Usage of the one directory that contains all others listed; None if there is no such one."""
    for path, size in usage.items():
        if all(other == path or path == "." or other.startswith(f"{path}/") for other in usage):
            return size
    return None


def _step_of(times: set[str], saves: list[tuple[int, datetime, datetime]]) -> int | None:
    """The one save during whose minutes every file was last written; None if none or several fit."""
    minutes = [_minute(text) for text in times]
    fitting = [
        step
        for step, first, last in saves
        if minutes and all(time and _key(first) <= time <= _key(last) for time in minutes)
    ]
    return fitting[0] if len(fitting) == 1 else None


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def _minute(text: str) -> tuple[int, int, int, int] | None:
    month, day, clock = text.split()
    if month not in _MONTHS or ":" not in clock:  # `ls` prints the year alone of old files
        return None
    hour, minute = clock.split(":")
    return _MONTHS.index(month) + 1, int(day), int(hour), int(minute)


def _key(time: datetime) -> tuple[int, int, int, int]:
    return time.month, time.day, time.hour, time.minute


def size_range(text: str) -> tuple[int, int]:
    """(low, high) of the bytes that `text` stands for, such as "8.8G": both ends possible.

    GNU coreutils round up with -h, to a tenth below ten units and to a whole unit above (units of 1024). A plain
    number is exact. Raises ValueError if `text` is no such size.
    """
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size as `ls -lh` or `du -h` prints it")
    whole, tenth, unit = match.groups()
    if not unit:
        return int(whole), int(whole)
    scale = 1024 ** (_UNITS.index(unit) + 1)
    tenths = 10 * int(whole) + int(tenth or 0)
    step_tenths = 1 if tenth else 10
    high = tenths * scale // 10
    low = (tenths - step_tenths) * scale // 10 + 1
    return max(0, low), high
